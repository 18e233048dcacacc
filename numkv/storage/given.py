"""Pools over buffers that a caller passes to a function, and their checks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numkv import targets
from numkv.checks import Shape, check_array, is_plain
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kinds import FLOAT_DTYPES, Kind, kind_of_dtype, kinds
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target

__all__ = ["stored_pool"]

_FLOAT32 = np.dtype(np.float32)

_CODES = {k.word: k for k in kinds() if k.has_scales}


_STORED = (*FLOAT_DTYPES, *_CODES)


def stored_pool(
    target: Target, names: tuple[str, str], k: Any, v: Any, scales: tuple[Any, Any], shape: Shape
) -> Pool:
    """Check K and V buffers that a caller passes, with their scales where they hold codes.

    `shape` names sizes of K that the caller is free to choose.
    """
    if (
        target.values_on_host and is_plain(k, 4) and is_plain(v, 4) and k.shape[:3] == v.shape[:3]
        and scales[0] is None and scales[1] is None
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
