"""Keys by channel in a cache of one sequence: rows that are in full, and which of them.

Keys by channel have scales when a group of 64 tokens is complete, so the group of the newest token is kept in full. A
query at position p reads the groups before its own as codes and its own in full, in a prompt as in decode: so the rows
of the tokens that came last are kept until the next ones come, and results do not depend on how a prompt was cut.

- Codes of a group are made of its rows in full when it is complete, those of V at once.
- A truncation into a group whose rows in full are gone leaves its codes. They are decoded when tokens follow, and
  quantised with these when the group is complete again.

Liu et al., "KIVI" (arXiv:2402.02750), section 3.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.attention.attend import check_call, run
from numkv.attention.mass import mass_of_parts
from numkv.attention.options import CheckedOptions
from numkv.attention.parts import Part, converted, run_seen
from numkv.attention.sight import seen_by_queries
from numkv.caches.full_precision import FullPrecisionWindow, Watching, float_pool, staging
from numkv.caches.layer_spec import FullPrecision
from numkv.compaction.moves import slots_of
from numkv.errors import NotSupported, NumkvError
from numkv.snapshots.snapshot import Tensor
from numkv.storage.pool import Pool
from numkv.storage.saved import row_tensors
from numkv.storage.tables import one_block_each
from numkv.targets.base import Array

Ints = NDArray[np.int64]


class _Newest(NamedTuple):
    """Rows of a layer in full; replaced, never changed, but for rows that follow."""

    block: Pool
    """One block, of whole groups."""
    base: int
    """The token in its first slot, which begins a group."""
    first: int
    """The first token whose row is there; those before it, if there are any, are there as codes alone."""


class NewestGroups:
    """The rows in full of a cache of one sequence whose keys are stored by channel.

    Parameters
    ----------
    pool : Pool
        The quantised pool, which says the kinds, the sizes and the target.
    num_layers : int
        Layers.
    """

    #: No tokens that a user has asked for.
    kept: FullPrecision | None = None

    def __init__(self, pool: Pool, num_layers: int) -> None:
        self._group = pool.k_kind.group_tokens
        self._layers = [_Newest(float_pool(pool, 1, self._group), 0, 0) for _ in range(num_layers)]

    @property
    def kinds(self) -> tuple[str, str]:
        """The kinds that rows of K and V in full lie in."""
        block = self._layers[0].block
        return block.k_kind.name, block.v_kind.name

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in full."""
        return sum(of.block.nbytes for of in self._layers)

    def quantised(self, layer: int, length: int) -> tuple[int, int]:
        """The positions ``[0, end)`` that the newest of a layer's tokens reads as codes."""
        newest = max(0, length - 1) // self._group * self._group
        return 0, max(newest, min(self._layers[layer].first, length))

    def copy(self) -> NewestGroups:
        """A deep copy that shares no memory."""
        new = object.__new__(NewestGroups)
        new._group = self._group
        new._layers = [of._replace(block=of.block.copy()) for of in self._layers]
        return new

    def resume(self, begins: list[int], ends: list[int]) -> None:
        """Take the positions that are codes in each layer of an empty cache."""
        for layer, end in enumerate(ends):
            base = end // self._group * self._group
            self._layers[layer] = self._layers[layer]._replace(base=base, first=end)

    def tensors(self, layer: int, begin: int, end: int, length: int) -> list[Tensor]:
        """The rows of a layer's tokens from `end` on, for a snapshot."""
        of = self._layers[layer]
        return row_tensors(of.block, layer, np.arange(end, length) - of.base, "full_")

    def check(self, lengths: NDArray[Any]) -> None:
        """Prove that the newest rows of layers of these lengths are in full, or codes.

        Raises
        ------
        NumkvError
            If some are not; the message says of which layer.
        """
        for layer, (of, length) in enumerate(zip(self._layers, lengths.tolist(), strict=True)):
            size = int(of.block.k.shape[2])
            there = of.base <= of.first and length <= of.base + size
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
        """Take checked rows of new tokens, and quantise the token groups that are complete then.

        Parameters
        ----------
        pool, layer, k, v, block_table, start
            See `FullPrecisionWindow.append`.
        watch
            Not asked: such rows are looked at before they are written.
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
        now.block.scatter(k, v, index(np.arange(start, end) - begin))
        pool.append(k, v, block_table, start)
        whole = np.arange(begin, end // some * some, some)
        if len(whole):
            to = slots_of(table, whole, size) // some
            pool.quantise(now.block, index((whole - begin) // some), index(to))
        self._layers[layer] = now._replace(first=begin)

    # -- bound calls

    def goes_on(self, layer: int, start: int, tokens: int) -> Pool | None:
        """The block that new tokens of a layer are written to by a bound call; None where another one is needed."""
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
        """Plan a bound call of new tokens that `goes_on` says yes to.

        Parameters
        ----------
        step : StepRecord
            What is to be planned.
        table, size
            The layer's blocks ``(max_blocks,)`` on the host, and their tokens.
        start, tokens
            Where new tokens begin, and how many there are.
        window_left
            Earlier tokens that each sees, or -1.
        """
        some, end = self._group, start + tokens
        begin = start // some * some
        target = self._layers[0].block.target
        seen = seen_by_queries(target, None, tokens, end, window_left)
        coded, full = self._split(begin, begin, seen, end)
        part = step.part_in_full(1)
        part.block_table[:], part.seq_lens[:], part.q_starts[:] = 0, end - begin, (0, tokens)
        part.slots[:], part.ranges[:], step.ranges[:] = np.arange(start, end) - begin, full, coded
        part.plan(-1, some, 0, 0)
        whole = np.arange(begin, end // some * some, some)
        to = slots_of(table, whole, size) // some
        step.quantise((whole - begin) // some, to, bool((coded[:, 0] < coded[:, 1]).any()))

    def staging(self, tokens: int) -> Pool:
        """A block of float rows for new tokens, which `append` then takes: see `staged`."""
        return staging(self._layers[0].block, tokens)

    def truncate(self, length: int) -> None:
        """Drop the tokens of all layers from position `length` on. It needs no memory worth a name."""
        for layer, of in enumerate(self._layers):
            if of.first > length:
                self._layers[layer] = of._replace(first=length)

    # -- reading

    def overlay(self, pool: Pool, which: str, layer: int, rows: Array, length: int) -> Array:
        """Rows of a contiguous layer with those in full in their places; see `FullPrecisionWindow.overlay`."""
        target, of = pool.target, self._layers[layer]
        mixed = target.empty(tuple(map(int, rows.shape)), pool.buffer(which).kind.compute)
        mixed = converted(target, rows, mixed)
        if not length:
            return mixed
        begin, end = self.quantised(layer, length)[1], length
        there = np.arange(begin, end)
        target.ops.copy_tokens(
            of.block.buffer(which).words, target.index(there - of.base, np.int64), mixed.reshape((1, *mixed.shape)),
            target.index(there, np.int64),
        )  # fmt: skip
        return mixed

    def attend(
        self, pool: Pool, block_table: Array, layer: int, q: Array, length: int, options: CheckedOptions
    ) -> Any:  # fmt: skip
        """Attend with checked queries of a layer's last tokens: each to its own group in full, to others as codes.

        See `FullPrecisionWindow.attend`.
        """
        target, of = pool.target, self._layers[layer]
        tokens = int(q.shape[0])
        lens = target.index(np.array([length]), np.int64)
        starts = target.index(np.array([0, tokens]), np.int64)
        tables = {"block_table": block_table, "seq_lens": lens, "cu_seqlens_q": starts}
        options = check_call(q, options, (of.block, pool), tables)
        seen = seen_by_queries(target, options.sight, tokens, length, options.window_left)
        options = options._replace(window_left=-1, sight=None)
        if not tokens or not length:
            return run(pool, block_table, q, lens, starts, options)
        coded, full = self._split(of.base, of.first, seen, length)
        table = one_block_each(target.device_key, 1)
        parts = Part(of.block, table, full), Part(pool, block_table, coded)
        return run_seen(parts, q, lens, starts, options)

    def _split(self, base: int, first: int, seen: Ints, length: int) -> tuple[Ints, Ints]:
        """What the last queries read as codes of what they see, and what in full, counted from a block's base."""
        some, tokens = self._group, len(seen)
        own = np.maximum(np.arange(length - tokens, length) // some * some, first)
        own = own.clip(0, length)[:, None]
        return np.minimum(seen, own), (np.maximum(seen, own) - base).clip(0)

    def attention_mass(
        self, pool: Pool, block_table: Array, layer: int, q: Array, length: int, options: CheckedOptions, lse: Any
    ) -> Array:  # fmt: skip
        """Sum the attention that checked queries of a layer's last tokens give to each token.

        See `FullPrecisionWindow.attention_mass`.
        """
        target, of, tokens = pool.target, self._layers[layer], int(q.shape[0])
        seen = seen_by_queries(target, options.sight, tokens, length, options.window_left)
        lens, starts, newest, coded, full = (
            target.index(x, np.int64)
            for x in (
                np.array([length]), np.array([0, tokens]), np.array([length - of.base]),
                *self._split(of.base, of.first, seen, length),
            )
        )  # fmt: skip
        parts, begins = [Part(pool, block_table, coded)], [0]
        if of.base < length:
            parts.append(Part(of.block, one_block_each(target.device_key, 1), full, lens=newest))
            begins.append(of.base)
        return mass_of_parts(parts, q, lens, starts, length, options, lse, begins)


def kept_in_full(pool: Pool, num_layers: int, full_precision: Any, capacity: int | None) -> Any:
    """Check a cache's argument; what keeps tokens in full, as asked for or by the kind of its keys, or None."""
    if not pool.by_channel:
        return FullPrecisionWindow.make(pool, num_layers, full_precision, capacity)
    if full_precision is not None:
        raise NotSupported(
            f"`full_precision`: expected None for keys in {pool.k_kind}, whose newest tokens are in full anyway, until "
            f"their token group is complete, got {full_precision}; leave it out, or keep them in a PagedKVCache"
        )
    return NewestGroups(pool, num_layers)
