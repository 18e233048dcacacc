"""Whoever runs in the race: one module for each library, all with the same names in it.

Each runs in a process of its own (`perf.worker`), and some with an interpreter of their own (`perf.envs`), where
neither Numba nor numkv is installed: so nothing here needs more than NumPy and ml_dtypes.

`NAME` is the library and ``versions()`` says what is measured. ``decode(kind)`` and ``prefill(kind)`` are dicts from
the form that runs to a function that takes a problem (`perf.shapes`) and makes a `Contestant`, or raises
`CannotRun` with the reason.

A contestant holds as many separate layers as `perf.shapes.cold_layers` says, all with the same rows: what they hold
does not change the work. Everything but the attention itself (conversion, quantisation, views, bindings) is done
when it is made.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from perf.shapes import cold_layers

#: Module of each library, in the order of the report. They are imported where they run.
MODULES = {
    "numkv": "numkv_",
    "torch": "torch_",
    "onnxruntime": "onnxruntime_",
    "openvino": "openvino_",
    "vllm": "vllm_",
    "llama.cpp": "llama_cpp_",
    "numpy": "numpy_",
}
PEERS = [name for name in MODULES if name != "numkv"]

#: numkv's own module, name, and the form that others are compared with.
OURS = "numkv"
CONTIGUOUS = ""
#: Its other forms: over blocks, and, in the races of 4 bits, over int8.
PAGED = "paged by 128"
INT8_BESIDE = "over int8"

#: Stands where a kind does, for what is no attention over a problem: the library's `CALLS`, whose makers take nothing.
CALLS = "calls"

FLOATS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}

#: Relative L2 errors above these are wrong results, not rounding, by bits of an element of the cache.
LARGEST_ERROR = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 2e-2, "int8": 4e-2, "int4": 0.4, "code4": 0.4}
#: Kinds that nobody else has, and what of theirs takes part instead: as many bits, whatever they mean.
STANDS_FOR = {"code4": "int4"}
#: Kinds of a race that asks for none: the others are numkv's own variants.
RACED = [kind for kind in LARGEST_ERROR if kind not in STANDS_FOR]


class CannotRun(Exception):
    """Why a contestant does not take part."""


@dataclass(frozen=True)
class Contestant:
    """Attention over one of several layers.

    `run` takes a layer's number and computes its attention; `floats` turns what it returned into an array shaped as
    the problem's `expected`; `bytes` is what K and V of one layer take in this format, scales included.
    `largest_error` stands for that of the kind, where the format or the arithmetic is known to be coarser. `calls` is
    how many calls `run` makes, where one alone is too short for the clock. `pieces` are the bytes that lie side by side
    where K is in blocks in shuffled order: a block's rows of one head, and of all heads.
    """

    run: Callable[[int], Any]
    floats: Callable[[Any], np.ndarray]
    layers: int
    bytes: int
    largest_error: float | None = None
    calls: int = 1
    pieces: tuple[int, ...] = ()


def cores():
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads():
    """The threads that every contestant gets: the race says how many."""
    return int(os.environ.get("NUMKV_PERF_THREADS", 0)) or cores()


def refuse(reason):
    """Stands for a contestant that there is none of."""

    def make(problem):
        raise CannotRun(reason)

    return make


def same_widths(problem):
    """`CannotRun` where K and V have rows of different widths; for libraries that know one width only."""
    if problem.shape.dim_v != problem.shape.dim:
        raise CannotRun("rows of K and V have one width")


def nbytes(*arrays):
    """Bytes of one layer: K, V, and whatever is stored beside them; lists have an array for each sequence."""
    return sum(nbytes(*x) if isinstance(x, list) else int(x.nbytes) for x in arrays)


#: Bytes of a cache line and of its neighbour, which processors fetch with it.
_LINES = 128


def _room(dims, dtype):
    """Zeros on a cache line's boundary; they take memory when they are written."""
    size = int(np.prod(dims)) * np.dtype(dtype).itemsize
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(dims)


def apart(x):
    """A copy of a small array that shares no cache line with other data.

    Calls of ONNX Runtime in int8 took half as much time again while scales and queries did, presumably with counters
    that its threads write; whether they did depended on what its process had allocated before.
    """
    copy = _room((2 * _LINES + x.nbytes,), np.uint8)[_LINES : _LINES + x.nbytes]
    copy = copy.view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def stacked(x, layers):
    """`layers` copies of `x` in one allocation, on a cache line's boundary: ``(layers, *x.shape)``."""
    stack = _room((layers, *x.shape), x.dtype)
    stack[:] = x
    return stack


def layers_of(*arrays):
    """Enough copies of one layer's arrays to come from memory: a list of stacks."""
    layers = cold_layers(nbytes(*arrays))
    return [stacked(x, layers) for x in arrays]


def padded_layers(parts, room):
    """Of each part, a list of ``(heads, tokens, …)``, a stack ``(layers, sequences, heads, room, …)``.

    As many layers as the rows that are there need; what is past a sequence's end is zeros.
    """
    layers = cold_layers(nbytes(*parts))
    stacks = []
    for rows in parts:
        one = rows[0]
        stacks.append(_room((layers, len(rows), len(one), room, *one.shape[2:]), one.dtype))
        for layer in stacks[-1]:
            for to, x in zip(layer, rows, strict=True):
                to[:, : x.shape[1]] = x
    return stacks


def pieces_of(*parts):
    """Layers for libraries without lengths: each a list of pieces that one call attends to, each a tuple of arrays.

    Sequences of one length are one piece, others one each; all with a batch's axis.
    """
    if not isinstance(parts[0], list):
        return [[piece] for piece in zip(*layers_of(*parts), strict=True)]
    layers = cold_layers(nbytes(*parts))
    stacks = [
        [stacked(x[None], layers) for x in of_sequence] for of_sequence in zip(*parts, strict=True)
    ]
    return [[tuple(x[i] for x in of) for of in stacks] for i in range(layers)]


def _as_floats(rows, kind):
    return (
        [x.astype(FLOATS[kind], copy=False) for x in rows]
        if isinstance(rows, list)
        else rows.astype(FLOATS[kind], copy=False)
    )


def _kept(problem, key, make):
    """What all contestants of a process that keep K and V so share; it is far more than the caches hold."""
    kept = problem.__dict__.setdefault("_float_layers", {})
    if key not in kept:
        kept.clear()
        kept[key] = make()
    return kept[key]


def float_layers(problem, kind):
    """K and V of a float kind as ``(layers, batch, kv heads, tokens, dim)``; shared."""

    def make():
        both = [_as_floats(x, kind) for x in (problem.k, problem.v)]
        if problem.shape.lengths:
            return padded_layers(both, problem.shape.length)
        return layers_of(*both)

    return _kept(problem, (kind, "one array"), make)


def float_pieces(problem, kind):
    """The same as `pieces_of` gives them; shared."""
    make = lambda: pieces_of(*(_as_floats(x, kind) for x in (problem.k, problem.v)))  # noqa: E731
    return _kept(problem, (kind, "pieces"), make)


def float_bytes(problem, kind):
    """Bytes of K and V of a layer in a float kind."""
    return nbytes(problem.k, problem.v) // 4 * np.dtype(FLOATS[kind]).itemsize
