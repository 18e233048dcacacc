"""The books of a `BlockPool` as an object: its arrays, what they say, and copies of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv.blocks import arrays, audit, compiled
from numkv.blocks.arguments import block_ids, id_in_range, pool_sizes
from numkv.blocks.records import (
    MISS_REASONS,
    BlocksRemoved,
    BlocksStored,
    Ids,
    MissReason,
    PoolStats,
    Watcher,
)
from numkv.blocks.turns import Turns, changes, looks
from numkv.errors import NumkvError

log = logging.getLogger("numkv.blocks.pool")


class Books:
    """The part of `BlockPool` that names no block's fate: see there."""

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

    def _take(self, books: tuple[Any, ...]) -> None:
        """Begin with these arrays."""
        self._state, self._digests, self._tokens, self._table, self._evicted, self._counters = books
        self._struct: Any = None
        self._turns = Turns()
        #: Who is told of content before anybody can write over it; see `Watcher`.
        self._watcher: Watcher | None = None

    def _arrays(self) -> tuple[Any, ...]:
        return (
            self._state, self._digests, self._tokens, self._table, self._evicted, self._counters,
        )  # fmt: skip

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
        with self._turns.lock:
            counters = self._counters
            return int(counters[arrays.FREE]) + int(counters[arrays.EVICTABLE])

    @property
    def nbytes(self) -> int:
        """Bytes of the books: references, lists, names and token ids, no K and V."""
        return sum(int(x.nbytes) for x in self._arrays())

    @property
    def jit(self) -> Any:
        """The jitclass instance over the pool's own arrays, for a user's own ``@njit`` functions.

        Its methods are those of the pool, for arrays of exact types and without messages: see
        `numkv.blocks.compiled.pool_struct`. They report no events, and wait for nobody: no other thread may use the
        pool meanwhile.
        """
        if self._struct is None:
            self._struct = compiled.pool_struct()(*self._arrays())
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
        """Make all blocks free: drop references, pins and the prefix cache. What has happened stays counted.

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
        for own, new in zip(self._arrays(), fresh, strict=True):
            own[:] = new  # in place, as `jit` is over the same arrays
        self._report(event)

    @looks
    def copy(self) -> Self:
        """The same books once more, for other buffers of K and V; `on_event` is not taken along."""
        made = self.__class__.__new__(self.__class__)
        made.__setstate__(self.__getstate__())
        return made

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @looks
    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: sizes and copies of the arrays; neither `on_event` nor who is using the pool."""
        return {
            "sizes": (self._num_blocks, self._block_size),
            "arrays": tuple(x.copy() for x in self._arrays()),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._num_blocks, self._block_size = state["sizes"]
        self.on_event = None
        self._take(state["arrays"])

    # -- events

    def _removal(self, ids: Ids) -> BlocksRemoved | None:
        """The event that blocks have lost their content, whose names are still there; None if nobody listens."""
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
            log.exception("on_event failed; the change that it was told of stands")
