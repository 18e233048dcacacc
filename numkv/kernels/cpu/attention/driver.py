"""The driver of attention: it walks items and their tiles, and calls the engine's steps.

Threads take items one after another, so ragged batches balance themselves. No item's result depends on the thread that
took it. K and V are read once an item, a KV tile at a time, with the online softmax of Milakov and Gimelshein
(arXiv:1805.02867).

A tile's V rows are prefetched while its scores are computed. The next tile's K rows, possibly another item's, are
prefetched while V rows are added up. A thread prefetches its first K rows all at once.

Where a block has little of a head, or a sequence is short, an item has several heads, one after another in every tile.
Rows that lie near each other are then read soon after each other.

It is one kernel for all kinds, which knows arrays by their addresses. Only the engine's `steps` depend on kinds.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.attention.offsets import (
    K_EXTENTS,
    STATE_AT,
    TURN,
    V_EXTENTS,
    WORKER_INTS,
    layout_of,
    locate,
    locate_next_head,
    whole_units,
)
from numkv.kernels.cpu.attention.plan import (
    MISSING,
    Problem,
    find_item,
    make_plan,
    plan_of,
)
from numkv.kernels.cpu.attention.records import BY_SLOT, KV_TILE, TILE_UNIT, Item, Turn
from numkv.kernels.cpu.attention.state import (
    ATTEND,
    ATTEND_MANY,
    BLOCK_TABLE,
    END,
    FLAGS,
    FLOATS_EACH,
    GATHER,
    INTS,
    K_SCALE,
    K_SCALED,
    LEAVE,
    LOAD,
    LOAD_MANY,
    LONGEST,
    MANY_FROM,
    MASK,
    MERGE,
    MOST_ROWS,
    PICK,
    PLACES,
    Q_STARTS,
    RANGES,
    SEEN,
    SEQ_LENS,
    SHORT_IF_LARGE,
    SIZES,
    SIZES_AT,
    STEPS,
    STORE,
    V_SCALE,
    V_SCALED,
    WINDOW,
    K,
    Scratch,
    Sizes,
    V,
    begin_state,
    put_item,
    put_turn,
    run_step,
    sizes_of,
)
from numkv.kernels.cpu.attention.store import PART_EXTRA
from numkv.kernels.cpu.threads import ON_THREADS
from numkv.kernels.cpu.vectors.arrays import (
    SHAPE,
    STRIDES,
    address_of,
    array_reader,
    int_at,
    kernel_caller,
    provide_symbol,
    put_int,
    record_of,
)
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.launch import next_item, on_threads
from numkv.kernels.cpu.vectors.prefetch import prefetch_extents
from numkv.rows.mask import BITS, PLAIN_END

# The most bytes of K rows, or of V rows, in a tile of more than a unit. A turn has work that does not depend on its
# tokens, so long tiles are faster (perf/results/2026-11-28-amd-epyc-2-cores-machines-tiles.md). Rows of a tile and of
# the next should fit in an L2 cache of 256 KB. Arithmetic on single query rows is so short that tiles of four times as
# many bytes are better, though two of them fill such a cache: shape C in fp32 takes 0.95 of the time on a Zen 4, which
# has 1 MB (`python -m perf against`).
_TILE_BYTES, _TILES_OF_ONE_ROW = 32 << 10, 4

_PLAN, _DRIVER = "numkv_plan_of_attention", "numkv_attention"
_OF_PLAN = (
    array(types.int64, 1), array(types.int64, 1), array(types.int64, 2), *[types.int64] * 9,
    types.Array(types.int64, 1, "C"),
)  # fmt: skip
_OF_DRIVER = (types.int64, *ON_THREADS)
_make_plan = kernel_caller(_OF_PLAN, types.UniTuple(types.int64, 2), _PLAN)
#: ``attend_to(None, (record of a call, launch, worker, workers))``: the driver, as other kernels call it.
attend_to = kernel_caller(_OF_DRIVER, types.none, _DRIVER)
_merge = kernel_caller(_OF_DRIVER, types.int64)
#: What a call returns that needs threads, or queries apart from its output; see `_enter`.
NEEDS_THREADS, NEEDS_COPY = -1, -2

_ints_in, _indices_in = array_reader(types.int64, 1, "C"), array_reader(types.int64, 1)
_pairs_in, _table_in = array_reader(types.int64, 2), array_reader(types.int32, 2)
_NO_ITEM = Item(*(0,) * len(Item._fields))
_NUM_SIZES, _NUM_PLACES = len(Sizes._fields), len(Scratch._fields)


def _attend(call, launch, worker, workers):
    """Compute items of an existing plan until none remain; `call` is the address of a record."""
    if launch != 0:
        on_threads(launch, workers)
        return
    steps = int_at(int_at(call, np.int64(SIZES_AT)), np.int64(STEPS))
    ints = _ints_in(call, np.int64(INTS))
    seq_lens = _indices_in(call, np.int64(SEQ_LENS))
    q_starts = _indices_in(call, np.int64(Q_STARTS))
    block_table, ranges = _table_in(call, np.int64(BLOCK_TABLE)), _pairs_in(call, np.int64(RANGES))
    unit = int_at(call, np.int64(K + SHAPE + 2))
    if int_at(call, np.int64(FLAGS)) & BY_SLOT:
        unit = np.int64(1)
    layout = layout_of(
        call, np.int64(K), np.int64(K_SCALE), np.int64(V), np.int64(V_SCALE), int_at(steps, np.int64(K_SCALED)),
        int_at(steps, np.int64(V_SCALED)), unit,
    )  # fmt: skip
    plan = plan_of(ints, len(seq_lens))
    offsets = plan.rest[worker * WORKER_INTS :]
    state = address_of(offsets) + np.int64(8 * STATE_AT)
    _begin(state, call, worker)
    problem = Problem(
        seq_lens, q_starts, ranges, int_at(call, np.int64(WINDOW)), block_table.shape[1] * unit, unit,
        int_at(call, np.int64(K + SHAPE + 1)), sizes_of(state).group, int_at(steps, np.int64(MOST_ROWS)),
    )  # fmt: skip
    items, b = plan.first_item[len(seq_lens)], np.int64(0)
    longest = int_at(steps, np.int64(LONGEST))
    short_if_large = int_at(steps, np.int64(SHORT_IF_LARGE)) != 0
    many_from = int_at(steps, np.int64(MANY_FROM))
    has_bits = int_at(call, np.int64(MASK + SHAPE + 1)) > BITS
    attend = np.int64(ATTEND)
    # A turn is a tile of tokens for one head. An item's heads take a tile one after another. The next turn is found
    # before this one runs. The start, and items without tokens, have turns that do nothing.
    here, ahead = np.int64(0), np.int64(TURN)
    item = coming = _NO_ITEM
    tile, head = np.int64(0), np.int64(0)
    tokens, coming_tokens = np.int64(TILE_UNIT), np.int64(TILE_UNIT)
    number, done = np.int64(-1), False
    while not done:
        count = whole_units(min(item.end - tile, tokens))
        next_tile, next_head, ends_item = tile, head + 1, False
        if next_head < item.end_head:
            locate_next_head(offsets, here, ahead, count, layout)
        else:
            next_tile, next_head = tile + tokens, item.first_head
            ends_item = next_tile >= item.end
            if ends_item:
                number = next_item(plan.next_item)
                if number < items:
                    while plan.first_item[b + 1] <= number:
                        b += 1
                    coming = find_item(problem, plan, b, number)
                    coming_tokens = _tokens_of_turns(layout, longest, short_if_large, coming)
                    next_tile = coming.begin - coming.begin % coming_tokens
                    next_head = coming.first_head
            locate(
                offsets[ahead:], next_tile, coming_tokens, coming.begin, coming.end, block_table[b],
                next_head, layout,
            )  # fmt: skip
        if tile < item.end:
            at = address_of(offsets)
            put_turn(
                state,
                Turn(
                    tile, head, at + 8 * here, at + 8 * (here + layout.v_table), at + 8 * (here + V_EXTENTS),
                    at + 8 * (ahead + K_EXTENTS), at + 8 * ahead, at + 8 * (ahead + layout.v_table), layout.k_token,
                    count,
                ),
            )  # fmt: skip
            run_step(state, np.int64(GATHER), ())
            run_step(state, attend, ())
            if has_bits:
                run_step(state, np.int64(PICK), ())
        if ends_item:
            if item.end_head > 0:
                run_step(state, np.int64(LEAVE), ())
                if plan.missing[0] == 0:
                    run_step(state, np.int64(STORE), ())
            else:
                prefetch_extents(offsets[ahead + K_EXTENTS :])
            done = number >= items
            if not done:
                item, tokens = coming, coming_tokens
                put_item(state, item)
                run_step(state, np.int64(LOAD), ())
                attend = np.int64(ATTEND)
                if item.rows >= many_from:
                    run_step(state, np.int64(LOAD_MANY), ())
                    attend = np.int64(ATTEND_MANY)
        tile, head = next_tile, next_head
        here, ahead = ahead, here
    run_step(state, np.int64(END), ())


@inlined
def _begin(state, call, worker):
    """Return a thread's state; its scratch memory follows that of the threads before it."""
    begin_state(state, call)
    sizes = int_at(call, np.int64(SIZES_AT))
    first = worker * int_at(sizes, np.int64(FLOATS_EACH))
    for i in range(_NUM_SIZES):
        put_int(state, SIZES + i, int_at(sizes, i))
    for i in range(_NUM_PLACES):
        put_int(state, PLACES + i, first + int_at(sizes, _NUM_SIZES + i))


@inlined
def _tokens_of_turns(layout, longest, short_if_large, item):
    """Return the most tokens of an item's turns: as many units as there is room for, doubled up to `longest`.

    With `short_if_large`, turns of large items have one unit. Turns do not cross blocks of 128 tokens, the default, as
    the next block is elsewhere. By that paged C takes 0.81 of the time in int8 and 0.93 in fp16 on a Zen 5 (`python -m
    perf against`). Turns of 64 tokens, for shorter blocks, cost more than that. No block may be divided by this rule: a
    contiguous cache of 200 tokens is one block here, and its results would depend on its capacity.
    """
    if layout.unit == KV_TILE // 2:
        longest = min(longest, layout.unit)
    row = max(layout.k_words * layout.k_size, layout.v_words * layout.v_size)
    tokens = np.int64(TILE_UNIT)
    room = np.int64(0 if short_if_large and item.is_large != 0 else _TILE_BYTES)
    if item.rows == 1 and layout.unit >= TILE_UNIT:
        room *= _TILES_OF_ONE_ROW
    while 2 * tokens <= longest and 2 * tokens * row <= room:
        tokens *= 2
    return tokens


@inlined
def merge_parts(call, launch, workers):
    """Merge the parts of split sequences of the call whose record is at an address; the step `MERGE` is there."""
    steps = int_at(int_at(call, np.int64(SIZES_AT)), np.int64(STEPS))
    _merge(int_at(steps, np.int64(MERGE)), (call, launch, np.int64(0), workers))


def _enter(
    q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, flags, sm_scale, soft_cap, window_left, sinks,
    out, lse, floats, ints, sizes, most, launch,
):  # fmt: skip
    """Plan a call, attend and merge, with Python's arrays: 0 if that is done, or what it needs first.

    - The bits of steps that are not compiled yet.
    - `NEEDS_THREADS`, if `launch` is 0 and one thread would take too long. `most` threads may run.
    - `NEEDS_COPY`, if results lie over the queries: they would leave none for a call that has to start again.
    - Minus the floats of memory, if `floats` has fewer.

    The caller provides it and calls again. `sizes` is the address of a record of
    `numkv.kernels.cpu.attention.steps.Steps`.
    """
    if address_of(out) == address_of(q):
        return np.int64(NEEDS_COPY)
    unit = np.int64(1) if flags & BY_SLOT else np.int64(k.shape[2])
    steps = int_at(sizes, np.int64(STEPS))
    workers, parts = _make_plan(
        None,
        (seq_lens, q_starts, ranges, window_left, block_table.shape[1] * unit, unit, np.int64(k.shape[1]),
         q.shape[1] // k.shape[1], int_at(steps, np.int64(MOST_ROWS)), k.shape[3] * k.itemsize,
         q.shape[2] + out.shape[2], most, ints),
    )  # fmt: skip
    if workers == 1:
        launch = np.int64(0)
    elif launch == 0:
        return np.int64(NEEDS_THREADS)
    parts_at = workers * int_at(sizes, np.int64(FLOATS_EACH))
    size = parts_at + parts * (out.shape[2] + PART_EXTRA)
    if size > len(floats):
        return -size
    if parts > 0 and int_at(steps, np.int64(MERGE)) == 0:
        return np.int64(1 << MERGE)
    call = record_of(
        (q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, ranges, sinks, out, lse, floats, ints),
        (flags, sm_scale, soft_cap, window_left, parts_at, sizes),
    )  # fmt: skip
    if ranges.shape[1] > PLAIN_END:
        put_int(call, np.int64(SEEN + STRIDES + 1), ranges.strides[1] * PLAIN_END)
    attend_to(None, (call, launch, np.int64(0), workers))
    missing = ints[MISSING]
    if missing == 0 and parts > 0:
        merge_parts(call, launch, workers)
    return missing


@functools.cache
def plan_kernel() -> Any:
    """Return the kernel that plans: see `numkv.kernels.cpu.attention.plan`."""
    kernel = build(
        make_plan, _OF_PLAN, label="plan of attention", emit=types.UniTuple(types.int64, 2)
    )
    provide_symbol(_PLAN, kernel)
    return kernel


@functools.cache
def driver_kernel() -> Any:
    """Return the driver's kernel, which `attend_to` calls."""
    kernel = build(_attend, _OF_DRIVER, label="driver of attention", emit=types.none)
    provide_symbol(_DRIVER, kernel)
    return kernel


@functools.cache
def entry(q_kind: str, k_kind: str, v_kind: str, real: str) -> Any:
    """Return the kernel through which Python attends with words of these kinds: see `_enter`."""
    words_of = WORDS[q_kind], WORDS[k_kind], SCALES[k_kind], WORDS[v_kind], SCALES[v_kind]
    return _entry(*words_of, getattr(types, real))


@functools.cache
def _entry(q, k, k_scale, v, v_scale, real):
    plan_kernel()
    driver_kernel()
    signature = (
        array(q, 3), array(k, 4), array(*k_scale), array(v, 4), array(*v_scale), array(types.int32, 2),
        array(types.int64, 1), array(types.int64, 1), array(types.int64, 2), types.int64,
        types.float64, types.float64, types.int64,
        array(real, 1), array(q, 3, out=True), array(types.float32, 2, out=True),
        types.Array(real, 1, "C"), types.Array(types.int64, 1, "C"), *[types.int64] * 3,
    )  # fmt: skip
    return build(
        _enter, signature, label=f"calls of attention, words {q}, {k} and {v}", emit=types.int64
    )
