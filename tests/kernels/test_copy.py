"""Copies of rows, tokens and blocks: bit for bit."""

import naive
import numpy as np
import pytest

from numkv import targets

HEADS = 2


@pytest.mark.boundscheck
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("dim", [None, 1, 5, 8])
def test_copy_tokens(target, to, host, rng, dtype, dim):
    """Between pools of other block sizes, and within one where what is written was read just before."""
    where = targets.get(target)
    shape = (HEADS, *(() if dim is None else (dim,)))

    def pool(blocks, size):
        tail = (blocks, HEADS, size, *shape[1:])
        raw = rng.integers(0, 256, (*tail, np.dtype(dtype).itemsize)).astype(np.uint8)
        return raw.view(dtype).reshape(tail)

    def by_slot(x):
        return naive.words(np.moveaxis(x, 2, 1).reshape(-1, *shape))

    def copy(source, a, there, b):
        a, b = (where.index(np.array(s), np.int64) for s in (a, b))
        where.ops.copy_tokens(source, a, there, b)

    source, to_pool = pool(4, 5), pool(7, 2)
    here, there = to(source.copy()), to(to_pool.copy())
    a, b = rng.permutation(20)[:9], rng.permutation(14)[:9]
    copy(here, a, there, b)
    want = by_slot(to_pool).copy()
    want[b] = by_slot(source)[a]
    assert np.array_equal(by_slot(host(there)), want)
    assert np.array_equal(naive.words(host(here)), naive.words(source))

    order = rng.permutation(20)  # slots of a sequence, in blocks of one
    kept = np.flatnonzero(rng.random(20) < 0.7)
    kept = np.append(kept[kept > 0], [])  # all of them move
    copy(here, order[kept.astype(int)], here, order[: len(kept)])
    want = by_slot(source).copy()
    want[order[: len(kept)]] = by_slot(source)[order[kept.astype(int)]]
    assert np.array_equal(by_slot(host(here)), want)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("tail", [(), (5,)], ids=["scales", "rows"])
def test_copy_blocks(target, to, host, rng, dtype, tail):
    """Between pools, and within one; blocks may be read twice, and nothing else changes."""
    where = targets.get(target)
    size = np.dtype(dtype).itemsize

    def pool(blocks):
        last = (*tail, 3)[0]  # elements of the last axis
        shape = (blocks, HEADS, 3, *tail) if tail else (blocks, HEADS, 3)
        return rng.integers(0, 256, (*shape[:-1], last * size)).astype(np.uint8).view(dtype)

    def copy(source, ids, there, to_ids):
        ids, to_ids = (where.index(np.array(x), np.int32) for x in (ids, to_ids))
        where.ops.copy_blocks(source, ids, there, to_ids)

    source, other = pool(5), pool(7)
    here, there = to(source.copy()), to(other.copy())
    copy(here, [4, 0, 4], there, [1, 6, 2])
    want = other.copy()
    want[[1, 6, 2]] = source[[4, 0, 4]]
    assert np.array_equal(naive.words(host(there)), naive.words(want))
    assert np.array_equal(naive.words(host(here)), naive.words(source))
    copy(here, [2, 3], here, [0, 1])
    want = source.copy()
    want[[0, 1]] = source[[2, 3]]
    assert np.array_equal(naive.words(host(here)), naive.words(want))


def test_copies_of_nothing(target, to, host, rng):
    where = targets.get(target)
    x = rng.standard_normal((3, HEADS, 2, 4)).astype(np.float32)
    here, none = to(x.copy()), where.index(np.zeros(0, np.int64), np.int64)
    where.ops.copy_tokens(here, none, here, none)
    none = where.index(np.zeros(0, np.int32), np.int32)
    where.ops.copy_blocks(here, none, here, none)
    assert np.array_equal(host(here), x)
