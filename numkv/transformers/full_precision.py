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

from numkv.attention.options import CheckedOptions
from numkv.attention.parts import Part, attend_to_parts
from numkv.caches import FullPrecision
from numkv.kinds import Kind
from numkv.storage.pool import Pool
from numkv.transformers.metadata import Step

Ints = NDArray[np.int64]


class FullPrecisionRing:
    """Rows in full precision of the last and the first tokens of each sequence of a layer.

    Parameters
    ----------
    pool : Pool
        The quantised rows.
    kinds : tuple of Kind
        Of K and V, as the model computes them.
    batch : int
        Sequences.
    kept : FullPrecision
        How many last and first tokens; one of the two is at least 1.

    Attributes
    ----------
    pool : Pool
        A block for each sequence: position p below `first` is in slot p, a later one in slot ``first + p % window``.
    end : int64 array (batch,)
        Position from which on each sequence's tokens are here, beside the first ones.
    """

    def __init__(
        self, pool: Pool, kinds: tuple[Kind, Kind], batch: int, kept: FullPrecision
    ) -> None:
        self.window, self.first = kept.window, kept.num_sink_tokens
        shape = (batch, int(pool.k.shape[1]), self.first + self.window)
        self.pool = Pool.allocate(pool.target, shape, pool.head_dim, pool.head_dim_v, *kinds)
        self.end: Ints = np.zeros(batch, np.int64)

    def crop(self, lengths: Ints) -> None:
        """Forget tokens past these lengths of the sequences; quantised ones stay so."""
        self.end = np.minimum(self.end, lengths)

    def select(self, rows: Ints) -> None:
        """Take sequences of these numbers, in this order."""
        pool, self.pool = self.pool, self.pool.like(len(rows))
        pool.copy_blocks(rows.astype(np.int32), self.pool, np.arange(len(rows), dtype=np.int32))
        self.end = self.end[rows]

    def write(self, k: Any, v: Any, step: Step) -> None:
        """Keep those of a pass's checked rows that are recent after it, or first."""
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
        q : array (batch * columns, num_q_heads, head_dim)
            Queries.
        options : CheckedOptions
            Without a window.

        Returns
        -------
        array (batch * columns, num_q_heads, head_dim_v)
        """
        lengths = step.after.lengths
        low, high = step.limits(columns)
        starts = np.arange(len(lengths) + 1) * columns
        base = (step.before.first * step.before.block_size)[:, None]
        # Positions [0, first) and [end, length) are here, one behind the other in the table, the others quantised.
        first = np.minimum(self.first, lengths)[:, None]
        end = np.maximum(self.end[:, None], first)
        gap = end - first

        def here(position: Ints) -> Ints:
            """How many tokens that are here come before a position."""
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
        seen = [part for part in parts if (part.ranges[:, 0] < part.ranges[:, 1]).any()]
        return attend_to_parts(seen or parts[:1], q, step.lengths, starts, options)


def _ranges(low: Ints, high: Ints) -> Ints:
    """Ranges ``[low, high)`` of queries, none below 0, as attention takes them."""
    high = np.maximum(high, 0)
    found = np.stack([np.clip(low, 0, high), high], -1).reshape(-1, 2)
    return np.ascontiguousarray(found, np.int64)
