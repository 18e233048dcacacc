"""The fused write of a layer: in the general way, and on CUDA as an earlier call did."""

from __future__ import annotations

from typing import Any

from numkv.interrupts import held
from numkv.numbers import check_flag
from numkv.storage.tables import one_block_each
from numkv.targets.base import Array
from numkv.writing.fused_write import Projection


def write_again(
    layer: Any, given: tuple[Any, ...], pos_offset: int | None, check_finite: bool, stream: Any
) -> Array:
    """Write as an earlier call did, or in the general way.

    Parameters
    ----------
    layer : numkv.caches.layer.Layer
        Where to.
    given : tuple
        What `Projection.check` takes after the pool.
    pos_offset, check_finite, stream
        See `Layer.write`.
    """
    qkv, num_q_heads, cos, sin, qk_mode, q_weight, k_weight, eps, q_out = given
    kinds = type(num_q_heads), type(qk_mode), type(eps)
    what = "write", kinds, num_q_heads, qk_mode, eps, check_finite
    arrays = (qkv, cos, sin, q_weight, k_weight, q_out)
    call = layer._again.find(what, stream, arrays, layer._pool.k)
    start, replay, table = layer._stored(0), call.replay, layer._ready_table(0)
    if replay is not None and table is not None:
        tokens, positions, looked_at = replay.note
        first = start if pos_offset is None else pos_offset
        if start + tokens <= layer._room and (positions < 0 or first + tokens <= positions):
            look = layer._look(0, start, looked_at)
            q = call.run((table,), (start, look, first))
            if q is not layer._again.missed:
                layer._lengths[0] = start + tokens
                return q
    made: list[Projection] = []

    def write() -> Array:
        made.append(Projection.check(layer._pool, *given))
        return write_here(layer, made[0], pos_offset, check_finite)

    def note() -> tuple[int, int, Any]:
        p = made[0]
        return p.num_tokens, int(p.cos.shape[0]) if p.rotates else -1, layer._watch.latest

    q_written = frozenset({5})
    found: Array = call.long(write, lambda: (layer._block_table(0),), note, q_written)
    return found


def write_here(layer: Any, p: Projection, pos_offset: int | None, check_finite: bool) -> Array:
    """Write projections, checked but for their number and positions, on the stream of the call."""
    pool = layer._pool
    layer._target.refuse_capture(f"{type(layer).__name__}.write")
    layer._refuse_bad()
    tokens, start = p.num_tokens, layer._stored(0)
    layer._check_room(start, tokens)
    first = start if pos_offset is None else pos_offset
    p.check_positions(first)
    check_finite = check_flag("check_finite", check_finite, True)
    first_look = check_finite and pool.looks_first
    if first_look:
        p.check_finite(pool)
    layer._watch_nothing()
    marker = layer._marker(start) if check_finite and not first_look else None
    with held:
        _write_checked(layer, p, start, first, marker)
    return p.q_out


def _write_checked(layer: Any, p: Projection, start: int, first: int, marker: Any) -> None:
    """Write projections for which nothing but the memory may be missing."""
    pool, number, tokens, room = layer._pool, layer._target.number, p.num_tokens, layer._room
    layer._take_room(start + tokens)
    try:
        if layer._full_precision is None:
            table = layer._ids if pool.target.values_on_host else layer._block_table(0)[0]
            look = 0 if marker is None else p.watch(pool, marker)
            p.write(pool, table, number(start, 0), number(first, 2), look)
            layer._lengths[0] = start + tokens
        else:  # by way of unrounded floats, which then go the way of `append`
            staging = layer._full_precision.staging(tokens)
            p.write(staging, one_block_each(layer._target.device_key, 1)[0], 0, first)

            def watch(k: Array, v: Array, skipped: int) -> int:
                return (
                    0
                    if marker is None
                    else p.watch_rows(pool, k, v, marker._replace(skipped=skipped))
                )

            layer._store(0, *layer._full_precision.staged(staging, tokens), start, watch)
    except BaseException:
        layer._unmake_room(0, start, room)
        raise
