"""Attention sinks in caches of cells: first tokens that a sliding window never evicts and never hides.

Models put much attention on a sequence's first tokens, whatever these are; without them predictions fall apart as soon
as a window has slid past them. So positions below `num_sink_tokens` stay stored, and every later token attends to them
beside its window. Positions are the original ones: those that tokens were given, of which keys know by RoPE. A model
that must not see positions beyond those of its training is given positions within the cache instead: by `remove` of
what is evicted, which shifts the keys behind it.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453), section 3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.cells import compiled as kernels
from numkv.cells.cells import CellList, Cells, CellsOfSequence, Forward, Ints, Rows
from numkv.errors import CacheFull


class SinkCells(Cells):
    """Cells of a cache whose sequences keep their first positions.

    Parameters
    ----------
    num_cells, memory
        See `Cells`.
    num_sinks : int
        Positions from 0 on that are never evicted.
    """

    def __init__(self, num_cells: int, memory: int | None, num_sinks: int) -> None:
        super().__init__(num_cells, memory)
        self.num_sinks = num_sinks

    def can_resume(self, sequence: int, position: int, window: int) -> bool:
        """Whether all that a token at `position` attends to is still stored."""
        owned = self.owned(sequence)
        sinks = self.before(owned, self.num_sinks)
        if self.memory is None or sinks == len(owned):
            return super().can_resume(sequence, position, window)
        first, last = int(self.positions[owned[sinks]]), int(self.positions[owned[-1]])
        if sinks == first:  # nothing is evicted
            first = 0
        return max(0, position - window) >= first and position <= last + 1

    def plan_forward(self, rows: Rows) -> Forward:
        """Find cells for a batch, and what has to be evicted behind the first positions; see `Cells.plan_forward`."""
        shorter: dict[CellsOfSequence, CellList] = {}
        evicted: list[CellList] = [np.empty(0, np.int32)]
        for found, begin in [] if self.memory is None else self._evictions(rows, self.memory):
            owned, stop = found.owned, begin - found.begin
            sinks = self.before(owned, self.num_sinks)
            if stop > sinks:
                evicted.append(owned[sinks:stop])
                shorter[found] = np.delete(owned, np.s_[sinks:stop])
        gone, n = np.concatenate(evicted), len(rows.positions)
        cells = np.empty(n, np.int64)
        count = kernels.compiled("find_free")(self.num_sequences, self._vacant, gone, cells)
        if count < n:
            raise CacheFull(
                f"expected {n} free cells for a batch of {n} tokens, got {count} of {self.num_cells}; remove "
                "sequences, or init with more sequences or a larger capacity"
            )
        bounds = rows.starts.tolist()
        runs = [cells[i:j] for i, j in itertools.pairwise(bounds)]
        if not rows.ordered:
            runs = [
                new[np.argsort(rows.positions[i:j], kind="stable")]
                for new, (i, j) in zip(runs, itertools.pairwise(bounds), strict=True)
            ]
        return Forward(rows, cells, gone, [], runs, self._lists(rows, runs, shorter))

    def _lists(
        self, rows: Rows, runs: list[Ints], shorter: dict[CellsOfSequence, CellList]
    ) -> dict[int, CellsOfSequence]:
        """Lists of sequences that lose cells, or have no room for new ones."""
        lists = self._longer_lists(rows, runs, [])
        added = dict.fromkeys(rows.sequences, 0)
        for sequence, new in zip(rows.sequences, runs, strict=True):
            added[sequence] += len(new)
        for sequence, found in self._sequences.items():
            if found in shorter:
                lists[sequence] = CellsOfSequence.with_room(shorter[found], added.get(sequence, 0))
        return lists


def cells_of(num_cells: int, memory: int | None, num_sinks: int) -> Cells:
    """Cells of a cache, which keep first positions or none."""
    return SinkCells(num_cells, memory, num_sinks) if num_sinks else Cells(num_cells, memory)


def sinks_and_windows(counts: Sequence[int], starts: Ints, ranges: Ints) -> tuple[Ints, Ints]:
    """What each token of a pass sees: first tokens apart from its window, and its window.

    Parameters
    ----------
    counts : sequence of int
        First tokens of each run's sequence.
    starts : int64 array (num_runs + 1,)
        Where each run's tokens begin.
    ranges : int64 array (num_tokens, 2)
        What each token's window shows, along its run's row of the table.

    Returns
    -------
    sinks, windows : int64 array (num_tokens, 2)
        Ranges; where both would meet, the first is empty and the second has all.
    """
    windows, sinks = ranges.copy(), np.zeros_like(ranges)
    for first, (i, j) in zip(counts, itertools.pairwise(starts.tolist()), strict=True):
        meets = ranges[i:j, 0] <= first
        sinks[i:j, 1] = np.where(meets, 0, first)
        windows[i:j, 0] = np.where(meets, 0, ranges[i:j, 0])
    return sinks, windows


def show_sinks(table: CellList, starts: Ints, sinks: Ints, first: int, mask: NDArray[Any]) -> None:
    """Write 0 into a mask over cells from `first` on, where a token sees first tokens apart from its window."""
    for row, (i, j) in zip(table, itertools.pairwise(starts.tolist()), strict=True):
        for at in range(int(sinks[i:j, 1].max(initial=0))):
            mask[i + np.flatnonzero(sinks[i:j, 1] > at), int(row[at]) - first] = 0
