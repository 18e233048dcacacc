"""`cache_arrays`: what a user's own kernels get of a pool, with the tables of whoever uses it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numkv import targets
from numkv.arrays import CacheArrays
from numkv.storage.pool import Pool
from numkv.targets.base import Array

__all__ = ["cache_arrays"]


def cache_arrays(
    pool: Pool, block_table: Any = None, context_lens: Any = None, slots: Any = None
) -> CacheArrays:
    """Put the arrays of a pool and of a cache's books together.

    Parameters
    ----------
    pool : Pool
        The buffers, with the scales of the layer.
    block_table : int32 array (num_seqs, max_blocks), optional
        On the pool's target, as are the others; None for what does not apply.
    context_lens : int array (num_seqs,), optional
        Lengths.
    slots : int64 array (num_tokens,), optional
        Slots of tokens that are being written.

    Returns
    -------
    CacheArrays
    """
    no_table, no_lens, no_slots = _nothing(pool.target.name)
    return CacheArrays(
        *pool.arrays(),
        no_table if block_table is None else block_table,
        no_lens if context_lens is None else context_lens,
        no_slots if slots is None else slots,
    )


@functools.cache
def _nothing(target: str) -> tuple[Array, Array, Array]:
    """A table, lengths and slots of length 0."""
    place = targets.get(target)
    return place.empty((0, 0), np.int32), place.empty((0,), np.int64), place.empty((0,), np.int64)
