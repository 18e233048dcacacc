"""Vector code for the CPU. LLVM appears here and in `simd_integers`, `simd_tiles` and `simd_codes` alone.

Numba vectorises plain loops well, but not loops like attention's: a dot product for every token, an exponential in the
middle, half floats to widen. So the inner steps of attention are written here as LLVM vector code, as
functions that a kernel calls like any other:

=================  ==========================================================================================
`arrange_rows`     a few query rows as `score_tile` reads them
`score_tile`       their dot products with a tile of K rows
`code_row`         a query row as 16-bit integers, for integer dot products with INT8 rows
`gather_tile`      the scales of a tile's tokens, side by side; `gather_groups` where a row has several
`soft_cap_tile`    ``cap * tanh(score / cap)`` over a tile of scores
`softmax_rows`     running maxima and probabilities over a tile (online softmax); `softmax_tile` of one row
`weigh_tile`       add the tile's V rows, weighted, to the output rows
=================  ==========================================================================================

Steps of attention in integers are in `simd_integers`, those for a matrix unit in `simd_tiles`, those on packed codes in
`simd_codes`.

How to read them. `Vectors` emits instructions on vectors of `lanes` floats; LLVM turns them into whatever the CPU
has (AVX-512, AVX2, NEON, or pairs of narrow ones). What is known when a kernel is built (storage kind, float type,
rows at once) comes as literal arguments; sizes that vary by call are ordinary numbers, so that one compiled
kernel serves every head dim and group. Nothing is read past a row's end: what is left over after whole vectors is
loaded under a mask.

Small ones serve all kernels: `row_of` gives a row of a strided array as a contiguous one, which is what Numba's own
vectoriser needs, `borrow` an array whose slices are not counted, `on_threads` runs a kernel on several threads,
`next_item` hands out work to them, and `prefetch` asks for memory ahead of time; `address_of` is for `Ahead`, which
spreads that out.

Arguments named ``*_at`` are element offsets into an array's memory.
"""

from __future__ import annotations

import math

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from numkv.rows.int4 import GROUP, LOWEST, OFFSETS

__all__ = [
    "INT4_INTEGERS",
    "LANES",
    "NEVER",
    "RAMP",
    "TILE",
    "address_of",
    "arrange_rows",
    "borrow",
    "code_row",
    "fill_ramp",
    "gather_groups",
    "gather_tile",
    "is_aligned",
    "most_rows",
    "next_item",
    "on_threads",
    "prefetch",
    "row_of",
    "score_tile",
    "soft_cap_tile",
    "softmax_rows",
    "softmax_tile",
    "thread_launcher",
    "weigh_tile",
]

#: Tokens in a tile: scores of a tile stay in L1, and V rows are fetched while K rows are used.
TILE = 64
#: Numbers that `fill_ramp` writes at once.
RAMP = 8

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, _DOUBLE, _HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
_STORED = {"fp64": _DOUBLE, "fp32": FLOAT, "fp16": I16, "bf16": I16, "int8": I8,
           "int4": I8}  # fmt: skip
# Elements in a cache line.
ON_LINE = {"fp64": 8, "fp32": 16, "fp16": 32, "bf16": 32, "int8": 64, "int4": 128}


def _cpu_name() -> str:
    """LLVM's name of the CPU that Numba compiles for."""
    asked: str = config.CPU_NAME or "host"
    return llvm.get_host_cpu_name() if asked == "host" else asked


def _cpu_features() -> set[str]:
    """Names of the features of the CPU that Numba compiles for, as far as they matter here."""
    if config.CPU_FEATURES:
        return {name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+")}
    if config.CPU_NAME in (None, "", "host"):
        return {name for name, there in llvm.get_host_cpu_features().items() if there}
    # Another CPU, asked for by name: LLVM does not say what it has.
    if config.CPU_NAME in _AVX512_CPUS:
        names = {"avx512f", "avx512bw", "avx2", "f16c", "sse2"}
        return names if config.CPU_NAME in _NO_VNNI_CPUS else names | {"avx512vnni"}
    return {"avx2", "f16c", "sse2"} if config.CPU_NAME in _AVX2_CPUS else set()


_AVX2_CPUS = {"haswell", "broadwell", "skylake", "alderlake", "core-avx2", "x86-64-v3",
              "znver1", "znver2", "znver3"}  # fmt: skip
_AVX512_CPUS = {"skylake-avx512", "cascadelake", "icelake-client", "icelake-server",
                "sapphirerapids", "x86-64-v4", "znver4", "znver5"}  # fmt: skip
llvm.initialize_native_asmparser()  # for the one instruction that is written as text
_NO_VNNI_CPUS = {"skylake-avx512", "x86-64-v4"}
FEATURES = _cpu_features()
# How near rows are brought ahead of time, as LLVM counts: 0 is past all caches but the first ("non-temporal": rows are
# used once), 2 into the second. AMD's Zen is given the first; Intel's Xeons read faster with the second.
_LOCALITY = 0 if _cpu_name().startswith("znver") else 2
#: Float32 lanes of a vector: the CPU's full width (float64 vectors have half as many).
LANES = 16 if "avx512f" in FEATURES else 8 if "avx2" in FEATURES or "avx" in FEATURES else 4
#: Where the last run of bytes ends that `Ahead` is given: past all addresses.
NEVER = 1 << 62
# Lanes of a K row that `score_tile` widens at a time: 16 tokens of them stay in L1 beside all else.
_PART = 128
# Vector registers that accumulators may take: about half of what there is.
ACCUMULATORS = 16 if LANES == 16 else 8
# Products of 16-bit integers, added in pairs: by lanes of the sums, the instruction where there is one.
_ADD_PAIRS = {
    lanes: name
    for lanes, feature, name in (
        (16, "avx512bw", "llvm.x86.avx512.pmaddw.d.512"),
        (8, "avx2", "llvm.x86.avx2.pmadd.wd"),
        (4, "sse2", "llvm.x86.sse2.pmadd.wd"),
    )
    if feature in FEATURES
}
#: Whether INT4 rows are taken as integers (see `simd_integers`).
INT4_INTEGERS = LANES == 16 and "avx512bw" in FEATURES
_HAS_HALF = bool({"f16c", "avx512f", "fullfp16", "fp-armv8", "neon"} & FEATURES)


# Bytes of a group of INT4 codes: byte j holds element j in its low nibble and element j + _PAIRS in its high one.
_PAIRS = GROUP // 2

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
        self.float = _DOUBLE if self.double else FLOAT
        self.int = I64 if self.double else I32
        self.type = ir.VectorType(self.float, self.lanes)
        self.int_type = ir.VectorType(self.int, self.lanes)

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

    def _pointer(self, base, at, element):
        typed = self.b.bitcast(base, element.as_pointer())
        return self.b.gep(typed, [at])

    def load(self, kind, base, at, mask=None):
        """Load `lanes` elements of a storage kind, widened; lanes outside `mask` are zero and not touched."""
        element = _STORED[kind]
        type_ = ir.VectorType(element, self.lanes)
        pointer = self._pointer(base, at, element)
        size = {I8: 1, I16: 2, FLOAT: 4, _DOUBLE: 8}[element]
        if mask is None:
            value = self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=size)
        else:
            value = self._masked_load(pointer, type_, size, mask)
        return self._widen(kind, value)

    def _masked_load(self, pointer, type_, size, mask):
        name = f"llvm.masked.load.v{type_.count}{'i' if size < 4 else 'f'}{8 * size}.p0"
        pointer = self.b.bitcast(pointer, type_.as_pointer())
        signature = ir.FunctionType(type_, [pointer.type, I32, mask.type, type_])
        function = cgutils.get_or_insert_function(self.b.module, signature, name)
        zero = ir.Constant(type_, None)
        return self.b.call(function, [pointer, I32(size), mask, zero])

    def _widen(self, kind, value):
        if kind == "bf16":
            wide = self.b.zext(value, ir.VectorType(I32, self.lanes))
            bits = ir.VectorType(I32, self.lanes)
            shift = ir.Constant(bits, [ir.Constant(I32, 16)] * self.lanes)
            value = self.b.bitcast(self.b.shl(wide, shift), ir.VectorType(FLOAT, self.lanes))
        elif kind == "fp16":
            if _HAS_HALF:
                value = self.b.bitcast(value, ir.VectorType(_HALF, self.lanes))
                value = self.b.fpext(value, ir.VectorType(FLOAT, self.lanes))
            else:
                value = self._half_by_integers(value)
        elif kind == "int8":
            return self.b.sitofp(self.b.sext(value, self.int_type), self.type)
        if self.double and kind != "fp64":
            value = self.b.fpext(value, self.type)
        elif not self.double and kind == "fp64":
            value = self.b.fptrunc(value, self.type)
        return value

    def _half_by_integers(self, words):
        """Widen half floats without an instruction for it; see `numkv.rows.convert.fp16_to_float32`."""
        bits = ir.VectorType(I32, self.lanes)
        floats = ir.VectorType(FLOAT, self.lanes)

        def constant(value):
            return ir.Constant(bits, [ir.Constant(I32, value)] * self.lanes)

        wide = self.b.zext(words, bits)
        sign = self.b.shl(self.b.and_(wide, constant(0x8000)), constant(16))
        magnitude = self.b.shl(self.b.and_(wide, constant(0x7FFF)), constant(13))
        two_112 = ir.Constant(floats, [ir.Constant(FLOAT, 2.0**112)] * self.lanes)
        finite = self.b.bitcast(self.b.fmul(self.b.bitcast(magnitude, floats), two_112), bits)
        special = self.b.or_(magnitude, constant(0x7F800000))
        is_finite = self.b.icmp_unsigned("<", magnitude, constant(0x0F800000))
        return self.b.bitcast(self.b.or_(sign, self.b.select(is_finite, finite, special)), floats)

    def load_codes(self, base, at, mask=None):
        """Load ``2 * lanes`` int8 codes as 16-bit integers; lanes outside `mask` are zero and not touched."""
        type_ = ir.VectorType(I8, 2 * self.lanes)
        pointer = self._pointer(base, at, I8)
        if mask is None:
            value = self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=1)
        else:
            value = self._masked_load(pointer, type_, 1, mask)
        return self.b.sext(value, ir.VectorType(I16, 2 * self.lanes))

    def load_words(self, base, at):
        """Load ``2 * lanes`` 16-bit integers from the memory of floats; `at` counts floats."""
        type_ = ir.VectorType(I16, 2 * self.lanes)
        pointer = self._pointer(base, at, self.float)
        return self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=2)

    def levels(self, scale, lowest):
        """What `load_pairs` makes a group's values of: its scale and its `lowest`, the value of code 0, LLVM floats."""
        return self.splat(scale), self.splat(lowest)

    def scale_place(self, t, group, width=4):
        """Where `gather_groups` puts the scale of a group of token t; of rows of one or two it may be 2."""
        four = self.b.mul(self.b.ashr(group, I64(2)), I64(TILE))
        return self.b.add(self.b.mul(self.b.add(four, t), I64(width)), self.b.and_(group, I64(3)))

    def load_levels(self, base, at, t, group, groups):
        """The levels of a group of token t, by what `gather_groups` has put at `at` for `groups` of each token."""
        place = self.b.add(at, self.scale_place(t, group))
        lowest = self.b.add(
            place, self.b.mul(self.b.sdiv(self.b.add(groups, I64(3)), I64(4)), I64(4 * TILE))
        )
        return self.levels(self.load_one(base, place), self.load_one(base, lowest))

    def load_pairs(self, base, at, levels, mask=None):
        """Load `lanes` bytes of two INT4 codes: the values of the low nibbles and of the high ones.

        `levels` are those of their group; lanes outside `mask` are zero and not touched.
        """
        type_ = ir.VectorType(I8, self.lanes)
        pointer = self._pointer(base, at, I8)
        if mask is None:
            codes = self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=1)
        else:
            codes = self._masked_load(pointer, type_, 1, mask)
        wide = ir.VectorType(I32, self.lanes)
        low = self.b.zext(codes, wide)
        high = self.b.lshr(low, ir.Constant(wide, [I32(4)] * self.lanes))
        values = []
        for code in (low, high):
            code = self.b.and_(code, ir.Constant(wide, [I32(15)] * self.lanes))
            value = self.fma(self.b.sitofp(code, self.type), *levels)
            if mask is not None:
                value = self.b.select(mask, value, ir.Constant(self.type, None))
            values.append(value)
        return values

    def add_pairs(self, total, a, b):
        """``total + a * b`` of 16-bit integers, neighbouring products added: `lanes` 32-bit sums.

        `a` and `b` are vectors of any element type, of which the bits count.
        """
        if self.lanes == 16 and "avx512vnni" in FEATURES:
            # As text: LLVM would take some of them apart, into a product and a sum.
            signature = ir.FunctionType(total.type, [total.type] * 3)
            add = ir.InlineAsm(signature, "vpdpwssd $2, $1, $0", "=v,v,v,0")
            a, b = (self.b.bitcast(x, total.type) for x in (a, b))
            return self.b.call(add, [a, b, total])
        words = ir.VectorType(I16, 2 * self.lanes)
        a, b = (self.b.bitcast(x, words) for x in (a, b))
        name = _ADD_PAIRS.get(self.lanes)
        if name:
            signature = ir.FunctionType(total.type, [a.type] * 2)
            function = cgutils.get_or_insert_function(self.b.module, signature, name)
            return self.b.add(total, self.b.call(function, [a, b]))
        for first in (0, 1):
            lanes = [*range(first, 2 * self.lanes, 2)]
            wide = [self.b.sext(self.shuffle(x, x, lanes), total.type) for x in (a, b)]
            total = self.b.add(total, self.b.mul(*wide))
        return total

    def store(self, value, base, at):
        """Store a float or a vector of floats, of any number of lanes."""
        pointer = self._pointer(base, at, self.float)
        size = 8 if self.double else 4
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=size)

    def store_masked(self, value, base, at, mask):
        """Store the lanes of `mask` of a vector of floats."""
        pointer = self.b.bitcast(self._pointer(base, at, self.float), value.type.as_pointer())
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
        return self.b.load(self._pointer(base, at, self.float))

    def prefetch(self, kind, base, at, column=0):
        """Ask for the cache line of column `column` of the row at `at` ahead of time; the address may be anything."""
        if not isinstance(column, ir.Value):
            column = I64(column)
        if kind == "int4":
            column = self.b.ashr(column, I64(1))
        pointer = self._pointer(base, self.b.add(at, column), _STORED[kind])
        prefetch_line(self.b, self.b.bitcast(pointer, I8.as_pointer()))

    # -- arithmetic

    def fma(self, a, b, c):
        """``a * b + c``, rounded once."""
        name = f"llvm.fma.v{self.lanes}f{64 if self.double else 32}"
        signature = ir.FunctionType(self.type, [self.type] * 3)
        return self.b.call(
            cgutils.get_or_insert_function(self.b.module, signature, name), [a, b, c]
        )

    def fma_to(self, total, a, b):
        """``total + a * b``, rounded once, for sums that are carried along in a loop."""
        if not {"avx2", "avx512f"} & FEATURES:
            return self.fma(a, b, total)
        # As text: where `b` is not needed again, LLVM would put the sum in its place and move it back each time.
        signature = ir.FunctionType(self.type, [self.type] * 3)
        name = "vfmadd231pd" if self.double else "vfmadd231ps"
        add = ir.InlineAsm(signature, f"{name} $2, $1, $0", "=v,v,v,0")
        return self.b.call(add, [a, b, total])

    def larger(self, a, b):
        """Lane by lane the larger; `b` where `a` is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def exp2(self, x):
        """2 to the power of `x`, for x <= 0 or NaN (kept): relative error below 2e-7 (float32), 4e-16 (float64).

        Half a power of two below the smallest normal number, and from there on, the result is 0.
        """
        # 2**x = 2**n * 2**f, n the nearest integer. Adding 1.5 * 2**(mantissa bits) leaves n in the low bits; with
        # the bias of exponents added to it, they are those of 2**n once they are in the exponent's place, and all
        # above them has left. The least n makes 0 of them.
        bits, bias = (52, 1023) if self.double else (23, 127)
        magic = self.splat(1.5 * 2.0**bits + bias)
        lowest = self.splat(-bias)
        clamped = self.larger(lowest, x)
        shifted = self.b.fadd(clamped, magic)
        f = self.b.fsub(clamped, self.b.fsub(shifted, magic))
        coefficients = _EXP2_DOUBLE if self.double else _EXP2_FLOAT
        power = self.splat(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            power = self.fma(power, f, self.splat(c))
        n = self.b.shl(self.b.bitcast(shifted, self.int_type), self.splat_int(bits))
        return self.b.fmul(power, self.b.bitcast(n, self.type))

    def tanh(self, x):
        """Hyperbolic tangent, relative error below 1e-6 (float32), 1e-14 (float64); NaN is kept."""
        # tanh|x| = 1 - 2 / (e**(2|x|) + 1) loses digits near 0; there (Cephes) an odd polynomial or a series serves.
        sign_bit = self.splat_int(-(2 ** (63 if self.double else 31)))
        bits = self.b.bitcast(x, self.int_type)
        sign = self.b.and_(bits, sign_bit)
        size = self.b.bitcast(self.b.and_(bits, self.b.not_(sign_bit)), self.type)
        one = self.splat(1.0)
        decay = self.exp2(self.b.fmul(size, self.splat(-2.0 * math.log2(math.e))))
        far = self.b.fdiv(self.b.fsub(one, decay), self.b.fadd(one, decay))
        square = self.b.fmul(size, size)
        series = _TANH_DOUBLE if self.double else _TANH_FLOAT
        near = self.splat(series[-1])
        for c in reversed(series[:-1]):
            near = self.fma(near, square, self.splat(c))
        near = self.fma(self.b.fmul(near, square), size, size)
        is_near = self.b.fcmp_ordered("<", size, self.splat(0.3 if self.double else 0.625))
        value = self.b.select(is_near, near, far)
        return self.b.bitcast(self.b.or_(self.b.bitcast(value, self.int_type), sign), self.type)

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

    def sums_by_row(self, vectors, rows):
        """The sums of vectors that hold a token's products for each of `rows` rows, row after row.

        What comes out are vectors of scores, token after token and in each the rows. Tokens are merged pairwise, half
        of a row's lanes each time, so that each sum adds its lanes in the same order wherever it stands.
        """
        add = self.b.add if isinstance(vectors[0].type.element, ir.IntType) else self.b.fadd
        each = self.lanes // rows
        while each > 1:
            each //= 2
            low = [start + i for start in range(0, 2 * self.lanes, 2 * each) for i in range(each)]
            high = [i + each for i in low]
            vectors = [
                add(self.shuffle(*pair, low), self.shuffle(*pair, high))
                for pair in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors

    def repeated(self, base, at, count):
        """Load `count` floats, at most as many as there are lanes, and repeat them: lane i has number i % count."""
        part = self.load_part(base, at, count)
        return self.shuffle(part, part, [i % count for i in range(self.lanes)])

    def stretched(self, base, at, count):
        """Load `count` floats and repeat each of them: lane i has number i // (lanes / count)."""
        part = self.load_part(base, at, count)
        return self.shuffle(part, part, [i * count // self.lanes for i in range(self.lanes)])

    def load_part(self, base, at, count, mask=None):
        """Load `count` floats; those outside `mask` are zero and not touched."""
        type_ = ir.VectorType(self.float, count)
        pointer = self.b.bitcast(self._pointer(base, at, self.float), type_.as_pointer())
        size = 8 if self.double else 4
        if mask is not None:
            return self._masked_load(pointer, type_, size, mask)
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


def data_of(context, builder, array_type, value):
    """The address of an array's first element."""
    return context.make_array(array_type)(context, builder, value).data


#: How many rows vector code takes at once, as far as there are lanes for them.
AT_ONCE = (8, 4, 2, 1)


def most_rows(compute: str) -> int:
    """How many rows vector code takes at once at most, by the float type it computes in."""
    return min(AT_ONCE[0], LANES // 2 if compute == "float64" else LANES)


def for_rows(builder, rows, emit, most=AT_ONCE[0], numbers=AT_ONCE):
    """Emit code for each number of rows of `numbers` up to `most`; that of `rows`, known at run time, runs.

    `rows` is one of these numbers.
    """

    def among(numbers):
        if len(numbers) == 1:
            emit(numbers[0])
            return
        half = len(numbers) // 2
        few = builder.icmp_signed("<", rows, I64(numbers[half]))
        with builder.if_else(few) as (of_few, of_many):
            with of_few:
                among(numbers[:half])
            with of_many:
                among(numbers[half:])

    among(sorted(n for n in numbers if n <= most))


def steps(builder, start, stop, step):
    """A loop over ``range(start, stop, step)`` for emitting its body; gives the index."""
    return cgutils.for_range_slice(builder, start, stop, I64(step), I64)


def literals(*args):
    return all(isinstance(a, types.Literal) for a in args)


class Ahead:
    """Memory that is asked for ahead of time, a cache line at a time, in the order in which it lies.

    At `runs` are addresses: the cache line with which the first run of bytes begins, and where the run ends, then the
    same of the next run; the last ends at `NEVER`. Evenly spread among arithmetic and in order, asking costs next to no
    time. In bursts it waits for places to keep track of what is on its way, which are few, and the arithmetic behind it
    waits too; every second line first is no better, as CPUs fetch lines in pairs.
    """

    def __init__(self, builder, kind, runs):
        self.b, self.on_line, self.runs = builder, ON_LINE[kind], runs
        self.at, self.end, self.next = (cgutils.alloca_once(builder, I64) for _ in range(3))
        builder.store(I64(0), self.next)
        self._begin_run()

    def _begin_run(self):
        number = self.b.load(self.next)
        for i, slot in enumerate((self.at, self.end)):
            self.b.store(self.b.load(self.b.gep(self.runs, [self.b.add(number, I64(i))])), slot)
        self.b.store(self.b.add(number, I64(2)), self.next)

    def _ask(self, lines):
        at = self.b.load(self.at)
        for i in range(lines):
            address = self.b.inttoptr(self.b.add(at, I64(64 * i)), I8.as_pointer())
            prefetch_line(self.b, address)
        at = self.b.add(at, I64(64 * lines))
        self.b.store(at, self.at)
        ended = self.b.icmp_signed(">=", at, self.b.load(self.end))
        with self.b.if_then(ended, likely=False):
            self._begin_run()

    def ask(self, elements, turn=0):
        """Ask for as many lines as hold `elements` elements; where that is less than one, in some turns only."""
        if elements >= self.on_line:
            self._ask(elements // self.on_line)
            return
        turns = self.on_line // elements
        if isinstance(turn, int):
            if turn % turns == 0:
                self._ask(1)
            return
        mine = self.b.icmp_signed("==", self.b.and_(turn, I64(turns - 1)), I64(0))
        with self.b.if_then(mine):
            self._ask(1)


def prefetch_line(builder, pointer):
    """Ask for a cache line ahead of time, to read; the address may be anything."""
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [pointer, I32(0), I32(_LOCALITY), I32(1)])


@intrinsic(prefer_literal=True)
def arrange_rows(typing_context, COMPUTE, rows, q, q_at, q_step, size, to_at):
    """Put `rows` query rows as `score_tile` reads them: a few elements of each, row after row, to fill a vector.

    Row r is at ``q_at + r * q_step`` of the floats `q`. `size` floats of each are taken, a multiple of the lanes, or
    for more than one row of half of them; they go to ``q[to_at]`` and on.
    """
    if not literals(COMPUTE):
        return None
    compute = COMPUTE.literal_value
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[2], args[2])
        q_at, q_step, size, to_at = args[3:]

        def emit(rows):
            v = Vectors(b, compute)
            each = v.lanes // rows
            type_ = ir.VectorType(v.float, each)
            with steps(b, I64(0), size, each) as (i, _):
                to = b.add(to_at, b.mul(i, I64(rows)))
                for r in range(rows):
                    at = b.add(b.add(q_at, b.mul(I64(r), q_step)), i)
                    pointer = b.bitcast(v._pointer(data, at, v.float), type_.as_pointer())
                    part = b.load(pointer, align=8 if v.double else 4)
                    v.store(part, data, b.add(to, I64(r * each)))

        for_rows(b, args[1], emit, most_rows(compute))
        return context.get_dummy_value()

    return types.void(COMPUTE, i8, q, i8, i8, i8, i8), codegen


@intrinsic(prefer_literal=True)
def score_tile(
    typing_context, KIND, COMPUTE, rows, q, q_at, q_scales_at, k, k_offsets, count, head_dim, scales_at,
    num_groups, s_at, AHEAD_KIND, runs,
):  # fmt: skip
    """Scores of `rows` query rows against `count` K rows: ``s[t, r] = sum over d of q[r, d] * k[t, d]``.

    All floats are in the array `q`. At `q_at` are query rows as `arrange_rows` put them, with zeros up to whole
    vectors; K row t starts at ``k_offsets[t]``. `count` is rounded up to whole groups of tokens, so `k_offsets` must be
    valid up to `TILE`. Scores go to ``s_at + t * rows + r``.

    Where K is INT8, scores are multiplied by ``scales[t]``, which `gather_tile` has put at `scales_at`. Then, with
    float32, query rows are integers that `code_row` made, and so are sums, and the scores are multiplied by the scales
    of rows at `q_scales_at` too. Where K is INT4, `scales` are what `gather_groups` made of `num_groups`.

    A few elements of a K row are read into all parts of a vector at once, one part for each query row: a vector holds
    products of one token with all rows, and few lanes of it are left to be added. K rows that have to be widened are
    put into scratch memory first, once for all query rows. Meanwhile the memory in `runs` (the tile's V rows, of
    `AHEAD_KIND`) is asked for: see `Ahead`.
    """
    if not literals(KIND, COMPUTE, AHEAD_KIND):
        return None
    kind, compute, ahead_kind = (a.literal_value for a in (KIND, COMPUTE, AHEAD_KIND))
    i8 = types.int64
    signature = types.void(
        KIND, COMPUTE, i8, q, i8, i8, k, k_offsets, i8, i8, i8, i8, i8, AHEAD_KIND, runs,
    )  # fmt: skip

    def codegen(context, b, sig, args):
        q_at, q_scales_at, count, head_dim, scales_at, groups, s_at = (
            args[i] for i in (4, 5, 8, 9, 10, 11, 12)
        )
        q_data, k_data, offsets, runs = (
            data_of(context, b, sig.args[i], args[i]) for i in (3, 6, 7, 14)
        )
        v = Vectors(b, compute)
        ahead = Ahead(b, ahead_kind, runs)
        integers = kind == "int8" and compute == "float32"
        own = "fp64" if v.double else "fp32"
        in_unit = 2 if integers else 1  # columns in a lane
        # Columns at once, and, of the main loop, columns that make a whole cache line.
        width = GROUP if kind == "int4" else in_unit * v.lanes
        line = max(width, ON_LINE[kind])
        sizes = sorted({min(2 * line, _PART * in_unit), line, width}, reverse=True)
        part = max(line, _PART * in_unit)
        tokens = ACCUMULATORS
        step = part // in_unit  # lanes that a token's columns take in scratch memory
        scratch = scratch_floats(b, v.float, tokens * step)

        def widen(row_at, token, scales_of, d, to, columns=None):
            """Put `width` columns of a row from column d on, or so many as a row's end has left, to `to`."""
            if kind != "int4":
                mask = None if columns is None else v.lanes_below(columns, lanes=width)
                at = b.add(row_at, d)
                values = (
                    v.load_codes(k_data, at, mask) if integers else v.load(kind, k_data, at, mask)
                )
                v.store(b.bitcast(values, v.type), scratch, to)
                return
            half = I64(_PAIRS) if columns is None else b.ashr(columns, I64(1))
            levels = scales_of(d)
            pairs = []
            for first in range(0, _PAIRS, v.lanes):
                mask = None if columns is None else v.lanes_below(half, first)
                at = b.add(b.add(row_at, b.ashr(d, I64(1))), I64(first))
                pairs.append((first, v.load_pairs(k_data, at, levels, mask)))
            # Of a short group, what is past low nibbles gives way to high ones.
            for i, start in enumerate((I64(0), half)):
                for first, values in pairs:
                    v.store(values[i], scratch, b.add(b.add(to, start), I64(first)))

        def widen_rows(t0, start, stop):
            """The columns ``[start, stop)`` of some tokens, with zeros up to whole vectors."""
            with steps(b, I64(0), I64(tokens), 1) as (i, _):
                t = b.add(t0, i)
                row_at = b.load(b.gep(offsets, [t]))
                to_row = b.mul(i, I64(step))

                def scales_of(d):
                    group = b.ashr(d, I64(GROUP.bit_length() - 1))
                    return v.load_levels(q_data, scales_at, t, group, groups)

                def add(d, size, columns=None):
                    ahead.ask(size // 2, i)
                    to = b.add(to_row, b.ashr(b.sub(d, start), I64(in_unit.bit_length() - 1)))
                    for j in range(0, size, width):
                        to_here = b.add(to, I64(j // in_unit))
                        widen(row_at, t, scales_of, b.add(d, I64(j)), to_here, columns)

                at = start
                for size in sizes:
                    end = b.add(start, b.and_(b.sub(stop, start), I64(-size)))
                    with steps(b, at, end, size) as (d, _):
                        add(d, size)
                    at = end
                with b.if_then(b.icmp_signed("<", at, stop)):
                    add(at, width, b.sub(stop, at))

        def add_widened(t0, rows, add):
            """Add the products of all columns, by way of scratch memory."""
            each = v.lanes // rows
            with steps(b, I64(0), head_dim, part) as (start, _):
                stop = b.add(start, I64(part))
                stop = b.select(b.icmp_signed("<", stop, head_dim), stop, head_dim)
                widen_rows(t0, start, stop)
                units = b.sdiv(b.add(b.sub(stop, start), I64(in_unit - 1)), I64(in_unit))
                first = b.sdiv(start, I64(in_unit))
                with steps(b, I64(0), units, each) as (i, _):
                    # Half of what comes next is asked for here, the other half while rows are widened.
                    ahead.ask(tokens * each * in_unit // 2, b.sdiv(i, I64(each)))
                    add(
                        b.add(first, i),
                        lambda t: v.repeated(scratch, b.add(i, I64(t * step)), each),
                    )

        def add_directly(t0, rows, tokens, add):
            """The same where elements are read from K rows as they are, or whole vectors of one query row."""
            each = v.lanes // rows
            k_at = [b.load(b.gep(offsets, [b.add(t0, I64(t))])) for t in range(tokens)]
            columns = each * in_unit

            def add_part(d, left=None):
                mask = None if left is None else v.lanes_below(left, lanes=columns)

                def values(t):
                    at = b.add(k_at[t], d)
                    if integers:
                        return v.load_codes(k_data, at, mask)
                    if rows == 1:
                        return v.load(kind, k_data, at, mask)
                    part = v.load_part(k_data, at, each, mask)
                    return v.shuffle(part, part, [i % each for i in range(v.lanes)])

                add(b.sdiv(d, I64(in_unit)), values)

            size = max(columns, ON_LINE[kind])
            lines, whole = (b.and_(head_dim, I64(-x)) for x in (size, columns))

            with steps(b, I64(0), lines, size) as (d, _):
                for i in range(0, size, columns):
                    ahead.ask(tokens * columns, i // columns)
                    add_part(b.add(d, I64(i)))
            with b.if_then(b.icmp_signed("<", lines, head_dim)):
                ahead.ask(tokens * columns)
                if size > columns:
                    with steps(b, lines, whole, columns) as (d, _):
                        add_part(d)
                if columns > 1:
                    with b.if_then(b.icmp_signed("<", whole, head_dim)):
                        add_part(whole, b.sub(head_dim, whole))

        def emit(rows):
            each = v.lanes // rows
            type_ = v.int_type if integers else v.type
            directly = kind != "int4" and (rows == 1 or kind == own)
            taken = max(8, each) if directly else tokens
            sums = [cgutils.alloca_once(b, type_) for _ in range(taken)]
            row_scales = v.repeated(q_data, q_scales_at, rows) if integers else None

            def add(unit, values):
                """Add the products of some lanes of each row, from number `unit` on."""
                q_lanes = v.load_floats(q_data, b.add(q_at, b.mul(unit, I64(rows))))
                for t, slot in enumerate(sums):
                    total, k_lanes = b.load(slot), values(t)
                    if integers:
                        total = v.add_pairs(total, q_lanes, k_lanes)
                    else:
                        total = v.fma_to(total, q_lanes, k_lanes)
                    b.store(total, slot)

            with steps(b, I64(0), count, taken) as (t0, _):
                for slot in sums:
                    b.store(ir.Constant(type_, None), slot)
                if directly:
                    add_directly(t0, rows, taken, add)
                else:
                    add_widened(t0, rows, add)
                for i, scores in enumerate(v.sums_by_row([b.load(slot) for slot in sums], rows)):
                    token = b.add(t0, I64(i * each))
                    if integers:
                        scores = b.fmul(b.sitofp(scores, v.type), row_scales)
                    if kind == "int8":
                        factors = v.stretched(q_data, b.add(scales_at, token), each)
                        scores = b.fmul(scores, factors)
                    v.store(scores, q_data, b.add(s_at, b.mul(token, I64(rows))))

        for_rows(b, args[2], emit, most_rows(compute))
        return context.get_dummy_value()

    return signature, codegen


def scratch_floats(b, element, size):
    """The address of memory for `size` numbers on the stack, from the beginning of a cache line on."""
    place = cgutils.alloca_once(b, ir.ArrayType(element, size))
    place.align = 64
    return b.bitcast(place, I8.as_pointer())


@intrinsic(prefer_literal=True)
def code_row(typing_context, q, q_at, head_dim, padded_dim):
    """Replace a row of float32 by 16-bit integer codes at its beginning, and return their scale.

    For integer dot products with INT8 rows: 15 bits of a query lose nothing beside the 7 bits of what it meets. Sums
    of `head_dim` products fit into 32 bits. A row with NaN or infinity gets the scale NaN.
    """
    signature = types.float32(q, types.int64, types.int64, types.int64)

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        _, q_at, head_dim, padded_dim = args
        v = Vectors(b, "float32")
        peak, faults = (cgutils.alloca_once_value(b, v.splat(0.0)) for _ in range(2))
        magnitude = v.splat_int(0x7FFFFFFF)
        with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
            x = v.load_floats(data, b.add(q_at, d))
            size = b.bitcast(b.and_(b.bitcast(x, v.int_type), magnitude), v.type)
            b.store(v.larger(size, b.load(peak)), peak)
            b.store(b.fadd(b.load(faults), b.fsub(x, x)), faults)  # 0 unless x is not finite
        largest = v.fold(b.load(peak), v.larger)
        fault = v.fold(b.load(faults), b.fadd)
        # As large as codes may be for head_dim products with 127 to stay below 2**31.
        limit = b.sdiv(I64((2**31 - 1) // 127), head_dim)
        limit = b.select(b.icmp_signed("<", limit, I64(32639)), limit, I64(32639))
        limit = b.sitofp(limit, v.float)
        usable = b.and_(
            b.fcmp_ordered(">", largest, v.float(1e-30)), b.fcmp_ordered("==", fault, v.float(0.0))
        )
        factor = v.splat(b.select(usable, b.fdiv(limit, largest), v.float(0.0)))
        halves = ir.VectorType(I16, v.lanes)
        with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
            x = b.fmul(v.load_floats(data, b.add(q_at, d)), factor)
            x = b.select(b.fcmp_ordered("ord", x, x), x, v.splat(0.0))  # infinity times 0
            magic = v.splat(12582912.0)  # 1.5 * 2**23: its sum's low bits hold the nearest integer
            codes = b.trunc(b.bitcast(b.fadd(x, magic), v.int_type), halves)
            at = b.add(q_at, b.ashr(d, I64(1)))  # behind what is read, from the second step on
            pointer = v._pointer(data, at, v.float)
            b.store(codes, b.bitcast(pointer, halves.as_pointer()), align=2)
        scale = b.select(usable, b.fdiv(largest, limit), v.float(0.0))
        return b.fadd(scale, fault)

    return signature, codegen


@intrinsic(prefer_literal=True)
def soft_cap_tile(typing_context, COMPUTE, rows, s, s_at, cap):
    """Bound the scores of some rows and a tile: ``s = cap * tanh(s / cap)``, then times log2(e)."""
    if not literals(COMPUTE):
        return None
    compute = COMPUTE.literal_value
    float_type = types.float64 if compute == "float64" else types.float32

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[2], args[2])
        v = Vectors(b, compute)
        cap = v.splat(args[4])
        factor = b.fmul(cap, v.splat(math.log2(math.e)))
        with steps(b, I64(0), b.mul(args[1], I64(TILE)), v.lanes) as (i, _):
            at = b.add(args[3], i)
            score = b.fdiv(v.load_floats(data, at), cap)
            v.store(b.fmul(v.tanh(score), factor), data, at)
        return context.get_dummy_value()

    return types.void(COMPUTE, types.int64, s, types.int64, float_type), codegen


@intrinsic(prefer_literal=True)
def gather_tile(typing_context, COMPUTE, to, to_at, scales, offsets):
    """Put the scales of a tile's tokens side by side: ``to[to_at + t] = scales[offsets[t]]``, from float32."""
    if not literals(COMPUTE):
        return None
    compute = COMPUTE.literal_value

    def codegen(context, b, sig, args):
        data, source, offsets = (data_of(context, b, sig.args[i], args[i]) for i in (1, 3, 4))
        v = Vectors(b, compute)
        for t in range(TILE):
            value = b.load(b.gep(source, [b.load(b.gep(offsets, [I64(t)]))]))
            if v.double:
                value = b.fpext(value, v.float)
            v.store(value, data, b.add(args[2], I64(t)))
        return context.get_dummy_value()

    return types.void(COMPUTE, to, types.int64, scales, offsets), codegen


@intrinsic(prefer_literal=True)
def gather_groups(typing_context, COMPUTE, to, to_at, scales, offsets, groups):
    """Put the scales and the lowest levels of a tile's rows of INT4 side by side, four groups of each token at a time.

    What is at ``to_at + Vectors.scale_place(t, g)`` is the scale at ``scales[offsets[t] + g]``, for the `groups` groups
    of each row, and further on by ``TILE * 4`` for each four groups begun is the value of code 0. Groups that a row
    does not have get zeros. Where INT4 is taken as integers, one or two groups take the place of two, not of four.
    """
    if not literals(COMPUTE):
        return None
    compute = COMPUTE.literal_value

    def codegen(context, b, sig, args):
        data, source, offsets = (data_of(context, b, sig.args[i], args[i]) for i in (1, 3, 4))
        to_at, groups = args[2], args[5]
        v = Vectors(b, compute)
        fours = b.sdiv(b.add(groups, I64(3)), I64(4))
        lowest_at = b.mul(fours, I64(4 * TILE))

        def emit(width):
            tokens = max(1, v.lanes // width)  # in a vector
            at_once = max(RAMP, tokens)
            words_type, wide, floats, real = (
                ir.VectorType(x, width * tokens) for x in (I16, I32, FLOAT, v.float)
            )
            rows_type = ir.VectorType(I64, at_once)
            iota = ir.Constant(rows_type, [I64(i) for i in range(at_once)])

            def splat(type_, value):
                return ir.Constant(type_, [ir.Constant(type_.element, value)] * type_.count)

            def splat_row(value):
                first = b.insert_element(ir.Constant(rows_type, ir.Undefined), value, I32(0))
                return v.shuffle(first, first, [0] * at_once)

            def put(words, j, t):
                """Store what the words of a vector of tokens say."""
                bits = b.shl(b.zext(words, wide), splat(wide, 16))
                scale = b.bitcast(bits, floats)
                # 64 and half of the last bits of words: these have the places of 1/2, 1 and 2 beside it.
                level = b.and_(bits, splat(wide, (OFFSETS - 1) << 16))
                level = b.bitcast(b.or_(level, splat(wide, 0x42800000)), floats)
                lowest = b.fmul(b.fadd(level, splat(floats, LOWEST - 64)), scale)
                at = b.add(to_at, v.scale_place(t, b.mul(j, I64(4)), width))
                for value in (scale, lowest):
                    v.store(b.fpext(value, real) if v.double else value, data, at)
                    at = b.add(at, lowest_at)

            def gather(row_of, j, mask):
                """The words of a vector of tokens that lie anywhere."""
                pieces = []
                for i in range(tokens):
                    pointer = b.gep(source, [b.add(row_of(i), b.mul(j, I64(4)))])
                    pieces.append(v._masked_load(pointer, ir.VectorType(I16, width), 2, mask))
                while len(pieces) > 1:
                    both = [*range(2 * pieces[0].type.count)]
                    pieces = [v.shuffle(*pieces[i : i + 2], both) for i in range(0, len(pieces), 2)]
                return pieces[0]

            with (
                steps(b, I64(0), fours, 1) as (j, _),
                steps(b, I64(0), I64(TILE), at_once) as (t, _),
            ):
                mask = v.lanes_below(b.sub(groups, b.mul(j, I64(4))), lanes=width)
                first_row = b.gep(offsets, [t])
                rows = b.load(b.bitcast(first_row, rows_type.as_pointer()), align=8)
                row = b.load(first_row)
                # Whether tokens lie one after another, with nothing between their groups.
                wanted = b.add(splat_row(row), b.mul(iota, splat(rows_type, width)))
                other = b.icmp_signed("!=", rows, wanted)
                apart = b.icmp_unsigned(
                    "!=", b.bitcast(other, ir.IntType(at_once)), ir.IntType(at_once)(0)
                )
                apart = b.or_(apart, b.icmp_signed("!=", groups, I64(width)))
                with b.if_else(apart, likely=False) as (of_apart, of_together):
                    with of_apart, steps(b, I64(0), I64(at_once), tokens) as (i, _):
                        here = b.add(t, i)

                        def row_of(k, here=here):
                            return b.load(b.gep(offsets, [b.add(here, I64(k))]))

                        put(gather(row_of, j, mask), j, here)
                    with of_together:
                        for i in range(0, at_once, tokens):
                            pointer = b.gep(source, [b.add(row, I64(i * width))])
                            pointer = b.bitcast(pointer, words_type.as_pointer())
                            put(b.load(pointer, align=2), j, b.add(t, I64(i)))

        if v.double or not INT4_INTEGERS:
            emit(4)
            return context.get_dummy_value()
        with b.if_else(b.icmp_signed("<=", groups, I64(2))) as (of_few, of_others):
            with of_few:
                emit(2)
            with of_others:
                emit(4)
        return context.get_dummy_value()

    return types.void(COMPUTE, to, types.int64, scales, offsets, types.int64), codegen


@intrinsic(prefer_literal=True)
def softmax_tile(typing_context, COMPUTE, s, s_at, begin, end, maximum):
    """Turn one row's scores of a tile (in base 2) into probabilities relative to the running maximum.

    Scores outside ``[begin, end)`` of the tile become 0. Returns the new maximum, the factor that rescales what was
    summed before, and the sum of the probabilities: Milakov and Gimelshein (arXiv:1805.02867), algorithm 3.
    """
    if not literals(COMPUTE):
        return None
    compute = COMPUTE.literal_value
    float_type = types.float64 if compute == "float64" else types.float32
    signature = types.UniTuple(float_type, 3)(
        COMPUTE, s, types.int64, types.int64, types.int64, float_type
    )

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[1], args[1])
        _, _, s_at, begin, end, old = args
        v = Vectors(b, compute)
        infinity = v.splat(-math.inf)
        starts = range(0, TILE, v.lanes)
        tiles = []
        for i in starts:
            seen = b.and_(v.lanes_below(end, i), b.not_(v.lanes_below(begin, i)))
            score = v.load_floats(data, b.add(s_at, I64(i)))
            tiles.append((seen, b.select(seen, score, infinity)))
        peak = v.splat(old)
        for _, score in tiles:
            peak = v.larger(score, peak)
        new = v.fold(peak, v.larger)
        # A row that has seen nothing keeps its maximum of -inf; subtracting 0 instead avoids inf - inf.
        nothing = b.fcmp_ordered("==", new, v.float(-math.inf))
        base = v.splat(b.select(nothing, v.float(0.0), new))
        total = v.splat(0.0)
        for i, (seen, score) in zip(starts, tiles, strict=True):
            p = b.select(seen, v.exp2(b.fsub(score, base)), v.splat(0.0))
            v.store(p, data, b.add(s_at, I64(i)))
            total = b.fadd(total, p)
        rescale = b.extract_element(v.exp2(b.fsub(v.splat(old), base)), I32(0))
        results = [new, rescale, v.fold(total, b.fadd)]
        return context.make_tuple(b, sig.return_type, results)

    return signature, codegen


@intrinsic(prefer_literal=True)
def softmax_rows(
    typing_context, COMPUTE, rows, count, s, s_at, begin, end, maxima_at, sums_at, rescale_at
):  # fmt: skip
    """`softmax_tile` for `rows` rows at once, whose scores are at ``s_at + t * rows + r``.

    The maxima and sums of rows, in the same array, follow for the first `count` rows; the factors that rescale what
    was summed before go to ``s[rescale_at + r]``, up to a whole vector. Scores outside ``[begin, end)``, which may be
    anything, become 0.
    """
    if not literals(COMPUTE):
        return None
    compute = COMPUTE.literal_value
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[3], args[3])
        rows, count, _, s_at, begin, end, maxima_at, sums_at, rescale_at = args[1:]
        v = Vectors(b, compute)
        size = b.mul(rows, I64(TILE))
        partial = b.or_(b.icmp_signed(">", begin, I64(0)), b.icmp_signed("<", end, I64(TILE)))
        with b.if_then(partial, likely=False), steps(b, I64(0), size, v.lanes) as (i, _):
            at = b.add(s_at, i)
            below = v.lanes_below(b.sub(b.mul(end, rows), i))
            seen = b.and_(below, b.not_(v.lanes_below(b.sub(b.mul(begin, rows), i))))
            v.store(b.select(seen, v.load_floats(data, at), v.splat(-math.inf)), data, at)

        old, before = (cgutils.alloca_once(b, v.type) for _ in range(2))

        def load_rows(rows):
            b.store(v.repeated(data, maxima_at, rows), old)
            b.store(v.repeated(data, sums_at, rows), before)

        for_rows(b, rows, load_rows, most_rows(compute))
        old = b.load(old)
        # Several vectors side by side, as each has to wait for its predecessor.
        chains = range(4)

        def pieces(i):
            """The next vector of each chain, and where it is."""
            for j in chains:
                at = b.add(b.add(s_at, i), I64(j * v.lanes))
                yield v.load_floats(data, at), at

        def merged(slots, combine):
            a, b_, c, d = (b.load(slot) for slot in slots)
            return v.fold_by_row(combine(combine(a, b_), combine(c, d)), rows, combine)

        peaks = [cgutils.alloca_once_value(b, v.splat(-math.inf)) for _ in chains]
        with steps(b, I64(0), size, len(chains) * v.lanes) as (i, _):
            for (score, _), slot in zip(pieces(i), peaks, strict=True):
                b.store(v.larger(score, b.load(slot)), slot)
        new = v.larger(merged(peaks, v.larger), old)
        # A row that has seen nothing keeps its maximum of -inf; subtracting 0 instead avoids inf - inf.
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        base = b.select(nothing, v.splat(0.0), new)
        totals = [cgutils.alloca_once_value(b, v.splat(0.0)) for _ in chains]
        with steps(b, I64(0), size, len(chains) * v.lanes) as (i, _):
            for (score, at), slot in zip(pieces(i), totals, strict=True):
                p = v.exp2(b.fsub(score, base))
                v.store(p, data, at)
                b.store(b.fadd(b.load(slot), p), slot)
        rescale = v.exp2(b.fsub(old, base))
        total = v.fma(b.load(before), rescale, merged(totals, b.fadd))
        there = v.lanes_below(count)
        v.store_masked(new, data, maxima_at, there)
        v.store_masked(total, data, sums_at, there)
        v.store(rescale, data, rescale_at)
        return context.get_dummy_value()

    return types.void(COMPUTE, i8, i8, s, i8, i8, i8, i8, i8, i8), codegen


@intrinsic(prefer_literal=True)
def weigh_tile(
    typing_context, KIND, COMPUTE, rows, count, p, p_at, v, v_offsets, begin, end, head_dim, scales_at,
    num_groups, o_at, o_step, rescale_at, AHEAD_KIND, runs,
):  # fmt: skip
    """Add weighted V rows: ``o[r, d] = rescale[r] * o[r, d] + sum over t in [begin, end) of p[t, r] * v[t, d]``.

    All floats are in the array `p`; p[t, r] is at ``p_at + t * rows + r``, o[r, d] at ``o_at + r * o_step + d``. Of the
    `rows` rows the first `count` are taken. Output rows are padded to whole vectors; columns past `head_dim` get
    zeros. Meanwhile the memory in `runs` (the next tile's K rows, of `AHEAD_KIND`) is asked for. Where V is INT8, which
    is so with float64 only, ``scales_at + t`` is where `gather_tile` put a token's scale; where it is INT4, `scales_at`
    is where `gather_groups` put those of `num_groups`.
    """
    if not literals(KIND, COMPUTE, AHEAD_KIND):
        return None
    kind, compute, ahead_kind = (a.literal_value for a in (KIND, COMPUTE, AHEAD_KIND))
    i8 = types.int64
    signature = types.void(
        KIND, COMPUTE, i8, i8, p, i8, v, v_offsets, i8, i8, i8, i8, i8, i8, i8, i8, AHEAD_KIND, runs,
    )  # fmt: skip

    def codegen(context, b, sig, args):
        row_step, count, p_at, begin, end, head_dim = (args[i] for i in (2, 3, 5, 8, 9, 10))
        scales_at, all_groups, o_at, o_step, rescale_at = args[11:16]
        data, v_data, offsets, runs = (
            data_of(context, b, sig.args[i], args[i]) for i in (4, 6, 7, 17)
        )

        def emit(rows):
            lanes = Vectors(b, compute)
            ahead = Ahead(b, ahead_kind, runs)
            factors = [lanes.load_one(data, b.add(rescale_at, I64(r))) for r in range(rows)]

            def add_rows(columns, mask, load, ask):
                """One pass over the tokens for some vectors of columns, kept in registers.

                `columns` are where they start; ``load(t)`` gives their values in token t's row, and ``ask(t)`` asks for
                as much of what comes next. With a mask, only its lanes of the output are read and written.
                """
                sums = [[cgutils.alloca_once(b, lanes.type) for _ in columns] for _ in range(rows)]
                places = [
                    [b.add(b.add(o_at, b.mul(I64(r), o_step)), column) for column in columns]
                    for r in range(rows)
                ]
                for r in range(rows):
                    factor = lanes.splat(factors[r])
                    for place, slot in zip(places[r], sums[r], strict=True):
                        before = lanes.load_floats(data, place, mask)
                        b.store(b.fmul(before, factor), slot)
                with steps(b, begin, end, 1) as (t, _):
                    at = b.add(p_at, b.mul(t, row_step))
                    weights = [lanes.load_one(data, b.add(at, I64(r))) for r in range(rows)]
                    if kind == "int8":
                        scale = lanes.load_one(data, b.add(scales_at, t))
                        weights = [b.fmul(weight, scale) for weight in weights]
                    weights = [lanes.splat(weight) for weight in weights]
                    ask(t)
                    for i, v_row in enumerate(load(t)):
                        for r in range(rows):
                            b.store(lanes.fma(weights[r], v_row, b.load(sums[r][i])), sums[r][i])
                for r in range(rows):
                    for place, slot in zip(places[r], sums[r], strict=True):
                        if mask is None:
                            lanes.store(b.load(slot), data, place)
                        else:
                            lanes.store_masked(b.load(slot), data, place, mask)

            def add_vectors(column, vectors, columns=None):
                """Add `vectors` vectors of columns, or one with so many columns as a row's end has left."""
                mask = None if columns is None else lanes.lanes_below(columns)
                starts = [b.add(column, I64(i * lanes.lanes)) for i in range(vectors)]

                def load(t):
                    row_at = b.load(b.gep(offsets, [t]))
                    for start in starts:
                        yield lanes.load(kind, v_data, b.add(row_at, start), mask)

                def ask(t):
                    ahead.ask(vectors * lanes.lanes, t)

                add_rows(starts, None, load, ask)

            def add_groups(column, groups, columns=None):
                """Add `groups` groups of INT4 columns, or one with so many columns as a row's end has left."""
                half = I64(_PAIRS) if columns is None else b.ashr(columns, I64(1))
                group = b.ashr(column, I64(GROUP.bit_length() - 1))
                pieces = [
                    (g, first) for g in range(groups) for first in range(0, _PAIRS, lanes.lanes)
                ]
                size = (
                    at_once if columns is None else 1
                )  # pieces of a short group have masks of their own
                for piece in range(0, len(pieces), size):
                    taken = pieces[piece : piece + size]
                    mask = None if columns is None else lanes.lanes_below(half, taken[0][1])
                    starts = [
                        b.add(b.add(column, I64(g * GROUP + first)), start)
                        for g, first in taken
                        for start in (I64(0), half)
                    ]

                    def load(t, taken=taken, mask=mask):
                        row_at = b.add(b.load(b.gep(offsets, [t])), b.ashr(column, I64(1)))
                        levels = {
                            g: lanes.load_levels(
                                data, scales_at, t, b.add(group, I64(g)), all_groups
                            )
                            for g in sorted({g for g, _ in taken})
                        }
                        for g, first in taken:
                            at = b.add(row_at, I64(g * _PAIRS + first))
                            yield from lanes.load_pairs(v_data, at, levels[g], mask)

                    def ask(t, taken=taken):
                        ahead.ask(2 * len(taken) * lanes.lanes, t)

                    add_rows(starts, mask, load, ask)

            # A power of 2, as head dims have many of them.
            vectors = min(8, 1 << max(1, ACCUMULATORS * 3 // 2 // rows).bit_length() - 1)
            if kind == "int4":
                at_once = max(1, vectors // 2)  # pairs of vectors
                wide = max(1, at_once * lanes.lanes // _PAIRS)  # whole groups
                add, unit = add_groups, GROUP
            else:
                wide, add, unit = vectors, add_vectors, lanes.lanes
            in_wide = b.mul(b.sdiv(head_dim, I64(wide * unit)), I64(wide * unit))
            whole = b.and_(head_dim, I64(-unit))
            with steps(b, I64(0), in_wide, wide * unit) as (column, _):
                add(column, wide)
            if wide > 1:
                with steps(b, in_wide, whole, unit) as (column, _):
                    add(column, 1)
            rest = b.sub(head_dim, whole)
            with b.if_then(b.icmp_signed(">", rest, I64(0))):
                add(whole, 1, rest)

        for_rows(b, count, emit, most_rows(compute), range(1, AT_ONCE[0] + 1))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def fill_ramp(typing_context, array, at, count, start, step):
    """Put ``start + i * step`` for i in ``range(count)`` into an int64 array.

    Up to `RAMP` - 1 numbers more are written. Numba's own loop does not vectorise, as an index that might be negative
    would count from the end.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        _, at, count, start, step = args
        type_ = ir.VectorType(I64, RAMP)

        def splat(x):
            first = b.insert_element(ir.Constant(type_, ir.Undefined), x, I32(0))
            zeros = ir.Constant(ir.VectorType(I32, RAMP), None)
            return b.shuffle_vector(first, first, zeros)

        iota = ir.Constant(type_, [ir.Constant(I64, i) for i in range(RAMP)])
        first = b.add(splat(start), b.mul(iota, splat(step)))
        with steps(b, I64(0), count, RAMP) as (i, _):
            value = b.add(first, splat(b.mul(i, step)))
            pointer = b.gep(data, [b.add(at, i)])
            b.store(value, b.bitcast(pointer, type_.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(array, i8, i8, i8, i8), codegen


def thread_launcher() -> int:
    """The address of the function that shares out calls among Numba's threads, which have been started."""
    address: int = llvm.address_of_symbol("numba_parallel_for")
    return address


@intrinsic
def on_threads(typing_context, launch, workers):
    """Run the kernel that this stands in on several threads: once for each worker, with the same arguments.

    The kernel's last arguments are ``launch, worker, workers``; it is called again with 0 for `launch` and with a
    worker from ``range(workers)``. `launch` is the address that `numkv.kernels.cpu.threads.run` passes: calls are
    shared out among Numba's threads as they are for ``prange``; but Numba compiles a ``prange`` in a function of its
    own, beside the kernel.
    """

    def codegen(context, b, sig, args):
        kernel, pointer = b.function, I8.as_pointer()
        kernel.attributes.add("noinline")
        # Numba's calling convention: places for the result and for an error, then the arguments in pieces.
        result, error, *pieces = kernel.args
        pieces = [*pieces[:-3], args[1]]
        record_type = ir.LiteralStructType([piece.type for piece in pieces])
        record = cgutils.alloca_once(b, record_type)
        for i, piece in enumerate(pieces):
            b.store(piece, b.gep(record, [I32(0), I32(i)], inbounds=True))

        numbers = I64.as_pointer()
        call_type = ir.FunctionType(
            ir.VoidType(), [pointer.as_pointer(), numbers, numbers, pointer]
        )
        call = ir.Function(b.module, call_type, f"{kernel.name}.part")
        call.linkage = "internal"
        inner = ir.IRBuilder(call.append_basic_block())
        starts, counts, _, data = call.args
        fields = inner.bitcast(data, record_type.as_pointer())
        pieces = [inner.load(inner.gep(fields, [I32(0), I32(i)])) for i in range(len(pieces))]
        places = [cgutils.alloca_once(inner, place.type.pointee) for place in (result, error)]
        first = inner.ptrtoint(inner.load(starts), I64)
        with cgutils.for_range(inner, inner.load(counts)) as loop:
            worker = inner.add(first, loop.index)
            inner.call(kernel, [*places, *pieces[:-1], I64(0), worker, pieces[-1]])
        inner.ret_void()

        launch_type = ir.FunctionType(
            ir.VoidType(),
            [pointer, pointer.as_pointer(), numbers, numbers, pointer, I64, I64, I32],
        )
        # One "array" whose elements are a byte: where a thread's part of it starts is its first worker.
        starts = cgutils.alloca_once_value(b, ir.Constant(pointer, None))
        counts = cgutils.alloca_once_value(b, args[1])
        steps = cgutils.alloca_once_value(b, I64(1))
        b.call(
            b.inttoptr(args[0], launch_type.as_pointer()),
            [b.bitcast(call, pointer), starts, counts, steps, b.bitcast(record, pointer), I64(0),
             I64(1), b.trunc(args[1], I32)],
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def next_item(typing_context, counter):
    """Take the next number of a counter that all threads share (an int64 array of one element)."""

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        return b.atomic_rmw("add", data, I64(1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def address_of(typing_context, array):
    """Where an array's first element is, as a number."""

    def codegen(context, b, sig, args):
        return b.ptrtoint(data_of(context, b, sig.args[0], args[0]), I64)

    return types.int64(array), codegen


@intrinsic
def prefetch(typing_context, array, at):
    """Ask for the cache line of an element of an array of floats or 16-bit words ahead of time."""
    kind = "fp32" if array.dtype == types.float32 else "bf16"

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        Vectors(b, "float32").prefetch(kind, data, args[1])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def borrow(typing_context, array):
    """The same array without its owner: slices of it cost nothing, as no references are counted.

    The caller keeps `array` alive.
    """

    def codegen(context, b, sig, args):
        source = context.make_array(sig.args[0])(context, b, args[0])
        source.meminfo = ir.Constant(source.meminfo.type, None)
        source.parent = ir.Constant(source.parent.type, None)
        return source._getvalue()

    return array(array), codegen


@register_jitable
def is_aligned(array):
    """Whether an array's elements lie at multiples of their size."""
    places = address_of(array)
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            places |= array.strides[axis]
    return places & (array.itemsize - 1) == 0


@intrinsic
def row_of(typing_context, array, index):
    """One row of an array whose last axis is contiguous, whatever its other strides: a 1-d C array that shares memory.

    The caller keeps `array` alive, and `index` (one number for each axis but the last) in range.
    """
    row_type = types.Array(array.dtype, 1, "C", readonly=not array.mutable)

    def codegen(context, b, sig, args):
        source = context.make_array(sig.args[0])(context, b, args[0])
        at = b.ptrtoint(source.data, I64)
        for axis, i in enumerate(cgutils.unpack_tuple(b, args[1])):
            at = b.add(at, b.mul(i, b.extract_value(source.strides, axis)))
        row = context.make_array(row_type)(context, b)
        context.populate_array(
            row,
            data=b.inttoptr(at, source.data.type),
            shape=[b.extract_value(source.shape, array.ndim - 1)],
            strides=[source.itemsize],
            itemsize=source.itemsize,
            meminfo=None,
        )
        return row._getvalue()

    return row_type(array, types.UniTuple(types.int64, array.ndim - 1)), codegen
