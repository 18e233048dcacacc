"""`numkv.rows.code4`: rows to codes of a codebook and a scale, against the definition in float64."""

import naive
import numpy as np
import pytest

from numkv.compression.codebook import levels_for
from numkv.rows.code4 import (
    EDGES,
    LEVELS,
    code4_level,
    code4_value,
    load_code4,
    store_code4,
)  # fmt: skip

F32 = np.float32
SIGNED = np.array([*LEVELS, *(-x for x in LEVELS)])


def stored(run, x):
    """Words and the scale of one row."""
    words, scales = np.full(len(x) // 2, 99, np.uint8), np.full(1, 77, F32)
    run(store_code4)(x, words, scales)
    return words, scales


def error_of(levels, size):
    """The mean squared error of normal numbers of deviation 1 under levels, their largest at `size`."""
    x = np.linspace(0, 9, 9001)
    weight = np.exp(-x * x / 2)
    levels = np.asarray(levels) * (size / levels[-1])
    near = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
    return np.sum(weight * (x - near) ** 2) / np.sum(weight)


def test_levels_are_the_best_rounding_of_lloyd_and_max():
    best = levels_for(4096, 4)[8:]
    sizes = np.linspace(2.7, 2.8, 11)
    least = error_of(best, best[-1] * 64)
    assert least == pytest.approx(0.0095, abs=1e-5)
    rounded = {
        tuple(np.rint(best / best[-1] * top).astype(int)) for top in np.arange(90, 127.5, 0.25)
    }
    errors = {levels: min(error_of(levels, size) for size in sizes) for levels in rounded}
    assert min(errors, key=errors.__getitem__) == LEVELS
    assert errors[LEVELS] < 1.001 * least
    assert np.array_equal(EDGES, (np.array(LEVELS[1:]) + LEVELS[:-1]) / 2)


def test_the_level_of_each_code(run):
    assert [run(code4_level)(code) for code in range(16)] == SIGNED.tolist()


def test_the_order_of_nibbles(run):
    """Byte j holds elements 2 j, low, and 2 j + 1, high; the fourth bit is the sign."""
    codes = np.array([7, 0, 15, 1, 2, 10, 3, 3, 12, 5, 6, 14])
    x = (SIGNED[codes] * F32(0.5)).astype(F32)
    words, scales = stored(run, x)
    assert scales == 0.5
    assert np.array_equal(words, codes[::2] + 16 * codes[1::2])
    out = np.empty(12, F32)
    run(load_code4)(words, scales, out)
    assert np.array_equal(out, x)


@pytest.mark.parametrize("dim", [2, 8, 34, 96, 128])
def test_rows_there_and_back(run, rng, dim):
    """Words and scales of the definition, bit for bit; each element is at the level that is nearest."""
    for size in (1e-28, 1.0, 65504.0):
        x = (rng.standard_normal(dim) * size).astype(F32)
        x[0] *= 1 if size < 1 else 9
        words, scales = stored(run, x)
        (want,), (want_scale,) = naive.code4_quantise(x[None])
        assert scales[0] == want_scale
        assert np.array_equal(words, want)
        values = naive.code4_dequantise(words, want_scale)
        levels = SIGNED * want_scale.astype(np.float64)
        least = np.abs(x[:, None].astype(np.float64) - levels).min(1)
        assert np.all(np.abs(x - values) <= least * (1 + 1e-5))
        out = np.empty(dim, F32)
        run(load_code4)(words, scales, out)
        assert np.array_equal(out, values.astype(F32))
        assert [run(code4_value)(words, scales, d, dim) for d in range(dim)] == out.tolist()


@pytest.mark.parametrize("size", [0.0, 1e-38, 9e-31])
def test_rows_of_next_to_nothing_are_zeros(run, size):
    x = np.array([-size, size, 0, -0.0], F32)
    words, scales = stored(run, x)
    assert scales[0] == 0
    out = np.empty(4, F32)
    run(load_code4)(words, scales, out)
    assert not out.any()
    assert not np.signbit(out).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_lost(run, bad):
    x = np.ones(6, F32)
    x[4] = bad
    words, scales = stored(run, x)
    assert np.isnan(scales[0])
    assert not words.any()


def test_the_scale_is_the_best_for_its_levels(run, rng):
    """No other scale has less error with the levels that the row began with; and none of those tried has less."""
    x = rng.standard_normal(128).astype(F32)
    x[5] = 12  # of rows with outliers, too
    words, scales = stored(run, x)
    error = np.sum((naive.code4_dequantise(words, scales[0]) - x) ** 2)
    for scale in (np.abs(x).max() / 104, np.sqrt(np.mean(x**2)) * 2.733 / 104):
        near = naive.code4_level(np.abs(x) / scale) * scale
        assert error <= np.sum((near - np.abs(x)) ** 2) * 1.001


def test_error_of_normal_rows(rng):
    """Of long rows what theory says, of rows of 128 less, as each has a scale of its own; by bytes beside INT4."""
    errors = {}
    for dim in (128, 4096):
        x = rng.standard_normal((40960 // dim, dim)).astype(F32)
        errors[dim] = np.mean(
            (naive.code4_dequantise(*naive.code4_quantise(x)) - x) ** 2
        ) / np.mean(x**2)
    assert errors[4096] == pytest.approx(0.0095, rel=0.03)
    assert 0.0080 < errors[128] < 0.0090
    x = rng.standard_normal((320, 128)).astype(F32)
    of_int4 = np.mean((naive.int4_dequantise(*naive.int4_quantise(x)) - x) ** 2)
    # A quarter of a bit less, at 6 dB a bit: neither is worth more for its bytes.
    assert errors[128] / of_int4 == pytest.approx(4**0.25, rel=0.06)
