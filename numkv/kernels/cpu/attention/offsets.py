"""Tables of the places of a KV tile's rows, which vector code reads.

A turn is a tile of one kv head. Its tables follow one another in a worker's integers. Each has 8 numbers more than
`KV_TILE`, as `fill_ramp` may write beyond::

    0           K rows       where each token's row or its scales start, in elements;
    TABLE       V rows       where both lie the same, those of K are V's too
    2 * TABLE   K's scales
    3 * TABLE   V's scales
    K_EXTENTS   extents of K rows, as a `PrefetchStream` takes them
    V_EXTENTS   extents of V rows

There are tables for two turns: this one, and the next, whose K rows are prefetched while V rows of this one are read.
Only the tables of a tile's first head are looked up (`locate`). Those of an item's other heads are one head's width
further on (`locate_next_head`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.records import AMX_QUERY_ROWS, KV_TILE, TILE_UNIT
from numkv.kernels.cpu.vectors.arrays import (
    ITEMSIZE,
    RAMP,
    SHAPE,
    STRIDES,
    fill_ramp,
    fill_shifted,
    int_at,
)
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.prefetch import NO_MORE

#: Numbers of a table.
TABLE = KV_TILE + RAMP
#: Numbers of extents: two for each token, and an end.
EXTENTS = 2 * (KV_TILE + 1)
K_EXTENTS, V_EXTENTS = 4 * TABLE, 4 * TABLE + EXTENTS
#: Numbers of a turn, in whole cache lines.
TURN = (V_EXTENTS + EXTENTS + RAMP - 1) // RAMP * RAMP
#: After the tables of two turns: integers of the engines.
SPARE = 2 * TURN
#: A matrix unit stores where K rows are and how many parts queries have. Masks store the tables of the tokens that a
#: row picks.
SPARE_INTS = (max(8 + AMX_QUERY_ROWS, 4 * TABLE) + RAMP - 1) // RAMP * RAMP
#: After that: the thread's `state`.
STATE_AT, STATE_INTS = SPARE + SPARE_INTS, 9 * RAMP
#: Integers of a worker.
WORKER_INTS = STATE_AT + STATE_INTS


class TileLayout(NamedTuple):
    """The memory layout of K, V and their scales, in elements."""

    #: Tokens of an entry of the block table, and tokens of a block.
    unit: int
    block_size: int
    #: Steps between blocks, heads and tokens of K and of V, then of their scales.
    k_block: int
    k_head: int
    k_token: int
    v_block: int
    v_head: int
    v_token: int
    k_scale_block: int
    k_scale_head: int
    k_scale_token: int
    v_scale_block: int
    v_scale_head: int
    v_scale_token: int
    #: Where a pool begins, words of a row, bytes of a word.
    k_base: int
    k_words: int
    k_size: int
    v_base: int
    v_words: int
    v_size: int
    #: Tokens that share scales: a whole tile or one; 0 without scales.
    k_scaled: int
    v_scaled: int
    #: Where V's tables begin: 0 if V and its scales are laid out as K, whose tables then serve both.
    v_table: int


@inlined
def whole_units(tokens):
    """Round a number of tokens up to whole units."""
    return (tokens + TILE_UNIT - 1) // TILE_UNIT * TILE_UNIT


@inlined
def _step(record, array, axis):
    """Return the step of an axis in elements, for an array of a record."""
    return int_at(record, array + STRIDES + axis) // int_at(record, array + ITEMSIZE)


@register_jitable
def layout_of(record, k, k_scale, v, v_scale, k_scaled, v_scaled, unit):
    """The `TileLayout` of pools and scales that are at these numbers of a record.

    Steps of scales that tokens lack are 0. `unit` is the number of tokens of a block table entry.
    """
    k_some, v_some = min(k_scaled, np.int64(1)), min(v_scaled, np.int64(1))
    k_block, k_head, k_token = _step(record, k, 0), _step(record, k, 1), _step(record, k, 2)
    v_block, v_head, v_token = _step(record, v, 0), _step(record, v, 1), _step(record, v, 2)
    ks_block = _step(record, k_scale, 0)
    ks_head, ks_token = _step(record, k_scale, 1), _step(record, k_scale, 2)
    vs_block = _step(record, v_scale, 0)
    vs_head, vs_token = _step(record, v_scale, 1), _step(record, v_scale, 2)
    differ = (k_block ^ v_block) | (k_head ^ v_head) | (k_token ^ v_token) | (k_scaled ^ v_scaled)
    differ |= k_some * ((ks_block ^ vs_block) | (ks_head ^ vs_head) | (ks_token ^ vs_token))
    return TileLayout(
        unit, int_at(record, k + SHAPE + 2), k_block, k_head, k_token, v_block, v_head, v_token,
        ks_block * k_some, ks_head * k_some, ks_token * k_some,
        vs_block * v_some, vs_head * v_some, vs_token * v_some,
        int_at(record, k), int_at(record, k + SHAPE + 3), int_at(record, k + ITEMSIZE),
        int_at(record, v), int_at(record, v + SHAPE + 3), int_at(record, v + ITEMSIZE),
        k_scaled, v_scaled, np.int64(0) if differ == 0 else np.int64(TABLE),
    )  # fmt: skip


@register_jitable
def locate(offsets, tile, tokens, begin, end, entries, head, layout):
    """Fill the tables of a turn.

    Parameters
    ----------
    offsets : int64 array
        The tables.
    tile, tokens : int
        The first token of the tile, and how many it has at most: whole units.
    begin, end : int
        Tokens ``[begin, end)`` of the sequence that matter. Others repeat their neighbours; their own blocks are never
        looked up.
    entries : int32 array
        The sequence's row of the block table.
    head : int
        The kv head.
    layout : Layout
        How K and V lie.
    """
    if begin >= end:  # nothing to be read or prefetched
        offsets[K_EXTENTS], offsets[V_EXTENTS] = layout.k_base, layout.v_base
        offsets[K_EXTENTS + 1] = offsets[V_EXTENTS + 1] = NO_MORE
        return
    unit, block_size, apart = layout.unit, layout.block_size, layout.v_table > 0
    p, stop, at = max(tile, begin), min(tile + tokens, end), np.int64(0)
    if p >= stop:  # a tile past the end
        p, stop = end - 1, end
    else:
        at = p - tile
    first = at
    k_extents, v_extents = (np.int64(K_EXTENTS), np.int64(0)), (np.int64(V_EXTENTS), np.int64(0))
    # Divisions are slow: only the first run needs one, and a contiguous cache needs none.
    entry = p // unit if p >= unit else np.int64(0)
    in_unit = p - entry * unit
    while p < stop:
        # A run of adjacent tokens.
        block, offset = np.int64(entries[entry]), in_unit
        run = min(unit - in_unit, stop - p)
        if unit < block_size:  # slots: as many as follow each other
            slot = block
            block = slot // block_size if slot >= block_size else np.int64(0)
            offset = slot - block * block_size
            most = min(block_size - offset, stop - p)
            while run < most and np.int64(entries[entry + run]) == slot + run:
                run += 1
        k_at = block * layout.k_block + head * layout.k_head + offset * layout.k_token
        v_at = block * layout.v_block + head * layout.v_head + offset * layout.v_token
        k_extents = _add_extents(
            offsets, k_extents, k_at, run, layout.k_token, layout.k_base, layout.k_words, layout.k_size
        )  # fmt: skip
        v_extents = _add_extents(
            offsets, v_extents, v_at, run, layout.v_token, layout.v_base, layout.v_words, layout.v_size
        )  # fmt: skip
        fill_ramp(offsets, at, run, k_at, layout.k_token)
        if apart:
            fill_ramp(offsets, TABLE + at, run, v_at, layout.v_token)
        if layout.k_scaled:
            s_at = block * layout.k_scale_block + head * layout.k_scale_head
            if layout.k_scaled > 1:
                s_at += offset // layout.k_scaled * layout.k_scale_token
                fill_ramp(offsets, 2 * TABLE + at, run, s_at, np.int64(0))
            else:
                s_at += offset * layout.k_scale_token
                fill_ramp(offsets, 2 * TABLE + at, run, s_at, layout.k_scale_token)
        if layout.v_scaled and apart:
            s_at = (
                block * layout.v_scale_block
                + head * layout.v_scale_head
                + offset * layout.v_scale_token
            )
            fill_ramp(offsets, 3 * TABLE + at, run, s_at, layout.v_scale_token)
        at += run
        p += run
        entry += run if unit == 1 else np.int64(1)
        in_unit = np.int64(0)
    # Prefetches beyond the last extent repeat it.
    for at_extent, _ in (k_extents, v_extents):
        offsets[at_extent] = offsets[at_extent - 2]
        offsets[at_extent + 1] = NO_MORE
    if first > 0 or at < whole_units(at):
        _stand_in(offsets, first, at)


@register_jitable
def locate_next_head(offsets, here, to, count, layout):
    """Fill the tables of a turn, at `to`, from those of the same `count` tokens of the kv head before, at `here`.

    All places move by one head's width, however many runs there are. This takes a fraction of the time of `locate`.
    """
    fill_shifted(offsets, to, count, here, layout.k_head)
    apart = layout.v_table > 0
    if apart:
        fill_shifted(offsets, to + TABLE, count, here + TABLE, layout.v_head)
    if layout.k_scaled:
        at = 2 * TABLE
        fill_shifted(offsets, to + at, count, here + at, layout.k_scale_head)
    if layout.v_scaled and apart:
        at = 3 * TABLE
        fill_shifted(offsets, to + at, count, here + at, layout.v_scale_head)
    _shift_extents(offsets, here + K_EXTENTS, to + K_EXTENTS, layout.k_head * layout.k_size)
    _shift_extents(offsets, here + V_EXTENTS, to + V_EXTENTS, layout.v_head * layout.v_size)


@register_jitable
def _shift_extents(offsets, source, to, shift):
    """Move extents by so many bytes; one that no longer begins a cache line prefetches the whole line."""
    i = np.int64(0)
    while offsets[source + i + 1] != NO_MORE:
        offsets[to + i] = offsets[source + i] + shift
        offsets[to + i + 1] = offsets[source + i + 1] + shift
        i += 2
    offsets[to + i] = offsets[source + i] + shift
    offsets[to + i + 1] = NO_MORE


@register_jitable
def _add_extents(offsets, extents, first, count, step, base, words, size):
    """Add `count` rows, the first at `first`, to extents; adjacent rows make one extent.

    `extents` has the place of the next extent and the end of the one before; the new pair is returned.
    """
    at, last_end = extents
    each = count if step == words else np.int64(1)
    i = np.int64(0)
    while i < count:  # the length of a range would need a division
        start = base + (first + i * step) * size
        if start != last_end:
            offsets[at] = start & -64
            at += 2
        last_end = start + each * words * size
        offsets[at - 1] = last_end
        i += each
    return at, last_end


@register_jitable
def _stand_in(offsets, first, end):
    """Repeat the first and the last of tokens ``[first, end)`` of a tile outside of them, up to whole units.

    It is a separate function, as it is seldom called.
    """
    more = whole_units(end) - end
    for table in (0, TABLE, 2 * TABLE, 3 * TABLE):
        for j in range(first):
            offsets[table + j] = offsets[table + first]
        fill_ramp(offsets, table + end, more, offsets[table + end - 1], 0)
