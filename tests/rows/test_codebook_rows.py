"""`numkv.rows.code4` and `code6`: rows to codes of a codebook and a scale, against the definition in float64."""

from types import SimpleNamespace

import naive
import numpy as np
import pytest

from numkv.compression.codebook import levels_for
from numkv.rows import code4, code6

F32 = np.float32


def book_of(module, bits, best, error, step):
    """What is to be known of a kind: its functions, its levels, what theory says of them, how many fill whole bytes."""
    name = f"code{bits}"
    functions = {
        x: getattr(module, x.format(name)) for x in ("{}_level", "{}_value", "load_{}", "store_{}")
    }
    return SimpleNamespace(
        name=name, bits=bits, levels=module.LEVELS, edges=module.EDGES, best=best, error=error, step=step,
        signed=np.array([*module.LEVELS, *(-x for x in module.LEVELS)]),
        **{x.replace("_{}", "").replace("{}_", ""): f for x, f in functions.items()},
    )  # fmt: skip


#: The largest level in deviations, the squared error of the best levels (Max, 1960), and how little rounding adds.
BOOKS = {
    4: book_of(code4, 4, 2.733, (0.0095, 1.001), 2),
    6: book_of(code6, 6, 3.7405, (0.000644, 1.029), 8),
}


@pytest.fixture(params=BOOKS.values(), ids=[book.name for book in BOOKS.values()])
def book(request):
    return request.param


def stored(run, book, x):
    """Words and the scale of one row."""
    words, scales = np.full(len(x) * book.bits // 8, 99, np.uint8), np.full(1, 77, F32)
    run(book.store)(x, words, scales)
    return words, scales


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


def test_the_number_of_every_magnitude(run):
    """A search finds the level that is nearest, of two that are as near the larger, below all and above all."""
    number = run(code6._number)
    sizes = np.concatenate([np.arange(0, 130, 0.125), np.nextafter(code6.EDGES, 0), [1e9]]).astype(
        F32
    )
    want = np.searchsorted(np.array(code6.EDGES, F32), sizes, side="right")
    assert [number(size) for size in sizes] == want.tolist()


def test_the_order_of_nibbles(run):
    """Byte j holds elements 2 j, low, and 2 j + 1, high; the fourth bit is the sign."""
    book, codes = BOOKS[4], np.array([7, 0, 15, 1, 2, 10, 3, 3, 12, 5, 6, 14])
    words = assert_there_and_back(run, book, codes)
    assert np.array_equal(words, codes[::2] + 16 * codes[1::2])


def test_the_order_of_sixes(run):
    """Four codes are three bytes, the first code lowest; the sixth bit is the sign."""
    book, codes = BOOKS[6], np.array([31, 0, 63, 1, 2, 42, 3, 17])
    words = assert_there_and_back(run, book, codes)
    for part, unit in zip(codes.reshape(2, 4), words.reshape(2, 3), strict=True):
        assert int.from_bytes(unit.tobytes(), "little") == sum(
            int(code) << 6 * i for i, code in enumerate(part)
        )


def assert_there_and_back(run, book, codes):
    """Rows of levels come back as they were; the words."""
    x = (book.signed[codes] * F32(0.5)).astype(F32)
    words, scales = stored(run, book, x)
    assert scales == 0.5
    out = np.empty(len(codes), F32)
    run(book.load)(words, scales, out)
    assert np.array_equal(out, x)
    return words


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
    assert errors[4096] == pytest.approx(least, rel=0.04)
    assert 0.75 * least < errors[128] < 0.95 * least
    if book.bits > 4:
        return
    x = rng.standard_normal((320, 128)).astype(F32)
    of_int4 = np.mean((naive.int4_dequantise(*naive.int4_quantise(x)) - x) ** 2)
    # A quarter of a bit less, at 6 dB a bit: neither is worth more for its bytes.
    assert errors[128] / of_int4 == pytest.approx(4**0.25, rel=0.06)
