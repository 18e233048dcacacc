"""Sequences in host memory: out of a `PagedKVCache`, and into one that has the same geometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.prefix import block_digests, token_ids
from numkv.caches.paged.store import BlockStore, Extra, SequenceState
from numkv.errors import DimensionMismatch, NumkvError
from numkv.storage.buffer import Buffer

__all__ = ["SwappedSequence", "check_swapped", "copy_in", "copy_out"]


@dataclass(frozen=True)
class SwappedSequence:
    """A sequence in host memory, independent of any cache.

    Attributes
    ----------
    length : int
        Tokens.
    tokens : int32 array (n,)
        Ids of the first tokens, as far as they are known.
    extra : mapping or None
        What else the content depends on.
    geometry : tuple
        What a cache must agree with to take it: sizes, kinds, windows, and the seed of its rotation or None.
    logical : list of int64 array
        Which blocks of each group's table are stored.
    buffers : list of tuple of array
        K, V and their scales, of each layer of a group.
    starts : tuple of int
        First token of each group that has rows, where a compaction moved it into a block; empty for 0.
    head_scales : tuple of tuple of array
        Scales of the kv heads of K and of V in each layer, for kinds that have such; else empty.
    """

    length: int
    tokens: NDArray[np.int32]
    extra: Extra | None
    geometry: tuple[Any, ...]
    logical: list[NDArray[np.int64]] = field(repr=False)
    buffers: list[tuple[NDArray[Any], ...]] = field(repr=False)
    starts: tuple[int, ...] = ()
    head_scales: tuple[tuple[NDArray[Any], NDArray[Any]], ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and scales."""
        return sum(x.nbytes for layer in (*self.buffers, *self.head_scales) for x in layer)


def copy_out(store: BlockStore, state: SequenceState) -> SwappedSequence:
    """Copy a sequence to host memory, in one copy per buffer."""
    logical = [np.flatnonzero(table >= 0) for table in state.tables]
    ids = state.blocks()
    source = store.target.index(ids, np.int32)
    to = store.target.index(np.arange(len(ids)), np.int32)
    buffers = []
    for pool in store.pools:
        staging = pool.like(len(ids))
        pool.copy_blocks(source, staging, to)
        sides = (staging.k_buffer, staging.v_buffer)
        words = [store.target.to_host(side.words) for side in sides]
        scales = [
            _NO_SCALES if _by_head(side) else store.target.to_host(side.scales) for side in sides
        ]
        buffers.append((*words, *scales))
    return SwappedSequence(
        state.length, state.tokens, state.extra, store.geometry, logical, buffers,
        tuple(state.starts), _head_scales(store),
    )  # fmt: skip


_NO_SCALES = np.empty((0, 0, 0), np.float32)
_NO_HEAD_SCALES = np.empty(0, np.float32)


def _by_head(side: Buffer) -> bool:
    return side.kind.scales_per == "head"


def _head_scales(store: BlockStore) -> tuple[tuple[NDArray[Any], NDArray[Any]], ...]:
    """Scales of heads of K and of V, by layer; empty if neither kind has any."""
    if not any(_by_head(side) for side in (store.pools[0].k_buffer, store.pools[0].v_buffer)):
        return ()

    def on_host(side: Buffer) -> NDArray[Any]:
        found: NDArray[Any] = np.array(store.target.to_host(side.scales))
        return found if _by_head(side) else _NO_HEAD_SCALES

    pools = [store.place(layer)[0] for layer in range(store.num_layers)]
    return tuple((on_host(pool.k_buffer), on_host(pool.v_buffer)) for pool in pools)


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
    source = store.target.index(np.arange(len(ids)), np.int32)
    to = store.target.index(ids, np.int32)
    for pool, buffers in zip(store.pools, swapped.buffers, strict=True):
        pool.from_host(buffers).copy_blocks(source, pool, to)
    tables = []
    ends = np.cumsum([len(logical) for logical in swapped.logical])
    for part, logical in zip(np.split(ids, ends[:-1]), swapped.logical, strict=True):
        table = np.full(store.blocks_for(swapped.length), -1, np.int32)
        table[logical] = part
        tables.append(table)
    num_groups = len(store.groups)
    none = [np.empty((0, 32), np.uint8)] * num_groups
    starts = list(swapped.starts) or [0] * num_groups
    tokens = token_ids(swapped.tokens).copy()
    return SequenceState(swapped.length, tables, swapped.extra, tokens, none, 0, starts)


def check_swapped(store: BlockStore, swapped: SwappedSequence) -> None:
    """Check that a swapped sequence fits the cache, and that its parts fit each other."""
    _check_geometry(store.geometry, swapped.geometry)
    _check_head_scales(_head_scales(store), swapped.head_scales)
    length, num_groups = swapped.length, len(store.groups)
    _expect(
        isinstance(length, int | np.integer) and bool(0 <= length < 2**31),
        "a length below 2**31", length,
    )  # fmt: skip
    ids = token_ids(swapped.tokens)
    _expect(ids.ndim == 1 and len(ids) <= length, f"ids of at most {length} tokens", ids.shape)
    extra = swapped.extra
    _expect(extra is None or isinstance(extra, Mapping), "extra keys by tag", type(extra).__name__)
    block_digests(ids[:0], store.block_size, extra)  # raises what is wrong with the keys
    _expect(len(swapped.logical) == num_groups, f"{num_groups} block tables", len(swapped.logical))
    starts = swapped.starts or (0,) * num_groups
    _expect(len(starts) == num_groups, f"{num_groups} starts or none", swapped.starts)
    for group, (logical, start) in enumerate(zip(swapped.logical, starts, strict=True)):
        _check_table(store, group, length, logical, start)
    count = sum(len(logical) for logical in swapped.logical)
    _expect(
        len(swapped.buffers) == len(store.pools),
        f"buffers of {len(store.pools)} layers", len(swapped.buffers),
    )  # fmt: skip
    for pool, buffers in zip(store.pools, swapped.buffers, strict=True):
        wanted = [
            (str(x.dtype), (count, *map(int, x.shape[1:])) if x.size and by_block else None)
            for x, by_block in (
                (pool.k, True), (pool.v, True),
                (pool.k_scale, not _by_head(pool.k_buffer)), (pool.v_scale, not _by_head(pool.v_buffer)),
            )
        ]  # fmt: skip
        got = [
            (str(x.dtype), tuple(x.shape) if want[1] else None)
            for x, want in zip(buffers, wanted, strict=False)
        ]
        _expect(len(buffers) == len(wanted) and got == wanted, f"buffers {wanted}", got)


def _check_geometry(own: tuple[Any, ...], given: Any) -> None:
    if isinstance(given, tuple) and len(given) == len(own):
        (*rest, theirs), (*own_rest, ours) = given, own
        if rest == own_rest and theirs != ours:
            raise DimensionMismatch(
                f"`swapped`: expected a sequence of {_describe_rotation(ours)} rows, got one of "
                f"{_describe_rotation(theirs)} rows; bring it into a cache with rotate={theirs is not None}",
                expected=own,
                actual=given,
            )
    if given != own:
        raise DimensionMismatch(
            f"`swapped`: expected a sequence of geometry {own}, got {given}",
            expected=own,
            actual=given,
        )


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


def _check_table(store: BlockStore, group: int, length: int, logical: Any, start: Any) -> None:
    """Check which blocks of a group's table there are, and its first token."""
    entries = np.asarray(logical)
    plain = entries.ndim == 1 and (entries.dtype.kind in "iu" or not entries.size)
    _expect(plain, "numbers of blocks", entries)
    entries = entries.astype(np.int64)
    blocks, first = store.blocks_for(length), store.first_needed(group, length)
    needed = entries[entries >= first]
    _expect(
        bool((np.diff(entries) > 0).all()) and len(needed) == blocks - first
        and (not len(entries) or bool(entries[0] >= 0 and entries[-1] < blocks)),
        f"rising numbers below {blocks}, all from {first} on among them", entries,
    )  # fmt: skip
    last_start = store.groups[group].first_visible(length)
    _expect(
        isinstance(start, int | np.integer) and bool(0 <= start <= last_start),
        f"a first token in [0, {last_start}]", start,
    )  # fmt: skip


def _expect(holds: bool, what: str, got: Any) -> None:
    if not holds:
        raise NumkvError(f"`swapped`: expected {what}, got {got}; it is damaged, make it anew")
