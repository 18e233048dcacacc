"""Deferred signals, so that a change of several parts is complete before a signal handler may raise.

Python runs signal handlers in the main thread, between any two of its instructions. An exception of a handler is raised
there: `KeyboardInterrupt` in the middle of a commit would leave half of it. So code that changes the metadata of an
object runs in a section::

    with signals_deferred:
        ...  # every signal that arrives waits for the end

The handlers run at the end of the outermost section, once for each signal that has arrived, in the order of arrival.
They raise there, after the change has been made. Outside the main thread, where Python runs no handler, a section costs
nothing. It does not defer exceptions that another thread sets (``PyThreadState_SetAsyncExc``).

Code that waits for a network opens the section again::

    with signals_deferred:
        with opened():
            ...  # signals are handled as they come: what is half made has to be undone where an exception passes

Blocking signals (`signal.pthread_sigmask`) would not suffice. The operating system then delivers them to another thread
of the process, such as one of OpenMP, and Python still runs the handler in the main thread. So a section replaces
Python's handlers by one of its own, and restores them at its end.
"""

from __future__ import annotations

import _signal  # `signal` wraps these in enums, at ten times the cost
import functools
import os
import signal
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = sorted(int(number) for number in signal.valid_signals())


class _SignalsDeferred:
    """The section; there is one, which the main thread enters.

    Attributes
    ----------
    depth : int
        How many sections there are, one inside another.
    open_at : int
        The depth at which handlers run all the same: 0, as there is no section then, or that of an `opened` one.
    handlers : dict of int to function
        The program's own handlers, where `note` stands in for them.
    waiting : dict of int to frame
        Signals that have arrived, and where.
    """

    def __init__(self) -> None:
        self.depth = self.open_at = 0
        self.handlers: dict[int, _Handler] = {}
        self.waiting: dict[int, FrameType | None] = {}
        self.main = main_thread().ident
        self._known: list[Any] = []  # what `getsignal` said last of each number
        self._handled: list[int] = []  # the indices of functions among these
        self._note = self.note  # one object, so that it can be told from other handlers

    def note(self, number: int, frame: FrameType | None) -> None:
        """Stand in for a handler: defer the signal, or call its handler outside of sections."""
        if self.depth > self.open_at:
            self.waiting.setdefault(number, frame)
        else:
            self.handlers[number](number, frame)

    def __enter__(self) -> None:
        if get_ident() != self.main:
            return
        if self.depth:
            self.depth += 1
            return
        found = list(map(_signal.getsignal, _NUMBERS))
        if found != self._known:
            self._handled = [i for i, handler in enumerate(found) if callable(handler)]
            self._known = found
        try:
            for i in self._handled:
                # It is this handler if an interrupt prevented its removal.
                if found[i] is not self._note:
                    self.handlers[_NUMBERS[i]] = found[i]
                    _signal.signal(_NUMBERS[i], self._note)
            self.depth = 1  # the last line: `note` passes on what has come before
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *_: object) -> None:
        if get_ident() != self.main or not self.depth:
            return
        if self.depth > 1:
            self.open_at = 0 if self.open_at == self.depth else self.open_at
            self.depth -= 1
            if self.depth == self.open_at:
                self.deliver()
            return
        try:
            # The change is made: from here on handlers may raise.
            self.depth = self.open_at = 0
            self._give_back()
        finally:
            try:
                self._give_back()  # what an interrupt of the line above has left
            finally:
                self.deliver()

    def _give_back(self) -> None:
        for number, handler in list(self.handlers.items()):
            if _signal.getsignal(number) is self._note:
                _signal.signal(number, handler)

    def deliver(self) -> None:
        """Run the handlers of signals that wait; one that raises does not keep the others from running."""
        try:
            while self.waiting:
                number = next(iter(self.waiting))
                handler = _signal.getsignal(number)
                if not callable(handler):  # somebody has changed that meanwhile
                    del self.waiting[number]
                    continue
                # Taken and called without an instruction of Python in between, so that no other signal loses it.
                next(map(handler, (number,), map(self.waiting.pop, (number,))))
        except BaseException:
            self.deliver()
            raise

    def begin_anew(self) -> None:
        """In a forked child: its main thread is the one that forked, and has no section of another thread."""
        if self.main != get_ident():
            self.main, self.depth, self.open_at = get_ident(), 0, 0
            self.waiting.clear()
            self._give_back()


signals_deferred = _SignalsDeferred()


def uninterrupted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function or method that runs in a section."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with signals_deferred:
            return function(*args, **kwargs)

    return run


class opened:  # noqa: N801 - as `contextlib.suppress` and its like
    """Inside a section: have handlers run as signals come, those that wait first."""

    def __enter__(self) -> None:
        self.before = signals_deferred.open_at
        if signals_deferred.depth and get_ident() == signals_deferred.main:
            signals_deferred.open_at = signals_deferred.depth
            try:
                signals_deferred.deliver()
            except BaseException:
                # `__exit__` does not run for a context that was never entered. Code that undoes the change is deferred,
                # too.
                signals_deferred.open_at = self.before
                raise

    def __exit__(self, *_: object) -> None:
        if get_ident() == signals_deferred.main:
            signals_deferred.open_at = self.before


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=signals_deferred.begin_anew)
