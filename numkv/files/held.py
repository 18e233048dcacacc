"""An object while it is saved: what others may do to it meanwhile, and what is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from numkv.access import Access
from numkv.errors import NumkvError


@contextlib.contextmanager
def held(obj: Any, alone: bool) -> Iterator[None]:
    """Let nobody change what is being saved without an error.

    Parameters
    ----------
    obj : object
        What is saved.
    alone : bool
        Whether new tokens would change rows that are there: then those who bring some get the error, as saving counts
        as a writer. Else they may go on, as their rows come after what is saved; whoever moves or drops rows makes
        saving fail.

    Raises
    ------
    NumkvError
        If the object is being changed, or was changed meanwhile.
    """
    access: Access = getattr(obj, "_access", None) or Access()
    token = object()
    before = access.dropped
    try:
        if alone and access.writer.setdefault("call", token) is not token:
            raise _changed(obj)
        if before & 1:
            raise _changed(obj)
        yield
        if access.dropped != before:
            raise _changed(obj)
    finally:
        if "call" in access.writer and access.writer["call"] is token:
            del access.writer["call"]


def _changed(obj: Any) -> NumkvError:
    return NumkvError(
        f"`cache`: expected a {type(obj).__name__} that nobody changes while it is saved, got a change by another "
        "call; let one writer at a time use it"
    )
