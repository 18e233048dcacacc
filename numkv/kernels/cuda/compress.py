"""Vectors as codes of a few bits, on CUDA; see `numkv.kernels.cpu.compress` for the method.

*Rows*, encoded, decoded, and multiplied with a matrix of their head. A block takes a few rows of one head. Each warp
has one row for work element by element. Every thread has columns of the head's matrix, which it multiplies with all of
the block's rows. So a matrix is read once for several rows.

*Scores.* A block takes a tile of tokens, one for each thread, and up to eight q rows of their head. Codes are copied to
shared memory some bytes of each row at a time, with adjacent threads on adjacent bytes. Then each thread looks up the
levels of its own token, once for all q rows.

*Attention.* A block computes a split of a head's tokens, tile by tile. It computes scores as above, and the online
softmax of Milakov and Gimelshein (arXiv:1805.02867). Then every thread adds up the weighted levels of its own columns
of the values. A second kernel merges the splits in order, and multiplies the sums with the transposed rotation. Several
sequences are done in one launch (`numkv.rows.address`), each as it would be alone.

Query rows of one kv head stand together, query by query. Each knows the tokens that it sees, counted from the first.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import memory, streams, uploads
from numkv.kernels.cuda.launches import SHARED_BYTES, THREADS, Kernel, array, launch
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div, natural
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kernels.operations import Codebook, Operations, StoredCodes, implements
from numkv.kernels.plan_of_codes import Limits, rounds
from numkv.rows.address import BY_ITEM, BY_QUERY, WIDTH, sequence_at, slot_at
from numkv.rows.codes import LARGEST, code_at, packed_byte, refined
from numkv.rows.convert import codec
from numkv.rows.softmax import LN_2, LOG2_E, finish
from numkv.rows.visible import oldest_visible


@register_jitable
def _multiply_rows(x, width, matrix, h, j, sums):
    """Compute ``sums[r] = x[r] @ matrix[h, :, j]`` for `ROWS` rows of `width` elements."""
    for r in range(ROWS):
        sums[r] = np.float32(0)
    for k in range(width):
        factor = matrix[h, k, j]
        for r in range(ROWS):
            sums[r] = cuda.fma(x[r * width + k], factor, sums[r])


@register_jitable
def _total(partial, mine, lane, value):
    """Return the sum of a warp's values; the whole block synchronises before `partial` is read.

    The block must synchronise once more before `partial` is written again.
    """
    partial[mine, lane] = value
    cuda.syncthreads()
    total = partial[mine, 0]
    for i in range(1, LANES):
        total += partial[mine, i]
    return total


def make_encode(SRC):
    """Make the kernel that encodes rows of kind `SRC`."""
    load, _ = codec(SRC)
    SHAPE = (ROWS, LANES)

    def kernel(
        rows, rotation, edges, levels, span, sketch, codes, scales, signs, residuals, slots
    ):  # fmt: skip
        bits, start = span
        num_tokens, num_heads, dim = rows.shape
        projections = sketch.shape[2]
        widest = max(dim, projections)
        lane, mine = natural(cuda.threadIdx.x), natural(cuda.threadIdx.y)
        thread = mine * LANES + lane
        # First the rotated rows, then what the codes leave of them; behind them the rows as they come, or the codes.
        z = cuda.shared.array(0, types.float32)
        chosen = cuda.shared.array(0, types.int32)
        behind = ROWS * dim
        wide = cuda.shared.array(SHAPE, np.float64)
        partial = cuda.shared.array(SHAPE, np.float32)
        sums = cuda.local.array(ROWS, np.float32)
        own, own_codes = mine * dim, behind + mine * widest
        blocks = (num_tokens + ROWS - 1) // ROWS
        for item in range(
            np.int64(cuda.blockIdx.x), blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            h, t = item % num_heads, item // num_heads * ROWS + mine
            here = t < num_tokens
            to = start + t
            if here and slots.shape[0] > 0:
                to = np.int64(slots[t])
            square = np.float64(0)
            if here:
                for d in range(lane, dim, LANES):
                    value = np.float64(load(rows[t, h, d]))
                    square += value * value
            # `_total` synchronises. The previous item then uses no memory; its last barrier came after its use of
            # `wide`.
            norm = math.sqrt(_total(wide, mine, lane, square))
            for d in range(lane, dim, LANES):
                value = np.float32(0)
                if here and norm > 0:
                    value = np.float32(np.float64(load(rows[t, h, d])) / norm)
                z[behind + own + d] = value
            cuda.syncthreads()
            for j in range(thread, dim, THREADS):
                _multiply_rows(z[behind:], dim, rotation, h, j, sums)
                for r in range(ROWS):
                    z[r * dim + j] = sums[r]
            cuda.syncthreads()

            # -- codes, and the nearest multiple of their levels
            dot, square32 = np.float32(0), np.float32(0)
            for d in range(lane, dim, LANES):
                x = z[own + d]
                code = np.int64(0)
                for i in range(bits):
                    code = refined(code, x, edges, bits - 1 - i)
                chosen[own_codes + d] = code
                level = levels[code]
                dot = cuda.fma(x, level, dot)
                square32 = cuda.fma(level, level, square32)
            dot = _total(partial, mine, lane, dot)
            cuda.syncthreads()
            factor = dot / _total(partial, mine, lane, square32)
            if here:
                if lane == 0:
                    scales[h, to] = np.float32(min(norm * np.float64(factor), LARGEST))
                for i in range(lane, codes.shape[2], LANES):
                    codes[h, to, i] = packed_byte(chosen, own_codes, dim, bits, i)
            if projections > 0:
                rest = np.float32(0)
                for d in range(lane, dim, LANES):
                    x = z[own + d] - factor * levels[chosen[own_codes + d]]
                    z[own + d] = x
                    rest = cuda.fma(x, x, rest)
                cuda.syncthreads()
                rest = _total(partial, mine, lane, rest)
                if here and lane == 0:
                    left = norm * math.sqrt(np.float64(rest))
                    residuals[h, to] = np.float32(min(left, LARGEST))
                for i in range(thread, projections, THREADS):
                    _multiply_rows(z, dim, sketch, h, i, sums)
                    for r in range(ROWS):
                        chosen[behind + r * widest + i] = 1 if sums[r] >= 0 else 0
                cuda.syncthreads()
                if here:
                    for i in range(lane, signs.shape[2], LANES):
                        signs[h, to, i] = packed_byte(chosen, own_codes, projections, 1, i)

    return kernel


def make_decode(BITS):
    """Make the kernel that decodes codes of `BITS` bits into rows."""

    def kernel(codes, capacity, row_bytes, scales, begin, levels, back, out):
        num_heads, num_tokens, dim = out.shape
        lane, mine = natural(cuda.threadIdx.x), natural(cuda.threadIdx.y)
        z = cuda.shared.array(0, types.float32)
        sums = cuda.local.array(ROWS, np.float32)
        blocks = (num_tokens + ROWS - 1) // ROWS
        for item in range(
            np.int64(cuda.blockIdx.x), blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            h, t0 = item % num_heads, item // num_heads * ROWS
            t = min(t0 + mine, num_tokens - 1)
            at = (h * capacity + begin + t) * row_bytes
            for d in range(lane, dim, LANES):
                z[mine * dim + d] = scales[h, begin + t] * levels[code_at(codes, at, BITS, d)]
            cuda.syncthreads()
            for j in range(mine * LANES + lane, dim, THREADS):
                _multiply_rows(z, dim, back, h, j, sums)
                for r in range(ROWS):
                    if t0 + r < num_tokens:
                        out[h, t0 + r, j] = sums[r]
            cuda.syncthreads()

    return kernel


def make_multiply(SRC):
    """Make the kernel that multiplies q rows of kind `SRC` with the matrix of their kv head.

    The input is ``(num_queries, num_q_heads, dim)``. The output is ordered by kv head, query and q head of the group.
    """
    load, _ = codec(SRC)

    def kernel(rows, matrix, factor, out):
        num_heads, dim, columns = matrix.shape
        group = rows.shape[1] // num_heads
        of_head = rows.shape[0] * group
        lane, mine = natural(cuda.threadIdx.x), natural(cuda.threadIdx.y)
        x = cuda.shared.array(0, types.float32)
        sums = cuda.local.array(ROWS, np.float32)
        blocks = (of_head + ROWS - 1) // ROWS
        for item in range(
            np.int64(cuda.blockIdx.x), blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            h, r0 = item % num_heads, item // num_heads * ROWS
            row = min(r0 + mine, of_head - 1)
            query, head = row // group, h * group + row % group
            for d in range(lane, dim, LANES):
                x[mine * dim + d] = factor * load(rows[query, head, d])
            cuda.syncthreads()
            for j in range(mine * LANES + lane, columns, THREADS):
                _multiply_rows(x, dim, matrix, h, j, sums)
                for r in range(ROWS):
                    if r0 + r < of_head:
                        out[h * of_head + r0 + r, j] = sums[r]
            cuda.syncthreads()

    return kernel


# The most q rows that share the codes of a head, limited by registers.
Q_ROWS = (1, 4, 8)
# Codes of a token that are in shared memory at once. Their bits make whole words.
CHUNK = 16 if SIMULATED else 64
# Bytes between the chunks of two tokens, so that they do not all start in the same bank.
PAD = 4
# Tokens of a split.
SPLIT = 16 if SIMULATED else 256
# Codes of at most this many bits are looked up in shared memory.
SHARED_BITS = 8


class CodedKeys(NamedTuple):
    """Encoded keys of all heads; codes and signs in one dimension."""

    codes: Any
    row_bytes: Any
    scales: Any
    signs: Any
    sign_bytes: Any
    residuals: Any


class CodedQueries(NamedTuple):
    """Query rows in shared memory, followed by their sketches, and the factors of both."""

    rows: Any
    dim: Any
    projections: Any
    sign_levels: Any


class CodedState(NamedTuple):
    """The online softmax of a thread, in registers."""

    maxima: Any  #: of each q row
    totals: Any  #: of the thread's own tokens
    sums: Any  #: [column, row]
    lows: Any  #: the tokens that each q row sees, counted from the first token
    highs: Any


@register_jitable
def _keys(codes, scales, signs, residuals):
    num_rows = scales.shape[0] * scales.shape[1]
    return CodedKeys(
        codes, codes.shape[0] // num_rows, scales, signs, signs.shape[0] // num_rows, residuals
    )


def _products(BITS, NUM_ROWS):
    """Make the function that adds up products of q rows with the levels of a tile of tokens, one token a thread."""
    STEP = CHUNK * BITS // 8  # bytes of a chunk
    APART = STEP + PAD

    @register_jitable
    def products(codes, row_bytes, first, count, width, q, q_at, levels, staged, thread, sums):
        # `first` is the tile's first row of codes; q rows of `width` elements start at q[q_at].
        for c in range(0, width, CHUNK):
            start = c // CHUNK * STEP
            length = min(STEP, row_bytes - start)
            for i in range(thread, count * length, THREADS):
                token, byte = i // length, i % length
                staged[token * APART + byte] = codes[(first + token) * row_bytes + start + byte]
            cuda.syncthreads()
            if thread < count:
                for i in range(min(CHUNK, width - c)):
                    level = levels[code_at(staged, thread * APART, BITS, natural(i))]
                    for r in range(NUM_ROWS):
                        x = q[q_at + r * width + c + i]
                        sums[r] = cuda.fma(x, level, sums[r])
            cuda.syncthreads()

    return products


def _scorer(BITS, NUM_ROWS):
    """Make the function that computes the scores of a tile of tokens in `sums`, one token a thread."""
    add_levels, add_signs = _products(BITS, NUM_ROWS), _products(1, NUM_ROWS)

    @register_jitable
    def score(keys, h, tile, count, q, levels, staged, thread, sums, sketch_sums):
        for r in range(NUM_ROWS):
            sums[r] = np.float32(0)
            sketch_sums[r] = np.float32(0)
        first = h * keys.scales.shape[1] + tile
        add_levels(
            keys.codes, keys.row_bytes, first, count, q.dim, q.rows, 0, levels, staged, thread, sums
        )
        if q.projections > 0:
            add_signs(
                keys.signs, keys.sign_bytes, first, count, q.projections, q.rows, NUM_ROWS * q.dim,
                q.sign_levels, staged, thread, sketch_sums,
            )  # fmt: skip
        if thread < count:
            scale = keys.scales[h, tile + thread]
            for r in range(NUM_ROWS):
                sums[r] *= scale
            if q.projections > 0:
                left = keys.residuals[h, tile + thread]
                for r in range(NUM_ROWS):
                    sums[r] = cuda.fma(sketch_sums[r], left, sums[r])

    return score


@register_jitable
def _sees(row0, num_rows, group, length, num_queries, window_left, lows, highs):
    """Store the tokens that q rows from `row0` on see."""
    for r in range(num_rows):
        position = length - num_queries + (row0 + r) // group
        lows[r] = np.int32(oldest_visible(position, window_left))
        highs[r] = np.int32(position + 1)


@register_jitable
def _capped(score, cap):
    """Return a score with the soft cap applied, if there is one."""
    if cap > 0:
        return cap * np.float32(math.tanh(score / cap))
    return score


@register_jitable
def _load_queries(rotated, sketched, row0, num_rows, rows, q, thread):
    """Load `rows` q rows and their sketches into shared memory; rows past `num_rows` repeat the last one."""
    dim, projections = rotated.shape[1], sketched.shape[1]
    for r in range(rows):
        row = row0 + min(r, num_rows - 1)
        for d in range(thread, dim, THREADS):
            q[r * dim + d] = rotated[row, d]
        for i in range(thread, projections, THREADS):
            q[rows * dim + r * projections + i] = sketched[row, i]


def _table_size(bits):
    return 1 << bits if bits <= SHARED_BITS else 1


def make_score(BITS, NUM_ROWS):
    """Make the kernel of scores on codes of `BITS` bits, for `NUM_ROWS` q rows of a head at once."""
    score = _scorer(BITS, NUM_ROWS)
    STAGED = THREADS * (CHUNK * BITS // 8 + PAD)
    TABLE, IN_SHARED = _table_size(BITS), BITS <= SHARED_BITS

    def kernel(rotated, sketched, levels, codes, scales, signs, residuals, span, out):
        begin, length, num_queries, window_left, cap = span
        num_heads = scales.shape[0]
        of_head, group = rotated.shape[0] // num_heads, out.shape[1] // num_heads
        thread = natural(cuda.threadIdx.x)
        staged = cuda.shared.array(STAGED, np.uint8)
        table = cuda.shared.array(TABLE, np.float32)
        sign_levels = cuda.shared.array(2, np.float32)
        sums = cuda.local.array(NUM_ROWS, np.float32)
        sketch_sums = cuda.local.array(NUM_ROWS, np.float32)
        lows, highs = cuda.local.array(NUM_ROWS, np.int32), cuda.local.array(NUM_ROWS, np.int32)
        keys = _keys(codes, scales, signs, residuals)
        q_rows = cuda.shared.array(0, types.float32)
        q = CodedQueries(q_rows, rotated.shape[1], sketched.shape[1], sign_levels)
        if IN_SHARED:
            for i in range(thread, TABLE, THREADS):
                table[i] = levels[i]
        if thread < 2:
            sign_levels[thread] = np.float32(2 * thread - 1)
        row_blocks = (of_head + NUM_ROWS - 1) // NUM_ROWS
        tiles = (length + THREADS - 1) // THREADS
        for item in range(
            np.int64(cuda.blockIdx.x), tiles * row_blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            inner = item // num_heads
            h, r0 = item % num_heads, inner % row_blocks * NUM_ROWS
            t = inner // row_blocks * THREADS
            tile, count, rows = begin + t, min(THREADS, length - t), min(NUM_ROWS, of_head - r0)
            _sees(r0, NUM_ROWS, group, length, num_queries, window_left, lows, highs)
            # Products begin and end with a barrier. The previous item therefore has read its data, and this one's
            # products read only complete data.
            _load_queries(rotated, sketched, h * of_head + r0, rows, NUM_ROWS, q_rows, thread)
            if IN_SHARED:
                score(keys, h, tile, count, q, table, staged, thread, sums, sketch_sums)
            else:
                score(keys, h, tile, count, q, levels, staged, thread, sums, sketch_sums)
            if thread < count:
                for r in range(NUM_ROWS):
                    if r < rows:
                        row, found = r0 + r, np.float32(-np.inf)
                        if lows[r] <= t + thread < highs[r]:
                            found = _capped(sums[r], cap)
                        out[row // group, h * group + row % group, t + thread] = found

    return kernel


def _softmax(NUM_ROWS, COLUMNS):
    """Make the function that turns scores into weights of the values' levels, relative to the running maxima."""
    SEARCHERS = min(8, THREADS // NUM_ROWS)  # threads that compute the maximum of one row
    MAXIMA = NUM_ROWS * SEARCHERS

    @register_jitable
    def softmax(scores, p, peaks, state, v_scales, h, tile, t, count, thread, cap):
        here = thread < count
        for r in range(NUM_ROWS):
            if here and state.lows[r] <= t + thread < state.highs[r]:
                if cap > 0:
                    scores[r] = _capped(scores[r], cap) * np.float32(LOG2_E)
            else:
                scores[r] = np.float32(-np.inf)
            p[r * THREADS + thread] = scores[r]
        cuda.syncthreads()
        if thread < MAXIMA:
            r, top = thread // SEARCHERS, np.float32(-np.inf)
            for i in range(thread % SEARCHERS, THREADS, SEARCHERS):
                top = max(top, p[r * THREADS + natural(i)])
            peaks[thread] = top
        cuda.syncthreads()
        v_scale = v_scales[h, tile + thread] if here else np.float32(0)
        for r in range(NUM_ROWS):
            top = state.maxima[r]
            for i in range(SEARCHERS):
                top = max(top, peaks[r * SEARCHERS + i])
            base = top if top > np.float32(-np.inf) else np.float32(0)  # no token seen so far
            shrink = np.float32(math.exp2(state.maxima[r] - base))
            state.maxima[r] = top
            weight, weighted = np.float32(0), np.float32(0)
            if scores[r] != np.float32(-np.inf):
                weight = np.float32(math.exp2(scores[r] - base))
                weighted = weight * v_scale
            state.totals[r] = cuda.fma(state.totals[r], shrink, weight)
            p[r * THREADS + thread] = weighted
            for n in range(COLUMNS):
                state.sums[n * NUM_ROWS + r] *= shrink
        cuda.syncthreads()

    return softmax, MAXIMA


def _accumulate(BITS, NUM_ROWS, COLUMNS):
    """Make the functions that add up weighted levels of the values, and store a split's part of the result."""

    @register_jitable
    def accumulate(v_codes, at, row_bytes, count, levels, p, state, dim, thread):
        for n in range(COLUMNS):
            # Threads beyond the last column also read it; their sums are ignored.
            d = natural(min(thread + n * THREADS, dim - 1))
            for i in range(count):
                level = levels[code_at(v_codes, at + i * row_bytes, BITS, d)]
                for r in range(NUM_ROWS):
                    s = n * NUM_ROWS + r
                    state.sums[s] = cuda.fma(p[r * THREADS + i], level, state.sums[s])

    @register_jitable
    def store(state, p, parts, h, at, splits, rows, thread):
        # The first of `rows` q rows has its part at `at`. The parts of the next rows are `splits` apart.
        dim = parts.shape[2] - 2
        for r in range(NUM_ROWS):
            p[r * THREADS + thread] = state.totals[r]
        cuda.syncthreads()
        for r in range(NUM_ROWS):
            if r < rows:
                for n in range(COLUMNS):
                    d = thread + n * THREADS
                    if d < dim:
                        parts[h, at + r * splits, d] = state.sums[n * NUM_ROWS + r]
                if thread == 0:
                    total = np.float32(0)
                    for i in range(THREADS):
                        total += p[r * THREADS + natural(i)]
                    parts[h, at + r * splits, dim] = state.maxima[r]
                    parts[h, at + r * splits, dim + 1] = total

    return accumulate, store


def make_attend(BITS, V_BITS, NUM_ROWS, COLUMNS):
    """Make the kernel of attention on codes; its results are splits to be merged.

    Parameters
    ----------
    BITS, V_BITS : int
        Bits of a code of keys, and of values.
    NUM_ROWS : int
        Q rows of a head that a block processes at once.
    COLUMNS : int
        Columns of the values that a thread adds up.
    """
    score = _scorer(BITS, NUM_ROWS)
    softmax, MAXIMA = _softmax(NUM_ROWS, COLUMNS)
    accumulate, store = _accumulate(V_BITS, NUM_ROWS, COLUMNS)
    STAGED = THREADS * (CHUNK * BITS // 8 + PAD)
    TABLE, IN_SHARED = _table_size(BITS), BITS <= SHARED_BITS
    # With equal bits, values have the keys' levels.
    V_TABLE, V_IN_SHARED = (1 if V_BITS == BITS else _table_size(V_BITS)), V_BITS <= SHARED_BITS
    PROBABILITIES, SUMS, ALIKE = NUM_ROWS * THREADS, COLUMNS * NUM_ROWS, V_BITS == BITS

    def kernel(
        rotated, sketched, levels, v_levels, k_codes, k_scales, signs, residuals, v_codes, v_scales,
        span, plan, parts,
    ):  # fmt: skip
        window_left, group, items, num_seqs, block_size = span[:5]
        one, cap = span[5:-1], span[-1]
        num_heads, capacity = k_scales.shape
        dim, v_bytes = rotated.shape[1], v_codes.shape[0] // (num_heads * capacity)
        of_head = rotated.shape[0] // num_heads
        thread = natural(cuda.threadIdx.x)
        staged = cuda.shared.array(STAGED, np.uint8)
        table = cuda.shared.array(TABLE, np.float32)
        v_table = cuda.shared.array(V_TABLE, np.float32)
        sign_levels = cuda.shared.array(2, np.float32)
        p = cuda.shared.array(PROBABILITIES, np.float32)  # [row, token]
        peaks = cuda.shared.array(MAXIMA, np.float32)
        scores = cuda.local.array(NUM_ROWS, np.float32)
        sketch_scores = cuda.local.array(NUM_ROWS, np.float32)
        maxima = cuda.local.array(NUM_ROWS, np.float32)
        totals = cuda.local.array(NUM_ROWS, np.float32)
        sums = cuda.local.array(SUMS, np.float32)
        lows, highs = cuda.local.array(NUM_ROWS, np.int32), cuda.local.array(NUM_ROWS, np.int32)
        state = CodedState(maxima, totals, sums, lows, highs)
        keys = _keys(k_codes, k_scales, signs, residuals)
        q_rows = cuda.shared.array(0, types.float32)
        q = CodedQueries(q_rows, dim, sketched.shape[1], sign_levels)
        if IN_SHARED:
            for i in range(thread, TABLE, THREADS):
                table[i] = levels[i]
        if V_IN_SHARED and not ALIKE:
            for i in range(thread, V_TABLE, THREADS):
                v_table[i] = v_levels[i]
        if thread < 2:
            sign_levels[thread] = np.float32(2 * thread - 1)
        for item in range(np.int64(cuda.blockIdx.x), items * num_heads, np.int64(cuda.gridDim.x)):
            h, inner = item % num_heads, item // num_heads
            item0, query0, part0, block_table, start, length, num_queries = sequence_at(
                plan, num_seqs, one, BY_ITEM, inner
            )
            inner -= item0
            row_blocks = (num_queries * group + NUM_ROWS - 1) // NUM_ROWS
            r0, split = inner % row_blocks * NUM_ROWS, inner // row_blocks
            splits = (length - start + SPLIT - 1) // SPLIT
            row0, rows = h * of_head + query0 * group + r0, min(NUM_ROWS, num_queries * group - r0)
            _sees(r0, NUM_ROWS, group, length, num_queries, window_left, lows, highs)
            first = start + split * SPLIT
            # Tiles that no row sees are skipped.
            newest = length - num_queries + (r0 + rows - 1) // group
            last = min(first + SPLIT, newest + 1)
            first += max(np.int64(0), np.int64(lows[0]) - first) // THREADS * THREADS
            cuda.syncthreads()  # `store` has read what this item may store next, if it has no tiles
            _load_queries(rotated, sketched, row0, rows, NUM_ROWS, q_rows, thread)
            for r in range(NUM_ROWS):
                maxima[r] = np.float32(-np.inf)
                totals[r] = np.float32(0)
            for i in range(SUMS):
                sums[i] = np.float32(0)
            for t in range(first, last, THREADS):  # products wait before they read queries
                count, tile = min(THREADS, last - t), slot_at(plan, block_table, block_size, t)
                if IN_SHARED:
                    score(keys, h, tile, count, q, table, staged, thread, scores, sketch_scores)
                else:
                    score(keys, h, tile, count, q, levels, staged, thread, scores, sketch_scores)
                softmax(scores, p, peaks, state, v_scales, h, tile, t, count, thread, cap)
                at = (h * capacity + tile) * v_bytes
                if not V_IN_SHARED:
                    accumulate(v_codes, at, v_bytes, count, v_levels, p, state, dim, thread)
                elif ALIKE:
                    accumulate(v_codes, at, v_bytes, count, table, p, state, dim, thread)
                else:
                    accumulate(v_codes, at, v_bytes, count, v_table, p, state, dim, thread)
                cuda.syncthreads()
            store(state, p, parts, h, part0 + r0 * splits + split, splits, rows, thread)

    return kernel


def make_finish():
    """Make the kernel that merges splits in order, and multiplies the result with a matrix of its head."""

    def kernel(parts, span, plan, back, out, lse):
        num_seqs, one = span[0], span[1:]
        num_heads, dim, group = back.shape[0], out.shape[2], out.shape[1] // back.shape[0]
        of_head = out.shape[0] * group
        thread = natural(cuda.threadIdx.x)
        z = cuda.shared.array(0, types.float32)
        for row in range(
            np.int64(cuda.blockIdx.x), of_head * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            h, of_rows = row // of_head, row % of_head
            query, head = of_rows // group, h * group + of_rows % group
            _, query0, part0, _, start, length, _ = sequence_at(
                plan, num_seqs, one, BY_QUERY, query
            )
            splits = (length - start + SPLIT - 1) // SPLIT
            at = part0 + (of_rows - query0 * group) * splits
            top = np.float32(-np.inf)
            for i in range(at, at + splits):
                top = max(top, parts[h, i, dim])
            base = top if top > np.float32(-np.inf) else np.float32(0)
            total = np.float32(0)
            for i in range(at, at + splits):
                weight = np.float32(math.exp2(parts[h, i, dim] - base))
                total = cuda.fma(weight, parts[h, i, dim + 1], total)
            factor, found = finish(top, total, np.float32(-np.inf), np.float32(LN_2))
            for d in range(thread, dim, THREADS):
                x = np.float32(0)
                for i in range(at, at + splits):
                    weight = np.float32(math.exp2(parts[h, i, dim] - base))
                    x = cuda.fma(weight, parts[h, i, d], x)
                z[d] = x * np.float32(factor)
            if thread == 0 and lse.shape[0] > 0:
                lse[query, head] = found
            cuda.syncthreads()
            for j in range(thread, dim, THREADS):
                x = np.float32(0)
                for k in range(dim):
                    x = cuda.fma(z[k], back[h, k, j], x)
                out[query, head, j] = x
            cuda.syncthreads()

    return kernel


# Numbers that a call of attention may store for its splits; with more, queries are processed in several rounds.
MOST_PARTS = 1 << 25

# The bytes of a block's shared memory that q rows may take.
Q_BYTES = 16 * 1024


# Types of arguments.
_MATRIX, _BY_TOKEN, _FLOATS = (array(types.float32, ndim) for ndim in (3, 2, 1))
_PACKED = array(types.uint8, 1)
_KEYS = (_PACKED, _BY_TOKEN, _PACKED, _BY_TOKEN)
_NUMBERS, _I64 = array(types.int64, 1), types.int64
# For scores: the place of the first token, the number of tokens, the number of queries, the window and the cap.
_SPAN = types.Tuple((*[_I64] * 4, types.float32))
# For attention: the window, q heads of a head, items of a head, sequences, their block size, one sequence, the cap.
_SPANS = types.Tuple((*[_I64] * (5 + WIDTH), types.float32))


@functools.cache
def _encode(kind: str) -> Any:
    signature = (
        array(WORDS[kind], 3), _MATRIX, _FLOATS, _FLOATS, types.UniTuple(_I64, 2), _MATRIX,
        array(types.uint8, 3), _BY_TOKEN, array(types.uint8, 3), _BY_TOKEN, _NUMBERS,
    )  # fmt: skip
    return Kernel(make_encode, (kind,), signature)


@functools.cache
def _decode(bits: int) -> Any:
    i64 = types.int64
    signature = (_PACKED, i64, i64, _BY_TOKEN, i64, _FLOATS, _MATRIX, _MATRIX)
    return Kernel(make_decode, (bits,), signature)


@functools.cache
def _multiply(kind: str) -> Any:
    return Kernel(
        make_multiply, (kind,), (array(WORDS[kind], 3), _MATRIX, types.float32, _BY_TOKEN)
    )


@functools.cache
def _score(bits: int, num_rows: int) -> Any:
    signature = (_BY_TOKEN, _BY_TOKEN, _FLOATS, *_KEYS, _SPAN, _MATRIX)
    return Kernel(make_score, (bits, num_rows), signature)


@functools.cache
def _attend(bits: int, v_bits: int, num_rows: int, columns: int) -> Any:
    signature = (
        _BY_TOKEN, _BY_TOKEN, _FLOATS, _FLOATS, *_KEYS, _PACKED, _BY_TOKEN, _SPANS, _NUMBERS,
        _MATRIX,
    )  # fmt: skip
    return Kernel(make_attend, (bits, v_bits, num_rows, columns), signature)


@functools.cache
def _finish() -> Any:
    span = types.UniTuple(_I64, 1 + WIDTH)
    return Kernel(make_finish, (), (_MATRIX, span, _NUMBERS, _MATRIX, _MATRIX, _BY_TOKEN))


def _bits(levels: Any) -> int:
    return int(levels.size).bit_length() - 1


def _nothing() -> Any:
    """Return the plan of one sequence, and the slots of consecutive tokens."""
    return memory.empty((0,), np.int64)


def _on_device(plan: Any) -> Any:
    """Return a plan as kernels expect it."""
    if not plan.size:
        return _nothing()
    if SIMULATED:
        return cuda.to_device(plan)
    streams.spoil()
    return uploads.upload(plan)


def _flat(codes: Any) -> Any:
    """Return codes in one dimension, for kernels that compute the places of bytes."""
    return codes.reshape((codes.size,))


def _check_shared(shared_bytes: int, dim: int) -> None:
    """Raise if a block's rows do not fit into shared memory."""
    if shared_bytes > SHARED_BYTES - 4096:  # 4096 bytes for the kernels' other arrays
        raise NotSupported(
            f"head_dim: expected rows that fit into {SHARED_BYTES} bytes of shared memory, got {dim} "
            'elements; split them, or use target="cpu"'
        )


def _rotated(q: Any, q_kind: str, book: Codebook, scale: float) -> tuple[Any, Any]:
    """Return queries rotated and scaled, and their products with the sketch, by kv head."""
    num_heads, dim, projections = book.sketch.shape
    rows = q.shape[0] * q.shape[1]
    blocks = ceil_div(rows // num_heads, ROWS) * num_heads
    rotated = memory.empty((rows, dim), np.float32)
    sketched = memory.empty((rows, projections), np.float32)
    size = 4 * ROWS * dim
    launch(
        _multiply(q_kind), blocks, (LANES, ROWS), q, book.rotation, np.float32(scale), rotated,
        shared_bytes=size,
    )  # fmt: skip
    if projections:
        launch(
            _multiply("fp32"), blocks, (LANES, ROWS), rotated.reshape((1, rows, dim)), book.sketch,
            np.float32(1), sketched, shared_bytes=size,
        )  # fmt: skip
    return rotated, sketched


def _packed(stored: StoredCodes) -> tuple[Any, ...]:
    """Return keys and values as kernels expect them."""
    codes, scales, signs, residuals, v_codes, v_scales = stored[:6]
    return _flat(codes), scales, _flat(signs), residuals, _flat(v_codes), v_scales


def _rows_at_once(group: int, row_bytes: int) -> int:
    """Return how many q rows of a head a block processes."""
    fitting = [n for n in Q_ROWS if n * row_bytes <= Q_BYTES] or [1]
    return next((n for n in fitting if n >= group), fitting[-1])


@implements(Operations.encode_rows)
def encode_rows(
    rows, rows_kind, rotation, edges, levels, sketch, codes, scales, signs, residuals, start,
    slots=None,
):  # fmt: skip
    num_tokens, num_heads, dim = rows.shape
    shared_bytes = 4 * ROWS * (dim + max(dim, sketch.shape[2]))
    _check_shared(shared_bytes, dim)
    launch(
        _encode(rows_kind), ceil_div(num_tokens, ROWS) * num_heads, (LANES, ROWS),
        rows, rotation, edges, levels, (_bits(levels), start), sketch, codes, scales, signs, residuals,
        _nothing() if slots is None else slots, shared_bytes=shared_bytes,
    )  # fmt: skip


@implements(Operations.decode_rows)
def decode_rows(codes, scales, begin, levels, back, out):
    num_heads, num_tokens, dim = out.shape
    launch(
        _decode(_bits(levels)), ceil_div(num_tokens, ROWS) * num_heads, (LANES, ROWS),
        _flat(codes), codes.shape[1], codes.shape[2], scales, begin, levels, back, out,
        shared_bytes=4 * ROWS * dim,
    )  # fmt: skip


@implements(Operations.score_codes)
def score_codes(q, q_kind, book, stored, options, out):
    num_heads, dim, projections = book.sketch.shape
    rotated, sketched = _rotated(q, q_kind, book, options.sm_scale)
    of_head, row_bytes = rotated.shape[0] // num_heads, 4 * (dim + projections)
    num_rows, length = _rows_at_once(of_head, row_bytes), stored.end - stored.begin
    blocks = ceil_div(length, THREADS) * ceil_div(of_head, num_rows) * num_heads
    launch(
        _score(_bits(book.levels), num_rows), blocks, THREADS, rotated, sketched, book.levels,
        *_packed(stored)[:4],
        (stored.begin, length, q.shape[0], options.window_left, np.float32(options.logits_soft_cap)),
        out, shared_bytes=num_rows * row_bytes,
    )  # fmt: skip


@implements(Operations.attend_codes)
def attend_codes(q, q_kind, book, stored, options, out, lse):
    (num_queries, num_q_heads), num_heads = q.shape[:2], book.sketch.shape[0]
    _, dim, projections = book.sketch.shape
    group, row_bytes = num_q_heads // num_heads, 4 * (dim + projections)
    sequences = stored.sequences
    most = num_queries if sequences is None else int(sequences.query_lens.max())
    num_rows = _rows_at_once(most * group, row_bytes)
    block_size = 0 if sequences is None else sequences.block_size
    limits, heads = Limits(SPLIT, num_rows, MOST_PARTS), (num_q_heads, group, dim)
    scale = options.sm_scale * (1.0 if options.logits_soft_cap else math.log2(math.e))
    kernel = _attend(_bits(book.levels), _bits(book.v_levels), num_rows, ceil_div(dim, THREADS))
    codes, cap = _packed(stored), np.float32(options.logits_soft_cap)
    for some in rounds(num_queries, heads, stored, options.window_left, limits):
        q_rows, to, of_lse = q, out, lse
        if some.end - some.first < num_queries:
            which = slice(some.first, some.end)
            q_rows, to = q[which], out[which]
            of_lse = lse[which] if lse.size else lse
        rotated, sketched = _rotated(q_rows, q_kind, book, scale)
        plan = _on_device(some.plan)
        parts = memory.empty((num_heads, some.parts, dim + 2), np.float32)
        span = options.window_left, group, some.items, some.num_seqs, block_size, *some.one, cap
        launch(
            kernel, some.items * num_heads, THREADS, rotated, sketched, book.levels, book.v_levels,
            *codes, span, plan, parts, shared_bytes=num_rows * row_bytes,
        )  # fmt: skip
        launch(
            _finish(), rotated.shape[0], THREADS, parts, (some.num_seqs, *some.one), plan,
            book.back, to, of_lse, shared_bytes=4 * dim,
        )  # fmt: skip
