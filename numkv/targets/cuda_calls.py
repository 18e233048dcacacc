"""Calls of public functions on CUDA: the choice of their stream, and the replay of repeated calls."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numkv.arrays import Array
from numkv.errors import NonFiniteInput, NotSupported
from numkv.kernels.cuda import late, memory, streams
from numkv.kernels.cuda.launches import Number
from numkv.kernels.cuda.replays import Given, Made, Replay, replay_of
from numkv.targets.call import Call, Marker

SIMULATED = streams.SIMULATED


#: Calls that a CUDA graph can contain, for messages.
CAPTURABLE = (
    "functions such as paged_append and paged_decode_attention over device arrays, or steps of a PagedKVCache that "
    "lie in its step_buffers"
)

#: Most layouts of calls that are kept for replay.
MOST_REPLAYS = 4096


def handle_of(stream: Any) -> int:
    """Return the pointer of a stream of Numba, CuPy, torch, ``__cuda_stream__``, or an integer.

    Raises
    ------
    NotSupported
        If it is no stream.
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
    if not 0 <= handle < 1 << 64:
        raise NotSupported(
            f"`stream`: expected a stream of numba.cuda, CuPy or torch, an object with __cuda_stream__, a stream's "
            f"pointer or None, got {type(stream).__name__}"
        )
    return 0 if handle == 1 else handle  # both mean the legacy default stream


def named(stream: Any) -> streams.naming:
    """Return a context in which this thread's calls run on a stream; see `numkv.on_stream`."""
    handle = None if stream is None else handle_of(stream)
    return streams.naming(0 if SIMULATED and stream is not None else handle, stream)


def torch_stream(device: int) -> int:
    """Return torch's current stream."""
    return int(_raw_stream()(device))


@functools.cache
def _raw_stream() -> Callable[[int], int]:
    """Return a function for the pointer of torch's current stream, without a stream object if possible."""
    import torch

    raw: Callable[[int], int] | None
    raw = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def _producer(x: Any) -> int | None:
    """Return the current stream of an array's library; None if it is unknown."""
    if type(x).__module__.partition(".")[0] == "torch":
        return torch_stream(x.device.index) if getattr(x, "is_cuda", False) else None
    if getattr(x, "__cuda_ndarray__", False):
        return handle_of(x.stream) if x.stream else None
    interface = getattr(x, "__cuda_array_interface__", None)
    named = None if interface is None else interface.get("stream")
    return None if named is None else handle_of(named)


def _device_of(arrays: tuple[Any, ...]) -> int:
    """Return the device of arrays; the thread's if they have no known device."""
    if streams.one_device():
        return 0
    there = {device for device in map(_own_device, arrays) if device is not None}
    if len(there) > 1:
        raise NotSupported(
            f"expected all arrays on one device, got some on each of the devices {sorted(there)}; copy them to one"
        )
    return there.pop() if there else streams.default().device


def _own_device(x: Any) -> int | None:
    """Return the device of an array; None if it is unknown."""
    if type(x).__module__.partition(".")[0] == "torch" and getattr(x, "is_cuda", False):
        return int(x.device.index)
    if getattr(x, "__cuda_ndarray__", False):
        return int(x.gpu_data.context.device.id)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None and interface["data"][0]:
        from cuda.bindings import driver

        ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        error, device = driver.cuPointerGetAttribute(ordinal, interface["data"][0])
        if error == driver.CUresult.CUDA_SUCCESS:
            return int(device)
    return None


def beside(x: Any) -> Any:
    """Return a context on an array's device, which keeps the thread's stream if it is on that device."""
    if SIMULATED or streams.one_device():
        return contextlib.nullcontext()
    device = _own_device(x)
    here = streams.current()
    return streams.on(here if device in (None, here.device) else streams.place(device, 0))


def capturing() -> bool:
    """Return whether this thread's launches are captured: on numkv's stream, or on torch's."""
    here = streams.chosen()
    if here is not None:
        return here.capturing()
    if streams.named() is not None and streams.current().capturing():
        return True
    torch = sys.modules.get("torch")
    try:
        return torch is not None and bool(
            torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        )
    except AttributeError:  # another module of that name
        return False


def place_of(arrays: tuple[Any, ...], default: streams.Place | None = None) -> streams.Place:
    """Return the place of a call with these arrays; see `numkv.targets.base.Target.on`."""
    here = streams.chosen()
    if here is not None:
        return here
    if SIMULATED:
        return streams.place(0, 0)
    handle = streams.named()
    if handle is None:
        if default is not None:
            return default
        foreign = (x for x in arrays if x is not None and type(x) is not memory.DeviceArray)
        handle = next(filter(None, map(_producer, foreign)), 0)
    return streams.place(_device_of(arrays), handle)


class Unlike(Exception):
    """An argument that prevents a replay."""


# An argument's pointer, its layout, and the stream of its library: None if unknown, for torch the device as a negative
# number.
_Read = tuple[int, Any, int | None]


def _numba(x: Any) -> _Read:
    stream = handle_of(x.stream) if x.stream else None
    return int(x.gpu_data.device_pointer), (x.shape, x.strides, x.dtype, stream), stream


def _torch(x: Any) -> _Read:
    if not x.is_cuda or x.requires_grad:
        raise Unlike
    device = x.device
    return x.data_ptr(), (x.shape, x.stride(), x.dtype, device), -1 - device.index


def _interface(x: Any) -> _Read:
    d = x.__cuda_array_interface__
    stream = d.get("stream")
    layout = d["shape"], d["strides"], d["typestr"], getattr(x, "dtype", None), stream
    return d["data"][0], layout, None if stream is None else handle_of(stream)


def _number(x: Any) -> _Read:
    return 0, x, None


@functools.cache
def _reader(of: type) -> Callable[[Any], _Read] | None:
    """Return the function that reads pointer and layout of a type's arguments; None if there is none."""
    if of is type(None) or of in (bool, int, float, str):
        return _number
    if issubclass(of, (int, float)):  # enums, NumPy's floats
        return _number
    if getattr(of, "__cuda_ndarray__", False):
        return _numba
    if of.__module__.partition(".")[0] == "torch":
        return _torch if of.__name__ in ("Tensor", "Parameter") else None
    return _interface if hasattr(of, "__cuda_array_interface__") else None


def described(arrays: tuple[Any, ...], layout: list[Any], pointers: list[int]) -> int | None:
    """Append the layouts of arguments to `layout`, and their addresses to `pointers`.

    Returns
    -------
    int or None
        The stream of the first library that names one, for torch the device, as a negative number.

    Raises
    ------
    Unlike, TypeError, AttributeError
        If an argument prevents a replay.
    """
    producer: int | None = None
    for x in arrays:
        of = type(x)
        pointer, about, named = _reader(of)(x)  # type: ignore[misc,arg-type]
        pointers.append(pointer)
        layout += (of, about, pointer & 15)
        if named is not None and producer is None:
            producer = named
    return producer


def given_of(
    arrays: tuple[Any, ...], accept: Callable[[Any, str], Array], names: Sequence[str] = ()
) -> list[Given | None] | None:
    """Return the memory of arguments, with None for others than arrays; None if an array has negative strides."""
    given: list[Given | None] = []
    for i, x in enumerate(arrays):
        if x is None or isinstance(x, (bool, int, float)):
            given.append(None)
            continue
        a: Any = accept(x, names[i] if names else "array")
        if any(step < 0 for step in a.strides):
            return None
        steps = zip(a.shape, a.strides, strict=True)
        nbytes = a.dtype.itemsize + sum((n - 1) * step for n, step in steps)
        given.append(Given(memory.pointer_of(a), nbytes if math.prod(a.shape) else 0))
    return given


def returned(
    replay: Replay, held: list[Any], arrays: tuple[Any, ...], accept: Callable[[Any, str], Array],
    names: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Return the result of a replayed call."""
    found = []
    for x in replay.results:
        if type(x) is Made:
            found.append(memory.over(held[x.scratch], x.shape, x.strides, x.dtype))
        else:
            found.append(accept(arrays[x], names[x] if names else "out"))
    return found[0] if len(found) == 1 else tuple(found) if found else None


def keep(
    kept: dict[Any, Replay], most: int, key: Any, recording: streams.Recording, given: list[Given | None] | None,
    written: frozenset[int], place: streams.Place, result: Any, note: Any, foreign: int | None = None,
) -> None:  # fmt: skip
    """Store a recording for replay, if it consists of launches only; see `replay_of`."""
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    if given is not None:
        replay = replay_of(recording, given, written, results, place, foreign)
        if replay is not None:
            replay.note = note
            if len(kept) >= most:
                kept.clear()
            kept[key] = replay


def find(
    kept: dict[Any, Replay], what: tuple[Any, ...], arrays: tuple[Any, ...], own: Any = None
) -> tuple[Any, Replay | None, streams.Place, list[int]]:
    """Look up an earlier equal call, by its function and arguments.

    Returns its key, or None if it cannot be replayed; the earlier call, if there is one to replay; its place; and the
    addresses of its arrays. For an object's call, `own` is one of the object's arrays, which determines the device.
    """
    layout: list[Any] = [what]
    pointers: list[int] = []
    easy = streams.as_it_is()
    try:
        producer = described(arrays, layout, pointers) or 0
        theirs = torch_stream(-1 - producer) if producer < 0 else producer
        place = streams.place(0, theirs) if easy else place_of((*arrays, own))
        if producer < 0:  # torch's current stream may differ now
            layout.append(theirs)
        layout.append(place)
        key = tuple(layout)
        replay = kept.get(key)
    except (Unlike, TypeError, KeyError, AttributeError):
        return None, None, place_of((*arrays, own)), pointers
    if not easy:
        if streams.recording() is not None:
            return None, None, place, pointers
        if not (streams.one_device() and streams.is_ready()):
            replay = None
    return key, replay, place, pointers


class Calls:
    """Runs public functions on CUDA."""

    def __init__(self, accept: Callable[[Any, str], Array]) -> None:
        self._accept = accept
        self._replays: dict[Any, Replay] = {}

    def run(
        self, function: Callable[..., Any], call: Call, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:  # fmt: skip
        """Run a public function on its stream; see `numkv.targets.base.Target.run`."""
        if SIMULATED:
            place = place_of(arrays)
            if call.late:
                raise_late(place)
            with streams.on(place):
                return function(**call.named(arrays, options))
        what = function, call, options, tuple(map(type, options))
        key, replay, place, pointers = find(self._replays, what, arrays)
        if call.late:
            raise_late(place)
        if replay is not None:
            numbers: tuple[int, ...] = ()
            if replay.note is not None:  # each call needs its own number for reports
                numbers = 0, late.of_functions(place.device).look(replay.note)
            held = replay.run(place, pointers, numbers)
            if held is not None:
                return returned(replay, held, arrays, self._accept, call.arrays)
        if call.validate is not None and options[call.validate] is True and place.capturing():
            raise NotSupported(
                f"{function.__name__}: expected validate=False while a stream is captured, got True, which waits for "
                "the device"
            )
        with streams.on(place):
            if key is None:
                return function(**call.named(arrays, options))
            with streams.recorded() as recording:
                result = function(**call.named(arrays, options))
            if not recording.spoiled:
                number = _number_of_look(recording)
                looked_at = None if number is None else number.watch.looked_at(number)
                if number is None or looked_at is not None:
                    given = given_of(arrays, self._accept, call.arrays)
                    how = recording, given, call.written, place
                    keep(self._replays, MOST_REPLAYS, key, *how, result, looked_at)
        return result


def _number_of_look(recording: streams.Recording) -> Number | None:
    """Return the number under which a call reports NaN and infinity; None if it checks nothing."""
    for _, _, _, _, args in recording.launches:
        for x in args:
            for n in x if isinstance(x, tuple) else (x,):
                if type(n) is Number and n.watch is not None:
                    return n
    return None


_pending: list[NonFiniteInput] = []


def raise_late(place: streams.Place) -> None:
    """Raise the late errors of earlier functions' writes, as far as their reports have arrived.

    Parameters
    ----------
    place : Place
        Place of the next call. Reports are fetched only while no stream is captured, because fetching waits.
    """
    arrived = late.functions_arrived()
    if arrived and not (place.capturing() or capturing()):
        for watch in arrived:
            _collect_functions(watch)
    if _pending:
        raise _pending.pop(0)


def _collect_functions(watch: late.Watch) -> None:
    last = -1
    for report in watch.take():
        if report.call != last:  # only the first token of each call
            last = report.call
            _pending.append(_late_error(report))


def collect_late(watch: Any, wait: bool = False) -> None:
    """See `numkv.targets.base.Target.collect_late`."""
    if watch is None or not (wait or watch.arrived()) or capturing():  # waiting would end a capture
        return
    if wait:
        late.wait()
    for report in watch.take():
        if report.what is not None:
            error = _late_error(report)
            marker: Marker = report.what[2]
            marker.mark(marker.first + error.index[0], error, report.call)  # type: ignore[index]


def _late_error(report: late.Report) -> NonFiniteInput:
    """Return the error for an element that a kernel found to be NaN or infinite, after the call returned."""
    if report.what is None:
        return NonFiniteInput(
            "expected finite numbers in an earlier call, got NaN or infinity", index=()
        )
    name, shape, kind, axes = report.what[report.of_v]
    index = tuple(int(i) for i in np.unravel_index(report.index, shape)[:axes])
    marker: Marker | None = report.what[2]
    if marker is not None and marker.skipped:
        index = (index[0] + marker.skipped, *index[1:])
    return NonFiniteInput(
        f"`{name}`: expected finite numbers for storage in {kind}, got NaN or infinity at {index} of an earlier "
        "call; the row was stored as zeros",
        index=index,
    )
