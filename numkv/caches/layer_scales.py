"""Scales of fp8 storage in a cache of several layers, each of which has its own for every kv head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from numkv.storage.buffer import Buffer
from numkv.storage.pool import Pool


def with_scales_of_layers(pool: Pool, source: Pool | None = None) -> Pool:
    """A pool over the same buffers in which each block, a layer, has scales for its own kv heads.

    Parameters
    ----------
    pool : Pool
        Buffers with a block for each layer.
    source : Pool, optional
        What this function made for as many layers before: its scales are copied. Without it all are 1.

    Returns
    -------
    Pool
        Its scales of heads are ``(num_layers * num_kv_heads,)``; kinds without such scales stay as they are.
    """
    given = (None, None) if source is None else (source.k_buffer, source.v_buffer)
    buffers = (pool.k_buffer, pool.v_buffer)
    return Pool(*(_extended(buffer, old) for buffer, old in zip(buffers, given, strict=True)))


def _extended(buffer: Buffer, source: Buffer | None) -> Buffer:
    if buffer.kind.scales_per != "head":
        return buffer
    layers, heads = (int(n) for n in buffer.words.shape[:2])
    scales = np.ones(layers * heads, buffer.kind.scale_word)
    if source is not None:
        scales[:] = buffer.target.to_host(source.scales)
    return replace(buffer, scales=buffer.target.asarray(scales))


def pools_of_layers(pool: Pool) -> list[Pool]:
    """The pool as each layer sees it: with its own scales of heads, where there are such."""
    if "head" not in (pool.k_kind.scales_per, pool.v_kind.scales_per):
        return [pool] * int(pool.k.shape[0])
    return [
        Pool(_part(pool.k_buffer, layer), _part(pool.v_buffer, layer))
        for layer in range(int(pool.k.shape[0]))
    ]


def _part(buffer: Buffer, layer: int) -> Buffer:
    if buffer.kind.scales_per != "head":
        return buffer
    heads = int(buffer.words.shape[1])
    return replace(buffer, scales=buffer.scales[layer * heads : (layer + 1) * heads])
