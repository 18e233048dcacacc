"""Store results: an item's own, or a split's part of its sequence's. A last step merges such parts in order.

Parts exist where a KV range was split: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import numpy as np
from numba import types

from numkv.kernels.builder import WORDS
from numkv.kernels.cpu.attention.plan import plan_of
from numkv.kernels.cpu.attention.state import (
    FLOATS,
    INTS,
    LSE,
    OUT,
    PARTS_AT,
    Q_STARTS,
    SINKS,
    V_SCALE,
    call_of,
    floats_reader,
    item_of,
    places_of,
    sizes_of,
)
from numkv.kernels.cpu.convert import scaled_rows
from numkv.kernels.cpu.threads import SERIAL_ELEMENTS
from numkv.kernels.cpu.vectors.arrays import add_multiple, array_reader, int_at, multiply, row_of
from numkv.kernels.cpu.vectors.launch import next_item, on_threads
from numkv.rows.softmax import LN_2, LOG2_E, finish, power_of_2

#: Numbers of a part before its sums: a maximum in base 2, and a sum of probabilities.
PART_EXTRA = 2


def make_merge_splits(Q_KIND, COMPUTE):
    """The step `MERGE`: merge the parts of each sequence whose KV range was split, in order."""
    _, put = scaled_rows(Q_KIND, COMPUTE)
    F = np.float32 if COMPUTE == "float32" else np.float64
    real = getattr(types, COMPUTE)
    rows_at, sums_at, reals_at = (
        array_reader(WORDS[Q_KIND], 3), array_reader(types.float32, 2), array_reader(real, 1)
    )  # fmt: skip
    floats_at, ints_at = array_reader(real, 1, "C"), array_reader(types.int64, 1, "C")
    starts_at = array_reader(types.int64, 1)

    def merge(call, launch, worker, workers):
        q_starts, sinks = starts_at(call, np.int64(Q_STARTS)), reals_at(call, np.int64(SINKS))
        out, lse = rows_at(call, np.int64(OUT)), sums_at(call, np.int64(LSE))
        floats, parts_at = floats_at(call, np.int64(FLOATS)), int_at(call, np.int64(PARTS_AT))
        num_seqs, num_q_heads, dim_v = len(q_starts) - 1, out.shape[1], out.shape[2]
        plan = plan_of(ints_at(call, np.int64(INTS)), num_seqs)
        # Where there is little to merge, this thread does it alone.
        if launch != 0 and plan.first_part[num_seqs] * dim_v >= SERIAL_ELEMENTS:
            on_threads(launch, workers)
            return 0
        part_size = dim_v + PART_EXTRA
        while True:
            seq_head = next_item(plan.next_row)
            if seq_head >= num_seqs * num_q_heads:
                break
            b, h = seq_head // num_q_heads, seq_head % num_q_heads
            if plan.split_len[b] == 0:
                continue
            tokens = q_starts[b + 1] - q_starts[b]
            rows = tokens * num_q_heads
            splits = (plan.first_part[b + 1] - plan.first_part[b]) // rows
            for t in range(tokens):
                start = parts_at + (plan.first_part[b] + t * num_q_heads + h) * part_size
                maximum = F(-np.inf)
                for i in range(splits):
                    maximum = max(maximum, floats[start + i * rows * part_size])
                total = F(0)
                sums = floats[start + 2 : start + part_size]  # the first part's row takes the sum
                for i in range(splits):
                    at = start + i * rows * part_size
                    weight = F(power_of_2(floats[at], maximum))
                    total += weight * floats[at + 1]
                    part = floats[at + 2 : at + part_size]
                    if i == 0:
                        multiply(part, weight, sums)
                    else:
                        add_multiple(part, weight, sums)
                sink = F(sinks[h]) * F(LOG2_E) if len(sinks) > 0 else F(-np.inf)
                factor, log_sum = finish(maximum, total, sink, F(LN_2))
                put(sums, F(factor), row_of(out, (q_starts[b] + t, h)))
                lse[q_starts[b] + t, h] = log_sum
        return 0

    return merge


def make_store(Q_KIND, COMPUTE, BY_HEAD):
    """The step `STORE`: write an item's result or part. With `BY_HEAD` a kv head's V rows share a scale."""
    _, put = scaled_rows(Q_KIND, COMPUTE)
    F = np.float32 if COMPUTE == "float32" else np.float64
    real = getattr(types, COMPUTE)
    rows_at, sums_at, reals_at = (
        array_reader(WORDS[Q_KIND], 3), array_reader(types.float32, 2), array_reader(real, 1)
    )  # fmt: skip
    scales_at, floats_of = array_reader(types.float32, 1), floats_reader(COMPUTE)

    def store(state):
        floats, at = floats_of(state), places_of(state)
        sizes, item = sizes_of(state), item_of(state)
        call = call_of(state)
        out, lse = rows_at(call, np.int64(OUT)), sums_at(call, np.int64(LSE))
        sinks, v_scale = reals_at(call, np.int64(SINKS)), scales_at(call, np.int64(V_SCALE))
        group, num_q_heads, part_size = sizes.group, out.shape[1], sizes.dim_v + PART_EXTRA
        r = np.int64(0)
        for row in range(item.tokens * (item.end_head - item.first_head)):
            t = row % item.tokens
            head = item.first_head + row // item.tokens
            scale = F(v_scale[head]) if BY_HEAD else F(1)
            for h in range(head * group, (head + 1) * group):
                first = at.outputs + r * sizes.pad_v
                o_row = floats[first : first + sizes.dim_v]
                if item.part < 0:
                    sink = F(sinks[h]) * F(LOG2_E) if len(sinks) > 0 else F(-np.inf)
                    factor, log_sum = finish(
                        floats[at.maxima + r], floats[at.sums + r], sink, F(LN_2)
                    )
                    put(o_row, F(F(factor) * scale), row_of(out, (item.first_token + t, h)))
                    lse[item.first_token + t, h] = log_sum
                else:
                    part = (
                        int_at(call, np.int64(PARTS_AT))
                        + (item.part + t * num_q_heads + h) * part_size
                    )
                    floats[part] = floats[at.maxima + r]
                    floats[part + 1] = floats[at.sums + r]
                    multiply(o_row, scale, floats[part + PART_EXTRA : part + part_size])
                r += 1
        return 0

    return store
