"""`PagedLayer`: the K and V of one sequence in one layer, in blocks of a pool."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv.access import drops, overtaken, whole
from numkv.caches.layer import Layer
from numkv.caches.layer_spec import FullPrecision
from numkv.caches.paged_pool import PagedPool
from numkv.caches.saved import SavedPaged, SavedSequence
from numkv.checks import host_array
from numkv.compaction.moves import slots_of
from numkv.drawing.page import drawn
from numkv.errors import CacheFull, DimensionMismatch, NumkvError
from numkv.interrupts import signals_deferred
from numkv.kinds import Kind
from numkv.numbers import check_flag, check_size
from numkv.snapshots.snapshot import Options
from numkv.storage.buffer import Buffer
from numkv.storage.latents import LATENT, LatentPool, pool_and_kinds


@drawn
class PagedLayer(Layer):
    """One sequence's K and V in one layer, in blocks allocated from a pool as it grows.

    Parameters
    ----------
    max_blocks_per_seq : int
        Blocks that the sequence can have: the length of its block table.
    block_size : int
        Tokens in a block.
    num_kv_heads : int
        Kv heads.
    head_dim : int
        Elements of a K row, and of a V row unless `head_dim_v` is given.
    kind : str or Kind, optional
        Storage kind; ``"fp16"``, or the pool's.
    target : {"cpu", "cuda"}, optional
        Where the buffers are; ``"cpu"``, or where the pool is.
    pool : PagedPool, optional
        Where blocks come from; fixes kind, target, shapes and `rotate`. Without it the layer owns one of
        `max_blocks_per_seq` blocks.
    k_kind : str or Kind, optional
        Storage kind of K, where it differs from `kind`.
    v_kind : str or Kind, optional
        Storage kind of V, where it differs from `kind`; ``"latent"`` as of `numkv.ContiguousLayer`.
    rotate : bool, optional
        Whether rows are rotated before they are stored (see `numkv.ContiguousLayer`): False, or as the pool does.
    full_precision : FullPrecision, optional
        Newest and first tokens that are stored in full precision, in addition to a quantised kind.
    head_dim_v : int, optional
        Elements of a V row: as many as of a K row, or as the pool has.

    Raises
    ------
    DimensionMismatch
        If a size or kind or `rotate` is not the pool's.
    NotSupported
        If tokens should stay in full precision but neither kind is quantised.

    Notes
    -----
    Full-precision tokens lie in buffers of the layer's own. Their slots in blocks are taken all the same, so that
    there always is room to quantise them.

    Threads may share a layer as they may share a `numkv.ContiguousLayer`: one writer at a time, and concurrent
    readers. Layers over one pool are independent in all threads; a freed block can be reused by another layer at
    once.

    In a pickle a layer takes its pool along, and all that is in it; layers of one pickle share it afterwards too.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> layer = numkv.PagedLayer(max_blocks_per_seq=4, block_size=16, num_kv_heads=2, head_dim=8, kind="int8")
    >>> rows = np.ones((20, 2, 8), np.float32)
    >>> layer.append(rows, rows)
    >>> layer.block_indices
    [0, 1]
    """

    __saved__ = SavedPaged

    def __init__(
        self,
        max_blocks_per_seq: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: str | Kind | None = None,
        target: str | None = None,
        pool: PagedPool | None = None,
        k_kind: str | Kind | None = None,
        v_kind: str | Kind | None = None,
        rotate: bool | None = None,
        full_precision: FullPrecision | None = None,
        head_dim_v: int | None = None,
    ) -> None:
        blocks = check_size("max_blocks_per_seq", max_blocks_per_seq)
        size = check_size("block_size", block_size, 1)
        most = np.iinfo(np.int32).max // size
        if blocks > most:
            raise DimensionMismatch(
                f"`max_blocks_per_seq`: expected at most {most} blocks of {size} tokens, whose number int32 can say, "
                f"got {blocks}",
                expected=most,
                actual=blocks,
            )
        self._has_own_pool = pool is None
        if pool is None:
            pool = PagedPool(
                blocks, block_size, num_kv_heads, head_dim, kind="fp16" if kind is None else kind,
                target="cpu" if target is None else target, k_kind=k_kind, v_kind=v_kind,
                rotate=check_flag("rotate", rotate), head_dim_v=head_dim_v,
            )  # fmt: skip
        elif not isinstance(pool, PagedPool):
            raise TypeError(f"`pool`: expected a PagedPool, got {type(pool).__name__}")
        else:
            _check_same(
                pool, block_size, num_kv_heads, head_dim, head_dim_v, kind, target, k_kind, v_kind, rotate
            )  # fmt: skip
        self.pool = pool
        self._owned = 0
        capacity = blocks * pool.blocks.block_size
        ids = np.full(blocks, -1, np.int32)
        super().__init__(pool.pool, ids, capacity, full_precision)
        self._room = 0

    @property
    def is_paged(self) -> bool:
        """True."""
        return True

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.pool.blocks.block_size

    @property
    def block_table(self) -> np.ndarray[Any, Any]:
        """Physical blocks ``(max_blocks_per_seq,)`` int32, -1 where there is none; read-only, shared with `jit`."""
        return self._table_view

    @property
    def block_indices(self) -> list[int]:
        """The blocks that the layer owns, in order."""
        owned: list[int] = self._ids[: self._owned].tolist()
        return owned

    # -- blocks

    def _take_room(self, length: int) -> None:
        need = -(-length // self.block_size)
        if need > self._owned:  # all or nothing: CacheFull
            self._own(self.pool.blocks.allocate(need - self._owned))

    def _own(self, taken: NDArray[np.int32]) -> None:
        """Append blocks, which have been taken, to the table."""
        end = self._owned + len(taken)
        self._ids[self._owned : end] = self._table[self._owned : end] = taken
        self._version += 1
        self._owned, self._room = end, end * self.block_size

    def _shorter(self, length: int) -> NDArray[np.int32] | None:
        """The table without blocks that only tokens from position `length` on are in; None if it stays as it is."""
        keep = -(-length // self.block_size)
        if keep >= self._owned:
            return None
        ids = self._ids.copy()
        ids[keep:] = -1
        return ids

    def _give_back(self, length: int, shorter: NDArray[np.int32] | None) -> None:
        if shorter is None:
            return
        keep, before = -(-length // self.block_size), int(self._lengths[0])
        now, ids = vars(self), shorter
        changed = {name: now[name] for name in ("_ids", "_tables", "_owned", "_room")}
        released = self._ids[keep : self._owned]
        self._lengths[0] = min(before, length)
        now.update(_ids=ids, _tables=[ids], _owned=keep, _room=keep * self.block_size)
        try:
            self.pool.blocks.release(released)
        except NumkvError:  # in the middle of another change of the pool's books
            now.update(changed)
            self._lengths[0] = before
            raise
        self._table[keep:] = ids[keep:]
        self._version += 1

    @whole
    def take_blocks(self, ids: Any) -> None:
        """Allocate these blocks for the next tokens, in this order.

        They follow those that the layer has, and stay until `truncate`, `free` or a new `seq_len` gives them back.
        Tokens beyond them get blocks of the pool's choice.

        Parameters
        ----------
        ids : array-like of int (n,)
            Blocks of the pool that are not in use, each once.

        Raises
        ------
        CacheFull
            If one of them is in use or pinned, or they are more than the table has room for; nothing has changed.
        IndexError
            If there is no such block.
        NumkvError
            If one is listed twice.
        DimensionMismatch, UnsupportedDType
            If `ids` is no row of integers.
        """
        wanted = host_array("ids", ids)
        room = len(self._ids) - self._owned
        if wanted.ndim == 1 and len(wanted) > room:
            raise CacheFull(
                f"`ids`: expected at most {room} blocks, as the table has {len(self._ids)} entries and "
                f"{self._owned} blocks, got {len(wanted)}; make the layer larger"
            )
        self._own(self.pool.blocks.allocate_ids(wanted))

    @drops
    def free(self) -> None:
        """Return all blocks to the pool; the layer is then empty and can be used again.

        `clear` drops the tokens and keeps the blocks.
        """
        self._truncate(0)

    def _set_scales(self, layer: int, k: Any, v: Any) -> None:
        self.pool.set_scales(k, v)  # which other layers may use

    # -- as a whole

    def _is_table_sound(self) -> bool:
        owned = self._owned  # before the tables: a writer beside this call adds to them first
        return bool((self._table[:owned] == self._ids[:owned]).all())

    def _copy_to(self, new: Self) -> None:
        taken = np.empty(0, np.int32)
        try:
            with signals_deferred:
                dropped, length, size = self._access.dropped, self._stored(0), self.block_size
                tokens, table = np.arange(length), self._ids
                need = -(-length // size)
                if self._has_own_pool:
                    new.pool = self.pool.like(self.pool.blocks.num_blocks)
                taken = new.pool.blocks.allocate(need)
                new._lengths, new._ids = np.array([length], np.int32), np.full_like(table, -1)
                new._ids[:need] = taken
                new._pool, new._owned, new._room = new.pool.pool, need, need * size
                source, to = (slots_of(ids, tokens, size) for ids in (table, new._ids))
                self._pool.copy_tokens(source, new._pool, to)
                self._begin_copy(new)
                if self._access.dropped != dropped:
                    raise overtaken(self, "copy")
        except BaseException:  # an interrupt, too: nobody has the copy
            new.pool.blocks.release(taken)
            raise

    def _values(self) -> dict[str, Any]:
        sizes = {"block_size": self.block_size, "max_blocks_per_seq": len(self._ids)}
        return super()._values() | sizes

    @classmethod
    def _empty(cls, saved: SavedSequence, options: Options) -> Self:
        if options.pool is None:
            return super()._empty(saved, options)
        try:
            return cls(**saved.arguments(), pool=options.pool)
        except DimensionMismatch as error:
            raise DimensionMismatch(
                f"`pool`: expected one that agrees with the layer in the file, got {options.pool!r}; {error}",
                error.expected, error.actual,
            ) from error  # fmt: skip

    def _take_scales(self, side: str, buffer: Buffer, scales: NDArray[Any]) -> None:
        own = buffer.target.to_host(buffer.scales)
        if self._has_own_pool:
            super()._take_scales(side, buffer, scales)
        elif not np.array_equal(own, scales):
            raise NumkvError(
                f"`pool`: expected one whose scales of {side} are those of the rows in the file, {scales.tolist()}, "
                f"got {own.tolist()}; call pool.set_scales({side}=…) with these while it is empty"
            )

    def _check_books(self) -> None:
        owned, size = self._owned, self.block_size
        ids = self._ids[:owned]
        references = self.pool.blocks.ref_count(ids)
        for wrong, what in (
            (owned * size != self._room, f"room for {owned * size} tokens, got {self._room}"),
            (
                len(np.unique(ids)) != owned,
                f"blocks that are there once each, got {ids.tolist()}",
            ),
            ((references < 1).any(), f"blocks in use, got references {references.tolist()}"),
            ((self._ids[owned:] != -1).any(), f"-1 past block {owned}, got {self._ids.tolist()}"),
            (self._pool is not self.pool.pool, "the buffers of its pool, got others"),
        ):
            if wrong:
                raise NumkvError(f"check: expected {what}")

    def __repr__(self) -> str:
        return (
            f"PagedLayer(seq_len={self.seq_len}, capacity={self.capacity}, blocks={self._owned}, "
            f"block_size={self.block_size}, num_kv_heads={self.num_kv_heads}, {self._dims()}, "
            f"kind={self._storage()}, target={self.target})"
        )


def _check_same(
    pool: PagedPool, block_size: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None,
    both: str | Kind | None, target: str | None, k_kind: str | Kind | None, v_kind: str | Kind | None,
    rotate: bool | None,
) -> None:  # fmt: skip
    """Refuse arguments that contradict the pool."""
    of = pool.spec
    given: dict[str, tuple[Any, Any]] = {
        "block_size": (check_size("block_size", block_size), pool.blocks.block_size),
        "num_kv_heads": (check_size("num_kv_heads", num_kv_heads), of.num_kv_heads),
        "head_dim": (check_size("head_dim", head_dim), of.head_dim),
    }
    if head_dim_v is not None:
        given["head_dim_v"] = (check_size("head_dim_v", head_dim_v), of.head_dim_v)
    if target is not None:
        given["target"] = (target, pool.target)
    if rotate is not None:
        given["rotate"] = (check_flag("rotate", rotate), of.rotate)
    buffers = pool.pool
    make, of_k, of_v = pool_and_kinds(buffers.k_kind if both is None else both, k_kind, v_kind)
    if both is not None or k_kind is not None:
        given["k_kind"] = (of_k.name, buffers.k_kind.name)
    if v_kind is not None:
        given["v_kind"] = (LATENT if make is LatentPool else of_v.name, buffers.v_storage)
    elif both is not None:
        given["v_kind"] = (of_v.name, buffers.v_kind.name)
    for name, (asked, has) in given.items():
        if asked != has:
            raise DimensionMismatch(
                f"`{name}`: expected the pool's, {has}, got {asked}; leave it out or change the pool",
                expected=has,
                actual=asked,
            )
