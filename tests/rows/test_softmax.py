"""`numkv.rows.softmax`: the ends of an online softmax, against float64."""

import numpy as np
import pytest

from numkv.rows.softmax import finish, merge_weights, power_of_2

INF = np.inf
LN_2 = np.log(2.0)
BOUNDS = [(np.float32, 1e-6), (np.float64, 1e-13)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_powers(run, dtype):
    for x, top, want in ((3, 3, 1), (1, 3, 0.25), (-INF, 3, 0), (-INF, -INF, 1), (0, 2.5, 2**-2.5)):
        got = run(power_of_2)(dtype(x), dtype(top))
        assert np.isclose(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("sink", [None, -300.0, 0.3, 40.0])
def test_a_row_is_normalised(run, rng, sink, dtype, bound):
    """From the maximum and the sum that a kernel keeps: the factor of the weighted sum, and the lse."""
    scores = rng.standard_normal(9) * 3
    top = dtype(scores.max() / LN_2)
    total = np.sum(np.exp2(scores / LN_2 - np.float64(top)))
    everything = np.exp(scores).sum() + (0 if sink is None else np.exp(sink))
    given = dtype(-INF) if sink is None else dtype(sink / LN_2)
    factor, lse = run(finish)(top, dtype(total), given, dtype(LN_2))
    want = np.exp2(np.float64(top)) / everything
    assert np.isclose(factor, want, rtol=30 * bound, atol=0)
    assert np.isclose(lse, np.log(everything), rtol=10 * bound, atol=10 * bound)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_that_saw_nothing(run, dtype):
    nothing, ln_2 = (dtype(-INF), dtype(0)), dtype(LN_2)
    assert run(finish)(*nothing, dtype(-INF), ln_2) == (0, -INF)
    factor, lse = run(finish)(*nothing, dtype(2.0), ln_2)
    assert np.isclose(lse, 2 * LN_2, rtol=1e-6)
    assert factor * 0 == 0  # of a sum of nothing


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_that_are_nan_stay_nan(run, dtype):
    factor, lse = run(finish)(dtype(-INF), dtype(np.nan), dtype(-INF), dtype(LN_2))
    assert np.isnan(factor)
    assert np.isnan(lse)


def test_merging(run, rng):
    for a, b in (rng.standard_normal((30, 2)) * [[1, 50]]).astype(np.float32):
        total = np.logaddexp(np.float64(a), np.float64(b))
        weight_a, weight_b, lse = run(merge_weights)(a, b)
        assert np.isclose(weight_a, np.exp(a - total), rtol=2e-5, atol=1e-30)
        assert np.isclose(weight_b, np.exp(b - total), rtol=2e-5, atol=1e-30)
        assert np.isclose(lse, total, rtol=1e-6, atol=1e-6)


def test_merging_with_nothing(run):
    nothing, some = np.float32(-INF), np.float32(0.7)
    assert run(merge_weights)(some, nothing) == (1, 0, some)
    assert run(merge_weights)(nothing, some) == (0, 1, some)
    assert run(merge_weights)(nothing, nothing) == (0, 0, -INF)
    for pair in ((np.float32(np.nan), some), (some, np.float32(np.nan))):
        assert np.isnan(run(merge_weights)(*pair)[2])
