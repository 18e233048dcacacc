"""A cache over four shards, two parts of the heads by two of the context, beside the same cache in one process.

Shards are objects in this process here, which needs no Ray. With an argument they are actors of Ray: of a new one on
this machine for `local`, of the cluster that this machine belongs to for `auto`, or of one at an address.

python examples/sharded.py [local | auto | ADDRESS]
"""

import sys

import numpy as np

import numkv
from numkv.ray import LocalShards, RayShards, ShardedKVCache

LAYERS, KV_HEADS, Q_HEADS, DIM = 2, 4, 16, 64


def steps(tokens, new):
    """What a model makes in a prompt and in steps of one token: a list of (k, v, q) of the layers for each."""
    rng = np.random.default_rng(0)
    for count in (tokens, *[1] * new):
        yield [
            (
                *rng.standard_normal((2, count, KV_HEADS, DIM), dtype=np.float32),
                rng.standard_normal((count, Q_HEADS, DIM), dtype=np.float32),
            )
            for _ in range(LAYERS)
        ]


def generate(cache, tokens, new):
    """The loop of a server: the same for both caches. Gives the last output."""
    seq = cache.add()
    for rows in steps(tokens, new):
        step = cache.reserve([seq], len(rows[0][0]))
        for layer, (k, v, q) in enumerate(rows):
            step.append(layer, k, v)
            out = step.attention(layer, q)
        cache.commit(step)
    return out


def main(transport=None, tokens=500, new=8):
    sizes = {"num_blocks": 64, "block_size": 16, "kind": "fp16"}
    transport = LocalShards() if transport is None else transport
    with ShardedKVCache(
        LAYERS, KV_HEADS, DIM, **sizes, heads=2, context=2, stripe=16, transport=transport
    ) as cache:
        by_shards = generate(cache, tokens, new)
        tokens_of = [sum(n for at, n in cache.runs(0) if at == column) for column in range(2)]
        messages = max(cache.messages)
        print(f"4 shards, {cache.length(0):,} tokens: {tokens_of} in the two columns of context")
        print(f"{messages} messages to a shard in {1 + new} steps of {LAYERS} layers")
    alone = generate(numkv.PagedKVCache(LAYERS, KV_HEADS, DIM, **sizes), tokens, new)
    error = np.abs(by_shards - alone).max()
    print(f"the outputs differ by {error:.1e} at most, as partial sums are added in another order")
    return by_shards, alone, messages


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(RayShards(sys.argv[1]))
    else:
        main()
