"""The forward pass of a Qwen3 or Llama decoder: matrices in NumPy, the KV cache in numkv.

The cache receives the fused q, k and v projections of a layer. It normalises them, applies RoPE, stores K and V, and
attends. All arithmetic is float32.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import QKMode, targets
from numkv.demo.cache import Step
from numkv.demo.checkpoint import LayerWeights, ModelConfig, Weights

Array = NDArray[np.float32]


def rotary_tables(config: ModelConfig, num_positions: int) -> tuple[Array, Array]:
    """Cosines and sines of the half-split rotation.

    Frequencies and angles are rounded to float32 as in the models' own implementation: at late
    positions that rounding shows, and the weights were trained with it.

    Parameters
    ----------
    config : ModelConfig
        Head dim, theta and scaling.
    num_positions : int
        Rows of the tables.

    Returns
    -------
    cos, sin : ndarray
        ``(num_positions, head_dim / 2)``.
    """
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequency = 1 / (config.rope_theta**exponents).astype(np.float32)
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        turns = scaling.original_max_position_embeddings * frequency / np.float32(2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # Frequencies with many turns in the original context stay, those with few are divided.
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequency.astype(np.float32))
    return np.cos(angles), np.sin(angles)


class Network:
    """All layers of a decoder, over caches on one target.

    Parameters
    ----------
    config : ModelConfig
        Sizes and constants.
    weights : Weights
        All weights.
    num_positions : int
        The most tokens that a text may have.
    target : str
        Target of the caches; arrays are copied there and back.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, num_positions: int, target: str
    ) -> None:
        self._config = config
        self._weights = weights
        place = targets.get(target)
        self._to_target = place.asarray
        self._to_host = place.to_host
        cos, sin = rotary_tables(config, num_positions)
        common = {
            "num_q_heads": config.num_q_heads,
            "qk_mode": QKMode.NORM_HALF_SPLIT if config.has_qk_norm else QKMode.HALF_SPLIT,
            "cos": self._to_target(cos),
            "sin": self._to_target(sin),
        }
        self._write_options = [{**common, **self._norms_of(layer)} for layer in weights.layers]

    def _norms_of(self, layer: LayerWeights) -> dict[str, Any]:
        if layer.q_norm is None or layer.k_norm is None:
            return {}
        return {
            "q_norm_weight": self._to_target(layer.q_norm),
            "k_norm_weight": self._to_target(layer.k_norm),
            "eps": self._config.rms_norm_eps,
        }

    def hidden(self, tokens: NDArray[np.integer[Any]], step: Step) -> Array:
        """Run tokens through all layers.

        Parameters
        ----------
        tokens : int array (num_tokens,)
            The new tokens of the step's texts, one text after another.
        step : Step
            The step of the cache, which stores their K and V and attends.

        Returns
        -------
        ndarray
            ``(num_tokens, hidden_size)``: the last layer's output, normalised.

        Raises
        ------
        IndexError
            If a token is not in the vocabulary; nothing is written.
        """
        config, weights = self._config, self._weights
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
            raise IndexError(
                f"tokens: expected [0, {config.vocab_size}), got {tokens.min()}..{tokens.max()}"
            )
        eps = config.rms_norm_eps
        x: Array = weights.embedding[tokens]
        for index, layer in enumerate(weights.layers):
            x += self._attention(index, _rms_norm(x, layer.input_norm, eps), step)
            x += _feed_forward(layer, _rms_norm(x, layer.post_norm, eps))
        return _rms_norm(x, weights.norm, eps)

    def logits(self, hidden: Array) -> Array:
        """Score every token of the vocabulary as the next one.

        Parameters
        ----------
        hidden : ndarray
            ``(..., hidden_size)``, from `hidden`.

        Returns
        -------
        ndarray
            ``(..., vocab_size)``.
        """
        return hidden @ self._weights.output.T

    def _attention(self, index: int, x: Array, step: Step) -> Array:
        weights = self._weights.layers[index]
        qkv = self._to_target(x @ weights.qkv.T)
        q = step.write(index, qkv, **self._write_options[index])
        mixed = self._to_host(step.attention(index, q))
        return mixed.reshape(len(x), -1) @ weights.o.T


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x * scale * weight


def _feed_forward(layer: LayerWeights, x: Array) -> Array:
    both = x @ layer.gate_up.T
    half = both.shape[-1] // 2
    gate, up = both[:, :half], both[:, half:]
    with np.errstate(over="ignore"):  # exp of a very negative gate is inf, and the gate then 0
        inner = gate / (1 + np.exp(-gate)) * up
    return inner @ layer.down.T


#: Models below this number of parameters have matrices too small to share among threads.
_SMALL = 100_000_000
#: OpenBLAS as NumPy's wheels build it, and as Linux distributions do.
_SPELLINGS = ("scipy_openblas_{}64_", "openblas_{}64_", "openblas_{}")


@contextlib.contextmanager
def blas_threads_for(weights: Weights) -> Iterator[None]:
    """Compute the matrix products of a small model on one thread.

    OpenBLAS's threads spin while they wait for work, when numkv's kernels need the cores. For small matrices that costs
    more than the threads save, up to a factor of 30 on a busy machine. NumPy has no setting for it, and the environment
    variable is read when NumPy is imported, so this calls OpenBLAS itself. With another BLAS, or if the user has set
    the variable, nothing changes.

    Parameters
    ----------
    weights : Weights
        The model's weights.
    """
    wanted = weights.num_parameters < _SMALL and "OPENBLAS_NUM_THREADS" not in os.environ
    functions = _openblas() if wanted else None
    if functions is None:
        yield
        return
    get_threads, set_threads = functions
    before = get_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


def _openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """Return OpenBLAS's functions that get and set the number of threads; None if they are missing."""
    try:
        path = importlib.import_module("numpy._core._multiarray_umath").__file__
        # The lookup includes the libraries that this one is linked with.
        library = ctypes.CDLL(path)
    except (ImportError, OSError):  # a NumPy built in some other way
        return None
    for spelling in _SPELLINGS:
        with contextlib.suppress(AttributeError):
            return (
                getattr(library, spelling.format("get_num_threads")),
                getattr(library, spelling.format("set_num_threads")),
            )
    return None
