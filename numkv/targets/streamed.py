"""`streamed`: a decorator that runs a method on one stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from numkv.keywords import explain

#: Names of loaded targets with streams; without any there is no choice.
has_streams: list[str] = []

_F = TypeVar("_F", bound=Callable[..., Any])


def streamed(method: _F) -> _F:
    """Run a method on the stream that `numkv.on_stream` names, or on that of its arrays.

    Its object has ``__runs_on__()``, which returns the target, and an array of the object or None. While that stream is
    captured the method raises an error, because it depends on numbers of the host.
    """
    name = method.__name__

    @functools.wraps(method)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            if not has_streams:
                return method(self, *args, **kwargs)
            target, own = self.__runs_on__()
            with target.on(*args, *kwargs.values(), own):
                target.refuse_capture(f"{type(self).__name__}.{name}")
                return method(self, *args, **kwargs)
        except TypeError as error:
            explain(error, method, kwargs, f"{type(self).__name__}.{name}")
            raise

    return run  # type: ignore[return-value]
