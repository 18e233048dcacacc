"""Bound calls of caches of one sequence: `numkv.KVCache`, and layers, whose steps begin with the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numkv.access import Access, busy, writes
from numkv.attention.options import AttentionOptions
from numkv.caches.bound import BoundAttention, BoundStep, Rows, options_of_layers
from numkv.caches.single import SingleSequence
from numkv.checks import check_size
from numkv.compaction.moves import slots_of
from numkv.errors import DimensionMismatch, NumkvError
from numkv.storage.pool import Pool
from numkv.targets.base import Array

__all__ = ["BoundCache", "bind_cache"]


def bind_cache(
    cache: Any, num_q_heads: int, kind: Any, sm_scale: Any, logits_soft_cap: Any, window_left: Any, sinks: Any,
    check_finite: Any,
) -> BoundCache:  # fmt: skip
    """Bind a `numkv.KVCache`; see its `bind`."""
    pools = cache._pools
    rows = Rows.check(cache._pool, num_q_heads, kind, check_finite)
    if isinstance(window_left, (list, tuple, np.ndarray)):
        windows = list(window_left)
        if len(windows) != len(pools):
            raise DimensionMismatch(
                f"`window_left`: expected a number, or one for each of {len(pools)} layers, got {len(windows)}",
                expected=len(pools),
                actual=len(windows),
            )
    else:
        windows = [window_left] * len(pools)
    options = options_of_layers(
        pools, rows, sm_scale, logits_soft_cap, windows, sinks
    )
    return BoundCache(cache, rows, options)


def _of_block(pool: Pool, block: int) -> tuple[Array, Array, Array, Array]:
    """Words and scales of K and V of one block, as a buffer of one block."""
    found: list[Array] = []
    for side in (pool.k_buffer, pool.v_buffer):
        scales = side.scales[block : block + 1] if side.kind.has_scales else side.scales
        found += [side.words[block : block + 1], scales]
    return found[0], found[1], found[2], found[3]


class BoundCache(BoundAttention):
    """A bound `numkv.KVCache`."""

    def __init__(self, cache: Any, rows: Rows, options: list[AttentionOptions]) -> None:
        super().__init__(cache._pools, rows, options)
        self._cache = cache
        windows = [of_layer.window_left for of_layer in options]
        self._windows = sorted(set(windows))
        self._group_of = [self._windows.index(window) for window in windows]
        self._bound_to: Any = None

    @property
    def _access(self) -> Access:
        access: Access = self._cache._access
        return access

    @writes
    def begin(self, new: int = 1) -> BoundStep:
        """Begin a step: make room for new tokens, and plan what all layers share.

        Parameters
        ----------
        new : int
            How many tokens.

        Returns
        -------
        BoundStep
            Called for each layer; then `numkv.KVCache.advance` counts the tokens, or `numkv.KVCache.truncate` drops
            them.

        Raises
        ------
        NumkvError
            If rows have been appended and not yet advanced.
        CacheFull
            If `max_seq_len` leaves no room; nothing has changed.
        """
        cache, tokens = self._cache, check_size("new", new)
        length, rows = len(cache), cache._rows()
        if len(rows) and rows.max() != length:
            raise NumkvError(
                f"begin: expected no rows beyond the {length} advanced past, got {rows.max()} in layer "
                f"{int(rows.argmax())}; advance, or truncate({length})"
            )
        if len(rows):
            cache._make_room(0, length, tokens)
        if cache._pool is not self._bound_to:
            self._pools, pool = list(cache._pools), cache._pool
            if cache._full_precision is None:
                parts = [_of_block(of, layer) for layer, of in enumerate(self._pools)]
                marks = [cache._lengths[layer : layer + 1] for layer in range(len(rows))]
                self._bind(marks, parts, cache._current)
            self._bound_to = pool
        memory: list[Any] = []
        if self._fits_one_call(tokens):
            for window in self._windows:
                step = self._memory(1, tokens, 1)
                step.block_table[0, 0], step.seq_lens[0] = 0, length + tokens
                step.q_starts[0], step.q_starts[1] = 0, tokens
                step.slots[:] = np.arange(length, length + tokens)
                step.plan(window, cache._room, length, length + tokens)
                memory.append(step)
        return BoundStep(self, self._access, tokens, memory, self._group_of, None, length)

    def _append(self, step: BoundStep, layer: int, k: Array, v: Array) -> None:
        cache, access = self._cache, self._access
        if cache._stored(layer) != step._of:
            raise NumkvError(self._ended(step, layer))
        if cache._full_precision is not None:
            access.dropped |= 1
        try:
            cache._append(layer, k, v, self._rows.check_finite)
        finally:
            if access.dropped & 1:
                access.dropped += 1

    def _attend(self, step: BoundStep, layer: int, q: Array, out: Any) -> Any:
        cache = self._cache
        try:
            return cache._attend(layer, q, self._options[layer]._replace(out=out))
        except BaseException:
            if cache._full_precision is None:
                cache._lengths[layer] = step._of
            raise

    def _ended(self, step: BoundStep, layer: int) -> str:
        return (
            f"step: expected layer {layer} with {step._of} rows and no call so far, got one that was called in this "
            "step, or a cache that was changed since it began; call each layer once, and begin each step anew"
        )
