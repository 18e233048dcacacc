"""Multi-sequence caches in files: cells, an encoder's rows, and caches of several.

Private names of these classes that are used here: ``_config``, ``_commit_init``, ``_check_ready``, ``_layers``,
``_head_scales``, ``_target``, ``_k_kind``, ``_v_kind``, ``_rotate`` and ``_max_batch``; of `CellCache` also
``_window``, ``_chunk``, ``_memory``, ``_shift`` and ``_cells``, and of its `Cells` ``_sequences``, ``_fresh`` and
``_vacant``; of an `EncoderCache` ``_ready``, ``_position``, ``_stored`` and ``_cached``; of a `WrapperCache`
``_children``, ``_layer_types``, ``_type`` and ``_state``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.caches.multi.config import CacheConfig, Setup
from numkv.caches.multi.encoder import EncoderCache
from numkv.caches.multi.sinks import cells_of
from numkv.caches.multi.variants import CausalCache, ChunkedCache, SlidingWindowCache
from numkv.caches.multi.wrapper import WrapperCache
from numkv.cells import compiled as kernels
from numkv.cells.cells import Cells, _Sequence
from numkv.compaction.key_shift import RopeShift
from numkv.errors import NotSupported
from numkv.files.container import Container, bytes_of
from numkv.files.plan import Plan, Saved, read_kinds, read_rotation
from numkv.files.rows import (
    HostBuffers,
    fill_pool,
    read_head_scales,
    row_bytes,
    row_specs,
    tensors_of_pool,
)
from numkv.kinds import Kind, kind
from numkv.snapshots.fields import Fields, claims, expect
from numkv.snapshots.snapshot import Options, Spec, Tensor
from numkv.storage.pool import Pool

CELLS = {
    "CausalCache": CausalCache,
    "SlidingWindowCache": SlidingWindowCache,
    "ChunkedCache": ChunkedCache,
}
CLASSES = {**CELLS, "EncoderCache": EncoderCache, "WrapperCache": WrapperCache}

_SIDES = ("k", "v")
# Layers have any number; sequences too.
_ANY = 2**63 - 1


# -- saving


def describe(cache: Any, prefix: str) -> Saved:
    """What a cache is in a file."""
    cache._check_ready()
    if isinstance(cache, WrapperCache):
        return _describe_wrapper(cache, prefix)
    return (
        _describe_encoder(cache, prefix)
        if isinstance(cache, EncoderCache)
        else _describe_cells(cache, prefix)
    )


def _describe_wrapper(cache: Any, prefix: str) -> Saved:
    parts = [describe(child, f"{prefix}{i}.") for i, child in enumerate(cache.caches)]
    fields = {
        "layout": "several",
        "layer_types": cache._layer_types,
        "layer_type": cache._type,
        "caches": [
            {"class": type(child).__name__} | part.fields
            for child, part in zip(cache.caches, parts, strict=True)
        ],
    }
    tensors = [tensor for part in parts for tensor in part.tensors]
    return Saved(fields, tensors, [(cache, True), *(x for part in parts for x in part.held)])


def _describe_cells(cache: Any, prefix: str) -> Saved:
    cells: Cells = cache._cells
    used = np.flatnonzero(cells.num_sequences > 0)
    fields = {
        "layout": "cells",
        "window_left": cache._window,
        "chunk_size": cache._chunk,
        "memory": cache._memory,
        "max_batch": cache._max_batch,
        "num_cells": cells.num_cells,
        "cells_memory": cells.memory,
        "cells": len(used),
        "shift": _shift_fields(cache._shift),
        "num_sequences": len(cells.sequences),
        "listed": sum(len(cells.owned(seq)) for seq in cells.sequences),
        "config": _config_fields(cache._config),
        "k_kind": cache._k_kind.name,
        "v_kind": cache._v_kind.name,
        "rotation": 0 if cache._rotate else None,
        "layers": _layer_fields(cache._layers),
    }
    if cache._num_sinks:
        fields["num_sink_tokens"] = cache._num_sinks
    lists = [cells.owned(seq).copy() for seq in cells.sequences]
    tables: dict[str, NDArray[Any]] = {
        "cells": used.astype(np.int32),
        "positions": cells.positions[used],
        "sequences": np.array(cells.sequences, np.int64),
        "lengths": np.array([len(x) for x in lists], np.int64),
        "lists": np.concatenate([np.empty(0, np.int32), *lists]),
        "fresh": np.array([seq in cells._fresh for seq in cells.sequences], np.uint8),
    }
    tensors = [Tensor.of(prefix + name, x) for name, x in tables.items()]
    for layer, pool in cache._layers.items():
        tensors += tensors_of_pool(prefix, layer, pool, used)
    scales = _scale_tensors(cache, prefix)
    return Saved(
        fields | {"set_scales": [x[1:] for x in scales]},
        tensors + [x[0] for x in scales],
        [(cache, True)],
    )


def _describe_encoder(cache: Any, prefix: str) -> Saved:
    ready, config = cache._ready, cache._config
    fields = {
        "layout": "encoder",
        "config": None if config is None else _config_fields(config),
        "permuted_v": ready.permuted_v,
        "k_kind": ready.k_kind.name,
        "v_kind": ready.v_kind.name,
        "rotation": 0 if ready.rotate else None,
        "position": cache._position,
        "stored": cache._stored,
        "cached": cache._cached,
        "layers": [
            x | {"rows": int(pool.k.shape[2])}
            for x, pool in zip(_layer_fields(cache._layers), cache._layers.values(), strict=True)
        ],
    }
    tensors: list[Tensor] = []
    for layer, pool in cache._layers.items():
        tensors += tensors_of_pool(
            prefix, layer, pool, np.arange(int(pool.k.shape[2]), dtype=np.int64)
        )
    scales = _scale_tensors(cache, prefix)
    return Saved(
        fields | {"set_scales": [x[1:] for x in scales]},
        tensors + [x[0] for x in scales],
        [(cache, True)],
    )


def _layer_fields(layers: dict[int, Pool]) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer,
            "num_kv_heads": int(pool.k.shape[1]),
            "head_dim": pool.head_dim,
            "head_dim_v": pool.head_dim_v,
        }
        for layer, pool in layers.items()
    ]


def _config_fields(config: CacheConfig) -> dict[str, Any]:
    return {
        "padding": config.padding,
        "permuted_v": bool(config.permuted_v),
        "mask_dtype": kind(config.mask_dtype).name,
    }


def _scale_tensors(cache: Any, prefix: str) -> list[tuple[Tensor, int, str, int]]:
    """Scales of heads that were set, also for layers that were never put: tensor, layer, side, how many."""
    found = []
    for layer, by_side in cache._head_scales._by_layer.items():
        for side, scales in by_side.items():
            x: NDArray[Any] = np.atleast_1d(scales)
            count = len(x) if scales.ndim else 0  # 0: one for all heads
            found.append((Tensor.of(f"{prefix}set_{side}_scale.{layer}", x), layer, side, count))
    return found


def _shift_fields(shift: Any) -> dict[str, Any] | None:
    """What can be said of a shift, which is code: of RoPE, by how much one position turns a key."""
    if not isinstance(shift, RopeShift):
        return None if shift is None else {"is": "a function"}
    tables = [np.ascontiguousarray(table[1:2]) for table in shift._tables]
    return {
        "is": "rope",
        "rotary_dim": shift.rotary_dim,
        "interleaved": shift._interleaved,
        "one_position": f"{zlib.crc32(bytes_of(tables[1]), zlib.crc32(bytes_of(tables[0]))):08x}",
    }


# -- loading


def plan(name: str, fields: Fields, prefix: str, file: Container, options: Options) -> Plan:
    """Check what the header says of a cache, and how to make it."""
    if name == "WrapperCache":
        return _plan_wrapper(fields, prefix, file, options)
    return (_plan_encoder if name == "EncoderCache" else _plan_cells)(
        name, fields, prefix, file, options
    )


def _plan_wrapper(fields: Fields, prefix: str, file: Container, options: Options) -> Plan:
    fields.text("layout", ["several"])
    parts = fields.parts("caches")
    expect(len(parts) > 0 and prefix.count(".") < 4, "no caches, or caches in caches in caches")
    types = None
    if fields.get("layer_types") is not None:
        types = fields.integers("layer_types", most=len(parts) - 1)
    chosen = fields.integer("layer_type", most=len(parts) - 1)
    shifts = _shifts(options.shift, len(parts))
    plans = []
    for i, (part, shift) in enumerate(zip(parts, shifts, strict=True)):
        child = part.text("class", list(CLASSES))
        mine = options._replace(shift=None if child == "EncoderCache" else shift)
        plans.append(plan(child, part, f"{prefix}{i}.", file, mine))

    def build(file: Container) -> Any:
        children = [child.build(file) for child in plans]
        cache = WrapperCache(*children, layer_types=types)
        cache._state = "ready"
        cache._config = getattr(children[0], "_config", None)
        cache._type = chosen
        return cache

    return Plan(sum(child.nbytes for child in plans), build)


def _shifts(given: Any, count: int) -> Sequence[Any]:
    """The shift of each child: one for all, or a sequence with one for each."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise NotSupported(
            f"`shift`: expected one for all, or one for each of the {count} caches in the file, got {len(given)}"
        )
    return given


def _read_config(fields: Fields) -> CacheConfig:
    part = fields.part("config")
    padding, permuted = part.integer("padding"), part.flag("permuted_v")
    with claims("the configuration"):
        return CacheConfig(padding, permuted, part.kind("mask_dtype"))


class _Layer:
    """A layer of the file."""

    def __init__(self, fields: Fields, rows: int | None) -> None:
        self.number = fields.integer("layer", most=_ANY)
        self.heads = fields.integer("num_kv_heads", 1)
        self.dims = fields.integer("head_dim", 1), fields.integer("head_dim_v", 1)
        self.rows = fields.integer("rows") if rows is None else rows

    def take(self, file: Container, prefix: str, kinds: tuple[Kind, Kind]) -> None:
        """Expect its rows in the file."""
        for side, of, dim in zip(_SIDES, kinds, self.dims, strict=True):
            specs = row_specs(f"{prefix}{side}", str(self.number), of, dim, self.heads, self.rows)
            for name, spec in specs.items():
                file.take(name, spec)

    def read(
        self,
        cache: Any,
        file: Container,
        prefix: str,
        setup: Setup,
        tokens: int,
        slots: NDArray[np.int64],
    ) -> None:
        """Allocate its buffers, for so many tokens, and read rows into some slots."""
        kinds = (setup.k_kind, setup.v_kind)
        shape = (1, self.heads, tokens)
        pool = Pool.allocate(setup.target, shape, *self.dims, *kinds, setup.rotate)
        host = HostBuffers(setup.target)
        for side in _SIDES:
            buffer = pool.buffer(side)
            scales = read_head_scales(file, f"{prefix}{side}", str(self.number), buffer.kind)
            if scales is not None:
                buffer.scales[:] = setup.target.asarray(scales)
        fill_pool(file, prefix, self.number, pool, slots, host)
        host.upload()
        cache._layers[self.number] = pool


def _read_layers(fields: Fields, rows: int | None) -> list[_Layer]:
    layers = [_Layer(part, rows) for part in fields.parts("layers")]
    expect(len({x.number for x in layers}) == len(layers), "a layer comes twice")
    return layers


def _take_scales(
    fields: Fields, prefix: str, file: Container, kinds: tuple[Kind, Kind]
) -> Callable[[Container, Any], None]:
    """Expect scales of heads that were set, and return what gives them to a cache."""
    found = []
    for i, entry in enumerate(fields.entries("set_scales")):
        part = Fields(dict(zip(("layer", "side", "count"), entry, strict=False)) if isinstance(entry, list) else None,
                      f"'set_scales'[{i}]")  # fmt: skip
        layer, side = part.integer("layer", most=_ANY), part.text("side", _SIDES)
        count = part.integer("count")
        name = f"{prefix}set_{side}_scale.{layer}"
        file.take(name, Spec(np.dtype(np.float32), (max(1, count),)))
        expect(
            kinds[side == "v"].scales_per == "head", f"{kinds[side == 'v']} has no scales of heads"
        )
        found.append((name, layer, side, count))

    def give(file: Container, cache: Any) -> None:
        for name, layer, side, count in found:
            x = file.array(name)
            with claims(f"'{name}'"):
                scales = x if count else float(x[0])
                cache._head_scales.set(layer, cache._layers.get(layer), kinds, **{side: scales})

    return give


def _plan_encoder(
    name: str, fields: Fields, prefix: str, file: Container, options: Options
) -> Plan:
    fields.text("layout", ["encoder"])
    kinds, rotate = read_kinds(fields), read_rotation(fields)
    config = None if fields.get("config") is None else _read_config(fields)
    expect(config is None or config.padding <= 1, "padding of an encoder")
    permuted = config is not None and config.permuted_v
    expect(
        fields.flag("permuted_v") is bool(permuted), "permuted_v is not that of the configuration"
    )
    position, stored = fields.integer("position"), fields.integer("stored")
    cached, layers = fields.flag("cached"), _read_layers(fields, None)
    expect(bool(layers) or not cached, "rows of an item, but no layers")
    for layer in layers:
        layer.take(file, prefix, kinds)
    give = _take_scales(fields, prefix, file, kinds)
    _refuse_shift(name, options)

    def build(file: Container) -> Any:
        cache: Any = EncoderCache()
        if config is not None:
            cache.set_config(config)
        k_kind, v_kind = kinds
        cache.init(k_kind, 1, 1, 1, options.place.name, v_kind=v_kind, rotate=rotate)
        setup = Setup(*kinds, 1, 1, 1, options.place, rotate)
        for layer in layers:
            layer.read(
                cache, file, prefix, setup, layer.rows, np.arange(layer.rows, dtype=np.int64)
            )
        give(file, cache)
        cache._position, cache._stored, cache._cached = position, stored, cached
        return cache

    return Plan(sum(x.rows * row_bytes(kinds, x.dims, x.heads) for x in layers), build)


def _refuse_shift(name: str, options: Options) -> None:
    if options.shift is not None:
        raise NotSupported(
            f"`shift`: expected none for a {name}, which moves no keys, got {options.shift!r}"
        )


_TABLES = {
    "cells": np.int32, "positions": np.int32, "sequences": np.int64, "lengths": np.int64,
    "lists": np.int32, "fresh": np.uint8,
}  # fmt: skip


class _Tables:
    """Which cells the sequences of a file own, checked."""

    def __init__(self, fields: Fields, prefix: str, file: Container) -> None:
        self.num_cells = fields.integer("num_cells")
        self.memory = fields.optional("cells_memory")
        self.sinks = fields.integer("num_sink_tokens") if fields.has("num_sink_tokens") else 0
        self.used = fields.integer("cells", most=self.num_cells)
        self._prefix = prefix
        sequences, listed = fields.integer("num_sequences"), fields.integer("listed", most=_ANY)
        counts = {
            "cells": self.used, "positions": self.used, "sequences": sequences,
            "lengths": sequences, "lists": listed, "fresh": sequences,
        }  # fmt: skip
        for name, dtype in _TABLES.items():
            file.take(prefix + name, Spec(np.dtype(dtype), (counts[name],)))

    def read(self, file: Container) -> tuple[Cells, NDArray[np.int64]]:
        """The books, and the cells that are in use."""
        cells, positions, sequences, lengths, lists, fresh = (
            file.array(self._prefix + name) for name in _TABLES
        )
        _expect(cells, (np.diff(cells) > 0).all(), "cells do not rise")
        _expect(cells, ((cells >= 0) & (cells < self.num_cells)).all(), "there is no such cell")
        _expect(positions, (positions >= 0).all(), "a position is negative")
        _expect(sequences, (sequences >= 0).all(), "a sequence is negative")
        expect(len(np.unique(sequences)) == len(sequences), "a sequence comes twice")
        _expect(lengths, (lengths >= 0).all() and int(lengths.sum()) == len(lists), "wrong lengths")
        expect(bool(((lengths >= 0) & (lengths <= len(lists))).all()), "wrong lengths")
        books = cells_of(self.num_cells, self.memory, self.sinks)
        books.positions[cells] = positions
        in_use = np.zeros(self.num_cells, np.bool_)
        in_use[cells] = True
        _expect(lists, ((lists >= 0) & (lists < self.num_cells)).all(), "there is no such cell")
        expect(bool(in_use[lists].all()), "a sequence has a cell that is not in use")
        counts = np.bincount(lists, minlength=self.num_cells)
        expect(bool((counts[cells] > 0).all()), "a cell in use belongs to no sequence")
        for sequence, owned in zip(
            sequences.tolist(), np.split(lists, np.cumsum(lengths)[:-1]), strict=True
        ):
            expect(len(np.unique(owned)) == len(owned), f"sequence {sequence} has a cell twice")
            rising = bool((np.diff(books.positions[owned]) >= 0).all())
            expect(rising, f"the cells of sequence {sequence} are out of order")
            books._sequences[sequence] = _Sequence(owned.copy())
        books.num_sequences[:] = counts
        taken = np.bincount(cells // kernels.SPAN, minlength=len(books._vacant))
        books._vacant -= taken.astype(books._vacant.dtype)
        books._fresh = set(sequences[fresh > 0].tolist())
        return books, cells.astype(np.int64)


def _expect(x: NDArray[Any], holds: Any, reason: str) -> None:
    expect(not len(x) or bool(holds), reason)


def _plan_cells(name: str, fields: Fields, prefix: str, file: Container, options: Options) -> Plan:
    fields.text("layout", ["cells"])
    kinds, rotate, config = read_kinds(fields), read_rotation(fields), _read_config(fields)
    window, chunk = fields.integer("window_left", -1), fields.integer("chunk_size")
    memory, max_batch = fields.optional("memory"), fields.integer("max_batch")
    _check_class(name, window, chunk, memory)
    tables = _Tables(fields, prefix, file)
    expect(not tables.sinks or name == "SlidingWindowCache", f"sink tokens of {name}")
    layers = _read_layers(fields, tables.used)
    for layer in layers:
        layer.take(file, prefix, kinds)
    give = _take_scales(fields, prefix, file, kinds)
    shift = fields.get("shift")
    _check_shift(None if shift is None else fields.part("shift"), shift, options.shift)

    def build(file: Container) -> Any:
        books, used = tables.read(file)
        cache: Any
        if name == "SlidingWindowCache":
            cache = SlidingWindowCache(window, memory, options.shift, tables.sinks)
        elif name == "ChunkedCache":
            cache = ChunkedCache(chunk, options.shift)
        else:
            cache = CausalCache(options.shift)
        setup = Setup(*kinds, 1, tables.num_cells, max_batch, options.place, rotate)
        cache._commit_init((setup, config, books))
        for layer in layers:
            layer.read(cache, file, prefix, setup, tables.num_cells, used)
        give(file, cache)
        return cache

    rows = sum(row_bytes(kinds, x.dims, x.heads) for x in layers)
    return Plan(tables.num_cells * (rows + 40), build)


def _check_class(name: str, window: int, chunk: int, memory: int | None) -> None:
    """See that windows and chunks are those of the class."""
    expect(name == "SlidingWindowCache" or (window == -1 and memory is None), f"a window of {name}")
    expect((chunk > 0) == (name == "ChunkedCache"), f"chunks of {chunk} in {name}")
    expect(memory is None or memory >= window >= 0 or window < 0, "a memory below the window")


def _check_shift(fields: Fields | None, saved: Any, given: Any) -> None:
    """Refuse a shift by another RoPE than that of the keys in the file."""
    if given is not None and not callable(given):
        raise TypeError(f"`shift`: expected a function, got {type(given).__name__}")
    if fields is None:
        return
    if fields.text("is", ["rope", "a function"]) == "rope" and isinstance(given, RopeShift):
        if _shift_fields(given) != saved:
            raise NotSupported(
                f"`shift`: expected the RoPE that the keys in the file are shifted by, {saved}, got "
                f"{_shift_fields(given)}; pass the same model's tables"
            )
