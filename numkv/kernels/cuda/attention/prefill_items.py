"""The items of the kernel for many query rows, the places of a KV tile's rows, and the copies of these.

An item is 64 or 128 query rows of a sequence, for one kv head. A row is a token and a q head of the group; the heads of
a token follow one another. The host knows neither lengths nor query starts. So each block counts the items itself, and
each thread those of its sequences. The thread that has an item's sequence writes the item for the others.

Tiles are copied to shared memory asynchronously. Rows of 16-bit floats go where products read them. Others are copied
as they are stored, with the scales of their tokens, to memory of their own, and widened from there: see
`numkv.kernels.cuda.attention.prefill_products`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.sizes import CHUNK
from numkv.kernels.cuda.instructions import (
    cp_async_4_words,
    cp_async_16_rows,
    cp_async_commit,
    global_address,
    keep,
    keep_address,
    shared_address,
)
from numkv.kernels.cuda.launches import number_at
from numkv.kernels.cuda.simd import natural
from numkv.rows.visible import visible_range, visible_to_all, visible_to_any

I32, U32 = np.int32, np.uint32


class CopySide(NamedTuple):
    """The arguments of a thread's copies of K or V: a chunk of 16 bytes of every so many rows."""

    source: Any  #: address of its chunk in the first row of all
    there: Any  #: whether it copies any
    to: Any  #: address of its chunk of its first row, in the first stage
    table: Any  #: address of what says where that row is, for the first tile
    sizes: Any
    most: Any  #: 0 where its chunk is past the end of the pool's rows, 16 elsewhere


def rows_at_once(sizes: Any, chunks: int) -> int:
    """Return the rows that a block copies at once, one chunk a thread: a number that divides a tile."""
    return max(n for n in range(1, sizes.threads // chunks + 1) if sizes.tile % n == 0)


def make_side(SIZES, CHUNKS, STORED, STEP, TABLE=0, TO=0):
    """Make the functions that copy rows of `STORED` chunks, and zeros up to `CHUNKS`, `STEP` bytes apart.

    `TABLE` and `TO` are added to the addresses of tables and shared memory.
    """
    TILE, NEXT_STAGE, ROWS = SIZES.tile, SIZES.next_stage, rows_at_once(SIZES, CHUNKS)
    COUNT, WHOLE, ALL = TILE // ROWS, CHUNKS == STORED, SIZES.threads == ROWS * CHUNKS
    copy_rows = cp_async_16_rows(COUNT, 8 * ROWS, ROWS * STEP, False, TABLE, TO)
    copy_sized = cp_async_16_rows(COUNT, 8 * ROWS, ROWS * STEP, True, TABLE, TO, not WHOLE)

    @register_jitable
    def begin_side(thread, source, base, table, sizes):
        chunk, row = thread % CHUNKS, thread // CHUNKS
        return CopySide(
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
    """Make the functions that copy the scales of a tile's tokens, one token a thread from `FIRST` on."""
    copy_words, NONE = cp_async_4_words(max(WORDS, 1)), WORDS == 0

    @register_jitable
    def begin_scales(thread, scale, base, table, sizes):
        if NONE:
            return I32(0)
        token = I32(thread - FIRST)
        there = token >= I32(0) and token < I32(TILE)
        return CopySide(
            keep_address(global_address(scale)), there, keep(U32(base + token * (4 * WORDS))),
            keep(U32(table + token * 8)), keep(U32(sizes + token * 4)), I32(0),
        )  # fmt: skip

    @register_jitable
    def copy_scales(side, number):
        if NONE:
            return
        if side.there:
            table = side.table + U32(number & 1) * U32(8 * TILE)
            copy_words(side.to, table, side.source, side.sizes + U32(number & 3) * U32(4 * TILE))

    return begin_scales, copy_scales


def make_copy(SIZES):
    """Make the functions that copy KV tiles to shared memory."""
    TILE, K, V = SIZES.tile, SIZES.k, SIZES.v
    if SIZES.widened:
        k_sizes = (K.chunks, K.chunks, CHUNK * K.chunks)
        v_sizes = (V.chunks, V.chunks, CHUNK * V.chunks)
        K_FROM, V_FROM = K.rows, V.rows
    else:
        k_sizes = SIZES.padded * 2 // CHUNK, K.chunks, SIZES.k_step
        v_sizes = SIZES.padded_v * 2 // CHUNK, V.chunks, SIZES.v_step
        K_FROM, V_FROM = 0, SIZES.k_bytes
    # A thread's rows and chunks of V equal those of K if both have rows of one size, and so do most addresses.
    ALIKE, V_TABLE = k_sizes == v_sizes, 16 * TILE
    begin_k, copy_k = make_side(SIZES, *k_sizes)
    begin_v, copy_v = make_side(SIZES, *v_sizes, *((V_TABLE, V_FROM - K_FROM) if ALIKE else ()))
    begin_k_scales, copy_k_scales = make_scales(TILE, K.words, 0)
    begin_v_scales, copy_v_scales = make_scales(TILE, V.words, SIZES.threads - TILE)

    @register_jitable
    def begin_copies(pools, places, base, thread):
        """Return a thread's part of all copies."""
        k, k_scale, v, v_scale = pools
        sizes, table = shared_address(places.sizes), shared_address(places.rows)
        of_k = begin_k(thread, global_address(k), base + K_FROM, table, sizes)
        if ALIKE:
            source = keep_address(global_address(v) + of_k.source - global_address(k))
            of_v = CopySide(source, of_k.there, of_k.to, of_k.table, of_k.sizes, of_k.most)
        else:
            of_v = begin_v(thread, global_address(v), base + V_FROM, table + V_TABLE, sizes)
        return (
            of_k, of_v,
            begin_k_scales(thread, k_scale, base + K.scales, table + 2 * V_TABLE, sizes),
            begin_v_scales(thread, v_scale, base + V.scales, table + 3 * V_TABLE, sizes),
        )  # fmt: skip

    @register_jitable
    def copy(sides, number, plain):
        """Start the copy of a tile; `plain` if all of its tokens count."""
        copy_k(sides[0], number, plain)
        copy_v(sides[1], number, plain)
        copy_k_scales(sides[2], number)
        copy_v_scales(sides[3], number)
        cp_async_commit()

    return begin_copies, copy


#: Longer than any sequence, and far from overflowing.
FAR = 1 << 40


class PrefillBatch(NamedTuple):
    """The sequences of a call; see `numkv.kernels.operations.Operations.attend`."""

    seq_lens: Any
    q_starts: Any
    ranges: Any
    num_tokens: Any
    capacity: Any  #: tokens that a row of the block table can say the places of
    window_left: Any
    group: Any  #: q heads of a kv head
    heads: Any  #: kv heads
    most_tokens: Any  #: sequences with no more queries than that are left to other kernels


class PrefillItem(NamedTuple):
    """A unit of work."""

    seq: Any
    start: Any  #: the sequence's first query
    position: Any  #: of that query; negative where there are more queries than tokens
    row: Any  #: the first query row, counted within the sequence
    rows: Any  #: how many there are
    head: Any  #: the kv head
    begin: Any  #: the tokens that some row sees
    end: Any
    all_begin: Any  #: the tokens that all rows see
    all_end: Any


class QueryRow(NamedTuple):
    """A row of an item."""

    token: Any  #: among those of q
    head: Any  #: the q head
    there: Any  #: whether there is one; else it sees nothing
    begin: Any  #: the tokens that it sees
    end: Any


class TilePlaces(NamedTuple):
    """The places of KV tiles' rows, in shared memory: bytes from the starts of the pools and of their scales."""

    rows: Any  #: of K of even and odd tiles, then of V, of scales of K and of scales of V
    sizes: Any  #: of four tiles: 16, or 0 for tokens that do not count
    lost: Any  #: of four tiles: whether there are tokens that lie outside of the pool


#: Elements of the array that stores an item.
ITEM_FIELDS = len(PrefillItem._fields)


@register_jitable
def whole_tiles(item, first, TILE):
    """Return the range of tiles that all rows see whole; tiles start at `first`."""
    begin = max(item.all_begin - first, np.int64(0)) + TILE - 1
    return I32(begin // TILE), I32(max(item.all_end - first, np.int64(0)) // TILE)


def make_prefill_items(ROWS, THREADS):
    """Make the functions that count a call's items, of so many rows, and find one, by so many threads."""

    @register_jitable
    def queries_of(batch, b):
        """Return a sequence's first query and their number: 0 if another kernel computes it. Inputs are not trusted."""
        start = number_at(batch.q_starts, b)
        tokens = number_at(batch.q_starts, b + 1) - start
        if (
            start < 0
            or tokens < 0
            or tokens > batch.num_tokens
            or start > batch.num_tokens - tokens
        ):
            tokens = np.int64(0)
        if tokens <= batch.most_tokens:
            tokens = np.int64(0)
        return start, tokens

    @register_jitable
    def count_of(batch, tokens):
        return (tokens * batch.group + ROWS - 1) // ROWS * batch.heads

    @register_jitable
    def count_prefill(batch, thread):
        """Return the items of a thread's sequences."""
        each = (batch.seq_lens.shape[0] + THREADS - 1) // THREADS
        count = np.int64(0)
        for b in range(thread * each, min((thread + 1) * each, batch.seq_lens.shape[0])):
            count += count_of(batch, queries_of(batch, b)[1])
        return count

    @register_jitable
    def put_prefill(batch, number, before, count, found, thread):
        """Write the item of a number to `found`, in the thread that has counted it after `before` others."""
        if number < before or number >= before + count:
            return
        b = thread * ((batch.seq_lens.shape[0] + THREADS - 1) // THREADS)
        start, tokens = queries_of(batch, b)
        inner = number - before
        while inner >= count_of(batch, tokens):
            inner -= count_of(batch, tokens)
            b += 1
            start, tokens = queries_of(batch, b)
        # Later rows see more tokens, so they come first.
        row_blocks = (tokens * batch.group + ROWS - 1) // ROWS
        row = (row_blocks - 1 - inner // batch.heads) * ROWS
        rows = min(np.int64(ROWS), tokens * batch.group - row)
        length = min(max(number_at(batch.seq_lens, b), np.int64(0)), np.int64(FAR))
        first = row // batch.group
        queries = (row + rows - 1) // batch.group + 1 - first
        position = length - tokens
        begin, end = visible_to_any(
            batch.ranges, start + first, queries, position + first, batch.window_left, batch.capacity
        )  # fmt: skip
        all_begin, all_end = visible_to_all(
            batch.ranges, start + first, queries, position + first, batch.window_left, batch.capacity
        )  # fmt: skip
        found[0], found[1], found[2], found[3] = b, start, position, row
        found[4], found[5] = rows, inner % batch.heads
        found[6], found[7], found[8], found[9] = begin, end, all_begin, all_end

    @register_jitable
    def find_prefill(found):
        """Return the item that `put_prefill` has written."""
        return PrefillItem(
            found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7], found[8], found[9]
        )  # fmt: skip

    @register_jitable
    def describe_row(batch, item, r):
        """Return row r of an item; past the last one, a row that sees no token, at the last one's place."""
        last = item.row + min(np.int64(r), item.rows - 1)
        t = natural(last) // natural(batch.group)
        head = item.head * batch.group + last - t * batch.group
        begin, end = np.int64(0), np.int64(0)
        if r < item.rows:
            begin, end = visible_range(
                batch.ranges, item.start + t, item.position + t, batch.window_left, batch.capacity
            )  # fmt: skip
        return QueryRow(item.start + t, head, r < item.rows, begin, end)

    @register_jitable
    def number_items(batch, counts, thread):
        """Return the items of a thread, of those before it, and of all."""
        count = count_prefill(batch, thread)
        counts[thread] = count
        cuda.syncthreads()
        before, items = np.int64(0), np.int64(0)
        for i in range(min(batch.seq_lens.shape[0], THREADS)):
            if i == thread:
                before = items
            items += counts[i]
        return count, before, items

    return number_items, put_prefill, find_prefill, describe_row


def make_places(TILE, K_SCALED, V_SCALED):
    """Make the function that looks up the places of a KV tile's rows, and of its tokens' scales if there are any."""

    @register_jitable
    def place_of(pool, block, head, offset):
        return block * pool.strides[0] + head * pool.strides[1] + offset * pool.strides[2]

    @register_jitable
    def locate(places, block_table, by_slot, shift, pools, item, tile, number, thread):
        """Write the offsets of a tile's rows from the pools' starts, and how many bytes each copy has.

        Tile `number` of an item starts with token `tile`. Tokens that do not count get the pool's first row, of which 0
        bytes are copied. If `shift` is not negative, blocks have ``1 << shift`` tokens.
        """
        k, k_scale, v, v_scale = pools
        if thread < TILE:
            position = tile + thread
            block, offset, size = np.int64(0), np.int64(0), np.int32(0)
            if item.begin <= position and position < item.end:
                place = position  # among the sequence's own blocks, or a slot of the pool
                if by_slot:
                    place = np.int64(block_table[natural(item.seq), natural(position)])
                block = np.int64(-1)
                if place >= 0:
                    if shift >= 0:
                        block = natural(place) >> shift
                        offset = natural(place) - (block << shift)
                    else:
                        block_size = natural(k.shape[2])
                        block = natural(place) // block_size
                        offset = natural(place) - block * block_size
                    if not by_slot:
                        block = np.int64(block_table[natural(item.seq), natural(block)])
                size = np.int32(16)
                if block < 0 or block >= k.shape[0]:
                    block, offset, size = np.int64(0), np.int64(0), np.int32(0)
                    places.lost[number & 3] = 1
            at = I32((number & 1) * TILE + thread) & I32(0x7FFFFFFF)
            places.rows[at] = place_of(k, block, item.head, offset)
            places.rows[at + 2 * TILE] = place_of(v, block, item.head, offset)
            if K_SCALED:
                places.rows[at + 4 * TILE] = place_of(k_scale, block, item.head, offset)
            if V_SCALED:
                places.rows[at + 6 * TILE] = place_of(v_scale, block, item.head, offset)
            places.sizes[(number & 3) * TILE + thread] = size

    return locate
