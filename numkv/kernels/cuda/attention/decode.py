"""Attention of up to eight query rows on tensor cores: decoding, speculation, short chunks.

Operands are swapped: ``S^T = K Q^T`` and ``O^T = V^T P^T``, so tokens are the sixteen rows of a product and query rows
its eight columns. One product costs the same for a group of one and of eight, and nothing is padded there.

A warp takes 16 tokens at a time, a *slice*, and goes on alone until its item ends: it copies its own slices of K and V
to shared memory (the next one while it works on this one), scores them, keeps its own online softmax, and adds up its
own sums. So nothing within an item waits for other warps; in the end their sums are merged in order. What a warp holds
of a slice, by the layouts of `numkv.kernels.cuda.instructions`, for its thread ``l``, ``g = l // 4``,
``t = l % 4``::

    scores      S^T, 16 tokens x 8 rows    c0, c1: token g, rows 2t and 2t + 1      c2, c3: token g + 8
    weights     P^T, the same, turned      b0: tokens 2t and 2t + 1, row g          b1: tokens 2t + 8 and 2t + 9
    sums        O^T, 16 columns x 8 rows   like scores, with columns of V in place of tokens

Rows lie in shared memory with chunks of 16 bytes in another order for each token, ``chunk ^ token % 8``, so that no
two of eight threads that read the same chunk of eight tokens meet in a bank.

Codes and 8-bit floats become float16 in registers, which is exact. A word of K or V then has elements that are not
where a plain product wants them; queries, and columns of the result, are taken in the same order instead. Scales of
tokens multiply scores and weights. INT4 has one for each 32 elements: scores of such a group are added up apart, and
weights multiplied by the scale of the group's columns. Queries and weights that need more than 16 bits have two halves
of 16 bits, and take two products.

The running maximum is raised when a score is `SLACK` above it: until then weights just exceed 1. So threads rarely have
to agree on anything.

A slice that some rows see and others not, or with tokens that nobody sees, is masked; where V has NaN or infinity
there, each row takes a product of its own, of what it sees.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.decode_items import (
    EXTENT_WORDS,
    RECORD_BYTES,
    Counted,
    DecodeRows,
    Lane,
    Pools,
    SeenTokens,
    divide,
    look_up,
    make_copies,
    make_places,
    make_tasks,
    uniform,
)  # fmt: skip  # fmt: skip
from numkv.kernels.cuda.attention.decode_products import make_load_queries, make_scores, make_sums
from numkv.kernels.cuda.attention.items import AttentionBatch
from numkv.kernels.cuda.attention.sizes import (
    BANKS,
    DECODE_ROWS,
    DECODE_TILE,
    SLICE,
    WARPS,
    sizes_for,
)  # fmt: skip
from numkv.kernels.cuda.attention.splits import LN_2, LOG2_E
from numkv.kernels.cuda.instructions import (
    cp_async_commit,
    cp_async_wait,
    exp2_approx,
    keep,
    load_shared_floats,
    load_shared_quad,
    shared_address,
    shuffle,
    shuffle_float,
    shuffle_xor_float,
    store_global,
    store_global_8,
    store_shared_16,
    store_shared_pairs,
)  # fmt: skip
from numkv.kernels.cuda.launches import THREADS
from numkv.kernels.cuda.simd import ceil_div, natural
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.softmax import finish

F, I32, U32 = np.float32, np.int32, np.uint32
EVERYONE = 0xFFFFFFFF
MINUS_INF = -np.inf
# Weights may be so many powers of two above 1. For float16 they are also moved up, as what is small loses bits there.
SLACK, LIFT = 4, 8
# A scale below 2**-100 counts as that where maxima are found.
LEAST_LOG = -100


class DecodeState(NamedTuple):
    """What a thread holds, in registers."""

    running: Any  #: of two rows: bases, limits, totals
    sums: Any
    scores: Any
    part: Any  #: scores of a group of INT4
    weights: Any  #: as the second matrix of a product: two words, and two of their second halves


class Scaling(NamedTuple):
    """What scores become."""

    first: Any  #: what those of the thread's two rows are multiplied by
    second: Any
    soft_cap: Any


def make_softmax(SIZES):
    """The functions that mask a slice's scores and turn them into weights."""
    K_INT8, V = SIZES.k.kind == "int8", SIZES.v
    V_SCALED = V.groups > 0
    V_INT8, V_INT4 = V.kind == "int8", V.kind == "int4"
    V_WORDS = (V.groups + 1) // 2
    LIFTED = V.operand == "fp16"
    SHIFT = LIFT if LIFTED else 0

    @register_jitable
    def scale_scores(c, s0, s1, scales, lane):
        """Multiply scores by the scales of their rows and tokens."""
        if K_INT8:
            low = shuffle(scales[0], U32(lane.group)).view(np.float32)
            high = shuffle(scales[0], U32(lane.group + 8)).view(np.float32)
            c[0], c[1], c[2], c[3] = (
                c[0] * low * s0,
                c[1] * low * s1,
                c[2] * high * s0,
                c[3] * high * s1,
            )
        else:
            c[0], c[1], c[2], c[3] = c[0] * s0, c[1] * s1, c[2] * s0, c[3] * s1

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
        """The power of two that a float of these bits, those of float32, is below; no less than `LEAST_LOG`."""
        return F(max(I32(U32(bits & U32(0x7FFFFFFF)) >> U32(23)) - I32(126), I32(LEAST_LOG)))

    @register_jitable
    def value_scales(scales, lane):
        """The scales that weights of tokens g and g + 8 are multiplied by, and powers of two that these are below."""
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
        """What the maximum has to cover, so that a weight times its scale stays in range."""
        return F(score + log) if V_SCALED else score

    @register_jitable
    def raise_maxima(c, running, sums, log_low, log_high, COUNT):
        """Raise the maxima of rows that have a score above their limit, and shrink what was added up so far."""
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
        """Weights from scores; totals grow by them."""
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
    """The functions that merge what the warps of a block have, normalise, and store rows or a split's parts.

    Sums lie in shared memory by warps and columns, the rows of a column side by side, so that a thread that has a
    column reads four rows at once; maxima and totals by warps and pairs of rows, two of each; weights of warps by rows.
    """
    V, TILES, DIM = SIZES.v, SIZES.v.tiles, SIZES.v.dim
    BY_HEAD, TO_BASE_2, TO_BASE_E = kind(V.kind).scales_per == "head", LOG2_E, LN_2
    # The column of a tile that a thread's group has, and how far the group's second one is.
    FACTOR, SECOND = (1, 8) if V.bits == 16 else (2, 1)
    ROW_BYTES, COLUMNS, PADDED = 4 * DECODE_ROWS, ceil_div(DIM, THREADS), ceil_div(DIM, 4) * 4
    WARP_BYTES = 16 * TILES * ROW_BYTES
    store_sums = store_shared_pairs(
        tuple(ROW_BYTES * (16 * tile + i) for tile in range(TILES) for i in (0, SECOND))
    )
    store_ends = store_shared_pairs((0, 8))
    load_0, load_1 = load_shared_quad(0), load_shared_quad(WARP_BYTES)
    load_2, load_3 = load_shared_quad(2 * WARP_BYTES), load_shared_quad(3 * WARP_BYTES)
    load_ends = load_shared_floats(tuple(8 * (8 * w) + 8 * i for w in range(WARPS) for i in (0, 1)))
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
        """What the sums of each warp are multiplied by; rows' logs of their sums."""
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
                sink = F(sinks[h]) * F(TO_BASE_2) if sinks.shape[0] > 0 else F(MINUS_INF)
                factor, log_sum = finish(top, total, sink, F(TO_BASE_E))
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
        """Store the rows: the result, or a split's parts of it. A thread has a column of them all."""
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
    """The function that attends to a slice that has arrived in shared memory."""
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
    """The function that takes a warp through its slices of an item."""
    K_BY_HEAD = kind(SIZES.k.kind).scales_per == "head"
    QUERIES = SIZES.queries
    SUMS, WORDS, STAGE = 4 * SIZES.v.tiles, SIZES.words, SIZES.k.size + SIZES.v.size
    TILE_BITS = DECODE_TILE.bit_length() - 1
    find, copy = make_copies(SIZES)
    load_queries, Q_SCALED = make_load_queries(Q_KIND, SIZES)
    attend_slice = make_attend_slice(SIZES)
    source_of, places_of = make_places(SIZES)
    _, _, _, told, _ = make_tasks()

    @register_jitable
    def attend_item(pools, scale, soft_cap, record, rows, start, state, lane):
        running, sums = state.running, state.sums
        scales = cuda.local.array(WORDS, np.uint32)
        next_scales = cuda.local.array(WORDS, np.uint32)
        k_to, v_to, k_at, v_at = places_of(start, lane)
        item = told(record)
        source = source_of(pools, item.seq, item.head, start, lane)
        seen = SeenTokens(item.begin, item.end, uniform(item.low), uniform(item.high))
        # The thread's token of the slice to be looked up next, and the entry of the one before.
        size = source.block_size
        first = uniform(I32(item.begin & I32(-DECODE_TILE)) + lane.warp * SLICE)
        position = I32(first + lane.number % SLICE)
        block, offset = divide(position, source)
        blocks, offsets = divide(I32(DECODE_TILE), source)
        left = I32(max(I32(item.end - first), I32(0)) + I32(DECODE_TILE - 1))
        # Not negative, as the compiler then knows.
        count = I32(uniform(I32(left >> I32(TILE_BITS))) & I32(0x7FFFFFFF))
        entry, entry_offset = look_up(source, seen, position, block), offset
        # The queries, and what scores of columns 2t and 2t + 1 are multiplied by.
        q_at = keep(U32(start + QUERIES + 8 * lane.number))
        # Columns past the last row take its queries, too: nobody looks at what comes of them.
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
            # Copy the next slice; the one before the present was read from its place.
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
    """The kernel.

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
    count_items, all_items, put_task, _, task_of = make_tasks()
    attend_item = make_attend_item(Q_KIND, SIZES)
    leave_sums, weigh_warps, store_rows = make_store(Q_KIND, SIZES)

    def kernel(
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, options, sinks, out, lse, parts
    ):  # fmt: skip
        by_slot, shift, window_left, slots, by_token, most_tokens, scale, soft_cap = options
        num_kv_heads = natural(k.shape[1])
        capacity = np.int64(block_table.shape[1])
        if not by_slot:
            capacity *= k.shape[2]
        batch = AttentionBatch(
            seq_lens, q_starts, ranges, q.shape[0], capacity, window_left,
            natural(q.shape[1]) // num_kv_heads, num_kv_heads, slots, by_token, most_tokens,
        )  # fmt: skip
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
