"""What a layer does in a forward pass, in one place: new rows go into the cache, and queries attend over it."""

from __future__ import annotations

from typing import Any

from numkv.attention.attend import attend, check_queries
from numkv.attention.options import AttentionOptions
from numkv.errors import NotSupported
from numkv.kinds import Kind
from numkv.storage.pool import Pool, source_dtypes
from numkv.torch.tensors import array_of, tensor_of
from numkv.transformers.books import Step
from numkv.transformers.layers import Pending

__all__ = ["append_and_attend"]


def append_and_attend(query: Any, pending: Pending, plan: Any, options: AttentionOptions) -> Any:
    """Append pending rows, unless an earlier call has, and attend over their layer.

    Parameters
    ----------
    query : tensor (batch, num_q_heads, T, head_dim)
        Queries of the new columns.
    pending : Pending
        From `numkv.transformers.layers.NumkvLayer.update`.
    plan : Plan
        Of this forward pass.
    options : AttentionOptions
        Scale, soft cap and sinks, checked.

    Returns
    -------
    tensor (batch, T, num_q_heads, head_dim_v)
    """
    q = _by_token(query, "query")
    step, pool = _append(q, pending, plan)
    window = plan.seen.window - 1
    options = options._replace(window_left=window if step.ranges is None else -1)
    chosen = q if step.queries is None else q[step.queries]
    found = attend(pool, step.table, chosen, step.lengths, step.starts, options, ranges=step.ranges)
    out = tensor_of(found)
    if step.queries is not None:  # the others are padding, and see nothing
        whole = out.new_zeros((q.shape[0], *out.shape[1:]))
        whole[tensor_of(step.queries)] = out
        out = whole
    batch, heads, columns, _ = query.shape
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
    v = _new_rows(pending.values, pool.v_kind, "value_states")
    k, v = pool.check_rows(k, v, check_finite=True)
    pool = layer.make_room(step)
    pool.scatter(k, v, step.slots)
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
