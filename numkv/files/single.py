"""Caches of one sequence in files: `numkv.KVCache`, `numkv.ContiguousLayer` and `numkv.PagedLayer`.

Private names of these classes that are used here: ``_target``, ``_pool``, ``_pools``, ``_lengths``, ``_length``,
``_stored``, ``_move``, ``_take_room``, ``_give_back`` and ``_full_precision``; of their full-precision tokens
``_pool``, ``_sinks``, ``_end``, ``_kept`` and ``_slots``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.caches.contiguous_layer import ContiguousLayer
from numkv.caches.kv_cache import KVCache
from numkv.caches.paged_layer import PagedLayer
from numkv.caches.single import SingleSequence
from numkv.errors import DimensionMismatch, NumkvError
from numkv.files.container import Container, Tensor
from numkv.files.fields import MOST, Fields, expect
from numkv.files.plan import Options, Plan, Saved, kind_fields, read_kinds, read_rotation
from numkv.files.rows import (
    HostBuffers,
    fill_pool,
    read_head_scales,
    row_bytes,
    row_specs,
    slots_in,
    tensors_of_pool,
)
from numkv.kinds import Kind, kind_of_dtype
from numkv.storage.buffer import Buffer
from numkv.storage.latents import LATENT
from numkv.storage.pool import Pool

CLASSES: dict[str, type[SingleSequence]] = {
    "KVCache": KVCache,
    "ContiguousLayer": ContiguousLayer,
    "PagedLayer": PagedLayer,
}

_SIDES = ("k", "v")


# -- saving


def describe(cache: Any, prefix: str) -> Saved:
    """What a cache is in a file."""
    # Lengths first: whoever appends meanwhile moves rows to where there are as many, and more.
    layers = len(cache._lengths)
    rows = [cache._stored(layer) for layer in range(layers)]
    pool, full = cache._pool, cache._full_precision
    quantised = [
        (0, n) if full is None else full.quantised(layer, n) for layer, n in enumerate(rows)
    ]
    fields = {
        "num_layers": layers,
        "num_kv_heads": cache.num_kv_heads,
        "head_dim": pool.head_dim,
        "head_dim_v": pool.head_dim_v,
        **kind_fields(pool),
        "residual_window": cache.residual_window,
        "num_sink_tokens": cache.num_sink_tokens,
        "rows": rows,
        "begins": [begin for begin, _ in quantised],
        "ends": [end for _, end in quantised],
        **_own_fields(cache),
    }
    tensors: list[Tensor] = []
    for layer, (begin, end) in enumerate(quantised):
        tensors += _quantised_rows(cache, prefix, layer, begin, end)
        if full is not None:
            slots = full._slots(layer, full._kept(begin, end, rows[layer]), begin)
            tensors += tensors_of_pool(f"{prefix}full_", layer, full._pool, slots)
    return Saved(fields, tensors, [(cache, full is not None)])


def _own_fields(cache: Any) -> dict[str, Any]:
    if isinstance(cache, KVCache):
        return {"layout": "contiguous", "max_seq_len": cache.max_seq_len, "length": len(cache)}
    if isinstance(cache, PagedLayer):
        most = len(cache.block_table)
        return {"layout": "paged", "block_size": cache.block_size, "max_blocks_per_seq": most}
    return {"layout": "contiguous", "capacity": cache.capacity}


def _quantised_rows(cache: Any, prefix: str, layer: int, begin: int, end: int) -> list[Tensor]:
    """The rows ``[begin, end)`` of a layer, which are stored in the cache's kind."""
    pool = cache._pools[layer]
    if not isinstance(cache, PagedLayer):
        slots = np.arange(begin, end, dtype=np.int64)
        return tensors_of_pool(prefix, layer, pool, slots, block=layer)
    size, blocks = cache.block_size, cache.block_indices
    if not pool.target.values_on_host:  # the pool may be much larger than the layer
        pool, blocks = _copy_of(pool, blocks), list(range(len(blocks)))
    return tensors_of_pool(prefix, layer, pool, slots_in(blocks, size, begin, end))


def _copy_of(pool: Pool, blocks: list[int]) -> Pool:
    """A pool that has some blocks only."""
    target, copy = pool.target, pool.like(len(blocks))
    source, to = (
        target.index(np.array(x, np.int32), np.int32) for x in (blocks, range(len(blocks)))
    )
    pool.copy_blocks(source, copy, to)
    return copy


# -- loading


class _Sizes:
    """What the header says of a cache of one sequence, checked."""

    def __init__(self, name: str, fields: Fields) -> None:
        self.name = name
        self.layers = fields.integer("num_layers")
        self.heads = fields.integer("num_kv_heads", 1)
        self.dims = fields.integer("head_dim", 1), fields.integer("head_dim_v", 1)
        self.is_latent = name != "KVCache" and fields.text("v_kind") == LATENT
        if self.is_latent:  # V is in the rows of K
            of_k = fields.kind("k_kind")
            self.kinds = of_k, of_k
            expect(self.dims[1] <= self.dims[0], "rows of V are longer than those of K")
        else:
            self.kinds = read_kinds(fields)
        self.sides = _SIDES[: 1 if self.is_latent else 2]
        self.rotate = read_rotation(fields)
        self.window = fields.integer("residual_window")
        self.sinks = fields.integer("num_sink_tokens")
        self.rows = fields.integers("rows", self.layers)
        self.begins = fields.integers("begins", self.layers)
        self.ends = fields.integers("ends", self.layers)
        self.most: int | None
        self.length, self.block_size, self.shares_pool = 0, 0, False
        if name == "KVCache":
            fields.text("layout", ["contiguous"])
            self.most = fields.optional("max_seq_len")
            self.length = fields.integer("length")
            expect(
                all(self.length <= n for n in self.rows),
                f"{self.length} tokens, but rows of {self.rows}",
            )
            expect(bool(self.layers) or not self.length, "tokens, but no layers")
        elif name == "PagedLayer":
            fields.text("layout", ["paged"])
            self.block_size = fields.integer("block_size", 1)
            self.max_blocks = fields.integer("max_blocks_per_seq")
            self.most = self.block_size * self.max_blocks
        else:
            fields.text("layout", ["contiguous"])
            self.most = fields.integer("capacity")
        expect(name == "KVCache" or self.layers == 1, f"a layer has {self.layers} layers")
        expect(
            self.most is None or max(self.rows, default=0) <= self.most,
            f"more rows than {self.most}",
        )
        self._check_ranges()

    def _check_ranges(self) -> None:
        """See that what is quantised, and what is not, fits the full-precision window."""
        capacity = MOST if self.most is None else self.most
        first, ring = min(self.sinks, capacity), min(self.window, capacity)
        scaled = any(kind.has_scales for kind in self.kinds)
        expect(scaled or not self.is_windowed, f"{self.kinds[0]} has no full-precision tokens")
        for begin, end, rows in zip(self.begins, self.ends, self.rows, strict=True):
            expect(
                begin <= end <= rows and begin <= first and rows - end <= ring,
                f"rows [{begin}, {end}) of {rows} are quantised, with {first} and {ring} that are not",
            )

    @property
    def is_windowed(self) -> bool:
        """Whether some tokens are kept in full precision."""
        return bool(self.window or self.sinks)

    @property
    def capacity(self) -> int:
        """Tokens of a layer that there is memory for."""
        return max(self.rows, default=0) if self.most is None else self.most

    @property
    def full_kinds(self) -> tuple[Kind, Kind]:
        """Kinds of the full-precision rows."""
        k, v = (kind_of_dtype(kind.compute) for kind in self.kinds)
        assert k is not None
        assert v is not None
        return k, v

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        count = len(self.sides)
        tokens = self.capacity * row_bytes(self.kinds[:count], self.dims[:count], self.heads)
        if self.is_windowed:
            most = MOST if self.most is None else self.most
            kept = min(self.sinks, most) + min(self.window, most)
            tokens += kept * row_bytes(self.full_kinds, self.dims, self.heads)
        # An empty layer is some objects, too.
        return self.layers * (tokens + 256) + 4 * self.capacity


def plan(name: str, fields: Fields, prefix: str, file: Container, options: Options) -> Plan:
    """Check what the header says of a cache, and how to make it."""
    sizes = _Sizes(name, fields)
    sizes.shares_pool = options.pool is not None
    for layer, (begin, end, rows) in enumerate(
        zip(sizes.begins, sizes.ends, sizes.rows, strict=True)
    ):
        _take(file, prefix, layer, sizes.kinds, sizes, end - begin)
        if sizes.is_windowed:
            _take(file, f"{prefix}full_", layer, sizes.full_kinds, sizes, rows - (end - begin))

    def build(file: Container) -> Any:
        cache = _make(sizes, options)
        try:
            _read(cache, sizes, prefix, file)
        except BaseException:
            if isinstance(cache, PagedLayer):
                cache._give_back(0, cache._shorter(0))
            raise
        return cache

    # Layers of a pool that is given take no memory but the window's.
    return Plan(0 if options.pool is not None else sizes.nbytes, build)


def _take(
    file: Container, prefix: str, layer: int, kinds: tuple[Kind, Kind], sizes: _Sizes, tokens: int
) -> None:
    for side, kind, dim in zip(sizes.sides, kinds, sizes.dims, strict=False):
        for name, spec in row_specs(
            f"{prefix}{side}", str(layer), kind, dim, sizes.heads, tokens
        ).items():
            file.take(name, spec)


def _make(sizes: _Sizes, options: Options) -> Any:
    """An empty cache."""
    k_kind, v_kind = sizes.kinds
    target = options.place.name
    more: dict[str, Any] = {
        "k_kind": k_kind, "v_kind": LATENT if sizes.is_latent else v_kind,
        "residual_window": sizes.window, "num_sink_tokens": sizes.sinks,
    }  # fmt: skip
    dim, dim_v = sizes.dims
    if sizes.name == "KVCache":
        return KVCache(
            sizes.layers, sizes.heads, dim, max_seq_len=sizes.most, target=target, head_dim_v=dim_v,
            rotate=sizes.rotate, **more,
        )  # fmt: skip
    if dim_v != dim:
        more["head_dim_v"] = dim_v
    if sizes.name == "ContiguousLayer":
        return ContiguousLayer(
            sizes.capacity, sizes.heads, dim, target=target, rotate=sizes.rotate, **more
        )
    if options.pool is not None:
        more |= {"pool": options.pool}
    else:
        more |= {"target": target}
    try:
        return PagedLayer(
            sizes.max_blocks, sizes.block_size, sizes.heads, dim, rotate=sizes.rotate, **more
        )
    except DimensionMismatch as error:
        if options.pool is None:
            raise
        raise DimensionMismatch(
            f"`pool`: expected one that agrees with the layer in the file, got {options.pool!r}; {error}",
            error.expected, error.actual,
        ) from error  # fmt: skip


def _read(cache: Any, sizes: _Sizes, prefix: str, file: Container) -> None:
    """Fill an empty cache, and give it its tokens."""
    rows = max(sizes.rows, default=0)
    if isinstance(cache, KVCache):
        if rows > cache.capacity:
            cache._move(rows)
    elif isinstance(cache, PagedLayer):
        cache._take_room(rows)
    full: Any = cache._full_precision
    host = HostBuffers(cache._target)
    for layer, (begin, end, n) in enumerate(zip(sizes.begins, sizes.ends, sizes.rows, strict=True)):
        pool = cache._pools[layer]
        blocks = cache.block_indices if isinstance(cache, PagedLayer) else [layer]
        slots = slots_in(blocks, int(pool.k.shape[2]), begin, end)
        for side in sizes.sides:
            scales = read_head_scales(file, f"{prefix}{side}", str(layer), pool.buffer(side).kind)
            if scales is not None:
                _give_scales(cache, sizes, pool.buffer(side), side, scales)
        fill_pool(file, prefix, layer, pool, slots, host)
        if full is not None:
            slots = full._slots(layer, full._kept(begin, end, n), begin)
            fill_pool(file, f"{prefix}full_", layer, full._pool, slots, host)
            full._sinks[layer], full._end[layer] = begin, end
    host.upload()
    if isinstance(cache, PagedLayer):
        file.verify()  # before the blocks are for good
    cache._lengths[:] = sizes.rows
    if isinstance(cache, KVCache):
        cache._length[0] = sizes.length


def _give_scales(
    cache: Any, sizes: _Sizes, buffer: Buffer, side: str, scales: NDArray[Any]
) -> None:
    """Give a layer the scales of its heads; those of a pool that others use are what they are."""
    if not (isinstance(cache, PagedLayer) and sizes.shares_pool):
        buffer.scales[:] = buffer.target.asarray(scales)
        return
    own = buffer.target.to_host(buffer.scales)
    if not np.array_equal(own, scales):
        raise NumkvError(
            f"`pool`: expected one whose scales of {side} are those of the rows in the file, {scales.tolist()}, got "
            f"{own.tolist()}; call pool.set_scales({side}=…) with these while it is empty"
        )
