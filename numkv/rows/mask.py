"""Rows of a mask: the tokens that each query sees, and its position, where causality and a window do not suffice.

A row has the ``COLUMNS`` numbers ``[begin, end, plain_end, position]``, and may go on with words of 32 bits. The query
sees tokens ``[begin, plain_end)`` of its sequence. From `plain_end` to `end` it sees the tokens whose bits are set: bit
``j % 32`` of word ``j // 32`` is token ``plain_end + j``. Without words `end` is `plain_end`.

Bits are a tree's: a query, one of the newest tokens, sees its ancestors. A token of the tree has the position that it
would have if the path to it had been appended alone. So positions are counted in set bits: the distance of token `j`
from the query is the number of bits set from `j` up to the query's own. `position` is the query's in this sense, minus
the part of the path that the window has cut off. Windows and biases use these positions.

Rows of two numbers, ``[begin, end]``, are plain ranges: see `numkv.rows.visible`.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

BEGIN, END, PLAIN_END, POSITION = range(4)
#: Where words of bits begin, and how many numbers a row has without them.
BITS = COLUMNS = 4
_WORD = 32


@register_jitable
def has_bit(rows, row, j):
    """Return whether bit `j` of a row is set."""
    return (rows[row, BITS + (j >> 5)] >> (j & 31)) & 1 != 0


@register_jitable
def _count(x):
    """Set bits of a number below 2^32."""
    x = np.int64(x)
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) & 0xFFFFFFFF) >> 24


@register_jitable
def bits_below(words, row, first, j):
    """Bits of a row that are set below bit `j`, where words begin in column `first`."""
    total = np.int64(0)
    for w in range(j >> 5):
        total += _count(words[row, first + w])
    if j & 31:
        below = np.int64(words[row, first + (j >> 5)]) & ((np.int64(1) << (j & 31)) - 1)
        total += _count(below)
    return total


@register_jitable
def is_seen(rows, row, token):
    """Return whether a query sees a token ``begin <= token < end`` of its sequence."""
    j = token - rows[row, PLAIN_END]
    return j < 0 or has_bit(rows, row, j)


@register_jitable
def position_of(rows, row, token):
    """Return where a token stands that a query sees, by the query's own path."""
    j = token - rows[row, PLAIN_END]
    if j <= 0:
        return np.int64(token)
    return rows[row, PLAIN_END] + bits_below(rows, row, BITS, j)


@register_jitable
def fill_row(rows, row, query, tokens, length, causal, window_left, first, ranges, bits):
    """Write the row of a query, number `query` of its sequence's `tokens`.

    Parameters
    ----------
    rows : int64 array (num_tokens, 2) or (num_tokens, COLUMNS + words)
        The mask.
    row : int
        The query among those of all sequences.
    query, tokens, length : int
        Its number among its sequence's queries, how many these are, and the sequence's tokens.
    causal : int
        Whether a query sees no later tokens.
    window_left : int
        Earlier tokens that a query sees, -1 for all; not with ranges.
    first : int
        The first token that any query sees; 0 with bits.
    ranges : int64 array (num_tokens, 2) or (0, 2)
        What queries see in place of that: cut to ``[0, length)``.
    bits : uint32 array (num_tokens, words) or (0, 0)
        Which of the newest `tokens` tokens queries see.
    """
    position = np.int64(length - tokens + query)
    begin, end = np.int64(first), np.int64(position + 1 if causal else length)
    if window_left >= 0:
        begin = max(begin, np.int64(position - window_left))
    if ranges.shape[0] > 0:
        begin, end = max(np.int64(ranges[row, 0]), np.int64(0)), np.int64(ranges[row, 1])
    end = max(min(end, np.int64(length)), np.int64(0))
    plain_end = end
    words = rows.shape[1] - BITS
    if words > 0:
        base = np.int64(max(length - tokens, 0))
        depth = bits_below(bits, row, 0, min(query, words * _WORD))
        plain_end = base
        begin, cut = np.int64(0), np.int64(0)
        if window_left >= 0:
            begin = max(np.int64(base + depth - window_left), np.int64(0))
            cut = max(np.int64(depth - window_left), np.int64(0))
        lowest, last, left = np.int64(-1), np.int64(-1), cut
        for w in range(words):
            kept = np.int64(0)
            # A decode may have a query for a sequence without tokens: its bits are of none.
            for i in range(min(_WORD, min(tokens, length) - w * _WORD)):
                if (np.int64(bits[row, w]) >> i) & 1 != 0:
                    if left > 0:
                        left -= 1
                    else:
                        kept |= np.int64(1) << i
                        last = w * _WORD + i
                        lowest = last if lowest < 0 else lowest
            rows[row, BITS + w] = kept
        end = base + last + 1
        if begin >= base:
            begin = base + max(lowest, np.int64(0))
        position = base + depth - cut
    rows[row, BEGIN], rows[row, END] = begin, end
    if rows.shape[1] >= COLUMNS:
        rows[row, PLAIN_END], rows[row, POSITION] = plain_end, position
