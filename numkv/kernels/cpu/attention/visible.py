"""Which tokens a query sees: a range of its own, or causality and a window."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.attention.records import KV_TILE

__all__ = ["visible_in_tile", "visible_to_any"]


@register_jitable
def visible_to_any(ranges, row, count, position, window_left, length):
    """The smallest range ``[begin, end)`` that holds what each of some queries sees.

    Parameters
    ----------
    ranges : int64 array (num_tokens, 2) or (0, 2)
        Tokens that each query token sees, or none: then it sees `window_left` earlier tokens and itself.
    row, count : int
        The query tokens: the first's row among all, and how many they are.
    position : int
        Position of the first.
    window_left, length : int
        Of the attention and of the sequence.
    """
    if len(ranges) > 0:
        begin, end = length, np.int64(0)
        for t in range(row, row + count):
            if ranges[t, 0] < ranges[t, 1]:
                begin = min(begin, ranges[t, 0])
                end = max(end, ranges[t, 1])
        return max(np.int64(0), begin), min(length, end)
    begin = max(np.int64(0), position - window_left) if window_left >= 0 else np.int64(0)
    return begin, position + count


@register_jitable
def visible_in_tile(ranges, row, position, window_left, begin, end, tile):
    """Which tokens of a KV tile a query sees, of ``[begin, end)``: a range counted from the tile's start."""
    low, high = visible_to_any(ranges, row, np.int64(1), position, window_left, end)
    low = min(max(max(low, begin) - tile, 0), KV_TILE)
    return low, min(max(min(high, end) - tile, low), KV_TILE)
