"""Convert stored words to the 16-bit floats of tensor cores, and float32 to two of them; composed of `instructions`.

Codes become floats without conversion instructions, which are slow on GPUs. A code's bits replace the last bits of a
power of two, which is then subtracted (as in FasterTransformer and Marlin, arXiv:2408.11743, section 3.4). All of it is
exact. Exponents of 8-bit floats are moved by a product with a power of two, which also corrects subnormal numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.instructions import (
    fma_fp16x2,
    mma_bf16,
    mma_fp16,
    pack_bf16,
    pack_fp16,
    permute_bytes,
    split_bf16,
    unpack_fp16,
)

U32 = np.uint32
#: The codes of each of two words, as digits of `permute_bytes`: below a byte 4 each, or above one.
CODES_BELOW, CODES_ABOVE = (0x4140, 0x4342), (0x1404, 0x3424)
SIGNS, MAGNITUDES = 0x80008000, 0x7F007F00


@register_jitable
def unpack_bf16(word):
    """Unpack the two bfloat16 of a word to float32: ``word.view(bfloat16).astype(float32)``."""
    low = U32(U32(word) << U32(16)).view(np.float32)
    return low, U32(U32(word) & U32(0xFFFF0000)).view(np.float32)


@register_jitable
def halves_fp16(a, b):
    """Round two float32 to a word of two float16, and their remainders to another: together they have 22 bits."""
    high = pack_fp16(a, b)
    x, y = unpack_fp16(high)
    return high, pack_fp16(a - x, b - y)


class Operand(NamedTuple):
    """A 16-bit float type of tensor cores, with its constants as words of two equal halves."""

    mma: Any
    pack: Any
    halves: Any
    ones: int
    exponent: int  #: all bits of an exponent: infinity
    lift: float  #: powers of two that prefill moves weights up by; they may be its `SLACK` more above 1
    codes: tuple[int, int, int]  #: 1, 128 and 16,384


FLOATS = {
    "bf16": Operand(
        mma_bf16, pack_bf16, split_bf16, 0x3F803F80, 0x7F80, 0.0, (0x3F80, 0x4300, 0x4680)
    ),
    "fp16": Operand(
        mma_fp16, pack_fp16, halves_fp16, 0x3C003C00, 0x7C00, 11.0, (0x3C00, 0x5800, 0x7400)
    ),
}


def int8_words(first: int = CODES_BELOW[0], second: int = CODES_BELOW[1]) -> Any:
    """Make the function that widens a word of four INT8 codes.

    Parameters
    ----------
    first, second : int
        The codes of each result, in the form of `CODES_BELOW`, which leaves them in their order.

    Returns
    -------
    function
        ``widen(word)`` returns two words: ``word.view(int8).astype(float16).view(uint32)``.
    """

    @register_jitable
    def widen(word):
        # 1024 + (code + 128), as the last bits of 1024 count single units.
        codes = U32(word ^ U32(0x80808080))
        low, high = permute_bytes(codes, U32(0x64), first), permute_bytes(codes, U32(0x64), second)
        one, offset = U32(0x3C003C00), U32(0xE480E480)  # 1 and -1152
        return fma_fp16x2(low, one, offset), fma_fp16x2(high, one, offset)

    return widen


def fp8_words(kind: str) -> Any:
    """Make the function that widens a word of four 8-bit floats.

    Parameters
    ----------
    kind : {"fp8_e4m3", "fp8_e5m2"}
        Storage kind of the 8-bit floats.

    Returns
    -------
    function
        ``widen(word)`` returns two words: ``word.view(float8_e4m3fn).astype(float16).view(uint32)``, or of
        ``float8_e5m2``. A NaN stays NaN.
    """
    E4M3 = kind == "fp8_e4m3"
    first, second = CODES_ABOVE

    @register_jitable
    def one(word, which):
        bits = permute_bytes(word, U32(0), which)
        if not E4M3:  # the first half of a float16
            return bits
        magnitude = bits & U32(MAGNITUDES)
        # NaN plus this reaches the sign; then it gets all exponent bits.
        marks = (magnitude + U32(0x01000100)) & U32(SIGNS)
        # The exponent moves down to where the wider one ends; its bias grows by eight powers of two. Plus -0.
        found = fma_fp16x2(
            (bits & U32(SIGNS)) | U32(magnitude >> U32(1)), U32(0x5C005C00), U32(SIGNS)
        )
        return found | (marks - (marks >> U32(5)))

    @register_jitable
    def widen(word):
        return one(word, U32(first)), one(word, U32(second))

    return widen
