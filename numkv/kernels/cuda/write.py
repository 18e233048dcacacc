"""Write a fused QKV projection into a cache, on CUDA: split, RMS norm of q and k, RoPE, and the write, in one pass.

See `numkv.kernels.cpu.write` for the layout. A warp takes one head of one token and keeps its row in shared memory,
where the two elements of a rotated pair meet; a block takes several heads at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cuda import late
from numkv.kernels.cuda.launches import INDICES, array, jit, launch, number_at, whole
from numkv.kernels.cuda.rows import V_SIDE, as_it_is, needs_peak, row_store, slot_finder
from numkv.kernels.cuda.simd import LANES, STORED_ONLY, THREADS, ceil_div
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.quantize import is_finite
from numkv.rows.rmsnorm import root_mean_square
from numkv.rows.rope import pair_of, rotate_pair

__all__ = ["scatter_write", "small_write", "write_rows"]

ROWS = THREADS // LANES  # heads that a block takes at once


def make_write_rows(SRC, K_KIND, V_KIND, COMPUTE, BY_SLOT):
    """The kernel for qkv of kind `SRC` and pools of kinds `K_KIND` and `V_KIND`, computing in `COMPUTE`.

    With `BY_SLOT`, slots and rows of the tables are given token by token; without, by a block table and the first
    token's. A token whose row lies outside the tables is left out altogether.
    """
    F = np.float32 if COMPUTE == "float32" else np.float64
    REAL = getattr(types, COMPUTE)  # what dynamic shared memory is asked for with
    load, store_q = codec(SRC, COMPUTE)
    find = slot_finder(BY_SLOT)
    NEEDS_PEAK = needs_peak(K_KIND) or needs_peak(V_KIND)
    K_LOOKS, V_LOOKS = needs_peak(K_KIND), needs_peak(V_KIND)
    V_PER_WORD = kind(V_KIND).elements_per_word
    peak, put_k = row_store(K_KIND, COMPUTE, as_it_is)
    _, put_v = row_store(V_KIND, COMPUTE, as_it_is)
    SHAPE = (ROWS, LANES)

    def kernel(
        qkv, cos, sin, options, q_weight, k_weight, angles, q_out, k_pool, k_scale, v_pool, v_scale, places,
        look, found, raised,
    ):  # fmt: skip
        normalise, rotate, interleaved, eps, first_angle, start = options
        num_q_heads, dim = q_out.shape[1], q_out.shape[2]
        num_blocks, num_kv_heads = k_pool.shape[0], k_pool.shape[1]
        block_size = np.int64(k_pool.shape[2])
        num_heads = num_q_heads + 2 * num_kv_heads
        rows = qkv.shape[0] * num_heads
        dim_v = v_pool.shape[3] * V_PER_WORD
        v_head = num_q_heads + num_kv_heads
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        x = cuda.shared.array(0, REAL)  # a row for each head that the block takes
        at = warp * max(dim, dim_v)
        squares = cuda.shared.array(SHAPE, F)
        # All threads go round equally often, as they wait for each other inside.
        for first in range(
            np.int64(cuda.blockIdx.x) * ROWS, rows, np.int64(cuda.gridDim.x) * ROWS
        ):  # fmt: skip
            row = first + warp
            t, h = row // num_heads, row % num_heads
            angle, slot = np.int64(0), np.int64(-1)
            if row < rows:
                if rotate:
                    angle = number_at(angles, t) if BY_SLOT else np.int64(first_angle + t)
                if h >= num_q_heads:
                    slot = find(places, t, start, block_size)
            here = row < rows and (not rotate or (angle >= 0 and angle < cos.shape[0]))
            stored = here and slot >= 0 and slot < num_blocks * block_size
            is_qk = h < v_head  # v goes as it is
            width = dim if is_qk else dim_v
            total, first_bad = F(0), np.int64(-1)
            if here:
                column = h * dim if is_qk else v_head * dim + (h - v_head) * dim_v
                for d in range(lane, width, LANES):
                    value = load(qkv[t, column + d])
                    x[at + d] = value
                    total += value * value
                    if NEEDS_PEAK and first_bad < 0 and not is_finite(value):
                        first_bad = np.int64(column + d)
            squares[warp, lane] = total
            cuda.syncthreads()
            if here and is_qk:
                root = F(1)
                if normalise:
                    total = F(0)
                    for i in range(LANES):
                        total += squares[warp, i]
                    root = F(root_mean_square(total, F(dim), F(eps)))
                weight = q_weight if h < num_q_heads else k_weight
                half = cos.shape[1] if rotate else 0
                for i in range(lane, half, LANES):
                    low, high = pair_of(i, half, interleaved)
                    a, b = x[at + low], x[at + high]
                    if normalise:
                        a, b = a / root * weight[low], b / root * weight[high]
                    c, s = F(cos[angle, i]), F(sin[angle, i])
                    x[at + low], x[at + high] = rotate_pair(a, b, c, s)
                if normalise:
                    for d in range(2 * half + lane, dim, LANES):
                        x[at + d] = x[at + d] / root * weight[d]
            cuda.syncthreads()
            if here and h < num_q_heads:
                for d in range(lane, dim, LANES):
                    q_out[t, h, d] = store_q(x[at + d])
            if NEEDS_PEAK:
                largest = peak(x, at, width, lane) if stored else np.float32(0)
                if stored and look > 0 and first_bad >= 0 and (K_LOOKS if is_qk else V_LOOKS):
                    largest = np.float32(np.inf)
                    side = np.int64(0) if is_qk else np.int64(V_SIDE)
                    word = t & (found.shape[0] - 1)
                    cuda.atomic.min(found, word, look + side + t * qkv.shape[1] + first_bad)
                    cuda.threadfence_system()
                    raised[0] = 1
                squares[warp, lane] = largest
                cuda.syncthreads()
            if stored:
                g = (h - num_q_heads) % num_kv_heads
                block, offset = slot // block_size, slot % block_size
                if is_qk:
                    put_k(x, at, dim, k_pool, k_scale, block, g, offset, squares, warp, lane, look)
                else:
                    put_v(
                        x, at, dim_v, v_pool, v_scale, block, g, offset, squares, warp, lane, look
                    )  # fmt: skip
            cuda.syncthreads()

    return kernel


@functools.cache
def _write_rows(src: str, k_kind: str, v_kind: str, compute: str, by_slot: bool, table: str) -> Any:
    real, i64, flag = getattr(types, compute), types.int64, types.boolean
    angles = array(getattr(types, table), 2)
    signature = (
        array(WORDS[src], 2), angles, angles, types.Tuple((flag, flag, flag, types.float64, i64, i64)),
        array(real, 1), array(real, 1), INDICES, array(WORDS[src], 3), array(WORDS[k_kind], 4),
        array(*SCALES[k_kind]), array(WORDS[v_kind], 4), array(*SCALES[v_kind]), INDICES, i64, array(i64, 1),
        array(i64, 1),
    )  # fmt: skip
    return jit(make_write_rows, (src, k_kind, v_kind, compute, by_slot), signature, 6)


def _write(
    qkv, qkv_kind, cos, sin, options, q_weight, k_weight, angles, q_out, k_pool, k_kind, k_scale, v_pool,
    v_kind, v_scale, places, look, by_slot,
):  # fmt: skip
    compute = q_weight.dtype
    kernel = _write_rows(qkv_kind, k_kind, v_kind, compute.name, by_slot, cos.dtype.name)
    heads = q_out.shape[1] + 2 * k_pool.shape[1]
    widest = max(q_out.shape[2], v_pool.shape[3] * kind(v_kind).elements_per_word)
    launch(
        kernel, ceil_div(qkv.shape[0] * heads, ROWS), (LANES, ROWS),
        qkv, cos, sin, options, q_weight, k_weight, angles, q_out, k_pool, k_scale, v_pool, v_scale, places,
        look, *late.flags(look),
        shared_bytes=ROWS * widest * compute.itemsize,
    )  # fmt: skip


def _options(mode, eps, first_angle, start):
    """Numbers as the kernel takes them."""
    return (*map(bool, mode), float(eps), *map(whole, (first_angle, start)))


@implements(Operations.write_rows)
def write_rows(
    qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, first_angle, q_out, k_pool, k_kind, k_scale,
    v_pool, v_kind, v_scale, block_table, start, look=0,
):  # fmt: skip
    _write(
        qkv, qkv_kind, cos, sin, _options(mode, eps, first_angle, start), q_weight, k_weight, block_table,
        q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale, block_table, look, False,
    )  # fmt: skip


@implements(Operations.scatter_write)
def scatter_write(
    qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, positions, q_out, k_pool, k_kind, k_scale,
    v_pool, v_kind, v_scale, slot_mapping, look=0,
):  # fmt: skip
    _write(
        qkv, qkv_kind, cos, sin, _options(mode, eps, 0, 0), q_weight, k_weight, positions, q_out, k_pool,
        k_kind, k_scale, v_pool, v_kind, v_scale, slot_mapping, look, True,
    )  # fmt: skip


@implements(Operations.small_write)
def small_write(qkv_kind, k_kind, v_kind, compute, table, by_slot):
    return None  # a launch costs more than what a small call could save


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    cases = [
        ("fp64", "fp64", "fp64", False), ("fp32", "fp32", "fp32", True), ("fp16", "fp16", "bf16", False),
        ("bf16", "bf16", "fp16", True), ("bf16", "int8", "int8", False), ("fp32", "int8", "int8", True),
        ("fp16", "fp32", "int8", True), ("fp64", "int8", "fp16", False), ("bf16", "int4", "int4", False),
        ("fp16", "int8", "int4", True), ("fp64", "int4", "fp32", False),
        *(("bf16", kind, kind, True) for kind in STORED_ONLY),
    ]  # fmt: skip
    for src, k_kind, v_kind, by_slot in cases:
        compute = "float64" if "fp64" in (src, k_kind, v_kind) else "float32"
        name = "scatter_write" if by_slot else "write_rows"
        kernel = _write_rows(src, k_kind, v_kind, compute, by_slot, compute)
        yield f"{name}[{src} to K {k_kind}, V {v_kind}]", *kernel.described
