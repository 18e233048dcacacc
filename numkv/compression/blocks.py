"""The blocks of a `PagedCompressor`: what is stored, whose it is, and where new tokens go.

Which blocks are in use, and how often, is not kept: it follows from the sequences, and is counted where a call needs a
block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numkv.compression.encoded import Encoded
from numkv.errors import DimensionMismatch
from numkv.numbers import check_index

#: Tokens of a block: whole tiles of every kernel.
BLOCK_SIZE = 128

Numbers = np.ndarray[Any, np.dtype[Any]]


NO_BLOCKS: Numbers = np.empty(0, np.int64)


class Sequence(NamedTuple):
    """The blocks of a sequence, as many as it needs, and its tokens; never changed."""

    blocks: Numbers
    length: int

    def slots(self, first: int = 0) -> Numbers:
        """Return where its tokens from `first` on lie."""
        tokens = np.arange(first, self.length)
        slots: Numbers = self.blocks[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE
        return slots


class StoredBlocks(NamedTuple):
    """All that a `PagedCompressor` stores; replaced as a whole, so that a reader has what belongs together."""

    keys: Encoded
    values: Encoded
    sequences: dict[int, Sequence]
    #: The number of the next sequence.
    following: int
    #: Whether a block may belong to two sequences.
    shared: bool

    @property
    def capacity(self) -> int:
        """Tokens that the buffers hold."""
        return int(self.keys.scales.shape[1])

    def references(self) -> Numbers:
        """Return how many sequences each block belongs to."""
        tables = [x.blocks for x in self.sequences.values()]
        used = np.concatenate(tables) if tables else NO_BLOCKS
        return np.bincount(used, minlength=self.capacity // BLOCK_SIZE)


def with_room(
    stored: StoredBlocks,
    seqs: list[int],
    lens: list[int],
    grown: Callable[[StoredBlocks, int], StoredBlocks],
) -> tuple[StoredBlocks, dict[int, Sequence], list[tuple[Numbers, Numbers]]]:
    """Buffers with room for new tokens, the sequences with their new blocks, and tokens to be copied before.

    Where too few blocks are free, `grown` gives buffers with so many more.

    A block that other sequences have too is copied before its sequence writes to it. Readers lose nothing: what has
    been copied still belongs to others.
    """
    wanted: list[tuple[int, int]] = []
    references = stored.references() if stored.shared else None
    if references is not None and references.max(initial=0) < 2:  # the others are gone
        stored, references = stored._replace(shared=False), None
    for seq, n in zip(seqs, lens, strict=True):
        blocks, length = stored.sequences[seq]
        kept = len(blocks)
        if n and references is not None and length % BLOCK_SIZE:
            last = blocks[-1]
            if references[last] > 1:
                references[last] -= 1
                kept -= 1
        wanted.append((kept, -(-(length + n) // BLOCK_SIZE) - kept))
    count = sum(n for _, n in wanted)
    free = NO_BLOCKS
    if count:
        free = np.flatnonzero(stored.references() == 0)[:count]
        if len(free) < count:
            stored = grown(stored, count - len(free))
            free = np.flatnonzero(stored.references() == 0)[:count]
    made: dict[int, Sequence] = {}
    moves: list[tuple[Numbers, Numbers]] = []
    at = 0
    for seq, n, (kept, new) in zip(seqs, lens, wanted, strict=True):
        blocks, length = stored.sequences[seq]
        table = np.concatenate([blocks[:kept], free[at : at + new]]) if new else blocks
        if kept < len(blocks):
            inside = np.arange(length % BLOCK_SIZE)
            moves.append((blocks[kept] * BLOCK_SIZE + inside, table[kept] * BLOCK_SIZE + inside))
        made[seq], at = Sequence(table, length + n), at + new
    return stored, made, moves


def counts_of(name: str, given: Any, num_seqs: int) -> list[int]:
    """A number for each sequence, or one for all."""
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        each = [given] * num_seqs
    else:
        try:
            rest = iter(given)
        except TypeError:
            rest = given
        if rest is given:  # an iterator, or nothing of the kind
            raise TypeError(
                f"`{name}`: expected an integer, or a list of one for each sequence, got {type(given).__name__}"
            )
        each = list(itertools.islice(rest, num_seqs + 1))
    if len(each) != num_seqs:
        raise DimensionMismatch(
            f"`{name}`: expected a number for each of {num_seqs} sequences, got "
            f"{'more' if len(each) > num_seqs else len(each)}",
            expected=num_seqs,
            actual=len(each),
        )
    return [check_index(name, n, 2**40) for n in each]
