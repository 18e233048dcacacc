"""Texts longer than their context: keep the first tokens, drop the middle, shift the rest.

Kept tokens are not computed again: `numkv.CausalCache.remove` closes the gap in the positions, and shifts the keys that
move.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

import numkv
from numkv.demo.cache import CacheChoice, rotated
from numkv.demo.checkpoint import ModelConfig
from numkv.demo.network import rotary_tables


def num_to_discard(context: int, keep: int, num_tokens: int) -> int:
    """Return how many tokens to drop, so that half of the room after the kept tokens becomes free.

    Parameters
    ----------
    context : int
        Room of the cache, in tokens.
    keep : int
        Number of first tokens that stay.
    num_tokens : int
        Present number of tokens.

    Returns
    -------
    int
        Number of tokens to drop, so that at least one becomes free; 0 if enough is free already.
    """
    wanted = max((context - keep) // 2, 1)
    return max(0, wanted - (context - num_tokens))


@dataclass(frozen=True)
class Shift:
    """A shift of the context.

    Attributes
    ----------
    num_tokens : int
        Tokens before it.
    begin, end : int
        Positions ``[begin, end)`` that were dropped; later tokens moved down.
    """

    num_tokens: int
    begin: int
    end: int


class ShiftingCache:
    """A `numkv.demo.cache.Cache` of one text that drops tokens to make room.

    Parameters
    ----------
    config : ModelConfig
        Sizes and rotation of the model.
    context : int
        Room of the cache, in tokens.
    keep : int
        Number of first tokens that always stay.
    choice : CacheChoice, optional
        Kinds and target of the cache; fp32 on the CPU by default.

    Attributes
    ----------
    shifts : list of Shift
        All shifts so far.
    cells : numkv.CausalCache
        The cache of rows.
    head_dim, target : int, str
        Elements of a row, and target of the cache.
    """

    def __init__(
        self, config: ModelConfig, context: int, keep: int, choice: CacheChoice | None = None
    ) -> None:
        choice = choice or CacheChoice("fp32")
        if not 0 <= keep < context:
            raise ValueError(f"keep: expected [0, {context}), got {keep}")
        self.context, self.keep = context, keep
        self.shifts: list[Shift] = []
        self.head_dim, self.target = config.head_dim, choice.target
        self.cells = numkv.CausalCache(shift=numkv.rope_shift(*rotary_tables(config, context)))
        self.cells.init(
            choice.kind, 1, context, context, target=choice.target, v_kind=choice.v_kind
        )
        self._length = 0

    def add(self, tokens: Any = None) -> int:
        """Return the number of the only text; no prefix is reused."""
        return 0

    def length(self, seq: int) -> int:
        """Return the tokens of the text in the cache."""
        return self._length

    def truncate(self, seq: int, length: int) -> None:
        """Drop all but the first tokens."""
        self.cells.remove(0, length)
        self._length = length

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> _Step:
        """Start a step; if there is no room for its tokens, drop some from the middle first."""
        (count,) = new_lens
        if self._length + count > self.context:
            gone = max(
                num_to_discard(self.context, self.keep, self._length),
                self._length + count - self.context,
            )
            if self.keep + gone > self._length:
                raise numkv.CacheFull(
                    f"expected at most {self.context - self.keep} new tokens at once in addition to the "
                    f"{self.keep} that are kept, got {count}"
                )
            self.cells.remove(0, self.keep, self.keep + gone)
            self.shifts.append(Shift(self._length, self.keep, self.keep + gone))
            self._length -= gone
        positions = np.arange(self._length, self._length + count)
        self.cells.start_forward(numkv.Batch(positions, np.zeros(count, np.int64)))
        return _Step(self, self._length, count)

    def commit(self, step: _Step, *, token_ids: Any = None) -> None:
        """Keep the tokens of a step."""
        self._length += step.count

    def rollback(self, step: _Step) -> None:
        """Drop the tokens of a step."""
        self.cells.remove(0, self._length)


class _Step:
    """A `numkv.demo.cache.Step`: new tokens of a `ShiftingCache`."""

    def __init__(self, cache: ShiftingCache, start: int, count: int) -> None:
        self._cache = cache
        self._start = start
        self.count = count

    def write(self, layer: int, qkv: Any, **options: Any) -> Any:
        """Normalise q and k, apply RoPE, store k and v, return q."""
        cache = self._cache
        q, k, v = rotated(qkv, self._start, cache.head_dim, cache.target, **options)
        cache.cells.put(layer, k, v)
        return q

    def attention(self, layer: int, q: Any) -> Any:
        """Attend with queries of the new tokens."""
        return self._cache.cells.decode_attention(layer, q)
