"""`on_stream`: a method that runs on a stream of its caller's choice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from numkv.keywords import explain

#: Names of targets with streams that have been made: without any, there is nothing to choose.
has_streams: list[str] = []

_F = TypeVar("_F", bound=Callable[..., Any])


def on_stream(method: _F) -> _F:
    """Have a method run on the stream that `stream` names, or that its arrays come from.

    The method takes `stream`, by name, and need not look at it. Its object has ``_runs_on()``: the target, and an array
    of its own or None. While a stream is captured the method is refused, as it goes by numbers of the host.
    """
    name = method.__name__
    has_any = has_streams

    @functools.wraps(method)
    def run(self: Any, /, *args: Any, stream: Any = None, **kwargs: Any) -> Any:
        if stream is None and not has_any:
            try:
                return method(self, *args, **kwargs)
            except TypeError as error:
                explain(error, method, kwargs, f"{type(self).__name__}.{name}")
                raise
        target, own = self._runs_on()
        if stream is None and not target.has_streams:
            return method(self, *args, **kwargs)
        with target.on(stream, *args, *kwargs.values(), own):
            target.refuse_capture(f"{type(self).__name__}.{name}")
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]
