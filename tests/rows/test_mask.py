"""Rows of masks: what a query sees, and where tokens stand by its path, beside sets of ancestors."""

import naive
import numpy as np
import pytest
from numba import njit
from walked import each

from numkv.rows import mask

NOTHING = {"ranges": np.empty((0, 2), np.int64), "bits": np.empty((0, 0), np.uint32)}
FUNCTIONS = ("fill_row", "is_seen", "position_of", "has_bit", "bits_below")


def compiled(name):
    function = getattr(mask, name)

    @njit
    def call(*args):
        return function(*args)

    return call


@pytest.fixture(params=["plain", pytest.param("compiled", marks=pytest.mark.slow)], scope="module")
def rows_of(request):
    """The functions, as Python or compiled."""
    found = {n: compiled(n) if request.param == "compiled" else getattr(mask, n) for n in FUNCTIONS}
    return type("Functions", (), {n: staticmethod(f) for n, f in found.items()})


@pytest.mark.parametrize("window", [-1, 0, 1, 4, 100])
@pytest.mark.parametrize(("tokens", "length"), [(5, 5), (33, 40), (70, 71), (1, 9)])
def test_trees(rows_of, rng, tokens, length, window):
    """Tokens and distances are those of the path alone."""
    parents = np.array([rng.integers(-1, i) if i % 9 else i - 1 for i in range(tokens)])
    words = -(-tokens // 32) + 1
    bits = naive.packed_bits(parents, [0, tokens], words)
    bits[:, -1] = 0xFFFFFFFF  # past the newest tokens: not looked at
    made = np.empty((tokens, mask.COLUMNS + words), np.int64)
    for i in range(tokens):
        rows_of.fill_row(made, i, i, tokens, length, 1, window, 0, NOTHING["ranges"], bits)
        want, far = naive.seen_tokens(i, tokens, length, window_left=window, parents=parents)
        begin, end = made[i, mask.BEGIN], made[i, mask.END]
        assert 0 <= begin <= end <= length
        assert made[i, mask.PLAIN_END] == length - tokens
        seen = [t for t in range(begin, end) if rows_of.is_seen(made, i, t)]
        assert seen == want.tolist()
        position = made[i, mask.POSITION]
        assert [position - rows_of.position_of(made, i, t) for t in seen] == far.tolist()


@pytest.mark.parametrize(("tokens", "length"), [(1, 0), (40, 0), (5, 2), (40, 33)])
def test_bits_of_tokens_that_are_not_there(rows_of, tokens, length):
    """Nobody has looked at lengths on CUDA, nor whether rows have a bit for each query."""
    for window in (-1, 0, 3):
        made = np.empty((tokens, mask.COLUMNS + 1), np.int64)
        bits = np.full((tokens, 1), 0xFFFFFFFF, np.uint32)
        for i in range(tokens):
            rows_of.fill_row(made, i, i, tokens, length, 1, window, 0, NOTHING["ranges"], bits)
        assert (made[:, mask.BEGIN] >= 0).all()
        assert (made[:, mask.END] <= length).all()


@each("causal", [0, 1])
@each("window", [-1, 0, 3])
@each("tokens, length", [(3, 7), (5, 5), (6, 2), (2, 0)])
def test_without_bits(rows_of, causal, window, tokens, length):
    for columns in (2, mask.COLUMNS):
        made = np.empty((tokens, columns), np.int64)
        for i in range(tokens):
            rows_of.fill_row(made, i, i, tokens, length, causal, window, 0, *NOTHING.values())
            want, _ = naive.seen_tokens(i, tokens, length, causal=bool(causal), window_left=window)
            assert list(range(*made[i, :2])) == want.tolist()
            assert made[i, 1] <= length
            if columns > 2:
                assert made[i, 2:].tolist() == [made[i, mask.END], length - tokens + i]


@pytest.mark.parametrize(
    "span", [(0, 7), (-(2**63), 2**63 - 1), (3, 3), (5, 2), (6, 9), (-4, -1), (2**40, 2**41)]
)
def test_ranges_end_where_the_sequence_does(rows_of, span):
    made = np.empty((1, 2), np.int64)
    rows_of.fill_row(made, 0, 0, 1, 7, 1, -1, 0, np.array([span], np.int64), NOTHING["bits"])
    assert list(range(*made[0])) == list(range(max(0, span[0]), min(7, span[1])))


def test_bits_are_counted(rows_of, rng):
    bits = rng.integers(0, 2**32, (4, 3)).astype(np.uint32)
    for r in range(4):
        of_row = np.unpackbits(bits[r].view(np.uint8), bitorder="little")
        for j in range(96):
            assert rows_of.bits_below(bits, r, 0, j) == of_row[:j].sum()
    rows = np.concatenate([np.zeros((4, mask.COLUMNS), np.int64), bits.astype(np.int64)], axis=1)
    assert [rows_of.has_bit(rows, 0, j) for j in range(96)] == np.unpackbits(
        bits[0].view(np.uint8), bitorder="little"
    ).astype(bool).tolist()
