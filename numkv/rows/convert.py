"""Words of 16-bit and 8-bit floats to float32 and back, in integer arithmetic, equal to ml_dtypes bit for bit.

These functions need no such floats: Numba's CPU target has none, GPUs before sm_89 no 8-bit ones, and the simulator
only NumPy's. Rounding is to nearest, ties to even. NaNs stay NaN (quiet). Overflow gives infinity in 16 bits. In 8 bits
it gives the largest finite number, as in caches of inference engines: one outlier must not spoil a row. The 8-bit
formats are those of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), section 3.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

# Every step is wrapped in uint32(...): Numba widens uint32 << uint32 to 64 bits.


@register_jitable
def bf16_to_float32(word):
    """Return the value of a bfloat16 word: the upper half of a float32."""
    return np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32)


@register_jitable
def float32_to_bf16(x):
    """The bfloat16 word nearest to `x`."""
    bits = np.float32(x).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):  # NaN: rounding could carry it into infinity
        return np.uint16(np.uint32(bits >> np.uint32(16)) | np.uint32(0x0040))
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    # Infinity has an all-zero mantissa, so the increment cannot carry out of it.
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@register_jitable
def fp16_to_float32(word):
    """Return the value of an IEEE half-precision word."""
    w = np.uint32(word)
    sign = np.uint32(np.uint32(w & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(w & np.uint32(0x7FFF)) << np.uint32(13))
    if magnitude >= np.uint32(0x0F800000):  # infinity and NaN: all exponent bits
        return np.uint32(sign | np.uint32(magnitude | np.uint32(0x7F800000))).view(np.float32)
    # Read as float32, the exponent is too small by 112. A multiplication corrects normal and subnormal numbers.
    value = np.float32(magnitude.view(np.float32) * np.float32(5.192296858534828e33))
    return np.uint32(sign | value.view(np.uint32)).view(np.float32)


@register_jitable
def float32_to_fp16(x):
    """The IEEE half-precision word nearest to `x`."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Infinity; NaN keeps the top of its payload and turns quiet.
    if magnitude >= np.uint32(0x7F800000):
        if magnitude > np.uint32(0x7F800000):
            payload = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(0x03FF))
            return np.uint16(np.uint32(sign | np.uint32(0x7E00)) | payload)
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude >= np.uint32(0x47800000):  # 65536 and above (rounding handles 65520 up to there)
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):  # below 2**-14: subnormal
        # Adding 0.5 moves the half's last bit to float32's last bit, so the addition itself rounds.
        shifted = np.float32(magnitude.view(np.float32) + np.float32(0.5))
        return np.uint16(sign | np.uint32(shifted.view(np.uint32) - np.uint32(0x3F000000)))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32(np.uint32(magnitude + np.uint32(0x0FFF)) + odd)
    return np.uint16(sign | np.uint32(np.uint32(rounded - np.uint32(0x38000000)) >> np.uint32(13)))


def _float8(MANTISSA, BIAS, LARGEST, INFINITE, NAN):
    """Make the functions that load and store 8-bit floats of so many mantissa bits, whose exponents have this bias.

    `LARGEST` is the word of the largest finite number. The next one is infinity if `INFINITE`; those behind are NaN,
    and `NAN` is the one to store.
    """
    LOST = 23 - MANTISSA  # bits of a float32 mantissa that do not fit
    RAISE = (127 - BIAS) << 23  # between exponents
    NORMAL = RAISE + (1 << 23)  # the least normal number as a float32, as are those below
    MOST = (LARGEST << LOST) + RAISE
    LEAST = np.uint32(NORMAL).view(np.float32)
    # A number whose last bit is worth as much as that of subnormal words.
    ALIGNED = np.float32(2.0 ** (24 - BIAS - MANTISSA))
    OF_ALIGNED = int(ALIGNED.view(np.uint32))
    BELOW_HALF = (1 << (LOST - 1)) - 1

    @register_jitable
    def to_float32(word):
        """Return the value of a word."""
        w = np.uint32(word)
        sign = np.uint32(np.uint32(w & np.uint32(0x80)) << np.uint32(24))
        magnitude = np.uint32(np.uint32(w & np.uint32(0x7F)) << np.uint32(LOST))
        if magnitude > np.uint32((LARGEST + INFINITE) << LOST):
            return np.uint32(sign | np.uint32(0x7FC00000)).view(np.float32)
        if INFINITE and magnitude > np.uint32(LARGEST << LOST):
            return np.uint32(sign | np.uint32(0x7F800000)).view(np.float32)
        # The exponent is short. A subnormal number gets a leading one, which a subtraction takes away again.
        if magnitude < np.uint32(0x00800000):
            raised = np.uint32(magnitude + np.uint32(NORMAL)).view(np.float32)
            value = np.float32(raised - LEAST)
            return np.uint32(sign | value.view(np.uint32)).view(np.float32)
        return np.uint32(sign | np.uint32(magnitude + np.uint32(RAISE))).view(np.float32)

    @register_jitable
    def from_float32(x):
        """Return the word nearest to `x`; infinities become the largest finite number, NaN stays NaN."""
        bits = np.float32(x).view(np.uint32)
        sign = np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80))
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
        if magnitude > np.uint32(0x7F800000):
            return np.uint8(sign | np.uint32(NAN))
        if magnitude >= np.uint32(MOST):
            return np.uint8(sign | np.uint32(LARGEST))
        if magnitude < np.uint32(NORMAL):  # the result is subnormal
            shifted = np.float32(magnitude.view(np.float32) + ALIGNED)  # the addition itself rounds
            return np.uint8(sign | np.uint32(shifted.view(np.uint32) - np.uint32(OF_ALIGNED)))
        odd = np.uint32(np.uint32(magnitude >> np.uint32(LOST)) & np.uint32(1))
        rounded = np.uint32(np.uint32(magnitude + np.uint32(BELOW_HALF)) + odd)
        return np.uint8(sign | np.uint32(np.uint32(rounded - np.uint32(RAISE)) >> np.uint32(LOST)))

    return to_float32, from_float32


# 4 exponent and 3 mantissa bits, up to 448; 5 and 2, the upper half of an IEEE half, up to 57344.
e4m3_to_float32, float32_to_e4m3 = _float8(3, 7, 0x7E, False, 0x7F)
e5m2_to_float32, float32_to_e5m2 = _float8(2, 15, 0x7B, True, 0x7E)


@register_jitable
def _as_float32(x):
    return np.float32(x)


@register_jitable
def _as_float64(x):
    return np.float64(x)


@register_jitable
def _fp16_to_float64(word):
    return np.float64(fp16_to_float32(word))


@register_jitable
def _bf16_to_float64(word):
    return np.float64(bf16_to_float32(word))


@register_jitable
def _e4m3_to_float64(word):
    return np.float64(e4m3_to_float32(word))


@register_jitable
def _e5m2_to_float64(word):
    return np.float64(e5m2_to_float32(word))


# To float32, to float64, and back. Through float32: a float64 is rounded twice on its way to 16 or 8 bits, as NumPy
# rounds it once only for fp16.
_CODECS = {
    "fp64": (_as_float32, _as_float64, _as_float64),
    "fp32": (_as_float32, _as_float64, _as_float32),
    "fp16": (fp16_to_float32, _fp16_to_float64, float32_to_fp16),
    "bf16": (bf16_to_float32, _bf16_to_float64, float32_to_bf16),
    "fp8_e4m3": (e4m3_to_float32, _e4m3_to_float64, float32_to_e4m3),
    "fp8_e5m2": (e5m2_to_float32, _e5m2_to_float64, float32_to_e5m2),
}


def codec(kind, compute="float32"):
    """The functions that load and store an element of a float kind.

    Parameters
    ----------
    kind : str
        Name of a float kind.
    compute : {"float32", "float64"}
        What `load` returns.

    Returns
    -------
    load, store : function
        ``load(word) -> float`` and ``store(float) -> word``, usable in kernels of every target.
    """
    to_float32, to_float64, store = _CODECS[kind]
    return (to_float64 if compute == "float64" else to_float32), store
