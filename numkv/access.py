"""Who may use an object at the same time: one writer, and readers beside it that see whole tokens.

Every object that changes has an `Access` and marks its public methods::

    @writes     adds tokens: rows first, the length last. Readers beside it see the tokens from before, and an interrupt
                leaves these.
    @whole      changes several things that belong together; signals wait for its end (`numkv.interrupts`).
    @drops      moves or drops rows that a reader may be looking at; it is whole, too.
    @reads      computes from rows.

A second writer gets an error before it has changed anything, whether it comes from another thread or from inside the
first call: from a finaliser, a signal handler, or the shift function of a removal. A reader that was overtaken by a
`drops` gets an error in place of a result from rows that were moved under it. Nobody waits.

A method that is marked must not call another one that is marked, on the same object: what both need is a method of its
own, with an underscore.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from numkv.errors import NumkvError
from numkv.interrupts import held, uninterrupted
from numkv.keywords import explain

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Access:
    """Who is changing an object now, and how often rows have been moved or dropped.

    A copy, and what comes out of a pickle, begins anew.

    Attributes
    ----------
    writer : dict
        Holds something of the call that is changing the object under the key ``"call"``, or nothing.
    dropped : int
        Even when rows stay where they are; odd while they are being moved or dropped.
    """

    __slots__ = ("dropped", "writer")

    def __init__(self) -> None:
        self.writer: dict[str, object] = {}
        self.dropped = 0

    def __reduce__(self) -> tuple[type[Access], tuple[()]]:
        return Access, ()


class HasAccess(Protocol):
    """An object whose methods are marked."""

    @property
    def _access(self) -> Access: ...


_Self = TypeVar("_Self", bound=HasAccess)


def busy(obj: object, name: str) -> NumkvError:
    """The error of a second writer."""
    return NumkvError(
        f"{name}: this {type(obj).__name__} is being changed by another call, of another thread or of one that "
        "this call is inside of (a finaliser, a signal handler, a shift function); let one writer at a time use it"
    )


def overtaken(obj: object, name: str) -> NumkvError:
    """The error of a reader whose rows were moved or dropped meanwhile."""
    return NumkvError(
        f"{name}: rows of this {type(obj).__name__} were moved or dropped while they were read, so there is no "
        "result; let nobody truncate, compact, clear or remove while others read"
    )


# A call claims an object by one `setdefault`, which threads and signal handlers do not divide. It leaves its `kwargs`
# there, an object that no other call has, and so knows in the `finally` whether it was this call that claimed: an
# interrupt may come at any moment. What gives the object free calls nothing, so that no interrupt can come in between.


def writes(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that adds to an object: it runs alone among writers."""
    name = method.__name__

    @functools.wraps(method)
    def alone(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        writer = self._access.writer
        try:
            if writer.setdefault("call", kwargs) is not kwargs:
                raise busy(self, name)
            return method(self, *args, **kwargs)
        except TypeError as error:
            explain(error, method, kwargs, f"{type(self).__name__}.{name}")
            raise
        finally:
            if "call" in writer and writer["call"] is kwargs:
                del writer["call"]

    return alone


def whole(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that changes several things which belong together: alone among writers, signals held back."""
    return uninterrupted(writes(method))


class dropping:  # noqa: N801 - as `contextlib.suppress` and its like
    """In this context rows are moved or dropped: signals wait, and readers beside it get an error."""

    __slots__ = ("_access",)

    def __init__(self, access: Access) -> None:
        self._access = access

    def __enter__(self) -> None:
        held.__enter__()
        self._access.dropped |= 1

    def __exit__(self, *_: object) -> None:
        self._access.dropped = (self._access.dropped | 1) + 1
        held.__exit__()


def drops(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that moves or drops rows: `whole`, and readers beside it get an error."""

    @functools.wraps(method)
    def moving(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with dropping(self._access):
            return method(self, *args, **kwargs)

    return whole(moving)


def reads(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that computes from rows: it gets an error where they are moved or dropped meanwhile."""
    name = method.__name__

    @functools.wraps(method)
    def checked(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        access = self._access
        before = access.dropped
        if before & 1:
            raise overtaken(self, name)
        try:
            result = method(self, *args, **kwargs)
        except TypeError as error:
            explain(error, method, kwargs, f"{type(self).__name__}.{name}")
            raise
        if access.dropped != before:
            raise overtaken(self, name)
        return result

    return checked


@contextlib.contextmanager
def unchanged(objects: Sequence[tuple[HasAccess, bool]]) -> Iterator[None]:
    """Let nobody change objects that are being saved without an error.

    Parameters
    ----------
    objects : sequence of (object, bool)
        What is saved, and whether new tokens would change rows that are there: then those who bring some get the error,
        as saving counts as a writer. Else they may go on, as their rows come after what is saved; whoever moves or
        drops rows makes saving fail.

    Raises
    ------
    NumkvError
        If an object is being changed, or was changed meanwhile.
    """
    if not objects:
        yield
        return
    (x, alone), *others = objects
    access = x._access
    writer, before, token = access.writer, access.dropped, object()
    # Caches of a wrapper share one, of which the first says whether it has to be alone.
    rest = [each for each in others if each[0]._access is not access]
    try:
        if alone and writer.setdefault("call", token) is not token:
            raise _changed(x)
        if before & 1:
            raise _changed(x)
        with unchanged(rest):
            yield
        if access.dropped != before:
            raise _changed(x)
    finally:
        if "call" in writer and writer["call"] is token:
            del writer["call"]


def _changed(x: object) -> NumkvError:
    return NumkvError(
        f"`cache`: expected a {type(x).__name__} that nobody changes while it is saved, got a change by another "
        "call; let one writer at a time use it"
    )
