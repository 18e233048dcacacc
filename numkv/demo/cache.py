"""The KV caches of the demo's model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import numkv
from numkv import targets
from numkv.caches.layer import Layer
from numkv.demo.checkpoint import ModelConfig
from numkv.kinds import kinds_of


class Step(Protocol):
    """New tokens of a forward pass; `numkv.Step` is one."""

    def write(self, layer: int, qkv: Any, **options: Any) -> Any:
        """Normalise q and k, apply RoPE, store k and v, return q; see `numkv.Step.write`."""

    def attention(self, layer: int, q: Any) -> Any:
        """Attend with queries of the new tokens."""


class Cache(Protocol):
    """The cache of all layers, as the forward pass uses it; `numkv.PagedKVCache` is one."""

    def add(self, tokens: Any = None) -> int:
        """Add a text, reuse the cached prefix of its prompt, and return its number."""

    def length(self, seq: int) -> int:
        """Return the tokens of a text."""

    def truncate(self, seq: int, length: int) -> None:
        """Drop all but the first tokens of a text."""

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> Any:
        """Return a `Step` of new tokens of some texts."""

    def commit(self, step: Any, *, token_ids: Any = None) -> None:
        """Keep the tokens of a step."""

    def rollback(self, step: Any) -> None:
        """Drop the tokens of a step."""


# Options after a kind.
_OPTION_NAMES = ("rotate", "window", "sinks")
_OPTION = re.compile("(rotate)|(window|sinks)([0-9]+)")

#: Makes a cache from the model's configuration and the tokens that each text may have.
CacheFactory = Callable[[ModelConfig, Sequence[int]], Cache]


class LayerCache:
    """A `Cache` of one text: an object such as `numkv.ContiguousLayer` for each layer.

    Parameters
    ----------
    layers : sequence of Layer or CompressedLayer
        From the first layer to the last.
    **attending
        Options of attention.
    """

    def __init__(self, layers: Sequence[Layer | CompressedLayer], **attending: Any) -> None:
        self.layers = tuple(layers)
        self.attending = attending

    def add(self, tokens: Any = None) -> int:
        """Return the number of the only text; no prefix is reused."""
        return 0

    def length(self, seq: int) -> int:
        """Tokens of the text."""
        return self.layers[0].seq_len

    def truncate(self, seq: int, length: int) -> None:
        """Forget all but the first tokens."""
        for layer in self.layers:
            layer.truncate(length)

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> _LayerStep:
        """Start a step; the layers check the room themselves."""
        return _LayerStep(self)

    def commit(self, step: _LayerStep, *, token_ids: Any = None) -> None:
        """Do nothing: the layers have stored the tokens already."""

    def rollback(self, step: _LayerStep) -> None:
        """Drop the tokens of a step, also if only some layers have them."""
        self.truncate(0, step.start)


class _LayerStep:
    """A `Step` of a `LayerCache`."""

    def __init__(self, cache: LayerCache) -> None:
        self._cache = cache
        self.start = cache.length(0)

    def write(self, layer: int, qkv: Any, **options: Any) -> Any:
        """Normalise q and k, apply RoPE, store k and v, return q."""
        return self._cache.layers[layer].write(qkv, **options)

    def attention(self, layer: int, q: Any) -> Any:
        """Attend with queries of the new tokens."""
        return self._cache.layers[layer].decode_attention(q, **self._cache.attending)


def rotated(
    qkv: Any, start: int, head_dim: int, target: str, *, num_q_heads: int, **options: Any
) -> tuple[Any, Any, Any]:
    """Return q, k and v ``(num_tokens, heads, head_dim)`` of new tokens, normalised and with RoPE, in float32.

    A layer with these tokens alone computes them, for caches without a fused write.
    """
    num_kv_heads = (qkv.shape[1] // head_dim - num_q_heads) // 2
    layer = numkv.ContiguousLayer(len(qkv), num_kv_heads, head_dim, kind="fp32", target=target)
    q = layer.write(qkv, num_q_heads=num_q_heads, pos_offset=start, **options)
    by_token = targets.get(target).token_major
    return q, *(by_token(x.reshape(x.shape[1:])) for x in (layer.k, layer.v))


@dataclass(frozen=True)
class Sharing:
    """The sharing of blocks by the texts in a paged cache.

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
        """Count the blocks of a cache.

        Parameters
        ----------
        cache : numkv.PagedKVCache
            A cache without windows and forks, so that shared blocks are full.

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
        Storage kind of K and V, or of K.
    v_kind : str, optional
        Storage kind of V, if it differs.
    target : str
        ``"cpu"`` or ``"cuda"``.
    block_size : int, optional
        Tokens in a block of a paged cache; the cache is contiguous, and of one text, if None.
    rotate : bool
        Whether rows are rotated before they are quantised; contiguous caches only, as are the next two.
    window, sinks : int
        Number of newest and of first tokens in full precision.
    """

    kind: str = "fp32"
    v_kind: str | None = None
    target: str = "cpu"
    block_size: int | None = None
    rotate: bool = False
    window: int = 0
    sinks: int = 0

    @classmethod
    def parse(cls, text: str) -> CacheChoice:
        """Read ``"fp16"``, ``"int8/fp16"`` for K and V apart, or ``"int4+rotate+window128+sinks4"``.

        Parameters
        ----------
        text : str
            One kind, or those of K and V separated by a slash. Options follow, each after a plus sign: ``rotate``, and
            ``window`` and ``sinks`` with the number of full-precision tokens.

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
        of_k, of_v = kinds_of(k, None, v if slash else None, by_channel=True)
        kind, v_kind = of_k.name, of_v.name
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
        return cls(kind, None if v_kind == kind else v_kind, **options)

    @property
    def kinds(self) -> tuple[str, str]:
        """Return the kinds of K and of V."""
        return self.kind, self.v_kind or self.kind

    @property
    def options(self) -> dict[str, Any]:
        """Return the set options of a contiguous layer, in addition to kinds."""
        found: dict[str, Any] = {"rotate": True} if self.rotate else {}
        if self.window or self.sinks:
            found["full_precision"] = numkv.FullPrecision(self.window, self.sinks)
        return found

    @property
    def label(self) -> str:
        """What `parse` reads."""
        kinds = "/".join(dict.fromkeys(self.kinds))
        words = [
            f"{name}{'' if value is True else value}"
            for name in _OPTION_NAMES
            if (value := getattr(self, name))
        ]
        return "+".join([kinds, *words])

    def bytes_per_token(
        self, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None
    ) -> int:
        """Return the bytes of a token in one layer, scales included, without full precision.

        Parameters
        ----------
        num_kv_heads, head_dim : int
            Sizes of the layer.
        head_dim_v : int, optional
            Elements of a V row, if they differ from those of a K row.

        Returns
        -------
        int
        """
        k, v = map(numkv.kind, self.kinds)
        return num_kv_heads * (k.row_bytes(head_dim) + v.row_bytes(head_dim_v or head_dim))

    def bytes_at(self, config: ModelConfig, num_tokens: int) -> float:
        """Return the bytes of a token in all layers of a full cache, with its share of full-precision tokens.

        Parameters
        ----------
        config : ModelConfig
            Sizes of the model.
        num_tokens : int
            Tokens of the only text.

        Returns
        -------
        float
        """
        return self._layer(config, num_tokens).nbytes * config.num_layers / num_tokens

    def __call__(self, config: ModelConfig, capacities: Sequence[int]) -> Cache:
        """Make a cache for texts with these capacities."""
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
        """Return the layer descriptions of a paged cache."""
        kind, v_kind = self.kinds
        sizes = (config.num_kv_heads, config.head_dim)
        return [numkv.LayerSpec(*sizes, kind=kind, v_kind=v_kind)] * config.num_layers

    def _layer(self, config: ModelConfig, capacity: int) -> Layer:
        sizes = capacity, config.num_kv_heads, config.head_dim
        return numkv.ContiguousLayer(
            *sizes, kind=self.kind, v_kind=self.v_kind, target=self.target, **self.options
        )


class CompressedLayer:
    """A layer of a `LayerCache` whose heads are in a compressor.

    Parameters
    ----------
    compressor : numkv.MultiHeadCompressor
        The heads.
    capacity : int
        The most tokens that the text may have.
    """

    def __init__(self, compressor: numkv.MultiHeadCompressor, capacity: int) -> None:
        self.compressor = compressor
        self.capacity = capacity

    @property
    def seq_len(self) -> int:
        """Tokens of the text."""
        return len(self.compressor)

    def truncate(self, length: int) -> None:
        """Drop all but the first tokens."""
        self.compressor.truncate(length)

    def write(self, qkv: Any, **options: Any) -> Any:
        """Normalise q and k, apply RoPE, compress k and v, return q."""
        start, count = self.seq_len, len(qkv)
        if start + count > self.capacity:
            raise numkv.CacheFull(
                f"expected room for {count} more tokens, got {self.capacity - start} of capacity "
                f"{self.capacity}; make the cache larger"
            )
        of = self.compressor
        q, k, v = rotated(qkv, start, of.config.head_dim, of.target, **options)
        of.extend(k, v)
        return q

    def decode_attention(self, q: Any) -> Any:
        """Attend with each new token's queries."""
        return self.compressor.attend(q)


@dataclass(frozen=True)
class CompressorChoice:
    """A compressor of heads; calling it makes the cache of a model.

    Parameters
    ----------
    bits : int
        Bits of a code.
    sketch : bool
        Whether keys also have a sketch, with a sign for each element.
    target : str
        ``"cpu"`` or ``"cuda"``.
    """

    bits: int = 4
    sketch: bool = False
    target: str = "cpu"

    @property
    def label(self) -> str:
        """What `parse_cache` reads."""
        return f"codes{self.bits}{'+sketch' if self.sketch else ''}"

    def config(self, head_dim: int) -> numkv.CompressorConfig:
        """Return the compressors' config for a head dim."""
        return numkv.CompressorConfig(head_dim, self.bits, head_dim if self.sketch else None)

    def bytes_at(self, config: ModelConfig, num_tokens: int) -> float:
        """Return the bytes of a token in all layers; see `CacheChoice.bytes_at`."""
        one = numkv.MultiHeadCompressor(config.num_kv_heads, self.config(config.head_dim))
        return float(config.num_layers * one.bytes_per_token)

    def __call__(self, config: ModelConfig, capacities: Sequence[int]) -> Cache:
        """Make a cache for one text with this capacity."""
        capacity, of = _capacity(self, capacities), self.config(config.head_dim)
        options: dict[str, Any] = {"num_q_heads": config.num_q_heads, "target": self.target}
        return LayerCache(
            [
                CompressedLayer(
                    numkv.MultiHeadCompressor(config.num_kv_heads, of, **options), capacity
                )
                for _ in range(config.num_layers)
            ]
        )


@dataclass(frozen=True)
class NewestChoice:
    """The newest tokens in fp16, and no others; calling it makes the cache of a model.

    It shows the cost of dropping rows, compared with rounding them. Attention has a window. Tokens before it stay in
    memory here but are not counted, because a cache that drops them would have the same results.

    Parameters
    ----------
    window : int
        Tokens that a query sees, its own included.
    target : str
        ``"cpu"`` or ``"cuda"``.
    """

    window: int
    target: str = "cpu"

    @property
    def label(self) -> str:
        """What `parse_cache` reads."""
        return f"last{self.window}"

    def bytes_at(self, config: ModelConfig, num_tokens: int) -> float:
        """Return the bytes of the window in all layers, divided by the tokens; see `CacheChoice.bytes_at`."""
        one = numkv.kind("fp16").bytes_per_token(config.num_kv_heads, config.head_dim)
        return config.num_layers * one * min(1.0, self.window / num_tokens)

    def __call__(self, config: ModelConfig, capacities: Sequence[int]) -> Cache:
        """Make a cache for one text with this capacity."""
        sizes = (_capacity(self, capacities), config.num_kv_heads, config.head_dim)
        layers = [
            numkv.ContiguousLayer(*sizes, kind="fp16", target=self.target)
            for _ in range(config.num_layers)
        ]
        return LayerCache(layers, window_left=self.window - 1)


AnyChoice = CacheChoice | CompressorChoice | NewestChoice


def _capacity(choice: AnyChoice, capacities: Sequence[int]) -> int:
    """Return the capacity for the only text."""
    if len(capacities) != 1:
        raise numkv.NotSupported(f"{choice.label}: expected one text, got {len(capacities)}")
    return capacities[0]


def parse_cache(text: str) -> AnyChoice:
    """Parse storage kinds, ``"codes4"`` or ``"codes4+sketch"`` of a compressor, or ``"last512"``, the newest tokens.

    Parameters
    ----------
    text : str
        The label of the cache.

    Returns
    -------
    CacheChoice, CompressorChoice or NewestChoice

    Raises
    ------
    UnsupportedDType, NotSupported
        If it is no such label.
    """
    if text.startswith("last"):
        if found := re.fullmatch("last([1-9][0-9]*)", text):
            return NewestChoice(int(found[1]))
        raise numkv.NotSupported(f"expected last with a number of tokens, 1 or more, got {text!r}")
    if not text.startswith("codes"):
        return CacheChoice.parse(text)
    found = re.fullmatch(r"codes([0-9]+)(\+sketch)?", text)
    if found is None:
        raise numkv.NotSupported(
            f"expected codes with a number of bits, and +sketch or nothing, got {text!r}"
        )
    choice = CompressorChoice(int(found[1]), found[2] is not None)
    try:
        choice.config(1)
    except ValueError as error:
        raise numkv.NotSupported(f"{text}: {error}") from None
    return choice
