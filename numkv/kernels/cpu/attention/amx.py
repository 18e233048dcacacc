"""The engine of Intel's matrix unit (AMX), for sequences of many query rows over K and V in bf16 or INT8.

Each kind of work (scores, softmax, sums) is done for all query rows of an item before the next; output rows lie as
columns until the item ends. What is split into parts there (queries, weights) is exact or good to 16 bits, so results
meet the same bounds as those of vector code, which takes what is left: items of few query rows that `amx_few` does not
take, and tiles with NaN or infinity in which query rows see different tokens.
"""

from __future__ import annotations

import functools

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.amx_few import FewSteps, is_few, make_amx_few
from numkv.kernels.cpu.attention.engines import Engine
from numkv.kernels.cpu.attention.floats import clear, multiply
from numkv.kernels.cpu.attention.llvm.amx_pv import (
    SEGMENT,
    make_all_finite,
    make_amx_accumulate,
    make_amx_pack_values,
    transpose_blocks,
)
from numkv.kernels.cpu.attention.llvm.amx_qk import (
    make_amx_locate_keys,
    make_amx_pack_queries,
    make_amx_qk,
)
from numkv.kernels.cpu.attention.llvm.amx_softmax import make_amx_softmax
from numkv.kernels.cpu.attention.records import KV_TILE, AmxScales, Outputs, SoftmaxState
from numkv.kernels.cpu.attention.vector import make_load_rows, make_vector
from numkv.kernels.cpu.attention.visible import visible_in_tile, visible_to_tokens
from numkv.kernels.cpu.inline import inlined
from numkv.kernels.cpu.vectors.amx import amx_end, amx_shape
from numkv.kernels.cpu.vectors.features import AMX_ROWS

__all__ = ["make_amx"]

# Integers that say where the K rows of a tile are; then, by blocks of query rows, how many parts these take.
_PLACES = 8


@inlined
def _blocks(rows):
    """Blocks of query rows that those of a kv head take."""
    return (rows + AMX_ROWS - 1) // AMX_ROWS


@inlined
def _query_floats(sizes):
    """Floats of a block of packed query rows: three parts of half a float for each element."""
    return (sizes.dim + KV_TILE - 1) // KV_TILE * KV_TILE * KV_TILE // 2 * 3 // 4


# How output rows lie, and whose tile it is: rows, columns by many query rows, sums by few.
_VECTOR, _MANY, _FEW = np.int64(0), np.int64(1), np.int64(2)


@functools.cache
def make_amx(k_kind: str, v_kind: str, with_few: bool) -> Engine:
    """The engine of the matrix unit for storage kinds of K and of V; `with_few`: it takes few query rows, too."""
    attend_rest = make_vector(k_kind, v_kind, "float32").attend_tile
    load_queries = _make_load_queries(k_kind, v_kind)
    scores, softmax, accumulate = _make_steps(k_kind, v_kind)
    all_finite = make_all_finite(v_kind)
    few = make_amx_few(k_kind, v_kind) if with_few else _NO_FEW
    load_few, attend_few, rows_of_few = few
    way_of = _way_of if with_few else _way_without_few

    @inlined
    def begin():
        pass

    @inlined
    def load(q, k_scale, floats, ints, at, sizes, item, scale):
        way = way_of(item)
        if way == _FEW:
            load_few(q, k_scale, floats, at, sizes, item, scale)
        else:
            load_queries(q, k_scale, floats, ints, at, sizes, item, scale, way == _MANY)
        return way

    @inlined
    def turn(floats, at, sizes, item, way, to_rows):
        """Output rows as they lie for a way, as rows; or back."""
        heads = item.end_head - item.first_head
        if way == _MANY:
            _transpose_outputs(
                floats, at.outputs, at.amx_outputs, heads, item.rows, sizes.pad_v, not to_rows
            )
        elif way == _FEW:
            rows_of_few(floats, at, sizes, item, not to_rows)

    @inlined
    def attend_tile(floats, ints, at, sizes, item, seen, soft_cap, tile, lie):
        way = way_of(item)
        low, high, alike = np.int64(0), np.int64(0), True
        wanted = way
        if way != _VECTOR:
            low, high, alike = visible_to_tokens(item, np.int64(0), item.tokens, seen, tile.start)
            # A weight of 0 does not hide a NaN.
            if not (alike or all_finite(tile.values, low, high)):
                wanted = _VECTOR
        if wanted != lie:
            turn(floats, at, sizes, item, way, lie != _VECTOR)
        if wanted == _VECTOR:
            attend_rest(floats, ints, at, sizes, item, seen, soft_cap, tile, False)
        elif low < high:
            if wanted == _FEW:
                attend_few(floats, ints, at, sizes, item, seen, soft_cap, tile, low, high, alike)
            else:
                partly = not alike or low > 0 or high < KV_TILE
                scores(floats, ints, at, sizes, item, tile)
                softmax(floats, at, item, seen, soft_cap, tile, partly, sizes.group)
                accumulate(floats, at, sizes, item, tile, low, high)
        return wanted

    @inlined
    def finish(floats, at, sizes, item, lie):
        turn(floats, at, sizes, item, lie, True)

    return Engine(begin, load, attend_tile, finish, amx_end)


@inlined
def _way_of(item):
    """Whose an item is."""
    return _FEW if is_few(item) else _MANY if item.is_large else _VECTOR


@inlined
def _way_without_few(item):
    return _MANY if item.is_large else _VECTOR


@inlined
def _load_none(q, k_scale, floats, at, sizes, item, scale):
    pass


@inlined
def _attend_none(floats, ints, at, sizes, item, seen, soft_cap, tile, low, high, alike):
    pass


@inlined
def _rows_of_none(floats, at, sizes, item, back):
    pass


_NO_FEW = FewSteps(_load_none, _attend_none, _rows_of_none)


def _make_load_queries(k_kind, v_kind):
    load_rows = make_load_rows(k_kind, v_kind, "float32")
    pack_queries = make_amx_pack_queries(k_kind)
    F = np.float32
    # Queries meet bf16 as they are, whose lower parts may be zero, and scores are scaled.
    SCALE_LATER = k_kind == "bf16"

    @inlined
    def load_queries(q, k_scale, floats, ints, at, sizes, item, scale, are_many):
        first_scale = np.float64(1) if SCALE_LATER and are_many else scale
        load_rows(q, k_scale, floats, at, sizes, item, first_scale, are_many)
        if are_many:
            amx_shape(np.int64(AMX_ROWS))
            rows, heads = item.rows, item.end_head - item.first_head
            number = heads * _blocks(rows)
            clear(floats[at.amx_outputs : at.amx_outputs + number * AMX_ROWS * sizes.pad_v])
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


def _make_steps(k_kind, v_kind):
    """``scores, softmax, accumulate`` of a tile, each for all query rows of a kv head."""
    locate_keys, qk = make_amx_locate_keys(k_kind), make_amx_qk(k_kind, v_kind)
    amx_softmax = make_amx_softmax(k_kind, v_kind)
    pack_values = make_amx_pack_values(v_kind, k_kind)
    accumulate_block = make_amx_accumulate(v_kind)
    F = np.float32
    SCALE_LATER = k_kind == "bf16"

    @inlined
    def scores(floats, ints, at, sizes, item, tile):
        locate_keys(ints, floats, at.amx_keys, tile.keys, tile.k_step)
        for r in range(0, item.rows, AMX_ROWS):
            number = (tile.head - item.first_head) * _blocks(item.rows) + r // AMX_ROWS
            qk(
                floats, at.amx_queries + number * _query_floats(sizes), ints[_PLACES + number], ints,
                sizes.dim, at.amx_scores + r * 2 * KV_TILE, tile.values, np.int64(r == 0),
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
                    item.end, tile.start,
                )  # fmt: skip
                floats[at.amx_bounds + i], floats[at.amx_bounds + AMX_ROWS + i] = low, high
            scales = AmxScales(
                at.amx_scales if SCALE_LATER else at.query_scales + row, at.key_scales, at.value_scales,
                at.prob_scales + r,
            )  # fmt: skip
            state = SoftmaxState(at.maxima + row, at.sums + row, at.rescale + r)
            amx_softmax(
                floats, at.amx_scores + r * 2 * KV_TILE, taken, scales, F(soft_cap), np.int64(partly),
                at.amx_bounds, state,
            )  # fmt: skip

    @inlined
    def accumulate(floats, at, sizes, item, tile, low, high):
        for column in range(0, sizes.dim_v, SEGMENT):
            pack_values(
                floats, at.amx_values + column * (KV_TILE // 2), tile.values, low, high, column,
                tile.next_keys,
            )  # fmt: skip
        for r in range(0, item.rows, AMX_ROWS):
            number = (tile.head - item.first_head) * _blocks(item.rows) + r // AMX_ROWS
            outputs = Outputs(
                at.amx_outputs + number * AMX_ROWS * sizes.pad_v, np.int64(AMX_ROWS), at.rescale + r
            )
            accumulate_block(
                floats, at.amx_scores + r * 2 * KV_TILE, at.prob_scales + r, at.amx_values, sizes.pad_v,
                at.amx_spare, outputs,
            )  # fmt: skip

    return scores, softmax, accumulate


@register_jitable
def _transpose_outputs(floats, rows_at, columns_at, heads, rows, pad_v, to_columns):
    """Transpose an item's output rows, by blocks of rows, or back; a function of its own, as it is seldom called."""
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
