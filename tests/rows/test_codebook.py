"""`numkv.rows.codebook`: rows to codes of a codebook and a scale, against the definition in float64."""

import naive
import numpy as np
import pytest
from codebooks import BOOKS, stored

from numkv.compression.codebook import levels_for

F32 = np.float32


@pytest.fixture(params=BOOKS.values(), ids=[book.name for book in BOOKS.values()])
def book(request):
    return request.param


def values_of(book, words, scale):
    """What words stand for, in float64."""
    return naive.dequantise(words.view(naive.CODES[book.name]), np.asarray(scale, F32))


def error_of(levels, size):
    """The mean squared error of normal numbers of deviation 1 under levels, their largest at `size`."""
    x = np.linspace(0, 9, 9001)
    weight = np.exp(-x * x / 2)
    levels = np.asarray(levels) * (size / levels[-1])
    near = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
    return np.sum(weight * (x - near) ** 2) / np.sum(weight)


def test_levels_are_the_best_rounding_of_lloyd_and_max(book):
    best = levels_for(4096, book.bits)[2 ** (book.bits - 1) :]
    assert best[-1] * 64 == pytest.approx(book.best, abs=2e-3)
    sizes = np.linspace(book.best - 0.05, book.best + 0.05, 5)
    least = error_of(best, best[-1] * 64)
    assert least == pytest.approx(book.error[0], rel=2e-3)
    rounded = {
        tuple(np.rint(best / best[-1] * top).astype(int)) for top in np.arange(90, 127.5, 0.25)
    }
    errors = {levels: min(error_of(levels, size) for size in sizes) for levels in rounded}
    assert min(errors, key=errors.__getitem__) == book.levels
    assert errors[book.levels] < book.error[1] * least
    assert np.array_equal(book.edges, (np.array(book.levels[1:]) + book.levels[:-1]) / 2)


def test_the_level_of_each_code(run, book):
    assert [run(book.level)(code) for code in range(2**book.bits)] == book.signed.tolist()


@pytest.mark.parametrize("steps", [1, 4, 17, 12, 16])
def test_rows_there_and_back(run, rng, book, steps):
    """Words and scales of the definition, bit for bit; each element is at the level that is nearest."""
    dim = steps * book.step
    for size in (1e-28, 1.0, 65504.0):
        x = (rng.standard_normal(dim) * size).astype(F32)
        x[0] *= 1 if size < 1 else 9
        words, scales = stored(run, book, x)
        (want,), (want_scale,) = naive.quantise(x[None], book.name)
        assert scales[0] == want_scale
        assert np.array_equal(words, want.view(np.uint8))
        values = values_of(book, words, want_scale)
        levels = book.signed * want_scale.astype(np.float64)
        least = np.abs(x[:, None].astype(np.float64) - levels).min(1)
        assert np.all(np.abs(x - values) <= least * (1 + 1e-5))
        out = np.empty(dim, F32)
        run(book.load)(words, scales, out)
        assert np.array_equal(out, values.astype(F32))
        assert [run(book.value)(words, scales, d, dim) for d in range(dim)] == out.tolist()


@pytest.mark.parametrize("size", [0.0, 1e-38, 9e-31])
def test_rows_of_next_to_nothing_are_zeros(run, book, size):
    x = np.array([-size, size, 0, -0.0, 0, 0, 0, size], F32)
    words, scales = stored(run, book, x)
    assert scales[0] == 0
    out = np.empty(8, F32)
    run(book.load)(words, scales, out)
    assert not out.any()
    assert not np.signbit(out).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_lost(run, book, bad):
    x = np.ones(8, F32)
    x[4] = bad
    words, scales = stored(run, book, x)
    assert np.isnan(scales[0])
    assert not words.any()


def test_the_scale_is_the_best_for_its_levels(run, rng, book):
    """No other scale has less error with the levels that the row began with; and none of those tried has less."""
    x = rng.standard_normal(128).astype(F32)
    x[5] = 12  # of rows with outliers, too
    words, scales = stored(run, book, x)
    error, levels = np.sum((values_of(book, words, scales[0]) - x) ** 2), np.array(book.levels)
    for scale in (np.abs(x).max() / levels[-1], np.sqrt(np.mean(x**2)) * book.best / levels[-1]):
        near = naive.nearest_level(np.abs(x) / scale, levels) * scale
        assert error <= np.sum((near - np.abs(x)) ** 2) * 1.001


def test_error_of_normal_rows(rng, book):
    """Of long rows what theory says, of rows of 128 less, as each has a scale of its own; by bytes beside INT4."""
    errors = {}
    for dim in (128, 4096):
        x = rng.standard_normal((40960 // dim, dim)).astype(F32)
        values = naive.dequantise(*naive.quantise(x, book.name))
        errors[dim] = np.mean((values - x) ** 2) / np.mean(x**2)
    least = np.prod(book.error)
    assert errors[4096] == pytest.approx(least, rel=0.08)
    assert 0.75 * least < errors[128] < 0.95 * least
    if book.bits > 4:
        return
    x = rng.standard_normal((320, 128)).astype(F32)
    of_int4 = np.mean((naive.int4_dequantise(*naive.int4_quantise(x)) - x) ** 2)
    # A quarter of a bit less, at 6 dB a bit: neither is worth more for its bytes.
    assert errors[128] / of_int4 == pytest.approx(4**0.25, rel=0.06)
