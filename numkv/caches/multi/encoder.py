"""`EncoderCache`: the K and V that an encoder computes of an image or a sound, for cross-attention.

They are rows of one sequence, written in one pass; all tokens of later passes attend to them. Their position is that of
the token which stands for the item, so that `remove` can tell whether it removes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.attention.attend import attend, check_queries
from numkv.attention.options import AttentionOptions
from numkv.caches.multi.base import MultiSequenceCache
from numkv.caches.multi.checks import check_position, check_sequence
from numkv.caches.multi.config import Setup
from numkv.caches.multi.head_scales import HeadScales
from numkv.cells.cells import Rows
from numkv.checks import check_array
from numkv.errors import NotSupported, NumkvError
from numkv.kinds import QUERY_DTYPES, Kind
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target

__all__ = ["EncoderCache"]


class _Ready(NamedTuple):
    """The arguments of `init`, checked."""

    k_kind: Kind
    v_kind: Kind
    target: Target
    permuted_v: bool
    rotate: bool


class EncoderCache(MultiSequenceCache):
    """An encoder's rows, for one sequence; there is no mask, and no token has a row of its own.

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

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[int, Pool] = {}
        self._head_scales = HeadScales()
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
    def rotate(self) -> bool:
        """Whether rows are rotated before they are stored."""
        self._check_ready()
        return self._ready.rotate

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers, scales included."""
        return sum(pool.nbytes for pool in self._layers.values())

    def __repr__(self) -> str:
        if self._state != "ready":
            return f"EncoderCache({'closed' if self._state == 'closed' else 'before init'})"
        ready = self._ready
        kinds = str(ready.k_kind)
        if ready.v_kind is not ready.k_kind:
            kinds += f"/{ready.v_kind}"
        if ready.rotate:
            kinds += ", rotate=True"
        return (
            f"EncoderCache(encoder_cached={self._cached}, layers={len(self._layers)}, kind={kinds}, "
            f"target={ready.target.name}, nbytes={self.nbytes})"
        )

    # -- its life

    def _plan_init(self, setup: Setup) -> _Ready:
        if setup.max_sequences > 1:
            raise NumkvError(
                f"`max_sequences`: expected 1, as encoder rows are of one sequence, got {setup.max_sequences}"
            )
        config = self._config
        if config is not None and config.padding > 1:
            raise NumkvError(f"`padding`: expected 1 for an EncoderCache, got {config.padding}")
        return _Ready(
            setup.k_kind, setup.v_kind, setup.target, config is not None and config.permuted_v,
            setup.rotate,
        )  # fmt: skip

    def _commit_init(self, plan: _Ready) -> None:
        self._ready = plan
        self._state = "ready"

    def close(self) -> None:
        """Release all memory; the cache cannot be used afterwards."""
        super().close()
        self._layers.clear()
        self._cached = False

    # -- changes

    def _plan_forward(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> tuple[int, bool]:
        return int(rows.positions[items[-1]]) if items else self._position, reserve

    def _commit_forward(self, plan: tuple[int, bool]) -> None:
        self._position, self._reserve = plan

    def _plan_remove(self, seq: int, begin: int, end: int | None) -> bool:
        return begin <= self._stored and (end is None or self._stored < end)

    def _commit_remove(self, plan: bool) -> None:
        if plan:
            self._cached = False

    def _plan_compact(self, seq: int, keep: NDArray[np.int64]) -> int | None:
        at = np.flatnonzero(keep == self._stored)
        return int(at[0]) if len(at) else None

    def _commit_compact(self, plan: int | None) -> None:
        if plan is None:
            self._cached = False
        else:
            self._stored = plan

    def _plan_copy(self, src: int, dst: int, length: int) -> None:
        raise NotSupported(
            "copy_prefix: an EncoderCache has one sequence, and nothing to share with others"
        )

    def _commit_copy(self, plan: None) -> None:
        raise AssertionError("never planned")

    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a sequence can go on at a position: always.

        Parameters
        ----------
        seq : int
            The sequence.
        pos : int
            Position of the next token.

        Raises
        ------
        IndexError
            If `seq` or `pos` is negative.
        """
        self._check_ready()
        check_sequence("seq", seq), check_position("pos", pos)
        return True

    # -- a pass

    def _begun(self, layer: int) -> int:
        """Check that a pass has begun, and the number of a layer."""
        self._check_ready()
        if self._reserve is None:
            raise NumkvError("EncoderCache: used before start_forward; call it first")
        return check_position("layer", layer)

    def _set_scales(self, layer: int, k: Any, v: Any) -> None:
        if self._cached:
            raise NumkvError(
                "set_scales: expected a cache without rows, got rows of an item; remove it first"
            )
        kinds = (self._ready.k_kind, self._ready.v_kind)
        self._head_scales.set(layer, self._layers.get(layer), kinds, k, v)

    def put(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Store a layer's rows in place of its former ones.

        Parameters
        ----------
        layer : int
            Which layer: any integer from 0 up.
        k : array (num_rows, num_kv_heads, head_dim)
            Keys, any number of them, in any float dtype; stored in the cache's kind.
        v : array (num_rows, num_kv_heads, head_dim_v)
            Values.
        check_finite : bool
            Whether rows to be quantised are checked for NaN and infinity first.

        Raises
        ------
        DimensionMismatch
            If K and V differ in rows or heads.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity; nothing is written.
        UnsupportedDType, NotSupported
            If an array has another dtype, layout or target.
        IndexError
            If `layer` is negative.
        NumkvError
            Before `start_forward`.
        """
        layer = self._begun(layer)
        ready = self._ready
        shape = ("num_rows", "num_kv_heads", "head_dim")
        k = check_array(ready.target, "k", k, QUERY_DTYPES, shape)
        rows, heads, dim = (int(n) for n in k.shape)
        v = check_array(ready.target, "v", v, QUERY_DTYPES, (rows, heads, "head_dim_v"))
        dim_v = int(v.shape[2])
        pool = self._layers.get(layer)
        fits = pool is not None and (*pool.k.shape[1:3], pool.head_dim, pool.head_dim_v) == (
            heads,
            rows,
            dim,
            dim_v,
        )
        if pool is None or not fits:
            made = Pool.allocate(
                ready.target, (1, heads, rows), dim, dim_v, ready.k_kind, ready.v_kind, ready.rotate
            )
            self._head_scales.apply(layer, made)
        else:
            made = pool
        if check_finite:
            made.k_buffer.check_finite("k", k)
            made.v_buffer.check_finite("v", v)
        if self._reserve:
            self._layers.setdefault(layer, made)
            return
        if rows:
            made.scatter(k, v, ready.target.index(np.arange(rows), np.int64))
        self._layers[layer] = made
        self._stored, self._cached = self._position, True

    def get(self, layer: int) -> tuple[Array, Array, None]:
        """K and V of a layer, and no mask.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        k : array (num_rows, num_kv_heads, head_dim) or None
            For float kinds a view in the kind's dtype, for quantised ones a float32 copy, and with ``rotate=True`` too
            (of fp64 float64); None if the layer was never put. Rows stay after `remove`: ask `encoder_cached`.
        v : array (num_rows, num_kv_heads, head_dim_v) or None
            Likewise; with ``permuted_v`` ``(num_kv_heads, head_dim_v, num_rows)``.
        mask : None

        Raises
        ------
        IndexError
            If `layer` is negative.
        NumkvError
            Before `start_forward`.
        """
        pool = self._layers.get(self._begun(layer))
        if pool is None:
            return None, None, None
        target, everything = self._ready.target, slice(None)
        k = target.token_major(pool.rows("k", 0, everything))
        v = pool.rows("v", 0, everything)
        v = target.dim_major(v) if self._ready.permuted_v else target.token_major(v)
        return k, v, None

    def _attend(self, layer: int, q: Any, options: AttentionOptions) -> Any:
        pool = self._layers.get(self._begun(layer))
        if pool is None:
            raise IndexError(
                f"`layer`: expected a layer that has been put, {sorted(self._layers)}, got {layer}"
            )
        target = self._ready.target
        _, heads, rows, _ = (int(n) for n in pool.k.shape)
        q = check_queries(target, q, heads, pool.head_dim, "num_tokens")
        tokens = int(q.shape[0])
        ranges = np.empty((tokens, 2), np.int64)
        ranges[:] = 0, rows
        return attend(
            pool, target.index(np.zeros((1, 1)), np.int32), q,
            target.index(np.array([rows]), np.int64), target.index(np.array([0, tokens]), np.int64),
            options,
            ranges=target.index(ranges, np.int64),
        )  # fmt: skip
