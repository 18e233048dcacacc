"""A sharded cache's own metadata of its sequences: plain numbers, no rows.

A sequence is a list of *runs* ``(column, tokens)``, in order. Every run but the last is a multiple of the block size,
so that a block of a column holds neighbouring tokens of one sequence. New tokens first fill the last block, then go on
in their column to the end of the *stripe*. Each new stripe goes to the column with the most free blocks, the first of
several. Short sequences are therefore placed as a whole, and long ones are spread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.prefix import block_digests
from numkv.caches.paged.store import Extra

Run = tuple[int, int]
Ints = NDArray[np.int64]
_NO_NAMES = np.empty((0, 32), np.uint8)
_NO_TOKENS = np.empty(0, np.int32)


def joined(runs: Iterable[Run], pieces: Iterable[Run] = ()) -> tuple[Run, ...]:
    """Return runs with `pieces` appended; neighbours of one column become one run."""
    found: list[Run] = []
    for column, n in (*runs, *pieces):
        if found and found[-1][0] == column:
            found[-1] = column, found[-1][1] + n
        elif n:
            found.append((column, n))
    return tuple(found)


def cut(runs: Iterable[Run], length: int) -> tuple[Run, ...]:
    """Return the runs of the first tokens."""
    found = []
    for column, n in runs:
        if length <= 0:
            break
        found.append((column, min(n, length)))
        length -= n
    return tuple(found)


def counts(runs: Iterable[Run]) -> dict[int, int]:
    """Return how many tokens each column has."""
    found: dict[int, int] = {}
    for column, n in runs:
        found[column] = found.get(column, 0) + n
    return found


def columns_of_tokens(runs: Iterable[Run]) -> Ints:
    """Return the column of each token."""
    pieces = list(runs)
    columns = np.array([column for column, _ in pieces], np.int64)
    return columns.repeat([n for _, n in pieces])


def number_before(runs: Iterable[Run], column: int, positions: Ints) -> Ints:
    """Return how many of a column's tokens come before each position."""
    ends, own = [0], [0]
    for of, n in runs:
        ends.append(ends[-1] + n)
        own.append(own[-1] + (n if of == column else 0))
    return np.interp(positions, ends, own).astype(np.int64)


def visible(runs: Iterable[Run], column: int, positions: Ints, window: int) -> Ints:
    """Return the visible range of queries among a column's tokens: their own token and earlier ones.

    Parameters
    ----------
    runs : iterable of (int, int)
        The sequence, the queries' own tokens included.
    column : int
        The column.
    positions : int64 array (n,)
        Positions of the queries.
    window : int
        Earlier tokens that a query sees; -1 for all.

    Returns
    -------
    int64 array (n, 2)
        Begin and end, counted among the column's own tokens.
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
        Number of new tokens.
    block_size : int
        Tokens in a block.
    stripe : int
        Tokens in a stripe, a multiple of `block_size`.
    free : list of int
        Free blocks of each column; those that are taken are subtracted, unless there are too few.

    Returns
    -------
    list of (int, int) or None
        Runs to append; None if there are too few free blocks.
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


class Sequence(NamedTuple):
    """A sequence; it is replaced, never changed.

    Attributes
    ----------
    runs : tuple of (int, int)
        Column and tokens of each run, in order.
    columns : frozenset of int
        Columns whose shards know the sequence, with tokens or without.
    tokens : int32 array (n,)
        Ids of the first tokens, as far as they are known.
    names : uint8 array (n, 32)
        Names of the full blocks of `tokens`; only where tokens are divided among columns.
    extra : mapping or None
        Everything that the content depends on in addition to the tokens.
    cached : int
        Tokens that came from the prefix cache when it was added.
    step : int or None
        Number of its open step.
    shared : bool
        Whether its last block may be shared, or found by its earlier content. The next write may then need a copy.
    """

    runs: tuple[Run, ...] = ()
    columns: frozenset[int] = frozenset()
    tokens: NDArray[np.int32] = _NO_TOKENS
    names: NDArray[np.uint8] = _NO_NAMES
    extra: Extra | None = None
    cached: int = 0
    step: int | None = None
    shared: bool = False

    @property
    def length(self) -> int:
        """Return the number of committed tokens."""
        return sum(n for _, n in self.runs)


class NamedBlocks(NamedTuple):
    """Full blocks of a sequence in one column, for its shards to register."""

    seq: int
    first: int
    """Number of the first among the sequence's blocks in the column."""
    names: NDArray[np.uint8]
    tokens: NDArray[np.int32]


def shortened(state: Sequence, length: int, block_size: int) -> Sequence:
    """Return a sequence with its first tokens only."""
    return state._replace(
        runs=cut(state.runs, length),
        tokens=state.tokens[:length],
        names=state.names[: length // block_size],
        cached=min(state.cached, length),
        shared=True,
    )


def after_step(
    seq: int, state: Sequence, pieces: list[Run], ids: NDArray[np.int32] | None, block_size: int, is_split: bool
) -> tuple[Sequence, dict[int, NamedBlocks]]:  # fmt: skip
    """Return a sequence with more tokens, and for each column the newly named blocks.

    Parameters
    ----------
    seq : int
        Its number.
    state : Sequence
        The sequence before.
    pieces : list of (int, int)
        Runs of the new tokens.
    ids : int32 array, optional
        Their ids, if they are known.
    block_size : int
        Tokens in a block.
    is_split : bool
        Whether tokens are divided among columns; else shards name blocks themselves.
    """
    before = state.length
    tokens = state.tokens
    if ids is not None and len(tokens) == before:
        tokens = np.concatenate([tokens, ids])
    runs = joined(state.runs, pieces)
    shared = state.shared and runs == state.runs
    after = state._replace(runs=runs, tokens=tokens, step=None, shared=shared)
    first, full = len(state.names), len(tokens) // block_size
    if not is_split or full <= first:
        return after, {}
    new = tokens[first * block_size : full * block_size]
    parent = state.names[-1] if first else None
    names = block_digests(new, block_size, state.extra if first == 0 else None, parent=parent)
    columns = columns_of_tokens(after.runs)[: full * block_size : block_size]
    found = {}
    for column in sorted(set(columns[first:].tolist())):
        own = np.flatnonzero(columns[first:] == column)
        begin = int((columns[:first] == column).sum())
        blocks = new.reshape(-1, block_size)[own]
        found[column] = NamedBlocks(seq, begin, names[own], blocks)
    return after._replace(names=np.concatenate([state.names, names])), found


class Directory:
    """The column in which blocks were registered, by name, for the newest `most` blocks.

    Parameters
    ----------
    most : int
        Blocks to know of.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._columns: OrderedDict[bytes, int] = OrderedDict()

    def note(self, names: NDArray[np.uint8], column: int) -> None:
        """Record blocks of a column; another column may have evicted its own ones."""
        for name in names:
            self._columns[name.tobytes()] = column
            self._columns.move_to_end(name.tobytes())
        while len(self._columns) > self._most:
            self._columns.popitem(last=False)

    def column(self, name: bytes) -> int | None:
        """Return the column that has a block, if one is known."""
        found = self._columns.get(name)
        if found is not None:
            self._columns.move_to_end(name)
        return found

    def forget(self, columns: set[int]) -> None:
        """Forget the blocks of some columns."""
        self._columns = OrderedDict(
            (name, column) for name, column in self._columns.items() if column not in columns
        )

    def clear(self) -> None:
        """Forget everything."""
        self._columns.clear()


def kept_after_loss(state: Sequence, found: dict[int, int]) -> int:
    """Return how many of a sequence's first tokens remain after columns lost some of theirs.

    Parameters
    ----------
    state : Sequence
        The sequence as it was.
    found : dict of int to int
        Tokens in each column that lost some.
    """
    seen = dict.fromkeys(counts(state.runs), 0)
    kept = 0
    for column, n in state.runs:
        seen[column] += n
        if column in found and seen[column] > found[column]:
            return kept + n - (seen[column] - found[column])
        kept += n
    return kept
