"""Concurrent requests to a store, their timeouts, and a circuit breaker for a store that does not answer.

A request without an answer cannot be cancelled. Separate threads therefore make requests. The caller gives up when no
answer has arrived for some time, and accepts none from then on. A `Breaker` then blocks all requests, until its own
probe is answered.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from numkv.interrupts import opened, uninterrupted

#: Seconds that a thread waits for another request before it ends.
_IDLE = 2.0
#: Seconds until a store that did not answer is probed again, at first and at most. The delay doubles each time.
_FIRST, _LONGEST = 1.0, 60.0

#: Seconds after which a thread that waits handles signals, which are deferred otherwise.
_SIGNALS = 0.1

# How to reset objects in a forked child: it has none of the threads, and locks that these held stay locked.
_resets: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def begins(begin: Any) -> None:
    """Call a method that resets an object's locks and threads: now, and in each forked child."""
    begin()
    _resets[begin.__self__] = begin.__func__


def _after_fork_in_child() -> None:
    for owner, reset in list(_resets.items()):
        reset(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Unanswered(TimeoutError):
    """A request had no answer in time, or was not made, because the store does not answer."""


class _Batch:
    """Requests that are made together."""

    def __init__(
        self, count: int, ask: Callable[[int], Any], take: Callable[[int, Any], None], late: Callable[[], None]
    ) -> None:  # fmt: skip
        self._ask, self._take, self._late = ask, take, late
        self.errors: list[Exception | None] = [Unanswered("no answer") for _ in range(count)]
        self.changed = threading.Condition()
        self.left, self.taking, self.closed, self.answered = count, 0, False, time.monotonic()

    def do(self, i: int) -> None:
        """Make a request, and process its answer if the caller still waits for it."""
        self.answered = time.monotonic()  # the start of a request also counts as progress
        answer: Any = None
        error: Exception | None = None
        try:
            answer = self._ask(i)
        except Exception as problem:
            error = problem
        with self.changed:
            late = self.closed
            if not late:
                self.answered = time.monotonic()
                self.taking += 1
        if late:
            if error is None or isinstance(error, FileNotFoundError):
                self._late()
            return
        if error is None:
            try:
                self._take(i, answer)
            except Exception as problem:
                error = problem
        with self.changed:
            self.errors[i] = error and error.with_traceback(None)
            self.left, self.taking = self.left - 1, self.taking - 1
            self.changed.notify_all()

    def wait(self, patience: float | None) -> None:
        """Wait for all answers, or until none has arrived for `patience` seconds; later answers are ignored."""
        with self.changed:
            try:
                while self.left:
                    rest = None if patience is None else self.answered + patience - time.monotonic()
                    if rest is not None and rest <= 0 and not self.taking:
                        break
                    self.changed.wait(
                        _SIGNALS if rest is None or rest <= 0 else min(rest, _SIGNALS)
                    )
                    with opened():  # here alone, as an error within a condition may leave it locked
                        pass
            finally:
                self.closed = True
                while self.taking:  # only copies of memory remain
                    self.changed.wait()


class Requests:
    """Threads that make requests, started on demand.

    Parameters
    ----------
    most : int
        The most concurrent requests.
    late : callable
        Called when a request is answered after its caller has given up.
    """

    def __init__(self, most: int, late: Callable[[], None]) -> None:
        self._most, self._late = most, late
        begins(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Condition()
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        self._threads = self._idle = 0

    def make(
        self, count: int, ask: Callable[[int], Any], take: Callable[[int, Any], None], patience: float | None
    ) -> list[Exception | None]:  # fmt: skip
        """Make concurrent requests, and wait for the answers.

        Parameters
        ----------
        count : int
            Number of requests.
        ask : callable
            Makes the i-th request in a thread, and returns the answer.
        take : callable
            Processes the i-th answer in that thread, but never after this call has returned.
        patience : float or None
            Seconds without any answer after which the remaining requests are given up.

        Returns
        -------
        list of Exception or None
            The error of each request; `Unanswered` for those that were given up.
        """
        batch = _Batch(count, ask, take, self._late)

        def do(i: int) -> None:
            if not batch.closed:
                batch.do(i)

        calls = [functools.partial(do, i) for i in range(count)]
        if not self.add(calls):
            for call in calls:
                call()
        batch.wait(patience)
        return batch.errors

    @uninterrupted
    def add(self, calls: Sequence[Callable[[], None]]) -> bool:
        """Run calls that raise nothing in threads, without waiting; return whether there are any threads."""
        with self._lock:
            self._queue.extend(calls)
            for _ in range(min(len(calls) - self._idle, self._most - self._threads)):
                try:
                    threading.Thread(
                        target=self._run, name="numkv store request", daemon=True
                    ).start()
                except RuntimeError:  # no more threads, or the interpreter is about to end
                    break
                self._threads += 1
            self._lock.notify_all()
            return self._threads > 0

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._idle += 1
                    self._lock.wait(_IDLE)
                    self._idle -= 1
                    if not self._queue:
                        self._threads -= 1
                        return
                call = self._queue.popleft()
            call()


class Breaker:
    """A circuit breaker: it blocks requests while a store does not answer.

    Parameters
    ----------
    probe : callable
        Makes a small request, and returns whether the store has answered.
    changed : callable
        Called with the error when the store has stopped answering, and with None when it answers again.
    """

    def __init__(
        self, probe: Callable[[], bool], changed: Callable[[Exception | None], None]
    ) -> None:
        self._probe, self._changed = probe, changed
        begins(self._begin)

    def _begin(self) -> None:
        """Assume at first that the store answers."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.is_open = False

    def answered(self) -> None:
        """Record that the store has answered."""
        if not self.is_open:
            return
        with self._lock:
            was_open, self.is_open = self.is_open, False
            self._closed.set()
        if was_open:
            self._changed(None)

    def failed(self, error: Exception) -> None:
        """Record that the store does not answer, and schedule a probe."""
        with self._lock:
            if self.is_open:
                return
            self.is_open, self._closed = True, threading.Event()
            closed = self._closed
        self._changed(error)
        args = weakref.ref(self), closed
        ask = threading.Thread(target=_ask_again, args=args, name="numkv store probe", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end
            ask.start()

    def end(self) -> None:
        """Stop probing."""
        self._closed.set()


def _ask_again(of: weakref.ref[Breaker], closed: threading.Event) -> None:
    """Probe a store until it answers, at growing intervals, without keeping the breaker alive."""
    delay = _FIRST
    while not closed.wait(delay):
        breaker = of()
        if breaker is None:
            return
        if breaker._probe():
            breaker.answered()
            return
        del breaker
        delay = min(2 * delay, _LONGEST)
