"""A batch on its way through the layers of a `CellCache`: what all layers share, computed when first needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.cells import compiled as kernels
from numkv.cells.cells import Cells, Rows
from numkv.kinds import Kind
from numkv.targets.base import Array, Target

__all__ = ["UNLIMITED", "ForwardPass", "View"]

UNLIMITED = 2**31 - 1  # more positions than there are

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


class ForwardPass:
    """A batch of tokens with a cell each.

    Parameters
    ----------
    view : View
        What tokens attend to.
    rows : Rows
        The tokens.
    slots : int64 array (num_tokens,)
        Cell of each token, on the host; -1 in a reserved pass.
    reserve : bool
        Whether the pass only allocates memory: all cells are shown, and nothing is written.
    """

    __slots__ = (
        "_device", "_lens", "_mask", "_shown", "_slots_on_target", "_table", "_view",
        "_visible_ranges", "excepted", "reserve", "rows", "slots",
    )  # fmt: skip

    def __init__(self, view: View, rows: Rows, slots: NDArray[np.int64], reserve: bool) -> None:
        self._view = view
        self.rows = rows
        self.slots = slots
        self.reserve = reserve
        self.excepted: tuple[int, ...] = ()  # tokens that attend to later positions too
        self._slots_on_target: Array = None
        self._shown = (0, view.cells.num_cells) if reserve else None  # the cells that `get` shows
        self._table: Any = None  # cells of each run's sequence, int32 (num_runs, max_len)
        self._lens: Any = None  # how many they are, int64 (num_runs,)
        self._visible_ranges: Any = (
            None  # of each token, in its run's table row, int64 (num_tokens, 2)
        )
        self._device: tuple[Array, Array, Array, Array] | None = None
        self._mask: Array = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.slots)

    def slots_on_target(self) -> Array:
        """Cell of each token, for kernels."""
        if self._slots_on_target is None:
            self._slots_on_target = self._view.target.index(self.slots, np.int64)
        return self._slots_on_target

    def lift_causality(self, excepted: tuple[int, ...]) -> None:
        """Let these tokens, and no others, attend to later positions too."""
        if excepted != self.excepted:
            self.excepted = excepted
            self._visible_ranges = self._device = self._mask = None

    def forget_cells(self) -> None:
        """Before cells change: fix which of them `get` shows, and look everything else up anew afterwards."""
        self.shown_cells()
        self._table = self._lens = self._visible_ranges = self._device = self._mask = None

    def counts(self) -> list[int]:
        """Cells of each run's sequence."""
        if self._table is None:
            self._find_table()
        counts: list[int] = self._lens.tolist()
        return counts

    def shown_cells(self) -> tuple[int, int]:
        """The cells ``[low, high)`` that `get` shows.

        They are those of the batch's sequences; where others are evicted, only those within the window of the batch.
        """
        if self._shown is None:
            if self._table is None:
                self._find_table()
            cells, rows = self._view.cells, self.rows
            reach = -1 if cells.memory is None else self._view.window
            low, last = kernels.compiled("visible_cells")(
                cells.positions, self._table, self._lens, rows.starts, rows.positions, reach
            )
            padding = self._view.padding
            self._shown = (0, 0)
            if last >= 0:
                self._shown = (low // padding * padding, (last // padding + 1) * padding)
        return self._shown

    def mask(self) -> Array:
        """The mask ``(num_tokens, n)`` over the shown cells, on the target: 0, or minus infinity where hidden."""
        if self._mask is None:
            low, high = self.shown_cells()
            if self._visible_ranges is None:
                self._find_visible_ranges()
            dtype, word = self._view.mask_kind.dtype, self._view.mask_kind.word
            mask = np.empty((self.num_tokens, high - low), dtype)
            hidden = dtype.type(-np.inf).view(word)
            kernels.compiled(f"fill_mask {word.name}")(
                self._table, self.rows.starts, self._visible_ranges, low, hidden, mask.view(word)
            )
            self._mask = self._view.target.asarray(mask)
        return self._mask

    def on_target(self) -> tuple[Array, Array, Array, Array]:
        """Table, lengths, first token of each run, and visible ranges, as attention kernels take them."""
        if self._device is None:
            if self._visible_ranges is None:
                self._find_visible_ranges()
            index = self._view.target.index
            table = self._table
            if not table.size:
                table = np.zeros((len(self._lens), 1), np.int32)
            self._device = (
                index(table, np.int32),
                index(self._lens, np.int64),
                index(self.rows.starts, np.int64),
                index(self._visible_ranges, np.int64),
            )
        return self._device

    def _find_table(self) -> None:
        lists = [self._view.cells.owned(sequence) for sequence in self.rows.sequences]
        if len(lists) == 1:
            self._table = lists[0][None, :]
            self._lens = np.array([len(lists[0])], np.int64)
        else:
            self._lens = np.array([len(x) for x in lists], np.int64)
            self._table = np.empty((len(lists), max(map(len, lists), default=0)), np.int32)
            for row, owned in zip(self._table, lists, strict=True):
                row[: len(owned)] = owned

    def _find_visible_ranges(self) -> None:
        if self._table is None:
            self._find_table()
        view, rows = self._view, self.rows
        if self.excepted:
            lifted = np.zeros(len(rows.positions), np.bool_)
            lifted[list(self.excepted)] = True
        else:
            lifted = _NOT_LIFTED
        self._visible_ranges = np.empty((len(rows.positions), 2), np.int64)
        kernels.compiled("visible_ranges")(
            view.cells.positions, self._table, self._lens, rows.starts, rows.positions, view.window,
            view.chunk, lifted, self._visible_ranges,
        )  # fmt: skip
