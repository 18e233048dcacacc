"""Many query rows in vector code: products of blocks, with K and V widened once for all rows of an item.

Query rows are taken by panels. For scores, lanes are query rows; for sums, they are columns of V. So only query rows
are transposed, once an item. Pairs of bf16 are not widened. `vector` computes few rows, and tiles with NaN or infinity
in which query rows see different tokens.

`attend_many`, which finds the tokens that each row sees, is one kernel for all kinds.
"""

from __future__ import annotations

import numpy as np

from numkv.kernels.cpu.attention.llvm.many_rows import (
    ASK_K,
    ASK_V,
    make_many_pv,
    make_many_qk,
    make_many_qk_of_pairs,
    make_widen_rows,
    many_softmax,
    transpose_queries,
)
from numkv.kernels.cpu.attention.llvm.pairs import copy_rows, pair_panel_weights, pair_rows
from numkv.kernels.cpu.attention.llvm.softmax import make_soft_cap
from numkv.kernels.cpu.attention.records import PAIRS, PANEL, Outputs, SoftmaxState
from numkv.kernels.cpu.attention.state import (
    ADJUST_MANY,
    FEW,
    MULTIPLY,
    PUT_KEYS,
    PUT_VALUES,
    WEIGH,
    floats_reader,
    has_slopes,
    item_of,
    make_tile_of,
    places_of,
    run_step,
    seen_of,
    sizes_of,
    soft_cap_of,
    turn_of,
)
from numkv.kernels.cpu.attention.vector import make_slope_of, visible_in_tile, visible_to_tokens
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.features import SCORE_ROWS
from numkv.kernels.cpu.vectors.stored import ON_LINE

_floats_of = floats_reader("float32")


def attend_many(state):
    """The step `ATTEND_MANY`: a tile for all query rows of a kv head, by panels."""
    item, turn, seen = item_of(state), turn_of(state), seen_of(state)
    low, high, alike = visible_to_tokens(
        item, np.int64(0), item.tokens, seen, turn.start, turn.count
    )
    finite = run_step(state, np.int64(PUT_VALUES), (low, high)) != 0
    # A weight of 0 does not hide a NaN.
    if not (alike or finite):
        run_step(state, np.int64(FEW), ())
        return 0
    if low >= high:
        return 0
    run_step(state, np.int64(PUT_KEYS), (_whole_blocks(high),))
    rows, group = item.rows, sizes_of(state).group
    # The next tile's K rows are prefetched during the first panel, its V rows during the second, if there is one.
    asking = np.int64(ASK_K)
    for r in range(0, rows, PANEL):
        count = min(rows - r, np.int64(PANEL))
        low, high, alike = visible_to_tokens(
            item, r // group, (r + count - 1) // group + 1, seen, turn.start, turn.count
        )
        if low < high:
            end = _whole_blocks(high)
            if asking == ASK_K and rows - r <= PANEL:
                asking = np.int64(ASK_K | ASK_V)
            run_step(state, np.int64(MULTIPLY), (r, count, end, asking))
            partly = not alike or low > 0 or high < end
            if partly:
                _put_bounds(_floats_of(state), places_of(state), item, seen, turn, group, r, count)
            if has_slopes(state):
                run_step(state, np.int64(ADJUST_MANY), (r, count, end))
            run_step(state, np.int64(WEIGH), (r, count, low, high, end, np.int64(partly)))
            asking = np.int64(ASK_V) if asking == ASK_K else np.int64(0)
    return 0


def make_load_many(IN_UNIT):
    """The step `LOAD_MANY`: interleave loaded query rows, with so many elements in a float."""

    def load_many(state):
        floats, at = _floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        rows = item.rows
        for i in range(item.end_head - item.first_head):
            for r in range(0, rows, PANEL):
                transpose_queries(
                    floats, at.queries + (i * rows + r) * sizes.pad_dim, sizes.pad_dim,
                    min(rows - r, PANEL), sizes.pad_dim // IN_UNIT, _panel_at(at, sizes, rows, i, r),
                )  # fmt: skip
        return 0

    return load_many


def make_put_keys(K_KIND, V_KIND, COMPUTE):
    """The step `PUT_KEYS`: ``put_keys(state, end)`` copies a tile's first K rows to scratch memory, in whole blocks."""
    tile_of = make_tile_of(K_KIND, V_KIND)
    if COMPUTE == PAIRS:
        put_rows = copy_rows
    else:
        widen_rows = make_widen_rows(K_KIND)

        @inlined
        def put_rows(floats, to_at, step, rows, end):
            widen_rows(floats, to_at, step, rows, np.int64(0), end)

    def put_keys(state, end):
        at, step = places_of(state), sizes_of(state).many_step
        put_rows(_floats_of(state), at.many_keys, step, tile_of(state).keys, end)
        return 0

    return put_keys


def make_put_values(K_KIND, V_KIND, COMPUTE):
    """The step `PUT_VALUES`: ``put_values(state, begin, end)`` copies V rows; whether all are finite."""
    tile_of = make_tile_of(K_KIND, V_KIND)
    put_rows = pair_rows if COMPUTE == PAIRS else make_widen_rows(V_KIND)

    def put_values(state, begin, end):
        at, step = places_of(state), sizes_of(state).many_step_v
        values = tile_of(state).values
        return np.int64(put_rows(_floats_of(state), at.many_values, step, values, begin, end))

    return put_values


def make_multiply(K_KIND, V_KIND, COMPUTE):
    """The step `MULTIPLY`: ``multiply(state, r, count, end, asking)`` computes the scores of a panel."""
    tile_of = make_tile_of(K_KIND, V_KIND)
    of_next = min(K_KIND, V_KIND, key=ON_LINE.__getitem__)
    if COMPUTE == PAIRS:
        of_pairs = make_many_qk_of_pairs(of_next)

        @inlined
        def many_qk(floats, panel_at, count, at, sizes, end, asking, extents):
            # All query rows have one scale.
            of_pairs(
                floats, panel_at, count, at.many_keys, sizes.many_step, sizes.pad_dim // 2, end, at.many_scores,
                asking, extents, floats[at.query_scales],
            )  # fmt: skip
    else:
        of_floats = make_many_qk(of_next)

        @inlined
        def many_qk(floats, panel_at, count, at, sizes, end, asking, extents):
            of_floats(
                floats, panel_at, count, at.many_keys, sizes.many_step, sizes.pad_dim, end, at.many_scores,
                asking, extents,
            )  # fmt: skip

    def multiply(state, r, count, end, asking):
        at, sizes, item, tile = places_of(state), sizes_of(state), item_of(state), tile_of(state)
        panel_at = _panel_at(at, sizes, item.rows, tile.head - item.first_head, r)
        many_qk(_floats_of(state), panel_at, count, at, sizes, end, asking, tile.k_extents)
        return 0

    return multiply


def make_weigh(COMPUTE):
    """The step `WEIGH`: the softmax of a panel's scores, and weighted V rows.

    ``weigh(state, r, count, low, high, end, partly)``: rows of the panel see tokens ``[low, high)``, or only some of
    them if `partly`. `end` is the number of tokens that have scores.
    """
    many_pv = make_many_pv(COMPUTE == PAIRS)
    F = np.float32
    if COMPUTE == PAIRS:

        @inlined
        def sum_up(floats, at, count, step, low, high, outputs):
            pair_panel_weights(floats, at.many_scores, count, low, high)
            many_pv(
                floats, count, at.many_scores, at.many_values, step, low // 2, (high + 1) // 2, outputs
            )  # fmt: skip
    else:

        @inlined
        def sum_up(floats, at, count, step, low, high, outputs):
            many_pv(floats, count, at.many_scores, at.many_values, step, low, high, outputs)

    def weigh(state, r, count, low, high, end, partly):
        floats, at = _floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        row = (turn_of(state).head - item.first_head) * item.rows + r  # of scratch memory
        # With slopes, the cap has been applied before them.
        cap = F(0) if has_slopes(state) else F(soft_cap_of(state))
        many_softmax(
            floats, at.many_scores, count, end, cap, partly, at.many_bounds,
            SoftmaxState(at.maxima + row, at.sums + row, at.rescale),
        )  # fmt: skip
        outputs = Outputs(at.outputs + row * sizes.pad_v, sizes.pad_v, at.rescale)
        sum_up(floats, at, count, sizes.many_step_v, low, high, outputs)
        return 0

    return weigh


def make_adjust_many():
    """The step `ADJUST_MANY`: ``adjust_many(state, r, count, tokens)`` caps a panel's scores and adds biases."""
    cap_scores, slope_of = make_soft_cap("float32"), make_slope_of("float32")
    F = np.float32

    def adjust_many(state, r, count, tokens):
        floats, at = _floats_of(state), places_of(state)
        cap = soft_cap_of(state)
        if cap > 0:
            cap_scores(np.int64(PANEL), tokens, floats, at.many_scores, F(cap))
        slopes, positions = floats[at.scores : at.scores + PANEL], floats[at.scores + PANEL :]
        for i in range(PANEL):
            slopes[i], positions[i] = slope_of(state, r + min(np.int64(i), count - 1))
        for t in range(tokens):
            scores = floats[at.many_scores + t * PANEL : at.many_scores + (t + 1) * PANEL]
            for i in range(PANEL):
                scores[i] -= slopes[i] * abs(positions[i] - F(t))
        return 0

    return adjust_many


@inlined
def _panel_at(at, sizes, rows, head, row):
    """Return where a panel of query rows begins, for a kv head of an item with `rows` rows."""
    panels = (rows + PANEL - 1) // PANEL
    return at.many_queries + (head * panels * PANEL + row) * sizes.pad_dim


@inlined
def _whole_blocks(tokens):
    """Round a number of tokens up to whole blocks of rows."""
    return (tokens + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS


@inlined
def _put_bounds(floats, at, item, seen, turn, group, first, count):
    """Record the tokens of a tile that each row of a panel sees; rows past the end copy the last one."""
    low, high, before = np.int64(0), np.int64(0), np.int64(-1)
    for i in range(PANEL):
        t = (first + min(i, count - 1)) // group
        if t != before:
            before = t
            low, high = visible_in_tile(
                seen.ranges, item.first_token + t, item.position + t, seen.window_left, item.begin,
                item.end, turn.start, turn.count,
            )  # fmt: skip
        floats[at.many_bounds + i], floats[at.many_bounds + PANEL + i] = low, high
