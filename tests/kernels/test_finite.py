"""`first_non_finite`: the first NaN or infinity in rows that are to be quantised."""

import naive
import numpy as np
import pytest

from numkv import targets


def first(target, rows, kind):
    where = targets.get(target)
    return where.ops.first_non_finite(where.words(where.asarray(rows)), kind)


@pytest.mark.boundscheck
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", naive.DTYPES)
def test_where_it_is(target, rng, kind, bad):
    """In order of tokens, heads and elements, whatever comes after."""
    rows = naive.round_to(rng.standard_normal((5, 3, 7)), kind)
    assert first(target, rows, kind) == -1
    for flat in sorted(rng.choice(rows.size, 6, replace=False))[::-1]:
        rows.reshape(-1)[flat] = bad
        assert first(target, rows, kind) == flat


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_the_largest_and_the_smallest_numbers_are_finite(target, kind):
    dtype = naive.DTYPES[kind]
    words = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    infinity = naive.words(np.array([np.inf], dtype))[0]
    ends = np.array([infinity - 1, 1, 0], words).view(dtype)
    rows = np.concatenate([ends, -ends]).reshape(1, 2, 3)
    assert np.all(np.isfinite(rows.astype(np.float64)))
    assert first(target, rows, kind) == -1


@pytest.mark.boundscheck
@pytest.mark.parametrize("dim", [5, 8])
def test_what_float32_does_not_hold_is_infinite(target, dim):
    """Compressors take float64, and quantise it in float32."""
    rows = np.full((2, 1, dim), np.nextafter(2.0**128 - 2.0**103, 0))
    assert first(target, rows, "fp64") == -1
    for number in (2.0**128 - 2.0**103, -1e39, 1e300):
        rows[1, 0, 3] = number
        assert first(target, rows, "fp64") == dim + 3


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4), (3, 2, 0)])
def test_no_rows(target, shape):
    assert first(target, np.zeros(shape, np.float32), "fp32") == -1


@pytest.mark.parametrize("dim", [1, 32, 33, 130])
def test_many_rows(target, rng, dim):
    """The last of more rows than a thread block takes at once."""
    rows = rng.standard_normal((70, 3, dim)).astype(np.float32)
    rows[-1, -1, -1] = np.nan
    assert first(target, rows, "fp32") == rows.size - 1


def test_the_first_of_all_parts(rng, monkeypatch):
    """Each thread looks through a part of the tokens."""
    monkeypatch.setattr("numkv.kernels.cpu.threads.SERIAL_ELEMENTS", 0)
    rows = rng.standard_normal((6, 2, 5)).astype(np.float32)
    for flat in (59, 52, 13, 8):
        rows.reshape(-1)[flat] = np.nan
        assert first("cpu", rows, "fp32") == flat


def test_strided_rows(target, to, rng):
    """Columns of fused projections, say; what lies beside them is not looked at."""
    wide = rng.standard_normal((6, 4, 9)).astype(np.float32)
    wide[:, ::2] = np.nan
    wide[1::2] = np.inf
    where = targets.get(target)
    rows = to(wide)[::2, 1::2]
    assert where.ops.first_non_finite(rows, "fp32") == -1
    wide[4, 3, 8] = -np.inf
    assert where.ops.first_non_finite(to(wide)[::2, 1::2], "fp32") == 3 * 2 * 9 - 1
