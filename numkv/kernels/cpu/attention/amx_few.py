"""Few query rows on Intel's matrix unit: decoding over K and V in bf16, up to 16 rows of a kv head at once.

Reading memory takes most of the time there. The unit makes arithmetic so short that reading hardly has to stop for it,
if both take turns in small pieces: blocks of 8 KB of K, then as much of V, and while one is used the other is
prefetched. Shapes of tiles are set once an item. What is split in two parts (queries, weights) is good to 16 bits.
Where nobody could time this build is said in perf/README.md.

Query rows that see different tokens of a tile whose V has NaN or infinity are left to vector code. Elsewhere an
infinity in V gives NaN where a part of a weight is 0. Denormal numbers count as 0, those in K and V (below 1.2e-38) and
among the lower parts of queries and weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.llvm.amx import make_amx_locate_keys
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
    Rows,
    SoftmaxState,
)
from numkv.kernels.cpu.attention.state import (
    floats_reader,
    item_of,
    places_of,
    scale_of,
    sizes_of,
)
from numkv.kernels.cpu.attention.vector import make_load_rows
from numkv.kernels.cpu.attention.visible import visible_in_tile
from numkv.kernels.cpu.vectors.amx import AMX_TILE, amx_shape
from numkv.kernels.cpu.vectors.arrays import clear
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.features import AMX_ROWS

LEAST, MOST = AMX_FEW
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
    return item.rows >= LEAST and item.rows <= MOST


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
        floats, at, sizes, item = (
            _floats_of(state),
            places_of(state),
            sizes_of(state),
            item_of(state),
        )
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
            next_rows = Rows(
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
