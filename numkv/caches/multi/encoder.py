"""`EncoderCache`: an encoder's K and V of an image or a sound, for cross-attention.

They are rows of one sequence, written in one pass. All tokens of later passes attend to them. Their position is that of
the item's placeholder token, by which `remove` finds out whether to remove them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv.access import Access
from numkv.attention.attend import attend, check_queries
from numkv.attention.options import CheckedOptions
from numkv.caches.late_reports import LayerReports
from numkv.caches.multi.arguments import Setup, check_sequence
from numkv.caches.multi.base import Commit
from numkv.caches.multi.layered import LayeredCache, Tables
from numkv.caches.multi.saved import SavedEncoder, SavedLayer, saved_config
from numkv.cells.cells import Rows
from numkv.checks import check_array
from numkv.drawing.page import drawn
from numkv.errors import NotSupported, NumkvError
from numkv.kinds import QUERY_DTYPES
from numkv.snapshots.snapshot import Options, Source
from numkv.storage.pool import Pool
from numkv.targets.base import Array


@drawn
class EncoderCache(LayeredCache):
    """An encoder's rows, for one sequence; there is no mask, and no token has a row of its own.

    Notes
    -----
    Rows come in any float dtype and are stored in the cache's kind. Threads: see `numkv.CausalCache`.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> cache = numkv.EncoderCache()
    >>> cache.init("fp32", max_sequences=1, capacity=16, max_batch=4)
    >>> cache.start_forward(numkv.Batch(positions=[0, 1], sequences=[0, 0], multimodal=[1]))
    >>> cache.put(0, np.ones((7, 2, 8), np.float32), np.ones((7, 2, 8), np.float32))
    >>> k, v, mask = cache.get(0)
    >>> k.shape, mask is None, cache.encoder_cached
    ((7, 2, 8), True, True)
    """

    __saved__ = SavedEncoder

    def __init__(self) -> None:
        super().__init__()
        self._position = 0  # of the next item
        self._stored = 0  # of the stored rows
        self._cached = False
        self._reserve: bool | None = None  # of the current pass

    # -- what it is

    @property
    def encoder_cached(self) -> bool:
        """Whether rows are stored, and their item has not been removed."""
        return self._cached

    @property
    def sequences(self) -> list[int]:
        """None: no sequence has tokens of its own here."""
        self._check_ready()
        return []

    def positions(self, seq: int) -> NDArray[np.int32]:
        """Positions of a sequence that are stored: none, as rows are no tokens.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        int32 array (0,)

        Raises
        ------
        IndexError
            If `seq` is outside ``[0, 2**63)``.
        """
        self._check_ready()
        check_sequence("seq", seq)
        return np.empty(0, np.int32)

    def _describe(self) -> str:
        return f"encoder_cached={self._cached}"

    # -- its life

    def _plan_init(self, setup: Setup) -> Commit:
        if setup.max_sequences > 1:
            raise NumkvError(
                f"`max_sequences`: expected 1, as encoder rows are of one sequence, got {setup.max_sequences}"
            )
        config = self._config
        if config is not None and config.padding > 1:
            raise NumkvError(f"`padding`: expected 1 for an EncoderCache, got {config.padding}")

        def commit() -> None:
            self._k_kind, self._v_kind, self._target = setup.k_kind, setup.v_kind, setup.target
            self._rotate, self._permuted_v = setup.rotate, config is not None and config.permuted_v
            self._reports = LayerReports(setup.target)

        return commit

    def _close(self) -> None:
        super()._close()
        self._cached = False

    def _values(self) -> dict[str, Any]:
        config = None if self._config is None else saved_config(self._config)
        return {
            "config": config, "permuted_v": self._permuted_v, "position": self._position,
            "stored": self._stored, "cached": self._cached,
        }  # fmt: skip

    def _saved_layer(self, layer: int, pool: Pool) -> SavedLayer:
        return replace(super()._saved_layer(layer, pool), rows=int(pool.k.shape[2]))

    def _slots(self, pool: Pool) -> NDArray[np.int64]:
        return np.arange(int(pool.k.shape[2]))

    @classmethod
    def _empty(cls, saved: SavedEncoder, source: Source, options: Options) -> Self:
        made = cls()
        if saved.config is not None:
            made.set_config(saved.config.config)
        rotate = saved.rotation is not None
        made.init(saved.k_kind, 1, 1, 1, options.place.name, v_kind=saved.v_kind, rotate=rotate)
        made._position, made._stored, made._cached = saved.position, saved.stored, saved.cached
        return made

    def _copied(self, access: Access) -> Self:
        new = super()._copied(access)
        if self._state == "ready":
            new._reports = self._reports.copy()
        return new

    def _clear(self) -> None:
        self._reports.clear()
        self._position = self._stored = 0
        self._cached, self._reserve = False, None

    def _refuse_reported(self) -> None:
        if self._state == "ready":
            self._reports.collect(wait=True)
            self._reports.refuse()

    def _check(self) -> None:
        for layer, pool in self._layers.items():
            rows = int(pool.k.shape[2])
            self._check_layers({layer: pool}, rows, np.arange(rows))
        if self._cached and not self._layers:
            raise NumkvError("check: rows are said to be stored, and there are no layers")

    # -- changes

    def _plan_forward(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> Commit:
        if self._cached:
            self._reports.refuse()
        return lambda: self._begin(rows, items, reserve)

    def _begin(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> None:
        if items:
            self._position = int(rows.positions[items[-1]])
        self._reserve = reserve

    def _plan_remove(self, seq: int, begin: int, end: int | None) -> Commit:
        removes = begin <= self._stored and (end is None or self._stored < end)
        return lambda: self._keep_at(None if removes else self._stored)

    def _plan_compact(self, seq: int, keep: NDArray[np.int64]) -> Commit:
        at = np.flatnonzero(keep == self._stored)
        return lambda: self._keep_at(int(at[0]) if len(at) else None)

    def _keep_at(self, position: int | None) -> None:
        """Move the item to a position, or drop it with None."""
        if position is None:
            self._cached = False
            self._reports.clear()
        else:
            self._stored = position

    def _plan_copy(self, src: int, dst: int, length: int) -> Commit:
        raise NotSupported(
            "copy_prefix: an EncoderCache has one sequence, and nothing to share with others"
        )

    def _can_resume(self, seq: int, pos: int) -> bool:
        return True

    # -- a pass

    def _begun(self) -> bool:
        """Check that a pass has begun; whether it is a reserved one."""
        if self._reserve is None:
            raise NumkvError("EncoderCache: used before start_forward; call it first")
        return self._reserve

    def _set_scales(self, layer: int, k: Any, v: Any) -> None:
        if self._cached:
            raise NumkvError(
                "set_scales: expected a cache without rows, got rows of an item; remove it first"
            )
        kinds = (self._k_kind, self._v_kind)
        self._head_scales.set(layer, self._layers.get(layer), kinds, k, v)

    def put(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Store a layer's rows in place of its former ones.

        Parameters
        ----------
        layer : int
            Which layer: any integer from 0 up, below ``2**63``.
        k : array (num_rows, num_kv_heads, head_dim), or of one row (num_kv_heads, head_dim)
            Keys, any number of them, in any float dtype; stored in the cache's kind.
        v : array (num_rows, num_kv_heads, head_dim_v), or of one row (num_kv_heads, head_dim_v)
            Values.
        check_finite : bool
            Whether rows to be quantised are checked for NaN and infinity. The CPU checks before it writes. CUDA
            checks while it writes, and stores zeros; later calls raise until the layer has been put anew, or the item
            removed.

        Raises
        ------
        DimensionMismatch
            If K and V differ in rows or heads.
        NonFiniteInput
            See `check_finite`; on the CPU nothing is written.
        UnsupportedDType, NotSupported
            If an array has another dtype, layout or target.
        IndexError
            If `layer` is no such integer.
        TypeError
            If `layer` is no integer, or `check_finite` neither True nor False.
        NumkvError
            Before `start_forward`.
        """
        super().put(layer, k, v, check_finite=check_finite)

    def _put(self, layer: int, k: Any, v: Any, check_finite: bool) -> None:
        reserve, target = self._begun(), self._target
        k, v = target.accept(k, "k"), target.accept(v, "v")
        if len(k.shape) == len(v.shape) == 2:  # one row
            k, v = (self._one_row(name, x) for name, x in (("k", k), ("v", v)))
        shape = ("num_rows", "num_kv_heads", "head_dim")
        k = check_array(target, "k", k, QUERY_DTYPES, shape)
        rows, heads, dim = (int(n) for n in k.shape)
        v = check_array(target, "v", v, QUERY_DTYPES, (rows, heads, "head_dim_v"))
        made = self._room_for(layer, (1, heads, rows), (dim, int(v.shape[2])))
        if check_finite and made.looks_first:
            made.k_buffer.check_finite("k", k)
            made.v_buffer.check_finite("v", v)
        if reserve:
            if layer not in self._layers:
                self._layers[layer] = made
            return
        self._reports.refuse(but=layer)
        slots = target.index(np.arange(rows), np.int64)
        puts = self._puts
        self._reports.put(layer)
        try:  # nobody reads the layer meanwhile
            puts[layer] = puts.get(layer, 0) | 1
            if rows:
                marker = self._reports.marker(self._reports.mark(layer))
                made.scatter(k, v, slots, made.watch(k, v, marker) if check_finite else 0)
            if self._layers.get(layer) is not made:
                self._layers[layer] = made
                self._changed()
            self._stored, self._cached = self._position, True
        finally:
            puts[layer] = (puts[layer] | 1) + 1

    def _one_row(self, name: str, x: Array) -> Array:
        """Rows ``(1, num_kv_heads, dim)`` of one row by head."""
        shape = ("num_kv_heads", "head_dim")
        x = check_array(self._target, name, x, QUERY_DTYPES, shape)
        return self._target.token_major(self._target.one_head(x))

    def _room_for(self, layer: int, shape: tuple[int, int, int], dims: tuple[int, int]) -> Pool:
        """Return the layer's buffers if they have this shape, else new ones, which are not the layer's yet."""
        pool = self._layers.get(layer)
        if pool is not None and pool.k.shape[:3] == shape:
            if (pool.head_dim, pool.head_dim_v) == dims:
                return pool
        return self._new_pool(layer, shape, dims)

    def get(self, layer: int) -> tuple[Array, Array, None]:
        """K and V of a layer, and no mask.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        k : array (num_rows, num_kv_heads, head_dim) or None
            Float kinds return a view in the kind's dtype. Quantised kinds and ``rotate=True`` return a float32 copy
            (float64 for fp64). None if the layer was never put. Rows stay after `remove`: ask `encoder_cached`.
        v : array (num_rows, num_kv_heads, head_dim_v) or None
            Likewise; with ``permuted_v`` ``(num_kv_heads, head_dim_v, num_rows)``.
        mask : None

        Raises
        ------
        IndexError
            If `layer` is outside ``[0, 2**63)``.
        NumkvError
            Before `start_forward`.
        """
        return super().get(layer)

    def _get(self, layer: int) -> tuple[Array, Array, None]:
        self._begun()
        begun = self._begin_reading(layer)
        pool = self._layers.get(layer)
        if pool is None:
            return None, None, None
        k, v = self._rows_of(pool, slice(None))
        self._end_reading(layer, begun)
        return k, v, None

    def _attend(self, layer: int, q: Any, options: CheckedOptions) -> Any:
        self._begun()
        begun = self._begin_reading(layer)
        pool, target = self._layer(layer), self._target
        _, heads, rows, _ = (int(n) for n in pool.k.shape)
        q = check_queries(target, q, heads, pool.head_dim, "num_tokens")
        tokens = int(q.shape[0])
        ranges = np.empty((tokens, 2), np.int64)
        ranges[:] = 0, rows
        host = (np.array([rows]), np.array([0, tokens]), ranges)
        given = [(np.zeros((1, 1)), np.int32), *((x, np.int64) for x in host)]
        table, lens, starts, seen = target.index_all(given)
        found = attend(pool, table, q, lens, starts, options, ranges=seen)
        self._end_reading(layer, begun)
        return found

    def _weights(self, layer: int, q: Any, options: CheckedOptions, lse: Any) -> dict[int, Array]:
        raise NotSupported(
            f"{type(self).__name__}: expected a cache of tokens, whose weights say which of them to keep; "
            "this one holds rows that stay or go together"
        )

    def _tables(self, layer: int) -> Tables:
        rows, index = int(self._layer(layer).k.shape[2]), self._target.index
        table = np.arange(max(1, rows))[None, :]
        return index(table, np.int32), index(np.array([rows]), np.int64), None
