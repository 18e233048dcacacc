"""`numkv.rows.int4`: groups of 32 elements to codes and a scale, against the definition in float64."""

import ml_dtypes
import naive
import numpy as np
import pytest
from quantised_stores import assert_int4_no_worse

from numkv.rows.int4 import (
    GROUP,
    OFFSETS,
    code_at,
    int4_column,
    int4_scale,
    int4_value,
    load_int4,
    lowest_level,
    place_in,
    place_of_0,
    places_in_1,
    store_int4,
    store_int4_group,
)  # fmt: skip

F32 = np.float32
DIMS = [2, 8, 30, 32, 34, 64, 78, 96, 200]


def stored(run, x):
    """Words and words of scales of one row."""
    words, scales = np.zeros(len(x) // 2, np.uint8), np.zeros(-(-len(x) // GROUP), np.uint16)
    run(store_int4)(x, words, scales)
    return words, scales


def test_levels_by_the_last_bits_of_a_scale(run):
    """The first level is -7.5 scales, and up to 1.75 more or less."""
    for k in range(OFFSETS):
        word = np.uint16(0x3F80 + k)
        assert run(lowest_level)(word) == -7.5 + (k - 3.5) / 2


@pytest.mark.parametrize("scale", [F32(2.0**-100), F32(0.375), F32(1), F32(2.0**60)])
def test_a_code_is_that_of_the_nearest_level(run, rng, scale):
    for k in range(OFFSETS):
        lowest = -9.25 + k / 2
        x = (rng.uniform(-14, 12, 100) * scale).astype(F32)
        of_0 = run(place_of_0)(np.uint16(0x3F80 + k))
        in_1 = run(places_in_1)(scale)
        places = np.array([run(place_in)(e, in_1, of_0) for e in x])
        exact = 512 * (x / np.float64(scale) - lowest + 0.5)
        assert np.abs(places - exact).max() <= 1.001
        off = np.abs(x[:, None] / np.float64(scale) - lowest - np.arange(16))
        chosen = [run(code_at)(place) for place in places]
        # A code may be one place further away than the nearest level's: next to the middle of two.
        assert (off[range(100), chosen] <= off.min(axis=1) + 0.004).all()
        clear = np.abs(exact % 512 - 512 * (exact % 512 > 256)) > 1.01
        assert np.array_equal(np.array(chosen)[clear], off.argmin(axis=1)[clear])


def test_what_lies_outside_gets_the_outermost_codes(run):
    assert [run(code_at)(np.int32(x)) for x in (-(2**20), -1, 0, 8191, 8192, 2**20)] == [
        0,
        0,
        0,
        15,
        15,
        15,
    ]


@pytest.mark.parametrize("dim", DIMS)
def test_rows_there_and_back(run, rng, dim):
    """Words of the definition, bit for bit; values within what the scales promise, and exact in float32."""
    for size in (1e-30, 1.0, 65504.0):
        x = (rng.standard_normal(dim) * size).astype(F32)
        words, scales = stored(run, x)
        (want,), (want_scales,) = naive.int4_quantise(x[None])
        assert np.array_equal(words, want)
        assert np.array_equal(scales, naive.words(want_scales))
        values = naive.int4_dequantise(words, scales.view(ml_dtypes.bfloat16))
        assert_int4_no_worse(values, scales.view(ml_dtypes.bfloat16), x)
        out = np.full(dim, np.nan, F32)
        run(load_int4)(words, scales, out)
        assert np.array_equal(out, values)
        assert [run(int4_value)(words, scales, d, dim) for d in range(dim)] == values.tolist()


def test_a_group_in_the_middle_of_a_row(run, rng):
    """It reads and writes its own elements and bytes, and nothing else."""
    x = rng.standard_normal(70).astype(F32)
    x[:5] = x[37:] = np.nan
    words = np.full(40, 99, np.uint8)
    scale = run(store_int4_group)(x, 5, 32, words, 3)
    (want,), (want_scale,) = naive.int4_quantise(x[None, 5:37])
    assert scale == naive.words(want_scale)[0] == run(int4_scale)(x, 5, 32)
    assert np.array_equal(words[3:19], want)
    assert np.all(words[:3] == 99)
    assert np.all(words[19:] == 99)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 31, 33])
def test_a_bad_element_makes_the_scale_of_its_group_nan(run, rng, bad, at):
    x = rng.standard_normal(34).astype(F32)
    x[at] = bad
    _, scales = stored(run, x)
    assert np.isnan(scales.view(ml_dtypes.bfloat16)).tolist() == [at < 32, at >= 32]


@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-37])
def test_tiny_groups_are_zeros(run, size):
    words, scales = stored(run, np.full(34, size, F32))
    assert np.all(scales == 0)
    out = np.ones(34, F32)
    run(load_int4)(words, scales, out)
    assert np.array_equal(out.view(np.uint32), np.zeros(34, np.uint32))  # +0


@pytest.mark.parametrize("dim", DIMS)
def test_every_element_has_its_nibble(run, dim):
    """Lower and upper nibbles name each element once; bytes past the end none."""
    found = [run(int4_column)(byte, upper, dim) for byte in range(dim // 2) for upper in (0, 1)]
    assert sorted(found) == list(range(dim))
    assert run(int4_column)(dim // 2, 0, dim) == dim
    words = np.zeros(dim // 2, np.uint8)
    for byte in range(dim // 2):
        for upper in (0, 1):
            words[:] = 0
            words[byte] = 1 << (4 * upper)
            codes = naive.int4_dequantise(words, np.ones(-(-dim // 32), ml_dtypes.bfloat16))
            d = run(int4_column)(byte, upper, dim)
            assert np.argmax(codes) == d
