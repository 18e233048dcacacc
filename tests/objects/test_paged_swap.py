"""Sequences that are swapped out and in at the ends of what is allowed."""

import numpy as np
import paged_caches

import numkv


def test_an_empty_sequence_comes_back_empty():
    cache = paged_caches.make(num_blocks=4)
    seq = cache.add()
    swapped = cache.swap_out(seq)
    assert swapped.length == 0
    back = cache.swap_in(swapped)
    assert cache.length(back) == 0
    cache.check()
    assert cache.num_free == 4
    paged_caches.grow(cache, np.asarray, back, [1, 2, 3])
    assert cache.length(back) == 3
    assert isinstance(swapped, numkv.SwappedSequence)
