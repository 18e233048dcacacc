"""What multi-sequence caches do about rows that a kernel has found to be NaN or infinite, after the call was over.

On the CPU values are checked first, and nothing is ever reported late.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv.cells.cells import Cells
from numkv.errors import NonFiniteInput
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target
from numkv.targets.call import Mark, Marker


class LateReports:
    """What kernels tell of a cache's rows.

    Parameters
    ----------
    target : Target
        Where the cache is.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        #: What kernels report to; None on the CPU.
        self._watch = target.new_watch()

    @property
    def latest(self) -> Any:
        """What the last call had looked at; None if nothing was."""
        return self._watch.latest

    def collect(self, wait: bool = False) -> None:
        """Take what has been reported so far; with `wait` when all that was launched is done."""
        if self._watch is not None and (wait or self._watch.arrived()):
            self._target.collect_late(self._watch, wait)

    def look(self, pool: Pool, k: Array, v: Array, mark: Mark | None) -> int:
        """What `Pool.scatter` takes, to have rows looked at; without `mark` they are not.

        Parameters
        ----------
        pool : Pool
            Where they go.
        k, v : array (num_tokens, num_kv_heads, dim)
            The rows.
        mark : function, optional
            Takes the number of a token, the error, and which call it was.
        """
        if self._watch is None:
            return 0
        self._watch.latest = None
        return 0 if mark is None else pool.watch(k, v, Marker(self._watch, mark))

    def look_again(self, looked_at: Any, mark: Mark) -> int:
        """The same for a call that repeats one of which `latest` was this."""
        if looked_at is None:
            return 0
        of_k, of_v, _ = looked_at
        found: int = self._watch.look((of_k, of_v, Marker(None, mark)))
        return found


class CellReports(LateReports):
    """What is reported of cells: a sequence that owns one of them goes on when it has lost it.

    Of several tokens that were not finite sometimes only the first is reported. So all later ones of its sequences that
    are stored by then count as if they were not finite either.
    """

    def __init__(self, target: Target, cells: Cells) -> None:
        super().__init__(target)
        self._cells = cells
        self._bad: dict[int, NonFiniteInput] = {}
        # How many calls there had been when each cell was given to its token.
        self._given = np.zeros(0 if self._watch is None else cells.num_cells, np.int64)

    def over(self, cells: Cells) -> CellReports:
        """The same for a copy, whose cells these are: waits for what has been launched."""
        self.collect(wait=True)
        made = CellReports(self._target, cells)
        made._bad = dict(self._bad)
        return made

    def give(self, cells: NDArray[np.int64]) -> None:
        """Forget what was reported, and may yet be reported, of cells that get other tokens."""
        if self._watch is None:
            return
        self._given[cells] = self._watch.calls
        if self._bad:
            for cell in cells.tolist():
                self._bad.pop(cell, None)

    def clear(self) -> None:
        """Forget all cells."""
        self._bad.clear()
        if self._watch is not None:
            self._given[:] = self._watch.calls

    def mark(self, cells: NDArray[np.int64]) -> Mark:
        """What notes a token of a call whose tokens have these cells."""
        to = weakref.ref(self)

        def note(token: int, error: NonFiniteInput, call: int) -> None:
            of, cell = to(), int(cells[token])
            if of is not None and call > of._given[cell]:
                of._note(cell, error)

        return note

    def _note(self, cell: int, error: NonFiniteInput) -> None:
        self._bad.setdefault(cell, error)
        for seq in self._cells.sequences:
            owned = self._cells.owned(seq)
            for at in np.flatnonzero(owned == cell).tolist():
                for after in owned[at:].tolist():
                    self._bad.setdefault(after, error)

    def refuse(self, sequences: Iterable[int]) -> None:
        """Refuse to go on with sequences that own a cell which is not what it should be."""
        self.collect()
        if not self._bad:
            return
        for seq in sequences:
            for cell in self._cells.owned(seq).tolist():
                error = self._bad.get(cell)
                if error is not None:
                    raise NonFiniteInput(
                        f"{error}; remove sequence {seq} from position {self._cells.positions[cell]} on",
                        error.index,
                    )


class LayerReports(LateReports):
    """What is reported of layers whose rows are put as a whole: they are right when they have been put anew."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._bad: dict[int, NonFiniteInput] = {}
        # How many calls there had been when each layer, and all of them, were dropped.
        self._put: dict[int, int] = {}
        self._dropped = 0

    def copy(self) -> Self:
        """The same for a copy: waits for what has been launched."""
        self.collect(wait=True)
        made = type(self)(self._target)
        made._bad = dict(self._bad)
        return made

    def put(self, layer: int) -> None:
        """Forget what was reported, and may yet be reported, of a layer."""
        if self._watch is not None:
            self._bad.pop(layer, None)
            self._put[layer] = self._watch.calls

    def clear(self) -> None:
        """Forget all layers."""
        if self._watch is not None:
            self._bad.clear()
            self._dropped = self._watch.calls

    def mark(self, layer: int) -> Mark:
        """What notes a row of a layer."""
        to = weakref.ref(self)

        def note(row: int, error: NonFiniteInput, call: int) -> None:
            of = to()
            if of is not None and call > max(of._dropped, of._put.get(layer, 0)):
                of._bad.setdefault(layer, error)

        return note

    def refuse(self, but: int | None = None) -> None:
        """Refuse to go on with rows of an item that are not what they should be, but in one layer."""
        self.collect()
        for layer, error in self._bad.items():
            if layer != but:
                raise NonFiniteInput(
                    f"{error}; put layer {layer} anew, or remove the item", error.index
                )
