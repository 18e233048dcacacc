"""Places of objects: a folder, a network place, or a network place with a local folder of copies.

The folder caches objects that were read or written last. Objects that it lacks are requested from the network. Objects
that it cannot store are skipped. A thread makes copies from verified bytes. A damaged copy is deleted, and its object
is read from the network.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from numkv.numbers import check_flag, check_number, check_size
from numkv.store.folder import Bound, Entry, Folder, Jobs
from numkv.store.objects import DamagedObject, ForeignObject
from numkv.store.remote import RemoteFolder, opened
from numkv.store.requests import Requests, begins

#: The most bytes that wait to be copied. Objects beyond this are not copied.
_MOST_WAITING = 64 << 20


class _Source(str):
    """A read or a change from whose bytes copies are made. Changes have it as their key, so it exists until they end.

    They may end later than their caller waits.
    """


class Fronted:
    """A place behind a folder.

    A copy that this process makes is never older than its newest change of the key, even one without an answer. A copy
    that another process makes may be, as processes do not tell each other what they replace.

    Parameters
    ----------
    near : Folder
        The folder, which no other kind of store uses.
    far : RemoteFolder or Folder
        The place that all processes share.
    most : int or None
        The most bytes of the folder; None for no bound.
    """

    def __init__(self, near: Folder, far: RemoteFolder | Folder, most: int | None) -> None:
        self._near, self._far, self._bound = near, far, Bound(near, most)
        self.few, self.attempts, self.writers = far.few, far.attempts, far.writers
        # Of all but copies the network decides alone.
        self.entries, self.alone, self.end = far.entries, far.alone, far.end
        self.copies = [near]
        #: Called with errors, and when the place stops or begins to answer; see `RemoteFolder`.
        self.report: Callable[[str, Exception], None] = lambda asked, error: None
        self.changed: Callable[[Exception | None], None] = lambda error: None
        far.report = lambda asked, error: self.report(asked, error)
        near.report = lambda asked, error: self.report(f"local {asked}", error)
        if isinstance(far, RemoteFolder):
            far.changed = lambda error: self.changed(error)
        self._copies = Requests(1, lambda: None)
        begins(self._begin)

    def __repr__(self) -> str:
        return repr(self._far)

    def _begin(self) -> None:
        self._lock, self._waiting = threading.Lock(), 0  # bytes that are to be copied
        self._changing = threading.Lock()  # held while copies are made and deleted
        # For each key what its copy may be made from, while that runs or its copy waits.
        self._sources: weakref.WeakValueDictionary[str, _Source] = weakref.WeakValueDictionary()

    @property
    def answers(self) -> bool:
        """Return whether the network answers, as far as is known; the folder is read in any case."""
        return self._far.answers

    # -- reading

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the bytes of objects; None for a missing one."""
        found = self._near.sizes(keys)
        others = [i for i, size in enumerate(found) if size is None]
        for i, size in zip(others, self._far.sizes([keys[i] for i in others]), strict=True):
            found[i] = size
        return found

    def read(self, jobs: Jobs) -> list[Exception | None]:
        """Read objects, and return the error of each."""
        sizes = self._near.sizes(jobs.keys)
        here = [i for i, size in enumerate(sizes) if size == jobs.nbytes]
        others = [i for i, size in enumerate(sizes) if size != jobs.nbytes]
        for i, error in zip(here, self._near.read(_Some(jobs, here)), strict=True):
            if error is None:
                self._near.touch(jobs.keys[i], 0.0)
            else:
                if isinstance(error, DamagedObject | ForeignObject):
                    self._near.delete_bad(jobs.keys[i])
                others.append(i)
        source = _Source()
        for i in others:
            self._sources.setdefault(jobs.keys[i], source)
        far = _Some(jobs, others, functools.partial(self._keep, source))
        errors = dict(zip(others, self._far.read(far), strict=True))
        return [errors.get(i) for i in range(len(jobs.keys))]

    # -- writing

    def holds(self, key: str, header: bytes, nbytes: int) -> bool:
        """Return whether the network holds an object; another copy is deleted then."""
        found = self._far.holds(key, header, nbytes)
        if found and not self._near.holds(key, header, nbytes):
            self._forget(key)
        return found

    def write(self, key: str, pieces: Sequence[Any], age: float) -> None:
        """Write an object to the network, and queue a local copy."""
        source = self._sources[key] = _Source(key)
        try:
            self._far.write(source, pieces, age)
        except BaseException:  # it may have arrived, or arrive yet
            if not self._near.holds(key, pieces[0], sum(map(len, pieces))):
                self._forget(key, False)
            raise
        if self._forget(key) is source:  # else another write has begun, and either may be the last
            self._sources[key] = source
            self._keep(source, key, pieces)

    def touch(self, key: str, age: float) -> None:
        """Record that an object was used `age` seconds ago."""
        self._near.touch(key, age)
        self._far.touch(key, age)

    def _keep(self, source: _Source, key: str, pieces: Sequence[Any]) -> None:
        """Queue a local copy, unless too many bytes wait."""
        data = b"".join(pieces)
        with self._lock:
            if self._waiting + len(data) > _MOST_WAITING:
                return
            self._waiting += len(data)
        self._copies.add([functools.partial(self._copy, source, key, data)])

    def _copy(self, source: _Source, key: str, data: bytes) -> None:
        try:
            self._bound.make_room(len(data))
            with self._changing:
                if self._sources.get(key) is source:
                    self._near.write(key, [data], 0.0)
        except Exception as error:  # such as a full disk: no copy is made
            self.report("local write", error)
        finally:
            with self._lock:
                self._waiting -= len(data)

    # -- contents of the network

    def delete(self, entries: Sequence[Entry]) -> list[bool]:
        """Delete objects that processes share, then copies of them."""
        sources = {entry.key: _Source(entry.key) for entry in entries}
        self._sources.update(sources)
        gone = self._far.delete([entry._replace(key=sources[entry.key]) for entry in entries])
        for entry, is_gone in zip(entries, gone, strict=True):
            self._forget(entry.key, is_gone)
        return gone

    def delete_bad(self, key: str) -> bool:
        """Delete an invalid object, then its copy."""
        return self.delete([Entry(key, 0, float("inf"))])[0]

    def _forget(self, key: str, is_over: bool = True) -> _Source | None:
        """Delete a copy, and make none from what runs; return what the next copy would have been made from.

        While a change without an answer may still arrive, no copies are made at all.
        """
        with self._changing:
            self._near.delete_bad(key)
            return self._sources.pop(key, None) if is_over else None


class _Some:
    """Some of the objects to read; `copy` is called with each valid one."""

    def __init__(
        self, jobs: Jobs, which: Sequence[int], copy: Callable[[str, Sequence[Any]], None] | None = None
    ) -> None:  # fmt: skip
        self._jobs, self._which, self._copy = jobs, which, copy
        self.keys: Sequence[str] = [jobs.keys[i] for i in which]
        self.nbytes = jobs.nbytes

    def views(self, i: int) -> list[Any]:
        return self._jobs.views(self._which[i])

    def check(self, i: int, views: Sequence[Any]) -> None:
        self._jobs.check(self._which[i], views)
        if self._copy is not None:
            self._copy(self.keys[i], views)


Place = Folder | RemoteFolder | Fronted


def place_of(
    place: Any, durable: Any, file_system: Any, timeout: Any, local: Any, local_nbytes: Any
) -> Place:
    """Return the place of a path, a URL, or a path within a file system of fsspec; see `numkv.store.PrefixStore`."""
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
    """Return a valid bound on the bytes of all objects, or None."""
    return None if given is None else check_size(name, given, 1, 2**62)


def check_timeout(given: Any) -> float | None:
    """Return a valid timeout in seconds, or None for no timeout."""
    return None if given is None else check_number("timeout", given, 0.0)


def _path(name: str, given: Any) -> str:
    try:
        path = os.fsdecode(given)
    except TypeError:
        raise TypeError(f"`{name}`: expected a path or a URL, got {type(given).__name__}") from None
    if "\0" in path or not path:
        raise ValueError(f"`{name}`: expected a path or a URL, got {path!r}")
    return path
