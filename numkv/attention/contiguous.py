"""Attention over contiguous caches: decode, ragged prefill, and the merge of partial results."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from numkv import targets
from numkv.arrays import Array
from numkv.attention import fast_path
from numkv.attention.attend import attend, check_lengths, check_queries
from numkv.attention.options import (
    AttentionOptions,
    check_options,
    is_free,
    only_scaled,
    with_options,
)
from numkv.checks import check_array, check_integers
from numkv.errors import DimensionMismatch
from numkv.kinds import QUERY_DTYPES, float_kind
from numkv.numbers import check_flag
from numkv.storage.tables import one_block_each, one_query_each
from numkv.storage.user_buffers import CONTIGUOUS, stored_pool
from numkv.targets.call import Call

_FLOAT32 = np.dtype(np.float32)
_DECODE = Call("q k v seq_lens out k_scale v_scale", "return_lse validate", "out")
_PREFILL = Call("q k v seq_lens cu_seqlens_q out k_scale v_scale", "return_lse validate", "out")
_MERGE = Call("o_a lse_a o_b lse_b", "")


def decode_attention(
    q: Any,
    k: Any,
    v: Any,
    seq_lens: Any,
    *,
    out: Any = None,
    return_lse: bool | None = False,
    k_scale: Any = None,
    v_scale: Any = None,
    validate: bool | None = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attend with one query per sequence over a contiguous cache.

    Parameters
    ----------
    q : array (num_seqs, num_q_heads, head_dim)
        The newest token's query of each sequence; fp16, bf16, fp32 or fp64, whatever the cache is. Q head h reads
        kv head ``h // (num_q_heads // num_kv_heads)``.
    k : array (num_seqs, num_kv_heads, capacity, head_dim)
        Cached keys, of any float kind, or codes. int8 stores one code an element, int4 and code4 two a byte, code6
        eight in three int16. Slots past a sequence's length are never read.
    v : array (num_seqs, num_kv_heads, capacity, head_dim_v)
        Cached values.
    seq_lens : int32 or int64 array (num_seqs,)
        Tokens in the cache, the query's own included. An empty sequence gives 0 and -inf.
    out : array (num_seqs, num_q_heads, head_dim_v), optional
        Takes the output; of q's dtype. It may be `q` itself, and else shares no memory with what is read.
    return_lse : bool
        Whether to return the log of the sum of exponentials too.
    k_scale, v_scale : array, optional
        Scales of stored elements. int8, code4 and code6: float32 ``(num_seqs, num_kv_heads, capacity)``. int4: bfloat16
        ``(num_seqs, num_kv_heads, capacity, ceil(head_dim / 32))``. fp8: float32 ``(num_kv_heads,)``, a number, or None
        for 1. Other float kinds: None.
    validate : bool
        On CUDA, check the values of `seq_lens` and `sinks` too, which waits for the device. On the CPU they are always
        checked.
    **options
        How scores are made, and what queries see: see `numkv.AttentionOptions`.

    Returns
    -------
    out : array (num_seqs, num_q_heads, head_dim_v)
        In q's dtype; accumulated in float32, in float64 where the cache or q is.
    lse : float32 array (num_seqs, num_q_heads)
        Natural log; only with `return_lse`.

    Raises
    ------
    DimensionMismatch, UnsupportedDType, NotSupported
        If an array has another shape, dtype, layout or target.
    IndexError
        If a length is negative or above the capacity.
    ValueError, TypeError
        If an option has another value or type; see docs/arguments.md.

    Notes
    -----
    The result for a sequence does not depend on the batch or on the number of threads. Scores that no float32 holds
    (float64, where that is computed in) make their own row NaN and no other.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> k = np.ones((1, 2, 16, 8), np.float32)
    >>> v = np.arange(16, dtype=np.float32)[:, None] + np.zeros((1, 2, 16, 8), np.float32)
    >>> numkv.decode_attention(np.ones((1, 4, 8), np.float32), k, v, [3])[0, 0, 0]  # mean of 0, 1, 2
    np.float32(1.0)
    """
    if (
        validate is False and only_scaled(options, return_lse)
        and (found := fast_path.decode(
            q, k, v, seq_lens, k_scale, v_scale, options.get("sm_scale"), out
        )) is not None
    ):  # fmt: skip
        return found
    checked = check_options(options, return_lse, out)
    target = targets.of(k)
    if target.chooses_stream:
        arrays, asked = (q, k, v, seq_lens, out, k_scale, v_scale), (return_lse, validate)
        return target.run(decode_attention, *with_options(_DECODE, arrays, asked, options))
    validate = check_flag("validate", validate)
    pool = stored_pool(target, CONTIGUOUS, k, v, (k_scale, v_scale))
    num_seqs, num_kv_heads, capacity, _ = pool.k_buffer.words.shape
    head_dim = pool.k_buffer.dim
    q = check_queries(target, q, num_kv_heads, head_dim, "num_seqs", "`k` and `v`")
    if q.shape[0] != num_seqs:
        raise DimensionMismatch(
            f"`q`: expected one query for each of the {num_seqs} sequences of `k`, got {q.shape[0]}; "
            "for several of each use prefill_attention, with cu_seqlens_q",
            expected=num_seqs,
            actual=q.shape[0],
        )
    lens = target.index(check_integers(target, "seq_lens", seq_lens, (num_seqs,)), np.int64)
    starts = one_query_each(target.device_key, num_seqs)
    check_lengths(target, lens, starts, num_seqs, capacity, validate=validate, decode=True)
    table = one_block_each(target.device_key, num_seqs)
    return attend(pool, table, q, lens, starts, checked, validate=validate)


def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
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
    """Attend with any number of queries per sequence over a contiguous cache; causal, bottom-right aligned.

    A sequence with T queries and length n has query i at position ``n - T + i``; it sees that position and
    earlier ones.

    Parameters
    ----------
    q : array (num_tokens, num_q_heads, head_dim)
        The queries of all sequences, one after another.
    k, v : array (num_seqs, num_kv_heads, capacity, head_dim)
        See `decode_attention`.
    seq_lens : int32 or int64 array (num_seqs,)
        Tokens in the cache, the queries' own included.
    cu_seqlens_q : int32 or int64 array (num_seqs + 1,)
        Prefix sums of the numbers of queries: sequence b has the queries ``[cu_seqlens_q[b], cu_seqlens_q[b + 1])``.
    out, return_lse, k_scale, v_scale, validate, **options
        See `decode_attention`.

    Returns
    -------
    out : array (num_tokens, num_q_heads, head_dim_v)
        In q's dtype.
    lse : float32 array (num_tokens, num_q_heads)
        Natural log; only with `return_lse`.

    Raises
    ------
    DimensionMismatch
        If a sequence has more queries than tokens, but for `causal=False` and `ranges`, `cu_seqlens_q` are not prefix
        sums, or a shape does not fit.
    UnsupportedDType, NotSupported, IndexError
        See `decode_attention`.
    """
    checked = check_options(options, return_lse, out)
    target = targets.of(k)
    if target.chooses_stream:
        arrays = (q, k, v, seq_lens, cu_seqlens_q, out, k_scale, v_scale)
        asked = (return_lse, validate)
        return target.run(prefill_attention, *with_options(_PREFILL, arrays, asked, options))
    validate = check_flag("validate", validate)
    pool = stored_pool(target, CONTIGUOUS, k, v, (k_scale, v_scale))
    num_seqs, num_kv_heads, capacity, _ = pool.k_buffer.words.shape
    head_dim = pool.k_buffer.dim
    q = check_queries(target, q, num_kv_heads, head_dim, "num_tokens", "`k` and `v`")
    lens = target.index(check_integers(target, "seq_lens", seq_lens, (num_seqs,)), np.int64)
    starts = check_integers(target, "cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
    starts = target.index(starts, np.int64)
    check_lengths(
        target, lens, starts, q.shape[0], capacity, validate=validate, decode=False,
        free=is_free(checked),
    )  # fmt: skip
    return attend(
        pool,
        one_block_each(target.device_key, num_seqs),
        q,
        lens,
        starts,
        checked,
        validate=validate,
    )


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Array, Array]:
    """Merge two attention results over disjoint parts of the same KV range.

    Parameters
    ----------
    o_a, o_b : array (num_tokens, num_q_heads, head_dim_v)
        Outputs over the two parts.
    lse_a, lse_b : float32 array (num_tokens, num_q_heads)
        Their natural logs of sums of exponentials.

    Returns
    -------
    out : array (num_tokens, num_q_heads, head_dim_v)
        What attention over both parts gives. Rows that saw nothing in either part are 0.
    lse : float32 array (num_tokens, num_q_heads)
        Its log of the sum of exponentials.

    Raises
    ------
    DimensionMismatch, UnsupportedDType, NotSupported
        If an array has another shape, dtype, layout or target.

    Notes
    -----
    A sink belongs into one of the parts only. A part whose lse is infinite outweighs one whose lse is not, and two of
    them count equally; NaN stays NaN. Source: Ye et al., "Cascade Inference" (FlashInfer, 2024), but with natural
    logs.
    """
    target = targets.of(o_a)
    if target.chooses_stream:
        merged: tuple[Array, Array] = target.run(merge_states, _MERGE, (o_a, lse_a, o_b, lse_b), ())
        return merged
    shape = ("num_tokens", "num_q_heads", "head_dim_v")
    o_a = check_array(target, "o_a", o_a, QUERY_DTYPES, shape)
    o_b = check_array(target, "o_b", o_b, (o_a.dtype,), tuple(o_a.shape))
    lse_a = check_array(target, "lse_a", lse_a, (_FLOAT32,), tuple(o_a.shape[:2]))
    lse_b = check_array(target, "lse_b", lse_b, (_FLOAT32,), tuple(o_a.shape[:2]))
    out = target.empty(tuple(o_a.shape), o_a.dtype)
    lse, o_kind = target.empty(tuple(o_a.shape[:2]), _FLOAT32), float_kind(o_a.dtype).name
    target.ops.merge_states(
        target.words(o_a), lse_a, target.words(o_b), lse_b, o_kind, target.words(out), lse
    )
    return out, lse
