"""`BlockPool`: which blocks are free, how many references the others have, and which hold a cached prefix.

The pool knows ids only, in arrays; K and V lie elsewhere. Python methods call compiled functions on the arrays
(`numkv.blocks.compiled`), and a user's own ``@njit`` code gets the same functions as methods of `BlockPool.jit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numkv.blocks import arrays, compiled
from numkv.blocks.arguments import block_ids, block_names, id_in_range
from numkv.blocks.books import Books
from numkv.blocks.records import (
    MISS_REASONS,
    BlocksStored,
    Ids,
)
from numkv.blocks.turns import changes, looks
from numkv.errors import CacheFull, NumkvError
from numkv.keywords import explains
from numkv.numbers import check_index, check_size

#: Blocks that one lookup asks for at most: sums of them are int64.
_MOST_WANTED = 2**31 - 1


@explains
class BlockPool(Books):
    """Reference counts, free lists and the prefix cache of a number of blocks.

    A block is *in use* while it has references. Without any it is *free*; if it holds registered content it can still
    be found, and is *evictable* unless it is pinned. All operations take time proportional to the blocks they name,
    whatever the pool's size. Every method checks all its arguments before it changes anything.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool.
    block_size : int
        Tokens in a block.
    on_event : callable, optional
        Called with a `BlocksStored` or `BlocksRemoved` after each change of the prefix cache. Its exceptions are
        logged and not raised: the change has happened. It may look at the pool, not change it.

    Notes
    -----
    Threads: any number may use one pool, as layers that share a `PagedPool` do. Operations are short, and a thread
    waits until another's is done. A call that comes out of an operation of the same thread (from `on_event`, a
    finaliser or a signal handler) may look, and gets `NumkvError` if it changes anything. Copies and pickles hold the
    books as they are at that moment, without `on_event`. In a forked child the pool is as it was between operations: a
    fork waits for those of other threads, half a minute at most. Beyond that the child's calls raise `NumkvError`.

    Examples
    --------
    >>> from numkv.blocks import BlockPool, block_digests
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

    # -- references

    @changes
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
        counters = self._counters
        empty = int(counters[arrays.FREE])
        free = empty + int(counters[arrays.EVICTABLE])
        if n > free:
            kept = self._num_blocks - free - int(counters[arrays.USED])
            raise CacheFull(
                f"`n`: expected at most {free} blocks, got {n}; of {self._num_blocks}, "
                f"{counters[arrays.USED]} are in use and {kept} more are pinned: release or unpin some"
            )
        ids = np.empty(n, np.int32)
        compiled.compiled("allocate")(
            self._state, self._digests, self._table, self._evicted, counters, ids
        )
        if n > empty:
            self._report_evicted(ids, ids[empty:])
        return ids

    def _report_evicted(self, ids: Ids, evicted: Ids) -> None:
        """Report which of the blocks that were just allocated have lost their content."""
        if len(evicted) and (self.on_event is not None or self._watcher is not None):
            try:
                if self._watcher is not None:
                    self._watcher.evicted(evicted, self._digests[evicted], self._tokens[evicted])
                self._report(self._removal(evicted))
            except BaseException:  # an interrupt, say: nobody will get the ids
                compiled.compiled("release")(self._state, self._counters, ids)
                raise

    @changes
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
        ids = taken = block_ids(ids, self._num_blocks).copy()
        told = self.on_event is not None or self._watcher is not None
        was = self._state[arrays.CACHED].take(ids, mode="clip") if told else None
        wrong = compiled.compiled("allocate_ids")(
            self._state, self._digests, self._table, self._evicted, self._counters, ids
        )
        if wrong >= 0:
            block = id_in_range(ids, wrong, self._num_blocks)
            if block in ids[:wrong]:
                raise NumkvError(f"`ids`: block {block} is listed twice; name each block once")
            references, pins = self._state[arrays.REF, block], self._state[arrays.PINS, block]
            raise CacheFull(
                f"`ids`: expected blocks that are free, got block {block}, which has {references} references and "
                f"{pins} pins; choose another, or use `allocate`"
            )
        if was is not None:
            self._report_evicted(ids, ids[was != 0])
        return taken

    @changes
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
        ids = block_ids(ids, self._num_blocks)
        wrong = compiled.compiled("release")(self._state, self._counters, ids)
        if wrong >= 0:
            block = id_in_range(ids, wrong, self._num_blocks)
            raise NumkvError(
                f"`ids`: block {block} is released more often than it was taken: it has "
                f"{self._state[arrays.REF, block]} references"
            )

    @changes
    def _undo_allocation(self, ids: Ids, peak: int) -> None:
        """Release blocks that were just allocated and are not needed after all; `peak` is the most used before."""
        counters = self._counters
        highest = counters[arrays.USED] == counters[arrays.PEAK_USED]
        compiled.compiled("release")(self._state, counters, ids)
        counters[arrays.ALLOCATIONS] -= len(ids)
        if highest:
            counters[arrays.PEAK_USED] = max(peak, int(counters[arrays.USED]))

    @changes
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
        ids = block_ids(ids, self._num_blocks)
        wrong = compiled.compiled("acquire")(self._state, self._counters, ids)
        if wrong >= 0:
            block = id_in_range(ids, wrong, self._num_blocks)
            raise NumkvError(f"`ids`: block {block} is free and holds nothing; allocate blocks")

    # -- the prefix cache

    @changes
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
        ids = block_ids(ids, self._num_blocks)
        names, tokens = block_names(digests, tokens, self._block_size, len(ids))
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
            block = id_in_range(ids, wrong, self._num_blocks)
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
                stored = self._digests[new].view(np.uint8)
                self._report(BlocksStored(stored, new, tokens, self._block_size))
        return holders

    @looks
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
        names, tokens = block_names(digests, tokens, self._block_size)
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
        found: Ids = np.maximum(self.find_each(digests, tokens), np.int32(-1))
        return found

    @looks
    def find_each(self, digests: Any, tokens: Any) -> Ids:
        """Find each block like `find`, or the negative number of the reason why none is found."""
        names, tokens = block_names(digests, tokens, self._block_size)
        ids: Ids = np.empty(len(names), np.int32)
        compiled.compiled("find")(
            self._digests, self._tokens, self._table, self._evicted, names, tokens, ids
        )
        return ids

    @looks
    def count_lookup(self, wanted: int, found: int, reason: int) -> None:
        """Count a lookup by `find_each`.

        Parameters
        ----------
        wanted, found : int
            Blocks that were looked for, and how many of them were found.
        reason : int
            Why there were no more: the negative of what `find_each` gave for the first that is missing, else 0.

        Raises
        ------
        DimensionMismatch, IndexError, TypeError
            If one of them is no such number; nothing is counted.
        """
        wanted = check_size("wanted", wanted, 0, _MOST_WANTED)
        found = check_index("found", found, wanted, inclusive=True)
        reason = check_index("reason", reason, len(MISS_REASONS))
        self._counters[arrays.LOOKUPS] += 1
        self._counters[arrays.HITS] += found
        self._counters[arrays.MISSES] += wanted - found
        self._counters[arrays.LAST_MISS] = reason

    @changes
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
        ids = block_ids(ids, self._num_blocks)
        was = self._state[arrays.CACHED].take(ids, mode="clip") if self.on_event else None
        wrong = compiled.compiled("forget")(
            self._state, self._digests, self._table, self._counters, ids
        )
        if wrong >= 0:
            block = id_in_range(ids, wrong, self._num_blocks)
            raise NumkvError(f"`ids`: block {block} is pinned; unpin it first")
        if self._watcher is not None:
            self._watcher.dropped(ids)
        if was is not None and was.any():
            self._report(self._removal(np.unique(ids[was != 0])))

    @changes
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
        ids = block_ids(ids, self._num_blocks)
        wrong = compiled.compiled("pin")(self._state, self._counters, ids)
        if wrong >= 0:
            block = id_in_range(ids, wrong, self._num_blocks)
            raise NumkvError(f"`ids`: block {block} holds no cached content; register it first")

    @changes
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
        ids = block_ids(ids, self._num_blocks)
        wrong = compiled.compiled("unpin")(self._state, self._counters, ids)
        if wrong >= 0:
            block = id_in_range(ids, wrong, self._num_blocks)
            raise NumkvError(
                f"`ids`: block {block} is unpinned more often than it was pinned: it has "
                f"{self._state[arrays.PINS, block]} pins"
            )


def taken_for_now(pool: BlockPool, n: int) -> tuple[Ids, Callable[[], None]]:
    """Allocate blocks; beside them what gives them back as if they had never been in use."""
    peak = int(pool._counters[arrays.PEAK_USED])
    ids = pool.allocate(n)
    return ids, functools.partial(pool._undo_allocation, ids, peak)
