"""Sharded caches in this process, whose shards die, are slow or get messages twice when a test asks for it."""

import contextlib

import numpy as np
from layer_lists import paged_kv_cache
from paged_caches import DIM, HEADS, Q_HEADS, rows

from numkv.ray import LocalShards, ShardDown, ShardedKVCache
from numkv.ray.messages import Answer

#: Number of slices of heads and of columns, and tokens in a stripe.
LAYOUTS = [(1, 1, None), (2, 1, None), (1, 2, 2), (1, 3, 4), (2, 2, 2), (1, 2, 64)]


class FaultyShards(LocalShards):
    """Shards that fail on request: `at` says what happens to the n-th message of an operation from now on.

    Before: the shard dies before the operation; after: it dies after it, before it answers; slow: the answer comes
    after the timeout; twice: the message arrives twice.
    """

    def __init__(self, places=99) -> None:
        super().__init__()
        self.places, self.log, self._plan = places, [], []

    def at(self, shard, operation, what, n=1):
        self._plan.append([shard, operation, what, n])

    def kill(self, shard):
        self.shards[shard] = None

    def send(self, shard, message):
        names = [name for name, _ in message[1]]
        self.log.append((shard, names))
        happens = ""
        for planned in self._plan:
            if planned[0] == shard and planned[1] in names and planned[3] > 0:
                planned[3] -= 1
                if planned[3] == 0:
                    happens = planned[2]
        if happens == "before":
            self.kill(shard)
        delivery = super().send(shard, message)
        if happens == "twice":
            again = super().send(shard, message)
            assert again.result(None) is delivery.result(None)
        if happens == "after":
            self.kill(shard)
        if happens in ("after", "slow"):
            return _Never(shard, happens)
        return delivery

    def replace(self, shard):
        if self.places <= 0:
            raise ShardDown(shard, "there is no place")
        self.places -= 1
        super().replace(shard)


class _Never:
    def __init__(self, shard, why):
        self.shard, self.why = shard, why

    def result(self, timeout) -> Answer:
        raise ShardDown(self.shard, self.why)


def make(
    layout=(1, 1, None),
    *,
    layers=2,
    shards=None,
    num_blocks=64,
    block_size=2,
    specs=None,
    kind="fp32",
    **options,
):
    """A cache of the sizes of `paged_caches`."""
    heads, context, stripe = layout
    alike = {
        "num_layers": layers,
        "num_kv_heads": HEADS,
        "head_dim": DIM,
        "kind": kind,
    }
    of = alike if specs is None else {"layers": specs}
    return ShardedKVCache(
        **of, num_blocks=num_blocks, block_size=block_size, heads=heads, context=context,
        stripe=stripe, transport=shards or FaultyShards(), **options,
    )  # fmt: skip


def one(layers=2, *, num_blocks=256, block_size=2, kind="fp32", **options):
    """Make the same cache in one process, as large as all shards."""
    return paged_kv_cache(
        layers, HEADS, DIM, num_blocks=num_blocks, block_size=block_size, kind=kind, **options
    )


def queries(step_layer, texts, starts):
    """Make queries that depend on the tokens, as rows do."""
    found = [rows(100 + step_layer, text, n)[0] for text, n in zip(texts, starts, strict=True)]
    found.append(rows(step_layer, [])[0])
    return np.ascontiguousarray(np.concatenate(found).repeat(Q_HEADS // HEADS, 1))


def grow(cache, texts, *, named=True, salt=0, **options):
    """Let sequences become `texts`, which begin with their present texts; return attention of all layers."""
    seqs = list(texts)
    starts = [cache.length(seq) for seq in seqs]
    step = cache.reserve(seqs, [len(texts[seq]) - n for seq, n in zip(seqs, starts, strict=True)])
    outs = through(step, cache.num_layers, list(texts.values()), starts, salt, **options)
    ids = np.concatenate(
        [np.empty(0, np.int64), *(texts[s][n:] for s, n in zip(seqs, starts, strict=True))]
    )
    cache.commit(step, token_ids=ids.astype(np.int64) if named else None)
    return outs


def through(step, layers, texts, starts, salt=0, **options):
    """Append and attend in all layers of a step."""
    outs = []
    for layer in range(layers):
        parts = [rows(layer, t, n, salt) for t, n in zip(texts, starts, strict=True)]
        parts.append(rows(layer, []))  # a step may be empty
        k, v = np.ascontiguousarray(np.concatenate(parts, 1))
        step.append(layer, k, v)
        outs.append(step.attention(layer, queries(layer, texts, starts), **options))
    return outs


def same(x):
    return x


@contextlib.contextmanager
def closing(cache):
    try:
        yield cache
    finally:
        cache.close()
