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
import inspect
import linecache
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from numkv.errors import NumkvError
from numkv.interrupts import signals_deferred, uninterrupted
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
    """Return the error of a second writer."""
    return NumkvError(
        f"{name}: this {type(obj).__name__} is being changed by another call, of another thread or of one that "
        "this call is inside of (a finaliser, a signal handler, a shift function); let one writer at a time use it"
    )


def overtaken(obj: object, name: str) -> NumkvError:
    """Return the error of a reader whose rows were moved or dropped meanwhile."""
    return NumkvError(
        f"{name}: rows of this {type(obj).__name__} were moved or dropped while they were read, so there is no "
        "result; do not truncate, compact, clear or remove while others read"
    )


# A call claims an object by one `setdefault`, which threads and signal handlers do not divide. It leaves its `rest`
# there, an object that no other call has, and so knows in the `finally` whether it was this call that claimed: an
# interrupt may come at any moment. What gives the object free calls nothing, so that no interrupt can come in between.
_WRITES = """\
def alone({taken}):
    writer = self._access.writer
    try:
        if writer.setdefault("call", rest) is not rest:
            raise busy(self, name)
        return {call}
    finally:
        if "call" in writer and writer["call"] is rest:
            del writer["call"]
"""
_DROPS = _WRITES.replace(
    "        return {call}", "        with dropping(self._access):\n            return {call}"
).replace("alone", "moving")
_READS = """\
def checked({taken}):
    access = self._access
    before = access.dropped
    if before & 1:
        raise overtaken(self, name)
    result = {call}
    if access.dropped != before:
        raise overtaken(self, name)
    return result
"""
_MISSING: Any = object()  # in place of an argument that a caller has left out


def _woven(method: Any, template: str) -> Any:
    """A method in a template that takes the same arguments: to hand on ``*args, **kwargs`` would cost 250 ns a call."""
    name, code, of_only = method.__name__.strip("_"), method.__code__, method.__kwdefaults__ or {}
    first, last = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names, only = code.co_varnames[1:first], code.co_varnames[first:last]
    # Whether the method takes any other name, too, and looks at it itself.
    by_name = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    assert not code.co_flags & inspect.CO_VARARGS, f"{method.__qualname__} takes *args"

    def unusual(self: Any, given: dict[str, Any], rest: dict[str, Any]) -> Any:
        """Call the method with what there is, where an argument is missing or unknown: Python has the words for it."""
        given = {each: x for each, x in given.items() if x is not _MISSING}
        try:
            return method(self, **given, **rest)
        except TypeError as error:
            explain(error, method, rest, f"{type(self).__name__}.{name}")
            raise

    defaults = method.__defaults__ or ()
    defaults = (_MISSING,) * (len(names) - len(defaults)) + defaults
    needed = [x for x, default in zip(names, defaults, strict=True) if default is _MISSING]
    needed += [x for x in only if x not in of_only]
    taken = ["self", "/", *(f"{x}=missing" for x in names), *["*"][: len(only)]]
    taken += [*(f"{x}=missing" for x in only), "**rest"]
    given = ", ".join(f"{x}={x}" for x in names + only)
    odd = [f"{x} is missing" for x in needed] + ([] if by_name else ["rest"])
    source = template.format(
        taken=", ".join(taken),
        call=f"unusual(self, dict({given}), rest) if {' or '.join(odd or ['False'])} "
        f"else quick({', '.join(('self', *names, *only, *(['rest'] if by_name else [])))})",
    )
    # The same code takes all arguments by their places, which saves 10 ns for each name.
    flags = code.co_flags & ~inspect.CO_VARKEYWORDS
    flat = code.replace(co_argcount=last + by_name, co_kwonlyargcount=0, co_flags=flags)
    scope = {
        "quick": FunctionType(flat, method.__globals__, name, None, method.__closure__), "unusual": unusual,
        "name": name, "missing": _MISSING, "busy": busy, "overtaken": overtaken, "dropping": dropping,
    }  # fmt: skip
    exec(_compiled(source), scope)
    made: Any = scope[template[len("def ") : template.index("(")]]
    made.__defaults__, made.__kwdefaults__ = defaults, {x: of_only.get(x, _MISSING) for x in only}
    return functools.wraps(method)(made)


@functools.cache
def _compiled(source: str) -> CodeType:
    """A template as it is filled; tracebacks show its lines, too."""
    file = f"{__file__}: {source.partition(':')[0]}"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    return compile(source, file, "exec")


def writes(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that adds to an object: it runs alone among writers."""
    alone: Callable[Concatenate[_Self, _P], _R] = _woven(method, _WRITES)
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
        signals_deferred.__enter__()
        self._access.dropped |= 1

    def __exit__(self, *_: object) -> None:
        self._access.dropped = (self._access.dropped | 1) + 1
        signals_deferred.__exit__()


def drops(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that moves or drops rows: `whole`, and readers beside it get an error."""
    moving: Callable[Concatenate[_Self, _P], _R] = _woven(method, _DROPS)
    return uninterrupted(moving)


def reads(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that computes from rows: it gets an error where they are moved or dropped meanwhile."""
    checked: Callable[Concatenate[_Self, _P], _R] = _woven(method, _READS)
    return checked


@writes
def alone(obj: HasAccess, action: Callable[[], None]) -> None:
    """Do something with an object that nobody else changes."""
    action()


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
        f"`cache`: expected a {type(x).__name__} that no thread changes while it is saved, got a change by another "
        "call; let one writer at a time use it"
    )
