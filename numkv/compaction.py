"""Compaction: the tokens that are kept move to the front of a cache, as if the others had never been written.

Rows move as they are stored, so nothing is lost by it. Keys know their position where the model rotates them; those of
tokens that move can be turned along (see `numkv.rope_shift`), which quantises them once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.pool import Pool
from numkv.rope_shift import RopeShift

__all__ = ["plan_moves"]

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
