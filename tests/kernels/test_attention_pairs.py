"""bf16 queries over bf16 K and V on CPUs that multiply pairs of bf16: lone rows, rounding, what is not seen."""

import naive
import numpy as np
import problems
import pytest
import tolerances
from problems import Shape
from walked import each

import numkv
from numkv.kernels.cpu.attention.engines import compute_for
from numkv.kernels.cpu.attention.records import PAIRS
from numkv.kernels.cpu.vectors.features import HAS_BF16_PAIRS, has_amx

# Half a unit in bf16's last place, relative.
HALF_UNIT = 2.0**-8


def host(x):
    return x


def in_bf16(x):
    return naive.round_to(np.asarray(x), "bf16")


def test_what_is_computed_in_pairs():
    pairs = PAIRS if HAS_BF16_PAIRS else "float32"
    assert compute_for("bf16", "bf16", "bf16", masked=True) == pairs
    assert compute_for("bf16", "bf16", "bf16") == (PAIRS if has_amx() else pairs)
    assert compute_for("fp32", "bf16", "bf16") == "float32"
    assert compute_for("bf16", "bf16", "fp16") == "float32"
    assert compute_for("bf16", "int8", "bf16") == "float32"
    assert compute_for("bf16", "fp64", "bf16") == "float64"


@pytest.mark.parametrize("dim", [(64, None), (33, 7), (80, 48), (192, 128), (256, 16)], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 11])
def test_few_rows(rng, group, dim):
    """Rows alone, side by side, and more than vector code takes at once; heads that end within a vector."""
    shape = Shape(2 * group, 2, dim[0], (64, 130, 1, 77), head_dim_v=dim[1])
    problems.make(rng, shape, "bf16", "bf16").check(host, host)


@pytest.mark.parametrize("window", [1, 2, 5, 63, 64, 65])
@pytest.mark.parametrize("new", [None, (3, 1, 9, 2)], ids=["decode", "prefill"])
def test_windows_begin_and_end_within_a_pair(rng, window, new):
    """What lies beside them is NaN, or infinite, and leaves no trace."""
    lens = (70, 71, 193, 6)
    problem = problems.make(rng, Shape(8, 2, 64, lens, new), "bf16", "bf16")
    for s, n in enumerate(lens):
        first = n - (1 if new is None else new[s]) - window
        for x, bad in ((problem.k, np.nan), (problem.v, np.inf)):
            x[s, :, : max(0, first)] = bad
    out = problem.check(host, host, window_left=window, may_cancel=True)
    assert np.isfinite(out.astype(np.float32)).all()


@each("at", [0, 1, 62, 63, 64])
@each("rows", [1, 4, 20])
@each("bad", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_seen_where_they_are(rng, at, rows, bad):
    """Also the newest token alone in its pair: infinity stays infinity."""
    problem = problems.make(rng, Shape(rows, 1, 32, (65,)), "bf16", "bf16")
    problem.v[0, 0, at, 5] = bad
    out = problem.run(host).astype(np.float32)
    np.testing.assert_array_equal(out[:, :, 5], np.full_like(out[:, :, 5], bad))
    assert np.isfinite(np.delete(out, 5, axis=-1)).all()


def test_weights_of_equal_scores_are_exact(rng):
    """2**n equal weights of 1 round nothing: results are V's mean, rounded once."""
    k = np.zeros((1, 2, 128, 64), np.float32)
    v = in_bf16(rng.integers(-8, 9, (1, 2, 128, 64)).astype(np.float32))
    q = in_bf16(rng.standard_normal((1, 8, 64)))
    out, lse = numkv.decode_attention(q, in_bf16(k), v, np.array([128]), return_lse=True)
    mean = np.repeat(v.astype(np.float64).mean(2), 4, axis=1)
    np.testing.assert_array_equal(out, in_bf16(mean.astype(np.float32)))
    np.testing.assert_allclose(lse, np.log(128), rtol=1e-6)


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("new", [None, (40,)], ids=["few", "many"])
def test_weights_lose_half_a_unit_at_most(rng, new, spread):
    """Element by element: the rounding of weights, and that of the result."""
    problem = problems.make(rng, Shape(8, 2, 64, (333,), new), "bf16", "bf16")
    problem.q[:] = in_bf16(problem.q.astype(np.float32) * spread)
    out = problem.run(host).astype(np.float64)
    want, _ = problem.expect()
    problem.v[:] = np.abs(problem.v)
    summed, _ = problem.expect()
    assert np.all(abs(out - want) <= HALF_UNIT * (1.02 * summed + 1.01 * abs(want)) + 1e-5 * summed)


def test_scores_of_large_queries_stay_exact(rng):
    """Products are exact, so the lse is that of float32."""
    problem = problems.make(rng, Shape(4, 1, 128, (500,)), "bf16", "bf16")
    problem.q[:] = in_bf16(problem.q.astype(np.float32) * 30)
    _, lse = problem.run(host, return_lse=True)
    tolerances.assert_lse_close(lse, problem.expect()[1], 1e-5)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_row_does_not_depend_on_the_batch(rng, group):
    problem = problems.make(rng, Shape(group, 1, 64, (130, 1, 66, 64, 700)), "bf16", "bf16")
    together = problem.run(host)
    for s in range(5):
        np.testing.assert_array_equal(problem.only(s).run(host)[0], together[s])


def test_bound_calls_give_the_same_bits(rng):
    a, b = (numkv.KVCache(1, 2, 64, kind="bf16") for _ in range(2))
    bound = a.bind(8, "bf16")
    for tokens in (3, 1, 1):
        q, k, v = (in_bf16(rng.standard_normal((tokens, heads, 64))) for heads in (8, 2, 2))
        out = bound.begin(tokens)(0, q, k, v)
        b.append(0, k, v)
        np.testing.assert_array_equal(out, b.decode_attention(0, q))
        a.advance(tokens)
        b.advance(tokens)
