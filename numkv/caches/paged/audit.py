"""The audit of a `PagedKVCache`: it describes the first error in the metadata or the scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from numkv.caches.paged.store import BlockStore, Ints, SequenceState, blocks_in


def check_books(store: BlockStore, states: Mapping[int, SequenceState]) -> str:
    """Check references, tables, lengths and the prefix cache.

    Parameters
    ----------
    store : BlockStore
        Where sequences lie.
    states : mapping of int to SequenceState
        All sequences.

    Returns
    -------
    str
        The first contradiction, or nothing.
    """
    store.blocks.check()
    num_blocks = store.blocks.num_blocks
    for seq, state in states.items():
        entries = state.blocks()
        if len(np.unique(entries)) != len(entries) or (entries >= num_blocks).any():
            return f"sequence {seq}: expected each of {num_blocks} blocks once at most, got the tables {state.tables}"
    entries = blocks_in(table for state in states.values() for table in state.tables)
    wanted = np.bincount(entries, minlength=num_blocks)
    counts = store.blocks.ref_count(np.arange(num_blocks))
    wrong = np.flatnonzero(wanted != counts)
    if len(wrong):
        return (
            f"block {wrong[0]}: expected {wanted[wrong[0]]} references, one for each table entry, got "
            f"{counts[wrong[0]]}"
        )
    if problem := _check_states(store, states):
        return problem
    for seq, state in states.items():
        if problem := _check_sequence(store, state) or _check_names(store, state):
            return f"sequence {seq}: {problem}"
    return ""


def _check_states(store: BlockStore, states: Mapping[int, SequenceState]) -> str:
    """Check that sequences with tokens have states, and that slots have as many references."""
    if store.states is None:
        return ""
    block_pool = store.states.block_pool
    block_pool.check()
    for seq, state in states.items():
        if (state.slot < 0) != (state.length == 0) or state.slot >= block_pool.num_blocks:
            return f"sequence {seq}: expected a slot with states of {state.length} tokens, got {state.slot}"
    slots = np.array([x.slot for x in states.values() if x.slot >= 0], np.int64)
    wanted = np.bincount(slots, minlength=block_pool.num_blocks)
    counts = block_pool.ref_count(np.arange(block_pool.num_blocks))
    # Open steps have a slot for each of their sequences, with one reference.
    extra = counts - wanted
    open_ones = sum(state.reserved is not None for state in states.values())
    if (extra < 0).any() or (extra > 1).any() or extra.sum() != open_ones:
        return (
            f"expected {int(wanted.sum())} references to slots of states, and {open_ones} of open steps, got "
            f"{int(counts.sum())}"
        )
    return ""


def _check_sequence(store: BlockStore, state: SequenceState) -> str:
    """Check a sequence's lengths and tables."""
    length, reserved = state.length, state.reserved or 0
    if length < 0 or reserved < 0 or not 0 <= state.cached <= length:
        return f"expected lengths of at least 0, got {length}, {reserved} reserved and {state.cached} cached"
    if state.dropped & 1:
        return "expected rows in their places, got some that are being moved"
    if len(state.tokens) > length or state.registered > len(state.tokens) // store.block_size:
        return (
            f"expected token ids of at most {length} tokens, and named blocks of these only, got {len(state.tokens)} "
            f"ids and {state.registered} blocks"
        )
    need = store.blocks_for(length + reserved)
    for number, group in enumerate(store.groups):
        table, first = state.tables[number], store.first_needed(number, length)
        start, kept = state.starts[number], group.kept_blocks(store.block_size)
        if group.beside:
            first = max(first, store.blocks_for(start))
        if not 0 <= start <= (length if group.beside else group.first_visible(length)):
            return f"expected rows of all tokens that its newest sees, got rows from {start} on"
        if len(table) != need or (table[first:] < 0).any() or (table[:kept] < 0).any():
            return f"expected {need} blocks, got the table {table}"
    return ""


def _check_names(store: BlockStore, state: SequenceState) -> str:
    """Check that blocks in the prefix cache are there under the names that their sequence knows."""
    n, size = state.registered, store.block_size
    tokens = state.tokens[: n * size]
    for number, (table, names) in enumerate(zip(state.tables, state.digests, strict=True)):
        if len(names) != n:
            return f"expected {n} names in layer group {number}, got {len(names)}"
        at = np.flatnonzero(table[:n] >= 0)
        at = at[store.blocks.is_cached(table[at])]
        if len(at):
            found = store.blocks.find(names[at], tokens.reshape(-1, size)[at])
            wrong = np.flatnonzero(found != table[at])
            if len(wrong):
                block = table[at[wrong[0]]]
                return f"expected block {block} in the prefix cache under the name that it has here, got another name"
    return ""


def check_scales(store: BlockStore, states: Iterable[SequenceState]) -> str:
    """Check that the scales of committed tokens, and those of heads, are finite.

    Parameters
    ----------
    store : BlockStore
        Where sequences lie.
    states : iterable of SequenceState
        All sequences.

    Returns
    -------
    str
        The first layer with a bad one, or nothing.
    """
    states = list(states)
    tokens = [_places(store, states, group) for group in range(len(store.groups))]
    for layer in store.layers.storing:
        pool, group = store.place(layer)
        for name, side in pool.stored:
            if side.kind.scales_per != "none" and not side.has_sound_scales(*tokens[group]):
                return f"layer {layer}: expected finite scales of committed tokens, got others in `{name}`"
    return ""


def _places(store: BlockStore, states: Iterable[SequenceState], group: int) -> tuple[Ints, Ints]:
    """Block and offset of every committed token that a group has the rows of."""
    none = np.empty(0, np.int64)
    blocks, offsets = [none], [none]
    for state in states:
        tokens = np.arange(store.first_stored(state, group), state.length)
        blocks.append(state.tables[group][tokens // store.block_size].astype(np.int64))
        offsets.append(tokens % store.block_size)
    return np.concatenate(blocks), np.concatenate(offsets)
