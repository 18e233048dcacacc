"""Which tokens a query sees, beside a list of them for every query."""

import itertools

import numpy as np
import pytest
from numba import njit

from numkv.rows import visible

NO_RANGES = np.empty((0, 2), np.int64)
LENGTH = 7


def plain(name):
    return getattr(visible, name)


def compiled(name):
    function = getattr(visible, name)

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
    functions = (
        f for f in vars(visible).values() if getattr(f, "__module__", "") == visible.__name__
    )
    return {f.__name__: request.param(f.__name__) for f in functions}


def causal_cases():
    """`count` queries whose last one is at the sequence's end or before it, with and without a window."""
    for count, position, window in itertools.product((1, 2, 4), range(-2, LENGTH), (-1, 0, 2, 9)):
        if position + count <= LENGTH:
            seen = [
                [t for t in range(LENGTH) if t <= p and (window < 0 or t >= p - window)]
                for p in range(position, position + count)
            ]
            yield (NO_RANGES, 0, count, position, window), seen


def range_cases():
    """Queries with ranges of their own, some of them empty or beyond the sequence; rows before them are others'."""
    rng = np.random.default_rng(0)
    for count, before in list(itertools.product((1, 2, 3), (0, 2))) * 20:
        ranges = rng.integers(-2, LENGTH + 3, (before + count, 2))
        ranges[:before] = 0, LENGTH
        seen = [[t for t in range(LENGTH) if low <= t < high] for low, high in ranges[before:]]
        yield (ranges, before, count, 5, -1), seen


CASES = [*causal_cases(), *range_cases()]


def tokens(begin, end):
    return set(range(begin, end))


def test_each_query(functions):
    for (ranges, row, count, position, window), seen in CASES:
        for i in range(count):
            found = functions["visible_range"](ranges, row + i, position + i, window, LENGTH)
            assert tokens(*found) == set(seen[i])
            for t in range(LENGTH):
                args = ranges, row + i, position + i, window, t
                assert functions["is_visible"](*args) == (t in seen[i])


def test_any_query(functions):
    for args, seen in CASES:
        found = tokens(*functions["visible_to_any"](*args, LENGTH))
        together = set().union(*seen)
        assert found == (tokens(min(together), max(together) + 1) if together else set())


def test_all_queries(functions):
    for args, seen in CASES:
        found = functions["visible_to_all"](*args, LENGTH)
        assert tokens(*found) == set(range(LENGTH)).intersection(*seen)


def test_who_sees_a_token(functions):
    for args, seen in CASES:
        for t in range(LENGTH):
            first, last = functions["queries_that_see"](*args, t)
            those = [i for i in range(len(seen)) if t in seen[i]]
            if those:
                assert (first, last) == (those[0], those[-1] + 1)
            else:
                assert first >= last


def test_the_window(functions):
    assert [functions["oldest_visible"](5, n) for n in (-1, 0, 2, 5, 9)] == [0, 5, 3, 0, 0]


def test_one_query_with_a_range_goes_by_it(functions):
    """A list of one range is a list: the window and causality say nothing then."""
    ranges = np.array([[2, 4]], np.int64)
    seen = [t for t in range(LENGTH) if functions["is_visible"](ranges, 0, 6, -1, t)]
    assert seen == [2, 3]
