"""The fused write of latents into a step of a `PagedKVCache`."""

from __future__ import annotations

from typing import Any

from numkv.access import Access, writes
from numkv.numbers import check_flag
from numkv.writing.fused_write import QKMode
from numkv.writing.latents import LatentRows


class StepOfLatents:
    """What a step of a cache made with ``v_kind="latent"`` does beside others."""

    _access: Access

    @writes
    def write_latents(
        self: Any,
        layer: int,
        rows: Any,
        *,
        qk_mode: QKMode | int,
        cos: Any = None,
        sin: Any = None,
        norm_weight: Any = None,
        eps: float = 1e-6,
        check_finite: bool = True,
        stream: Any = None,
    ) -> None:
        """Apply RMS norm to the new tokens' latents and RoPE to the keys behind them, and write both, in one pass.

        Parameters
        ----------
        layer : int
            Which layer.
        rows : array (num_tokens, num_kv_heads, head_dim)
            Rows of all sequences, one after another.
        qk_mode, cos, sin, norm_weight, eps, check_finite
            See `numkv.ContiguousLayer.write_latents`; angles are those of `positions`.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, NonFiniteInput, IndexError, ValueError
            See `numkv.ContiguousLayer.write_latents`; nothing is written.
        """
        pool, group = self._layer(layer)
        self._store.refuse_sharing("write_latents", int(layer))
        with self._on(stream, rows):
            captured = self._captured("write_latents")
            self._refuse_bad()
            p = LatentRows.check(pool, rows, qk_mode, cos, sin, norm_weight, eps)
            self._check_tokens("rows", p.num_tokens)
            # A captured call may run with any position that fits.
            last = self._longest - 1 if captured else self.positions.max(initial=-1)
            if p.rotates and last >= p.cos.shape[0]:
                raise IndexError(
                    f"`cos`: expected a row for position {last}, got {p.cos.shape[0]} rows; make the tables longer"
                )
            looks = check_flag("check_finite", check_finite, True)
            if looks and pool.looks_first:
                p.check_finite(pool)
                looks = False
            self._watch_nothing()
            look = p.watch(pool, self._marker(captured)) if looks else 0
            p.scatter(pool, self._slots[group], self._positions, look)
            self._written[layer] |= not captured
