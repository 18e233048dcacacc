"""The memory of a `PagedKVCache`: a buffer for each layer of a group, or one of pages if layers differ.

Layers of one shape share buffers: block b is entry b of each. Otherwise blocks have different rows, so a block is a
*page*, a row of bytes. Every layer of a group has views of its own part of all pages.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numkv import targets
from numkv.blocks.pool import BlockPool
from numkv.caches.paged.groups import LayerGroup, page_bytes
from numkv.caches.paged.key_bounds import BlockBounds
from numkv.caches.paged.layers import LayerRows, Layers
from numkv.caches.paged.states import StateMemory
from numkv.caches.paged.store import BlockStore, Part
from numkv.numbers import check_bytes
from numkv.storage.buffer import Buffer
from numkv.storage.hadamard import Rotation
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target


def block_nbytes(layers: Layers, groups: list[LayerGroup], block_size: int) -> int:
    """Bytes of a block in all buffers, scales of rows included."""
    if not layers.alike:
        return page_bytes(layers, groups, block_size)
    parts = layers.first.parts(block_size)
    of_row = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
    return of_row * len(groups[0].layers)


def new_store(
    target: Target, layers: Layers, groups: list[LayerGroup], blocks: BlockPool, rotate: bool,
    states: StateMemory | None = None, key_bounds: bool = False,
) -> BlockStore:  # fmt: skip
    """Make buffers of zeros for the blocks of a pool.

    Parameters
    ----------
    target : Target
        Where.
    layers : Layers
        What they store.
    groups : list of LayerGroup
        From `groups_of`.
    blocks : BlockPool
        The block pool.
    rotate : bool
        Whether rows are rotated before they are stored.
    states : StateMemory, optional
        Slots for states, where layers keep some.
    key_bounds : bool
        Whether bounds of keys are kept.

    Raises
    ------
    DimensionMismatch
        If a row cannot be stored in its kind, or no memory can hold so many.
    MemoryError
        If this machine's does not.
    """
    places = {
        layer: (slot, number)
        for number, group in enumerate(groups)
        for slot, layer in enumerate(group.layers)
    }
    num_groups, pages, bounds = len(groups), None, None
    if key_bounds:
        bounds = BlockBounds(target, layers, groups, blocks.num_blocks, blocks.block_size)
    if layers.alike:
        rows = layers.first
        shape = (blocks.num_blocks, rows.num_kv_heads, blocks.block_size)
        pools = [
            rows.pool_class.allocate(
                target, shape, rows.head_dim, rows.head_dim_v, rows.k_kind, rows.v_kind, rotate
            )
            for _ in groups[0].layers
        ]
        parts = [Part(pool, tuple(range(num_groups))) for pool in pools]
        layer_pools = {
            layer: pools[slot] if number == 0 else pools[slot].with_own_scales()
            for layer, (slot, number) in places.items()
        }
    else:
        nbytes = page_bytes(layers, groups, blocks.block_size)
        check_bytes({"num_blocks": blocks.num_blocks, "head_dim": nbytes}, 1)
        pages = target.zeros((blocks.num_blocks, nbytes), np.uint8)
        layer_pools, parts = {}, []
        for number, group in enumerate(groups):
            begin = 0
            for layer in group.layers:
                of = layers.rows[layer]
                assert of is not None
                places[layer] = len(parts), number
                layer_pools[layer] = _on_pages(target, pages, begin, of, blocks.block_size, rotate)
                parts.append(Part(layer_pools[layer], (number,)))
                begin += of.offsets(blocks.block_size)[1]
    for layer, source in enumerate(layers.sources):
        if source != layer:
            places[layer], layer_pools[layer] = places[source], layer_pools[source]
    return BlockStore(
        target, layers, groups, parts, blocks, places, layer_pools, pages, states, bounds=bounds
    )


def _head_scales(store: BlockStore) -> list[Array]:
    """Return the scales of heads of all layers that have some."""
    pools = [store.layer_pools[layer] for layer in store.layers.storing]
    sides = [side for pool in pools for _, side in pool.stored]
    return [side.scales for side in sides if side.kind.scales_per == "head"]


def copied(store: BlockStore) -> BlockStore:
    """The same buffers and metadata once more, in memory of their own."""
    target, blocks = store.target, store.blocks.copy()
    every = np.arange(blocks.num_blocks)
    in_use = every[(blocks.ref_count(every) > 0) | blocks.is_cached(every)]
    states = None if store.states is None else store.states.copy()
    rotate, kept = store.parts[0].pool.rotate, store.bounds is not None  # found anew when wanted
    made = new_store(target, store.layers, store.groups, blocks, rotate, states, kept)
    ids = target.index(in_use, np.int32)
    for old, new in zip(store.pools, made.pools, strict=True):
        old.copy_blocks(ids, new, ids)  # blocks of other groups too, as pages are bytes
    for old, new in zip(_head_scales(store), _head_scales(made), strict=True):
        new[:] = target.asarray(np.array(target.to_host(old)))
    made.continuations, made.reports = store.continuations.copy(blocks), store.reports.copy()
    return made


def _arrays(store: BlockStore) -> list[Array]:
    """All that a store on the CPU holds."""
    sides = [side for pool in store.pools for _, side in pool.stored]
    words = [x for side in sides for x in side.by_token()] if store.pages is None else [store.pages]
    return [*words, *_head_scales(store), *([] if store.states is None else store.states.pages)]


def state_of(store: BlockStore) -> dict[str, Any]:
    """Return copies of buffers and metadata on the CPU, for a pickle."""
    own = copied(store)
    slots = own.states
    return {
        "target": own.target.name, "layers": own.layers, "groups": own.groups, "blocks": own.blocks,
        "rotate": own.parts[0].pool.rotate, "key_bounds": own.bounds is not None, "continuations": own.continuations,
        "slots": None if slots is None else (slots.every, slots.block_pool), "arrays": _arrays(own),
    }  # fmt: skip


def store_of(state: dict[str, Any]) -> BlockStore:
    """Rebuild the argument of `state_of`, in buffers with the alignment of kernels."""
    layers, target, slots = state["layers"], targets.get(state["target"]), None
    if state["slots"] is not None:
        every, block_pool = state["slots"]
        slots = StateMemory(target, layers.with_states, block_pool.num_blocks, every, block_pool)
    args = state["groups"], state["blocks"], state["rotate"], slots, state["key_bounds"]
    made = new_store(target, layers, *args)
    for x, content in zip(_arrays(made), state["arrays"], strict=True):
        x[...] = content
    made.continuations = state["continuations"]
    return made


def _on_pages(
    target: Target, pages: Array, begin: int, rows: LayerRows, block_size: int, rotate: bool
) -> Pool:
    """Return the rows of one layer, in all pages from byte `begin` on."""
    views = [
        target.column(pages, begin + offset, shape, np.dtype(dtype))
        for offset, (shape, dtype) in zip(
            rows.offsets(block_size)[0], rows.parts(block_size), strict=True
        )
    ]
    sides = []
    for i, (kind, dim) in enumerate(((rows.k_kind, rows.head_dim), (rows.v_kind, rows.head_dim_v))):
        scales = views[2 * i + 1]
        if not kind.has_scales:
            shape = (rows.num_kv_heads,) if kind.scales_per == "head" else (0, 0, 0)
            scales = target.asarray(np.ones(shape, kind.scale_word))
        rotation = Rotation(dim) if rotate else None
        sides.append(Buffer(target, views[2 * i], scales, kind, rotation))
    return Pool(*sides)
