"""`numkv.PagedKVCache` in files: its sequences, each block once, and how much room there is.

Blocks that no sequence has, of released prefixes, are not saved, and neither are pins.

Private names of the cache that are used here: ``_store``, ``_sequences``, ``_next`` and ``_idle``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.prefix import block_digests
from numkv.caches.paged.cache import PagedKVCache
from numkv.caches.paged.prefix_match import register_blocks
from numkv.caches.paged.store import BlockStore, SequenceState
from numkv.caches.paged.swap import Geometry, check_table
from numkv.errors import NotSupported
from numkv.files.container import Container, Spec, Tensor
from numkv.files.fields import Fields, claims, expect
from numkv.files.plan import Options, Plan, Saved
from numkv.files.rows import check_scales
from numkv.files.sequences import block_pieces, packed, unpacked
from numkv.kinds import Kind
from numkv.storage.buffer import Buffer, are_scales
from numkv.storage.latents import LATENT
from numkv.storage.pool import Pool

__all__ = ["CLASSES", "describe", "plan"]

CLASSES = {"PagedKVCache": PagedKVCache}

_SIDES = ("k", "v")
_NONE = np.empty(0, np.int32)
_KEPT = ("length", "tables", "extra", "tokens", "digests", "registered", "starts", "cached")


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
        "next": cache._next,
        "sequences": [
            {
                "sequence": seq,
                "length": state.length,
                "cached": state.cached,
                "tokens": len(state.tokens),
                "extra": packed(state.extra),
                "starts": list(state.starts),
            }
            for seq, state in states.items()
        ],
    }
    tensors: list[Tensor] = []
    for i, state in enumerate(states.values()):
        tensors.append(Tensor.of(f"{i}.tokens", np.asarray(state.tokens, np.int32)))
        for group, table in enumerate(state.tables):
            in_file = np.where(table >= 0, np.searchsorted(ids, table), -1)
            tensors.append(Tensor.of(f"{i}.table.{group}", in_file.astype(np.int32)))
    fills = _fills(store, states.values(), ids)
    for slot, pool in enumerate(store.pools):
        for side, _ in pool.stored:
            tensors += _block_tensors(pool, side, slot, ids, fills)
    for layer in range(store.num_layers):
        pool, _ = store.place(layer)
        for side, buffer in pool.stored:
            if buffer.kind.scales_per == "head":
                scales = np.array(store.target.to_host(buffer.scales))
                tensors.append(Tensor.of(f"{side}_head_scale.{layer}", scales))
    return Saved(fields, tensors, [(cache, True)])


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
            found.append(Tensor(f"{side}{name}.{slot}", np.dtype(like.dtype), shape, pieces))
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
        self.prefix = f"{i}."
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
        for group in range(len(geometry.groups)):
            file.take(f"{i}.table.{group}", Spec(np.dtype(np.int32), (blocks,)))

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
    sizes, k_kind, v_kind, windows, seed = fields.entries("geometry", 5)
    expect(isinstance(sizes, list) and isinstance(windows, list), "expected lists in the geometry")
    with claims("the geometry"):
        geometry = Geometry.read((tuple(sizes), k_kind, v_kind, tuple(windows), seed))
    num_blocks = fields.integer("num_blocks")
    blocks, following = (
        fields.integer("blocks", most=num_blocks),
        fields.integer("next", most=2**62),
    )
    parts = [_Sequence(i, x, geometry, file) for i, x in enumerate(fields.parts("sequences"))]
    numbers = [part.number for part in parts]
    expect(len(set(numbers)) == len(numbers), "a sequence comes twice")
    expect(all(n < following for n in numbers), f"a sequence from {following} on")
    shapes = geometry.buffer_shapes(blocks)
    for slot in range(geometry.layers_per_block):
        for tensor, (dtype, shape) in zip(("k", "v", "k_scale", "v_scale"), shapes, strict=True):
            if shape is not None:
                file.take(f"{tensor}.{slot}", Spec(dtype, shape))
    by_head = geometry.head_scale_shapes() or [0, 0]
    for layer in range(geometry.num_layers):
        for side, count in zip(_SIDES, by_head, strict=True):
            if count:
                file.take(f"{side}_head_scale.{layer}", Spec(np.dtype(np.float32), (count,)))

    def build(file: Container) -> Any:
        states = [part.read(geometry, blocks, file) for part in parts]
        of_k, of_v = geometry.kinds
        dim, dim_v = geometry.dims
        cache: Any = PagedKVCache(
            geometry.num_layers, geometry.num_kv_heads, dim, num_blocks=num_blocks,
            block_size=geometry.block_size, target=options.place.name, head_dim_v=dim_v,
            k_kind=of_k, v_kind=LATENT if geometry.is_latent else of_v, windows=list(windows), rotate=seed is not None,
        )  # fmt: skip
        expect(cache._store.geometry[-1] == seed, f"rows are rotated by seed {seed}")
        ids = cache.blocks.allocate(blocks)
        for slot, pool in enumerate(cache._store.pools):
            _read_blocks(file, slot, pool, ids)
        for layer in range(geometry.num_layers):
            _read_head_scales(file, layer, cache._store.place(layer)[0])
        file.verify()  # before anything can be found by its tokens
        with claims("the sequences"):
            _add(cache, dict(zip(numbers, states, strict=True)), ids)
            cache._next = following
            cache.check()
        return cache

    # Books of a block: its digest, its tokens, references and lists.
    rows = sum(
        np.prod(shape[1:], dtype=object) * dtype.itemsize for dtype, shape in shapes if shape
    )
    of_block = geometry.layers_per_block * rows + 4 * geometry.block_size + 128
    return Plan(int(num_blocks * of_block), build)


def _read_blocks(file: Container, slot: int, pool: Pool, ids: NDArray[np.int32]) -> None:
    """Read the blocks of a layer: straight to where they belong, or by way of host memory."""
    target, n = pool.target, len(ids)
    first = int(ids[0]) if n else 0
    direct = target.values_on_host and np.array_equal(ids, np.arange(first, first + n))
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


def _read_head_scales(file: Container, layer: int, pool: Pool) -> None:
    for side, buffer in pool.stored:
        if buffer.kind.scales_per == "head":
            name = f"{side}_head_scale.{layer}"
            scales = file.array(name)
            check_scales(name, buffer.kind, scales)
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
