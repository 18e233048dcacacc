"""An allocator for NumPy that fails on request, so that tests can let every allocation fail in turn.

NumPy asks a handler for the memory of each array, temporary ones too, and a thread may set its own. This one counts
requests and refuses one of them. Its functions are compiled, as NumPy calls them where no Python may run.
"""

import contextlib
import ctypes
import ctypes.util

import numpy as np
from numba import carray, cfunc, types
from numpy._core import _multiarray_umath

_libc = ctypes.CDLL(ctypes.util.find_library("c"))


def _foreign(name, result, *arguments):
    function = getattr(_libc, name)
    function.restype, function.argtypes = result, arguments
    return function


_malloc = _foreign("malloc", ctypes.c_void_p, ctypes.c_size_t)
_calloc = _foreign("calloc", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_realloc = _foreign("realloc", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_free = _foreign("free", None, ctypes.c_void_p)

#: How many allocations there have been, which one fails (0: none), how many failed.
_counts = np.zeros(3, np.int64)


@cfunc(types.voidptr(types.voidptr, types.uintp))
def _allocate(counts, size):
    seen = carray(counts, (3,), np.int64)
    seen[0] += 1
    if seen[0] == seen[1]:
        seen[2] += 1
        size = types.uintp(1) << types.uintp(62)  # no machine has so much: malloc refuses
    return _malloc(size)


@cfunc(types.voidptr(types.voidptr, types.uintp, types.uintp))
def _allocate_zeros(counts, number, size):
    seen = carray(counts, (3,), np.int64)
    seen[0] += 1
    if seen[0] == seen[1]:
        seen[2] += 1
        size = types.uintp(1) << types.uintp(62)
        number = types.uintp(1)
    return _calloc(number, size)


@cfunc(types.voidptr(types.voidptr, types.voidptr, types.uintp))
def _grow(counts, memory, size):
    seen = carray(counts, (3,), np.int64)
    seen[0] += 1
    if seen[0] == seen[1]:
        seen[2] += 1
        size = types.uintp(1) << types.uintp(62)
    return _realloc(memory, size)


@cfunc(types.void(types.voidptr, types.voidptr, types.uintp))
def _give_back(counts, memory, size):
    _free(memory)


class _Allocator(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("ctx", "malloc", "calloc", "realloc", "free")]


class _Handler(ctypes.Structure):  # PyDataMem_Handler
    _fields_ = [("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("it", _Allocator)]


_handler = _Handler(
    b"fails when told to", 1,
    _Allocator(_counts.ctypes.data, _allocate.address, _allocate_zeros.address, _grow.address, _give_back.address),
)  # fmt: skip
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
_NAME = ctypes.create_string_buffer(b"mem_handler")  # the capsule, which arrays keep, points to it
_CAPSULE = _new_capsule(ctypes.addressof(_handler), ctypes.cast(_NAME, ctypes.c_char_p), None)


def _set_handler():
    """NumPy's ``PyDataMem_SetHandler``, from its table of functions."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = ctypes.cast(get(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[304])


_set = _set_handler()


class Memory:
    """Counts of a `failing` block."""

    @property
    def asked(self):
        """Number of allocations so far."""
        return int(_counts[0])

    @property
    def failed(self):
        """Whether one was refused."""
        return bool(_counts[2])


@contextlib.contextmanager
def failing(at=0):
    """Let the allocation number `at` of this thread's arrays fail, counted from 1; 0 only counts."""
    _counts[:] = 0, at, 0
    before = _set(_CAPSULE)
    try:
        yield Memory()
    finally:
        _set(before)
