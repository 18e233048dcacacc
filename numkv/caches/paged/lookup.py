"""`PrefixLookup`: blocks of a prompt on their way from a store into host memory, while the cache does other things."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.interrupts import uninterrupted
from numkv.store.engine import IN_HOST, IN_STORE, NOWHERE, Engine
from numkv.store.objects import Section
from numkv.store.requests import begins

Bytes = NDArray[np.uint8]


class Contents:
    """Blocks that a lookup has read into host memory, in the role of a store; it uses no network.

    Parameters
    ----------
    engine : Engine
        The store's, whose host tier lends the memory and is searched, too.
    """

    #: Where blocks count as found that come from here.
    tier = IN_STORE
    #: Tokens of the prefix, once its search has ended.
    num_tokens = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of: dict[tuple[str, bytes], Bytes] = {}
        self._lent = [0]
        begins(self._begin)
        self.give_back = weakref.finalize(self, _give_back, engine, self._lent)

    def _begin(self) -> None:
        """Owe a forked child's host tier nothing, which begins empty."""
        self._lent[0] = 0

    def take_room(self, nbytes: int) -> bool:
        """Have room in the host tier, if it has so much."""
        if not self.give_back.alive or not self._engine.lend(nbytes):
            return False
        self._lent[0] += nbytes
        return True

    def put(self, section: Section, name: bytes, data: Bytes) -> None:
        """Keep the content of a block."""
        self._of[section.folder, name] = data

    def where(self, section: Section, names: Sequence[bytes]) -> list[int]:
        """Return where each block is: `IN_HOST`, which is here, or `NOWHERE`."""
        return [NOWHERE if self.from_host(section, name) is None else IN_HOST for name in names]

    def leading(self, section: Section, names: Sequence[bytes]) -> list[int]:
        """The same up to the first that is nowhere."""
        found = self.where(section, names)
        end = found.index(NOWHERE) if NOWHERE in found else len(found)
        return found[:end] + [NOWHERE] * (len(names) - end)

    def from_host(self, section: Section, name: bytes) -> Bytes | None:
        """The content of a block."""
        found = self._of.get((section.folder, name))
        return self._engine.from_host(section, name) if found is None else found

    def read(self, section: Section, blocks: Any) -> list[bool]:
        """Nothing more is read."""
        return [False] * len(blocks.names)


def _give_back(engine: Engine, lent: list[int]) -> None:
    engine.lend(-lent[0])


class PrefixLookup:
    """A search for a prefix in a cache's store; made by `PagedKVCache.lookup`.

    Attributes
    ----------
    future : concurrent.futures.Future of int
        Done when all blocks that fit have been read; its result is the prefix's number of tokens.
        ``asyncio.wrap_future`` makes it awaitable.
    """

    @uninterrupted
    def __init__(self, contents: Contents, bring: Any) -> None:
        self._contents = contents
        begins(self._begin)
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()
        args = bring, contents, self.future
        threading.Thread(target=_run, args=args, name="numkv lookup", daemon=True).start()

    def _begin(self) -> None:
        """In a forked child, which lacks the thread, end with what was read; the old future's lock may be taken."""
        self.future = Future()
        self.future.set_result(self._contents.num_tokens)

    def __repr__(self) -> str:
        if not self.future.done():
            return "<PrefixLookup: under way>"
        if error := self.future.exception():
            return f"<PrefixLookup: failed with {type(error).__name__}>"
        return f"<PrefixLookup: {self.future.result()} tokens>"

    @property
    def ready(self) -> bool:
        """Whether all has been brought."""
        return self.future.done()

    def close(self) -> None:
        """Give its memory back to the host tier; the end of the object does the same."""
        self._contents.give_back()


def contents_of(lookup: Any) -> Contents | None:
    """Return a lookup's blocks, for `PagedKVCache.add`."""
    if lookup is None:
        return None
    if not isinstance(lookup, PrefixLookup):
        raise TypeError(
            f"`lookup`: expected what PagedKVCache.lookup returned or None, got {type(lookup).__name__}"
        )
    return lookup._contents


def _run(bring: Any, contents: Contents, future: Future[int]) -> None:
    """Read a prefix; errors make the prefix shorter, and have been counted."""
    try:
        contents.num_tokens = bring(contents)
        future.set_result(contents.num_tokens)
    except BaseException as error:
        future.set_exception(error)
