"""Compressed heads: keys and values as codes of a few bits, and attention that reads nothing else.

Operations on the codes are in `numkv.kernels.cpu.compress`. A compressor grows as tokens come; the rotations and the
codebook (`numkv.compression.quantiser`) are made once for all compressors of the same config.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from numkv import targets
from numkv.checks import Shape, check_array, check_size
from numkv.compression.config import CompressorConfig
from numkv.compression.encoded import Encoded
from numkv.compression.quantiser import quantiser_of
from numkv.errors import DimensionMismatch, NonFiniteInput
from numkv.kinds import QUERY_DTYPES, kind_of_dtype
from numkv.rows.codes import packed_bytes
from numkv.targets.base import Array

__all__ = ["HeadCompressor", "MultiHeadCompressor"]

# Tokens that a compressor makes room for at first.
_FIRST_CAPACITY = 16


class _Compressor:
    """What the compressors of one head and of several have in common: encoded keys and values, by head."""

    def __init__(
        self, config: CompressorConfig, num_heads: int, num_q_heads: int, target: str
    ) -> None:
        if not isinstance(config, CompressorConfig):
            raise TypeError(f"`config`: expected a CompressorConfig, got {type(config).__name__}")
        self._config = config
        self._num_q_heads = num_q_heads
        self._target = targets.get(target)
        self._quantiser = quantiser_of(config, num_heads, self._target)
        # The tokens lie in [begin, end) of the buffers.
        self._begin = self._end = 0
        self._keys, self._values = self._allocate(0)

    def _allocate(self, capacity: int) -> tuple[Encoded, Encoded]:
        heads, config = int(self._quantiser.rotation.shape[0]), self._config
        keys = Encoded.allocate(self._target, heads, capacity, config, config.projections or 0)
        return keys, Encoded.allocate(self._target, heads, capacity, config, 0)

    # -- what it is

    @property
    def config(self) -> CompressorConfig:
        """How vectors are compressed."""
        return self._config

    @property
    def target(self) -> str:
        """Name of the target."""
        return self._target.name

    @property
    def capacity(self) -> int:
        """Tokens that the buffers hold now."""
        return int(self._keys.scales.shape[1])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, scales and sketch included."""
        config = self._config
        vector = packed_bytes(config.head_dim, config.bits) + 4
        sketch = packed_bytes(config.projections, 1) + 4 if config.projections else 0
        return int(self._quantiser.rotation.shape[0] * (2 * vector + sketch))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room for further tokens included."""
        buffers = (*self._keys.arrays(), *self._values.arrays())
        return sum(int(x.nbytes) for x in buffers)

    @property
    def quantiser_nbytes(self) -> int:
        """Bytes of the rotations, sketch and codebook, which compressors of equal config and heads share."""
        return self._quantiser.nbytes

    @property
    def compression_ratio(self) -> float:
        """How many times smaller the stored tokens are than in float32; 1.0 when there are none."""
        if self.is_empty:
            return 1.0
        heads = int(self._quantiser.rotation.shape[0])
        return 2 * heads * self._config.head_dim * 4 / self.bytes_per_token

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens."""
        return len(self) == 0

    def __len__(self) -> int:
        return self._end - self._begin

    def _describe(self, heads: str) -> str:
        config = self._config
        sketch = "" if config.projections is None else f", projections={config.projections}"
        return (
            f"{type(self).__name__}(len={len(self)}, {heads}head_dim={config.head_dim}, "
            f"bits={config.bits}{sketch}, seed={config.seed}, target={self.target}, "
            f"bytes_per_token={self.bytes_per_token})"
        )

    # -- which tokens

    def clear(self) -> None:
        """Drop all tokens; memory and quantiser stay."""
        self._begin = self._end = 0

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
        """
        self._begin = max(self._begin, self._end - check_size("n", n))

    def copy(self) -> Self:
        """A deep copy; only the quantiser, which is immutable, is shared.

        Returns
        -------
        HeadCompressor or MultiHeadCompressor
            Of the same class.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._move(self.capacity)
        return new

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def _move(self, capacity: int) -> None:
        """Move the tokens to the start of new buffers."""
        keys, values = self._allocate(capacity)
        if not self.is_empty:
            self._keys.move(self._target, keys, self._begin)
            self._values.move(self._target, values, self._begin)
        self._keys, self._values = keys, values
        self._begin, self._end = 0, len(self)

    # -- checks, in the order of the contract: number of vectors, finite elements, number of elements

    def _vectors(self, name: str, x: Any, shape: Shape) -> Array:
        """Check dtype, rank and number of vectors."""
        x = check_array(self._target, name, x, QUERY_DTYPES, tuple(str(n) for n in shape))
        for expected, actual in zip(shape[:-1], tuple(x.shape)[:-1], strict=True):
            if isinstance(expected, int) and expected != actual:
                raise DimensionMismatch(
                    f"`{name}`: expected {x.dtype} ({', '.join(map(str, shape))}), got "
                    f"{tuple(x.shape)}; pass a vector for each head",
                    expected=expected,
                    actual=int(actual),
                )
        return x

    def _check_finite(self, name: str, x: Array) -> None:
        """Refuse NaN and infinity in vectors ``(num_tokens, num_heads, …)``."""
        kind = kind_of_dtype(x.dtype)
        assert kind is not None
        flat = self._target.ops.first_non_finite(self._target.words(x), kind.name)
        if flat >= 0:
            token, head, i = (int(n) for n in np.unravel_index(flat, tuple(x.shape)))
            raise NonFiniteInput(
                f"`{name}`: expected finite numbers, got NaN or infinity at index {i} of the vector of "
                f"token {token}, head {head}; mask it, or pass check_finite=False",
                index=i,
            )

    def _check_length(self, name: str, x: Array) -> None:
        expected, actual = self._config.head_dim, int(tuple(x.shape)[-1])
        if actual != expected:
            raise DimensionMismatch(
                f"`{name}`: expected vectors of head_dim={expected} elements, got {actual}; pass "
                "vectors of the config's length",
                expected=expected,
                actual=actual,
            )

    # -- writing and reading; arrays are by head

    def _append(
        self, names: tuple[str, str], keys: Array, values: Array, check_finite: bool
    ) -> None:
        """Encode vectors ``(num_tokens, num_heads, head_dim)`` whose numbers have been checked."""
        if check_finite:
            self._check_finite(names[0], keys)
            self._check_finite(names[1], values)
        self._check_length(names[0], keys)
        self._check_length(names[1], values)
        tokens = int(keys.shape[0])
        if self._end + tokens > self.capacity:
            self._move(max(len(self) + tokens, 2 * len(self), _FIRST_CAPACITY))
        quantiser = self._quantiser
        for x, sketch, to in (
            (keys, quantiser.sketch, self._keys),
            (values, quantiser.no_sketch, self._values),
        ):
            kind = kind_of_dtype(x.dtype)
            assert kind is not None
            self._target.ops.encode_rows(
                self._target.words(x), kind.name, quantiser.rotation, quantiser.edges,
                quantiser.levels, sketch, *to.arrays(), self._end,
            )  # fmt: skip
        self._end += tokens

    def _decode(self, encoded: Encoded) -> Array:
        heads, dim = (int(n) for n in self._quantiser.rotation.shape[:2])
        out = self._target.empty((heads, len(self), dim), np.float32)
        if not self.is_empty:
            self._target.ops.decode_rows(
                encoded.codes, encoded.scales, self._begin, self._quantiser.levels,
                self._quantiser.back, out,
            )  # fmt: skip
        return out

    def _query(self, name: str, x: Array, check_finite: bool) -> tuple[Array, str]:
        if check_finite:
            self._check_finite(name, self._target.one_head(x))
        kind = kind_of_dtype(x.dtype)
        assert kind is not None
        return self._target.words(x), kind.name

    def _scores(self, name: str, queries: Array, check_finite: bool) -> Array:
        """Scores ``(num_q_heads, len)`` of queries ``(num_q_heads, …)``."""
        q, q_kind = self._query(name, queries, check_finite)
        out = self._target.empty((self._num_q_heads, len(self)), np.float32)
        if self.is_empty:  # whatever the length of the query
            return out
        self._check_length(name, queries)
        quantiser = self._quantiser
        self._target.ops.score_codes(
            q, q_kind, quantiser.rotation, quantiser.levels, quantiser.sketch, *self._keys.arrays(),
            self._begin, self._end, 1 / math.sqrt(self._config.head_dim), out,
        )  # fmt: skip
        return out

    def _attend(self, name: str, queries: Array, check_finite: bool) -> Array:
        """Outputs ``(num_q_heads, head_dim)`` of queries ``(num_q_heads, …)``."""
        q, q_kind = self._query(name, queries, check_finite)
        self._check_length(name, queries)
        shape = (self._num_q_heads, self._config.head_dim)
        if self.is_empty:
            return self._target.zeros(shape, np.float32)
        out, quantiser = self._target.empty(shape, np.float32), self._quantiser
        self._target.ops.attend_codes(
            q, q_kind, quantiser.rotation, quantiser.back, quantiser.levels, quantiser.sketch,
            *self._keys.arrays(), self._values.codes, self._values.scales, self._begin, self._end,
            1 / math.sqrt(self._config.head_dim), out,
        )  # fmt: skip
        return out


class HeadCompressor(_Compressor):
    """The compressed keys and values of one head.

    Parameters
    ----------
    config : CompressorConfig
        How vectors are compressed.
    target : {"cpu", "cuda"}
        Where the codes are and the kernels run.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> head = numkv.HeadCompressor(numkv.CompressorConfig(head_dim=128, bits=4))
    >>> rows = np.random.default_rng(0).standard_normal((2, 50, 128), dtype=np.float32)
    >>> head.extend(rows[0], rows[1])
    >>> head.attention_scores(rows[0, 0]).shape, round(head.compression_ratio, 2)
    ((50,), 7.53)
    """

    def __init__(self, config: CompressorConfig, *, target: str = "cpu") -> None:
        super().__init__(config, 1, 1, target)

    def __repr__(self) -> str:
        return self._describe("")

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

    def attention_scores(self, query: Any, *, check_finite: bool = True) -> Array:
        """Estimates of ``key . query / sqrt(head_dim)`` for all tokens, without softmax.

        Parameters
        ----------
        query : array (head_dim,)
            Of any float dtype.
        check_finite : bool
            Whether the query is checked for NaN and infinity first; on CUDA that waits for the device.

        Returns
        -------
        float32 array (len,)
            Without a sketch the products with `decode_keys`; with one, unbiased. Empty where there are no tokens,
            whatever the length of the query.

        Raises
        ------
        NonFiniteInput
            If the query holds NaN or infinity.
        DimensionMismatch
            If it has another length.
        UnsupportedDType, NotSupported
            If it has another dtype, layout or target.
        """
        return self._scores("query", self._one_query(query), check_finite).reshape((len(self),))

    def attend(self, query: Any, *, check_finite: bool = True) -> Array:
        """The values, weighted by the softmax of `attention_scores`.

        Parameters
        ----------
        query : array (head_dim,)
            Of any float dtype.
        check_finite : bool
            See `attention_scores`.

        Returns
        -------
        float32 array (head_dim,)
            Zeros where there are no tokens.

        Raises
        ------
        NonFiniteInput, DimensionMismatch, UnsupportedDType, NotSupported
            See `attention_scores`; a query of another length is refused here when there are no tokens too.
        """
        out = self._attend("query", self._one_query(query), check_finite)
        return out.reshape((self._config.head_dim,))

    def _one_query(self, query: Any) -> Array:
        query = self._vectors("query", query, ("head_dim",))
        return query.reshape((1, int(query.shape[0])))

    def decode_keys(self) -> Array:
        """The keys, decoded from their codes; the sketch is not used.

        Returns
        -------
        float32 array (len, head_dim)
        """
        return self._decode(self._keys).reshape((len(self), self._config.head_dim))

    def decode_values(self) -> Array:
        """The values, decoded from their codes.

        Returns
        -------
        float32 array (len, head_dim)
        """
        return self._decode(self._values).reshape((len(self), self._config.head_dim))


class MultiHeadCompressor(_Compressor):
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
        If `num_q_heads` is no multiple of `num_heads`, or one of them is below 1.
    """

    def __init__(
        self,
        num_heads: int,
        config: CompressorConfig,
        *,
        num_q_heads: int | None = None,
        target: str = "cpu",
    ) -> None:
        num_heads = check_size("num_heads", num_heads, 1)
        queries = num_heads if num_q_heads is None else check_size("num_q_heads", num_q_heads, 1)
        if queries % num_heads:
            raise DimensionMismatch(
                f"`num_q_heads`: expected a multiple of num_heads={num_heads}, got {queries}",
                expected=num_heads,
                actual=queries,
            )
        self._num_heads = num_heads
        super().__init__(config, num_heads, queries, target)

    @property
    def num_heads(self) -> int:
        """Kv heads."""
        return self._num_heads

    @property
    def num_q_heads(self) -> int:
        """Q heads."""
        return self._num_q_heads

    def __repr__(self) -> str:
        return self._describe(f"num_heads={self._num_heads}, num_q_heads={self._num_q_heads}, ")

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
        target, shape = self._target, (self._num_heads, "head_dim")
        keys, values = self._vectors("keys", keys, shape), self._vectors("values", values, shape)
        keys, values = (target.token_major(target.one_head(x)) for x in (keys, values))
        self._append(("keys", "values"), keys, values, check_finite)

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
        keys = self._vectors("keys", keys, ("num_tokens", self._num_heads, "head_dim"))
        shape = (int(keys.shape[0]), self._num_heads, "head_dim")
        values = self._vectors("values", values, shape)
        self._append(("keys", "values"), keys, values, check_finite)

    def attention_scores(self, queries: Any, *, check_finite: bool = True) -> Array:
        """Estimates of ``key . query / sqrt(head_dim)`` for all q heads and tokens, without softmax.

        Parameters
        ----------
        queries : array (num_q_heads, head_dim)
            A query for each q head, of any float dtype.
        check_finite : bool
            Whether the queries are checked for NaN and infinity first; on CUDA that waits for the device.

        Returns
        -------
        float32 array (num_q_heads, len)
            Without a sketch the products with `decode_keys`; with one, unbiased. Empty where there are no tokens,
            whatever the length of the queries.

        Raises
        ------
        DimensionMismatch
            If there is another number of q heads, or queries have another length.
        NonFiniteInput
            If a query holds NaN or infinity.
        UnsupportedDType, NotSupported
            If the array has another dtype, layout or target.
        """
        queries = self._vectors("queries", queries, (self._num_q_heads, "head_dim"))
        return self._scores("queries", queries, check_finite)

    def attend(self, queries: Any, *, check_finite: bool = True) -> Array:
        """The values of each q head's kv head, weighted by the softmax of `attention_scores`.

        Parameters
        ----------
        queries : array (num_q_heads, head_dim)
            A query for each q head, of any float dtype.
        check_finite : bool
            See `attention_scores`.

        Returns
        -------
        float32 array (num_q_heads, head_dim)
            Zeros where there are no tokens.

        Raises
        ------
        DimensionMismatch, NonFiniteInput, UnsupportedDType, NotSupported
            See `attention_scores`; queries of another length are refused here when there are no tokens too.
        """
        queries = self._vectors("queries", queries, (self._num_q_heads, "head_dim"))
        return self._attend("queries", queries, check_finite)

    def decode_keys(self) -> Array:
        """The keys, decoded from their codes; the sketch is not used.

        Returns
        -------
        float32 array (num_heads, len, head_dim)
        """
        return self._decode(self._keys)

    def decode_values(self) -> Array:
        """The values, decoded from their codes.

        Returns
        -------
        float32 array (num_heads, len, head_dim)
        """
        return self._decode(self._values)
