"""The arguments of multi-sequence caches: `CacheConfig`, `Batch`, those of `init`; checks of numbers and indices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numkv.caches.layer_spec import fill_in
from numkv.errors import DimensionMismatch, UnsupportedDType
from numkv.kinds import Kind, kind
from numkv.numbers import as_int, check_flag, check_index, check_size
from numkv.targets.base import Target

#: Positions that there are, and more cells than a cache can have: both are stored as int32.
MOST_POSITIONS = 2**31

#: Ids of sequences and layers are below this, so that an int64 holds them.
_MOST_IDS = 2**63
#: Indices that an iterable may name beyond one for each token.
_MORE = 2**18


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
        fill_in(
            self, padding=check_size("padding", padding, 0, MOST_POSITIONS - 1),
            permuted_v=check_flag("permuted_v", self.permuted_v), mask_dtype=mask_dtype,
        )  # fmt: skip


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


def check_sequence(name: str, i: Any) -> int:
    """Take a sequence id."""
    return _check_bounded(name, i, "an id", _MOST_IDS)


def check_layer(name: str, i: Any) -> int:
    """Take the number of a layer."""
    if type(i) is int and 0 <= i < _MOST_IDS:
        return i  # what most are
    return _check_bounded(name, i, "a layer", _MOST_IDS)


def check_position(name: str, i: Any) -> int:
    """Take a position; one that no token can have is after all others."""
    return _check_bounded(name, i, "a position", _MOST_IDS + 1)


def check_integer(name: str, i: Any) -> int:
    """Take an integer of any sign, bools are none; one that no int64 holds becomes the next that it does."""
    return max(-_MOST_IDS, min(_MOST_IDS, as_int(name, i)))


def _check_bounded(name: str, i: Any, what: str, most: int) -> int:
    number = check_integer(name, i)
    if number < 0:
        raise IndexError(f"`{name}`: expected {what} from 0 up, got {number}")
    if number >= most:
        raise IndexError(f"`{name}`: expected {what} below 2**63, got one of {number} or more")
    return number


def elements(name: str, x: Any) -> Iterator[Any]:
    """Return the elements of an iterable of integers, which are not checked and may have no end."""
    try:
        return iter(x)
    except TypeError:
        raise TypeError(
            f"`{name}`: expected an iterable of integers, got {type(x).__name__}"
        ) from None


def check_indices(name: str, x: Any, size: int) -> tuple[int, ...]:
    """Take an iterable of indices in ``[0, size)``; None has none of them.

    They may be named more than once. An iterable that goes on for ever is refused.
    """
    if x is None or (type(x) is tuple and not x):
        return ()
    found: list[int] = []
    for i in elements(name, x):
        found.append(check_index(name, i, size))
        if len(found) > size + _MORE:
            raise DimensionMismatch(
                f"`{name}`: expected indices of the {size} tokens of the batch, got more than {size + _MORE}",
                expected=size,
            )
    return tuple(found)
