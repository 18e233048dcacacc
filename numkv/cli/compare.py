"""The table that ends a run: what each kind of cache cost, and what it changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from numkv.cli.output import table
from numkv.demo.cache import CacheChoice, Sharing
from numkv.demo.checkpoint import ModelConfig
from numkv.drawing.picture import format_bytes

_HEADER = (
    "cache",
    "B/token",
    "memory",
    "prefill t/s",
    "decode t/s",
    "same top",
    "logit diff",
)


@dataclass(frozen=True)
class Run:
    """One pass over the texts with one kind of cache.

    Attributes
    ----------
    choice : CacheChoice
        The cache.
    tokens : list of list of int
        What each text was continued with.
    logits : sequence of ndarray
        What the tokens were chosen from, in the order in which they were computed.
    num_read : int
        Tokens of the prompts that were computed; others were in the cache already.
    prefill_s, decode_s : float
        Seconds.
    sharing : Sharing or None
        The blocks in the end; None for a contiguous cache.
    """

    choice: CacheChoice
    tokens: list[list[int]]
    logits: Sequence[NDArray[np.float32]]
    num_read: int
    prefill_s: float
    decode_s: float
    sharing: Sharing | None

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Bytes that a token costs in all layers."""
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
        Tokens that were to be generated at most.

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
    """What is in the blocks, and what sharing them is worth."""
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
