"""A model, and batches of texts that it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.demo import BUNDLED_MODEL
from numkv.demo.cache import Cache, CacheChoice, CacheFactory
from numkv.demo.checkpoint import ModelConfig, Progress, Weights, load_weights, no_progress
from numkv.demo.network import Network
from numkv.demo.tokenizer import Tokenizer, load_tokenizer

Array = NDArray[np.float32]
Tokens = Iterable[int] | NDArray[np.integer[Any]]

#: Tokens of a prompt that are computed at once: enough for fast matrices, few enough for small activations and scores,
#: and for visible progress.
PREFILL_CHUNK = 256


class Batch:
    """Texts that are computed together, with their tokens in one cache.

    Parameters
    ----------
    network : Network
        The layers, on the cache's target.
    cache : Cache
        The cache of K and V.
    """

    def __init__(self, network: Network, cache: Cache) -> None:
        self.network = network
        self.cache = cache

    def start(self, prompt: Sequence[int] = ()) -> Session:
        """Start a text.

        Parameters
        ----------
        prompt : sequence of int
            Its first tokens. A prefix that the cache has from an earlier text is reused; the rest must be computed.

        Returns
        -------
        Session
        """
        return Session(self, self.cache.add(prompt))

    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Progress = no_progress
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
        return self.network.logits(
            self.hidden([session.seq for session in sessions], tokens, [1] * len(sessions))
        )

    def hidden(self, seqs: Sequence[int], tokens: Tokens, counts: Sequence[int]) -> Array:
        """Run new tokens of several texts through all layers, and store their K and V.

        Parameters
        ----------
        seqs : sequence of int
            Numbers of texts in the cache.
        tokens : sequence of int
            The next tokens of all texts, one text after another.
        counts : sequence of int
            Number of new tokens of each text.

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
        step = self.cache.reserve(seqs, counts)
        try:
            hidden = self.network.hidden(ids, step)
        except BaseException:
            self.cache.rollback(step)
            raise
        self.cache.commit(step, token_ids=ids)
        return hidden


class Session:
    """One text of a batch.

    Parameters
    ----------
    batch : Batch
        The batch of the text.
    seq : int
        Its number in the cache.

    Attributes
    ----------
    num_reused : int
        Tokens of its prompt that were reused from the cache.
    """

    def __init__(self, batch: Batch, seq: int) -> None:
        self.batch = batch
        self.seq = seq
        self.num_reused = self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Return the tokens in the cache."""
        return self.batch.cache.length(self.seq)

    def rewind(self, num_tokens: int = 0) -> None:
        """Drop all but the first `num_tokens` tokens.

        Parameters
        ----------
        num_tokens : int
            Tokens to keep.
        """
        self.batch.cache.truncate(self.seq, num_tokens)

    def forward(self, tokens: Tokens) -> Array:
        """Compute the logits of the token after each of `tokens`, and store their K and V.

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
        self, tokens: Tokens, progress: Progress = no_progress, chunk: int = PREFILL_CHUNK
    ) -> Array:
        """Compute a prompt in chunks, and the logits of the token after it.

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
        return self.forward([token])[0]

    def _hidden(self, tokens: NDArray[np.integer[Any]]) -> Array:
        return self.batch.hidden([self.seq], tokens, [len(tokens)])


class Model:
    """A decoder: configuration, weights and tokenizer.

    Parameters
    ----------
    config : ModelConfig
        Sizes and constants.
    weights : Weights
        All weights.
    tokenizer : Tokenizer
        Converts between text and tokens.
    """

    def __init__(self, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> None:
        self.config = config
        self.weights = weights
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path = BUNDLED_MODEL, progress: Progress = no_progress) -> Model:
        """Load a checkpoint.

        Parameters
        ----------
        directory : pathlib.Path
            Folder with ``config.json`` and the weights; the bundled model by default.
        progress : callable, optional
            Called with the number of tensors read and their total.

        Returns
        -------
        Model

        Raises
        ------
        FileNotFoundError
            If a file is missing.
        CheckpointError
            If the files do not fit together.
        NotSupported
            If the architecture is not supported.
        """
        config = ModelConfig.read(directory)
        tokenizer = load_tokenizer(directory, config)
        return cls(config, load_weights(directory, config, progress), tokenizer)

    def batch(
        self, capacities: Sequence[int], cache: CacheFactory | None = None, target: str = "cpu"
    ) -> Batch:
        """Make a batch for texts.

        Parameters
        ----------
        capacities : sequence of int
            Most tokens of each text.
        cache : callable, optional
            Makes the cache, such as a `CacheChoice`, which needs a `block_size` for several texts;
            an fp32 cache on `target` by default.
        target : str
            Target of the cache.

        Returns
        -------
        Batch
        """
        make = cache or CacheChoice("fp32", target=target)
        network = Network(self.config, self.weights, max(capacities), target)
        return Batch(network, make(self.config, capacities))

    def start(
        self, capacity: int | None = None, cache: CacheFactory | None = None, target: str = "cpu"
    ) -> Session:
        """Start a single text.

        Parameters
        ----------
        capacity : int, optional
            Most tokens of the text; the model's context by default.
        cache : callable, optional
            Makes the cache; an fp32 cache on `target` by default.
        target : str
            Target of the cache.

        Returns
        -------
        Session
        """
        size = self.config.max_context if capacity is None else capacity
        return self.batch([size], cache, target).start()

    def warm_up(self, cache: CacheFactory | None = None, target: str = "cpu") -> None:
        """Load or compile the kernels that texts in such a cache need.

        Parameters
        ----------
        cache : callable, optional
            Makes the cache; an fp32 cache on `target` by default.
        target : str
            Target of the cache.
        """
        session = self.start(3, cache, target)
        session.forward([0, 0])
        session.step(0)
