"""What goes wrong between machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numkv.errors import NumkvError


class ShardDown(NumkvError):
    """A shard does not answer any more: what a transport raises, and nobody else sees.

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
