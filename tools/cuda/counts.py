"""Executed warp instructions of attention's kernels on CUDA: for a KV tile, and their share outside of tiles.

    NUMBA_ENABLE_CUDASIM=0 python -m tools.cuda.counts [--kinds bf16,fp32,...] [--groups 1,4,8] [--batches 1,8,64,256]
        [--length 8192] [--heads 8] [--tokens 1] [--blocks 16] [--page perf/results/NAME.md]

Kernels' real PTX runs on the interpreter (`tools.cuda.ptx_machine`). The cost of a tile of 64 tokens of K and V is the
difference between sequences of 512 and of 256 tokens, which are one split each, divided by the tiles between them. For
the share, all sequences have the requested length. A few evenly spaced blocks of each launch run; the rest is assumed
to be equal. Instructions outside of tiles count items, search for them, load queries, store results and merge splits.
All sequences share the same blocks of the pool, on which no count depends.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.cuda import pages, ptx_device

__all__ = ["Call", "Share", "executed", "per_tile", "share"]

TILE, BLOCK_SIZE = 64, 16


class Call(NamedTuple):
    """An attention call: sequences of one length."""

    kind: str
    group: int
    batch: int
    length: int
    q_kind: str = ""  #: if empty, the pool's kind, or bf16 if queries cannot have it
    heads: int = 8
    tokens: int = 1  #: queries of each sequence
    dim: int = 128


class Share(NamedTuple):
    """The warp instructions of a call."""

    outside: float  #: share of instructions outside of tiles
    items: float  #: instructions outside of tiles and merge, for each split of each head of each sequence
    merge: float  #: instructions of the launches after the first, likewise


def _run(call: Call) -> None:
    """Make the call."""
    from numkv import kind as kind_of
    from numkv import targets

    cuda = targets.get("cuda")
    kind, of_q = kind_of(call.kind), kind_of(_q_kind(call))
    pages_each = -(-call.length // BLOCK_SIZE)
    num_blocks, tokens = pages_each, call.batch * call.tokens
    rng = np.random.default_rng(1)

    def pool() -> tuple[Any, Any]:
        shape = (num_blocks, call.heads, BLOCK_SIZE, kind.words_per_row(call.dim))
        if kind.is_query:
            words = _words(rng.standard_normal(shape, np.float32), kind)
        else:
            words = np.ones(shape, kind.word)
        scales: Any = np.zeros((0,) * kind.scale_ndim, kind.scale_word)
        if kind.scales_per == "head":
            scales = np.ones(call.heads, np.float32)
        elif kind.scale_ndim == 3 and kind.has_scales:
            scales = np.ones(shape[:3], kind.scale_word)
        elif kind.has_scales:
            scales = np.full((*shape[:3], call.dim // 32), 0x3F80, kind.scale_word)
        return cuda.asarray(words), cuda.asarray(scales)

    q = _words(rng.standard_normal((tokens, call.heads * call.group, call.dim), np.float32), of_q)
    (k, k_scale), (v, v_scale) = pool(), pool()
    table = np.tile(np.arange(pages_each, dtype=np.int32), (call.batch, 1))
    compute = np.float64 if np.float64 in (kind.compute, of_q.compute) else np.float32
    arrays = (
        table, np.full(call.batch, call.length, np.int64), np.arange(0, tokens + 1, call.tokens, dtype=np.int64),
        np.zeros((0, 2), np.int64),
    )  # fmt: skip
    table, lengths, starts, ranges = map(cuda.asarray, arrays)
    if call.tokens == 1:  # as decoding does
        cuda.mark_queries(starts, "one each")
    cuda.ops.attend(
        cuda.asarray(q), of_q.name, k, kind.name, k_scale, v, kind.name, v_scale, table, lengths, starts, ranges, 0,
        0.1, 0.0, -1, cuda.asarray(np.zeros(0, compute)), cuda.asarray(np.zeros_like(q)),
        cuda.asarray(np.zeros((0, 0), np.float32)),
    )  # fmt: skip


def _q_kind(call: Call) -> str:
    from numkv import kind as kind_of

    return call.q_kind or (call.kind if kind_of(call.kind).is_query else "bf16")


def _words(x: Any, kind: Any) -> Any:
    if kind.name == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(kind.name.replace("fp", "float")).view(kind.word)


def executed(device: ptx_device.Device, call: Call, blocks: int = 0) -> list[float]:
    """Return the warp instructions of each launch of a call, estimated from `blocks` of its blocks if not 0.

    Raises
    ------
    PtxError
        If a kernel does anything wrong.
    """
    scales: list[float] = []

    def choose(total: int) -> Any:
        count = min(total, blocks) if blocks else total
        scales.append(total / count)
        return np.linspace(0, total - 1, count).astype(np.int64)

    device.forget()
    device.choose = choose
    try:
        _run(call)
        device.check()
    finally:
        device.choose = None
    found = zip(device.launches, scales, strict=True)
    return [done.run.warp_instructions * scale for done, scale in found]


def per_tile(device: ptx_device.Device, call: Call) -> float:
    """Return the warp instructions of a tile of 64 tokens for one kv head."""
    short, long = 256, 512
    one = call._replace(batch=1, heads=8)
    counts = [sum(executed(device, one._replace(length=n))) for n in (short, long)]
    return (counts[1] - counts[0]) / (8 * (long - short) // TILE)


def share(device: ptx_device.Device, call: Call, tile: float, blocks: int) -> Share:
    """Return the instructions of a call outside of tiles, if a tile takes `tile`."""
    launches = executed(device, call, blocks)
    whole = call.batch * call.heads
    tiles = tile * whole * -(-call.length // TILE)
    return Share(
        1 - tiles / sum(launches), (launches[0] - tiles) / whole, sum(launches[1:]) / whole
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, and write the page if asked to."""
    parse = argparse.ArgumentParser(
        prog="python -m tools.cuda.counts", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument("--kinds", default="fp32,bf16,int8,int4")
    parse.add_argument("--groups", default="4")
    parse.add_argument("--batches", default="1,8,64,256")
    parse.add_argument("--length", type=int, default=8192)
    parse.add_argument("--heads", type=int, default=8)
    parse.add_argument("--tokens", type=int, default=1)
    parse.add_argument("--blocks", type=int, default=16, help="blocks of a launch that are run")
    parse.add_argument("--page", type=Path, help="write a Markdown page")
    given = parse.parse_args(arguments)
    device, rows = ptx_device.start(), []
    batches = [int(b) for b in given.batches.split(",") if b]
    for kind in given.kinds.split(","):
        for group in map(int, given.groups.split(",")):
            call = Call(kind, group, 1, given.length, heads=given.heads, tokens=given.tokens)
            tile = per_tile(device, call)
            row = [kind, str(group), f"{tile:,.0f}"]
            for batch in batches:
                found = share(device, call._replace(batch=batch), tile, given.blocks)
                row.append(f"{100 * found.outside:.1f} % ({found.items:,.0f} + {found.merge:,.0f})")
            print(*row, sep=" | ", flush=True)
            rows.append(row)
    heads = ["kind", "group", "a tile", *(f"outside, batch {b}" for b in batches)]
    if given.page:
        what = f"{given.length} tokens, {given.heads} kv heads, {given.tokens} queries a sequence. "
        what += "In parentheses: warp instructions for each kv head of a sequence, outside of tiles and in the merge."
        pages.write(
            given.page,
            "Executed instructions of attention on CUDA",
            __doc__ or "",
            what,
            pages.table(heads, rows, left={0}),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
