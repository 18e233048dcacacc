"""Write what queries see, as attention takes it, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import array, build
from numkv.kernels.operations import Operations, implements
from numkv.rows.mask import fill_row


def _fill(
    seq_lens, q_starts, ranges, bits, causal, window_left, first, capacity, sinks, slopes, rows, heads
):  # fmt: skip
    for b in range(len(seq_lens)):
        tokens, length = q_starts[b + 1] - q_starts[b], min(seq_lens[b], capacity)
        for i in range(tokens):
            fill_row(
                rows, q_starts[b] + i, i, tokens, length, causal, window_left, first, ranges, bits
            )
    half = len(heads) // 2
    for h in range(half):
        heads[h] = sinks[h] if len(sinks) > 0 else -np.inf
        heads[half + h] = slopes[h]


@functools.cache
def _fill_mask(real: str) -> Any:
    index, table, reals = (
        array(types.int64, 1), array(types.int64, 2), array(getattr(types, real), 1)
    )  # fmt: skip
    signature = (
        index, index, table, array(types.uint32, 2), types.int64, types.int64, types.int64, types.int64, reals, reals,
        array(types.int64, 2, out=True), array(getattr(types, real), 1, out=True),
    )  # fmt: skip
    return build(_fill, signature, label=f"fill_mask, computing in {real}", emit=types.none)


@implements(Operations.fill_mask)
def fill_mask(
    seq_lens, q_starts, ranges, bits, causal, window_left, first, capacity, sinks, slopes, rows, heads
):  # fmt: skip
    given = causal, window_left, first, capacity, sinks, slopes, rows, heads
    _fill_mask(heads.dtype.name)(seq_lens, q_starts, ranges, bits, *given)
