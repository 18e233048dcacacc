"""Models of transformers for `numkv.demo.fit`: a text runs through a `NumkvCache` of each profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

import numkv.transformers
from numkv.caches import LayerSpec, Profile
from numkv.errors import NotSupported
from numkv.transformers.cache import NumkvCache
from numkv.transformers.layers import LatentLayer, NumkvLayer

#: Tokens whose probabilities are compared at once.
_ROWS = 64


class ModelJudge:
    """A model of transformers and its texts, as `numkv.demo.fit.Judge`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder on the CPU; it is switched to numkv's attention.
    texts, held_out : sequence of int tensor (num_tokens,)
        Token ids by which kinds are chosen, and those on which the choice is measured.
    name : str
        Name of the model.

    Raises
    ------
    NotSupported
        If `NumkvCache` does not support the model, or it has latent attention, which has one kind for all layers.
    """

    def __init__(
        self, model: Any, texts: Sequence[Any], held_out: Sequence[Any], name: str = ""
    ) -> None:
        self.name = name
        empty = DynamicCache(config=model.config)
        with torch.no_grad():
            rows = model(texts[0][None], past_key_values=empty).past_key_values
        # Layers with only a state have no keys.
        of_layers = [layer for layer in rows.layers if getattr(layer, "keys", None) is not None]
        self._rows = [(_rows(layer.keys), _rows(layer.values)) for layer in of_layers]
        self._model, self._texts = numkv.transformers.use(model), (texts, held_out)
        self._expected: dict[bool, list[Any]] = {}
        cache = NumkvCache(model.config)
        self._logits(texts[0][:2], cache)
        own = [layer for layer in cache.layers if isinstance(layer, NumkvLayer)]
        if any(isinstance(layer, LatentLayer) for layer in own):
            raise NotSupported(
                "numkv fit: expected a model with rows of K and of V, got one with latent attention; choose its kind "
                "by `numkv.transformers.use(model, kind=…)`"
            )
        #: Whether all layers see more tokens than keys by channel store in full.
        self.takes_channels = all(layer.takes_channels for layer in own)
        self.layers = [
            LayerSpec(
                int(pool.k.shape[1]), pool.head_dim, head_dim_v=pool.head_dim_v, kind=pool.k_kind, v_kind=pool.v_kind
            )
            for pool in (layer.pool for layer in own) if pool is not None
        ]  # fmt: skip

    def divergences(self, candidates: Sequence[Sequence[LayerSpec]], held_out: bool) -> list[float]:
        """See `numkv.demo.fit.Judge.divergences`."""
        texts, found = self._texts[held_out], []
        expected = self._expected.get(held_out)
        if expected is None:
            own = (self._logits(ids, NumkvCache(self._model.config)) for ids in texts)
            expected = self._expected[held_out] = [x.float().log_softmax(-1) for x in own]
        for layers in candidates:
            total = 0.0
            for ids, known in zip(texts, expected, strict=True):
                cache = NumkvCache(self._model.config, profile=Profile(layers))
                total += _divergence(known, self._logits(ids, cache))
            found.append(total / sum(len(ids) for ids in texts))
        return found

    def rows(self) -> list[tuple[Any, Any]]:
        """See `numkv.demo.fit.Judge.rows`."""
        return self._rows

    def _logits(self, ids: Any, cache: NumkvCache) -> Any:
        with torch.no_grad():
            return self._model(ids[None], past_key_values=cache).logits[0]


def _rows(x: Any) -> Any:
    return x[0].transpose(0, 1).float().numpy()


def _divergence(expected: Any, logits: Any) -> float:
    """Return the KL divergence summed over tokens, in nats, in float64."""
    total = 0.0
    for begin in range(0, len(expected), _ROWS):
        known = expected[begin : begin + _ROWS].double()
        found = torch.log_softmax(logits[begin : begin + _ROWS].double(), -1)
        total += float((known.exp() * (known - found)).sum())
    return total
