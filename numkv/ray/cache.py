"""`ShardedKVCache`: a paged cache whose shards live in other processes, by kv heads, by context, or both.

The cache stores the metadata of sequences: lengths, the column of each token, token ids. Shards store rows. Operations
that cannot fail on a shard (`commit`, `remove`, `fork` …) are decided here and sent with its next message. A step
begins with its first layer's message: L layers are L messages to each shard.

Free blocks are estimated from below, from the last reports of shards. If a step might need more, `reserve` asks all
shards first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.access import Access, whole, writes
from numkv.blocks.prefix import block_digests, plain_extra
from numkv.caches import LayerSpec, PagedKVCache, PagedStats
from numkv.caches.paged.arguments import (
    ids_of_step,
    numbers_of_new_tokens,
    prompt_ids,
    sequence_number,
    sequence_numbers,
    unknown_sequence,
)
from numkv.caches.paged.reservation import kept_tokens
from numkv.caches.paged.store import Extra
from numkv.errors import CacheFull, DimensionMismatch, NotSupported, NumkvError
from numkv.keywords import explains
from numkv.numbers import check_index, check_size
from numkv.ray.sequences import (
    Run,
    Sequence,
    after_step,
    counts,
    cut,
    joined,
    place,
    shortened,
    visible,
)
from numkv.ray.shards import Shards
from numkv.ray.step import Attending, Queries, ShardedStep
from numkv.ray.transport import Channel, Transport


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
    """Bytes of the arrays in these messages."""


@explains
class ShardedKVCache:
    """Keys and values of many sequences on many machines, with the interface of `numkv.PagedKVCache`.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, layers
        See `numkv.PagedKVCache`; all layers have rows of their own, of one shape and kind.
    num_blocks : int
        Blocks of each shard.
    heads : int
        Number of parts of the kv heads, which differ by at most one head.
    context : int
        Number of columns that share the tokens of sequences.
    transport : Transport, optional
        The processes of the shards: by default `RayShards`, Ray actors on this machine; `LocalShards` for this process.
    stripe : int, optional
        Adjacent tokens of a sequence in one column, a multiple of the block size; 16 blocks by default.
    store : mapping, optional
        Arguments of a `numkv.store.PrefixStore` for each shard; all machines must reach its `place`. Lost sequences are
        restored from it.
    limits : Limits, optional
        Bounds of the pending messages to a shard, and the timeout of a reply.
    **options
        Other arguments of `PagedKVCache`: `block_size`, `kind`, `rotate`, `target`.

    Raises
    ------
    DimensionMismatch, UnsupportedDType, NotSupported, ValueError, TypeError
        See `numkv.PagedKVCache`; or there are more parts than heads.

    Notes
    -----
    By heads, results equal those of one `PagedKVCache` bit for bit. By context they differ by float rounding, and are
    the same in every run. By context, blocks behind sliding windows stay in memory.

    Only one thread at a time may use the cache and its steps.

    Examples
    --------
    See `LocalShards`.
    """

    def __init__(
        self,
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        layers: Iterable[LayerSpec] | None = None,
        num_blocks: int,
        heads: int = 1,
        context: int = 1,
        transport: Transport | None = None,
        stripe: int | None = None,
        store: Any = None,
        limits: Any = None,
        **options: Any,
    ) -> None:
        alike = {**options, "target": "cpu"}
        targets.get(options.get("target", "cpu"))
        model = PagedKVCache(
            num_layers, num_kv_heads, head_dim, layers=layers, num_blocks=1, **alike
        )
        column = model.__column__()
        if not column.takes_parts:
            raise NotSupported(
                "ShardedKVCache: expected rows of K and V of one shape and kind in all layers, without chunks, shares "
                "and states, got latents, keys by channel or different layers; make such a cache in one process"
            )
        self._access = Access()
        blocks = check_size("num_blocks", num_blocks)
        size = model.block_size
        stripe = 16 * size if stripe is None else check_size("stripe", stripe, 1)
        if stripe % size:
            raise DimensionMismatch(
                f"`stripe`: expected a multiple of the block size {size}, got {stripe}",
                size,
                stripe,
            )
        rest = {name: x for name, x in options.items() if name not in ("kind", "rotate")}
        arguments = {"layers": model.layers, "num_blocks": blocks, **rest}
        self._shards = Shards(
            model, column.store.layers.first, arguments, (heads, context), transport, store, limits
        )
        self._stripe = stripe
        self._next = self._steps_made = 0

    # -- properties

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return self._shards.model.num_layers

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Return the description of each layer, over all shards; see `numkv.PagedKVCache.layers`."""
        return self._shards.model.layers

    @property
    def block_size(self) -> int:
        """Return the tokens of a block."""
        return self._shards.model.block_size

    @property
    def num_blocks(self) -> int:
        """Return the blocks of each shard."""
        return int(self._shards.arguments["num_blocks"])

    @property
    def num_shards(self) -> int:
        """Return the number of shards."""
        return self._shards.layout.num_shards

    @property
    def sequences(self) -> tuple[int, ...]:
        """Return the sequences, in the order of `add`."""
        return tuple(self._shards.sequences)

    @property
    def messages(self) -> tuple[int, ...]:
        """Return the number of messages to each shard so far."""
        return tuple(channel.sent for channel in self._shards.channels)

    def __len__(self) -> int:
        return len(self._shards.sequences)

    def __repr__(self) -> str:
        layout = self._shards.layout
        return (
            f"ShardedKVCache(sequences={len(self)}, num_layers={self.num_layers}, heads={layout.parts}, "
            f"context={layout.columns}, blocks={self.num_blocks}, block_size={self.block_size}, "
            f"kind={self._shards.rows.k_kind})"
        )

    def length(self, seq: int) -> int:
        """Return the committed tokens of a sequence."""
        return self._sequence(seq).length

    def cached_len(self, seq: int) -> int:
        """Return how many tokens the prefix cache or the store had when the sequence was added."""
        return self._sequence(seq).cached

    def runs(self, seq: int) -> tuple[Run, ...]:
        """Return the columns of a sequence's tokens.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        tuple of (int, int)
            Column and number of tokens of each run, in order.
        """
        return self._sequence(seq).runs

    # -- reading

    @writes
    def decode_attention(
        self, layer: int, sequences: Iterable[int], q: Any, *, sm_scale: float | None = None,
        logits_soft_cap: float = 0.0, sinks: Any = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Attend with the query of the newest committed token of any sequences.

        Parameters
        ----------
        layer, sequences, q, sm_scale, logits_soft_cap, sinks, return_lse
            See `numkv.PagedKVCache.decode_attention`.

        Returns
        -------
        array or tuple of array
            See `numkv.PagedKVCache.decode_attention`.

        Raises
        ------
        ShardLost
            If a shard was lost.
        NumkvError, IndexError
            See `numkv.PagedKVCache.decode_attention`.
        """
        layer = check_index("layer", layer, self.num_layers)
        seqs = sequence_numbers(sequences, 2**31)
        states = [self._sequence(seq) for seq in seqs]
        shards = self._shards
        queries = Queries(shards, q, len(seqs), (sm_scale, logits_soft_cap, sinks, True))
        each: list[tuple[Any, Any]] = []
        for column in sorted({c for state in states for c in counts(state.runs)}):
            rows = np.flatnonzero([column in counts(state.runs) for state in states])
            here, ranges = [seqs[i] for i in rows], None
            if shards.is_split:
                newest = [(states[i].runs, np.array([states[i].length - 1])) for i in rows]
                window = shards.windows[layer]
                ranges = np.concatenate([visible(x, column, at, window) for x, at in newest])
            tickets = []
            for part, shard in enumerate(shards.layout.shards_of(column)):
                own, options = queries.of(part, rows)
                sent = shards.channels[shard].send("look", layer, here, own, ranges, options)
                tickets.append(sent)
            each.append((rows, tickets))
        found = Attending(shards, queries, each, None).result()
        return found if return_lse else found[0]

    # -- sequences

    @whole
    def add(self, tokens: Any = None, *, extra: Extra | None = None) -> int:
        """Add a sequence; given token ids, reuse the prefix that shards and the store have.

        Parameters
        ----------
        tokens, extra
            See `numkv.PagedKVCache.add`.

        Returns
        -------
        int
            The sequence.

        Raises
        ------
        ShardLost
            If a shard was lost; the sequence is not added.
        UnsupportedDType, DimensionMismatch, ValueError, TypeError
            See `numkv.PagedKVCache.add`.
        """
        ids, extra = prompt_ids(tokens), plain_extra(extra)
        seq, size = self._next, self.block_size
        state = Sequence(extra=extra)
        full = ids[: max(0, len(ids) - 1) // size * size]
        if len(full):
            state = self._found(seq, state, full)
        self._shards.sequences[seq] = state
        self._next = seq + 1
        return seq

    def _found(self, seq: int, state: Sequence, full: NDArray[np.int32]) -> Sequence:
        """Return a new sequence with the prefix of these tokens that all shards have or find."""
        size, names = self.block_size, state.names
        if not self._shards.is_split:
            runs: tuple[Run, ...] = ((0, len(full)),)
        else:
            names = block_digests(full, size, state.extra)
            runs = self._known(names)
        wanted = state._replace(runs=runs, tokens=full[: sum(n for _, n in runs)], names=names)
        tickets = self._shards.find(seq, wanted, counts(runs))
        try:
            self._shards.gather(tickets)
        except BaseException:
            for column in counts(runs):
                self._shards.later(column, "remove", seq)
            raise
        return self._shards.cut_found(seq, wanted, {x.shard: x.value for x in tickets})

    def _known(self, names: NDArray[np.uint8]) -> tuple[Run, ...]:
        """Return the columns of a prompt's blocks, as far as they are known or the store may have them."""
        runs: list[Run] = []
        free = self._shards.free_blocks()
        for name in names:
            column = self._shards.directory.column(name.tobytes())
            if column is not None and column in self._shards.dead:
                column = None
            if column is None:
                if self._shards.store is None:
                    break
                found = place(runs, self.block_size, self.block_size, self._stripe, free)
                if found is None:
                    break
                column = found[0][0]
            runs = list(joined(runs, [(column, self.block_size)]))
        return tuple(runs)

    @whole
    def fork(self, seq: int) -> int:
        """Make a second sequence with the same tokens; see `numkv.PagedKVCache.fork`."""
        state = self._idle(seq)
        new = self._next
        for column in sorted(state.columns):
            self._shards.later(column, "fork", sequence_number(seq), new)
        self._shards.sequences[new] = state._replace(cached=0, shared=True)
        self._shards.sequences[sequence_number(seq)] = state._replace(shared=True)
        self._next = new + 1
        return new

    @whole
    def remove(self, seq: int) -> None:
        """Remove a sequence; see `numkv.PagedKVCache.remove`."""
        state = self._idle(seq)
        number = sequence_number(seq)
        for column in sorted(state.columns):
            self._shards.later(column, "remove", number)
        del self._shards.sequences[number]

    @whole
    def truncate(self, seq: int, length: int) -> None:
        """Drop a sequence's tokens from position `length` on; see `numkv.PagedKVCache.truncate`."""
        state, number = self._idle(seq), sequence_number(seq)
        length = check_index("length", length, state.length, inclusive=True)
        if length and self._shards.cannot_go_back():  # ask
            shards = self._shards.layout.shards_of(0)
            channels = self._shards.channels
            self._shards.gather([channels[s].send("shorten", number, length) for s in shards])
            self._shards.sequences[number] = shortened(state, length, self.block_size)
        else:
            self._shards.shorten(number, length)

    # -- steps

    @whole
    def reserve(
        self, sequences: Iterable[int], new_lens: Any, *, expect: Any = None
    ) -> ShardedStep:
        """Reserve room for new tokens of some sequences, all or nothing.

        Parameters
        ----------
        sequences, new_lens
            See `numkv.PagedKVCache.reserve`.
        expect : int or int array (num_seqs,), optional
            The length of each sequence as the caller knows it; a loss of shards may have shortened it since.

        Returns
        -------
        ShardedStep

        Raises
        ------
        CacheFull
            If shards have too few free blocks; no shard has changed.
        ShardLost
            If a shard that had to be asked was lost.
        DimensionMismatch
            If a sequence has another length than expected; nothing has changed.
        IndexError, NumkvError, ValueError
            See `numkv.PagedKVCache.reserve`.
        """
        seqs = sequence_numbers(sequences, len(self), once=True)
        states = {seq: self._idle(seq) for seq in seqs}
        lens = numbers_of_new_tokens(new_lens, len(seqs))
        if expect is not None:
            _check_lengths(states, numbers_of_new_tokens(expect, len(seqs), "expect"))
        shards = self._shards
        if len(shards.dead) == shards.layout.columns:
            shards.revive()
        placed = self._place(states, lens, shards.free_blocks(), certain=True)
        asked = placed is None
        if placed is None:
            shards.gather([each.send("sync") for each in shards.channels if not each.down])
            placed = self._place(states, lens, shards.free_blocks(), certain=False)
        if placed is None:
            raise CacheFull(
                f"expected room for {int(lens.sum())} new tokens of {len(seqs)} sequences, got shards with "
                f"{shards.free_blocks()} free blocks"
            )
        number = self._steps_made = self._steps_made + 1
        step = ShardedStep(shards, number, placed, lens)
        self._start(step)
        if asked:
            theirs = [s for column in step.columns for s in shards.layout.shards_of(column)]
            shards.gather([shards.channels[s].send("sync") for s in theirs], step)
        return step

    def _place(
        self, states: dict[int, Sequence], lens: Any, free: list[int], certain: bool
    ) -> dict[int, tuple[tuple[Run, ...], list[Run]]] | None:
        """Choose columns for new tokens of sequences; return None if there may be too few free blocks."""
        left = list(free)
        found: dict[int, tuple[tuple[Run, ...], list[Run]]] = {}
        for (seq, state), n in zip(states.items(), lens.tolist(), strict=True):
            if self._shards.is_split:
                pieces = place(state.runs, n, self.block_size, self._stripe, left)
                if pieces is None:
                    return None
            else:
                pieces = [(0, n)] * (n > 0)
            found[seq] = state.runs, pieces
        if not certain:  # no shard can have more; costs may count a copied block of each sequence
            free = [self.num_blocks + len(found) * self._shards.model.num_groups] * len(free)
        return None if any(cost > free[c] for c, cost in self._costs(found).items()) else found

    def _costs(self, placed: dict[int, tuple[tuple[Run, ...], list[Run]]]) -> dict[int, int]:
        """Return the most blocks that new tokens can need in each column, copies of shared last blocks included."""
        size = self.block_size
        groups = 1 if self._shards.is_split else self._shards.model.num_groups
        costs: dict[int, int] = {}
        for seq, (runs, pieces) in placed.items():
            own, shared = counts(runs), self._shards.sequences[seq].shared
            for column, n in counts(pieces).items():
                has = own.get(column, 0)
                blocks = -(-(has + n) // size) - -(-has // size) + (shared and has % size > 0)
                costs[column] = costs.get(column, 0) + blocks * groups
        return costs

    def _start(self, step: ShardedStep) -> None:
        """Queue the beginning of a step, which is sent with its first message."""
        sequences, later = self._shards.sequences, self._shards.later
        costs = self._costs({seq: (sequences[seq].runs, p) for seq, p in step.pieces.items()})
        for part in step.parts:
            for seq in part.seqs:
                state = sequences[seq]
                if part.column not in state.columns:
                    later(part.column, "add", seq)
                    sequences[seq] = state._replace(columns=state.columns | {part.column})
            later(
                part.column, "reserve", step.number, part.seqs, part.new_lens, part.starts, part.ranges,
                cost=costs.get(part.column, 0),
            )  # fmt: skip
        for seq in step.sequences:
            sequences[seq] = sequences[seq]._replace(step=step.number)
        self._shards.open_steps[step.number] = step

    @whole
    def commit(self, step: ShardedStep, accepted: Any = None, *, token_ids: Any = None) -> None:
        """End a step: its tokens, or the first of them, become part of their sequences.

        Parameters
        ----------
        step, accepted, token_ids
            See `numkv.PagedKVCache.commit`.

        Raises
        ------
        ShardLost
            If a shard was lost before it had the rows; the step is rolled back on all shards.
        NumkvError, IndexError, DimensionMismatch
            See `numkv.PagedKVCache.commit`.

        Notes
        -----
        Shards are notified with their next message. Losses until then are also noticed then.
        """
        self._check_open(step)
        keep, _ = kept_tokens(step.new_lens, None, accepted, None)
        # A copy, as shards receive it later.
        ids = None if token_ids is None else ids_of_step(token_ids, step).copy()
        if step.unwritten_layers and keep.any():
            raise NumkvError(
                f"`step`: expected rows of the new tokens in all layers, got none in layer {step.unwritten_layers[0]}; "
                "append them, or roll the step back"
            )
        if not keep.any():
            self._shards.abandon(step)
            return
        step.send_held()
        self._shards.gather(step.tickets, step)
        self._keep(step, keep, ids)

    def _keep(self, step: ShardedStep, keep: Any, ids: NDArray[np.int32] | None) -> None:
        """Commit a step whose rows are on all shards."""
        ends = np.cumsum(step.new_lens)
        named: dict[int, list[Any]] = {part.column: [] for part in step.parts}
        took: dict[int, dict[int, int]] = {part.column: {} for part in step.parts}
        for i, seq in enumerate(step.sequences):
            n, begin = int(keep[i]), int(ends[i] - step.new_lens[i])
            pieces = list(cut(step.pieces[seq], n))
            for column, size in counts(pieces).items():
                took[column][seq] = size
            own = None if ids is None else ids[begin : begin + n]
            before, is_split = self._shards.sequences[seq], self._shards.is_split
            state, blocks = after_step(seq, before, pieces, own, self.block_size, is_split)
            self._shards.sequences[seq] = state
            for column, of_column in blocks.items():
                named[column].append(of_column)
                self._shards.directory.note(of_column.names, column)
        everything = bool((keep == step.new_lens).all())
        for part in step.parts:
            accepted = None
            if not everything:
                accepted = np.array([took[part.column].get(s, 0) for s in part.seqs], np.int64)
            own_ids = None if self._shards.is_split else ids
            blocks_named = [tuple(x) for x in named[part.column]]
            self._shards.later(part.column, "commit", step.number, accepted, own_ids, blocks_named)
        del self._shards.open_steps[step.number]
        step.end()

    @whole
    def rollback(self, step: ShardedStep) -> None:
        """End a step without keeping any of its tokens; see `numkv.PagedKVCache.rollback`.

        A step that an error has rolled back already is ignored.
        """
        if isinstance(step, ShardedStep) and step.shards is self._shards and step.rolled_back:
            return
        self._check_open(step)
        self._shards.abandon(step)

    # -- counts

    @writes
    def stats(self) -> ShardedStats:
        """Ask all shards, and return the counts of the cache and of its shards.

        Returns
        -------
        ShardedStats

        Raises
        ------
        ShardLost
            If a shard was lost.
        """
        tickets = self._ask("stats")
        return ShardedStats(
            len(self._shards.sequences),
            sum(state.length for state in self._shards.sequences.values()),
            tuple(ticket.value for ticket in tickets),
            tuple(channel.sent for channel in self._shards.channels),
            tuple(channel.sent_nbytes for channel in self._shards.channels),
        )

    def _working(self) -> list[Channel]:
        """Return the channels to shards that have a place."""
        return [x for x in self._shards.channels if x.shard not in self._shards.gone]

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        """Send an operation to all working shards, and return their replies."""
        tickets = [channel.send(name, *arguments) for channel in self._working()]
        self._shards.gather(tickets)
        return tickets

    @writes
    def check(self) -> None:
        """Verify the block accounting of all shards, and their lengths of each sequence.

        Raises
        ------
        NumkvError
            If a check fails.
        ShardLost
            If a shard was lost.
        """
        for ticket in self._ask("check"):
            column = self._shards.layout.column_of(ticket.shard)
            wanted = {
                seq: counts(state.runs).get(column, 0)
                for seq, state in self._shards.sequences.items()
                if column in state.columns
            }
            if ticket.value != wanted:
                raise NumkvError(
                    f"shard {ticket.shard}: expected sequences of lengths {wanted}, got {ticket.value}"
                )

    @writes
    def flush(self, timeout: float | None = None) -> int:
        """Wait until shards have written all committed blocks; see `numkv.store.PrefixStore.flush`.

        Parameters
        ----------
        timeout : float, optional
            The most seconds that each shard waits.

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
        if self._shards.open_steps:
            raise NumkvError("clear: expected a cache without open steps; end them first")
        self._shards.sequences.clear()  # first, so that an interrupt during the replies leaves none
        self._shards.directory.clear()
        self._ask("clear")

    @whole
    def set_scales(self, layer: int, k: Any = None, v: Any = None) -> None:
        """Set the scales of a layer's kv heads; see `numkv.PagedKVCache.set_scales`."""
        layer = check_index("layer", layer, self._shards.model.num_layers)
        if self._shards.sequences:
            raise NumkvError(
                f"set_scales: expected a cache without sequences, got {len(self._shards.sequences)}"
            )
        self._shards.model.set_scales(layer, k, v)  # checks
        old = self._shards.scales.get(layer, (None, None))
        self._shards.scales[layer] = tuple(  # type: ignore[assignment]
            before if x is None else np.array(x, np.float32)  # a copy, for later shards, too
            for x, before in zip((k, v), old, strict=True)
        )
        for channel in self._working():
            self._shards.tell_scales(channel.shard, [layer])
        self._shards.directory.clear()

    @whole
    def revive(self) -> None:
        """Place lost shards that had found no place.

        Raises
        ------
        ShardLost
            If no column has all of its shards.
        """
        self._shards.revive()

    def close(self) -> None:
        """End all shards, and the use of this cache."""
        for step in list(self._shards.open_steps.values()):
            step.end()
        self._shards.open_steps.clear()
        for channel in self._shards.channels:
            channel.closed = True
        self._shards.transport.close()

    # -- from column to column

    @whole
    def move(self, seq: int, to: int, source: int | None = None) -> None:
        """Move the rows of a sequence from one column to another, as they are stored.

        Parameters
        ----------
        seq : int
            The sequence.
        to : int
            The receiving column, which has no tokens of the sequence.
        source : int, optional
            The sending column; by default the only one with tokens of the sequence.

        Raises
        ------
        CacheFull
            If the column has too few free blocks; nothing has moved.
        NotSupported
            If `to` has tokens of the sequence already, or `source` has none.
        ShardLost, IndexError, NumkvError
            If a shard was lost; if there is no such sequence or column; if the sequence has an open step.
        """
        layout = self._shards.layout
        state, seq = self._idle(seq), sequence_number(seq)
        to, held = check_index("to", to, layout.columns), counts(state.runs)
        if source is None:
            if len(held) != 1:
                raise NotSupported(
                    f"`source`: expected a column, as sequence {seq} is in {sorted(held)}"
                )
            source = next(iter(held))
        source = check_index("source", source, layout.columns)
        if source not in held or to in held or to in self._shards.dead:
            raise NotSupported(
                f"`to`: expected a working column without tokens of sequence {seq}, which is in {sorted(held)}, "
                f"got {to}; `source` {source}"
            )
        if to in state.columns:
            self._shards.later(to, "remove", seq)
        # The sequence stays in its old column until the new one has all rows.
        self._shards.sequences[seq] = state = state._replace(columns=state.columns - {to})
        out = [self._shards.channels[s].send("swap_out", seq) for s in layout.shards_of(source)]
        self._shards.gather(out)
        tickets = [
            self._shards.channels[shard].send("swap_in", seq, ticket.value)
            for shard, ticket in zip(layout.shards_of(to), out, strict=True)
        ]
        try:
            self._shards.gather(tickets)
        except BaseException:
            self._shards.later(to, "remove", seq)
            raise
        self._shards.later(source, "remove", seq)
        runs = joined((to if column == source else column, n) for column, n in state.runs)
        columns = (state.columns - {source}) | {to}
        self._shards.sequences[seq] = state._replace(runs=runs, columns=columns)

    def balance(self, most: int = 1) -> int:
        """Move sequences from the fullest column to the emptiest, while that reduces their difference.

        Parameters
        ----------
        most : int
            The most sequences to move.

        Returns
        -------
        int
            Number of moved sequences.

        Raises
        ------
        ShardLost, CacheFull
            See `move`.
        """
        most = check_size("most", most)
        for moved in range(most):
            self.stats()  # so that free blocks are known
            free = self._shards.free_blocks()
            alive = [c for c in range(len(free)) if c not in self._shards.dead]
            if not alive:
                return moved
            source, to = min(alive, key=lambda c: free[c]), max(alive, key=lambda c: free[c])
            gap, best = free[to] - free[source], None
            for seq, state in self._shards.sequences.items():
                held = counts(state.runs)
                blocks = -(-held.get(source, 0) // self.block_size)
                fits = state.step is None and to not in held and 0 < blocks < gap
                if fits and (best is None or abs(gap - 2 * blocks) < best[0]):
                    best = abs(gap - 2 * blocks), seq
            if best is None:
                return moved
            self.move(best[1], to, source)
        return most

    # -- checks

    def _check_open(self, step: Any) -> None:
        if not isinstance(step, ShardedStep) or step.shards is not self._shards:
            raise NumkvError(
                f"`step`: expected an open step of this cache, got {type(step).__name__}"
            )
        if not step.open:
            raise NumkvError("`step`: expected an open step of this cache, got an ended one")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported("a ShardedKVCache cannot be copied or pickled: its shards are elsewhere")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _sequence(self, seq: Any) -> Sequence:
        found = self._shards.sequences.get(sequence_number(seq))
        if found is None:
            raise unknown_sequence(seq)
        return found

    def _idle(self, seq: int) -> Sequence:
        found = self._sequence(seq)
        if found.step is not None:
            raise NumkvError(
                f"`seq`: expected sequence {seq} to have no open step; commit it or roll it back first"
            )
        return found


def _check_lengths(states: dict[int, Sequence], expected: NDArray[np.int64]) -> None:
    """Raise an error for sequences whose length differs from the caller's, as after a loss."""
    for (seq, state), length in zip(states.items(), expected.tolist(), strict=True):
        if state.length != length:
            raise DimensionMismatch(
                f"`expect`: expected sequence {seq} to have {length} tokens, got {state.length}; compute the tokens "
                "from there on again",
                expected=length,
                actual=state.length,
            )
