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
from numkv.kernels.cuda.rows import as_it_is, needs_peak, row_store, slot_finder
from numkv.kernels.cuda.simd import LANES, STORED_ONLY, THREADS, c_array, ceil_div, jit, launch
from numkv.kernels.dispatch import implements
from numkv.kernels.operations import Operations
from numkv.kinds import kind
from numkv.rows.convert import codec
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
    V_PER_WORD = kind(V_KIND).elements_per_word
    peak, put_k = row_store(K_KIND, COMPUTE, as_it_is)
    _, put_v = row_store(V_KIND, COMPUTE, as_it_is)
    SHAPE = (ROWS, LANES)

    def kernel(
        qkv, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, angles, first_angle,
        q_out, k_pool, k_scale, v_pool, v_scale, places, start,
    ):  # fmt: skip
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
                    angle = np.int64(angles[t]) if BY_SLOT else np.int64(first_angle + t)
                if h >= num_q_heads:
                    slot = find(places, t, start, block_size)
            here = row < rows and (not rotate or (angle >= 0 and angle < cos.shape[0]))
            stored = here and slot >= 0 and slot < num_blocks * block_size
            is_qk = h < v_head  # v goes as it is
            width = dim if is_qk else dim_v
            total = F(0)
            if here:
                column = h * dim if is_qk else v_head * dim + (h - v_head) * dim_v
                for d in range(lane, width, LANES):
                    value = load(qkv[t, column + d])
                    x[at + d] = value
                    total += value * value
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
                squares[warp, lane] = peak(x, at, width, lane) if stored else np.float32(0)
                cuda.syncthreads()
            if stored:
                g = (h - num_q_heads) % num_kv_heads
                block, offset = slot // block_size, slot % block_size
                if is_qk:
                    put_k(x, at, dim, k_pool, k_scale, block, g, offset, squares, warp, lane)
                else:
                    put_v(x, at, dim_v, v_pool, v_scale, block, g, offset, squares, warp, lane)
            cuda.syncthreads()

    return kernel


@functools.cache
def _write_rows(src: str, k_kind: str, v_kind: str, compute: str, by_slot: bool) -> Any:
    return jit(make_write_rows(src, k_kind, v_kind, compute, by_slot), 6)


def _write(
    qkv, qkv_kind, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, angles,
    first_angle, q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale, places, start, by_slot,
):  # fmt: skip
    compute = q_weight.dtype
    kernel = _write_rows(qkv_kind, k_kind, v_kind, compute.name, by_slot)
    heads = q_out.shape[1] + 2 * k_pool.shape[1]
    widest = max(q_out.shape[2], v_pool.shape[3] * kind(v_kind).elements_per_word)
    launch(
        kernel, ceil_div(qkv.shape[0] * heads, ROWS), (LANES, ROWS),
        qkv, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, angles,
        first_angle, q_out, k_pool, k_scale, v_pool, v_scale, places, start,
        shared_bytes=ROWS * widest * compute.itemsize,
    )  # fmt: skip


@implements(Operations.write_rows)
def write_rows(
    qkv, qkv_kind, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, first_angle,
    q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale, block_table, start,
):  # fmt: skip
    _write(
        qkv, qkv_kind, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps,
        block_table, first_angle, q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale,
        block_table, start, False,
    )  # fmt: skip


@implements(Operations.scatter_write)
def scatter_write(
    qkv, qkv_kind, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, positions,
    q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale, slot_mapping,
):  # fmt: skip
    _write(
        qkv, qkv_kind, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps,
        positions, 0, q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale,
        slot_mapping, 0, True,
    )  # fmt: skip


@implements(Operations.small_write)
def small_write(qkv_kind, k_kind, v_kind, compute, table, by_slot):
    return None  # a launch costs more than what a small call could save


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    cases = [
        ("fp64", "fp64", "fp64", None), ("fp32", "fp32", "fp32", types.int64),
        ("fp16", "fp16", "bf16", None), ("bf16", "bf16", "fp16", types.int64),
        ("bf16", "int8", "int8", None), ("fp32", "int8", "int8", types.int32),
        ("fp16", "fp32", "int8", types.int64), ("fp64", "int8", "fp16", None),
        ("bf16", "int4", "int4", None), ("fp16", "int8", "int4", types.int64),
        ("fp64", "int4", "fp32", None), *(("bf16", kind, kind, types.int64) for kind in STORED_ONLY),
    ]  # fmt: skip
    for src, k_kind, v_kind, slot in cases:
        compute = "float64" if "fp64" in (src, k_kind, v_kind) else "float32"
        real = getattr(types, compute)
        angles, places = c_array(real, 2), c_array(slot or types.int32, 1)
        signature = (
            c_array(WORDS[src], 2), angles, angles, types.boolean, types.boolean, types.boolean,
            c_array(real, 1), c_array(real, 1), types.float64, places, types.int64,
            c_array(WORDS[src], 3), c_array(WORDS[k_kind], 4), c_array(*SCALES[k_kind]),
            c_array(WORDS[v_kind], 4), c_array(*SCALES[v_kind]), places, types.int64,
        )  # fmt: skip
        name = "write_rows" if slot is None else "scatter_write"
        yield (
            f"{name}[{src} to K {k_kind}, V {v_kind}]",
            make_write_rows(src, k_kind, v_kind, compute, slot is not None),
            signature,
        )
