"""How attention on tensor cores lays out rows in shared memory, and which calls it takes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from numba import cuda

from numkv.kernels.cuda.launches import THREADS, shared_bytes
from numkv.kernels.cuda.simd import aligned, ceil_div
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


class DecodeSide(NamedTuple):
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

    k: DecodeSide
    v: DecodeSide
    precise_q: bool  #: whether queries have a second half, of what the first one leaves
    precise_p: bool  #: whether weights have one
    words: int  #: words of scales that a thread holds
    queries: int  #: where queries start in shared memory: behind slices and the merge's sums
    places: int  #: where threads leave places of tokens
    shared_bytes: int
    blocks: int  #: that shall fit on a multiprocessor


def side(name: str, dim: int) -> DecodeSide:
    """The layout of rows of a kind."""
    of = kind(name)
    bits = int(8 * of.bytes_per_element)
    chunks = ceil_div(dim * bits, 8 * CHUNK)
    tiles = ceil_div(dim, 16)
    padded = ceil_div(tiles * bits, 8)
    lanes = 1 << (padded - 1).bit_length()
    step = ceil_div(padded * CHUNK, BANKS) * BANKS
    return DecodeSide(
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


def _whole_chunks(array: Any, side_: DecodeSide) -> bool:
    """Whether all chunks of an array's rows start at multiples of their size, and 32 bits say where."""
    steps = tuple(array.strides)[:-1]
    extent = sum((n - 1) * s for n, s in zip(tuple(array.shape)[:-1], steps, strict=True))
    whole = aligned(array, side_.kind, 8 * CHUNK // side_.bits)
    return whole and min(steps) >= 0 and extent < MOST_BYTES


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
    return paired and scales and _whole_chunks(k, sizes.k) and _whole_chunks(v, sizes.v)


#: Query rows of a warp, as a product of matrices has.
WARP_ROWS = 16
#: Sequences with more query rows of a kv head than that are this kernel's, if it takes a call at all; whatever else is
#: in the batch, so that a sequence's result does not depend on it.
MOST_ROWS = 128


class PrefillSide(NamedTuple):
    """How rows of K, or of V, are stored, and where a tile of them lies in shared memory until it is widened."""

    kind: str
    bits: int  #: of an element
    chunks: int  #: of a row
    words: int  #: of a token's scales; 0 where it has none of its own
    by_head: bool  #: whether a head has a scale
    rows: int  #: bytes from the start of shared memory to the rows as they are stored, one after another
    scales: int  #: to scales as they are stored


class PrefillSizes(NamedTuple):
    """Constants of a kernel."""

    threads: int  #: of a block
    rows: int  #: query rows of an item, sixteen for each warp
    widened: (
        bool  #: whether rows are copied as they are stored, and made 16-bit floats in shared memory
    )
    scaled: bool  #: whether tokens of K or V have scales
    k: PrefillSide
    v: PrefillSide
    terms: int  #: bytes from the start of shared memory to what scores of tokens become linear by; see `make_terms`
    backs: int  #: to float32 that take scales of V out of weights again
    tile: int  #: tokens of a KV tile
    dim: int  #: columns of K
    dim_v: int  #: and of V
    padded: int  #: columns of K in shared memory, the last of which may be zeros: a multiple of 32
    padded_v: int
    k_step: int  #: bytes from a row of K to the next: an odd number of 16, so that eight rows lie in different banks
    v_step: int
    k_bytes: int  #: what K of a tile takes; what of its V is not finite may lie there, too
    stage: int  #: bytes of K and V of a tile
    next_stage: int  #: bytes from there to the next tile's; 0 if there is one
    queries: int  #: where query rows start in shared memory
    q_halves: int  #: words for each two elements of a query: 2 where 16 bits do not hold them
    q_words: int  #: words of a thread's query rows
    q_shared: bool  #: whether they are in shared memory, not in registers
    p_halves: int  #: words for each two weights
    blocks: int  #: blocks that shall fit on a multiprocessor
    shared_bytes: int


def _padded(dim: int) -> int:
    return -(-dim // 32) * 32


def _side(name: str, dim: int, tile: int, start: int) -> tuple[PrefillSide, int]:
    """A side whose rows lie in shared memory from `start` on, and where they and their scales end."""
    of = kind(name)
    bits = int(8 * of.bytes_per_element)
    words = of.scales_per_row(dim) if name == "int8" else -(-of.scales_per_row(dim) // 2)
    scales = start + tile * -(-dim * bits // 8)
    side = PrefillSide(
        kind=name,
        bits=bits,
        chunks=-(-dim * bits // (8 * CHUNK)),
        words=words,
        by_head=of.scales_per == "head",
        rows=start,
        scales=scales,
    )
    return side, scales + tile * 4 * words


def sizes_of_prefill(q_kind: str, k_kind: str, v_kind: str, dim: int, dim_v: int) -> PrefillSizes:
    """The sizes of a kernel."""
    padded, padded_v = _padded(dim), _padded(dim_v)
    tile = 64 if max(padded, padded_v) <= 128 else 32
    k_step, v_step = 2 * padded + 16, 2 * padded_v + 16
    k_bytes = tile * max(k_step, v_step)
    # A float32 has 24 bits, a float16 11: bfloat16 has 8, and two of them 16.
    q_halves = 2 if q_kind == "fp32" or (q_kind, OPERANDS[k_kind]) == ("fp16", "bf16") else 1
    q_words = padded // 4 * q_halves
    q_shared = q_words > 32 or q_halves > 1
    stage = k_bytes + tile * v_step
    k, end = _side(k_kind, dim, tile, stage)
    v, end = _side(v_kind, dim_v, tile, end)
    widened, scaled = min(k.bits, v.bits) < 16, k.words + v.words > 0
    terms = -(-end // CHUNK) * CHUNK
    backs = terms + 8 * tile * scaled
    queries = backs + 4 * tile * scaled if widened else 2 * stage
    # Widening is for all rows of a block: so more of them share it, where their queries stay in registers.
    threads = 256 if widened and not q_shared and tile == 64 else 128
    return PrefillSizes(
        threads=threads,
        rows=threads // 32 * WARP_ROWS,
        widened=widened,
        scaled=scaled,
        k=k,
        v=v,
        terms=terms,
        backs=backs,
        tile=tile,
        dim=dim,
        dim_v=dim_v,
        padded=padded,
        padded_v=padded_v,
        k_step=k_step,
        v_step=v_step,
        k_bytes=k_bytes,
        stage=stage,
        next_stage=0 if widened else stage,
        queries=queries,
        q_halves=q_halves,
        q_words=q_words,
        q_shared=q_shared,
        # Of eight bits, weights would add as much error as the result's own rounding to bfloat16.
        p_halves=2 if q_kind == "fp32" or OPERANDS[v_kind] == "bf16" else 1,
        blocks=256 // threads,  # with 255 registers at most
        shared_bytes=queries + (threads * 4 * q_words if q_shared else 0),
    )


def _whole(array: Any, side: PrefillSide, scale: Any) -> bool:
    """Whether all chunks of rows start at multiples of their size, and words of scales at multiples of theirs."""
    if not aligned(array, side.kind, 8 * CHUNK // side.bits):
        return False
    if side.kind != "int4":
        return True
    return (  # scales are read in pairs
        scale.shape[-1] % 2 == 0
        and scale.strides[-1] == 2
        and all(step % 4 == 0 for step in scale.strides[:-1])
        and int(scale.gpu_data.device_pointer) % 4 == 0
    )


def fits_prefill(
    q: Any, q_kind: str, k: Any, k_kind: str, k_scale: Any, v: Any, v_kind: str, v_scale: Any, out: Any, sm_scale: float
) -> bool:  # fmt: skip
    """Whether the kernel for many query rows takes a call; whether any of its sequences has so many is not asked.

    Parameters
    ----------
    q, k, v : array
        Queries and pools, in words.
    q_kind, k_kind, v_kind : str
        Their kinds.
    k_scale, v_scale : array
        Scales of the pools.
    out : array
        The result.
    sm_scale : float
        What scores are multiplied by; 0 would make NaN of the minus infinity of what a row does not see.
    """
    if SIMULATED or k_kind not in OPERANDS or v_kind not in OPERANDS or sm_scale == 0:
        return False
    if kind(q_kind).compute.itemsize > 4 or max(q.shape[2], out.shape[2]) > MOST_COLUMNS:
        return False
    # Rows of INT4 times their scales are rounded to float16, which is not enough for queries of float32.
    if q_kind == "fp32" and "int4" in (k_kind, v_kind):
        return False
    sizes = sizes_of_prefill(q_kind, k_kind, v_kind, q.shape[2], out.shape[2])
    if sizes.shared_bytes > shared_bytes(current().device) - STATIC_BYTES:
        return False
    pairs = aligned(q, q_kind, 2) and aligned(out, q_kind, 2)
    return pairs and _whole(k, sizes.k, k_scale) and _whole(v, sizes.v, v_scale)
