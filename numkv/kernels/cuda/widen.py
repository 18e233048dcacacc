"""Convert stored words to the 16-bit floats of tensor cores, and float32 to two of them; composed of `instructions`.

Codes become floats without conversion instructions, which are slow on GPUs. A code's bits replace the last bits of a
power of two, which is then subtracted (as in FasterTransformer and Marlin, arXiv:2408.11743, section 3.4). All of it is
exact. Exponents of 8-bit floats are moved by a product with a power of two, which also corrects subnormal numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.instructions import (
    fma_bf16x2,
    fma_fp16x2,
    pack_fp16,
    permute_bytes,
    split_bf16,
    unpack_fp16,
)

U32 = np.uint32
#: Bytes of the two words: each has two bytes, with byte 4 above or below each.
BELOW, ABOVE = (0x4140, 0x4342), (0x1404, 0x3424)
SIGNS, MAGNITUDES = 0x80008000, 0x7F007F00


@register_jitable
def unpack_bf16(word):
    """Unpack the two bfloat16 of a word to float32: ``word.view(bfloat16).astype(float32)``."""
    low = U32(U32(word) << U32(16)).view(np.float32)
    return low, U32(U32(word) & U32(0xFFFF0000)).view(np.float32)


@register_jitable
def halves_bf16(a, b):
    """Round two float32 to a word of two bfloat16, and their remainders to another: together they have 16 bits.

    ``high = array([a, b]).astype(bfloat16); low = (array([a, b]) - high).astype(bfloat16)``
    """
    return split_bf16(a, b)


@register_jitable
def halves_fp16(a, b):
    """Round two float32 to a word of two float16, and their remainders to another: together they have 22 bits."""
    high = pack_fp16(a, b)
    x, y = unpack_fp16(high)
    return high, pack_fp16(a - x, b - y)


def int8_words(to: str) -> Any:
    """Make the function that widens a word of four INT8 codes.

    Parameters
    ----------
    to : {"bf16", "fp16"}
        Float type of the result.

    Returns
    -------
    function
        ``widen(word)`` returns two words: ``word.view(int8).astype(float16).view(uint32)``, or bfloat16.
    """
    first, second = BELOW

    @register_jitable
    def as_fp16(word):
        # 1024 + (code + 128), as the last bits of 1024 count single units.
        codes = U32(word) ^ U32(0x80808080)
        low, high = permute_bytes(codes, U32(0x64), first), permute_bytes(codes, U32(0x64), second)
        one, offset = U32(0x3C003C00), U32(0xE480E480)  # 1 and -1152
        return fma_fp16x2(low, one, offset), fma_fp16x2(high, one, offset)

    @register_jitable
    def as_bf16(word):
        # 128 and the code's seven last bits. Its first bit turns another 128 into 256, which is subtracted.
        low, high = permute_bytes(word, U32(0x43), first), permute_bytes(word, U32(0x43), second)
        minus = U32(0xBF80BF80)
        seven, sign = U32(0xFF7FFF7F), U32(0xFF80FF80)
        return (
            fma_bf16x2(low & sign, minus, low & seven),
            fma_bf16x2(high & sign, minus, high & seven),
        )

    return as_fp16 if to == "fp16" else as_bf16


def fp8_words(kind: str, to: str) -> Any:
    """Make the function that widens a word of four 8-bit floats.

    Parameters
    ----------
    kind : {"fp8_e4m3", "fp8_e5m2"}
        Storage kind of the 8-bit floats.
    to : {"bf16", "fp16"}
        Float type of the result.

    Returns
    -------
    function
        ``widen(word)`` returns two words: ``word.view(float8_e4m3fn).astype(float16).view(uint32)``, or other dtypes.
        A NaN stays NaN.
    """
    fp16, e4m3 = to == "fp16", kind == "fp8_e4m3"
    first, second = ABOVE
    # The exponent moves down to where the wider one ends; its bias grows by so many powers of two.
    shift = (1 if e4m3 else 0) if fp16 else (4 if e4m3 else 3)
    power = (0x5C005C00 if e4m3 else 0x3C003C00) if fp16 else (0x7B807B80 if e4m3 else 0x77807780)
    # What has to be added for NaN, and for infinity, to reach the sign; then those get all exponent bits.
    special, below = (0x01000100 if e4m3 else 0x04000400), (5 if fp16 else 8)
    fma = fma_fp16x2 if fp16 else fma_bf16x2

    @register_jitable
    def one(word, which):
        bits = permute_bytes(word, U32(0), which)
        if fp16 and not e4m3:
            return bits
        magnitude = bits & U32(MAGNITUDES)
        marks = (magnitude + U32(special)) & U32(SIGNS)
        # Plus -0.
        found = fma((bits & U32(SIGNS)) | U32(magnitude >> U32(shift)), U32(power), U32(SIGNS))
        return found | (marks - (marks >> U32(below)))

    @register_jitable
    def widen(word):
        return one(word, U32(first)), one(word, U32(second))

    return widen
