"""Storage kinds as LLVM sees them: elements in memory, and how vectors of them become floats.

A new float kind needs an entry in `_WIDEN`; all else follows from the table of kinds.
"""

from __future__ import annotations

from llvmlite import ir

from numkv.kernels.cpu.vectors.emit import DOUBLE, FLOAT, HALF, I8, I16, I32, I64
from numkv.kernels.cpu.vectors.features import HAS_HALF
from numkv.kernels.cpu.vectors.levels import LOOKED_UP, levels_of, spread_size
from numkv.kinds import kinds

_WORDS = {"float64": DOUBLE, "float32": FLOAT, "uint16": I16, "uint8": I8, "int8": I8}
#: Type of a word in memory, by kind.
STORED = {kind.name: _WORDS[kind.word.name] for kind in kinds()}
#: Elements in a cache line, rounded down to a power of 2.
ON_LINE = {kind.name: 1 << int(64 / kind.bytes_per_element).bit_length() - 1 for kind in kinds()}


def in_words(builder, kind, elements):
    """How many words so many elements of a row take, or where in a row they begin: an LLVM integer."""
    if kind == "code6":
        return builder.ashr(builder.mul(elements, I64(3)), I64(2))
    return builder.ashr(elements, I64(1)) if kind in ("int4", "code4") else elements


def loaded_words(kind, elements):
    """Words of a vector that so many elements are loaded into, where they are loaded as they lie."""
    return spread_size(kind, elements) if kind in LOOKED_UP else elements


def widened(v, kind, words):
    """The floats that a vector of words of a kind stands for, in the float type of `v`: ``words.astype(compute)``.

    Words of INT8 are codes, which have still to be multiplied by their scale, and so have levels of CODE4 and CODE6,
    whose words are those of `Vectors.load_packed`; 8-bit floats may have to be by their head's.
    """
    if kind in LOOKED_UP:
        words = levels_of(v.b, kind, words)
    if kind == "int8" or kind in LOOKED_UP:
        return v.b.sitofp(v.b.sext(words, v.int_type), v.type)
    floats = _WIDEN[kind](v, words)
    if v.double and floats.type.element != DOUBLE:
        return v.b.fpext(floats, v.type)
    if not v.double and floats.type.element == DOUBLE:
        return v.b.fptrunc(floats, v.type)
    return floats


def _constant(v, value):
    """A vector of 32-bit integers that are all the same."""
    return ir.Constant(ir.VectorType(I32, v.lanes), [ir.Constant(I32, value)] * v.lanes)


def _as_is(v, floats):
    return floats


def _bf16(v, words):
    """The upper half of a float32's bits."""
    wide = v.b.zext(words, ir.VectorType(I32, v.lanes))
    return v.b.bitcast(v.b.shl(wide, _constant(v, 16)), ir.VectorType(FLOAT, v.lanes))


def _fp16(v, words):
    if HAS_HALF:
        return v.b.fpext(
            v.b.bitcast(words, ir.VectorType(HALF, v.lanes)), ir.VectorType(FLOAT, v.lanes)
        )
    return _fp16_by_integers(v, words)


def _fp16_by_integers(v, words):
    """Widen half floats without an instruction for it; see `numkv.rows.convert.fp16_to_float32`."""
    b, bits, floats = v.b, ir.VectorType(I32, v.lanes), ir.VectorType(FLOAT, v.lanes)
    wide = b.zext(words, bits)
    sign = b.shl(b.and_(wide, _constant(v, 0x8000)), _constant(v, 16))
    magnitude = b.shl(b.and_(wide, _constant(v, 0x7FFF)), _constant(v, 13))
    two_112 = ir.Constant(floats, [ir.Constant(FLOAT, 2.0**112)] * v.lanes)
    finite = b.bitcast(b.fmul(b.bitcast(magnitude, floats), two_112), bits)
    special = b.or_(magnitude, _constant(v, 0x7F800000))
    is_finite = b.icmp_unsigned("<", magnitude, _constant(v, 0x0F800000))
    return b.bitcast(b.or_(sign, b.select(is_finite, finite, special)), floats)


def _e5m2(v, words):
    """The upper half of a half float's bits."""
    type_ = ir.VectorType(I16, v.lanes)
    return _fp16(v, v.b.shl(v.b.zext(words, type_), ir.Constant(type_, [I16(8)] * v.lanes)))


def _e4m3(v, words):
    """A half float with one exponent bit less, whose bias is 8 less: ``(sign, 0, exponent, mantissa) * 2**8``.

    There is no infinity, and all ones are NaN::

        word        s eeee mmm
        half float  s 0eeee mmm0000000
    """
    b, type_ = v.b, ir.VectorType(I16, v.lanes)

    def constant(value):
        return ir.Constant(type_, [I16(value)] * v.lanes)

    wide = b.zext(words, type_)
    magnitude = b.and_(wide, constant(0x7F))
    is_nan = b.icmp_unsigned("==", magnitude, constant(0x7F))
    bits = b.select(is_nan, constant(0x7E00), b.shl(magnitude, constant(7)))
    sign = b.shl(b.and_(wide, constant(0x80)), constant(8))
    floats = _fp16(v, b.or_(bits, sign))
    return b.fmul(floats, ir.Constant(floats.type, [FLOAT(256.0)] * v.lanes))


_WIDEN = {
    "fp64": _as_is, "fp32": _as_is, "fp16": _fp16, "bf16": _bf16, "fp8_e4m3": _e4m3, "fp8_e5m2": _e5m2,
}  # fmt: skip
