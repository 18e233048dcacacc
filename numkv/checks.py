"""Checks of arguments, with one message form: "`k_new`: expected float32 (2, 4, 5, 8), got …; …".

They run before anything is changed and cost about a microsecond an array.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.arrays import AnyArray, Array
from numkv.errors import DimensionMismatch, NotSupported, UnsupportedDType
from numkv.targets.base import Target

__all__ = [
    "MOST_BYTES",
    "Shape",
    "check_array",
    "check_bytes",
    "check_flag",
    "check_index",
    "check_integers",
    "check_kept",
    "check_number",
    "check_size",
    "check_writable",
    "is_plain",
]

#: What a shape must be: numbers, and names of sizes that the caller is free to choose.
Shape = tuple[int | str, ...]


def _describe(shape: Shape) -> str:
    inner = ", ".join(str(n) for n in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


def _message(name: str, expected: str, x: Array, remedy: str) -> str:
    return f"`{name}`: expected {expected}, got {x.dtype} {_describe(x.shape)}; {remedy}"


def _fits(actual: tuple[int, ...], shape: Shape) -> bool:
    if len(actual) != len(shape):
        return False
    for n, expected in zip(actual, shape, strict=True):  # noqa: SIM110 - half the time of all()
        if type(expected) is int and n != expected:
            return False
    return True


def check_array(
    target: Target, name: str, x: Any, dtypes: tuple[np.dtype[Any], ...], shape: Shape
) -> AnyArray:
    """Take an array argument: of this target, one of `dtypes`, of `shape`, with a contiguous last axis, aligned.

    Parameters
    ----------
    target : Target
        Where it must be.
    name : str
        What errors call it.
    x : object
        The argument.
    dtypes : tuple of numpy.dtype
        The dtypes it may have.
    shape : tuple of int or str
        The shape it must have; a string stands for any size, and says in messages which.

    Returns
    -------
    array
        `x` as an array of the target, not copied.
    """
    x = target.accept(x, name)
    dtype, actual = x.dtype, tuple(x.shape)
    if dtype not in dtypes:
        raise UnsupportedDType(
            _message(
                name,
                f"{' or '.join(str(d) for d in dtypes)} {_describe(shape)}",
                x,
                "convert it, for example with .astype",
            )
        )
    if actual != shape and not _fits(actual, shape):
        raise DimensionMismatch(
            _message(name, f"{x.dtype} {_describe(shape)}", x, "pass an array of this shape"),
            expected=shape,
            actual=actual,
        )
    if x.strides[-1] != dtype.itemsize and actual[-1] > 1 and x.size:
        raise NotSupported(
            f"`{name}`: expected {x.dtype} {_describe(shape)} with a contiguous last axis, got a "
            f"step of {x.strides[-1]} bytes along it; pass numpy.ascontiguousarray({name})"
        )
    if not _is_aligned(x, dtype.itemsize):
        raise NotSupported(
            f"`{name}`: expected {x.dtype} {_describe(shape)} whose elements lie at multiples of "
            f"{dtype.itemsize} bytes, got steps of {tuple(x.strides)} bytes or an odd address, as fields "
            f"of packed records have them; pass {name}.copy()"
        )
    return x


def is_plain(x: Any, ndim: int) -> bool:
    """Whether an argument is what most are: a NumPy array of so many axes, aligned, with a contiguous last axis.

    `check_array` has nothing to say about the layout of such an array on the CPU, and takes longer to find that out.
    """
    return (
        type(x) is np.ndarray and x.ndim == ndim and x.strides[-1] == x.itemsize and x.flags.aligned
    )


def _is_aligned(x: Array, itemsize: int) -> bool:
    """Whether elements lie at multiples of their size, as kernels count in elements."""
    if isinstance(x, np.ndarray):
        return x.flags.aligned
    return not x.size or all(
        step % itemsize == 0 for n, step in zip(x.shape, x.strides, strict=True) if n > 1
    )


def check_writable(name: str, x: Array) -> None:
    """Refuse a read-only NumPy array as a place to write to."""
    flags = getattr(x, "flags", None)
    if isinstance(x, np.ndarray) and flags is not None and not flags.writeable:
        raise NotSupported(f"`{name}`: expected a writable array, got a read-only one; pass a copy")


_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))


def check_integers(
    target: Target, name: str, x: Any, shape: Shape, dtypes: tuple[np.dtype[Any], ...] = _INTEGERS
) -> AnyArray:
    """Take an argument of indices or lengths; on the CPU a list of ints will do.

    Parameters
    ----------
    target : Target
        Where it must be.
    name : str
        What errors call it.
    x : object
        The argument.
    shape : tuple of int or str
        See `check_array`.
    dtypes : tuple of numpy.dtype
        The integer dtypes it may have.
    """
    if (
        type(x) is np.ndarray and x.shape == shape and x.dtype in dtypes and x.ndim == 1
        and target.values_on_host and x.flags.c_contiguous and x.flags.aligned
    ):  # fmt: skip
        return x  # what most are
    if isinstance(x, (list, tuple)) and target.values_on_host:
        x = np.asarray(x) if len(x) else np.zeros(0, dtypes[-1])
    return check_array(target, name, x, dtypes, shape)


#: The largest integer that kernels and index arrays can hold.
_LARGEST = 2**63 - 1


def _as_int(name: str, n: Any) -> int:
    """An integer argument: whatever has ``__index__``, but for bools, which are no numbers here."""
    if type(n) is bool:
        raise TypeError(f"`{name}`: expected an integer, got {n}")
    try:
        return operator.index(n)
    except TypeError:
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
    size = _as_int(name, n)
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
    index = _as_int(name, i)
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
        x = x.item()
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


def _is_real(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of integers or floats, those of ml_dtypes included."""
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


#: What an address can say: more bytes than that are refused before memory is asked for.
MOST_BYTES = 2**47


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


def check_kept(name: str, x: Any, size: int, ndim: int = 1) -> NDArray[np.int64]:
    """Take an argument that says which tokens are kept, on the host: indices that rise, below `size`.

    Parameters
    ----------
    name : str
        What errors call it.
    x : object
        The argument.
    size : int
        How many tokens there are.
    ndim : int
        1, or 2 for a row of them for each layer.
    """
    given = np.asarray(x)
    if given.ndim != ndim:
        shape = ("n",) if ndim == 1 else ("num_layers", "n")
        raise DimensionMismatch(
            _message(name, f"integers {_describe(shape)}", given, "pass the indices of the tokens"),
            expected=shape,
            actual=given.shape,
        )
    if given.dtype.kind not in "iu" and given.size:
        raise UnsupportedDType(
            f"`{name}`: expected integers, got {given.dtype}; pass the indices of the tokens to keep, "
            "of a mask numpy.flatnonzero(mask)"
        )
    outside = given[(given < 0) | (given >= size)] if given.size else given
    if outside.size:
        raise IndexError(
            f"`{name}`: expected indices in [0, {size}), got {outside.flat[0]}; name stored tokens only"
        )
    kept = given.astype(np.int64)
    falls = kept[..., 1:] <= kept[..., :-1]
    if falls.any():
        at = np.argwhere(falls)[0]
        before, after = kept[tuple(at)], kept[(*at[:-1], at[-1] + 1)]
        raise ValueError(
            f"`{name}`: expected indices in rising order, each once, got {after} after {before}; "
            "sort them"
        )
    return kept
