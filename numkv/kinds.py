"""Storage kinds: how an element of K or V lies in memory.

A kind answers for its own size (`Kind.bytes_per_token`), its dtype for the user (`Kind.dtype`) and its
dtype inside kernels (`Kind.word`): 16-bit floats are carried as ``uint16`` words, because Numba's CPU
target has no 16-bit float arrays. Quantised kinds say how their scales lie (`Kind.scale_shape`) too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from numkv.errors import DimensionMismatch, UnsupportedDType

__all__ = ["FLOAT_DTYPES", "Kind", "kind", "kind_of_dtype", "kinds"]

_FLOAT32, _BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Kind:
    """One way to store an element; get one with `kind`.

    Attributes
    ----------
    name : str
        Canonical name: ``"fp64"``, ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"int8"`` or ``"int4"``.
    bytes_per_element : int or float
        Bytes of one stored element, without scales.
    dtype : numpy.dtype
        The dtype a user sees.
    word : numpy.dtype
        The dtype of the buffers inside kernels and in ``.jit`` structures, of the same width as stored.
    has_scales : bool
        Whether rows carry scales beside their codes.
    compute : numpy.dtype
        The dtype that attention over this kind accumulates in (float64 if the query is float64).
    scale_dtype : numpy.dtype
        The dtype of scales that a user sees; of float kinds that of their empty arrays.
    scale_word : numpy.dtype
        The dtype of scales inside kernels.
    group_size : int
        Elements that share a scale, or 0: all of a row (one token and kv head) do.
    elements_per_word : int
        Elements in a word of the buffers.
    """

    name: str
    bytes_per_element: int | float
    dtype: np.dtype[Any]
    word: np.dtype[Any]
    has_scales: bool
    compute: np.dtype[Any]
    scale_dtype: np.dtype[Any] = _FLOAT32
    scale_word: np.dtype[Any] = _FLOAT32
    group_size: int = 0
    elements_per_word: int = 1

    def words_per_row(self, head_dim: int) -> int:
        """Words of one stored row, without scales.

        Parameters
        ----------
        head_dim : int
            Elements in the row.

        Returns
        -------
        int

        Raises
        ------
        DimensionMismatch
            If they do not fill whole words.
        """
        if head_dim % self.elements_per_word:
            raise DimensionMismatch(
                f"`head_dim`: expected a multiple of {self.elements_per_word} for {self} storage, "
                f"which puts as many elements into a byte, got {head_dim}; pad the rows, or store "
                "another kind",
                expected=self.elements_per_word,
                actual=head_dim,
            )
        return head_dim // self.elements_per_word

    def scale_shape(self, rows: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
        """Shape of the scales of rows.

        Parameters
        ----------
        rows : tuple of int
            Shape of a buffer, without its last axis.
        head_dim : int
            Elements in a row.

        Returns
        -------
        tuple of int
            `rows` where a row has one scale, with an axis more where its groups have one each, and ``(0, 0, 0)``
            where there are none.
        """
        if not self.has_scales:
            return (0, 0, 0)
        return (*rows, -(-head_dim // self.group_size)) if self.group_size else rows

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one stored row, its scales included.

        Parameters
        ----------
        head_dim : int
            Elements in the row.

        Returns
        -------
        int
        """
        scales = math.prod(self.scale_shape((1,), head_dim))
        return self.words_per_row(head_dim) * self.word.itemsize + scales * self.scale_word.itemsize

    def bytes_per_token(
        self, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None
    ) -> int:
        """Exact bytes that one token costs in one layer, K and V, scales included.

        Parameters
        ----------
        num_kv_heads : int
            Kv heads of the layer.
        head_dim : int
            Elements of a K row.
        head_dim_v : int, optional
            Elements of a V row; `head_dim` if None.

        Returns
        -------
        int
        """
        v_dim = head_dim if head_dim_v is None else head_dim_v
        return num_kv_heads * (self.row_bytes(head_dim) + self.row_bytes(v_dim))

    def __str__(self) -> str:
        return self.name


def _float_kind(name: str, dtype: Any, word: Any, compute: Any) -> Kind:
    size = np.dtype(dtype).itemsize
    return Kind(name, size, np.dtype(dtype), np.dtype(word), False, np.dtype(compute))


_KINDS = {
    k.name: k
    for k in (
        _float_kind("fp64", np.float64, np.float64, np.float64),
        _float_kind("fp32", np.float32, np.float32, np.float32),
        _float_kind("fp16", np.float16, np.uint16, np.float32),
        _float_kind("bf16", _BF16, np.uint16, np.float32),
        Kind("int8", 1, _FLOAT32, np.dtype(np.int8), True, _FLOAT32),
        Kind(
            "int4",
            0.5,
            _FLOAT32,
            np.dtype(np.uint8),
            True,
            _FLOAT32,
            scale_dtype=_BF16,
            scale_word=np.dtype(np.uint16),
            group_size=32,
            elements_per_word=2,
        ),
    )
}
_ALIASES = {
    "f64": "fp64", "float64": "fp64", "double": "fp64",
    "f32": "fp32", "float32": "fp32", "single": "fp32",
    "f16": "fp16", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "bfp16": "bf16",
    "i8": "int8", "q8": "int8",
    "i4": "int4", "q4": "int4",
}  # fmt: skip
_BY_DTYPE = {k.dtype: k for k in _KINDS.values() if not k.has_scales}

#: Dtypes of the float kinds, the widest first.
FLOAT_DTYPES = tuple(_BY_DTYPE)


def kinds() -> tuple[Kind, ...]:
    """All storage kinds, the widest first.

    Returns
    -------
    tuple of Kind
    """
    return tuple(_KINDS.values())


def kind(name: str | Kind) -> Kind:
    """Look a storage kind up.

    Parameters
    ----------
    name : str or Kind
        A name (``"fp16"``), an alias (``"f16"``, ``"float16"``, ``"bfloat16"``, in any case), or a kind, which is
        returned as it is.

    Returns
    -------
    Kind

    Raises
    ------
    UnsupportedDType
        If there is no such kind.
    """
    if isinstance(name, Kind):
        return name
    if isinstance(name, str):
        key = name.strip().lower()
        found = _KINDS.get(_ALIASES.get(key, key))
        if found is not None:
            return found
    raise UnsupportedDType(
        f"kind: expected one of {', '.join(_KINDS)} (or an alias such as float16), got {name!r}"
    )


def kind_of_dtype(dtype: Any) -> Kind | None:
    """The float kind whose dtype is `dtype`, or None.

    Parameters
    ----------
    dtype : numpy.dtype
        A dtype object.

    Returns
    -------
    Kind or None
    """
    return _BY_DTYPE.get(dtype)


def kinds_of(
    both: str | Kind, k_kind: str | Kind | None, v_kind: str | Kind | None
) -> tuple[Kind, Kind]:
    """The kinds of K and of V from the three arguments that every object takes."""
    return kind(both if k_kind is None else k_kind), kind(both if v_kind is None else v_kind)
