"""Snapshots of caches of one sequence: the small values that caches are rebuilt from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from numkv.caches.layer_spec import FullPrecision
from numkv.kinds import Kind, float_kind, kind
from numkv.snapshots.fields import MOST, expect
from numkv.snapshots.saved import Saved, Spec, integer, integers, optional, storage_kind
from numkv.storage.latents import LATENT
from numkv.storage.saved import Side, rotation, row_bytes, row_specs, v_storage


def coded_rows(
    k_kind: Kind, begin: int, end: int, rows: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Which rows of K and of V a file has in their kinds, where those outside of ``[begin, end)`` are in full.

    By channel V has codes of all rows, and K those of whole groups.
    """
    some = k_kind.group_tokens
    if not some:
        return (begin, end), (begin, end)
    return (0, max(end if begin < end else 0, rows // some * some)), (0, rows)


@dataclass(kw_only=True)
class SavedSequence(Saved):
    """The sequence of a cache: each layer's number of rows, and which of them are stored in its kind."""

    #: Entries that are also arguments of the class, in addition to those of all classes.
    sizes: ClassVar[tuple[str, ...]] = ()
    #: Whether V may be a part of K.
    may_be_latent: ClassVar[bool] = True

    num_layers: int = integer()
    num_kv_heads: int = integer(1)
    head_dim: int = integer(1)
    head_dim_v: int = integer(1)
    k_kind: Kind = storage_kind()
    v_kind: str = v_storage()
    rotation: int | None = rotation()
    residual_window: int = integer()
    num_sink_tokens: int = integer()
    rows: list[int] = integers("num_layers")
    begins: list[int] = integers("num_layers")
    ends: list[int] = integers("num_layers")

    @property
    def most(self) -> int | None:
        """Tokens that a layer can have, if that is known."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that rows fit the capacity, and that quantised and full-precision tokens fit the window."""
        if "num_layers" not in self.sizes:
            expect(self.num_layers == 1, f"a layer has {self.num_layers} layers")
        latent = self.v_kind == LATENT
        expect(not latent or self.rotation is None, "latents that are rotated")
        expect(self.may_be_latent or not latent, "latents in a cache that has none")
        expect(
            not latent or self.head_dim_v <= self.head_dim, "rows of V are longer than those of K"
        )
        expect(
            self.most is None or max(self.rows, default=0) <= self.most,
            f"more rows than {self.most}",
        )
        scaled = any(of.has_scales for _, of, _ in self.sides)
        windowed = self.residual_window or self.num_sink_tokens
        expect(scaled or not windowed, f"{self.k_kind} has no full-precision tokens")
        if some := self.k_kind.group_tokens:
            expect(
                not latent and self.residual_window <= some and self.rotation is None,
                f"{self.k_kind} beside latents, a window of more than {some} tokens or a rotation",
            )
            for end, rows in zip(self.ends, self.rows, strict=True):
                expect(
                    rows <= end // some * some + some,
                    f"rows [{end}, {rows}) in full, of more than a group",
                )
        first, ring = (
            min(n, self._bound) for n in (self.num_sink_tokens, some or self.residual_window)
        )
        for begin, end, rows in zip(self.begins, self.ends, self.rows, strict=True):
            expect(
                begin <= end <= rows and begin <= first and rows - end <= ring,
                f"rows [{begin}, {end}) of {rows} are quantised, with {first} and {ring} that are not",
            )

    @property
    def _bound(self) -> int:
        return MOST if self.most is None else self.most

    @property
    def _kept(self) -> int:
        """Tokens of a layer that are kept in full precision at most."""
        group = self.k_kind.group_tokens
        return (
            group + min(self.num_sink_tokens, self._bound) + min(self.residual_window, self._bound)
        )

    @property
    def sides(self) -> list[Side]:
        """What is stored."""
        of_k = ("k", self.k_kind, self.head_dim)
        return (
            [of_k] if self.v_kind == LATENT else [of_k, ("v", kind(self.v_kind), self.head_dim_v)]
        )

    @property
    def _full_sides(self) -> list[Side]:
        return [(side, float_kind(of.compute), dim) for side, of, dim in self.sides]

    def specs(self) -> dict[str, Spec]:
        """The tensors of all layers."""
        found: dict[str, Spec] = {}
        for layer, (begin, end, rows) in enumerate(
            zip(self.begins, self.ends, self.rows, strict=True)
        ):
            coded = coded_rows(self.k_kind, begin, end, rows)
            for side, (low, high) in zip(self.sides, coded, strict=False):
                found |= row_specs([side], layer, self.num_kv_heads, high - low)
            if not self._kept:
                continue
            full, first = rows - (end - begin), 0
            if self.k_kind.group_tokens:
                full, first = rows - end, begin
            found |= row_specs(self._full_sides, layer, self.num_kv_heads, full, "full_")
            if first:
                found |= row_specs(self._full_sides, layer, self.num_kv_heads, first, "first_")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        capacity = max(self.rows, default=0) if self.most is None else self.most
        of_layer = capacity * row_bytes(self.sides, self.num_kv_heads)
        of_layer += self._kept * row_bytes(self._full_sides, self.num_kv_heads)
        # An empty layer is some objects, too.
        return self.num_layers * (of_layer + 256) + 4 * capacity

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class for such a cache."""
        names = ("num_kv_heads", "head_dim", "head_dim_v", "k_kind", "v_kind", *self.sizes)
        kept = self.residual_window, self.num_sink_tokens
        return {name: getattr(self, name) for name in names} | {
            "rotate": self.rotation is not None,
            "full_precision": FullPrecision(*kept) if any(kept) else None,
        }


@dataclass(kw_only=True)
class SavedCache(SavedSequence):
    """A `numkv.KVCache`."""

    layout = "contiguous"
    sizes = ("num_layers", "max_seq_len")
    may_be_latent = False

    max_seq_len: int | None = optional()
    length: int = integer()

    @property
    def most(self) -> int | None:
        """Tokens that a layer can have, if that is known."""
        return self.max_seq_len

    def check(self) -> None:
        """See `SavedSequence.check`; and the length is one that all layers have."""
        super().check()
        fits = self.length <= min(self.rows, default=0)
        expect(fits, f"{self.length} tokens, but rows of {self.rows}")


@dataclass(kw_only=True)
class SavedContiguous(SavedSequence):
    """A `numkv.ContiguousLayer`."""

    layout = "contiguous"
    sizes = ("capacity",)

    capacity: int = integer()

    @property
    def most(self) -> int | None:
        """Tokens that it can have."""
        return self.capacity


@dataclass(kw_only=True)
class SavedPaged(SavedSequence):
    """A `numkv.PagedLayer`."""

    layout = "paged"
    sizes = ("max_blocks_per_seq", "block_size")

    block_size: int = integer(1)
    max_blocks_per_seq: int = integer()

    @property
    def most(self) -> int | None:
        """Tokens that it can have."""
        return self.block_size * self.max_blocks_per_seq
