"""Which calls attention's kernel for many query rows takes, and how much it takes of everything at once."""

from __future__ import annotations

from typing import Any, NamedTuple

from numkv.kernels.cuda.launches import shared_bytes
from numkv.kernels.cuda.simd import aligned
from numkv.kernels.cuda.streams import SIMULATED, current
from numkv.kinds import kind

#: Query rows of a warp, as a product of matrices has.
WARP_ROWS = 16
#: Sequences with more query rows of a kv head than that are this kernel's, if it takes a call at all; whatever else is
#: in the batch, so that a sequence's result does not depend on it.
MOST_ROWS = 128
#: The longest rows of K and V whose sums fit into registers.
MOST_DIM = 256
#: What tensor cores multiply, by the kind of K or V. Codes and 8-bit floats are exact in float16.
OPERANDS = {
    "fp16": "fp16", "bf16": "bf16", "int8": "fp16", "int4": "fp16", "fp8_e4m3": "fp16", "fp8_e5m2": "fp16",
}  # fmt: skip
#: Bytes that are copied at once.
CHUNK = 16
#: More than the kernel's static shared memory.
STATIC_BYTES = 8192


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
    if kind(q_kind).compute.itemsize > 4 or max(q.shape[2], out.shape[2]) > MOST_DIM:
        return False
    # Rows of INT4 times their scales are rounded to float16, which is not enough for queries of float32.
    if q_kind == "fp32" and "int4" in (k_kind, v_kind):
        return False
    sizes = sizes_of_prefill(q_kind, k_kind, v_kind, q.shape[2], out.shape[2])
    if sizes.shared_bytes > shared_bytes(current().device) - STATIC_BYTES:
        return False
    pairs = aligned(q, q_kind, 2) and aligned(out, q_kind, 2)
    return pairs and _whole(k, sizes.k, k_scale) and _whole(v, sizes.v, v_scale)
