"""Scratch memory of a worker: one list of what it holds and how many floats of each, from which all offsets follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.cpu.attention.records import (
    AMX_QUERY_ROWS,
    INT4_SPAN,
    KV_TILE,
    MANY_QUERY_ROWS,
    PANEL,
    QUERY_ROWS,
)
from numkv.kernels.cpu.vectors.emit import I64
from numkv.kernels.cpu.vectors.features import AMX_ROWS, LANES, ROW_UNROLL
from numkv.kinds import kind

__all__ = ["LINE", "SPARE", "Scratch", "Sizes", "make_layout", "places", "total"]

#: Floats in a cache line.
LINE = 16
# Floats that query rows on their way to a matrix unit, and its sums, take for a moment.
SPARE = 768
# Query rows that vector code takes at once, at most.
_UNROLL = ROW_UNROLL[0]


class Sizes(NamedTuple):
    """What the sizes of a call follow from."""

    dim: int
    dim_v: int
    #: Q heads of a kv head.
    group: int
    #: Query rows, and their floats and those of output rows, in whole vectors.
    max_rows: int
    pad_dim: int
    pad_v: int
    #: Spans of 128 elements that rows begin.
    k_spans: int
    v_spans: int
    #: Scales of a K row and of a V row.
    k_groups: int
    v_groups: int
    #: Of many query rows: floats from row to row of K and of V, whose columns then lie in different sets of a cache.
    many_step: int
    many_step_v: int


class Scratch(NamedTuple):
    """Floats of a worker: how many there are of each, or where they begin."""

    #: Query rows, and output rows.
    queries: int
    outputs: int
    #: Of query rows: the online softmax's maxima and sums, and the scales of rows as integers.
    maxima: int
    sums: int
    query_scales: int
    scores: int
    #: Scales of the tile's tokens, and of INT4 their groups' minima too.
    key_scales: int
    value_scales: int
    #: What rescales earlier sums, and scales of weights as integers.
    rescale: int
    prob_scales: int
    #: Sums of groups of query rows as integers.
    query_sums: int
    #: Of INT4 V rows: sums of minima with scales of weights, and weights of groups.
    prob_sums: int
    group_probs: int
    #: Query rows and their sums interleaved, and how many were interleaved together.
    interleaved: int
    interleaved_sums: int
    unrolls: int
    #: For a matrix unit: V rows, scores, what it adds up, which tokens rows see, scales of a block of query rows, K
    #: rows where they have to be moved, packed queries, and transposed output rows.
    amx_values: int
    amx_scores: int
    amx_spare: int
    amx_bounds: int
    amx_scales: int
    amx_keys: int
    amx_queries: int
    amx_outputs: int
    #: For many query rows: these by panels, side by side; K rows and V rows of a tile as floats; scores of a panel, and
    #: which tokens its rows see.
    many_queries: int
    many_keys: int
    many_values: int
    many_scores: int
    many_bounds: int
    #: Up to here, whole cache lines.
    end: int


def make_layout(
    k_kind: str,
    v_kind: str,
    k_in_integers: bool,
    use_amx: int,
    by_panels: bool,
    in_pairs: bool = False,
) -> tuple[Callable[[int, int, int], Sizes], Callable[[Sizes], Scratch]]:
    """``sizes_of(dim, dim_v, group)`` and ``scratch_of(sizes)``, the floats of each part, for a kernel's kinds."""
    rows_at_most = AMX_QUERY_ROWS if use_amx else MANY_QUERY_ROWS if by_panels else QUERY_ROWS
    k_kind_, v_kind_ = kind(k_kind), kind(v_kind)
    k_group, v_group = k_kind_.group_size, v_kind_.group_size
    k_packed = k_in_integers and k_group > 0
    pad_k = KV_TILE if use_amx else INT4_SPAN if k_packed else 4 * LANES if k_in_integers else LANES
    pad_v = KV_TILE if use_amx else LANES
    if in_pairs:  # two elements to a lane
        pad_k, pad_v = max(pad_k, 2 * LANES), max(pad_v, 2 * LANES)
    unroll, line = _UNROLL, LINE

    def sizes_of(dim, dim_v, group):
        # Whole groups are read, if not written; and every table begins where a cache line does.
        max_rows = (max(rows_at_most, group) + unroll + line - 1) // line * line
        return Sizes(
            dim,
            dim_v,
            group,
            max_rows,
            (dim + pad_k - 1) // pad_k * pad_k,
            (dim_v + pad_v - 1) // pad_v * pad_v,
            (dim + INT4_SPAN - 1) // INT4_SPAN,
            (dim_v + INT4_SPAN - 1) // INT4_SPAN,
            (dim + k_group - 1) // k_group if k_group > 0 else 1,
            (dim_v + v_group - 1) // v_group if v_group > 0 else 1,
            (dim + LANES - 1) // LANES * LANES + line,
            (dim_v + LANES - 1) // LANES * LANES + line,
        )

    def scratch_of(sizes):
        rows, k_spans, v_spans = sizes.max_rows, sizes.k_spans, sizes.v_spans
        # Scales are put down by fours; a K tile of bf16 takes most.
        k_scales, v_scales = (sizes.k_groups + 3) // 4 * 4, (sizes.v_groups + 3) // 4 * 4
        keys = (sizes.dim + KV_TILE - 1) // KV_TILE * KV_TILE * KV_TILE // 2 if use_amx else 0
        group = sizes.group
        blocks = max(1, rows_at_most // group) * ((group + AMX_ROWS - 1) // AMX_ROWS)
        blocks = blocks + rows_at_most // AMX_ROWS if use_amx else 0
        panels = rows // PANEL + 1
        return Scratch(
            rows * sizes.pad_dim,
            rows * sizes.pad_v,
            rows,
            rows,
            rows,
            AMX_ROWS * KV_TILE,
            2 * KV_TILE * k_scales,
            2 * KV_TILE * v_scales,
            rows,
            rows,
            rows * 16 * k_spans,
            line * 4 * v_spans,
            unroll * (KV_TILE // 2 * 4) * v_spans,
            2 * rows * sizes.pad_dim,
            2 * rows * 16 * k_spans,
            2 * rows,
            sizes.pad_v * (KV_TILE // 2) if use_amx else 0,
            2 * rows * KV_TILE if use_amx else 0,
            SPARE if use_amx else 0,
            2 * AMX_ROWS if use_amx else 0,
            AMX_ROWS if use_amx else 0,
            keys,
            blocks * (3 * keys // 4),
            blocks * AMX_ROWS * sizes.pad_v,
            panels * PANEL * sizes.pad_dim if by_panels else 0,
            KV_TILE * sizes.many_step if by_panels else 0,
            KV_TILE * sizes.many_step_v if by_panels else 0,
            KV_TILE * PANEL if by_panels else 0,
            2 * PANEL if by_panels else 0,
            line,
        )

    return sizes_of, scratch_of


@intrinsic
def places(typing_context, first, sizes):
    """Where parts of scratch memory begin that lie one after another: ``first + cumsum(sizes) - sizes``, by name."""

    def codegen(context, b, sig, args):
        at, starts = args[0], []
        for size in cgutils.unpack_tuple(b, args[1], len(sizes)):
            starts.append(at)
            at = b.add(at, size)
        return context.make_tuple(b, sig.return_type, starts)

    return sizes(first, sizes), codegen


@intrinsic
def total(typing_context, sizes):
    """``sum(sizes)``."""

    def codegen(context, b, sig, args):
        found = I64(0)
        for size in cgutils.unpack_tuple(b, args[0], len(sizes)):
            found = b.add(found, size)
        return found

    return types.int64(sizes), codegen
