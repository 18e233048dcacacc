"""Tokens that the bits of a mask choose, beside those that a query sees without gaps.

Each query's are picked: tables of their rows and scales are put together, as if they lay one after another, and the
tile's steps take them. So nothing of the others is read, and they stand at positions that follow one another, as linear
biases (ALiBi: Press et al., arXiv:2108.12409) take them. A matrix unit is left alone: its engine knows of ranges only.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.offsets import TABLE
from numkv.kernels.cpu.attention.records import KV_TILE, Turn
from numkv.kernels.cpu.attention.state import (
    AT_ONCE,
    GATHER,
    item_of,
    mask_of,
    number_of,
    put_turn,
    run_step,
    sizes_of,
    spare_of,
    turn_of,
)
from numkv.kernels.cpu.attention.vector import attend_rows
from numkv.kernels.cpu.vectors.arrays import address_of
from numkv.kernels.cpu.vectors.records import ints_from
from numkv.rows.mask import BITS, END, PLAIN_END, bits_below, has_bit


@register_jitable
def _pick(ints, rows, row, begin, end, tile, keys, values):
    """Put together the tables of the tokens ``[begin, end)`` of a tile whose bits are set; return how many there are.

    Up to the end of a tile, the last one stands in for those that are missing, as whole groups are read.
    """
    number, base = np.int64(0), rows[row, PLAIN_END]
    for token in range(begin, end):
        if has_bit(rows, row, token - base):
            _copy(ints, number, token - tile, keys, values)
            number += 1
    for i in range(number if number > 0 else KV_TILE, KV_TILE):
        for table in range(4):
            ints[table * TABLE + i] = ints[table * TABLE + number - 1]
    return number


@register_jitable
def _copy(ints, to, j, keys, values):
    """Copy where the row and the scales of a tile's token are."""
    ints[to], ints[TABLE + to] = keys[j], values[j]
    ints[2 * TABLE + to], ints[3 * TABLE + to] = keys[2 * TABLE + j], values[2 * TABLE + j]


def attend_picked(state):
    """The step `PICK`: attend to the tokens of a tile that bits choose, for one query token after another."""
    item, turn, sizes, rows, ints = (
        item_of(state), turn_of(state), sizes_of(state), mask_of(state), spare_of(state)
    )  # fmt: skip
    most, size = number_of(state, AT_ONCE), np.int64(4 * TABLE)
    keys, values = ints_from(turn.keys_at, size), ints_from(turn.values_at, size)
    picked_at = address_of(ints)
    values_at = picked_at + 8 * TABLE
    for t in range(item.tokens):
        row = item.first_token + t
        base = rows[row, PLAIN_END]
        begin = max(max(item.begin, turn.start), base)
        end = min(min(item.end, turn.start + KV_TILE), rows[row, END])
        high = np.int64(0)
        if begin < end:
            high = _pick(ints, rows, row, begin, end, turn.start, keys, values)
        if high > 0:
            # Where the first of them stands.
            start = base + bits_below(rows, row, BITS, begin - base)
            put_turn(
                state,
                Turn(start, turn.head, picked_at, values_at, turn.v_extents_at, turn.k_extents_at, picked_at,
                     values_at, turn.k_step),
            )  # fmt: skip
            run_step(state, np.int64(GATHER), ())
            r, stop = np.int64(t * sizes.group), (t + 1) * sizes.group
            while r < stop:
                taken = min(stop - r, most)
                attend_rows(state, r, taken, np.int64(0), high)
                r += taken
    put_turn(state, turn)
    return 0
