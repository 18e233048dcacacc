"""What CUDA graphs keep: memory that calls take while a stream is captured, and objects that a graph goes on reading.

A graph holds pointers, not objects. So each one that numkv has work in gets a *user object* of the driver, which lives
as long as the graph, and whatever was instantiated from it, can run. The driver says so by calling a function in a
thread of its own, which must not wait for Python: it is ``sem_post`` of the C library. The host looks at these
semaphores in passing, and then lets go.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from numkv.kernels.cuda.streams import Place, ask

_SEMAPHORE_BYTES = 64  # more than any sem_t has
_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE
_NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC


class Capture:
    """A graph that is being captured, or has been.

    Attributes
    ----------
    held : list
        What the graph goes on reading; dropped when it is gone.
    free : dict of tuple to list
        Memory of the graph that no array uses any more, by the handle of the stream and by size. Later calls on that
        stream, also in the graph, may reuse it.
    """

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.free: dict[tuple[int, int], list[Kept]] = {}
        self.gone = False

    def end(self) -> None:
        """Let go of everything."""
        self.gone = True
        self.held.clear()
        self.free.clear()


class Kept:
    """Memory that a graph and arrays share: it is freed when neither is left.

    Parameters
    ----------
    pointer : object
        Of the memory, as the driver takes it.
    free : function
        Frees it.
    """

    __slots__ = ("_free", "pointer")

    def __init__(self, pointer: Any, free: Any) -> None:
        self.pointer, self._free = pointer, free

    def __del__(self) -> None:
        self._free(self.pointer)


_lock = threading.Lock()
# By the number that the driver gives a capture; and captures whose graphs may still be there, with their semaphores.
_by_number: dict[int, Capture] = {}
_alive: list[tuple[Any, Capture, int]] = []


def capture_of(place: Place) -> Capture | None:
    """The capture that what is launched at a place becomes a part of; None if there is none."""
    if place.handle == 0 or not place.capturing():
        return None
    from cuda.bindings import driver

    query = getattr(driver, "cuStreamGetCaptureInfo_v2", driver.cuStreamGetCaptureInfo)
    error, _, number, graph, *_ = query(place.handle)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuStreamGetCaptureInfo: expected a capture, got {error.name}")
    found = _by_number.get(int(number))
    if found is None:
        sweep()
        with _lock:
            found = _by_number.get(int(number))
            if found is None:
                found = _by_number[int(number)] = _begin(graph, int(number))
    return found


def _begin(graph: Any, number: int) -> Capture:
    """Have a graph say when it is gone."""
    from cuda.bindings import driver

    found = Capture()
    c = _c_library()
    if c is None:
        return found  # which lasts as long as the process
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    c.sem_init(semaphore, 0, 0)
    post = driver.CUhostFn(ctypes.cast(c.sem_post, ctypes.c_void_p).value)
    made = ask("cuUserObjectCreate", ctypes.addressof(semaphore), post, 1, _NO_DESTRUCTOR_SYNC)
    ask("cuGraphRetainUserObject", graph, made, 1, _MOVE)
    _alive.append((semaphore, found, number))
    return found


def _c_library() -> Any:
    """The C library, where it has semaphores that lie in memory; else None."""
    try:
        c = ctypes.CDLL(None)
        return c if c.sem_init and c.sem_post and c.sem_trywait else None
    except (AttributeError, OSError, TypeError):
        return None


def hold(place: Place, *objects: Any) -> bool:
    """Have the graph that is being captured at a place keep objects; False, and nothing, if none is."""
    capture = capture_of(place)
    if capture is None:
        return False
    known = {id(x) for x in capture.held}
    capture.held += [x for x in objects if id(x) not in known]
    return True


def sweep() -> None:
    """Let go of what graphs kept that are gone."""
    if not _alive:
        return
    c = _c_library()
    with _lock:
        gone = [x for x in _alive if c.sem_trywait(x[0]) == 0]
        for x in gone:
            _alive.remove(x)
            _by_number.pop(x[2], None)
    for _, capture, _ in gone:  # outside of the lock, as finalisers may come back here
        capture.end()
