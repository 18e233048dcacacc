"""Prompts and the state of a `BlockPool`, for its tests."""

import numpy as np
import pytest

from numkv.blocks.pool import BlockPool
from numkv.blocks.prefix import block_digests

SIZE = 2  # tokens in a block


def state_of(pool: BlockPool) -> list[np.ndarray]:
    """Return everything that a pool remembers, the contents of unused places included."""
    arrays = (
        pool._state, pool._digests, pool._tokens, pool._table, pool._evicted, pool._counters,
    )  # fmt: skip
    return [array.copy() for array in arrays]


def unchanged(pool: BlockPool, before: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(before, state_of(pool), strict=True))


def refused(pool: BlockPool, error, match: str, call, *args):
    """Assert that a call raises and leaves the pool as it was."""
    before = state_of(pool)
    with pytest.raises(error, match=match):
        call(*args)
    assert unchanged(pool, before)
    pool.check()


def prompt(n: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Names and tokens of a prompt of `n` full blocks; another `first` token makes another prompt."""
    tokens = np.arange(n * SIZE, dtype=np.int32)
    tokens[:1] = first + 1000
    return block_digests(tokens, SIZE), tokens


def cached(pool: BlockPool, n: int, first: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A prompt whose blocks are registered, and in use."""
    names, tokens = prompt(n, first)
    ids = pool.allocate(n)
    pool.register(ids, names, tokens)
    return ids, names, tokens
