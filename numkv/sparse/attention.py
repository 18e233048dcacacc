"""Attention over blocks chosen for each kv head, and over chosen tokens."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from numkv import targets
from numkv.arrays import Array
from numkv.attention.attend import (
    attend,
    check_call,
    check_lengths,
    check_out,
    check_queries,
    check_sinks,
    run,
)
from numkv.attention.options import (
    SCORES,
    WITH_SINKS,
    AttentionOptions,
    CheckedOptions,
    check_options,
    with_options,
)
from numkv.attention.parts import gathered, merged
from numkv.checks import check_array, check_integers
from numkv.errors import DimensionMismatch, NotSupported
from numkv.numbers import check_flag
from numkv.sparse.choice import check_numbers, look_at_table, too_many_parts
from numkv.storage.buffer import Buffer
from numkv.storage.pool import Pool
from numkv.storage.tables import one_query_each
from numkv.storage.user_buffers import PAGED, stored_pool
from numkv.targets.base import Target
from numkv.targets.call import Call

_INT32 = (np.dtype(np.int32),)
_OPTIONS = "return_lse validate"
_BLOCKS = Call("q k_pool v_pool tables seq_lens out k_scale v_scale", _OPTIONS, "out")
_TOKENS = Call("q k_pool v_pool slots counts out k_scale v_scale", _OPTIONS, "out")


def sparse_decode_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    tables: Any,
    seq_lens: Any,
    *,
    out: Any = None,
    return_lse: bool | None = False,
    k_scale: Any = None,
    v_scale: Any = None,
    validate: bool | None = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attend with one query per sequence over a separate list of blocks for each kv head.

    Attention is exact over these blocks. They may be a choice (`choose_blocks`), or all tokens that a head has kept.
    In a pool of one kv head, each block belongs to one head. Heads may then keep different numbers of tokens, and
    blocks that one head dropped are free for others (Feng et al., "Ada-KV", arXiv:2407.11550).

    Parameters
    ----------
    q : array (num_seqs, num_q_heads, head_dim)
        The newest token's query of each sequence.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Pools as for `numkv.paged_decode_attention`, C-contiguous. They have one kv head if each block belongs to one
        head.
    tables : int32 array (num_seqs, num_kv_heads, max_blocks)
        Blocks of each kv head. Entries past its length are never read.
    seq_lens : int32 or int64 array (num_seqs, num_kv_heads)
        Tokens in these blocks. All blocks but the last are full.
    out, return_lse
        See `numkv.decode_attention`.
    k_scale, v_scale, validate
        See `numkv.paged_decode_attention`.
    **options
        `sm_scale` and `logits_soft_cap`: see `numkv.AttentionOptions`.

    Returns
    -------
    out : array (num_seqs, num_q_heads, head_dim_v)
        In q's dtype.
    lse : float32 array (num_seqs, num_q_heads)
        Natural log of the sum of exponentials over these blocks; only with `return_lse`.

    Raises
    ------
    IndexError
        If a length is more than the table has room for, or a block is not in the pool.
    NotSupported
        If a pool is not C-contiguous, or has scales for each head.
    DimensionMismatch, UnsupportedDType, ValueError
        See `numkv.decode_attention`.
    """
    checked = check_options(options, return_lse, out, takes=SCORES)
    target = targets.of(k_pool)
    if target.chooses_stream:
        arrays = (q, k_pool, v_pool, tables, seq_lens, out, k_scale, v_scale)
        call = with_options(_BLOCKS, arrays, (return_lse, validate), options)
        return target.run(sparse_decode_attention, *call)
    validate = check_flag("validate", validate)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and len(getattr(scale, "shape", ())) < 3:
            raise NotSupported(
                f"`{name}`: expected scales of rows or None, got scales of heads, which parts of blocks cannot have"
            )
    pool = stored_pool(target, PAGED, k_pool, v_pool, (k_scale, v_scale))
    num_blocks, pool_heads, size = (int(n) for n in pool.k.shape[:3])
    tables = check_array(
        target, "tables", tables, _INT32, ("num_seqs", "num_kv_heads", "max_blocks")
    )
    num_seqs, heads, columns = (int(n) for n in tables.shape)
    if pool_heads not in (1, heads):
        raise DimensionMismatch(
            f"`tables`: expected tables of {pool_heads} kv heads, as the pool has, got {heads}",
            expected=pool_heads,
            actual=heads,
        )
    q = check_queries(target, q, heads, pool.head_dim, "num_seqs")
    if int(q.shape[0]) != num_seqs:
        raise DimensionMismatch(
            f"`q`: expected a query for each of {num_seqs} sequences of `tables`, got {int(q.shape[0])}",
            expected=num_seqs,
            actual=int(q.shape[0]),
        )
    lens = _lengths(target, seq_lens, (num_seqs, heads))
    parts = num_blocks * pool_heads
    if parts > np.iinfo(np.int32).max:
        raise too_many_parts(num_blocks, pool_heads)
    if target.values_on_host or validate:
        look_at_table(
            target.to_host(tables).reshape(num_seqs * heads, columns),
            target.to_host(lens).astype(np.int64).reshape(-1), size, num_blocks, "tables",
        )  # fmt: skip
    return attend_to_choice(pool, tables, lens, q, checked, validate=validate)


def token_decode_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    slots: Any,
    counts: Any,
    *,
    out: Any = None,
    return_lse: bool | None = False,
    k_scale: Any = None,
    v_scale: Any = None,
    validate: bool | None = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attend with one query per sequence over chosen tokens, the same for all heads.

    The model's indexer chooses them, as in DeepSeek's sparse attention (DeepSeek-V3.2-Exp, 2025, section 2).

    Parameters
    ----------
    q : array (num_seqs, num_q_heads, head_dim)
        The newest token's query of each sequence.
    k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
        Pools; see `numkv.paged_decode_attention`.
    slots : int32 array (num_seqs, most)
        Slots of each sequence's chosen tokens: ``block * block_size + offset``, in any order. Entries past its count
        are never read.
    counts : int32 or int64 array (num_seqs,)
        Number of chosen tokens of each sequence.
    out, return_lse
        See `numkv.decode_attention`.
    k_scale, v_scale, validate
        See `numkv.paged_decode_attention`.
    **options
        `sm_scale`, `logits_soft_cap` and `sinks`: see `numkv.AttentionOptions`.

    Returns
    -------
    out : array (num_seqs, num_q_heads, head_dim_v)
        In q's dtype; 0 for a sequence without tokens.
    lse : float32 array (num_seqs, num_q_heads)
        Natural log of the sum of exponentials; only with `return_lse`.

    Raises
    ------
    IndexError
        If a count is more than the table has room for, or a slot is not in the pool.
    DimensionMismatch, UnsupportedDType, NotSupported, ValueError
        See `numkv.decode_attention`.
    """
    checked = check_options(options, return_lse, out, takes=WITH_SINKS)
    target = targets.of(k_pool)
    if target.chooses_stream:
        arrays = (q, k_pool, v_pool, slots, counts, out, k_scale, v_scale)
        call = with_options(_TOKENS, arrays, (return_lse, validate), options)
        return target.run(token_decode_attention, *call)
    validate = check_flag("validate", validate)
    pool = stored_pool(target, PAGED, k_pool, v_pool, (k_scale, v_scale))
    q = check_queries(target, q, int(pool.k.shape[1]), pool.head_dim, "num_seqs", "the pools")
    num_seqs = int(q.shape[0])
    starts = one_query_each(target.device_key, num_seqs)
    slots = check_array(target, "slots", slots, _INT32, (num_seqs, "most"))
    lens = target.index(check_integers(target, "counts", counts, (num_seqs,)), np.int64)
    check_lengths(
        target, lens, starts, num_seqs, int(slots.shape[1]), validate=validate, decode=True
    )
    if target.values_on_host or validate:
        on_host, most = target.to_host(lens), int(pool.k.shape[0]) * int(pool.k.shape[2])
        of_all = target.to_host(slots)
        for b in range(num_seqs):
            check_numbers(targets.get("cpu"), f"slots[{b}]", of_all[b, : int(on_host[b])], most)
    return attend(pool, slots, q, lens, starts, checked, by_slot=True, validate=validate)


def attend_to_choice(
    pool: Pool, tables: Array, lens: Array, q: Array, options: CheckedOptions, *, validate: bool = False
) -> Any:  # fmt: skip
    """Attend with checked queries over a separate list of blocks for each kv head.

    Parameters
    ----------
    pool : Pool
        K and V, C-contiguous. They may be rotated, as in `attend`.
    tables : int32 array (num_seqs, num_kv_heads, max_blocks)
        Blocks of each kv head, checked.
    lens : int array (num_seqs, num_kv_heads)
        Tokens in these blocks, checked.
    q : array (num_seqs, num_q_heads, head_dim)
        Queries, checked.
    options : CheckedOptions
        From `check_options`, without a window and `sight`. Sinks are merged afterwards.
    validate : bool
        See `numkv.attention.attend.attend`.

    Returns
    -------
    array or tuple of array
        The output, with the lse if `options.return_lse`.
    """
    target = pool.target
    num_seqs, heads, columns = (int(n) for n in tables.shape)
    num_q_heads, dim_v, rows = int(q.shape[1]), pool.head_dim_v, num_seqs * heads
    shape, float32 = (num_seqs, num_q_heads, dim_v), np.dtype(np.float32)
    out, sinks, read = options.out, options.sinks, {"tables": tables, "seq_lens": lens}
    if sinks is not None:
        sinks = read["sinks"] = check_sinks(target, sinks, float32, num_q_heads, validate)
    if out is None:
        out = target.empty(shape, q.dtype)
    else:
        out = check_out(out, q, (pool,), read)
        _refuse_strided(target, out, "out")
    if not (num_seqs and num_q_heads):
        none = target.empty((num_seqs, num_q_heads), float32)
        return (out, none) if options.return_lse else out
    if sinks is not None:
        return _with_sinks(pool, tables, lens, q, options, out, sinks)
    numbered = target.empty((rows, columns), _INT32[0])
    target.ops.tables_of_heads(tables, int(pool.k.shape[1]), numbered)
    group, whole = num_q_heads // heads, _in_one_piece(out)
    got = run(
        _parts(pool), numbered, _whole(target, q).reshape((rows, group, pool.head_dim)), lens.reshape((rows,)),
        one_query_each(target.device_key, rows),
        options._replace(out=out.reshape((rows, group, dim_v)) if whole else None),
    )  # fmt: skip
    result, lse = got if options.return_lse else (got, None)
    if not whole:
        out[...] = result.reshape(shape)
    return out if lse is None else (out, lse.reshape((num_seqs, num_q_heads)))


def are_numbered(pool: Pool) -> bool:
    """Return whether a pool's (block, kv head) parts can be blocks of one kv head.

    This needs C-contiguous arrays, and scales of heads that are known to be 1.
    """
    for x in (pool.k_buffer, pool.v_buffer):
        if int(x.words.shape[1]) == 1:
            continue
        if not _in_one_piece(x.words) or (x.kind.has_scales and not _in_one_piece(x.scales)):
            return False
        # On CUDA, checking that they are 1 would wait for the device.
        if x.kind.scales_per == "head":
            known = x.target.values_on_host
            if not known or (x.scales != 1).any():
                return False
    return True


def attend_by_head(
    pool: Pool, tables: Array, lens: Array, q: Array, options: CheckedOptions, ranges: Array | None = None
) -> Any:  # fmt: skip
    """Compute `attend_to_choice` by one call for each kv head, for pools where `are_numbered` is false.

    The results have the same bits.

    Parameters
    ----------
    pool, tables, q, options
        See `attend_to_choice`. The pool may have any strides, and scales of heads.
    lens : int array (num_seqs,)
        Tokens in a sequence's blocks, the same for all heads.
    ranges : int64 array (num_seqs, 2), optional
        Range of tokens to read; all by default.
    """
    target, (num_seqs, num_q_heads, _) = pool.target, (int(n) for n in q.shape)
    heads, shape = int(tables.shape[1]), (num_seqs, num_q_heads, pool.head_dim_v)
    options = check_call(q, options, (pool,), {"tables": tables, "seq_lens": lens})
    out, sinks = options.out, options.sinks
    if out is None:
        out = target.empty(shape, q.dtype)
    lse = target.empty((num_seqs, num_q_heads), np.dtype(np.float32))
    if num_seqs and num_q_heads:
        group, starts = num_q_heads // heads, one_query_each(target.device_key, num_seqs)
        for head in range(heads):
            own = slice(head * group, (head + 1) * group)
            got, of_got = run(
                _head_of(pool, head), tables[:, head], q[:, own], lens, starts,
                options._replace(out=None, return_lse=True, sinks=None if sinks is None else sinks[own]),
                ranges=ranges,
            )  # fmt: skip
            for whole, part in ((out, got), (lse, of_got)):
                _put_heads(target, whole, part, own)
    return (out, lse) if options.return_lse else out


def _head_of(pool: Pool, head: int) -> Pool:
    """Return the part of a pool that belongs to one kv head."""
    own, sides = slice(head, head + 1), []
    for x in (pool.k_buffer, pool.v_buffer):
        if x.kind.scales_per == "head":
            scales = x.scales[own]
        else:
            scales = x.scales[:, own] if x.kind.has_scales else x.scales
        sides.append(Buffer(x.target, x.words[:, own], scales, x.kind, x.rotation))
    return Pool(*sides)


def _put_heads(target: Target, whole: Array, part: Array, own: slice) -> None:
    """Copy results of some heads, ``(num_seqs, heads, ...)``, into the array of all heads."""
    if target.values_on_host:
        whole[:, own] = part
        return
    num_seqs = int(part.shape[0])
    width = 1 if len(part.shape) == 2 else int(part.shape[2])
    to, source = (
        target.words(x).reshape((num_seqs, int(x.shape[1]), 1, width)) for x in (whole, part)
    )
    slots = target.index(np.arange(num_seqs), np.int64)
    target.ops.copy_tokens(source, slots, to[:, own], slots)


def _with_sinks(
    pool: Pool, tables: Array, lens: Array, q: Array, options: CheckedOptions, out: Array, sinks: Array
) -> Any:  # fmt: skip
    """Attend without sinks, then merge the sinks as a part with zero output whose lse is the sink."""
    target, num_seqs, num_q_heads = pool.target, int(q.shape[0]), int(q.shape[1])

    def of_blocks(wide: Array) -> Any:
        asked = options._replace(sinks=None, out=None, return_lse=True)
        return attend_to_choice(pool, tables, lens, wide, asked)

    def of_sinks(wide: Array) -> tuple[Array, Array]:
        lse = gathered(target, sinks.reshape((1, num_q_heads, 1)), np.zeros(num_seqs, np.int64))
        nothing = target.zeros((num_seqs, num_q_heads, pool.head_dim_v), wide.dtype)
        return nothing, lse.reshape((num_seqs, num_q_heads))

    return merged(pool, q, options._replace(out=out), (of_blocks, of_sinks))


def _lengths(target: Target, x: Any, shape: tuple[int, int]) -> Array:
    """Return the lengths of heads as kernels expect them: C-contiguous, int64 on the CPU."""
    lens = check_integers(target, "seq_lens", x, shape)
    return target.index(_whole(target, lens, "seq_lens"), np.int64)


def _in_one_piece(x: Any) -> bool:
    return bool(x.flags["C_CONTIGUOUS"])


def _whole(target: Target, x: Array, name: str = "q") -> Array:
    """Return the array if it is C-contiguous, else a copy on the CPU; raise on CUDA."""
    _refuse_strided(target, x, name)
    return x if _in_one_piece(x) else np.ascontiguousarray(x)


def _refuse_strided(target: Target, x: Array, name: str) -> None:
    """Raise for a strided array on CUDA, where this module makes no copy."""
    if not (target.values_on_host or _in_one_piece(x)):
        raise NotSupported(f"`{name}`: expected an array in one piece on CUDA, got a strided view")


def _parts(pool: Pool) -> Pool:
    """Return a pool's (block, kv head) parts as blocks of one kv head."""
    return Pool(_parts_of("k_pool", pool.k_buffer), _parts_of("v_pool", pool.v_buffer))


def _parts_of(name: str, x: Buffer) -> Buffer:
    blocks, heads, size = (int(n) for n in x.words.shape[:3])
    if heads == 1:
        return x
    arrays = [x.words]
    if x.kind.has_scales:
        arrays.append(x.scales)
    for each in arrays:
        if not _in_one_piece(each):
            raise NotSupported(
                f"`{name}`: expected a pool in one piece, whose parts can be numbered, got a strided view"
            )
    words, *scales = (y.reshape((blocks * heads, 1, size, *y.shape[3:])) for y in arrays)
    if x.kind.scales_per == "head":  # all 1, as none were passed
        return Buffer(x.target, words, x.scales[:1], x.kind, x.rotation)
    return Buffer(x.target, words, scales[0] if scales else x.scales, x.kind, x.rotation)
