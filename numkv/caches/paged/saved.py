"""Snapshots of a `PagedKVCache` and of its sequences, with the places of their blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.blocks.prefix import block_digests
from numkv.caches.layer_spec import StateSlots
from numkv.caches.paged.key_bounds import bounds_nbytes
from numkv.caches.paged.memory import block_nbytes
from numkv.caches.paged.states import StateMemory
from numkv.caches.paged.store import BlockStore, SequenceState, blocks_in
from numkv.caches.paged.swap import Geometry, SwappedSequence, check_sequence, check_table
from numkv.errors import NumkvError
from numkv.snapshots.fields import Fields, claims, expect
from numkv.snapshots.saved import Saved, Spec, entry, integer, integers, parts
from numkv.snapshots.snapshot import Options, Snapshot, Source, Tensor, fill_all
from numkv.storage.buffer import Buffer
from numkv.storage.saved import block_tensor, block_tensors, head_scales_tensor

_BUFFERS = ("k", "v", "k_scale", "v_scale")
_HEAD_SCALES = ("k_head_scale", "v_head_scale")  # of kinds whose heads have scales, by layer
_NO_BLOCKS = (0, 0, 0)  # shape of scales that there are none of, or that are not of blocks
_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
_MOST = 2**62

# -- entries


def _tuples(x: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _extra(fields: Fields, name: str, _: Any) -> dict[str, Any] | None:
    """Extra keys, of which JSON has bytes as hex."""
    given = fields.get(name)
    if given is None:
        return None
    expect(isinstance(given, dict), "extra keys are no object")
    found: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, dict):
            with claims("extra keys"):
                expect(list(value) == ["bytes"] and isinstance(value["bytes"], str), "no bytes")
                found[key] = bytes.fromhex(value["bytes"])
        else:
            plain = isinstance(value, int | str) and not isinstance(value, bool)
            expect(plain, f"the extra key {key!r} is neither number nor text")
            found[key] = value
    with claims("extra keys"):
        block_digests(np.empty(0, np.int32), 1, found)
    return found


@dataclass(kw_only=True)
class _Paged(Saved):
    """An object with a geometry."""

    layout = "paged"

    geometry: Any = entry(lambda f, name, x: _tuples(f.get(name)))

    def check(self) -> None:
        """See that there is such a geometry."""
        with claims("the geometry"):
            _ = self.shape

    @functools.cached_property
    def shape(self) -> Geometry:
        """The geometry, checked."""
        return Geometry.read(self.geometry)

    def state_specs(self, prefix: str, length: int) -> dict[str, Spec]:
        """Return the states of a sequence, as bytes."""
        return {
            f"{prefix}state.{i}.{j}": Spec(np.dtype(np.uint8), (shape.nbytes,))
            for i, of_layer in enumerate(self.shape.layers.with_states.values() if length else ())
            for j, shape in enumerate(of_layer)
        }

    def states(self, prefix: str, length: int, source: Source) -> Any:
        """Return the states of a sequence, layer after layer."""
        found = iter(map(source.array, self.state_specs(prefix, length)))
        return tuple(
            tuple(next(found).view(x.dtype).reshape(x.shape) for x in of_layer)
            for of_layer in (self.shape.layers.with_states.values() if length else ())
        )


def _state_arrays(prefix: str, states: Sequence[Sequence[NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {
        f"{prefix}state.{i}.{j}": np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        for i, of_layer in enumerate(states)
        for j, x in enumerate(of_layer)
    }


# -- a cache


@dataclass(kw_only=True)
class SavedSequence(Saved):
    """A sequence of a `PagedKVCache`."""

    sequence: int = integer(most=_MOST)
    length: int = integer()
    cached: int = integer(most="length")
    tokens: int = integer(most="length")
    extra: Any = entry(_extra)
    starts: list[int] = integers()
    slot: int = integer()


@dataclass(kw_only=True)
class SavedPagedCache(_Paged):
    """A `PagedKVCache`: its sequences, each block once, and how much room there is.

    Blocks that no sequence has, of released prefixes, are not saved, and neither are pins.
    """

    num_blocks: int = integer()
    blocks: int = integer(most="num_blocks")
    blocks_of_parts: list[int] = integers()
    next: int = integer(most=_MOST)
    num_states: int = integer()
    checkpoint_every: int = integer()
    sequences: list[SavedSequence] = parts(SavedSequence)
    key_bounds: int = integer(most=1, missing=0)  # which are found anew when they are wanted

    def check(self) -> None:
        """See `_Paged.check`; and compare sequences, parts and slots with it."""
        super().check()
        numbers = [x.sequence for x in self.sequences]
        expect(len(set(numbers)) == len(numbers), "a sequence comes twice")
        expect(all(n < self.next for n in numbers), f"a sequence from {self.next} on")
        groups, parts = len(self.shape.groups), len(self.shape.parts)
        expect(all(len(x.starts) == groups for x in self.sequences), f"other than {groups} starts")
        expect(len(self.blocks_of_parts) == parts, f"blocks of other than {parts} parts")
        every, size = self.checkpoint_every, self.shape.block_size
        if self.shape.layers.with_states:
            limits = self.num_states < 2**31 - 3 and size <= every < 2**31 - 3 and every % size == 0
            expect(limits, f"{self.num_states} states, and checkpoints after {every} tokens")
            slots = {x.slot for x in self.sequences if x.length}
            expect(len(slots) <= self.num_states, "states in more slots than there are")
        else:
            expect(self.num_states == every == 0, "slots for states that no layer has")

    def specs(self) -> dict[str, Spec]:
        """See `Saved.specs`."""
        shape, found = self.shape, {}
        for i, x in enumerate(self.sequences):
            found[f"{i}.tokens"] = Spec(_INT32, (x.tokens,))
            found |= self.state_specs(f"{i}.", x.length)
            for group in range(len(shape.groups)):
                found[f"{i}.table.{group}"] = Spec(_INT32, (-(-x.length // shape.block_size),))
        for slot, ((rows, _), count) in enumerate(
            zip(shape.parts, self.blocks_of_parts, strict=True)
        ):
            shapes = zip(_BUFFERS, shape.buffer_shapes(rows, count), strict=True)
            found |= {f"{name}.{slot}": Spec(of, s) for name, (of, s) in shapes if s is not None}
        for layer, counts in enumerate(shape.head_scale_shapes()):
            if shape.layers.rows[layer] is not None:
                named = zip(_HEAD_SCALES, counts, strict=True)
                found |= {f"{name}.{layer}": Spec(_FLOAT32, (n,)) for name, n in named if n}
        return found

    @property
    def nbytes(self) -> int:
        """See `Saved.nbytes`."""
        layers, groups, size = self.shape.layers, self.shape.groups, self.shape.block_size
        of_block = (
            block_nbytes(layers, groups, size) + bounds_nbytes(layers, groups) * self.key_bounds
        )
        of_states = self.num_states * StateMemory.slot_nbytes(layers.with_states)
        # Books of a block: its digest, its tokens, references and lists.
        return of_states + self.num_blocks * (of_block + 4 * size + 128)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class for such a cache."""
        of = self.shape.layers
        rotate, bounded = self.geometry[4] is not None, bool(self.key_bounds)
        found = {
            "layers": of.specs(rotate, bounded), "num_blocks": self.num_blocks,
            "block_size": self.shape.block_size,
        }  # fmt: skip
        slots = StateSlots(self.num_states, self.checkpoint_every or None)
        return found | ({"state_slots": slots} if of.with_states else {})

    def read_states(self, source: Source) -> list[SequenceState]:
        """Return the sequences, with tables of the blocks as the file counts them."""
        return [self._state(i, x, source) for i, x in enumerate(self.sequences)]

    def _state(self, i: int, x: SavedSequence, source: Source) -> SequenceState:
        tables = []
        for number, (group, start) in enumerate(zip(self.shape.groups, x.starts, strict=True)):
            table = source.array(f"{i}.table.{number}")
            known = bool(((table >= -1) & (table < self.blocks)).all())
            expect(known, "a table names a block that is none")
            with claims(f"a table of sequence {x.sequence}"):
                check_table(self.shape, group, x.length, np.flatnonzero(table >= 0), start)
            tables.append(table)
        none = [np.empty((0, 32), np.uint8)] * len(tables)
        tokens = source.array(f"{i}.tokens")
        state = SequenceState(x.length, tables, x.extra, tokens, none, 0, x.starts, cached=x.cached)
        own = state.blocks()
        expect(len(np.unique(own)) == len(own), f"sequence {x.sequence} has a block twice")
        return state


def cache_snapshot(
    store: BlockStore, states: dict[int, SequenceState], following: int, held: Any
) -> Snapshot:
    """Return a cache's snapshot: its buffers, its sequences, and the number of the next one."""
    ids = np.unique(np.concatenate([np.empty(0, np.int32), *(x.blocks() for x in states.values())]))
    parts, slots = own_blocks(store, states.values(), ids), store.states
    saved = SavedPagedCache(
        geometry=store.geometry, num_blocks=store.blocks.num_blocks, blocks=len(ids),
        blocks_of_parts=list(map(len, parts)), next=following, key_bounds=int(store.bounds is not None),
        num_states=0 if slots is None else slots.block_pool.num_blocks,
        checkpoint_every=0 if slots is None else slots.every,
        sequences=[
            SavedSequence(
                sequence=seq, length=x.length, cached=x.cached, tokens=len(x.tokens), extra=x.extra,
                starts=list(x.starts), slot=max(0, x.slot),
            )
            for seq, x in states.items()
        ],
    )  # fmt: skip
    arrays: dict[str, NDArray[Any]] = {}
    for i, state in enumerate(states.values()):
        arrays[f"{i}.tokens"] = np.asarray(state.tokens, np.int32)
        if slots is not None and state.slot >= 0:
            arrays |= _state_arrays(f"{i}.", slots.out(state.slot))
        for group, table in enumerate(state.tables):
            in_file = np.where(table >= 0, np.searchsorted(ids, table), -1)
            arrays[f"{i}.table.{group}"] = in_file.astype(np.int32)
    return Snapshot(saved, store_tensors(store, states.values(), ids, ids), held, arrays)


def own_blocks(
    store: BlockStore, states: Iterable[SequenceState], ids: NDArray[Any]
) -> list[NDArray[np.int64]]:
    """Which of some blocks belong to groups that have rows in each part."""
    every = list(states)
    return [
        np.searchsorted(
            ids, np.unique(blocks_in([x.tables[group] for x in every for group in groups]))
        )
        for _, groups in store.parts
    ]


def store_tensors(
    store: BlockStore, states: Iterable[SequenceState], numbers: NDArray[Any], ids: NDArray[Any]
) -> list[Tensor]:
    """Return where the blocks of sequences lie, and the scales of heads.

    Parameters
    ----------
    store : BlockStore
        The buffers.
    states : iterable of SequenceState
        The sequences.
    numbers : int array (n,)
        The blocks as their tables have them, which rise.
    ids : int array (n,)
        The same blocks as the buffers have them.
    """
    every, size, found = list(states), store.block_size, []
    # The tokens of each block, by the sequence with most tokens in it.
    fills = np.zeros(len(ids), np.int64)
    for table, length in ((table, x.length) for x in every for table in x.tables):
        logical = np.flatnonzero(table >= 0)
        at = np.searchsorted(numbers, table[logical])
        np.maximum.at(fills, at, np.clip(length - logical * size, 0, size))
    for slot, ((pool, _), own) in enumerate(
        zip(store.parts, own_blocks(store, every, numbers), strict=True)
    ):
        found += block_tensors(pool, slot, ids[own], fills[own])
    for layer in store.layers.storing:
        for side, x in store.place(layer)[0].stored:
            if x.kind.scales_per == "head":
                take = _take_ones if store.bounds is not None else None
                found.append(head_scales_tensor(f"{side}_head_scale.{layer}", side, x, take))
    return found


def _take_ones(side: str, buffer: Buffer, scales: NDArray[Any]) -> None:
    expect(bool((scales == 1).all()), "scales of 1 beside bounds of keys")


def put_states(
    store: BlockStore, saved: SavedPagedCache, states: list[SequenceState], source: Source
) -> list[SequenceState]:
    """Return the sequences with their states in slots of the cache, which several may share."""
    slots, seen, found = store.states, dict[int, int](), []
    for i, (x, state) in enumerate(zip(saved.sequences, states, strict=True)):
        if slots is not None and x.length:
            content = saved.states(f"{i}.", x.length, source)
            if x.slot in seen:
                slots.block_pool.acquire([seen[x.slot]])
            else:
                seen[x.slot] = int(slots.block_pool.allocate(1)[0])
                slots.put(seen[x.slot], content)
            state = state._replace(slot=seen[x.slot])
        found.append(state)
    return found


# -- sequences in host memory


@dataclass(kw_only=True)
class SavedSwapped(Saved):
    """A sequence as `PagedKVCache.swap_out` gives it."""

    length: int = integer()
    tokens: int = integer(most="length")
    extra: Any = entry(_extra)
    starts: list[int] = integers()
    blocks: list[int] = integers()


@dataclass(kw_only=True)
class SavedSequences(_Paged):
    """Any number of `SwappedSequence` of one geometry."""

    sequences: list[SavedSwapped] = parts(SavedSwapped)
    nbytes = 0  # as many as the file's

    def check(self) -> None:
        """See `_Paged.check`."""
        super().check()
        expect(bool(self.sequences), "there are no sequences")
        groups = len(self.shape.groups)
        expect(all(len(x.blocks) == groups for x in self.sequences), f"other than {groups} tables")

    def specs(self) -> dict[str, Spec]:
        """See `Saved.specs`."""
        found = {}
        for i, x in enumerate(self.sequences):
            found[f"{i}.tokens"] = Spec(_INT32, (x.tokens,))
            for group, count in enumerate(x.blocks):
                found[f"{i}.logical.{group}"] = Spec(_INT64, (count,))
            found |= self.state_specs(f"{i}.", x.length)
            found |= {name: spec for of_part in self.buffers(i) for name, spec in of_part.items()}
            for layer, counts in enumerate(self.shape.head_scale_shapes()):
                named = zip(_HEAD_SCALES, counts, strict=True)
                found |= {f"{i}.{name}.{layer}": Spec(_FLOAT32, (n,)) for name, n in named}
        return found

    def buffers(self, i: int) -> list[dict[str, Spec]]:
        """The tensors of K, V and their scales of a sequence, by part; empty ones where blocks have none."""
        found = []
        for part, (rows, groups) in enumerate(self.shape.parts):
            count = sum(self.sequences[i].blocks[group] for group in groups)
            with claims("the sizes"):
                shapes = self.shape.buffer_shapes(rows, count)
            specs = [Spec(of, _NO_BLOCKS if shape is None else shape) for of, shape in shapes]
            found.append({f"{i}.{x}.{part}": spec for x, spec in zip(_BUFFERS, specs, strict=True)})
        return found


class Sequences:
    """Sequences in host memory as one object of a file."""

    __saved__ = SavedSequences

    def __init__(self, sequences: Sequence[SwappedSequence]) -> None:
        self.sequences = list(sequences)

    def __snapshot__(self) -> Snapshot:
        """See `numkv.snapshots.snapshot`."""
        for x in self.sequences:
            if not isinstance(x, SwappedSequence):
                raise TypeError(
                    f"`sequences`: expected what PagedKVCache.swap_out gives, got {type(x).__name__}"
                )
        geometries = [x.geometry for x in self.sequences]
        if not geometries or any(x != geometries[0] for x in geometries):
            raise NumkvError(
                f"`sequences`: expected one or more of the same geometry, got {geometries}"
            )
        for x in self.sequences:
            check_sequence(x)
        saved = SavedSequences(
            geometry=geometries[0],
            sequences=[
                SavedSwapped(
                    length=int(x.length), tokens=len(x.tokens), extra=x.extra, starts=list(x.starts),
                    blocks=list(map(len, x.logical)),
                )
                for x in self.sequences
            ],
        )  # fmt: skip
        arrays: dict[str, NDArray[Any]] = {}
        for i, x in enumerate(self.sequences):
            arrays[f"{i}.tokens"] = np.asarray(x.tokens, np.int32)
            arrays |= {f"{i}.logical.{j}": np.asarray(y, np.int64) for j, y in enumerate(x.logical)}
            arrays |= _state_arrays(f"{i}.", x.states)
            for layer, scales in enumerate(x.head_scales):
                named = zip(_HEAD_SCALES, scales, strict=True)
                arrays |= {f"{i}.{name}.{layer}": y for name, y in named}
        return Snapshot(saved, self._tensors(saved), [], arrays)

    def _tensors(self, saved: SavedSequences) -> list[Tensor]:
        """Return where the blocks of all sequences lie."""
        found, host, size = [], targets.get("cpu"), saved.shape.block_size
        for i, x in enumerate(self.sequences):
            for specs, buffers, (_, groups) in zip(
                saved.buffers(i), x.buffers, saved.shape.parts, strict=True
            ):
                logical = np.concatenate([np.empty(0, np.int64), *(x.logical[g] for g in groups)])
                fills = np.clip(int(x.length) - logical * size, 0, size)
                for (name, spec), y in zip(specs.items(), buffers, strict=True):
                    none = spec.shape == _NO_BLOCKS
                    blocks = np.empty(spec.shape, spec.dtype) if none else np.asarray(y)
                    ids = np.arange(len(blocks))
                    found.append(block_tensor(host, name, blocks, ids, fills[: len(ids)]))
        return found

    @classmethod
    def __restore__(cls, saved: SavedSequences, source: Source, options: Options) -> Sequences:
        """See `numkv.snapshots.snapshot`."""
        found = []
        counts = saved.shape.head_scale_shapes()
        for i, x in enumerate(saved.sequences):
            scales: Any = tuple(
                tuple(source.array(f"{i}.{name}.{layer}") for name in _HEAD_SCALES)
                for layer in range(len(counts))
            )
            found.append(
                SwappedSequence(
                    x.length, source.array(f"{i}.tokens"), x.extra, saved.geometry,
                    [source.array(f"{i}.logical.{group}") for group in range(len(x.blocks))],
                    [tuple(np.empty(s.shape, s.dtype) for s in of.values()) for of in saved.buffers(i)],
                    tuple(x.starts), scales, saved.states(f"{i}.", x.length, source),
                )
            )  # fmt: skip
        made = cls(found)
        fill_all(source, made._tensors(saved))
        source.verify()
        for i, sequence in enumerate(found):
            with claims(f"sequence {i}"):
                check_sequence(sequence)
        return made
