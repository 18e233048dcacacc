"""`numkv.PagedKVCache` in files: its sequences, each block once, and how much room there is.

Blocks that no sequence has, of released prefixes, are not saved, and neither are pins.

Private names of the cache that are used here: ``_store``, ``_sequences``, ``_next`` and ``_idle``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.prefix import block_digests
from numkv.caches.paged.cache import PagedKVCache
from numkv.caches.paged.key_bounds import bounds_nbytes
from numkv.caches.paged.memory import block_nbytes
from numkv.caches.paged.prefix_match import register_blocks
from numkv.caches.paged.states import StateSlots
from numkv.caches.paged.store import BlockStore, SequenceState, held
from numkv.caches.paged.swap import Geometry, check_table
from numkv.errors import NotSupported
from numkv.files.container import Container
from numkv.files.plan import Plan, Saved, tensor_of
from numkv.files.rows import check_scales
from numkv.files.sequences import (
    block_pieces,
    packed,
    read_geometry,
    read_states,
    state_tensors,
    take_states,
    unpacked,
)
from numkv.kinds import Kind
from numkv.snapshots.fields import Fields, claims, expect
from numkv.snapshots.snapshot import Options, Spec, Tensor
from numkv.storage.buffer import Buffer, are_scales
from numkv.storage.pool import Pool

CLASSES = {"PagedKVCache": PagedKVCache}

_SIDES = ("k", "v")
_NONE = np.empty(0, np.int32)
_KEPT = ("length", "tables", "extra", "tokens", "digests", "registered", "starts", "cached", "slot")


# -- saving


def describe(cache: Any, prefix: str) -> Saved:
    """What a cache is in a file."""
    store: BlockStore = cache._store
    states = {seq: cache._idle(seq) for seq in cache.sequences}
    ids = np.unique(np.concatenate([np.empty(0, np.int32), *(x.blocks() for x in states.values())]))
    fields = {
        "layout": "paged",
        "geometry": store.geometry,
        "num_blocks": cache.num_blocks,
        "blocks": len(ids),
        "blocks_of_parts": [
            len(_own_blocks(states.values(), groups, ids)) for _, groups in store.parts
        ],
        "next": cache._next,
        "num_states": 0 if cache.states is None else cache.states.num_blocks,
        "checkpoint_every": 0 if store.states is None else store.states.every,
        "sequences": [
            {
                "sequence": seq,
                "length": state.length,
                "cached": state.cached,
                "tokens": len(state.tokens),
                "extra": packed(state.extra),
                "starts": list(state.starts),
                "slot": max(0, state.slot),
            }
            for seq, state in states.items()
        ],
    }
    if cache.key_bounds:  # which are found anew when they are wanted
        fields["key_bounds"] = 1
    tensors: list[Tensor] = []
    for i, state in enumerate(states.values()):
        tensors.append(Tensor.of(f"{i}.tokens", np.asarray(state.tokens, np.int32)))
        if store.states is not None and state.slot >= 0:
            tensors += state_tensors(f"{i}.", store.states.out(state.slot))
        for group, table in enumerate(state.tables):
            in_file = np.where(table >= 0, np.searchsorted(ids, table), -1)
            tensors.append(Tensor.of(f"{i}.table.{group}", in_file.astype(np.int32)))
    fills = _fills(store, states.values(), ids)
    for slot, (pool, groups) in enumerate(store.parts):
        own = _own_blocks(states.values(), groups, ids)
        for side, _ in pool.stored:
            tensors += _block_tensors(pool, side, slot, ids[own], fills[own])
    for layer in store.layers.storing:
        pool, _ = store.place(layer)
        for side, buffer in pool.stored:
            if buffer.kind.scales_per == "head":
                scales = np.array(store.target.to_host(buffer.scales))
                tensors.append(Tensor.of(f"{side}_head_scale.{layer}", scales))
    return Saved(fields, tensors, [(cache, True)])


def _own_blocks(states: Any, groups: Sequence[int], ids: NDArray[Any]) -> NDArray[np.int64]:
    """Which of some blocks belong to groups that have rows in a part."""
    of_groups = [state.tables[group] for state in states for group in groups]
    found: NDArray[np.int64] = np.searchsorted(ids, np.unique(held(of_groups)))
    return found


def _fills(store: BlockStore, states: Any, ids: NDArray[Any]) -> NDArray[np.int64]:
    """How many tokens each block has, of the sequence that has most in it."""
    size = store.block_size
    fills = np.zeros(len(ids), np.int64)
    for state in states:
        for table in state.tables:
            logical = np.flatnonzero(table >= 0)
            at = np.searchsorted(ids, table[logical])
            np.maximum.at(fills, at, np.clip(state.length - logical * size, 0, size))
    return fills


def _block_tensors(
    pool: Pool, side: str, slot: int, ids: NDArray[Any], fills: NDArray[Any]
) -> list[Tensor]:
    """The blocks of one side of a layer, words and the scales of rows."""
    buffer, target, size = pool.buffer(side), pool.target, int(pool.k.shape[2])
    here = ids if target.values_on_host else np.arange(len(ids))

    def copied() -> Buffer:
        """The blocks in a buffer of their own, where the pool is not in host memory."""
        if target.values_on_host:
            return buffer
        copy = buffer.like(len(ids))
        buffer.copy_blocks(target.index(ids, np.int32), copy, target.index(here, np.int32))
        return copy

    def words() -> Any:
        return target.to_host(copied().words)

    def scales() -> Any:
        found = target.to_host(copied().scales)
        return _checked(buffer.kind, found, here, side)

    found = []
    for name, array, has in (("", words, True), ("_scale", scales, buffer.kind.has_scales)):
        if has:
            like = buffer.scales if name else buffer.words
            shape = (len(ids), *map(int, like.shape[1:]))
            pieces = block_pieces(array, here, fills, size)
            found.append(tensor_of(f"{side}{name}.{slot}", np.dtype(like.dtype), shape, pieces))
    return found


def _checked(kind: Kind, scales: NDArray[Any], ids: NDArray[Any], side: str) -> NDArray[Any]:
    """Scales, if those of some blocks are such."""
    for block in ids.tolist():
        if not are_scales(kind, scales[block]):
            raise NotSupported(
                f"`cache`: expected finite scales, got NaN or infinity among those of {side}, of rows that were stored "
                "with check_finite=False; remove their sequences"
            )
    return scales


# -- loading


class _Sequence:
    """What the header says of a sequence."""

    def __init__(self, i: int, fields: Fields, geometry: Geometry, file: Container) -> None:
        self.prefix, self.geometry = f"{i}.", geometry
        self.slot = fields.integer("slot") if geometry.layers.with_states else -1
        self.number = fields.integer("sequence", most=2**62)
        self.length = fields.integer("length")
        self.cached = fields.integer("cached", most=self.length)
        tokens = fields.integer("tokens", most=self.length)
        self.extra = unpacked(fields.get("extra"))
        with claims("extra keys"):
            block_digests(np.empty(0, np.int32), geometry.block_size, self.extra)
        self.starts = fields.integers("starts", len(geometry.groups))
        blocks = -(-self.length // geometry.block_size)
        file.take(f"{i}.tokens", Spec(np.dtype(np.int32), (tokens,)))
        take_states(f"{i}.", geometry, self.length, file)
        for group in range(len(geometry.groups)):
            file.take(f"{i}.table.{group}", Spec(np.dtype(np.int32), (blocks,)))

    def with_slot(
        self, state: SequenceState, cache: Any, file: Container, seen: dict[int, int]
    ) -> SequenceState:
        """The sequence with its states in a slot of the cache, which other sequences may have too."""
        slots = cache._store.states
        if slots is None or not self.length:
            return state
        states = read_states(self.prefix, self.geometry, self.length, file)
        if self.slot in seen:
            slots.books.acquire([seen[self.slot]])
        else:
            seen[self.slot] = int(slots.books.allocate(1)[0])
            slots.put(seen[self.slot], states)
        return state._replace(slot=seen[self.slot])

    def read(self, geometry: Geometry, blocks: int, file: Container) -> SequenceState:
        """Its state, with tables of the blocks as the file counts them."""
        tables = []
        for number, (group, start) in enumerate(zip(geometry.groups, self.starts, strict=True)):
            table = file.array(f"{self.prefix}table.{number}")
            expect(
                bool(((table >= -1) & (table < blocks)).all()), "a table names a block that is none"
            )
            with claims(f"a table of sequence {self.number}"):
                check_table(geometry, group, self.length, np.flatnonzero(table >= 0), start)
            tables.append(table)
        tokens = file.array(f"{self.prefix}tokens")
        none = [np.empty((0, 32), np.uint8)] * len(tables)
        state = SequenceState(
            self.length, tables, self.extra, tokens, none, 0, self.starts, cached=self.cached
        )
        own = state.blocks()
        expect(len(np.unique(own)) == len(own), f"sequence {self.number} has a block twice")
        return state


def plan(name: str, fields: Fields, prefix: str, file: Container, options: Options) -> Plan:
    """Check what the header says of a cache, and how to make it."""
    fields.text("layout", ["paged"])
    given, geometry = read_geometry(fields)
    seed = given[4]
    num_blocks = fields.integer("num_blocks")
    blocks, following = (
        fields.integer("blocks", most=num_blocks),
        fields.integer("next", most=2**62),
    )
    parts = [_Sequence(i, x, geometry, file) for i, x in enumerate(fields.parts("sequences"))]
    numbers = [part.number for part in parts]
    expect(len(set(numbers)) == len(numbers), "a sequence comes twice")
    expect(all(n < following for n in numbers), f"a sequence from {following} on")
    shapes_of_states = geometry.layers.with_states
    more: dict[str, Any] = {}
    most = 2**31 - 4 if shapes_of_states else 0
    num_states = fields.integer("num_states", most=most)
    every = fields.integer("checkpoint_every", min(most, geometry.block_size), most)
    if shapes_of_states:
        more = {"num_states": num_states, "checkpoint_every": every}
        expect(every % geometry.block_size == 0, "checkpoints between blocks")
        slots = {part.slot for part in parts if part.length}
        expect(len(slots) <= num_states, "states in more slots than there are")
    bounded = bool(fields.has("key_bounds") and fields.integer("key_bounds", most=1))
    counts = fields.integers("blocks_of_parts", len(geometry.parts))
    for slot, ((rows, _), count) in enumerate(zip(geometry.parts, counts, strict=True)):
        shapes = geometry.buffer_shapes(rows, count)
        for tensor, (dtype, shape) in zip(("k", "v", "k_scale", "v_scale"), shapes, strict=True):
            if shape is not None:
                file.take(f"{tensor}.{slot}", Spec(dtype, shape))
    for layer, by_head in enumerate(geometry.head_scale_shapes()):
        for side, count in zip(_SIDES, by_head, strict=True):
            if count and geometry.layers.rows[layer] is not None:
                file.take(f"{side}_head_scale.{layer}", Spec(np.dtype(np.float32), (count,)))

    def build(file: Container) -> Any:
        states = [part.read(geometry, blocks, file) for part in parts]
        cache: Any = PagedKVCache(
            num_blocks=num_blocks, block_size=geometry.block_size, target=options.place.name,
            rotate=seed is not None, key_bounds=bounded, **geometry.layers.arguments(), **more,
        )  # fmt: skip
        expect(cache._store.geometry[4] == seed, f"rows are rotated by seed {seed}")
        ids = cache.blocks.allocate(blocks)
        all_blocks = np.arange(blocks)
        for slot, (pool, groups) in enumerate(cache._store.parts):
            shared = len(groups) == cache.num_groups
            own = all_blocks if shared else _own_blocks(states, groups, all_blocks)
            expect(len(own) == counts[slot], f"{counts[slot]} blocks of part {slot}")
            _read_blocks(file, slot, pool, ids[own])
        for layer in geometry.layers.storing:
            _read_head_scales(file, layer, cache._store.place(layer)[0], bounded)
        seen: dict[int, int] = {}
        states = [
            part.with_slot(x, cache, file, seen) for part, x in zip(parts, states, strict=True)
        ]
        file.verify()  # before anything can be found by its tokens
        with claims("the sequences"):
            _add(cache, dict(zip(numbers, states, strict=True)), ids)
            cache._next = following
            cache.check()
        return cache

    # Books of a block: its digest, its tokens, references and lists.
    of_block = block_nbytes(geometry.layers, geometry.groups, geometry.block_size)
    of_block += bounds_nbytes(geometry.layers, geometry.groups) * bounded
    of_states = num_states * StateSlots.slot_nbytes(shapes_of_states)
    return Plan(of_states + num_blocks * (of_block + 4 * geometry.block_size + 128), build)


def _read_blocks(file: Container, slot: int, pool: Pool, ids: NDArray[np.int32]) -> None:
    """Read the blocks of a layer: straight to where they belong, or by way of host memory."""
    target, n = pool.target, len(ids)
    first = int(ids[0]) if n else 0
    in_a_row = np.array_equal(ids, np.arange(first, first + n))
    direct = target.values_on_host and in_a_row and pool.k.flags.c_contiguous
    arrays = []
    for side, buffer in pool.stored:
        for suffix, x, has in (
            ("", buffer.words, True),
            ("_scale", buffer.scales, buffer.kind.has_scales),
        ):
            to = np.empty((0, 0, 0), x.dtype)
            if has:
                shape = (n, *map(int, x.shape[1:]))
                to = x[first : first + n] if direct else np.empty(shape, x.dtype)
                file.fill(f"{side}{suffix}.{slot}", [to])
                if suffix:
                    check_scales(f"{side}{suffix}.{slot}", buffer.kind, to)
            arrays.append(to)
    if not direct:
        k, k_scale, v, v_scale = arrays * 2 if pool.is_latent else arrays
        source = target.index(np.arange(n), np.int32)
        pool.from_host((k, v, k_scale, v_scale)).copy_blocks(
            source, pool, target.index(ids, np.int32)
        )


def _read_head_scales(file: Container, layer: int, pool: Pool, bounded: bool) -> None:
    for side, buffer in pool.stored:
        if buffer.kind.scales_per == "head":
            name = f"{side}_head_scale.{layer}"
            scales = file.array(name)
            check_scales(name, buffer.kind, scales)
            expect(not bounded or bool((scales == 1).all()), "scales of 1 beside bounds of keys")
            buffer.scales[:] = buffer.target.asarray(scales)


def _add(cache: Any, states: dict[int, SequenceState], ids: NDArray[np.int32]) -> None:
    """Give a new cache its sequences; each block has been allocated once, and is shared from the second use on."""
    entries = [table[table >= 0] for state in states.values() for table in state.tables]
    counts = np.bincount(np.concatenate([_NONE, *entries]), minlength=len(ids))
    expect(bool((counts > 0).all()), "a block belongs to no sequence")
    cache.blocks.acquire(np.repeat(ids, counts - 1))
    places = np.append(ids, np.int32(-1))  # -1 stays what it is
    for number, state in states.items():
        fields = {name: getattr(state, name) for name in _KEPT}
        fields["tables"] = [places[table] for table in state.tables]
        cache._sequences[number] = register_blocks(cache._store, SequenceState(**fields))
