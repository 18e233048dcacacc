"""A pool of blocks: which are free, who uses the others, and which hold a prefix that can be used again.

Only ids are kept here, in arrays; K and V lie elsewhere. Python methods call compiled functions on the arrays
(`numkv.blocks.compiled`), and a user's own ``@njit`` code gets the same functions as methods of `BlockPool.jit`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.blocks import compiled
from numkv.blocks.prefix import DIGEST_SIZE, token_ids
from numkv.checks import check_size
from numkv.errors import CacheFull, DimensionMismatch, NumkvError, UnsupportedDType

__all__ = ["BlockPool", "BlocksRemoved", "BlocksStored", "MissReason", "PoolStats"]

log = logging.getLogger("numkv.blocks.pool")

Ids = NDArray[np.int32]


class MissReason(enum.StrEnum):
    """Why a lookup stopped before its last block."""

    ABSENT = "absent"
    """No block of this name was ever registered, or it was dropped too long ago to tell; other extra keys, another
    block size or a single other token before it give another name."""
    EVICTED = "evicted"
    """It was there, and its block was needed for something else: the pool is too small, or it should be pinned."""
    TOKENS_DIFFER = "tokens differ"
    """A block of this name is there, with other tokens: the name was not made from these tokens."""


_MISS_REASONS = {
    compiled.NO_MISS: None,
    compiled.ABSENT: MissReason.ABSENT,
    compiled.EVICTED: MissReason.EVICTED,
    compiled.TOKENS_DIFFER: MissReason.TOKENS_DIFFER,
}


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool is like now, and what has happened in it. Everything counts blocks but `lookups`."""

    num_blocks: int
    """Blocks in all."""
    free: int
    """Blocks that `BlockPool.allocate` can hand out, evictable ones included."""
    used: int
    """Blocks that somebody holds a reference to."""
    cached: int
    """Blocks that hold cached content, in use or not."""
    evictable: int
    """Blocks that hold cached content and that nobody uses or pins: part of `free` and of `cached`."""
    pinned: int
    """Blocks that are pinned."""
    peak_used: int
    """The most blocks that were ever in use at once."""
    allocations: int
    """Blocks handed out."""
    evictions: int
    """Blocks handed out that lost cached content by it."""
    stores: int
    """Blocks made findable."""
    lookups: int
    """Calls of `BlockPool.lookup`."""
    hits: int
    """Blocks that lookups found."""
    misses: int
    """Blocks that lookups did not find."""

    @property
    def hit_rate(self) -> float:
        """Share of the blocks looked up that were found; 0 before the first lookup."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became findable."""

    block_hashes: NDArray[np.uint8]
    """Digests ``(n, 32)``."""
    block_ids: Ids
    """Blocks ``(n,)``."""
    token_ids: NDArray[np.int32]
    """Tokens ``(n, block_size)``."""
    block_size: int
    """Tokens in a block."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are findable no more."""

    block_hashes: NDArray[np.uint8]
    """Digests ``(n, 32)``."""
    block_ids: Ids
    """Blocks ``(n,)``."""


_FINDINGS = {
    compiled.BAD_LINK: "the free lists are broken at",
    compiled.BAD_NUMBER: "a reference count, pin count or mark is impossible at",
    compiled.EMPTY_PIN: "there is a pin without cached content on",
    compiled.BAD_STATE: "the wrong list, or none, holds",
    compiled.BAD_TABLE: "the table of names lists a block that holds nothing, or a wrong number of them:",
    compiled.UNFINDABLE: "the table of names does not lead to",
    compiled.BAD_COUNTER: "a counter disagrees with the blocks:",
}
_COUNTER_NAMES = {
    compiled.FREE: "free",
    compiled.EVICTABLE: "evictable",
    compiled.USED: "used",
    compiled.HOLDING: "cached",
    compiled.PINNED: "pinned",
}


class BlockPool:
    """Reference counts, free lists and the prefix cache of a number of blocks.

    A block is *in use* while it has references. Without any it is *free*; if it holds registered content it is still
    findable, and *evictable* unless it is pinned. All operations take time proportional to the blocks they name,
    whatever the pool's size. Every method looks at all its arguments before it changes anything. A pool serves one
    thread at a time.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool.
    block_size : int
        Tokens in a block.
    on_event : callable, optional
        Is called with a `BlocksStored` or `BlocksRemoved` after each change to what is findable. Its exceptions are
        logged and go no further: the change has happened.

    Examples
    --------
    >>> from numkv.block_pool import BlockPool
    >>> from numkv.blocks import block_digests
    >>> pool = BlockPool(num_blocks=4, block_size=2)
    >>> prompt = [7, 8, 9, 10, 11]
    >>> names = block_digests(prompt, 2)
    >>> ids = pool.allocate(3)
    >>> pool.register(ids[:2], names, prompt).tolist()
    [0, 1]
    >>> pool.release(ids)
    >>> pool.lookup(names, prompt).tolist()
    [0, 1]
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        on_event: Callable[[BlocksStored | BlocksRemoved], object] | None = None,
    ) -> None:
        self._num_blocks = check_size("num_blocks", num_blocks)
        self._block_size = check_size("block_size", block_size, 1)
        self.on_event = on_event
        arrays = compiled.new_arrays(self._num_blocks, self._block_size)
        self._state, self._digests, self._tokens, self._table, self._evicted, self._counters = (
            arrays
        )
        self._struct: Any = None

    # -- what it is

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, evictable ones included."""
        counters = self._counters
        return int(counters[compiled.FREE]) + int(counters[compiled.EVICTABLE])

    @property
    def jit(self) -> Any:
        """The jitclass instance over the pool's own arrays, for a user's own ``@njit`` functions.

        Its methods are those of the pool, on arrays of exact types and without messages: see
        `numkv.blocks.compiled.pool_struct`. They report no events.
        """
        if self._struct is None:
            self._struct = compiled.pool_struct()(
                self._state,
                self._digests,
                self._tokens,
                self._table,
                self._evicted,
                self._counters,
            )
        return self._struct

    def __len__(self) -> int:
        return self._num_blocks

    def __repr__(self) -> str:
        now = self.stats()
        return (
            f"<BlockPool: {self._num_blocks} blocks of {self._block_size} tokens, "
            f"{now.used} in use, {now.free} free, {now.cached} cached>"
        )

    # -- references

    def allocate(self, n: int) -> Ids:
        """Take blocks, each with one reference.

        Free blocks that hold nothing go first, the last one freed first; then those that hold cached content, the
        least recently used first, which is lost.

        Parameters
        ----------
        n : int
            How many; all or none.

        Returns
        -------
        int32 array (n,)
            Their ids.

        Raises
        ------
        CacheFull
            Fewer than `n` are to be had; nothing has changed.
        """
        n = check_size("n", n)
        if n > self.num_free:
            counters = self._counters
            kept = self._num_blocks - self.num_free - int(counters[compiled.USED])
            raise CacheFull(
                f"`n`: expected at most {self.num_free} blocks, got {n}; of {self._num_blocks}, "
                f"{counters[compiled.USED]} are in use and {kept} more are pinned: release or unpin some"
            )
        empty = int(self._counters[compiled.FREE])
        ids = np.empty(n, np.int32)
        compiled.compiled("allocate")(
            self._state, self._digests, self._table, self._evicted, self._counters, ids
        )
        if n > empty and self.on_event is not None:
            self._removed(ids[empty:])
        return ids

    def release(self, ids: Any) -> None:
        """Give back one reference to each block; without any left a block is free.

        Its cached content stays findable until the block is handed out again. Blocks are given in the order of the
        sequence: the last ones are evicted first.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks; an id that is listed twice loses two references.

        Raises
        ------
        IndexError
            An id is out of range.
        NumkvError
            A block is free already, or is listed more often than it has references.
        """
        ids = self._ids(ids)
        wrong = compiled.compiled("release")(self._state, self._counters, ids)
        if wrong >= 0:
            block = self._in_range(ids, wrong)
            raise NumkvError(
                f"`ids`: block {block} is released more often than it was taken: it has "
                f"{self._state[compiled.REF, block]} references"
            )

    def acquire(self, ids: Any) -> None:
        """Take one more reference to each block; cached ones that are free come into use again.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks in use, or found by `lookup`.

        Raises
        ------
        IndexError
            An id is out of range.
        NumkvError
            A block is free and holds nothing.
        """
        ids = self._ids(ids)
        wrong = compiled.compiled("acquire")(self._state, self._counters, ids)
        if wrong >= 0:
            block = self._in_range(ids, wrong)
            raise NumkvError(f"`ids`: block {block} is free and holds nothing; allocate blocks")

    def ref_count(self, ids: Any) -> Ids:
        """References to each block.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks.

        Returns
        -------
        int32 array (n,)
        """
        return self._column(compiled.REF, ids)

    def pin_count(self, ids: Any) -> Ids:
        """Pins of each block.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks.

        Returns
        -------
        int32 array (n,)
        """
        return self._column(compiled.PINS, ids)

    # -- the prefix cache

    def register(self, ids: Any, digests: Any, tokens: Any) -> Ids:
        """Make full blocks findable.

        Content that another block holds already stays with that block, and this one is as before: it is freed for
        good when it is released. The same goes for a block whose name is taken by other tokens.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks in use, each once.
        digests : uint8 array (n, 32)
            Their names, from `numkv.blocks.prefix.block_digests`.
        tokens : array-like of int (n, block_size) or flat
            Their token ids; a flat prompt may go on with less than a block more, which is ignored.

        Returns
        -------
        int32 array (n,)
            The blocks that hold the contents now: its own id, or that of the block that had the content first.

        Raises
        ------
        IndexError
            An id is out of range.
        NumkvError
            A block is not in use, is listed twice, or holds other content: `forget` that first.
        """
        ids = self._ids(ids)
        names, tokens = self._contents(digests, tokens, len(ids))
        was = self._state[compiled.CACHED].take(ids, mode="clip") if self.on_event else None
        holders = np.empty(len(ids), np.int32)
        wrong = compiled.compiled("register")(
            self._state,
            self._digests,
            self._tokens,
            self._table,
            self._evicted,
            self._counters,
            ids,
            names,
            tokens,
            holders,
        )
        if wrong >= 0:
            block = self._in_range(ids, wrong)
            if self._state[compiled.REF, block] == 0:
                reason = "is free; register blocks that are in use"
            elif block in ids[:wrong]:
                reason = "is listed twice"
            else:
                reason = "holds other content; forget it first"
            raise NumkvError(f"`ids`: block {block} {reason}")
        if was is not None:
            new = ids[self._state[compiled.CACHED, ids] > was]
            if len(new):
                tokens = self._tokens[new]
                self._report(BlocksStored(self._named(new), new, tokens, self._block_size))
        return holders

    def lookup(self, digests: Any, tokens: Any) -> Ids:
        """Find the longest cached prefix. References and the order of eviction stay as they are.

        Tokens are compared, not only names. `miss_reason` says afterwards why it was not longer. A caller that needs
        the logits of a prompt that is cached completely has to recompute its last token.

        Parameters
        ----------
        digests : uint8 array (n, 32)
            Names of a prompt's full blocks, from `numkv.blocks.prefix.block_digests`.
        tokens : array-like of int (n, block_size) or flat
            Their token ids; a flat prompt may go on with less than a block more, which is ignored.

        Returns
        -------
        int32 array (found,)
            Blocks in the order of the prompt; `acquire` them before anything else is allocated.
        """
        names, tokens = self._contents(digests, tokens)
        ids = np.empty(len(names), np.int32)
        found = compiled.compiled("lookup")(
            self._digests,
            self._tokens,
            self._table,
            self._evicted,
            self._counters,
            names,
            tokens,
            ids,
        )
        return ids[:found]

    def find(self, digests: Any, tokens: Any) -> Ids:
        """Find each block on its own, where a prefix may have holes: a sliding window needs its last blocks only.

        It counts neither as a lookup nor as hits.

        Parameters
        ----------
        digests, tokens : array-like
            See `lookup`.

        Returns
        -------
        int32 array (n,)
            Blocks, -1 where there is none.
        """
        return np.maximum(self.find_each(digests, tokens), np.int32(-1))

    def find_each(self, digests: Any, tokens: Any) -> Ids:
        """Find each block on its own, like `find`, or the negative number of the reason why there is none."""
        names, tokens = self._contents(digests, tokens)
        ids = np.empty(len(names), np.int32)
        compiled.compiled("find")(
            self._digests, self._tokens, self._table, self._evicted, names, tokens, ids
        )
        return ids

    def count_lookup(self, wanted: int, found: int, reason: int) -> None:
        """Count a lookup that was done by `find_each`: blocks wanted and found, and why there were no more."""
        self._counters[compiled.LOOKUPS] += 1
        self._counters[compiled.HITS] += found
        self._counters[compiled.MISSES] += wanted - found
        self._counters[compiled.LAST_MISS] = reason

    @property
    def miss_reason(self) -> MissReason | None:
        """Why the last `lookup` stopped, or None if it found everything."""
        return _MISS_REASONS[int(self._counters[compiled.LAST_MISS])]

    def is_cached(self, ids: Any) -> NDArray[np.bool_]:
        """Whether each block holds cached content.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks.

        Returns
        -------
        bool array (n,)
        """
        cached: NDArray[np.bool_] = self._column(compiled.CACHED, ids) != 0
        return cached

    def forget(self, ids: Any = None) -> None:
        """Drop cached content; references stay, and blocks that hold none are left alone.

        Parameters
        ----------
        ids : array-like of int (n,), optional
            Blocks; by default all that hold cached content, as when a model's weights have changed.

        Raises
        ------
        IndexError
            An id is out of range.
        NumkvError
            A block is pinned.
        """
        if ids is None:
            ids = np.flatnonzero(self._state[compiled.CACHED, : self._num_blocks])
        ids = self._ids(ids)
        was = self._state[compiled.CACHED].take(ids, mode="clip") if self.on_event else None
        wrong = compiled.compiled("forget")(
            self._state, self._digests, self._table, self._counters, ids
        )
        if wrong >= 0:
            block = self._in_range(ids, wrong)
            raise NumkvError(f"`ids`: block {block} is pinned; unpin it first")
        if was is not None and was.any():
            self._removed(np.unique(ids[was != 0]))

    def pin(self, ids: Any) -> None:
        """Keep blocks from eviction, in use or not, until they are unpinned as often as pinned.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks that hold cached content, as `lookup` and `register` return them.

        Raises
        ------
        IndexError
            An id is out of range.
        NumkvError
            A block holds no cached content.
        """
        ids = self._ids(ids)
        wrong = compiled.compiled("pin")(self._state, self._counters, ids)
        if wrong >= 0:
            block = self._in_range(ids, wrong)
            raise NumkvError(f"`ids`: block {block} holds no cached content; register it first")

    def unpin(self, ids: Any) -> None:
        """Take back one pin of each block; without any left, and unused, it is the most recently used of all.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks in the order of the sequence: the last ones are evicted first.

        Raises
        ------
        IndexError
            An id is out of range.
        NumkvError
            A block is not pinned, or is listed more often than it is pinned.
        """
        ids = self._ids(ids)
        wrong = compiled.compiled("unpin")(self._state, self._counters, ids)
        if wrong >= 0:
            block = self._in_range(ids, wrong)
            raise NumkvError(
                f"`ids`: block {block} is unpinned more often than it was pinned: it has "
                f"{self._state[compiled.PINS, block]} pins"
            )

    # -- the books

    def stats(self) -> PoolStats:
        """Counts of now and of all that has happened."""
        counters = self._counters.tolist()
        return PoolStats(
            num_blocks=self._num_blocks,
            free=counters[compiled.FREE] + counters[compiled.EVICTABLE],
            used=counters[compiled.USED],
            cached=counters[compiled.HOLDING],
            evictable=counters[compiled.EVICTABLE],
            pinned=counters[compiled.PINNED],
            peak_used=counters[compiled.PEAK_USED],
            allocations=counters[compiled.ALLOCATIONS],
            evictions=counters[compiled.EVICTIONS],
            stores=counters[compiled.STORES],
            lookups=counters[compiled.LOOKUPS],
            hits=counters[compiled.HITS],
            misses=counters[compiled.MISSES],
        )

    def check(self) -> None:
        """Prove the accounting: every block is in exactly one state, and lists, table and counters agree with it.

        Raises
        ------
        NumkvError
            They do not; the message says where.
        """
        finding, where = compiled.compiled("audit")(
            self._state, self._digests, self._table, self._counters
        )
        if finding == compiled.SOUND:
            return
        if finding == compiled.BAD_COUNTER:
            about = f"`{_COUNTER_NAMES[where]}` is {self._counters[where]}"
        elif 0 <= where < self._num_blocks:
            ref, pins, cached = self._state[: compiled.CACHED + 1, where].tolist()
            about = f"block {where} (references {ref}, pins {pins}, cached {cached})"
        elif where == self._num_blocks + compiled.FREE:
            about = "the head of the free list"
        elif where == self._num_blocks + compiled.EVICTABLE:
            about = "the head of the evictable list"
        else:
            about = f"block {where} of {self._num_blocks}"
        raise NumkvError(f"the pool's accounting is broken: {_FINDINGS[finding]} {about}")

    # -- arguments

    def _ids(self, ids: Any) -> Ids:
        """Ids as int32; their range is looked at here only where the conversion could hide it."""
        x = np.asarray(ids)
        if x.size == 0 and not isinstance(ids, np.ndarray):
            x = x.astype(np.int32)  # an empty list has no dtype of its own
        if x.ndim != 1:
            raise DimensionMismatch(
                f"`ids`: expected int32 (n,), got {x.dtype} {x.shape}; pass a list of blocks",
                expected=("n",),
                actual=x.shape,
            )
        if x.dtype == np.int32:
            return x if x.flags.aligned else x.copy()
        if x.dtype.kind not in "iu":
            raise UnsupportedDType(f"`ids`: expected integers, got {x.dtype}; pass block ids")
        outside = np.flatnonzero((x < 0) | (x >= self._num_blocks))
        if len(outside):
            self._in_range(x, int(outside[0]))
        return x.astype(np.int32)

    def _in_range(self, ids: NDArray[Any], position: int) -> int:
        """The id at a position, which is in range, or the error."""
        block = int(ids[position])
        if not 0 <= block < self._num_blocks:
            raise IndexError(
                f"`ids`: expected indices in [0, {self._num_blocks}), got {block} at {position}"
            )
        return block

    def _column(self, row: int, ids: Any) -> Ids:
        """One number of each block."""
        ids = self._ids(ids)
        if len(ids):
            for end in (ids.argmin(), ids.argmax()):
                self._in_range(ids, int(end))
        column: Ids = self._state[row, ids]
        return column

    def _contents(
        self, digests: Any, tokens: Any, n: int | None = None
    ) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Names as words and token ids in one row, checked."""
        names = np.asarray(digests)
        if names.dtype != np.uint8:
            raise UnsupportedDType(
                f"`digests`: expected uint8 (n, {DIGEST_SIZE}), got {names.dtype} {names.shape}; "
                "pass what block_digests returns"
            )
        expected = "n" if n is None else n
        if names.ndim != 2 or names.shape[1] != DIGEST_SIZE or n not in (None, len(names)):
            raise DimensionMismatch(
                f"`digests`: expected uint8 ({expected}, {DIGEST_SIZE}), got {names.dtype} "
                f"{names.shape}; pass one digest per block",
                expected=(expected, DIGEST_SIZE),
                actual=names.shape,
            )
        words = np.ascontiguousarray(names).view(np.uint64)
        if not words.flags.aligned:  # bytes may begin anywhere, words may not
            words = names.copy().view(np.uint64)
        ids = token_ids(tokens)
        size = self._block_size
        flat = ids.ndim == 1 and len(ids) // size == len(names)
        if not flat and ids.shape != (len(names), size):
            raise DimensionMismatch(
                f"`tokens`: expected int32 ({len(names)}, {size}) or flat, got {ids.dtype} "
                f"{ids.shape}; pass the tokens of all {len(names)} blocks",
                expected=(len(names), size),
                actual=ids.shape,
            )
        return words, ids.reshape(-1)

    # -- events

    def _named(self, ids: Ids) -> NDArray[np.uint8]:
        """Names of blocks, also of those that have just lost their content."""
        names: NDArray[np.uint8] = self._digests[ids].view(np.uint8)
        return names

    def _removed(self, ids: Ids) -> None:
        self._report(BlocksRemoved(self._named(ids), ids.copy()))

    def _report(self, event: BlocksStored | BlocksRemoved) -> None:
        if self.on_event is None:
            return
        try:
            self.on_event(event)
        except Exception:
            log.exception("on_event failed; the change that it was told of stands")
