"""Full-precision key/value vectors of a cache of one sequence whose keys are quantised by channel.

Keys by channel have no scales until a group of 64 tokens is complete. The cache therefore stores the newest token's
group in full precision.

A query at position p reads the groups before its own as codes, and its own group in full precision. Prompts and decode
steps do the same, so results do not depend on how a prompt was split. For this, the vectors of the tokens appended last
stay in full precision until the next tokens come.

- Keys of a group are quantised from its full-precision vectors when the group is complete. Values are quantised at
  once.
- A truncation may end in a group that has codes alone. The codes stay. When tokens follow, they are decoded; when the
  group is complete again, all its keys are quantised together.
- `compact` does not change the groups before the first token that moves. Other tokens are read as the newest query
  reads them, and quantised in their new groups.
- With `FullPrecision.num_sink_tokens` the first tokens stay in full precision for good. They also have codes, as a part
  of their group.

Liu et al., "KIVI" (arXiv:2402.02750), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.attention.mass import mass_of_parts
from numkv.attention.options import CheckedOptions
from numkv.attention.parts import Part, converted
from numkv.attention.sight import seen_by_queries
from numkv.caches.full_precision import (
    FullPrecisionWindow,
    Watching,
    attend_in_full,
    float_pool,
    staging,
)
from numkv.caches.layer_spec import FullPrecision, in_full, refuse_longer_than_group
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import slots_of
from numkv.errors import NotSupported, NumkvError
from numkv.snapshots.snapshot import Tensor
from numkv.storage.pool import Pool
from numkv.storage.saved import row_tensors
from numkv.storage.tables import one_block_each, one_length, one_sequence
from numkv.targets.base import Array

Ints = NDArray[np.int64]


class _Newest(NamedTuple):
    """The full-precision vectors of a layer. The record is immutable; its block may receive more vectors."""

    block: Pool
    """One block, which has room for whole groups."""
    base: int
    """The token in the block's first slot; it begins a group."""
    first: int
    """The first token with vectors in the block; tokens before it have codes alone."""
    sinks: int = 0
    """Number of the layer's first tokens that stay in full precision for good."""


class NewestGroups:
    """The full-precision vectors of a cache of one sequence whose keys are stored by channel.

    Parameters
    ----------
    pool : Pool
        The quantised pool. Its kinds, sizes and target apply.
    num_layers : int
        Number of layers.
    kept : FullPrecision, optional
        Full-precision tokens that the user requested. The newest group is stored in any case.
    capacity : int, optional
        The most tokens that a layer can have, if known.
    """

    def __init__(
        self,
        pool: Pool,
        num_layers: int,
        kept: FullPrecision | None = None,
        capacity: int | None = None,
    ) -> None:
        self.kept, self._group = kept, pool.k_kind.group_tokens
        self._layers = [_Newest(float_pool(pool, 1, self._group), 0, 0) for _ in range(num_layers)]
        first = 0 if kept is None else kept.num_sink_tokens
        self._first = first if capacity is None else min(first, capacity)
        #: One block per layer for its first tokens.
        self._sinks = float_pool(pool, num_layers, self._first) if self._first else None

    @property
    def kinds(self) -> tuple[str, str]:
        """Return the storage kinds of full-precision K and V."""
        block = self._layers[0].block
        return block.k_kind.name, block.v_kind.name

    @property
    def nbytes(self) -> int:
        """Return the bytes of the full-precision vectors."""
        sinks = 0 if self._sinks is None else self._sinks.nbytes
        return sinks + sum(of.block.nbytes for of in self._layers)

    def quantised(self, layer: int, length: int) -> tuple[int, int]:
        """Return the positions ``[begin, end)`` that a layer's newest token reads as codes."""
        of = self._layers[layer]
        newest, begin = max(0, length - 1) // self._group * self._group, min(of.sinks, length)
        return begin, max(begin, newest, min(of.first, length))

    def copy(self) -> NewestGroups:
        """Return a deep copy that shares no memory."""
        new = object.__new__(NewestGroups)
        new.__dict__.update(self.__dict__)
        new._layers = [of._replace(block=of.block.copy()) for of in self._layers]
        new._sinks = None if self._sinks is None else self._sinks.copy()
        return new

    def resume(self, begins: list[int], ends: list[int]) -> None:
        """Set which positions are codes in each layer of an empty cache."""
        for layer, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            base = end // self._group * self._group
            self._layers[layer] = self._layers[layer]._replace(base=base, first=end, sinks=begin)

    def tensors(self, layer: int, begin: int, end: int, length: int) -> list[Tensor]:
        """Return the full-precision vectors of a layer's tokens outside of ``[begin, end)``, for a snapshot."""
        of = self._layers[layer]
        found = row_tensors(of.block, layer, np.arange(end, length) - of.base, "full_")
        if self._sinks is not None and begin:
            first = layer * self._first + np.arange(begin)
            found += row_tensors(self._sinks, layer, first, "first_")
        return found

    def check(self, lengths: NDArray[Any]) -> None:
        """Verify that the newest tokens of layers of these lengths have full-precision vectors or codes.

        Raises
        ------
        NumkvError
            If some have neither; the message names the layer.
        """
        for layer, (of, length) in enumerate(zip(self._layers, lengths.tolist(), strict=True)):
            size = int(of.block.k.shape[2])
            there = of.base <= of.first and length <= of.base + size
            if of.sinks > min(length, self._first):
                raise NumkvError(
                    f"check: expected at most {min(length, self._first)} first tokens in full in layer {layer}, got "
                    f"{of.sinks}"
                )
            if of.first > length or (of.first < length and not there):
                raise NumkvError(
                    f"check: expected rows in full up to token {length} of layer {layer}, got [{of.first}, "
                    f"{of.base + size})"
                )

    # -- writing

    def append(
        self, pool: Pool, layer: int, k: Array, v: Array, block_table: Array, start: int,
        watch: Watching | None = None,
    ) -> None:  # fmt: skip
        """Append checked vectors of new tokens, and quantise the token groups that they complete.

        Parameters
        ----------
        pool, layer, k, v, block_table, start
            See `FullPrecisionWindow.append`.
        watch
            Ignored: these vectors are checked before they are written.
        """
        tokens, some, target = int(k.shape[0]), self._group, pool.target
        if not tokens:
            return
        end, begin, of = start + tokens, start // some * some, self._layers[layer]
        size = int(pool.k.shape[2])
        table = np.asarray(target.to_host(block_table))

        def index(slots: Ints) -> Array:
            return target.index(slots, np.int64)

        now = of
        if of.base != begin or of.base + int(of.block.k.shape[2]) < end:
            now = _Newest(float_pool(pool, 1, -(-(end - begin) // some) * some), begin, begin)
            kept = np.arange(max(begin, min(of.first, start)), start)
            if len(kept):
                of.block.copy_tokens(kept - of.base, now.block, kept - begin)
        lost = np.arange(begin, min(of.first, start))
        if len(lost):
            here = index(slots_of(table, lost, size))
            of_k, of_v = pool.k_buffer.gather(here), pool.v_buffer.gather(here)
            now.block.scatter(of_k, of_v, index(lost - begin))
        sinks = of.sinks
        if self._sinks is not None:
            in_full = lost[lost < sinks]
            at = layer * self._first
            if len(in_full):
                self._sinks.copy_tokens(at + in_full, now.block, in_full - begin)
            if sinks == start < self._first:
                sinks = min(end, self._first)
                kept = np.full(tokens, -1)  # `scatter` skips -1
                kept[: sinks - start] = at + np.arange(start, sinks)
                self._sinks.scatter(k, v, index(kept))
        now.block.scatter(k, v, index(np.arange(start, end) - begin))
        pool.append(k, v, block_table, start)
        whole = np.arange(begin, end // some * some, some)
        if len(whole):
            to = slots_of(table, whole, size) // some
            pool.quantise(now.block, index((whole - begin) // some), index(to))
        self._layers[layer] = now._replace(first=begin, sinks=sinks)

    # -- bound calls

    def goes_on(self, layer: int, start: int, tokens: int) -> Pool | None:
        """Return the block that a bound call writes a layer's new tokens to, or None if a new block is needed."""
        of, some = self._layers[layer], self._group
        begin = start // some * some
        if start == begin or start + tokens > begin + some or not of.base == of.first == begin:
            return None
        return of.block

    def plan_bound(
        self,
        step: Any,
        table: NDArray[np.int32],
        size: int,
        start: int,
        tokens: int,
        window_left: int,
    ) -> None:
        """Plan a bound call of new tokens for which `goes_on` returns a block.

        Parameters
        ----------
        step : StepRecord
            The plan to fill.
        table, size
            The layer's blocks ``(max_blocks,)``, on the host. The tokens of a block.
        start, tokens
            The position of the first new token. The number of new tokens.
        window_left
            Earlier tokens that each query sees, or -1 for all.
        """
        some, end = self._group, start + tokens
        begin = start // some * some
        target = self._layers[0].block.target
        seen = seen_by_queries(target, None, tokens, end, window_left)
        _, coded, full = self._split(_Newest(self._layers[0].block, begin, begin), seen, end)
        part = step.part_in_full(1)
        part.block_table[:], part.seq_lens[:], part.q_starts[:] = 0, end - begin, (0, tokens)
        part.slots[:], part.ranges[:], step.ranges[:] = np.arange(start, end) - begin, full, coded
        part.plan(-1, some, 0, 0)
        whole = np.arange(begin, end // some * some, some)
        to = slots_of(table, whole, size) // some
        step.quantise((whole - begin) // some, to, bool((coded[:, 0] < coded[:, 1]).any()))

    def staging(self, tokens: int) -> Pool:
        """Return a block for float vectors of new tokens, to be passed to `append`; see `staged`."""
        return staging(self._layers[0].block, tokens)

    def truncate(self, length: int) -> None:
        """Drop the tokens of all layers from position `length` on. It allocates almost no memory."""
        for layer, of in enumerate(self._layers):
            if of.first > length or of.sinks > length:
                first, sinks = min(of.first, length), min(of.sinks, length)
                self._layers[layer] = of._replace(first=first, sinks=sinks)

    # -- compaction

    def plan_moves(
        self, pools: list[Pool], tables: list[NDArray[np.int32]], lengths: NDArray[Any], kept: Ints,
        shift: RopeShift | None,
    ) -> list[Callable[[], object]]:  # fmt: skip
        """Check that tokens can move to the front, and return functions that move keys and full-precision vectors.

        Parameters
        ----------
        pools : list of Pool
            The quantised pool of each layer.
        tables : list of int32 array (max_blocks,)
            The blocks of each layer, on the host.
        lengths : int array (num_layers,)
            Tokens of each layer.
        kept : int64 array (num_layers, n)
            Positions of the tokens to keep, in ascending order.
        shift : RopeShift or None
            Rotates keys to their new positions.

        Returns
        -------
        list of callable
            To be called in this order. They cannot fail and allocate nothing.
        """
        new = [*self._layers]
        sinks = None if self._sinks is None else self._sinks.copy()
        moves: list[Callable[[], object]] = []
        for layer, (of, pool, table, length) in enumerate(
            zip(self._layers, pools, tables, lengths.tolist(), strict=True)
        ):
            positions, n = kept[layer], kept.shape[1]
            elsewhere = np.flatnonzero(positions != np.arange(n))
            if not len(elsewhere):
                new[layer] = of._replace(first=min(of.first, n), sinks=min(of.sinks, n))
                continue
            begin = int(elsewhere[0]) // self._group * self._group
            block = self._read(pool, table, layer, positions[begin:], length, begin, shift)
            moves += self._quantising(pool, table, block, begin, n)
            held = of.sinks
            if sinks is not None and begin < self._first:
                held = min(n, self._first)
                block.copy_tokens(
                    np.arange(held - begin), sinks, layer * self._first + np.arange(begin, held)
                )
            newest = (n - 1) // self._group * self._group
            newest_block = float_pool(pool, 1, self._group)
            there = np.arange(newest, n)
            block.copy_tokens(there - begin, newest_block, there - newest)
            new[layer] = _Newest(newest_block, newest, newest, held)

        def commit() -> None:
            self._layers, self._sinks = new, sinks

        return [*moves, commit]

    def _read(
        self, pool: Pool, table: NDArray[np.int32], layer: int, positions: Ints, length: int, begin: int,
        shift: RopeShift | None,
    ) -> Pool:  # fmt: skip
        """Return a block of vectors as the newest query reads them; keys are shifted to positions from `begin` on."""
        target, of, some = pool.target, self._layers[layer], self._group
        block = float_pool(pool, 1, -(-len(positions) // some) * some)
        sinks, edge = self.quantised(layer, length)
        size = int(pool.k.shape[2])
        first, last = positions < sinks, positions >= edge
        codes = ~(first | last)
        places = [
            (pool, slots_of(table, positions[codes], size), codes),
            (of.block, positions[last] - of.base, last),
        ]
        if self._sinks is not None:
            places.append((self._sinks, layer * self._first + positions[first], first))
        offsets = begin + np.arange(len(positions)) - positions
        for source, slots, which in places:
            if not len(slots):
                continue
            here = target.index(slots, np.int64)
            k, v = source.k_buffer.gather(here), source.v_buffer.gather(here)
            if shift is not None:
                k = shift(layer, k, target.index(offsets[which], np.int64))
            block.scatter(k, v, target.index(np.flatnonzero(which), np.int64))
        return block

    def _quantising(
        self, pool: Pool, table: NDArray[np.int32], block: Pool, begin: int, end: int
    ) -> list[Callable[[], object]]:
        """Quantise a block's whole groups into scratch memory; return the function that copies them into the pool."""
        some, ops = self._group, pool.target.ops
        keys, whole = pool.k_buffer, (end - begin) // some
        if not whole:
            return []
        aside = keys.like(whole, some)
        groups = pool.target.index(np.arange(whole), np.int64)
        source, kind = block.k_buffer, keys.kind.name
        ops.quantise_groups(
            source.words, source.kind.name, groups, aside.words, kind, aside.scales, groups
        )
        staged = np.arange(whole * some)
        to = slots_of(table, begin + staged, int(pool.k.shape[2]))
        here, there, to_groups = (
            pool.target.index(x, np.int64) for x in (staged, to, to[::some] // some)
        )

        def copy() -> None:
            ops.copy_tokens(aside.words, here, keys.words, there)
            ops.copy_tokens(aside.scales, groups, keys.scales, to_groups)

        return [copy]

    # -- reading

    def overlay(self, pool: Pool, which: str, layer: int, rows: Array, length: int) -> Array:
        """Return a contiguous layer's vectors with full-precision ones put in; see `FullPrecisionWindow.overlay`."""
        target, of = pool.target, self._layers[layer]
        mixed = target.empty(tuple(map(int, rows.shape)), pool.buffer(which).kind.compute)
        mixed = converted(target, rows, mixed)
        if not length:
            return mixed
        begin, end = self.quantised(layer, length)
        places = [(of.block, np.arange(end, length), of.base)]
        if self._sinks is not None:
            places.append((self._sinks, np.arange(begin), -layer * self._first))
        for source, there, base in places:
            target.ops.copy_tokens(
                source.buffer(which).words, target.index(there - base, np.int64), mixed.reshape((1, *mixed.shape)),
                target.index(there, np.int64),
            )  # fmt: skip
        return mixed

    def attend(
        self, pool: Pool, block_table: Array, layer: int, q: Array, length: int, options: CheckedOptions
    ) -> Any:  # fmt: skip
        """Attend with checked queries of a layer's last tokens; see `FullPrecisionWindow.attend`.

        Each query reads its own group in full precision, and earlier groups as codes.
        """

        def parts(seen: Ints) -> list[Part]:
            return [part for part, _ in self._parts(pool, block_table, layer, seen, length)]

        block = self._layers[layer].block
        return attend_in_full(block, pool, block_table, q, length, options, parts)

    def _parts(
        self, pool: Pool, block_table: Array, layer: int, seen: Ints, length: int
    ) -> list[tuple[Part, int]]:
        """Return the parts that the last queries read, with ranges on the host, and the first token of each table."""
        target, of = pool.target, self._layers[layer]
        sinks, coded, full = self._split(of, seen, length)
        table = one_block_each(target.device_key, 1)
        parts = [(Part(of.block, table, full), of.base), (Part(pool, block_table, coded), 0)]
        if self._sinks is not None and of.sinks:
            own = target.index(np.array([[layer]]), np.int32)
            parts.append((Part(self._sinks, own, sinks), 0))
        return parts

    def _split(self, of: _Newest, seen: Ints, length: int) -> tuple[Ints, Ints, Ints]:
        """Split what queries see into first tokens, codes, and newest tokens counted from the block's base."""
        some, tokens = self._group, len(seen)
        own = np.maximum(np.arange(length - tokens, length) // some * some, of.first)
        own = np.minimum(own, length)[:, None]
        coded = np.minimum(seen, own)
        full = np.maximum(np.maximum(seen, own) - of.base, 0)
        return np.minimum(coded, of.sinks), np.maximum(coded, of.sinks), full

    def attention_mass(
        self, pool: Pool, block_table: Array, layer: int, q: Array, length: int, options: CheckedOptions, lse: Any
    ) -> Array:  # fmt: skip
        """Sum the attention that checked queries of a layer's last tokens give to each token.

        See `FullPrecisionWindow.attention_mass`.
        """
        target, of, tokens = pool.target, self._layers[layer], int(q.shape[0])
        seen = seen_by_queries(target, options.sight, tokens, length, options.window_left)
        lens, starts = one_length(target.key, length), one_sequence(target.key, tokens)
        parts, begins = [], []
        ends = length, length, of.sinks
        for (part, begin), end in zip(
            self._parts(pool, block_table, layer, seen, length), ends, strict=False
        ):
            if begin < end:  # else the sequence has codes alone
                of_table = target.index(np.array([end - begin]), np.int64)
                ranges = target.index(part.ranges, np.int64)
                parts.append(part._replace(ranges=ranges, lens=of_table))
                begins.append(begin)
        return mass_of_parts(parts, q, lens, starts, length, options, lse, begins)


def kept_in_full(pool: Pool, num_layers: int, full_precision: Any, capacity: int | None) -> Any:
    """Check `full_precision`; return the store of full-precision tokens that it or the kind of keys needs, or None."""
    if pool.by_channel:
        kept = in_full(full_precision, str(pool.k_kind), True)
        if kept is not None:
            refuse_longer_than_group(kept.window, pool.k_kind)
        return NewestGroups(pool, num_layers, kept, capacity)
    both = pool.k_kind, pool.v_kind
    said = "latents" if pool.is_latent else "/".join(dict.fromkeys(map(str, both)))
    kept = in_full(full_precision, said, any(of.has_scales for of in both))
    if kept is None:
        return None
    if pool.is_latent:
        raise NotSupported(f"`full_precision`: expected None for latents, got {kept}; leave it out")
    return FullPrecisionWindow(pool, num_layers, kept, capacity)
