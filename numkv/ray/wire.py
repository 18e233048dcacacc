"""Messages between a cache and its shards, as tuples that pickle well.

A message is ``(number, operations)``, an operation ``(name, arguments)``, and an answer ``(number, free blocks, value,
error, name of the operation that failed)``. Arrays are sent as they lie in memory: pickle's protocol 5 takes their
buffers out of the stream, and Ray puts those into its object store, from where the other side reads them without a
copy. It can do so for NumPy's own dtypes only; bfloat16 and 8-bit floats travel as words with the name of their dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Operation = tuple[str, tuple[Any, ...]]
Message = tuple[int, list[Operation]]


class Answer(NamedTuple):
    """What a shard says to a message."""

    number: int
    free: int
    """Free blocks, after the message."""
    value: Any
    """Of the last operation."""
    error: BaseException | None = None
    failed: str = ""
    """Name of the operation that raised it; those behind it were not done."""


class _Words(NamedTuple):
    """An array of a dtype that is not NumPy's own."""

    dtype: str
    words: Any


_WORDS = {1: np.uint8, 2: np.uint16}


def packed(x: Any) -> Any:
    """What is sent in place of arrays: contiguous ones of NumPy's dtypes."""
    if isinstance(x, np.ndarray):
        if x.dtype.kind == "V" or x.dtype.num >= 256:
            return _Words(
                x.dtype.name, np.require(x, requirements="C").view(_WORDS[x.dtype.itemsize])
            )
        return np.require(x, requirements="C")
    if type(x) in (tuple, list):
        return type(x)(packed(y) for y in x)
    if type(x) is dict:
        return {key: packed(y) for key, y in x.items()}
    if type(x) is Answer:
        return x._replace(value=packed(x.value))
    return x


def unpacked(x: Any) -> Any:
    """What was given to `packed`."""
    if type(x) is _Words:
        return x.words.view(np.dtype(getattr(ml_dtypes, x.dtype)))
    if type(x) in (tuple, list):
        return type(x)(unpacked(y) for y in x)
    if type(x) is dict:
        return {key: unpacked(y) for key, y in x.items()}
    if type(x) is Answer:
        return x._replace(value=unpacked(x.value))
    return x


def nbytes(x: Any) -> int:
    """Bytes of the arrays in a message."""
    if isinstance(x, np.ndarray):
        return x.nbytes
    if isinstance(x, (tuple, list)):
        return sum(map(nbytes, x))
    if isinstance(x, dict):
        return sum(map(nbytes, x.values()))
    return int(getattr(x, "nbytes", 0))
