"""Operations on a caller's own paged pools, batched over sequences: append, fused write, decode and prefill."""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv import at_once, targets
from numkv.attention import (
    attend,
    check_lengths,
    check_queries,
    one_query_each,
    stored_pool,
)
from numkv.checks import check_array, check_integers, check_writable
from numkv.errors import DimensionMismatch
from numkv.kernels import validate as values
from numkv.pool import Pool
from numkv.projection import Projection, QKMode
from numkv.targets import Array, Target

__all__ = ["paged_append", "paged_decode_attention", "paged_prefill_attention", "paged_write"]

_POOL = ("num_blocks", "num_kv_heads", "block_size", "head_dim")
_NAMES = ("k_pool", "v_pool")
_INT32 = (np.dtype(np.int32),)


def _check_slots(
    target: Target, pool: Pool, slot_mapping: Any, num_tokens: int, validate: bool
) -> Array:
    """Slots as the kernels take them, in range or -1; where rows share one, the last row's alone."""
    slots = target.index(
        check_integers(target, "slot_mapping", slot_mapping, (num_tokens,)), np.int64
    )
    num_slots = int(pool.k.shape[0]) * int(pool.k.shape[2])
    if target.name == "cpu" or validate:
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


def _check_writable(pool: Pool) -> None:
    for name, x in (("k_pool", pool.k), ("v_pool", pool.v), ("k_scale", pool.k_scale),
                    ("v_scale", pool.v_scale)):  # fmt: skip
        check_writable(name, x)


def paged_append(
    k: Any,
    v: Any,
    k_pool: Any,
    v_pool: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    check_finite: bool = True,
    validate: bool = False,
) -> None:
    """Put ready rows into slots of paged pools.

    Parameters
    ----------
    k, v : array (num_tokens, num_kv_heads, head_dim)
        New rows of any number of sequences, in the pool's own dtype or in float32; for int8 and int4 pools in fp32,
        fp16 or bf16.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Written in place; a float dtype, or codes: int8, or uint8 for int4 (two to a byte).
    slot_mapping : int32 or int64 array (num_tokens,)
        ``block * block_size + offset`` of each row; -1 skips it. See `numkv.paging.slot_mapping`. Where rows share a
        slot the last one wins, on any number of threads; on CUDA with `validate` only, else any of them may.
    k_scale, v_scale : array, optional
        Scales of pools of codes, written in place: of int8 float32 ``(num_blocks, num_kv_heads, block_size)``, of int4
        bfloat16 ``(num_blocks, num_kv_heads, block_size, ceil(head_dim / 32))``.
    check_finite : bool
        Whether rows that are to be quantised are looked at first.
    validate : bool
        On CUDA, check the slots too, which waits for the device; else a slot outside the pool is skipped there. On
        the CPU they are always checked.

    Raises
    ------
    IndexError
        If a slot is neither -1 nor in the pool; nothing is written.
    NonFiniteInput
        If rows to be quantised hold NaN or infinity; nothing is written.
    DimensionMismatch, UnsupportedDType, NotSupported
        If an array has another shape, dtype, layout or target.
    """
    if at_once.paged_append(k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale, check_finite):
        return
    target = targets.of(k_pool)
    pool = stored_pool(target, _NAMES, k_pool, v_pool, (k_scale, v_scale), _POOL)
    _check_writable(pool)
    k, v = pool.check_rows(k, v, check_finite=check_finite)
    slots = _check_slots(target, pool, slot_mapping, int(k.shape[0]), validate)
    pool.scatter(k, v, slots)


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
    eps: float = 1e-6,
    q_out: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    check_finite: bool = True,
    validate: bool = False,
) -> Array:
    """Split fused projections, normalise and rotate q and k, and write K and V into slots, in one pass.

    Parameters
    ----------
    qkv : array (num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
        Projections of any number of sequences; any float dtype.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Written in place; a float dtype, or codes: int8, or uint8 for int4 (two to a byte).
    slot_mapping : int32 or int64 array (num_tokens,)
        ``block * block_size + offset`` of each token; -1 leaves its K and V out.
    num_q_heads : int
        Q heads in `qkv`.
    positions : int32 or int64 array (num_tokens,), optional
        Row of `cos` and `sin` for each token; needed where q and k are rotated.
    cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out
        See `numkv.ContiguousLayer.write`.
    k_scale, v_scale : array, optional
        Scales of pools of codes, written in place: of int8 float32 ``(num_blocks, num_kv_heads, block_size)``, of int4
        bfloat16 ``(num_blocks, num_kv_heads, block_size, ceil(head_dim / 32))``.
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
        If projections to be quantised hold NaN or infinity; nothing is written.
    DimensionMismatch, UnsupportedDType, NotSupported, ValueError
        If an argument is missing, or has another shape, dtype, layout, value or target.
    """
    target = targets.of(k_pool)
    pool = stored_pool(target, _NAMES, k_pool, v_pool, (k_scale, v_scale), _POOL)
    if type(slot_mapping) is np.ndarray and (positions is None) == (qk_mode == QKMode.COPY):
        slots, rows = (at_once.as_int64(x) for x in (slot_mapping, positions))
        tokens, q = at_once.pool_write(
            pool, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out,
            slots if positions is None else rows, 0, slots, 0, 0, check_finite,
        )  # fmt: skip
        if tokens >= 0:
            return q
    _check_writable(pool)
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
        positions = target.index(
            check_integers(target, "positions", positions, (p.num_tokens,)), np.int64
        )
        if target.name == "cpu" or validate:
            on_host = target.to_host(positions).astype(np.int64, copy=False)
            bad = values.first_outside(on_host, 0, int(p.cos.shape[0]))
            if bad >= 0:
                raise IndexError(
                    f"`positions`: expected rows of cos and sin, [0, {p.cos.shape[0]}), got "
                    f"{on_host[bad]} for token {bad}"
                )
    else:
        positions = slots  # looked at by no one
    if check_finite:
        p.check_finite(pool)
    p.scatter(pool, slots, positions)
    return p.q_out


def _check_batch(
    target: Target, pool: Pool, table: Array, seq_lens: Any, q_starts: Array, num_tokens: int,
    *, validate: bool, decode: bool,
) -> Array:  # fmt: skip
    """The lengths as kernels take them; their values and the table's are checked where that is free or asked for."""
    num_seqs = int(table.shape[0])
    lens = target.index(check_integers(target, "seq_lens", seq_lens, (num_seqs,)), np.int64)
    num_blocks, block_size = int(pool.k.shape[0]), int(pool.k.shape[2])
    capacity = int(table.shape[1]) * block_size
    check_lengths(target, lens, q_starts, num_tokens, capacity, validate=validate, decode=decode)
    if target.name == "cpu" or validate:
        on_host, lens_on_host = target.to_host(table), target.to_host(lens).astype(np.int64)
        b = values.first_bad_blocks(on_host, lens_on_host, block_size, num_blocks)
        if b >= 0:
            used = on_host[b, : -(-int(lens_on_host[b]) // block_size)].tolist()
            raise IndexError(
                f"`block_table`: expected blocks in [0, {num_blocks}) up to each length, got {used} "
                f"for sequence {b}"
            )
    return lens


def paged_decode_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    validate: bool = False,
) -> Any:
    """Attend with one query per sequence over paged pools.

    Parameters
    ----------
    q : array (num_seqs, num_q_heads, head_dim)
        The newest token's query of each sequence.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Pools of a float dtype, or of codes: int8, or uint8 for int4 (two to a byte).
    block_table : int32 array (num_seqs, max_blocks)
        Physical block of each logical block; entries past a sequence's length are never read.
    seq_lens : int32 or int64 array (num_seqs,)
        Tokens in the cache, the query's own included.
    sm_scale, logits_soft_cap, window_left, sinks, return_lse, out
        See `numkv.decode_attention`.
    k_scale, v_scale : array, optional
        Scales of pools of codes: of int8 float32 ``(num_blocks, num_kv_heads, block_size)``, of int4
        bfloat16 ``(num_blocks, num_kv_heads, block_size, ceil(head_dim / 32))``.
    validate : bool
        On CUDA, check the lengths and blocks too, which waits for the device. On the CPU they are always checked.

    Returns
    -------
    out : array (num_seqs, num_q_heads, head_dim_v)
        In q's dtype.
    lse : float32 array (num_seqs, num_q_heads)
        Natural log of the sum of exponentials; only with `return_lse`.

    Raises
    ------
    IndexError
        If a length is more than the table has room for, or a block is not in the pool.
    DimensionMismatch, UnsupportedDType, NotSupported, ValueError
        See `numkv.decode_attention`.
    """
    target = targets.of(k_pool)
    pool = stored_pool(target, _NAMES, k_pool, v_pool, (k_scale, v_scale), _POOL)
    q = check_queries(target, q, int(pool.k.shape[1]), pool.head_dim, "num_seqs")
    num_seqs = int(q.shape[0])
    starts = one_query_each(target.name, num_seqs)
    table = check_array(target, "block_table", block_table, _INT32, (num_seqs, "max_blocks"))
    lens = _check_batch(
        target, pool, table, seq_lens, starts, num_seqs, validate=validate, decode=True
    )
    return attend(
        pool, table, q, lens, starts, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
        window_left=window_left, sinks=sinks, return_lse=return_lse, out=out,
    )  # fmt: skip


def paged_prefill_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    validate: bool = False,
) -> Any:
    """Attend with any number of queries per sequence over paged pools; causal, bottom-right aligned.

    Parameters
    ----------
    q : array (num_tokens, num_q_heads, head_dim)
        The queries of all sequences, one after another.
    k_pool, v_pool, block_table, seq_lens
        See `paged_decode_attention`.
    cu_seqlens_q : int32 or int64 array (num_seqs + 1,)
        Prefix sums of the numbers of queries.
    sm_scale, logits_soft_cap, window_left, sinks, return_lse, out
        See `numkv.decode_attention`.
    k_scale, v_scale, validate
        See `paged_decode_attention`.

    Returns
    -------
    out : array (num_tokens, num_q_heads, head_dim_v)
        In q's dtype.
    lse : float32 array (num_tokens, num_q_heads)
        Natural log of the sum of exponentials; only with `return_lse`.

    Raises
    ------
    DimensionMismatch
        If a sequence has more queries than tokens, `cu_seqlens_q` are not prefix sums, or a shape does not fit.
    IndexError, UnsupportedDType, NotSupported, ValueError
        See `paged_decode_attention`.
    """
    target = targets.of(k_pool)
    pool = stored_pool(target, _NAMES, k_pool, v_pool, (k_scale, v_scale), _POOL)
    q = check_queries(target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
    table = check_array(target, "block_table", block_table, _INT32, ("num_seqs", "max_blocks"))
    starts = check_integers(target, "cu_seqlens_q", cu_seqlens_q, (int(table.shape[0]) + 1,))
    starts = target.index(starts, np.int64)
    lens = _check_batch(
        target, pool, table, seq_lens, starts, int(q.shape[0]), validate=validate, decode=False
    )
    return attend(
        pool, table, q, lens, starts, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
        window_left=window_left, sinks=sinks, return_lse=return_lse, out=out,
    )  # fmt: skip
