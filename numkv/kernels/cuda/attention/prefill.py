"""Attention of many query rows on tensor cores: prefill, and long chunks of it.

A block computes an item: 64 or 128 query rows, sixteen for each warp, and in turn the KV tiles that any of them sees. K
and V of the next tile are copied to shared memory while this one is computed, so there is one barrier a tile.

A warp's registers are laid out as in FlashAttention-2 (Dao, arXiv:2307.08691). By the drawings of
`numkv.kernels.cuda.instructions`, for its thread ``l``, with ``g = l // 4`` and ``t = l % 4``::

    scores    S = Q K^T, 16 rows x 64 tokens      c0, c1: row g, tokens 8j + 2t and 8j + 2t + 1   c2, c3: row g + 8
    weights   P, packed in pairs: scores of tokens 16i to 16i + 15 are an A of the second product as they are
    sums      O = P V, 16 rows x head_dim_v       as scores, with columns of V in place of tokens

The softmax is online (Milakov and Gimelshein, arXiv:1805.02867), in base 2. Four threads share a row, and find its
maximum by shuffles. The sum of weights is one more product, with a column of ones.

Codes and 8-bit floats are copied as they are stored, and become float16 in shared memory. There is then one tile of
these, and two barriers a tile: see `numkv.kernels.cuda.attention.prefill_products`.

Queries that need more than 16 bits have two halves of 16, and use two products. So do their weights, and all weights of
bfloat16, whose eight bits would add as much error as the result's own rounding. If K is float16 and queries are not,
query rows are scaled by a power of two into its range. If tokens of K have scales, all rows of an item that are large
enough share that power. Weights of float16 are scaled up by `LIFT` powers of two, as small ones would lose bits.

A tile that some rows do not see whole is masked. There a weight of 0 does not hide an infinite or NaN V from a row that
does not see it. So such elements are collected and replaced by zeros. Each row then gets those that it sees by a
product of its own (`make_poison`). Rows of V that no query row sees are never read. In other tiles an infinity in V
gives NaN if weights have two halves, as one of them may be 0.

The order of every sum depends on the sequence and the head dims alone. So results do not depend on the batch or the
launch.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.prefill_items import (
    ITEM_FIELDS,
    PrefillBatch,
    TilePlaces,
    make_copy,
    make_places,
    make_prefill_items,
    whole_tiles,
)  # fmt: skip
from numkv.kernels.cuda.attention.prefill_products import (
    MINUS_INF,
    PrefillState,
    head_factor,
    in_turn,
    make_load_queries,
    make_poison,
    make_scores,
    make_sums,
    make_terms,
    make_widen,
)
from numkv.kernels.cuda.attention.sizes import OPERANDS, sizes_of_prefill
from numkv.kernels.cuda.instructions import (
    cp_async_wait,
    exp2_approx,
    global_address,
    keep,
    load_shared_4,
    pack_bf16,
    pack_fp16,
    shared_address,
    shuffle_xor_by,
    shuffle_xor_float,
    store_global,
    store_global_8,
)  # fmt: skip
from numkv.kernels.cuda.widen import FLOATS
from numkv.rows.softmax import LN_2, LOG2_E, finish

F, I32, I64, U32 = np.float32, np.int32, np.int64, np.uint32

#: A row's maximum is raised when a score is so many powers of two above it; until then weights may exceed 1. So earlier
#: sums are rarely rescaled.
SLACK = F(4)


def make_softmax(V_KIND, CAPPED, SIZES):
    """Make the functions that mask scores, and turn them into packed weights."""
    TILE, HALVES = SIZES.tile, SIZES.p_halves
    OPERAND = FLOATS[OPERANDS[V_KIND]]
    pack, halves, LIFT = OPERAND.pack, OPERAND.halves, F(OPERAND.lift)
    SUMS, WEIGHTS = SIZES.padded_v // 2, TILE // 4
    V_SCALED, WHOLE = SIZES.v.words > 0, CAPPED or SIZES.scaled  # scores are in base 2 already
    _, load_backs = make_terms(CAPPED, SIZES)
    next_to, across = shuffle_xor_by(1, "f"), shuffle_xor_by(2, "f")

    @register_jitable
    def mask_row(c, row, r, tile, place):
        begin = I32(min(max(row.begin - tile, I64(0)), I64(TILE))) - 2 * place
        end = I32(min(max(row.end - tile, I64(0)), I64(TILE))) - 2 * place
        for j in range(TILE // 8):
            for e in range(2):
                if begin > 8 * j + e or end <= 8 * j + e:
                    c[4 * j + 2 * r + e] = MINUS_INF

    @register_jitable
    def mask(c, row, other, tile, place, sizes, number, missing):
        """Set scores of tokens that a row does not see to minus infinity."""
        mask_row(c, row, 0, tile, place)
        mask_row(c, other, 1, tile, place)
        if missing:
            for j in range(TILE // 8):
                for e in range(2):
                    if sizes[(number & 3) * TILE + 8 * j + 2 * place + e] == 0:
                        c[4 * j + e] = MINUS_INF
                        c[4 * j + 2 + e] = MINUS_INF

    @register_jitable
    def top_of(c, state, r):
        """Return the largest score of a row of the tile."""
        top = c[2 * r]
        for j in range(TILE // 8):
            for e in range(2):
                top = max(top, c[4 * j + 2 * r + e])
        top = max(top, next_to(top))
        top = max(top, across(top))
        return top if WHOLE else top * state.scales[r]

    @register_jitable
    def base_of(top):
        """Return what to subtract: 0 for a row that has seen no token, whose maximum of -inf would give inf - inf."""
        return top if top > MINUS_INF else F(0)

    @register_jitable
    def weight_of(score, scale, offset):
        return exp2_approx(score + offset if WHOLE else cuda.fma(score, scale, offset))

    @register_jitable
    def weigh_row(c, state, weights, backs, r):
        scale, offset = state.scales[r], LIFT - base_of(state.maxima[r])
        for j in range(TILE // 8):
            x = weight_of(c[4 * j + 2 * r], scale, offset)
            y = weight_of(c[4 * j + 2 * r + 1], scale, offset)
            if V_SCALED:
                state.totals[r] = cuda.fma(x, backs[2 * j], state.totals[r])
                state.totals[r] = cuda.fma(y, backs[2 * j + 1], state.totals[r])
            elif HALVES == 1:
                state.totals[r] += x
                state.totals[r] += y
            if HALVES == 1:
                weights[2 * j + r] = pack(x, y)
            else:
                first, rest = halves(x, y)
                weights[2 * j + r] = first
                weights[WEIGHTS + 2 * j + r] = rest

    @register_jitable
    def weigh(c, state, weights, backs, backs_from):
        """Compute the weights of a tile relative to the rows' maxima; rescale earlier sums."""
        top, other = top_of(c, state, 0), top_of(c, state, 1)
        above, other_above = top > state.maxima[0] + SLACK, other > state.maxima[1] + SLACK
        # That is rarely so after the first tile. Rows of the warp whose maximum stays are multiplied by exactly 1.
        if cuda.any_sync(0xFFFFFFFF, above or other_above):
            top = top if above else state.maxima[0]
            other = other if other_above else state.maxima[1]
            shrink = exp2_approx(state.maxima[0] - base_of(top))
            other_shrink = exp2_approx(state.maxima[1] - base_of(other))
            state.totals[0] *= shrink
            state.totals[1] *= other_shrink
            for n in range(SUMS // 4):
                state.sums[4 * n] *= shrink
                state.sums[4 * n + 1] *= shrink
                state.sums[4 * n + 2] *= other_shrink
                state.sums[4 * n + 3] *= other_shrink
            state.maxima[0], state.maxima[1] = top, other
        load_backs(backs, backs_from)
        weigh_row(c, state, weights, backs, 0)
        weigh_row(c, state, weights, backs, 1)

    return mask, weigh


def make_store(Q_KIND, V_KIND, SIZES):
    """Make the function that normalises a thread's two rows and stores them."""
    TO_BASE_2, TO_BASE_E, BYTES = F(LOG2_E), F(LN_2), 4 if Q_KIND == "fp32" else 2
    LIFT, ADDED = F(FLOATS[OPERANDS[V_KIND]].lift), SIZES.p_halves == 1 or SIZES.v.words > 0
    BY_HEAD, FACTOR = SIZES.v.by_head, F(head_factor(V_KIND))

    def make_step(COLUMN):
        SUM = COLUMN // 2

        @register_jitable
        def step(state, at, r, factor):
            x, y = factor * state.sums[SUM + 2 * r], factor * state.sums[SUM + 2 * r + 1]
            if Q_KIND == "fp32":
                store_global_8(at + COLUMN * 4, U32(x.view(U32)), U32(y.view(U32)))
            elif Q_KIND == "bf16":
                store_global(at + COLUMN * 2, pack_bf16(x, y))
            else:
                store_global(at + COLUMN * 2, pack_fp16(x, y))

        return step

    store_row = in_turn([make_step(n) for n in range(0, SIZES.dim_v, 8)])

    @register_jitable
    def store(state, row, r, scale, sinks, out, lse, place):
        total = state.totals[r]
        if ADDED:  # by each of the row's four threads, of its own tokens
            total += shuffle_xor_float(total, 1)
            total += shuffle_xor_float(total, 2)
        if row.there:
            sink = F(sinks[row.head]) * TO_BASE_2 if sinks.shape[0] > 0 else MINUS_INF
            factor, log_sum = finish(state.maxima[r] - LIFT, total, sink, TO_BASE_E)
            if place == 0 and lse.shape[0] > 0:
                lse[row.token, row.head] = log_sum
            if BY_HEAD:
                factor = F(factor) * F(scale[row.head * scale.shape[0] // out.shape[1]]) * FACTOR
            at = global_address(out) + row.token * out.strides[0] + row.head * out.strides[1]
            store_row(state, at + place * (2 * BYTES), r, F(factor))

    return store


def make_attend_tile(Q_KIND, K_KIND, V_KIND, CAPPED, SIZES):
    """Make the functions that begin an item, compute the factors of its scores, and attend to a tile."""
    K_BYTES, SUMS = SIZES.k_bytes, SIZES.padded_v // 2
    CODES = V_KIND == "int8"  # whose rows are finite, whatever there is
    K_BY_HEAD, K_FACTOR = SIZES.k.by_head, F(head_factor(K_KIND))
    finish_scores, _ = make_terms(CAPPED, SIZES)
    score, add = make_scores(K_KIND, SIZES), make_sums(V_KIND, SIZES)
    mask, weigh = make_softmax(V_KIND, CAPPED, SIZES)
    hide = make_poison(V_KIND, SIZES)

    @register_jitable
    def begin(state):
        state.maxima[0] = state.maxima[1] = MINUS_INF
        state.totals[0] = state.totals[1] = F(0)
        for i in range(SUMS):
            state.sums[i] = F(0)

    @register_jitable
    def scale_of(scale, k_scale, item):
        """Return the scale's sign, as bits of two 16-bit floats, and its magnitude, which is not 0."""
        if K_BY_HEAD:
            own = F(k_scale[item.head]) * K_FACTOR
            # The minus infinity of masked tokens must not become NaN.
            scale *= own if own != 0 else F(1e-30)
        return U32(0x80008000) if scale < 0 else U32(0), abs(scale)

    @register_jitable
    def attend_tile(state, pieces, row, other, whole, tile, number, missing, at, uneven, soft_cap):
        """Attend to tile `number`, of tokens from `tile` on; `missing` if some are outside the pool.

        `whole` are the numbers of the first tile that all rows see whole, and of the first one after these.
        """
        c, words, weights, loaded, backs, sizes, flags = pieces
        q_at, (terms, backs_from), here, k_lane, v_lane = at
        thread = I32(cuda.threadIdx.x) & I32(0x7FFFFFFF)
        place = thread & I32(3)
        score(c, words, q_at, loaded, k_lane)
        finish_scores(c, state.scales, terms, uneven, soft_cap)
        ragged = missing or number < whole[0] or number >= whole[1]
        if ragged:
            mask(c, row, other, tile, place, sizes, number, missing)
        weigh(c, state, weights, backs, backs_from)
        if ragged and not CODES:
            hide(state, weights, loaded, flags, number, here, here + K_BYTES, v_lane, thread)
        add(state, weights, loaded, v_lane)

    return begin, scale_of, attend_tile


def make_prefill(Q_KIND, K_KIND, V_KIND, DIM, DIM_V, CAPPED):
    """Make the kernel.

    Parameters
    ----------
    Q_KIND, K_KIND, V_KIND : str
        Kinds of q and the output, of K and of V.
    DIM, DIM_V : int
        Columns of K and V.
    CAPPED : bool
        Whether scores are capped.
    """
    SIZES = sizes_of_prefill(Q_KIND, K_KIND, V_KIND, DIM, DIM_V)
    TILE, STAGE, K_STEP, V_STEP = SIZES.tile, SIZES.next_stage, SIZES.k_step, SIZES.v_step
    Q_WORDS = 1 if SIZES.q_shared else SIZES.q_words
    SCORES, SUMS, WEIGHTS = TILE // 2, SIZES.padded_v // 2, TILE // 4 * SIZES.p_halves
    LOADED = 16  # words that `ldmatrix` loads at once
    TABLE, SIZES_TABLE, BACKS = (8 if SIZES.scaled else 4) * TILE, 4 * TILE, TILE // 4
    THREADS, WARPS = SIZES.threads, SIZES.threads // 32
    K_SCALED, V_SCALED, WIDENED = SIZES.k.words > 0, SIZES.v.words > 0, SIZES.widened
    number_items, put_prefill, find_prefill, describe_row = make_prefill_items(SIZES.rows, THREADS)
    locate = make_places(TILE, K_SCALED, V_SCALED)
    begin_copies, copy = make_copy(SIZES)
    widen, prepare = make_widen(SIZES)
    load_queries = make_load_queries(Q_KIND, K_KIND, SIZES)
    begin, scale_of, attend_tile = make_attend_tile(Q_KIND, K_KIND, V_KIND, CAPPED, SIZES)
    store = make_store(Q_KIND, V_KIND, SIZES)

    def kernel(
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, options, sinks, out, lse
    ):  # fmt: skip
        by_slot, shift, window_left, most_tokens, sm_scale, soft_cap = options
        heads, group = I64(k.shape[1]), I64(q.shape[1]) // I64(k.shape[1])
        capacity = I64(block_table.shape[1])
        if not by_slot:
            capacity *= k.shape[2]
        batch = PrefillBatch(
            seq_lens, q_starts, ranges, I64(q.shape[0]), capacity, window_left, group, heads, most_tokens
        )  # fmt: skip
        thread = I32(cuda.threadIdx.x) & I32(0x7FFFFFFF)
        lane, warp = thread & I32(31), thread >> I32(5)
        place = lane & I32(3)

        stages = cuda.shared.array(0, np.uint32)  # K and V of one or two tiles, then query rows
        counts = cuda.shared.array(THREADS, np.int64)
        found = cuda.shared.array(ITEM_FIELDS, np.int64)
        rows_at = cuda.shared.array(TABLE, np.int64)
        sizes = cuda.shared.array(SIZES_TABLE, np.int32)
        lost = cuda.shared.array(4, np.int32)
        flags = cuda.shared.array(2, np.int32)  # whether the V of a tile is not finite
        powers = cuda.shared.array(WARPS, np.int32)
        places = TilePlaces(rows_at, sizes, lost)
        pools = k, k_scale, v, v_scale

        words = cuda.local.array(Q_WORDS, np.uint32)
        loaded = cuda.local.array(LOADED, np.uint32)
        weights = cuda.local.array(WEIGHTS, np.uint32)
        c = cuda.local.array(SCORES, np.float32)
        backs = cuda.local.array(BACKS, np.float32)
        maxima = cuda.local.array(2, np.float32)
        totals = cuda.local.array(2, np.float32)
        sums = cuda.local.array(SUMS, np.float32)
        scales = cuda.local.array(2, np.float32)
        state = PrefillState(maxima, totals, sums, scales)
        pieces = c, words, weights, loaded, backs, sizes, flags

        base = shared_address(stages)
        sides = begin_copies(pools, places, base, thread)
        q_at = base + SIZES.queries + thread * 16
        # A thread has the address of one row of a matrix, of sixteen tokens' K or V.
        k_row = (lane & I32(7)) + (lane >> I32(4)) * 8
        k_lane = keep(U32(base + k_row * K_STEP + (lane >> I32(3) & I32(1)) * 16))
        v_lane = base + SIZES.k_bytes + (lane & I32(15)) * V_STEP + (lane >> I32(4)) * 16
        v_lane = keep(U32(v_lane))
        ways, lost_at = prepare(base, thread), keep(U32(shared_address(lost)))

        count, before, items = number_items(batch, counts, thread)
        for number in range(I64(cuda.blockIdx.x), items, I64(cuda.gridDim.x)):
            cuda.syncthreads()
            put_prefill(batch, number, before, count, found, thread)
            if thread < 4:
                lost[thread] = 0
                flags[thread & 1] = 0
            cuda.syncthreads()
            item = find_prefill(found)
            first = item.begin - item.begin % TILE
            tiles = I32((item.end - first + TILE - 1) // TILE)
            whole = whole_tiles(item, first, TILE)
            locate(places, block_table, by_slot, shift, pools, item, first, I32(0), thread)
            locate(places, block_table, by_slot, shift, pools, item, first + TILE, I32(1), thread)
            cuda.syncthreads()
            if tiles > 0:
                copy(sides, I32(0), False)
            own = warp * 16 + (lane >> I32(2))
            row, other = describe_row(batch, item, own), describe_row(batch, item, own + 8)
            sign, scale = scale_of(sm_scale, k_scale, item)
            scale, uneven = load_queries(
                q, row, other, sign, scale, scales, powers, words, q_at, place, thread
            )  # fmt: skip
            begin(state)
            n = I32(0)
            while n < tiles:
                tile, stage = first + I64(n) * TILE, I32((n & I32(1)) * STAGE)
                cp_async_wait(0)
                cuda.syncthreads()
                if WIDENED:
                    widen(ways, thread, scale)
                    cuda.syncthreads()
                if I32(n + 1) < tiles:
                    plain = not WIDENED and tile + 2 * TILE <= item.end and lost[(n + 1) & 3] == 0
                    copy(sides, I32(n + 1), plain)
                if thread < I32(TILE):
                    if thread == 0:  # what nobody reads or writes now
                        lost[(n + 3) & 3] = 0
                        flags[(n + 1) & 1] = 0
                    if I32(n + 2) < tiles:
                        locate(
                            places, block_table, by_slot, shift, pools, item, tile + 2 * TILE, I32(n + 2), thread
                        )  # fmt: skip
                at = q_at, ways[3], base + stage, U32(k_lane + stage), U32(v_lane + stage)
                missing = load_shared_4(U32(lost_at + ((n & I32(3)) << I32(2)))) != 0
                attend_tile(
                    state, pieces, row, other, whole, tile, n, missing, at, uneven, soft_cap
                )  # fmt: skip
                n = I32(n + 1)
            store(state, row, 0, v_scale, sinks, out, lse, place)
            store(state, other, 1, v_scale, sinks, out, lse, place)

    return kernel
