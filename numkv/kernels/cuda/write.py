"""Write a fused QKV projection into a cache, on CUDA: split, RMS norm of q and k, RoPE, and the write, in one pass.

See `numkv.kernels.cpu.write` for the layout. A warp processes one head of one token. Its row is in shared memory, where
the two elements of a rotated pair meet. A block processes several heads at once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
from numkv.kernels.cuda import late
from numkv.kernels.cuda.instructions import global_address
from numkv.kernels.cuda.launches import (
    INDICES,
    ROW_BYTES,
    THREADS,
    Kernel,
    array,
    launch,
    number_at,
    pool_types,
    whole,
)
from numkv.kernels.cuda.octets import (
    ELEMENTS,
    MAX_DIM,
    bytes_of,
    lanes_for,
    magnitude,
    octet_loader,
    octet_normaliser,
    octet_storer,
    octet_turner,
    octets_fit,
    report,
    row_finder,
    row_putter,
    rows_aligned,
)  # fmt: skip
from numkv.kernels.cuda.rows import V_SIDE, as_it_is, needs_peak, row_store, slot_finder
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div, natural
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.codec import elements_in
from numkv.rows.convert import codec
from numkv.rows.quantize import is_finite
from numkv.rows.rmsnorm import root_mean_square
from numkv.rows.rope import pair_of, rotate_pair


def make_write_octets(SRC, K_KIND, V_KIND, COMPUTE, BY_SLOT, TABLE):
    """Make the kernel of `make_write_rows` for aligned rows; see `numkv.kernels.cuda.octets`.

    `TABLE` is the dtype of the tables. A lane has two octets whose elements are the pairs of a rotation, or two of any
    other row. Items of a thread block are heads of one sort: first q, then k and v. So no warp waits for another sort.
    """
    FROM, REAL = bytes_of(SRC), np.float64 if COMPUTE == "float64" else np.float32
    SAME, LOOKS = K_KIND == V_KIND, needs_peak(K_KIND) or needs_peak(V_KIND)
    elements_v = elements_in(kind(V_KIND))
    load, store_q, find = octet_loader(SRC, COMPUTE), octet_storer(SRC), slot_finder(BY_SLOT)
    normalise_octets, turn = octet_normaliser(COMPUTE), octet_turner(COMPUTE, TABLE)
    put_k, put_v = row_putter(K_KIND, COMPUTE), row_putter(V_KIND, COMPUTE)
    k_at, v_at = row_finder(K_KIND), row_finder(V_KIND)
    K_LOOKS, V_LOOKS = needs_peak(K_KIND), needs_peak(V_KIND)

    def kernel(
        qkv, cos, sin, options, q_weight, k_weight, angles, q_out, k_pool, k_scale, v_pool, v_scale, places,
        look, found, raised,
    ):  # fmt: skip
        normalise, rotate, interleaved, eps, first_angle, start, log = options
        q_heads, dim = natural(q_out.shape[1]), natural(q_out.shape[2])
        kv_heads = natural(k_pool.shape[1])
        block_size = natural(k_pool.shape[2])
        num_slots = k_pool.shape[0] * np.int64(k_pool.shape[2])
        dim_v, num_tokens = natural(elements_v(v_pool.shape[3])), natural(qkv.shape[0])
        lanes, thread = np.int64(1) << log, np.int64(cuda.threadIdx.x)
        at_once = np.int64(THREADS) >> log
        lane, mine = thread & (lanes - 1), thread >> log
        q_items = (num_tokens * q_heads + at_once - 1) // at_once
        kv_items = (num_tokens * kv_heads + at_once - 1) // at_once
        x = cuda.local.array(ELEMENTS, REAL)
        # All threads have the same number of iterations, because those of a warp synchronise within.
        for item in range(
            np.int64(cuda.blockIdx.x), q_items + 2 * kv_items, np.int64(cuda.gridDim.x)
        ):
            is_q, is_v = item < q_items, item >= q_items + kv_items
            first = item if is_q else item - q_items - (kv_items if is_v else np.int64(0))
            heads = q_heads if is_q else kv_heads
            row = natural(first * at_once + mine)
            here = row < num_tokens * heads
            if not here:
                row = np.int64(0)
            t = row // heads
            h = row - t * heads
            width = dim_v if is_v else dim
            column = (
                (q_heads + kv_heads) * dim + h * dim_v
                if is_v
                else (h if is_q else q_heads + h) * dim
            )
            source = global_address(qkv) + t * qkv.strides[0] + column * (FROM // 8)
            angle = np.int64(0)
            if rotate:
                angle = number_at(angles, t) if BY_SLOT else np.int64(first_angle + t)
            here = here and (not rotate or (angle >= 0 and angle < cos.shape[0]))
            half_of = width >> 4
            have = here and lane < half_of
            # Lanes without octets read the first ones, missing rows are the first row. This avoids branches.
            low = lane if lane < half_of else np.int64(0)
            octets = (low, low + half_of)
            load(source + octets[0] * FROM, x, 0)
            load(source + octets[1] * FROM, x, 8)
            raw = magnitude(x) if LOOKS else np.uint32(0)
            if not is_v:
                if normalise:
                    weight = global_address(q_weight) if is_q else global_address(k_weight)
                    normalise_octets(x, octets, lane < half_of, weight, dim, eps, lanes)
                if rotate:
                    angle = angle if here else np.int64(0)
                    angles_at = (
                        global_address(cos) + angle * cos.strides[0], global_address(sin) + angle * sin.strides[0],
                    )  # fmt: skip
                    turn(x, octets, angles_at, np.int64(cos.shape[1]), interleaved, REAL(1))
            if is_q:
                if have:
                    to = global_address(q_out) + t * q_out.strides[0] + h * q_out.strides[1]
                    store_q(x, 0, to + octets[0] * FROM, np.float32(1))
                    store_q(x, 8, to + octets[1] * FROM, np.float32(1))
                continue
            slot = find(places, t, start, block_size)
            have = have and slot >= 0 and slot < num_slots
            block = natural(slot) // block_size
            place = (block, h, natural(slot) - block * block_size)
            largest = magnitude(x) if LOOKS else np.uint32(0)
            if look > 0 and raw >= np.uint32(0x7F800000):
                largest = np.uint32(0x7F800000)
            both = (have, have)
            if is_v:
                to = v_at(v_pool, v_scale, place)
            else:
                to = k_at(k_pool, k_scale, place)
            if SAME or not is_v:
                put_k(x, octets, both, lanes, to, largest, look)
            else:
                put_v(x, octets, both, lanes, to, largest, look)
            if V_LOOKS if is_v else K_LOOKS:
                if look > 0 and have and raw >= np.uint32(0x7F800000):
                    load(source + octets[0] * FROM, x, 0)
                    load(source + octets[1] * FROM, x, 8)
                    side = np.int64(V_SIDE) if is_v else np.int64(0)
                    report(x, octets, look + side + t * qkv.shape[1] + column, t, found, raised)

    return kernel


def make_write_rows(SRC, K_KIND, V_KIND, COMPUTE, BY_SLOT):
    """Make the kernel for qkv of kind `SRC` and pools of kinds `K_KIND` and `V_KIND`, computing in `COMPUTE`.

    With `BY_SLOT`, each token has its own slot and row of the tables. Otherwise they follow from a block table and the
    first token's. A token whose row lies outside the tables is skipped entirely.
    """
    F = np.float32 if COMPUTE == "float32" else np.float64
    REAL = getattr(types, COMPUTE)  # element type of dynamic shared memory
    load, store_q = codec(SRC, COMPUTE)
    find = slot_finder(BY_SLOT)
    NEEDS_PEAK = needs_peak(K_KIND) or needs_peak(V_KIND)
    K_LOOKS, V_LOOKS = needs_peak(K_KIND), needs_peak(V_KIND)
    elements_v = elements_in(kind(V_KIND))
    peak, put_k = row_store(K_KIND, COMPUTE, as_it_is)
    _, put_v = row_store(V_KIND, COMPUTE, as_it_is)
    SHAPE = (ROWS, LANES)

    def kernel(
        qkv, cos, sin, options, q_weight, k_weight, angles, q_out, k_pool, k_scale, v_pool, v_scale, places,
        look, found, raised,
    ):  # fmt: skip
        normalise, rotate, interleaved, eps, first_angle, start, _ = options
        num_q_heads, dim = q_out.shape[1], q_out.shape[2]
        num_blocks, num_kv_heads = k_pool.shape[0], k_pool.shape[1]
        block_size = np.int64(k_pool.shape[2])
        num_heads = num_q_heads + 2 * num_kv_heads
        rows = qkv.shape[0] * num_heads
        dim_v = elements_v(v_pool.shape[3])
        v_head = num_q_heads + num_kv_heads
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        x = cuda.shared.array(0, REAL)  # a row for each head of the block
        at = warp * max(dim, dim_v)
        squares = cuda.shared.array(SHAPE, F)
        # All threads have the same number of iterations, because they synchronise within.
        at_once = np.int64(cuda.blockDim.y)
        for first in range(
            np.int64(cuda.blockIdx.x) * at_once, rows, np.int64(cuda.gridDim.x) * at_once
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
            is_qk = h < v_head  # v is stored unchanged
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
def _write_rows(
    src: str, k_kind: str, v_kind: str, compute: str, by_slot: bool, table: str, octets: bool = False
) -> Any:  # fmt: skip
    real, i64, flag = getattr(types, compute), types.int64, types.boolean
    angles = array(getattr(types, table), 2)
    signature = (
        array(WORDS[src], 2), angles, angles, types.Tuple((flag, flag, flag, types.float64, i64, i64, i64)),
        array(real, 1), array(real, 1), INDICES, array(WORDS[src], 3), *pool_types(k_kind),
        *pool_types(v_kind), INDICES, i64, array(i64, 1), array(i64, 1),
    )  # fmt: skip
    key = (src, k_kind, v_kind, compute, by_slot)
    if octets:
        return Kernel(make_write_octets, (*key, table), signature, 4 if compute == "float32" else 2)
    # With fewer registers, groups of INT4 would spill.
    of_groups = 3 if compute == "float32" else 2
    return Kernel(make_write_rows, key, signature, of_groups if "int4" in (k_kind, v_kind) else 6)


def _by_octets(qkv, qkv_kind, cos, sin, mode, weights, q_out, pools) -> bool:
    """Return whether the octet kernel supports these rows."""
    dim, (_, rotate, interleaved) = q_out.shape[2], mode
    if rotate:
        half = cos.shape[1]
        if not (cos.shape[0] and (half % 4 == 0 if interleaved else 2 * half == dim)):
            return False
    for pool, of in pools:
        width = kind(of).elements_of(pool.shape[3])
        if (
            width % (64 if kind(of).is_packed else 16)
            or width > MAX_DIM
            or not octets_fit(pool, of, width)
        ):
            return False
    if dim % 16 or dim > MAX_DIM or not octets_fit(q_out, qkv_kind, dim):
        return False
    tables = (cos, sin) if rotate else ()
    return all(rows_aligned(x) for x in (qkv, *tables, *weights))


def _write(
    qkv, qkv_kind, cos, sin, options, q_weight, k_weight, angles, q_out, k_pool, k_kind, k_scale, v_pool,
    v_kind, v_scale, places, look, by_slot,
):  # fmt: skip
    compute = q_weight.dtype
    tokens, heads, kv_heads = qkv.shape[0], q_out.shape[1], k_pool.shape[1]
    kinds = qkv_kind, k_kind, v_kind, compute.name, by_slot, cos.dtype.name
    widest = max(q_out.shape[2], kind(v_kind).elements_of(v_pool.shape[3]))
    rest = (
        q_weight,
        k_weight,
        angles,
        q_out,
        k_pool,
        k_scale,
        v_pool,
        v_scale,
        places,
        look,
        *late.flags(look),
    )
    pools = (k_pool, k_kind), (v_pool, v_kind)
    if _by_octets(qkv, qkv_kind, cos, sin, options[:3], (q_weight, k_weight), q_out, pools):
        lanes = lanes_for(widest // 8)
        at_once = THREADS >> lanes
        items = ceil_div(tokens * heads, at_once) + 2 * ceil_div(tokens * kv_heads, at_once)
        launch(_write_rows(*kinds, True), items, THREADS, qkv, cos, sin, (*options, lanes), *rest)
        return
    row_bytes = widest * compute.itemsize
    if row_bytes > ROW_BYTES:
        raise NotSupported(
            f"`qkv`: expected heads of at most {ROW_BYTES // compute.itemsize} elements on CUDA, whose rows lie in "
            f"shared memory while they are rotated, got {widest}; rotate the rows before, and append them"
        )
    at_once = max(1, min(ROWS, ROW_BYTES // row_bytes))
    launch(
        _write_rows(*kinds), ceil_div(tokens * (heads + 2 * kv_heads), at_once), (LANES, at_once), qkv, cos, sin,
        (*options, 0), *rest, shared_bytes=at_once * row_bytes,
    )  # fmt: skip


def _options(mode, eps, first_angle, start):
    """Return the numbers as the kernel expects them."""
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
