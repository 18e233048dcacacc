"""What becomes of a sharded cache when shards fail: steps are rolled back, shards made anew, sequences brought back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from numkv.caches import PagedKVCache
from numkv.caches.paged.layers import LayerRows
from numkv.interrupts import opened
from numkv.ray.books import Directory, Sequence, kept_after_loss, shortened
from numkv.ray.channel import Channel, Limits, Ticket, first_error
from numkv.ray.errors import ShardDown, ShardLost
from numkv.ray.layout import Layout
from numkv.ray.placing import columns_of_tokens, counts
from numkv.ray.shard import ShardSpec
from numkv.ray.step import ShardedStep
from numkv.ray.transport import Transport

#: How often shards are made anew in one recovery, as those that are new may be lost too.
_ATTEMPTS = 3


class Recovering:
    """The shards of a `ShardedKVCache`, and how it goes on without some of them."""

    #: Of each layer, on all shards.
    rows: LayerRows
    _model: PagedKVCache
    _windows: list[int]

    def _begin(
        self, arguments: dict[str, Any], divided: tuple[int, int], transport: Transport | None,
        store: Mapping[str, Any] | None, limits: Limits | None,
    ) -> None:  # fmt: skip
        """Make the shards."""
        self._layout = layout = Layout.of(self.rows.num_kv_heads, *divided)
        self._is_split = layout.columns > 1
        self._arguments, self._store = arguments, None if store is None else dict(store)
        self._limits = Limits() if limits is None else limits
        if transport is None:
            from numkv.ray.actors import RayShards

            transport = RayShards()
        self._transport = transport
        self._sequences: dict[int, Sequence] = {}
        self._next = self._steps_made = 0
        self._open: dict[int, ShardedStep] = {}
        self._scales: dict[int, tuple[Any, Any]] = {}
        self._gone: set[int] = set()
        self._dead: set[int] = set()
        blocks = arguments["num_blocks"]
        self._directory = Directory(2 * blocks * layout.columns)
        transport.start([self._spec(shard) for shard in range(layout.num_shards)])
        self._channels = [
            Channel(transport, shard, blocks, self._limits) for shard in range(layout.num_shards)
        ]

    def _spec(self, shard: int) -> ShardSpec:
        """What a shard is made from."""
        layout = self._layout
        heads = layout.kv_heads(layout.part_of(shard))
        part: dict[str, Any] = {"num_kv_heads": heads.stop - heads.start}
        if self._is_split:
            part["window_left"] = -1  # queries come with what they see
        layers = [replace(of, **part) for of in self._model.layers]
        arguments = {**self._arguments, "layers": layers}
        store = self._store
        if store is not None and layout.parts > 1:
            mark = store["mark"]
            mark = dict(mark) if isinstance(mark, Mapping) else {"mark": mark}
            own = f"{heads.start}:{heads.stop} of {layout.bounds[-1]}"
            store = {**store, "mark": {**mark, "kv_heads": own}}
        return ShardSpec(arguments, store)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._model.block_size

    def _free_blocks(self) -> list[int]:
        """Blocks that are free in each column for certain."""
        layout = self._layout
        return [
            0 if c in self._dead else min(self._channels[s].free for s in layout.shards_of(c))
            for c in range(layout.columns)
        ]

    def _later(self, column: int, name: str, *arguments: Any) -> None:
        """Have all shards of a column do something before what they are sent next."""
        for shard in self._layout.shards_of(column):
            self._channels[shard].later(name, *arguments)

    # -- answers

    def _gather(self, tickets: Iterable[Ticket], step: ShardedStep | None = None) -> None:
        """Wait for all answers. If one is missing or an error, the step is rolled back on all shards first.

        Raises
        ------
        ShardLost
            If a shard is gone.
        Exception
            What the first of the shards, by number, has raised.
        """
        tickets = list(tickets)
        try:
            with opened():
                for ticket in tickets:
                    ticket.wait()
        except BaseException:  # an interrupt: what was sent cannot be taken back
            if step is not None and step.open:
                self._abandon(step)
            raise
        if any(ticket.down is not None for ticket in tickets):
            raise self._recovered()
        error = first_error(tickets)
        if error is None:
            return
        if step is not None and step.open:
            for ticket in step.tickets:
                ticket.wait()
            self._abandon(step)
            if any(channel.down and channel.shard not in self._gone for channel in self._channels):
                raise self._recovered() from error
        raise error

    def _abandon(self, step: ShardedStep) -> None:
        """Roll a step back on all shards."""
        for part in step.parts:
            self._later(part.column, "rollback", step.number)
        for seq in step.sequences:
            self._sequences[seq] = self._sequences[seq]._replace(step=None)
        self._open.pop(step.number, None)
        step._end()
        step._rolled_back = True

    # -- prefixes

    def _find(
        self, seq: int, state: Sequence, columns: Iterable[int], only: set[int] | None = None
    ) -> list[Ticket]:
        """Ask shards for the first full blocks of a sequence, which they look for in their pools and the store."""
        size, found = self.block_size, []
        full = len(state.tokens) // size * size
        tokens = state.tokens[:full]
        of_block = columns_of_tokens(state.runs)[:full:size]
        for column in sorted(columns):
            sent: tuple[Any, ...]
            if self._is_split:
                own = np.flatnonzero(of_block == column)
                sent = tokens.reshape(-1, size)[own].reshape(-1), state.names[own], None
            else:  # the last token is always left to compute
                sent = np.append(tokens, np.int32(0)), None, state.extra
            for shard in self._layout.shards_of(column):
                if only is None or shard in only:
                    found.append(self._channels[shard].send("find", seq, *sent))
        return found

    def _cut_found(
        self, seq: int, wanted: Sequence, found: dict[int, int], tickets: list[Ticket]
    ) -> Sequence:
        """A new sequence with what all shards have found; those that found more drop it."""
        kept = kept_after_loss(wanted, found)
        uneven = len({ticket.value for ticket in tickets}) > 1
        if uneven and not self._is_split and any(window >= 0 for window in self._windows):
            kept = 0  # windows may have moved past
        state = shortened(wanted, kept, self.block_size)
        own = counts(state.runs)
        for ticket in tickets:
            local = own.get(self._layout.column_of(ticket.shard), 0)
            if ticket.value > local:
                self._channels[ticket.shard].later("truncate", seq, local)
        return state._replace(columns=frozenset(found), cached=kept)

    def _shorten(
        self, seq: int, length: int, skip: frozenset[int] | set[int] = frozenset()
    ) -> None:
        """Have shards drop a sequence's last tokens, but for some shards."""
        before = self._sequences[seq]
        after = shortened(before, length, self.block_size)
        had, has = counts(before.runs), counts(after.runs)
        for column in sorted(before.columns):
            if had.get(column, 0) > has.get(column, 0):
                for shard in self._layout.shards_of(column):
                    if shard not in skip:
                        self._channels[shard].later("truncate", seq, has.get(column, 0))
        self._sequences[seq] = after

    # -- losses

    def _recovered(self) -> ShardLost:
        """Go on without what was lost; the error that says so."""
        before: dict[int, Sequence] = {}
        shards: dict[int, str] = {}
        steps: list[ShardedStep] = []
        for attempt in range(_ATTEMPTS + 1):
            for channel in self._channels:
                if channel.down is None:
                    channel.drain()
            down = {c.shard: c.down for c in self._channels if c.down and c.shard not in self._gone}
            if not down:
                break
            shards.update({shard: why.reason for shard, why in down.items()})
            columns = {self._layout.column_of(shard) for shard in down}
            for step in [s for s in self._open.values() if s.columns & columns]:
                self._abandon(step)
                steps.append(step)
            self._directory.forget(columns)
            fresh = {shard for shard in down if self._replaced(shard, attempt < _ATTEMPTS)}
            for seq, state in self._sequences.items():
                if state.columns & columns:
                    before.setdefault(seq, state)
            self._restore(columns, fresh)
        lengths = {
            seq: now.length for seq, old in before.items()
            if (now := self._sequences[seq]).length < old.length
        }  # fmt: skip
        tokens = {seq: before[seq].tokens[n:] for seq, n in lengths.items()}
        reasons = "; ".join(f"shard {shard}: {why}" for shard, why in sorted(shards.items()))
        rest = f"; no place for shards {sorted(self._gone)}" if self._gone else ""
        some = ", ".join(f"{seq} (has {n} tokens)" for seq, n in [*lengths.items()][:8])
        if not shards:
            return ShardLost("the step was rolled back when shards were lost", {}, {}, ())
        return ShardLost(
            f"{reasons}{rest}. Compute the missing tokens of {len(lengths)} sequences again: {some or 'none'}",
            lengths, tokens, tuple(sorted(shards)), tuple(steps),
            len(self._dead) == self._layout.columns,
        )  # fmt: skip

    def _replaced(self, shard: int, may: bool) -> bool:
        """Put an empty shard in the place of one; whether there is one now."""
        try:
            if not may:
                raise ShardDown(shard, "it was lost again and again")
            self._transport.replace(shard)
        except ShardDown:
            self._gone.add(shard)
            self._dead.add(self._layout.column_of(shard))
            return False
        self._channels[shard].begin()
        self._tell_scales(shard)
        return True

    def _tell_scales(self, shard: int) -> None:
        """Tell a shard that is new what was set."""
        heads = self._layout.kv_heads(self._layout.part_of(shard))
        for layer, scales in self._scales.items():
            own = [x if x is None or np.ndim(x) == 0 else x[heads] for x in scales]
            self._channels[shard].later("set_scales", layer, *own)

    def _restore(self, columns: set[int], fresh: set[int]) -> None:
        """Bring back what was in lost shards from the store, and shorten sequences to what there is."""
        found: dict[int, dict[int, int]] = {}
        tickets: list[tuple[int, Ticket]] = []
        for seq, state in self._sequences.items():
            here = counts(state.runs)
            for column in sorted(state.columns & columns):
                lost = [s for s in self._layout.shards_of(column) if s in fresh]
                if column in self._dead:
                    self._later(column, "remove", seq)
                    self._sequences[seq] = self._sequences[seq]._replace(
                        columns=self._sequences[seq].columns - {column}
                    )
                elif self._store is not None and here.get(column) and len(state.tokens):
                    tickets += [(seq, t) for t in self._find(seq, state, [column], set(lost))]
                else:
                    for shard in lost:
                        self._channels[shard].later("add", seq)
                if column in self._dead or lost:
                    found.setdefault(seq, {})[column] = 0
        each: dict[int, dict[int, int]] = {}
        for seq, ticket in tickets:
            ticket.wait()
            if ticket.error is not None:
                self._channels[ticket.shard].later("add", seq)
            value = ticket.value if ticket.down is None and ticket.error is None else 0
            each.setdefault(seq, {})[ticket.shard] = value
        for seq, of_shard in each.items():
            by_column: dict[int, list[int]] = {}
            for shard, value in of_shard.items():
                by_column.setdefault(self._layout.column_of(shard), []).append(value)
            found[seq].update({column: min(values) for column, values in by_column.items()})
        for seq, of_column in found.items():
            self._keep_found(seq, of_column, each.get(seq, {}), fresh)

    def _keep_found(
        self, seq: int, found: dict[int, int], each: dict[int, int], fresh: set[int]
    ) -> None:
        """Shorten a sequence to what columns that lost tokens have of it again."""
        state = self._sequences[seq]
        kept = kept_after_loss(state, found)
        if kept < state.length and any(w >= 0 for w in self._windows) and not self._is_split:
            kept = 0  # windows have moved past what would be seen again
        self._shorten(seq, kept, fresh)
        has = counts(self._sequences[seq].runs)
        for shard, value in each.items():
            local = has.get(self._layout.column_of(shard), 0)
            if value > local:
                self._channels[shard].later("truncate", seq, local)

    def _revive(self) -> None:
        """Look once more for places for shards that have none.

        Raises
        ------
        ShardLost
            If no column has all of its shards.
        """
        reason = "there is no place for it"
        for shard in sorted(self._gone):
            try:
                self._transport.replace(shard)
            except ShardDown as error:
                reason = error.reason
                continue
            self._channels[shard].begin()
            self._tell_scales(shard)
            self._gone.discard(shard)
        self._dead = {self._layout.column_of(shard) for shard in self._gone}
        if len(self._dead) == self._layout.columns:
            gone = tuple(sorted(self._gone))
            raise ShardLost(f"no shards to work with: {reason}", {}, {}, gone, hopeless=True)
