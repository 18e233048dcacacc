"""Which tokens of a KV tile a query sees; see `numkv.rows.visible`."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.rows.visible import visible_to_any

__all__ = ["visible_in_tile"]


@register_jitable
def visible_in_tile(ranges, row, position, window_left, begin, end, tile):
    """Which tokens of a KV tile a query sees, of ``[begin, end)``: a range counted from the tile's start."""
    low, high = visible_to_any(ranges, row, np.int64(1), position, window_left, end)
    low = min(max(max(low, begin) - tile, 0), KV_TILE)
    return low, min(max(min(high, end) - tile, low), KV_TILE)
