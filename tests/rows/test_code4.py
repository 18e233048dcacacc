"""`numkv.rows.code4`: where its codes lie. What it shares with code6 is tested in `test_codebook`."""

import numpy as np
from codebooks import BOOKS, assert_there_and_back


def test_the_order_of_nibbles(run):
    """Byte j holds elements 2 j, low, and 2 j + 1, high; the fourth bit is the sign."""
    book, codes = BOOKS[4], np.array([7, 0, 15, 1, 2, 10, 3, 3, 12, 5, 6, 14])
    words = assert_there_and_back(run, book, codes)
    assert np.array_equal(words, codes[::2] + 16 * codes[1::2])
