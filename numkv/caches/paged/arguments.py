"""What callers of a `PagedKVCache` pass: token ids, and numbers of new tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.blocks.prefix import token_ids
from numkv.checks import check_integers, host_array
from numkv.errors import DimensionMismatch

__all__ = ["ids_of_step", "numbers_of_new_tokens", "prompt_ids"]


def prompt_ids(tokens: Any) -> NDArray[np.int32]:
    """Token ids of a prompt, in memory that nobody else writes to."""
    ids = token_ids([] if tokens is None else tokens)
    if ids.ndim != 1:
        raise DimensionMismatch(
            f"`tokens`: expected int32 (num_tokens,), got {ids.dtype} {ids.shape}; pass one prompt",
            expected=("num_tokens",),
            actual=ids.shape,
        )
    return ids.copy() if isinstance(tokens, np.ndarray) else ids


def numbers_of_new_tokens(new_lens: Any, n: int) -> NDArray[np.int64]:
    """How many tokens each of `n` sequences gets."""
    if isinstance(new_lens, (int, np.integer)) and not isinstance(new_lens, bool):
        if abs(int(new_lens)) >= 2**62:
            raise IndexError(f"`new_lens`: expected numbers below 2**62, got {new_lens}")
        new_lens = [int(new_lens)] * n
    given = host_array("new_lens", new_lens)
    lens: NDArray[np.int64] = check_integers(targets.get("cpu"), "new_lens", given, (n,)).astype(
        np.int64
    )
    every = lens.tolist()
    if min(every, default=0) < 0:
        raise IndexError(f"`new_lens`: expected no negative numbers, got {every}")
    if max(every, default=0) >= 2**62:
        raise IndexError(f"`new_lens`: expected numbers below 2**62, got {every}")
    return lens


def ids_of_step(tokens: Any, num_tokens: int) -> NDArray[np.int32]:
    """Token ids of a step's tokens."""
    ids = token_ids(tokens, "token_ids")
    if ids.shape != (num_tokens,):
        raise DimensionMismatch(
            f"`token_ids`: expected an id for each of the step's {num_tokens} tokens, got shape {ids.shape}",
            expected=num_tokens,
            actual=ids.shape,
        )
    return ids
