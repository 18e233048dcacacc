"""8-bit floats: every word, and float32 in and out of range, against ml_dtypes."""

import ml_dtypes
import numba
import numpy as np
import pytest

import numkv
from numkv.rows.convert import codec

DTYPES = {
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
WORDS = np.arange(256, dtype=np.uint8)


def by_python(function, x, out):
    """As the simulator runs it."""
    for i in range(len(x)):
        out[i] = function(x[i])


def compiled(function, x, out):
    @numba.njit
    def loop(x, out):
        for i in range(len(x)):
            out[i] = function(x[i])

    loop(x, out)


def expected_words(x, name):
    """What ml_dtypes makes of `x` clamped to the range, with one word for all NaNs of a sign."""
    largest = np.float32(LARGEST[name])
    with np.errstate(invalid="ignore"):
        return np.clip(x, -largest, largest).astype(DTYPES[name]).view(np.uint8)


def floats(name):
    """All halves, all bfloat16s, all values, what lies between two values, and the float32s beside those."""
    dtype = DTYPES[name]
    halves = np.arange(1 << 16, dtype=np.uint16)
    values = WORDS.view(dtype).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / 2
    quarters = (values[1:] + ties) / 2
    edges = np.concatenate(
        [values, ties, quarters, np.float32([LARGEST[name] * 17 / 16, 1e-45, 3e38])]
    )
    near = [np.nextafter(edges, np.float32(side)) for side in (-np.inf, np.inf)]
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    return np.concatenate(
        [
            halves.view(np.float16).astype(np.float32), halves.view(ml_dtypes.bfloat16).astype(np.float32),
            edges, -edges, *near, drawn.view(np.float32), np.float32([np.inf, -np.inf, np.nan, -np.nan]),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("run", [by_python, pytest.param(compiled, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("name", DTYPES)
def test_every_word_has_the_value_of_ml_dtypes(name, compute, run):
    load, _ = codec(name, compute)
    found = np.empty(256, compute)
    run(load, WORDS, found)
    expected = WORDS.view(DTYPES[name]).astype(compute)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("name", DTYPES)
def test_floats_become_the_words_of_ml_dtypes(name):
    _, store = codec(name)
    x = floats(name)
    found = np.empty(len(x), np.uint8)
    compiled(store, x, found)
    np.testing.assert_array_equal(found, expected_words(x, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
def test_python_and_compiled_code_store_the_same_words(name):
    _, store = codec(name)
    x = floats(name)[::23]
    found, by_machine = np.empty(len(x), np.uint8), np.empty(len(x), np.uint8)
    with np.errstate(all="ignore"):
        by_python(store, x, found)
    compiled(store, x, by_machine)
    np.testing.assert_array_equal(found, by_machine)


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_too_large_is_clamped_and_nan_stays(name):
    _, store = codec(name)
    x = np.float32([np.inf, -np.inf, 1e6, -1e6, np.nan])
    words = np.array([store(value) for value in x], np.uint8)
    top = LARGEST[name]
    np.testing.assert_array_equal(
        words.view(DTYPES[name]).astype(np.float32), np.float32([top, -top, top, -top, np.nan])
    )


@pytest.mark.parametrize("name", DTYPES)
def test_words_come_back_as_they_were(name):
    load, store = codec(name)
    finite = np.isfinite(WORDS.view(DTYPES[name]).astype(np.float32))
    again = np.array([store(load(word)) for word in WORDS[finite]], np.uint8)
    np.testing.assert_array_equal(again, WORDS[finite])


@pytest.mark.parametrize("name", DTYPES)
def test_the_kind_says_how_it_lies(name):
    kind = numkv.kind(name)
    assert kind.dtype == DTYPES[name]
    assert kind.word == np.uint8
    assert kind.bytes_per_element == 1
    assert kind.bytes_per_token(8, 128) == 2048
    assert not kind.has_scales
    assert kind.is_float
    assert kind.is_scaled
    assert not kind.is_query
    assert kind.scale_shape((3, 2, 5), 66) == (2,)
    assert kind.scale_dtype == np.float32
