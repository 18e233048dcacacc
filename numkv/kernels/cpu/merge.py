"""Merge two attention results over disjoint parts of a KV range, on the CPU.

With natural logs of sums of exponentials a and b, and ``m = max(a, b)``::

    out = (exp(a - m) out_a + exp(b - m) out_b) / (exp(a - m) + exp(b - m)),   lse = m + log(exp(a - m) + exp(b - m))

Ye et al., "Cascade Inference" (FlashInfer, 2024). Where both parts saw nothing, the result is 0 and -inf.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import WORDS, array, build
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind as kind_of
from numkv.rows.convert import codec
from numkv.rows.softmax import merge_weights


def make_merge(KIND, COMPUTE):
    """The kernel for outputs of a float kind."""
    load, store = codec(KIND, COMPUTE)
    F = np.float32 if COMPUTE == "float32" else np.float64

    def kernel(o_a, lse_a, o_b, lse_b, out, lse):
        for t in range(out.shape[0]):
            for h in range(out.shape[1]):
                weight_a, weight_b, lse[t, h] = merge_weights(lse_a[t, h], lse_b[t, h])
                for d in range(out.shape[2]):
                    # A part that saw nothing has weight 0; its row is not read, so it may hold anything.
                    value = F(0) if weight_a == 0 else F(weight_a) * load(o_a[t, h, d])
                    if weight_b != 0:
                        value += F(weight_b) * load(o_b[t, h, d])
                    out[t, h, d] = store(value)

    return kernel


def signature_of_states(kind: str) -> tuple[Any, ...]:
    """Types of the arguments of the kernel that merges outputs of a kind."""
    o, lse = array(WORDS[kind], 3), array(types.float32, 2)
    return o, lse, o, lse, array(WORDS[kind], 3, out=True), array(types.float32, 2, out=True)


@functools.cache
def states_kernel(kind: str) -> Any:
    """Return the kernel that merges outputs of a kind."""
    compute = kind_of(kind).compute.name
    return build(
        make_merge, signature_of_states(kind), args=(kind, compute), label=f"merge, {kind}", emit=types.none,
    )  # fmt: skip


@implements(Operations.merge_states)
def merge_states(o_a, lse_a, o_b, lse_b, kind, out, lse):
    states_kernel(kind)(o_a, lse_a, o_b, lse_b, out, lse)
