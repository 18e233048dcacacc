"""Compaction: the tokens that are kept move to the front of a cache, as if the others had never been written.

Rows move as they are stored, so nothing is lost by it. Keys know their position where the model rotates them; those of
tokens that move can be turned along (see `numkv.rope_shift`), which quantises them once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import BlockPool
from numkv.compaction.key_shift import RopeShift
from numkv.errors import CacheFull, NotSupported
from numkv.storage.pool import Pool

__all__ = ["Relocation", "fresh_blocks", "plan_moves", "relocate", "slots_of"]

Ints = NDArray[np.int64]


def plan_moves(
    pool: Pool, shift: Any, source_slots: Ints, to_slots: Ints, offsets: Ints
) -> list[Callable[[], object]]:
    """Check that tokens can move within a pool, and return what moves them.

    Parameters
    ----------
    pool : Pool
        Where they are.
    shift : RopeShift or None
        What turns their keys; None leaves them as they are.
    source_slots, to_slots : int64 array (n,)
        Where each token is, and where it goes; no pair writes to a slot that a later pair reads.
    offsets : int64 array (n,)
        How many positions further each is to stand.

    Returns
    -------
    list of callable
        What there is to do, in this order; none of it fails.
    """
    if shift is not None and not isinstance(shift, RopeShift):
        raise TypeError(
            "`shift`: expected what numkv.rope_shift(cos, sin) returns, or None for keys that stay as "
            f"they are, got {type(shift).__name__}"
        )
    moved = np.flatnonzero(source_slots != to_slots)
    moves: list[Callable[[], object]] = []
    if len(moved):
        moves.append(lambda: pool.move_tokens(source_slots[moved], to_slots[moved]))
    if shift is not None:
        for part in groups_of(offsets):
            offset = int(offsets[part[0]])
            if offset:
                slots = pool.target.index(to_slots[part], np.int64)
                moves.append(shift.plan(pool, slots, offset))
    return moves


def groups_of(offsets: Ints) -> list[Ints]:
    """Where equal numbers stand, for each of them that there is."""
    if not len(offsets):
        return []
    order = np.argsort(offsets, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(offsets[order])) + 1)


class Relocation(NamedTuple):
    """What a block table becomes when its sequence is compacted; made by `relocate`."""

    table: NDArray[np.int32]
    """The new table, with the blocks that are there now at the same place; -1 where none is."""
    changed: Ints
    """Which of its blocks get other content."""
    dropped: NDArray[np.int32]
    """Blocks that it has no place for."""
    start: int
    """First kept token whose rows are there."""
    moved: Ints
    """Kept tokens that go to blocks that change, counted among those that are kept."""
    source: Ints
    """Slots where they are."""


def relocate(
    table: NDArray[np.int32], kept: Ints, start: int, window: int, block_size: int
) -> Relocation:
    """Find what a block table becomes when some tokens are kept and move up.

    Blocks whose tokens all stay where they are do not change.

    Parameters
    ----------
    table : int32 array (num_blocks,)
        Blocks of the sequence; -1 where a window has moved on.
    kept : int64 array (n,)
        Tokens that are kept, rising.
    start : int
        First token whose rows are there.
    window : int
        Earlier tokens that the layers see, -1 for all: blocks that the newest kept token does not see are let go of.
    block_size : int
        Tokens in a block.

    Returns
    -------
    Relocation

    Raises
    ------
    NotSupported
        If the newest kept token would see one whose rows the window has let go of.
    """
    n = len(kept)
    blocks = -(-n // block_size)
    first_seen = 0 if window < 0 else max(0, n - 1 - window)
    first_there = int(np.searchsorted(kept, start))
    if n and first_seen < first_there:
        raise NotSupported(
            f"`keep`: expected the newest {window + 1} tokens to keep to be among those from {start} on, as layers "
            f"with a sliding window of {window} hold no others, got {kept[first_seen:][:4].tolist()}, …; "
            f"keep the newest {window + 1} tokens"
        )
    first = first_seen // block_size
    elsewhere = np.flatnonzero(kept != np.arange(n))
    stay = int(elsewhere[0]) // block_size if len(elsewhere) else blocks
    new = np.full(blocks, -1, np.int32)
    new[first:] = table[first:blocks]
    dropped = np.concatenate([table[:first], table[blocks:]])
    changed = np.arange(max(first, stay), blocks)
    moved = np.arange(max(first_there, max(first, stay) * block_size), n)
    source = slots_of(table, kept[moved], block_size)
    return Relocation(new, changed, dropped[dropped >= 0], first_there, moved, source)


def slots_of(table: NDArray[np.int32], tokens: Ints, block_size: int) -> Ints:
    """Slots of tokens, by the block table of their sequence."""
    slots: Ints = table[tokens // block_size].astype(np.int64) * block_size
    return slots + tokens % block_size


def fresh_blocks(
    pool: BlockPool, old: NDArray[np.int32], order: Ints, given_back: int
) -> NDArray[np.bool_]:
    """Which blocks a compaction replaces; the others get their new content in place.

    Those that someone else uses, or that are pinned, have to be left alone. So are those that nobody else uses but that
    are findable as a prefix, the first ones first, as far as free blocks go round; the others lose their names.

    Parameters
    ----------
    pool : BlockPool
        Whose blocks they are.
    old : int32 array (n,)
        Blocks whose content changes; -1 where there is none yet.
    order : int64 array (n,)
        Their places in the sequence.
    given_back : int
        Blocks that the compaction frees even if it replaces only those that it has to.

    Returns
    -------
    bool array (n,)

    Raises
    ------
    CacheFull
        If there are too few free blocks.
    """
    fresh = old < 0
    ids = np.maximum(old, 0)
    if len(ids):
        fresh |= (pool.ref_count(ids) > 1) | (pool.pin_count(ids) > 0)
    needed, free = int(fresh.sum()), pool.num_free
    if needed > free + given_back:
        raise CacheFull(
            f"`keep`: expected {needed} free blocks, for copies of blocks that are shared, pinned or gone, got "
            f"{free} and {given_back} that are given back; remove or compact a sequence first"
        )
    if needed < free:
        named = np.flatnonzero(~fresh & pool.is_cached(ids)) if len(ids) else np.empty(0, np.int64)
        fresh[named[np.argsort(order[named], kind="stable")][: free - needed]] = True
    return fresh
