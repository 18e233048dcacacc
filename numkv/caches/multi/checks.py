"""Checks of the arguments that multi-sequence caches take: numbers, flags, and iterables of indices."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from numkv.checks import check_index
from numkv.errors import DimensionMismatch
from numkv.kinds import Kind

__all__ = [
    "MOST_POSITIONS",
    "check_below",
    "check_bytes",
    "check_flag",
    "check_indices",
    "check_integer",
    "check_layer",
    "check_position",
    "check_sequence",
]

#: Positions that there are, and more cells than a cache can have: both are stored as int32.
MOST_POSITIONS = 2**31

#: Ids of sequences and layers are below this, so that an int64 holds them.
_MOST_IDS = 2**63
#: Bytes that no machine can address.
_MOST_BYTES = 2**47


def check_sequence(name: str, i: Any) -> int:
    """Take a sequence id."""
    return _check_bounded(name, i, "an id", _MOST_IDS)


def check_layer(name: str, i: Any) -> int:
    """Take the number of a layer."""
    return _check_bounded(name, i, "a layer", _MOST_IDS)


def check_position(name: str, i: Any) -> int:
    """Take a position; one that no token can have is after all others."""
    return _check_bounded(name, i, "a position", None)


def check_integer(name: str, i: Any) -> int:
    """Take an integer of any sign."""
    try:
        return operator.index(i)
    except TypeError:
        raise TypeError(f"`{name}`: expected an integer, got {type(i).__name__}") from None


def _check_bounded(name: str, i: Any, what: str, most: int | None) -> int:
    number = check_integer(name, i)
    if number < 0:
        raise IndexError(f"`{name}`: expected {what} from 0 up, got {number}")
    if most is not None and number >= most:
        raise IndexError(f"`{name}`: expected {what} below 2**63, got {number}")
    return number


def check_below(name: str, n: int, most: int) -> int:
    """Refuse a checked size above a bound."""
    if n > most:
        raise DimensionMismatch(
            f"`{name}`: expected an integer of at most {most}, got {n}", expected=most, actual=n
        )
    return n


def check_flag(name: str, x: Any, default: bool) -> bool:
    """Take an argument that is true or false; None is the default."""
    if x is None:
        return default
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"`{name}`: expected True or False, got {x!r}")
    return bool(x)


def check_indices(name: str, x: Any, size: int) -> tuple[int, ...]:
    """Take an iterable of indices in ``[0, size)``; None has none of them.

    One that names more of them than there are may go on for ever, and is refused.
    """
    if x is None:
        return ()
    try:
        given = iter(x)
    except TypeError:
        raise TypeError(
            f"`{name}`: expected an iterable of integers, got {type(x).__name__}"
        ) from None
    found: list[int] = []
    for i in given:
        found.append(check_index(name, i, size))
        if len(found) > size:
            raise DimensionMismatch(
                f"`{name}`: expected at most {size} indices, one for each token of the batch, got more",
                expected=size,
            )
    return tuple(found)


def check_bytes(name: str, rows: Sequence[int], sides: Sequence[tuple[Kind, int]]) -> None:
    """Refuse buffers that no machine could hold.

    Parameters
    ----------
    name : str
        The argument that their size follows from.
    rows : sequence of int
        How many rows, as sizes whose product it is.
    sides : sequence of tuple of Kind and int
        Kind and elements of a row, of K and of V.
    """
    size = math.prod(rows) * sum(kind.row_bytes(dim) for kind, dim in sides)
    if size > _MOST_BYTES:
        raise DimensionMismatch(
            f"`{name}`: expected a layer of at most {_MOST_BYTES} bytes, got {size} for {math.prod(rows)} rows; "
            "make the cache smaller"
        )
