"""Objects in a folder of this machine's file systems, and the size bound of any store."""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from numkv.replace import SUFFIX, replacing, write_all
from numkv.store.objects import OBJECT, OtherSize

#: The most buffers of one system call: 1,024 on POSIX systems.
_MOST_VIEWS = 1000
#: Threads that read, and files that each of them announces to the system ahead. The disk reads these meanwhile, so more
#: threads than cores would only compete for Python's lock.
_READERS = max(2, min(8, os.cpu_count() or 1))
_AHEAD = 8
#: Objects that one thread reads alone, because others would start too late to help.
_FEW = 4
#: Seconds after which a temporary file counts as the rest of a killed process.
_ABANDONED = 600.0
#: Seconds that a process waits while another one evicts, which may be suspended.
_PATIENCE = 10.0
_LOCK = ".evicting"
#: Seconds after which the clock of the file system is read again.
_CLOCK_STAYS = 60.0
#: A process scans again after it has written this part of the bound. Each process may exceed the bound by this part,
#: because there is no common count.
_SLACK = 1 / 16
#: The part of the bound that remains in use after eviction.
_LEFT = 0.9


class Jobs(Protocol):
    """Objects to read. Memory for an object is allocated at its turn, and released after it."""

    keys: Sequence[str]
    """Where they lie, below the root."""
    nbytes: int
    """Bytes of each."""

    def views(self, i: int) -> list[Any]:
        """Return writable buffers for all bytes of an object, one after another."""

    def check(self, i: int, views: Sequence[Any]) -> None:
        """Validate an object that was read into its buffers, and raise an error if it is invalid."""


class Entry(NamedTuple):
    """An existing object."""

    key: str
    nbytes: int
    stamp: float
    """When it was used last, in seconds."""


class Folder:
    """A folder of files.

    Parameters
    ----------
    root : str
        The folder. The first write creates it.
    durable : bool
        Whether an object is fsynced before it counts as written.
    """

    #: A folder's errors belong to their requests. It always counts as answering.
    answers = True
    #: Retries are useless on a disk.
    attempts = 1
    #: Objects that one thread handles as fast as several.
    few = _FEW
    #: Folders of copies.
    copies: Sequence[Any] = ()

    def __init__(self, root: str, durable: bool) -> None:
        self.root, self._durable = root, durable
        self._offset: tuple[float, float] | None = None
        # With two threads, one encodes while the other waits for the disk's confirmation.
        self.writers = 2 if durable else 1
        self.report: Callable[[str, Exception], None] = lambda asked, error: None

    def __repr__(self) -> str:
        return self.root

    def end(self) -> None:
        """Do nothing: a disk is never polled."""

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    # -- reading

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the bytes of objects; None for a missing one."""
        found: list[int | None] = [None] * len(keys)
        for i, key in enumerate(keys):
            with contextlib.suppress(OSError):
                file = os.stat(self._path(key))
                found[i] = file.st_size if stat.S_ISREG(file.st_mode) else None
        return found

    def read(self, jobs: Jobs) -> list[Exception | None]:
        """Read objects, and return the error of each; a missing object is a `FileNotFoundError`."""

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
                        errors[i] = error.with_traceback(None)  # whose frames refer to it
            finally:
                for each in ahead:
                    if isinstance(each, int):
                        os.close(each)

        errors = in_threads(len(jobs.keys), _READERS, work)
        for error in errors:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                self.report("read", error)
        return errors

    def _opened(self, key: str) -> int:
        """Open a file to read it."""
        return os.open(self._path(key), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))

    def _announced(self, key: str) -> int | OSError:
        """Open a file, and announce to the system that it will be read."""
        try:
            descriptor = self._opened(key)
        except OSError as error:
            return error
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return descriptor

    # -- writing

    def holds(self, key: str, header: bytes, nbytes: int) -> bool:
        """Return whether an object of this size begins with a header, which zeros after a power cut do not."""
        try:
            descriptor = self._opened(key)
            try:
                return (
                    os.fstat(descriptor).st_size == nbytes
                    and os.pread(descriptor, len(header), 0) == header
                )
            finally:
                os.close(descriptor)
        except OSError:
            return False

    def write(self, key: str, pieces: Sequence[Any], age: float) -> None:
        """Create or replace an object atomically; it counts as used `age` seconds ago.

        Raises
        ------
        OSError
            The system's error. The new object leaves no trace.
        """
        path, views = self._path(key), [_bytes(piece) for piece in pieces]
        try:
            self._write(path, views)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._write(path, views)
        # Not before: an old partial file counts as the rest of a killed process.
        self.touch(key, age)

    def _write(self, path: str, views: list[memoryview]) -> None:
        with replacing(path, durable=self._durable, tidy=False, follow=False) as descriptor:
            write_all(descriptor, views)

    def touch(self, key: str, age: float) -> None:
        """Record that an object was used `age` seconds ago."""
        at = int((self._now() - age) * 1e9)
        with contextlib.suppress(OSError):
            os.utime(self._path(key), ns=(at, at))

    # -- contents

    def entries(self) -> Iterator[Entry]:
        """Yield all objects, and delete partial files of killed processes; other files are not the store's."""
        now = self._now()
        for identity in _scan(self.root):
            if not identity.is_dir(follow_symlinks=False):
                continue
            for part in _scan(identity.path):
                if part.is_dir(follow_symlinks=False):
                    yield from self._entries_in(f"{identity.name}/{part.name}", now)

    def _now(self) -> float:
        """Return the time by the file system's clock, which may be another machine's.

        Processes therefore agree on the order of uses, whatever their own clocks are.
        """
        own = time.monotonic()
        if self._offset is None or own >= self._offset[1]:
            try:
                # The quickest of three, as this thread may have to wait in between.
                tries = [self._clock() for _ in range(3)]
                offset = min(tries)[1]
            except OSError:  # the folder does not exist yet, or is not writable
                return time.time()
            self._offset = offset, own + _CLOCK_STAYS
        return self._offset[0] + own

    def _clock(self) -> tuple[float, float]:
        """Return how long it took to read the file system's clock, and how far it is ahead of this process's."""
        before = time.monotonic()
        os.utime(self.root)
        took = time.monotonic() - before
        return took, os.stat(self.root).st_mtime - before - took / 2

    def _entries_in(self, folder: str, now: float) -> Iterator[Entry]:
        for file in (x for x in _scan(self._path(folder)) if OBJECT.match(f"{folder}/{x.name}")):
            try:
                found = file.stat(follow_symlinks=False)
            except OSError:  # deleted meanwhile
                continue
            if stat.S_ISDIR(found.st_mode):
                continue
            if file.name.endswith(SUFFIX) and now - found.st_mtime > _ABANDONED:
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
            else:
                # A time in the future would keep an object for ever.
                yield Entry(f"{folder}/{file.name}", found.st_size, min(found.st_mtime, now))

    def delete(self, entries: Sequence[Entry]) -> list[bool]:
        """Delete objects that were not used since and are not being written; return which were deleted."""
        return [self._delete(entry) for entry in entries]

    def _delete(self, entry: Entry) -> bool:
        if entry.key.endswith(SUFFIX):
            return False
        with contextlib.suppress(OSError):  # it was deleted already
            if entry.stamp < os.stat(self._path(entry.key)).st_mtime <= self._now():
                return False
        return self.delete_bad(entry.key)

    def delete_bad(self, key: str) -> bool:
        """Delete an invalid object; return whether it was deleted."""
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return True
        except OSError as error:
            self.report("delete", error)
            return False
        return True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Scan and evict while no other process does; a kill also releases the lock.

        Others wait for their turn, so that each begins with the folder's current contents. Without turns, writers could
        go on while the system has suspended one that evicts.
        """
        try:
            import fcntl
        except ImportError:
            # Windows: several processes may evict at once, which at worst deletes too much.
            yield
            return
        try:
            descriptor = os.open(self._path(_LOCK), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # a full disk needs eviction even more
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
                # A child that was forked meanwhile also has the descriptor, and with it the lock, until it ends.
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


class Bound:
    """The bound of one process on a folder that others write to as well.

    Parameters
    ----------
    place : Folder or RemoteFolder
        The place of objects.
    most : int or None
        The most bytes; None for no bound.
    """

    def __init__(self, place: Any, most: int | None) -> None:
        self._place, self._most = place, most
        self._known: int | None = None  # bytes of all objects, as far as this process knows
        self._since = 0  # bytes written since its last scan

    def make_room(self, nbytes: int) -> int:
        """Make room for an object to be written; return how many others were deleted.

        Raises
        ------
        OSError
            If the object is larger than the bound.
        """
        if self._most is None:
            return 0
        if nbytes > self._most:
            raise OSError(
                errno.EFBIG, f"an object of {nbytes} bytes is larger than the store may be"
            )
        evicted = 0
        look = self._known is None or self._since > self._most * _SLACK
        if look or (self._known or 0) + nbytes > self._most:
            evicted = self._evict(nbytes)
        self._known = (self._known or 0) + nbytes
        self._since += nbytes
        return evicted

    def _evict(self, nbytes: int) -> int:
        assert self._most is not None
        with self._place.alone():
            entries = list(self._place.entries())
            total, evicted = sum(entry.nbytes for entry in entries), 0
            if total + nbytes > self._most:
                oldest = collections.deque(sorted(entries, key=lambda x: x.stamp))
                while oldest and total + nbytes > self._most * _LEFT:
                    chosen, size = [], 0
                    while oldest and total + nbytes - size > self._most * _LEFT:
                        chosen.append(oldest.popleft())
                        size += chosen[-1].nbytes
                    for entry, gone in zip(chosen, self._place.delete(chosen), strict=True):
                        total -= entry.nbytes * gone
                        evicted += gone
            self._known, self._since = total, 0
        return evicted


def in_threads(
    count: int,
    most: int,
    work: Callable[[Sequence[int], list[Exception | None]], None],
    few: int = _FEW,
) -> list[Exception | None]:
    """Distribute the numbers below `count` over threads, including this one, and wait for all of them.

    Parameters
    ----------
    count : int
        How many numbers.
    most : int
        The most threads.
    work : callable
        Called with its numbers, and a list for the error of each.
    few : int
        The most numbers that this thread processes alone.
    """
    errors: list[Exception | None] = [None] * count
    shares = 1 if count <= few else min(most, count)
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
        longer = [*views, bytearray(1)]  # the last byte stays unused
        for first in range(0, len(longer), _MOST_VIEWS):
            got += os.preadv(file, longer[first : first + _MOST_VIEWS], got)
        if got != jobs.nbytes:
            _read_slowly(file, views)
    finally:
        os.close(file)
    jobs.check(i, views)


def _read_slowly(descriptor: int, views: Sequence[Any]) -> None:
    """Read in several calls, after one that returned too few bytes."""
    at = 0
    for view in map(_bytes, views):
        while len(view):
            got = os.preadv(descriptor, [view], at)
            if not got:
                raise OtherSize(f"it is cut off after {at} bytes")
            view, at = view[got:], at + got
    if os.pread(descriptor, 1, at):
        raise OtherSize(f"it is longer than {at} bytes")


def _bytes(view: Any) -> memoryview:
    return memoryview(view).cast("B")


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []
