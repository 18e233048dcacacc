"""Attention and attention mass over 8-bit floats with a scale for each kv head, against the oracle."""

import ml_dtypes
import naive
import numpy as np
import problems
import pytest
import tolerances
from problems import Shape

from numkv import targets
from numkv.kinds import kind as kind_of

F32 = np.float32
DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
NO_SCALE = np.empty((0, 0, 0), F32)


def stored(rng, x, kind):
    """Words and scales of rows ``(..., heads, tokens, dim)`` in a kind, and their values in float64."""
    if kind not in DTYPES:
        return np.nan_to_num(x).view(kind_of(kind).word), NO_SCALE, x.astype(np.float64)
    scale = (rng.random(x.shape[1]) + 0.5).astype(F32)
    words = (x / scale[:, None, None]).astype(DTYPES[kind])
    values = words.astype(np.float64) * scale.astype(np.float64)[:, None, None]
    return words.view(np.uint8), scale, values


CASES = [
    (Shape(4, 2, 32, (40, 3)), "fp8_e4m3", "fp8_e4m3", {}),
    (Shape(2, 2, 16, (9, 70), new=(9, 2)), "fp8_e5m2", "fp8_e5m2", {"logits_soft_cap": 2.0}),
    (Shape(3, 1, 7, (150,)), "fp8_e4m3", "fp8_e4m3", {"window_left": 90}),  # rows not in 16 bytes, and splits
    (Shape(2, 1, 16, (200,), head_dim_v=24), "fp32", "fp8_e5m2", {}),
    (Shape(8, 1, 9, (50, 5), new=(11, 5)), "fp8_e5m2", "fp8_e4m3", {}),  # many rows, and both kinds
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "k_kind", "v_kind", "options"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.nightly) for case in CASES[2:])],
    ids=str,
)
def test_the_values_are_products_with_the_scale_of_the_head(
    target, to, host, rng, shape, k_kind, v_kind, options
):
    problem = problems.make(rng, shape)
    k, k_scale, k_values = stored(rng, problem.k, k_kind)
    v, v_scale, v_values = stored(rng, problem.v, v_kind)
    n, heads = problem.q.shape[:2]
    num_seqs = len(shape.seq_lens)
    cu = problem.cu_seqlens_q
    starts = np.arange(num_seqs + 1) if cu is None else cu
    batch = [
        to(x) for x in (
            np.arange(num_seqs, dtype=np.int32)[:, None], problem.seq_lens.astype(np.int64),
            starts.astype(np.int64), np.empty((0, 2), np.int64),
        )
    ]  # fmt: skip
    window, cap = options.get("window_left", -1), options.get("logits_soft_cap", 0.0)
    ops, sm_scale = targets.get(target).ops, 1 / np.sqrt(shape.head_dim)
    keys = to(problem.q), "fp32", to(k), k_kind, to(k_scale)
    out, lse = to(np.zeros((n, heads, problem.v.shape[3]), F32)), to(np.zeros((n, heads), F32))
    ops.attend(
        *keys, to(v), v_kind, to(v_scale), *batch, 0, sm_scale, cap, window, to(np.empty(0, F32)),
        out, lse,
    )  # fmt: skip
    want, want_lse = naive.attention(problem.q, k_values, v_values, problem.seq_lens, cu, **options)
    tolerances.assert_rows_close(host(out), want, 1e-5)
    tolerances.assert_lse_close(host(lse), want_lse)

    mass = to(np.zeros((num_seqs, *problem.k.shape[1:3]), F32))
    ops.attention_weights(*keys, *batch, 0, lse, sm_scale, cap, window, mass)
    got = host(mass)
    # All the attention of a head's queries is somewhere; and with the unit rows of V it is the output.
    queries = np.diff(starts) * (heads // problem.k.shape[1])
    np.testing.assert_allclose(got.sum(-1), np.repeat(queries[:, None], got.shape[1], 1), rtol=1e-4)
    for b, length in enumerate(shape.seq_lens):
        assert not got[b, :, length:].any()


@pytest.mark.parametrize("kind", DTYPES)
def test_every_word_is_read_as_ml_dtypes_reads_it(target, to, host, kind):
    """One token of V, so its row is the output: all finite words, with scale 1."""
    words = np.arange(256, dtype=np.uint8)
    finite = np.isfinite(words.view(DTYPES[kind]).astype(F32))
    row = np.where(finite, words, 0)
    zeros, out = np.zeros((1, 1, 256), F32), to(np.ones((1, 1, 256), F32))
    one = to(np.ones(1, F32))
    targets.get(target).ops.attend(
        to(zeros), "fp32", to(row[None, None, None]), kind, one, to(row[None, None, None]), kind,
        one, to(np.zeros((1, 1), np.int32)), to(np.array([1])), to(np.array([0, 1])),
        to(np.empty((0, 2), np.int64)), 0, 1.0, 0.0, -1, to(np.empty(0, F32)), out,
        to(np.zeros((1, 1), F32)),
    )  # fmt: skip
    np.testing.assert_array_equal(host(out)[0, 0], row.view(DTYPES[kind]).astype(F32))


@pytest.mark.parametrize("kind", DTYPES)
def test_nan_and_infinity_stay_in_their_columns(target, to, host, kind):
    words = np.arange(256, dtype=np.uint8)
    values = words.view(DTYPES[kind]).astype(F32)
    zeros, out = np.zeros((1, 1, 256), F32), to(np.ones((1, 1, 256), F32))
    one = to(np.ones(1, F32))
    targets.get(target).ops.attend(
        to(zeros), "fp32", to(np.zeros((1, 1, 1, 256), np.uint8)), kind, one,
        to(words[None, None, None]), kind, one, to(np.zeros((1, 1), np.int32)), to(np.array([1])),
        to(np.array([0, 1])), to(np.empty((0, 2), np.int64)), 0, 1.0, 0.0, -1, to(np.empty(0, F32)),
        out, to(np.zeros((1, 1), F32)),
    )  # fmt: skip
    np.testing.assert_array_equal(host(out)[0, 0], values)  # which takes NaN for NaN
    assert np.isnan(values).sum() == (2 if kind == "fp8_e4m3" else 6)


@pytest.mark.parametrize("kind", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.nightly)])
def test_long_sequences_of_8_bit_floats_are_split(rng, kind):
    """On the CPU, where a split takes 1,024 tokens: parts are merged after the scales of heads."""
    problem = problems.make(rng, Shape(6, 2, 64, (2500, 70)))
    k, k_scale, k_values = stored(rng, problem.k, kind)
    v, v_scale, v_values = stored(rng, problem.v, kind)
    n, heads = problem.q.shape[:2]
    out, lse = np.zeros_like(problem.q), np.zeros((n, heads), F32)
    targets.get("cpu").ops.attend(
        problem.q, "fp32", k, kind, k_scale, v, kind, v_scale,
        np.arange(2, dtype=np.int32)[:, None], problem.seq_lens.astype(np.int64), np.arange(3),
        np.empty((0, 2), np.int64), 0, 0.125, 0.0, -1, np.empty(0, F32), out, lse,
    )  # fmt: skip
    want, want_lse = naive.attention(problem.q, k_values, v_values, problem.seq_lens, None)
    tolerances.assert_rows_close(out, want, 1e-5)
    tolerances.assert_lse_close(lse, want_lse)
