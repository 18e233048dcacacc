"""Compressed heads: keys and values as codes of a few bits, and attention that reads nothing else.

`Compressor` is what compressors of one head and of several have in common; they differ in the axes of their arrays.
Operations on the codes are in `numkv.kernels.cpu.compress`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import numpy as np

from numkv.access import drops, reads, writes
from numkv.attention.options import AttentionOptions
from numkv.compression.config import CompressorConfig
from numkv.compression.encoded import Encoded, Numbers
from numkv.compression.heads import Heads, Side, Stored
from numkv.compression.saved import SavedCodes, SavedHead
from numkv.drawing.page import drawn
from numkv.errors import DimensionMismatch, NumkvError
from numkv.numbers import check_flag, check_index, check_size
from numkv.targets.base import Array
from numkv.targets.streamed import streamed

# Tokens that a compressor makes room for at first.
_FIRST_CAPACITY = 16


#: Heads that a compressor has at most: each has random matrices of its own.
MAX_HEADS = 2**16


def check_heads(num_heads: Any, num_q_heads: Any) -> tuple[int, int]:
    """Check numbers of kv heads and of q heads, which are as many if None."""
    heads = check_size("num_heads", num_heads, 1, MAX_HEADS)
    queries = heads if num_q_heads is None else check_size("num_q_heads", num_q_heads, 1)
    if queries % heads:
        raise DimensionMismatch(
            f"`num_q_heads`: expected a multiple of num_heads={heads}, got {queries}",
            expected=heads,
            actual=queries,
        )
    return heads, queries


class Codes(NamedTuple):
    """The stored form of keys or of values; copies, on the compressor's target.

    Arrays of a `MultiHeadCompressor` have an axis of heads before these.

    Attributes
    ----------
    codes : uint8 array (len, (head_dim * bits + 7) // 8)
        Numbers of levels, packed: element i has the bits ``[i * bits, (i + 1) * bits)``, the lowest of a byte first.
    scales : float32 array (len,)
        What a vector's levels are multiplied by.
    signs : uint8 array (len, (projections + 7) // 8)
        The sketch of a key's residual, a bit for each sign; values, and keys without a sketch, have none.
    residuals : float32 array (len,)
        Norms of the residuals; of length 0 where there is no sketch.
    """

    codes: Array
    scales: Array
    signs: Array
    residuals: Array


class Compressor(Heads):
    """The common part of compressors of one head and of several: encoded keys and values, by head."""

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
        """Return the tokens at the start of new buffers."""
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
            If it is inconsistent; the message names the contradiction.
        """
        keys, values, begin, end = stored = self._stored
        if not 0 <= begin <= end <= stored.capacity:
            raise NumkvError(
                f"check: tokens are said to lie in [{begin}, {end}) of buffers for {stored.capacity}"
            )
        self._check_buffers(keys, values, slice(begin, end))

    # -- what is stored, as it is stored

    def _without_heads(self, x: Array) -> Array:
        """An array ``(num_heads, len, …)`` as readers get it: of one head without its first axis."""
        return x

    def _codes(self, which: Side) -> Codes:
        """Copies of what is stored of ``"keys"`` or ``"values"``."""
        stored = self._stored
        encoded: Encoded = getattr(stored, which)
        kind = self.kind if which == "keys" else self.v_kind
        sizes = self.num_kv_heads, stored.tokens, self.head_dim
        copied = Encoded.allocate(self._target, *sizes, kind)
        if stored.tokens:
            encoded.move(self._target, copied, stored.begin)
        return Codes(*map(self._without_heads, copied))

    @property
    @reads
    def key_codes(self) -> Codes:
        """What is stored of the keys: codes, scales and the sketch; see `Codes`."""
        return self._codes("keys")

    @property
    @reads
    def value_codes(self) -> Codes:
        """What is stored of the values."""
        return self._codes("values")

    @streamed
    @reads
    def decode_keys(self) -> Array:
        """Return the keys, decoded from their codes; the sketch is not used.

        Returns
        -------
        float32 array (len, head_dim) or (num_heads, len, head_dim)
            The first of a `HeadCompressor`, the second of a `MultiHeadCompressor`.
        """
        return self._without_heads(self._decode_rows("keys", self._stored))

    @streamed
    @reads
    def decode_values(self) -> Array:
        """Return the values, decoded from their codes.

        Returns
        -------
        float32 array (len, head_dim) or (num_heads, len, head_dim)
            See `decode_keys`.
        """
        return self._without_heads(self._decode_rows("values", self._stored))

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

    def _attend(
        self, name: str, queries: Any, options: AttentionOptions, return_lse: bool | None, check_finite: bool
    ) -> Any:  # fmt: skip
        """Outputs of a caller's queries, with their axes, and lse where it is asked for."""
        asked = self._options(options)
        queries, axes = self._by_query(name, queries)
        return_lse = check_flag("return_lse", return_lse)
        q, q_kind = self._query(name, queries, check_finite)
        self._check_length(name, queries)
        stored = self._stored
        codes = self._read(name, queries, stored)
        out, lse = self._attended(q, q_kind, codes if stored.tokens else None, asked, return_lse)
        out = out.reshape((*axes, self._config.head_dim))
        return (out, lse.reshape(axes or (1,))) if return_lse else out


@drawn
class HeadCompressor(Compressor):
    """The compressed keys and values of one head.

    Parameters
    ----------
    config : CompressorConfig
        How vectors are compressed.
    target : {"cpu", "cuda"}
        Where the codes are and the kernels run.

    Notes
    -----
    Several threads may read at the same time, also while one pushes: they see the earlier tokens, whole. One thread
    at a time may write; a second one gets `NumkvError` and changes nothing. During `clear`, `truncate` and
    `evict_outside_window` a reader gets `NumkvError`.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> head = numkv.HeadCompressor(numkv.CompressorConfig(head_dim=128, bits=4))
    >>> rows = np.random.default_rng(0).standard_normal((2, 50, 128), dtype=np.float32)
    >>> head.extend(rows[0], rows[1])
    >>> head.attention_scores(rows[0, 0]).shape, round(head.compression_ratio, 2)
    ((50,), 7.53)
    """

    __saved__ = SavedHead

    def __init__(self, config: CompressorConfig, *, target: str = "cpu") -> None:
        super().__init__(config, 1, 1, target)
        self._q_axes = ()

    def __repr__(self) -> str:
        return self._describe("")

    def _without_heads(self, x: Array) -> Array:
        return x.reshape(tuple(int(n) for n in x.shape[1:]))

    @streamed
    @writes
    def push(self, key: Any, value: Any, *, check_finite: bool = True) -> None:
        """Encode and append one token.

        Parameters
        ----------
        key, value : array (head_dim,)
            Vectors of any float dtype; they are encoded in float32, and norms must not exceed what that holds.
        check_finite : bool
            Whether the vectors are checked for NaN and infinity first; on CUDA that waits for the device.

        Raises
        ------
        NonFiniteInput
            If a vector holds NaN or infinity, whatever its length; `index` says where. The key is checked first.
        DimensionMismatch
            If a vector has another length.
        UnsupportedDType, NotSupported
            If an array has another dtype, layout or target.
        """
        key = self._vectors("key", key, ("head_dim",))
        value = self._vectors("value", value, ("head_dim",))
        key, value = (x.reshape((1, 1, int(x.shape[0]))) for x in (key, value))
        self._append(("key", "value"), key, value, check_finite)

    @streamed
    @writes
    def extend(self, keys: Any, values: Any, *, check_finite: bool = True) -> None:
        """Encode and append several tokens; the codes are those that `push` would store one by one.

        Parameters
        ----------
        keys, values : array (num_tokens, head_dim)
            Vectors of any float dtype.
        check_finite : bool
            See `push`.

        Raises
        ------
        NonFiniteInput, DimensionMismatch, UnsupportedDType, NotSupported
            See `push`.
        """
        shape = ("num_tokens", "head_dim")
        keys = self._vectors("keys", keys, shape)
        values = self._vectors("values", values, (int(keys.shape[0]), "head_dim"))
        keys, values = self._target.one_head(keys), self._target.one_head(values)
        self._append(("keys", "values"), keys, values, check_finite)

    @streamed
    @reads
    def attention_scores(
        self, query: Any, *, check_finite: bool = True, **options: Unpack[AttentionOptions]
    ) -> Array:  # fmt: skip
        """Estimates of ``key . query`` for all tokens, scaled, without softmax.

        Parameters
        ----------
        query : array (head_dim,) or (num_queries, head_dim)
            Of any float dtype; several are those of the newest tokens.
        check_finite : bool
            Whether the query is checked for NaN and infinity first; on CUDA that waits for the device.
        **options
            `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

        Returns
        -------
        float32 array (len,) or (num_queries, len)
            Without a sketch the products with `decode_keys`; with one, unbiased. Later tokens, and those that the
            window hides, have -inf. Empty where there are no tokens, whatever the length of the query.

        Raises
        ------
        NonFiniteInput
            If the query holds NaN or infinity.
        DimensionMismatch
            If it has another length, or there are more queries than tokens.
        UnsupportedDType, NotSupported
            If it has another dtype, layout or target.
        ValueError, TypeError
            If an option has another value or type.
        """
        return self._scores("query", query, options, check_finite, self._stored)

    @streamed
    @reads
    def attend(
        self, query: Any, *, return_lse: bool | None = False, check_finite: bool = True,
        **options: Unpack[AttentionOptions],
    ) -> Any:  # fmt: skip
        """Return the values, weighted by the softmax of `attention_scores`.

        Parameters
        ----------
        query : array (head_dim,) or (num_queries, head_dim)
            Of any float dtype; several are those of the newest tokens, and see no later ones.
        return_lse : bool
            Whether to return the log of the sum of exponentials too.
        check_finite
            See `attention_scores`.
        **options
            `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

        Returns
        -------
        out : float32 array (head_dim,) or (num_queries, head_dim)
            Zeros where there are no tokens.
        lse : float32 array (1,) or (num_queries,)
            Natural log, -inf where there are no tokens; only with `return_lse`.

        Raises
        ------
        NonFiniteInput, DimensionMismatch, UnsupportedDType, NotSupported, ValueError, TypeError
            See `attention_scores`; a query of another length is refused here when there are no tokens too.
        """
        return self._attend("query", query, options, return_lse, check_finite)


@drawn
class MultiHeadCompressor(Compressor):
    """The compressed keys and values of several heads, each with random matrices of its own.

    Parameters
    ----------
    num_heads : int
        Kv heads, at least 1.
    config : CompressorConfig
        How vectors are compressed.
    num_q_heads : int, optional
        Q heads, a multiple of `num_heads`, which it is if None; q head h reads kv head
        ``h // (num_q_heads // num_heads)``.
    target : {"cpu", "cuda"}
        Where the codes are and the kernels run.

    Raises
    ------
    DimensionMismatch
        If `num_q_heads` is no multiple of `num_heads`, one of them is below 1, or there are more than 65,536 heads or
        more random numbers than memory holds.

    Notes
    -----
    Threads: as for `HeadCompressor`.
    """

    def __init__(
        self,
        num_heads: int,
        config: CompressorConfig,
        *,
        num_q_heads: int | None = None,
        target: str = "cpu",
    ) -> None:
        num_heads, queries = check_heads(num_heads, num_q_heads)
        super().__init__(config, num_heads, queries, target)

    @property
    def num_heads(self) -> int:
        """Kv heads."""
        return self.num_kv_heads

    @property
    def num_q_heads(self) -> int:
        """Q heads."""
        return self._num_q_heads

    def __repr__(self) -> str:
        return self._describe(f"num_heads={self.num_heads}, num_q_heads={self._num_q_heads}, ")

    @streamed
    @writes
    def push_token(self, keys: Any, values: Any, *, check_finite: bool = True) -> None:
        """Encode and append one token in all heads, or in none.

        Parameters
        ----------
        keys, values : array (num_heads, head_dim)
            A vector for each head, of any float dtype.
        check_finite : bool
            Whether the vectors are checked for NaN and infinity first; on CUDA that waits for the device.

        Raises
        ------
        DimensionMismatch
            If there is another number of heads, or (checked after NaN) vectors have another length.
        NonFiniteInput
            If a vector holds NaN or infinity; `index` is the position in its head's vector. Keys are checked first.
        UnsupportedDType, NotSupported
            If an array has another dtype, layout or target.
        """
        target, shape = self._target, (self.num_heads, "head_dim")
        keys, values = self._vectors("keys", keys, shape), self._vectors("values", values, shape)
        keys, values = (target.token_major(target.one_head(x)) for x in (keys, values))
        self._append(("keys", "values"), keys, values, check_finite)

    @streamed
    @writes
    def extend(self, keys: Any, values: Any, *, check_finite: bool = True) -> None:
        """Encode and append several tokens; the codes are those that `push_token` would store one by one.

        Parameters
        ----------
        keys, values : array (num_tokens, num_heads, head_dim)
            Vectors of any float dtype.
        check_finite : bool
            See `push_token`.

        Raises
        ------
        DimensionMismatch, NonFiniteInput, UnsupportedDType, NotSupported
            See `push_token`.
        """
        keys = self._vectors("keys", keys, ("num_tokens", self.num_heads, "head_dim"))
        shape = (int(keys.shape[0]), self.num_heads, "head_dim")
        values = self._vectors("values", values, shape)
        self._append(("keys", "values"), keys, values, check_finite)

    @streamed
    @reads
    def attention_scores(
        self, queries: Any, *, check_finite: bool = True, **options: Unpack[AttentionOptions]
    ) -> Array:  # fmt: skip
        """Estimates of ``key . query`` for all q heads and tokens, scaled, without softmax.

        Parameters
        ----------
        queries : array (num_q_heads, head_dim) or (num_queries, num_q_heads, head_dim)
            A query for each q head, of any float dtype; several are those of the newest tokens.
        check_finite
            See `HeadCompressor.attention_scores`.
        **options
            `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

        Returns
        -------
        float32 array (num_q_heads, len) or (num_queries, num_q_heads, len)
            See `HeadCompressor.attention_scores`.

        Raises
        ------
        DimensionMismatch
            If there is another number of q heads, queries have another length, or there are more than tokens.
        NonFiniteInput, UnsupportedDType, NotSupported, ValueError, TypeError
            See `HeadCompressor.attention_scores`.
        """
        return self._scores("queries", queries, options, check_finite, self._stored)

    @streamed
    @reads
    def attend(
        self, queries: Any, *, return_lse: bool | None = False, check_finite: bool = True,
        **options: Unpack[AttentionOptions],
    ) -> Any:  # fmt: skip
        """Return the values of each q head's kv head, weighted by the softmax of `attention_scores`.

        Parameters
        ----------
        queries : array (num_q_heads, head_dim) or (num_queries, num_q_heads, head_dim)
            A query for each q head, of any float dtype; several are those of the newest tokens, and see no later ones.
        return_lse, check_finite
            See `HeadCompressor.attend`.
        **options
            `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

        Returns
        -------
        out : float32 array (num_q_heads, head_dim) or (num_queries, num_q_heads, head_dim)
            Zeros where there are no tokens. It does not depend on how many queries a call has.
        lse : float32 array (num_q_heads,) or (num_queries, num_q_heads)
            Natural log, -inf where there are no tokens; only with `return_lse`.

        Raises
        ------
        DimensionMismatch, NonFiniteInput, UnsupportedDType, NotSupported, ValueError, TypeError
            See `attention_scores`; queries of another length are refused here when there are no tokens too.
        """
        return self._attend("queries", queries, options, return_lse, check_finite)
