"""Scratch memory of a worker: one list of what it holds and how many floats of each, from which all offsets follow."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from numkv.kernels.cpu.attention.records import (
    AMX_QUERY_ROWS,
    INT4_SPAN,
    KV_TILE,
    MANY_QUERY_ROWS,
    PANEL,
    QUERY_ROWS,
)
from numkv.kernels.cpu.vectors.features import AMX_ROWS, LANES, ROW_UNROLL
from numkv.kinds import kind

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
    #: Query rows interleaved, and how many were interleaved together.
    interleaved: int
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


def lay_out(
    k_kind: str,
    v_kind: str,
    k_in_integers: bool,
    use_amx: int,
    by_panels: bool,
    in_pairs: bool,
    extents: tuple[int, int, int],
) -> np.ndarray[Any, Any]:
    """`Sizes`, where parts of a worker's scratch memory begin as `Scratch` has them, and how many floats it has.

    `extents` are the elements of a K row and of a V row, and the q heads of a kv head.
    """
    dim, dim_v, group = extents
    rows_at_most = AMX_QUERY_ROWS if use_amx else MANY_QUERY_ROWS if by_panels else QUERY_ROWS
    k_group, v_group = kind(k_kind).group_size, kind(v_kind).group_size
    k_packed = k_in_integers and k_group > 0
    pad_k = KV_TILE if use_amx else INT4_SPAN if k_packed else 4 * LANES if k_in_integers else LANES
    pad_v = KV_TILE if use_amx else LANES
    if in_pairs:  # two elements to a lane
        pad_k, pad_v = max(pad_k, 2 * LANES), max(pad_v, 2 * LANES)
    # Whole groups are read, if not written; and every table begins where a cache line does.
    rows = (max(rows_at_most, group) + _UNROLL + LINE - 1) // LINE * LINE
    sizes = Sizes(
        dim,
        dim_v,
        group,
        rows,
        _up(dim, pad_k),
        _up(dim_v, pad_v),
        -(-dim // INT4_SPAN),
        -(-dim_v // INT4_SPAN),
        -(-dim // k_group) if k_group > 0 else 1,
        -(-dim_v // v_group) if v_group > 0 else 1,
        _up(dim, LANES) + LINE,
        _up(dim_v, LANES) + LINE,
    )
    # Scales are put down by fours; a K tile of bf16 takes most.
    k_scales, v_scales = _up(sizes.k_groups, 4), _up(sizes.v_groups, 4)
    keys = _up(dim, KV_TILE) * KV_TILE // 2 if use_amx else 0
    blocks = max(1, rows_at_most // group) * ((group + AMX_ROWS - 1) // AMX_ROWS)
    blocks = blocks + rows_at_most // AMX_ROWS if use_amx else 0
    parts = Scratch(
        queries=rows * sizes.pad_dim,
        outputs=rows * sizes.pad_v,
        maxima=rows,
        sums=rows,
        query_scales=rows,
        scores=AMX_ROWS * KV_TILE,
        key_scales=2 * KV_TILE * k_scales,
        value_scales=2 * KV_TILE * v_scales,
        rescale=rows,
        prob_scales=rows,
        query_sums=rows * 16 * sizes.k_spans,
        prob_sums=LINE * 4 * sizes.v_spans,
        group_probs=_UNROLL * (KV_TILE // 2 * 4) * sizes.v_spans,
        interleaved=2 * rows * sizes.pad_dim,
        unrolls=2 * rows,
        amx_values=sizes.pad_v * (KV_TILE // 2) if use_amx else 0,
        amx_scores=2 * rows * KV_TILE if use_amx else 0,
        amx_spare=SPARE if use_amx else 0,
        amx_bounds=2 * AMX_ROWS if use_amx else 0,
        amx_scales=AMX_ROWS if use_amx else 0,
        amx_keys=keys,
        amx_queries=blocks * (3 * keys // 4),
        amx_outputs=blocks * AMX_ROWS * sizes.pad_v,
        many_queries=(rows // PANEL + 1) * PANEL * sizes.pad_dim if by_panels else 0,
        many_keys=KV_TILE * sizes.many_step if by_panels else 0,
        many_values=KV_TILE * sizes.many_step_v if by_panels else 0,
        many_scores=KV_TILE * PANEL if by_panels else 0,
        many_bounds=2 * PANEL if by_panels else 0,
        end=LINE,
    )
    places = itertools.accumulate(parts, initial=0)
    return np.array([*sizes, *places], np.int64)


def _up(number: int, unit: int) -> int:
    """The least multiple of a unit that is no less than a number."""
    return -(-number // unit) * unit
