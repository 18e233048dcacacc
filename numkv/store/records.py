"""Counts and events that a `PrefixStore` reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _PlaceStats:
    """Counts of what a store wrote to its place and read from it."""

    failed: int = 0
    """Objects that could not be written, as on a full disk; see `last_error`."""
    damaged: int = 0
    """Objects that failed their checksum, and were deleted."""
    evicted: int = 0
    """Objects deleted to keep to `max_nbytes`."""
    bytes_written: int = 0
    """Bytes of the objects written."""
    bytes_read: int = 0
    """Bytes of the objects read."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Requests that failed or had no answer, by request and error, such as ``"read: TimeoutError"``."""
    answers: bool = True
    """Whether the place answers, as far as is known; if not, no request is made."""
    last_error: str = ""
    """Message of the last failed read or write."""


@dataclass(frozen=True, slots=True)
class StoreStats(_PlaceStats):
    """Counts of one `PrefixStore` since it was made; all but `lookups` and bytes count blocks.

    Checkpoints of states also count as blocks, but not in `wanted`, `missed` and the counts of found blocks.
    """

    lookups: int = 0
    """Prompts that were looked for, by all caches of this store."""
    wanted: int = 0
    """Full blocks of these prompts."""
    found_in_pool: int = 0
    """Blocks found in the cache's own pool."""
    found_in_host: int = 0
    """Blocks that came from the host tier."""
    found_in_store: int = 0
    """Blocks that were read."""
    missed: int = 0
    """Blocks found nowhere, or after such a block."""
    written: int = 0
    """Blocks written."""
    already_there: int = 0
    """Blocks that were not written because another process, or an earlier run, had written them."""
    dropped: int = 0
    """Blocks given up: evicted by the pool while the host tier was full of blocks that wait to be written."""
    refused: int = 0
    """Objects of another mark, RoPE, kind, size or version, found in this one's place; they have been deleted."""
    waiting: int = 0
    """Blocks that wait to be written now."""
    host_blocks: int = 0
    """Blocks in the host tier now."""
    host_nbytes: int = 0
    """Bytes of them."""

    @property
    def hit_rate(self) -> float:
        """Return the share of requested blocks that were found anywhere; 0 before the first lookup."""
        return (self.wanted - self.missed) / max(1, self.wanted)


@dataclass(frozen=True, slots=True)
class ByteStats(_PlaceStats):
    """Counts of one `BlockStore` since it was made; all but bytes and errors count objects.

    Objects of another mark count as `damaged`, too.
    """

    found: int = 0
    """Objects read."""
    missed: int = 0
    """Objects that were missing or invalid."""
    written: int = 0
    """Objects that were written, or existed before with the same bytes."""


@dataclass(frozen=True, slots=True)
class BlocksWritten:
    """Blocks are in the store, and stay there until they are evicted."""

    block_hashes: NDArray[np.uint8]
    """Names ``(n, 32)``."""


@dataclass(frozen=True, slots=True)
class BlocksDropped:
    """Blocks will not be written, or damaged objects were deleted."""

    block_hashes: NDArray[np.uint8]
    """Names ``(n, 32)``."""
    reason: str
    """``"full"``: no room in the host tier; ``"failed"``: a system error; ``"damaged"``; ``"refused"``: of another
    mark, RoPE, kind, size or version."""
    error: str = ""
    """The error's message, or the reason."""


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """A prompt was looked up: how many of its full blocks were found in each place."""

    wanted: int
    """Full blocks that were looked for."""
    in_pool: int
    """Blocks found in the cache's own pool."""
    in_host: int
    """Blocks that came from the host tier."""
    in_store: int
    """Blocks that were read."""
    missed: int
    """The others."""
    nbytes: int
    """Bytes copied into the pool."""


@dataclass(frozen=True, slots=True)
class StoreSilent:
    """The place has stopped answering: caches continue without it, and writes wait."""

    error: str
    """What went wrong."""


@dataclass(frozen=True, slots=True)
class StoreAnswers:
    """The place answers again."""


#: The events that `on_event` receives.
Event = BlocksWritten | BlocksDropped | PrefixFound | StoreSilent | StoreAnswers
