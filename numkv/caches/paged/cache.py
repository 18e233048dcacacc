"""`PagedKVCache`: many sequences, all layers, one pool of blocks.

A *block* holds the K and V of `block_size` tokens in a *layer group*. Layers that attend to everything make one
group; layers with a sliding window make groups of their own, whose blocks are released as the window moves past them.
All groups have as many layers (the greatest common divisor of what there is), so that their blocks have one size and
come from one free list.

Work goes in steps, because all layers write the same tokens::

    step = cache.reserve(sequences, new_lens)      # allocates blocks for all of them, or raises CacheFull
    for layer in range(cache.num_layers):
        q = step.write(layer, qkv, ...)            # or step.append(layer, k, v)
        out = step.attention(layer, q)
    cache.commit(step, token_ids=...)              # or cache.rollback(step)

This module is the life of sequences. What is stored is in `stored`, attention to it in `reading`; a step in `step`, how
it begins and ends in `reservation`; prefixes, compaction and the way to host memory in `prefix_match`, `compact` and
`swap`; what concerns the cache as a whole in `whole`. They share `store`.

Every change makes what is new first, beside what there is, and then puts it in place by assignments that cannot fail.
So an error leaves everything as it was, and who reads beside a writer sees sequences as they were before or are after.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.access import writes
from numkv.blocks.prefix import plain_extra
from numkv.caches.bound import BoundAttention
from numkv.caches.paged.arguments import ids_of_step, numbers_of_new_tokens, prompt_ids
from numkv.caches.paged.bound import bind_paged
from numkv.caches.paged.buffers import StepBuffers
from numkv.caches.paged.compact import plan_compaction
from numkv.caches.paged.prefix_match import block_names, register, register_blocks
from numkv.caches.paged.reservation import end_step, reserve_room
from numkv.caches.paged.step import Step
from numkv.caches.paged.store import Extra, SequenceState, held
from numkv.caches.paged.stored import PagedStats
from numkv.caches.paged.swap import SwappedSequence, check_swapped, copy_in
from numkv.caches.paged.tiers import longest_found
from numkv.caches.paged.whole import WholeCache
from numkv.checks import check_index, check_integers, check_kept, host_array
from numkv.compaction.key_shift import RopeShift
from numkv.errors import NotSupported, NumkvError
from numkv.kinds import Kind
from numkv.targets.streamed import on_stream

__all__ = ["PagedKVCache", "PagedStats", "Step", "StepBuffers", "SwappedSequence"]


class PagedKVCache(WholeCache):
    """Keys and values of many sequences in one pool, with shared prefixes, forks and rollback.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        The model's.
    num_blocks : int
        Blocks in the pool; a block serves `layers_per_block` layers.
    block_size : int
        Tokens in a block.
    kind : str or Kind
        Storage kind.
    target : {"cpu", "cuda"}
        Where the buffers are and the kernels run.
    head_dim_v : int, optional
        Elements of a V row.
    k_kind, v_kind : str or Kind, optional
        Storage kinds of K and of V where they differ from `kind`; ``v_kind="latent"`` as of `numkv.ContiguousLayer`.
    windows : sequence of int, optional
        `window_left` of each layer: earlier tokens that a query attends to, -1 for all.
    rotate : bool
        Whether a Hadamard rotation is applied to rows before they are stored; see `numkv.ContiguousLayer`.
    store : PrefixStore, optional
        Where `add` looks for blocks that the pool has not, and where `commit` has full ones written; see `numkv.store`.

    Attributes
    ----------
    blocks : BlockPool
        The bookkeeping of blocks.

    Notes
    -----
    Threads: one at a time changes the cache (`add`, `reserve`, `commit`, `remove` …); a second one gets `NumkvError`,
    and nothing has changed. Open steps may be written and attended to by a thread each, one thread at a time in a step.
    Beside all that, any number of threads read committed tokens and see whole ones. A reader whose own sequence was
    truncated, compacted or removed meanwhile, or whose window moved on, gets `NumkvError`; those of other sequences
    notice nothing. `check` gets it too where somebody is changing the cache.

    Your own kernels get the memory by `arrays`, in ``@njit`` as in ``@cuda.jit``, which is why there is no `jit` view.

    `copy`, `copy.copy` and `copy.deepcopy` are the same; a cache of the CPU can be pickled. None of them takes open
    steps, nor `on_event` of `blocks`; a copy uses the same store, what comes out of a pickle none.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> cache = numkv.PagedKVCache(2, 2, 8, num_blocks=64)
    >>> a, b = cache.add(), cache.add()
    >>> step = cache.reserve([a, b], [5, 3])
    >>> for layer in range(2):
    ...     step.append(layer, np.ones((8, 2, 8), np.float32), np.ones((8, 2, 8), np.float32))
    >>> cache.commit(step)
    >>> cache.length(a), cache.length(b)
    (5, 3)
    """

    # -- sequences

    @writes
    def add(self, tokens: Any = None, *, extra: Extra | None = None) -> int:
        """Add a sequence; with its token ids, begin with what the prefix cache has of them.

        At least the last token is left to compute, as its logits are needed to go on.

        Parameters
        ----------
        tokens : array-like of int, optional
            Ids of the prompt, which are looked up. `reserve` and `commit` the rest of them.
        extra : mapping, optional
            What else the content depends on, such as ``{"adapter": 7}``; see `numkv.blocks.prefix.block_digests`.

        Returns
        -------
        int
            The sequence. `cached_len` is the number of tokens that it has already.

        Raises
        ------
        UnsupportedDType, DimensionMismatch, ValueError, TypeError
            If `tokens` are no row of token ids, or `extra` are no extra keys.
        """
        ids = prompt_ids(tokens)
        extra = plain_extra(extra)  # no reference to the caller's object is kept
        size = self.block_size
        full = ids[: max(0, len(ids) - 1) // size * size]
        names = block_names(self._store, full, extra)
        with longest_found(self._store, full, names) as match:
            blocks, length = match.blocks, match.blocks * size
            state = SequenceState(
                length, match.tables, extra, ids[:length].copy(), [of_group[:blocks] for of_group in names],
                blocks, [0] * self.num_groups, cached=length,
            )  # fmt: skip
            return self._insert(state, shared=state.blocks())

    def _insert(self, state: SequenceState, shared: NDArray[np.int32]) -> int:
        """Give a sequence its number, and references to blocks that others have or have had."""
        seq = self._next
        self.blocks.acquire(shared)
        try:
            self._publish({seq: state})
        except BaseException:
            self.blocks.release(shared)
            raise
        self._next = seq + 1
        return seq

    @writes
    def fork(self, seq: int) -> int:
        """Make a second sequence with the same tokens; blocks are shared until one of the two writes to them.

        Parameters
        ----------
        seq : int
            The sequence to fork.

        Returns
        -------
        int
            The new sequence.
        """
        state = self._idle(seq)._replace(cached=0, pins=())
        return self._insert(state, shared=state.blocks())

    @writes
    def remove(self, seq: int) -> None:
        """Remove a sequence; blocks whose token ids are known can still be found until they are evicted.

        Parameters
        ----------
        seq : int
            The sequence.
        """
        state = self._idle(seq)
        number = self._number(seq)
        self._exchange({number: None}, state.blocks())
        self._store.bad.pop(number, None)

    @writes
    def truncate(self, seq: int, length: int) -> None:
        """Drop a sequence's tokens from position `length` on.

        Parameters
        ----------
        seq : int
            The sequence.
        length : int
            New length, at most the present one.

        Raises
        ------
        IndexError
            If `length` is negative or above the sequence's.
        NotSupported
            If a sliding layer's window has moved past tokens that would be visible again.
        """
        state = self._idle(seq)
        length = check_index("length", length, state.length, inclusive=True)
        for number, group in enumerate(self._groups):
            stored = self._store.first_stored(state, number)
            if length and group.first_visible(length) < stored:
                raise NotSupported(
                    f"`length`: expected one that the sliding window of {group.window} tokens still covers, "
                    f"got {length} of {state.length}; its blocks are gone"
                )
        full = length // self.block_size
        tables, dropped = self._store.cut_tables(state.tables, length)
        after = state._replace(
            length=length,
            tables=tables,
            cached=min(state.cached, length),
            tokens=state.tokens[:length],
            digests=[names[:full] for names in state.digests],
            registered=min(state.registered, full),
            starts=[min(start, length) for start in state.starts],
            dropped=state.rows_dropped() if length < state.length else state.dropped,
        )
        self._exchange({self._number(seq): after}, held(dropped))
        if self._store.bad and length <= self._store.bad.get(self._number(seq), (-1,))[0]:
            del self._store.bad[self._number(seq)]

    @on_stream
    @writes
    def compact(
        self, seq: int, keep: Any, shift: RopeShift | None = None, *, stream: Any = None
    ) -> None:
        """Keep some tokens of a sequence only, and move them to the front: token ``keep[i]`` becomes token i.

        Rows move as they are stored, bit for bit. With `shift`, the keys of tokens that move are shifted to their new
        positions; quantised ones are quantised once more. Blocks that are not needed any more are released.

        Shared and pinned blocks stay as they are: the sequence gets copies of those whose tokens move. From the first
        changed block on, nothing of the sequence can be found as a prefix any more, as the rows are not what the model
        computes from these tokens alone; the blocks before stay in the prefix cache. Blocks that only this sequence
        uses and that are in the prefix cache stay there too, as far as there are free blocks for copies.

        Parameters
        ----------
        seq : int
            The sequence.
        keep : array-like of int (n,)
            Tokens to keep, in order, on the host; `numkv.compaction.eviction` chooses them.
        shift : RopeShift, optional
            From `numkv.rope_shift` and the model's tables. Without it keys stay as they are: for models without RoPE,
            and for methods that go on counting positions from those that tokens had.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Raises
        ------
        CacheFull
            If there are too few free blocks for the copies.
        NumkvError
            If the sequence has an open step.
        NotSupported
            If layers have a sliding window and no longer store the rows of the newest ``window_left + 1`` tokens of
            those to keep. They always store those of the newest ``window_left + 1`` tokens of the sequence.
        IndexError
            If there is no such sequence or token, or the shift's tables are too short.
        ValueError
            If indices do not rise.
        DimensionMismatch, UnsupportedDType, TypeError
            If `keep` is no row of integers, or the shift rotates more elements than a key has or is no such object.

        Notes
        -----
        Nothing has changed after an error; after a keyboard interrupt that comes while rows move, the sequence is
        removed. Windows are counted in kept tokens. `Step.positions` go on from the new
        length, which is right for shifted keys; without a shift, write ready rows with `Step.append`.
        """
        state = self._idle(seq)
        kept = check_kept("keep", keep, state.length)
        number = self._number(seq)
        plan = plan_compaction(self._store, state, kept, shift)
        try:
            self._publish({number: state._replace(dropped=state.dropped | 1)})
            self.blocks.forget(plan.forgotten)
        except BaseException:
            self._publish({number: state._replace(dropped=state.rows_dropped())})
            self.blocks.release(plan.taken)
            raise
        try:
            for move in plan.moves:
                move()
        except BaseException:  # an interrupt: nobody can tell which rows are where
            self._exchange({number: None}, np.append(state.blocks(), plan.taken))
            raise
        self._exchange({number: plan.state}, plan.released)

    @writes
    def pin(self, seq: int) -> NDArray[np.int32]:
        """Keep those blocks of a sequence that are in the prefix cache now from eviction, also after it is removed.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        int32 array (n,)
            The blocks. Once the sequence is removed, ``cache.blocks.unpin`` takes them.
        """
        state = self._sequence(seq)
        ids = state.blocks()
        ids = ids[self.blocks.is_cached(ids)]
        pinned: NDArray[np.int32] = ids.copy()  # the caller's own
        after = state._replace(pins=(*state.pins, ids))
        self.blocks.pin(ids)
        try:
            self._publish({self._number(seq): after})
        except BaseException:
            self.blocks.unpin(ids)
            raise
        return pinned

    @writes
    def unpin(self, seq: int) -> None:
        """Undo the last `pin` of a sequence, whatever has become of the sequence since.

        Parameters
        ----------
        seq : int
            The sequence.

        Raises
        ------
        NumkvError
            If it is not pinned.
        """
        state = self._sequence(seq)
        if not state.pins:
            raise NumkvError(f"`seq`: expected a pinned sequence, got {seq}; pin it first")
        after = state._replace(pins=state.pins[:-1])
        self.blocks.unpin(state.pins[-1])
        self._publish({self._number(seq): after})

    # -- steps

    @writes
    def reserve(
        self,
        sequences: Iterable[int],
        new_lens: Any,
        *,
        into: StepBuffers | None = None,
        stream: Any = None,
    ) -> Step:
        """Allocate room for new tokens of some sequences, all or nothing.

        Parameters
        ----------
        sequences : iterable of int
            The sequences, each once.
        new_lens : int or int array (num_seqs,)
            How many tokens each of them gets.
        into : StepBuffers, optional
            From `step_buffers`: where the step's tables lie, for a CUDA graph that has captured such a step's calls.
        stream : object, optional
            On CUDA the stream that the tables are uploaded on: with `into` the one that the graph runs on, and without
            it the one that `into` was last filled on. See `numkv.paged_decode_attention`.

        Returns
        -------
        Step
            Writes and attends; `commit` or `rollback` ends it.

        Raises
        ------
        CacheFull
            If there are not enough blocks; nothing is allocated.
        IndexError
            If there is no such sequence, or a number is negative.
        NumkvError
            If a sequence has an open step, or `into` has.
        DimensionMismatch
            If the step does not fit `into`.
        """
        with self._on(stream, into):
            return self._reserve(sequences, new_lens, into)

    def _on(self, stream: Any, into: StepBuffers | None) -> Any:
        """A context for what a step begins with, which no graph can repeat."""
        if into is not None and not isinstance(into, StepBuffers):
            raise TypeError(f"`into`: expected StepBuffers, got {type(into).__name__}")
        after = None if into is None else into._place
        if stream is None and after is not None:
            stream = after.handle
        return self._target.on(stream, self._pools[0].k, after=after)

    def _reserve(self, sequences: Iterable[int], new_lens: Any, into: StepBuffers | None) -> Step:
        self._target.refuse_capture("reserve")
        seqs = self._numbers(sequences, len(self))
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"`sequences`: expected each sequence once, got {seqs[:8]}")
        self._store.target.collect_late(self._store.watch)
        states = {seq: self._idle(seq) for seq in seqs}
        for seq, state in states.items():
            self._store.refuse_bad(seq, state.length)
        lens = numbers_of_new_tokens(new_lens, len(seqs))
        if into is not None:
            ends = np.array([state.length for state in states.values()], np.int64) + lens
            into._check(self._store, ends, int(lens.sum()))
        room = reserve_room(self._store, states, lens, into)
        try:
            self._exchange(room.states, room.released)
        except BaseException:
            self.blocks.release(room.taken)
            raise
        if into is not None:
            into._take(room.step, np.cumsum(lens))
        return room.step

    @writes
    def commit(self, step: Step, accepted: Any = None, *, token_ids: Any = None) -> None:
        """End a step: its tokens, or the first of them, become part of their sequences.

        Parameters
        ----------
        step : Step
            The step.
        accepted : int array (num_seqs,), optional
            How many of its tokens each sequence keeps; all if None. The others are rolled back.
        token_ids : array-like of int (num_tokens,), optional
            Ids of the step's tokens, accepted or not. Other sequences can then find full blocks of them.

        Raises
        ------
        NumkvError
            If the step has ended already, or tokens are accepted and a layer has no rows of them.
        IndexError
            If more tokens are accepted than there are.
        DimensionMismatch
            If the number of ids is not that of the step's tokens.
        """
        self._check_step(step)
        step._alone(lambda: self._end(step, accepted, token_ids))

    def _end(self, step: Step, accepted: Any, given_ids: Any) -> None:
        """End a step that nobody else uses."""
        self._check_open(step)
        keep = step.new_lens
        if accepted is not None:
            shape = (len(step.sequences),)
            given = host_array("accepted", accepted)
            keep = check_integers(targets.get("cpu"), "accepted", given, shape).astype(np.int64)
        if ((keep < 0) | (keep > step.new_lens)).any():
            raise IndexError(
                f"`accepted`: expected numbers up to {step.new_lens.tolist()}, got {keep.tolist()}"
            )
        ids = None if given_ids is None else ids_of_step(given_ids, step.num_tokens)
        missing = step.unwritten_layers
        if missing and keep.any():
            raise NumkvError(
                f"`step`: expected rows of the new tokens in all {self.num_layers} layers, got none in layer "
                f"{missing[0]}{' and others' if len(missing) > 1 else ''}; append them, or roll the step back"
            )
        states = {seq: self._sequences[seq] for seq in step.sequences}
        if keep.any():
            self._store.target.collect_late(self._store.watch)
            for (seq, state), n in zip(states.items(), keep.tolist(), strict=True):
                self._store.refuse_bad(seq, state.length + n)
        ending = end_step(self._store, states, step, keep, ids)
        register(self._store, ending.names)
        step._end(keep)
        try:
            self._exchange(ending.states, ending.released)
        except BaseException:
            step._kept.clear()
            step.open = any(self._sequences[seq].reserved is not None for seq in step.sequences)
            raise

    @writes
    def rollback(self, step: Step) -> None:
        """End a step without keeping any of its tokens.

        Parameters
        ----------
        step : Step
            The step.

        Raises
        ------
        NumkvError
            If the step has ended already.
        """
        self._check_step(step)
        step._alone(lambda: self._end(step, np.zeros(len(step.sequences), np.int64), None))

    def _check_step(self, step: Any) -> None:
        if not isinstance(step, Step) or not step._belongs_to(self._store):
            raise NumkvError(
                "`step`: expected an open step of this cache, got "
                f"{'one of another' if isinstance(step, Step) else type(step).__name__}"
            )

    def _check_open(self, step: Step) -> None:
        if not step.open:
            raise NumkvError("`step`: expected an open step of this cache, got an ended one")

    def bind(
        self,
        num_q_heads: int,
        kind: str | Kind = "fp32",
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = 0.0,
        sinks: Any = None,
        check_finite: bool | None = True,
    ) -> BoundAttention:
        """Bind the cache to a model's arrays and options: append and attention of a layer then are one call.

        Parameters
        ----------
        num_q_heads, kind, sm_scale, logits_soft_cap, sinks, check_finite
            See `numkv.KVCache.bind`; windows are the cache's own.

        Returns
        -------
        BoundAttention
            ``begin(step)`` takes a step that `reserve` made.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, ValueError, TypeError
            If an argument does not fit the cache.
        """
        return bind_paged(
            self._store, num_q_heads, kind, sm_scale, logits_soft_cap, sinks, check_finite
        )

    # -- from the host

    @on_stream
    @writes
    def swap_in(self, swapped: SwappedSequence, *, stream: Any = None) -> int:
        """Copy a swapped sequence into the cache as a new one.

        Parameters
        ----------
        swapped : SwappedSequence
            From `swap_out` of a cache of the same geometry, on any target.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Returns
        -------
        int
            The sequence.

        Raises
        ------
        DimensionMismatch
            If it comes from a cache of another geometry, kind or rotation.
        NumkvError
            If it contradicts itself, as a damaged one may.
        CacheFull
            If there are not enough blocks.

        Notes
        -----
        Nothing is allocated after an error.
        """
        if not isinstance(swapped, SwappedSequence):
            raise TypeError(
                f"`swapped`: expected a SwappedSequence, got {type(swapped).__name__}; pass what `swap_out` returned"
            )
        check_swapped(self._store, swapped)
        ids = self.blocks.allocate(sum(len(logical) for logical in swapped.logical))
        try:
            state = register_blocks(self._store, copy_in(self._store, swapped, ids))
            seq = self._insert(state, shared=ids[:0])
        except BaseException:  # a device without room, say
            self.blocks.release(ids)
            raise
        return seq
