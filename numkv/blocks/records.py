"""Reports of a `BlockPool`: counts, why a lookup stopped, and which blocks joined or left the prefix cache."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


class MissReason(enum.StrEnum):
    """Why a lookup stopped before its last block."""

    ABSENT = "absent"
    """No block of this name was ever registered, or it was dropped too long ago to know; other extra keys, another
    block size or a single other token before it give another name."""
    EVICTED = "evicted"
    """It was evicted for something else: the pool is too small, or the block should be pinned."""
    TOKENS_DIFFER = "tokens differ"
    """A block of this name is registered with other tokens: the name was not made from these tokens."""


#: By the numbers that compiled functions give: `NO_MISS` and so on of `numkv.blocks.arrays`, in this order.
MISS_REASONS = (None, MissReason.ABSENT, MissReason.EVICTED, MissReason.TOKENS_DIFFER)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Current counts of a pool, and counts of past events. All but `lookups` count blocks."""

    num_blocks: int
    """Blocks in all."""
    free: int
    """Blocks that `BlockPool.allocate` can give, evictable ones included."""
    used: int
    """Blocks with references."""
    cached: int
    """Blocks with cached content, with or without references."""
    evictable: int
    """Blocks with cached content, without references or pins: part of `free` and of `cached`."""
    pinned: int
    """Blocks that are pinned."""
    peak_used: int
    """The most blocks that were ever in use at once."""
    allocations: int
    """Blocks allocated."""
    evictions: int
    """Blocks allocated that had cached content, which was lost."""
    stores: int
    """Blocks registered."""
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
    """Blocks have joined the prefix cache."""

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
    """Blocks have left the prefix cache."""

    block_hashes: NDArray[np.uint8]
    """Digests ``(n, 32)``."""
    block_ids: Ids
    """Blocks ``(n,)``."""


class Watcher(Protocol):
    """Stores the contents of blocks elsewhere; called in the pool's turn, before the blocks can be overwritten.

    Its exceptions leave the call that it reports. It must not use the pool.
    """

    def evicted(self, ids: Ids, names: NDArray[np.uint64], tokens: NDArray[np.int32]) -> None:
        """Blocks have been allocated that hold these names and tokens."""

    def dropped(self, ids: Ids) -> None:
        """Blocks will hold nothing that can be found."""
