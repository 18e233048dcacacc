"""Chooses the next token, again and again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.demo.model import Session

__all__ = ["Sampler", "generate"]


@dataclass(frozen=True)
class Step:
    """A token that was generated, and what it was chosen from.

    Attributes
    ----------
    token : int
        The chosen token.
    logits : ndarray
        ``(vocab_size,)``, before temperature and top-k.
    """

    token: int
    logits: NDArray[np.float32]


class Sampler:
    """Draws a token from logits; the same seed draws the same tokens.

    Parameters
    ----------
    temperature : float
        What logits are divided by; 0 always takes the largest.
    top_k : int
        How many of the largest logits take part; 0 is all.
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
        scaled = logits.astype(np.float64) / self.temperature
        if 0 < self.top_k < len(scaled):
            smallest = np.partition(scaled, -self.top_k)[-self.top_k]
            scaled[scaled < smallest] = -np.inf
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        return int(np.argmax(scaled + self._random.gumbel(size=len(scaled))))


def generate(
    session: Session,
    prompt: Sequence[int],
    num_tokens: int,
    sampler: Sampler,
    stop: Collection[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Step]:
    """Continue a text.

    Parameters
    ----------
    session : Session
        Where the text is computed.
    prompt : sequence of int
        Tokens to put before, at least one.
    num_tokens : int
        Tokens to generate at most.
    sampler : Sampler
        How a token is chosen.
    stop : collection of int
        Tokens that end the text; they are not yielded.
    progress : callable, optional
        Called during prefill with the number of prompt tokens done and their total.

    Yields
    ------
    Step
        Each token as soon as it is chosen.
    """
    logits = session.prefill(prompt, progress)
    for index in range(num_tokens):
        token = sampler.choose(logits)
        if token in stop:
            return
        yield Step(token, logits)
        if index + 1 < num_tokens:
            logits = session.step(token)
