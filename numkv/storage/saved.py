"""Rows and blocks as tensors of a snapshot: where they lie in buffers, for writing and for reading.

A file has the rows of a layer's tokens one after another, by kv head, as they are stored, wherever they lie in the
cache: ``k.<layer>`` and ``v.<layer>`` are ``(num_kv_heads, tokens, words)``, their scales ``k_scale.<layer>`` and
``v_scale.<layer>``. Slots without a token are not in the file. Blocks are there whole, with zeros past their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.errors import NumkvError
from numkv.kinds import Kind
from numkv.snapshots.fields import claims, expect
from numkv.snapshots.record import entry
from numkv.snapshots.snapshot import Read, Spec, Tensor
from numkv.storage.buffer import Buffer, are_scales
from numkv.storage.hadamard import Rotation
from numkv.storage.latents import LATENT
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target

Ints = NDArray[np.int64]
#: Side, kind and elements of the rows of a buffer.
Side = tuple[str, Kind, int]

# Runs of rows that are shorter than this are copied together first, as many bytes at a time.
_SHORT_RUN = 16 << 10
_STAGED = 4 << 20
_UNCHECKED = "of rows that were stored with check_finite=False"

# -- entries of records


def v_storage() -> Any:
    """How V is stored: the name of a kind, or ``"latent"``."""
    return entry(lambda f, name, x: LATENT if f.text(name) == LATENT else f.kind(name).name)


def rotation() -> Any:
    """The seed that rows are rotated by, or None; it has to be the one that caches have."""

    def read(fields: Any, name: str, _: Any) -> int | None:
        seed: int | None = fields.optional(name)
        expect(seed is None or seed == Rotation(1).seed, f"rows are rotated by seed {seed}")
        return seed

    return entry(read)


def seed_of(pool: Pool) -> int | None:
    """What `rotation` reads."""
    return None if pool.k_rotation is None else pool.k_rotation.seed


# -- which tensors


def row_specs(
    sides: Sequence[Side], layer: int, heads: int, tokens: int, prefix: str = ""
) -> dict[str, Spec]:
    """The tensors of a layer's rows; names may have something before."""
    specs = {}
    for side, kind, dim in sides:
        with claims(f"a row of {dim} elements"):
            words = kind.words_per_row(dim)
        specs[f"{prefix}{side}.{layer}"] = Spec(kind.word, (heads, tokens, words))
        if kind.is_scaled:
            shape = kind.scale_shape((1, heads, tokens), dim)
            shape = shape if kind.scales_per == "head" else shape[1:]
            specs[f"{prefix}{side}_scale.{layer}"] = Spec(kind.scale_word, shape)
    return specs


def row_bytes(sides: Sequence[Side], heads: int) -> int:
    """Bytes of a token in a layer."""
    with claims("rows"):
        return sum(kind.row_bytes(dim) * heads for _, kind, dim in sides)


def row_tensors(
    pool: Pool, layer: int, slots: Ints, prefix: str = "",
    set_scales: Callable[[str, Buffer, Any], None] | None = None,
) -> list[Tensor]:  # fmt: skip
    """The rows of a layer's K and V, and their scales; their specs are those of `row_specs`.

    Parameters
    ----------
    pool : Pool
        Its buffers.
    layer : int
        The layer.
    slots : int64 array (n,)
        Where its rows lie.
    prefix : str
        What names begin with.
    set_scales : function, optional
        Takes scales of heads that have been read, with their side and buffer; without it the buffer gets them.
    """
    found = []
    for side, buffer in pool.stored:
        sides, heads = [(side, buffer.kind, buffer.dim)], int(buffer.words.shape[1])
        rows: list[Any] = [_Rows(pool.target, buffer.words, slots)]
        if buffer.kind.scales_per == "head":
            rows.append(_HeadScales(side, buffer, set_scales or _set_scales))
        else:
            rows.append(_Rows(pool.target, buffer.scales, slots))
        bad = f"in {prefix}{side}_scale of layer {layer}, {_UNCHECKED}; drop these tokens"
        specs = row_specs(sides, layer, heads, len(slots), prefix)
        for (name, spec), part in zip(specs.items(), rows, strict=False):
            tensor = Tensor(name, spec, part.pieces, part.fill)
            found.append(_checked(tensor, buffer.kind, bad) if part is rows[1] else tensor)
    return found


def block_tensors(
    target: Target, name: str, x: Array, ids: NDArray[Any], fills: NDArray[Any], scales_of: Kind | None = None,
) -> Tensor:  # fmt: skip
    """Blocks of an array ``(num_blocks, num_kv_heads, block_size, …)``, whole and once each.

    Parameters
    ----------
    target : Target
        Where it is.
    name : str
        The tensor's.
    x : array
        The array.
    ids : int array (n,)
        The blocks, which rise.
    fills : int array (n,)
        Tokens in each: what comes after them is none of the sequence's, and is written as zeros.
    scales_of : Kind, optional
        Whose scales they are, if they are scales.
    """
    blocks = _Blocks(target, x, ids, fills)
    shape = (len(ids), *map(int, x.shape[1:]))
    tensor = Tensor(name, Spec(np.dtype(x.dtype), shape), blocks.pieces, blocks.fill)
    if scales_of is None:
        return tensor
    bad = f"among those of {name[0]}, {_UNCHECKED}; remove their sequences"
    return _checked(tensor, scales_of, bad)


def _checked(tensor: Tensor, kind: Kind, bad: str) -> Tensor:
    """Scales that are such when they are written, and when they are read."""

    def pieces() -> Iterator[NDArray[Any]]:
        for piece in tensor.pieces():
            if not are_scales(kind, piece):
                raise NumkvError(f"`cache`: expected finite scales, got NaN or infinity {bad}")
            yield piece

    def fill(read: Read) -> None:
        def checked(arrays: Any) -> None:
            given = list(arrays)
            read(given)
            for x in given:
                check_scales(tensor.name, kind, x)

        tensor.fill(checked)

    return tensor._replace(pieces=pieces, fill=fill)


def check_scales(name: str, kind: Kind, words: NDArray[Any]) -> None:
    """Refuse scales of a file that are none."""
    expect(are_scales(kind, words), f"{name!r} holds NaN, infinity or a negative number")


# -- where their elements lie


@dataclass
class _HeadScales:
    """The scales of a layer's heads."""

    side: str
    buffer: Buffer
    set: Callable[[str, Buffer, Any], None]

    def pieces(self) -> list[NDArray[Any]]:
        return [np.array(self.buffer.target.to_host(self.buffer.scales))]

    def fill(self, read: Read) -> None:
        found = np.empty(tuple(self.buffer.scales.shape), self.buffer.kind.scale_word)
        read([found])
        self.set(self.side, self.buffer, found)


def _set_scales(side: str, buffer: Buffer, scales: NDArray[Any]) -> None:
    buffer.scales[:] = buffer.target.asarray(scales)


@dataclass
class _Rows:
    """Rows in some slots of an array ``(num_blocks, num_kv_heads, block_size, …)``, head by head."""

    target: Target
    x: Array
    slots: Ints

    def pieces(self) -> Iterator[NDArray[Any]]:
        x, slots = self.x, self.slots
        if not self.target.values_on_host and len(slots):
            there = self.target.empty(self._shape, x.dtype)
            own = np.arange(len(slots))
            self._copy(x, slots, there, own)
            x, slots = self.target.to_host(there), own
        x = _by_row(np.asarray(x))
        runs, short = _runs(x, slots)
        for head in range(x.shape[1]):
            if short:
                for blocks, offsets in _steps(x, slots):
                    yield x[blocks, head, offsets]
            else:
                for block, offset, n in runs:
                    yield x[block, head, offset : offset + n]

    def fill(self, read: Read) -> None:
        if not self.target.values_on_host:
            made = np.empty(self._shape, self.x.dtype)
            read([made])
            if made.size:
                own = np.arange(len(self.slots))
                self._copy(self.target.asarray(made), own, self.x, self.slots)
            return
        x = _by_row(np.asarray(self.x))
        runs, short = _runs(x, self.slots)
        for head in range(x.shape[1]):
            if short:
                for blocks, offsets in _steps(x, self.slots):
                    rows = np.empty((len(blocks), x.shape[3]), x.dtype)
                    read([rows])
                    x[blocks, head, offsets] = rows
            else:
                read([x[block, head, offset : offset + n] for block, offset, n in runs])

    @property
    def _shape(self) -> tuple[int, ...]:
        """As one block."""
        return (1, int(self.x.shape[1]), len(self.slots), *map(int, self.x.shape[3:]))

    def _copy(self, source: Array, slots: Ints, to: Array, to_slots: Ints) -> None:
        here, there = (self.target.index(x, np.int64) for x in (slots, to_slots))
        self.target.ops.copy_tokens(source, here, to, there)


def _by_row(x: NDArray[Any]) -> NDArray[Any]:
    """An array of rows, also where a row has one element."""
    return x if x.ndim == 4 else x[..., None]


def _runs(x: NDArray[Any], slots: Ints) -> tuple[list[tuple[int, int, int]], bool]:
    """Slots as runs of neighbours in one block: block, offset, length; whether they are too short to be read alone."""
    if not len(slots):
        return [], False
    size = x.shape[2]
    breaks = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % size == 0)) + 1
    bounds = np.concatenate([[0], breaks, [len(slots)]])
    firsts, lengths = slots[bounds[:-1]], np.diff(bounds)
    runs = list(
        zip((firsts // size).tolist(), (firsts % size).tolist(), lengths.tolist(), strict=True)
    )
    short = len(slots) * x.shape[3] * x.itemsize < _SHORT_RUN * len(runs) and len(runs) > 1
    return runs, short


def _steps(x: NDArray[Any], slots: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Blocks and offsets of slots, of not too many at a time."""
    size, most = x.shape[2], max(1, _STAGED // max(1, x.shape[3] * x.itemsize))
    for i in range(0, len(slots), most):
        part = slots[i : i + most]
        yield part // size, part % size


@dataclass
class _Blocks:
    """Blocks of an array; see `block_tensors`."""

    target: Target
    x: Array
    ids: NDArray[Any]
    fills: NDArray[Any]

    def pieces(self) -> Iterator[NDArray[Any]]:
        x, ids = self.x, self.ids
        if not self.target.values_on_host and len(ids):
            there = self.target.empty((len(ids), *map(int, x.shape[1:])), x.dtype)
            own = np.arange(len(ids))
            self._copy(x, ids, there, own)
            x, ids = self.target.to_host(there), own
        size = int(self.x.shape[2]) if len(ids) else 1
        whole = self.fills >= size
        for first, last, i in _neighbours(ids, ~whole):
            part = np.asarray(x[first:last])  # in pages blocks do not lie together
            if not whole[i]:
                part = part.copy()
                part[:, :, int(self.fills[i]) :] = 0
            yield np.ascontiguousarray(part)

    def fill(self, read: Read) -> None:
        if not self.target.values_on_host:
            made = np.empty((len(self.ids), *map(int, self.x.shape[1:])), self.x.dtype)
            read([made])
            if made.size:
                self._copy(self.target.asarray(made), np.arange(len(self.ids)), self.x, self.ids)
            return
        for first, last, _ in _neighbours(self.ids, np.zeros(len(self.ids), np.bool_)):
            part = self.x[first:last]
            made = part if part.flags.c_contiguous else np.empty(part.shape, part.dtype)
            read([made])
            if made is not part:
                part[...] = made

    def _copy(self, source: Array, ids: NDArray[Any], to: Array, to_ids: NDArray[Any]) -> None:
        here, there = (self.target.index(x, np.int32) for x in (ids, to_ids))
        self.target.ops.copy_blocks(source, here, to, there)


def _neighbours(ids: NDArray[Any], apart: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Blocks as runs of neighbours, but for those that stand apart: first, end, and which of them is the first."""
    ends = np.flatnonzero((np.diff(ids) != 1) | apart[1:] | apart[:-1]) + 1
    for run in np.split(np.arange(len(ids)), ends):
        if len(run):
            yield int(ids[run[0]]), int(ids[run[-1]]) + 1, int(run[0])
