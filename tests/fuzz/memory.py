"""Memory between unreadable pages, full of NaN: what reads or writes past an array dies, what reads too early shows.

NumPy lets a process choose where the memory of its arrays comes from (NEP 49). `install` gives it an allocator that
puts every array into pages of its own, alternately against the page after it and against the one before it; both of
them can be neither read nor written. So it is with the arrays that a caller passes, with the buffers of caches, with
outputs and with scratch: all of them are NumPy arrays. Arrays that compiled code makes for itself end with a page, too:
Numba's runtime finds its allocator by a symbol, which is given to another one. New memory, and what NumPy has given
back, is filled with bytes of 255: NaN in every float kind, -1 or the largest code in integers.

Not seen: what lies on the stack of compiled code.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

__all__ = ["install", "limit"]

PAGE = 4096
#: Arrays of up to a page have cells, which are used again; each is a page of data between two that are closed.
CELLS = 8192
#: Of up to this many pages, a few more.
LARGE, LARGE_CELLS = 16, 512

# What the allocator knows, as 64-bit integers that `ctx` points to; free cells follow.
TURN, BASE, FREE, LARGE_BASE, LARGE_FREE, STACK = 0, 1, 2, 3, 4, 8
LARGE_STACK = STACK + CELLS
SIZE = LARGE_STACK + LARGE_CELLS

_libc = ctypes.CDLL(None, use_errno=True)


def _function(name, result, *arguments):
    """A function of the C library that compiled code can call; pointers are integers there."""
    function = ctypes.CFUNCTYPE(result, *arguments)((name, _libc))
    function.argtypes, function.restype = arguments, result
    return function


_word, _int = ctypes.c_int64, ctypes.c_int
_mmap = _function("mmap", _word, _word, _word, _int, _int, _int, _word)
_munmap = _function("munmap", _int, _word, _word)
_mprotect = _function("mprotect", _int, _word, _word, _int)
_memset = _function("memset", _word, _word, _int, _word)
_memcpy = _function("memcpy", _word, _word, _word, _word)

NOTHING, READ_WRITE = 0, 3
#: Bytes of Numba's ``MemInfo``.
MEM_INFO = 48
PRIVATE_ANONYMOUS_NORESERVE = 0x4022


@intrinsic
def address_to_pointer(typing_context, address):
    """Return a pointer to 64-bit integers at an address."""
    result = types.CPointer(types.int64)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(address), generate


@njit
def open_pages(size):
    """Map pages for so many bytes between closed ones; returns the first's address and how many there are, or zeros."""
    # Before them are a page that says how many there are, and a closed one.
    pages = (size + PAGE - 1) // PAGE
    memory = _mmap(0, (pages + 3) * PAGE, NOTHING, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    if memory == -1:
        return 0, 0
    first = memory + 2 * PAGE
    if _mprotect(memory, PAGE, READ_WRITE) or _mprotect(first, pages * PAGE, READ_WRITE):
        _munmap(memory, (pages + 3) * PAGE)
        return 0, 0
    carray(address_to_pointer(memory), (1,))[0] = pages
    return first, pages


@njit
def pages_from(first):
    """How many pages were opened."""
    return carray(address_to_pointer(first - 2 * PAGE), (1,))[0]


@njit
def close_pages(first):
    """Give pages back."""
    _munmap(first - 2 * PAGE, (pages_from(first) + 3) * PAGE)


def _state(ctx):
    return carray(ctx, (SIZE,))


def _make_allocator():
    """The four functions of NumPy's allocator, compiled."""
    state_of = njit(_state)
    pointer = types.CPointer(types.int64)

    @njit
    def place(first, pages, size, turn):
        """Where an array begins: at the start of its pages, or so that it ends with them."""
        return first if turn or size == 1 else first + pages * PAGE - size

    @njit
    def take(ctx, size, fill):
        s = state_of(ctx)
        s[TURN] ^= 1
        fresh = False
        if size <= PAGE and s[FREE] > 0:
            s[FREE] -= 1
            pages, first = 1, s[BASE] + (2 * s[STACK + s[FREE]] + 1) * PAGE
        elif PAGE < size <= LARGE * PAGE and s[LARGE_FREE] > 0:
            s[LARGE_FREE] -= 1
            # In a cell of 16 pages an array is against the last of them, or the first.
            pages = LARGE
            cell = s[LARGE_STACK + s[LARGE_FREE]]
            first = s[LARGE_BASE] + (cell * (LARGE + 1) + 1) * PAGE
        else:
            first, pages = open_pages(size)
            if not first:
                return 0
            fresh = True
        at = place(first, pages, size, s[TURN])
        if fill != 0 or not fresh:
            _memset(at, fill, size)
        return at

    @njit
    def room(ctx, at):
        """First page of an array, how many there are, and its cell: of large arrays -1 - cell; else a million."""
        s = state_of(ctx)
        offset = at - s[BASE]
        if 0 <= offset < (2 * CELLS + 1) * PAGE:
            cell = offset // PAGE // 2
            return s[BASE] + (2 * cell + 1) * PAGE, 1, cell
        offset = at - s[LARGE_BASE]
        if 0 <= offset < ((LARGE + 1) * LARGE_CELLS + 1) * PAGE:
            cell = (offset - PAGE) // ((LARGE + 1) * PAGE)
            return s[LARGE_BASE] + (cell * (LARGE + 1) + 1) * PAGE, LARGE, -1 - cell
        first = at // PAGE * PAGE
        return first, pages_from(first), 1_000_000

    @njit
    def give(ctx, at, size):
        if at == 0:
            return
        s = state_of(ctx)
        first, pages, cell = room(ctx, at)
        if cell == 1_000_000:
            close_pages(first)
            return
        _memset(at, 255, min(size, first + pages * PAGE - at))
        if cell >= 0:
            s[STACK + s[FREE]] = cell
            s[FREE] += 1
        else:
            s[LARGE_STACK + s[LARGE_FREE]] = -1 - cell
            s[LARGE_FREE] += 1

    @cfunc(types.intp(pointer, types.intp))
    def malloc(ctx, size):
        return take(ctx, size, 255)

    @cfunc(types.intp(pointer, types.intp, types.intp))
    def calloc(ctx, n, size):
        return take(ctx, n * size, 0)

    @cfunc(types.intp(pointer, types.intp, types.intp))
    def realloc(ctx, at, size):
        new = take(ctx, size, 255)
        if new and at:
            first, pages, _ = room(ctx, at)
            _memcpy(new, at, min(size, first + pages * PAGE - at))
            give(ctx, at, 1)
        return new

    @cfunc(types.void(pointer, types.intp, types.intp))
    def free(ctx, at, size):
        give(ctx, at, size)

    return malloc, calloc, realloc, free


class _Allocator(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("ctx", "malloc", "calloc", "realloc", "free")]


class _Handler(ctypes.Structure):
    """NumPy's ``PyDataMem_Handler``."""

    _fields_ = [
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("allocator", _Allocator),
    ]


#: Place of ``PyDataMem_SetHandler`` in NumPy's table of C functions, which keeps its order.
_SET_HANDLER = 304
_kept: list[object] = []  # what must live as long as arrays do


def guard_numpy() -> None:
    """Have all NumPy arrays that this thread makes from now on lie between closed pages."""
    # Between closed pages as well: nothing else may write there.
    state = (ctypes.c_int64 * SIZE).from_address(open_pages(8 * SIZE)[0])

    def arena(pages, cells):
        size = ((pages + 1) * cells + 1) * PAGE
        base = _mmap(0, size, NOTHING, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        assert base != -1
        for cell in range(cells):
            first = base + ((pages + 1) * cell + 1) * PAGE
            assert _mprotect(first, pages * PAGE, READ_WRITE) == 0
        return base

    state[BASE], state[LARGE_BASE] = arena(1, CELLS), arena(LARGE, LARGE_CELLS)
    state[FREE], state[LARGE_FREE] = CELLS, LARGE_CELLS
    state[STACK:LARGE_STACK] = range(CELLS)
    state[LARGE_STACK:SIZE] = range(LARGE_CELLS)

    functions = _make_allocator()
    handler = _Handler(b"guarded", 1)
    handler.allocator = _Allocator(ctypes.addressof(state), *(f.address for f in functions))
    python = ctypes.pythonapi
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = b"mem_handler"
    capsule = python.PyCapsule_New(ctypes.addressof(handler), name, None)
    table = python.PyCapsule_GetPointer(np._core._multiarray_umath._ARRAY_API, None)
    address = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[_SET_HANDLER]
    before = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(address)(capsule)
    _kept.extend([state, handler, functions, name, capsule, before])


def guard_compiled_code() -> None:
    """Have all arrays that compiled code makes, if it is loaded from now on, end with a page before a closed one."""
    # Numba's ``ExternalMemAllocator``: of its functions, only `free` is called.
    handler = (ctypes.c_int64 * 4)()
    handlers = ctypes.addressof(handler)

    @cfunc(types.intp(types.intp, types.uint32))
    def take(size, alignment):
        # Numba's ``MemInfo`` before the array: references, destructor, what that takes, data, size, allocator.
        room = MEM_INFO + (size + 7) // 8 * 8
        first, pages = open_pages(room)
        if not first:
            return 0
        end = first + pages * PAGE
        at, data = end - room, end - size
        _memset(data, 255, size)
        of_array = carray(address_to_pointer(at), (MEM_INFO // 8,))
        of_array[:] = 0
        of_array[0], of_array[3], of_array[4], of_array[5] = 1, data, size, handlers
        return at

    @cfunc(types.void(types.intp, types.intp))
    def give(at, _):
        close_pages(at // PAGE * PAGE)

    handler[2] = give.address
    llvm.add_symbol("NRT_MemInfo_alloc_aligned", take.address)
    _kept.extend([handler, take, give])


def poison_scratch() -> None:
    """Have every call of numkv's kernels find scratch that nobody has used: new, full of NaN, and no larger than asked.

    Buffers that begin at a cache line would end some bytes before their page does; here they do not.
    """
    import numkv  # noqa: F401
    from numkv.kernels import scratch
    from numkv.targets import get

    get("cpu").ops  # noqa: B018 - loads the modules that take the name
    scratch.Workspaces.give_back = lambda self, workspace: None
    at_lines = scratch.aligned

    def exact(make, shape, dtype):
        return make(shape, dtype)

    for name, module in list(sys.modules.items()):
        if name.startswith("numkv") and getattr(module, "aligned", None) is at_lines:
            module.aligned = exact


def limit(room: int = 4 << 30) -> tuple[int, int]:
    """Let this process have so much more address space: a size that nobody checks ends in an error, not in swapping.

    Returns
    -------
    tuple of int
        The limits before, for ``resource.setrlimit``.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, before[1]))
    return before


def install() -> None:
    """Guard, poison and limit all memory that this process computes with."""
    guard_compiled_code()
    poison_scratch()
    guard_numpy()
    limit()
