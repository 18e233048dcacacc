"""Trees of draft tokens: which tokens are on the path to which, and how deep they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.checks import check_integers, host_array
from numkv.errors import DimensionMismatch


def tree_mask(parents: Any, cu_seqlens_q: Any = None) -> NDArray[np.uint32]:
    """Return the `mask` of attention for trees of draft tokens: each token sees itself and the path to it.

    Parameters
    ----------
    parents : array-like of int (num_tokens,)
        For each new token the number of its parent among its sequence's new tokens, or -1 for those that follow the
        sequence itself. Parents come before their children.
    cu_seqlens_q : array-like of int (num_seqs + 1,), optional
        Prefix sums of the numbers of new tokens; one sequence if None.

    Returns
    -------
    uint32 array (num_tokens, words)
        On the host. Bit ``j % 32`` of word ``j // 32`` of a row is set if the token sees new token j of its sequence.
        At least one word.

    Raises
    ------
    IndexError
        If a parent is not an earlier token, or -1.
    DimensionMismatch
        If there are not as many parents as tokens.
    UnsupportedDType, TypeError
        If these are no integers.

    Examples
    --------
    >>> import numkv
    >>> numkv.tree_mask([-1, 0, 0, 1])  # 0 -> 1 -> 3, and 0 -> 2
    array([[ 1],
           [ 3],
           [ 5],
           [11]], dtype=uint32)
    """
    of, starts = _check(parents, cu_seqlens_q)
    most = int(np.diff(starts).max(initial=1))
    rows: NDArray[np.uint32] = np.zeros((len(of), max(1, -(-most // 32))), np.uint32)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for i in range(end - start):
            parent = of[start + i]
            if parent >= 0:
                rows[start + i] = rows[start + parent]
            rows[start + i, i // 32] |= np.uint32(1 << i % 32)
    return rows


def depths_of(parents: Any, cu_seqlens_q: Any = None) -> NDArray[np.int64]:
    """Return how many tokens of the tree come before each; see `tree_mask`."""
    of, starts = _check(parents, cu_seqlens_q)
    depths: NDArray[np.int64] = np.zeros(len(of), np.int64)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for i in range(start, end):
            if of[i] >= 0:
                depths[i] = depths[start + of[i]] + 1
    return depths


def _check(parents: Any, cu_seqlens_q: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Parents, and where sequences begin, checked."""
    on_host = targets.get("cpu")
    of = check_integers(on_host, "parents", host_array("parents", parents), ("num_tokens",))
    of = of.astype(np.int64)
    starts: NDArray[np.int64] = np.array([0, len(of)], np.int64)
    if cu_seqlens_q is not None:
        given = host_array("cu_seqlens_q", cu_seqlens_q)
        starts = check_integers(on_host, "cu_seqlens_q", given, ("num_seqs + 1",)).astype(np.int64)
    if not len(starts) or starts[0] != 0 or starts[-1] != len(of) or (np.diff(starts) < 0).any():
        raise DimensionMismatch(
            f"`cu_seqlens_q`: expected prefix sums that start with 0, never fall and end with {len(of)}, got "
            f"{starts.tolist()}",
            expected=len(of),
            actual=int(starts[-1]) if len(starts) else 0,
        )
    number = np.arange(len(of)) - starts[:-1].repeat(np.diff(starts))
    bad = np.flatnonzero((of < -1) | (of >= number))
    if len(bad):
        raise IndexError(
            f"`parents`: expected numbers of earlier tokens of the same sequence, or -1, got {of[bad[0]]} for token "
            f"{number[bad[0]]}"
        )
    return of, starts
