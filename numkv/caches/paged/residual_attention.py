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


#: What queries see: newest tokens in full, first ones, codes; None for what nobody sees, but for the first.
_Ranges = tuple[Array | None, Array | None, Array | None]


def _ranges(store: BlockStore, twin: int, queries: Queries, seen: Ints) -> _Ranges:
    """The parts of what queries see in the layer that has this twin, as kernels take them."""
    residual = store.layers.residual
    assert residual is not None
    keeps = store.layers.keeps(twin)
    newest, *others = split(residual, keeps, seen, queries.positions, queries.first)
    index = store.target.index
    sinks, codes = (index(x, np.int64) if (x[:, 0] < x[:, 1]).any() else None for x in others)
    return index(newest, np.int64), sinks, codes


def _parts(store: BlockStore, layer: int, twin: int, tables: Any, ranges: _Ranges) -> list[Part]:
    """The parts of a layer's attention; `tables` gives the table of a group."""
    codes, floats = store.place(layer), store.place(twin)
    return [
        Part(pool, tables(group), of)
        for (pool, group), of in zip((floats, floats, codes), ranges, strict=True)
        if of is not None
    ]


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
    parts = _parts(store, layer, twin, table, _ranges(store, twin, queries, seen))
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
        """Note what sequences have in full as the step begins, and what its queries read where."""
        self._seen_in_full: dict[tuple[int, int], _Ranges] = {}
        store = self._store
        if store.layers.residual is None:
            return
        first = [
            [store.first_stored(state, group) for state in states]
            for group in range(len(store.groups))
        ]
        self._first_in_full = np.array(first, np.int64).reshape(-1, len(states))
        # Now, as the step's tables: calls on any stream come after them.
        made: dict[Any, _Ranges] = {}
        for layer in store.layers.storing:
            twin = store.layers.twin(layer) if layer < store.num_layers else None
            if twin is None:
                continue
            group, window = store.place(twin)[1], store.window_of(layer)
            # Most groups differ in their blocks alone.
            alike = window, store.layers.keeps(twin), self._first_in_full[group].tobytes()
            if alike not in made:
                queries = self._queries_in_full(twin)
                seen = queries.seen(None, window, store.target)
                made[alike] = _ranges(store, twin, queries, seen)
            self._seen_in_full[group, window] = made[alike]

    def _queries_in_full(self, twin: int) -> Queries:
        """The step's queries, as they see a layer that has this twin."""
        of_token = np.arange(len(self._ends)).repeat(self.new_lens)
        lens = np.array(self._ends, np.int64)[of_token]
        first = self._first_in_full[self._store.place(twin)[1]]
        return Queries(self._places, lens, first[of_token])

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
        if options.sight is None:
            ranges = self._seen_in_full[store.place(twin)[1], options.window_left]
        else:
            queries = self._queries_in_full(twin)
            seen = queries.seen(options.sight, options.window_left, store.target)
            ranges = _ranges(store, twin, queries, seen)
        parts = _parts(store, layer, twin, self._tables.__getitem__, ranges)
        return attend_to_parts(parts, q, self._lens, self._starts, options)
