"""The device and stream of a host thread.

Callers of public functions choose them by `naming`, or the arrays do: `numkv.targets.cuda.CudaTarget.on`. Everything
below uses `current`. There is one `Place` for each stream, which also owns its memory. A call reuses memory that
earlier calls on the same stream have released. The order of the stream makes that safe.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from typing import Any

from numba import cuda
from numba.core import config

from numkv.errors import NotSupported, NumkvError

SIMULATED = bool(config.ENABLE_CUDASIM)


def ask(name: str, *args: Any) -> Any:
    """Call a function of the driver.

    Parameters
    ----------
    name : str
        Its name in `cuda.bindings.driver`.
    *args : object
        Its arguments.

    Returns
    -------
    object
        The function's results without its error code; None if it has none.

    Raises
    ------
    MemoryError
        If the device is out of memory.
    RuntimeError
        If the driver reports another error: a capture forbids the call, or an earlier kernel failed.
    """
    from cuda.bindings import driver

    error, *found = getattr(driver, name)(*args)
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError(f"{name}: the CUDA device has no room")
    if error != driver.CUresult.CUDA_SUCCESS:
        raise failed(name, error.name)
    return found[0] if found else None


def new_event() -> Any:
    """Return a new event that takes no times."""
    from cuda.bindings import driver

    return ask("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)


#: Errors after which a device is unusable for this process. The next call reports them, whatever it is.
_ASTRAY = re.compile(
    "CUDA_ERROR_(ILLEGAL_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION|INVALID_PC|"
    "INVALID_ADDRESS_SPACE|HARDWARE_STACK_ERROR|ASSERT|ECC_UNCORRECTABLE|TENSOR_MEMORY_LEAK|CONTAINED|EXTERNAL_DEVICE)"
)


def failed(what: str, error: object) -> RuntimeError:
    """Return the exception for a failed call of the driver.

    Parameters
    ----------
    what : str
        Description of the call.
    error : object
        The name of the driver's error, or an exception that contains it.
    """
    if found := _ASTRAY.search(str(error)):
        return RuntimeError(
            f"{what}: the CUDA driver says {found[0]}: a kernel that was launched earlier, by numkv or others in this "
            "process, has failed; this call only noticed. The device does nothing more for this process, and what "
            "lies in its memory is lost: start a new process. To find the kernel, run with CUDA_LAUNCH_BLOCKING=1, or "
            "under compute-sanitizer"
        )
    return RuntimeError(f"{what}: expected the CUDA driver to do it, got {error}")


class Place:
    """A stream of a device.

    Attributes
    ----------
    device : int
        Number of the device.
    handle : int
        Pointer of the stream; 0 is the legacy default stream.
    stream, context : object
        The stream for `cuda.core`. The device's context of Numba. Both are None in the simulator.
    mark : object
        The event by which other streams wait for this one; None until one has.
    free : dict of int to list
        Unused pieces of memory, by size; see `numkv.kernels.cuda.memory`.
    kept : int
        Bytes of the unused pieces.
    """

    __slots__ = ("context", "device", "free", "handle", "kept", "mark", "stream")

    def __init__(self, device: int, handle: int) -> None:
        self.device, self.handle = device, handle
        self.free: dict[int, list[Any]] = {}
        self.kept = 0
        self.stream = self.context = self.mark = None
        if not SIMULATED:
            from cuda.core import Stream

            self.stream = Stream.from_handle(handle)
            self.context = cuda.gpus[device].get_primary_context()
            if handle > 2 and not one_device():  # default streams belong to the current device
                there = self.stream.device.device_id
                if there != device:
                    raise NotSupported(
                        f"`stream`: expected a stream of the arrays' device {device}, got one of device {there}"
                    )

    def synchronize(self) -> None:
        """Wait for all launches on this stream."""
        if self.stream is not None:
            ask("cuStreamSynchronize", self.handle)

    def capturing(self) -> bool:
        """Return whether launches on this stream become a part of a CUDA graph."""
        if SIMULATED or self.handle == 0:  # the default stream cannot be captured
            return False
        from cuda.bindings import driver

        status = ask("cuStreamIsCapturing", self.handle)
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


#: All places of this process, by device and stream.
places: dict[tuple[int, int], Place] = {}


class Recording:
    """The record of a call, for replays; see `numkv.kernels.cuda.replays`.

    Attributes
    ----------
    launches : list
        `numkv.kernels.cuda.launches.Launch` objects.
    scratch : dict of int to int
        Memory that the call allocated: pointers, and bytes.
    spoiled : bool
        Whether the call did something that launches alone do not repeat, such as a copy.
    """

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.scratch: dict[int, int] = {}
        self.spoiled = False


class _Here(threading.local):
    """The state of this host thread: its place, the named stream, and its recording."""

    place: Place | None = None
    named: int | None = None
    recording: Recording | None = None
    ready = False  # whether the driver is initialised in this thread

    def __init__(self) -> None:
        self.outer: list[tuple[Place | None, int | None]] = []  # outer contexts of `naming`


_here = _Here()


def place(device: int, handle: int) -> Place:
    """Return the place of a stream of a device."""
    found = places.get((device, handle))
    if found is None:
        _refuse_after_fork()
        found = places.setdefault((device, handle), Place(device, handle))
    return found


def current() -> Place:
    """Return this thread's place: that of `on`, else `default`."""
    return _here.place or default()


@functools.cache
def multiprocessors(device: int) -> int:
    """Return the multiprocessors of a device; the simulated one has those of an H200."""
    return 132 if SIMULATED else int(cuda.gpus[device].MULTIPROCESSOR_COUNT)


def chosen() -> Place | None:
    """Return the place that `on` has set for this thread; None outside of it."""
    return _here.place


def named() -> int | None:
    """Return the pointer of the stream that `naming` has set for this thread; None outside of it."""
    return _here.named


def default() -> Place:
    """Return the stream of `naming`, or the default stream of this thread's device."""
    handle = _here.named or 0
    if SIMULATED or (one_device() and is_ready()):
        return place(0, handle)
    if handle > 2:  # others belong to the current device
        from cuda.core import Stream

        return place(Stream.from_handle(handle).device.device_id, handle)
    return place(cuda.get_current_device().id, handle)


class naming:  # noqa: N801 - it reads like a function
    """Run this thread's calls on a stream, by its pointer; with None on the streams of their arrays.

    It may be entered again, within itself and by other threads. Resources of the stream live as long as this.
    """

    def __init__(self, handle: int | None, owner: Any) -> None:
        self._handle, self._owner = handle, owner

    def __enter__(self) -> None:
        _here.outer.append((_here.place, _here.named))
        _here.place, _here.named = None, self._handle

    def __exit__(self, *error: object) -> None:
        _here.place, _here.named = _here.outer.pop()


class on:  # noqa: N801 - it reads like a function
    """Set this thread's place within a context."""

    __slots__ = ("_after", "_before", "_context", "_place")

    def __init__(self, place: Place, after: Place | None = None) -> None:
        self._place, self._after = place, after

    def __enter__(self) -> Place:
        self._before = _here.place
        self._context = None
        if not (SIMULATED or (one_device() and is_ready())):
            self._context = cuda.gpus[self._place.device]
            self._context.__enter__()
        _here.place = self._place
        if self._after is not None and self._after is not self._place:
            follow(self._after.handle)
        return self._place

    def __exit__(self, *error: object) -> None:
        _here.place = self._before
        if self._context is not None:
            self._context.__exit__(*error)


def is_ready() -> bool:
    """Initialise the driver in this thread."""
    if not _here.ready:
        _refuse_after_fork()
        cuda.current_context()
        _here.ready = True
    return True


def one_device() -> bool:
    """Return whether this thread can have no other device current."""
    if not _counted:
        _counted.append(len(cuda.gpus))
    return _counted[0] == 1


_counted: list[int] = []


class unwatched:  # noqa: N801 - it reads like a function
    """Exclude this thread's driver calls from stream captures within a context.

    Otherwise calls that are not in stream order, such as allocations, break captures of this thread and of others.
    """

    def __enter__(self) -> None:
        from cuda.bindings import driver

        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._before = ask("cuThreadExchangeStreamCaptureMode", relaxed)

    def __exit__(self, *error: object) -> None:
        ask("cuThreadExchangeStreamCaptureMode", self._before)


_forked: list[bool] = []


def _refuse_after_fork() -> None:
    if _forked:
        raise NumkvError(
            "expected a process that started by itself, got a fork of one that had used CUDA, whose driver does not "
            'work here; start processes with multiprocessing.get_context("spawn"), or fork before CUDA is used'
        )


def _after_fork() -> None:
    """Clear the parent's state in a forked child."""
    if places and not SIMULATED:
        _forked.append(True)
        places.clear()
        _here.place, _here.ready = None, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def as_it_is() -> bool:
    """Return whether launches need no setup: one device, and no place, stream or recording set in this thread."""
    here = _here
    return here.place is here.named is here.recording is None and here.ready and _counted == [1]


def follow(handle: int) -> None:
    """Make the current place wait for all work so far on another stream; the host does not wait.

    A graph cannot wait for work outside of it. If the current place is being captured and the other stream is not, this
    does nothing.
    """
    spoil()
    if SIMULATED:
        return
    here = current()
    there = place(here.device, handle)
    if here.capturing() and not there.capturing():
        return
    if there.mark is None:
        there.mark = new_event()
    ask("cuEventRecord", there.mark, there.handle)
    ask("cuStreamWaitEvent", here.handle, there.mark, 0)


def recording() -> Recording | None:
    """Return this thread's current recording, or None."""
    return _here.recording


def spoil() -> None:
    """Mark the current recording as not reproducible by launches alone."""
    if _here.recording is not None:
        _here.recording.spoiled = True


class recorded:  # noqa: N801 - it reads like a function
    """Record this thread's launches within a context."""

    def __enter__(self) -> Recording:
        self._before = _here.recording
        found = _here.recording = Recording()
        return found

    def __exit__(self, *error: object) -> None:
        _here.recording = self._before
