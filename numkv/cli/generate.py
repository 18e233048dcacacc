"""The command without a name: continue texts, then print the cost of the cache."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import PagedKVCache, targets
from numkv.cli.output import Progress, UsageError, load_model, read_text, table, warm_up
from numkv.cli.screen import Live, Screen, panel
from numkv.demo.cache import CacheChoice, Sharing
from numkv.demo.checkpoint import ModelConfig
from numkv.demo.evaluate import Document
from numkv.demo.generate import Chooser, Replay, Sampler, generate
from numkv.demo.model import Batch, Model
from numkv.demo.network import blas_threads_for
from numkv.demo.sharded import ShardedChoice
from numkv.drawing.picture import format_bytes

_HEADER = ("cache", "B/token", "memory", "prefill t/s", "decode t/s", "same top", "logit diff")


@dataclass(frozen=True)
class Run:
    """One pass over the texts with one kind of cache.

    Attributes
    ----------
    choice : CacheChoice
        The cache.
    tokens : list of list of int
        New tokens of each text.
    logits : sequence of ndarray
        Logits of the chosen tokens, in the order of computation.
    num_read : int
        Computed tokens of the prompts; the others were in the cache already.
    prefill_s, decode_s : float
        Seconds of prompts and of decode steps.
    sharing : Sharing or None
        Use of the blocks at the end; None for a contiguous cache.
    """

    choice: CacheChoice
    tokens: list[list[int]]
    logits: Sequence[NDArray[np.float32]]
    num_read: int
    prefill_s: float
    decode_s: float
    sharing: Sharing | None

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Return the bytes of a token in all layers."""
        return config.num_layers * self.choice.bytes_per_token(config.num_kv_heads, config.head_dim)


def summary(
    config: ModelConfig,
    runs: Sequence[Run],
    reference: CacheChoice,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
) -> str:
    """Compare runs of the same texts.

    Parameters
    ----------
    config : ModelConfig
        Sizes of the model.
    runs : sequence of Run
        The first chose the tokens, the others repeated them.
    reference : CacheChoice
        The cache of the run that others are compared with.
    prompts : sequence of sequence of int
        The prompts' tokens.
    limits : sequence of int
        Most tokens to generate for each text.

    Returns
    -------
    str
        A table and a few lines about it.
    """
    generated = [len(tokens) for tokens in runs[0].tokens]
    num_slots = sum(map(len, prompts)) + sum(limits)
    expected = next(run.logits for run in runs if run.choice == reference)
    rows = []
    for run in runs:
        if run.sharing is not None:
            num_slots = run.sharing.num_blocks * (run.choice.block_size or 1)
        rows.append(
            (
                run.choice.label,
                f"{run.bytes_per_token(config):,}",
                format_bytes(run.bytes_per_token(config) * num_slots),
                _rate(run.num_read, run.prefill_s),
                _rate(sum(max(n - 1, 0) for n in generated), run.decode_s),
                *_agreement(run.logits, expected, run.choice == reference),
            )
        )
    lines = [table(_HEADER, rows), _caption(config, runs[0], prompts, limits)]
    return "\n".join(lines)


def _caption(
    config: ModelConfig, run: Run, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> str:
    num_prompt = sum(map(len, prompts))
    lines = [f"{num_prompt:,} tokens read, {sum(map(len, run.tokens)):,} generated"]
    if run.sharing is None:
        lines[0] += f", room for {num_prompt + sum(limits):,}"
    lines[0] += "."
    full = sum(
        len(prompt) + len(tokens) == config.max_context
        for prompt, tokens in zip(prompts, run.tokens, strict=True)
    )
    if full:
        what = "The text" if len(prompts) == 1 else f"{full} of the texts"
        lines.append(f"{what} reached the end of the model's context, {config.max_context:,}.")
    if run.sharing is not None:
        lines.append(_blocks(config, run, run.sharing))
    lines.append("The last two columns compare every prediction with that of an fp32 cache.")
    return "\n".join(lines)


def _blocks(config: ModelConfig, run: Run, sharing: Sharing) -> str:
    """Describe the use of the blocks, and the memory saved by sharing."""
    size = run.choice.block_size or 1
    num_slots = sharing.num_blocks * size
    blocks = (
        f"{sharing.num_stored:,} tokens are stored, in {sharing.num_blocks:,} blocks of {size:,}; "
        f"{num_slots - sharing.num_stored:,} of {num_slots:,} slots are empty."
    )
    if len(run.tokens) == 1:
        return blocks
    saved = sharing.num_tokens - sharing.num_stored
    if saved == 0:
        return f"{blocks}\nThe texts have no block in common."
    return (
        f"{blocks}\nThe texts have {sharing.num_tokens:,} tokens: a common beginning is stored once "
        f"(shared blocks: {sharing.num_shared:,}),\nwhich saves "
        f"{format_bytes(saved * run.bytes_per_token(config))} with {run.choice.label} "
        f"({100 * saved / sharing.num_tokens:.0f} %)."
    )


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:,.0f}" if num_tokens > 0 else "-"


def _agreement(
    logits: Sequence[NDArray[np.float32]],
    expected: Sequence[NDArray[np.float32]],
    is_reference: bool,
) -> tuple[str, str]:
    if is_reference:
        return "reference", "reference"
    pairs = list(zip(logits, expected, strict=True))
    same = sum(a.argmax() == b.argmax() for a, b in pairs) / len(pairs)
    return f"{100 * same:.1f} %", f"{max(np.abs(a - b).max() for a, b in pairs):.1g}"


DEFAULT_PROMPT = '''\
import json
import os


class Config:
    """Settings read from a file."""

    def __init__(self, path):
        self.path = path
'''
#: Default tokens of a block if several texts share a cache.
DEFAULT_BLOCK_SIZE = 16


def run(arguments: argparse.Namespace) -> None:
    """Continue texts.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    targets.get(arguments.target)  # raises first if CUDA is not available
    texts = _texts(arguments)
    model = load_model(arguments.model)
    prompts = [model.tokenizer.encode(text.text) for text in texts]
    limits = _limits(model, texts, prompts, arguments.tokens)
    blocks = len(texts) > 1 or arguments.shards is not None
    block_size = arguments.block_size or (DEFAULT_BLOCK_SIZE if blocks else None)
    place = {"target": arguments.target, "block_size": block_size}
    choices = [replace(choice, **place) for choice in arguments.kind]
    reference = replace(CacheChoice("fp32"), **place)
    print(_headline(model, choices[0]), file=sys.stderr)
    with blas_threads_for(model.weights):
        warm_up(model, choices[:1], arguments.target)
        samplers = [Sampler(arguments.temperature, arguments.top_k, arguments.seed) for _ in texts]
        work = prompts, limits, samplers, Screen(model.tokenizer, texts)
        capacities = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
        if arguments.shards is None:
            batch = model.batch(capacities, choices[0], arguments.target)
            runs = [_continue(model, choices[0], batch, *work)]
        else:
            sharded = ShardedChoice(choices[0], arguments.shards, arguments.by)
            runs = [_continue_sharded(model, sharded, capacities, *work)]
        tokens = runs[0].tokens
        if not any(tokens):
            raise UsageError("the model ended the text at once; try another prompt or seed")
        for choice in dict.fromkeys([*choices, reference]):
            if choice != choices[0]:
                warm_up(model, [choice], arguments.target)
                replays, lengths = [Replay(t) for t in tokens], [len(t) for t in tokens]
                capacities = [len(p) + n for p, n in zip(prompts, lengths, strict=True)]
                batch = model.batch(capacities, choice, arguments.target)
                runs.append(_continue(model, choice, batch, prompts, lengths, replays))
    print(summary(model.config, runs, reference, prompts, limits))


def _texts(arguments: argparse.Namespace) -> list[Document]:
    if arguments.file is not None:
        return [Document(str(path), read_text(path, str(path))) for path in arguments.file]
    prompts = [DEFAULT_PROMPT] if arguments.prompt is None else arguments.prompt
    if any("\ud800" <= character <= "\udfff" for prompt in prompts for character in prompt):
        raise UsageError("--prompt: not UTF-8 text")
    if len(prompts) == 1:
        return [Document("--prompt", prompts[0])]
    return [Document(f"prompt {number}", prompt) for number, prompt in enumerate(prompts, 1)]


def _limits(
    model: Model, texts: Sequence[Document], prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[int]:
    """Return how many tokens to generate for each text, within the model's context."""
    context = model.config.max_context
    for text, prompt in zip(texts, prompts, strict=True):
        if not prompt:
            raise UsageError(f"{text.name}: the prompt is empty")
        if len(prompt) >= context:
            raise UsageError(
                f"{text.name}: {len(prompt):,} tokens leave no room to go on in the model's "
                f"context of {context:,}"
            )
    return [min(num_tokens, context - len(prompt)) for prompt in prompts]


def _headline(model: Model, choice: CacheChoice) -> str:
    config = model.config
    blocks = "" if choice.block_size is None else f" in blocks of {choice.block_size}"
    return (
        f"{config.architecture}, {model.weights.num_parameters / 1e6:.1f} million parameters, "
        f"{config.num_layers} layers, {config.num_q_heads} query and {config.num_kv_heads} "
        f"key/value heads of {config.head_dim}; {choice.label} cache{blocks} on {choice.target}\n"
    )


def _continue_sharded(
    model: Model, sharded: ShardedChoice, capacities: Sequence[int], *work: Any
) -> Run:
    """Continue prompts over shards, and print the number of messages."""
    print(f"starting {sharded.shards} shards by {sharded.by}", file=sys.stderr)
    with (batch := sharded.batch(model, capacities)).cache as cache:
        warm = batch.start()
        warm.forward([0, 0])  # so that the loading of kernels is not counted
        warm.step(0)
        cache.remove(warm.seq)
        before = cache.messages
        run = _continue(model, sharded.kinds, batch, *work)
        steps = sum(map(len, run.tokens)) - len(run.tokens) + run.num_read
        sent = [b - a for a, b in zip(before, cache.messages, strict=True)]
    print(
        f"{sharded.shards} shards by {sharded.by} got {', '.join(f'{n:,}' for n in sent)} messages for {steps:,} "
        f"tokens in {model.config.num_layers} layers; {batch.recomputed:,} tokens were computed again",
        file=sys.stderr,
    )
    return run


def _continue(
    model: Model,
    choice: CacheChoice,
    batch: Batch,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    choosers: Sequence[Chooser],
    screen: Screen | None = None,
) -> Run:
    """Continue the prompts with one kind of cache, on the screen if there is one."""
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[NDArray[np.float32]] = []
    what = "reading the prompt" if screen else f"the same text with cache {choice.label}"
    with Progress(what) as progress:
        started = time.perf_counter()
        sessions, first = batch.prefill(prompts, progress.update)
        prefilled = time.perf_counter()
    with (
        nullcontext() if screen else Progress(what) as repeating,
        Live(panel(batch.cache)) if screen else nullcontext() as live,
    ):
        for step in generate(sessions, first, limits, choosers, model.config.eos_tokens):
            if step.token is not None:
                tokens[step.text].append(step.token)
                logits.append(step.logits)
            if screen is not None and live is not None:
                screen.show(step.text, step.token)
                if step.token is not None:
                    live.token()
            if repeating is not None:
                repeating.update(len(logits), sum(limits))
        decoded = time.perf_counter()
    return Run(
        choice,
        tokens,
        logits,
        num_read=sum(map(len, prompts)) - sum(session.num_reused for session in sessions),
        prefill_s=prefilled - started,
        decode_s=decoded - prefilled,
        sharing=Sharing.of(batch.cache) if isinstance(batch.cache, PagedKVCache) else None,
    )
