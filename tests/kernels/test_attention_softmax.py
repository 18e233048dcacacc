"""The softmax of attention's vector code, against NumPy in float64."""

import numba
import numpy as np
import pytest
from walked import each

from numkv.kernels.cpu.attention.llvm.softmax import make_online_softmax_step
from numkv.kernels.cpu.attention.records import KV_TILE, TILE_UNIT, SoftmaxState
from numkv.kernels.cpu.vectors.features import row_unroll

pytestmark = pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPerformanceWarning")
FENCE = 12345.0
step_float32, step_float64 = (make_online_softmax_step(x) for x in ("float32", "float64"))


@numba.njit
def run_float32(rows, count, s, begin, end, at):
    step_float32(rows, count, s, 0, begin, end, SoftmaxState(at, at + 16, at + 32))


@numba.njit
def run_float64(rows, count, s, begin, end, at):
    step_float64(rows, count, s, 0, begin, end, SoftmaxState(at, at + 16, at + 32))


def softmax(compute, scores, begin, end, count, maxima, sums):
    """Probabilities (KV_TILE, rows), then maxima, sums and rescaling factors, 16 of each."""
    rows = scores.shape[1]
    s = np.full(KV_TILE * rows + 48, FENCE, compute)
    at = KV_TILE * rows
    s[:at] = scores.reshape(-1)
    s[at : at + len(maxima)] = maxima
    s[at + 16 : at + 16 + len(sums)] = sums
    {"float32": run_float32, "float64": run_float64}[compute](rows, count, s, begin, end, at)
    return s[:at].reshape(KV_TILE, rows), *s[at:].reshape(3, 16)


@each("compute, bound", [("float32", 2e-6), ("float64", 4e-15)])
@each("begin, end", [(0, 64), (5, 38), (0, 1), (63, 64), (16, 48), (0, 256), (70, 150)])
@each("rows", [1, 2, 4, 8])
def test_softmax_of_rows(rng, compute, bound, rows, begin, end):
    rows = min(rows, row_unroll(compute))
    count = max(1, rows - 1)
    scores = rng.uniform(-30, 30, (KV_TILE, rows)).astype(compute)
    # What is not seen may be anything.
    scores[:begin], scores[end:] = np.nan, np.inf
    maxima = rng.uniform(-30, 30, rows).astype(compute)
    maxima[0], sums = -np.inf, rng.uniform(1, 9, rows).astype(compute)
    sums[0] = 0
    p, new, total, rescale = softmax(compute, scores, begin, end, count, maxima, sums)
    seen = scores[begin:end].astype(np.float64)
    wanted_new = np.maximum(seen.max(0), maxima)
    wanted = np.exp2(seen - wanted_new)
    wanted_rescale = np.exp2(maxima - wanted_new)
    wanted_total = sums * wanted_rescale + wanted.sum(0)
    assert (p[:begin] == 0).all()
    whole = -(-end // TILE_UNIT) * TILE_UNIT
    assert (p[end:whole] == 0).all()
    np.testing.assert_array_equal(p[whole:], scores[whole:])
    np.testing.assert_allclose(p[begin:end], wanted, rtol=bound)
    np.testing.assert_allclose(rescale[:rows], wanted_rescale, rtol=bound)
    np.testing.assert_array_equal(new[:count], wanted_new[:count])
    np.testing.assert_allclose(total[:count], wanted_total[:count], rtol=bound)
    # Rows that only fill up keep what they have.
    np.testing.assert_array_equal(new[count:rows], maxima[count:])
    np.testing.assert_array_equal(total[count:rows], sums[count:])
    assert (new[rows:] == FENCE).all()
    assert (total[rows:] == FENCE).all()


@pytest.mark.parametrize("compute", ["float32", "float64"])
def test_rows_without_scores_and_with_bad_ones(rng, compute):
    rows = min(4, row_unroll(compute))
    scores = rng.uniform(-3, 3, (KV_TILE, rows)).astype(compute)
    scores[:, 0] = -np.inf
    scores[7, 1] = np.nan
    if rows > 2:
        scores[:, 2] = -2000  # far below what was seen before
    maxima, sums = np.array([-np.inf, 1, 1, 1])[:rows], np.array([0, 1, 1, 1])[:rows]
    p, new, total, rescale = softmax(compute, scores, 0, KV_TILE, rows, maxima, sums)
    assert new[0] == -np.inf
    assert total[0] == rescale[0] == 0
    assert (p[:, 0] == 0).all()
    # NaN stays, in its own row, and does not become a maximum.
    assert np.isnan(p[7, 1])
    assert np.isnan(total[1])
    assert np.isfinite(np.delete(p[:, 1], 7)).all()
    assert new[1] == max(1, np.nanmax(scores[:, 1]))
    if rows > 2:
        assert (p[:, 2] == 0).all()
        assert (new[2], total[2], rescale[2]) == (1, 1, 1)
        assert np.isfinite(p[:, 3]).all()
        assert np.isfinite(total[3])
