"""Vectors as codes of a few bits, on CUDA; see `numkv.kernels.cpu.compress` for the method."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import memory, streams, uploads
from numkv.kernels.cuda.compress.rows import ROWS, make_decode, make_encode, make_multiply
from numkv.kernels.cuda.compress.scores import (
    Q_ROWS,
    SPLIT,
    make_attend,
    make_finish,
    make_score,
)  # fmt: skip
from numkv.kernels.cuda.launches import THREADS, array, jit, launch
from numkv.kernels.cuda.simd import LANES, ceil_div
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Codebook, Operations, StoredCodes
from numkv.kernels.plan_of_codes import Limits, rounds
from numkv.rows.sequences import WIDTH

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
_NUMBERS, _I64 = array(types.int64, 1), types.int64
# Of scores: where tokens begin, how many tokens and queries there are, the window and the cap.
_SPAN = types.Tuple((*[_I64] * 4, types.float32))
# Of attention: the window, q heads of a head, items of a head, sequences, their block size, one sequence, the cap.
_SPANS = types.Tuple((*[_I64] * (5 + WIDTH), types.float32))


@functools.cache
def _encode(kind: str) -> Any:
    signature = (
        array(WORDS[kind], 3), _MATRIX, _FLOATS, _FLOATS, types.UniTuple(_I64, 2), _MATRIX,
        array(types.uint8, 3), _BY_TOKEN, array(types.uint8, 3), _BY_TOKEN, _NUMBERS,
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
        _BY_TOKEN, _BY_TOKEN, _FLOATS, _FLOATS, *_KEYS, _PACKED, _BY_TOKEN, _SPANS, _NUMBERS,
        _MATRIX,
    )  # fmt: skip
    return jit(make_attend, (bits, v_bits, num_rows, columns), signature)


@functools.cache
def _finish() -> Any:
    span = types.UniTuple(_I64, 1 + WIDTH)
    return jit(make_finish, (), (_MATRIX, span, _NUMBERS, _MATRIX, _MATRIX, _BY_TOKEN))


def _bits(levels: Any) -> int:
    return int(levels.size).bit_length() - 1


def _nothing() -> Any:
    """The plan of one sequence, and the slots of tokens that go one behind the other."""
    return memory.empty((0,), np.int64)


def _on_device(plan: Any) -> Any:
    """A plan, as kernels take it."""
    if not plan.size:
        return _nothing()
    if SIMULATED:
        return cuda.to_device(plan)
    streams.spoil()
    return uploads.upload(plan)


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
    scale = options.sm_scale * (1.0 if options.logits_soft_cap else LOG2_E)
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
