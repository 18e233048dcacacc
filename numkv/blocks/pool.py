"""`BlockPool`: which blocks are free, how many references the others have, and which hold a cached prefix.

The pool knows ids only, in arrays; K and V lie elsewhere. Python methods call compiled functions on the arrays
(`numkv.blocks.compiled`), and a user's own ``@njit`` code gets the same functions as methods of `BlockPool.jit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.blocks import arrays, audit, compiled
from numkv.blocks.prefix import DIGEST_SIZE, token_ids
from numkv.blocks.records import (
    MISS_REASONS,
    BlocksRemoved,
    BlocksStored,
    Ids,
    MissReason,
    PoolStats,
)
from numkv.checks import check_size
from numkv.errors import CacheFull, DimensionMismatch, NumkvError, UnsupportedDType

__all__ = ["BlockPool", "BlocksRemoved", "BlocksStored", "MissReason", "PoolStats"]

log = logging.getLogger("numkv.blocks.pool")


class BlockPool:
    """Reference counts, free lists and the prefix cache of a number of blocks.

    A block is *in use* while it has references. Without any it is *free*; if it holds registered content it can still
    be found, and is *evictable* unless it is pinned. All operations take time proportional to the blocks they name,
    whatever the pool's size. Every method checks all its arguments before it changes anything. A pool serves one
    thread at a time.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool.
    block_size : int
        Tokens in a block.
    on_event : callable, optional
        Called with a `BlocksStored` or `BlocksRemoved` after each change of the prefix cache. Its exceptions are
        logged and not raised: the change has happened.

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
        self._state, self._digests, self._tokens, self._table, self._evicted, self._counters = (
            arrays.new_arrays(self._num_blocks, self._block_size)
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
        """Blocks that `allocate` can give, evictable ones included."""
        counters = self._counters
        return int(counters[arrays.FREE]) + int(counters[arrays.EVICTABLE])

    @property
    def jit(self) -> Any:
        """The jitclass instance over the pool's own arrays, for a user's own ``@njit`` functions.

        Its methods are those of the pool, for arrays of exact types and without messages: see
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
        """Allocate blocks, each with one reference.

        Free blocks without content are taken first, the last one released first; then blocks with cached content are
        evicted, the least recently used first.

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
            If fewer than `n` can be allocated; nothing has changed.
        """
        n = check_size("n", n)
        if n > self.num_free:
            counters = self._counters
            kept = self._num_blocks - self.num_free - int(counters[arrays.USED])
            raise CacheFull(
                f"`n`: expected at most {self.num_free} blocks, got {n}; of {self._num_blocks}, "
                f"{counters[arrays.USED]} are in use and {kept} more are pinned: release or unpin some"
            )
        empty = int(self._counters[arrays.FREE])
        ids = np.empty(n, np.int32)
        compiled.compiled("allocate")(
            self._state, self._digests, self._table, self._evicted, self._counters, ids
        )
        if n > empty and self.on_event is not None:
            self._removed(ids[empty:])
        return ids

    def allocate_ids(self, ids: Any) -> Ids:
        """Allocate blocks of the caller's choice, each with one reference; cached content in them is evicted.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks without references and pins, each once; all or none.

        Returns
        -------
        int32 array (n,)
            The ids, as an array of their own.

        Raises
        ------
        IndexError
            An id is out of range.
        CacheFull
            A block is in use or pinned; nothing has changed.
        NumkvError
            A block is listed twice.
        """
        ids = self._ids(ids).copy()
        was = self._state[arrays.CACHED].take(ids, mode="clip") if self.on_event else None
        wrong = compiled.compiled("allocate_ids")(
            self._state, self._digests, self._table, self._evicted, self._counters, ids
        )
        if wrong >= 0:
            block = self._in_range(ids, wrong)
            if block in ids[:wrong]:
                raise NumkvError(f"`ids`: block {block} is listed twice; name each block once")
            references, pins = self._state[arrays.REF, block], self._state[arrays.PINS, block]
            raise CacheFull(
                f"`ids`: expected blocks that are free, got block {block}, which has {references} references and "
                f"{pins} pins; choose another, or use `allocate`"
            )
        if was is not None and was.any():
            self._removed(ids[was != 0])
        return ids

    def release(self, ids: Any) -> None:
        """Release one reference to each block; without any left a block is free.

        Its cached content can be found until the block is allocated again. Pass blocks in the order of the sequence:
        the last ones are evicted first.

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
                f"{self._state[arrays.REF, block]} references"
            )

    def acquire(self, ids: Any) -> None:
        """Acquire one more reference to each block; free blocks with cached content come into use again.

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
        return self._column(arrays.REF, ids)

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
        return self._column(arrays.PINS, ids)

    # -- the prefix cache

    def register(self, ids: Any, digests: Any, tokens: Any) -> Ids:
        """Register full blocks in the prefix cache.

        If another block has the same content already, that one stays registered and this one is not: its content is
        lost when it is released. The same holds for a block whose name is taken by other tokens.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks in use, each once.
        digests : uint8 array (n, 32)
            Their names, from `numkv.blocks.prefix.block_digests`.
        tokens : array-like of int (n, block_size) or flat
            Their token ids; a flat prompt may end with less than a block more, which is ignored.

        Returns
        -------
        int32 array (n,)
            The block that is registered with each content: its own id, or that of the block that was first.

        Raises
        ------
        IndexError
            An id is out of range.
        NumkvError
            A block is not in use, is listed twice, or holds other content: `forget` that first.
        """
        ids = self._ids(ids)
        names, tokens = self._contents(digests, tokens, len(ids))
        was = self._state[arrays.CACHED].take(ids, mode="clip") if self.on_event else None
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
            if self._state[arrays.REF, block] == 0:
                reason = "is free; register blocks that are in use"
            elif block in ids[:wrong]:
                reason = "is listed twice"
            else:
                reason = "holds other content; forget it first"
            raise NumkvError(f"`ids`: block {block} {reason}")
        if was is not None:
            new = ids[self._state[arrays.CACHED, ids] > was]
            if len(new):
                tokens = self._tokens[new]
                self._report(BlocksStored(self._named(new), new, tokens, self._block_size))
        return holders

    def lookup(self, digests: Any, tokens: Any) -> Ids:
        """Find the longest cached prefix. References and the order of eviction do not change.

        Tokens are compared, not only names. `miss_reason` then says why it was not longer. To get the logits of a
        prompt that is cached completely, recompute its last token.

        Parameters
        ----------
        digests : uint8 array (n, 32)
            Names of a prompt's full blocks, from `numkv.blocks.prefix.block_digests`.
        tokens : array-like of int (n, block_size) or flat
            Their token ids; a flat prompt may end with less than a block more, which is ignored.

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
        """Find each block separately, where a prefix may have holes: a sliding window needs its last blocks only.

        It counts neither as a lookup nor as hits.

        Parameters
        ----------
        digests, tokens : array-like
            See `lookup`.

        Returns
        -------
        int32 array (n,)
            Blocks, -1 where none is found.
        """
        return np.maximum(self.find_each(digests, tokens), np.int32(-1))

    def find_each(self, digests: Any, tokens: Any) -> Ids:
        """Find each block like `find`, or the negative number of the reason why none is found."""
        names, tokens = self._contents(digests, tokens)
        ids = np.empty(len(names), np.int32)
        compiled.compiled("find")(
            self._digests, self._tokens, self._table, self._evicted, names, tokens, ids
        )
        return ids

    def count_lookup(self, wanted: int, found: int, reason: int) -> None:
        """Count a lookup by `find_each`: blocks wanted and found, and why there were no more."""
        self._counters[arrays.LOOKUPS] += 1
        self._counters[arrays.HITS] += found
        self._counters[arrays.MISSES] += wanted - found
        self._counters[arrays.LAST_MISS] = reason

    @property
    def miss_reason(self) -> MissReason | None:
        """Why the last `lookup` stopped, or None if it found everything."""
        return MISS_REASONS[int(self._counters[arrays.LAST_MISS])]

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
        cached: NDArray[np.bool_] = self._column(arrays.CACHED, ids) != 0
        return cached

    def forget(self, ids: Any = None) -> None:
        """Drop cached content; references stay, and blocks without content are ignored.

        Parameters
        ----------
        ids : array-like of int (n,), optional
            Blocks; by default all with cached content, as is needed when a model's weights have changed.

        Raises
        ------
        IndexError
            An id is out of range.
        NumkvError
            A block is pinned.
        """
        if ids is None:
            ids = np.flatnonzero(self._state[arrays.CACHED, : self._num_blocks])
        ids = self._ids(ids)
        was = self._state[arrays.CACHED].take(ids, mode="clip") if self.on_event else None
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
        """Undo one pin of each block; without any left, a free block is the last to be evicted.

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
                f"{self._state[arrays.PINS, block]} pins"
            )

    # -- the books

    def stats(self) -> PoolStats:
        """Counts of this moment, and of all that has happened."""
        counters = self._counters.tolist()
        return PoolStats(
            num_blocks=self._num_blocks,
            free=counters[arrays.FREE] + counters[arrays.EVICTABLE],
            used=counters[arrays.USED],
            cached=counters[arrays.HOLDING],
            evictable=counters[arrays.EVICTABLE],
            pinned=counters[arrays.PINNED],
            peak_used=counters[arrays.PEAK_USED],
            allocations=counters[arrays.ALLOCATIONS],
            evictions=counters[arrays.EVICTIONS],
            stores=counters[arrays.STORES],
            lookups=counters[arrays.LOOKUPS],
            hits=counters[arrays.HITS],
            misses=counters[arrays.MISSES],
        )

    def check(self) -> None:
        """Prove the accounting: every block is in exactly one state, and lists, table and counters agree.

        Raises
        ------
        NumkvError
            If they do not; the message says where.
        """
        finding, where = compiled.compiled("audit")(
            self._state, self._digests, self._table, self._counters
        )
        if finding != audit.SOUND:
            found = audit.describe(finding, where, self._state, self._counters)
            raise NumkvError(f"the pool's accounting is broken: {found}")

    # -- arguments

    def _ids(self, ids: Any) -> Ids:
        """Ids as int32; their range is checked here only where the conversion could hide it."""
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
        """The id at a position; raises if it is out of range."""
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
        """Digests of blocks, also of those that have just lost their content."""
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
