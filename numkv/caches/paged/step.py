"""`Step`: new tokens of some sequences on their way through the layers of a `PagedKVCache`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Unpack

import numpy as np
from numpy.typing import NDArray

from numkv.access import Access, whole, writes
from numkv.arrays import CacheArrays
from numkv.attention.attend import attend, check_call, check_queries
from numkv.attention.cascade import Prefix, attend_cascade
from numkv.attention.mass import attention_mass, mass_of_parts
from numkv.attention.options import (
    OF_A_LAYER,
    SCORES,
    WITH_SINKS,
    AttentionOptions,
    CheckedOptions,
    check_options,
)
from numkv.attention.parts import Part, attend_to_parts, run_parts
from numkv.caches.bound import BoundStep, NewTokens
from numkv.caches.paged.arguments import check_count
from numkv.caches.paged.buffers import StepTables
from numkv.caches.paged.column import Rows
from numkv.caches.paged.key_bounds import BlockBounds
from numkv.caches.paged.residual_attention import Queries, Ranges, parts_of, ranges_of
from numkv.caches.paged.states import StateMemory, StepState
from numkv.caches.paged.store import BlockStore, Ints, SequenceState, widened
from numkv.caches.paged.trees import Tree
from numkv.checks import check_apart, check_array
from numkv.compaction.moves import slots_of
from numkv.errors import NonFiniteInput, NotSupported, NumkvError
from numkv.numbers import check_flag, check_index, check_size
from numkv.sparse.attention import are_numbered, attend_by_head, attend_to_choice
from numkv.sparse.bounds import scores_of
from numkv.sparse.choice import check_counts, chosen
from numkv.storage.own_kernels import cache_arrays
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target
from numkv.targets.call import Marker
from numkv.targets.streamed import streamed
from numkv.writing import fast_path
from numkv.writing.fused_write import Projection, QKMode
from numkv.writing.latents import LatentRows

#: What calls of an ended step raise.
_ENDED = "expected an open step, got one that was committed or rolled back"


class _Read(NamedTuple):
    """The blocks that a step's queries may read in the layers of a group; the codes, if tokens are also in full."""

    blocks: NDArray[np.int32]
    """Blocks of all sequences with queries."""
    counts: Ints
    """Rows of theirs that hold such tokens."""
    written: NDArray[np.bool_]
    """Which of them the step writes to."""
    table: Array
    """A row of blocks for each query, on the target."""
    lens: Array
    """The end of what each query sees."""
    on_host: Ints
    """The same on the host."""
    begins: Ints
    """Where it begins."""


class StepMetadata(NamedTuple):
    """Metadata that a cache and its step share, hidden from users."""

    written: NDArray[np.bool_]  #: which layers have rows of the new tokens
    kept: list[int]  #: how much of each sequence, once the step has ended
    tree: Tree | None  #: what the new tokens are drafts of, if they are trees
    state_slots: NDArray[np.int32] | None  #: what takes the states of the sequences


class Step:
    """New tokens of some sequences, with blocks for them in every layer; made by `PagedKVCache.reserve`.

    Parameters
    ----------
    store : BlockStore
        Buffers of the cache that the step belongs to.
    sequences : dict of int to SequenceState
        The sequences, in order; their block tables have room for the new tokens.
    new_lens : int64 array (num_seqs,)
        How many tokens each of them gets.
    metadata : StepMetadata
        The cache's metadata of it.
    into : StepTables, optional
        Where its tables lie; else in memory of their own.

    Attributes
    ----------
    open : bool
        Whether it has neither been committed nor rolled back.
    positions : int64 array (num_tokens,)
        Position of each new token in its sequence, on the host; of a tree's tokens by their depth.

    Notes
    -----
    Threads: different open steps may be written and attended to at once, a step by one thread at a time; a second one
    gets `NumkvError`. A step cannot be copied or pickled, as its blocks are the cache's.

    A step in a `StepBuffers` needs rows for all of the buffers' tokens, and its calls can be captured: see
    docs/cuda.md. Captured calls write nothing; call `mark_written` when the graph has been launched.
    """

    def __init__(
        self,
        store: BlockStore,
        sequences: dict[int, SequenceState],
        new_lens: Ints,
        metadata: StepMetadata,
        into: StepTables | None = None,
    ) -> None:
        self._store, self._buffers = store, into
        self._written, self._kept, self._tree, state_slots = metadata
        tree = self._tree
        self.sequences, self.new_lens = tuple(sequences), new_lens
        self.open, self._access = True, Access()
        lens = np.array([state.length for state in sequences.values()], np.int64) + new_lens
        starts = np.zeros(len(lens) + 1, np.int64)  # of each sequence's tokens among all
        np.cumsum(new_lens, out=starts[1:])
        of_token = np.arange(len(lens)).repeat(new_lens)
        places = (lens - starts[1:])[of_token] + np.arange(len(of_token))
        self.positions = places if tree is None else (lens - new_lens)[of_token] + tree.depths
        self._ends = lens.tolist()
        self._longest = max(self._ends, default=0)
        self._slots_written = store.without_states.copy()
        if state_slots is not None:
            before = np.array([state.slot for state in sequences.values()], np.int32)
            read = np.where(before < 0, state_slots, before).astype(np.int32)
            self._state_slots = read, state_slots
        self._copies: dict[int, tuple[Any, ...]] = {}
        self._prefixes: dict[Any, list[Prefix]] = {}  # by group and length
        self._bound: list[dict[int, Any]] = []  # layers that bound calls may still write to
        groups = range(len(store.groups))
        tables = [store.block_table(sequences.values(), group) for group in groups]
        block, offset = np.divmod(places, store.block_size)
        slots = [table[of_token, block].astype(np.int64) * store.block_size + offset for table in tables]  # fmt: skip
        self._places = places
        self._begin_bounds(tables, lens)
        self._begin_in_full(list(sequences.values()))
        if tree is not None:
            tree.put(store.target, slots)
        if into is None:
            self._rows, self._widths = len(self.positions), [table.shape[1] for table in tables]
            if store.again is not None:  # of few widths, so that calls repeat
                tables = [widened(table) for table in tables]
            host = [self.positions, lens, starts, *slots]
            wanted = [(x, np.int64) for x in host] + [(table, np.int32) for table in tables]
            self._positions, self._lens, self._starts, *found = store.target.index_all(wanted)
            self._slots, self._tables = found[: len(tables)], found[len(tables) :]
            self._one_each = bool((new_lens == 1).all())
            if self._one_each:
                store.target.mark_queries(self._starts, "one each")
        else:
            self._one_each = False
            into.fill(self.positions, lens, starts, slots, tables)
            self._positions, self._lens, self._starts, self._slots, self._tables = into.arrays()
            store.target.mark_queries(self._starts, "fewer")
            self._rows, self._longest = into.num_tokens, into.max_length
            self._widths = [table.shape[1] for table in self._tables]
        self._ranges = {
            number: store.target.index(group.ranges(self.positions), np.int64)
            for number, group in enumerate(store.groups)
            if group.chunk
        }
        self._place = store.target.place()
        self._noting: Marker | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.positions)

    @property
    def unwritten_layers(self) -> list[int]:
        """Layers without rows or states of the new tokens so far; none if there are no new tokens."""
        done = self._written & self._slots_written
        missing: list[int] = np.flatnonzero(~done).tolist() if self.num_tokens else []
        return missing

    @streamed
    def arrays(self, layer: int) -> CacheArrays:
        """Return the arrays of a layer with the step's tables and slots, for your own kernels.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        CacheArrays
            Arrays of the target. Rows of `block_table` and `context_lens`, int32, are the step's sequences, with the
            new tokens. `slots`, int64, are those of the new tokens, sequence after sequence. The tables are copies,
            valid until the step ends. The step does not notice your writes: `append` or `write` each layer, or call
            `mark_written`. A step in a `StepBuffers` has arrays of the buffers' lengths: further sequences have length
            0, further tokens slot -1.

        Raises
        ------
        NumkvError
            If the step has ended.
        IndexError
            If there is no such layer.
        """
        layer, pool, group = self._layer(layer)
        self._store.refuse_groups("arrays", "call `attention`, or take int8 or int4")
        copies = self._copies.get(group)
        if copies is None or pool.target.values_on_host:
            to_host, index = pool.target.to_host, pool.target.index
            given = (
                (to_host(self._tables[group])[:, : self._widths[group]], np.int32),
                (self._lens, np.int32),
                (self._slots[group], np.int64),
            )
            # A user's kernel may write into them; attention goes by the step's own.
            made = tuple(index(np.array(to_host(x), dtype), dtype) for x, dtype in given)
            copies = self._copies[group] = made
        return cache_arrays(pool, *copies)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported(
            "a Step cannot be copied or pickled: commit it or roll it back, and copy the cache"
        )

    def __repr__(self) -> str:
        state = "open" if self.open else "ended"
        return f"<Step: {state}, {self.num_tokens} new tokens of {len(self.sequences)} sequences>"

    def __runs_on__(self) -> tuple[Target, Any]:
        return self._store.target, self._store.pools[0].k

    def _check_open(self, name: str = "") -> None:
        if not self.open:
            raise NumkvError(f"{name}{_ENDED}")

    def _layer(self, layer: int) -> tuple[int, Pool, int]:
        """Return a layer's number as an int, its pool and the number of its group."""
        self._check_open()
        layer = check_index("layer", layer, self._store.num_layers)
        return layer, *self._store.place(layer)

    def __rows__(self, layer: int) -> Rows:
        """A layer's rows for other queries than the step's own."""
        _, pool, group = self._layer(layer)
        return Rows(pool, self._tables[group], self._lens)

    @writes
    def append(self, layer: int, k: Any, v: Any = None, *, check_finite: bool = True) -> None:
        """Write ready rows of the new tokens.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v : array (num_tokens, num_kv_heads, head_dim)
            Rows of all sequences, one after another; no `v` where V is a part of K (``v_kind="latent"``).
        check_finite : bool
            Whether rows to be quantised are checked for NaN and infinity. On the CPU they are checked first. On CUDA
            the kernel that writes them checks, and a later call raises, `PagedKVCache.commit` at the latest.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, NonFiniteInput, IndexError
            See `numkv.ContiguousLayer.append`; nothing is written.
        """
        layer, pool, group = self._layer(layer)
        self._store.refuse_sharing("append", layer)
        slots = self._slots[group]
        if self._buffers is None and self._store.layers.residual is None:
            if fast_path.pool_append(pool, k, v, slots, 0, 0, check_finite, True) >= 0:
                self._written[layer] = True
                return
        if self._again is None:
            with self._on(k, v):
                self._append_here(layer, pool, slots, k, v, check_finite)
            return
        self._append_again(layer, pool, group, k, v, check_finite)

    def _append_again(
        self, layer: int, pool: Pool, group: int, k: Any, v: Any, check_finite: bool
    ) -> None:  # fmt: skip
        """Append as an earlier call did, or in the general way."""
        again = self._store.again
        what = "append", layer, check_finite, len(self.positions)
        call, own = again.find(what, (k, v), pool.k, self._place), self._slots[group]
        if call.replay is not None:
            self._refuse_bad()
            numbers = (0, self._look(call.replay.note))
            if call.run((again.pointer(own),), numbers) is None:
                self._written[layer] = True
                return
        call.long(
            lambda: self._append_here(layer, pool, own, k, v, check_finite), lambda: (own,),
            lambda: self._store.reports.latest, after=self._place,
        )  # fmt: skip

    def _append_here(
        self, layer: int, pool: Pool, slots: Array, k: Any, v: Any, check_finite: bool
    ) -> None:
        """Write rows on the stream of the call."""
        captured = self._captured("append")
        self._refuse_bad()
        check_finite = check_flag("check_finite", check_finite, True)
        first = check_finite and pool.looks_first
        k, v = pool.check_rows(k, v, check_finite=first)
        self._check_tokens("k", int(k.shape[0]))
        self._store.reports.look_for_nothing()
        look = pool.watch(k, v, self._marker(captured)) if check_finite and not first else 0
        if (twin := self._twin_of(layer)) is not None:
            in_full, its_slots = twin
            check_apart(pool.target, in_full.written("k_full", "v_full"), {"k": k, "v": v})
            in_full.scatter(k, v, its_slots)
        pool.scatter(k, v, slots, look)
        self._quantise_groups(layer, pool)
        self._written[layer] |= not captured

    @writes
    def write(
        self,
        layer: int,
        qkv: Any,
        *,
        num_q_heads: int,
        cos: Any = None,
        sin: Any = None,
        qk_mode: QKMode | int,
        q_norm_weight: Any = None,
        k_norm_weight: Any = None,
        eps: float = 1e-6,
        q_out: Any = None,
        check_finite: bool = True,
    ) -> Array:
        """Split and normalise the new tokens' projections, apply RoPE, and write K and V, in one pass.

        Parameters
        ----------
        layer : int
            Which layer.
        qkv : array (num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
            Projections of all sequences, one after another.
        num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out, check_finite
            See `numkv.ContiguousLayer.write`; angles are those of `positions`.

        Returns
        -------
        array (num_tokens, num_q_heads, head_dim)
            q, in qkv's dtype.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, NonFiniteInput, IndexError, ValueError
            See `numkv.ContiguousLayer.write`; nothing is written.
        """
        layer, pool, group = self._layer(layer)
        self._store.refuse_sharing("write", layer)
        slots = self._slots[group]
        in_full = self._store.layers.residual is not None
        if self._buffers is None and not in_full:
            tokens, q = fast_path.pool_write(
                pool, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out,
                self._positions, 0, slots, 0, 0, check_finite,
            )  # fmt: skip
            if tokens >= 0:
                self._written[layer] = True
                return q
        given = (
            qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out
        )  # fmt: skip
        if self._again is not None:
            return self._write_again(layer, pool, slots, given, check_finite)
        with self._on(qkv):
            return self._write_here(layer, pool, slots, given, check_finite).q_out

    def _write_again(
        self, layer: int, pool: Pool, slots: Array, given: tuple[Any, ...], check_finite: bool
    ) -> Array:  # fmt: skip
        """Write as an earlier call did, or in the general way."""
        qkv, num_q_heads, cos, sin, qk_mode, q_weight, k_weight, eps, q_out = given
        kinds = type(num_q_heads), type(qk_mode), type(eps)
        what = "write", layer, kinds, num_q_heads, qk_mode, eps, check_finite, len(self.positions)
        arrays = (qkv, cos, sin, q_weight, k_weight, q_out)
        again, own = self._store.again, (slots, self._positions)
        call = again.find(what, arrays, pool.k, self._place)
        if call.replay is not None:
            self._refuse_bad()
            positions, looked_at = call.replay.note
            if positions < 0 or max(self._ends, default=0) <= positions:
                numbers = (0, self._look(looked_at))
                q = call.run([*map(again.pointer, own)], numbers)
                if q is not again.missed:
                    self._written[layer] = True
                    return q
        made: list[Projection] = []

        def write() -> Array:
            made.append(self._write_here(layer, pool, slots, given, check_finite))
            return made[0].q_out

        def note() -> tuple[int, Any]:
            return int(made[0].cos.shape[0]) if made[0].rotates else -1, self._store.reports.latest

        found: Array = call.long(write, lambda: own, note, frozenset({5}), self._place)
        return found

    def _write_here(
        self, layer: int, pool: Pool, slots: Array, given: tuple[Any, ...], check_finite: bool
    ) -> Projection:
        """Write projections on the stream of the call."""
        captured = self._captured("write")
        self._refuse_bad()
        p = Projection.check(pool, *given)
        if (twin := self._twin_of(layer)) is not None:
            of_call = {"qkv": p.qkv, "q_out": p.q_out}
            check_apart(pool.target, twin[0].written("k_full", "v_full"), of_call)
        self._put("qkv", pool, slots, p, check_finite, captured)
        if twin is not None:
            p.scatter(*twin, self._positions)
        self._quantise_groups(layer, pool)
        self._written[layer] |= not captured
        return p

    @writes
    def attention(
        self,
        layer: int,
        q: Any,
        *,
        shared_len: int = 0,
        out: Any = None,
        return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Any:
        """Attend with the new tokens' queries, each to itself and earlier tokens (in a tree: its path) in its window.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of all sequences, one after another.
        shared_len : int
            Number of first tokens that are read once for all sequences that begin with the same blocks; see
            `numkv.cascade_attention`.
        out, return_lse
            See `numkv.decode_attention`.
        **options
            All of `numkv.AttentionOptions` but `window_left`, which is the layer's; a tree's mask is the step's.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype.
        lse : float32 array (num_tokens, num_q_heads)
            Natural log of the sum of exponentials; only with `return_lse`.

        Raises
        ------
        NumkvError
            If the layer has no rows of the new tokens yet.
        DimensionMismatch, UnsupportedDType, NotSupported, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        layer, pool, group = self._layer(layer)
        checked = self._asked(group, options, return_lse, out)
        if type(shared_len) is not int:
            shared_len = check_size("shared_len", shared_len, 0)
        if (
            self._again is None or shared_len or checked.sight is not None
            or self._store.groups[group].chunk or not self._has_rows(layer)
        ):  # fmt: skip
            with self._on(q):
                return self._attend_here(layer, pool, group, q, checked, shared_len)
        return self._attend_again(layer, pool, group, q, checked)

    def _asked(
        self, group: int, options: Mapping[str, Any], return_lse: bool, out: Any
    ) -> CheckedOptions:
        """Options of a call, with the window of its layer and the mask of the step's tree."""
        of = self._store.groups[group]
        if self._tree is not None:
            options = self._tree.seen(options)
        checked = check_options(options, return_lse, out, takes=OF_A_LAYER, window_left=of.window)
        if of.chunk and checked.sight is not None:
            raise NotSupported(
                f"attention: expected a layer with a window or without for trees and other sights, got one whose "
                f"queries attend within chunks of {of.chunk} tokens"
            )
        return checked

    def _attend_again(
        self, layer: int, pool: Pool, group: int, q: Any, options: CheckedOptions
    ) -> Any:
        """Attend as an earlier call did, or in the general way."""
        sm_scale, cap, _, sinks, return_lse, out, _ = options
        again, own = self._store.again, (self._tables[group], self._lens, self._starts)
        sizes = own[0].shape, len(self.positions), self._one_each
        what = "attend", layer, sm_scale, cap, return_lse, *sizes
        call = again.find(what, (q, sinks, out), pool.k, self._place)
        if call.replay is not None:
            found = call.run([*map(again.pointer, own)])
            if found is not again.missed:
                return found
        return call.long(
            lambda: self._attend_here(layer, pool, group, q, options), lambda: own, lambda: None,
            frozenset({2}), self._place,
        )  # fmt: skip

    def _attend_here(
        self,
        layer: int,
        pool: Pool,
        group: int,
        q: Any,
        options: CheckedOptions,
        shared_len: int = 0,
    ) -> Any:
        """Attend on the stream of the call."""
        self._captured("attention")
        q = self._check_queries(layer, pool, q)
        if self._store.layers.twin(layer) is not None:
            if shared_len:
                self._store.refuse_residual("`shared_len`", "pass 0, or use one without")
            parts = self._parts_in_full(layer, options)
            return attend_to_parts(parts, q, self._lens, self._starts, options)
        args = pool, self._tables[group], q, self._lens, self._starts, options
        if shared_len:
            return attend_cascade(*args, *self._shared(group, shared_len, options.window_left))
        return attend(*args, ranges=self._ranges.get(group))

    def _shared(self, group: int, shared_len: Any, window_left: int) -> tuple[int, list[Prefix]]:
        """Return how many first tokens are attended to apart, and which tokens see which prefix: looked up once a step.

        Layers with a window attend to all tokens at once.
        """
        shared = check_size("shared_len", shared_len, 0)
        if self._buffers is not None:
            raise NotSupported("`shared_len`: expected 0 for a step that lies in StepBuffers")
        if window_left >= 0:
            return 0, []
        new_lens = self.new_lens.tolist()
        first = min(
            (end - n for end, n in zip(self._ends, new_lens, strict=True) if n), default=shared
        )
        if shared > first:
            raise IndexError(
                f"`shared_len`: expected at most the {first} tokens before a sequence's new ones, got {shared}"
            )
        key = group, shared
        if key not in self._prefixes:
            table = self._store.target.to_host(self._tables[group])
            blocks = -(-shared // self._store.block_size)
            found: dict[bytes, list[int]] = {}
            of: dict[bytes, int] = {}
            begin = 0
            for seq, n in enumerate(new_lens):
                if n:
                    content = table[seq, :blocks].tobytes()
                    of.setdefault(content, seq)
                    found.setdefault(content, []).extend(range(begin, begin + n))
                begin += n
            self._prefixes[key] = [Prefix(of[x], np.array(tokens)) for x, tokens in found.items()]
        return shared, self._prefixes[key]

    @writes
    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        **options: Unpack[AttentionOptions],
    ) -> Array:
        """Sum the attention that each token of the step's sequences gets from the new tokens' queries.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of all sequences, one after another.
        lse : float32 array (num_tokens, num_q_heads), optional
            The lse of `attention` with ``return_lse=True`` for these queries and options. It is computed if None, which
            costs as much as that call.
        **options
            `sm_scale` and `logits_soft_cap`: see `numkv.AttentionOptions`.

        Returns
        -------
        float32 array (num_seqs, num_kv_heads, longest)
            Sums over each sequence's queries and the q heads of a GQA group, for its tokens, including the new ones.
            They are 0 past its last token and outside the layer's window. See `numkv.attention_weights`.

        Raises
        ------
        NumkvError
            If the layer has no rows of the new tokens yet.
        DimensionMismatch, UnsupportedDType, NotSupported, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        layer, pool, group = self._layer(layer)
        with self._on(q):
            self._captured("attention_weights")
            Tree.refuse(self._tree, "attention_weights")
            self._store.refuse_chunks("attention_weights", layer)
            q = self._check_queries(layer, pool, q)
            window = self._store.groups[group].window
            checked = check_options(options, takes=SCORES, window_left=window)
            if self._store.layers.twin(layer) is not None:
                parts = self._parts_in_full(layer, checked)
                return mass_of_parts(
                    parts, q, self._lens, self._starts, self._longest, checked, lse
                )
            found = attention_mass(
                pool, self._tables[group], q, self._lens, self._starts, self._longest, checked, lse=lse
            )  # fmt: skip
            return found if self._buffers is None else found[: self._buffers.num_seqs]

    @writes
    def _begin_bound(self, make: Callable[[NewTokens], BoundStep]) -> BoundStep:
        """Begin to write and attend by bound calls."""
        store = self._store
        self._check_open("`new`: ")
        if self._buffers is not None:
            raise NotSupported(
                "`new`: expected a step in memory of its own, got one that lies in StepBuffers; call its methods"
            )
        Tree.refuse(self._tree, "begin")
        own = self._tables, self._lens, self._starts, self._slots, store.block_size
        hooks = self._append_attend, self._ended, self._bound
        args = self._access, self.num_tokens, store, *own, *hooks
        return make(NewTokens(*args, written=self._written, place=self._place))

    def _append_attend(
        self, layer: int, q: Array, k: Any, v: Any, options: CheckedOptions, check_finite: bool
    ) -> Any:
        """Append rows, if the layer has any of its own, and attend, all checked; for bound calls."""
        store, (layer, pool, group) = self._store, self._layer(layer)
        if k is not None:
            if pool.target.values_on_host:
                pool.scatter(k, v, self._slots[group])
                self._written[layer] = True
            elif store.again is None:
                self._append_here(layer, pool, self._slots[group], k, v, check_finite)
            else:
                self._append_again(layer, pool, group, k, v, check_finite)
        try:
            if k is None or store.again is None or store.groups[group].chunk:
                return self._attend_here(layer, pool, group, q, options)
            return self._attend_again(layer, pool, group, q, options)
        except BaseException:
            if k is not None:
                self._written[layer] = False
            raise

    def _ended(self, layer: int) -> str:
        """Return the error for a layer that bound calls cannot call."""
        if not self.open:
            return _ENDED
        if layer not in self._store.layer_pools:
            return f"`layer`: expected one with rows, got layer {layer}, which has none: see `Step.state`"
        return f"`layer`: expected one that has not been called in this step, got {layer}; call each layer once"

    def _states(self, layer: int) -> tuple[StateMemory, int]:
        self._check_open()
        number, slots = check_index("layer", layer, self._store.num_layers), self._store.states
        if slots is None or number not in slots.shapes:
            raise NotSupported(f"`layer`: expected one that keeps states, got layer {number}")
        return slots, number

    def state(self, layer: int) -> StepState:
        """Return the arrays of a layer's states, with the slots to read and to write; for your own kernels.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        StepState
            ``x[write[i]] = f(x[read[i]])`` is a step of sequence i. Write to all slots of `write` and to no others,
            then call `mark_written`. `read_state` and `write_state` do it for you.

        Raises
        ------
        NumkvError
            If the step has ended.
        NotSupported
            If the layer keeps no states.
        IndexError
            If there is no such layer.
        """
        slots, number = self._states(layer)
        read, write = self._state_slots
        return StepState(slots.arrays[number], read.copy(), write.copy())

    @streamed
    def read_state(self, layer: int) -> tuple[Array, ...]:
        """Copies of a layer's states as they were before the step.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        tuple of array (num_seqs, *shape)
            One for each array of the layer; zeros for a sequence without tokens.

        Raises
        ------
        NumkvError, NotSupported, IndexError
            See `state`.
        """
        slots, number = self._states(layer)
        return tuple(slots.gathered(slots.arrays[number], self._state_slots[0]))

    @streamed
    def write_state(self, layer: int, *states: Any) -> None:
        """Write a layer's states after the step's tokens.

        Parameters
        ----------
        layer : int
            Which layer.
        *states : array (num_seqs, *shape)
            One for each array of the layer, of its dtype.

        Raises
        ------
        DimensionMismatch, UnsupportedDType
            If an array has another shape or dtype, or there are more or fewer; nothing is written.
        NumkvError, NotSupported, IndexError
            See `state`.
        """
        self._write_state(layer, states)

    @whole
    def _write_state(self, layer: int, states: tuple[Any, ...]) -> None:
        slots, number = self._states(layer)
        shapes = slots.shapes[number]
        what = f"{len(shapes)} arrays, which layer {number} keeps"
        check_count("states", what, len(shapes), len(states))
        checked = [
            check_array(
                slots.target, "states", x, (np.dtype(of.dtype),), (len(self.sequences), *of.shape)
            )
            for x, of in zip(states, shapes, strict=True)
        ]
        slots.scatter(checked, slots.arrays[number], self._state_slots[1])
        self._slots_written[number] = True

    @whole
    def mark_written(self, layer: int | None = None) -> None:
        """Mark all rows and states of the new tokens as written, by your own kernel or a CUDA graph.

        Parameters
        ----------
        layer : int, optional
            In which layer; in all of them if None.

        Raises
        ------
        NumkvError
            If the step has ended.
        IndexError
            If there is no such layer.
        NotSupported
            If the cache stores tokens in full precision, whose rows are written separately.
        """
        self._store.refuse_residual("mark_written", "write by `append` or `write`")
        every = slice(None)
        number = every if layer is None else check_index("layer", layer, self._store.num_layers)
        self._check_open()
        self._written[number] = self._slots_written[number] = True

    @writes
    def write_latents(
        self,
        layer: int,
        rows: Any,
        *,
        qk_mode: QKMode | int,
        cos: Any = None,
        sin: Any = None,
        norm_weight: Any = None,
        eps: float = 1e-6,
        check_finite: bool = True,
    ) -> None:
        """Apply RMS norm to the new tokens' latents and RoPE to the keys behind them, and write both, in one pass.

        Parameters
        ----------
        layer : int
            Which layer.
        rows : array (num_tokens, num_kv_heads, head_dim)
            Rows of all sequences, one after another.
        qk_mode, cos, sin, norm_weight, eps, check_finite
            See `numkv.ContiguousLayer.write_latents`; angles are those of `positions`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, NonFiniteInput, IndexError, ValueError
            See `numkv.ContiguousLayer.write_latents`; nothing is written.
        """
        layer, pool, group = self._layer(layer)
        self._store.refuse_sharing("write_latents", layer)
        with self._on(rows):
            captured = self._captured("write_latents")
            self._refuse_bad()
            p = LatentRows.check(pool, rows, qk_mode, cos, sin, norm_weight, eps)
            self._put("rows", pool, self._slots[group], p, check_finite, captured)
            self._written[layer] |= not captured

    def _put(
        self, name: str, pool: Pool, slots: Array, p: Projection | LatentRows, check_finite: bool, captured: bool
    ) -> None:  # fmt: skip
        """Write what checked projections give, unless they are others' tokens, too far on, or not finite."""
        self._check_tokens(name, p.num_tokens)
        # A captured call may run with any position that fits.
        last = self._longest - 1 if captured else self.positions.max(initial=-1)
        if p.rotates and last >= p.cos.shape[0]:
            raise IndexError(
                f"`cos`: expected a row for position {last}, got {p.cos.shape[0]} rows; make the tables longer"
            )
        looks = check_flag("check_finite", check_finite, True)
        if looks and pool.looks_first:
            p.check_finite(pool)
            looks = False
        self._store.reports.look_for_nothing()
        p.scatter(
            pool, slots, self._positions, p.watch(pool, self._marker(captured)) if looks else 0
        )

    def _begin_bounds(self, tables: list[NDArray[np.int32]], lens: Ints) -> None:
        """Note which blocks the step writes to, and from which row on."""
        bounds: BlockBounds | None = self._store.bounds
        if bounds is None:
            return
        size, starts = self._store.block_size, lens - self.new_lens
        self._host_tables, self._host_lens = tables, lens
        self._reads: dict[tuple[int, int | None], _Read] = {}
        begin = starts // size
        counts = np.where(self.new_lens > 0, -(-lens // size) - begin, 0)
        seq = np.arange(len(lens)).repeat(counts)
        within = np.arange(len(seq)) - (np.cumsum(counts) - counts)[seq]
        logical = begin[seq] + within
        first = np.maximum(starts[seq] - logical * size, 0)
        first -= first % max(1, *self._store.layers.groups)  # token groups are quantised as a whole
        for table in tables:
            bounds.lower(table[seq, logical], first)

    def _read(self, group: int, twin: int | None) -> _Read:
        """Return the blocks that queries of a group's layers with this copy may read, looked up once a step."""
        store = self._store
        key = group, None if twin is None else store.place(twin)[1]
        found = self._reads.get(key)
        if found is not None:
            return found
        table, lens, size = self._host_tables[group], self._host_lens, store.block_size
        of_token = np.arange(len(lens)).repeat(self.new_lens)
        seen, begins = self._places + 1, np.zeros_like(self._places)
        if twin is not None:
            begins, seen = self._seen_in_full[store.place(twin)[1], -1].on_host.T
        ends = np.zeros_like(lens)
        np.maximum.at(ends, of_token, seen)
        counts = -(-ends // size)
        seq = np.arange(len(lens)).repeat(counts)
        logical = np.arange(len(seq)) - (np.cumsum(counts) - counts)[seq]
        rows = np.minimum(ends[seq] - logical * size, size)
        written = logical >= ((lens - self.new_lens) // size)[seq]
        on_target: tuple[Array, Array] = self._tables[group], self._lens
        if not self._one_each or twin is not None:
            index = store.target.index
            on_target = index(table[of_token], np.int32), index(seen, np.int64)
        found = _Read(table[seq, logical], rows, written, *on_target, seen, begins)
        self._reads[key] = found
        return found

    @writes
    def sparse_attention(
        self,
        layer: int,
        q: Any,
        *,
        most_blocks: int,
        first: int = 1,
        newest: int = 1,
        out: Any = None,
        return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Any:
        """Attend with the new tokens' queries to the blocks with the highest bounds, exactly within these.

        For a cache that was made with ``key_bounds=True``. Each kv head chooses for each query, by Quest's bound; see
        `numkv.sparse`. Blocks are bounded here, as far as they have changed since.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of all sequences, one after another. If a sequence has several, each chooses and reads its own
            blocks, as if it came alone. That suits drafts; for a prompt `attention` is faster.
        most_blocks : int
            Blocks to read. A query that sees no more reads all of them, with the result of `attention`. The results are
            equal bit for bit on the CPU and with one query a sequence.
        first, newest : int
            How many of the first and of the newest blocks are always read, whatever their bounds; at least one of the
            newest. If a layer has tokens in full precision, these are always read in addition. Blocks are then chosen
            among those that a query reads as codes.
        out, return_lse
            See `numkv.decode_attention`.
        **options
            `sm_scale`, `logits_soft_cap` and `sinks`: see `numkv.AttentionOptions`.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype.
        lse : float32 array (num_tokens, num_q_heads)
            Natural log of the sum of exponentials over the chosen blocks; only with `return_lse`.

        Raises
        ------
        NumkvError
            If the layer has no rows of the new tokens yet.
        NotSupported
            If the cache has no bounds, the step has a tree or is in `StepBuffers`, or a window or chunk of the layer
            spans more than `most_blocks`. Shorter ones are read whole, as by `attention`.
        DimensionMismatch
            If `most_blocks` is less than `first` and `newest` together, or a shape does not fit.
        UnsupportedDType, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        layer, pool, group = self._layer(layer)
        store = self._store
        if store.bounds is None:
            raise NotSupported(
                "sparse_attention: expected a cache that keeps bounds of its keys, got one without; make it with "
                "key_bounds=True"
            )
        if self._buffers is not None:
            raise NotSupported(
                "sparse_attention: expected a step with tables of its own, got one that lies in StepBuffers, as which "
                "blocks are to be bounded is found on the host"
            )
        Tree.refuse(self._tree, "sparse_attention")
        twin = store.layers.twin(layer)
        least = 0 if twin is None else store.blocks_for(store.layers.keeps(twin))
        counts = check_counts("most_blocks", most_blocks, first, newest, least)
        window = store.groups[group].window
        checked = check_options(options, return_lse, out, takes=WITH_SINKS, window_left=window)
        with self._on(q):
            if self._reads_all(group, layer, counts[0], checked.sinks):
                return self._attend_here(layer, pool, group, q, checked)
            return self._attend_sparsely(layer, twin, q, counts, checked)

    def _reads_all(self, group: int, layer: int, most: int, sinks: Any) -> bool:
        """Return whether `attention` is all there is to do; refuse windows that would have to be cut."""
        of, size = self._store.groups[group], self._store.block_size
        if of.chunk or of.window >= 0:
            tokens = of.chunk or of.window + 1
            blocks = (tokens - 2) // size + 2  # wherever they begin
            if blocks > most:
                kind = "chunks" if of.chunk else "a window"
                raise NotSupported(
                    f"sparse_attention: expected a layer without a window, or one within `most_blocks`, got layer "
                    f"{layer} with {kind} of {tokens} tokens, up to {blocks} blocks, and {most}; call `attention`"
                )
            return True
        # The same bits as those of a choice of all blocks, so that nothing depends on the batch.
        whole = self._one_each and sinks is None and self._longest <= most * size
        return bool(whole and self._store.target.values_on_host)

    def _attend_sparsely(
        self, layer: int, twin: int | None, q: Any, counts: tuple[int, int, int], options: CheckedOptions
    ) -> Any:  # fmt: skip
        """Bound, choose and attend, on the stream of the call."""
        self._captured("sparse_attention")
        store, size = self._store, self._store.block_size
        pool, group = store.place(layer)
        q = self._check_queries(layer, pool, q)
        read_first = pool if twin is None else store.place(twin)[0]
        options = check_call(q, options, (read_first, pool), {})  # before anything is bounded
        read, part = self._read(group, twin), store.places[store.layers.sources[layer]][0]
        assert store.bounds is not None
        low, high = store.bounds.update(part, pool, read.blocks, read.counts, read.written)
        scores = scores_of(pool, q, low, high, read.table, read.lens, size, options)
        tables, lens = chosen(pool.target, scores, read.table, read.lens, size, counts)
        if twin is None and are_numbered(pool):
            return attend_to_choice(pool, tables, lens, q, options)
        # As many for all heads: all blocks are full but for the newest one, which is always read.
        used = -(-read.on_host // size)
        tokens = read.on_host - np.maximum(used - counts[0], 0) * size
        lens = pool.target.index(tokens, np.int64)
        if twin is None:
            return attend_by_head(pool, tables, lens, q, options)
        ranges = pool.target.index(np.stack([read.begins, tokens], 1), np.int64)
        seen = self._seen_in_full[store.place(twin)[1], -1]._replace(codes=None)
        in_full = parts_of(store, layer, twin, self._tables.__getitem__, seen)
        return run_parts(
            in_full, q, self._lens, self._starts, options,
            lambda wide, asked: attend_by_head(pool, tables, lens, wide, asked, ranges),
        )  # fmt: skip

    def _begin_in_full(self, states: Sequence[SequenceState]) -> None:
        """Note what sequences have in full as the step begins, and what its queries read where."""
        self._seen_in_full: dict[tuple[int, int], Ranges] = {}
        store = self._store
        if store.layers.residual is None:
            return
        groups = range(len(store.groups))
        first = [[store.first_stored(state, group) for state in states] for group in groups]
        self._first_in_full = np.array(first, np.int64).reshape(len(groups), len(states))
        self._find_groups(states)
        # Now, as the step's tables: calls on any stream come after them.
        made: dict[Any, Ranges] = {}
        for layer in store.layers.storing:
            twin = store.layers.twin(layer) if layer < store.num_layers else None
            if twin is None:
                continue
            group, window = store.place(twin)[1], store.layers.windows[layer]
            # Most groups differ in their blocks alone. Keys by channel are read in full by chunks of a group.
            chunk = store.groups[group].chunk
            alike = window, chunk, store.layers.keeps(twin), self._first_in_full[group].tobytes()
            if alike not in made:
                queries = self._queries_in_full(twin)
                seen = queries.seen(None, window, store.target)
                made[alike] = ranges_of(store, twin, queries, seen)
            self._seen_in_full[group, window] = made[alike]

    def _queries_in_full(self, twin: int) -> Queries:
        """Return the step's queries, as they see a layer that has this twin."""
        of_token = np.arange(len(self._ends)).repeat(self.new_lens)
        lens = np.array(self._ends, np.int64)[of_token]
        first = self._first_in_full[self._store.place(twin)[1]]
        return Queries(self._places, lens, first[of_token])

    def _twin_of(self, layer: int) -> tuple[Pool, Array] | None:
        """Return the pool in which a layer's rows are in full, and the slots of the step's tokens there."""
        twin = self._store.layers.twin(layer)
        if twin is None:
            return None
        pool, group = self._store.place(twin)
        return pool, self._slots[group]

    def _find_groups(self, states: Sequence[SequenceState]) -> None:
        """Note which token groups are complete with the step's tokens, and where they lie: see `Pool.quantise`."""
        self._groups_of: dict[int, tuple[Array, Array]] = {}
        store, index = self._store, self._store.target.index
        made: dict[Any, tuple[Array, Array]] = {}
        by_layer = store.layers.groups
        for layer in store.layers.storing:
            some, twin = by_layer[layer], layer + store.num_layers
            if not some:
                continue
            groups = tuple(store.place(x)[1] for x in (twin, layer))
            if groups not in made:
                none = np.empty(0, np.int64)
                places: tuple[list[Any], ...] = ([none], [none])
                for state, end, n in zip(states, self._ends, self.new_lens.tolist(), strict=True):
                    first = np.arange((end - n) // some, end // some) * some
                    for found, group in zip(places, groups, strict=True):
                        slots = slots_of(state.tables[group], first, store.block_size)
                        found.append(slots // some)
                here, there = (index(np.concatenate(found), np.int64) for found in places)
                made[groups] = here, there
            self._groups_of[layer] = made[groups]

    def _quantise_groups(self, layer: int, pool: Pool) -> None:
        """Quantise the token groups that are complete, where keys are stored by channel."""
        if pool.by_channel and (twin := self._twin_of(layer)) is not None:
            pool.quantise(twin[0], *self._groups_of[layer])

    def _parts_in_full(self, layer: int, options: CheckedOptions) -> list[Part]:
        """Return the parts that the step's queries see in a layer with a full-precision copy."""
        store, twin = self._store, self._store.layers.twin(layer)
        assert twin is not None
        if options.sight is None:
            ranges = self._seen_in_full[store.place(twin)[1], options.window_left]
        else:
            queries = self._queries_in_full(twin)
            seen = queries.seen(options.sight, options.window_left, store.target)
            ranges = ranges_of(store, twin, queries, seen)
        return parts_of(store, layer, twin, self._tables.__getitem__, ranges)

    def _look(self, looked_at: Any) -> int:
        """A number for a call that is made again."""
        marker = None if looked_at is None else self._marker(False)
        return self._store.reports.look_again(looked_at, marker)

    def _captured(self, name: str) -> bool:
        """Return whether a CUDA graph captures the call; refused if tables may be freed before it."""
        if self._buffers is None:
            self._store.target.refuse_capture(f"Step.{name}")
            return False
        held: bool = self._store.target.hold(self._buffers, self._store)
        return held

    def _marker(self, captured: bool) -> Marker:
        """Return the receiver of bad new tokens, which keeps no large object alive."""
        if captured and self._buffers is not None:
            return self._buffers.marker()
        noting: Marker | None = self._noting
        if noting is None:
            store = weakref.ref(self._store)
            sequences, places, new_lens = self.sequences, self._places, self.new_lens
            kept, tree = self._kept, self._tree

            def mark(token: int, error: NonFiniteInput, call: int) -> None:
                of, ends = store(), np.cumsum(new_lens)
                i = int(np.searchsorted(ends, token, "right"))
                if tree is not None and kept:
                    token = tree.moved.get(token, int(ends[i]))
                if of is None or (kept and token - int(ends[i] - new_lens[i]) >= kept[i]):
                    return  # rolled back
                of.reports.tell(sequences[i], int(places[token]), error, call)

            noting = self._noting = self._store.reports.marker(mark)
        return noting

    def _refuse_bad(self) -> None:
        """Refuse to go on with a step of which a kernel has found rows to be NaN or infinite."""
        self._store.reports.collect()
        if self._store.reports:
            for seq, length in zip(self.sequences, self._ends, strict=True):
                self._store.reports.refuse(seq, length)

    @property
    def _again(self) -> Any:
        """The replays of repeated calls; None for steps in buffers, whose calls are for graphs."""
        alone = self._buffers is None and self._store.layers.residual is None
        return self._store.again if alone else None

    def _on(self, *arrays: Any) -> Any:
        """A context for what runs on a stream, after the step's tables have arrived there."""
        return self._store.target.on(*arrays, self._store.pools[0].k, after=self._place)

    def _end(self, keep: Ints) -> None:
        """Take no more rows; so many tokens of each sequence are kept."""
        self.open = False
        self._kept[:] = keep.tolist()
        for layers in self._bound:
            layers.clear()

    def _check_queries(self, layer: int, pool: Pool, q: Any) -> Array:
        """Check queries of a layer; without rows, its new blocks hold what another sequence may have left there."""
        checked = check_queries(pool.target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
        self._check_tokens("q", int(checked.shape[0]))
        if self._buffers is None and not self._has_rows(layer) and self.num_tokens:
            source = self._store.layers.sources[layer]
            raise NumkvError(
                f"`layer`: expected one with the step's rows, got layer {layer} without; "
                f"call step.append({source}, k, v) or step.write first, or step.mark_written({source})"
            )
        return checked

    def _has_rows(self, layer: int) -> bool:
        """Return whether new tokens' rows have been written to a layer, or to the one whose rows it reads."""
        return bool(self._written[self._store.layers.sources[layer]])

    def _check_tokens(self, name: str, tokens: int) -> None:
        if tokens != self._rows:
            whose = "step's" if self._buffers is None else "buffers'"
            check_count(name, f"rows of the {whose} {self._rows} tokens", self._rows, tokens)


def begin_bound(store: BlockStore, new: Any, make: Callable[[NewTokens], BoundStep]) -> BoundStep:
    """Begin to write and attend by bound calls in a step of these buffers."""
    if not isinstance(new, Step) or new._store is not store:
        raise NumkvError(
            "`new`: expected an open step of the bound cache, got "
            f"{'one of another' if isinstance(new, Step) else type(new).__name__}; pass what its `reserve` returned"
        )
    return new._begin_bound(make)
