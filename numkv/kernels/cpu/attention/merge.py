"""Merging the parts of sequences whose KV range was split, in order: Flash-Decoding (Dao et al., 2023)."""

from __future__ import annotations

import numpy as np

from numkv.kernels.cpu.attention.plan import plan_of
from numkv.kernels.cpu.attention.records import LN_2, LOG2_E
from numkv.kernels.cpu.vectors.launch import next_item, on_threads
from numkv.rows.softmax import finish, power_of_2

#: What a part has before its sums: a maximum in base 2, and a sum of probabilities.
PART_EXTRA = 2


def make_merge_splits(COMPUTE):
    """The kernel that merges the parts of sequences whose KV range was split, in order."""
    F = np.float32 if COMPUTE == "float32" else np.float64
    TO_BASE_2, TO_BASE_E = LOG2_E, LN_2

    def kernel(q_starts, sinks, out, lse, parts_at, floats, ints, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_seqs, num_q_heads, dim_v = len(q_starts) - 1, out.shape[1], out.shape[2]
        plan = plan_of(ints, num_seqs)
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
                        for d in range(dim_v):
                            sums[d] = weight * part[d]
                    else:
                        for d in range(dim_v):
                            sums[d] += weight * part[d]
                sink = F(sinks[h]) * F(TO_BASE_2) if len(sinks) > 0 else F(-np.inf)
                factor, log_sum = finish(maximum, total, sink, F(TO_BASE_E))
                for d in range(dim_v):
                    out[q_starts[b] + t, h, d] = F(factor) * sums[d]
                lse[q_starts[b] + t, h] = log_sum

    return kernel
