"""Concurrent use of an object: one writer at a time, and concurrent readers that see whole tokens.

Every object that changes has an `Access` and marks its public methods::

    @writes     adds tokens: rows first, the length last. Readers beside it see the tokens from before, and an interrupt
                leaves these.
    @whole      changes several things that belong together; signals wait for its end (`numkv.interrupts`).
    @drops      moves or drops rows that a reader may be looking at; it is whole, too.
    @reads      computes from rows.

A second writer gets an error before it has changed anything. It may be another thread, or a call inside the first one:
from a finaliser, a signal handler, or the shift function of a removal. If a `drops` call moves rows during a read, the
reader gets an error instead of a result. No call blocks.

A marked method must not call another marked method of the same object. Code that both need is a method of its own, with
an underscore.
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
    """The call that is changing an object, and how often rows have been moved or dropped.

    Copies and unpickled objects begin anew.

    Attributes
    ----------
    writer : dict
        Has a token of the call that is changing the object under the key ``"call"``, if there is one.
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


class Busy(NumkvError):
    """Another call is changing the object; a later one may succeed."""


def busy(obj: object, name: str) -> Busy:
    """Return the error of a second writer."""
    return Busy(
        f"{name}: this {type(obj).__name__} is being changed by another call, of another thread or of one that "
        "this call is inside of (a finaliser, a signal handler, a shift function); let one writer at a time use it"
    )


def overtaken(obj: object, name: str) -> NumkvError:
    """Return the error of a reader whose rows were moved or dropped meanwhile."""
    return NumkvError(
        f"{name}: rows of this {type(obj).__name__} were moved or dropped while they were read, so there is no "
        "result; do not truncate, compact, clear or remove while others read"
    )


# A call claims an object by one `setdefault`, which is atomic for threads and signal handlers. It stores its own `rest`
# there, an object unique to the call. So it can tell in the `finally` whether it has claimed the object, even if an
# interrupt came at any moment. Releasing the claim runs no Python code, so it cannot be interrupted.
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
    """Return a method in a template with the same arguments; ``*args, **kwargs`` would cost 250 ns a call."""
    name, code, of_only = method.__name__.strip("_"), method.__code__, method.__kwdefaults__ or {}
    first, last = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names, only = code.co_varnames[1:first], code.co_varnames[first:last]
    # Whether the method accepts any other name, and checks it itself.
    by_name = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    assert not code.co_flags & inspect.CO_VARARGS, f"{method.__qualname__} takes *args"

    def unusual(self: Any, given: dict[str, Any], rest: dict[str, Any]) -> Any:
        """Call the method with a missing or unknown argument, for which Python raises the error."""
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
    """Compile a filled template; tracebacks show its lines, too."""
    file = f"{__file__}: {source.partition(':')[0]}"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    return compile(source, file, "exec")


def writes(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that adds to an object: it runs alone among writers."""
    return _woven(method, _WRITES)


def whole(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that changes several things which belong together: one writer, and signals are deferred."""
    return uninterrupted(writes(method))


class dropping:  # noqa: N801 - as `contextlib.suppress` and its like
    """A context in which rows are moved or dropped: signals are deferred, and concurrent readers get an error."""

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
    """Mark a method that moves or drops rows: `whole`, and concurrent readers get an error."""
    return uninterrupted(_woven(method, _DROPS))


def reads(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Mark a method that computes from rows: it raises if they are moved or dropped meanwhile."""
    return _woven(method, _READS)


@writes
def alone(obj: HasAccess, action: Callable[[], None]) -> None:
    """Run an action on an object as its only writer."""
    action()


@contextlib.contextmanager
def unchanged(objects: Sequence[tuple[HasAccess, bool]]) -> Iterator[None]:
    """Raise if objects are changed while they are being saved.

    Parameters
    ----------
    objects : sequence of (object, bool)
        The objects to save, and whether new tokens would change existing rows. If so, saving counts as a writer, and
        calls that add tokens raise. Otherwise they may go on, as their rows come after the saved ones. Moving or
        dropping rows makes saving fail.

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
    # Caches of a wrapper share one `Access`; the first cache defines whether saving is its only writer.
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
