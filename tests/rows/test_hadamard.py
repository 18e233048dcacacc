"""`numkv.rows.hadamard`: both ways through the transform, against its matrix in float64."""

import naive
import numpy as np
import pytest

from numkv.rows.hadamard import block_length, butterflies, butterfly, lower_of

DIMS = [1, 2, 7, 8, 12, 20, 32, 96, 128]


def without_norm(x):
    """The transform of integers, exactly: all sums and differences, not yet divided."""
    dim = len(x)
    span = dim & -dim
    return np.rint(naive.rotation(np.ones(dim)) * np.sqrt(span)) @ x


@pytest.mark.parametrize("dim", DIMS)
def test_length_of_a_span(run, dim):
    want = max(2**k for k in range(8) if dim % 2**k == 0)
    assert run(block_length)(dim) == want


@pytest.mark.parametrize("dim", DIMS)
def test_in_place(run, rng, dim):
    """Butterflies of a whole row at once: those of one span never reach into another."""
    x = rng.integers(-50, 50, dim).astype(np.float64)
    want, stride = without_norm(x), 1
    while stride < dim & -dim:
        touched = []
        for i in range(dim // 2):
            low = run(lower_of)(i, stride)
            touched += [low, low + stride]
            x[low], x[low + stride] = run(butterfly)(x[low], x[low + stride])
        assert sorted(touched) == list(range(dim))
        stride *= 2
    assert np.array_equal(x, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", DIMS)
def test_with_long_loops(run, rng, dim, dtype):
    """Of `n` spans element i of span c ends at ``i * n + c``."""
    x = rng.integers(-50, 50, dim).astype(dtype)
    want, span = without_norm(x), dim & -dim
    for _ in range(int(np.log2(span))):
        out = np.empty_like(x)
        run(butterflies)(x, out[: dim // 2], out[dim // 2 :])
        x = out
    assert np.array_equal(x.reshape(span, -1).T.reshape(-1), want)


def test_halves_of_any_length(run):
    low, high = np.zeros(3), np.zeros(3)
    run(butterflies)(np.arange(6.0), low, high)
    assert low.tolist() == [1, 5, 9]
    assert high.tolist() == [-1, -1, -1]
