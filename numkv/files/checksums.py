"""CRC-32 of what is written or read, computed on another thread while the disk works.

A checksum finds damage: bits that flipped, parts of two files in one, a transfer that broke off. It does not find
malice. CRC-32 runs at several GB a second on one core, and zlib lets other threads run meanwhile.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Sequence
from typing import Self

# Chunks that may wait for their checksum; more would hold memory for nothing.
_WAITING = 4

_Job = tuple[str, Sequence[memoryview]]


class Checksums:
    """Checksums by name, of memory that is handed over piece by piece; a context manager.

    Attributes
    ----------
    found : dict of str to int
        The checksum of each name, complete once the context has been left.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_WAITING)
        self._worker: threading.Thread | None = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        try:
            assert self._worker is not None
            self._worker.start()
        except RuntimeError:  # no more threads, or the interpreter is about to end
            self._worker = None
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._jobs.put(None)
            self._worker.join()
            self._worker = None

    def add(self, name: str, views: Sequence[memoryview]) -> None:
        """Go on with the checksum of a name; the memory must not change before the context is left."""
        if self._worker is None:
            self._update(name, views)
        else:
            self._jobs.put((name, views))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._update(*job)

    def _update(self, name: str, views: Sequence[memoryview]) -> None:
        found = self.found.get(name, 0)
        for view in views:
            found = zlib.crc32(view, found)
        self.found[name] = found
