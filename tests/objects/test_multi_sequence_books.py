"""Multi-sequence caches: copies in the middle of a pass, `clear`, and what `check` finds."""

import numpy as np
import pytest
from cell_numbers import CACHES, make, numbers
from pickles import sent

import numkv

F32 = np.float32


def bits(pair, cache, layer=0):
    return [(x.shape, pair.host(x).tobytes()) for x in cache.get(layer)]


@pytest.mark.parametrize("name", CACHES)
def test_a_copy_goes_on_where_the_cache_is(target, to, name):
    """After a removal and a lifted mask too: what `get` shows was fixed before them."""
    pair = make(target, name, sizes=(2, 16, 16), shift=True)
    cache = pair.cache
    assert pair.start_forward([0, 1, 2, 0, 1], [4, 4, 4, 9, 9])
    pair.put(0, *numbers([1, 2, 3, 4, 5]))
    pair.set_causal(0, [1])
    cache.remove(4, 2)
    q = to(np.ones((5, 1, 1), F32))
    want = bits(pair, cache), pair.host(cache.decode_attention(0, q)).tobytes()
    other = cache.copy()
    assert (bits(pair, other), pair.host(other.decode_attention(0, q)).tobytes()) == want
    assert other.sequences == cache.sequences
    assert (other.num_cells, other.num_free) == (cache.num_cells, cache.num_free)
    # Both put and go on, each for itself.
    other.put(0, *map(to, numbers([6, 7, 8, 9, 10])))
    other.remove(9, 0, 1)
    other.start_forward(numkv.Batch([2], [4]))
    assert bits(pair, cache) == want[0]
    assert cache.positions(9).tolist() == [0, 1]
    cache.remove(4, 0)
    assert other.positions(4).tolist() == [0, 1, 2]
    for each in (cache, other):
        each.check()


def test_a_copy_has_scales_of_its_own(target, to, host):
    """Those of layers that were put, and those of layers to come."""
    cache = numkv.CausalCache()
    cache.init("fp8_e4m3", 1, 8, 4, target)
    cache.set_scales(1, 2.0)
    cache.start_forward(numkv.Batch([0], [0]))
    cache.put(0, *map(to, numbers([3])))
    other = cache.copy()
    other.clear()
    other.set_scales(0, 0.5, 0.5)
    other.set_scales(1, 4.0)
    assert host(cache.get(0)[0])[0, 0, 0] == 3
    assert host(cache.arrays(0).k_scale).tolist() == [1]
    for each, scale in ((cache, 2), (other, 4)):
        each.start_forward(numkv.Batch([1], [0]))
        each.put(1, *map(to, numbers([3])))
        assert host(each.arrays(1).k_scale).tolist() == [scale]
        each.check()


def test_a_copy_of_a_reserved_pass(target):
    pair = make(target)
    assert pair.start_forward([0, 1], [0, 0], reserve=True)
    pair.put(0, *numbers([1, 2]))
    other = pair.cache.copy()
    assert bits(pair, other) == bits(pair, pair.cache)
    assert len(other.get(0)[0]) == pair.cache.num_cells


@pytest.mark.parametrize("name", CACHES)
def test_clear(target, to, name):
    """The pass is over, all cells are free, and the lowest are taken first, as at the beginning."""
    pair = make(target, name, sizes=(2, 300, 16))
    cache = pair.cache
    for first in (0, 10):
        cache.start_forward(numkv.Batch(np.arange(first, first + 10), [3] * 10))
        cache.put(0, *map(to, numbers(np.arange(10))))
    cells = cache.jit
    cache.clear()
    cache.check()
    assert (cache.sequences, cache.num_free) == ([], cache.num_cells)
    assert not cells.num_sequences.any()
    with pytest.raises(numkv.NumkvError, match="start_forward"):
        cache.get(0)
    again = make(target, name, sizes=(2, 300, 16))
    for each in (cache, again.cache):
        each.start_forward(numkv.Batch([5, 6, 0], [8, 8, 3]))
        each.put(0, *map(to, numbers([1, 2, 3])))
    assert bits(pair, cache) == bits(pair, again.cache)


def broken(name, target, to):
    """A cache with tokens of two sequences that share some, and a way to spoil its books."""
    cache = numkv.CausalCache()
    cache.init("int8", 2, 16, 8, target)
    cache.start_forward(numkv.Batch([0, 1, 2], [0] * 3))
    cache.put(0, *map(to, numbers([1, 2, 3])))
    cache.copy_prefix(0, 1, 2)
    cache.check()
    cells = cache._cells
    owned = cells._sequences[0].owned
    {
        "positions": lambda: cells.positions.__setitem__(0, 9),
        "negative": lambda: cells.positions.__setitem__(slice(0, 3), -1),
        "owners": lambda: cells.num_sequences.__setitem__(0, 5),
        "free": lambda: cells._vacant.__setitem__(0, 1),
        "twice": lambda: owned.__setitem__(1, 0),
        "outside": lambda: owned.__setitem__(2, 99),
        "lost": lambda: cells._sequences.pop(0),
        "shape": lambda: cache._layers.update({0: cache._layers[0].like(2)}),
        "kind": lambda: setattr(cache, "_v_kind", numkv.kind("fp32")),
    }[name]()
    return cache


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("positions", "of sequence 0 are .* out of order"),
        ("negative", "of sequence 0 are negative"),
        ("owners", "cell 0 is in the lists of 2 sequences, and 5"),
        ("free", "cells are free, and"),
        ("twice", "of sequence 0 names a cell twice"),
        ("outside", "names cells outside"),
        ("lost", "cell 0 is in the lists of 1 sequences, and 2"),
        ("shape", "k of layer 0 has shape"),
        ("kind", "v of layer 0 is of kind int8, the cache of fp32"),
    ],
)
def test_check_finds_what_is_wrong(target, to, name, match):
    cache = broken(name, target, to)
    with pytest.raises(numkv.NumkvError, match=match):
        cache.check()
    wrapper = numkv.WrapperCache(cache)
    wrapper._state = "ready"
    with pytest.raises(numkv.NumkvError, match=match):
        wrapper.check()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_check_finds_scales_of_rows_that_nobody_looked_at(target, to, kind):
    """Only as long as the rows are stored; those of others are none of its business."""
    bad = np.ones((2, 1, 32), F32)
    bad[1, 0, 3] = np.inf
    cache, encoder = numkv.CausalCache(), numkv.EncoderCache()
    for each in (cache, encoder):
        each.init(kind, 1, 8, 4, target)
        each.start_forward(numkv.Batch([0, 1], [0, 0], [0]))
        each.put(0, to(np.ones((2, 1, 32), F32)), to(bad), check_finite=False)
        with pytest.raises(numkv.NumkvError, match="scales of v of layer 0 are not finite"):
            each.check()
    cache.remove(0, 1)
    cache.check()


@pytest.mark.parametrize("wrapped", [False, True])
def test_pickles_in_the_middle_of_a_pass(wrapped):
    """A wrapper's children are one cache with it again."""
    pair = make("cpu", "sliding", sizes=(2, 16, 8))
    cache = pair.cache
    if wrapped:
        cache = numkv.WrapperCache(
            numkv.CausalCache(window_left=1), numkv.CausalCache(), layer_types=[0, 1]
        )
        cache.init("fp32", 2, 16, 8)
    cache.start_forward(numkv.Batch([0, 1, 2], [0] * 3))
    cache.put(0, *numbers([1, 2, 3]))
    other = sent(cache)
    assert bits(pair, other) == bits(pair, cache)
    if wrapped:
        assert all(child._access is other._access for child in other.caches)
    for each in (other, cache):
        each.start_forward(numkv.Batch([3], [0]))
        each.put(0, *numbers([4]))
        each.check()
    assert bits(pair, other) == bits(pair, cache)
    new = sent(numkv.CausalCache())
    new.init("fp32", 1, 4, 4)
    assert new.num_cells == 4
