"""Write a fused QKV projection into a cache, on the CPU: split, RMS norm of q and k, RoPE and the write in one pass.

Row ``i`` of `qkv` is all q heads, then all k heads, then all v heads. Heads of q and k are normalised and rotated as
asked; q goes to `q_out`, k and v to the slots of positions ``start + i``.

The kernel itself can check its arguments first, as `numkv.writing.fast_path` asks. For one token the call is the cost,
and a check in Python costs more than the token.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable
from numba.np.numpy_support import from_dtype

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu import overlap
from numkv.kernels.cpu.overlap import lie_well
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import by_row, row_of, table_of
from numkv.kernels.cpu.vectors.coding import row_storer
from numkv.kernels.cpu.vectors.emitted import alone
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.operations import Checks, Operations, implements
from numkv.kinds import kind
from numkv.rows.address import slot_of
from numkv.rows.codec import elements_in
from numkv.rows.convert import codec
from numkv.rows.quantize import finite_row
from numkv.rows.rmsnorm import root_mean_square
from numkv.rows.rope import rotate_pair

# The checks of a kernel before it writes; see `Operations.small_write`.
CHECKED, LOOK, LOOK_FOR_NAN = map(int, Checks)


# Loops over a row stand alone, without branches, so that each becomes vector code.


@alone
@register_jitable(fastmath={"reassoc", "contract"})
def sum_of_squares(x):
    """In whatever order is fast; the flags hold for this function only."""
    total = x.dtype.type(0)
    for d in range(len(x)):
        total += x[d] * x[d]
    return total


@register_jitable
def convert_row(source, target, convert):
    for d in range(len(target)):
        target[d] = convert(source[d])


@register_jitable
def scale_row(x, factor, factors):
    for d in range(len(x)):
        x[d] = x[d] * factor * factors[d]


@register_jitable
def rotate_halves(low, high, c, s):
    for i in range(len(low)):
        low[i], high[i] = rotate_pair(low[i], high[i], c[i], s[i])


@register_jitable
def rotate_neighbours(x, c, s):
    for i in range(len(c)):
        x[2 * i], x[2 * i + 1] = rotate_pair(x[2 * i], x[2 * i + 1], c[i], s[i])


@register_jitable
def _one_by_one(x):
    """Return whether an array's last axis is contiguous, as far as that matters."""
    return x.shape[x.ndim - 1] <= 1 or x.strides[x.ndim - 1] == x.itemsize


@register_jitable
def _fits_pool(pool, scale, other, dim, has_scales, group_size):
    """Whether a pool of rows of `dim` elements has the blocks and heads of the `other`, and its scales their shape."""
    if not _one_by_one(pool):
        return False
    for axis in range(3):
        if pool.shape[axis] != other.shape[axis]:
            return False
        if has_scales and scale.shape[axis] != pool.shape[axis]:
            return False
    if scale.ndim == 1 and scale.shape[0] != pool.shape[1]:  # scales of heads
        return False
    if scale.ndim == 4:  # of groups
        groups = (dim + group_size - 1) // group_size
        return scale.shape[scale.ndim - 1] == groups and _one_by_one(scale)
    return True


def make_write_rows(SRC, K_KIND, V_KIND, COMPUTE, BY_SLOT):
    """The kernel for qkv of kind `SRC` and pools of kinds `K_KIND` and `V_KIND`, computing in `COMPUTE`.

    With `BY_SLOT`, slots and rows of the tables are arguments for each token. Without, a block table and the first
    token's row define them. It returns the number of tokens written, or -1 if a check has failed; then nothing was
    written. Only one thread may check.
    """
    F = np.float32 if COMPUTE == "float32" else np.float64
    load, store_q = codec(SRC, COMPUTE)
    all_finite = finite_row(SRC)
    store_k = row_storer(K_KIND, COMPUTE)
    store_v = row_storer(V_KIND, COMPUTE)
    OF_K, OF_V = kind(K_KIND), kind(V_KIND)
    elements_k, elements_v = elements_in(OF_K), elements_in(OF_V)
    K_CODES, V_CODES = OF_K.has_scales, OF_V.has_scales
    K_GROUP, V_GROUP = max(1, OF_K.group_size), max(1, OF_V.group_size)

    def kernel(
        qkv, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, angles, first_angle,
        q_out, k_pool, k_scale, v_pool, v_scale, places, start, room, look, launch, worker, workers,
    ):  # fmt: skip
        if launch != 0:
            on_threads(launch, workers)
            return np.int64(0)
        num_q_heads, num_kv_heads = np.int64(q_out.shape[1]), np.int64(k_pool.shape[1])
        num_tokens, block_size = np.int64(qkv.shape[0]), np.int64(k_pool.shape[2])
        dim, half = np.int64(q_out.shape[2]), np.int64(cos.shape[1])
        dim_v = np.int64(elements_v(v_pool.shape[3]))
        k_first = num_q_heads * dim
        v_first = k_first + num_kv_heads * dim
        if look != CHECKED:
            width = v_first + num_kv_heads * dim_v
            if qkv.shape[1] != width or q_out.shape[0] != num_tokens:
                return np.int64(-1)
            if num_kv_heads == 0 or num_q_heads % num_kv_heads != 0:
                return np.int64(-1)
            if not (_one_by_one(qkv) and _one_by_one(q_out)):
                return np.int64(-1)
            if elements_k(k_pool.shape[3]) != dim:
                return np.int64(-1)
            if not _fits_pool(k_pool, k_scale, k_pool, dim, K_CODES, K_GROUP):
                return np.int64(-1)
            if not _fits_pool(v_pool, v_scale, k_pool, dim_v, V_CODES, V_GROUP):
                return np.int64(-1)
            if normalise and (len(q_weight) != dim or len(k_weight) != dim):
                return np.int64(-1)
            arrays = (
                k_pool, v_pool, k_scale, v_scale, q_out, qkv, cos, sin, q_weight, k_weight, angles, places
            )  # fmt: skip
            own = np.int64(0 if BY_SLOT else 4)
            if not lie_well(None, (table_of(arrays), own, np.int64(5))):
                return np.int64(-1)
            num_angles = np.int64(cos.shape[0])
            if rotate:
                if sin.shape[0] != num_angles or sin.shape[1] != half or 2 * half > dim:
                    return np.int64(-1)
                if not (_one_by_one(cos) and _one_by_one(sin)):
                    return np.int64(-1)
            if BY_SLOT:
                if len(places) != num_tokens or (rotate and len(angles) != num_tokens):
                    return np.int64(-1)
                for t in range(num_tokens):
                    if places[t] < -1 or places[t] >= k_pool.shape[0] * block_size:
                        return np.int64(-1)
                    if rotate and (angles[t] < 0 or angles[t] >= num_angles):
                        return np.int64(-1)
            else:
                if num_tokens > room:
                    return np.int64(-1)
                if rotate and (first_angle < 0 or first_angle > num_angles - num_tokens):
                    return np.int64(-1)
            if look == LOOK_FOR_NAN and (K_CODES or V_CODES):
                columns = (k_first if K_CODES else v_first, width if V_CODES else v_first)
                for t in range(num_tokens):
                    if not all_finite(row_of(qkv, (np.int64(t),))[columns[0] : columns[1]]):
                        return np.int64(-1)
        whole, c, s = np.empty(max(dim, dim_v), F), np.empty(half, F), np.empty(half, F)
        x, x_v = whole[:dim], whole[:dim_v]  # a row of q or k, and one of v
        low, high = x[:half], x[half : 2 * half]
        k_scales, v_scales = by_row(k_scale), by_row(v_scale)
        # Weights may be strided.
        q_factors, k_factors = np.empty(len(q_weight), F), np.empty(len(k_weight), F)
        convert_row(q_weight, q_factors, F)
        convert_row(k_weight, k_factors, F)
        for t in range(num_tokens * worker // workers, num_tokens * (worker + 1) // workers):
            if BY_SLOT:
                slot, angle = np.int64(places[t]), np.int64(angles[t])
            else:
                slot, angle = slot_of(places, start + t, block_size), first_angle + t
            block, offset = slot // block_size, slot % block_size
            row = row_of(qkv, (np.int64(t),))
            if rotate:
                convert_row(row_of(cos, (angle,)), c, F)
                convert_row(row_of(sin, (angle,)), s, F)
            for h in range(num_q_heads + (num_kv_heads if slot >= 0 else 0)):
                convert_row(row[h * dim : (h + 1) * dim], x, load)
                if normalise:
                    root = root_mean_square(sum_of_squares(x), F(dim), F(eps))
                    factors = q_factors if h < num_q_heads else k_factors
                    scale_row(x, F(1) / F(root), factors)
                if rotate and interleaved:
                    rotate_neighbours(x, c, s)
                elif rotate:
                    rotate_halves(low, high, c, s)
                if h < num_q_heads:
                    convert_row(x, row_of(q_out, (np.int64(t), np.int64(h))), store_q)
                else:
                    g = np.int64(h - num_q_heads)
                    place = (block, g, offset)
                    store_k(x, row_of(k_pool, place), row_of(k_scales, place))
            if slot < 0:
                continue
            for g in range(num_kv_heads):
                first = v_first + g * dim_v
                convert_row(row[first : first + dim_v], x_v, load)
                place = (block, np.int64(g), offset)
                store_v(x_v, row_of(v_pool, place), row_of(v_scales, place))
        return num_tokens

    return kernel


@functools.cache
def _writer(src: str, k_kind: str, v_kind: str, compute: Any, table: Any, by_slot: bool) -> Any:
    """Return the kernel for qkv and pools of these kinds, which computes in one dtype and has tables of another.

    See `write_rows` and `scatter_write` for its arguments. It has those of both, also the ones that it does not use.
    """
    real, angle = from_dtype(compute), array(from_dtype(table), 2)
    signature = (
        array(WORDS[src], 2), angle, angle, types.boolean, types.boolean, types.boolean,
        array(real, 1), array(real, 1), types.float64, array(types.int64, 1), types.int64,
        array(WORDS[src], 3, out=True), array(WORDS[k_kind], 4, out=True),
        array(*SCALES[k_kind], out=True), array(WORDS[v_kind], 4, out=True),
        array(*SCALES[v_kind], out=True),
        array(types.int64 if by_slot else types.int32, 1), *[types.int64] * 3, *ON_THREADS,
    )  # fmt: skip
    overlap.provide()
    label = f"{'scatter_write' if by_slot else 'write_rows'}, {src} to K {k_kind}, V {v_kind}"
    args = (src, k_kind, v_kind, compute.name, by_slot)
    return build(make_write_rows, signature, args=args, label=label, emit=types.int64)


@implements(Operations.small_write)
def small_write(qkv_kind, k_kind, v_kind, compute, table, by_slot):
    return _writer(qkv_kind, k_kind, v_kind, compute, table, by_slot)


_NO_PLACES = np.empty(0, np.int64)


@implements(Operations.write_rows)
def write_rows(
    qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, first_angle,
    q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale, block_table, start, look=0,
):  # fmt: skip
    kernel = _writer(qkv_kind, k_kind, v_kind, q_weight.dtype, cos.dtype, False)
    run(
        kernel, workers_for(qkv.size),
        qkv, cos, sin, *mode, q_weight, k_weight, eps, _NO_PLACES, first_angle,
        q_out, k_pool, k_scale, v_pool, v_scale, block_table, start, 0, CHECKED,
    )  # fmt: skip


@implements(Operations.scatter_write)
def scatter_write(
    qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, positions,
    q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale, slot_mapping, look=0,
):  # fmt: skip
    kernel = _writer(qkv_kind, k_kind, v_kind, q_weight.dtype, cos.dtype, True)
    run(
        kernel, workers_for(qkv.size),
        qkv, cos, sin, *mode, q_weight, k_weight, eps, positions, 0,
        q_out, k_pool, k_scale, v_pool, v_scale, slot_mapping, 0, 0, CHECKED,
    )  # fmt: skip
