"""Compiled checks of values in index arrays: checking every sequence costs less than one NumPy call.

They run on the host. For the CPU target they always run; for CUDA only when asked to, on copies.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import array, build

#: What `check_lengths` found.
FINE, BAD_LENGTH, TOO_MANY_QUERIES, BAD_STARTS = range(4)


def _check_lengths(seq_lens, q_starts, num_tokens, capacity, one_may_see_nothing):
    if q_starts[0] != 0 or q_starts[len(seq_lens)] != num_tokens:
        return BAD_STARTS, -1
    for b in range(len(seq_lens)):
        queries = q_starts[b + 1] - q_starts[b]
        if queries < 0:
            return BAD_STARTS, b
        if seq_lens[b] < 0 or seq_lens[b] > capacity:
            return BAD_LENGTH, b
        if queries > seq_lens[b] and not (one_may_see_nothing and queries == 1):
            return TOO_MANY_QUERIES, b
    return FINE, -1


@functools.cache
def _kernel(function: Any) -> Any:
    """Return the compiled form of a check."""
    signature, emit = _TYPES[function]
    return build(function, signature, label=function.__name__.removeprefix("_"), emit=emit)


def check_lengths(
    seq_lens: Any, q_starts: Any, num_tokens: int, capacity: int, one_may_see_nothing: bool
) -> tuple[int, int]:
    """Find the first sequence whose numbers do not fit.

    Parameters
    ----------
    seq_lens : int64 array (num_seqs,)
        Tokens in the cache.
    q_starts : int64 array (num_seqs + 1,)
        Where each sequence's queries start.
    num_tokens : int
        Query tokens in all.
    capacity : int
        Tokens that a sequence can have.
    one_may_see_nothing : bool
        Whether a single query may go with an empty sequence.

    Returns
    -------
    finding, sequence : int
        One of `FINE`, `BAD_LENGTH`, `TOO_MANY_QUERIES`, `BAD_STARTS`, and which sequence (-1: none in particular).
    """
    found, b = _kernel(_check_lengths)(
        seq_lens, q_starts, num_tokens, capacity, one_may_see_nothing
    )
    return int(found), int(b)


def _first_unfit(block_table, seq_lens, block_size, num_blocks):
    for b in range(len(seq_lens)):
        if seq_lens[b] < 0 or seq_lens[b] > block_table.shape[1] * block_size:
            return b
        for i in range((seq_lens[b] + block_size - 1) // block_size):
            if block_table[b, i] < 0 or block_table[b, i] >= num_blocks:
                return b
    return -1


def first_unfit(block_table: Any, seq_lens: Any, block_size: int, num_blocks: int) -> int:
    """Find the first sequence whose length does not fit its table, or needs a block outside the pool.

    Parameters
    ----------
    block_table : int32 array (num_seqs, max_blocks)
        Physical blocks.
    seq_lens : int64 array (num_seqs,)
        Lengths.
    block_size, num_blocks : int
        Sizes of the pool.

    Returns
    -------
    int
        Which sequence, or -1.
    """
    return int(_kernel(_first_unfit)(block_table, seq_lens, block_size, num_blocks))


def _first_outside(numbers, low, high):
    for i in range(len(numbers)):
        if numbers[i] < low or numbers[i] >= high:
            return i
    return -1


def first_outside(numbers: Any, low: int, high: int) -> int:
    """Find the first number outside ``[low, high)``.

    Parameters
    ----------
    numbers : int64 array (n,)
        Numbers.
    low, high : int
        The range.

    Returns
    -------
    int
        Its index, or -1.
    """
    return int(_kernel(_first_outside)(numbers, low, high))


def _rises(numbers):
    last = np.int64(-1)
    for i in range(len(numbers)):
        if numbers[i] >= 0:
            if numbers[i] <= last:
                return False
            last = numbers[i]
    return True


def _last_of_each(numbers, seen, out):
    # An open hash table: `seen` is a power of two long, at least twice as long as there are numbers, and full of -1.
    mask = np.int64(len(seen) - 1)
    for j in range(len(numbers)):
        i = len(numbers) - 1 - j
        number = np.int64(numbers[i])
        out[i] = number
        if number < 0:
            continue
        at = (number ^ (number >> 17)) * np.int64(0x9E3779B1) & mask
        while seen[at] >= 0 and seen[at] != number:
            at = (at + 1) & mask
        if seen[at] == number:
            out[i] = -1
        seen[at] = number


def last_of_each(numbers: Any) -> Any:
    """Put -1 in the place of each number that comes again later.

    Parameters
    ----------
    numbers : int64 array (n,)
        Numbers; negative ones are left alone.

    Returns
    -------
    int64 array (n,)
        `numbers` itself where none comes twice.
    """
    if _kernel(_rises)(numbers):
        return numbers
    seen = np.full(1 << (2 * len(numbers)).bit_length(), -1, np.int64)
    out = np.empty(len(numbers), np.int64)
    _kernel(_last_of_each)(numbers, seen, out)
    return out


_I64, _NUMBERS, _OUT = types.int64, array(types.int64, 1), array(types.int64, 1, out=True)
#: Types of arguments and of the result of each check.
_TYPES = {
    _check_lengths: ((_NUMBERS, _NUMBERS, _I64, _I64, types.boolean), types.UniTuple(_I64, 2)),
    _first_unfit: ((array(types.int32, 2), _NUMBERS, _I64, _I64), _I64),
    _first_outside: ((_NUMBERS, _I64, _I64), _I64),
    _rises: ((_NUMBERS,), types.boolean),
    _last_of_each: ((_NUMBERS, _OUT, _OUT), types.none),
}
