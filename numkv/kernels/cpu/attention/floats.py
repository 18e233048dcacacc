"""The engine of floats: rows are widened to the float type that attention computes in.

An engine has two sides. K's: ``load_query`` puts a query row into scratch memory, ``interleave`` puts several side by
side, ``scores`` multiplies them with a tile's K rows. V's: ``accumulate`` adds a tile's weighted V rows to the output.
Both are made for a number of rows that are taken at once, `count`, of which the first `taken` count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import cgutils
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.llvm.floats import (
    make_accumulate_pv,
    make_interleave_queries,
    make_qk_tile,
)
from numkv.kernels.cpu.attention.records import Outputs, Queries, float_type
from numkv.kernels.cpu.inline import inlined
from numkv.kernels.cpu.vectors.emit import DOUBLE, I64, emits


@emits()
def clear(b, x, first, end):
    """``x[first:end] = 0``, of floats that lie one after another."""
    size = b.mul(b.sub(end, first), I64(8 if x.type.pointee == DOUBLE else 4))
    cgutils.memset(b, b.gep(x, [first]), size, 0)


@register_jitable
def multiply(x, factor, target):
    """``target[: len(x)] = factor * x``: a loop that stands alone, over arrays that begin with rows, is vector code."""
    for i in range(len(x)):
        target[i] = factor * x[i]


@functools.cache
def make_loader(compute: str) -> Callable[..., Any]:
    """``load_query`` for a float type."""
    F = np.float32 if float_type(compute) == "float32" else np.float64

    @inlined
    def load_query(floats, at, sizes, row, q_row, scale):
        first, end = at.queries + row * sizes.pad_dim, at.queries + (row + 1) * sizes.pad_dim
        multiply(q_row, scale, floats[first:end])
        clear(floats, first + sizes.dim, end)
        floats[at.query_scales + row] = F(1)

    return load_query


@functools.cache
def make_keys(
    kind: str, compute: str, next_kind: str, count: int, in_words: bool = False
) -> tuple[Callable[..., Any], ...]:
    """``interleave, scores`` for a storage kind of K; `next_kind` is V's, whose rows are prefetched.

    With `in_words`, query rows will be 16-bit numbers when they are interleaved: two take the place of a float.
    """
    halves = 2 if in_words else 1
    interleave_queries = make_interleave_queries(compute)
    qk_tile = make_qk_tile(kind, compute, next_kind)
    COUNT = np.int64(count)

    @inlined
    def interleave(floats, at, sizes, row, place):
        interleave_queries(
            COUNT, floats, at.queries + row * sizes.pad_dim, sizes.pad_dim, sizes.pad_dim // halves,
            at.interleaved + place * sizes.pad_dim,
        )  # fmt: skip

    @inlined
    def scores(floats, at, sizes, row, place, keys, end, extents):
        queries = Queries(
            at.interleaved + place * sizes.pad_dim, at.query_scales + row, at.interleaved_sums
        )
        qk_tile(COUNT, floats, queries, keys, end, at.scores, extents)

    return interleave, scores


@functools.cache
def make_values(kind: str, compute: str, next_kind: str, count: int) -> Callable[..., Any]:
    """``accumulate`` for a storage kind of V; `next_kind` is K's, whose rows are prefetched."""
    accumulate_pv = make_accumulate_pv(kind, compute, next_kind)
    COUNT = np.int64(count)

    @inlined
    def accumulate(floats, at, sizes, taken, values, begin, end, row, extents):
        outputs = Outputs(at.outputs + row * sizes.pad_v, sizes.pad_v, at.rescale)
        accumulate_pv(COUNT, taken, floats, at.scores, values, begin, end, outputs, extents)

    return accumulate
