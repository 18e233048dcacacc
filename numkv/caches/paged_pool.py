"""`PagedPool`: blocks of K and V that many layers share."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from numkv import targets
from numkv.access import Access, drops
from numkv.arrays import CacheArrays
from numkv.blocks.pool import BlockPool
from numkv.caches.layer_spec import LayerSpec, spec_of, storage_of
from numkv.drawing.page import drawn
from numkv.errors import NumkvError
from numkv.kinds import Kind
from numkv.numbers import check_flag, check_size
from numkv.storage.buffer import are_scales
from numkv.storage.latents import pool_and_kinds
from numkv.storage.own_kernels import cache_arrays
from numkv.storage.pool import Pool
from numkv.targets.base import Target
from numkv.targets.streamed import streamed


@drawn
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
        Elements of a K row, and of a V row unless `head_dim_v` is given.
    kind : str or Kind
        Storage kind.
    target : {"cpu", "cuda"}
        Where the buffers are and the kernels run.
    k_kind : str or Kind, optional
        Storage kind of K, where it differs from `kind`.
    v_kind : str or Kind, optional
        Storage kind of V, where it differs from `kind`; ``"latent"`` as of `numkv.ContiguousLayer`.
    rotate : bool
        Whether rows are rotated before they are stored; see `numkv.ContiguousLayer`.
    head_dim_v : int, optional
        Elements of a V row.

    Attributes
    ----------
    blocks : BlockPool
        The bookkeeping: references, prefixes, eviction.

    Notes
    -----
    Layers over one pool may be used from several threads at once, a layer from one writer at a time. `copy`,
    `set_scales` and `clear` require that no thread writes to a layer.

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
        head_dim_v: int | None = None,
    ) -> None:
        shape = (
            check_size("num_blocks", num_blocks),
            check_size("num_kv_heads", num_kv_heads, 1),
            check_size("block_size", block_size, 1),
        )
        dim = check_size("head_dim", head_dim, 1)
        dim_v = dim if head_dim_v is None else check_size("head_dim_v", head_dim_v, 1)
        make, of_k, of_v = pool_and_kinds(kind, k_kind, v_kind, by_channel=True)
        self._access = Access()
        self._pool = make.allocate(
            targets.get(target), shape, dim, dim_v, of_k, of_v, check_flag("rotate", rotate)
        )
        self.blocks = BlockPool(shape[0], shape[2])

    @property
    def pool(self) -> Pool:
        """The buffers as kernels take them."""
        return self._pool

    def __runs_on__(self) -> tuple[Target, Any]:
        return self._pool.target, self._pool.k

    @property
    def spec(self) -> LayerSpec:
        """The description of layers over the pool: sizes and kinds of rows, and rotation."""
        return spec_of(self._pool)

    @property
    def target(self) -> str:
        """Name of the target."""
        return self._pool.target.name

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers, scales included."""
        return self._pool.nbytes

    @property
    def arrays(self) -> CacheArrays:
        """The buffers for your own kernels, without tables and lengths, which layers have; see `numkv.device`."""
        return cache_arrays(self._pool)

    @streamed
    @drops
    def set_scales(self, k: Any = None, v: Any = None) -> None:
        """Set the scales of a pool in fp8, which all its layers share; see `PagedLayer.set_scales`.

        Parameters
        ----------
        k, v : float or float32 array (num_kv_heads,), optional
            Scales of K and of V, in host memory: one for all kv heads, or one for each. None leaves them as they are.

        Raises
        ------
        NumkvError
            If blocks are in use or hold cached prefixes.
        NotSupported, ValueError, DimensionMismatch, UnsupportedDType
            See `PagedLayer.set_scales`.
        """
        now = self.blocks.stats()
        if now.used or now.cached:
            raise NumkvError(
                f"set_scales: expected a pool without blocks in use, got {now.used}, and {now.cached} with cached "
                "prefixes, whose rows were stored by other scales; set scales first, or free and forget them"
            )
        self._pool.set_scales(k, v)

    @drops
    def clear(self) -> None:
        """Forget all cached prefixes; memory stays.

        Raises
        ------
        NumkvError
            If blocks are in use or pinned: free their layers first. Nothing has changed.
        """
        used = self.blocks.stats().used
        if used:
            raise NumkvError(
                f"clear: expected a pool without blocks in use, got {used}; free the layers that have them first"
            )
        self.blocks.forget()

    def like(self, num_blocks: int) -> Self:
        """Make an empty pool of other size, of this one's kinds, shapes and scales of heads.

        Parameters
        ----------
        num_blocks : int
            Its blocks.

        Returns
        -------
        PagedPool
        """
        new = object.__new__(type(self))
        new._access = Access()
        new._pool = self._pool.like(check_size("num_blocks", num_blocks)).with_own_scales()
        new.blocks = BlockPool(num_blocks, self.blocks.block_size)
        return new

    @streamed
    def copy(self) -> Self:
        """Copy the blocks and their bookkeeping; the copy shares no memory.

        Blocks that are in use here are in use there under the same ids, with the same references, prefixes and pins:
        they belong to the users of these ids. Layers are not copied, and stay with this pool: `PagedLayer.copy`
        copies one. ``on_event`` is not copied.

        Returns
        -------
        PagedPool
        """
        num_blocks = self.blocks.num_blocks
        new = self.like(num_blocks)
        ids = self._pool.target.index(np.arange(num_blocks), np.int32)
        self._pool.copy_blocks(ids, new._pool, ids)
        new.blocks = self.blocks.copy()
        return new

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def check(self) -> None:
        """Verify the bookkeeping of blocks, and that scales of heads are finite.

        Raises
        ------
        NumkvError
            If it is inconsistent; the message names the contradiction.
        """
        self.blocks.check()
        num_blocks, _, size = (int(n) for n in self._pool.k.shape[:3])
        if (self.blocks.num_blocks, self.blocks.block_size) != (num_blocks, size):
            raise NumkvError(
                f"check: expected books of {num_blocks} blocks of {size} tokens, got {self.blocks!r}"
            )
        for _, buffer in self._pool.stored:
            if buffer.kind.scales_per == "head":
                scales = buffer.target.to_host(buffer.scales)
                if not are_scales(buffer.kind, scales):
                    raise NumkvError(
                        f"check: expected finite scales above 0, got {scales.tolist()}"
                    )

    def __repr__(self) -> str:
        of, blocks = self.spec, self.blocks
        return (
            f"PagedPool(num_blocks={blocks.num_blocks}, free={blocks.num_free}, block_size={blocks.block_size}, "
            f"num_kv_heads={of.num_kv_heads}, head_dim={of.head_dim}"
            f"{'' if of.head_dim_v == of.head_dim else f', head_dim_v={of.head_dim_v}'}, "
            f"kind={storage_of(self._pool.k_kind, self._pool.v_storage, of.rotate)}, target={self.target})"
        )
