"""Kernels as users write them, over the arrays of a cache: plain Python functions for ``@njit`` and ``@cuda.jit``."""

import math

from numba.extending import register_jitable

from numkv import device


def lse_of_kind(kind):
    """Make a function that attends by hand: it returns the lse of one query's scores."""
    load, slot_of = device.load_row(kind), device.slot_of

    @register_jitable
    def lse(arrays, query, scale, seq, head, row):
        top, total = -math.inf, 0.0
        for position in range(arrays.context_lens[seq]):
            slot = slot_of(arrays.block_table[seq], position, arrays.k.shape[2])
            if not load(arrays.k, arrays.k_scale, slot, head, row):
                continue
            score = 0.0
            for d in range(row.shape[0]):
                score += query[d] * row[d]
            score *= scale
            if score > top:
                total *= math.exp(top - score)
                top = score
            total += math.exp(score - top)
        return top + math.log(total)

    return lse


def store_of_kind(kind):
    """A function that stores the row of a step's new token."""
    store = device.store_row(kind)

    @register_jitable
    def put(arrays, k, v, token, head):
        slot = arrays.slots[token]
        return store(k[token, head], arrays.k, arrays.k_scale, slot, head) and store(
            v[token, head], arrays.v, arrays.v_scale, slot, head
        )

    return put
