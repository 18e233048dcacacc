"""`ShardedKVCache`: a paged cache whose shards live in other processes, by kv heads, by context, or both.

The books of sequences are kept here: lengths, which column has which tokens, token ids. Shards hold rows. What cannot
fail on a shard (`commit`, `remove`, `fork` …) is decided here and rides along with the next message to it. A step
begins with its first layer's message: L layers are L messages to each shard.

Blocks are counted on the safe side, from what shards said last. Where that is not certainly enough for a step,
`reserve` asks all shards before it answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.access import Access, whole
from numkv.blocks.prefix import block_digests, plain_extra
from numkv.caches import LayerSpec, PagedKVCache
from numkv.caches.paged.arguments import ids_of_step, numbers_of_new_tokens, prompt_ids
from numkv.caches.paged.store import Extra
from numkv.checks import check_integers, host_array
from numkv.errors import CacheFull, DimensionMismatch, NotSupported, NumkvError
from numkv.keywords import explains
from numkv.numbers import check_index, check_size
from numkv.ray.books import Sequence, after_step, shortened
from numkv.ray.placing import Run, counts, place
from numkv.ray.reading import ReadableShards
from numkv.ray.step import ShardedStep
from numkv.ray.transport import Transport


@explains
class ShardedKVCache(ReadableShards):
    """Keys and values of many sequences on many machines, with the interface of `numkv.PagedKVCache`.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, layers
        See `numkv.PagedKVCache`; all layers have rows of their own, which are alike.
    num_blocks : int
        Blocks of each shard.
    heads : int
        Parts that the kv heads are divided into, which may differ by one head.
    context : int
        Columns that the tokens of sequences are divided into.
    transport : Transport, optional
        Where shards live: `RayShards` if None, actors of a Ray on this machine; `LocalShards` for this process.
    stripe : int, optional
        Tokens of a sequence that stay together in a column, a multiple of the block size; 16 blocks if None.
    store : mapping, optional
        Arguments of `numkv.store.PrefixStore`, which each shard makes for itself: `place` must be one that all
        machines reach. It is where lost sequences come back from.
    limits : Limits, optional
        What may be on its way to a shard at once, and how long it may take to answer.
    **options
        What else `PagedKVCache` takes: `block_size`, `kind`, `rotate`, `target`.

    Raises
    ------
    DimensionMismatch, UnsupportedDType, NotSupported, ValueError, TypeError
        See `numkv.PagedKVCache`; or there are more parts than heads.

    Notes
    -----
    By heads results are those of one `PagedKVCache` to the bit; by context to float rounding, and the same in every
    run. By context, blocks behind sliding windows are kept.

    Threads: one at a time uses the cache and its steps.

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
        of = model._store.layers
        if not of.plain or of.first.is_latent:
            raise NotSupported(
                "ShardedKVCache: expected rows of K and V that are alike in all layers, without chunks, shares and "
                "states, got latents or layers that are not alike; keep such a cache in one process"
            )
        self._access = Access()
        self._model, self.rows = model, of.first
        self._windows = [of.window_left for of in model.layers]
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
        self._begin(arguments, (heads, context), transport, store, limits)
        self._stripe = stripe

    # -- sequences

    @whole
    def add(self, tokens: Any = None, *, extra: Extra | None = None) -> int:
        """Add a sequence; with its token ids, begin with what shards and the store have of them.

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
        self._sequences[seq] = state
        self._next = seq + 1
        return seq

    def _found(self, seq: int, state: Sequence, full: NDArray[np.int32]) -> Sequence:
        """A new sequence with as many of these tokens as all shards have or find."""
        size, names = self.block_size, state.names
        if not self._is_split:
            runs: tuple[Run, ...] = ((0, len(full)),)
        else:
            names = block_digests(full, size, state.extra)
            runs = self._known(names)
        wanted = state._replace(runs=runs, tokens=full[: sum(n for _, n in runs)], names=names)
        tickets = self._find(seq, wanted, counts(runs))
        try:
            self._gather(tickets)
        except BaseException:
            for column in counts(runs):
                self._later(column, "remove", seq)
            raise
        found: dict[int, int] = {}
        for ticket in tickets:
            column = self._layout.column_of(ticket.shard)
            found[column] = min(ticket.value, found.get(column, ticket.value))
        return self._cut_found(seq, wanted, found, tickets)

    def _known(self, names: NDArray[np.uint8]) -> tuple[Run, ...]:
        """Where the blocks of a prompt are, as far as that is known, or may be brought from the store."""
        runs: list[Run] = []
        free = self._free_blocks()
        for name in names:
            column = self._directory.column(name.tobytes())
            if column is not None and column in self._dead:
                column = None
            if column is None:
                if self._store is None:
                    break
                found = place(runs, self.block_size, self.block_size, self._stripe, free)
                if found is None:
                    break
                column = found[0][0]
            runs = list(_joined(runs, column, self.block_size))
        return tuple(runs)

    @whole
    def fork(self, seq: int) -> int:
        """Make a second sequence with the same tokens; see `numkv.PagedKVCache.fork`."""
        state = self._idle(seq)
        new = self._next
        for column in sorted(state.columns):
            self._later(column, "fork", self._number(seq), new)
        self._sequences[new] = state._replace(cached=0, shared=True)
        self._sequences[self._number(seq)] = state._replace(shared=True)
        self._next = new + 1
        return new

    @whole
    def remove(self, seq: int) -> None:
        """Remove a sequence; see `numkv.PagedKVCache.remove`."""
        state = self._idle(seq)
        number = self._number(seq)
        for column in sorted(state.columns):
            self._later(column, "remove", number)
        del self._sequences[number]

    @whole
    def truncate(self, seq: int, length: int) -> None:
        """Drop a sequence's tokens from position `length` on; see `numkv.PagedKVCache.truncate`."""
        state, number = self._idle(seq), self._number(seq)
        length = check_index("length", length, state.length, inclusive=True)
        if not self._is_split and length and any(window >= 0 for window in self._windows):
            shards = self._layout.shards_of(0)  # windows may have moved past: ask
            self._gather([self._channels[s].send("shorten", number, length) for s in shards])
            self._sequences[number] = shortened(state, length, self.block_size)
        else:
            self._shorten(number, length)

    # -- steps

    @whole
    def reserve(
        self, sequences: Iterable[int], new_lens: Any, *, expect: Any = None
    ) -> ShardedStep:
        """Take room for new tokens of some sequences, all or nothing.

        Parameters
        ----------
        sequences, new_lens
            See `numkv.PagedKVCache.reserve`.
        expect : int or int array (num_seqs,), optional
            How many tokens each of them has, as far as the caller knows: it may not have heard of a loss.

        Returns
        -------
        ShardedStep

        Raises
        ------
        CacheFull
            If shards have too few free blocks; on no shard anything has changed.
        ShardLost
            If a shard was lost that had to be asked.
        DimensionMismatch
            If a sequence has another length than expected; nothing has changed.
        IndexError, NumkvError, ValueError
            See `numkv.PagedKVCache.reserve`.
        """
        seqs = self._numbers(sequences)
        states = {seq: self._idle(seq) for seq in seqs}
        lens = numbers_of_new_tokens(new_lens, len(seqs))
        if expect is not None:
            _check_lengths(states, numbers_of_new_tokens(expect, len(seqs), "expect"))
        if len(self._dead) == self._layout.columns:
            self._revive()
        placed = self._place(states, lens, self._free_blocks(), certain=True)
        asked = placed is None
        if placed is None:
            self._gather([channel.send("sync") for channel in self._channels if not channel.down])
            placed = self._place(states, lens, self._free_blocks(), certain=False)
        if placed is None:
            raise CacheFull(
                f"expected room for {int(lens.sum())} new tokens of {len(seqs)} sequences, got shards with "
                f"{self._free_blocks()} free blocks"
            )
        number = self._steps_made = self._steps_made + 1
        step = ShardedStep(self, number, placed, lens)
        self._start(step)
        if asked:
            shards = [s for column in step.columns for s in self._layout.shards_of(column)]
            self._gather([self._channels[shard].send("sync") for shard in shards], step)
        return step

    def _place(
        self, states: dict[int, Sequence], lens: Any, free: list[int], certain: bool
    ) -> dict[int, tuple[tuple[Run, ...], list[Run]]] | None:
        """Where new tokens of sequences go; None if there may be too few free blocks."""
        left = list(free)
        found: dict[int, tuple[tuple[Run, ...], list[Run]]] = {}
        for (seq, state), n in zip(states.items(), lens.tolist(), strict=True):
            if self._is_split:
                pieces = place(state.runs, n, self.block_size, self._stripe, left)
                if pieces is None:
                    return None
            else:
                pieces = [(0, n)] * (n > 0)
            found[seq] = state.runs, pieces
        if certain:
            for column, cost in self._costs(found).items():
                if cost > free[column]:
                    return None
        return found

    def _costs(self, placed: dict[int, tuple[tuple[Run, ...], list[Run]]]) -> dict[int, int]:
        """The most blocks that new tokens can take in each column: with copies of last blocks that are shared."""
        size, groups = self.block_size, 1 if self._is_split else self._model.num_groups
        costs: dict[int, int] = {}
        for seq, (runs, pieces) in placed.items():
            own, shared = counts(runs), self._sequences[seq].shared
            for column, n in counts(pieces).items():
                has = own.get(column, 0)
                blocks = -(-(has + n) // size) - -(-has // size) + (shared and has % size > 0)
                costs[column] = costs.get(column, 0) + blocks * groups
        return costs

    def _start(self, step: ShardedStep) -> None:
        """Have a step begin with its first message."""
        costs = self._costs({seq: (self._sequences[seq].runs, p) for seq, p in step.pieces.items()})
        for part in step.parts:
            for seq in part.seqs:
                state = self._sequences[seq]
                if part.column not in state.columns:
                    self._later(part.column, "add", seq)
                    self._sequences[seq] = state._replace(columns=state.columns | {part.column})
            for shard in self._layout.shards_of(part.column):
                self._channels[shard].later(
                    "reserve", step.number, part.seqs, part.new_lens, part.starts, part.ranges,
                    cost=costs.get(part.column, 0),
                )  # fmt: skip
        for seq in step.sequences:
            self._sequences[seq] = self._sequences[seq]._replace(step=step.number)
        self._open[step.number] = step

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
            If a shard was lost before it had the rows; the step is rolled back on all.
        NumkvError, IndexError, DimensionMismatch
            See `numkv.PagedKVCache.commit`.

        Notes
        -----
        Shards are told with the next message that they get. What is lost with a shard until then is found out then.
        """
        self._check_open(step)
        keep = step.new_lens
        if accepted is not None:
            given = host_array("accepted", accepted)
            checked = check_integers(targets.get("cpu"), "accepted", given, (len(keep),))
            keep = np.asarray(checked, np.int64)
        if ((keep < 0) | (keep > step.new_lens)).any():
            raise IndexError(
                f"`accepted`: expected numbers up to {step.new_lens.tolist()}, got {keep.tolist()}"
            )
        ids = None if token_ids is None else ids_of_step(token_ids, step)
        if step.unwritten_layers and keep.any():
            raise NumkvError(
                f"`step`: expected rows of the new tokens in all layers, got none in layer {step.unwritten_layers[0]}; "
                "append them, or roll the step back"
            )
        if not keep.any():
            self._abandon(step)
            return
        step._send_held()
        self._gather(step.tickets, step)
        self._keep(step, keep, ids)

    def _keep(self, step: ShardedStep, keep: Any, ids: NDArray[np.int32] | None) -> None:
        """Commit a step of which all shards have all rows."""
        ends = np.cumsum(step.new_lens)
        named: dict[int, list[Any]] = {part.column: [] for part in step.parts}
        took: dict[int, dict[int, int]] = {part.column: {} for part in step.parts}
        for i, seq in enumerate(step.sequences):
            n, begin = int(keep[i]), int(ends[i] - step.new_lens[i])
            pieces, left = [], n
            for column, size in step.pieces[seq]:
                pieces.append((column, min(size, left)))
                left -= pieces[-1][1]
            for column, size in counts(pieces).items():
                took[column][seq] = size
            own = None if ids is None else ids[begin : begin + n]
            state, blocks = after_step(
                seq, self._sequences[seq], pieces, own, self.block_size, self._is_split
            )
            self._sequences[seq] = state
            for column, of_column in blocks.items():
                named[column].append(of_column)
                self._directory.note(of_column.names, column)
        everything = bool((keep == step.new_lens).all())
        for part in step.parts:
            accepted = None
            if not everything:
                accepted = np.array([took[part.column].get(s, 0) for s in part.seqs], np.int64)
            own_ids = None if self._is_split else ids
            blocks_named = [tuple(x) for x in named[part.column]]
            self._later(part.column, "commit", step.number, accepted, own_ids, blocks_named)
        del self._open[step.number]
        step._end()

    @whole
    def rollback(self, step: ShardedStep) -> None:
        """End a step without keeping any of its tokens; see `numkv.PagedKVCache.rollback`.

        A step that an error has rolled back already is left as it is.
        """
        if isinstance(step, ShardedStep) and step._cache is self and step._rolled_back:
            return
        self._check_open(step)
        self._abandon(step)

    # -- checks

    def _check_open(self, step: Any) -> None:
        if not isinstance(step, ShardedStep) or step._cache is not self:
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


def _check_lengths(states: dict[int, Sequence], expected: NDArray[np.int64]) -> None:
    """Refuse to go on from another length than the caller believes, such as after a loss."""
    for (seq, state), length in zip(states.items(), expected.tolist(), strict=True):
        if state.length != length:
            raise DimensionMismatch(
                f"`expect`: expected sequence {seq} to have {length} tokens, got {state.length}; compute the tokens "
                "from there on again",
                expected=length,
                actual=state.length,
            )


def _joined(runs: list[Run], column: int, n: int) -> list[Run]:
    if runs and runs[-1][0] == column:
        return [*runs[:-1], (column, runs[-1][1] + n)]
    return [*runs, (column, n)]
