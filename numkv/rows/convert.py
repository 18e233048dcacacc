"""16-bit float words to float32 and back, in integer arithmetic, bit for bit as IEEE 754 and ml_dtypes do it.

Numba's CPU target has no 16-bit floats, and under the simulator there is nothing but NumPy; these functions need
neither. Rounding is to nearest, ties to even; NaNs stay NaN (quiet), overflow gives infinity.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

__all__ = [
    "bf16_to_float32",
    "codec",
    "float32_to_bf16",
    "float32_to_fp16",
    "fp16_to_float32",
]

# Every step is wrapped in uint32(...): Numba widens uint32 << uint32 to 64 bits.


@register_jitable
def bf16_to_float32(word):
    """The value of a bfloat16 word: the upper half of a float32."""
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
    """The value of an IEEE half-precision word."""
    w = np.uint32(word)
    sign = np.uint32(np.uint32(w & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(w & np.uint32(0x7FFF)) << np.uint32(13))
    if magnitude >= np.uint32(0x0F800000):  # infinity and NaN: all exponent bits
        return np.uint32(sign | np.uint32(magnitude | np.uint32(0x7F800000))).view(np.float32)
    # Read as float32, the exponent is short by 112; a multiplication mends normal and subnormal numbers alike.
    value = np.float32(magnitude.view(np.float32) * np.float32(5.192296858534828e33))
    return np.uint32(sign | value.view(np.uint32)).view(np.float32)


@register_jitable
def float32_to_fp16(x):
    """The IEEE half-precision word nearest to `x`."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude >= np.uint32(
        0x7F800000
    ):  # infinity; NaN keeps the top of its payload and turns quiet
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


# Through float32: a float64 is rounded twice on its way to 16 bits, as NumPy rounds it once only for fp16.
_LOAD = {
    ("fp64", "float32"): _as_float32,
    ("fp32", "float32"): _as_float32,
    ("fp16", "float32"): fp16_to_float32,
    ("bf16", "float32"): bf16_to_float32,
    ("fp64", "float64"): _as_float64,
    ("fp32", "float64"): _as_float64,
    ("fp16", "float64"): _fp16_to_float64,
    ("bf16", "float64"): _bf16_to_float64,
}
_STORE = {
    "fp64": _as_float64,
    "fp32": _as_float32,
    "fp16": float32_to_fp16,
    "bf16": float32_to_bf16,
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
    return _LOAD[kind, compute], _STORE[kind]
