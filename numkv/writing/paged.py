"""Writes into a caller's own paged pools, batched over sequences: append and the fused write."""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv import targets
from numkv.checks import check_apart, check_integers
from numkv.errors import DimensionMismatch
from numkv.kernels import validate as values
from numkv.numbers import check_flag
from numkv.storage.pool import Pool
from numkv.storage.user_buffers import PAGED, check_written, stored_pool
from numkv.targets.base import Array, Target
from numkv.targets.call import Call
from numkv.writing import fast_path
from numkv.writing.fused_write import Projection, QKMode

_POOLS = "k_pool v_pool k_scale v_scale"
_APPEND = Call(
    "k v k_pool v_pool slot_mapping k_scale v_scale", "check_finite validate", _POOLS, late=True
)
_WRITE = Call(
    "qkv k_pool v_pool slot_mapping positions cos sin q_norm_weight k_norm_weight q_out k_scale v_scale",
    "num_q_heads qk_mode eps check_finite validate", f"{_POOLS} q_out", late=True,
)  # fmt: skip


def _check_slots(
    target: Target, pool: Pool, slot_mapping: Any, num_tokens: int, validate: bool
) -> Array:
    """Slots as the kernels take them, in range or -1; where rows share one, the last row's alone."""
    given = check_integers(target, "slot_mapping", slot_mapping, (num_tokens,))
    check_apart(target, pool.written(), {"slot_mapping": given})
    slots = target.index(given, np.int64)
    num_slots = int(pool.k.shape[0]) * int(pool.k.shape[2])
    if target.values_on_host or validate:
        on_host = target.to_host(slots).astype(np.int64, copy=False)
        bad = values.first_outside(on_host, -1, num_slots)
        if bad >= 0:
            raise IndexError(
                f"`slot_mapping`: expected slots in [0, {num_slots}), or -1 to skip a row, got "
                f"{on_host[bad]} for row {bad}"
            )
        kept = values.last_of_each(on_host)
        if kept is not on_host:
            slots = target.index(kept, np.int64)
    return slots


def paged_append(
    k: Any,
    v: Any,
    k_pool: Any,
    v_pool: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_finite: bool | None = True,
    validate: bool | None = False,
) -> None:
    """Put ready rows into slots of paged pools.

    Parameters
    ----------
    k, v : array (num_tokens, num_kv_heads, head_dim)
        New rows of any number of sequences, in the pool's own dtype or in float32; for pools of codes and fp8 in
        fp32, fp16 or bf16.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Written in place; a float dtype, or codes: int8, uint8 for int4 and code4 (two to a byte), int16 for
        code6 (eight in three).
    slot_mapping : int32 or int64 array (num_tokens,)
        ``block * block_size + offset`` of each row; -1 skips it. See
        `numkv.blocks.tables.slot_mapping`. Where rows share a slot the last one wins, on any number of threads; on CUDA
        with `validate` only, else any of them may.
    k_scale, v_scale : array, optional
        Scales of pools of codes, written in place: of int8 and codes of codebooks float32
        ``(num_blocks, num_kv_heads, block_size)``, of int4 bfloat16
        ``(num_blocks, num_kv_heads, block_size, ceil(head_dim / 32))``. Of fp8 pools what elements are
        divided by before they are stored, a number or float32 ``(num_kv_heads,)``, 1 if None, always the same.
    check_finite : bool
        Whether rows to be quantised are checked: on the CPU first; on CUDA, without `validate`, by the kernel that
        writes them. A row with NaN or infinity is then stored as zeros, and a later call raises.
    validate : bool
        On CUDA, check slots and finiteness first, which waits for the device; else a slot outside the pool is skipped
        there. On the CPU they are always checked.

    Raises
    ------
    IndexError
        If a slot is neither -1 nor in the pool; nothing is written.
    NonFiniteInput
        If rows to be quantised hold NaN or infinity; nothing is written. On CUDA, without `validate`: if those of an
        earlier call did.
    DimensionMismatch, UnsupportedDType, NotSupported, TypeError
        If an array has another shape, dtype, layout or target, or shares memory with what is written; see
        docs/arguments.md.
    """
    if validate is not False:
        validate = check_flag("validate", validate)
    if fast_path.paged_append(k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale, check_finite):
        return
    target = targets.of(k_pool)
    if target.chooses_stream:
        arrays = (k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale)
        target.run(paged_append, _APPEND, arrays, (check_finite, validate))
        return
    pool = stored_pool(target, PAGED, k_pool, v_pool, (k_scale, v_scale))
    check_written(pool)
    check_finite = check_flag("check_finite", check_finite, True)
    first = check_finite and (target.values_on_host or bool(validate))
    k, v = pool.check_rows(k, v, check_finite=first)
    slots = _check_slots(target, pool, slot_mapping, int(k.shape[0]), bool(validate))
    pool.scatter(k, v, slots, pool.watch(k, v) if check_finite and not first else 0)


def _copies(qk_mode: Any) -> bool:
    """Return whether an argument that is not checked yet is the mode that rotates nothing."""
    return isinstance(qk_mode, int) and qk_mode == QKMode.COPY


def paged_write(
    qkv: Any,
    k_pool: Any,
    v_pool: Any,
    slot_mapping: Any,
    *,
    num_q_heads: int,
    positions: Any = None,
    cos: Any = None,
    sin: Any = None,
    qk_mode: QKMode | int,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    eps: float | None = 1e-6,
    q_out: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    check_finite: bool | None = True,
    validate: bool | None = False,
) -> Array:
    """Split fused projections, normalise and rotate q and k, and write K and V into slots, in one pass.

    Parameters
    ----------
    qkv : array (num_tokens, (num_q_heads + num_kv_heads) * head_dim + num_kv_heads * head_dim_v)
        Projections of any number of sequences; any float dtype.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim), (…, head_dim_v)
        Written in place; a float dtype, or codes: int8, uint8 for int4 and code4 (two to a byte), int16 for
        code6 (eight in three).
    slot_mapping : int32 or int64 array (num_tokens,)
        ``block * block_size + offset`` of each token; -1 leaves its K and V out.
    num_q_heads : int
        Q heads in `qkv`; a multiple of the kv heads.
    positions : int32 or int64 array (num_tokens,), optional
        Row of `cos` and `sin` for each token; needed where q and k are rotated.
    cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out
        See `numkv.ContiguousLayer.write`.
    k_scale, v_scale : array, optional
        Scales of pools of codes, written in place: of int8 and codes of codebooks float32
        ``(num_blocks, num_kv_heads, block_size)``, of int4 bfloat16
        ``(num_blocks, num_kv_heads, block_size, ceil(head_dim / 32))``. Of fp8 pools what elements are
        divided by before they are stored, a number or float32 ``(num_kv_heads,)``, 1 if None, always the same.
    check_finite, validate : bool
        See `paged_append`; `validate` covers `positions` too.

    Returns
    -------
    array (num_tokens, num_q_heads, head_dim)
        q, in qkv's dtype.

    Raises
    ------
    IndexError
        If a slot is neither -1 nor in the pool, or a position has no row in the tables; nothing is written.
    NonFiniteInput
        If projections to be quantised hold NaN or infinity; nothing is written. On CUDA see `paged_append`.
    DimensionMismatch, UnsupportedDType, NotSupported, ValueError, TypeError
        If an argument is missing, or has another shape, dtype, layout, value or target, or shares memory with what is
        written; see docs/arguments.md.
    """
    if validate is not False:
        validate = check_flag("validate", validate)
    target = targets.of(k_pool)
    if target.chooses_stream:
        arrays = (
            qkv, k_pool, v_pool, slot_mapping, positions, cos, sin, q_norm_weight, k_norm_weight, q_out,
            k_scale, v_scale,
        )  # fmt: skip
        q: Array = target.run(
            paged_write, _WRITE, arrays, (num_q_heads, qk_mode, eps, check_finite, validate)
        )
        return q
    pool = stored_pool(target, PAGED, k_pool, v_pool, (k_scale, v_scale))
    if type(slot_mapping) is np.ndarray and (positions is None) == _copies(qk_mode):
        slots = fast_path.as_int64(slot_mapping)
        rows = slots if positions is None else fast_path.as_int64(positions)
        if slots is not None and rows is not None:
            tokens, q = fast_path.pool_write(
                pool, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out,
                rows, 0, slots, 0, 0, check_finite,
            )  # fmt: skip
            if tokens >= 0:
                return q
    check_finite = check_flag("check_finite", check_finite, True)
    check_written(pool)
    p = Projection.check(
        pool, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out
    )
    slots = _check_slots(target, pool, slot_mapping, p.num_tokens, validate)
    if p.rotates:
        if positions is None:
            raise DimensionMismatch(
                f"`positions`: expected int32 or int64 ({p.num_tokens},) for qk_mode {p.mode}, got None",
                expected=(p.num_tokens,),
            )
        positions = check_integers(target, "positions", positions, (p.num_tokens,))
        check_apart(target, pool.written() | {"q_out": p.q_out}, {"positions": positions})
        positions = target.index(positions, np.int64)
        if target.values_on_host or validate:
            on_host = target.to_host(positions).astype(np.int64, copy=False)
            bad = values.first_outside(on_host, 0, int(p.cos.shape[0]))
            if bad >= 0:
                raise IndexError(
                    f"`positions`: expected rows of cos and sin, [0, {p.cos.shape[0]}), got "
                    f"{on_host[bad]} for token {bad}"
                )
    else:
        positions = slots  # looked at by no one
    first = check_finite and (target.values_on_host or bool(validate))
    if first:
        p.check_finite(pool)
    p.scatter(pool, slots, positions, p.watch(pool) if check_finite and not first else 0)
    return p.q_out
