"""The store of a plug-in, from the engine's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numkv.store.byte_store import BlockStore

_NAMES = ("place", "max_nbytes", "durable", "timeout", "local", "local_nbytes", "mark")


def store_of(settings: Mapping[str, Any] | None, prefix: str, mark: dict[str, Any]) -> BlockStore:
    """Make the store that settings describe.

    Parameters
    ----------
    settings : mapping
        ``place`` and, optionally, other arguments of `BlockStore`, after `prefix`. Other settings are ignored.
    prefix : str
        The prefix of their names.
    mark : dict
        The facts of the engine that decide the bytes, in addition to the user's ``mark``.

    Raises
    ------
    ValueError
        If there is no place.
    """
    given = {
        name: settings[prefix + name] for name in _NAMES if settings and prefix + name in settings
    }
    if "place" not in given:
        raise ValueError(
            f"`{prefix}place`: expected a folder or a URL in the engine's extra_config, got none; name where blocks lie"
        )
    facts = {name: value for name, value in mark.items() if value is not None}
    return BlockStore(**{**given, "mark": {**facts, "user": str(given.get("mark", ""))}})
