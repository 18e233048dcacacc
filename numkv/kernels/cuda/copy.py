"""Copy whole blocks between pools or within one, on CUDA: ``to[to_ids[i]] = source[source_ids[i]]``.

Blocks are copied in the widest words that they are made of. Pairs with a block outside its pool are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.cuda.simd import THREADS, c_array, ceil_div, jit, launch

__all__ = ["copy_blocks"]

PIECE = 8 * THREADS  # words of a cache's block that a block of threads takes at once


def make_copy_blocks(WORD):
    """The kernel that copies blocks of words of `WORD` bytes."""

    def kernel(source, source_ids, to, to_ids):
        num_ids, size = source_ids.shape[0], np.int64(source.shape[1])
        pieces = (size + PIECE - 1) // PIECE
        for item in range(np.int64(cuda.blockIdx.x), num_ids * pieces, np.int64(cuda.gridDim.x)):
            i, piece = item // pieces, item % pieces
            a, b = np.int64(source_ids[i]), np.int64(to_ids[i])
            if a < 0 or a >= source.shape[0] or b < 0 or b >= to.shape[0]:
                continue
            end = min(size, (piece + 1) * PIECE)
            for w in range(piece * PIECE + cuda.threadIdx.x, end, THREADS):
                to[b, w] = source[a, w]

    return kernel


@functools.cache
def _copy_blocks(bytes_: int) -> Any:
    return jit(make_copy_blocks(bytes_), 8)


def copy_blocks(source, source_ids, to, to_ids):
    """Copy blocks.

    Parameters
    ----------
    source, to : array (num_blocks, ...)
        Contiguous buffers of the same dtype whose blocks have the same shape; they may be one. K, V or scales.
    source_ids, to_ids : int32 array (n,)
        Which blocks, and where they go. No block of `to_ids` is among `source_ids` where the buffers are one.
    """
    if 0 in (source.size, to.size, source_ids.size):
        return
    size = source.nbytes // source.shape[0]
    word = next(n for n in (8, 4, 2, 1) if size % n == 0)
    flat = [
        x.reshape((x.size,)).view(np.dtype(f"u{word}")).reshape((x.shape[0], size // word))
        for x in (source, to)
    ]
    blocks = source_ids.shape[0] * ceil_div(size // word, PIECE)
    launch(_copy_blocks(word), blocks, THREADS, flat[0], source_ids, flat[1], to_ids)


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    ids = c_array(types.int32, 1)
    for word in (types.uint8, types.uint64):
        signature = (c_array(word, 2), ids, c_array(word, 2), ids)
        yield f"copy_blocks[{word}]", make_copy_blocks(word.bitwidth // 8), signature
