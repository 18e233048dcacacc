"""`PagedKVCache`: many sequences, all layers, one pool of blocks.

A *block* holds the K and V of `block_size` tokens in a *layer group*. Layers that attend to everything make one
group; layers with a sliding window make groups of their own, whose blocks are released as the window moves past them.
All groups have as many layers (the greatest common divisor of what there is), so that their blocks have one size and
come from one free list. Layers that are not alike are what docs/mixed_layers.md is about.

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

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from numkv.access import whole
from numkv.blocks.prefix import plain_extra
from numkv.caches.paged.arguments import ids_of_step, numbers_of_new_tokens, prompt_ids
from numkv.caches.paged.buffers import StepBuffers
from numkv.caches.paged.compact import plan_compaction
from numkv.caches.paged.lookup import Contents, PrefixLookup, contents_of
from numkv.caches.paged.prefix_match import (
    block_names,
    find_part,
    last_name,
    register,
    register_blocks,
    with_checkpoint,
)
from numkv.caches.paged.reservation import end_step, kept_tokens, refuse_without_slots, reserve_room
from numkv.caches.paged.step import Step
from numkv.caches.paged.store import Extra, SequenceState, held
from numkv.caches.paged.swap import SwappedSequence, check_swapped, copy_in
from numkv.caches.paged.tiers import longest_found
from numkv.caches.paged.trees import Tree
from numkv.caches.paged.whole import WholeCache
from numkv.checks import check_kept
from numkv.compaction.key_shift import RopeShift
from numkv.drawing.page import drawn
from numkv.errors import NotSupported, NumkvError
from numkv.keywords import explained
from numkv.numbers import check_index
from numkv.targets.streamed import on_stream


@drawn
class PagedKVCache(WholeCache):
    """Keys and values of many sequences in one pool, with shared prefixes, forks and rollback.

    Parameters
    ----------
    num_layers : int
        Layers of the model that attend.
    num_kv_heads : int or sequence of int
        Heads of K and V, or those of each layer; None for a layer that has no rows.
    head_dim : int or sequence of int
        Elements of a K row, or those of each layer's.
    num_blocks : int, optional
        Blocks in the pool; a block serves `layers_per_block` layers. Either this or `max_nbytes`.
    block_size : int
        Tokens in a block.
    kind : str, Kind or sequence of them
        Storage kind, or each layer's.
    target : {"cpu", "cuda"}
        Where the buffers are and the kernels run.
    head_dim_v : int or sequence of int, optional
        Elements of a V row; `head_dim` if None.
    k_kind : str, Kind or sequence of them, optional
        Storage kind of K, where it differs from `kind`.
    v_kind : str, Kind or sequence of them, optional
        Storage kind of V, where it differs; ``"latent"`` as of `numkv.ContiguousLayer`, if layers have rows alike.
    windows : sequence of int, optional
        `window_left` of each layer: earlier tokens that a query attends to, -1 for all.
    rotate : bool
        Whether a Hadamard rotation is applied to rows before they are stored; see `numkv.ContiguousLayer`.
    store : PrefixStore, optional
        Where `add` looks for blocks that the pool has not, and where `commit` has full ones written; see `numkv.store`.
    chunks : sequence of int, optional
        Tokens of a chunk of each layer, within which queries attend; None or 0 for none.
    shares : mapping of int to int, or sequence of int, optional
        The layer whose rows a layer reads, having none of its own; None in a sequence for layers that have.
    states : mapping of int to sequence of (shape, dtype), optional
        Arrays that a layer keeps for each sequence, beside rows or instead of them; see `Step.state`.
    num_states : int, optional
        Slots for the states of a sequence: two for each that steps take at once, and one for each checkpoint to keep.
    checkpoint_every : int, optional
        Tokens from one checkpoint of states to the next; a multiple of `block_size`, which it is if None.
    max_nbytes : int, optional
        Bytes of all blocks and states, instead of `num_blocks`.
    key_bounds : bool, optional
        Whether bounds of keys are kept beside the blocks, for `Step.sparse_attention`.
    residual_window : int, optional
        Newest tokens that a query sees, its own included, which are read in full precision: see docs/accuracy.md.
    num_sink_tokens : int, optional
        First tokens of each sequence that are read in full precision, too; not in layers with windows.
    residual_kind : str or Kind, optional
        What tokens in full precision are stored in: ``"fp32"``, which it is if None, ``"bf16"`` or ``"fp16"``.

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

    @on_stream
    @whole
    def add(
        self, tokens: Any = None, *, extra: Extra | None = None, lookup: PrefixLookup | None = None, stream: Any = None
    ) -> int:  # fmt: skip
        """Add a sequence; with its token ids, begin with what the prefix cache has of them.

        At least the last token is left to compute, as its logits are needed to go on. Full blocks are shared. Where
        the common prefix ends inside a block, that block is copied, if there are free ones for it.

        Parameters
        ----------
        tokens : array-like of int, optional
            Ids of the prompt, which are looked up. `reserve` and `commit` the rest of them.
        extra : mapping, optional
            What else the content depends on, such as ``{"adapter": 7}``; see `numkv.blocks.prefix.block_digests`.
        lookup : PrefixLookup, optional
            From `lookup`: what it has brought so far is taken over, and the store is not asked.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Returns
        -------
        int
            The sequence. `cached_len` is the number of tokens that it has already.

        Raises
        ------
        UnsupportedDType, DimensionMismatch, ValueError, TypeError
            If `tokens` are no row of token ids, `extra` are no extra keys, or `lookup` is something else.
        """
        ids = prompt_ids(tokens)
        extra = plain_extra(extra)  # no reference to the caller's object is kept
        size = self.block_size
        full = ids[: max(0, len(ids) - 1) // size * size]
        names = block_names(self._store, full, extra)
        contents = contents_of(lookup)
        with longest_found(self._store, full, names, extra, contents) as match:
            blocks, length = match.blocks, match.blocks * size
            digests = [of_group[:blocks] for of_group in names]
            state = SequenceState(
                length, match.tables, extra, ids[:length].copy(), digests, blocks, [0] * self.num_groups,
                cached=length, prompt=ids,
            )  # fmt: skip
            before = last_name(self._store, digests, extra)
            if self._store.watch is not None:  # no later report would reach a row that is copied
                self._store.collect(wait=True)
                self._spread_bad()
            others = (x for seq, x in self._sequences.items() if seq not in self._store.bad)
            part = None
            if self._store.states is None:  # between checkpoints there are none to begin with
                part = find_part(self._store, ids[length : len(ids) - 1], before, others)
            elif blocks:
                state = with_checkpoint(self._store.states, state, size)
            if part is None:
                return self._insert(state, shared=state.by_depth())
            return self._insert_with_part(state, part, ids)

    @explained
    def lookup(self, tokens: Any, *, extra: Extra | None = None) -> PrefixLookup:
        """Begin to look for a prompt's prefix in the store; returns at once, and `add` takes over what was found.

        Nothing of the cache is changed, and nobody waits: steps of other sequences, and all other calls, go on
        meanwhile. What is found lies in the store's host tier, within its `host_nbytes`, until the lookup is closed or
        gone.

        Parameters
        ----------
        tokens : array-like of int
            Ids of the prompt.
        extra : mapping, optional
            See `add`.

        Returns
        -------
        PrefixLookup
            Is `ready` when all has been brought; ``lookup.future.result(timeout)`` waits, and gives the number of
            tokens.

        Raises
        ------
        NotSupported
            If the cache has no store.
        UnsupportedDType, DimensionMismatch, ValueError, TypeError
            See `add`.
        """
        tiers, size = self._store.tiers, self.block_size
        if tiers is None:
            raise NotSupported(
                "lookup: expected a cache with a store, got one without; make it with store=PrefixStore(…), or call "
                "`add`"
            )
        ids, extra = prompt_ids(tokens), plain_extra(extra)
        full = ids[: max(0, len(ids) - 1) // size * size]
        names = block_names(self._store, full, extra)
        return PrefixLookup(Contents(tiers.engine), functools.partial(tiers.look_up, full, names))

    @whole
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
        state = self._idle(seq)._replace(cached=0, pins=(), prompt=None)
        made = self._insert(state, shared=state.blocks())
        self._store.bad.fork(self._number(seq), made, state.length, self._store.calls)
        return made

    @whole
    def remove(self, seq: int) -> None:
        """Remove a sequence; blocks whose token ids are known can still be found until they are evicted.

        Parameters
        ----------
        seq : int
            The sequence.
        """
        state = self._idle(seq)
        number, slots = self._number(seq), state.slots()
        self._spread_bad()
        self._exchange({number: None}, state.by_depth())
        self._release_slots(slots)
        self._store.bad.remove(number)

    @whole
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
            If a sliding layer's window has moved past tokens that would be visible again, or layers keep states and
            there is no checkpoint of them at this length: the error says where the nearest ones are. Checkpoints are
            at multiples of `checkpoint_every` at which a step has ended, until they are evicted.
        """
        state = self._idle(seq)
        length = check_index("length", length, state.length, inclusive=True)
        starts = [min(start, length) for start in state.starts]
        for number, group in enumerate(self._groups):
            stored = self._store.first_stored(state, number)
            if length and group.first_visible(length) < stored and not group.beside:
                raise NotSupported(
                    f"`length`: expected one that the sliding window of {group.window} tokens still covers, "
                    f"got {length} of {state.length}; its blocks are gone"
                )
            if group.beside:  # what is not there in full is read as codes from now on
                starts[number] = min(stored, length)
        slots, slot, marks = self._store.states, state.slot, state.marks
        if slots is not None and length < state.length:
            slot = slots.restore(marks, length, state.length) if length else -1
            marks = tuple(mark for mark in marks if mark[0] <= length)
        full = length // self.block_size
        tables, dropped = self._store.cut_tables(state.tables, length)
        after = state._replace(
            length=length,
            tables=tables,
            cached=min(state.cached, length),
            tokens=state.tokens[:length],
            digests=[names[:full] for names in state.digests],
            registered=min(state.registered, full),
            starts=starts,
            dropped=state.rows_dropped() if length < state.length else state.dropped,
            slot=slot,
            marks=marks,
            prompt=None,
        )
        before, taken, released = state.slots(), after.slots(), held(dropped)
        self._spread_bad()
        if slots is not None:
            slots.books.acquire(taken)
        try:
            self._exchange({self._number(seq): after}, released)
        except BaseException:
            self._release_slots(taken)
            raise
        self._release_slots(before)
        if length < state.length:
            self._store.bad.keep(self._number(seq), length, self._store.calls)

    @on_stream
    @whole
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
            If layers keep states, or have a sliding window and no longer store the rows of the newest
            ``window_left + 1`` tokens of those to keep. They always store those of the sequence's newest ones.
        IndexError
            If there is no such sequence or token, or the shift's tables are too short.
        ValueError
            If indices do not rise.
        DimensionMismatch, UnsupportedDType, TypeError
            If `keep` is no row of integers, or the shift rotates more elements than a key has or is no such object.

        Notes
        -----
        Nothing has changed after an error. Windows are counted in kept tokens. `Step.positions` go on from the new
        length, which is right for shifted keys; without a shift, write ready rows with `Step.append`.
        """
        state = self._idle(seq)
        if self._store.states is not None:
            raise NotSupported(
                "compact: expected layers without states, as states are of all tokens, got some that keep them"
            )
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
        except BaseException:  # a device that fails: nobody can tell which rows are where
            self._exchange({number: None}, np.append(state.blocks(), plan.taken))
            raise
        self._exchange({number: plan.state}, plan.released)
        self._store.bad.keep(number, kept[None], self._store.calls)

    # -- steps

    @whole
    def reserve(
        self,
        sequences: Iterable[int],
        new_lens: Any,
        *,
        into: StepBuffers | None = None,
        parents: Any = None,
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
        parents : array-like of int (num_tokens,), optional
            For drafts that branch: see `numkv.tree_mask`. `commit` then takes `paths`. Not with `into`.
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
            return self._reserve(sequences, new_lens, into, parents)

    def _on(self, stream: Any, into: StepBuffers | None) -> Any:
        """A context for what a step begins with, which no graph can repeat."""
        if into is not None and not isinstance(into, StepBuffers):
            raise TypeError(f"`into`: expected StepBuffers, got {type(into).__name__}")
        after = None if into is None else into._place
        if stream is None and after is not None:
            stream = after.handle
        return self._target.on(stream, self._pools[0].k, after=after)

    def _reserve(
        self, sequences: Iterable[int], new_lens: Any, into: StepBuffers | None, parents: Any
    ) -> Step:
        self._target.refuse_capture("reserve")
        seqs = self._numbers(sequences, len(self))
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"`sequences`: expected each sequence once, got {seqs[:8]}")
        self._spread_bad()
        states = {seq: self._idle(seq) for seq in seqs}
        for seq, state in states.items():
            self._store.bad.refuse(seq, state.length)
        lens = numbers_of_new_tokens(new_lens, len(seqs))
        tree = None if parents is None else Tree(parents, lens, into)
        if tree is not None and self._store.states is not None:
            raise NotSupported(
                "`parents`: expected None where layers keep states, which follow one path, got a tree"
            )
        if into is not None:
            if self._store.states is not None:
                raise NotSupported(
                    "`into`: expected None where layers keep states, got StepBuffers"
                )
            ends = np.array([state.length for state in states.values()], np.int64) + lens
            into._check(self._store, ends, int(lens.sum()))
        room = reserve_room(self._store, states, lens, into, tree)
        try:
            self._exchange(room.states, room.released)
        except BaseException:
            self.blocks._undo_allocation(room.taken, room.peak)
            if room.slots is not None:
                self._release_slots(room.slots)
            raise
        self._open_steps[room.step] = None
        if into is not None:
            into._take(room.step, np.cumsum(lens))
        return room.step

    @whole
    def commit(
        self, step: Step, accepted: Any = None, *, token_ids: Any = None, paths: Any = None
    ) -> None:
        """End a step: its tokens, or the first of them, become part of their sequences.

        Parameters
        ----------
        step : Step
            The step.
        accepted : int array (num_seqs,), optional
            How many of its tokens each sequence keeps; all if None. The others are rolled back.
        token_ids : array-like of int (num_tokens,), optional
            Ids of the step's tokens, accepted or not. Other sequences can then find full blocks of them.
        paths : sequence of sequence of int (num_seqs,), optional
            Of a step of trees, which of its tokens each sequence keeps, by their numbers in `parents`: from a token
            without parent on, each the parent of the next; or none. Their rows become neighbours.

        Raises
        ------
        NumkvError
            If the step has ended already, or tokens are accepted and a layer has no rows of them.
        IndexError
            If more tokens are accepted than there are, or a path is none.
        DimensionMismatch, ValueError
            If the number of ids is not that of the step's tokens, or they begin with what `add` has found already.
        NotSupported
            If layers keep states, and a sequence keeps some of its tokens, but not all.
        """
        self._check_step(step)
        step._alone(lambda: self._end(step, accepted, token_ids, paths))

    def _end(self, step: Step, accepted: Any, given_ids: Any, paths: Any = None) -> None:
        """End a step that nobody else uses."""
        self._check_open(step)
        keep, order = kept_tokens(step, accepted, paths)
        ids = None if given_ids is None else ids_of_step(given_ids, step, self._sequences)
        missing = step.unwritten_layers
        if missing and keep.any():
            raise NumkvError(
                f"`step`: expected rows of the new tokens in all {self.num_layers} layers, got none in layer "
                f"{missing[0]}{' and others' if len(missing) > 1 else ''}; append them, or roll the step back"
            )
        if self._store.states is not None and ((keep > 0) & (keep < step.new_lens)).any():
            raise NotSupported(
                f"`accepted`: expected all tokens of a sequence or none, as layers keep states of the last one only, "
                f"got {keep.tolist()} of {step.new_lens.tolist()}; roll the step back, and run those to keep again"
            )
        states = {seq: self._sequences[seq] for seq in step.sequences}
        if keep.any():
            self._spread_bad()
            looked_at = keep if order is None else step.new_lens
            for (seq, state), n in zip(states.items(), looked_at.tolist(), strict=True):
                self._store.bad.refuse(seq, state.length + n)
        ids = ids if ids is None or order is None else ids[order]
        ending = end_step(self._store, states, step, keep, ids)
        if order is not None and step._tree is not None:
            step._tree.move(self._store, order, step._written)
        slots = self._store.states
        if slots is not None:
            slots.register(ending.checkpoints)
        try:
            register(self._store, ending.names, ending.checkpoints)
        except BaseException:
            if slots is not None:
                slots.forget(ending.checkpoints)
            step._written &= order is None  # rows of a tree have moved
            raise
        step._end(keep)
        try:
            self._exchange(ending.states, ending.released)
        except BaseException:
            step._kept.clear()
            step._written &= order is None
            step.open = any(self._sequences[seq].reserved is not None for seq in step.sequences)
            raise
        self._open_steps.pop(step, None)
        self._release_slots(ending.slots)

    @whole
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

    # -- from the host

    @on_stream
    @whole
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
        check_swapped(self._store, swapped)
        if swapped.states and self._store.states is not None:
            refuse_without_slots(self._store.states, 1)
        peak = self.blocks._peak()
        ids = self.blocks.allocate(sum(len(logical) for logical in swapped.logical))
        try:
            state = register_blocks(self._store, copy_in(self._store, swapped, ids))
            seq = self._insert_with_states(state, swapped.states)
        except BaseException:  # a device without room, say
            self.blocks._undo_allocation(ids, peak)
            raise
        return seq
