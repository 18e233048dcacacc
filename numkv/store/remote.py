"""Objects in any file system that fsspec knows: S3 and its like, other machines' disks, memory."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from numkv.errors import NotSupported
from numkv.replace import SUFFIX
from numkv.store.folder import Entry, Jobs, in_threads
from numkv.store.objects import DamagedObject

#: Requests at once.
_REQUESTS = 16
#: File systems that make an object as a whole when they are given all of it; elsewhere it is renamed.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"}
_ABANDONED = 600.0


def opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path within it.

    Raises
    ------
    NotSupported
        If fsspec, or what it needs for this protocol, is not installed.
    """
    try:
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise NotSupported(
            f"`place`: {url} needs fsspec and what it has for this protocol ({error}); "
            "pip install 'numkv[store]', and s3fs, gcsfs or the like"
        ) from error
    return found


class RemoteFolder:
    """A folder of a file system.

    Parameters
    ----------
    file_system : fsspec.AbstractFileSystem
        Where.
    root : str
        The folder.
    """

    def __init__(self, file_system: Any, root: str) -> None:
        self._fs, self.root = file_system, root.rstrip("/")
        names = file_system.protocol
        self._whole = bool(_WHOLE & ({names} if isinstance(names, str) else set(names)))

    def __repr__(self) -> str:
        return str(self._fs.unstrip_protocol(self.root))

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    # -- reading

    def exist(self, keys: Sequence[str], nbytes: int) -> list[bool]:
        """Whether there are such objects, of so many bytes."""
        found = [False] * len(keys)

        def work(mine: Sequence[int], errors: list[Exception | None]) -> None:
            for i in mine:
                # Whatever is wrong with the network: the block is computed.
                with contextlib.suppress(Exception):
                    found[i] = int(self._fs.info(self._path(keys[i]))["size"]) == nbytes

        in_threads(len(keys), _REQUESTS, work)
        return found

    def read(self, jobs: Jobs) -> list[Exception | None]:
        """Read objects, and what went wrong with each."""

        def work(mine: Sequence[int], errors: list[Exception | None]) -> None:
            for i in mine:
                try:
                    self._read(jobs, i)
                except Exception as error:
                    errors[i] = error

        return in_threads(len(jobs.keys), _REQUESTS, work)

    def _read(self, jobs: Jobs, i: int) -> None:
        found = memoryview(self._fs.cat_file(self._path(jobs.keys[i])))
        if len(found) != jobs.nbytes:
            raise DamagedObject(f"it has {len(found)} bytes, and not {jobs.nbytes}")
        views = jobs.views(i)
        for view in views:
            to = memoryview(view).cast("B")
            to[:], found = found[: len(to)], found[len(to) :]
        jobs.check(i, views)

    # -- writing

    def write(self, key: str, pieces: Sequence[Any], stamp: float) -> None:
        """Make an object, or replace it, as a whole."""
        path, whole = self._path(key), b"".join(pieces)
        if self._whole:
            self._fs.pipe_file(path, whole)
            return
        folder, _, name = path.rpartition("/")
        partial = f"{folder}/.{name[:16]}.{secrets.token_hex(8)}{SUFFIX}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            self._fs.pipe_file(partial, whole)
            self._fs.mv(partial, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(partial)
            raise

    def touch(self, key: str, stamp: float) -> None:
        """Do nothing: these file systems keep the time of writing only."""

    # -- what there is

    def entries(self) -> Iterator[Entry]:
        """All objects."""
        try:
            found = self._fs.find(self.root, detail=True)
        except FileNotFoundError:
            return
        self._fs.invalidate_cache()
        for path, info in found.items():
            stamp = _seconds(info)
            key = str(path)[str(path).rindex(self.root) + len(self.root) + 1 :]
            # Without a time nobody can tell whether it is being written.
            if key.endswith(SUFFIX) and stamp and time.time() - stamp > _ABANDONED:
                self.delete_bad(key)
            else:
                yield Entry(key, int(info.get("size") or 0), stamp)

    def delete(self, entry: Entry) -> bool:
        """Delete an object unless it is being written; whether it is gone."""
        if entry.key.endswith(SUFFIX):
            return False
        try:
            self._fs.rm_file(self._path(entry.key))
        except FileNotFoundError:
            return True
        except Exception:
            return False
        return True

    def delete_bad(self, key: str) -> None:
        """Delete an object that is not what it should be."""
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path(key))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Evict beside others: there is no lock, so several may, which deletes too much at worst."""
        yield


def _seconds(info: dict[str, Any]) -> float:
    """When an object was written; 0 where the file system does not say."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        found = info.get(name)
        if isinstance(found, datetime.datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
    return 0.0
