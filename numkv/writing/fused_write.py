"""`Projection`: the checked arguments of a fused write (split, q/k norm, RoPE, write), and that write, to any pool."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from numkv import targets
from numkv.checks import check_apart, check_array, check_writable
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kinds import QUERY_DTYPES, Kind, compute_dtype, float_kind
from numkv.numbers import check_number, check_size
from numkv.storage.buffer import Buffer, refuse_non_finite
from numkv.storage.pool import Pool
from numkv.storage.tables import one_block_each, one_query_each
from numkv.targets.base import Array, Target
from numkv.targets.call import Marker

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class QKMode(enum.IntEnum):
    """The operations on q and k before they are stored; v is always copied."""

    COPY = 0
    """Nothing."""
    NORM_HALF_SPLIT = 1
    """RMS norm, then RoPE on the pairs (i, i + rotary_dim / 2): Qwen3."""
    HALF_SPLIT = 2
    """RoPE on the pairs (i, i + rotary_dim / 2): Llama and Mistral in Hugging Face checkpoints."""
    INTERLEAVED = 3
    """RoPE on the pairs (2i, 2i + 1): Llama in GGUF files."""
    NORM_INTERLEAVED = 4
    """RMS norm, then RoPE on the pairs (2i, 2i + 1)."""

    @property
    def normalises(self) -> bool:
        """Whether q and k are normalised."""
        return self is QKMode.NORM_HALF_SPLIT or self is QKMode.NORM_INTERLEAVED

    @property
    def interleaved(self) -> bool:
        """Whether pairs are neighbours."""
        return self is QKMode.INTERLEAVED or self is QKMode.NORM_INTERLEAVED


#: The number added to the mean square of a row before its root.
DEFAULT_EPS = 1e-6


def check_mode(qk_mode: Any) -> QKMode:
    """Return a mode from its number."""
    number = check_size("qk_mode", qk_mode)
    if number not in QKMode.__members__.values():
        raise ValueError(
            f"`qk_mode`: expected one of {', '.join(f'{int(m)} ({m.name})' for m in QKMode)}, got {number}"
        )
    return QKMode(number)


@functools.cache
def empty(target: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return the empty array that stands for an argument that a mode does not need."""
    return targets.by_key(target).empty(shape, dtype)


class Rotating:
    """The common part of writes of projections and of latents: rotation by tables, or none."""

    __slots__ = ()
    mode: QKMode
    cos: Array

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        raise NotImplementedError

    @property
    def rotates(self) -> bool:
        """Whether something is rotated."""
        return self.mode is not QKMode.COPY

    def check_positions(self, first: int) -> None:
        """Refuse positions, from `first` on, for which the tables have no row."""
        if self.rotates:
            check_positions(self.cos, first, self.num_tokens)


@dataclass(slots=True)  # a frozen one takes a microsecond longer to make
class Projection(Rotating):
    """Checked projections, and what is to happen to them.

    Attributes
    ----------
    qkv : array (num_tokens, (num_q_heads + num_kv_heads) * head_dim + num_kv_heads * head_dim_v)
        The projections.
    kind : Kind
        Their float kind.
    mode : QKMode
        What happens to q and k.
    cos, sin : array (num_positions, rotary_dim / 2)
        Tables; empty where nothing is rotated.
    q_weight, k_weight : array (head_dim,)
        Norm weights in the computing dtype; empty where nothing is normalised.
    eps : float
        Added to the mean square.
    q_out : array (num_tokens, num_q_heads, head_dim)
        Takes q.
    """

    qkv: Array
    kind: Kind
    mode: QKMode
    cos: Array
    sin: Array
    q_weight: Array
    k_weight: Array
    eps: float
    q_out: Array

    @classmethod
    def check(
        cls, pool: Pool, qkv: Any, num_q_heads: int, cos: Any, sin: Any, qk_mode: QKMode | int,
        q_norm_weight: Any, k_norm_weight: Any, eps: Any, q_out: Any,
    ) -> Self:  # fmt: skip
        """Check the arguments of a fused write; see `numkv.ContiguousLayer.write`."""
        if pool.is_latent:
            raise NotSupported(
                "`write`: expected a cache of K and V, got one of latents; call write_latents, or append"
            )
        target = pool.target
        mode = qk_mode if type(qk_mode) is QKMode else check_mode(qk_mode)
        heads = check_size("num_q_heads", num_q_heads)
        kv_heads, dim = int(pool.k.shape[1]), pool.head_dim
        if kv_heads == 0 or heads % kv_heads:
            raise DimensionMismatch(
                f"`num_q_heads`: expected a multiple of num_kv_heads={kv_heads}, got {heads}",
                expected=kv_heads,
                actual=heads,
            )
        eps = check_number("eps", eps, 0.0, default=DEFAULT_EPS)
        width = (heads + kv_heads) * dim + kv_heads * pool.head_dim_v
        qkv = check_array(target, "qkv", qkv, QUERY_DTYPES, ("num_tokens", width))
        kind = float_kind(qkv.dtype)
        compute = compute_dtype(kind.name, pool.k_kind.name, pool.v_kind.name)
        if mode is QKMode.COPY:
            cos = sin = empty(target.key, (0, 0), _FLOAT32)
        else:
            cos, sin = check_tables(target, cos, sin, mode, dim)
        q_weight = k_weight = empty(target.key, (0,), compute)
        if mode.normalises:
            weights = {"q_norm_weight": q_norm_weight, "k_norm_weight": k_norm_weight}
            for name, weight in weights.items():
                if weight is None:
                    raise DimensionMismatch(
                        f"`{name}`: expected {compute} ({dim},) for qk_mode {mode}, got None; "
                        "pass the model's weights",
                        expected=(dim,),
                    )
                weights[name] = target.reals(name, weight, compute, (dim,))
            q_weight, k_weight = weights.values()
        shape = (int(qkv.shape[0]), heads, dim)
        if q_out is None:
            q_out = target.empty(shape, qkv.dtype)
        else:
            q_out = check_array(target, "q_out", q_out, (qkv.dtype,), shape)
            check_writable("q_out", q_out)
        read = {
            "qkv": qkv,
            "cos": cos,
            "sin": sin,
            "q_norm_weight": q_weight,
            "k_norm_weight": k_weight,
        }
        check_apart(target, pool.written() | {"q_out": q_out}, read)
        return cls(qkv, kind, mode, cos, sin, q_weight, k_weight, eps, q_out)

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return int(self.qkv.shape[0])

    def check_finite(self, pool: Pool) -> None:
        """Refuse NaN and infinity in those of k and v that the pool quantises; q may hold anything."""
        if not (pool.k_kind.has_scales or pool.v_kind.has_scales):
            return
        # They lie side by side, so one look is enough for both.
        k_first = int(self.q_out.shape[1]) * pool.head_dim
        v_first = k_first + int(pool.k.shape[1]) * pool.head_dim
        sides = ((k_first, pool.k_kind), (v_first, pool.v_kind))
        parts = [(column, kind) for column, kind in sides if kind.has_scales]
        stop = int(self.qkv.shape[1]) if pool.v_kind.has_scales else v_first
        refuse_non_finite(pool.target, "qkv", self.qkv[:, parts[0][0] : stop], parts)

    def write(self, pool: Pool, block_table: Array, start: int, first: int, look: int = 0) -> None:
        """Write one sequence's new tokens, and q to `q_out`.

        Parameters
        ----------
        pool : Pool
            What the arguments were checked for.
        block_table : int32 array (max_blocks,)
            The sequence's blocks.
        start : int
            Position of the first new token.
        first : int
            Row of `cos` and `sin` for it.
        look : int
            What `watch` gave.
        """
        ops = pool.target.ops
        if not pool.rotate:
            self._run(ops.write_rows, first, pool, block_table, start, look=look)
        elif self.num_tokens:
            aside = self._aside(pool)
            self._run(ops.write_rows, first, aside, one_block_each(pool.target.device_key, 1)[0], 0)
            pool.append(*_rows_of(aside), block_table, start, look)

    def watch(self, pool: Pool, marker: Marker | None = None) -> int:
        """Have the kernel look for NaN and infinity in what it quantises; see `Pool.watch`."""
        if pool.target.values_on_host or not (pool.k_kind.has_scales or pool.v_kind.has_scales):
            return 0
        if pool.rotate:
            heads, tokens = int(pool.k.shape[1]), self.num_tokens
            shapes = (tokens, heads, pool.head_dim), (tokens, heads, pool.head_dim_v)
            return _watch_rows(pool, *shapes, marker)
        shape = tuple(self.qkv.shape)
        of_k, of_v = (("qkv", shape, kind, 2) for kind in (pool.k_kind, pool.v_kind))
        return pool.target.watch(of_k, of_v, marker)

    def watch_rows(self, pool: Pool, k: Array, v: Array, marker: Marker) -> int:
        """The same where rows of K and V are looked at that have been made of projections, some of these or all."""
        if pool.target.values_on_host or not (pool.k_kind.has_scales or pool.v_kind.has_scales):
            return 0
        return _watch_rows(pool, tuple(k.shape), tuple(v.shape), marker)

    def scatter(self, pool: Pool, slot_mapping: Array, positions: Array, look: int = 0) -> None:
        """Write the new tokens of many sequences, and q to `q_out`.

        Parameters
        ----------
        pool : Pool
            What the arguments were checked for.
        slot_mapping : int64 array (num_tokens,)
            Where each token goes; -1 leaves its K and V out.
        positions : int64 array (num_tokens,)
            Row of `cos` and `sin` for each.
        look : int
            What `watch` gave.
        """
        ops, target = pool.target.ops, pool.target
        if not pool.rotate and not pool.by_channel:
            self._run(ops.scatter_write, positions, pool, slot_mapping, look=look)
        elif self.num_tokens:
            aside = self._aside(pool)
            if target.values_on_host:
                slots = target.index(np.arange(self.num_tokens), np.int64)
            else:  # 0, 1, ...; nothing goes up where calls repeat or are captured
                slots = one_query_each(target.device_key, self.num_tokens - 1)
            self._run(ops.scatter_write, positions, aside, slots)
            pool.scatter(*_rows_of(aside), slot_mapping, look)

    def _run(self, write: Any, angles: Any, pool: Pool, *places: Any, look: int = 0) -> None:
        words = pool.target.words
        write(
            words(self.qkv), self.kind.name, self.cos, self.sin,
            (self.mode.normalises, self.rotates, self.mode.interleaved), self.q_weight, self.k_weight, self.eps, angles,
            words(self.q_out), pool.k, pool.k_kind.name, pool.k_scale, pool.v, pool.v_kind.name,
            pool.v_scale, *places, look,
        )  # fmt: skip

    def _aside(self, pool: Pool) -> Pool:
        """One block for the new tokens, in which nothing is rounded before it is rotated."""
        kind = float_kind(self.q_weight.dtype)
        target, shape = pool.target, (1, int(pool.k.shape[1]), self.num_tokens)
        sides = []
        # Not zeros, for which CUDA waits: each row is written.
        for dim in (pool.head_dim, pool.head_dim_v):
            words = target.empty((*shape, kind.words_per_row(dim)), kind.word)
            scales = target.empty(kind.scale_shape(shape, dim), kind.scale_word)
            sides.append(Buffer(target, words, scales, kind, None))
        return Pool(*sides)


def _watch_rows(pool: Pool, k: tuple[int, ...], v: tuple[int, ...], marker: Marker | None) -> int:
    """See `Projection.watch`; norm and rotation spread what is not finite, so that the token is told alone."""
    return pool.target.watch(("qkv", k, pool.k_kind, 1), ("qkv", v, pool.v_kind, 1), marker)


def _rows_of(block: Pool) -> tuple[Array, Array]:
    """K and V of a pool of one block, by token."""
    k, v = (block.target.token_major(block.rows(which, 0, slice(None))) for which in "kv")
    return k, v


def check_positions(cos: Array, first: int, num_tokens: int) -> None:
    """Refuse positions, from `first` on, for which tables have no row."""
    if num_tokens and not 0 <= first <= cos.shape[0] - num_tokens:
        raise IndexError(
            f"`cos`: expected a row for each of the positions [{first}, {first + num_tokens}), "
            f"got {cos.shape[0]} rows; make the tables longer"
        )


def check_tables(
    target: Target, cos: Any, sin: Any, mode: QKMode, head_dim: int
) -> tuple[Array, Array]:
    """Check tables for a mode that rotates, of at most `head_dim` elements."""
    if cos is None or sin is None:
        name = "cos" if cos is None else "sin"
        raise DimensionMismatch(
            f"`{name}`: expected float32 (num_positions, rotary_dim / 2) for qk_mode "
            f"{mode}, got None; pass the model's table",
            expected=("num_positions", "rotary_dim / 2"),
        )
    shape = ("num_positions", "rotary_dim / 2")
    cos = check_array(target, "cos", cos, (_FLOAT32, _FLOAT64), shape)
    sin = check_array(target, "sin", sin, (cos.dtype,), tuple(cos.shape))
    if 2 * cos.shape[1] > head_dim:
        raise DimensionMismatch(
            f"`cos`: expected at most head_dim / 2 = {head_dim // 2} columns, got {cos.shape[1]}; "
            + (
                f"each angle is there twice, as in transformers' tables: pass cos[:, :{head_dim // 2}]"
                if cos.shape[1] == head_dim
                else "pass rotary_dim / 2 columns"
            ),
            expected=head_dim // 2,
            actual=int(cos.shape[1]),
        )
    return cos, sin
