"""Attention over a paged pool (a contiguous cache is one with long blocks), on the CPU.

For query row (token t, q head h) at position ``p = seq_len - T + t`` and kv head ``g = h // group``::

    score[j] = soft_cap(sm_scale * q[t, h] . k[slot(j), g])       for p - window_left <= j <= p
    out[t, h] = sum over j of softmax(score)[j] * v[slot(j), g]

The unit of work is an item: one or several kv heads of one sequence, one block of query tokens and one split of the KV
range. A block of query tokens has all q heads of each group. Splits are merged afterwards in order, as in
Flash-Decoding (Dao et al., 2023). Heads do not mix. Split boundaries depend on the sequence's own length and window
alone.

=============  =============================================================================================
`driver`       the kernel: a loop over items and their tiles, the same for all kinds
`steps`        the kernels that the driver calls: code that depends on kinds, each made at its first use
`state`        what the driver passes to steps: a call's arguments, the layout of scratch memory
`plan`         the items of a call
`offsets`      tables of the places of a tile's rows
`bound`        the kernel of bound calls, which writes rows and calls the attention kernel
`engines`      which engine attends over which kinds
`vector`       few query rows in vector code; the tokens that they see, by ranges or masks
`sides`        its sides of K and of V: in floats, in integers or in pairs of bf16; scales of a tile's tokens
`many_rows`    many query rows in vector code
`amx`          Intel's matrix unit
`store`        results of an item; the merge of splits
`llvm`         arithmetic in LLVM
`records`      sizes and records that these share
=============  =============================================================================================

Every engine has the same steps: load queries, scores, softmax, accumulate. Then results are stored.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
from numba import types

from numkv.kernels.builder import WORDS, array, build
from numkv.kernels.cpu import overlap
from numkv.kernels.cpu.attention.bound import (
    BoundKernel,
    StepRecord,
    make_append_attend,
    make_append_attend_at,
)
from numkv.kernels.cpu.attention.driver import (
    NEEDS_COPY,
    NEEDS_THREADS,
    driver_kernel,
    entry,
    plan_kernel,
)
from numkv.kernels.cpu.attention.engines import compute_for, use_amx
from numkv.kernels.cpu.attention.offsets import WORKER_INTS
from numkv.kernels.cpu.attention.plan import plan_size
from numkv.kernels.cpu.attention.records import BY_SLOT, TILE_UNIT, float_type
from numkv.kernels.cpu.attention.state import MERGE
from numkv.kernels.cpu.attention.steps import Steps, steps_for
from numkv.kernels.cpu.channel import groups_kernel
from numkv.kernels.cpu.merge import states_kernel
from numkv.kernels.cpu.threads import in_turn, launched, num_threads, offer, start
from numkv.kernels.cpu.vectors.arrays import kernel_address
from numkv.kernels.operations import Operations, implements
from numkv.kernels.scratch import Workspaces, aligned
from numkv.kinds import kind

__all__ = ["append_attend", "attend"]


def _steps(q_kind: str, k_kind: str, v_kind: str, compute: str, masked: bool = False) -> Steps:
    """Return the engine's steps; the matrix unit does not support masks."""
    with_amx = not masked and _use_amx(k_kind, v_kind, compute)
    return steps_for(q_kind, k_kind, v_kind, compute, with_amx)


_use_amx = functools.cache(use_amx)
_compute_for = functools.cache(compute_for)


_workspaces = Workspaces(lambda size, dtype: aligned(np.empty, (size,), dtype))


@functools.lru_cache(maxsize=256)
def _engine(q_kind, k_kind, v_kind, masked, *extents):
    """Return the kernel that Python calls, the engine's steps, the float type, and `Steps.sizes` of these extents."""
    compute = _compute_for(q_kind, k_kind, v_kind, masked)
    real, steps = float_type(compute), _steps(q_kind, k_kind, v_kind, compute, masked)
    return entry(q_kind, k_kind, v_kind, real), steps, real, *steps.sizes(*extents)


@functools.lru_cache(maxsize=64)
def _ints_for(num_seqs, most):
    """Return the integers of a plan, those of so many workers included."""
    return plan_size(num_seqs) + most * WORKER_INTS


# Few lookups: between calls the CPU's caches have dropped code and objects, and to load them again is what a small call
# costs.
@implements(Operations.attend)
def attend(
    q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, block_table, seq_lens, q_starts, ranges,
    by_slot, sm_scale, logits_soft_cap, window_left, sinks, out, lse,
):  # fmt: skip
    _, q_heads, dim = q.shape
    kernel, steps, real, sizes_at, size, _ = _engine(
        q_kind, k_kind, v_kind, ranges.shape[1] > 2, dim, out.shape[2], q_heads // k.shape[1]
    )
    memory = _workspaces.borrow()
    try:
        while True:
            most, launch = offer()
            ints = memory.take("int64", _ints_for(len(seq_lens), most))
            floats = memory.take(real, size)
            needs = in_turn(
                kernel, q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges,
                BY_SLOT if by_slot else 0, sm_scale, logits_soft_cap, window_left, sinks, out, lse, floats, ints,
                sizes_at, most, launch,
            )  # fmt: skip
            if not needs:
                break
            if needs == NEEDS_THREADS:
                start()
            elif needs == NEEDS_COPY:
                q = q.copy()
            elif needs < 0:
                size = -needs
            else:
                steps.make(needs)
    finally:
        _workspaces.give_back(memory)


@implements(Operations.append_attend)
@functools.cache
def append_attend(q_kind, rows_kind, k_kind, v_kind, by_address=False, in_full=None):
    by_channel = kind(k_kind).group_tokens > 0
    compute = _compute_for("fp32" if by_channel else q_kind, k_kind, v_kind)
    if by_channel and (in_full is None or "fp64" in (q_kind, rows_kind, v_kind, *in_full)):
        return None  # parts of which are merged in their own precision
    real = float_type(compute)
    driver_kernel()
    words = [WORDS[name] for name in (q_kind, rows_kind, rows_kind)]
    arrays = [array(word, 3) for word in words] + [array(words[0], 3, out=True)]
    if by_address:
        maker, arrays = make_append_attend_at, [types.int64] * 4
    else:
        maker = make_append_attend
    overlap.provide()
    label = f"append_attend, rows {rows_kind}, q {q_kind}, K {k_kind}, V {v_kind}"
    part = addresses = None
    if by_channel:
        label += ", newest {} and {}".format(*in_full)
        part = _bound(None, q_kind, rows_kind, *in_full, compute, True)

        def addresses():
            made = groups_kernel(in_full[0], k_kind), states_kernel("fp32")
            return tuple(map(kernel_address, made))

    call = build(
        maker, (types.int64, types.int64, *arrays, types.int64),
        args=(q_kind, rows_kind, k_kind, v_kind, real, *(in_full if by_channel else (k_kind, v_kind))),
        label=label, emit=types.int64,
    )  # fmt: skip
    made = _bound(call, q_kind, rows_kind, k_kind, v_kind, compute, by_channel)
    return made._replace(in_full=part, addresses=addresses)


def _bound(call, q_kind, rows_kind, k_kind, v_kind, compute, by_ranges):
    """Return the `BoundKernel` for these kinds, which makes records for a compiled function or for one part of it."""
    taken = "fp32" if by_ranges else q_kind  # parts are merged in float32
    real, steps = float_type(compute), _steps(taken, k_kind, v_kind, compute)
    most_threads, of_k = numba.config.NUMBA_NUM_THREADS, kind(k_kind)

    def plan(step: StepRecord, window_left: int, block_size: int) -> tuple[int, int]:
        of = step.extents
        steps.expect(
            int(np.diff(step.q_starts).max(initial=0)) * (of.num_q_heads // of.num_kv_heads)
        )
        workers, parts = plan_kernel()(
            step.seq_lens, step.q_starts, step.ranges, window_left, of.max_blocks * block_size, block_size,
            of.num_kv_heads, of.num_q_heads // of.num_kv_heads, steps.max_rows,
            of_k.words_per_row(of.dim) * of_k.word.itemsize, of.dim + of.dim_v, most_threads, step.ints(),
        )  # fmt: skip
        if parts:
            steps.make(1 << MERGE)
        return (min(workers, num_threads()) if workers > 1 else 1), parts

    itemsizes = (WORDS[q_kind].bitwidth // 8, WORDS[rows_kind].bitwidth // 8)
    return BoundKernel(
        call, itemsizes, real, kind(taken).word, most_threads, steps.sizes, plan, TILE_UNIT, launched, by_ranges,
    )  # fmt: skip
