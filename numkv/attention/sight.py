"""Masks besides causality and a window: attention's options, checked, and laid out for kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.arrays import Array
from numkv.checks import check_apart, check_array, check_integers
from numkv.errors import DimensionMismatch, NotSupported
from numkv.numbers import check_flag
from numkv.rows.mask import COLUMNS
from numkv.targets.base import Target

_WORDS = (np.dtype(np.uint32), np.dtype(np.int32))


class Sight(NamedTuple):
    """The tokens that a call's queries see, where causality and a window do not suffice; arrays not checked.

    Attributes
    ----------
    causal : bool
        Whether queries see no later tokens.
    ranges : int array (num_tokens, 2) or None
        Tokens that each query sees, in place of causality.
    mask : uint32 array (num_tokens, words) or None
        Bits of the newest tokens that each query sees.
    alibi_slopes : array (num_q_heads,) or None
        Slopes of biases.
    first : int
        The first token that any query sees, if queries are causal. Another call computes earlier tokens.
    """

    causal: bool = True
    ranges: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    first: int = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether each query is one of the cached tokens, as with causality or a mask."""
        return self.mask is not None or (self.causal and self.ranges is None)


def check_sight(given: Mapping[str, Any], window_left: int) -> Sight | None:
    """Return the options of a call that define masks; None if none matters."""
    causal = check_flag("causal", given.get("causal"), True)
    made = Sight(causal, given.get("ranges"), given.get("mask"), given.get("alibi_slopes"))
    if made.causal and made.ranges is None and made.mask is None and made.alibi_slopes is None:
        return None
    if made.ranges is not None and made.mask is not None:
        raise NotSupported("`mask`: expected None with `ranges`, which define what queries see")
    if made.ranges is not None and window_left >= 0:
        raise NotSupported(
            f"`window_left`: expected -1 with `ranges`, which define what queries see, got {window_left}; "
            "cut the ranges"
        )
    return made


def lay_out(
    target: Target, sight: Sight, seq_lens: Array, q_starts: Array, capacity: int, window_left: int,
    sinks: Array, num_tokens: int, num_q_heads: int, out: Array | None, *, validate: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Lay out masks for kernels, and sinks with slopes.

    Parameters
    ----------
    target : Target
        Where.
    sight : Sight
        From `check_sight`; its arrays are checked here.
    seq_lens, q_starts : int array (num_seqs,), (num_seqs + 1,)
        Lengths, and where each sequence's queries start; checked.
    capacity : int
        Tokens for which a sequence has room.
    window_left : int
        Earlier tokens that a query sees, or -1.
    sinks : array (num_q_heads,) or (0,)
        Sinks, in the float type that attention computes in.
    num_tokens, num_q_heads : int
        Queries and their heads.
    out : array or None
        An array of the caller's that the call writes to.
    validate : bool
        Whether values are checked if that waits for the device.

    Returns
    -------
    rows, heads : array
        The `ranges` and `sinks` of `numkv.kernels.operations.Operations.attend`.
    """
    nothing = functools.partial(_nothing, target.key)
    ranges, bits, slopes = nothing("int64", 2), nothing("uint32", 2), nothing(sinks.dtype.name, 1)
    heads, written = slopes, {} if out is None else {"out": out}
    if sight.ranges is not None:
        given = check_integers(target, "ranges", sight.ranges, (num_tokens, 2))
        check_apart(target, written, {"ranges": given})
        ranges = target.index(given, np.int64)  # on CUDA int32 stays what it is
    columns = 2
    if sight.mask is not None:
        given = check_array(target, "mask", sight.mask, _WORDS, (num_tokens, "words"))
        check_apart(target, written, {"mask": given})
        bits = given if given.dtype == _WORDS[0] else given.view(_WORDS[0])
        columns = COLUMNS + int(bits.shape[1])
        if num_tokens:
            _check_words(target, q_starts, int(bits.shape[1]), validate)
    if sight.alibi_slopes is not None:
        slopes = _check_slopes(target, sight.alibi_slopes, sinks.dtype, num_q_heads, validate)
        heads = target.empty((2 * num_q_heads,), sinks.dtype)
        columns = max(columns, COLUMNS)
    rows = target.empty((num_tokens, columns), np.int64)
    target.ops.fill_mask(
        seq_lens, q_starts, ranges, bits, int(sight.causal), int(window_left), sight.first, capacity, sinks, slopes,
        rows, heads,
    )  # fmt: skip
    return rows, sinks if sight.alibi_slopes is None else heads


def seen_by_queries(
    target: Target, sight: Sight | None, tokens: int, length: int, window_left: int
) -> NDArray[np.int64]:
    """Return the tokens ``[low, high)`` of one sequence that each of its queries sees, on the host.

    Masks and biases are refused: they count tokens that a cache of two pools stores separately.
    """
    if sight is None:
        sight = Sight()
    if sight.mask is not None or sight.alibi_slopes is not None:
        name = "mask" if sight.mask is not None else "alibi_slopes"
        raise NotSupported(
            f"`{name}`: expected None for a cache with tokens in full precision, got one; use a cache without"
        )
    if sight.ranges is not None:
        given = check_integers(target, "ranges", sight.ranges, (tokens, 2))
        return target.to_host(given).astype(np.int64).clip(0, length)
    position, seen = np.arange(length - tokens, length), np.zeros((tokens, 2), np.int64)
    seen[:, 1] = position + 1 if sight.causal else length
    if window_left >= 0:
        np.maximum(position - window_left, 0, out=seen[:, 0])
    return seen


def _check_words(target: Target, q_starts: Array, words: int, validate: bool) -> None:
    """Refuse masks with too few words for a sequence's queries."""
    if words < 1:
        raise DimensionMismatch(
            "`mask`: expected at least one word for each query, got none",
            expected=1,
            actual=0,
        )
    if target.values_on_host or validate:
        most = int(np.diff(target.to_host(q_starts)).max(initial=0))
        if most > 32 * words:
            raise DimensionMismatch(
                f"`mask`: expected a bit for each of the newest {most} tokens, {-(-most // 32)} words for each query, "
                f"got {words}",
                expected=-(-most // 32),
                actual=words,
            )


def _check_slopes(
    target: Target, slopes: Any, compute: np.dtype[Any], num_q_heads: int, validate: bool
) -> Array:
    """Slopes on the target, all finite."""
    checked: Array = target.reals("alibi_slopes", slopes, compute, (num_q_heads,))
    if num_q_heads and (target.values_on_host or validate):
        largest = np.abs(target.to_host(checked)).max()  # NaN if one is
        if not largest < np.inf:
            raise ValueError(f"`alibi_slopes`: expected finite numbers, got {largest}")
    return checked


@functools.cache
def _nothing(target: str, dtype: str, ndim: int) -> Array:
    """Return the empty array that stands for a missing argument."""
    return targets.by_key(target).empty((0, 2)[:ndim], np.dtype(dtype))
