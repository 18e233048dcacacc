"""Storage kinds: how an element of K or V lies in memory.

A kind answers for its own size (`Kind.bytes_per_token`), its dtype for the user (`Kind.dtype`) and its
dtype inside kernels (`Kind.word`): 16-bit floats are carried as ``uint16`` words, because Numba's CPU
target has no 16-bit float arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from numkv.errors import UnsupportedDType

__all__ = ["Kind", "kind", "kind_of_dtype", "kinds"]


@dataclass(frozen=True)
class Kind:
    """One way to store an element; get one with `kind`.

    Attributes
    ----------
    name : str
        Canonical name: ``"fp64"``, ``"fp32"``, ``"fp16"``, ``"bf16"`` or ``"int8"``.
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
    scale_bytes_per_row : int
        Bytes of scales for one row (one token and kv head) of K or of V.
    """

    name: str
    bytes_per_element: int | float
    dtype: np.dtype[Any]
    word: np.dtype[Any]
    has_scales: bool
    compute: np.dtype[Any]
    scale_bytes_per_row: int = 0

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
        exact = Fraction(self.bytes_per_element) * head_dim
        return -(-exact.numerator // exact.denominator) + self.scale_bytes_per_row

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
        _float_kind("bf16", ml_dtypes.bfloat16, np.uint16, np.float32),
        Kind("int8", 1, np.dtype(np.float32), np.dtype(np.int8), True, np.dtype(np.float32), 4),
    )
}
_ALIASES = {
    "f64": "fp64", "float64": "fp64", "double": "fp64",
    "f32": "fp32", "float32": "fp32", "single": "fp32",
    "f16": "fp16", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "bfp16": "bf16",
    "i8": "int8", "q8": "int8",
}  # fmt: skip
_BY_DTYPE = {k.dtype: k for k in _KINDS.values() if not k.has_scales}


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
