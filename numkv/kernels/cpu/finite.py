"""Look for NaN and infinity in rows that are to be quantised, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from numkv.kernels.builder import WORDS, array, build
from numkv.kernels.cpu.vectors.arrays import row_of
from numkv.kernels.operations import Operations, implements
from numkv.rows.convert import codec
from numkv.rows.quantize import is_finite


def make_first_non_finite(KIND):
    """The kernel for rows of a float kind."""
    load, _ = codec(KIND)

    def kernel(rows):
        dim = np.int64(rows.shape[2])
        for t in range(rows.shape[0]):
            for h in range(rows.shape[1]):
                row = row_of(rows, (np.int64(t), np.int64(h)))
                # Counted in integers, whose sum may be taken in any order: vector code.
                bad = np.int64(0)
                for d in range(dim):
                    bad += 0 if is_finite(load(row[d])) else 1
                if bad == 0:
                    continue
                for d in range(dim):
                    if not is_finite(load(row[d])):
                        return (np.int64(t) * rows.shape[1] + h) * dim + d
        return np.int64(-1)

    return kernel


@functools.cache
def _first_non_finite(kind: str) -> Any:
    signature = (array(WORDS[kind], 3),)
    return build(
        make_first_non_finite,
        signature,
        args=(kind,),
        emit=types.int64,
        label=f"first_non_finite, {kind}",
    )


@implements(Operations.first_non_finite)
def first_non_finite(rows, kind):
    return int(_first_non_finite(kind)(rows))
