"""The tokens that a query sees: by causality, a window, or a range of its own.

Without ranges, the query at position p sees tokens ``[p - window_left, p]``; a negative `window_left` means all earlier
ones. Explicit `ranges`, int64 ``(num_tokens, 2)``, replace both: the query of row i sees tokens
``[ranges[i, 0], ranges[i, 1])``. An array of shape ``(0, 2)`` stands for no ranges. All results are clipped to the
sequence's `length`; an empty range may come as any ``begin >= end``.

In all functions `row` is the row of a sequence's query among those of the batch, and `position` that query's position:
negative where a sequence has more queries than tokens. The queries that follow lie at the next rows and positions.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable


@register_jitable
def oldest_visible(position, window_left):
    """Return the first token that the window of a query leaves visible."""
    if window_left < 0:
        return np.int64(0)
    return max(np.int64(0), np.int64(position - window_left))


@register_jitable
def visible_range(ranges, row, position, window_left, length):
    """Tokens ``[begin, end)`` that one query sees."""
    if ranges.shape[0] > 0:
        return max(np.int64(ranges[row, 0]), np.int64(0)), min(np.int64(ranges[row, 1]), length)
    return oldest_visible(position, window_left), min(np.int64(position + 1), length)


@register_jitable
def visible_to_any(ranges, row, count, position, window_left, length):
    """Return the smallest range ``[begin, end)`` with all tokens that any of `count` queries sees."""
    if ranges.shape[0] == 0:
        return oldest_visible(position, window_left), min(np.int64(position + count), length)
    begin, end = length, np.int64(0)
    for i in range(row, row + count):
        low, high = visible_range(ranges, i, position, window_left, length)
        if low < high:
            begin, end = min(begin, low), max(end, high)
    return begin, end


@register_jitable
def visible_to_all(ranges, row, count, position, window_left, length):
    """The range ``[begin, end)`` that every one of `count` queries sees; `count` is at least 1."""
    if ranges.shape[0] == 0:
        begin = oldest_visible(position + count - 1, window_left)
        return begin, min(np.int64(position + 1), length)
    begin, end = np.int64(0), length
    for i in range(row, row + count):
        low, high = visible_range(ranges, i, position, window_left, length)
        begin, end = max(begin, low), min(end, high)
    return begin, end


@register_jitable
def is_visible(ranges, row, position, window_left, token):
    """Return whether a query sees a token of its sequence."""
    if ranges.shape[0] > 0:
        return ranges[row, 0] <= token and token < ranges[row, 1]
    return oldest_visible(position, window_left) <= token and token <= position


@register_jitable
def queries_that_see(ranges, row, count, position, window_left, token):
    """Queries ``[first, last)``, counted from `row`, that may see a token of their sequence.

    No other query sees it. Without ranges all of these do; with ranges the first and the last do.
    """
    first, last = np.int64(0), np.int64(count)
    if ranges.shape[0] == 0:
        first = max(first, np.int64(token - position))
        if window_left >= 0:
            last = min(last, np.int64(token - position + window_left + 1))
        return first, last
    while first < last and not is_visible(ranges, row + first, position, window_left, token):
        first += 1
    while first < last and not is_visible(ranges, row + last - 1, position, window_left, token):
        last -= 1
    return first, last
