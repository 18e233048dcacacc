"""What kernels report when nobody waits for them: NaN and infinity in rows that were to be quantised.

A kernel that writes such rows stores zeros in their place, puts the smallest of (number of the call, side, index) into
a word of device memory, and sets a word of the host's memory, which it sees as its own. The host looks at that word in
passing; only when it is set, or when somebody asks, does it wait and fetch the rest.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from numkv.kernels.cuda.rows import NOWHERE, V_SIDE
from numkv.kernels.cuda.streams import SIMULATED, ask, current, on, place

__all__ = ["Report", "arrived", "flags", "number", "take", "wait"]

#: Calls are this far apart in what kernels report.
CALL = 2 * V_SIDE
#: Calls after which numbers start again, when nothing can be under way any more. Beyond are those of calls in CUDA
#: graphs, which stay.
MOST_CALLS = 1 << 25
MOST_LASTING = (1 << 26) - 1 - MOST_CALLS


class Report(NamedTuple):
    """What was found.

    Attributes
    ----------
    what : object
        What the writer handed to `number`.
    of_v : bool
        Whether it is in V.
    index : int
        Flat index of the element.
    """

    what: Any
    of_v: bool
    index: int


class _Flags:
    """The words of a device, and who has written since they were last clear."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        self.written: dict[int, Any] = {}
        self.lasting: list[Any] = []
        self.found = cuda.to_device(np.array([NOWHERE], np.int64))
        if SIMULATED:
            self.raised = cuda.to_device(np.zeros(1, np.int64))
            self.host = self.raised._ary
        else:
            self.host = cuda.pinned_array(1, np.int64)
            self.host[0] = 0
            from numkv.kernels.cuda.memory import foreign

            # The driver lets kernels see pinned memory at the host's address.
            pointer = self.host.__array_interface__["data"][0]
            self.raised = foreign(pointer, (1,), None, np.dtype(np.int64), self.host)


_flags: dict[int, _Flags] = {}
_making = threading.Lock()


def _of_device() -> _Flags:
    device = current().device
    found = _flags.get(device)
    if found is None:
        with _making:
            found = _flags.get(device)
            if found is None:
                found = _flags[device] = _Flags()
    return found


def flags() -> tuple[Any, Any]:
    """The arrays that kernels report to: the smallest of what they found, and whether there is anything."""
    of = _of_device()
    return of.found, of.raised


def number(what: Any, lasting: bool = False) -> int:
    """A number for a call that writes; `what` comes back with what is found in it.

    Parameters
    ----------
    what : object
        Whoever writes, and where.
    lasting : bool
        Whether the call is a part of a CUDA graph, which may make it again at any time.
    """
    of = _of_device()
    with of.lock:
        if lasting and len(of.lasting) < MOST_LASTING:
            of.lasting.append(what)
            return (MOST_CALLS + len(of.lasting)) * CALL
        if of.calls >= MOST_CALLS:  # once a report has arrived they go on until it is taken
            cuda.synchronize()
            if not of.host[0]:
                of.calls = 0
                of.written.clear()
        of.calls += 1
        of.written[of.calls] = what
        if len(of.written) > 1 << 12:  # calls that old have long been done
            for old in list(of.written)[: 1 << 11]:
                del of.written[old]
        return of.calls * CALL


def arrived() -> int | None:
    """The device of a kernel that has reported, None if none has; does not wait."""
    for device, of in tuple(_flags.items()):
        if of.host[0]:
            return device
    return None


def wait() -> None:
    """Wait for all that has been launched on the devices that report."""
    if not SIMULATED:
        for device in list(_flags):
            with on(place(device, 0)):
                ask("cuCtxSynchronize")


def take() -> Report | None:
    """The earliest report, if one has arrived; what others there were is forgotten with it."""
    of = _of_device()
    with of.lock:
        if not of.host[0]:
            return None
        if not SIMULATED:
            ask("cuCtxSynchronize")
        key = int(of.found.copy_to_host()[0])
        of.found.copy_to_device(np.array([NOWHERE], np.int64))
        of.host[0] = 0
        call, rest = divmod(key, CALL)
        of_graph = call - MOST_CALLS - 1
        what = of.lasting[of_graph] if of_graph >= 0 else of.written.get(call)
        return Report(what, rest >= V_SIDE, rest % V_SIDE)
