"""Codebooks for the coordinates of random unit vectors: the quantiser of Lloyd and Max, to the last digit.

Let a unit vector be uniform on the sphere. Its coordinate t has, up to a factor, the density ``(1 - t**2) ** ((d - 3) /
2)`` on [-1, 1]. That is nearly normal with variance ``1 / d`` for large d, uniform for d = 3. Normalisation and a
random rotation give any vector such coordinates. So one codebook for each (head dim, bits) fits all data, and none has
to be trained or stored. See Zandieh et al., "TurboQuant" (arXiv:2504.19874), section 3.1.

The best `n` levels for a density are the means of the density over their own cells, whose edges lie halfway between
levels: Lloyd (1957) and Max (1960). Lloyd's iteration towards that takes about ``n ** 2`` rounds, so the equations are
solved by Newton's method instead: each involves a level and its two neighbours. Everything is done in the angle
``asin(t)``, where the density is ``cos ** (d - 2)`` and smooth for every d.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

#: Most bits of a code. With more, levels lie closer together than the error of a rotation in float32.
MAX_BITS = 16

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Gauss and Legendre's nodes are enough for cells over which the density falls by exp(-40); the rest of a longer cell
# weighs less than float64 resolves.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_FALL = 40.0


@functools.lru_cache(maxsize=64)
def levels_for(head_dim: int, bits: int) -> Floats:
    """The levels that code a coordinate of a random unit vector with the least mean squared error.

    Parameters
    ----------
    head_dim : int
        Elements of the vectors, at least 1.
    bits : int
        Bits of a code, 1 to `MAX_BITS`.

    Returns
    -------
    float64 array (2 ** bits,)
        Levels in rising order, symmetric about 0; read-only. In one dimension a coordinate is 1 or -1, and so are
        all levels.
    """
    half = 1 << (bits - 1)
    upper = np.ones(half) if head_dim == 1 else _solve(head_dim, half)
    levels = np.concatenate([-upper[::-1], upper])
    levels.flags.writeable = False
    return levels


def edges_between(levels: Floats) -> Floats:
    """Edges between the cells of levels: halfway, so that a coordinate's cell is that of the nearest level.

    Parameters
    ----------
    levels : array (n,)
        Levels in rising order.

    Returns
    -------
    array (n - 1,)
    """
    return (levels[:-1] + levels[1:]) / 2


def mean_magnitude(head_dim: int) -> float:
    """Mean of ``abs(t)`` for a coordinate t of a random unit vector: about ``sqrt(2 / (pi d))``.

    Parameters
    ----------
    head_dim : int
        Elements of the vectors.

    Returns
    -------
    float
    """
    ratio = math.lgamma(head_dim / 2) - math.lgamma((head_dim + 1) / 2)
    return math.exp(ratio) / math.sqrt(math.pi)


def _solve(head_dim: int, n: int) -> Floats:
    """The `n` positive ones of 2 n levels."""
    levels = _first_guess(head_dim, n)
    for _ in range(100):
        means, by_low, by_high = _cells(head_dim, levels)
        # What is left of `levels - means`, when a level moves its two edges by half as much.
        diagonal = 1 - (by_low + by_high) / 2
        step = _solve_tridiagonal(-by_low / 2, diagonal, -by_high / 2, means - levels)
        moved = levels + step
        while moved[0] <= 0 or moved[-1] >= 1 or np.any(np.diff(moved) <= 0):
            step = step / 2
            moved = levels + step
        # In widths of a cell; Newton's method squares that with each round.
        done = np.max(np.abs(step) / np.diff(levels, prepend=0.0)) < 1e-4
        levels = moved
        if done:
            break
    return levels


def _first_guess(head_dim: int, n: int) -> Floats:
    """Levels as dense as the cube root of the density, which is where they go as they get many (Panter, Dite 1951)."""
    # A power of cos again; beyond `reach` there is nothing to speak of.
    power = (head_dim - 3) / 3 + 1
    reach = math.acos(math.exp(-_FALL / power)) if power > _FALL / 16 else math.pi / 2
    angles = np.linspace(0, reach, 8193)
    middles = (angles[:-1] + angles[1:]) / 2
    share = np.concatenate([[0.0], np.cumsum(np.cos(middles) ** power)])
    guess = np.interp((np.arange(n) + 0.5) / n * share[-1], share, angles)
    return np.asarray(np.sin(guess))


def _cells(head_dim: int, levels: Floats) -> tuple[Floats, Floats, Floats]:
    """Means of the density over the cells of positive levels, and how they change with each cell's edges.

    The first cell starts at 0 and the last ends at 1; these edges do not move, and their derivatives are 0.
    """
    power = head_dim - 2
    edges = np.concatenate([[0.0], edges_between(levels), [1.0]])
    low, high = edges[:-1], edges[1:]
    begin, end = np.arcsin(low), np.arcsin(high)
    if power:
        end = np.minimum(end, np.arccos(np.cos(begin) * math.exp(-_FALL / power)))
    width = (end - begin) / 2
    angles = begin[:, None] + width[:, None] * (1 + _NODES)
    # Relative to the density at the cell's beginning, which may itself be too small for a float.
    density = (np.cos(angles) / np.cos(begin)[:, None]) ** power * _WEIGHTS
    mass = density.sum(1) * width
    means = (density * np.sin(angles)).sum(1) * width / mass
    # The density in t is one power of cos less than in the angle.
    cosines = np.sqrt((1 - low) * (1 + low))
    by_low = (means - low) / (cosines * mass)
    by_low[0] = 0
    by_high = np.zeros(len(levels))
    by_high[:-1] = (high - means)[:-1] / mass[:-1]
    by_high[:-1] *= (cosines[1:] / cosines[:-1]) ** power / cosines[1:]
    return means, by_low, by_high


def _solve_tridiagonal(lower: Floats, diagonal: Floats, upper: Floats, right: Floats) -> Floats:
    """Solve ``lower[i] x[i - 1] + diagonal[i] x[i] + upper[i] x[i + 1] = right[i]`` by elimination."""
    a, b, c, x = (values.tolist() for values in (lower, diagonal, upper, right))
    for i in range(1, len(x)):
        factor = a[i] / b[i - 1]
        b[i] -= factor * c[i - 1]
        x[i] -= factor * x[i - 1]
    x[-1] /= b[-1]
    for i in range(len(x) - 2, -1, -1):
        x[i] = (x[i] - c[i] * x[i + 1]) / b[i]
    return np.array(x)
