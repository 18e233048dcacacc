"""Vectors as codes of a few bits, on CUDA; see `numkv.kernels.cpu.compress` for the method."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import types

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import memory
from numkv.kernels.cuda.compress.rows import ROWS, make_decode, make_encode, make_multiply
from numkv.kernels.cuda.compress.scores import (
    Q_ROWS,
    SPLIT,
    make_attend,
    make_finish,
    make_score,
)  # fmt: skip
from numkv.kernels.cuda.launches import array, jit, launch
from numkv.kernels.cuda.simd import LANES, THREADS, ceil_div
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.kernels.operations_of_codes import Codebook, CodesOptions, StoredCodes
from numkv.rows.visible import oldest_visible

__all__ = ["attend_codes", "decode_rows", "encode_rows", "score_codes"]

# Numbers that a call of attention may keep of its splits; of more queries than that, some come after the others.
MOST_PARTS = 1 << 25

# Shared memory that a block has without asking, and what of it q rows may take.
SHARED_BYTES = 48 * 1024
Q_BYTES = 16 * 1024

LOG2_E = math.log2(math.e)

# Types of arguments.
_MATRIX, _BY_TOKEN, _FLOATS = (array(types.float32, ndim) for ndim in (3, 2, 1))
_PACKED = array(types.uint8, 1)
_KEYS = (_PACKED, _BY_TOKEN, _PACKED, _BY_TOKEN)
# Where tokens begin, where splits do, how many tokens and queries there are, the window and the cap.
_SPAN = types.Tuple((*[types.int64] * 5, types.float32))


@functools.cache
def _encode(kind: str) -> Any:
    signature = (
        array(WORDS[kind], 3), _MATRIX, _FLOATS, _FLOATS, types.int64, _MATRIX, array(types.uint8, 3),
        _BY_TOKEN, array(types.uint8, 3), _BY_TOKEN, types.int64,
    )  # fmt: skip
    return jit(make_encode, (kind,), signature)


@functools.cache
def _decode(bits: int) -> Any:
    i64 = types.int64
    signature = (_PACKED, i64, i64, _BY_TOKEN, i64, _FLOATS, _MATRIX, _MATRIX)
    return jit(make_decode, (bits,), signature)


@functools.cache
def _multiply(kind: str) -> Any:
    return jit(make_multiply, (kind,), (array(WORDS[kind], 3), _MATRIX, types.float32, _BY_TOKEN))


@functools.cache
def _score(bits: int, num_rows: int) -> Any:
    signature = (_BY_TOKEN, _BY_TOKEN, _FLOATS, *_KEYS, _SPAN, _MATRIX)
    return jit(make_score, (bits, num_rows), signature)


@functools.cache
def _attend(bits: int, v_bits: int, num_rows: int, columns: int) -> Any:
    signature = (
        _BY_TOKEN, _BY_TOKEN, _FLOATS, _FLOATS, *_KEYS, _PACKED, _BY_TOKEN, _SPAN, _MATRIX,
    )  # fmt: skip
    return jit(make_attend, (bits, v_bits, num_rows, columns), signature)


@functools.cache
def _finish() -> Any:
    return jit(make_finish, (), (_MATRIX, _MATRIX, _MATRIX, _BY_TOKEN))


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


def _rotated(q: Any, q_kind: str, book: Codebook, scale: float) -> tuple[Any, Any]:
    """Queries rotated and scaled, and their products with the sketch, by kv head."""
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
    """Keys and values as kernels take them."""
    codes, scales, signs, residuals, v_codes, v_scales = stored[:6]
    return _flat(codes), scales, _flat(signs), residuals, _flat(v_codes), v_scales


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
def score_codes(q, q_kind, book, stored, options, out):
    num_heads, dim, projections = book.sketch.shape
    rotated, sketched = _rotated(q, q_kind, book, options.sm_scale)
    of_head, row_bytes = rotated.shape[0] // num_heads, 4 * (dim + projections)
    num_rows, length = _rows_at_once(of_head, row_bytes), stored.end - stored.begin
    blocks = ceil_div(length, THREADS) * ceil_div(of_head, num_rows) * num_heads
    launch(
        _score(_bits(book.levels), num_rows), blocks, THREADS, rotated, sketched, book.levels,
        *_packed(stored)[:4], _span(stored, 0, q.shape[0], options), out,
        shared_bytes=num_rows * row_bytes,
    )  # fmt: skip


def _span(stored: StoredCodes, start: int, num_queries: int, options: CodesOptions) -> Any:
    """The numbers of a call."""
    length, cap = stored.end - stored.begin, options.logits_soft_cap
    return stored.begin, start, length, num_queries, options.window_left, np.float32(cap)


@implements(Operations.attend_codes)
def attend_codes(q, q_kind, book, stored, options, out, lse):
    num_queries, num_q_heads, dim = q.shape
    of_query = num_q_heads * (dim + 2) * ceil_div(stored.end - stored.begin, SPLIT)
    most = max(1, MOST_PARTS // of_query)
    if num_queries <= most:
        _attend_few(q, q_kind, book, stored, options, out, lse)
        return
    for first in range(0, num_queries, most):
        rows = slice(first, min(first + most, num_queries))
        end = stored.end - num_queries + rows.stop
        some = lse[rows] if lse.size else lse
        _attend_few(q[rows], q_kind, book, stored._replace(end=end), options, out[rows], some)


def _attend_few(
    q: Any, q_kind: str, book: Codebook, stored: StoredCodes, options: CodesOptions, out: Any, lse: Any
) -> None:  # fmt: skip
    num_heads, dim, projections = book.sketch.shape
    scale = options.sm_scale * (1.0 if options.logits_soft_cap else LOG2_E)
    rotated, sketched = _rotated(q, q_kind, book, scale)
    of_head, row_bytes = rotated.shape[0] // num_heads, 4 * (dim + projections)
    num_rows, length = _rows_at_once(of_head, row_bytes), stored.end - stored.begin
    start = int(oldest_visible(length - q.shape[0], options.window_left)) // SPLIT * SPLIT
    splits = ceil_div(length - start, SPLIT)
    parts = memory.empty((rotated.shape[0], splits, dim + 2), np.float32)
    launch(
        _attend(_bits(book.levels), _bits(book.v_levels), num_rows, ceil_div(dim, THREADS)),
        splits * ceil_div(of_head, num_rows) * num_heads, THREADS,
        rotated, sketched, book.levels, book.v_levels, *_packed(stored),
        _span(stored, start, q.shape[0], options), parts,
        shared_bytes=num_rows * row_bytes,
    )  # fmt: skip
    launch(
        _finish(), parts.shape[0], THREADS, parts, book.back, out, lse, shared_bytes=4 * dim
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    for kind in ("fp64", "fp32", "bf16"):
        yield f"encode[{kind}]", *_encode(kind).described
        yield f"multiply[{kind}]", *_multiply(kind).described
    for bits, num_rows, columns in ((1, 1, 1), (3, 4, 1), (4, 8, 1), (8, 8, 2), (16, 1, 3)):
        yield f"decode[{bits} bits]", *_decode(bits).described
        name = f"[{bits} bits, {num_rows} rows"
        yield f"score{name}]", *_score(bits, num_rows).described
        yield f"attend{name}, {columns} columns]", *_attend(bits, bits, num_rows, columns).described
    yield "attend[4 bits, 3 of values]", *_attend(4, 3, 8, 1).described
    yield "finish", *_finish().described
