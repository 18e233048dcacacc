"""Vectors as codes of a few bits, on the CPU: encode, decode, scores and attention on the codes.

A vector x of norm n is rotated by its head's matrix, ``z = R x / n``. Each coordinate of z is replaced by the nearest
level of a codebook that fits such coordinates (`numkv.compression.codebook`), which gives c. The numbers of these
levels and one scale are stored::

    scale = n (z . c) / (c . c)        x becomes  scale R^T c

This is the multiple of c nearest to x: Zandieh et al., "TurboQuant" (arXiv:2504.19874), algorithm 1, which stores n
itself. Keys may also have a sketch of the remainder ``e = R x - scale c``. The sketch is its norm, and the signs of its
products with m directions g_i, each uniform on the sphere. Let u be the mean of ``|t|`` for a coordinate t of a random
unit vector. Then the sum over i of ``|e| sign(g_i . e) (g_i . R q) / (m u)`` has the mean ``e . R q``. Zandieh et al.,
"QJL" (arXiv:2406.03482), section 3, show it for Gaussian directions. A sign is a code of one bit, with levels -1 and 1.

Queries are rotated once. Scores are sums of levels times ``R q``, looked up in registers. Attention adds up weighted
levels and rotates the sum back at the end. No decoded row is ever written. In a long cache each head's tokens are
split, at multiples of `SPLIT` tokens from the first, and the parts are merged in order. Parts before every query's
window are left out. Query rows of one kv head are adjacent, query by query, so that they share lookups. One launch
computes several sequences (`numkv.rows.address`), each as it would be alone.
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
from numkv.kernels.cpu.attention.records import TILE_UNIT
from numkv.kernels.cpu.compress_codes import (
    CODE_LANES,
    CodeRows,
    make_accumulate_codes,
    make_qk_codes,
)
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import row_of, without_refcount
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.launch import next_item, on_threads
from numkv.kernels.operations import Codebook, Operations, implements
from numkv.kernels.plan_of_codes import NOTHING, Limits, rounds
from numkv.rows.address import BY_ITEM, BY_QUERY, WIDTH, sequence_at, slot_at
from numkv.rows.codes import LARGEST, code_at, packed_byte, refined
from numkv.rows.convert import codec
from numkv.rows.softmax import LN_2, LOG2_E, finish, power_of_2
from numkv.rows.visible import oldest_visible

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

# The levels of a code of one bit: a sign.
SIGNS = np.array([-1.0, 1.0], np.float32)
# Placeholders for a sketch of queries, and for an lse, that are not asked for.
NO_ROWS = np.empty((0, 0), np.float32)

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
    """Make the kernel that encodes rows of kind `SRC`."""
    load, _ = codec(SRC)

    def kernel(
        rows, rotation, edges, levels, span, sketch, codes, scales, signs, residuals, slots,
        counter, launch, worker, workers,
    ):  # fmt: skip
        if launch != 0:
            on_threads(launch, workers)
            return
        bits, start = span
        num_tokens, num_heads, dim = rows.shape
        projections = sketch.shape[2]
        blocks = (num_tokens + ROWS - 1) // ROWS
        x = np.empty((ROWS, dim), np.float32)
        z = np.empty((ROWS, dim), np.float32)
        products = np.empty((ROWS, projections), np.float32)
        norms = np.empty(ROWS, np.float64)
        chosen = np.empty(max(dim, projections), np.int64)
        while True:
            item = next_item(counter)
            if item >= blocks * num_heads:
                break
            h, t0 = item % num_heads, item // num_heads * ROWS
            count = min(ROWS, num_tokens - t0)
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
                t = start + t0 + r if len(slots) == 0 else slots[t0 + r]
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
                scales[h, t] = np.float32(min(norms[r] * factor, LARGEST))
                for i in range(codes.shape[2]):
                    codes[h, t, i] = packed_byte(chosen, 0, dim, bits, i)
                if projections > 0:
                    total = np.float64(0)
                    for d in range(dim):
                        rest = np.float64(z[r, d]) - factor * np.float64(levels[chosen[d]])
                        total += rest * rest
                        x[r, d] = np.float32(rest)
                    residuals[h, t] = np.float32(min(norms[r] * math.sqrt(total), LARGEST))
            if projections > 0:
                _multiply(x, count, sketch, h, products)
                for r in range(count):
                    for i in range(projections):
                        chosen[i] = np.int64(products[r, i] >= 0)
                    t = start + t0 + r if len(slots) == 0 else slots[t0 + r]
                    for i in range(signs.shape[2]):
                        signs[h, t, i] = packed_byte(chosen, 0, projections, 1, i)

    return kernel


def _on_rows(fill):
    """The loop of a kernel that multiplies rows with the matrix of their head; `fill` puts a row down."""

    @register_jitable
    def loop(source, matrix, of_head, out, counter):
        num_heads, dim, columns = matrix.shape
        blocks = (of_head + ROWS - 1) // ROWS
        x = np.empty((ROWS, dim), np.float32)
        while True:
            item = next_item(counter)
            if item >= blocks * num_heads:
                break
            h, first = item % num_heads, item // num_heads * ROWS
            count = min(ROWS, of_head - first)
            for r in range(count):
                fill(source, h, first + r, row_of(x, (np.int64(r),)))
            at = h * of_head + first
            _multiply(x, count, matrix, h, out[at : at + count, :columns])
            out[at : at + count, columns:] = np.float32(0)

    return loop


def make_decode():
    """Make the kernel that decodes codes into rows, by head."""

    @register_jitable
    def fill(source, h, t, line):
        codes, scales, begin, levels, bits = source
        row = row_of(codes, (h, np.int64(begin + t)))
        scale = scales[h, begin + t]
        for d in range(len(line)):
            line[d] = scale * levels[code_at(row, 0, bits, d)]

    multiply_rows = _on_rows(fill)

    def kernel(codes, scales, begin, levels, bits, back, out, counter, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        source = (codes, scales, begin, levels, bits)
        multiply_rows(source, back, len(out) // len(back), out, counter)

    return kernel


def make_multiply(SRC):
    """Make the kernel that multiplies q rows of kind `SRC` with the matrix of their kv head.

    They come as ``(num_queries, num_q_heads, dim)``, and leave by kv head, query and q head of the group, padded with
    zeros.
    """
    load, _ = codec(SRC)

    @register_jitable
    def fill(source, h, row, line):
        rows, group, factor = source
        found = row_of(rows, (np.int64(row // group), np.int64(h * group + row % group)))
        for d in range(len(line)):
            line[d] = factor * load(found[d])

    multiply_rows = _on_rows(fill)

    def kernel(rows, matrix, factor, out, counter, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        group = rows.shape[1] // len(matrix)
        multiply_rows((rows, group, factor), matrix, rows.shape[0] * group, out, counter)

    return kernel


def _make_scores(bits):
    """``score(q, q_at, q_step, keys, rows, s)`` of 1 or 4 query rows against codes of `bits` bits."""
    score_one, score_four = make_qk_codes(bits, 1), make_qk_codes(bits, 4)

    @inlined
    def score(q, q_at, q_step, keys, rows, s):
        if rows == 4:
            score_four(q, q_at, q_step, keys, s, 0, TILE_UNIT)
        else:
            score_one(q, q_at, q_step, keys, s, 0, TILE_UNIT)

    return score


def _make_accumulate(bits):
    """``accumulate(s, values, rows, sums, at, step, rescale)`` of 1 or 4 query rows and codes of `bits` bits."""
    add_one, add_four = make_accumulate_codes(bits, 1), make_accumulate_codes(bits, 4)

    @inlined
    def accumulate(s, values, rows, sums, at, step, rescale):
        if rows == 4:
            add_four(s, 0, TILE_UNIT, values, sums, at, step, rescale, 0)
        else:
            add_one(s, 0, TILE_UNIT, values, sums, at, step, rescale, 0)

    return accumulate


def make_attend(BITS, V_BITS):
    """Make the kernel of scores and of attention on keys' codes of `BITS` bits and values' of `V_BITS`.

    If it ``attends``, `out` gets a part for each kv head, query row and split, to be merged. Otherwise `out` gets the
    scores of one sequence.
    """
    score, score_signs, accumulate = _make_scores(BITS), _make_scores(1), _make_accumulate(V_BITS)
    soft_cap = make_soft_cap("float32")

    def kernel(
        q, q_sketch, span, plan, cap, levels, v_levels, sign_levels, k_codes, k_scales, signs,
        residuals, v_codes, v_scales, out, counter, launch, worker, workers,
    ):  # fmt: skip
        if launch != 0:
            on_threads(launch, workers)
            return
        dim, projections, attends, window_left, group, items, num_seqs, block_size = span[:SPAN]
        num_heads = len(k_codes)
        of_head = len(q) // num_heads
        step, sketch_step = q.shape[1], q_sketch.shape[1]
        width, v_width, sign_width = k_codes.shape[2], v_codes.shape[2], signs.shape[2]
        pad = (dim + CODE_LANES - 1) // CODE_LANES * CODE_LANES
        k_bytes, v_bytes = without_refcount(k_codes), without_refcount(v_codes)
        sign_bytes = without_refcount(signs)
        code_levels, v_values = without_refcount(levels), without_refcount(v_levels)
        sign_values = without_refcount(sign_levels)
        s = np.empty(4 * TILE_UNIT, np.float32)
        s_sketch = np.empty(4 * TILE_UNIT, np.float32)
        sums = np.empty(QUERY_ROWS * pad, np.float32)
        maxima = np.empty(QUERY_ROWS, np.float32)
        totals = np.empty(QUERY_ROWS, np.float32)
        rescale = np.empty(4, np.float32)
        lows = np.empty(QUERY_ROWS, np.int64)  # what each row sees
        highs = np.empty(QUERY_ROWS, np.int64)
        while True:
            item = next_item(counter)
            if item >= items * num_heads:
                break
            g, inner = item % num_heads, item // num_heads
            item0, query0, part0, table, start, length, num_queries = sequence_at(
                plan, num_seqs, span[SPAN:], BY_ITEM, inner
            )
            splits, inner = (length - start + SPLIT - 1) // SPLIT, inner - item0
            split, row0 = inner % splits, inner // splits * QUERY_ROWS
            rows = min(QUERY_ROWS, num_queries * group - row0)
            q_row0 = g * of_head + query0 * group + row0
            for r in range(rows):
                position = length - num_queries + (row0 + r) // group
                lows[r], highs[r] = oldest_visible(position, window_left), position + 1
            first = start + split * SPLIT
            last = min(first + SPLIT, length)
            if attends != 0:  # whole tiles that no row sees are left out
                last = min(last, highs[rows - 1])
                first += max(np.int64(0), lows[0] - first) // TILE_UNIT * TILE_UNIT
            sums[:] = np.float32(0)
            maxima[:] = np.float32(-np.inf)
            totals[:] = np.float32(0)
            for t in range(first, last, TILE_UNIT):
                count, token = min(TILE_UNIT, last - t), slot_at(plan, table, block_size, t)
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
                    row = q_row0 + r
                    score(q, row * step, step, keys, at_once, s)
                    if projections > 0:
                        score_signs(
                            q_sketch, row * sketch_step, sketch_step, sketches, at_once, s_sketch
                        )
                    for i in range(at_once):
                        for j in range(count):
                            s[i * TILE_UNIT + j] *= k_scales[g, token + j]
                        if projections > 0:
                            for j in range(count):
                                s[i * TILE_UNIT + j] += (
                                    s_sketch[i * TILE_UNIT + j] * residuals[g, token + j]
                                )
                    if cap > 0:
                        soft_cap(at_once, np.int64(TILE_UNIT), s, 0, cap)
                    for i in range(at_once):
                        at = i * TILE_UNIT
                        low = min(max(lows[r + i] - t, np.int64(0)), np.int64(TILE_UNIT))
                        high = max(low, min(highs[r + i] - t, count))
                        if attends != 0:
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
                            line = row_of(out, (np.int64(query), np.int64(g * group + of_group)))
                            factor = np.float32(LN_2) if cap > 0 else np.float32(1)
                            line[t : t + count] = np.float32(-np.inf)
                            for j in range(low, high):
                                line[t + j] = s[at + j] * factor
                    if attends != 0:
                        accumulate(s, values, at_once, sums, r * pad, pad, rescale)
                    r += at_once
            if attends != 0:
                for r in range(rows):
                    part = row_of(out, (g, np.int64(part0 + (row0 + r) * splits + split)))
                    for d in range(dim):
                        part[d] = sums[r * pad + d]
                    part[dim] = maxima[r]
                    part[dim + 1] = totals[r]

    return kernel


def make_finish():
    """Make the kernel that merges splits in order, and rotates the result back."""

    def kernel(parts, span, plan, back, out, lse, counter, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_heads, dim, num_seqs = len(back), out.shape[2], span[0]
        group = out.shape[1] // num_heads
        of_head = len(out) * group
        blocks = (of_head + ROWS - 1) // ROWS
        z = np.empty((ROWS, dim), np.float32)
        turned = np.empty((ROWS, dim), np.float32)
        while True:
            item = next_item(counter)
            if item >= blocks * num_heads:
                break
            h, first = item % num_heads, item // num_heads * ROWS
            count = min(ROWS, of_head - first)
            z[:] = np.float32(0)
            for r in range(count):
                line, query = row_of(z, (np.int64(r),)), (first + r) // group
                _, query0, part0, _, start, length, _ = sequence_at(
                    plan, num_seqs, span[1:], BY_QUERY, query
                )
                splits = (length - start + SPLIT - 1) // SPLIT
                at = part0 + (first + r - query0 * group) * splits
                top, total = np.float32(-np.inf), np.float32(0)
                for i in range(at, at + splits):
                    top = max(top, parts[h, i, dim])
                for i in range(at, at + splits):
                    part = row_of(parts, (h, np.int64(i)))
                    weight = np.float32(power_of_2(part[dim], top))
                    total += weight * part[dim + 1]
                    for d in range(dim):
                        line[d] += weight * part[d]
                factor, found = finish(top, total, np.float32(-np.inf), np.float32(LN_2))
                for d in range(dim):
                    line[d] *= np.float32(factor)
                if len(lse) > 0:
                    lse[query, h * group + (first + r) % group] = found
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
# Numbers of a call that stand before those of its one sequence; see `make_attend`.
SPAN = 8


@functools.cache
def _encode(kind: str) -> Any:
    signature = (
        array(WORDS[kind], 3), _MATRIX, _LEVELS, _LEVELS, types.UniTuple(_i64, 2), _MATRIX, *_STORED,
        _c(_i64, 1), _COUNTER, *ON_THREADS,
    )  # fmt: skip
    label = f"encode_rows, {kind}"
    return build(make_encode, signature, args=(kind,), label=label, fastmath=_CONTRACT)


@functools.cache
def _decode() -> Any:
    signature = (
        *_STORED[:2], _i64, _LEVELS, _i64, _MATRIX, _c(_f32, 2), _COUNTER, *ON_THREADS,
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
        _c(_f32, 2), _c(_f32, 2), types.UniTuple(_i64, SPAN + WIDTH), _c(_i64, 1), _f32, _LEVELS,
        _LEVELS, _LEVELS, *_STORED, *_STORED[:2], _c(_f32, 3), _COUNTER, *ON_THREADS,
    )  # fmt: skip
    label = f"attend_codes, {bits} bits" + ("" if bits == v_bits else f" and {v_bits}")
    return build(make_attend, signature, args=(bits, v_bits), label=label)


@functools.cache
def _finish() -> Any:
    signature = (
        _c(_f32, 3), types.UniTuple(_i64, 1 + WIDTH), _c(_i64, 1), _MATRIX, _c(_f32, 3), _c(_f32, 2),
        _COUNTER, *ON_THREADS,
    )  # fmt: skip
    return build(
        make_finish, signature, args=(), label="finish of attend_codes", fastmath=_CONTRACT
    )


def _run(kernel: Any, work: int, *args: Any) -> None:
    """Run a kernel with as many threads as its multiply-adds are worth."""
    run(kernel, workers_for(work, SERIAL_WORK), *args, np.zeros(1, np.int64))


def _bits(levels: Any) -> int:
    return len(levels).bit_length() - 1


def _rotated(q: Any, q_kind: str, book: Codebook, scale: float) -> tuple[Any, Any]:
    """Queries rotated and scaled, and their products with the sketch, by kv head, in rows padded to whole vectors."""
    dim, projections = book.sketch.shape[1:]
    rows = q.shape[0] * q.shape[1]
    rotated = np.empty((rows, -(-dim // CODE_LANES) * CODE_LANES), np.float32)
    _run(_multiply_rows(q_kind), rows * dim * dim, q, book.rotation, scale, rotated)
    if not projections:
        return rotated, NO_ROWS
    sketched = np.empty((rows, -(-projections // CODE_LANES) * CODE_LANES), np.float32)
    by_head = rotated[None, :, :dim]
    work = rows * dim * projections
    _run(_multiply_rows("fp32"), work, by_head, book.sketch, 1.0, sketched)
    return rotated, sketched


@implements(Operations.encode_rows)
def encode_rows(
    rows, rows_kind, rotation, edges, levels, sketch, codes, scales, signs, residuals, start,
    slots=None,
):  # fmt: skip
    num_tokens, num_heads, dim = rows.shape
    work = num_tokens * num_heads * dim * (dim + sketch.shape[2])
    _run(
        _encode(rows_kind), work, rows, rotation, edges, levels, (_bits(levels), start), sketch, codes,
        scales, signs, residuals, NOTHING if slots is None else slots,
    )  # fmt: skip


@implements(Operations.decode_rows)
def decode_rows(codes, scales, begin, levels, back, out):
    dim = out.shape[2]
    rows = out.reshape((-1, dim))
    _run(_decode(), out.size * dim, codes, scales, begin, levels, _bits(levels), back, rows)


@implements(Operations.score_codes)
def score_codes(q, q_kind, book, stored, options, out):
    num_heads, dim, projections = book.sketch.shape
    rotated, sketched = _rotated(q, q_kind, book, options.sm_scale)
    length, rows = out.shape[2], len(rotated) // num_heads
    items = -(-length // SPLIT) * -(-rows // QUERY_ROWS)
    span = (
        dim, projections, 0, options.window_left, rows // len(q), items, 1, 0,
        0, 0, 0, stored.begin, 0, length, len(q),
    )  # fmt: skip
    _run(
        _attend(_bits(book.levels), _bits(book.v_levels)), out.size * (dim + projections), rotated,
        sketched, span, NOTHING, options.logits_soft_cap, book.levels, book.v_levels, SIGNS,
        *stored[:6], out,
    )  # fmt: skip


@implements(Operations.attend_codes)
def attend_codes(q, q_kind, book, stored, options, out, lse):
    num_heads, dim, projections = book.sketch.shape
    (num_queries, num_q_heads), sequences = q.shape[:2], stored.sequences
    group, block_size = num_q_heads // num_heads, 0 if sequences is None else sequences.block_size
    _, cap, window_left = options
    scale = options.sm_scale * (1.0 if cap else LOG2_E)
    kernel = _attend(_bits(book.levels), _bits(book.v_levels))
    limits = Limits(SPLIT, QUERY_ROWS, MOST_PARTS)
    heads = num_q_heads, group, dim
    for some in rounds(num_queries, heads, stored, window_left, limits):
        q_rows, to, of_lse = q, out, lse
        if some.end - some.first < num_queries:
            which = slice(some.first, some.end)
            q_rows, to, of_lse = q[which], out[which], lse[which]
        rotated, sketched = _rotated(q_rows, q_kind, book, scale)
        parts = np.empty((num_heads, some.parts, dim + 2), np.float32)
        span = (
            dim, projections, 1, window_left, group, some.items, some.num_seqs, block_size, *some.one,
        )  # fmt: skip
        _run(
            kernel, some.pairs * (2 * dim + projections), rotated, sketched, span, some.plan, cap,
            book.levels, book.v_levels, SIGNS, *stored[:6], parts,
        )  # fmt: skip
        _run(
            _finish(), len(rotated) * dim * dim, parts, (some.num_seqs, *some.one), some.plan,
            book.back, to, of_lse,
        )  # fmt: skip
