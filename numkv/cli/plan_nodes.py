"""``numkv plan --nodes``: what a decode step costs when the cache is sharded over many nodes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from numkv.cli.output import Size, UsageError, table
from numkv.demo.cache import CacheChoice
from numkv.drawing.picture import format_bytes
from numkv.planning import LayerNeeds, ModelNeeds, Rows
from numkv.planning.scale import Load, Network, Sharding, best_sharding, cost_of

DEFAULT_BATCH = 64
_Q_HEADS_PER_KV_HEAD = 4
_CONTEXT = 131_072
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(us|µs|ms|s)", re.IGNORECASE)


def parse_seconds(text: str) -> float:
    """Read a time: ``300us``, ``1.5ms``, ``1s``.

    Parameters
    ----------
    text : str
        A number and a unit.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    ValueError
        If it is no time.
    """
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time such as 300us")
    return float(match[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[match[2].lower()]


def plan_nodes(
    arguments: argparse.Namespace, needs: ModelNeeds, choice: CacheChoice, q_heads: int | None
) -> str:
    """The tables: the best way for each number of nodes, and where heads stop paying.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    needs : ModelNeeds
        What the model keeps.
    choice : CacheChoice
        Storage kinds.
    q_heads : int or None
        Of each layer; as the config says, or without one four for each kv head, if None.

    Returns
    -------
    str
    """
    network = Network(
        arguments.latency, arguments.message, arguments.bandwidth, arguments.memory_bandwidth,
        arguments.memory,
    )  # fmt: skip
    context = max(arguments.context or [needs.context or _CONTEXT])
    load = _load(needs, choice, q_heads, arguments, context)
    ways = [(n, best_sharding(load, network, n), best_sharding(load, network, n, heads_only=True))
            for n in sorted(set(arguments.nodes))]  # fmt: skip
    lines = [
        f"{load.batch:,} sequences of {load.context:,} tokens, {choice.label}, {load.q_heads} query heads; a node has "
        f"{arguments.memory.text()} and attends to {format_bytes(int(network.memory_bandwidth), True)}/s; a "
        f"message takes {1e6 * network.latency:,.0f} µs, costs its caller {1e6 * network.message:,.0f} µs, and "
        f"travels at {format_bytes(int(network.bandwidth), True)}/s:",
        "",
        table(
            ("nodes", "used", "groups × heads × context", "ms/step", "tokens/s", "heads only", "messages", "network",
             "attention", "weights", "memory/node", "a link must give"),
            [_row(arguments.memory, nodes, best, heads) for nodes, best, heads in ways],
        ),
        "",
        _counted(arguments.memory, load),
        *_remarks(load, network),
    ]  # fmt: skip
    if arguments.picture is not None:
        _draw(arguments.picture, ways)
        lines.append(f"Picture: {arguments.picture}")
    return "\n".join(lines)


def _load(
    needs: ModelNeeds, choice: CacheChoice, q_heads: int | None, arguments: argparse.Namespace, context: int
) -> Load:  # fmt: skip
    """The model as layers that are alike but for windows, which is what `ShardedKVCache` keeps."""
    rows = [_rows_of(layer) for layer in needs.layers if layer.type != "none"]
    first = rows[0] if rows else None
    if first is None or any(x is None or _shape(x) != _shape(first) for x in rows):
        found = "others"
        if any(x.what == "latents" for x in needs.rows):
            found = "latents; --expanded plans with K and V of every head"
        raise UsageError(
            "plan --nodes: expected layers of keys and values that are alike but for windows, as "
            f"numkv.ray.ShardedKVCache keeps them, got {found}; without --nodes each is counted"
        )
    heads = q_heads or needs.q_heads
    if heads is None:
        if needs.model_type:
            raise UsageError(
                "plan --nodes: the config says no number of query heads; give --q-heads"
            )
        heads = _Q_HEADS_PER_KV_HEAD * first.heads
    if heads % first.heads:
        raise UsageError(
            f"plan --nodes: expected a multiple of the {first.heads} key/value heads as query heads, got {heads}"
        )
    row_bytes = choice.bytes_per_token(1, first.dim, first.dim_v)
    windows = tuple(x.limit for x in rows if x is not None and x.limit is not None)
    weights = needs.weight_bytes or 0 if arguments.weights is None else arguments.weights
    return Load(
        len(rows), heads, first.heads, first.dim, first.dim_v, row_bytes, arguments.batch, context, windows,
        int(weights),
    )  # fmt: skip


def _rows_of(layer: LayerNeeds) -> Rows | None:
    """The rows of a layer, if they are K and V of each token, whole or in a window."""
    plain = len(layer.rows) == 1 and not layer.states and layer.type != "chunked_attention"
    rows = layer.rows[0] if plain else None
    return rows if rows and rows.dim_v and rows.tokens_per_row == 1 and not rows.of_source else None


def _shape(rows: Rows) -> tuple[int, int, int]:
    return rows.heads, rows.dim, rows.dim_v


def _counted(memory: Size, load: Load) -> str:
    """What a step is made of here."""
    what = "tokens/s count messages and attention"
    if not load.weights:
        return f"{what}; the model's weights are not counted (--weights), nor its arithmetic."
    return (
        f"{what}, and that each group's caller reads the model's weights, {memory.text(load.weights)}, once a step at "
        "a node's speed; it has them beside the nodes. The model's arithmetic is not counted."
    )


def _row(
    memory: Size, nodes: int, best: Sharding | None, heads: Sharding | None
) -> tuple[str, ...]:
    if best is None:
        return (f"{nodes:,}", "-", "rows do not fit", *["-"] * 9)
    cost = best.cost
    shares = (cost.latency + cost.messages, cost.network, cost.read, cost.weights)
    return (
        f"{nodes:,}",
        f"{best.nodes:,}",
        f"{best.groups} × {best.heads} × {best.context}",
        f"{1e3 * cost.total:,.1f}",
        f"{best.tokens_per_second:,.1f}",
        "do not fit" if heads is None else f"{heads.tokens_per_second:,.1f}",
        *(f"{100 * x / cost.total:.0f} %" for x in shares),
        memory.text(int(best.memory)),
        f"{format_bytes(int(best.bandwidth_needed), True)}/s",
    )  # fmt: skip


def _remarks(load: Load, network: Network) -> list[str]:
    """Where heads stop paying, and from which length on context does."""
    found = []
    last = cost_of(load, network, 1, 1, load.batch)[0].total
    stops = load.kv_heads
    for heads in [2**i for i in range(1, 20) if 2**i <= load.kv_heads]:
        now = cost_of(load, network, heads, 1, load.batch)[0].total
        if now > 0.9 * last:
            stops = heads // 2
            break
        last = now
    if stops == load.kv_heads:
        found.append(f"In one group heads pay as far as there are any: {stops} parts.")
    else:
        found.append(
            f"In one group heads stop paying at {stops} parts: twice as many save less than a tenth."
        )
    lengths = [2**i for i in range(10, 31)]
    for length in lengths:
        own = load._replace(context=length)
        halves = cost_of(own, network, stops, 2, load.batch)[0].total
        whole, _, memory = cost_of(own, network, stops, 1, load.batch)
        if memory > network.memory or halves < 0.9 * whole.total:
            why = (
                "as rows do not fit otherwise" if memory > network.memory else "as it saves a tenth"
            )
            found.append(
                f"Behind them context is worth dividing from about {length:,} tokens on, {why}."
            )
            break
    found.append(
        "A link must give what is in the last column for messages to take a tenth of the rest of a step; nothing "
        "overlaps in this model."
    )
    return found


def _draw(path: Path, ways: list[Any]) -> None:
    """Tokens a second over nodes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--picture needs matplotlib") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, index in (("best", 1), ("heads only", 2)):
        points = [(way[0], way[index].tokens_per_second) for way in ways if way[index] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="tokens/s")
    axes.set_xticks([way[0] for way in ways], [f"{way[0]:,}" for way in ways])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
