"""What an object is, down to the last byte: to see that nothing has changed, and that two are the same."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import zlib
from typing import Any

import numpy as np

from numkv.cells.cells import CellsOfSequence
from numkv.kinds import Kind
from numkv.targets import CpuTarget

__all__ = ["digest", "same"]

#: Fields that hold what can be made again at any time: views, compiled views, copies on a device.
MADE_AGAIN = {
    "_access",
    "_device_table",
    "_struct",
    "_views",
    "_table_view",
    "_jit",
    "_on_target",
    "_uploads",
    "again",
    "watch",
}
#: Those of one class, where another has such a field for good.
MADE_AGAIN_OF = {
    "Step": {"_prefixes", "_reads"},  # by what was asked
    "ForwardPass": {
        "_slots_on_target", "_shown", "_table", "_lens", "_found", "_visible_ranges", "_sight", "_device", "_mask",
    },
}  # fmt: skip
_PLAIN = (int, float, complex, str, bytes, type(None), bool, range, slice)


def digest(*objects: Any) -> int:
    """A number that changes with anything in the objects: arrays byte by byte, all fields of numkv's own objects."""
    parts: list[Any] = []
    seen: dict[int, int] = {}
    for x in objects:
        _walk(x, parts, seen)
    return hash(tuple(parts))


def _walk(x: Any, parts: list[Any], seen: dict[int, int]) -> None:
    kind = type(x)
    if kind in _PLAIN:
        parts.append(repr(x) if kind in (float, complex, slice) else x)
        return
    if kind is np.ndarray or isinstance(x, np.ndarray):
        dtype = x.dtype
        if dtype.hasobject:
            parts.append(("objects", x.shape, tuple(map(repr, x.reshape(-1).tolist()))))
        else:
            content = zlib.crc32(x if x.flags.c_contiguous else x.tobytes())
            parts.append((dtype.num, dtype.itemsize, x.shape, content))
        return
    if isinstance(x, (Kind, CpuTarget)):  # constants
        parts.append(x.name)
        return
    if isinstance(x, np.generic):
        parts.append((x.dtype.num, x.tobytes()))
        return
    known = seen.get(id(x))
    if known is not None:
        parts.append(("seen", known))
        return
    if kind is dict:
        seen[id(x)] = len(seen)
        parts.append(len(x))
        for key, value in x.items():
            _walk(key, parts, seen)
            _walk(value, parts, seen)
    elif isinstance(x, (list, tuple, collections.deque)):
        seen[id(x)] = len(seen)
        parts.append((kind.__name__, len(x)))
        for value in x:
            _walk(value, parts, seen)
    elif isinstance(x, (set, frozenset)):
        parts.append(repr(sorted(map(repr, x))))
    else:
        slots = _slots(kind)
        if slots is None:
            text = getattr(x, "__qualname__", None) or repr(x)
            parts.append(kind.__name__ if " at 0x" in text else text)
            return
        seen[id(x)] = len(seen)
        parts.append(kind.__name__)
        if kind is CellsOfSequence:  # a list with room for more, which holds anything
            _walk(x.owned, parts, seen)
            return
        fields = getattr(x, "__dict__", None) or {}
        made_again = MADE_AGAIN_OF.get(kind.__name__, ())
        for name in sorted(fields):
            if name not in MADE_AGAIN and name not in made_again:
                parts.append(name)
                _walk(fields[name], parts, seen)
        for name in slots:
            if name not in MADE_AGAIN and name not in made_again and hasattr(x, name):
                parts.append(name)
                _walk(getattr(x, name), parts, seen)


@functools.cache
def _slots(kind: type) -> tuple[str, ...] | None:
    """Names of the slots of a class of numkv, or of a dataclass; None if it is another, whose fields do not matter."""
    ours = kind.__module__.partition(".")[0] == "numkv" or dataclasses.is_dataclass(kind)
    if not ours or issubclass(kind, (enum.Enum, type)):
        return None
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__weakref__", "__dict__"))


def same(a: Any, b: Any) -> bool:
    """Whether two results are the same, bit by bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return digest(a) == digest(b)
