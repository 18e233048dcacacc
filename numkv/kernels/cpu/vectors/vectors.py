"""Vectors of floats: constants, memory, arithmetic, sums across lanes; powers of two, hyperbolic tangents."""

from __future__ import annotations

import math

from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.vectors.emit import DOUBLE, FLOAT, I8, I16, I32, I64
from numkv.kernels.cpu.vectors.features import ADD_PAIRS, DOT_PRODUCTS, FEATURES, HAS_FMA, LANES
from numkv.kernels.cpu.vectors.stored import (
    LOOKED_UP,
    STORED,
    levels_of,
    loaded_words,
    pair_of_code6,
    widened,
)

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
    # 2**x = 2**n * 2**f, n the nearest integer. Adding 1.5 * 2**(mantissa bits) leaves n in the low bits. With the
    # exponent bias added, and shifted to the exponent's place, they are the bits of 2**n; higher bits drop out. The
    # least n gives 0.
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


class Vectors:
    """Emits vector instructions for one float type.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    compute : {"float32", "float64"}
        Element type of the vectors.
    """

    def __init__(self, builder, compute):
        self.b = builder
        self.double = compute == "float64"
        self.lanes = LANES // 2 if self.double else LANES
        self.float = DOUBLE if self.double else FLOAT
        self.int = I64 if self.double else I32
        self.type = ir.VectorType(self.float, self.lanes)
        self.int_type = ir.VectorType(self.int, self.lanes)
        # Whether bytes are loaded by a mask in one instruction.
        self.wide_masks = LANES == 16 and {"avx512bw", "avx512vl"} <= FEATURES

    # -- constants and lanes

    def splat(self, value):
        """A vector whose lanes all hold a number or an LLVM scalar."""
        if not isinstance(value, ir.Value):
            return ir.Constant(self.type, [ir.Constant(self.float, float(value))] * self.lanes)
        first = self.b.insert_element(ir.Constant(self.type, ir.Undefined), value, I32(0))
        return self.shuffle(first, first, [0] * self.lanes)

    def splat_int(self, value):
        """An integer vector whose lanes all hold a number."""
        return ir.Constant(self.int_type, [ir.Constant(self.int, value)] * self.lanes)

    def shuffle(self, a, b, lanes):
        """Lanes picked from `a` (0 …) and `b` (from its number of lanes on)."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, i) for i in lanes])
        return self.b.shuffle_vector(a, b, mask)

    def lanes_below(self, count, start=0, lanes=None):
        """A mask of the lanes whose number plus `start` is below the LLVM integer `count` (i64, far below 2**31)."""
        lanes = lanes or self.lanes
        type_ = ir.VectorType(I32, lanes)
        iota = ir.Constant(type_, [ir.Constant(I32, start + i) for i in range(lanes)])
        count = self.b.trunc(count, I32)
        first = self.b.insert_element(ir.Constant(type_, ir.Undefined), count, I32(0))
        return self.b.icmp_signed("<", iota, self.shuffle(first, first, [0] * lanes))

    # -- memory

    def pointer(self, base, at, element):
        """Return the address of element `at` of memory that has elements of an LLVM type."""
        typed = self.b.bitcast(base, element.as_pointer())
        return self.b.gep(typed, [at])

    def load(self, kind, base, at, mask=None, column=None, parts=1):
        """Load `lanes` elements of a storage kind, widened; words outside `mask` are zero and not touched.

        Where these may begin within a byte, as two of CODE6, `column` is the number of the first. With several `parts`,
        the elements of one are loaded, and repeated in all of them; not those of packed kinds.
        """
        if kind in LOOKED_UP:
            if kind == "code6" and self.lanes == 2:
                return self._pair_of_code6(base, at, column)
            return widened(self, kind, self.load_packed(kind, base, at, self.lanes, mask))
        element = STORED[kind]
        type_ = ir.VectorType(element, self.lanes // parts)
        pointer = self.pointer(base, at, element)
        size = {I8: 1, I16: 2, FLOAT: 4, DOUBLE: 8}[element]
        if mask is None:
            value = self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=size)
        else:
            value = self.masked_load(pointer, type_, size, mask)
        return widened(self, kind, self.in_parts(value, self.lanes))

    def in_parts(self, vector, size):
        """Repeat a vector until there are `size` elements."""
        count = vector.type.count
        if count == size:
            return vector
        return self.shuffle(vector, vector, [i % count for i in range(size)])

    def masked_load(self, pointer, type_, size, mask):
        """Load the lanes of `mask` of a vector of elements of `size` bytes; the others are zero."""
        name = f"llvm.masked.load.v{type_.count}{'i' if size < 4 else 'f'}{8 * size}.p0"
        pointer = self.b.bitcast(pointer, type_.as_pointer())
        signature = ir.FunctionType(type_, [pointer.type, I32, mask.type, type_])
        function = cgutils.get_or_insert_function(self.b.module, signature, name)
        zero = ir.Constant(type_, None)
        return self.b.call(function, [pointer, I32(size), mask, zero])

    def _pair_of_code6(self, base, at, column):
        """Two elements of CODE6 as floats: in two bytes, from their lowest bit on or from the fifth."""
        pointer = self.b.bitcast(self.pointer(base, at, I8), I16.as_pointer())
        shift = self.b.trunc(self.b.shl(self.b.and_(column, I64(2)), I64(1)), I16)
        levels = pair_of_code6(self.b, self.b.lshr(self.b.load(pointer, align=1), shift))
        return self.b.sitofp(self.b.sext(levels, self.int_type), self.type)

    def load_packed(self, kind, base, at, elements, mask=None):
        """Load elements of a kind that are packed, for `levels_of`; outside `mask` no byte is touched.

        CODE6's three bytes for each four elements become a vector of four, whose last quarter is anything.
        """
        size = loaded_words(kind, elements)
        type_, pointer = ir.VectorType(I8, size), self.pointer(base, at, I8)
        if mask is not None:
            return self.masked_load(pointer, type_, 1, mask)
        if kind != "code6":
            return self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=1)
        if self.wide_masks and size >= 16:
            bits = ir.VectorType(ir.IntType(1), size)
            mask = ir.Constant(bits, [bits.element(int(4 * i < 3 * size)) for i in range(size)])
            return self.masked_load(pointer, type_, 1, mask)
        # Half and a quarter of the vector.
        half, quarter = (ir.VectorType(I8, size // n) for n in (2, 4))
        low = self.b.load(self.b.bitcast(pointer, half.as_pointer()), align=1)
        rest = self.b.gep(pointer, [I64(size // 2)])
        high = self.b.load(self.b.bitcast(rest, quarter.as_pointer()), align=1)
        high = self.shuffle(high, high, [i % quarter.count for i in range(half.count)])
        return self.shuffle(low, high, range(size))

    def load_codes(self, base, at, mask=None, kind="int8", parts=1):
        """Load int8 codes, or levels, as ``2 * lanes`` 16-bit integers; outside `mask` no byte is touched.

        With several `parts`, the codes of one are loaded, and repeated in all of them; not levels.
        """
        if kind in LOOKED_UP:
            value = levels_of(self.b, kind, self.load_packed(kind, base, at, 2 * self.lanes, mask))
            return self.b.sext(value, ir.VectorType(I16, 2 * self.lanes))
        type_, pointer = ir.VectorType(I8, 2 * self.lanes // parts), self.pointer(base, at, I8)
        if mask is None:
            value = self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=1)
        else:
            value = self.masked_load(pointer, type_, 1, mask)
        return self.b.sext(self.in_parts(value, 2 * self.lanes), ir.VectorType(I16, 2 * self.lanes))

    def load_words(self, base, at):
        """Load ``2 * lanes`` 16-bit integers from the memory of floats; `at` counts floats."""
        type_ = ir.VectorType(I16, 2 * self.lanes)
        pointer = self.pointer(base, at, self.float)
        return self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=2)

    def load_nibbles(self, base, at, scale, minimum, mask=None):
        """Load `lanes` bytes of two INT4 codes: the values of the low nibbles and of the high ones.

        A value is ``scale * code + minimum``, with vectors of their group's scale and of the value of code 0. Lanes
        outside `mask` are zero and not touched.
        """
        type_ = ir.VectorType(I8, self.lanes)
        pointer = self.pointer(base, at, I8)
        if mask is None:
            codes = self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=1)
        else:
            codes = self.masked_load(pointer, type_, 1, mask)
        wide = ir.VectorType(I32, self.lanes)
        low = self.b.zext(codes, wide)
        high = self.b.lshr(low, ir.Constant(wide, [I32(4)] * self.lanes))
        values = []
        for code in (low, high):
            code = self.b.and_(code, ir.Constant(wide, [I32(15)] * self.lanes))
            value = self.fma(self.b.sitofp(code, self.type), scale, minimum)
            if mask is not None:
                value = self.b.select(mask, value, ir.Constant(self.type, None))
            values.append(value)
        return values

    def add_pairs(self, total, a, b):
        """``total + a * b`` of 16-bit integers, neighbouring products added: `lanes` 32-bit sums.

        `a` and `b` are vectors of any element type; only their bits matter.
        """
        if self.lanes == LANES and DOT_PRODUCTS:
            return self.add_products("wssd", total, a, b)
        words = ir.VectorType(I16, 2 * self.lanes)
        a, b = (self.b.bitcast(x, words) for x in (a, b))
        name = ADD_PAIRS.get(self.lanes)
        if name:
            signature = ir.FunctionType(total.type, [a.type] * 2)
            function = cgutils.get_or_insert_function(self.b.module, signature, name)
            return self.b.add(total, self.b.call(function, [a, b]))
        for first in (0, 1):
            lanes = [*range(first, 2 * self.lanes, 2)]
            wide = [self.b.sext(self.shuffle(x, x, lanes), total.type) for x in (a, b)]
            total = self.b.add(total, self.b.mul(*wide))
        return total

    def add_products(self, name, total, a, b):
        """``total + a * b`` by one of `DOT_PRODUCTS`."""
        # As text: LLVM would take some of them apart, into a product and a sum.
        signature = ir.FunctionType(total.type, [total.type] * 3)
        add = ir.InlineAsm(signature, DOT_PRODUCTS.format(name), "=v,v,v,0")
        a, b = (self.b.bitcast(x, total.type) for x in (a, b))
        return self.b.call(add, [a, b, total])

    def add_bf16_pairs(self, total, a, b):
        """``total + a * b`` of bf16, neighbouring products added: `lanes` float32 sums; see `HAS_BF16_PAIRS`.

        A lane of the integer vectors `a` and `b` is two bf16. Denormal numbers count as 0, and become 0.
        """
        signature = ir.FunctionType(total.type, [a.type, b.type, total.type])
        add = ir.InlineAsm(signature, "vdpbf16ps $2, $1, $0", "=v,v,v,0")
        return self.b.call(add, [a, b, total])

    def store(self, value, base, at):
        """Store a float or a vector of floats, of any number of lanes."""
        pointer = self.pointer(base, at, self.float)
        size = 8 if self.double else 4
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=size)

    def store_masked(self, value, base, at, mask):
        """Store the lanes of `mask` of a vector of floats."""
        pointer = self.b.bitcast(self.pointer(base, at, self.float), value.type.as_pointer())
        bits = 64 if self.double else 32
        signature = ir.FunctionType(ir.VoidType(), [value.type, pointer.type, I32, mask.type])
        name = f"llvm.masked.store.v{self.lanes}f{bits}.p0"
        function = cgutils.get_or_insert_function(self.b.module, signature, name)
        self.b.call(function, [value, pointer, I32(bits // 8), mask])

    def load_floats(self, base, at, mask=None):
        """Load `lanes` floats of the vectors' own type; those outside `mask` are zero and not touched."""
        return self.load("fp64" if self.double else "fp32", base, at, mask)

    def load_one(self, base, at):
        """Load one float of the vectors' own type."""
        return self.b.load(self.pointer(base, at, self.float))

    # -- arithmetic

    def fma(self, a, b, c):
        """``a * b + c``, rounded once where there is an instruction for it: a call for each lane is no way."""
        if not HAS_FMA:
            return self.b.fadd(self.b.fmul(a, b), c)
        name = f"llvm.fma.v{self.lanes}f{64 if self.double else 32}"
        signature = ir.FunctionType(self.type, [self.type] * 3)
        return self.b.call(
            cgutils.get_or_insert_function(self.b.module, signature, name), [a, b, c]
        )

    def fma_to(self, total, a, b):
        """``total + a * b`` as by `fma`, for sums that are carried along in a loop."""
        if not {"fma", "avx512f"} & FEATURES:
            return self.fma(a, b, total)
        # As text: where `b` is not needed again, LLVM would put the sum in its place and move it back each time.
        signature = ir.FunctionType(self.type, [self.type] * 3)
        name = "vfmadd231pd" if self.double else "vfmadd231ps"
        add = ir.InlineAsm(signature, f"{name} $2, $1, $0", "=v,v,v,0")
        return self.b.call(add, [a, b, total])

    def larger(self, a, b):
        """Lane by lane the larger; `b` where `a` is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    # -- across lanes

    def fold(self, vector, combine):
        """All lanes combined into one, in halves: a scalar."""
        width = self.lanes
        while width > 1:
            width //= 2
            other = self.shuffle(vector, vector, [*range(width, 2 * width)])
            vector = self.shuffle(vector, vector, [*range(width)])
            vector = combine(vector, other)
        return self.b.extract_element(vector, I32(0))

    def folds(self, vectors, combine):
        """The lanes of 1, 2, 4 … vectors combined as by `fold`: a vector with an element for each.

        Vectors are merged pairwise, half of their lanes each time, as in `sums_by_row`.
        """
        each = self.lanes
        while each > 1:
            each //= 2
            several = len(vectors) > 1
            pairs = zip(vectors[::2], vectors[1::2], strict=True) if several else [vectors * 2]
            elements = (1 + several) * vectors[0].type.count
            low = [start + i for start in range(0, elements, 2 * each) for i in range(each)]
            high = [i + each for i in low]
            vectors = [combine(self.shuffle(*x, low), self.shuffle(*x, high)) for x in pairs]
        return vectors[0]

    def sums_by_row(self, vectors, rows):
        """Vectors of scores out of vectors of products: ``out[t, r] = sum(vectors[t].reshape(rows, -1)[r])``.

        Tokens are merged pairwise, half of a row's lanes each time, so that each sum adds its lanes in the same order
        wherever it stands. Lanes within 128 bits come first: shuffles across them are slow on AVX2. With two rows r, s
        and eight lanes, tokens 0 and 1::

            r0a r0b r0c r0d | s0a s0b s0c s0d     a + c of each, then b + d
            r1a r1b r1c r1d | s1a s1b s1c s1d
                  ->   r0(a+c) r0(b+d) r1(a+c) r1(b+d) | s0(a+c) s0(b+d) s1(a+c) s1(b+d)
                  ->   r0 r1 r2 r3 | s0 s1 s2 s3        (with tokens 2 and 3)
                  ->   r0 s0 r1 s1 | r2 s2 r3 s3
        """
        add = self.b.add if isinstance(vectors[0].type.element, ir.IntType) else self.b.fadd
        each, piece = self.lanes // rows, 2 if self.double else 4
        held = [[(t, lane // each) for lane in range(self.lanes)] for t in range(len(vectors))]
        for span, longest, shortest in ((piece, min(each, piece), 1), (self.lanes, each, piece)):
            run = longest
            while run > shortest:
                run //= 2
                low = [x + i for start in range(0, self.lanes, span)
                       for first in (start, self.lanes + start)
                       for x in range(first, first + span, 2 * run) for i in range(run)]  # fmt: skip
                high = [i + run for i in low]
                pairs = [*zip(vectors[::2], vectors[1::2], strict=True)]
                vectors = [add(self.shuffle(*x, low), self.shuffle(*x, high)) for x in pairs]
                held = [
                    [(x + y)[i] for i in low] for x, y in zip(held[::2], held[1::2], strict=True)
                ]
        order = sorted(range(self.lanes), key=held[0].__getitem__)
        return vectors if order == sorted(order) else [self.shuffle(x, x, order) for x in vectors]

    def by_turns(self, vectors):
        """Vectors, 1, 2, 4 … of them, with their lanes by turns: ``out = stack(vectors, -1)``, in as many vectors.

        ``a0 a1 a2 a3, b0 b1 b2 b3 -> a0 b0 a1 b1, a2 b2 a3 b3``
        """
        if len(vectors) == 1:
            return vectors
        pairs = zip(self.by_turns(vectors[::2]), self.by_turns(vectors[1::2]), strict=True)
        half = self.lanes // 2
        turns = [[x for i in some for x in (i, self.lanes + i)]
                 for some in (range(half), range(half, self.lanes))]  # fmt: skip
        return [self.shuffle(*pair, lanes) for pair in pairs for lanes in turns]

    def repeated(self, base, at, count):
        """Load `count` floats, at most as many as there are lanes, and repeat them: ``a b | a b | a b | a b``."""
        part = self.load_part(base, at, count)
        return self.in_parts(part, self.lanes)

    def stretched(self, base, at, count):
        """Load `count` floats and repeat each of them: ``a a a a | b b b b``."""
        part = self.load_part(base, at, count)
        return self.shuffle(part, part, [i * count // self.lanes for i in range(self.lanes)])

    def load_part(self, base, at, count, mask=None):
        """Load `count` floats; those outside `mask` are zero and not touched."""
        type_ = ir.VectorType(self.float, count)
        pointer = self.b.bitcast(self.pointer(base, at, self.float), type_.as_pointer())
        size = 8 if self.double else 4
        if mask is not None:
            return self.masked_load(pointer, type_, size, mask)
        return self.b.load(pointer, align=size)

    def fold_by_row(self, vector, rows, combine):
        """The lanes of each row combined, where lane i belongs to row i % rows: for each row in all of its lanes.

        `rows` is a number at run time, a power of 2.
        """
        slot = cgutils.alloca_once_value(self.b, vector)
        width = self.lanes
        while width > 1:
            width //= 2
            with self.b.if_then(self.b.icmp_signed("<=", rows, I64(width))):
                here = self.b.load(slot)
                other = self.shuffle(here, here, [i ^ width for i in range(self.lanes)])
                self.b.store(combine(here, other), slot)
        return self.b.load(slot)

    def transposed(self, rows):
        """As many vectors as one has lanes, rows and columns exchanged: ``out[i][j] = rows[j][i]``.

        Passes exchange the off-diagonal squares of 1, 2, 4 … lanes::

            a0 a1 | a2 a3         a0 b0 | a2 b2         a0 b0 c0 d0
            b0 b1 | b2 b3   ->    a1 b1 | a3 b3   ->    a1 b1 c1 d1
            c0 c1 | c2 c3         c0 d0 | c2 d2         a2 b2 c2 d2
            d0 d1 | d2 d3         c1 d1 | c3 d3         a3 b3 c3 d3
        """
        rows, lanes, step = list(rows), self.lanes, 1
        while step < lanes:
            low = [i if not i & step else lanes + i - step for i in range(lanes)]
            high = [i + step if not i & step else lanes + i for i in range(lanes)]
            for i in range(lanes):
                if not i & step:
                    a, c = rows[i], rows[i + step]
                    rows[i], rows[i + step] = self.shuffle(a, c, low), self.shuffle(a, c, high)
            step *= 2
        return rows
