"""Sequences in files: safetensors with a versioned header that says what a cache must agree with to take them.

One file holds any number of `SwappedSequence`. Tensor names are ``<sequence>.<what>``; 16-bit floats are stored as
uint16 words, and the metadata entry ``numkv`` is JSON with the format's version, the geometry (sizes, kinds, windows,
the seed of the rotation or null) and what is not a tensor. A cache refuses a sequence of another geometry and says why
(`PagedKVCache.swap_in`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from numkv.caches.paged.swap import SwappedSequence
from numkv.errors import NotSupported, NumkvError

__all__ = ["FORMAT_VERSION", "load_sequences", "save_sequences"]

FORMAT_VERSION = 2
# Version 1 had no rotation.
_READABLE = (1, FORMAT_VERSION)

_BUFFERS = ("k", "v", "k_scale", "v_scale")
_HEAD_SCALES = ("k_head_scale", "v_head_scale")  # of kinds whose heads have scales, by layer


def save_sequences(path: str | os.PathLike[str], sequences: Sequence[SwappedSequence]) -> None:
    """Write sequences to a file.

    Parameters
    ----------
    path : path-like
        The file; an existing one is replaced when the new one is complete.
    sequences : sequence of SwappedSequence
        What to write; see `PagedKVCache.swap_out`.

    Raises
    ------
    NumkvError
        If there are none, or they do not have one geometry.
    """
    if not sequences or any(s.geometry != sequences[0].geometry for s in sequences):
        raise NumkvError(
            "`sequences`: expected one or more of the same geometry, got "
            f"{[s.geometry for s in sequences]}"
        )
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for i, sequence in enumerate(sequences):
        tensors[f"{i}.tokens"] = sequence.tokens
        for group, logical in enumerate(sequence.logical):
            tensors[f"{i}.logical.{group}"] = logical
        for layer, buffers in enumerate(sequence.buffers):
            for name, x in zip(_BUFFERS, buffers, strict=True):
                tensors[f"{i}.{name}.{layer}"] = np.ascontiguousarray(x)
        for layer, scales in enumerate(sequence.head_scales):
            for name, x in zip(_HEAD_SCALES, scales, strict=True):
                tensors[f"{i}.{name}.{layer}"] = x
    header = {
        "version": FORMAT_VERSION,
        "geometry": sequences[0].geometry,
        "sequences": [
            {"length": s.length, "extra": _packed(s.extra), "starts": s.starts} for s in sequences
        ],
    }
    partial = f"{os.fspath(path)}.partial"
    save_file(tensors, partial, metadata={"numkv": json.dumps(header)})
    os.replace(partial, path)


def load_sequences(path: str | os.PathLike[str]) -> list[SwappedSequence]:
    """Read sequences from a file.

    Parameters
    ----------
    path : path-like
        A file of `save_sequences`.

    Returns
    -------
    list of SwappedSequence
        For `PagedKVCache.swap_in`.

    Raises
    ------
    NotSupported
        If it is not such a file, damaged, or of another version. The sequences themselves are checked by
        `PagedKVCache.swap_in`.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("numkv", "{}"))
            version = header.get("version")
            if version not in _READABLE:
                raise NotSupported(
                    f"`path`: expected a file of numkv's format {' or '.join(map(str, _READABLE))}, got "
                    f"{'format ' + str(version) if version else 'another one'} in {os.fspath(path)}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        sizes, k_kind, v_kind, windows, *rotation = header["geometry"]
        geometry = (tuple(sizes), k_kind, v_kind, tuple(windows), rotation[0] if rotation else None)
        return [_sequence(i, one, geometry, tensors) for i, one in enumerate(header["sequences"])]
    except SafetensorError as error:
        raise NotSupported(
            f"`path`: expected a safetensors file, got {os.fspath(path)} ({error})"
        ) from error
    except NotSupported:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise NotSupported(
            f"`path`: expected a file that `save_sequences` wrote, got a damaged one in {os.fspath(path)} "
            f"({type(error).__name__}: {error})"
        ) from error


def _sequence(
    i: int, header: dict[str, Any], geometry: tuple[Any, ...], tensors: dict[str, Any]
) -> SwappedSequence:
    def all_of(name: str) -> list[Any]:
        found: list[Any] = []
        while (key := f"{i}.{name}.{len(found)}") in tensors:
            found.append(tensors[key])
        return found

    buffers = list(zip(*(all_of(name) for name in _BUFFERS), strict=True))
    return SwappedSequence(
        header["length"],
        tensors[f"{i}.tokens"],
        _unpacked(header["extra"]),
        geometry,
        all_of("logical"),
        buffers,
        tuple(header.get("starts", ())),
        tuple(zip(*(all_of(name) for name in _HEAD_SCALES), strict=True)),
    )


def _packed(extra: Any) -> Any:
    """Extra keys for JSON, which has no bytes."""
    if extra is None:
        return None
    return {k: {"bytes": v.hex()} if isinstance(v, bytes) else v for k, v in extra.items()}


def _unpacked(extra: Any) -> Any:
    if extra is None:
        return None
    return {k: bytes.fromhex(v["bytes"]) if isinstance(v, dict) else v for k, v in extra.items()}
