"""The engine of integers: quantised rows meet queries and probabilities of 16 bits.

The error, 1e-4 of a result or so, is a hundredth of what INT8 costs. INT8 goes this way with float32, and CODE4 and
CODE6, whose levels are INT8, after a look into a table; INT4 too where vectors have 512 bits. The sides of K and of V
are those of `floats`, under the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numkv.kernels.cpu.attention import floats as floats_engine
from numkv.kernels.cpu.attention.floats import clear
from numkv.kernels.cpu.attention.llvm.int4 import (
    make_accumulate_int4,
    make_qk_int4,
    quantise_group_probs,
    spread_query,
    sum_query_groups,
)
from numkv.kernels.cpu.attention.llvm.int8 import (
    interleave_bytes,
    make_accumulate_int8,
    make_qk_int8,
    quantise_probs,
    quantise_query,
)
from numkv.kernels.cpu.attention.records import Outputs, Queries, Weights
from numkv.kernels.cpu.inline import inlined
from numkv.kernels.cpu.vectors.features import HAS_FOURS


@functools.cache
def make_loader(kind: str) -> Callable[..., Any]:
    """``load_query`` for a storage kind of K."""
    return _load_int4 if kind == "int4" else _load_int8


_load_floats = floats_engine.make_loader("float32")


@inlined
def _load_int8(floats, at, sizes, row, q_row, scale):
    _load_floats(floats, at, sizes, row, q_row, scale)
    start = at.queries + row * sizes.pad_dim
    floats[at.query_scales + row] = quantise_query(floats, start, sizes.dim, sizes.pad_dim)


@inlined
def _load_int4(floats, at, sizes, row, q_row, scale):
    start = at.queries + row * sizes.pad_dim
    target = floats[start : start + sizes.pad_dim]
    clear(floats, start, start + sizes.pad_dim)
    spread_query(target, q_row, scale)
    floats[at.query_scales + row] = quantise_query(floats, start, sizes.dim, sizes.pad_dim)
    sum_query_groups(floats, start, sizes.dim, at.query_sums + row * 16 * sizes.k_spans)


@functools.cache
def make_keys(kind: str, next_kind: str, count: int) -> tuple[Callable[..., Any], ...]:
    """``interleave, scores`` for a storage kind of K; `next_kind` is V's, whose rows are prefetched."""
    if kind == "int4":
        return _int4_keys(next_kind, count)
    if HAS_FOURS:
        return _byte_keys(make_qk_int8(next_kind, kind), count)
    return floats_engine.make_keys(kind, "float32", next_kind, count, True)


@inlined
def _interleave_one(floats, at, sizes, row, to_at):
    """A query row in bytes."""
    interleave_bytes(
        np.int64(1), floats, at.queries + row * sizes.pad_dim, sizes.pad_dim, sizes.pad_dim, to_at
    )


def _byte_keys(qk_int8, count):
    """``interleave, scores`` of queries in bytes."""
    COUNT = np.int64(count)

    @inlined
    def interleave(floats, at, sizes, row, place):
        interleave_bytes(
            COUNT, floats, at.queries + row * sizes.pad_dim, sizes.pad_dim, sizes.pad_dim,
            at.interleaved + place * sizes.pad_dim,
        )  # fmt: skip

    @inlined
    def scores(floats, at, sizes, row, place, keys, end, extents):
        queries = Queries(
            at.interleaved + place * sizes.pad_dim, at.query_scales + row, at.interleaved_sums
        )
        qk_int8(COUNT, floats, queries, keys, end, at.scores, extents)

    return interleave, scores


def _int4_keys(next_kind, count):
    qk_int4 = make_qk_int4(next_kind)
    COUNT = np.int64(count)

    @inlined
    def interleave(floats, at, sizes, row, place):
        # Each by itself.
        for r in range(COUNT):
            _interleave_one(
                floats,
                at,
                sizes,
                row + r,
                at.interleaved + place * sizes.pad_dim + r * (sizes.pad_dim // 2),
            )

    @inlined
    def scores(floats, at, sizes, row, place, keys, end, extents):
        queries = Queries(
            at.interleaved + place * sizes.pad_dim,
            at.query_scales + row,
            at.query_sums + row * 16 * sizes.k_spans,
        )
        qk_int4(COUNT, floats, queries, keys, end, at.scores, extents)

    return interleave, scores


@functools.cache
def make_values(kind: str, next_kind: str, count: int) -> Callable[..., Any]:
    """``accumulate`` for a storage kind of V; `next_kind` is K's, whose rows are prefetched."""
    return (
        _int4_values(next_kind, count) if kind == "int4" else _int8_values(kind, next_kind, count)
    )


def _int8_values(kind, next_kind, count):
    accumulate_int8 = make_accumulate_int8(next_kind, kind)
    COUNT = np.int64(count)

    @inlined
    def accumulate(floats, at, sizes, taken, values, begin, end, row, extents):
        quantise_probs(COUNT, floats, at.scores, values.scales_at, begin, end, at.prob_scales)
        weights = Weights(at.scores, at.prob_scales)
        outputs = Outputs(at.outputs + row * sizes.pad_v, sizes.pad_v, at.rescale)
        accumulate_int8(COUNT, taken, floats, weights, values, begin, end, outputs, extents)

    return accumulate


def _int4_values(next_kind, count):
    accumulate_int4 = make_accumulate_int4(next_kind)
    COUNT = np.int64(count)

    @inlined
    def accumulate(floats, at, sizes, taken, values, begin, end, row, extents):
        quantise_group_probs(
            COUNT, floats, at.scores, values.scales_at, sizes.dim_v, begin, end, at.group_probs,
            at.prob_sums,
        )  # fmt: skip
        weights = Weights(at.group_probs, at.prob_sums)
        outputs = Outputs(at.outputs + row * sizes.pad_v, sizes.pad_v, at.rescale)
        accumulate_int4(COUNT, taken, floats, weights, values, begin, end, outputs, extents)

    return accumulate
