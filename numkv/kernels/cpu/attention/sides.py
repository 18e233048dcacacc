"""The two sides of attention for few query rows: K's and V's, each in floats, in integers or in pairs of bf16.

K's side: ``load_query`` copies a query row into scratch memory, ``interleave`` interleaves several, and ``scores``
multiplies them with a tile's K rows. V's side: ``accumulate`` adds a tile's weighted V rows to the output. Both are
made for `count` rows at once, of which the first `taken` are used. Meanwhile rows of the other side are prefetched.

**Floats.** Rows are widened to the float type that attention computes in.

**Integers.** Quantised rows are multiplied with queries and probabilities of 16 bits. The error is about 1e-4 of a
result, a hundredth of INT8's own error. INT8 uses integers with float32. So do CODE4 and CODE6, whose levels are INT8,
after a table lookup. INT4 uses them on CPUs that add products of bytes in pairs.

**Pairs.** K and V in bf16 are multiplied with queries in bf16, and with weights rounded to bf16. CPUs with bf16
products multiply pairs of neighbours and add them up in float32. They process twice as many elements as float32 does in
the same time. Products of queries and keys are exact. Rounding changes a weight by at most 2**-8 of it, as in
FlashAttention (Dao et al., 2022) on a GPU. Results are rounded to bf16 in any case. The softmax scale is applied to the
scores.

**Scales** of a tile's tokens are put side by side. Scales of a head are multiplied into queries and outputs. Scales of
K's channels are multiplied into the query rows for the duration of a tile; see
`numkv.kernels.cpu.attention.llvm.channels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numkv.kernels.cpu.attention.engines import in_integers
from numkv.kernels.cpu.attention.llvm.channels import (
    make_gather_channels,
    make_scale_queries,
)
from numkv.kernels.cpu.attention.llvm.floats import (
    make_accumulate_pv,
    make_interleave_queries,
    make_qk_tile,
)
from numkv.kernels.cpu.attention.llvm.integers import (
    interleave_bytes,
    make_accumulate_int4,
    make_accumulate_int8,
    make_qk_int4,
    make_qk_int8,
    quantise_group_probs,
    quantise_probs,
    quantise_query,
    spread_query,
    sum_query_groups,
)
from numkv.kernels.cpu.attention.llvm.pairs import make_accumulate_pairs, pair_row, pair_weights
from numkv.kernels.cpu.attention.llvm.scales import make_gather_groups, make_gather_scales
from numkv.kernels.cpu.attention.offsets import TABLE
from numkv.kernels.cpu.attention.records import (
    PAIRS,
    Outputs,
    QueryPlaces,
    WeightPlaces,
    float_type,
)
from numkv.kernels.cpu.attention.state import (
    floats_reader,
    make_scales_of,
    places_of,
    sizes_of,
    turn_of,
)
from numkv.kernels.cpu.convert import scaled_rows
from numkv.kernels.cpu.vectors.arrays import clear, ints_from
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.features import HAS_FOURS
from numkv.kernels.cpu.vectors.prefetch import prefetch
from numkv.kinds import kind as kind_named


@functools.cache
def make_gather(kind: str, compute: str, by_group: bool = False) -> Callable[..., Any]:
    """Make ``gather(floats, to_at, scale, offsets, next_offsets, groups, count)`` for a storage kind.

    It records the scales of a tile's `count` tokens, which start at `offsets`, and prefetches those of the next tile.
    With `by_group`, INT4 scales are ordered by group.
    """
    found = kind_named(kind)
    gather_scales = make_gather_scales(compute)
    gather_groups = make_gather_groups(compute, by_group)

    @inlined
    def prefetch_scales(scale, offsets, groups, count):
        # Tokens whose scales fill a cache line.
        line = max(1, 64 // (groups * scale.itemsize))
        for i in range(0, count, line):
            prefetch(scale, offsets[i])

    @inlined
    def of_rows(floats, to_at, scale, offsets, next_offsets, groups, count):
        gather_scales(floats, to_at, scale, offsets, count)
        prefetch_scales(scale, next_offsets, groups, count)

    @inlined
    def of_groups(floats, to_at, scale, offsets, next_offsets, groups, count):
        gather_groups(floats, to_at, scale, offsets, groups, count)
        prefetch_scales(scale, next_offsets, groups, count)

    @inlined
    def nothing(floats, to_at, scale, offsets, next_offsets, groups, count):
        pass

    if not found.has_scales:
        return nothing
    return of_groups if found.group_size else of_rows


@functools.cache
def make_of_head(kind: str, compute: str) -> Callable[..., Any]:
    """Make ``of_head(factor, scale, head)`` for a storage kind: a factor times the kv head's scale, if it has one."""
    F = np.float32 if compute == "float32" else np.float64

    @inlined
    def scaled(factor, scale, head):
        return F(factor * scale[head])

    @inlined
    def unscaled(factor, scale, head):
        return F(factor)

    return scaled if kind_named(kind).scales_per == "head" else unscaled


def make_gather_turn(K_KIND, V_KIND, COMPUTE):
    """Make the step `GATHER`: gather the scales of a turn's tokens, and prefetch those of the next turn."""
    OF_K = kind_named(K_KIND)
    BY_CHANNEL, FINE = OF_K.group_tokens > 0, OF_K.fine_channels
    gather_channels = make_gather_channels(float_type(COMPUTE), OF_K.is_packed, FINE)
    gather_k = make_gather(K_KIND, float_type(COMPUTE), in_integers(K_KIND, COMPUTE))
    gather_v = make_gather(V_KIND, float_type(COMPUTE))
    floats_of, scales_of = floats_reader(COMPUTE), make_scales_of(K_KIND, V_KIND)

    def gather(state):
        floats, at = floats_of(state), places_of(state)
        sizes, turn = sizes_of(state), turn_of(state)
        k_scale, v_scale = scales_of(state)
        if BY_CHANNEL:
            gather_channels(
                floats, at.key_scales, k_scale, _scales_by(turn.keys_at), sizes.dim, sizes.pad_dim
            )  # fmt: skip
            next_at = _scales_by(turn.next_keys_at)[0]
            for i in range(0, 2 * sizes.dim + FINE, 64 // k_scale.itemsize):
                prefetch(k_scale, next_at + i)
        else:
            gather_k(
                floats, at.key_scales, k_scale, _scales_by(turn.keys_at), _scales_by(turn.next_keys_at),
                sizes.k_groups, turn.count,
            )  # fmt: skip
        gather_v(
            floats, at.value_scales, v_scale, _scales_by(turn.values_at), _scales_by(turn.next_values_at),
            sizes.v_groups, turn.count,
        )  # fmt: skip
        return 0

    return gather


@inlined
def _scales_by(rows_at):
    """Return the table of scales that belongs to the table of rows at an address."""
    return ints_from(rows_at + np.int64(8 * 2 * TABLE), np.int64(TABLE))


@functools.cache
def make_loader(q_kind: str, kind: str, compute: str) -> Callable[..., Any]:
    """Make ``load_query`` for a kind of queries, a storage kind of K and a computing dtype."""
    take, _ = scaled_rows(q_kind, float_type(compute))
    F = np.float32 if float_type(compute) == "float32" else np.float64

    @inlined
    def load_floats(floats, at, sizes, row, q_row, scale):
        first, end = at.queries + row * sizes.pad_dim, at.queries + (row + 1) * sizes.pad_dim
        take(q_row, scale, floats[first:end])
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
        loaded = floats[at.interleaved : at.interleaved + sizes.dim]  # memory that is unused so far
        take(q_row, scale, loaded)
        spread_query(target, loaded)
        floats[at.query_scales + row] = quantise_query(floats, start, sizes.dim, sizes.pad_dim)
        sum_query_groups(floats, start, sizes.dim, at.query_sums + row * 16 * sizes.k_spans)

    if kind_named(kind).group_tokens:
        return load_floats
    if in_integers(kind, compute):
        return load_int4 if kind == "int4" else load_int8
    return load_pairs if compute == PAIRS else load_floats


@functools.cache
def make_keys(
    kind: str, next_kind: str, compute: str, count: int
) -> tuple[Callable[..., Any], ...]:
    """Make ``interleave, scores`` for a storage kind of K; `next_kind` is V's."""
    integers, COUNT = in_integers(kind, compute), np.int64(count)
    by_channel, real = kind_named(kind).group_tokens > 0, float_type(compute)
    fine = kind_named(kind).fine_channels
    if by_channel:
        # Codes of 8 bits are those of INT8, and second codes are further elements of a row.
        kind = "int4_channel" if kind_named(kind).is_packed else "int8"
    scale_queries = make_scale_queries(kind, real, integers, fine, next_kind)
    of_int4 = integers and kind == "int4"
    # Query rows are now bytes, 16-bit numbers (two in the space of a float), or floats.
    if integers and (of_int4 or HAS_FOURS):
        put, halves = interleave_bytes, 1
        qk = make_qk_int4(next_kind) if of_int4 else make_qk_int8(next_kind, kind, by_channel)
    else:
        put = make_interleave_queries(kind, compute)
        halves = 2 if integers or compute == PAIRS else 1
        qk = make_qk_tile(kind, compute, next_kind, by_channel)

    @inlined
    def interleave(floats, at, sizes, row, place):
        put(
            COUNT, floats, at.queries + row * sizes.pad_dim, sizes.pad_dim, sizes.pad_dim // halves,
            at.interleaved + place * sizes.pad_dim,
        )  # fmt: skip

    @inlined
    def scores(floats, at, sizes, row, place, keys, end, extents):
        queries = QueryPlaces(
            at.interleaved + place * sizes.pad_dim, at.query_scales + row,
            at.query_sums + row * 16 * sizes.k_spans, at.channel_addends,
        )  # fmt: skip
        qk(COUNT, floats, queries, keys, end, at.scores, extents)

    @inlined
    def scores_of_channels(floats, at, sizes, row, place, keys, end, extents):
        scale_queries(
            COUNT, floats, at.queries + row * sizes.pad_dim, at.key_scales,
            at.interleaved + place * sizes.pad_dim, at.query_scales + row, at.channel_addends, sizes.k_dim,
            sizes.pad_dim, extents,
        )  # fmt: skip
        scores(floats, at, sizes, row, place, keys, end, extents)

    if by_channel:
        return nothing_to_interleave, scores_of_channels
    return interleave, scores


@inlined
def nothing_to_interleave(floats, at, sizes, row, place):
    """Do nothing: with scales of K's channels, query rows differ in every tile."""


@functools.cache
def make_values(kind: str, next_kind: str, compute: str, count: int) -> Callable[..., Any]:
    """Make ``accumulate`` for a storage kind of V; `next_kind` is K's."""
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
