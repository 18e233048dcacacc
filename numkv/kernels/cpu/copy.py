"""Copy what is stored, word for word, on the CPU.

`copy_blocks`
    Whole blocks, between pools or within one: ``to[to_ids[i]] = source[source_ids[i]]``.
`copy_tokens`
    Single tokens, by slot: ``to[slot(to_slots[i])] = source[slot(source_slots[i])]`` for all heads.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import array, build
from numkv.kernels.cpu.simd import row_of

__all__ = ["copy_blocks", "copy_tokens"]


def copy_blocks(source, source_ids, to, to_ids):
    """Copy blocks.

    Parameters
    ----------
    source, to : array (num_blocks, ...)
        Buffers of the same dtype whose blocks have the same shape; they may be one. K, V or scales.
    source_ids, to_ids : int32 array (n,)
        Which blocks, and where they go. No block of `to_ids` is among `source_ids` where the buffers are one.
    """
    to[to_ids] = source[source_ids]


def make_copy_tokens(WORD):
    """The kernel that copies the rows of tokens of `WORD` bytes an element."""

    def kernel(source, source_slots, to, to_slots):
        source_size, to_size = np.int64(source.shape[2]), np.int64(to.shape[2])
        for h in range(source.shape[1]):
            for i in range(len(source_slots)):
                a, b = source_slots[i], to_slots[i]
                here = row_of(source, (a // source_size, np.int64(h), a % source_size))
                there = row_of(to, (b // to_size, np.int64(h), b % to_size))
                for d in range(len(here)):
                    there[d] = here[d]

    return kernel


@functools.cache
def _copy_tokens(bytes_: int) -> Any:
    word = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[bytes_]
    slots = array(types.int64, 1)
    signature = (array(word, 4), slots, array(word, 4, out=True), slots)
    return build(
        make_copy_tokens, signature, args=(bytes_,), label=f"copy_tokens, {bytes_} bytes an element"
    )


def copy_tokens(source, source_slots, to, to_slots):
    """Copy the rows of tokens, of all heads, pair by pair.

    Parameters
    ----------
    source, to : array (num_blocks, num_kv_heads, block_size, head_dim) or (num_blocks, num_kv_heads, block_size)
        Buffers of the same dtype, heads and head dim; they may be one array. K, V or scales.
    source_slots, to_slots : int64 array (n,)
        ``block * block_size + offset`` of each token, and of where it goes; no slot is written to twice. Where the
        buffers are one, no pair writes to a slot that a later pair reads.
    """
    if not source.size or not to.size:
        return
    if source.ndim == 3:  # rows of one element
        source, to = source[..., None], to[..., None]
    bits = f"u{source.dtype.itemsize}"  # a float's copy might quieten a NaN
    _copy_tokens(source.dtype.itemsize)(source.view(bits), source_slots, to.view(bits), to_slots)
