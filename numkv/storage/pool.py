"""`Pool`: the K and V buffers of a cache as kernels take them, and what every write and read of them goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv.checks import check_array
from numkv.errors import DimensionMismatch, NonFiniteInput
from numkv.kinds import Kind, kind_of_dtype, kinds
from numkv.kinds import kind as named
from numkv.storage.hadamard import Rotation
from numkv.targets.base import Array, Target

__all__ = ["Pool", "refuse_non_finite", "source_dtypes"]

_FLOAT32 = np.dtype(np.float32)


@dataclass(slots=True)  # a frozen one takes a microsecond longer to make
class Pool:
    """K and V buffers with their kinds and scales; never changed, but for what the buffers hold.

    Attributes
    ----------
    target : Target
        Where the buffers are.
    k, v : array (num_blocks, num_kv_heads, block_size, words_per_row)
        Buffers, in words; a word is an element, of INT4 two.
    k_kind, v_kind : Kind
        Their kinds.
    k_scale, v_scale : array
        Scales of quantised kinds, in words: see `Kind.scale_shape`.
    k_rotation, v_rotation : Rotation or None
        How stored rows of K and of V are rotated, both or neither. Buffers and scales are those of rotated rows; rows
        that go in are rotated here, and what comes out as values is turned back.
    """

    target: Target
    k: Array
    v: Array
    k_kind: Kind
    v_kind: Kind
    k_scale: Array
    v_scale: Array
    k_rotation: Rotation | None = None
    v_rotation: Rotation | None = None

    @classmethod
    def allocate(
        cls,
        target: Target,
        shape: tuple[int, int, int],
        head_dim: int,
        head_dim_v: int,
        k_kind: Kind,
        v_kind: Kind,
        rotate: bool = False,
    ) -> Self:
        """Make buffers of zeros.

        Parameters
        ----------
        target : Target
            Where.
        shape : tuple of int
            ``(num_blocks, num_kv_heads, block_size)``.
        head_dim, head_dim_v : int
            Elements of a K row and of a V row.
        k_kind, v_kind : Kind
            Their kinds.
        rotate : bool
            Whether rows are rotated before they are stored.

        Returns
        -------
        Pool

        Raises
        ------
        DimensionMismatch
            If a row cannot be stored in its kind.
        """
        of_k, of_v = k_kind.words_per_row(head_dim), v_kind.words_per_row(head_dim_v)
        return cls(
            target,
            target.zeros((*shape, of_k), k_kind.word),
            target.zeros((*shape, of_v), v_kind.word),
            k_kind,
            v_kind,
            target.zeros(k_kind.scale_shape(shape, head_dim), k_kind.scale_word),
            target.zeros(v_kind.scale_shape(shape, head_dim_v), v_kind.scale_word),
            Rotation(head_dim) if rotate else None,
            Rotation(head_dim_v) if rotate else None,
        )

    @property
    def head_dim(self) -> int:
        """Elements of a K row."""
        return int(self.k.shape[3]) * self.k_kind.elements_per_word

    @property
    def head_dim_v(self) -> int:
        """Elements of a V row."""
        return int(self.v.shape[3]) * self.v_kind.elements_per_word

    @property
    def rotate(self) -> bool:
        """Whether rows are rotated before they are stored."""
        return self.k_rotation is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, scales included."""
        return int(self.k.nbytes + self.v.nbytes + self.k_scale.nbytes + self.v_scale.nbytes)

    def copy_blocks(self, source_ids: Array, to: Pool, to_ids: Array) -> None:
        """Copy whole blocks, scales included, to a pool of the same kinds and shapes, which may be this one.

        Parameters
        ----------
        source_ids, to_ids : int32 array (n,)
            Blocks of this pool, and of the other, on the target.
        to : Pool
            Where they go.
        """
        for source, target in zip(self._buffers(), to._buffers(), strict=True):
            if source.size:
                self.target.ops.copy_blocks(source, source_ids, target, to_ids)

    def move_tokens(self, source_slots: NDArray[np.int64], to_slots: NDArray[np.int64]) -> None:
        """Move the rows of tokens as they are stored, scales included.

        Parameters
        ----------
        source_slots, to_slots : int64 array (n,)
            Where each token is, and where it goes, on the host; no pair writes to a slot that a later pair reads.
        """
        here, there = (self.target.index(slots, np.int64) for slots in (source_slots, to_slots))
        for buffer in self._buffers():
            if buffer.size:
                self.target.ops.copy_tokens(buffer, here, buffer, there)

    def copy_tokens(
        self, source_slots: NDArray[np.int64], to: Pool, to_slots: NDArray[np.int64]
    ) -> None:
        """Copy the rows of tokens as they are stored, scales included, to another pool of the same kinds and heads.

        Parameters
        ----------
        source_slots, to_slots : int64 array (n,)
            Where each token is, and where it goes, on the host.
        to : Pool
            The other pool, on the same target.
        """
        here, there = (self.target.index(slots, np.int64) for slots in (source_slots, to_slots))
        for source, target in zip(self._buffers(), to._buffers(), strict=True):
            if source.size:
                self.target.ops.copy_tokens(source, here, target, there)

    def _buffers(self) -> tuple[Array, Array, Array, Array]:
        return self.k, self.v, self.k_scale, self.v_scale

    def like(self, num_blocks: int) -> Pool:
        """A pool of as many blocks, of this one's kinds and shapes, elsewhere on the target."""
        shape = (num_blocks, int(self.k.shape[1]), int(self.k.shape[2]))
        kinds = (self.k_kind, self.v_kind)
        return Pool.allocate(
            self.target, shape, self.head_dim, self.head_dim_v, *kinds, self.rotate
        )

    def from_host(self, buffers: tuple[np.ndarray[Any, Any], ...]) -> Pool:
        """A pool of this one's kinds on the target, with the content of `to_host`."""
        k, v, k_scale, v_scale = (self.target.asarray(x) for x in buffers)
        return replace(self, k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def to_host(self) -> tuple[np.ndarray[Any, Any], ...]:
        """All buffers in host memory."""
        return tuple(self.target.to_host(x) for x in self._buffers())

    def values(self, which: str) -> Array:
        """The K or V buffer as it is stored: float kinds in their dtype, quantised kinds as codes."""
        words, kind = (self.k, self.k_kind) if which == "k" else (self.v, self.v_kind)
        return words if kind.has_scales else self.target.typed(words, kind.dtype)

    def rows(self, which: str, block: int, part: slice) -> Array:
        """Rows of a block as a user sees them.

        Parameters
        ----------
        which : {"k", "v"}
            K or V.
        block : int
            Which block.
        part : slice
            Which of its tokens.

        Returns
        -------
        array (num_kv_heads, n, dim)
            A view in the kind's dtype; where rows are quantised or rotated a copy in float32 (of fp64 in float64).
        """
        scale, kind, rotation = self.k_scale, self.k_kind, self.k_rotation
        if which == "v":
            scale, kind, rotation = self.v_scale, self.v_kind, self.v_rotation
        found = self.values(which)[block, :, part]
        if kind.has_scales:
            found = self.target.dequantise(kind, found, scale[block, :, part])
        if rotation is not None:
            found = rotation.backward(self.target, found, kind.compute)
        return found

    def scales(self, which: str) -> Array:
        """The scales of K or of V as a user sees them, in `Kind.scale_dtype`."""
        scale, kind = (self.k_scale, self.k_kind) if which == "k" else (self.v_scale, self.v_kind)
        return self.target.typed(scale, kind.scale_dtype)

    def check_finite(self, **rows: Array) -> None:
        """Refuse rows that are to be quantised and hold NaN or infinity.

        Parameters
        ----------
        rows : array (num_tokens, num_heads, head_dim)
            Checked rows, by argument name.
        """
        for name, x in rows.items():
            of_k = name == "k" or not self.v_kind.has_scales
            refuse_non_finite(self.target, name, x, (self.k_kind if of_k else self.v_kind,))

    def append(self, k: Array, v: Array, block_table: Array, start: int) -> None:
        """Write checked rows of one sequence, by its block table."""
        ops, words = self.target.ops, self.target.words
        k, v = self.stored_k(k), self.stored_v(v)
        ops.append_rows(
            words(k), _source(k), self.k, self.k_kind.name, self.k_scale, block_table, start
        )
        ops.append_rows(
            words(v), _source(v), self.v, self.v_kind.name, self.v_scale, block_table, start
        )

    def scatter(self, k: Array, v: Array, slot_mapping: Array) -> None:
        """Write checked rows into slots."""
        ops, words = self.target.ops, self.target.words
        self.scatter_k(k, slot_mapping)
        v = self.stored_v(v)
        ops.scatter_rows(words(v), _source(v), self.v, self.v_kind.name, self.v_scale, slot_mapping)

    def scatter_k(self, k: Array, slot_mapping: Array) -> None:
        """Write checked keys into slots."""
        ops, words = self.target.ops, self.target.words
        k = self.stored_k(k)
        ops.scatter_rows(words(k), _source(k), self.k, self.k_kind.name, self.k_scale, slot_mapping)

    def gather_k(self, slots: Array) -> Array:
        """Copies of the keys of tokens as a user sees them.

        Parameters
        ----------
        slots : int64 array (n,)
            Where they are, on the target.

        Returns
        -------
        array (n, num_kv_heads, head_dim)
            In the kind's dtype; where keys are quantised or rotated in float32 (of fp64 in float64).
        """
        target, kind, n = self.target, self.k_kind, int(slots.shape[0])
        heads, words = int(self.k.shape[1]), int(self.k.shape[3])
        numbers = target.index(np.arange(n), np.int64)
        # Every token is a block of its own.
        copied = target.empty((n, heads, 1, words), kind.word)
        target.ops.copy_tokens(self.k, slots, copied, numbers)
        copied = copied.reshape((n, heads, words))
        if kind.has_scales:
            shape = kind.scale_shape((n, heads, 1), self.head_dim)
            scale = target.empty(shape, kind.scale_word)
            target.ops.copy_tokens(self.k_scale, slots, scale, numbers)
            scale = scale.reshape(kind.scale_shape((n, heads), self.head_dim))
            keys = target.dequantise(kind, copied, scale)
        else:
            keys = target.typed(copied, kind.dtype)
        if self.k_rotation is not None:
            keys = self.k_rotation.backward(target, keys, kind.compute)
        return keys

    def stored_k(self, k: Array) -> Array:
        """Rows of K as they are stored, but for their kind: rotated, or as they are."""
        if self.k_rotation is None:
            return k
        return self.k_rotation.forward(self.target, k, self.k_kind.compute)

    def stored_v(self, v: Array) -> Array:
        """Rows of V, like `stored_k`."""
        if self.v_rotation is None:
            return v
        return self.v_rotation.forward(self.target, v, self.v_kind.compute)

    def check_rows(self, k: Any, v: Any, *, check_finite: bool) -> tuple[Array, Array]:
        """Check new rows ``(num_tokens, num_kv_heads, head_dim)`` of K and V."""
        heads = int(self.k.shape[1])
        shape = ("num_tokens", heads, self.head_dim)
        k = check_array(self.target, "k", k, source_dtypes(self.k_kind), shape)
        v = check_array(
            self.target,
            "v",
            v,
            source_dtypes(self.v_kind),
            ("num_tokens", heads, self.head_dim_v),
        )
        if v.shape[0] != k.shape[0]:
            raise DimensionMismatch(
                f"`v`: expected as many tokens as `k`, {k.shape[0]}, got {v.shape[0]}",
                expected=int(k.shape[0]),
                actual=int(v.shape[0]),
            )
        if check_finite:
            quantised = {"k": k} if self.k_kind.has_scales else {}
            if self.v_kind.has_scales:
                quantised["v"] = v
            self.check_finite(**quantised)
        return k, v


def refuse_non_finite(
    target: Target, name: str, x: Array, kinds: Sequence[Kind], first: int = 0
) -> None:
    """Refuse an array that is to be quantised and holds NaN or infinity.

    Parameters
    ----------
    target : Target
        Where it is.
    name : str
        The argument that it is, or is columns of.
    x : array (num_tokens, num_heads, head_dim) or (num_tokens, width)
        Checked floats.
    kinds : sequence of Kind
        What its columns, in as many equal parts, are to be stored in.
    first : int
        Column of the argument that its first one is.
    """
    by_head = x if len(x.shape) == 3 else target.one_head(x)
    flat = target.ops.first_non_finite(target.words(by_head), _source(x))
    if flat < 0:
        return
    shape = tuple(x.shape)
    *place, column = (int(i) for i in np.unravel_index(flat, shape))
    kind = kinds[column * len(kinds) // shape[-1]]
    index = (*place, first + column)
    raise NonFiniteInput(
        f"`{name}`: expected finite numbers for storage in {kind}, got NaN or infinity at {index}; "
        "mask it, or pass check_finite=False",
        index=index,
    )


def _source(x: Array) -> str:
    kind = kind_of_dtype(x.dtype)
    assert kind is not None
    return kind.name


def source_dtypes(kind: Kind) -> tuple[np.dtype[Any], ...]:
    """Dtypes that new rows may have: the kind's own and float32; for quantised kinds fp32, fp16 and bf16."""
    return _SOURCE_DTYPES[kind.name]


def _sources(kind: Kind) -> tuple[np.dtype[Any], ...]:
    own = [named("fp16").dtype, named("bf16").dtype] if kind.has_scales else [kind.dtype]
    return tuple(dict.fromkeys([*own, _FLOAT32]))


# By name, as the hash of a kind takes longer than all the rest of a look-up.
_SOURCE_DTYPES = {kind.name: _sources(kind) for kind in kinds()}
