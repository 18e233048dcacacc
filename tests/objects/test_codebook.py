"""Codebooks against the definition, by plain numerical integration; random orthogonal matrices."""

import math

import numpy as np
import pytest
from walked import each

from numkv.compression.codebook import edges_between, levels_for, mean_magnitude
from numkv.compression.quantiser import haar, stream

DIMS = [2, 3, 4, 5, 8, 64, 128, 513]


def density(dim, bits):
    """A fine grid on [-1, 1] with the density's weights, and the cell of each point."""
    angles = (np.arange(2_000_000) + 0.5) / 2_000_000 * np.pi - np.pi / 2
    t = np.sin(angles)
    weights = np.cos(angles) ** (dim - 2)
    cells = np.searchsorted(edges_between(levels_for(dim, bits)), t)
    return t, weights / weights.sum(), cells


@pytest.mark.slow
@pytest.mark.parametrize(
    "bits", [1, 4, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 7))]
)
@pytest.mark.parametrize("dim", DIMS)
def test_levels_are_the_means_of_their_cells(dim, bits):
    t, weights, cells = density(dim, bits)
    levels = levels_for(dim, bits)
    means = np.bincount(cells, weights * t) / np.bincount(cells, weights)
    # The grid is 1.6e-6 apart, and the narrowest cells here are 5e-4 wide.
    assert np.allclose(levels, means, rtol=0, atol=3e-6)


@each("bits", range(1, 17))
@each("dim", [1, 2, 3, 128])
def test_levels_rise_and_are_symmetric(dim, bits):
    levels = levels_for(dim, bits)
    assert levels.shape == (2**bits,)
    assert levels.dtype == np.float64
    assert np.array_equal(levels, -levels[::-1])
    assert np.all(np.abs(levels) <= 1)
    assert np.all(np.diff(levels) > 0) or dim == 1
    assert not levels.flags.writeable


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 16])
def test_three_dimensions_are_uniform(bits):
    """The height on a sphere: Archimedes."""
    n = 2**bits
    expected = (2 * np.arange(n) + 1) / n - 1
    assert np.allclose(levels_for(3, bits), expected, rtol=0, atol=1e-3 / n)


# Distortions of the best levels for N(0, 1): Max (1960), table I, to four digits.
NORMAL = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


@pytest.mark.parametrize("bits", NORMAL)
def test_many_dimensions_are_nearly_normal(bits):
    dim = 4096
    t, weights, cells = density(dim, bits)
    error = dim * np.sum(weights * (t - levels_for(dim, bits)[cells]) ** 2)
    assert error == pytest.approx(NORMAL[bits], rel=2e-3)
    # Of the normal distribution: 0.7979; 0.4528, 1.5104.
    if bits == 1:
        assert levels_for(dim, 1)[1] * math.sqrt(dim) == pytest.approx(0.7979, abs=2e-4)
    if bits == 2:
        upper = levels_for(dim, 2)[2:] * math.sqrt(dim)
        assert upper == pytest.approx([0.4528, 1.5104], abs=4e-4)


def test_one_dimension_has_two_levels():
    assert levels_for(1, 1).tolist() == [-1, 1]
    assert levels_for(1, 3).tolist() == [-1] * 4 + [1] * 4


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 128])
def test_mean_magnitude(dim):
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((200_000, dim)) if dim < 10 else rng.standard_normal((4000, dim))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    assert mean_magnitude(dim) == pytest.approx(np.abs(x).mean(), rel=5e-3)
    if dim == 1:
        assert mean_magnitude(dim) == pytest.approx(1)
    if dim == 3:
        assert mean_magnitude(dim) == pytest.approx(0.5)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_matrices_are_orthogonal(size):
    q = haar(size, stream(0, 1, 2))
    assert np.allclose(q @ q.T, np.eye(size), rtol=0, atol=1e-12)


def test_all_orientations_are_equally_likely():
    """The same moments for all elements: QR alone would favour one sign on the diagonal."""
    random = stream(3)
    q = np.stack([haar(3, random) for _ in range(6000)])
    assert np.all(np.abs(q.mean(axis=0)) < 4 / np.sqrt(3 * 6000))
    assert np.allclose((q**2).mean(axis=0), 1 / 3, atol=0.02)
    assert 0.45 < np.mean(np.linalg.det(q) > 0) < 0.55


def test_streams_are_apart_and_repeat():
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0), (2**70, 0)]
    first = [tuple(stream(*key).standard_normal(4)) for key in keys]
    assert len(set(first)) == len(keys)
    assert first == [tuple(stream(*key).standard_normal(4)) for key in keys]
