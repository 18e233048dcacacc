"""Text generation: the choice of the next token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from numkv.demo.model import Session


@dataclass(frozen=True)
class Choice:
    """A token chosen for a text, and its logits.

    Attributes
    ----------
    text : int
        Number of the text.
    token : int or None
        The token; None if the text has ended.
    logits : ndarray
        ``(vocab_size,)``, before temperature and top-k.
    """

    text: int
    token: int | None
    logits: NDArray[np.float32]


class Chooser(Protocol):
    """Chooses the next token of a text."""

    def choose(self, logits: NDArray[np.floating[Any]]) -> int:
        """Return a token, given the logits of all."""


class Sampler:
    """Draws a token from logits; the same seed draws the same tokens.

    Parameters
    ----------
    temperature : float
        Divisor of the logits; with 0 the largest logit always wins.
    top_k : int
        Number of the largest logits to choose from; 0 for all.
    seed : int
        Seed of the random numbers.
    """

    def __init__(self, temperature: float = 0.0, top_k: int = 0, seed: int = 0) -> None:
        if not temperature >= 0:
            raise ValueError(f"temperature: expected 0 or more, got {temperature}")
        if top_k < 0:
            raise ValueError(f"top_k: expected 0 or more, got {top_k}")
        self.temperature = temperature
        self.top_k = top_k
        self._random = np.random.default_rng(seed)

    def choose(self, logits: NDArray[np.floating[Any]]) -> int:
        """Choose a token.

        Parameters
        ----------
        logits : ndarray
            ``(vocab_size,)``.

        Returns
        -------
        int
        """
        if self.temperature == 0 or self.top_k == 1:
            return int(np.argmax(logits))
        # Without their largest, which changes no probability, a tiny temperature overflows to -inf alone.
        with np.errstate(over="ignore"):
            scaled = (logits - logits.max()).astype(np.float64) / self.temperature
        if 0 < self.top_k < len(scaled):
            smallest = np.partition(scaled, -self.top_k)[-self.top_k]
            scaled[scaled < smallest] = -np.inf
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        return int(np.argmax(scaled + self._random.gumbel(size=len(scaled))))


class Replay:
    """Chooses given tokens, and ignores the logits.

    Parameters
    ----------
    tokens : sequence of int
        The tokens, in order.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = iter(tokens)

    def choose(self, logits: NDArray[np.floating[Any]]) -> int:
        """Return the next token."""
        return next(self._tokens)


def generate(
    sessions: Sequence[Session],
    logits: NDArray[np.float32],
    limits: Sequence[int],
    choosers: Sequence[Chooser],
    stop: Collection[int] = (),
) -> Iterator[Choice]:
    """Continue texts, all of them in one pass per token, each until its own end.

    Parameters
    ----------
    sessions : sequence of Session
        The texts, of one batch.
    logits : ndarray
        ``(num_texts, vocab_size)``, of the first token; both as `Batch.prefill` returns them.
    limits : sequence of int
        Most tokens to generate for each text.
    choosers : sequence of Chooser
        The chooser of each text.
    stop : collection of int
        Tokens that end a text; they are not yielded.

    Yields
    ------
    Choice
        Each token as soon as it is chosen, and one without a token for the end of each text.
    """
    left = list(limits)
    running = list(range(len(sessions)))
    while running:
        chosen = {}
        for text, row in zip(running, logits, strict=True):
            token = choosers[text].choose(row) if left[text] > 0 else None
            if token is not None and token not in stop:
                yield Choice(text, token, row)
                left[text] -= 1
                if left[text] > 0:
                    chosen[text] = token
            if text not in chosen:
                yield Choice(text, None, row)
        running = list(chosen)
        if running:
            batch = sessions[0].batch
            logits = batch.step([sessions[text] for text in running], list(chosen.values()))
