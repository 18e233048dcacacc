"""The user's description of a layer: `LayerSpec`, and groups of options in it and next to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from numkv.errors import DimensionMismatch, NotSupported, UnsupportedDType
from numkv.kinds import Kind, kind
from numkv.numbers import check_flag, check_size
from numkv.planning import LayerNeeds, ModelNeeds
from numkv.planning.layer_types import CHUNKED
from numkv.storage.buffer import refuse_rotated_channels
from numkv.storage.latents import LATENT, LatentPool, pool_and_kinds
from numkv.storage.pool import Pool

#: Kinds that rows in full precision may have: those of models.
_FULL_KINDS = ("fp32", "bf16", "fp16")

#: Windows and chunks from here on reach further than any sequence.
_LONGEST = 2**62

#: Dtypes of a state, which numkv treats as bytes.
_STATE_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8",
)  # fmt: skip


#: Defaults of attributes.
_AS = {"head_dim_v": "head_dim", "v_kind": "kind"}


class StateShape(NamedTuple):
    """One array of a layer's state."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of a sequence's."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def _shown(self: Any) -> str:
    """A ``repr`` of what differs from the defaults."""
    usual = {f.name: f.default for f in fields(self)}
    usual |= {name: getattr(self, of) for name, of in _AS.items() if name in usual}
    given = {name: getattr(self, name) for name in usual}
    said = [f"{name}={x}" for name, x in given.items() if x != usual[name]]
    return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class FullPrecision:
    """Which tokens a quantised cache stores in full precision; see docs/accuracy.md.

    Attributes
    ----------
    window : int
        Newest tokens; at most 64 where keys are stored by channel, which keep those of the newest token group anyway.
    num_sink_tokens : int
        First tokens.
    kind : str or Kind, optional
        Their kind in a `PagedKVCache`: ``"fp32"``, ``"bf16"`` or ``"fp16"``. Other caches store them in fp32, and those
        of transformers in the model's dtype.

    Raises
    ------
    DimensionMismatch, TypeError
        If a number is negative, or none.
    UnsupportedDType
        If there is no such kind, or rows of models are not in it.
    ValueError
        If there are no such tokens.
    """

    window: int = 0
    num_sink_tokens: int = 0
    kind: str | Kind | None = None

    def __post_init__(self) -> None:
        found = None if self.kind is None else kind(self.kind)
        if found is not None and found.name not in _FULL_KINDS:
            raise UnsupportedDType(
                f"`kind`: expected the model's own, one of {', '.join(_FULL_KINDS)}, got {found}"
            )
        fill_in(
            self, window=check_size("window", self.window),
            num_sink_tokens=check_size("num_sink_tokens", self.num_sink_tokens), kind=found,
        )  # fmt: skip
        if not self.window and not self.num_sink_tokens:
            raise ValueError(
                "`window`: expected tokens, there or in `num_sink_tokens`, got 0 and 0; leave `full_precision` out"
            )

    __repr__ = _shown


def _check_in_full(given: Any) -> None:
    if given is not None and not isinstance(given, FullPrecision):
        raise TypeError(
            f"`full_precision`: expected a numkv.FullPrecision or None, got {type(given).__name__}"
        )


def in_full(given: Any, storage: str, quantises: bool) -> FullPrecision | None:
    """Check the argument of a cache that supports one precision only for its full-precision tokens."""
    _check_in_full(given)
    if given is not None and not quantises:
        raise NotSupported(
            f"`full_precision`: expected None for storage in {storage}, which quantises nothing, got {given}; leave it "
            "out, or choose int8 or int4"
        )
    if given is not None and given.kind is not None:
        raise NotSupported(
            f"`full_precision`: expected no `kind`, which only a PagedKVCache can choose, got {given}"
        )
    found: FullPrecision | None = given
    return found


def refuse_longer_than_group(window: int, of: Kind) -> None:
    """Refuse more newest tokens in full than the token group that keys by channel keep."""
    if window > of.group_tokens:
        raise NotSupported(
            f"`full_precision`: expected a window of at most {of.group_tokens} tokens, those that {of} keeps in full "
            f"anyway, got {window}; choose a kind whose rows are stored one by one for more"
        )


@dataclass(frozen=True)
class StateSlots:
    """Room for the states of sequences in a `PagedKVCache`; see `LayerSpec.states`.

    Attributes
    ----------
    num_slots : int
        Two for each sequence that steps take at once, and one for each checkpoint to keep.
    checkpoint_every : int, optional
        Tokens from one checkpoint to the next, a multiple of the block size, which it is if None.
    """

    num_slots: int
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        every = self.checkpoint_every
        fill_in(
            self, num_slots=check_size("num_slots", self.num_slots),
            checkpoint_every=None if every is None else check_size("checkpoint_every", every, 1),
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class LayerSpec:
    """A description of one layer: the rows it stores, their kind, and the tokens it sees; states; or nothing.

    Attributes
    ----------
    num_kv_heads : int, optional
        Heads of K and V; None in a layer that has no rows.
    head_dim : int, optional
        Elements of a K row.
    head_dim_v : int, optional
        Elements of a V row; `head_dim` if None.
    kind : str or Kind
        Storage kind of K, and of V unless `v_kind` is given.
    v_kind : str or Kind, optional
        Storage kind of V. With ``"latent"`` V is the first `head_dim_v` elements of each row of K; see docs/latent.md.
    rotate : bool
        Whether rows are rotated before they are stored; see `numkv.ContiguousLayer`.
    full_precision : FullPrecision, optional
        Tokens that are stored in full precision, in addition to a quantised kind.
    window_left : int
        Earlier tokens that a query sees; -1 for all.
    chunk_size : int, optional
        Tokens of a chunk, within which queries see each other's.
    shares : int, optional
        The layer whose rows this one reads, having none of its own: it sees as much of them.
    states : sequence of (shape, dtype)
        Arrays that the layer keeps for each sequence, in addition to rows or instead of them; see `Step.state`.
    key_bounds : bool
        Whether bounds of keys are stored next to blocks, for `Step.sparse_attention`.

    Raises
    ------
    DimensionMismatch, UnsupportedDType, ValueError, TypeError
        If an attribute is no such thing.

    Notes
    -----
    What it was given is checked, and filled in: kinds are `Kind`, `head_dim_v` and `v_kind` are there where there are
    rows, states are tuples.

    Examples
    --------
    >>> import numkv
    >>> full = numkv.LayerSpec(8, 128, kind="bf16")
    >>> sliding = numkv.LayerSpec(8, 128, kind="bf16", window_left=1023)
    >>> cache = numkv.PagedKVCache(layers=[sliding, sliding, full], num_blocks=8)
    >>> cache.layers[2] == full
    True
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    _: KW_ONLY
    head_dim_v: int | None = None
    kind: str | Kind = "fp16"
    v_kind: str | Kind | None = None
    rotate: bool = False
    full_precision: FullPrecision | None = None
    window_left: int = -1
    chunk_size: int | None = None
    shares: int | None = None
    states: Sequence[tuple[Sequence[int], Any]] = ()
    key_bounds: bool = False

    def __post_init__(self) -> None:
        heads, dim = self.num_kv_heads, self.head_dim
        sizes = {"num_kv_heads": heads, "head_dim": dim, "head_dim_v": self.head_dim_v}
        if said := [name for name, x in sizes.items() if x is not None]:
            if heads is None or dim is None:
                raise TypeError(
                    f"`{said[-1]}`: expected both `num_kv_heads` and `head_dim` with it, or no sizes where there are "
                    f"no rows, got {', '.join(said)} alone"
                )
        make, of_k, of_v = pool_and_kinds(self.kind, None, self.v_kind, by_channel=True)
        fill_in(self, kind=of_k)
        refuse_rotated_channels(of_k, check_flag("rotate", self.rotate))
        dim_v = None if self.head_dim_v is None else check_size("head_dim_v", self.head_dim_v, 1)
        if heads is not None:
            dim = check_size("head_dim", dim, 1)
            dim_v = dim if dim_v is None else dim_v
            fill_in(
                self, num_kv_heads=check_size("num_kv_heads", heads, 1), head_dim=dim, head_dim_v=dim_v,
                v_kind=LATENT if make is LatentPool else of_v,
            )  # fmt: skip
        _check_in_full(self.full_precision)
        chunk = self.chunk_size
        fill_in(
            self, window_left=_reach("window_left", self.window_left, -1),
            chunk_size=None if chunk is None else _reach("chunk_size", chunk, 1),
            rotate=check_flag("rotate", self.rotate), key_bounds=check_flag("key_bounds", self.key_bounds),
            shares=None if self.shares is None else check_size("shares", self.shares),
            states=check_states(self.states),
        )  # fmt: skip
        if self.window_left >= 0 and chunk is not None:
            raise ValueError(
                f"`chunk_size`: expected a window or a chunk, got a window of {self.window_left} and a chunk of "
                f"{chunk}; give the one that the model has"
            )

    __repr__ = _shown

    @classmethod
    def for_model(cls, needs: ModelNeeds, **storage: Any) -> list[LayerSpec]:
        """Describe the layers of a model from its config.

        Parameters
        ----------
        needs : numkv.planning.ModelNeeds
            What `numkv.planning.needs_of` made of a config.
        **storage
            How rows are stored, in all layers: `kind`, `v_kind`, `rotate`, `full_precision`, `key_bounds`. The `v_kind`
            of latents is ``"latent"``.

        Returns
        -------
        list of LayerSpec
            For ``PagedKVCache(layers=…)``. Where one has states, the cache needs `StateSlots`, too.

        Raises
        ------
        NotSupported
            If a `LayerSpec` cannot describe a layer: index keys, rows of another text, rows that several tokens share.
        """
        if not isinstance(needs, ModelNeeds):
            raise TypeError(
                f"`needs`: expected what numkv.planning.needs_of returns, got {type(needs).__name__}"
            )
        return [_of_layer(needs, layer, storage) for layer in needs.layers]


def _of_layer(needs: ModelNeeds, layer: LayerNeeds, storage: dict[str, Any]) -> LayerSpec:
    """The spec of one layer of a plan."""
    if layer.shares is not None:
        return LayerSpec(shares=layer.shares)
    states = [((state.numbers,), state.dtype or needs.dtype) for state in layer.states]
    if not layer.rows:
        return LayerSpec(states=states)
    rows, *more = layer.rows
    if more or rows.of_source or rows.tokens_per_row > 1 or not (rows.dim_v or rows.latent_dim):
        raise NotSupported(
            f"LayerSpec.for_model: expected a row of K and one of V for each token, got {layer.type} layers that keep "
            f"{' and '.join(x.what for x in layer.rows)}; describe these by hand"
        )
    sees: dict[str, Any] = {}
    if rows.limit is not None:
        chunked = layer.type == CHUNKED
        sees = {"chunk_size": rows.limit} if chunked else {"window_left": rows.limit - 1}
    if rows.latent_dim:
        storage = {**storage, "v_kind": LATENT}
    dim_v = rows.latent_dim or rows.dim_v
    return LayerSpec(rows.heads, rows.dim, head_dim_v=dim_v, states=states, **storage, **sees)


def check_states(states: Any) -> tuple[StateShape, ...]:
    """Check which states a layer keeps: pairs of a shape and a dtype."""
    try:
        given = [(tuple(shape), dtype) for shape, dtype in states]
    except (TypeError, ValueError):
        raise TypeError(f"`states`: expected a list of (shape, dtype), got {states!r}") from None
    return tuple(
        StateShape(tuple(check_size("states", n, 1) for n in shape), _state_dtype(dtype))
        for shape, dtype in given
    )


def _state_dtype(given: Any) -> str:
    try:
        name: str = np.dtype(given).name
    except TypeError:
        name = repr(given)
    if name not in _STATE_DTYPES:
        raise UnsupportedDType(f"`states`: expected one of {', '.join(_STATE_DTYPES)}, got {name}")
    return name


def _reach(name: str, x: Any, least: int) -> int:
    """A window or a chunk."""
    reach = check_size(name, x, least)
    if reach > _LONGEST:
        raise DimensionMismatch(
            f"`{name}`: expected at most 2**62 tokens, got {reach}; leave it out for all",
            expected=_LONGEST,
            actual=reach,
        )
    return reach


def spec_of(pool: Pool, kept: FullPrecision | None = None) -> LayerSpec:
    """Return the description of a layer with these buffers, and with tokens in full precision."""
    return LayerSpec(
        int(pool.k.shape[1]), pool.head_dim, head_dim_v=pool.head_dim_v, kind=pool.k_kind, v_kind=pool.v_storage,
        rotate=pool.rotate, full_precision=kept,
    )  # fmt: skip


def storage_of(k_kind: Kind, v_storage: Kind | str, rotate: bool, kept: Any = None) -> str:
    """Return the part of a cache's ``repr`` about storage: kinds, rotation, and tokens in full precision."""
    kinds = str(k_kind) if str(v_storage) == str(k_kind) else f"{k_kind}/{v_storage}"
    more = ", rotate=True" if rotate else ""
    return kinds + more + ("" if kept is None else f", full_precision={kept}")


def fill_in(spec: Any, **values: Any) -> None:
    """Fill in attributes of an object that is being made, and is frozen."""
    for name, value in values.items():
        object.__setattr__(spec, name, value)
