"""`LatentPool`: a pool whose V is a view of the first elements of each row of K.

Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) stores one row for each token. The row is a latent, from
which every head's K and V are projected, and a key with the position, which all heads share. With the projection of K
absorbed into the queries, the row itself is a key, and its latent the value::

    row of K     [ latent: 512 elements          | rotary part: 64 ]
    row of V     [ the same 512 elements of memory ]

So V is a view of K's words and of their scales. Rows are stored once and read once, by the kernels of all caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from numkv.checks import check_apart
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kinds import Kind, kind, kinds_of, refuse_channels
from numkv.numbers import check_flag
from numkv.storage.buffer import Buffer
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target
from numkv.targets.call import Marker

#: The `v_kind` of caches whose V is the first part of K's rows.
LATENT = "latent"


def pool_and_kinds(
    both: str | Kind, k_kind: str | Kind | None, v_kind: str | Kind | None, by_channel: bool = False
) -> tuple[type[Pool], Kind, Kind]:
    """The class of pool that an object's three arguments ask for, and the kinds of K and of V; see `kinds_of`."""
    if isinstance(v_kind, str) and v_kind.strip().lower() == LATENT:
        of_k = kind(both if k_kind is None else k_kind)
        refuse_channels("`kind`", of_k)
        return LatentPool, of_k, of_k
    return Pool, *kinds_of(both, k_kind, v_kind, by_channel)


def first_part(rows: Buffer, dim: int) -> Buffer:
    """Return the first elements of each row of a buffer as one of its own, on the same memory."""
    of = rows.kind
    if dim > rows.dim:
        raise DimensionMismatch(
            f"`head_dim_v`: expected at most head_dim={rows.dim}, as V is a part of K, got {dim}",
            expected=rows.dim,
            actual=dim,
        )
    words, scales = rows.words[:, :, :, : of.words_per_row(dim)], rows.scales
    if of.scales_per == "group":
        scales = scales[:, :, :, : -(-dim // of.group_size)]
    return replace(rows, words=words, scales=scales)


@dataclass(slots=True)
class LatentPool(Pool):
    """Rows of latents with their rotary parts as K; their first elements are V. See `Pool`."""

    is_latent: ClassVar[bool] = True

    @classmethod
    def allocate(
        cls, target: Target, shape: tuple[int, int, int], head_dim: int, head_dim_v: int, k_kind: Kind,
        v_kind: Kind, rotate: bool = False,
    ) -> Self:  # fmt: skip
        """Make a buffer of zeros for K; see `Pool.allocate`."""
        if rotate:
            raise NotSupported(
                "`rotate`: expected False for latents, whose V is a part of K's rows and would be rotated apart from "
                "them, got True; fold a rotation into the projections of the model"
            )
        return cls.over(Buffer.allocate(target, shape, head_dim, k_kind), head_dim_v)

    @classmethod
    def over(cls, rows: Buffer, head_dim_v: int) -> Self:
        """Return the pool of a buffer's rows."""
        return cls(rows, first_part(rows, head_dim_v))

    @property
    def stored(self) -> tuple[tuple[str, Buffer], ...]:
        """The buffer that has memory: K's."""
        return (("k", self.k_buffer),)

    @property
    def v_storage(self) -> str:
        """``"latent"``."""
        return LATENT

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, scales included."""
        return self.k_buffer.nbytes

    def set_scales(self, k: Any = None, v: Any = None) -> None:
        """Set the scales of heads, which V shares; see `Pool.set_scales`."""
        if v is not None:
            raise NotSupported(
                "`v`: expected None for latents, whose V has the scales of K, got some"
            )
        if k is not None:
            checked = self.k_buffer.check_scales("k", k)
            self.k_buffer.scales[:] = self.target.asarray(checked)

    def written(self, k: str = "k_pool", v: str = "v_pool") -> dict[str, Array]:
        """What writes of tokens change; see `Pool.written`."""
        return {k: self.k, "k_scale": self.k_scale} if self.k_kind.has_scales else {k: self.k}

    def like(self, num_blocks: int) -> LatentPool:
        """A pool of as many blocks; see `Pool.like`."""
        return LatentPool.over(self.k_buffer.like(num_blocks), self.head_dim_v)

    def __reduce__(self) -> Any:
        return LatentPool.over, (self.k_buffer, self.head_dim_v)

    def with_own_scales(self) -> LatentPool:
        """The same words, with scales of heads of its own; see `Pool.with_own_scales`."""
        return LatentPool.over(self.k_buffer.with_own_scales(), self.head_dim_v)

    def append(self, k: Array, v: Array, block_table: Array, start: int, look: int = 0) -> None:
        """Write checked rows of one sequence; `v`, which is a part of them, is ignored."""
        ops, side = self.target.ops, self.k_buffer.with_rows(k)
        if look:
            ops.append_both(side, _no_rows(side), block_table, start, look)
        else:
            ops.append_rows(*side, block_table, start)

    def scatter(self, k: Array, v: Array, slot_mapping: Array, look: int = 0) -> None:
        """Write checked rows into slots; `v`, which is a part of them, is ignored."""
        ops, side = self.target.ops, self.k_buffer.with_rows(k)
        if look:
            ops.scatter_both(side, _no_rows(side), slot_mapping, look)
        else:
            ops.scatter_rows(*side, slot_mapping)

    def watch(self, k: Array, v: Array, marker: Marker | None = None) -> int:
        """Make the kernel that writes rows check for NaN and infinity; see `Pool.watch`."""
        if self.target.values_on_host or not self.k_kind.has_scales:
            return 0
        of_k = ("k", tuple(k.shape), self.k_kind, 3)
        return self.target.watch(of_k, of_k, marker)

    def check_rows(self, k: Any, v: Any, *, check_finite: bool | None) -> tuple[Array, Array]:
        """Check new rows ``(num_tokens, num_kv_heads, head_dim)``; `v` is None, and comes back as these rows."""
        check_finite = check_flag("check_finite", check_finite, True)
        if v is not None:
            raise NotSupported(
                "`v`: expected None for latents, as V is the first part of the rows of K, got rows of V; append K alone"
            )
        k = self.k_buffer.check_rows("k", k)
        check_apart(self.target, self.written(), {"k": k})
        if check_finite:
            self.k_buffer.check_finite("k", k)
        return k, k


def _no_rows(side: tuple[Array, str, Array, str, Array]) -> tuple[Array, str, Array, str, Array]:
    """The same side with no rows to write: of K and V in one launch, V takes no part."""
    return side[0][:0], *side[1:]
