"""`numkv.rows.convert`: words of 16 bits, against NumPy and ml_dtypes, bit for bit."""

import ml_dtypes
import numba
import numpy as np
import pytest

from numkv.rows import convert

DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
FLOATS = {"fp64": np.dtype(np.float64), "fp32": np.dtype(np.float32), **DTYPES}
LOAD = {"fp16": convert.fp16_to_float32, "bf16": convert.bf16_to_float32}
STORE = {"fp16": convert.float32_to_fp16, "bf16": convert.float32_to_bf16}


def each(run, function, x, dtype):
    """A row function of one element, over an array."""
    function = run(function)
    if not isinstance(function, numba.core.dispatcher.Dispatcher):
        return np.array([function(e) for e in x], dtype)
    out = np.empty(len(x), dtype)
    for i, e in enumerate(x):
        out[i] = function(e)
    return out


def some_words(rng):
    """The ends of every exponent, and 2000 words at random."""
    edges = np.arange(0, 2**16, 128)
    near = np.concatenate([edges, edges + 1, edges + 127])
    return np.concatenate([near, rng.integers(0, 2**16, 2000)]).astype(np.uint16)


def some_floats(rng, dtype):
    """Any bits; values of the format, half-way between two of them, and a hair off; what lies at its ends."""
    words = some_words(rng)
    values = words.view(dtype).astype(np.float32)
    following = (words + np.uint16(1)).view(dtype).astype(np.float32)
    halves = (values.astype(np.float64) + following) / 2
    halves = halves.astype(np.float32)
    near = [np.nextafter(halves, np.float32(np.inf)), np.nextafter(halves, np.float32(-np.inf))]
    anything = rng.integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    ends = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 3.4e38, 1e-45])
    return np.concatenate([values, halves, *near, anything, ends])


def assert_same_floats(got, want):
    """The same bits; a NaN for a NaN."""
    nan = np.isnan(want.astype(np.float64))
    assert np.array_equal(np.isnan(got.astype(np.float64)), nan)
    assert np.array_equal(got[~nan].view(np.uint8), want[~nan].view(np.uint8))


@pytest.mark.parametrize("kind", DTYPES)
def test_load(run, rng, kind):
    words = some_words(rng)
    got = each(run, LOAD[kind], words, np.float32)
    assert_same_floats(got, words.view(DTYPES[kind]).astype(np.float32))


@pytest.mark.parametrize("kind", DTYPES)
def test_every_word_is_loaded_and_stored_again(kind):
    """Compiled, all 65,536 of them."""
    load, store = numba.njit(LOAD[kind]), numba.njit(STORE[kind])

    @numba.njit
    def there_and_back(words, values, again):
        for i in range(len(words)):
            values[i] = load(words[i])
            again[i] = store(values[i])

    words = np.arange(2**16).astype(np.uint16)
    values, again = np.empty(2**16, np.float32), np.empty(2**16, np.uint16)
    there_and_back(words, values, again)
    assert_same_floats(values, words.view(DTYPES[kind]).astype(np.float32))
    assert_same_floats(again.view(DTYPES[kind]), words.view(DTYPES[kind]))


@pytest.mark.parametrize("kind", DTYPES)
def test_store_rounds_to_nearest_even(run, rng, kind):
    x = some_floats(rng, DTYPES[kind])
    got = each(run, STORE[kind], x, np.uint16)
    assert_same_floats(got.view(DTYPES[kind]), x.astype(DTYPES[kind]))


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("kind", FLOATS)
def test_codec(run, rng, kind, compute):
    """What a kernel of a kind and a computing dtype loads and stores; float64 is rounded by way of float32."""
    load, store = convert.codec(kind, compute)
    values = rng.standard_normal(40).astype(FLOATS[kind])
    words = values.view(np.uint16) if kind in DTYPES else values
    assert_same_floats(each(run, load, words, compute), values.astype(compute))
    x = rng.standard_normal(40).astype(compute)
    want = x if kind == "fp64" else x.astype(np.float32)
    got = each(run, store, x, words.dtype)
    assert_same_floats(got.view(FLOATS[kind]), want.astype(FLOATS[kind]))
