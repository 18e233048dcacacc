"""The command without a name: continue a text, then say what the cache cost."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.cli.output import KernelProgress, Progress, UsageError, format_bytes, table
from numkv.demo.blas import blas_threads_for
from numkv.demo.cache import CacheChoice
from numkv.demo.generate import Sampler, generate
from numkv.demo.model import Model, Session

__all__ = ["DEFAULT_PROMPT", "DEFAULT_TEMPERATURE", "DEFAULT_TOKENS", "DEFAULT_TOP_K", "run"]

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

#: Control characters would move the cursor or worse; the text shows a sign in their place.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127) if code not in (9, 10)}
_MAX_PROMPT_LINES = 20


@dataclass(frozen=True)
class _Run:
    """One pass over the text with one kind of cache."""

    choice: CacheChoice
    logits: Sequence[NDArray[np.float32]]
    prefill_s: float
    decode_s: float


def run(arguments: argparse.Namespace) -> None:
    """Continue a text.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    targets.get(arguments.target)  # where there is no CUDA, say so before anything else
    text = _prompt(arguments)
    with Progress(f"loading {arguments.model}") as progress:
        model = Model.load(arguments.model, progress.update)
    prompt = model.tokenizer.encode(text)
    capacity = len(prompt) + arguments.tokens
    if not prompt:
        raise UsageError("the prompt is empty")
    if capacity > model.config.max_context:
        raise UsageError(
            f"the prompt has {len(prompt):,} tokens; with --tokens {arguments.tokens} that is "
            f"more than the model's context of {model.config.max_context:,}"
        )
    choices = [replace(choice, target=arguments.target) for choice in arguments.kind]
    print(_headline(model, choices[0]), file=sys.stderr)
    sampler = Sampler(arguments.temperature, arguments.top_k, arguments.seed)
    reference = CacheChoice("fp32", target=arguments.target)
    others = [choice for choice in dict.fromkeys([*choices, reference]) if choice != choices[0]]
    with blas_threads_for(model.weights):
        first, tokens = _stream(model, choices[0], capacity, text, prompt, sampler)
        runs = [first, *(_repeat(model, choice, capacity, prompt, tokens) for choice in others)]
    print(_table(model, runs, reference, len(prompt), len(tokens), capacity))


def _prompt(arguments: argparse.Namespace) -> str:
    text: str = DEFAULT_PROMPT
    if arguments.file is not None:
        try:
            return str(arguments.file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise UsageError(f"{arguments.file}: not UTF-8 text") from None
    if arguments.prompt is not None:
        text = arguments.prompt
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError("--prompt: not UTF-8 text")
    return text


def _headline(model: Model, choice: CacheChoice) -> str:
    config = model.config
    return (
        f"{config.architecture}, {model.weights.num_parameters / 1e6:.1f} million parameters, "
        f"{config.num_layers} layers, {config.num_q_heads} query and {config.num_kv_heads} "
        f"key/value heads of {config.head_dim}; {choice.label} cache on {choice.target}\n"
    )


def _start(model: Model, choice: CacheChoice, capacity: int) -> Session:
    """Start a session whose kernels are ready, so that compiling is not counted as computing."""
    with KernelProgress():
        model.warm_up(choice, choice.target)
    return model.start(capacity, choice, choice.target)


def _show(text: str) -> None:
    print(text.translate(_CONTROLS), end="", flush=True)


def _show_prompt(text: str) -> None:
    lines = text.splitlines(keepends=True)
    if len(lines) > _MAX_PROMPT_LINES:
        print(f"[… {len(lines) - _MAX_PROMPT_LINES:,} lines]")
    _show("".join(lines[-_MAX_PROMPT_LINES:]))


def _stream(
    model: Model,
    choice: CacheChoice,
    capacity: int,
    text: str,
    prompt: Sequence[int],
    sampler: Sampler,
) -> tuple[_Run, list[int]]:
    """Generate and print; returns the pass and the tokens generated."""
    session = _start(model, choice, capacity)
    _show_prompt(text)
    stream = model.tokenizer.stream()
    steps = []
    with Progress("reading the prompt") as progress:
        started = time.perf_counter()
        generated = generate(
            session,
            prompt,
            capacity - len(prompt),
            sampler,
            model.config.eos_tokens,
            progress.update,
        )
        first = next(generated, None)
        prefilled = time.perf_counter()
    if first is not None:
        steps.append(first)
        _show(stream.push(first.token))
    for step in generated:
        steps.append(step)
        _show(stream.push(step.token))
    decoded = time.perf_counter()
    _show(stream.finish() + "\n\n")
    if not steps:
        raise UsageError("the model ended the text at once; try another prompt or seed")
    logits = [step.logits for step in steps]
    tokens = [step.token for step in steps]
    return _Run(choice, logits, prefilled - started, decoded - prefilled), tokens


def _repeat(
    model: Model,
    choice: CacheChoice,
    capacity: int,
    prompt: Sequence[int],
    tokens: Sequence[int],
) -> _Run:
    """Compute the same text with another kind of cache."""
    session = _start(model, choice, capacity)
    with Progress(f"the same text with cache {choice.label}") as progress:
        started = time.perf_counter()
        logits = [session.prefill(prompt, progress.update)]
        prefilled = time.perf_counter()
        for done, token in enumerate(tokens[:-1], 1):
            logits.append(session.step(token))
            progress.update(done, len(tokens))
        decoded = time.perf_counter()
    return _Run(choice, logits, prefilled - started, decoded - prefilled)


def _table(
    model: Model,
    runs: Sequence[_Run],
    reference: CacheChoice,
    num_prompt: int,
    num_generated: int,
    capacity: int,
) -> str:
    config = model.config
    expected = next(run.logits for run in runs if run.choice == reference)
    rows = []
    for run in runs:
        bytes_per_token = config.num_layers * run.choice.bytes_per_token(
            config.num_kv_heads, config.head_dim
        )
        rows.append(
            (
                run.choice.label,
                f"{bytes_per_token:,}",
                format_bytes(bytes_per_token * capacity),
                _rate(num_prompt, run.prefill_s),
                _rate(num_generated - 1, run.decode_s),
                *_agreement(run.logits, expected, run.choice == reference),
            )
        )
    header = (
        "cache",
        "bytes/token",
        "memory",
        "prefill tok/s",
        "decode tok/s",
        "same top token",
        "max logit diff",
    )
    caption = (
        f"{num_prompt:,} tokens read, {num_generated:,} generated, room for {capacity:,}. "
        "The last two columns\ncompare every prediction with that of an fp32 cache."
    )
    return f"{table(header, rows)}\n{caption}"


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
