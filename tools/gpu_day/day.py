"""The first hour on a GPU: five calls, each below ten minutes, that write each result at once.

    python3 day.py probe | right | interop | fast | why
    python3 day.py short         probe, right and fast, for 30 minutes in all

``python -m tools.gpu_day`` puts this file in its folder. It needs only Python: missing packages are in the folder too.
Results go to ``$OUT``, a line of JSON each. A worker process goes through its steps and reports each before it begins.
A step that crashes, or is silent for too long, is recorded as failed; a new worker goes on after it. Profilers and
other libraries' kernels run in workers too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Seconds that each call may take: below the ten minutes after which a call is cut.
SECONDS = {"probe": 170, "right": 560, "interop": 240, "fast": 540, "why": 360}
#: The calls of ``short``: they fit into 30 minutes together with the machine's start.
SHORT = ("probe", "right", "fast")
#: Seconds of silence after which a worker is taken to hang. It may compile kernels that the folder lacks.
PATIENCE = 60
SANITIZERS = ("memcheck", "racecheck", "synccheck")
CONTESTANTS = (
    "numkv", "torch SDPA flash_attention", "torch SDPA cudnn_attention", "torch FlexAttention", "FlashInfer",
)  # fmt: skip
PROFILED = r"^(decode B8/(bf16|int8)|prefill P/bf16)$"
#: Minimum tokens of a split to compare, and the lines to time: one sequence, and batches that short splits slow down.
SPLITS, SPLIT = (256, 512, 1024), r"^decode ((T1|A|B8)/bf16|B8/int4)$"


class Worker:
    """A process that goes through steps; a new one goes on after a step that ends it.

    Parameters
    ----------
    name : str
        The worker's name in results.
    command : list of str
        The process's command, which takes ``--from N``, the number of its first step.
    patience : float
        Seconds of silence after which the process is killed.
    """

    def __init__(self, name: str, command: list[str], patience: float = PATIENCE) -> None:
        self.name, self.command, self.patience = name, command, patience
        self.results: list[dict] = []
        self.done = False

    def run(self, until: float, write) -> None:
        """Go through all steps, or as far as the time reaches."""
        at, step, fruitless = 0, "its start", 0
        while time.monotonic() < until and fruitless < 2:
            try:
                process = subprocess.Popen(
                    [*self.command, "--from", str(at)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    errors="replace", start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._note(write, {"name": "its start", "ok": False, "what": str(error)})
                return
            lines: queue.Queue = queue.Queue()
            errors: list[str] = []
            readers = [
                threading.Thread(target=_lines, args=(process.stdout, lines.put), daemon=True),
                threading.Thread(target=_lines, args=(process.stderr, errors.append), daemon=True),
            ]
            for reader in readers:
                reader.start()
            why, open_step, before = "", None, at
            while True:
                wait = min(self.patience, until - time.monotonic())
                try:
                    line = lines.get(timeout=max(0.0, wait))
                except queue.Empty:
                    late = time.monotonic() >= until
                    why = (
                        "the call's time is over" if late else f"no answer in {self.patience:.0f} s"
                    )
                    break
                if line is None:
                    break
                try:
                    found = json.loads(line)
                except ValueError:
                    continue  # what a tool or a library prints
                if not isinstance(found, dict):
                    continue
                if "begin" in found:
                    at, step, open_step = found["number"], found["begin"], found["begin"]
                elif "done" in found:
                    self.done = True
                elif "name" in found:
                    at, open_step = at + 1, None
                    self._note(write, found)
            _end(process)
            for reader in readers:
                reader.join(5)
            said = " ".join("".join(filter(None, errors)).split())[-300:]
            if self.done:
                if process.returncode not in (0, -9):  # a tool's verdict on all that ran
                    what = f"exit {process.returncode}: {said}"
                    self._note(write, {"name": "the tool's verdict", "ok": False, "what": what})
                return
            if open_step is not None or at == before:
                why = why or f"exit {process.returncode}: {said}"
                self._note(write, {"name": open_step or "its start", "ok": False, "what": why})
            fruitless = fruitless + 1 if open_step is None and at == before else 0
            at += open_step is not None
        if not self.done and fruitless < 2:
            self._note(
                write,
                {"name": f"what comes after {step}", "ok": False, "what": "left out: no time"},
            )

    def _note(self, write, found: dict) -> None:
        found = {"worker": self.name, **found}
        self.results.append(found)
        write(found)


def _lines(stream, take) -> None:
    """Call `take` with each line of a stream, and with None at its end."""
    with stream:
        for line in stream:
            take(line)
    take(None)


def _end(process: subprocess.Popen) -> None:
    """End a process and its children, unless it ends by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def workers(call: str, given: argparse.Namespace) -> list[list[Worker]]:
    """Return groups of workers: those of a group run at the same time, groups one after another."""
    python = [sys.executable, "-m", "tools.gpu_day.steps"]
    lines = ["--lines", given.lines, "--seconds", str(given.seconds), "--cold", str(given.cold)]
    if call == "probe":
        return [[Worker("probe", [*python, "probe"], given.patience)]]
    if call == "interop":
        return [
            [Worker("interop", [*python, "interop", "--scale", str(given.scale)], given.patience)]
        ]
    if call == "right":
        n = given.processes
        shares = [
            [*python, "cases", "--only", given.cases, "--share", f"{i}/{n}"] for i in range(n)
        ]
        found = [Worker(f"cases {i}", command, given.patience) for i, command in enumerate(shares)]
        tool = shutil.which("compute-sanitizer")
        for name in SANITIZERS:
            prefix = [
                tool or "compute-sanitizer",
                "--tool",
                name,
                "--error-exitcode",
                "9",
                "--print-limit",
                "5",
            ]
            only = ["cases", "--families", "--only", given.cases]
            found.append(Worker(name, [*prefix, *python, *only], 4 * given.patience))
        return [found]
    if call == "fast":
        command = [*python, "time", *lines, "--contestant"]
        return [[Worker(name, [*command, name], given.patience)] for name in CONTESTANTS]
    out = str(given.out / "profile")
    prefix = [
        "ncu",
        "--clock-control",
        "none",
        "--set",
        "full",
        "-k",
        "regex:.*kernel.*",
        "-c",
        "8",
        "-f",
        "-o",
        out,
    ]
    lines[1] = given.split
    found = []
    for n in SPLITS:
        command = [*python, "time", *lines, "--split", str(n)]
        found.append([Worker(f"numkv, splits of {n}", command, given.patience)])
    lines[1] = given.profiled
    return [*found, [Worker("ncu", [*prefix, *python, "profile", *lines], 3 * given.patience)]]


def prepare(work: Path, write) -> None:
    """Unpack the project, and install the packages that the machine lacks where Python finds them."""
    if not (work / "numkv").exists():
        with tarfile.open(HERE / "numkv.tar.xz") as archive:
            archive.extractall(work / "numkv", filter="data")
    wheels = sorted(HERE.glob("wheels/*.whl"))
    if wheels and not (work / "site").exists():
        _log(write, "pip", [
            sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir",
            "--target", str(work / "site"), *map(str, wheels),
        ], 120)  # fmt: skip
    paths = [str(work / "site"), str(work / "numkv"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("NUMBA_CACHE_DIR", str(work / "cache"))
    os.environ["NUMBA_ENABLE_CUDASIM"] = "0"
    os.environ["PYTHONUNBUFFERED"] = "1"
    if "CUDA_HOME" not in os.environ and shutil.which("nvcc"):
        os.environ["CUDA_HOME"] = str(Path(shutil.which("nvcc")).resolve().parent.parent)
    os.chdir(work / "numkv")


def _log(write, name: str, command: list[str], seconds: float) -> bool:
    """Run a command and write what it printed; return whether it succeeded."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, errors="replace"
        )
        ok, what = done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    except (OSError, subprocess.TimeoutExpired) as error:
        ok, what = False, str(error)
    write(
        {
            "worker": "machine",
            "name": name,
            "ok": ok,
            "what": what,
            "seconds": time.monotonic() - start,
        }
    )
    return ok


def run(call: str, given: argparse.Namespace) -> int:
    """Run one call; return 0 if every result was right."""
    start = time.monotonic()
    until = start + (given.limit or SECONDS[call])
    given.out.mkdir(parents=True, exist_ok=True)
    file, lock = (given.out / f"{call}.jsonl").open("a"), threading.Lock()

    def write(found: dict) -> None:
        with lock:
            file.write(
                json.dumps({"call": call, "at": round(time.monotonic() - start, 1), **found}) + "\n"
            )
            file.flush()

    prepare(given.work, write)
    if call == "probe":
        _log(write, "nvidia-smi", ["nvidia-smi"], 20)
        _log(write, "packages", [sys.executable, "-m", "pip", "list", "--format=freeze"], 30)
    if (HERE / "kernels.zip").exists() and not (given.work / "loaded").exists():
        command = [sys.executable, "-m", "numkv", "warmup", "--load", str(HERE / "kernels.zip")]
        if _log(write, "kernels", command, 60):
            (given.work / "loaded").touch()
    results = []
    for group in workers(call, given):
        threads = [threading.Thread(target=w.run, args=(until, write)) for w in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in group:
            results += worker.results
    file.close()
    wrong = [x for x in results if not x["ok"]]
    print(
        f"{call}: {len(results) - len(wrong)} of {len(results)} right, {time.monotonic() - start:.0f} s"
    )
    for x in wrong[:40]:
        print(f"  {x['worker']}: {x['name']}: {' '.join(str(x['what']).split())[:200]}")
    if call == "probe":
        print("GO" if not wrong else "NEEDS " + _needs(wrong))
    return 1 if wrong else 0


def _needs(wrong: list[dict]) -> str:
    """Return what the probe's errors ask for: the second folder, where Numba or LLVM do not fit."""
    text = " ".join(str(x["what"]) for x in wrong)
    return (
        "the second folder"
        if re.search(r"llvmlite|numba|ModuleNotFound|ImportError", text)
        else "a look"
    )


def main() -> int:
    """Run one call or several."""
    parse = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parse.add_argument("call", choices=[*SECONDS, "short"])
    parse.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parse.add_argument(
        "--work", type=Path, default=Path("/tmp/gpu_day"), help="where things are unpacked"
    )
    parse.add_argument("--limit", type=float, help="seconds of the call, in place of its own")
    parse.add_argument("--processes", type=int, default=max(1, min(15, (os.cpu_count() or 2) - 1)))
    parse.add_argument("--patience", type=float, default=PATIENCE)
    parse.add_argument("--cases", default="", help="a regular expression of cases to run")
    parse.add_argument("--lines", default="", help="a regular expression of lines to time")
    parse.add_argument("--profiled", default=PROFILED, help="lines to profile, as --lines")
    parse.add_argument("--split", default=SPLIT, help="lines to time with other split lengths")
    parse.add_argument("--seconds", type=float, default=0.3, help="for a line")
    parse.add_argument(
        "--cold", type=int, default=512 << 20, help="bytes of a line's buffers, above the L2"
    )
    parse.add_argument("--scale", type=float, default=1.0, help="of the large objects of interop")
    given = parse.parse_args()
    given.out, given.work = given.out.resolve(), given.work.resolve()
    given.work.mkdir(parents=True, exist_ok=True)
    calls = SHORT if given.call == "short" else (given.call,)
    return max([run(call, given) for call in calls])


if __name__ == "__main__":
    sys.exit(main())
