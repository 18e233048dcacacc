"""The tokens of a cache layer, their blocks, and the changes of a forward pass: plain numbers, no tensors.

`BatchMetadata` is never changed. A forward pass, a crop or a reordering makes a new object, so layers with the same
history share one. The metadata of a pass are computed once for all of them. A failed pass leaves a layer's metadata as
it was.

A batch has *columns*, which transformers counts, padding included. A sequence has *tokens*, which are stored, unlike
padding. Tokens lie in blocks, as in a paged pool. Sequences that beam search has split share blocks until one of them
writes to the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from numkv.errors import DimensionMismatch, NotSupported

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
#: Number of blocks of another pool, and copies (from, to) from this one into it.
Move = tuple[int, NDArray[np.int32], NDArray[np.int32]]
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _once(method: _Method) -> _Method:
    """Cache a method of metadata by its arguments, so that layers that share metadata share its results."""

    @functools.wraps(method)
    def found(self: BatchMetadata, *args: Any, **kwargs: Any) -> Any:
        key = method, args, *kwargs.values()
        if key not in self.made:
            self.made[key] = method(self, *args, **kwargs)
        return self.made[key]

    return found  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Visibility of tokens, in addition to causality.

    Attributes
    ----------
    window : int
        Visible tokens, its own included; 0 for all.
    chunk : int
        Tokens of a chunk, within which a token sees; 0 for none.
    blocks : int array (batch, columns) or None
        The block of each column, earlier ones included, or -1. Tokens of a block, such as an image, also see its later
        tokens.
    cuts : bool
        Whether blocks end where the window begins.
    """

    window: int = 0
    chunk: int = 0
    blocks: NDArray[Any] | None = None
    cuts: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The changes of one forward pass to layers of one history.

    Attributes
    ----------
    copies : tuple of int32 array (n,), or None
        Blocks to copy before anything is written: from, to.
    slots : int64 array (batch * T,)
        Slot of each new row, -1 for padding.
    queries : int64 array (n,) or None
        Indices of the computed queries among ``batch * T``; None for all.
    table, lengths, starts, ranges : array
        Block table, lengths, starts of queries and visible ranges (or None), as arguments of attention.
    after : BatchMetadata
        Metadata after the pass.
    shrink : Move or None
        Blocks of a smaller pool for the tokens that remain after the pass, and copies into it.
    before, new, seen, columns : BatchMetadata, bool array (batch, columns) or None, Seen, int
        Arguments from which the step was computed.
    blocks : tuple of int64 array (batch, columns), or None
        Range of positions in which each new token sees its block.
    """

    copies: tuple[NDArray[np.int32], NDArray[np.int32]] | None
    slots: Ints
    queries: Ints | None
    table: NDArray[np.int32]
    lengths: Ints
    starts: Ints
    ranges: Ints | None
    after: BatchMetadata
    shrink: Move | None
    before: BatchMetadata
    new: Flags | None
    seen: Seen
    columns: int
    blocks: tuple[Ints, Ints] | None

    def copy_blocks(self, pool: Any) -> None:
        """Copy the blocks that sequences stop sharing."""
        if self.copies is not None:
            pool.copy_blocks(self.copies[0], pool, self.copies[1])

    def of_last(self, columns: int) -> Step:
        """Return the step for only the queries of the last columns."""
        metadata, new = self.before, self.new
        ordinal = _ordinal(new, self.columns)[:, -columns:]
        new = None if new is None else new[:, -columns:]
        found = metadata._queries(new, ordinal, self.lengths, self.seen, self._blocks(columns))
        queries, lengths, starts, ranges = found
        return replace(self, queries=queries, lengths=lengths, starts=starts, ranges=ranges)

    def limits(self, columns: int) -> tuple[Ints, Ints]:
        """Return the begin and end of the visible positions of the last columns' queries, each (batch, columns)."""
        ordinal = _ordinal(self.new, self.columns)[:, -columns:]
        return self.before._limits(ordinal, self.seen, self._blocks(columns))

    def positions(self) -> Ints:
        """Return the position of each new token, (batch or 1, columns); padding has that of the token before it."""
        return self.before.lengths[:, None] + _ordinal(self.new, self.columns) - 1

    def _blocks(self, columns: int) -> tuple[Ints, Ints] | None:
        """Return `blocks` of the last columns."""
        if self.blocks is None:
            return None
        return self.blocks[0][:, -columns:], self.blocks[1][:, -columns:]


@dataclass(frozen=True, slots=True, eq=False)
class BatchMetadata:
    """The tokens of a batch, in all layers of one history.

    Attributes
    ----------
    block_size : int
        Tokens of a block.
    num_blocks : int
        Blocks of the pool.
    reach : int
        Number of earlier tokens that a new one may see; older ones are dropped. -1 for all.
    columns : int
        Columns so far, padding included.
    lengths : int64 array (batch,)
        Tokens of each sequence, dropped ones included.
    first : int64 array (batch,)
        Number of dropped blocks of each sequence.
    table : int32 array (batch, width)
        Later blocks of each sequence; entries past its length are undefined.
    valid : bool array (batch, columns) or None
        Which columns are tokens; None if all are.
    shared : bool
        Whether sequences may share blocks.
    made : dict
        Cached results of crops, reorderings and other methods.
    """

    block_size: int
    num_blocks: int
    reach: int
    columns: int
    lengths: Ints
    first: Ints
    table: NDArray[np.int32]
    valid: Flags | None = None
    shared: bool = False
    made: dict[Any, Any] = field(init=False, default_factory=dict)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def empty(cls, batch: int, block_size: int, num_blocks: int, reach: int) -> BatchMetadata:
        """Return the metadata of sequences without tokens: one object for all layers with equal arguments."""
        zeros = np.zeros(batch, np.int64)
        table = np.zeros((batch, 0), np.int32)
        return cls(block_size, num_blocks, reach, 0, zeros, zeros, table)

    def __deepcopy__(self, memo: Any) -> BatchMetadata:
        return self

    def __reduce__(self) -> Any:
        # Results of methods are computed again.
        return BatchMetadata, tuple(getattr(self, x.name) for x in fields(self) if x.init)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    # -- a forward pass

    def check_mask(self, mask: Flags | None, new_columns: int) -> Flags | None:
        """Check a padding mask over earlier and new columns, and return its new part.

        Parameters
        ----------
        mask : bool array (batch, columns or more), or None
            Which columns are tokens.
        new_columns : int
            Columns of the pass.

        Returns
        -------
        bool array (batch, new_columns) or None
            Which of the new columns are tokens; None if all are.

        Raises
        ------
        DimensionMismatch
            If the mask has another batch, or fewer columns.
        NotSupported
            If earlier columns differ from the masks of earlier passes.
        """
        if mask is None:
            if self.valid is None or self.valid.all():
                return None
            raise NotSupported(
                "`attention_mask`: expected a mask that marks the padding of earlier calls again, got None"
            )
        columns = self.columns + new_columns
        if mask.shape[0] != self.batch or mask.shape[1] < columns:
            raise DimensionMismatch(
                f"`attention_mask`: expected ({self.batch}, {columns}), for the {self.columns} columns in the cache "
                f"and {new_columns} new ones, got {mask.shape}; it covers all tokens, not the new ones alone",
                expected=(self.batch, columns),
                actual=mask.shape,
            )
        past, new = mask[:, : self.columns], mask[:, self.columns : columns]
        same = past.all() if self.valid is None else np.array_equal(past, self.valid)
        if not same:
            raise NotSupported(
                "`attention_mask`: expected the same zeros for tokens in the cache as when they came, got others; "
                "tokens cannot be hidden or shown later on"
            )
        return None if new.all() else new

    def advance(
        self, mask: Flags | None, new_columns: int, seen: Seen, *, keep: bool = False
    ) -> Step:
        """Compute the step of a forward pass over new columns.

        Parameters
        ----------
        mask : bool array (batch, columns or more), or None
            Which columns are tokens, earlier ones included.
        new_columns : int
            Columns of the pass, T.
        seen : Seen
            Visibility of tokens.
        keep : bool
            Whether tokens out of reach are kept, because a crop may bring them back into it.

        Raises
        ------
        DimensionMismatch, NotSupported
            See `check_mask`; NotSupported also if a query would see tokens that were dropped.
        """
        new = self.check_mask(mask, new_columns)
        ordinal = _ordinal(new, new_columns)
        counts = np.full(self.batch, new_columns, np.int64) if new is None else new.sum(1)
        size, base = self.block_size, self.first * self.block_size
        old, end = self.lengths - base, self.lengths + counts - base
        copies, table = self._placed(old, end)
        valid = self._joined(new, new_columns)
        # Slots of the new rows.
        at = np.maximum(old[:, None] + ordinal - 1, 0)
        if table.shape[1]:
            slots = np.take_along_axis(table, at // size, 1).astype(np.int64) * size + at % size
        else:  # only padding so far
            slots = np.full(at.shape, -1, np.int64)
        if new is not None:
            slots[~new] = -1
        blocks = None if seen.blocks is None else self._block_ends(seen.blocks, valid, new_columns)
        self._check_seen(ordinal, counts, seen, blocks)
        queries, lengths, starts, ranges = self._queries(new, ordinal, end, seen, blocks)
        after = replace(
            self, columns=self.columns + new_columns, lengths=self.lengths + counts, table=table,
            valid=valid,
        )  # fmt: skip
        after, shrink = (after, None) if keep else after._within_reach()
        return Step(
            copies, slots.reshape(-1), queries, table, lengths, starts, ranges, after, shrink, self,
            new, seen, new_columns, blocks,
        )  # fmt: skip

    def more(self, mask: Flags | None, new_columns: int) -> int:
        """Return the free blocks that a pass needs; see `advance`."""
        new = self.check_mask(mask, new_columns)
        base = self.first * self.block_size
        old = self.lengths - base
        end = old + (new_columns if new is None else new.sum(1))
        missing, divided = self._missing(old, end)
        return int(missing.sum()) + len(divided)

    def _missing(self, old: Ints, end: Ints) -> tuple[Ints, list[int]]:
        """Return the missing blocks of sequences for rows up to `end`, and the sequences that copy their last block."""
        size = self.block_size
        missing = np.maximum(-(-end // size) - -(-old // size), 0)
        return missing, self._to_divide(old, end) if self.shared else []

    def _placed(
        self, old: Ints, end: Ints
    ) -> tuple[tuple[NDArray[np.int32], NDArray[np.int32]] | None, NDArray[np.int32]]:
        """Return copies and the table for rows up to `end`; the pool has room for them."""
        size = self.block_size
        missing, divided = self._missing(old, end)
        if not missing.any() and not divided:
            return None, self.table
        free = np.flatnonzero(self._counts() == 0).astype(np.int32)
        have = -(-old // size)
        width = max(self.table.shape[1], int((have + missing).max()))
        table = np.full((self.batch, width), -1, np.int32)
        table[:, : self.table.shape[1]] = self.table
        own, free = free[: len(divided)], free[len(divided) :]
        places = divided, old[divided] // size
        sources = table[places]
        table[places] = own
        for b in map(int, np.flatnonzero(missing)):
            more, free = np.split(free, [missing[b]])
            table[b, have[b] : have[b] + missing[b]] = more
        return (sources, own) if divided else None, table

    def _to_divide(self, old: Ints, end: Ints) -> list[int]:
        """Return the sequences that write to a shared block, without the last owner of each block."""
        used = self._counts()
        found = []
        for b in np.flatnonzero((old % self.block_size != 0) & (end > old)):
            block = self.table[b, old[b] // self.block_size]
            if used[block] > 1:
                used[block] -= 1
                found.append(int(b))
        return found

    def _counts(self) -> Ints:
        """Return how many sequences own each block."""
        return np.bincount(self.table[self.held()], minlength=self.num_blocks)

    @property
    def used(self) -> int:
        """Return the number of blocks with tokens."""
        return int(np.count_nonzero(self._counts()))

    @property
    def enough(self) -> int:
        """Return the number of blocks for tokens within reach; a pool of more than twice as many is shrunk."""
        return max(1, self.batch * (-(-self.reach // self.block_size) + 2))

    def held(self) -> Flags:
        """Return which entries of the table are blocks."""
        return self._in_blocks() > 0

    def fills(self) -> Ints:
        """Return the tokens in each block of the pool, for the owner with most of them."""
        found, inside = np.zeros(self.num_blocks, np.int64), self._in_blocks()
        held = inside > 0
        np.maximum.at(found, self.table[held], inside[held])
        return found

    def _in_blocks(self) -> Ints:
        """Return the tokens in each entry of the table."""
        size = self.block_size
        begins = size * np.arange(self.table.shape[1])
        return np.clip((self.lengths - self.first * size)[:, None] - begins, 0, size)

    def _joined(self, new: Flags | None, new_columns: int) -> Flags | None:
        """Return which columns are tokens, with the new ones."""
        if new is None and self.valid is None:
            return None
        past = np.ones((self.batch, self.columns), bool) if self.valid is None else self.valid
        if new is None:
            new = np.ones((self.batch, new_columns), bool)
        return np.concatenate([past, new], 1)

    def _block_ends(
        self, ids: NDArray[Any], valid: Flags | None, new_columns: int
    ) -> tuple[Ints, Ints]:
        """Return the ranges of positions in which new tokens see their blocks, as far as these are stored."""
        columns = self.columns + new_columns
        if ids.shape[0] != self.batch or ids.shape[1] < columns:
            raise DimensionMismatch(
                f"NumkvCache: expected blocks of ({self.batch}, {columns}) columns, earlier ones included, got "
                f"{ids.shape}; pass token_type_ids of all tokens",
                expected=(self.batch, columns),
                actual=ids.shape,
            )
        begin = np.full((self.batch, new_columns), np.iinfo(np.int64).max)
        end = np.zeros((self.batch, new_columns), np.int64)
        for b in range(self.batch):
            here = np.ones(columns, bool) if valid is None else valid[b]
            own = np.where(here, ids[b, :columns], -1)
            new, own = own[self.columns :], own[here]
            for block in np.unique(new[new >= 0]):
                at = np.flatnonzero(own == block)
                if at[-1] - at[0] >= len(at):
                    raise NotSupported(
                        "NumkvCache: expected blocks of tokens that see both ways without others in between, got one "
                        "in parts; run this input with another cache and attention implementation"
                    )
                begin[b, new == block], end[b, new == block] = at[0], at[-1] + 1
        return begin, end

    def _check_seen(
        self, ordinal: Ints, counts: Ints, seen: Seen, blocks: tuple[Ints, Ints] | None
    ) -> None:
        """Raise for queries that see removed tokens."""
        if not self.first.any():
            return
        # Padding before the first new token sees nothing that this token does not see.
        low, _ = self._limits(np.maximum(ordinal, 1), seen, blocks)
        removed = (self.first * self.block_size)[:, None]
        if ((low < removed) & (counts > 0)[:, None]).any():
            raise NotSupported(
                f"NumkvCache: expected a mask by which no token sees more than {self.reach} earlier ones in this "
                "layer, which has dropped the others, got one that shows more"
            )

    def _queries(
        self,
        new: Flags | None,
        ordinal: Ints,
        end: Ints,
        seen: Seen,
        blocks: tuple[Ints, Ints] | None,
    ) -> tuple[Ints | None, Ints, Ints, Ints | None]:
        """Return the computed queries, lengths, starts of each sequence's queries, and ranges."""
        batch, columns = self.batch, ordinal.shape[1]
        each = np.arange(batch + 1) * columns
        # Padding after tokens sees these tokens.
        late = new is not None and bool((~new & (self.lengths[:, None] + ordinal > 0)).any())
        plain = not seen.chunk and blocks is None
        if plain and (new is None or (columns == 1 and (end > 0).all())):
            return None, end, each, None
        if plain and not late:
            assert new is not None
            return np.flatnonzero(new), end, np.concatenate([[0], new.sum(1).cumsum()]), None
        base = (self.first * self.block_size)[:, None]
        low, high = self._limits(ordinal, seen, blocks)
        ranges = np.stack([np.maximum(low - base, 0), np.maximum(high - base, 0)], -1)
        return None, end, each, np.ascontiguousarray(ranges.reshape(-1, 2))

    def _limits(
        self, ordinal: Ints, seen: Seen, blocks: tuple[Ints, Ints] | None
    ) -> tuple[Ints, Ints]:
        """Return the begin and end of the visible positions of queries."""
        high = self.lengths[:, None] + ordinal
        if seen.chunk:
            low = (high - 1) // seen.chunk * seen.chunk
        elif seen.window:
            low = high - seen.window
        else:
            low = np.zeros_like(high)
        if blocks is not None:
            high = np.maximum(high, blocks[1])
            if not seen.cuts:
                low = np.minimum(low, blocks[0])
        return np.maximum(low, 0), high

    # -- dropping tokens

    def _within_reach(self) -> tuple[BatchMetadata, Move | None]:
        """Drop blocks that no later token sees; shrink the pool if it is twice as large as needed."""
        if self.reach < 0:
            return self, None
        metadata, size = self, self.block_size
        first = np.maximum(np.maximum(self.lengths - self.reach, 0) // size, self.first)
        dropped = first - self.first
        if dropped.any():
            at = np.arange(self.table.shape[1])[None] + dropped[:, None]
            table = np.take_along_axis(self.table, np.minimum(at, self.table.shape[1] - 1), 1)
            held = int((-(-(self.lengths - first * size) // size)).max(initial=0))
            table = np.ascontiguousarray(table[:, :held])
            metadata = replace(self, first=first, table=table)
        if self.num_blocks <= 2 * self.enough:
            return metadata, None
        less, move = metadata.packed(self.enough)
        return (less, move) if less.num_blocks < self.num_blocks else (metadata, None)

    @_once
    def packed(self, num_blocks: int = 0) -> tuple[BatchMetadata, Move]:
        """Return the same tokens in the first blocks of another pool, with at least `num_blocks`."""
        used = np.flatnonzero(self._counts()).astype(np.int32)
        renamed = np.zeros(max(1, self.num_blocks), np.int32)
        renamed[used] = np.arange(len(used))
        made = replace(
            self, num_blocks=max(num_blocks, len(used)), table=renamed[np.maximum(self.table, 0)]
        )
        return made, (made.num_blocks, used, np.arange(len(used), dtype=np.int32))

    @_once
    def cropped(self, columns: int, *, kept: bool) -> tuple[BatchMetadata, Move | None]:
        """Return a copy without the last columns, and without blocks that are then out of reach.

        Parameters
        ----------
        columns : int
            Number of columns to drop, from 0 up.
        kept : bool
            Whether tokens out of reach were kept since the last crop.

        Raises
        ------
        DimensionMismatch
            If there are fewer.
        RuntimeError
            If tokens that come into reach again may have been dropped.
        """
        if columns > self.columns:
            raise DimensionMismatch(
                f"`crop`: expected at most {self.columns} tokens to remove, got {columns}",
                expected=self.columns,
                actual=columns,
            )
        if columns and self.reach >= 0 and self.columns > self.reach and not kept:
            raise RuntimeError(
                "`crop`: this layer drops tokens that leave its window, so it cannot go back; call "
                "`activate_past_recording` before the tokens to remove are added"
            )
        left = self.columns - columns
        lengths, valid = self.lengths - columns, None
        if self.valid is not None:
            valid = self.valid[:, :left]
            lengths = valid.sum(1)
        gone = self.first * self.block_size > np.maximum(lengths - self.reach, 0)
        if self.reach >= 0 and (gone & (lengths > 0)).any():
            raise RuntimeError(
                "`crop`: expected fewer tokens to remove, as those before them were evicted"
            )
        first = np.where(lengths > 0, self.first, 0)
        cropped = replace(self, columns=left, lengths=lengths, first=first, valid=valid)
        return cropped._within_reach()

    # -- sequences

    @_once
    def selected(self, order: tuple[int, ...]) -> BatchMetadata:
        """Return the sequences of these numbers, in this order; repeated ones share their blocks.

        Raises
        ------
        IndexError
            If there is no such sequence.
        """
        rows = list(order)
        if rows and not 0 <= min(rows) <= max(rows) < self.batch:
            raise IndexError(
                f"`beam_idx`: expected numbers of sequences in [0, {self.batch}), got {rows}"
            )
        valid = None if self.valid is None else self.valid[rows]
        shared = self.shared or len(set(rows)) < len(rows)
        return replace(
            self, lengths=self.lengths[rows], first=self.first[rows], table=self.table[rows],
            valid=valid, shared=shared,
        )  # fmt: skip


def _ordinal(new: Flags | None, columns: int) -> Ints:
    """Return the number of tokens of a pass up to each column: per sequence, or equal for all."""
    return np.arange(1, columns + 1)[None] if new is None else new.cumsum(1)
