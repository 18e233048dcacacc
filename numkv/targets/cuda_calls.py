"""Calls of public functions on CUDA: which stream they run on, and the short way of those that repeat."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from numkv.arrays import Array
from numkv.errors import NonFiniteInput, NotSupported
from numkv.kernels.cuda import late, memory, streams
from numkv.kernels.cuda.replays import Given, Replay, replay_of
from numkv.kinds import Kind
from numkv.targets.call import Call

__all__ = ["HERE", "Calls", "handle_of", "place_of", "raise_late", "torch_stream", "watch"]

SIMULATED = streams.SIMULATED


class _Here:
    """The stream of a function that runs on the one that has been chosen already."""

    def __repr__(self) -> str:
        return "the stream of the call"


#: What `Calls.run` passes as `stream` to the function that it runs.
HERE = _Here()

#: Layouts of calls that are kept for the short way.
MOST_REPLAYS = 4096


def handle_of(stream: Any) -> int:
    """The pointer of a stream that a caller names: Numba's, CuPy's, torch's, by ``__cuda_stream__``, or an integer.

    Raises
    ------
    NotSupported
        If it is none.
    """
    found: Any = None
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, (bool, np.bool_)):
        found = int(stream)
    elif hasattr(stream, "__cuda_stream__"):
        pair = stream.__cuda_stream__
        found = (pair() if callable(pair) else pair)[1]
    else:
        for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba
            if hasattr(stream, name):
                found = getattr(stream, name)
                found = getattr(found, "value", found) or 0
                break
        else:
            if SIMULATED and type(stream).__module__.startswith("numba.cuda.simulator"):
                found = 0
    try:
        handle = int(found)
    except (TypeError, ValueError):
        handle = -1
    if handle < 0:
        raise NotSupported(
            f"`stream`: expected a stream of numba.cuda, CuPy or torch, an object with __cuda_stream__, a stream's "
            f"pointer or None, got {type(stream).__name__}"
        )
    return 0 if handle == 1 else handle  # both mean the legacy default stream


def torch_stream(device: int) -> int:
    """The stream that torch has current."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def _producer(x: Any) -> int | None:
    """The stream that an array's library has current; None where it does not say."""
    if type(x).__module__.partition(".")[0] == "torch":
        return torch_stream(x.device.index) if getattr(x, "is_cuda", False) else None
    if getattr(x, "__cuda_ndarray__", False):
        return handle_of(x.stream) if x.stream else None
    interface = getattr(x, "__cuda_array_interface__", None)
    named = None if interface is None else interface.get("stream")
    return None if named is None else handle_of(named)


def _device_of(arrays: tuple[Any, ...]) -> int:
    """The device that arrays are on; where they do not say, the thread's."""
    if streams.one_device():
        return 0
    for x in arrays:
        if type(x).__module__.partition(".")[0] == "torch" and getattr(x, "is_cuda", False):
            return int(x.device.index)
        if getattr(x, "__cuda_ndarray__", False):
            return int(x.gpu_data.context.device.id)
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is not None:
            from cuda.bindings import driver

            ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            error, device = driver.cuPointerGetAttribute(ordinal, interface["data"][0])
            if error == driver.CUresult.CUDA_SUCCESS:
                return int(device)
    return streams.default().device


def place_of(stream: Any, arrays: tuple[Any, ...]) -> streams.Place:
    """Where a call runs.

    Parameters
    ----------
    stream : object
        What the caller named, or None: then the stream that the library of the first foreign array has current.
    arrays : tuple
        What the caller passed.
    """
    if stream is not None:
        handle = handle_of(stream)
        return streams.place(0 if SIMULATED else _device_of(arrays), 0 if SIMULATED else handle)
    if SIMULATED:
        return streams.place(0, 0)
    handle = 0
    for x in arrays:
        if x is not None and type(x) is not memory.DeviceArray:
            named = _producer(x)
            if named:
                handle = named
                break
    return streams.place(_device_of(arrays), handle)


class _Unlike(Exception):
    """An argument that the short way does not know."""


def _numba(x: Any) -> tuple[int, Any]:
    if x.stream:
        raise _Unlike
    return int(x.gpu_data.device_pointer), (x.shape, x.strides, x.dtype)


def _torch(x: Any) -> tuple[int, Any]:
    if not x.is_cuda or x.requires_grad:
        raise _Unlike
    return x.data_ptr(), (x.shape, x.stride(), x.dtype, x.device)


def _interface(x: Any) -> tuple[int, Any]:
    d = x.__cuda_array_interface__
    return d["data"][0], (d["shape"], d["strides"], d["typestr"], str(getattr(x, "dtype", "")))


def _number(x: Any) -> tuple[int, Any]:
    return 0, (type(x), x)


@functools.cache
def _reader(of: type) -> Callable[[Any], tuple[int, Any]] | None:
    """What tells the pointer and the layout of an argument of a type; None where nothing does."""
    if of is type(None) or of in (bool, int, float, str):
        return _number
    if issubclass(of, (int, float)):  # enums, NumPy's floats
        return _number
    if getattr(of, "__cuda_ndarray__", False):
        return _numba
    if of.__module__.partition(".")[0] == "torch":
        return _torch if of.__name__ in ("Tensor", "Parameter") else None
    return _interface if hasattr(of, "__cuda_array_interface__") else None


class Calls:
    """How public functions run on CUDA."""

    def __init__(self, accept: Callable[[Any, str], Array]) -> None:
        self._accept = accept
        self._replays: dict[Any, Replay] = {}

    def run(
        self, function: Callable[..., Any], call: Call, stream: Any, arrays: tuple[Any, ...],
        options: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        """Run a public function on its stream.

        Parameters
        ----------
        function : function
            The function; it is called again, with `HERE` as its stream.
        call : Call
            What its arguments are called.
        stream : object
            What the caller named, or None.
        arrays, options : tuple
            Its arguments, in the order of `call`.
        """
        if call.late:
            raise_late()
        place = place_of(stream, arrays)
        key: Any = None
        pointers: list[int] = []
        if not SIMULATED and streams.recording() is None:
            try:
                layout: list[Any] = [function, place.handle, place.device]
                for x in arrays:
                    pointer, described = _reader(type(x))(x)  # type: ignore[misc,arg-type]
                    pointers.append(pointer)
                    layout.append((type(x), described, pointer & 15))
                for x in options:
                    layout.append((type(x), x))
                key = tuple(layout)
                replay = self._replays.get(key)
            except (_Unlike, TypeError, KeyError, AttributeError):
                key = replay = None
            if replay is not None and streams.ready(place) and replay.run(place, pointers):
                return None if replay.result < 0 else arrays[replay.result]
        given = dict(zip(call.arrays, arrays, strict=True)) | dict(
            zip(call.options, options, strict=True)
        )
        with streams.on(place):
            if key is None:
                return function(**given, stream=HERE)
            with streams.recorded() as recording:
                result = function(**given, stream=HERE)
            self._keep(key, recording, call, arrays, result, place)
        return result

    def _keep(
        self, key: Any, recording: streams.Recording, call: Call, arrays: tuple[Any, ...], result: Any,
        place: streams.Place,
    ) -> None:  # fmt: skip
        """Keep what was recorded for the short way, if launches are all that it takes."""
        if recording.spoiled:
            return
        returned = next((i for i, x in enumerate(arrays) if x is result and x is not None), -1)
        if result is not None and returned < 0:
            return
        given: list[Any] = []
        for name, x in zip(call.arrays, arrays, strict=True):
            if x is None or isinstance(x, (bool, int, float)):
                given.append(None)
                continue
            a: Any = self._accept(x, name)
            if any(step < 0 for step in a.strides):
                return
            steps = zip(a.shape, a.strides, strict=True)
            nbytes = a.dtype.itemsize + sum((n - 1) * step for n, step in steps)
            given.append(Given(memory.pointer_of(a), nbytes if math.prod(a.shape) else 0))
        replay = replay_of(recording, given, call.written, returned, place)
        if replay is not None:
            if len(self._replays) >= MOST_REPLAYS:
                self._replays.clear()
            self._replays[key] = replay


def raise_late(wait: bool = False) -> None:
    """Raise what writes before found in their rows, as far as it has arrived; with `wait` once all are done."""
    if wait:
        late.wait()
    if late.arrived():
        report = late.take()
        if report is not None:
            raise _late_error(report)


def watch(k: tuple[str, tuple[int, ...], Kind], v: tuple[str, tuple[int, ...], Kind]) -> int:
    """See `numkv.targets.base.Target.watch`."""
    return late.number((k, v))


def _late_error(report: late.Report) -> NonFiniteInput:
    """The error for an element that a kernel found to be NaN or infinite, after the call returned."""
    if report.what is None:
        return NonFiniteInput(
            "expected finite numbers in an earlier call, got NaN or infinity", index=()
        )
    name, shape, kind = report.what[report.of_v]
    index = tuple(int(i) for i in np.unravel_index(report.index, shape))
    return NonFiniteInput(
        f"`{name}`: expected finite numbers for storage in {kind}, got NaN or infinity at {index} of an earlier "
        "call; the row was stored as zeros",
        index=index,
    )
