"""Whoever runs beside numkv: one module for each library, all with the same names in it.

`NAME` is the library and ``versions()`` says what is measured. ``decode(kind)`` and ``prefill(kind)`` are dicts from
the form that runs to a function that takes a problem (`perf.shapes`) and makes a `Contestant`, or raises
`CannotRun` with the reason.

A contestant holds as many separate layers as `perf.shapes.cold_layers` says, all with the same rows: what they hold
does not change the work. Everything but the attention itself (conversion, quantisation, views, bindings) is done
when it is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numba
import numpy as np

from perf.shapes import cold_layers

#: Module of each peer, in the order of the report. They are imported when they are asked for.
PEERS = {
    "torch": "torch_",
    "onnxruntime": "onnxruntime_",
    "openvino": "openvino_",
    "numpy": "numpy_",
}

FLOATS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}

#: Relative L2 errors above these are wrong results, not rounding, by bits of an element of the cache.
LARGEST_ERROR = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 2e-2, "int8": 4e-2, "int4": 0.4}


class CannotRun(Exception):
    """Why a contestant does not take part."""


@dataclass(frozen=True)
class Contestant:
    """Attention over one of several layers.

    `run` takes a layer's number and computes its attention; `floats` turns what it returned into an array shaped as
    the problem's `expected`; `bytes` is what K and V of one layer take in this format, scales included.
    """

    run: Callable[[int], Any]
    floats: Callable[[Any], np.ndarray]
    layers: int
    bytes: int


def threads():
    """The threads that every contestant gets: as many as Numba has."""
    return numba.get_num_threads()


def refuse(reason):
    """Stands for a contestant that there is none of."""

    def make(problem):
        raise CannotRun(reason)

    return make


def nbytes(*arrays):
    """Bytes of one layer: K, V, and whatever is stored beside them."""
    return sum(int(x.nbytes) for x in arrays)


def stacked(x, layers):
    """`layers` copies of `x` in one allocation, on a cache line's boundary: ``(layers, *x.shape)``."""
    room = np.empty(layers * x.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    stack = room[start : start + layers * x.nbytes].view(x.dtype).reshape(layers, *x.shape)
    stack[:] = x
    return stack


def layers_of(*arrays):
    """Enough copies of one layer's arrays to come from memory: a list of stacks."""
    layers = cold_layers(nbytes(*arrays))
    return [stacked(x, layers) for x in arrays]


def float_layers(problem, kind):
    """K and V of a float kind as ``(layers, batch, kv heads, tokens, dim)``.

    All contestants that keep K and V so read the same memory; it is far more than the caches hold.
    """
    kept = problem.__dict__.setdefault("_float_layers", {})
    if kind not in kept:
        kept.clear()
        kept[kind] = layers_of(*(x.astype(FLOATS[kind]) for x in (problem.k, problem.v)))
    return kept[kind]
