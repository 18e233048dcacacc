"""Arguments of a `PagedKVCache`: token ids, numbers of sequences, and numbers of new tokens."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.blocks import prefix
from numkv.caches.paged.store import SequenceState
from numkv.checks import check_integers, host_array
from numkv.errors import DimensionMismatch


def prompt_ids(tokens: Any) -> NDArray[np.int32]:
    """Return the token ids of a prompt, in memory of their own."""
    ids = prefix.prompt_ids([] if tokens is None else tokens)
    return ids.copy() if isinstance(tokens, np.ndarray) else ids


def sequence_number(seq: Any, name: str = "seq") -> int:
    """Return the number of a sequence that an argument is."""
    if type(seq) is int:
        return seq
    try:
        if isinstance(seq, bool):
            raise TypeError
        return operator.index(seq)
    except Exception:  # what an object's own `__index__` raises too
        raise TypeError(
            f"`{name}`: expected the number of a sequence, got {type(seq).__name__}; pass what `add` returned"
        ) from None


def sequence_numbers(sequences: Any, most: int, once: bool = False) -> tuple[int, ...]:
    """The numbers in an iterable, one more than `most` at most: it may have no end; `once` if none may come again."""
    try:
        given = iter(sequences)
    except TypeError:
        raise TypeError(
            f"`sequences`: expected numbers of sequences, got {type(sequences).__name__}; pass a list"
        ) from None
    seqs = tuple(
        seq if type(seq) is int else sequence_number(seq, "sequences")
        for seq in itertools.islice(given, most + 1)
    )
    if once and len(set(seqs)) != len(seqs):
        raise ValueError(f"`sequences`: expected each sequence once, got {seqs[:8]}")
    return seqs


def check_count(name: str, what: str, expected: int, got: int) -> None:
    """Refuse an argument that has more or fewer entries than expected; `what` says how many of what."""
    if got != expected:
        raise DimensionMismatch(
            f"`{name}`: expected {what}, got {got}", expected=expected, actual=got
        )


def unknown_sequence(seq: int) -> IndexError:
    """Return the error of a sequence that a cache does not have."""
    shown = seq if abs(int(seq)) < 2**63 else "a number beyond int64"
    return IndexError(f"`seq`: expected one of the cache's sequences, got {shown}")


def numbers_of_new_tokens(new_lens: Any, n: int, name: str = "new_lens") -> NDArray[np.int64]:
    """Return how many tokens each of `n` sequences gets, or has."""
    if isinstance(new_lens, (int, np.integer)) and not isinstance(new_lens, bool):
        if abs(int(new_lens)) >= 2**62:
            raise IndexError(f"`{name}`: expected numbers below 2**62, got {new_lens}")
        new_lens = [int(new_lens)] * n
    given = host_array(name, new_lens)
    lens: NDArray[np.int64] = check_integers(targets.get("cpu"), name, given, (n,)).astype(np.int64)
    every = lens.tolist()
    if min(every, default=0) < 0:
        raise IndexError(f"`{name}`: expected no negative numbers, got {every}")
    if max(every, default=0) >= 2**62:
        raise IndexError(f"`{name}`: expected numbers below 2**62, got {every}")
    return lens


def ids_of_step(
    tokens: Any, step: Any, states: Mapping[int, SequenceState] | None = None
) -> NDArray[np.int32]:
    """Return the token ids of a step's tokens.

    Parameters
    ----------
    tokens : array-like of int
        The caller's argument.
    step : Step
        The step: how many tokens each of its sequences gets.
    states : mapping of int to SequenceState, optional
        Sequences that may have been added with a prompt of which a part was found.
    """
    ids, num_tokens = prefix.token_ids(tokens, "token_ids"), step.num_tokens
    found = (
        {seq: states[seq] for seq in step.sequences if _has_found(states[seq])} if states else {}
    )
    if ids.shape != (num_tokens,):
        remedy = ""
        if found and ids.shape == (num_tokens + sum(state.length for state in found.values()),):
            of = ", ".join(
                f"{state.length} tokens of sequence {seq}" for seq, state in found.items()
            )
            remedy = f"; `add` has found {of}: leave them out, {_REST}"
        raise DimensionMismatch(
            f"`token_ids`: expected an id for each of the step's {num_tokens} tokens, got shape {ids.shape}{remedy}",
            expected=num_tokens,
            actual=ids.shape,
        )
    ends = np.cumsum(step.new_lens).tolist()
    for seq, end, n in zip(step.sequences, ends, step.new_lens.tolist(), strict=True):
        if seq in found and _begins_anew(ids[end - n : end], found[seq]):
            raise ValueError(
                f"`token_ids`: expected the tokens after the {found[seq].length} that `add` has found for "
                f"sequence {seq}, got its prompt from the beginning; roll the step back, then reserve, compute and "
                f"commit the rest, {_REST}"
            )
    return ids


_REST = "prompt[cache.cached_len(seq):]"


def _has_found(state: SequenceState) -> bool:
    """Return whether a sequence has tokens that `add` found, and no others yet."""
    return state.prompt is not None and state.length == state.cached > 0


def _begins_anew(ids: NDArray[np.int32], state: SequenceState) -> bool:
    """Return whether the first ids after `add` are the prompt once more, not its remainder.

    That is certain if they repeat the whole cached prefix, and the prompt goes on differently: a prompt may repeat
    itself.
    """
    prompt, length = state.prompt, state.length
    assert prompt is not None
    if len(ids) < length:
        return False
    rest = prompt[length : length + len(ids)]
    again = prompt[: len(ids)]
    return np.array_equal(ids[: len(again)], again) and not np.array_equal(ids[: len(rest)], rest)
