"""`load_chunk`: 16 bytes of a row at once, as floats, for kernels that compute in float32 or float64.

Plain indexing of small words never reads so much at once. The simulator has a twin with the same parameters.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cuda.instructions.emit import intrinsic
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kinds import kind as kind_of
from numkv.kinds import kinds
from numkv.rows import code6
from numkv.rows.code4 import LEVELS, code4_level
from numkv.rows.convert import codec

#: Kinds of which several elements share words: INT4, CODE4 and CODE6.
PACKED = frozenset(k.name for k in kinds() if k.is_packed)


@functools.cache
def loader(KIND, COMPUTE="float32"):
    """The function that turns a word into a float; a code is its own value, not yet scaled. Not for packed kinds."""
    return codec("fp32" if kind_of(KIND).has_scales else KIND, COMPUTE)[0]


def _simulated_load_chunk(KIND, WIDTH, array, a, b, c, d, floats, at):
    load = loader(KIND, floats.dtype.name)
    row = array[a, b, c]
    if KIND == "code4":
        for i in range(WIDTH):
            floats[at + i] = code4_level(int(row[d + i // 2]) >> 4 * (i % 2))
        return
    if KIND == "code6":
        for i in range(WIDTH):
            first = d + i // 4 * 3
            unit = sum(int(row[first + j]) << 8 * j for j in range(3))
            floats[at + i] = code6.code6_level(unit >> 6 * (i % 4) & 63)
        return
    if KIND in PACKED:
        for i in range(WIDTH // 2):
            floats[at + i] = int(row[d + i]) & 15
            floats[at + WIDTH // 2 + i] = int(row[d + i]) >> 4
        return
    for i in range(WIDTH):
        floats[at + i] = load(row[d + i])


def _load_chunk(typing_context, KIND, WIDTH, array, a, b, c, d, floats, at):
    """Put ``array[a, b, c, d : d + WIDTH]`` as floats at ``floats[at:]``; 4, 8 or 16 bytes, aligned, of CODE6 6 or 12.

    Of INT4, whose ``WIDTH / 2`` words start with word `d`, the codes: first all low nibbles'. Of CODE4 and
    CODE6, whose words start there too, the levels, in their order.
    `floats` is a local array, which stays in registers as long as `at` is known when loops are unrolled.
    """
    if not (isinstance(KIND, types.StringLiteral) and isinstance(WIDTH, types.IntegerLiteral)):
        return None
    kind, width = KIND.literal_value, WIDTH.literal_value
    as_float = floats.dtype

    def codegen(context, b, sig, args):
        source = context.make_array(sig.args[2])(context, b, args[2])
        to = context.make_array(sig.args[7])(context, b, args[7])
        address = b.ptrtoint(source.data, ir.IntType(64))
        steps = cgutils.unpack_tuple(b, source.strides)
        for index, index_type, step in zip(args[3:7], sig.args[3:7], steps, strict=True):
            wide = context.cast(b, index, index_type, types.int64)
            address = b.add(address, b.mul(wide, step))
        words = kind_of(kind).words_per_row(width)
        size = words * sig.args[2].dtype.bitwidth // 8
        at_ = context.cast(b, args[8], sig.args[8], types.int64)
        _put_floats(context, b, kind, address, size, as_float, to, at_)
        return context.get_dummy_value()

    return types.void(KIND, WIDTH, array, a, b, c, d, floats, at), codegen


def _put_floats(context, b, kind, address, size, as_float, to, at):
    """Read `size` bytes of global memory, and put their elements as floats into the array `to`, from `at` on."""
    real = ir.DoubleType() if as_float == types.float64 else ir.FloatType()
    if kind == "code6":
        values = _code6_floats(b, address, size)
    else:
        vector = ir.VectorType(ir.IntType(32), size // 4)
        values = _floats_of(context, b, kind, _load(b, address, vector, size))
    for i, value in enumerate(values):
        if value.type != real:
            convert = b.fpext if as_float == types.float64 else b.fptrunc
            value = convert(value, real)
        b.store(value, b.gep(to.data, [b.add(at, ir.Constant(ir.IntType(64), i))]))


def _load(b, address, type_, size):
    """Read from global memory; arrays come as generic pointers, but these are all there."""
    pointer = b.addrspacecast(
        b.inttoptr(address, type_.as_pointer()), ir.PointerType(type_, addrspace=1)
    )
    found = b.load(pointer)
    found.align = size
    return found


def _floats_of(context, b, kind, chunk):
    """The elements of a chunk, as LLVM floats: what `rows.convert` does, with the GPU's own fp16 conversion."""
    i32, single = ir.IntType(32), ir.FloatType()
    if kind == "int4":
        for shift in (0, 4):  # the low nibbles, then the high ones
            for i in range(chunk.type.count):
                yield from _int4_floats(b, b.extract_element(chunk, ir.Constant(i32, i)), shift)
        return
    if kind in ("bf16", "int8", "code4"):
        part = {"bf16": _bf16_floats, "int8": _int8_floats, "code4": _code4_floats}[kind]
        for i in range(chunk.type.count):
            yield from part(b, b.extract_element(chunk, ir.Constant(i32, i)))
        return
    if kind in ("fp8_e4m3", "fp8_e5m2"):  # GPUs before sm_89 have no conversion
        load = loader(kind)
        elements = b.bitcast(chunk, ir.VectorType(ir.IntType(8), 4 * chunk.type.count))
        for i in range(4 * chunk.type.count):
            word = b.extract_element(elements, ir.Constant(i32, i))
            yield context.compile_internal(b, load, types.float32(types.uint8), [word])
        return
    element, count = {
        "fp16": (ir.HalfType(), 8), "fp32": (single, 4), "fp64": (ir.DoubleType(), 2)
    }[kind]  # fmt: skip
    elements = b.bitcast(chunk, ir.VectorType(element, count))
    for i in range(count):
        value = b.extract_element(elements, ir.Constant(i32, i))
        yield b.fpext(value, single) if kind == "fp16" else value


def _bf16_floats(b, pair):
    """Two bfloat16s: each is the upper half of a float32."""
    i32, single = ir.IntType(32), ir.FloatType()
    yield b.bitcast(b.shl(pair, ir.Constant(i32, 16)), single)
    yield b.bitcast(b.and_(pair, ir.Constant(i32, 0xFFFF0000)), single)


def _int8_floats(b, codes):
    """Four int8s, without the GPU's conversion, which is several times slower than arithmetic on some devices.

    ``code + 128`` is a byte; as the last one of the float 2**23 it adds its value to that.
    """
    bytes_ = b.xor(codes, ir.Constant(ir.IntType(32), 0x80808080))
    return _byte_floats(b, bytes_, 2.0**23 + 128)


def _int4_floats(b, codes, shift):
    """The codes in four bytes' nibbles, from bit `shift` on."""
    i32 = ir.IntType(32)
    nibbles = b.and_(b.lshr(codes, ir.Constant(i32, shift)), ir.Constant(i32, 0x0F0F0F0F))
    return _byte_floats(b, nibbles, 2.0**23)


def _code4_floats(b, codes):
    """The levels of eight codes of `numkv.rows.code4`: a permutation of bytes looks four magnitudes up."""
    i32, single = ir.IntType(32), ir.FloatType()
    low, high = (
        ir.Constant(i32, sum(x << 8 * i for i, x in enumerate(part)))
        for part in (LEVELS[:4], LEVELS[4:])
    )
    for first in range(0, 8, 4):
        here = b.lshr(codes, ir.Constant(i32, 4 * first))
        numbers = b.and_(here, ir.Constant(i32, 0x7777))
        for i, size in enumerate(_byte_floats(b, _permute(b, low, high, numbers), 2.0**23)):
            sign = b.and_(b.shl(here, ir.Constant(i32, 28 - 4 * i)), ir.Constant(i32, 0x80000000))
            yield b.bitcast(b.or_(b.bitcast(size, i32), sign), single)


def _code6_floats(b, address, size):
    """The levels of 8 or 16 codes of `numkv.rows.code6`, in 6 or 12 bytes: three loads, as wide as rows lie."""
    i32, each = ir.IntType(32), size // 3
    a, c, e = (
        b.zext(_load(b, b.add(address, ir.Constant(ir.IntType(64), each * i)), ir.IntType(8 * each), each), i32)
        for i in range(3)
    )  # fmt: skip

    def shifted(low, right, high, left):
        return b.or_(b.lshr(low, ir.Constant(i32, right)), b.shl(high, ir.Constant(i32, left)))

    # Three bytes each, and above them what does not matter.
    if each == 2:
        units = [shifted(a, 0, c, 16), shifted(c, 8, e, 8)]
    else:
        units = [a, shifted(a, 24, c, 8), shifted(c, 16, e, 16), b.lshr(e, ir.Constant(i32, 8))]
    for unit in units:
        yield from _unit_floats(b, unit)


def _unit_floats(b, unit):
    """The levels of the four codes of CODE6 in the lower three bytes of a word."""
    i32, single = ir.IntType(32), ir.FloatType()

    def masked(word, left, mask):
        return b.and_(b.shl(word, ir.Constant(i32, left)), ir.Constant(i32, mask))

    codes = masked(unit, 0, 63)
    for i in range(1, 4):  # a byte for each
        codes = b.or_(codes, masked(unit, 2 * i, 63 << 8 * i))
    # A permutation of bytes looks four magnitudes up in a table of eight; the code's upper bits say in which.
    numbers = masked(codes, 0, 0x07070707)
    numbers = b.or_(numbers, b.lshr(numbers, ir.Constant(i32, 4)))
    numbers = _permute(b, numbers, ir.Constant(i32, 0), ir.Constant(i32, 0x4420))
    found = []
    for first in range(0, 32, 8):
        low, high = (
            ir.Constant(i32, sum(x << 8 * i for i, x in enumerate(code6.LEVELS[at : at + 4])))
            for at in (first, first + 4)
        )
        found.append(_permute(b, low, high, numbers))
    for left in (4, 3):  # bits 3 and 4 of codes, as signs of bytes, which fill them
        upper = _permute(
            b, b.shl(codes, ir.Constant(i32, left)), ir.Constant(i32, 0), ir.Constant(i32, 0xBA98)
        )
        found = [
            b.xor(x, b.and_(upper, b.xor(x, y)))
            for x, y in zip(found[::2], found[1::2], strict=True)
        ]
    for i, size in enumerate(_byte_floats(b, found[0], 2.0**23)):
        sign = masked(codes, 26 - 8 * i, 0x80000000)
        yield b.bitcast(b.or_(b.bitcast(size, i32), sign), single)


def _permute(b, low, high, numbers):
    """Four bytes of eight, those of `low` first: each of four nibbles says which one, the lowest the lowest's."""
    i32 = ir.IntType(32)
    permute = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(i32, [i32, i32, i32]), "llvm.nvvm.prmt"
    )
    return b.call(permute, [low, high, numbers])


def _byte_floats(b, bytes_, offset):
    """Four bytes as floats, each as the last one of the float 2**23, less `offset`."""
    i32, single = ir.IntType(32), ir.FloatType()
    for i in range(4):
        # Bytes 0 to 3 are those of `bytes_`, 4 to 7 those of the constant; the topmost is named first.
        bits = _permute(b, bytes_, ir.Constant(i32, 0x4B000000), ir.Constant(i32, 0x7440 + i))
        yield b.fsub(b.bitcast(bits, single), ir.Constant(single, offset))


load_chunk = _simulated_load_chunk if SIMULATED else intrinsic(_load_chunk)
