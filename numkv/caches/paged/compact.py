"""Compaction of one sequence of a `PagedKVCache`: kept tokens move to the front, through all layer groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.store import BlockStore, Ints, SequenceState
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import Relocation, fresh_blocks, plan_moves, relocate, slots_of
from numkv.errors import NotSupported
from numkv.storage.buffer import Buffer
from numkv.storage.pool import Pool
from numkv.targets.base import Array


class Compaction(NamedTuple):
    """A compaction that can no longer fail; made by `plan_compaction`."""

    state: SequenceState
    """The sequence as it will be."""
    forgotten: NDArray[np.int32]
    """Blocks that change, so that their old contents must not be found any more."""
    moves: list[Callable[[], object]]
    """Functions that move the rows, in this order, once these blocks are forgotten."""
    taken: NDArray[np.int32]
    """Blocks that were allocated for it."""
    released: NDArray[np.int32]
    """Blocks that the sequence does not need afterwards."""


def plan_compaction(
    store: BlockStore, state: SequenceState, kept: Ints, shift: RopeShift | None
) -> Compaction:
    """Prepare to move the kept tokens of a sequence to the front; see `PagedKVCache.compact`.

    Parameters
    ----------
    store : BlockStore
        Where the sequence lies.
    state : SequenceState
        The sequence, without an open step.
    kept : int64 array (n,)
        Tokens to keep, checked.
    shift : RopeShift or None
        What moves their keys to their new positions.
    """
    plans = []
    for number, (group, table) in enumerate(zip(store.groups, state.tables, strict=True)):
        start, window = store.first_stored(state, number), group.reach(len(kept))
        plans.append(relocate(table, kept, start, window, store.block_size, group.keeps))
    source = np.concatenate([plan.source for plan in plans])
    moved = np.concatenate([plan.moved for plan in plans])
    offsets = moved - kept[moved]
    for part in store.parts if not store.layers.alike else store.parts[:1]:
        plan_moves(part.pool, shift, source, source, offsets)  # this only checks
    old, fresh, given_up, reusable = _choose_blocks(store, plans)
    need = int(fresh.sum())
    # Where there are too few free blocks the sequence writes over its own, and its rows wait in staging buffers first.
    # So do keys that are rotated: to shift them takes memory, which may not be there when rows are moving already.
    reused = reusable[: max(0, need - store.blocks.num_free)]
    staged = len(reused) > 0 or (shift is not None and store.pools[0].rotate)
    taken = store.blocks.allocate(need - len(reused))
    try:
        store.clear(taken)
        forgotten = np.concatenate([old[~fresh], reused])
        old[fresh] = np.concatenate([reused, taken])
        store.forget_bounds(old)
        ends = np.cumsum([len(plan.changed) for plan in plans])
        for plan, ids in zip(plans, np.split(old, ends[:-1]), strict=True):
            plan.table[plan.changed] = ids
        to = np.concatenate([slots_of(plan.table, plan.moved, store.block_size) for plan in plans])
        move = _staged_moves if staged else _moves_in_place
        moves = move(store, plans, shift, source, to, offsets)
        after = _known_prefix(store, state, kept)._replace(
            tables=[plan.table for plan in plans],
            starts=[plan.start for plan in plans],
            dropped=state.rows_dropped(),
        )
        released = given_up[~np.isin(given_up, reused)]
        return Compaction(after, forgotten, moves, taken, released)
    except BaseException:  # memory, say
        store.blocks.release(taken)
        raise


def _moves_in_place(
    store: BlockStore, plans: list[Relocation], shift: RopeShift | None, source: Ints, to: Ints, offsets: Ints
) -> list[Callable[[], object]]:  # fmt: skip
    """Moves within the pools; then keys are shifted where they are."""
    moves: list[Callable[[], object]] = []
    changed = source != to
    if changed.any():
        for slots_of_part, pool in _moved_in(store, plans):
            own = slots_of_part[changed[slots_of_part]]
            here, there = (store.target.index(x[own], np.int64) for x in (source, to))
            moves.append(functools.partial(pool.copy_slots, here, there, pool))
    if shift is not None:
        for layer, part in _parts(store, plans):
            pool = store.place(layer)[0]
            if offsets[part].any():  # a shift brings its tables to the target, by keys of no tokens
                shift.plan(pool, pool.target.index(np.empty(0, np.int64), np.int64), 0)()
            moves += plan_moves(pool, shift, to[part], to[part], offsets[part])
    return moves


def _staged_moves(
    store: BlockStore,
    plans: list[Relocation],
    shift: RopeShift | None,
    source: Ints,
    to: Ints,
    offsets: Ints,
) -> list[Callable[[], object]]:
    """Rows are copied to staging buffers at once and shifted there; moves bring them to their places."""
    index = store.target.index
    staged, parts = np.arange(len(source)), _moved_in(store, plans)
    staging = [pool.like(store.blocks_for(len(source))) for _, pool in parts]
    for (own, pool), aside in zip(parts, staging, strict=True):
        pool.copy_tokens(source[own], aside, staged[own])
    if shift is not None:
        for layer, part in _parts(store, plans):
            aside = _with_scales_of(staging[store.places[layer][0]], store.place(layer)[0])
            for move in plan_moves(aside, shift, staged[part], staged[part], offsets[part]):
                move()
    return [
        functools.partial(
            aside.copy_slots, index(staged[own], np.int64), index(to[own], np.int64), pool
        )
        for (own, pool), aside in zip(parts, staging, strict=True)
    ]


def _moved_in(store: BlockStore, plans: list[Relocation]) -> list[tuple[Ints, Pool]]:
    """Which of the moved tokens have rows in each part, and its pool."""
    ends = np.cumsum([0, *(len(plan.moved) for plan in plans)])
    return [
        (np.concatenate([np.arange(ends[g], ends[g + 1]) for g in part.groups]), part.pool)
        for part in store.parts
    ]


def _parts(store: BlockStore, plans: list[Relocation]) -> list[tuple[int, slice]]:
    """Return the slice of the moved tokens of each layer, as each layer may have scales of its own."""
    ends = [0, *np.cumsum([len(plan.moved) for plan in plans]).tolist()]
    return [
        (layer, slice(ends[number], ends[number + 1]))
        for number, group in enumerate(store.groups)
        for layer in group.layers
    ]


def _with_scales_of(pool: Pool, layer: Pool) -> Pool:
    """A pool with a layer's scales of heads, for kinds that have such."""

    def side(own: Buffer, of_layer: Buffer) -> Buffer:
        return replace(own, scales=of_layer.scales) if own.kind.scales_per == "head" else own

    return Pool(side(pool.k_buffer, layer.k_buffer), side(pool.v_buffer, layer.v_buffer))


def _choose_blocks(
    store: BlockStore, plans: list[Relocation]
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32], NDArray[np.int32]]:
    """Choose which blocks of all groups change in place and which are replaced, or raise `CacheFull`.

    Returns
    -------
    old : int32 array (n,)
        Blocks whose content changes, in the order of the relocations; -1 where the new table has none yet.
    fresh : bool array (n,)
        Whether another block replaces each of them; the others change in place.
    given_up : int32 array (m,)
        Blocks that the sequence gives up; some may come back as fresh ones.
    reusable : int32 array
        Blocks among `given_up` that no other sequence uses.
    """
    changed = np.concatenate([plan.changed for plan in plans])
    old = np.concatenate([plan.table[plan.changed] for plan in plans])
    dropped = np.concatenate([plan.dropped for plan in plans])
    own = (store.blocks.ref_count(dropped) == 1) & (store.blocks.pin_count(dropped) == 0)
    fresh = fresh_blocks(store.blocks, old, changed, int(own.sum()))
    replaced = old[fresh]
    given_up = np.concatenate([replaced[replaced >= 0], dropped])
    alone = (store.blocks.ref_count(given_up) == 1) & (store.blocks.pin_count(given_up) == 0)
    return old, fresh, given_up, given_up[alone]


def _unmoved(kept: Ints) -> int:
    """Tokens before the first that moves."""
    moved = np.flatnonzero(kept != np.arange(len(kept)))
    return int(moved[0]) if len(moved) else len(kept)


def _known_prefix(store: BlockStore, state: SequenceState, kept: Ints) -> SequenceState:
    """Return the sequence with token ids and digests of the blocks before the first that the compaction changes."""
    n, size = len(kept), store.block_size
    same = _unmoved(kept)
    same = same if same == n else same // size * size
    return state._replace(
        length=n,
        cached=int(np.searchsorted(kept, state.cached)),
        prompt=None,
        tokens=state.tokens[:same],
        digests=[names[: same // size] for names in state.digests],
        registered=min(state.registered, same // size),
    )


# -- keys by channel


def whole_groups_before(store: BlockStore, state: SequenceState, kept: Ints) -> int:
    """Return the tokens in the token groups before the first that moves; refuse to lose tokens in full."""
    for number, group in enumerate(store.groups):
        if group.beside and not group.begins_anew:
            # The newest token group may have codes alone, which are decoded.
            start = 0 if group.chunk else store.first_stored(state, number)
            table, reach = state.tables[number], group.reach(len(kept))
            relocate(table, kept, start, reach, store.block_size, group.keeps)  # this only checks
    some = max(store.layers.groups)
    return _unmoved(kept) // some * some


def kept_rows(
    store: BlockStore, state: SequenceState, layer: int, positions: Ints, shift: RopeShift | None, offsets: Ints
) -> tuple[Array, Array]:  # fmt: skip
    """K and V of some tokens of a layer as floats: those in full as they are, others decoded.

    With a shift, keys are moved by offsets. It waits for the device.
    """
    (pool, group), target = store.place(layer), store.target
    first, edge, (floats, in_full) = _read_in_full(store, state, layer)
    sinks, older, newest = np.split(positions, np.searchsorted(positions, (first, edge)))
    stored = store.first_stored(state, group)
    if len(older) and older[0] < stored:
        raise NotSupported(
            f"compact: expected tokens whose rows are all there, got token {older[0]}, and layer {layer} holds those "
            f"from {stored} on; keep fewer tokens, or take kinds that store keys row by row in layers with a window"
        )
    # Empty parts are left out, but for one, so that there is always some.
    parts = [
        (of, target.index(slots_of(state.tables[table], tokens, store.block_size), np.int64))
        for of, table, tokens in ((floats, in_full, sinks), (pool, group, older), (floats, in_full, newest))
        if len(tokens) or tokens is older
    ]  # fmt: skip
    k, v = (
        np.concatenate([np.asarray(target.to_host(of.buffer(x).gather(at)), np.float32) for of, at in parts])
        for x in "kv"
    )  # fmt: skip
    keys = target.asarray(k)
    if shift is not None and offsets.any():
        keys = shift(layer, keys, target.index(offsets, np.int64))
    return keys, target.asarray(v)


def _read_in_full(
    store: BlockStore, state: SequenceState, layer: int
) -> tuple[int, int, tuple[Pool, int]]:
    """Up to which and from which token a layer's rows are read in full, and where."""
    twin, some = store.layers.twin(layer), store.layers.groups[layer]
    if twin is None:
        return 0, state.length, store.place(layer)
    in_full, first = store.place(twin), store.layers.keeps(twin)
    newest = (state.length - 1) // some * some if some else 0
    return first, max(first, newest, store.first_stored(state, in_full[1])), in_full


def move_codes(
    store: BlockStore, state: SequenceState, after: SequenceState, layer: int, kept: Ints, turned: bool
) -> None:  # fmt: skip
    """Copy codes of the rows of `kept_rows`, as far as they are stored row by row: bit for bit.

    Decoded and quantised again, rows of code4 and code6 would change, and so would those of 16 bits in full.

    Parameters
    ----------
    store : BlockStore
        The buffers.
    state, after : SequenceState
        The sequence, and the one that replaces it, to which these rows have been appended.
    layer : int
        The layer.
    kept : int64 array (n,)
        Tokens of the sequence that are the last ones of the other.
    turned : bool
        Whether keys of tokens that move were shifted.
    """
    (pool, group), size = store.place(layer), store.block_size
    stored = kept >= store.first_stored(state, group)
    new = np.arange(after.length, after.length + len(kept))
    for side, buffer in pool.stored:
        if not buffer.kind.group_tokens:
            old = stored & (kept == new) if turned and side == "k" else stored
            here, there = (
                store.target.index(slots_of(of.tables[group], tokens[old], size), np.int64)
                for of, tokens in ((state, kept), (after, new))
            )
            buffer.copy_tokens(here, buffer, there)
