"""Whether arrays share memory, asked inside compiled functions: what is written must not be what is read.

The answers are on the safe side: where nothing here proves that arrays lie apart, the caller leaves the call to the
general way, which looks closer (`numkv.checks`).
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cpu.vectors.arrays import address_of

__all__ = ["any_meet", "has_own_places", "interleave", "span_of"]


@register_jitable
def span_of(array):
    """First address of an array and the one behind its last; 0 and 0 where it has no elements."""
    low = address_of(array)
    high = low + array.itemsize
    for axis in range(array.ndim):
        if array.shape[axis] == 0:
            return np.int64(0), np.int64(0)
        way = (array.shape[axis] - 1) * array.strides[axis]
        if way < 0:
            low += way
        else:
            high += way
    return np.int64(low), np.int64(high)


@register_jitable
def any_meet(spans, others):
    """Whether one of some spans reaches into one of others."""
    for low, high in spans:
        for other_low, other_high in others:
            if low < other_high and other_low < high:
                return True
    return False


@register_jitable
def _width_below(array, step):
    """Bytes that an array covers in each of the periods of `step` bytes on which its longer steps lie; 0 if not so."""
    width = np.int64(array.itemsize)
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            own = abs(array.strides[axis])
            if own < step:
                width += (array.shape[axis] - 1) * own
            elif own % step != 0:
                return np.int64(0)
    return width


@register_jitable
def interleave(a, b):
    """Whether two arrays provably lie apart although their spans meet, as K and V of one buffer do."""
    distance = span_of(b)[0] - span_of(a)[0]
    for axis in range(a.ndim):
        step = np.int64(abs(a.strides[axis]))
        if a.shape[axis] > 1 and step > 0:
            of_a, of_b = _width_below(a, step), _width_below(b, step)
            first = distance % step
            if of_a > 0 and of_b > 0 and first >= of_a and step - first >= of_b:
                return True
    return False


@register_jitable
def has_own_places(array):
    """Whether no two elements of an array lie in one place: its steps, the shortest first, pass what they step over."""
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            own, passed = abs(array.strides[axis]), np.int64(array.itemsize)
            for other in range(array.ndim):
                step = abs(array.strides[other])
                if other != axis and array.shape[other] > 1 and step <= own:
                    passed += (array.shape[other] - 1) * step
            if own < passed:
                return False
    return True
