"""Bound calls of a `PagedKVCache`: batched and ragged, over the steps that `reserve` makes."""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv.attention.attend import attend
from numkv.attention.options import AttentionOptions
from numkv.caches.bound import BoundAttention, BoundStep, Rows, options_of_layers
from numkv.caches.paged.step import Step
from numkv.caches.paged.store import BlockStore
from numkv.caches.paged.trees import Tree
from numkv.errors import NotSupported, NumkvError
from numkv.targets.base import Array

__all__ = ["BoundPaged", "bind_paged"]

_ALWAYS = np.ones(1, np.int64)  # buffers of a pool are never replaced


def bind_paged(
    store: BlockStore, num_q_heads: int, kind: Any, sm_scale: Any, logits_soft_cap: Any, sinks: Any,
    check_finite: Any,
) -> BoundAttention:  # fmt: skip
    """Bind a `PagedKVCache`; see its `bind`."""
    if not store.layers.plain:
        raise NotSupported(
            "bind: expected layers of one shape and kind, with rows of their own and without chunks; call `append` and "
            "`attention` of the step"
        )
    pools = [store.place(layer)[0] for layer in range(store.num_layers)]
    rows = Rows.check(store.pools[0], num_q_heads, kind, check_finite)
    windows = [store.window_of(layer) for layer in range(store.num_layers)]
    options = options_of_layers(pools, rows, sm_scale, logits_soft_cap, windows, sinks)
    return BoundPaged(store, rows, options)


class BoundPaged(BoundAttention):
    """A bound `PagedKVCache`."""

    def __init__(self, store: BlockStore, rows: Rows, options: list[AttentionOptions]) -> None:
        pools = [store.place(layer)[0] for layer in range(store.num_layers)]
        super().__init__(pools, rows, options)
        self._store = store
        self._group_of = [store.place(layer)[1] for layer in range(store.num_layers)]
        parts = [(pool.k, pool.k_scale, pool.v, pool.v_scale) for pool in pools]
        self._bind([None] * len(pools), parts, _ALWAYS)

    def begin(self, new: Step) -> BoundStep:
        """Begin to write and attend in an open step.

        Parameters
        ----------
        new : Step
            From `numkv.PagedKVCache.reserve`; any number of sequences, with any numbers of new tokens.

        Returns
        -------
        BoundStep
            Called for each layer, which counts as written then. `numkv.PagedKVCache.commit` or `rollback` ends the
            step, and this object with it.

        Raises
        ------
        NumkvError
            If the step has ended, or is another cache's.
        """
        if not isinstance(new, Step) or not new._belongs_to(self._store):
            raise NumkvError(
                "`new`: expected an open step of the bound cache, got "
                f"{'one of another' if isinstance(new, Step) else type(new).__name__}; pass what its `reserve` returned"
            )
        made: list[BoundStep] = []
        new._alone(lambda: made.append(self._begin(new)))
        return made[0]

    def _begin(self, step: Step) -> BoundStep:
        if not step.open:
            raise NumkvError(
                "`new`: expected an open step, got one that was committed or rolled back"
            )
        if step._buffers is not None:
            raise NotSupported(
                "`new`: expected a step in memory of its own, got one that lies in StepBuffers; call its methods"
            )
        Tree.refuse(step._tree, "begin")
        memory: list[Any] = []
        if self._fits_one_call(step.num_tokens):
            spare = self._spare()
            for group in range(len(self._store.groups)):
                table = step._tables[group]
                of_group = self._memory(spare, len(table), step.num_tokens, table.shape[1])
                of_group.block_table[:], of_group.seq_lens[:] = table, step._lens
                of_group.q_starts[:], of_group.slots[:] = step._starts, step._slots[group]
                of_group.plan(self._store.groups[group].window, self._store.block_size, 0, 0)
                memory.append(of_group)
        made = BoundStep(
            self, step._access, step.num_tokens, memory, self._group_of, step._written, step
        )
        step._bound.append(made._ready)
        return made

    def _append(self, step: BoundStep, layer: int, k: Array, v: Array) -> None:
        pool, group = step._of._layer(layer)
        of, slots, check_finite = step._of, step._of._slots[group], self._rows.check_finite
        if pool.target.values_on_host:
            pool.scatter(k, v, slots)
            of._written[layer] = True
            return
        if self._store.again is None:
            of._append_here(layer, pool, slots, k, v, check_finite)
        else:
            of._append_again(layer, pool, group, k, v, check_finite, None)

    def _attend(self, step: BoundStep, layer: int, q: Array, out: Any) -> Any:
        of, (pool, group) = step._of, step._of._layer(layer)
        options = self._options[layer]._replace(out=out)
        try:
            if self._store.again is not None:
                asked = options.sm_scale, options.logits_soft_cap, options.sinks, False, out
                return of._attend_again(layer, pool, group, q, asked, None)
            return attend(pool, of._tables[group], q, of._lens, of._starts, options)
        except BaseException:
            of._written[layer] = False
            raise

    def _ended(self, step: BoundStep, layer: int) -> str:
        if not step._of.open:
            return "expected an open step, got one that was committed or rolled back"
        return f"`layer`: expected one that has not been called in this step, got {layer}; call each layer once"
