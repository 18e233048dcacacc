"""Checks of arguments, with one message form: "`k_new`: expected float32 (2, 4, 5, 8), got …; …".

They run before anything is changed and cost about a microsecond an array. What is taken and what is refused is said in
docs/arguments.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.arrays import AnyArray, Array, HostArray
from numkv.errors import DimensionMismatch, NotSupported, NumkvError, UnsupportedDType
from numkv.targets.base import Target, masked

#: An expected shape: numbers, and names of sizes that the caller is free to choose.
Shape = tuple[int | str, ...]
#: A caller's mark of rows that outlive the process: a text, or facts by name.
Mark = str | Mapping[str, str | int | float | bool | None]
#: Arguments for results: these are never converted, as a copy would take the results.
_WRITTEN = ("out", "q_out")


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


def _remedy(name: str, actual: tuple[int, ...], shape: Shape) -> str:
    """Return advice for an array of another shape, by the usual mistakes."""
    if name in _WRITTEN:
        return "make one of this shape"
    if len(actual) == len(shape):
        swaps = [(i, j) for j in range(len(shape) - 1) for i in range(j)]
        for i, j in swaps:
            axes = list(range(len(actual)))
            axes[i], axes[j] = j, i
            if _fits(tuple(actual[a] for a in axes), shape):
                return (
                    f"its axes {i} and {j} are the other way round: pass {name}.swapaxes({i}, {j})"
                )
        heads = shape[-2] if len(shape) > 1 else 0
        if (
            name in ("k", "v")
            and isinstance(heads, int)
            and heads
            and not actual[-2] % heads
            and _fits((*actual[:-2], heads, actual[-1]), shape)
        ):
            return f"pass the {heads} kv heads as the model has them: q heads share them, none is repeated"
    elif len(actual) == len(shape) + 1:
        for axis in reversed(range(len(actual))):
            if actual[axis] == 1 and _fits((*actual[:axis], *actual[axis + 1 :]), shape):
                index = ", ".join([":"] * axis + ["0"])
                return f"it has an axis too many: pass {name}[{index}]"
        rest = actual[1:]
        if actual[0] == 1 and len(rest) > 2 and _fits((rest[1], rest[0], *rest[2:]), shape):
            return f"it is (batch, heads, tokens, …): pass {name}[0].swapaxes(0, 1)"
    elif len(actual) + 1 == len(shape):
        if _fits((1, *actual), shape):
            return f"an axis is missing: pass {name}[None]"
        width = shape[-2:]
        if all(isinstance(n, int) for n in width) and actual[-1:] == (math.prod(width),):
            return f"its heads are one axis: pass {name}.reshape(-1, {width[0]}, {width[1]})"
    if name == "cu_seqlens_q" and len(actual) == 1:
        return (
            "pass where each sequence's queries begin, and their number: [0, *numpy.cumsum(counts)]"
        )
    return "pass an array of this shape"


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
        if not dtype.isnative:
            remedy = f"its bytes are in the other order: pass {name}.astype({name}.dtype.newbyteorder('='))"
        elif name in _WRITTEN:
            remedy = f"make one of {dtypes[0]}"
        else:
            remedy = f"convert it to {dtypes[0] if len(dtypes) == 1 else 'one of these'}"
        raise UnsupportedDType(
            _message(name, f"{' or '.join(map(str, dtypes))} {_describe(shape)}", x, remedy)
        )
    if actual != shape and not _fits(actual, shape):
        raise DimensionMismatch(
            _message(name, f"{x.dtype} {_describe(shape)}", x, _remedy(name, actual, shape)),
            expected=shape,
            actual=actual,
        )
    if x.strides[-1] != dtype.itemsize and actual[-1] > 1 and x.size:
        remedy = f"pass a contiguous copy of {name}"
        if name in _WRITTEN:
            remedy = "make a contiguous one, and transpose the result"
        raise NotSupported(
            f"`{name}`: expected {x.dtype} {_describe(shape)} with a contiguous last axis, got a "
            f"step of {x.strides[-1]} bytes along it; {remedy}"
        )
    if not _is_aligned(x, dtype.itemsize):
        raise NotSupported(
            f"`{name}`: expected {x.dtype} {_describe(shape)} whose elements lie at multiples of "
            f"{dtype.itemsize} bytes, got steps of {tuple(x.strides)} bytes or an odd address, as fields "
            f"of packed records have them; pass a copy of {name}"
        )
    return x


def is_plain(x: Any, ndim: int) -> bool:
    """Return whether an argument is what most are: a NumPy array of so many axes, aligned, with a contiguous last axis.

    `check_array` has nothing to say about the layout of such an array on the CPU, and takes longer to find that out.
    """
    return (
        type(x) is np.ndarray and x.ndim == ndim and x.strides[-1] == x.itemsize and x.flags.aligned
    )


def _is_aligned(x: Array, itemsize: int) -> bool:
    """Return whether elements lie at multiples of their size, as kernels count in elements."""
    if isinstance(x, np.ndarray):
        return x.flags.aligned
    return not x.size or all(
        step % itemsize == 0 for n, step in zip(x.shape, x.strides, strict=True) if n > 1
    )


def check_writable(name: str, x: Array) -> None:
    """Refuse as a place to write to: a read-only NumPy array, and an array whose elements share places.

    Parameters
    ----------
    name : str
        What errors call it.
    x : array
        A checked array.
    """
    if isinstance(x, np.ndarray):
        if not x.flags.writeable:
            raise NotSupported(
                f"`{name}`: expected a writable array, got a read-only one; pass a copy"
            )
        if x.flags.c_contiguous:
            return
    # Steps, the shortest first: each has to pass what it steps over.
    passed = int(x.dtype.itemsize)
    steps = [(abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1]
    for step, n in sorted(steps) if x.size else ():
        if step < passed:
            raise NotSupported(
                f"`{name}`: expected an array whose elements lie in places of their own, as it is written to, got "
                f"steps of {tuple(x.strides)} bytes for {_describe(tuple(x.shape))}; pass a copy"
            )
        passed += (n - 1) * step


def check_apart(target: Target, written: Mapping[str, Array], read: Mapping[str, Array]) -> None:
    """Refuse arrays that are written to and share memory with another, which is read or written to.

    Parameters
    ----------
    target : Target
        Where they are.
    written, read : mapping of str to array
        Checked arrays by the names that errors call them. An array of no elements shares nothing.
    """
    outputs = list(written.items())
    for i, (name, x) in enumerate(outputs):
        for other, y in (*read.items(), *outputs[:i]):
            if target.share_memory(x, y):
                raise NotSupported(
                    f"`{name}`: expected memory of its own, as it is written to, got memory that `{other}` has too; "
                    f"pass a copy of one of them"
                )


_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))


def check_integers(
    target: Target, name: str, x: Any, shape: Shape, dtypes: tuple[np.dtype[Any], ...] = _INTEGERS
) -> AnyArray:
    """Take an argument of indices or lengths; on the CPU a list of ints will do, or a list of such lists.

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
        The integer dtypes it may have; a list gets the last of them.
    """
    if (
        type(x) is np.ndarray and x.shape == shape and x.dtype in dtypes and x.ndim == 1
        and target.values_on_host and x.flags.c_contiguous and x.flags.aligned
    ):  # fmt: skip
        return x  # what most are
    if isinstance(x, (list, tuple)) and target.values_on_host:
        x = _from_list(name, x, dtypes[-1])
        if x.dtype in dtypes and _fits((1, *x.shape), shape):  # a list has no axes to add by None
            raise DimensionMismatch(
                _message(
                    name, f"{x.dtype} {_describe(shape)}", x, f"an axis is missing: pass [{name}]"
                ),
                expected=shape,
                actual=x.shape,
            )
    elif isinstance(x, (bool, int, float)) and not isinstance(x, np.generic):
        remedy = "pass a list of integers"
        if len(shape) > 1:
            remedy += " for each sequence"
        elif type(x) is int:
            remedy = f"pass [{x}]"
        raise UnsupportedDType(
            f"`{name}`: expected {' or '.join(map(str, dtypes))} {_describe(shape)}, got the one number {x}; {remedy}"
        )
    return check_array(target, name, x, dtypes, shape)


def _from_list(name: str, x: Any, dtype: np.dtype[Any]) -> HostArray:
    """A list as an array; of integers in `dtype`, of anything else in what NumPy makes of it."""
    given = host_array(name, x)
    if not given.size:
        return given.astype(dtype)
    if given.dtype.kind not in "iu":
        return given
    bounds = np.iinfo(dtype)
    for number in (given.min(), given.max()):
        if not bounds.min <= number <= bounds.max:
            raise UnsupportedDType(f"`{name}`: expected {dtype} numbers, got {number}")
    return given.astype(dtype)


def host_array(name: str, x: Any) -> HostArray:
    """Take an argument that anything may be, as long as NumPy makes an array in host memory of it.

    Parameters
    ----------
    name : str
        What errors call it.
    x : array-like
        The argument. An empty list, which has no dtype of its own, is one of integers.
    """
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise masked(name)
    try:
        if getattr(x, "__cuda_ndarray__", False):
            raise NotSupported(
                f"`{name}`: expected an array in host memory, got one on the CUDA device; bring it to the host first"
            )
        made = np.asarray(x)
    except (MemoryError, NumkvError):
        raise
    except Exception as error:  # what the object itself raises too
        raise UnsupportedDType(
            f"`{name}`: expected an array or a list of integers, got {type(x).__name__}: {error}"
        ) from error
    return made.astype(np.int32) if made.size == 0 and not isinstance(x, np.ndarray) else made


def check_kept(name: str, x: Any, size: int, ndim: int | None = 1) -> NDArray[np.int64]:
    """Take an argument that says which tokens are kept, on the host: indices that rise, below `size`.

    Parameters
    ----------
    name : str
        What errors call it.
    x : object
        The argument.
    size : int
        How many tokens there are.
    ndim : int or None
        1, or None where there may be a row of them for each layer too.
    """
    given = host_array(name, x)
    if ndim is None:
        ndim = 2 if given.ndim == 2 else 1
    if given.ndim != ndim:
        raise DimensionMismatch(
            _message(name, "integers (n,)", given, "pass the indices of the tokens"),
            expected=("n",),
            actual=given.shape,
        )
    # An empty list has no dtype of its own.
    if given.dtype.kind not in "iu" and (given.size or given.dtype.kind != "f"):
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


def check_mark(name: str, mark: Any) -> Any:
    """A mark as JSON gives it back: None, a text, or a dictionary of texts, numbers and None.

    Raises
    ------
    TypeError
        If it is something else.
    ValueError
        If a number in it is not finite.
    """
    if mark is None or isinstance(mark, str):
        return mark
    plain = isinstance(mark, Mapping) and all(
        isinstance(key, str) and (value is None or isinstance(value, str | int | float))
        for key, value in mark.items()
    )
    if not plain:
        raise TypeError(
            f"`{name}`: expected a text, or texts, numbers and None by name, got {mark!r}"
        )
    if any(isinstance(value, float) and value - value != 0 for value in mark.values()):
        raise ValueError(f"`{name}`: expected finite numbers, got {mark!r}")
    return dict(mark)
