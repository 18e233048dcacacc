"""The forward pass of a Qwen3 or Llama decoder: matrices in NumPy, the KV cache in numkv.

`Model` holds what does not change, `Session` one text and its cache. Every layer of a session is a
cache object: it takes the fused q, k and v projections, norms and rotates them, stores K and V, and
attends. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import QKMode, targets
from numkv.demo import BUNDLED_MODEL
from numkv.demo.cache import CacheChoice, CacheFactory, CacheLayer
from numkv.demo.checkpoint import LayerWeights, Weights, load_weights
from numkv.demo.config import ModelConfig
from numkv.demo.rotary import rotary_tables
from numkv.demo.tokenizer import Tokenizer, load_tokenizer

__all__ = ["PREFILL_CHUNK", "Model", "Session"]

Array = NDArray[np.float32]
Progress = Callable[[int, int], None]

#: Tokens of a prompt that are computed at once: enough for the matrices to be fast, few enough for
#: activations and scores to stay small and for progress to be seen.
PREFILL_CHUNK = 256


class Model:
    """A decoder: configuration, weights and tokenizer.

    Parameters
    ----------
    config : ModelConfig
        Sizes and constants.
    weights : Weights
        Everything that was learned.
    tokenizer : Tokenizer
        Text to tokens and back.
    """

    def __init__(self, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> None:
        self.config = config
        self.weights = weights
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path = BUNDLED_MODEL, progress: Progress | None = None) -> Model:
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
            If the architecture is not computed here.
        """
        config = ModelConfig.read(directory)
        tokenizer = load_tokenizer(directory, config)
        return cls(config, load_weights(directory, config, progress), tokenizer)

    def start(
        self, capacity: int | None = None, cache: CacheFactory | None = None, target: str = "cpu"
    ) -> Session:
        """Start a text.

        Parameters
        ----------
        capacity : int, optional
            Tokens the cache has room for; the model's context by default.
        cache : callable, optional
            Makes the cache of one layer; an fp32 cache on `target` by default.
        target : str
            Where the cache lives.

        Returns
        -------
        Session
        """
        size = self.config.max_context if capacity is None else capacity
        return Session(self, size, cache or CacheChoice("fp32", target=target), target)

    def warm_up(self, cache: CacheFactory | None = None, target: str = "cpu") -> None:
        """Load or compile the kernels that sessions with such a cache need.

        Parameters
        ----------
        cache : callable, optional
            Makes the cache of one layer; an fp32 cache on `target` by default.
        target : str
            Where the cache lives.
        """
        session = self.start(3, cache, target)
        session.forward([0, 0])
        session.step(0)


class Session:
    """One text: the tokens so far are in the caches of the layers.

    Parameters
    ----------
    model : Model
        The decoder.
    capacity : int
        Tokens the caches have room for.
    cache : callable
        Makes the cache of one layer from ``(capacity, num_kv_heads, head_dim)``.
    target : str
        Where the caches live; arrays are moved there and back.
    """

    def __init__(self, model: Model, capacity: int, cache: CacheFactory, target: str) -> None:
        config = model.config
        self.model = model
        self.capacity = capacity
        self.layers: list[CacheLayer] = [
            cache(capacity, config.num_kv_heads, config.head_dim) for _ in range(config.num_layers)
        ]
        place = targets.get(target)
        self._to_target = place.asarray
        self._to_host = place.to_host
        cos, sin = rotary_tables(config, capacity)
        self._rotation = {"cos": self._to_target(cos), "sin": self._to_target(sin)}
        self._qk_mode = QKMode.NORM_HALF_SPLIT if config.has_qk_norm else QKMode.HALF_SPLIT
        self._qk_norms = [self._norms_of(layer) for layer in model.weights.layers]

    def _norms_of(self, layer: LayerWeights) -> dict[str, Any]:
        if layer.q_norm is None or layer.k_norm is None:
            return {}
        return {
            "q_norm_weight": self._to_target(layer.q_norm),
            "k_norm_weight": self._to_target(layer.k_norm),
            "eps": self.model.config.rms_norm_eps,
        }

    @property
    def num_tokens(self) -> int:
        """Tokens in the caches."""
        return self.layers[0].seq_len

    def rewind(self, num_tokens: int = 0) -> None:
        """Forget all but the first `num_tokens` tokens.

        Parameters
        ----------
        num_tokens : int
            Tokens to keep.
        """
        for layer in self.layers:
            layer.truncate(num_tokens)

    def forward(self, tokens: Iterable[int] | NDArray[np.integer[Any]]) -> Array:
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
            If the caches have no room for all of them.
        """
        return self._hidden(tokens) @ self.model.weights.output.T

    def prefill(
        self,
        tokens: Iterable[int] | NDArray[np.integer[Any]],
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
        logits: Array = self.model.weights.output @ hidden[-1]
        return logits

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

    def _hidden(self, tokens: Iterable[int] | NDArray[np.integer[Any]]) -> Array:
        """The last layer's normed output ``(len(tokens), hidden_size)``."""
        config, weights = self.model.config, self.model.weights
        ids = np.asarray(tokens, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < config.vocab_size:
            raise IndexError(
                f"tokens: expected [0, {config.vocab_size}), got {ids.min()}..{ids.max()}"
            )
        eps = config.rms_norm_eps
        x: Array = weights.embedding[ids]
        for index, layer in enumerate(weights.layers):
            x += self._attention(index, _rms_norm(x, layer.input_norm, eps))
            x += _feed_forward(layer, _rms_norm(x, layer.post_norm, eps))
        return _rms_norm(x, weights.norm, eps)

    def _attention(self, index: int, x: Array) -> Array:
        weights, cache = self.model.weights.layers[index], self.layers[index]
        q = cache.write(
            self._to_target(x @ weights.qkv.T),
            num_q_heads=self.model.config.num_q_heads,
            qk_mode=self._qk_mode,
            **self._rotation,
            **self._qk_norms[index],
        )
        mixed = self._to_host(cache.decode_attention(q))
        projected: Array = mixed.reshape(len(x), -1) @ weights.o.T
        return projected


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    normed: Array = x * scale * weight
    return normed


def _feed_forward(layer: LayerWeights, x: Array) -> Array:
    both = x @ layer.gate_up.T
    half = both.shape[-1] // 2
    gate, up = both[:, :half], both[:, half:]
    with np.errstate(over="ignore"):  # exp of a very negative gate is inf, and the gate then 0
        inner = gate / (1 + np.exp(-gate)) * up
    down: Array = inner @ layer.down.T
    return down
