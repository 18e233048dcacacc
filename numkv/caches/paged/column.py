"""`Column`: the operations of `numkv.ray` on a `PagedKVCache` with some heads, or some tokens, of a larger cache.

The owner of the larger cache hashes blocks and defines visibility, as a sequence's tokens are in several columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.arrays import Array
from numkv.caches.paged.prefix_match import NewNames, register
from numkv.caches.paged.store import BlockStore, SequenceState
from numkv.caches.paged.tiers import longest_found
from numkv.storage.pool import Pool


class Rows(NamedTuple):
    """Rows of a layer, as attention takes them."""

    pool: Pool
    table: Array
    """Blocks of each sequence."""
    lens: Array
    """Its tokens here."""


class Column(NamedTuple):
    """A cache, as the owner of a larger one uses it; from ``PagedKVCache.__column__``."""

    store: BlockStore
    insert: Callable[[SequenceState, NDArray[np.int32]], int]
    """Gives a sequence its number, and references to blocks that others have."""
    settled: Callable[[int], SequenceState]
    """A sequence whose rows do not move at the moment."""

    @property
    def takes_parts(self) -> bool:
        """Whether layers are such that heads or tokens of them can lie apart."""
        layers = self.store.layers
        return layers.plain and not layers.first.is_latent

    def add(self, tokens: NDArray[np.int32], names: NDArray[np.uint8]) -> int:
        """Add a sequence with the longest prefix of these blocks, by their names, that there is."""
        with longest_found(self.store, tokens, [names]) as match:
            length = match.blocks * self.store.block_size
            no_names = [np.empty((0, 32), np.uint8)]
            state = SequenceState(
                length, match.tables, None, tokens[:0].copy(), no_names, 0, [0], cached=length
            )
            return self.insert(state, state.blocks())

    def register(
        self, seq: int, first: int, names: NDArray[np.uint8], tokens: NDArray[np.int32]
    ) -> None:
        """Let blocks of a sequence, from number `first` on, be found under names."""
        depths = np.arange(first, first + len(names))
        table = self.settled(seq).tables[0]
        register(self.store, [NewNames(table[depths], names, tokens, depths)])

    def rows(self, layer: int, seqs: Sequence[int]) -> Rows:
        """A layer's rows of committed tokens."""
        pool, group = self.store.place(layer)
        states = [self.settled(seq) for seq in seqs]
        lens = np.array([state.length for state in states], np.int64)
        table, index = self.store.block_table(states, group), self.store.target.index
        return Rows(pool, index(table, np.int32), index(lens, np.int64))
