"""Intel's matrix unit (AMX): over K and V in bf16 or INT8 for many query rows, in bf16 for few of them as well.

**Many.** Each kind of work (scores, softmax, sums) is done for all query rows of an item before the next; output rows
lie as columns until the item ends. What is split into parts there (queries, weights) is exact or good to 16 bits, so
results meet the same bounds as those of vector code, which takes what is left: items of few query rows that are not
taken here, and tiles with NaN or infinity in which query rows see different tokens.

**Few**, up to 16 rows of a kv head at once: decoding. Reading memory takes most of the time there. The unit makes
arithmetic so short that reading hardly has to stop for it, if both take turns in small pieces: blocks of 8 KB of K,
then as much of V, and while one is used the other is prefetched. Shapes of tiles are set once an item. What is split in
two parts (queries, weights) is good to 16 bits. Where nobody could time this build is said in perf/README.md. An
infinity in V gives NaN where a part of a weight is 0. Denormal numbers count as 0, those in K and V (below 1.2e-38) and
among the lower parts of queries and weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from numkv.kernels.cpu.attention.llvm.amx_few import (
    KEPT,
    ON_LINE,
    amx_few_keep,
    amx_few_mend,
    amx_few_pack_queries,
    amx_few_pv,
    amx_few_qk,
    amx_few_softmax,
)
from numkv.kernels.cpu.attention.records import (
    AMX_FEW,
    KV_TILE,
    AmxFew,
    AmxScales,
    Outputs,
    SoftmaxState,
    TileRows,
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
from numkv.kernels.cpu.vectors.amx import AMX_TILE, amx_end, amx_shape
from numkv.kernels.cpu.vectors.arrays import clear, multiply
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.features import AMX_ROWS

_floats_of = floats_reader("float32")
# Columns of K up to which a block has 64 tokens: 8 KB.
_SHORT = 64


class FewSteps(NamedTuple):
    """Functions that become part of the kernel."""

    #: ``load(state)`` puts an item's query rows into scratch memory.
    load: Callable[..., Any]
    #: ``attend(floats, ints, at, sizes, item, seen, soft_cap, tile, low, high, alike)`` takes a tile of which any row
    #: sees tokens ``[low, high)``, and all rows do if `alike`.
    attend: Callable[..., Any]
    #: ``rows(floats, at, sizes, item, back)`` puts sums in order as output rows, or back.
    rows: Callable[..., Any]


@inlined
def is_few(item):
    """Whether an item's rows are few in this sense."""
    return AMX_FEW[0] <= item.rows and item.rows <= AMX_FEW[1]


@inlined
def _are_kept(sizes, item):
    """Whether sums stay in the unit as long as the item lasts."""
    return item.end_head - item.first_head == 1 and sizes.dim_v <= KEPT * AMX_ROWS


@inlined
def _few(at, sizes, item, head):
    """Sizes and places of the i-th kv head of an item."""
    places = at.amx_queries, at.amx_outputs, at.amx_scores, at.amx_values, at.amx_spare
    return _of_head(sizes.dim, sizes.dim_v, item.rows, head, places)


@register_jitable
def _of_head(dim, dim_v, item_rows, head, places):
    queries, outputs, scores, values, spare = places
    rows = np.int64(4) if item_rows <= 4 else np.int64(8) if item_rows <= 8 else np.int64(16)
    tile_rows = min(2 * rows, np.int64(AMX_ROWS))
    lines, v_lines = (dim + ON_LINE - 1) // ON_LINE, (dim_v + ON_LINE - 1) // ON_LINE
    query_floats = lines * (2 * AMX_TILE if rows == AMX_ROWS else AMX_TILE)
    block = np.int64(KV_TILE) if dim <= _SHORT else np.int64(KV_TILE // 2)
    square = KV_TILE * AMX_ROWS
    return AmxFew(
        rows, tile_rows, lines, v_lines, block, queries + head * query_floats,
        outputs + head * tile_rows * v_lines * ON_LINE, scores, scores + square, scores + 2 * square, values,
        spare,
    )  # fmt: skip


@functools.cache
def make_amx_few(k_kind: str, v_kind: str) -> FewSteps:
    """The steps for storage kinds of K and of V, both bf16."""
    load_rows = make_load_rows(k_kind, "float32")
    locate_keys = make_amx_locate_keys(k_kind)
    F = np.float32

    @inlined
    def load(state):
        floats, at = _floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        load_rows(state, scale_of(state), True)
        heads = item.end_head - item.first_head
        first = _few(at, sizes, item, np.int64(0))
        amx_shape(first.tile_rows)
        for i in range(heads):
            few = _few(at, sizes, item, np.int64(i))
            amx_few_pack_queries(
                floats, few, at.queries + i * item.rows * sizes.pad_dim, sizes.pad_dim, item.rows
            )
        sums = heads * first.tile_rows * first.v_lines * ON_LINE
        clear(floats, at.amx_outputs, at.amx_outputs + sums)
        # Weights of rows that fill up stay 0.
        clear(floats, first.weights_at, first.weights_at + 2 * AMX_ROWS * KV_TILE // 2)
        if _are_kept(sizes, item):
            amx_few_keep(floats, first, np.int64(1))

    @inlined
    def attend(floats, ints, at, sizes, item, seen, soft_cap, tile, low, high, alike):
        few = _few(at, sizes, item, tile.head - item.first_head)
        kept = np.int64(_are_kept(sizes, item))
        locate_keys(ints, floats, at.amx_keys, tile.keys, tile.k_step)
        if not alike or low > 0 or high < KV_TILE:
            for r in range(item.rows):
                t = r // sizes.group
                begin, end = visible_in_tile(
                    seen.ranges, item.first_token + t, item.position + t, seen.window_left, item.begin,
                    item.end, tile.start,
                )  # fmt: skip
                floats[at.amx_bounds + r], floats[at.amx_bounds + AMX_ROWS + r] = begin, end
        row = (tile.head - item.first_head) * item.rows
        state = SoftmaxState(at.maxima + row, at.sums + row, at.rescale)
        start = low - low % few.block
        while start < high:
            stop = start + few.block
            partly = not alike or low > start or high < stop
            amx_few_qk(
                floats, few, ints, max(start, low - low % AMX_ROWS), min(stop, high), tile.values
            )
            moved = amx_few_softmax(
                floats, few, item.rows, start, F(soft_cap), np.int64(partly), at.amx_bounds, state,
                tile.values,
            )  # fmt: skip
            ahead = tile.next_keys.offsets
            if stop < KV_TILE:
                ahead = tile.keys.offsets[stop:]
            next_rows = TileRows(
                tile.keys.words, ahead, tile.keys.dim, tile.keys.scales_at, tile.keys.groups
            )
            amx_few_pv(
                floats, few, tile.values, low, high, start, next_rows, at.rescale, moved, kept
            )
            start = stop

    @inlined
    def rows(floats, at, sizes, item, back):
        kept = _are_kept(sizes, item)
        if kept and not back:
            amx_few_keep(floats, _few(at, sizes, item, np.int64(0)), np.int64(0))
        for i in range(item.end_head - item.first_head):
            amx_few_mend(
                floats, _few(at, sizes, item, np.int64(i)), at.outputs + i * item.rows * sizes.pad_v,
                sizes.pad_v, item.rows, np.int64(back),
            )  # fmt: skip
        if kept and back:
            amx_few_keep(floats, _few(at, sizes, item, np.int64(0)), np.int64(1))

    return FewSteps(load, attend, rows)


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


def make_amx_load(K_KIND, V_KIND, WITH_FEW):
    """The step `LOAD`, which sets the unit up."""
    load_queries = _make_load_queries(K_KIND)
    load_few = (make_amx_few(K_KIND, V_KIND) if WITH_FEW else _NO_FEW).load
    way_of = _way_of if WITH_FEW else _way_without_few

    def load(state):
        way = way_of(item_of(state))
        put_lie(state, way)
        if way == _FEW:
            load_few(state)
        else:
            load_queries(state, way == _MANY)
        return 0

    return load


def make_amx_attend(K_KIND, V_KIND, WITH_FEW):
    """The steps `ATTEND` and `ATTEND_MANY`, for an item of any size."""
    scores, softmax, accumulate = _make_steps(K_KIND, V_KIND)
    all_finite, tile_of = make_all_finite(V_KIND), make_tile_of(K_KIND, V_KIND)
    few = make_amx_few(K_KIND, V_KIND) if WITH_FEW else _NO_FEW
    attend_few, rows_of_few = few.attend, few.rows
    way_of = _way_of if WITH_FEW else _way_without_few

    def attend(state):
        floats, at = _floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        ints, seen = spare_of(state), seen_of(state)
        soft_cap, tile = soft_cap_of(state), tile_of(state)
        way = way_of(item)
        low, high, alike = np.int64(0), np.int64(0), True
        wanted = way
        if way != _VECTOR:
            low, high, alike = visible_to_tokens(item, np.int64(0), item.tokens, seen, tile.start)
            # A weight of 0 does not hide a NaN.
            if not (alike or all_finite(tile.values, low, high)):
                wanted = _VECTOR
        lie = lie_of(state)
        if wanted != lie:
            _turn(floats, at, sizes, item, way, lie != _VECTOR, rows_of_few)
        if wanted == _VECTOR:
            run_step(state, np.int64(FEW), ())
        elif low < high:
            if wanted == _FEW:
                attend_few(floats, ints, at, sizes, item, seen, soft_cap, tile, low, high, alike)
            else:
                partly = not alike or low > 0 or high < KV_TILE
                scores(floats, ints, at, sizes, item, tile)
                softmax(floats, at, item, seen, soft_cap, tile, partly, sizes.group)
                accumulate(floats, at, sizes, item, tile, low, high)
        put_lie(state, wanted)
        return 0

    return attend


def make_amx_leave(K_KIND, V_KIND, WITH_FEW):
    """The step `LEAVE`: output rows as rows."""
    rows_of_few = (make_amx_few(K_KIND, V_KIND) if WITH_FEW else _NO_FEW).rows

    def leave(state):
        _turn(
            _floats_of(state), places_of(state), sizes_of(state), item_of(state), lie_of(state), True, rows_of_few
        )  # fmt: skip
        return 0

    return leave


def end_amx(state):
    """The step `END`: give the unit back."""
    amx_end()
    return 0


@inlined
def _turn(floats, at, sizes, item, way, to_rows, rows_of_few):
    """Output rows as they lie for a way, as rows; or back."""
    heads = item.end_head - item.first_head
    if way == _MANY:
        _transpose_outputs(
            floats, at.outputs, at.amx_outputs, heads, item.rows, sizes.pad_v, not to_rows
        )
    elif way == _FEW:
        rows_of_few(floats, at, sizes, item, not to_rows)


@inlined
def _way_of(item):
    """Whose an item is."""
    return _FEW if is_few(item) else _MANY if item.is_large else _VECTOR


@inlined
def _way_without_few(item):
    return _MANY if item.is_large else _VECTOR


@inlined
def _load_none(state):
    pass


@inlined
def _attend_none(floats, ints, at, sizes, item, seen, soft_cap, tile, low, high, alike):
    pass


@inlined
def _rows_of_none(floats, at, sizes, item, back):
    pass


_NO_FEW = FewSteps(_load_none, _attend_none, _rows_of_none)


def _make_load_queries(k_kind):
    load_rows = make_load_rows(k_kind, "float32")
    pack_queries = make_amx_pack_queries(k_kind)
    F = np.float32
    # Queries meet bf16 as they are, whose lower parts may be zero, and scores are scaled.
    SCALE_LATER = k_kind == "bf16"

    @inlined
    def load_queries(state, are_many):
        floats, at = _floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        ints, scale = spare_of(state), scale_of(state)
        load_rows(state, np.float64(1) if SCALE_LATER and are_many else scale, are_many)
        if are_many:
            amx_shape(np.int64(AMX_ROWS))
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
