"""The bytes of blocks in all layers of a group, and of states, in the order in which an object of a store has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.states import StateMemory
from numkv.kinds import Kind
from numkv.snapshots.regions import blocks_of, put_blocks
from numkv.storage.buffer import are_scales
from numkv.storage.pool import Pool
from numkv.targets.base import Target

Bytes = NDArray[np.uint8]


class BlockBytes:
    """The bytes of blocks, or of slots of states: the block's part of each array, one after another.

    Made by `of_pools` and `of_slots`.

    Parameters
    ----------
    target : Target
        Where they are.
    arrays : sequence of array
        A row for each block.
    kinds : sequence of Kind or None
        Of each array the kind that it has the scales of, if it has scales.

    Attributes
    ----------
    content : int
        Bytes of a block.
    seen_by_host : bool
        Whether they lie in host memory.
    """

    def __init__(
        self, target: Target, arrays: Sequence[Any], kinds: Sequence[Kind | None] = ()
    ) -> None:
        self._target, self._arrays = target, list(arrays)
        self._kinds = kinds if any(kinds) else ()
        self.seen_by_host = target.values_on_host
        self.content = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in self._arrays)
        self._columns = [_as_bytes(x) for x in self._arrays] if self.seen_by_host else []

    @classmethod
    def of_pools(cls, target: Target, pools: Sequence[Pool]) -> BlockBytes:
        """Return the arrays of each layer of a group: words of K, words of V, and the scales of their rows, if any."""
        arrays: list[Any] = []
        kinds: list[Kind | None] = []
        for pool in pools:
            sides = [side for _, side in pool.stored]
            scaled = [side for side in sides if side.kind.has_scales]
            arrays += [*(side.words for side in sides), *(side.scales for side in scaled)]
            kinds += [*(None for _ in sides), *(side.kind for side in scaled)]
        return cls(target, arrays, kinds)

    @classmethod
    def of_slots(cls, slots: StateMemory) -> BlockBytes:
        """Return the arrays of each layer with states."""
        return cls(slots.target, slots.pages)

    def copy(self, block: int, out: Bytes) -> None:
        """Copy a block in host memory."""
        at = 0
        for column in self._columns:
            width = column.shape[1]
            out[at : at + width] = column[block]
            at += width

    def copies(self, blocks: Sequence[int]) -> list[Bytes]:
        """Copies of blocks that the host does not see."""
        made = [np.empty(self.content, np.uint8) for _ in blocks]
        at, ids = 0, np.array(blocks, np.int32)
        for x in self._arrays:
            column = _as_bytes(np.ascontiguousarray(blocks_of(self._target, x, ids)))
            for row, out in zip(column, made, strict=True):
                out[at : at + len(row)] = row
            at += column.shape[1]
        return made

    def room(self, ids: NDArray[np.int32]) -> Room:
        """Return where blocks with these numbers go."""
        if self.seen_by_host:
            return Room(self, ids, self._columns, ids.tolist(), [])
        return self.staged(ids)

    def staged(self, ids: NDArray[np.int32]) -> Room:
        """Room in host memory, from where blocks go to the device."""
        staged = [np.zeros((len(ids), *map(int, x.shape[1:])), x.dtype) for x in self._arrays]
        return Room(self, ids, list(map(_as_bytes, staged)), list(range(len(ids))), staged)

    def sound(self, rows: Sequence[Bytes]) -> bool:
        """Return whether a block has scales where it should have such."""
        return all(
            kind is None or are_scales(kind, row.view(x.dtype).reshape(x.shape[1:]))
            for row, x, kind in zip(rows, self._arrays, self._kinds, strict=False)
        )

    def send(self, ids: NDArray[np.int32], staged: list[Any], chosen: NDArray[Any]) -> None:
        """Copy chosen blocks from host memory to the device."""
        for x, content in zip(self._arrays, staged, strict=True):
            put_blocks(self._target, content, x, ids[chosen], chosen)


class Room:
    """Blocks of a pool that wait for their content; made by `BlockBytes.room`."""

    def __init__(
        self, of: BlockBytes, ids: NDArray[np.int32], columns: Any, numbers: Any, staged: Any
    ) -> None:
        self._of, self._ids = of, ids
        self._columns, self._numbers, self._staged = columns, numbers, staged

    def rows(self, i: int) -> list[Bytes]:
        """Return the memory of the i-th block, to be written to."""
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
