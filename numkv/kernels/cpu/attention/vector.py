"""Attention to a KV tile in vector code, whatever the engines of K and of V: floats or integers.

Scores lie token after token, the query rows of a group side by side (``s[t, r]``): few lanes are left to be added, one
softmax serves all rows, and query rows are interleaved for it once an item.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numkv.kernels.cpu.attention.engines import Engine, in_integers, keys_for, values_for
from numkv.kernels.cpu.attention.floats import clear
from numkv.kernels.cpu.attention.llvm.softmax import make_online_softmax_step, make_soft_cap
from numkv.kernels.cpu.attention.records import SoftmaxState, float_type
from numkv.kernels.cpu.attention.scales import make_of_head
from numkv.kernels.cpu.attention.visible import visible_in_tile
from numkv.kernels.cpu.inline import inlined
from numkv.kernels.cpu.vectors.arrays import row_of
from numkv.kernels.cpu.vectors.features import ROW_UNROLL, row_unroll
from numkv.kinds import kind as kind_named

__all__ = [
    "make_attend_tile", "make_load_rows", "make_step", "make_vector", "no_bias", "rows_at_once",
]  # fmt: skip

# Query rows that vector code takes at once, at most.
_UNROLL = ROW_UNROLL[0]
# Rows that may be missing of 8, 4 or 2.
_FILL_UP = 3


@inlined
def _padded_rows(rows):
    """As many rows as vector code takes for those of a kv head."""
    if rows > 4:
        return (rows + _UNROLL - 1) // _UNROLL * _UNROLL
    return np.int64(4) if rows > 2 else rows


@functools.cache
def make_load_rows(k_kind: str, v_kind: str, compute: str) -> Callable[..., Any]:
    """``load_rows(q, k_scale, floats, at, sizes, item, scale, transposed)``: query rows times a scale, and zeros.

    The scale of a kv head's K rows, if there is one, joins that of its query rows. Where results go is cleared, but for
    output rows that will be transposed.
    """
    of_head = make_of_head(k_kind, float_type(compute))
    load_query, _, _ = keys_for(k_kind, v_kind, compute)
    HAS_SUMS = in_integers(k_kind, compute) and kind_named(k_kind).group_size > 0
    F = np.float32 if float_type(compute) == "float32" else np.float64

    @inlined
    def load_rows(q, k_scale, floats, at, sizes, item, scale, transposed):
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
        # Rows that fill up the last group take part in the arithmetic: what happens to be there may be denormal
        # numbers, which are a hundred times slower than others.
        end = r + _FILL_UP
        clear(floats[at.queries + r * sizes.pad_dim : at.queries + end * sizes.pad_dim])
        first = r if transposed else np.int64(0)
        clear(floats[at.outputs + first * sizes.pad_v : at.outputs + end * sizes.pad_v])
        clear(floats[at.maxima + r : at.maxima + end])
        clear(floats[at.sums : at.sums + end])
        clear(floats[at.query_scales + r : at.query_scales + end])
        if HAS_SUMS:
            size = 16 * sizes.k_spans
            clear(floats[at.query_sums + r * size : at.query_sums + end * size])
        clear(floats[at.unrolls : at.unrolls + _padded_rows(item.rows) * heads])

    return load_rows


@inlined
def no_bias(floats, at, sizes, item, seen, tile, r, count, taken, low, high):
    """Leave scores as they are."""


@functools.cache
def make_vector(k_kind: str, v_kind: str, compute: str) -> Engine:
    """The engine of vector code for storage kinds of K and of V."""
    load_rows = make_load_rows(k_kind, v_kind, compute)
    attend_tile = make_attend_tile(make_step(k_kind, v_kind, compute, no_bias), compute)

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

    return Engine(nothing, load_queries, attend_tile, finish, nothing)


def make_step(
    k_kind: str, v_kind: str, compute: str, add_bias: Callable[..., Any]
) -> Callable[..., Any]:
    """``step(floats, at, sizes, item, seen, soft_cap, tile, r, count, taken, low, high)``.

    It takes scores, softmax and sums of tokens ``[low, high)`` of a tile for `count` query rows of a kv head, the first
    of them row `r`, of which `taken` count. `add_bias` adds to their scores, in base 2.
    """
    _, interleave, scores = keys_for(k_kind, v_kind, compute)
    accumulate = values_for(k_kind, v_kind, compute)
    real = float_type(compute)
    cap_scores, online_softmax_step = make_soft_cap(real), make_online_softmax_step(real)
    F = np.float32 if float_type(compute) == "float32" else np.float64

    @inlined
    def interleave_once(floats, at, sizes, count, row, place):
        """Interleave rows once for an item, unless what they see makes other groups of them."""
        if floats[at.unrolls + place] != F(count):
            for i in range(max(0, place - _UNROLL + 1), place + count):
                floats[at.unrolls + i] = F(0)
            floats[at.unrolls + place] = F(count)
            interleave(floats, at, sizes, count, row, place)

    @inlined
    def step(floats, at, sizes, item, seen, soft_cap, tile, r, count, taken, low, high):
        head = tile.head - item.first_head
        row, place = head * item.rows + r, head * _padded_rows(item.rows) + r  # of scratch memory
        interleave_once(floats, at, sizes, count, row, place)
        scores(floats, at, sizes, count, row, place, tile.keys, high, tile.v_extents)
        if soft_cap > 0:
            cap_scores(count, floats, at.scores, F(soft_cap))
        add_bias(floats, at, sizes, item, seen, tile, r, count, taken, low, high)
        state = SoftmaxState(at.maxima + row, at.sums + row, at.rescale)
        online_softmax_step(count, taken, floats, at.scores, low, high, state)
        accumulate(floats, at, sizes, count, taken, tile.values, low, high, row, tile.k_extents)

    return step


def make_attend_tile(step: Callable[..., Any], compute: str) -> Callable[..., Any]:
    """The `attend_tile` of an engine that takes rows in steps; see `make_step`."""
    most = row_unroll(compute)

    @inlined
    def attend_tile(floats, ints, at, sizes, item, seen, soft_cap, tile, transposed):
        rows, group = item.rows, sizes.group
        r = np.int64(0)
        while r < rows:
            t = r // group if r >= group else np.int64(0)
            taken = min(rows - r, most)
            low, high = visible_in_tile(
                seen.ranges, item.first_token + t, item.position + t, seen.window_left, item.begin,
                item.end, tile.start,
            )  # fmt: skip
            # Rows that see different tokens are taken separately: a weight of 0 does not hide a NaN.
            for other in range(t + 1, (r + taken - 1) // group + 1):
                others = visible_in_tile(
                    seen.ranges, item.first_token + other, item.position + other, seen.window_left,
                    item.begin, item.end, tile.start,
                )  # fmt: skip
                if others[0] != low or others[1] != high:
                    taken = min((t + 1) * group - r, most)
                    break
            if low < high:
                count = rows_at_once(taken)
                step(floats, at, sizes, item, seen, soft_cap, tile, r, count, taken, low, high)
            r += taken
        return transposed

    return attend_tile


@inlined
def rows_at_once(taken):
    """Query rows that vector code takes at once for so many."""
    return 8 if taken > 4 else 4 if taken > 2 else taken
