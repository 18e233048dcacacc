"""`CompressorConfig`: how vectors are compressed; `CodesKind`: what that is called as a storage kind."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import Any

from numkv.compression.codebook import MAX_BITS
from numkv.rows.codes import packed_bytes

#: Bounds that keep the random matrices of a head within memory, and their making within minutes.
MAX_HEAD_DIM, MAX_PROJECTIONS = 4096, 2**20


@dataclass(frozen=True)
class CompressorConfig:
    """How vectors are compressed.

    Attributes
    ----------
    head_dim : int
        Elements of a vector, 1 to 4,096.
    bits : int
        Bits of an element, 1 to 16. At 4, head dim 128, a vector takes 68 bytes instead of 512, and its relative mean
        squared error is 0.0093; each further bit divides that by about four.
    projections : int, optional
        Signs in the sketch of a key's residual (the key minus its decoded codes), which makes `attention_scores`
        unbiased; it takes a bit for each, and 4 bytes. As many signs as `head_dim` nearly halve the mean squared error
        of scores at 4 bits; an eighth of that makes it eleven times larger, as few signs are noisy. Where a bias does
        no harm, one more bit per element is the better use of memory. None for no sketch; 2**20 at most.
    seed : int
        Seed of the rotations and the sketch, from 0 up.
    v_bits : int, optional
        Bits of an element of a value; `bits` then applies to keys alone. An error in a key moves weights, one in a
        value only changes the sum, so values often need fewer bits. None means `bits`; a number equal to `bits`
        becomes None.

    Raises
    ------
    ValueError
        If a number is out of range, or no integer; True and False are none.
    """

    head_dim: int
    bits: int = 4
    projections: int | None = None
    seed: int = 0
    v_bits: int | None = None

    def __post_init__(self) -> None:
        # As plain integers: sums of small ones of NumPy overflow.
        checked: dict[str, int | None] = {
            "head_dim": _check_integer("head_dim", self.head_dim, 1, MAX_HEAD_DIM),
            "bits": _check_integer("bits", self.bits, 1, MAX_BITS),
            "seed": _check_integer("seed", self.seed, 0),
        }
        if self.projections is not None:
            most = MAX_PROJECTIONS
            checked["projections"] = _check_integer("projections", self.projections, 1, most)
        if self.v_bits is not None:
            v_bits = _check_integer("v_bits", self.v_bits, 1, MAX_BITS)
            checked["v_bits"] = None if v_bits == checked["bits"] else v_bits
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> CodesKind:
        """How keys are stored."""
        return CodesKind(self.bits, self.projections)

    @property
    def v_kind(self) -> CodesKind:
        """How values are stored."""
        return CodesKind(self.bits if self.v_bits is None else self.v_bits)


def _check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    number = None
    if type(value) is not bool:
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        # Python refuses to write out huge integers.
        huge = number is not None and number.bit_length() > 100
        got = f"one of {number.bit_length()} bits" if number is not None and huge else repr(value)
        raise ValueError(f"`{name}`: expected an integer {bounds}, got {got}")
    return number


@dataclass(frozen=True)
class CodesKind:
    """The storage kind of compressed vectors; ``str(kind)`` is ``"codes4"``, or ``"codes4+sketch16"``.

    Unlike a `numkv.Kind` it names no dtype: a row is codes of a codebook, and means something with its head's random
    matrices only.

    Attributes
    ----------
    bits : int
        Bits of an element.
    projections : int, optional
        Signs in the sketch of the residual; None for no sketch.
    """

    bits: int
    projections: int | None = None

    @property
    def name(self) -> str:
        """``"codes"``, the bits, and the sketch if there is one."""
        sketch = "" if self.projections is None else f"+sketch{self.projections}"
        return f"codes{self.bits}{sketch}"

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one stored vector, its scale and its sketch included.

        Parameters
        ----------
        head_dim : int
            Elements of the vector.

        Returns
        -------
        int
        """
        sketch = packed_bytes(self.projections, 1) + 4 if self.projections else 0
        return int(packed_bytes(head_dim, self.bits) + 4 + sketch)

    def __str__(self) -> str:
        return self.name
