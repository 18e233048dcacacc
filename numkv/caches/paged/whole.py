"""A `PagedKVCache` as a whole: its scales, pins and bound calls, and how it is cleared, copied and pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv.access import whole, writes
from numkv.caches.bound import BoundAttention
from numkv.caches.paged.bound import bind_paged
from numkv.caches.paged.buffers import StepBuffers
from numkv.caches.paged.memory import copied, state_of, store_of
from numkv.caches.paged.prefix_match import PartOfBlock, register_blocks
from numkv.caches.paged.reading import ReadableSequences
from numkv.caches.paged.saved import (
    SavedPagedCache,
    cache_snapshot,
    own_blocks,
    put_states,
    store_tensors,
)
from numkv.caches.paged.step import Step
from numkv.caches.paged.store import SequenceState, held
from numkv.caches.paged.tiers import with_tiers
from numkv.errors import NotSupported, NumkvError
from numkv.keywords import explained
from numkv.kinds import Kind
from numkv.numbers import check_index
from numkv.snapshots.fields import claims, expect
from numkv.snapshots.snapshot import Options, Snapshot, Source, fill_all
from numkv.targets.streamed import on_stream


class WholeCache(ReadableSequences):
    """The part of `PagedKVCache` that is not about steps."""

    # -- new sequences

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
        seq, books = self._next, self.states
        self.blocks.acquire(shared)
        try:
            if books is not None:
                books.acquire(state.slots())
            self._publish({seq: state})
        except BaseException:
            self.blocks.release(shared)
            raise
        self._next = seq + 1
        return seq

    def _insert_with_states(self, state: SequenceState, states: Any) -> int:
        """Give a sequence that owns its blocks its number, and a slot for states that it has."""
        none, slots = np.empty(0, np.int32), self._store.states
        if slots is None or not states:
            return self._insert(state, shared=none)
        taken = slots.books.allocate(1)
        slot = int(taken[0])
        try:
            slots.put(slot, states)
            return self._insert(state._replace(slot=slot), shared=none)
        finally:
            self._release_slots(taken)  # the sequence has a reference of its own

    # -- scales

    @on_stream
    @whole
    def set_scales(self, layer: int, k: Any = None, v: Any = None, *, stream: Any = None) -> None:
        """Set the scales of a layer's kv heads, for kinds that have such: a value is its 8-bit float times the scale.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v : float or float32 array (num_kv_heads,), optional
            Finite scales above 0 of K and of V, on the host; None leaves them as they are, which is 1 at first.
        stream : object, optional
            See `numkv.paged_decode_attention`.

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
        The prefix cache forgets what it has, as it is stored by the former scales. Nothing has changed after an error.
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
            self._publish({self._number(seq): after})
        except BaseException:
            self.blocks.unpin(ids)
            raise
        return pinned

    @whole
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
        self._store.refuse_residual("bind", "call `append` and `attention` of the step")
        return bind_paged(
            self._store, num_q_heads, kind, sm_scale, logits_soft_cap, sinks, check_finite
        )

    def step_buffers(
        self, num_seqs: int, num_tokens: int | None = None, max_length: int | None = None, *, stream: Any = None
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
        stream : object, optional
            The stream that graphs run on; see `numkv.paged_decode_attention`.

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
        tokens = num_seqs if num_tokens is None else num_tokens
        most = self.blocks.num_blocks * self.block_size if max_length is None else max_length
        with self._target.on(stream, self._pools[0].k):
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
            self._store.bad.clear()
        except Exception:  # memory, say
            if states is not None and slots is not None:
                for own, old in zip(states._arrays(), slots._arrays(), strict=True):
                    own[:] = old
            self._publish(before)
            raise

    @on_stream
    @writes
    def copy(self, *, stream: Any = None) -> Self:
        """The same cache once more, in memory of its own: rows, sequences by the same numbers, cached prefixes, pins.

        Parameters
        ----------
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Returns
        -------
        PagedKVCache

        Raises
        ------
        NumkvError
            If there is an open step.
        """
        return self._copied()

    def _copied(self) -> Self:
        self._refuse_open_steps("copy")
        made = self.__class__.__new__(self.__class__)
        store = with_tiers(copied(self._store), self.store, self._store.tiers)
        made._adopt(store, dict(self._sequences), self._next)
        return made

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @writes
    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: a copy, so that it is of one moment."""
        if not self._target.values_on_host:
            raise NotSupported(
                f"a cache on {self._target.name} cannot be pickled, only one on the CPU; swap its sequences out, "
                "and pickle these"
            )
        self._refuse_open_steps("copy")
        store = state_of(self._store)
        return {"store": store, "sequences": dict(self._sequences), "next": self._next}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._adopt(store_of(state["store"]), state["sequences"], state["next"])

    __saved__ = SavedPagedCache

    def __snapshot__(self) -> Snapshot:
        """See `numkv.snapshots.snapshot`."""
        self._refuse_told()
        states = {seq: self._idle(seq) for seq in self.sequences}
        return cache_snapshot(self._store, states, self._next, [(self, True)])

    @classmethod
    def __restore__(cls, saved: SavedPagedCache, source: Source, options: Options) -> Self:
        """See `numkv.snapshots.snapshot`."""
        states, make = saved.read_states(source), cls
        made: Self = make(target=options.place.name, **saved.arguments())
        store, every = made._store, np.arange(saved.blocks)
        seed = saved.geometry[4]
        expect(store.geometry[4] == seed, f"rows are rotated by seed {seed}")
        for count, own in zip(saved.blocks_of_parts, own_blocks(store, states, every), strict=True):
            expect(len(own) == count, f"{count} blocks of a part that has {len(own)}")
        ids = made.blocks.allocate(saved.blocks)
        fill_all(source, store_tensors(store, states, every, ids))
        states = put_states(store, saved, states, source)
        source.verify()  # before anything can be found by its tokens
        with claims("the sequences"):
            counts = np.bincount(held([x.blocks() for x in states]), minlength=len(ids))
            expect(bool((counts > 0).all()), "a block belongs to no sequence")
            made.blocks.acquire(np.repeat(ids, counts - 1))  # which it has once already
            places = np.append(ids, np.int32(-1))  # -1 stays what it is
            for x, state in zip(saved.sequences, states, strict=True):
                here = state._replace(tables=[places[table] for table in state.tables])
                made._sequences[x.sequence] = register_blocks(store, here)
            made._next = saved.next
            made.check()
        return made

    def _check_step(self, step: Any) -> None:
        if not isinstance(step, Step) or not step._belongs_to(self._store):
            raise NumkvError(
                "`step`: expected an open step of this cache, got "
                f"{'one of another' if isinstance(step, Step) else type(step).__name__}"
            )

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
