"""How attention on codes goes about a call: its items of work and parts of results, for one sequence or for many.

Each sequence's tokens are split at multiples of the same number from its first token, whatever else the call has. A
call that would keep too many parts at once is done in several rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from numkv.kernels.operations import StoredCodes
from numkv.rows.address import WIDTH

#: The plan of one sequence.
NOTHING = np.empty(0, np.int64)


class Limits(NamedTuple):
    """The limits of a target."""

    #: Tokens of a split.
    split: int
    #: Query rows of a head that an item takes at most.
    rows: int
    #: Numbers of parts that a round keeps at most.
    numbers: int


class Round(NamedTuple):
    """Some queries of a call."""

    #: Its first query and one past its last.
    first: int
    end: int
    #: Items and parts of each kv head.
    items: int
    parts: int
    #: Query rows times tokens, over all q heads: the cost.
    pairs: int
    #: See `numkv.rows.address`.
    plan: Any
    num_seqs: int
    one: tuple[int, ...]


def rounds(
    num_queries: int, heads: tuple[int, int, int], stored: StoredCodes, window_left: int, limits: Limits
) -> Iterator[Round]:  # fmt: skip
    """The rounds of a call of attention.

    Parameters
    ----------
    num_queries : int
        Queries of the call, at least one.
    heads : tuple of int
        Q heads, q heads of a kv head, and the head dim.
    stored : StoredCodes
        The stored codes.
    window_left : int
        Earlier tokens that a query sees, or -1.
    limits : Limits
        The target's.

    Yields
    ------
    Round
        With at least one query.
    """
    if stored.sequences is None:
        return _of_one(num_queries, heads, stored, window_left, limits)
    return _of_several(heads, stored, window_left, limits)


def _of_one(
    num_queries: int, heads: tuple[int, int, int], stored: StoredCodes, window_left: int, limits: Limits
) -> Iterator[Round]:  # fmt: skip
    num_q_heads, group, dim = heads
    split, at_once, numbers = limits
    length = stored.end - stored.begin
    most = max(1, numbers // (num_q_heads * (dim + 2) * (1 + length // split)))
    for first in range(0, num_queries, most):
        end = min(first + most, num_queries)
        seen, count = length - num_queries + end, end - first
        start = 0 if window_left < 0 else max(0, seen - count - window_left) // split * split
        splits, rows = -(-(seen - start) // split), count * group
        yield Round(
            first, end, splits * -(-rows // at_once), splits * rows, count * num_q_heads * (seen - start),
            NOTHING, 1, (0, 0, 0, stored.begin, start, seen, count),
        )  # fmt: skip


def _of_several(
    heads: tuple[int, int, int], stored: StoredCodes, window_left: int, limits: Limits
) -> Iterator[Round]:
    num_q_heads, _, dim = heads
    sequences = stored.sequences
    assert sequences is not None
    lengths, counts = sequences.lengths, sequences.query_lens
    each = num_q_heads * (dim + 2) * (1 + lengths // limits.split)  # numbers of a query's parts
    if int((counts * each).sum()) <= limits.numbers:
        yield _round(np.arange(len(counts)), lengths, counts, 0, heads, stored, window_left, limits)
        return
    which: list[int] = []
    ends: list[int] = []
    taken: list[int] = []
    done, room = 0, limits.numbers
    for s, (count, cost) in enumerate(zip(counts.tolist(), each.tolist(), strict=True)):
        first = 0
        while first < count:
            some = min(count - first, max(room // cost, 0 if which else 1))
            if some:
                first, room = first + some, room - some * cost
                which, ends, taken = [*which, s], [*ends, count - first], [*taken, some]
            else:
                now = np.array([which, ends, taken])
                yield _round(
                    now[0], lengths[now[0]] - now[1], now[2], done, heads, stored, window_left, limits
                )  # fmt: skip
                done, room = done + sum(taken), limits.numbers
                which, ends, taken = [], [], []
    now = np.array([which, ends, taken])
    yield _round(now[0], lengths[now[0]] - now[1], now[2], done, heads, stored, window_left, limits)


def _round(
    which: Any, lengths: Any, counts: Any, first: int, heads: tuple[int, int, int], stored: StoredCodes,
    window_left: int, limits: Limits,
) -> Round:  # fmt: skip
    """Of sequences `which`, the `counts` queries whose last ones see `lengths` tokens."""
    num_q_heads, group, _ = heads
    split, at_once, _ = limits
    sequences = stored.sequences
    assert sequences is not None
    num_seqs = len(which)
    starts = np.zeros_like(lengths)
    if window_left >= 0:
        starts = np.maximum(lengths - counts - window_left, 0) // split * split
    rows = counts * group
    splits = -(-(lengths - starts) // split)
    items, parts = splits * -(-rows // at_once), splits * rows
    numbers = np.empty((num_seqs, WIDTH), np.int64)
    for column, each in enumerate((items, counts, parts)):
        np.cumsum(each, out=numbers[:, column])
        numbers[:, column] -= each
    numbers[:, 3] = sequences.starts[which] + num_seqs * WIDTH
    numbers[:, 4], numbers[:, 5], numbers[:, 6] = starts, lengths, counts
    queries = int(counts.sum())
    return Round(
        first, first + queries, int(items.sum()), int(parts.sum()),
        num_q_heads * int((counts * (lengths - starts)).sum()),
        np.concatenate([numbers.reshape(-1), sequences.blocks]), num_seqs, (0,) * WIDTH,
    )  # fmt: skip
