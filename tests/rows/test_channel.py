"""Token groups by channel: codes, scales and zero points to the bit, in Python, as in the simulator, and compiled."""

import ml_dtypes
import naive
import numba
import numpy as np
import pytest

from numkv.rows.channel import TOKENS, channel_storer
from numkv.rows.codec import element_codec, row_codec

F32 = np.float32
KINDS = ["int8_channel", "int4_channel"]


def as_it_is(x):
    return x


@pytest.fixture(params=["python", pytest.param("compiled", marks=pytest.mark.slow)])
def run(request):
    return as_it_is if request.param == "python" else lambda f: numba.njit(f)


def stored(run, kind, rows):
    """Words and scales of a group."""
    bits, dim = naive.channel_bits(kind), rows.shape[1]
    store = run(channel_storer(bits, run(as_it_is)))
    codes = np.zeros((TOKENS, dim * bits // 8), np.int8 if bits == 8 else np.uint8)
    scales = np.zeros(2 * dim, np.uint16)
    with np.errstate(all="ignore"):
        for d in range(0, dim, 8 // bits):
            store(rows, codes, scales, d)
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
    bits = naive.channel_bits(kind)
    for rows in (groups(rng), rng.standard_normal((TOKENS, 6)).astype(F32)):
        dim = rows.shape[1]
        words, scales = stored(run, kind, rows)
        codes, scale, zero = naive.channel_quantise(rows, bits)
        lost = np.isnan(scale)
        assert np.array_equal(scales[:dim][~lost], naive.words(scale)[~lost])
        assert np.isnan(scales[:dim].view(ml_dtypes.bfloat16)).tolist() == lost.tolist()
        assert np.array_equal(scales[dim:], naive.words(zero))
        assert np.array_equal(naive.channel_codes(words, kind), codes)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_within_half_a_step(run, rng, kind):
    rows = groups(rng)
    words, scales = stored(run, kind, rows)
    dim = rows.shape[1]
    scale, zero = (scales.view(ml_dtypes.bfloat16)[part] for part in (slice(dim), slice(dim, None)))
    want = naive.channel_dequantise(naive.channel_codes(words, kind), scale, zero)
    load, value = run(row_codec(kind)[1]), run(element_codec(kind)[0])
    out = np.empty(dim, F32)
    for t in (0, 1, 63):
        load(words[t], scales, out)
        np.testing.assert_array_equal(out, want[t].astype(F32))
        assert np.array_equal(
            [value(words[t], scales, d, dim) for d in range(dim)], out, equal_nan=True
        )
    kept = np.isfinite(want).all(axis=0)
    step = scale.astype(np.float64)[kept]
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
