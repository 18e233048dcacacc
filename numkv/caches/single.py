"""The common part of caches of one sequence: `numkv.KVCache`, and layers, which are caches of one layer.

Concurrent readers read the length first; whichever buffers they then see have at least that many tokens. So a writer
sets the length last, and a reader reads it before pools and tables. Objects that a reader may still use are replaced,
not changed: pools that grow, and tables whose blocks are released.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from numkv.access import Access, dropping, drops, reads
from numkv.arrays import owned
from numkv.attention.attend import attend, check_queries, too_many_queries
from numkv.attention.mass import attention_mass
from numkv.attention.options import CheckedOptions, check_options, is_free
from numkv.caches.full_precision import Watching
from numkv.caches.late_reports import SequenceReports
from numkv.caches.layer_spec import FullPrecision, LayerSpec, spec_of, storage_of
from numkv.caches.newest_groups import NewestGroups, kept_in_full
from numkv.caches.saved import SavedSequence, coded_rows
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import check_shift, plan_moves, slots_of
from numkv.errors import NonFiniteInput, NotSupported, NumkvError
from numkv.interrupts import signals_deferred
from numkv.numbers import check_flag
from numkv.snapshots.snapshot import Options, Snapshot, Source, Tensor, fill_all
from numkv.storage.buffer import Buffer, are_scales
from numkv.storage.key_error import key_error
from numkv.storage.own_kernels import Uploads
from numkv.storage.pool import Pool
from numkv.storage.saved import row_tensors, seed_of
from numkv.storage.tables import one_length, one_sequence
from numkv.targets.base import Array, Target
from numkv.targets.call import Marker
from numkv.targets.streamed import streamed
from numkv.writing import fast_path

# The index of the output among the arrays that `SingleSequence._attend_again` lists.
_OUT = frozenset({2})


class SingleSequence:
    """One sequence's K and V, for one layer or several, in one pool.

    A subclass defines a layer's blocks, the capacity and how it grows. All methods here take a checked number of a
    layer. A method that raises has changed nothing.

    Parameters
    ----------
    pool : Pool
        The buffers of all layers.
    lengths : int array (num_layers,)
        Tokens of each layer, which compiled code may write too.
    full_precision : FullPrecision or None
        Newest and first tokens that are kept in full precision.
    capacity : int or None
        Tokens that a layer can ever have, if that is known.
    """

    def __init__(
        self, pool: Pool, lengths: NDArray[Any], full_precision: FullPrecision | None,
        capacity: int | None,
    ) -> None:  # fmt: skip
        self._access = Access()
        self._pool = pool
        self._lengths = lengths
        self._heads, self._head_dim = int(pool.k.shape[1]), pool.head_dim
        self._full_precision = kept_in_full(pool, len(lengths), full_precision, capacity)
        self._begin()

    #: Which tokens' rows were NaN or infinite; those of all layers are one sequence, 0.
    _reports: SequenceReports
    #: Replays repeated calls; None if none can be replayed.
    _again: Any
    #: Entries of its snapshots besides tensors.
    __saved__: ClassVar[type[SavedSequence]]
    #: Of each layer: the same buffers, and its own scales of heads.
    _pools: list[Pool]
    #: Blocks of each layer ``(max_blocks,)``, on the host.
    _tables: list[NDArray[np.int32]]

    def _begin(self) -> None:
        """Make what follows from the other attributes, and note which it is: no part of a copy, nor of a pickle."""
        kept = set(vars(self))
        self._derive()
        self._derived = vars(self).keys() - kept | {"_derived"}

    def _derive(self) -> None:
        """Make what follows from the other attributes."""
        self._target = self._pool.target
        self._struct: Any = None
        self._shown = False  # whether compiled code has got arrays that it could write to
        self._uploads = Uploads(self._target)
        self._again = None if self._full_precision is not None else self._target.repeats()
        self._reports = SequenceReports(self._target)

    # -- defined by a subclass

    #: Tokens of a layer that there is memory for now; an attribute, as calls of one token read it twice.
    _room: int

    def _make_room(self, layer: int, start: int, tokens: int) -> None:
        """Have memory for so many tokens from position `start` on; `CacheFull` if there cannot be."""
        raise NotImplementedError

    def _block_table(self, layer: int) -> Array:
        """Return the blocks of a layer on the target, ``(1, max_blocks)``."""
        raise NotImplementedError

    def _slots(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where tokens ``(num_layers, n)`` lie, on the host."""
        raise NotImplementedError

    def _bad_length(self, layer: int, length: int, most: int) -> str:
        """Return the message about an invalid length that others have written."""
        raise NotImplementedError

    def _cut(self, length: int) -> None:
        """Drop the tokens from position `length` on, and keep the memory; it needs none, and does not fail."""
        raise NotImplementedError

    def _shorter(self, length: int) -> Any:
        """Prepare to give back memory that only tokens from position `length` on are in; None if there is none."""
        return None

    def _give_back(self, length: int, shorter: Any) -> None:
        """Give back what `_shorter` has prepared; it needs no memory, and an error changes nothing."""

    def _copy_to(self, new: Self) -> None:
        """Give a copy, which has all other attributes, lengths and memory of its own, and `_begin` with them."""
        raise NotImplementedError

    def _check_books(self) -> None:
        """Check the subclass's own metadata."""
        raise NotImplementedError

    # -- what it is

    @property
    def target(self) -> str:
        """Name of the target."""
        return self._target.name

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers, scales and full-precision tokens included."""
        more = 0 if self._full_precision is None else self._full_precision.nbytes
        return self._pool.nbytes + more

    def __drawn__(self) -> int:
        """Tokens of the layer that has most, for a drawing."""
        return int(self._lengths.max(initial=0))

    def _spec(self) -> LayerSpec:
        """The description of each layer."""
        full = self._full_precision
        return spec_of(self._pool, None if full is None else full.kept)

    def __runs_on__(self) -> tuple[Target, Any]:
        return self._target, self._pool.k

    def _dims(self) -> str:
        """The part of a ``repr`` about rows."""
        dim, dim_v = self._head_dim, self._pool.head_dim_v
        return f"head_dim={dim}" + ("" if dim_v == dim else f", head_dim_v={dim_v}")

    def _storage(self) -> str:
        """The part of a ``repr`` about storage."""
        kept = None if self._full_precision is None else self._full_precision.kept
        return storage_of(self._pool.k_kind, self._pool.v_storage, self._pool.rotate, kept)

    def _stored(self, layer: int) -> int:
        """The tokens of a layer; compiled code may have written the number, so it is checked against the memory."""
        length, most = int(self._lengths[layer]), self._room
        if not 0 <= length <= most:
            raise NumkvError(self._bad_length(layer, length, most))
        return length

    def _longest(self) -> int | None:
        return int(self._lengths.argmax()) if len(self._lengths) else None

    @property
    def _newest_groups(self) -> NewestGroups | None:
        """The rows in full of keys by channel, if these are."""
        return self._full_precision if self._pool.by_channel else None

    @property
    def _bound_in_full(self) -> dict[str, Any]:
        """What `numkv.caches.bound.ToBind` takes of tokens in full: only newest groups of keys by channel are bound."""
        newest, full = self._newest_groups, self._full_precision
        kinds = None if newest is None else newest.kinds
        return {"at_once": full is newest and (full is None or full.kept is None), "in_full": kinds}

    def _quantised(self, layer: int) -> range:
        """Positions of a layer's tokens that are quantised."""
        length = self._stored(layer)
        if self._full_precision is not None:
            return range(*self._full_precision.quantised(layer, length))
        pool = self._pool
        return range(length if pool.k_kind.has_scales or pool.v_kind.has_scales else 0)

    # -- for compiled code

    def _check_all_in_buffers(self, name: str) -> None:
        """Refuse to show memory that does not have all tokens."""
        if self._pool.is_latent and name == "jit":
            raise NotSupported(
                "`jit`: expected a cache of K and V, got one of latents, whose V is a part of K; take `arrays`"
            )
        if self._full_precision is not None:
            what = self._full_precision.kept or f"those of the newest group of {self._pool.k_kind}"
            raise NotSupported(
                f"`{name}`: expected a cache without full-precision tokens, got {what}; they lie "
                "outside of the buffers that compiled code would see"
            )

    def _view(self, make: Callable[[], Any]) -> Any:
        """The jitclass instance over this memory, made when it is first asked for."""
        self._check_all_in_buffers("jit")
        self._shown = True
        if self._struct is None:
            self._struct = make()
        return self._struct

    # -- as a whole

    @drops
    def clear(self) -> None:
        """Drop all tokens; the memory stays allocated, blocks of a paged layer included.

        It also repairs a length that compiled code has made invalid.
        """
        self._cut(0)

    @streamed
    @reads
    def copy(self) -> Self:
        """Copy everything, as it is stored; the copy shares no memory.

        Returns
        -------
        object
            Of the same class. The copy of a `numkv.PagedLayer` over a shared pool allocates blocks of that pool; that
            of a layer with its own pool makes another.

        Raises
        ------
        CacheFull
            If a shared pool has too few free blocks; nothing has changed.
        NumkvError
            If rows are moved or dropped meanwhile.
        """
        reports = self._reports.copy()
        new = object.__new__(type(self))
        new.__dict__.update(self.__getstate__())
        new._access = Access()
        if self._full_precision is not None:
            new._full_precision = self._full_precision.copy()
        self._copy_to(new)
        new._reports = reports
        return new

    def _begin_copy(self, new: Self) -> None:
        """Make what follows from a copy's other attributes."""
        new._begin()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        """All attributes but those that are derived."""
        return {name: x for name, x in vars(self).items() if name not in self._derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(owned(state))
        self._begin()

    # -- saved and loaded

    def _values(self) -> dict[str, Any]:
        """Return the values of a snapshot, except the numbers of rows."""
        pool, full = self._pool, self._full_precision
        kept = (
            (0, 0)
            if full is None or full.kept is None
            else (full.kept.window, full.kept.num_sink_tokens)
        )
        return {
            "num_layers": len(self._lengths), "num_kv_heads": self._heads, "head_dim": self._head_dim,
            "head_dim_v": pool.head_dim_v, "k_kind": pool.k_kind, "v_kind": pool.v_storage, "rotation": seed_of(pool),
            "residual_window": kept[0], "num_sink_tokens": kept[1],
        }  # fmt: skip

    def __snapshot__(self) -> Snapshot:
        """See `numkv.snapshots.snapshot`."""
        self._refuse_reported()
        # Lengths first: a concurrent append moves rows to buffers with at least as many.
        values, full = self._values(), self._full_precision
        rows = [self._stored(layer) for layer in range(len(self._lengths))]
        parts = [(0, n) if full is None else full.quantised(i, n) for i, n in enumerate(rows)]
        begins, ends = [begin for begin, _ in parts], [end for _, end in parts]
        saved = self.__saved__(**values, rows=rows, begins=begins, ends=ends)
        return Snapshot(saved, self._tensors(saved), [(self, full is not None)])

    def _tensors(self, saved: SavedSequence) -> list[Tensor]:
        """Return where rows lie: those in ``[begin, end)`` as codes, and the others in full precision."""
        found = []
        for layer, (begin, end, rows) in enumerate(
            zip(saved.begins, saved.ends, saved.rows, strict=True)
        ):
            pool, table = self._pools[layer], self._tables[layer]
            slots, v_slots = (
                slots_of(table, np.arange(*part), max(1, int(pool.k.shape[2])))
                for part in coded_rows(pool.k_kind, begin, end, rows)
            )
            found += row_tensors(pool, layer, slots, "", self._take_scales, v_slots)
            if self._full_precision is not None:
                found += self._full_precision.tensors(layer, begin, end, rows)
        return found

    def _take_scales(self, side: str, buffer: Buffer, scales: NDArray[Any]) -> None:
        """Take the scales of heads that a file has."""
        buffer.scales[:] = buffer.target.asarray(scales)

    @classmethod
    def __restore__(cls, saved: SavedSequence, source: Source, options: Options) -> Self:
        """See `numkv.snapshots.snapshot`."""
        made = cls._empty(saved, options)
        try:
            made._take_room(max(saved.rows, default=0))
            if made._full_precision is not None:
                made._full_precision.resume(saved.begins, saved.ends)
            fill_all(source, made._tensors(saved))
            source.verify()  # before blocks are for good
        except BaseException:
            made._give_back(0, made._shorter(0))
            raise
        made._take_lengths(saved)
        return made

    @classmethod
    def _empty(cls, saved: SavedSequence, options: Options) -> Self:
        """Return an empty cache for a saved one."""
        make: Any = cls
        made: Self = make(**saved.arguments(), target=options.place.name)
        return made

    def _take_room(self, length: int) -> None:
        """Get memory for `length` tokens, which the capacity allows; `CacheFull` if there is none."""

    def _take_lengths(self, saved: Any) -> None:
        """Count the rows that are there now."""
        self._lengths[:] = saved.rows

    @streamed
    @reads
    def check(self) -> None:
        """Prove the books: lengths within the memory, tables in agreement with the pool, scales that are finite.

        It reads every stored scale; on CUDA they are copied to the host.

        Raises
        ------
        NumkvError
            If it is inconsistent; the message names the contradiction. Scales that are not finite are those of rows
            that were stored with ``check_finite=False``.
        """
        self._refuse_reported()
        for layer in range(len(self._lengths)):
            self._stored(layer)
        self._check_books()
        if self._full_precision is not None:
            self._full_precision.check(self._lengths)
        self._check_scales()

    def _check_scales(self) -> None:
        longest = int(self._lengths.max(initial=0))
        every = np.broadcast_to(np.arange(longest), (len(self._lengths), longest))
        for which, buffer in self._pool.stored:
            kind = buffer.kind
            if not kind.is_scaled:
                continue
            scales = self._target.to_host(buffer.scales).view(kind.scale_dtype)
            if kind.scales_per == "head":
                if not are_scales(kind, scales):
                    raise NumkvError(
                        f"check: expected finite scales of {which} above 0, got {scales.tolist()}"
                    )
                continue
            size = max(1, int(self._pool.k.shape[2]))
            for layer, slots in enumerate(self._slots(every)):
                of = self._quantised(layer)
                block, offset = np.divmod(slots[of.start : of.stop], size)
                of_rows = np.isfinite(scales[block, :, offset // max(1, kind.group_tokens)])
                finite = of_rows.all(axis=tuple(range(1, of_rows.ndim)))
                if not finite.all():
                    raise NumkvError(
                        f"check: expected finite scales of {which}, got others at position "
                        f"{of.start + int(np.argmin(finite))} of layer {layer}"
                    )

    # -- writing

    def _append_small(self, layer: int, k: Any, v: Any, check_finite: bool) -> bool:
        """Append a few rows in one compiled call, or write nothing and return False."""
        if self._full_precision is not None:
            return False
        start = self._stored(layer)
        tokens = fast_path.pool_append(
            self._pools[layer], k, v, self._tables[layer], start, self._room - start, check_finite
        )
        if tokens < 0:
            return False
        self._lengths[layer] = start + tokens
        return True

    def _as_rows(self, k: Any, v: Any) -> tuple[Any, Any]:
        """Return a caller's rows as ``(num_tokens, num_kv_heads, head_dim)``, not checked otherwise."""
        return k, v

    def _append(self, layer: int, k: Any, v: Any, check_finite: bool) -> None:
        """Check rows of K and V, and append them."""
        if self._again is None:
            with self._target.on(k, v, self._pool.k):
                self._append_here(layer, *self._as_rows(k, v), check_finite)
            return
        call = self._again.find(("append", layer, check_finite), (k, v), self._pool.k)
        start, replay = self._stored(layer), call.replay
        table = self._ready_table(layer)
        if replay is not None and table is not None:
            tokens, looked_at = replay.note
            if start + tokens <= self._room:
                look = self._look(layer, start, looked_at)
                if call.run((table,), (start, look)) is None:
                    self._lengths[layer] = start + tokens
                    return
        call.long(
            lambda: self._append_here(layer, *self._as_rows(k, v), check_finite),
            lambda: (self._block_table(layer),),
            lambda: (int(self._lengths[layer]) - start, self._reports.latest),
        )

    def _ready_table(self, layer: int) -> int | None:
        """The pointer of a layer's table on the target; None where it has to be uploaded first."""
        return self._again.pointer(self._block_table(layer))

    def _append_here(self, layer: int, k: Any, v: Any, check_finite: bool) -> None:
        """Append rows on the stream of the call."""
        pool = self._pools[layer]
        self._target.refuse_capture(f"{type(self).__name__}.append")
        self._refuse_bad(layer)
        check_finite = check_flag("check_finite", check_finite, True)
        first = check_finite and pool.looks_first
        k, v = pool.check_rows(k, v, check_finite=first)
        with signals_deferred:
            self._append_checked(layer, k, v, check_finite and not first)

    def _append_checked(self, layer: int, k: Array, v: Array, watched: bool) -> None:
        pool, start, room = self._pools[layer], self._stored(layer), self._room
        self._make_room(layer, start, int(k.shape[0]))
        self._reports.look_for_nothing()
        marker = self._marker(start) if watched else None

        def watch(k: Array, v: Array, skipped: int) -> int:
            return 0 if marker is None else pool.watch(k, v, marker._replace(skipped=skipped))

        try:
            self._store(layer, k, v, self._target.number(start, 0), watch)
        except BaseException:
            self._unmake_room(layer, start, room)
            raise

    def _unmake_room(self, layer: int, start: int, room: int) -> None:
        """Give back memory that was got for tokens from position `start` on, which are not stored after all."""
        if int(self._lengths[layer]) == start:
            self._give_back(room, self._shorter(room))

    def _store(self, layer: int, k: Array, v: Array, start: int, watch: Watching) -> None:
        """Write checked rows, for which there is room, and count them; of `watch` see `FullPrecisionWindow.append`."""
        table = self._tables[layer]
        if not self._target.values_on_host:
            table = self._block_table(layer)[0]
        end = start + int(k.shape[0])
        if self._full_precision is None:
            self._pools[layer].append(k, v, table, start, watch(k, v, 0))
            self._lengths[layer] = end
            return
        with dropping(self._access):
            self._full_precision.append(self._pools[layer], layer, k, v, table, start, watch)
            self._lengths[layer] = end

    def _compact(self, kept: NDArray[np.int64], shift: RopeShift | None) -> None:
        """Keep tokens ``(num_layers, n)``, checked, and move them to the front."""
        check_shift(shift)
        newest = self._newest_groups
        moves = (
            self._moves_of_rows(kept, shift)
            if newest is None
            else self._moves_of_groups(newest, kept, shift)
        )
        for move in moves:
            move()
        self._reports.keep(0, kept)
        self._cut(kept.shape[1])

    def _moves_of_groups(
        self, newest: NewestGroups, kept: NDArray[np.int64], shift: RopeShift | None
    ) -> list[Callable[[], object]]:
        """Check that tokens can move whose keys are stored by channel, and return the moves."""
        moves = newest.plan_moves(self._pools, self._tables, self._lengths, kept, shift)
        new = np.broadcast_to(np.arange(kept.shape[1]), kept.shape)
        moved = kept != new
        source, to = (self._target.index(self._slots(x)[moved], np.int64) for x in (kept, new))
        values = self._pool.v_buffer
        return [lambda: values.copy_tokens(source, values, to), *moves]

    def _moves_of_rows(
        self, kept: NDArray[np.int64], shift: RopeShift | None
    ) -> list[Callable[[], object]]:
        """Check that tokens can move whose rows are stored one by one, and return the moves."""
        new = np.broadcast_to(np.arange(kept.shape[1]), kept.shape)
        moved = kept != new
        if self._full_precision is not None:
            moved &= self._full_precision.is_quantised(kept)
        source, to, distance = self._slots(kept), self._slots(new), new - kept
        if shift is None or self._pool.k_kind.scales_per != "head":
            moves = self._moves(self._pool, shift, source[moved], to[moved], distance[moved])
        else:  # keys are shifted by way of their values, for which each layer has its own scales
            moves = []
            for layer, pool in enumerate(self._pools):
                m = moved[layer]
                moves += self._moves(
                    pool, shift, source[layer, m], to[layer, m], distance[layer, m]
                )
        if self._full_precision is not None:
            moves += self._full_precision.plan_moves(kept, shift)
        return moves

    def _moves(
        self, pool: Pool, shift: RopeShift | None, source: NDArray[np.int64], to: NDArray[np.int64],
        offsets: NDArray[np.int64],
    ) -> list[Callable[[], object]]:  # fmt: skip
        """Check that tokens can move, and return the moves, which need no memory; see `plan_moves`."""
        moves = plan_moves(pool, shift, source, to, offsets)
        if shift is None or not pool.rotate or not len(source):
            return moves
        # To shift rotated keys takes memory, which may not be there when rows are moving already: it is done aside.
        numbers = np.arange(len(source))
        aside = pool.like(-(-len(source) // int(pool.k.shape[2])))
        here, there, staged = (self._target.index(x, np.int64) for x in (source, to, numbers))
        pool.k_buffer.copy_tokens(here, aside.k_buffer, staged)
        for move in plan_moves(aside, shift, numbers, numbers, offsets):
            move()

        def put() -> None:
            pool.v_buffer.copy_tokens(here, pool.v_buffer, there)
            aside.k_buffer.copy_tokens(staged, pool.k_buffer, there)

        return [put]

    def _set_scales(self, layer: int, k: Any, v: Any) -> None:
        """Set the scales of a layer's kv heads, if it is empty."""
        if stored := self._stored(layer):
            raise NumkvError(
                f"set_scales: expected a layer without tokens, got {stored}, which were stored by other scales; "
                "set scales first, or drop the tokens"
            )
        self._pools[layer].set_scales(k, v)

    # -- attention

    def _append_attend(
        self, layer: int, q: Any, k: Any, v: Any, options: CheckedOptions, check_finite: bool
    ) -> Any:
        """Append rows and attend with the queries of their tokens, all checked; for bound calls."""
        start, room = self._stored(layer), self._room
        self._append(layer, k, v, check_finite)
        try:
            return self._attend_with(layer, q, options)
        except BaseException:
            if self._full_precision is None:
                self._lengths[layer] = start
                self._unmake_room(layer, start, room)
            raise

    def _check_queries(self, layer: int, q: Any, free: bool = False) -> tuple[Array, int]:
        """The queries ``(num_tokens, num_q_heads, head_dim)`` of a layer's last tokens, and how many it has."""
        q = check_queries(self._target, q, self._heads, self._head_dim, "num_tokens")
        tokens, length = int(q.shape[0]), self._stored(layer)
        if tokens > length and tokens != 1 and not free:
            raise too_many_queries(tokens, length)
        return q, length

    def _attend_again(
        self, layer: int, q: Any, options: CheckedOptions, function: Callable[[], Any]
    ) -> Any:
        """Attend as an earlier call did, or by `function`, on its stream; `sinks` and `out` are the caller's."""
        length, again = self._stored(layer), self._again  # in this order, beside a writer
        scale, cap, window, sinks, return_lse, out, _ = options
        what = "attend", layer, scale, cap, window, return_lse
        call = again.find(what, (q, sinks, out), self._pool.k)
        replay, table = call.replay, self._ready_table(layer)
        if replay is not None and table is not None:
            lens = call.length(length)
            if lens is not None and (replay.note <= length or replay.note == 1):
                found = call.run((table, lens))
                if found is not again.missed:
                    return found
        return call.long(
            function, lambda: (self._block_table(layer), one_length(self._target.key, length)),
            lambda: 1 if len(q.shape) == 2 else int(q.shape[0]), _OUT,
        )  # fmt: skip

    def _attend_with(self, layer: int, q: Any, options: CheckedOptions) -> Any:
        """Attend with options that are checked, as an earlier call did where there is one like it."""
        if self._again is None or options.sight is not None:
            return self._attend(layer, q, options)
        return self._attend_again(layer, q, options, lambda: self._attend(layer, q, options))

    def _attend(self, layer: int, q: Any, options: CheckedOptions) -> Any:
        """Attend with the queries of a layer's last tokens."""
        there = self._target
        if not there.values_on_host:
            if there.chooses_stream:
                with there.on(q, self._pool.k):
                    return self._attend(layer, q, options)
            there.refuse_capture(f"{type(self).__name__}.decode_attention")
        q, length = self._check_queries(layer, q, is_free(options))
        pool, table, target = self._pools[layer], self._block_table(layer), self._target.key
        if self._full_precision is not None:
            return self._full_precision.attend(pool, table, layer, q, length, options)
        lens, starts = one_length(target, length), one_sequence(target, int(q.shape[0]))
        return attend(pool, table, q, lens, starts, options)

    def _mass(self, layer: int, q: Any, options: CheckedOptions, lse: Any) -> Array:
        """The attention mass ``(num_kv_heads, length)`` of a layer's tokens, on the stream of the call."""
        q, length = self._check_queries(layer, q)
        pool, table, target = self._pools[layer], self._block_table(layer), self._target.key
        if self._full_precision is not None:
            mass = self._full_precision.attention_mass(pool, table, layer, q, length, options, lse)
        else:
            lens, starts = one_length(target, length), one_sequence(target, int(q.shape[0]))
            mass = attention_mass(pool, table, q, lens, starts, length, options, lse=lse)
        return mass.reshape((self._heads, length))

    def _key_error(self, layer: int, q: Any, sm_scale: Any) -> NDArray[np.float64]:
        """See `numkv.storage.key_error`."""
        length, keys = self._stored(layer), self._pools[layer].k_buffer
        q = check_queries(self._target, q, self._heads, self._head_dim, "num_queries")
        tokens = np.array(self._quantised(layer), np.int64)
        slots = slots_of(self._tables[layer], tokens, max(1, int(keys.words.shape[2])))
        scale = check_options({"sm_scale": sm_scale}).scale(self._head_dim)
        return key_error(keys, slots, length, q, scale)

    # -- rows that a kernel has found to be NaN or infinite, after the call was over; never on the CPU

    def _look(self, layer: int, start: int, looked_at: Any) -> int:
        """Return the number of a check for a repeated call; raise if earlier tokens were bad."""
        self._refuse_bad(layer)
        return self._reports.look_again(looked_at, first=start)

    def _marker(self, start: int) -> Marker:
        """Return the receiver of bad positions, for a call from position `start` on."""
        reports = weakref.ref(self._reports)  # the object's memory is not kept for that

        def mark(position: int, error: NonFiniteInput, call: int) -> None:
            if (of := reports()) is not None:
                of.tell(0, position, error, call)

        return self._reports.marker(mark, start)

    def _refuse_bad(self, layer: int | None = 0) -> None:
        """Refuse to go on behind a token that a kernel has found to be NaN or infinite."""
        self._reports.collect()
        bad = self._reports.first(0)
        if bad is not None and layer is not None and bad[0] < self._stored(layer):
            position, error = bad
            raise NonFiniteInput(f"{error}; truncate to {position} tokens", error.index)

    def _refuse_reported(self) -> None:
        """Wait for launched kernels, and raise if a token was NaN or infinite."""
        self._reports.collect(wait=True)
        self._refuse_bad(self._longest())
