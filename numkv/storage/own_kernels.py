"""The arrays for a user's own kernels: a pool's, with the tables of its owner, uploaded on CUDA."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numkv import targets
from numkv.arrays import CacheArrays
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target


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
    no_table, no_lens, no_slots = _nothing(pool.target.key)
    return CacheArrays(
        *pool.arrays(),
        no_table if block_table is None else block_table,
        no_lens if context_lens is None else context_lens,
        no_slots if slots is None else slots,
    )


@functools.cache
def _nothing(target: str) -> tuple[Array, Array, Array]:
    """A table, lengths and slots of length 0."""
    place = targets.by_key(target)
    return place.empty((0, 0), np.int32), place.empty((0,), np.int64), place.empty((0,), np.int64)


class Uploads:
    """Tables and lengths of host memory on a target, uploaded when they are asked for and have changed.

    Where kernels read host memory they are the arrays themselves.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._held: dict[object, tuple[bytes, Array]] = {}

    def of(self, name: object, host: np.ndarray[Any, Any]) -> Array:
        """An array on the target.

        Parameters
        ----------
        name : hashable
            Which one it is: the upload before of this name serves again where the content is the same.
        host : int array
            The array in host memory.
        """
        if self._target.values_on_host:
            return host
        content = host.tobytes()
        held = self._held.get(name)
        if held is None or held[0] != content or held[1].shape != host.shape:
            held = content, self._target.index(host, host.dtype)
            self._held[name] = held
        return held[1]
