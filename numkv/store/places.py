"""Where objects lie, checked, and the identity that blocks there have in common."""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256
from typing import Any

from numkv.blocks.prefix import FORMAT_VERSION as NAMES_VERSION
from numkv.numbers import check_flag, check_number, check_size
from numkv.store.folder import Folder
from numkv.store.fronted import Fronted
from numkv.store.objects import FORMAT_VERSION
from numkv.store.remote import RemoteFolder, opened

Place = Folder | RemoteFolder | Fronted


def place_of(
    place: Any,
    durable: Any,
    file_system: Any,
    timeout: Any,
    local: Any = None,
    local_nbytes: Any = None,
) -> Place:
    """The place of a path, a URL, or a path within a file system of fsspec; see `numkv.store.PrefixStore`."""
    found = _shared(_path("place", place), durable, file_system, check_timeout(timeout))
    if local is None:
        if local_nbytes is not None:
            raise ValueError(
                "`local_nbytes`: expected None without `local`, got a number; name a folder"
            )
        return found
    near = Folder(os.path.abspath(_path("local", local)), False)
    if isinstance(found, Folder) and found.root == near.root:
        raise ValueError(f"`local`: expected another folder than `place`, got {near.root}")
    return Fronted(near, found, check_bound(local_nbytes, "local_nbytes"))


def _shared(
    path: str, durable: Any, file_system: Any, patience: float | None
) -> Folder | RemoteFolder:
    durable = check_flag("durable", durable)
    if file_system is not None:
        if not (hasattr(file_system, "cat_file") and hasattr(file_system, "pipe_file")):
            raise TypeError(
                f"`file_system`: expected one of fsspec's, got {type(file_system).__name__}"
            )
        return RemoteFolder(file_system, path, patience)
    if "://" in path:
        return RemoteFolder(*opened(path), patience)
    return Folder(os.path.abspath(path), durable)


def check_bound(given: Any, name: str = "max_nbytes") -> int | None:
    """Bytes that objects may have together, or None."""
    return None if given is None else check_size(name, given, 1, 2**62)


def check_timeout(given: Any) -> float | None:
    """Seconds, or None for any number of them."""
    return None if given is None else check_number("timeout", given, 0.0)


def _path(name: str, given: Any) -> str:
    try:
        path = os.fsdecode(given)
    except TypeError:
        raise TypeError(f"`{name}`: expected a path or a URL, got {type(given).__name__}") from None
    if "\0" in path or not path:
        raise ValueError(f"`{name}`: expected a path or a URL, got {path!r}")
    return path


def identity_text(mark: Any, rope: Any, fields: dict[str, Any]) -> bytes:
    """The identity of blocks, all that decides their bytes beside the tokens, as JSON: the same for the same facts.

    Parameters
    ----------
    mark, rope : str, dict or None
        What the user says of the model and of its RoPE.
    fields : dict
        Sizes, kinds, windows and scales of the cache, for JSON.
    """
    facts = {
        "format": FORMAT_VERSION,
        "names": NAMES_VERSION,
        "bytes": sys.byteorder,
        "mark": mark,
        "rope": rope,
        **fields,
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def folder_of(identity: bytes) -> str:
    """Name of the folder that holds objects of an identity."""
    return sha256(identity).hexdigest()[:32]
