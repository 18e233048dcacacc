"""`Rotation`: an orthogonal change of basis for rows of q, k and v, which makes them easier to quantise.

A quantised row is as coarse as its largest element demands. A random rotation spreads each element over the whole row.
Attention does not change if q and k are rotated by the same matrix, and the output over rotated v is rotated back. So q
and k are rotated before the read and the write, v before the write, and the output after the read. The cache itself is
read no further time. Caches and layers with ``rotate=True`` do all of it (`numkv.storage.pool.Pool`), with the seed 0
for K and V.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from numkv import targets
from numkv.checks import check_apart, check_array, check_writable
from numkv.errors import UnsupportedDType
from numkv.kinds import QUERY_DTYPES, Kind, kind_of_dtype
from numkv.numbers import check_size
from numkv.targets.base import Array, Target


@dataclass(frozen=True, slots=True)
class Rotation:
    """Random signs, then a normalised Walsh-Hadamard transform.

    A head dim that is no power of two is cut into blocks of the largest power of two that divides it. Each block is
    rotated by itself. With an odd head dim only the signs change.

    Two rotations of the same `head_dim` and `seed` are the same, in every process and on every target.

    Parameters
    ----------
    head_dim : int
        Elements of a row, at least 1.
    seed : int, default 0
        Chooses the signs.

    Raises
    ------
    DimensionMismatch
        If `head_dim` is below 1 or `seed` below 0.
    TypeError
        If one of them is no integer.

    Notes
    -----
    Ashkboos et al., "QuaRot" (arXiv:2404.00456), sections 3 and 4; in-block transforms of O(d log d).

    An element of a rotated row may be as large as the row's norm. So fp16 can overflow if the norm is above 65504, even
    if no element was.
    """

    head_dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", check_size("head_dim", self.head_dim, 1))
        object.__setattr__(self, "seed", check_size("seed", self.seed))

    @property
    def signs(self) -> np.ndarray[Any, Any]:
        """1 or -1 for each element, float32, read-only, in host memory."""
        return _signs(self.head_dim, self.seed)

    def forward(self, target: Target, rows: Any, dtype: Any = None) -> Array:
        """Rotate rows.

        Parameters
        ----------
        target : Target
            Where they are.
        rows : array (num_tokens, num_heads, head_dim)
            Rows of any float kind, not changed. NaN and infinity spread over their block: check for them first.
        dtype : numpy.dtype, optional
            Float dtype of the result; float32, of float64 rows float64, if None.

        Returns
        -------
        array (num_tokens, num_heads, head_dim)
            A new array of `dtype`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported
            If `rows` is not such an array.
        """
        rows, kind = self._check(target, rows)
        out_kind = _float_kind(kind.compute if dtype is None else dtype)
        out = target.empty(tuple(rows.shape), out_kind.dtype)
        self._rotate(target, rows, kind, False, out, out_kind)
        return out

    def backward(self, target: Target, rows: Any, dtype: Any, out: Any = None) -> Array:
        """Turn rotated rows back.

        Parameters
        ----------
        target : Target
            Where they are.
        rows : array (num_tokens, num_heads, head_dim)
            Rotated rows, of any float kind.
        dtype : numpy.dtype
            Float dtype of the result, which is rounded to it once.
        out : array (num_tokens, num_heads, head_dim), optional
            Takes the result; it may be `rows`, and else shares no memory with them.

        Returns
        -------
        array (num_tokens, num_heads, head_dim)
            `out`, or a new array.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported
            If `rows` or `out` is not such an array.
        """
        rows, kind = self._check(target, rows)
        out_kind, shape = _float_kind(dtype), tuple(rows.shape)
        if out is None:
            out = target.empty(shape, out_kind.dtype)
        else:
            out = check_array(target, "out", out, (out_kind.dtype,), shape)
            check_writable("out", out)
            if out is not rows and not target.same_memory(out, rows):
                check_apart(target, {"out": out}, {"rows": rows})
        self._rotate(target, rows, kind, True, out, out_kind)
        return out

    def _check(self, target: Target, rows: Any) -> tuple[Array, Kind]:
        shape = ("num_tokens", "num_heads", self.head_dim)
        rows = check_array(target, "rows", rows, QUERY_DTYPES, shape)
        return rows, _float_kind(rows.dtype)

    def _rotate(
        self, target: Target, rows: Array, kind: Kind, inverse: bool, out: Array, out_kind: Kind
    ) -> None:
        signs, words = _signs_on(target.device_key, self.head_dim, self.seed), target.words
        target.ops.rotate_rows(words(rows), kind.name, signs, inverse, words(out), out_kind.name)


def _float_kind(dtype: Any) -> Kind:
    kind = kind_of_dtype(np.dtype(dtype))
    if kind is None:
        raise UnsupportedDType(
            f"`dtype`: expected one of {', '.join(map(str, QUERY_DTYPES))}, got {dtype}; "
            "pass the dtype of the query"
        )
    return kind


@functools.lru_cache(maxsize=64)
def _signs(head_dim: int, seed: int) -> np.ndarray[Any, Any]:
    # From the raw bits of the stream: NumPy keeps those the same for ever, which it does not promise of its draws.
    raw = np.random.PCG64(seed).random_raw(-(-head_dim // 64))
    bits = raw[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    signs = np.float32(1) - np.float32(2) * bits.reshape(-1)[:head_dim].astype(np.float32)
    signs.setflags(write=False)
    return signs


@functools.lru_cache(maxsize=64)
def _signs_on(target: str, head_dim: int, seed: int) -> Array:
    return targets.by_key(target).constant(_signs(head_dim, seed))
