"""Binding a `PagedKVCache`: its layers' buffers, and a caller's arguments for each or for all."""

from __future__ import annotations

import functools
from typing import Any

from numkv.caches.bound import (
    BoundAttention,
    Rows,
    ToBind,
    is_number,
    of_each,
    options_of_layers,
)
from numkv.caches.paged.step import begin_bound
from numkv.caches.paged.store import BlockStore


def bind_paged(
    store: BlockStore, num_q_heads: Any, kind: Any, sm_scale: Any, logits_soft_cap: Any, sinks: Any,
    check_finite: Any,
) -> BoundAttention:  # fmt: skip
    """Bind a `PagedKVCache`; see its `bind`."""
    layers = store.num_layers
    heads = of_each("num_q_heads", num_q_heads, layers, is_number)
    of_sinks = of_each("sinks", sinks, layers, _is_row)
    bound: list[Any] = [None] * layers  # of layers that have nothing to call
    first, options = None, bound.copy()
    for layer in sorted(store.layer_pools):
        pool, group = store.place(layer)
        of, source = store.groups[group], int(store.layers.sources[layer])
        rows = Rows.check(pool, heads[layer], kind, check_finite)
        args = sm_scale, logits_soft_cap, [of.window], of_sinks[layer]
        (options[layer],) = options_of_layers([pool], rows, *args)
        arrays = pool.k, pool.k_scale, pool.v, pool.v_scale
        own = None if source == layer else source
        of_layer = ToBind(pool, rows.num_q_heads, arrays, group, not of.chunk, own)
        bound[layer], first = of_layer, first or rows
    assert first is not None
    return BoundAttention(lambda: bound, functools.partial(begin_bound, store), first, options)


def _is_row(x: Any) -> bool:
    """Return whether sinks are those of all layers: one for each head."""
    if x is None or getattr(x, "ndim", 2) == 1:
        return True
    return isinstance(x, (list, tuple)) and not any(
        y is None or isinstance(y, (list, tuple)) or getattr(y, "ndim", 0) for y in x
    )
