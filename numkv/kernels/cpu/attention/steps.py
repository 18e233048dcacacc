"""The steps of an engine: kernels of their own, which the driver calls by addresses in a table.

A step is compiled when a call first needs it. Each table belongs to the kinds of queries, K and V, the computing dtype,
and whether a matrix unit is used. Most steps depend on fewer of these, and serve several tables. Addresses are those of
this process, so they never appear in code, which outlives it on disk.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import build
from numkv.kernels.cpu.attention import state
from numkv.kernels.cpu.attention.amx import end_amx, leave_amx, make_amx_attend, make_amx_load
from numkv.kernels.cpu.attention.engines import by_panels, in_integers, panels_from, query_rows
from numkv.kernels.cpu.attention.many_rows import (
    attend_many,
    make_adjust_many,
    make_load_many,
    make_multiply,
    make_put_keys,
    make_put_values,
    make_weigh,
)
from numkv.kernels.cpu.attention.records import KV_TILE, PAIRS, TILE_UNIT, float_type
from numkv.kernels.cpu.attention.sides import make_gather_turn
from numkv.kernels.cpu.attention.state import lay_out
from numkv.kernels.cpu.attention.store import make_merge_splits, make_store
from numkv.kernels.cpu.attention.vector import (
    attend_few,
    attend_picked,
    make_adjust,
    make_load,
    make_rows,
)
from numkv.kernels.cpu.vectors.arrays import kernel_address
from numkv.kernels.cpu.vectors.features import LOCALITY, row_unroll
from numkv.kinds import kind as kind_named

# How many numbers steps accept after the address of the state, or of the call's record.
_NUMBERS = {
    state.OF_1: 6, state.OF_2: 6, state.OF_4: 6, state.OF_8: 6, state.ADJUST: 5, state.PUT_KEYS: 1,
    state.PUT_VALUES: 2, state.MULTIPLY: 4, state.ADJUST_MANY: 3, state.WEIGH: 6, state.MERGE: 3,
}  # fmt: skip
#: The steps that every call needs: made together, at the first call.
_ALWAYS = (state.LOAD, state.GATHER, state.STORE)
_NEVER = 1 << 62


class Steps:
    """The steps for the kinds of queries, K and V, a computing dtype, and use of a matrix unit.

    Attributes
    ----------
    max_rows : int
        Query rows of an item at most.
    """

    def __init__(self, q_kind: str, k_kind: str, v_kind: str, compute: str, with_amx: bool) -> None:
        # Weights of queries in bf16 have one part.
        self._with_amx, self._weight_parts = with_amx, 1 if compute == PAIRS else 2
        # With a matrix unit, vector code computes in floats: on an Intel Xeon decode in pairs took 0.99 to 1.14 of that
        # time.
        compute = float_type(compute) if with_amx else compute
        self._q_kind, self._kinds = q_kind, (k_kind, v_kind, compute)
        self._panels = not with_amx and by_panels(k_kind, v_kind, compute, True)
        self.max_rows = query_rows(k_kind, v_kind, compute, not with_amx)
        self._making = threading.RLock()
        self._kept: list[Any] = []
        self._table = np.zeros(state.NUM_STEPS, np.int64)
        self._table[state.AT_ONCE] = row_unroll(compute)
        self._table[state.MOST_ROWS] = self.max_rows
        self._table[state.MANY_FROM] = (
            panels_from(k_kind, v_kind, compute) if self._panels else _NEVER
        )
        of_k, of_v = kind_named(k_kind), kind_named(v_kind)
        self._table[state.K_SCALED] = of_k.group_tokens or of_k.has_scales
        self._table[state.V_SCALED] = of_v.has_scales
        # Scales and weights of INT4's groups take as much memory as codes. Prefetched rows in an L1 cache alone leave
        # it in turns of 256 tokens: with 128, D takes 0.97 of the time on a Zen 5 (`python -m perf against`).
        grouped = of_k.group_size or of_v.group_size
        longest = KV_TILE // 2 if grouped and LOCALITY == 0 else KV_TILE
        # Scales by channel are those of the tokens of a unit.
        self._table[state.LONGEST] = TILE_UNIT if of_k.group_tokens else longest
        self._table[state.SHORT_IF_LARGE] = with_amx or self._panels
        if not (of_k.has_scales or of_v.has_scales):
            self._table[state.GATHER] = state.NOTHING
        if not with_amx:
            self._table[[state.LEAVE, state.END]] = state.NOTHING
        if not self._panels:
            self._table[state.LOAD_MANY] = state.NOTHING
        self.sizes = functools.lru_cache(maxsize=64)(self._sizes)

    def make(self, missing: int) -> None:
        """Make the steps whose bits are set in a number, and those that every call needs."""
        wanted = {step for step in range(state.LOAD, state.NUM_STEPS) if missing >> step & 1}
        with self._making:
            for step in sorted(wanted | set(_ALWAYS)):
                if self._table[step] == 0:
                    kernel = self.kernel(step)
                    self._kept.append(kernel)
                    self._table[step] = kernel_address(kernel)

    def expect(self, rows: int) -> None:
        """Make the steps that items of so many query rows of a kv head need, unless V has NaN or infinity."""
        wanted = {state.ATTEND}
        if self._panels and rows >= self._table[state.MANY_FROM]:
            wanted = {
                state.ATTEND_MANY, state.LOAD_MANY, state.PUT_KEYS, state.PUT_VALUES, state.MULTIPLY, state.WEIGH
            }  # fmt: skip
        elif not self._with_amx:
            most = int(self._table[state.AT_ONCE])
            for taken in {min(rows, most), rows % most or most}:
                wanted.add(state.OF_1 + (taken > 1) + (taken > 2) + (taken > 4))
        if any(self._table[step] == 0 for step in (*wanted, *_ALWAYS)):
            self.make(sum(1 << step for step in wanted))

    def _sizes(self, dim: int, dim_v: int, group: int) -> tuple[int, int, Any]:
        """Return the address of a record of sizes, the floats of a worker, and the record.

        The sizes are for so many elements of a K row and of a V row, and q heads of a kv head. The caller keeps the
        record as long as its address is used.
        """
        k_kind, v_kind, compute = self._kinds
        places = lay_out(
            k_kind, v_kind, in_integers(k_kind, compute), self._with_amx, self._panels, compute == PAIRS,
            (dim, dim_v, group),
        )  # fmt: skip
        found = np.append(places, self._table.ctypes.data)
        return found.ctypes.data, int(found[state.FLOATS_EACH]), found

    def kernel(self, step: int) -> Any:
        """Return the kernel of a step, compiled at the first call."""
        q_kind, (k_kind, v_kind, compute) = self._q_kind, self._kinds
        of_both = f"K {k_kind}, V {v_kind}, computing in {compute}"
        if self._with_amx and step == state.LOAD:
            label = f"queries in {q_kind} for a matrix unit, K {k_kind}"
            return _compiled(make_amx_load, step, label, (q_kind, k_kind))
        if self._with_amx and step in (state.ATTEND, state.ATTEND_MANY):
            label = f"attention on a matrix unit, {of_both}"
            return _compiled(make_amx_attend, step, label, (k_kind, v_kind, self._weight_parts))
        if step in _ROWS:
            rows = _ROWS[step]
            label = f"attention of {rows} query rows, {of_both}"
            return _compiled(make_rows, step, label, (k_kind, v_kind, compute, rows))
        # All kinds without scales share one kernel that loads queries.
        alike = k_kind if kind_named(k_kind).is_scaled else "fp32"
        maker, args, label = {
            state.LOAD: (
                make_load, (q_kind, alike, compute), f"queries in {q_kind}, K {alike}, computing in {compute}",
            ),
            state.GATHER: (make_gather_turn, (k_kind, v_kind, compute), f"scales, {of_both}"),
            state.STORE: (
                make_store, (q_kind, float_type(compute), kind_named(v_kind).scales_per == "head"),
                f"results in {q_kind}, computing in {compute}",
            ),
            state.FEW: (attend_few, None, "few query rows"),
            state.ATTEND: (attend_few, None, "few query rows"),
            state.ADJUST: (make_adjust, (float_type(compute),), f"caps and biases in {compute}"),
            state.PICK: (attend_picked, None, "masks"),
            state.ATTEND_MANY: (attend_many, None, "many query rows"),
            state.LOAD_MANY: (make_load_many, (2 if compute == PAIRS else 1,), "many queries"),
            state.PUT_KEYS: (make_put_keys, (k_kind, v_kind, compute), f"keys of a tile, {of_both}"),
            state.PUT_VALUES: (make_put_values, (k_kind, v_kind, compute), f"values of a tile, {of_both}"),
            state.MULTIPLY: (make_multiply, (k_kind, v_kind, compute), f"many scores, {of_both}"),
            state.ADJUST_MANY: (make_adjust_many, (), "caps and biases of many query rows"),
            state.WEIGH: (make_weigh, (compute,), f"sums of many query rows in {compute}"),
            state.MERGE: (
                make_merge_splits, (q_kind, float_type(compute)), f"merge of splits, {float_type(compute)} to {q_kind}",
            ),
            state.LEAVE: (leave_amx, None, "the rows that a matrix unit leaves"),
            state.END: (end_amx, None, "the end of a matrix unit's use"),
        }[step]  # fmt: skip
        return _compiled(maker, step, label, args)


_ROWS = {state.OF_1: 1, state.OF_2: 2, state.OF_4: 4, state.OF_8: 8}


def _compiled(maker: Callable[..., Any], step: int, label: str, args: Any) -> Any:
    """Return the kernel of a step, made once for all tables."""
    return _build(maker, 1 + _NUMBERS.get(step, 0), label, args)


@functools.cache
def _build(maker: Callable[..., Any], count: int, label: str, args: Any) -> Any:
    return build(maker, (types.int64,) * count, label=label, args=args, emit=types.int64)


@functools.cache
def steps_for(q_kind: str, k_kind: str, v_kind: str, compute: str, with_amx: bool) -> Steps:
    """Return the steps of an engine: one table in a process."""
    return Steps(q_kind, k_kind, v_kind, compute, with_amx)
