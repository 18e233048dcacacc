"""Mathematical functions of vectors of floats: `v` are `Vectors`, `x` one of their vectors."""

from __future__ import annotations

import math

# 2**f for |f| <= 1/2: Chebyshev interpolation (float32), Taylor series of e**(f ln 2) (float64).
_EXP2_FLOAT = [1.0, 0.6931472067028329, 0.24022650922289554, 0.05550327226669895,
               0.00961805667843204, 0.0013400428177711937, 0.00015461444724808513]  # fmt: skip
_EXP2_DOUBLE = [math.log(2.0) ** k / math.factorial(k) for k in range(14)]
# (tanh(x) - x) / x**3 in powers of x**2: Cephes' tanhf below 0.625; the Taylor series below 0.3.
_TANH_FLOAT = [-3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2,
               -5.70498872745e-3]  # fmt: skip
_TANH_DOUBLE = [-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075,
                -929569 / 638512875, 6404582 / 10854718875, -443861162 / 1856156927625,
                18888466084 / 194896477400625, -113927491862 / 2900518163668125,
                58870668456604 / 3698160658676859375,
                -8374643517010684 / 1298054391195577640625]  # fmt: skip


def exp2(v, x):
    """2 to the power of `x`, for x <= 0 or NaN (kept): relative error below 2e-7 (float32), 4e-16 (float64).

    Half a power of two below the smallest normal number, and from there on, the result is 0.
    """
    # 2**x = 2**n * 2**f, n the nearest integer. Adding 1.5 * 2**(mantissa bits) leaves n in the low bits; with
    # the bias of exponents added to it, they are those of 2**n once they are in the exponent's place, and all
    # above them has left. The least n makes 0 of them.
    bits, bias = (52, 1023) if v.double else (23, 127)
    magic = v.splat(1.5 * 2.0**bits + bias)
    lowest = v.splat(-bias)
    clamped = v.larger(lowest, x)
    shifted = v.b.fadd(clamped, magic)
    f = v.b.fsub(clamped, v.b.fsub(shifted, magic))
    coefficients = _EXP2_DOUBLE if v.double else _EXP2_FLOAT
    power = v.splat(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        power = v.fma(power, f, v.splat(c))
    n = v.b.shl(v.b.bitcast(shifted, v.int_type), v.splat_int(bits))
    return v.b.fmul(power, v.b.bitcast(n, v.type))


def tanh(v, x):
    """Hyperbolic tangent, relative error below 1e-6 (float32), 1e-14 (float64); NaN is kept."""
    # tanh|x| = 1 - 2 / (e**(2|x|) + 1) loses digits near 0; there (Cephes) an odd polynomial or a series serves.
    sign_bit = v.splat_int(-(2 ** (63 if v.double else 31)))
    bits = v.b.bitcast(x, v.int_type)
    sign = v.b.and_(bits, sign_bit)
    size = v.b.bitcast(v.b.and_(bits, v.b.not_(sign_bit)), v.type)
    one = v.splat(1.0)
    decay = exp2(v, v.b.fmul(size, v.splat(-2.0 * math.log2(math.e))))
    far = v.b.fdiv(v.b.fsub(one, decay), v.b.fadd(one, decay))
    square = v.b.fmul(size, size)
    series = _TANH_DOUBLE if v.double else _TANH_FLOAT
    near = v.splat(series[-1])
    for c in reversed(series[:-1]):
        near = v.fma(near, square, v.splat(c))
    near = v.fma(v.b.fmul(near, square), size, size)
    is_near = v.b.fcmp_ordered("<", size, v.splat(0.3 if v.double else 0.625))
    value = v.b.select(is_near, near, far)
    return v.b.bitcast(v.b.or_(v.b.bitcast(value, v.int_type), sign), v.type)
