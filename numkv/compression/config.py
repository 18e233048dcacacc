"""`CompressorConfig`: how vectors are compressed."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from numkv.compression.codebook import MAX_BITS

__all__ = ["CompressorConfig"]


@dataclass(frozen=True)
class CompressorConfig:
    """How vectors are compressed.

    Attributes
    ----------
    head_dim : int
        Elements of a vector, at least 1.
    bits : int
        Bits of an element, 1 to 16. At 4, head dim 128, a vector takes 68 bytes instead of 512, and its relative mean
        squared error is 0.0093; each further bit divides that by about four.
    projections : int, optional
        Signs in the sketch of a key's residual (the key minus its decoded codes), which makes `attention_scores`
        unbiased; it takes a bit for each, and 4 bytes. As many signs as `head_dim` nearly halve the mean squared error
        of scores at 4 bits; an eighth of that makes it eleven times larger, as few signs are noisy. Where a bias does
        no harm, one more bit per element is the better use of memory. None for no sketch.
    seed : int
        Seed of the rotations and the sketch, from 0 up.

    Raises
    ------
    ValueError
        If a number is out of range, or no integer.
    """

    head_dim: int
    bits: int = 4
    projections: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_integer("head_dim", self.head_dim, 1)
        _check_integer("bits", self.bits, 1, MAX_BITS)
        if self.projections is not None:
            _check_integer("projections", self.projections, 1)
        _check_integer("seed", self.seed, 0)


def _check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    bounds = f"of at least {least}" if most is None else f"in [{least}, {most}]"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise ValueError(f"`{name}`: expected an integer {bounds}, got {value!r}")
