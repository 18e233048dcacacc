"""Paged caches: `PagedPool`, a pool of blocks that many layers share, and `PagedLayer`, one sequence in one layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv import targets
from numkv.blocks.pool import BlockPool, PoolStats
from numkv.caches.layer import Layer
from numkv.checks import check_size
from numkv.errors import DimensionMismatch, NumkvError
from numkv.kinds import Kind, kind, kinds_of
from numkv.storage.pool import Pool

__all__ = ["PagedLayer", "PagedPool"]


class PagedPool:
    """Buffers of blocks, and which of them are in use; shared by layers of different sequences.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool.
    block_size : int
        Tokens in a block; any number from 1 up.
    num_kv_heads : int
        Kv heads.
    head_dim : int
        Elements of a K or V row.
    kind : str or Kind
        Storage kind.
    target : {"cpu", "cuda"}
        Where the buffers are and the kernels run.
    k_kind, v_kind : str or Kind, optional
        Storage kinds of K and of V, where they differ from `kind`.
    rotate : bool
        Whether rows are rotated before they are stored; see `numkv.ContiguousLayer`.

    Attributes
    ----------
    blocks : BlockPool
        The bookkeeping: references, prefixes, eviction.

    Examples
    --------
    >>> import numkv
    >>> pool = numkv.PagedPool(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=8)
    >>> a = numkv.PagedLayer(8, 16, 2, 8, pool=pool)
    >>> b = numkv.PagedLayer(8, 16, 2, 8, pool=pool)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: str | Kind = "fp16",
        target: str = "cpu",
        k_kind: str | Kind | None = None,
        v_kind: str | Kind | None = None,
        rotate: bool = False,
    ) -> None:
        shape = (
            check_size("num_blocks", num_blocks),
            check_size("num_kv_heads", num_kv_heads, 1),
            check_size("block_size", block_size, 1),
        )
        dim = check_size("head_dim", head_dim, 1)
        of_k, of_v = kinds_of(kind, k_kind, v_kind)
        self._pool = Pool.allocate(targets.get(target), shape, dim, dim, of_k, of_v, rotate)
        self.blocks = BlockPool(shape[0], shape[2])

    @property
    def pool(self) -> Pool:
        """The buffers as kernels take them."""
        return self._pool

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return int(self._pool.k.shape[0])

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return self.blocks.num_free

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return int(self._pool.k.shape[2])

    @property
    def num_kv_heads(self) -> int:
        """Kv heads."""
        return int(self._pool.k.shape[1])

    @property
    def head_dim(self) -> int:
        """Elements of a row."""
        return self._pool.head_dim

    @property
    def kind(self) -> Kind:
        """Storage kind of K, and of V unless `v_kind` differs."""
        return self._pool.k_kind

    @property
    def v_kind(self) -> Kind:
        """Storage kind of V."""
        return self._pool.v_kind

    @property
    def rotate(self) -> bool:
        """Whether rows are rotated before they are stored."""
        return self._pool.rotate

    @property
    def target(self) -> str:
        """Name of the target."""
        return self._pool.target.name

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers, scales included."""
        return self._pool.nbytes

    def set_scales(self, k: Any = None, v: Any = None) -> None:
        """Set the scales of a pool in fp8, which all its layers share; see `PagedLayer.set_scales`.

        Parameters
        ----------
        k, v : float or float32 array (num_kv_heads,), optional
            Scales of K and of V, in host memory: one for all kv heads, or one for each. None leaves them as they are.

        Raises
        ------
        NumkvError
            If blocks are in use.
        NotSupported, ValueError, DimensionMismatch, UnsupportedDType
            See `PagedLayer.set_scales`.
        """
        used = self.num_blocks - self.num_free
        if used:
            raise NumkvError(
                f"set_scales: expected a pool without blocks in use, got {used}, whose rows were stored by other "
                "scales; set scales first, or free them"
            )
        self._pool.set_scales(k, v)

    def stats(self) -> PoolStats:
        """Counts of blocks now, and of what has happened to them."""
        return self.blocks.stats()

    def check(self) -> None:
        """Prove the accounting; see `BlockPool.check`."""
        self.blocks.check()

    def __repr__(self) -> str:
        return (
            f"PagedPool(num_blocks={self.num_blocks}, free={self.num_free}, "
            f"block_size={self.block_size}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, kind={self.kind}"
            f"{'' if self.kind is self.v_kind else f'/{self.v_kind}'}"
            f"{', rotate=True' if self.rotate else ''}, target={self.target})"
        )


class PagedLayer(Layer):
    """One sequence's K and V in one layer, in blocks that it takes from a pool as it grows.

    Parameters
    ----------
    max_blocks_per_seq : int
        Blocks that the sequence can have: the length of its block table.
    block_size : int
        Tokens in a block.
    num_kv_heads : int
        Kv heads.
    head_dim : int
        Elements of a K or V row.
    kind : str or Kind, optional
        Storage kind; ``"fp16"``, or the pool's.
    target : {"cpu", "cuda"}, optional
        Where the buffers are; ``"cpu"``, or where the pool is.
    pool : PagedPool, optional
        Where blocks come from; fixes kind, target, shapes and `rotate`. Without it the layer owns one of
        `max_blocks_per_seq` blocks.
    k_kind, v_kind : str or Kind, optional
        Storage kinds of K and of V, where they differ from `kind`.
    rotate : bool, optional
        Whether rows are rotated before they are stored (see `numkv.ContiguousLayer`): False, or as the pool does.
    residual_window : int
        Newest tokens that are kept in full precision, beside a quantised kind; see `numkv.caches.full_precision`.
    num_sink_tokens : int
        First tokens that are kept in full precision too.

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

    Examples
    --------
    >>> import numpy as np, numkv
    >>> layer = numkv.PagedLayer(max_blocks_per_seq=4, block_size=16, num_kv_heads=2, head_dim=8, kind="int8")
    >>> rows = np.ones((20, 2, 8), np.float32)
    >>> layer.append(rows, rows)
    >>> layer.block_indices
    [0, 1]
    """

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
        residual_window: int = 0,
        num_sink_tokens: int = 0,
    ) -> None:
        blocks = check_size("max_blocks_per_seq", max_blocks_per_seq)
        if pool is None:
            pool = PagedPool(
                blocks, block_size, num_kv_heads, head_dim, kind="fp16" if kind is None else kind,
                target="cpu" if target is None else target, k_kind=k_kind, v_kind=v_kind,
                rotate=bool(rotate),
            )  # fmt: skip
        else:
            _check_same(
                pool, block_size, num_kv_heads, head_dim, kind, target, k_kind, v_kind, rotate
            )
        self.pool = pool
        table = np.full(blocks, -1, np.int32)
        capacity = blocks * pool.block_size
        self._ids = table.copy()  # what the table, which compiled code can reach, has to be
        self._table_view = table.view()
        self._table_view.flags.writeable = False
        self._owned = 0
        super().__init__(pool.pool, table, capacity, residual_window, num_sink_tokens)
        self._room = 0

    @property
    def is_paged(self) -> bool:
        """True."""
        return True

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.pool.block_size

    @property
    def block_table(self) -> np.ndarray[Any, Any]:
        """Physical blocks ``(max_blocks_per_seq,)`` int32, -1 where there is none; read-only, shared with `jit`."""
        return self._table_view

    @property
    def block_indices(self) -> list[int]:
        """The blocks that the layer owns, in order."""
        owned: list[int] = self._ids[: self._owned].tolist()
        return owned

    def _take_room(self, length: int) -> None:
        need = -(-length // self.block_size)
        if need <= self._owned:
            return
        taken = self.pool.blocks.allocate(need - self._owned)  # all or nothing: CacheFull
        self._table[self._owned : need] = self._ids[self._owned : need] = taken
        self._owned, self._room = need, need * self.block_size
        self._device_table = None

    def _stored(self, layer: int) -> int:
        length = super()._stored(layer)
        if self._struct is not None and not np.array_equal(self._table, self._ids):
            raise NumkvError(
                f"`jit.block_table`: expected the layer's own, {self._ids.tolist()}, got {self._table.tolist()}; "
                "compiled code may read it, not write it"
            )
        return length

    def _set_scales(self, layer: int, k: Any, v: Any) -> None:
        self.pool.set_scales(k, v)  # which other layers may use

    @property
    def seq_len(self) -> int:
        """Tokens in the layer. Setting it takes and gives back blocks; it must stay in ``[0, capacity]``.

        With full-precision tokens the length cannot grow this way: they are not in the buffers.
        """
        return self._stored(0)

    @seq_len.setter
    def seq_len(self, length: int) -> None:
        length = self._check_length(length)
        self._take_room(length)
        self._give_back(length)
        self._lengths[0] = length

    def _give_back(self, length: int) -> None:
        keep = -(-length // self.block_size)
        if keep < self._owned:
            self.pool.blocks.release(self._ids[keep : self._owned].copy())
            self._table[keep : self._owned] = self._ids[keep : self._owned] = -1
            self._owned, self._room = keep, keep * self.block_size
            self._device_table = None

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on, and give back the blocks that only they were in.

        Parameters
        ----------
        length : int
            New length, at most `seq_len`.

        Raises
        ------
        IndexError
            If `length` is negative or above `seq_len`.
        """
        super().truncate(length)
        self._give_back(length)

    def free(self) -> None:
        """Give all blocks back to the pool; the layer is empty then and can be used again."""
        self.truncate(0)

    def __repr__(self) -> str:
        return (
            f"PagedLayer(seq_len={self.seq_len}, capacity={self.capacity}, blocks={self._owned}, "
            f"block_size={self.block_size}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, kind={self._storage()}, target={self.target})"
        )


def _check_same(
    pool: PagedPool, block_size: int, num_kv_heads: int, head_dim: int, both: str | Kind | None,
    target: str | None, k_kind: str | Kind | None, v_kind: str | Kind | None,
    rotate: bool | None,
) -> None:  # fmt: skip
    """Refuse arguments that say something else than the pool."""
    given: dict[str, tuple[Any, Any]] = {
        "block_size": (block_size, pool.block_size),
        "num_kv_heads": (num_kv_heads, pool.num_kv_heads),
        "head_dim": (head_dim, pool.head_dim),
    }
    if target is not None:
        given["target"] = (target, pool.target)
    if rotate is not None:
        given["rotate"] = (bool(rotate), pool.rotate)
    for name, of_arg, of_pool in (("k_kind", k_kind, pool.kind), ("v_kind", v_kind, pool.v_kind)):
        asked = both if of_arg is None else of_arg
        if asked is not None:
            given[name] = (kind(asked).name, of_pool.name)
    for name, (asked, has) in given.items():
        if asked != has:
            raise DimensionMismatch(
                f"`{name}`: expected the pool's, {has}, got {asked}; leave it out or change the pool",
                expected=has,
                actual=asked,
            )
