"""`numkv.rows.code6`: where its codes lie, and which they are. What it shares with code4 is in `test_codebook`."""

import numpy as np
from codebooks import BOOKS, assert_there_and_back

from numkv.rows import code6


def test_the_number_of_every_magnitude(run):
    """A search finds the level that is nearest, of two that are as near the larger, below all and above all."""
    number = run(code6._number)
    sizes = np.append(np.arange(16 * 130), 1 << 20)
    want = np.searchsorted(16 * np.array(code6.EDGES), sizes, side="right")
    assert [number(np.int32(size)) for size in sizes] == want.tolist()


def test_the_order_of_sixes(run):
    """Four codes are three bytes, the first code lowest; the sixth bit is the sign."""
    book, codes = BOOKS[6], np.array([31, 0, 63, 1, 2, 42, 3, 17])
    words = assert_there_and_back(run, book, codes)
    for part, unit in zip(codes.reshape(2, 4), words.reshape(2, 3), strict=True):
        assert int.from_bytes(unit.tobytes(), "little") == sum(
            int(code) << 6 * i for i, code in enumerate(part)
        )
