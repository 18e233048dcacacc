"""Pack the folder for the first hour on a GPU; nothing in it needs a network.

    NUMBA_ENABLE_CUDASIM=0 python -m tools.gpu_day FOLDER [--arch sm_90] [--has FILE] [--seconds N]

FOLDER gets ``day.py`` (see `tools.gpu_day.day`), the project, wheels of what the other machine lacks, and machine code
of the kernels that its calls launch, made here without a GPU. FILE lists what the other machine has, a name a line or
as ``pip list --format=freeze`` prints it; a package listed without a version is not packed. Compiling all kernels takes
an hour or two. They stay on disk: ``--seconds`` ends a run in time, and the next one goes on. With ``--second`` the
folder holds the wheels of Numba and LLVM alone, for a machine whose probe asks for them.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import time
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The folder's largest size in bytes: 64 MiB can be carried to the machine.
MOST_BYTES = 50_000_000
#: Packages that the calls need, beside what comes with Python and CUDA.
WHEELS = (
    "numba-cuda==0.30.4", "cuda-core==1.2.2", "cuda-bindings==13.5.0", "cuda-pathfinder==1.9.1", "ml_dtypes==0.5.4",
    "greenlet", "hypothesis", "pytest", "flashinfer-python==0.5.3", "apache-tvm-ffi==0.1.4",
)  # fmt: skip
SECOND = ("numba==0.68.1", "llvmlite==0.50.0")
#: Parts of the project that no call reads.
LEFT_OUT = ("docs/", "perf/results/", "training/", "examples/", ".ci/")
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def archive(to: Path) -> None:
    """Compress the project as it was committed. Uncommitted changes raise: kernels would be of another version."""
    changed = subprocess.run(
        ["git", "status", "--porcelain", "numkv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    if changed.stdout:
        raise SystemExit(
            f"expected numkv as it was committed, got changes; commit them:\n{changed.stdout}"
        )
    whole = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    with (
        tarfile.open(fileobj=BytesIO(whole.stdout)) as old,
        lzma.open(to, "wb", preset=9) as file,
        tarfile.open(fileobj=file, mode="w") as new,
    ):
        for member in old:
            if not member.name.startswith(LEFT_OUT):
                new.addfile(member, old.extractfile(member) if member.isfile() else None)


def lacking(wanted: tuple[str, ...], has: str) -> list[str]:
    """Return the wanted packages that a list of packages lacks.

    Parameters
    ----------
    wanted : tuple of str
        Names, with versions as in ``numba==0.68.1`` or without.
    has : str
        One name a line, with a version or without.
    """
    there: dict[str, str] = {}
    for line in has.split():
        name, _, version = line.rstrip(",").partition("==")
        there[_plain(name)] = version
    found = []
    for package in wanted:
        name, _, version = package.partition("==")
        of = there.get(_plain(name))
        if of is None or (of and version and of != version):
            found.append(package)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch(packages: list[str], to: Path) -> None:
    """Download wheels for the other machine's Python."""
    to.mkdir(exist_ok=True)
    if not packages:
        return
    where = [f"--platform={name}_x86_64" for name in PLATFORMS]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--implementation=cp",
            f"--python-version={PYTHON}", *where, "-d", str(to), *packages,
        ],
        check=True,
    )  # fmt: skip


def kernels(to: Path, architecture: str, only: str, seconds: float) -> str:
    """Compile and write the kernels of every case of the tests and of every line that is timed.

    Parameters
    ----------
    to : Path
        The file.
    architecture : str
        Such as ``"sm_90"``.
    only : str
        A regular expression that names of cases and lines must match.
    seconds : float
        The time after which no other kernel is begun.
    """
    from numkv.kernels.cuda import carried, launches
    from tools.gpu_day import lines, steps

    cc, end = carried.capability(architecture), time.monotonic() + seconds
    of_cases = [(name, partial(steps.case, name)) for name in steps.cases()]
    of_lines = [(x.name, partial(_first, x)) for x in lines.LINES if x.what != "step"]
    with carried.elsewhere(cc) as found:
        for name, call in of_cases + of_lines:
            if not re.search(only, name):
                continue
            try:
                call()
            except (
                Exception
            ):  # there is no GPU to give results; the kernels it launches are known by then
                continue
    done = []
    for kernel in found:
        if time.monotonic() > end:
            break
        kernel.machine_code(launches.architecture(cc))
        done.append(kernel)
    carried.write(to, done, cc)
    return f"{len(done)} of {len(found)} kernels"


def _first(line: Any) -> None:
    """Make the first call of a line."""
    from tools.gpu_day import lines

    lines.numkv_calls(line, 1).calls[0]()


def main(arguments: list[str] | None = None) -> int:
    """Pack the folder; return 1 if it is too large."""
    parse = argparse.ArgumentParser(
        prog="python -m tools.gpu_day", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument("folder", type=Path)
    parse.add_argument("--arch", default="sm_90")
    parse.add_argument("--has", type=Path, help="a list of the other machine's packages")
    parse.add_argument("--only", default="", help="kernels of cases and lines with such names")
    parse.add_argument("--seconds", type=float, default=7200, help="for kernels")
    parse.add_argument("--second", action="store_true", help="the second folder: Numba and LLVM")
    given = parse.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    has = given.has.read_text() if given.has else ""
    if given.second:
        fetch(list(SECOND), given.folder / "wheels")
    else:
        archive(given.folder / "numkv.tar.xz")
        shutil.copy(Path(__file__).with_name("day.py"), given.folder / "day.py")
        fetch(lacking(WHEELS, has), given.folder / "wheels")
        print(kernels(given.folder / "kernels.zip", given.arch, given.only, given.seconds))
    sizes = {
        x.relative_to(given.folder): x.stat().st_size
        for x in sorted(given.folder.rglob("*"))
        if x.is_file()
    }
    for name, size in sizes.items():
        print(f"{size / 1e6:8.1f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:8.1f} MB of {MOST_BYTES / 1e6:.0f}")
    return int(total > MOST_BYTES and not given.second)


if __name__ == "__main__":
    sys.exit(main())
