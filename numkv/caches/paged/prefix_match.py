"""Prefix reuse in a `PagedKVCache`: names of blocks in each layer group, the longest prefix that all groups have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.arrays import ABSENT
from numkv.blocks.prefix import block_digests, root_digest
from numkv.caches.paged.states import Checkpoint, StateMemory
from numkv.caches.paged.store import BlockStore, Extra, SequenceState

_SPREAD = 0x9E3779B97F4A7C15  # odd, so no two groups get the same; its bits look random


def block_names(
    store: BlockStore, ids: NDArray[np.int32], extra: Extra | None, parent: Any = None
) -> list[NDArray[np.uint8]]:
    """Return the hashes of the full blocks of some tokens, for each group, as each stores rows of its own.

    Tokens are hashed once. The hashes of group 0 are the chain of digests. Those of another group differ in one word,
    by a number that identifies the group.

    Parameters
    ----------
    store : BlockStore
        Whose groups and block size.
    ids : int32 array (num_tokens,)
        Token ids.
    extra : mapping or None
        Other inputs that the content depends on.
    parent : uint8 array (32,), optional
        Name in group 0 of the block before; None: there is none.

    Returns
    -------
    list of uint8 array (num_tokens // block_size, 32)
    """
    chain = block_digests(ids, store.block_size, extra if parent is None else None, parent=parent)
    return _of_groups(store, chain)


def _of_groups(store: BlockStore, chain: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Return the names of blocks in each group, by those in group 0."""
    names = [chain]
    for group in range(1, len(store.groups)):
        names.append(chain.copy())
        names[-1].view("<u8")[:, 0] ^= group_mask(group)
    return names


def group_mask(group: int) -> np.uint64:
    """Return the difference between the first words of a block's hash in a group and in group 0."""
    return np.uint64(group * _SPREAD % 2**64)


class Match(NamedTuple):
    """The longest cached prefix of a prompt; made by `find_prefix`."""

    blocks: int
    """How many blocks it has."""
    tables: list[NDArray[np.int32]]
    """Its block table in each group, -1 where the window does not reach. The blocks are not acquired yet."""
    wanted: int
    """How many blocks were looked for."""
    reason: int
    """Why there are no more; see `BlockPool.count_lookup`."""
    found: list[NDArray[np.int32]]
    """Each block that was looked for, in each group: its number, or the negative of the reason why there is none."""


def longest_prefix(
    store: BlockStore, present: Sequence[NDArray[np.bool_]], with_states: NDArray[np.bool_] | None = None
) -> int:  # fmt: skip
    """Blocks of the longest prefix with all blocks in full groups, and those in the window or chunk in the others.

    Parameters
    ----------
    store : BlockStore
        Whose groups.
    present : sequence of bool array (num_blocks,)
        Which blocks of a prompt there are in each group.
    with_states : bool array (num_blocks + 1,), optional
        After which blocks there are the states of layers that keep some.
    """
    blocks = len(present[0])
    for group, there in zip(store.groups, present, strict=True):
        if group.is_full:
            missing = np.flatnonzero(~there[:blocks])
            blocks = int(missing[0]) if len(missing) else blocks
    # fits[n]: in every group, the newest token of n blocks finds all that it attends to.
    fits = (
        np.ones(blocks + 1, np.bool_) if with_states is None else with_states[: blocks + 1].copy()
    )
    for group, there in zip(store.groups, present, strict=True):
        if not group.is_full and not group.begins_anew:
            numbers = np.arange(1, blocks + 1)
            last_hole = np.maximum.accumulate(np.where(there[:blocks], 0, numbers))
            newest = numbers * store.block_size - 1
            first = newest // group.chunk * group.chunk if group.chunk else newest - group.window
            kept = group.kept_blocks(store.block_size)
            first_hole = int(np.argmin(there[:kept])) if not there[:kept].all() else blocks
            fits[1:] &= last_hole <= np.maximum(0, first) // store.block_size
            fits[1:] &= numbers <= first_hole
    return int(np.flatnonzero(fits)[-1])


def find_prefix(store: BlockStore, ids: NDArray[np.int32], names: list[NDArray[np.uint8]]) -> Match:
    """Find the longest prefix that the cache itself has; see `longest_prefix`.

    Parameters
    ----------
    store : BlockStore
        Where.
    ids : int32 array (num_tokens,)
        Token ids of full blocks.
    names : list of uint8 array (num_blocks, 32)
        Their names, from `block_names`.

    Returns
    -------
    Match
    """
    found = [store.blocks.find_each(of_group, ids) for of_group in names]
    wanted = len(ids) // store.block_size
    states = None if store.states is None else store.states.present(names[0], store.block_size)
    blocks = longest_prefix(store, [in_group >= 0 for in_group in found], states)
    reason = 0
    if blocks < wanted:
        # The first block not taken, or one before it that only windows need; else a checkpoint of states.
        holes = [*(in_group[blocks : blocks + 1] for in_group in found), *found]
        reasons = np.concatenate([x[x < 0] for x in holes])
        reason = -int(reasons[0]) if len(reasons) else ABSENT
    tables = []
    for number, in_group in enumerate(found):
        table = np.maximum(in_group[:blocks], -1).astype(np.int32)
        kept = store.groups[number].kept_blocks(store.block_size)
        table[kept : store.first_needed(number, blocks * store.block_size)] = -1
        tables.append(table)
    return Match(blocks, tables, wanted, reason, found)


def with_checkpoint(slots: StateMemory, state: SequenceState, block_size: int) -> SequenceState:
    """A sequence that begins with a cached prefix, with the states after it and marks of those before."""
    names = [name.tobytes() for name in state.digests[0]]
    lengths = range(slots.every, state.length + 1, slots.every)
    marks = tuple((n, names[n // block_size - 1]) for n in lengths)
    slot = int(slots.find([marks[-1][1]], [state.length])[0])
    return state._replace(slot=slot, marks=marks)


class PartOfBlock(NamedTuple):
    """Tokens after a prefix of full blocks that are there too; made by `find_part`."""

    tokens: int
    """How many: fewer than a block has."""
    blocks: NDArray[np.int32]
    """The block that begins with them, in each group. It is not acquired yet."""


def find_part(
    store: BlockStore, following: NDArray[np.int32], parent: bytes, others: Iterable[SequenceState]
) -> PartOfBlock | None:
    """Find the block that begins as a prompt goes on, among cached blocks and the last ones of sequences.

    Parameters
    ----------
    store : BlockStore
        Where.
    following : int32 array (n,)
        Ids of tokens that come after the prompt's cached full blocks.
    parent : bytes
        Name of the last of these, from `last_name`.
    others : iterable of SequenceState
        Sequences.

    Returns
    -------
    PartOfBlock or None
        The longest that all groups have; None if there is none.
    """
    size, best = store.block_size, PartOfBlock(0, np.empty(0, np.int32))
    following = following[: size - 1]
    if not len(following):
        return None
    first = following[0]
    for state in others:
        begin, tokens = state.registered * size, state.tokens
        if (
            len(tokens) > begin and tokens[begin] == first
            and last_name(store, state.digests, state.extra) == parent
        ):  # fmt: skip
            blocks = np.array([table[state.registered] for table in state.tables], np.int32)
            part = PartOfBlock(_in_common(tokens[begin:], following), blocks)
            begins = (blocks >= 0).all() and max(state.starts) <= begin
            if part.tokens > best.tokens and begins:
                best = part
    for name, tokens in store.continuations.newest(parent):
        same = _in_common(tokens, following)
        if same > best.tokens:
            names = _of_groups(store, np.frombuffer(bytearray(name), np.uint8).reshape(1, -1))
            found = np.concatenate([store.blocks.find_each(x, tokens) for x in names])
            if (found >= 0).all():
                best = PartOfBlock(same, found)
    return best if best.tokens else None


def last_name(store: BlockStore, names: Sequence[NDArray[np.uint8]], extra: Extra | None) -> bytes:
    """Return the hash in group 0 of the last of some blocks, or that before the first if there are none."""
    found: bytes = names[0][-1].tobytes() if len(names[0]) else root_digest(store.block_size, extra)
    return found


def _in_common(tokens: NDArray[np.int32], following: NDArray[np.int32]) -> int:
    """Return how many tokens two texts have in common before they differ."""
    n = min(len(tokens), len(following))
    other = np.flatnonzero(tokens[:n] != following[:n])
    return int(other[0]) if len(other) else n


class NewNames(NamedTuple):
    """Full blocks that are to be registered, of one group of a sequence."""

    ids: NDArray[np.int32]
    names: NDArray[np.uint8]
    tokens: NDArray[np.int32]
    depths: NDArray[np.int64]
    """Blocks before each in its sequence."""
    parent: bytes | None = None
    """Of group 0, where none is missing, the name before the first."""
    group: int = 0


def name_blocks(
    store: BlockStore, state: SequenceState, tables: list[NDArray[np.int32]] | None = None
) -> tuple[SequenceState, list[NewNames]]:
    """Name those full blocks of a sequence whose token ids are known and that are not registered yet.

    Parameters
    ----------
    store : BlockStore
        Where it lies.
    state : SequenceState
        The sequence.
    tables : list of int32 array, optional
        Its tables from before its window moved on: blocks that are given up are registered too.

    Returns
    -------
    state : SequenceState
        The sequence as it is once they are registered.
    names : list of NewNames
        For `register`.
    """
    size = store.block_size
    first, full = state.registered, len(state.tokens) // size
    if full <= first:
        return state, []
    new = state.tokens[first * size : full * size]
    parent = state.digests[0][-1] if first else None
    digests, parts = [], []
    for group, names in enumerate(block_names(store, new, state.extra, parent)):
        digests.append(np.concatenate([state.digests[group], names]))
        ids = (tables or state.tables)[group][first:full]
        # A window may have moved past some already; and what begins without its first rows has no name.
        begin = store.blocks_for(state.starts[group])
        stored = (ids >= 0) & (first + np.arange(len(ids)) >= begin)
        if stored.any():
            depths = first + np.flatnonzero(stored)
            before = None
            if group == 0 and stored.all():
                before = last_name(store, state.digests, state.extra)
            of_stored = ids[stored], names[stored], new.reshape(-1, size)[stored], depths
            parts.append(NewNames(*of_stored, before, group))
    return state._replace(digests=digests, registered=full), parts


def register(
    store: BlockStore, parts: Sequence[NewNames], checkpoints: Sequence[Checkpoint] = ()
) -> None:
    """Register blocks in the prefix cache, all or none, and queue the new ones for the store.

    Registered states are written with them, whose hashes identify their tokens.
    """
    if parts:
        columns = zip(*(part[:4] for part in parts), strict=True)
        ids, names, tokens, depths = (np.concatenate(column) for column in columns)
        holders = store.blocks.register(ids, names, tokens)
        for part in parts:
            if part.parent is not None:
                store.continuations.note(part.parent, part.names, part.tokens)
        if store.tiers is not None:
            groups = np.array([part.group for part in parts])
            of_each = groups.repeat([len(part.ids) for part in parts])
            store.tiers.stored(NewNames(ids, names, tokens, depths), holders, of_each)
    if store.tiers is not None and checkpoints:
        store.tiers.stored_states(checkpoints)


def register_blocks(store: BlockStore, state: SequenceState) -> SequenceState:
    """Register the blocks of one sequence that `name_blocks` hashes; return the sequence's new state."""
    after, names = name_blocks(store, state)
    register(store, names)
    return after


def split_at_window(
    store: BlockStore, tables: list[NDArray[np.int32]], length: int
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
    """Split off what windows have moved past: the tables with -1 there, and the blocks that were there."""
    ahead, released = tables, []
    for group, table in enumerate(tables):
        kept = store.groups[group].kept_blocks(store.block_size)
        behind = table[kept : store.first_needed(group, length)]
        if len(behind) and (behind >= 0).any():
            released.append(behind)
            table = table.copy()
            table[kept : kept + len(behind)] = -1
            ahead = [*ahead[:group], table, *ahead[group + 1 :]]
    return ahead, released
