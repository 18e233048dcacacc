"""How CUDA kernels locate and store a row, for every kind: shared by append, write and key shift.

The lanes of a warp share a row. An INT8 row has a scale that depends on all of it, so its lanes synchronise before they
store. Each writes its largest magnitude to shared memory (`peak`), the kernel waits for all threads, and then they
store (`put`). The functions here never wait, as the simulator lets only a kernel's own file do that.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.launches import number_at
from numkv.kernels.cuda.simd import LANES
from numkv.kinds import kind
from numkv.rows.code4 import code4_store
from numkv.rows.code6 import code6_store
from numkv.rows.codec import element_codec
from numkv.rows.int4 import GROUP, store_int4_group
from numkv.rows.quantize import int8_code, int8_scale, is_finite

NOWHERE = (1 << 63) - 1  #: greater than any index
#: Offset of the index of an element of V, if elements of K are also reported.
V_SIDE = 1 << 36


@register_jitable
def as_it_is(x):
    """Return `x`: the `load` of `row_store` for rows that are floats already."""
    return x


def needs_peak(name: str) -> bool:
    """Return whether lanes must synchronise before they store a row: for its largest magnitude, or finiteness."""
    return kind(name).has_scales


def first_bad_of(load):
    """Make the function that finds NaN and infinity in a lane's part of a row.

    ``first_bad(x, at, dim, lane)`` returns the first such element of the lane, or -1.
    """

    @register_jitable
    def first_bad(x, at, dim, lane):
        for d in range(lane, dim, LANES):
            if not is_finite(load(x[at + d])):
                return np.int64(d)
        return np.int64(-1)

    return first_bad


def slot_finder(BY_SLOT):
    """Make the function that finds the slot of a token, by slots or by a block table.

    ``find(places, t, start, block_size)`` returns the slot of token `t`, or -1 if the block table has no room for it.
    """

    @register_jitable
    def find(places, t, start, block_size):
        if BY_SLOT:
            return number_at(places, t)
        position = start + t
        if position >= 0 and position < places.shape[0] * block_size:
            return number_at(places, position // block_size) * block_size + position % block_size
        return np.int64(-1)

    return find


@register_jitable
def zero_int4_group(count, words, at):
    """Put a group of zeros into ``words[at : at + count // 2]``, and return its scale's word."""
    for j in range(count // 2):
        words[at + j] = np.uint8(0xFF)
    return np.uint16(0)


@register_jitable
def zero_coded_row(words):
    """Put a row of zeros into `words`, codes of a codebook, and return its scale."""
    for j in range(len(words)):
        words[j] = np.uint8(0)
    return np.float32(0)


def row_store(KIND, COMPUTE, load):
    """Make the functions that store a row by a warp.

    Parameters
    ----------
    KIND : str
        Kind of the pool.
    COMPUTE : {"float32", "float64"}
        Dtype that `load` returns.
    load : function
        Converts an element of `x` to a float.

    Returns
    -------
    peak : function
        ``peak(x, at, dim, lane)``: the largest magnitude among this lane's elements of the row ``x[at : at + dim]``.
    put : function
        ``put(x, at, dim, pool, scale, block, head, offset, peaks, warp, lane, look)`` stores this lane's part of the
        row at ``pool[block, head, offset]``. ``peaks[warp]`` are the peaks of all lanes, if `needs_peak`. With `look`
        above 0, a row with an infinite peak is stored as zeros. For INT4, a lane stores whole groups, and `x` is in
        floats. For codes of codebooks, one lane stores the whole row, so that sums need no exchange.
    """
    PER_HEAD, PER_ROW, PER_GROUP = (kind(KIND).scales_per == of for of in ("head", "row", "group"))
    BY_CODEBOOK = KIND in ("code4", "code6")
    store_coded = code6_store(load) if KIND == "code6" else code4_store(load)
    _, put_element = element_codec(KIND, COMPUTE)

    @register_jitable
    def peak(x, at, dim, lane):
        largest = np.float32(0)
        for d in range(lane, dim, LANES):
            largest = max(largest, np.float32(abs(load(x[at + d]))))
        return largest

    @register_jitable
    def put(x, at, dim, pool, scale, block, head, offset, peaks, warp, lane, look):
        words = pool[block, head, offset]
        largest = np.float32(0)
        if PER_ROW or PER_GROUP:
            for i in range(LANES):
                largest = max(largest, np.float32(peaks[warp, i]))
        bad = look > 0 and largest == np.float32(np.inf)
        if BY_CODEBOOK:  # one lane stores the row
            if lane == 0:
                if bad:
                    scale[block, head, offset] = zero_coded_row(words)
                else:
                    scale[block, head, offset] = store_coded(x[at : at + dim], words)
        elif PER_ROW:
            of_row = np.float32(0) if bad else int8_scale(largest)
            if lane == 0:
                scale[block, head, offset] = of_row
            for d in range(lane, dim, LANES):
                words[d] = np.int8(0) if bad else int8_code(load(x[at + d]), of_row)
        elif PER_GROUP:  # a lane for each group
            scales = scale[block, head, offset]
            for i in range(lane, (dim + GROUP - 1) // GROUP, LANES):
                first = np.int64(i) * GROUP
                count = min(np.int64(GROUP), dim - first)
                if bad:
                    scales[i] = zero_int4_group(count, words, first // 2)
                else:
                    scales[i] = store_int4_group(x, at + first, count, words, first // 2)
        else:
            of_head = scale[head : head + 1] if PER_HEAD else scale
            for d in range(lane, dim, LANES):
                put_element(load(x[at + d]), words, of_head, d)

    return peak, put
