"""The two sides of attention for few query rows: K's and V's, each in floats, in integers or in pairs of bf16.

K's: ``load_query`` puts a query row into scratch memory, ``interleave`` puts several side by side, ``scores``
multiplies them with a tile's K rows. V's: ``accumulate`` adds a tile's weighted V rows to the output. Both are made for
a number of rows that are taken at once, `count`, of which the first `taken` count. Meanwhile rows of the other side are
prefetched.

**Floats.** Rows are widened to the float type that attention computes in.

**Integers.** Quantised rows meet queries and probabilities of 16 bits. The error, 1e-4 of a result or so, is a
hundredth of what INT8 costs. INT8 goes this way with float32, and CODE4 and CODE6, whose levels are INT8, after a look
into a table; INT4 too where vectors have 512 bits.

**Pairs.** K and V in bf16 meet queries in bf16, and weights that are rounded to bf16. CPUs that multiply bf16 do so in
pairs of neighbours and add them up in float32, in the time that float32 takes for half as many. Products of queries and
keys are exact; a weight's rounding costs 2**-8 of it at most, as in FlashAttention (Dao et al., 2022) on a GPU, and
results are rounded to bf16 all the same. The softmax scale is left for the scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numkv.kernels.cpu.attention.engines import in_integers
from numkv.kernels.cpu.attention.llvm.floats import (
    make_accumulate_pv,
    make_interleave_queries,
    make_qk_tile,
)
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
from numkv.kernels.cpu.attention.llvm.pairs import make_accumulate_pairs, pair_row, pair_weights
from numkv.kernels.cpu.attention.records import (
    PAIRS,
    Outputs,
    QueryPlaces,
    WeightPlaces,
    float_type,
)
from numkv.kernels.cpu.vectors.arrays import clear, multiply
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.features import HAS_FOURS


@functools.cache
def make_loader(kind: str, compute: str) -> Callable[..., Any]:
    """``load_query`` for a storage kind of K and what attention computes in."""
    F = np.float32 if float_type(compute) == "float32" else np.float64

    @inlined
    def load_floats(floats, at, sizes, row, q_row, scale):
        first, end = at.queries + row * sizes.pad_dim, at.queries + (row + 1) * sizes.pad_dim
        multiply(q_row, scale, floats[first:end])
        clear(floats, first + sizes.dim, end)
        floats[at.query_scales + row] = F(1)

    @inlined
    def load_pairs(floats, at, sizes, row, q_row, scale):
        load_floats(floats, at, sizes, row, q_row, F(1))
        pair_row(floats, at.queries + row * sizes.pad_dim, sizes.pad_dim)
        floats[at.query_scales + row] = scale

    @inlined
    def load_int8(floats, at, sizes, row, q_row, scale):
        load_floats(floats, at, sizes, row, q_row, scale)
        start = at.queries + row * sizes.pad_dim
        floats[at.query_scales + row] = quantise_query(floats, start, sizes.dim, sizes.pad_dim)

    @inlined
    def load_int4(floats, at, sizes, row, q_row, scale):
        start = at.queries + row * sizes.pad_dim
        target = floats[start : start + sizes.pad_dim]
        clear(floats, start, start + sizes.pad_dim)
        spread_query(target, q_row, scale)
        floats[at.query_scales + row] = quantise_query(floats, start, sizes.dim, sizes.pad_dim)
        sum_query_groups(floats, start, sizes.dim, at.query_sums + row * 16 * sizes.k_spans)

    if in_integers(kind, compute):
        return load_int4 if kind == "int4" else load_int8
    return load_pairs if compute == PAIRS else load_floats


@functools.cache
def make_keys(
    kind: str, next_kind: str, compute: str, count: int
) -> tuple[Callable[..., Any], ...]:
    """``interleave, scores`` for a storage kind of K; `next_kind` is V's."""
    integers, COUNT = in_integers(kind, compute), np.int64(count)
    of_int4 = integers and kind == "int4"
    # Query rows are bytes by now, numbers of 16 bits, of which two take the place of a float, or floats.
    if integers and (of_int4 or HAS_FOURS):
        put, halves = interleave_bytes, 1
        qk = make_qk_int4(next_kind) if of_int4 else make_qk_int8(next_kind, kind)
    else:
        put, halves = make_interleave_queries(compute), 2 if integers or compute == PAIRS else 1
        qk = make_qk_tile(kind, compute, next_kind)

    @inlined
    def interleave(floats, at, sizes, row, place):
        put(
            COUNT, floats, at.queries + row * sizes.pad_dim, sizes.pad_dim, sizes.pad_dim // halves,
            at.interleaved + place * sizes.pad_dim,
        )  # fmt: skip

    @inlined
    def put_each(floats, at, sizes, row, place):
        for r in range(COUNT):
            put(
                np.int64(1), floats, at.queries + (row + r) * sizes.pad_dim, sizes.pad_dim, sizes.pad_dim,
                at.interleaved + place * sizes.pad_dim + r * (sizes.pad_dim // 2),
            )  # fmt: skip

    @inlined
    def scores(floats, at, sizes, row, place, keys, end, extents):
        queries = QueryPlaces(
            at.interleaved + place * sizes.pad_dim, at.query_scales + row,
            at.query_sums + row * 16 * sizes.k_spans,
        )  # fmt: skip
        qk(COUNT, floats, queries, keys, end, at.scores, extents)

    return put_each if of_int4 else interleave, scores


@functools.cache
def make_values(kind: str, next_kind: str, compute: str, count: int) -> Callable[..., Any]:
    """``accumulate`` for a storage kind of V; `next_kind` is K's."""
    COUNT = np.int64(count)

    @inlined
    def weigh_floats(floats, at, sizes, values, begin, end):
        return at.scores

    @inlined
    def weigh_pairs(floats, at, sizes, values, begin, end):
        pair_weights(COUNT, floats, at.scores, begin, end)
        return at.scores

    @inlined
    def weigh_int8(floats, at, sizes, values, begin, end):
        quantise_probs(COUNT, floats, at.scores, values.scales_at, begin, end, at.prob_scales)
        return WeightPlaces(at.scores, at.prob_scales)

    @inlined
    def weigh_int4(floats, at, sizes, values, begin, end):
        quantise_group_probs(
            COUNT, floats, at.scores, values.scales_at, sizes.dim_v, begin, end, at.group_probs,
            at.prob_sums,
        )  # fmt: skip
        return WeightPlaces(at.group_probs, at.prob_sums)

    if in_integers(kind, compute):
        if kind == "int4":
            weigh, add = weigh_int4, make_accumulate_int4(next_kind)
        else:
            weigh, add = weigh_int8, make_accumulate_int8(next_kind, kind)
    elif compute == PAIRS:
        weigh, add = weigh_pairs, make_accumulate_pairs(next_kind)
    else:
        weigh, add = weigh_floats, make_accumulate_pv(kind, compute, next_kind)

    @inlined
    def accumulate(floats, at, sizes, taken, values, begin, end, row, extents):
        weights = weigh(floats, at, sizes, values, begin, end)
        outputs = Outputs(at.outputs + row * sizes.pad_v, sizes.pad_v, at.rescale)
        add(COUNT, taken, floats, weights, values, begin, end, outputs, extents)

    return accumulate
