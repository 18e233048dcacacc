"""`numkv.rows.address`: where a token lies."""

import numpy as np
import pytest

from numkv.rows.address import slot_of


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
