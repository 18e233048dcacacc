"""`use`: a model on numkv in one call."""

from __future__ import annotations

import types
from typing import Any, TypeVar

from numkv.errors import NotSupported
from numkv.transformers.cache import NumkvCache

__all__ = ["restore", "use"]

_Model = TypeVar("_Model")
_OPTIONS = "_numkv_options"
# Where transformers chooses a cache for `generate`, if it is given none.
_CHOICE = "_prepare_cache_for_generation"


def use(
    model: _Model,
    kind: Any = None,
    *,
    k_kind: Any = None,
    v_kind: Any = None,
    capacity: int | None = None,
    rotate: bool = False,
    residual_window: int = 0,
    num_sink_tokens: int = 0,
) -> _Model:
    """Have a model attend by numkv, and ``model.generate`` make a `NumkvCache` where it is given no cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder on the CPU.
    kind, k_kind, v_kind, rotate, residual_window, num_sink_tokens
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
        If an option is not one.

    Notes
    -----
    Without a `NumkvCache` the model attends as transformers' ``sdpa`` does, also in training. `restore` undoes it.

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
    given: Any = model
    options = {
        "kind": kind, "k_kind": k_kind, "v_kind": v_kind, "capacity": capacity, "rotate": rotate,
        "residual_window": residual_window, "num_sink_tokens": num_sink_tokens,
    }  # fmt: skip
    NumkvCache(given.config, **options)
    if not given._can_set_attn_implementation():
        raise NotSupported(
            f"numkv.transformers: expected a model whose attention can be chosen, got {type(given).__name__}, which "
            "has its own"
        )
    own_cache = getattr(given, "_supports_default_dynamic_cache", None)
    if own_cache is not None and not own_cache():
        raise NotSupported(
            f"numkv.transformers: expected a model that takes transformers' caches, got {type(given).__name__}, which "
            "has its own"
        )
    before = getattr(given, _OPTIONS, (None, given.config._attn_implementation))[1]
    given.set_attn_implementation("numkv")
    setattr(given, _OPTIONS, (options, before))
    if hasattr(type(given), _CHOICE):
        setattr(given, _CHOICE, types.MethodType(_prepare_cache_for_generation, given))
    return model


def restore(model: _Model) -> _Model:
    """Undo `use`: the attention implementation and the cache that the model had before.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that `use` was called with; another one is left as it is.

    Returns
    -------
    transformers.PreTrainedModel
        The model itself.
    """
    given: Any = model
    found = given.__dict__.pop(_OPTIONS, None)
    if found is not None:
        given.__dict__.pop(_CHOICE, None)
        given.set_attn_implementation(found[1])
    return model


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Make a `NumkvCache` where transformers would make a `DynamicCache`."""
    settings = generation_config
    wanted = (
        model_kwargs.get("past_key_values") is None
        and settings.use_cache is not False
        and settings.cache_implementation in (None, "dynamic")
        and self.config._attn_implementation == "numkv"
    )
    if not wanted:
        return getattr(type(self), _CHOICE)(self, generation_config, model_kwargs, *args, **kwargs)
    options = dict(getattr(self, _OPTIONS)[0])
    longest = kwargs.get("max_cache_length", args[2] if len(args) > 2 else None)
    if options["capacity"] is None and isinstance(longest, int):
        options["capacity"] = longest
    cache = NumkvCache(self.config, **options)
    if settings.is_assistant:
        cache.activate_past_recording()
    model_kwargs["past_key_values"] = cache
    return None
