"""Compaction of one sequence of a `PagedKVCache`: kept tokens move to the front, through all layer groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.store import BlockStore, Ints, SequenceState
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import Relocation, fresh_blocks, plan_moves, relocate, slots_of
from numkv.storage.pool import Pool

__all__ = ["compact_sequence"]


class _Blocks(NamedTuple):
    """Blocks that a compaction concerns, of all groups."""

    old: NDArray[np.int32]
    """Blocks whose content changes, in the order of the relocations; -1 where the new table has none yet."""
    fresh: NDArray[np.bool_]
    """Which of them another block takes the place of; the others change in place."""
    released: NDArray[np.int32]
    """Blocks that the sequence has no use for any more."""


def compact_sequence(
    store: BlockStore, state: SequenceState, kept: Ints, shift: RopeShift | None
) -> None:
    """Move the kept tokens of a sequence to the front; see `PagedKVCache.compact`.

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
    plans = [
        relocate(table, kept, store.first_stored(state, number), group.window, store.block_size)
        for number, (group, table) in enumerate(zip(store.groups, state.tables, strict=True))
    ]
    source = np.concatenate([plan.source for plan in plans])
    moved = np.concatenate([plan.moved for plan in plans])
    offsets = moved - kept[moved]
    plan_moves(
        store.pools[0], shift, source, source, offsets
    )  # all pools are alike: this only checks
    old, fresh, released = _choose_blocks(store, plans)
    need = int(fresh.sum())
    staging: list[Pool] = []
    if need > store.blocks.num_free:
        # What the sequence releases is needed at once: its rows wait in staging buffers meanwhile.
        staged = np.arange(len(source))
        for pool in store.pools:
            staging.append(pool.like(store.blocks_for(len(source))))
            pool.copy_tokens(source, staging[-1], staged)
        store.blocks.release(released)
    store.blocks.forget(old[~fresh])
    old[fresh] = store.blocks.allocate(need)
    ends = np.cumsum([len(plan.changed) for plan in plans])
    for group, (plan, ids) in enumerate(zip(plans, np.split(old, ends[:-1]), strict=True)):
        plan.table[plan.changed] = ids
        state.tables[group], state.starts[group] = plan.table, plan.start
    to = np.concatenate([slots_of(plan.table, plan.moved, store.block_size) for plan in plans])
    for pool, buffer in zip(store.pools, staging, strict=False):
        buffer.copy_tokens(staged, pool, to)
    for pool in store.pools:
        for move in plan_moves(pool, None, to if staging else source, to, offsets):
            move()
    if shift is not None:
        _shift_keys(store, plans, shift, to, offsets)
    if not staging:
        store.blocks.release(released)
    _keep_known_prefix(store, state, kept)


def _shift_keys(
    store: BlockStore, plans: list[Relocation], shift: RopeShift, slots: Ints, offsets: Ints
) -> None:
    """Shift the keys of tokens that have moved; layer by layer, as each may have scales of its own."""
    ends = np.cumsum([len(plan.moved) for plan in plans])[:-1]
    parts = zip(store.groups, np.split(slots, ends), np.split(offsets, ends), strict=True)
    for group, of_group, by in parts:
        for layer in group.layers:
            for move in plan_moves(store.place(layer)[0], shift, of_group, of_group, by):
                move()


def _choose_blocks(store: BlockStore, plans: list[Relocation]) -> _Blocks:
    """Choose which blocks change in place and which are replaced, or raise `CacheFull`."""
    changed = np.concatenate([plan.changed for plan in plans])
    old = np.concatenate([plan.table[plan.changed] for plan in plans])
    dropped = np.concatenate([plan.dropped for plan in plans])
    own = (store.blocks.ref_count(dropped) == 1) & (store.blocks.pin_count(dropped) == 0)
    fresh = fresh_blocks(store.blocks, old, changed, int(own.sum()))
    replaced = old[fresh]
    return _Blocks(old, fresh, np.concatenate([replaced[replaced >= 0], dropped]))


def _keep_known_prefix(store: BlockStore, state: SequenceState, kept: Ints) -> None:
    """Keep token ids and digests of the blocks before the first that the compaction changed."""
    n, size = len(kept), store.block_size
    moved = np.flatnonzero(kept != np.arange(n))
    same = int(moved[0]) // size * size if len(moved) else n
    state.length = n
    state.cached = int(np.searchsorted(kept, state.cached))
    state.tokens = state.tokens[:same]
    state.digests = [names[: same // size] for names in state.digests]
    state.registered = min(state.registered, same // size)
