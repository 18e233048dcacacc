"""Places of a tensor's elements in arrays: rows in slots, and whole blocks.

Both yield memory piece by piece for writing, and scatter elements piece by piece when a file is read. On the host these
pieces are views of the array; on a device one copy of the saved part comes between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.errors import NumkvError
from numkv.snapshots.fields import expect
from numkv.snapshots.snapshot import Read, Tensor
from numkv.targets.base import Array, Target

Ints = NDArray[np.int64]

# Shorter runs of rows are first copied together, up to so many bytes at a time.
_SHORT_RUN = 16 << 10
_STAGED = 4 << 20


def checked(tensor: Tensor, holds: Callable[[NDArray[Any]], bool], bad: str) -> Tensor:
    """Return a tensor whose elements are checked when they are written and read.

    Parameters
    ----------
    tensor : Tensor
        Scales, or the like.
    holds : callable
        Returns whether elements are valid.
    bad : str
        Message for a cache with invalid elements.
    """

    def pieces() -> Iterator[NDArray[Any]]:
        for piece in tensor.pieces():
            if not holds(piece):
                raise NumkvError(f"`cache`: {bad}")
            yield piece

    def fill(read: Read) -> None:
        def read_checked(arrays: Any) -> None:
            given = list(arrays)
            read(given)
            plain = all(map(holds, given))
            expect(plain, f"{tensor.name!r} has NaN, infinity or a negative number")

        tensor.fill(read_checked)

    return tensor._replace(pieces=pieces, fill=fill)


@dataclass
class Rows:
    """Rows in some slots of an array ``(num_blocks, num_heads, block_size, …)``, head by head; zeros for slot -1."""

    target: Target
    x: Array
    slots: Ints

    def pieces(self) -> Iterator[NDArray[Any]]:
        x, slots = self.x, self.slots
        if not self.target.values_on_host and len(slots):
            there = self.target.zeros(self._shape, x.dtype)
            own = np.arange(len(slots))
            self._copy(x, slots, there, own)
            x, slots = self.target.to_host(there), own
        x = _by_row(np.asarray(x))
        runs, short = _runs(x, slots)
        for head in range(x.shape[1]):
            if short:
                for blocks, offsets in _steps(x, slots):
                    rows = x[blocks, head, offsets]
                    rows[blocks < 0] = 0
                    yield rows
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
        """Return the shape as one block."""
        return (1, int(self.x.shape[1]), len(self.slots), *map(int, self.x.shape[3:]))

    def _copy(self, source: Array, slots: Ints, to: Array, to_slots: Ints) -> None:
        here, there = (self.target.index(x, np.int64) for x in (slots, to_slots))
        self.target.ops.copy_tokens(source, here, to, there)


def _by_row(x: NDArray[Any]) -> NDArray[Any]:
    """Return an array of rows, also if a row has one element."""
    return x if x.ndim == 4 else x[..., None]


def _runs(x: NDArray[Any], slots: Ints) -> tuple[list[tuple[int, int, int]], bool]:
    """Return runs of adjacent slots as (block, offset, length), and whether they are too short to be read alone."""
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
    return runs, short or bool(slots.min() < 0)


def _steps(x: NDArray[Any], slots: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield blocks and offsets of slots, in batches of bounded size."""
    size, most = x.shape[2], max(1, _STAGED // max(1, x.shape[3] * x.itemsize))
    for i in range(0, len(slots), most):
        part = slots[i : i + most]
        yield part // size, part % size


def blocks_of(target: Target, x: Array, ids: NDArray[Any]) -> NDArray[Any]:
    """Copy blocks of an array to host memory."""
    return np.asarray(target.to_host(gathered_blocks(target, [x], ids)[0]))


def gathered_blocks(target: Target, arrays: Sequence[Array], ids: NDArray[Any]) -> list[Array]:
    """Copy blocks of some arrays to others on the target."""
    if target.values_on_host:
        return [x[ids] for x in arrays]
    made = [target.empty((len(ids), *map(int, x.shape[1:])), x.dtype) for x in arrays]
    copy_blocks(target, arrays, ids, made, np.arange(len(ids)))
    return made


def clear_blocks(
    target: Target, arrays: Sequence[Array], ids: NDArray[Any], zeros: Sequence[Array] = ()
) -> None:
    """Fill blocks of some arrays with zeros; on a device by copies of blocks of `zeros`, which are made if missing."""
    if target.values_on_host:
        for x in arrays:
            x[ids] = 0
    elif len(ids):
        nothing = zeros or [target.zeros((1, *map(int, x.shape[1:])), x.dtype) for x in arrays]
        copy_blocks(target, nothing, np.zeros(len(ids)), arrays, ids)


def put_blocks(
    target: Target, content: NDArray[Any], x: Array, ids: NDArray[Any], chosen: NDArray[Any] | None = None
) -> None:  # fmt: skip
    """Copy blocks from host memory into an array: all, or the chosen ones."""
    source = np.arange(len(ids)) if chosen is None else chosen
    copy_blocks(target, [target.asarray(content)], source, [x], ids)


def copy_blocks(
    target: Target, sources: Sequence[Array], ids: NDArray[Any], to: Sequence[Array], to_ids: NDArray[Any]
) -> None:  # fmt: skip
    """Copy blocks of some arrays to blocks of others, on the target."""
    here, there = (target.index(x, np.int32) for x in (ids, to_ids))
    for x, y in zip(sources, to, strict=True):
        if len(ids) and x.size:
            target.ops.copy_blocks(x, here, y, there)


@dataclass
class Blocks:
    """Distinct whole blocks of an array; slots after the last token are written as zeros."""

    target: Target
    x: Array
    ids: NDArray[Any]
    fills: NDArray[Any]

    def pieces(self) -> Iterator[NDArray[Any]]:
        x, ids = self.x, self.ids
        if not self.target.values_on_host:
            x, ids = blocks_of(self.target, x, ids), np.arange(len(ids))
        whole = self.fills >= (int(x.shape[2]) if len(ids) else 1)
        for first, end, i in _neighbours(ids, ~whole):
            part = np.asarray(x[first:end])  # in pages blocks do not lie together
            if not whole[i]:
                part = part.copy()
                part[:, :, int(self.fills[i]) :] = 0
            yield np.ascontiguousarray(part)

    def fill(self, read: Read) -> None:
        if not self.target.values_on_host:
            made = np.empty((len(self.ids), *map(int, self.x.shape[1:])), self.x.dtype)
            read([made])
            put_blocks(self.target, made, self.x, self.ids)
            return
        for first, end, _ in _neighbours(self.ids, np.zeros(len(self.ids), np.bool_)):
            part = self.x[first:end]
            made = part if part.flags.c_contiguous else np.empty(part.shape, part.dtype)
            read([made])
            if made is not part:
                part[...] = made


def _neighbours(ids: NDArray[Any], apart: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of adjacent block ids as (first, end, index of the first); blocks in `apart` form runs of one."""
    ends = np.flatnonzero((np.diff(ids) != 1) | apart[1:] | apart[:-1]) + 1
    for run in np.split(np.arange(len(ids)), ends):
        if len(run):
            yield int(ids[run[0]]), int(ids[run[-1]]) + 1, int(run[0])
