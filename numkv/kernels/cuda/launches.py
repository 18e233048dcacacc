"""Compile, cache and launch CUDA kernels; only this module depends on whether the simulator runs them.

Numba compiles a kernel for one signature. Arrays have any strides; one-dimensional ones are contiguous, which checks of
arguments ensure. Views and other integer widths therefore never trigger compilation. Machine code is cached on disk, in
files like those of CPU kernels.

Numba's own launch checks every argument each time, and takes a quarter of a millisecond for the arrays of attention.
Here a kernel is launched through `cuda.core`, with plain numbers in the order of Numba's machine code. An array has two
owner fields, which are ignored, its size, the bytes of an element, the pointer, shape and strides.

Arrays of indices (`INDICES`) may be int32 or int64, determined at run time: `number_at` reads either.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable
from numba.np.numpy_support import as_dtype

from numkv.kernels import disk_cache
from numkv.kernels.builder import SCALES, WORDS, compiled, note
from numkv.kernels.cuda import streams
from numkv.kernels.cuda.streams import SIMULATED

#: Blocks of a launch; where there is more to do, each takes several items. On an H200 (132 multiprocessors) that is
#: two to four times what runs at once.
MAX_BLOCKS = 3 if SIMULATED else 2048
#: Shared memory that a block of any kernel has without asking, static and dynamic.
SHARED_BYTES = 48 * 1024
#: What kernels use of it for rows; the rest serves exchange between lanes.
ROW_BYTES = SHARED_BYTES - 1024
#: Dynamic shared memory that a block of any kernel has without asking; more is asked for, see `shared_bytes`. Static
#: memory comes out of the same 48 KB.
ANYWHERE_BYTES = 40 * 1024

#: The type of an array of indices, lengths or slots: int32 or int64 ``(n,)``, to be read by `number_at`.
INDICES = types.Array(types.int32, 1, "C", readonly=True)

#: Numba types of words by their bytes.
UNSIGNED = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}

#: Threads of a block. In the simulator a thread of the GPU is a thread of the system.
THREADS = 8 if SIMULATED else 128

_simulator_lock = threading.Lock()


def array(dtype: Any, ndim: int) -> Any:
    """Return the Numba type of a kernel's array argument."""
    return types.Array(dtype, ndim, "C" if ndim == 1 else "A")


def pool_types(kind: str) -> tuple[Any, Any]:
    """Return the Numba types of a pool of a kind, and of its scales."""
    return array(WORDS[kind], 4), array(*SCALES[kind])


if SIMULATED:

    def number_at(indices, i):
        """Return element `i`, which is not negative, of an array of `INDICES`."""
        return np.int64(indices[i])

else:

    @register_jitable
    def number_at(indices, i):
        """Return element `i`, which is not negative, of an array of `INDICES`.

        The static type is int32; the bytes of an element determine the actual one. Both halves of an int64 are read,
        or the same word of an int32 twice. The reads therefore need no branch.
        """
        words = np.int64(indices.itemsize) >> 2
        first = (np.int64(i) & np.int64(0x3FFFFFFFFFFFFFFF)) * words
        low, high = indices[first], indices[first + words - 1]
        if words == 1:
            return np.int64(low)
        return (np.int64(high) << np.int64(32)) | (np.int64(low) & np.int64(0xFFFFFFFF))


class Number(int):
    """A number that differs between otherwise equal calls; see `numkv.kernels.cuda.replays`.

    Attributes
    ----------
    which : int
        Index among the call's numbers.
    watch : object
        The `numkv.kernels.cuda.late.Watch` that issued it, if kernels report with this number.
    """

    which: int = 0
    watch: Any = None

    @classmethod
    def of(cls, value: int, which: int, watch: Any = None) -> Number:
        """Return a number with its attributes."""
        made = cls(value)
        made.which, made.watch = which, watch
        return made


def whole(n: Any) -> int:
    """Return a number as a launch expects it; a `Number` stays one."""
    return n if isinstance(n, int) else int(n)


class Launch(NamedTuple):
    """A recorded launch; see `numkv.kernels.cuda.streams.recorded`."""

    kernel: Any  #: `Kernel`
    blocks: int
    threads: tuple[int, ...]
    shared_bytes: int
    args: tuple[Any, ...]


class Kernel:
    """A kernel for one signature, compiled when it is first launched.

    Parameters
    ----------
    factory : function
        Makes the kernel.
    args : tuple of str, int and bool
        Arguments of the factory; with its name they identify the kernel on disk.
    signature : tuple of numba types
        Types of the kernel's arguments.
    blocks_per_multiprocessor : int
        Blocks that must fit at once, which limits the registers; with 0 the compiler chooses.
    threads : int
        Threads of a block, for that bound.

    Attributes
    ----------
    py_func : function
        The kernel in Python.
    launch_bounds : tuple of int or None
        Threads and blocks, as Numba expects them.
    """

    def __init__(
        self, factory: Callable[..., Any], args: tuple[Any, ...], signature: tuple[Any, ...],
        blocks_per_multiprocessor: int = 0, threads: int = THREADS,
    ) -> None:  # fmt: skip
        self.py_func = factory(*args)
        self.signature = signature
        self.launch_bounds = (
            (threads, blocks_per_multiprocessor) if blocks_per_multiprocessor else None
        )
        self._factory, self._args = factory, args
        self._types = [_Type.of(x) for x in signature]
        self._loaded: dict[int, Any] = {}
        self._allowed: dict[int, int] = {}
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()
        self._simulated = cuda.jit(self.py_func) if SIMULATED else None

    @property
    def label(self) -> str:
        """Return the kernel's label for progress messages."""
        return f"{self._factory.__qualname__.removeprefix('make_')} for CUDA"

    def flat(self, args: tuple[Any, ...]) -> list[Any]:
        """Check arguments, and return the numbers that the machine code expects for them."""
        found: list[Any] = []
        for x, of in zip(args, self._types, strict=True):
            if of.ndim < 0:
                found += of.scalars(x)
                continue
            of.check(x, self)
            found += (0, 0, x.size, x.dtype.itemsize, int(x.gpu_data.device_pointer))
            found += x.shape
            found += x.strides
        return found

    def places(self, args: tuple[Any, ...]) -> tuple[list[tuple[int, Any]], list[tuple[int, int]]]:
        """Return the places in `flat` of what differs between equal calls.

        They are the index of each array's pointer, with the array, and that of each `Number`, with its index among the
        call's numbers.
        """
        pointers, numbers, at = [], [], 0
        for x, of in zip(args, self._types, strict=True):
            if of.ndim >= 0:
                pointers.append((at + 4, x))
                at += 5 + 2 * of.ndim
                continue
            parts = x if isinstance(x, tuple) else (x,)
            numbers += [(at + i, n.which) for i, n in enumerate(parts) if type(n) is Number]
            at += len(parts)
        return pointers, numbers

    def config(self, blocks: int, threads: tuple[int, ...], shared_bytes: int) -> Any:
        """Return the sizes of a launch, as `cuda.core` expects them."""
        key = blocks, threads, shared_bytes
        found = self._configs.get(key)
        if found is None:
            from cuda.core import LaunchConfig

            if len(self._configs) >= 256:
                self._configs.clear()
            found = self._configs[key] = LaunchConfig(
                grid=blocks, block=threads, shmem_size=shared_bytes
            )
        return found

    def loaded(self, device: int, shared_bytes: int = 0) -> Any:
        """Return the machine code loaded on a device, with this much dynamic shared memory allowed."""
        found = self._loaded.get(device)
        if found is None:
            found = self._load(device)
        if shared_bytes > self._allowed.get(device, ANYWHERE_BYTES):
            self._allow(device, found, shared_bytes)
        return found

    def _allow(self, device: int, code: Any, shared_bytes: int) -> None:
        """Request more shared memory than a block's default."""
        from cuda.bindings import driver

        of = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._lock:
            streams.ask("cuKernelSetAttribute", of, shared_bytes, code.handle, device)
            self._allowed[device] = shared_bytes

    def _load(self, device: int) -> Any:
        from cuda.core import ObjectCode

        with self._lock:
            found = self._loaded.get(device)
            if found is None:
                of = architecture(cuda.get_current_device().compute_capability)
                name, code = self.machine_code(of)
                found = ObjectCode.from_cubin(code).get_kernel(name)
                self._loaded[device] = found
        return found

    def machine_code(self, of: tuple[int, int, str]) -> tuple[str, bytes]:
        """Return the name of the entry and the cubin for an `architecture`: from disk, or compiled."""
        path = kept_as(self._factory, self.parts(of))
        found = None if path is None else disk_cache.load(path, _unpack)
        note(found is not None)
        if found is not None:
            return found
        with compiled(self.label):
            from numba.cuda.dispatcher import _Kernel

            options = {} if self.launch_bounds is None else {"launch_bounds": self.launch_bounds}
            options = cuda.jit(self.py_func, **options).targetoptions
            # The dispatcher's `compile` would also load it on the device, for Numba's own launches.
            made = _Kernel(self.py_func, self.signature, **options)
            entry, code = made.entry_name, made._codelibrary.get_cubin(cc=of).code
        if path is not None:
            disk_cache.save(path, entry.encode() + b"\0" + code)
        return entry, code

    def parts(self, of: tuple[int, int, str]) -> list[str]:
        """Return what identifies the kernel for an architecture, apart from sources and toolchain."""
        return [
            self._factory.__module__, self._factory.__qualname__, repr(self._args), repr(self.launch_bounds),
            str(self.signature), named(of),
        ]  # fmt: skip


def kept_as(factory: Callable[..., Any], parts: list[str]) -> Any:
    """Return the file on disk of a kernel, by its `Kernel.parts`; None without a cache directory."""
    return disk_cache.path_of(factory, factory.__qualname__, (*parts, *_toolchain()))


def named(of: tuple[int, int, str]) -> str:
    """Return the name of an `architecture`, such as sm_90a."""
    return "sm_" + "".join(map(str, of))


def architecture(cc: tuple[int, int]) -> tuple[int, int, str]:
    """Return a compute capability as Numba names it; from 9.0 on with features specific to that architecture."""
    return (*cc, "a" if cc >= (9, 0) else "")


@functools.cache
def shared_bytes(device: int) -> int:
    """Return the shared memory that a block may request on a device."""
    return int(cuda.gpus[device].MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def _unpack(content: bytes) -> tuple[str, bytes]:
    name, found, code = content.partition(b"\0")
    if not found or not code:
        raise ValueError("no name, or no code")
    return name.decode(), code


@functools.cache
def _toolchain() -> tuple[str, ...]:
    """Return the packages that compile Python to machine code, by name and version."""
    import numba_cuda

    names = [
        d.metadata["Name"] for d in importlib.metadata.distributions() if d.metadata["Name"]
    ]  # fmt: skip
    parts = ("nvvm", "nvjitlink", "nvcc", "cuda-core", "llvmlite", "nvrtc")
    found = sorted(
        f"{n}={importlib.metadata.version(n)}" for n in names if any(p in n.lower() for p in parts)
    )
    return (f"numba-cuda={numba_cuda.__version__}", *found)


class _Type:
    """The required type of an argument."""

    def __init__(self, of: Any) -> None:
        self.ndim = of.ndim if isinstance(of, types.Array) else -1
        self.dtypes: tuple[Any, ...] = ()
        if of is INDICES:
            self.dtypes = (np.dtype(np.int32), np.dtype(np.int64))
        elif self.ndim >= 0:
            self.dtypes = (as_dtype(of.dtype),)
        self._parts = tuple(of) if isinstance(of, types.BaseTuple) else ()
        self._is_float32 = of == types.float32
        self._has_float32 = types.float32 in self._parts

    @classmethod
    @functools.cache
    def of(cls, of: Any) -> _Type:
        """Return the required type for a Numba type."""
        return cls(of)

    def scalars(self, x: Any) -> tuple[Any, ...]:
        """Return numbers as the launch expects them: all elements of a tuple."""
        if self._has_float32:
            pairs = zip(x, self._parts, strict=True)
            return tuple(ctypes.c_float(y) if of == types.float32 else y for y, of in pairs)
        if self._parts:
            return tuple(int(n) if type(n) is Number else n for n in x)
        if type(x) is Number:
            return (int(x),)
        return (ctypes.c_float(x),) if self._is_float32 else (x,)

    def check(self, x: Any, kernel: Kernel) -> None:
        """Raise for an array of another type, whose memory would be misread."""
        if x.dtype not in self.dtypes or len(x.shape) != self.ndim:
            raise TypeError(
                f"{kernel.label}: expected {self.dtypes} of {self.ndim} axes, got {x.dtype} {tuple(x.shape)}"
            )


#: The record of `noted`.
_noted: list[dict[Kernel, None]] = []


@contextlib.contextmanager
def noted() -> Iterator[dict[Kernel, None]]:
    """Record the kernels that any thread launches meanwhile, in their order; none of them runs."""
    found: dict[Kernel, None] = {}
    _noted.append(found)
    try:
        yield found
    finally:
        _noted.remove(found)


def launch(kernel: Kernel, blocks: int, threads: Any, *args: Any, shared_bytes: int = 0) -> None:
    """Launch a kernel over at most `MAX_BLOCKS` blocks, on `streams.current`; does nothing for 0 blocks.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    blocks : int
        Blocks wanted.
    threads : int or tuple of int
        Threads of a block.
    args : object
        The kernel's arguments.
    shared_bytes : int
        Dynamic shared memory of a block.
    """
    if blocks <= 0:
        return
    blocks = min(blocks, MAX_BLOCKS)
    if SIMULATED:
        _simulate(kernel, (blocks, threads, 0, shared_bytes), args)
        return
    if _noted:
        streams.spoil()  # such a call cannot be replayed
        _noted[-1].setdefault(kernel)
        return
    threads = threads if type(threads) is tuple else (threads,)
    recording = streams.recording()
    if recording is not None:
        recording.launches.append(Launch(kernel, blocks, threads, shared_bytes, args))
    here = streams.current()
    code = kernel.loaded(here.device, shared_bytes)
    config = kernel.config(blocks, threads, shared_bytes)
    try:
        core_launch(here.stream, config, code, *kernel.flat(args))
    except TypeError:  # an argument
        raise
    except Exception as error:
        raise streams.failed(f"a launch of {kernel.label}", error) from error


def _simulate(kernel: Kernel, sizes: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    for x, of in zip(args, kernel._types, strict=True):
        if of.ndim >= 0:
            of.check(x, kernel)
    # The simulator runs one kernel at a time. NumPy's scalars warn where a GPU does not.
    with _simulator_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel._simulated[sizes](*args)


if not SIMULATED:
    from cuda.core import launch as core_launch
else:
    core_launch = None
