"""Storage kinds in LLVM: elements in memory, and how vectors of them become floats.

A new float kind needs an entry in `_WIDEN`; all else follows from the table of kinds.

**Codes of a codebook** become levels by a table lookup. CODE4 has two codes a byte and a table of 16 bytes, CODE6 four
codes in three bytes and a table of 64. CPUs have instructions for such lookups: the bytes of one vector index those of
another.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.vectors.emit import DOUBLE, FLOAT, HALF, I8, I16, I32, I64
from numkv.kernels.cpu.vectors.features import FEATURES, HAS_HALF
from numkv.kinds import kinds
from numkv.rows import code4, code6

#: Kinds whose codes are looked up.
LOOKED_UP = (
    "code4",
    "code6",
    "int4_channel",
)  # the last stands for all kinds of 4 bits with scales by channel
# Those with two codes a byte.
_NIBBLES = ("code4", "int4_channel")
# Levels by codes.
_TABLES = {
    "code4": [*code4.LEVELS, *(-level for level in code4.LEVELS)],
    "code6": [*code6.LEVELS, *(-level for level in code6.LEVELS)],
    "int4_channel": range(-15, 16, 2),  # twice the code, and one
}
_ON_ARM = "neon" in FEATURES and platform.machine() in ("aarch64", "arm64")
# By bytes of a vector, the instruction that takes bytes of each 16 by the numbers in as many others.
_LOOKUPS = {
    size: name
    for size, feature, name in (
        (64, "avx512bw", "llvm.x86.avx512.pshuf.b.512"),
        (32, "avx2", "llvm.x86.avx2.pshuf.b"),
        (16, "ssse3", "llvm.x86.ssse3.pshuf.b.128"),
        (16, "neon", "llvm.aarch64.neon.tbl1.v16i8"),
    )
    if feature in FEATURES and (feature != "neon" or _ON_ARM)
}
# Instructions that take bytes of 64: of a vector of as many, by six bits of each number, or of four vectors of 16.
_OF_64 = {
    name: instruction
    for name, feature, instruction in (
        ("vector", "avx512vbmi", "llvm.x86.avx512.permvar.qi.512"),
        ("four", "neon", "llvm.aarch64.neon.tbl4.v16i8"),
    )
    if feature in FEATURES and (feature != "neon" or _ON_ARM)
}
# The one that takes bytes of two vectors of 64, by seven bits of each number.
_OF_128 = "llvm.x86.avx512.vpermi2var.qi.512"
# An instruction that takes eight bits of 64 from any one on, for each of eight bytes.
_SHIFTS = "llvm.x86.avx512.pmultishift.qb.512"


def spread_size(kind, elements):
    """Bytes of the vector that so many packed elements are loaded into: a power of 2."""
    return elements // 2 if kind in _NIBBLES else elements


def levels_of(builder, kind, packed, without_sign=False):
    """The levels of codes as bytes; see `numkv.rows.code4` and `numkv.rows.code6`.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    kind : str
        Their kind.
    packed : llvmlite.ir.Value
        A vector of `spread_size` bytes. CODE6 reads the first three quarters.
    without_sign : bool, default: False
        Whether levels get 128 more.
    """
    table = [x + 128 if without_sign else x for x in _TABLES[kind]]
    if kind == "code6":
        count = packed.type.count
        return _pick(
            builder, *2 * [looked_up_far(builder, _sixes(builder, packed), table)], range(count)
        )
    b, count = builder, packed.type.count
    wide = b.zext(packed, ir.VectorType(I16, count))
    # Byte 2 j gets the low nibble of byte j, byte 2 j + 1 the high one; above them is what does not matter.
    wide = b.or_(wide, b.shl(wide, ir.Constant(wide.type, [I16(4)] * count)))
    codes = b.bitcast(wide, ir.VectorType(I8, 2 * count))
    codes = b.and_(codes, ir.Constant(codes.type, [I8(15)] * codes.type.count))
    return looked_up(b, codes, table)


def pair_of_code6(builder, word):
    """The levels of the two codes of CODE6 in the lower 12 bits of a 16-bit integer."""
    b, type_ = builder, ir.VectorType(I8, 2)
    codes = ir.Constant(type_, ir.Undefined)
    for i in range(2):
        code = b.and_(b.lshr(word, I16(6 * i)), I16(63))
        codes = b.insert_element(codes, b.trunc(code, I8), I32(i))
    return _pick(b, *2 * [looked_up_far(b, codes, _TABLES["code6"])], range(2))


def level_words(builder, kind, packed):
    """The levels of codes as words: those of even elements, and those of odd ones."""
    b, count = builder, packed.type.count
    if kind == "code4" and count == 32 and "avx512bw" in FEATURES:
        return level_pairs(b, b.zext(packed, ir.VectorType(I16, count)))
    levels = levels_of(b, kind, packed)
    words = b.bitcast(levels, ir.VectorType(I16, levels.type.count // 2))
    eight = ir.Constant(words.type, [I16(8)] * words.type.count)
    return [b.ashr(b.shl(words, eight), eight), b.ashr(words, eight)]


def level_pairs(builder, packed):
    """Return the levels of CODE4 as words, from 512 bits with a byte of two codes in each word: low nibbles, then high
    ones.

    For AVX-512: a lookup in a table of 32 words, indexed by the low five bits of a word. The table ignores the fifth
    bit, so all bits above the nibble are ignored.
    """
    b, type_ = builder, ir.VectorType(I16, 32)
    values = ir.Constant(type_, 2 * [I16(x) for x in _TABLES["code4"]])
    words = b.bitcast(packed, type_)
    high = b.lshr(words, ir.Constant(type_, [I16(4)] * 32))
    name = "llvm.x86.avx512.permvar.hi.512"
    return [_call(b, name, [values, x]) for x in (words, high)]


def _sixes(b, packed):
    """A byte for each code of six bits, of which four are three bytes; above the code is what does not matter.

    With VBMI there are always 64 bytes of them.
    """
    count = packed.type.count
    if "vector" in _OF_64:
        # Six bytes to eight, and of these the eight bits from each code on.
        lanes = [6 * (i // 8) + min(i % 8, 5) for i in range(64)]
        wide = _pick(b, packed, packed, [lane if lane < count else 0 for lane in lanes])
        shifts = ir.Constant(wide.type, [I8(6 * (i % 8)) for i in range(64)])
        return _call(b, _SHIFTS, [shifts, wide])
    lanes = [3 * (i // 4) + min(i % 4, 2) for i in range(count)]
    units = b.bitcast(_pick(b, packed, packed, lanes), ir.VectorType(I32, count // 4))

    def constant(value):
        return ir.Constant(units.type, [I32(value)] * units.type.count)

    codes = b.and_(units, constant(63))
    for i in range(1, 4):  # each by two bits further into a byte of its own
        part = b.and_(b.shl(units, constant(2 * i)), constant(63 << 8 * i))
        codes = b.or_(codes, part)
    return b.bitcast(codes, packed.type)


def looked_up_far(b, codes, table):
    """``table[codes]`` of a table of 32 or 64; with VBMI and 64 codes only the lower six bits matter."""
    count = codes.type.count
    if _OF_64:
        table = [*table] * (64 // len(table))
    if "vector" in _OF_64:
        if count < 64:
            codes = _pick(b, codes, codes, range(64))
        values = ir.Constant(codes.type, [I8(x) for x in table])
        return _call(b, _OF_64["vector"], [values, codes])
    if "four" in _OF_64:
        type_ = ir.VectorType(I8, 16)
        parts = [ir.Constant(type_, [I8(x) for x in table[i : i + 16]]) for i in range(0, 64, 16)]
        found = [
            _call(b, _OF_64["four"], [*parts, _pick(b, codes, codes, range(first, first + 16))])
            for first in range(0, count, 16)
        ]
        return _joined(b, found)
    low = b.and_(codes, ir.Constant(codes.type, [I8(15)] * count))
    found = [looked_up(b, low, table[i : i + 16]) for i in range(0, len(table), 16)]
    zero = ir.Constant(codes.type, None)
    for shift in (3, 2)[: len(found) // 2]:  # bit 4, and then bit 5, to where the sign is
        bit = b.shl(codes, ir.Constant(codes.type, [I8(shift)] * count))
        upper = b.icmp_signed("<", bit, zero)
        found = [b.select(upper, y, x) for x, y in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def looked_up_byte(b, codes, table):
    """``table[codes]`` of a table of 256 for 64 bytes, where `has_byte_lookups`."""
    halves = [
        _call(b, _OF_128, [ir.Constant(codes.type, [I8(x) for x in table[i : i + 64]]), codes,
                           ir.Constant(codes.type, [I8(x) for x in table[i + 64 : i + 128]])])
        for i in (0, 128)
    ]  # fmt: skip
    return b.select(b.icmp_signed("<", codes, ir.Constant(codes.type, None)), halves[1], halves[0])


def has_byte_lookups():
    """Return whether there is an instruction for `looked_up_byte`."""
    return "avx512vbmi" in FEATURES


def has_lookups():
    """Return whether there is an instruction for `looked_up`."""
    return bool(_LOOKUPS)


def looked_up(b, codes, table):
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
        parts.append(_call(b, _LOOKUPS[size], [values, part]))
    found = _joined(b, parts)
    return _pick(b, found, found, range(count)) if count < size else found


def _joined(b, parts):
    """Vectors one after another, as one."""
    while len(parts) > 1:
        width = 2 * parts[0].type.count
        parts = [_pick(b, x, y, range(width)) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _call(b, name, vectors):
    """Apply an instruction to vectors of a type, in that type."""
    signature = ir.FunctionType(vectors[0].type, [x.type for x in vectors])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), vectors)


def _pick(b, x, y, lanes):
    """Lanes of two vectors; those past the end of the first, if both are one, do not matter."""
    most = x.type.count * (1 if x is y else 2)
    mask = [ir.Constant(I32, i) if i < most else ir.Constant(I32, 0) for i in lanes]
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(mask)), mask))


def _chosen(b, codes, table):
    """`looked_up` without such an instruction: one number after another."""
    found = ir.Constant(codes.type, [I8(table[0])] * codes.type.count)
    for i, level in enumerate(table[1:], 1):
        here = b.icmp_unsigned("==", codes, ir.Constant(codes.type, [I8(i)] * codes.type.count))
        found = b.select(here, ir.Constant(codes.type, [I8(level)] * codes.type.count), found)
    return found


_WORDS = {"float64": DOUBLE, "float32": FLOAT, "uint16": I16, "uint8": I8, "int8": I8}
#: Type of a word in memory, by kind.
STORED = {kind.name: _WORDS[kind.word.name] for kind in kinds(by_channel=True)}
#: Elements in a cache line, rounded down to a power of 2.
ON_LINE = {
    kind.name: 1 << int(64 / kind.bytes_per_element).bit_length() - 1
    for kind in kinds(by_channel=True)
}


def in_words(builder, kind, elements):
    """Return how many words so many elements of a row take, or where in a row they begin: an LLVM integer."""
    if kind == "code6":
        return builder.ashr(builder.mul(elements, I64(3)), I64(2))
    return builder.ashr(elements, I64(1)) if kind == "int4" or kind in _NIBBLES else elements


def loaded_words(kind, elements):
    """Words of a vector that so many elements are loaded into, where they are loaded as they lie."""
    return spread_size(kind, elements) if kind in LOOKED_UP else elements


def widened(v, kind, words):
    """Return a vector of a kind's words as floats, in the float type of `v`: ``words.astype(compute)``.

    Words of INT8 are codes, which the caller multiplies by their scale. So are levels of CODE4 and CODE6, whose words
    are those of `Vectors.load_packed`. 8-bit floats may need their head's scale.
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
