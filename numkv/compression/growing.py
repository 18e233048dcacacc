"""`Compressor`: encoded keys and values that grow as tokens come, by head.

Operations on the codes are in `numkv.kernels.cpu.compress`. The rotations and the codebook
(`numkv.compression.quantiser`) are made once for all compressors of the same config.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv.access import drops, reads
from numkv.compression.config import CompressorConfig
from numkv.compression.encoded import Encoded, Numbers
from numkv.compression.heads import Heads, Side, Stored
from numkv.compression.saved import SavedCodes
from numkv.errors import NumkvError
from numkv.kernels.operations import CodesOptions
from numkv.numbers import check_flag, check_index, check_size
from numkv.targets.base import Array
from numkv.targets.streamed import streamed

# Tokens that a compressor makes room for at first.
_FIRST_CAPACITY = 16


class Compressor(Heads):
    """What the compressors of one head and of several have in common: encoded keys and values, by head."""

    def __init__(
        self, config: CompressorConfig, num_heads: int, num_q_heads: int, target: str
    ) -> None:
        super().__init__(config, num_heads, num_q_heads, target)
        self._stored = Stored(*self._allocate(0), 0, 0)

    @property
    def compression_ratio(self) -> float:
        """How many times smaller the stored tokens are than in float32; 1.0 when there are none."""
        if self.is_empty:
            return 1.0
        return 2 * self.num_kv_heads * self._config.head_dim * 4 / self.bytes_per_token

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens."""
        return len(self) == 0

    def __len__(self) -> int:
        return int(self._stored.tokens)

    # -- which tokens

    @drops
    def clear(self) -> None:
        """Drop all tokens; memory and quantiser stay."""
        self._stored = self._stored._replace(begin=0, end=0)

    @drops
    def evict_outside_window(self, n: int) -> None:
        """Drop all but the last tokens.

        Parameters
        ----------
        n : int
            How many to keep; if there are fewer, all are kept.

        Raises
        ------
        DimensionMismatch
            If `n` is negative.
        TypeError
            If it is no integer.
        """
        stored = self._stored
        begin = max(stored.begin, stored.end - check_size("n", n))
        self._stored = stored._replace(begin=begin)

    @drops
    def truncate(self, length: int) -> None:
        """Keep the first tokens only: what speculation added and a model refused is dropped; memory stays.

        Parameters
        ----------
        length : int
            How many tokens to keep, of those that are there: what `evict_outside_window` dropped does not count.

        Raises
        ------
        IndexError
            If `length` is negative or above ``len(self)``; nothing is dropped.
        TypeError
            If it is no integer.
        """
        stored = self._stored
        kept = check_index("length", length, stored.tokens, inclusive=True)
        self._stored = stored._replace(end=stored.begin + kept)

    def _copied_rows(self) -> Stored:
        return self._moved(self._stored, self._stored.capacity)

    def _moved(self, stored: Stored, capacity: int) -> Stored:
        """The tokens at the start of new buffers."""
        keys, values = self._allocate(capacity)
        if stored.tokens:
            stored.keys.move(self._target, keys, stored.begin)
            stored.values.move(self._target, values, stored.begin)
        return Stored(keys, values, 0, stored.tokens)

    def _slots(self, stored: Stored) -> tuple[Numbers, dict[str, Any]]:
        return np.arange(stored.begin, stored.end), {}

    def _resumed(self, saved: SavedCodes, keys: Encoded, values: Encoded) -> Stored:
        return Stored(keys, values, 0, saved.tokens)

    # -- its proof

    @streamed
    @reads
    def check(self) -> None:
        """Look for a contradiction: numbers of tokens, shapes of buffers, and scales, which are finite.

        They are not where vectors with NaN were pushed with ``check_finite=False``. On CUDA it waits for the device.

        Raises
        ------
        NumkvError
            If there is one; it says which.
        """
        keys, values, begin, end = stored = self._stored
        if not 0 <= begin <= end <= stored.capacity:
            raise NumkvError(
                f"check: tokens are said to lie in [{begin}, {end}) of buffers for {stored.capacity}"
            )
        self._check_buffers(keys, values, slice(begin, end))

    # -- what is stored, as it is stored

    def _codes(self, which: Side) -> Encoded:
        """Copies of what is stored of ``"keys"`` or ``"values"`` ``(num_heads, len, …)``."""
        stored = self._stored
        encoded: Encoded = getattr(stored, which)
        kind = self.kind if which == "keys" else self.v_kind
        sizes = self.num_kv_heads, stored.tokens, self.head_dim
        copied = Encoded.allocate(self._target, *sizes, kind)
        if stored.tokens:
            encoded.move(self._target, copied, stored.begin)
        return copied

    # -- writing and reading; arrays are by head

    def _append(
        self, names: tuple[str, str], keys: Array, values: Array, check_finite: bool
    ) -> None:
        """Encode vectors ``(num_tokens, num_heads, head_dim)`` whose numbers have been checked."""
        self._check_vectors(names, keys, values, check_finite)
        tokens, stored = int(keys.shape[0]), self._stored
        if stored.end + tokens > stored.capacity:
            room = max(stored.tokens + tokens, 2 * stored.tokens, _FIRST_CAPACITY)
            stored = self._moved(stored, room)
        self._encode(keys, values, stored.keys, stored.values, stored.end)
        self._stored = Stored(stored.keys, stored.values, stored.begin, stored.end + tokens)

    # -- reading

    def _decode(self, which: Side) -> Array:
        """All ``"keys"`` or ``"values"`` ``(num_heads, len, head_dim)``."""
        return self._decode_rows(which, self._stored)

    def _scores(
        self, name: str, queries: Array, options: CodesOptions, check_finite: bool
    ) -> Array:
        """Scores ``(num_queries, num_q_heads, len)`` of queries ``(num_queries, num_q_heads, …)``."""
        return self._scores_of(name, queries, options, check_finite, self._stored)

    def _attend(
        self, name: str, queries: Array, options: CodesOptions, return_lse: bool | None, check_finite: bool
    ) -> tuple[Array, Array]:  # fmt: skip
        """Outputs of queries ``(num_queries, num_q_heads, head_dim)``, and lse, which is empty where nobody asks."""
        return_lse = check_flag("return_lse", return_lse)
        q, q_kind = self._query(name, queries, check_finite)
        self._check_length(name, queries)
        codes, tokens = self._read(name, queries, self._stored)
        return self._attended(q, q_kind, codes if tokens else None, options, return_lse)
