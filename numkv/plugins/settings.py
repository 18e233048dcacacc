"""What a plug-in's settings say of its store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numkv.store.byte_store import BlockStore

_NAMES = ("place", "max_nbytes", "durable", "timeout", "local", "local_nbytes", "mark")


def store_of(settings: Mapping[str, Any] | None, prefix: str, mark: dict[str, Any]) -> BlockStore:
    """The store that settings name.

    Parameters
    ----------
    settings : mapping
        ``place``, and where wanted other arguments of `BlockStore`, behind `prefix`; others are somebody else's.
    prefix : str
        What their names begin with.
    mark : dict
        What bytes depend on, as far as the engine says it; the user's ``mark`` comes beside it.

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
