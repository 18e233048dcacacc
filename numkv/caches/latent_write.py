"""The fused write of latents into a layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv.access import whole
from numkv.caches.single import SingleSequence
from numkv.numbers import check_flag, check_index
from numkv.writing.fused_write import QKMode
from numkv.writing.latents import LatentRows

# What a position of RoPE is below.
_MOST_POSITIONS = 2**62


class LayerOfLatents(SingleSequence):
    """What a layer made with ``v_kind="latent"`` does beside others."""

    @whole
    def write_latents(
        self,
        rows: Any,
        *,
        qk_mode: QKMode | int,
        cos: Any = None,
        sin: Any = None,
        norm_weight: Any = None,
        eps: float = 1e-6,
        pos_offset: int | None = None,
        check_finite: bool = True,
        stream: Any = None,
    ) -> None:
        """Apply RMS norm to new latents and RoPE to the keys behind them, and write both as one row, in one pass.

        Parameters
        ----------
        rows : array (num_tokens, num_kv_heads, head_dim)
            What the model projects: `head_dim_v` elements of the latent, then the rotary key; any float dtype.
        qk_mode : QKMode or int
            What happens to them: of modes that normalise the latent is normalised, of those that rotate the key is
            rotated.
        cos, sin : float32 or float64 array (num_positions, rotary_dim / 2)
            RoPE tables, a row per position; at most ``head_dim - head_dim_v`` elements are rotated, the first ones
            behind the latent. None is fine for ``QKMode.COPY``.
        norm_weight : array (head_dim_v,), optional
            Weight of the RMS norm; needed by the modes that normalise.
        eps : float
            Added to the mean square, inside the root.
        pos_offset : int, optional
            Row of `cos` and `sin` for the first token; `seq_len` if None. Where rows go is always `seq_len`.
        check_finite, stream
            See `append`.

        Raises
        ------
        NotSupported
            If the layer has a V of its own.
        CacheFull
            If there is no room for all tokens; nothing is written.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity, at ``.index`` of `rows`; nothing is written.
        IndexError
            If `cos` and `sin` have no row for a position.
        DimensionMismatch, UnsupportedDType, ValueError
            If an argument is missing, or has another shape, dtype, layout, value or target.
        """
        if pos_offset is not None:
            pos_offset = check_index("pos_offset", pos_offset, _MOST_POSITIONS)
        check_finite = check_flag("check_finite", check_finite, True)
        pool, target = self._pool, self._target
        with target.on(stream, rows, pool.k):
            target.refuse_capture(f"{type(self).__name__}.write_latents")
            self._refuse_bad()
            p = LatentRows.check(pool, rows, qk_mode, cos, sin, norm_weight, eps)
            start, tokens, room = self._stored(0), p.num_tokens, self._room
            first = start if pos_offset is None else pos_offset
            p.check_positions(first)
            if check_finite and pool.looks_first:
                p.check_finite(pool)
            self._make_room(0, start, tokens)
            self._watch_nothing()
            look = p.watch(pool, self._marker(start)) if check_finite else 0
            numbers = np.arange(tokens)
            slots, positions = (
                target.index(x, np.int64) for x in (self._slots(start + numbers), first + numbers)
            )
            try:
                p.scatter(pool, slots, positions, look)
            except BaseException:
                self._unmake_room(0, start, room)
                raise
            self._lengths[0] = start + tokens
