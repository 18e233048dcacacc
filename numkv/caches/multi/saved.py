"""Snapshots of multi-sequence caches: the small values that caches are rebuilt from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numkv.caches.multi.arguments import CacheConfig
from numkv.compaction.key_shift import RopeShift, turns_of
from numkv.errors import NotSupported
from numkv.kinds import Kind
from numkv.kinds import kind as named
from numkv.snapshots.fields import Fields, claims, expect
from numkv.snapshots.saved import (
    Saved,
    Spec,
    entry,
    flag,
    integer,
    optional,
    part,
    parts,
    storage_kind,
)
from numkv.storage.saved import Side, rotation, row_bytes, row_specs

# Layers have any number; sequences too.
_ANY = 2**63 - 1


@dataclass(kw_only=True)
class SavedConfig(Saved):
    """A `CacheConfig`."""

    padding: int = integer()
    permuted_v: bool = flag()
    mask_dtype: Kind = storage_kind()

    def check(self) -> None:
        """See that there is such a configuration."""
        with claims("the configuration"):
            _ = self.config

    @property
    def config(self) -> CacheConfig:
        """The configuration."""
        return CacheConfig(self.padding, self.permuted_v, self.mask_dtype)


def saved_config(config: CacheConfig) -> SavedConfig:
    """Return a snapshot's entries for a configuration."""
    mask = named(config.mask_dtype)
    return SavedConfig(padding=config.padding, permuted_v=config.permuted_v, mask_dtype=mask)


@dataclass(kw_only=True)
class SavedLayer(Saved):
    """A layer that has been put, and its rows where that is not the number of cells."""

    layer: int = integer(most=_ANY)
    num_kv_heads: int = integer(1)
    head_dim: int = integer(1)
    head_dim_v: int = integer(1)
    rows: int | None = integer(missing=None)


class SavedScales(NamedTuple):
    """Scales of the heads of a layer that were set; 0 heads: one scale for all."""

    layer: int
    side: str
    heads: int

    @property
    def tensor(self) -> str:
        """The name of their tensor."""
        return f"set_{self.side}_scale.{self.layer}"


def _set_scales(fields: Fields, name: str, before: dict[str, Any]) -> list[SavedScales]:
    found = []
    for i, given in enumerate(fields.entries(name)):
        named = dict(zip(SavedScales._fields, given, strict=False)) if isinstance(given, list) else None  # fmt: skip
        x = Fields(named, f"{name!r}[{i}]")
        layer, side = x.integer("layer", most=_ANY), x.text("side", ("k", "v"))
        kind = before["v_kind" if side == "v" else "k_kind"]
        expect(kind.scales_per == "head", f"{kind} has no scales of heads")
        found.append(SavedScales(layer, side, x.integer("heads")))
    return found


@dataclass(kw_only=True)
class SavedLayers(Saved):
    """The layers of a cache."""

    k_kind: Kind = storage_kind()
    v_kind: Kind = storage_kind()
    rotation: int | None = rotation()
    layers: list[SavedLayer] = parts(SavedLayer)
    set_scales: list[SavedScales] = entry(_set_scales)

    def check(self) -> None:
        """See that each layer is there once."""
        numbers = {x.layer for x in self.layers}
        expect(len(numbers) == len(self.layers), "a layer comes twice")

    def check_shift(self, given: Any) -> None:
        """Refuse a shift that the cache cannot have."""

    def _sides(self, x: SavedLayer) -> list[Side]:
        return [("k", self.k_kind, x.head_dim), ("v", self.v_kind, x.head_dim_v)]

    def _rows(self, x: SavedLayer) -> int:
        """Rows of a layer in the file."""
        raise NotImplementedError

    def room(self, x: SavedLayer) -> int:
        """Rows that a layer has memory for."""
        raise NotImplementedError

    def specs(self) -> dict[str, Spec]:
        """See `Saved.specs`."""
        found: dict[str, Spec] = {}
        for x in self.layers:
            found |= row_specs(self._sides(x), x.layer, x.num_kv_heads, self._rows(x))
        for scales in self.set_scales:
            found[scales.tensor] = Spec(np.dtype(np.float32), (max(1, scales.heads),))
        return found

    @property
    def nbytes(self) -> int:
        """See `Saved.nbytes`."""
        return sum(self.room(x) * row_bytes(self._sides(x), x.num_kv_heads) for x in self.layers)


@dataclass(kw_only=True)
class SavedEncoder(SavedLayers):
    """An `numkv.EncoderCache`."""

    layout = "encoder"

    config: SavedConfig | None = part(SavedConfig, optional=True)
    permuted_v: bool = flag()
    position: int = integer()
    stored: int = integer()
    cached: bool = flag()

    def check(self) -> None:
        """See `SavedLayers.check`."""
        super().check()
        expect(self.config is None or self.config.padding <= 1, "padding of an encoder")
        permuted = self.config is not None and self.config.permuted_v
        expect(self.permuted_v is permuted, "permuted_v is not that of the configuration")
        expect(bool(self.layers) or not self.cached, "rows of an item, but no layers")
        expect(all(x.rows is not None for x in self.layers), "a layer without rows")

    def _rows(self, x: SavedLayer) -> int:
        return x.rows or 0

    room = _rows


@dataclass(kw_only=True)
class SavedCells(SavedLayers):
    """A cache of cells: which of them are whose, in tables, and the rows of those in use."""

    layout = "cells"

    window_left: int = integer(-1)
    chunk_size: int = integer()
    memory: int | None = optional()
    max_batch: int = integer()
    num_cells: int = integer()
    cells_memory: int | None = optional()
    cells: int = integer(most="num_cells")
    num_sequences: int = integer()
    listed: int = integer(most=_ANY)
    config: SavedConfig = part(SavedConfig)
    shift: dict[str, Any] | None = entry(lambda f, name, x: f.get(name))
    num_sink_tokens: int = integer(missing=0)

    def check(self) -> None:
        """See `SavedLayers.check`; and that there is a window or chunks."""
        super().check()
        windowed = self.window_left >= 0 or self.memory is not None or self.num_sink_tokens > 0
        expect(not (windowed and self.chunk_size), "a window and chunks")
        kept = self.memory is None or self.memory >= self.window_left >= 0 or self.window_left < 0
        expect(kept, "a memory below the window")
        if self.shift is not None:
            Fields(self.shift, "'shift' of the header").text("is", ["rope", "a function"])

    def check_shift(self, given: Any) -> None:
        """Refuse a shift by another RoPE than that of the keys in the file."""
        if given is not None and not callable(given):
            raise TypeError(f"`shift`: expected a function, got {type(given).__name__}")
        saved, wanted = self.shift, turns_of(given)
        if saved is not None and isinstance(given, RopeShift) and saved["is"] == "rope":
            if wanted != saved:
                raise NotSupported(
                    f"`shift`: expected the RoPE that the keys in the file are shifted by, {saved}, got {wanted}; "
                    "pass the same model's tables"
                )

    def specs(self) -> dict[str, Spec]:
        """See `Saved.specs`."""
        counts = {
            "cells": (np.int32, self.cells), "positions": (np.int32, self.cells),
            "sequences": (np.int64, self.num_sequences), "lengths": (np.int64, self.num_sequences),
            "lists": (np.int32, self.listed), "fresh": (np.uint8, self.num_sequences),
        }  # fmt: skip
        tables = {name: Spec(np.dtype(dtype), (n,)) for name, (dtype, n) in counts.items()}
        return tables | super().specs()

    def _rows(self, x: SavedLayer) -> int:
        return self.cells

    def room(self, x: SavedLayer) -> int:
        return self.num_cells

    @property
    def nbytes(self) -> int:
        """See `Saved.nbytes`."""
        return super().nbytes + 40 * self.num_cells
