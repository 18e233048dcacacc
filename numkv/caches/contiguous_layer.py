"""`ContiguousLayer`: the K and V of one sequence in one layer, in one buffer."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from numkv import targets
from numkv.caches.layer import Layer
from numkv.caches.layer_spec import FullPrecision
from numkv.caches.saved import SavedContiguous
from numkv.drawing.page import drawn
from numkv.errors import DimensionMismatch, NumkvError
from numkv.kinds import Kind
from numkv.numbers import check_flag, check_size
from numkv.storage.latents import pool_and_kinds


@drawn
class ContiguousLayer(Layer):
    """One sequence's K and V in one layer, in one contiguous buffer.

    Parameters
    ----------
    capacity : int
        Number of tokens for which there is room; the buffers are allocated once. For keys by channel it is rounded up
        to whole groups of 64.
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
        Storage kind of V, where it differs from `kind`. With ``"latent"`` V is the first `head_dim_v` elements of
        each row of K, and no memory of its own: see docs/latent.md.
    rotate : bool
        Whether rows are rotated before they are stored, by random signs and a Hadamard transform. This spreads large
        elements over the row and makes quantisation more accurate; all reads invert it. See `numkv.storage.hadamard`.
    full_precision : FullPrecision, optional
        Newest and first tokens that are stored in full precision, in addition to a quantised kind.
    head_dim_v : int, optional
        Elements of a V row.

    Raises
    ------
    NotSupported
        If tokens should stay in full precision but neither kind is quantised.
    DimensionMismatch, UnsupportedDType
        If a size is too small, or there is no such kind.

    Notes
    -----
    Threads may share a layer. One writer at a time: a second one gets `NumkvError`, and nothing has changed.
    Concurrent readers of an append see whole tokens. If the writer drops or moves tokens (`truncate`, `clear`,
    `compact`, a new `seq_len`; with full-precision tokens every append), a reader gets `NumkvError` or a right
    result. Code that works on `jit` or `arrays` is not covered by these rules: no other thread may write meanwhile.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> layer = numkv.ContiguousLayer(capacity=64, num_kv_heads=2, head_dim=16, kind="fp16")
    >>> rows = np.ones((3, 2, 16), np.float32)
    >>> layer.append(rows, rows)
    >>> layer.decode_attention(np.ones((1, 8, 16), np.float32)).shape
    (1, 8, 16)
    """

    __saved__ = SavedContiguous

    def __init__(
        self,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: str | Kind = "fp16",
        target: str = "cpu",
        k_kind: str | Kind | None = None,
        v_kind: str | Kind | None = None,
        rotate: bool = False,
        full_precision: FullPrecision | None = None,
        head_dim_v: int | None = None,
    ) -> None:
        place = targets.get(target)
        make, of_k, of_v = pool_and_kinds(kind, k_kind, v_kind, by_channel=True)
        size = of_k.whole_groups(check_size("capacity", capacity))
        heads = check_size("num_kv_heads", num_kv_heads, 1)
        dim = check_size("head_dim", head_dim, 1)
        dim_v = dim if head_dim_v is None else check_size("head_dim_v", head_dim_v, 1)
        if size > np.iinfo(np.int32).max:
            raise DimensionMismatch(
                f"`capacity`: expected at most {np.iinfo(np.int32).max} tokens, got {size}",
                actual=size,
            )
        pool = make.allocate(
            place, (1, heads, size), dim, dim_v, of_k, of_v, check_flag("rotate", rotate)
        )
        super().__init__(pool, np.zeros(1, np.int32), size, full_precision)

    def _copy_to(self, new: Self) -> None:
        length = self._stored(0)
        new._lengths, new._ids = np.array([length], np.int32), self._ids.copy()
        new._pool = self._pool.like(1).with_own_scales()
        slots = np.arange(length)
        self._pool.copy_tokens(slots, new._pool, slots)
        self._begin_copy(new)

    def _values(self) -> dict[str, Any]:
        return super()._values() | {"capacity": self._capacity}

    def _check_books(self) -> None:
        blocks, _, size = (int(n) for n in self._pool.k.shape[:3])
        if (blocks, size, self._room) != (1, self._capacity, self._capacity):
            raise NumkvError(
                f"check: expected one block of {self._capacity} tokens, got {blocks} of {size}"
            )

    @property
    def is_paged(self) -> bool:
        """False: there is one block, the buffer."""
        return False

    @property
    def block_size(self) -> int:
        """0, as there are no blocks."""
        return 0

    @property
    def block_table(self) -> None:
        """None, as there are no blocks."""
        return None

    @property
    def block_indices(self) -> list[int]:
        """Empty, as there are no blocks."""
        return []

    def __repr__(self) -> str:
        return (
            f"ContiguousLayer(seq_len={self.seq_len}, capacity={self.capacity}, "
            f"num_kv_heads={self.num_kv_heads}, {self._dims()}, "
            f"kind={self._storage()}, target={self.target})"
        )
