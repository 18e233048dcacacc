"""The bytes of blocks in all layers of a group, and of states, in the order in which an object of a store has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.states import StateSlots
from numkv.caches.paged.store import BlockStore
from numkv.kinds import Kind
from numkv.storage.buffer import are_scales
from numkv.storage.pool import Pool

Bytes = NDArray[np.uint8]


class _Columns:
    """Content that lies in columns: arrays of bytes in host memory with a row for each block.

    Attributes
    ----------
    content : int
        Bytes of a block.
    seen_by_host : bool
        Whether they lie in host memory.
    """

    content: int
    seen_by_host: bool
    _columns: list[Bytes]

    def copy(self, block: int, out: Bytes) -> None:
        """Copy a block in host memory."""
        at = 0
        for column in self._columns:
            width = column.shape[1]
            out[at : at + width] = column[block]
            at += width

    def copies(self, blocks: Sequence[int]) -> list[Bytes]:
        """Copies of blocks, wherever they are."""
        made = [np.empty(self.content, np.uint8) for _ in blocks]
        if self.seen_by_host:
            for block, out in zip(blocks, made, strict=True):
                self.copy(block, out)
            return made
        at = 0
        for column in self._fetched(np.array(blocks, np.int32)):
            for row, out in zip(column, made, strict=True):
                out[at : at + len(row)] = row
            at += column.shape[1]
        return made

    def _fetched(self, blocks: NDArray[np.int32]) -> Iterator[Bytes]:
        """Columns of some blocks that lie on a device."""
        raise NotImplementedError

    def room(self, ids: NDArray[np.int32]) -> Room:
        """Where blocks with these numbers go."""
        if self.seen_by_host:
            return Room(self, ids, self._columns, ids.tolist(), [])
        staged, columns = self._staged(len(ids))
        return Room(self, ids, columns, list(range(len(ids))), staged)

    def room_on_host(self, count: int) -> Room:
        """Room for so many blocks that are not in the pool yet."""
        return Room(self, np.empty(0, np.int32), self._staged(count)[1], list(range(count)), [])

    def _staged(self, count: int) -> tuple[list[Any], list[Bytes]]:
        """Arrays in host memory for so many blocks, and their columns."""
        raise NotImplementedError

    def sound(self, rows: Sequence[Bytes]) -> bool:
        """Whether a block can be what it should be."""
        return True

    def send(self, ids: NDArray[np.int32], staged: list[Any], chosen: NDArray[Any]) -> None:
        """Copy chosen blocks from host memory to the device."""
        raise NotImplementedError


class BlockBytes(_Columns):
    """The bytes of a cache's blocks.

    For each layer of a group: words of K, words of V, scales of rows of K and of V, as far as there are any.

    Parameters
    ----------
    of : BlockStore
        The cache's buffers.
    pools : sequence of Pool
        Those that have rows of the group, all of one shape and kind.
    """

    def __init__(self, of: BlockStore, pools: Sequence[Pool]) -> None:
        self._target, self._pools = of.target, list(pools)
        self.seen_by_host = of.target.values_on_host
        sides = [side for _, side in self._pools[0].stored]
        scaled = [side for side in sides if side.kind.has_scales]
        #: Of each part of a layer the shape within a block, dtype, and the kind that it has the scales of.
        self._parts: list[tuple[tuple[int, ...], Any, Kind | None]] = [
            (tuple(map(int, side.words.shape[1:])), np.dtype(side.words.dtype), None)
            for side in sides
        ] + [
            (tuple(map(int, side.scales.shape[1:])), np.dtype(side.scales.dtype), side.kind)
            for side in scaled
        ]
        self._scaled = len(scaled) > 0
        widths = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in self._parts]
        self.content = sum(widths) * len(self._pools)
        self._columns = [
            _as_bytes(x) for arrays in map(self._arrays, self._pools) for x in arrays
        ] if self.seen_by_host else []  # fmt: skip

    @staticmethod
    def _arrays(pool: Any) -> list[Any]:
        sides = [side for _, side in pool.stored]
        return [side.words for side in sides] + [
            side.scales for side in sides if side.kind.has_scales
        ]

    def _fetched(self, blocks: NDArray[np.int32]) -> Iterator[Bytes]:
        source = self._target.index(blocks, np.int32)
        to = self._target.index(np.arange(len(blocks)), np.int32)
        for pool in self._pools:
            staging = pool.like(len(blocks))
            pool.copy_blocks(source, staging, to)
            for x in self._arrays(staging):
                yield _as_bytes(np.ascontiguousarray(self._target.to_host(x)))

    def _staged(self, count: int) -> tuple[list[Any], list[Bytes]]:
        staged = [
            [np.zeros((count, *shape), dtype) for shape, dtype, _ in self._parts]
            for _ in self._pools
        ]
        return staged, [_as_bytes(x) for arrays in staged for x in arrays]

    def sound(self, rows: Sequence[Bytes]) -> bool:
        """Whether a block has scales where it should have such."""
        if not self._scaled:
            return True
        parts = self._parts * len(self._pools)
        return all(
            kind is None or are_scales(kind, row.view(dtype))
            for row, (_, dtype, kind) in zip(rows, parts, strict=True)
        )

    def send(self, ids: NDArray[np.int32], staged: list[list[Any]], chosen: NDArray[Any]) -> None:
        """Copy chosen blocks from host memory to the device."""
        source = self._target.index(chosen, np.int32)
        to = self._target.index(ids[chosen], np.int32)
        for pool, arrays in zip(self._pools, staged, strict=True):
            count = len(pool.stored)
            words, scales = list(arrays[:count]), list(arrays[count:])
            full = []
            for _, side in pool.stored:
                none = np.empty((0, 0, 0), np.dtype(side.scales.dtype))
                full.append(scales.pop(0) if side.kind.has_scales else none)
            if pool.is_latent:  # nothing for V
                words, full = words * 2, full * 2
            pool.from_host((*words, *full)).copy_blocks(source, pool, to)


class SlotBytes(_Columns):
    """The bytes of states in slots: of each layer that keeps some its arrays, one after another.

    Parameters
    ----------
    slots : StateSlots
        The slots.
    """

    def __init__(self, slots: StateSlots) -> None:
        self._slots, self.seen_by_host = slots, slots.target.values_on_host
        self.content = slots.slot_nbytes(slots.shapes)
        self._columns = list(slots.pages) if self.seen_by_host else []

    def _fetched(self, blocks: NDArray[np.int32]) -> Iterator[Bytes]:
        for x in self._slots.gathered(self._slots.pages, blocks):
            yield np.asarray(self._slots.target.to_host(x))

    def _staged(self, count: int) -> tuple[list[Any], list[Bytes]]:
        columns = [np.zeros((count, int(x.shape[1])), np.uint8) for x in self._slots.pages]
        return columns, columns

    def send(self, ids: NDArray[np.int32], staged: list[Any], chosen: NDArray[Any]) -> None:
        """Copy chosen slots from host memory to the device."""
        rows = [self._slots.target.asarray(x[chosen]) for x in staged]
        self._slots.scatter(rows, self._slots.pages, ids[chosen])


class Room:
    """Blocks of a pool that wait for their content; made by `BlockBytes.room`."""

    def __init__(
        self, of: _Columns, ids: NDArray[np.int32], columns: Any, numbers: Any, staged: Any
    ) -> None:
        self._of, self._ids = of, ids
        self._columns, self._numbers, self._staged = columns, numbers, staged

    def rows(self, i: int) -> list[Bytes]:
        """The memory of the i-th block, to be written to."""
        number = self._numbers[i]
        return [column[number] for column in self._columns]

    def fill(self, i: int, data: Bytes) -> None:
        """Copy the content of the i-th block."""
        at = 0
        for row in self.rows(i):
            row[:] = data[at : at + len(row)]
            at += len(row)

    def done(self, good: NDArray[np.bool_]) -> None:
        """Have blocks in the pool, those that are good."""
        if self._staged and good.any():
            self._of.send(self._ids, self._staged, np.flatnonzero(good))


def _as_bytes(x: Any) -> Bytes:
    """An array of blocks as rows of bytes, without a copy."""
    width = math.prod(x.shape[1:])
    found: Bytes = x.reshape(x.shape[0], width).view(np.uint8)
    assert np.may_share_memory(found, x) or not x.size
    return found
