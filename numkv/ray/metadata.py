"""What a sharded cache knows of its sequences without asking a shard: lengths, places, token ids, block names."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.prefix import block_digests
from numkv.caches.paged.store import Extra
from numkv.ray.placing import Run, columns_of_tokens, counts, cut, joined

_NO_NAMES = np.empty((0, 32), np.uint8)
_NO_TOKENS = np.empty(0, np.int32)


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
        What the content depends on beside the tokens.
    cached : int
        Tokens that came from the prefix cache when it was added.
    step : int or None
        Number of its open step.
    shared : bool
        Whether its last block may be another's too, or found by what it held before: what comes next may need a copy.
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
        """Committed tokens."""
        return sum(n for _, n in self.runs)


class NamedBlocks(NamedTuple):
    """Blocks of a sequence that are full now, in one column: what a shard registers."""

    seq: int
    first: int
    """Number of the first among the sequence's blocks in the column."""
    names: NDArray[np.uint8]
    tokens: NDArray[np.int32]


def shortened(state: Sequence, length: int, block_size: int) -> Sequence:
    """A sequence with its first tokens only."""
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
    """A sequence with more tokens, and by column the blocks that have names now.

    Parameters
    ----------
    seq : int
        Its number.
    state : Sequence
        The sequence before.
    pieces : list of (int, int)
        Where the new tokens are.
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
    """In which column blocks were registered, by name; of the newest so many.

    Parameters
    ----------
    most : int
        Blocks to know of.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._columns: OrderedDict[bytes, int] = OrderedDict()

    def note(self, names: NDArray[np.uint8], column: int) -> None:
        """Note blocks of a column; another may have evicted what it had of them."""
        for name in names:
            self._columns[name.tobytes()] = column
            self._columns.move_to_end(name.tobytes())
        while len(self._columns) > self._most:
            self._columns.popitem(last=False)

    def column(self, name: bytes) -> int | None:
        """The column that has a block, if any is known to."""
        found = self._columns.get(name)
        if found is not None:
            self._columns.move_to_end(name)
        return found

    def forget(self, columns: set[int]) -> None:
        """Forget what some columns had."""
        self._columns = OrderedDict(
            (name, column) for name, column in self._columns.items() if column not in columns
        )

    def clear(self) -> None:
        """Forget everything."""
        self._columns.clear()


def kept_after_loss(state: Sequence, found: dict[int, int]) -> int:
    """How many of a sequence's first tokens there are, if columns have only so many of their own ones.

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
