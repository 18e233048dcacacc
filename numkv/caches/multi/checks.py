"""Checks of the arguments that multi-sequence caches take: numbers, and iterables of indices."""

from __future__ import annotations

from typing import Any

from numkv.errors import DimensionMismatch
from numkv.numbers import as_int, check_index

#: Positions that there are, and more cells than a cache can have: both are stored as int32.
MOST_POSITIONS = 2**31

#: Ids of sequences and layers are below this, so that an int64 holds them.
_MOST_IDS = 2**63
#: Indices that an iterable may name beyond one for each token.
_MORE = 2**18


def check_sequence(name: str, i: Any) -> int:
    """Take a sequence id."""
    return _check_bounded(name, i, "an id", _MOST_IDS)


def check_layer(name: str, i: Any) -> int:
    """Take the number of a layer."""
    if type(i) is int and 0 <= i < _MOST_IDS:
        return i  # what most are
    return _check_bounded(name, i, "a layer", _MOST_IDS)


def check_position(name: str, i: Any) -> int:
    """Take a position; one that no token can have is after all others."""
    return _check_bounded(name, i, "a position", _MOST_IDS + 1)


def check_integer(name: str, i: Any) -> int:
    """Take an integer of any sign, bools are none; one that no int64 holds becomes the next that it does."""
    return max(-_MOST_IDS, min(_MOST_IDS, as_int(name, i)))


def _check_bounded(name: str, i: Any, what: str, most: int) -> int:
    number = check_integer(name, i)
    if number < 0:
        raise IndexError(f"`{name}`: expected {what} from 0 up, got {number}")
    if number >= most:
        raise IndexError(f"`{name}`: expected {what} below 2**63, got one of {number} or more")
    return number


def check_indices(name: str, x: Any, size: int) -> tuple[int, ...]:
    """Take an iterable of indices in ``[0, size)``; None has none of them.

    They may be named more than once. An iterable that goes on for ever is refused.
    """
    if x is None or (type(x) is tuple and not x):
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
        if len(found) > size + _MORE:
            raise DimensionMismatch(
                f"`{name}`: expected indices of the {size} tokens of the batch, got more than {size + _MORE}",
                expected=size,
            )
    return tuple(found)
