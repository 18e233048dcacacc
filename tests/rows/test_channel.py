"""Token groups by channel: codes, scales and zero points to the bit, in Python, as in the simulator, and compiled."""

import ml_dtypes
import naive
import numba
import numpy as np
import pytest

import numkv
from numkv.rows.channel import TOKENS, channel_storer, put_widest
from numkv.rows.codec import element_codec, row_codec

F32 = np.float32
KINDS = ["int8_channel", "int4_channel_fine", "int4_channel"]


def as_it_is(x):
    return x


@pytest.fixture(params=["python", pytest.param("compiled", marks=pytest.mark.slow)])
def run(request):
    return as_it_is if request.param == "python" else lambda f: numba.njit(f)


def stored(run, kind, rows):
    """Words and scales of a group."""
    bits, dim = naive.channel_bits(kind), rows.shape[1]
    store, store_fine = map(run, channel_storer(bits, run(as_it_is)))
    of, fine = numkv.kind(kind), naive.channel_fine(kind)
    codes = np.zeros((TOKENS, of.words_per_row(dim)), of.word)
    scales = np.zeros(2 * dim + fine, np.uint16)
    with np.errstate(all="ignore"):
        for d in range(0, dim, 8 // bits):
            store(rows, codes, scales, d)
        if fine:
            run(put_widest)(scales, dim)
            for f in range(0, fine, 2):
                store_fine(rows, codes, scales, f)
    return codes, scales


def groups(rng):
    """Groups that are hard: large offsets, one value, zeros of both signs, tiny and huge ones, what is not finite."""
    x = rng.standard_normal((TOKENS, 24)).astype(F32) * F32(3)
    x[:, 0] += 100
    x[:, 1] = 7.3
    x[:, 2] = np.where(np.arange(TOKENS) % 2, 0.0, -0.0)
    x[:, 3] *= F32(1e-38)
    x[:, 4] = np.linspace(-3e38, 3e38, TOKENS)
    x[:, 5] = np.linspace(1, 3.3e38, TOKENS)
    x[5, 6], x[9, 7], x[0, 8] = np.nan, np.inf, -np.inf
    x[:, 9] = -0.0
    x[:, 10] = np.arange(TOKENS)
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_rule_to_the_bit(run, rng, kind):
    for rows in (groups(rng), rng.standard_normal((TOKENS, 8)).astype(F32)):
        dim = rows.shape[1]
        words, scales = stored(run, kind, rows)
        want, shared = naive.channel_group(rows, kind)
        lost = np.isnan(shared[:dim].view(ml_dtypes.bfloat16))
        assert np.array_equal(scales[:dim][~lost], shared[:dim][~lost])
        assert np.isnan(scales[:dim].view(ml_dtypes.bfloat16)).tolist() == lost.tolist()
        assert np.array_equal(scales[dim:], shared[dim:])
        assert np.array_equal(words, want)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_within_half_a_step(run, rng, kind):
    rows = groups(rng)
    words, scales = stored(run, kind, rows)
    dim = rows.shape[1]
    want = naive.channel_values(words, scales[None], kind)
    load, value = run(row_codec(kind)[1]), run(element_codec(kind)[0])
    out = np.empty(dim, F32)
    for t in (0, 1, 63):
        load(words[t], scales, out)
        np.testing.assert_array_equal(out, want[t].astype(F32))
        assert np.array_equal(
            [value(words[t], scales, d, dim) for d in range(dim)], out, equal_nan=True
        )
    kept = np.isfinite(want).all(axis=0)
    step = scales[:dim].view(ml_dtypes.bfloat16).astype(np.float64)
    if naive.channel_fine(kind):
        assert sorted(step[~np.isnan(step)])[-8:] == sorted(step[scales[2 * dim :]])
        step[scales[2 * dim :]] /= 16
    step = step[kept]
    off = np.abs(want - rows)[:, kept]
    assert (off <= step / 2 * (1 + 1e-6) + np.abs(rows[:, kept]) * 1e-7).all()


def test_scaling_a_channel_changes_no_code(run, rng):
    """By a power of two: what an outlier channel costs others is nothing."""
    rows = rng.standard_normal((TOKENS, 4)).astype(F32)
    words, scales = stored(run, "int8_channel", rows)
    rows[:, 1] *= 64
    larger, more = stored(run, "int8_channel", rows)
    assert np.array_equal(words, larger)
    ratio = more.view(ml_dtypes.bfloat16).astype(F32) / scales.view(ml_dtypes.bfloat16).astype(F32)
    assert ratio.tolist() == [1, 64, 1, 1] * 2
