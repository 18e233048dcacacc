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
`store`        results of an item; the kernel that merges splits
`llvm`         arithmetic in LLVM
`records`      sizes and records that these share
=============  =============================================================================================

Every engine has the same steps: load queries, scores, softmax, accumulate. Then results are stored.
"""

from __future__ import annotations

import functools
from typing import Any

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
    signature_of_merge,
)
from numkv.kernels.cpu.attention.driver import driver_kernel, entry, plan_kernel
from numkv.kernels.cpu.attention.engines import compute_for, use_amx
from numkv.kernels.cpu.attention.offsets import WORKER_INTS
from numkv.kernels.cpu.attention.plan import (
    LEAST_ROWS,
    MAX_SPLITS,
    MIN_SPLIT,
    SERIAL_WORK,
    plan_size,
)
from numkv.kernels.cpu.attention.records import BY_SLOT, TILE_UNIT, float_type
from numkv.kernels.cpu.attention.steps import Steps, steps_for
from numkv.kernels.cpu.attention.store import PART_EXTRA, make_merge_splits
from numkv.kernels.cpu.channel import groups_kernel
from numkv.kernels.cpu.merge import states_kernel
from numkv.kernels.cpu.threads import launched, num_threads, run
from numkv.kernels.cpu.vectors.arrays import kernel_address
from numkv.kernels.operations import Operations, implements
from numkv.kernels.scratch import Workspaces, aligned
from numkv.kinds import kind

__all__ = ["append_attend", "attend", "small_decode"]


def _steps(q_kind: str, k_kind: str, v_kind: str, compute: str, masked: bool = False) -> Steps:
    """Return the engine's steps; the matrix unit does not support masks."""
    with_amx = not masked and _use_amx(k_kind, v_kind, compute)
    return steps_for(q_kind, k_kind, v_kind, compute, with_amx)


@functools.cache
def _merge_kernel(q_kind: str, compute: str) -> Any:
    label, args = f"merge of splits, {compute} to {q_kind}", (q_kind, compute)
    return build(
        make_merge_splits, signature_of_merge(*args), args=args, label=label, emit=types.none
    )


_use_amx = functools.cache(use_amx)
_compute_for = functools.cache(compute_for)


_workspaces = Workspaces(lambda size, dtype: aligned(np.empty, (size,), dtype))


@implements(Operations.attend)
def attend(
    q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, block_table, seq_lens, q_starts, ranges,
    by_slot, sm_scale, logits_soft_cap, window_left, sinks, out, lse,
):  # fmt: skip
    masked = ranges.shape[1] > 2
    compute = _compute_for(q_kind, k_kind, v_kind, masked)
    real = float_type(compute)
    flags = BY_SLOT if by_slot else 0
    # Results over the queries would leave none for a call that has to start again.
    if np.may_share_memory(out, q):
        q = q.copy()
    kernel = entry(q_kind, k_kind, v_kind, real)
    steps = _steps(q_kind, k_kind, v_kind, compute, masked)
    group, (dim, dim_v) = q.shape[1] // k.shape[1], (q.shape[2], out.shape[2])
    unit = 1 if by_slot else k.shape[2]
    num_seqs, capacity = len(seq_lens), block_table.shape[1] * unit
    sizes_at, scratch, _ = steps.sizes(dim, dim_v, group)
    # The upper bound: asking for the actual number would start the threads, which small calls do not need.
    threads = numba.config.NUMBA_NUM_THREADS
    memory = _workspaces.borrow()
    try:
        ints = memory.take("int64", plan_size(num_seqs) + threads * WORKER_INTS)
        while True:
            workers, parts = plan_kernel()(
                seq_lens, q_starts, ranges, window_left, capacity, unit, k.shape[1], group, steps.max_rows,
                k.shape[3] * k.itemsize, dim + dim_v, threads, ints,
            )  # fmt: skip
            if workers > 1:
                workers = min(workers, num_threads())
            parts_at = workers * scratch
            floats = memory.take(real, parts_at + parts * (dim_v + PART_EXTRA))
            missing = run(
                kernel, workers, q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges,
                flags, sm_scale, logits_soft_cap, window_left, sinks, out, lse, parts_at,
                floats, ints, sizes_at,
            )  # fmt: skip
            if not missing:
                break
            steps.make(missing)
        if parts:
            merge = _merge_kernel(q_kind, real)
            run(merge, workers, q_starts, sinks, out, lse, parts_at, floats, ints)
    finally:
        _workspaces.give_back(memory)


@implements(Operations.small_decode)
@functools.cache
def small_decode(q_kind, k_kind, v_kind):
    compute = compute_for(q_kind, k_kind, v_kind)
    real = float_type(compute)
    no_sinks, no_ranges, starts = np.empty(0, real), np.empty((0, 2), np.int64), np.arange(2)
    ints_size = plan_size(1) + numba.config.NUMBA_NUM_THREADS * WORKER_INTS
    borrow, give_back = _workspaces.borrow, _workspaces.give_back
    steps = _steps(q_kind, k_kind, v_kind, compute)
    sizes = {}

    def size_up(q_heads, heads, dim, dim_v):
        group = q_heads // heads
        sizes_at, each, kept = steps.sizes(dim, dim_v, group)
        per_token = max(group, LEAST_ROWS) * heads * (dim + dim_v)
        if len(sizes) >= _MOST_SIZES:
            sizes.clear()
        long_from = -(-SERIAL_WORK // per_token)
        found = sizes[q_heads, heads, dim, dim_v] = sizes_at, each, long_from, kept
        return found

    # One function with few lookups: between calls the CPU's caches have dropped its code and objects. Loading them
    # again is the cost of a small call.
    def decode(q, k, k_scale, v, v_scale, block_table, seq_lens, length, dim_v, scale):
        if length <= 0:
            return None
        _, q_heads, dim = q.shape
        heads = k.shape[1]
        sizes_at, each, long_from, _ = sizes.get((q_heads, heads, dim, dim_v)) or size_up(
            q_heads, heads, dim, dim_v
        )
        workers = 1 if length < long_from else num_threads()
        # At most so many splits.
        parts = 0 if length <= MIN_SPLIT else min(MAX_SPLITS, -(-length // MIN_SPLIT)) * q_heads
        out, lse = np.empty((1, q_heads, dim_v), q.dtype), np.empty((1, q_heads), np.float32)
        parts_at, memory = workers * each, borrow()
        try:
            ints = memory.take("int64", ints_size)
            floats = memory.take(real, parts_at + parts * (dim_v + PART_EXTRA))
            while True:
                missing = run(
                    entry(q_kind, k_kind, v_kind, real), workers, q, k, k_scale, v, v_scale, block_table,
                    seq_lens, starts, no_ranges, 0, scale, 0.0, -1, no_sinks, out, lse, parts_at, floats, ints,
                    sizes_at, worker=-1,
                )  # fmt: skip
                if not missing:
                    break
                steps.make(missing)
            if parts:
                merge = _merge_kernel(q_kind, real)
                run(merge, workers, starts, no_sinks, out, lse, parts_at, floats, ints)
        finally:
            give_back(memory)
        return out

    return decode


# Sizes that a function for small calls remembers.
_MOST_SIZES = 64


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
        return (min(workers, num_threads()) if workers > 1 else 1), parts

    itemsizes = (WORDS[q_kind].bitwidth // 8, WORDS[rows_kind].bitwidth // 8)
    return BoundKernel(
        call, itemsizes, real, kind(taken).word, most_threads, steps.sizes, plan,
        functools.cache(lambda: kernel_address(_merge_kernel(taken, real))),
        TILE_UNIT, launched, by_ranges,
    )  # fmt: skip
