"""Intel's matrix unit (AMX): many query rows over K and V in bf16 or INT8.

Scores, softmax and sums are each done for all query rows of an item before the next begins. Output rows are stored as
columns until the item ends. Queries and weights are split into parts, which together are exact or good to 16 bits. If
queries, K and V are bf16, weights have one part of 8 bits, as in vector code for pairs of bf16. So results meet the
same bounds as those of vector code.

Vector code does the rest: items of few query rows, and tiles with NaN or infinity in which query rows see different
tokens.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.llvm.amx import (
    SEGMENT,
    make_all_finite,
    make_amx_accumulate,
    make_amx_locate_keys,
    make_amx_pack_queries,
    make_amx_pack_values,
    make_amx_qk,
    make_amx_softmax,
    transpose_blocks,
)
from numkv.kernels.cpu.attention.records import (
    TILE_UNIT,
    AmxScales,
    Outputs,
    SoftmaxState,
)
from numkv.kernels.cpu.attention.state import (
    FEW,
    floats_reader,
    item_of,
    lie_of,
    make_tile_of,
    places_of,
    put_lie,
    run_step,
    scale_of,
    seen_of,
    sizes_of,
    soft_cap_of,
    spare_of,
)
from numkv.kernels.cpu.attention.vector import make_load_rows, visible_in_tile, visible_to_tokens
from numkv.kernels.cpu.vectors.amx import amx_end, amx_shape
from numkv.kernels.cpu.vectors.arrays import clear, multiply
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.features import AMX_ROWS

_floats_of = floats_reader("float32")

# Integers that locate the K rows of a tile. The numbers of parts follow, one for each block of query rows.
_PLACES = 8


@inlined
def _blocks(rows):
    """Return how many blocks the query rows of a kv head fill."""
    return (rows + AMX_ROWS - 1) // AMX_ROWS


@inlined
def _query_floats(sizes):
    """Return the floats of a block of packed query rows: three parts of half a float for each element."""
    return (sizes.dim + TILE_UNIT - 1) // TILE_UNIT * TILE_UNIT * TILE_UNIT // 2 * 3 // 4


# The layout of output rows: as rows, or as columns.
_ROWS, _COLUMNS = np.int64(0), np.int64(1)


def make_amx_load(Q_KIND, K_KIND):
    """The step `LOAD`, which sets the unit up."""
    load_queries = _make_load_queries(Q_KIND, K_KIND)

    def load(state):
        are_many = item_of(state).is_large != 0
        put_lie(state, _COLUMNS if are_many else _ROWS)
        load_queries(state, are_many)
        return 0

    return load


def make_amx_attend(K_KIND, V_KIND, WEIGHT_PARTS):
    """The steps `ATTEND` and `ATTEND_MANY`, for an item of any size."""
    scores, softmax, accumulate = _make_steps(K_KIND, V_KIND, WEIGHT_PARTS)
    all_finite, tile_of = make_all_finite(V_KIND), make_tile_of(K_KIND, V_KIND)

    def attend(state):
        floats, at = _floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        ints, seen = spare_of(state), seen_of(state)
        soft_cap, tile = soft_cap_of(state), tile_of(state)
        low, high, alike = np.int64(0), np.int64(0), True
        wanted = _ROWS
        if item.is_large != 0:
            low, high, alike = visible_to_tokens(
                item, np.int64(0), item.tokens, seen, tile.start, tile.count
            )
            # A weight of 0 does not hide a NaN.
            if alike or all_finite(tile.values, low, high):
                wanted = _COLUMNS
        lie = lie_of(state)
        if wanted != lie:
            _turn(floats, at, sizes, item, lie != _ROWS)
        if wanted == _ROWS:
            run_step(state, np.int64(FEW), ())
        elif low < high:
            partly = not alike or low > 0 or high < TILE_UNIT
            scores(floats, ints, at, sizes, item, tile)
            softmax(floats, at, item, seen, soft_cap, tile, partly, sizes.group)
            accumulate(floats, at, sizes, item, tile, low, high)
        put_lie(state, wanted)
        return 0

    return attend


def leave_amx(state):
    """The step `LEAVE`: output rows as rows."""
    if lie_of(state) != _ROWS:
        _turn(_floats_of(state), places_of(state), sizes_of(state), item_of(state), True)
    return 0


def end_amx(state):
    """The step `END`: give the unit back."""
    amx_end()
    return 0


@inlined
def _turn(floats, at, sizes, item, to_rows):
    """Transpose output rows from columns to rows, or back."""
    heads = item.end_head - item.first_head
    _transpose_outputs(
        floats, at.outputs, at.amx_outputs, heads, item.rows, sizes.pad_v, not to_rows
    )


def _make_load_queries(q_kind, k_kind):
    load_rows = make_load_rows(q_kind, k_kind, "float32")
    pack_queries = make_amx_pack_queries(k_kind)
    F = np.float32
    # With bf16, queries stay unscaled, as their lower parts may then be zero. Scores are scaled instead.
    SCALE_LATER = k_kind == "bf16"

    @inlined
    def load_queries(state, are_many):
        floats, at = _floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        ints, scale = spare_of(state), scale_of(state)
        load_rows(state, np.float64(1) if SCALE_LATER and are_many else scale, are_many)
        if are_many:
            amx_shape()
            rows, heads = item.rows, item.end_head - item.first_head
            number = heads * _blocks(rows)
            clear(floats, at.amx_outputs, at.amx_outputs + number * AMX_ROWS * sizes.pad_v)
            for i in range(heads):
                for r in range(0, rows, AMX_ROWS):
                    number = i * _blocks(rows) + r // AMX_ROWS
                    ints[_PLACES + number] = pack_queries(
                        floats, at.queries + (i * rows + r) * sizes.pad_dim, sizes.pad_dim,
                        min(rows - r, AMX_ROWS), sizes.dim,
                        at.amx_queries + number * _query_floats(sizes), at.amx_spare,
                    )  # fmt: skip
            if SCALE_LATER:  # vector code takes the tiles that the unit cannot
                for i in range(AMX_ROWS):
                    floats[at.amx_scales + i] = F(scale)
                q_rows = floats[at.queries : at.queries + rows * heads * sizes.pad_dim]
                multiply(q_rows, F(scale), q_rows)

    return load_queries


def _make_steps(k_kind, v_kind, weight_parts):
    """``scores, softmax, accumulate`` of a tile, each for all query rows of a kv head."""
    locate_keys, qk = make_amx_locate_keys(k_kind), make_amx_qk(k_kind, v_kind)
    amx_softmax = make_amx_softmax(k_kind, v_kind, weight_parts)
    pack_values = make_amx_pack_values(v_kind, k_kind)
    accumulate_block = make_amx_accumulate(v_kind, weight_parts)
    F = np.float32
    SCALE_LATER = k_kind == "bf16"

    @inlined
    def scores(floats, ints, at, sizes, item, tile):
        locate_keys(ints, floats, at.amx_keys, tile.keys, tile.k_step)
        for r in range(0, item.rows, AMX_ROWS):
            number = (tile.head - item.first_head) * _blocks(item.rows) + r // AMX_ROWS
            qk(
                floats, at.amx_queries + number * _query_floats(sizes), ints[_PLACES + number], ints,
                sizes.dim, at.amx_scores + r * 2 * TILE_UNIT, tile.values, np.int64(r == 0),
            )  # fmt: skip

    @inlined
    def softmax(floats, at, item, seen, soft_cap, tile, partly, group):
        rows = item.rows
        for r in range(0, rows, AMX_ROWS):
            row = (tile.head - item.first_head) * rows + r  # of scratch memory
            taken = min(rows - r, AMX_ROWS)
            for i in range(AMX_ROWS if partly else 0):
                t = min(r + i, rows - 1) // group
                low, high = visible_in_tile(
                    seen.ranges, item.first_token + t, item.position + t, seen.window_left, item.begin,
                    item.end, tile.start, tile.count,
                )  # fmt: skip
                floats[at.amx_bounds + i], floats[at.amx_bounds + AMX_ROWS + i] = low, high
            scales = AmxScales(
                at.amx_scales if SCALE_LATER else at.query_scales + row, at.key_scales, at.value_scales,
                at.prob_scales + r,
            )  # fmt: skip
            state = SoftmaxState(at.maxima + row, at.sums + row, at.rescale + r)
            amx_softmax(
                floats, at.amx_scores + r * 2 * TILE_UNIT, taken, scales, F(soft_cap), np.int64(partly),
                at.amx_bounds, state,
            )  # fmt: skip

    @inlined
    def accumulate(floats, at, sizes, item, tile, low, high):
        for column in range(0, sizes.dim_v, SEGMENT):
            pack_values(
                floats, at.amx_values + column * (TILE_UNIT // 2), tile.values, low, high, column,
                tile.next_keys,
            )  # fmt: skip
        for r in range(0, item.rows, AMX_ROWS):
            number = (tile.head - item.first_head) * _blocks(item.rows) + r // AMX_ROWS
            outputs = Outputs(
                at.amx_outputs + number * AMX_ROWS * sizes.pad_v, np.int64(AMX_ROWS), at.rescale + r
            )
            accumulate_block(
                floats, at.amx_scores + r * 2 * TILE_UNIT, at.prob_scales + r, at.amx_values, sizes.pad_v,
                at.amx_spare, outputs,
            )  # fmt: skip

    return scores, softmax, accumulate


@register_jitable
def _transpose_outputs(floats, rows_at, columns_at, heads, rows, pad_v, to_columns):
    """Transpose an item's output rows by blocks, or back. It is a separate function, as it is seldom called."""
    square = np.int64(AMX_ROWS * AMX_ROWS)
    row_blocks = (rows + AMX_ROWS - 1) // AMX_ROWS
    for i in range(heads):
        for block in range(row_blocks):
            r = block * AMX_ROWS
            as_rows = rows_at + (i * rows + r) * pad_v, pad_v, np.int64(AMX_ROWS)
            first = columns_at + (i * row_blocks + block) * AMX_ROWS * pad_v
            as_columns = first, np.int64(AMX_ROWS), square
            count = min(rows - r, AMX_ROWS)
            source, target = as_columns, as_rows
            if to_columns:
                count = AMX_ROWS
                source, target = as_rows, as_columns
            transpose_blocks(floats, pad_v // AMX_ROWS, count, source, target)
