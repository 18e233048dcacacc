"""The arguments of multi-sequence caches: `CacheConfig`, `Batch`, and the checked ones of `init`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from numkv.caches.multi.checks import MOST_POSITIONS
from numkv.errors import UnsupportedDType
from numkv.kinds import Kind, kind
from numkv.numbers import check_flag, check_size
from numkv.targets.base import Target


@dataclass(frozen=True)
class CacheConfig:
    """The layout of what `get` returns.

    Attributes
    ----------
    padding : int
        The cells that `get` shows begin and end at multiples of this; 0 is 1.
    permuted_v : bool
        Whether `get` returns V as ``(num_kv_heads, head_dim_v, n)``.
    mask_dtype : str or Kind
        Float kind of the mask.

    Raises
    ------
    DimensionMismatch
        If the padding is negative, or ``2**31`` or more.
    TypeError
        If the padding is no integer, or `permuted_v` neither True nor False.
    UnsupportedDType
        If the mask's kind is no float kind.
    """

    padding: int = 1
    permuted_v: bool = False
    mask_dtype: str | Kind = "fp32"

    def __post_init__(self) -> None:
        padding = 1 if self.padding is None else self.padding
        mask_dtype = "fp32" if self.mask_dtype is None else self.mask_dtype
        try:
            is_query = kind(mask_dtype).is_query
        except UnsupportedDType:
            is_query = False
        if not is_query:
            raise UnsupportedDType(
                f"`mask_dtype`: expected fp64, fp32, fp16 or bf16, got {mask_dtype!r}"
            )
        # As plain numbers: sums of small integers of NumPy overflow.
        checked = {
            "padding": check_size("padding", padding, 0, MOST_POSITIONS - 1),
            "permuted_v": check_flag("permuted_v", self.permuted_v),
            "mask_dtype": mask_dtype,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Batch:
    """The tokens of a pass; checked by `start_forward`.

    Attributes
    ----------
    positions : array-like of int (num_tokens,)
        Position of each token in its sequence, below ``2**31``.
    sequences : array-like of int (num_tokens,)
        Sequence of each token: any integers from 0 up, below ``2**63``.
    multimodal : iterable of int
        Tokens, by their index in the batch, that stand for items of the encoder: an image, a sound.
    """

    positions: Any
    sequences: Any
    multimodal: Any = ()


class Setup(NamedTuple):
    """The checked arguments of `MultiSequenceCache.init`."""

    k_kind: Kind
    v_kind: Kind
    max_sequences: int
    capacity: int
    max_batch: int
    target: Target
    rotate: bool
