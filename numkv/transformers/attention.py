"""The attention function ``numkv``: numkv's kernels over a `NumkvCache`, transformers' own attention without one.

Passes of few tokens without new padding append rows and answer queries by one compiled call, which gets no more than
addresses (`at_once`). A model's layers differ in their buffers alone. The first layer of a forward pass makes the plan
and the memory that all layers share (`prepared`). A layer's own record stays until its buffers, scale, soft cap or
sinks change. Each layer then needs only a few comparisons. Between two layers, a model's weights pass through the CPU's
caches. Python code therefore runs about 5x slower there than in a loop of its own. Everything else goes through
`append_and_attend`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from numkv.access import writes
from numkv.attention.attend import attend, check_queries, check_sinks
from numkv.attention.options import CheckedOptions, check_options
from numkv.errors import NotSupported
from numkv.kinds import QUERY_DTYPES, Kind, kind_of_dtype
from numkv.storage.buffer import source_dtypes
from numkv.storage.pool import Pool
from numkv.torch.tensors import array_of, tensor_of
from numkv.transformers.forward_pass import PASS
from numkv.transformers.full_precision import GroupsOfStep, NewestTokenGroups
from numkv.transformers.internals import own_attention, sdpa_attention_forward
from numkv.transformers.layers import LatentRows, NumkvLayer, Pending, Rows
from numkv.transformers.masks import Plan
from numkv.transformers.metadata import Step

_Tensor, _empty, _CPU = torch.Tensor, torch.empty, torch.device("cpu")
# Constant, because a layer whose buffers are replaced is bound again.
_ALWAYS = np.ones(1, np.int64)


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
        The return value of the cache's `update`, or all of K and V without a cache.
    attention_mask : Plan
        A plan of `numkv.transformers.masks.plan_of_mask`.
    dropout : float
        Dropout, only without a `NumkvCache`.
    scaling, softcap, s_aux : optional
        Scale of the scores, soft cap, and sinks ``(num_q_heads,)``.
    **others
        `sliding_window` and other arguments of models, which the mask contains already.

    Returns
    -------
    tensor (batch, T, num_q_heads, head_dim_v)
    None
        Instead of weights.

    Raises
    ------
    NotSupported
        If an option is not supported.
    """
    of_batch = others.get(PASS)
    if of_batch is not None:
        _refuse_more("ContinuousBatch", dropout, others)
        return of_batch.attend(module, query, key, value, scaling, softcap, s_aux), None
    if isinstance(key, Rows):
        return _over_cache(
            key.pending.layer(), query, key, value, attention_mask, dropout, scaling, softcap, s_aux, others
        ), None  # fmt: skip
    return _without_cache(
        module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, others
    ), None


@writes
def _over_cache(
    layer: NumkvLayer, query: Any, key: Any, value: Any, mask: Any, dropout: float, scaling: float | None,
    softcap: float | None, s_aux: Any, others: dict[str, Any],
) -> Any:  # fmt: skip
    """Attend over the rows of a `NumkvCache`, the new ones included."""
    pending = key.pending
    if type(value) is not type(key) or value.pending is not pending:
        raise NotSupported(
            "NumkvCache: expected K and V of one layer, got those of two, or one from elsewhere"
        )
    if type(mask) is not Plan:
        _refuse_mask(mask)
    _refuse_more("NumkvCache", dropout, others)
    keys, values = pending.keys, pending.values
    if not (query.dtype is keys.dtype is values.dtype) and torch.is_autocast_enabled("cpu"):
        # RoPE leaves queries and K in float32; PyTorch's own attention also casts them.
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
        if scaling is None:  # rows of latents do not determine it
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


def _refuse_more(name: str, dropout: float, others: dict[str, Any]) -> None:
    """Raise for options that kernels over a cache do not support."""
    if dropout:
        raise NotSupported(
            f"{name}: expected no dropout, got {dropout}; call model.eval(), or train without this cache"
        )
    if others.get("position_bias") is not None:
        raise NotSupported(f"{name}: expected scores without a position bias, got one")
    if others.get("output_attentions"):
        raise NotSupported(
            f"{name}: expected output_attentions=False, as weights are never made, got True; use "
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
            "attention implementation 'numkv': expected no position bias with a soft cap or sinks"
        )
    if type(mask) is Plan:
        mask = mask.tensor(explicit=True)
    elif mask is None and query.shape[2] > 1:
        raise NotSupported(
            "attention implementation 'numkv': expected a mask with a soft cap or sinks"
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    own = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": sinks}
    return own_attention(module)(module, query, key, value, mask, **own, **others)[0]


# -- by one compiled call


def at_once(query: Any, pending: Pending, plan: Any, scaling: Any, softcap: Any, s_aux: Any) -> Any:
    """`append_and_attend` in one compiled call, as in a pass of one token a sequence.

    Parameters
    ----------
    query, pending, plan
        See `append_and_attend`.
    scaling, softcap, s_aux : float, float and tensor (num_q_heads,), or None
        The model's own arguments.

    Returns
    -------
    tensor (batch, T, num_q_heads, head_dim_v), or None
        None, without any change, if this pass or layer needs `append_and_attend`.
    """
    layer = pending.layer()
    bound, ring = layer.bound, layer.ring
    if not (
        bound is not None and (group := bound.group).plan is plan and layer.metadata is group.before
        and layer.pool is bound.pool and not group.moves
        and (ring is None or (ring.pool is bound.in_full and ring.end is group.end))
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
    out = _empty(shape, dtype=group.dtype, device=_CPU)  # even if the default device is another
    rows = query.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    kernel = group.kernel
    if group.workers == 1:
        failed = kernel.call(bound.address, group.address, *rows, 0)
    else:
        failed = kernel.launched(kernel.call, group.workers, bound.address, group.address, *rows)
    if failed:  # rows that cannot be quantised
        return None
    pending.done = (plan, group.step, bound.pool, ring)
    if ring is not None:
        ring.end = group.end_after
    if group.moves:
        layer.change(group.step.after, group.step.shrink)
    else:
        layer.metadata = group.after
    return out


class Group:
    """The shared state of layers of the same kinds and sizes.

    Attributes
    ----------
    kernel : BoundKernel
        The compiled kernel for their kinds.
    plan : Plan
        The prepared forward pass.
    before : BatchMetadata
        Metadata of layers before this pass.
    step : Step
        Changes of the pass to layers.
    moves : bool
        Whether the pass replaces or copies buffers.
    after : BatchMetadata
        Metadata of layers after this pass.
    dtype : torch.dtype
        Dtype of all tensors of a call.
    shape_q, shape_k, shape_v, shape_out : torch.Size or tuple of int
        Their shapes in this pass.
    address, workers : int
        Address of the record of the pass, and number of threads of a call.
    end, end_after : int64 array (batch,)
        For keys by channel, the first position in full precision before and after the pass; shared by all layers.
    """

    __slots__ = (
        "_memory", "_table", "_tiles", "address", "after", "before", "dtype", "end", "end_after", "kernel", "moves",
        "plan", "shape_k", "shape_out", "shape_q", "shape_v", "step", "workers",
    )  # fmt: skip

    def __init__(self, kernel: Any, dtype: Any) -> None:
        self.kernel, self.dtype = kernel, dtype
        self.plan: Any = None
        self.before: Any = None
        self.end: Any = None
        self.end_after: Any = None
        self._memory: Any = None
        self._table: Any = None
        # KV tiles of each sequence in the present plan of memory; None if there is no plan.
        self._tiles: Any = None

    def prepare(
        self, plan: Any, step: Step, query: Any, keys: Any, values: Any, ring: Any, end_after: Any
    ) -> None:
        """Plan a pass; the last plan is reused as far as possible.

        `ring` and `end_after` are a layer's `NewestTokenGroups` and its next `end`, or None.
        """
        self.plan = None  # until planning has succeeded
        batch, q_heads, columns, dim = query.shape
        heads, dim_v = keys.shape[1], values.shape[3]
        extents = (batch, batch * columns, step.table.shape[1], q_heads, heads, dim, dim_v)
        memory = self._memory
        if memory is None or memory.extents != extents:
            memory = self._memory = self.kernel.step(*extents)
            self._table = self._tiles = None
        if step.table is not self._table:
            memory.block_table[:], self._table = step.table, step.table
        memory.seq_lens[:], memory.slots[:] = step.lengths, step.slots
        # Splits depend on the number of KV tiles; with a window, which moves, also on its place.
        tiles, window = -(-step.lengths // self.kernel.kv_tile), step.seen.window - 1
        if ring is not None:
            self._plan_in_full(step, ring.of_step(step, columns), ring)
            self.end, self.end_after = ring.end, end_after
        if window >= 0 or self._tiles is None or (tiles != self._tiles).any():
            self._tiles = None
            memory.q_starts[:] = step.starts
            memory.plan(window, step.before.block_size, 0, 0)
            self._tiles = tiles
        self.address, self.workers = memory.address, memory.workers
        self.shape_q, self.shape_k, self.shape_v = query.shape, keys.shape, values.shape
        self.shape_out = (batch, columns, q_heads, dim_v)
        self.before, self.after, self.step = step.before, step.after, step
        self.moves = step.copies is not None or step.shrink is not None
        self.plan = plan

    def _plan_in_full(self, step: Step, places: GroupsOfStep, ring: NewestTokenGroups) -> None:
        """Plan the full-precision part of a pass, and its quantisation."""
        memory, older = self._memory, places.older
        part = memory.part_in_full(places.table.shape[1])
        part.block_table[:], part.seq_lens[:] = places.table, places.lengths
        part.q_starts[:] = step.starts
        part.slots[:], part.ranges[:], memory.ranges[:] = places.slots, places.newer, older
        part.plan(-1, int(ring.pool.k.shape[2]), 0, 0)
        memory.quantise(places.groups, places.to_groups, bool((older[:, 0] < older[:, 1]).any()))


class BoundLayer:
    """A layer with the options of its attention.

    Parameters
    ----------
    group : Group
        Its group.
    pool : Pool
        Its buffers.
    window : int
        Tokens that a query sees, its own included; 0 for all.
    scaling, softcap, s_aux : float, float and tensor (num_q_heads,), or None
        The model's own arguments.
    num_q_heads : int
        Number of q heads.
    in_full : Pool or None
        For keys by channel, the pool of the newest groups in full precision.

    Attributes
    ----------
    address : int
        Address of its record.
    sinks : tensor (num_q_heads,) or None
        Memory for sinks, which a model may change between two passes.
    """

    __slots__ = (
        "_record", "address", "group", "in_full", "pool", "s_aux", "scaling", "sinks", "softcap"
    )  # fmt: skip

    def __init__(
        self, group: Group, pool: Pool, window: int, scaling: Any, softcap: Any, s_aux: Any, num_q_heads: int,
        in_full: Any,
    ) -> None:  # fmt: skip
        scale = None if scaling is None else float(scaling)
        options = check_options({"sm_scale": scale, "logits_soft_cap": softcap})
        kernel, sinks = group.kernel, None
        self.sinks = None
        if s_aux is not None:
            given = s_aux.detach().float().numpy()
            compute = np.dtype(kernel.compute)
            sinks = np.array(check_sinks(pool.target, given, compute, num_q_heads, True))
            with torch.inference_mode(False):  # such a tensor can be written to in any mode
                self.sinks = tensor_of(sinks)
        self._record = kernel.layer(
            pool.k, pool.k_scale, pool.v, pool.v_scale, np.empty(0, kernel.compute) if sinks is None else sinks,
            (options.scale(pool.head_dim), options.logits_soft_cap, window - 1), True, None, _ALWAYS,
        )  # fmt: skip
        if in_full is not None:
            self._record.keep_in_full(in_full)
        self.address, self.in_full = self._record.address, in_full
        self.group, self.pool = group, pool
        self.scaling, self.softcap, self.s_aux = scaling, softcap, s_aux


def prepared(
    query: Any, pending: Any, plan: Any, scaling: Any, softcap: Any, s_aux: Any
) -> BoundLayer | None:
    """Prepare a pass for a layer and its group, and bind the layer if necessary.

    Parameters
    ----------
    query, pending, plan
        See `at_once`.
    scaling, softcap, s_aux
        See `BoundLayer`.

    Returns
    -------
    BoundLayer or None
        None, without any change, if the pass needs `append_and_attend`.
    """
    layer, keys, values = pending.layer(), pending.keys, pending.values
    ring, pool = layer.ring, layer.pool
    if layer.metadata is None or pending.done is not None or plan.whole is not plan:
        return None
    if pool.rotate or (ring is not None and (ring.first or not pool.by_channel)):
        return None
    if not _fits(query, keys, values, layer.metadata.batch, pool):
        return None
    step = plan.step(layer)
    metadata, pool = layer.metadata, layer.pool
    if step.new is not None or step.queries is not None or step.ranges is not None:
        return None
    end_after = in_full = kinds = None
    if ring is not None:
        end_after, in_full = ring.after(step), ring.pool
        if end_after is None:
            return None
        kinds = in_full.k_kind.name, in_full.v_kind.name
    bound: BoundLayer | None = layer.bound
    num_q_heads, window = query.shape[1], step.seen.window
    key = (
        query.dtype, pool.k_kind.name, pool.v_kind.name, *keys.shape[1:4:2], values.shape[3], num_q_heads,
        metadata.block_size, window, kinds,
    )  # fmt: skip
    groups = layer.options.shared.groups
    group = groups.get(key)
    if group is None:
        kind = kind_of_dtype(array_of(keys[:0], "key_states").dtype)
        if kind is None or not _can_be_stored(kind.dtype, pool):
            return None
        name = kind.name
        kernel = pool.target.ops.append_attend(
            name, name, pool.k_kind.name, pool.v_kind.name, by_address=True, in_full=kinds
        )
        if kernel is None:
            return None
        group = groups[key] = Group(kernel, query.dtype)
    if group.plan is not plan or group.before is not metadata:
        group.prepare(plan, step, query, keys, values, ring, end_after)
    if ring is not None and ring.end is not group.end:
        if not np.array_equal(ring.end, group.end):
            return None
        ring.end = group.end
    step.copy_blocks(pool)
    if (
        bound is None or bound.group is not group or bound.pool is not pool or bound.in_full is not in_full
        or scaling != bound.scaling or softcap != bound.softcap or s_aux is not bound.s_aux
    ):  # fmt: skip
        bound = BoundLayer(group, pool, window, scaling, softcap, s_aux, num_q_heads, in_full)
        layer.bound = bound
    return bound


def _fits(query: Any, keys: Any, values: Any, batch: int, pool: Pool) -> bool:
    """Return whether tensors are those of a pass of few tokens over these buffers."""
    if not query.ndim == keys.ndim == values.ndim == 4:
        return False
    heads, columns, dim = int(pool.k.shape[1]), query.shape[2], pool.head_dim
    num_q_heads = query.shape[1]
    of_token = max(num_q_heads, heads) * max(dim, pool.head_dim_v)
    return (
        query.dtype == keys.dtype == values.dtype
        and query.shape == (batch, num_q_heads, columns, dim)
        and keys.shape == (batch, heads, columns, dim)
        and values.shape == (batch, heads, columns, pool.head_dim_v)
        and 0 < batch * columns * of_token < pool.target.small_call
        and num_q_heads % heads == 0
    )


def _can_be_stored(dtype: Any, pool: Pool) -> bool:
    taken = (QUERY_DTYPES, source_dtypes(pool.k_kind), source_dtypes(pool.v_kind))
    return all(dtype in dtypes for dtypes in taken)


# -- in steps


def append_and_attend(query: Any, pending: Pending, plan: Any, options: CheckedOptions) -> Any:
    """Append pending rows, unless an earlier call has, and attend over their layer.

    Parameters
    ----------
    query : tensor (batch, num_q_heads, T, head_dim)
        Queries of the new columns.
    pending : Pending
        The result of `numkv.transformers.layers.NumkvLayer.update`.
    plan : Plan
        Plan of this forward pass.
    options : CheckedOptions
        Checked scale, soft cap and sinks.

    Returns
    -------
    tensor (batch, T, num_q_heads, head_dim_v)
    """
    q = _by_token(query, "query")
    step, pool, ring = _append(q, pending, plan, options.scale(query.shape[3]))
    batch, heads, columns, _ = query.shape
    if ring is not None:
        found = ring.attend(pool, step, columns, q, options)
        return tensor_of(found).view(batch, columns, heads, found.shape[2])
    window = plan.seen.window - 1
    options = options._replace(window_left=window if step.ranges is None else -1)
    chosen = q if step.queries is None else q[step.queries]
    found = attend(pool, step.table, chosen, step.lengths, step.starts, options, ranges=step.ranges)
    out = tensor_of(found)
    if step.queries is not None:  # the others are padding, whose output is zero
        whole = out.new_zeros((q.shape[0], *out.shape[1:]))
        whole[tensor_of(step.queries)] = out
        out = whole
    return out.view(batch, columns, heads, out.shape[2])


def _append(q: Any, pending: Pending, plan: Any, sm_scale: float) -> tuple[Step, Pool, Any]:
    """Store pending rows, once for all layers that share them; return the step, the pool, and full-precision copies."""
    if pending.done is not None:
        done, step, pool, in_full = pending.done
        if done is not plan.whole:
            raise NotSupported(
                "NumkvCache: expected layers that share rows to have the same mask, got another one"
            )
        return step if plan.whole is plan else step.of_last(plan.columns), pool, in_full
    if plan.whole is not plan:
        raise NotSupported(
            "NumkvCache: expected a mask of all new columns for rows that are to be stored, got a part"
        )
    layer = pending.layer()
    pool = layer.begin(pending.keys, pending.values)
    check_queries(pool.target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
    step = plan.step(layer)
    pool = layer.pool
    k = _new_rows(pending.keys, pool.k_kind, "key_states")
    v = None if pool.is_latent else _new_rows(pending.values, pool.v_kind, "value_states")
    k, v = pool.check_rows(k, v, check_finite=True)
    step.copy_blocks(pool)
    pool.scatter(k, v, step.slots)
    in_full = None if layer.ring is None else layer.ring.write(k, v, step, pool)
    layer.change(step.after, step.shrink)
    if layer.options.shared.tolerance is not None:
        layer.options.shared.tolerance.look(layer, q, k, pool, step, sm_scale)
    pending.done = (plan, step, pool, in_full)
    return step, pool, in_full


def _new_rows(x: Any, kind: Kind, name: str) -> Any:
    """Return rows in a dtype that a kind can store."""
    rows = _by_token(x, name)
    return rows if rows.dtype in source_dtypes(kind) else _by_token(x.float(), name)


def _by_token(x: Any, name: str) -> Any:
    """Return rows ``(batch * T, heads, dim)`` as an array; most models' layout needs no copy."""
    batch, heads, columns, dim = x.shape
    rows = x.transpose(1, 2).reshape(batch * columns, heads, dim)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    return array_of(rows, name)


def attend_absorbed(
    query: Any, value: Any, pending: Pending, plan: Any, options: CheckedOptions
) -> Any:
    """Append pending latents and attend over them; the weight of K and V multiplies queries and outputs instead.

    Parameters
    ----------
    query : tensor (batch, num_q_heads, T, nope_dim + rotary_dim)
        Queries of the new columns.
    value : tensor (batch, num_q_heads, T, head_dim_v)
        The result of `expand_kv`, of which only the shape is used.
    pending : Pending
        The result of `LatentLayer.update`.
    plan, options
        See `append_and_attend`.

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
            f"NumkvCache: expected a weight {(heads * (nope + dim_v), rank)} from latents to K and V, got {got}; "
            "use another cache for this model"
        )
    of_k, of_v = weight.view(heads, nope + dim_v, rank).split([nope, dim_v], 1)
    absorbed = torch.cat([torch.matmul(query[..., :nope], of_k), query[..., nope:]], -1)
    out = append_and_attend(absorbed, pending, plan, options)
    found = torch.matmul(out.transpose(1, 2), of_v.transpose(1, 2))
    return found.transpose(1, 2)
