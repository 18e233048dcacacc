"""What a `PagedKVCache` stores, and every question about it: nothing here changes a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numkv import targets
from numkv.attention.attend import attend, check_queries, too_many_queries
from numkv.attention.mass import attention_mass
from numkv.attention.options import check_options
from numkv.blocks.pool import BlockPool, PoolStats
from numkv.caches.paged.groups import group_layers
from numkv.caches.paged.store import BlockStore, SequenceState, pool_with_own_scales
from numkv.checks import check_index, check_size
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.kinds import Kind, kinds_of
from numkv.storage.pool import Pool
from numkv.targets.base import Array

__all__ = ["PagedStats", "StoredSequences"]


@dataclass(frozen=True)
class PagedStats:
    """Counts of a cache at one moment.

    Attributes
    ----------
    num_seqs : int
        Sequences.
    num_tokens : int
        Tokens of all sequences, shared ones counted for each.
    unused_slots : int
        Slots in the sequences' last blocks, in full-attention groups, that hold no token.
    pool : PoolStats
        Counts of blocks, and of what has happened to them.
    """

    num_seqs: int
    num_tokens: int
    unused_slots: int
    pool: PoolStats


class StoredSequences:
    """The reading half of `PagedKVCache`: buffers and books, attention to committed tokens, counts."""

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
        windows_of = [check_size("windows", w, -1) for w in given]
        if len(windows_of) != layers:
            raise DimensionMismatch(
                f"`windows`: expected {layers} numbers, one for each layer, got {windows!r}",
                expected=layers,
                actual=len(windows_of),
            )
        place = targets.get(target)
        of_k, of_v = kinds_of(kind, k_kind, v_kind)
        heads = check_size("num_kv_heads", num_kv_heads, 1)
        dim = check_size("head_dim", head_dim, 1)
        dim_v = dim if head_dim_v is None else check_size("head_dim_v", head_dim_v, 1)
        shape = (
            check_size("num_blocks", num_blocks),
            heads,
            check_size("block_size", block_size, 1),
        )
        groups = group_layers(windows_of)
        pools = [
            Pool.allocate(place, shape, dim, dim_v, of_k, of_v, rotate) for _ in groups[0].layers
        ]
        places = {
            layer: (slot, group)
            for group, (_, members) in enumerate(groups)
            for slot, layer in enumerate(members)
        }
        self.blocks = BlockPool(shape[0], shape[2])
        layer_pools = {
            layer: pools[slot] if group == 0 else pool_with_own_scales(pools[slot])
            for layer, (slot, group) in places.items()
        }
        self._store = BlockStore(place, groups, pools, self.blocks, places, layer_pools)
        self._target, self._groups, self._pools = place, groups, pools
        self._sequences: dict[int, SequenceState] = {}
        self._next = 0

    # -- what it is

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._store.num_layers

    @property
    def num_groups(self) -> int:
        """Layer groups: each shares a block table."""
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
        """Blocks that can be allocated, cached prefixes included."""
        return self.blocks.num_free

    @property
    def rotate(self) -> bool:
        """Whether a Hadamard rotation is applied to rows before they are stored."""
        return self._pools[0].rotate

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences, in the order in which they came."""
        return tuple(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers, scales included."""
        return self._store.nbytes

    def window_of(self, layer: int) -> int:
        """The window of a layer.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        int
            Earlier tokens that a query attends to; -1 for all.
        """
        return self._store.window_of(check_index("layer", layer, self.num_layers))

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

    def _sequence(self, seq: int) -> SequenceState:
        found = self._sequences.get(seq)
        if found is None:
            raise IndexError(f"`seq`: expected one of the cache's sequences, got {seq!r}")
        return found

    def _idle(self, seq: int) -> SequenceState:
        found = self._sequence(seq)
        if found.reserved is not None:
            raise NumkvError(
                f"`seq`: expected sequence {seq} to have no open step, got one of {found.reserved} tokens; "
                "commit it or roll it back first"
            )
        return found

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
        """Attend with the query of the newest committed token of any sequences.

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
        pool, group = self._store.place(check_index("layer", layer, self.num_layers))
        states = [self._sequence(seq) for seq in sequences]
        place = self._target
        q = check_queries(place, q, int(pool.k.shape[1]), pool.head_dim, "num_seqs")
        if q.shape[0] != len(states):
            raise DimensionMismatch(
                f"`q`: expected a query for each of {len(states)} sequences, got {q.shape[0]}",
                expected=len(states),
                actual=int(q.shape[0]),
            )
        lens = np.array([state.length for state in states], np.int64)
        window = self._groups[group].window
        options = check_options(sm_scale, logits_soft_cap, window, sinks, return_lse, out)
        return attend(
            pool, place.index(self._store.block_table(states, group), np.int32), q,
            place.index(lens, np.int64), place.index(np.arange(len(states) + 1), np.int64), options,
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
            If a query attends to tokens whose blocks were released behind the layer's window: ask the step instead.
        DimensionMismatch
            If there are more queries than tokens, or a shape does not fit.
        UnsupportedDType, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        pool, group = self._store.place(check_index("layer", layer, self.num_layers))
        state, place = self._sequence(seq), self._target
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
        return weights.reshape((int(pool.k.shape[1]), length))

    # -- accounting

    def stats(self) -> PagedStats:
        """Counts of the cache at this moment.

        Returns
        -------
        PagedStats
        """
        lengths = [s.length for s in self._sequences.values()]
        unused = sum(-n % self.block_size for n in lengths)
        full = sum(group.window < 0 for group in self._groups)
        return PagedStats(len(lengths), sum(lengths), unused * full, self.blocks.stats())

    def check(self) -> None:
        """Prove the accounting: the reference count of every block is the number of table entries that name it.

        Raises
        ------
        NumkvError
            If counts and tables disagree.
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
            need = self._store.blocks_for(state.length + (state.reserved or 0))
            for number, group in enumerate(self._groups):
                table, first = state.tables[number], self._store.first_needed(number, state.length)
                start = state.starts[number]
                if start > group.first_visible(state.length):
                    raise NumkvError(
                        f"sequence {seq}: expected rows of all tokens that its newest sees, got rows from {start} on"
                    )
                if len(table) != need or (table[first:] < 0).any():
                    raise NumkvError(
                        f"sequence {seq}: expected {need} blocks, got the table {table}"
                    )
