"""Memory that calls allocate during CUDA graph capture, and objects that a graph reads: both live as long as the graph.

A graph holds pointers, not objects. Each graph with work of numkv therefore gets a *user object* of the driver. It
lives as long as the graph, or any instance of it, can run. At its end the driver calls a function in its own thread,
which must not wait for Python. This function is ``sem_post`` of the C library. The host polls these semaphores in later
calls, and then drops its references.
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
    """A graph during or after its capture.

    Attributes
    ----------
    held : list
        Objects that the graph reads; dropped when it is destroyed.
    free : dict of tuple to list
        Memory of the graph that no array uses any more, by the handle of the stream and by size. Later calls on that
        stream, also in the graph, may reuse it.
    """

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.free: dict[tuple[int, int], list[Kept]] = {}
        self.gone = False

    def end(self) -> None:
        """Drop all references."""
        self.gone = True
        self.held.clear()
        self.free.clear()


class Kept:
    """Memory that a graph and arrays share: it is freed when none of them exists any more.

    Parameters
    ----------
    pointer : object
        Pointer to the memory, as the driver expects it.
    free : function
        Frees the memory.
    """

    __slots__ = ("_free", "pointer")

    def __init__(self, pointer: Any, free: Any) -> None:
        self.pointer, self._free = pointer, free

    def __del__(self) -> None:
        self._free(self.pointer)


_lock = threading.Lock()
# Captures by the driver's number; captures whose graphs may still exist, with their semaphores.
_by_number: dict[int, Capture] = {}
_alive: list[tuple[Any, Capture, int]] = []


def capture_of(place: Place) -> Capture | None:
    """Return the capture that launches at a place become a part of, or None."""
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
    """Register a user object that signals a graph's destruction."""
    from cuda.bindings import driver

    found = Capture()
    c = _c_library()
    if c is None:
        return found  # it lasts as long as the process
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    c.sem_init(semaphore, 0, 0)
    post = driver.CUhostFn(ctypes.cast(c.sem_post, ctypes.c_void_p).value)
    made = ask("cuUserObjectCreate", ctypes.addressof(semaphore), post, 1, _NO_DESTRUCTOR_SYNC)
    ask("cuGraphRetainUserObject", graph, made, 1, _MOVE)
    _alive.append((semaphore, found, number))
    return found


def _c_library() -> Any:
    """Return the C library if it has semaphores in memory, else None."""
    try:
        c = ctypes.CDLL(None)
        return c if c.sem_init and c.sem_post and c.sem_trywait else None
    except (AttributeError, OSError, TypeError):
        return None


def hold(place: Place, *objects: Any) -> bool:
    """Make the graph being captured at a place keep objects alive; return False if there is no capture."""
    capture = capture_of(place)
    if capture is None:
        return False
    known = {id(x) for x in capture.held}
    capture.held += [x for x in objects if id(x) not in known]
    return True


def sweep() -> None:
    """Drop the references of destroyed graphs."""
    if not _alive:
        return
    c = _c_library()
    with _lock:
        gone = [x for x in _alive if c.sem_trywait(x[0]) == 0]
        for x in gone:
            _alive.remove(x)
            _by_number.pop(x[2], None)
    for _, capture, _ in gone:  # outside the lock, because finalisers may call this again
        capture.end()
