"""The single entry to attention, which every function and method ends in, and the checks of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from numkv import targets
from numkv.arrays import Array, may_share_memory
from numkv.attention.options import CheckedOptions
from numkv.attention.sight import lay_out
from numkv.checks import check_apart, check_array, check_writable, is_plain
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kernels import validate as values
from numkv.kinds import QUERY_DTYPES, compute_dtype, float_kind, kind_of_dtype
from numkv.storage.pool import Pool
from numkv.targets.base import Target

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def attend(
    pool: Pool,
    block_table: Array,
    q: Array,
    seq_lens: Array,
    q_starts: Array,
    options: CheckedOptions,
    *,
    ranges: Array | None = None,
    by_slot: bool = False,
    validate: bool = False,
) -> Any:
    """Attend with checked queries over a pool. Every attention function and method ends here.

    Parameters
    ----------
    pool : Pool
        K and V. Where they are rotated, the queries are rotated too, and the rotation of the output is undone.
    block_table : int32 array (num_seqs, max_blocks)
        Blocks of each sequence, or with `by_slot` the slots of its tokens.
    q : array (num_tokens, num_q_heads, head_dim)
        Queries, checked.
    seq_lens, q_starts : int array (num_seqs,), (num_seqs + 1,)
        Lengths, and where each sequence's queries start; checked.
    options : CheckedOptions
        From `check_options`; `sinks` and `out` are checked here.
    ranges : int64 array (num_tokens, 2), optional
        Visible range ``[low, high)`` of each query, counted along its sequence's table, in place of causality and
        `seq_lens`. An empty range gives 0 and -inf. With ranges, `window_left` is -1.
    by_slot : bool
        Whether `block_table` holds a slot, ``block * block_size + offset``, for each token instead of a block for
        every `block_size` tokens.
    validate : bool
        Whether the values of sinks are checked if that waits for the device.

    Returns
    -------
    array or tuple of array
        The output, and the lse if asked for.
    """
    target, (num_tokens, num_q_heads, _) = pool.target, q.shape
    if options.out is not None or options.sinks is not None:
        tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": q_starts}
        options = check_call(q, options, (pool,), tables, validate)
    if options.sight is not None:
        capacity = int(block_table.shape[1]) * (1 if by_slot else int(pool.k.shape[2]))
        compute = _compute_of(pool, q.dtype)
        sinks = no_sinks(target.key, compute) if options.sinks is None else options.sinks
        ranges, sinks = lay_out(
            target, options.sight, seq_lens, q_starts, capacity, options.window_left, sinks, num_tokens, num_q_heads,
            options.out, validate=validate,
        )  # fmt: skip
        options = options._replace(sinks=sinks, window_left=-1, sight=None)
    return run(pool, block_table, q, seq_lens, q_starts, options, ranges=ranges, by_slot=by_slot)


def run(
    pool: Pool,
    block_table: Array,
    q: Array,
    seq_lens: Array,
    q_starts: Array,
    options: CheckedOptions,
    *,
    ranges: Array | None = None,
    by_slot: bool = False,
) -> Any:
    """Attend as `attend` does, without checks, with options from `check_call`, none of which is a mask."""
    k, v = pool.k_buffer, pool.v_buffer
    target, out_dtype, compute = k.target, q.dtype, _compute_of(pool, q.dtype)
    num_tokens, num_q_heads, head_dim = q.shape
    q_kind = float_kind(out_dtype)
    scale = options.scale(head_dim)
    _, logits_soft_cap, window_left, sinks, return_lse, out, _ = options
    if ranges is None:
        ranges = no_ranges(target.key)
    if sinks is None:
        sinks = no_sinks(target.key, compute)
    if out is None:
        out = target.empty((num_tokens, num_q_heads, v.dim), out_dtype)
    # With rotated values the result is rotated too; it is rounded only after the inverse rotation.
    result = out
    if v.rotation is not None and out_dtype != compute:
        result = target.empty(out.shape, compute)
    if k.rotation is not None:
        q, q_kind = k.rotation.forward(target, q, compute), float_kind(compute)
    if return_lse or target.values_on_host:
        lse = target.empty((num_tokens, num_q_heads), _FLOAT32)
    else:
        lse = _no_lse(target.key)
    if num_tokens and num_q_heads:
        target.ops.attend(
            target.words(q), q_kind.name, k.words, k.kind.name, k.scales, v.words,
            v.kind.name, v.scales, block_table, seq_lens, q_starts, ranges, by_slot,
            scale, logits_soft_cap, window_left, sinks, target.words(result), lse,
        )  # fmt: skip
        if v.rotation is not None:
            v.rotation.backward(target, result, out_dtype, out)
    return (out, lse) if return_lse else out


def check_call(
    q: Array, options: CheckedOptions, pools: Sequence[Pool], tables: dict[str, Array], validate: bool = False
) -> CheckedOptions:  # fmt: skip
    """Check the arrays of options, except those of `sight`, for `run`.

    Parameters
    ----------
    q : array (num_tokens, num_q_heads, head_dim)
        Queries, checked.
    options : CheckedOptions
        From `check_options`.
    pools : sequence of Pool
        The pools to read; the first one has the sinks of the softmax.
    tables : dict of str to array
        Further arrays that are read, by name.
    validate : bool
        Whether the values of sinks are checked if that waits for the device.

    Returns
    -------
    CheckedOptions
    """
    target, sinks, out = pools[0].target, options.sinks, options.out
    if sinks is not None:
        sinks = check_sinks(
            target, sinks, _compute_of(pools[0], q.dtype), int(q.shape[1]), validate
        )
        tables = {**tables, "sinks": sinks}
    if out is not None:
        out = check_out(out, q, pools, tables)
    scale, cap, window_left, _, return_lse, _, sight = options
    return tuple.__new__(CheckedOptions, (scale, cap, window_left, sinks, return_lse, out, sight))


def check_out(out: Any, q: Array, pools: Sequence[Pool], tables: dict[str, Array]) -> Array:
    """Return an array for the output that shares no memory with inputs, except that it may be the queries."""
    target, (tokens, heads, _) = pools[0].target, q.shape
    shape = tokens, heads, pools[0].v_buffer.dim
    if (
        type(out) is np.ndarray and out.shape == shape and out.dtype == q.dtype
        and out.flags.carray and target.values_on_host
    ):  # fmt: skip
        near = out is not q and may_share_memory(out, q)
        for x in tables.values():
            near = near or may_share_memory(out, x)
        for pool in pools:
            for of in (pool.k_buffer, pool.v_buffer):
                near = near or may_share_memory(out, of.words)
                near = near or (of.kind.is_scaled and may_share_memory(out, of.scales))
        if not near:
            return out
    checked: Array = check_array(target, "out", out, (q.dtype,), shape)
    check_writable("out", checked)
    for pool in pools:
        read = {"k": pool.k_buffer.words, "v": pool.v_buffer.words}
        for name, of in (("k_scale", pool.k_buffer), ("v_scale", pool.v_buffer)):
            if of.kind.is_scaled:
                read[name] = of.scales
        check_apart(target, {"out": checked}, {**read, **tables})
    if checked is not q and target.share_memory(checked, q) and not target.same_memory(checked, q):
        raise NotSupported(
            "`out`: expected `q` itself or memory of its own, got a part of the memory of `q`, or its elements in "
            "another order; pass q, or another array"
        )
    return checked


def _compute_of(pool: Pool, q: np.dtype[Any]) -> np.dtype[Any]:
    """Return the float type in which attention computes, for queries of a dtype over a pool."""
    return _FLOAT64 if q == _FLOAT64 else compute_dtype(pool.k_kind.name, pool.v_kind.name)


def check_sinks(
    target: Target, sinks: Any, compute: np.dtype[Any], num_q_heads: int, validate: bool
) -> Array:
    """Sink logits on the target; none is NaN or infinite, but for -inf, which is no sink."""
    checked: Array = target.reals("sinks", sinks, compute, (num_q_heads,))
    if num_q_heads and (target.values_on_host or validate):
        largest = target.to_host(checked).max()  # NaN if one is
        if not largest < np.inf:
            raise ValueError(
                f"`sinks`: expected finite numbers, or -inf for no sink, got {largest}"
            )
    return checked


@functools.cache
def no_ranges(target: str) -> Array:
    """Ranges for queries that have none."""
    return targets.by_key(target).empty((0, 2), np.int64)


@functools.cache
def _no_lse(target: str) -> Array:
    """Return CUDA kernels' placeholder for an lse that is not asked for."""
    return targets.by_key(target).empty((0, 0), _FLOAT32)


@functools.cache
def no_sinks(target: str, dtype: np.dtype[Any]) -> Array:
    """What stands for no sinks in a computing dtype."""
    return targets.by_key(target).empty((0,), dtype)


def check_group(num_q_heads: int, num_kv_heads: int, given: str = "", num_tokens: int = 0) -> None:
    """Refuse q heads that cannot be shared out over the kv heads.

    `given` names the arrays of keys and values where the caller has passed them, and not a cache.
    """
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        if given:
            remedy = (
                f"give every kv head as many q heads, and check that {given} have their heads before their tokens: "
                "caches are head-major, of another order pass a view with swapaxes"
            )
        elif num_kv_heads and num_tokens and num_tokens % num_kv_heads == 0:
            remedy = "q is (tokens, q heads, dim): if its heads come first, pass q.swapaxes(0, 1)"
        else:
            remedy = (
                "the cache was made with so many kv heads, and each serves as many q heads: pass the queries of all "
                "heads, or make the cache with the model's num_kv_heads"
            )
        raise DimensionMismatch(
            f"`q`: expected a number of q heads that is a multiple of num_kv_heads={num_kv_heads}, "
            f"got {num_q_heads}; {remedy}",
            expected=num_kv_heads,
            actual=num_q_heads,
        )


def check_queries(
    target: Target, q: Any, num_kv_heads: int, head_dim: int, rows: str, given: str = ""
) -> Array:
    """Check the queries of a decode or prefill; see `check_group` for `given`."""
    if (
        target.values_on_host and is_plain(q, 3) and q.shape[2] == head_dim
        and num_kv_heads and q.shape[1] % num_kv_heads == 0 and kind_of_dtype(q.dtype) is not None
    ):  # fmt: skip
        plain: Array = q
        return plain
    checked: Array = check_array(target, "q", q, QUERY_DTYPES, (rows, "num_q_heads", head_dim))
    check_group(checked.shape[1], num_kv_heads, given, checked.shape[0])
    return checked


def check_lengths(
    target: Target, seq_lens: Array, q_starts: Array, num_tokens: int, capacity: int,
    *, validate: bool, decode: bool, free: bool = False,
) -> None:  # fmt: skip
    """Check the values of lengths and query starts: on the CPU always, on CUDA if asked for.

    If `free`, queries need not be cached tokens, so there may be more of them.
    """
    if not target.values_on_host:
        if not validate:
            return
        seq_lens = target.to_host(seq_lens).astype(np.int64)
        q_starts = target.to_host(q_starts).astype(np.int64)
    elif decode and len(seq_lens) == 1 and 0 <= seq_lens[0] <= capacity:
        return  # for one sequence this is faster than a call of compiled code
    found, b = values.check_lengths(seq_lens, q_starts, num_tokens, capacity, decode)
    if found == values.TOO_MANY_QUERIES and free:
        found, b = _check_free(seq_lens, q_starts, capacity)
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
    queries = int(q_starts[b + 1]) - int(q_starts[b])
    raise too_many_queries(queries, int(seq_lens[b]), f" of sequence {b}")


def _check_free(seq_lens: Any, q_starts: Any, capacity: int) -> tuple[int, int]:
    """As `numkv.kernels.validate.check_lengths`, but that there may be more queries than tokens."""
    for wrong, finding in (
        (np.diff(q_starts) < 0, values.BAD_STARTS),
        ((seq_lens < 0) | (seq_lens > capacity), values.BAD_LENGTH),
    ):
        if wrong.any():
            return finding, int(wrong.argmax())
    return values.FINE, -1


def check_blocks(
    name: str, table: Any, lens: Any, block_size: int, num_blocks: int, where: str = "for sequence"
) -> None:
    """Refuse rows of a table, on the host, that name blocks below their lengths which no pool has."""
    b = values.first_unfit(table, lens, block_size, num_blocks)
    if b >= 0:
        used = table[b, : -(-int(lens[b]) // block_size)].tolist()
        raise IndexError(
            f"`{name}`: expected blocks in [0, {num_blocks}) up to each length, got {used} {where} {b}"
        )


def too_many_queries(queries: int, length: int, where: str = "") -> DimensionMismatch:
    """Return the error for more queries than tokens: each query is one of the cached tokens."""
    return DimensionMismatch(
        f"`q`: expected at most as many queries as cached tokens{where}, {length}, got {queries}; "
        "append the queries' own tokens first; those without tokens take `ranges`, or `causal=False` without a mask",
        expected=length,
        actual=queries,
    )
