"""`PagedKVCache`: many sequences, all layers, one pool of blocks.

A *block* stores the K and V of `block_size` tokens in a *layer group*. Layers that attend to all tokens make one group.
Layers with a sliding window make groups of their own, whose blocks are released as the window moves past them. All
groups have equally many layers: the greatest common divisor of the numbers of layers by window. So their blocks have
one size and come from one free list. docs/mixed_memory.md describes the memory of layers that differ.

Work goes in steps, because all layers write the same tokens::

    step = cache.reserve(sequences, new_lens)      # allocates blocks for all of them, or raises CacheFull
    for layer in range(cache.num_layers):
        q = step.write(layer, qkv, ...)            # or step.append(layer, k, v)
        out = step.attention(layer, q)
    cache.commit(step, token_ids=...)              # or cache.rollback(step)

This module has the operations on sequences, attention to committed tokens and operations on the whole cache. `stored`
describes the contents. A step is in `step`, its beginning and end in `reservation`. Prefixes, compaction and swapping
to host memory are in `prefix_match`, `compact` and `swap`. They share `store`.

Every change first builds new objects, and then puts them in place by assignments that cannot fail. So an error changes
nothing, and concurrent readers see a sequence before or after a write, never in between.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from numkv.access import alone, whole, writes
from numkv.arrays import CacheArrays, owned
from numkv.attention.attend import attend, check_queries, too_many_queries
from numkv.attention.mass import attention_mass, mass_of_parts
from numkv.attention.options import OF_A_LAYER, SCORES, AttentionOptions, check_options
from numkv.blocks.pool import restore, taken_for_now
from numkv.blocks.prefix import plain_extra
from numkv.caches.bound import (
    BoundAttention,
    Rows,
    ToBind,
    is_number,
    of_each,
    options_of_layers,
)
from numkv.caches.paged.arguments import (
    check_count,
    ids_of_step,
    numbers_of_new_tokens,
    prompt_ids,
    sequence_number,
    sequence_numbers,
)
from numkv.caches.paged.buffers import StepBuffers, tables_of
from numkv.caches.paged.column import Column
from numkv.caches.paged.compact import (
    kept_rows,
    move_codes,
    plan_compaction,
    whole_groups_before,
)
from numkv.caches.paged.lookup import Contents, PrefixLookup, contents_of
from numkv.caches.paged.memory import state_of, store_of
from numkv.caches.paged.prefix_match import (
    PartOfBlock,
    block_names,
    find_part,
    last_name,
    register,
    register_blocks,
    with_checkpoint,
)
from numkv.caches.paged.reservation import end_step, kept_tokens, refuse_without_slots, reserve_room
from numkv.caches.paged.residual_attention import attend_to_newest, parts_of_queries
from numkv.caches.paged.saved import (
    SavedPagedCache,
    cache_snapshot,
    own_blocks,
    put_states,
    store_tensors,
)
from numkv.caches.paged.step import Step, StepMetadata, begin_bound
from numkv.caches.paged.store import Extra, Ints, SequenceState, blocks_in
from numkv.caches.paged.stored import StoredSequences
from numkv.caches.paged.swap import SwappedSequence, check_swapped, copy_in, copy_out
from numkv.caches.paged.tiers import longest_found
from numkv.caches.paged.trees import Tree
from numkv.checks import check_kept
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import check_shift, slots_of
from numkv.drawing.page import drawn
from numkv.errors import NotSupported, NumkvError
from numkv.keywords import explained
from numkv.kinds import Kind
from numkv.numbers import check_index
from numkv.snapshots.fields import claims, expect
from numkv.snapshots.snapshot import Options, Snapshot, Source, fill_all
from numkv.storage.key_error import key_error
from numkv.storage.own_kernels import cache_arrays
from numkv.targets.base import Array
from numkv.targets.streamed import streamed


@drawn
class PagedKVCache(StoredSequences):
    """Keys and values of many sequences in one pool, with shared prefixes, forks and rollback.

    Parameters
    ----------
    num_layers : int, optional
        Number of layers, if all have the same shape and storage.
    num_kv_heads : int, optional
        Heads of K and V in each.
    head_dim : int, optional
        Elements of a row.
    layers : iterable of LayerSpec, optional
        Descriptions of all layers, in place of these three, `kind` and `rotate`. They set windows, chunks, different
        kinds of K and V, shared rows, states, tokens in full precision and bounds of keys for each layer.
    num_blocks : int, optional
        Blocks in the pool; a block serves `layers_per_block` layers. Either this or `max_nbytes`.
    max_nbytes : int, optional
        Bytes of all blocks and states, instead of `num_blocks`.
    block_size : int
        Tokens in a block.
    kind : str or Kind, optional
        Storage kind, ``"fp16"`` if None.
    rotate : bool, optional
        Whether rows are rotated before they are stored; see `numkv.ContiguousLayer`.
    target : {"cpu", "cuda"}
        Where the buffers are and the kernels run.
    store : PrefixStore, optional
        Where `add` searches for blocks that the pool lacks, and to which `commit` writes full ones; see `numkv.store`.
    state_slots : StateSlots, optional
        Room for the states of sequences, for layers with states.

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

    `copy`, `copy.copy` and `copy.deepcopy` are equivalent; a cache on the CPU can be pickled. Neither includes open
    steps, nor `on_event` of `blocks`. A copy uses the same store, an unpickled cache none.

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

    @streamed
    @whole
    def add(
        self, tokens: Any = None, *, extra: Extra | None = None, lookup: PrefixLookup | None = None
    ) -> int:  # fmt: skip
        """Add a sequence; given token ids, reuse the blocks of the prefix cache that match them.

        At least the last token is left to compute, as its logits are needed to go on. Full blocks are shared. Where
        the common prefix ends inside a block, that block is copied, if there are free ones for it.

        Parameters
        ----------
        tokens : array-like of int, optional
            Ids of the prompt, which are looked up. `reserve` and `commit` the rest of them.
        extra : mapping, optional
            Other inputs that the content depends on, such as ``{"adapter": 7}``; see
            `numkv.blocks.prefix.block_digests`.
        lookup : PrefixLookup, optional
            From `lookup`: the blocks read so far are reused, and no request goes to the store.

        Returns
        -------
        int
            The sequence. `cached_len` is the number of tokens that it has already.

        Raises
        ------
        UnsupportedDType, DimensionMismatch, ValueError, TypeError
            If `tokens` are no row of token ids, `extra` are no extra keys, or `lookup` is something else.
        """
        ids, extra, full, names = self._named(tokens, extra)
        size, contents = self.block_size, contents_of(lookup)
        with longest_found(self._store, full, names, extra, contents) as match:
            blocks, length = match.blocks, match.blocks * size
            digests = [of_group[:blocks] for of_group in names]
            starts = [
                length if group.begins_anew and (table[-1:] < 0).any() else 0
                for group, table in zip(self._groups, match.tables, strict=True)
            ]
            state = SequenceState(
                length, match.tables, extra, ids[:length].copy(), digests, blocks, starts,
                cached=length, prompt=ids,
            )  # fmt: skip
            before = last_name(self._store, digests, extra)
            self._spread_bad(wait=True)  # no later report would reach a row that is copied
            bad = self._store.reports.first
            others = (x for seq, x in self._sequences.items() if bad(seq) is None)
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
        """Start a search of the store for a prompt's prefix; returns at once, and `add` reuses what was found.

        The cache is not changed, and no call waits: steps of other sequences, and all other calls, continue meanwhile.
        Found blocks stay in the store's host tier, within its `host_nbytes`, until the lookup is closed or deleted.

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
        tiers = self._store.tiers
        if tiers is None:
            raise NotSupported(
                "lookup: expected a cache with a store, got one without; make it with store=PrefixStore(…), or call "
                "`add`"
            )
        _, _, full, names = self._named(tokens, extra)
        return PrefixLookup(Contents(tiers.engine), functools.partial(tiers.look_up, full, names))

    def _named(
        self, tokens: Any, extra: Extra | None
    ) -> tuple[NDArray[np.int32], Extra | None, NDArray[np.int32], list[NDArray[np.uint8]]]:
        """Check a prompt; return its ids and extra keys, and the full blocks before its last token with their names."""
        ids, extra = prompt_ids(tokens), plain_extra(extra)  # no reference to the caller's is kept
        full = ids[: max(0, len(ids) - 1) // self.block_size * self.block_size]
        return ids, extra, full, block_names(self._store, full, extra)

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
        self._store.reports.fork(sequence_number(seq), made, state.length)
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
        number, slots = sequence_number(seq), state.slots()
        self._spread_bad()
        self._exchange({number: None}, state.by_depth())
        self._release_slots(slots)
        self._store.reports.remove(number)

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
            If a sliding layer's window has moved past tokens that would be visible again, or layers with states have
            no checkpoint at this length. The error lists the nearest ones. Checkpoints are at multiples of
            `checkpoint_every` at which a step has ended, until they are evicted.
        """
        state = self._idle(seq)
        length = check_index("length", length, state.length, inclusive=True)
        after, dropped = self._cut(state, length)
        slots = self._store.states
        before, taken, released = state.slots(), after.slots(), blocks_in(dropped)
        self._spread_bad()
        if slots is not None:
            slots.block_pool.acquire(taken)
        try:
            self._exchange({sequence_number(seq): after}, released)
        except BaseException:
            self._release_slots(taken)
            raise
        self._release_slots(before)
        if length < state.length:
            self._store.reports.keep(sequence_number(seq), length)

    def _cut(
        self, state: SequenceState, length: int
    ) -> tuple[SequenceState, list[NDArray[np.int32]]]:
        """A sequence without its tokens from a position on, and the blocks that it then has no more."""
        starts, known = [min(start, length) for start in state.starts], length
        for number, group in enumerate(self._groups):
            stored = self._store.first_stored(state, number)
            if length and group.first_visible(length) < stored and not group.beside:
                raise NotSupported(
                    f"`length`: expected one that the sliding window of {group.window} tokens still covers, "
                    f"got {length} of {state.length}; its blocks were freed"
                )
            if group.beside:  # what is not there in full is read as codes from now on
                starts[number] = min(stored, length)
            if (
                group.begins_anew
                and (begin := length // group.chunk * group.chunk) < starts[number]
            ):
                # Codes will be made of decoded rows: no name stands for these.
                known = min(known, begin)
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
            tokens=state.tokens[:known],
            digests=[names[:full] for names in state.digests],
            registered=min(state.registered, full),
            starts=starts,
            dropped=state.rows_dropped() if length < state.length else state.dropped,
            slot=slot,
            marks=marks,
            prompt=None,
        )
        return after, dropped

    @streamed
    @whole
    def compact(self, seq: int, keep: Any, shift: RopeShift | None = None) -> None:
        """Keep some tokens of a sequence only, and move them to the front: token ``keep[i]`` becomes token i.

        Rows move as they are stored, bit for bit. With `shift`, the keys of tokens that move are shifted to their new
        positions; quantised ones are quantised once more. Blocks that are no longer needed are released. If keys are
        stored by channel, token groups before the first token that moves stay. Keys of other groups, decoded where they
        are not in full, are quantised once more in their new groups. That needs blocks for new tokens while it runs.

        Shared and pinned blocks stay as they are: the sequence gets copies of those whose tokens move. From the first
        changed block on, the sequence is no longer in the prefix cache, as its rows are not those that the model
        computes from these tokens alone. Earlier blocks stay in the prefix cache. So do cached blocks that only this
        sequence uses, as far as there are free blocks for copies.

        Parameters
        ----------
        seq : int
            The sequence.
        keep : array-like of int (n,)
            Tokens to keep, in order, on the host; `numkv.compaction.eviction` chooses them.
        shift : RopeShift, optional
            From `numkv.rope_shift` and the model's tables. Without it keys stay as they are: for models without RoPE,
            and for methods that go on counting positions from those that tokens had.

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
        check_shift(shift)
        number = sequence_number(seq)
        if any(self._store.layers.groups):
            self._compact_groups(number, state, kept, shift)
            return
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
        self._store.reports.keep(number, kept[None])

    def _compact_groups(
        self, number: int, state: SequenceState, kept: Ints, shift: RopeShift | None
    ) -> None:
        """Compact if keys are stored by channel.

        Groups before the first token that moves stay. Rows of other groups are appended anew to a sequence that
        replaces this one. Rows that are stored one by one are moved bit for bit after that.
        """
        begin = whole_groups_before(self._store, state, kept)
        moved, n = kept[begin:], len(kept)
        rows = {
            layer: kept_rows(self._store, state, layer, moved, shift, np.arange(begin, n) - moved)
            for layer in self._store.layers.storing
            if layer < self.num_layers
        }
        alone = state._replace(cached=min(state.cached, begin), pins=(), prompt=None)
        try:
            after, _ = self._cut(alone, begin)
        except NotSupported:
            raise NotSupported(
                f"`keep`: the first token that moves is in a token group that begins at {begin}, and a layer with a "
                "sliding window has freed rows before it; drop newer tokens, or take kinds that store keys row by row"
            ) from None
        made = self._insert(after, shared=after.blocks())
        try:
            if len(moved):
                step = self._reserve([made], [len(moved)], None, None)
                try:
                    for layer, (k, v) in rows.items():
                        step.append(layer, k, v, check_finite=False)
                        after, turned = self._sequences[made], shift is not None
                        move_codes(self._store, state, after, layer, moved, turned)
                except BaseException:
                    self._end(step, self._metadata_of(step), [0], None)
                    raise
                self._end(step, self._metadata_of(step), None, None)
            after = self._sequences[made]._replace(pins=state.pins, dropped=state.rows_dropped())
            self._exchange({made: None, number: after}, state.by_depth())
        except BaseException:
            self._exchange({made: None}, self._sequences[made].by_depth())
            raise
        self._store.reports.keep(number, kept[None])

    # -- steps

    @whole
    def reserve(
        self,
        sequences: Iterable[int],
        new_lens: Any,
        *,
        into: StepBuffers | None = None,
        parents: Any = None,
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
            They are uploaded on the stream of `numkv.on_stream`, else on the one that `into` was last filled on.
        parents : array-like of int (num_tokens,), optional
            For drafts that branch: see `numkv.tree_mask`. `commit` then takes `paths`. Not with `into`.

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
        after = None if into is None else tables_of(into).place
        with self._target.on(self._pools[0].k, after=after, default=after):
            return self._reserve(sequences, new_lens, into, parents)

    def _reserve(
        self, sequences: Iterable[int], new_lens: Any, into: StepBuffers | None, parents: Any
    ) -> Step:
        self._target.refuse_capture("reserve")  # no graph can replay the beginning of a step
        seqs = sequence_numbers(sequences, len(self), once=True)
        self._spread_bad()
        states = {seq: self._idle(seq) for seq in seqs}
        for seq, state in states.items():
            self._store.reports.refuse(seq, state.length)
        lens = numbers_of_new_tokens(new_lens, len(seqs))
        tables = None if into is None else tables_of(into)
        tree = None if parents is None else Tree(parents, lens, into)
        if tree is not None and self._store.states is not None:
            raise NotSupported(
                "`parents`: expected None where layers keep states, which follow one path, got a tree"
            )
        if tables is not None:
            if self._store.states is not None:
                raise NotSupported(
                    "`into`: expected None where layers keep states, got StepBuffers"
                )
            ends = np.array([state.length for state in states.values()], np.int64) + lens
            tables.check(self._store, ends, int(lens.sum()))
        room = reserve_room(self._store, states, lens, tables, tree)
        try:
            self._exchange(room.states, room.released)
        except BaseException:
            room.undo()
            if room.slots is not None:
                self._release_slots(room.slots)
            raise
        self._open_steps[room.step] = room.metadata
        if tables is not None:
            tables.take(room.step, np.cumsum(lens), room.metadata.kept)
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
            Number of the step's tokens that each sequence keeps; all if None. The others are rolled back.
        token_ids : array-like of int (num_tokens,), optional
            Ids of the step's tokens, accepted or not. Other sequences can then find full blocks of them.
        paths : sequence of sequence of int (num_seqs,), optional
            For a step of trees: the path of tokens that each sequence keeps, as indices into `parents`. It begins
            with a token without parent, and each token is the parent of the next; it may be empty. Their rows become
            adjacent.

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
        metadata = self._metadata_of(step)
        alone(step, lambda: self._end(step, metadata, accepted, token_ids, paths))

    def _end(
        self, step: Step, metadata: StepMetadata, accepted: Any, given_ids: Any, paths: Any = None
    ) -> None:
        """End a step, of which this is the only user."""
        self._check_open(step)
        keep, order = kept_tokens(step.new_lens, metadata.tree, accepted, paths)
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
                self._store.reports.refuse(seq, state.length + n)
        ids = ids if ids is None or order is None else ids[order]
        ending = end_step(self._store, states, step, metadata.state_slots, keep, ids)
        if order is not None and metadata.tree is not None:
            metadata.tree.move(self._store, order, metadata.written)
        slots = self._store.states
        if slots is not None:
            slots.register(ending.checkpoints)
        try:
            register(self._store, ending.names, ending.checkpoints)
        except BaseException:
            if slots is not None:
                slots.forget(ending.checkpoints)
            metadata.written[:] &= order is None  # rows of a tree have moved
            raise
        step._end(keep)
        try:
            self._exchange(ending.states, ending.released)
        except BaseException:
            metadata.kept.clear()
            metadata.written[:] &= order is None
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
        # Of trees, too, no token is accepted, and none is moved.
        metadata, none = self._metadata_of(step)._replace(tree=None), step.new_lens * 0
        alone(step, lambda: self._end(step, metadata, none, None))

    # -- from the host

    @streamed
    @whole
    def swap_in(self, swapped: SwappedSequence) -> int:
        """Copy a swapped sequence into the cache as a new one.

        Parameters
        ----------
        swapped : SwappedSequence
            From `swap_out` of a cache of the same geometry, on any target.

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
        ids, undo = taken_for_now(self.blocks, sum(len(logical) for logical in swapped.logical))
        try:
            state = register_blocks(self._store, copy_in(self._store, swapped, ids))
            seq = self._insert_with_states(state, swapped.states)
        except BaseException:  # a device without room, say
            undo()
            raise
        return seq

    # -- as a whole

    def _insert_with_part(
        self, state: SequenceState, part: PartOfBlock, ids: NDArray[np.int32]
    ) -> int:
        """Give a sequence its number, and a copy of the block that begins as its tokens go on, if there is room."""
        length, shared = state.length + part.tokens, state.by_depth()
        taken = np.append(shared, part.blocks)
        self.blocks.acquire(taken)  # so that nobody gets them
        try:
            if self.num_free < self.num_groups:
                return self._insert(state, shared)
            own = self.blocks.allocate(self.num_groups)
            try:
                groups = range(self.num_groups)
                self._store.copy_blocks(part.blocks.tolist(), own.tolist(), groups)
                tables = [np.append(t, own[i : i + 1]) for i, t in enumerate(state.tables)]
                longer = state._replace(
                    length=length, tables=tables, tokens=ids[:length].copy(), cached=length
                )
                return self._insert(longer, shared)
            except BaseException:
                self.blocks.release(own)
                raise
        finally:
            self.blocks.release(taken)

    def _insert(self, state: SequenceState, shared: NDArray[np.int32]) -> int:
        """Give a sequence its number, and references to blocks that others have or have had."""
        seq, of_states, taken = self._next, self.states, np.empty(0, np.int32)
        self.blocks.acquire(shared)
        try:
            if of_states is not None:
                of_states.acquire(state.slots())
                taken = state.slots()
            self._publish({seq: state})
        except BaseException:
            self.blocks.release(shared)
            self._release_slots(taken)
            raise
        self._next = seq + 1
        return seq

    def _insert_with_states(self, state: SequenceState, states: Any) -> int:
        """Give a sequence that owns its blocks its number, and a slot for states that it has."""
        none, slots = np.empty(0, np.int32), self._store.states
        if slots is None or not states:
            return self._insert(state, shared=none)
        taken = slots.block_pool.allocate(1)
        slot = int(taken[0])
        try:
            slots.put(slot, states)
            return self._insert(state._replace(slot=slot), shared=none)
        finally:
            self._release_slots(taken)  # the sequence has a reference of its own

    # -- scales

    @streamed
    @whole
    def set_scales(self, layer: int, k: Any = None, v: Any = None) -> None:
        """Set the scales of a layer's kv heads, for kinds that have such: a value is its 8-bit float times the scale.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v : float or float32 array (num_kv_heads,), optional
            Finite scales above 0 of K and of V, on the host; None leaves them as they are, which is 1 at first.

        Raises
        ------
        NumkvError
            If the cache has sequences, or pinned blocks: their rows are stored by the present scales.
        NotSupported
            If the kind has no scales of heads, or the layer reads another one's rows.
        DimensionMismatch, UnsupportedDType, ValueError
            If they are no such scales.
        IndexError
            If there is no such layer.

        Notes
        -----
        The prefix cache is cleared, as its blocks are stored with the former scales. Nothing has changed after an
        error.
        """
        number = check_index("layer", layer, self.num_layers)
        self._store.refuse_sharing("set_scales", number)
        pool, _ = self._store.place(number)
        if self._sequences:
            raise NumkvError(
                f"set_scales: expected a cache without sequences, got {len(self)}; set scales before "
                "sequences are added"
            )
        for name, scales in (("k", k), ("v", v)):
            if scales is not None:
                pool.buffer(name).check_scales(name, scales)
        if self.states is not None:
            self.states.forget()
        self.blocks.forget()
        pool.set_scales(k, v)
        self._store.forget_bounds(None)
        if self._store.tiers is not None:
            self._store.tiers.rename()

    # -- pins

    @whole
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
            self._publish({sequence_number(seq): after})
        except BaseException:
            self.blocks.unpin(ids)
            raise
        return pinned

    @whole
    def unpin(self, seq: int) -> None:
        """Undo the last `pin` of a sequence, even if it was removed.

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
        self._publish({sequence_number(seq): after})

    # -- bound calls, and what CUDA graphs need

    @explained
    def bind(
        self,
        num_q_heads: int | Sequence[int | None],
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
        num_q_heads : int or sequence of int
            Q heads, or those of each layer.
        kind, sm_scale, logits_soft_cap, sinks, check_finite
            See `numkv.KVCache.bind`; windows are the cache's own. Sinks of layers with different q heads are a list.

        Returns
        -------
        BoundAttention
            ``begin(step)`` takes a step that `reserve` made.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, ValueError, TypeError
            If an argument does not fit the cache.
        """
        store, layers = self._store, self.num_layers
        store.refuse_residual("bind", "call `append` and `attention` of the step")
        heads = of_each("num_q_heads", num_q_heads, layers, is_number)
        of_sinks = of_each("sinks", sinks, layers, _is_row)
        bound: list[Any] = [None] * layers  # of layers that have nothing to call
        first, options = None, bound.copy()
        for layer in sorted(store.layer_pools):
            pool, group = store.place(layer)
            of, source = store.groups[group], store.layers.sources[layer]
            rows = Rows.check(pool, heads[layer], kind, check_finite)
            args = sm_scale, logits_soft_cap, [of.window], of_sinks[layer]
            (options[layer],) = options_of_layers([pool], rows, *args)
            arrays = pool.k, pool.k_scale, pool.v, pool.v_scale
            own = None if source == layer else source
            bound[layer] = ToBind(pool, rows.num_q_heads, arrays, group, not of.chunk, own)
            first = first or rows
        assert first is not None
        return BoundAttention(lambda: bound, functools.partial(begin_bound, store), first, options)

    def step_buffers(
        self, num_seqs: int, num_tokens: int | None = None, max_length: int | None = None
    ) -> StepBuffers:  # fmt: skip
        """Memory for the tables of steps that CUDA graphs are made of: see `reserve`.

        Parameters
        ----------
        num_seqs : int
            The most sequences of a step.
        num_tokens : int, optional
            The most new tokens of all of them; as many as sequences if None.
        max_length : int, optional
            The most tokens that a sequence has, the new ones included: how long tables are, and by how many blocks
            attention is launched. As many as all blocks hold if None.

        Returns
        -------
        StepBuffers

        Raises
        ------
        DimensionMismatch, TypeError
            If they are no such numbers.

        Examples
        --------
        A step is captured once and run again with other sequences, lengths and blocks. Here without a graph, whose
        launch would stand in place of the two calls:

        >>> import numpy as np, numkv
        >>> cache = numkv.PagedKVCache(1, 2, 8, num_blocks=8)
        >>> buffers = cache.step_buffers(num_seqs=4, max_length=64)
        >>> rows, q = np.ones((4, 2, 8), np.float32), np.ones((4, 2, 8), np.float32)
        >>> for seqs in ([cache.add()], [cache.add(), cache.add()]):
        ...     step = cache.reserve(seqs, 1, into=buffers)
        ...     step.append(0, rows, rows)  # of four rows, as many as there are sequences count
        ...     out = step.attention(0, q)
        ...     cache.commit(step)
        """
        self._store.refuse_groups(
            "step_buffers", "reserve steps without buffers, or take int8 or int4"
        )
        tokens = num_seqs if num_tokens is None else num_tokens
        most = self.blocks.num_blocks * self.block_size if max_length is None else max_length
        with self._target.on(self._pools[0].k):
            return StepBuffers(self._store, num_seqs, tokens, most)

    # -- as a whole

    @whole
    def clear(self) -> None:
        """Remove all sequences and forget all cached prefixes, pinned ones too; the memory stays.

        Raises
        ------
        NumkvError
            If there is an open step.

        Notes
        -----
        Blocks that were allocated by `blocks` itself are free afterwards too. Numbers of sequences are not used again.
        """
        self._refuse_open_steps("clear")
        before, states = dict(self._sequences), self.states
        slots = None if states is None else states.copy()
        self._publish(dict.fromkeys(before))
        try:
            if states is not None:
                states.clear()
            self.blocks.clear()
            self._store.reports.clear()
        except Exception:  # memory, say
            if states is not None and slots is not None:
                restore(states, slots)
            self._publish(before)
            raise

    @streamed
    @writes
    def copy(self) -> Self:
        """Copy rows, sequences by the same numbers, cached prefixes and pins; the copy shares no memory.

        Returns
        -------
        PagedKVCache

        Raises
        ------
        NumkvError
            If there is an open step.
        """
        self._refuse_open_steps("copy")
        return self._copied()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @writes
    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickle, made from a copy, so that it is of one moment."""
        if not self._target.values_on_host:
            raise NotSupported(
                f"a cache on {self._target.name} cannot be pickled, only one on the CPU; swap its sequences out, "
                "and pickle these"
            )
        self._refuse_open_steps("copy")
        store = state_of(self._store)
        return {"store": store, "sequences": dict(self._sequences), "next": self._next}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._adopt(store_of(state["store"]), owned(state["sequences"]), state["next"])

    __saved__ = SavedPagedCache

    def __snapshot__(self) -> Snapshot:
        """See `numkv.snapshots.snapshot`."""
        self._refuse_reported()
        states = {seq: self._idle(seq) for seq in self.sequences}
        return cache_snapshot(self._store, states, self._next, [(self, True)])

    @classmethod
    def __restore__(cls, saved: SavedPagedCache, source: Source, options: Options) -> Self:
        """See `numkv.snapshots.snapshot`."""
        states, make = saved.read_states(source), cls
        made: Self = make(target=options.place.name, **saved.arguments())
        made._take_saved(saved, states, source)
        return made

    def _take_saved(
        self, saved: SavedPagedCache, states: list[SequenceState], source: Source
    ) -> None:
        """Fill an empty cache."""
        store, every = self._store, np.arange(saved.blocks)
        seed = saved.geometry[4]
        expect(store.geometry[4] == seed, f"rows are rotated by seed {seed}")
        for count, own in zip(saved.blocks_of_parts, own_blocks(store, states, every), strict=True):
            expect(len(own) == count, f"{count} blocks of a part that has {len(own)}")
        ids = self.blocks.allocate(saved.blocks)
        fill_all(source, store_tensors(store, states, every, ids))
        states = put_states(store, saved, states, source)
        source.verify()  # before anything can be found by its tokens
        with claims("the sequences"):
            counts = np.bincount(blocks_in([x.blocks() for x in states]), minlength=len(ids))
            expect(bool((counts > 0).all()), "a block belongs to no sequence")
            self.blocks.acquire(np.repeat(ids, counts - 1))  # which it has once already
            places = np.append(ids, np.int32(-1))  # -1 stays what it is
            for x, state in zip(saved.sequences, states, strict=True):
                here = state._replace(tables=[places[table] for table in state.tables])
                self._sequences[x.sequence] = register_blocks(store, here)
            self._next = saved.next
            self.check()

    def _metadata_of(self, step: Any) -> StepMetadata:
        metadata: StepMetadata | None = (
            self._open_steps.get(step) if isinstance(step, Step) else None
        )
        if metadata is None:
            if isinstance(step, Step):
                self._check_open(step)
            raise NumkvError(
                "`step`: expected an open step of this cache, got "
                f"{'one of another' if isinstance(step, Step) else type(step).__name__}"
            )
        return metadata

    def _check_open(self, step: Any) -> None:
        if not step.open:
            raise NumkvError("`step`: expected an open step of this cache, got an ended one")

    def _refuse_open_steps(self, name: str) -> None:
        for seq, state in self._sequences.items():
            if state.reserved is not None:
                raise NumkvError(
                    f"{name}: expected a cache without open steps, got one of sequence {seq}; commit it or roll it "
                    "back first"
                )

    # -- reading: a reader reads states once, computes, and checks whether rows were dropped meanwhile

    def __column__(self) -> Column:
        """Return the cache as a part of a larger one."""
        return Column(self._store, self._insert, self._settled)

    def _settled(self, seq: int) -> SequenceState:
        """A sequence whose rows do not move at the moment."""
        state = self._sequence(seq)
        if state.dropped & 1:
            raise self._overtaken("seq", seq)
        return state

    def _refuse_overtaken(
        self, name: str, generation: int, seqs: Sequence[int], states: Sequence[SequenceState]
    ) -> None:
        """Raise if a sequence has lost rows since its state was taken, which was not before this generation."""
        if generation == self._generation:
            return
        for seq, state in zip(seqs, states, strict=True):
            now = self._sequences.get(seq)
            if now is None or now.dropped != state.dropped:
                raise self._overtaken(name, seq)

    @staticmethod
    def _overtaken(name: str, seq: int) -> NumkvError:
        return NumkvError(
            f"{name}: rows of sequence {seq} were moved or dropped while they were read, so there is no result; "
            "do not truncate, compact or remove a sequence that others read, or move its window"
        )

    # -- attention over committed tokens

    @streamed
    def decode_attention(
        self,
        layer: int,
        sequences: Iterable[int],
        q: Any,
        *,
        out: Any = None,
        return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Any:
        """Attend with the query of the newest committed token of any sequences.

        Parameters
        ----------
        layer : int
            Which layer.
        sequences : iterable of int
            Which sequences; one may come more than once.
        q : array (num_seqs, num_q_heads, head_dim)
            A query for each.
        out, return_lse
            See `numkv.decode_attention`.
        **options
            All of `numkv.AttentionOptions` but `window_left`, which is the layer's.

        Returns
        -------
        out : array (num_seqs, num_q_heads, head_dim_v)
            In q's dtype. An empty sequence gives 0 (and -inf).
        lse : float32 array (num_seqs, num_q_heads)
            Natural log of the sum of exponentials; only with `return_lse`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, IndexError, ValueError
            See `numkv.decode_attention`.
        NumkvError
            If a sequence was truncated, compacted or removed meanwhile, or its window moved on.
        """
        layer = check_index("layer", layer, self.num_layers)
        (pool, group), place = self._store.place(layer), self._target
        q = check_queries(place, q, int(pool.k.shape[1]), pool.head_dim, "num_seqs")
        seqs = sequence_numbers(sequences, int(q.shape[0]))
        generation = self._generation
        states = [self._settled(seq) for seq in seqs]
        check_count("q", f"a query for each of {len(seqs)} sequences", len(seqs), int(q.shape[0]))
        lens = np.array([state.length for state in states], np.int64)
        checked = check_options(
            options, return_lse, out, takes=OF_A_LAYER, window_left=self._groups[group].window
        )
        ranges = None
        if self._groups[group].chunk:
            if checked.sight is not None:
                self._store.refuse_chunks("causal, ranges, mask and alibi_slopes", layer)
            last = np.maximum(lens - 1, 0)
            ranges = place.index(
                np.minimum(self._groups[group].ranges(last), lens[:, None]), np.int64
            )
        if self._store.layers.twin(layer) is not None:
            result = attend_to_newest(self._store, layer, states, q, lens, checked)
        else:
            result = attend(
                pool, place.index(self._store.block_table(states, group), np.int32), q,
                place.index(lens, np.int64), place.index(np.arange(len(states) + 1), np.int64), checked,
                ranges=ranges,
            )  # fmt: skip
        self._refuse_overtaken("decode_attention", generation, seqs, states)
        return result

    @streamed
    def attention_weights(
        self,
        layer: int,
        seq: int,
        q: Any,
        *,
        lse: Any = None,
        **options: Unpack[AttentionOptions],
    ) -> Array:
        """Sum the attention that each committed token of a sequence gets from the queries of the last ones.

        `Step.attention_weights` gives those of a step's queries, for all of its sequences.

        Parameters
        ----------
        layer : int
            Which layer.
        seq : int
            Which sequence.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of the last `num_tokens` committed positions.
        lse : float32 array (num_tokens, num_q_heads), optional
            What attention returned with ``return_lse=True`` for these queries and options; computed if None.
        **options
            `sm_scale` and `logits_soft_cap`: see `numkv.AttentionOptions`.

        Returns
        -------
        float32 array (num_kv_heads, tokens)
            Sums over the queries and the q heads of a group; 0 where the layer's window does not reach. See
            `numkv.attention_weights`.

        Raises
        ------
        NotSupported
            If a query attends to tokens whose blocks were released behind the layer's window: ask the step instead.
        DimensionMismatch
            If there are several queries, more than tokens, or a shape does not fit.
        UnsupportedDType, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        layer = check_index("layer", layer, self.num_layers)
        pool, group = self._store.place(layer)
        self._store.refuse_chunks("attention_weights", layer)
        number, place, generation = sequence_number(seq), self._target, self._generation
        state = self._settled(number)
        q = check_queries(place, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
        tokens, length, window = int(q.shape[0]), state.length, self._groups[group].window
        if tokens > length and tokens != 1:
            raise too_many_queries(tokens, length)
        first = self._groups[group].first_visible(length - tokens + 1)
        first_stored = self._store.first_stored(state, group)
        if tokens and first < first_stored:
            raise NotSupported(
                f"`q`: expected queries whose window of {window} tokens is still there, got {tokens}, the first of "
                f"which sees token {first}, and layer {layer} holds those from "
                f"{first_stored} on; pass fewer, or ask the step that wrote them"
            )
        lens, starts = (place.index(np.array(x), np.int64) for x in ([length], [0, tokens]))
        checked = check_options(options, takes=SCORES, window_left=window)
        if self._store.layers.twin(layer) is None:
            table = place.index(self._store.block_table([state], group), np.int32)
            weights = attention_mass(pool, table, q, lens, starts, length, checked, lse=lse)
        else:
            of = np.zeros(tokens, np.int64)
            parts = parts_of_queries(
                self._store, layer, [state], of, length - tokens + np.arange(tokens), checked
            )
            weights = mass_of_parts(parts, q, lens, starts, length, checked, lse)
        self._refuse_overtaken("attention_weights", generation, (number,), (state,))
        return weights.reshape((int(pool.k.shape[1]), length))

    def key_error(
        self, layer: int, seq: int, q: Any, *, sm_scale: float | None = None
    ) -> NDArray[np.float64]:
        """Estimate how far quantising the keys moves the scores of queries; see `numkv.KVCache.key_error`.

        Parameters
        ----------
        layer : int
            Which layer.
        seq : int
            The sequence.
        q : array (num_queries, num_q_heads, head_dim)
            Any queries of the layer, such as those of the newest tokens.
        sm_scale : float, optional
            Scale of the scores; ``1 / sqrt(head_dim)`` if None.

        Returns
        -------
        float64 array (num_queries, num_q_heads)
            The root mean square of the errors of scores, over the committed tokens that the newest one sees.

        Raises
        ------
        NotSupported
            If keys are not quantised by scales of rows or groups.
        DimensionMismatch, UnsupportedDType, IndexError, ValueError, TypeError
            If an argument does not fit.
        """
        store, number, generation = self._store, sequence_number(seq), self._generation
        layer = check_index("layer", layer, self.num_layers)
        pool, group = store.place(layer)
        state = self._settled(number)
        q = check_queries(self._target, q, int(pool.k.shape[1]), pool.head_dim, "num_queries")
        first, end = self._groups[group].first_visible(state.length), state.length
        begin, residual = first, store.layers.residual
        if residual is not None and store.layers.twin(layer) is not None:
            some = store.layers.groups[store.layers.sources[layer]]
            end = max(end - 1, 0) // some * some if some else end - residual.window
            begin = max(first, residual.sinks)
        slots = slots_of(
            store.block_table([state], group)[0], np.arange(begin, end), self.block_size
        )
        scale = check_options({"sm_scale": sm_scale}).scale(pool.head_dim)
        found = key_error(pool.k_buffer, slots, state.length - first, q, scale)
        self._refuse_overtaken("key_error", generation, (number,), (state,))
        return found

    # -- the contents

    @streamed
    def swap_out(self, seq: int) -> SwappedSequence:
        """Copy a sequence to host memory, in one copy per buffer; it stays in the cache.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        SwappedSequence
            For `swap_in` of this or another cache.

        Raises
        ------
        IndexError
            If there is no such sequence.
        NumkvError
            If it has an open step, or was truncated, compacted or removed meanwhile.
        NonFiniteInput
            On CUDA, if rows that were quantised held NaN or infinity: truncate the sequence first.
        """
        number, generation = sequence_number(seq), self._generation
        self._idle(number)
        state = self._settled(number)
        swapped = copy_out(self._store, state)
        self._store.reports.collect(wait=True)
        self._store.reports.refuse(number, state.length)
        self._refuse_overtaken("swap_out", generation, (number,), (state,))
        return swapped

    def block_table(self, seq: int, layer: int) -> NDArray[np.int32]:
        """Return the block table of a sequence in a layer: a copy, on the host.

        Parameters
        ----------
        seq : int
            Which sequence.
        layer : int
            Which layer; those of a layer group have one table.

        Returns
        -------
        int32 array (num_blocks,)
            Blocks of the committed tokens and of an open step's; -1 where they were released behind a window.
        """
        _, group = self._store.place(check_index("layer", layer, self.num_layers))
        return self._sequence(seq).tables[group].copy()

    @streamed
    def arrays(self, layer: int) -> CacheArrays:
        """Return the arrays of a layer with the tables of all sequences, for your own kernels.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        CacheArrays
            Arrays of the target. Row i of `block_table` and of `context_lens`, int32, is the i-th of `sequences` at
            that moment. In a table -1 marks a block that was released behind the layer's window, and entries past its
            end. `slots` has length 0: a step has those of its tokens. The tables are copies: ask again after a
            change. The buffers are never replaced.
        """
        pool, group = self._store.place(check_index("layer", layer, self.num_layers))
        self._store.refuse_groups("arrays", "call `attention`, or take int8 or int4")
        generation = self._generation
        found = self._tables_given.get(group)
        if found is None or found[0] != generation:
            states = list(self._sequences.values())
            found = (
                generation,
                self._store.block_table(states, group),
                np.array([state.length for state in states], np.int32),
            )
            if not self._target.values_on_host:
                place = self._target.index
                found = (generation, place(found[1], np.int32), place(found[2], np.int32))
                self._tables_given[group] = found
        return cache_arrays(pool, found[1], found[2])


def _is_row(x: Any) -> bool:
    """Return whether sinks are those of all layers: one for each head."""
    if x is None or getattr(x, "ndim", 2) == 1:
        return True
    return isinstance(x, (list, tuple)) and not any(
        y is None or isinstance(y, (list, tuple)) or getattr(y, "ndim", 0) for y in x
    )
