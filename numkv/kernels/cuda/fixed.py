"""Tables of fixed size on the device, filled by one copy from pinned memory: see `numkv.targets.fixed.Fixed`.

There are two pieces of pinned memory, filled in turn, each with an event behind its copy: so an update waits only if
the device is two updates behind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from numkv.kernels.cuda import memory, streams
from numkv.kernels.cuda.streams import SIMULATED

_STAGES = 2


class DeviceFixed:
    """`numkv.targets.fixed.Fixed` in device memory."""

    def __init__(self, layout: list[tuple[tuple[int, ...], Any]]) -> None:
        self._updates = 0
        self._starts, self._nbytes = [], 0
        for shape, dtype in layout:
            self._starts.append(self._nbytes)
            self._nbytes += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64
        if SIMULATED:
            self.arrays = [memory.buffer(shape, np.dtype(dtype)) for shape, dtype in layout]
            return
        from cuda.bindings import driver

        self._memory = memory.buffer((max(1, self._nbytes),), np.dtype(np.uint8))
        self.arrays = [
            memory.part(self._memory, start, tuple(shape), np.dtype(dtype))
            for start, (shape, dtype) in zip(self._starts, layout, strict=True)
        ]
        self._stages = [cuda.pinned_array(max(1, self._nbytes), np.uint8) for _ in range(_STAGES)]
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._events = [streams.ask("cuEventCreate", flags) for _ in range(_STAGES)]

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
        """How many updates are done, of the last two by asking; the host does not wait."""
        if SIMULATED:
            return self._updates
        for back in range(min(_STAGES, self._updates)):
            number = self._updates - back
            if self._passed((number - 1) % _STAGES):
                return number
        return max(0, self._updates - _STAGES)

    def _passed(self, turn: int) -> bool:
        """Whether the device is past the last copy from a piece of pinned memory."""
        from cuda.bindings import driver

        (error,) = driver.cuEventQuery(self._events[turn])
        if error == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if error != driver.CUresult.CUDA_SUCCESS:
            raise streams.failed("cuEventQuery", error.name)
        return True
