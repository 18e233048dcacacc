"""The newest tokens of a layer, and its first ones, in full precision, beside the quantised rows of all.

Quantisation does most harm to the newest tokens, which get most attention (Liu et al., "KIVI", arXiv:2402.02750,
section 3.3), and to the first ones, which models use as attention sinks (Xiao et al., "Efficient Streaming Language
Models with Attention Sinks", arXiv:2309.17453, section 3). As in
`numkv.KVCache`, a token is quantised once, and read so from the pass in which it leaves the window. Here that is done
when it comes: the copy in full precision, a ring for each sequence, is what leaves. The first tokens stay as they are
beside it, though a sliding layer may no longer see them. Attention over both parts is merged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.attention.attend import attend
from numkv.attention.options import CheckedOptions
from numkv.kinds import Kind
from numkv.storage.pool import Pool
from numkv.targets.base import Target
from numkv.transformers.books import Books, Step

Ints = NDArray[np.int64]


class Recent:
    """Rows in full precision of the last and the first tokens of each sequence of a layer.

    Parameters
    ----------
    window : int
        How many last tokens.
    first : int
        How many first tokens. One of the two is at least 1.

    Attributes
    ----------
    pool : Pool or None
        A block for each sequence: position p below `first` is in slot p, a later one in slot ``first + p % window``.
    end : int64 array (batch,)
        Position from which on each sequence's tokens are here, beside the first ones.
    """

    def __init__(self, window: int, first: int = 0) -> None:
        self.window, self.first = window, first
        self.pool: Pool | None = None
        self.end: Ints = np.zeros(0, np.int64)

    def make(
        self, target: Target, batch: int, heads: int, dims: tuple[int, int], kinds: tuple[Kind, Kind]
    ) -> None:  # fmt: skip
        """Make buffers for K and V of these dims and kinds, without tokens."""
        self.pool = Pool.allocate(target, (batch, heads, self.first + self.window), *dims, *kinds)
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return 0 if self.pool is None else self.pool.nbytes

    def reset(self) -> None:
        """Forget all tokens."""
        if self.pool is not None:
            self.end = np.zeros(int(self.pool.k.shape[0]), np.int64)

    def crop(self, books: Books) -> None:
        """Forget tokens past the lengths of `books`; quantised ones stay so."""
        self.end = np.minimum(self.end, books.lengths)

    def select(self, rows: Ints) -> None:
        """Take sequences of these numbers, in this order."""
        pool = self.pool
        if pool is not None:
            self.pool = pool.like(len(rows))
            pool.copy_blocks(rows.astype(np.int32), self.pool, np.arange(len(rows), dtype=np.int32))
            self.end = self.end[rows]

    def write(self, k: Any, v: Any, step: Step) -> None:
        """Keep those of a pass's checked rows that are recent after it, or first."""
        assert self.pool is not None
        self.end = np.maximum(self.end, step.after.lengths - self.window)
        position = step.positions()
        kept = (position >= self.end[:, None]) | (position < self.first)
        if step.new is not None:
            kept &= step.new
        self.pool.scatter(k, v, np.where(kept, self._slots(position), -1).reshape(-1))

    def _slots(self, position: Ints) -> Ints:
        """Slots of positions ``(batch, n)`` that are here."""
        ring = self.first + position % max(1, self.window)
        base = np.arange(len(position))[:, None] * (self.first + self.window)
        slots: Ints = base + np.where(position < self.first, position, ring)
        return slots

    def attend(self, pool: Pool, step: Step, columns: int, q: Any, options: CheckedOptions) -> Any:
        """Attend over both parts with the queries of a pass that has been written.

        Parameters
        ----------
        pool : Pool
            The quantised rows.
        step : Step
            Of the pass.
        columns : int
            Columns of the queries.
        q : float32 or float64 array (batch * columns, num_q_heads, head_dim)
            Queries.
        options : CheckedOptions
            Without a window.

        Returns
        -------
        array (batch * columns, num_q_heads, head_dim_v)
        """
        own, lengths = self.pool, step.after.lengths
        assert own is not None
        low, high = step.limits(columns)
        starts = np.arange(len(lengths) + 1) * columns
        base = (step.before.first * step.before.block_size)[:, None]
        # Positions [0, first) and [end, length) are here, one behind the other in the table, the others quantised.
        first = np.minimum(self.first, lengths)[:, None]
        end = np.maximum(self.end[:, None], first)
        older = _ranges(np.maximum(low, first) - base, np.minimum(high, end) - base)
        gap = end - first

        def here(position: Ints) -> Ints:
            """How many tokens that are here come before a position."""
            return position - np.clip(position - first, 0, gap)

        newer = _ranges(here(low), here(high))
        held = (lengths[:, None] - gap)[:, 0]
        at = np.arange(held.max(initial=0))[None]
        slots = self._slots(np.where(at < first, at, at + gap))

        def of_quantised(options: CheckedOptions) -> Any:
            return attend(pool, step.table, q, step.lengths, starts, options, ranges=older)

        def of_recent(options: CheckedOptions) -> Any:
            table = slots.astype(np.int32)
            return attend(own, table, q, held, starts, options, ranges=newer, by_slot=True)

        if not (older[:, 0] < older[:, 1]).any():
            return of_recent(options)
        if not (newer[:, 0] < newer[:, 1]).any():
            return of_quantised(options)
        target, asked = pool.target, options._replace(return_lse=True)
        o_a, lse_a = of_recent(asked)
        o_b, lse_b = of_quantised(asked._replace(sinks=None))
        merged, lse = np.empty_like(o_a), np.empty_like(lse_a)
        target.ops.merge_states(
            target.words(o_a), lse_a, target.words(o_b), lse_b,
            "fp64" if q.dtype == np.float64 else "fp32", target.words(merged), lse,
        )  # fmt: skip
        return merged


def _ranges(low: Ints, high: Ints) -> Ints:
    """Ranges ``[low, high)`` of queries, none below 0, as attention takes them."""
    high = np.maximum(high, 0)
    found = np.stack([np.clip(low, 0, high), high], -1).reshape(-1, 2)
    return np.ascontiguousarray(found, np.int64)
