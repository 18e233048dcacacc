"""A model's forward pass over the new tokens of several requests: what its attention function does then.

The tokens lie in one row, one request after another. The attention function ``numkv`` finds the pass among the keyword
arguments of the model's call, `PASS`, which transformers hands on to every layer.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from numkv.caches import LayerSpec
from numkv.errors import NotSupported
from numkv.kinds import kind, kind_of_dtype
from numkv.storage.buffer import source_dtypes
from numkv.torch.tensors import array_of
from numkv.transformers.cache import OF_NUMKV, check_profile
from numkv.transformers.families import has_latents, is_set, types_of_layers
from numkv.transformers.layers import check_profiled

#: The keyword argument of a model's call.
PASS = "numkv_pass"
# RoPE whose angles depend on how long the longest text of a call is.
_OF_LENGTH = {"dynamic", "longrope"}


class Pass:
    """New tokens of several requests on their way through a model.

    Parameters
    ----------
    steps : sequence of (numkv.torch.Step, int or None)
        Where their rows go, and what they see, one step's after another's. With a number, it is that of the blocks that
        a query reads: see `numkv.Step.sparse_attention`.
    widen : sequence of bool
        Of each layer, whether its rows are converted to float32 before they are stored.
    sees_all : sequence of bool
        Of each layer, whether its tokens see all earlier ones. Others do not read sparsely.
    """

    def __init__(
        self, steps: list[tuple[Any, int | None]], widen: list[bool], sees_all: list[bool]
    ) -> None:
        self._steps, self._widen, self._sees_all = steps, widen, sees_all

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, scaling: float | None, softcap: float | None, sinks: Any
    ) -> Any:  # fmt: skip
        """Store a layer's rows and answer its queries; all are ``(1, heads, tokens, dim)``, the result
        ``(1, tokens, heads, dim)``.
        """
        layer = module.layer_idx
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self._widen[layer]:
            k, v = k.float(), v.float()
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        sinks = None if sinks is None else sinks.detach().float()
        options = {"sm_scale": scaling, "logits_soft_cap": softcap, "sinks": sinks}
        found, end = [], 0
        for step, most in self._steps:
            own = slice(end, end := end + step.num_tokens)
            step.append(layer, k[own], v[own])
            if most is None or not self._sees_all[layer]:
                found.append(step.attention(layer, q[own], **options))
            else:
                found.append(step.sparse_attention(layer, q[own], most_blocks=most, **options))
        return torch.cat(found)[None]


class Rows(NamedTuple):
    """What a layer's attention was called with."""

    heads: int
    dim: int
    dim_v: int
    dtype: Any


class _Probe:
    """Notes what each layer is called with, and answers zeros."""

    def __init__(self) -> None:
        self.found: dict[int, Rows] = {}

    def attend(self, module: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
        dtype = array_of(key[:0], "key").dtype
        self.found[module.layer_idx] = Rows(key.shape[1], key.shape[3], value.shape[3], dtype)
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


def layers_of_model(
    model: Any, given: dict[str, Any], profile: Any, name: str
) -> tuple[list[LayerSpec], list[bool]]:
    """Describe a model's layers by its config and by a pass of one token.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With the attention implementation ``numkv``.
    given : dict
        Arguments of `LayerSpec` that say how rows are stored; without a kind as the model computes them.
    profile : Profile or None
        In their place, what each layer's are.
    name : str
        What errors begin with.

    Returns
    -------
    list of LayerSpec
    list of bool
        See `Pass`.
    """
    config = model.config.get_text_config(decoder=True)
    _refuse_what_batches_change(config, name)
    types = types_of_layers(config, name)
    for number, (of, _) in enumerate(types):
        if of not in OF_NUMKV:
            raise NotSupported(
                f"{name}: expected layers of full, sliding or chunked attention, got {of!r} for layer {number}; run "
                "this model by `generate`, with numkv.transformers.use"
            )
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise NotSupported(
            f"{name}: expected a model that takes position_ids, got {config.model_type!r}, which counts tokens itself; "
            "run it by `generate`, with numkv.transformers.use"
        )
    probe = _Probe()
    run_model(
        model, torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), None, probe
    )
    if sorted(probe.found) != list(range(len(types))):
        raise NotSupported(
            f"{name}: expected a model whose {len(types)} layers hand keyword arguments on to the attention function, "
            f"got calls of {sorted(probe.found)}; run {config.model_type!r} by `generate`, with numkv.transformers.use"
        )
    if profile is not None:
        check_profile(profile, len(types), config)
    specs, widen = [], []
    for number, (of, arguments) in enumerate(types):
        rows = probe.found[number]
        if profile is None:
            own = {"kind": kind_of_dtype(rows.dtype), **given}
            spec = LayerSpec(rows.heads, rows.dim, head_dim_v=rows.dim_v, **own)
        else:
            spec = profile[number]
            check_profiled(rows[:3], (spec.num_kv_heads, spec.head_dim, spec.head_dim_v))
        reach = arguments.get("sliding_window")
        if reach is not None and of == "chunked_attention":
            spec = replace(spec, chunk_size=int(reach))
        elif reach is not None:
            spec = replace(spec, window_left=int(reach) - 1)
        specs.append(spec)
        stored = (kind(x) for x in (spec.kind, spec.v_kind) if x is not None)
        widen.append(any(rows.dtype not in source_dtypes(x) for x in stored))
    return specs, widen


def _refuse_what_batches_change(config: Any, name: str) -> None:
    """Refuse models whose results for a text would depend on the other texts, or that store more than K and V."""
    reason = None
    if has_latents(config):
        reason = "latent attention, whose K and V would be kept in full"
    elif is_set(config, "num_kv_shared_layers"):
        reason = "layers that read the rows of others"
    elif _OF_LENGTH & _rope_types(getattr(config, "rope_parameters", None)):
        reason = "RoPE that depends on the longest text in a pass"
    if reason is not None:
        raise NotSupported(
            f"{name}: expected a model whose tokens do not depend on the other texts, and that stores K and V "
            f"alone, got {config.model_type!r}, which has {reason}; run it by `generate`, with numkv.transformers.use"
        )


def _rope_types(parameters: Any) -> set[Any]:
    """Types of RoPE in a config's parameters, which may be those of each type of layer."""
    if not isinstance(parameters, dict):
        return set()
    each = [x for x in parameters.values() if isinstance(x, dict)]
    return {x.get("rope_type") for x in (parameters, *each)}


def run_model(model: Any, ids: Any, positions: Any, ends: Any, on: Any) -> Any:
    """Call a model with one row of tokens; its logits at the tokens `ends`, as float32, or at all of them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    ids, positions : int64 tensor (num_tokens,)
        Tokens, and where each stands in its text.
    ends : int64 tensor (num_ends,) or None
        The tokens whose logits are wanted.
    on : Pass
        What its attention function calls.

    Returns
    -------
    float32 tensor (num_ends, vocabulary)
    """
    of: Any = type(model)
    options = {} if ends is None or not _keeps_some_logits(of) else {"logits_to_keep": ends}
    with torch.inference_mode():
        found = model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            **{PASS: on},
            **options,
        ).logits[0]
        if ends is not None and not options:
            found = found[ends]
        return found.float()


@functools.cache
def _keeps_some_logits(cls: Any) -> bool:
    return "logits_to_keep" in inspect.signature(cls.forward).parameters
