"""Bound calls of caches of one sequence: `numkv.KVCache`, and layers, whose steps begin with the call."""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv.access import Access, writes
from numkv.attention.options import AttentionOptions
from numkv.caches.bound import (
    Bound,
    BoundAttention,
    BoundStep,
    Rows,
    options_of_layers,
    run_compiled,
)
from numkv.compaction.moves import slots_of
from numkv.errors import DimensionMismatch, NumkvError
from numkv.numbers import check_size
from numkv.storage.pool import Pool
from numkv.targets.base import Array

_ALWAYS = np.ones(1, np.int64)  # buffers of layers are never replaced
_array = np.ndarray


def bind_cache(
    cache: Any, num_q_heads: int, kind: Any, sm_scale: Any, logits_soft_cap: Any, window_left: Any, sinks: Any,
    check_finite: Any,
) -> BoundCache:  # fmt: skip
    """Bind a `numkv.KVCache`; see its `bind`."""
    pools = cache._pools
    rows = Rows.check(cache._pool, num_q_heads, kind, check_finite)
    if isinstance(window_left, (list, tuple)) or getattr(window_left, "ndim", None) == 1:
        windows = list(window_left)
        if len(windows) != len(pools):
            raise DimensionMismatch(
                f"`window_left`: expected a number, or one for each of {len(pools)} layers, got {len(windows)}",
                expected=len(pools),
                actual=len(windows),
            )
    else:
        windows = [window_left] * len(pools)
    options = options_of_layers(pools, rows, sm_scale, logits_soft_cap, windows, sinks)
    return BoundCache(cache, rows, options)


def bind_layer(
    layer: Any, num_q_heads: int, kind: Any, sm_scale: Any, logits_soft_cap: Any, window_left: Any, sinks: Any,
    check_finite: Any,
) -> BoundLayer:  # fmt: skip
    """Bind a layer; see its `bind`."""
    rows = Rows.check(layer._pool, num_q_heads, kind, check_finite)
    options = options_of_layers(
        [layer._pool], rows, sm_scale, logits_soft_cap, [window_left], sinks
    )
    return BoundLayer(layer, rows, options)


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
            spare = self._spare()
            for window in self._windows:
                step = self._memory(spare, 1, tokens, 1)
                step.block_table[0, 0], step.seq_lens[0] = 0, length + tokens
                step.q_starts[0], step.q_starts[1] = 0, tokens
                step.slots[:] = np.arange(length, length + tokens)
                step.plan(window, cache._room, length, length + tokens)
                memory.append(step)
        return BoundStep(self, self._access, tokens, memory, self._group_of, None, length)

    def _append(self, step: BoundStep, layer: int, k: Array, v: Array) -> None:
        cache = self._cache
        if cache._stored(layer) != step._of:
            raise NumkvError(self._ended(step, layer))
        cache._append(layer, k, v, self._rows.check_finite)

    def _attend(self, step: BoundStep, layer: int, q: Array, out: Any) -> Any:
        cache = self._cache
        try:
            return cache._attend_with(layer, q, self._options[layer]._replace(out=out))
        except BaseException:
            if cache._full_precision is None:
                cache._lengths[layer] = step._of
            raise

    def _ended(self, step: BoundStep, layer: int) -> str:
        return (
            f"step: expected layer {layer} with {step._of} rows and no call so far, got one that was called in this "
            "step, or a cache that was changed since it began; call each layer once, and begin each step anew"
        )


class BoundLayer(Bound):
    """A layer bound to the arrays and options of a model; made by the layers' `bind`.

    Calling it is a step of its own: room is made, rows are appended, and queries answered.

    Parameters
    ----------
    layer : Layer
        What is bound.
    rows, options
        See `numkv.caches.bound.Bound`.

    Notes
    -----
    It cannot be copied or pickled, as it belongs to its layer. On threads see `numkv.ContiguousLayer`: a call is one of
    a writer.
    """

    def __init__(self, layer: Any, rows: Rows, options: list[AttentionOptions]) -> None:
        super().__init__([layer._pool], rows, options)
        self._layer, self._access = layer, layer._access
        if layer._full_precision is None:
            pool = layer._pool
            parts = [(pool.k, pool.k_scale, pool.v, pool.v_scale)]
            self._bind([layer._lengths], parts, _ALWAYS)
        self._block_size = int(layer._pool.k.shape[2])
        self._step: Any = None  # memory of the last call
        self._ready: Any = None
        self._planned: Any = None  # what the plan in it depends on

    @writes
    def __call__(self, q: Any, k: Any, v: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Append new rows, and attend with the queries of their tokens.

        The same, bit by bit, as ``append(k, v)`` and ``decode_attention(q, out=out)`` with the bound options.

        Parameters
        ----------
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of the new tokens, in the bound kind.
        k : array (num_tokens, num_kv_heads, head_dim)
            Their keys.
        v : array (num_tokens, num_kv_heads, head_dim_v)
            Their values.
        out : array (num_tokens, num_q_heads, head_dim_v), optional
            Takes the output. It may be `q` itself, and else shares no memory with q or the layer.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Returns
        -------
        array (num_tokens, num_q_heads, head_dim_v)
            The output, or `out`, in the bound kind.

        Raises
        ------
        CacheFull
            If there is no room for all tokens.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity.
        DimensionMismatch, UnsupportedDType, NotSupported
            If an array has another shape, dtype, layout or target than was bound.

        Notes
        -----
        Nothing has changed after an error.
        """
        layer = self._layer
        start = layer._stored(0)
        if type(q) is _array and q.ndim == 3 and stream is None:
            tokens = len(q)
            if start + tokens <= layer._room and self._fits_one_call(tokens):
                self._prepare(layer, start, tokens)
                dtype, pool = self._rows.kind.dtype, self._pools[0]
                result = out
                if result is None:
                    result = np.empty((tokens, self._rows.num_q_heads, pool.head_dim_v), dtype)
                if not run_compiled(self._kernel, dtype, self._ready, q, k, v, result):
                    return result
        with layer._target.on(stream, q, k, v, layer._pool.k):
            return self._in_two_calls(layer, start, q, k, v, out)

    def _prepare(self, layer: Any, start: int, tokens: int) -> None:
        """Plan a call; what earlier calls have planned stays as far as it can."""
        step, end, ids = self._step, start + tokens, layer._ids
        if step is None or step.extents.num_tokens != tokens:
            self._planned = None
            step = self._step = self._kernel.step(*self._extents(1, tokens, len(ids)))
        # Splits depend on the number of KV tiles; with a window, which moves, on more than that.
        window = self._options[0].window_left
        wanted = (layer._version, tokens, -(-end // self._kernel.kv_tile) if window < 0 else end)
        step.seq_lens[0] = end
        if tokens == 1:
            block, offset = divmod(start, self._block_size)
            step.slots[0] = int(ids[block]) * self._block_size + offset
        else:
            step.slots[:] = slots_of(ids, np.arange(start, end), self._block_size)
        if wanted == self._planned:
            step.move(start, end)
            return
        self._planned = None
        step.block_table[0], step.q_starts[0], step.q_starts[1] = ids, 0, tokens
        step.plan(window, self._block_size, start, end)
        record = self._records[0]
        self._ready = record.address, step.address, step.workers
        self._planned = wanted

    def _in_two_calls(self, layer: Any, start: int, q: Any, k: Any, v: Any, out: Any) -> Any:
        """Append and attend the ordinary ways, all checks first."""
        q = layer._target.accept(q, "q")
        tokens = int(q.shape[0]) if len(q.shape) == 3 else 1
        q, k, v, checked = self._checked(0, tokens, q, k, v, out)
        room, full = layer._room, layer._full_precision is not None
        layer._append(0, k, v, self._rows.check_finite)
        try:
            found = layer._attend_with(0, q, self._options[0]._replace(out=checked))
        except BaseException:
            if not full:
                layer._lengths[0] = start
                layer._unmake_room(0, start, room)
            raise
        return found if out is None else out
