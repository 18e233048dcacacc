"""Attention of up to eight query rows on tensor cores: decoding, speculation, short chunks.

Operands are swapped: ``S^T = K Q^T`` and ``O^T = V^T P^T``. So tokens are the sixteen rows of a product, and query rows
its eight columns. A product costs the same for a group of one and of eight, which needs no padding.

A warp computes 16 tokens at a time, a *slice*, independently of other warps until its item ends. It copies its slices
of K and V to shared memory, each while it computes the one before. It scores them, and has its own online softmax and
sums. In the end the warps' sums are merged in order.

A warp's registers for a slice, by the layouts of `numkv.kernels.cuda.instructions`, for its thread ``l``, with ``g = l
// 4`` and ``t = l % 4``::

    scores      S^T, 16 tokens x 8 rows    c0, c1: token g, rows 2t and 2t + 1      c2, c3: token g + 8
    weights     P^T, the same, turned      b0: tokens 2t and 2t + 1, row g          b1: tokens 2t + 8 and 2t + 9
    sums        O^T, 16 columns x 8 rows   like scores, with columns of V in place of tokens

Rows in shared memory have their chunks of 16 bytes in an order that depends on the token, ``chunk ^ token % 8``. So
eight threads that read the same chunk of eight tokens have no bank conflict.

Codes and 8-bit floats become float16 in registers, which is exact. The elements of a word of K or V are then in another
order than a plain product needs. Queries, and columns of the result, are used in that order instead. Scales of tokens
multiply scores and weights. INT4 has one scale for each 32 elements. Scores of such a group are summed separately, and
weights are multiplied by the scale of the group's columns. Queries and weights that need more than 16 bits have two
halves of 16 bits, and use two products.

The running maximum is raised when a score exceeds it by `SLACK`; until then weights may exceed 1. So threads rarely
have to synchronise.

A slice is masked if some rows see a token that others do not, or if no row sees a token. If V has NaN or infinity
there, each row uses a product of its own, of its visible tokens.

**Items.** As in `numkv.kernels.cuda.attention.items`, a thread counts the items of its sequences. The threads of a warp
add these up by shuffles. Warps without sequences go straight to the one barrier. The warp that has an item's sequence
then writes the item for the block: two records of four words, and addresses of rows. Rows are copied asynchronously.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.decode_products import make_load_queries, make_scores, make_sums
from numkv.kernels.cuda.attention.items import (
    Extent,
    batch_of,
    extent,
    make_item_of,
    row_of,
    sequences_each,
)
from numkv.kernels.cuda.attention.sizes import (
    BANKS,
    CHUNK,
    DECODE_ROWS,
    DECODE_TILE,
    SLICE,
    WARPS,
    sizes_for,
)
from numkv.kernels.cuda.instructions import (
    EVERYONE,
    cp_async_16_or_zeros,
    cp_async_16_steps,
    cp_async_commit,
    cp_async_wait,
    exp2_approx,
    global_address,
    keep,
    keep_address,
    load_global_2,
    load_global_4,
    load_shared,
    load_shared_4,
    load_shared_8,
    load_shared_16,
    shared_address,
    shuffle,
    shuffle_float,
    shuffle_xor_float,
    store_global,
    store_global_8,
    store_shared_4,
    store_shared_8,
    store_shared_16,
    store_shared_pairs,
)
from numkv.kernels.cuda.launches import THREADS
from numkv.kernels.cuda.simd import ceil_div, natural
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.softmax import LN_2, LOG2_E, finish

F, I32, U32 = np.float32, np.int32, np.uint32


class Lane(NamedTuple):
    """A thread's places in its warp."""

    number: Any
    group: Any
    place: Any
    warp: Any


class Pools(NamedTuple):
    """K and V, and the block table."""

    k: Any
    k_scale: Any
    v: Any
    v_scale: Any
    block_table: Any
    by_slot: Any
    shift: Any  #: of a position to its block; negative where blocks have no power of two of tokens


class SeenTokens(NamedTuple):
    """The tokens of an item. In slices that start from `low` to `high`, all rows see the same tokens."""

    begin: Any
    end: Any
    low: Any
    high: Any


class RowSource(NamedTuple):
    """Where a thread finds its token of a slice: threads 0 to 15 that of K, the others that of V."""

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
    """Return `x`, of 31 bits and equal in all threads of a warp, so that the compiler knows it is uniform.

    Without that knowledge the compiler assumes that a warp may diverge, and makes each shuffle a call.
    """
    return I32(shuffle(U32(x), U32(0)))


def make_copies(SIZES):
    """Make the functions that look up tokens' places, and start copies of slices of K and V to shared memory."""
    WORDS = SIZES.words
    SCALED = SIZES.k.groups + SIZES.v.groups > 0

    def make_copy(SIDE, FIRST):
        LANES, ROWS, STEP = SIDE.lanes, SIDE.rows, SIDE.step
        CHUNKS, PADDED = SIDE.chunks, SIDE.padded
        TIMES = SLICE // ROWS
        copy_rows = cp_async_16_steps(TIMES, ROWS, ROWS * STEP)

        @register_jitable
        def copy_even(source, token_step, to, place):
            """Copy rows of one block, none of which is missing, from the first one's place."""
            copy_rows(to, source + np.int64(U32(place)) * np.int64(CHUNK), ROWS * token_step)

        @register_jitable
        def copy_any(source, token_step, to, places, tokens, lane):
            """Copy rows whose places are in shared memory, from `FIRST` on; those not in `tokens` become zeros."""
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
        """Load the scales of the thread's token, of K or of V; zeros if it has none."""
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
        """Return the place of the thread's token in chunks, and a bit for each token of the slice that exists."""
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
        """Start the copy of a slice; each thread passes the place of its token."""
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
    """Return the block of a position, and the offset within it."""
    if source.shift >= 0:
        block = I32(position >> source.shift)
        return block, I32(position - I32(block << source.shift))
    size = natural(source.block_size)
    block = natural(position) // size
    return I32(block), I32(natural(position) - block * size)


@register_jitable
def look_up(source, seen, position, block):
    """Return the block table's entry for a position; -1 outside the item's tokens."""
    entry = I32(-1)
    if seen.begin <= position and position < seen.end:
        at = position if source.by_slot else block
        entry = I32(load_global_4(source.row + natural(at) * source.row_step))
    return entry


def make_places(SIZES):
    """Make the functions that compute the places from and to which a thread copies, and those that it reads."""
    K, V = SIZES.k, SIZES.v
    PLACES = SIZES.places
    STAGE, K_SCALED, V_SCALED = K.size + V.size, K.groups > 0, V.groups > 0

    @register_jitable
    def chunks(step):
        """Convert a step of whole chunks from bytes to chunks; it is not negative, so this is a shift."""
        return U32(np.uint64(step) // np.uint64(CHUNK))

    @register_jitable
    def source_of(pools, seq, head, start, lane):
        """Return where rows of a head are: of K for threads 0 to 15, of V for others."""
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
        """Return where a thread writes chunks of K and V and where it reads them, in its warp's first stage."""
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


#: Shared memory for the record of a block's item, and for its warps' counts.
RECORD_BYTES = 48
#: Words that describe the work for a thread's sequence.
EXTENT_WORDS = 8


class Counted(NamedTuple):
    """The counts of a block's threads, in shared memory."""

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
    """The part of an item that a warp needs before it begins."""

    begin: Any  #: the tokens that some row sees, within the split
    end: Any
    low: Any  #: slices that start from `low` to `high` have none that only some of the rows see
    high: Any
    seq: Any
    head: Any  #: the kv head
    rows: Any


class Task(NamedTuple):
    """The part of an item that a block needs when it stores results."""

    rows: Any
    head: Any
    splits: Any  #: of the sequence


count_of, walk, item_of = make_item_of(DECODE_ROWS)


@register_jitable
def has_sequences(batch, lane):
    """Return whether a warp's threads may have sequences; if threads have several, some warps have none."""
    return 32 * lane.warp < batch.seq_lens.shape[0]


@register_jitable
def count_own(batch, counted, thread):
    """Return the items of a thread's sequences."""
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
    """Return the sequence of a thread's item `inner`, its work, and the item's number within it."""
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
    """Count items of each thread and of those before it in its warp; share the warp's total."""
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
    """Return the number of all items, after a barrier."""
    a, b, c, d = load_shared_16(U32(record + 32))
    return uniform(U32(U32(a + b) + U32(c + d)))


@register_jitable
def put_task(batch, number, counted, record, rows, q, out, parts, lane, thread):
    """Write the item of a number; the warp that has its sequence does so."""
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
    # All threads of the warp read the item of the one that has it.
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
    """Return the item of a block's record, as far as a warp needs it to begin."""
    a, b, c, d = load_shared_16(record)
    e, f, g, _ = load_shared_16(U32(record + 16))
    return ToldItem(I32(a), I32(b), I32(c), I32(d), natural(e), natural(f), I32(g))


@register_jitable
def task_of(record):
    """Return the item of a block's record, as far as a block needs it to store results."""
    _, head, rows, splits = load_shared_16(U32(record + 16))
    return Task(I32(rows), natural(head), I32(splits))


MINUS_INF = -np.inf
# Weights may be so many powers of two above 1. For float16 they are also scaled up, as small numbers lose bits there.
SLACK, LIFT = 4, 8
# A scale below 2**-100 counts as 2**-100 in maxima.
LEAST_LOG = -100


class DecodeState(NamedTuple):
    """The registers of a thread."""

    running: Any  #: of two rows: bases, limits, totals
    sums: Any
    scores: Any
    part: Any  #: scores of a group of INT4
    weights: Any  #: as the second matrix of a product: two words, and two of their second halves


class Scaling(NamedTuple):
    """The factors and the cap of scores."""

    first: Any  #: what those of the thread's two rows are multiplied by
    second: Any
    soft_cap: Any


def make_softmax(SIZES):
    """Make the functions that mask a slice's scores and turn them into weights."""
    K_INT8, V = SIZES.k.kind == "int8", SIZES.v
    V_SCALED = V.groups > 0
    V_INT8, V_INT4 = V.kind == "int8", V.kind == "int4"
    V_WORDS = (V.groups + 1) // 2
    LIFTED = V.operand == "fp16"
    SHIFT = LIFT if LIFTED else 0

    @register_jitable
    def scale_scores(c, s0, s1, scales, lane):
        """Multiply scores by the scales of their rows and tokens."""
        low = high = F(1)
        if K_INT8:
            low = shuffle(scales[0], U32(lane.group)).view(np.float32)
            high = shuffle(scales[0], U32(lane.group + 8)).view(np.float32)
        c[0], c[1] = c[0] * low * s0, c[1] * low * s1
        c[2], c[3] = c[2] * high * s0, c[3] * high * s1

    @register_jitable
    def cap_scores(c, soft_cap):
        inverse = F(1) / soft_cap
        for i in range(4):
            c[i] = soft_cap * F(math.tanh(c[i] * inverse)) * F(LOG2_E)

    @register_jitable
    def mask_scores(c, tokens, rows, first, lane):
        """Minus infinity where a token does not count or its row does not see it."""
        for i in range(4):
            token = lane.group + 8 * (i // 2)
            row = natural(2 * lane.place + i % 2)
            position = first + token
            there = U32(tokens >> U32(token)) & U32(1)
            if there == 0 or position < rows.begin[row] or rows.end[row] <= position:
                c[i] = F(MINUS_INF)

    @register_jitable
    def exponent(bits):
        """Return the power of two above a float32 of these bits; no less than `LEAST_LOG`."""
        return F(max(I32(U32(bits & U32(0x7FFFFFFF)) >> U32(23)) - I32(126), I32(LEAST_LOG)))

    @register_jitable
    def value_scales(scales, lane):
        """Return the scales of V of tokens g and g + 8, and powers of two above them."""
        low, high, log_low, log_high = F(1), F(1), F(0), F(0)
        if V_INT8:
            low_bits = shuffle(scales[0], U32(lane.group + 16))
            high_bits = shuffle(scales[0], U32(lane.group + 24))
            low, high = low_bits.view(np.float32), high_bits.view(np.float32)
            log_low, log_high = exponent(low_bits), exponent(high_bits)
        if V_INT4:  # of the largest; words of positive floats are in their order
            largest = U32(0)
            for i in range(V_WORDS):
                largest = max(largest, U32(U32(scales[i] << U32(16)) & U32(0x7FFF0000)))
                largest = max(largest, U32(scales[i] & U32(0x7FFF0000)))
            log = exponent(largest)
            log_low = shuffle_float(log, U32(lane.group + 16))
            log_high = shuffle_float(log, U32(lane.group + 24))
        return low, high, log_low, log_high

    @register_jitable
    def reach(score, log):
        """Return the bound for the maximum that keeps a weight times its scale in range."""
        return F(score + log) if V_SCALED else score

    @register_jitable
    def raise_maxima(c, running, sums, log_low, log_high, COUNT):
        """Raise the maxima of rows that have a score above their limit, and rescale earlier sums."""
        for i in range(2):
            top = max(reach(c[i], log_low), reach(c[i + 2], log_high))
            for lanes in (4, 8, 16):
                top = max(top, shuffle_xor_float(top, U32(lanes)))
            if top > running[2 + i]:
                if running[2 + i] > F(MINUS_INF):  # else there is nothing yet
                    shrink = exp2_approx(running[i] - (top - F(SHIFT)))
                    running[4 + i] *= shrink
                    for n in range(COUNT):
                        sums[2 * n + i] *= shrink
                running[i], running[2 + i] = F(top - F(SHIFT)), F(top + F(SLACK))

    @register_jitable
    def softmax(c, running, sums, log_low, log_high, COUNT):
        """Turn scores into weights, and add them to the totals."""
        above = (
            max(reach(c[0], log_low), reach(c[2], log_high)) > running[2]
            or max(reach(c[1], log_low), reach(c[3], log_high)) > running[3]
        )  # fmt: skip
        if cuda.any_sync(EVERYONE, above):
            raise_maxima(c, running, sums, log_low, log_high, COUNT)
        for i in range(4):
            c[i] = exp2_approx(c[i] - running[i % 2])
        running[4] += c[0] + c[2]
        running[5] += c[1] + c[3]

    return scale_scores, cap_scores, mask_scores, value_scales, softmax


# ---------------------------------------------------------------- results


def make_store(Q_KIND, SIZES):
    """Make the functions that merge the warps of a block, normalise, and store rows or a split's parts.

    Shared memory has sums by warps and columns. The rows of a column are adjacent, so a thread reads four rows of its
    column at once. Maxima and totals are stored by warps and pairs of rows, two of each; weights of warps by rows.
    """
    V, TILES, DIM = SIZES.v, SIZES.v.tiles, SIZES.v.dim
    BY_HEAD = kind(V.kind).scales_per == "head"
    # Factor of a group's number for its column of a tile, and the distance of its second column.
    FACTOR, SECOND = (1, 8) if V.bits == 16 else (2, 1)
    ROW_BYTES, COLUMNS, PADDED = 4 * DECODE_ROWS, ceil_div(DIM, THREADS), ceil_div(DIM, 4) * 4
    WARP_BYTES = 16 * TILES * ROW_BYTES
    store_sums = store_shared_pairs(
        tuple(ROW_BYTES * (16 * tile + i) for tile in range(TILES) for i in (0, SECOND))
    )
    store_ends = store_shared_pairs((0, 8))
    load_0, load_1, load_2, load_3 = (load_shared(16, w * WARP_BYTES, of="f") for w in range(4))
    load_ends = load_shared(4, *(8 * (8 * w) + 8 * i for w in range(WARPS) for i in (0, 1)), of="f")
    WORD = np.float32 if Q_KIND == "fp32" else np.uint16
    _, store = codec(Q_KIND, "float32")

    @register_jitable
    def leave_sums(running, sums, ends, area, lane):
        """Put a warp's sums, maxima and totals into shared memory."""
        for i in range(2):
            for lanes in (4, 8, 16):
                running[4 + i] += shuffle_xor_float(running[4 + i], U32(lanes))
        if lane.group == 0:
            for i in range(2):
                if not running[2 + i] > F(MINUS_INF):
                    running[i] = F(MINUS_INF)
                running[2 + i] = running[4 + i]
            store_ends(U32(ends + 64 * lane.warp + 16 * lane.place), running)
        column = lane.warp * (16 * TILES) + FACTOR * lane.group
        at = U32(area + ROW_BYTES * column + 8 * lane.place)
        store_sums(at, sums)

    @register_jitable
    def weigh_warps(task, rows, v_scale, sinks, lse, ends, weights, thread):
        """Compute the factors of each warp's sums; store the logs of rows' sums."""
        if thread < DECODE_ROWS:
            row = I32(thread)
            t0, s0, t1, s1, t2, s2, t3, s3 = load_ends(U32(ends + 8 * row - 4 * (row & 1)))
            top = max(max(max(F(MINUS_INF), t0), max(t1, t2)), t3)
            base = top if top > F(MINUS_INF) else F(0)
            w0, w1 = exp2_approx(t0 - base), exp2_approx(t1 - base)
            w2, w3 = exp2_approx(t2 - base), exp2_approx(t3 - base)
            total = cuda.fma(w3, s3, cuda.fma(w2, s2, cuda.fma(w1, s1, F(w0 * s0))))
            factor = F(1)
            if task.splits > 1:
                if thread < task.rows:
                    to = rows.to[thread] + 4 * PADDED
                    store_global_8(to, top.view(np.uint32), total.view(np.uint32))
            elif thread < task.rows:
                h = natural(rows.head[thread])
                sink = F(sinks[h]) * F(LOG2_E) if sinks.shape[0] > 0 else F(MINUS_INF)
                factor, log_sum = finish(top, total, sink, F(LN_2))
                if lse.shape[0] > 0:
                    lse[natural(rows.token[thread]), h] = log_sum
            if BY_HEAD:
                factor = F(factor) * F(v_scale[task.head])
            if BY_HEAD or task.splits == 1:
                f = F(factor)
                w0, w1, w2, w3 = F(w0 * f), F(w1 * f), F(w2 * f), F(w3 * f)
            store_shared_16(
                U32(weights + 16 * row),
                w0.view(np.uint32), w1.view(np.uint32), w2.view(np.uint32), w3.view(np.uint32),
            )  # fmt: skip

    @register_jitable
    def store_column(task, rows, step, d, at, weights, x, FIRST):
        """Add up the sums of the warps for four rows of a column, and store them."""
        a, b, c, e = load_0(at), load_1(at), load_2(at), load_3(at)
        for i in range(4):
            w0, w1, w2, w3 = load_0(U32(weights + U32(16 * (FIRST + i))))
            x[i] = cuda.fma(w3, e[i], cuda.fma(w2, c[i], cuda.fma(w1, b[i], F(w0 * a[i]))))
        if task.splits > 1:  # floats side by side
            for i in range(4):
                if FIRST + i < task.rows:
                    store_global(rows.to[FIRST + i] + 4 * d, x[i])
        else:
            for i in range(4):
                if FIRST + i < task.rows:
                    store_global(rows.to[FIRST + i] + step * d, WORD(store(x[i])))

    @register_jitable
    def store_rows(task, rows, step, area, weights, x, thread):
        """Store the rows: the result, or a split's parts of it. A thread has one column of all rows."""
        for n in range(COLUMNS):
            d = natural(thread + THREADS * n)
            if d < DIM:
                at = U32(area + ROW_BYTES * d)
                store_column(task, rows, step, d, at, weights, x, 0)
                if task.rows > 4:
                    store_column(task, rows, step, d, U32(at + U32(16)), weights, x, 4)

    return leave_sums, weigh_warps, store_rows


# ---------------------------------------------------------------- the kernel


def make_attend_slice(SIZES):
    """Make the function that attends to a slice in shared memory."""
    COUNT = 2 * SIZES.v.tiles
    scores = make_scores(SIZES)
    scale_scores, cap_scores, mask_scores, value_scales, softmax = make_softmax(SIZES)
    add_slice = make_sums(SIZES)

    @register_jitable
    def attend_slice(k_at, v_at, q, scaling, tokens, first, seen, rows, scales, state, lane):
        c = state.scores
        scores(k_at, q, c, state.part, scales, lane)
        scale_scores(c, scaling.first, scaling.second, scales, lane)
        if scaling.soft_cap > F(0):
            cap_scores(c, scaling.soft_cap)
        # Whether some of the rows see a token that others do not.
        ragged = first < seen.low or first > seen.high
        if ragged or tokens != U32(EVERYONE):
            mask_scores(c, tokens, rows, first, lane)
        low, high, log_low, log_high = value_scales(scales, lane)
        softmax(c, state.running, state.sums, log_low, log_high, COUNT)
        add_slice(v_at, c, state.weights, state.sums, scales, low, high, ragged, rows, first, lane)

    return attend_slice


def make_attend_item(Q_KIND, SIZES):
    """Make the function that takes a warp through its slices of an item."""
    K_BY_HEAD = kind(SIZES.k.kind).scales_per == "head"
    QUERIES = SIZES.queries
    SUMS, WORDS, STAGE = 4 * SIZES.v.tiles, SIZES.words, SIZES.k.size + SIZES.v.size
    TILE_BITS = DECODE_TILE.bit_length() - 1
    find, copy = make_copies(SIZES)
    load_queries, Q_SCALED = make_load_queries(Q_KIND, SIZES)
    attend_slice = make_attend_slice(SIZES)
    source_of, places_of = make_places(SIZES)

    @register_jitable
    def attend_item(pools, scale, soft_cap, record, rows, start, state, lane):
        running, sums = state.running, state.sums
        scales = cuda.local.array(WORDS, np.uint32)
        next_scales = cuda.local.array(WORDS, np.uint32)
        k_to, v_to, k_at, v_at = places_of(start, lane)
        item = told(record)
        source = source_of(pools, item.seq, item.head, start, lane)
        seen = SeenTokens(item.begin, item.end, uniform(item.low), uniform(item.high))
        # The thread's token of the next slice to look up, and the block table entry of the one before.
        size = source.block_size
        first = uniform(I32(item.begin & I32(-DECODE_TILE)) + lane.warp * SLICE)
        position = I32(first + lane.number % SLICE)
        block, offset = divide(position, source)
        blocks, offsets = divide(I32(DECODE_TILE), source)
        left = I32(max(I32(item.end - first), I32(0)) + I32(DECODE_TILE - 1))
        # The mask shows the compiler that it is not negative.
        count = I32(uniform(I32(left >> I32(TILE_BITS))) & I32(0x7FFFFFFF))
        entry, entry_offset = look_up(source, seen, position, block), offset
        # The queries, and the factors of scores of columns 2t and 2t + 1.
        q_at = keep(U32(start + QUERIES + 8 * lane.number))
        # Columns past the last row use its queries, too; their results are ignored.
        own = natural(min(lane.group, I32(item.rows - 1)))
        back = load_queries(rows.query[own], q_at, lane)
        cuda.syncthreads()
        if K_BY_HEAD:
            scale *= F(pools.k_scale[item.head])
        s0, s1 = scale, scale
        if Q_SCALED:
            s0 *= shuffle_float(back, U32(8 * lane.place))
            s1 *= shuffle_float(back, U32(8 * lane.place + 4))
        scaling = Scaling(s0, s1, soft_cap)
        for i in range(2):
            running[i], running[2 + i], running[4 + i] = F(0), F(MINUS_INF), F(0)
        for i in range(SUMS):
            sums[i] = F(0)

        tokens, stage = U32(0), U32(0)
        for i in range(WORDS):
            scales[i] = U32(0)
        n = I32(-1)
        while n < count:
            # Copy the next slice to the place of the previous one, which all have read.
            cuda.syncwarp()
            next_tokens = U32(0)
            if I32(n + 1) < count:
                place, next_tokens = find(source, entry, entry_offset, next_scales, lane)
                copy(source, U32(k_to + stage), U32(v_to + stage), place, next_tokens, lane)
            cp_async_commit()
            position = I32(position + DECODE_TILE)
            block, offset = I32(block + blocks), I32(offset + offsets)
            if offset >= size:
                block, offset = I32(block + 1), I32(offset - size)
            entry, entry_offset = look_up(source, seen, position, block), offset
            stage = U32(U32(STAGE) - stage)
            if n >= 0:
                cp_async_wait(1)
                cuda.syncwarp()
                attend_slice(
                    U32(k_at + stage), U32(v_at + stage), q_at, scaling, tokens, first, seen, rows, scales, state, lane
                )  # fmt: skip
                first = I32(first + DECODE_TILE)
            n = I32(n + 1)
            tokens = next_tokens
            for i in range(WORDS):
                scales[i] = next_scales[i]

    return attend_item


def make_decode(Q_KIND, K_KIND, V_KIND, DIM, DIM_V):
    """Make the kernel.

    Parameters
    ----------
    Q_KIND, K_KIND, V_KIND : str
        Kinds of q (and the output), of K and of V.
    DIM, DIM_V : int
        Elements of rows of K and V.
    """
    SIZES = sizes_for(Q_KIND, K_KIND, V_KIND, DIM, DIM_V)
    SUMS = 4 * SIZES.v.tiles
    MERGED, RECORD_WORDS = WARPS * DECODE_ROWS, RECORD_BYTES // 4
    ENDS, EXTENTS = 2 * MERGED, EXTENT_WORDS * THREADS
    attend_item = make_attend_item(Q_KIND, SIZES)
    leave_sums, weigh_warps, store_rows = make_store(Q_KIND, SIZES)

    def kernel(
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, options, sinks, out, lse, parts
    ):  # fmt: skip
        by_slot, shift, _, _, _, _, _, _, scale, soft_cap = options
        batch = batch_of(q, k, block_table, seq_lens, q_starts, ranges, options)
        thread = natural(cuda.threadIdx.x)
        within = I32(thread % 32)
        lane = Lane(within, I32(within // 4), I32(within % 4), uniform(thread // 32))

        memory = cuda.shared.array(0, np.uint32)
        record_ = cuda.shared.array(RECORD_WORDS, np.uint32, alignment=16)
        ends_ = cuda.shared.array(ENDS, F, alignment=16)
        weights_ = cuda.shared.array(MERGED, F, alignment=16)
        counts = cuda.shared.array(THREADS, np.int32)
        befores = cuda.shared.array(THREADS, np.int32)
        extents = cuda.shared.array(EXTENTS, np.uint32, alignment=16)
        row_query = cuda.shared.array(DECODE_ROWS, np.int64)
        row_to = cuda.shared.array(DECODE_ROWS, np.int64)
        row_token = cuda.shared.array(DECODE_ROWS, np.int32)
        row_head = cuda.shared.array(DECODE_ROWS, np.int32)
        row_begin = cuda.shared.array(DECODE_ROWS, np.int32)
        row_end = cuda.shared.array(DECODE_ROWS, np.int32)
        rows = DecodeRows(row_query, row_to, row_token, row_head, row_begin, row_end)
        record = shared_address(record_)
        ends, weigh = shared_address(ends_), shared_address(weights_)
        start = I32((shared_address(memory) + (BANKS - 1)) & -BANKS)
        running = cuda.local.array(6, np.float32)  # of two rows: bases, limits, totals
        sums = cuda.local.array(SUMS, np.float32)
        scores = cuda.local.array(4, np.float32)
        part = cuda.local.array(4, np.float32)
        weights = cuda.local.array(4, np.uint32)
        state = DecodeState(running, sums, scores, part, weights)
        pools = Pools(k, k_scale, v, v_scale, block_table, by_slot, shift)

        counted = Counted(counts, befores, shared_address(extents))
        count_items(batch, counted, record, lane, thread)
        cuda.syncthreads()
        items = all_items(record)
        number = I32(cuda.blockIdx.x)
        while number < items:
            put_task(batch, number, counted, record, rows, q, out, parts, lane, thread)
            cuda.syncthreads()
            attend_item(pools, scale, soft_cap, record, rows, start, state, lane)
            cuda.syncthreads()
            task = task_of(record)
            leave_sums(running, sums, ends, start, lane)
            cuda.syncthreads()
            weigh_warps(task, rows, v_scale, sinks, lse, ends, weigh, thread)
            cuda.syncthreads()
            store_rows(task, rows, out.strides[2], start, weigh, scores, thread)
            number = I32(number + I32(cuda.gridDim.x))
            if number < items:  # what has been put down is read until here
                cuda.syncthreads()

    return kernel
