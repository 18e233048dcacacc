"""`Snapshot`: an object as small values, small arrays and tensors, and `plan`: how it is made of these again.

The class of an object that can be saved has a `Saved` and two methods::

    __saved__                                       its small values, with which tensors there are, and bytes in all
    __snapshot__(self)                              what it consists of now
    __restore__(cls, saved, source, options)        an object of what a file says, which has been checked

A `Tensor` says where its elements lie, so that the same list of tensors serves an object that is saved and an empty one
that is filled. Nothing is copied before it is written.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.snapshots.fields import Fields
from numkv.snapshots.saved import Saved, Spec
from numkv.targets.base import Target

#: Reads the next elements of a tensor into contiguous arrays.
Read = Callable[[Iterable[NDArray[Any]]], None]


class Tensor(NamedTuple):
    """A tensor, and where its elements lie.

    Attributes
    ----------
    name : str
        Its name in the file.
    spec : Spec
        Dtype and shape.
    pieces : callable
        Gives contiguous arrays that hold the elements in order, when they are to be written.
    fill : callable
        Puts elements where they lie, which it gets from a `Read`.
    """

    name: str
    spec: Spec
    pieces: Callable[[], Iterable[NDArray[Any]]]
    fill: Callable[[Read], None]

    @classmethod
    def of(cls, name: str, x: NDArray[Any]) -> Tensor:
        """A tensor that is an array."""
        lies = np.ascontiguousarray(x)
        return cls(name, Spec(x.dtype, x.shape), lambda: [lies], lambda read: read([lies]))


class Source(Protocol):
    """Where tensors are read from: an open file, or a part of one."""

    def spec(self, name: str) -> Spec:
        """What a tensor is."""

    def take(self, name: str, spec: Spec) -> None:
        """Expect a tensor, and that it is what it has to be."""

    def array(self, name: str) -> NDArray[Any]:
        """Read a small tensor, and compare its checksum at once."""

    def fill(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        """Read the next elements of a tensor into contiguous arrays."""

    def verify(self) -> None:
        """Compare the checksums of all that was read, and see that it was all."""


class Snapshot(NamedTuple):
    """What an object consists of.

    Attributes
    ----------
    saved : Saved
        Small values.
    tensors : list of Tensor
        What lies in buffers.
    held : list of (object, bool)
        What nobody may change while it is written, and whether new tokens would change it.
    arrays : mapping of str to array
        Small arrays in host memory, by the names of tensors.
    """

    saved: Saved
    tensors: list[Tensor]
    held: list[tuple[Any, bool]]
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})

    def all_tensors(self, prefix: str = "") -> list[Tensor]:
        """All tensors, small ones first, with something before their names."""
        found = [Tensor.of(name, x) for name, x in self.arrays.items()] + self.tensors
        return [x._replace(name=prefix + x.name) for x in found] if prefix else found


class Options(NamedTuple):
    """The arguments of `numkv.load` that say what a cache is to be made with.

    Attributes
    ----------
    target : str or None
        Name of the target.
    shift : object
        The shift, or what holds one for each child.
    pool : PagedPool or None
        Where a layer takes its blocks from.
    """

    target: str | None
    shift: Any
    pool: Any

    @property
    def place(self) -> Target:
        """Where the cache goes."""
        return targets.get("cpu" if self.target is None else self.target)


class Plan(NamedTuple):
    """How an object is made from what has been checked.

    Attributes
    ----------
    nbytes : int
        Bytes that it takes.
    build : callable
        Allocates it and reads its content; what it has taken of others it gives back after an error.
    """

    nbytes: int
    build: Callable[[], Any]


def plan(cls: Any, fields: Fields, source: Source, options: Options) -> Plan:
    """Check what a file says of an object of a class, and how to make it."""
    saved: Saved = cls.__saved__.read(fields)
    for name, spec in saved.specs().items():
        source.take(name, spec)
    # A pool that is given is there already.
    nbytes = saved.nbytes if options.pool is None else 0
    return Plan(nbytes, functools.partial(cls.__restore__, saved, source, options))


class Under:
    """The part of a source whose names begin with a prefix."""

    def __init__(self, source: Source, prefix: str) -> None:
        self._source, self._prefix = source, prefix
        self.verify = source.verify

    def spec(self, name: str) -> Spec:
        return self._source.spec(self._prefix + name)

    def take(self, name: str, spec: Spec) -> None:
        self._source.take(self._prefix + name, spec)

    def array(self, name: str) -> NDArray[Any]:
        return self._source.array(self._prefix + name)

    def fill(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        self._source.fill(self._prefix + name, pieces)


def bytes_of(x: NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array."""
    flat: Any = x.reshape(-1).view(np.uint8)
    return memoryview(flat)


def crc32_of(arrays: Iterable[NDArray[Any]]) -> str:
    """The CRC-32 of some arrays, one after another, in hexadecimal."""
    found = 0
    for x in arrays:
        found = zlib.crc32(bytes_of(np.ascontiguousarray(x)), found) if x.size else found
    return f"{found:08x}"


def fill_all(source: Source, tensors: Iterable[Tensor]) -> None:
    """Read tensors to where their elements lie."""
    for tensor in tensors:
        tensor.fill(functools.partial(source.fill, tensor.name))
