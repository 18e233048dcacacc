"""Device memory that calls borrow, and the arrays over it: nothing is allocated or freed where calls repeat.

Memory belongs to a stream (`numkv.kernels.cuda.streams.Place`). When an array is deleted, its memory returns there at
once. Kernels may still be using it, but its next user runs after them, on the same stream. Memory that was exported
to other libraries does not return, as these may use it on other streams. It is freed, for which the driver waits.
Exports use DLPack, also with dtypes that NumPy lacks, which `cuda.core` does not export. Memory that is allocated while
a stream is captured belongs to the graph (`numkv.kernels.cuda.graphs`). There, too, calls reuse memory of earlier ones,
and it is freed with the graph.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from numkv.kernels.cuda import graphs, streams
from numkv.kernels.cuda.streams import SIMULATED, Place, current

# DLPack's type codes, by the kind of a NumPy dtype or by the name of an ml_dtypes dtype.
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


_Ending = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Ending)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)

# Exported arrays that were not released yet, by address.
_held: dict[int, tuple[Any, ...]] = {}


@_Ending
def _give_back(address: int) -> None:
    _held.pop(address, None)


@_Ending
def _drop(capsule: int) -> None:
    """Release the array of a capsule that was never consumed."""
    if _is_valid(capsule, _NAME):
        _held.pop(_pointer(capsule, _NAME), None)


def capsule(x: Any, pointer: int, device: int) -> Any:
    """Return a capsule with an array; its consumer keeps the array alive until it releases it.

    Parameters
    ----------
    x : array
        The device array.
    pointer, device : int
        Address of the array. Number of its device.

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


#: Bytes that a stream keeps for later calls, beyond which memory is freed.
MOST_KEPT = 1 << 28


def _size_class(nbytes: int) -> int:
    """Round bytes up to one of a few sizes, so that calls of similar shapes share pieces of memory."""
    step = max(512, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


if SIMULATED:

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array of the current place, whose elements are undefined."""
        return cuda.device_array(shape, dtype)

    buffer = empty

    def simulated(x: Any) -> np.ndarray[Any, Any]:
        """Return the NumPy array that the simulator has in place of device memory."""
        array: np.ndarray[Any, Any] = x._ary
        return array

    def pointer_of(x: Any) -> int:
        """Return the address of an array's first element."""
        return int(simulated(x).__array_interface__["data"][0])

    def _none(*args: Any) -> Any:
        raise NotImplementedError("the simulator's arrays lie in host memory")

    viewed = foreign = kept = take = over = part = _none
    DeviceArray: Any = None

    def reinterpret(x: Any, dtype: Any) -> Any:
        """The same memory as elements of another dtype, of other sizes along the last axis, which is contiguous."""
        return x.view(dtype)

else:
    from cuda.bindings import driver
    from numba.cuda.cudadrv import dummyarray
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import MemoryPointer

    class Piece(MemoryPointer):  # type: ignore[misc]
        """Memory of a place, which returns there at the end.

        Attributes
        ----------
        exported : bool
            Whether other libraries use it.
        """

        def __init__(
            self, place: Place, pointer: Any, size: int, capture: graphs.Capture | None, kept: graphs.Kept | None
        ) -> None:  # fmt: skip
            super().__init__(place.context, pointer, size)
            self.place, self.exported = place, False
            self._capture, self._kept = capture, kept

        def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
            if ending():  # names of this module may be missing, and all memory is about to be freed
                return
            place, size = self.place, self.size
            if self._capture is not None:
                if not (self.exported or self._capture.gone):
                    free = self._capture.free
                    free.setdefault((place.handle, size), []).append(self._kept)  # type: ignore[arg-type]
                return
            if self.exported or place.kept + size > MOST_KEPT:
                _free(place.device, self.device_pointer)
                return
            place.kept += size
            place.free.setdefault(size, []).append(self.device_pointer)

    def _free(device: int, pointer: Any) -> None:
        try:
            with streams.unwatched(), cuda.gpus[device]:
                driver.cuMemFree(pointer)
        except Exception:
            pass

    class DeviceArray(DeviceNDArray):  # type: ignore[misc]
        """A device array for Numba, made 10x faster than Numba's own, which other libraries accept by DLPack."""

        def __getattr__(self, name: str) -> Any:
            if name == "_dummy":  # an attribute that Numba's methods for views use
                found = dummyarray.Array.from_desc(0, self.shape, self.strides, self.dtype.itemsize)
                self._dummy = found
                return found
            raise AttributeError(name)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            _export(self)
            description: dict[str, Any] = DeviceNDArray.__cuda_array_interface__.fget(self)
            description["stream"] = None
            return description

        def view(self, dtype: Any) -> Any:
            """Return a view of the same memory with another dtype."""
            dtype = np.dtype(dtype)
            if dtype.itemsize == self.dtype.itemsize:
                return viewed(self, self.shape, self.strides, dtype)
            return DeviceNDArray.view(self, dtype)

        def __dlpack__(
            self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
        ) -> Any:  # fmt: skip
            """Return a capsule for another library, which works on `stream`."""
            device = self.__dlpack_device__()
            if copy or (dl_device is not None and tuple(map(int, dl_device)) != device):
                raise BufferError("expected to hand the memory over where it is, without a copy")
            owner = self.gpu_data.owner
            if stream != -1 and isinstance(owner, Piece):
                handle = 0 if stream in (None, 1) else int(stream)
                with streams.on(streams.place(owner.place.device, handle), owner.place):
                    pass  # the consumer's stream waits for ours
            _export(self)
            return capsule(self, pointer_of(self), device[1])

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, self.gpu_data.context.device.id

    def _export(x: Any) -> None:
        """Mark memory as exported, so that it does not return to its place."""
        owner = x.gpu_data.owner
        if isinstance(owner, Piece):
            owner.exported = True

    def over(
        gpu_data: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, stream: Any = 0
    ) -> Any:
        """Return an array over memory, such as that from `take`."""
        x = DeviceArray.__new__(DeviceArray)
        x.ndim, x.shape, x.strides, x.dtype = len(shape), shape, strides, dtype
        size, extent = 1, dtype.itemsize
        for n, step in zip(shape, strides):  # noqa: B905, as each array of a short call comes here
            size *= n
            extent += (n - 1) * abs(step)
        x.size, x.alloc_size = size, extent if size else 0
        x.gpu_data, x.stream = gpu_data, stream
        return x

    def _packed(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
        """Return the strides of a contiguous array."""
        strides, step = [], itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= n
        return tuple(reversed(strides))

    def take(place: Place, nbytes: int) -> Any:
        """Return memory of a place: a free piece, or a new one."""
        if not nbytes:
            return MemoryPointer(place.context, driver.CUdeviceptr(0), 0)
        size = _size_class(nbytes)
        capture = graphs.capture_of(place)
        if capture is not None:
            of_graph = _of_graph(capture, place, size)
            return Piece(place, of_graph.pointer, size, capture, of_graph)
        try:
            pointer = place.free[size].pop()  # atomic among threads
            place.kept -= size
        except (KeyError, IndexError):
            graphs.sweep()
            pointer = _allocate(size)
        return Piece(place, pointer, size, None, None)

    def _of_graph(capture: graphs.Capture, place: Place, size: int) -> graphs.Kept:
        """Return memory that belongs to a graph: released by one of its calls, or new."""
        try:
            return capture.free[place.handle, size].pop()
        except (KeyError, IndexError):
            found = kept(size)
        capture.held.append(found)
        return found

    def kept(nbytes: int) -> graphs.Kept:
        """Allocate memory of the current device, which is freed with its last reference."""
        return graphs.Kept(_allocate(nbytes), functools.partial(_free, current().device))

    def _allocate(size: int) -> Any:
        try:
            with streams.unwatched():
                return streams.ask("cuMemAlloc", size)
        except MemoryError:
            raise MemoryError(f"the CUDA device has no room for {size} bytes") from None

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array of the current place, whose elements are undefined."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        memory = take(current(), nbytes)
        recording = streams.recording()
        if recording is not None and nbytes:
            recording.scratch[int(memory.device_pointer)] = nbytes
        return over(memory, tuple(shape), _packed(shape, dtype.itemsize), dtype)

    def buffer(shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a new long-lived array: its memory is freed at the end, not kept for other arrays."""
        made = empty(shape, dtype)
        _export(made)
        streams.spoil()
        return made

    def pointer_of(x: Any) -> int:
        """Return the address of an array's first element."""
        return int(x.gpu_data.device_pointer)

    def viewed(x: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        """Return another view of an array's memory, from its first element on."""
        return over(x.gpu_data, shape, strides, dtype, x.stream)

    def part(x: Any, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a contiguous array in a byte array's memory, from byte `start` on."""
        pointer = int(x.gpu_data.device_pointer) + start
        return foreign(pointer, shape, None, dtype, x)

    def reinterpret(x: Any, dtype: Any) -> Any:
        """The same memory as elements of another dtype, of other sizes along the last axis, which is contiguous."""
        to, size = np.dtype(dtype), x.dtype.itemsize
        if to.itemsize == size:
            return viewed(x, x.shape, x.strides, to)
        last = x.shape[-1] * size // to.itemsize
        return viewed(x, (*x.shape[:-1], last), (*x.strides[:-1], to.itemsize), to)

    def foreign(
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: Any,
        owner: Any,
    ) -> Any:
        """Return an array over another library's memory.

        Parameters
        ----------
        pointer : int
            Address of the element whose indices are all 0.
        shape, strides : tuple of int
            Shape of the array. Strides in bytes; None for a contiguous array.
        dtype : numpy.dtype
            Dtype of the elements.
        owner : object
            Keeps the memory alive.
        """
        if strides is None:
            strides = _packed(shape, dtype.itemsize)
        nbytes = math.prod(shape) * dtype.itemsize
        memory = MemoryPointer(current().context, driver.CUdeviceptr(pointer), nbytes, owner=owner)
        return over(memory, shape, strides, dtype)
