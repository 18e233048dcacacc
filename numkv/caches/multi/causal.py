"""`CausalCache`: many sequences in one set of cells: causal, with a sliding window, in chunks.

All sequences share one set of cells, and all layers share the bookkeeping of `numkv.cells.Cells`. A pass begins with
`start_forward`, which assigns each token of a batch a cell. Then each layer puts its rows and attends::

    cache = numkv.CausalCache(shift=numkv.rope_shift(cos, sin))
    cache.init("fp16", max_sequences=4, capacity=4096, max_batch=512)
    cache.start_forward(numkv.Batch(positions, sequences))
    for layer in range(num_layers):
        cache.put(layer, k, v)
        out = cache.decode_attention(layer, q)      # or k, v, mask = cache.get(layer)

A layer's K and V are one block of as many tokens as there are cells, so a cell is a slot.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv.access import Access, drops, reads
from numkv.attention.attend import attend, check_queries
from numkv.attention.mass import attention_mass, mass_of_parts
from numkv.attention.options import CheckedOptions
from numkv.attention.parts import Part, attend_to_parts
from numkv.caches.late_reports import CellReports
from numkv.caches.layer_spec import LayerSpec
from numkv.caches.multi.arguments import (
    MOST_POSITIONS,
    CacheConfig,
    Setup,
    check_indices,
    check_sequence,
)
from numkv.caches.multi.base import Commit
from numkv.caches.multi.forward_pass import UNLIMITED, ForwardPass, View, as_table
from numkv.caches.multi.layered import LayeredCache, Tables
from numkv.caches.multi.saved import SavedCells, saved_config
from numkv.cells.cells import Cells, Change, Rows
from numkv.checks import check_array
from numkv.compaction.key_shift import Shift, plan_shift, turns_of
from numkv.drawing.page import drawn
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.kinds import kind
from numkv.numbers import check_size
from numkv.snapshots.snapshot import Options, Source
from numkv.storage import jit_views
from numkv.storage.buffer import source_dtypes
from numkv.storage.pool import Pool
from numkv.targets.base import Array


@drawn
class CausalCache(LayeredCache):
    """A cache of many sequences over cells: a token attends to its sequence up to itself, a window of it, or its chunk.

    With a window, the next `start_forward` evicts older tokens of all sequences. With chunks it evicts none.

    Parameters
    ----------
    shift : callable, optional
        ``shift(layer, keys, offsets) -> keys`` moves keys ``(n, num_kv_heads, head_dim)`` to other positions, by the
        offset of each, int32 ``(n,)``; see `numkv.rope_shift`. Without it `remove` can only remove a sequence's last
        tokens.
    window_left : int
        Earlier positions that a token attends to; 0: only itself; -1: all.
    memory : int, optional
        Positions that are kept before a sequence's next token, to resume from; `window_left` if None.
    num_sink_tokens : int
        Positions from 0 on that are never evicted. Every later token attends to them in addition to its window:
        attention sinks (Xiao et al., arXiv:2309.17453). Tokens keep their positions.
    chunk_size : int, optional
        Positions of a chunk, within which tokens attend to each other; the first begins at 0. A cache has a window or
        chunks.

    Raises
    ------
    ValueError
        If `window_left` is below -1, `memory` negative, or `chunk_size` below 1; or chunks are combined with a
        window, a memory or sinks. A memory below the window is refused by `init`.
    DimensionMismatch
        If `num_sink_tokens` is negative.
    TypeError
        If they are no integers, or `shift` is no function.

    Notes
    -----
    Threads: several may read at the same time, also during a `put` of another layer. One at a time may `put`, begin a
    pass or change the cache; a second one, and a shift function that calls its own cache, gets `NumkvError`. So does
    a reader that was overtaken by a change, or by a `put` of its layer.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> cache = numkv.CausalCache(window_left=1)
    >>> cache.init("fp32", max_sequences=2, capacity=16, max_batch=4)
    >>> cache.start_forward(numkv.Batch(positions=[0, 1, 2, 0], sequences=[0, 0, 0, 1]))
    >>> cache.put(0, np.ones((4, 2, 8), np.float32), np.ones((4, 2, 8), np.float32))
    >>> k, v, mask = cache.get(0)
    >>> mask
    array([[  0., -inf, -inf, -inf],
           [  0.,   0., -inf, -inf],
           [-inf,   0.,   0., -inf],
           [-inf, -inf, -inf,   0.]], dtype=float32)
    """

    __saved__ = SavedCells

    def __init__(
        self, shift: Shift | None = None, *, window_left: int = -1, memory: int | None = None,
        num_sink_tokens: int = 0, chunk_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if shift is not None and not callable(shift):
            raise TypeError(f"`shift`: expected a function, got {type(shift).__name__}")
        self._shift = shift
        # More positions than there are do no more than all of them, and an int64 may not hold them.
        self._window = min(UNLIMITED, check_size("window_left", window_left, -1))
        self._memory = None if memory is None else min(UNLIMITED, check_size("memory", memory))
        self._num_sinks = min(UNLIMITED, check_size("num_sink_tokens", num_sink_tokens))
        # 0 for no chunks.
        self._chunk = 0
        if chunk_size is not None:
            self._chunk = min(MOST_POSITIONS, check_size("chunk_size", chunk_size, 1))
            if self._window >= 0 or memory is not None or self._num_sinks:
                raise ValueError(
                    f"`chunk_size`: expected a window or chunks, got {self._options()}; give what the model has"
                )
        self._cells = Cells(0)
        self._pass: ForwardPass | None = None
        self._jit: Any = None
        # Those of `arrays`, and the generation that they are of.
        self._tables_given: tuple[int, Tables] | None = None

    # -- what it is

    @property
    def num_sink_tokens(self) -> int:
        """Positions from 0 on that are never evicted nor hidden."""
        return self._num_sinks

    @property
    def num_cells(self) -> int:
        """Capacity in tokens, of all sequences, the current batch included."""
        self._check_ready()
        return self._cells.num_cells

    @property
    @reads
    def num_free(self) -> int:
        """Cells that no sequence owns."""
        self._check_ready()
        return self._cells.num_free

    @property
    @reads
    def sequences(self) -> list[int]:
        """Known sequences; some may have no tokens."""
        self._check_ready()
        return self._cells.sequences

    @reads
    def positions(self, seq: int) -> NDArray[np.int32]:
        """Positions of a sequence that are stored.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        int32 array (n,)
            In order; empty if the sequence is not known.

        Raises
        ------
        IndexError
            If `seq` is outside ``[0, 2**63)``.
        """
        self._check_ready()
        cells = self._cells
        stored: NDArray[np.int32] = cells.positions[cells.owned(check_sequence("seq", seq))]
        return stored

    def _spec(self, pool: Pool) -> LayerSpec:
        return replace(
            super()._spec(pool), window_left=self._window, chunk_size=self._chunk or None
        )

    def __drawn__(self) -> tuple[str, Cells]:
        return self._state, self._cells

    def _describe(self) -> str:
        cells = self._cells
        free = f"num_cells={cells.num_cells}, num_free={cells.num_free}"
        options = self._options()
        return f"{options}{', ' if options else ''}{free}, sequences={len(cells.sequences)}"

    def _options(self) -> str:
        """Return its constructor arguments, except the shift."""
        options = (
            ("window_left", self._window, -1), ("memory", self._memory, None),
            ("num_sink_tokens", self._num_sinks, 0), ("chunk_size", self._chunk, 0),
        )  # fmt: skip
        return ", ".join(f"{name}={x}" for name, x, without in options if x != without)

    # -- for your own kernels

    @property
    def jit(self) -> Any:
        """The jitclass instance over the cells, on the host, for your own ``@njit`` functions; rows are in `arrays`.

        Fields ``positions`` and ``num_sequences``, int32 ``(num_cells,)``; see
        `numkv.storage.jit_views.cells_struct`. They are the cache's own: do not write to them.
        """
        self._check_ready()
        if self._jit is None:
            self._jit = jit_views.make(
                jit_views.cells_struct(), self._cells.positions, self._cells.num_sequences
            )
        return self._jit

    def _tables(self, layer: int) -> Tables:
        generation, found = self._generation, self._tables_given
        if found is None or found[0] != generation:
            cells, now, index = self._cells, self._pass, self._target.index
            table, lens = as_table([cells.owned(seq) for seq in cells.sequences])
            slots = None if now is None or now.reserve or not now.num_tokens else now.slots
            if not table.size:
                table = np.zeros((len(lens), 1), np.int32)
            # Copies, as cells change in place, and yours to write to. None is of length 0.
            made = (
                index(table.copy(), np.int32) if len(lens) else None,
                index(lens, np.int64) if len(lens) else None,
                None if slots is None else index(slots.copy(), np.int64),
            )
            found = self._tables_given = generation, made
        return found[1]

    # -- its life

    def _plan_init(self, setup: Setup) -> Commit:
        config = self._config or CacheConfig()
        window = UNLIMITED if self._window < 0 else self._window
        memory = window if self._memory is None else self._memory
        if memory < window:
            raise ValueError(
                f"`memory`: expected at least window_left={self._window} positions, "
                f"got {memory}; a token could not see its window"
            )
        if memory < UNLIMITED and setup.max_sequences > 1:
            memory = max(memory, window + 1)  # room for a token that ends a sequence
        if memory >= setup.capacity:
            memory = UNLIMITED
        if memory == UNLIMITED:
            needed = setup.max_sequences * setup.capacity
        else:
            needed = setup.max_sequences * (memory + self._num_sinks) + setup.max_batch
        padding = max(1, config.padding)
        num_cells = -(-needed // padding) * padding
        if num_cells >= MOST_POSITIONS:
            raise DimensionMismatch(
                f"`capacity`: expected fewer than 2**31 cells in all, got {num_cells} for {setup.max_sequences} "
                f"sequences of {setup.capacity} tokens; make the cache smaller",
                expected=MOST_POSITIONS - 1,
                actual=num_cells,
            )
        kept = None if memory == UNLIMITED else memory
        cells = Cells(num_cells, kept, self._num_sinks)
        return lambda: self._begin(setup, config, cells)

    def _begin(self, setup: Setup, config: CacheConfig, cells: Cells) -> None:
        self._config, self._cells = config, cells
        self._k_kind, self._v_kind, self._target = setup.k_kind, setup.v_kind, setup.target
        self._max_batch, self._rotate = setup.max_batch, setup.rotate
        self._permuted_v = self._config.permuted_v
        self._view = View(
            self._cells, self._target, self._window, self._chunk, max(1, self._config.padding),
            kind(self._config.mask_dtype), self._num_sinks,
        )  # fmt: skip
        self._state = "ready"
        self._again = self._target.repeats()
        self._reports = CellReports(self._target, self._cells)

    def _close(self) -> None:
        super()._close()
        self._forget()
        self._cells = Cells(0)

    def _clear(self) -> None:
        self._reports.clear()
        self._cells.clear()
        self._pass = None
        self._changed()

    def _forget(self) -> None:
        """Drop cached results that depend on the cells and the layers."""
        self._again = self._target.repeats() if self._state == "ready" else None
        self._pass = self._jit = self._tables_given = None

    def _values(self) -> dict[str, Any]:
        cells, config = self._cells, self._config
        assert config is not None
        lists = [len(cells.owned(seq)) for seq in cells.sequences]
        return {
            "window_left": self._window, "chunk_size": self._chunk, "memory": self._memory,
            "num_sink_tokens": self._num_sinks, "max_batch": self._max_batch, "num_cells": cells.num_cells,
            "cells_memory": cells.memory, "cells": cells.num_cells - cells.num_free, "num_sequences": len(lists),
            "listed": sum(lists), "shift": turns_of(self._shift), "config": saved_config(config),
        }  # fmt: skip

    def _books(self) -> dict[str, NDArray[Any]]:
        return self._cells.tables()

    def _slots(self, pool: Pool) -> NDArray[np.int64]:
        return np.flatnonzero(self._cells.num_sequences)

    @classmethod
    def _empty(cls, saved: SavedCells, source: Source, options: Options) -> Self:
        cells = Cells(saved.num_cells, saved.cells_memory, saved.num_sink_tokens)
        cells.resume(**{name: source.array(name) for name in cells.tables()})
        made = cls(
            options.shift, window_left=saved.window_left, memory=saved.memory,
            num_sink_tokens=saved.num_sink_tokens, chunk_size=saved.chunk_size or None,
        )  # fmt: skip
        kinds, rotate = (saved.k_kind, saved.v_kind), saved.rotation is not None
        setup = Setup(*kinds, 1, saved.num_cells, saved.max_batch, options.place, rotate)
        made._begin(setup, saved.config.config, cells)
        return made

    def _copied(self, access: Access) -> Self:
        new = super()._copied(access)
        new._forget()
        new._cells = self._cells.copy()
        new._reports = self._reports.copy(new._cells)
        new._view = self._view._replace(cells=new._cells)
        new._pass = None if self._pass is None else self._pass.over(new._view)
        return new

    def _pickled(self) -> dict[str, Any]:
        try:
            pickle.dumps(self._shift)
        except Exception as error:
            raise NumkvError(
                f"`shift`: expected what can be pickled with the cache, got {self._shift!r} ({error}); take a function "
                "of a module, or numkv.rope_shift"
            ) from error
        return super()._pickled()

    def _refuse_reported(self) -> None:
        if self._state == "ready":
            self._reports.collect(wait=True)
            self._reports.refuse(self._cells.sequences)

    def _check(self) -> None:
        self._cells.check()
        stored = np.flatnonzero(self._cells.num_sequences)
        self._check_layers(self._layers, self._cells.num_cells, stored)
        now = self._pass
        if now is not None and len(now.slots) != len(now.rows.positions):
            raise NumkvError(
                f"check: a pass of {len(now.rows.positions)} tokens has {len(now.slots)} cells"
            )

    # -- changes

    def _plan_forward(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> Commit:
        plan, cells = None, np.full(len(rows.positions), -1, np.int64)
        if not reserve:
            self._reports.refuse(rows.sequences)
            plan = self._cells.plan_forward(rows)
            cells = plan.cells
        new = ForwardPass(self._view, rows, cells, reserve=reserve)

        def commit() -> None:
            self._pass = new
            if plan is not None:
                self._reports.give(plan.cells)
                self._cells.commit_forward(plan)
            self._changed()

        return commit

    def _plan_change(self, cells: Callable[[], None], moves: list[Callable[[], object]]) -> Commit:
        """Plan a change of cells, then moves of rows; the pass continues with its remaining tokens."""
        after = None if self._pass is None else self._pass.over(self._view)

        def commit() -> None:
            cells()
            for move in moves:
                move()
            # Last, so that concurrent results belong to the earlier pass.
            self._pass = after
            self._changed()

        return commit

    def _plan_shift(self, change: Change, begin: str, remedy: str) -> Commit:
        """Plan a change of cells, some of whose keys have to turn; the rest is for the error if they cannot."""
        moves: list[Callable[[], object]] = []
        for cells, offset in change.moves:
            if self._shift is None:
                raise NotSupported(
                    f"{begin} would have to move, and this cache has no shift to turn their keys; {remedy} the cache "
                    "with shift=numkv.rope_shift(cos, sin)"
                )
            moves += plan_shift(self._shift, self._layers, cells, offset, max(1, self._max_batch))
        return self._plan_change(lambda: self._cells.commit_change(change), moves)

    def _plan_remove(self, seq: int, begin: int, end: int | None) -> Commit:
        removal = self._cells.plan_removal(seq, begin, end)
        moved = sum(len(cells) for cells, _ in removal.moves)
        what = f"`end`: the {moved} tokens of sequence {seq} from position {end} on"
        return self._plan_shift(removal, what, "remove to the end, or make")

    def _plan_compact(self, seq: int, keep: NDArray[np.int64]) -> Commit:
        compaction = self._cells.plan_compaction(seq, keep)
        moved = sum(len(cells) for cells, _ in compaction.moves)
        return self._plan_shift(compaction, f"`keep`: {moved} tokens of sequence {seq}", "make")

    def _plan_copy(self, src: int, dst: int, length: int) -> Commit:
        prefix = self._cells.plan_copy(src, length)
        return self._plan_change(lambda: self._cells.commit_copy(dst, prefix), [])

    def _can_resume(self, seq: int, pos: int) -> bool:
        return self._cells.can_resume(seq, pos, self._window)

    @drops
    def set_causal(self, except_indices: Iterable[int] = ()) -> None:
        """Let some tokens of this batch attend to later ones, until the next `start_forward`.

        Only causality is lifted: windows, chunks and sequences still mask tokens.

        Parameters
        ----------
        except_indices : iterable of int
            The tokens, by their index in the batch.

        Raises
        ------
        IndexError
            If there is no such token in the batch.
        DimensionMismatch, TypeError
            If they are no integers, or go on for ever.
        NumkvError
            Before `start_forward`.
        """
        now = self._current()
        excepted = check_indices("except_indices", except_indices, now.num_tokens)
        self._pass = now.with_causality_lifted(excepted)

    # -- a pass

    def _current(self) -> ForwardPass:
        now = self._pass
        if now is None:
            self._check_ready()
            raise NumkvError(f"{type(self).__name__}: used before start_forward; call it first")
        return now

    def _put(self, layer: int, k: Any, v: Any, check_finite: bool) -> None:
        now, again = self._current(), self._again
        if again is None or now.reserve or layer not in self._layers:
            self._put_here(now, layer, k, v, check_finite)
            return
        what, pool = ("put", layer, check_finite, len(now.slots)), self._layers[layer]
        now.slots_on_target()  # here, so that what is written down below launches and nothing else
        call = again.find(what, (k, v), pool.k)
        puts = self._puts
        if call.replay is not None:
            own = (again.pointer(now.slots_on_target()),)
            self._reports.refuse(now.rows.sequences)
            marker = self._reports.marker(self._reports.mark(now.slots))
            look = self._reports.look_again(call.replay.note, marker)
            try:  # nobody reads the layer meanwhile
                puts[layer] = puts.get(layer, 0) | 1
                if call.run(own, (0, look)) is None:
                    return
            finally:
                puts[layer] = (puts[layer] | 1) + 1
        call.long(
            lambda: self._put_here(now, layer, k, v, check_finite), lambda: (now.slots_on_target(),),
            lambda: self._reports.latest,
        )  # fmt: skip

    def _put_here(
        self, now: ForwardPass, layer: int, k: Any, v: Any, check_finite: bool
    ) -> None:  # fmt: skip
        """Put rows of a pass on the stream of the call."""
        k = self._target.accept(k, "k")
        if len(k.shape) == 3:
            _check_batch(now, "k", "a row", k, "; pass all tokens of start_forward")
        pool = self._layers.get(layer)
        if pool is None:
            pool = self._make_layer(layer, k, v)
        k, v = pool.check_rows(k, v, check_finite=check_finite and pool.looks_first)
        self._layers.setdefault(layer, pool)
        if now.reserve:
            return
        self._reports.refuse(now.rows.sequences)
        self._reports.look_for_nothing()
        marker = self._reports.marker(self._reports.mark(now.slots))
        look = pool.watch(k, v, marker) if check_finite else 0
        slots, puts = now.slots_on_target(), self._puts
        try:  # nobody reads the layer meanwhile
            puts[layer] = puts.get(layer, 0) | 1
            pool.scatter(k, v, slots, look)
        finally:
            puts[layer] = (puts[layer] | 1) + 1

    def _make_layer(self, layer: int, k: Any, v: Any) -> Pool:
        """Allocate buffers for rows of this shape."""
        target, kinds = self._target, (self._k_kind, self._v_kind)
        shape = ("num_tokens", "num_kv_heads", "head_dim")
        k = check_array(target, "k", k, source_dtypes(kinds[0]), shape)
        heads = int(k.shape[1])
        v = check_array(
            target, "v", v, source_dtypes(kinds[1]), ("num_tokens", heads, "head_dim_v")
        )
        room = (1, heads, self._cells.num_cells)
        return self._new_pool(layer, room, (int(k.shape[2]), int(v.shape[2])))

    def _set_scales(self, layer: int, k: Any, v: Any) -> None:
        owned = self._cells.num_cells - self._cells.num_free
        if owned:
            raise NumkvError(
                f"set_scales: expected a cache without tokens, got {owned}; set scales before the first "
                "start_forward"
            )
        kinds = (self._k_kind, self._v_kind)
        self._head_scales.set(layer, self._layers.get(layer), kinds, k, v)

    def _get(self, layer: int) -> tuple[Array, Array, Array]:
        now = self._current()
        pool = self._layer(layer)
        begun = self._begin_reading(layer)
        k, v = self._rows_of(pool, slice(*now.shown_cells()))
        mask = now.mask()
        self._end_reading(layer, begun)
        return k, v, mask

    def _attend(self, layer: int, q: Any, options: CheckedOptions) -> Any:
        now, again = self._current(), self._again
        if again is None or layer not in self._layers or self._num_sinks:
            return self._attend_here(now, layer, q, options)
        sm_scale, cap, _, sinks, return_lse, out, _ = options
        own = now.on_target()
        what = "attend", layer, sm_scale, cap, return_lse, own[0].shape, own[3].shape
        call = again.find(what, (q, sinks, out), self._layers[layer].k)
        if call.replay is not None:
            begun = self._begin_reading(layer)
            found = call.run([*map(again.pointer, own)])
            self._end_reading(layer, begun)
            if found is not again.missed:
                return found
        return call.long(
            lambda: self._attend_here(now, layer, q, options), lambda: own, lambda: None, frozenset({2})
        )  # fmt: skip

    def _attend_here(
        self, now: ForwardPass, layer: int, q: Any, options: CheckedOptions
    ) -> Any:  # fmt: skip
        """Attend on the stream of the call."""
        pool, q = self._queries(now, layer, q)
        begun = self._begin_reading(layer)
        table, lens, starts, ranges = now.on_target()
        if self._num_sinks:
            seen = ranges, now.sinks_on_target()
            parts = [Part(pool, table, x, by_slot=True) for x in seen if x is not None]
            found = attend_to_parts(parts, q, lens, starts, options)
        else:
            found = attend(pool, table, q, lens, starts, options, ranges=ranges, by_slot=True)
        self._end_reading(layer, begun)
        return found

    def _weights(self, layer: int, q: Any, options: CheckedOptions, lse: Any) -> dict[int, Array]:
        now = self._current()
        pool, q = self._queries(now, layer, q)
        begun = self._begin_reading(layer)
        table, lens, starts, ranges = now.on_target()
        counts, heads = now.counts(), int(pool.k.shape[1])
        columns, sinks = max(counts, default=0), now.sinks_on_target()
        if sinks is None:
            weights = attention_mass(
                pool, table, q, lens, starts, columns, options, lse=lse, ranges=ranges, by_slot=True
            )
        else:
            parts = [Part(pool, table, x, by_slot=True) for x in (ranges, sinks)]
            weights = mass_of_parts(parts, q, lens, starts, columns, options, lse)
        self._end_reading(layer, begun)
        found: dict[int, Array] = {}
        for run, (seq, n) in enumerate(zip(now.rows.sequences, counts, strict=True)):
            mine = weights.reshape((heads, n)) if len(counts) == 1 else weights[run, :, :n]
            if seq in found:  # its tokens are in several runs of the batch
                both = self._target.to_host(found[seq]) + self._target.to_host(mine)
                mine = self._target.asarray(both)
            found[seq] = mine
        return found

    def _queries(self, now: ForwardPass, layer: int, q: Any) -> tuple[Pool, Array]:
        """Check that there is a query for each token of the batch; the layer's pool, and the queries."""
        pool = self._layer(layer)
        q = check_queries(self._target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
        _check_batch(now, "q", "a query", q)
        return pool, q


def _check_batch(now: ForwardPass, name: str, what: str, x: Array, remedy: str = "") -> None:
    """Refuse an array with other than a row for each token of the batch."""
    size, got = now.num_tokens, int(x.shape[0])
    if got != size:
        raise DimensionMismatch(
            f"`{name}`: expected {what} for each of the {size} tokens of the batch, got {got}{remedy}",
            expected=size,
            actual=got,
        )
