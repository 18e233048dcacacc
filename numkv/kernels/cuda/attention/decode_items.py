"""Which items the blocks of decode attention take, where their rows lie, and how these are copied to shared memory.

As in `numkv.kernels.cuda.attention.items`, a thread counts the items of its sequences. Here the threads of a warp add
them up by shuffles, and warps without sequences go straight to the one barrier; then the warp that has the sequence of
an item puts all down that the block needs to know: two records of four words, and addresses of rows, so that nobody
computes them again. Rows are copied behind the program; see `numkv.kernels.cuda.attention.decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.items import Extent, extent, make_item_of, row_of, sequences_each
from numkv.kernels.cuda.attention.sizes import CHUNK, DECODE_ROWS, SLICE
from numkv.kernels.cuda.instructions import (
    cp_async_16_or_zeros,
    cp_async_16_steps,
    global_address,
    keep,
    keep_address,
    load_global_2,
    load_global_4,
    load_shared_4,
    load_shared_8,
    load_shared_16,
    shuffle,
    store_shared_4,
    store_shared_8,
    store_shared_16,
)
from numkv.kernels.cuda.simd import natural

I32, U32 = np.int32, np.uint32
EVERYONE = 0xFFFFFFFF


class Lane(NamedTuple):
    """A thread's places in its warp."""

    number: Any
    group: Any
    place: Any
    warp: Any


class Pools(NamedTuple):
    """K and V, and where tokens lie there."""

    k: Any
    k_scale: Any
    v: Any
    v_scale: Any
    block_table: Any
    by_slot: Any
    shift: Any  #: of a position to its block; negative where blocks have no power of two of tokens


class SeenTokens(NamedTuple):
    """The tokens of an item: slices that start from `low` to `high` have none that only some of the rows see."""

    begin: Any
    end: Any
    low: Any
    high: Any


class RowSource(NamedTuple):
    """Where a thread finds rows: of K by threads 0 to 15, of V by the others; a token of a slice each."""

    row: Any  #: address of the sequence's row of the block table, and bytes between its entries
    row_step: Any
    by_slot: Any
    places: Any  #: where the thread leaves its token's place, in shared memory
    shift: Any  #: of a position to its block; negative where blocks have no power of two of tokens
    block_size: Any
    num_blocks: Any
    block_step: Any  #: between blocks, and between tokens, in chunks
    token_step: Any
    run: Any  #: chunks from the slice's first token to the thread's, in one block
    k_from: Any  #: address of the chunk that the thread copies, in the first row of a slice at the pool's start
    k_token: Any  #: bytes between tokens
    v_from: Any
    v_token: Any
    scales: Any  #: address of the head's scales, and bytes between those of blocks and of tokens
    scales_block: Any
    scales_token: Any


@register_jitable
def uniform(x):
    """`x`, which all threads of a warp have, of 31 bits, in a way that the compiler knows it.

    Where it does not know that a warp goes on as one, each shuffle is a call.
    """
    return I32(shuffle(U32(x), U32(0)))


def make_copies(SIZES):
    """The functions that look places of tokens up, and start to copy slices of K and V to shared memory."""
    WORDS = SIZES.words
    SCALED = SIZES.k.groups + SIZES.v.groups > 0

    def make_copy(SIDE, FIRST):
        LANES, ROWS, STEP = SIDE.lanes, SIDE.rows, SIDE.step
        CHUNKS, PADDED = SIDE.chunks, SIDE.padded
        TIMES = SLICE // ROWS
        copy_rows = cp_async_16_steps(TIMES, ROWS, ROWS * STEP)

        @register_jitable
        def copy_even(source, token_step, to, place):
            """Copy rows that lie in one block, all of which there are; of the first one's place."""
            copy_rows(to, source + np.int64(U32(place)) * np.int64(CHUNK), ROWS * token_step)

        @register_jitable
        def copy_any(source, token_step, to, places, tokens, lane):
            """Copy rows whose places lie in shared memory, from `FIRST` on; zeros for those not among `tokens`."""
            first, chunk = lane.number // LANES, lane.number % LANES
            source -= first * token_step
            for i in range(TIMES):
                token = first + i * ROWS
                place = load_shared_4(U32(places + 4 * FIRST) + U32(4 * token))
                at = U32(U32(to ^ U32((i * ROWS % 8) << 4)) + U32(i * ROWS * STEP))
                there = U32(tokens >> U32(token)) & U32(1)
                size = U32(U32(there) << U32(4)) if chunk < CHUNKS else U32(0)
                if token < SLICE and chunk < PADDED:
                    cp_async_16_or_zeros(at, source + np.int64(place) * np.int64(CHUNK), size)

        return copy_even, copy_any

    copy_even_k, copy_any_k = make_copy(SIZES.k, 0)
    copy_even_v, copy_any_v = make_copy(SIZES.v, SLICE)
    # Whether all threads copy whole rows.
    EVEN = all(s.chunks == s.lanes and s.rows * s.lanes == 32 for s in (SIZES.k, SIZES.v))
    INT8 = SIZES.k.kind == "int8", SIZES.v.kind == "int8"
    GROUPS = SIZES.k.groups, SIZES.v.groups

    def make_scales(int8, groups):
        @register_jitable
        def load(address, scales):
            if int8:
                scales[0] = load_global_4(address)
            else:
                for i in range(groups // 2):
                    low, high = load_global_2(address + 4 * i), load_global_2(address + 4 * i + 2)
                    scales[i] = U32(low | U32(high << U32(16)))
                if groups % 2:
                    scales[groups // 2] = load_global_2(address + 2 * (groups - 1))

        return load

    load_k, load_v = make_scales(INT8[0], GROUPS[0]), make_scales(INT8[1], GROUPS[1])
    ALIKE = INT8[0] == INT8[1] and GROUPS[0] == GROUPS[1]
    K_SCALED, V_SCALED = GROUPS[0] > 0, GROUPS[1] > 0

    @register_jitable
    def load_scales(source, block, offset, is_there, scales, lane):
        """The scales of the thread's token, whichever side it has; zeros where there is none."""
        for i in range(WORDS):
            scales[i] = U32(0)
        if SCALED and is_there:
            address = source.scales + block * source.scales_block + offset * source.scales_token
            if ALIKE:
                load_k(address, scales)
            elif lane.number < SLICE:
                if K_SCALED:
                    load_k(address, scales)
            elif V_SCALED:
                load_v(address, scales)

    @register_jitable
    def find(source, entry, offset, scales, lane):
        """Where the thread's token lies, in chunks, and which tokens of the slice there are, by bits."""
        block = entry
        if source.by_slot and entry >= 0:
            block, offset = divide(entry, source)
        is_there = block >= 0 and block < source.num_blocks
        place = U32(0)
        if is_there:
            place = U32(U32(U32(block) * source.block_step) + U32(U32(offset) * source.token_step))
        load_scales(source, natural(block), natural(offset), is_there, scales, lane)
        return place, U32(cuda.ballot_sync(EVERYONE, is_there))

    @register_jitable
    def copy(source, k_to, v_to, place, tokens, lane):
        """Start to copy a slice, of which a thread knows the place of its token."""
        k_place, v_place = shuffle(place, U32(0)), shuffle(place, U32(SLICE))
        first = k_place if lane.number < SLICE else v_place
        if EVEN:
            in_line = place == U32(first + source.run)
            if cuda.all_sync(EVERYONE, in_line and tokens == U32(EVERYONE)):
                copy_even_k(source.k_from, source.k_token, k_to, k_place)
                copy_even_v(source.v_from, source.v_token, v_to, v_place)
                return
        places = U32(source.places - 4 * lane.number)
        store_shared_4(source.places, place)
        cuda.syncwarp()
        copy_any_k(source.k_from, source.k_token, k_to, places, tokens, lane)
        copy_any_v(source.v_from, source.v_token, v_to, places, tokens, lane)

    return find, copy


@register_jitable
def divide(position, source):
    """The block of a position, and the offset in there."""
    if source.shift >= 0:
        block = I32(position >> source.shift)
        return block, I32(position - I32(block << source.shift))
    size = natural(source.block_size)
    block = natural(position) // size
    return I32(block), I32(natural(position) - block * size)


@register_jitable
def look_up(source, seen, position, block):
    """The entry of the block table for a position; -1 outside of what the item sees."""
    entry = I32(-1)
    if seen.begin <= position and position < seen.end:
        at = position if source.by_slot else block
        entry = I32(load_global_4(source.row + natural(at) * source.row_step))
    return entry


def make_places(SIZES):
    """The functions that say where a thread copies to and from, and where it reads."""
    K, V = SIZES.k, SIZES.v
    PLACES = SIZES.places
    STAGE, K_SCALED, V_SCALED = K.size + V.size, K.groups > 0, V.groups > 0

    @register_jitable
    def chunks(step):
        """Bytes between rows, whole chunks, in chunks; not negative, so that this is a shift."""
        return U32(np.uint64(step) // np.uint64(CHUNK))

    @register_jitable
    def source_of(pools, seq, head, start, lane):
        """Where rows of a head are: of K for threads 0 to 15, of V for others."""
        k, v, block_table = pools.k, pools.v, pools.block_table
        block_size, num_blocks = I32(k.shape[2]), I32(k.shape[0])
        block_step, token_step = chunks(k.strides[0]), chunks(k.strides[2])
        if lane.number >= SLICE:
            block_step, token_step = chunks(v.strides[0]), chunks(v.strides[2])
        block_step, token_step = keep(block_step), keep(token_step)
        run = keep(U32(token_step * U32(lane.number % SLICE)))
        k_from = (
            global_address(k)
            + head * k.strides[1]
            + min(lane.number % K.lanes, K.chunks - 1) * CHUNK
        )
        v_from = (
            global_address(v)
            + head * v.strides[1]
            + min(lane.number % V.lanes, V.chunks - 1) * CHUNK
        )
        k_from += lane.number // K.lanes * k.strides[2]
        v_from += lane.number // V.lanes * v.strides[2]
        row = global_address(block_table) + seq * block_table.strides[0]
        address, by_block, by_token = np.int64(0), np.int64(0), np.int64(0)
        if K_SCALED:
            address = global_address(pools.k_scale) + head * pools.k_scale.strides[1]
            by_block, by_token = pools.k_scale.strides[0], pools.k_scale.strides[2]
        if V_SCALED:
            if lane.number >= SLICE:
                address = global_address(pools.v_scale) + head * pools.v_scale.strides[1]
                by_block, by_token = pools.v_scale.strides[0], pools.v_scale.strides[2]
        return RowSource(
            keep_address(row),
            block_table.strides[1],
            pools.by_slot != 0,
            keep(U32(start + PLACES + 128 * lane.warp + 4 * lane.number)),
            I32(pools.shift),
            block_size,
            num_blocks,
            block_step,
            token_step,
            run,
            keep_address(k_from),
            k.strides[2],
            keep_address(v_from),
            v.strides[2],
            address,
            by_block,
            by_token,
        )

    @register_jitable
    def places_of(start, lane):
        """Where a thread writes chunks of K and V, and where it reads them: in its warp's first stage."""
        k_start = U32(start + lane.warp * (2 * STAGE))
        v_start = U32(k_start + U32(K.size))
        row, chunk = lane.number // K.lanes, lane.number % K.lanes
        k_to = U32(k_start + row * K.step + ((chunk ^ (row % 8)) << 4))
        k_to = keep(k_to)
        if K.lanes == V.lanes and K.step == V.step:
            v_to = U32(k_to + U32(K.size))
        else:
            row, chunk = lane.number // V.lanes, lane.number % V.lanes
            v_to = keep(U32(v_start + row * V.step + ((chunk ^ (row % 8)) << 4)))
        row, chunk = lane.number % 16, lane.number // 16
        k_at = U32(k_start + row * K.step + ((chunk ^ (row % 8)) << 4))
        if V.bits == 16:  # matrices in another order
            row, chunk = lane.number % 8 + lane.number // 16 * 8, lane.number // 8 % 2
        v_at = U32(v_start + row * V.step + ((chunk ^ (row % 8)) << 4))
        return k_to, v_to, keep(k_at), keep(v_at)

    return source_of, places_of


#: Shared memory for what a block is told of an item, and for its warps' counts.
RECORD_BYTES = 48
#: Words for what there is to do for a sequence of a thread.
EXTENT_WORDS = 8


class Counted(NamedTuple):
    """What the threads of a block have counted, in shared memory."""

    counts: Any  #: items of a thread
    befores: Any  #: and of those before it in its warp
    extents: Any  #: address of what there is to do for the last sequence of each thread


class DecodeRows(NamedTuple):
    """The query rows of an item, in shared memory."""

    query: Any  #: address of the row of q
    to: Any  #: address of the row's part if the sequence is split, else of its row of the output
    token: Any  #: among those of q
    head: Any  #: the q head
    begin: Any  #: the tokens that the row sees
    end: Any


class ToldItem(NamedTuple):
    """What a warp needs to know before it begins."""

    begin: Any  #: the tokens that some row sees, within the split
    end: Any
    low: Any  #: slices that start from `low` to `high` have none that only some of the rows see
    high: Any
    seq: Any
    head: Any  #: the kv head
    rows: Any


class Task(NamedTuple):
    """What a block needs to know in the end."""

    rows: Any
    head: Any
    splits: Any  #: of the sequence


def make_tasks():
    """The functions that count a call's items, and put down one of them."""
    count_of, walk, item_of = make_item_of(DECODE_ROWS)

    @register_jitable
    def has_sequences(batch, lane):
        """Whether threads of a warp may have any; where they have several each, some warps then have none."""
        return 32 * lane.warp < batch.seq_lens.shape[0]

    @register_jitable
    def count_own(batch, counted, thread):
        """Items of the sequences that a thread counts."""
        each, count = sequences_each(batch), np.int64(0)
        b = natural(thread * each)
        end = min(b + each, batch.seq_lens.shape[0])
        at = U32(counted.extents + 4 * EXTENT_WORDS * thread)
        while b < end:
            own = extent(batch, b)
            count += count_of(batch, own)
            store_shared_16(at, U32(own.start), U32(own.tokens), U32(own.length), U32(own.first))
            store_shared_8(U32(at + U32(16)), U32(own.split_len), U32(own.splits))
            b = natural(b + 1)
        return count

    @register_jitable
    def extent_of(batch, counted, inner, first):
        """The sequence of item `inner` of a thread's, what there is to do for it, and the item's number in there."""
        if sequences_each(batch) > 1:
            return walk(batch, inner, first)
        at = U32(counted.extents + 4 * EXTENT_WORDS * first)
        start, tokens, length, begin = load_shared_16(at)
        split_len, splits = load_shared_8(U32(at + U32(16)))
        own = Extent(
            natural(start), natural(tokens), natural(length), natural(begin), natural(split_len), natural(splits)
        )  # fmt: skip
        return first, own, inner

    @register_jitable
    def count_items(batch, counted, record, lane, thread):
        """Items of each thread, and how many those before it in its warp have; what a warp has, for the others."""
        upto = U32(0)
        if has_sequences(batch, lane):
            count = U32(count_own(batch, counted, thread))
            upto = count
            for step in (1, 2, 4, 8, 16):
                other = shuffle(upto, U32(U32(lane.number - step) & U32(31)))
                if lane.number >= step:
                    upto = U32(upto + other)
            counted.counts[thread], counted.befores[thread] = count, U32(upto - count)
        if lane.number == 31:
            store_shared_4(U32(record + 32 + 4 * lane.warp), upto)

    @register_jitable
    def all_items(record):
        """The number of all items, after a barrier."""
        a, b, c, d = load_shared_16(U32(record + 32))
        return uniform(U32(U32(a + b) + U32(c + d)))

    @register_jitable
    def put_task(batch, number, counted, record, rows, q, out, parts, lane, thread):
        """Put down the item of a number, by the warp that has its sequence."""
        if not has_sequences(batch, lane):
            return
        a, b, c, _ = load_shared_16(U32(record + 32))
        before = U32(counted.befores[thread])
        before = U32(before + (a if lane.warp > 0 else U32(0)))
        before = U32(before + (b if lane.warp > 1 else U32(0)))
        before = U32(before + (c if lane.warp > 2 else U32(0)))
        inner, count = U32(U32(number) - before), U32(counted.counts[thread])
        owners = U32(cuda.ballot_sync(EVERYONE, inner < count))
        if owners == 0:
            return
        # All threads of the warp look at the item of the one that has it.
        owner = U32(31 - cuda.clz(owners))
        first = natural(thread - lane.number + I32(owner))
        b, own, inner_one = extent_of(batch, counted, natural(shuffle(inner, owner)), first)
        item = item_of(batch, b, own, inner_one)
        low = item.all_begin if item.begin < item.all_begin else np.int64(0)
        high = item.all_end - SLICE if item.all_end < item.end else item.end
        if lane.number == 0:
            store_shared_16(record, U32(item.begin), U32(item.end), U32(low), U32(high))
            store_shared_16(
                U32(record + 16), U32(item.seq), U32(item.head), U32(item.rows), U32(item.splits)
            )
        if lane.number < DECODE_ROWS:
            i = natural(lane.number)
            token, head, begin, end, part = row_of(batch, item, i)
            rows.query[i] = global_address(q) + token * q.strides[0] + head * q.strides[1]
            to = global_address(out) + token * out.strides[0] + head * out.strides[1]
            if item.splits > 1:
                to = global_address(parts) + (part + item.split) * parts.strides[2]
            rows.to[i] = to
            rows.token[i], rows.head[i], rows.begin[i], rows.end[i] = token, head, begin, end

    @register_jitable
    def told(record):
        a, b, c, d = load_shared_16(record)
        e, f, g, _ = load_shared_16(U32(record + 16))
        return ToldItem(I32(a), I32(b), I32(c), I32(d), natural(e), natural(f), I32(g))

    @register_jitable
    def task(record):
        _, head, rows, splits = load_shared_16(U32(record + 16))
        return Task(I32(rows), natural(head), I32(splits))

    return count_items, all_items, put_task, told, task
