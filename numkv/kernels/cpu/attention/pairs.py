"""The engine of bf16 pairs: K and V in bf16 meet queries in bf16, and weights that are rounded to bf16.

CPUs that multiply bf16 do so in pairs of neighbours and add them up in float32, in the time that float32 takes for half
as many. Products of queries and keys are exact; a weight's rounding costs 2**-8 of it at most, as in FlashAttention
(Dao et al., 2022) on a GPU, and results are rounded to bf16 all the same. The softmax scale is left for the scores.
The sides of K and of V are those of `floats`, under the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numkv.kernels.cpu.attention import floats as floats_engine
from numkv.kernels.cpu.attention.llvm.pairs import make_accumulate_pairs, pair_row, pair_weights
from numkv.kernels.cpu.attention.records import PAIRS, Outputs
from numkv.kernels.cpu.inline import inlined

_load_floats = floats_engine.make_loader(PAIRS)


@inlined
def load_query(floats, at, sizes, row, q_row, scale):
    """Put a query row into scratch memory, as pairs."""
    _load_floats(floats, at, sizes, row, q_row, np.float32(1))
    pair_row(floats, at.queries + row * sizes.pad_dim, sizes.pad_dim)
    floats[at.query_scales + row] = scale


def make_keys(next_kind: str, count: int) -> tuple[Callable[..., Any], ...]:
    """``interleave, scores`` for K in bf16; `next_kind` is V's, whose rows are prefetched."""
    return floats_engine.make_keys("bf16", PAIRS, next_kind, count, True)


@functools.cache
def make_values(next_kind: str, count: int) -> Callable[..., Any]:
    """``accumulate`` for V in bf16; `next_kind` is K's, whose rows are prefetched."""
    accumulate_pairs = make_accumulate_pairs(next_kind)
    COUNT = np.int64(count)

    @inlined
    def accumulate(floats, at, sizes, taken, values, begin, end, row, extents):
        pair_weights(COUNT, floats, at.scores, begin, end)
        outputs = Outputs(at.outputs + row * sizes.pad_v, sizes.pad_v, at.rescale)
        accumulate_pairs(COUNT, taken, floats, at.scores, values, begin, end, outputs, extents)

    return accumulate
