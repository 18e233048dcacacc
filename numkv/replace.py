"""A file that appears as a whole or not at all, also after a power cut: saved caches, objects of stores, kernels."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence

from numkv.errors import NotSupported

#: Ending of the names of files that are being written.
SUFFIX = ".partial"
#: Buffers that one call of the system takes; it is 1,024 where POSIX is.
_MOST_VIEWS = 1000
_HOUR = 3600
#: Windows renames no file that is open, and has no such locks.
_CLOSED_FIRST = os.name == "nt"


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, durable: bool = True, tidy: bool = True, mode: int = 0o666
) -> Iterator[int]:
    """Write a file beside another one, which it replaces once all of it is on the disk.

    The new file has a unique name, so any number of writers may replace one path at the same time. Each writes a file
    of its own, and the last one to finish stays. After any error the new file is gone, and the old one is what it was.
    Only a process that is killed leaves its file behind, under the name ``.<name>.<random>.partial``; the next writer
    of the path removes it. A writer holds a lock on its file, which ends with its process.

    Parameters
    ----------
    path : path-like
        What is replaced, or comes to be. Where it is a symbolic link, that is what it points to.
    durable : bool
        Whether the file has to be on the disk first, and its name afterwards.
    tidy : bool
        Whether to look for files that killed writers of this path have left.
    mode : int
        Permissions of a new file, but for those that the process masks.

    Yields
    ------
    int
        Descriptor to write to.

    Raises
    ------
    NotSupported
        If the path is something else than a file.
    OSError
        As the system gave it.
    """
    place = os.path.realpath(os.fsdecode(path))
    _check_kind(place)
    folder, name = os.path.split(place)
    # Names may have 255 bytes; the end says enough of a long one.
    start = f".{name[-60:]}."
    partial = os.path.join(folder, f"{start}{_boot()}{secrets.token_hex(8)}{SUFFIX}")
    if tidy:
        _remove_abandoned(folder, start)  # whose room may be needed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(partial, flags, mode)
        try:
            _locked(descriptor, wait=True)
            yield descriptor
            if durable:
                os.fsync(descriptor)
            if not _CLOSED_FIRST:
                os.replace(partial, place)  # while the lock says that its writer lives
        finally:
            os.close(descriptor)
        if _CLOSED_FIRST:
            os.replace(partial, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    if durable:
        _sync_folder(folder)


def write_all(descriptor: int, views: Sequence[memoryview]) -> int:
    """Write all bytes, however many the system takes at a time; how many there were."""
    rest = list(views)
    while rest:
        if hasattr(os, "writev"):
            done = os.writev(descriptor, rest[:_MOST_VIEWS])
        else:  # Windows
            done = os.write(descriptor, rest[0])
        rest = after(rest, done)
    return sum(map(len, views))


def after(views: list[memoryview], n: int) -> list[memoryview]:
    """What comes after the first `n` bytes."""
    for i, view in enumerate(views):
        if n < len(view):
            return [view[n:], *views[i + 1 :]]
        n -= len(view)
    return []


def _remove_abandoned(folder: str, start: str) -> None:
    """Remove files of this name whose writers are gone, as far as can be told."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    names: list[str] = []
    with contextlib.suppress(OSError):  # a folder that may be written to and not read
        names = os.listdir(folder)
    for name in names:
        if not (name.startswith(start) and name.endswith(SUFFIX)):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # another writer was faster, or it is not ours to remove
            descriptor = os.open(path, flags)
            try:
                if _locked(descriptor, wait=False):
                    found = os.fstat(descriptor)
                    # A writer takes its lock before it writes. Some file systems keep the locks of other machines
                    # from us: what those left has to be old, too.
                    sure = name.startswith(start + _boot()) and found.st_size > 0
                    if sure or time.time() - found.st_mtime > _HOUR:
                        os.unlink(path)
            finally:
                os.close(descriptor)


def _locked(descriptor: int, *, wait: bool) -> bool:
    """Lock a file until its last descriptor is closed; whether that has been done."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):  # no such locks on this system, or another one's
        return False
    return True


@functools.cache
def _boot() -> str:
    """Which machine this is, since it started: eight digits."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(8)
    except OSError:
        return "0" * 8


def _check_kind(place: str) -> None:
    try:
        mode = os.stat(place).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
    if not stat.S_ISREG(mode):
        raise NotSupported(
            f"`path`: expected a file, got a device, a pipe or a socket, {place}; write to a file first"
        )


def _sync_folder(folder: str) -> None:
    """Have the new name on the disk too; some systems cannot, or do not let a folder be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno == errno.EIO:
            raise
    finally:
        os.close(descriptor)
