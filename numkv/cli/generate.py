"""The command without a name: continue texts, then say what the cache cost."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import PagedKVCache, targets
from numkv.cli.compare import Run, summary
from numkv.cli.live import Live, panel
from numkv.cli.output import KernelProgress, Progress, UsageError
from numkv.cli.screen import Screen, Text
from numkv.demo.cache import CacheChoice, Sharing
from numkv.demo.generate import Chooser, Replay, Sampler, generate
from numkv.demo.model import Batch, Model
from numkv.demo.network import blas_threads_for
from numkv.demo.sharded import ShardedChoice

DEFAULT_PROMPT = '''\
import json
import os


class Config:
    """Settings read from a file."""

    def __init__(self, path):
        self.path = path
'''
DEFAULT_TOKENS = 400
DEFAULT_TEMPERATURE = 0.7
DEFAULT_TOP_K = 40
#: Tokens in a block where several texts share a cache and nothing else is asked for.
DEFAULT_BLOCK_SIZE = 16


def run(arguments: argparse.Namespace) -> None:
    """Continue texts.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    targets.get(arguments.target)  # where there is no CUDA, say so before anything else
    texts = _texts(arguments)
    with Progress(f"loading {arguments.model}") as progress:
        model = Model.load(arguments.model, progress.update)
    prompts = [model.tokenizer.encode(text.content) for text in texts]
    limits = _limits(model, texts, prompts, arguments.tokens)
    blocks = len(texts) > 1 or arguments.shards is not None
    block_size = arguments.block_size or (DEFAULT_BLOCK_SIZE if blocks else None)
    place = {"target": arguments.target, "block_size": block_size}
    choices = [replace(choice, **place) for choice in arguments.kind]
    reference = replace(CacheChoice("fp32"), **place)
    print(_headline(model, choices[0]), file=sys.stderr)
    with blas_threads_for(model.weights):
        _warm_up(model, choices[0])
        samplers = [Sampler(arguments.temperature, arguments.top_k, arguments.seed) for _ in texts]
        screen = Screen(model.tokenizer, texts)
        sharded = None
        if arguments.shards is not None:
            sharded = ShardedChoice(choices[0], arguments.shards, arguments.by)
        runs = [_compute(model, choices[0], prompts, limits, samplers, screen, sharded)]
        tokens = runs[0].tokens
        if not any(tokens):
            raise UsageError("the model ended the text at once; try another prompt or seed")
        for choice in dict.fromkeys([*choices, reference]):
            if choice != choices[0]:
                _warm_up(model, choice)
                replays, lengths = [Replay(t) for t in tokens], [len(t) for t in tokens]
                runs.append(_compute(model, choice, prompts, lengths, replays))
    print(summary(model.config, runs, reference, prompts, limits))


def _texts(arguments: argparse.Namespace) -> list[Text]:
    if arguments.file is not None:
        return [Text(str(path), _read(path)) for path in arguments.file]
    prompts = [DEFAULT_PROMPT] if arguments.prompt is None else arguments.prompt
    if any("\ud800" <= character <= "\udfff" for prompt in prompts for character in prompt):
        raise UsageError("--prompt: not UTF-8 text")
    if len(prompts) == 1:
        return [Text("--prompt", prompts[0])]
    return [Text(f"prompt {number}", prompt) for number, prompt in enumerate(prompts, 1)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None


def _limits(
    model: Model, texts: Sequence[Text], prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[int]:
    """How many tokens to generate for each text: as many as asked for, within the context."""
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


def _warm_up(model: Model, choice: CacheChoice) -> None:
    """Make kernels ready, so that compiling is not counted as computing."""
    with KernelProgress():
        model.warm_up(choice, choice.target)


def _compute(
    model: Model,
    choice: CacheChoice,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    choosers: Sequence[Chooser],
    screen: Screen | None = None,
    sharded: ShardedChoice | None = None,
) -> Run:
    """Continue the prompts with one kind of cache, on the screen if there is one."""
    capacities = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    if sharded is not None:
        return _compute_sharded(model, sharded, capacities, (prompts, limits, choosers, screen))
    return _continue(
        model,
        choice,
        model.batch(capacities, choice, choice.target),
        prompts,
        limits,
        choosers,
        screen,
    )


def _compute_sharded(
    model: Model, sharded: ShardedChoice, capacities: Sequence[int], what: Any
) -> Run:
    """The same with shards, and how many messages they got."""
    print(f"starting {sharded.shards} shards by {sharded.by}", file=sys.stderr)
    with (batch := sharded.batch(model, capacities)).cache as cache:
        warm = batch.start()
        warm.forward([0, 0])  # so that loading kernels is not counted as computing
        warm.step(0)
        cache.remove(warm.seq)
        before = cache.messages
        run = _continue(model, sharded.kinds, batch, *what)
        steps = sum(map(len, run.tokens)) - len(run.tokens) + run.num_read
        told = [b - a for a, b in zip(before, cache.messages, strict=True)]
    print(
        f"{sharded.shards} shards by {sharded.by} got {', '.join(f'{n:,}' for n in told)} messages for {steps:,} "
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
    screen: Screen | None,
) -> Run:
    """Continue the prompts in a batch."""
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
