"""Deferred NaN reports: a kernel finds NaN or infinity in rows after the call has returned.

On the CPU values are checked first, and no report is deferred. If several tokens of a sequence were not finite,
sometimes only the first is reported. So all tokens after a reported one count as not finite, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import BlockPool
from numkv.cells.cells import Cells
from numkv.errors import NonFiniteInput
from numkv.targets.base import Target
from numkv.targets.call import Mark, Marker

#: Calls after which one is certainly done.
_LONG_AGO = 1 << 12


class LateReports:
    """Kernels' reports about a cache's rows.

    Parameters
    ----------
    target : Target
        Where the cache is.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        #: Receives kernels' reports; None on the CPU.
        self.watch = target.new_watch()
        #: What has been reported, by sequence, cell or layer.
        self._bad: dict[int, Any] = {}

    def copy(self, *cells: Any) -> Self:
        """Copy the reports for a copy of the cache, with its own cells if they are by cell; waits for kernels."""
        self.collect(wait=True)
        make: Any = type(self)
        made: Self = make(self._target, *cells)
        made._bad = dict(self._bad)
        return made

    @property
    def calls(self) -> int:
        """The number of calls so far that kernels may report about; 0 on the CPU."""
        return 0 if self.watch is None else int(self.watch.calls)

    @property
    def latest(self) -> Any:
        """The marker of the last call that was checked; None if none was."""
        return self.watch.latest

    def collect(self, wait: bool = False) -> None:
        """Collect the reports so far; with `wait`, those of all launched kernels."""
        if self.watch is not None and (wait or self.watch.arrived()):
            self._target.collect_late(self.watch, wait)

    def look_for_nothing(self) -> None:
        """Record that the next call checks no rows, unless it asks for a marker."""
        if self.watch is not None:
            self.watch.latest = None

    def marker(self, mark: Mark, first: int = 0) -> Marker:
        """Return the marker of a call whose rows are checked.

        Parameters
        ----------
        mark : function
            Takes the number of a token, the error, and which call it was.
        first : int
            Number of the call's first token.
        """
        return Marker(self.watch, mark, first)

    def look_again(self, looked_at: Any, marker: Marker | None = None, first: int = 0) -> int:
        """Return the number of a check for a call that repeats the one whose `latest` this was.

        Parameters
        ----------
        looked_at : tuple or None
            See `latest`.
        marker : Marker, optional
            Receives the reports. None is that call's receiver, for tokens from `first` on.
        first : int
            Number of the call's first token.
        """
        if looked_at is None:
            return 0
        of_k, of_v, whom = looked_at
        whom = whom._replace(first=first) if marker is None else marker._replace(watch=None)
        found: int = self.watch.look((of_k, of_v, whom))
        return found


#: The changes of a sequence's tokens since calls that may still be reported: the calls so far, and the tokens that were
#: kept then, those below a length, or these, in each layer.
_History = tuple[tuple[int, int | NDArray[np.int64]], ...]


def _after(history: _History, calls: int, kept: int | NDArray[np.int64]) -> _History:
    """Note that tokens were dropped after so many calls of the watch: how many were kept, or which."""
    changes = [(n, of) for n, of in history if calls - n < _LONG_AGO]
    if isinstance(kept, int):
        while changes and isinstance(changes[-1][1], int) and changes[-1][1] >= kept:
            changes.pop()
    return *changes, (calls, kept)


def _now(history: _History, position: int, call: int) -> int | None:
    """Return the position of the first remaining token at or after a reported one; None if none remains."""
    for calls, kept in history:
        if call <= calls:
            found = _first_kept(position, kept)
            if found is None:
                return None
            position = found
    return position


def _first_kept(position: int, kept: int | NDArray[np.int64]) -> int | None:
    """Return where the first token from a position on is, once these have been kept; None if there is none."""
    if isinstance(kept, int):
        return position if position < kept else None
    found = [int(np.searchsorted(of_layer, position)) for of_layer in kept]
    least = min(found, default=0)
    return least if least < kept.shape[1] else None


class _Fork(NamedTuple):
    """A sequence forked from another one, whose shared rows may still be reported."""

    calls: int  #: of the cache, before
    child: int
    length: int  #: tokens that the child began with
    history: _History  #: of the other one, so far


class SequenceReports(LateReports):
    """Reports by sequence: for each one with bad rows, the first bad position, and the error."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._histories: dict[int, _History] = {}
        self._forks: dict[int, tuple[_Fork, ...]] = {}

    def __bool__(self) -> bool:
        """Return whether any sequence has such rows, as far as has been reported."""
        return bool(self._bad)

    def tell(self, seq: int, position: int, error: NonFiniteInput, call: int) -> None:
        """Record a kernel's report about the token that had this position at call number `call`."""
        for fork in self._forks.get(seq, ()):
            if call <= fork.calls:
                there = _now(fork.history, position, call)
                if there is not None and there < fork.length:
                    self.tell(fork.child, there, error, call)
        now = _now(self._histories.get(seq, ()), position, call)
        if now is not None:
            self._note(seq, now, error)

    def first(self, seq: int) -> tuple[int, NonFiniteInput] | None:
        """Return the first position of a sequence with such a row, as far as has been reported, and the error."""
        return self._bad.get(seq)

    def _note(self, seq: int, position: int, error: NonFiniteInput) -> None:
        known = self._bad.get(seq)
        if known is None or position < known[0]:
            self._bad[seq] = position, error

    def refuse(self, seq: int, length: int) -> None:
        """Refuse to go on with a sequence of so many tokens if one of them was reported."""
        if not self._bad:
            return
        position, error = self._bad.get(seq, (length, None))
        if error is not None and position < length:
            raise NonFiniteInput(
                f"{error}; truncate sequence {seq} to {position} tokens, or roll its step back",
                error.index,
            )
        self._bad.pop(seq, None)

    # -- what becomes of sequences

    def keep(self, seq: int, kept: int | NDArray[np.int64]) -> None:
        """Forget tokens that are dropped, also of those of which something may yet be reported.

        Parameters
        ----------
        seq : int
            The sequence.
        kept : int or int64 array (num_layers, n)
            How many tokens it keeps, or which.
        """
        known = self._bad.pop(seq, None)
        if known is not None and (now := _first_kept(known[0], kept)) is not None:
            self._bad[seq] = now, known[1]
        if self.calls:
            self._histories[seq] = _after(self._histories.get(seq, ()), self.calls, kept)

    def fork(self, seq: int, child: int, length: int) -> None:
        """Let a sequence begin with the first tokens of another one."""
        calls = self.calls
        known = self._bad.get(seq)
        if known is not None and known[0] < length:
            self._bad[child] = known
        if calls:
            self._forks = {
                parent: recent
                for parent, forks in self._forks.items()
                if (recent := tuple(of for of in forks if calls - of.calls < _LONG_AGO))
            }
            mine = _Fork(calls, child, length, self._histories.get(seq, ()))
            self._forks[seq] = (*self._forks.get(seq, ()), mine)

    def remove(self, seq: int) -> None:
        """Forget a sequence; its forks may still have reports."""
        self._bad.pop(seq, None)
        self._histories.pop(seq, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._bad, self._histories, self._forks = {}, {}, {}

    def spread(self, states: Mapping[int, Any], blocks: BlockPool) -> None:
        """Report a bad row to all sequences that share its block, and remove the block from the prefix cache.

        Parameters
        ----------
        states : mapping of int to SequenceState
            All sequences.
        blocks : BlockPool
            The books of their blocks.
        """
        for seq, (position, error) in list(self._bad.items()):
            state = states.get(seq)
            if state is None or position >= state.length:
                continue
            index = position // blocks.block_size
            for group, table in enumerate(state.tables):
                behind = table[index:][table[index:] >= 0]
                blocks.forget(behind[blocks.is_cached(behind)])
                if not len(table) > index or table[index] < 0:
                    continue
                for other, its in states.items():
                    of = its.tables[group]
                    if len(of) > index and of[index] == table[index] and position < its.length:
                        self._note(other, position, error)


class CellReports(LateReports):
    """Reports by cell: a sequence that owns a bad cell can go on once it has lost it."""

    def __init__(self, target: Target, cells: Cells) -> None:
        super().__init__(target)
        self._cells = cells
        # How many calls there had been when each cell was given to its token.
        self._given = np.zeros(0 if self.watch is None else cells.num_cells, np.int64)

    def give(self, cells: NDArray[np.int64]) -> None:
        """Forget past and pending reports about cells that get other tokens."""
        if self.watch is None:
            return
        self._given[cells] = self.watch.calls
        if self._bad:
            for cell in cells.tolist():
                self._bad.pop(cell, None)

    def clear(self) -> None:
        """Forget all cells."""
        self._bad.clear()
        if self.watch is not None:
            self._given[:] = self.watch.calls

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
        """Raise if sequences own a bad cell."""
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
    """Reports by layer, for layers that are replaced as a whole; replacing the rows clears them."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        # How many calls there had been when each layer, and all of them, were dropped.
        self._put: dict[int, int] = {}
        self._dropped = 0

    def put(self, layer: int) -> None:
        """Forget past and pending reports about a layer."""
        if self.watch is not None:
            self._bad.pop(layer, None)
            self._put[layer] = self.watch.calls

    def clear(self) -> None:
        """Forget all layers."""
        if self.watch is not None:
            self._bad.clear()
            self._dropped = self.watch.calls

    def mark(self, layer: int) -> Mark:
        """What notes a row of a layer."""
        to = weakref.ref(self)

        def note(row: int, error: NonFiniteInput, call: int) -> None:
            of = to()
            if of is not None and call > max(of._dropped, of._put.get(layer, 0)):
                of._bad.setdefault(layer, error)

        return note

    def refuse(self, but: int | None = None) -> None:
        """Raise if rows of an item are bad, except in one layer."""
        self.collect()
        for layer, error in self._bad.items():
            if layer != but:
                raise NonFiniteInput(
                    f"{error}; put layer {layer} anew, or remove the item", error.index
                )
