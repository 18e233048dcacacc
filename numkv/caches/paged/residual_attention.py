"""Attention of a `PagedKVCache` over tokens in full precision and codes: parts that are merged exactly.

Each part is attention over ranges of one block table; see `numkv.caches.parts`. Which token a query reads where
follows from positions alone (`residual.split`), so that no result depends on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from numkv.arrays import Array
from numkv.attention.options import AttentionOptions
from numkv.attention.sight import Sight
from numkv.caches.paged.residual import split
from numkv.caches.paged.store import BlockStore, Ints, SequenceState
from numkv.caches.parts import Part, attend_to_parts
from numkv.checks import check_integers
from numkv.errors import NotSupported
from numkv.storage.pool import Pool
from numkv.writing.fused_write import Projection

__all__ = ["Queries", "StepInFull", "attend_to_newest"]


class Queries(NamedTuple):
    """Whose queries a call has."""

    positions: Ints
    """Of each in its sequence."""
    lens: Ints
    """Tokens of each query's sequence."""
    first: Ints
    """The first token that each one's sequence still has in full; see `residual.split`."""

    def seen(self, sight: Sight | None, window: int, target: Any) -> Ints:
        """Tokens ``[low, high)`` that each sees."""
        sight = Sight() if sight is None else sight
        for name in ("mask", "alibi_slopes"):
            if getattr(sight, name) is not None:
                raise NotSupported(
                    f"`{name}`: expected None for a cache with tokens in full precision, got one; use a cache without"
                )
        if sight.ranges is not None:
            given = check_integers(target, "ranges", sight.ranges, (len(self.positions), 2))
            ranges: Ints = target.to_host(given).astype(np.int64)
            return ranges.clip(0, self.lens[:, None])
        high = np.minimum(self.positions + 1, self.lens) if sight.causal else self.lens
        low = np.maximum(0, self.positions - window) if window >= 0 else np.zeros_like(high)
        return np.stack([low, high], 1)


def _parts(store: BlockStore, layer: int, tables: Any, queries: Queries, seen: Ints) -> list[Part]:
    """The parts of a layer's attention that any query sees; `tables` gives the table of a group."""
    twin = store.layers.twin(layer)
    residual = store.layers.residual
    assert twin is not None
    assert residual is not None
    (codes, of_codes), (floats, of_floats) = store.place(layer), store.place(twin)
    newest, sinks, older = split(
        residual, store.groups[of_floats].keeps, seen, queries.positions, queries.first
    )
    found: list[Part] = []
    for pool, group, ranges in (
        (floats, of_floats, newest), (floats, of_floats, sinks), (codes, of_codes, older),
    ):  # fmt: skip
        if not found or (ranges[:, 0] < ranges[:, 1]).any():
            found.append(Part(pool, tables(group), store.target.index(ranges, np.int64)))
    return found


def attend_to_newest(
    store: BlockStore, layer: int, states: Sequence[SequenceState], q: Array, lens: Ints, options: AttentionOptions
) -> Any:  # fmt: skip
    """Attend with a query for the newest token of each sequence, in a layer that has a twin."""
    target = store.target
    twin = store.layers.twin(layer)
    assert twin is not None
    group = store.place(twin)[1]
    first = np.array([store.first_stored(state, group) for state in states], np.int64)
    queries = Queries(lens - 1, lens, first)
    seen = queries.seen(options.sight, options.window_left, target)

    def table(group: int) -> Array:
        return target.index(store.block_table(states, group), np.int32)

    starts = target.index(np.arange(len(states) + 1), np.int64)
    parts = _parts(store, layer, table, queries, seen)
    return attend_to_parts(parts, q, target.index(lens, np.int64), starts, options)


class StepInFull:
    """What a step does beside others where tokens are kept in full precision."""

    _store: BlockStore
    _slots: list[Array]
    _tables: list[Array]
    _lens: Array
    _starts: Array
    _positions: Array
    _places: Ints
    _ends: list[int]
    new_lens: Ints

    def _begin_in_full(self, states: Sequence[SequenceState]) -> None:
        """Note what sequences have in full, as the step begins."""
        self._parts_in_full: dict[tuple[int, int, int], list[Part]] = {}
        if self._store.layers.residual is None:
            return
        first = [
            [self._store.first_stored(state, group) for state in states]
            for group in range(len(self._store.groups))
        ]
        self._first_in_full = np.array(first, np.int64).reshape(-1, len(states))

    def _twin_of(self, layer: int) -> tuple[Pool, Array] | None:
        """The pool in which a layer's rows are in full, and the slots of the step's tokens there."""
        twin = self._store.layers.twin(layer)
        if twin is None:
            return None
        pool, group = self._store.place(twin)
        return pool, self._slots[group]

    def _append_in_full(self, layer: int, k: Array, v: Array) -> None:
        """Write checked rows in full precision too."""
        twin = self._twin_of(layer)
        if twin is not None:
            pool, slots = twin
            pool.scatter(*pool.check_rows(k, v, check_finite=False), slots)

    def _write_in_full(self, layer: int, p: Projection) -> None:
        """Write what checked projections give in full precision too; q comes out as it did."""
        twin = self._twin_of(layer)
        if twin is not None:
            pool, slots = twin
            p.scatter(pool, slots, self._positions)

    def _attend_in_full(self, layer: int, q: Array, options: AttentionOptions) -> Any:
        """Attend in a layer that has a twin."""
        store, twin = self._store, self._store.layers.twin(layer)
        assert twin is not None
        group = store.place(twin)[1]
        key = store.place(layer)[1], group, options.window_left
        parts = self._parts_in_full.get(key) if options.sight is None else None
        if parts is None:
            of_token = np.arange(len(self._ends)).repeat(self.new_lens)
            lens = np.array(self._ends, np.int64)[of_token]
            queries = Queries(self._places, lens, self._first_in_full[group][of_token])
            seen = queries.seen(options.sight, options.window_left, store.target)
            parts = _parts(store, layer, self._tables.__getitem__, queries, seen)
            if options.sight is None:
                self._parts_in_full[key] = parts
        # Layers of a group have tables and ranges alike, and rows of their own.
        pools = store.place(twin)[0], store.place(layer)[0]
        own = [part._replace(pool=pools[part.table is self._tables[key[0]]]) for part in parts]
        return attend_to_parts(own, q, self._lens, self._starts, options)
