"""Merging partial results of attention."""

import naive
import numpy as np
import problems
import pytest
import tolerances
from problems import Shape

import numkv
from numkv import targets


@pytest.mark.parametrize("q_kind", ["fp32", "fp64", "bf16"])
def test_merged_halves_are_the_whole(target, to, host, rng, q_kind):
    kind = "fp64" if q_kind == "fp64" else "fp32"  # a kernel that other tests compile
    problem = problems.make(rng, Shape(2, 1, 16, (14, 9, 0, 1)), kind, q_kind)
    halves = []
    for begin, end in ((0, 6), (6, 14)):
        lens = np.clip(problem.seq_lens - begin, 0, end - begin).astype(np.int32)
        part = problems.replace(
            problem,
            k=problem.k[:, :, begin:end].copy(),
            v=problem.v[:, :, begin:end].copy(),
            seq_lens=lens,
        )
        halves += part.run(to, return_lse=True)
    out, lse = numkv.merge_states(*halves)
    want, want_lse = problem.expect()
    assert host(out).dtype == problem.q.dtype
    bound = max(1e-5, 4 * tolerances.ROUNDING[q_kind])  # lse comes as float32
    tolerances.assert_rows_close(host(out), want, bound)
    tolerances.assert_lse_close(host(lse), want_lse)


def test_merge_of_worked_numbers(target, to, host):
    """Scores 0.5, 2, -1, 3, 0 with values 1 to 5, in two parts."""
    scores, values = np.array([0.5, 2, -1, 3, 0]), np.arange(1.0, 6)
    parts = []
    for part in (np.s_[:3], np.s_[3:]):
        weights = np.exp(scores[part])
        parts += [
            np.full((1, 1, 1), weights @ values[part] / weights.sum(), np.float32),
            np.full((1, 1), np.log(weights.sum()), np.float32),
        ]
    out, lse = numkv.merge_states(*(to(x) for x in parts))
    assert np.allclose(host(out), 3.3738469, rtol=1e-6)
    assert np.allclose(host(lse), np.log(np.exp(scores).sum()), rtol=1e-6)


def test_merge_with_nothing(target, to, host, rng):
    """An empty side changes nothing, whatever its rows hold; two of them give 0 and -inf."""
    o = rng.standard_normal((2, 3, 4), np.float32)
    lse = rng.standard_normal((2, 3)).astype(np.float32)
    empty, nothing = np.zeros_like(o), np.full((2, 3), -np.inf, np.float32)
    for pair in ((o, lse, empty, nothing), (empty, nothing, o, lse)):
        got, got_lse = numkv.merge_states(*(to(x) for x in pair))
        assert np.allclose(host(got), o, rtol=1e-6)
        assert np.allclose(host(got_lse), lse, rtol=1e-6)
    got, got_lse = numkv.merge_states(*(to(x) for x in (empty, nothing, empty, nothing)))
    assert np.all(host(got) == 0)
    assert np.all(host(got_lse) == -np.inf)


@pytest.mark.boundscheck
def test_merge_against_the_oracle(target, to, host, rng):
    """Log-sum-exps far apart and close together."""
    o = rng.standard_normal((2, 4, 3, 5), np.float32)
    lse = (rng.standard_normal((2, 4, 3)) * 10.0 ** rng.integers(-3, 5, (2, 4, 3))).astype(
        np.float32
    )
    out, total = numkv.merge_states(to(o[0]), to(lse[0]), to(o[1]), to(lse[1]))
    want, want_total = naive.merge_states(o[0], lse[0], o[1], lse[1])
    tolerances.assert_rows_close(host(out), want, 1e-5)
    tolerances.assert_lse_close(host(total), want_total)


@pytest.mark.boundscheck
@pytest.mark.parametrize("kind", naive.DTYPES)
@pytest.mark.parametrize("shape", [(3, 2, 5), (1, 1, 1), (40, 3, 33), (0, 2, 4)])
def test_the_operation(target, to, host, rng, shape, kind):
    """Parts near to each other, far apart, and such that saw nothing; strided, as halves of one array."""
    where = targets.get(target)
    o = naive.round_to(rng.standard_normal((*shape, 2)), kind)
    lse = (rng.standard_normal((*shape[:2], 2)) * 5).astype(np.float32)
    lse[::2, :, 0] -= 200
    lse[1::3, :, 1] = -np.inf
    o[np.isneginf(lse)[:, :, None, :].repeat(shape[2], 2)] = np.nan  # not read
    # The halves lie side by side along an axis that is not the last.
    a, b = (where.words(to(np.moveaxis(o, 3, 1).copy()))[:, i] for i in (0, 1))
    lse_a, lse_b = (to(np.moveaxis(lse, 2, 1).copy())[:, i] for i in (0, 1))
    out, total = to(np.zeros(shape, o.dtype)), to(np.zeros(shape[:2], np.float32))
    where.ops.merge_states(a, lse_a, b, lse_b, kind, where.words(out), total)
    o[np.isnan(o.astype(np.float64))] = 0
    want, want_total = naive.merge_states(o[..., 0], lse[..., 0], o[..., 1], lse[..., 1])
    tolerances.assert_lse_close(host(total), want_total)
    size = np.abs(want).max(initial=1)
    # Weights are float32.
    bound = (2e-6 + tolerances.ROUNDING[kind]) * size
    assert np.all(np.abs(host(out).astype(np.float64) - want) <= bound)


def test_two_parts_that_saw_nothing(target, to, host):
    where = targets.get(target)
    o, lse = to(np.full((2, 1, 3), np.nan, np.float32)), to(np.full((2, 1), -np.inf, np.float32))
    out, total = to(np.ones((2, 1, 3), np.float32)), to(np.ones((2, 1), np.float32))
    where.ops.merge_states(o, lse, o, lse, "fp32", out, total)
    assert np.all(host(out) == 0)
    assert np.all(host(total) == -np.inf)


INFINITE = [  # lse of both parts, weights of both, lse
    (np.inf, 3, 1, 0, np.inf),
    (-2, np.inf, 0, 1, np.inf),
    (np.inf, np.inf, 0.5, 0.5, np.inf),
    (np.inf, -np.inf, 1, 0, np.inf),
    (3.4e38, -3.4e38, 1, 0, 3.4e38),
]


@pytest.mark.parametrize(("lse_a", "lse_b", "weight_a", "weight_b", "total"), INFINITE)
def test_an_infinite_part_outweighs_a_finite_one(
    target, to, host, lse_a, lse_b, weight_a, weight_b, total
):
    """Two of them count alike. What has no weight is not read, and other rows are not touched."""
    o_a, o_b = np.full((2, 2, 4), 2, np.float32), np.full((2, 2, 4), 6, np.float32)
    o_a[0, 1] = np.nan if weight_a == 0 else o_a[0, 1]
    o_b[0, 1] = np.nan if weight_b == 0 else o_b[0, 1]
    of_a, of_b = np.zeros((2, 2, 2), np.float32)
    of_a[0, 1], of_b[0, 1] = lse_a, lse_b
    out, lse = (host(x) for x in numkv.merge_states(to(o_a), to(of_a), to(o_b), to(of_b)))
    want, want_lse = np.full((2, 2, 4), 4, np.float32), np.full((2, 2), np.log(2))
    want[0, 1], want_lse[0, 1] = 2 * weight_a + 6 * weight_b, total
    np.testing.assert_allclose(out, want, rtol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


def test_nan_stays_nan(target, to, host):
    o, lse = np.ones((2, 1, 4), np.float32), np.array([[np.nan], [1]], np.float32)
    for a, b in (
        (lse, np.full((2, 1), np.inf, np.float32)),
        (np.full((2, 1), -np.inf, np.float32), lse),
    ):
        out, total = (host(x) for x in numkv.merge_states(to(o), to(a), to(o), to(b)))
        assert np.isnan(out[0]).all()
        assert np.isnan(total[0])
        assert np.all(out[1] == 1)
