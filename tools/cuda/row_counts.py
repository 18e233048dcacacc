"""Executed warp instructions and memory accesses of the kernels that write and move rows; no GPU needed.

    NUMBA_ENABLE_CUDASIM=0 python -m tools.cuda.row_counts [--lines REGEX] [--keep FILE.json]
        [--before FILE.json] [--resources FILE.json] [--page FILE.md]

Each line is one call of a kernel in the interpreter of PTX, for rows of a common shape. It has the instructions of all
warps, by row and by 16 bytes to move (read once, written once). Of these it counts accesses of 16, 8, 4, 2 and 1 bytes
a thread to global memory, including the generic space, which is also listed separately; accesses to local memory; and
divisions and square roots, which are ten machine instructions and more each. ``--before`` adds another run's figures.
The counts are of PTX, not of time.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tools.cuda import pages, ptx_device, resources
from tools.cuda.ptx_program import BITS, Instruction, Program

__all__ = ["Counts", "Line", "counted", "lines"]

#: Dims, tokens and heads of all lines.
TOKENS, HEADS, BLOCK, DIM = 32, 4, 16, 128
DTYPES = {
    "fp64": np.dtype(np.float64), "fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
LONG = ("div", "rem", "sqrt", "rcp")


class Line(NamedTuple):
    """A call, the bytes that it must move, and its rows."""

    name: str
    rows: int
    bytes: int
    run: Callable[[], None]


class Counts(NamedTuple):
    """The instructions of a call's warps."""

    instructions: int
    wide: dict[str, int]  #: accesses to global memory, by the bytes of a thread
    local: int
    generic: int
    long: int
    shuffles: int
    barriers: int


def _width(x: Instruction) -> int:
    count = next((int(p[1:]) for p in x.parts if p in ("v2", "v4")), 1)
    return BITS[x.parts[-1]] // 8 * count


def counted(programs: dict[str, Program], launches: list[ptx_device.Done]) -> Counts:
    """The counts of launches.

    Parameters
    ----------
    programs : dict of str to Program
        Programs of the kernels, by name.
    launches : list of Done
        What has run.
    """
    wide: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for done in launches:
        program = programs[done.name]
        for start, executed in done.run.executed.items():
            code = program.code[start : program.blocks[start]]
            warps = executed // len(code)
            for x in code:
                if x.parts[0] in ("ld", "st", "atom", "red") and "param" not in x.parts:
                    if "local" in x.parts:
                        found["local"] += warps
                    elif "shared" not in x.parts:
                        wide[str(_width(x))] += warps
                        found["generic"] += warps * ("global" not in x.parts)
                elif x.parts[0] in LONG:
                    found["long"] += warps
                elif x.parts[0] == "shfl":
                    found["shuffles"] += warps
        found["instructions"] += done.run.warp_instructions
        found["barriers"] += done.run.barriers
    return Counts(
        found["instructions"], dict(wide), found["local"], found["generic"], found["long"], found["shuffles"],
        found["barriers"],
    )  # fmt: skip


def _target() -> Any:
    from numkv import targets

    return targets.get("cuda")


def _words(x: Any) -> Any:
    """An array on the device, in words as kernels take them."""
    return _target().asarray(x.view(np.uint16) if x.dtype.itemsize == 2 else x)


def _rows(source: str, *shape: int) -> Any:
    rng = np.random.default_rng(7)
    return _words(rng.standard_normal(shape).astype(np.float32).astype(DTYPES[source]))


def _pool(kind: str, blocks: int = 4) -> tuple[Any, Any]:
    """Words and scales of a pool, whose rows are small numbers."""
    from numkv import kinds

    of = kinds.kind(kind)
    shape = (blocks, HEADS, BLOCK)
    words = np.ones((*shape, of.words_per_row(DIM)), of.word)
    per = {"none": (0, 0, 0), "head": (HEADS,), "row": shape, "group": (*shape, DIM // 32)}
    scales = np.ones(per[of.scales_per], np.float32).astype(of.scale_word)
    if kind == "int4":
        scales[...] = 0x3F80
    return _target().asarray(words), _target().asarray(scales)


def _row_bytes(kind: str) -> int:
    from numkv import kinds

    of = kinds.kind(kind)
    return (
        of.words_per_row(DIM) * of.word.itemsize + of.scales_per_row(DIM) * of.scale_word.itemsize
    )


def _slots(count: int = TOKENS) -> Any:
    return _target().asarray(
        np.random.default_rng(5).permutation(4 * BLOCK)[:count].astype(np.int64)
    )


def _append(source: str, kind: str, by_slot: bool) -> Line:
    rows = 2 * TOKENS * HEADS
    per_row = DIM * DTYPES[source].itemsize + _row_bytes(kind)

    def run() -> None:
        sides = [(_rows(source, TOKENS, HEADS, DIM), source, *_of(kind)) for _ in "kv"]
        ops = _target().ops
        if by_slot:
            ops.scatter_both(*sides, _slots(), 0)
        else:
            ops.append_both(*sides, _target().asarray(np.array([2, 0, 3], np.int32)), 3, 0)

    return Line(
        f"{'scatter' if by_slot else 'append'} {source} to {kind}", rows, rows * per_row, run
    )


def _of(kind: str) -> tuple[Any, str, Any]:
    words, scales = _pool(kind)
    return words, kind, scales


def _write(source: str, kind: str) -> Line:
    q_heads = 2 * HEADS
    rows = TOKENS * (q_heads + 2 * HEADS)
    size = DIM * DTYPES[source].itemsize
    moved = rows * size + TOKENS * q_heads * size + TOKENS * 2 * HEADS * _row_bytes(kind)

    def run() -> None:
        real = np.float64 if "fp64" in (source, kind) else np.float32
        angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
        weights = [_target().asarray(np.ones(DIM, real)) for _ in "qk"]
        cos, sin = (_target().asarray(f(angles).astype(real)) for f in (np.cos, np.sin))
        q_out = _words(np.zeros((TOKENS, q_heads, DIM), DTYPES[source]))
        (k, _, ks), (v, _, vs) = _of(kind), _of(kind)
        _target().ops.scatter_write(
            _rows(source, TOKENS, (q_heads + 2 * HEADS) * DIM), source, cos, sin, (True, True, False), *weights,
            1e-5, _target().asarray(np.arange(TOKENS)), q_out, k, kind, ks, v, kind, vs, _slots(),
        )  # fmt: skip

    return Line(f"write {source} to {kind}, norm and RoPE", rows, moved, run)


def _shift(kind: str) -> Line:
    rows = TOKENS * HEADS

    def run() -> None:
        angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
        cos, sin = (_target().asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        words, _, scales = _of(kind)
        _target().ops.shift_rows(words, kind, scales, _slots(), -5, cos, sin, False)

    return Line(f"shift {kind}", rows, 2 * rows * _row_bytes(kind), run)


def _copies() -> Iterator[Line]:
    rows = TOKENS * HEADS

    def of(word: int, *shape: int) -> Any:
        return _target().asarray(np.ones(shape, f"u{word}"))

    def tokens() -> None:
        a, b = (of(2, 4, HEADS, BLOCK, DIM) for _ in "ab")
        _target().ops.copy_tokens(a, _slots(), b, _slots())

    def blocks() -> None:
        a, b = (of(2, 4, HEADS, BLOCK, DIM) for _ in "ab")
        ids = _target().asarray(np.array([2, 0, 1], np.int32))
        _target().ops.copy_blocks(a, ids, b, ids)

    def both() -> None:
        new, cache = ([of(2, 2, HEADS, n, DIM) for _ in "kv"] for n in (TOKENS // 2, TOKENS))
        offsets = _target().asarray(np.array([3, 9], np.int64))
        _target().ops.copy_both(new[0], cache[0], new[1], cache[1], offsets)

    yield Line("copy_tokens bf16", rows, 4 * rows * DIM, tokens)
    yield Line("copy_blocks bf16", 3 * HEADS * BLOCK, 4 * 3 * HEADS * BLOCK * DIM, blocks)
    yield Line("copy_both bf16", 2 * rows, 4 * 2 * rows * DIM, both)


def _mass(q_kind: str, kind: str) -> Line:
    group, length = 4, 2 * BLOCK * 2
    rows = length * HEADS

    def run() -> None:
        words, _, scales = _of(kind)
        q = _rows(q_kind, 1, group * HEADS, DIM)
        arrays = [
            _target().asarray(np.array(x))
            for x in (
                np.arange(4, dtype=np.int32)[None], np.array([length]), np.array([0, 1]),
                np.zeros((0, 2), np.int64),
            )
        ]  # fmt: skip
        lse = _target().asarray(np.zeros((1, group * HEADS), np.float32))
        weights = _target().asarray(np.zeros((1, HEADS, length), np.float32))
        _target().ops.attention_weights(
            q, q_kind, words, kind, scales, *arrays, 0, lse, 0.1, 0.0, -1, weights
        )  # fmt: skip

    return Line(
        f"attention_weights q {q_kind}, K {kind}, group 4", rows, rows * _row_bytes(kind), run
    )


def _others() -> Iterator[Line]:
    rows = TOKENS * HEADS

    def look() -> None:
        _target().ops.first_non_finite(_rows("bf16", TOKENS, HEADS, DIM), "bf16")

    def rotate() -> None:
        out = _words(np.zeros((TOKENS, HEADS, DIM), DTYPES["bf16"]))
        signs = _target().asarray(np.ones(DIM, np.float32))
        _target().ops.rotate_rows(
            _rows("bf16", TOKENS, HEADS, DIM), "bf16", signs, False, out, "bf16"
        )  # fmt: skip

    def merge() -> None:
        o = [_rows("bf16", TOKENS, HEADS, DIM) for _ in "abc"]
        lse = [_target().asarray(np.zeros((TOKENS, HEADS), np.float32)) for _ in "abc"]
        _target().ops.merge_states(o[0], lse[0], o[1], lse[1], "bf16", o[2], lse[2])

    def dequantise() -> None:
        from numkv import kinds

        out = np.zeros((HEADS, BLOCK, DIM), np.int8), np.ones((HEADS, BLOCK), np.float32)
        _target().dequantise(kinds.kind("int8"), *map(_target().asarray, out))

    yield Line("first_non_finite bf16", rows, 2 * rows * DIM, look)
    yield Line("rotate_rows bf16", rows, 4 * rows * DIM, rotate)
    yield Line("merge_states bf16", rows, 6 * rows * DIM, merge)
    yield Line("dequantise int8", HEADS * BLOCK, HEADS * BLOCK * DIM * 5, dequantise)


def lines() -> Iterator[Line]:
    """All calls that are counted."""
    for source, kind in (
        ("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp16", "fp32"), ("bf16", "fp16"), ("fp64", "fp64"),
        ("bf16", "int8"), ("fp32", "int8"), ("bf16", "int4"), ("fp32", "int4"), ("bf16", "fp8_e4m3"),
        ("fp16", "fp8_e5m2"),
    ):  # fmt: skip
        yield _append(source, kind, kind == "fp8_e4m3" or source == "bf16")
    for source, kind in (
        ("bf16", "bf16"), ("fp32", "fp32"), ("fp64", "fp64"), ("bf16", "int8"), ("bf16", "int4"),
        ("fp16", "fp8_e4m3"), ("fp64", "int4"),
    ):  # fmt: skip
        yield _write(source, kind)
    for kind in ("fp64", "fp32", "bf16", "int8", "int4", "fp8_e4m3"):
        yield _shift(kind)
    yield from _copies()
    for q_kind, kind in (
        ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "int8"), ("fp32", "int4"), ("bf16", "fp8_e4m3"),
        ("fp64", "fp64"),
    ):  # fmt: skip
        yield _mass(q_kind, kind)
    yield from _others()


def _cells(line: Line, counts: Counts) -> list[str]:
    def each(n: int) -> str:
        return f"{n / line.rows:.3g}" if n else "0"

    return [
        f"{counts.instructions / line.rows:.1f}", f"{16 * counts.instructions / line.bytes:.2f}",
        " / ".join(each(counts.wide.get(str(w), 0)) for w in (16, 8, 4, 2, 1)), each(counts.local),
        each(counts.generic), each(counts.long),
    ]  # fmt: skip


def table(found: dict[str, Counts], before: dict[str, Counts]) -> str:
    """Return a table with a line for each call, with its earlier counts."""
    names = [
        "instructions a row",
        "a 16 bytes",
        "global 16 / 8 / 4 / 2 / 1",
        "local",
        "generic",
        "divisions",
    ]
    heads = ["call"] + (
        [f"before: {n}" for n in names] + ["now: " + n for n in names] if before else names
    )
    rows = []
    for line in lines():
        if line.name not in found:
            continue
        cells = _cells(line, found[line.name])
        if before:
            old = before.get(line.name)
            cells = (_cells(line, old) if old else [""] * len(cells)) + cells
        rows.append([line.name, *cells])
    return pages.table(heads, rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write the page if asked to."""
    parse = argparse.ArgumentParser(
        prog="python -m tools.cuda.row_counts", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument("--lines", default="", help="a regular expression: those only")
    parse.add_argument(
        "--keep", type=Path, help="a file that takes what is counted, beside what it has"
    )
    parse.add_argument("--before", type=Path, help="a file that --keep wrote elsewhere")
    parse.add_argument(
        "--resources", type=Path, help="what `tools.cuda.resources --keep` wrote, for the page"
    )
    parse.add_argument("--page", type=Path, help="write a Markdown page")
    given = parse.parse_args(arguments)

    def read(path: Path | None) -> dict[str, Counts]:
        there = json.loads(path.read_text()) if path and path.exists() else {}
        return {name: Counts(**counts) for name, counts in there.items()}

    found, before = read(given.keep), read(given.before)
    device, programs = ptx_device.start(), {}

    def note(kernel: str, program: Program) -> Program:
        programs[kernel] = program
        return program

    for line in lines():
        if not re.search(given.lines, line.name):
            continue
        device.forget()
        device.change = note
        line.run()
        device.check()
        found[line.name] = counted(programs, device.launches)
        print(table({line.name: found[line.name]}, {}).splitlines()[-1], flush=True)
        if given.keep:
            given.keep.write_text(json.dumps({n: c._asdict() for n, c in found.items()}, indent=1))
    text = table(found, before)
    print(text)
    if given.page:
        parts = [text]
        if given.resources:
            rows = [resources.Resources(*row) for row in json.loads(given.resources.read_text())]
            parts += ["## Registers and memory of those that run", resources.table(rows)]
        pages.write(given.page, "What the kernels that write rows execute", __doc__ or "", *parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
