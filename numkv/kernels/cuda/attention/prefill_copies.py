"""How attention's kernel for many query rows copies KV tiles to shared memory, behind the program.

Rows of 16-bit floats go where products read them. Others go to memory of their own as they are stored, with the scales
of their tokens, and are widened from there: see `numkv.kernels.cuda.attention.prefill_codes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.prefill_sizes import CHUNK
from numkv.kernels.cuda.instructions import (
    cp_async_4_words,
    cp_async_16_rows,
    cp_async_commit,
    global_address,
    keep,
    keep_address,
    shared_address,
)  # fmt: skip
from numkv.kernels.cuda.launches import THREADS

__all__ = ["make_copy", "rows_at_once"]

I32, U32 = np.int32, np.uint32


class Side(NamedTuple):
    """What a thread needs to copy rows of K or V: a chunk of 16 bytes of every so many rows."""

    source: Any  #: address of its chunk in the first row of all
    there: Any  #: whether it copies any
    to: Any  #: address of its chunk of its first row, in the first stage
    table: Any  #: address of what says where that row is, for the first tile
    sizes: Any
    most: Any  #: 0 where its chunk is past the end of the pool's rows, 16 elsewhere


def rows_at_once(tile: int, chunks: int) -> int:
    """Rows that a block takes at once, a thread each of their chunks: as many as divide a tile."""
    return max(n for n in range(1, THREADS // chunks + 1) if tile % n == 0)


def make_side(TILE, CHUNKS, STORED, STEP, NEXT_STAGE):
    """The functions that copy rows of `STORED` chunks, and zeros up to `CHUNKS`, `STEP` bytes apart."""
    ROWS = rows_at_once(TILE, CHUNKS)
    COUNT, WHOLE = TILE // ROWS, CHUNKS == STORED
    copy_rows = cp_async_16_rows(COUNT, 8 * ROWS, ROWS * STEP, False)
    copy_sized = cp_async_16_rows(COUNT, 8 * ROWS, ROWS * STEP, True)

    @register_jitable
    def begin_side(thread, source, base, table, sizes):
        chunk, row = thread % CHUNKS, thread // CHUNKS
        return Side(
            keep_address(source + chunk * CHUNK), row < ROWS, keep(U32(base + row * STEP + chunk * CHUNK)),
            keep(U32(table + row * 8)), keep(U32(sizes + row * 4)), I32(CHUNK) if chunk < STORED else I32(0),
        )  # fmt: skip

    @register_jitable
    def copy_side(side, number, plain):
        if side.there:
            odd = U32(number & 1)
            to, table = side.to + odd * U32(NEXT_STAGE), side.table + odd * U32(8 * TILE)
            if WHOLE and plain:
                copy_rows(to, table, side.source)
            else:
                sizes = side.sizes + U32(number & 3) * U32(4 * TILE)
                copy_sized(to, table, side.source, sizes, side.most)

    return begin_side, copy_side


def make_scales(TILE, WORDS, FIRST):
    """The functions that copy the scales of a tile's tokens; a thread from `FIRST` on a token each."""
    copy_words = cp_async_4_words(max(WORDS, 1))

    @register_jitable
    def begin_scales(thread, scale, base, table, sizes):
        token = thread - FIRST
        there = WORDS > 0 and token >= 0 and token < TILE
        return Side(
            keep_address(global_address(scale)), there, keep(U32(base + token * (4 * WORDS))),
            keep(U32(table + token * 8)), keep(U32(sizes + token * 4)), I32(0),
        )  # fmt: skip

    @register_jitable
    def copy_scales(side, number):
        if side.there:
            table = side.table + U32(number & 1) * U32(8 * TILE)
            copy_words(side.to, table, side.source, side.sizes + U32(number & 3) * U32(4 * TILE))

    @register_jitable
    def begin_nothing(thread, scale, base, table, sizes):
        return I32(0)

    @register_jitable
    def copy_nothing(side, number):
        pass

    return (begin_scales, copy_scales) if WORDS else (begin_nothing, copy_nothing)


def make_copy(SIZES):
    """The functions that copy KV tiles to shared memory."""
    TILE, K, V = SIZES.tile, SIZES.k, SIZES.v
    if SIZES.widened:
        k_sizes, v_sizes = (
            (K.chunks, K.chunks, CHUNK * K.chunks),
            (V.chunks, V.chunks, CHUNK * V.chunks),
        )
        K_FROM, V_FROM = K.rows, V.rows
    else:
        k_sizes = SIZES.padded * 2 // CHUNK, K.chunks, SIZES.k_step
        v_sizes = SIZES.padded_v * 2 // CHUNK, V.chunks, SIZES.v_step
        K_FROM, V_FROM = 0, SIZES.k_bytes
    begin_k, copy_k = make_side(TILE, *k_sizes, SIZES.next_stage)
    begin_v, copy_v = make_side(TILE, *v_sizes, SIZES.next_stage)
    begin_k_scales, copy_k_scales = make_scales(TILE, K.words, 0)
    begin_v_scales, copy_v_scales = make_scales(TILE, V.words, THREADS - TILE)

    @register_jitable
    def begin_copies(pools, places, base, thread):
        """A thread's part of all copies."""
        k, k_scale, v, v_scale = pools
        sizes = shared_address(places.sizes)
        k_table, v_table = shared_address(places.k_scale), shared_address(places.v_scale)
        return (
            begin_k(thread, global_address(k), base + K_FROM, shared_address(places.k), sizes),
            begin_v(thread, global_address(v), base + V_FROM, shared_address(places.v), sizes),
            begin_k_scales(thread, k_scale, base + K.scales, k_table, sizes),
            begin_v_scales(thread, v_scale, base + V.scales, v_table, sizes),
        )

    @register_jitable
    def copy(sides, number, plain):
        """Start to copy a tile; `plain` if all of its tokens count."""
        copy_k(sides[0], number, plain)
        copy_v(sides[1], number, plain)
        copy_k_scales(sides[2], number)
        copy_v_scales(sides[3], number)
        cp_async_commit()

    return begin_copies, copy
