"""A model with outlier channels in its keys that computes what it did before: a judge of storage kinds.

Keys of many trained models have a few channels 10 to 100 times as large as the others, by biases (Qwen2 and 2.5) or by
weights of norms. The bundled model has none, so it cannot tell kinds that break on them. Here one RoPE pair of all keys
is multiplied by a power of two, and that of all queries divided by it: scores are the same, keys are not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from numkv.demo.checkpoint import LayerWeights
from numkv.demo.config import ModelConfig
from numkv.demo.evaluate import Document
from numkv.demo.model import Model

#: By what the pair is multiplied.
FACTORS = (1, 16, 64)
#: Tokens of a window, and bytes of the text.
CONTEXT, NUM_BYTES = 640, 2600


def with_outliers(model: Model, factor: int) -> Model:
    """The model whose keys have a pair of channels that is so many times larger.

    Parameters
    ----------
    model : Model
        A model.
    factor : int
        A power of two, so that no weight is rounded.

    Returns
    -------
    Model
        Its predictions over an fp32 cache are the same.
    """
    scale = np.ones(model.config.head_dim, np.float32)
    scale[[model.config.head_dim // 2 - 3, -3]] = factor
    layers = tuple(_scaled(model.config, layer, scale) for layer in model.weights.layers)
    return Model(model.config, replace(model.weights, layers=layers), model.tokenizer)


def _scaled(config: ModelConfig, layer: LayerWeights, scale: np.ndarray) -> LayerWeights:
    if layer.q_norm is not None and layer.k_norm is not None:
        return replace(layer, q_norm=layer.q_norm / scale, k_norm=layer.k_norm * scale)
    heads = [np.tile(1 / scale, config.num_q_heads), np.tile(scale, config.num_kv_heads)]
    of_values = np.ones(config.num_kv_heads * config.head_dim, np.float32)
    return replace(layer, qkv=layer.qkv * np.concatenate([*heads, of_values])[:, None])


def beginning(document: Document) -> Document:
    """The first bytes of a text, on which that is measured: kinds differ by far more than texts."""
    text = document.text.encode()[:NUM_BYTES].decode(errors="ignore")
    return Document(document.name, text)
