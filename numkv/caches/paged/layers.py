"""The rows of a `PagedKVCache`'s layers if these differ: rows of their own, another layer's, or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from numkv.caches.layer_spec import (
    FullPrecision,
    LayerSpec,
    StateShape,
    check_states,
    refuse_longer_than_group,
)
from numkv.errors import NotSupported
from numkv.kinds import Kind, kind
from numkv.numbers import check_size
from numkv.storage.latents import LATENT, LatentPool
from numkv.storage.pool import Pool

#: The shape of scales that blocks do not have.
NO_SCALES = (0,)
#: Parts of a block begin at multiples of so many bytes, as vector loads and CUDA's copies like it.
_ALIGNMENT = 64


class LayerRows(NamedTuple):
    """The rows of one layer; with latents, V is the first part of K, and has its kind."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    k_kind: Kind
    v_kind: Kind
    is_latent: bool = False

    @property
    def pool_class(self) -> type[Pool]:
        """What makes buffers for such rows."""
        return LatentPool if self.is_latent else Pool

    @property
    def v_storage(self) -> str:
        """How V is stored, as in `v_kind` of a cache: the name of a kind, or ``"latent"``."""
        return LATENT if self.is_latent else self.v_kind.name

    def parts(self, block_size: int) -> list[tuple[tuple[int, ...], Any]]:
        """Shape within a block and dtype of words of K, their scales, words of V, and theirs; of latents K's alone.

        Scales of heads are not in blocks: they are `NO_SCALES`, as those of kinds that have none.
        """
        shape = self.num_kv_heads, block_size
        found: list[tuple[tuple[int, ...], Any]] = []
        sides = (self.k_kind, self.head_dim), (self.v_kind, self.head_dim_v)
        for of, dim in sides[: 1 if self.is_latent else 2]:
            found.append(((*shape, of.words_per_row(dim)), of.word))
            scales = of.scale_shape((1, *shape), dim)[1:] if of.has_scales else NO_SCALES
            found.append((scales, of.scale_word))
        return found

    def offsets(self, block_size: int) -> tuple[list[int], int]:
        """Return where each of `parts` begins in a block, and where the last one ends."""
        ends = [0]
        for shape, dtype in self.parts(block_size):
            nbytes = math.prod(shape) * dtype.itemsize
            ends.append(ends[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        return ends[:-1], ends[-1]

    def plain(self) -> tuple[Any, ...]:
        """The same in numbers and names, for geometries and headers of files."""
        return (*self[:3], self.k_kind.name, self.v_storage)

    @classmethod
    def read(cls, given: Any) -> LayerRows:
        """What `plain` gave, checked."""
        heads, dim, dim_v, k_kind, v_kind = given
        sizes = (
            check_size("num_kv_heads", heads, 1), check_size("head_dim", dim, 1),
            check_size("head_dim_v", dim_v, 1),
        )  # fmt: skip
        is_latent = v_kind == LATENT
        found = cls(*sizes, kind(k_kind), kind(k_kind if is_latent else v_kind), is_latent)
        if is_latent and found.head_dim_v > found.head_dim:
            raise ValueError(f"expected at most {found.head_dim} elements of a latent, got {dim_v}")
        found.k_kind.words_per_row(found.head_dim)
        found.v_kind.words_per_row(found.head_dim_v)
        return found


class Residual(NamedTuple):
    """Which tokens of a `PagedKVCache` are kept in full precision.

    Attributes
    ----------
    kept : FullPrecision or None
        Number of newest tokens (a query's own included), number of first tokens, and their storage kind. With None and
        keys by channel, the newest token groups are stored in fp32.
    layers : int
        Layers of the model. The twin of layer i is layer ``layers + i``.
    """

    kept: FullPrecision | None
    layers: int

    @property
    def window(self) -> int:
        """Return the number of newest tokens, a query's own included."""
        return 0 if self.kept is None else self.kept.window

    @property
    def sinks(self) -> int:
        """Return the number of first tokens."""
        return 0 if self.kept is None else self.kept.num_sink_tokens

    @property
    def kind(self) -> Kind:
        """Return the storage kind of full-precision tokens."""
        return kind("fp32" if self.kept is None or self.kept.kind is None else self.kept.kind)

    def plain(self) -> tuple[int, int, str]:
        """Return window, first tokens and kind as plain values, for geometries and file headers."""
        return self.window, self.sinks, self.kind.name

    def refuse(self, name: str, remedy: str) -> None:
        """Raise for an operation that supports one kind of vectors per layer."""
        what = "keys by channel, whose newest ones are" if self.kept is None else self.kept
        raise NotSupported(
            f"{name}: expected a cache without tokens in full precision, got one with {what}; {remedy}"
        )


class Layers(NamedTuple):
    """The rows of each layer.

    Attributes
    ----------
    rows : tuple of LayerRows or None
        None for layers that read another's, or none at all.
    windows : tuple of int
        Earlier tokens that a query of a layer attends to, -1 for all.
    chunks : tuple of int
        Tokens of a chunk, within which a query attends; 0 for none.
    sources : tuple of int
        The layer whose rows each one reads: itself, or another.
    states : tuple of tuple of StateShape
        The states that each keeps.
    residual : Residual or None
        Which tokens are there in full precision too: in twins of layers, which come after the model's.
    """

    rows: tuple[LayerRows | None, ...]
    windows: tuple[int, ...]
    chunks: tuple[int, ...]
    sources: tuple[int, ...]
    states: tuple[tuple[StateShape, ...], ...] = ()
    residual: Residual | None = None

    @property
    def own(self) -> int:
        """Layers of the model: others are twins."""
        return len(self.rows) if self.residual is None else self.residual.layers

    def twin(self, layer: int) -> int | None:
        """Return the layer that has the full-precision tokens of a layer, or of the one whose rows it reads."""
        if self.residual is None:
            return None
        found = self.residual.layers + self.sources[layer]
        return None if self.rows[found] is None else found

    @property
    def groups(self) -> list[int]:
        """Tokens of a token group in layers whose keys are stored by channel; 0 in others."""
        return [0 if rows is None else rows.k_kind.group_tokens for rows in self.rows]

    def keeps(self, layer: int) -> int:
        """First tokens whose rows stay in a layer, whatever its window: in twins of layers that have none."""
        of = self.residual
        twin = of is not None and layer >= of.layers
        return of.sinks if of is not None and twin and self.windows[layer - of.layers] < 0 else 0

    def _with_twins(self, kept: FullPrecision | None) -> Layers:
        """These layers and those that have their tokens in full precision, if there are any."""
        groups, n = self.groups, len(self.rows)
        if not self.alike and any(rows is not None and rows.is_latent for rows in self.rows):
            raise NotSupported(  # pages have room for a separate V
                "`v_kind`: expected rows of one shape and kind in all layers that have some, where V is a part of K, "
                "got latents and other rows; make a PagedKVCache for each"
            )
        if kept is None and not any(groups):
            return self
        residual = Residual(kept, n)
        if any(self.chunks):
            what = "`kind`" if kept is None else "`full_precision`"
            raise NotSupported(
                f"{what}: expected no layers whose queries attend within chunks, got some, for which no tokens can be "
                "in full precision; leave it out, or choose a kind whose rows are stored one by one"
            )
        twins: list[LayerRows | None] = []
        # How many tokens before a query's own the twins keep.
        own = max(0, residual.window - 1)
        windows = [own if window < 0 else min(own, window) for window in self.windows]
        for layer, (rows, window) in enumerate(zip(self.rows, self.windows, strict=True)):
            if rows is None or not (rows.k_kind.has_scales or rows.v_kind.has_scales):
                twins.append(None)
                continue
            twin = rows._replace(k_kind=residual.kind, v_kind=residual.kind)
            if groups[layer]:
                _check_groups(groups[layer], window, residual.window, rows.k_kind)
                windows[layer] = -1
            elif rows.is_latent:
                raise NotSupported(
                    "`full_precision`: expected None for latents, got some tokens; leave it out"
                )
            alone = kept is None or (window >= 0 and not residual.window)
            twins.append(None if alone and not groups[layer] else twin)
        if not any(twins):
            raise NotSupported(
                f"`full_precision`: expected None for storage in {self.first.k_kind}, which quantises nothing, or a "
                f"window for layers with windows alone, which keep newest tokens only, got {residual.kept}; leave it "
                "out, or choose int8 or int4"
            )
        return Layers(
            (*self.rows, *twins), (*self.windows, *windows), (*self.chunks, *groups),
            (*self.sources, *range(n, 2 * n)), (*self.states, *((),) * n), residual,
        )  # fmt: skip

    @property
    def with_states(self) -> dict[int, tuple[StateShape, ...]]:
        """Layers that keep states, and which."""
        return {layer: of_layer for layer, of_layer in enumerate(self.states) if of_layer}

    @property
    def storing(self) -> list[int]:
        """Layers that have rows of their own."""
        return [layer for layer, rows in enumerate(self.rows) if rows is not None]

    @property
    def alike(self) -> bool:
        """Whether the rows of all layers that have some are of one shape and kind."""
        return len({rows for rows in self.rows if rows is not None}) == 1

    @property
    def plain(self) -> bool:
        """Whether sizes, kinds and windows describe the layers completely."""
        every = len(self.storing) == len(self.rows)
        return self.alike and every and not any(self.chunks) and not any(self.states)

    @property
    def first(self) -> LayerRows:
        """The rows of the first layer that has some."""
        return next(rows for rows in self.rows if rows is not None)

    def specs(self, rotate: bool, key_bounds: bool) -> tuple[LayerSpec, ...]:
        """Return the layers of the model as a `PagedKVCache` is given them, which rotates and keeps bounds or not."""
        made: dict[Any, LayerSpec] = {}
        found, full = [], None if self.residual is None else self.residual.kept
        for layer, source in enumerate(self.sources[: self.own]):
            rows, shares = self.rows[source], None if source == layer else source
            of = rows, self.windows[layer], self.chunks[layer], shares, self.states[layer]
            if of not in made and rows is None:
                made[of] = LayerSpec(states=of[4])
            elif of not in made and rows is not None:
                made[of] = LayerSpec(
                    rows.num_kv_heads, rows.head_dim, head_dim_v=rows.head_dim_v, kind=rows.k_kind,
                    v_kind=rows.v_storage, rotate=rotate, full_precision=full, window_left=of[1],
                    chunk_size=of[2] or None, shares=shares, states=of[4], key_bounds=key_bounds,
                )  # fmt: skip
            found.append(made[of])
        return tuple(found)

    def more(self) -> tuple[Any, ...]:
        """A geometry's entry for layers that are not plain, in numbers and names."""
        own = self.own
        rows = tuple(None if x is None else x.plain() for x in self.rows[:own])
        states = tuple(tuple(map(tuple, of_layer)) for of_layer in self.states[:own])
        found = (rows, self.chunks[:own], self.sources[:own], states)
        alone = self.residual is None or self.residual.kept is None
        return found if alone or self.residual is None else (*found, self.residual.plain())

    @classmethod
    def of(cls, specs: Sequence[LayerSpec]) -> Layers:
        """Combine a `PagedKVCache`'s arguments for each layer."""
        sources = [layer if of.shares is None else of.shares for layer, of in enumerate(specs)]
        for layer, source in enumerate(sources):
            _check_source(specs, layer, source)
        found = cls(
            tuple(_rows(of) if of.shares is None else None for of in specs),
            tuple(specs[source].window_left for source in sources),
            tuple(specs[source].chunk_size or 0 for source in sources),
            tuple(sources), tuple(check_states(of.states) for of in specs),
        )  # fmt: skip
        if not found.storing:
            raise ValueError(
                "`layers`: expected a layer with rows or more, got none; a model that keeps states alone needs no "
                "blocks"
            )
        full: FullPrecision | None = same_in_all("full_precision", specs)
        return found._with_twins(full and replace(full, kind=kind(full.kind or "fp32")))

    @classmethod
    def read(cls, first: Any, windows: tuple[int, ...], more: Any) -> Layers:
        """Read a geometry; `more` is None for plain layers of rows `first`."""
        n = len(windows)
        if more is None:
            of_all = LayerRows.read(first)
            found = cls((of_all,) * n, windows, (0,) * n, tuple(range(n)), ((),) * n)
            return found._with_twins(None)
        rows, chunks, sources, states, *in_full = more
        named = (("rows", rows), ("chunks", chunks), ("sources", sources), ("states", states))
        for name, x in named:
            if not isinstance(x, tuple) or len(x) != n:
                raise ValueError(f"`geometry`: expected {name} of {n} layers, got {x!r}")
        found = cls(
            tuple(None if x is None else LayerRows.read(x) for x in rows), windows,
            tuple(check_size("chunks", x) for x in chunks),
            tuple(check_size("shares", x, 0, n - 1) for x in sources),
            tuple(map(check_states, states)),
        )  # fmt: skip
        if not found.storing:
            raise ValueError("`geometry`: expected a layer with rows, got none")
        for layer, source in enumerate(found.sources):
            if source != layer and (found.rows[layer] is not None or found.rows[source] is None):
                raise ValueError(f"`geometry`: expected rows to read for layer {layer}, got none")
        return found._with_twins(FullPrecision(*in_full[0]) if in_full else None)


def _check_groups(group: int, window_left: int, kept: int, of: Kind) -> None:
    """Refuse layers of keys by channel that would have no codes, and more tokens in full than a token group."""
    if 0 <= window_left < group:
        raise NotSupported(
            f"`kind`: expected layers that see more than {group} tokens for keys in {of}, got a window of "
            f"{window_left + 1}: all of them would be in full precision; store such layers in bf16"
        )
    refuse_longer_than_group(kept, of)


def _rows(of: LayerSpec) -> LayerRows | None:
    """Return the rows of a layer that reads no other's."""
    heads, dim, dim_v, v_kind = of.num_kv_heads, of.head_dim, of.head_dim_v, of.v_kind
    if heads is None or dim is None or dim_v is None or v_kind is None:
        return None
    is_latent, of_k = v_kind == LATENT, kind(of.kind)
    return LayerRows(heads, dim, dim_v, of_k, of_k if is_latent else kind(v_kind), is_latent)


def _check_source(specs: Sequence[LayerSpec], layer: int, source: int) -> None:
    """Check that a layer reads existing rows, and describes them as their own layer does."""
    if source == layer and specs[layer].shares is None:
        return
    if source >= len(specs):
        raise IndexError(f"`shares`: expected layers in [0, {len(specs)}), got {source}")
    of = specs[source]
    if of.shares is not None:
        raise ValueError(
            f"`shares`: expected layer {layer} to read one with rows of its own, got layer {source}, which reads layer "
            f"{of.shares}"
        )
    if of.num_kv_heads is None:
        raise ValueError(f"`shares`: expected rows in layer {source}, got a layer without any")
    said = replace(specs[layer], shares=None, states=())
    if said not in (LayerSpec(), replace(of, states=())):
        raise ValueError(
            f"`shares`: expected layer {layer} to be LayerSpec(shares={source}), as it reads that layer's rows and "
            f"sees as much of them, got {specs[layer]}"
        )


def same_in_all(name: str, specs: Sequence[LayerSpec]) -> Any:
    """Return the value that all layers with rows of their own share, for an option of the whole cache."""
    found = {getattr(of, name) for of in specs if of.num_kv_heads is not None and of.shares is None}
    if len(found) > 1:
        raise NotSupported(
            f"`{name}`: expected the same in all layers that have rows, got {' and '.join(sorted(map(str, found)))}; "
            "keep a PagedKVCache for each"
        )
    return found.pop() if found else None
