"""What the sequences of a `PagedKVCache` lie in, and what is known of each: the state that its parts share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import BlockPool
from numkv.caches.paged.groups import LayerGroup
from numkv.errors import NonFiniteInput
from numkv.storage.pool import Pool
from numkv.targets.base import Target

__all__ = ["BlockStore", "Extra", "Ints", "SequenceState", "held"]

Ints = NDArray[np.int64]
Extra = Mapping[str, int | str | bytes]


class SequenceState(NamedTuple):
    """What is known of one sequence. It is replaced, never changed: who has taken one sees a whole sequence.

    Attributes
    ----------
    length : int
        Committed tokens.
    tables : list of int32 array
        Block table of each layer group; -1 for blocks that were released when the window moved past them.
    extra : mapping or None
        What the content depends on beside the tokens.
    tokens : int32 array (n,)
        Ids of the first tokens, as far as they are known.
    digests : list of uint8 array (n, 32)
        Digests of the full blocks whose token ids are known, for each group.
    registered : int
        Blocks that are registered in the prefix cache.
    starts : list of int
        First token of each group whose rows a compaction kept; the table may begin later.
    reserved : int or None
        Tokens of the open step, if there is one.
    cached : int
        Tokens that came from the prefix cache when the sequence was added.
    pins : tuple of int32 array
        Blocks of each `PagedKVCache.pin`.
    dropped : int
        Another number whenever rows that it had may be gone, or have moved; odd while they move.
    """

    length: int
    tables: list[NDArray[np.int32]]
    extra: Extra | None
    tokens: NDArray[np.int32]
    digests: list[NDArray[np.uint8]]
    registered: int
    starts: list[int]
    reserved: int | None = None
    cached: int = 0
    pins: tuple[NDArray[np.int32], ...] = ()
    dropped: int = 0

    def blocks(self) -> NDArray[np.int32]:
        """Its blocks, of one group after another."""
        return held(self.tables)

    def in_step(
        self, length: int, tables: list[NDArray[np.int32]], tokens: NDArray[np.int32], reserved: int | None,
        dropped: int,
    ) -> SequenceState:  # fmt: skip
        """The sequence as a step begins or ends: `_replace`, in a third of its time."""
        return SequenceState(
            length, tables, self.extra, tokens, self.digests, self.registered, self.starts, reserved,
            self.cached, self.pins, dropped,
        )  # fmt: skip

    def rows_dropped(self) -> int:
        """`dropped` of the state that follows, if that has rows no more that this one has."""
        return (self.dropped | 1) + 1


def held(tables: Iterable[NDArray[np.int32]]) -> NDArray[np.int32]:
    """The blocks in some tables, or parts of tables: what is not -1."""
    parts = list(tables)
    if not parts:
        return _NONE
    entries: NDArray[np.int32] = np.concatenate(parts)
    return entries[entries >= 0]


_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class BlockStore:
    """Buffers, the books of their blocks, and the layers that use them.

    Attributes
    ----------
    target : Target
        Where the buffers are.
    groups : list of LayerGroup
        Layers by window; see `group_layers`.
    pools : list of Pool
        A pool for each layer of a group: a block has the same number in all of them.
    blocks : BlockPool
        Which blocks are free, owned or cached.
    places : dict of int to tuple of int
        Pool and group of each layer, by their numbers.
    layer_pools : dict of int to Pool
        The pool of each layer: one of `pools`, or where heads have scales its words with scales of the layer's own.
    tiers : Tiers or None
        Where blocks are looked for that the pool has not, and where full ones go; see `numkv.caches.paged.tiers`.
    bad : dict of int to tuple
        On CUDA, of sequences that have rows which were NaN or infinite, the first such position, and the error.
    """

    target: Target
    groups: list[LayerGroup]
    pools: list[Pool]
    blocks: BlockPool
    places: dict[int, tuple[int, int]]
    layer_pools: dict[int, Pool]
    tiers: Any = None
    bad: dict[int, tuple[int, NonFiniteInput]] = field(default_factory=dict)

    @functools.cached_property
    def again(self) -> Any:
        """What makes steps' calls that repeat the short way; see `numkv.targets.base.Target.repeats`."""
        return self.target.repeats()

    @functools.cached_property
    def watch(self) -> Any:
        """What kernels report to; see `numkv.targets.base.Target.new_watch`."""
        return self.target.new_watch()

    def refuse_bad(self, seq: int, length: int) -> None:
        """Refuse to go on with a sequence of `length` tokens of which a kernel has found one NaN or infinite."""
        if not self.bad:
            return
        position, error = self.bad.get(seq, (length, None))
        if error is not None and position < length:
            raise NonFiniteInput(
                f"{error}; truncate sequence {seq} to {position} tokens, or roll its step back",
                error.index,
            )
        self.bad.pop(seq, None)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.places)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.blocks.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, scales included."""
        sides = [side for pool in self.layer_pools.values() for _, side in pool.stored]
        arrays = {id(x): x for side in sides for x in (side.words, side.scales)}
        return sum(int(x.nbytes) for x in arrays.values())

    @property
    def geometry(self) -> tuple[Any, ...]:
        """What a swapped sequence must agree with: sizes, kinds, windows, and the seed of the rotation or None."""
        pool = self.pools[0]
        sizes = (int(pool.k.shape[1]), self.block_size, pool.head_dim, pool.head_dim_v)
        windows = tuple(self.window_of(layer) for layer in range(self.num_layers))
        seed = None if pool.k_rotation is None else pool.k_rotation.seed
        return (sizes, pool.k_kind.name, pool.v_storage, windows, seed)

    def place(self, layer: int) -> tuple[Pool, int]:
        """The pool of a layer, and the number of its group."""
        return self.layer_pools[layer], self.places[layer][1]

    def window_of(self, layer: int) -> int:
        """Earlier tokens that a query of a layer attends to, -1 for all."""
        return self.groups[self.places[layer][1]].window

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` tokens take in one group."""
        return -(-length // self.block_size)

    def first_needed(self, group: int, length: int) -> int:
        """First block that the newest of `length` tokens attends to."""
        return self.groups[group].first_visible(length) // self.block_size

    def first_stored(self, state: SequenceState, group: int) -> int:
        """First token of a sequence that a group has the rows of."""
        table = state.tables[group]
        released = int(np.argmax(table >= 0)) if len(table) else 0
        return max(state.starts[group], released * self.block_size)

    def block_table(self, states: Iterable[SequenceState], group: int) -> NDArray[np.int32]:
        """Block tables of sequences in one array, filled up with -1."""
        tables = [state.tables[group] for state in states]
        padded = np.full((len(tables), max((len(t) for t in tables), default=0)), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return padded

    def copy_blocks(self, source: list[int], to: list[int]) -> None:
        """Copy blocks within every pool."""
        source_ids, to_ids = (self.target.index(np.array(x), np.int32) for x in (source, to))
        for pool in self.pools:
            pool.copy_blocks(source_ids, pool, to_ids)

    def cut_tables(
        self, tables: list[NDArray[np.int32]], length: int
    ) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
        """Cut the tables of a sequence after `length` tokens: what stays, and what goes."""
        keep = self.blocks_for(length)
        if max(map(len, tables)) <= keep:
            return tables, []
        return [table[:keep].copy() for table in tables], [table[keep:] for table in tables]

    def copy(self) -> BlockStore:
        """The same once more, in memory of its own."""
        blocks = self.blocks.copy()
        every = np.arange(blocks.num_blocks)
        ids = self.target.index(
            every[(blocks.ref_count(every) > 0) | blocks.is_cached(every)], np.int32
        )
        pools = [pool.copy(ids) for pool in self.pools]
        layer_pools = {}
        for layer, (slot, _) in self.places.items():
            old = self.layer_pools[layer]
            layer_pools[layer] = (
                pools[slot] if old is self.pools[slot] else pools[slot].with_own_scales(old)
            )
        return BlockStore(self.target, self.groups, pools, blocks, self.places, layer_pools)
