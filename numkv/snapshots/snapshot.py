"""`Snapshot`: an object as small values, small arrays and tensors.

The class of a savable object has a `Saved` and two methods::

    __saved__                                       its small values, the list of its tensors, and bytes in all
    __snapshot__(self)                              its present contents
    __restore__(cls, saved, source, options)        an object rebuilt from checked values; after an error it releases
                                                    blocks of a shared pool

A `Tensor` knows where its elements lie, so one list of tensors serves for saving an object and for filling an empty
one. Nothing is copied before it is written.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from numkv.snapshots.saved import Saved, Spec
from numkv.targets.base import Target

#: Reads the next elements of a tensor into contiguous arrays.
Read = Callable[[Iterable[NDArray[Any]]], None]


class Tensor(NamedTuple):
    """A tensor, and the places of its elements.

    Attributes
    ----------
    name : str
        Its name in the file.
    spec : Spec
        Dtype and shape.
    pieces : callable
        Yields contiguous arrays with the elements in order, for writing.
    fill : callable
        Stores elements in their places, from a `Read`.
    """

    name: str
    spec: Spec
    pieces: Callable[[], Iterable[NDArray[Any]]]
    fill: Callable[[Read], None]

    @classmethod
    def of(cls, name: str, x: NDArray[Any]) -> Tensor:
        """Return an array as a tensor."""
        lies = np.ascontiguousarray(x)
        return cls(name, Spec(x.dtype, x.shape), lambda: [lies], lambda read: read([lies]))


class Source(Protocol):
    """Where tensors are read from: an open file, or a part of one."""

    def array(self, name: str) -> NDArray[Any]:
        """Read a small tensor, and compare its checksum at once."""

    def fill(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        """Read the next elements of a tensor into contiguous arrays."""

    def verify(self) -> None:
        """Compare all checksums, and require that every tensor was read."""


class Snapshot(NamedTuple):
    """The contents of an object.

    Attributes
    ----------
    saved : Saved
        Small values.
    tensors : list of Tensor
        Large tensors in buffers.
    held : list of (object, bool)
        Objects that must not change while they are written, and whether new tokens count as a change.
    arrays : mapping of str to array
        Small arrays in host memory, by the names of tensors.
    """

    saved: Saved
    tensors: list[Tensor]
    held: list[tuple[Any, bool]]
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})

    def all_tensors(self, prefix: str = "") -> list[Tensor]:
        """Return all tensors, small ones first, with a prefix to their names."""
        found = [Tensor.of(name, x) for name, x in self.arrays.items()] + self.tensors
        return [x._replace(name=prefix + x.name) for x in found] if prefix else found


class Options(NamedTuple):
    """The arguments of `numkv.load` from which a cache is made.

    Attributes
    ----------
    place : Target
        The target of the cache.
    shift : object
        The shift, or a sequence with one for each child.
    pool : PagedPool or None
        The pool of a layer.
    """

    place: Target
    shift: Any
    pool: Any


class Under:
    """The tensors of a source whose names begin with a prefix."""

    def __init__(self, source: Source, prefix: str) -> None:
        self._source, self._prefix = source, prefix
        self.verify = source.verify

    def array(self, name: str) -> NDArray[Any]:
        return self._source.array(self._prefix + name)

    def fill(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        self._source.fill(self._prefix + name, pieces)


def bytes_of(x: NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array."""
    flat: Any = x.reshape(-1).view(np.uint8)
    return memoryview(flat)


def crc32_of(arrays: Iterable[NDArray[Any]]) -> str:
    """Return the CRC-32 of arrays, one after another, in hexadecimal."""
    found = 0
    for x in arrays:
        found = zlib.crc32(bytes_of(np.ascontiguousarray(x)), found) if x.size else found
    return f"{found:08x}"


def fill_all(source: Source, tensors: Iterable[Tensor]) -> None:
    """Read tensors into their places."""
    for tensor in tensors:
        tensor.fill(functools.partial(source.fill, tensor.name))
