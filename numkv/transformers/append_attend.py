"""What a layer does in a forward pass, in one place: new rows go into the cache, and queries attend over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from numkv.attention.attend import attend, check_queries
from numkv.attention.options import CheckedOptions
from numkv.errors import NotSupported
from numkv.kinds import Kind
from numkv.storage.buffer import source_dtypes
from numkv.storage.pool import Pool
from numkv.torch.tensors import array_of, tensor_of
from numkv.transformers.books import Step
from numkv.transformers.bound import prepared
from numkv.transformers.layers import Pending

_Tensor, _empty, _CPU = torch.Tensor, torch.empty, torch.device("cpu")


def at_once(query: Any, pending: Pending, plan: Any, scaling: Any, softcap: Any, s_aux: Any) -> Any:
    """`append_and_attend` in one compiled call, as in a pass of one token a sequence.

    Parameters
    ----------
    query, pending, plan
        See `append_and_attend`.
    scaling, softcap, s_aux : float, float and tensor (num_q_heads,), or None
        As a model hands them on.

    Returns
    -------
    tensor (batch, T, num_q_heads, head_dim_v), or None
        None where this pass or layer needs more; then nothing has changed.
    """
    layer = pending.layer
    bound = layer.bound
    if not (
        bound is not None and (group := bound.group).plan is plan and layer.books is group.before
        and layer.pool is bound.pool and not group.moves
        and scaling == bound.scaling and softcap == bound.softcap and s_aux is bound.s_aux
    ):  # fmt: skip
        bound = prepared(query, pending, plan, scaling, softcap, s_aux)
        if bound is None:
            return None
        group = bound.group
    k, v = pending.keys, pending.values
    if not (
        type(query) is type(k) is type(v) is _Tensor and query.is_cpu and k.is_cpu and v.is_cpu
        and query.dtype is k.dtype is v.dtype is group.dtype
        and query.shape == group.shape_q and k.shape == group.shape_k and v.shape == group.shape_v
        and not (query.is_neg() or k.is_neg() or v.is_neg())
    ):  # fmt: skip
        return None
    shape = group.shape_out
    if shape[1] > 1:
        query, k, v = query.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    query, k, v = query.contiguous(), k.contiguous(), v.contiguous()
    if bound.sinks is not None:
        bound.sinks.copy_(s_aux.detach())
    out = _empty(shape, dtype=group.dtype, device=_CPU)  # whatever the default is
    rows = query.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    kernel = group.kernel
    if group.workers == 1:
        failed = kernel.call(bound.address, group.address, *rows, 0)
    else:
        failed = kernel.launched(kernel.call, group.workers, bound.address, group.address, *rows)
    if failed:  # rows that cannot be quantised
        return None
    pending.done = (plan, group.step, bound.pool)
    if group.moves:
        layer.finish(group.step, bound.pool)
    else:
        layer.books = group.after
    return out


def append_and_attend(query: Any, pending: Pending, plan: Any, options: CheckedOptions) -> Any:
    """Append pending rows, unless an earlier call has, and attend over their layer.

    Parameters
    ----------
    query : tensor (batch, num_q_heads, T, head_dim)
        Queries of the new columns.
    pending : Pending
        From `numkv.transformers.layers.NumkvLayer.update`.
    plan : Plan
        Of this forward pass.
    options : CheckedOptions
        Scale, soft cap and sinks, checked.

    Returns
    -------
    tensor (batch, T, num_q_heads, head_dim_v)
    """
    q = _by_token(query, "query")
    step, pool = _append(q, pending, plan)
    recent = pending.layer.recent
    batch, heads, columns, _ = query.shape
    if recent is not None:
        wide = q if q.dtype == np.float64 else _by_token(query.float(), "query")
        found = recent.attend(pool, step, columns, wide, options)
        return tensor_of(found).to(query.dtype).view(batch, columns, heads, found.shape[2])
    window = plan.seen.window - 1
    options = options._replace(window_left=window if step.ranges is None else -1)
    chosen = q if step.queries is None else q[step.queries]
    found = attend(pool, step.table, chosen, step.lengths, step.starts, options, ranges=step.ranges)
    out = tensor_of(found)
    if step.queries is not None:  # the others are padding, and see nothing
        whole = out.new_zeros((q.shape[0], *out.shape[1:]))
        whole[tensor_of(step.queries)] = out
        out = whole
    return out.view(batch, columns, heads, out.shape[2])


def _append(q: Any, pending: Pending, plan: Any) -> tuple[Step, Pool]:
    """The step, and the pool that holds its rows; layers that share these rows find them there."""
    if pending.done is not None:
        done, step, pool = pending.done
        if done is not plan.whole:
            raise NotSupported(
                "NumkvCache: expected layers that share rows to have the same mask, got another one"
            )
        return step if plan.whole is plan else step.of_last(plan.columns), pool
    if plan.whole is not plan:
        raise NotSupported(
            "NumkvCache: expected a mask of all new columns for rows that are to be stored, got a part"
        )
    layer = pending.layer
    books, pool = layer.begin(pending.keys, pending.values)
    check_queries(pool.target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
    step = plan.step(books, keep=layer.record_past)
    k = _new_rows(pending.keys, pool.k_kind, "key_states")
    v = None if pool.is_latent else _new_rows(pending.values, pool.v_kind, "value_states")
    k, v = pool.check_rows(k, v, check_finite=True)
    pool = layer.make_room(step)
    pool.scatter(k, v, step.slots)
    if layer.recent is not None:
        layer.recent.write(k, v, step)
    layer.finish(step, pool)
    pending.done = (plan, step, pool)
    return step, pool


def _new_rows(x: Any, kind: Kind, name: str) -> Any:
    """Rows in a dtype that can be stored in a kind."""
    rows = _by_token(x, name)
    return rows if rows.dtype in source_dtypes(kind) else _by_token(x.float(), name)


def _by_token(x: Any, name: str) -> Any:
    """Rows ``(batch * T, heads, dim)`` as an array, without a copy where they lie so, as they do in most models."""
    batch, heads, columns, dim = x.shape
    rows = x.transpose(1, 2).reshape(batch * columns, heads, dim)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    return array_of(rows, name)
