"""What a user reads of a cache of several layers: rows as values, and as they are stored."""

from __future__ import annotations

from numkv.caches.single import SingleSequence
from numkv.checks import check_index
from numkv.errors import NotSupported
from numkv.targets.base import Array

__all__ = ["StoredRows", "by_row"]


class StoredRows(SingleSequence):
    """Reads the rows of a contiguous cache: layer i has block i."""

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

    def k(self, layer: int) -> Array:
        """Keys of a layer, rows not yet advanced included.

        Parameters
        ----------
        layer : int
            Which layer.

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

    def k_codes(self, layer: int) -> Array:
        """Codes of a layer's keys, as stored (with ``rotate=True`` of rotated rows); see `k_scales`.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim)
            A view, valid until the cache grows: of int8 the codes, of int4 two of them to a byte
            ``(tokens, num_kv_heads, head_dim / 2)``, in the order that `numkv.rows.int4` says. Only those of
            `quantised_tokens` mean anything.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        return self._codes("k", layer)

    def k_scales(self, layer: int) -> Array:
        """Scales of a layer's keys, by which codes are multiplied, for each token and head.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array
            A view, valid until the cache grows: of int8 float32 ``(tokens, num_kv_heads)``, of int4 bfloat16
            ``(tokens, num_kv_heads, groups)`` for groups of 32 elements, of fp8 float32 ``(num_kv_heads,)``.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        return self._scales("k", layer)

    def v(self, layer: int) -> Array:
        """Values of a layer ``(tokens, num_kv_heads, head_dim_v)``; see `k`.

        Parameters
        ----------
        layer : int
            Which layer.
        """
        return self._read("v", layer)

    def v_codes(self, layer: int) -> Array:
        """Codes of a layer's values, with `head_dim_v` in place of `head_dim`; see `k_codes`.

        Parameters
        ----------
        layer : int
            Which layer.
        """
        return self._codes("v", layer)

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
        codes = self._pool.values(which)
        return self._target.token_major(codes[layer, :, : self._stored(layer)])

    def _scales(self, which: str, layer: int) -> Array:
        kind = self.kind if which == "k" else self.v_kind
        if kind.scales_per == "head":
            return self._pools[check_index("layer", layer, len(self._lengths))].scales(which)
        layer = self._check_quantised(which, layer)
        scale = self._pool.scales(which)
        rows = self._target.token_major(by_row(scale)[layer, :, : self._stored(layer)])
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
        length = self._stored(layer)
        rows = self._pools[layer].rows(which, layer, slice(0, length))
        if self._full_precision is not None:
            rows = self._full_precision.overlay(self._pools[layer], which, layer, rows, length)
        return self._target.token_major(rows)


def by_row(scale: Array) -> Array:
    """Scales with an axis for those of a row, also where a row has one."""
    return scale if len(scale.shape) == 4 else scale.reshape((*scale.shape, 1))
