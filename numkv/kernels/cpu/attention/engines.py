"""Choose the engine and the computing dtype for each pair of kinds; `steps` compiles its kernels."""

from __future__ import annotations

from numkv.kernels.cpu.attention.records import (
    AMX_QUERY_ROWS,
    MANY_QUERY_ROWS,
    PAIRS,
    QUERY_ROWS,
    float_type,
)
from numkv.kernels.cpu.vectors.features import HAS_BF16_PAIRS, INT4_INTEGERS, has_amx
from numkv.kinds import kind as kind_named


def use_amx(k_kind: str, v_kind: str, compute: str) -> bool:
    """Return whether a matrix unit computes many query rows of these kinds."""
    kinds = {k_kind, v_kind}
    return kinds <= {"bf16", "int8"} and float_type(compute) == "float32" and has_amx()


def compute_for(q_kind: str, k_kind: str, v_kind: str, masked: bool = False) -> str:
    """Return what attention computes in: float64 if any input is, else float32 or `PAIRS` of bf16."""
    kinds = {q_kind, k_kind, v_kind}
    if "fp64" in kinds:
        return "float64"
    pairs = HAS_BF16_PAIRS or (not masked and use_amx(k_kind, v_kind, PAIRS))
    return PAIRS if kinds == {"bf16"} and pairs else "float32"


def by_panels(k_kind: str, v_kind: str, compute: str, masked: bool = False) -> bool:
    """Return whether vector code computes many query rows by panels, with K and V widened once for all."""
    floats = kind_named(k_kind).is_float and kind_named(v_kind).is_float
    if not (floats and float_type(compute) == "float32"):
        return False
    return masked or not use_amx(k_kind, v_kind, compute)


def panels_from(k_kind: str, v_kind: str, compute: str) -> int:
    """Return the fewest query rows of an item that vector code computes by panels.

    Widening rows of 16 bits or less pays from half a panel on. Panels compared with rows one by one, on 2 cores of a
    Zen 4:

    - 32 rows (8 sequences of 4,096 tokens, 8 query tokens in groups of 4): 1.14x faster in bf16 and fp32, 1.08x in
      pairs.
    - 16 rows (one kv head, 32,768 tokens): equal in bf16, 8 % slower in fp32, 18 % slower in pairs.

    Pairs of bf16 need no widening.
    """
    narrow = all(kind_named(x).word.itemsize <= 2 for x in (k_kind, v_kind))
    return 13 if narrow and compute != PAIRS else 25


def query_rows(k_kind: str, v_kind: str, compute: str, masked: bool = False) -> int:
    """Return the most query rows of an item."""
    if not masked and use_amx(k_kind, v_kind, compute):
        return AMX_QUERY_ROWS
    return MANY_QUERY_ROWS if by_panels(k_kind, v_kind, compute, masked) else QUERY_ROWS


def in_integers(kind: str, compute: str) -> bool:
    """Return whether vector code multiplies rows of a kind as integers."""
    found = kind_named(kind)
    return (
        compute == "float32" and found.has_scales and (INT4_INTEGERS or found.scales_per != "group")
    )
