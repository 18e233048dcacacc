"""Tables and lengths that are the same in every call, made once for each target; those in host memory are read-only."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.targets.base import Array


@functools.lru_cache(maxsize=64)
def one_block_each(target: str, num_seqs: int) -> Array:
    """Return the block table of a contiguous cache: sequence b has block b."""
    return _constant(target, np.arange(num_seqs, dtype=np.int32)[:, None])


@functools.lru_cache(maxsize=64)
def one_query_each(target: str, num_seqs: int) -> Array:
    """Return where queries start when each sequence has one."""
    found = _constant(target, np.arange(num_seqs + 1, dtype=np.int64))
    targets.by_key(target).mark_queries(found, "one each")
    return found


@functools.lru_cache(maxsize=64)
def one_sequence(target: str, num_tokens: int) -> Array:
    """Return where queries start, and end, when all are of one sequence."""
    host = np.array([0, num_tokens], np.int64)
    host.flags.writeable = False
    return targets.by_key(target).index(host, host.dtype)


@functools.lru_cache(maxsize=64)
def one_length(target: str, length: int) -> Array:
    """Return the length of one sequence, as kernels take it; all layers of a step ask for the same."""
    found = targets.by_key(target).length(length)
    if isinstance(found, np.ndarray):
        found.flags.writeable = False
    return found


def _constant(device: str, host: NDArray[np.int32] | NDArray[np.int64]) -> Array:
    """Return a read-only array of a device, for all of its streams, captured ones too."""
    host.flags.writeable = False
    return targets.by_key(device).constant(host)
