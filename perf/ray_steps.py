"""Decode steps over shards beside one process, and beside the model of ``numkv plan --nodes``.

``python -m perf.ray_steps``, with the extra ray; actors on this machine, with a thread each. Steps are timed in turns;
times are the least of all turns, as whoever else works on the machine only adds to them. Printed beside them is what
the model says, with its own numbers and with those that fit these steps best, which ``numkv plan --nodes`` takes.
Actors share this machine's cores, so messages and rows cost more here than between machines, but for the links.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np

import numkv
from numkv.planning.scale import GroupCost, Load, Network, cost_of
from numkv.ray import LocalShards, RayShards, ShardedKVCache

HEADS, Q_HEADS, DIM, LAYERS = 8, 32, 64, 4


def caches(blocks: int, shards: int) -> dict:
    """One process, and shards here and in actors."""
    sizes = {"num_blocks": blocks, "block_size": 16, "kind": "fp16"}
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


def compare(batch: int, context: int, turns: int, shards: int) -> dict[str, float]:
    """Time steps in turns; seconds of each, the least."""
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
    for name, cache in made.items():
        if name.endswith("here"):
            cache.close()
        elif name.endswith("actors"):
            for shard in range(cache.num_shards):
                cache._shards.transport._kill(shard)
    return {name: min(own) for name, own in times.items()}


def costs(batch: int, context: int, shards: int, by: str) -> GroupCost:
    """What the model counts in a step: messages, bytes; seconds where a network gives one of each a second."""
    load = Load(LAYERS, Q_HEADS, HEADS, DIM, DIM, 4 * DIM, batch, context)
    heads, columns = (shards, 1) if by == "heads" else (1, shards)
    return cost_of(load, Network(1.0, 1.0, 1.0, 1.0), heads, columns, batch)[0]


def fitted(counted: list[GroupCost], seconds: list[float]) -> Network:
    """The network with which the model is nearest to what was measured, by relative errors."""
    a = np.array([(c.latency, c.messages, c.network, c.read + c.merge) for c in counted])
    b = np.array(seconds)
    best, found = np.inf, np.zeros(4)
    # Nothing costs less than nothing: the best of those where no factor is below 0.
    for n in range(1, 5):
        for some in map(list, itertools.combinations(range(4), n)):
            x, *_ = np.linalg.lstsq(a[:, some] / b[:, None], np.ones(len(b)), rcond=None)
            error = np.square(a[:, some] @ x / b - 1).sum()
            if (x >= 0).all() and error < best:
                best, found = error, np.zeros(4)
                found[some] = x
    latency, message, per_byte, per_row_byte = found
    return Network(latency, message, 1 / max(per_byte, 1e-12), 1 / max(per_row_byte, 1e-12))


def report(measured: dict[tuple[int, int, int], dict[str, float]]) -> None:
    """What was measured, beside the model as it is and as it fits best."""
    counted, seconds = [], []
    for (batch, context, shards), times in measured.items():
        for by in ("heads", "context"):
            counted.append(costs(batch, context, shards, by))
            seconds.append(times[f"{shards} by {by}, actors"])
    networks = Network(), fitted(counted, seconds)
    print("| batch × context | cache | step | beside one process | model | model, fitted |")
    print("|---|---|---|---|---|---|")
    for (batch, context, shards), times in measured.items():
        alone = times["one process"]
        for name, took in times.items():
            models = ["", ""]
            if name.endswith("actors"):
                load = Load(LAYERS, Q_HEADS, HEADS, DIM, DIM, 4 * DIM, batch, context)
                way = (shards, 1) if "by heads" in name else (1, shards)
                models = [
                    f"{cost_of(load, x, *way, batch)[0].total / took:.2f} ×" for x in networks
                ]
            cells = (
                f"{batch} × {context:,}",
                name,
                f"{1e3 * took:.2f} ms",
                f"{took / alone:.2f} ×",
                *models,
            )
            print(f"| {' | '.join(cells)} |")
    x = networks[1]
    print(
        f"fitted: --latency {x.latency * 1e6:.0f}us --message {x.message * 1e6:.0f}us "
        f"--bandwidth {x.bandwidth / 1e6:.0f}MB --memory-bandwidth {x.memory_bandwidth / 1e9:.2f}GB"
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--sizes", nargs="+", default=["1x1024", "8x1024", "8x8192"], metavar="BATCHxCONTEXT"
    )
    arguments = parser.parse_args()
    import ray

    ray.init("local", log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    report(
        {
            (batch, context, shards): compare(batch, context, arguments.turns, shards)
            for shards in arguments.shards
            for batch, context in (map(int, size.split("x")) for size in arguments.sizes)
        }
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
