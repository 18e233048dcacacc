"""`Pool`: the K and V buffers of a cache as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from numkv.checks import check_apart
from numkv.errors import DimensionMismatch
from numkv.kinds import Kind
from numkv.numbers import check_flag
from numkv.storage.buffer import Buffer
from numkv.storage.hadamard import Rotation
from numkv.targets.base import Array, Target
from numkv.targets.call import Marker


@dataclass(slots=True)  # a frozen one takes a microsecond longer to make
class Pool:
    """K and V buffers with equal numbers of blocks, heads and tokens a block. Only their contents ever change.

    Attributes
    ----------
    k_buffer, v_buffer : Buffer
        The two sides. Both are rotated, or neither is.
    """

    k_buffer: Buffer
    v_buffer: Buffer

    #: Whether V is the first part of K's rows: see `numkv.storage.latents`.
    is_latent: ClassVar[bool] = False

    @classmethod
    def allocate(
        cls,
        target: Target,
        shape: tuple[int, int, int],
        head_dim: int,
        head_dim_v: int,
        k_kind: Kind,
        v_kind: Kind,
        rotate: bool = False,
    ) -> Self:
        """Make buffers of zeros.

        Parameters
        ----------
        target : Target
            Where.
        shape : tuple of int
            ``(num_blocks, num_kv_heads, block_size)``.
        head_dim, head_dim_v : int
            Elements of a K row and of a V row.
        k_kind, v_kind : Kind
            Their kinds.
        rotate : bool
            Whether rows are rotated before they are stored.

        Returns
        -------
        Pool

        Raises
        ------
        DimensionMismatch
            If a row cannot be stored in its kind, or no memory can hold so many.
        MemoryError
            If this machine's does not.
        """
        return cls(
            Buffer.allocate(target, shape, head_dim, k_kind, rotate),
            Buffer.allocate(target, shape, head_dim_v, v_kind, rotate),
        )

    @property
    def target(self) -> Target:
        """Where the buffers are."""
        return self.k_buffer.target

    @property
    def k(self) -> Array:
        """Words of K ``(num_blocks, num_kv_heads, block_size, words_per_row)``."""
        return self.k_buffer.words

    @property
    def v(self) -> Array:
        """Words of V."""
        return self.v_buffer.words

    @property
    def k_kind(self) -> Kind:
        """Kind of K."""
        return self.k_buffer.kind

    @property
    def v_kind(self) -> Kind:
        """Kind of V."""
        return self.v_buffer.kind

    @property
    def k_scale(self) -> Array:
        """Scales of K, in words: see `Kind.scale_shape`."""
        return self.k_buffer.scales

    @property
    def v_scale(self) -> Array:
        """Scales of V."""
        return self.v_buffer.scales

    @property
    def k_rotation(self) -> Rotation | None:
        """How rows of K are rotated, if they are."""
        return self.k_buffer.rotation

    @property
    def head_dim(self) -> int:
        """Elements of a K row."""
        return self.k_buffer.dim

    @property
    def head_dim_v(self) -> int:
        """Elements of a V row."""
        return self.v_buffer.dim

    @property
    def rotate(self) -> bool:
        """Whether rows are rotated before they are stored."""
        return self.k_buffer.rotation is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, scales included."""
        return self.k_buffer.nbytes + self.v_buffer.nbytes

    @property
    def stored(self) -> tuple[tuple[str, Buffer], ...]:
        """The buffers that have memory of their own, by the names of their sides."""
        return ("k", self.k_buffer), ("v", self.v_buffer)

    @property
    def v_storage(self) -> str:
        """How V is stored, as in `v_kind` of a cache: the name of a kind, or ``"latent"``."""
        return self.v_buffer.kind.name

    @property
    def by_channel(self) -> bool:
        """Whether scales of K belong to channels: then rows of K come by `quantise`, whole groups of tokens."""
        return self.k_buffer.kind.group_tokens > 0

    def buffer(self, which: str) -> Buffer:
        """Return the buffer of ``"k"`` or ``"v"``."""
        return self.k_buffer if which == "k" else self.v_buffer

    def set_scales(self, k: Any = None, v: Any = None) -> None:
        """Set the scales of the heads of an empty pool of 8-bit floats; see `Buffer.check_scales`.

        Parameters
        ----------
        k, v : float or float32 array (num_kv_heads,), optional
            Scales of K and of V; None leaves them as they are, at first 1.
        """
        given = [(n, self.buffer(n), x) for n, x in (("k", k), ("v", v)) if x is not None]
        checked = [(buffer, buffer.check_scales(name, scales)) for name, buffer, scales in given]
        for buffer, scales in checked:
            buffer.scales[:] = self.target.asarray(scales)

    def copy_blocks(self, source_ids: Array, to: Pool, to_ids: Array) -> None:
        """Copy whole blocks, scales included, to a pool of the same kinds and shapes, which may be this one.

        Parameters
        ----------
        source_ids, to_ids : int32 array (n,)
            Blocks of this pool, and of the other, on the target.
        to : Pool
            Where they go.
        """
        for (_, source), (_, target) in zip(self.stored, to.stored, strict=True):
            source.copy_blocks(source_ids, target, to_ids)

    def copy_tokens(
        self, source_slots: NDArray[np.int64], to: Pool, to_slots: NDArray[np.int64]
    ) -> None:
        """Copy the rows of tokens as they are stored, scales included, to a pool of the same kinds and heads.

        Parameters
        ----------
        source_slots, to_slots : int64 array (n,)
            Where each token is, and where it goes, on the host. Within one pool, no pair may write to a slot that a
            later pair reads.
        to : Pool
            The other pool, on the same target, or this one.
        """
        here, there = (self.target.index(slots, np.int64) for slots in (source_slots, to_slots))
        self.copy_slots(here, there, to)

    def copy_slots(self, here: Array, there: Array, to: Pool) -> None:
        """`copy_tokens` by slots that are on the target."""
        for (_, source), (_, target) in zip(self.stored, to.stored, strict=True):
            source.copy_tokens(here, target, there)

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Words of K and V, then their scales."""
        return self.k, self.v, self.k_scale, self.v_scale

    def written(self, k: str = "k_pool", v: str = "v_pool") -> dict[str, Array]:
        """What writes of tokens change, by the names that errors call it: buffers, and scales that come with tokens."""
        found = {k: self.k, v: self.v}
        if self.k_kind.has_scales:
            found["k_scale"] = self.k_scale
        if self.v_kind.has_scales:
            found["v_scale"] = self.v_scale
        return found

    def like(self, num_blocks: int) -> Pool:
        """A pool of as many blocks, of this one's kinds and shapes, elsewhere on the target."""
        return Pool(self.k_buffer.like(num_blocks), self.v_buffer.like(num_blocks))

    def copy(self) -> Pool:
        """A pool of this one's kinds and shapes with the same content, in memory of its own."""
        num_blocks = int(self.k.shape[0])
        ids = self.target.index(np.arange(num_blocks), np.int32)
        made = self.like(num_blocks).with_own_scales()
        self.copy_blocks(ids, made, ids)
        return made

    def with_own_scales(self) -> Pool:
        """Return a pool on the same words, with copies of the scales of heads."""
        return Pool(self.k_buffer.with_own_scales(), self.v_buffer.with_own_scales())

    def values(self, which: str) -> Array:
        """The K or V buffer as it is stored; see `Buffer.elements`."""
        return self.buffer(which).elements()

    def rows(self, which: str, block: int, part: slice) -> Array:
        """Rows of a block as a user sees them; see `Buffer.rows`."""
        return self.buffer(which).rows(block, part)

    def scales(self, which: str) -> Array:
        """Return the scales of K or of V as a user sees them, in `Kind.scale_dtype`."""
        return self.buffer(which).typed_scales()

    def append(self, k: Array, v: Array, block_table: Array, start: int, look: int = 0) -> None:
        """Write checked rows of one sequence, by its block table; `look` is the result of `watch`.

        K is not written if its scales belong to channels.
        """
        if self.by_channel:
            self.v_buffer.append(v, block_table, start)
            return
        of_k, of_v = self.k_buffer.with_rows(k), self.v_buffer.with_rows(v)
        self.target.ops.append_both(of_k, of_v, block_table, start, look)

    def scatter(self, k: Array, v: Array, slot_mapping: Array, look: int = 0) -> None:
        """Write checked rows into slots; `look` is what `watch` gave. For K by channel see `append`."""
        if self.by_channel:
            self.v_buffer.scatter(v, slot_mapping)
            return
        of_k, of_v = self.k_buffer.with_rows(k), self.v_buffer.with_rows(v)
        self.target.ops.scatter_both(of_k, of_v, slot_mapping, look)

    def quantise(self, floats: Pool, groups: Array, to_groups: Array) -> None:
        """Quantise token groups of K by channel.

        Parameters
        ----------
        floats : Pool
            Where their rows are, in a float kind.
        groups, to_groups : int64 array (n,)
            Which they are there, and where they go here; see `Operations.quantise_groups`.
        """
        source, to = floats.k_buffer, self.k_buffer
        self.target.ops.quantise_groups(
            source.words, source.kind.name, groups, to.words, to.kind.name, to.scales, to_groups
        )

    @property
    def looks_first(self) -> bool:
        """Whether rows are checked before they are written, not by the kernel that writes them."""
        return self.target.values_on_host or self.by_channel

    def watch(self, k: Array, v: Array, marker: Marker | None = None) -> int:
        """Make the kernel that writes rows check quantised ones for NaN and infinity.

        Parameters
        ----------
        k, v : array (num_tokens, num_kv_heads, dim)
            The rows.
        marker : Marker, optional
            Receives the reports.

        Returns
        -------
        int
            The `look` of `append` and `scatter`; 0 if no check is needed, or the host has checked.
        """
        kinds = self.k_kind, self.v_kind
        if self.looks_first or not any(kind.has_scales for kind in kinds):
            return 0
        # Rotation spreads NaN and infinity over a row, so the report has the row, not the element.
        axes = 2 if self.rotate else 3
        of_k, of_v = (("k", tuple(k.shape), kinds[0], axes), ("v", tuple(v.shape), kinds[1], axes))
        return self.target.watch(of_k, of_v, marker)

    def check_rows(self, k: Any, v: Any, *, check_finite: bool | None) -> tuple[Array, Array]:
        """Check new rows ``(num_tokens, num_kv_heads, head_dim)`` of K and V; they may not lie in this pool.

        Where the host does not see their values, `check_finite` waits for the device.
        """
        check_finite = check_flag("check_finite", check_finite, True)
        k, v = self.k_buffer.check_rows("k", k), self.v_buffer.check_rows("v", v)
        if v.shape[0] != k.shape[0]:
            raise DimensionMismatch(
                f"`v`: expected as many tokens as `k`, {k.shape[0]}, got {v.shape[0]}",
                expected=int(k.shape[0]),
                actual=int(v.shape[0]),
            )
        check_apart(self.target, self.written(), {"k": k, "v": v})
        if check_finite:
            self.k_buffer.check_finite("k", k)
            self.v_buffer.check_finite("v", v)
        return k, v
