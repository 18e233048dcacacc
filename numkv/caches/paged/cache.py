"""`PagedKVCache`: many sequences, all layers, one pool of blocks.

A *block* holds the K and V of `block_size` tokens in a *group* of layers. Layers that attend to everything make one
group; layers with a sliding window make groups of their own, whose blocks go back to the pool as the window leaves
them behind. All groups have as many layers (the greatest common divisor of what there is), so that their blocks have
one size and come from one free list.

Work goes in steps, because all layers write the same tokens::

    step = cache.reserve(sequences, new_lens)      # takes blocks for all of them, or raises CacheFull
    for layer in range(cache.num_layers):
        q = step.write(layer, qkv, ...)            # or step.append(layer, k, v)
        out = step.attention(layer, q)
    cache.commit(step, token_ids=...)              # or cache.rollback(step)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.attention.attend import attend, check_queries, too_many_queries
from numkv.attention.mass import weigh
from numkv.attention.options import check_options
from numkv.blocks.pool import BlockPool, PoolStats
from numkv.blocks.prefix import block_digests, token_ids
from numkv.blocks.tables import slot_mapping
from numkv.checks import check_index, check_integers, check_kept, check_size
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import fresh_blocks, plan_moves, relocate, slots_of
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.kinds import Kind, kinds_of
from numkv.storage.pool import Pool
from numkv.targets.base import Array
from numkv.writing import fast_path
from numkv.writing.fused_write import Projection, QKMode

__all__ = ["PagedKVCache", "PagedStats", "Step", "SwappedSequence"]

_SPREAD = 0x9E3779B97F4A7C15  # odd, so no two groups get the same; its bits look random

Ints = NDArray[np.int64]
Extra = Mapping[str, int | str | bytes]


@dataclass
class _Sequence:
    """What is known of one sequence."""

    length: int
    tables: list[NDArray[np.int32]]  # a block table per group; -1 where a window has moved on
    extra: Extra | None
    tokens: NDArray[np.int32]  # ids of the first tokens, as far as they are known
    digests: list[NDArray[np.uint8]]  # of the full blocks whose tokens are known, per group
    registered: int  # blocks that are findable already
    starts: list[int]  # first token per group whose rows compaction left; a table may begin later
    reserved: int | None = None  # tokens of the step that is open, if one is
    cached: int = 0  # tokens that came from the prefix cache when it was added
    pins: list[NDArray[np.int32]] = field(default_factory=list)  # blocks of each `pin`


@dataclass(frozen=True)
class PagedStats:
    """What a cache is like now.

    Attributes
    ----------
    num_seqs : int
        Sequences.
    num_tokens : int
        Tokens of all sequences, shared ones counted for each.
    unused_slots : int
        Slots in the sequences' last blocks, in full-attention groups, that hold no token.
    pool : PoolStats
        Blocks, and what has happened to them.
    """

    num_seqs: int
    num_tokens: int
    unused_slots: int
    pool: PoolStats


@dataclass(frozen=True)
class SwappedSequence:
    """A sequence in host memory, apart from any cache.

    Attributes
    ----------
    length : int
        Tokens.
    tokens : int32 array (n,)
        Ids of the first tokens, as far as they are known.
    extra : mapping or None
        What else the content depends on.
    geometry : tuple
        What a cache must be like to take it: sizes, kinds, windows, and the seed of its rotation or None.
    logical : list of int64 array
        Which blocks of each group's table are there.
    buffers : list of tuple of array
        K, V and their scales, of each layer of a group.
    starts : tuple of int
        First token of each group that there are rows of, where compaction moved it into a block; empty for 0.
    """

    length: int
    tokens: NDArray[np.int32]
    extra: Extra | None
    geometry: tuple[Any, ...]
    logical: list[NDArray[np.int64]] = field(repr=False)
    buffers: list[tuple[NDArray[Any], ...]] = field(repr=False)
    starts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and scales."""
        return sum(x.nbytes for layer in self.buffers for x in layer)


class Step:
    """New tokens of some sequences, with room for them in every layer; made by `PagedKVCache.reserve`.

    Parameters
    ----------
    cache : PagedKVCache
        Whose step it is.
    sequences : tuple of int
        The sequences, in order.
    new_lens : int64 array (num_seqs,)
        How many tokens each of them gets.

    Attributes
    ----------
    open : bool
        Whether it has neither been committed nor rolled back.
    positions : int64 array (num_tokens,)
        Position of each new token in its sequence, on the host.
    """

    def __init__(self, cache: PagedKVCache, sequences: tuple[int, ...], new_lens: Ints) -> None:
        self._cache = cache
        self.sequences = sequences
        self.new_lens = new_lens
        self.open = True
        starts = np.array([cache.length(s) for s in sequences], np.int64)
        lens = starts + new_lens
        self.positions = np.concatenate(
            [np.arange(a, b) for a, b in zip(starts, lens, strict=True)] or [np.empty(0, np.int64)]
        )
        place = cache._target
        self._positions = place.index(self.positions, np.int64)
        self._lens = place.index(lens, np.int64)
        self._longest = int(lens.max(initial=0))
        self._starts = place.index(np.concatenate([[0], np.cumsum(new_lens)]), np.int64)
        self._written = np.zeros(cache.num_layers, np.bool_)
        self._tables, self._slots = [], []
        for group in range(cache.num_groups):
            table = cache._block_table(sequences, group)
            slots = slot_mapping(table, lens, cache.block_size, new_lens=new_lens)
            self._tables.append(place.index(table, np.int32))
            self._slots.append(place.index(slots, np.int64))

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.positions)

    @property
    def unwritten_layers(self) -> list[int]:
        """Layers that have no rows of the new tokens so far; none if there are no new tokens."""
        missing: list[int] = np.flatnonzero(~self._written).tolist() if self.num_tokens else []
        return missing

    def _layer(self, layer: int) -> tuple[Pool, int]:
        if not self.open:
            raise NumkvError("expected an open step, got one that was committed or rolled back")
        layer = check_index("layer", layer, self._cache.num_layers)
        return self._cache._place(layer)

    def append(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Write ready rows of the new tokens.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v : array (num_tokens, num_kv_heads, head_dim)
            Rows of all sequences, one after another.
        check_finite : bool
            Whether rows that are to be quantised are looked at first.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, NonFiniteInput, IndexError
            See `numkv.ContiguousLayer.append`; nothing is written.
        """
        pool, group = self._layer(layer)
        k, v = pool.check_rows(k, v, check_finite=check_finite)
        self._check_tokens("k", int(k.shape[0]))
        pool.scatter(k, v, self._slots[group])
        self._written[layer] = True

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
        """Split, normalise, rotate and write the new tokens' projections, in one pass.

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
        pool, group = self._layer(layer)
        slots = self._slots[group]
        tokens, q = fast_path.pool_write(
            pool, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out,
            self._positions, 0, slots, 0, 0, check_finite,
        )  # fmt: skip
        if tokens >= 0:
            self._written[layer] = True
            return q
        p = Projection.check(
            pool, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out
        )
        self._check_tokens("qkv", p.num_tokens)
        if p.rotates and self.num_tokens and self.positions.max() >= p.cos.shape[0]:
            raise IndexError(
                f"`cos`: expected a row for position {self.positions.max()}, got {p.cos.shape[0]} rows; "
                "make the tables longer"
            )
        if check_finite:
            p.check_finite(pool)
        p.scatter(pool, slots, self._positions)
        self._written[layer] = True
        return p.q_out

    def attention(
        self,
        layer: int,
        q: Any,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        sinks: Any = None,
        return_lse: bool = False,
        out: Any = None,
    ) -> Any:
        """Attend with the new tokens' queries, each to itself and what is before it, within the layer's window.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of all sequences, one after another.
        sm_scale, logits_soft_cap, sinks, return_lse, out
            See `numkv.decode_attention`.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype.
        lse : float32 array (num_tokens, num_q_heads)
            Natural log of the sum of exponentials; only with `return_lse`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        pool, group = self._layer(layer)
        q = check_queries(pool.target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
        self._check_tokens("q", int(q.shape[0]))
        window = self._cache.window_of(layer)
        options = check_options(sm_scale, logits_soft_cap, window, sinks, return_lse, out)
        return attend(pool, self._tables[group], q, self._lens, self._starts, options)

    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ) -> Array:
        """How much attention each token of the step's sequences gets from the new tokens' queries.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of all sequences, one after another.
        lse : float32 array (num_tokens, num_q_heads), optional
            What `attention` returned with ``return_lse=True`` for these queries and options; computed if None, which
            costs as much as that call.
        sm_scale, logits_soft_cap
            See `numkv.decode_attention`.

        Returns
        -------
        float32 array (num_seqs, num_kv_heads, longest)
            Sums over each sequence's queries and the q heads of a group, for its tokens with the new ones; 0 past its
            last, and where the layer's window does not reach. See `numkv.attention_weights`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        pool, group = self._layer(layer)
        q = check_queries(pool.target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
        self._check_tokens("q", int(q.shape[0]))
        options = check_options(sm_scale, logits_soft_cap, self._cache.window_of(layer))
        return weigh(
            pool, self._tables[group], q, self._lens, self._starts, self._longest, options, lse=lse
        )

    def _check_tokens(self, name: str, tokens: int) -> None:
        if tokens != self.num_tokens:
            raise DimensionMismatch(
                f"`{name}`: expected rows of the step's {self.num_tokens} tokens, got {tokens}",
                expected=self.num_tokens,
                actual=tokens,
            )


class PagedKVCache:
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
        Storage kinds of K and of V where they shall differ from `kind`.
    windows : sequence of int, optional
        `window_left` of each layer: earlier tokens that it sees, -1 for all.
    rotate : bool
        Whether rows are rotated before they are stored; see `numkv.ContiguousLayer`.

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

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_blocks: int,
        block_size: int = 16,
        kind: str | Kind = "fp16",
        target: str = "cpu",
        head_dim_v: int | None = None,
        k_kind: str | Kind | None = None,
        v_kind: str | Kind | None = None,
        windows: Sequence[int] | None = None,
        rotate: bool = False,
    ) -> None:
        layers = check_size("num_layers", num_layers, 1)
        given = [-1] * layers if windows is None else windows
        self._windows = [check_size("windows", w, -1) for w in given]
        if len(self._windows) != layers:
            raise DimensionMismatch(
                f"`windows`: expected {layers} numbers, one for each layer, got {windows!r}",
                expected=layers,
                actual=len(self._windows),
            )
        self._target = targets.get(target)
        of_k, of_v = kinds_of(kind, k_kind, v_kind)
        heads = check_size("num_kv_heads", num_kv_heads, 1)
        dim = check_size("head_dim", head_dim, 1)
        dim_v = dim if head_dim_v is None else check_size("head_dim_v", head_dim_v, 1)
        shape = (
            check_size("num_blocks", num_blocks),
            heads,
            check_size("block_size", block_size, 1),
        )
        by_window: dict[int, list[int]] = {}
        for layer, window in enumerate(self._windows):
            by_window.setdefault(window, []).append(layer)
        per_block = math.gcd(*(len(members) for members in by_window.values()))
        # Full attention first: its table is the longest, and what prefixes are looked up by.
        self._groups = [
            (window, by_window[window][i : i + per_block])
            for window in sorted(by_window)
            for i in range(0, len(by_window[window]), per_block)
        ]
        self._places = {
            layer: (slot, group)
            for group, (_, members) in enumerate(self._groups)
            for slot, layer in enumerate(members)
        }
        self._pools = [
            Pool.allocate(self._target, shape, dim, dim_v, of_k, of_v, rotate)
            for _ in range(per_block)
        ]
        self.blocks = BlockPool(shape[0], shape[2])
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    # -- what it is

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._windows)

    @property
    def num_groups(self) -> int:
        """Groups of layers that share a block table."""
        return len(self._groups)

    @property
    def layers_per_block(self) -> int:
        """Layers whose K and V a block holds."""
        return len(self._pools)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.blocks.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.blocks.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached prefixes included."""
        return self.blocks.num_free

    @property
    def rotate(self) -> bool:
        """Whether rows are rotated before they are stored."""
        return self._pools[0].rotate

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences, in the order in which they came."""
        return tuple(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers, scales included."""
        return sum(pool.nbytes for pool in self._pools)

    def window_of(self, layer: int) -> int:
        """The window of a layer.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        int
            Earlier tokens that it sees; -1 for all.
        """
        return self._windows[check_index("layer", layer, self.num_layers)]

    def length(self, seq: int) -> int:
        """Tokens of a sequence that are committed.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        int
        """
        return self._sequence(seq).length

    def cached_len(self, seq: int) -> int:
        """Tokens of a sequence that came from the prefix cache when it was added.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        int
        """
        return self._sequence(seq).cached

    def __len__(self) -> int:
        return len(self._sequences)

    def __repr__(self) -> str:
        pool = self._pools[0]
        kinds = str(pool.k_kind) + ("" if pool.k_kind is pool.v_kind else f"/{pool.v_kind}")
        kinds += ", rotate=True" if pool.rotate else ""
        return (
            f"PagedKVCache(sequences={len(self)}, num_layers={self.num_layers}, "
            f"blocks={self.num_blocks - self.num_free}/{self.num_blocks}, block_size={self.block_size}, "
            f"kind={kinds}, target={self._target.name}, nbytes={self.nbytes})"
        )

    def _sequence(self, seq: int) -> _Sequence:
        found = self._sequences.get(seq)
        if found is None:
            raise IndexError(f"`seq`: expected one of the cache's sequences, got {seq!r}")
        return found

    def _idle(self, seq: int) -> _Sequence:
        found = self._sequence(seq)
        if found.reserved is not None:
            raise NumkvError(
                f"`seq`: expected sequence {seq} to have no open step, got one of {found.reserved} tokens; "
                "commit it or roll it back first"
            )
        return found

    def _place(self, layer: int) -> tuple[Pool, int]:
        slot, group = self._places[layer]
        return self._pools[slot], group

    def _block_table(self, sequences: Iterable[int], group: int) -> NDArray[np.int32]:
        tables = [self._sequence(s).tables[group] for s in sequences]
        padded = np.full((len(tables), max((len(t) for t in tables), default=0)), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return padded

    # -- sequences

    def add(self, tokens: Any = None, *, extra: Extra | None = None) -> int:
        """Add a sequence; with its token ids, take over what the prefix cache has of them.

        At least the last token is left to compute, so that there are logits to go on with.

        Parameters
        ----------
        tokens : array-like of int, optional
            Ids of the prompt. Only these are looked up; `reserve` and `commit` follow for the rest of them.
        extra : mapping, optional
            What else the content depends on, such as ``{"adapter": 7}``; see `numkv.blocks.prefix.block_digests`.

        Returns
        -------
        int
            The sequence. `cached_len` says how many tokens it has already.

        Raises
        ------
        UnsupportedDType, ValueError
            If `tokens` are no token ids.
        """
        ids = token_ids([] if tokens is None else tokens)
        size = self.block_size
        usable = max(0, len(ids) - 1) // size
        extra = None if extra is None else dict(extra)  # of the caller's objects nothing is kept
        digests = self._digests(ids[: usable * size], extra, None)
        blocks, tables = self._find_prefix(ids[: usable * size], digests)
        for table in tables:
            self.blocks.acquire(table[table >= 0])
        seq, self._next = self._next, self._next + 1
        self._sequences[seq] = _Sequence(
            blocks * size, tables, extra, ids[: blocks * size].copy(),
            [d[:blocks] for d in digests], blocks, [0] * self.num_groups, cached=blocks * size,
        )  # fmt: skip
        return seq

    def _digests(
        self, ids: NDArray[np.int32], extra: Extra | None, parents: list[Any] | None
    ) -> list[NDArray[np.uint8]]:
        """Names of the full blocks of `ids`, for each group: what a block holds depends on it.

        Tokens are hashed once. The names of group 0 are the chain of digests, and those of another differ from them
        in one word, by a number that stands for the group.
        """
        parent = None if parents is None else parents[0]
        chain = block_digests(
            ids, self.block_size, extra if parent is None else None, parent=parent
        )
        names = [chain]
        for group in range(1, self.num_groups):
            other = chain.copy()
            other.view("<u8")[:, 0] ^= np.uint64(group * _SPREAD % 2**64)
            names.append(other)
        return names

    def _find_prefix(
        self, ids: NDArray[np.int32], digests: list[NDArray[np.uint8]]
    ) -> tuple[int, list[NDArray[np.int32]]]:
        """The longest prefix whose blocks are there: all in full groups, those in the window in sliding ones."""
        found = [self.blocks.find_each(names, ids) for names in digests]
        blocks = wanted = len(ids) // self.block_size
        for (window, _), there in zip(self._groups, found, strict=True):
            if window < 0:
                missing = np.flatnonzero(there[:blocks] < 0)
                blocks = int(missing[0]) if len(missing) else blocks
        # fits[n]: in every group, the newest of n blocks' tokens finds all that it sees.
        fits = np.ones(blocks + 1, np.bool_)
        for (window, _), there in zip(self._groups, found, strict=True):
            if window >= 0:
                numbers = np.arange(1, blocks + 1)
                last_hole = np.maximum.accumulate(np.where(there[:blocks] < 0, numbers, 0))
                ends = numbers * self.block_size - 1 - window
                fits[1:] &= last_hole <= np.maximum(0, ends) // self.block_size
        blocks = int(np.flatnonzero(fits)[-1])
        if wanted:
            # Why there are no more: the first block not taken, or one before it that only windows need.
            holes = [*(there[blocks : blocks + 1] for there in found), *found]
            reasons = np.concatenate([x[x < 0] for x in holes])
            self.blocks.count_lookup(wanted, blocks, int(-reasons[0]) if blocks < wanted else 0)
        tables = []
        for (window, _), there in zip(self._groups, found, strict=True):
            table = np.maximum(there[:blocks], -1).astype(np.int32)
            table[: self._first_needed(window, blocks * self.block_size)] = -1
            tables.append(table)
        return blocks, tables

    def _first_needed(self, window: int, length: int) -> int:
        """First block that the newest of `length` tokens, and those after it, still see."""
        return self._first_seen(window, length) // self.block_size

    def _first_seen(self, window: int, length: int) -> int:
        """First token that the newest of `length` tokens, and those after it, still see."""
        return 0 if window < 0 else max(0, length - 1 - window)

    def _first_there(self, state: _Sequence, group: int) -> int:
        """First token that a group has the rows of."""
        table = state.tables[group]
        gone = int(np.argmax(table >= 0)) if len(table) else 0
        return max(state.starts[group], gone * self.block_size)

    def fork(self, seq: int) -> int:
        """A second sequence with the same tokens; blocks are shared until one of the two writes into them.

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
        new, self._next = self._next, self._next + 1
        self._sequences[new] = _Sequence(
            old.length, [t.copy() for t in old.tables], old.extra, old.tokens,
            list(old.digests), old.registered, list(old.starts),
        )  # fmt: skip
        return new

    def remove(self, seq: int) -> None:
        """Remove a sequence; blocks whose tokens are known stay findable until they are needed.

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
            If a sliding layer's window has moved past what would be needed again.
        """
        state = self._idle(seq)
        length = check_index("length", length, state.length, inclusive=True)
        for group, (window, _) in enumerate(self._groups):
            if length and self._first_seen(window, length) < self._first_there(state, group):
                raise NotSupported(
                    f"`length`: expected one that the sliding window of {window} tokens still covers, "
                    f"got {length} of {state.length}; its blocks are gone"
                )
        self._shrink(state, length)

    def _shrink(self, state: _Sequence, length: int) -> None:
        keep = -(-length // self.block_size)
        for group, table in enumerate(state.tables):
            gone = table[keep:]
            self.blocks.release(gone[gone >= 0])
            state.tables[group] = table[:keep].copy()
        full = length // self.block_size
        state.length = length
        state.cached = min(state.cached, length)
        state.tokens = state.tokens[:length]
        state.digests = [d[:full] for d in state.digests]
        state.registered = min(state.registered, full)
        state.starts = [min(start, length) for start in state.starts]

    def compact(self, seq: int, keep: Any, shift: RopeShift | None = None) -> None:
        """Keep some tokens of a sequence only, and move them to the front: token ``keep[i]`` becomes token i.

        Rows move as they are stored, bit for bit. With `shift`, the keys of tokens that move are turned to their new
        positions; quantised ones are quantised once more. Blocks that are not needed any more are given back.

        Blocks of other sequences, of forks and pinned ones stay as they are: the sequence gets copies of those whose
        tokens move. What it holds from the first block on that changed is never findable as a prefix, as it is not what
        the model makes of these tokens alone; the blocks before stay so. Of blocks that this sequence alone had made
        findable, as many as there are free blocks for stay so too.

        Parameters
        ----------
        seq : int
            The sequence.
        keep : array-like of int (n,)
            Tokens to keep, in order, on the host; see `numkv.compaction.eviction` for what chooses them.
        shift : RopeShift, optional
            What `numkv.rope_shift` made of the model's tables. Without it keys stay as they are: for models without
            rotation, and for methods that go on counting positions from those that tokens had.

        Raises
        ------
        CacheFull
            If there are too few free blocks for the copies.
        NumkvError
            If the sequence has an open step.
        NotSupported
            If layers have a sliding window, and the newest ``window_left + 1`` tokens of those to keep are not among
            those whose rows they still hold. The newest ``window_left + 1`` tokens of the sequence always are.
        IndexError
            If there is no such sequence or token, or the shift's tables are too short.
        ValueError
            If indices do not rise.
        DimensionMismatch, UnsupportedDType, TypeError
            If `keep` is no row of integers, the shift rotates more elements than a key has, or it is something else.

        Notes
        -----
        Nothing has changed after an error. Windows are counted in tokens that are kept. `Step.positions` go on from
        the new length, which is right for keys that were turned; without a shift, write ready rows with `Step.append`.
        """
        state = self._idle(seq)
        kept = check_kept("keep", keep, state.length)
        plans = [
            relocate(table, kept, self._first_there(state, group), window, self.block_size)
            for group, ((window, _), table) in enumerate(
                zip(self._groups, state.tables, strict=True)
            )
        ]
        source = np.concatenate([plan.source for plan in plans])
        moved = np.concatenate([plan.moved for plan in plans])
        offsets = moved - kept[moved]
        plan_moves(self._pools[0], shift, source, source, offsets)  # all pools are alike
        # The blocks whose content changes, of all groups, and those of them that others take the place of.
        changed = np.concatenate([plan.changed for plan in plans])
        old = np.concatenate([plan.table[plan.changed] for plan in plans])
        gone = np.concatenate([plan.dropped for plan in plans])
        own = (self.blocks.ref_count(gone) == 1) & (self.blocks.pin_count(gone) == 0)
        fresh = fresh_blocks(self.blocks, old, changed, int(own.sum()))
        replaced, in_place = old[fresh], old[~fresh]
        gone = np.concatenate([replaced[replaced >= 0], gone])
        need = len(replaced)
        aside: list[Pool] = []
        if need > self.blocks.num_free:
            # What the sequence gives back is needed at once: meanwhile its rows lie aside.
            beside = np.arange(len(source))
            for pool in self._pools:
                aside.append(pool.like(-(-len(source) // self.block_size)))
                pool.copy_tokens(source, aside[-1], beside)
            self.blocks.release(gone)
        self.blocks.forget(in_place)
        old[fresh] = self.blocks.allocate(need)
        ends = np.cumsum([len(plan.changed) for plan in plans])
        for group, (plan, ids) in enumerate(zip(plans, np.split(old, ends[:-1]), strict=True)):
            plan.table[plan.changed] = ids
            state.tables[group], state.starts[group] = plan.table, plan.start
        to = np.concatenate([slots_of(plan.table, plan.moved, self.block_size) for plan in plans])
        for pool, other in zip(self._pools, aside, strict=False):
            other.copy_tokens(beside, pool, to)
        for pool in self._pools:
            for move in plan_moves(pool, shift, to if aside else source, to, offsets):
                move()
        if not aside:
            self.blocks.release(gone)
        self._keep_known(state, kept)

    def _keep_known(self, state: _Sequence, kept: Ints) -> None:
        """Go on knowing the tokens, and names, of the blocks before the first that a compaction changed."""
        n, size = len(kept), self.block_size
        elsewhere = np.flatnonzero(kept != np.arange(n))
        same = int(elsewhere[0]) // size * size if len(elsewhere) else n
        state.length = n
        state.cached = int(np.searchsorted(kept, state.cached))
        state.tokens = state.tokens[:same]
        state.digests = [names[: same // size] for names in state.digests]
        state.registered = min(state.registered, same // size)

    def pin(self, seq: int) -> NDArray[np.int32]:
        """Keep the blocks of a sequence that are findable now from ever being evicted, also after it is removed.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        int32 array (n,)
            The blocks. When the sequence is gone, ``cache.blocks.unpin`` takes them.
        """
        ids = self._findable(seq)
        self.blocks.pin(ids)
        self._sequence(seq).pins.append(ids)
        return ids

    def unpin(self, seq: int) -> None:
        """Take the last `pin` of a sequence back, whatever has become of the sequence since.

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
        ids = np.concatenate([t[t >= 0] for t in self._sequence(seq).tables])
        return ids[self.blocks.is_cached(ids)]

    # -- steps

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> Step:
        """Take room for new tokens of some sequences, all or nothing.

        Parameters
        ----------
        sequences : iterable of int
            The sequences, each once.
        new_lens : int or int array (num_seqs,)
            How many tokens each of them gets.

        Returns
        -------
        Step
            What to write them with; `commit` or `rollback` ends it.

        Raises
        ------
        CacheFull
            If there are not enough blocks; nothing is taken.
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
        # What each table lacks, and which last blocks cannot be written to because someone else has them too.
        wanted, shared = [], []
        for state, n in zip(states, lens.tolist(), strict=True):
            need = -(-(state.length + n) // self.block_size)
            for group, table in enumerate(state.tables):
                copies = False
                if n and state.length % self.block_size:
                    # Others may use the block, or find it by what it held before a truncation.
                    last = table[-1:]
                    copies = bool(
                        self.blocks.ref_count(last)[0] > 1 or self.blocks.is_cached(last)[0]
                    )
                shared.append((state, group) if copies else None)
                wanted.append(max(0, need - len(table)) + copies)
        taken = self.blocks.allocate(sum(wanted))
        given = iter(np.split(taken, np.cumsum(wanted)[:-1]) if wanted else [])
        copy_from: list[int] = []
        copy_to: list[int] = []
        for i, (state, n) in enumerate(zip(states, lens.tolist(), strict=True)):
            for group in range(self.num_groups):
                new = next(given)
                table = state.tables[group]
                if shared[i * self.num_groups + group] is not None:
                    copy_from.append(int(table[-1]))
                    copy_to.append(int(new[0]))
                    table = table.copy()
                    table[-1], new = new[0], new[1:]
                state.tables[group] = np.concatenate([table, new]).astype(np.int32)
            state.reserved = n
        if copy_from:
            self._copy(copy_from, copy_to)
            self.blocks.release(np.array(copy_from, np.int32))
        return Step(self, seqs, lens)

    def _copy(self, source: list[int], to: list[int]) -> None:
        source_ids, to_ids = (self._target.index(np.array(x), np.int32) for x in (source, to))
        for pool in self._pools:
            pool.copy_blocks(source_ids, pool, to_ids)

    def commit(self, step: Step, accepted: Any = None, *, token_ids: Any = None) -> None:
        """End a step: its tokens, or the first of them, belong to their sequences now.

        Parameters
        ----------
        step : Step
            The step.
        accepted : int array (num_seqs,), optional
            How many of its tokens each sequence keeps; all if None. The others are rolled back.
        token_ids : array-like of int (num_tokens,), optional
            Ids of the step's tokens, accepted or not, which make full blocks findable by other sequences.

        Raises
        ------
        NumkvError
            If the step has ended already, or tokens are accepted and a layer has not got their rows.
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
            self._drop_surplus(state)
            self._register(state)
            self._slide(state)

    def rollback(self, step: Step) -> None:
        """End a step as if it had not been.

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
        if not isinstance(step, Step) or step._cache is not self or not step.open:
            raise NumkvError(
                "`step`: expected an open step of this cache, got another or an ended one"
            )

    def _drop_surplus(self, state: _Sequence) -> None:
        """Give back blocks that only tokens not accepted were in."""
        keep = -(-state.length // self.block_size)
        for group, table in enumerate(state.tables):
            if len(table) > keep:
                self.blocks.release(table[keep:])
                state.tables[group] = table[:keep].copy()

    def _register(self, state: _Sequence) -> None:
        """Make full blocks findable whose tokens are known."""
        size = self.block_size
        first, full = state.registered, len(state.tokens) // size
        if full <= first:
            return
        new = state.tokens[first * size : full * size]
        parents = [d[-1] for d in state.digests] if first else None
        digests = self._digests(new, state.extra, parents)
        for group, names in enumerate(digests):
            state.digests[group] = np.concatenate([state.digests[group], names])
            ids = state.tables[group][first:full]
            there = ids >= 0  # a window may have moved past some already
            if there.any():
                self.blocks.register(ids[there], names[there], new.reshape(-1, size)[there])
        state.registered = full

    def _slide(self, state: _Sequence) -> None:
        """Give back blocks that a window has left behind."""
        for group, (window, _) in enumerate(self._groups):
            table = state.tables[group]
            gone = table[: self._first_needed(window, state.length)]
            if (gone >= 0).any():
                self.blocks.release(gone[gone >= 0])
                state.tables[group] = table.copy()
                state.tables[group][: len(gone)] = -1

    # -- attention over what is committed

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
    ) -> Any:
        """Attend with the newest committed token's query of any of the sequences.

        Parameters
        ----------
        layer : int
            Which layer.
        sequences : iterable of int
            Which sequences; one may come more than once.
        q : array (num_seqs, num_q_heads, head_dim)
            A query for each.
        sm_scale, logits_soft_cap, sinks, return_lse, out
            See `numkv.decode_attention`.

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
        """
        pool, group = self._place(check_index("layer", layer, self.num_layers))
        seqs = tuple(sequences)
        place = self._target
        q = check_queries(place, q, int(pool.k.shape[1]), pool.head_dim, "num_seqs")
        if q.shape[0] != len(seqs):
            raise DimensionMismatch(
                f"`q`: expected a query for each of {len(seqs)} sequences, got {q.shape[0]}",
                expected=len(seqs),
                actual=int(q.shape[0]),
            )
        lens = np.array([self.length(s) for s in seqs], np.int64)
        window = self._windows[layer]
        options = check_options(sm_scale, logits_soft_cap, window, sinks, return_lse, out)
        return attend(
            pool, place.index(self._block_table(seqs, group), np.int32), q,
            place.index(lens, np.int64), place.index(np.arange(len(seqs) + 1), np.int64), options,
        )  # fmt: skip

    def attention_weights(
        self,
        layer: int,
        seq: int,
        q: Any,
        *,
        lse: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
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
        sm_scale, logits_soft_cap
            See `numkv.decode_attention`.

        Returns
        -------
        float32 array (num_kv_heads, tokens)
            Sums over the queries and the q heads of a group; 0 where the layer's window does not reach. See
            `numkv.attention_weights`.

        Raises
        ------
        NotSupported
            If a query would see what the layer's window has let go of: beyond the newest, ask the step.
        DimensionMismatch
            If there are more queries than tokens, or a shape does not fit.
        UnsupportedDType, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        pool, group = self._place(check_index("layer", layer, self.num_layers))
        state, place = self._sequence(seq), self._target
        q = check_queries(place, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
        tokens, length, window = int(q.shape[0]), state.length, self._windows[layer]
        if tokens > length and tokens != 1:
            raise too_many_queries(tokens, length)
        first = self._first_seen(window, length - tokens + 1)
        if tokens and first < self._first_there(state, group):
            raise NotSupported(
                f"`q`: expected queries whose window of {window} tokens is still there, got {tokens}, the first of "
                f"which sees token {first}, and layer {layer} holds those from "
                f"{self._first_there(state, group)} on; pass fewer, or ask the step that wrote them"
            )
        weights = weigh(
            pool, place.index(self._block_table([seq], group), np.int32), q,
            place.index(np.array([length]), np.int64), place.index(np.array([0, tokens]), np.int64),
            length, check_options(sm_scale, logits_soft_cap, window), lse=lse,
        )  # fmt: skip
        return weights.reshape((int(pool.k.shape[1]), length))

    # -- to the host and back

    @property
    def _geometry(self) -> tuple[Any, ...]:
        pool = self._pools[0]
        sizes = (int(pool.k.shape[1]), self.block_size, pool.head_dim, pool.head_dim_v)
        seed = None if pool.k_rotation is None else pool.k_rotation.seed
        return (sizes, pool.k_kind.name, pool.v_kind.name, tuple(self._windows), seed)

    def swap_out(self, seq: int) -> SwappedSequence:
        """Copy a sequence to host memory, in one copy per buffer; it stays in the cache.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        SwappedSequence
            What `swap_in` of this or another cache takes.
        """
        state = self._idle(seq)
        logical = [np.flatnonzero(t >= 0) for t in state.tables]
        ids = np.concatenate([t[t >= 0] for t in state.tables])
        source = self._target.index(ids, np.int32)
        to = self._target.index(np.arange(len(ids)), np.int32)
        buffers = []
        for pool in self._pools:
            staging = pool.like(len(ids))
            pool.copy_blocks(source, staging, to)
            buffers.append(staging.to_host())
        return SwappedSequence(
            state.length, state.tokens, state.extra, self._geometry, logical, buffers,
            tuple(state.starts),
        )  # fmt: skip

    def swap_in(self, swapped: SwappedSequence) -> int:
        """Bring a swapped sequence into the cache as a new one.

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
        Nothing is taken after an error.
        """
        self._check_swapped(swapped)
        counts = [len(x) for x in swapped.logical]
        ids = self.blocks.allocate(sum(counts))
        try:
            return self._add_swapped(swapped, counts, ids)
        except BaseException:  # a device without room, say
            self.blocks.release(ids)
            raise

    def _add_swapped(
        self, swapped: SwappedSequence, counts: list[int], ids: NDArray[np.int32]
    ) -> int:
        """Make a sequence of what was swapped out, in blocks that have been allocated."""
        source = self._target.index(np.arange(len(ids)), np.int32)
        to = self._target.index(ids, np.int32)
        for pool, buffers in zip(self._pools, swapped.buffers, strict=True):
            pool.from_host(buffers).copy_blocks(source, pool, to)
        blocks = -(-swapped.length // self.block_size)
        tables = []
        for part, logical in zip(
            np.split(ids, np.cumsum(counts)[:-1]), swapped.logical, strict=True
        ):
            table = np.full(blocks, -1, np.int32)
            table[logical] = part
            tables.append(table)
        none = [np.empty((0, 32), np.uint8)] * self.num_groups
        starts = list(swapped.starts) or [0] * self.num_groups
        tokens = token_ids(swapped.tokens).copy()
        state = _Sequence(swapped.length, tables, swapped.extra, tokens, none, 0, starts)
        self._register(state)
        seq, self._next = self._next, self._next + 1
        self._sequences[seq] = state
        return seq

    def _check_swapped(self, swapped: SwappedSequence) -> None:
        """See that a swapped sequence fits this cache, and that its parts fit each other."""
        geometry = swapped.geometry
        if isinstance(geometry, tuple) and len(geometry) == len(self._geometry):
            (*rest, theirs), (*own, ours) = geometry, self._geometry
            if rest == own and theirs != ours:
                raise DimensionMismatch(
                    f"`swapped`: expected a sequence of {_told(ours)} rows, got one of {_told(theirs)} rows; "
                    f"bring it into a cache with rotate={theirs is not None}",
                    expected=self._geometry,
                    actual=geometry,
                )
        if geometry != self._geometry:
            raise DimensionMismatch(
                f"`swapped`: expected a sequence of geometry {self._geometry}, got {geometry}",
                expected=self._geometry,
                actual=geometry,
            )

        def expect(holds: bool, what: str, got: Any) -> None:
            if not holds:
                raise NumkvError(
                    f"`swapped`: expected {what}, got {got}; it is damaged, make it anew"
                )

        length, groups = swapped.length, self.num_groups
        expect(
            isinstance(length, int | np.integer) and 0 <= length < 2**31, "a length below 2**31", length
        )  # fmt: skip
        ids = token_ids(swapped.tokens)
        expect(ids.ndim == 1 and len(ids) <= length, f"ids of at most {length} tokens", ids.shape)
        extra = swapped.extra
        expect(
            extra is None or isinstance(extra, Mapping), "extra keys by tag", type(extra).__name__
        )
        block_digests(ids[:0], self.block_size, extra)  # says what is wrong with them
        blocks = -(-length // self.block_size)
        expect(len(swapped.logical) == groups, f"{groups} block tables", len(swapped.logical))
        starts = swapped.starts or (0,) * groups
        expect(len(starts) == groups, f"{groups} starts or none", swapped.starts)
        for (window, _), logical, start in zip(self._groups, swapped.logical, starts, strict=True):
            entries = np.asarray(logical)
            plain = entries.ndim == 1 and (entries.dtype.kind in "iu" or not entries.size)
            expect(plain, "numbers of blocks", entries)
            entries = entries.astype(np.int64)
            first = self._first_needed(window, length)
            there = entries[entries >= first]
            expect(
                bool((np.diff(entries) > 0).all()) and len(there) == blocks - first
                and (not len(entries) or bool(entries[0] >= 0 and entries[-1] < blocks)),
                f"rising numbers below {blocks}, all from {first} on among them", entries,
            )  # fmt: skip
            expect(
                isinstance(start, int | np.integer)
                and 0 <= start <= self._first_seen(window, length),
                f"a first token in [0, {self._first_seen(window, length)}]", start,
            )  # fmt: skip
        count = sum(len(logical) for logical in swapped.logical)
        expect(
            len(swapped.buffers) == len(self._pools),
            f"buffers of {len(self._pools)} layers", len(swapped.buffers),
        )  # fmt: skip
        for pool, buffers in zip(self._pools, swapped.buffers, strict=True):
            own_buffers = (pool.k, pool.v, pool.k_scale, pool.v_scale)
            wanted = [
                (str(x.dtype), (count, *map(int, x.shape[1:])) if x.size else None)
                for x in own_buffers
            ]
            got = [
                (str(x.dtype), tuple(x.shape) if want[1] else None)
                for x, want in zip(buffers, wanted, strict=False)
            ]
            expect(len(buffers) == len(wanted) and got == wanted, f"buffers {wanted}", got)

    # -- accounting

    def stats(self) -> PagedStats:
        """What the cache is like now.

        Returns
        -------
        PagedStats
        """
        lengths = [s.length for s in self._sequences.values()]
        unused = sum(-n % self.block_size for n in lengths)
        full = sum(window < 0 for window, _ in self._groups)
        return PagedStats(len(lengths), sum(lengths), unused * full, self.blocks.stats())

    def check(self) -> None:
        """Prove the accounting: every block is referenced by as many table entries as its count says.

        Raises
        ------
        NumkvError
            If something does not add up.
        """
        self.blocks.check()
        entries = [t[t >= 0] for s in self._sequences.values() for t in s.tables]
        held = np.bincount(
            np.concatenate(entries) if entries else np.empty(0, np.int64), minlength=self.num_blocks
        )
        counts = self.blocks.ref_count(np.arange(self.num_blocks))
        wrong = np.flatnonzero(held != counts)
        if len(wrong):
            raise NumkvError(
                f"block {wrong[0]}: expected {held[wrong[0]]} references, one for each table entry, got "
                f"{counts[wrong[0]]}"
            )
        for seq, state in self._sequences.items():
            need = -(-(state.length + (state.reserved or 0)) // self.block_size)
            for group, (window, _) in enumerate(self._groups):
                table, first = state.tables[group], self._first_needed(window, state.length)
                start = state.starts[group]
                if start > self._first_seen(window, state.length):
                    raise NumkvError(
                        f"sequence {seq}: expected rows of all tokens that its newest sees, got rows from {start} on"
                    )
                if len(table) != need or (table[first:] < 0).any():
                    raise NumkvError(
                        f"sequence {seq}: expected {need} blocks, got the table {table}"
                    )


def _ids(tokens: Any, num_tokens: int) -> NDArray[np.int32]:
    ids = token_ids(tokens, "token_ids")
    if ids.shape != (num_tokens,):
        raise DimensionMismatch(
            f"`token_ids`: expected an id for each of the step's {num_tokens} tokens, got shape {ids.shape}",
            expected=num_tokens,
            actual=ids.shape,
        )
    return ids


def _told(seed: int | None) -> str:
    """How rows are rotated, in words."""
    return "unrotated" if seed is None else f"rotated (seed {seed})"
