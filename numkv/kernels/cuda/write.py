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

from numkv.kernels.cuda.simd import LANES, THREADS, c_array, ceil_div, jit, launch
from numkv.kernels.kernel import WORDS
from numkv.rows.address import slot_of
from numkv.rows.convert import codec
from numkv.rows.rmsnorm import root_mean_square
from numkv.rows.rope import pair_of, rotate_pair

__all__ = ["write_rows"]

ROWS = THREADS // LANES  # heads that a block takes at once


def make_write_rows(SRC, K_KIND, V_KIND, COMPUTE):
    """The kernel for qkv of kind `SRC` and pools of kinds `K_KIND` and `V_KIND`, computing in `COMPUTE`."""
    F = np.float32 if COMPUTE == "float32" else np.float64
    REAL = getattr(types, COMPUTE)  # what dynamic shared memory is asked for with
    load, store_q = codec(SRC, COMPUTE)
    _, store_k = codec(K_KIND, COMPUTE)
    _, store_v = codec(V_KIND, COMPUTE)
    SHAPE = (ROWS, LANES)

    def kernel(
        qkv, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, first_angle,
        q_out, k_pool, v_pool, block_table, start,
    ):  # fmt: skip
        num_q_heads, dim = q_out.shape[1], q_out.shape[2]
        num_blocks, num_kv_heads = k_pool.shape[0], k_pool.shape[1]
        block_size = np.int64(k_pool.shape[2])
        num_heads = num_q_heads + 2 * num_kv_heads
        rows = qkv.shape[0] * num_heads
        lane, mine = cuda.threadIdx.x, cuda.threadIdx.y
        x = cuda.shared.array(0, REAL)  # a row for each head that the block takes
        at = mine * dim
        squares = cuda.shared.array(SHAPE, F)
        # All threads go round equally often, as they wait for each other inside.
        for first in range(
            np.int64(cuda.blockIdx.x) * ROWS, rows, np.int64(cuda.gridDim.x) * ROWS
        ):  # fmt: skip
            row = first + mine
            t, h = row // num_heads, row % num_heads
            here = row < rows
            turned = h < num_q_heads + num_kv_heads  # q and k; v goes as it is
            total = F(0)
            if here:
                for d in range(lane, dim, LANES):
                    value = load(qkv[t, h * dim + d])
                    x[at + d] = value
                    total += value * value
            squares[mine, lane] = total
            cuda.syncthreads()
            if here and turned:
                root = F(1)
                if normalise:
                    total = F(0)
                    for i in range(LANES):
                        total += squares[mine, i]
                    root = F(root_mean_square(total, F(dim), F(eps)))
                weight = q_weight if h < num_q_heads else k_weight
                half = cos.shape[1] if rotate else 0
                for i in range(lane, half, LANES):
                    low, high = pair_of(i, half, interleaved)
                    a, b = x[at + low], x[at + high]
                    if normalise:
                        a, b = a / root * weight[low], b / root * weight[high]
                    c, s = F(cos[first_angle + t, i]), F(sin[first_angle + t, i])
                    x[at + low], x[at + high] = rotate_pair(a, b, c, s)
                if normalise:
                    for d in range(2 * half + lane, dim, LANES):
                        x[at + d] = x[at + d] / root * weight[d]
            cuda.syncthreads()
            if here and h < num_q_heads:
                for d in range(lane, dim, LANES):
                    q_out[t, h, d] = store_q(x[at + d])
            position = start + t
            if here and h >= num_q_heads and position < block_table.shape[0] * block_size:
                slot = slot_of(block_table, position, block_size)
                block, offset = slot // block_size, slot % block_size
                if block >= 0 and block < num_blocks:
                    g = (h - num_q_heads) % num_kv_heads
                    for d in range(lane, dim, LANES):
                        if turned:
                            k_pool[block, g, offset, d] = store_k(x[at + d])
                        else:
                            v_pool[block, g, offset, d] = store_v(x[at + d])
            cuda.syncthreads()

    return kernel


@functools.cache
def _write_rows(src: str, k_kind: str, v_kind: str, compute: str) -> Any:
    return jit(make_write_rows(src, k_kind, v_kind, compute), 6)


def write_rows(
    qkv, qkv_kind, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, first_angle,
    q_out, k_pool, k_kind, v_pool, v_kind, block_table, start,
):  # fmt: skip
    """Split, normalise, rotate and write one sequence's new tokens.

    Parameters
    ----------
    qkv : array (num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
        Fused projections, in the words of `qkv_kind`.
    qkv_kind : str
        Their kind.
    cos, sin : float32 or float64 array (num_positions, rotary_dim / 2)
        Tables of angles, of one dtype.
    normalise, rotate, interleaved : bool
        Whether q and k are normalised; whether they are rotated, and in which pairs.
    q_weight, k_weight : array (head_dim,)
        Norm weights in the computing dtype: float64 if any of the kinds is fp64, else float32.
    eps : float
        Added to the mean square.
    first_angle : int
        Row of `cos` and `sin` for the first token.
    q_out : array (num_tokens, num_q_heads, head_dim)
        Takes q, in the words of `qkv_kind`.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Take k and v.
    k_kind, v_kind : str
        Their kinds.
    block_table : int32 array (max_blocks,)
        The sequence's blocks.
    start : int
        Position of the first new token.
    """
    compute = q_weight.dtype
    kernel = _write_rows(qkv_kind, k_kind, v_kind, compute.name)
    heads = q_out.shape[1] + 2 * k_pool.shape[1]
    launch(
        kernel, ceil_div(qkv.shape[0] * heads, ROWS), (LANES, ROWS),
        qkv, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, first_angle,
        q_out, k_pool, v_pool, block_table, start,
        shared_bytes=ROWS * q_out.shape[2] * compute.itemsize,
    )  # fmt: skip


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels with signatures to compile them for; see `numkv.kernels.cuda.catalogue`."""
    kinds = [(kind, kind, kind) for kind in WORDS]
    kinds += [("fp32", "fp16", "bf16"), ("bf16", "fp64", "fp32"), ("fp64", "bf16", "fp16")]
    for src, k_kind, v_kind in kinds:
        compute = "float64" if "fp64" in (src, k_kind, v_kind) else "float32"
        real = getattr(types, compute)
        angles = c_array(real, 2)
        signature = (
            c_array(WORDS[src], 2), angles, angles, types.boolean, types.boolean, types.boolean,
            c_array(real, 1), c_array(real, 1), types.float64, types.int64,
            c_array(WORDS[src], 3), c_array(WORDS[k_kind], 4), c_array(WORDS[v_kind], 4),
            c_array(types.int32, 1), types.int64,
        )  # fmt: skip
        name = f"write_rows[{src} to K {k_kind}, V {v_kind}]"
        yield name, make_write_rows(src, k_kind, v_kind, compute), signature
