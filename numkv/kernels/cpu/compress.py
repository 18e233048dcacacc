"""Vectors as codes of a few bits, on the CPU: encode, decode, scores and attention on the codes.

A vector x of norm n is rotated by its head's matrix, ``z = R x / n``. Each coordinate of z is replaced by the nearest
level of a codebook that fits such coordinates (`numkv.compression.codebook`), which gives c, and what is stored are the
numbers of these levels and one scale::

    scale = n (z . c) / (c . c)        x is taken for  scale R^T c

This is the multiple of c that comes nearest to x: Zandieh et al., "TurboQuant" (arXiv:2504.19874), algorithm 1, which
keeps n itself. Keys may also have a sketch of what is left over, ``e = R x - scale c``: its norm and the signs of its
products with m directions g_i, each uniform on the sphere. With u the mean of ``|t|`` for a coordinate t of a random
unit vector, the sum over i of ``|e| sign(g_i . e) (g_i . R q) / (m u)`` has the mean ``e . R q``: Zandieh et al., "QJL"
(arXiv:2406.03482), section 3, for Gaussian directions. A sign is a code of one bit, with levels -1 and 1.

Queries are rotated once. Scores are sums of levels times ``R q``, looked up in registers; attention adds weighted
levels up and rotates the sum back at the end. No decoded row is ever written. In a long cache each head's tokens are
split, at multiples of `SPLIT` tokens from the first, and the parts are merged in order; those before any query's window
are left out. Query rows of one kv head stand together, query by query, so that they share what is looked up.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import WORDS, array, build
from numkv.kernels.cpu.attention.llvm.softmax import make_soft_cap, online_softmax_row
from numkv.kernels.cpu.attention.records import KV_TILE, LN_2, LOG2_E
from numkv.kernels.cpu.compress_codes import (
    CODE_LANES,
    CodeRows,
    make_accumulate_codes,
    make_qk_codes,
)
from numkv.kernels.cpu.inline import inlined
from numkv.kernels.cpu.threads import ON_THREADS, num_threads, run
from numkv.kernels.cpu.vectors.arrays import row_of, without_refcount
from numkv.kernels.cpu.vectors.launch import next_item, on_threads
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.kernels.operations_of_codes import Codebook
from numkv.rows.codes import code_at, packed_byte, refined
from numkv.rows.convert import codec
from numkv.rows.softmax import finish, power_of_2
from numkv.rows.visible import oldest_visible

__all__ = ["attend_codes", "decode_rows", "encode_rows", "score_codes"]

# Rows that are rotated together, so that the matrix is read once for all of them.
ROWS = 8
# Query rows of a kv head that an item takes: their sums stay in L1.
QUERY_ROWS = 32
# Tokens of a split.
SPLIT = 1024
# Numbers that a call of attention may keep of its splits; of more queries than that, some come after the others.
MOST_PARTS = 1 << 22
# Multiply-adds below which one thread does it all.
SERIAL_WORK = 2_000_000

LARGEST = float(np.finfo(np.float32).max)
# The levels of a code of one bit: a sign.
SIGNS = np.array([-1.0, 1.0], np.float32)

_f32, _i64, _u8 = types.float32, types.int64, types.uint8


@register_jitable
def _multiply(x, count, matrix, head, out):
    """``out[r] = x[r] @ matrix[head]`` for the first `count` rows; each row's sums are taken in the same order."""
    out[:count] = np.float32(0)
    for k in range(matrix.shape[1]):
        line = row_of(matrix, (head, np.int64(k)))
        for r in range(count):
            factor = x[r, k]
            row = row_of(out, (np.int64(r),))
            for j in range(len(line)):
                row[j] += factor * line[j]


def make_encode(SRC):
    """The kernel that encodes rows of kind `SRC`."""
    load, _ = codec(SRC)
    BLOCK, TOP = ROWS, LARGEST

    def kernel(
        rows, rotation, edges, levels, bits, sketch, codes, scales, signs, residuals, start,
        counter, launch, worker, workers,
    ):  # fmt: skip
        if launch != 0:
            on_threads(launch, workers)
            return
        num_tokens, num_heads, dim = rows.shape
        projections = sketch.shape[2]
        blocks = (num_tokens + BLOCK - 1) // BLOCK
        x = np.empty((BLOCK, dim), np.float32)
        z = np.empty((BLOCK, dim), np.float32)
        products = np.empty((BLOCK, projections), np.float32)
        norms = np.empty(BLOCK, np.float64)
        chosen = np.empty(max(dim, projections), np.int64)
        while True:
            item = next_item(counter)
            if item >= blocks * num_heads:
                break
            h, t0 = item % num_heads, item // num_heads * BLOCK
            count = min(BLOCK, num_tokens - t0)
            for r in range(count):
                source = row_of(rows, (np.int64(t0 + r), h))
                total = np.float64(0)
                for d in range(dim):
                    total += np.float64(load(source[d])) * np.float64(load(source[d]))
                norms[r] = math.sqrt(total)
                inverse = 1 / norms[r] if total > 0 else np.float64(0)
                for d in range(dim):
                    x[r, d] = np.float32(np.float64(load(source[d])) * inverse)
            _multiply(x, count, rotation, h, z)
            for r in range(count):
                t = start + t0 + r
                dot, square = np.float64(0), np.float64(0)
                rotated = row_of(z, (np.int64(r),))
                for d in range(dim):
                    chosen[d] = 0
                for bit in range(bits - 1, -1, -1):
                    for d in range(dim):
                        chosen[d] = refined(chosen[d], rotated[d], edges, bit)
                for d in range(dim):
                    level = np.float64(levels[chosen[d]])
                    dot += np.float64(z[r, d]) * level
                    square += level * level
                factor = dot / square
                scales[h, t] = np.float32(min(norms[r] * factor, TOP))
                for i in range(codes.shape[2]):
                    codes[h, t, i] = packed_byte(chosen, 0, dim, bits, i)
                if projections > 0:
                    total = np.float64(0)
                    for d in range(dim):
                        rest = np.float64(z[r, d]) - factor * np.float64(levels[chosen[d]])
                        total += rest * rest
                        x[r, d] = np.float32(rest)
                    residuals[h, t] = np.float32(min(norms[r] * math.sqrt(total), TOP))
            if projections > 0:
                _multiply(x, count, sketch, h, products)
                for r in range(count):
                    for i in range(projections):
                        chosen[i] = np.int64(products[r, i] >= 0)
                    for i in range(signs.shape[2]):
                        byte = packed_byte(chosen, 0, projections, 1, i)
                        signs[h, start + t0 + r, i] = byte

    return kernel


def make_decode():
    """The kernel that decodes codes into rows."""
    BLOCK = ROWS

    def kernel(codes, scales, begin, levels, bits, back, out, counter, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_heads, num_tokens, dim = out.shape
        blocks = (num_tokens + BLOCK - 1) // BLOCK
        z = np.empty((BLOCK, dim), np.float32)
        while True:
            item = next_item(counter)
            if item >= blocks * num_heads:
                break
            h, t0 = item % num_heads, item // num_heads * BLOCK
            count = min(BLOCK, num_tokens - t0)
            for r in range(count):
                row = row_of(codes, (h, begin + t0 + r))
                scale = scales[h, begin + t0 + r]
                for d in range(dim):
                    z[r, d] = scale * levels[code_at(row, 0, bits, d)]
            _multiply(z, count, back, h, out[h, t0 : t0 + count])

    return kernel


def make_multiply(SRC):
    """The kernel that multiplies q rows of kind `SRC` with the matrix of their kv head.

    They come as ``(num_queries, num_q_heads, dim)``, and leave by kv head, query and q head of the group, padded with
    zeros.
    """
    load, _ = codec(SRC)
    BLOCK = ROWS

    def kernel(rows, matrix, factor, out, counter, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_heads, dim, columns = matrix.shape
        group = rows.shape[1] // num_heads
        of_head = rows.shape[0] * group
        blocks = (of_head + BLOCK - 1) // BLOCK
        x = np.empty((BLOCK, dim), np.float32)
        while True:
            item = next_item(counter)
            if item >= blocks * num_heads:
                break
            h, first = item % num_heads, item // num_heads * BLOCK
            count = min(BLOCK, of_head - first)
            for r in range(count):
                query, of_group = (first + r) // group, (first + r) % group
                source = row_of(rows, (np.int64(query), np.int64(h * group + of_group)))
                line = row_of(x, (np.int64(r),))
                for d in range(dim):
                    line[d] = factor * load(source[d])
            at = h * of_head + first
            _multiply(x, count, matrix, h, out[at : at + count, :columns])
            out[at : at + count, columns:] = np.float32(0)

    return kernel


def _make_scores(bits):
    """``score(q, q_at, q_step, keys, rows, s)`` of 1 or 4 query rows against codes of `bits` bits."""
    score_one, score_four = make_qk_codes(bits, 1), make_qk_codes(bits, 4)

    @inlined
    def score(q, q_at, q_step, keys, rows, s):
        if rows == 4:
            score_four(q, q_at, q_step, keys, s, 0, KV_TILE)
        else:
            score_one(q, q_at, q_step, keys, s, 0, KV_TILE)

    return score


def _make_accumulate(bits):
    """``accumulate(s, values, rows, sums, at, step, rescale)`` of 1 or 4 query rows and codes of `bits` bits."""
    add_one, add_four = make_accumulate_codes(bits, 1), make_accumulate_codes(bits, 4)

    @inlined
    def accumulate(s, values, rows, sums, at, step, rescale):
        if rows == 4:
            add_four(s, 0, KV_TILE, values, sums, at, step, rescale, 0)
        else:
            add_one(s, 0, KV_TILE, values, sums, at, step, rescale, 0)

    return accumulate


def make_attend(BITS, V_BITS):
    """The kernel of scores and of attention on keys' codes of `BITS` bits, values' of `V_BITS`.

    Without `parts`, scores go to `scores`; with them, there is one for each split, and what they get is to be merged.
    Tokens are counted from `begin`, the first of `length`; splits begin at `start`.
    """
    LENGTH, LANES, BLOCK, BASE_E = SPLIT, CODE_LANES, QUERY_ROWS, np.float32(LN_2)
    score, score_signs, accumulate = _make_scores(BITS), _make_scores(1), _make_accumulate(V_BITS)
    soft_cap = make_soft_cap("float32")

    def kernel(
        q, q_sketch, span, cap, levels, v_levels, sign_levels, k_codes, k_scales, signs, residuals,
        v_codes, v_scales, scores, parts, counter, launch, worker, workers,
    ):  # fmt: skip
        if launch != 0:
            on_threads(launch, workers)
            return
        dim, projections, begin, start, length, num_queries, window_left = span
        num_heads = len(k_codes)
        of_head = len(q) // num_heads
        group = of_head // num_queries
        attends = len(parts) > 0
        splits = (length - start + LENGTH - 1) // LENGTH
        blocks = (of_head + BLOCK - 1) // BLOCK
        step, sketch_step = q.shape[1], q_sketch.shape[1]
        width, v_width, sign_width = k_codes.shape[2], v_codes.shape[2], signs.shape[2]
        pad = (dim + LANES - 1) // LANES * LANES
        k_bytes, v_bytes = without_refcount(k_codes), without_refcount(v_codes)
        sign_bytes = without_refcount(signs)
        code_levels, v_values = without_refcount(levels), without_refcount(v_levels)
        sign_values = without_refcount(sign_levels)
        s = np.empty(4 * KV_TILE, np.float32)
        s_sketch = np.empty(4 * KV_TILE, np.float32)
        sums = np.empty(BLOCK * pad, np.float32)
        maxima = np.empty(BLOCK, np.float32)
        totals = np.empty(BLOCK, np.float32)
        rescale = np.empty(4, np.float32)
        lows = np.empty(BLOCK, np.int64)  # what each row sees
        highs = np.empty(BLOCK, np.int64)
        while True:
            item = next_item(counter)
            if item >= splits * blocks * num_heads:
                break
            g, inner = item % num_heads, item // num_heads
            split, row0 = inner % splits, inner // splits * BLOCK
            rows = min(BLOCK, of_head - row0)
            for r in range(rows):
                position = length - num_queries + (row0 + r) // group
                lows[r], highs[r] = oldest_visible(position, window_left), position + 1
            first = start + split * LENGTH
            last = min(first + LENGTH, length)
            if attends:  # whole tiles that no row sees are left out
                last = min(last, highs[rows - 1])
                first += max(np.int64(0), lows[0] - first) // KV_TILE * KV_TILE
            sums[:] = np.float32(0)
            maxima[:] = np.float32(-np.inf)
            totals[:] = np.float32(0)
            for t in range(first, last, KV_TILE):
                count, token = min(KV_TILE, last - t), begin + t
                keys = CodeRows(
                    k_bytes, (g * k_codes.shape[1] + token) * width, width, count, dim, code_levels
                )
                sketches = CodeRows(
                    sign_bytes, (g * signs.shape[1] + token) * sign_width, sign_width, count,
                    projections, sign_values,
                )  # fmt: skip
                values = CodeRows(
                    v_bytes, (g * v_codes.shape[1] + token) * v_width, v_width, count, dim, v_values
                )
                r = np.int64(0)
                while r < rows:
                    at_once = 4 if rows - r >= 4 else 1
                    row = g * of_head + row0 + r
                    score(q, row * step, step, keys, at_once, s)
                    if projections > 0:
                        score_signs(
                            q_sketch, row * sketch_step, sketch_step, sketches, at_once, s_sketch
                        )
                    for i in range(at_once):
                        for j in range(count):
                            s[i * KV_TILE + j] *= k_scales[g, token + j]
                        if projections > 0:
                            for j in range(count):
                                s[i * KV_TILE + j] += (
                                    s_sketch[i * KV_TILE + j] * residuals[g, token + j]
                                )
                    if cap > 0:
                        soft_cap(at_once, s, 0, cap)
                    for i in range(at_once):
                        at = i * KV_TILE
                        low = min(max(lows[r + i] - t, np.int64(0)), np.int64(KV_TILE))
                        high = max(low, min(highs[r + i] - t, count))
                        if attends:
                            maximum, shrink, total = online_softmax_row(
                                s, at, low, high, maxima[r + i]
                            )
                            maxima[r + i] = maximum
                            totals[r + i] = totals[r + i] * shrink + total
                            rescale[i] = shrink
                            if high - low == count:  # nearly all tiles
                                for j in range(count):
                                    s[at + j] *= v_scales[g, token + j]
                            else:  # the others' weights are 0, whatever their scales are
                                for j in range(low, high):
                                    s[at + j] *= v_scales[g, token + j]
                        else:
                            query, of_group = (row0 + r + i) // group, (row0 + r + i) % group
                            line = row_of(scores, (np.int64(query), np.int64(g * group + of_group)))
                            factor = BASE_E if cap > 0 else np.float32(1)
                            line[t : t + count] = np.float32(-np.inf)
                            for j in range(low, high):
                                line[t + j] = s[at + j] * factor
                    if attends:
                        accumulate(s, values, at_once, sums, r * pad, pad, rescale)
                    r += at_once
            if attends:
                for r in range(rows):
                    row = g * of_head + row0 + r
                    for d in range(dim):
                        parts[row, split, d] = sums[r * pad + d]
                    parts[row, split, dim] = maxima[r]
                    parts[row, split, dim + 1] = totals[r]

    return kernel


def make_finish():
    """The kernel that merges splits in order, and rotates the result back."""
    BLOCK, BASE_2 = ROWS, np.float32(LN_2)

    def kernel(parts, back, out, lse, counter, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_heads, splits, dim = len(back), parts.shape[1], out.shape[2]
        of_head, group = len(parts) // num_heads, out.shape[1] // num_heads
        blocks = (of_head + BLOCK - 1) // BLOCK
        z = np.empty((BLOCK, dim), np.float32)
        turned = np.empty((BLOCK, dim), np.float32)
        while True:
            item = next_item(counter)
            if item >= blocks * num_heads:
                break
            h, first = item % num_heads, item // num_heads * BLOCK
            count = min(BLOCK, of_head - first)
            z[:] = np.float32(0)
            for r in range(count):
                row, line = h * of_head + first + r, row_of(z, (np.int64(r),))
                top, total = np.float32(-np.inf), np.float32(0)
                for split in range(splits):
                    top = max(top, parts[row, split, dim])
                for split in range(splits):
                    weight = np.float32(power_of_2(parts[row, split, dim], top))
                    total += weight * parts[row, split, dim + 1]
                    part = row_of(parts, (np.int64(row), np.int64(split)))
                    for d in range(dim):
                        line[d] += weight * part[d]
                factor, found = finish(top, total, np.float32(-np.inf), BASE_2)
                for d in range(dim):
                    line[d] *= np.float32(factor)
                if len(lse) > 0:
                    query, of_group = (first + r) // group, (first + r) % group
                    lse[query, h * group + of_group] = found
            _multiply(z, count, back, h, turned)
            for r in range(count):
                query, of_group = (first + r) // group, (first + r) % group
                source = row_of(turned, (np.int64(r),))
                line = row_of(out, (np.int64(query), np.int64(h * group + of_group)))
                for d in range(dim):
                    line[d] = source[d]

    return kernel


def _c(dtype: Any, ndim: int) -> Any:
    return types.Array(dtype, ndim, "C")


# Codes, scales, signs and residual norms.
_STORED = (_c(_u8, 3), _c(_f32, 2), _c(_u8, 3), _c(_f32, 2))
_MATRIX, _LEVELS, _COUNTER = _c(_f32, 3), _c(_f32, 1), _c(_i64, 1)
# What sums may be contracted to: an fma. Their order stays.
_CONTRACT = {"contract"}


@functools.cache
def _encode(kind: str) -> Any:
    signature = (
        array(WORDS[kind], 3), _MATRIX, _LEVELS, _LEVELS, _i64, _MATRIX, *_STORED, _i64, _COUNTER,
        *ON_THREADS,
    )  # fmt: skip
    label = f"encode_rows, {kind}"
    return build(make_encode, signature, args=(kind,), label=label, fastmath=_CONTRACT)


@functools.cache
def _decode() -> Any:
    signature = (
        *_STORED[:2], _i64, _LEVELS, _i64, _MATRIX, _c(_f32, 3), _COUNTER, *ON_THREADS,
    )  # fmt: skip
    return build(make_decode, signature, args=(), label="decode_rows", fastmath=_CONTRACT
    )  # fmt: skip


@functools.cache
def _multiply_rows(kind: str) -> Any:
    signature = (array(WORDS[kind], 3), _MATRIX, _f32, _c(_f32, 2), _COUNTER, *ON_THREADS)
    return build(
        make_multiply,
        signature,
        args=(kind,),
        label=f"rotation of queries, {kind}",
        fastmath=_CONTRACT,
    )


@functools.cache
def _attend(bits: int, v_bits: int) -> Any:
    signature = (
        _c(_f32, 2), _c(_f32, 2), types.UniTuple(_i64, 7), _f32, _LEVELS, _LEVELS, _LEVELS, *_STORED,
        *_STORED[:2], _c(_f32, 3), _c(_f32, 3), _COUNTER, *ON_THREADS,
    )  # fmt: skip
    label = f"attend_codes, {bits} bits" + ("" if bits == v_bits else f" and {v_bits}")
    return build(make_attend, signature, args=(bits, v_bits), label=label)


@functools.cache
def _finish() -> Any:
    signature = (_c(_f32, 3), _MATRIX, _c(_f32, 3), _c(_f32, 2), _COUNTER, *ON_THREADS)
    return build(
        make_finish, signature, args=(), label="finish of attend_codes", fastmath=_CONTRACT
    )


def _run(kernel: Any, work: int, *args: Any) -> None:
    """Run a kernel with as many threads as its multiply-adds are worth."""
    workers = 1 if work < SERIAL_WORK else num_threads()
    run(kernel, workers, *args, np.zeros(1, np.int64))


def _bits(levels: Any) -> int:
    return len(levels).bit_length() - 1


def _rotated(q: Any, q_kind: str, book: Codebook, scale: float) -> tuple[Any, Any]:
    """Queries rotated and scaled, and their products with the sketch, by kv head, in rows padded to whole vectors."""
    dim, projections = book.sketch.shape[1:]
    rows = q.shape[0] * q.shape[1]

    def padded(width: int) -> Any:
        return np.empty((rows, -(-width // CODE_LANES) * CODE_LANES), np.float32)

    rotated, sketched = padded(dim), padded(projections)
    _run(_multiply_rows(q_kind), rows * dim * dim, q, book.rotation, scale, rotated)
    if projections:
        by_head = rotated[None, :, :dim]
        work = rows * dim * projections
        _run(_multiply_rows("fp32"), work, by_head, book.sketch, 1.0, sketched)
    return rotated, sketched


@implements(Operations.encode_rows)
def encode_rows(
    rows, rows_kind, rotation, edges, levels, sketch, codes, scales, signs, residuals, start
):
    num_tokens, num_heads, dim = rows.shape
    work = num_tokens * num_heads * dim * (dim + sketch.shape[2])
    _run(
        _encode(rows_kind), work, rows, rotation, edges, levels, _bits(levels), sketch, codes,
        scales, signs, residuals, start,
    )  # fmt: skip


@implements(Operations.decode_rows)
def decode_rows(codes, scales, begin, levels, back, out):
    work = out.size * out.shape[2]
    _run(_decode(), work, codes, scales, begin, levels, _bits(levels), back, out)


@implements(Operations.score_codes)
def score_codes(q, q_kind, book, stored, options, out):
    dim, projections = book.sketch.shape[1:]
    rotated, sketched = _rotated(q, q_kind, book, options.sm_scale)
    span = (dim, projections, stored.begin, 0, out.shape[2], len(q), options.window_left)
    _run(
        _attend(_bits(book.levels), _bits(book.v_levels)), out.size * (dim + projections), rotated,
        sketched, span, options.logits_soft_cap, book.levels, book.v_levels, SIGNS, *stored[:6], out,
        np.empty((0, 0, 0), np.float32),
    )  # fmt: skip


@implements(Operations.attend_codes)
def attend_codes(q, q_kind, book, stored, options, out, lse):
    dim, projections = book.sketch.shape[1:]
    (num_queries, num_q_heads), length = q.shape[:2], stored.end - stored.begin
    most = max(1, MOST_PARTS // (num_q_heads * (dim + 2) * (1 + length // SPLIT)))
    cap, window_left = options.logits_soft_cap, options.window_left
    scale = options.sm_scale * (1.0 if cap else LOG2_E)
    kernel = _attend(_bits(book.levels), _bits(book.v_levels))
    for first in range(0, num_queries, most):
        rows = slice(first, first + most)
        rotated, sketched = _rotated(q[rows], q_kind, book, scale)
        count = len(rotated) // num_q_heads
        seen = length - num_queries + first + count
        start = int(oldest_visible(seen - count, window_left)) // SPLIT * SPLIT
        parts = np.empty((len(rotated), -(-(seen - start) // SPLIT), dim + 2), np.float32)
        span = (dim, projections, stored.begin, start, seen, count, window_left)
        _run(
            kernel, len(rotated) * (seen - start) * (2 * dim + projections), rotated, sketched, span,
            cap, book.levels, book.v_levels, SIGNS, *stored[:6], np.empty((0, 0, 0), np.float32), parts,
        )  # fmt: skip
        _run(_finish(), len(rotated) * dim * dim, parts, book.back, out[rows], lse[rows])
