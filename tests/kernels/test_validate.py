"""`numkv.kernels.validate`: which lengths and query starts are refused, and why."""

import numpy as np
import pytest

from numkv.kernels.validate import check_lengths

FINE, LENGTH, QUERIES, STARTS = (0, -1), 1, 2, 3


def check(lens, starts, tokens, capacity=10, decode=False):
    return check_lengths(
        np.array(lens, np.int64), np.array(starts, np.int64), tokens, capacity, decode
    )


@pytest.mark.parametrize(
    ("lens", "starts", "tokens", "found"),
    [
        ([3, 5], [0, 3, 5], 5, FINE), ([10], [0, 10], 10, FINE), ([0], [0, 0], 0, FINE), ([], [0], 0, FINE),
        ([3, 5], [1, 3, 5], 5, (STARTS, -1)), ([3, 5], [0, 3, 5], 6, (STARTS, -1)),
        ([9, 5], [0, 6, 5], 5, (STARTS, 1)), ([3, -1], [0, 3, 3], 3, (LENGTH, 1)),
        ([3, 11], [0, 3, 5], 5, (LENGTH, 1)), ([2, 5], [0, 3, 5], 5, (QUERIES, 0)),
        ([0], [0, 1], 1, (QUERIES, 0)), ([0], [0, 2], 2, (QUERIES, 0)),
    ],
)  # fmt: skip
def test_lengths(lens, starts, tokens, found):
    assert check(lens, starts, tokens) == found


def test_one_query_of_a_decode_may_see_nothing():
    """An empty sequence of a batch; two queries of one may not."""
    assert check([3, 0], [0, 1, 2], 2, decode=True) == FINE
    assert check([3, 0], [0, 1, 3], 3, decode=True) == (QUERIES, 1)
