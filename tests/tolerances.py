"""Largest errors against the oracle: one table, by operation and dtype.

=================  ==========================================================================
moves and copies   exact, bit for bit
attention rows     relative L2 error of each output row: the accumulator's, or the output
                   dtype's own rounding where that is larger
lse                absolute, per unit of ``max(1, |lse|)``; stored as float32
rotated rows       per element, relative to the row's largest: arithmetic, then one rounding
=================  ==========================================================================
"""

import numpy as np

# A matrix unit takes weights of bf16 values in 16 bits: up to 1e-5 of the sum's terms, relatively more where terms
# cancel, in short rows. Storing values in bf16 costs 2e-3.
ACCUMULATOR = {"fp32": 1e-5, "bf16": 1e-4, "fp64": 1e-12}
# Half a unit in the last place, with a little room for a result on the wrong side of a tie.
ROUNDING = {"fp64": 0.0, "fp32": 6.0e-8, "fp16": 5.0e-4, "bf16": 4.0e-3}
# Over INT8, INT4 and codes of codebooks the CPU takes queries and weights as 16-bit integers. Four fifths of random
# configurations are within 1e-4; large scores, and sums that cancel in short rows, cost up to 8.2e-4 (on AVX2). INT8
# itself costs 9e-3.
INTEGERS = 2e-3
QUANTISED = ("int8", "code6", "int4", "code4")
LSE = 1e-5
# Attention weights: float32 arithmetic, and an lse of which INT8 attention on the CPU knows three digits.
WEIGHTS = {"int8": 2e-3, "code4": 2e-3, "code6": 2e-3}
ROTATED = {"fp64": 1e-6, "fp32": 1e-6, "fp16": 5.0e-4, "bf16": 4.0e-3}


def attention(storage: str, q: str) -> float:
    """The bound for one storage kind and one dtype of q: float64 where either is."""
    if storage in QUANTISED and q != "fp64":
        return max(INTEGERS, 2 * ROUNDING[q])
    wide = "fp64" in (storage, q)
    accumulator = ACCUMULATOR["fp64" if wide else "bf16" if storage == "bf16" else "fp32"]
    return max(accumulator, 2 * ROUNDING[q])


def widest(*kinds: str) -> str:
    """The kind among those of K, V and q that a bound goes by: float64, else a quantised one, else bf16."""
    some = [k for k in kinds if k in QUANTISED] + [k for k in kinds if k == "bf16"]
    return "fp64" if "fp64" in kinds else next(iter(some), "fp32")


def row_errors(actual, expected, least=0) -> np.ndarray:
    """L2 error of each row, relative to its size or to `least`; a row of zeros has to be met exactly."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected)
    error = np.linalg.norm(actual - expected, axis=-1)
    size = np.maximum(np.linalg.norm(expected, axis=-1), least)
    return np.where(size > 0, error / np.where(size > 0, size, 1), np.where(error > 0, np.inf, 0))


def assert_rows_close(actual, expected, bound: float, summed=None) -> None:
    """Every output row within ``bound``; NaN never passes.

    The terms of a short row can cancel, and its relative error is then large. `summed` is the sum of the terms without
    signs: a row below a twentieth of it is judged relative to that twentieth.
    """
    assert np.shape(actual) == np.shape(expected)
    least = 0 if summed is None else np.linalg.norm(summed, axis=-1) / 20
    errors = row_errors(actual, expected, least)
    assert np.all(errors <= bound), f"row error {np.nanmax(errors)} > {bound}"


def assert_lse_close(actual, expected, bound: float = LSE) -> None:
    """Log-sum-exps; minus infinity has to be met exactly."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected)
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite])
    error = np.abs(actual[finite] - expected[finite]) / np.maximum(1, np.abs(expected[finite]))
    assert np.all(error <= bound), f"lse error {error.max()}"


def assert_weights_close(got, want, kind: str) -> None:
    """Attention weights of tokens; those that no query sees are 0."""
    got = np.asarray(got)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    np.testing.assert_array_equal(got[want == 0], 0)
    np.testing.assert_allclose(got, want, rtol=WEIGHTS.get(kind, 2e-5), atol=1e-7)


def assert_rotated_close(actual, expected, kind: str) -> None:
    """Normed and rotated rows, then rounded to a kind."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected)
    assert actual.shape == expected.shape
    size = np.max(np.abs(expected), axis=-1, keepdims=True)
    assert np.all(np.abs(actual - expected) <= ROTATED[kind] * size)
