"""Objects in a folder of this machine's file systems."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from numkv.replace import SUFFIX, replacing, write_all
from numkv.store.objects import DamagedObject

#: Buffers that one call of the system takes; it is 1,024 where POSIX is.
_MOST_VIEWS = 1000
#: Threads that read, and files that each of them has announced to the system ahead: the disk works on these meanwhile,
#: so more threads than cores would only take Python's lock from each other.
_READERS = max(2, min(8, os.cpu_count() or 1))
_AHEAD = 8
#: Objects that one thread reads alone: others would begin when it is done.
_FEW = 4
#: Seconds after which a temporary file is one that a killed process has left.
_ABANDONED = 600.0
#: Seconds that a process waits while another one evicts: that one may have been stopped for good.
_PATIENCE = 10.0
_LOCK = ".evicting"


class Jobs(Protocol):
    """Objects that are to be read. Nothing is made for one before its turn, nor kept after it."""

    keys: Sequence[str]
    """Where they lie, below the root."""
    nbytes: int
    """Bytes of each."""

    def views(self, i: int) -> list[Any]:
        """Writable buffers for all bytes of an object, one after another."""

    def check(self, i: int, views: Sequence[Any]) -> None:
        """Raise what is wrong with an object that has been read into them."""


class Entry(NamedTuple):
    """An object that is there."""

    key: str
    nbytes: int
    stamp: float
    """When it was used last, in seconds."""


class Folder:
    """A folder of files.

    Parameters
    ----------
    root : str
        The folder; it is made when something is written.
    durable : bool
        Whether an object is on the disk before it counts as written.
    """

    def __init__(self, root: str, durable: bool) -> None:
        self.root, self._durable = root, durable

    def __repr__(self) -> str:
        return self.root

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    # -- reading

    def exist(self, keys: Sequence[str], nbytes: int) -> list[bool]:
        """Whether there are such objects, of so many bytes: a shorter one is no object."""
        found = []
        for key in keys:
            try:
                found.append(os.stat(self._path(key)).st_size == nbytes)
            except OSError:
                found.append(False)
        return found

    def read(self, jobs: Jobs) -> list[Exception | None]:
        """Read objects, and what went wrong with each; an object that is not there is a `FileNotFoundError`."""

        def work(mine: Sequence[int], errors: list[Exception | None]) -> None:
            ahead: collections.deque[int | OSError] = collections.deque()
            following = iter(mine)
            try:
                for i in mine:
                    for j in itertools.islice(following, 1 + _AHEAD - len(ahead)):
                        ahead.append(self._announced(jobs.keys[j]))
                    try:
                        _read(ahead.popleft(), jobs, i)
                    except Exception as error:
                        errors[i] = error
            finally:
                for each in ahead:
                    if isinstance(each, int):
                        os.close(each)

        return in_threads(len(jobs.keys), _READERS, work)

    def _announced(self, key: str) -> int | OSError:
        """A file that is open, and that the system has been told to read."""
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            return error
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return descriptor

    # -- writing

    def write(self, key: str, pieces: Sequence[Any], stamp: float) -> None:
        """Make an object, or replace it, as a whole.

        Raises
        ------
        OSError
            As the system gave it; nothing is left of the new object.
        """
        path, views = self._path(key), [_bytes(piece) for piece in pieces]
        try:
            self._write(path, views)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._write(path, views)
        # Not before: a half written file that looks old is one that a killed process left.
        self.touch(key, stamp)

    def _write(self, path: str, views: list[memoryview]) -> None:
        with replacing(path, durable=self._durable, tidy=False) as descriptor:
            write_all(descriptor, views)

    def touch(self, key: str, stamp: float) -> None:
        """Note that an object was used."""
        at = int(stamp * 1e9)
        with contextlib.suppress(OSError):
            os.utime(self._path(key), ns=(at, at))

    # -- what there is

    def entries(self) -> Iterator[Entry]:
        """All objects; what killed processes have left half written is deleted."""
        now = self._now()
        for identity in _scan(self.root):
            if not identity.is_dir(follow_symlinks=False):
                continue
            for part in _scan(identity.path):
                if part.is_dir(follow_symlinks=False):
                    yield from self._entries_in(f"{identity.name}/{part.name}", now)

    def _now(self) -> float:
        """The time by the clock that new files get theirs from, which may be that of another machine."""
        lock = self._path(_LOCK)
        try:
            os.utime(lock)
            return os.stat(lock).st_mtime
        except OSError:  # nothing has been evicted so far
            return time.time()

    def _entries_in(self, folder: str, now: float) -> Iterator[Entry]:
        for file in _scan(self._path(folder)):
            try:
                found = file.stat(follow_symlinks=False)
            except OSError:  # deleted meanwhile
                continue
            if file.name.endswith(SUFFIX) and now - found.st_mtime > _ABANDONED:
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
            else:
                yield Entry(f"{folder}/{file.name}", found.st_size, found.st_mtime)

    def delete(self, entry: Entry) -> bool:
        """Delete an object unless it was used since, or is being written; whether it is gone."""
        if entry.key.endswith(SUFFIX):
            return False
        path = self._path(entry.key)
        try:
            if os.stat(path).st_mtime > entry.stamp:
                return False
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def delete_bad(self, key: str) -> None:
        """Delete an object that is not what it should be."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Look and evict while no other process does; a kill ends that too.

        Others wait for their turn, so that each begins with what there is then: who did not wait could write on and on
        while one that evicts has been stopped by the system.
        """
        try:
            import fcntl
        except ImportError:  # Windows: several may, which deletes too much at worst
            yield
            return
        try:
            descriptor = os.open(self._path(_LOCK), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # a full disk: all the more
            yield
            return
        try:
            until = time.monotonic() + _PATIENCE
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() < until:
                        time.sleep(0.002)
                        continue
                except OSError:  # a file system without locks
                    pass
                break
            try:
                yield
            finally:
                # A child that was forked meanwhile has the descriptor too, and with it the lock, until it ends.
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def in_threads(
    count: int, most: int, work: Callable[[Sequence[int], list[Exception | None]], None]
) -> list[Exception | None]:
    """Share numbers out to threads, this one among them, and wait for all of them.

    Parameters
    ----------
    count : int
        Numbers.
    most : int
        Threads at most.
    work : callable
        Takes its numbers, and a list where it puts what went wrong with each.
    """
    errors: list[Exception | None] = [None] * count
    shares = 1 if count <= _FEW else min(most, count)
    threads = []
    for share in range(1, shares):
        mine = range(share, count, shares)
        thread = threading.Thread(target=work, args=(mine, errors), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is about to end
            work(mine, errors)
        else:
            threads.append(thread)
    try:
        work(range(0, count, shares), errors)
    finally:
        for thread in threads:
            thread.join()
    return errors


def _read(file: int | OSError, jobs: Jobs, i: int) -> None:
    """Read and check an object, and close its file."""
    if isinstance(file, OSError):
        raise file
    try:
        views, got = jobs.views(i), 0
        longer = [*views, bytearray(1)]  # which stays empty
        for first in range(0, len(longer), _MOST_VIEWS):
            got += os.preadv(file, longer[first : first + _MOST_VIEWS], got)
        if got != jobs.nbytes:
            _read_slowly(file, views)
    finally:
        os.close(file)
    jobs.check(i, views)


def _read_slowly(descriptor: int, views: Sequence[Any]) -> None:
    """Read where the system stops in the middle, or there is no more."""
    at = 0
    for view in map(_bytes, views):
        while len(view):
            got = os.preadv(descriptor, [view], at)
            if not got:
                raise DamagedObject(f"it is cut off after {at} bytes")
            view, at = view[got:], at + got
    if os.pread(descriptor, 1, at):
        raise DamagedObject(f"it is longer than {at} bytes")


def _bytes(view: Any) -> memoryview:
    return memoryview(view).cast("B")


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []
