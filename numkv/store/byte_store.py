"""`BlockStore`: bytes under keys, in the same objects as those of a `PrefixStore`, for other engines' caches."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NoReturn, Self

from numkv.checks import Mark, check_mark
from numkv.errors import NotSupported, NumkvError
from numkv.keywords import explains
from numkv.store.folder import Bound, in_threads
from numkv.store.objects import (
    DamagedObject,
    ForeignObject,
    Layout,
    Objects,
    OtherSize,
    Section,
    crc32_of,
)
from numkv.store.places import check_bound, place_of
from numkv.store.records import ByteStats
from numkv.store.requests import begins

log = logging.getLogger("numkv.store")


@explains
class BlockStore:
    """Blocks of bytes under the caller's keys, in a shared folder or any fsspec file system.

    The guarantees are those of a `PrefixStore`. There are no partial objects. A checksum and the identity are
    verified before an object is returned, and `max_nbytes` bounds all objects. A network that does not reply is not
    used for a while. A call accepts many keys; on a network its requests run concurrently.

    Parameters
    ----------
    place, max_nbytes, durable, file_system, timeout, local, local_nbytes
        See `PrefixStore`.
    mark : str or mapping
        Everything that decides the bytes in addition to the keys: the engine, the model and its revision, the layout.
        Objects of another mark are not found.

    Raises
    ------
    NotSupported, TypeError, ValueError, DimensionMismatch
        See `PrefixStore`.

    Notes
    -----
    Any number of threads and processes use one place. Errors of the place are counted (`stats`) and logged. Their keys
    count as missing, or as not written. Only wrong arguments raise, and changes of a closed store, whose reads find
    nothing.

    With `local`, an object that another process replaces or removes may still be found here, as this machine's copy
    stays. What this store itself has replaced or removed is not found again.

    Examples
    --------
    >>> import tempfile
    >>> from numkv.store import BlockStore
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = BlockStore(folder.name, mark="an engine")
    >>> store.put(["a", "b"], [b"first", b"second"])
    [True, True]
    >>> store.exists(["a", "c"])
    [True, False]
    >>> into = bytearray(5)
    >>> store.get_into(["a"], [into]), bytes(into)
    ([True], b'first')
    >>> folder.cleanup()
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        mark: Mark,
        max_nbytes: int | None = None,
        durable: bool = False,
        file_system: Any = None,
        timeout: float | None = 0.3,
        local: str | os.PathLike[str] | None = None,
        local_nbytes: int | None = None,
    ) -> None:
        if mark is None:
            raise TypeError(
                "`mark`: expected a text, or facts by name, got None; name the engine and the model of these bytes"
            )
        self._place = place_of(place, durable, file_system, timeout, local, local_nbytes)
        self._empty = Section.of(check_mark("mark", mark), None, {"objects": "bytes"}, 0, 0)
        self._bound = Bound(self._place, check_bound(max_nbytes))
        begins(self._begin)
        self._counts: collections.Counter[str] = collections.Counter()
        self._errors: collections.Counter[str] = collections.Counter()
        self._last_error, self._closed = "", False
        self._place.report = self._note_error

    def __repr__(self) -> str:
        return f"<BlockStore: {self._place!r}{', closed' if self._closed else ''}>"

    def __reduce__(self) -> NoReturn:
        raise NotSupported(
            "a BlockStore cannot be copied or pickled: make one with the same arguments where it is needed"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the use of the place: later reads find nothing, and later changes raise an error."""
        self._closed = True
        self._place.end()

    def stats(self) -> ByteStats:
        """Return the counts of this object's work.

        Returns
        -------
        ByteStats
        """
        with self._lock:
            return ByteStats(
                **self._counts,
                errors=dict(self._errors),
                answers=self._place.answers,
                last_error=self._last_error,
            )

    # -- calls

    def exists(self, keys: Sequence[str | bytes]) -> list[bool]:
        """Return whether there is an object under each key; its bytes are not checked.

        Parameters
        ----------
        keys : sequence of str or bytes
            Keys of any length.

        Returns
        -------
        list of bool
        """
        return [size is not None for size in self._sizes(keys)]

    def get_into(self, keys: Sequence[str | bytes], buffers: Sequence[Any]) -> list[bool]:
        """Read objects into buffers.

        Parameters
        ----------
        keys : sequence of str or bytes
            Keys of the objects.
        buffers : sequence of writable, contiguous buffers
            A buffer of the object's size for each key.

        Returns
        -------
        list of bool
            Whether each object exists, is valid and has that size. If not, its buffer may have changed.

        Raises
        ------
        ValueError, TypeError
            If there are not as many buffers as keys, or a buffer is not writable.
        """
        names, views = self._names(keys), [_view(x, True) for x in buffers]
        _check_count(names, views)
        found = [False] * len(names)
        by_size: dict[int, list[int]] = collections.defaultdict(list)
        for i, view in enumerate(views if not self._closed else ()):
            by_size[view.nbytes].append(i)
        for size, chosen in by_size.items():
            objects = Objects(
                self._section(size),
                _Buffers([names[i] for i in chosen], [views[i] for i in chosen]),
            )
            for i, error in zip(chosen, self._place.read(objects), strict=True):
                found[i] = error is None
                if isinstance(error, DamagedObject | ForeignObject) and not isinstance(
                    error, OtherSize
                ):
                    self._drop(self._empty.key(names[i]), error)
        self._count(found=sum(found), missed=len(found) - sum(found),
                    bytes_read=sum(v.nbytes for v, ok in zip(views, found, strict=True) if ok))  # fmt: skip
        return found

    def get(self, keys: Sequence[str | bytes]) -> list[bytearray | None]:
        """Read objects of unknown size, with one more request than `get_into`.

        Parameters
        ----------
        keys : sequence of str or bytes
            Keys of the objects.

        Returns
        -------
        list of bytearray or None
            The bytes of each object; None for a missing one.
        """
        header = self._empty.layout.header
        made: dict[int, bytearray] = {}
        for i, size in enumerate(self._sizes(keys)):
            if size is not None and size >= header:
                try:
                    made[i] = bytearray(size - header)
                except (MemoryError, OverflowError) as error:  # perhaps of a damaged file
                    self._note_error("read", error)
        self._count(missed=len(keys) - len(made))  # `get_into` counts the others
        good = self.get_into([keys[i] for i in made], list(made.values()))
        there = dict(zip(made, good, strict=True))
        return [made[i] if there.get(i) else None for i in range(len(keys))]

    def put(self, keys: Sequence[str | bytes], buffers: Sequence[Any]) -> list[bool]:
        """Write objects; an existing object is replaced if its bytes differ.

        Parameters
        ----------
        keys : sequence of str or bytes
            Keys of the objects.
        buffers : sequence of contiguous buffers
            Their bytes.

        Returns
        -------
        list of bool
            Whether each object exists now.

        Raises
        ------
        ValueError, TypeError
            If there are not as many buffers as keys, or one is not a contiguous buffer.
        NumkvError
            If the store is closed.
        """
        names, views = self._names(keys), [_view(x, False) for x in buffers]
        _check_count(names, views)
        self._refuse_closed("put")

        def work(mine: Sequence[int], errors: list[Exception | None]) -> None:
            for i in mine:
                try:
                    self._put(names[i], views[i])
                except Exception as error:
                    errors[i] = error.with_traceback(None)

        errors = in_threads(len(names), self._place.writers, work, self._place.few)
        for error in filter(None, errors):
            self._note_error("write", error)
        good = [error is None for error in errors]
        self._count(written=sum(good), failed=len(good) - sum(good),
                    bytes_written=sum(v.nbytes for v, ok in zip(views, good, strict=True) if ok))  # fmt: skip
        return good

    def remove(self, keys: Sequence[str | bytes]) -> list[bool]:
        """Delete objects; return for each key whether no object exists now."""
        names = self._names(keys)
        self._refuse_closed("remove")
        return [self._place.delete_bad(self._empty.key(name)) for name in names]

    def clear(self) -> None:
        """Delete all objects of this mark."""
        self._refuse_closed("clear")
        try:
            own = f"{self._empty.folder}/"
            found = [x for place in (self._place, *self._place.copies) for x in place.entries()]
            mine = {entry.key: entry for entry in found if entry.key.startswith(own)}.values()
        except Exception as error:
            self._note_error("list", error)
        else:
            self._place.delete([entry._replace(stamp=float("inf")) for entry in mine])

    # -- asynchronous calls

    async def exists_async(self, keys: Sequence[str | bytes]) -> list[bool]:
        """Call `exists` in a thread that the event loop waits for."""
        return await asyncio.to_thread(self.exists, keys)

    async def get_into_async(
        self, keys: Sequence[str | bytes], buffers: Sequence[Any]
    ) -> list[bool]:
        """Call `get_into` in a thread that the event loop waits for."""
        return await asyncio.to_thread(self.get_into, keys, buffers)

    async def put_async(self, keys: Sequence[str | bytes], buffers: Sequence[Any]) -> list[bool]:
        """Call `put` in a thread that the event loop waits for."""
        return await asyncio.to_thread(self.put, keys, buffers)

    # -- insides

    def _begin(self) -> None:
        self._lock, self._bound_lock = threading.Lock(), threading.Lock()

    def _refuse_closed(self, name: str) -> None:
        if self._closed:
            raise NumkvError(f"{name}: expected an open store, got a closed one; make another")

    def _sizes(self, keys: Sequence[str | bytes]) -> list[int | None]:
        wanted = [self._empty.key(name) for name in self._names(keys)]
        return [None] * len(wanted) if self._closed else self._place.sizes(wanted)

    def _names(self, keys: Sequence[str | bytes]) -> list[bytes]:
        if isinstance(keys, str | bytes):
            raise TypeError("`keys`: expected a list of keys, got one; pass [key]")
        return [sha256(_key_bytes(key)).digest() for key in keys]

    def _section(self, nbytes: int) -> Section:
        return self._empty._replace(layout=Layout(self._empty.layout.identity, 0, nbytes))

    def _put(self, name: bytes, view: memoryview) -> None:
        layout, key = self._section(view.nbytes).layout, self._empty.key(name)
        header = layout.make_header(name, b"", crc32_of([view]))
        if self._place.holds(key, header, layout.nbytes):
            self._place.touch(key, 0.0)
            return
        with self._bound_lock:
            evicted = self._bound.make_room(layout.nbytes)
        self._place.write(key, [header, view], 0.0)
        self._count(evicted=evicted)

    def _drop(self, key: str, error: Exception) -> None:
        log.warning("%s/%s is damaged or of another mark, and deleted: %s", self._place, key, error)
        self._place.delete_bad(key)
        self._count(damaged=1)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _note_error(self, asked: str, error: Exception) -> None:
        with self._lock:
            self._errors[f"{asked}: {type(error).__name__}"] += 1
            self._last_error = f"{type(error).__name__}: {error}"


@dataclass
class _Buffers:
    """Objects of one size to read; see `numkv.store.objects.Readings`."""

    names: Sequence[bytes]
    views: Sequence[memoryview]

    def tokens(self, i: int) -> bytes:
        return b""

    def content(self, i: int) -> list[Any]:
        return [self.views[i]]

    def sound(self, content: Sequence[Any]) -> bool:
        return True


def _key_bytes(key: Any) -> bytes:
    if isinstance(key, str):
        return b"s" + key.encode(errors="surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    raise TypeError(f"`keys`: expected texts or bytes, got {type(key).__name__}")


def _view(x: Any, writable: bool) -> memoryview:
    try:
        view = memoryview(x).cast("B")
    except (TypeError, ValueError) as error:  # the latter of dtypes that are not NumPy's own
        raise TypeError(
            f"`buffers`: expected contiguous buffers of bytes, got {type(x).__name__} ({error}); pass numpy arrays of "
            "uint8, such as x.view(numpy.uint8)"
        ) from None
    if writable and view.readonly:
        raise TypeError(
            f"`buffers`: expected buffers that can be written to, got a read-only {type(x).__name__}"
        )
    return view


def _check_count(names: Sequence[bytes], views: Sequence[memoryview]) -> None:
    if len(names) != len(views):
        raise ValueError(f"`buffers`: expected one for each of {len(names)} keys, got {len(views)}")
