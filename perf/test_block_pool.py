"""The block pool's bookkeeping: nanoseconds per block, calls from Python included, and hashing a long prompt.

The free lists are shuffled, so that memory is touched as in a pool that has been in use for long. Beside the median
stands the best run, which says more about the code on a machine that others use too.
"""

import hashlib

import numpy as np
import pytest

from numkv.blocks.pool import BlockPool
from numkv.blocks.prefix import block_digests

SIZE = 16


@pytest.fixture
def per_block(benchmark, note, request):
    """``per_block(run, n, setup)``: time `run` over `n` blocks and note what one costs."""

    def timed(run, n, setup=None):
        if not benchmark.enabled:
            if setup is not None:
                setup()
            benchmark(run)
            return
        benchmark.pedantic(run, setup=setup, rounds=200, iterations=1, warmup_rounds=5)
        stats = benchmark.stats.stats
        benchmark.extra_info.update({"blocks": n, "ns per block": stats.median / n * 1e9})
        note(
            f"{request.node.name:36} {stats.median / n * 1e9:9.1f} ns per block "
            f"(best {stats.min / n * 1e9:.1f}), {stats.median * 1e6:.1f} us a call"
        )

    return timed


def shuffled_pool(rng, num_blocks=65536, cached=False):
    """A pool whose free blocks come in no order, all empty or all with cached content."""
    pool = BlockPool(num_blocks, SIZE)
    ids = pool.allocate(num_blocks)
    if cached:
        names = rng.integers(0, 256, (num_blocks, 32), np.uint8)
        pool.register(ids, names, np.zeros((num_blocks, SIZE), np.int32))
    pool.release(rng.permutation(ids))
    return pool


@pytest.mark.parametrize("cached", [False, True], ids=["empty", "evicting"])
@pytest.mark.parametrize("n", [1, 16, 3125])
def test_allocate(per_block, rng, n, cached):
    pool = shuffled_pool(rng, cached=cached)
    ids = pool.allocate(n)
    assert len(set(ids.tolist())) == n
    assert pool.stats().evictions == (n if cached else 0)
    pool.check()

    def fresh():
        if cached and pool.stats().evictable < n:
            pool.__dict__.update(shuffled_pool(rng, cached=True).__dict__)
        elif not cached:
            pool.release(taken[0])
            taken[0] = []

    taken = [ids]

    def run():
        taken[0] = pool.allocate(n)

    per_block(run, n, fresh)


@pytest.mark.parametrize("n", [1, 16, 3125])
def test_release(per_block, rng, n):
    pool = shuffled_pool(rng)
    ids = pool.allocate(n)
    pool.release(ids)
    assert pool.num_free == 65536
    pool.check()
    taken = [ids]

    def fresh():
        taken[0] = pool.allocate(n)

    per_block(lambda: pool.release(taken[0]), n, fresh)


def prompt(rng, n=50_000):
    tokens = rng.integers(0, 150_000, n).astype(np.int32)
    return tokens, block_digests(tokens, SIZE)


@pytest.mark.parametrize("n", [1, 16, 3125])
def test_lookup(per_block, rng, n):
    tokens, names = prompt(rng, n * SIZE)
    pool = shuffled_pool(rng)
    ids = pool.allocate(n)
    pool.register(ids, names, tokens)
    assert np.array_equal(pool.lookup(names, tokens), ids)
    per_block(lambda: pool.lookup(names, tokens), n)


def test_acquire(per_block, rng):
    tokens, names = prompt(rng)
    pool = shuffled_pool(rng)
    ids = pool.allocate(len(names))
    pool.register(ids, names, tokens)
    pool.release(ids)
    pool.acquire(ids)
    assert pool.ref_count(ids).tolist() == [1] * len(ids)
    per_block(lambda: pool.acquire(ids), len(ids), lambda: pool.release(ids))


def test_register(per_block, rng):
    tokens, names = prompt(rng)
    pool = shuffled_pool(rng)
    ids = pool.allocate(len(names))
    assert np.array_equal(pool.register(ids, names, tokens), ids)
    assert np.array_equal(pool.lookup(names, tokens), ids)
    per_block(lambda: pool.register(ids, names, tokens), len(ids), pool.forget)


@pytest.mark.parametrize("form", ["int32", "int64", "list"])
def test_hash_and_lookup(per_block, rng, form):
    """All of a prompt of 50,000 tokens."""
    tokens, names = prompt(rng)
    root = hashlib.sha256(bytes(32) + b"Knumkv" + np.array([1, SIZE], "<u4").tobytes()).digest()
    first = hashlib.sha256(root + b"T" + tokens[:SIZE].astype("<i4").tobytes()).digest()
    assert names[0].tobytes() == first
    pool = shuffled_pool(rng)
    ids = pool.allocate(len(names))
    pool.register(ids, names, tokens)
    given = tokens.tolist() if form == "list" else tokens.astype(form)
    run = lambda: pool.lookup(block_digests(given, SIZE), given)  # noqa: E731
    assert np.array_equal(run(), ids)
    per_block(run, len(ids))


def test_check(per_block, rng):
    pool = shuffled_pool(rng, cached=True)
    pool.check()
    per_block(pool.check, pool.num_blocks)
