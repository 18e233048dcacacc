"""Copy stored rows and blocks, word for word, on the CPU.

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
from numkv.kernels.cpu.vectors.arrays import row_of
from numkv.kernels.operations import Operations, implements


@implements(Operations.copy_blocks)
def copy_blocks(source, source_ids, to, to_ids):
    to[to_ids] = source[source_ids]


def make_copy_tokens(WORD):
    """Make the kernel that copies the rows of tokens of `WORD` bytes an element."""

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
        make_copy_tokens,
        signature,
        args=(bytes_,),
        label=f"copy_tokens, {bytes_} bytes an element",
        emit=types.none,
    )


@implements(Operations.copy_tokens)
def copy_tokens(source, source_slots, to, to_slots):
    if not source.size or not to.size:
        return
    if source.ndim == 3:  # rows of one element
        source, to = source[..., None], to[..., None]
    bits = f"u{source.dtype.itemsize}"  # a float's copy might quieten a NaN
    _copy_tokens(source.dtype.itemsize)(source.view(bits), source_slots, to.view(bits), to_slots)
