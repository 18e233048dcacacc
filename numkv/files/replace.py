"""A file that appears as a whole or not at all, also after a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator

from numkv.errors import NotSupported

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[int]:
    """Write a file beside another one, which it replaces once all of it is on the disk.

    The new file has a name that nobody else has, so that any number of writers may replace one path at a time: each
    writes a file of its own, and the last one to finish stays. After any error the new file is gone, and the old one
    is what it was. Only a process that is killed leaves its file behind, under the name ``.<name>.<random>.partial``.

    Parameters
    ----------
    path : path-like
        What is replaced, or comes to be. Where it is a symbolic link, that is what it points to.

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
    partial = os.path.join(folder, f".{name[-60:]}.{secrets.token_hex(8)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(partial, flags, 0o666)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    _sync_folder(folder)


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
