"""The attention function ``numkv``: over a `NumkvCache` on numkv's kernels, without one as transformers does it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from numkv.access import writes
from numkv.attention.options import check_options
from numkv.errors import NotSupported
from numkv.transformers.append_attend import append_and_attend, at_once
from numkv.transformers.internals import repeat_kv, sdpa_attention_forward
from numkv.transformers.latents import LatentRows, attend_absorbed
from numkv.transformers.layers import NumkvLayer, Rows
from numkv.transformers.masks import Plan


@torch.compiler.disable  # type: ignore[untyped-decorator]  # which cannot look into the cache
def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **others: Any,
) -> tuple[Any, None]:
    """Attend: transformers' interface for attention, see `transformers.AttentionInterface`.

    Parameters
    ----------
    module : torch.nn.Module
        The layer.
    query : tensor (batch, num_q_heads, T, head_dim)
        Queries of the new columns.
    key, value : tensor (batch, num_kv_heads, T, head_dim)
        What the cache gave back, or all of K and V where there is none.
    attention_mask : Plan
        From `numkv.transformers.masks.plan_of_mask`.
    dropout : float
        Only without a `NumkvCache`.
    scaling, softcap, s_aux : optional
        What scores are multiplied by, the soft cap, and sinks ``(num_q_heads,)``.
    **others
        `sliding_window` and what else a model hands on: the mask has it already.

    Returns
    -------
    tensor (batch, T, num_q_heads, head_dim_v)
    None
        In place of weights.

    Raises
    ------
    NotSupported
        If something is asked for that would not be right.
    """
    if isinstance(key, Rows):
        return _over_cache(
            key.pending.layer, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, others
        ), None  # fmt: skip
    return _without_cache(
        module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, others
    ), None


@writes
def _over_cache(
    layer: NumkvLayer, query: Any, key: Any, value: Any, mask: Any, dropout: float, scaling: float | None,
    softcap: float | None, s_aux: Any, others: dict[str, Any],
) -> Any:  # fmt: skip
    """Attend over what a `NumkvCache` holds, the new rows included."""
    pending = key.pending
    if type(value) is not type(key) or value.pending is not pending:
        raise NotSupported(
            "NumkvCache: expected K and V of one layer, got those of two, or one from elsewhere"
        )
    if type(mask) is not Plan:
        _refuse_mask(mask)
    if dropout or others.get("position_bias") is not None or others.get("output_attentions"):
        _refuse(dropout, others)
    keys, values = pending.keys, pending.values
    if not (query.dtype is keys.dtype is values.dtype) and torch.is_autocast_enabled("cpu"):
        # RoPE leaves queries and K in float32; PyTorch's own attention casts them, too.
        dtype = torch.get_autocast_dtype("cpu")
        query, pending.keys, pending.values = query.to(dtype), keys.to(dtype), values.to(dtype)
    if (
        query.requires_grad or pending.keys.requires_grad or pending.values.requires_grad
    ) and torch.is_grad_enabled():
        raise NotSupported(
            "NumkvCache: expected a forward pass without gradients, as numkv computes none; call the model under "
            "torch.no_grad() or torch.inference_mode(), or train it without this cache"
        )
    latent = type(key) is LatentRows
    out = None if latent else at_once(query, pending, mask, scaling, softcap, s_aux)
    if out is not None:
        return out
    sinks = None if s_aux is None else s_aux.detach().float().numpy()
    scale = None if scaling is None else float(scaling)
    options = check_options({"sm_scale": scale, "logits_soft_cap": softcap, "sinks": sinks})
    if latent:
        if scaling is None:  # which rows of latents do not say
            options = options._replace(sm_scale=query.shape[3] ** -0.5)
        return attend_absorbed(query, value, pending, mask, options)
    return append_and_attend(query, pending, mask, options)


def _refuse_mask(mask: Any) -> None:
    got = "None" if mask is None else f"a mask {tuple(mask.shape)}"
    raise NotSupported(
        "NumkvCache: expected the plan that the mask function 'numkv' makes of a two-dimensional attention mask, got "
        f"{got}; masks with four axes, and models that make masks themselves (such as those with ALiBi), need another "
        "cache and attention implementation"
    )


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise NotSupported(
            f"NumkvCache: expected no dropout, got {dropout}; call model.eval(), or train without this cache"
        )
    if others.get("position_bias") is not None:
        raise NotSupported("NumkvCache: expected scores without a position bias, got one")
    raise NotSupported(
        "NumkvCache: expected output_attentions=False, as weights are never made, got True; use "
        "attn_implementation='eager' and another cache"
    )


def _without_cache(
    module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, scaling: float | None,
    softcap: float | None, sinks: Any, others: dict[str, Any],
) -> Any:  # fmt: skip
    """Attend over all of K and V, as tensors: PyTorch's attention, with gradients."""
    if softcap is None and sinks is None:
        if type(mask) is Plan:
            mask = mask.tensor()
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **others
        )
        return out
    if others.get("position_bias") is not None:
        raise NotSupported(
            "attention implementation 'numkv': expected no position bias beside a soft cap or sinks"
        )
    if type(mask) is Plan:
        mask = mask.tensor(explicit=True)
    elif mask is None and query.shape[2] > 1:
        raise NotSupported(
            "attention implementation 'numkv': expected a mask beside a soft cap or sinks"
        )
    return _in_full(module, query, key, value, mask, dropout, scaling, softcap, sinks)


def _in_full(
    module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, scaling: float | None,
    softcap: float | None, sinks: Any,
) -> Any:  # fmt: skip
    """Attend with a soft cap or sinks, which PyTorch's attention has not."""
    group = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, group), repeat_kv(value, group)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat([scores, column], -1)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()
