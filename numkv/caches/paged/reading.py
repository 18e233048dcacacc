"""Reading a `PagedKVCache`: attention to committed tokens, copies on the host, arrays for own kernels.

A reader takes the states of its sequences once, computes, and looks whether rows of theirs were dropped meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from numkv.arrays import CacheArrays
from numkv.attention.attend import attend, check_queries, too_many_queries
from numkv.attention.mass import attention_mass
from numkv.attention.options import check_options
from numkv.attention.sight import Visible
from numkv.caches.paged.residual_attention import attend_to_newest
from numkv.caches.paged.store import SequenceState
from numkv.caches.paged.stored import StoredSequences
from numkv.caches.paged.swap import SwappedSequence, copy_out
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.numbers import check_index
from numkv.storage.own_kernels import cache_arrays
from numkv.targets.base import Array
from numkv.targets.streamed import on_stream


class ReadableSequences(StoredSequences):
    """The reading half of `PagedKVCache`."""

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
            f"{name}: rows of sequence {seq} were moved or dropped while they were read, so there is no result; let "
            "nobody truncate, compact or remove a sequence that others read, or move its window on"
        )

    # -- attention over what is committed

    @on_stream
    def decode_attention(
        self,
        layer: int,
        sequences: Iterable[int],
        q: Any,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        sinks: Any = None,
        return_lse: bool = False,
        out: Any = None,
        stream: Any = None,
        **visible: Unpack[Visible],
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
        sm_scale, logits_soft_cap, sinks, return_lse, out, stream, **visible
            See `numkv.decode_attention`; the window is the layer's.

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
        pool, group = self._store.place(check_index("layer", layer, self.num_layers))
        place = self._target
        q = check_queries(place, q, int(pool.k.shape[1]), pool.head_dim, "num_seqs")
        seqs = self._numbers(sequences, int(q.shape[0]))
        generation = self._generation
        states = [self._settled(seq) for seq in seqs]
        if q.shape[0] != len(states):
            raise DimensionMismatch(
                f"`q`: expected a query for each of {len(states)} sequences, got {q.shape[0]}",
                expected=len(states),
                actual=int(q.shape[0]),
            )
        lens = np.array([state.length for state in states], np.int64)
        window = self._groups[group].window
        options = check_options(sm_scale, logits_soft_cap, window, sinks, return_lse, out, visible)
        if self._store.layers.twin(int(layer)) is not None:
            result = attend_to_newest(self._store, int(layer), states, q, lens, options)
            self._refuse_overtaken("decode_attention", generation, seqs, states)
            return result
        ranges = None
        if self._groups[group].chunk:
            if options.sight is not None:
                self._store.refuse_chunks("causal, ranges, mask and alibi_slopes", layer)
            last = np.maximum(lens - 1, 0)
            ranges = place.index(
                np.minimum(self._groups[group].ranges(last), lens[:, None]), np.int64
            )
        result = attend(
            pool, place.index(self._store.block_table(states, group), np.int32), q,
            place.index(lens, np.int64), place.index(np.arange(len(states) + 1), np.int64), options,
            ranges=ranges,
        )  # fmt: skip
        self._refuse_overtaken("decode_attention", generation, seqs, states)
        return result

    @on_stream
    def attention_weights(
        self,
        layer: int,
        seq: int,
        q: Any,
        *,
        lse: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        stream: Any = None,
    ) -> Array:
        """How much attention each committed token of a sequence gets from the queries of the last ones.

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
        sm_scale, logits_soft_cap, stream
            See `numkv.decode_attention`.

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
            If there are more queries than tokens, or a shape does not fit.
        UnsupportedDType, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        pool, group = self._store.place(check_index("layer", layer, self.num_layers))
        self._store.refuse_chunks("attention_weights", layer)
        number, place, generation = self._number(seq), self._target, self._generation
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
        weights = attention_mass(
            pool, place.index(self._store.block_table([state], group), np.int32), q,
            place.index(np.array([length]), np.int64), place.index(np.array([0, tokens]), np.int64),
            length, check_options(sm_scale, logits_soft_cap, window), lse=lse,
        )  # fmt: skip
        self._refuse_overtaken("attention_weights", generation, (number,), (state,))
        return weights.reshape((int(pool.k.shape[1]), length))

    # -- what is stored

    @on_stream
    def swap_out(self, seq: int, *, stream: Any = None) -> SwappedSequence:
        """Copy a sequence to host memory, in one copy per buffer; it stays in the cache.

        Parameters
        ----------
        seq : int
            The sequence.
        stream : object, optional
            See `numkv.paged_decode_attention`.

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
        number, generation = self._number(seq), self._generation
        self._idle(number)
        state = self._settled(number)
        swapped = copy_out(self._store, state)
        self._store.collect(wait=True)
        self._store.bad.refuse(number, state.length)
        self._refuse_overtaken("swap_out", generation, (number,), (state,))
        return swapped

    def block_table(self, seq: int, layer: int) -> NDArray[np.int32]:
        """The block table of a sequence in a layer: a copy, on the host.

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

    @on_stream
    def arrays(self, layer: int, *, stream: Any = None) -> CacheArrays:
        """The arrays of a layer with the tables of all sequences, for your own kernels.

        Parameters
        ----------
        layer : int
            Which layer.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Returns
        -------
        CacheArrays
            Arrays of the target. Row i of `block_table` and of `context_lens`, int32, is the i-th of `sequences` at
            that moment; -1 in a table stands for a block that was released behind the layer's window, and for what is
            past its end. `slots` has length 0: a step has those of its tokens. The tables are copies; they are out of
            date when `generation` is another number, the buffers never are.
        """
        pool, group = self._store.place(check_index("layer", layer, self.num_layers))
        generation = self.generation
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
