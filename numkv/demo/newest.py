"""The demo's model on a cache that has lost all but the newest tokens.

It shows what dropping rows costs, beside what rounding them does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numkv
from numkv.caches.layer import Layer
from numkv.demo.cache import Cache, LayerCache
from numkv.demo.config import ModelConfig

_LABEL = re.compile(r"last([1-9][0-9]*)")


class _NewestCache(LayerCache):
    """A `LayerCache` whose queries see so many newest tokens."""

    def __init__(self, layers: Sequence[Layer], window: int) -> None:
        super().__init__(layers)
        self._window = window

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> Any:
        """Start a step."""
        return _NewestStep(self.layers, self._window)


class _NewestStep:
    """A `Step` of a `_NewestCache`."""

    def __init__(self, layers: Sequence[Layer], window: int) -> None:
        self._layers, self._window = layers, window
        self.start = layers[0].seq_len

    def write(self, layer: int, qkv: Any, **options: Any) -> Any:
        """Norm and rotate q and k, store k and v, return q."""
        return self._layers[layer].write(qkv, **options)

    def attention(self, layer: int, q: Any) -> Any:
        """Attend with queries of the new tokens, each to itself and those before it in the window."""
        return self._layers[layer].decode_attention(q, window_left=self._window - 1)


@dataclass(frozen=True)
class NewestChoice:
    """The newest tokens in fp16, and no others; calling it makes the cache of a model.

    Attention has a window; the tokens before it are in memory here, but a cache that drops them would do the same, and
    only those in the window are counted.

    Parameters
    ----------
    window : int
        How many tokens a query sees, its own included.
    target : str
        ``"cpu"`` or ``"cuda"``.
    """

    window: int
    target: str = "cpu"

    @classmethod
    def parse(cls, text: str, target: str = "cpu") -> NewestChoice:
        """Read ``"last512"``.

        Parameters
        ----------
        text : str
            ``last`` and a number of tokens.
        target : str
            Target of the cache.

        Returns
        -------
        NewestChoice

        Raises
        ------
        NotSupported
            If it is something else.
        """
        found = _LABEL.fullmatch(text)
        if found is None:
            raise numkv.NotSupported(
                f"expected last with a number of tokens, 1 or more, got {text!r}"
            )
        return cls(int(found[1]), target)

    @property
    def label(self) -> str:
        """What `parse` reads."""
        return f"last{self.window}"

    def bytes_at(self, config: ModelConfig, num_tokens: int) -> float:
        """Bytes of the window in all layers, by token of a text of so many; see `CacheChoice.bytes_at`.

        Parameters
        ----------
        config : ModelConfig
            Sizes of the model.
        num_tokens : int
            Tokens of the text.

        Returns
        -------
        float
        """
        one = numkv.kind("fp16").bytes_per_token(config.num_kv_heads, config.head_dim)
        return config.num_layers * one * min(1.0, self.window / num_tokens)

    def __call__(self, config: ModelConfig, capacities: Sequence[int]) -> Cache:
        """Make a cache for one text of so many tokens."""
        if len(capacities) != 1:
            raise numkv.NotSupported(f"{self.label}: expected one text, got {len(capacities)}")
        layers = [
            numkv.ContiguousLayer(
                capacities[0], config.num_kv_heads, config.head_dim, kind="fp16", target=self.target
            )
            for _ in range(config.num_layers)
        ]
        return _NewestCache(layers, self.window)
