"""A `ShardedKVCache` as a whole: counts, checks, scales, and sequences that move from column to column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numkv.access import whole, writes
from numkv.caches import PagedStats
from numkv.errors import NotSupported, NumkvError
from numkv.numbers import check_index
from numkv.ray.books import Sequence
from numkv.ray.placing import counts, joined
from numkv.ray.recovery import Recovering


class ShardedStats(NamedTuple):
    """Counts of a sharded cache at one moment."""

    num_seqs: int
    """Sequences."""
    num_tokens: int
    """Tokens of all sequences, shared ones counted for each."""
    shards: tuple[PagedStats, ...]
    """Of each shard."""
    messages: tuple[int, ...]
    """Messages to each shard so far."""
    sent_nbytes: tuple[int, ...]
    """Bytes of the arrays in them."""


class WholeShardedCache(Recovering):
    """The part of `ShardedKVCache` that is not about one step."""

    _access: Any
    _idle: Callable[[int], Sequence]

    # -- counts

    @writes
    def stats(self) -> ShardedStats:
        """Counts of the cache and of its shards; asks all of them.

        Returns
        -------
        ShardedStats

        Raises
        ------
        ShardLost
            If one was lost.
        """
        tickets = self._ask("stats")
        return ShardedStats(
            len(self._sequences),
            sum(state.length for state in self._sequences.values()),
            tuple(ticket.value for ticket in tickets),
            tuple(channel.sent for channel in self._channels),
            tuple(channel.sent_nbytes for channel in self._channels),
        )

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        """Ask all shards that live."""
        tickets = [
            channel.send(name, *arguments)
            for channel in self._channels
            if channel.shard not in self._gone
        ]
        self._gather(tickets)
        return tickets

    @writes
    def check(self) -> None:
        """Prove the accounting of all shards, and that they have of each sequence what the books here say.

        Raises
        ------
        NumkvError
            If something is wrong.
        ShardLost
            If a shard was lost.
        """
        for ticket in self._ask("check"):
            column = self._layout.column_of(ticket.shard)
            wanted = {
                seq: counts(state.runs).get(column, 0)
                for seq, state in self._sequences.items()
                if column in state.columns
            }
            if ticket.value != wanted:
                raise NumkvError(
                    f"shard {ticket.shard}: expected sequences of lengths {wanted}, got {ticket.value}"
                )

    @writes
    def flush(self, timeout: float | None = None) -> int:
        """Wait until shards have written all that was committed; see `numkv.store.PrefixStore.flush`.

        Parameters
        ----------
        timeout : float, optional
            Seconds that each shard waits at most.

        Returns
        -------
        int
            Blocks that were given up.

        Raises
        ------
        TimeoutError, ShardLost
            If they are not written by then, or a shard was lost.
        """
        return sum(ticket.value for ticket in self._ask("flush", timeout))

    @whole
    def clear(self) -> None:
        """Remove all sequences and forget all cached prefixes; see `numkv.PagedKVCache.clear`."""
        if self._open:
            raise NumkvError("clear: expected a cache without open steps; end them first")
        self._sequences.clear()  # first: who is interrupted while shards answer has cleared them
        self._directory.clear()
        self._ask("clear")

    @whole
    def set_scales(self, layer: int, k: Any = None, v: Any = None) -> None:
        """Set the scales of a layer's kv heads; see `numkv.PagedKVCache.set_scales`."""
        layer = check_index("layer", layer, self._model.num_layers)
        if self._sequences:
            raise NumkvError(
                f"set_scales: expected a cache without sequences, got {len(self._sequences)}"
            )
        self._model.set_scales(layer, k, v)  # checks
        old = self._scales.get(layer, (None, None))
        given = (k, v)
        self._scales[layer] = tuple(  # type: ignore[assignment]
            before if x is None else np.asarray(x, np.float32)
            for x, before in zip(given, old, strict=True)
        )
        for channel in self._channels:
            if channel.shard not in self._gone:
                heads = self._layout.kv_heads(self._layout.part_of(channel.shard))
                own = [x if x is None or x.ndim == 0 else x[heads] for x in self._scales[layer]]
                channel.later("set_scales", layer, *own)
        self._directory.clear()

    @whole
    def revive(self) -> None:
        """Look for places for shards that were lost and found none.

        Raises
        ------
        ShardLost
            If there still is none that the cache could work with.
        """
        self._revive()

    def close(self) -> None:
        """End all shards. The cache cannot be used any more."""
        for step in list(self._open.values()):
            step._end()
        self._open.clear()
        self._transport.close()

    # -- from column to column

    @whole
    def move(self, seq: int, to: int, source: int | None = None) -> None:
        """Move what a column holds of a sequence to another column, as it is stored.

        Parameters
        ----------
        seq : int
            The sequence.
        to : int
            The column that gets it, which holds nothing of the sequence.
        source : int, optional
            The column that has it; the only one if None.

        Raises
        ------
        CacheFull
            If the column has too few free blocks; nothing has moved.
        NotSupported
            If it holds tokens of the sequence already, or `source` holds none.
        ShardLost, IndexError, NumkvError
            If a shard was lost; if there is no such sequence or column; if the sequence has an open step.
        """
        layout = self._layout
        state = self._idle(seq)
        to = check_index("to", to, layout.columns)
        held = counts(state.runs)
        if source is None:
            if len(held) != 1:
                raise NotSupported(
                    f"`source`: expected a column, as sequence {seq} is in {sorted(held)}"
                )
            source = next(iter(held))
        if source not in held or to in held or to in self._dead:
            raise NotSupported(
                f"`to`: expected a column that lives and holds nothing of sequence {seq}, which is in {sorted(held)}, "
                f"got {to}; `source` {source}"
            )
        if to in state.columns:
            self._later(to, "remove", seq)
        # Until all is there, the sequence is where it was.
        self._sequences[seq] = state = state._replace(columns=state.columns - {to})
        out = [self._channels[s].send("swap_out", seq) for s in layout.shards_of(source)]
        self._gather(out)
        tickets = [
            self._channels[shard].send("swap_in", seq, ticket.value)
            for shard, ticket in zip(layout.shards_of(to), out, strict=True)
        ]
        try:
            self._gather(tickets)
        except BaseException:
            self._later(to, "remove", seq)
            raise
        self._later(source, "remove", seq)
        runs = joined((to if column == source else column, n) for column, n in state.runs)
        columns = (state.columns - {source}) | {to}
        self._sequences[seq] = state._replace(runs=runs, columns=columns)

    def balance(self, most: int = 1) -> int:
        """Move sequences from the fullest column to the emptiest, as long as that makes the two more alike.

        Parameters
        ----------
        most : int
            Sequences to move at most.

        Returns
        -------
        int
            How many were moved.

        Raises
        ------
        ShardLost, CacheFull
            See `move`.
        """
        for moved in range(most):
            self.stats()  # so that free blocks are known
            free = self._free_blocks()
            alive = [c for c in range(len(free)) if c not in self._dead]
            source, to = min(alive, key=lambda c: free[c]), max(alive, key=lambda c: free[c])
            gap, best = free[to] - free[source], None
            for seq, state in self._sequences.items():
                held = counts(state.runs)
                blocks = -(-held.get(source, 0) // self.block_size)
                fits = state.step is None and to not in held and 0 < blocks < gap
                if fits and (best is None or abs(gap - 2 * blocks) < best[0]):
                    best = abs(gap - 2 * blocks), seq
            if best is None:
                return moved
            self.move(best[1], to, source)
        return most
