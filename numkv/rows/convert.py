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


@register_jitable
def e4m3_to_float32(word):
    """Return the value of an 8-bit float with 4 exponent and 3 mantissa bits (bias 7, no infinity, NaN is all ones)."""
    w = np.uint32(word)
    sign = np.uint32(np.uint32(w & np.uint32(0x80)) << np.uint32(24))
    magnitude = np.uint32(np.uint32(w & np.uint32(0x7F)) << np.uint32(20))
    if magnitude == np.uint32(0x07F00000):
        return np.uint32(sign | np.uint32(0x7FC00000)).view(np.float32)
    # The exponent is short by 120. A subnormal number gets a leading one, which a subtraction takes away again.
    if magnitude < np.uint32(0x00800000):
        raised = np.uint32(magnitude + np.uint32(0x3C800000)).view(np.float32)
        value = np.float32(raised - np.float32(0.015625))
        return np.uint32(sign | value.view(np.uint32)).view(np.float32)
    return np.uint32(sign | np.uint32(magnitude + np.uint32(0x3C000000))).view(np.float32)


@register_jitable
def float32_to_e4m3(x):
    """Return the e4m3 word nearest to `x`; infinities and magnitudes above 448 become ±448, NaN stays NaN."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):
        return np.uint8(sign | np.uint32(0x7F))
    if magnitude >= np.uint32(0x43E00000):  # 448
        return np.uint8(sign | np.uint32(0x7E))
    if magnitude < np.uint32(0x3C800000):  # 2**-6: the result is subnormal
        # Adding 2**14 moves the result's last bit to float32's last bit, so the addition itself rounds.
        shifted = np.float32(magnitude.view(np.float32) + np.float32(16384))
        return np.uint8(sign | np.uint32(shifted.view(np.uint32) - np.uint32(0x46800000)))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(20)) & np.uint32(1))
    rounded = np.uint32(np.uint32(magnitude + np.uint32(0x0007FFFF)) + odd)
    return np.uint8(sign | np.uint32(np.uint32(rounded - np.uint32(0x3C000000)) >> np.uint32(20)))


@register_jitable
def e5m2_to_float32(word):
    """Return the value of an 8-bit float with 5 exponent and 2 mantissa bits: the upper half of an IEEE half."""
    w = np.uint32(word)
    sign = np.uint32(np.uint32(w & np.uint32(0x80)) << np.uint32(24))
    magnitude = np.uint32(np.uint32(w & np.uint32(0x7F)) << np.uint32(21))
    if magnitude > np.uint32(0x0F800000):
        return np.uint32(sign | np.uint32(0x7FC00000)).view(np.float32)
    if magnitude == np.uint32(0x0F800000):
        return np.uint32(sign | np.uint32(0x7F800000)).view(np.float32)
    # As for e4m3; the exponent is short by 112.
    if magnitude < np.uint32(0x00800000):
        raised = np.uint32(magnitude + np.uint32(0x38800000)).view(np.float32)
        value = np.float32(raised - np.float32(6.103515625e-05))
        return np.uint32(sign | value.view(np.uint32)).view(np.float32)
    return np.uint32(sign | np.uint32(magnitude + np.uint32(0x38000000))).view(np.float32)


@register_jitable
def float32_to_e5m2(x):
    """Return the e5m2 word nearest to `x`; infinities and magnitudes above 57344 become ±57344, NaN stays NaN."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):
        return np.uint8(sign | np.uint32(0x7E))
    if magnitude >= np.uint32(0x47600000):  # 57344
        return np.uint8(sign | np.uint32(0x7B))
    if magnitude < np.uint32(0x38800000):  # 2**-14: the result is subnormal
        # Adding 2**7 moves the result's last bit to float32's last bit, so the addition itself rounds.
        shifted = np.float32(magnitude.view(np.float32) + np.float32(128))
        return np.uint8(sign | np.uint32(shifted.view(np.uint32) - np.uint32(0x43000000)))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(21)) & np.uint32(1))
    rounded = np.uint32(np.uint32(magnitude + np.uint32(0x000FFFFF)) + odd)
    return np.uint8(sign | np.uint32(np.uint32(rounded - np.uint32(0x38000000)) >> np.uint32(21)))


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
