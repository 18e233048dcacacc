"""`numkv.rows.address`: where a token lies, and which sequence an item belongs to, beside plain lists."""

import numpy as np
import pytest
from numba import njit

from numkv.rows import address
from numkv.rows.address import BY_ITEM, BY_QUERY, WIDTH, slot_of


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_slots_are_those_of_a_flat_pool(run, rng, block_size, dtype):
    """A pool of which every element is its own slot number, gathered by the table."""
    table = rng.permutation(20)[:5].astype(dtype)
    flat = np.arange(20 * block_size).reshape(20, block_size)[table].reshape(-1)
    got = [run(slot_of)(table, position, block_size) for position in range(5 * block_size)]
    assert got == flat.tolist()


def test_slots_need_more_than_32_bits(run):
    table = np.array([2**31 - 1], np.int32)
    assert run(slot_of)(table, 255, 256) == (2**31 - 1) * 256 + 255


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_positions_of_any_integer_type(run, dtype):
    assert run(slot_of)(np.array([7, 4], np.int32), dtype(5), dtype(4)) == 17


ONE = (0, 0, 0, 17, 0, 40, 3)


def plain(name):
    return getattr(address, name)


def compiled(name):
    function = plain(name)

    @njit
    def call(*args):
        return function(*args)

    return call


@pytest.fixture(
    params=[plain, pytest.param(compiled, marks=pytest.mark.slow)],
    ids=["plain", "compiled"],
    scope="module",
)
def functions(request):
    return request.param("sequence_at"), request.param("slot_at")


@pytest.mark.parametrize("items", [[4], [1, 1, 1], [3, 0, 0, 5, 1, 0, 2], [0, 2]], ids=str)
def test_the_sequence_of_each_item_and_query(functions, items):
    """Sequences without any are passed over; the others are found from their first item to their last."""
    sequence_at, _ = functions
    queries = items[::-1]
    numbers = np.zeros((len(items), WIDTH), np.int64)
    numbers[:, BY_ITEM] = np.cumsum([0, *items[:-1]])
    numbers[:, BY_QUERY] = np.cumsum([0, *queries[:-1]])
    numbers[:, 3] = np.arange(len(items)) + 100
    plan = numbers.reshape(-1)
    for by, counts in ((BY_ITEM, items), (BY_QUERY, queries)):
        owners = [s for s, count in enumerate(counts) for _ in range(count)]
        for number, owner in enumerate(owners):
            found = sequence_at(plan, len(items), ONE, by, number)
            assert found == tuple(numbers[owner].tolist())


def test_tokens_of_blocks(functions):
    _, slot_at = functions
    tables, size = [[5, 2], [], [9, 0, 4]], 4
    plan = np.array([7] * (3 * WIDTH) + [block for table in tables for block in table], np.int64)
    at = 3 * WIDTH
    for table in tables:
        expected = [block * size + i for block in table for i in range(size)]
        assert [slot_at(plan, at, size, t) for t in range(len(expected))] == expected
        at += len(table)


def test_one_sequence_needs_no_plan(functions):
    sequence_at, slot_at = functions
    nothing = np.empty(0, np.int64)
    assert sequence_at(nothing, 1, ONE, BY_ITEM, 3) == ONE
    assert [slot_at(nothing, 17, 1, t) for t in (0, 5)] == [17, 22]
