"""The fast path for decode attention on the CPU: checking everything takes longer than a small call.

It accepts ordinary calls: NumPy arrays and no option but a scale and `out`. For any other call it does nothing. The
general path then computes it, or raises.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from numkv import targets
from numkv.arrays import may_share_memory
from numkv.attention.attend import no_ranges, no_sinks
from numkv.kernels.validate import first_unfit
from numkv.kinds import Kind, compute_dtype, kind_of_dtype, kinds
from numkv.numbers import LARGEST_SCALE
from numkv.storage.tables import one_block_each, one_query_each

_HOST = targets.get("cpu")
_Array = np.ndarray
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_NO_SCALE = np.empty((0, 0, 0), np.float32)
_NO_SCALE.flags.writeable = False
_NO_RANGES = no_ranges(_HOST.key)

# Kinds by the dtypes of their rows and scales. Scales of heads may be numbers, and some codes have another dtype: these
# use the general path.
_STORED = {
    (kind.dtype, None, 0)
    if kind.scales_per == "none"
    else (kind.word, kind.scale_dtype, kind.scale_ndim): kind
    for kind in kinds()
    if kind.scales_per != "head" and kind.codes_dtype is None
}


class _Way(NamedTuple):
    """How calls with arrays of some dtypes are done."""

    #: See `numkv.kernels.operations.Operations.attend`; the kinds of queries, K and V.
    attend: Any
    names: tuple[str, str, str]
    #: Words as which queries, the output and rows are seen, where these are other dtypes.
    q_word: Any
    k_word: Any
    v_word: Any
    #: Elements of a word of K and of V, and of a scale where groups have one; and words of scales.
    k_each: int
    v_each: int
    group: int
    scale_word: Any
    #: What stands for no sinks.
    sinks: Any


@functools.cache
def _way(q: Any, k: Any, v: Any, scales: Any, scale_ndim: int) -> _Way | None:
    """The way for arrays of these dtypes, and scales of such a rank; None for the general one."""
    of_q, of_k, of_v = kind_of_dtype(q), *(_STORED.get((x, scales, scale_ndim)) for x in (k, v))
    if of_q is None or of_k is None or of_v is None or of_k.group_size != of_v.group_size:
        return None

    def word(kind: Kind, dtype: Any) -> Any:
        return None if kind.word == dtype else kind.word

    scale_word = None if scales is None or of_k.scale_word == scales else of_k.scale_word
    names = of_q.name, of_k.name, of_v.name
    return _Way(
        _HOST.ops.attend, names, word(of_q, q), word(of_k, k), word(of_v, v), of_k.unit[0] // of_k.unit[1],
        of_v.unit[0] // of_v.unit[1], of_k.group_size, scale_word, no_sinks(_HOST.key, compute_dtype(*names)),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _of_batch(num_seqs: int) -> tuple[Any, Any]:
    """The table of a contiguous cache of so many sequences, and where queries start."""
    return tuple(of(_HOST.device_key, num_seqs) for of in (one_block_each, one_query_each))


def decode(
    q: Any, k: Any, v: Any, seq_lens: Any, k_scale: Any, v_scale: Any, sm_scale: float | None,
    out: Any, block_table: Any = None,
) -> Any:  # fmt: skip
    """Do an ordinary `numkv.decode_attention`, or with a table `numkv.paged_decode_attention`; else return None."""
    if not (type(q) is type(k) is type(v) is type(seq_lens) is _Array):
        return None
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not (
        len(q_shape) == 3 and len(k_shape) == len(v_shape) == 4 and k_shape[:3] == v_shape[:3]
        and seq_lens.shape == q_shape[:1] and seq_lens.dtype == _INT64
    ):  # fmt: skip
        return None
    blocks, heads, block_size, columns = k_shape
    num_seqs, q_heads, dim = q_shape
    if k_scale is None and v_scale is None:
        found = _way(q.dtype, k.dtype, v.dtype, None, 0)
        if found is None:
            return None
        k_scale = v_scale = _NO_SCALE
    elif type(k_scale) is type(v_scale) is _Array and k_scale.dtype == v_scale.dtype:
        found = _way(q.dtype, k.dtype, v.dtype, k_scale.dtype, k_scale.ndim)
        if found is None:
            return None
        rows, group = k_shape[:3], found.group
        of_k = (*rows, -(-dim // group)) if group else rows
        of_v = (*rows, -(-v_shape[3] * found.v_each // group)) if group else rows
        if not (
            k_scale.shape == of_k and v_scale.shape == of_v
            and k_scale.strides[-1] == k_scale.itemsize and v_scale.strides[-1] == v_scale.itemsize
            and k_scale.flags.aligned and v_scale.flags.aligned
        ):  # fmt: skip
            return None
        if found.scale_word is not None:
            k_scale, v_scale = k_scale.view(found.scale_word), v_scale.view(found.scale_word)
    else:
        return None
    attend, names, q_word, k_word, v_word, k_each, v_each, _, _, sinks = found
    q_kind, k_kind, v_kind = names
    if not (
        num_seqs and heads and q_heads and q_heads % heads == 0 and columns and columns * k_each == dim and v_shape[3]
        and q.strides[2] == q.itemsize and k.strides[3] == k.itemsize and v.strides[3] == v.itemsize
        and q.flags.aligned and k.flags.aligned and v.flags.aligned and seq_lens.flags.aligned
    ):  # fmt: skip
        return None
    if sm_scale is None:
        sm_scale = 1.0 / math.sqrt(dim)
    elif not (type(sm_scale) is float and -LARGEST_SCALE <= sm_scale <= LARGEST_SCALE):
        return None
    one_block, starts = _of_batch(num_seqs)
    if block_table is None:
        block_table = one_block
        if blocks != num_seqs:
            return None
    elif not (
        type(block_table) is _Array and block_table.ndim == 2 and len(block_table) == num_seqs
        and block_table.dtype == _INT32 and block_table.strides[1] == 4 and block_table.flags.aligned
    ):  # fmt: skip
        return None
    if num_seqs == 1 and block_table is one_block:  # faster than a call of compiled code
        if not 0 <= int(seq_lens[0]) <= block_size:
            return None
    elif first_unfit(block_table, seq_lens, block_size, blocks) >= 0:
        return None
    shape = num_seqs, q_heads, v_shape[3] * v_each
    if out is None:
        out = np.empty(shape, q.dtype)
    elif not (
        type(out) is _Array and out.shape == shape and out.dtype == q.dtype and out.flags.carray
        and (out is q or not may_share_memory(out, q))
        and not any(may_share_memory(out, x) for x in (k, v, seq_lens, block_table, k_scale, v_scale))
    ):  # fmt: skip
        return None
    result = out
    if q_word is not None:
        q, result = q.view(q_word), out.view(q_word)
    if k_word is not None:
        k = k.view(k_word)
    if v_word is not None:
        v = v.view(v_word)
    attend(
        q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, block_table, seq_lens, starts, _NO_RANGES, False, sm_scale,
        0.0, -1, sinks, result, np.empty((num_seqs, q_heads), np.float32),
    )  # fmt: skip
    return out
