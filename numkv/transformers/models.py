"""`use`: a model on numkv in one call."""

from __future__ import annotations

import functools
import warnings
from typing import Any, TypeVar

from transformers import PreTrainedModel

from numkv.caches import FullPrecision
from numkv.errors import NotSupported
from numkv.transformers.cache import NumkvCache
from numkv.transformers.internals import (
    attention_of,
    can_choose_attention,
    forget_cache_maker,
    has_own_cache,
    makes_caches,
    set_cache_maker,
    transformers_makes_cache,
)

_Model = TypeVar("_Model")
_BEFORE = "_numkv_before"  # on a model: the attention implementation that it had
_MOST_WRAPPERS = 8


def use(
    model: _Model,
    kind: Any = None,
    *,
    k_kind: Any = None,
    v_kind: Any = None,
    capacity: int | None = None,
    rotate: bool = False,
    full_precision: FullPrecision | None = None,
) -> _Model:
    """Have a model attend by numkv, and ``model.generate`` make a `NumkvCache` where it is given no cache.

    A call of the model, as in a loop of your own, still makes transformers' cache: pass it a `NumkvCache` as
    `past_key_values`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder on the CPU, or what PEFT or ``torch.compile`` makes of one: then the model within is switched.
    kind, k_kind, v_kind, rotate, full_precision
        How K and V are stored; see `NumkvCache`.
    capacity : int, optional
        Tokens of each sequence to reserve room for; without it as many as ``generate`` may make.

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
        "full_precision": full_precision,
    }  # fmt: skip
    inner = _inner(model)
    generating = _generating(inner)
    for part in (inner, *generating):
        NumkvCache(part.config, **options)
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
        set_cache_maker(part, functools.partial(_make_cache, part, options))
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
    inner = _inner(model)
    before = inner.__dict__.pop(_BEFORE, None)
    if before is not None:
        for part in _generating(inner):
            forget_cache_maker(part)
        inner.set_attn_implementation(before)
    return model


def _inner(model: Any) -> Any:
    """The model of transformers whose `generate` a wrapper calls; a model itself."""
    inner = model
    for _ in range(_MOST_WRAPPERS):
        if isinstance(inner, PreTrainedModel):
            return inner
        owner = getattr(getattr(inner, "generate", None), "__self__", inner)
        if owner is inner and not isinstance(inner, type):  # PEFT's have a `generate` of their own
            owner = getattr(inner, "get_base_model", lambda: None)()
        inner = owner
    raise TypeError(
        "numkv.transformers: expected a transformers.PreTrainedModel, such as AutoModelForCausalLM.from_pretrained "
        "gives, or what PEFT or torch.compile makes of one, got "
        f"{model.__name__ if isinstance(model, type) else type(model).__name__}; pass the model itself"
    )


def _generating(model: Any) -> list[Any]:
    """The parts of a model that have a `generate` which makes caches; in most models the model alone."""
    return [x for x in model.modules() if isinstance(x, PreTrainedModel) and makes_caches(x)]


def _make_cache(
    model: Any, options: dict[str, Any], settings: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
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
    if settings.is_assistant:
        cache.activate_past_recording()
    model_kwargs["past_key_values"] = cache
