"""The contents and properties of a `PagedKVCache`, and how a new state of sequences replaces the old one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.access import Access
from numkv.blocks.pool import BlockPool
from numkv.blocks.records import PoolStats
from numkv.caches.layer_spec import LayerSpec, StateSlots, storage_of
from numkv.caches.paged.arguments import sequence_number, unknown_sequence
from numkv.caches.paged.audit import check_books, check_scales
from numkv.caches.paged.groups import groups_of
from numkv.caches.paged.key_bounds import bounds_nbytes
from numkv.caches.paged.layers import Layers, same_in_all
from numkv.caches.paged.memory import block_nbytes, copied, new_store
from numkv.caches.paged.states import StateMemory
from numkv.caches.paged.store import BlockStore, SequenceState
from numkv.caches.paged.tiers import with_tiers
from numkv.errors import NumkvError
from numkv.kinds import Kind
from numkv.numbers import check_size
from numkv.store.prefix_store import PrefixStore
from numkv.targets.base import Target
from numkv.targets.streamed import streamed

#: Tokens in a block, unless a caller says otherwise: few enough to share prefixes, and fast to read.
BLOCK_SIZE = 128
#: Layers that a cache can have; each takes some objects of Python's.
_MOST_LAYERS = 2**16


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
        Counts of blocks and of their events.
    """

    num_seqs: int
    num_tokens: int
    unused_slots: int
    pool: PoolStats


class StoredSequences:
    """The contents of a `PagedKVCache`: buffers, metadata, sequences, counts."""

    def __init__(
        self,
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        layers: Iterable[LayerSpec] | None = None,
        num_blocks: int | None = None,
        max_nbytes: int | None = None,
        block_size: int = BLOCK_SIZE,
        kind: str | Kind | None = None,
        rotate: bool | None = None,
        target: str = "cpu",
        store: PrefixStore | None = None,
        state_slots: StateSlots | None = None,
    ) -> None:
        alike = {
            "num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "kind": kind,
            "rotate": rotate,
        }  # fmt: skip
        specs = _specs(layers, alike)
        of = Layers.of(specs)
        place = targets.get(target)
        size = check_size("block_size", block_size, 1)
        _check_store(store)
        if store is not None and of.residual is not None and of.residual.kept is not None:
            of.residual.refuse("`store`", "share prefixes within the cache")
        groups = groups_of(of, size)
        num_slots, every = _state_sizes(of, state_slots, size)
        of_states = num_slots * StateMemory.slot_nbytes(of.with_states)
        bounded = same_in_all("key_bounds", specs)
        of_block = block_nbytes(of, groups, size)
        of_block += bounds_nbytes(of, groups) * bounded
        count = _num_blocks(num_blocks, max_nbytes, of_states, of_block)
        blocks = BlockPool(count, size)  # which bounds both numbers
        states = StateMemory(place, of.with_states, num_slots, every) if every else None
        made = new_store(place, of, groups, blocks, same_in_all("rotate", specs), states, bounded)
        self._adopt(with_tiers(made, store), {}, 0)

    def _adopt(self, store: BlockStore, sequences: dict[int, SequenceState], number: int) -> None:
        """Begin with these buffers and sequences; `number` is that of the next one."""
        self._store, self.blocks = store, store.blocks
        self._target, self._groups, self._pools = store.target, store.groups, store.pools
        self._sequences = sequences
        self._open_steps: dict[Any, Any] = {}
        self._next = number
        self._generation = 0
        self._tables_given: dict[int, tuple[int, Any, Any]] = {}
        self._access = Access()

    def _copied(self) -> Self:
        made = self.__class__.__new__(self.__class__)
        store = with_tiers(copied(self._store), self.store, self._store.tiers)
        made._adopt(store, dict(self._sequences), self._next)
        return made

    def __runs_on__(self) -> tuple[Target, Any]:
        return self._target, self._pools[0].k

    # -- what it is

    def __drawn__(self) -> tuple[list[list[int]], dict[int, list[NDArray[np.int32]]]]:
        """Return, for a drawing, the layers of each group, and each sequence's tables of full-precision tokens."""
        store, layers = self._store, dict[int, list[int]]()
        for layer in range(store.num_layers):
            if layer in store.layer_pools:
                layers.setdefault(store.place(layer)[1], []).append(layer)
        beside = [i for i, group in enumerate(store.groups) if group.beside]
        each = list(self._sequences.items())
        return list(layers.values()), {seq: [x.tables[i] for i in beside] for seq, x in each}

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._store.num_layers

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The description of each layer; one that reads another's rows has that layer's, and its own `shares`."""
        return self._store.layers.specs(self._pools[0].rotate, self._store.bounds is not None)

    @property
    def target(self) -> str:
        """Name of the target."""
        return self._target.name

    @property
    def num_groups(self) -> int:
        """Layer groups: each shares a block table."""
        return len(self._groups)

    @property
    def layers_per_block(self) -> int:
        """Layers whose K and V a block holds, the most that there are in a group."""
        return max(len(group.layers) for group in self._groups)

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
    def store(self) -> PrefixStore | None:
        """Where prefixes are kept beyond this cache."""
        return None if self._store.tiers is None else self._store.tiers.store

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences, in the order in which they came."""
        return tuple(self._sequences)

    @property
    def open_steps(self) -> tuple[Any, ...]:
        """The steps that are neither committed nor rolled back, in the order in which `reserve` made them.

        A `KeyboardInterrupt` can leave `reserve` after the step is made and before the caller has it: roll back these
        steps then.
        """
        return tuple(self._open_steps)

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers, scales and bounds of keys included."""
        return self._store.nbytes

    @property
    def states(self) -> BlockPool | None:
        """The bookkeeping of slots for states, a `BlockPool` whose blocks are slots; None where no layer keeps any."""
        return None if self._store.states is None else self._store.states.block_pool

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
        rows, residual = self._store.layers.first, self._store.layers.residual
        kept = None if residual is None else residual.kept
        kinds = storage_of(rows.k_kind, rows.v_storage, self._pools[0].rotate, kept)
        return (
            f"PagedKVCache(sequences={len(self)}, num_layers={self.num_layers}, "
            f"blocks={self.num_blocks - self.num_free}/{self.num_blocks}, block_size={self.block_size}, "
            f"kind={kinds}, target={self._target.name}, nbytes={self.nbytes})"
        )

    # -- sequences by number

    def _sequence(self, seq: Any) -> SequenceState:
        found = self._sequences.get(seq if type(seq) is int else sequence_number(seq))
        if found is None:
            raise unknown_sequence(seq)
        return found

    def _idle(self, seq: int) -> SequenceState:
        found = self._sequence(seq)
        if found.reserved is not None:
            raise NumkvError(
                f"`seq`: expected sequence {seq} to have no open step, got one of {found.reserved} tokens; "
                "commit it or roll it back first"
            )
        return found

    # -- accounting

    def stats(self) -> PagedStats:
        """Counts of the cache at this moment.

        Returns
        -------
        PagedStats
        """
        # One call of the interpreter, which no concurrent writer can divide.
        lengths = [state.length for state in list(self._sequences.values())]
        unused = sum(-n % self.block_size for n in lengths)
        full = sum(group.window < 0 for group in self._groups)
        return PagedStats(len(lengths), sum(lengths), unused * full, self.blocks.stats())

    @streamed
    def check(self) -> None:
        """Prove the accounting: references, tables, lengths, the prefix cache, scales.

        Verifies that reference counts agree with the tables, that tables cover the lengths, that blocks are found by
        their hashes, and that the scales of committed tokens are finite.

        Raises
        ------
        NumkvError
            If something is wrong, or the cache is being changed by another thread.
        """
        before = self._generation
        self._refuse_changing(before)
        states = dict(self._sequences)
        self._refuse_reported()
        problem = check_books(self._store, states) or check_scales(self._store, states.values())
        self._refuse_changing(before)
        if problem:
            raise NumkvError(problem)

    def _refuse_reported(self) -> None:
        """Wait for launched kernels, and raise if a token was NaN or infinite, including those of open steps."""
        self._spread_bad(wait=True)
        for seq, state in list(self._sequences.items()):
            self._store.reports.refuse(seq, state.length + (state.reserved or 0))

    def _spread_bad(self, wait: bool = False) -> None:
        """Collect kernels' reports, and pass them to sequences that share blocks."""
        self._store.reports.collect(wait)
        if self._store.reports:
            self._store.reports.spread(dict(self._sequences), self.blocks)

    def _refuse_changing(self, generation: int) -> None:
        if self._access.writer or self._generation != generation:
            raise NumkvError(
                "check: this PagedKVCache is being changed by another call, so nothing can be said; check it when that "
                "is done"
            )

    # -- one state after another

    def _publish(self, states: Mapping[int, SequenceState | None]) -> None:
        """Replace states of sequences, None for removed ones; readers see all of them at once."""
        before = self._sequences
        drops = any(
            state is None or (seq in before and before[seq].dropped != state.dropped)
            for seq, state in states.items()
        )
        if None not in states.values():
            self._sequences.update(states)  # type: ignore[arg-type]
        else:
            for seq, state in states.items():
                if state is None:
                    self._sequences.pop(seq, None)
                else:
                    self._sequences[seq] = state
        # Last, and before rows are dropped: a reader that finds the same number after its computation has lost none.
        self._generation += 1
        if drops:
            self._access.dropped += 2

    def _exchange(self, states: dict[int, Any], released: NDArray[np.int32]) -> None:
        """Put states of sequences in place, and release blocks that they have no more; both or nothing."""
        before = self._sequences
        old = dict(before) if None in states.values() else {seq: before[seq] for seq in states}
        self._publish(states)
        if not len(released):
            return
        try:
            self.blocks.release(released)
        except Exception:  # the metadata are not what tables say, or busy in this very thread
            if len(old) > len(before):
                before.clear()  # so that the order stays
            before.update(old)
            self._generation += 1
            raise

    def _release_slots(self, slots: NDArray[np.int32]) -> None:
        """Release slots of states."""
        if self._store.states is not None:
            self._store.states.block_pool.release(slots)


def _check_store(store: Any) -> None:
    if store is None:
        return
    if not isinstance(store, PrefixStore):
        raise TypeError(
            f"`store`: expected a PrefixStore or None, got {type(store).__name__}; see numkv.store.PrefixStore"
        )
    if store.closed:
        raise NumkvError("`store`: expected an open store, got a closed one; make another")


def _specs(layers: Any, alike: dict[str, Any]) -> list[LayerSpec]:
    """Return the layers that a caller lists, or describes once for all."""
    said = [name for name, x in alike.items() if x is not None]
    if layers is not None:
        if said:
            raise TypeError(
                f"PagedKVCache: expected `layers`, or what all of them have, got both: {', '.join(said)}; say it in "
                "each LayerSpec"
            )
        try:
            specs = list(itertools.islice(iter(layers), _MOST_LAYERS + 1))
        except TypeError:
            specs = [layers]
        for of in specs:
            if of is layers or not isinstance(of, LayerSpec):
                raise TypeError(
                    f"`layers`: expected a numkv.LayerSpec for each layer, got {type(of).__name__}"
                )
        check_size("layers", len(specs), 1, _MOST_LAYERS)
        return specs
    if missing := [name for name in ("num_layers", "num_kv_heads", "head_dim") if name not in said]:
        raise TypeError(
            f"PagedKVCache: expected `num_layers`, `num_kv_heads` and `head_dim`, or `layers`, got no {missing[0]}"
        )
    num_layers = check_size("num_layers", alike.pop("num_layers"), 1, _MOST_LAYERS)
    return [LayerSpec(**{name: x for name, x in alike.items() if x is not None})] * num_layers


def _state_sizes(layers: Layers, slots: Any, block_size: int) -> tuple[int, int]:
    """Slots for states, and tokens from one checkpoint to the next; 0 without states."""
    if slots is not None and not isinstance(slots, StateSlots):
        raise TypeError(
            f"`state_slots`: expected a numkv.StateSlots or None, got {type(slots).__name__}"
        )
    if (slots is not None) != bool(layers.with_states):
        raise TypeError(
            "PagedKVCache: expected `state_slots` where layers have `states`, and only there, got "
            + ("states without it" if slots is None else "it without states")
        )
    if slots is None:
        return 0, 0
    every = block_size if slots.checkpoint_every is None else slots.checkpoint_every
    if every % block_size:
        raise ValueError(
            f"`checkpoint_every`: expected a multiple of the block size, {block_size}, got {every}"
        )
    return slots.num_slots, every


def _num_blocks(num_blocks: Any, max_nbytes: Any, of_states: int, of_block: int) -> int:
    """Return the number of blocks that a caller asks for, or that fit into the bytes that it gives."""
    if (num_blocks is None) == (max_nbytes is None):
        both = "neither" if num_blocks is None else "both"
        raise TypeError(f"PagedKVCache: expected one of `num_blocks` and `max_nbytes`, got {both}")
    if num_blocks is not None:
        return check_size("num_blocks", num_blocks)
    return max(0, check_size("max_nbytes", max_nbytes) - of_states) // of_block
