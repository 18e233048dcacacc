"""Full-precision copies of a layer's newest and first tokens, in addition to the quantised rows of all tokens.

Quantisation harms the newest tokens most, because they get most attention (Liu et al., "KIVI", arXiv:2402.02750,
section 3.3). It also harms the first ones. Models use these as attention sinks (Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", arXiv:2309.17453, section 3).

As in `numkv.KVCache`, a token is quantised once, and read quantised from the pass in which it leaves the window. Here
it is quantised on arrival. Its full-precision copy, in a ring for each sequence, is dropped later. Copies of the first
tokens stay, even if a sliding layer no longer sees them. Attention over both parts is merged.

Keys by channel have no scales until their token group is complete. The newest groups of each sequence therefore stay in
full precision. A query reads its own group in full precision and earlier groups as codes, in prompts and in decode.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from numkv.attention.options import CheckedOptions
from numkv.attention.parts import Part, attend_to_parts
from numkv.caches import FullPrecision
from numkv.kinds import Kind, kind
from numkv.storage.buffer import source_dtypes
from numkv.storage.pool import Pool
from numkv.transformers.metadata import Step

Ints = NDArray[np.int64]


class InFull:
    """Rows in full precision of some tokens of each sequence of a layer.

    Parameters
    ----------
    pool : Pool
        The quantised rows.
    kinds : tuple of Kind
        Kinds of K and V, as the model computes them.
    batch : int
        Number of sequences.
    shape : tuple of int
        Blocks of each sequence, and tokens of a block.

    Attributes
    ----------
    pool : Pool
        The blocks.
    end : int64 array (batch,)
        Position from which on each sequence's tokens are in full precision, apart from the first ones.
    """

    def __init__(
        self, pool: Pool, kinds: tuple[Kind, Kind], batch: int, shape: tuple[int, int]
    ) -> None:
        (self.blocks, size), heads = shape, int(pool.k.shape[1])
        of_pool = batch * self.blocks, heads, size
        self.pool = Pool.allocate(pool.target, of_pool, pool.head_dim, pool.head_dim_v, *kinds)
        self.end: Ints = np.zeros(batch, np.int64)

    def cropped(self, lengths: Ints) -> Self:
        """Return a copy without full-precision tokens past these lengths; quantised tokens stay quantised."""
        return self._with(self.pool, np.minimum(self.end, lengths))

    def selected(self, rows: Ints) -> Self:
        """Return a copy with the sequences of these numbers, in this order."""
        source, to = (
            (x[:, None] * self.blocks + np.arange(self.blocks)).reshape(-1).astype(np.int32)
            for x in (rows, np.arange(len(rows)))
        )
        pool = self.pool.like(len(to))
        self.pool.copy_blocks(source, pool, to)
        return self._with(pool, self.end[rows])

    def _with(self, pool: Pool, end: Ints) -> Self:
        made = copy.copy(self)
        made.pool, made.end = pool, end
        return made


class FullPrecisionRing(InFull):
    """The last and the first tokens of each sequence.

    A sequence has a block: position p below `first` is in slot p, a later one in slot ``first + p % window``.

    Parameters
    ----------
    pool, kinds, batch
        See `InFull`.
    kept : FullPrecision
        Number of last and of first tokens; one of the two is at least 1.
    """

    def __init__(
        self, pool: Pool, kinds: tuple[Kind, Kind], batch: int, kept: FullPrecision
    ) -> None:
        self.window, self.first = kept.window, kept.num_sink_tokens
        super().__init__(pool, kinds, batch, (1, self.first + self.window))

    def write(self, k: Any, v: Any, step: Step, pool: Pool) -> FullPrecisionRing:
        """Store the newest and first of a pass's checked rows; return the object that its queries read."""
        self.end = np.maximum(self.end, step.after.lengths - self.window)
        position = step.positions()
        kept = (position >= self.end[:, None]) | (position < self.first)
        if step.new is not None:
            kept &= step.new
        self.pool.scatter(k, v, np.where(kept, self._slots(position), -1).reshape(-1))
        return self

    def _slots(self, position: Ints) -> Ints:
        """Return the slots of positions ``(batch, n)`` that have full-precision rows."""
        ring = self.first + position % max(1, self.window)
        base = np.arange(len(position))[:, None] * (self.first + self.window)
        return base + np.where(position < self.first, position, ring)

    def attend(self, pool: Pool, step: Step, columns: int, q: Any, options: CheckedOptions) -> Any:
        """Attend over both parts with the queries of a pass that has been written.

        Parameters
        ----------
        pool : Pool
            The quantised rows.
        step : Step
            Step of the pass.
        columns : int
            Columns of the queries.
        q : array (batch * columns, num_q_heads, head_dim)
            Queries.
        options : CheckedOptions
            Options without a window.

        Returns
        -------
        array (batch * columns, num_q_heads, head_dim_v)
        """
        lengths = step.after.lengths
        low, high = step.limits(columns)
        starts = np.arange(len(lengths) + 1) * columns
        base = (step.before.first * step.before.block_size)[:, None]
        # Positions [0, first) and [end, length) are in full precision, consecutive in the table. Others are quantised.
        first = np.minimum(self.first, lengths)[:, None]
        end = np.maximum(self.end[:, None], first)
        gap = end - first

        def here(position: Ints) -> Ints:
            """Return how many full-precision tokens come before a position."""
            return position - np.clip(position - first, 0, gap)

        held = (lengths[:, None] - gap)[:, 0]
        at = np.arange(held.max(initial=0))[None]
        table = self._slots(np.where(at < first, at, at + gap)).astype(np.int32)
        older = _ranges(np.maximum(low, first) - base, np.minimum(high, end) - base)
        newer = _ranges(here(low), here(high))
        parts = [
            Part(self.pool, table, newer, by_slot=True, lens=held),
            Part(pool, step.table, older),
        ]
        return _attend_to_seen(parts, q, step, starts, options)


class GroupsOfStep(NamedTuple):
    """The tokens that a pass writes in full precision, quantises and reads, for keys by channel."""

    slots: Ints
    """Slots of new rows ``(batch * T,)``, -1 for padding."""
    groups: Ints
    """Full-precision blocks of the groups that the pass completes."""
    to_groups: Ints
    """Blocks for their codes."""
    table: NDArray[np.int32]
    """Full-precision blocks of each sequence; `lengths` has the number of tokens in them."""
    lengths: Ints
    newer: Ints
    """Visible ranges of each query: of these blocks, of the codes, and of first tokens in full precision."""
    older: Ints
    first: Ints


class NewestTokenGroups(InFull):
    """The newest token groups of each sequence of a layer with keys by channel.

    Two groups stay, so that up to one group of last tokens can be cropped without loss. If a crop makes an earlier
    group the newest, its codes are decoded. The groups of first tokens also stay; they are always read in full
    precision. A sequence has a block for each group: those of first tokens, then a ring.

    Parameters
    ----------
    pool, kinds, batch
        See `InFull`.
    first : int
        First tokens of each sequence that are read in full precision.
    """

    #: Newest token groups of each sequence.
    BLOCKS = 2

    def __init__(self, pool: Pool, kinds: tuple[Kind, Kind], batch: int, first: int = 0) -> None:
        self._group, self.first = pool.k_kind.group_tokens, first
        shape = self.shape(first, self._group)
        self._kept = shape[0] - self.BLOCKS
        taken = source_dtypes(pool.k_kind)
        of_k, of_v = (of if of.dtype in taken else kind("fp32") for of in kinds)
        super().__init__(pool, (of_k, of_v), batch, shape)

    @classmethod
    def shape(cls, first: int, group: int) -> tuple[int, int]:
        """Return the blocks of each sequence, and the tokens of a block."""
        return -(-first // group) + cls.BLOCKS, group

    def write(self, k: Any, v: Any, step: Step, pool: Pool) -> NewestTokenGroups:
        """Store a pass's checked rows, and quantise complete groups; return the object that its queries read."""
        some, start, stop = self._group, step.before.lengths, step.after.lengths
        begin = start // some * some
        last = np.maximum(-(-stop // some) - self.BLOCKS, 0) * some  # tokens from here on stay
        now, blocks = self, int((-(-(stop - begin) // some)).max(initial=0))
        if blocks > self.BLOCKS:  # only for this pass
            now = copy.copy(self)
            now.pool = self.pool.like(len(start) * (self._kept + blocks))
            self._copy(np.maximum(begin, self.end), start, now)
        else:
            self.end = np.maximum(self.end, last)  # the places of earlier tokens are overwritten
        of, at = _tokens(np.maximum(begin, self.first), np.minimum(self.end, start))
        if len(of):  # groups that a crop cut have only codes
            slots = _slots_of(step, of, at)
            rows = pool.k_buffer.gather(slots), pool.v_buffer.gather(slots)
            now.pool.scatter(*rows, now._slots(of, at))
        places = now.of_step(step, step.columns)
        now.pool.scatter(k, v, places.slots)
        if len(places.groups):
            pool.quantise(now.pool, places.groups, places.to_groups)
        now.end = np.minimum(now.end, begin)
        if now is not self:
            self.end = np.maximum(begin, last)
            now._copy(self.end, stop, self)
        return now

    def _copy(self, low: Ints, high: Ints, to: NewestTokenGroups) -> None:
        """Copy the rows of some tokens, and of the first tokens."""
        for begin, end in ((low, high), (np.zeros_like(low), np.minimum(high, self.first))):
            held = _tokens(begin, end)
            self.pool.copy_tokens(self._slots(*held), to.pool, to._slots(*held))

    def after(self, step: Step) -> Ints | None:
        """Return `end` after a pass that only writes rows; None if it must first move or decode rows."""
        some, start, stop = self._group, step.before.lengths, step.after.lengths
        begin = start // some * some
        blocks = int((-(-(stop - begin) // some)).max(initial=0))
        if blocks > self.BLOCKS or (begin < np.minimum(self.end, start)).any():
            return None
        last = np.maximum(-(-stop // some) - self.BLOCKS, 0) * some
        return np.minimum(np.maximum(self.end, last), begin)

    def of_step(self, step: Step, columns: int) -> GroupsOfStep:
        """Return the slots of a pass's rows, and the ranges that the queries of its last columns read."""
        some, start, lengths = self._group, step.before.lengths, step.after.lengths
        position, sequences = step.positions(), np.arange(len(lengths))[:, None]
        slots = self._slots(sequences, position)
        if step.new is not None:
            slots = np.where(step.new, slots, -1)
        of, group = _tokens(start // some, lengths // some)
        to_groups = _slots_of(step, of, group * some) // some if len(of) else of
        low, high = step.limits(columns)
        base = (step.before.first * step.before.block_size)[:, None]
        begin = (start // some * some)[:, None]
        own = np.maximum(position[:, -columns:] // some * some, begin)
        groups = int((-(-(lengths - begin[:, 0]) // some)).max(initial=0))
        at = begin + some * np.arange(max(1, groups))[None]
        return GroupsOfStep(
            slots.reshape(-1), self._slots(of, group * some) // some, to_groups,
            (self._slots(sequences, at) // some).astype(np.int32), lengths - begin[:, 0],
            _ranges(np.maximum(low, own) - begin, high - begin),
            _ranges(np.maximum(low, self.first) - base, np.minimum(high, own) - base),
            _ranges(low, np.minimum(np.minimum(high, own), self.first)),
        )  # fmt: skip

    def _slots(self, of: Ints, position: Ints) -> Ints:
        """Return the slots of positions of sequences `of` that have full-precision rows."""
        blocks, kept = int(self.pool.k.shape[0]) // len(self.end), self._kept
        group, offset = np.divmod(position, self._group)
        block = np.where(group < kept, group, kept + group % (blocks - kept))
        return (of * blocks + block) * self._group + offset

    def attend(self, pool: Pool, step: Step, columns: int, q: Any, options: CheckedOptions) -> Any:
        """Attend with the queries of a pass: each reads its own group in full precision, others as codes.

        See `FullPrecisionRing.attend`.
        """
        starts = np.arange(len(step.after.lengths) + 1) * columns
        places = self.of_step(step, columns)
        parts = [
            Part(self.pool, places.table, places.newer, lens=places.lengths),
            Part(pool, step.table, places.older),
        ]
        if self._kept:
            lengths, at = step.after.lengths, self._group * np.arange(self._kept)[None]
            table = self._slots(np.arange(len(lengths))[:, None], at) // self._group
            held = np.minimum(lengths, self.first)
            parts.append(Part(self.pool, table.astype(np.int32), places.first, lens=held))
        return _attend_to_seen(parts, q, step, starts, options)


def _attend_to_seen(
    parts: list[Part], q: Any, step: Step, starts: Ints, options: CheckedOptions
) -> Any:
    """Attend to the parts that at least one query sees, or to the first part if there are none."""
    seen = [part for part in parts if (part.ranges[:, 0] < part.ranges[:, 1]).any()]
    return attend_to_parts(seen or parts[:1], q, step.lengths, starts, options)


def _tokens(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """List the numbers from `low` up to `high` of each sequence; return each one's sequence, and the numbers."""
    counts = np.maximum(high - low, 0)
    of = np.repeat(np.arange(len(low)), counts)
    before = np.cumsum(counts) - counts
    return of, np.arange(len(of)) - before[of] + low[of]


def _slots_of(step: Step, of: Ints, position: Ints) -> Ints:
    """Return the slots of positions of sequences `of` in a layer's pool."""
    size = step.before.block_size
    block, offset = np.divmod(position - step.before.first[of] * size, size)
    return step.table[of, block].astype(np.int64) * size + offset


def _ranges(low: Ints, high: Ints) -> Ints:
    """Return ranges ``[low, high)`` of queries, none below 0, as attention expects them."""
    high = np.maximum(high, 0)
    found = np.stack([np.clip(low, 0, high), high], -1).reshape(-1, 2)
    return np.ascontiguousarray(found, np.int64)
