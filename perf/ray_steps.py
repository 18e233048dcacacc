"""What messages between a cache and its shards cost, and a sharded step beside one in a single process.

``python -m perf.ray_steps``, with the extra ray; actors on this machine, with a thread each. Sizes are of one step's
message; steps are timed in turns, and ratios are medians over turns of the same run. What is fitted are the numbers
that ``numkv plan --nodes`` takes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import numkv
from numkv.ray import LocalShards, RayShards, ShardedKVCache

HEADS, Q_HEADS, DIM, LAYERS = 8, 32, 64, 4


def caches(blocks: int, shards: int) -> dict:
    """One process, and shards here and in actors."""
    sizes = {"num_blocks": blocks, "kind": "fp16"}
    made = {"one process": numkv.PagedKVCache(LAYERS, HEADS, DIM, **sizes)}
    for by in ("heads", "context"):
        divided = {by: shards}
        if by == "context":
            divided["stripe"] = 16
        for where in ("here", "actors"):
            transport = LocalShards() if where == "here" else RayShards(threads=1)
            made[f"{shards} by {by}, {where}"] = ShardedKVCache(
                LAYERS, HEADS, DIM, **sizes, **divided, transport=transport
            )
    return made


def step(cache, seqs, tokens: int, rng) -> float:
    """Seconds of a step of all layers."""
    n = len(seqs) * tokens
    k, v = rng.standard_normal((2, n, HEADS, DIM), np.float32)
    q = rng.standard_normal((n, Q_HEADS, DIM), np.float32)
    begun = time.perf_counter()
    new = cache.reserve(seqs, tokens)
    for layer in range(LAYERS):
        new.append(layer, k, v)
        new.attention(layer, q)
    cache.commit(new)
    took = time.perf_counter() - begun
    for seq in seqs:
        cache.truncate(seq, cache.length(seq) - tokens)
    return took


def compare(batch: int, context: int, turns: int, shards: int) -> None:
    """Time steps in turns, and print medians and ratios to one process."""
    rng = np.random.default_rng(0)
    made = caches(batch * (-(-context // 16) + 4), shards)
    seqs = {name: [cache.add() for _ in range(batch)] for name, cache in made.items()}
    for name, cache in made.items():
        for begin in range(0, context, 512):
            new = cache.reserve(seqs[name], min(512, context - begin))
            rows = np.ones((new.num_tokens, HEADS, DIM), np.float32)
            for layer in range(LAYERS):
                new.append(layer, rows, rows)
            cache.commit(new)
    times: dict[str, list[float]] = {name: [] for name in made}
    with numkv.num_threads(1):
        for turn in range(turns + 3):
            for name, cache in made.items():
                took = step(cache, seqs[name], 1, rng)
                if turn >= 3:
                    times[name].append(took)
    alone = times["one process"]
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, alone, strict=True))
        print(
            f"| {batch} × {context:,} | {name} | {1e3 * statistics.median(own):.2f} ms | {ratio:.2f} |"
        )
    for name, cache in made.items():
        if name.endswith("here"):
            cache.close()
        elif name.endswith("actors"):
            for shard in range(cache.num_shards):
                cache._transport._kill(shard)


def messages(turns: int) -> None:
    """Fit latency, cost and bandwidth to round trips: t = latency + n message + bytes / bandwidth."""
    rows, seconds = [], []
    for shards in (1, 2, 4):
        cache = ShardedKVCache(1, 4, 8, num_blocks=1, heads=shards, transport=RayShards(threads=1))
        for size in (0, 1 << 14, 1 << 18, 1 << 21):
            payload = np.zeros(size, np.uint8)
            took = []
            for turn in range(turns + 5):
                begun = time.perf_counter()
                for channel in cache._channels:
                    channel.later("echo", payload)
                tickets = [channel.send("echo", payload[:0]) for channel in cache._channels]
                for ticket in tickets:
                    ticket.wait()
                if turn >= 5:
                    took.append(time.perf_counter() - begun)
            rows.append((1.0, shards, shards * size))
            seconds.append(statistics.median(took))
            print(f"{shards} shards, {size:,} bytes to each: {1e6 * seconds[-1]:,.0f} µs")
        for shard in range(shards):
            cache._transport._kill(shard)
    a, b = np.array(rows), np.array(seconds)
    weights = 1 / b  # relative errors
    (latency, message, per_byte), *_ = np.linalg.lstsq(
        a * weights[:, None], b * weights, rcond=None
    )
    print(
        f"fitted: --latency {max(latency, 0) * 1e6:.0f}us --message {message * 1e6:.0f}us "
        f"--bandwidth {1e-6 / max(per_byte, 1e-12):.0f}MB"
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--only", choices=("messages", "steps"))
    parser.add_argument(
        "--sizes", nargs="+", default=["1x1024", "8x1024", "8x8192"], metavar="BATCHxCONTEXT"
    )
    arguments = parser.parse_args()
    import ray

    ray.init("local", log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    if arguments.only != "steps":
        messages(arguments.turns)
    if arguments.only != "messages":
        print("| batch × context | cache | step | ratio |\n|---|---|---|---|")
        for size in arguments.sizes:
            batch, context = map(int, size.split("x"))
            compare(batch, context, arguments.turns, arguments.shards)
    ray.shutdown()


if __name__ == "__main__":
    main()
