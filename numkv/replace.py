"""Atomic replacement of files, safe against power cuts: for saved caches, objects of stores, and kernels."""

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
from numkv.interrupts import signals_deferred

#: Ending of the names of files that are being written.
SUFFIX = ".partial"
#: The most buffers of one system call: 1,024 on POSIX systems.
_MOST_VIEWS = 1000
_HOUR = 3600
#: Windows cannot rename an open file.
_CLOSED_FIRST = os.name == "nt"


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, durable: bool = True, tidy: bool = True, follow: bool = True, mode: int = 0o666
) -> Iterator[int]:  # fmt: skip
    """Write a temporary file, which replaces a path once all of it is on the disk.

    The temporary file has a unique name, so any number of writers may replace one path at the same time; the last one
    to finish stays. After an error the temporary file is removed, and the old file is unchanged. Only a killed process
    leaves its file, named ``.<name>.<random>.partial``; the next writer of the path removes it. A writer locks its
    file until its process ends.

    Parameters
    ----------
    path : path-like
        The file to replace or create.
    durable : bool
        Whether the file is fsynced before the rename, and its folder after it.
    tidy : bool
        Whether to remove files of killed writers of this path.
    follow : bool
        Whether a symbolic link is followed. If not, a link, a pipe or a socket is replaced as a file is.
    mode : int
        Permissions of a new file, without those that the process masks.

    Yields
    ------
    int
        Descriptor to write to.

    Raises
    ------
    NotSupported
        If the path is not a file.
    OSError
        The system's error.
    """
    place = os.fsdecode(path)
    if follow:
        place = os.path.realpath(place)
        _check_kind(place)
    folder, name = os.path.split(place)
    # Names have at most 255 bytes, and characters up to four; the end identifies a long one.
    start = f".{name[-50:]}."
    partial = os.path.join(folder, f"{start}{_boot()}{secrets.token_hex(8)}{SUFFIX}")
    if tidy:
        _remove_abandoned(folder, start)  # first, because their room may be needed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = -1
    try:
        try:
            with signals_deferred:  # until the descriptor has its name
                descriptor = os.open(partial, flags, mode)
            _locked(descriptor, wait=True)
            yield descriptor
            if durable:
                os.fsync(descriptor)
            if not _CLOSED_FIRST:
                os.replace(partial, place)  # while the lock shows that its writer lives
        finally:
            if descriptor >= 0:
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
    """Write all bytes, in as many system calls as needed; return their number."""
    rest = list(views)
    while rest:
        if hasattr(os, "writev"):
            done = os.writev(descriptor, rest[:_MOST_VIEWS])
        else:  # Windows
            done = os.write(descriptor, rest[0])
        rest = after(rest, done)
    return sum(map(len, views))


def after(views: list[memoryview], n: int) -> list[memoryview]:
    """Return the bytes after the first `n`."""
    for i, view in enumerate(views):
        if n < len(view):
            return [view[n:], *views[i + 1 :]]
        n -= len(view)
    return []


def _remove_abandoned(folder: str, start: str) -> None:
    """Remove temporary files of this name whose writers have ended, as far as is known."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    names: list[str] = []
    with contextlib.suppress(OSError):  # a folder that is writable but not readable
        names = os.listdir(folder)
    for name in names:
        if not (name.startswith(start) and name.endswith(SUFFIX)):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # another writer was faster, or permission is missing
            descriptor = os.open(path, flags)
            try:
                if _locked(descriptor, wait=False):
                    found = os.fstat(descriptor)
                    # A writer locks its file before it writes. Some file systems hide the locks of other machines,
                    # so files of those must also be old.
                    sure = name.startswith(start + _boot()) and found.st_size > 0
                    if sure or time.time() - found.st_mtime > _HOUR:
                        os.unlink(path)
            finally:
                os.close(descriptor)


def _locked(descriptor: int, *, wait: bool) -> bool:
    """Lock a file until its last descriptor is closed; return whether it is locked."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):  # no such locks on this system, or locked by another process
        return False
    return True


@functools.cache
def _boot() -> str:
    """Return eight digits that identify this machine since its last start."""
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
    """Fsync a folder, so that a new name is on the disk; some systems cannot, or do not open folders."""
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
