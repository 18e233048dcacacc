"""Which sequence an item belongs to, and where its tokens lie, beside plain lists."""

import numpy as np
import pytest
from numba import njit

from numkv.rows import sequences
from numkv.rows.sequences import BY_ITEM, BY_QUERY, WIDTH

ONE = (0, 0, 0, 17, 0, 40, 3)


def plain(name):
    return getattr(sequences, name)


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
