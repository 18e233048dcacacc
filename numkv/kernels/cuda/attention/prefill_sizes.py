"""Which calls attention's kernel for many query rows takes, and how much it takes of everything at once."""

from __future__ import annotations

from typing import Any, NamedTuple

from numkv.kernels.cuda.launches import SIMULATED
from numkv.kernels.cuda.simd import aligned
from numkv.kinds import kind

__all__ = [
    "MOST_DIM", "MOST_ROWS", "OPERANDS", "PREFILL_ROWS", "PrefillSizes", "fits_prefill", "sizes_of_prefill",
]  # fmt: skip

#: Query rows of an item: sixteen for each of four warps, as a product of matrices has.
PREFILL_ROWS = 64
#: Sequences with more query rows of a kv head than that are this kernel's, if it takes a call at all; whatever else is
#: in the batch, so that a sequence's result does not depend on it.
MOST_ROWS = 128
#: The longest rows of K and V whose sums fit into registers.
MOST_DIM = 256
#: What tensor cores multiply, by the kind of K or V.
OPERANDS = {"fp16": "fp16", "bf16": "bf16"}


class PrefillSizes(NamedTuple):
    """Constants of a kernel."""

    tile: int  #: tokens of a KV tile
    dim: int  #: columns of K
    dim_v: int  #: and of V
    padded: int  #: columns of K in shared memory, the last of which may be zeros: a multiple of 32
    padded_v: int
    k_step: int  #: bytes from a row of K to the next: an odd number of 16, so that eight rows lie in different banks
    v_step: int
    k_bytes: int  #: what K of a tile takes; what of its V is not finite may lie there, too
    stage: int  #: bytes of K and V of a tile
    q_halves: int  #: words for each two elements of a query: 2 where 16 bits do not hold them
    q_words: int  #: words of a thread's query rows
    q_shared: bool  #: whether they are in shared memory, not in registers
    p_halves: int  #: words for each two weights
    blocks: int  #: blocks that shall fit on a multiprocessor
    shared_bytes: int


def _padded(dim: int) -> int:
    return -(-dim // 32) * 32


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
    return PrefillSizes(
        tile=tile,
        dim=dim,
        dim_v=dim_v,
        padded=padded,
        padded_v=padded_v,
        k_step=k_step,
        v_step=v_step,
        k_bytes=k_bytes,
        stage=stage,
        q_halves=q_halves,
        q_words=q_words,
        q_shared=q_shared,
        # Of eight bits, weights would add as much error as the result's own rounding to bfloat16.
        p_halves=2 if q_kind == "fp32" or OPERANDS[v_kind] == "bf16" else 1,
        blocks=2,  # with 255 registers at most
        shared_bytes=2 * stage + (128 * 4 * q_words if q_shared else 0),
    )


def fits_prefill(
    q: Any, q_kind: str, k: Any, k_kind: str, v: Any, v_kind: str, out: Any, sm_scale: float
) -> bool:
    """Whether the kernel for many query rows takes a call; whether any of its sequences has so many is not asked.

    Parameters
    ----------
    q, k, v : array
        Queries and pools, in words.
    q_kind, k_kind, v_kind : str
        Their kinds.
    out : array
        The result.
    sm_scale : float
        What scores are multiplied by; 0 would make NaN of the minus infinity of what a row does not see.
    """
    if SIMULATED or k_kind not in OPERANDS or v_kind not in OPERANDS or sm_scale == 0:
        return False
    if kind(q_kind).compute.itemsize > 4 or max(q.shape[2], out.shape[2]) > MOST_DIM:
        return False
    pairs = aligned(q, q_kind, 2) and aligned(out, q_kind, 2)
    return pairs and aligned(k, k_kind, 8) and aligned(v, v_kind, 8)
