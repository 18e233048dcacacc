"""`numkv.rows.codes`: codes of a few bits, against one large integer."""

import numpy as np
import pytest
from walked import each

from numkv.rows.codes import code_at, packed_byte, packed_bytes, refined

BITS = range(1, 17)
COUNTS = [1, 2, 7, 8, 13, 64]


def as_bytes(codes, bits):
    """The row of codes as one integer, the first code lowest."""
    whole = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    return whole.to_bytes(-(-len(codes) * bits // 8), "little")


@each("bits", BITS)
@each("count", COUNTS)
def test_codes_there_and_back(run, rng, bits, count):
    """Rows start at a byte of their own, here the third; what lies around them is left out."""
    codes = rng.integers(0, 2**bits, count)
    want = as_bytes(codes, bits)
    around = np.concatenate([[2**bits - 1] * 2, codes, [2**bits - 1] * 2])
    size = run(packed_bytes)(count, bits)
    assert size == len(want)
    got = [run(packed_byte)(around, 2, count, bits, i) for i in range(size)]
    assert bytes(int(byte) for byte in got) == want
    packed = np.frombuffer(b"\xff\xff" + want + b"\xff", np.uint8)
    assert [run(code_at)(packed, 2, bits, i) for i in range(count)] == codes.tolist()


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
def test_a_code_counts_the_edges_that_are_not_above(run, rng, bits):
    edges = np.sort(rng.standard_normal(2**bits - 1)).astype(np.float32)
    numbers = np.concatenate([rng.standard_normal(50).astype(np.float32), edges, [-99, 99]])
    for x in numbers.astype(np.float32):
        code = np.int64(0)
        for bit in reversed(range(bits)):
            code = run(refined)(code, x, edges, bit)
        assert code == np.sum(edges <= x)
