"""`numkv.rows.code6`: where its codes lie, and which they are. What it shares with code4 is in `test_codebook`."""

import numpy as np
from codebooks import BOOKS, F32, assert_there_and_back

from numkv.rows import code6


def test_the_number_of_every_magnitude(run):
    """A search finds the level that is nearest, of two that are as near the larger, below all and above all."""
    number = run(code6._number)
    sizes = np.concatenate([np.arange(0, 130, 0.125), np.nextafter(code6.EDGES, 0), [1e9]]).astype(
        F32
    )
    want = np.searchsorted(np.array(code6.EDGES, F32), sizes, side="right")
    assert [number(size) for size in sizes] == want.tolist()


def test_the_order_of_sixes(run):
    """Four codes are three bytes, the first code lowest; the sixth bit is the sign."""
    book, codes = BOOKS[6], np.array([31, 0, 63, 1, 2, 42, 3, 17])
    words = assert_there_and_back(run, book, codes)
    for part, unit in zip(codes.reshape(2, 4), words.reshape(2, 3), strict=True):
        assert int.from_bytes(unit.tobytes(), "little") == sum(
            int(code) << 6 * i for i, code in enumerate(part)
        )
