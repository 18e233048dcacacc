"""``python -m perf.gpu``: numkv on this machine's GPU, checked, then timed beside what else is installed.

    python -m perf.gpu [--lines REGEX] [--minutes 8] [--seconds 0.3] [--out FOLDER]

First every kernel is run on the device and compared with the oracle (the cases of ``tests/ptx_cases.py``), once
more under compute-sanitizer where that is there. Then decode, prefill, append, write and whole steps are timed by
device events against the copy bandwidth measured in the same run. Kernels that are not on disk are compiled before, in
parallel. It writes one Markdown page and one picture; it needs no network. Without a GPU it says so, and does nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from numkv.compile_ahead import compile_apart
from perf import gpu_lines, gpu_page
from perf.gpu_lines import LINES, PEERS, Line, turns
from perf.gpu_page import Page, Timing

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numkv", "numba-cuda", "cuda-core", "torch", "flashinfer-python", "flash-attn")
MOST_TOOL_SECONDS = 90
#: Calls between two events: the driver takes a microsecond or two for an event.
CALLS = 8


def no_gpu() -> str:
    """Why there is nothing to time; empty if there is a GPU."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return "NUMBA_ENABLE_CUDASIM is set: the simulator is not timed"
    try:
        from numkv import targets

        targets.get("cuda")
    except Exception as error:
        return " ".join(str(error).split())
    return ""


def timed(call: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of single calls, on the device: means of a few calls between two events."""
    from numba import cuda

    for _ in range(3):
        call()
    cuda.synchronize()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 5:
        start, stop = cuda.event(timing=True), cuda.event(timing=True)
        start.record()
        for _ in range(CALLS):
            call()
        stop.record()
        stop.synchronize()
        found.append(cuda.event_elapsed_time(start, stop) / 1e3 / CALLS)
    return found


def copy_bandwidth(seconds: float, size: int = 1 << 30) -> float:
    """Bytes that a copy within the device's memory reads and writes in a second."""
    import numpy as np
    from numba import cuda

    a, b = (cuda.device_array(size, np.uint8) for _ in range(2))
    return 2 * size / median(timed(lambda: b.copy_to_device(a), seconds))


# ---------------------------------------------------------------- checks


def check_cases(pattern: str) -> tuple[int, list[str]]:
    """How many cases were run on the device, and those that failed."""
    import zlib

    import numpy as np

    sys.path.insert(0, str(ROOT / "tests"))
    from ptx_cases import cases

    ran, failed = 0, []
    for name, case in cases().items():
        if not re.search(pattern, name):
            continue
        ran += 1
        try:
            case.run(np.random.default_rng(zlib.crc32(name.encode())))
        except Exception as error:
            failed.append(f"{name}: {' '.join(str(error).split())[:200]}")
    return ran, failed


def checked(minutes_left: float) -> list[tuple[str, str]]:
    """The checks, each in a process of its own, as a fault on a device ends a process's use of it."""
    command = [sys.executable, "-m", "perf.gpu", "--check"]
    found = [("every kernel against the oracle", _told([*command, ""], 60 * minutes_left * 0.4))]
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [*found, ("compute-sanitizer", "not installed")]
    for name in ("memcheck", "racecheck", "synccheck", "initcheck"):
        prefix = [tool, "--tool", name, "--error-exitcode", "9"]
        found.append(
            (
                f"compute-sanitizer {name}",
                _told([*prefix, *command, r"^(append|merge|rotate)"], MOST_TOOL_SECONDS),
            )
        )
    return found


def _told(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(30.0, seconds),
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "not done in time"
    last = [line for line in done.stdout.splitlines() if line.startswith(("checked", "failed"))]
    verdict = "; ".join(last) or " ".join((done.stderr or done.stdout).split())[-300:]
    return verdict if done.returncode == 0 else f"FAILED ({done.returncode}): {verdict}"


def compiled(lines: list[Line]) -> None:
    """Have each line's kernels compiled and put on disk, by a process for each core."""
    workers = max(1, (os.cpu_count() or 1) - 1)
    kinds = dict.fromkeys((line.what, line.kind) for line in lines)
    root = f"sys.path.insert(0, {str(ROOT)!r})"
    jobs = [
        f"{root}; from perf import gpu; gpu.main(['--warm', {f'{what} {kind}'!r}])" for what, kind in kinds
    ]  # fmt: skip
    compile_apart(jobs, workers)


# ---------------------------------------------------------------- times


def ours(line: Line, seconds: float) -> Timing:
    """numkv's times of a line."""
    return _timing(line, "numkv paged", lambda: gpu_lines.numkv_calls(line), seconds)


def others(line: Line, seconds: float) -> list[Timing]:
    """Times of those that are installed and take such a line."""
    if line.what not in ("decode", "prefill"):
        return []
    found = []
    for name, peer in PEERS.items():
        if peer.installed and line.kind in peer.kinds:
            found.append(
                _timing(line, name, lambda peer=peer: peer.calls(line, gpu_lines.COLD), seconds)
            )
    return found


def _timing(line: Line, name: str, make: Callable[[], gpu_lines.Job], seconds: float) -> Timing:
    made = Timing(line.name, name, bytes=line.bytes, flops=line.flops)
    try:
        made.seconds = timed(turns(make().calls), seconds)
    except Exception as error:  # somebody else's, too: a line that does not run is told
        made.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return made


def versions() -> str:
    """Of what is installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) + "."


def measured(lines: list[Line], minutes: float, seconds: float, check: bool) -> Page:
    """Everything, within the time."""
    from numba import cuda

    start = time.perf_counter()

    def left() -> float:
        return minutes - (time.perf_counter() - start) / 60

    name = cuda.get_current_device().name
    device = name.decode() if isinstance(name, bytes) else str(name)
    compiled(lines)
    checks = checked(left()) if check else [("checks", "left out")]
    page = Page(device, copy_bandwidth(seconds), [], checks, versions())
    skipped = []
    for line in lines:
        if left() < 0.3:
            skipped.append(line.name)
            continue
        for timing in [ours(line, seconds), *others(line, seconds)]:
            page.timings.append(timing)
            cuda.current_context().deallocations.clear()
            print(
                timing.line,
                timing.contestant,
                timing.reason or f"{timing.typical * 1e6:,.1f} us",
                flush=True,
            )
    page.left_out, page.minutes = skipped, minutes - left()
    return page


def main(arguments: list[str] | None = None) -> int:
    """Check, time and write; 0 without a GPU, 1 where a check failed."""
    parse = argparse.ArgumentParser(
        prog="python -m perf.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument("--lines", default="", help="a regular expression: those only")
    parse.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parse.add_argument("--seconds", type=float, default=0.3, help="for each contestant of a line")
    parse.add_argument("--no-check", action="store_true", help="time only")
    parse.add_argument(
        "--out",
        type=Path,
        default=ROOT / "perf" / "results",
        help="folder of the page and the picture",
    )
    parse.add_argument("--check", help=argparse.SUPPRESS)
    parse.add_argument("--warm", help=argparse.SUPPRESS)
    given = parse.parse_args(arguments)
    reason = no_gpu()
    if reason:
        print(f"perf.gpu: nothing to time: {reason}")
        return 0
    if given.check is not None:
        ran, failed = check_cases(given.check)
        print("\n".join([f"checked {ran} cases", *(f"failed {line}" for line in failed)]))
        return 1 if failed else 0
    lines = [line for line in LINES if re.search(given.lines, line.name)]
    if given.warm is not None:
        what, kind = given.warm.split()
        first = next(line for line in LINES if (line.what, line.kind) == (what, kind))
        gpu_lines.numkv_calls(first, 1).calls[0]()
        return 0
    page = measured(lines, given.minutes, given.seconds, not given.no_check)
    given.out.mkdir(parents=True, exist_ok=True)
    stem = time.strftime("%Y-%m-%d-") + re.sub(r"[^a-z0-9]+", "-", page.device.lower()).strip("-")
    (given.out / f"{stem}.svg").write_text(gpu_page.picture(page))
    text = gpu_page.page(page) + f"\n![Shares of the copy bandwidth]({stem}.svg)\n"
    (given.out / f"{stem}.md").write_text(text)
    print(given.out / f"{stem}.md")
    return 1 if any("FAILED" in result for _, result in page.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
