"""The demo's model on compressed heads: a `Cache` of a `numkv.MultiHeadCompressor` for each layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numkv
from numkv import targets
from numkv.demo.cache import Cache, CacheChoice
from numkv.demo.config import ModelConfig
from numkv.demo.newest import NewestChoice

_LABEL = re.compile(r"codes([0-9]+)(\+sketch)?")


class CompressedCache:
    """A `Cache` of one text, in a compressor for each layer.

    Parameters
    ----------
    compressors : sequence of numkv.MultiHeadCompressor
        From the first layer to the last, all of one config and target.
    capacity : int
        The most tokens that the text may have.
    """

    def __init__(self, compressors: Sequence[numkv.MultiHeadCompressor], capacity: int) -> None:
        self.compressors = tuple(compressors)
        self.capacity = capacity

    def add(self, tokens: Any = None) -> int:
        """Return the number of the one text; nothing is known of its prompt."""
        return 0

    def length(self, seq: int) -> int:
        """Tokens of the text."""
        return len(self.compressors[0])

    def truncate(self, seq: int, length: int) -> None:
        """Forget the newest tokens.

        Parameters
        ----------
        seq : int
            Number of the text.
        length : int
            How many stay, from the first on.
        """
        for compressor in self.compressors:
            compressor.truncate(length)

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> _CompressedStep:
        """Start a step, on copies of the compressors.

        Parameters
        ----------
        sequences : iterable of int
            The one text.
        new_lens : sequence of int
            How many tokens it gets.

        Returns
        -------
        Step

        Raises
        ------
        CacheFull
            If there is no room for them.
        """
        start, (count,) = self.length(0), new_lens
        if start + count > self.capacity:
            raise numkv.CacheFull(
                f"expected room for {count} more tokens, got {self.capacity - start} of capacity "
                f"{self.capacity}; make the cache larger"
            )
        return _CompressedStep([x.copy() for x in self.compressors], count)

    def commit(self, step: _CompressedStep, *, token_ids: Any = None) -> None:
        """Keep the tokens of a step."""
        self.compressors = step.compressors

    def rollback(self, step: _CompressedStep) -> None:
        """Forget the tokens of a step, which only the step's copies have."""


class _CompressedStep:
    """A `Step` of a `CompressedCache`."""

    def __init__(self, compressors: Sequence[numkv.MultiHeadCompressor], count: int) -> None:
        self.compressors = tuple(compressors)
        self._start = len(compressors[0])
        self._target = targets.get(compressors[0].target)
        # Takes the norm and the rotation of new rows off the compressors' hands; it holds one layer's at a time.
        sizes = (count, compressors[0].num_heads, compressors[0].config.head_dim)
        self._rows = numkv.ContiguousLayer(*sizes, kind="fp32", target=self._target.name)

    def write(self, layer: int, qkv: Any, **options: Any) -> Any:
        """Norm and rotate q and k, set k and v aside, return q."""
        self._rows.truncate(0)
        return self._rows.write(qkv, pos_offset=self._start, **options)

    def attention(self, layer: int, q: Any) -> Any:
        """Compress the rows that were set aside, and attend with each token's queries after it."""
        compressor = self.compressors[layer]
        compressor.extend(self._by_token(self._rows.k), self._by_token(self._rows.v))
        return compressor.attend(q)

    def _by_token(self, rows: Any) -> Any:
        """Rows ``(1, num_kv_heads, num_tokens, head_dim)`` as ``(num_tokens, num_kv_heads, head_dim)``."""
        return self._target.token_major(rows.reshape(rows.shape[1:]))


@dataclass(frozen=True)
class CompressorChoice:
    """How heads are compressed; calling it makes the cache of a model.

    Parameters
    ----------
    bits : int
        Bits of a code.
    sketch : bool
        Whether keys have a sketch too, of a sign for each element.
    target : str
        ``"cpu"`` or ``"cuda"``.
    """

    bits: int = 4
    sketch: bool = False
    target: str = "cpu"

    @classmethod
    def parse(cls, text: str, target: str = "cpu") -> CompressorChoice:
        """Read ``"codes4"``, or ``"codes4+sketch"``.

        Parameters
        ----------
        text : str
            The bits of a code, and whether there is a sketch.
        target : str
            Target of the cache.

        Returns
        -------
        CompressorChoice

        Raises
        ------
        NotSupported
            If it is neither.
        """
        found = _LABEL.fullmatch(text)
        if found is None:
            raise numkv.NotSupported(
                f"expected codes with a number of bits, and +sketch or nothing, got {text!r}"
            )
        choice = cls(int(found[1]), found[2] is not None, target)
        try:
            choice.config(1)
        except ValueError as error:
            raise numkv.NotSupported(f"{text}: {error}") from None
        return choice

    @property
    def label(self) -> str:
        """What `parse` reads."""
        return f"codes{self.bits}{'+sketch' if self.sketch else ''}"

    def config(self, head_dim: int) -> numkv.CompressorConfig:
        """The compressors' config.

        Parameters
        ----------
        head_dim : int
            Elements of a key, and of a value.

        Returns
        -------
        numkv.CompressorConfig
        """
        return numkv.CompressorConfig(head_dim, self.bits, head_dim if self.sketch else None)

    def bytes_at(self, config: ModelConfig, num_tokens: int) -> float:
        """Bytes of a token in all layers, however many there are; see `CacheChoice.bytes_at`.

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
        one = numkv.MultiHeadCompressor(config.num_kv_heads, self.config(config.head_dim))
        return float(config.num_layers * one.bytes_per_token)

    def __call__(self, config: ModelConfig, capacities: Sequence[int]) -> Cache:
        """Make a cache for one text of so many tokens."""
        if len(capacities) != 1:
            raise numkv.NotSupported(f"{self.label}: expected one text, got {len(capacities)}")
        compressors = [
            numkv.MultiHeadCompressor(
                config.num_kv_heads,
                self.config(config.head_dim),
                num_q_heads=config.num_q_heads,
                target=self.target,
            )
            for _ in range(config.num_layers)
        ]
        return CompressedCache(compressors, capacities[0])


def parse_cache(text: str) -> CacheChoice | CompressorChoice | NewestChoice:
    """Read the label of a storage kind, of a compressor, or of a cache of the newest tokens alone.

    Parameters
    ----------
    text : str
        What `CacheChoice.parse`, `CompressorChoice.parse` or `NewestChoice.parse` reads.

    Returns
    -------
    CacheChoice, CompressorChoice or NewestChoice

    Raises
    ------
    UnsupportedDType, NotSupported
        If it is no such label.
    """
    if text.startswith("last"):
        return NewestChoice.parse(text)
    return (CompressorChoice if text.startswith("codes") else CacheChoice).parse(text)
