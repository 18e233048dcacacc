"""The implementation of `PrefixStore`: the host tier, the queue of blocks to write, and the threads that write.

One lock protects all state here. It is released during disk operations. A thread that holds the lock of a `BlockPool`
may take this one. A thread that holds this one takes no other.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import logging
import random
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from numkv.errors import NumkvError
from numkv.interrupts import opened, uninterrupted
from numkv.store.folder import Bound
from numkv.store.objects import (
    DamagedObject,
    ForeignObject,
    Objects,
    Readings,
    Section,
    crc32_of,
)
from numkv.store.records import BlocksDropped, BlocksWritten, StoreAnswers, StoreSilent, StoreStats
from numkv.store.requests import begins

log = logging.getLogger("numkv.store")

#: Places where a block was found.
NOWHERE, IN_POOL, IN_HOST, IN_STORE = range(4)

#: Seconds that a thread waits for work before it ends; the next block starts another one.
_IDLE = 2.0
#: Seconds that the end of the process waits for pending writes.
_AT_EXIT = 60.0
#: Each block counts as used this many seconds before its predecessor, so the end of a prefix is evicted first.
_EARLIER = 0.01
#: Approximate seconds before a block is written again. The delay doubles each time.
_BACKOFF = 0.05
#: Names in one request for the end of a prefix.
_ASKED = 32

Bytes = NDArray[np.uint8]


class Owner(Protocol):
    """A cache whose pool has blocks to write."""

    def copy_block(self, block: int, out: Bytes) -> None:
        """Copy the content of a block."""

    def holds(self, block: int, name: bytes) -> bool:
        """Return whether a block is registered under a name."""


class FullBlock(NamedTuple):
    """A full block of a prompt."""

    block: int
    """Its number in the pool."""
    name: bytes
    tokens: bytes
    depth: int
    """Blocks before it in the prompt."""


class DepthReadings(Readings, Protocol):
    """Blocks of prompts to read into memory."""

    depths: Sequence[int]
    """Blocks before each in its prompt."""


class _Waiting:
    """A block to write, in the pool of `owner` or in `data`."""

    __slots__ = ("copying", "data", "number", "of", "owner", "section")

    def __init__(self, section: Section, of: FullBlock, owner: Owner | None, number: int) -> None:
        self.section, self.of, self.owner, self.number = section, of, owner, number
        self.data: Bytes | None = None
        self.copying = False

    @property
    def key(self) -> tuple[str, bytes]:
        return self.section.folder, self.of.name


class Engine:
    """The implementation of a `PrefixStore`.

    Parameters
    ----------
    place : Folder or RemoteFolder
        The place of objects.
    max_nbytes : int or None
        The most bytes of all objects; None for no bound.
    host_nbytes : int
        Bytes of the host tier.
    on_event : callable or None
        Called with events.
    """

    def __init__(self, place: Any, max_nbytes: int | None, host_nbytes: int, on_event: Any) -> None:
        self.place = place
        place.report, place.changed = self._note_error, self._note_change
        self._bound = Bound(place, max_nbytes)
        self._host_most, self._writers, self._on_event = host_nbytes, place.writers, on_event
        self._counts: collections.Counter[str] = collections.Counter()
        self._errors: collections.Counter[str] = collections.Counter()
        self._last_error = ""
        self._given_up = self._said = (
            0  # blocks dropped or failed; how many of them `flush` has reported
        )
        self.closed = False
        begins(self._begin)
        _all.add(self)

    def _begin(self) -> None:
        """Begin with an empty queue, without threads and with an empty host tier."""
        self._changed, self._bound_lock = threading.Condition(threading.RLock()), threading.Lock()
        self._queue: collections.OrderedDict[Any, _Waiting] = collections.OrderedDict()
        self._writing: dict[Any, _Waiting] = {}
        self._in_pool: dict[tuple[int, int], _Waiting] = {}  # by owner and block
        self._clean: collections.OrderedDict[Any, Bytes] = collections.OrderedDict()
        self._dirty: dict[Any, Bytes] = {}
        self._used: list[tuple[str, float]] = []  # keys, and how long ago they count as used
        # Objects that a thread of the store will delete or is deleting, which may take as long as a network request.
        self._bad: set[str] = set()
        self._deleting: set[str] = set()
        self._events: list[Any] = []
        self._host_bytes = self._number = self._threads = self._noting = 0
        self._made = self._sent = 0  # events

    # -- blocks to write

    def add(
        self, section: Section, blocks: Iterable[tuple[FullBlock, Bytes | None]], owner: Owner | None = None
    ) -> None:  # fmt: skip
        """Queue copies of blocks for writing, or with an owner blocks of its pool, whose memory the host can read."""
        with self._changed:
            if self.closed:
                return
            for of, data in blocks:
                key = section.folder, of.name
                if key in self._queue or key in self._writing:
                    continue
                self._number += 1
                waiting = self._queue[key] = _Waiting(section, of, owner, self._number)
                if owner is None:
                    self._fill(waiting, data)
                else:
                    self._in_pool[id(owner), of.block] = waiting
            self._start()

    def _fill(self, waiting: _Waiting, data: Bytes | None) -> None:
        """Move a waiting block to the host tier, or drop it."""
        waiting.owner = None
        if data is not None and self._room_for(data.nbytes):
            waiting.data = self._dirty[waiting.key] = data
            self._host_bytes += data.nbytes
        elif self._queue.pop(waiting.key, None) is not None:
            self._give_up("dropped", "full", waiting.of.name, "the host tier is full")

    def _give_up(self, count: str, reason: str, name: bytes, error: str) -> None:
        self._counts[count] += 1
        self._given_up += 1
        self._tell(BlocksDropped(_hashes(name), reason, error))

    def _tell(self, event: Any) -> None:
        """Queue an event for a thread of the store to report."""
        if self._on_event is not None:
            self._events.append(event)
            self._made += 1

    # -- blocks that a pool evicts

    def rescue(
        self, section: Section | None, owner: Owner, blocks: Iterable[tuple[int, bytes]]
    ) -> None:
        """Copy blocks that a pool is about to evict to the host tier.

        Parameters
        ----------
        section : Section or None
            Section of the blocks. With None, only blocks that are still to be written are copied.
        owner : Owner
            Owner of the pool.
        blocks : iterable of (int, bytes)
            Number and name of each block.
        """
        with self._changed:
            for block, name in blocks:
                waiting = self._in_pool.pop((id(owner), block), None)
                while waiting is not None and waiting.copying:
                    self._changed.wait(1.0)
                if waiting is not None and waiting.owner is not None and waiting.data is None:
                    self._fill(waiting, self._copied(owner, block, waiting.section.layout.content))
                elif section is not None and not self.closed:
                    self._keep(section, owner, block, name)
            if self._events:
                self._start()

    def _keep(self, section: Section, owner: Owner, block: int, name: bytes) -> None:
        """Keep a block in the host tier that is written already, or need not be."""
        key, size = (section.folder, name), section.layout.content
        if key in self._clean:
            self._clean.move_to_end(key)
        elif key not in self._dirty and self._room_for(size):
            data = self._copied(owner, block, size)
            if data is not None:
                self._clean[key] = data
                self._host_bytes += size

    def _copied(self, owner: Owner, block: int, size: int) -> Bytes | None:
        try:
            data = np.empty(size, np.uint8)
            owner.copy_block(block, data)
        except MemoryError:
            return None
        return data

    def _room_for(self, size: int) -> bool:
        """Make room in the host tier; return False if blocks waiting to be written leave too little."""
        if size > self._host_most:
            return False
        while self._host_bytes + size > self._host_most and self._clean:
            _, data = self._clean.popitem(last=False)
            self._host_bytes -= data.nbytes
        return self._host_bytes + size <= self._host_most

    @uninterrupted
    def lend(self, nbytes: int) -> bool:
        """Lend memory of the host tier if it is free; a negative number returns memory."""
        with self._changed:
            if nbytes > 0 and not self._room_for(nbytes):
                return False
            self._host_bytes += nbytes
            return True

    # -- lookups

    #: The place where blocks of `from_host` count as found.
    tier = IN_HOST

    def where(self, section: Section, names: Sequence[bytes]) -> list[int]:
        """Return where each block is: `IN_HOST`, `IN_STORE` or `NOWHERE`."""
        with self._changed:
            if self.closed:
                return [NOWHERE] * len(names)
            found = [
                IN_HOST if self._host(section, name, False) is not None else NOWHERE
                for name in names
            ]
        others = [i for i, tier in enumerate(found) if tier == NOWHERE]
        keys = [section.key(names[i]) for i in others]
        for i, size in zip(others, self.place.sizes(keys), strict=True):
            found[i] = IN_STORE if size == section.layout.nbytes else NOWHERE
        return found

    def leading(self, section: Section, names: Sequence[bytes]) -> list[int]:
        """Return where each block of a chain is, up to the first missing one; the others count as missing, too.

        A block rarely exists without its predecessors. Therefore only a few are checked, at growing distances, then
        some between the last existing and the first missing one. Reading detects any that are missing in between.
        """
        with self._changed:
            if self.closed:
                return [NOWHERE] * len(names)
            found = [IN_STORE if self._host(section, x, False) is None else IN_HOST for x in names]
        others = [i for i, tier in enumerate(found) if tier == IN_STORE]
        low, high = 0, len(others)
        asked = sorted({*(2**k - 1 for k in range(high.bit_length())), high - 1} - {-1})
        while low < high:
            keys = [section.key(names[others[i]]) for i in asked]
            for i, size in zip(asked, self.place.sizes(keys), strict=True):
                if size != section.layout.nbytes:
                    high = i
                    break
                low = i + 1
            asked = np.unique(
                np.linspace(low, high - 1, min(_ASKED, high - low)).astype(int)
            ).tolist()
        end = others[low] if low < len(others) else len(names)
        return found[:end] + [NOWHERE] * (len(names) - end)

    def _host(self, section: Section, name: bytes, used: bool) -> Bytes | None:
        key = section.folder, name
        found = self._clean.get(key)
        if found is None:
            return self._dirty.get(key)
        if used:
            self._clean.move_to_end(key)
        return found

    def from_host(self, section: Section, name: bytes) -> Bytes | None:
        """Return the content of a block in the host tier, which never changes."""
        with self._changed:
            return self._host(section, name, True)

    def read(self, section: Section, blocks: DepthReadings) -> list[bool]:
        """Read blocks from the store, and return for each whether it exists and is valid."""
        jobs = Objects(section, blocks)
        errors = self.place.read(jobs)
        with self._changed:
            for key, depth, error in zip(jobs.keys, blocks.depths, errors, strict=True):
                if error is None:
                    self._used.append((key, _EARLIER * depth))
                    self._counts["bytes_read"] += jobs.nbytes
            self._start()
        for key, name, error in zip(jobs.keys, blocks.names, errors, strict=True):
            if isinstance(error, DamagedObject | ForeignObject):
                self._refuse(key, name, error)
        return [error is None for error in errors]

    def _refuse(self, key: str, name: bytes, error: Exception) -> None:
        reason = "damaged" if isinstance(error, DamagedObject) else "refused"
        log.warning("%s/%s is %s, and to be deleted: %s", self.place, key, reason, error)
        with self._changed:
            self._bad.add(key)
            self._counts[reason] += 1
            self._tell(BlocksDropped(_hashes(name), reason, str(error)))
            self._start()

    def _note_error(self, asked: str, error: Exception) -> None:
        """Count an error of a request to the place."""
        with self._changed:
            self._errors[f"{asked}: {type(error).__name__}"] += 1
            self._last_error = f"{type(error).__name__}: {error}"

    def _note_change(self, error: Exception | None) -> None:
        """Report that the place has stopped to answer, or answers again."""
        if self.closed:
            return
        if error is None:
            log.warning("%s answers again", self.place)
        else:
            log.warning(
                "%s does not answer (%s: %s); caches go on without it, and it is asked again from time to time",
                self.place, type(error).__name__, error,
            )  # fmt: skip
        with self._changed:
            reason = "" if error is None else f"{type(error).__name__}: {error}"
            self._tell(StoreAnswers() if error is None else StoreSilent(reason))
            self._start()
            self._changed.notify_all()

    def count(self, wanted: int, found: Sequence[int]) -> None:
        """Count a lookup: how many blocks there were `NOWHERE`, `IN_POOL` and so on."""
        with self._changed:
            self._counts["lookups"] += 1
            self._counts["wanted"] += wanted
            names = ("missed", "found_in_pool", "found_in_host", "found_in_store")
            for name, n in zip(names, found, strict=True):
                self._counts[name] += n

    def tell_now(self, event: Any) -> None:
        """Report an event in this thread."""
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                log.exception("on_event raised an exception, which is ignored")

    @uninterrupted
    def stats(self) -> StoreStats:
        """Return the current counts."""
        with self._changed:
            return StoreStats(
                **self._counts,
                waiting=len(self._queue) + len(self._writing),
                host_blocks=len(self._clean) + len(self._dirty),
                host_nbytes=self._host_bytes,
                errors=dict(self._errors),
                answers=self.place.answers,
                last_error=self._last_error,
            )

    # -- threads

    def _has_work(self) -> bool:
        """Return whether there is work; writes wait for a place that answers."""
        return bool((self._queue and self.place.answers) or self._used or self._bad or self._events)

    def _start(self) -> None:
        """Start threads if needed, and wake them."""
        if self._has_work():
            while self._threads < min(self._writers, max(1, len(self._queue))):
                thread = threading.Thread(target=self._run, name="numkv store", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is about to end; `close` does it
                    break
                self._threads += 1
            self._changed.notify_all()

    def _run(self) -> None:
        """Process work until there has been none for a while."""
        buffers: dict[int, Bytes] = {}
        _own.inside = True
        while True:
            with self._changed:
                if not self._has_work():
                    self._changed.wait(_IDLE)
                    if not self._has_work():
                        self._threads -= 1
                        return
            try:
                self._do_some(buffers)
            except Exception:  # an exception of the file system
                log.exception("a thread of the store failed and continues")

    def _do_some(self, buffers: dict[int, Bytes]) -> None:
        """Write a block, then report events and record uses."""
        with self._changed:
            ready = self._queue and self.place.answers
            waiting = self._queue.popitem(last=False)[1] if ready else None
            if waiting is not None:
                self._writing[waiting.key] = waiting
                waiting.copying = waiting.owner is not None
            used, self._used = self._used, []
            self._noting += 1
        try:
            if waiting is not None:
                self._write(waiting, buffers)
            self._delete_bad()
            for key, age in used:
                self.place.touch(key, age)
        finally:
            with self._changed:
                self._noting -= 1
                events, self._events = self._events, []
                self._changed.notify_all()
        for event in events:
            self.tell_now(event)
        if events:
            with self._changed:
                self._sent += len(events)
                self._changed.notify_all()

    def _write(self, waiting: _Waiting, buffers: dict[int, Bytes]) -> None:
        error, outcome, data = "", "failed", None
        layout = waiting.section.layout
        try:
            data = self._content(waiting, buffers)
            if data is None:
                error = "its memory was changed by compiled code of the user's own"
            else:
                outcome = self._put_in_time(waiting.section, waiting.of, data)
        except Exception as problem:  # a full disk, no memory, any error of a file system
            error = f"{type(problem).__name__}: {problem}"
            if self.place.answers:
                log.warning("a block could not be written to %s: %s", self.place, error)
        with self._changed:
            del self._writing[waiting.key]
            if outcome == "failed" and data is not None and not self.place.answers:
                self._put_back(waiting, data)
                self._changed.notify_all()
                return
            content = self._dirty.pop(waiting.key, None)
            if content is not None:
                self._clean[waiting.key] = content
            if outcome == "failed":
                self._last_error = error
                self._give_up("failed", "failed", waiting.of.name, error)
            else:
                self._counts[outcome] += 1
                self._counts["bytes_written"] += layout.nbytes * (outcome == "written")
                self._tell(BlocksWritten(_hashes(waiting.of.name)))
            self._changed.notify_all()

    def _delete_bad(self) -> None:
        """Delete invalid objects, unless they are being replaced."""
        while True:
            with self._changed:
                if not self._bad:
                    return
                key = self._bad.pop()
                self._deleting.add(key)
            try:
                self.place.delete_bad(key)
            finally:
                with self._changed:
                    self._deleting.discard(key)
                    self._changed.notify_all()

    def _put_back(self, waiting: _Waiting, data: Bytes) -> None:
        """Queue a block again because the place did not answer, in the host tier if there is room."""
        self._queue[waiting.key] = waiting
        self._queue.move_to_end(waiting.key, last=False)
        if waiting.data is None:
            try:
                copy = data.copy()
            except MemoryError:
                copy = None
            self._fill(waiting, copy)

    def _put_in_time(self, section: Section, of: FullBlock, data: Bytes) -> str:
        """Write an object, and retry after a failure, unless the place does not answer."""
        for attempt in itertools.count(1):
            try:
                return self._put(section, of, data)
            except Exception:
                if attempt >= self.place.attempts or not self.place.answers:
                    raise
            time.sleep(_BACKOFF * 2**attempt * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _content(self, waiting: _Waiting, buffers: dict[int, Bytes]) -> Bytes | None:
        """Return the content of a block, copied from its pool if it is there; None if it was replaced."""
        owner, of = waiting.owner, waiting.of
        if owner is None:
            return waiting.data
        size = waiting.section.layout.content
        try:
            data = buffers.get(size)
            if data is None:
                data = buffers[size] = np.empty(size, np.uint8)
            owner.copy_block(of.block, data)
            sound = owner.holds(of.block, of.name)
        finally:
            with self._changed:
                waiting.copying, waiting.owner = False, None
                if self._in_pool.get((id(owner), of.block)) is waiting:
                    del self._in_pool[id(owner), of.block]
                self._changed.notify_all()
        return data if sound else None

    def _put(self, section: Section, of: FullBlock, data: Bytes) -> str:
        """Write an object that does not exist yet."""
        key, age, nbytes = section.key(of.name), _EARLIER * of.depth, section.layout.nbytes
        header = section.layout.make_header(of.name, of.tokens, crc32_of([data]))
        with self._changed:
            while key in self._deleting:
                self._changed.wait(1.0)
            is_bad = key in self._bad  # even if its header is valid
            self._bad.discard(key)  # because it is replaced
        if not is_bad and self.place.holds(key, header, nbytes):
            self.place.touch(key, age)
            return "already_there"
        with self._bound_lock:
            evicted = self._bound.make_room(nbytes)
        self.place.write(key, [header, data], age)
        if evicted:
            with self._changed:
                self._counts["evicted"] += evicted
        return "written"

    # -- the end

    @uninterrupted
    def flush(self, timeout: float | None) -> int:
        """Wait for the current queue, and return how many blocks were given up since the last call."""
        if getattr(_own, "inside", False):
            raise NumkvError(
                "flush: expected a thread of the caller's, got one that the store writes with; flush and close "
                "outside of `on_event`"
            )
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            last, made = self._number, self._made
            self._start()
            while (waiting := self._first_waiting() <= last) or self._sent < made or self._tidies():
                if not (self._writing or self._deleting or self._noting or self.place.answers):
                    break  # the duration is unknown
                # Also wait for the events of these blocks.
                made = self._made if waiting else made
                with opened():  # signals are handled here alone: no lock may stay taken
                    rest = 0.1 if until is None else min(0.1, until - time.monotonic())
                if rest <= 0:
                    raise TimeoutError(
                        f"`timeout`: {len(self._queue) + len(self._writing)} blocks are not written after {timeout} s"
                    )
                if not self._threads:
                    self._do_here()
                else:
                    self._changed.wait(rest)
            lost, self._said = self._given_up - self._said, self._given_up
            return lost + sum(waiting.number <= last for waiting in self._queue.values())

    def _tidies(self) -> bool:
        """Return whether invalid objects must be deleted, or uses recorded."""
        return bool(self._bad or self._deleting or self._used or self._noting)

    def _do_here(self) -> None:
        """Do some of the work in this thread, because no other can be started."""
        self._changed.release()
        try:
            self._do_some({})
        finally:
            self._changed.acquire()

    def _first_waiting(self) -> float:
        numbers = [waiting.number for waiting in self._writing.values()]
        if self._queue:
            numbers.append(next(iter(self._queue.values())).number)
        return min(numbers, default=float("inf"))

    @uninterrupted
    def close(self, timeout: float | None) -> int:
        """Write all waiting blocks, then accept and return none."""
        # `flush` releases it while it waits, and nothing is added after its last check.
        with self._changed:
            lost = 0 if self.closed else self.flush(timeout)
            self.closed = True
            for waiting in list(self._queue.values()):
                self._dirty.pop(waiting.key, None)
                self._give_up(
                    "failed", "failed", waiting.of.name, "the store does not answer as it is closed"
                )
            self._queue.clear()
            self._in_pool.clear()
            self.place.end()
            self._host_bytes -= sum(data.nbytes for data in self._clean.values())
            self._clean.clear()
        return lost


def _hashes(name: bytes) -> NDArray[np.uint8]:
    """Return the name of one block as events have it."""
    return np.frombuffer(name, np.uint8)[None]


_all: weakref.WeakSet[Engine] = weakref.WeakSet()
_own = threading.local()  # `inside` is set in threads that write


def _at_exit() -> None:
    for engine in list(_all):
        try:
            engine.close(_AT_EXIT)
        except TimeoutError as error:
            log.warning("the process ends: %s", error)


atexit.register(_at_exit)
