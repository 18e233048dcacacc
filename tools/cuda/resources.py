"""Registers, spills, local and shared memory of the machine code that runs, for several architectures; no GPU needed.

    NUMBA_ENABLE_CUDASIM=0 python -m tools.cuda.resources [--kernels REGEX] [--keep FILE.json] [--page FILE.md]

The code that runs is not the PTX that Numba shows: nvJitLink links it from optimised IR, and optimises again. So this
tool links the kernels of `tools.cuda.catalogue` in the same way for each architecture, with the signatures and options
of a run, and reads the report of ptxas. The catalogue has not all combinations of kinds, but all branches of the code.
A kernel takes seconds. With ``--keep`` each result is recorded at once, and later runs with the same sources reuse it.
``--seconds`` ends a run in time; repeat it until all kernels are done.

A multiprocessor has 65,536 registers and 2,048 threads, so a block of 128 threads needs 32 registers or less to fill
it; bytes of spills are read and written in the memory of the thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.cuda import pages, stub_driver

__all__ = ["Resources", "of_kernel", "of_log", "table"]

ROOT = Path(__file__).resolve().parents[2]

ARCHITECTURES = [(8, 0), (9, 0), (10, 0)]


class Resources(NamedTuple):
    """The resources of a kernel."""

    kernel: str  #: its name in the catalogue
    architecture: str
    registers: int
    spill_stores: int  #: bytes
    spill_loads: int  #: bytes
    stack: int  #: bytes of local memory of a thread
    shared: int  #: bytes, static
    barriers: int


def of_log(kernel: str, architecture: str, log: str) -> Resources:
    """Parse the output of ``ptxas -v``.

    Raises
    ------
    ValueError
        If the log lacks it.
    """

    def number(pattern: str, missing: int | None = None) -> int:
        match = re.search(pattern, log)
        if match is None and missing is None:
            raise ValueError(f"{kernel}: no {pattern!r} in the linker's log:\n{log[:500]}")
        return int(match[1]) if match else missing or 0

    return Resources(
        kernel, architecture, number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"),
        number(r"(\d+) bytes spill loads"), number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem", 0),
        number(r"used (\d+) barriers", 0),
    )  # fmt: skip


def link(library: Any, cc: tuple[int, int, str]) -> str:
    """The linker's log of a library of Numba, linked for an architecture as it is for a run."""
    from cuda.bindings import nvjitlink

    code = library.get_ltoir(cc=cc)
    code = code if isinstance(code, bytes) else bytes(code)
    options = [f"-arch={_name(cc)}", "-lto", "-Xptxas=-v", "-verbose"]
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


def variants() -> Iterator[tuple[str, Any]]:
    """Attention on tensor cores over rows of 128 elements: every kind, with queries of 16 bits and of 32."""
    from numkv.kernels.cuda import attention

    for kind in ("bf16", "fp16", "int8", "int4", "fp8_e4m3", "fp8_e5m2"):
        for q_kind in ("fp16" if kind == "fp16" else "bf16", "fp32"):
            names = f"q {q_kind}, K {kind}, V {kind}, 128 columns"
            kernel = attention._decode(q_kind, kind, kind, 128, 128)
            yield f"attention[{names}, decode]", kernel
            if (q_kind, kind) != ("fp32", "int4"):
                kernel = attention._prefill(q_kind, kind, kind, 128, 128, False)
                yield f"prefill[{names}]", kernel


def of_kernel(name: str, kernel: Any, architectures: list[tuple[int, int]]) -> list[Resources]:
    """Return the resources of a kernel on each architecture, compiled as by `numkv.kernels.cuda.launches`."""
    from numba import cuda

    from numkv.kernels.cuda.launches import architecture

    options = {} if kernel.launch_bounds is None else {"launch_bounds": kernel.launch_bounds}
    library = cuda.jit(kernel.py_func, **options).compile(kernel.signature)._codelibrary
    each = [architecture(cc) for cc in architectures]
    return [of_log(name, _name(cc), link(library, cc)) for cc in each]


def _name(cc: tuple[int, int, str]) -> str:
    return "sm_" + "".join(map(str, cc))


def table(rows: list[Resources]) -> str:
    """A line for each kernel, with a group of columns for each architecture."""
    names = list(dict.fromkeys(row.architecture for row in rows))
    by_kernel: dict[str, dict[str, Resources]] = {}
    for row in rows:
        by_kernel.setdefault(row.kernel, {})[row.architecture] = row
    heads = ["kernel"]
    heads += [f"{name}: {what}" for name in names for what in ("registers", "spills", "local")] + [
        "shared"
    ]
    lines = []
    for kernel, found in by_kernel.items():
        cells = [kernel]
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
    return pages.table(heads, lines, left={0})


def digest() -> str:
    """A number of all sources of kernels."""
    files = sorted(
        path for room in ("kernels", "rows") for path in (ROOT / "numkv" / room).rglob("*.py")
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """Print the resources of each kernel, and write the page if requested; return 1 if kernels remain."""
    parse = argparse.ArgumentParser(
        prog="python -m tools.cuda.resources", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument("--kernels", default="", help="a regular expression: these kernels only")
    parse.add_argument(
        "--keep", type=Path, help="a file of what earlier runs found, and of what this one finds"
    )
    parse.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after so long")
    parse.add_argument("--page", type=Path, help="write a Markdown page")
    given = parse.parse_args(arguments)
    stub_driver.load()
    from tools.cuda.catalogue import catalogue

    sources, end = digest(), time.monotonic() + given.seconds
    known: dict[str, list[Resources]] = {}
    if given.keep and given.keep.exists():
        kept = json.loads(given.keep.read_text())
        if kept["sources"] == sources:
            known = {
                name: [Resources(*row) for row in rows] for name, rows in kept["kernels"].items()
            }
    rows: list[Resources] = []
    left = 0
    kernels = [(name, kernel) for name, kernel, _ in catalogue()] + list(variants())
    for name, kernel in kernels:
        if not re.search(given.kernels, name):
            continue
        if name not in known:
            if time.monotonic() > end:
                left += 1
                continue
            known[name] = of_kernel(name, kernel, ARCHITECTURES)
            print(name, *(row[2:] for row in known[name]), flush=True)
            if given.keep:
                given.keep.write_text(json.dumps({"sources": sources, "kernels": known}))
        rows += known[name]
    spilling = {row.kernel for row in rows if row.spill_stores or row.spill_loads}
    everything = {row.kernel for row in rows}
    summary = (
        f"{len(everything)} kernels, of which {len(spilling)} spill on one of the architectures."
    )
    if left:
        summary += f" Of {left} others of the catalogue nothing is known yet."
    print(summary)
    if given.page:
        pages.write(
            given.page,
            "Registers and memory of the CUDA kernels",
            __doc__ or "",
            summary,
            table(rows),
        )
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
