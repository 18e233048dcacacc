"""Look for NaN and infinity in rows that are to be quantised, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import WORDS, array, build
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import row_of
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.operations import Operations, implements
from numkv.rows.quantize import finite_row


def make_first_non_finite(KIND):
    """The kernel for rows of a float kind: each worker puts the first of its part, or -1, into `found`."""
    all_finite = finite_row(KIND)

    def kernel(rows, found, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        num_tokens, heads, dim = (
            np.int64(rows.shape[0]), np.int64(rows.shape[1]), np.int64(rows.shape[2]),
        )  # fmt: skip
        found[worker] = -1
        for t in range(num_tokens * worker // workers, num_tokens * (worker + 1) // workers):
            for h in range(heads):
                row = row_of(rows, (np.int64(t), np.int64(h)))
                if all_finite(row):
                    continue
                for d in range(dim):
                    if not all_finite(row[d : d + 1]):
                        found[worker] = (t * heads + h) * dim + d
                        return

    return kernel


@functools.cache
def _first_non_finite(kind: str) -> Any:
    signature = (array(WORDS[kind], 3), array(types.int64, 1, out=True), *ON_THREADS)
    label = f"first_non_finite, {kind}"
    return build(make_first_non_finite, signature, args=(kind,), label=label, emit=types.none)


@implements(Operations.first_non_finite)
def first_non_finite(rows, kind):
    workers = workers_for(rows.size)
    found = np.empty(workers, np.int64)
    run(_first_non_finite(kind), workers, rows, found)
    return int(min(found[found >= 0], default=-1))
