"""Full-precision tokens of a quantised cache: a window of recent tokens, and a few first ones (attention sinks).

Quantisation does most harm to the tokens that get much attention: the newest ones, and the first ones, which models
use as attention sinks. This is for caches of one sequence, `numkv.KVCache` and layers, with `full_precision`:

- Every layer stores them as float32 (float64 if the other kind is fp64), in buffers of their own, in addition to those
  for all tokens. Attention reads them in full precision, and merges the results of the two pools.
- A token is quantised once, when it leaves the window, from the appended row. Its codes equal those of a cache without
  a window.
- Quantised tokens stay quantised when newer ones are dropped, or older ones by `compact`. For a while there can then
  be fewer full-precision tokens than asked for.

Liu et al., "KIVI" (arXiv:2402.02750), section 3.3: the full-precision residual of recent tokens. Xiao et al.,
"Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453), section 3: the first tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.arrays import owned
from numkv.attention.attend import check_call, run
from numkv.attention.mass import mass_of_parts
from numkv.attention.options import CheckedOptions
from numkv.attention.parts import Part, converted, run_seen
from numkv.attention.sight import seen_by_queries
from numkv.caches.layer_spec import FullPrecision
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import groups_of
from numkv.errors import NumkvError
from numkv.kinds import float_kind
from numkv.snapshots.snapshot import Tensor
from numkv.storage.buffer import Buffer
from numkv.storage.pool import Pool
from numkv.storage.saved import row_tensors
from numkv.storage.tables import one_length, one_sequence
from numkv.targets.base import Array

Ints = NDArray[np.int64]
#: See `FullPrecisionWindow.append`.
Watching = Callable[[Array, Array, int], int]


class FullPrecisionWindow:
    """The full-precision tokens of a cache of one sequence, and their positions.

    A layer's positions ``[0, sinks)`` and ``[end, length)`` are here, and ``[sinks, end)`` in the quantised pool, where
    every position has a slot, used or not. Rows are float32, or float64 if the other kind is fp64. If K or V is a
    16-bit kind, its rows are rounded when they leave.

    Parameters
    ----------
    pool : Pool
        The quantised pool, which defines the kinds, the sizes and the target.
    num_layers : int
        Layers.
    kept : FullPrecision
        How many recent tokens and first tokens are kept in full precision.
    capacity : int or None
        Tokens that a layer can ever have, if that is known: no more slots than that are made.
    """

    # A layer has one block: slots for the sink tokens, then a ring in which position p has slot p % ring. The window is
    # no longer than the ring, so that no two positions share a slot.

    def __init__(
        self, pool: Pool, num_layers: int, kept: FullPrecision, capacity: int | None
    ) -> None:
        self.kept, first, ring = kept, kept.num_sink_tokens, kept.window
        self._first = first if capacity is None else min(first, capacity)
        self._ring = ring if capacity is None else min(ring, capacity)
        self._size = self._first + self._ring
        self._pool = float_pool(pool, num_layers, self._size)
        self._sinks = np.zeros(num_layers, np.int64)
        self._end = np.zeros(num_layers, np.int64)

    # -- what it is

    @property
    def nbytes(self) -> int:
        """Bytes of the full-precision rows."""
        return self._pool.nbytes

    def quantised(self, layer: int, length: int) -> tuple[int, int]:
        """Return the positions ``[sinks, end)`` that are quantised, of a layer of `length` tokens."""
        sinks = min(int(self._sinks[layer]), length)
        return sinks, max(sinks, min(int(self._end[layer]), length))

    def copy(self) -> FullPrecisionWindow:
        """A deep copy that shares no memory."""
        new = object.__new__(FullPrecisionWindow)
        new.__dict__.update(self.__dict__)
        new._pool = self._pool.copy()
        new._sinks, new._end = self._sinks.copy(), self._end.copy()
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(owned(state))

    def resume(self, sinks: list[int], ends: list[int]) -> None:
        """Take the positions that are quantised in each layer of an empty cache."""
        self._sinks[:], self._end[:] = sinks, ends

    def tensors(self, layer: int, begin: int, end: int, length: int) -> list[Tensor]:
        """Return the rows of a layer's tokens outside of ``[begin, end)``, for a snapshot."""
        slots = self._slots(layer, self._kept(begin, end, length), begin)
        return row_tensors(self._pool, layer, slots, "full_")

    def check(self, lengths: NDArray[Any]) -> None:
        """Prove that every token of layers of these lengths is quantised, or has a slot of its own here.

        Parameters
        ----------
        lengths : int array (num_layers,)
            Tokens of each layer.

        Raises
        ------
        NumkvError
            If one is not; the message says of which layer.
        """
        for layer, length in enumerate(lengths.tolist()):
            sinks, end = self.quantised(layer, length)
            if not (0 <= sinks <= self._first and sinks <= end <= length <= end + self._ring):
                raise NumkvError(
                    f"check: expected at most {self._first} first and {self._ring} recent tokens in full precision, "
                    f"got [0, {sinks}) and [{end}, {length}) in layer {layer}"
                )

    def _slots(self, layers: Any, positions: Ints, sinks: Any) -> Ints:
        """Slots of full-precision tokens, in layers with so many sink tokens."""
        recent = self._first + positions % max(1, self._ring)
        slots: Ints = np.asarray(layers) * self._size + np.where(
            positions < sinks, positions, recent
        )
        return slots

    # -- writing

    def append(
        self, pool: Pool, layer: int, k: Array, v: Array, block_table: Array, start: int,
        watch: Watching | None = None,
    ) -> None:  # fmt: skip
        """Append checked rows of new tokens, and quantise all that have left the window.

        Parameters
        ----------
        pool : Pool
            The quantised pool.
        layer : int
            Which layer.
        k, v : array (num_tokens, num_kv_heads, head_dim)
            Rows, checked.
        block_table : int32 array (max_blocks,)
            The sequence's blocks in `pool`, with room for the new tokens.
        start : int
            Position of the first new token.
        watch : function, optional
            Returns the numbers under which kernels report NaN and infinity in rows: `Pool.watch`. It is called with
            rows of K and of V, and the number of tokens before them. Bad rows are stored as zeros, and stay zeros when
            they leave the window. Without it rows are not checked.
        """
        tokens = int(k.shape[0])
        length = start + tokens
        sinks, end = self.quantised(layer, start)
        if sinks == start:  # only sink tokens so far
            sinks = max(sinks, min(self._first, length))
        first_kept = max(end, sinks, length - self._ring)
        for a, b in self._runs(end, min(first_kept, start)):
            place = self._first + a % self._ring
            leaving = np.s_[layer, :, place : place + b - a]
            old_k, old_v = (
                self._pool.target.token_major(self._pool.values(x)[leaving]) for x in "kv"
            )
            pool.append(old_k, old_v, block_table, a)
        direct = max(start, sinks)
        if direct < first_kept:
            part = slice(direct - start, first_kept - start)
            look = 0 if watch is None else watch(k[part], v[part], direct - start)
            pool.append(k[part], v[part], block_table, direct, look)
        positions = np.arange(start, length)
        slots = self._slots(layer, positions, sinks)
        slots[(positions >= sinks) & (positions < first_kept)] = -1
        if np.any(slots >= 0):
            there = self._pool.target.index(slots, np.int64)
            self._pool.scatter(k, v, there)
            if watch is not None and (look := watch(k, v, 0)):
                sides = (pool.k_kind, self._pool.k), (pool.v_kind, self._pool.v)
                of_k, of_v = (x if of.has_scales else None for of, x in sides)
                self._pool.target.mend_rows(of_k, of_v, there, look)
        self._sinks[layer], self._end[layer] = sinks, first_kept

    def _runs(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Recent positions ``[begin, end)`` as runs that are contiguous in the ring."""
        runs = []
        while begin < end:
            stop = min(end, begin + self._ring - begin % self._ring)
            runs.append((begin, stop))
            begin = stop
        return runs

    def staging(self, tokens: int) -> Pool:
        """A block of float rows for new tokens, which `append` then takes: see `staged`."""
        return staging(self._pool, tokens)

    def truncate(self, length: int) -> None:
        """Drop the tokens of all layers from position `length` on; quantised ones before it stay quantised.

        It needs no memory, so that it does not fail in the middle of a change.
        """
        for layer in range(len(self._sinks)):
            self._sinks[layer], self._end[layer] = self.quantised(layer, length)

    # -- compaction

    def is_quantised(self, tokens: Ints) -> NDArray[np.bool_]:
        """Return whether tokens ``(num_layers, n)`` are in the quantised pool."""
        found: NDArray[np.bool_] = (tokens >= self._sinks[:, None]) & (tokens < self._end[:, None])
        return found

    def plan_moves(self, kept: Ints, shift: RopeShift | None) -> list[Callable[[], object]]:
        """Check that the tokens kept here can move to the front, and return what moves them.

        Quantised tokens stay quantised, also where they become the first ones; then the cache has fewer full-precision
        first tokens than it was asked for. Where none of those kept are quantised, the first ones of them become first
        tokens.

        Parameters
        ----------
        kept : int64 array (num_layers, n)
            Tokens that are kept, which rise.
        shift : RopeShift or None
            The key shift, checked.

        Returns
        -------
        list of callable
            Steps to take in this order; none of them fails.
        """
        layers, n = kept.shape
        target = self._pool.target
        quantised = self.is_quantised(kept)
        coded = quantised.sum(axis=1)
        first = (kept < self._sinks[:, None]).sum(axis=1)
        sinks = np.where(coded > 0, first, min(self._first, n))
        layer, new = np.nonzero(~quantised)
        old = kept[layer, new]
        source, to = (
            self._slots(layer, tokens, s[layer]) for tokens, s in ((old, self._sinks), (new, sinks))
        )
        pool = self._pool
        moves: list[Callable[[], object]] = []
        if not np.array_equal(source, to):
            # Within the ring a move could overwrite a token that has yet to move; copies to another pool cannot.
            pool = pool.like(layers)
            here, there = target.index(source, np.int64), target.index(to, np.int64)

            def copy() -> None:
                for rows, into in ((self._pool.k, pool.k), (self._pool.v, pool.v)):
                    target.ops.copy_tokens(rows, here, into, there)

            moves.append(copy)
        if shift is not None:
            for part in groups_of(new - old):
                offset = int((new - old)[part[0]])
                if offset:
                    moves.append(shift.plan(pool, target.index(to[part], np.int64), offset))

        end = sinks + coded

        def commit() -> None:
            self._pool, self._sinks, self._end = pool, sinks, end

        return [*moves, commit]

    # -- reading

    def overlay(self, pool: Pool, which: str, layer: int, rows: Array, length: int) -> Array:
        """Rows of a contiguous layer with the full-precision ones in their places.

        Parameters
        ----------
        pool : Pool
            The cache's pool: a block for each layer.
        which : {"k", "v"}
            Keys or values.
        layer : int
            Which layer.
        rows : array (num_kv_heads, length, head_dim)
            Its rows: a copy in float32 where they are quantised, which is changed; else a view, which is not.
        length : int
            Its tokens.

        Returns
        -------
        array (num_kv_heads, length, head_dim)
            Float32, of fp64 float64.
        """
        target = pool.target
        floats, own = (self._pool.k, pool.k_kind) if which == "k" else (self._pool.v, pool.v_kind)
        if not own.has_scales:
            rows = converted(target, rows, target.empty(tuple(rows.shape), own.compute))
        if not length:
            return rows
        begin, end = self.quantised(layer, length)
        kept = self._kept(begin, end, length)
        slots = target.index(self._slots(layer, kept, begin), np.int64)
        mixed = rows.reshape((1, *rows.shape))
        target.ops.copy_tokens(floats, slots, mixed, target.index(kept, np.int64))
        return rows

    @staticmethod
    def _kept(begin: int, end: int, length: int) -> Ints:
        """Return the positions that are not in ``[begin, end)``."""
        return np.concatenate([np.arange(begin), np.arange(end, length)])

    # -- attention

    def attend(
        self,
        pool: Pool,
        block_table: Array,
        layer: int,
        q: Array,
        length: int,
        options: CheckedOptions,
    ) -> Any:
        """Attend with checked queries of a layer's last tokens over both pools.

        The two results are merged by their logs of sums of exponentials, in float32 (float64 for a float64 q), and
        rounded to q's dtype once.

        Parameters
        ----------
        pool : Pool
            The quantised pool.
        block_table : int32 array (1, max_blocks)
            The sequence's blocks in it.
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries, checked.
        length : int
            Tokens of the layer.
        options : CheckedOptions
            From `check_options`.

        Returns
        -------
        array or tuple of array
            The output, and the lse if asked for.
        """

        def parts(seen: Ints) -> list[Part]:
            """Return what queries see in the two pools. Full-precision tokens are counted in order."""
            begin, end = self.quantised(layer, length)
            plain = np.minimum(seen, begin) + np.maximum(seen - end, 0)
            slots = self._slots(layer, self._kept(begin, end, length), begin)
            table = pool.target.index(slots[None, :], np.int32)
            floats = Part(self._pool, table, plain, by_slot=True)
            return [floats, Part(pool, block_table, seen.clip(begin, end))]

        return attend_in_full(self._pool, pool, block_table, q, length, options, parts)

    def attention_mass(
        self,
        pool: Pool,
        block_table: Array,
        layer: int,
        q: Array,
        length: int,
        options: CheckedOptions,
        lse: Any,
    ) -> Array:
        """Sum the attention that checked queries of a layer's last tokens give to each token.

        Parameters
        ----------
        pool, block_table, layer, q, length
            See `attend`.
        options : CheckedOptions
            From `check_options`; without sinks and outputs.
        lse
            See `numkv.attention_weights`.

        Returns
        -------
        float32 array (1, num_kv_heads, length)
        """
        if lse is None:  # to the last bit that of attention, where tokens in full are one part
            asked = options._replace(return_lse=True)
            _, lse = self.attend(pool, block_table, layer, q, length, asked)
        target, tokens = pool.target, int(q.shape[0])
        seen = seen_by_queries(target, options.sight, tokens, length, options.window_left)
        begin, end = self.quantised(layer, length)

        def index(x: Any) -> Array:
            return target.index(np.array(x), np.int64)

        parts, begins = [Part(pool, block_table, index(seen.clip(begin, end)))], [0]
        for first, stop in ((0, begin), (end, length)):
            if first < stop:
                slots = self._slots(layer, np.arange(first, stop), begin)
                table = target.index(slots[None, :], np.int32)
                ranges = index(seen.clip(first, stop) - first)
                parts.append(Part(self._pool, table, ranges, True, index([stop - first])))
                begins.append(first)
        lens, starts = index([length]), index([0, tokens])
        return mass_of_parts(parts, q, lens, starts, length, options, lse, begins)


def attend_in_full(
    floats: Pool, codes: Pool, block_table: Array, q: Array, length: int, options: CheckedOptions,
    parts: Callable[[Ints], list[Part]],
) -> Any:  # fmt: skip
    """Attend over two pools; `parts` gives what queries see of both, by the ranges of tokens that each sees.

    For `codes` and the other arguments see `FullPrecisionWindow.attend`.
    """
    target, tokens = codes.target, int(q.shape[0])
    lens, starts = one_length(target.key, length), one_sequence(target.key, tokens)
    tables = {"block_table": block_table, "seq_lens": lens, "cu_seqlens_q": starts}
    options = check_call(q, options, (floats, codes), tables)
    seen = seen_by_queries(target, options.sight, tokens, length, options.window_left)
    options = options._replace(window_left=-1, sight=None)
    if not tokens or not length:
        return run(codes, block_table, q, lens, starts, options)
    return run_seen(parts(seen), q, lens, starts, options)


def staging(like: Pool, tokens: int) -> Pool:
    """A block for new tokens of the kinds and sizes of a pool of floats."""
    target, shape = like.target, (1, int(like.k.shape[1]), max(1, tokens))
    sides = []
    for side in (like.k_buffer, like.v_buffer):
        # Not zeros, for which CUDA waits: each row that is read is written.
        words = target.empty((*shape, side.dim), side.kind.word)
        sides.append(Buffer(target, words, side.scales, side.kind))
    return Pool(*sides)


def staged(block: Pool, tokens: int) -> tuple[Array, Array]:
    """Return the first rows ``(tokens, num_kv_heads, head_dim)`` of K and of V in such a block."""
    k, v = (block.target.token_major(block.values(x)[0, :, :tokens]) for x in "kv")
    return k, v


def float_pool(pool: Pool, num_blocks: int, block_size: int) -> Pool:
    """Blocks for the rows of a pool before they are quantised."""
    shape = (num_blocks, int(pool.k.shape[1]), block_size)
    k_kind, v_kind = float_kind(pool.k_kind.compute), float_kind(pool.v_kind.compute)
    return Pool.allocate(pool.target, shape, pool.head_dim, pool.head_dim_v, k_kind, v_kind)
