"""`Cells`: which cell of a multi-sequence cache holds which position, for which sequences.

A *cell* is a place for one token: a position, and the sequences that hold it. Cells are numbers; K and V lie elsewhere.
What is asked all the time is which cells a sequence has between two positions, so the sets of sequences are kept the
other way round: every sequence has the list of its cells, by position, and a cell only counts its holders. Then all
rules are about a range of one list:

- causality ends it after the query's own position; a window, or a chunk, begins it so and so far before;
- eviction and removal to the end drop a part at one end of it, any removal drops a slice;
- a copied prefix is a copy of the first part, and one more holder for each of its cells.

New tokens go to the lowest free cells, wherever they are. Every change is found first, and then committed: what finds
changes nothing, and what commits cannot fail.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.cells import compiled as kernels
from numkv.errors import CacheFull, DimensionMismatch, NotSupported, UnsupportedDType

__all__ = ["Cells", "Compaction", "Forward", "Removal", "Rows", "read_rows"]

Ints = NDArray[np.int64]
Held = NDArray[np.int32]

_NO_CELLS: Held = np.empty(0, np.int32)


class Rows(NamedTuple):
    """The rows of a batch, in runs of neighbours that are of one sequence."""

    positions: Ints
    """Position of each row."""
    starts: Ints
    """First row of each run, and the number of rows."""
    sequences: list[int]
    """Sequence of each run."""
    ordered: bool
    """Whether positions fall in no run."""


class Forward(NamedTuple):
    """What a batch needs; made by `Cells.plan_forward`."""

    rows: Rows
    cells: Ints
    """Cell of each row."""
    evicted: Held
    """Cells that sequences let go of."""
    kept: list[tuple[_Sequence, int]]
    """Sequences that let cells go, and where the rest of them begins."""


class Removal(NamedTuple):
    """A removal; made by `Cells.plan_removal`."""

    sequence: int
    first: int
    last: int
    """The cells ``[first, last)`` of the sequence's list go."""
    moved: Held
    """Cells whose position changes, by position."""
    offset: int
    """By how much."""


class Compaction(NamedTuple):
    """What is kept of a sequence, and what is not; made by `Cells.plan_compaction`."""

    sequence: int
    kept: Held
    """Cells, by position."""
    dropped: Held
    moves: list[tuple[Held, int]]
    """Kept cells whose position changes, and by how much."""


class _Sequence:
    """The cells of one sequence: ``cells[begin:end]``, by position."""

    __slots__ = ("begin", "cells", "end")

    def __init__(self, cells: Held | None = None) -> None:
        self.cells = np.empty(16, np.int32) if cells is None else cells
        self.begin = 0
        self.end = 0 if cells is None else len(cells)

    @property
    def held(self) -> Held:
        return self.cells[self.begin : self.end]

    def make_room(self, n: int) -> None:
        """Have places for `n` more cells behind the last."""
        if self.end + n > len(self.cells):
            held = self.held
            self.cells = np.empty(2 * (len(held) + n), np.int32)
            self.cells[: len(held)] = held
            self.begin, self.end = 0, len(held)


def _integers(name: str, x: Any) -> Ints:
    """A row of integers as an array of its own."""
    given = np.asarray(x)
    if given.ndim != 1:
        raise DimensionMismatch(
            f"`{name}`: expected one integer for each token, got an array of shape {given.shape}",
            expected=("num_tokens",),
            actual=given.shape,
        )
    if given.dtype.kind not in "iu" and given.size:
        raise UnsupportedDType(
            f"`{name}`: expected integers below 2**63, got {given.dtype}; convert them"
        )
    return np.array(given, np.int64)


def read_rows(positions: Any, sequences: Any) -> Rows:
    """Check a batch.

    Parameters
    ----------
    positions : array-like of int (num_tokens,)
        Positions.
    sequences : array-like of int (num_tokens,)
        Sequences.

    Returns
    -------
    Rows

    Raises
    ------
    DimensionMismatch
        If there is not one sequence for each position.
    UnsupportedDType
        If they are no integers.
    IndexError
        If a sequence is negative, or a position is negative or above ``2**31 - 1``.
    """
    at = _integers("positions", positions)
    of = _integers("sequences", sequences)
    if len(at) != len(of):
        raise DimensionMismatch(
            f"`sequences`: expected one for each of the {len(at)} positions, got {len(of)}",
            expected=len(at),
            actual=len(of),
        )
    starts = np.empty(len(at) + 1, np.int64)
    found, where, ordered = kernels.compiled("scan")(at, of, starts)
    if found == kernels.BAD_SEQUENCE:
        raise IndexError(f"`sequences`: expected ids from 0 up, got {of[where]} for token {where}")
    if found == kernels.BAD_POSITION:
        raise IndexError(
            f"`positions`: expected positions in [0, 2**31), got {at[where]} for token {where}"
        )
    starts = starts[: where + 1]
    return Rows(at, starts, of[starts[:-1]].tolist(), bool(ordered))


class Cells:
    """The cells of a cache, all free at first.

    Costs are those of the cells that a call names: nothing looks at all of them.

    Parameters
    ----------
    num_cells : int
        How many.
    memory : int or None
        Positions that a sequence keeps before its newest ones; older ones are evicted. None: all.

    Attributes
    ----------
    positions, num_sequences : int32 array (num_cells,)
        Position of each cell, and how many sequences hold it; 0: the cell is free, and the position stale.
    """

    def __init__(self, num_cells: int, memory: int | None = None) -> None:
        self.memory = memory
        self.positions = np.zeros(num_cells, np.int32)
        self.num_sequences = np.zeros(num_cells, np.int32)
        self._vacant = np.full(kernels.num_groups(num_cells), kernels.GROUP, np.int32)
        if num_cells % kernels.GROUP:
            self._vacant[-1] = num_cells % kernels.GROUP
        self._sequences: dict[int, _Sequence] = {}
        # Sequences that have got tokens since they were last looked at for some to evict.
        self._fresh: set[int] = set()

    # -- what it is

    @property
    def num_cells(self) -> int:
        """Cells in all."""
        return len(self.positions)

    @property
    def num_free(self) -> int:
        """Cells that no sequence holds."""
        return int(self._vacant.sum())

    @property
    def sequences(self) -> list[int]:
        """Sequences that are known; some may hold nothing."""
        return list(self._sequences)

    def held(self, sequence: int) -> Held:
        """The cells of a sequence, by position: a view, valid until the next change; of an unknown one empty."""
        found = self._sequences.get(sequence)
        return _NO_CELLS if found is None else found.held

    def before(self, held: Held, position: int) -> int:
        """How many cells of a list that `held` gave come before a position."""
        position = min(position, kernels.LAST_POSITION + 1)
        return int(kernels.compiled("bisect")(self.positions, held, position))

    def can_resume(self, sequence: int, position: int, window: int) -> bool:
        """Whether all that a token at `position` sees within `window` is still there."""
        if self.memory is None:
            return True
        held = self.held(sequence)
        if not len(held):
            return False
        first, last = int(self.positions[held[0]]), int(self.positions[held[-1]])
        return max(0, position - window) >= first and position <= last + 1

    # -- a batch

    def plan_forward(self, rows: Rows) -> Forward:
        """Find cells for a batch, and what is evicted for it.

        Parameters
        ----------
        rows : Rows
            The batch.

        Returns
        -------
        Forward

        Raises
        ------
        CacheFull
            If there are too few; nothing has changed, and nothing was evicted.
        """
        kept = [] if self.memory is None else self._evictions(rows, self.memory)
        if not kept:
            evicted = _NO_CELLS
        elif len(kept) == 1:
            evicted = kept[0][0].cells[kept[0][0].begin : kept[0][1]]
        else:
            evicted = np.concatenate([s.cells[s.begin : begin] for s, begin in kept])
        n = len(rows.positions)
        cells = np.empty(n, np.int64)
        found = kernels.compiled("find_free")(self.num_sequences, self._vacant, evicted, cells)
        if found < n:
            raise CacheFull(
                f"expected {n} free cells for a batch of {n} tokens, got {found} of {self.num_cells}; "
                "remove sequences, or init with more sequences or a larger capacity"
            )
        return Forward(rows, cells, evicted, kept)

    def _evictions(self, rows: Rows, memory: int) -> list[tuple[_Sequence, int]]:
        """Sequences that hold positions too old to be kept, and where the others begin."""
        oldest: dict[int, int] = {}
        bounds = rows.starts.tolist()
        for run, sequence in enumerate(rows.sequences):
            part = rows.positions[bounds[run] : bounds[run + 1]]
            low = int(part[0] if rows.ordered else part.min())
            oldest[sequence] = min(low, oldest.get(sequence, low))
        for sequence in self._fresh.difference(oldest):
            held = self.held(sequence)
            if len(held):
                oldest[sequence] = int(self.positions[held[-1]]) + 1
        kept = []
        for sequence, position in oldest.items():
            found = self._sequences.get(sequence)
            if found is not None and found.begin < found.end:
                if self.positions[found.cells[found.begin]] < position - memory:
                    n = self.before(found.held, position - memory)
                    kept.append((found, found.begin + n))
        return kept

    def commit_forward(self, plan: Forward) -> None:
        """Do what `plan_forward` found."""
        rows, cells = plan.rows, plan.cells
        for found, begin in plan.kept:
            found.begin = begin
        kernels.compiled("assign")(
            self.positions, self.num_sequences, self._vacant, plan.evicted, cells, rows.positions
        )
        merge, bounds = kernels.compiled("merge"), rows.starts.tolist()
        for run, sequence in enumerate(rows.sequences):
            if sequence not in self._sequences:
                self._sequences[sequence] = _Sequence()
            found = self._sequences[sequence]
            part = slice(bounds[run], bounds[run + 1])
            new = cells[part]
            if not rows.ordered:
                new = new[np.argsort(rows.positions[part], kind="stable")]
            found.make_room(len(new))
            merge(self.positions, found.cells[found.begin :], found.end - found.begin, new)
            found.end += len(new)
        self._fresh = set(rows.sequences)

    # -- other changes

    def plan_removal(self, sequence: int, begin: int, end: int | None) -> Removal:
        """Find what the removal of the positions ``[begin, end)`` changes.

        Parameters
        ----------
        sequence : int
            Whose.
        begin : int
            First position that goes.
        end : int or None
            Position after the last that goes: it and those after it move up to `begin`. None: all go.

        Returns
        -------
        Removal

        Raises
        ------
        NotSupported
            If a cell that has to move belongs to another sequence too.
        """
        held = self.held(sequence)
        first = self.before(held, begin)
        if end is None:
            return Removal(sequence, first, len(held), _NO_CELLS, 0)
        last = self.before(held, end)
        moved = held[last:] if end > begin else _NO_CELLS
        if len(moved) and self.num_sequences[moved].max() > 1:
            cell = moved[self.num_sequences[moved] > 1][0]
            raise NotSupported(
                f"`end`: the token at position {self.positions[cell]} would have to move to "
                f"{self.positions[cell] + begin - end}, and {self.num_sequences[cell] - 1} other "
                "sequences share it; remove to the end, or remove them first"
            )
        return Removal(sequence, first, last, moved, begin - end)

    def commit_removal(self, plan: Removal) -> None:
        """Do what `plan_removal` found; a sequence without cells is forgotten."""
        found = self._sequences.get(plan.sequence)
        if found is None:
            return
        if len(plan.moved):
            kernels.compiled("move")(self.positions, plan.moved, plan.offset)
        held = found.held
        kernels.compiled("leave")(self.num_sequences, self._vacant, held[plan.first : plan.last])
        after = held[plan.last :].copy()
        found.end -= plan.last - plan.first
        found.held[plan.first :] = after
        if found.begin == found.end:
            del self._sequences[plan.sequence]
            self._fresh.discard(plan.sequence)

    def plan_compaction(self, sequence: int, keep: Ints) -> Compaction:
        """Find what it changes that a sequence keeps some positions only, which become 0, 1, 2, …

        Parameters
        ----------
        sequence : int
            Whose.
        keep : int64 array (n,)
            Positions, rising. Those that were evicted keep their place among the others.

        Returns
        -------
        Compaction

        Raises
        ------
        IndexError
            If the sequence does not have a position, and has not evicted it.
        NotSupported
            If a cell that has to move belongs to another sequence too.
        """
        held = self.held(sequence)
        positions = self.positions[held]
        evicted = 0
        if self.memory is not None:
            evicted = int(np.searchsorted(keep, positions[0])) if len(positions) else len(keep)
        missing = keep[evicted:][~np.isin(keep[evicted:], positions)]
        if len(missing):
            raise IndexError(
                f"`keep`: expected positions that sequence {sequence} holds, got {missing[0]}; see "
                "positions(seq)"
            )
        new = np.searchsorted(keep, positions)
        stays = np.isin(positions, keep)
        kept, offsets = held[stays], (new - positions)[stays]
        moved = kept[offsets != 0]
        if len(moved) and self.num_sequences[moved].max() > 1:
            cell = moved[self.num_sequences[moved] > 1][0]
            raise NotSupported(
                f"`keep`: the token at position {self.positions[cell]} would have to move, and "
                f"{self.num_sequences[cell] - 1} other sequences share it; keep all that comes before "
                "it, or remove them first"
            )
        moves = [(kept[offsets == by], int(by)) for by in np.unique(offsets) if by]
        return Compaction(sequence, kept, held[~stays], moves)

    def commit_compaction(self, plan: Compaction) -> None:
        """Do what `plan_compaction` found; a sequence without cells is forgotten."""
        found = self._sequences.get(plan.sequence)
        if found is None:
            return
        for moved, offset in plan.moves:
            kernels.compiled("move")(self.positions, moved, offset)
        kernels.compiled("leave")(self.num_sequences, self._vacant, plan.dropped)
        found.end = found.begin + len(plan.kept)
        found.held[:] = plan.kept
        if not len(plan.kept):
            del self._sequences[plan.sequence]
            self._fresh.discard(plan.sequence)

    def copy_prefix(self, source: int, to: int, length: int) -> None:
        """Let a sequence hold the positions below `length` of another, and nothing else.

        Parameters
        ----------
        source, to : int
            The sequences. If they are one, the rest of it is dropped.
        length : int
            First position that is not copied.
        """
        held = self.held(source)
        prefix = held[: self.before(held, length)].copy()
        kernels.compiled("join")(self.num_sequences, self._vacant, prefix)
        kernels.compiled("leave")(self.num_sequences, self._vacant, self.held(to))
        self._sequences[to] = _Sequence(prefix)
        self._fresh.add(to)

    # -- the proof

    def check(self) -> None:
        """Look for a contradiction in the books.

        Raises
        ------
        AssertionError
            If there is one.
        """
        holders = np.zeros(self.num_cells, np.int64)
        for found in self._sequences.values():
            held = found.held
            assert len(np.unique(held)) == len(held), "a list names a cell twice"
            assert np.all(np.diff(self.positions[held]) >= 0), "a list is out of order"
            holders[held] += 1
        assert np.array_equal(holders, self.num_sequences), "holders are counted wrong"
        groups = np.arange(self.num_cells) // kernels.GROUP
        free = np.bincount(groups[holders == 0], minlength=len(self._vacant))
        assert np.array_equal(free, self._vacant), "free cells are counted wrong"
