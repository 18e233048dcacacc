"""Pools over buffers that a caller passes to a function, and their checks."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

from numkv import targets
from numkv.checks import Shape, check_apart, check_array, check_writable, is_plain
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kinds import STORED_FLOAT_DTYPES, Kind, kind_of_dtype, kind_of_stored_dtype, kinds
from numkv.numbers import check_number, is_number
from numkv.storage.buffer import Buffer, head_scales
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target

_FIRST = 4096  # nothing lies below
#: All of it: the base of arrays at addresses.
MEMORY: Any = (ctypes.c_char * (sys.maxsize - _FIRST)).from_address(_FIRST)
_array = np.ndarray


def array_at(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None
) -> np.ndarray[Any, Any]:
    """Return the array at an address; an array without elements, which needs no address, is an ordinary one.

    It does not own its memory: the caller keeps the memory while the array is used, and keeps the array no longer. See
    `numkv.torch.call_cache`.

    Parameters
    ----------
    address : int
        The address of the first element.
    shape, dtype, strides
        As NumPy has them; strides are None where elements lie one after another.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    return _array(shape, dtype, MEMORY, address - _FIRST, strides)


_FLOAT32 = np.dtype(np.float32)

# Several kinds may share a dtype; they differ in the dtype and the rank of their scales.
_CODES: dict[np.dtype[Any], list[Kind]] = {}
for _kind in kinds():
    if _kind.has_scales:
        _CODES.setdefault(_kind.stored_dtype, []).append(_kind)
_STORED = (*STORED_FLOAT_DTYPES, *_CODES)
_STORED_EACH = {dtype: (dtype,) for dtype in _STORED}
# Pools over arrays that recur and own no memory. The arrays are kept, so that no others get their ids. All that is
# checked here is constant, unlike the values of scales of heads.
_pools: dict[tuple[int, int, int, int], tuple[Pool, tuple[Any, ...]]] = {}
_MOST_POOLS = 512
#: The names of a caller's K and V, and the shape of K, whose names are sizes that the caller is free to choose.
Layout = tuple[tuple[str, str], Shape]
PAGED: Layout = ("k_pool", "v_pool"), ("num_blocks", "num_kv_heads", "block_size", "head_dim")
CONTIGUOUS: Layout = ("k", "v"), ("num_seqs", "num_kv_heads", "capacity", "head_dim")


def stored_pool(target: Target, layout: Layout, k: Any, v: Any, scales: tuple[Any, Any]) -> Pool:
    """Check K and V buffers that a caller passes, with their scales where they hold codes."""
    if type(k) is not np.ndarray or k.base is not MEMORY:
        return _checked(target, layout, k, v, scales)
    of_k, of_v = scales
    key = id(k), id(v), id(of_k), id(of_v)
    known = _pools.get(key)
    if known is not None and target.values_on_host:
        return known[0]
    pool = _checked(target, layout, k, v, scales)
    sides = ((k, pool.k_buffer, of_k), (v, pool.v_buffer, of_v))
    if all(
        x.base is MEMORY and (scale is None or (buffer.kind.has_scales and scale.base is MEMORY))
        for x, buffer, scale in sides
    ):
        if len(_pools) >= _MOST_POOLS:
            _pools.clear()
        _pools[key] = pool, (k, v, of_k, of_v)
    return pool


def _checked(target: Target, layout: Layout, k: Any, v: Any, scales: tuple[Any, Any]) -> Pool:
    if (
        target.values_on_host and is_plain(k, 4) and is_plain(v, 4) and k.shape[:3] == v.shape[:3]
        and scales[0] is None and scales[1] is None
    ):  # fmt: skip
        of_k, of_v = kind_of_dtype(k.dtype), kind_of_dtype(v.dtype)
        if of_k is not None and of_v is not None:
            none = _no_scale(target.key)
            return Pool(
                Buffer(target, target.words(k), none, of_k),
                Buffer(target, target.words(v), none, of_v),
            )
    names, shape = layout
    k = check_array(target, names[0], k, _dtypes_for(k), shape)
    v = check_array(target, names[1], v, _dtypes_for(v), (*k.shape[:3], "head_dim_v"))
    return Pool(
        _buffer(target, (names[0], "k_scale"), k, scales[0]),
        _buffer(target, (names[1], "v_scale"), v, scales[1]),
    )


def _dtypes_for(x: Any) -> tuple[np.dtype[Any], ...]:
    """The dtypes that a buffer may have: its own if that is one, as a search among eight takes half a microsecond."""
    return _STORED_EACH.get(x.dtype, _STORED) if type(x) is np.ndarray else _STORED


def _buffer(target: Target, names: tuple[str, str], x: Array, scale: Any) -> Buffer:
    """A checked array with its scales: floats have none, or those of heads; codes need them."""
    found, name = kind_of_stored_dtype(x.dtype), names[1]
    if found is None:
        found = _kind_of_codes(x.dtype, scale)
        if found.codes_dtype is not None:
            x = _in_words(target, names[0], x, found)
        rows, dim = tuple(int(n) for n in x.shape[:3]), found.elements_of(x.shape[3])
        shape = found.scale_shape(rows, dim)
        if scale is None:
            raise DimensionMismatch(
                f"`{name}`: expected {found.scale_dtype} {shape} for {found} storage, got None; "
                f"pass the scales that paged_append wrote with the codes, or attend to rows of a float dtype",
                expected=shape,
            )
        scales = target.words(check_array(target, name, scale, (found.scale_dtype,), shape))
    elif found.scales_per == "head":
        scales = _of_heads(target, name, scale, int(x.shape[1]))
    elif scale is not None:
        raise NotSupported(
            f"`{name}`: expected None for {found} storage, got an array; scales belong to quantised kinds"
        )
    else:
        scales = _no_scale(target.key)
    return Buffer(target, target.words(x), scales, found)


def _in_words(target: Target, name: str, x: Array, kind: Kind) -> Array:
    """Return checked codes in the dtype of kernels, for a kind that users see as another dtype."""
    elements, words = kind.unit
    step = words * kind.word.itemsize // x.dtype.itemsize
    if int(x.shape[3]) % step:
        raise DimensionMismatch(
            f"`{name}`: expected rows of a multiple of {step} {x.dtype} for {kind} storage, as {elements} elements "
            f"take {step} of them, got {int(x.shape[3])}; pass a buffer of whole rows",
            expected=step,
            actual=int(x.shape[3]),
        )
    return target.typed(x, kind.word)


def _kind_of_codes(words: np.dtype[Any], scale: Any) -> Kind:
    """The kind of codes that has these words and such scales; where no kind has such, the first with these words."""
    some = _CODES[words]
    found = getattr(scale, "dtype", None), getattr(scale, "ndim", None)
    return next((of for of in some[1:] if (of.scale_dtype, of.scale_ndim) == found), some[0])


def _of_heads(target: Target, name: str, scale: Any, heads: int) -> Array:
    """Return the scales of heads on the target: 1, a number, or an array with one for each head."""
    if scale is None or is_number(scale):
        number = check_number(name, scale, default=1.0)
        return _same_for_heads(target.device_key, name, number, heads)
    if target.values_on_host:
        return head_scales(name, scale, heads)
    return check_array(target, name, scale, (_FLOAT32,), (heads,))


@functools.lru_cache(maxsize=64)
def _same_for_heads(target: str, name: str, scale: float, heads: int) -> Array:
    return targets.by_key(target).constant(head_scales(name, scale, heads))


@functools.cache
def _no_scale(target: str) -> Array:
    return targets.by_key(target).empty((0, 0, 0), _FLOAT32)


def check_written(pool: Pool) -> None:
    """Check that a caller's pools can be written to, and that each has memory of its own."""
    written = pool.written()
    for name, x in written.items():
        check_writable(name, x)
    check_apart(pool.target, written, {})
