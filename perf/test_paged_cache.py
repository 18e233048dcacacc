"""What `PagedKVCache` costs beside its kernels: host time of a decode step's bookkeeping, and of adding a long prompt.

Beside the median stands the best run, which says more about the code on a machine that others use too.
"""

import numpy as np
import pytest

import numkv
from numkv.blocks.prefix import block_digests
from numkv.caches.paged.prefix_match import block_names

SIZE = 16
WINDOWS = {"full": None, "sliding": [-1, 128] * 2}


def make(num_blocks, windows=None):
    """Four layers of one narrow head: the kernels' time is not what is looked at."""
    layers = [numkv.LayerSpec(1, 8, window_left=window) for window in windows or [-1] * 4]
    return numkv.PagedKVCache(layers=layers, num_blocks=num_blocks, block_size=SIZE)


def commit(cache, seqs, n, ids=None):
    """A step's bookkeeping alone: its rows count as written, though they are not."""
    step = cache.reserve(seqs, n)
    step._written[:] = True
    cache.commit(step, token_ids=ids)


@pytest.mark.parametrize("named", [False, True], ids=["no-ids", "ids"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_step(host_time, rng, windows, named):
    """Reserve and commit of a token for each of 64 sequences of 1,000 tokens."""
    cache = make(16384, WINDOWS[windows])
    seqs = [cache.add() for _ in range(64)]
    tokens = rng.integers(0, 150_000, 64 * 1000)
    commit(cache, seqs, 1000, tokens)
    assert [cache.length(s) for s in seqs] == [1000] * 64
    ids = tokens[:64] if named else None

    host_time(lambda: commit(cache, seqs, 1, ids))
    cache.check()


def cached_prompt(rng, windows):
    """A cache that has a prompt of 50,000 tokens, and the prompt."""
    cache = make(16384, WINDOWS[windows])
    tokens = rng.integers(0, 150_000, 50_000).astype(np.int32)
    seq = cache.add()
    commit(cache, [seq], len(tokens), tokens)
    cache.remove(seq)
    return cache, tokens


@pytest.mark.parametrize("windows", WINDOWS)
def test_add_cached(host_time, rng, windows):
    """Hash a prompt of 50,000 tokens, find it and take it over."""
    cache, tokens = cached_prompt(rng, windows)
    seqs = [cache.add(tokens)]
    assert cache.cached_len(seqs[0]) == 50_000 - 1  # the last block in part

    def fresh():
        while seqs:
            cache.remove(seqs.pop())

    host_time(lambda: seqs.append(cache.add(tokens)), fresh)


def test_add_without_the_window(host_time, rng):
    """The same where a sliding group has lost every second block: no length fits, and that is seen at once."""
    cache, tokens = cached_prompt(rng, "sliding")
    seqs = []
    names = block_names(cache._store, tokens, None)[1]
    there = cache.blocks.find(names, tokens)
    cache.blocks.forget(there[::2][there[::2] >= 0])

    def fresh():
        while seqs:
            cache.remove(seqs.pop())

    host_time(lambda: seqs.append(cache.add(tokens)), fresh)
    assert cache.cached_len(seqs[0]) == 0


def test_hash_alone(host_time, rng):
    """The part of it that is sha256."""
    tokens = rng.integers(0, 150_000, 50_000).astype(np.int32)
    assert block_digests(tokens, SIZE).shape == (3125, 32)
    host_time(lambda: block_digests(tokens, SIZE))
