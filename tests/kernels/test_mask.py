"""`fill_mask`: what the queries of several sequences see; a row's arithmetic is `tests/rows/test_mask.py`'s."""

import naive
import numpy as np
import pytest

from numkv import targets
from numkv.rows import mask

NO_RANGES, NO_BITS = np.empty((0, 2), np.int64), np.empty((0, 2), np.uint32)


def fill(
    target,
    lens,
    starts,
    columns,
    *,
    ranges=NO_RANGES,
    bits=NO_BITS,
    causal=1,
    window=-1,
    capacity=99,
    heads=(),
):
    """Rows and numbers of heads; `heads` are sinks and slopes."""
    where = targets.get(target)
    sinks, slopes = (np.asarray(x, np.float32) for x in heads or ((), ()))
    rows = where.asarray(np.full((int(starts[-1]), columns), -7, np.int64))
    made = where.asarray(np.full(2 * len(slopes), 5, np.float32))
    arrays = [where.asarray(np.asarray(x)) for x in (lens, starts, ranges, bits)]
    of_heads = where.asarray(sinks), where.asarray(slopes)
    where.ops.fill_mask(*arrays, causal, window, 0, capacity, *of_heads, rows, made)
    return where.to_host(rows), where.to_host(made)


LENS, STARTS = np.array([7, 3, 40, 0]), np.array([0, 3, 3, 20, 22])


@pytest.mark.boundscheck
@pytest.mark.parametrize("causal", [0, 1])
def test_each_sequence_by_its_own_length(target, causal):
    rows, _ = fill(target, LENS, STARTS, 2, causal=causal, window=5)
    for s, n in enumerate(LENS):
        tokens = STARTS[s + 1] - STARTS[s]
        for i in range(tokens):
            want, _ = naive.seen_tokens(i, tokens, n, causal=bool(causal), window_left=5)
            assert list(range(*rows[STARTS[s] + i])) == want.tolist()


@pytest.mark.boundscheck
def test_trees_side_by_side(target, rng):
    starts = np.array([0, 3, 3, 20])
    parents = np.concatenate([[rng.integers(-1, i) for i in range(n)] for n in (3, 0, 17)])
    bits = naive.packed_bits(parents.astype(int), starts, 1)
    rows, _ = fill(target, LENS[:3], starts, mask.COLUMNS + 1, bits=bits)
    np.testing.assert_array_equal(rows[:, mask.COLUMNS], bits[:, 0])
    np.testing.assert_array_equal(rows[:, mask.PLAIN_END], [4] * 3 + [23] * 17)


def test_lengths_beyond_the_room_are_cut(target):
    """The host of CUDA has not seen them."""
    rows, _ = fill(target, [50], [0, 2], 2, causal=0, capacity=9)
    assert rows.tolist() == [[0, 9], [0, 9]]


@pytest.mark.parametrize("sinks", [(), (1.5, -np.inf)])
def test_slopes_follow_sinks(target, sinks):
    _, made = fill(target, [4], [0, 1], mask.COLUMNS, heads=(sinks, (0.5, 0.25)))
    assert made.tolist() == [*(sinks or (-np.inf, -np.inf)), 0.5, 0.25]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ranges_of_both_widths(target, dtype):
    if target == "cpu" and dtype == np.int32:
        pytest.skip("widened before")
    ranges = np.array([[1, 3], [-5, 100]], dtype)
    rows, _ = fill(target, [4], [0, 2], 2, ranges=ranges)
    assert rows.tolist() == [[1, 3], [0, 4]]
