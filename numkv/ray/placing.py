"""Where tokens are placed among columns, and what is known from that: plain numbers, no rows.

A sequence is a list of *runs* ``(column, tokens)``, in order. Every run but the last is a multiple of the block size,
so that a block of a column holds neighbouring tokens of one sequence. New tokens first fill the last block, then go
on in their column to the end of the *stripe*; each new stripe goes to the column with the most free blocks, the first
of these if there are several. So short sequences are placed as a whole, and long ones are spread.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int]
Ints = NDArray[np.int64]


def joined(runs: Iterable[Run], pieces: Iterable[Run] = ()) -> tuple[Run, ...]:
    """Runs and what comes behind them, neighbours of one column as one run."""
    found: list[Run] = []
    for column, n in (*runs, *pieces):
        if found and found[-1][0] == column:
            found[-1] = column, found[-1][1] + n
        elif n:
            found.append((column, n))
    return tuple(found)


def cut(runs: Iterable[Run], length: int) -> tuple[Run, ...]:
    """The runs of the first tokens."""
    found = []
    for column, n in runs:
        if length <= 0:
            break
        found.append((column, min(n, length)))
        length -= n
    return tuple(found)


def counts(runs: Iterable[Run]) -> dict[int, int]:
    """How many tokens each column has."""
    found: dict[int, int] = {}
    for column, n in runs:
        found[column] = found.get(column, 0) + n
    return found


def columns_of_tokens(runs: Iterable[Run]) -> Ints:
    """The column of each token."""
    pieces = list(runs)
    columns = np.array([column for column, _ in pieces], np.int64)
    return columns.repeat([n for _, n in pieces])


def number_before(runs: Iterable[Run], column: int, positions: Ints) -> Ints:
    """How many of a column's tokens come before each position."""
    ends, own = [0], [0]
    for of, n in runs:
        ends.append(ends[-1] + n)
        own.append(own[-1] + (n if of == column else 0))
    found: Ints = np.interp(positions, ends, own).astype(np.int64)
    return found


def visible(runs: Iterable[Run], column: int, positions: Ints, window: int) -> Ints:
    """Which of a column's tokens queries at some positions see, each itself and earlier ones.

    Parameters
    ----------
    runs : iterable of (int, int)
        The sequence, the queries' own tokens included.
    column : int
        Which column.
    positions : int64 array (n,)
        Of the queries.
    window : int
        Earlier tokens that a query sees; -1 for all.

    Returns
    -------
    int64 array (n, 2)
        First, and end, counted among the column's own tokens.
    """
    runs = list(runs)
    high = number_before(runs, column, positions + 1)
    low = np.zeros_like(high)
    if window >= 0:
        low = number_before(runs, column, np.maximum(positions - window, 0))
    return np.stack([low, high], 1)


def place(
    runs: Iterable[Run], new: int, block_size: int, stripe: int, free: list[int]
) -> list[Run] | None:
    """Choose columns for new tokens of a sequence.

    Parameters
    ----------
    runs : iterable of (int, int)
        The sequence so far.
    new : int
        How many tokens come.
    block_size : int
        Tokens in a block.
    stripe : int
        Tokens in a stripe, a multiple of `block_size`.
    free : list of int
        Free blocks of each column; those that are taken are subtracted, unless there are too few.

    Returns
    -------
    list of (int, int) or None
        Runs that come behind those there are; None if there are too few free blocks.
    """
    runs = list(runs)
    length = sum(n for _, n in runs)
    column = runs[-1][0] if runs else -1
    left, pieces = list(free), []
    while new > 0:
        in_block, in_stripe = length % block_size, length % stripe
        if in_block:
            n = min(new, block_size - in_block)
        else:
            if in_stripe == 0 or left[column] <= 0:
                column = max(range(len(left)), key=lambda i: (left[i], -i))
            n = min(new, stripe - in_stripe, left[column] * block_size)
            if n <= 0:
                return None
            left[column] -= -(-n // block_size)
        pieces.append((column, n))
        length, new = length + n, new - n
    free[:] = left
    return list(joined(pieces))
