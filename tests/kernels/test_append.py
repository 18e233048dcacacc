"""`append_rows` and `scatter_rows`: rows into a pool, by a block table and by slots; `copy_rows`: into a cache."""

import naive
import numpy as np
import operands
import pytest

from numkv import targets

SHAPE, DIM = (6, 2, 3), 34  # blocks, kv heads, tokens of a block
TABLE = np.array([3, 0, 4], np.int32)
KINDS = [*naive.DTYPES, *naive.EVERYWHERE]
#: Rows in the pool's own dtype, float32 rows in every kind, and halves to be quantised.
PAIRS = dict.fromkeys([*((k, k) for k in naive.DTYPES), *(("fp32", k) for k in KINDS)])
PAIRS = [*PAIRS, ("fp16", "int8"), ("bf16", "int4")]
every_pair = pytest.mark.parametrize(("source", "kind"), PAIRS)


def rows_of(rng, source, tokens, dim=DIM):
    return naive.round_to(rng.standard_normal((tokens, SHAPE[1], dim)), source)


def append(target, rows, source, kind, buffer, scale, table, start):
    """Both arrays after `append_rows`, which may be given arrays of the target."""
    where = targets.get(target)
    buffer, scale = where.asarray(buffer), where.asarray(scale)
    where.ops.append_rows(
        where.words(where.asarray(rows)), source, buffer, kind, scale, where.asarray(table), start
    )
    return where.to_host(buffer), where.to_host(scale)


def scatter(target, rows, source, kind, buffer, scale, slots):
    where = targets.get(target)
    buffer, scale = where.asarray(buffer), where.asarray(scale)
    slots = where.asarray(np.array(slots, np.int64))
    where.ops.scatter_rows(where.words(where.asarray(rows)), source, buffer, kind, scale, slots)
    return where.to_host(buffer), where.to_host(scale)


def check(got, want):
    for x, y in zip(got, want, strict=True):
        operands.assert_same(x, y)


@pytest.mark.boundscheck
@every_pair
def test_append_rows(target, rng, source, kind):
    """From the middle of a block on, over three blocks; nothing else changes."""
    rows = rows_of(rng, source, 6)
    made = operands.pool(kind, SHAPE, DIM)
    slots = operands.slots_of(TABLE, 2, 6, SHAPE[2])
    got = append(target, rows, source, kind, *(x.copy() for x in made), TABLE, 2)
    check(got, operands.after(*made, kind, rows, slots))


@pytest.mark.boundscheck
@every_pair
def test_scatter_rows(target, rng, source, kind):
    """-1 skips a row."""
    rows, slots = rows_of(rng, source, 6), [17, -1, 0, 5, -1, 9]
    made = operands.pool(kind, SHAPE, DIM)
    got = scatter(target, rows, source, kind, *(x.copy() for x in made), slots)
    check(got, operands.after(*made, kind, rows, slots))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(target, rng, kind):
    made = operands.pool(kind, SHAPE, DIM)
    rows = rows_of(rng, "fp32", 0)
    check(append(target, rows, "fp32", kind, *(x.copy() for x in made), TABLE, 4), made)
    check(scatter(target, rows, "fp32", kind, *(x.copy() for x in made), []), made)


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("dim", [2, 16, 30, 66])
def test_other_dims(target, rng, kind, dim):
    rows, slots = rows_of(rng, "fp32", 4, dim), [4, 3, 16, 0]
    made = operands.pool(kind, SHAPE, dim)
    got = scatter(target, rows, "fp32", kind, *(x.copy() for x in made), slots)
    check(got, operands.after(*made, kind, rows, slots))


@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_strided_rows_and_pools(target, to, host, rng, kind):
    """Rows are every second token of an array by head; the pool has every second head of a wider one."""
    rows = rows_of(rng, "fp32", 8)
    made = operands.pool(kind, SHAPE, DIM)
    wide = [to(np.repeat(x, 2, axis=1).copy()) for x in made]
    by_head = to(rows.swapaxes(0, 1).copy())
    view = targets.get(target).token_major(by_head)[::2]
    slots = operands.slots_of(TABLE, 1, 4, SHAPE[2])
    append(target, view, "fp32", kind, *(x[:, ::2] if x.size else x for x in wide), TABLE, 1)
    want = operands.after(*made, kind, rows[::2], slots)
    for x, left, right in zip(wide, want, made, strict=True):
        x = host(x)
        operands.assert_same(np.ascontiguousarray(x[:, ::2]), left)
        operands.assert_same(np.ascontiguousarray(x[:, 1::2]), right)


@pytest.mark.parametrize("target", ["cuda"], indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_slots_outside_the_pool_are_skipped(target, rng, kind):
    rows, slots = rows_of(rng, "fp32", 4), [18, 2, -7, 2**40]
    made = operands.pool(kind, SHAPE, DIM)
    got = scatter(target, rows, "fp32", kind, *(x.copy() for x in made), slots)
    check(got, operands.after(*made, kind, rows, [-1, 2, -1, -1]))


@pytest.mark.boundscheck
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 2, 4, 5), (1, 1, 1, 1), (2, 1, 9, 8)])
def test_copy_rows(target, to, host, rng, dtype, shape):
    """Any bits, at any offset; rows outside the cache are skipped."""
    batch, heads, tokens, dim = shape
    size = np.dtype(dtype).itemsize
    new, cache = (
        rng.integers(0, 256, (batch, heads, n, dim * size)).astype(np.uint8).view(dtype)
        for n in (tokens, 7)
    )
    for offsets in ([3, -2, 6], [0, 7, -(2**62)], [5, 2**62, -9]):
        offsets = np.array(offsets[:batch], np.int64)
        there = to(cache.copy())
        targets.get(target).ops.copy_rows(to(new), there, to(offsets))
        want = naive.plan_append(naive.words(new), naive.words(cache), offsets)
        operands.assert_same(host(there), want.view(dtype))
