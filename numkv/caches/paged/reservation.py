"""The beginning and end of a `PagedKVCache`'s step: its blocks, and the new state of its sequences.

Both make everything that is new first, which may fail, and leave it to the cache to put it in place, which cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.blocks.pool import taken_for_now
from numkv.caches.paged.buffers import StepTables
from numkv.caches.paged.prefix_match import NewNames, name_blocks, split_at_window
from numkv.caches.paged.states import Checkpoint, StateMemory
from numkv.caches.paged.step import Step, StepMetadata
from numkv.caches.paged.store import BlockStore, Ints, SequenceState, blocks_in
from numkv.caches.paged.trees import Tree
from numkv.checks import check_integers, host_array
from numkv.compaction.moves import slots_of
from numkv.errors import CacheFull, NotSupported


class Reservation(NamedTuple):
    """A step whose blocks are taken; made by `reserve_room`."""

    step: Step
    metadata: StepMetadata
    states: dict[int, SequenceState]
    """The sequences with room for it."""
    released: NDArray[np.int32]
    """Blocks that the sequences have copies of now."""
    undo: Callable[[], None]
    """Gives the allocated blocks back as if they had never been in use."""
    slots: NDArray[np.int32] | None = None
    """Slots for states that were allocated."""


def reserve_room(
    store: BlockStore, states: dict[int, SequenceState], new_lens: Ints, into: StepTables | None = None,
    tree: Tree | None = None,
) -> Reservation:  # fmt: skip
    """Allocate blocks for new tokens of some sequences, and copies of the last blocks that they share with others.

    Parameters
    ----------
    store : BlockStore
        Where they lie.
    states : dict of int to SequenceState
        The sequences, without open steps.
    new_lens : int64 array (num_seqs,)
        How many tokens each of them gets.
    into : StepTables, optional
        Where the step's tables lie.
    tree : Tree, optional
        The trees of the new tokens, if they are drafts.
    """
    if tree is not None:
        store.refuse_residual("parents", "draft in a line, or use one without")
    lens = new_lens.tolist()
    wanted, copied = _plan_tables(store, states, lens)
    if store.states is not None:
        refuse_without_slots(store.states, len(states))
    try:
        taken, undo = taken_for_now(store.blocks, sum(wanted))
    except CacheFull as error:
        raise CacheFull(
            f"`new_lens`: {sum(lens)} new tokens need {sum(wanted)} blocks of {store.block_size}: {error}, remove or "
            "swap out sequences, or make the cache with more blocks"
        ) from None
    slots = None
    try:
        if store.states is not None:
            slots = store.states.block_pool.allocate(len(states))
            fresh = np.array([state.slot < 0 for state in states.values()], np.bool_)
            store.states.clear(slots[fresh])
        copy_from: list[int] = []
        copy_to: list[int] = []
        copy_group: list[int] = []
        new_states = {}
        part = end = 0
        for (seq, state), n in zip(states.items(), lens, strict=True):
            tables, dropped = [], state.dropped
            for group, table in enumerate(state.tables):
                begin, end = end, end + wanted[part]
                if copied[part]:
                    if table[-1] >= 0:
                        copy_from.append(int(table[-1]))
                        copy_to.append(int(taken[begin]))
                        copy_group.append(group)
                    table, dropped = table[:-1], state.rows_dropped()
                tables.append(np.concatenate([table, taken[begin:end]]) if end > begin else table)
                part += 1
            new_states[seq] = state.in_step(state.length, tables, state.tokens, n, dropped)
        store.clear(taken)
        if copy_from:
            store.copy_blocks(copy_from, copy_to, copy_group)
        new_states = _with_whole_groups(store, new_states)
        metadata = StepMetadata(store.reading_only.copy(), [], tree, slots)
        step = Step(store, new_states, new_lens, metadata, into)
        return Reservation(step, metadata, new_states, np.array(copy_from, np.int32), undo, slots)
    except BaseException:  # memory, say
        undo()
        if store.states is not None and slots is not None:
            store.states.block_pool.release(slots)
        raise


def _with_whole_groups(
    store: BlockStore, states: dict[int, SequenceState]
) -> dict[int, SequenceState]:
    """Return sequences whose newest token group has all rows in full, if keys are stored by channel.

    Where a truncation has cut a quantised group, its rows are decoded, and are later quantised with the new ones.
    """
    if store.layers.residual is None:
        return states
    found, target, size = dict(states), store.target, store.block_size
    for layer, some in enumerate(store.layers.groups):
        if not some:
            continue
        (codes, of_codes), (floats, number) = (
            store.place(x) for x in (layer, layer + store.num_layers)
        )
        for seq, state in states.items():
            begin = state.length // some * some
            first = min(store.first_stored(state, number), state.length)
            if not state.reserved or begin >= first:
                continue
            lost = np.arange(begin, first)
            here, there = (
                target.index(slots_of(state.tables[group], lost, size), np.int64)
                for group in (of_codes, number)
            )
            floats.scatter(codes.k_buffer.gather(here), codes.v_buffer.gather(here), there)
            starts = list(found[seq].starts)
            starts[number] = min(starts[number], begin)
            found[seq] = found[seq]._replace(starts=starts)
    return found


def _plan_tables(
    store: BlockStore, states: dict[int, SequenceState], lens: list[int]
) -> tuple[list[int], list[bool]]:
    """How many blocks each table needs for its sequence's new tokens, and whether its last one has to be copied."""
    size, tables = store.block_size, []
    copied: list[bool] = []
    needs: list[int] = []
    for state, n in zip(states.values(), lens, strict=True):
        tables += state.tables
        groups = len(state.tables)
        copied += [n > 0 and state.length % size > 0] * groups
        needs += [-(-(state.length + n) // size)] * groups
    if True in copied:
        # Others may use the block, or find it by its content before a truncation.
        last = np.array([t[-1] if c else 0 for t, c in zip(tables, copied, strict=True)], np.int32)
        # A truncated sequence may lack the block of full-precision copies.
        gone, last = last < 0, np.maximum(last, 0)
        busy = (store.blocks.ref_count(last) > 1) | store.blocks.is_cached(last) | gone
        copied = (busy & copied).tolist()
    wanted = [
        max(0, need - len(table)) + copy
        for need, table, copy in zip(needs, tables, copied, strict=True)
    ]
    return wanted, copied


def refuse_without_slots(slots: StateMemory, wanted: int) -> None:
    """Refuse sequences for whose states there is no room, before blocks are taken, which may be those of prefixes."""
    free = slots.block_pool.num_free
    if wanted > free:
        raise CacheFull(
            f"`sequences`: expected at most {free}, for whose states there are slots, got {wanted}; remove or swap out "
            "sequences, or make the cache with more `num_states`"
        )


def kept_tokens(
    new_lens: Ints, tree: Tree | None, accepted: Any, paths: Any
) -> tuple[Ints, Ints | None]:
    """Return how many of its tokens each sequence of a step keeps; of trees also all tokens, those that are kept first.

    See `numkv.PagedKVCache.commit` for the arguments.
    """
    if tree is not None:
        if accepted is not None or paths is None:
            raise NotSupported(
                "`paths`: expected the accepted path of each sequence, for a step of trees, and no `accepted`; or roll "
                "the step back"
            )
        return tree.order_of(paths, new_lens)
    if paths is not None:
        raise NotSupported("`paths`: expected None for a step that `reserve` made without parents")
    if accepted is None:
        return new_lens, None
    given = host_array("accepted", accepted)
    checked = check_integers(targets.get("cpu"), "accepted", given, (len(new_lens),))
    keep: Ints = checked.astype(np.int64)
    if ((keep < 0) | (keep > new_lens)).any():
        raise IndexError(
            f"`accepted`: expected numbers up to {new_lens.tolist()}, got {keep.tolist()}"
        )
    return keep, None


class Ending(NamedTuple):
    """The sequences after a step, and the blocks that change; made by `end_step`."""

    states: dict[int, SequenceState]
    names: list[NewNames]
    """Blocks that are full now, and can be found once they are registered."""
    released: NDArray[np.int32]
    """Blocks of tokens that were not accepted, and blocks behind windows."""
    slots: NDArray[np.int32]
    """Slots of states that are no longer needed."""
    checkpoints: list[Checkpoint]
    """States to register."""


def end_step(
    store: BlockStore,
    states: dict[int, SequenceState],
    step: Step,
    state_slots: NDArray[np.int32] | None,
    keep: Ints,
    ids: NDArray[np.int32] | None,
) -> Ending:
    """Add a step's kept tokens to its sequences.

    Parameters
    ----------
    store : BlockStore
        Where they lie.
    states : dict of int to SequenceState
        The step's sequences.
    step : Step
        The step.
    state_slots : int32 array (num_seqs,) or None
        Slots with the new states of the sequences, if layers have states.
    keep : int64 array (num_seqs,)
        How many of its tokens each of them keeps.
    ids : int32 array (num_tokens,) or None
        Ids of the step's tokens, if they are known.
    """
    starts = [0, *np.cumsum(step.new_lens).tolist()]
    new_states: dict[int, SequenceState] = {}
    names: list[NewNames] = []
    released: list[NDArray[np.int32]] = []
    slots: list[int] = []
    checkpoints: list[Checkpoint] = []
    working = [-1] * len(keep) if state_slots is None else state_slots.tolist()
    each = zip(states.items(), starts, keep.tolist(), working, strict=False)
    for (seq, state), first, n, slot in each:
        length, tokens = state.length + n, state.tokens
        if ids is not None and n and len(tokens) == state.length:
            tokens = np.concatenate([tokens, ids[first : first + n]])
        tables, rejected = store.cut_tables(state.tables, length)
        ahead, behind = split_at_window(store, tables, length)
        dropped = state.rows_dropped() if behind else state.dropped
        after = state.in_step(length, ahead, tokens, None, dropped)
        after, parts = name_blocks(store, after, tables)
        if store.states is not None:
            slots.append(state.slot if n else slot)
            if n:
                after = _with_states(store, store.states, after, slot)
                if after.marks is not state.marks:
                    named = len(after.digests[0]) * store.block_size >= length
                    last = after.tokens[length - store.block_size : length] if named else None
                    checkpoints.append(Checkpoint(slot, after.marks[-1][1], length, last))
        new_states[seq] = after
        names += parts
        released += rejected + behind
    given_up = np.array([slot for slot in slots if slot >= 0], np.int32)
    return Ending(new_states, names, blocks_in(released), given_up, checkpoints)


def _with_states(
    store: BlockStore, states: StateMemory, state: SequenceState, slot: int
) -> SequenceState:
    """A sequence with the states that a step has ended with, and a mark where they are a checkpoint."""
    marks, length = state.marks, state.length
    if states.is_checkpoint(length):
        chain, number = state.digests[0], length // store.block_size
        name = chain[number - 1].tobytes() if len(chain) >= number else states.new_name()
        marks = (*marks, (length, name))
    return state._replace(slot=slot, marks=marks)
