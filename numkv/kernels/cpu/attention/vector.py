"""Few query rows in vector code, for K and V sides in floats, integers or pairs of bf16.

Scores are stored token after token, with the query rows of a group next to each other (``s[t, r]``). So few lanes
remain to be added, and one softmax serves all rows. Query rows are interleaved for this once an item.

`attend_few`, which finds the tokens that each row sees, is one kernel for all kinds. The arithmetic is a kernel for
each number of rows that are computed at once (`make_rows`). Few groups of q heads need more than one such kernel.

A mask's bits choose tokens in addition to those that a query sees without gaps. They are picked query by query. The
tables of their rows and scales are copied as if they were adjacent, for the tile's steps. So other tokens are never
read. The picked ones get successive positions, as linear biases (ALiBi: Press et al., arXiv:2108.12409) need. The
matrix unit is not used here: its engine supports ranges only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cpu.attention.engines import in_integers
from numkv.kernels.cpu.attention.llvm.softmax import make_online_softmax_step, make_soft_cap
from numkv.kernels.cpu.attention.offsets import TABLE, whole_units
from numkv.kernels.cpu.attention.records import SoftmaxState, Turn, float_type
from numkv.kernels.cpu.attention.sides import make_keys, make_loader, make_of_head, make_values
from numkv.kernels.cpu.attention.state import (
    ADJUST,
    AT_ONCE,
    GATHER,
    K_SCALE,
    OF_1,
    SINKS,
    Q,
    call_of,
    floats_reader,
    has_slopes,
    item_of,
    make_tile_of,
    mask_of,
    number_of,
    places_of,
    put_turn,
    run_step,
    scale_of,
    seen_of,
    sizes_of,
    soft_cap_of,
    spare_of,
    turn_of,
)
from numkv.kernels.cpu.vectors.arrays import (
    SHAPE,
    address_of,
    array_reader,
    clear,
    int_at,
    ints_from,
    row_of,
)
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.features import ROW_UNROLL
from numkv.kinds import kind as kind_named
from numkv.rows.mask import BITS, END, PLAIN_END, POSITION, bits_below, has_bit
from numkv.rows.softmax import LOG2_E
from numkv.rows.visible import visible_to_any


@register_jitable
def visible_in_tile(ranges, row, position, window_left, begin, end, tile, count):
    """Return the tokens in ``[begin, end)`` of a KV tile that a query sees, counted from the tile's start.

    The tile has `count` tokens.
    """
    low, high = visible_to_any(ranges, row, np.int64(1), position, window_left, end)
    low = min(max(max(low, begin) - tile, 0), count)
    return low, min(max(min(high, end) - tile, low), count)


@inlined
def visible_to_tokens(item, first, stop, seen, tile, count):
    """Return the tokens of a tile that any query token ``[first, stop)`` sees, and whether all see the same."""
    low, high, alike = count, np.int64(0), True
    # Without ranges, visible tokens only move on with the query, so the first and the last query suffice.
    last = stop - 1
    for t in range(first, last + 1, 1 if len(seen.ranges) > 0 else max(last - first, 1)):
        begin, end = visible_in_tile(
            seen.ranges, item.first_token + t, item.position + t, seen.window_left, item.begin,
            item.end, tile, count,
        )  # fmt: skip
        if t > first and (begin != low or end != high):
            alike = False
        if len(seen.ranges) == 0:
            low, high = begin if t == first else low, end
        elif begin < end:
            low, high = min(low, begin), max(high, end)
    return low, high, alike


# The most query rows that vector code computes at once.
_UNROLL = ROW_UNROLL[0]
# The most rows that padding to 8, 4 or 2 adds.
_FILL_UP = 3


@inlined
def _padded_rows(rows):
    """Return a kv head's rows, padded to what vector code computes."""
    if rows > 4:
        return (rows + _UNROLL - 1) // _UNROLL * _UNROLL
    return np.int64(4) if rows > 2 else rows


def make_load_rows(q_kind: str, k_kind: str, compute: str) -> Callable[..., Any]:
    """``load_rows(state, scale, transposed)``: load an item's query rows times a scale.

    If a kv head's K rows have a scale, it is multiplied in, too. The memory of results is cleared, except output rows
    that will be transposed.
    """
    real = float_type(compute)
    of_head, load_query, floats_of = (
        make_of_head(k_kind, real), make_loader(q_kind, k_kind, compute), floats_reader(compute)
    )  # fmt: skip
    queries_at, scales_at = array_reader(WORDS[q_kind], 3), array_reader(*SCALES[k_kind])
    HAS_SUMS = in_integers(k_kind, compute) and kind_named(k_kind).group_size > 0
    F = np.float32 if real == "float32" else np.float64

    @inlined
    def load_rows(state, scale, transposed):
        floats, at = floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        call = call_of(state)
        q, k_scale = queries_at(call, np.int64(Q)), scales_at(call, np.int64(K_SCALE))
        heads = item.end_head - item.first_head
        r = np.int64(0)
        for row in range(item.tokens * heads):
            t = item.first_token + row % item.tokens
            head = item.first_head + row // item.tokens
            row_scale = of_head(scale, k_scale, head)
            for h in range(head * sizes.group, (head + 1) * sizes.group):
                load_query(floats, at, sizes, r, row_of(q, (t, h)), row_scale)
                floats[at.maxima + r] = F(-np.inf)
                r += 1
        # Rows that pad the last group take part in the arithmetic. Leftover memory may be denormal numbers, which are a
        # hundred times slower.
        end = r + _FILL_UP
        clear(floats, at.queries + r * sizes.pad_dim, at.queries + end * sizes.pad_dim)
        first = r if transposed else np.int64(0)
        clear(floats, at.outputs + first * sizes.pad_v, at.outputs + end * sizes.pad_v)
        clear(floats, at.maxima + r, at.maxima + end)
        clear(floats, at.sums, at.sums + end)
        clear(floats, at.query_scales + r, at.query_scales + end)
        if HAS_SUMS:
            size = 16 * sizes.k_spans
            clear(floats, at.query_sums + r * size, at.query_sums + end * size)
        clear(floats, at.unrolls, at.unrolls + _padded_rows(item.rows) * heads)

    return load_rows


def make_load(Q_KIND, K_KIND, COMPUTE):
    """The step `LOAD`: put an item's query rows into scratch memory."""
    load_rows = make_load_rows(Q_KIND, K_KIND, COMPUTE)

    def load(state):
        load_rows(state, scale_of(state), False)
        return 0

    return load


def make_rows(K_KIND, V_KIND, COMPUTE, COUNT):
    """The step `OF_1` and so on: scores, softmax and sums of tokens ``[low, high)`` of a tile for some query rows.

    ``rows_of(state, row, place, r, taken, low, high)`` computes `COUNT` rows of a kv head from its row `r` on, of which
    the first `taken` count. In scratch memory they begin at `row`, and are interleaved at `place`.
    """
    real = float_type(COMPUTE)
    interleave, scores = make_keys(K_KIND, V_KIND, COMPUTE, COUNT)
    accumulate = make_values(V_KIND, K_KIND, COMPUTE, COUNT)
    softmax, tile_of, floats_of = (
        make_online_softmax_step(real), make_tile_of(K_KIND, V_KIND), floats_reader(COMPUTE)
    )  # fmt: skip
    F = np.float32 if real == "float32" else np.float64
    ROWS = np.int64(COUNT)

    def rows_of(state, row, place, r, taken, low, high):
        floats, at = floats_of(state), places_of(state)
        sizes, tile = sizes_of(state), tile_of(state)
        # Rows are interleaved once for an item, unless different visible tokens regroup them.
        if floats[at.unrolls + place] != F(ROWS):
            for i in range(max(0, place - _UNROLL + 1), place + ROWS):
                floats[at.unrolls + i] = F(0)
            floats[at.unrolls + place] = F(ROWS)
            interleave(floats, at, sizes, row, place)
        scores(floats, at, sizes, row, place, tile.keys, high, tile.v_extents)
        if soft_cap_of(state) > 0 or has_slopes(state):
            run_step(state, np.int64(ADJUST), (r, ROWS, taken, low, high))
        softmax(
            ROWS, taken, floats, at.scores, low, high,
            SoftmaxState(at.maxima + row, at.sums + row, at.rescale),
        )  # fmt: skip
        accumulate(floats, at, sizes, taken, tile.values, low, high, row, tile.k_extents)
        return 0

    return rows_of


def make_adjust(COMPUTE):
    """The step `ADJUST`: the soft cap of scores, then slopes of q heads times distances."""
    real = float_type(COMPUTE)
    cap_scores, floats_of = make_soft_cap(real), floats_reader(COMPUTE)
    slope_of = make_slope_of(COMPUTE)
    F = np.float32 if real == "float32" else np.float64

    def adjust(state, r, count, taken, low, high):
        floats, at = floats_of(state), places_of(state)
        cap = soft_cap_of(state)
        if cap > 0:
            cap_scores(count, high, floats, at.scores, F(cap))
        if has_slopes(state):
            for i in range(taken):
                slope, position = slope_of(state, r + i)
                for t in range(low, high):
                    floats[at.scores + t * count + i] -= slope * abs(position - F(t))
        return 0

    return adjust


def make_slope_of(compute: str) -> Callable[..., Any]:
    """``slope_of(state, r)``: a query row's slope, in base 2, and its distance from the turn's first token."""
    real = float_type(compute)
    sinks_at = array_reader(getattr(types, real), 1)
    F = np.float32 if real == "float32" else np.float64

    @inlined
    def slope_of(state, r):
        call, turn, sizes = call_of(state), turn_of(state), sizes_of(state)
        t = r // sizes.group
        head = turn.head * sizes.group + r - t * sizes.group
        slope = sinks_at(call, np.int64(SINKS))[int_at(call, np.int64(Q + SHAPE + 1)) + head]
        position = mask_of(state)[item_of(state).first_token + t, POSITION]
        return slope * F(LOG2_E), F(position - turn.start)

    return slope_of


@inlined
def attend_rows(state, r, taken, low, high):
    """Run the step that computes `taken` rows of a kv head, from its row `r` on."""
    item, turn = item_of(state), turn_of(state)
    head = turn.head - item.first_head
    step = np.int64(OF_1) + np.int64(taken > 1) + np.int64(taken > 2) + np.int64(taken > 4)
    run_step(
        state, step,
        (head * item.rows + r, head * _padded_rows(item.rows) + r, r, taken, low, high),
    )  # fmt: skip


def attend_few(state):
    """The step `FEW`: a tile for an item's query rows of one kv head, a few at a time."""
    item, turn, sizes, seen = item_of(state), turn_of(state), sizes_of(state), seen_of(state)
    most = number_of(state, AT_ONCE)
    rows, group = item.rows, sizes.group
    r = np.int64(0)
    while r < rows:
        t = r // group if r >= group else np.int64(0)
        taken = min(rows - r, most)
        low, high = visible_in_tile(
            seen.ranges, item.first_token + t, item.position + t, seen.window_left, item.begin,
            item.end, turn.start, turn.count,
        )  # fmt: skip
        # Rows that see different tokens are computed separately: a weight of 0 does not hide a NaN.
        for other in range(t + 1, (r + taken - 1) // group + 1):
            others = visible_in_tile(
                seen.ranges, item.first_token + other, item.position + other, seen.window_left,
                item.begin, item.end, turn.start, turn.count,
            )  # fmt: skip
            if others[0] != low or others[1] != high:
                taken = min((t + 1) * group - r, most)
                break
        if low < high:
            attend_rows(state, r, taken, low, high)
        r += taken
    return 0


@register_jitable
def _pick(ints, rows, row, begin, end, tile, keys, values):
    """Copy the tables of the tokens ``[begin, end)`` of a tile whose bits are set; return their number.

    Whole groups are read, so the last token is repeated up to a whole unit.
    """
    number, base = np.int64(0), rows[row, PLAIN_END]
    for token in range(begin, end):
        if has_bit(rows, row, token - base):
            _copy(ints, number, token - tile, keys, values)
            number += 1
    for i in range(number, whole_units(number)):
        for table in range(4):
            ints[table * TABLE + i] = ints[table * TABLE + number - 1]
    return number


@register_jitable
def _copy(ints, to, j, keys, values):
    """Copy the table entries of a tile's token: its row and its scales."""
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
        end = min(min(item.end, turn.start + turn.count), rows[row, END])
        high = np.int64(0)
        if begin < end:
            high = _pick(ints, rows, row, begin, end, turn.start, keys, values)
        if high > 0:
            # The position of the first one.
            start = base + bits_below(rows, row, BITS, begin - base)
            put_turn(
                state,
                Turn(start, turn.head, picked_at, values_at, turn.v_extents_at, turn.k_extents_at, picked_at,
                     values_at, turn.k_step, whole_units(high)),
            )  # fmt: skip
            run_step(state, np.int64(GATHER), ())
            r, stop = np.int64(t * sizes.group), (t + 1) * sizes.group
            while r < stop:
                taken = min(stop - r, most)
                attend_rows(state, r, taken, np.int64(0), high)
                r += taken
    put_turn(state, turn)
    return 0
