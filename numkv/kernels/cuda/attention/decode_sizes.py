"""How attention on tensor cores for few query rows lays out rows in shared memory, and which caches it can take."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from numba import cuda

from numkv.kernels.cuda.launches import THREADS, shared_bytes
from numkv.kernels.cuda.simd import ceil_div
from numkv.kernels.cuda.streams import SIMULATED, current
from numkv.kinds import kind

# Query rows of an item: the columns of a product.
DECODE_ROWS = 8
# Tokens that a warp takes at once: the rows of a product. So many warps of a block take a KV tile.
SLICE = 16
WARPS = max(1, THREADS // 32)
DECODE_TILE = SLICE * WARPS
# Slices of K and V that a warp has room for: one is read while another is on its way.
STAGES = 2
# What tensor cores take for a kind. Codes and 8-bit floats are exact in float16.
OPERANDS = {
    "fp16": "fp16", "bf16": "bf16", "int8": "fp16", "int4": "fp16", "fp8_e4m3": "fp16", "fp8_e5m2": "fp16",
}  # fmt: skip
# Bytes of a product's columns in shared memory: two words for each thread of a warp.
QUERY_BYTES = 32 * 8
# Bytes that are copied at once, and between rows in shared memory that must not share banks.
CHUNK, BANKS = 16, 128
# More than the kernel's static shared memory.
STATIC_BYTES = 8192
# The longest rows whose sums fit into registers.
MOST_COLUMNS = 256
# The longest rows of which three blocks can share the registers of a multiprocessor.
MOST_OF_THREE = 128
# More than that many chunks away from a pool's start, 32 bits do not say where a row is.
MOST_BYTES = CHUNK << 32


class Side(NamedTuple):
    """How rows of K, or of V, lie in shared memory: constants of a kernel."""

    kind: str
    operand: str  #: "fp16" or "bf16"
    dim: int
    bits: int  #: of a stored element
    tiles: int  #: products along a row: of 16 elements each, the last one's may be zeros
    chunks: int  #: of a stored row
    padded: int  #: chunks that are written: zeros follow where products need more
    lanes: int  #: threads of a warp that copy one row
    rows: int  #: rows that a warp copies at once
    step: int  #: bytes from a row to the next
    size: int  #: bytes of a slice
    groups: int  #: scales of a row; 0 where it has none of its own


class DecodeSizes(NamedTuple):
    """Constants of a kernel."""

    k: Side
    v: Side
    precise_q: bool  #: whether queries have a second half, of what the first one leaves
    precise_p: bool  #: whether weights have one
    words: int  #: words of scales that a thread holds
    queries: (
        int  #: where queries start in shared memory: behind slices, and what these make room for
    )
    places: int  #: where threads leave places of tokens
    shared_bytes: int
    blocks: int  #: that shall fit on a multiprocessor


def side(name: str, dim: int) -> Side:
    """The layout of rows of a kind."""
    of = kind(name)
    bits = int(8 * of.bytes_per_element)
    chunks = ceil_div(dim * bits, 8 * CHUNK)
    tiles = ceil_div(dim, 16)
    padded = ceil_div(tiles * bits, 8)
    lanes = 1 << (padded - 1).bit_length()
    step = ceil_div(padded * CHUNK, BANKS) * BANKS
    return Side(
        kind=name,
        operand=OPERANDS[name],
        dim=dim,
        bits=bits,
        tiles=tiles,
        chunks=chunks,
        padded=padded,
        lanes=lanes,
        rows=min(SLICE, 32 // lanes),
        step=step,
        size=SLICE * step,
        groups=of.scales_per_row(dim),
    )


@functools.cache
def sizes_for(q_kind: str, k_kind: str, v_kind: str, dim: int, dim_v: int) -> DecodeSizes:
    """The sizes of a kernel for kinds of q, K and V, and for head dims of K and V."""
    k, v = side(k_kind, dim), side(v_kind, dim_v)
    stages = WARPS * STAGES * (k.size + v.size)
    merged = WARPS * DECODE_ROWS * 16 * v.tiles * 4
    precise_q = q_kind == "fp32" or (q_kind == "fp16" and k.operand == "bf16")
    places = max(stages, merged) + k.tiles * (1 + precise_q) * QUERY_BYTES
    return DecodeSizes(
        k=k,
        v=v,
        # float16 has all bits of bfloat16, once moved into its range.
        precise_q=precise_q,
        # Weights in bfloat16 would be off by as much as a result that is rounded to it.
        precise_p=q_kind == "fp32" or v.operand == "bf16",
        words=max(1, *(s.groups if s.kind == "int8" else ceil_div(s.groups, 2) for s in (k, v))),
        queries=max(stages, merged),
        places=places,
        shared_bytes=places + 4 * 32 * WARPS + BANKS,  # to start at a multiple of that
        # Registers suffice for three where queries have 16 bits; others would spill.
        blocks=3 if q_kind != "fp32" and max(dim, dim_v) <= MOST_OF_THREE else 2,
    )


def _whole(array: Any, side_: Side) -> bool:
    """Whether all chunks of an array's rows start at multiples of their size, and 32 bits say where."""
    row_bytes = side_.dim * side_.bits // 8
    steps = tuple(array.strides)[:-1]
    extent = sum((n - 1) * s for n, s in zip(tuple(array.shape)[:-1], steps, strict=True))
    return (
        row_bytes % CHUNK == 0
        and all(s >= 0 and s % CHUNK == 0 for s in steps)
        and extent < MOST_BYTES
        and int(array.gpu_data.device_pointer) % CHUNK == 0
    )


@functools.cache
def most_shared(device: int) -> int:
    """Dynamic shared memory that the kernel may ask for on a device; 0 where it lacks the instructions."""
    if cuda.gpus[device].compute_capability < (8, 0):
        return 0
    return shared_bytes(device) - STATIC_BYTES


def fits(
    q: Any, q_kind: str, k: Any, k_kind: str, k_scale: Any, v: Any, v_kind: str, v_scale: Any, dim_v: int
) -> bool:  # fmt: skip
    """Whether the kernel can take these arrays."""
    dim = q.shape[2]
    if SIMULATED or q_kind == "fp64" or not {k_kind, v_kind} <= set(OPERANDS):
        return False
    if not 8 <= dim <= MOST_COLUMNS or not 8 <= dim_v <= MOST_COLUMNS or 0 in k.shape:
        return False
    sizes = sizes_for(q_kind, k_kind, v_kind, dim, dim_v)
    if sizes.shared_bytes > most_shared(current().device):
        return False
    # Pairs of 16-bit queries are read at once.
    paired = q.dtype.itemsize == 4 or (
        int(q.gpu_data.device_pointer) % 4 == 0 and all(s % 4 == 0 for s in q.strides[:-1])
    )
    scales = all(
        scale.strides[-1] == 2
        for scale, s in ((k_scale, sizes.k), (v_scale, sizes.v))
        if s.kind == "int4"
    )
    return paired and scales and _whole(k, sizes.k) and _whole(v, sizes.v)
