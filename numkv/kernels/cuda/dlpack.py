"""Device arrays for other libraries, by DLPack, with dtypes that NumPy has not: `cuda.core` does not export them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

# Numbers of DLPack: what an element is, by the kind of a NumPy dtype or by the name of one of ml_dtypes.
_CODES = {
    "i": 0, "u": 1, "f": 2, "b": 6, "bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12,
}  # fmt: skip
_CUDA = 2
_NAME = b"dltensor"  # kept alive, as capsules point to it


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)

# What has been handed out and not given back, by address.
_held: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _give_back(address: int) -> None:
    _held.pop(address, None)


@_Destructor
def _drop(capsule: int) -> None:
    """A capsule that nobody took gives its array back."""
    if _is_valid(capsule, _NAME):
        _held.pop(_pointer(capsule, _NAME), None)


def capsule(x: Any, pointer: int, device: int) -> Any:
    """A capsule with an array; whoever takes it keeps the array until it is done.

    Parameters
    ----------
    x : array
        The device array.
    pointer, device : int
        Where it is.

    Raises
    ------
    BufferError
        If DLPack has no such dtype.
    """
    code = _CODES.get(x.dtype.name, _CODES.get(x.dtype.kind))
    if code is None:
        raise BufferError(f"expected a dtype that DLPack has, got {x.dtype}")
    size, ndim = x.dtype.itemsize, len(x.shape)
    shape = (ctypes.c_int64 * max(1, ndim))(*x.shape)
    strides = (ctypes.c_int64 * max(1, ndim))(*(step // size for step in x.strides))
    managed = _Managed()
    t = managed.tensor
    t.data, t.device[0], t.device[1], t.ndim = pointer or None, _CUDA, device, ndim
    t.code, t.bits, t.lanes, t.byte_offset = code, 8 * size, 1, 0
    t.shape, t.strides = ctypes.addressof(shape), ctypes.addressof(strides)
    managed.deleter = ctypes.cast(_give_back, ctypes.c_void_p)
    address = ctypes.addressof(managed)
    _held[address] = (managed, shape, strides, x)
    make: Callable[..., Any] = _new
    return make(address, _NAME, _drop)
