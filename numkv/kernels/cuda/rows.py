"""How CUDA kernels find where a row goes and store it, for every kind: one place for append, write and key shift.

The lanes of a warp share a row. An INT8 row has a scale that depends on all of it, so its lanes meet before they store:
each puts the largest magnitude that it sees into shared memory (`peak`), the kernel waits for all threads, and then
they store (`put`). The functions here never wait, as the simulator lets only a kernel's own file do that.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.simd import LANES
from numkv.kinds import kind
from numkv.rows.address import slot_of
from numkv.rows.codec import element_codec
from numkv.rows.int4 import GROUP, store_int4_group
from numkv.rows.quantize import int8_code, int8_scale

__all__ = ["as_it_is", "needs_peak", "row_store", "slot_finder"]


@register_jitable
def as_it_is(x):
    """What `row_store` loads by where rows are floats already."""
    return x


def needs_peak(name: str) -> bool:
    """Whether rows of a kind are stored by the largest magnitude of their elements."""
    return kind(name).scales_per == "row"


def slot_finder(BY_SLOT):
    """The function that finds the slot of a token, by given slots or by a block table.

    ``find(places, t, start, block_size)``: the slot of token `t`; -1 where the block table has no room for it.
    """

    @register_jitable
    def find(places, t, start, block_size):
        if BY_SLOT:
            return np.int64(places[t])
        position = start + t
        if position >= 0 and position < places.shape[0] * block_size:
            return slot_of(places, position, block_size)
        return np.int64(-1)

    return find


def row_store(KIND, COMPUTE, load):
    """The functions by which a warp stores a row.

    Parameters
    ----------
    KIND : str
        Kind of the pool.
    COMPUTE : {"float32", "float64"}
        What `load` returns.
    load : function
        What an element of `x` is as a float.

    Returns
    -------
    peak : function
        ``peak(x, at, dim, lane)``: the largest magnitude among this lane's elements of the row ``x[at : at + dim]``.
    put : function
        ``put(x, at, dim, pool, scale, block, head, offset, peaks, warp, lane)`` stores this lane's part of the row at
        ``pool[block, head, offset]``. ``peaks[warp]`` are the peaks of all lanes, if `needs_peak`. INT4 takes whole
        groups, and `x` in floats.
    """
    PER_HEAD, PER_ROW, PER_GROUP = (kind(KIND).scales_per == of for of in ("head", "row", "group"))
    _, put_element = element_codec(KIND, COMPUTE)

    @register_jitable
    def peak(x, at, dim, lane):
        largest = np.float32(0)
        for d in range(lane, dim, LANES):
            largest = max(largest, np.float32(abs(load(x[at + d]))))
        return largest

    @register_jitable
    def put(x, at, dim, pool, scale, block, head, offset, peaks, warp, lane):
        words = pool[block, head, offset]
        if PER_ROW:
            largest = np.float32(0)
            for i in range(LANES):
                largest = max(largest, np.float32(peaks[warp, i]))
            of_row = int8_scale(largest)
            if lane == 0:
                scale[block, head, offset] = of_row
            for d in range(lane, dim, LANES):
                words[d] = int8_code(load(x[at + d]), of_row)
        elif PER_GROUP:  # a lane for each
            scales = scale[block, head, offset]
            for i in range(lane, (dim + GROUP - 1) // GROUP, LANES):
                first = np.int64(i) * GROUP
                count = min(np.int64(GROUP), dim - first)
                scales[i] = store_int4_group(x, at + first, count, words, first // 2)
        else:
            of_head = scale[head : head + 1] if PER_HEAD else scale
            for d in range(lane, dim, LANES):
                put_element(load(x[at + d]), words, of_head, d)

    return peak, put
