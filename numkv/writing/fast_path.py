"""The fast path for small appends and writes on the CPU: one compiled function checks and writes K and V.

Each function accepts ordinary calls: few rows, in NumPy arrays, and K of the same dtypes as V. For any other call it
writes nothing and says so. The general path then does it, or raises. Sizes are compared first: callers that append long
prompts only then compile nothing for single tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numkv import targets
from numkv.arrays import Array
from numkv.kernels.operations import Checks
from numkv.kinds import compute_dtype, float_kind, kind_of_dtype, kinds
from numkv.kinds import kind as named
from numkv.storage.buffer import source_dtypes
from numkv.storage.pool import Pool
from numkv.writing.fused_write import QKMode

_INT32, _INT64, _UINT16 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint16)
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_NO_SCALE = np.empty((0, 0, 0), np.float32)
_LOOK, _LOOK_FOR_NAN = int(Checks.LOOK), int(Checks.LOOK_FOR_NAN)

_HOST = targets.of(_NO_SCALE)  # whose arrays NumPy's are
SMALL = _HOST.small_call

# Of kinds that have the same words, the first: others take the general path, and so do codes seen as another dtype.
_STORED = {
    (kind.word if kind.has_scales else kind.dtype): kind
    for kind in reversed(kinds())
    if kind.scales_per != "head" and kind.codes_dtype is None
}


@functools.cache
def _by_slot(
    rows: np.dtype[Any], pool: np.dtype[Any]
) -> tuple[Any, np.dtype[Any] | None, bool, bool] | None:
    """Return the function that stores rows of a dtype in slots of a caller's pools of another dtype.

    Also return the dtype of scales, or None, and whether rows and pools are viewed as 16-bit words.
    """
    kind = _STORED.get(pool)
    if kind is None or rows not in source_dtypes(kind):
        return None
    scales = kind.scale_dtype if kind.has_scales else None
    store = _HOST.ops.small_append(float_kind(rows).name, kind.name, True)
    return store, scales, rows.itemsize == 2, pool.itemsize == 2


@functools.cache
def _in_pool(rows: np.dtype[Any], pool: str, by_slot: bool) -> Any:
    """Return the function that stores rows of a dtype in pools of a kind, by slots or a block table, or None."""
    if rows not in source_dtypes(named(pool)):
        return None
    return _HOST.ops.small_append(float_kind(rows).name, pool, by_slot)


@functools.cache
def _copy(kind: str) -> Any:
    """Return the function that copies rows of a kind into contiguous caches."""
    return _HOST.ops.small_copy(kind)


@functools.cache
def _float_name(dtype: np.dtype[Any]) -> str | None:
    """Name of the float kind of a dtype, or None."""
    found = kind_of_dtype(dtype)
    return None if found is None else found.name


def as_int64(x: Any) -> Any:
    """An int32 or int64 array as int64, and anything else as None: compiled functions do not tell byte orders apart."""
    if type(x) is not np.ndarray:
        return None
    dtype = x.dtype
    return x if dtype == _INT64 else x.astype(_INT64) if dtype == _INT32 else None


def append(k_new: Any, v_new: Any, k_cache: Any, v_cache: Any, cache_offsets: Any) -> bool:
    """Do a small `numkv.append`, or return False."""
    if not (
        type(k_new) is type(v_new) is type(k_cache) is type(v_cache) is type(cache_offsets) is np.ndarray
    ):  # fmt: skip
        return False
    if k_new.size >= SMALL or v_new.size >= SMALL:
        return False
    dtype = k_cache.dtype
    if not (k_new.dtype == v_new.dtype == v_cache.dtype == dtype and cache_offsets.dtype == _INT64):
        return False
    name = _float_name(dtype)
    if name is None:
        return False
    if dtype.itemsize == 2:
        k_new, v_new = k_new.view(_UINT16), v_new.view(_UINT16)
        k_cache, v_cache = k_cache.view(_UINT16), v_cache.view(_UINT16)
    try:
        done: bool = _copy(name)(k_new, v_new, k_cache, v_cache, cache_offsets)
    except TypeError:  # another rank, read-only or unaligned
        return False
    return done


def paged_append(
    k: Any, v: Any, k_pool: Any, v_pool: Any, slot_mapping: Any, k_scale: Any, v_scale: Any, look: Any
) -> bool:  # fmt: skip
    """Do a small `numkv.paged_append`, or return False."""
    if not (type(k) is type(v) is type(k_pool) is type(v_pool) is type(slot_mapping) is np.ndarray):
        return False
    if type(look) is not bool:
        return False
    if k.size >= SMALL or v.size >= SMALL:
        return False
    of_rows, of_pool = k.dtype, k_pool.dtype
    found = _by_slot(of_rows, of_pool)
    if found is None or v.dtype != of_rows or v_pool.dtype != of_pool:
        return False
    store, scales, half_rows, half_pools = found
    if scales is None:
        if k_scale is not None or v_scale is not None:
            return False
        k_scale = v_scale = _NO_SCALE
    else:
        if not (type(k_scale) is type(v_scale) is np.ndarray):
            return False
        if not (k_scale.dtype == scales and v_scale.dtype == scales):
            return False
        if scales is not _FLOAT32:
            k_scale, v_scale = k_scale.view(_UINT16), v_scale.view(_UINT16)
    if half_rows:
        k, v = k.view(_UINT16), v.view(_UINT16)
    if half_pools:
        k_pool, v_pool = k_pool.view(_UINT16), v_pool.view(_UINT16)
    slots = as_int64(slot_mapping)
    if slots is None:
        return False
    try:
        done: int = store(k, v, k_pool, v_pool, k_scale, v_scale, slots, 0, 0, look)
    except TypeError:  # another rank or dtype, read-only or unaligned
        return False
    return done >= 0


def pool_append(
    pool: Pool, k: Any, v: Any, places: Array, start: int, room: int, look: Any, by_slot: bool = False
) -> int:  # fmt: skip
    """Append a few rows to a pool, or write nothing and return -1.

    Parameters
    ----------
    pool : Pool
        Where they go.
    k, v : object
        What a caller passed as rows ``(num_tokens, num_kv_heads, head_dim)``, not checked.
    places : int64 array (num_tokens,) or int32 array (max_blocks,)
        Slots, or one sequence's blocks, on the host.
    start, room : int
        Position of that sequence's first new token, and how many there is room for.
    look : bool
        Whether rows that are to be quantised are searched for NaN and infinity first.
    by_slot : bool
        Whether `places` are slots.

    Returns
    -------
    int
        Tokens appended, or -1.
    """
    of_k, of_v = pool.k_buffer, pool.v_buffer
    if not (type(k) is type(v) is type(of_k.words) is np.ndarray and type(look) is bool):
        return -1
    if pool.is_latent:  # rows of V there are none
        return -1
    if k.size >= SMALL or v.size >= SMALL:
        return -1
    kind, dtype = of_k.kind, k.dtype
    if kind is not of_v.kind or of_k.rotation is not None or v.dtype != dtype:
        return -1
    store = _in_pool(dtype, kind.name, by_slot)
    if store is None:
        return -1
    if dtype.itemsize == 2:
        k, v = k.view(_UINT16), v.view(_UINT16)
    try:
        tokens: int = store(
            k, v, of_k.words, of_v.words, of_k.scales, of_v.scales, places, start, room, look
        )
    except TypeError:  # another rank, or unaligned
        return -1
    return tokens


# By `QKMode`: whether q and k are normalised, whether rotated, and whether pairs are neighbours.
_MODES = {
    int(mode): (mode.normalises, mode is not QKMode.COPY, mode.interleaved) for mode in QKMode
}
_MOST = float(np.finfo(np.float64).max)
_NO_TABLE = np.empty((0, 0), np.float32)
_NO_WEIGHT = {dtype: np.empty(0, dtype) for dtype in (_FLOAT32, _FLOAT64)}
NOT_BY_SLOT = np.empty(0, np.int64)


@functools.cache
def _writer(
    qkv: np.dtype[Any], k_kind: str, v_kind: str, table: np.dtype[Any], by_slot: bool
) -> tuple[Any, bool, Any] | None:
    """Return the function that writes projections of a dtype into pools of two kinds, with tables of a dtype.

    Also return whether projections are viewed as 16-bit words, and the stand-in for missing norm weights.
    """
    kind = kind_of_dtype(qkv)
    if kind is None or table not in (_FLOAT32, _FLOAT64):
        return None
    compute = compute_dtype(kind.name, k_kind, v_kind)
    kernel = _HOST.ops.small_write(kind.name, k_kind, v_kind, compute, table, by_slot)
    return kernel, qkv.itemsize == 2, _NO_WEIGHT[compute]


def pool_write(
    pool: Pool, qkv: Any, num_q_heads: Any, cos: Any, sin: Any, qk_mode: Any, q_weight: Any, k_weight: Any,
    eps: Any, q_out: Any, angles: Array, first: int, places: Array, start: int,
    room: int, look: Any,
) -> tuple[int, Any]:  # fmt: skip
    """Do the fused write of a few tokens, or write nothing and return -1.

    Parameters
    ----------
    pool : Pool
        Where K and V go.
    qkv, num_q_heads, cos, sin, qk_mode, q_weight, k_weight, eps, q_out : object
        What a caller passed to `numkv.ContiguousLayer.write`, not checked.
    angles : int64 array (num_tokens,)
        Row of the tables for each token, or `NOT_BY_SLOT` for one sequence's.
    first : int
        Row of the tables for that sequence's first token.
    places : int64 array (num_tokens,) or int32 array (max_blocks,)
        Slots, or the sequence's blocks, on the host.
    start, room : int
        Position of that sequence's first new token, and how many there is room for.
    look : bool
        Whether projections that are to be quantised are searched for NaN and infinity first.

    Returns
    -------
    tokens : int
        Tokens written, or -1.
    q_out : array (num_tokens, num_q_heads, head_dim)
        Has taken q, in qkv's dtype.
    """
    of_k, of_v = pool.k_buffer, pool.v_buffer
    if not (type(qkv) is type(of_k.words) is np.ndarray and type(num_q_heads) is int):
        return -1, None
    if qkv.ndim != 2 or qkv.size >= SMALL or of_k.rotation is not None or pool.is_latent:
        return -1, None
    if not (type(eps) is float and 0.0 <= eps <= _MOST and type(look) is bool):
        return -1, None
    if type(qk_mode) is not QKMode and type(qk_mode) is not int:
        return -1, None
    try:
        normalise, rotate, interleaved = _MODES[qk_mode]
    except KeyError:
        return -1, None
    if not rotate:
        cos = sin = _NO_TABLE
    elif not (type(cos) is type(sin) is np.ndarray and cos.dtype == sin.dtype):
        return -1, None
    dtype = qkv.dtype
    found = _writer(dtype, of_k.kind.name, of_v.kind.name, cos.dtype, angles is not NOT_BY_SLOT)
    if found is None:
        return -1, None
    write, halves, no_weight = found
    if not normalise:
        q_weight = k_weight = no_weight
    elif not (
        type(q_weight) is type(k_weight) is np.ndarray
        and q_weight.dtype == k_weight.dtype == no_weight.dtype
    ):
        return -1, None
    if q_out is None:
        if not 0 <= num_q_heads <= qkv.shape[1]:
            return -1, None
        q_out = np.empty((len(qkv), num_q_heads, of_k.dim), dtype)
    elif (
        type(q_out) is not np.ndarray or q_out.dtype != dtype or q_out.shape[1:2] != (num_q_heads,)
    ):
        return -1, None
    words = q_out
    if halves:
        qkv, words = qkv.view(_UINT16), q_out.view(_UINT16)
    try:
        tokens: int = write(
            qkv, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, angles, first, words,
            of_k.words, of_k.scales, of_v.words, of_v.scales, places, start, room,
            _LOOK_FOR_NAN if look else _LOOK, 0, 0, 1,
        )  # fmt: skip
    except (TypeError, OverflowError):  # another rank or dtype, read-only, or numbers beyond int64
        return -1, None
    return tokens, q_out
