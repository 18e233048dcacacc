"""Which tokens of a KV tile a query sees; see `numkv.rows.visible`."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.rows.visible import visible_to_any


@register_jitable
def visible_in_tile(ranges, row, position, window_left, begin, end, tile):
    """Which tokens of a KV tile a query sees, of ``[begin, end)``: a range counted from the tile's start."""
    low, high = visible_to_any(ranges, row, np.int64(1), position, window_left, end)
    low = min(max(max(low, begin) - tile, 0), KV_TILE)
    return low, min(max(min(high, end) - tile, low), KV_TILE)


@inlined
def visible_to_tokens(item, first, stop, seen, tile):
    """The tokens of a tile that any of an item's query tokens ``[first, stop)`` sees, and whether all see the same."""
    low, high, alike = np.int64(KV_TILE), np.int64(0), True
    # Without ranges later tokens see later ones, or the same: the first and the last tell.
    last = stop - 1
    for t in range(first, last + 1, 1 if len(seen.ranges) > 0 else max(last - first, 1)):
        begin, end = visible_in_tile(
            seen.ranges, item.first_token + t, item.position + t, seen.window_left, item.begin,
            item.end, tile,
        )  # fmt: skip
        if t > first and (begin != low or end != high):
            alike = False
        if len(seen.ranges) == 0:
            low, high = begin if t == first else low, end
        elif begin < end:
            low, high = min(low, begin), max(high, end)
    return low, high, alike
