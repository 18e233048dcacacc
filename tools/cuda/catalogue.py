"""All CUDA kernels, with kinds that cover their branches, for compilation without a GPU.

Not all combinations of kinds are listed, because each compiles for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numkv.kernels.cuda import (
    append,
    attention,
    channel,
    choice,
    compress,
    convert,
    copy,
    finite,
    hadamard,
    latents,
    launches,
    mask,
    mass,
    merge,
    shift,
    write,
)
from numkv.kernels.cuda.attention import splits
from numkv.kernels.cuda.simd import compute_of
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kinds import kinds

Built = Iterator[tuple[str, Any]]
#: Kinds of pools alone, not of queries: each is in at least one case.
STORED_ONLY = [k.name for k in kinds() if not k.is_query]
BY_CHANNEL = [k.name for k in kinds(by_channel=True) if k.group_tokens]


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield names of kernels with their variant in brackets, their plain Python functions, and signatures."""
    for of_file in (
        _append,
        _attention,
        _splits,
        _channel,
        _choice,
        _compress,
        _copy,
        _finite,
        _hadamard,
        _latents,
        _mask,
        _mass,
        _merge,
        _shift,
        _write,
        _convert,
    ):
        for name, built in of_file():
            yield name, built, built.signature


def _append() -> Built:
    cases = [
        ("fp64", "fp64", "fp64", "fp64", False), ("fp32", "fp32", "fp32", "fp64", True),
        ("fp16", "fp16", "fp32", "fp16", False), ("bf16", "bf16", "fp32", "bf16", True),
        ("fp32", "int8", "fp32", "int8", False), ("fp16", "int8", "fp16", "int4", True),
        ("bf16", "int8", "bf16", "int8", True), ("fp32", "int4", "fp32", "int4", False),
        ("bf16", "int4", "bf16", "int4", True), *(("fp16", kind, "fp16", kind, False) for kind in STORED_ONLY),
    ]  # fmt: skip
    for case in cases:
        k_src, k_kind, v_src, v_kind, by_slot = case
        name = f"append[K {k_src} to {k_kind}, V {v_src} to {v_kind}, by {'slot' if by_slot else 'table'}]"
        yield name, append._append(*case)
        # All kinds, and one kernel for both sides.
        if case in (cases[1], cases[5], cases[8], cases[-2]):
            yield f"{name[:-1]}, octets]", append._append(*case, True)
    for bytes_, word in launches.UNSIGNED.items():
        yield f"copy_rows[{word}]", append._copy_rows(bytes_)
    yield f"copy_rows[{word}, octets]", append._copy_rows(bytes_, True)


def _attention() -> Built:
    # Items of the most rows, and of fewer; rows that do not start at multiples of 16 bytes; output rows longer than
    # a block.
    cases = [
        ("fp64", "fp64", "fp64", 8, 1, True), ("fp32", "fp32", "fp32", 8, 1, True),
        ("fp16", "fp16", "fp16", 8, 1, True), ("bf16", "bf16", "bf16", 8, 1, True),
        ("fp32", "fp16", "bf16", 8, 1, True),
        ("fp16", "int8", "fp16", 8, 1, True), ("bf16", "fp32", "int8", 8, 1, True),
        ("fp64", "int8", "int8", 4, 1, True),
        ("fp64", "bf16", "fp32", 4, 1, False), ("fp32", "fp32", "fp16", 4, 1, False),
        ("fp32", "int8", "int8", 4, 1, False), ("fp16", "int8", "int8", 4, 1, True),
        ("bf16", "bf16", "bf16", 4, 2, True), ("fp32", "int8", "int8", 1, 1, True),
        ("bf16", "bf16", "bf16", 1, 1, True),
        ("fp16", "int8", "int4", 4, 1, True), ("fp32", "int4", "fp16", 4, 1, False),
        ("fp64", "int4", "int4", 4, 1, True), ("fp32", "int4", "int4", 1, 1, True),
        *(("bf16", kind, kind, 8, 1, True) for kind in STORED_ONLY),
        ("bf16", "int8_channel", "int8", 8, 1, True), ("fp32", "int4_channel", "int4", 4, 1, False),
        ("fp16", "int4_channel_fine", "int4", 4, 1, False),
    ]  # fmt: skip
    for q_kind, k_kind, v_kind, rows, columns, wide in cases:
        compute = compute_of(q_kind, k_kind, v_kind)
        name = f"attention[q {q_kind}, K {k_kind}, V {v_kind}, {rows} rows, {columns} columns"
        name += "]" if wide else ", strided]"
        kernel = attention._attention(q_kind, k_kind, v_kind, compute, rows, columns, wide)
        yield name, kernel
    for q_kind, k_kind, v_kind in (("fp32", "fp32", "fp32"), ("bf16", "int8", "int8")):
        kernel = attention._attention(q_kind, k_kind, v_kind, "float32", 8, 1, True, True)
        yield f"attention[q {q_kind}, K {k_kind}, V {v_kind}, 8 rows, masked]", kernel
    kernel = attention._prefill("fp32", "fp16", "bf16", 40, 64, True)
    yield "prefill[q fp32, K fp16, V bf16, capped]", kernel
    for q_kind, k_kind, v_kind in (
        ("bf16", "bf16", "bf16"), ("fp32", "int8", "int4"), ("fp16", "fp8_e4m3", "fp8_e5m2"),
    ):  # fmt: skip
        kernel = attention._decode(q_kind, k_kind, v_kind, 64, 64)
        yield f"attention[q {q_kind}, K {k_kind}, V {v_kind}, decode]", kernel


def _splits() -> Built:
    for q_kind, compute in (("fp32", "float32"), ("fp16", "float32"), ("bf16", "float64")):
        yield f"splits[{q_kind}, in {compute}]", splits._merge_splits(q_kind, compute, False)
    if not SIMULATED:
        for q_kind in ("fp32", "fp16"):
            yield f"splits[{q_kind}, few]", splits._merge_splits(q_kind, "float32", True)


def _channel() -> Built:
    for kind, src in zip(BY_CHANNEL, ("fp32", "bf16", "bf16"), strict=True):
        yield f"quantise_groups[{src} to {kind}]", channel._quantise_groups(src, kind)


def _choice() -> Built:
    for name in ("fp64", "bf16", "int8", "int4", "fp8_e4m3"):
        yield f"key_bounds[{name}]", choice._key_bounds(name)
    for name in ("fp32", "bf16"):
        yield f"block_scores[{name}]", choice._block_scores(name)
    yield "choose_blocks", choice._choose_blocks()
    yield "tables_of_heads", choice._tables_of_heads()


def _compress() -> Built:
    for kind in ("fp64", "fp32", "bf16"):
        yield f"encode[{kind}]", compress._encode(kind)
        yield f"multiply[{kind}]", compress._multiply(kind)
    for bits, num_rows, columns in ((1, 1, 1), (3, 4, 1), (4, 8, 1), (8, 8, 2), (16, 1, 3)):
        yield f"decode[{bits} bits]", compress._decode(bits)
        name = f"[{bits} bits, {num_rows} rows"
        yield f"score{name}]", compress._score(bits, num_rows)
        yield f"attend{name}, {columns} columns]", compress._attend(bits, bits, num_rows, columns)
    yield "attend[4 bits, 3 of values]", compress._attend(4, 3, 8, 1)
    yield "finish", compress._finish()


def _copy() -> Built:
    for bytes_ in (1, 8, 16):
        words = launches.UNSIGNED.get(bytes_, "16 bytes")
        yield f"copy_blocks[{words}]", copy._copy_blocks(bytes_)
        yield f"copy_tokens[{words}]", copy._copy_tokens(bytes_)


def _finite() -> Built:
    for kind in ("fp64", "bf16"):
        yield f"first_non_finite[{kind}]", finite._first_non_finite(kind)
    yield f"first_non_finite[{kind}, octets]", finite._first_non_finite(kind, True)
    yield "mend_rows", finite._mend_rows()


def _hadamard() -> Built:
    for src, dst in (
        ("fp64", "fp64"), ("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "fp32"), ("fp32", "fp16"),
        ("fp32", "bf16"), ("fp64", "bf16"),
    ):  # fmt: skip
        yield f"rotate_rows[{src} to {dst}]", hadamard._rotate_rows(src, dst)


def _latents() -> Built:
    for src, kind in (("bf16", "bf16"), ("fp32", "int8"), ("bf16", "int4"), ("fp64", "fp64")):
        compute = compute_of(src, kind)
        yield f"scatter_latents[{src} to {kind}]", latents._scatter(src, kind, compute, compute)


def _mask() -> Built:
    for compute, ranges in (("float32", "int32"), ("float64", "int64")):
        yield f"fill_mask[{compute}, ranges {ranges}]", mask._fill_mask(compute, ranges)


def _mass() -> Built:
    for q_kind, k_kind, wide in (
        ("fp64", "fp64", True), ("fp32", "fp32", False), ("fp16", "fp16", True), ("bf16", "bf16", True),
        ("fp32", "int8", True), ("bf16", "int8", False), ("fp32", "int4", False),
        *(("bf16", name, True) for name in (*STORED_ONLY, *BY_CHANNEL)),
    ):  # fmt: skip
        name = f"attention_weights[q {q_kind}, K {k_kind}{', wide' if wide else ''}]"
        yield name, mass._attention_weights(q_kind, k_kind, wide)
        if q_kind == k_kind:
            yield f"{name[:-1]}, staged]", mass._attention_weights(q_kind, k_kind, True, True)


def _merge() -> Built:
    for kind in ("fp64", "fp16", "bf16"):
        yield f"merge[{kind}]", merge._merge(kind)
    yield f"merge[{kind}, octets]", merge._merge(kind, True)


def _shift() -> Built:
    for kind in map(str, kinds()):
        yield f"shift_rows[{kind}]", shift._shift_rows(kind)
    for kind in ("fp64", "int4", STORED_ONLY[0]):
        yield f"shift_rows[{kind}, octets]", shift._shift_octets(kind)


def _write() -> Built:
    cases = [
        ("fp64", "fp64", "fp64", False), ("fp32", "fp32", "fp32", True), ("fp16", "fp16", "bf16", False),
        ("bf16", "bf16", "fp16", True), ("bf16", "int8", "int8", False), ("fp32", "int8", "int8", True),
        ("fp16", "fp32", "int8", True), ("fp64", "int8", "fp16", False), ("bf16", "int4", "int4", False),
        ("fp16", "int8", "int4", True), ("fp64", "int4", "fp32", False),
        *(("bf16", kind, kind, True) for kind in STORED_ONLY),
    ]  # fmt: skip
    for src, k_kind, v_kind, by_slot in cases:
        compute = "float64" if "fp64" in (src, k_kind, v_kind) else "float32"
        name = "scatter_write" if by_slot else "write_rows"
        kernel = write._write_rows(src, k_kind, v_kind, compute, by_slot, compute)
        yield f"{name}[{src} to K {k_kind}, V {v_kind}]", kernel
        if "int4" in (k_kind, v_kind):  # of one kind, of two, of float64
            kernel = write._write_rows(src, k_kind, v_kind, compute, by_slot, compute, True)
            yield f"{name}[{src} to K {k_kind}, V {v_kind}, octets]", kernel


def _convert() -> Built:
    for of_pool in kinds(by_channel=True):
        if not of_pool.is_scaled:
            continue
        yield f"dequantise[{of_pool}]", convert._dequantise(of_pool.name)
