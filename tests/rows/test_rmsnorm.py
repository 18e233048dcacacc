"""`numkv.rows.rmsnorm`: the divisor of a row, against NumPy in float64."""

import numpy as np
import pytest

from numkv.rows.rmsnorm import root_mean_square


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("n", [1, 7, 128])
def test_root_mean_square(run, rng, n, size, dtype, bound):
    x = (rng.standard_normal(n) * size).astype(dtype)
    total = dtype(np.sum(x.astype(np.float64) ** 2))
    for eps in (0.0, 1e-5):
        got = run(root_mean_square)(total, dtype(n), dtype(eps))
        want = np.sqrt(np.mean(x.astype(np.float64) ** 2) + eps)
        assert np.isclose(got, want, rtol=bound, atol=0)


def test_a_row_of_zeros(run):
    assert np.isclose(run(root_mean_square)(np.float32(0), np.float32(4), np.float32(1e-6)), 1e-3)
