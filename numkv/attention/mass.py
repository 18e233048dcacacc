"""Attention mass by token, from which `numkv.compaction.eviction` chooses the tokens to drop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from numkv import targets
from numkv.arrays import Array
from numkv.attention.attend import attend, check_lengths, check_queries, no_ranges
from numkv.attention.options import (
    IN_A_WINDOW,
    AttentionOptions,
    CheckedOptions,
    check_options,
    with_options,
)
from numkv.attention.parts import Part, attend_to_parts
from numkv.checks import check_array, check_integers
from numkv.errors import DimensionMismatch
from numkv.kinds import float_kind
from numkv.numbers import check_flag
from numkv.storage.pool import Pool
from numkv.storage.tables import one_block_each, one_query_each
from numkv.storage.user_buffers import CONTIGUOUS, stored_pool
from numkv.targets.call import Call

_FLOAT32 = np.dtype(np.float32)
_WEIGHTS = Call("q k seq_lens cu_seqlens_q lse k_scale", "validate")


def attention_mass(
    pool: Pool,
    block_table: Array,
    q: Array,
    seq_lens: Array,
    q_starts: Array,
    columns: int,
    options: CheckedOptions,
    *,
    lse: Any = None,
    ranges: Array | None = None,
    by_slot: bool = False,
) -> Array:
    """Sum the attention that checked queries give to each token. Every ``attention_weights`` ends here.

    Parameters
    ----------
    pool : Pool
        K and V.
    block_table : int32 array (num_seqs, max_blocks)
        Blocks of each sequence, or with `by_slot` the slots of its tokens.
    q : array (num_tokens, num_q_heads, head_dim)
        Queries, checked.
    seq_lens, q_starts : int array (num_seqs,), (num_seqs + 1,)
        Lengths, and where each sequence's queries start; checked.
    columns : int
        Tokens of each sequence in the result.
    options : CheckedOptions
        From `check_options`; without sinks and outputs.
    lse
        See `attention_weights`.
    ranges, by_slot
        See `numkv.attention.attend.attend`; ranges end within `seq_lens`.

    Returns
    -------
    float32 array (num_seqs, num_kv_heads, columns)
    """
    target = pool.target
    num_tokens, num_q_heads, head_dim = (int(n) for n in q.shape)
    if lse is None:
        asked = options._replace(return_lse=True)
        _, lse = attend(
            pool, block_table, q, seq_lens, q_starts, asked, ranges=ranges, by_slot=by_slot
        )
    else:
        lse = check_array(target, "lse", lse, (_FLOAT32,), (num_tokens, num_q_heads))
    scale = options.scale(head_dim)
    shape = (int(seq_lens.shape[0]), int(pool.k.shape[1]), columns)
    if not (num_tokens and num_q_heads):
        return target.zeros(shape, _FLOAT32)
    weights = target.empty(shape, _FLOAT32)
    if pool.k_rotation is not None:
        q = pool.k_rotation.forward(target, q)
    if ranges is None:
        ranges = no_ranges(target.key)
    target.ops.attention_weights(
        target.words(q), float_kind(q.dtype).name, pool.k, pool.k_kind.name, pool.k_scale, block_table, seq_lens,
        q_starts, ranges, int(by_slot), lse, scale, float(options.logits_soft_cap),
        int(options.window_left), weights,
    )  # fmt: skip
    return weights


def mass_of_parts(
    parts: Sequence[Part], q: Array, seq_lens: Array, q_starts: Array, columns: int, options: CheckedOptions, lse: Any,
    begins: Sequence[int] = (),
) -> Array:  # fmt: skip
    """Sum attention as `attention_mass` does, over parts without a common token; it waits for the device.

    With the lse known, a query's weight for a token is independent of all other tokens. `begins` has the first token of
    each part's table, if that is not token 0.
    """
    target = parts[0].pool.target
    if lse is None:
        asked = options._replace(return_lse=True)
        _, lse = attend_to_parts(parts, q, seq_lens, q_starts, asked)
    plain = options._replace(window_left=-1, sight=None)
    weights = np.zeros((int(seq_lens.shape[0]), int(parts[0].pool.k.shape[1]), columns), np.float32)
    for part, begin in zip(parts, begins or [0] * len(parts), strict=True):
        lens = seq_lens if part.lens is None else part.lens
        found = attention_mass(
            part.pool, part.table, q, lens, q_starts, columns - begin, plain, lse=lse, ranges=part.ranges,
            by_slot=part.by_slot,
        )  # fmt: skip
        weights[:, :, begin:] += np.asarray(target.to_host(found))
    return target.asarray(weights)


def attention_weights(
    q: Any,
    k: Any,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    *,
    lse: Any = None,
    k_scale: Any = None,
    validate: bool | None = False,
    **options: Unpack[AttentionOptions],
) -> Array:
    """Sum the attention that each token of a contiguous cache gets from given queries.

    Parameters
    ----------
    q : array (num_tokens, num_q_heads, head_dim)
        The newest tokens' queries of all sequences, one after another; fp16, bf16, fp32 or fp64.
    k : array (num_seqs, num_kv_heads, capacity, head_dim)
        Cached keys, of any float kind, or codes: see `numkv.decode_attention`. Slots
        past a sequence's length are never read.
    seq_lens : int32 or int64 array (num_seqs,)
        Tokens in the cache, the queries' own included.
    cu_seqlens_q : int32 or int64 array (num_seqs + 1,), optional
        Where each sequence's queries start, as in `numkv.prefill_attention`; None: each has one.
    lse : float32 array (num_tokens, num_q_heads), optional
        What attention returned with ``return_lse=True`` for these queries and options. Computed if None, which costs
        one attention over the keys. Needed if there are sinks, as they take a share of the softmax.
    k_scale : array, optional
        Scales of stored keys; see `numkv.decode_attention`.
    validate : bool
        On CUDA, check the values of `seq_lens` and `cu_seqlens_q` too, which waits for the device. On the CPU they are
        always checked.
    **options
        `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

    Returns
    -------
    float32 array (num_seqs, num_kv_heads, capacity)
        Softmax weights, summed over the queries and the q heads of each GQA group; 0 for tokens that no query sees
        and past the length. Without sinks, each kv head of a sequence has a sum of its queries times the group.

    Raises
    ------
    DimensionMismatch, UnsupportedDType, NotSupported, IndexError, ValueError
        See `numkv.prefill_attention`.
    TypeError
        If `q` is a cache or a layer.

    Notes
    -----
    Computed in float32, whatever the kinds. Attention itself does not keep these weights: the keys are read again.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> k = np.zeros((1, 2, 16, 8), np.float32)
    >>> numkv.attention_weights(np.ones((1, 4, 8), np.float32), k, [4])[0, 0, :5]
    array([0.5, 0.5, 0.5, 0.5, 0. ], dtype=float32)
    """
    if hasattr(q, "attention_weights"):
        name = type(q).__name__
        raise TypeError(
            f"`q`: expected an array of queries, got a {name}; call its own method: {name}.attention_weights"
        )
    checked = check_options(options, takes=IN_A_WINDOW)
    target = targets.of(k)
    if target.chooses_stream:
        arrays = (q, k, seq_lens, cu_seqlens_q, lse, k_scale)
        call = with_options(_WEIGHTS, arrays, (validate,), options)
        found: Array = target.run(attention_weights, *call)
        return found
    validate = check_flag("validate", validate)
    pool = stored_pool(target, CONTIGUOUS, k, k, (k_scale, k_scale))
    num_seqs, num_kv_heads, capacity, _ = (int(n) for n in pool.k.shape)
    head_dim = pool.k_buffer.dim
    q = check_queries(target, q, num_kv_heads, head_dim, "num_tokens", "the keys in `k`")
    num_tokens, decode = int(q.shape[0]), cu_seqlens_q is None
    lens = target.index(check_integers(target, "seq_lens", seq_lens, (num_seqs,)), np.int64)
    if decode:
        if num_tokens != num_seqs:
            raise DimensionMismatch(
                f"`q`: expected one query for each of the {num_seqs} sequences of `k`, got "
                f"{num_tokens}; pass cu_seqlens_q for other numbers",
                expected=num_seqs,
                actual=num_tokens,
            )
        starts = one_query_each(target.device_key, num_seqs)
    else:
        starts = check_integers(target, "cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
        starts = target.index(starts, np.int64)
    check_lengths(target, lens, starts, num_tokens, capacity, validate=validate, decode=decode)
    table = one_block_each(target.device_key, num_seqs)
    return attention_mass(pool, table, q, lens, starts, capacity, checked, lse=lse)
