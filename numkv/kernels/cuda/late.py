"""Asynchronous error reports of kernels: NaN and infinity in rows that were to be quantised.

The writer of such rows has a `Watch`: words of device memory, and one of pinned memory, which kernels can access. A
kernel that finds a bad row stores zeros instead. It writes the smallest of (number of the call, side, index) to the
word of the row's token, modulo `WORDS`. It also sets the word of the host. The host checks its word in passing. Only if
it is set, or on request, the host waits and reads the others. Each object, and each sequence of a call within `WORDS`
tokens, therefore gets its own report.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from numkv.kernels.cuda.launches import Number
from numkv.kernels.cuda.rows import NOWHERE, V_SIDE
from numkv.kernels.cuda.streams import SIMULATED, ask, current, on, place, unwatched

#: Words of device memory of a watch; a power of two.
WORDS = 64
#: Distance of two calls in the keys that kernels report.
CALL = 2 * V_SIDE
#: Calls of a watch after which its numbers restart, once the device is idle. Calls in CUDA graphs have numbers beyond,
#: for good.
MOST_CALLS = 1 << 25
MOST_LASTING = (1 << 26) - 1 - MOST_CALLS
#: Calls that a watch remembers; earlier ones ended long ago.
REMEMBERED = 1 << 12
#: Watches whose words are allocated together.
PAGE = 128


class Report(NamedTuple):
    """What was found.

    Attributes
    ----------
    call : int
        Which call of the watch.
    what : object
        What the writer handed to `Watch.look`; None if that was too long ago.
    of_v : bool
        Whether it is in V.
    index : int
        Flat index of the element.
    """

    call: int
    what: Any
    of_v: bool
    index: int


class _LateWords:
    """The words of one watch that kernels report to: `WORDS` int64 of the device, and one of the host."""

    def __init__(self, found: Any, raised: Any, host: Any) -> None:
        self.found, self.raised, self.host = found, raised, host

    def clear(self) -> None:
        """Clear all reports; the words' device must be current."""
        self.found.copy_to_device(np.full(WORDS, NOWHERE, np.int64))
        self.host[0] = 0


class _Device:
    """The words of a device: unused ones, and those of deleted watches."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.fresh: list[_LateWords] = []
        self.retired: list[_LateWords] = []

    def take(self) -> _LateWords:
        """Return words for a watch."""
        with self.lock:
            # Kernels may still write to retired words, and waiting is forbidden during a capture.
            if not self.fresh and self.retired and not current().capturing():
                _synchronise()
                self.fresh, self.retired = self.retired, []
                for words in self.fresh:
                    words.clear()
            if not self.fresh:
                self.fresh = _page()
            return self.fresh.pop()


def _page() -> list[_LateWords]:
    """Allocate words."""
    if SIMULATED:
        from numkv.kernels.cuda.memory import simulated

        raised = cuda.to_device(np.zeros(1, np.int64))
        words = cuda.to_device(np.full(WORDS, NOWHERE, np.int64))
        return [_LateWords(words, raised, simulated(raised))]
    from numkv.kernels.cuda.memory import foreign, pointer_of
    from numkv.kernels.cuda.uploads import constant

    dtype = np.dtype(np.int64)
    found = constant(np.full(PAGE * WORDS, NOWHERE, dtype))  # works during a capture
    with unwatched():
        host = cuda.pinned_array(PAGE, dtype)
    host[:] = 0
    # Kernels access pinned memory at the host's address.
    on_device, on_host = pointer_of(found), host.__array_interface__["data"][0]
    return [
        _LateWords(
            foreign(on_device + 8 * WORDS * i, (WORDS,), None, dtype, found),
            foreign(on_host + 8 * i, (1,), None, dtype, host),
            memoryview(host[i : i + 1]),
        )
        for i in range(PAGE)
    ]


_devices: dict[int, _Device] = {}


def _of_device(number: int) -> _Device:
    return _devices.get(number) or _devices.setdefault(number, _Device(number))


class Watch:
    """Collects the reports of kernels about rows that an object, or functions, write.

    Attributes
    ----------
    calls : int
        Number of writing calls that have requested a number.
    latest : object
        The object that the last of them passed to `look`. A writer may set it to None to detect a later `look`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: _Device | None = None
        self._words: _LateWords | None = None
        self._host: Any = (0,)
        self._written: dict[int, Any] = {}
        self._lasting: list[Any] = []
        self.calls = 0
        self.latest: Any = None

    def __del__(self) -> None:
        if self._device is not None and self._words is not None:
            self._device.retired.append(self._words)

    def words(self) -> _LateWords:
        """Return the words that kernels report to."""
        if self._words is None:
            with self._lock:
                if self._words is None:
                    self._device = _of_device(current().device)
                    self._words = self._device.take()
                    self._host = self._words.host
        return self._words

    def look(self, what: Any, lasting: bool = False) -> Number:
        """Return a number for a call that writes.

        Parameters
        ----------
        what : object
            Returned with each report about the call.
        lasting : bool
            Whether the call is a part of a CUDA graph, which may replay it at any time.
        """
        if self._words is None:
            self.words()
        with self._lock:
            if lasting and len(self._lasting) < MOST_LASTING:
                self._lasting.append(what)
                return Number.of((MOST_CALLS + len(self._lasting)) * CALL, 1, self)
            if self.calls >= MOST_CALLS:  # a pending report delays the restart until it is taken
                _synchronise()
                if not self._host[0]:
                    self.calls = 0
                    self._written.clear()
            self.calls += 1
            self._written[self.calls] = self.latest = what
            if len(self._written) > REMEMBERED:
                for old in list(self._written)[: REMEMBERED // 2]:
                    del self._written[old]
            return Number.of(self.calls * CALL, 1, self)

    def looked_at(self, number: int) -> Any:
        """Return the object that was passed to `look` for a number; None if the call is too old."""
        with self._lock:
            return self._written.get(number // CALL)

    def arrived(self) -> bool:
        """Return whether a kernel has reported; does not wait."""
        return self._host[0] != 0

    def take(self) -> list[Report]:
        """Return the reports, the earliest call's first; waits for the device if there is one."""
        with self._lock:
            if self._words is None or not self._host[0]:
                return []
            with on(place(self._device.number, 0)):  # type: ignore[union-attr]
                _synchronise()
                keys = self._words.found.copy_to_host()
                self._words.clear()
            found = []
            for key in np.sort(keys[keys != NOWHERE]).tolist():
                call, rest = divmod(key, CALL)
                of_graph = call - MOST_CALLS - 1
                what = self._lasting[of_graph] if of_graph >= 0 else self._written.get(call)
                found.append(Report(call, what, rest >= V_SIDE, rest % V_SIDE))
            return found


_functions: dict[int, Watch] = {}


def of_functions(device: int | None = None) -> Watch:
    """Return a device's watch for functions, which have no object of their own; None is this thread's device."""
    device = current().device if device is None else device
    return _functions.get(device) or _functions.setdefault(device, Watch())


def flags(look: int) -> tuple[Any, Any]:
    """Return the arrays that kernels report to: the smallest keys found, and whether there is a report.

    Parameters
    ----------
    look : int
        The number from `Watch.look`; 0 without checks.
    """
    watch = look.watch if type(look) is Number and look.watch is not None else of_functions()
    words = watch.words()
    return words.found, words.raised


def functions_arrived() -> list[Watch]:
    """Return the watches of functions, of all devices, that have a report; does not wait."""
    return [watch for watch in tuple(_functions.values()) if watch.arrived()]


def _synchronise() -> None:
    """Wait for all launches on this thread's device."""
    if not SIMULATED:
        ask("cuCtxSynchronize")


def wait() -> None:
    """Wait for all launches on the devices that report."""
    if not SIMULATED:
        for device in list(_devices):
            with on(place(device, 0)):
                _synchronise()
