"""Sizes of CUDA kernels, and how they read rows of any kind.

In the simulator a GPU thread is a thread of the system. Blocks are therefore small and few there, and short test cases
still iterate every loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.instructions import load_chunk, loader, row_address
from numkv.kernels.cuda.launches import THREADS
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kinds import kind as kind_of
from numkv.kinds import kinds
from numkv.rows.channel import TOKENS
from numkv.rows.code4 import code4_level
from numkv.rows.code6 import code6_level
from numkv.rows.codec import element_codec, elements_in
from numkv.rows.convert import bf16_to_float32
from numkv.rows.int4 import GROUP, int4_column, lowest_level

#: Threads that share a row if a block has several rows: a warp, so that they read adjacent elements.
LANES = 4 if SIMULATED else 32
#: Rows that a block then takes at once, if they fit into its memory.
ROWS = THREADS // LANES
#: Elements of a kind in 16 bytes, the most that `load_chunk` reads at once; but no more than 16 elements (of INT4 and
#: CODE4, 8 bytes, of CODE6 12), as more make too many floats.
WIDTH = {k.name: 16 if k.is_packed else 16 // k.word.itemsize for k in kinds(by_channel=True)}


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def compute_of(*names: str) -> str:
    """Return the dtype that a kernel over these kinds computes in: float64 if one of them requires it."""
    return "float64" if any(kind_of(name).compute == np.float64 for name in names) else "float32"


@register_jitable
def natural(i):
    """Return `i`, which is not negative and fits 31 bits, in a form that proves this to the compiler.

    The compiler then omits the handling of Python's negative indices, and divides by shifts.
    """
    return np.int64(i) & np.int64(0x7FFFFFFF)


def aligned(array: Any, kind: str, width: int) -> bool:
    """Return whether `load_chunk` can read every chunk of every row: all of them start at multiples of its size.

    Parameters
    ----------
    array : array
        The array, in words.
    kind : str
        Its kind.
    width : int
        Elements of a chunk.
    """
    words = kind_of(kind).words_per_row(width)
    size = words * array.dtype.itemsize
    size &= -size  # of 12 bytes, three words of 4
    if tuple(array.shape)[-1] % words or any(step % size for step in array.strides[:-1]):
        return False
    return SIMULATED or int(array.gpu_data.device_pointer) % size == 0


def reader(KIND, COMPUTE, STEP, WIDE):
    """Make the function that reads a chunk of a row: `STEP` elements, as floats.

    Parameters
    ----------
    KIND : str
        Kind of the array.
    COMPUTE : {"float32", "float64"}
        Float type of the result.
    STEP : int
        Elements of a chunk: `WIDTH`, or half of that.
    WIDE : bool
        Whether the array is `aligned`.

    Returns
    -------
    function
        ``read(array, scale, a, b, c, chunk, floats, at)`` puts chunk number `chunk` of the row ``array[a, b, c]`` at
        ``floats[at:]``; elements past the end of the row are 0. INT4 and kinds with scales by channel are scaled here,
        and are in the order of `column_of`. The caller applies scales of rows or of heads.
    """
    load = loader(KIND, COMPUTE)
    F = np.float32 if COMPUTE == "float32" else np.float64
    CODE4, CODE6, BY_GROUP = KIND == "code4", KIND == "code6", kind_of(KIND).scales_per == "group"
    BYTES, GROUP_BYTES = STEP // 2, GROUP // 2
    each, of_unit = kind_of(KIND).unit
    WORDS = STEP * of_unit // each
    BY_CHANNEL, elements = kind_of(KIND).scales_per == "channel", elements_in(kind_of(KIND))
    value, _ = element_codec(KIND)

    @register_jitable
    def read(array, scale, a, b, c, chunk, floats, at):
        if BY_CHANNEL:
            dim = elements(array.shape[3])
            for i in range(STEP):
                d, x = chunk * STEP + i, np.float32(0)
                if d < dim:
                    x = value(array[a, b, c], scale[a, b, c // TOKENS], d, dim)
                floats[at + i] = F(x)
            return
        first, factor, lowest = chunk * WORDS, F(1), F(0)
        if BY_GROUP:
            word = scale[a, b, c, first // GROUP_BYTES]
            factor = F(bf16_to_float32(word))
            lowest = F(lowest_level(word)) * factor
        if WIDE:
            load_chunk(KIND, STEP, array, row_address(array, a, b, c), first, floats, at)
            if BY_GROUP:
                for i in range(STEP):
                    floats[at + i] = floats[at + i] * factor + lowest  # exact
        elif BY_GROUP:
            for i in range(BYTES):
                low, high = F(0), F(0)
                if first + i < array.shape[3]:
                    byte = np.int32(array[a, b, c, first + i])
                    low = F(byte & np.int32(15)) * factor + lowest
                    high = F(byte >> np.int32(4)) * factor + lowest
                floats[at + i], floats[at + BYTES + i] = low, high
        elif CODE4:
            for i in range(BYTES):
                low, high = F(0), F(0)
                if first + i < array.shape[3]:
                    byte = np.int32(array[a, b, c, first + i])
                    low = F(code4_level(byte))
                    high = F(code4_level(np.int32(byte >> np.int32(4))))
                floats[at + 2 * i], floats[at + 2 * i + 1] = low, high
        elif CODE6:
            for i in range(STEP // 4):
                unit, byte = np.int32(0), first + 3 * i
                if byte < array.shape[3]:
                    for j in range(3):
                        word = np.int32(array[a, b, c, byte + j])
                        unit = np.int32(unit | np.int32(word << np.int32(8 * j)))
                for j in range(4):
                    level = code6_level(np.int32(unit >> np.int32(6 * j)))
                    floats[at + 4 * i + j] = F(level) if byte < array.shape[3] else F(0)
        else:
            for i in range(STEP):
                d = chunk * STEP + i
                floats[at + i] = load(array[a, b, c, d]) if d < array.shape[3] else F(0)

    return read


def column_of(KIND, STEP):
    """Make the function that maps a chunk's elements, in the order of `reader`, to columns of a row.

    Parameters
    ----------
    KIND : str
        Kind of the array.
    STEP : int
        Elements of a chunk.

    Returns
    -------
    function
        ``column(chunk, i, dim)`` returns the column of a chunk's element i in a row of `dim`; at least `dim` past it.
    """
    TWO_HALVES, BYTES = kind_of(KIND).scales_per == "group", STEP // 2

    @register_jitable
    def column(chunk, i, dim):
        if TWO_HALVES:
            return int4_column(chunk * BYTES + i % BYTES, i >= BYTES, dim)
        return chunk * STEP + i

    return column
