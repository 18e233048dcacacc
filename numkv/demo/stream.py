"""Texts that outlive their context: keep the first tokens, drop the middle, shift the rest.

What is kept is not computed again: `numkv.CausalCache.remove` closes the gap in the positions and turns the keys that
move by the angle between their old and new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import numkv
from numkv import QKMode, targets
from numkv.demo.cache import CacheChoice
from numkv.demo.config import ModelConfig
from numkv.demo.network import rotary_tables

Array = NDArray[np.float32]


def num_to_discard(context: int, keep: int, num_tokens: int) -> int:
    """Say how many tokens to drop so that half of what is not kept becomes free.

    Parameters
    ----------
    context : int
        Tokens that there is room for.
    keep : int
        First tokens that stay.
    num_tokens : int
        Tokens that there are.

    Returns
    -------
    int
        At least one token becomes free; 0 where enough is free already.
    """
    wanted = max((context - keep) // 2, 1)
    return max(0, wanted - (context - num_tokens))


@dataclass(frozen=True)
class Shift:
    """What a shift did.

    Attributes
    ----------
    num_tokens : int
        Tokens before it.
    begin, end : int
        Positions ``[begin, end)`` that were dropped; what came after them moved down.
    """

    num_tokens: int
    begin: int
    end: int


class ShiftingCache:
    """A `numkv.demo.cache.Cache` of one text that makes room for itself.

    Parameters
    ----------
    config : ModelConfig
        Sizes and rotation of the model.
    context : int
        Tokens that there is room for.
    keep : int
        First tokens that always stay.
    choice : CacheChoice, optional
        Kinds and target of the cache; fp32 on the CPU by default.

    Attributes
    ----------
    shifts : list of Shift
        What was dropped so far.
    tables : tuple of ndarray
        Cosines and sines of the model's rotation, on the host.
    """

    def __init__(
        self, config: ModelConfig, context: int, keep: int, choice: CacheChoice | None = None
    ) -> None:
        choice = choice or CacheChoice("fp32")
        if not 0 <= keep < context:
            raise ValueError(f"keep: expected [0, {context}), got {keep}")
        self.context, self.keep = context, keep
        self.shifts: list[Shift] = []
        place = targets.get(choice.target)
        self._to_target, self._to_host = place.asarray, place.to_host
        self.tables = rotary_tables(config, context)
        self._cells = numkv.CausalCache(shift=numkv.rope_shift(*self.tables))
        self._cells.init(
            choice.kind, 1, context, context, target=choice.target, k_kind=choice.k_kind,
            v_kind=choice.v_kind,
        )  # fmt: skip
        self._length = 0

    @property
    def cells(self) -> numkv.CausalCache:
        """Where its rows are."""
        return self._cells

    def add(self, tokens: Any = None) -> int:
        """Return the number of the one text; nothing is known of its prompt."""
        return 0

    def length(self, seq: int) -> int:
        """Tokens of the text that are in the cache."""
        return self._length

    def truncate(self, seq: int, length: int) -> None:
        """Forget all but the first tokens."""
        self._cells.remove(0, length)
        self._length = length

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> _Step:
        """Start a step; where there is no room for its tokens, drop some from the middle first."""
        (count,) = new_lens
        if self._length + count > self.context:
            gone = max(
                num_to_discard(self.context, self.keep, self._length),
                self._length + count - self.context,
            )
            if self.keep + gone > self._length:
                raise numkv.CacheFull(
                    f"expected at most {self.context - self.keep} new tokens at once beside the "
                    f"{self.keep} that are kept, got {count}"
                )
            self._cells.remove(0, self.keep, self.keep + gone)
            self.shifts.append(Shift(self._length, self.keep, self.keep + gone))
            self._length -= gone
        positions = np.arange(self._length, self._length + count)
        self._cells.start_forward(numkv.Batch(positions, np.zeros(count, np.int64)))
        return _Step(self, positions)

    def commit(self, step: _Step, *, token_ids: Any = None) -> None:
        """Keep the tokens of a step."""
        self._length += len(step.positions)

    def rollback(self, step: _Step) -> None:
        """Forget the tokens of a step."""
        self._cells.remove(0, self._length)

    def put(self, layer: int, k: Array, v: Array) -> None:
        """Store rows of the step's tokens."""
        self._cells.put(layer, self._to_target(k), self._to_target(v))

    def attend(self, layer: int, q: Any) -> Any:
        """Attend with queries of the step's tokens."""
        return self._cells.decode_attention(layer, q)

    def on_host(self, x: Any) -> Any:
        """Bring an array of the target to the host."""
        return self._to_host(x)

    def on_target(self, x: Array) -> Any:
        """Bring an array to the target."""
        return self._to_target(x)


class _Step:
    """A `numkv.demo.cache.Step`: new tokens of a `ShiftingCache`."""

    def __init__(self, cache: ShiftingCache, positions: NDArray[np.int64]) -> None:
        self._cache = cache
        self.positions = positions

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
        """Norm and rotate q and k, store k and v, return q; in NumPy, as a caller of these caches does it."""
        cache, rows = self._cache, self._cache.on_host(qkv)
        half = cos.shape[1]
        heads = rows.reshape(len(rows), -1, 2 * half)
        num_kv_heads = (heads.shape[1] - num_q_heads) // 2
        q, k, v = np.split(heads, [num_q_heads, num_q_heads + num_kv_heads], axis=1)
        if qk_mode == QKMode.NORM_HALF_SPLIT:
            q, k = (
                x
                / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
                * cache.on_host(weight)
                for x, weight in ((q, q_norm_weight), (k, k_norm_weight))
            )
        # The cache's own tables are on the host.
        c, s = (table[self.positions, None] for table in cache.tables)
        q, k = (
            np.concatenate(
                [x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s], -1
            )
            for x in (q, k)
        )
        cache.put(layer, k, np.ascontiguousarray(v))
        return cache.on_target(q)

    def attention(self, layer: int, q: Any) -> Any:
        """Attend with queries of the new tokens."""
        return self._cache.attend(layer, q)
