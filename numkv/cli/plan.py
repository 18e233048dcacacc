"""``numkv plan``: the bytes of a token and of a sequence of a model, and how many fit."""

from __future__ import annotations

import argparse
import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from numkv.caches import LayerSpec, Profile
from numkv.cli.output import Size, UsageError, check_picture, save_figure, table
from numkv.demo.cache import CacheChoice
from numkv.drawing.picture import format_bytes
from numkv.errors import NumkvError
from numkv.kinds import kind, kinds
from numkv.planning import LayerNeeds, ModelNeeds, Rows, needs_of
from numkv.planning.scale import Load, Network, Sharding, best_sharding, cost_of

DEFAULT_BATCH = 64
_Q_HEADS_PER_KV_HEAD = 4
_CONTEXT = 131_072
_SECONDS = re.compile(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*(us|µs|ms|s)", re.IGNORECASE)


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


def plan_nodes(arguments: argparse.Namespace, needs: ModelNeeds, choice: CacheChoice) -> str:
    """Return the tables: the best division for each number of nodes, and the limit of useful head parts.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    needs : ModelNeeds
        Rows and states of the model.
    choice : CacheChoice
        Storage kinds.

    Returns
    -------
    str
    """
    network = Network(
        arguments.latency, arguments.message, arguments.bandwidth, arguments.memory_bandwidth,
        arguments.memory,
    )  # fmt: skip
    if not min(arguments.bandwidth, arguments.memory_bandwidth):
        raise UsageError("plan --nodes: expected bandwidths of a byte or more a second, got 0")
    context = max(arguments.context or [needs.context or _CONTEXT])
    load = _load(needs, choice, arguments, context)
    found = [(n, best_sharding(load, network, n), best_sharding(load, network, n, heads_only=True))
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
            [_row(arguments.memory, nodes, best, heads) for nodes, best, heads in found],
        ),
        "",
        _counted(arguments.memory, load),
        *_remarks(load, network),
    ]  # fmt: skip
    if arguments.picture is not None:
        _draw(arguments.picture, found)
        lines.append(f"Picture: {arguments.picture}")
    return "\n".join(lines)


def _load(
    needs: ModelNeeds, choice: CacheChoice, arguments: argparse.Namespace, context: int
) -> Load:  # fmt: skip
    """Return the model as layers that differ only in windows, as `ShardedKVCache` requires."""
    rows = [_rows_of(layer) for layer in needs.layers if layer.type != "none"]
    first = rows[0] if rows else None
    if first is None or any(x is None or _shape(x) != _shape(first) for x in rows):
        found = "others"
        if any(x.what == "latents" for x in needs.rows):
            found = "latents; --expanded plans with K and V of every head"
        raise UsageError(
            "plan --nodes: expected layers of keys and values that differ only in windows, as "
            f"numkv.ray.ShardedKVCache keeps them, got {found}; without --nodes each is counted"
        )
    heads = arguments.q_heads or needs.q_heads
    if heads is None and needs.model_type:
        raise UsageError("plan --nodes: the config has no number of query heads; give --q-heads")
    heads = heads or _Q_HEADS_PER_KV_HEAD * first.heads
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
    """Return the rows of a layer, if they are K and V of each token, whole or in a window."""
    plain = len(layer.rows) == 1 and not layer.states and layer.type != "chunked_attention"
    rows = layer.rows[0] if plain else None
    return rows if rows and rows.dim_v and rows.tokens_per_row == 1 and not rows.of_source else None


def _shape(rows: Rows) -> tuple[int, int, int]:
    return rows.heads, rows.dim, rows.dim_v


def _counted(memory: Size, load: Load) -> str:
    """Return a sentence on the parts of a step that are counted."""
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
    """Return sentences on the largest useful number of head parts, and the least length for context columns."""
    found = []
    parts = [2**i for i in range(20) if 2**i <= load.kv_heads]
    totals = [cost_of(load, network, n, 1, load.batch)[0].total for n in parts]
    pays = [now <= 0.9 * last for last, now in itertools.pairwise(totals)]
    stops = load.kv_heads if all(pays) else parts[pays.index(False)]
    if stops == load.kv_heads:
        found.append(f"In one group all {stops} head parts pay.")
    else:
        found.append(
            f"In one group more than {stops} head parts do not pay: twice as many save less than a tenth."
        )
    lengths = [2**i for i in range(10, 31)]
    for length in lengths:
        own = load._replace(context=length)
        halves = cost_of(own, network, stops, 2, load.batch)[0].total
        whole, _, memory = cost_of(own, network, stops, 1, load.batch)
        if memory > network.memory or halves < 0.9 * whole.total:
            why = "rows do not fit otherwise" if memory > network.memory else "it saves a tenth"
            found.append(
                f"With these head parts, dividing the context pays from about {length:,} tokens on: {why}."
            )
            break
    found.append(
        "With the bandwidth in the last column, messages take a tenth of the rest of a step. The model assumes that "
        "nothing overlaps."
    )
    return found


def _draw(path: Path, found: list[Any]) -> None:
    """Draw tokens a second over nodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, index in (("best", 1), ("heads only", 2)):
        points = [(row[0], row[index].tokens_per_second) for row in found if row[index] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="tokens/s")
    axes.set_xticks([row[0] for row in found], [f"{row[0]:,}" for row in found])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


DEFAULT_MEMORY = Size(8 * 1024**3)

_CONTEXTS = (4096, 32768)


def run(arguments: argparse.Namespace) -> None:
    """Print the plan.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    check_picture(arguments.picture)
    if arguments.profile is not None:
        print(plan_profile(arguments))
        return
    needs = _needs(arguments)
    choices = _choices(arguments, needs)
    if arguments.key_bounds and arguments.block_size is None:
        raise UsageError("--key-bounds needs --block-size: there are bounds for each block")
    print("\n".join(_about(needs)) + "\n")
    if arguments.nodes:
        if arguments.key_bounds:
            raise UsageError("--key-bounds is for a cache in one place: sharded ones keep none")
        print(plan_nodes(arguments, needs, choices[0] if arguments.kind else CacheChoice("fp16")))
        return
    print(_per_token(arguments, needs, choices))
    if arguments.path is not None or arguments.config is not None or arguments.context:
        print("\n" + _per_sequence(arguments, needs, choices))
    print("\n".join(_notes(arguments, needs, choices)))
    choice = choices[0] if arguments.kind else _safe_choice(needs)
    print(f"\nAs a cache:\n\n{cache_code(needs, choice, arguments.memory)}")


def _safe_choice(needs: ModelNeeds) -> CacheChoice:
    """Return the smallest kind that stays accurate for keys with outlier channels."""
    if any(rows.latent_dim for rows in needs.rows):
        return CacheChoice("bf16")
    by_channel = CacheChoice("int8_channel")
    least = kind(by_channel.kinds[0]).group_tokens
    if any(rows.limit is not None and rows.limit <= least for rows in needs.rows):
        return CacheChoice("int8", rotate=True)
    return by_channel


def plan_profile(arguments: argparse.Namespace) -> str:
    """Return the bytes of a token in a profile of `numkv fit`, and Python code for its cache.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.

    Returns
    -------
    str
    """
    if arguments.path or arguments.config or arguments.kind or arguments.nodes:
        raise UsageError(
            "--profile has shapes and kinds already: leave the config, --kind and --nodes out"
        )
    found, memory = Profile.load(arguments.profile), arguments.memory
    counts = Counter(
        f"{x.num_kv_heads} key/value heads of {x.head_dim} in {x.kind}/{x.v_kind}{', rotated' * x.rotate}"
        for x in found
    )
    cost = found.bytes_per_token
    lines = [f"{count} layer{'s' * (count > 1)} of {what}" for what, count in counts.items()]
    lines += [
        "",
        f"{found.model or 'a token'}: {cost:,} bytes/token, {memory // cost:,} tokens in {memory.text()}",
    ]
    if arguments.tokens is not None:
        lines[-1] += f", {memory.text(cost * arguments.tokens)} for {arguments.tokens:,} tokens"
    given = [
        f"layers=numkv.Profile.load({str(arguments.profile)!r})",
        f"max_nbytes={int(memory):_}",
    ]
    code = f"numkv.PagedKVCache({', '.join(given)})"
    return "\n".join([*lines, "", f"    cache = {code}"])


def cache_code(needs: ModelNeeds, choice: CacheChoice, memory: int) -> str:
    """Return Python code that makes a cache for a model.

    Parameters
    ----------
    needs : ModelNeeds
        Rows and states of the model.
    choice : CacheChoice
        Storage kinds.
    memory : int
        Bytes of the cache.

    Returns
    -------
    str
        The code, or the reason why there is none.
    """
    k_kind, v_kind = choice.kinds
    storage: dict[str, Any] = {"kind": k_kind, "rotate": choice.rotate}
    if v_kind != k_kind:
        storage["v_kind"] = v_kind
    try:
        layers = LayerSpec.for_model(needs, **storage)
    except NumkvError as error:
        return f"    {error}"
    specs: dict[str, str] = {}  # code of specs, and their names
    names = []
    for layer, of in zip(needs.layers, layers, strict=True):
        name = f"of_layer_{of.shares}" if of.shares is not None else layer.type.partition("_")[0]
        code = _spec_code(of)
        while specs.setdefault(name, code) != code:
            name += "_"
        names.append(name)
    lines = [f"{name} = {code}" for name, code in specs.items()]
    given = ["layers=layers", f"max_nbytes={int(memory):_}"]
    given += ["state_slots=numkv.StateSlots(64)"] * any(of.states for of in layers)
    lines += [
        f"layers = {_repeated(names)}",
        f"cache = numkv.PagedKVCache({', '.join(given)})",
    ]
    return "\n".join(f"    {line}" for line in lines)


def _spec_code(of: LayerSpec) -> str:
    """Return the code of a `LayerSpec`."""
    if of.shares is not None:
        return f"numkv.LayerSpec(shares={of.shares})"
    given = [] if of.num_kv_heads is None else [f"{of.num_kv_heads}, {of.head_dim}"]
    if of.num_kv_heads is not None:
        given += [f"head_dim_v={of.head_dim_v}"] * (of.head_dim_v != of.head_dim)
        given += [f'kind="{of.kind}"', *[f'v_kind="{of.v_kind}"'] * (of.v_kind != of.kind)]
        given += ["rotate=True"] * of.rotate
        given += [f"window_left={of.window_left}"] * (of.window_left >= 0)
        given += [f"chunk_size={of.chunk_size}"] * (of.chunk_size is not None)
    if of.states:
        given.append(f"states={[(tuple(shape), dtype) for shape, dtype in of.states]}")
    return f"numkv.LayerSpec({', '.join(given)})"


def _repeated(names: list[str]) -> str:
    """Return the code of a list of names, with a repeated part written once."""
    n = len(names)
    size = next(i for i in range(1, n + 1) if all(names[j] == names[j % i] for j in range(n)))
    parts = [_runs(names[:size]), _runs(names[n - n % size :])]
    if size < n:
        head = parts[0] if " + " not in parts[0] and " * " not in parts[0] else f"({parts[0]})"
        parts[0] = f"{head} * {n // size}"
    return " + ".join(part for part in parts if part)


def _runs(names: list[str]) -> str:
    runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    if all(count == 1 for _, count in runs):
        return f"[{', '.join(names)}]" if names else ""
    return " + ".join(f"[{name}] * {count}" if count > 1 else f"[{name}]" for name, count in runs)


def _about(needs: ModelNeeds) -> list[str]:
    """Describe the layers, equal ones together."""
    counts = Counter(_of_layer(needs, layer) for layer in needs.layers)
    if list(counts) == [""]:
        return ["This model stores nothing of its tokens."]
    return [
        f"{count} layer{'s' * (count > 1)} {what}" if what else f"{count} without a cache"
        for what, count in counts.items()
    ]


def _of_layer(needs: ModelNeeds, layer: LayerNeeds) -> str:
    if layer.shares is not None:
        return "that read another layer's rows"
    parts = [_of_rows(rows) for rows in layer.rows]
    parts += [
        f"a {state.what} state of {state.numbers:,} numbers in {state.dtype or needs.dtype}"
        for state in layer.states
    ]
    return ("of " if layer.rows else "with ") + " and ".join(parts) if parts else ""


def _of_rows(rows: Rows) -> str:
    if rows.dim_v:
        dims = f"{rows.dim}" if rows.dim == rows.dim_v else f"{rows.dim} (values {rows.dim_v})"
        what = f"{rows.heads} key/value head{'s' * (rows.heads > 1)} of {dims}"
    else:
        what = f"{rows.what} of {rows.dim}"
    if rows.of_source:
        return f"{what} for the text that is read"
    if rows.tokens_per_row > 1:
        what += f", one for {rows.tokens_per_row} tokens"
    return what if rows.limit is None else f"{what}, the last {rows.limit:,} tokens"


def _per_token(arguments: argparse.Namespace, needs: ModelNeeds, choices: list[CacheChoice]) -> str:
    """Return the table of bytes of a token, by kind."""
    memory, options = arguments.memory, _counted_with(arguments)
    full_at = needs.windows_full_at
    alike = len({(layer.rows, layer.shares) for layer in needs.layers}) == 1
    across = any(rows.of_source for rows in needs.rows)
    header = ["cache", *["bytes/token/layer"] * alike, "bytes/token"]
    header += [f"from {full_at:,} tokens on"] * bool(full_at)
    header += ["bytes/token that is read"] * across
    header.append(f"tokens in {memory.text()}")
    if arguments.tokens is not None:
        header.append(f"memory for {arguments.tokens:,} tokens")
    rows = []
    for choice in choices:
        pair = choice.kinds
        cost = needs.bytes_per_token(*pair)
        row = [choice.label, *[f"{cost // len(needs.layers):,}"] * alike, f"{cost:,}"]
        if full_at:
            row.append(f"{needs.bytes_per_token(*pair, tokens=full_at):,}")
        if across:
            row.append(f"{needs.bytes_per_source_token(*pair):,}")
        fitting = needs.tokens_in(memory, *pair, **options)
        row.append("any number" if fitting is None else f"{fitting:,}")
        if arguments.tokens is not None:
            row.append(memory.text(needs.sequence_bytes(arguments.tokens, *pair, **options)))
        rows.append(row)
    return table(header, rows)


def _counted_with(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of counting."""
    names = ("block_size", "source_tokens", "key_bounds")
    return {name: getattr(arguments, name) for name in names}


def _per_sequence(
    arguments: argparse.Namespace, needs: ModelNeeds, choices: list[CacheChoice]
) -> str:
    """Return the table of bytes of a sequence, and how many fit."""
    contexts, options = arguments.context, _counted_with(arguments)
    if not contexts:
        most = needs.context
        contexts = [n for n in _CONTEXTS if most is None or n < most] + [most] * (most is not None)
    header = ["cache", *(f"{n:,} tokens: fit" for n in contexts)]
    rows = []
    for choice in choices:
        row = [choice.label]
        for n in contexts:
            cost = needs.sequence_bytes(n, *choice.kinds, **options)
            row.append(
                f"{arguments.memory.text(cost)}: {arguments.memory // cost:,}"
                if cost
                else "0 B: any number"
            )
        rows.append(row)
    return f"One sequence, and how many fit in {arguments.memory.text()}:\n\n" + table(header, rows)


def _notes(
    arguments: argparse.Namespace, needs: ModelNeeds, choices: list[CacheChoice]
) -> list[str]:
    """Return remarks on counted and unknown entries."""
    listed = {name for choice in choices for name in choice.kinds}
    notes = []
    of_rows = [kind.name for kind in kinds() if kind.scales_per == "row" and kind.name in listed]
    if of_rows:
        others = "".join(f"; {name} has as many" for name in of_rows[1:])
        notes.append(
            f"The scales of {of_rows[0]} are counted: 4 bytes for each key and each value of a head{others}."
        )
    if "int4" in listed:
        notes.append("The scales of int4 are counted: 2 bytes for each 32 elements.")
    if needs.state_bytes():
        states = arguments.memory.text(needs.state_bytes())
        notes.append(f"States take {states} of each sequence, however long; they are counted.")
    if arguments.block_size is not None:
        notes.append(
            f"Lengths are rounded up to blocks of {arguments.block_size} tokens, with one more for each window."
        )
    if arguments.key_bounds:
        of_block = arguments.memory.text(sum(rows.bounds_bytes() for rows in needs.rows))
        notes.append(
            f"Bounds of keys, {of_block} for each block in all layers, are counted where blocks are, not by token."
        )
    if any(rows.of_source for rows in needs.rows) and not arguments.source_tokens:
        notes.append("The text that is read is not counted: give --source-tokens.")
    notes += [f"NOT KNOWN: {remark}." for remark in needs.remarks]
    return notes


def _choices(arguments: argparse.Namespace, needs: ModelNeeds) -> list[CacheChoice]:
    """Return the kinds to list: those of the option, else all that can store such rows."""
    if arguments.kind is not None:
        return arguments.kind
    dims = {dim for rows in needs.rows for dim in (rows.dim, rows.dim_v)}
    return [CacheChoice(k.name) for k in kinds() if not any(dim % k.unit[0] for dim in dims)]


def _needs(arguments: argparse.Namespace) -> ModelNeeds:
    """Return the needs from the file, or from sizes on the command line."""
    path = arguments.path or arguments.config
    if arguments.path is not None and arguments.config is not None:
        raise UsageError("plan takes one config, got two")
    layers, heads, dim = arguments.layers, arguments.kv_heads, arguments.head_dim
    dim_v = arguments.head_dim_v
    if path is None:
        if None in (layers, heads, dim):
            raise UsageError("plan needs --config, or --layers, --kv-heads and --head-dim")
        rows = Rows("keys and values", heads, dim, dim_v or dim)
        return ModelNeeds("", (LayerNeeds("full_attention", (rows,)),) * layers)
    needs = needs_of(path, expanded=arguments.expanded)
    if not any((layers, heads, dim, dim_v)):
        return needs

    def changed(rows: Rows) -> Rows:
        if rows.dim_v == 0:
            raise UsageError(f"{path}: --kv-heads and --head-dim are not for {rows.what}")
        return replace(
            rows, heads=heads or rows.heads, dim=dim or rows.dim, dim_v=dim_v or dim or rows.dim_v
        )

    found = needs.layers
    if heads or dim or dim_v:
        found = tuple(replace(one, rows=tuple(map(changed, one.rows))) for one in found)
    if layers:
        if len(set(found)) != 1:
            raise UsageError(f"{path}: --layers is for models whose layers are all equal")
        found = found[:1] * layers
    return replace(needs, layers=found, parameters=None)
