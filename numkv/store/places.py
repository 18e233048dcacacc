"""Where objects lie: the place that a user names, checked."""

from __future__ import annotations

import os
from typing import Any

from numkv.numbers import check_flag, check_number, check_size
from numkv.store.folder import Folder
from numkv.store.remote import RemoteFolder, opened


def place_of(place: Any, durable: Any, file_system: Any, timeout: Any) -> Folder | RemoteFolder:
    """The place of a path, a URL, or a path within a file system of fsspec; see `numkv.store.PrefixStore`."""
    path, durable, patience = _path(place), check_flag("durable", durable), check_timeout(timeout)
    if file_system is not None:
        if not (hasattr(file_system, "cat_file") and hasattr(file_system, "pipe_file")):
            raise TypeError(
                f"`file_system`: expected one of fsspec's, got {type(file_system).__name__}"
            )
        return RemoteFolder(file_system, path, patience)
    if "://" in path:
        return RemoteFolder(*opened(path), patience)
    return Folder(os.path.abspath(path), durable)


def check_bound(max_nbytes: Any) -> int | None:
    """Bytes that objects may have together, or None."""
    return None if max_nbytes is None else check_size("max_nbytes", max_nbytes, 1, 2**62)


def check_timeout(given: Any) -> float | None:
    """Seconds, or None for any number of them."""
    return None if given is None else check_number("timeout", given, 0.0)


def _path(place: Any) -> str:
    try:
        name = os.fsdecode(place)
    except TypeError:
        raise TypeError(f"`place`: expected a path or a URL, got {type(place).__name__}") from None
    if "\0" in name or not name:
        raise ValueError(f"`place`: expected a path or a URL, got {name!r}")
    return name
