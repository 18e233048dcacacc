"""Storage kinds: how an element of K or V lies in memory, in one table from which all else is derived.

A kind defines its own size (`Kind.bytes_per_token`), its dtype for the user (`Kind.dtype`) and its dtype inside kernels
(`Kind.word`). Kernels use ``uint16`` words for 16-bit floats and ``uint8`` for 8-bit floats, because Numba's CPU target
has no arrays of them. All properties of a kind are asked of it, or derived from the table at the end of this file.
Other code does not list kinds by name, except `numkv.rows` (how elements are converted) and code that is about one
kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from numkv.errors import DimensionMismatch, NotSupported, UnsupportedDType
from numkv.numbers import check_size

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_BYTE = np.dtype(np.uint8)
_BF16_SCALES: dict[str, Any] = {"scale_dtype": _BF16, "scale_word": np.dtype(np.uint16)}


@dataclass(frozen=True)
class Kind:
    """One way to store an element; get one with `kind`.

    Attributes
    ----------
    name : str
        Canonical name: ``"fp64"``, ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"int8"``,
        ``"code6"``, ``"int4"``, ``"code4"``, ``"int8_channel"``, ``"int4_channel_fine"`` or ``"int4_channel"``.
    dtype : numpy.dtype
        The dtype a user sees.
    word : numpy.dtype
        The dtype of the buffers inside kernels, in ``.jit`` structures and in files.
    compute : numpy.dtype
        The dtype that attention over this kind accumulates in (float64 if the query is float64).
    is_query : bool
        Whether queries, new rows, fused projections and masks may have this dtype.
    scales_per : {"none", "head", "row", "group", "channel"}
        The unit that shares a scale. It is none, or a kv head of the whole buffer, whose scales are set once. It may
        be a row (one token and kv head) or a group of `group_size` elements of a row, with scales computed from the
        row. Or it is a channel (one element of the rows of `group_tokens` tokens), with a scale and a zero point
        computed from these tokens.
    scale_dtype : numpy.dtype
        The dtype of scales that a user sees; of kinds without scales that of their empty arrays.
    scale_word : numpy.dtype
        The dtype of scales inside kernels.
    group_size : int
        Elements that share a scale if ``scales_per`` is ``"group"``, else 0.
    group_tokens : int
        Tokens that share scales if ``scales_per`` is ``"channel"``, else 0. They lie in one block.
    fine_channels : int
        Channels of a token group that have a second code: those with the largest scales. Their codes are the last
        elements of a row.
    unit : tuple of int
        The fewest elements that fill whole words of the buffers, and how many words that is: ``(1, 1)``, or what
        several elements share.
    codes_dtype : numpy.dtype or None
        The dtype of codes that a user sees, if it is not `word`: of kinds that could not be told apart otherwise.
    """

    name: str
    dtype: np.dtype[Any]
    word: np.dtype[Any]
    compute: np.dtype[Any] = _FLOAT32
    is_query: bool = False
    scales_per: Literal["none", "head", "row", "group", "channel"] = "none"
    scale_dtype: np.dtype[Any] = _FLOAT32
    scale_word: np.dtype[Any] = _FLOAT32
    group_size: int = 0
    group_tokens: int = 0
    fine_channels: int = 0
    unit: tuple[int, int] = (1, 1)
    codes_dtype: np.dtype[Any] | None = None

    @property
    def bytes_per_element(self) -> int | float:
        """Bytes of one stored element, without scales."""
        elements, words = self.unit
        size = words * self.word.itemsize
        return size / elements if size % elements else size // elements

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of arrays of stored elements, as functions take them and objects show them."""
        return self.dtype if self.is_float else self.codes_dtype or self.word

    @property
    def has_scales(self) -> bool:
        """Whether codes have scales that are computed from rows: whether the kind is quantised.

        False for fp8 kinds: their scales belong to heads, not to rows, and are set by the user.
        """
        return self.scales_per in ("row", "group", "channel")

    @property
    def is_float(self) -> bool:
        """Whether stored elements are floats of `dtype`, not codes."""
        return not self.has_scales

    @property
    def is_scaled(self) -> bool:
        """Whether a value is more than its stored element: its product with a scale, perhaps by a zero point."""
        return self.scales_per != "none"

    @property
    def of_rows(self) -> str:
        """Return the name of the kind with codes of the same width and a scale for each row."""
        return self.name.partition("_channel")[0]

    @property
    def is_packed(self) -> bool:
        """Whether elements share words."""
        return self.unit[0] > 1

    @property
    def scale_ndim(self) -> int:
        """Axes of the array of scales; where there are none it is empty and has three."""
        return {"none": 3, "head": 1, "row": 3, "group": 4, "channel": 4}[self.scales_per]

    def scales_per_row(self, head_dim: int) -> int:
        """Scales that one row brings along: none, one, or one for each of its groups. Those of channels are no row's.

        Parameters
        ----------
        head_dim : int
            Elements in the row.

        Returns
        -------
        int
        """
        dim = check_size("head_dim", head_dim)
        if self.scales_per == "group":
            return -(-dim // self.group_size)
        return int(self.scales_per == "row")

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
        dim = check_size("head_dim", head_dim)
        elements, words = self.unit
        if dim % elements:
            size = words * self.word.itemsize
            raise DimensionMismatch(
                f"`head_dim`: expected a multiple of {elements} for {self} storage, "
                f"which puts as many elements into {'a byte' if size == 1 else f'{size} bytes'}, got {dim}; "
                "pad the rows, or store another kind",
                expected=elements,
                actual=dim,
            )
        if dim < self.fine_channels:
            raise DimensionMismatch(
                f"`head_dim`: expected at least {self.fine_channels} for {self} storage, which gives as many channels "
                f"a second code, got {dim}; take {self.name.removesuffix('_fine')}",
                expected=self.fine_channels,
                actual=dim,
            )
        return (dim + self.fine_channels) // elements * words

    def elements_of(self, words: int) -> int:
        """Elements of a stored row, by its words: the inverse of `words_per_row`.

        Parameters
        ----------
        words : int
            Words of the row, without scales: whole units.

        Returns
        -------
        int
        """
        elements, of_unit = self.unit
        return check_size("words", words) * elements // of_unit - self.fine_channels

    def scale_shape(self, rows: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
        """Shape of the scales of rows.

        Parameters
        ----------
        rows : tuple of int
            Shape of a buffer, without its last axis; axis 1 counts kv heads.
        head_dim : int
            Elements in a row.

        Returns
        -------
        tuple of int
            `rows` if a row has one scale, with one more axis if its groups have one each. If channels have scales,
            groups of tokens replace tokens. Each has the scales of its channels, then their zero points, then the
            numbers of the channels with a second code, as integers. ``(num_kv_heads,)`` if heads have one each, and
            ``(0, 0, 0)`` if there are none.

        Raises
        ------
        DimensionMismatch
            If tokens do not make whole groups.
        """
        if not isinstance(rows, tuple):
            raise TypeError(f"`rows`: expected a tuple of sizes, got {type(rows).__name__}")
        rows = tuple(check_size("rows", n) for n in rows)
        head_dim = check_size("head_dim", head_dim)
        if self.scales_per == "none":
            return (0, 0, 0)
        if self.scales_per == "head":
            if len(rows) < 2:
                raise DimensionMismatch(
                    f"`rows`: expected the sizes of a buffer, kv heads second, got {rows}"
                )
            return (rows[1],)
        if self.scales_per == "channel":
            some = self.group_tokens
            if rows[-1] % some:
                raise DimensionMismatch(
                    f"`block_size`: expected a multiple of {some} for {self} storage, whose scales belong "
                    f"to as many tokens, got {rows[-1]}; choose {-(-rows[-1] // some) * some}",
                    expected=some,
                    actual=rows[-1],
                )
            return (*rows[:-1], rows[-1] // some, 2 * head_dim + self.fine_channels)
        return (*rows, self.scales_per_row(head_dim)) if self.scales_per == "group" else rows

    def whole_groups(self, tokens: int) -> int:
        """Tokens rounded up to whole token groups, where such share scales.

        Parameters
        ----------
        tokens : int
            How many are wanted.

        Returns
        -------
        int
        """
        some = max(1, self.group_tokens)
        return -(-check_size("tokens", tokens) // some) * some

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one stored row, its scales included; of those of channels its share, rounded up.

        Parameters
        ----------
        head_dim : int
            Elements in the row.

        Returns
        -------
        int
        """
        scales, rows = self.scales_per_row(head_dim), 1
        if self.scales_per == "channel":
            scales, rows = 2 * head_dim + self.fine_channels, self.group_tokens
        return self.words_per_row(head_dim) * self.word.itemsize - (
            -scales * self.scale_word.itemsize // rows
        )

    def bytes_per_token(
        self, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None
    ) -> int:
        """Exact bytes that one token costs in one layer, K and V, scales included (not those of heads, which do not
        grow with tokens).

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
        v_dim = head_dim if head_dim_v is None else check_size("head_dim_v", head_dim_v)
        heads = check_size("num_kv_heads", num_kv_heads)
        return heads * (self.row_bytes(head_dim) + self.row_bytes(v_dim))

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """A pickle and a copy give the kind of the table itself: kinds are compared by identity."""
        return kind, (self.name,)


def _float(name: str, dtype: Any, word: Any = None, **more: Any) -> Kind:
    dtype = np.dtype(dtype)
    return Kind(name, dtype, dtype if word is None else np.dtype(word), is_query=True, **more)


def _fp8(name: str, dtype: Any) -> Kind:
    return Kind(name, np.dtype(dtype), _BYTE, scales_per="head")


def _by_channel(name: str, word: Any, unit: tuple[int, int], fine_channels: int = 0) -> Kind:
    return Kind(
        name, _FLOAT32, np.dtype(word), scales_per="channel", group_tokens=64, fine_channels=fine_channels, unit=unit,
        **_BF16_SCALES,
    )  # fmt: skip


_KINDS = {
    k.name: k
    for k in (
        _float("fp64", np.float64, compute=_FLOAT64),
        _float("fp32", np.float32),
        _float("fp16", np.float16, np.uint16),
        _float("bf16", _BF16, np.uint16),
        _fp8("fp8_e4m3", ml_dtypes.float8_e4m3fn),
        _fp8("fp8_e5m2", ml_dtypes.float8_e5m2),
        Kind("int8", _FLOAT32, np.dtype(np.int8), scales_per="row"),
        Kind(
            "code6", _FLOAT32, _BYTE, scales_per="row", unit=(8, 6), codes_dtype=np.dtype(np.int16)
        ),
        Kind(
            "int4", _FLOAT32, _BYTE, scales_per="group", group_size=32, unit=(2, 1), **_BF16_SCALES
        ),
        Kind("code4", _FLOAT32, _BYTE, scales_per="row", unit=(2, 1)),
        _by_channel("int8_channel", np.int8, (1, 1)),
        _by_channel("int4_channel_fine", np.uint8, (2, 1), fine_channels=8),
        _by_channel("int4_channel", np.uint8, (2, 1)),
    )
}
_ALIASES = {
    "f64": "fp64", "float64": "fp64", "double": "fp64",
    "f32": "fp32", "float32": "fp32", "single": "fp32",
    "f16": "fp16", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "bfp16": "bf16",
    "fp8": "fp8_e4m3", "f8": "fp8_e4m3", "f8e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3", "e4m3": "fp8_e4m3",
    "f8e5m2": "fp8_e5m2", "float8_e5m2": "fp8_e5m2", "e5m2": "fp8_e5m2",
    "i8": "int8", "q8": "int8",
    "i4": "int4", "q4": "int4",
}  # fmt: skip
_BY_STORED_DTYPE = {k.dtype: k for k in _KINDS.values() if k.is_float}
_BY_DTYPE = {dtype: k for dtype, k in _BY_STORED_DTYPE.items() if k.is_query}

#: Dtypes that queries, new rows, fused projections and masks may have, the widest first.
QUERY_DTYPES = tuple(_BY_DTYPE)
#: Dtypes of float buffers, the widest first.
STORED_FLOAT_DTYPES = tuple(_BY_STORED_DTYPE)


def kinds(by_channel: bool = False) -> tuple[Kind, ...]:
    """The storage kinds whose rows are stored one by one, the widest first.

    Parameters
    ----------
    by_channel : bool
        Whether those come after them whose scales belong to channels: which caches take for keys, functions do not.

    Returns
    -------
    tuple of Kind
    """
    return tuple(kind for kind in _KINDS.values() if by_channel or not kind.group_tokens)


def kind(name: str | Kind) -> Kind:
    """Return a storage kind by name.

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
    got = repr(name[:40]) if isinstance(name, str) else type(name).__name__
    raise UnsupportedDType(
        f"`kind`: expected one of {', '.join(_KINDS)} (or an alias such as float16), got {got}"
    )


def kind_of_dtype(dtype: Any) -> Kind | None:
    """The float kind of queries, new rows and masks of a dtype, or None.

    Parameters
    ----------
    dtype : numpy.dtype
        A dtype object.

    Returns
    -------
    Kind or None
    """
    return _BY_DTYPE.get(dtype)


def float_kind(dtype: Any) -> Kind:
    """Return the float kind of a dtype that has been checked to be one of `QUERY_DTYPES`."""
    return _BY_DTYPE[dtype]


def compute_dtype(*names: str) -> np.dtype[Any]:
    """Return the float type in which operations on kinds of these names compute."""
    return _FLOAT64 if "fp64" in names else _FLOAT32


def kind_of_stored_dtype(dtype: Any) -> Kind | None:
    """The float kind of buffers of a dtype, or None: those of `kind_of_dtype` and those that are stored only.

    Parameters
    ----------
    dtype : numpy.dtype
        A dtype object.

    Returns
    -------
    Kind or None
    """
    return _BY_STORED_DTYPE.get(dtype)


def kinds_of(
    both: str | Kind, k_kind: str | Kind | None, v_kind: str | Kind | None, by_channel: bool = False
) -> tuple[Kind, Kind]:
    """Return the kinds of K and of V from the three arguments that every object takes.

    Parameters
    ----------
    both, k_kind, v_kind : str or Kind
        See there.
    by_channel : bool
        Whether the object takes keys whose scales belong to channels. With `both` of such a kind V has rows as wide.

    Raises
    ------
    NotSupported
        If V should have scales by channel, or K has them and the object does not take such.
    """
    of_k, of_v = kind(both if k_kind is None else k_kind), kind(both if v_kind is None else v_kind)
    if not by_channel:
        refuse_channels("`kind`", of_k)
    if not of_v.group_tokens:
        return of_k, of_v
    beside = of_v.of_rows
    if v_kind is not None:
        raise NotSupported(
            f"`v_kind`: expected a kind whose rows have scales of their own, got {of_v}, which is for keys; "
            f"leave it out, or take {beside}"
        )
    return of_k, kind(beside)


def refuse_channels(name: str, of: Kind) -> None:
    """Refuse a kind of keys whose scales belong to channels, where rows are stored one by one.

    Raises
    ------
    NotSupported
        If it is such a kind.
    """
    if of.group_tokens:
        raise NotSupported(
            f"{name}: expected a kind whose rows are stored one by one, got {of}, whose scales belong to the channels "
            f"of {of.group_tokens} tokens; keep such keys in a KVCache or a PagedKVCache, or take "
            f"{of.of_rows}"
        )
