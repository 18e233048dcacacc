"""`Cells`: which cell of a multi-sequence cache stores which position, for which sequences.

A *cell* is a slot for one token: it has a position, and sequences own it. Cells are numbers; K and V lie elsewhere.
The frequent question is which cells a sequence owns between two positions. So each sequence has a list of its cells,
ordered by position, and a cell only counts its owners. Every rule is then about a range of one list:

- causality ends the range after the query's own position; a window, or a chunk, begins it some positions earlier;
- eviction and removal to the end drop one end of the list, any other removal drops a slice;
- copying a prefix copies the first part of the list, and adds an owner to each of its cells.

New tokens go to the lowest free cells, wherever they are. Every change is planned and then committed: a plan changes
nothing, and a commit cannot fail, as all the arrays that it needs were made by the plan.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from numkv.cells import compiled as kernels
from numkv.errors import CacheFull, DimensionMismatch, NotSupported, NumkvError, UnsupportedDType
from numkv.snapshots.fields import claims, expect

Ints = NDArray[np.int64]
CellList = NDArray[np.int32]

_LAST_INT64 = 2**63 - 1
_NO_CELLS: CellList = np.empty(0, np.int32)


class Rows(NamedTuple):
    """The tokens of a batch, in runs: neighbours of one sequence."""

    positions: Ints
    """Position of each token."""
    starts: Ints
    """First token of each run, and the number of tokens."""
    sequences: list[int]
    """Sequence of each run."""
    ordered: bool
    """Whether positions never decrease within a run."""


class Forward(NamedTuple):
    """Cells for a batch, and what is evicted for it; made by `Cells.plan_forward`."""

    rows: Rows
    cells: Ints
    """Cell of each token."""
    evicted: CellList
    """Cells that are evicted."""
    kept: list[tuple[CellsOfSequence, int]]
    """Sequences that cells are evicted from, and where the rest of each list begins."""
    runs: list[Ints]
    """Cells of each run, by position."""
    lists: dict[int, CellsOfSequence]
    """Lists of new sequences, and longer ones of sequences whose list has no room for the batch."""


class Change(NamedTuple):
    """Which cells a sequence loses, and which change their position; see `Cells.plan_removal`, `plan_compaction`."""

    sequence: int
    first: int
    """The cells of the sequence's list before this one stay as they are."""
    after: CellList
    """The cells that then come next to them."""
    dropped: CellList
    """The cells that the sequence loses."""
    moves: list[tuple[CellList, int]]
    """Cells whose position changes, by position, and what is added to it."""


class CellsOfSequence:
    """The cells of one sequence: ``cells[begin:end]``, by position."""

    __slots__ = ("begin", "cells", "end")

    def __init__(self, cells: CellList) -> None:
        self.cells = cells
        self.begin = 0
        self.end = len(cells)

    @classmethod
    def with_room(cls, owned: CellList, n: int) -> CellsOfSequence:
        """A list of the same cells, with room for `n` more after the last."""
        new = cls(np.empty(max(16, 2 * (len(owned) + n)), np.int32))
        new.end = len(owned)
        new.cells[: len(owned)] = owned
        return new

    @property
    def owned(self) -> CellList:
        return self.cells[self.begin : self.end]


def _integers(name: str, x: Any) -> Ints:
    """Check a row of integers, and copy it."""
    if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):  # NumPy imports it late
        raise NotSupported(
            f"`{name}`: expected one integer for each token, got a masked array; pass its .compressed()"
        )
    try:
        given = np.asarray(x)
    except (ValueError, TypeError, OverflowError) as error:
        raise UnsupportedDType(
            f"`{name}`: expected one integer for each token, got what NumPy makes no array of ({error})"
        ) from error
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
    if given.dtype.kind == "u" and given.size and given.max() > _LAST_INT64:
        raise IndexError(f"`{name}`: expected integers below 2**63, got {given.max()}")
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
    UnsupportedDType, NotSupported
        If they are no integers, or masked.
    IndexError
        If a sequence is outside ``[0, 2**63)``, or a position is outside ``[0, 2**31)``.
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

    The cost of a call depends on the cells that it concerns, not on how many there are.

    Parameters
    ----------
    num_cells : int
        How many.
    memory : int or None
        Positions that a sequence keeps before its newest ones; older ones are evicted. None: all.
    num_sinks : int
        Positions from 0 on that are never evicted: attention sinks. Models put much attention on a sequence's first
        tokens, whatever these are; without them predictions fall apart as soon as a window has slid past them. See Xiao
        et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453), section 3.2.

    Attributes
    ----------
    positions, num_sequences : int32 array (num_cells,)
        Position of each cell, and how many sequences own it; 0: the cell is free, and its position stale.
    """

    def __init__(self, num_cells: int, memory: int | None = None, num_sinks: int = 0) -> None:
        self.memory, self.num_sinks = memory, num_sinks
        self.positions = np.zeros(num_cells, np.int32)
        self.num_sequences = np.zeros(num_cells, np.int32)
        self._vacant = np.empty(-(-num_cells // kernels.SPAN), np.int32)
        self._all_vacant()
        self._sequences: dict[int, CellsOfSequence] = {}
        # Sequences that got tokens since they were last searched for some to evict.
        self._fresh: set[int] = set()

    # -- what it is

    @property
    def num_cells(self) -> int:
        """Cells in all."""
        return len(self.positions)

    @property
    def num_free(self) -> int:
        """Cells that no sequence owns."""
        return int(self._vacant.sum())

    @property
    def sequences(self) -> list[int]:
        """Known sequences; some may own no cells."""
        return list(self._sequences)

    def owned(self, sequence: int) -> CellList:
        """The cells of a sequence, by position: a view, valid until the next change. Empty if it is not known."""
        found = self._sequences.get(sequence)
        return _NO_CELLS if found is None else found.owned

    def before(self, owned: CellList, position: int) -> int:
        """Return how many cells of a list from `owned` come before a position."""
        position = min(position, kernels.LAST_POSITION + 1)
        return int(kernels.compiled("bisect")(self.positions, owned, position))

    def can_resume(self, sequence: int, position: int, window: int) -> bool:
        """Return whether all that a token at `position` attends to within `window` is still stored."""
        if self.memory is None:
            return True
        owned = self.owned(sequence)
        if not len(owned):
            return False
        sinks = self.before(owned, self.num_sinks) if self.num_sinks else 0
        if sinks == len(owned):
            sinks = 0
        first, last = int(self.positions[owned[sinks]]), int(self.positions[owned[-1]])
        if first == sinks:  # nothing is evicted
            first = 0
        return max(0, position - window) >= first and position <= last + 1

    # -- a batch

    def plan_forward(self, rows: Rows) -> Forward:
        """Find cells for a batch, and what has to be evicted.

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
            If there are too few; nothing has changed, and nothing is evicted.
        """
        kept: list[tuple[CellsOfSequence, int]] = []
        behind_sinks: dict[CellsOfSequence, CellList] = {}
        gone: list[CellList] = []
        for found, begin in [] if self.memory is None else self._evictions(rows, self.memory):
            sinks = self.before(found.owned, self.num_sinks) if self.num_sinks else 0
            first, gap = found.begin + sinks, np.s_[sinks : begin - found.begin]
            if not sinks:
                kept.append((found, begin))
            elif first < begin:
                behind_sinks[found] = np.delete(found.owned, gap)
            if first < begin:
                gone.append(found.cells[first:begin])
        evicted = gone[0] if len(gone) == 1 else np.concatenate([_NO_CELLS, *gone])
        n = len(rows.positions)
        cells = np.empty(n, np.int64)
        found = kernels.compiled("find_free")(self.num_sequences, self._vacant, evicted, cells)
        if found < n:
            raise CacheFull(
                f"expected {n} free cells for a batch of {n} tokens, got {found} of {self.num_cells}; "
                "remove sequences, or init with more sequences or a larger capacity"
            )
        bounds = rows.starts.tolist()
        runs = [cells[i:j] for i, j in itertools.pairwise(bounds)]
        if not rows.ordered:
            for run, new in enumerate(runs):
                part = rows.positions[bounds[run] : bounds[run + 1]]
                runs[run] = new[np.argsort(part, kind="stable")]
        lists = self._new_lists(rows, runs, kept, behind_sinks)
        return Forward(rows, cells, evicted, kept, runs, lists)

    def _new_lists(
        self, rows: Rows, runs: list[Ints], kept: list[tuple[CellsOfSequence, int]],
        behind_sinks: dict[CellsOfSequence, CellList],
    ) -> dict[int, CellsOfSequence]:  # fmt: skip
        """Lists of sequences that have no room for new cells, or lose some behind their sinks."""
        counts: dict[int, int] = {}
        for sequence, new in zip(rows.sequences, runs, strict=True):
            counts[sequence] = counts.get(sequence, 0) + len(new)
        lists, begins = {}, dict(kept)
        for sequence, n in counts.items():
            found = self._sequences.get(sequence)
            if found is None:
                lists[sequence] = CellsOfSequence.with_room(_NO_CELLS, n)
            elif found.end + n > len(found.cells):
                owned = found.cells[begins.get(found, found.begin) : found.end]
                lists[sequence] = CellsOfSequence.with_room(owned, n)
        for sequence, found in self._sequences.items() if behind_sinks else ():
            if found in behind_sinks:
                room = counts.get(sequence, 0)
                lists[sequence] = CellsOfSequence.with_room(behind_sinks[found], room)
        return lists

    def _evictions(self, rows: Rows, memory: int) -> list[tuple[CellsOfSequence, int]]:
        """Sequences with positions too old to be kept, and where the others begin in their lists."""
        oldest: dict[int, int] = {}
        bounds = rows.starts.tolist()
        for run, sequence in enumerate(rows.sequences):
            part = rows.positions[bounds[run] : bounds[run + 1]]
            low = int(part[0] if rows.ordered else part.min())
            oldest[sequence] = min(low, oldest.get(sequence, low))
        for sequence in self._fresh.difference(oldest):
            owned = self.owned(sequence)
            if len(owned):
                oldest[sequence] = int(self.positions[owned[-1]]) + 1
        kept = []
        for sequence, position in oldest.items():
            found = self._sequences.get(sequence)
            if found is not None and found.begin < found.end:
                if self.positions[found.cells[found.begin]] < position - memory:
                    n = self.before(found.owned, position - memory)
                    kept.append((found, found.begin + n))
        return kept

    def commit_forward(self, plan: Forward) -> None:
        """Carry out a `Forward`."""
        for found, begin in plan.kept:
            found.begin = begin
        self._sequences.update(plan.lists)
        kernels.compiled("assign")(
            self.positions, self.num_sequences, self._vacant, plan.evicted, plan.cells,
            plan.rows.positions,
        )  # fmt: skip
        merge = kernels.compiled("merge")
        for sequence, new in zip(plan.rows.sequences, plan.runs, strict=True):
            found = self._sequences[sequence]
            merge(self.positions, found.cells[found.begin :], found.end - found.begin, new)
            found.end += len(new)
        self._fresh = set(plan.rows.sequences)

    # -- other changes

    def plan_removal(self, sequence: int, begin: int, end: int | None) -> Change:
        """Plan to remove the positions ``[begin, end)``.

        Parameters
        ----------
        sequence : int
            The sequence.
        begin : int
            First position to remove.
        end : int or None
            Position after the last to remove: it and those after it move to `begin`. None: remove all from `begin` on.

        Returns
        -------
        Change

        Raises
        ------
        NotSupported
            If another sequence owns a cell that has to move.
        """
        owned = self.owned(sequence)
        first = self.before(owned, begin)
        if end is None:
            return Change(sequence, first, _NO_CELLS, owned[first:], [])
        last = self.before(owned, end)
        after = owned[last:].copy()
        moved = after if end > begin else _NO_CELLS
        shared = moved[self.num_sequences[moved] > 1]
        if len(shared):
            at, others = self.positions[shared[0]], self.num_sequences[shared[0]] - 1
            raise NotSupported(
                f"`end`: the token at position {at} would have to move to {at + begin - end}, and {others} other "
                "sequences share it; remove to the end, or remove them first"
            )
        moves = [(moved, begin - end)] if len(moved) else []
        return Change(sequence, first, after, owned[first:last], moves)

    def plan_compaction(self, sequence: int, keep: Ints) -> Change:
        """Plan to keep only some positions of a sequence, which become 0, 1, 2, …

        Parameters
        ----------
        sequence : int
            The sequence.
        keep : int64 array (n,)
            Positions, rising. Evicted ones may be among them, and are counted.

        Returns
        -------
        Change

        Raises
        ------
        IndexError
            If the sequence does not have a position, and has not evicted it.
        NotSupported
            If another sequence owns a cell that has to move.
        """
        owned = self.owned(sequence)
        positions = self.positions[owned]
        missing = keep[~np.isin(keep, positions)]
        if self.memory is not None:
            # What a window has evicted lies before its tokens, which follow the sinks.
            behind = positions[self.before(owned, self.num_sinks) :]
            missing = missing[missing >= (behind[0] if len(behind) else np.inf)]
        if len(missing):
            raise IndexError(
                f"`keep`: expected positions that sequence {sequence} holds, got {missing[0]}; see "
                "positions(seq)"
            )
        new = np.searchsorted(keep, positions)
        stays = np.isin(positions, keep)
        kept, offsets = owned[stays], (new - positions)[stays]
        moved = kept[offsets != 0]
        shared = moved[self.num_sequences[moved] > 1]
        if len(shared):
            at, others = self.positions[shared[0]], self.num_sequences[shared[0]] - 1
            raise NotSupported(
                f"`keep`: the token at position {at} would have to move, and {others} other sequences share it; keep "
                "all that comes before it, or remove them first"
            )
        moves = [(kept[offsets == by], int(by)) for by in np.unique(offsets) if by]
        return Change(sequence, 0, kept, owned[~stays], moves)

    def commit_change(self, plan: Change) -> None:
        """Carry out a `Change`; a sequence without cells is forgotten."""
        found = self._sequences.get(plan.sequence)
        if found is None:
            return
        for moved, offset in plan.moves:
            kernels.compiled("move")(self.positions, moved, offset)
        kernels.compiled("leave")(self.num_sequences, self._vacant, plan.dropped)
        found.end = found.begin + plan.first + len(plan.after)
        found.owned[plan.first :] = plan.after
        if found.begin == found.end:
            del self._sequences[plan.sequence]
            self._fresh.discard(plan.sequence)

    def plan_copy(self, source: int, length: int) -> CellList:
        """Return a copy of the list of a sequence's cells of positions below `length`."""
        owned = self.owned(source)
        return owned[: self.before(owned, length)].copy()

    def commit_copy(self, to: int, prefix: CellList) -> None:
        """Make a sequence consist of what `plan_copy` returned, and nothing else; it may be of the same sequence."""
        kernels.compiled("join")(self.num_sequences, self._vacant, prefix)
        kernels.compiled("leave")(self.num_sequences, self._vacant, self.owned(to))
        self._sequences[to] = CellsOfSequence(prefix)
        self._fresh.add(to)

    # -- all of it

    def clear(self) -> None:
        """Free all cells, in place."""
        self.num_sequences.fill(0)
        self._all_vacant()
        self._sequences.clear()
        self._fresh.clear()

    def _all_vacant(self) -> None:
        """Count all cells as free."""
        self._vacant.fill(kernels.SPAN)
        if self.num_cells % kernels.SPAN:
            self._vacant[-1] = self.num_cells % kernels.SPAN

    def tables(self) -> dict[str, NDArray[Any]]:
        """Who owns which cells, for a snapshot: the cells in use, and those of one sequence after another."""
        used, sequences = np.flatnonzero(self.num_sequences), self.sequences
        lists = [self.owned(seq) for seq in sequences]
        return {
            "cells": used.astype(np.int32),
            "positions": self.positions[used],
            "sequences": np.array(sequences, np.int64),
            "lengths": np.array([len(x) for x in lists], np.int64),
            "lists": np.concatenate([_NO_CELLS, *lists]),
            "fresh": np.array([seq in self._fresh for seq in sequences], np.uint8),
        }

    def resume(
        self, cells: CellList, positions: CellList, sequences: Ints, lengths: Ints, lists: CellList,
        fresh: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """Take what `tables` gave, where all cells are free.

        Raises
        ------
        Damaged
            If it contradicts itself.
        """
        there = (lists >= 0) & (lists < self.num_cells)
        expect(bool(there.all()), "there is no such cell")
        counts = np.bincount(lists, minlength=self.num_cells)
        expect(
            np.array_equal(np.flatnonzero(counts), cells), "cells in use are not those of sequences"
        )
        known = len(np.unique(sequences)) == len(sequences) and bool((sequences >= 0).all())
        expect(known, "a sequence comes twice, or is negative")
        plain = bool(((lengths >= 0) & (lengths <= len(lists))).all())
        expect(plain and int(lengths.sum()) == len(lists), "wrong lengths")
        of_each = np.split(lists, np.cumsum(lengths)[:-1])
        pairs = zip(sequences.tolist(), of_each, strict=False)  # `split` makes one list of none
        self._sequences = {seq: CellsOfSequence(owned.copy()) for seq, owned in pairs}
        self.positions[cells], self.num_sequences[:] = positions, counts
        taken = np.bincount(cells // kernels.SPAN, minlength=len(self._vacant))
        self._vacant -= taken.astype(self._vacant.dtype)
        self._fresh = set(sequences[fresh > 0].tolist())
        with claims("cells"):
            self.check()

    def copy(self) -> Self:
        """Cells of their own that hold the same."""
        new = object.__new__(type(self))
        new.__dict__.update(vars(self))
        new.positions, new.num_sequences = self.positions.copy(), self.num_sequences.copy()
        new._vacant, new._fresh = self._vacant.copy(), set(self._fresh)
        new._sequences = {
            seq: CellsOfSequence(found.owned.copy()) for seq, found in self._sequences.items()
        }
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        vars(self).update(vars(self.copy()))  # as arrays of a pickle may be read-only

    def check(self) -> None:
        """Look for a contradiction in the books.

        Raises
        ------
        NumkvError
            If there is one.
        """
        owners = np.zeros(self.num_cells, np.int64)
        for sequence, found in self._sequences.items():
            owned, of = found.owned, f"of sequence {sequence}"
            if len(owned) and not 0 <= owned.min() <= owned.max() < self.num_cells:
                raise NumkvError(
                    f"check: the list {of} names cells outside of [0, {self.num_cells})"
                )
            if len(np.unique(owned)) < len(owned):
                raise NumkvError(f"check: the list {of} names a cell twice")
            positions = self.positions[owned]
            if np.any(np.diff(positions) < 0) or np.any(positions < 0):
                raise NumkvError(f"check: positions {of} are negative or out of order: {positions}")
            owners[owned] += 1
        wrong = np.flatnonzero(owners != self.num_sequences)
        if len(wrong):
            cell = wrong[0]
            raise NumkvError(
                f"check: cell {cell} is in the lists of {owners[cell]} sequences, and "
                f"{self.num_sequences[cell]} are counted"
            )
        span_of = np.arange(self.num_cells) // kernels.SPAN
        free = np.bincount(span_of[owners == 0], minlength=len(self._vacant))
        if not np.array_equal(free, self._vacant):
            raise NumkvError(
                f"check: {free.sum()} cells are free, and {self._vacant.sum()} are counted"
            )
