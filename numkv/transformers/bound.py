"""Bound layers: rows appended and queries answered by one compiled call, which gets no more than addresses.

A model's layers differ in their buffers alone. What they share, the plan of a forward pass and the memory in which it
is computed, is made by the first layer of a pass (`prepared`); a layer's own record stays until its buffers, scale,
soft cap or sinks are others. What is left for a layer are a few comparisons: in a model, whose weights pass through the
CPU's caches between two layers, Python code takes about five times as long as in a loop of its own.

It is for passes of few tokens without new padding. Everything else goes through `numkv.transformers.append_attend`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from numkv.attention.attend import check_sinks
from numkv.attention.options import check_options
from numkv.kinds import QUERY_DTYPES, kind_of_dtype
from numkv.storage.buffer import source_dtypes
from numkv.storage.pool import Pool
from numkv.torch.tensors import array_of, tensor_of
from numkv.transformers.books import Step

_ALWAYS = np.ones(1, np.int64)  # whoever replaces buffers binds anew


class Groups(dict[tuple[Any, ...], "Group"]):
    """The groups of a cache's layers; a copy of the cache makes its own, as they hold addresses."""

    def __deepcopy__(self, memo: Any) -> Groups:
        return Groups()

    def __reduce__(self) -> Any:
        return Groups, ()


class Group:
    """What layers of the same kinds and sizes share.

    Attributes
    ----------
    kernel : BoundKernel
        Of their kinds, for addresses.
    plan : Plan
        The forward pass that it is prepared for.
    before : Books
        What layers hold that have not been called in this pass.
    step : Step
        What the pass does to them.
    moves : bool
        Whether it changes or copies buffers.
    after : Books
        What they hold then.
    dtype : torch.dtype
        Of all tensors of a call.
    shape_q, shape_k, shape_v, shape_out : torch.Size or tuple of int
        Their shapes in this pass.
    address, workers : int
        Of the record of the pass, and how many threads a call takes.
    """

    __slots__ = (
        "_memory", "_table", "_tiles", "address", "after", "before", "dtype", "kernel", "moves", "plan", "shape_k",
        "shape_out", "shape_q", "shape_v", "step", "workers",
    )  # fmt: skip

    def __init__(self, kernel: Any, dtype: Any) -> None:
        self.kernel, self.dtype = kernel, dtype
        self.plan: Any = None
        self.before: Any = None
        self._memory: Any = None
        self._table: Any = None
        self._tiles: Any = (
            None  # of each sequence, as the memory is planned for; None if it has to be planned
        )

    def prepare(self, plan: Any, step: Step, query: Any, keys: Any, values: Any) -> None:
        """Plan a pass; what is planned for the last one stays as far as it can."""
        self.plan = None  # until it is done
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
        # Splits depend on how many KV tiles there are; with a window, which moves, on more than that.
        tiles, window = -(-step.lengths // self.kernel.kv_tile), step.seen.window - 1
        if window >= 0 or self._tiles is None or (tiles != self._tiles).any():
            self._tiles = None
            memory.q_starts[:] = step.starts
            memory.plan(window, step.before.block_size, 0, 0)
            self._tiles = tiles
        self.address, self.workers = memory.address, memory.workers
        self.shape_q, self.shape_k, self.shape_v = query.shape, keys.shape, values.shape
        self.shape_out = (batch, columns, q_heads, dim_v)
        self.before, self.after, self.step = step.before, step.after, step
        grows = step.num_blocks != step.before.num_blocks
        self.moves = grows or step.copies is not None or step.shrink is not None
        self.plan = plan


class BoundLayer:
    """A layer with what a model asks of its attention.

    Parameters
    ----------
    group : Group
        Its group.
    pool : Pool
        Its buffers.
    window : int
        Tokens that one sees, its own included; 0 for all.
    scaling, softcap, s_aux : float, float and tensor (num_q_heads,), or None
        As a model hands them on.
    num_q_heads : int
        Q heads.

    Attributes
    ----------
    address : int
        Of its record.
    sinks : tensor (num_q_heads,) or None
        Memory for sinks, which a model may change between two passes.
    """

    __slots__ = ("_record", "address", "group", "pool", "s_aux", "scaling", "sinks", "softcap")

    def __init__(
        self, group: Group, pool: Pool, window: int, scaling: Any, softcap: Any, s_aux: Any, num_q_heads: int
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
        self.address = self._record.address
        self.group, self.pool = group, pool
        self.scaling, self.softcap, self.s_aux = scaling, softcap, s_aux


def prepared(
    query: Any, pending: Any, plan: Any, scaling: Any, softcap: Any, s_aux: Any
) -> BoundLayer | None:
    """Prepare a pass for a layer and those like it, and bind the layer if it is not bound to this.

    Parameters
    ----------
    query, pending, plan
        See `numkv.transformers.append_attend.at_once`.
    scaling, softcap, s_aux
        See `BoundLayer`.

    Returns
    -------
    BoundLayer or None
        None where the pass needs more than the compiled call does; then nothing has changed.
    """
    layer, keys, values = pending.layer, pending.keys, pending.values
    books, pool = layer.books, layer.pool
    if books is None or pending.done is not None or plan.whole is not plan:
        return None
    if pool.rotate or layer.recent is not None:
        return None
    if not _fits(query, keys, values, books.batch, pool):
        return None
    step = plan.step(books, keep=layer.record_past)
    if step.new is not None or step.queries is not None or step.ranges is not None:
        return None
    bound: BoundLayer | None = layer.bound
    num_q_heads, window = query.shape[1], step.seen.window
    key = (
        query.dtype, pool.k_kind.name, pool.v_kind.name, *keys.shape[1:4:2], values.shape[3], num_q_heads,
        books.block_size, window,
    )  # fmt: skip
    groups = layer.options.groups
    group = groups.get(key)
    if group is None:
        kind = kind_of_dtype(array_of(keys[:0], "key_states").dtype)
        if kind is None or not _can_be_stored(kind.dtype, pool):
            return None
        name = kind.name
        kernel = pool.target.ops.append_attend(
            name, name, pool.k_kind.name, pool.v_kind.name, by_address=True
        )
        group = groups[key] = Group(kernel, query.dtype)
    if group.plan is not plan or group.before is not books:
        group.prepare(plan, step, query, keys, values)
    if group.moves:
        pool = layer.make_room(step)
    if (
        bound is None or bound.group is not group or bound.pool is not pool
        or scaling != bound.scaling or softcap != bound.softcap or s_aux is not bound.s_aux
    ):  # fmt: skip
        bound = BoundLayer(group, pool, window, scaling, softcap, s_aux, num_q_heads)
        layer.bound = bound
    return bound


def _fits(query: Any, keys: Any, values: Any, batch: int, pool: Pool) -> bool:
    """Whether tensors are those of a pass of few tokens over these buffers."""
    if not query.ndim == keys.ndim == values.ndim == 4:
        return False
    heads, columns, dim = int(pool.k.shape[1]), query.shape[2], pool.head_dim
    num_q_heads = query.shape[1]
    of_token = max(num_q_heads, heads) * max(dim, pool.head_dim_v)
    fits: bool = (
        query.dtype == keys.dtype == values.dtype
        and query.shape == (batch, num_q_heads, columns, dim)
        and keys.shape == (batch, heads, columns, dim)
        and values.shape == (batch, heads, columns, pool.head_dim_v)
        and 0 < batch * columns * of_token < pool.target.small_call
        and num_q_heads % heads == 0
    )
    return fits


def _can_be_stored(dtype: Any, pool: Pool) -> bool:
    taken = (QUERY_DTYPES, source_dtypes(pool.k_kind), source_dtypes(pool.v_kind))
    return all(dtype in dtypes for dtypes in taken)
