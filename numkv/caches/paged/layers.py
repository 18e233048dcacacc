"""What the layers of a `PagedKVCache` store, where they are not all alike: rows of their own, another's, or none."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

from numkv.caches.paged.residual import Residual
from numkv.caches.paged.states import StateShape, check_states
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kinds import Kind, kind
from numkv.numbers import check_size
from numkv.storage.latents import LATENT, LatentPool, pool_and_kinds
from numkv.storage.pool import Pool

_F = TypeVar("_F", bound=Callable[..., Any])

#: Layers that a cache can have; each takes some objects of Python's.
_MOST_LAYERS = 2**16

#: Windows and chunks from here on reach further than any sequence.
_LONGEST = 2**62

#: Parts of a block begin at multiples of so many bytes, as vector loads and CUDA's copies like it.
_ALIGNMENT = 64


class LayerOptions(TypedDict, total=False):
    """What a `PagedKVCache` takes where its layers are not all alike; see there."""

    chunks: Sequence[int | None] | None
    shares: Mapping[int, int] | Sequence[int | None] | None
    states: Mapping[int, Sequence[tuple[Sequence[int], Any]]] | None
    num_states: int | None
    checkpoint_every: int | None
    max_nbytes: int | None
    key_bounds: bool | None
    residual_window: int | None
    num_sink_tokens: int | None
    residual_kind: str | Kind | None


def shows_options(function: _F) -> _F:
    """Have a function that takes `LayerOptions` show them in its signature, None each.

    It shows no types: with those of so many arguments nobody could read the line; they are in the docstring.
    """
    found = inspect.signature(function).parameters.values()
    named = [p.replace(annotation=p.empty) for p in found if p.kind is not p.VAR_KEYWORD]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in LayerOptions.__annotations__
    ]
    function.__signature__ = inspect.Signature([*named, *more])  # type: ignore[attr-defined]
    return function


class LayerRows(NamedTuple):
    """The rows of one layer; of latents V is the first part of K, and has its kind."""

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
        """How V is stored, as `v_kind` of a cache says it: the name of a kind, or ``"latent"``."""
        return LATENT if self.is_latent else self.v_kind.name

    def parts(self, block_size: int) -> list[tuple[tuple[int, ...], Any]]:
        """Shape within a block and dtype of words of K, their scales, words of V, and theirs; of latents K's alone.

        Scales of heads are not in blocks: they have no bytes here.
        """
        shape = self.num_kv_heads, block_size
        found: list[tuple[tuple[int, ...], Any]] = []
        sides = (self.k_kind, self.head_dim), (self.v_kind, self.head_dim_v)
        for of, dim in sides[: 1 if self.is_latent else 2]:
            found.append(((*shape, of.words_per_row(dim)), of.word))
            scales = of.scale_shape((1, *shape), dim)[1:] if of.has_scales else (0,)
            found.append((scales, of.scale_word))
        return found

    def offsets(self, block_size: int) -> tuple[list[int], int]:
        """Where each of `parts` begins in a block, and where the last one ends."""
        ends = [0]
        for shape, dtype in self.parts(block_size):
            nbytes = dtype.itemsize
            for n in shape:
                nbytes *= n
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


class Layers(NamedTuple):
    """What each layer stores.

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
        """The layer that has the full-precision tokens of a layer, or of the one whose rows it reads."""
        if self.residual is None:
            return None
        found = self.residual.layers + self.sources[layer]
        return None if self.rows[found] is None else found

    def keeps(self, layer: int) -> int:
        """First tokens whose rows stay in a layer, whatever its window: in twins of layers that have none."""
        of = self.residual
        twin = of is not None and layer >= of.layers
        return of.sinks if of is not None and twin and self.windows[layer - of.layers] < 0 else 0

    def _with_twins(self, residual: Residual | None) -> Layers:
        """These layers and those that have their tokens in full precision."""
        if residual is None:
            return self
        name = "residual_window" if residual.window else "num_sink_tokens"
        if any(self.chunks):
            raise NotSupported(
                f"`{name}`: expected no layers whose queries attend within chunks, got some; leave it out"
            )
        twins: list[LayerRows | None] = []
        for rows, window in zip(self.rows, self.windows, strict=True):
            quantised = rows is not None and (rows.k_kind.has_scales or rows.v_kind.has_scales)
            if rows is not None and quantised and rows.is_latent:
                raise NotSupported(f"`{name}`: expected 0 for latents, got some; leave it out")
            if rows is None or not quantised or (window >= 0 and not residual.window):
                twins.append(None)
            else:
                twins.append(rows._replace(k_kind=residual.kind, v_kind=residual.kind))
        if not any(twins):
            raise NotSupported(
                f"`{name}`: expected 0 for storage in {self.first.k_kind}, which quantises nothing, or for layers with "
                f"windows alone, which keep newest tokens only, got {residual}; leave it out, or choose int8 or int4"
            )
        n = len(self.rows)
        return Layers(
            (*self.rows, *twins), (*self.windows, *map(residual.twin_window, self.windows)),
            self.chunks * 2, (*self.sources, *range(n, 2 * n)), (*self.states, *((),) * n), residual,
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
        """Whether sizes, kinds and windows say all there is to say."""
        every = len(self.storing) == len(self.rows)
        return self.alike and every and not any(self.chunks) and not any(self.states)

    @property
    def first(self) -> LayerRows:
        """The rows of the first layer that has some."""
        return next(rows for rows in self.rows if rows is not None)

    def arguments(self) -> dict[str, Any]:
        """What a `PagedKVCache` is given for such layers, by name."""
        rows = [self.rows[source] for source in self.sources[: self.own]]
        names = ("head_dim", "head_dim_v", "k_kind", "v_kind")
        found: dict[str, Any] = {
            name: [getattr(self.first if x is None else x, name) for x in rows] for name in names
        }
        if self.first.is_latent:
            found["v_kind"] = LATENT
        shares = {layer: source for layer, source in enumerate(self.sources) if layer != source}
        own = {
            "num_kv_heads": [None if x is None else x.num_kv_heads for x in rows],
            "chunks": list(self.chunks[: self.own]), "shares": shares, "windows": list(self.windows[: self.own]),
            "states": self.with_states or None,
        }  # fmt: skip
        in_full = {} if self.residual is None else self.residual.arguments()
        return {"num_layers": len(rows), **found, **own, **in_full}

    def more(self) -> tuple[Any, ...]:
        """What a geometry has of layers that are not plain, in numbers and names."""
        own = self.own
        rows = tuple(None if x is None else x.plain() for x in self.rows[:own])
        states = tuple(tuple(map(tuple, of_layer)) for of_layer in self.states[:own])
        found = (rows, self.chunks[:own], self.sources[:own], states)
        return found if self.residual is None else (*found, self.residual.plain())

    @classmethod
    def check(
        cls, num_layers: Any, sizes: tuple[Any, Any, Any], kinds: tuple[Any, Any, Any], windows: Any, more: Any
    ) -> Layers:  # fmt: skip
        """Check the arguments of a `PagedKVCache`.

        Parameters
        ----------
        num_layers : int
            The argument.
        sizes : tuple
            `num_kv_heads`, `head_dim`, `head_dim_v`: a number each, or one for each layer.
        kinds : tuple
            `kind`, `k_kind`, `v_kind`: likewise.
        windows : sequence of int or None
            The argument.
        more : LayerOptions
            The others.
        """
        layers = check_size("num_layers", num_layers, 1, _MOST_LAYERS)
        windows_of = [_reach("windows", w, -1) for w in _each("windows", windows, layers, -1)]
        chunks = [
            0 if c is None else _reach("chunks", c, 0)
            for c in _each("chunks", more.get("chunks"), layers, 0)
        ]
        for layer, (window, chunk) in enumerate(zip(windows_of, chunks, strict=True)):
            if window >= 0 and chunk:
                raise ValueError(
                    f"`chunks`: expected a window or a chunk in layer {layer}, got a window of {window} and a chunk "
                    f"of {chunk}; give the one that the model has"
                )
        sources = _sources(more.get("shares"), layers)
        names = ("num_kv_heads", "head_dim", "head_dim_v", "kind", "k_kind", "v_kind")
        given = [
            _each(name, x, layers) if _is_list(x) else [x] * layers
            for name, x in zip(names, (*sizes, *kinds), strict=True)
        ]
        rows: list[LayerRows | None] = []
        made: dict[Any, LayerRows] = {}
        for layer, entries in enumerate(zip(*given, strict=True)):
            source = sources[layer]
            if source != layer:
                if windows_of[layer] != windows_of[source] or chunks[layer] != chunks[source]:
                    raise ValueError(
                        f"`shares`: expected layer {layer} to have the window and chunk of layer {source}, whose rows "
                        f"it reads, {windows_of[source]} and {chunks[source]}, got {windows_of[layer]} and "
                        f"{chunks[layer]}"
                    )
                rows.append(None)
                continue
            if entries[0] is None and _is_list(sizes[0]):
                rows.append(None)
                continue
            key = tuple(map(_key, entries))
            if key not in made:
                heads, dim, dim_v, both, k_kind, v_kind = entries
                dim = check_size("head_dim", dim, 1)
                make, of_k, of_v = pool_and_kinds(both, k_kind, v_kind)
                made[key] = LayerRows(
                    check_size("num_kv_heads", heads, 1), dim,
                    dim if dim_v is None else check_size("head_dim_v", dim_v, 1), of_k, of_v,
                    make is LatentPool,
                )  # fmt: skip
            rows.append(made[key])
        if not any(rows):
            raise ValueError(
                "`num_kv_heads`: expected a layer with rows or more, got None for all of them; a model that keeps "
                "states alone needs no blocks"
            )
        for layer, source in enumerate(sources):
            if rows[source] is None and source != layer:
                raise ValueError(
                    f"`shares`: expected rows in layer {source}, got a layer without any"
                )
        states = check_states(more.get("states"), layers)
        of_each = tuple(states.get(layer, ()) for layer in range(layers))
        found = cls(tuple(rows), tuple(windows_of), tuple(chunks), tuple(sources), of_each)
        found._refuse_mixed_latents()
        asked = (more.get(x) for x in ("residual_window", "num_sink_tokens", "residual_kind"))
        return found._with_twins(Residual.check(layers, *asked))

    def _refuse_mixed_latents(self) -> None:
        """Refuse latents beside other rows: pages have room for a V of its own."""
        if not self.alike and any(rows is not None and rows.is_latent for rows in self.rows):
            raise NotSupported(
                "`v_kind`: expected rows of one shape and kind in all layers that have some, where V is a part of K, "
                "got latents beside other rows; keep a PagedKVCache for each"
            )

    @classmethod
    def read(cls, first: Any, windows: tuple[int, ...], more: Any) -> Layers:
        """What geometries say; `more` is None for plain layers of rows `first`."""
        n = len(windows)
        if more is None:
            of_all = LayerRows.read(first)
            return cls((of_all,) * n, windows, (0,) * n, tuple(range(n)), ((),) * n)
        rows, chunks, sources, states, *in_full = more
        named = (("rows", rows), ("chunks", chunks), ("sources", sources), ("states", states))
        for name, x in named:
            if not isinstance(x, tuple) or len(x) != n:
                raise ValueError(f"`geometry`: expected {name} of {n} layers, got {x!r}")
        found = cls(
            tuple(None if x is None else LayerRows.read(x) for x in rows), windows,
            tuple(_reach("chunks", x, 0) for x in chunks),
            tuple(check_size("shares", x, 0, n - 1) for x in sources),
            tuple(check_states({0: x}, 1)[0] if x else () for x in states),
        )  # fmt: skip
        if not found.storing:
            raise ValueError("`geometry`: expected a layer with rows, got none")
        for layer, source in enumerate(found.sources):
            if source != layer and (found.rows[layer] is not None or found.rows[source] is None):
                raise ValueError(f"`geometry`: expected rows to read for layer {layer}, got none")
        found._refuse_mixed_latents()
        return found._with_twins(Residual.read(in_full[0], n) if in_full else None)


def _key(x: Any) -> Any:
    """What stands for an entry in a dictionary: lists that repeat a number are checked once."""
    return x if isinstance(x, (int, str, Kind, type(None))) else id(x)


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) or (hasattr(x, "ndim") and x.ndim == 1)


def _each(name: str, given: Any, layers: int, default: Any = None) -> list[Any]:
    """An entry for each layer."""
    if given is None:
        return [default] * layers
    try:
        found = list(itertools.islice(iter(given), layers + 1))
    except TypeError:
        raise TypeError(
            f"`{name}`: expected a number for each layer or None, got {type(given).__name__}"
        ) from None
    if len(found) != layers:
        got = f"{len(found)} at least" if len(found) > layers else len(found)
        raise DimensionMismatch(
            f"`{name}`: expected {layers} numbers, one for each layer, got {got}",
            expected=layers,
            actual=len(found),
        )
    return found


def _reach(name: str, x: Any, least: int) -> int:
    """A window or a chunk."""
    reach = check_size(name, x, least)
    if reach > _LONGEST:
        raise DimensionMismatch(
            f"`{name}`: expected at most 2**62 tokens, got {reach}; {least} stands for all",
            expected=_LONGEST,
            actual=reach,
        )
    return reach


def _sources(shares: Any, layers: int) -> list[int]:
    """The layer whose rows each layer reads."""
    found = list(range(layers))
    if shares is None:
        return found
    given = (
        shares.items()
        if isinstance(shares, Mapping)
        else enumerate(_each("shares", shares, layers))
    )
    for layer, source in given:
        if source is None:
            continue
        numbers = []
        for x in (layer, source):
            try:
                numbers.append(operator.index(x))
            except TypeError:
                raise TypeError(
                    f"`shares`: expected numbers of layers, got {type(x).__name__}"
                ) from None
            if not 0 <= numbers[-1] < layers:
                raise IndexError(f"`shares`: expected layers in [0, {layers}), got {numbers[-1]}")
        found[numbers[0]] = numbers[1]
    for layer, source in enumerate(found):
        if found[source] != source:
            raise ValueError(
                f"`shares`: expected layer {layer} to read one with rows of its own, got layer {source}, which reads "
                f"layer {found[source]}"
            )
    return found
