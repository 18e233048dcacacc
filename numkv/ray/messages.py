"""Messages between a cache and its shards, as tuples that pickle well, and what is raised where none arrives.

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
    """What a shard says to a message."""

    number: int
    free: int
    """Free blocks, after the message."""
    value: Any
    """Of the last operation."""
    error: BaseException | None = None
    failed: str = ""
    """Name of the operation that raised it; those behind it were not done."""


class _Words(NamedTuple):
    """An array of a dtype that is not NumPy's own."""

    dtype: str
    words: Any


_WORDS = {1: np.uint8, 2: np.uint16}


def packed(x: Any) -> Any:
    """What is sent in place of arrays: contiguous ones of NumPy's dtypes."""
    if not isinstance(x, np.ndarray):
        return each(packed, x)
    x = np.require(x, requirements="C")
    if x.dtype.kind == "V" or x.dtype.num >= 256:
        return _Words(x.dtype.name, x.view(_WORDS[x.dtype.itemsize]))
    return x


def unpacked(x: Any) -> Any:
    """What was given to `packed`."""
    if type(x) is _Words:
        return x.words.view(np.dtype(getattr(ml_dtypes, x.dtype)))
    return each(unpacked, x)


def each(change: Callable[[Any], Any], x: Any) -> Any:
    """A list, a tuple or a dictionary of what a function makes of its parts; anything else as it is."""
    if type(x) in (tuple, list):
        return type(x)(map(change, x))
    if type(x) is dict:
        return {key: change(y) for key, y in x.items()}
    return x


def nbytes(x: Any) -> int:
    """Bytes of the arrays in a message."""
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
        Which one.
    """

    def __init__(self, shard: int, reason: str) -> None:
        super().__init__(f"shard {shard}: {reason}")
        self.shard, self.reason = shard, reason

    def __reduce__(self) -> Any:
        return ShardDown, (self.shard, self.reason)


class ShardLost(NumkvError):
    """Shards were lost, and tokens with them. The cache can be used again: as its lengths say.

    Steps that wrote to lost shards are rolled back on all of them. Sequences that are not named have all tokens that
    were committed. The call that raises has waited for new shards, which takes seconds. Calls that compute tokens again
    may lose shards too, and raise another error of this class: give ``reserve(expect=...)`` the length that a step is
    to go on from.

    Attributes
    ----------
    sequences : tuple of int
        Sequences that are shorter than they were: those that had tokens on the shards. By heads these are all.
    lengths : dict of int to int
        How many tokens each of them still has. By heads that is what the prefix store had, 0 without one; by context
        what comes before the first token that was lost.
    tokens : dict of int to int32 array
        Ids of the tokens that are to be computed again, from that length on, as far as they are known.
    shards : tuple of int
        The shards.
    steps : tuple of ShardedStep
        Steps that were rolled back.
    hopeless : bool
        Whether there are no shards left to go on with; `ShardedKVCache.revive` looks for places.
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
