"""What a user reads of a cache of several layers: rows as values and as they are stored, and attention over them."""

from __future__ import annotations

from typing import Any, Unpack

from numkv.access import reads
from numkv.attention.options import check_options
from numkv.attention.sight import Visible
from numkv.caches.single import SingleSequence
from numkv.errors import NotSupported
from numkv.numbers import check_index
from numkv.targets.base import Array
from numkv.targets.streamed import on_stream


class StoredRows(SingleSequence):
    """Reads a contiguous cache, in which layer i has block i."""

    def quantised_tokens(self, layer: int) -> range:
        """Positions of a layer's tokens that are quantised: all of a quantised kind, but for those in full precision.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        range
            Rows not yet advanced included.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        return self._quantised(check_index("layer", layer, len(self._lengths)))

    @on_stream
    @reads
    def k(self, layer: int, *, stream: Any = None) -> Array:
        """Keys of a layer, rows not yet advanced included.

        Parameters
        ----------
        layer : int
            Which layer.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim)
            For float kinds without scales a view in the kind's dtype, valid until the cache grows; for others a float32
            copy, and with ``rotate=True`` too (of fp64 float64). With full-precision tokens always such a copy, with
            these tokens as they were appended.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        return self._read("k", layer)

    @reads
    def k_codes(self, layer: int) -> Array:
        """Codes of a layer's keys, as stored (with ``rotate=True`` of rotated rows); see `k_scales`.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim)
            A view, valid until the cache grows: of int8 the codes, of int4 and code4 two of them to a byte
            ``(tokens, num_kv_heads, head_dim / 2)``, of code6 eight in three int16, in the order that
            `numkv.rows.int4`, `numkv.rows.code4` and `numkv.rows.code6` say. Only those of `quantised_tokens` mean
            anything.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        return self._codes("k", layer)

    @reads
    def k_scales(self, layer: int) -> Array:
        """Scales of a layer's keys, by which codes are multiplied, for each token and head.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array
            A view, valid until the cache grows: of int8 and codes of codebooks float32
            ``(tokens, num_kv_heads)``, of int4 bfloat16 ``(tokens, num_kv_heads, groups)`` for groups of 32
            elements, of fp8 float32 ``(num_kv_heads,)``.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        return self._scales("k", layer)

    @on_stream
    @reads
    def v(self, layer: int, *, stream: Any = None) -> Array:
        """Values of a layer ``(tokens, num_kv_heads, head_dim_v)``; see `k`.

        Parameters
        ----------
        layer : int
            Which layer.
        stream : object, optional
            See `numkv.paged_decode_attention`.
        """
        return self._read("v", layer)

    @reads
    def v_codes(self, layer: int) -> Array:
        """Codes of a layer's values, with `head_dim_v` in place of `head_dim`; see `k_codes`.

        Parameters
        ----------
        layer : int
            Which layer.
        """
        return self._codes("v", layer)

    @reads
    def v_scales(self, layer: int) -> Array:
        """Scales of a layer's values, with `head_dim_v` in place of `head_dim`; see `k_scales`.

        Parameters
        ----------
        layer : int
            Which layer.
        """
        return self._scales("v", layer)

    def _codes(self, which: str, layer: int) -> Array:
        layer = self._check_quantised(which, layer)
        length = self._stored(layer)  # before the pool
        return self._target.token_major(self._pool.values(which)[layer, :, :length])

    def _scales(self, which: str, layer: int) -> Array:
        kind = self.kind if which == "k" else self.v_kind
        if kind.scales_per == "head":
            return self._pools[check_index("layer", layer, len(self._lengths))].scales(which)
        layer = self._check_quantised(which, layer)
        length = self._stored(layer)  # before the pool
        scale = self._pool.scales(which)
        rows = self._target.token_major(by_row(scale)[layer, :, :length])
        return rows if len(scale.shape) == 4 else rows[:, :, 0]

    def _check_quantised(self, which: str, layer: int) -> int:
        kind = self.kind if which == "k" else self.v_kind
        if not kind.has_scales:
            raise NotSupported(
                f"expected a quantised kind, got {kind}, which has neither codes nor scales; "
                f"read {which}(layer)"
            )
        return check_index("layer", layer, len(self._lengths))

    def _read(self, which: str, layer: int) -> Array:
        layer = check_index("layer", layer, len(self._lengths))
        length = self._stored(layer)  # before the pool
        pool = self._pools[layer]
        rows = pool.rows(which, layer, slice(0, length))
        if self._full_precision is not None:
            rows = self._full_precision.overlay(pool, which, layer, rows, length)
        return self._target.token_major(rows)

    # -- attention

    @reads
    def decode_attention(
        self,
        layer: int,
        q: Any,
        *,
        stream: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        sinks: Any = None,
        return_lse: bool = False,
        out: Any = None,
        **visible: Unpack[Visible],
    ) -> Any:
        """Attend over all rows appended to a layer; the queries are those of the last ones.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_q_heads, head_dim) or (num_tokens, num_q_heads, head_dim)
            Queries; each sees its own position and earlier ones.
        sm_scale, logits_soft_cap, window_left, sinks, return_lse, out, stream, **visible
            See `numkv.decode_attention`; `out` has the rank of q.

        Returns
        -------
        out : array of q's rank
            In q's dtype. One query on an empty layer gives 0 (and -inf).
        lse : float32 array (num_q_heads,) or (num_tokens, num_q_heads)
            Natural log of the sum of exponentials; only with `return_lse`.

        Raises
        ------
        DimensionMismatch
            If there are more queries than rows, or a shape does not fit.
        IndexError
            If there is no such layer.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        layer = check_index("layer", layer, len(self._lengths))
        target = self._target
        if (stream is not None or target.has_streams) and stream is not target.here:
            asked = sm_scale, logits_soft_cap, window_left, sinks, return_lse
            return self._attend_on(layer, q, asked, out, stream, visible)
        q = target.accept(q, "q")
        single = len(q.shape) == 2
        if single:
            q = q.reshape((1, *q.shape))
            if out is not None:
                out = target.accept(out, "out")
                out = out.reshape((1, *out.shape))
        options = check_options(
            sm_scale, logits_soft_cap, window_left, sinks, return_lse, out, visible
        )
        result = self._attend(layer, q, options)
        if not single:
            return result
        return (result[0][0], result[1][0]) if return_lse else result[0]

    def _attend_on(
        self, layer: int, q: Any, asked: tuple[Any, ...], out: Any, stream: Any, visible: Visible
    ) -> Any:
        """Attend on a stream, as an earlier call did where there is one like it."""

        def attend() -> Any:
            names = ("sm_scale", "logits_soft_cap", "window_left", "sinks", "return_lse")
            options = {**dict(zip(names, asked, strict=True)), **visible}
            return self.decode_attention(layer, q, **options, out=out, stream=self._target.here)

        if self._again is not None and not visible:
            return self._attend_again(layer, q, asked, out, stream, attend)
        with self._target.on(stream, q, self._pool.k):
            return attend()

    @on_stream
    @reads
    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        stream: Any = None,
    ) -> Array:
        """Sum the attention that each row of a layer gets from the queries of the last rows.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_q_heads, head_dim) or (num_tokens, num_q_heads, head_dim)
            Queries; each sees its own position and earlier ones.
        lse : float32 array of q's shape without its last axis, optional
            What `decode_attention` returned with ``return_lse=True`` for these queries and options. Computed if None,
            which costs as much as that call.
        sm_scale, logits_soft_cap, window_left, stream
            See `numkv.decode_attention`.

        Returns
        -------
        float32 array (num_kv_heads, tokens)
            Sums over the queries and the q heads of a GQA group; see `numkv.attention_weights`. Rows not yet advanced
            are included.

        Raises
        ------
        DimensionMismatch
            If there are more queries than rows, or a shape does not fit.
        IndexError
            If there is no such layer.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        layer = check_index("layer", layer, len(self._lengths))
        target = self._target
        q = target.accept(q, "q")
        if len(q.shape) == 2:
            q = q.reshape((1, *q.shape))
            if lse is not None:
                lse = target.accept(lse, "lse")
                lse = lse.reshape((1, *lse.shape))
        return self._mass(layer, q, check_options(sm_scale, logits_soft_cap, window_left), lse)


def by_row(scale: Array) -> Array:
    """Scales with an axis for those of a row, also where a row has one."""
    return scale if len(scale.shape) == 4 else scale.reshape((*scale.shape, 1))
