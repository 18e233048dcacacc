"""The engine of vector code for masks and biases: a kernel of its own, so that other calls know nothing of either.

Tokens that a query sees without gaps are taken as `vector` and `many_rows` do, with linear biases (ALiBi: Press et al.,
arXiv:2108.12409) added to capped scores. Of the tokens that bits choose, each query's are picked: tables of their rows
and scales are put together, as if they lay one after another. So nothing of the others is read, and they stand at
positions that follow one another. A matrix unit is left alone: its engines know of ranges only.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.engines import Engine, by_panels, in_integers
from numkv.kernels.cpu.attention.llvm.softmax import make_soft_cap
from numkv.kernels.cpu.attention.many_rows import make_many_rows_beside
from numkv.kernels.cpu.attention.offsets import TABLE
from numkv.kernels.cpu.attention.records import KV_TILE, LOG2_E, PANEL, Rows, Tile, float_type
from numkv.kernels.cpu.attention.scales import make_gather
from numkv.kernels.cpu.attention.vector import (
    make_attend_tile,
    make_load_rows,
    make_step,
    rows_at_once,
)
from numkv.kernels.cpu.inline import inlined
from numkv.kernels.cpu.vectors.arrays import without_refcount
from numkv.kernels.cpu.vectors.features import row_unroll
from numkv.rows.mask import BITS, END, PLAIN_END, POSITION, bits_below, has_bit

__all__ = ["make_masked", "see_masked"]


class Masked(NamedTuple):
    """What queries see, as `numkv.kernels.cpu.attention.records.Visibility` says it, and what it does not say."""

    #: Begin and end of what is seen without gaps.
    ranges: Any
    window_left: int
    #: Rows of `numkv.rows.mask`.
    rows: Any
    #: Slopes of q heads.
    slopes: Any
    k_scale: Any
    v_scale: Any


@inlined
def see_masked(ranges, window_left, sinks, num_q_heads, k_scale, v_scale):
    """The record of a call, whose slopes follow the sinks."""
    return Masked(
        without_refcount(ranges)[:, 0 : PLAIN_END + 1 : PLAIN_END], window_left, without_refcount(ranges),
        sinks[num_q_heads:], k_scale, v_scale,
    )  # fmt: skip


def _make_biases(compute):
    """``add_bias`` of `make_step`, and ``add_biases`` of `make_many_rows_beside`."""
    F = np.float32 if compute == "float32" else np.float64
    TO_BASE_2 = F(LOG2_E)
    cap_scores = make_soft_cap(compute)

    @inlined
    def row_of_query(seen, item, sizes, tile, r):
        """The slope of a query row, in base 2, and how far it stands after the tile's first token."""
        t = r // sizes.group
        slope = seen.slopes[tile.head * sizes.group + r - t * sizes.group]
        return slope * TO_BASE_2, F(seen.rows[item.first_token + t, POSITION] - tile.start)

    @inlined
    def add_bias(floats, at, sizes, item, seen, tile, r, count, taken, low, high):
        if len(seen.slopes) > 0:
            for i in range(taken):
                slope, position = row_of_query(seen, item, sizes, tile, r + i)
                for t in range(low, high):
                    floats[at.scores + t * count + i] -= slope * abs(position - F(t))

    @inlined
    def add_biases(floats, at, sizes, item, seen, soft_cap, tile, r, count, tokens):
        if len(seen.slopes) == 0:
            return soft_cap
        if soft_cap > 0:
            cap_scores(np.int64(PANEL), floats, at.many_scores, F(soft_cap))
        slopes, positions = floats[at.scores : at.scores + PANEL], floats[at.scores + PANEL :]
        for i in range(PANEL):
            slopes[i], positions[i] = row_of_query(
                seen, item, sizes, tile, r + min(np.int64(i), count - 1)
            )
        for t in range(tokens):
            scores = floats[at.many_scores + t * PANEL : at.many_scores + (t + 1) * PANEL]
            for i in range(PANEL):
                scores[i] -= slopes[i] * abs(positions[i] - F(t))
        return 0.0

    return add_bias, add_biases


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


@functools.cache
def make_masked(k_kind: str, v_kind: str, compute: str) -> Engine:
    """The engine for masks and biases over storage kinds of K and of V."""
    real = float_type(compute)
    add_bias, add_biases = _make_biases(real)
    # Compiled once for both of its callers.
    step = register_jitable(make_step(k_kind, v_kind, compute, add_bias).py_func)
    attend_plain = make_attend_tile(step, compute)
    load_rows = make_load_rows(k_kind, v_kind, compute)
    gather_k = make_gather(k_kind, real, in_integers(k_kind, compute))
    gather_v = make_gather(v_kind, real)
    most = row_unroll(compute)

    @inlined
    def nothing():
        pass

    @inlined
    def load_queries(q, k_scale, floats, ints, at, sizes, item, scale):
        load_rows(q, k_scale, floats, at, sizes, item, scale, False)
        return False

    @inlined
    def finish(floats, at, sizes, item, transposed):
        pass

    engine = Engine(nothing, load_queries, attend_plain, finish, nothing)
    if by_panels(k_kind, v_kind, compute, True):
        engine = make_many_rows_beside(attend_plain, k_kind, v_kind, compute, add_biases)
    attend_gapless = engine.attend_tile

    @inlined
    def attend_picked(floats, ints, at, sizes, item, seen, soft_cap, tile):
        """Attend to the tokens that bits choose, for one query token after another."""
        for t in range(item.tokens):
            row = item.first_token + t
            base = seen.rows[row, PLAIN_END]
            begin = max(max(item.begin, tile.start), base)
            end = min(min(item.end, tile.start + KV_TILE), seen.rows[row, END])
            high = np.int64(0)
            if begin < end:
                high = _pick(
                    ints, seen.rows, row, begin, end, tile.start, tile.keys.offsets,
                    tile.values.offsets,
                )  # fmt: skip
            if high > 0:
                scales = ints[2 * TABLE :]
                gather_k(floats, at.key_scales, seen.k_scale, scales, scales, sizes.k_groups)
                scales = ints[3 * TABLE :]
                gather_v(floats, at.value_scales, seen.v_scale, scales, scales, sizes.v_groups)
                keys, values = tile.keys, tile.values
                # Where the first of them stands.
                start = base + bits_below(seen.rows, row, BITS, begin - base)
                picked = Tile(
                    start, tile.head, Rows(keys.words, ints, keys.dim, keys.scales_at, keys.groups),
                    Rows(values.words, ints[TABLE:], values.dim, values.scales_at, values.groups),
                    tile.v_extents, tile.k_extents, tile.next_keys, tile.k_step,
                )  # fmt: skip
                r, stop = np.int64(t * sizes.group), (t + 1) * sizes.group
                while r < stop:
                    taken = min(stop - r, most)
                    count = rows_at_once(taken)
                    step(
                        floats, at, sizes, item, seen, soft_cap, picked, r, count, taken,
                        np.int64(0), high,
                    )  # fmt: skip
                    r += taken

    @inlined
    def attend_tile(floats, ints, at, sizes, item, seen, soft_cap, tile, transposed):
        attend_gapless(floats, ints, at, sizes, item, seen, soft_cap, tile, transposed)
        if seen.rows.shape[1] > BITS:
            attend_picked(floats, ints, at, sizes, item, seen, soft_cap, tile)
        return transposed

    return engine._replace(attend_tile=attend_tile)
