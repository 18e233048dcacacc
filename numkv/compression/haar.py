"""Random orthogonal matrices, all orientations equally likely (Haar's measure), from a seed.

The Q of a Gaussian matrix's QR decomposition is one, if signs are such that R's diagonal is positive: Mezzadri, "How to
generate random matrices from the classical compact groups" (2007), section 5. Householder's reflections leave the part
of the matrix that they have not reached yet Gaussian, so there need be no matrix: each reflection gets a Gaussian
vector of its own (Stewart 1980, "The efficient generation of random orthogonal matrices"). LAPACK is left out, as its
last bits depend on the machine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def stream(seed: int, *key: int) -> np.random.Generator:
    """The random numbers of a seed that belong to a key; streams of different keys have nothing in common.

    Parameters
    ----------
    seed : int
        Any number from 0 up.
    key : int
        What the numbers are for.

    Returns
    -------
    numpy.random.Generator
        PCG64, the same in every process.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def haar(size: int, random: np.random.Generator) -> Floats:
    """A random orthogonal matrix.

    Parameters
    ----------
    size : int
        Rows and columns.
    random : numpy.random.Generator
        Where the numbers come from.

    Returns
    -------
    float64 array (size, size)
    """
    q = np.eye(size)
    signs = np.empty(size)  # of R's diagonal
    for k in range(size - 1, -1, -1):
        v = random.standard_normal(size - k)
        signs[k] = -1 if v[0] >= 0 else 1
        v[0] -= signs[k] * math.sqrt(np.sum(v * v))
        v *= math.sqrt(2 / np.sum(v * v))
        rest = q[k:, k:]
        rest -= v[:, None] * np.sum(v[:, None] * rest, axis=0)
    return q * signs
