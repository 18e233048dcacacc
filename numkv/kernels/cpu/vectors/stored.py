"""Storage kinds as LLVM sees them: elements in memory, and how vectors of them become floats.

A new float kind needs an entry in `_WIDEN`; all else follows from the table of kinds.
"""

from __future__ import annotations

from llvmlite import ir

from numkv.kernels.cpu.vectors.emit import DOUBLE, FLOAT, HALF, I8, I16, I32
from numkv.kernels.cpu.vectors.features import HAS_HALF
from numkv.kinds import kinds

__all__ = ["ON_LINE", "PER_WORD", "STORED", "widened"]

_WORDS = {"float64": DOUBLE, "float32": FLOAT, "uint16": I16, "uint8": I8, "int8": I8}
#: Type of a word in memory, by kind.
STORED = {kind.name: _WORDS[kind.word.name] for kind in kinds()}
#: Elements in a word.
PER_WORD = {kind.name: kind.elements_per_word for kind in kinds()}
#: Elements in a cache line.
ON_LINE = {kind.name: 64 * kind.elements_per_word // kind.word.itemsize for kind in kinds()}


def widened(v, kind, words):
    """The floats that a vector of words of a kind stands for, in the float type of `v`: ``words.astype(compute)``.

    Words of INT8 are codes, which have still to be multiplied by their scale.
    """
    if kind == "int8":
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


_WIDEN = {"fp64": _as_is, "fp32": _as_is, "fp16": _fp16, "bf16": _bf16}
