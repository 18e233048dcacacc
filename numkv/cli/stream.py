"""``numkv stream``: continue a text beyond its context."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

from numkv import targets
from numkv.cli.output import UsageError, kernel_progress, load_model, table
from numkv.cli.screen import Live, Screen, panel, show
from numkv.demo.cache import CacheChoice
from numkv.demo.evaluate import Document
from numkv.demo.generate import Sampler, generate
from numkv.demo.model import Batch, Model
from numkv.demo.network import Network, blas_threads_for
from numkv.demo.stream import Shift, ShiftingCache
from numkv.demo.tokenizer import decoded


def run(arguments: argparse.Namespace) -> None:
    """Continue a text for longer than the context.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    targets.get(arguments.target)
    if arguments.keep >= arguments.context:
        raise UsageError(
            f"--keep: expected less than the context of {arguments.context:,}, got {arguments.keep:,}"
        )
    model = load_model(arguments.model)
    prompt = model.tokenizer.encode(arguments.prompt)
    if not 0 < len(prompt) <= arguments.context:
        raise UsageError(
            f"--prompt: expected 1 to {arguments.context:,} tokens, got {len(prompt):,}; give more --context"
        )
    kind = replace(arguments.kind, target=arguments.target)
    cache = ShiftingCache(model.config, arguments.context, arguments.keep, kind)
    batch = Batch(Network(model.config, model.weights, arguments.context, arguments.target), cache)
    tokens = list(prompt)
    with blas_threads_for(model.weights):
        with kernel_progress():
            session = batch.start()
            session.forward([0])  # one token: more might not fit, and be the first shift
            session.rewind()
        screen = Screen(model.tokenizer, [Document("--prompt", arguments.prompt)])
        started = time.perf_counter()
        chooser = Sampler(arguments.temperature, arguments.top_k, arguments.seed)
        logits = session.prefill(prompt)
        limits = [arguments.tokens]
        steps = generate([session], logits[None], limits, [chooser], model.config.eos_tokens)
        with Live(panel(cache)) as live:
            for step in steps:
                screen.show(0, step.token)
                if step.token is not None:
                    tokens.append(step.token)
                    live.token()
        seconds = time.perf_counter() - started
    if cache.shifts:
        _show_first_shift(model, tokens, cache.shifts[0])
    show(_summary(len(prompt), tokens, cache, kind, seconds))


def _show_first_shift(model: Model, tokens: Sequence[int], shift: Shift) -> None:
    """Print the cache's text before and after its first shift."""
    start = len(model.tokenizer.encode(""))  # start tokens, which are no text
    before = tokens[: shift.num_tokens]
    show(f"==> in the cache before the first shift: {len(before):,} tokens <==\n")
    show(decoded(model.tokenizer, before[start:]) + "\n")
    left = shift.num_tokens - shift.end + shift.begin
    show(f"==> and after it: {left:,} tokens, the last {left - shift.begin:,} shifted <==\n")
    parts = (
        decoded(model.tokenizer, x) for x in (before[start : shift.begin], before[shift.end :])
    )
    show(f"[… {shift.end - shift.begin:,} tokens dropped …]".join(parts) + "\n\n")


def _summary(
    prompt: int, tokens: Sequence[int], cache: ShiftingCache, kind: CacheChoice, seconds: float
) -> str:
    dropped = sum(shift.end - shift.begin for shift in cache.shifts)
    rows = [
        ("prompt", f"{prompt:,} tokens"),
        (
            "generated",
            f"{len(tokens) - prompt:,} tokens, {(len(tokens) - prompt) / seconds:,.0f} a second",
        ),
        ("context", f"{cache.context:,} tokens, the first {cache.keep:,} always kept"),
        ("shifts", f"{len(cache.shifts):,}, {dropped:,} tokens dropped, none computed again"),
        ("cache", f"{kind.label} on {kind.target}"),
    ]
    return table(("a text that outlives its context", ""), rows) + "\n"
