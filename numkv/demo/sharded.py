"""The demo's model over a sharded cache: `ShardedChoice` makes it, `ShardedBatch` recovers when shards are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from numkv.demo.cache import CacheChoice
from numkv.demo.checkpoint import ModelConfig
from numkv.demo.model import PREFILL_CHUNK, Batch, Model, Session, Tokens
from numkv.demo.network import Network
from numkv.ray import ShardedKVCache, ShardLost, Transport

#: Axes that can divide a cache.
AXES = ("heads", "context")

#: Default tokens of a block and of a stripe, so that short texts are also divided by context.
_BLOCK_SIZE, _STRIPE = 16, 64

#: Losses in one step after which it fails, because the cause is another one.
_LOSSES = 8


class ShardedChoice(NamedTuple):
    """The division and the kinds of a cache; calling it makes the cache of a model.

    Attributes
    ----------
    kinds : CacheChoice
        Storage kinds, target and block size.
    shards : int
        Number of shards.
    by : {"heads", "context"}
        The divided axis.
    transport : Transport, optional
        Transport to the shards; Ray actors by default.
    """

    kinds: CacheChoice
    shards: int
    by: str = "heads"
    transport: Transport | None = None

    def __call__(self, config: ModelConfig, capacities: Sequence[int]) -> ShardedKVCache:
        """Make a cache for texts with these capacities."""
        size = self.kinds.block_size or _BLOCK_SIZE
        blocks = sum(-(-capacity // size) for capacity in capacities)
        by_context = self.by == "context"
        return ShardedKVCache(
            layers=self.kinds.layers(config),
            num_blocks=-(-blocks // self.shards) + 1 if by_context else blocks,
            heads=1 if by_context else self.shards,
            context=self.shards if by_context else 1,
            stripe=-(-_STRIPE // size) * size,
            transport=self.transport,
            block_size=size,
            target=self.kinds.target,
        )

    def batch(self, model: Model, capacities: Sequence[int]) -> ShardedBatch:
        """Make a batch for texts.

        Parameters
        ----------
        model : Model
            The model.
        capacities : sequence of int
            Most tokens of each text.

        Returns
        -------
        ShardedBatch
        """
        network = Network(model.config, model.weights, max(capacities), "cpu")
        return ShardedBatch(network, self(model.config, capacities))


class ShardedBatch(Batch):
    """Texts with tokens in a sharded cache; tokens of lost shards are computed again.

    Attributes
    ----------
    cache : ShardedKVCache
        The cache.
    recomputed : int
        Tokens that were computed again.
    """

    cache: ShardedKVCache

    def __init__(self, network: Network, cache: ShardedKVCache) -> None:
        super().__init__(network, cache)
        self.recomputed = 0

    def start(self, prompt: Sequence[int] = ()) -> Session:
        """Start a text; see `Batch.start`."""
        return self._again_after_losses(lambda: Batch.start(self, prompt))

    def hidden(self, seqs: Sequence[int], tokens: Tokens, counts: Sequence[int]) -> Any:
        """Run new tokens through all layers, again after each loss of shards; see `Batch.hidden`."""
        return self._again_after_losses(lambda: Batch.hidden(self, seqs, tokens, counts))

    def _again_after_losses(self, do: Callable[[], Any]) -> Any:
        for _ in range(_LOSSES):
            try:
                return do()
            except ShardLost as lost:
                self._recompute(lost)
        return do()

    def _recompute(self, lost: ShardLost) -> None:
        """Compute the missing tokens of all texts."""
        if lost.hopeless:
            raise lost
        missing, losses = dict(lost.tokens), 0
        while missing:
            seq, ids = next(iter(missing.items()))
            chunk = ids[:PREFILL_CHUNK]
            try:
                if len(chunk):
                    super().hidden([seq], chunk, [len(chunk)])
            except ShardLost as again:
                losses += 1
                if again.hopeless or losses > _LOSSES:
                    raise
                # They precede the tokens that were missing already.
                for seq, ids in again.tokens.items():
                    missing[seq] = np.concatenate([ids, missing.get(seq, ids[:0])])
                continue
            self.recomputed += len(chunk)
            missing[seq] = ids[PREFILL_CHUNK:]
            if not len(missing[seq]):
                del missing[seq]
