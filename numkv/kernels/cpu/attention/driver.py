"""The attention kernel: items one after another, their tiles, and what an engine does with each.

Threads take items one after another, so ragged batches balance themselves, and no item's result depends on which thread
took it. Where blocks are short, an item takes several heads, one after another in every tile: memory is then read a
whole block at a time. K and V are read once an item, a KV tile at a time, with the online softmax of Milakov and
Gimelshein (arXiv:1805.02867); a tile's V rows are prefetched while its scores are taken, the next tile's K rows, be it
another item's, while V rows are added up. Where blocks are short, K and V rows of the next few heads are. A thread's
first K rows are prefetched all at once.
"""

from __future__ import annotations

import numpy as np

from numkv.kernels.cpu.attention.engines import by_panels, engine_for, in_integers, query_rows
from numkv.kernels.cpu.attention.floats import multiply
from numkv.kernels.cpu.attention.merge import PART_EXTRA
from numkv.kernels.cpu.attention.offsets import (
    AHEAD,
    EXTENTS,
    K_EXTENTS,
    SPARE,
    TABLE,
    TURN,
    V_EXTENTS,
    WORKER_INTS,
    ask_at_once,
    layout_of,
    locate,
    locate_next_head,
    spread,
    strides_of,
)
from numkv.kernels.cpu.attention.plan import LONG_RUN, Problem, find_item, make_plan, plan_of
from numkv.kernels.cpu.attention.records import (
    BY_SLOT,
    KV_TILE,
    LN_2,
    LOG2_E,
    PAIRS,
    Item,
    Rows,
    Tile,
    Visibility,
    float_type,
)
from numkv.kernels.cpu.attention.scales import make_gather, make_of_head
from numkv.kernels.cpu.attention.scratch import make_layout, places, total
from numkv.kernels.cpu.inline import inlined
from numkv.kernels.cpu.vectors.arrays import row_of, without_refcount
from numkv.kernels.cpu.vectors.launch import next_item, on_threads
from numkv.kernels.cpu.vectors.prefetch import prefetch_extents
from numkv.kinds import kind
from numkv.rows.softmax import finish

__all__ = ["make_attention"]

# Bytes of K and V rows that a group of heads has at most: those of this group and of the next, which is asked for
# meanwhile, are to stay in the second cache. Of the 1 MB that a Zen 4 has, groups of 256 KB were too much already.
_GROUP_BYTES = 128 << 10
# Tokens that an item has at least where heads make groups: of shorter ones, much is asked for at once where another
# item ends, and sequences of 65 tokens took longer in groups.
_GROUP_TOKENS = 4 * KV_TILE
# A turn of so many tokens, or of none, is too short to prefetch one of a whole tile meanwhile.
_FEW_TOKENS = KV_TILE // 2


def make_attention(K_KIND, V_KIND, COMPUTE, USE_AMX, MASKED=False):
    """The attention kernel for a K kind, a V kind and what it computes in, a float type or `PAIRS`; with `USE_AMX` on a
    matrix unit.

    If `MASKED`, its `ranges` are rows of `numkv.rows.mask`, and slopes of q heads may follow its `sinks`.
    `flags` are bits of `numkv.kernels.cpu.attention.records`.
    With -1 for `worker` it makes the plan first, which else is there. What it takes comes as it is, not as records:
    Numba takes microseconds to unpack these when it is called.
    """
    begin, load_queries, attend_tile, leave_rows, end = engine_for(
        K_KIND, V_KIND, COMPUTE, USE_AMX, MASKED
    )
    sizes_of, scratch_of = _make_sizes(K_KIND, V_KIND, COMPUTE, USE_AMX, MASKED)
    gather_scales = _make_gather_scales(K_KIND, V_KIND, COMPUTE)
    layout_of_rows = _make_layout_of_rows(K_KIND, V_KIND)
    store = _make_store(V_KIND, float_type(COMPUTE))
    MAX_ROWS = np.int64(query_rows(K_KIND, V_KIND, COMPUTE, MASKED))
    see = _see
    if MASKED:
        from numkv.kernels.cpu.attention.masked import see_masked as see
    TO_BASE_2 = LOG2_E
    NOTHING = Item(*(np.int64(0),) * 10, False)
    NOT_YET = np.int64(0) if USE_AMX else False

    def kernel(
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, flags, sm_scale, soft_cap,
        window_left, sinks, out, lse, parts_at, floats, ints, launch, worker, workers,
    ):  # fmt: skip
        # Slices of arrays, and records with them, cost nothing if no references are counted.
        q, out, lse = without_refcount(q), without_refcount(out), without_refcount(lse)
        k, k_scale = without_refcount(k), without_refcount(k_scale)
        v, v_scale = without_refcount(v), without_refcount(v_scale)
        block_table, sinks = without_refcount(block_table), without_refcount(sinks)
        floats, ints = without_refcount(floats), without_refcount(ints)
        num_kv_heads, dim, dim_v = k.shape[1], q.shape[2], out.shape[2]
        layout = layout_of_rows(k, k_scale, v, v_scale, flags)
        sizes = sizes_of(dim, dim_v, q.shape[1] // num_kv_heads)
        seen = see(ranges, window_left, sinks, q.shape[1], k_scale, v_scale)
        problem = Problem(
            without_refcount(seq_lens), without_refcount(q_starts), without_refcount(ranges), window_left,
            block_table.shape[1] * layout.unit, layout.unit, num_kv_heads, sizes.group, MAX_ROWS,
        )  # fmt: skip
        plan = plan_of(ints, len(seq_lens))
        threads = workers
        if worker < 0:  # there is no plan so far
            threads = make_plan(problem, dim + dim_v, workers, plan)
            worker = np.int64(0)
        if launch != 0 and threads > 1:
            on_threads(launch, workers)
            return

        parts = scratch_of(sizes)
        at = places(worker * total(parts), parts)
        offsets = plan.rest[worker * WORKER_INTS :]
        spare_ints = offsets[SPARE:]
        items, b = plan.first_item[len(seq_lens)], np.int64(0)
        scale = sm_scale if soft_cap > 0 else sm_scale * TO_BASE_2
        most_heads = _heads_of_groups(layout)
        begin()
        # A turn is a tile of tokens for one head; an item's heads take it one after another, a few in a group. The next
        # turn is found before this one is taken, the next group with the first turn of this one, be it another item's:
        # `offsets` says what is prefetched when. What comes first, and an item without tokens, have turns that do
        # nothing.
        here, ahead, group = np.int64(0), np.int64(TURN), np.int64(2 * TURN)
        item = coming = NOTHING
        tile, head, transposed = np.int64(0), np.int64(0), NOT_YET
        first_head, end_head = np.int64(0), np.int64(1)
        next_tile = next_head = next_end = np.int64(0)
        number, ends_item, done = np.int64(-1), False, False
        while not done:
            heads = end_head - first_head
            # A group of one head needs no third table, and two stay in the first cache with more of the rest.
            later = group if heads > 1 else ahead
            if head == first_head:
                next_tile, next_head = tile, end_head
                if next_head >= item.end_head:
                    next_tile, next_head = tile + KV_TILE, item.first_head
                ends_item = next_tile >= item.end
                if ends_item:
                    number = next_item(plan.next_item)
                    if number < items:
                        while plan.first_item[b + 1] <= number:
                            b += 1
                        coming = find_item(problem, plan, b, number)
                        next_tile, next_head = _beginning(coming)
                next_end = _end_of_group(coming, next_head, most_heads)
                locate(
                    offsets[later:], next_tile, coming.begin, coming.end, block_table[b], next_head,
                    layout,
                )  # fmt: skip
            next_heads = next_end - next_head
            in_groups = max(heads, next_heads) > 1
            asking = in_groups and (number < items or not ends_item)
            if asking:
                spread(offsets, later, next_heads, head - first_head, heads, layout)
                if item.end - tile <= _FEW_TOKENS or heads < next_heads:
                    ask_at_once(offsets)
            ends_group = head + 1 >= end_head
            if ends_group:
                ahead, group = later, (ahead if heads > 1 else group)
            else:
                locate_next_head(offsets, here, ahead, layout)
            if tile < item.end:
                extents = _extents(here, ahead, in_groups, asking)
                now = _turn(offsets, here, ahead, tile, head, k, v, layout, sizes, at, extents)
                gather_scales(floats, at, sizes, layout, k_scale, v_scale, offsets, here, ahead)
                transposed = attend_tile(
                    floats, spare_ints, at, sizes, item, seen, soft_cap, now, transposed
                )
            if ends_group and ends_item:
                if item.end_head > 0:
                    leave_rows(floats, at, sizes, item, transposed)
                    store(out, lse, sinks, v_scale, floats, at, sizes, item, parts_at)
                elif not in_groups:
                    prefetch_extents(offsets[ahead + K_EXTENTS :])
                done = number >= items
                if not done:
                    item = coming
                    transposed = load_queries(
                        q, k_scale, floats, spare_ints, at, sizes, item, scale
                    )
            head += 1
            if ends_group:
                tile, head = next_tile, next_head
                first_head, end_head = next_head, next_end
            here, ahead = ahead, here
        end()

    return kernel


def _make_sizes(K_KIND, V_KIND, COMPUTE, USE_AMX, MASKED):
    """``sizes_of`` and ``scratch_of`` of a kernel; see `numkv.kernels.cpu.attention.scratch`."""
    layout = make_layout(
        K_KIND, V_KIND, in_integers(K_KIND, COMPUTE), USE_AMX,
        by_panels(K_KIND, V_KIND, COMPUTE, MASKED), COMPUTE == PAIRS,
    )  # fmt: skip
    return inlined(layout[0]), inlined(layout[1])


def _make_layout_of_rows(K_KIND, V_KIND):
    """``layout_of_rows``: how a call's K and V and their scales lie."""
    K_SCALED, V_SCALED = kind(K_KIND).has_scales, kind(V_KIND).has_scales
    k_scale_steps = strides_of if K_SCALED else _no_strides
    v_scale_steps = strides_of if V_SCALED else _no_strides

    @inlined
    def layout_of_rows(k, k_scale, v, v_scale, flags):
        return layout_of(
            k, k_scale_steps(k_scale), K_SCALED, v, v_scale_steps(v_scale), V_SCALED,
            np.int64(1) if flags & BY_SLOT else np.int64(k.shape[2]),
        )  # fmt: skip

    return layout_of_rows


def _make_gather_scales(K_KIND, V_KIND, COMPUTE):
    """``gather_scales``: the scales of a turn's tokens, and those of the next turn ahead of time."""
    gather_k = make_gather(K_KIND, float_type(COMPUTE), in_integers(K_KIND, COMPUTE))
    gather_v = make_gather(V_KIND, float_type(COMPUTE))

    @inlined
    def gather_scales(floats, at, sizes, layout, k_scale, v_scale, offsets, here, ahead):
        of_k, of_v = np.int64(2 * TABLE), 2 * TABLE + layout.v_table
        gather_k(
            floats, at.key_scales, k_scale, offsets[here + of_k :], offsets[ahead + of_k :],
            sizes.k_groups,
        )  # fmt: skip
        gather_v(
            floats, at.value_scales, v_scale, offsets[here + of_v :], offsets[ahead + of_v :],
            sizes.v_groups,
        )  # fmt: skip

    return gather_scales


@inlined
def _heads_of_groups(layout):
    """Heads of a group at most: more than one where blocks are short."""
    if layout.unit >= LONG_RUN:
        return np.int64(1)
    rows = layout.k_rows[1] * layout.k_rows[2] + layout.v_rows[1] * layout.v_rows[2]
    return max(np.int64(1), np.int64(_GROUP_BYTES) // (KV_TILE * rows))


@inlined
def _end_of_group(item, first_head, most_heads):
    """Where the group of an item's heads ends that begins with this one."""
    heads = most_heads if item.end - item.begin >= _GROUP_TOKENS else np.int64(1)
    return min(first_head + heads, item.end_head)


@inlined
def _beginning(item):
    """An item's first tile and head."""
    return item.begin - item.begin % KV_TILE, item.first_head


@inlined
def _extents(here, ahead, in_groups, asking):
    """Where the extents are of what is prefetched beside V rows, and beside K rows, of a turn.

    In groups it is what `spread` has put down; where nothing is left to ask for, what is here already.
    """
    if not in_groups:
        return here + V_EXTENTS, ahead + K_EXTENTS
    if asking:
        return np.int64(AHEAD + EXTENTS), np.int64(AHEAD)
    return here + V_EXTENTS, here + K_EXTENTS


@inlined
def _turn(offsets, here, ahead, tile, head, k, v, layout, sizes, at, extents):
    """The tile of a turn, whose tables are at `here`, with those of the next turn at `ahead`, and what to prefetch."""
    return Tile(
        tile,
        head,
        Rows(k, offsets[here:], sizes.dim, at.key_scales, sizes.k_groups),
        Rows(v, offsets[here + layout.v_table :], sizes.dim_v, at.value_scales, sizes.v_groups),
        offsets[extents[0] :],
        offsets[extents[1] :],
        Rows(k, offsets[ahead:], sizes.dim, at.key_scales, sizes.k_groups),
        layout.k_step[2],
    )


@inlined
def _see(ranges, window_left, sinks, num_q_heads, k_scale, v_scale):
    """What queries see."""
    return Visibility(without_refcount(ranges), window_left)


@inlined
def _no_strides(array):
    """What stands for the strides of scales where tokens have none."""
    return np.int64(0), np.int64(0), np.int64(0)


def _make_store(V_KIND, COMPUTE):
    """``store``: an item's result, or its split's part of it, times the scale of the kv head's V rows if it has one."""
    of_head = make_of_head(V_KIND, COMPUTE)
    F = np.float32 if COMPUTE == "float32" else np.float64
    TO_BASE_2, TO_BASE_E = LOG2_E, LN_2

    @inlined
    def store(out, lse, sinks, v_scale, floats, at, sizes, item, parts_at):
        group, num_q_heads, part_size = sizes.group, out.shape[1], sizes.dim_v + PART_EXTRA
        r = np.int64(0)
        for row in range(item.tokens * (item.end_head - item.first_head)):
            t = row % item.tokens
            head = item.first_head + row // item.tokens
            for h in range(head * group, (head + 1) * group):
                first = at.outputs + r * sizes.pad_v
                o_row = floats[first : first + sizes.dim_v]
                if item.part < 0:
                    sink = F(sinks[h]) * F(TO_BASE_2) if len(sinks) > 0 else F(-np.inf)
                    factor, log_sum = finish(
                        floats[at.maxima + r], floats[at.sums + r], sink, F(TO_BASE_E)
                    )
                    row_scale = of_head(F(factor), v_scale, head)
                    multiply(o_row, row_scale, row_of(out, (item.first_token + t, h)))
                    lse[item.first_token + t, h] = log_sum
                else:
                    part = parts_at + (item.part + t * num_q_heads + h) * part_size
                    floats[part] = floats[at.maxima + r]
                    floats[part + 1] = floats[at.sums + r]
                    row_scale = of_head(F(1), v_scale, head)
                    multiply(o_row, row_scale, floats[part + PART_EXTRA : part + part_size])
                r += 1

    return store
