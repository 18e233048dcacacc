"""Codes of a codebook to their levels: two to a byte become bytes, by a look into a table of 16.

CPUs have an instruction for such a look: bytes of a vector say which bytes of another are taken.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.vectors.emit import I8, I16, I32
from numkv.kernels.cpu.vectors.features import FEATURES
from numkv.rows.code4 import LEVELS

__all__ = ["level_pairs", "level_words", "levels_of"]

# Levels by codes.
_TABLE = [*LEVELS, *(-level for level in LEVELS)]
# By bytes of a vector, the instruction that takes bytes of each 16 by the numbers in as many others.
_LOOKUPS = {
    size: name
    for size, feature, name in (
        (64, "avx512bw", "llvm.x86.avx512.pshuf.b.512"),
        (32, "avx2", "llvm.x86.avx2.pshuf.b"),
        (16, "ssse3", "llvm.x86.ssse3.pshuf.b.128"),
        (16, "neon", "llvm.aarch64.neon.tbl1.v16i8"),
    )
    if feature in FEATURES and (feature != "neon" or platform.machine() in ("aarch64", "arm64"))
}


def levels_of(builder, packed, without_sign=False):
    """The levels of codes, two to a byte, as twice as many bytes; see `numkv.rows.code4`.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    packed : llvmlite.ir.Value
        A vector of bytes.
    without_sign : bool, default: False
        Whether levels get 128 more.
    """
    b, count = builder, packed.type.count
    wide = b.zext(packed, ir.VectorType(I16, count))
    # Byte 2 j gets the low nibble of byte j, byte 2 j + 1 the high one; above them is what does not matter.
    wide = b.or_(wide, b.shl(wide, ir.Constant(wide.type, [I16(4)] * count)))
    codes = b.bitcast(wide, ir.VectorType(I8, 2 * count))
    codes = b.and_(codes, ir.Constant(codes.type, [I8(15)] * codes.type.count))
    return _looked_up(b, codes, [x + 128 if without_sign else x for x in _TABLE])


def level_words(builder, packed):
    """The levels of codes, two to a byte, as words: those of low nibbles, and those of high ones."""
    b, count = builder, packed.type.count
    wide = b.zext(packed, ir.VectorType(I16, count))
    if count == 32 and "avx512bw" in FEATURES:
        return level_pairs(b, wide)
    words = b.bitcast(levels_of(b, packed), wide.type)
    eight = ir.Constant(wide.type, [I16(8)] * count)
    return [b.ashr(b.shl(words, eight), eight), b.ashr(words, eight)]


def level_pairs(builder, packed):
    """The levels of codes as words, where 512 bits hold a byte of two codes in each word: of low nibbles, of high ones.

    For AVX-512: a look into a table of 32 words, of which five bits of a word say which one. The fifth does not matter,
    and so what is above the nibbles does not.
    """
    b, type_ = builder, ir.VectorType(I16, 32)
    values = ir.Constant(type_, 2 * [I16(x) for x in _TABLE])
    signature = ir.FunctionType(type_, [type_] * 2)
    name = "llvm.x86.avx512.permvar.hi.512"
    function = cgutils.get_or_insert_function(b.module, signature, name)
    words = b.bitcast(packed, type_)
    high = b.lshr(words, ir.Constant(type_, [I16(4)] * 32))
    return [b.call(function, [values, x]) for x in (words, high)]


def _looked_up(b, codes, table):
    """``table[codes]`` of numbers below 16."""
    count = codes.type.count
    sizes = [size for size in _LOOKUPS if size <= max(16, count)]
    if not sizes:
        return _chosen(b, codes, table)
    size = max(sizes)
    parts = []
    for first in range(0, count, size):
        part = _pick(b, codes, codes, range(first, first + size)) if count != size else codes
        values = ir.Constant(part.type, [I8(x) for x in table] * (size // 16))
        signature = ir.FunctionType(part.type, [part.type] * 2)
        function = cgutils.get_or_insert_function(b.module, signature, _LOOKUPS[size])
        parts.append(b.call(function, [values, part]))
    while len(parts) > 1:
        width = 2 * parts[0].type.count
        parts = [_pick(b, x, y, range(width)) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return _pick(b, parts[0], parts[0], range(count)) if count < size else parts[0]


def _pick(b, x, y, lanes):
    """Lanes of two vectors; those past the end of the first, if both are one, do not matter."""
    most = x.type.count * (1 if x is y else 2)
    mask = [ir.Constant(I32, i) if i < most else ir.Constant(I32, 0) for i in lanes]
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(mask)), mask))


def _chosen(b, codes, table):
    """`_looked_up` without such an instruction: one number after another."""
    found = ir.Constant(codes.type, [I8(table[0])] * codes.type.count)
    for i, level in enumerate(table[1:], 1):
        here = b.icmp_unsigned("==", codes, ir.Constant(codes.type, [I8(i)] * codes.type.count))
        found = b.select(here, ir.Constant(codes.type, [I8(level)] * codes.type.count), found)
    return found
