"""The engine of vector code for many query rows: products of blocks, with K and V widened once for all rows of an item.

Rows are taken by panels. Of scores, lanes are query rows, side by side; of sums they are columns of V: no product needs
anything to be transposed but query rows, once an item. Pairs of bf16 are not widened. Few rows go the way of `vector`,
and so do tiles with NaN or infinity in which query rows see different tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numkv.kernels.cpu.attention.engines import Engine, panels_from
from numkv.kernels.cpu.attention.llvm.many_pairs import make_many_qk_of_pairs
from numkv.kernels.cpu.attention.llvm.many_pv import make_many_pv
from numkv.kernels.cpu.attention.llvm.many_qk import (
    ASK_K,
    ASK_V,
    make_many_qk,
    make_widen_rows,
    transpose_queries,
)
from numkv.kernels.cpu.attention.llvm.many_softmax import many_softmax
from numkv.kernels.cpu.attention.llvm.pairs import copy_rows, pair_panel_weights, pair_rows
from numkv.kernels.cpu.attention.records import PAIRS, PANEL, Outputs, SoftmaxState
from numkv.kernels.cpu.attention.vector import make_load_rows, make_vector
from numkv.kernels.cpu.attention.visible import visible_in_tile, visible_to_tokens
from numkv.kernels.cpu.inline import inlined
from numkv.kernels.cpu.vectors.features import MANY_ROWS
from numkv.kernels.cpu.vectors.stored import ON_LINE

__all__ = ["make_many_rows", "make_many_rows_beside"]


@inlined
def _nothing():
    pass


@inlined
def _no_biases(floats, at, sizes, item, seen, soft_cap, tile, r, count, tokens):
    """Leave scores as they are."""
    return soft_cap


@functools.cache
def make_many_rows(k_kind: str, v_kind: str, compute: str) -> Engine:
    """The engine for many query rows over storage kinds of K and of V; few rows are taken by `vector`."""
    few = make_vector(k_kind, v_kind, compute).attend_tile
    return make_many_rows_beside(few, k_kind, v_kind, compute, _no_biases)


def make_many_rows_beside(
    attend_few: Callable[..., Any],
    k_kind: str,
    v_kind: str,
    compute: str,
    add_biases: Callable[..., Any],
) -> Engine:
    """The engine with an `attend_tile` for few rows, and what adds biases to the scores of panels.

    ``add_biases(floats, at, sizes, item, seen, soft_cap, tile, r, count, tokens)`` is for `count` rows from `r` on. It
    returns the soft cap that is still to be applied.
    """
    load_rows = make_load_rows(k_kind, v_kind, compute)
    parts = _make_parts(k_kind, v_kind, compute)
    put_keys, put_values = parts.put_keys, parts.put_values
    attend_panels = _make_attend_panels(parts, add_biases)
    IN_UNIT = np.int64(parts.in_unit)
    LEAST = np.int64(panels_from(k_kind, v_kind, compute))

    @inlined
    def load_queries(q, k_scale, floats, ints, at, sizes, item, scale):
        load_rows(q, k_scale, floats, at, sizes, item, scale, False)
        if item.rows >= LEAST:
            _put_panels(floats, at, sizes, item, sizes.pad_dim // IN_UNIT)
        return False

    @inlined
    def finish(floats, at, sizes, item, transposed):
        pass

    @inlined
    def attend_tile(floats, ints, at, sizes, item, seen, soft_cap, tile, transposed):
        low, high, by_panels = np.int64(0), np.int64(0), False
        if item.rows >= LEAST:
            low, high, alike = visible_to_tokens(item, np.int64(0), item.tokens, seen, tile.start)
            finite = put_values(floats, at.many_values, sizes.many_step_v, tile.values, low, high)
            # A weight of 0 does not hide a NaN.
            by_panels = alike or finite
        if not by_panels:
            attend_few(floats, ints, at, sizes, item, seen, soft_cap, tile, transposed)
        elif low < high:
            put_keys(floats, at, sizes, tile, _whole_blocks(high))
            attend_panels(floats, at, sizes, item, seen, soft_cap, tile)
        return transposed

    return Engine(_nothing, load_queries, attend_tile, finish, _nothing)


class _Parts(NamedTuple):
    """What depends on what attention computes in."""

    #: ``put_keys(floats, at, sizes, tile, end)`` puts a tile's first K rows down, whole blocks of them.
    put_keys: Callable[..., Any]
    #: ``put_values(floats, at, step, rows, begin, end)`` puts a tile's V rows down, and says whether all are finite.
    put_values: Callable[..., Any]
    #: ``multiply(floats, panel_at, count, at, sizes, end, asking, extents)`` takes the scores of a panel.
    multiply: Callable[..., Any]
    #: ``weigh(floats, at, sizes, count, low, high, outputs)`` adds a tile's weighted V rows.
    weigh: Callable[..., Any]
    #: Elements of a query row in a float.
    in_unit: int


def _make_parts(k_kind, v_kind, compute):
    """Products of floats, or of pairs of bf16."""
    of_next = min(k_kind, v_kind, key=ON_LINE.__getitem__)
    many_pv = make_many_pv(compute == PAIRS)
    if compute == PAIRS:
        return _make_pairs(make_many_qk_of_pairs(of_next), many_pv)
    widen_keys, many_qk = make_widen_rows(k_kind), make_many_qk(of_next)

    @inlined
    def put_keys(floats, at, sizes, tile, end):
        widen_keys(floats, at.many_keys, sizes.many_step, tile.keys, np.int64(0), end)

    @inlined
    def multiply(floats, panel_at, count, at, sizes, end, asking, extents):
        many_qk(
            floats, panel_at, count, at.many_keys, sizes.many_step, sizes.pad_dim, end, at.many_scores, asking,
            extents,
        )  # fmt: skip

    @inlined
    def weigh(floats, at, sizes, count, low, high, outputs):
        many_pv(
            floats, count, at.many_scores, at.many_values, sizes.many_step_v, low, high, outputs
        )

    return _Parts(put_keys, make_widen_rows(v_kind), multiply, weigh, 1)


def _make_pairs(many_qk_of_pairs, many_pv):
    @inlined
    def put_keys(floats, at, sizes, tile, end):
        copy_rows(floats, at.many_keys, sizes.many_step, tile.keys, end)

    @inlined
    def multiply(floats, panel_at, count, at, sizes, end, asking, extents):
        # All query rows have one scale.
        many_qk_of_pairs(
            floats, panel_at, count, at.many_keys, sizes.many_step, sizes.pad_dim // 2, end, at.many_scores,
            asking, extents, floats[at.query_scales],
        )  # fmt: skip

    @inlined
    def weigh(floats, at, sizes, count, low, high, outputs):
        pair_panel_weights(floats, at.many_scores, count, low, high)
        many_pv(
            floats, count, at.many_scores, at.many_values, sizes.many_step_v, low // 2, (high + 1) // 2,
            outputs,
        )  # fmt: skip

    return _Parts(put_keys, pair_rows, multiply, weigh, 2)


@inlined
def _put_panels(floats, at, sizes, item, units):
    """Put query rows of so many floats side by side."""
    rows = item.rows
    for i in range(item.end_head - item.first_head):
        for r in range(0, rows, PANEL):
            transpose_queries(
                floats, at.queries + (i * rows + r) * sizes.pad_dim, sizes.pad_dim,
                min(rows - r, PANEL), units, _panel_at(at, sizes, rows, i, r),
            )  # fmt: skip


@inlined
def _panel_at(at, sizes, rows, head, row):
    """Where a panel of query rows begins, of an item's kv head with `rows` rows."""
    panels = (rows + PANEL - 1) // PANEL
    return at.many_queries + (head * panels * PANEL + row) * sizes.pad_dim


def _make_attend_panels(parts, add_biases):
    """``attend_panels``: scores, softmax and sums of a tile for all query rows of a kv head."""
    multiply, weigh = parts.multiply, parts.weigh
    F, KEYS, VALUES = np.float32, np.int64(ASK_K), np.int64(ASK_V)

    @inlined
    def attend_panels(floats, at, sizes, item, seen, soft_cap, tile):
        rows, head = item.rows, tile.head - item.first_head
        # The next tile's rows are prefetched: those of K with the first panel, those of V with the second, if there is
        # one.
        asking = np.int64(KEYS)
        for r in range(0, rows, PANEL):
            count = min(rows - r, PANEL)
            low, high, alike = visible_to_tokens(
                item, r // sizes.group, (r + count - 1) // sizes.group + 1, seen, tile.start
            )
            if low < high:
                end = _whole_blocks(high)
                if asking == KEYS and rows - r <= PANEL:
                    asking = KEYS | VALUES
                multiply(
                    floats, _panel_at(at, sizes, rows, head, r), count, at, sizes, end, asking,
                    tile.k_extents,
                )  # fmt: skip
                partly = not alike or low > 0 or high < end
                if partly:
                    _put_bounds(floats, at, item, seen, tile, sizes.group, r, count)
                cap = add_biases(
                    floats, at, sizes, item, seen, soft_cap, tile, np.int64(r), count, end
                )
                row = head * rows + r  # of scratch memory
                state = SoftmaxState(at.maxima + row, at.sums + row, at.rescale)
                many_softmax(
                    floats, at.many_scores, count, end, F(cap), np.int64(partly), at.many_bounds,
                    state,
                )  # fmt: skip
                outputs = Outputs(at.outputs + row * sizes.pad_v, sizes.pad_v, at.rescale)
                weigh(floats, at, sizes, count, low, high, outputs)
                asking = VALUES if asking == KEYS else np.int64(0)

    return attend_panels


@inlined
def _whole_blocks(tokens):
    """A number of tokens, rounded up to whole blocks of rows."""
    return (tokens + MANY_ROWS - 1) // MANY_ROWS * MANY_ROWS


@inlined
def _put_bounds(floats, at, item, seen, tile, group, first, count):
    """Put down which tokens of a tile the rows of a panel see; those past the end see what the last one does."""
    low, high, before = np.int64(0), np.int64(0), np.int64(-1)
    for i in range(PANEL):
        t = (first + min(i, count - 1)) // group
        if t != before:
            before = t
            low, high = visible_in_tile(
                seen.ranges, item.first_token + t, item.position + t, seen.window_left, item.begin,
                item.end, tile.start,
            )  # fmt: skip
        floats[at.many_bounds + i], floats[at.many_bounds + PANEL + i] = low, high
