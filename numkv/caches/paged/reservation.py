"""How a step of a `PagedKVCache` begins and ends: what it takes, and what becomes of its sequences.

Both make everything that is new first, which may fail, and leave it to the cache to put it in place, which cannot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.prefix_match import NewNames, name_blocks, split_at_window
from numkv.caches.paged.step import Step
from numkv.caches.paged.store import BlockStore, Ints, SequenceState, held

__all__ = ["Ending", "Reservation", "end_step", "reserve_room"]


class Reservation(NamedTuple):
    """A step whose blocks are taken; made by `reserve_room`."""

    step: Step
    states: dict[int, SequenceState]
    """The sequences with room for it."""
    taken: NDArray[np.int32]
    """Blocks that were allocated."""
    released: NDArray[np.int32]
    """Blocks that the sequences have copies of now."""


def reserve_room(
    store: BlockStore, states: dict[int, SequenceState], new_lens: Ints
) -> Reservation:
    """Allocate blocks for new tokens of some sequences, and copies of the last blocks that they share with others.

    Parameters
    ----------
    store : BlockStore
        Where they lie.
    states : dict of int to SequenceState
        The sequences, without open steps.
    new_lens : int64 array (num_seqs,)
        How many tokens each of them gets.
    """
    lens = new_lens.tolist()
    plans = [
        _plan_table(store, state.length, table, n)
        for state, n in zip(states.values(), lens, strict=True)
        for table in state.tables
    ]
    wanted = [blocks for blocks, _ in plans]
    taken = store.blocks.allocate(sum(wanted))
    try:
        parts = iter(np.split(taken, np.cumsum(wanted)[:-1]) if wanted else [])
        copies = iter([copy for _, copy in plans])
        copy_from: list[int] = []
        copy_to: list[int] = []
        new_states = {}
        for (seq, state), n in zip(states.items(), lens, strict=True):
            tables, copied = [], False
            for table in state.tables:
                new = next(parts)
                if next(copies):
                    copied = True
                    copy_from.append(int(table[-1]))
                    copy_to.append(int(new[0]))
                    table = table[:-1]
                tables.append(np.concatenate([table, new]) if len(new) else table)
            dropped = state.rows_dropped() if copied else state.dropped
            new_states[seq] = state._replace(tables=tables, reserved=n, dropped=dropped)
        step = Step(store, new_states, new_lens)
        if copy_from:
            store.copy_blocks(copy_from, copy_to)
        return Reservation(step, new_states, taken, np.array(copy_from, np.int32))
    except BaseException:  # memory, say
        store.blocks.release(taken)
        raise


def _plan_table(
    store: BlockStore, length: int, table: NDArray[np.int32], n: int
) -> tuple[int, bool]:
    """How many blocks a table needs for `n` more tokens, and whether its last block has to be copied first."""
    copies = False
    if n and length % store.block_size:
        # Others may use the block, or find it by what it stored before a truncation.
        last = table[-1:]
        copies = bool(store.blocks.ref_count(last)[0] > 1 or store.blocks.is_cached(last)[0])
    return max(0, store.blocks_for(length + n) - len(table)) + copies, copies


class Ending(NamedTuple):
    """What becomes of a step's sequences; made by `end_step`."""

    states: dict[int, SequenceState]
    names: list[NewNames]
    """Blocks that are full now, and can be found once they are registered."""
    released: NDArray[np.int32]
    """Blocks of tokens that were not accepted, and blocks behind windows."""


def end_step(
    store: BlockStore,
    states: dict[int, SequenceState],
    step: Step,
    keep: Ints,
    ids: NDArray[np.int32] | None,
) -> Ending:
    """Give sequences the tokens of a step that are kept.

    Parameters
    ----------
    store : BlockStore
        Where they lie.
    states : dict of int to SequenceState
        The step's sequences.
    step : Step
        The step.
    keep : int64 array (num_seqs,)
        How many of its tokens each of them keeps.
    ids : int32 array (num_tokens,) or None
        Ids of the step's tokens, if they are known.
    """
    starts = [0, *np.cumsum(step.new_lens).tolist()]
    new_states: dict[int, SequenceState] = {}
    names: list[NewNames] = []
    released: list[NDArray[np.int32]] = []
    for (seq, state), first, n in zip(states.items(), starts, keep.tolist(), strict=False):
        length, tokens = state.length + n, state.tokens
        if ids is not None and n and len(tokens) == state.length:
            tokens = np.concatenate([tokens, ids[first : first + n]])
        tables, rejected = store.cut_tables(state.tables, length)
        named, parts = name_blocks(
            store, state._replace(length=length, tables=tables, tokens=tokens, reserved=None)
        )
        tables, behind = split_at_window(store, tables, length)
        if behind:
            named = named._replace(tables=tables, dropped=state.rows_dropped())
        new_states[seq] = named
        names += parts
        released += rejected + behind
    return Ending(new_states, names, held(released))
