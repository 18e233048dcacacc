"""Attention over a caller's own paged pools, batched over sequences: decode and ragged prefill."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from numkv import targets
from numkv.arrays import Array
from numkv.attention import fast_path
from numkv.attention.attend import attend, check_blocks, check_lengths, check_queries
from numkv.attention.cascade import Prefix, attend_cascade
from numkv.attention.options import (
    WITH_SINKS,
    AttentionOptions,
    check_options,
    is_free,
    only_scaled,
    with_options,
)
from numkv.checks import check_integers
from numkv.numbers import check_flag, check_size
from numkv.storage.pool import Pool
from numkv.storage.tables import one_query_each
from numkv.storage.user_buffers import PAGED, stored_pool
from numkv.targets.base import Target
from numkv.targets.call import Call

_INT32 = (np.dtype(np.int32),)
_OPTIONS = "return_lse validate"
_DECODE = Call("q k_pool v_pool block_table seq_lens out k_scale v_scale", _OPTIONS, "out")
_CASCADE = Call(
    "q k_pool v_pool block_table seq_lens cu_seqlens_q k_scale v_scale", "shared_len return_lse"
)
_PREFILL = Call(
    "q k_pool v_pool block_table seq_lens cu_seqlens_q out k_scale v_scale", _OPTIONS, "out"
)


def _check_batch(
    target: Target, pool: Pool, table: Array, seq_lens: Any, q_starts: Array, num_tokens: int,
    *, validate: bool, decode: bool, free: bool = False,
) -> Array:  # fmt: skip
    """The lengths as kernels take them; their values and the table's are checked on the CPU, on CUDA if asked for."""
    num_seqs = int(table.shape[0])
    lens = target.index(check_integers(target, "seq_lens", seq_lens, (num_seqs,)), np.int64)
    num_blocks, block_size = int(pool.k.shape[0]), int(pool.k.shape[2])
    capacity = int(table.shape[1]) * block_size
    check_lengths(
        target, lens, q_starts, num_tokens, capacity, validate=validate, decode=decode, free=free
    )
    if target.values_on_host or validate:
        on_host, lens_on_host = target.to_host(table), target.to_host(lens).astype(np.int64)
        check_blocks("block_table", on_host, lens_on_host, block_size, num_blocks)
    return lens


def paged_decode_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    out: Any = None,
    return_lse: bool | None = False,
    k_scale: Any = None,
    v_scale: Any = None,
    validate: bool | None = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attend with one query per sequence over paged pools.

    Parameters
    ----------
    q : array (num_seqs, num_q_heads, head_dim)
        The newest token's query of each sequence.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Pools of a float dtype, or of codes: int8, uint8 for int4 and code4 (two to a byte), int16 for code6
        (eight in three).
    block_table : int32 array (num_seqs, max_blocks)
        Physical block of each logical block; entries past a sequence's length are never read.
    seq_lens : int32 or int64 array (num_seqs,)
        Tokens in the cache, the query's own included.
    out, return_lse, **options
        See `numkv.decode_attention`.
    k_scale, v_scale : array, optional
        Scales of stored elements. int8, code4 and code6: float32 ``(num_blocks, num_kv_heads, block_size)``. int4:
        bfloat16 ``(num_blocks, num_kv_heads, block_size, ceil(head_dim / 32))``. fp8: float32 ``(num_kv_heads,)``, a
        number, or None for 1. None for other float kinds.
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
    if (
        validate is False and only_scaled(options, return_lse)
        and (found := fast_path.decode(
            q, k_pool, v_pool, seq_lens, k_scale, v_scale, options.get("sm_scale"), out, block_table
        )) is not None
    ):  # fmt: skip
        return found
    checked = check_options(options, return_lse, out)
    target = targets.of(k_pool)
    if target.chooses_stream:
        arrays = (q, k_pool, v_pool, block_table, seq_lens, out, k_scale, v_scale)
        asked = (return_lse, validate)
        return target.run(paged_decode_attention, *with_options(_DECODE, arrays, asked, options))
    validate = check_flag("validate", validate)
    pool = stored_pool(target, PAGED, k_pool, v_pool, (k_scale, v_scale))
    q = check_queries(target, q, int(pool.k.shape[1]), pool.head_dim, "num_seqs", "the pools")
    num_seqs = int(q.shape[0])
    starts = one_query_each(target.device_key, num_seqs)
    table = check_integers(target, "block_table", block_table, (num_seqs, "max_blocks"), _INT32)
    lens = _check_batch(
        target, pool, table, seq_lens, starts, num_seqs, validate=validate, decode=True
    )
    return attend(pool, table, q, lens, starts, checked, validate=validate)


def paged_prefill_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    *,
    out: Any = None,
    return_lse: bool | None = False,
    k_scale: Any = None,
    v_scale: Any = None,
    validate: bool | None = False,
    **options: Unpack[AttentionOptions],
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
    out, return_lse, **options
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
        If a sequence has more queries than tokens, but for `causal=False` and `ranges`, `cu_seqlens_q` are not prefix
        sums, or a shape does not fit.
    IndexError, UnsupportedDType, NotSupported, ValueError
        See `paged_decode_attention`.
    """
    checked = check_options(options, return_lse, out)
    target = targets.of(k_pool)
    if target.chooses_stream:
        arrays = (q, k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, out, k_scale, v_scale)
        asked = (return_lse, validate)
        return target.run(paged_prefill_attention, *with_options(_PREFILL, arrays, asked, options))
    validate = check_flag("validate", validate)
    pool = stored_pool(target, PAGED, k_pool, v_pool, (k_scale, v_scale))
    q = check_queries(target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens", "the pools")
    table = check_integers(target, "block_table", block_table, ("num_seqs", "max_blocks"), _INT32)
    starts = check_integers(target, "cu_seqlens_q", cu_seqlens_q, (int(table.shape[0]) + 1,))
    starts = target.index(starts, np.int64)
    lens = _check_batch(
        target, pool, table, seq_lens, starts, int(q.shape[0]), validate=validate, decode=False,
        free=is_free(checked),
    )  # fmt: skip
    return attend(pool, table, q, lens, starts, checked, validate=validate)


def cascade_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_table: Any,
    seq_lens: Any,
    shared_len: int,
    cu_seqlens_q: Any = None,
    *,
    return_lse: bool | None = False,
    k_scale: Any = None,
    v_scale: Any = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attend over paged pools where all sequences begin with the same tokens, which are read once for all of them.

    Parameters
    ----------
    q : array (num_tokens, num_q_heads, head_dim)
        The queries of all sequences, one after another.
    k_pool, v_pool, block_table, seq_lens
        See `paged_decode_attention`. Rows of the table begin with the same blocks; only the first row's blocks are
        read for the shared tokens.
    shared_len : int
        How many tokens are shared. All queries are later ones.
    cu_seqlens_q : int32 or int64 array (num_seqs + 1,), optional
        Prefix sums of the numbers of queries; one each if None.
    return_lse, k_scale, v_scale
        See `paged_decode_attention`.
    **options
        `sm_scale`, `logits_soft_cap` and `sinks`: see `numkv.AttentionOptions`. There are no windows.

    Returns
    -------
    out : array (num_tokens, num_q_heads, head_dim_v)
        In q's dtype.
    lse : float32 array (num_tokens, num_q_heads)
        Natural log of the sum of exponentials; only with `return_lse`.

    Raises
    ------
    IndexError
        If a query is one of the shared tokens, or blocks or lengths are out of range: on the CPU.
    ValueError
        If rows of the table begin with different blocks: on the CPU.
    DimensionMismatch, UnsupportedDType, NotSupported, TypeError
        See `paged_prefill_attention`.

    Notes
    -----
    Attention to the shared tokens and to the others is merged in float32 (float64 where K, V or q are). So results
    are those of `paged_prefill_attention` to rounding, and for a sequence always the same bits, whichever sequences
    come with it. To share pays from about eight sequences on; see perf/test_cascade.py.
    """
    checked = check_options(options, return_lse, takes=WITH_SINKS)
    target = targets.of(k_pool)
    if target.chooses_stream:
        arrays = (q, k_pool, v_pool, block_table, seq_lens, cu_seqlens_q, k_scale, v_scale)
        asked = (shared_len, return_lse)
        return target.run(cascade_attention, *with_options(_CASCADE, arrays, asked, options))
    shared = check_size("shared_len", shared_len, 0)
    pool = stored_pool(target, PAGED, k_pool, v_pool, (k_scale, v_scale))
    q = check_queries(target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens", "the pools")
    table = check_integers(target, "block_table", block_table, ("num_seqs", "max_blocks"), _INT32)
    num_seqs, num_tokens = int(table.shape[0]), int(q.shape[0])
    if cu_seqlens_q is None:
        cu_seqlens_q = one_query_each(target.device_key, num_seqs)
    starts = check_integers(target, "cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
    starts = target.index(starts, np.int64)
    lens = _check_batch(
        target, pool, table, seq_lens, starts, num_tokens, validate=False, decode=False
    )
    first = 0
    if target.values_on_host and num_tokens:
        _check_shared(table, lens, starts, shared, int(pool.k.shape[2]))
        first = int(np.diff(np.asarray(starts)).argmax()) if num_seqs else 0  # one that has queries
    prefixes = [Prefix(first, np.arange(num_tokens))] if num_tokens else []
    return attend_cascade(pool, table, q, lens, starts, checked, shared, prefixes)


def _check_shared(table: Array, lens: Array, starts: Array, shared: int, block_size: int) -> None:
    """Refuse queries among the shared tokens, and tables with different first blocks."""
    queries = np.diff(np.asarray(starts))
    first = (lens - queries)[queries > 0]
    if len(first) and first.min() < shared:
        raise IndexError(
            f"`shared_len`: expected at most the {first.min()} tokens before a sequence's queries, got {shared}"
        )
    blocks = -(-shared // block_size)
    used = table[queries > 0, :blocks]
    if len(used) and (used != used[0]).any():
        raise ValueError(
            f"`block_table`: expected the same {blocks} blocks at the beginning of all rows, which hold the "
            f"{shared} shared tokens, got others"
        )
