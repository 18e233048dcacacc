"""Checks of numbers: integers, reals, switches, and sizes that memory is asked for by.

Messages have the form "`num_blocks`: expected …, got …".
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from numkv.errors import DimensionMismatch

#: The largest integer that kernels and index arrays can hold.
_LARGEST = 2**63 - 1


def as_int(name: str, n: Any) -> int:
    """Take an integer argument: whatever has ``__index__``, but for bools, which are no numbers here.

    Parameters
    ----------
    name : str
        What errors call it.
    n : int
        The argument.
    """
    if type(n) is int:
        return n
    if type(n) is bool or isinstance(n, np.ma.MaskedArray):
        raise TypeError(f"`{name}`: expected an integer, got {n}")
    try:
        return operator.index(n)
    except Exception:  # what an object's own `__index__` raises too
        raise TypeError(f"`{name}`: expected an integer, got {type(n).__name__}") from None


def check_size(name: str, n: Any, least: int = 0, most: int = _LARGEST) -> int:
    """Take an integer argument that is a size.

    Parameters
    ----------
    name : str
        What errors call it.
    n : int
        The argument; anything with ``__index__`` but bools.
    least, most : int
        The smallest and the largest value it may have.
    """
    size = as_int(name, n)
    if not least <= size <= most:
        bound = f"least {least}" if size < least else f"most {most}"
        raise DimensionMismatch(
            f"`{name}`: expected an integer of at {bound}, got {_short(size)}",
            expected=least if size < least else most,
            actual=size,
        )
    return size


def check_index(name: str, i: Any, size: int, *, inclusive: bool = False) -> int:
    """Take an index argument in ``[0, size)``, or ``[0, size]``; negative ones are not accepted.

    Parameters
    ----------
    name : str
        What errors call it.
    i : int
        The argument; anything with ``__index__`` but bools.
    size : int
        The bound.
    inclusive : bool
        Whether `size` itself is in range.
    """
    index = as_int(name, i)
    if not 0 <= index < size + inclusive:
        closing = "]" if inclusive else ")"
        raise IndexError(f"`{name}`: expected an index in [0, {size}{closing}, got {_short(index)}")
    return index


def check_number(
    name: str,
    x: Any,
    least: float = -math.inf,
    most: float = math.inf,
    default: float | None = None,
) -> float:
    """Take an argument that is a finite real number.

    Parameters
    ----------
    name : str
        What errors call it.
    x : float
        The argument: an int, a float, or a NumPy scalar or array of rank 0 of integers or floats.
    least, most : float
        The range it may be in, ends included.
    default : float, optional
        What None stands for; without it None is refused.
    """
    if x is None and default is not None:
        return default
    if isinstance(x, (np.generic, np.ndarray)) and x.ndim == 0 and _is_real(x.dtype):
        x = x.item() if not isinstance(x, np.ma.MaskedArray) else None
    if type(x) is bool or not isinstance(x, (int, float)):
        got = "an array" if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"`{name}`: expected a number, got {got}; convert it with float()")
    try:
        number = float(x)
    except OverflowError:
        number = math.inf
    if not (least <= number <= most and math.isfinite(number)):
        bounds = "" if least == -math.inf else f" of at least {least:g}"
        bounds += "" if most == math.inf else f"{' and' if bounds else ' of'} at most {most:g}"
        raise ValueError(f"`{name}`: expected a finite number{bounds}, got {_short(x)}")
    return number


# Bounds of numbers that kernels take as float32, multiplied by log2(e) on the way.
LARGEST_SCALE = float(np.finfo(np.float32).max) / 2
_SMALLEST_CAP = float(np.finfo(np.float32).tiny)


def check_scale(sm_scale: Any) -> float | None:
    """Take what scores are multiplied by; None stays None."""
    if sm_scale is None:
        return None
    return check_number("sm_scale", sm_scale, -LARGEST_SCALE, LARGEST_SCALE)


def check_soft_cap(cap: Any, sm_scale: float | None) -> float:
    """Take a soft cap by which every score can be divided, or 0; None is 0."""
    found = check_number("logits_soft_cap", cap, 0.0, LARGEST_SCALE, default=0.0)
    if found and (found < _SMALLEST_CAP or abs(sm_scale or 1.0) / found > LARGEST_SCALE):
        raise ValueError(
            f"`logits_soft_cap`: expected 0 for none, or a number by which scores can be divided in float32, got {cap}"
        )
    return found


def check_window(window_left: Any) -> int:
    """Take a number of earlier tokens, or -1 for all; None is -1."""
    if window_left is None:
        return -1
    try:
        return check_size("window_left", window_left, -1)
    except DimensionMismatch as error:
        raise DimensionMismatch(
            f"{error}; pass a number of earlier tokens, or -1 for all", error.expected, error.actual
        ) from None


def is_number(x: Any) -> bool:
    """Return whether an argument that may be an array or a number is to be taken by `check_number`."""
    return isinstance(x, (int, float, np.generic)) or (isinstance(x, np.ndarray) and x.ndim == 0)


def _is_real(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is one of integers or floats, those of ml_dtypes included."""
    return dtype.kind in "fiu" or (dtype.kind == "V" and dtype.isbuiltin == 2)


def check_flag(name: str, x: Any, default: bool = False) -> bool:
    """Take an argument that is a switch.

    Parameters
    ----------
    name : str
        What errors call it.
    x : bool
        The argument: a bool, of NumPy too; 0 and 1 will do.
    default : bool
        What None stands for.
    """
    if x is True or x is False:
        return x
    if x is None:
        return default
    if isinstance(x, (np.bool_, int, np.integer)) and x in (0, 1):
        return bool(x)
    got = _short(x) if isinstance(x, (int, np.integer)) else type(x).__name__
    raise TypeError(f"`{name}`: expected True or False, got {got}")


def _short(n: Any) -> str:
    """A number as text, of huge integers about how many digits they have."""
    if isinstance(n, int) and abs(n) >= 10**30:
        return f"an integer of {n.bit_length()} bits"
    return str(n)


#: Size of the address space: more bytes are refused before memory is requested.
MOST_BYTES = 2**47


def memory_of_machine() -> int:
    """Bytes of memory that the machine has; `MOST_BYTES` where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return MOST_BYTES


def check_bytes(sizes: Mapping[str, int], itemsize: float = 1) -> int:
    """Refuse sizes whose product no memory can hold; to be asked before any of it is taken.

    Whether the machine has as much memory as is asked for shows when it is taken: then it is a ``MemoryError``.

    Parameters
    ----------
    sizes : mapping of str to int
        The sizes that are multiplied, by the names of their arguments; checked integers, 0 counts as 1.
    itemsize : float
        Bytes of what there is so much of.

    Returns
    -------
    int
        The bytes.

    Raises
    ------
    DimensionMismatch
        If they are more than `MOST_BYTES`.
    """
    product = math.prod(max(1, n) for n in sizes.values())  # NumPy counts sizes beside a 0 too
    # Division, as a product of huge integers is no float.
    if product > MOST_BYTES / itemsize:
        names = " * ".join(f"`{name}`" for name in sizes)
        raise DimensionMismatch(
            f"{names}: expected sizes whose product takes at most 2^47 bytes, got "
            f"{' * '.join(_short(n) for n in sizes.values())}, of {itemsize:g} bytes each",
            expected=MOST_BYTES,
            actual=product,
        )
    return math.ceil(product * itemsize)


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp])(i?))?b?", re.IGNORECASE)


def parse_size(text: str) -> tuple[int, bool]:
    """Read a size: ``8GiB`` is 8 · 1024³ bytes, ``8GB`` 8 · 1000³, a bare number bytes.

    Parameters
    ----------
    text : str
        A number and a unit, in any case.

    Returns
    -------
    int
        Bytes.
    bool
        Whether the unit is a power of 1000.

    Raises
    ------
    ValueError
        If it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 8GiB")
    number, prefix, binary = match.groups()
    power = " kmgtp".index((prefix or " ").lower())
    size = int(Fraction(number) * (1024 if binary else 1000) ** power)
    return size, bool(prefix) and not binary


def check_nbytes(name: str, given: Any) -> int:
    """Take an argument that is a number of bytes, or a size as `parse_size` reads it."""
    return check_size(name, parse_size(given)[0] if isinstance(given, str) else given)
