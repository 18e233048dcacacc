"""Executed warp instructions of attention's CUDA kernel for many query rows, and flop for each.

    NUMBA_ENABLE_CUDASIM=0 python -m tools.cuda.prefill_counts [--kinds bf16,fp16,...] [--dim 128] [--group 4]
        [--tokens 256] [--page perf/results/NAME.md]

The kernel's real PTX runs on the interpreter (`tools.cuda.ptx_machine`). The cost of a KV tile is the difference
between sequences of 1,024 and of 512 tokens that end with the same 64 queries. Its flop are those of two products of
64 query rows, the tile's tokens and the head dim. A whole prefill of a new sequence also has masked tiles, loads of
queries and stores of results; its flop count only visible pairs of a query and a token. A kind is that of K and V, or
theirs and the queries', separated by a colon. Queries are bf16 if they cannot have the kind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tools.cuda import pages, ptx_device

__all__ = ["executed", "tile_instructions"]

BLOCK_SIZE, QUERIES, LENGTHS = 16, 64, (512, 1024)


def _words(x: Any, kind: str) -> Any:
    if kind == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(np.float16).view(np.uint16) if kind == "fp16" else x


def executed(
    device: ptx_device.Device,
    kind: str,
    q_kind: str,
    length: int,
    queries: int,
    dim: int,
    group: int,
) -> int:
    """Return the warp instructions of a call for one sequence and one kv head.

    Raises
    ------
    PtxError
        If a kernel has an error.
    RuntimeError
        If numkv chose another kernel.
    """
    from numkv import kind as kind_of
    from numkv import targets

    cuda, rng = targets.get("cuda"), np.random.default_rng(1)
    blocks = -(-length // BLOCK_SIZE)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    def pool() -> tuple[Any, Any]:
        of, shape = kind_of(kind), (blocks, 1, BLOCK_SIZE)
        scales: Any = np.zeros((0,) * of.scale_ndim, of.scale_word)
        if of.is_query:
            return _words(draw(*shape, dim), kind), scales
        words = rng.integers(0, 100, (*shape, of.words_per_row(dim))).astype(of.word)
        if of.scales_per == "head":
            scales = np.full(1, 0.01, np.float32)
        elif of.scale_ndim == 3:
            scales = np.full(shape, 0.01, np.float32)
        else:
            scales = np.full((*shape, dim // 32), 0x3C00, of.scale_word)
        return words, scales

    q = _words(draw(queries, group, dim), q_kind)
    (k, k_scale), (v, v_scale) = pool(), pool()
    device.forget()
    cuda.ops.attend(
        cuda.asarray(q), q_kind, cuda.asarray(k), kind, cuda.asarray(k_scale), cuda.asarray(v), kind,
        cuda.asarray(v_scale), cuda.asarray(np.arange(blocks, dtype=np.int32)[None]),
        cuda.asarray(np.array([length], np.int64)), cuda.asarray(np.array([0, queries], np.int64)),
        cuda.asarray(np.zeros((0, 2), np.int64)), 0, 1 / dim**0.5, 0.0, -1, cuda.asarray(np.zeros(0, np.float32)),
        cuda.asarray(np.zeros_like(q)), cuda.asarray(np.zeros((0, 0), np.float32)),
    )  # fmt: skip
    device.check()
    names = [ptx_device.short(done.name) for done in device.launches]
    if names != ["prefill"]:
        raise RuntimeError(f"expected one launch of prefill, got {names}")
    return sum(done.run.warp_instructions for done in device.launches)


def tile_instructions(
    device: ptx_device.Device, kind: str, q_kind: str, dim: int, group: int
) -> float:
    """Return the warp instructions of 64 query rows and 64 tokens."""
    short, long = (executed(device, kind, q_kind, n, QUERIES, dim, group) for n in LENGTHS)
    return (long - short) / ((LENGTHS[1] - LENGTHS[0]) / 64 * -(-QUERIES * group // 64))


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write the page if asked to."""
    parse = argparse.ArgumentParser(
        prog="python -m tools.cuda.prefill_counts", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument(
        "--kinds", default="bf16,fp16,bf16:fp32,fp16:fp32,fp16:bf16,int8,int4,fp8_e4m3,fp8_e5m2"
    )
    parse.add_argument("--dim", type=int, default=128)
    parse.add_argument("--group", type=int, default=4)
    parse.add_argument(
        "--tokens", type=int, default=256, help="of a whole prefill; 0 leaves it out"
    )
    parse.add_argument("--page", type=Path, help="write a Markdown page")
    given = parse.parse_args(arguments)
    from numkv import kind as kind_of

    device, rows = ptx_device.start(), []
    heads = ["K and V", "queries", "a tile", "flop for each", f"prefill of {given.tokens}"]
    for name in given.kinds.split(","):
        kind, _, q_kind = name.partition(":")
        q_kind = q_kind or (kind if kind_of(kind).is_query else "bf16")
        tile = tile_instructions(device, kind, q_kind, given.dim, given.group)
        row = [kind, q_kind, f"{tile:,.0f}", f"{4 * 64 * 64 * given.dim / tile:,.0f}"]
        if given.tokens:
            n = given.tokens
            count = executed(device, kind, q_kind, n, n, given.dim, given.group)
            row.append(f"{4 * given.group * given.dim * n * (n + 1) / 2 / count:,.0f}")
        print(*row, sep=" | ", flush=True)
        rows.append(row)
    if given.page:
        table = pages.table(heads[: len(rows[0])], rows, left={0, 1})
        pages.write(given.page, "Instructions of prefill on CUDA", __doc__ or "", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
