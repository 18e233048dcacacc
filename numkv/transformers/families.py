"""Check by its config whether numkv supports a model, for `NumkvCache` and `ContinuousBatch`."""

from __future__ import annotations

from typing import Any

from numkv.errors import NotSupported
from numkv.transformers.internals import layers_of

# Encoders, unless their config has is_decoder=True.
_BOTH_WAYS = {
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
    "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
# Models with latent attention without token selection, whose `expand_kv` computes K and V of all latents by one weight.
_LATENT = {
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash",
    "minicpm3", "youtu",
}  # fmt: skip
# Models that use K and V in ways that no config describes.
_OWN_WAYS = {
    **dict.fromkeys(("diffllama", "doge", "falcon", "jetmoe"), "its own code that reads K and V"),
    **dict.fromkeys(("inkling_text", "inkling2_text"), "a position bias, which adds to scores"),
    "moshi": "windows that its masks do not show",
    "mllama_text_model": "cross attention to images, and reads its K and V from the cache itself",
}
#: Layers that transformers itself stores.
OF_TRANSFORMERS = {"linear_attention", "conv", "dummy"}


def check_config(config: Any, name: str) -> None:
    """Raise for models whose attention would be wrong.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Config of the model, or of its text part.
    name : str
        Start of error messages.
    """
    model = getattr(config, "model_type", type(config).__name__)
    reason = _OWN_WAYS.get(model)
    if getattr(config, "is_encoder_decoder", False):
        reason = "encoder and decoder, with cross attention between them"
    elif has_latents(config) and model not in _LATENT:
        reason = "its own form of latent attention"
    elif is_set(config, "alibi") or model in ("bloom", "mpt"):
        reason = "ALiBi, which adds to scores within the model"
    elif not getattr(config, "is_causal", True):
        reason = "attention that is not causal"
    elif model in _BOTH_WAYS and not getattr(config, "is_decoder", False):
        reason = "attention in both directions, as its config lacks is_decoder=True"
    if reason is not None:
        raise NotSupported(
            f"{name}: expected a model with causal attention over K and V, got {model!r}, which has {reason}; use "
            "another cache"
        )


def has_latents(config: Any) -> bool:
    """Return whether a model's attention is over latents."""
    return is_set(config, "kv_lora_rank")


def is_set(config: Any, name: str) -> bool:
    """Return whether a config, or that of one of its layers, has an option."""
    try:
        return bool(getattr(config, name, None))
    except Exception:  # transformers raises its own error for entries that differ between layers
        return True


def types_of_layers(config: Any, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the types of layers and the arguments of each one's cache, if transformers provides them."""
    try:
        return layers_of(config)
    except (AttributeError, ValueError, KeyError) as error:
        raise NotSupported(
            f"{name}: expected a config that describes its layers, got one of {config.model_type!r} "
            f"({error}); use another cache"
        ) from error


def layers_with_rows(config: Any) -> int:
    """Return how many layers have rows in a `NumkvCache`."""
    return sum(name not in OF_TRANSFORMERS for name, _ in types_of_layers(config, "NumkvCache"))
