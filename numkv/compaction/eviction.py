"""Which tokens to keep of a cache that has grown too long: functions of lengths and attention weights.

Each returns the indices of the tokens to keep, in order, as ``compact`` takes them::

    keep = numkv.compaction.eviction.first_and_recent(layer.seq_len, num_first=4, num_recent=1020)
    layer.compact(keep, shift=numkv.rope_shift(cos, sin))

`first_and_recent` needs the length only. The other two use attention weights, which `numkv.attention_weights` and the
methods of that name compute for some queries. `heavy_hitters` uses their sums over all queries so far, which an
`AttentionTally` adds up. `seen_by_recent` uses those of the last queries. All heads of a cache keep the same tokens, so
weights are summed over heads; to sum over layers that keep the same tokens, stack their rows.

Where the weights come from, and where the indices go:

- `ContiguousLayer`, `PagedLayer`: ``layer.attention_weights(q)``, ``layer.compact(keep, shift=shift)``;
- `KVCache`: ``cache.attention_weights(layer, q)``, ``cache.compact(keep, shift=shift)``, also with a row of `keep` for
  each layer;
- `PagedKVCache`: ``step.attention_weights(layer, q)[i, :, :length]`` for the step's sequence i, before the step is
  committed, or ``cache.attention_weights(layer, seq, q)`` after; ``cache.compact(seq, keep, shift=shift)``;
- `CausalCache` and its like: ``cache.attention_weights(layer, q)[seq]`` for the sequences of a batch;
  ``cache.compact(seq, cache.positions(seq)[keep])``, with the shift that the cache was made with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.access import Access, drops, whole
from numkv.checks import check_kept
from numkv.errors import DimensionMismatch, NonFiniteInput, UnsupportedDType
from numkv.numbers import check_bytes, check_index, check_size

Indices = NDArray[np.int64]
Weights = NDArray[np.float64]


def first_and_recent(length: int, num_first: int, num_recent: int) -> Indices:
    """Keep the first tokens, which serve as attention sinks, and the newest ones.

    Parameters
    ----------
    length : int
        Tokens in the cache.
    num_first, num_recent : int
        How many of each to keep.

    Returns
    -------
    int64 array (n,)
        At most ``num_first + num_recent`` tokens; all tokens if there are no more.

    Notes
    -----
    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453), section 3.2,
    which keeps four first tokens and counts positions within the cache: compact with a shift.

    Examples
    --------
    >>> from numkv.compaction import first_and_recent
    >>> first_and_recent(10, num_first=2, num_recent=3)
    array([0, 1, 7, 8, 9])
    """
    length, first = check_size("length", length), check_size("num_first", num_first)
    recent = check_size("num_recent", num_recent)
    first = min(first, length)
    check_bytes({"length": min(length, first + recent)}, 8)
    return np.concatenate([np.arange(first), np.arange(max(first, length - recent), length)])


def heavy_hitters(weights: Any, num_keep: int, num_first: int = 0, num_recent: int = 0) -> Indices:
    """Choose the tokens that received the most attention, in addition to the first and the newest ones.

    Parameters
    ----------
    weights : float array (num_tokens,) or (num_kv_heads, num_tokens)
        Attention that each token received, such as `AttentionTally.weights`; summed over heads.
    num_keep : int
        How many to keep in all.
    num_first, num_recent : int
        How many of them are the first and the newest, whatever their weights.

    Returns
    -------
    int64 array (num_keep,)
        Or all tokens if there are no more. Of equal weights the earlier token's is taken.

    Raises
    ------
    ValueError
        If the first and the newest are more than `num_keep`.
    NonFiniteInput
        If a weight is NaN or infinite.
    DimensionMismatch, UnsupportedDType
        If `weights` have another shape, or are no numbers.

    Notes
    -----
    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (arXiv:2306.14048), section 4, where half of the tokens kept are the newest ones, and each head keeps its own.

    Examples
    --------
    >>> from numkv.compaction import heavy_hitters
    >>> heavy_hitters([0.1, 2.0, 0.3, 1.0, 0.2, 0.4], num_keep=3, num_recent=1)
    array([1, 3, 5])
    """
    of_tokens, _ = _weights(weights)
    keep, first = check_size("num_keep", num_keep), check_size("num_first", num_first)
    recent = check_size("num_recent", num_recent)
    if first + recent > keep:
        raise ValueError(
            f"`num_keep`: expected at least num_first + num_recent = {first + recent}, got {keep}"
        )
    length = int(of_tokens.shape[-1])
    if keep >= length:
        return np.arange(length)
    with np.errstate(over="ignore"):  # sums beyond float64 are the heaviest
        between = of_tokens.sum(axis=0)[first : length - recent]
    heaviest = np.argsort(-between, kind="stable")[: keep - first - recent]
    return np.concatenate(
        [np.arange(first), first + np.sort(heaviest), np.arange(length - recent, length)]
    )


def seen_by_recent(
    weights: Any, num_keep: int, num_recent: int, kernel_size: int = 1, num_first: int = 0
) -> Indices:
    """Choose the tokens that the newest queries attend to, with their neighbours, in addition to the newest tokens.

    Parameters
    ----------
    weights : float array (num_tokens,) or (num_kv_heads, num_tokens)
        Attention from the queries of the last `num_recent` tokens, as ``attention_weights`` gives it.
    num_keep : int
        How many to keep in all.
    num_recent : int
        How many of them are the newest, whatever their weights.
    kernel_size : int
        A token counts as much as the heaviest of this many neighbours, itself in the middle; odd, 1 for itself alone.
        Each head's weights are pooled on their own, without the newest tokens, and then summed.
    num_first : int
        How many are the first, whatever their weights.

    Returns
    -------
    int64 array (num_keep,)
        Or all tokens if there are no more. Of equal weights the earlier token's is taken.

    Raises
    ------
    ValueError
        If the first and the newest are more than `num_keep`, or `kernel_size` is even.
    NonFiniteInput
        If a weight is NaN or infinite.
    DimensionMismatch, UnsupportedDType
        If `weights` have another shape, or are no numbers.

    Notes
    -----
    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469), section 4,
    for a prompt before the first generated token. There each head keeps its own.

    Examples
    --------
    >>> from numkv.compaction import seen_by_recent
    >>> seen_by_recent([0.1, 0.2, 2.0, 0.3, 0.5, 0.1, 1.0], num_keep=4, num_recent=1, kernel_size=3)
    array([1, 2, 3, 6])
    """
    of_tokens, _ = _weights(weights)
    recent = check_size("num_recent", num_recent)
    before = max(0, int(of_tokens.shape[-1]) - recent)
    pooled = of_tokens.copy()
    pooled[:, :before] = max_pool(of_tokens[:, :before], kernel_size)
    return heavy_hitters(pooled, num_keep, num_first, recent)


def max_pool(weights: Any, kernel_size: int) -> Weights:
    """Return the largest weight among each token's neighbours, itself in the middle.

    Parameters
    ----------
    weights : float array (num_tokens,) or (num_kv_heads, num_tokens)
        Weights.
    kernel_size : int
        Neighbours, the token included; odd. At the ends there are fewer.

    Returns
    -------
    float64 array of the shape of `weights`

    Raises
    ------
    ValueError
        If `kernel_size` is even or below 1.
    NonFiniteInput
        If a weight is NaN or infinite.
    DimensionMismatch, UnsupportedDType
        If `weights` have another shape, or are no numbers.
    """
    size = check_size("kernel_size", kernel_size, 1)
    if size % 2 == 0:
        raise ValueError(f"`kernel_size`: expected an odd number, got {size}")
    of_tokens, shape = _weights(weights)
    side = min(size // 2, int(of_tokens.shape[1]))  # neighbours that there are not cost no memory
    size = 2 * side + 1
    edges = np.pad(of_tokens, ((0, 0), (side, side)), constant_values=-np.inf)
    pooled = of_tokens
    if of_tokens.shape[1]:
        pooled = np.lib.stride_tricks.sliding_window_view(edges, size, axis=1).max(axis=2)
    return pooled.reshape(shape)


def _weights(weights: Any) -> tuple[Weights, tuple[int, ...]]:
    """Check weights, and return them on the host with a row for each head; beside them the shape that they came in."""
    if isinstance(weights, (list, tuple)):
        weights = targets.get("cpu").asarray(weights, "weights")
    target = targets.of(weights)
    with target.on(weights):
        given = target.to_host(target.accept(weights, "weights"))
    if given.ndim not in (1, 2):
        shape = ("num_kv_heads", "num_tokens")
        raise DimensionMismatch(
            f"`weights`: expected (num_tokens,) or (num_kv_heads, num_tokens), got {given.shape}; sum over "
            "the other axes first",
            expected=shape,
            actual=given.shape,
        )
    if given.dtype.kind not in "fiu" and (given.size or given.dtype.kind in "cV"):
        raise UnsupportedDType(f"`weights`: expected numbers, got {given.dtype}; convert them")
    with np.errstate(over="ignore"):  # what is more than float64 holds counts as infinite
        of_tokens = np.atleast_2d(given.astype(np.float64))
    bad = np.argwhere(~np.isfinite(of_tokens))
    if len(bad):
        index = tuple(int(i) for i in bad[0][2 - given.ndim :])
        raise NonFiniteInput(
            f"`weights`: expected finite numbers, got {of_tokens[tuple(bad[0])]} at {index}; were keys "
            "or queries NaN?",
            index=index,
        )
    return of_tokens, tuple(given.shape)


class AttentionTally:
    """Sums of attention weights over steps, for the tokens of one layer; kept on the host.

    One thread at a time changes it: a second one gets `NumkvError`.

    Parameters
    ----------
    num_kv_heads : int
        Kv heads of the layer.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> tally = numkv.AttentionTally(num_kv_heads=1)
    >>> tally.add([[0.75, 0.25]])  # (num_kv_heads, tokens so far), from layer.attention_weights(q)
    >>> tally.add([[0.5, 0.25, 0.25]])
    >>> keep = numkv.compaction.eviction.heavy_hitters(tally.weights, num_keep=2, num_recent=1)
    >>> tally.compact(keep)  # and layer.compact(keep)
    >>> tally.weights
    array([[1.25, 0.25]])
    """

    def __init__(self, num_kv_heads: int) -> None:
        heads = check_size("num_kv_heads", num_kv_heads, 1)
        check_bytes({"num_kv_heads": heads}, 8)
        self._sums = np.zeros((heads, 0))
        self._length = 0
        self._access = Access()

    @property
    def num_kv_heads(self) -> int:
        """Kv heads."""
        return len(self._sums)

    @property
    def weights(self) -> Weights:
        """The sums, float64 ``(num_kv_heads, num_tokens)``: a view, valid until the next change."""
        return self._sums[:, : self._length]

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"AttentionTally(num_kv_heads={self.num_kv_heads}, len={len(self)})"

    @whole
    def add(self, weights: Any) -> None:
        """Add the weights of a step; waits for the device where they are on one.

        Parameters
        ----------
        weights : float array (num_kv_heads, num_tokens)
            From ``attention_weights`` for the step's queries: a number for each token, new ones included.

        Raises
        ------
        DimensionMismatch
            If the number of heads differs, or there are fewer tokens than before.
        NonFiniteInput
            If a weight is NaN or infinite; nothing is added.
        UnsupportedDType
            If they are no numbers.
        """
        new, shape = _weights(weights)
        heads, length = new.shape
        if len(shape) == 1 or heads != self.num_kv_heads or length < self._length:
            expected = (self.num_kv_heads, f"{self._length} or more")
            raise DimensionMismatch(
                f"`weights`: expected ({expected[0]}, {expected[1]}), got {shape}; compact and "
                "truncate the tally along with the cache",
                expected=expected,
                actual=shape,
            )
        with np.errstate(over="ignore"):
            new[:, : self._length] += self._sums[:, : self._length]
        if not np.isfinite(new).all():
            raise NonFiniteInput("`weights`: expected sums that float64 holds, got infinity")
        if length > self._sums.shape[1]:
            larger = np.zeros((heads, max(length, 2 * self._sums.shape[1])))
            larger[:, : self._length] = self._sums[:, : self._length]
            self._sums = larger
        self._sums[:, :length] = new
        self._length = length

    @drops
    def compact(self, keep: Any) -> None:
        """Keep some tokens only, as the cache's own `compact` does.

        Parameters
        ----------
        keep : array-like of int (n,)
            The tokens, in order.

        Raises
        ------
        IndexError
            If there is no such token.
        ValueError
            If indices do not rise.
        DimensionMismatch, UnsupportedDType
            If `keep` is no row of integers.
        """
        kept = check_kept("keep", keep, self._length)
        self._sums[:, : len(kept)] = self._sums[:, : self._length][:, kept]
        self._length = len(kept)

    @drops
    def truncate(self, length: int) -> None:
        """Keep the first tokens only.

        Parameters
        ----------
        length : int
            How many.

        Raises
        ------
        IndexError
            If `length` is negative or above ``len(tally)``.
        """
        self._length = check_index("length", length, self._length, inclusive=True)
