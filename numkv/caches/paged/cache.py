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

This module is the life of sequences. What is stored, and attention to it, is in `stored`; a step in `step`; prefixes,
compaction and the way to host memory in `prefix_match`, `compact` and `swap`. They share `store`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.blocks.prefix import token_ids
from numkv.caches.paged.compact import compact_sequence
from numkv.caches.paged.prefix_match import (
    block_names,
    find_prefix,
    register_blocks,
    release_behind_window,
)
from numkv.caches.paged.step import Step
from numkv.caches.paged.store import Extra, SequenceState
from numkv.caches.paged.stored import PagedStats, StoredSequences
from numkv.caches.paged.swap import SwappedSequence, check_swapped, copy_in, copy_out
from numkv.checks import check_index, check_integers, check_kept
from numkv.compaction.key_shift import RopeShift
from numkv.errors import DimensionMismatch, NotSupported, NumkvError

__all__ = ["PagedKVCache", "PagedStats", "Step", "SwappedSequence"]


class PagedKVCache(StoredSequences):
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
        Storage kinds of K and of V where they differ from `kind`.
    windows : sequence of int, optional
        `window_left` of each layer: earlier tokens that a query attends to, -1 for all.
    rotate : bool
        Whether a Hadamard rotation is applied to rows before they are stored; see `numkv.ContiguousLayer`.

    Attributes
    ----------
    blocks : BlockPool
        The bookkeeping of blocks.

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

    # -- scales

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
            If the kind has no scales of heads.
        DimensionMismatch, UnsupportedDType, ValueError
            If they are no such scales.
        IndexError
            If there is no such layer.

        Notes
        -----
        The prefix cache forgets what it has, as it is stored by the former scales. Nothing has changed after an error.
        """
        pool, _ = self._store.place(check_index("layer", layer, self.num_layers))
        if self._sequences:
            raise NumkvError(
                f"set_scales: expected a cache without sequences, got {len(self)}; set scales before "
                "sequences are added"
            )
        for name, scales in (("k", k), ("v", v)):
            if scales is not None:
                pool.buffer(name).check_scales(name, scales)
        self.blocks.forget()
        pool.set_scales(k, v)

    # -- sequences

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
        UnsupportedDType, ValueError
            If `tokens` are no token ids.
        """
        ids = token_ids([] if tokens is None else tokens)
        size = self.block_size
        usable = max(0, len(ids) - 1) // size
        extra = (
            None if extra is None else dict(extra)
        )  # no reference to the caller's object is kept
        names = block_names(self._store, ids[: usable * size], extra)
        blocks, tables = find_prefix(self._store, ids[: usable * size], names)
        for table in tables:
            self.blocks.acquire(table[table >= 0])
        state = SequenceState(
            blocks * size, tables, extra, ids[: blocks * size].copy(),
            [of_group[:blocks] for of_group in names], blocks, [0] * self.num_groups,
            cached=blocks * size,
        )  # fmt: skip
        return self._insert(state)

    def _insert(self, state: SequenceState) -> int:
        """Give a sequence its number."""
        seq, self._next = self._next, self._next + 1
        self._sequences[seq] = state
        return seq

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
        old = self._idle(seq)
        for table in old.tables:
            self.blocks.acquire(table[table >= 0])
        state = SequenceState(
            old.length, [t.copy() for t in old.tables], old.extra, old.tokens,
            list(old.digests), old.registered, list(old.starts),
        )  # fmt: skip
        return self._insert(state)

    def remove(self, seq: int) -> None:
        """Remove a sequence; blocks whose token ids are known can still be found until they are evicted.

        Parameters
        ----------
        seq : int
            The sequence.
        """
        for table in self._idle(seq).tables:
            self.blocks.release(table[table >= 0])
        del self._sequences[seq]

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
        self._store.cut_tables(state, length)
        full = length // self.block_size
        state.length = length
        state.cached = min(state.cached, length)
        state.tokens = state.tokens[:length]
        state.digests = [names[:full] for names in state.digests]
        state.registered = min(state.registered, full)
        state.starts = [min(start, length) for start in state.starts]

    def compact(self, seq: int, keep: Any, shift: RopeShift | None = None) -> None:
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
        Nothing has changed after an error. Windows are counted in kept tokens. `Step.positions` go on from the new
        length, which is right for shifted keys; without a shift, write ready rows with `Step.append`.
        """
        state = self._idle(seq)
        kept = check_kept("keep", keep, state.length)
        compact_sequence(self._store, state, kept, shift)

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
        ids = self._findable(seq)
        self.blocks.pin(ids)
        self._sequence(seq).pins.append(ids)
        return ids

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
        pins = self._sequence(seq).pins
        if not pins:
            raise NumkvError(f"`seq`: expected a pinned sequence, got {seq}; pin it first")
        self.blocks.unpin(pins[-1])
        pins.pop()

    def _findable(self, seq: int) -> NDArray[np.int32]:
        ids = self._sequence(seq).blocks()
        return ids[self.blocks.is_cached(ids)]

    # -- steps

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> Step:
        """Allocate room for new tokens of some sequences, all or nothing.

        Parameters
        ----------
        sequences : iterable of int
            The sequences, each once.
        new_lens : int or int array (num_seqs,)
            How many tokens each of them gets.

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
            If a sequence has an open step.
        """
        seqs = tuple(sequences)
        if isinstance(new_lens, (int, np.integer)):
            new_lens = [new_lens] * len(seqs)
        lens = check_integers(targets.get("cpu"), "new_lens", new_lens, (len(seqs),)).astype(
            np.int64
        )
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"`sequences`: expected each sequence once, got {seqs}")
        if (lens < 0).any():
            raise IndexError(f"`new_lens`: expected no negative numbers, got {lens.tolist()}")
        states = [self._idle(s) for s in seqs]
        plans = [
            self._plan_group(state, group, n)
            for state, n in zip(states, lens.tolist(), strict=True)
            for group in range(self.num_groups)
        ]
        wanted = [blocks for blocks, _ in plans]
        taken = self.blocks.allocate(sum(wanted))
        parts = iter(np.split(taken, np.cumsum(wanted)[:-1]) if wanted else [])
        copy_from: list[int] = []
        copy_to: list[int] = []
        copies = iter([copy for _, copy in plans])
        for state, n in zip(states, lens.tolist(), strict=True):
            for group, table in enumerate(state.tables):
                new = next(parts)
                if next(copies):
                    copy_from.append(int(table[-1]))
                    copy_to.append(int(new[0]))
                    table = table.copy()
                    table[-1], new = new[0], new[1:]
                state.tables[group] = np.concatenate([table, new]).astype(np.int32)
            state.reserved = n
        if copy_from:
            self._store.copy_blocks(copy_from, copy_to)
            self.blocks.release(np.array(copy_from, np.int32))
        return Step(self._store, dict(zip(seqs, states, strict=True)), lens)

    def _plan_group(self, state: SequenceState, group: int, n: int) -> tuple[int, bool]:
        """How many blocks a table needs for `n` more tokens, and whether its last block has to be copied first."""
        table = state.tables[group]
        copies = False
        if n and state.length % self.block_size:
            # Others may use the block, or find it by what it stored before a truncation.
            last = table[-1:]
            copies = bool(self.blocks.ref_count(last)[0] > 1 or self.blocks.is_cached(last)[0])
        return max(0, self._store.blocks_for(state.length + n) - len(table)) + copies, copies

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
        self._check_open(step)
        keep = step.new_lens
        if accepted is not None:
            shape = (len(step.sequences),)
            keep = check_integers(targets.get("cpu"), "accepted", accepted, shape).astype(np.int64)
        if ((keep < 0) | (keep > step.new_lens)).any():
            raise IndexError(
                f"`accepted`: expected numbers up to {step.new_lens.tolist()}, got {keep.tolist()}"
            )
        ids = None if token_ids is None else _ids(token_ids, step.num_tokens)
        missing = step.unwritten_layers
        if missing and keep.any():
            raise NumkvError(
                f"`step`: expected rows of the new tokens in all {self.num_layers} layers, got none in layer "
                f"{missing[0]}{' and others' if len(missing) > 1 else ''}; append them, or roll the step back"
            )
        step.open = False
        starts = np.concatenate([[0], np.cumsum(step.new_lens)])
        for i, seq in enumerate(step.sequences):
            state = self._sequences[seq]
            state.reserved = None
            known = len(state.tokens) == state.length
            length = state.length + int(keep[i])
            if ids is not None and known:
                new = ids[starts[i] : starts[i] + int(keep[i])]
                state.tokens = np.concatenate([state.tokens, new])
            state.length = length
            self._store.cut_tables(state, length)  # blocks of tokens that were not accepted
            register_blocks(self._store, state)
            release_behind_window(self._store, state)

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
        self.commit(step, np.zeros(len(step.sequences), np.int64))

    def _check_open(self, step: Step) -> None:
        if not isinstance(step, Step) or not step._belongs_to(self._store) or not step.open:
            raise NumkvError(
                "`step`: expected an open step of this cache, got another or an ended one"
            )

    # -- to the host and back

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
        """
        return copy_out(self._store, self._idle(seq))

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
        ids = self.blocks.allocate(sum(len(logical) for logical in swapped.logical))
        try:
            state = copy_in(self._store, swapped, ids)
            register_blocks(self._store, state)
        except BaseException:  # a device without room, say
            self.blocks.release(ids)
            raise
        return self._insert(state)


def _ids(tokens: Any, num_tokens: int) -> NDArray[np.int32]:
    ids = token_ids(tokens, "token_ids")
    if ids.shape != (num_tokens,):
        raise DimensionMismatch(
            f"`token_ids`: expected an id for each of the step's {num_tokens} tokens, got shape {ids.shape}",
            expected=num_tokens,
            actual=ids.shape,
        )
    return ids
