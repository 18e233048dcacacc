"""A batch's pass through the layers of a `CausalCache`: results that layers share, computed at the first use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.cells import compiled as kernels
from numkv.cells.cells import CellList, Cells, Ints, Rows
from numkv.kinds import Kind
from numkv.targets.base import Array, Target

UNLIMITED = 2**31 - 1  # more positions than there are

# On CUDA tables have a multiple of so many columns; kernels read none past a length.
_WIDTH = 64

_NOT_LIFTED = np.zeros(0, np.bool_)


class View(NamedTuple):
    """Which cells a cache lets its tokens attend to, and how it shows them."""

    cells: Cells
    """The cells."""
    target: Target
    """Where kernels run."""
    window: int
    """Earlier positions that a token attends to, -1 for all."""
    chunk: int
    """Positions of a chunk, 0 for no chunks."""
    padding: int
    """The shown cells begin and end at multiples of this."""
    mask_kind: Kind
    """Float kind of the mask."""
    num_sinks: int = 0
    """Positions from 0 on that every later token attends to, whatever its window."""


class ForwardPass:
    """A batch of tokens with a cell each.

    Its cached results depend on the current cells. A change of cells or of visibility makes a new pass. So several
    readers may use one pass at the same time, and results of an overtaken reader never reach later ones.

    Parameters
    ----------
    view : View
        What tokens attend to.
    rows : Rows
        The tokens.
    slots : int64 array (num_tokens,)
        Cell of each token, on the host; -1 in a reserved pass.
    reserve : bool
        Whether the pass only allocates memory: all cells are visible, and no row is written.
    """

    __slots__ = (
        "_device", "_found", "_mask", "_shown", "_sight", "_slots_on_target", "_view", "_visible_ranges", "excepted",
        "reserve", "rows", "slots",
    )  # fmt: skip

    def __init__(self, view: View, rows: Rows, slots: NDArray[np.int64], reserve: bool) -> None:
        self._view = view
        self.rows = rows
        self.slots = slots
        self.reserve = reserve
        self.excepted: tuple[int, ...] = ()  # tokens that attend to later positions too
        self._slots_on_target: Array = None
        self._shown = (0, view.cells.num_cells) if reserve else None  # the cells that `get` shows
        # Cells of each run's sequence, int32 (num_runs, max_len), and how many they are, int64 (num_runs,).
        self._found: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None
        # Of each token, in its run's table row, int64 (num_tokens, 2).
        self._visible_ranges: NDArray[np.int64] | None = None
        # The same where first positions are seen too: these, and the rest; see `_sinks_and_windows`.
        self._sight: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._device: tuple[Array, Array, Array, Array] | None = None
        self._mask: Array = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.slots)

    def slots_on_target(self) -> Array:
        """Cell of each token, for kernels."""
        if self._slots_on_target is None:
            if self._view.target.values_on_host:
                self._slots_on_target = self._view.target.index(self.slots, np.int64)
            else:
                self.on_target()  # one copy takes all
        return self._slots_on_target

    # -- other passes

    def over(self, view: View) -> ForwardPass:
        """The same pass over other cells that hold the same, with nothing computed but the cells that `get` shows."""
        made = ForwardPass(view, self.rows, self.slots, self.reserve)
        made.excepted, made._shown = self.excepted, self.shown_cells()
        return made

    def with_causality_lifted(self, excepted: tuple[int, ...]) -> ForwardPass:
        """A pass in which these tokens, and no others, attend to later positions too."""
        if excepted == self.excepted:
            return self
        made = self.over(self._view)
        made.excepted, made._found = excepted, self._found
        return made

    # -- its results

    def counts(self) -> list[int]:
        """Cells of each run's sequence."""
        counts: list[int] = self._table()[1].tolist()
        return counts

    def shown_cells(self) -> tuple[int, int]:
        """The cells ``[low, high)`` that `get` shows.

        They are those of the batch's sequences; where others are evicted, only those within the window of the batch.
        """
        shown = self._shown
        if shown is None:
            table, lens = self._table()
            cells, rows = self._view.cells, self.rows
            reach = -1 if cells.memory is None else self._view.window
            low, last = kernels.compiled("visible_cells")(
                cells.positions, table, lens, rows.starts, rows.positions, reach
            )
            for sinks in self._sinks() if self._view.num_sinks else ():
                low = int(sinks.min(initial=low))
                last = int(sinks.max(initial=last))
            padding = self._view.padding
            shown = (0, 0)
            if last >= 0:
                shown = (low // padding * padding, (last // padding + 1) * padding)
            self._shown = shown
        return shown

    def mask(self) -> Array:
        """The mask ``(num_tokens, n)`` over the shown cells, on the target: 0, or minus infinity where hidden."""
        if self._mask is None:
            low, high = self.shown_cells()
            dtype, word = self._view.mask_kind.dtype, self._view.mask_kind.word
            mask = np.empty((self.num_tokens, high - low), dtype)
            hidden = dtype.type(-np.inf).view(word)
            sinks, windows = self.sight()
            kernels.compiled(f"fill_mask {word.name}")(
                self._table()[0], self.rows.starts, windows, low, hidden, mask.view(word)
            )
            if sinks is not None:
                _show_sinks(self._table()[0], self.rows.starts, sinks, low, mask)
            self._mask = self._view.target.asarray(mask)
        return self._mask

    def on_target(self) -> tuple[Array, Array, Array, Array]:
        """Table, lengths, first token of each run, and visible ranges, as attention kernels take them."""
        if self._device is None:
            ranges, (table, lens) = self.sight()[1], self._table()
            target = self._view.target
            if not table.size:
                table = np.zeros((len(lens), 1), np.int32)
            elif not target.values_on_host and table.shape[1] % _WIDTH:
                # Of few widths, so that calls repeat.
                wide = np.zeros((len(lens), -(-table.shape[1] // _WIDTH) * _WIDTH), np.int32)
                wide[:, : table.shape[1]] = table
                table = wide
            wanted = [(x, np.int64) for x in (lens, self.rows.starts, ranges, self.slots)]
            given = [(table, np.int32), *wanted]
            of_table, of_lens, of_starts, of_ranges, slots = target.index_all(given)
            if not target.values_on_host:
                self._slots_on_target = slots
            self._device = (of_table, of_lens, of_starts, of_ranges)
        return self._device

    def sinks_on_target(self) -> Array | None:
        """Ranges of first tokens that are seen apart from windows, as kernels take them; None if there are none."""
        sinks = self.sight()[0]
        return None if sinks is None else self._view.target.index(sinks, np.int64)

    def sight(self) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        """The tokens that each token sees: first tokens outside its window, if any, and the rest."""
        view = self._view
        if not view.num_sinks or view.window < 0:
            return None, self._ranges()
        found = self._sight
        if found is None:
            counts = [len(sinks) for sinks in self._sinks()]
            found = self._sight = _sinks_and_windows(counts, self.rows.starts, self._ranges())
        return (found[0] if found[0].any() else None), found[1]

    def _sinks(self) -> list[CellList]:
        """Cells of first positions that stay visible, of each run's sequence."""
        view, (table, lens) = self._view, self._table()
        before = view.cells.before
        owned = (row[:n] for row, n in zip(table, lens, strict=True))
        return [row[: before(row, view.num_sinks)] for row in owned]

    def _table(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        found = self._found
        if found is None:
            lists = [self._view.cells.owned(sequence) for sequence in self.rows.sequences]
            found = self._found = as_table(lists)
        return found

    def _ranges(self) -> NDArray[np.int64]:
        ranges = self._visible_ranges
        if ranges is None:
            view, rows, (table, lens) = self._view, self.rows, self._table()
            lifted = _NOT_LIFTED
            if self.excepted:
                lifted = np.zeros(len(rows.positions), np.bool_)
                lifted[list(self.excepted)] = True
            ranges = np.empty((len(rows.positions), 2), np.int64)
            kernels.compiled("visible_ranges")(
                view.cells.positions, table, lens, rows.starts, rows.positions, view.window, view.chunk,
                lifted, ranges,
            )  # fmt: skip
            self._visible_ranges = ranges
        return ranges


def as_table(lists: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Lists of cells as a table with a row for each, and their lengths; of one list a view."""
    lens = np.array([len(cells) for cells in lists], np.int64)
    if len(lists) == 1:
        return lists[0][None, :], lens
    table = np.zeros((len(lists), max(map(len, lists), default=0)), np.int32)
    for row, cells in zip(table, lists, strict=True):
        row[: len(cells)] = cells
    return table, lens


def _sinks_and_windows(counts: Sequence[int], starts: Ints, ranges: Ints) -> tuple[Ints, Ints]:
    """Return the first tokens outside each token's window, and its window.

    Parameters
    ----------
    counts : sequence of int
        First tokens of each run's sequence.
    starts : int64 array (num_runs + 1,)
        Where each run's tokens begin.
    ranges : int64 array (num_tokens, 2)
        The window of each token, along its run's row of the table.

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


def _show_sinks(table: CellList, starts: Ints, sinks: Ints, first: int, mask: NDArray[Any]) -> None:
    """Write 0 into a mask over cells from `first` on, where a token sees first tokens apart from its window."""
    for row, (i, j) in zip(table, itertools.pairwise(starts.tolist()), strict=True):
        for at in range(int(sinks[i:j, 1].max(initial=0))):
            mask[i + np.flatnonzero(sinks[i:j, 1] > at), int(row[at]) - first] = 0
