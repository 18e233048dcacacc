"""Where a thread of the host works: which device, and which of its streams.

Whoever calls a public function says so, or the arrays do: `numkv.targets.cuda.CudaTarget.on`. Everything below asks
`current`. There is one `Place` for each stream, which has its memory too: what one call gives back the next one on the
same stream takes, and the order of the stream keeps them apart.
"""

from __future__ import annotations

import threading
from typing import Any

from numba import cuda
from numba.core import config

__all__ = ["SIMULATED", "Place", "current", "on", "place"]

SIMULATED = bool(config.ENABLE_CUDASIM)


class Place:
    """A stream of a device.

    Attributes
    ----------
    device : int
        Number of the device.
    handle : int
        Pointer of the stream; 0 is the legacy default stream.
    stream, context : object
        The stream, as `cuda.core` takes it, and the device's context, as Numba has it; None in the simulator.
    free : dict of int to list
        Pieces of memory that nobody uses, by size; see `numkv.kernels.cuda.memory`.
    kept : int
        Bytes of these.
    """

    __slots__ = ("context", "device", "free", "handle", "kept", "stream")

    def __init__(self, device: int, handle: int) -> None:
        self.device, self.handle = device, handle
        self.free: dict[int, list[Any]] = {}
        self.kept = 0
        self.stream = self.context = None
        if not SIMULATED:
            from cuda.core import Stream

            self.stream = Stream.from_handle(handle)
            self.context = cuda.gpus[device].get_primary_context()

    def capturing(self) -> bool:
        """Whether what is launched here becomes a part of a CUDA graph."""
        if SIMULATED or self.handle == 0:  # the default stream cannot be captured
            return False
        from cuda.bindings import driver

        error, status = driver.cuStreamIsCapturing(self.handle)
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


_places: dict[tuple[int, int], Place] = {}


class _Here(threading.local):
    """The place of this thread of the host."""

    place: Place | None = None
    ready = False  # whether the driver knows this thread


_here = _Here()


def place(device: int, handle: int) -> Place:
    """The place of a stream of a device."""
    found = _places.get((device, handle))
    if found is None:
        found = _places.setdefault((device, handle), Place(device, handle))
    return found


def current() -> Place:
    """Where this thread works: where `on` says, else on the default stream of its device."""
    return _here.place or default()


def default() -> Place:
    """The default stream of this thread's device."""
    if SIMULATED or (_one_device() and _is_ready()):
        return place(0, 0)
    return place(cuda.get_current_device().id, 0)


class on:  # noqa: N801 - it reads like a function
    """Have this thread work at a place, for a while."""

    __slots__ = ("_before", "_context", "_place")

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> Place:
        self._before = _here.place
        self._context = None
        if not (SIMULATED or (_one_device() and _is_ready())):
            self._context = cuda.gpus[self._place.device]
            self._context.__enter__()
        _here.place = self._place
        return self._place

    def __exit__(self, *error: object) -> None:
        _here.place = self._before
        if self._context is not None:
            self._context.__exit__(*error)


def _is_ready() -> bool:
    """Have the driver know this thread."""
    if not _here.ready:
        cuda.current_context()
        _here.ready = True
    return True


def _one_device() -> bool:
    """Whether there is no other device that this thread may have turned to."""
    if not _counted:
        _counted.append(len(cuda.gpus))
    return _counted[0] == 1


_counted: list[int] = []
