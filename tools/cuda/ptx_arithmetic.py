"""PTX arithmetic that NumPy lacks; values of inactive threads are undefined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["COMPARISONS", "FUNCTIONS"]

Values = Any


def _nan(a: Values, b: Values) -> Values:
    return np.isnan(a) | np.isnan(b)


#: Comparisons by name. Comparisons of floats that end in u are true if an operand is NaN; ``ne`` is false.
COMPARISONS: dict[str, Callable[[Values, Values], Values]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal, "neu": np.not_equal,
    "equ": lambda a, b: np.equal(a, b) | _nan(a, b), "ltu": lambda a, b: ~np.greater_equal(a, b),
    "leu": lambda a, b: ~np.greater(a, b), "gtu": lambda a, b: ~np.less_equal(a, b),
    "geu": lambda a, b: ~np.less(a, b), "num": lambda a, b: ~_nan(a, b), "nan": _nan,
}  # fmt: skip

#: Functions of one value, in addition to NumPy's.
FUNCTIONS: dict[str, Callable[[Values], Values]] = {
    "rcp": lambda a: np.divide(np.ones_like(a), a), "rsqrt": lambda a: np.divide(np.ones_like(a), np.sqrt(a)),
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


def not_equal(a: Values, b: Values) -> Values:
    """``setp.ne`` of floats: false if an operand is NaN."""
    return np.not_equal(a, b) & ~_nan(a, b)


def fma32(a: Values, b: Values, c: Values) -> Values:
    """``fma``: the product is exact in float64, where the sum is rounded first; once in 2**29 it is half a unit off."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def fma32_down(a: Values, b: Values, c: Values) -> Values:
    """``fma.rm``: rounded towards minus infinity."""
    exact = np.multiply(a, b, dtype=np.float64) + c
    near = exact.astype(np.float32)
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


def fma32_up(a: Values, b: Values, c: Values) -> Values:
    """``fma.rp``."""
    return -fma32_down(-a, b, -c)


def fma32_zero(a: Values, b: Values, c: Values) -> Values:
    """``fma.rz``."""
    exact = np.multiply(a, b, dtype=np.float64) + c
    near = exact.astype(np.float32)
    return np.where(abs(near) > abs(exact), np.nextafter(near, np.float32(0)), near)


def _halves(a: Values) -> tuple[Values, Values]:
    """Veltkamp's split of float64 into two halves that multiply exactly."""
    scaled = 134217729.0 * a
    high = scaled - (scaled - a)
    return high, a - high


def fma64(a: Values, b: Values, c: Values) -> Values:
    """``fma`` of float64 by Dekker's product and Knuth's sum, with their errors added last: nearly always exact."""
    product = a * b
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    error = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    total = product + c
    part = total - product
    exact = total + (error + ((product - (total - part)) + (c - part)))
    return np.where(np.isfinite(exact), exact, total)


def divide(a: Values, b: Values) -> Values:
    """Divide integers, rounded towards zero; division by 0 sets all bits, as on NVIDIA's GPUs."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = np.floor_divide(a, safe)
    if a.dtype.kind == "i":
        quotient = quotient + ((a - quotient * safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(
        b == 0, a.dtype.type(-1) if a.dtype.kind == "i" else np.iinfo(a.dtype).max, quotient
    )


def high(a: Values, b: Values) -> Values:
    """The upper half of a product."""
    a, b = np.broadcast_arrays(a, b)
    bits = 8 * a.dtype.itemsize
    found = [(int(x) * int(y)) >> bits & ((1 << bits) - 1) for x, y in zip(a, b, strict=True)]
    return np.array(found, f"u{a.dtype.itemsize}").view(a.dtype)


def shift_left(a: Values, n: Values) -> Values:
    """``shl``: a shift by the width of the word or more is 0."""
    bits = 8 * a.dtype.itemsize
    return np.where(
        n >= bits, a.dtype.type(0), np.left_shift(a, np.minimum(n, bits - 1).astype(a.dtype))
    )


def shift_right(a: Values, n: Values) -> Values:
    """``shr``: a shift by the width of the word or more leaves the sign, or 0."""
    bits = 8 * a.dtype.itemsize
    shifted = np.right_shift(a, np.minimum(n, bits - 1).astype(a.dtype))
    return shifted if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), shifted)


def permute(a: Values, b: Values, selector: Values) -> Values:
    """``prmt.b32``: four bytes out of eight, each the byte or its sign."""
    eight = a.astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    found: Values = np.uint32(0)
    for i in range(4):
        which = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (eight >> ((which & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        byte = np.where(which & np.uint32(8), np.where(byte & np.uint64(128), 255, 0), byte)
        found = found | (byte.astype(np.uint32) << np.uint32(8 * i))
    return found


def convert_to_int(a: Values, to: Any, mode: str) -> Values:
    """Convert floats to integers: rounded, and clamped to the integer's range; NaN becomes 0."""
    rounded = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode](a)
    limits = np.iinfo(to)
    # float64 does not have the largest integers exactly, so values beyond them are clamped by hand.
    inside = (rounded >= float(limits.min)) & (rounded < float(limits.max))
    found = np.where(inside, rounded, 0).astype(to)
    return np.where(
        np.isnan(a),
        to(0),
        np.where(inside, found, np.where(rounded < 0, limits.min, limits.max)).astype(to),
    )


def extract(a: Values, first: Values, count: Values) -> Values:
    """``bfe``: a field of bits, sign-extended for signed types."""
    bits = 8 * a.dtype.itemsize
    first, count = np.asarray(first) & 255, np.asarray(count) & 255
    wide = a.astype(object) if bits == 64 else a.astype(np.int64)
    mask = (1 << np.minimum(count, bits).astype(object)) - 1
    field = (wide.astype(object) >> first.astype(object)) & mask
    if a.dtype.kind == "i":
        top = np.minimum(first + count - 1, bits - 1)
        sign = (wide.astype(object) >> top.astype(object)) & 1
        field = np.where(count == 0, 0, field - sign * (mask + 1))
    return (
        np.array(field & ((1 << bits) - 1), dtype=object)
        .astype(f"u{a.dtype.itemsize}")
        .view(a.dtype)
    )


def insert(a: Values, b: Values, first: Values, count: Values) -> Values:
    """``bfi``: the low bits of `a` in place of some of `b`'s."""
    bits = 8 * b.dtype.itemsize
    first, count = int(np.asarray(first).flat[0]) & 255, int(np.asarray(count).flat[0]) & 255
    mask = ((1 << count) - 1) << first & ((1 << bits) - 1)
    of = b.dtype.type
    return (b & of(~mask & ((1 << bits) - 1))) | (
        (np.left_shift(a, of(min(first, bits - 1)))) & of(mask)
    )


def logic3(a: Values, b: Values, c: Values, table: int) -> Values:
    """``lop3``: any function of three bits, by its table."""
    found: Values = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            x, y, z = (v if row >> i & 1 else ~v for v, i in ((a, 2), (b, 1), (c, 0)))
            found = found | (x & y & z)
    return found


def count_ones(a: Values) -> Values:
    """``popc``."""
    return np.bitwise_count(a).astype(np.uint32)


def leading_zeros(a: Values) -> Values:
    """``clz``."""
    bits = 8 * a.dtype.itemsize
    return np.array([bits - int(x).bit_length() for x in np.atleast_1d(a)], np.uint32)


def reversed_bits(a: Values) -> Values:
    """``brev``."""
    bits = 8 * a.dtype.itemsize
    return np.array([int(f"{int(x):0{bits}b}"[::-1], 2) for x in np.atleast_1d(a)], a.dtype)


def funnel(a: Values, b: Values, n: Values, left: bool, wraps: bool) -> Values:
    """``shf``: a shift of two words as one."""
    n = n & np.uint32(31) if wraps else np.minimum(n, np.uint32(32))
    both = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | np.asarray(a).astype(np.uint64)
    moved = (both << n.astype(np.uint64)) >> np.uint64(32) if left else both >> n.astype(np.uint64)
    return moved.astype(np.uint32)
