"""Which KV cache the demo's model runs on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import numkv
from numkv.caches.layer import Layer
from numkv.demo.config import ModelConfig


class Step(Protocol):
    """New tokens on their way through the layers; `numkv.Step` is one."""

    def write(
        self,
        layer: int,
        qkv: Any,
        *,
        num_q_heads: int,
        cos: Any,
        sin: Any,
        qk_mode: int,
        q_norm_weight: Any = None,
        k_norm_weight: Any = None,
        eps: float = 1e-6,
    ) -> Any:
        """Norm and rotate q and k, store k and v, return q."""

    def attention(self, layer: int, q: Any) -> Any:
        """Attend with queries of the new tokens."""


class Cache(Protocol):
    """What the forward pass asks of the cache of all layers; `numkv.PagedKVCache` is one."""

    def add(self, tokens: Any = None) -> int:
        """Add a text, with what is cached already of a prompt; return its number."""

    def length(self, seq: int) -> int:
        """Tokens of a text."""

    def truncate(self, seq: int, length: int) -> None:
        """Forget all but the first tokens of a text."""

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> Any:
        """Return a `Step` of new tokens of some texts."""

    def commit(self, step: Any, *, token_ids: Any = None) -> None:
        """Keep the tokens of a step."""

    def rollback(self, step: Any) -> None:
        """Forget the tokens of a step."""


# What may follow a kind.
_OPTION_NAMES = ("rotate", "window", "sinks")
_OPTION = re.compile("(rotate)|(window|sinks)([0-9]+)")

#: Makes a cache from the model's configuration and the tokens that each text may have.
CacheFactory = Callable[[ModelConfig, Sequence[int]], Cache]


class LayerCache:
    """A `Cache` of one text: an object such as `numkv.ContiguousLayer` for each layer.

    Parameters
    ----------
    layers : sequence of Layer
        From the first layer to the last.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)

    def add(self, tokens: Any = None) -> int:
        """Return the number of the one text; nothing is known of its prompt."""
        return 0

    def length(self, seq: int) -> int:
        """Tokens of the text."""
        return self.layers[0].seq_len

    def truncate(self, seq: int, length: int) -> None:
        """Forget all but the first tokens."""
        for layer in self.layers:
            layer.truncate(length)

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> _LayerStep:
        """Start a step; the layers find out for themselves whether there is room."""
        return _LayerStep(self.layers)

    def commit(self, step: _LayerStep, *, token_ids: Any = None) -> None:
        """Keep the tokens of a step, which the layers have done."""

    def rollback(self, step: _LayerStep) -> None:
        """Forget the tokens of a step, also where only some layers have them."""
        self.truncate(0, step.start)


class _LayerStep:
    """A `Step` of a `LayerCache`."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self.start = layers[0].seq_len

    def write(self, layer: int, qkv: Any, **options: Any) -> Any:
        """Norm and rotate q and k, store k and v, return q."""
        return self._layers[layer].write(qkv, **options)

    def attention(self, layer: int, q: Any) -> Any:
        """Attend with queries of the new tokens."""
        return self._layers[layer].decode_attention(q)


@dataclass(frozen=True)
class Sharing:
    """How the texts in a paged cache share its blocks.

    Attributes
    ----------
    num_tokens : int
        Tokens of all texts, shared ones counted for each.
    num_stored : int
        Tokens in the cache, each counted once.
    num_blocks : int
        Blocks in use.
    num_shared : int
        Blocks among them that several texts use.
    """

    num_tokens: int
    num_stored: int
    num_blocks: int
    num_shared: int

    @classmethod
    def of(cls, cache: numkv.PagedKVCache) -> Sharing:
        """Look at a cache.

        Parameters
        ----------
        cache : numkv.PagedKVCache
            A cache whose layers all attend to everything, without forks: shared blocks are full.

        Returns
        -------
        Sharing
        """
        stats = cache.stats()
        users = cache.blocks.ref_count(np.arange(cache.num_blocks))
        num_stored = stats.pool.used * cache.block_size - stats.unused_slots
        return cls(stats.num_tokens, num_stored, stats.pool.used, int((users > 1).sum()))


@dataclass(frozen=True)
class CacheChoice:
    """A storage kind, contiguous or in blocks; calling it makes the cache of a model.

    Parameters
    ----------
    kind : str
        Storage kind of K and V.
    k_kind, v_kind : str, optional
        Kinds of K and of V where they differ.
    target : str
        ``"cpu"`` or ``"cuda"``.
    block_size : int, optional
        Tokens in a block of a paged cache; the cache is contiguous, and of one text, if None.
    rotate : bool
        Whether rows are rotated before they are quantised; contiguous caches only, as are the next two.
    window, sinks : int
        The newest and the first tokens, which are kept in full precision.
    """

    kind: str = "fp32"
    k_kind: str | None = None
    v_kind: str | None = None
    target: str = "cpu"
    block_size: int | None = None
    rotate: bool = False
    window: int = 0
    sinks: int = 0

    @classmethod
    def parse(cls, text: str, target: str = "cpu") -> CacheChoice:
        """Read ``"fp16"``, ``"int8/fp16"`` for K and V apart, or ``"int4+rotate+window128+sinks4"``.

        Parameters
        ----------
        text : str
            One kind, or that of K and that of V around a slash; then, each behind a plus sign, ``rotate``, and
            ``window`` and ``sinks`` with the tokens to keep in full precision.
        target : str
            Target of the cache.

        Returns
        -------
        CacheChoice

        Raises
        ------
        numkv.UnsupportedDType
            If there is no such kind.
        NotSupported
            If something else comes after a plus sign.
        """
        kinds, *words = text.split("+")
        k, slash, v = kinds.partition("/")
        k_kind = numkv.kind(k).name
        v_kind = numkv.kind(v).name if slash else k_kind
        options: dict[str, Any] = {}
        for word in words:
            found = _OPTION.fullmatch(word)
            if found is None:
                raise numkv.NotSupported(
                    f"expected rotate, or window or sinks with a number of tokens, after a '+', got {word!r} in "
                    f"{text!r}"
                )
            flag, name, size = found.groups()
            options[flag or name] = True if flag else int(size)
        if k_kind == v_kind:
            return cls(k_kind, target=target, **options)
        return cls(k_kind, k_kind, v_kind, target, **options)

    @property
    def options(self) -> dict[str, Any]:
        """What else than kinds a contiguous layer is told: only what has been asked for."""
        found: dict[str, Any] = {"rotate": True} if self.rotate else {}
        if self.window or self.sinks:
            found["full_precision"] = numkv.FullPrecision(self.window, self.sinks)
        return found

    @property
    def label(self) -> str:
        """What `parse` reads."""
        kinds = self.kind if self.v_kind is None else f"{self.k_kind or self.kind}/{self.v_kind}"
        words = [
            f"{name}{'' if value is True else value}"
            for name in _OPTION_NAMES
            if (value := getattr(self, name))
        ]
        return "+".join([kinds, *words])

    def bytes_per_token(
        self, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None
    ) -> int:
        """Bytes that a token costs in one layer, scales included, where it is not kept in full precision.

        Parameters
        ----------
        num_kv_heads, head_dim : int
            Sizes of the layer.
        head_dim_v : int, optional
            Elements of a V row, where they differ from those of a K row.

        Returns
        -------
        int
        """
        k, v = (numkv.kind(kind or self.kind) for kind in (self.k_kind, self.v_kind))
        return num_kv_heads * (k.row_bytes(head_dim) + v.row_bytes(head_dim_v or head_dim))

    def bytes_at(self, config: ModelConfig, num_tokens: int) -> float:
        """Bytes of a token in all layers of a full cache, with its share of what is kept in full precision.

        Parameters
        ----------
        config : ModelConfig
            Sizes of the model.
        num_tokens : int
            Tokens of the one text that the cache has room for.

        Returns
        -------
        float
        """
        return self._layer(config, num_tokens).nbytes * config.num_layers / num_tokens

    def __call__(self, config: ModelConfig, capacities: Sequence[int]) -> Cache:
        """Make a cache for texts of so many tokens each."""
        if self.block_size is not None:
            if self.options:
                raise numkv.NotSupported(
                    f"{self.label}: expected a storage kind alone for a cache in blocks, got {self.options}; leave "
                    "them out, or the blocks"
                )
            return numkv.PagedKVCache(
                layers=self.layers(config),
                num_blocks=sum(-(-capacity // self.block_size) for capacity in capacities),
                block_size=self.block_size,
                target=self.target,
            )
        if len(capacities) != 1:
            raise ValueError(f"block_size: expected one for {len(capacities)} texts, got None")
        return LayerCache([self._layer(config, capacities[0]) for _ in range(config.num_layers)])

    def layers(self, config: ModelConfig) -> list[numkv.LayerSpec]:
        """What the layers of a model keep in a cache in blocks."""
        k_kind, sizes = self.k_kind or self.kind, (config.num_kv_heads, config.head_dim)
        return [
            numkv.LayerSpec(*sizes, kind=k_kind, v_kind=self.v_kind or self.kind)
        ] * config.num_layers

    @property
    def _kinds(self) -> dict[str, Any]:
        return {"kind": self.kind, "k_kind": self.k_kind, "v_kind": self.v_kind}

    def _layer(self, config: ModelConfig, capacity: int) -> Layer:
        return numkv.ContiguousLayer(
            capacity,
            config.num_kv_heads,
            config.head_dim,
            **{**self._kinds, "target": self.target, **self.options},
        )
