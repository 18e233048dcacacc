"""Bound calls of a `PagedKVCache`: batched and ragged, over the steps that `reserve` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numkv.attention.attend import attend
from numkv.attention.options import AttentionOptions
from numkv.caches.bound import BoundAttention, BoundStep, Rows, options_of_layers
from numkv.caches.paged.step import Step
from numkv.caches.paged.store import BlockStore
from numkv.caches.paged.trees import Tree
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.storage.pool import Pool
from numkv.targets.base import Array

_ALWAYS = np.ones(1, np.int64)  # buffers of a pool are never replaced


def bind_paged(
    store: BlockStore, num_q_heads: Any, kind: Any, sm_scale: Any, logits_soft_cap: Any, sinks: Any,
    check_finite: Any,
) -> BoundAttention:  # fmt: skip
    """Bind a `PagedKVCache`; see its `bind`."""
    heads = _of_each("num_q_heads", num_q_heads, store.num_layers, _is_number)
    of_sinks = _of_each("sinks", sinks, store.num_layers, _is_row)
    rows: list[Rows | None] = [None] * store.num_layers
    options: list[AttentionOptions | None] = [None] * store.num_layers
    for layer in sorted(store.layer_pools):
        pool, group = store.place(layer)
        rows[layer] = of_layer = Rows.check(pool, heads[layer], kind, check_finite)
        args = sm_scale, logits_soft_cap, [store.groups[group].window], of_sinks[layer]
        (options[layer],) = options_of_layers([pool], of_layer, *args)
    return BoundPaged(store, rows, options)


def _is_number(x: Any) -> bool:
    """Whether something stands for all layers, as it has no entries of its own."""
    return not (isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) == 1)


def _is_row(x: Any) -> bool:
    """Whether sinks are those of all layers: one for each head."""
    if x is None or getattr(x, "ndim", 2) == 1:
        return True
    return isinstance(x, (list, tuple)) and not any(
        y is None or isinstance(y, (list, tuple)) or getattr(y, "ndim", 0) for y in x
    )


def _of_each(name: str, given: Any, layers: int, is_of_all: Callable[[Any], bool]) -> list[Any]:
    """What a caller gives for each layer, or once for all of them."""
    if is_of_all(given):
        return [given] * layers
    try:
        count = len(given)
    except Exception:  # something that others have words for
        return [given] * layers
    if count != layers:
        raise DimensionMismatch(
            f"`{name}`: expected one for all layers or one for each of {layers}, got {count}",
            expected=layers,
            actual=count,
        )
    return [given[layer] for layer in range(layers)]


class _Plan(NamedTuple):
    """What calls of some layers share in a step: their group, the q heads, a pool like all of theirs."""

    group: int
    num_q_heads: int
    pool: Pool
    kernel: Any
    """The compiled function; None where calls go the ordinary way."""


class BoundPaged(BoundAttention):
    """A bound `PagedKVCache`.

    Layers of one group with as many q heads share a plan in a step. Layers whose queries attend within chunks, and
    those that read another one's rows, go the ordinary way.
    """

    def __init__(
        self, store: BlockStore, rows: list[Rows | None], options: list[AttentionOptions | None]
    ) -> None:
        self._layers = layers = [layer for layer, of in enumerate(rows) if of is not None]
        first = rows[layers[0]]
        assert first is not None
        pools = [store.layer_pools.get(layer) for layer in range(len(rows))]
        super().__init__(pools, first, options)  # type: ignore[arg-type]  # None where there is nothing to call
        self._layers, self._store = layers, store
        self._heads = [0 if of is None else of.num_q_heads for of in rows]
        self._reads = {layer for layer in layers if store.layers.sources[layer] != layer}
        self._plans: list[_Plan] = []
        self._group_of, self._records = [-1] * len(rows), [None] * len(rows)
        numbers: dict[tuple[int, int], int] = {}
        for layer in layers:
            pool, group = store.place(layer)
            key, of_layer = (group, self._heads[layer]), options[layer]
            if key not in numbers:
                numbers[key] = len(self._plans)
                kernel = None if store.groups[group].chunk else self._kernel_of(pool)
                self._plans.append(_Plan(*key, pool, kernel))
            self._group_of[layer] = number = numbers[key]
            kernel = self._plans[number].kernel
            if kernel is not None and layer not in self._reads:
                assert of_layer is not None
                arrays = pool.k, pool.k_scale, pool.v, pool.v_scale
                self._records[layer] = self._record(kernel, pool, arrays, of_layer, None, _ALWAYS)

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
        spare = self._spare() or [None] * len(self._plans)
        memory = [self._planned(step, *each) for each in zip(self._plans, spare, strict=True)]
        made = BoundStep(
            self, step._access, step.num_tokens, memory, self._group_of, step._written, step
        )
        step._bound.append(made._ready)
        return made

    def _kernel_at(self, number: int) -> Any:
        return self._plans[number].kernel

    def _planned(self, step: Step, plan: _Plan, last: Any) -> Any:
        """The plan of some layers in a step, in memory of the step before if that does; None for ordinary calls."""
        pool, heads = plan.pool, plan.num_q_heads
        sizes = heads, int(pool.k.shape[1]), pool.head_dim, pool.head_dim_v
        of_token = max(sizes[:2]) * max(sizes[2:])
        many = step.num_tokens * of_token >= pool.target.small_call
        if plan.kernel is None or many or not step.num_tokens:
            return None
        table = step._tables[plan.group]
        extents = len(table), step.num_tokens, table.shape[1], *sizes
        made = plan.kernel.step(*extents) if last is None or last.extents != extents else last
        made.block_table[:], made.seq_lens[:] = table, step._lens
        made.q_starts[:], made.slots[:] = step._starts, step._slots[plan.group]
        made.plan(self._store.groups[plan.group].window, self._store.block_size, 0, 0)
        return made

    def _check(self, layer: int, tokens: int, q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
        if layer not in self._reads:
            return super()._check(layer, tokens, q, k, v, out)
        for name, x in (("k", k), ("v", v)):
            if x is not None:
                raise NotSupported(
                    f"`{name}`: expected None for layer {layer}, which reads the rows of layer "
                    f"{self._store.layers.sources[layer]}, got {type(x).__name__}"
                )
        q, out = self._check_queries(layer, tokens, q, out)
        return q, None, None, out

    def _append(self, step: BoundStep, layer: int, k: Array, v: Array) -> None:
        if layer in self._reads:
            return
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
        asked = options.sm_scale, options.logits_soft_cap, options.sinks, False, out
        if layer in self._reads:
            return of._attend_here(layer, pool, group, q, *asked)
        try:
            if self._store.groups[group].chunk:
                return of._attend_here(layer, pool, group, q, *asked)
            if self._store.again is not None:
                return of._attend_again(layer, pool, group, q, asked, None)
            return attend(pool, of._tables[group], q, of._lens, of._starts, options)
        except BaseException:
            of._written[layer] = False
            raise

    def _ended(self, step: BoundStep, layer: int) -> str:
        if not step._of.open:
            return "expected an open step, got one that was committed or rolled back"
        if layer not in self._layers:
            return f"`layer`: expected one with rows, got layer {layer}, which has none: see `Step.state`"
        return f"`layer`: expected one that has not been called in this step, got {layer}; call each layer once"
