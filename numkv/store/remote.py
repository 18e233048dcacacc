"""Objects in any file system of fsspec: S3 and the like, other machines' disks, memory."""

from __future__ import annotations

import contextlib
import datetime
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from numkv.errors import NotSupported
from numkv.interrupts import uninterrupted
from numkv.replace import SUFFIX
from numkv.store.folder import Entry, Jobs
from numkv.store.objects import OBJECT, DamagedObject, ForeignObject, OtherSize
from numkv.store.requests import Breaker, Requests, Unanswered

#: Requests at once.
_REQUESTS = 128
#: Seconds without an answer after which a write has failed: objects are large, and no call waits for them.
_PATIENCE = 30.0
#: Requests that fail in a row until a file system counts as one that does not answer.
_MOST_FAILURES = 4
#: File systems that create an object atomically from all its bytes. On others it is renamed.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"}
_ABANDONED = 600.0


def opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path within it.

    Raises
    ------
    NotSupported
        If fsspec, or a package that this protocol needs, is not installed.
    """
    try:
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise NotSupported(
            f"`place`: {url} needs fsspec and its package for this protocol ({error}); "
            "pip install 'numkv[store]', and s3fs, gcsfs or the like"
        ) from error
    return found


class RemoteFolder:
    """A folder of a file system.

    Parameters
    ----------
    file_system : fsspec.AbstractFileSystem
        The file system.
    root : str
        The folder.
    patience : float or None
        Seconds without any answer after which a lookup goes on without the store.

    Attributes
    ----------
    report : callable
        Called with the request and its error.
    changed : callable
        Called with the error when the file system has stopped answering, and with None when it answers again.
    """

    #: Threads that write: each waits for the network nearly all the time.
    writers = 32
    #: Retries on a network may succeed a moment later.
    attempts = 4
    few = 1
    #: Folders of copies.
    copies: Sequence[Any] = ()

    def __init__(self, file_system: Any, root: str, patience: float | None) -> None:
        self._fs, self.root, self._patience = file_system, root.rstrip("/"), patience
        names = file_system.protocol
        self._whole = bool(_WHOLE & ({names} if isinstance(names, str) else set(names)))
        self.report: Callable[[str, Exception], None] = lambda asked, error: None
        self.changed: Callable[[Exception | None], None] = lambda error: None
        self._breaker = Breaker(self._probe, lambda error: self.changed(error))
        self._requests = Requests(_REQUESTS, self._breaker.answered)
        self._in_a_row = 0  # requests that have failed

    def __repr__(self) -> str:
        return str(self._fs.unstrip_protocol(self.root))

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    @property
    def answers(self) -> bool:
        """Return whether the file system answers, as far as is known."""
        return not self._breaker.is_open

    def end(self) -> None:
        """Stop probing whether it answers again."""
        self._breaker.end()

    def _probe(self) -> bool:
        """Make a small request; return whether there is an answer, which may be that the object is missing."""
        error = self._requests.make(1, lambda i: self._fs.info(self.root), _nothing, _PATIENCE)[0]
        return error is None or isinstance(error, FileNotFoundError)

    @uninterrupted
    def _make(
        self, asked: str, count: int, ask: Callable[[int], Any], take: Callable[[int, Any], None],
        patience: float | None,
    ) -> list[Exception | None]:  # fmt: skip
        """Make requests, retry those that failed if others succeeded, and update whether the store answers."""
        if not count:
            return []
        if self._breaker.is_open:
            return [
                Unanswered(f"{self!r} does not answer; it is asked again from time to time")
            ] * count
        errors = self._requests.make(count, ask, take, patience)
        failed = [i for i, error in enumerate(errors) if _is_failure(error)]
        again = [i for i in failed if not isinstance(errors[i], Unanswered)]
        for i in failed:
            self.report(asked, cast(Exception, errors[i]))
        if again and (len(failed) < count or count == 1):
            second = self._requests.make(
                len(again),
                lambda j: ask(again[j]),
                lambda j, answer: take(again[j], answer),
                patience,
            )
            for i, error in zip(again, second, strict=True):
                errors[i] = error
                if _is_failure(error):
                    self.report(asked, cast(Exception, error))
        failures = [error for error in errors if _is_failure(error)]
        if len(failures) < count:
            self._in_a_row = 0
            self._breaker.answered()
        else:
            self._in_a_row += len(failed) + len(again)
            if self._in_a_row >= _MOST_FAILURES or isinstance(failures[0], Unanswered):
                self._breaker.failed(cast(Exception, failures[0]))
        return errors

    # -- reading

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the bytes of objects; None for a missing or unknown one."""
        found: list[int | None] = [None] * len(keys)

        def take(i: int, size: int) -> None:
            found[i] = size

        def ask(i: int) -> int:
            return int(self._fs.info(self._path(keys[i]))["size"])

        self._make("look", len(keys), ask, take, self._patience)
        return found

    def read(self, jobs: Jobs) -> list[Exception | None]:
        """Read objects, and return the error of each."""

        def ask(i: int) -> Any:
            return self._fs.cat_file(self._path(jobs.keys[i]))

        def take(i: int, answer: Any) -> None:
            found = memoryview(answer)
            if len(found) != jobs.nbytes:
                raise OtherSize(f"it has {len(found)} bytes, and not {jobs.nbytes}")
            views = jobs.views(i)
            for view in views:
                to = memoryview(view).cast("B")
                to[:], found = found[: len(to)], found[len(to) :]
            jobs.check(i, views)

        return self._make("read", len(jobs.keys), ask, take, self._patience)

    # -- writing

    def holds(self, key: str, header: bytes, nbytes: int) -> bool:
        """Assume that an object to be written is missing, because its lookup has just failed."""
        return False

    def write(self, key: str, pieces: Sequence[Any], age: float) -> None:
        """Create or replace an object atomically."""
        whole = b"".join(pieces)
        errors = self._make(
            "write", 1, lambda i: self._put(self._path(key), whole), _nothing, _PATIENCE
        )
        if errors[0] is not None:
            raise cast(Exception, errors.pop())  # under no name, as its traceback has this frame

    def _put(self, path: str, whole: bytes) -> None:
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

    def touch(self, key: str, age: float) -> None:
        """Do nothing: these file systems store only the time of writing."""

    # -- contents

    def entries(self) -> Iterator[Entry]:
        """Yield all objects; other files are not the store's."""
        listed: dict[str, Any] = {}
        error = self._make(
            "list", 1, lambda i: self._fs.find(self.root, detail=True), lambda i, found: listed.update(found), _PATIENCE
        )[0]  # fmt: skip
        if error is not None and not isinstance(error, FileNotFoundError):
            raise error
        self._fs.invalidate_cache()
        # By the store's own clock, as far as it is known.
        now = max(map(_seconds, listed.values()), default=0.0)
        for path, info in listed.items():
            if not (its := OBJECT.search(str(path))):
                continue
            key, stamp = its[0], _seconds(info)
            # Without a time, an object that is being written cannot be recognised.
            if key.endswith(SUFFIX) and stamp and now - stamp > _ABANDONED:
                self.delete_bad(key)
            else:
                yield Entry(key, int(info.get("size") or 0), stamp)

    def delete(self, entries: Sequence[Entry]) -> list[bool]:
        """Delete objects that are not being written; return which were deleted."""
        gone = [False] * len(entries)
        whole = [i for i, entry in enumerate(entries) if not entry.key.endswith(SUFFIX)]

        def ask(j: int) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(entries[whole[j]].key))

        for i, error in zip(
            whole, self._make("delete", len(whole), ask, _nothing, _PATIENCE), strict=True
        ):
            gone[i] = error is None
        return gone

    def delete_bad(self, key: str) -> bool:
        """Delete an invalid object; return whether it was deleted."""
        return self.delete([Entry(key, 0, 0.0)])[0]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Evict without a lock: several processes may do so at once, which at worst deletes too much."""
        yield


def _is_failure(error: Exception | None) -> bool:
    """Return whether a request had no answer, or none about the requested object."""
    return error is not None and not isinstance(
        error, FileNotFoundError | DamagedObject | ForeignObject
    )


def _nothing(i: int, answer: Any) -> None:
    """Ignore an answer without content."""


def _seconds(info: dict[str, Any]) -> float:
    """Return when an object was written; 0 if the file system does not report it."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        found = info.get(name)
        if isinstance(found, datetime.datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
    return 0.0
