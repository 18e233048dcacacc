"""`BlockPool`: which blocks are free, how many references the others have, and which hold a cached prefix.

The pool knows ids only, in arrays; K and V lie elsewhere. Python methods call compiled functions on the arrays
(`numkv.blocks.compiled`), and a user's own ``@njit`` code gets the same functions as methods of `BlockPool.jit`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv.arrays import owned
from numkv.blocks import arrays, audit, compiled
from numkv.blocks.guard import Guard, changes, looks
from numkv.blocks.prefix import DIGEST_SIZE, token_ids
from numkv.blocks.records import (
    MISS_REASONS,
    BlocksRemoved,
    BlocksStored,
    Ids,
    MissReason,
    PoolStats,
    Watcher,
)
from numkv.checks import host_array
from numkv.errors import CacheFull, DimensionMismatch, NumkvError, UnsupportedDType
from numkv.keywords import explains
from numkv.numbers import check_index, check_size, memory_of_machine

#: Blocks that a pool can have: their ids and the heads of two lists are int32.
_MOST_BLOCKS = 2**31 - 3

#: Most bytes of an array.
_MOST_BYTES = 2**62

#: The most bytes of a block's entries in lists and tables, which are written when the pool is made.
_BOOKS_OF_BLOCK = 40


def pool_sizes(num_blocks: Any, block_size: Any) -> tuple[int, int]:
    """Check the sizes of a pool before any memory is taken.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks, and tokens in a block.

    Returns
    -------
    num_blocks, block_size : int
    """
    blocks = check_size("num_blocks", num_blocks)
    size = check_size("block_size", block_size, 1)
    most = min(_MOST_BLOCKS, memory_of_machine() // _BOOKS_OF_BLOCK)
    if blocks > most:
        raise DimensionMismatch(
            f"`num_blocks`: expected at most {most}, whose ids are int32 and whose books fit into this machine's "
            f"memory, got {blocks}; take larger blocks",
            expected=most,
            actual=blocks,
        )
    most = _MOST_BYTES // (4 * max(1, blocks))
    if size > most:
        raise DimensionMismatch(
            f"`block_size`: expected at most {most} tokens in each of {blocks} blocks, got {size}; "
            "take smaller blocks",
            expected=most,
            actual=size,
        )
    return blocks, size


def block_ids(ids: Any, num_blocks: int) -> Ids:
    """Take ids of blocks as int32; their range is checked here only where the conversion could hide it.

    Parameters
    ----------
    ids : array-like of int (n,)
        The argument.
    num_blocks : int
        Blocks in the pool.
    """
    x = ids if type(ids) is np.ndarray else host_array("ids", ids)
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
    outside = np.flatnonzero((x < 0) | (x >= num_blocks))
    if len(outside):
        id_in_range(x, int(outside[0]), num_blocks)
    return x.astype(np.int32)


def id_in_range(ids: NDArray[Any], position: int, num_blocks: int) -> int:
    """The id at a position; raises if it is out of range."""
    block = int(ids[position])
    if not 0 <= block < num_blocks:
        raise IndexError(f"`ids`: expected indices in [0, {num_blocks}), got {block} at {position}")
    return block


def block_names(
    digests: Any, tokens: Any, block_size: int, n: int | None = None
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Take names as words and token ids in one row.

    Parameters
    ----------
    digests : uint8 array (n, 32)
        Names.
    tokens : array-like of int (n, block_size) or flat
        Token ids; of a flat prompt less than a block may be left over.
    block_size : int
        Tokens in a block.
    n : int, optional
        How many names there must be.
    """
    names = host_array("digests", digests)
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
    flat = ids.ndim == 1 and len(ids) // block_size == len(names)
    if not flat and ids.shape != (len(names), block_size):
        raise DimensionMismatch(
            f"`tokens`: expected int32 ({len(names)}, {block_size}) or flat, got {ids.dtype} "
            f"{ids.shape}; pass the tokens of all {len(names)} blocks",
            expected=(len(names), block_size),
            actual=ids.shape,
        )
    return words, ids.reshape(-1)


log = logging.getLogger("numkv.blocks.pool")

#: Blocks that one lookup asks for at most: sums of them are int64.
_MOST_WANTED = 2**31 - 1


@explains
class BlockPool:
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
        logged and not raised: the change has happened. It may read the pool, not change it.

    Notes
    -----
    Threads: any number may use one pool, as layers that share a `PagedPool` do. Operations are short, and a thread
    waits until another's is done. A call that comes out of an operation of the same thread (from `on_event`, a
    finaliser or a signal handler) may look, and gets `NumkvError` if it changes anything. Copies and pickles hold the
    state at that moment, without `on_event`. In a forked child the pool is as it was between operations: a
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

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        on_event: Callable[[BlocksStored | BlocksRemoved], object] | None = None,
    ) -> None:
        self._num_blocks, self._block_size = pool_sizes(num_blocks, block_size)
        if on_event is not None and not callable(on_event):
            raise TypeError(
                f"`on_event`: expected a function or None, got {type(on_event).__name__}"
            )
        self.on_event = on_event
        self._take(arrays.new_arrays(self._num_blocks, self._block_size))

    def _take(self, state: tuple[Any, ...]) -> None:
        """Begin with these arrays."""
        self._arrays = state
        self._state, self._digests, self._tokens, self._table, self._evicted, self._counters = state
        self._struct: Any = None
        self._guard = Guard()
        #: Receives content before it can be overwritten; see `Watcher`.
        self._watcher: Watcher | None = None

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
        with self._guard.lock:
            counters = self._counters
            return int(counters[arrays.FREE]) + int(counters[arrays.EVICTABLE])

    @property
    def nbytes(self) -> int:
        """Bytes of the pool: references, lists, names and token ids, no K and V."""
        return sum(int(x.nbytes) for x in self._arrays)

    @property
    def jit(self) -> Any:
        """The jitclass instance over the pool's own arrays, for a user's own ``@njit`` functions.

        Its methods are those of the pool, for arrays of exact types and without messages: see
        `numkv.blocks.compiled.pool_struct`. They report no events and take no lock: no other thread may use the pool
        meanwhile.
        """
        if self._struct is None:
            self._struct = compiled.pool_struct()(*self._arrays)
        return self._struct

    def __len__(self) -> int:
        return self._num_blocks

    def __repr__(self) -> str:
        now = self.stats()
        return (
            f"<BlockPool: {self._num_blocks} blocks of {self._block_size} tokens, "
            f"{now.used} in use, {now.free} free, {now.cached} cached>"
        )

    # -- counts

    @looks
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

    @looks
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

    @looks
    def is_cached(self, ids: Any) -> NDArray[np.bool_]:
        """Return whether each block holds cached content.

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

    def _column(self, row: int, ids: Any) -> Ids:
        """One number of each block."""
        ids = block_ids(ids, self._num_blocks)
        if len(ids):
            for end in (ids.argmin(), ids.argmax()):
                id_in_range(ids, int(end), self._num_blocks)
        column: Ids = self._state[row, ids]
        return column

    @property
    def miss_reason(self) -> MissReason | None:
        """Why the last `lookup` stopped, or None if it found everything."""
        return MISS_REASONS[int(self._counters[arrays.LAST_MISS])]

    @looks
    def stats(self) -> PoolStats:
        """Counts of this moment, and of all that has happened."""
        # In the order of the counters, in which `PoolStats` has past events, too.
        free, evictable, used, cached, pinned, *events, _ = self._counters.tolist()
        of_now = self._num_blocks, free + evictable, used, cached, evictable, pinned
        return PoolStats(*of_now, *events)

    @looks
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

    # -- as a whole

    @changes
    def clear(self) -> None:
        """Make all blocks free: drop references, pins and the prefix cache. Counters of past events stay.

        For a pool that you alone use. Caches and layers have a `clear` of their own, and their `check` fails if the
        blocks that they use are taken from them.
        """
        fresh = arrays.new_arrays(self._num_blocks, self._block_size)
        cached = np.flatnonzero(self._state[arrays.CACHED, : self._num_blocks]).astype(np.int32)
        if self._watcher is not None:
            self._watcher.dropped(cached)
        history = slice(arrays.PEAK_USED, arrays.NUM_COUNTERS)
        fresh[-1][history] = self._counters[history]
        event = self._removal(cached) if len(cached) else None
        for own, new in zip(self._arrays, fresh, strict=True):
            own[:] = new  # in place, as `jit` is over the same arrays
        self._report(event)

    @looks
    def copy(self) -> Self:
        """A copy of the bookkeeping, for other buffers of K and V; `on_event` is not copied."""
        made = self.__class__.__new__(self.__class__)
        made.__setstate__(self.__getstate__())
        return made

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @looks
    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickle: sizes and copies of the arrays, but neither `on_event` nor the pool's users."""
        return {
            "sizes": (self._num_blocks, self._block_size),
            "arrays": tuple(x.copy() for x in self._arrays),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._num_blocks, self._block_size = state["sizes"]
        self.on_event = None
        self._take(owned(state["arrays"]))

    # -- events

    def _removal(self, ids: Ids) -> BlocksRemoved | None:
        """Return the event that blocks have lost their content, before their hashes are; None without a listener."""
        if self.on_event is None:
            return None
        names: NDArray[np.uint8] = self._digests[ids].view(np.uint8)
        return BlocksRemoved(names, ids.copy())

    def _report(self, event: BlocksStored | BlocksRemoved | None) -> None:
        if event is None or self.on_event is None:
            return
        try:
            self.on_event(event)
        except Exception:
            log.exception("on_event failed; the change that it reports has happened")

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
        self._count(
            "release", ids, "is released more often than it was taken: it has {0} references"
        )

    def _count(self, operation: str, ids: Any, problem: str) -> None:
        """Change references or pins of blocks; `problem` says what is wrong with a block of {0} and {1} of them."""
        ids = block_ids(ids, self._num_blocks)
        wrong = compiled.compiled(operation)(self._state, self._counters, ids)
        if wrong >= 0:
            block = id_in_range(ids, wrong, self._num_blocks)
            found = problem.format(*self._state[: arrays.CACHED, block])
            raise NumkvError(f"`ids`: block {block} {found}")

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
        self._count("acquire", ids, "is free and holds nothing; allocate blocks")

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
        wrong = compiled.compiled("register")(*self._arrays, ids, names, tokens, holders)
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
        found = compiled.compiled("lookup")(*self._arrays[1:], names, tokens, ids)
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
            Blocks that were searched for, and how many of them were found.
        reason : int
            Why there were no more: the negative of the result of `find_each` for the first missing block, else 0.

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
        self._count("pin", ids, "holds no cached content; register it first")

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
        self._count("unpin", ids, "is unpinned more often than it was pinned: it has {1} pins")


def taken_for_now(pool: BlockPool, n: int) -> tuple[Ids, Callable[[], None]]:
    """Allocate blocks; also return a function that releases them as if they had never been used."""
    peak = int(pool._counters[arrays.PEAK_USED])
    ids = pool.allocate(n)
    return ids, functools.partial(pool._undo_allocation, ids, peak)


def name_of(pool: BlockPool, block: int) -> bytes:
    """The name under which a block was registered last, looked up without waiting for a turn; zeros if it never was."""
    name: bytes = pool._digests[block].tobytes()
    return name


def restore(pool: BlockPool, before: BlockPool) -> None:
    """Restore a pool to the state of a copy, in the same memory, without an event."""
    for own, old in zip(pool._arrays, before._arrays, strict=True):
        own[:] = old
