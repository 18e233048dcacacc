"""How decode attention finds rows of K and V, and copies them to shared memory behind the program.

See `numkv.kernels.cuda.attention.decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.decode_sizes import CHUNK, SLICE
from numkv.kernels.cuda.instructions import (
    cp_async_16_or_zeros,
    cp_async_16_steps,
    global_address,
    keep,
    keep_address,
    load_global_2,
    load_global_4,
    load_shared_4,
    shuffle,
    store_shared_4,
)  # fmt: skip
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


class Seen(NamedTuple):
    """The tokens of an item: slices that start from `low` to `high` have none that only some of the rows see."""

    begin: Any
    end: Any
    low: Any
    high: Any


class Source(NamedTuple):
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
    ALIKE, K_SCALED, V_SCALED = (
        INT8[0] == INT8[1] and GROUPS[0] == GROUPS[1],
        GROUPS[0] > 0,
        GROUPS[1] > 0,
    )

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
        return Source(
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
