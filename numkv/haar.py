"""Random orthogonal matrices, all orientations equally likely (Haar's measure), from a seed.

The Q of a Gaussian matrix's QR decomposition has that distribution once the signs are fixed so that R's diagonal is
positive: Mezzadri, "How to generate random matrices from the classical compact groups" (2007), section 5.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["haar", "stream"]

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
    q, r = np.linalg.qr(random.standard_normal((size, size)))
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)
