"""The internals of transformers that numkv uses without a guarantee: names, shapes of results, insides of functions.

All of them are in this module. `tests/transformers_models/test_internals.py` checks each one. A new version of
transformers that changes one therefore fails a test with its name. The rest of this package uses only what
``transformers/__init__.py`` exports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from numkv.transformers.metadata import Seen

__all__ = [  # of transformers itself
    "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "LinearAttentionLayer", "causal_mask_function",
    "sdpa_attention_forward", "sdpa_mask",
]  # fmt: skip

# The method by which `generate` makes a cache if none is passed.
_MAKE_CACHE = "_prepare_cache_for_generation"
_MOST_WRAPPERS = 8
# The functions that make masks of each size.
_OVERLAYS = {"sliding_window": "sliding_window_overlay", "chunk_size": "chunked_overlay"}


# -- models


def inner_model(model: Any) -> Any:
    """Return the transformers model whose `generate` a wrapper calls, or the model itself."""
    inner = model
    for _ in range(_MOST_WRAPPERS):
        if isinstance(inner, PreTrainedModel):
            return inner
        owner = getattr(getattr(inner, "generate", None), "__self__", inner)
        if owner is inner and not isinstance(inner, type):  # PEFT's have a `generate` of their own
            owner = getattr(inner, "get_base_model", lambda: None)()
        inner = owner
    raise TypeError(
        "numkv.transformers: expected a transformers.PreTrainedModel, as from AutoModelForCausalLM.from_pretrained, "
        "or one wrapped by PEFT or torch.compile, got "
        f"{model.__name__ if isinstance(model, type) else type(model).__name__}; pass the model itself"
    )


def attention_of(model: Any) -> str:
    """Return the name of a model's attention implementation."""
    return model.config._attn_implementation


def own_attention(module: Any) -> Any:
    """Return the attention function of a layer's own code, which takes soft caps and sinks."""
    return sys.modules[type(module).__module__].eager_attention_forward


def can_choose_attention(model: Any) -> bool:
    """Return whether a model's attention is looked up by name."""
    return bool(model._can_set_attn_implementation())


def has_own_cache(model: Any) -> bool:
    """Return whether `generate` of a model leaves the cache to the model."""
    takes_caches = getattr(model, "_supports_default_dynamic_cache", None)
    return takes_caches is not None and not takes_caches()


def makes_caches(model: Any) -> bool:
    """Return whether a model has a `generate` that makes caches."""
    return hasattr(type(model), _MAKE_CACHE)


def set_cache_maker(model: Any, maker: Callable[..., None]) -> None:
    """Replace the model's own method, which `generate` calls, by a function with the same parameters without `self`."""
    setattr(model, _MAKE_CACHE, maker)


def forget_cache_maker(model: Any) -> None:
    """Undo `set_cache_maker`."""
    model.__dict__.pop(_MAKE_CACHE, None)


def transformers_makes_cache(model: Any, *args: Any, **kwargs: Any) -> None:
    """Call the model's own method."""
    getattr(type(model), _MAKE_CACHE)(model, *args, **kwargs)


# -- layers


def layers_of(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the types of layers, and the arguments of each one's cache."""
    types, arguments = get_layer_types_and_kwargs(config)
    # With `assistant_early_exit` there are fewer layers than types: transformers sets only `num_hidden_layers`.
    return list(zip(types, arguments, strict=False))


def layer_of_transformers(name: str, arguments: dict[str, Any]) -> Any:
    """Return a `DynamicCache`'s layer of a type."""
    return DYNAMIC_LAYER_TYPE_MAPPING[name](**arguments)


# -- masks


def seen_by(mask_function: Any) -> Seen | None:
    """Return the visibility of a mask function: windows or chunks, and blocks; None for other patterns."""
    if mask_function is causal_mask_function:
        return Seen()
    if mask_function is None:
        return None
    first, second = _two(mask_function, "or_masks")
    ids = _inside(second, "blockwise_overlay").get("block_sequence_ids")
    if ids is not None:  # the visibility without blocks, and the blocks
        seen = seen_by(first)
        if seen is None or seen.blocks is not None:
            return None
        ids = ids.cpu().numpy()
        return replace(seen, blocks=ids) if (ids >= 0).any() else seen
    first, second = _two(mask_function, "and_masks")
    if second is causal_mask_function:
        window, chunk = _size(first, "sliding_window"), _size(first, "chunk_size")
        return Seen(window, chunk) if window or chunk else None
    seen, window = seen_by(first), _size(second, "sliding_window")
    if not window or seen is None or seen.window or seen.chunk:
        return None
    return replace(seen, window=window, cuts=True)


def _size(overlay: Any, name: str) -> int:
    """Return the tokens of an overlay's window or chunk; 0 for other overlays."""
    size = _inside(overlay, _OVERLAYS[name]).get(name)
    return size if isinstance(size, int) and size > 0 else 0


def _two(function: Any, maker: str) -> Any:
    """Return the two functions that transformers' `maker` combined; None for others."""
    found = _inside(function, maker).get("mask_functions", ())
    return found if len(found) == 2 else (None, None)


def _inside(function: Any, maker: str) -> dict[str, Any]:
    """Return the closure variables of a function made by transformers' `maker`; none for other functions."""
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ != causal_mask_function.__module__:
        return {}
    if function.__qualname__.partition(".")[0] != maker:
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


# -- generation


def generation_settings(
    model: Any, config: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a `GenerationConfig` from a model's defaults, a user's and options, and the options outside of it."""
    found, others = model._prepare_generation_config(config, **options)
    model._prepare_special_tokens(found, True, device="cpu")
    return found, others


def logits_processors(model: Any, settings: Any, ids: Any, given: Any) -> Any:
    """Return the logits processors of a text, from its settings and as passed."""
    return model._get_logits_processor(
        generation_config=settings, input_ids_seq_length=ids.shape[1], encoder_input_ids=ids,
        logits_processor=given, device="cpu", model_kwargs={},
    )  # fmt: skip


def stopping_criteria(model: Any, settings: Any, given: Any, tokenizer: Any) -> Any:
    """Return the stopping criteria of a text, from its settings and as passed."""
    return model._get_stopping_criteria(
        generation_config=settings, stopping_criteria=given, tokenizer=tokenizer
    )
