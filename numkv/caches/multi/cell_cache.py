"""`CellCache`: what the multi-sequence caches over cells have in common; see `variants` for the caches themselves.

All sequences share one set of cells, and all layers share the bookkeeping of `numkv.cells.Cells`: a pass begins with
`start_forward`, which gives each token of a batch a cell; then each layer puts its rows and attends::

    cache = numkv.CausalCache(shift=numkv.rope_shift(cos, sin))
    cache.init("fp16", max_sequences=4, capacity=4096, max_batch=512)
    cache.start_forward(numkv.Batch(positions, sequences))
    for layer in range(num_layers):
        cache.put(layer, k, v)
        out = cache.decode_attention(layer, q)      # or k, v, mask = cache.get(layer)

A layer's K and V are one block of as many tokens as there are cells, so a cell is a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.attention.attend import attend, check_queries
from numkv.attention.mass import attention_mass
from numkv.attention.options import AttentionOptions, check_options
from numkv.caches.multi.base import MultiSequenceCache
from numkv.caches.multi.checks import check_position, check_sequence
from numkv.caches.multi.config import CacheConfig, Setup
from numkv.caches.multi.forward_pass import UNLIMITED, ForwardPass, View
from numkv.caches.multi.head_scales import HeadScales
from numkv.cells.cells import Cells, Compaction, Forward, Removal, Rows
from numkv.checks import check_array, check_index
from numkv.compaction.key_shift import Shift, plan_shift
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.kinds import kind
from numkv.storage import jit_views
from numkv.storage.pool import Pool, source_dtypes
from numkv.targets.base import Array

__all__ = ["CellCache"]


class CellCache(MultiSequenceCache):
    """A cache of cells; see `CausalCache`, `SlidingWindowCache` and `ChunkedCache`."""

    #: Earlier positions that a token attends to, -1 for all; positions of a chunk, 0 for no chunks; positions kept.
    _window = -1
    _chunk = 0
    _memory: int | None = None

    def __init__(self, shift: Shift | None = None) -> None:
        super().__init__()
        self._shift = shift
        self._cells = Cells(0)
        self._layers: dict[int, Pool] = {}
        self._head_scales = HeadScales()
        self._pass: ForwardPass | None = None
        self._jit: Any = None

    # -- what it is

    @property
    def num_cells(self) -> int:
        """Tokens that the cache has room for, of all sequences; the batch's own included."""
        self._check_ready()
        return self._cells.num_cells

    @property
    def num_free(self) -> int:
        """Cells that no sequence owns."""
        self._check_ready()
        return self._cells.num_free

    @property
    def sequences(self) -> list[int]:
        """Known sequences; some may have no tokens."""
        self._check_ready()
        return self._cells.sequences

    @property
    def rotate(self) -> bool:
        """Whether rows are rotated before they are stored."""
        self._check_ready()
        return self._rotate

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers of all layers so far, scales included."""
        return sum(pool.nbytes for pool in self._layers.values())

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
            If `seq` is negative.
        """
        self._check_ready()
        cells = self._cells
        stored: NDArray[np.int32] = cells.positions[cells.owned(check_sequence("seq", seq))]
        return stored

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._state != "ready":
            return f"{name}({'closed' if self._state == 'closed' else 'before init'})"
        kinds = str(self._k_kind)
        if self._v_kind is not self._k_kind:
            kinds += f"/{self._v_kind}"
        if self._rotate:
            kinds += ", rotate=True"
        return (
            f"{name}({self._describe()}num_cells={self.num_cells}, num_free={self.num_free}, "
            f"sequences={len(self.sequences)}, layers={len(self._layers)}, kind={kinds}, "
            f"target={self._target.name}, nbytes={self.nbytes})"
        )

    def _describe(self) -> str:
        return ""

    @property
    def jit(self) -> Any:
        """The jitclass instance over the cells, on the host, for your own ``@njit`` functions.

        Fields ``positions`` and ``num_sequences``, int32 ``(num_cells,)``; see
        `numkv.storage.jit_views.cells_struct`. They are the cache's own: do not write to them.
        """
        self._check_ready()
        if self._jit is None:
            self._jit = jit_views.cells_struct()(self._cells.positions, self._cells.num_sequences)
        return self._jit

    def layer_jit(self, layer: int) -> Any:
        """The jitclass instance over a layer's memory: one block whose tokens are the cells.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        jitclass
            See `numkv.storage.jit_views`: a ``layer_struct``, on CUDA a ``host_struct``. Its length is the number of
            cells. With ``rotate=True`` it takes and gives rows as they are stored: rotated.

        Raises
        ------
        IndexError
            If the layer was never put.
        """
        self._check_ready()
        pool = self._layer(layer)
        table, lens = np.zeros(1, np.int32), np.array([self.num_cells], np.int32)
        if not self._target.has_jit_views:
            return jit_views.host_struct("int32")(table, lens)
        make = jit_views.layer_struct(pool.k_kind.name, pool.v_kind.name)
        return make(pool.k, pool.v, pool.k_scale, pool.v_scale, table, lens)

    # -- its life

    def _plan_init(self, setup: Setup) -> tuple[Setup, CacheConfig, Cells]:
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
            needed = setup.max_sequences * memory + setup.max_batch
        padding = max(1, config.padding)
        num_cells = math.ceil(needed / padding) * padding
        return setup, config, Cells(num_cells, None if memory == UNLIMITED else memory)

    def _commit_init(self, plan: tuple[Setup, CacheConfig, Cells]) -> None:
        setup, self._config, self._cells = plan
        self._k_kind, self._v_kind, self._target = setup.k_kind, setup.v_kind, setup.target
        self._max_batch, self._rotate = setup.max_batch, setup.rotate
        self._permuted_v = self._config.permuted_v
        self._view = View(
            self._cells, self._target, self._window, self._chunk, max(1, self._config.padding),
            kind(self._config.mask_dtype),
        )  # fmt: skip
        self._state = "ready"

    def close(self) -> None:
        """Release all memory; the cache cannot be used afterwards."""
        super().close()
        self._layers.clear()
        self._pass = self._jit = None
        self._cells = Cells(0)

    # -- changes

    def _plan_forward(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> Forward | Rows:
        return rows if reserve else self._cells.plan_forward(rows)

    def _commit_forward(self, plan: Forward | Rows) -> None:
        if isinstance(plan, Rows):
            no_cells = np.full(len(plan.positions), -1, np.int64)
            self._pass = ForwardPass(self._view, plan, no_cells, reserve=True)
        else:
            self._cells.commit_forward(plan)
            self._pass = ForwardPass(self._view, plan.rows, plan.cells, reserve=False)

    def _plan_remove(
        self, seq: int, begin: int, end: int | None
    ) -> tuple[Removal, list[Callable[[], object]]]:
        removal = self._cells.plan_removal(seq, begin, end)
        if not len(removal.moved):
            return removal, []
        if self._shift is None:
            raise NotSupported(
                f"`end`: the {len(removal.moved)} tokens of sequence {seq} from position {end} on would have "
                "to move, and this cache has no shift to turn their keys; remove to the end, or make "
                "the cache with shift=numkv.rope_shift(cos, sin)"
            )
        moves = plan_shift(
            self._shift, self._layers, removal.moved, removal.offset, max(1, self._max_batch)
        )
        return removal, moves

    def _commit_remove(self, plan: tuple[Removal, list[Callable[[], object]]]) -> None:
        removal, moves = plan
        if self._pass is not None:
            self._pass.forget_cells()
        self._cells.commit_removal(removal)
        for move in moves:
            move()

    def _plan_compact(
        self, seq: int, keep: NDArray[np.int64]
    ) -> tuple[Compaction, list[Callable[[], object]]]:
        compaction = self._cells.plan_compaction(seq, keep)
        moves: list[Callable[[], object]] = []
        for moved, offset in compaction.moves:
            if self._shift is None:
                raise NotSupported(
                    f"`keep`: {sum(len(cells) for cells, _ in compaction.moves)} tokens of sequence {seq} "
                    "would have to move, and this cache has no shift to turn their keys; make the cache "
                    "with shift=numkv.rope_shift(cos, sin)"
                )
            moves += plan_shift(self._shift, self._layers, moved, offset, max(1, self._max_batch))
        return compaction, moves

    def _commit_compact(self, plan: tuple[Compaction, list[Callable[[], object]]]) -> None:
        compaction, moves = plan
        if self._pass is not None:
            self._pass.forget_cells()
        self._cells.commit_compaction(compaction)
        for move in moves:
            move()

    def _plan_copy(self, src: int, dst: int, length: int) -> tuple[int, int, int]:
        return src, dst, length

    def _commit_copy(self, plan: tuple[int, int, int]) -> None:
        if self._pass is not None:
            self._pass.forget_cells()
        self._cells.copy_prefix(*plan)

    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a sequence can go on with a token at a position: all that it would attend to is still stored.

        Parameters
        ----------
        seq : int
            The sequence.
        pos : int
            Position of the next token.

        Returns
        -------
        bool
            Always true where nothing is ever evicted.

        Raises
        ------
        IndexError
            If `seq` or `pos` is negative.
        """
        self._check_ready()
        seq, pos = check_sequence("seq", seq), check_position("pos", pos)
        return self._cells.can_resume(seq, pos, self._window)

    def set_causal(self, except_indices: Iterable[int] = ()) -> None:
        """Let some tokens of this batch attend to later ones, until the next `start_forward`.

        Only causality is lifted: windows, chunks and sequences still hide what they hide.

        Parameters
        ----------
        except_indices : iterable of int
            The tokens, by their index in the batch.

        Raises
        ------
        IndexError
            If there is no such token in the batch.
        NumkvError
            Before `start_forward`.
        """
        now = self._current()
        now.lift_causality(
            tuple([check_index("except_indices", i, now.num_tokens) for i in except_indices])
        )

    # -- a pass

    def _current(self) -> ForwardPass:
        now = self._pass
        if now is None:
            self._check_ready()
            raise NumkvError(f"{type(self).__name__}: used before start_forward; call it first")
        return now

    def _layer(self, layer: int) -> Pool:
        pool = self._layers.get(layer)
        if pool is None:
            raise IndexError(
                f"`layer`: expected a layer that has been put, {sorted(self._layers)}, got {layer}"
            )
        return pool

    def put(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Write a layer's rows of the batch; the first call for a layer allocates it.

        Parameters
        ----------
        layer : int
            Which layer: any integer from 0 up.
        k : array (num_tokens, num_kv_heads, head_dim)
            Keys in the order of the batch, in the kind's own dtype or in float32; for int8 in fp32, fp16 or bf16.
        v : array (num_tokens, num_kv_heads, head_dim_v)
            Values of the same tokens.
        check_finite : bool
            Whether rows to be quantised are checked for NaN and infinity first.

        Raises
        ------
        DimensionMismatch
            If there is not a row for each token of the batch, or a shape is not the layer's.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity; nothing is written.
        UnsupportedDType, NotSupported
            If an array has another dtype, layout or target.
        IndexError
            If `layer` is negative.
        NumkvError
            Before `start_forward`.
        """
        now = self._current()
        size = now.num_tokens
        k = self._target.accept(k, "k")
        if len(k.shape) == 3 and k.shape[0] != size:
            raise DimensionMismatch(
                f"`k`: expected a row for each of the {size} tokens of the batch, got {k.shape[0]}; "
                "pass all tokens of start_forward",
                expected=size,
                actual=int(k.shape[0]),
            )
        pool = self._layers.get(layer)
        if pool is None:
            pool = self._make_layer(layer, k, v)
        k, v = pool.check_rows(k, v, check_finite=check_finite)
        self._layers.setdefault(layer, pool)
        if now.reserve:
            return
        pool.scatter(k, v, now.slots_on_target())

    def _make_layer(self, layer: int, k: Any, v: Any) -> Pool:
        """Allocate buffers for rows of this shape."""
        check_position("layer", layer)
        target, kinds = self._target, (self._k_kind, self._v_kind)
        shape = ("num_tokens", "num_kv_heads", "head_dim")
        k = check_array(target, "k", k, source_dtypes(kinds[0]), shape)
        heads = int(k.shape[1])
        v = check_array(
            target, "v", v, source_dtypes(kinds[1]), ("num_tokens", heads, "head_dim_v")
        )
        shape_of = (1, heads, self._cells.num_cells)
        dims = (int(k.shape[2]), int(v.shape[2]))
        pool = Pool.allocate(target, shape_of, *dims, *kinds, self._rotate)
        self._head_scales.apply(layer, pool)
        return pool

    def _set_scales(self, layer: int, k: Any, v: Any) -> None:
        owned = self.num_cells - self.num_free
        if owned:
            raise NumkvError(
                f"set_scales: expected a cache without tokens, got {owned}; set scales before the first "
                "start_forward"
            )
        kinds = (self._k_kind, self._v_kind)
        self._head_scales.set(layer, self._layers.get(layer), kinds, k, v)

    def get(self, layer: int) -> tuple[Array, Array, Array]:
        """K, V and the mask of the cells that this batch may attend to.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        k : array (n, num_kv_heads, head_dim)
            Keys of adjacent cells, of other sequences too; for float kinds a view in the kind's dtype, for
            quantised ones a float32 copy, and with ``rotate=True`` too (of fp64 float64).
        v : array (n, num_kv_heads, head_dim_v), with ``permuted_v`` (num_kv_heads, head_dim_v, n)
            Values, likewise.
        mask : array (num_tokens, n)
            0 where a token attends to a cell, else minus infinity; one array for all layers of a pass.

        Raises
        ------
        IndexError
            If the layer was never put.
        NumkvError
            Before `start_forward`.
        """
        now = self._current()
        pool = self._layer(layer)
        part = slice(*now.shown_cells())
        target = self._target
        k = target.token_major(pool.rows("k", 0, part))
        v = pool.rows("v", 0, part)
        v = target.dim_major(v) if self._permuted_v else target.token_major(v)
        return k, v, now.mask()

    def _attend(self, layer: int, q: Any, options: AttentionOptions) -> Any:
        now = self._current()
        pool, q = self._queries(now, layer, q)
        table, lens, starts, ranges = now.on_target()
        return attend(pool, table, q, lens, starts, options, ranges=ranges, by_slot=True)

    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ) -> dict[int, Array]:
        """How much attention each token of the batch's sequences gets from the batch's queries.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            A query for each token, in the order of the batch.
        lse : float32 array (num_tokens, num_q_heads), optional
            What `decode_attention` returned with ``return_lse=True`` for these queries and options; computed if None,
            which costs as much as that call.
        sm_scale, logits_soft_cap
            See `numkv.decode_attention`.

        Returns
        -------
        dict of int to float32 array (num_kv_heads, n)
            For each sequence of the batch, a column for each token that is stored, in the order of ``positions(seq)``,
            which `compact` takes: sums over the sequence's queries and the q heads of a group. See
            `numkv.attention_weights`.

        Raises
        ------
        DimensionMismatch
            If there is not a query for each token of the batch, or a shape does not fit.
        IndexError
            If the layer was never put.
        NumkvError
            Before `start_forward`.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        now = self._current()
        pool, q = self._queries(now, layer, q)
        table, lens, starts, ranges = now.on_target()
        counts, heads = now.counts(), int(pool.k.shape[1])
        weights = attention_mass(
            pool, table, q, lens, starts, max(counts, default=0),
            check_options(sm_scale, logits_soft_cap), lse=lse, ranges=ranges, by_slot=True,
        )  # fmt: skip
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
        size = now.num_tokens
        if q.shape[0] != size:
            raise DimensionMismatch(
                f"`q`: expected a query for each of the {size} tokens of the batch, got {q.shape[0]}",
                expected=size,
                actual=int(q.shape[0]),
            )
        return pool, q
