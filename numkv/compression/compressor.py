"""Compressed heads: keys and values as codes of a few bits, and attention that reads nothing else.

What is stored for a vector, and how it is read, is on top of `numkv.kernels.cpu.compress`. A compressor grows as tokens
come; what it shares with others of the same config, the rotations and the codebook, is made once.
"""

from __future__ import annotations

import math
import operator
import weakref
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from numkv import targets
from numkv.checks import Shape, check_array, check_size
from numkv.compression.codebook import MAX_BITS, edges_between, levels_for, mean_magnitude
from numkv.compression.haar import haar, stream
from numkv.errors import DimensionMismatch, NonFiniteInput
from numkv.kinds import FLOAT_DTYPES, kind_of_dtype
from numkv.rows.codes import packed_bytes
from numkv.targets.base import Array, Target

__all__ = ["CompressorConfig", "HeadCompressor", "MultiHeadCompressor"]

# Tokens that a compressor makes room for at first.
_FIRST_CAPACITY = 16
# What a stream of random numbers is for.
_ROTATION, _SKETCH = 0, 1


@dataclass(frozen=True)
class CompressorConfig:
    """How vectors are compressed.

    Attributes
    ----------
    head_dim : int
        Elements of a vector, at least 1.
    bits : int
        Bits that an element takes, 1 to 16. At 4, head dim 128, a vector takes 68 bytes instead of 512, and its
        relative mean squared error is 0.0093; with each bit more, about a quarter of that.
    projections : int, optional
        Signs in the sketch of what the codes of a key leave over, which makes `attention_scores` unbiased; a bit each,
        and 4 bytes. As many as `head_dim` nearly halve the mean squared error of scores at 4 bits; an eighth of that
        makes it eleven times larger, as few signs are noisy. Where a bias does no harm, a bit more an element is
        better use of the room. None for no sketch.
    seed : int
        Seed of the rotations and the sketch, from 0 up.

    Raises
    ------
    ValueError
        If a number is out of range, or no integer.
    """

    head_dim: int
    bits: int = 4
    projections: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_integer("head_dim", self.head_dim, 1)
        _check_integer("bits", self.bits, 1, MAX_BITS)
        if self.projections is not None:
            _check_integer("projections", self.projections, 1)
        _check_integer("seed", self.seed, 0)


def _check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    bounds = f"of at least {least}" if most is None else f"in [{least}, {most}]"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise ValueError(f"`{name}`: expected an integer {bounds}, got {value!r}")


@dataclass(frozen=True, eq=False)
class _Quantiser:
    """The codebook, and each head's random matrices, on a target; nothing of it ever changes.

    Attributes
    ----------
    levels, edges : float32 array (2 ** bits,), (2 ** bits - 1,)
        The codebook.
    rotation, back : float32 array (num_heads, head_dim, head_dim)
        Random rotations, and their transposes.
    sketch, no_sketch : float32 array (num_heads, head_dim, projections), (num_heads, head_dim, 0)
        Random directions in the columns, scaled so that the sum over the signs needs no further factor.
    """

    levels: Array
    edges: Array
    rotation: Array
    back: Array
    sketch: Array
    no_sketch: Array

    @classmethod
    def make(cls, config: CompressorConfig, num_heads: int, target: Target) -> Self:
        dim, projections = config.head_dim, config.projections or 0
        rotation = np.empty((num_heads, dim, dim))
        sketch = np.empty((num_heads, dim, projections))
        for h in range(num_heads):
            rotation[h] = haar(dim, stream(config.seed, h, _ROTATION))
            # Orthogonal directions, as many as there are, estimate better than independent ones.
            random = stream(config.seed, h, _SKETCH)
            for first in range(0, projections, dim):
                count = min(dim, projections - first)
                sketch[h, :, first : first + count] = haar(dim, random)[:, :count]
        if projections:
            sketch /= projections * mean_magnitude(dim)
        levels = levels_for(dim, config.bits)

        def here(x: np.ndarray[Any, Any]) -> Array:
            return target.asarray(np.ascontiguousarray(x, np.float32))

        return cls(
            here(levels),
            here(edges_between(levels)),
            here(rotation),
            here(rotation.transpose(0, 2, 1)),
            here(sketch),
            target.empty((num_heads, dim, 0), np.float32),
        )

    @property
    def nbytes(self) -> int:
        arrays = (self.levels, self.edges, self.rotation, self.back, self.sketch)
        return sum(int(x.nbytes) for x in arrays)


# As long as a compressor uses them.
_quantisers: weakref.WeakValueDictionary[Any, _Quantiser] = weakref.WeakValueDictionary()


def _quantiser(config: CompressorConfig, num_heads: int, target: Target) -> _Quantiser:
    """The quantiser of a config: the same object for all compressors that need the same one."""
    key = (config, num_heads, target.name)
    found = _quantisers.get(key)
    if found is None:
        found = _quantisers[key] = _Quantiser.make(config, num_heads, target)
    return found


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Buffers of encoded vectors; see `numkv.kernels.cpu.compress.encode_rows`."""

    codes: Array
    scales: Array
    signs: Array
    residuals: Array

    @classmethod
    def allocate(
        cls,
        target: Target,
        num_heads: int,
        capacity: int,
        config: CompressorConfig,
        projections: int,
    ) -> Self:
        row = packed_bytes(config.head_dim, config.bits)
        return cls(
            target.zeros((num_heads, capacity, row), np.uint8),
            target.zeros((num_heads, capacity), np.float32),
            target.zeros((num_heads, capacity, packed_bytes(projections, 1)), np.uint8),
            target.zeros((num_heads, capacity if projections else 0), np.float32),
        )

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        return self.codes, self.scales, self.signs, self.residuals

    def move(self, target: Target, to: _Encoded, begin: int) -> None:
        """Copy the tokens from `begin` on to the start of other buffers."""
        offset = target.index(np.array([-begin]), np.int64)
        for source, there in zip(self.arrays(), to.arrays(), strict=True):
            if source.size:
                width = source.shape[2] if len(source.shape) == 3 else 1
                shapes = [(1, *x.shape[:2], width) for x in (source, there)]
                target.ops.copy_rows(source.reshape(shapes[0]), there.reshape(shapes[1]), offset)


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
        self._quantiser = _quantiser(config, num_heads, self._target)
        # The tokens lie in [begin, end) of the buffers.
        self._begin = self._end = 0
        self._keys, self._values = self._allocate(0)

    def _allocate(self, capacity: int) -> tuple[_Encoded, _Encoded]:
        heads, config = int(self._quantiser.rotation.shape[0]), self._config
        keys = _Encoded.allocate(self._target, heads, capacity, config, config.projections or 0)
        return keys, _Encoded.allocate(self._target, heads, capacity, config, 0)

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
        """Bytes of the buffers, room for tokens to come included."""
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
        """Keep the last tokens only.

        Parameters
        ----------
        n : int
            How many to keep; if there are fewer, all stay.

        Raises
        ------
        DimensionMismatch
            If `n` is negative.
        """
        self._begin = max(self._begin, self._end - check_size("n", n))

    def copy(self) -> Self:
        """A deep copy; only the quantiser, which nothing changes, is shared.

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
        x = check_array(self._target, name, x, FLOAT_DTYPES, tuple(str(n) for n in shape))
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

    def _decode(self, encoded: _Encoded) -> Array:
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
            Whether the vectors are looked at first; on CUDA that waits for the device.

        Raises
        ------
        NonFiniteInput
            If a vector holds NaN or infinity, whatever its length; `index` says where. The key is looked at first.
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
            Whether the query is looked at first; on CUDA that waits for the device.

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
        """What the codes say that the keys were, without the sketch.

        Returns
        -------
        float32 array (len, head_dim)
        """
        return self._decode(self._keys).reshape((len(self), self._config.head_dim))

    def decode_values(self) -> Array:
        """What the codes say that the values were.

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
        If the q heads cannot be shared out, or a number of heads is below 1.
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
            Whether the vectors are looked at first; on CUDA that waits for the device.

        Raises
        ------
        DimensionMismatch
            If there is another number of heads, or (after the look for NaN) vectors have another length.
        NonFiniteInput
            If a vector holds NaN or infinity; `index` is the position in its head's vector. Keys are looked at first.
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
            Whether the queries are looked at first; on CUDA that waits for the device.

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
        """What the codes say that the keys were, without the sketch.

        Returns
        -------
        float32 array (num_heads, len, head_dim)
        """
        return self._decode(self._keys)

    def decode_values(self) -> Array:
        """What the codes say that the values were.

        Returns
        -------
        float32 array (num_heads, len, head_dim)
        """
        return self._decode(self._values)
