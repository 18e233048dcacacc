"""INT4 codes, scales and their errors, in every object that stores rows."""

import naive
import numpy as np
import pytest
from quantised_stores import Stores, assert_int4_no_worse

import numkv

F32, BF16 = np.float32, naive.DTYPES["bf16"]
#: Kinds of 16 bits are widened alike for INT8 and INT4; `test_append.py` has one beside each of the two in every run.
SOURCES = ["fp32", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp16", "bf16"))]
# Whole groups, groups and a short one, a short one alone; on CUDA rows that are read in chunks and those that are not.
DIMS = {"cpu": [2, 8, 30, 32, 34, 64, 80, 96, 128, 200], "cuda": [2, 32, 34, 80]}
every_dim = pytest.mark.parametrize(
    ("target", "dim"),
    [(target, dim) for target, dims in DIMS.items() for dim in dims],
    indirect=["target"],
)

STORES = Stores("int4")
in_contiguous, in_paged, assert_exact = STORES.in_contiguous, STORES.in_paged, STORES.assert_exact
every_store = pytest.mark.parametrize("store", STORES.all.values(), ids=STORES.all)


@pytest.mark.parametrize("size", [2.0**-100, 0.5, 1.0, 2.0**60])
def test_what_lies_on_levels_is_kept(target, to, host, rng, size):
    """With each of the offsets: the last bits of a scale say where its levels lie."""
    codes = np.stack([rng.permutation([*range(16)] * 2) for _ in range(8)])
    scale = (size * (1 + np.arange(8) / 128)).astype(F32)
    rows = ((codes + np.arange(8)[:, None] / 2 - 9.25) * scale[:, None]).astype(F32)[:, None]
    got, got_scale, *_ = in_contiguous(rows, rows, to, host, target)
    assert np.array_equal(got_scale[:, 0, 0].astype(F32), scale)
    assert np.array_equal(got[:, 0], codes[:, :16] + 16 * codes[:, 16:])
    assert np.array_equal(naive.int4_dequantise(got, got_scale), rows.astype(np.float64))


def test_zeros(target, to, host):
    """A group of zeros has scale 0, whatever its neighbours are, and comes back as +0."""
    rows = np.zeros((2, 1, 66), F32)
    rows[1, 0, 40] = -3
    cache = numkv.KVCache(1, 1, 66, kind="int4", target=target)
    cache.append(0, to(rows), to(-rows))
    assert np.array_equal(host(cache.k_scales(0)).astype(F32) > 0, [[[0, 0, 0]], [[0, 1, 0]]])
    for got in (host(cache.k(0)), host(cache.v(0))):
        assert not got[0].any()
        assert not np.signbit(got[0]).any()


def test_the_order_of_nibbles(target, to, host):
    """Of whole groups j and j + 16 make a byte, of a last group of n elements j and j + n / 2."""
    x = np.zeros(38, F32)
    x[[0, 16, 33, 36]] = -1, 1, -1, 1
    x[[5, 37]] = 1, -1
    codes, *_ = in_contiguous(x[None, None], x[None, None], to, host, target)
    codes = codes[0, 0]
    assert codes.shape == (16 + 3,)
    assert codes[[0, 17]].tolist() == [0xF0, 0xF0]
    assert codes[5] & 15 == 15
    assert codes[18] >> 4 == 0
    middle = {int(c) for c in [*(codes[1:5] & 15), *(codes[1:16] >> 4), codes[16] & 15]}
    assert middle <= {7, 8}


def test_values_come_back_in_order(target, to, host):
    """A ramp of one sign change: what is read is monotonic."""
    x = np.linspace(-1, 1, 74, dtype=F32)[None, None]
    cache = numkv.KVCache(1, 1, 74, kind="int4", target=target)
    cache.append(0, to(x), to(x[..., ::-1].copy()))
    assert np.all(np.diff(host(cache.k(0))[0, 0]) >= -0.05)
    assert np.abs(host(cache.k(0)) - x).max() < 0.1
    assert np.abs(host(cache.v(0)) - x[..., ::-1]).max() < 0.1


SIZES = [1e-30, 1e-20, 1e-7, 6e-8, 1e-3, 1.0, 300.0, 65504.0, 3e38]


@pytest.mark.boundscheck
@every_store
@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_all_sizes(target, to, host, rng, store, source):
    """Exact codes and scales, and errors within what the scales promise; groups of a row differ in size."""
    dim = 78 if target == "cpu" else 34
    sizes = np.array(SIZES[: -1 if source == "fp16" else None])
    k, v = (rng.uniform(-1, 1, (len(sizes), 2, dim)) for _ in "kv")
    for x in (k, v):
        x[..., 0] = np.sign(x[..., 0])
        x[..., 32:] *= 1e-3
    k, v = (naive.round_to(x * sizes[:, None, None], source) for x in (k, v))
    got = store(k, v, to, host, target)
    assert_exact(got, k, v)
    for rows, codes, scale in ((k, *got[:2]), (v, *got[2:])):
        assert_int4_no_worse(naive.int4_dequantise(codes, scale), scale, rows)
        fits = np.abs(rows[..., :32].astype(np.float64)).max(axis=-1) > 1e-29
        assert np.all((scale.astype(F32) > 0)[fits, 0])


@every_dim
def test_every_row_length(target, to, host, rng, dim):
    k, v = (rng.standard_normal((3, 2, dim), F32) for _ in "kv")
    assert_exact(in_contiguous(k, v, to, host, target), k, v)


def test_many_rows(rng):
    """Of several distributions, on the CPU: all offsets are of use."""
    k = rng.standard_normal((3000, 2, 96), F32)
    v = rng.standard_t(2, (3000, 2, 96)).astype(F32)
    v[:1000] += 3
    got = in_contiguous(k, v, lambda x: x, lambda x: x, "cpu")
    assert_exact(got, k, v)
    for rows, codes, scale in ((k, *got[:2]), (v, *got[2:])):
        assert_int4_no_worse(naive.int4_dequantise(codes, scale), scale, rows)
        assert np.all(np.bincount(naive.words(scale).reshape(-1) & 7, minlength=8) > 100)


def test_tiny_rows_far_below_the_promise():
    """Subnormal rows lose digits, not their minds: finite values, errors of the size of the row."""
    rows = np.array([[[1e-45, -1e-45]], [[1e-40, 5e-41]], [[3e-38, 1e-38]]], F32)
    codes, scale, *_ = in_contiguous(rows, rows, lambda x: x, lambda x: x, "cpu")
    assert np.all(np.isfinite(scale.astype(F32)))
    assert np.all(np.abs(naive.int4_dequantise(codes, scale) - rows) <= 2 * np.abs(rows).max())


def test_error_on_gaussian_rows(rng):
    """7.7 % of the rows' size."""
    x = rng.standard_normal((2000, 1, 128), F32)
    codes, scale, *_ = in_contiguous(x, x, lambda x: x, lambda x: x, "cpu")
    error = np.linalg.norm(naive.int4_dequantise(codes, scale) - x) / np.linalg.norm(x)
    assert 0.076 < error < 0.0785
