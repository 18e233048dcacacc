"""`Quantiser`: the codebook and the random matrices of a config, shared by all compressors that use the same ones."""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from numkv.compression.codebook import edges_between, levels_for, mean_magnitude
from numkv.compression.config import CompressorConfig
from numkv.kernels.operations import Codebook
from numkv.snapshots.snapshot import crc32_of
from numkv.targets.base import Array, Target

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
    """A random orthogonal matrix, all orientations equally likely (Haar's measure).

    The Q of a Gaussian matrix's QR decomposition is one, if R's diagonal is positive: Mezzadri, "How to generate random
    matrices from the classical compact groups" (2007), section 5. Householder's reflections leave the rest of the
    matrix Gaussian. So each reflection uses a new Gaussian vector, and no matrix is needed (Stewart 1980, "The
    efficient generation of random orthogonal matrices"). LAPACK is not used, as its last bits depend on the machine.

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


# Keys of the streams of random numbers.
_ROTATION, _SKETCH = 0, 1


@dataclass(frozen=True, eq=False)
class Quantiser:
    """The codebook, and each head's random matrices, on a target; immutable.

    Attributes
    ----------
    levels, edges : float32 array (2 ** bits,), (2 ** bits - 1,)
        The codebook of keys.
    v_levels, v_edges : float32 array
        That of values; the same arrays where they have as many bits.
    rotation, back : float32 array (num_heads, head_dim, head_dim)
        Random rotations, and their transposes.
    sketch, no_sketch : float32 array (num_heads, head_dim, projections), (num_heads, head_dim, 0)
        Random directions in the columns, scaled so that the sum over the signs needs no further factor.
    """

    levels: Array
    edges: Array
    rotation: Array
    back: Array
    sketch: Array
    no_sketch: Array
    v_levels: Array
    v_edges: Array

    @classmethod
    def make(cls, config: CompressorConfig, num_heads: int, target: Target) -> Self:
        dim, projections = config.head_dim, config.projections or 0
        rotation = np.empty((num_heads, dim, dim))
        sketch = np.empty((num_heads, dim, projections))
        for h in range(num_heads):
            rotation[h] = haar(dim, stream(config.seed, h, _ROTATION))
            # Orthogonal directions, as far as there are enough, estimate better than independent ones.
            random = stream(config.seed, h, _SKETCH)
            for first in range(0, projections, dim):
                count = min(dim, projections - first)
                sketch[h, :, first : first + count] = haar(dim, random)[:, :count]
        if projections:
            sketch /= projections * mean_magnitude(dim)

        def on_target(x: np.ndarray[Any, Any]) -> Array:
            return target.constant(np.ascontiguousarray(x, np.float32))

        def codebook(bits: int) -> tuple[Array, Array]:
            levels = levels_for(dim, bits)
            return on_target(levels), on_target(edges_between(levels))

        of_keys = codebook(config.bits)
        of_values = of_keys if config.v_bits is None else codebook(config.v_bits)
        return cls(
            *of_keys,
            on_target(rotation),
            on_target(rotation.transpose(0, 2, 1)),
            on_target(sketch),
            target.empty((num_heads, dim, 0), np.float32),
            *of_values,
        )

    @functools.cached_property
    def book(self) -> Codebook:
        """What codes mean, as kernels take it."""
        return Codebook(self.rotation, self.back, self.levels, self.v_levels, self.sketch)

    def fingerprint(self, target: Target) -> str:
        """The CRC-32 of the codebooks and the random matrices, without which codes mean nothing."""
        parts = [self.levels, self.rotation, self.sketch]
        if self.v_levels is not self.levels:
            parts.append(self.v_levels)
        return crc32_of(target.to_host(x) for x in parts if x.size)

    @property
    def nbytes(self) -> int:
        arrays = [self.levels, self.edges, self.rotation, self.back, self.sketch]
        if self.v_levels is not self.levels:
            arrays += [self.v_levels, self.v_edges]
        return sum(int(x.nbytes) for x in arrays)


# Kept as long as a compressor uses them.
_quantisers: weakref.WeakValueDictionary[Any, Quantiser] = weakref.WeakValueDictionary()


def quantiser_of(config: CompressorConfig, num_heads: int, target: Target) -> Quantiser:
    """The quantiser of a config: the same object for all compressors that need the same one."""
    key = (config, num_heads, target.key)
    found = _quantisers.get(key)
    if found is None:
        found = _quantisers[key] = Quantiser.make(config, num_heads, target)
    return found
