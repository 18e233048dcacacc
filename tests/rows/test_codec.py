"""A row of every kind by the same calls: store, load, one element; in Python, as in the simulator, and compiled."""

import functools

import ml_dtypes
import numba
import numpy as np
import pytest

import numkv
from numkv.kinds import kinds
from numkv.rows import codec
from numkv.rows.codec import scales_at

NAMES = [kind.name for kind in kinds()]
BITS = {"fp64": 52, "fp32": 23, "fp16": 10, "bf16": 7, "fp8_e4m3": 3, "fp8_e5m2": 2}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


# All tests and sizes of rows go through the same machine code.
row_codec, element_codec = map(functools.cache, (codec.row_codec, codec.element_codec))


@functools.cache
def compiled(function):
    @numba.njit
    def call(*args):
        return function(*args)

    return call


def as_it_is(function):
    return function


#: By day rows are compiled as parts of the kernels of `tests/kernels`.
RUNS = [as_it_is, pytest.param(compiled, marks=pytest.mark.slow)]


def dim_for(name, dim):
    """As many elements as a row of a kind can have, no fewer than `dim`."""
    unit = numkv.kind(name).unit[0]
    return -(-dim // unit) * unit


def row_of(name, dim, scale=1.0):
    """Empty words and scales of one row."""
    kind = numkv.kind(name)
    scales = np.zeros(kind.scales_per_row(dim), kind.scale_word)
    if kind.scales_per == "head":
        scales = np.full(1, scale, np.float32)
    return np.zeros(kind.words_per_row(dim), kind.word), scales


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dim", [2, 32, 66])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_comes_back_as_exactly_as_its_kind_can_say_it(name, dim, run):
    dim = dim_for(name, dim)
    x = np.random.default_rng(dim).standard_normal(dim).astype(np.float32)
    words, scales = row_of(name, dim)
    store, load = row_codec(name)
    run(store)(x, words, scales)
    found = np.empty(dim, np.float32)
    run(load)(words, scales, found)
    if name in BITS:
        bound = abs(x) * 2.0 ** -(BITS[name] + 1) + 2.0**-10
    else:
        bound = (
            abs(x).max()
            * {"int8": 0.5 / 127, "int4": 1 / 7, "code4": 1 / 5, "code6": 1 / 9}[name]
            * 1.0001
        )
    assert np.all(abs(found - x) <= bound)
    value = run(element_codec(name)[0])
    np.testing.assert_array_equal([value(words, scales, d, dim) for d in range(dim)], found)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_stores_the_same_words(name):
    dim = dim_for(name, 66)
    x = np.random.default_rng(0).standard_normal(dim).astype(np.float32)
    rows = [row_of(name, dim, 0.3) for _ in range(2)]
    store, load = row_codec(name)
    found = np.empty((2, dim), np.float32)
    for run, (words, scales), out in zip((as_it_is, compiled), rows, found, strict=True):
        run(store)(x, words, scales)
        run(load)(words, scales, out)
    for of_python, of_machine in zip(*rows, strict=True):
        np.testing.assert_array_equal(of_python, of_machine)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("name", DTYPES)
def test_elements_are_divided_by_the_scale_of_their_head_and_clamped(name, compute):
    x = np.array([0.1, -3.0, 1e6, -np.inf, np.nan, 0.0], compute)
    words, scales = row_of(name, 6, 0.25)
    store, load = row_codec(name, compute)
    store(x, words, scales)
    top = LARGEST[name]
    expected = (
        np.clip(x / np.array(0.25, compute), -top, top).astype(np.float32).astype(DTYPES[name])
    )
    np.testing.assert_array_equal(words, expected.view(np.uint8))
    found = np.empty(6, compute)
    load(words, scales, found)
    np.testing.assert_array_equal(found, expected.astype(compute) * np.array(0.25, compute))
    assert scales[0] == np.float32(0.25)


def test_the_first_groups_of_a_row_may_be_stored_alone():
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    store, load = row_codec("int4")
    words, scales = row_of("int4", 96)
    store(x, words, scales)
    first_words, first_scales = row_of("int4", 96)
    store(x[:64], first_words, first_scales)
    np.testing.assert_array_equal(first_words[:32], words[:32])
    np.testing.assert_array_equal(first_scales[:2], scales[:2])
    assert not first_words[32:].any()
    assert first_scales[2] == 0
    found, part = np.empty(96, np.float32), np.empty(64, np.float32)
    load(words, scales, found)
    load(words, scales, part)
    np.testing.assert_array_equal(part, found[:64])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_the_scales_of_a_row_are_found_by_its_place(name, run):
    kind = numkv.kind(name)
    shape = kind.scale_shape((3, 2, 5), 66)
    scale = np.arange(np.prod(shape, dtype=int), dtype=kind.scale_word).reshape(shape)
    found = run(scales_at(kind.scales_per))(scale, 2, 1, 3)
    if kind.scales_per == "none":
        expected = scale
    elif kind.scales_per == "head":
        expected = scale[1:2]
    else:
        expected = np.atleast_1d(scale[2, 1, 3])
    np.testing.assert_array_equal(found, expected)
    if kind.is_scaled:
        assert len(found) == max(1, kind.scales_per_row(66))
        assert np.shares_memory(found, scale)
