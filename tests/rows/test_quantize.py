"""`numkv.rows.quantize`: INT8 codes and scales of a row, against float64."""

import naive
import numpy as np
import pytest

from numkv.rows.quantize import (
    finite_row,
    int8_code,
    int8_divisor,
    int8_quotient,
    int8_scale,
    is_finite,
    largest_of,
)  # fmt: skip

F32 = np.float32


@pytest.mark.parametrize("n", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_largest(run, rng, n, dtype):
    x = rng.standard_normal(n).astype(F32).astype(dtype)
    assert run(largest_of)(x) == F32(np.max(np.abs(x)))
    x[n // 2] = -np.inf
    assert run(largest_of)(x) == np.inf


def test_the_largest_leaves_nan_out(run):
    assert run(largest_of)(F32([np.nan, -3, 2, -np.nan])) == 3
    assert run(largest_of)(F32([np.nan])) == 0
    assert run(largest_of)(F32([0.0, -0.0])) == 0
    assert run(largest_of)(F32([])) == 0


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 300.0, 65504.0])
def test_codes_are_within_half_a_scale(run, rng, size):
    x = (rng.uniform(-1, 1, 200) * size).astype(F32)
    scale = run(int8_scale)(run(largest_of)(x))
    assert np.isclose(scale, np.max(np.abs(x.astype(np.float64))) / 127, rtol=1e-7, atol=0)
    divisor = run(int8_divisor)(scale)
    codes = np.array([run(int8_quotient)(e, divisor) for e in x], np.float64)
    assert np.max(np.abs(codes)) == 127
    error = np.abs(codes * np.float64(scale) - x)
    assert np.all(error <= 0.5 * np.float64(scale) * (1 + 1e-6))
    assert [run(int8_code)(e, F32(scale)) for e in x] == codes.tolist()


def test_ties_go_to_the_even_code(run):
    """Every half-way value between two codes, of either sign."""
    halves = np.arange(-126.5, 127).astype(F32)
    codes = np.array([run(int8_code)(e, F32(1)) for e in halves], np.float64)
    assert np.array_equal(codes, np.rint(halves))
    assert np.all(codes % 2 == 0)


def test_codes_never_leave_their_range(run):
    """A quotient may round to a hair above 127; -128 is no code."""
    for x, code in ((127.4, 127), (-127.6, -127), (1e30, 127), (-np.inf, -127)):
        assert run(int8_code)(F32(x), F32(1)) == code


def test_a_scale_of_0_gives_codes_of_0(run):
    assert run(int8_scale)(F32(0)) == 0
    assert run(int8_divisor)(F32(0)) == np.inf
    assert run(int8_divisor)(F32(0.25)) == 0.25
    assert run(int8_code)(F32(-0.0), F32(0)) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_is_finite(run, dtype):
    top = np.finfo(dtype).max
    tiny = np.finfo(dtype).smallest_subnormal
    for x, finite in (
        (0.0, True), (top, True), (-top, True), (tiny, True),
        (np.inf, False), (-np.inf, False), (np.nan, False),
    ):  # fmt: skip
        assert bool(run(is_finite)(dtype(x))) is finite


@pytest.mark.parametrize("kind", ["fp64", "fp32", "fp16", "bf16"])
def test_finite_rows(run, kind):
    """The numbers next to infinity are finite, and those behind it are NaN; in float64 by float32's infinity."""
    largest = 2.0**128 - 2.0**103 if kind == "fp64" else np.inf
    infinity = naive.words(np.array([largest, -largest], naive.DTYPES[kind]))
    row = np.resize(infinity - 1, 70)
    row = row if row.itemsize == 2 else row.view(naive.DTYPES[kind])
    assert run(finite_row(kind))(row)
    for i, bad in (
        (0, infinity[0]),
        (37, infinity[1]),
        (69, infinity[0] + 1),
        (2, infinity[1] + 1),
    ):
        other = row.copy()
        naive.words(other)[i] = bad
        assert not run(finite_row(kind))(other)
