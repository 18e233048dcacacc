"""Checks of the numbers that multi-sequence caches take: sequence ids and positions."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["check_integer", "check_position", "check_sequence"]


def check_sequence(name: str, i: Any) -> int:
    """Take a sequence id."""
    return _check_not_negative(name, i, "an id")


def check_position(name: str, i: Any) -> int:
    """Take a position."""
    return _check_not_negative(name, i, "a position")


def check_integer(name: str, i: Any) -> int:
    """Take an integer of any sign."""
    try:
        return operator.index(i)
    except TypeError:
        raise TypeError(f"`{name}`: expected an integer, got {type(i).__name__}") from None


def _check_not_negative(name: str, i: Any, what: str) -> int:
    number = check_integer(name, i)
    if number < 0:
        raise IndexError(f"`{name}`: expected {what} from 0 up, got {number}")
    return number
