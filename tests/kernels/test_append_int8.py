"""INT8 codes, scales and their errors, in every object that stores rows."""

import naive
import numpy as np
import pytest
from quantised_stores import Stores
from worked import INT8

F32 = np.float32
#: See `test_append_int4`.
SOURCES = ["fp32", "fp16", pytest.param("bf16", marks=pytest.mark.nightly)]

STORES = Stores("int8")
in_contiguous, in_paged, assert_exact = STORES.in_contiguous, STORES.in_paged, STORES.assert_exact
every_store = pytest.mark.parametrize("store", STORES.all.values(), ids=STORES.all)


@every_store
@pytest.mark.parametrize("source", SOURCES)
def test_worked_rows(target, to, host, store, source):
    rows = [row for row in INT8 if row[0] == source]
    k = np.array([row[1] for row in rows])[:, None].astype(naive.DTYPES[source])
    codes, scale, v_codes, v_scale = store(k, -k, to, host, target)
    assert codes[:, 0].tolist() == [row[2] for row in rows]
    assert np.array_equal(v_codes, -codes)
    assert np.allclose(scale[:, 0], [row[3] for row in rows], rtol=1e-7, atol=0)
    assert np.array_equal(v_scale, scale)


SIZES = [1e-30, 1e-20, 1e-7, 6e-8, 1e-3, 1.0, 300.0, 65504.0]


def rows_of_all_sizes(rng, kind, heads, dim):
    """A token for each size, its largest element exactly that, as far as the kind goes."""
    rows = rng.uniform(-1, 1, (len(SIZES), heads, dim))
    rows[..., 0] = np.sign(rows[..., 0])
    return naive.round_to(rows * np.array(SIZES)[:, None, None], kind)


@pytest.mark.boundscheck
@every_store
@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_all_sizes(target, to, host, rng, store, source):
    """Exact codes and scales, and no element further off than half a scale."""
    dim = 67 if target == "cpu" else 9
    k, v = (rows_of_all_sizes(rng, source, 2, dim) for _ in "kv")
    got = store(k, v, to, host, target)
    assert_exact(got, k, v)
    for rows, codes, scale in ((k, *got[:2]), (v, *got[2:])):
        x = rows.astype(np.float64)
        error = np.abs(naive.int8_dequantise(codes, scale) - x)
        half = 0.5 * scale.astype(np.float64)[..., None]
        assert np.all(error <= half * (1 + 1e-6) + 2.0**-23 * np.abs(x))
        assert np.all(scale[[i for i, n in enumerate(SIZES) if n >= 1e-7 or source != "fp16"]] > 0)


@pytest.mark.parametrize("dim", [1, 2, 7, 8, 16, 31, 32, 64, 128, 200])
def test_every_row_length(rng, dim):
    """Vectors and their remainders, on the CPU."""
    k, v = (rng.standard_normal((5, 3, dim), F32) for _ in "kv")
    assert_exact(in_contiguous(k, v, lambda x: x, lambda x: x, "cpu"), k, v)


def test_ties_go_to_the_even_code(target, to, host):
    """Every half-way value between two codes, of either sign."""
    halves = np.arange(-126.5, 127).astype(F32)
    rows = np.concatenate([[127], halves]).astype(F32).reshape(1, 1, -1)
    codes, scale, *_ = in_contiguous(rows, rows, to, host, target)
    assert scale.tolist() == [[1]]
    assert np.all(codes[0, 0, 1:] % 2 == 0)
    assert np.all(np.abs(codes[0, 0, 1:] - halves) == 0.5)


def test_codes_never_leave_their_range(rng):
    """A quotient may round to a hair above 127; -128 is no code."""
    rows = rng.standard_normal((500, 2, 4), F32) * F32(1.37)
    codes, scale, *_ = in_contiguous(rows, rows, lambda x: x, lambda x: x, "cpu")
    assert np.all(np.abs(codes.astype(int)).max(axis=-1) == 127)
    assert np.all(scale > 0)


def test_tiny_rows_far_below_the_promise():
    """Subnormal rows lose digits, not their minds: finite values, errors of the size of the row."""
    rows = np.array([[[1e-45, -1e-45]], [[1e-40, 5e-41]], [[3e-38, 1e-38]]], F32)
    codes, scale, *_ = in_contiguous(rows, rows, lambda x: x, lambda x: x, "cpu")
    assert np.all(np.isfinite(scale))
    assert np.all(np.abs(naive.int8_dequantise(codes, scale) - rows) <= np.abs(rows).max())
