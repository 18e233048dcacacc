"""`Buffer`: words of K or of V with scales, kind and rotation; all writes and reads go through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.checks import check_array
from numkv.errors import DimensionMismatch, NonFiniteInput, NotSupported
from numkv.kinds import Kind, float_kind, kinds
from numkv.kinds import kind as named
from numkv.numbers import check_bytes, check_number, is_number
from numkv.storage.hadamard import Rotation
from numkv.targets.base import Array, Target

_FLOAT32 = np.dtype(np.float32)


@dataclass(slots=True)  # a frozen one takes a microsecond longer to make
class Buffer:
    """One side of a cache, K or V. Only the contents of its arrays ever change.

    Attributes
    ----------
    target : Target
        Where it is.
    words : array (num_blocks, num_kv_heads, block_size, words_per_row)
        Stored elements; a word is one element, or two for INT4: see `Kind.unit`.
    scales : array
        Their scales, in words: see `Kind.scale_shape`.
    kind : Kind
        How elements are stored.
    rotation : Rotation or None
        The rotation of rows before they are stored, if any. Words and scales are those of rotated rows. This class
        rotates incoming rows, and rotates outgoing values back.
    """

    target: Target
    words: Array
    scales: Array
    kind: Kind
    rotation: Rotation | None = None

    @classmethod
    def allocate(
        cls, target: Target, shape: tuple[int, int, int], dim: int, kind: Kind, rotate: bool = False
    ) -> Self:
        """Make a buffer of zeros; scales of heads are 1.

        Parameters
        ----------
        target : Target
            Where.
        shape : tuple of int
            ``(num_blocks, num_kv_heads, block_size)``.
        dim : int
            Elements of a row.
        kind : Kind
            How they are stored.
        rotate : bool
            Whether rows are rotated before they are stored.

        Raises
        ------
        DimensionMismatch
            If a row cannot be stored in the kind, or no memory can hold so many.
        MemoryError
            If this machine's does not.
        """
        of_row = kind.words_per_row(dim)
        refuse_rotated_channels(kind, rotate)
        sizes = dict(zip(("num_blocks", "num_kv_heads", "block_size"), shape, strict=True))
        check_bytes(sizes | {"head_dim": dim}, kind.bytes_per_element)
        words = target.zeros((*shape, of_row), kind.word)
        if kind.scales_per == "head":
            scales = target.asarray(np.ones(kind.scale_shape(shape, dim), kind.scale_word))
        else:
            scales = target.zeros(kind.scale_shape(shape, dim), kind.scale_word)
        return cls(target, words, scales, kind, Rotation(dim) if rotate else None)

    def like(self, num_blocks: int, block_size: int | None = None) -> Buffer:
        """A buffer of zeros of this one's kind, heads and width, elsewhere on the target; it shares scales of heads."""
        heads, own_size = int(self.words.shape[1]), int(self.words.shape[2])
        shape = (num_blocks, heads, own_size if block_size is None else block_size)
        made = Buffer.allocate(self.target, shape, self.dim, self.kind, self.rotation is not None)
        return replace(made, scales=self.scales) if self.kind.scales_per == "head" else made

    def with_own_scales(self) -> Buffer:
        """Return a buffer on the same words, with a copy of the scales of heads."""
        if self.kind.scales_per != "head":
            return self
        scales = np.array(self.target.to_host(self.scales))
        return replace(self, scales=self.target.asarray(scales))

    def __reduce__(self) -> Any:
        if not self.target.values_on_host:
            raise NotSupported(
                f"pickle: expected buffers on the CPU, got some of target {self.target.name!r}; save the cache to a "
                "file, or copy its rows to the host"
            )
        return _again, (self.target.name, self.words, self.scales, self.kind, self.rotation)

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.kind.elements_of(int(self.words.shape[3]))

    @property
    def nbytes(self) -> int:
        """Bytes, scales included."""
        return int(self.words.nbytes + self.scales.nbytes)

    # -- scales

    def check_scales(self, name: str, scales: Any) -> np.ndarray[Any, Any]:
        """Check scales for the heads of this buffer, see `check_scales`; `Pool.set_scales` sets them."""
        return check_scales(self.kind, name, scales, int(self.words.shape[1]))

    def typed_scales(self) -> Array:
        """Return the scales as a user sees them, in `Kind.scale_dtype`."""
        return self.target.typed(self.scales, self.kind.scale_dtype)

    def has_sound_scales(self, blocks: NDArray[np.int64], offsets: NDArray[np.int64]) -> bool:
        """Return whether scales of tokens, by block and offset, or those of heads can be such; see `are_scales`."""
        scales = self.target.to_host(self.typed_scales())
        if self.kind.scales_per != "head":
            scales = scales[blocks, :, offsets // max(1, self.kind.group_tokens)]
        return are_scales(self.kind, scales)

    # -- reads

    def elements(self) -> Array:
        """The elements as they are stored, in `Kind.stored_dtype`: floats, or codes."""
        kind = self.kind
        return (
            self.words
            if kind.has_scales and kind.codes_dtype is None
            else self.target.typed(self.words, kind.stored_dtype)
        )

    def rows(self, block: int, part: slice) -> Array:
        """Rows of a block as a user sees them.

        Parameters
        ----------
        block : int
            Which block.
        part : slice
            Which of its tokens.

        Returns
        -------
        array (num_kv_heads, n, dim)
            A view in the kind's dtype; where rows have scales or are rotated a copy in float32 (of fp64 in float64).
        """
        if self.kind.scales_per == "head":
            scales = self.scales.reshape((int(self.scales.shape[0]), 1))
            found = self.target.dequantise(self.kind, self.words[block, :, part], scales)
        elif self.kind.group_tokens:
            first, stop, _ = part.indices(int(self.words.shape[2]))
            slots = np.arange(first, stop) + block * int(self.words.shape[2])
            return self.target.token_major(self.gather(self.target.index(slots, np.int64)))
        elif self.kind.has_scales:
            scales = self.scales[block, :, part]
            found = self.target.dequantise(self.kind, self.words[block, :, part], scales)
        else:
            found = self.elements()[block, :, part]
        return self._rotated_back(found)

    def gather(self, slots: Array) -> Array:
        """Copies of the rows of tokens as a user sees them.

        Parameters
        ----------
        slots : int64 array (n,)
            Where they are, on the target.

        Returns
        -------
        array (n, num_kv_heads, dim)
            In the kind's dtype; where rows have scales or are rotated in float32 (of fp64 in float64).
        """
        target, kind, n = self.target, self.kind, int(slots.shape[0])
        heads, words = int(self.words.shape[1]), int(self.words.shape[3])
        numbers = target.index(np.arange(n), np.int64)
        # Every token is a block of its own.
        copied = target.empty((n, heads, 1, words), kind.word)
        target.ops.copy_tokens(self.words, slots, copied, numbers)
        copied = copied.reshape((n, heads, words))
        if kind.scales_per == "head":
            found = target.dequantise(kind, copied, self.scales.reshape((1, heads)))
        elif kind.has_scales:
            some = max(1, kind.group_tokens)
            if some > 1:  # as many tokens have one place in the array of scales
                slots = target.index(np.asarray(target.to_host(slots)) // some, np.int64)
            shape = kind.scale_shape((n, heads, some), self.dim)
            scales = target.empty(shape, kind.scale_word)
            target.ops.copy_tokens(self.scales, slots, scales, numbers)
            scales = scales.reshape((*shape[:2], *shape[3:]))
            found = target.dequantise(kind, copied, scales)
        else:
            found = target.typed(copied, kind.dtype)
        return self._rotated_back(found)

    def _rotated_back(self, rows: Array) -> Array:
        if self.rotation is None:
            return rows
        return self.rotation.backward(self.target, rows, self.kind.compute)

    # -- writes

    def append(self, rows: Array, block_table: Array, start: int) -> None:
        """Write checked rows of one sequence, by its block table."""
        self.target.ops.append_rows(*self.with_rows(rows), block_table, start)

    def scatter(self, rows: Array, slot_mapping: Array) -> None:
        """Write checked rows into slots."""
        self.target.ops.scatter_rows(*self.with_rows(rows), slot_mapping)

    def with_rows(self, rows: Array) -> tuple[Array, str, Array, str, Array]:
        """Checked rows, rotated if the buffer is, and where they go, as operations take them."""
        rows = self.rotated(rows)
        return self.target.words(rows), source_kind(rows), self.words, self.kind.name, self.scales

    def rotated(self, rows: Array) -> Array:
        """Rows as they are stored, but for their kind: rotated, or as they are."""
        if self.rotation is None:
            return rows
        return self.rotation.forward(self.target, rows, self.kind.compute)

    # -- copies

    def copy_blocks(self, source_ids: Array, to: Buffer, to_ids: Array) -> None:
        """Copy whole blocks to a buffer of the same kind and shape; see `numkv.storage.pool.Pool.copy_blocks`."""
        for source, target in zip(self.by_token(), to.by_token(), strict=True):
            if source.size:
                self.target.ops.copy_blocks(source, source_ids, target, to_ids)

    def copy_tokens(self, source_slots: Array, to: Buffer, to_slots: Array) -> None:
        """Copy the rows of tokens to a buffer of the same kind and heads; slots are on the target.

        Scales of channels go where the first token of their group does: groups stay whole, but for the last.
        """
        some = self.kind.group_tokens
        for source, target in zip(self.by_token(), to.by_token(), strict=True):
            if some and source is self.scales:
                here, there = (np.asarray(self.target.to_host(x)) for x in (source_slots, to_slots))
                begins = here % some == 0
                source_slots, to_slots = (
                    self.target.index(x[begins] // some, np.int64) for x in (here, there)
                )
            if source.size:
                self.target.ops.copy_tokens(source, source_slots, target, to_slots)

    def by_token(self) -> tuple[Array, ...]:
        """Return the arrays that hold something for each token: words, and the scales of rows or of their groups."""
        return (self.words, self.scales) if self.kind.has_scales else (self.words,)

    # -- checks

    def check_rows(self, name: str, rows: Any) -> Array:
        """Check new rows ``(num_tokens, num_kv_heads, dim)``."""
        shape = ("num_tokens", int(self.words.shape[1]), self.dim)
        return check_array(self.target, name, rows, source_dtypes(self.kind), shape)

    def check_finite(self, name: str, rows: Array) -> None:
        """Refuse checked rows that are to be quantised and hold NaN or infinity; float kinds take them."""
        if self.kind.has_scales:
            refuse_non_finite(self.target, name, rows, [(0, self.kind)])


def _again(
    target: str, words: Array, scales: Array, kind: Kind, rotation: Rotation | None
) -> Buffer:
    """A buffer out of a pickle: its target is this process's, and it lies where kernels like it."""
    place = targets.get(target)
    of_words, of_scales = (place.zeros(x.shape, x.dtype) for x in (words, scales))
    of_words[...], of_scales[...] = words, scales
    return Buffer(place, of_words, of_scales, kind, rotation)


def check_scales(kind: Kind, name: str, scales: Any, heads: int | str) -> np.ndarray[Any, Any]:
    """Check scales for the heads of a kind's rows.

    Parameters
    ----------
    kind : Kind
        How the rows are stored.
    name : str
        What errors call the scales.
    scales : float or float32 array (heads,)
        Finite numbers above 0, in host memory.
    heads : int or str
        How many heads there are; a string stands for any number of them, as in `numkv.checks.check_array`.

    Returns
    -------
    float32 array (heads,)
        One for a number where there is any number of heads.

    Raises
    ------
    NotSupported
        If the kind has no scales of heads.
    DimensionMismatch, UnsupportedDType, ValueError
        If they are not such numbers.
    """
    if kind.scales_per != "head":
        raise NotSupported(
            f"`{name}`: expected a kind whose heads have scales (fp8_e4m3, fp8_e5m2), got {kind}; "
            "quantised kinds compute scales themselves"
        )
    return head_scales(name, scales, heads)


def head_scales(name: str, scales: Any, heads: int | str) -> np.ndarray[Any, Any]:
    """Check scales of heads as `check_scales` does, of a kind that has them."""
    if is_number(scales):
        number = check_number(name, scales)
        with np.errstate(over="ignore", under="ignore"):  # infinity and 0 are refused below
            one = np.float64(number).astype(_FLOAT32)
        found = np.full(1 if isinstance(heads, str) else heads, one)
    else:
        # A copy, as they may be a buffer's own, which are set meanwhile.
        found = np.array(check_array(targets.get("cpu"), name, scales, (_FLOAT32,), (heads,)))
        if isinstance(heads, str) and not len(found):
            raise DimensionMismatch(
                f"`{name}`: expected a scale for each head, got none; pass one for each, or a number",
                (heads,), (0,),
            )  # fmt: skip
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise ValueError(
            f"`{name}`: expected finite scales above 0, got {scales}; pass 1.0 for values as they are"
        )
    return found


def refuse_rotated_channels(kind: Kind, rotate: bool) -> None:
    """Refuse to rotate keys whose scales belong to channels."""
    if rotate and kind.group_tokens:
        raise NotSupported(
            f"`rotate`: expected False for keys in {kind}, got True: a rotation mixes the channels, which have scales "
            "of their own instead; leave it out"
        )


def are_scales(kind: Kind, words: np.ndarray[Any, Any]) -> bool:
    """Return whether words in host memory can be scales of a kind: finite and not negative.

    Scales of heads must be above 0. After the scales of channels come their zero points, then numbers of channels.
    """
    fine = kind.fine_channels
    if fine and words.ndim:
        words, wide = words[..., :-fine], words[..., -fine:]
        if (wide >= words.shape[-1] // 2).any():
            return False
    scales = words.view(kind.scale_dtype).astype(_FLOAT32)
    signs = scales > 0 if kind.scales_per == "head" else scales >= 0
    if kind.group_tokens and scales.ndim:
        signs[..., scales.shape[-1] // 2 :] = True
    return bool((signs & np.isfinite(scales)).all())


def refuse_non_finite(
    target: Target, name: str, x: Array, parts: Sequence[tuple[int, Kind]]
) -> None:
    """Refuse NaN and infinity in floats that are to be quantised.

    Parameters
    ----------
    target : Target
        Where it is.
    name : str
        The argument that it is, or is columns of.
    x : array (num_tokens, num_heads, head_dim) or (num_tokens, width)
        Checked floats.
    parts : sequence of tuple of int and Kind
        Columns of the argument from which on it is to be stored in a kind, rising; `x` begins with the first of them.
    """
    if not x.size:
        return
    by_head = x if len(x.shape) == 3 else target.one_head(x)
    flat = target.ops.first_non_finite(target.words(by_head), source_kind(x))
    if flat < 0:
        return
    shape = tuple(x.shape)
    *place, column = (int(i) for i in np.unravel_index(flat, shape))
    column += parts[0][0]
    kind = [of for first, of in parts if first <= column][-1]
    index = (*place, column)
    raise NonFiniteInput(
        f"`{name}`: expected finite numbers for storage in {kind}, got NaN or infinity at {index}; "
        "mask it, or pass check_finite=False",
        index=index,
    )


def source_kind(x: Array) -> str:
    """Name of the kind of checked rows."""
    return float_kind(x.dtype).name


def source_dtypes(kind: Kind) -> tuple[np.dtype[Any], ...]:
    """Dtypes that new rows may have: the kind's own and float32; where values have scales fp32, fp16 and bf16."""
    return _SOURCE_DTYPES[kind.name]


def _sources(kind: Kind) -> tuple[np.dtype[Any], ...]:
    own = [named("fp16").dtype, named("bf16").dtype] if kind.is_scaled else [kind.dtype]
    return tuple(dict.fromkeys([*own, _FLOAT32]))


# By name, as hashing a kind takes longer than the rest of a lookup.
_SOURCE_DTYPES = {kind.name: _sources(kind) for kind in kinds(by_channel=True)}
