"""Sequences in host memory: out of a `PagedKVCache`, and into one that has the same geometry."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.prefix import block_digests, token_ids
from numkv.caches.paged.groups import LayerGroup, groups_of
from numkv.caches.paged.layers import NO_SCALES, LayerRows, Layers
from numkv.caches.paged.states import check_content
from numkv.caches.paged.store import BlockStore, Extra, SequenceState, blocks_in
from numkv.drawing.page import drawn
from numkv.errors import DimensionMismatch, NumkvError
from numkv.kinds import Kind
from numkv.snapshots.regions import blocks_of, put_blocks
from numkv.storage.buffer import are_scales


@dataclass(frozen=True)
@drawn
class SwappedSequence:
    """A sequence in host memory, independent of any cache.

    Attributes
    ----------
    length : int
        Tokens.
    tokens : int32 array (n,)
        Ids of the first tokens, as far as they are known.
    extra : mapping or None
        Other inputs that the content depends on.
    geometry : tuple
        Properties that a cache must share to accept it: sizes, kinds, windows, and the seed of its rotation or None.
        If layers differ, the rows, chunk and source of each come last.
    logical : list of int64 array
        Which blocks of each group's table are stored.
    buffers : list of tuple of array
        K, V and their scales, of each layer of a group; if layers differ, of each layer with rows.
    starts : tuple of int
        First token of each group that has rows, where a compaction moved it into a block; empty for 0.
    head_scales : tuple of tuple of array
        Scales of the kv heads of K and of V in each layer, if their kinds have any; else empty.
    states : tuple of tuple of array
        The states of each layer that keeps some, as they were after the last token; empty without tokens.
    """

    length: int
    tokens: NDArray[np.int32]
    extra: Extra | None
    geometry: tuple[Any, ...]
    logical: list[NDArray[np.int64]] = field(repr=False)
    buffers: list[tuple[NDArray[Any], ...]] = field(repr=False)
    starts: tuple[int, ...] = ()
    head_scales: tuple[tuple[NDArray[Any], NDArray[Any]], ...] = field(default=(), repr=False)
    states: tuple[tuple[NDArray[Any], ...], ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of K, V, scales and states."""
        parts = (*self.buffers, *self.head_scales, *self.states)
        return sum(x.nbytes for part in parts for x in part)


def copy_out(store: BlockStore, state: SequenceState) -> SwappedSequence:
    """Copy a sequence to host memory, in one copy per buffer."""
    logical = [np.flatnonzero(table >= 0) for table in state.tables]
    buffers = []
    for pool, groups in store.parts:
        ids = blocks_in([state.tables[group] for group in groups])
        words, scales = [], []
        for _, side in pool.stored:
            found = [blocks_of(store.target, x, ids) for x in side.by_token()]
            words.append(found[0])
            none = np.empty((0, 0, 0), side.kind.scale_word)
            scales.append(found[1] if side.kind.has_scales else none)
        if pool.is_latent:  # nothing for V
            words, scales = [words[0], words[0][:0]], [scales[0], scales[0][:0]]
        buffers.append((*words, *scales))
    states = () if store.states is None or state.slot < 0 else store.states.out(state.slot)
    return SwappedSequence(
        state.length, state.tokens, state.extra, store.geometry, logical, buffers,
        tuple(state.starts), head_scales_of(store), states,
    )  # fmt: skip


def head_scales_of(store: BlockStore) -> tuple[tuple[NDArray[Any], NDArray[Any]], ...]:
    """Scales of heads of K and of V, by layer; empty if neither kind has any."""
    found, none = [], np.empty(0, np.float32)
    for layer in range(len(store.layers.rows)):
        pool = store.layer_pools.get(layer)
        sides = () if pool is None else pool.stored
        scales = {
            name: np.array(store.target.to_host(side.scales))
            for name, side in sides
            if side.kind.scales_per == "head"
        }
        found.append((scales.get("k", none), scales.get("v", none)))
    return tuple(found) if any(x.size for of_layer in found for x in of_layer) else ()


def copy_in(store: BlockStore, swapped: SwappedSequence, ids: NDArray[np.int32]) -> SequenceState:
    """Copy a checked sequence into blocks that have been allocated for it.

    Parameters
    ----------
    store : BlockStore
        Where to.
    swapped : SwappedSequence
        The sequence.
    ids : int32 array (n,)
        As many blocks as it has in all groups.

    Returns
    -------
    SequenceState
        Nothing of it is registered in the prefix cache.
    """
    ends = np.cumsum([len(logical) for logical in swapped.logical])
    by_group = np.split(ids, ends[:-1])
    store.forget_bounds(ids)
    for (pool, groups), buffers in zip(store.parts, swapped.buffers, strict=True):
        own = np.concatenate([by_group[group] for group in groups])
        for i, (_, side) in enumerate(pool.stored):
            for x, content in zip(side.by_token(), buffers[i::2], strict=False):
                put_blocks(store.target, content, x, own)
    tables = []
    for part, logical in zip(by_group, swapped.logical, strict=True):
        table = np.full(store.blocks_for(swapped.length), -1, np.int32)
        table[logical] = part
        tables.append(table)
    num_groups = len(store.groups)
    none = [np.empty((0, 32), np.uint8)] * num_groups
    starts = list(swapped.starts) or [0] * num_groups
    tokens = token_ids(swapped.tokens).copy()
    return SequenceState(swapped.length, tables, swapped.extra, tokens, none, 0, starts)


class Geometry(NamedTuple):
    """The checked properties of the cache of a swapped sequence: see `BlockStore.geometry`."""

    block_size: int
    layers: Layers
    groups: list[LayerGroup]

    @classmethod
    def read(cls, given: Any) -> Geometry:
        """Check a geometry, of whatever type it is."""
        whole = isinstance(given, tuple) and len(given) in (5, 6)
        _expect(whole, "a geometry of sizes, two kinds, windows and a seed", given)
        sizes, k_kind, v_kind, windows, seed, *more = given
        _expect(_are_integers(sizes, 1) and len(sizes) == 4, "four sizes from 1 up", sizes)
        _expect(_are_integers(windows, -1) and bool(windows), "a window for each layer", windows)
        _expect(seed is None or _are_integers((seed,), 0), "a seed or None", seed)
        heads, block_size, dim, dim_v = sizes
        _expect(
            isinstance(k_kind, str) and isinstance(v_kind, str), "names of kinds", (k_kind, v_kind)
        )
        extras = more[0] if more else None
        _expect(
            not more or (isinstance(extras, tuple) and len(extras) in (4, 5)),
            "rows of layers",
            extras,
        )
        try:
            layers = Layers.read((heads, dim, dim_v, k_kind, v_kind), windows, extras)
        except (TypeError, ValueError, IndexError) as error:
            raise NumkvError(f"`swapped`: {error}; it is damaged, make it anew") from None
        latents = any(rows is not None and rows.is_latent for rows in layers.rows)
        _expect(seed is None or not latents, "latents that are not rotated", seed)
        both = zip(layers.windows, layers.chunks, strict=True)
        _expect(not any(w >= 0 and c for w, c in both), "a window or a chunk", layers.chunks)
        return cls(block_size, layers, groups_of(layers, block_size))

    @property
    def parts(self) -> list[tuple[LayerRows, list[int]]]:
        """Rows in each buffer, and the groups that have some there; see `numkv.caches.paged.store.Part`."""
        if self.layers.alike:
            every = list(range(len(self.groups)))
            return [(self.layers.first, every) for _ in self.groups[0].layers]
        return [
            (rows, [number])
            for number, group in enumerate(self.groups)
            for rows in (self.layers.rows[layer] for layer in group.layers)
            if rows is not None
        ]

    def buffer_shapes(
        self, rows: LayerRows, count: int
    ) -> list[tuple[np.dtype[Any], tuple[int, ...] | None]]:
        """Dtypes and shapes of K, V and their scales in `count` blocks; None for scales that blocks do not have."""
        found: list[tuple[np.dtype[Any], tuple[int, ...] | None]] = [
            (dtype, None if shape == NO_SCALES else (count, *shape))
            for shape, dtype in rows.parts(self.block_size)
        ]
        if rows.is_latent:  # V is in the rows of K
            found += [(dtype, None) for dtype, _ in found]
        return [*found[::2], *found[1::2]]

    def head_scale_shapes(self) -> list[list[int]]:
        """Return how many scales of heads K and V have in each layer; an empty list if no kind has any."""
        found = []
        for source in self.layers.sources:
            rows = self.layers.rows[source]
            if rows is None:
                found.append([0, 0])
                continue
            counts = [
                rows.num_kv_heads * (of.scales_per == "head") for of in (rows.k_kind, rows.v_kind)
            ]
            found.append([counts[0], 0] if rows.is_latent else counts)
        return found if any(map(any, found)) else []

    def kinds_of(self, layer: int) -> tuple[Kind, Kind]:
        """Kinds of the rows that a layer reads."""
        rows = self.layers.rows[self.layers.sources[layer]] or self.layers.first
        return rows.k_kind, rows.v_kind


def _are_integers(x: Any, least: int) -> bool:
    return isinstance(x, tuple) and all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) and least <= n < 2**31
        for n in x
    )


def check_swapped(store: BlockStore, swapped: SwappedSequence) -> None:
    """Check that a swapped sequence fits the cache, and that its parts fit each other."""
    if not isinstance(swapped, SwappedSequence):
        raise TypeError(
            f"`swapped`: expected a SwappedSequence, got {type(swapped).__name__}; pass what `swap_out` returned"
        )
    Geometry.read(swapped.geometry)
    _check_geometry(store.geometry, swapped.geometry)
    check_sequence(swapped)
    _check_head_scales(head_scales_of(store), swapped.head_scales)


def check_sequence(swapped: SwappedSequence) -> None:
    """Check that the parts of a swapped sequence fit each other.

    Raises
    ------
    NumkvError, ValueError, TypeError
        What does not fit.
    """
    geometry = Geometry.read(swapped.geometry)
    length, num_groups = swapped.length, len(geometry.groups)
    _expect(_are_integers((length,), 0), "a length below 2**31", length)
    ids = token_ids(swapped.tokens)
    _expect(ids.ndim == 1 and len(ids) <= length, f"ids of at most {length} tokens", ids.shape)
    extra = swapped.extra
    _expect(extra is None or isinstance(extra, Mapping), "extra keys by tag", type(extra).__name__)
    block_digests(ids[:0], geometry.block_size, extra)  # raises what is wrong with the keys
    _expect_count(swapped.logical, num_groups, "block tables")
    starts = swapped.starts or (0,) * num_groups
    _expect_count(starts, num_groups, "starts")
    for group, logical, start in zip(geometry.groups, swapped.logical, starts, strict=True):
        check_table(geometry, group, length, logical, start)
    shapes_of_states = geometry.layers.with_states
    if shapes_of_states and length:
        check_content(shapes_of_states, swapped.states)
    else:
        _expect_count(swapped.states, 0, "states")
    parts = geometry.parts
    _expect_count(swapped.buffers, len(parts), "layers of buffers")
    for (rows, groups), buffers in zip(parts, swapped.buffers, strict=True):
        count = sum(len(swapped.logical[group]) for group in groups)
        _check_buffers(geometry, rows, count, buffers)
    shapes = geometry.head_scale_shapes()
    given = swapped.head_scales
    _expect_count(given, len(shapes), "layers of scales of heads")
    for number, (layer, counts) in enumerate(zip(given, shapes, strict=True)):
        _expect_count(layer, 2, "scales of heads, K's and V's")
        _expect([np.shape(x) for x in layer] == [(n,) for n in counts], f"{counts} scales", layer)
        for of, x in zip(geometry.kinds_of(number), layer, strict=True):
            plain = isinstance(x, np.ndarray) and (not x.size or x.dtype == of.scale_word)
            _expect(plain and (not x.size or are_scales(of, x)), "finite scales above 0", x)


def _check_buffers(geometry: Geometry, rows: LayerRows, count: int, buffers: Any) -> None:
    """Check the K, V and scales of one layer."""
    wanted = geometry.buffer_shapes(rows, count)
    _expect_count(buffers, len(wanted), "arrays, K, V and their scales")
    arrays = all(isinstance(x, np.ndarray) for x in buffers)
    _expect(arrays, "arrays", [type(x).__name__ for x in buffers])
    for x, (dtype, shape) in zip(buffers, wanted, strict=True):
        fits = x.dtype == dtype and (shape is None or x.shape == shape)
        _expect(fits, f"{dtype} {shape or 'scales'}", f"{x.dtype} {x.shape}")
        _expect(
            x.flags.c_contiguous and x.flags.aligned, "contiguous arrays", f"strides {x.strides}"
        )
    for of, scales in zip((rows.k_kind, rows.v_kind), buffers[2:], strict=True):
        if of.has_scales and not are_scales(of, scales):
            _expect(False, "finite scales from 0 up", "NaN, infinity or negative ones")


def _check_geometry(own: tuple[Any, ...], given: Any) -> None:
    if given == own:
        return
    what, (ours, theirs) = f"geometry {own}, got {given}", (own[4], given[4])
    if (*given[:4], ours, *given[5:]) == own:  # only that differs
        what = (
            f"{_describe_rotation(ours)} rows, got one of {_describe_rotation(theirs)} rows; bring it into a cache "
            f"with rotate={theirs is not None}"
        )
    raise DimensionMismatch(f"`swapped`: expected a sequence of {what}", expected=own, actual=given)


def _check_head_scales(own: Any, given: Any) -> None:
    """Check that rows are stored by the scales of the cache's own heads: they are copied as they are."""
    _expect(len(given) == len(own), f"scales of heads in {len(own)} layers", len(given))
    for layer, (ours, theirs) in enumerate(zip(own, given, strict=True)):
        for name, a, b in zip(("k", "v"), ours, theirs, strict=True):
            _expect(np.shape(b) == a.shape, f"{a.shape} scales of `{name}`", np.shape(b))
            if not np.array_equal(a, b):
                raise NumkvError(
                    f"`swapped`: expected rows stored by this cache's scales of `{name}` in layer {layer}, "
                    f"{a.tolist()}, got {np.asarray(b).tolist()}; call set_scales({layer}, {name}=…) with "
                    "these before sequences are added"
                )


def _describe_rotation(seed: int | None) -> str:
    return "unrotated" if seed is None else f"rotated (seed {seed})"


def check_table(
    geometry: Geometry, group: LayerGroup, length: int, logical: Any, start: Any
) -> None:
    """Check which blocks of a group's table there are, and its first token."""
    entries = np.asarray(logical)
    plain = entries.ndim == 1 and (entries.dtype.kind in "iu" or not entries.size)
    _expect(plain, "numbers of blocks", entries)
    entries = entries.astype(np.int64)
    size, last_start = geometry.block_size, group.first_visible(length)
    blocks, first, kept = -(-length // size), last_start // size, group.kept_blocks(size)
    if group.beside and _are_integers((start,), 0):
        first, last_start = max(first, -(-int(start) // size)), length
    needed = entries[entries >= first]
    first_ones = np.arange(min(kept, blocks))
    _expect(
        bool((np.diff(entries) > 0).all()) and len(needed) == blocks - first
        and (not len(entries) or bool(entries[0] >= 0 and entries[-1] < blocks))
        and np.array_equal(entries[: len(first_ones)], first_ones),
        f"rising numbers below {blocks}, all below {kept} and from {first} on among them", entries,
    )  # fmt: skip
    _expect(
        _are_integers((start,), 0) and bool(start <= last_start),
        f"a first token in [0, {last_start}]", start,
    )  # fmt: skip


def _expect_count(x: Any, count: int, what: str) -> None:
    _expect(isinstance(x, list | tuple) and len(x) == count, f"{count} {what}", x)


def _expect(holds: bool, what: str, got: Any) -> None:
    if not holds:
        raise NumkvError(
            f"`swapped`: expected {what}, got {reprlib.repr(got)}; it is damaged, make it anew"
        )
