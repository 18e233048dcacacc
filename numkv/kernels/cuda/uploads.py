"""Copy small host arrays to the device asynchronously.

A copy is asynchronous only from pinned memory, which must not change before the copy is done. Each stream has a ring of
pinned memory. A part is reused once the event after its last copy has passed, which is usually long ago.

Tables of fixed size (`numkv.targets.fixed.Fixed`) have two pieces of pinned memory of their own, filled in turn, each
with an event after its copy. So an update waits only if the device is two updates behind.
"""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import numpy as np
from numba import cuda

from numkv.kernels.cuda import memory, streams
from numkv.kernels.cuda.streams import SIMULATED

#: Bytes of a ring, and its number of parts. Arrays larger than a part are copied directly.
RING, PARTS = 1 << 20, 16


class _Ring:
    """Pinned memory of a stream."""

    def __init__(self) -> None:
        self.memory = cuda.pinned_array(RING, np.uint8)
        self.address = int(self.memory.__array_interface__["data"][0])
        self.events = [streams.new_event() for _ in range(PARTS)]
        self.used = [False] * PARTS
        self.part, self.at = 0, 0

    def take(self, nbytes: int, handle: int) -> int:
        """Return the offset of `nbytes` free bytes."""
        size = RING // PARTS
        if self.at + nbytes > size:
            streams.ask("cuEventRecord", self.events[self.part], handle)
            self.used[self.part] = True
            self.part, self.at = (self.part + 1) % PARTS, 0
            if self.used[self.part] and not _has_passed(self.events[self.part]):
                streams.ask("cuEventSynchronize", self.events[self.part])
        found = self.part * size + self.at
        self.at += -(-nbytes // 64) * 64
        return found


def _has_passed(event: Any) -> bool:
    """Return whether all work before an event is done; False if the driver cannot determine it."""
    from cuda.bindings import driver

    return bool(driver.cuEventQuery(event)[0] == driver.CUresult.CUDA_SUCCESS)


_lock = threading.Lock()
_rings: dict[tuple[int, int], _Ring] = {}


def upload(x: np.ndarray[Any, Any]) -> Any:
    """Return a copy of a contiguous array on the current place."""
    made = memory.empty(x.shape, x.dtype)
    nbytes = math.prod(x.shape) * x.dtype.itemsize
    if not nbytes:
        return made
    here, there = streams.current(), made.gpu_data.device_pointer
    if nbytes > RING // PARTS:
        streams.ask("cuMemcpyHtoDAsync", there, x.ctypes.data, nbytes, here.handle)
        here.synchronize()  # the array may change
        return made
    ring = _rings.get((here.device, here.handle))
    if ring is None:
        ring = _rings.setdefault((here.device, here.handle), _Ring())
    with _lock:
        at = ring.take(nbytes, here.handle)
        ring.memory[at : at + nbytes] = x.reshape(-1).view(np.uint8)
        streams.ask("cuMemcpyHtoDAsync", there, ring.address + at, nbytes, here.handle)
    return made


_own_streams: dict[int, Any] = {}


def constant(x: np.ndarray[Any, Any]) -> Any:
    """Return a copy of a contiguous array on the current device, complete for all streams.

    It uses a separate stream, so that it works while others are captured.
    """
    if not x.nbytes:
        return memory.empty(x.shape, x.dtype)
    device = streams.current().device
    with streams.unwatched():
        stream = _own_streams.get(device)
        if stream is None:
            stream = streams.ask("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
            stream = _own_streams.setdefault(device, stream)
        kept = memory.kept(x.nbytes)
        streams.ask("cuMemcpyHtoDAsync", kept.pointer, x.ctypes.data, x.nbytes, stream)
        streams.ask("cuStreamSynchronize", stream)
    return memory.foreign(int(kept.pointer), x.shape, None, x.dtype, kept)


def _places(sizes: list[int]) -> tuple[list[int], int]:
    """Return where arrays of these bytes start side by side, at multiples of 64, and where the last one ends."""
    *starts, end = itertools.accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
    return starts, end


def upload_all(arrays: list[np.ndarray[Any, Any]]) -> list[Any]:
    """Return copies of contiguous arrays on the current place, side by side, made by one transfer."""
    starts, end = _places([x.nbytes for x in arrays])
    together = np.empty(end, np.uint8)
    for x, start in zip(arrays, starts, strict=True):
        together[start : start + x.nbytes].view(x.dtype)[:] = x.reshape(-1)
    on_device = upload(together)
    return [
        memory.part(on_device, start, x.shape, x.dtype)
        for x, start in zip(arrays, starts, strict=True)
    ]


#: For each place the numbers from 0 on, int32. An array of one length is a part of it, without a transfer.
_numbers: dict[streams.Place, Any] = {}


def length(n: int) -> Any:
    """Return an array on the current place whose one element is `n`."""
    if not 0 <= n < np.iinfo(np.int32).max:
        return upload(np.array([n], np.int64))
    here = streams.current()
    found = _numbers.get(here)
    if found is None or found.size <= n:
        streams.spoil()
        size = max(1 << 13, 1 << n.bit_length())
        found = _numbers[here] = upload(np.arange(size, dtype=np.int32))
    return memory.part(found, 4 * n, (1,), found.dtype)


def pointer_of_length(here: streams.Place, n: int) -> int | None:
    """Return the pointer of `length`'s array at a place, or None if the array does not exist yet."""
    found = _numbers.get(here)
    if found is None or not 0 <= n < found.size:
        return None
    return memory.pointer_of(found) + 4 * n


#: For each place a word of pinned memory, the target of `word_of`.
_pinned_words: dict[streams.Place, Any] = {}


def filled_word(byte: int) -> Any:
    """Return an array of one int64 on the current place, with all bytes equal to `byte`."""
    if SIMULATED:
        return cuda.to_device(np.full(8, byte, np.uint8).view(np.int64))
    streams.spoil()
    made = memory.empty((1,), np.int64)
    handle = streams.current().handle
    streams.ask("cuMemsetD8Async", made.gpu_data.device_pointer, byte, 8, handle)
    return made


def word_of(x: Any) -> int:
    """Return the element of an array of one int64, after all launches on the current place."""
    if SIMULATED:
        return int(x.copy_to_host()[0])
    here = streams.current()
    streams.spoil()
    with _lock:
        word = _pinned_words.get(here)
        if word is None:
            word = _pinned_words[here] = cuda.pinned_array(1, np.int64)
        there = word.__array_interface__["data"][0]
        streams.ask("cuMemcpyDtoHAsync", there, x.gpu_data.device_pointer, 8, here.handle)
        here.synchronize()
        return int(word[0])


_STAGES = 2


class DeviceFixed:
    """`numkv.targets.fixed.Fixed` in device memory."""

    def __init__(self, layout: list[tuple[tuple[int, ...], Any]]) -> None:
        self._updates = 0
        self._starts, self._nbytes = _places(
            [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout]
        )
        if SIMULATED:
            self.arrays = [memory.buffer(shape, np.dtype(dtype)) for shape, dtype in layout]
            return
        self._memory = memory.buffer((max(1, self._nbytes),), np.dtype(np.uint8))
        self.arrays = [
            memory.part(self._memory, start, tuple(shape), np.dtype(dtype))
            for start, (shape, dtype) in zip(self._starts, layout, strict=True)
        ]
        self._stages = [cuda.pinned_array(max(1, self._nbytes), np.uint8) for _ in range(_STAGES)]
        self._events = [streams.new_event() for _ in range(_STAGES)]

    def update(self, host: list[np.ndarray[Any, Any]]) -> None:
        """Fill all arrays by one copy on the current stream."""
        streams.spoil()
        if SIMULATED:
            for x, new in zip(self.arrays, host, strict=True):
                if new.size:
                    x.copy_to_device(np.ascontiguousarray(new, x.dtype))
            self._updates += 1
            return
        turn, handle = self._updates % _STAGES, streams.current().handle
        if self._updates >= _STAGES and not self._passed(turn):
            streams.ask("cuEventSynchronize", self._events[turn])
        stage = self._stages[turn]
        for start, x, new in zip(self._starts, self.arrays, host, strict=True):
            packed = np.ascontiguousarray(new, x.dtype).reshape(-1).view(np.uint8)
            stage[start : start + packed.size] = packed
        there = self._memory.gpu_data.device_pointer
        address = int(stage.__array_interface__["data"][0])
        streams.ask("cuMemcpyHtoDAsync", there, address, self._nbytes, handle)
        streams.ask("cuEventRecord", self._events[turn], handle)
        self._updates += 1

    def arrived(self) -> int:
        """Return how many updates are done, by querying the last two; the host does not wait."""
        if SIMULATED:
            return self._updates
        for back in range(min(_STAGES, self._updates)):
            number = self._updates - back
            if self._passed((number - 1) % _STAGES):
                return number
        return max(0, self._updates - _STAGES)

    def _passed(self, turn: int) -> bool:
        """Return whether the device is past the last copy from a piece of pinned memory."""
        from cuda.bindings import driver

        (error,) = driver.cuEventQuery(self._events[turn])
        if error == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if error != driver.CUresult.CUDA_SUCCESS:
            raise streams.failed("cuEventQuery", error.name)
        return True
