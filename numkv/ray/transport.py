"""What carries messages to shards: `Transport`, and `LocalShards`, where they live in the caller's own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from numkv.ray.errors import ShardDown
from numkv.ray.shard import Shard, ShardSpec
from numkv.ray.wire import Answer, Message


class Delivery(Protocol):
    """A message on its way, or its answer."""

    def result(self, timeout: float | None) -> Answer:
        """Wait for the answer.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait at most.

        Returns
        -------
        Answer

        Raises
        ------
        ShardDown
            If the shard is gone, or does not answer in time.
        """


class Transport(Protocol):
    """Carries messages. Those to one shard arrive in the order in which they are sent."""

    def start(self, specs: Sequence[ShardSpec]) -> None:
        """Make the shards; they are numbered from 0.

        Parameters
        ----------
        specs : sequence of ShardSpec
            One for each.
        """

    def send(self, shard: int, message: Message) -> Delivery:
        """Send a message, without waiting.

        Parameters
        ----------
        shard : int
            To which shard.
        message : tuple
            See `numkv.ray.wire`.

        Returns
        -------
        Delivery
        """

    def replace(self, shard: int) -> None:
        """End a shard, if it is not gone yet, and make an empty one in its place.

        Parameters
        ----------
        shard : int
            Which one.

        Raises
        ------
        ShardDown
            If there is no place for one.
        """

    def close(self) -> None:
        """End all shards."""


class LocalShards:
    """A `Transport` whose shards are objects in this process: for tests, and to see what sharding itself costs.

    Examples
    --------
    >>> import numpy as np
    >>> from numkv.ray import LocalShards, ShardedKVCache
    >>> cache = ShardedKVCache(1, 2, 8, num_blocks=8, heads=2, transport=LocalShards())
    >>> seq = cache.add()
    >>> step = cache.reserve([seq], 3)
    >>> rows = np.ones((3, 2, 8), np.float32)
    >>> step.append_attend(0, rows, rows, np.ones((3, 4, 8), np.float32)).shape
    (3, 4, 8)
    >>> cache.commit(step)
    >>> cache.length(seq)
    3
    >>> cache.close()
    """

    def __init__(self) -> None:
        self.shards: list[Any] = []
        self._specs: list[ShardSpec] = []

    def start(self, specs: Sequence[ShardSpec]) -> None:
        """Make the shards; see `Transport.start`."""
        self._specs = list(specs)
        self.shards = [Shard(spec) for spec in specs]

    def send(self, shard: int, message: Message) -> Delivery:
        """Have a message handled at once; see `Transport.send`."""
        found = self.shards[shard]
        if found is None:
            return _Here(shard, None)
        return _Here(shard, found.handle(_copied(message)))

    def replace(self, shard: int) -> None:
        """Make a shard anew; see `Transport.replace`."""
        self.shards[shard] = Shard(self._specs[shard])

    def close(self) -> None:
        """End all shards; see `Transport.close`."""
        self.shards = [None] * len(self.shards)


class _Here:
    """A `Delivery` whose answer is there, or will never be."""

    def __init__(self, shard: int, answer: Answer | None) -> None:
        self._shard, self._answer = shard, answer

    def result(self, timeout: float | None) -> Answer:
        """The answer; see `Delivery.result`."""
        if self._answer is None:
            raise ShardDown(self._shard, "it is gone")
        return self._answer


def _copied(x: Any) -> Any:
    """A message as another process sees it: arrays are copies that nobody can write to."""
    if isinstance(x, np.ndarray):
        made = x.copy()
        made.flags.writeable = False
        return made
    if type(x) in (tuple, list):
        return type(x)(_copied(y) for y in x)
    if type(x) is dict:
        return {key: _copied(y) for key, y in x.items()}
    return x
