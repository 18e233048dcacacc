"""What a `BlockPool` counts of lookups, one by one."""

import numpy as np

from numkv.blocks import BlockPool
from numkv.blocks.prefix import block_digests


def test_lookups_hits_and_misses():
    pool = BlockPool(8, 2)
    tokens = np.arange(6)
    names = block_digests(tokens, 2)
    assert pool.stats().hit_rate == 0
    ids = pool.allocate(3)
    pool.register(ids[:1], names[:1], tokens[:2])
    assert pool.lookup(names[:1], tokens[:2]).tolist() == ids[:1].tolist()
    seen = pool.stats()
    assert (seen.lookups, seen.hits, seen.misses, seen.hit_rate) == (1, 1, 0, 1)
    assert len(pool.lookup(names, tokens)) == 1
    seen = pool.stats()
    assert (seen.lookups, seen.hits, seen.hit_rate) == (2, 2, 2 / (2 + seen.misses))


def test_lookups_that_others_have_made():
    pool = BlockPool(8, 2)
    pool.count_lookup(5, 2, 1)
    pool.count_lookup(1, 1, 0)
    seen = pool.stats()
    assert (seen.lookups, seen.hits, seen.misses, seen.hit_rate) == (2, 3, 3, 0.5)
