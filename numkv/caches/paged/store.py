"""The shared state of a `PagedKVCache`'s parts: its buffers, and the state of each sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import BlockPool
from numkv.caches.late_reports import SequenceReports
from numkv.caches.paged.continuations import Continuations
from numkv.caches.paged.groups import LayerGroup
from numkv.caches.paged.key_bounds import BlockBounds
from numkv.caches.paged.layers import Layers
from numkv.caches.paged.states import StateMemory
from numkv.errors import NotSupported
from numkv.snapshots.regions import clear_blocks
from numkv.storage.pool import Pool
from numkv.storage.saved import seed_of
from numkv.targets.base import Target

Ints = NDArray[np.int64]
Extra = Mapping[str, int | str | bytes]


class SequenceState(NamedTuple):
    """The state of one sequence. It is replaced, never changed, so a reader always sees a whole sequence.

    Attributes
    ----------
    length : int
        Committed tokens.
    tables : list of int32 array
        Block table of each layer group; -1 for blocks that were released when the window moved past them.
    extra : mapping or None
        Other inputs that the content depends on.
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
    slot : int
        Where its states lie, where layers keep some; -1 without tokens.
    marks : tuple of (int, bytes)
        Lengths at which there were checkpoints of its states, and their names.
    prompt : int32 array (n,) or None
        Ids that it was added with, until its first step ends, where the prefix cache had some of them.
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
    slot: int = -1
    marks: tuple[tuple[int, bytes], ...] = ()
    prompt: NDArray[np.int32] | None = None

    def blocks(self) -> NDArray[np.int32]:
        """Its blocks, of one group after another."""
        return blocks_in(self.tables)

    def by_depth(self) -> NDArray[np.int32]:
        """Return its blocks in the order of its tokens; the last of the released ones are evicted first."""
        if len(self.tables) == 1:
            return self.blocks()
        return blocks_in([np.stack(self.tables, 1).reshape(-1)])

    def slots(self) -> NDArray[np.int32]:
        """Its slot of states, if it has one."""
        return np.array([self.slot] * (self.slot >= 0), np.int32)

    def in_step(
        self, length: int, tables: list[NDArray[np.int32]], tokens: NDArray[np.int32], reserved: int | None,
        dropped: int,
    ) -> SequenceState:  # fmt: skip
        """Return the sequence as a step begins or ends: `_replace`, in a third of its time."""
        return SequenceState(
            length, tables, self.extra, tokens, self.digests, self.registered, self.starts, reserved,
            self.cached, self.pins, dropped, self.slot, self.marks, self.prompt if length == self.length else None,
        )  # fmt: skip

    def rows_dropped(self) -> int:
        """`dropped` of the state that follows, if that has rows no more that this one has."""
        return (self.dropped | 1) + 1


def blocks_in(tables: Iterable[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return the blocks in some tables, or parts of tables: entries other than -1."""
    entries: NDArray[np.int32] = np.concatenate([_NONE, *tables])
    return entries[entries >= 0]


_NONE = np.empty(0, np.int32)


def widened(table: NDArray[np.int32]) -> NDArray[np.int32]:
    """A block table with columns of -1, up to a multiple of eight: kernels read none past a sequence's length."""
    made = np.full((table.shape[0], -(-table.shape[1] // 8) * 8), -1, np.int32)
    made[:, : table.shape[1]] = table
    return made


class Part(NamedTuple):
    """Buffers, and the groups whose blocks have rows there."""

    pool: Pool
    groups: tuple[int, ...]


@dataclass(eq=False)
class BlockStore:
    """Buffers, the bookkeeping of their blocks, and the layers that use them.

    Attributes
    ----------
    target : Target
        Where the buffers are.
    layers : Layers
        The rows of each layer.
    groups : list of LayerGroup
        Layers by window or chunk; see `groups_of`.
    parts : list of Part
        Buffers: if layers have one shape, those of the i-th layers of all groups, else those of each layer. A block has
        the same number in all of them.
    blocks : BlockPool
        Which blocks are free, owned or cached.
    places : dict of int to tuple of int
        Numbers of the part and the group of each layer; a layer that reads another's rows has that layer's.
    layer_pools : dict of int to Pool
        The pool of each layer: a part's, or if heads have scales, its words with the layer's own scales.
    pages : array or None
        If layers differ, the bytes of all blocks, uint8 ``(num_blocks, n)``; see `numkv.caches.paged.memory`.
    states : StateMemory or None
        Where states lie, where layers keep some.
    tiers : Tiers or None
        Where blocks are looked for that the pool has not, and where full ones go; see `numkv.caches.paged.tiers`.
    bounds : BlockBounds or None
        Bounds of the keys in all blocks, where the cache keeps some.
    reports : SequenceReports
        On CUDA, which sequences have rows that were NaN or infinite.
    """

    target: Target
    layers: Layers
    groups: list[LayerGroup]
    parts: list[Part]
    blocks: BlockPool
    places: dict[int, tuple[int, int]]
    layer_pools: dict[int, Pool]
    pages: Any = None
    states: StateMemory | None = None
    tiers: Any = None
    bounds: BlockBounds | None = None
    reports: SequenceReports = field(init=False)

    @functools.cached_property
    def continuations(self) -> Continuations:
        """Which cached blocks come after which."""
        return Continuations(self.blocks)

    @property
    def pools(self) -> list[Pool]:
        """The buffers of all parts."""
        return [part.pool for part in self.parts]

    @functools.cached_property
    def again(self) -> Any:
        """The replays of steps' repeated calls; see `numkv.targets.base.Target.repeats`."""
        return self.target.repeats()

    def __post_init__(self) -> None:
        self.reports = SequenceReports(self.target)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.layers.own

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.blocks.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, scales included."""
        sides = [side for pool in self.layer_pools.values() for _, side in pool.stored]
        of_states = 0 if self.states is None else self.states.nbytes
        of_states += 0 if self.bounds is None else self.bounds.nbytes
        if self.pages is not None:  # which the words lie in, and scales of rows
            of_heads = {id(x.scales): x.scales for x in sides if x.kind.scales_per == "head"}
            of_pages = int(self.pages.nbytes)
            return of_states + of_pages + sum(int(x.nbytes) for x in of_heads.values())
        arrays = {id(x): x for side in sides for x in (side.words, side.scales)}
        return of_states + sum(int(x.nbytes) for x in arrays.values())

    @property
    def geometry(self) -> tuple[Any, ...]:
        """The properties that a swapped sequence must match: sizes, kinds, windows, and the rotation's seed or None.

        If layers differ, sizes and kinds are those of the first one with rows, and those of all come last.
        """
        heads, dim, dim_v, k_kind, v_kind = self.layers.first.plain()
        seed = seed_of(self.parts[0].pool)
        windows = self.layers.windows[: self.num_layers]
        found = ((heads, self.block_size, dim, dim_v), k_kind, v_kind, windows, seed)
        return found if self.layers.plain else (*found, self.layers.more())

    def place(self, layer: int) -> tuple[Pool, int]:
        """Return the pool of a layer, and the number of its group."""
        pool = self.layer_pools.get(layer)
        if pool is None:
            raise NotSupported(
                f"`layer`: expected one with rows, got layer {layer}, which has none: see `Step.state`"
            )
        return pool, self.places[layer][1]

    @functools.cached_property
    def reading_only(self) -> NDArray[np.bool_]:
        """Which layers have no rows of their own, or have them from the layer whose twin they are."""
        return np.array(
            [rows is None or i >= self.num_layers for i, rows in enumerate(self.layers.rows)]
        )

    @functools.cached_property
    def without_states(self) -> NDArray[np.bool_]:
        """Which layers keep no states."""
        return np.array([not of_layer for of_layer in self.layers.states], np.bool_)

    def refuse_sharing(self, name: str, layer: int) -> None:
        """Refuse to write to a layer that reads another's rows."""
        source = self.layers.sources[layer]
        if source != layer:
            raise NotSupported(
                f"{name}: expected a layer with rows of its own, got layer {layer}, which reads those of layer "
                f"{source}: write there, and only attend here"
            )

    def refuse_chunks(self, name: str, layer: int) -> None:
        """Refuse operations that support windows only."""
        if self.layers.chunks[layer]:
            raise NotSupported(
                f"{name}: expected a layer with a window or without, got layer {layer}, whose queries attend within "
                f"chunks of {self.layers.chunks[layer]} tokens"
            )

    def refuse_residual(self, name: str, remedy: str) -> None:
        """Refuse operations that do not support tokens in full precision."""
        if self.layers.residual is not None:
            self.layers.residual.refuse(name, remedy)

    def refuse_groups(self, name: str, remedy: str) -> None:
        """Refuse what takes rows for stored one by one."""
        if any(self.layers.groups):
            raise NotSupported(
                f"{name}: expected keys that are stored row by row, got some by channel, whose newest tokens lie "
                f"apart until their token group is complete; {remedy}"
            )

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` tokens take in one group."""
        return -(-length // self.block_size)

    def first_needed(self, group: int, length: int) -> int:
        """First block that the newest of `length` tokens attends to."""
        return self.groups[group].first_visible(length) // self.block_size

    def first_stored(self, state: SequenceState, group: int) -> int:
        """Return the first token from which on a group has a sequence's rows, ignoring kept first tokens."""
        kept = self.groups[group].kept_blocks(self.block_size)
        there = state.tables[group][kept:] >= 0
        if not len(there) or there[0]:
            return state.starts[group]
        released = kept + (int(np.argmax(there)) if there.any() else len(there))
        return max(state.starts[group], released * self.block_size)

    def block_table(self, states: Iterable[SequenceState], group: int) -> NDArray[np.int32]:
        """Block tables of sequences in one array, filled up with -1."""
        tables = [state.tables[group] for state in states]
        padded = np.full((len(tables), max((len(t) for t in tables), default=0)), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return padded

    def copy_blocks(self, source: Sequence[int], to: Sequence[int], groups: Sequence[int]) -> None:
        """Copy blocks, each of one group, within the buffers that have rows of it."""
        self.forget_bounds(to)
        if self.layers.alike:
            here, there = (self.target.index(np.array(x), np.int32) for x in (source, to))
            for part in self.parts:
                part.pool.copy_blocks(here, part.pool, there)
            return
        for number in set(groups):
            own = np.flatnonzero(np.array(groups) == number)
            here, there = (self.target.index(np.array(x)[own], np.int32) for x in (source, to))
            for part in self.parts:
                if number in part.groups:
                    part.pool.copy_blocks(here, part.pool, there)

    @functools.cached_property
    def _clear_page(self) -> Any:
        """A page of zeros; None if pages need no clearing."""
        rows = (self.layers.rows[layer] for layer in self.layers.storing)
        scaled = any(x.k_kind.has_scales or x.v_kind.has_scales for x in rows if x is not None)
        if self.pages is None or not scaled:
            return None
        return self.target.zeros((1, int(self.pages.shape[1])), np.uint8)

    def clear(self, ids: NDArray[np.int32]) -> None:
        """Clear blocks that have just been allocated, where bytes of other layers' rows might be no scales."""
        if self._clear_page is not None:
            clear_blocks(self.target, [self.pages], ids, [self._clear_page])

    def forget_bounds(self, ids: Any) -> None:
        """Mark the key bounds of blocks as outdated, as their rows have changed."""
        if self.bounds is not None:
            self.bounds.forget(ids)

    def cut_tables(
        self, tables: list[NDArray[np.int32]], length: int
    ) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
        """Cut the tables of a sequence after `length` tokens; return the kept and the dropped parts."""
        keep = self.blocks_for(length)
        if max(map(len, tables)) <= keep:
            return tables, []
        return [table[:keep].copy() for table in tables], [table[keep:] for table in tables]
