"""Texts that grow: `Batch`, several whose K and V are in one cache, and `Session`, one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.demo.cache import Cache
from numkv.demo.checkpoint import Progress
from numkv.demo.network import Network

Array = NDArray[np.float32]
Tokens = Iterable[int] | NDArray[np.integer[Any]]

#: Tokens of a prompt that are computed at once: enough for the matrices to be fast, few enough for
#: activations and scores to stay small and for progress to be seen.
PREFILL_CHUNK = 256


class Batch:
    """Texts that are computed together: their tokens so far are in one cache.

    Parameters
    ----------
    network : Network
        The layers, on the cache's target.
    cache : Cache
        Where K and V are kept.
    """

    def __init__(self, network: Network, cache: Cache) -> None:
        self.network = network
        self.cache = cache

    def start(self, prompt: Sequence[int] = ()) -> Session:
        """Start a text.

        Parameters
        ----------
        prompt : sequence of int
            Its first tokens. What the cache has of them already, because an earlier text began the
            same way, is taken over; the rest is still to be computed.

        Returns
        -------
        Session
        """
        return Session(self, self.cache.add(prompt))

    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> tuple[list[Session], Array]:
        """Start texts and compute their prompts, one after another so that later ones can share.

        Parameters
        ----------
        prompts : sequence of sequence of int
            The tokens of each, at least one.
        progress : callable, optional
            Called with the number of tokens done and their total.

        Returns
        -------
        sessions : list of Session
            The texts.
        logits : ndarray
            ``(num_texts, vocab_size)``, of the token after each prompt.
        """
        total, done = sum(map(len, prompts)), 0
        sessions: list[Session] = []
        logits = []

        def report(num_new: int, _: int) -> None:
            if progress is not None:
                progress(done + sessions[-1].num_reused + num_new, total)

        for prompt in prompts:
            sessions.append(self.start(prompt))
            logits.append(sessions[-1].prefill(prompt[sessions[-1].num_reused :], report))
            done += len(prompt)
        return sessions, np.array(logits)

    def step(self, sessions: Sequence[Session], tokens: Sequence[int]) -> Array:
        """Compute the logits of the token after the next one of several texts, in one pass.

        Parameters
        ----------
        sessions : sequence of Session
            Texts of this batch.
        tokens : sequence of int
            The next token of each.

        Returns
        -------
        ndarray
            ``(num_texts, vocab_size)``.
        """
        return self.network.logits(self.hidden(sessions, tokens, [1] * len(sessions)))

    def hidden(self, sessions: Sequence[Session], tokens: Tokens, counts: Sequence[int]) -> Array:
        """Run new tokens of several texts through all layers, and keep their K and V.

        Parameters
        ----------
        sessions : sequence of Session
            Texts of this batch.
        tokens : sequence of int
            The next tokens of all texts, one text after another.
        counts : sequence of int
            How many each of them gets.

        Returns
        -------
        ndarray
            ``(num_tokens, hidden_size)``.

        Raises
        ------
        IndexError
            If a token is not in the vocabulary.
        numkv.CacheFull
            If the cache has no room for all of them.
        """
        ids = np.asarray(tokens, np.int64)
        step = self.cache.reserve([session.seq for session in sessions], counts)
        try:
            hidden = self.network.hidden(ids, step)
        except BaseException:
            self.cache.rollback(step)
            raise
        self.cache.commit(step, token_ids=ids)
        return hidden


class Session:
    """One text of a batch, or by itself.

    Parameters
    ----------
    batch : Batch
        The texts it is computed with.
    seq : int
        Its number in the cache.

    Attributes
    ----------
    num_reused : int
        Tokens of its prompt that the cache had when it was started.
    """

    def __init__(self, batch: Batch, seq: int) -> None:
        self.batch = batch
        self.seq = seq
        self.num_reused = self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache."""
        return self.batch.cache.length(self.seq)

    def rewind(self, num_tokens: int = 0) -> None:
        """Forget all but the first `num_tokens` tokens.

        Parameters
        ----------
        num_tokens : int
            Tokens to keep.
        """
        self.batch.cache.truncate(self.seq, num_tokens)

    def forward(self, tokens: Tokens) -> Array:
        """Compute the logits of the token after each of `tokens`, and keep their K and V.

        Parameters
        ----------
        tokens : sequence of int
            The next tokens of the text.

        Returns
        -------
        ndarray
            ``(len(tokens), vocab_size)``.

        Raises
        ------
        IndexError
            If a token is not in the vocabulary.
        numkv.CacheFull
            If the cache has no room for all of them.
        """
        return self.batch.network.logits(self._hidden(np.asarray(tokens)))

    def prefill(
        self,
        tokens: Tokens,
        progress: Progress | None = None,
        chunk: int = PREFILL_CHUNK,
    ) -> Array:
        """Compute a prompt piece by piece, and the logits of the token after it alone.

        Parameters
        ----------
        tokens : sequence of int
            The next tokens of the text, at least one.
        progress : callable, optional
            Called with the number of tokens done and their total.
        chunk : int
            Tokens computed at once.

        Returns
        -------
        ndarray
            ``(vocab_size,)``.
        """
        ids = np.asarray(tokens)
        if len(ids) == 0:
            raise ValueError("tokens: expected at least one, got none")
        for begin in range(0, len(ids), chunk):
            hidden = self._hidden(ids[begin : begin + chunk])
            if progress is not None:
                progress(min(begin + chunk, len(ids)), len(ids))
        return self.batch.network.logits(hidden[-1])

    def step(self, token: int) -> Array:
        """Compute the logits of the token after `token`.

        Parameters
        ----------
        token : int
            The next token of the text.

        Returns
        -------
        ndarray
            ``(vocab_size,)``.
        """
        logits: Array = self.forward([token])[0]
        return logits

    def _hidden(self, tokens: NDArray[np.integer[Any]]) -> Array:
        return self.batch.hidden([self], tokens, [len(tokens)])
