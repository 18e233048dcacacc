"""Codes of a few bits: the code of a number, and the packing of a row of codes.

Code i of a row is the bits ``[i * bits, (i + 1) * bits)`` of its bytes, the lowest bit of a byte first. A row starts at
a byte of its own. A code is the number of a level, in rising order; a sign is a code of one bit.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

#: The most that a code's scale, or the norm of its remainder, can be: the largest float32.
LARGEST = float(np.finfo(np.float32).max)


@register_jitable
def packed_bytes(count, bits):
    """Bytes of a row of `count` codes."""
    return (count * bits + 7) // 8


@register_jitable
def refined(code, x, edges, bit):
    """A code that is right above its bit `bit`, from 0 on the highest, made right in this one too.

    The code of a number is how many of the ``2 ** bits - 1`` rising edges are not above it.
    """
    # Arithmetic, not a branch: which way it goes is a coin toss.
    step = np.int64(1) << np.int64(bit)
    return code + np.int64(x >= edges[code + step - 1]) * step


@register_jitable
def packed_byte(codes, at, count, bits, i):
    """Byte `i` of the packed row of the `count` codes from ``codes[at]`` on."""
    j = 8 * i // bits
    shift = j * bits - 8 * i  # of the first code, which may have begun in the byte before
    byte = np.uint32(0)
    while shift < 8 and j < count:
        code = np.uint32(codes[at + j])
        if shift >= 0:
            byte |= np.uint32(code << np.uint32(shift))
        else:
            byte |= np.uint32(code >> np.uint32(-shift))
        j += 1
        shift += bits
    return np.uint8(byte & np.uint32(255))


@register_jitable
def code_at(packed, at, bits, i):
    """Code `i` of the row that starts at ``packed[at]``."""
    byte = at + i * bits // 8
    shift = i * bits % 8
    word = np.uint32(packed[byte])
    if shift + bits > 8:
        word |= np.uint32(np.uint32(packed[byte + 1]) << np.uint32(8))
    if shift + bits > 16:
        word |= np.uint32(np.uint32(packed[byte + 2]) << np.uint32(16))
    mask = np.uint32((1 << bits) - 1)
    return np.int64(np.uint32(word >> np.uint32(shift)) & mask)
