"""Arguments as nobody should pass them, by family: for each valid one the ways in which it may be odd or wrong.

A variant says what is passed, and what a plain caller would have passed in its place: the same numbers as a contiguous
array of the machine's own byte order, an int for anything that is one. If the call is accepted it has to do what the
plain one does. Where there is no plain value that means the same, the call must be refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = [
    "FLOATS",
    "INTEGERS",
    "OMIT",
    "REFUSED",
    "SAME",
    "CallersOwn",
    "Hostile",
    "none",
    "plain_array",
]


class _Mark:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


#: The plain call leaves the argument out: None means the default.
OMIT = _Mark("left out")
#: There is no plain call: nobody may accept this.
REFUSED = _Mark("to be refused")
#: The plain call passes the same.
SAME = _Mark("the same")


class Hostile(NamedTuple):
    """A variant of an argument."""

    value: Any
    plain: Any = SAME
    #: Whether results may be NaN or infinite.
    finite: bool = True


class CallersOwn(Exception):
    """What code of the caller's own raises, in the middle of a call: it goes through as it is."""


class Sub(np.ndarray):
    """A subclass that means nothing more than an array."""


def plain_array(x: np.ndarray) -> np.ndarray:
    """The same numbers, contiguous, in the machine's own byte order."""
    return np.array(np.asarray(x).astype(x.dtype.newbyteorder("=")), order="C", copy=True)


# ---------------------------------------------------------------- layouts of arrays


def _unaligned(x, d):
    memory = np.zeros(x.nbytes + 1, np.uint8)
    y = memory[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def _records(x, d):
    """Rows as fields of packed records: the last axis is contiguous, the others are no multiple of the item."""
    if x.ndim < 1 or not x.size:
        return None
    y = np.zeros(x.shape[:-1], [("flag", "u1"), ("x", x.dtype, x.shape[-1:])])
    y["x"] = x
    return y["x"]


def _records_of_one(x, d):
    """Elements as fields of packed records."""
    y = np.zeros(x.shape, [("flag", "u1"), ("x", x.dtype)])
    y["x"] = x
    return y["x"]


def _backwards(x, d):
    return x[::-1].copy()[::-1] if x.ndim else None


def _last_backwards(x, d):
    return x[..., ::-1].copy()[..., ::-1] if x.ndim else None


def _every_second(x, d):
    return np.repeat(x, 2, -1)[..., ::2] if x.ndim else None


def _every_second_row(x, d):
    return np.repeat(x, 2, 0)[::2] if x.ndim > 1 else None


def _with_gaps(x, d):
    """A part of a larger array in every axis."""
    y = np.zeros([n + 2 for n in x.shape], x.dtype)
    inner = y[(..., *(slice(1, 1 + n) for n in x.shape))]
    inner[...] = x
    return inner


def _fortran(x, d):
    return np.asfortranarray(x)


def _transposed(x, d):
    """Axes in another order in memory, the last one contiguous."""
    if x.ndim < 3:
        return None
    return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)


def _broadcast(x, d):
    return np.broadcast_to(x[:1], x.shape) if x.ndim and x.shape[0] else None


def _broadcast_writable(x, d):
    """The same memory for all rows, and no word that it is read-only."""
    if not x.ndim or not x.shape[0]:
        return None
    y = x[:1].copy()
    return np.lib.stride_tricks.as_strided(y, x.shape, (0, *y.strides[1:]))


def _windows(x, d):
    """Rows that overlap: each begins an element after the one before it."""
    if x.ndim < 2 or x.shape[0] < 2 or not x.size:
        return None
    inner = int(np.prod(x.shape[1:]))
    y = np.resize(x, inner + x.shape[0])
    strides = (y.itemsize, *np.empty(x.shape[1:], x.dtype).strides)
    return np.lib.stride_tricks.as_strided(y, x.shape, strides)


def _swapped_bytes(x, d):
    order = x.dtype.newbyteorder()
    return None if order == x.dtype or x.dtype.kind == "V" else x.astype(order)


def _subclass(x, d):
    return x.copy().view(Sub)


def _read_only(x, d):
    y = x.copy()
    y.flags.writeable = False
    return y


def _unmasked(x, d):
    return np.ma.asarray(x.copy())


def _interface(x, d):
    """No array, but something that hands one over."""

    class Holder:
        def __init__(self, y):
            self.kept = y
            self.__array_interface__ = y.__array_interface__

    return None if x.dtype.kind == "V" else Holder(x.copy())


def _dlpack(x, d):
    class Holder:
        def __init__(self, y):
            self.kept = y

        def __dlpack__(self, *args, **kwargs):
            return self.kept.__dlpack__(*args, **kwargs)

        def __dlpack_device__(self):
            return self.kept.__dlpack_device__()

    return None if x.dtype.kind == "V" else Holder(x.copy())


def _own(x, d):
    """The cache's own buffers, where a view of them fits."""
    if x is d.given.get("out") and d.given.get("layer"):
        return None  # the first buffers are those of layer 0, which this call does not read: that is not refused
    for y in d.own_arrays():
        if y.size and y.dtype == x.dtype and y.ndim >= x.ndim:
            z = y[(0,) * (y.ndim - x.ndim)]
            if all(a >= b for a, b in zip(z.shape, x.shape, strict=True)):
                return z[tuple(slice(n) for n in x.shape)]
            if z.ndim == 3 and all(
                a >= b for a, b in zip(z.swapaxes(0, 1).shape, x.shape, strict=True)
            ):
                return z.swapaxes(0, 1)[tuple(slice(n) for n in x.shape)]
    return None


def _other(x, d):
    """Another argument of the same call."""
    others = [y for y in d.arrays() if y is not x and y.dtype == x.dtype and y.shape == x.shape]
    return d.choice(others) if others else None


def _overlapping(x, d):
    """Memory that overlaps another argument's, a row further."""
    for y in d.arrays():
        if y is not x and y.dtype == x.dtype and y.shape == x.shape and y.ndim and len(y) > 1:
            memory = np.empty((len(y) + 1, *y.shape[1:]), y.dtype)
            memory[:-1], memory[-1] = y, x[-1]
            if d.replace(y, memory[:-1]):
                return memory[1:]
    return None


LAYOUTS = [
    _unaligned,
    _records,
    _records_of_one,
    _backwards,
    _last_backwards,
    _every_second,
    _every_second_row,
    _with_gaps,
    _fortran,
    _transposed,
    _broadcast,
    _broadcast_writable,
    _windows,
    _swapped_bytes,
    _subclass,
    _read_only,
    _unmasked,
    _interface,
    _dlpack,
    _own,
    _other,
    _overlapping,
]


def _layout(make):
    def variant(x, d):
        y = make(x, d)
        if y is None:
            return None
        array = getattr(y, "kept", y)
        return Hostile(y, plain_array(array))

    variant.__name__ = make.__name__
    return variant


# ---------------------------------------------------------------- other arrays

DTYPES = [
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.bool_,
    np.complex64,
    np.longdouble,
    object,
    "U3",
    "S5",
    "M8[s]",
    "m8[ns]",
    [("a", "f4"), ("b", "i4")],
]


def _other_dtype(x, d):
    dtype = np.dtype(d.choice(DTYPES))
    if dtype == x.dtype:
        return None
    if dtype.names or dtype.kind in "SUMm":
        return Hostile(np.zeros(x.shape, dtype))
    with np.errstate(all="ignore"):
        return Hostile(np.nan_to_num(x.astype(np.float64)).astype(dtype))


def _masked(x, d):
    y = np.ma.masked_array(x.copy())
    if not y.size:
        return None
    y[(0,) * y.ndim] = np.ma.masked
    return Hostile(y, REFUSED)


def _matrix(x, d):
    if x.ndim != 2 or x.dtype == ml_dtypes.bfloat16:
        return None
    return Hostile(x.copy().view(np.matrix), x.copy())


def _wrong_size(x, d):
    if not x.ndim:
        return Hostile(np.zeros(2, x.dtype))
    axis, change = d.randrange(x.ndim), d.choice([-1, 1, 1, 7])
    shape = list(x.shape)
    shape[axis] = max(0, shape[axis] + change)
    return Hostile(np.resize(x, shape) if x.size else np.zeros(shape, x.dtype))


def _empty(x, d):
    shape = list(x.shape) or [1]
    shape[d.randrange(len(shape))] = 0
    return Hostile(np.zeros(shape, x.dtype))


def _one_dim_more(x, d):
    return Hostile(d.choice([x[None], x[..., None]]).copy())


def _one_dim_less(x, d):
    if not x.ndim or 0 in (x.shape[0], x.shape[-1]):
        return None
    return Hostile(d.choice([x[0], x[..., 0], x.reshape(-1)]).copy())


def _no_dims(x, d):
    return Hostile(np.zeros((), x.dtype))


def _list(x, d):
    return Hostile(x.tolist(), x.copy()) if x.ndim else None


def _tuple(x, d):
    return Hostile(tuple(x.tolist()), x.copy()) if x.ndim else None


def _ragged(x, d):
    return Hostile([[1.0], [1.0, 2.0]])


def _filled(*values):
    def variant(x, d):
        if not x.size or x.dtype.kind not in "fV":
            return None
        y = x.copy()
        places = y.reshape(-1)
        value = d.choice(values)
        with np.errstate(all="ignore"):
            if d.randrange(2):
                places[d.randrange(y.size)] = value
            else:
                places[:] = value
        return Hostile(y, y.copy(), finite=False)

    return variant


class _Liar:
    """Claims to be an array by an interface that is none."""

    def __init__(self, interface: Any) -> None:
        self._interface = interface

    @property
    def __array_interface__(self):
        if isinstance(self._interface, Exception):
            raise self._interface
        return self._interface


LIES = [
    None,
    3,
    {},
    {"version": 3},
    {"version": 3, "shape": (2,), "typestr": "nonsense", "data": (0, False)},
    {"version": 3, "shape": "x", "typestr": "<f4"},
    {"version": 3, "shape": (-3,), "typestr": "<f4", "data": b"abcd"},
    {"version": 3, "shape": (5,), "typestr": "<f4", "data": b"abcd"},
    CallersOwn(),
    AttributeError("no"),
]


class _FailingDlpack:
    def __dlpack__(self, **kwargs):
        raise BufferError("no")

    def __dlpack_device__(self):
        return (1, 0)


class _FailingArray:
    def __array__(self, *args, **kwargs):
        raise CallersOwn


NO_ARRAYS = [
    "x",
    b"x",
    3,
    3.5,
    object(),
    {},
    {1: 2},
    set(),
    [],
    [[]],
    np.float32(1),
    True,
    1j,
    Ellipsis,
    slice(3),
    range(3),
    type,
    lambda: 3,
]


def _no_array(x, d):
    return Hostile(d.choice(NO_ARRAYS))


def _liar(x, d):
    return Hostile(d.choice([_Liar(d.choice(LIES)), _FailingDlpack(), _FailingArray()]))


def _memory(x, d):
    return Hostile(d.choice([memoryview(b"abcdefgh"), bytearray(8), iter([1, 2, 3])]))


ARRAYS = [
    *map(_layout, LAYOUTS),
    _other_dtype,
    _other_dtype,
    _masked,
    _matrix,
    _wrong_size,
    _wrong_size,
    _empty,
    _one_dim_more,
    _one_dim_less,
    _no_dims,
    _no_array,
    _liar,
    _memory,
    _ragged,
]


def none(x, d):
    """None: the default, where there is one."""
    return Hostile(None, OMIT if d.has_default else SAME)


FLOATS = [
    *ARRAYS,
    _list,
    _tuple,
    none,
    _filled(np.nan),
    _filled(np.inf, -np.inf),
    _filled(3e38, 1e38, 1e5, -1e30),
    _filled(1e-40, 0.0, -0.0),
]


# ---------------------------------------------------------------- integers in arrays


def _bad_values(*values):
    def variant(x, d):
        if not x.size:
            return None
        value = d.choice(values)
        y = x.astype(np.int64).reshape(x.shape)
        y.reshape(-1)[d.randrange(y.size)] = np.clip(value, -(2**63), 2**63 - 1)
        return Hostile(y if d.randrange(2) else y.astype(np.int32))

    return variant


def _bad_list(x, d):
    """A list with something in it that is no integer, or one that no int64 holds."""
    y = x.reshape(-1).tolist() or [0]
    bad = [10**30, 2**63, -(2**63) - 1, 2**64, 1.5, np.nan, None, "x", [1, None], 1j, object()]
    y[d.randrange(len(y))] = d.choice(bad)
    return Hostile(y, REFUSED)


def _whole_floats(x, d):
    return Hostile(x.astype(np.float64))


def _fractions(x, d):
    return Hostile(x.astype(np.float64) + 0.5, REFUSED) if x.size else None


def _iterators(x, d):
    flat = x.reshape(-1).tolist()
    return Hostile(d.choice([iter(flat), dict.fromkeys(flat), (i for i in flat)]))


def _shuffled(x, d):
    return Hostile(x[::-1].copy()) if x.ndim else None


def _repeated(x, d):
    return Hostile(np.repeat(x[:1], len(x), 0)) if x.ndim and len(x) else None


INTEGERS = [
    *ARRAYS,
    _list,
    _tuple,
    none,
    _bad_values(-1, -2, -(2**31), -(2**63)),
    _bad_values(2**31 - 1, 2**31, 2**62, 2**63),
    _bad_values(0, 1, 2, 3, 7, 100),
    _bad_list,
    _bad_list,
    _whole_floats,
    _fractions,
    _iterators,
    _shuffled,
    _repeated,
]
