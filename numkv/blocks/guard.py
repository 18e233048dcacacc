"""Guards: short operations on a shared block pool, one thread at a time, and none inside another.

Block pools are shared by layers of different threads. Their operations take microseconds, so threads wait for each
other. A thread inside an operation must not wait when a callback, a finaliser or a signal handler calls the pool again.
It would wait for itself, so it gets an error instead.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from numkv.errors import NumkvError
from numkv.interrupts import signals_deferred
from numkv.keywords import explain

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Guard:
    """The lock of a block pool's operations. Copies and unpickled pools begin anew.

    Attributes
    ----------
    lock : threading.RLock
        Held during an operation. It is reentrant, so a second call of its own thread is an error, not a deadlock.
    inside : bool
        Whether an operation that changes the pool is running.
    torn : bool
        Whether this is a forked child, and an operation was running in another thread of the parent.
    """

    __slots__ = ("__weakref__", "inside", "lock", "torn")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inside = self.torn = False
        _all.add(self)

    def __reduce__(self) -> tuple[type[Guard], tuple[()]]:
        return Guard, ()


class _Guarded(Protocol):
    _guard: Guard


_Self = TypeVar("_Self", bound=_Guarded)


def changes(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that changes the pool: threads wait for their turn, a call inside a call gets an error.

    Signals wait for its end.
    """
    name = method.__name__

    @functools.wraps(method)
    def guarded(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        guard = self._guard
        if _forking:
            time.sleep(_MOMENT)
        with signals_deferred, guard.lock:
            if guard.inside:
                if guard.torn:
                    raise _torn(self, name)
                raise NumkvError(
                    f"{name}: this {type(self).__name__} is in the middle of another change, which this call comes "
                    "out of (`on_event`, a finaliser, a signal handler); make it when that is done"
                )
            guard.inside = True
            try:
                return method(self, *args, **kwargs)
            except TypeError as error:
                explain(error, method, kwargs, f"{type(self).__name__}.{name}")
                raise
            finally:
                guard.inside = False

    return guarded


def looks(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that reads the pool: other threads' changes are over or have not begun."""
    name = method.__name__

    @functools.wraps(method)
    def guarded(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        guard = self._guard
        if _forking:
            time.sleep(_MOMENT)
        with guard.lock:
            if guard.torn:
                raise _torn(self, name)
            try:
                return method(self, *args, **kwargs)
            except TypeError as error:
                explain(error, method, kwargs, f"{type(self).__name__}.{name}")
                raise

    return guarded


def _torn(obj: object, name: str) -> NumkvError:
    """Return the error in a child that was forked in the middle of a change."""
    return NumkvError(
        f"{name}: another thread was changing this {type(obj).__name__} when the process forked, for longer than the "
        f"fork could wait ({_LONGEST_WAIT:g} s); fork while no thread uses it, or make another one in the child"
    )


# -- forks
#
# A fork waits until no other thread is inside an operation, so that the child finds sound pools and free locks.

_all: weakref.WeakSet[Guard] = weakref.WeakSet()
_LONGEST_WAIT = 30.0
"""Seconds that a fork waits at most, as who holds a lock may be waiting for this thread. Operations take microseconds;
the first one of a process compiles, which takes many seconds on a busy machine. A child whose pool was left in the
middle of a change gets errors that say so."""


_forking: list[None] = []
"""As many as there are threads that wait to fork. Others let them go first, for a moment before each operation: they
would get a lock that they have just given back sooner than a thread that has to wake up, again and again."""
_MOMENT = 0.0005


class _Held(threading.local):
    """The guards that the forking thread holds: two may fork at once."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []


_held = _Held()


def _every() -> list[Guard]:
    while True:
        try:
            return list(_all)
        except RuntimeError:  # another thread has made one meanwhile
            continue


def _before_fork() -> None:
    until = time.monotonic() + _LONGEST_WAIT
    _forking.append(None)
    try:
        for guard in _every():
            if guard.lock.acquire(timeout=max(0.0, until - time.monotonic())):
                _held.guards.append(guard)
    finally:
        _forking.pop()


def _after_fork() -> None:
    held = _held.guards
    while held:
        held.pop().lock.release()


def _after_fork_in_child() -> None:
    held = set(map(id, _held.guards))
    _forking.clear()
    _after_fork()
    for guard in _every():
        if id(guard) not in held:  # in use by a thread that the child does not have
            guard.lock = threading.RLock()
            guard.torn = guard.inside


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
