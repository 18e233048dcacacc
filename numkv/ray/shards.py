"""Recovery of a sharded cache after shards fail: roll steps back, replace shards, restore sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from numkv import targets
from numkv.attention import options
from numkv.attention.attend import check_sinks
from numkv.caches import PagedKVCache
from numkv.caches.paged.layers import LayerRows
from numkv.checks import host_array
from numkv.errors import DimensionMismatch
from numkv.interrupts import opened
from numkv.kinds import compute_dtype
from numkv.numbers import check_size
from numkv.ray.messages import ShardDown, ShardLost
from numkv.ray.sequences import (
    Directory,
    Sequence,
    columns_of_tokens,
    counts,
    kept_after_loss,
    shortened,
)
from numkv.ray.shard import ShardSpec
from numkv.ray.step import ShardedStep
from numkv.ray.transport import Channel, Limits, RayShards, Ticket, Transport

#: The most shards of a cache.
_MOST_SHARDS = 2**16


class Layout(NamedTuple):
    """A rectangle of shards; made by `Layout.of`.

    Kv heads are divided among *parts*, tokens among *columns*: ``shard = column * parts + part``. With one column the
    cache is sharded by heads, with one part by context, else by both.
    """

    columns: int
    """Number of columns that share the tokens."""
    bounds: tuple[int, ...]
    """First kv head of each part, and the number of all."""

    @classmethod
    def of(cls, num_kv_heads: int, heads: int, context: int) -> Layout:
        """Divide heads into parts that differ by one head at most.

        Parameters
        ----------
        num_kv_heads : int
            Kv heads of the model.
        heads : int
            Parts of them.
        context : int
            Columns.

        Returns
        -------
        Layout

        Raises
        ------
        DimensionMismatch
            If there are more parts than heads, or a number is not positive.
        """
        parts = check_size("heads", heads, 1, _MOST_SHARDS)
        columns = check_size("context", context, 1, _MOST_SHARDS)
        if parts > num_kv_heads:
            raise DimensionMismatch(
                f"`heads`: expected at most as many parts as kv heads, {num_kv_heads}, got {parts}; divide the "
                "context too",
                expected=num_kv_heads,
                actual=parts,
            )
        return cls(columns, tuple(i * num_kv_heads // parts for i in range(parts + 1)))

    @property
    def parts(self) -> int:
        """Return the number of parts of the heads."""
        return len(self.bounds) - 1

    @property
    def num_shards(self) -> int:
        """Return the number of shards."""
        return self.columns * self.parts

    def kv_heads(self, part: int) -> slice:
        """Return the kv heads of a part."""
        return slice(self.bounds[part], self.bounds[part + 1])

    def q_heads(self, part: int, num_q_heads: int) -> slice:
        """Return the q heads that attend to the kv heads of a part."""
        group = num_q_heads // self.bounds[-1]
        return slice(self.bounds[part] * group, self.bounds[part + 1] * group)

    def column_of(self, shard: int) -> int:
        """Return the column of a shard."""
        return shard // self.parts

    def part_of(self, shard: int) -> int:
        """Return the part of the heads that a shard has."""
        return shard % self.parts

    def shards_of(self, column: int) -> Iterator[int]:
        """Return the shards of a column, by part."""
        return iter(range(column * self.parts, (column + 1) * self.parts))


#: How often shards are replaced in one recovery, because new ones may also be lost.
_ATTEMPTS = 3


class Shards:
    """The shards of a `ShardedKVCache`, the metadata of their sequences, and the recovery from losses.

    Parameters
    ----------
    model : PagedKVCache
        A cache of one block with the whole cache's layers: their sizes, kinds and windows.
    rows : LayerRows
        Shapes of each layer's rows, over all shards.
    arguments : dict
        Arguments of a shard's cache, apart from its heads.
    divided : tuple of int
        Number of parts of the heads, and number of columns.
    transport, store, limits
        See `ShardedKVCache`.
    """

    def __init__(
        self, model: PagedKVCache, rows: LayerRows, arguments: dict[str, Any], divided: tuple[int, int],
        transport: Transport | None,
        store: Mapping[str, Any] | None, limits: Limits | None,
    ) -> None:  # fmt: skip
        for name, given, fits, wanted in (
            ("store", store, isinstance(store, Mapping), "the arguments of a PrefixStore by name"),
            ("limits", limits, isinstance(limits, Limits), "a numkv.ray.Limits"),
            (
                "transport",
                transport,
                hasattr(transport, "send"),
                "one such as numkv.ray.RayShards()",
            ),
        ):
            if given is not None and not fits:
                raise TypeError(f"`{name}`: expected {wanted}, got {type(given).__name__}")
        self.model, self.rows = model, rows
        self.windows = [of.window_left for of in model.layers]
        self.layout = layout = Layout.of(rows.num_kv_heads, *divided)
        self.is_split = layout.columns > 1
        self.arguments, self.store = arguments, None if store is None else dict(store)
        self._limits = Limits() if limits is None else limits
        self.transport = transport = RayShards() if transport is None else transport
        self.sequences: dict[int, Sequence] = {}
        self.open_steps: dict[int, ShardedStep] = {}
        self.scales: dict[int, tuple[Any, Any]] = {}
        self.gone: set[int] = set()
        blocks = arguments["num_blocks"]
        self.directory = Directory(2 * blocks * layout.columns)
        transport.start([self._spec(shard) for shard in range(layout.num_shards)])
        self.channels = [
            Channel(transport, shard, blocks, self._limits) for shard in range(layout.num_shards)
        ]

    def _spec(self, shard: int) -> ShardSpec:
        """Return the arguments of a shard."""
        layout = self.layout
        heads = layout.kv_heads(layout.part_of(shard))
        part: dict[str, Any] = {"num_kv_heads": heads.stop - heads.start}
        if self.is_split:
            part["window_left"] = -1  # queries are sent with their visible ranges
        layers = [replace(of, **part) for of in self.model.layers]
        arguments = {**self.arguments, "layers": layers}
        store = self.store
        if store is not None and layout.parts > 1 and (mark := store.get("mark")) is not None:
            mark = dict(mark) if isinstance(mark, Mapping) else {"mark": mark}
            own = f"{heads.start}:{heads.stop} of {layout.bounds[-1]}"
            store = {**store, "mark": {**mark, "kv_heads": own}}
        return ShardSpec(arguments, store)

    @property
    def dead(self) -> set[int]:
        """Return the columns of which a shard has no place."""
        return {self.layout.column_of(shard) for shard in self.gone}

    def free_blocks(self) -> list[int]:
        """Return the blocks of each column that are certainly free."""
        layout, dead = self.layout, self.dead
        return [
            0 if c in dead else min(self.channels[s].free for s in layout.shards_of(c))
            for c in range(layout.columns)
        ]

    def later(self, column: int, name: str, *arguments: Any, cost: int = 0) -> None:
        """Queue an operation for all shards of a column, before their next message; see `Channel.later`."""
        for shard in self.layout.shards_of(column):
            self.channels[shard].later(name, *arguments, cost=cost)

    # -- arguments of attention

    def check_options(self, asked: dict[str, Any], sinks: Any, num_q_heads: int) -> Any:
        """Check options before anything is sent; return sinks as an array."""
        options.check_options(asked)
        if sinks is None:
            return None
        given = host_array("sinks", sinks)
        return check_sinks(targets.get("cpu"), given, self.widest, num_q_heads, True)

    @property
    def widest(self) -> Any:
        """Return float64 if K or V has it, else float32."""
        return compute_dtype(self.rows.k_kind.name, self.rows.v_kind.name)

    # -- replies

    def gather(self, tickets: Iterable[Ticket], step: ShardedStep | None = None) -> None:
        """Wait for all replies. If one is missing or an error, the step is rolled back on all shards first.

        Raises
        ------
        ShardLost
            If a shard was lost.
        Exception
            The error of the first shard, by number, that has raised one.
        """
        tickets = list(tickets)
        try:
            with opened():
                for ticket in tickets:
                    ticket.wait()
        except BaseException:  # an interrupt: sent messages cannot be cancelled
            if step is not None and step.open:
                self.abandon(step)
            raise
        if any(ticket.down is not None for ticket in tickets):
            raise self._recovered()
        error = next((ticket.error for ticket in tickets if ticket.error is not None), None)
        if error is None:
            return
        if step is not None and step.open:
            for ticket in step.tickets:
                ticket.wait()
            self.abandon(step)
            if any(channel.down and channel.shard not in self.gone for channel in self.channels):
                raise self._recovered() from error
        raise error

    def abandon(self, step: ShardedStep) -> None:
        """Roll a step back on all shards."""
        for part in step.parts:
            self.later(part.column, "rollback", step.number)
        for seq in step.sequences:
            self.sequences[seq] = self.sequences[seq]._replace(step=None)
        self.open_steps.pop(step.number, None)
        step.end()
        step.rolled_back = True

    # -- prefixes

    def find(
        self, seq: int, state: Sequence, columns: Iterable[int], only: set[int] | None = None
    ) -> list[Ticket]:
        """Look up the first full blocks of a sequence on all shards, in their pools and the store."""
        size, found = self.model.block_size, []
        full = len(state.tokens) // size * size
        tokens = state.tokens[:full]
        of_block = columns_of_tokens(state.runs)[:full:size]
        for column in sorted(columns):
            sent: tuple[Any, ...]
            if self.is_split:
                own = np.flatnonzero(of_block == column)
                sent = tokens.reshape(-1, size)[own].reshape(-1), state.names[own], None
            else:  # the last token is always computed
                sent = np.append(tokens, np.int32(0)), None, state.extra
            for shard in self.layout.shards_of(column):
                if only is None or shard in only:
                    found.append(self.channels[shard].send("find", seq, *sent))
        return found

    def cut_found(self, seq: int, wanted: Sequence, each: dict[int, int]) -> Sequence:
        """Return a new sequence with the common prefix of all shards; those that found more drop the rest."""
        found = self._least(each)
        kept = kept_after_loss(wanted, found)
        if len(set(each.values())) > 1 and self.cannot_go_back():
            kept = 0
        state = shortened(wanted, kept, self.model.block_size)
        self._drop_rest(seq, state, each)
        return state._replace(columns=frozenset(found), cached=kept)

    def _least(self, each: dict[int, int]) -> dict[int, int]:
        """Return the least number among the shards of each column."""
        found: dict[int, int] = {}
        for shard, n in each.items():
            column = self.layout.column_of(shard)
            found[column] = min(n, found.get(column, n))
        return found

    def cannot_go_back(self) -> bool:
        """Return whether windows on shards may have moved past tokens that a shorter sequence sees."""
        return not self.is_split and any(window >= 0 for window in self.windows)

    def _drop_rest(self, seq: int, state: Sequence, each: dict[int, int]) -> None:
        """Make shards drop their tokens beyond a sequence's length."""
        own = counts(state.runs)
        for shard, n in each.items():
            local = own.get(self.layout.column_of(shard), 0)
            if n > local:
                self.channels[shard].later("truncate", seq, local)

    def shorten(self, seq: int, length: int, skip: frozenset[int] | set[int] = frozenset()) -> None:
        """Make shards drop a sequence's last tokens, except on some shards."""
        before = self.sequences[seq]
        after = shortened(before, length, self.model.block_size)
        had, has = counts(before.runs), counts(after.runs)
        for column in sorted(before.columns):
            if had.get(column, 0) > has.get(column, 0):
                for shard in self.layout.shards_of(column):
                    if shard not in skip:
                        self.channels[shard].later("truncate", seq, has.get(column, 0))
        self.sequences[seq] = after

    # -- losses

    def _recovered(self) -> ShardLost:
        """Recover from a loss, and return the error that reports it."""
        before: dict[int, Sequence] = {}
        shards: dict[int, str] = {}
        steps: list[ShardedStep] = []
        for attempt in range(_ATTEMPTS + 1):
            for channel in self.channels:
                if channel.down is None:
                    channel.drain()
            down = {c.shard: c.down for c in self.channels if c.down and c.shard not in self.gone}
            if not down:
                break
            shards.update({shard: why.reason for shard, why in down.items()})
            columns = {self.layout.column_of(shard) for shard in down}
            for step in [s for s in self.open_steps.values() if s.columns & columns]:
                self.abandon(step)
                steps.append(step)
            self.directory.forget(columns)
            fresh = {x for x in down if attempt < _ATTEMPTS and self._replace(x) is None}
            self.gone |= down.keys() - fresh
            for seq, state in self.sequences.items():
                if state.columns & columns:
                    before.setdefault(seq, state)
            self._restore(columns, fresh)
        lengths = {
            seq: now.length for seq, old in before.items()
            if (now := self.sequences[seq]).length < old.length
        }  # fmt: skip
        tokens = {seq: before[seq].tokens[n:] for seq, n in lengths.items()}
        reasons = "; ".join(f"shard {shard}: {why}" for shard, why in sorted(shards.items()))
        rest = f"; no place for shards {sorted(self.gone)}" if self.gone else ""
        some = ", ".join(f"{seq} (has {n} tokens)" for seq, n in [*lengths.items()][:8])
        if not shards:
            return ShardLost("the step was rolled back when shards were lost", {}, {}, ())
        return ShardLost(
            f"{reasons}{rest}. Compute the missing tokens of {len(lengths)} sequences again: {some or 'none'}",
            lengths, tokens, tuple(sorted(shards)), tuple(steps),
            len(self.dead) == self.layout.columns,
        )  # fmt: skip

    def _replace(self, shard: int) -> str | None:
        """Replace a shard by an empty one; return why that failed, or None."""
        try:
            self.transport.replace(shard)
        except ShardDown as down:
            return down.reason
        self.channels[shard].begin()
        self.tell_scales(shard, self.scales)
        return None

    def tell_scales(self, shard: int, layers: Iterable[int]) -> None:
        """Send a shard the scales that were set in some layers."""
        heads = self.layout.kv_heads(self.layout.part_of(shard))
        for layer in layers:
            own = [x if x is None or np.ndim(x) == 0 else x[heads] for x in self.scales[layer]]
            self.channels[shard].later("set_scales", layer, *own)

    def _restore(self, columns: set[int], fresh: set[int]) -> None:
        """Restore the contents of lost shards from the store, and shorten sequences to the restored tokens."""
        found: dict[int, dict[int, int]] = {}
        tickets: list[tuple[int, Ticket]] = []
        for seq, state in self.sequences.items():
            here = counts(state.runs)
            for column in sorted(state.columns & columns):
                lost = [s for s in self.layout.shards_of(column) if s in fresh]
                if column in self.dead:
                    self.later(column, "remove", seq)
                    self.sequences[seq] = self.sequences[seq]._replace(
                        columns=self.sequences[seq].columns - {column}
                    )
                elif self.store is not None and here.get(column) and len(state.tokens):
                    tickets += [(seq, t) for t in self.find(seq, state, [column], set(lost))]
                else:
                    for shard in lost:
                        self.channels[shard].later("add", seq)
                if column in self.dead or lost:
                    found.setdefault(seq, {})[column] = 0
        each: dict[int, dict[int, int]] = {}
        for seq, ticket in tickets:
            ticket.wait()
            if ticket.error is not None:
                self.channels[ticket.shard].later("add", seq)
            value = ticket.value if ticket.down is None and ticket.error is None else 0
            each.setdefault(seq, {})[ticket.shard] = value
        for seq, of_shard in each.items():
            found[seq].update(self._least(of_shard))
        for seq, of_column in found.items():
            self._keep_found(seq, of_column, each.get(seq, {}), fresh)

    def _keep_found(
        self, seq: int, found: dict[int, int], each: dict[int, int], fresh: set[int]
    ) -> None:
        """Shorten a sequence to the tokens that columns with losses have restored."""
        state = self.sequences[seq]
        kept = kept_after_loss(state, found)
        if kept < state.length and self.cannot_go_back():
            kept = 0
        self.shorten(seq, kept, fresh)
        self._drop_rest(seq, self.sequences[seq], each)

    def revive(self) -> None:
        """Try again to place shards that have no place.

        Raises
        ------
        ShardLost
            If no column has all of its shards.
        """
        reason = "there is no place for it"
        for shard in sorted(self.gone):
            refusal = self._replace(shard)
            if refusal is None:
                self.gone.discard(shard)
            else:
                reason = refusal
        if len(self.dead) == self.layout.columns:
            gone = tuple(sorted(self.gone))
            raise ShardLost(f"no shards to work with: {reason}", {}, {}, gone, hopeless=True)
