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

I32, U32 = np.int32, np.uint32


class Side(NamedTuple):
    """What a thread needs to copy rows of K or V: a chunk of 16 bytes of every so many rows."""

    source: Any  #: address of its chunk in the first row of all
    there: Any  #: whether it copies any
    to: Any  #: address of its chunk of its first row, in the first stage
    table: Any  #: address of what says where that row is, for the first tile
    sizes: Any
    most: Any  #: 0 where its chunk is past the end of the pool's rows, 16 elsewhere


def rows_at_once(sizes: Any, chunks: int) -> int:
    """Rows that a block takes at once, a thread each of their chunks: as many as divide a tile."""
    return max(n for n in range(1, sizes.threads // chunks + 1) if sizes.tile % n == 0)


def make_side(SIZES, CHUNKS, STORED, STEP, TABLE=0, TO=0):
    """The functions that copy rows of `STORED` chunks, and zeros up to `CHUNKS`, `STEP` bytes apart.

    `TABLE` and `TO` are added to the addresses of tables and shared memory.
    """
    TILE, NEXT_STAGE, ROWS = SIZES.tile, SIZES.next_stage, rows_at_once(SIZES, CHUNKS)
    COUNT, WHOLE, ALL = TILE // ROWS, CHUNKS == STORED, SIZES.threads == ROWS * CHUNKS
    copy_rows = cp_async_16_rows(COUNT, 8 * ROWS, ROWS * STEP, False, TABLE, TO)
    copy_sized = cp_async_16_rows(COUNT, 8 * ROWS, ROWS * STEP, True, TABLE, TO, not WHOLE)

    @register_jitable
    def begin_side(thread, source, base, table, sizes):
        chunk, row = thread % CHUNKS, thread // CHUNKS
        return Side(
            keep_address(source + chunk * CHUNK), row < ROWS, keep(U32(base + row * STEP + chunk * CHUNK)),
            keep(U32(table + row * 8)), keep(U32(sizes + row * 4)), I32(CHUNK) if chunk < STORED else I32(0),
        )  # fmt: skip

    @register_jitable
    def copy_side(side, number, plain):
        if ALL or side.there:
            odd = U32(number & 1)
            to, table = side.to + odd * U32(NEXT_STAGE), side.table + odd * U32(8 * TILE)
            if WHOLE and plain:
                copy_rows(to, table, side.source)
            else:
                sizes = side.sizes + U32(number & 3) * U32(4 * TILE)
                if WHOLE:
                    copy_sized(to, table, side.source, sizes)
                else:
                    copy_sized(to, table, side.source, sizes, side.most)

    return begin_side, copy_side


def make_scales(TILE, WORDS, FIRST):
    """The functions that copy the scales of a tile's tokens; a thread from `FIRST` on a token each."""
    copy_words = cp_async_4_words(max(WORDS, 1))

    @register_jitable
    def begin_scales(thread, scale, base, table, sizes):
        token = I32(thread - FIRST)
        there = token >= I32(0) and token < I32(TILE)
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
    # A thread's rows and chunks of V are as those of K where both have rows of the same size: so are most addresses.
    ALIKE, V_TABLE = k_sizes == v_sizes, 16 * TILE
    begin_k, copy_k = make_side(SIZES, *k_sizes)
    begin_v, copy_v = make_side(SIZES, *v_sizes, *((V_TABLE, V_FROM - K_FROM) if ALIKE else ()))
    begin_k_scales, copy_k_scales = make_scales(TILE, K.words, 0)
    begin_v_scales, copy_v_scales = make_scales(TILE, V.words, SIZES.threads - TILE)

    @register_jitable
    def begin_copies(pools, places, base, thread):
        """A thread's part of all copies."""
        k, k_scale, v, v_scale = pools
        sizes, table = shared_address(places.sizes), shared_address(places.rows)
        of_k = begin_k(thread, global_address(k), base + K_FROM, table, sizes)
        if ALIKE:
            source = keep_address(global_address(v) + of_k.source - global_address(k))
            of_v = Side(source, of_k.there, of_k.to, of_k.table, of_k.sizes, of_k.most)
        else:
            of_v = begin_v(thread, global_address(v), base + V_FROM, table + V_TABLE, sizes)
        return (
            of_k, of_v,
            begin_k_scales(thread, k_scale, base + K.scales, table + 2 * V_TABLE, sizes),
            begin_v_scales(thread, v_scale, base + V.scales, table + 3 * V_TABLE, sizes),
        )  # fmt: skip

    @register_jitable
    def copy(sides, number, plain):
        """Start to copy a tile; `plain` if all of its tokens count."""
        copy_k(sides[0], number, plain)
        copy_v(sides[1], number, plain)
        copy_k_scales(sides[2], number)
        copy_v_scales(sides[3], number)
        cp_async_commit()

    return begin_copies, copy
