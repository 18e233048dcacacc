"""Which engine attends over which kinds, and what it computes in; `steps` makes kernels of what is decided here."""

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
    """Whether many query rows are taken by a matrix unit with these kinds."""
    return {k_kind, v_kind} <= {"bf16", "int8"} and compute == "float32" and has_amx()


def compute_for(q_kind: str, k_kind: str, v_kind: str, masked: bool = False) -> str:
    """What attention computes in: float64 if anything is, else float32, or `PAIRS` of bf16."""
    kinds = {q_kind, k_kind, v_kind}
    if "fp64" in kinds:
        return "float64"
    pairs = kinds == {"bf16"} and HAS_BF16_PAIRS
    return PAIRS if pairs and (masked or not use_amx(k_kind, v_kind, "float32")) else "float32"


def by_panels(k_kind: str, v_kind: str, compute: str, masked: bool = False) -> bool:
    """Whether vector code takes many query rows by panels, with K and V widened once for all of them."""
    floats = kind_named(k_kind).is_float and kind_named(v_kind).is_float
    if not (floats and float_type(compute) == "float32"):
        return False
    return masked or not use_amx(k_kind, v_kind, compute)


def panels_from(k_kind: str, v_kind: str, compute: str) -> int:
    """Query rows of an item from which on vector code takes them by panels.

    Rows of 16 bits or less are worth widening once for half a panel. Of 32 rows (8 query tokens in groups of 4, 8
    sequences of 4,096 tokens, 2 cores of a Zen 4) panels take 0.88 of the other way's time in bf16 and in fp32, 0.93
    in pairs of bf16; of 16 rows (one kv head, 32,768 tokens) as long in bf16, 1.08 times as long in fp32, and 1.18
    times in pairs, which have nothing to widen.
    """
    narrow = all(kind_named(x).word.itemsize <= 2 for x in (k_kind, v_kind))
    return 13 if narrow and compute != PAIRS else 25


def query_rows(k_kind: str, v_kind: str, compute: str, masked: bool = False) -> int:
    """Query rows of an item at most."""
    if not masked and use_amx(k_kind, v_kind, compute):
        return AMX_QUERY_ROWS
    return MANY_QUERY_ROWS if by_panels(k_kind, v_kind, compute, masked) else QUERY_ROWS


def in_integers(kind: str, compute: str) -> bool:
    """Whether vector code multiplies rows of a kind as integers."""
    found = kind_named(kind)
    return (
        compute == "float32" and found.has_scales and (INT4_INTEGERS or found.scales_per != "group")
    )
