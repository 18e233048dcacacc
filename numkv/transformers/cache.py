"""`NumkvCache`, a cache of transformers whose attention layers are numkv's, and `use`: a model on it in one call."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from numkv.access import Access
from numkv.caches import FullPrecision, Profile
from numkv.drawing.page import drawn
from numkv.errors import DimensionMismatch, NotSupported
from numkv.files.api import savable
from numkv.interrupts import uninterrupted
from numkv.numbers import as_int
from numkv.snapshots.snapshot import Snapshot, Source
from numkv.transformers.families import OF_TRANSFORMERS, check_config, has_latents, types_of_layers
from numkv.transformers.internals import (
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    attention_of,
    can_choose_attention,
    forget_cache_maker,
    has_own_cache,
    inner_model,
    layer_of_transformers,
    makes_caches,
    set_cache_maker,
    transformers_makes_cache,
)
from numkv.transformers.layers import HybridLayer, LatentLayer, NumkvLayer, Options, check_depth
from numkv.transformers.saved import SavedCache, snapshot
from numkv.transformers.tolerance import Tolerance

_Model = TypeVar("_Model")
_BEFORE = "_numkv_before"  # on a model: the attention implementation that it had
#: Layers whose rows are numkv's.
OF_NUMKV = {"full_attention", "sliding_attention", "chunked_attention"}
_HYBRID = {"hybrid", "hybrid_sliding"}


@drawn
@savable
class NumkvCache(Cache):  # type: ignore[misc]
    """A cache for ``model.generate`` and ``model(…)``, with K and V in any of numkv's kinds.

    The model needs the attention implementation ``numkv``; `numkv.transformers.use` sets it.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    kind : str, optional
        How K and V are stored: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"int8"``,
        ``"code6"``, ``"int4"``, …; as the model computes them if None. With ``"int8_channel"`` or ``"int4_channel"``,
        which are for keys, values are int8 or int4, and the newest tokens are in full until 64 of them have scales.
    k_kind, v_kind : str, optional
        Another kind for K or for V.
    capacity : int, optional
        Tokens of each sequence to reserve room for; without it, and past it, room grows by doubling.
    rotate : bool
        Whether rows are rotated before they are stored, which makes INT4 more exact; see docs/layouts.md.
    full_precision : FullPrecision, optional
        How many of each sequence's newest and first tokens are read in full precision, as the model computes them,
        beside quantised storage. It makes no layer see more of them than it does.
    profile : Profile or path, optional
        Kinds of each layer, as `numkv fit` chose them for this checkpoint, in place of other options but `capacity` and
        `max_nbytes`.
    max_nbytes : int or str, optional
        Bytes of the buffers of K and V of all layers, such as ``"4GiB"``. A pass that needs more raises `CacheFull`
        before it changes anything, and a shorter one may follow.

    Raises
    ------
    NotSupported
        If the model has layers that would not be right: attention that chooses tokens by an index, ALiBi, cross
        attention. If `full_precision` is given and neither K nor V is quantised. Keys by channel take no window of more
        than 64 tokens in full precision, no `rotate`, and no layers that see 64 tokens or fewer. Of models with latent
        attention, if `rotate`, `full_precision`, a `v_kind` or a `profile` is given, as V is a part of K's rows. Of
        models whose layers have states of transformers', if `max_nbytes` is given, as a pass has changed some by then.
    UnsupportedDType, DimensionMismatch, ValueError, TypeError
        If a kind or a number is not one, or a profile is of a model of another shape.
    NumkvError
        If the profile is damaged.

    Notes
    -----
    Latent attention (DeepSeek V2 and V3, Kimi Linear, GLM 4.7 Flash and others) keeps one row for each token, of the
    latent and the rotary key, in one kind; K and V of the heads are never made.

    Full layers keep all tokens, sliding and chunked ones what a token may still see. Padding is not stored. Linear and
    convolutional layers are transformers' own, as are layers that share another's rows. With 8-bit floats all scales
    are 1.

    Examples
    --------
    >>> import transformers
    >>> from numkv.transformers import NumkvCache
    >>> config = transformers.LlamaConfig(num_hidden_layers=2)
    >>> len(NumkvCache(config, kind="int8"))
    2
    """

    def __init__(
        self,
        config: Any,
        kind: Any = None,
        *,
        k_kind: Any = None,
        v_kind: Any = None,
        capacity: int | None = None,
        rotate: bool = False,
        full_precision: FullPrecision | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        max_nbytes: int | str | None = None,
    ) -> None:
        options = Options(kind, k_kind, v_kind, capacity, rotate, full_precision, max_nbytes)
        asked = {
            "kind": kind, "k_kind": k_kind, "v_kind": v_kind, "rotate": rotate or None,
            "full_precision": full_precision,
        }  # fmt: skip
        kinds = read_profile(profile, asked)
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(
                f"`config`: expected a transformers.PreTrainedConfig, got {type(config).__name__}; pass model.config"
            )
        for of in (config, config.get_text_config(decoder=True)):
            check_config(of, "NumkvCache")
        config = of
        latent, other_v = has_latents(config), v_kind not in (None, k_kind)
        if latent and (rotate or other_v or full_precision is not None or profile is not None):
            raise NotSupported(
                "NumkvCache: expected no rotate, full_precision, v_kind or profile for latent attention, "
                "whose V is a part of K's rows, got one; pass kind alone"
            )
        layers = [
            _layer(number, name, options, of_type, latent)
            for number, (name, of_type) in enumerate(types_of_layers(config, "NumkvCache"))
        ]
        own = {i: layer for i, layer in enumerate(layers) if isinstance(layer, NumkvLayer)}
        if kinds is not None:
            check_profile(kinds, len(own), config)
            for layer, of_layer in zip(own.values(), options.of_layers(kinds), strict=True):
                layer.options = of_layer
        for number, layer in own.items():
            layer.options.check_layer(number, layer)
        if not own:
            raise NotSupported(
                f"NumkvCache: expected a model with layers of attention, got {config.model_type!r}, which has none"
            )
        if max_nbytes is not None and any(
            isinstance(x, LinearAttentionCacheLayerMixin) for x in layers
        ):
            raise NotSupported(
                f"NumkvCache: expected no `max_nbytes` for {config.model_type!r}, whose layers have states that a pass "
                "without room has changed by then, got one; leave it out"
            )
        super().__init__(layers=layers)
        self._shared = options.shared

    #: Of files: a mark has to say whose K and V it holds.
    needs_mark = True
    __saved__ = SavedCache

    def __snapshot__(self) -> Snapshot:
        """See `numkv.snapshots.snapshot`."""
        return snapshot(self.layers, self)

    @classmethod
    def __restore__(cls, saved: SavedCache, source: Source, _: Any) -> Self:
        """See `numkv.snapshots.snapshot`."""
        made = cls.__new__(cls)
        Cache.__init__(made, layers=saved.restored(source))
        made._shared = made.layers[0].options.shared
        return made

    @property
    def _access(self) -> Access:
        return self._shared.access

    def __repr__(self) -> str:
        own = [layer for layer in self.layers if isinstance(layer, NumkvLayer)]
        length = max(layer.get_seq_length() for layer in own)
        return (
            f"NumkvCache(seq_len={length}, batch={self._batch()}, num_layers={len(self.layers)}, "
            f"kind={', '.join(dict.fromkeys(layer.storage for layer in own))}, nbytes={self.nbytes})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of K and V."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, NumkvLayer))

    @property
    def max_nbytes(self) -> int | None:
        """Bytes that they may take."""
        return self._shared.max_nbytes

    @property
    def max_cache_len(self) -> int:
        """Not there, as layers grow: PEFT asks for it, to put prefixes into a cache of its own."""
        raise NotSupported(
            "NumkvCache: expected a model that computes all K and V itself, got one that asks for a cache of a fixed "
            "length, as PEFT's prefix tuning does to put prefixes into it; use prompt tuning or LoRA, or another cache "
            "(numkv.transformers.restore(model))"
        )

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take new rows of a layer; what comes back is for the attention function ``numkv`` alone."""
        check_depth(len(self.layers), layer_idx + 1)
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have a linear state and no attention."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, NumkvLayer)
            for layer in self.layers
        ]

    @uninterrupted
    def reset(self) -> None:
        """Forget all tokens."""
        self._change("reset", NumkvLayer.emptied)

    @uninterrupted
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns; see `transformers.Cache.crop`."""
        tokens_to_remove = as_int("tokens_to_remove", tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop`: expected minus the number of tokens to remove, got {tokens_to_remove}; pass "
                f"-{tokens_to_remove} to remove the last ones"
            )
        self._change("crop", lambda x: x.cropped(-tokens_to_remove), tokens_to_remove)

    @uninterrupted
    def reorder_cache(self, beam_idx: Any) -> None:
        """Take sequences in another order; those that are taken twice share their blocks."""
        order = tuple(beam_idx.tolist())
        self._shared.refuse_batch(len(order))
        self._change("reorder_cache", lambda x: x.selected(order), beam_idx)

    def _change(self, name: str, change: Callable[[NumkvLayer], Any], *args: Any) -> None:
        """Change all layers, transformers' parts by a method; none is changed where one of numkv's cannot be."""
        own = [x for x in self.layers if isinstance(x, NumkvLayer) and x.metadata is not None]
        found = [change(x) for x in own]
        for layer in self.layers:
            if not isinstance(layer, NumkvLayer):
                getattr(layer, name)(*args)
            elif isinstance(layer, HybridLayer):
                getattr(LinearAttentionLayer, name)(layer, *args)
        for layer, held in zip(own, found, strict=True):
            layer.take(held)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each sequence so many times; they share their blocks."""
        batch = self._batch()
        if batch:
            self.reorder_cache(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Take some sequences, by number or by a boolean each."""
        batch = self._batch()
        if batch:
            self.reorder_cache(torch.arange(batch)[indices.cpu()])

    def _batch(self) -> int:
        found = [x.metadata.batch for x in self.layers if isinstance(x, NumkvLayer) and x.metadata]
        return found[0] if found else 0


def read_profile(profile: Any, asked: Mapping[str, Any]) -> Profile | None:
    """Check a profile, or the path of its file; the options `asked` must not be passed with it."""
    if profile is None:
        return None
    given = [name for name, x in asked.items() if x is not None]
    if given:
        raise TypeError(
            f"`profile`: expected None with {', '.join(given)}, which it sets for each layer; pass the profile alone"
        )
    if isinstance(profile, (str, os.PathLike)):
        profile = Profile.load(profile)
    if not isinstance(profile, Profile):
        raise TypeError(
            f"`profile`: expected a numkv.Profile or the path of one, got {type(profile).__name__}"
        )
    return profile


def check_profile(profile: Profile, num_layers: int, config: Any) -> None:
    """Refuse a profile of a model with another number of layers."""
    if len(profile) != num_layers:
        raise DimensionMismatch(
            f"`profile`: expected a profile of {config.model_type!r} with {num_layers} layers, got one of "
            f"{len(profile)}; make another with `numkv fit`",
            expected=num_layers,
            actual=len(profile),
        )


def _layer(number: int, name: str, options: Options, given: dict[str, Any], latent: bool) -> Any:
    """The cache of one layer."""
    given = dict(given)
    window = given.pop("sliding_window", None)
    if name in OF_TRANSFORMERS:
        return layer_of_transformers(name, given)
    if name not in OF_NUMKV and name not in _HYBRID:
        raise NotSupported(
            f"NumkvCache: expected layers of full, sliding, chunked or linear attention, got {name!r} for layer "
            f"{number}; use another cache for this model"
        )
    reach = -1 if window is None else int(window) - 1
    if name in _HYBRID:
        return HybridLayer(options, reach, **given)
    return (LatentLayer if latent else NumkvLayer)(options, reach)


# -- models


def use(
    model: _Model,
    kind: Any = None,
    *,
    k_kind: Any = None,
    v_kind: Any = None,
    capacity: int | None = None,
    rotate: bool = False,
    full_precision: FullPrecision | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    max_nbytes: int | str | None = None,
    tolerance: float | None = None,
) -> _Model:
    """Have a model attend by numkv, and ``model.generate`` make a `NumkvCache` where it is given no cache.

    A call of the model, as in a loop of your own, still makes transformers' cache: pass it a `NumkvCache` as
    `past_key_values`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder on the CPU, or one wrapped by PEFT or ``torch.compile``; then the inner model is switched.
    kind, k_kind, v_kind, rotate, full_precision, profile, max_nbytes
        How K and V are stored, and in how many bytes; see `NumkvCache`.
    capacity : int, optional
        Tokens of each sequence to reserve room for; without it as many as ``generate`` may make.
    tolerance : float, optional
        How far quantised keys may move scores, as `numkv.KVCache.key_error` estimates it: 0.1 is little, 1 changes
        which token is attended to. The first prompt of `generate` is checked: if scores change by more, a warning
        names the layers and a sufficient kind.

    Returns
    -------
    transformers.PreTrainedModel
        The model itself.

    Raises
    ------
    NotSupported
        If its attention is not one that numkv can do; see `NumkvCache`. The model is as it was.
    UnsupportedDType, DimensionMismatch, ValueError, TypeError
        If an option is not one, or `model` is no model.

    Notes
    -----
    Copies and pickles of the model stay switched. Without a `NumkvCache` the model attends as transformers' ``sdpa``
    does, also in training. `restore` undoes it.

    Examples
    --------
    >>> import torch, transformers
    >>> import numkv.transformers
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    >>> model = numkv.transformers.use(transformers.LlamaForCausalLM(config).eval(), kind="int8")
    >>> model.generate(torch.arange(1, 9)[None], max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 12])
    """
    options = {
        "kind": kind, "k_kind": k_kind, "v_kind": v_kind, "capacity": capacity, "rotate": rotate,
        "full_precision": full_precision, "profile": profile, "max_nbytes": max_nbytes,
    }  # fmt: skip
    if isinstance(profile, (str, os.PathLike)):
        options["profile"] = Profile.load(profile)  # once, and not when text is generated
    inner = inner_model(model)
    generating = _generating(inner)
    watching = None if tolerance is None else Tolerance(tolerance)
    for part in (inner, *generating):
        cache = NumkvCache(part.config, **options)
        if watching is not None:
            watching.watch(cache)
        if not can_choose_attention(part):
            raise NotSupported(
                f"numkv.transformers: expected a model whose attention can be chosen, got {type(part).__name__}, which "
                "has its own"
            )
        if has_own_cache(part):
            raise NotSupported(
                f"numkv.transformers: expected a model that takes transformers' caches, got {type(part).__name__}, "
                "which has its own"
            )
    before = getattr(inner, _BEFORE, attention_of(inner))
    inner.set_attn_implementation("numkv")
    setattr(inner, _BEFORE, before)
    for part in generating:  # by what copies and pickles with the model, as a bound method does not
        set_cache_maker(part, functools.partial(_make_cache, part, options, watching))
    return model


def restore(model: _Model) -> _Model:
    """Undo `use`: the attention implementation and the cache that the model had before.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that `use` was called with, or a wrapper of one; another one is left as it is.

    Returns
    -------
    transformers.PreTrainedModel
        The model itself.

    Raises
    ------
    TypeError
        If it is no model.
    """
    inner = inner_model(model)
    before = inner.__dict__.pop(_BEFORE, None)
    if before is not None:
        for part in _generating(inner):
            forget_cache_maker(part)
        inner.set_attn_implementation(before)
    return model


def _generating(model: Any) -> list[Any]:
    """The parts of a model that have a `generate` which makes caches; in most models the model alone."""
    return [x for x in model.modules() if isinstance(x, PreTrainedModel) and makes_caches(x)]


def _make_cache(
    model: Any, options: dict[str, Any], tolerance: Tolerance | None, settings: Any,
    model_kwargs: dict[str, Any], *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    """Make a `NumkvCache` where `generate` would make a `DynamicCache`."""
    wanted = (
        model_kwargs.get("past_key_values") is None
        and settings.use_cache is not False
        and settings.cache_implementation in (None, "dynamic")
    )
    chosen = attention_of(model)
    if wanted and chosen != "numkv":
        warnings.warn(
            f"numkv.transformers: this model was given to `use`, but its attention implementation is {chosen!r} by "
            "now, so generate makes a cache of transformers'; call `use` again, or `restore`",
            stacklevel=4,
        )
    if not wanted or chosen != "numkv":
        transformers_makes_cache(model, settings, model_kwargs, *args, **kwargs)
        return
    longest = kwargs.get("max_cache_length", args[2] if len(args) > 2 else None)
    if options["capacity"] is None and isinstance(longest, int):
        options = options | {"capacity": longest}
    cache = NumkvCache(model.config, **options)
    if tolerance is not None:
        tolerance.watch(cache)
    if settings.is_assistant:
        cache.activate_past_recording()
    model_kwargs["past_key_values"] = cache
