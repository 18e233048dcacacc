"""Vectors as codes of a few bits, on CUDA; see `numkv.kernels.cpu.compress` for the method.

*Encode, decode, turn.* A block takes a few rows of one head. Each warp has a row of its own for what goes through a row
element by element, and every thread has columns of the head's matrix, which it multiplies with all of the block's rows,
so that a matrix is read once for several rows.

*Scores.* A block takes a tile of tokens, one for each thread, and up to eight q rows of their head. Codes come into
shared memory some bytes of each row at a time, adjacent threads taking adjacent bytes; then each thread looks the
levels of its own token up, once for all q rows.

*Attention.* A block takes a split of a head's tokens, tile by tile: scores as above, the online softmax of Milakov and
Gimelshein (arXiv:1805.02867), then every thread adds up the weighted levels of its own columns of the values. A second
kernel merges the splits in order, and turns the sums back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
from numkv.kernels.cuda.simd import (
    LANES,
    SIMULATED,
    THREADS,
    c_array,
    ceil_div,
    jit,
    launch,
    natural,
)  # fmt: skip
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.rows.codes import code_at, packed_byte, refined
from numkv.rows.convert import codec

__all__ = ["attend_codes", "decode_rows", "encode_rows", "score_codes"]

# Rows that a block turns at once: one for each warp.
ROWS = THREADS // LANES
# Q rows that share the codes of a head, as many as there are or as registers allow.
Q_ROWS = (1, 4, 8)
# Codes of a token that lie in shared memory at once. As many bits make whole words.
CHUNK = 16 if SIMULATED else 64
# Bytes between the chunks of two tokens, so that they do not all start in the same bank.
PAD = 4
# Tokens of a split.
SPLIT = 16 if SIMULATED else 256
# Codes of so many bits or less are looked up in shared memory.
SHARED_BITS = 8
# Shared memory that a block has without asking, and what of it q rows may take.
SHARED_BYTES = 48 * 1024
Q_BYTES = 16 * 1024

LOG2_E = math.log2(math.e)
LARGEST = float(np.finfo(np.float32).max)


@register_jitable
def _multiply(x, width, matrix, h, j, sums):
    """``sums[r] = x[r] @ matrix[h, :, j]`` for `ROWS` rows of `width` elements."""
    for r in range(ROWS):
        sums[r] = np.float32(0)
    for k in range(width):
        factor = matrix[h, k, j]
        for r in range(ROWS):
            sums[r] = cuda.fma(x[r * width + k], factor, sums[r])


@register_jitable
def _total(partial, mine, lane, value):
    """The sum of a warp's values; all threads of the block wait for each other."""
    partial[mine, lane] = value
    cuda.syncthreads()
    total = partial[mine, 0]
    for i in range(1, LANES):
        total += partial[mine, i]
    cuda.syncthreads()
    return total


def make_encode(SRC):
    """The kernel that encodes rows of kind `SRC`."""
    load, _ = codec(SRC)
    SHAPE, TOP = (ROWS, LANES), LARGEST

    def kernel(
        rows, rotation, edges, levels, bits, sketch, codes, scales, signs, residuals, start
    ):  # fmt: skip
        num_tokens, num_heads, dim = rows.shape
        projections = sketch.shape[2]
        widest = max(dim, projections)
        lane, mine = natural(cuda.threadIdx.x), natural(cuda.threadIdx.y)
        thread = mine * LANES + lane
        # First the turned rows, then what the codes leave of them; behind them the rows as they come, or the codes.
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
            square = np.float64(0)
            if here:
                for d in range(lane, dim, LANES):
                    value = np.float64(load(rows[t, h, d]))
                    square += value * value
            norm = math.sqrt(_total(wide, mine, lane, square))
            for d in range(lane, dim, LANES):
                value = np.float32(0)
                if here and norm > 0:
                    value = np.float32(np.float64(load(rows[t, h, d])) / norm)
                z[behind + own + d] = value
            cuda.syncthreads()
            for j in range(thread, dim, THREADS):
                _multiply(z[behind:], dim, rotation, h, j, sums)
                for r in range(ROWS):
                    z[r * dim + j] = sums[r]
            cuda.syncthreads()

            # -- codes, and the multiple of their levels that comes nearest
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
            factor = dot / _total(partial, mine, lane, square32)
            if here:
                if lane == 0:
                    scales[h, start + t] = np.float32(min(norm * np.float64(factor), TOP))
                for i in range(lane, codes.shape[2], LANES):
                    codes[h, start + t, i] = packed_byte(chosen, own_codes, dim, bits, i)
            if projections > 0:
                rest = np.float32(0)
                for d in range(lane, dim, LANES):
                    x = z[own + d] - factor * levels[chosen[own_codes + d]]
                    z[own + d] = x
                    rest = cuda.fma(x, x, rest)
                rest = _total(partial, mine, lane, rest)
                if here and lane == 0:
                    left = norm * math.sqrt(np.float64(rest))
                    residuals[h, start + t] = np.float32(min(left, TOP))
                for i in range(thread, projections, THREADS):
                    _multiply(z, dim, sketch, h, i, sums)
                    for r in range(ROWS):
                        chosen[behind + r * widest + i] = 1 if sums[r] >= 0 else 0
                cuda.syncthreads()
                if here:
                    for i in range(lane, signs.shape[2], LANES):
                        signs[h, start + t, i] = packed_byte(chosen, own_codes, projections, 1, i)
            cuda.syncthreads()

    return kernel


def make_decode(BITS):
    """The kernel that turns codes of `BITS` bits back into rows."""

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
                _multiply(z, dim, back, h, j, sums)
                for r in range(ROWS):
                    if t0 + r < num_tokens:
                        out[h, t0 + r, j] = sums[r]
            cuda.syncthreads()

    return kernel


def make_turn(SRC):
    """The kernel that multiplies rows of kind `SRC`, one for each q head, with the matrix of its kv head."""
    load, _ = codec(SRC)

    def kernel(rows, matrix, factor, out):
        num_heads, dim, columns = matrix.shape
        group = rows.shape[0] // num_heads
        lane, mine = natural(cuda.threadIdx.x), natural(cuda.threadIdx.y)
        x = cuda.shared.array(0, types.float32)
        sums = cuda.local.array(ROWS, np.float32)
        blocks = (group + ROWS - 1) // ROWS
        for item in range(
            np.int64(cuda.blockIdx.x), blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            h, r0 = item % num_heads, item // num_heads * ROWS
            row = h * group + min(r0 + mine, group - 1)
            for d in range(lane, dim, LANES):
                x[mine * dim + d] = factor * load(rows[row, d])
            cuda.syncthreads()
            for j in range(mine * LANES + lane, columns, THREADS):
                _multiply(x, dim, matrix, h, j, sums)
                for r in range(ROWS):
                    if r0 + r < group:
                        out[h * group + r0 + r, j] = sums[r]
            cuda.syncthreads()

    return kernel


def _products(BITS, NUM_ROWS):
    """The function that adds up the products of q rows and the levels of a tile of tokens, one token a thread."""
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
    """The function that leaves the scores of a tile of tokens in `sums`, one token a thread."""
    add_levels, add_signs = _products(BITS, NUM_ROWS), _products(1, NUM_ROWS)

    @register_jitable
    def score(
        codes, row_bytes, scales, signs, sign_bytes, residuals, h, capacity, tile, count, dim,
        projections, q, levels, sign_levels, staged, thread, sums, sketch_sums,
    ):  # fmt: skip
        for r in range(NUM_ROWS):
            sums[r] = np.float32(0)
            sketch_sums[r] = np.float32(0)
        first = h * capacity + tile
        add_levels(codes, row_bytes, first, count, dim, q, 0, levels, staged, thread, sums)
        if projections > 0:
            add_signs(
                signs, sign_bytes, first, count, projections, q, NUM_ROWS * dim, sign_levels,
                staged, thread, sketch_sums,
            )  # fmt: skip
        if thread < count:
            scale = scales[h, tile + thread]
            for r in range(NUM_ROWS):
                sums[r] *= scale
            if projections > 0:
                left = residuals[h, tile + thread]
                for r in range(NUM_ROWS):
                    sums[r] = cuda.fma(sketch_sums[r], left, sums[r])

    return score


@register_jitable
def _load_queries(turned, sketched, row0, num_rows, rows, q, thread):
    """Put `rows` q rows and their sketches into shared memory; rows past `num_rows` are the last one again."""
    dim, projections = turned.shape[1], sketched.shape[1]
    for r in range(rows):
        row = row0 + min(r, num_rows - 1)
        for d in range(thread, dim, THREADS):
            q[r * dim + d] = turned[row, d]
        for i in range(thread, projections, THREADS):
            q[rows * dim + r * projections + i] = sketched[row, i]


def _table_size(bits):
    return 1 << bits if bits <= SHARED_BITS else 1


def make_score(BITS, NUM_ROWS):
    """The kernel of scores on codes of `BITS` bits, for `NUM_ROWS` q rows of a head at once."""
    score = _scorer(BITS, NUM_ROWS)
    STAGED = THREADS * (CHUNK * BITS // 8 + PAD)
    TABLE, IN_SHARED = _table_size(BITS), BITS <= SHARED_BITS

    def kernel(
        turned, sketched, levels, codes, row_bytes, scales, signs, sign_bytes, residuals, begin,
        end, out,
    ):  # fmt: skip
        num_heads, capacity = scales.shape
        dim, projections = turned.shape[1], sketched.shape[1]
        group = turned.shape[0] // num_heads
        thread = natural(cuda.threadIdx.x)
        q = cuda.shared.array(0, types.float32)
        staged = cuda.shared.array(STAGED, np.uint8)
        table = cuda.shared.array(TABLE, np.float32)
        sign_levels = cuda.shared.array(2, np.float32)
        sums = cuda.local.array(NUM_ROWS, np.float32)
        sketch_sums = cuda.local.array(NUM_ROWS, np.float32)
        if IN_SHARED:
            for i in range(thread, TABLE, THREADS):
                table[i] = levels[i]
        if thread < 2:
            sign_levels[thread] = np.float32(2 * thread - 1)
        row_blocks = (group + NUM_ROWS - 1) // NUM_ROWS
        tiles = (end - begin + THREADS - 1) // THREADS
        for item in range(
            np.int64(cuda.blockIdx.x), tiles * row_blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            inner = item // num_heads
            h, r0 = item % num_heads, inner % row_blocks * NUM_ROWS
            tile = begin + inner // row_blocks * THREADS
            count, rows = min(THREADS, end - tile), min(NUM_ROWS, group - r0)
            cuda.syncthreads()
            _load_queries(turned, sketched, h * group + r0, rows, NUM_ROWS, q, thread)
            cuda.syncthreads()
            if IN_SHARED:
                score(
                    codes, row_bytes, scales, signs, sign_bytes, residuals, h, capacity, tile, count,
                    dim, projections, q, table, sign_levels, staged, thread, sums, sketch_sums,
                )  # fmt: skip
            else:
                score(
                    codes, row_bytes, scales, signs, sign_bytes, residuals, h, capacity, tile, count,
                    dim, projections, q, levels, sign_levels, staged, thread, sums, sketch_sums,
                )  # fmt: skip
            if thread < count:
                for r in range(NUM_ROWS):
                    if r < rows:
                        out[h * group + r0 + r, tile - begin + thread] = sums[r]

    return kernel


def make_attend(BITS, NUM_ROWS, COLUMNS):
    """The kernel of attention on codes; what it leaves are splits to be merged.

    Parameters
    ----------
    BITS : int
        Bits of a code.
    NUM_ROWS : int
        Q rows of a head that a block takes at once.
    COLUMNS : int
        Columns of the values that a thread takes.
    """
    score = _scorer(BITS, NUM_ROWS)
    LENGTH = SPLIT
    STAGED = THREADS * (CHUNK * BITS // 8 + PAD)
    TABLE, IN_SHARED = _table_size(BITS), BITS <= SHARED_BITS
    SEARCHERS = min(8, THREADS // NUM_ROWS)  # threads that look for the maximum of one row
    PROBABILITIES, MAXIMA, SUMS = NUM_ROWS * THREADS, NUM_ROWS * SEARCHERS, COLUMNS * NUM_ROWS

    def kernel(
        turned, sketched, levels, k_codes, row_bytes, k_scales, signs, sign_bytes, residuals,
        v_codes, v_scales, begin, end, parts,
    ):  # fmt: skip
        num_heads, capacity = k_scales.shape
        dim, projections = turned.shape[1], sketched.shape[1]
        group, splits = turned.shape[0] // num_heads, parts.shape[1]
        thread = natural(cuda.threadIdx.x)
        q = cuda.shared.array(0, types.float32)
        staged = cuda.shared.array(STAGED, np.uint8)
        table = cuda.shared.array(TABLE, np.float32)
        sign_levels = cuda.shared.array(2, np.float32)
        p = cuda.shared.array(PROBABILITIES, np.float32)  # [row, token]
        peaks = cuda.shared.array(MAXIMA, np.float32)
        scores = cuda.local.array(NUM_ROWS, np.float32)
        sketch_scores = cuda.local.array(NUM_ROWS, np.float32)
        maxima = cuda.local.array(NUM_ROWS, np.float32)
        totals = cuda.local.array(NUM_ROWS, np.float32)  # of the thread's own tokens
        sums = cuda.local.array(SUMS, np.float32)  # [column, row]
        if IN_SHARED:
            for i in range(thread, TABLE, THREADS):
                table[i] = levels[i]
        if thread < 2:
            sign_levels[thread] = np.float32(2 * thread - 1)
        row_blocks = (group + NUM_ROWS - 1) // NUM_ROWS
        for item in range(
            np.int64(cuda.blockIdx.x), splits * row_blocks * num_heads, np.int64(cuda.gridDim.x)
        ):  # fmt: skip
            inner = item // num_heads
            h, r0 = item % num_heads, inner % row_blocks * NUM_ROWS
            split = inner // row_blocks
            rows = min(NUM_ROWS, group - r0)
            first = begin + split * LENGTH
            last = min(first + LENGTH, end)
            cuda.syncthreads()
            _load_queries(turned, sketched, h * group + r0, rows, NUM_ROWS, q, thread)
            for r in range(NUM_ROWS):
                maxima[r] = np.float32(-np.inf)
                totals[r] = np.float32(0)
            for i in range(SUMS):
                sums[i] = np.float32(0)
            cuda.syncthreads()
            for tile in range(first, last, THREADS):
                count = min(THREADS, last - tile)
                if IN_SHARED:
                    score(
                        k_codes, row_bytes, k_scales, signs, sign_bytes, residuals, h, capacity, tile,
                        count, dim, projections, q, table, sign_levels, staged, thread, scores,
                        sketch_scores,
                    )  # fmt: skip
                else:
                    score(
                        k_codes, row_bytes, k_scales, signs, sign_bytes, residuals, h, capacity, tile,
                        count, dim, projections, q, levels, sign_levels, staged, thread, scores,
                        sketch_scores,
                    )  # fmt: skip
                here = thread < count
                for r in range(NUM_ROWS):
                    p[r * THREADS + thread] = scores[r] if here else np.float32(-np.inf)
                cuda.syncthreads()
                if thread < MAXIMA:
                    r, top = thread // SEARCHERS, np.float32(-np.inf)
                    for i in range(thread % SEARCHERS, THREADS, SEARCHERS):
                        top = max(top, p[r * THREADS + natural(i)])
                    peaks[thread] = top
                cuda.syncthreads()
                v_scale = v_scales[h, tile + thread] if here else np.float32(0)
                for r in range(NUM_ROWS):
                    top = maxima[r]
                    for i in range(SEARCHERS):
                        top = max(top, peaks[r * SEARCHERS + i])
                    shrink = np.float32(math.exp2(maxima[r] - top))
                    maxima[r] = top
                    weight = np.float32(0)
                    if here:
                        weight = np.float32(math.exp2(scores[r] - top))
                    totals[r] = cuda.fma(totals[r], shrink, weight)
                    p[r * THREADS + thread] = weight * v_scale
                    for n in range(COLUMNS):
                        sums[n * NUM_ROWS + r] *= shrink
                cuda.syncthreads()
                at = (h * capacity + tile) * row_bytes
                for n in range(COLUMNS):
                    # Threads beyond the last column read it too; what they add up is not used.
                    d = natural(min(thread + n * THREADS, dim - 1))
                    for i in range(count):
                        code = code_at(v_codes, at + i * row_bytes, BITS, d)
                        level = table[code] if IN_SHARED else levels[code]
                        for r in range(NUM_ROWS):
                            s = n * NUM_ROWS + r
                            sums[s] = cuda.fma(p[r * THREADS + i], level, sums[s])
                cuda.syncthreads()

            # -- this split's part of the result
            for r in range(NUM_ROWS):
                p[r * THREADS + thread] = totals[r]
            cuda.syncthreads()
            for r in range(NUM_ROWS):
                row = h * group + r0 + r
                if r < rows:
                    for n in range(COLUMNS):
                        d = thread + n * THREADS
                        if d < dim:
                            parts[row, split, d] = sums[n * NUM_ROWS + r]
                    if thread == 0:
                        total = np.float32(0)
                        for i in range(THREADS):
                            total += p[r * THREADS + natural(i)]
                        parts[row, split, dim] = maxima[r]
                        parts[row, split, dim + 1] = total

    return kernel


def make_finish():
    """The kernel that merges splits in order, and turns the result back."""

    def kernel(parts, back, out):
        num_q_heads, dim = out.shape
        splits = parts.shape[1]
        group = num_q_heads // back.shape[0]
        thread = natural(cuda.threadIdx.x)
        z = cuda.shared.array(0, types.float32)
        for i in range(np.int64(cuda.blockIdx.x), num_q_heads, np.int64(cuda.gridDim.x)):
            top = np.float32(-np.inf)
            for split in range(splits):
                top = max(top, parts[i, split, dim])
            total = np.float32(0)
            for split in range(splits):
                weight = np.float32(math.exp2(parts[i, split, dim] - top))
                total = cuda.fma(weight, parts[i, split, dim + 1], total)
            for d in range(thread, dim, THREADS):
                x = np.float32(0)
                for split in range(splits):
                    weight = np.float32(math.exp2(parts[i, split, dim] - top))
                    x = cuda.fma(weight, parts[i, split, d], x)
                z[d] = x / total
            cuda.syncthreads()
            for j in range(thread, dim, THREADS):
                x = np.float32(0)
                for k in range(dim):
                    x = cuda.fma(z[k], back[i // group, k, j], x)
                out[i, j] = x
            cuda.syncthreads()

    return kernel


@functools.cache
def _encode(kind: str) -> Any:
    return jit(make_encode(kind))


@functools.cache
def _decode(bits: int) -> Any:
    return jit(make_decode(bits))


@functools.cache
def _turn(kind: str) -> Any:
    return jit(make_turn(kind))


@functools.cache
def _score(bits: int, num_rows: int) -> Any:
    return jit(make_score(bits, num_rows))


@functools.cache
def _attend(bits: int, num_rows: int, columns: int) -> Any:
    return jit(make_attend(bits, num_rows, columns))


@functools.cache
def _finish() -> Any:
    return jit(make_finish())


def _bits(levels: Any) -> int:
    return int(levels.size).bit_length() - 1


def _flat(codes: Any) -> Any:
    """Codes in one dimension, where kernels compute the places of bytes themselves."""
    return codes.reshape((codes.size,))


def _check_shared(shared_bytes: int, dim: int) -> None:
    """Refuse rows of which a block cannot hold as many as it takes at once."""
    if shared_bytes > SHARED_BYTES - 4096:  # what else the kernels need
        raise NotSupported(
            f"head_dim: expected rows that fit into {SHARED_BYTES} bytes of shared memory, got {dim} "
            'elements; split them, or use target="cpu"'
        )


def _turned(q: Any, q_kind: str, rotation: Any, sketch: Any, scale: float) -> tuple[Any, Any]:
    """Queries turned and scaled, and their products with the sketch."""
    num_heads, dim, projections = sketch.shape
    blocks = ceil_div(q.shape[0] // num_heads, ROWS) * num_heads
    turned = cuda.device_array((q.shape[0], dim), np.float32)
    sketched = cuda.device_array((q.shape[0], projections), np.float32)
    size = 4 * ROWS * dim
    launch(
        _turn(q_kind), blocks, (LANES, ROWS), q, rotation, np.float32(scale), turned,
        shared_bytes=size,
    )  # fmt: skip
    if projections:
        launch(
            _turn("fp32"), blocks, (LANES, ROWS), turned, sketch, np.float32(1), sketched,
            shared_bytes=size,
        )  # fmt: skip
    return turned, sketched


def _rows_at_once(group: int, row_bytes: int) -> int:
    """How many q rows of a head a block takes."""
    fitting = [n for n in Q_ROWS if n * row_bytes <= Q_BYTES] or [1]
    return next((n for n in fitting if n >= group), fitting[-1])


@implements(Operations.encode_rows)
def encode_rows(
    rows, rows_kind, rotation, edges, levels, sketch, codes, scales, signs, residuals, start
):
    num_tokens, num_heads, dim = rows.shape
    shared_bytes = 4 * ROWS * (dim + max(dim, sketch.shape[2]))
    _check_shared(shared_bytes, dim)
    launch(
        _encode(rows_kind), ceil_div(num_tokens, ROWS) * num_heads, (LANES, ROWS),
        rows, rotation, edges, levels, _bits(levels), sketch, codes, scales, signs, residuals, start,
        shared_bytes=shared_bytes,
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
def score_codes(
    q, q_kind, rotation, levels, sketch, codes, scales, signs, residuals, begin, end, sm_scale, out
):
    num_heads, dim, projections = sketch.shape
    group = q.shape[0] // num_heads
    row_bytes = 4 * (dim + projections)
    num_rows = _rows_at_once(group, row_bytes)
    turned, sketched = _turned(q, q_kind, rotation, sketch, sm_scale)
    blocks = ceil_div(end - begin, THREADS) * ceil_div(group, num_rows) * num_heads
    launch(
        _score(_bits(levels), num_rows), blocks, THREADS, turned, sketched, levels, _flat(codes),
        codes.shape[2], scales, _flat(signs), signs.shape[2], residuals, begin, end, out,
        shared_bytes=num_rows * row_bytes,
    )  # fmt: skip


@implements(Operations.attend_codes)
def attend_codes(
    q, q_kind, rotation, back, levels, sketch, k_codes, k_scales, signs, residuals, v_codes, v_scales,
    begin, end, sm_scale, out,
):  # fmt: skip
    num_heads, dim, projections = sketch.shape
    num_q_heads = q.shape[0]
    group = num_q_heads // num_heads
    row_bytes = 4 * (dim + projections)
    num_rows = _rows_at_once(group, row_bytes)
    splits = ceil_div(end - begin, SPLIT)
    turned, sketched = _turned(q, q_kind, rotation, sketch, sm_scale * LOG2_E)
    parts = cuda.device_array((num_q_heads, splits, dim + 2), np.float32)
    launch(
        _attend(_bits(levels), num_rows, ceil_div(dim, THREADS)),
        splits * ceil_div(group, num_rows) * num_heads, THREADS,
        turned, sketched, levels, _flat(k_codes), k_codes.shape[2], k_scales, _flat(signs),
        signs.shape[2], residuals, _flat(v_codes), v_scales, begin, end, parts,
        shared_bytes=num_rows * row_bytes,
    )  # fmt: skip
    launch(_finish(), num_q_heads, THREADS, parts, back, out, shared_bytes=4 * dim)


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    real, i64 = types.float32, types.int64
    matrix, floats, packed = c_array(real, 3), c_array(real, 1), c_array(types.uint8, 1)
    by_token = c_array(real, 2)
    for kind in ("fp64", "fp32", "bf16"):
        signature = (
            c_array(WORDS[kind], 3), matrix, floats, floats, i64, matrix, c_array(types.uint8, 3),
            by_token, c_array(types.uint8, 3), by_token, i64,
        )  # fmt: skip
        yield f"encode[{kind}]", make_encode(kind), signature
        signature = (c_array(WORDS[kind], 2), matrix, real, by_token)
        yield f"turn[{kind}]", make_turn(kind), signature
    for bits, num_rows, columns in ((1, 1, 1), (3, 4, 1), (4, 8, 1), (8, 8, 2), (16, 1, 3)):
        signature = (packed, i64, i64, by_token, i64, floats, matrix, matrix)
        yield f"decode[{bits} bits]", make_decode(bits), signature
        keys = (
            by_token, by_token, floats, packed, i64, by_token, packed, i64, by_token,
        )  # fmt: skip
        name = f"[{bits} bits, {num_rows} rows"
        yield f"score{name}]", make_score(bits, num_rows), (*keys, i64, i64, by_token)
        yield (
            f"attend{name}, {columns} columns]",
            make_attend(bits, num_rows, columns),
            (*keys, packed, by_token, i64, i64, matrix),
        )
    yield "finish", make_finish(), (matrix, matrix, by_token)
