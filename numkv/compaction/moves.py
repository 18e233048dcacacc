"""Compaction: kept tokens move to the front of a cache, as if the others had never been written.

Rows move as they are stored, bit for bit. Where the model applies RoPE, keys depend on their position; the keys of
tokens that move can be shifted (see `numkv.rope_shift`), which quantises them once more.
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

Ints = NDArray[np.int64]


def plan_moves(
    pool: Pool, shift: RopeShift | None, source_slots: Ints, to_slots: Ints, offsets: Ints
) -> list[Callable[[], object]]:
    """Check that tokens can move within a pool, and return the moves.

    Parameters
    ----------
    pool : Pool
        The pool.
    shift : RopeShift or None
        What shifts their keys; None leaves them as they are.
    source_slots, to_slots : int64 array (n,)
        Where each token is, and where it goes; no pair writes to a slot that a later pair reads.
    offsets : int64 array (n,)
        How much larger the position of each becomes.

    Returns
    -------
    list of callable
        To be called in this order; none of them fails.
    """
    moved = np.flatnonzero(source_slots != to_slots)
    moves: list[Callable[[], object]] = []
    if len(moved):
        moves.append(lambda: pool.copy_tokens(source_slots[moved], pool, to_slots[moved]))
    if shift is not None:
        for part in groups_of(offsets):
            offset = int(offsets[part[0]])
            if offset:
                slots = pool.target.index(to_slots[part], np.int64)
                moves.append(shift.plan(pool, slots, offset))
    return moves


def check_shift(shift: Any) -> None:
    """Refuse what is no key shift."""
    if shift is not None and not isinstance(shift, RopeShift):
        raise TypeError(
            "`shift`: expected what numkv.rope_shift(cos, sin) returns, or None for keys that stay as "
            f"they are, got {type(shift).__name__}"
        )


def groups_of(offsets: Ints) -> list[Ints]:
    """Indices of equal numbers, for each number."""
    if not len(offsets):
        return []
    order = np.argsort(offsets, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(offsets[order])) + 1)


class Relocation(NamedTuple):
    """The block table of a compacted sequence, and which tokens move; made by `relocate`."""

    table: NDArray[np.int32]
    """The new table, with the present blocks at the same index; -1 where there is none."""
    changed: Ints
    """Indices of blocks whose content changes."""
    dropped: NDArray[np.int32]
    """Blocks that are not needed any more."""
    start: int
    """First kept token whose rows are stored."""
    moved: Ints
    """Tokens that are written to changed blocks, by their index in `kept`."""
    source: Ints
    """Slots of these tokens before."""


def relocate(
    table: NDArray[np.int32], kept: Ints, start: int, window: int, block_size: int, keeps: int
) -> Relocation:
    """Plan the block table of a sequence of which some tokens are kept and move to the front.

    Blocks whose tokens all stay where they are do not change.

    Parameters
    ----------
    table : int32 array (num_blocks,)
        Blocks of the sequence; -1 where they were released behind a window.
    kept : int64 array (n,)
        Tokens to keep, rising.
    start : int
        First token whose rows are stored.
    window : int
        Earlier tokens that a query attends to, -1 for all: blocks behind the newest kept token's window are dropped.
    block_size : int
        Tokens in a block.
    keeps : int
        First tokens of the sequence whose blocks stay behind the window, too.

    Returns
    -------
    Relocation

    Raises
    ------
    NotSupported
        If the newest kept token attends to one whose rows are not stored any more, or first tokens are not kept.
    """
    n = len(kept)
    blocks = -(-n // block_size)
    first_visible = 0 if window < 0 else max(0, n - 1 - window)
    first_stored = int(np.searchsorted(kept, start))
    if n and first_visible < first_stored:
        raise NotSupported(
            f"`keep`: expected the newest {window + 1} tokens to keep to be among those from {start} on, as layers "
            f"with a sliding window of {window} hold no others, got {kept[first_visible:][:4].tolist()}, …; "
            f"keep the newest {window + 1} tokens"
        )
    sinks = min(keeps, n)
    if not np.array_equal(kept[:sinks], np.arange(sinks)):
        raise NotSupported(
            f"`keep`: expected the first {keeps} tokens among those to keep, as no others can be in full precision in "
            f"their place, got {kept[:4].tolist()}, …; keep tokens 0 to {keeps - 1}"
        )
    first = first_visible // block_size
    elsewhere = np.flatnonzero(kept != np.arange(n))
    stay = int(elsewhere[0]) // block_size if len(elsewhere) else blocks
    index = np.arange(blocks)
    needed = index[(index < -(-sinks // block_size)) | (index >= first)]
    new = np.full(blocks, -1, np.int32)
    new[needed] = table[needed]
    dropped = np.delete(table, needed)
    changed = needed[needed >= stay]
    tokens = np.arange(n)
    # The other tokens of a block of first ones move too: if the next block is there, rows count from `start` on.
    there = (tokens < sinks) | (tokens >= first_stored)
    moved = tokens[there & np.isin(tokens // block_size, changed)]
    source = slots_of(table, kept[moved], block_size)
    return Relocation(new, changed, dropped[dropped >= 0], first_stored, moved, source)


def slots_of(table: NDArray[np.int32], tokens: Ints, block_size: int) -> Ints:
    """Slots of tokens, by the block table of their sequence."""
    slots: Ints = table[tokens // block_size].astype(np.int64) * block_size
    return slots + tokens % block_size


def fresh_blocks(
    pool: BlockPool, old: NDArray[np.int32], order: Ints, num_released: int
) -> NDArray[np.bool_]:
    """Choose which blocks a compaction replaces; the others get their new content in place.

    Shared and pinned blocks must stay as they are. Other blocks in the prefix cache stay too, the first ones first, as
    far as there are free blocks; the rest leave the prefix cache.

    Parameters
    ----------
    pool : BlockPool
        The pool of the blocks.
    old : int32 array (n,)
        Blocks whose content changes; -1 where there is none yet.
    order : int64 array (n,)
        Their indices in the sequence.
    num_released : int
        Blocks that the compaction releases even if it replaces only those that it must.

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
    fresh |= (pool.ref_count(ids) > 1) | (pool.pin_count(ids) > 0)
    needed, free = int(fresh.sum()), pool.num_free
    if needed > free + num_released:
        raise CacheFull(
            f"`keep`: expected {needed} free blocks, for copies of blocks that are shared, pinned or gone, got "
            f"{free} and {num_released} that are given back; remove or compact a sequence first"
        )
    if needed < free:
        named = np.flatnonzero(~fresh & pool.is_cached(ids))
        fresh[named[np.argsort(order[named], kind="stable")][: free - needed]] = True
    return fresh
