"""Attention over caches: decode, ragged prefill, and the merge of partial results.

All functions here and the ``decode_attention`` methods of caches and layers take the same options and go through
`attend`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from numkv import targets
from numkv.checks import Shape, check_array, check_integers, check_writable
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kernels import validate as values
from numkv.kinds import FLOAT_DTYPES, Kind, kind_of_dtype, kinds
from numkv.pool import Pool
from numkv.targets import Array, Target

__all__ = [
    "attend",
    "decode_attention",
    "merge_states",
    "prefill_attention",
]

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def attend(
    pool: Pool,
    block_table: Array,
    q: Array,
    seq_lens: Array,
    q_starts: Array,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    ranges: Array | None = None,
    by_slot: bool = False,
) -> Any:
    """Attend with checked queries over a pool; what every attention function and method ends in.

    Parameters
    ----------
    pool : Pool
        K and V; where they are rotated, queries are rotated too and the output is turned back.
    block_table : int32 array (num_seqs, max_blocks)
        Blocks of each sequence, or with `by_slot` the slots of its tokens.
    q : array (num_tokens, num_q_heads, head_dim)
        Queries, checked.
    seq_lens, q_starts : int array (num_seqs,), (num_seqs + 1,)
        Lengths, and where each sequence's queries start, checked.
    sm_scale, logits_soft_cap, window_left, sinks, return_lse, out
        See `decode_attention`.
    ranges : int64 array (num_tokens, 2), optional
        Tokens ``[low, high)`` that each query sees, counted along its sequence's row of `block_table`, in place of
        causality and `seq_lens`; an empty range gives 0 and -inf. With ranges, `window_left` is -1.
    by_slot : bool
        Whether `block_table` holds a slot, ``block * block_size + offset``, for each token instead of a block for
        every `block_size` tokens.

    Returns
    -------
    array or tuple of array
        The output, and the lse if asked for.
    """
    target = pool.target
    num_tokens, num_q_heads, head_dim = q.shape
    out_dtype = q.dtype
    q_kind = kind_of_dtype(out_dtype)
    assert q_kind is not None
    k_kind, v_kind = pool.k_kind, pool.v_kind
    names = (q_kind.name, k_kind.name, v_kind.name)  # compared faster than dtypes are
    compute: np.dtype[Any] = _FLOAT64 if "fp64" in names else _FLOAT32
    scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    if logits_soft_cap != 0 or window_left != -1:
        check_options(logits_soft_cap, window_left)
    if ranges is None:
        ranges = no_ranges(target.name)
    if sinks is None:
        sinks = _no_sinks(target.name, compute)
    else:
        sinks = target.reals("sinks", sinks, compute, (num_q_heads,))
    out_shape = (num_tokens, num_q_heads, pool.head_dim_v)
    if out is None:
        out = target.empty(out_shape, out_dtype)
    else:
        out = check_array(target, "out", out, (out_dtype,), out_shape)
        check_writable("out", out)
    # Over rotated values the result is rotated too, and is not rounded before it has been turned back.
    result = out
    if pool.v_rotation is not None and out_dtype != compute:
        result = target.empty(out_shape, compute)
    if pool.k_rotation is not None:
        q, q_kind = pool.k_rotation.forward(target, q, compute), kind_of_dtype(compute)
        assert q_kind is not None
    lse = target.empty((num_tokens, num_q_heads), _FLOAT32)
    target.ops.attention(
        target.words(q), q_kind.name, pool.k, k_kind.name, pool.k_scale, pool.v,
        v_kind.name, pool.v_scale, block_table, seq_lens, q_starts, ranges, int(by_slot),
        scale, float(logits_soft_cap), int(window_left), sinks, target.words(result), lse,
    )  # fmt: skip
    if pool.v_rotation is not None:
        pool.v_rotation.backward(target, result, out_dtype, out)
    return (out, lse) if return_lse else out


def check_options(logits_soft_cap: float, window_left: int) -> None:
    """Check the values of options that are numbers."""
    if logits_soft_cap is None or logits_soft_cap < 0 or not math.isfinite(logits_soft_cap):
        raise ValueError(
            f"`logits_soft_cap`: expected a finite number, 0 for none, got {logits_soft_cap!r}"
        )
    if window_left < -1:
        raise ValueError(
            f"`window_left`: expected a number of earlier tokens, or -1 for all, got {window_left}"
        )


@functools.cache
def no_ranges(target: str) -> Array:
    """Ranges for queries that have none."""
    return targets.get(target).empty((0, 2), np.int64)


@functools.cache
def _no_sinks(target: str, dtype: np.dtype[Any]) -> Array:
    return targets.get(target).empty((0,), dtype)


@functools.lru_cache(maxsize=64)
def one_block_each(target: str, num_seqs: int) -> Array:
    """The block table of a contiguous cache: sequence b has block b."""
    return targets.get(target).index(np.arange(num_seqs)[:, None], np.int32)


@functools.lru_cache(maxsize=64)
def one_query_each(target: str, num_seqs: int) -> Array:
    """Where queries start when each sequence has one."""
    return targets.get(target).index(np.arange(num_seqs + 1), np.int64)


@functools.lru_cache(maxsize=64)
def one_sequence(target: str, num_tokens: int) -> Array:
    """Where queries start, and end, when all are of one sequence."""
    return targets.get(target).index(np.array([0, num_tokens]), np.int64)


@functools.lru_cache(maxsize=64)
def one_length(target: str, length: int) -> Array:
    """The length of one sequence, as kernels take it; all layers of a step ask for the same."""
    return targets.get(target).index(np.array([length]), np.int64)


def check_group(num_q_heads: int, num_kv_heads: int) -> None:
    """Refuse q heads that cannot be shared out over the kv heads."""
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise DimensionMismatch(
            f"`q`: expected a number of q heads that is a multiple of num_kv_heads={num_kv_heads}, "
            f"got {num_q_heads}",
            expected=num_kv_heads,
            actual=num_q_heads,
        )


def check_queries(target: Target, q: Any, num_kv_heads: int, head_dim: int, rows: str) -> Array:
    """Check the queries of a decode or prefill."""
    shape: tuple[int, ...] = q.shape if type(q) is np.ndarray and target.name == "cpu" else ()
    if (  # nothing to say about most, which takes a quarter of the time
        len(shape) == 3 and shape[2] == head_dim and q.strides[2] == q.itemsize and q.flags.aligned
        and kind_of_dtype(q.dtype) is not None and num_kv_heads and shape[1] % num_kv_heads == 0
    ):  # fmt: skip
        return q
    q = check_array(target, "q", q, FLOAT_DTYPES, (rows, "num_q_heads", head_dim))
    check_group(q.shape[1], num_kv_heads)
    return q


def check_lengths(
    target: Target, seq_lens: Array, q_starts: Array, num_tokens: int, capacity: int,
    *, validate: bool, decode: bool,
) -> None:  # fmt: skip
    """Check the values of lengths and query starts, where that is free or asked for."""
    if target.name != "cpu":
        if not validate:
            return
        seq_lens = target.to_host(seq_lens).astype(np.int64)
        q_starts = target.to_host(q_starts).astype(np.int64)
    elif decode and len(seq_lens) == 1 and 0 <= seq_lens[0] <= capacity:
        return  # of one, that is faster than a call of compiled code
    found, b = values.check_lengths(seq_lens, q_starts, num_tokens, capacity, decode)
    if found == values.FINE:
        return
    if found == values.BAD_LENGTH:
        raise IndexError(
            f"`seq_lens`: expected lengths in [0, {capacity}], got {seq_lens[b]} for sequence {b}"
        )
    if found == values.BAD_STARTS:
        raise DimensionMismatch(
            "`cu_seqlens_q`: expected prefix sums that start with 0, never fall and end with "
            f"num_tokens={num_tokens}, got {np.asarray(q_starts).tolist()}",
            expected=num_tokens,
            actual=int(q_starts[-1]),
        )
    queries = int(q_starts[b + 1] - q_starts[b])
    raise too_many_queries(queries, int(seq_lens[b]), f" of sequence {b}")


def too_many_queries(queries: int, length: int, where: str = "") -> DimensionMismatch:
    """The error for more queries than tokens: each query is one of the cached tokens."""
    return DimensionMismatch(
        f"`q`: expected at most as many queries as cached tokens{where}, {length}, got {queries}; "
        "append the queries' own tokens first",
        expected=length,
        actual=queries,
    )


_CODES = {k.word: k for k in kinds() if k.has_scales}
_STORED = (*FLOAT_DTYPES, *_CODES)


def stored_pool(
    target: Target, names: tuple[str, str], k: Any, v: Any, scales: tuple[Any, Any], shape: Shape
) -> Pool:
    """Check K and V buffers that a caller passes, with their scales where they hold codes.

    `shape` names sizes of K that the caller is free to choose.
    """
    if (  # nothing to say about most, which takes a quarter of the time
        type(k) is type(v) is np.ndarray and target.name == "cpu" and k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3] and scales[0] is None and scales[1] is None
        and k.strides[3] == k.itemsize and v.strides[3] == v.itemsize
        and k.flags.aligned and v.flags.aligned
    ):  # fmt: skip
        of_k, of_v = kind_of_dtype(k.dtype), kind_of_dtype(v.dtype)
        if of_k is not None and of_v is not None:
            none = _no_scale(target.name)
            return Pool(target, target.words(k), target.words(v), of_k, of_v, none, none)
    k = check_array(target, names[0], k, _STORED, shape)
    v = check_array(target, names[1], v, _STORED, (*k.shape[:3], "head_dim_v"))
    k_kind, k_scale = _stored_kind(target, "k_scale", k, scales[0])
    v_kind, v_scale = _stored_kind(target, "v_scale", v, scales[1])
    return Pool(target, target.words(k), target.words(v), k_kind, v_kind, k_scale, v_scale)


def _stored_kind(target: Target, name: str, x: Array, scale: Any) -> tuple[Kind, Array]:
    """The kind of a buffer, and the words of its scales; floats have none, codes need them."""
    found = kind_of_dtype(x.dtype)
    if found is not None:
        if scale is not None:
            raise NotSupported(
                f"`{name}`: expected None for {found} storage, got an array; scales belong to "
                "quantised kinds"
            )
        return found, _no_scale(target.name)
    found = _CODES[x.dtype]
    rows, dim = tuple(int(n) for n in x.shape[:3]), int(x.shape[3]) * found.elements_per_word
    shape = found.scale_shape(rows, dim)
    if scale is None:
        raise DimensionMismatch(
            f"`{name}`: expected {found.scale_dtype} {shape} for {found} storage, got None",
            expected=shape,
        )
    return found, target.words(check_array(target, name, scale, (found.scale_dtype,), shape))


@functools.cache
def _no_scale(target: str) -> Array:
    return targets.get(target).empty((0, 0, 0), _FLOAT32)


def _contiguous_pool(target: Target, k: Any, v: Any, scales: tuple[Any, Any]) -> Pool:
    """Check the buffers of a contiguous cache."""
    shape = ("num_seqs", "num_kv_heads", "capacity", "head_dim")
    return stored_pool(target, ("k", "v"), k, v, scales, shape)


def decode_attention(
    q: Any,
    k: Any,
    v: Any,
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
    """Attend with one query per sequence over a contiguous cache.

    Parameters
    ----------
    q : array (num_seqs, num_q_heads, head_dim)
        The newest token's query of each sequence; fp16, bf16, fp32 or fp64, whatever the cache is. Q head h reads
        kv head ``h // (num_q_heads // num_kv_heads)``.
    k : array (num_seqs, num_kv_heads, capacity, head_dim)
        Cached keys, of any float kind, or int8 or int4 codes (two to a byte). Slots past a sequence's length are never
        read.
    v : array (num_seqs, num_kv_heads, capacity, head_dim_v)
        Cached values.
    seq_lens : int32 or int64 array (num_seqs,)
        Tokens in the cache, the query's own included. An empty sequence gives 0 and -inf.
    sm_scale : float, optional
        What scores are multiplied by; ``1 / sqrt(head_dim)`` if None.
    logits_soft_cap : float
        Scores become ``cap * tanh(score / cap)``, after scaling; 0 for no cap.
    window_left : int
        Earlier tokens that a query sees beside its own; -1 for all of them.
    sinks : array (num_q_heads,), optional
        Extra scores that join the denominator only.
    return_lse : bool
        Whether to return the log of the sum of exponentials too.
    out : array (num_seqs, num_q_heads, head_dim_v), optional
        Takes the output; of q's dtype.
    k_scale, v_scale : array, optional
        Scales of codes: of int8 float32 ``(num_seqs, num_kv_heads, capacity)``, of int4 bfloat16
        ``(num_seqs, num_kv_heads, capacity, ceil(head_dim / 32))``. None for float kinds.
    validate : bool
        On CUDA, check the values of `seq_lens` too, which waits for the device. On the CPU they are always checked.

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

    Notes
    -----
    The result for a sequence does not depend on the batch or on the number of threads.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> k = np.ones((1, 2, 16, 8), np.float32)
    >>> v = np.arange(16, dtype=np.float32)[:, None] + np.zeros((1, 2, 16, 8), np.float32)
    >>> numkv.decode_attention(np.ones((1, 4, 8), np.float32), k, v, [3])[0, 0, 0]  # mean of 0, 1, 2
    np.float32(1.0)
    """
    target = targets.of(k)
    pool = _contiguous_pool(target, k, v, (k_scale, v_scale))
    num_seqs, num_kv_heads, capacity, _ = pool.k.shape
    q = check_queries(target, q, num_kv_heads, pool.head_dim, "num_seqs")
    if q.shape[0] != num_seqs:
        raise DimensionMismatch(
            f"`q`: expected one query for each of the {num_seqs} sequences of `k`, got {q.shape[0]}",
            expected=num_seqs,
            actual=q.shape[0],
        )
    lens = target.index(check_integers(target, "seq_lens", seq_lens, (num_seqs,)), np.int64)
    starts = one_query_each(target.name, num_seqs)
    check_lengths(target, lens, starts, num_seqs, capacity, validate=validate, decode=True)
    return attend(
        pool, one_block_each(target.name, num_seqs), q, lens, starts, sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap, window_left=window_left, sinks=sinks,
        return_lse=return_lse, out=out,
    )  # fmt: skip


def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
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
    sm_scale, logits_soft_cap, window_left, sinks, return_lse, out, k_scale, v_scale, validate
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
        If a sequence has more queries than tokens, `cu_seqlens_q` are not prefix sums, or a shape does not fit.
    UnsupportedDType, NotSupported, IndexError
        See `decode_attention`.
    """
    target = targets.of(k)
    pool = _contiguous_pool(target, k, v, (k_scale, v_scale))
    num_seqs, num_kv_heads, capacity, _ = pool.k.shape
    q = check_queries(target, q, num_kv_heads, pool.head_dim, "num_tokens")
    lens = target.index(check_integers(target, "seq_lens", seq_lens, (num_seqs,)), np.int64)
    starts = check_integers(target, "cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
    starts = target.index(starts, np.int64)
    check_lengths(target, lens, starts, q.shape[0], capacity, validate=validate, decode=False)
    return attend(
        pool, one_block_each(target.name, num_seqs), q, lens, starts, sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap, window_left=window_left, sinks=sinks,
        return_lse=return_lse, out=out,
    )  # fmt: skip


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
    A sink belongs into one of the parts only. Source: Ye et al., "Cascade Inference" (FlashInfer, 2024), but with
    natural logs.
    """
    target = targets.of(o_a)
    shape = ("num_tokens", "num_q_heads", "head_dim_v")
    o_a = check_array(target, "o_a", o_a, FLOAT_DTYPES, shape)
    o_b = check_array(target, "o_b", o_b, (o_a.dtype,), tuple(o_a.shape))
    lse_a = check_array(target, "lse_a", lse_a, (_FLOAT32,), tuple(o_a.shape[:2]))
    lse_b = check_array(target, "lse_b", lse_b, (_FLOAT32,), tuple(o_a.shape[:2]))
    out = target.empty(tuple(o_a.shape), o_a.dtype)
    lse = target.empty(tuple(o_a.shape[:2]), _FLOAT32)
    o_kind = kind_of_dtype(o_a.dtype)
    assert o_kind is not None
    target.ops.merge(
        target.words(o_a), lse_a, target.words(o_b), lse_b, o_kind.name, target.words(out), lse
    )
    return out, lse
