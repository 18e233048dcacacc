"""Messages between a cache and its shards, as tuples that pickle well, and the errors of lost shards.

A message is ``(number, operations)``, an operation ``(name, arguments)``, and an answer ``(number, free blocks, value,
error, name of the operation that failed)``. Arrays are sent without conversion. Pickle's protocol 5 moves their buffers
out of the stream, and Ray puts those into its object store. The receiver reads them there without a copy. It can do so
for NumPy's own dtypes only; bfloat16 and 8-bit floats travel as words with the name of their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from numkv.errors import NumkvError

Operation = tuple[str, tuple[Any, ...]]
Message = tuple[int, list[Operation]]


class Answer(NamedTuple):
    """The reply of a shard to a message."""

    number: int
    free: int
    """Free blocks, after the message."""
    value: Any
    """Value of the last operation."""
    error: BaseException | None = None
    failed: str = ""
    """Name of the operation that raised the error; of later ones only bookkeeping was executed."""


class _Words(NamedTuple):
    """An array of a dtype that is not NumPy's own."""

    dtype: str
    words: Any


_WORDS = {1: np.uint8, 2: np.uint16}


def packed(x: Any) -> Any:
    """Replace arrays by contiguous ones of NumPy's dtypes."""
    if not isinstance(x, np.ndarray):
        return each(packed, x)
    x = np.require(x, requirements="C")
    if x.dtype.kind == "V" or x.dtype.num >= 256:
        return _Words(x.dtype.name, x.view(_WORDS[x.dtype.itemsize]))
    return x


def unpacked(x: Any) -> Any:
    """Invert `packed`."""
    if type(x) is _Words:
        return x.words.view(np.dtype(getattr(ml_dtypes, x.dtype)))
    return each(unpacked, x)


def each(change: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to the items of a list, tuple or dictionary; return anything else unchanged."""
    if type(x) in (tuple, list):
        return type(x)(map(change, x))
    if type(x) is dict:
        return {key: change(y) for key, y in x.items()}
    return x


def nbytes(x: Any) -> int:
    """Return the bytes of the arrays in a message."""
    if isinstance(x, np.ndarray):
        return x.nbytes
    if isinstance(x, (tuple, list)):
        return sum(map(nbytes, x))
    if isinstance(x, dict):
        return sum(map(nbytes, x.values()))
    return int(getattr(x, "nbytes", 0))


class ShardDown(NumkvError):
    """A shard does not reply any more. Transports raise it; callers get `ShardLost`.

    Attributes
    ----------
    shard : int
        Its number.
    """

    def __init__(self, shard: int, reason: str) -> None:
        super().__init__(f"shard {shard}: {reason}")
        self.shard, self.reason = shard, reason

    def __reduce__(self) -> Any:
        return ShardDown, (self.shard, self.reason)


class ShardLost(NumkvError):
    """Shards and their tokens were lost. The cache is usable again, with the lengths given here.

    Steps that wrote to lost shards are rolled back on all shards. Sequences that are not named keep all committed
    tokens. The call that raises has waited for new shards, which takes seconds. Calls that compute tokens again may
    also lose shards, and raise another error of this class. So pass ``reserve(expect=...)`` the length from which a
    step continues.

    Attributes
    ----------
    sequences : tuple of int
        Sequences that were shortened: those with tokens on lost shards. By heads these are all.
    lengths : dict of int to int
        Tokens that each of them still has. By heads these are the tokens in the prefix store, or 0 without one. By
        context they are the tokens before the first lost one.
    tokens : dict of int to int32 array
        Ids of the tokens to compute again, from that length on, as far as they are known.
    shards : tuple of int
        Numbers of the lost shards.
    steps : tuple of ShardedStep
        Steps that were rolled back; none in another process, to which Ray takes the error of a task.
    hopeless : bool
        Whether no column has all of its shards; call `ShardedKVCache.revive` to place them again.
    """

    def __init__(
        self,
        message: str,
        lengths: Mapping[int, int],
        tokens: Mapping[int, Any],
        shards: tuple[int, ...],
        steps: tuple[Any, ...] = (),
        hopeless: bool = False,
    ) -> None:
        super().__init__(message)
        self.sequences = tuple(lengths)
        self.lengths, self.tokens = dict(lengths), dict(tokens)
        self.shards, self.steps, self.hopeless = shards, steps, hopeless

    def __reduce__(self) -> Any:
        return ShardLost, (str(self), self.lengths, self.tokens, self.shards, (), self.hopeless)
