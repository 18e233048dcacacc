"""Which tokens to drop (`eviction`), how those that stay move (`moves`), and how their keys turn (`key_shift`)."""

from __future__ import annotations

from numkv.compaction.eviction import (
    AttentionTally,
    first_and_recent,
    heavy_hitters,
    max_pool,
    seen_by_recent,
)

__all__ = ["AttentionTally", "first_and_recent", "heavy_hitters", "max_pool", "seen_by_recent"]
