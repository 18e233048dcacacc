"""Registers, spills, local and shared memory of the machine code that runs, for several architectures; no GPU needed.

    NUMBA_ENABLE_CUDASIM=0 python -m tools.cuda.resources [--cases REGEX] [--keep FILE.json] [--page FILE.md]

What runs is not the PTX that Numba shows: it is linked from optimised IR by nvJitLink, which optimises again. So the
kernels that the cases of ``tests/ptx_cases.py`` launch, with the signatures and options of the run, are
linked for each architecture in the same way, and ptxas says what they take. Linking takes seconds a kernel: ``--keep``
adds to what an earlier run found. A multiprocessor has 65,536 registers and 2,048 threads, so a block of 128 threads
needs 32 registers or less to fill it; bytes of spills are read and written in the memory of the thread.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tools.cuda import interpret, pages, ptx_device

__all__ = ["Resources", "of_log", "table"]

ARCHITECTURES = [(8, 0), (9, 0), (10, 0)]


class Resources(NamedTuple):
    """What a kernel takes."""

    case: str
    kernel: str
    architecture: str
    registers: int
    spill_stores: int  #: bytes
    spill_loads: int  #: bytes
    stack: int  #: bytes of local memory of a thread
    shared: int  #: bytes, static
    barriers: int


def of_log(case: str, kernel: str, architecture: str, log: str) -> Resources:
    """What ``ptxas -v`` said.

    Raises
    ------
    ValueError
        If that is not in the log.
    """

    def number(pattern: str, missing: int | None = None) -> int:
        match = re.search(pattern, log)
        if match is None and missing is None:
            raise ValueError(f"{kernel}: no {pattern!r} in the linker's log:\n{log[:500]}")
        return int(match[1]) if match else missing or 0

    return Resources(
        case, kernel, architecture, number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"),
        number(r"(\d+) bytes spill loads"), number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem", 0),
        number(r"used (\d+) barriers", 0),
    )  # fmt: skip


def link(library: Any, cc: tuple[int, int]) -> str:
    """The linker's log of a library of Numba, linked for an architecture as it is for a run."""
    from cuda.bindings import nvjitlink

    code = library.get_ltoir(cc=cc)
    code = code if isinstance(code, bytes) else bytes(code)
    options = [f"-arch=sm_{cc[0]}{cc[1]}", "-lto", "-Xptxas=-v", "-verbose"]
    if library._max_registers:
        options.append(f"-maxrregcount={library._max_registers}")
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), "kernel")
        nvjitlink.complete(handle)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        return log.decode(errors="replace")
    finally:
        nvjitlink.destroy(handle)


def watch(found: Callable[[Any], None]) -> None:
    """Call a function with every library of Numba that machine code is asked of, and go on with its PTX."""
    from numba.cuda.codegen import CUDACodeLibrary

    get_cubin = CUDACodeLibrary.get_cubin

    def watched(self: Any, cc: Any = None) -> Any:
        found(self)
        return get_cubin(self, cc=cc)

    CUDACodeLibrary.get_cubin = watched


def table(rows: list[Resources]) -> str:
    """A line for each kernel of a case, with a group of columns for each architecture."""
    names = list(dict.fromkeys(row.architecture for row in rows))
    by_kernel: dict[tuple[str, str], dict[str, Resources]] = {}
    for row in rows:
        by_kernel.setdefault((row.kernel, row.case), {})[row.architecture] = row
    heads = ["kernel", "first launched by"]
    heads += [f"{name}: {what}" for name in names for what in ("registers", "spills", "local")] + [
        "shared"
    ]
    lines = []
    for (kernel, case), found in by_kernel.items():
        cells = [kernel, case]
        for name in names:
            one = found.get(name)
            if one is None:
                cells += ["", "", ""]
                continue
            spills = (
                f"{one.spill_stores} / {one.spill_loads}"
                if one.spill_stores or one.spill_loads
                else "0"
            )
            cells += [str(one.registers), spills, str(one.stack)]
        lines.append([*cells, f"{next(iter(found.values())).shared:,}"])
    return pages.table(heads, lines, left={0, 1})


def main(arguments: list[str] | None = None) -> int:
    """Print what each kernel takes, and write the page if asked to."""
    parse = argparse.ArgumentParser(
        prog="python -m tools.cuda.resources", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument("--cases", default="", help="a regular expression: kernels of those only")
    parse.add_argument(
        "--keep",
        type=Path,
        help="a file of what earlier runs found, which takes what this one finds",
    )
    parse.add_argument("--page", type=Path, help="write a Markdown page")
    given = parse.parse_args(arguments)
    rows: list[Resources] = []
    if given.keep and given.keep.exists():
        rows = [Resources(*row) for row in json.loads(given.keep.read_text())]
    done = {row.case for row in rows}
    device, libraries = ptx_device.start(), []
    watch(libraries.append)
    for case in interpret.all_cases().values():
        if not re.search(given.cases, case.name) or case.name in done:
            continue
        libraries.clear()
        interpret.run_case(device, case)
        for library in libraries:
            kernel = ptx_device.short(library._entry_name)
            for cc in ARCHITECTURES:
                row = of_log(case.name, kernel, f"sm_{cc[0]}{cc[1]}", link(library, cc))
                print(*row, flush=True)
                rows.append(row)
        if given.keep:
            given.keep.write_text(json.dumps(rows))
    spilling = {(row.kernel, row.case) for row in rows if row.spill_stores or row.spill_loads}
    everything = {(row.kernel, row.case) for row in rows}
    summary = (
        f"{len(everything)} kernels, of which {len(spilling)} spill on one of the architectures."
    )
    print(summary)
    if given.page:
        pages.write(
            given.page,
            "Registers and memory of the CUDA kernels",
            __doc__ or "",
            summary,
            table(rows),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
