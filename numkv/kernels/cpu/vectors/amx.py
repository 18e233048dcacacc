"""Intel's matrix unit (AMX): tiles of 16 rows of 64 bytes, and the vector code that goes with them.

A product is ``C[m, n] += sum over k of A[m, k] * B[k, n]``. A row of A is 64 bytes. A row of B has a lane of 32 bits
for each n: two neighbouring k in bf16, four in INT8::

    A, bf16   row m:  k0 k1 | k2 k3 | ... | k30 k31          16 lanes of 32 bits
    B, bf16   row i:  (k2i, k2i+1) of n0 | ... of n1 | ... | of n15
    C, float  row m:  n0 | n1 | ... | n15
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.vectors.emit import FLOAT, I8, I32, as_bytes, emits
from numkv.kernels.cpu.vectors.features import AMX_ROWS
from numkv.kernels.cpu.vectors.words import Words

#: An AMX tile, 16 rows of 64 bytes, in floats.
AMX_TILE = 256
# 2**(x - 0.5) for x from 0 to 1, with the least largest relative error.
_POWER = [0.7071067094802856, 0.49013322591781616, 0.16981424391269684, 0.03947516903281212,
          0.00635642372071743, 0.0013276472454890609]  # fmt: skip
# Rounding as the CPU is set.
_AS_SET = ir.Constant(I32, 4)


class Amx:
    """Emits instructions on AMX tiles, which are named by their numbers, as LLVM uses none itself.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    """

    def __init__(self, builder):
        self.b = builder

    def _run(self, text, *args):
        signature = ir.FunctionType(ir.VoidType(), [x.type for x in args])
        constraints = ",".join(["r"] * len(args) + ["~{memory}"])
        self.b.call(ir.InlineAsm(signature, text, constraints, side_effect=True), args)

    def configure(self, layout):
        """Take the shapes of tiles from 64 bytes in memory."""
        self._run("ldtilecfg ($0)", layout)

    def release(self):
        """Give the unit back."""
        self._run("tilerelease")

    def clear(self, tile):
        """Fill a tile with zeros."""
        self._run(f"tilezero %tmm{tile}")

    def load(self, tile, pointer, step):
        """Load 16 rows of 64 bytes, `step` bytes apart."""
        self._run(f"tileloadd ($0,$1,1), %tmm{tile}", pointer, step)

    def store(self, tile, pointer, step):
        """Store 16 rows of 64 bytes, `step` bytes apart."""
        self._run(f"tilestored %tmm{tile}, ($0,$1,1)", pointer, step)

    def multiply(self, kinds, total, rows, columns):
        """Add the product of two tiles to the tile `total`; `kinds` defines the elements of rows and of columns."""
        self._run(f"tdp{kinds} %tmm{columns}, %tmm{rows}, %tmm{total}")


class AmxWords(Words):
    """Vector code of CPUs that have AMX: all of their vectors have 16 lanes of 32 bits."""

    def floats_at(self, base, at):
        """Return the address of a float, as one of bytes."""
        return as_bytes(self.b, self.pointer(base, at, FLOAT))

    def load_lanes(self, base, at):
        """Load a vector of 32-bit integers from the memory of floats."""
        pointer = self.pointer(base, at, FLOAT)
        return self.b.load(self.b.bitcast(pointer, self.int_type.as_pointer()), align=4)

    def store_lanes(self, vector, base, at):
        """Store a vector of any type in the memory of floats."""
        pointer = self.pointer(base, at, FLOAT)
        self.b.store(vector, self.b.bitcast(pointer, vector.type.as_pointer()), align=4)

    def pack(self, vectors, at):
        """Pack the integers of two or four vectors into 32-bit lanes: 16 or 8 bits of each, from bit `at` on."""
        size = 32 // len(vectors)
        found = None
        for i, x in enumerate(vectors):
            shift = size * i - at
            if shift:
                move = self.b.shl if shift > 0 else self.b.lshr
                x = move(x, self.splat_int(abs(shift)))
            mask = ((1 << size) - 1) << (size * i)
            x = self.b.and_(x, self.splat_int(mask - (1 << 32) if mask >> 31 else mask))
            found = x if found is None else self.b.or_(found, x)
        return found

    def bytes_of_words(self, low, high):
        """Two vectors of words as vectors of their upper bytes and their lower ones, both with a sign.

        A word is 256 times the one plus the other; words are at most 32,639.
        """
        bytes_type = ir.VectorType(I8, 32)
        lower = [self.b.trunc(x, bytes_type) for x in (low, high)]
        upper = []
        for words, codes in zip((low, high), lower, strict=True):
            rest = self.b.sub(words, self.b.sext(codes, words.type))
            upper.append(self.b.trunc(self.b.lshr(rest, self.splat_word(8)), bytes_type))
        return [
            self.b.bitcast(self.shuffle(*halves, [*range(64)]), self.int_type)
            for halves in (upper, lower)
        ]

    def power(self, x):
        """2 to the power of ``x - 0.5``: relative error below 2e-7. NaN is kept; 0 where `x` is below -100.

        Beside a weight of 1 such weights count for nothing, and denormal numbers would be slow. `math.exp2` takes more
        instructions; here numbers are split, and powers of two multiplied, by instructions made for it.
        """
        # The fraction above the integer below; 1 encodes rounding down in both instructions.
        rest = self._masked("reduce", [x, I32(1)], None)
        power = self.splat(_POWER[-1])
        for c in reversed(_POWER[:-1]):
            power = self.fma(power, rest, self.splat(c))
        return self.scale(power, x, self.b.fcmp_unordered("uge", x, self.splat(-100.0)))

    def scale(self, x, power, mask=None):
        """``x`` times 2 to the power of the integer below `power`; 0 outside `mask`."""
        return self._masked("scalef", [x, power], mask)

    def _masked(self, name, args, mask):
        name, bits = f"llvm.x86.avx512.mask.{name}.ps.512", ir.IntType(self.lanes)
        all_lanes = ir.Constant(bits, (1 << self.lanes) - 1)
        args = [*args, self.splat(0.0), self.b.bitcast(mask, bits) if mask else all_lanes, _AS_SET]
        signature = ir.FunctionType(self.type, [x.type for x in args])
        function = cgutils.get_or_insert_function(self.b.module, signature, name)
        return self.b.call(function, args)

    def ceil(self, x):
        """The least integers that are not below `x`."""
        signature = ir.FunctionType(self.type, [self.type])
        name = f"llvm.ceil.v{self.lanes}f32"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, name), [x])

    def upper_half(self, x):
        """Return the value of the upper half of a float's bits."""
        bits = self.b.and_(self.b.bitcast(x, self.int_type), self.splat_int(-65536))
        return self.b.bitcast(bits, self.type)


@emits()
def amx_shape(b):
    """Set up the matrix unit for this thread: eight tiles of 16 rows of 64 bytes."""
    layout = [1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [AMX_ROWS] * 8 + [0] * 8
    place = cgutils.alloca_once(b, ir.ArrayType(I8, 64))
    b.store(ir.Constant(place.type.pointee, bytearray(layout)), place)
    Amx(b).configure(as_bytes(b, place))


@emits()
def amx_end(b):
    """Give the matrix unit back: a thread that uses it is slower to switch to."""
    Amx(b).release()
