"""jitclasses over the buffers of layers and caches, for a user's own ``@njit`` functions.

They share memory with the objects that made them: what compiled code appends, the object sees, and the other way
round. Compiling them takes a moment, so an object makes its own when ``.jit`` is first asked for, and no kernel of
numkv takes one (a function with a jitclass argument never hits Numba's disk cache).

Rows go in and come out as they are stored. An object with ``rotate=True`` stores rotated rows: turn yours with
`numkv.storage.hadamard.Rotation` before they are appended, and what is loaded back.

On CUDA they hold the host side only (block table and lengths); device buffers lie beside them, on the object.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import types
from numba.experimental import jitclass
from numba.extending import register_jitable

from numkv.errors import NumkvError
from numkv.kernels.builder import SCALES, WORDS
from numkv.kinds import kind
from numkv.rows.address import slot_of
from numkv.rows.codec import row_codec, scales_at

__all__ = ["cache_struct", "cells_struct", "host_struct", "layer_struct"]

GROWN = "the cache has grown since `jit` was asked for; ask again"


def _scales(kind):
    """The Numba type of the scales of a kind's buffer."""
    dtype, ndim = SCALES[kind]
    return types.Array(dtype, ndim, "C")


def _scales_of_layers(scales_per):
    """What `scales_at` returns, for a buffer with a block for each layer, which has scales of heads of its own."""
    at, BY_HEAD = scales_at(scales_per), scales_per == "head"

    @register_jitable
    def of(scale, layer, head, position, num_heads):
        return at(scale, layer, layer * num_heads + head if BY_HEAD else head, position)

    return of


@functools.cache
def layer_struct(k_kind, v_kind):
    """The jitclass of one layer of one sequence.

    Parameters
    ----------
    k_kind, v_kind : str
        Kinds of its buffers.

    Returns
    -------
    jitclass
        Fields ``k`` and ``v`` ``(num_blocks, num_kv_heads, block_size, head_dim)`` in words, ``k_scale`` and
        ``v_scale`` ``(num_blocks, num_kv_heads, block_size)`` (INT4: words, with an axis of groups more),
        ``block_table`` int32 ``(max_blocks,)``, ``context_lens`` int32 ``(1,)``; property ``length``; methods
        ``append``, ``slot``, ``load_k``, ``load_v``.
    """
    store_k, load_k_row = row_codec(k_kind)
    store_v, load_v_row = row_codec(v_kind)
    k_scales_at, v_scales_at = (
        scales_at(kind(k_kind).scales_per),
        scales_at(kind(v_kind).scales_per),
    )

    class LayerStruct:
        def __init__(self, k, v, k_scale, v_scale, block_table, context_lens):
            self.k = k
            self.v = v
            self.k_scale = k_scale
            self.v_scale = v_scale
            self.block_table = block_table
            self.context_lens = context_lens

        @property
        def length(self):
            """Tokens in the layer."""
            return np.int64(self.context_lens[0])

        def slot(self, position):
            """Flat slot of the token at `position`: ``block * block_size + offset``."""
            return slot_of(self.block_table, position, self.k.shape[2])

        def append(self, k_row, v_row):
            """Append one token's K and V, float32 ``(num_kv_heads, head_dim)``; False if there is no room."""
            block_size = np.int64(self.k.shape[2])
            position = self.length
            if position < 0 or position >= len(self.block_table) * block_size:
                return False
            slot = self.slot(position)
            if slot < 0:  # a paged layer that has not taken the block
                return False
            block, offset = slot // block_size, slot % block_size
            for h in range(self.k.shape[1]):
                k_scales = k_scales_at(self.k_scale, block, h, offset)
                store_k(k_row[h], self.k[block, h, offset], k_scales)
                v_scales = v_scales_at(self.v_scale, block, h, offset)
                store_v(v_row[h], self.v[block, h, offset], v_scales)
            self.context_lens[0] += 1
            return True

        def load_k(self, position, head, out):
            """Put the K row of a token and kv head into `out`, float32 ``(head_dim,)``."""
            slot = self.slot(position)
            block_size = np.int64(self.k.shape[2])
            block, offset = slot // block_size, slot % block_size
            scales = k_scales_at(self.k_scale, block, head, offset)
            load_k_row(self.k[block, head, offset], scales, out)

        def load_v(self, position, head, out):
            """Put the V row of a token and kv head into `out`, float32 ``(head_dim_v,)``."""
            slot = self.slot(position)
            block_size = np.int64(self.v.shape[2])
            block, offset = slot // block_size, slot % block_size
            scales = v_scales_at(self.v_scale, block, head, offset)
            load_v_row(self.v[block, head, offset], scales, out)

    return jitclass(
        [
            ("k", WORDS[k_kind][:, :, :, ::1]),
            ("v", WORDS[v_kind][:, :, :, ::1]),
            ("k_scale", _scales(k_kind)),
            ("v_scale", _scales(v_kind)),
            ("block_table", types.int32[::1]),
            ("context_lens", types.int32[::1]),
        ]
    )(LayerStruct)


@functools.cache
def cache_struct(k_kind, v_kind):
    """The jitclass of a `numkv.KVCache`.

    Parameters
    ----------
    k_kind, v_kind : str
        Kinds of its buffers.

    Returns
    -------
    jitclass
        Fields ``k`` and ``v`` ``(num_layers, num_kv_heads, capacity, head_dim)`` in words, ``k_scale`` and ``v_scale``
        ``(num_layers, num_kv_heads, capacity)`` (INT4: words, with an axis of groups more; fp8:
        ``(num_layers * num_kv_heads,)``), ``context_lens`` int64 ``(num_layers,)`` (rows appended to each layer),
        ``lengths`` int64 ``(1,)`` (tokens advanced), ``current`` int64 ``(1,)`` (0 once the cache has grown out of
        these buffers); property ``length``; methods ``append``, ``advance``, ``load_k``, ``load_v``.
    """
    store_k, load_k_row = row_codec(k_kind)
    store_v, load_v_row = row_codec(v_kind)
    k_scales_at, v_scales_at = (
        _scales_of_layers(kind(k_kind).scales_per),
        _scales_of_layers(kind(v_kind).scales_per),
    )

    class CacheStruct:
        def __init__(self, k, v, k_scale, v_scale, context_lens, lengths, current):
            self.k = k
            self.v = v
            self.k_scale = k_scale
            self.v_scale = v_scale
            self.context_lens = context_lens
            self.lengths = lengths
            self.current = current

        @property
        def length(self):
            """Tokens advanced past."""
            return self.lengths[0]

        def append(self, layer, k_row, v_row):
            """Append one token's K and V, float32 ``(num_kv_heads, head_dim)``.

            False if there is no room, no such layer, or the cache has grown since `jit` was asked for.
            """
            if self.current[0] == 0 or layer < 0 or layer >= len(self.context_lens):
                return False
            position = self.context_lens[layer]
            if position < 0 or position >= self.k.shape[2]:
                return False
            for h in range(self.k.shape[1]):
                k_scales = k_scales_at(self.k_scale, layer, h, position, self.k.shape[1])
                store_k(k_row[h], self.k[layer, h, position], k_scales)
                v_scales = v_scales_at(self.v_scale, layer, h, position, self.v.shape[1])
                store_v(v_row[h], self.v[layer, h, position], v_scales)
            self.context_lens[layer] += 1
            return True

        def advance(self, n):
            """Move the length by `n` tokens; False if a layer has not got them all, or the cache has grown since."""
            if self.current[0] == 0 or n < 0:
                return False
            for layer in range(len(self.context_lens)):
                if self.lengths[0] + n > self.context_lens[layer]:
                    return False
            self.lengths[0] += n
            return True

        def load_k(self, layer, position, head, out):
            """Put the K row of a token and kv head into `out`, float32 ``(head_dim,)``."""
            if self.current[0] == 0:
                raise NumkvError(GROWN)
            scales = k_scales_at(self.k_scale, layer, head, position, self.k.shape[1])
            load_k_row(self.k[layer, head, position], scales, out)

        def load_v(self, layer, position, head, out):
            """Put the V row of a token and kv head into `out`, float32 ``(head_dim_v,)``."""
            if self.current[0] == 0:
                raise NumkvError(GROWN)
            scales = v_scales_at(self.v_scale, layer, head, position, self.v.shape[1])
            load_v_row(self.v[layer, head, position], scales, out)

    return jitclass(
        [
            ("k", WORDS[k_kind][:, :, :, ::1]),
            ("v", WORDS[v_kind][:, :, :, ::1]),
            ("k_scale", _scales(k_kind)),
            ("v_scale", _scales(v_kind)),
            ("context_lens", types.int64[::1]),
            ("lengths", types.int64[::1]),
            ("current", types.int64[::1]),
        ]
    )(CacheStruct)


@functools.cache
def cells_struct():
    """The jitclass of the cells of a multi-sequence cache, on the host; see `numkv.cells`.

    Returns
    -------
    jitclass
        Fields ``positions`` and ``num_sequences`` int32 ``(num_cells,)``: the position of each cell, and how many
        sequences hold it (0: it is free); property ``num_cells``.
    """

    class CellsStruct:
        def __init__(self, positions, num_sequences):
            self.positions = positions
            self.num_sequences = num_sequences

        @property
        def num_cells(self):
            """Cells in all."""
            return np.int64(len(self.positions))

    ints = types.int32[::1]
    return jitclass([("positions", ints), ("num_sequences", ints)])(CellsStruct)


@functools.cache
def host_struct(lens_dtype):
    """The jitclass of the host side of a CUDA object.

    Parameters
    ----------
    lens_dtype : {"int32", "int64"}
        Dtype of its lengths.

    Returns
    -------
    jitclass
        Fields ``block_table`` int32 ``(max_blocks,)`` and ``context_lens`` ``(n,)``.
    """

    class HostStruct:
        def __init__(self, block_table, context_lens):
            self.block_table = block_table
            self.context_lens = context_lens

    lens = getattr(types, lens_dtype)[::1]
    return jitclass([("block_table", types.int32[::1]), ("context_lens", lens)])(HostStruct)
