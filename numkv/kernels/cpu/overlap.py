"""Check inside compiled functions that the arrays which a call writes do not overlap those that it reads.

The check is one kernel for all kinds and ranks. A caller describes its arrays in a table, a row of numbers each, and
calls the kernel by its symbol. Inlined, the check took most of a function's compile time. `provide` has to be called
before such a function is made or loaded.

The check is conservative: if it cannot prove that arrays do not overlap, the caller uses the general path, which checks
exactly (`numkv.checks`).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import build
from numkv.kernels.cpu.vectors.arrays import (
    ADDRESS,
    AXES,
    HIGH,
    ITEMSIZE,
    LOW,
    SHAPE,
    STRIDES,
    kernel_caller,
    provide_symbol,
)

_TABLE = types.Array(types.int64, 2, "C")
_SYMBOL = "numkv_lie_well"

#: ``lie_well(None, (table, own, read)) -> bool``; see `_lie_well`.
lie_well = kernel_caller((_TABLE, types.int64, types.int64), types.boolean, _SYMBOL)


@register_jitable
def find_spans(t):
    """Put down each array's first address and the one behind its last; 0 and 0 where it has no elements."""
    for i in range(len(t)):
        low = t[i, ADDRESS]
        high = low + t[i, ITEMSIZE]
        for axis in range(t[i, AXES]):
            size, step = t[i, SHAPE + axis], t[i, STRIDES + axis]
            if size == 0:
                low = high = 0
                break
            low += min(0, (size - 1) * step)
            high += max(0, (size - 1) * step)
        t[i, LOW], t[i, HIGH] = low, high


@register_jitable
def meet(t, a, b):
    """Return whether the spans of two arrays do."""
    return t[a, LOW] < t[b, HIGH] and t[b, LOW] < t[a, HIGH]


@register_jitable
def _is_aligned(t, i):
    """Return whether an array's elements lie at multiples of their size."""
    places = t[i, ADDRESS]
    for axis in range(t[i, AXES]):
        if t[i, SHAPE + axis] > 1:
            places |= t[i, STRIDES + axis]
    return places & (t[i, ITEMSIZE] - 1) == 0


@register_jitable
def _width_below(t, i, step):
    """Bytes that an array covers in each of the periods of `step` bytes on which its longer steps lie; 0 if not so."""
    width = t[i, ITEMSIZE]
    for axis in range(t[i, AXES]):
        if t[i, SHAPE + axis] > 1:
            own = abs(t[i, STRIDES + axis])
            if own < step:
                width += (t[i, SHAPE + axis] - 1) * own
            elif own % step != 0:
                return 0
    return width


@register_jitable
def interleave(t, a, b):
    """Return whether two arrays provably lie apart although their spans meet, as K and V of one buffer do."""
    distance = t[b, LOW] - t[a, LOW]
    for axis in range(t[a, AXES]):
        step = abs(t[a, STRIDES + axis])
        if t[a, SHAPE + axis] > 1 and step > 0:
            of_a, of_b = _width_below(t, a, step), _width_below(t, b, step)
            first = distance % step
            if of_a > 0 and of_b > 0 and first >= of_a and step - first >= of_b:
                return True
    return False


@register_jitable
def has_own_places(t, i):
    """Return whether no two elements share a place: steps, the shortest first, exceed the span of shorter ones."""
    for axis in range(t[i, AXES]):
        if t[i, SHAPE + axis] > 1:
            own, passed = abs(t[i, STRIDES + axis]), t[i, ITEMSIZE]
            for other in range(t[i, AXES]):
                step = abs(t[i, STRIDES + other])
                if other != axis and t[i, SHAPE + other] > 1 and step <= own:
                    passed += (t[i, SHAPE + other] - 1) * step
            if own < passed:
                return False
    return True


def _lie_well(t, own, read):
    """Check arrays for `lie_well`: written ones must not overlap read ones, and elements must be aligned.

    Rows ``[0, read)`` of the table are written, the others read. Rows ``[own, read)`` may be the user's arrays. Each
    must have a place for every element, and must not overlap the rows before it. The first two, K and V, may be
    interleaved in one buffer.
    """
    for i in range(len(t)):
        if not _is_aligned(t, i):
            return False
    find_spans(t)
    for i in range(read):
        for j in range(read, len(t)):
            if meet(t, i, j):
                return False
    for i in range(own, read):
        if not has_own_places(t, i):
            return False
        for j in range(i):
            if meet(t, i, j) and (i != 1 or not interleave(t, 0, 1)):
                return False
    return True


@functools.cache
def provide() -> Any:
    """Have the kernel behind `lie_well`, where functions that call it find it."""
    signature = (_TABLE, types.int64, types.int64)
    kernel = build(_lie_well, signature, label="whether arrays lie apart", emit=types.boolean)
    provide_symbol(_SYMBOL, kernel)
    return kernel
