"""Latent attention: layers that store what K and V are made of, and attention over that with absorbed queries.

transformers hands latents and rotary keys to the cache, multiplies what comes back with the weight that makes K and V
of every head (`expand_kv`), and attends over these. Here that product is put off: it is noted with the rows
(`LatentRows`), and the weight is multiplied with the queries instead, and with what comes out. So a token is one row,
and rows are read as they are stored. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from numkv.attention.options import CheckedOptions
from numkv.errors import NotSupported
from numkv.storage.latents import LatentPool
from numkv.transformers.append_attend import append_and_attend
from numkv.transformers.layers import NumkvLayer, Pending, Rows

_Tensor = torch.Tensor
# What `expand_kv` of transformers' models does with latents, beside the product; any other code computes with them.
_MOVES = {
    _Tensor.view, _Tensor.transpose, torch.split, _Tensor.split, _Tensor.expand, _Tensor.__getitem__,
}  # fmt: skip


class LatentRows(Rows):
    """New latents on their way from `LatentLayer.update` to the attention function, by way of `expand_kv`.

    What that makes of them has the shapes of K and V, and no content.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rows = next((x for x in args if isinstance(x, LatentRows)), None)
        if rows is None or func not in _ALLOWED:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear:
                return rows._multiplied(*args, **kwargs)
            if func is _Tensor.copy_:
                return args[0]
            if func is _Tensor.new_empty:
                shape = args[1] if len(args) == 2 else args[1:]
                return rows._tagged(_nothing(rows, shape))
            found = func(*args, **kwargs)
            if isinstance(found, tuple | list):
                return tuple(rows._tagged(x) for x in found)
            return rows._tagged(found)

    def _multiplied(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """Note the weight of a product with these latents, in place of the product."""
        pending = self.pending
        if x is not self or bias is not None or pending.weight is not None:
            raise NotSupported(
                "NumkvCache: expected one product of latents with a weight, without a bias, got another; use another "
                "cache for this model"
            )
        pending.weight = weight
        return self._tagged(_nothing(self, (*self.shape[:-1], weight.shape[0])))

    def _tagged(self, x: Any) -> Any:
        made = x.as_subclass(LatentRows)
        made.pending = self.pending
        return made


_ALLOWED = {*_MOVES, functional.linear, _Tensor.copy_, _Tensor.new_empty}


def _nothing(like: Any, shape: Any) -> Any:
    """A tensor of a shape, of one element in memory."""
    return torch.empty(1, dtype=like.dtype, device=like.device).expand(tuple(shape))


class LatentLayer(NumkvLayer):
    """Latents of one attention layer with their rotary keys, a row for each token."""

    pool_class = LatentPool

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take latents ``(batch, 1, T, rank)`` and rotary keys ``(batch, 1, T, rotary_dim)``."""
        # V is the first part of a row, and is stored with it.
        pending = Pending(self, torch.cat([key_states, value_states], -1), key_states)
        key, value = key_states.as_subclass(LatentRows), value_states.as_subclass(LatentRows)
        key.pending = value.pending = pending
        return key, value


def attend_absorbed(
    query: Any, value: Any, pending: Pending, plan: Any, options: CheckedOptions
) -> Any:
    """Append pending latents and attend over them, with the weight of K and V multiplied to queries and outputs.

    Parameters
    ----------
    query : tensor (batch, num_q_heads, T, nope_dim + rotary_dim)
        Queries of the new columns.
    value : tensor (batch, num_q_heads, T, head_dim_v)
        What `expand_kv` has made of latents: its shape counts.
    pending : Pending
        From `LatentLayer.update`.
    plan, options
        See `numkv.transformers.append_attend.append_and_attend`.

    Returns
    -------
    tensor (batch, T, num_q_heads, head_dim_v)
    """
    weight, rank = pending.weight, pending.values.shape[3]
    heads, dim_v = query.shape[1], value.shape[3]
    nope = query.shape[3] - (pending.keys.shape[3] - rank)
    if weight is None or tuple(weight.shape) != (heads * (nope + dim_v), rank):
        got = "none" if weight is None else f"one of shape {tuple(weight.shape)}"
        raise NotSupported(
            f"NumkvCache: expected a weight {(heads * (nope + dim_v), rank)} that makes K and V of latents, got {got}; "
            "use another cache for this model"
        )
    of_k, of_v = weight.view(heads, nope + dim_v, rank).split([nope, dim_v], 1)
    absorbed = torch.cat([torch.matmul(query[..., :nope], of_k), query[..., nope:]], -1)
    out = append_and_attend(absorbed, pending, plan, options)
    found = torch.matmul(out.transpose(1, 2), of_v.transpose(1, 2))
    return found.transpose(1, 2)
