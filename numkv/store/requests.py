"""Requests to a store beside each other, how long nobody answers, and when a store is left alone for a while.

Nobody can end a request that gets no answer. So requests are made by threads of their own; who waits gives up when
nothing has been answered for some time, and takes nothing in from then on. A `Breaker` then keeps requests from being
made at all, until one that it makes by itself is answered.
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

#: Seconds that a thread waits for another request before it ends.
_IDLE = 2.0
#: Seconds until a store that did not answer is asked again, at first and at most; each time is twice the last.
_FIRST, _LONGEST = 1.0, 60.0

# What begins anew in a child that is forked: it has none of the threads, and locks that these held stay locked there.
_methods: set[weakref.WeakMethod[Callable[[], None]]] = set()


def begins(begin: Callable[[], None]) -> None:
    """Call a method that makes an object's locks and forgets its threads: now, and in each child that is forked."""
    begin()
    _methods.add(weakref.WeakMethod(begin, _methods.discard))


def _after_fork_in_child() -> None:
    for method in list(_methods):
        begin = method()
        if begin is not None:
            begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Unanswered(TimeoutError):
    """A request has had no answer in time, or was not made, as the store does not answer."""


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
        """Make a request, and take its answer in while somebody waits for it."""
        self.answered = time.monotonic()  # that a thread has come to it is a sign of life, too
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
            self.errors[i] = error
            self.left, self.taking = self.left - 1, self.taking - 1
            self.changed.notify_all()

    def wait(self, patience: float | None) -> None:
        """Wait until all is answered, or nothing has been for so many seconds; nothing is taken in afterwards."""
        with self.changed:
            try:
                while self.left:
                    rest = None if patience is None else self.answered + patience - time.monotonic()
                    if rest is not None and rest <= 0 and not self.taking:
                        break
                    self.changed.wait(rest if rest is None or rest > 0 else 0.1)
            finally:
                self.closed = True
                while self.taking:  # memory is copied, no more
                    self.changed.wait()


class Requests:
    """Threads that make requests, made as they are needed.

    Parameters
    ----------
    most : int
        Requests at once.
    late : callable
        Called when a request has been answered for which nobody waits any more.
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
        """Make requests beside each other, and wait for the answers.

        Parameters
        ----------
        count : int
            How many.
        ask : callable
            Makes the i-th request and returns the answer, in a thread.
        take : callable
            Takes the i-th answer in, in that thread, but never after this call has returned.
        patience : float or None
            Seconds without any answer after which those that are left are given up.

        Returns
        -------
        list of Exception or None
            What went wrong with each; `Unanswered` for those that were given up.
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

    def add(self, calls: Sequence[Callable[[], None]]) -> bool:
        """Have threads make calls, which raise nothing, and do not wait for them; whether there are any threads."""
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
    """Whether a store is asked at all: not while it does not answer.

    Parameters
    ----------
    probe : callable
        Asks the store for something small; whether it has answered.
    changed : callable
        Called with what went wrong when the store has stopped to answer, and with None when it answers again.
    """

    def __init__(
        self, probe: Callable[[], bool], changed: Callable[[Exception | None], None]
    ) -> None:
        self._probe, self._changed = probe, changed
        begins(self._begin)

    def _begin(self) -> None:
        """Begin with a store that answers, as far as anybody knows."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.is_open = False

    def answered(self) -> None:
        """Note that the store has answered."""
        if not self.is_open:
            return
        with self._lock:
            was_open, self.is_open = self.is_open, False
            self._closed.set()
        if was_open:
            self._changed(None)

    def failed(self, error: Exception) -> None:
        """Note that the store does not answer, and have it asked again later."""
        with self._lock:
            if self.is_open:
                return
            self.is_open, self._closed = True, threading.Event()
            closed = self._closed
        self._changed(error)
        ask = threading.Thread(
            target=_ask_again,
            args=(weakref.ref(self), closed),
            name="numkv store probe",
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end
            ask.start()

    def end(self) -> None:
        """Ask no more."""
        self._closed.set()


def _ask_again(of: weakref.ref[Breaker], closed: threading.Event) -> None:
    """Ask a store until it answers, less and less often; nobody is kept alive for that."""
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
