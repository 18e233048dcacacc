"""Attention of many query rows on a matrix unit: Intel's AMX, which multiplies tiles of 16 rows of 64 bytes.

A product of tiles takes sixteen K rows against sixteen columns, which are query rows, and takes as long for one of
them. So prompts, and decode steps of large groups, go this way where K and V are bf16 or INT8, and few query rows do
not: `FEW_ROWS` of `attention` says how many are few.

===================  ========================================================================================
`has_tiles`          whether there is such a unit
`tiles_on`           set it up for the thread that runs; `tiles_off` gives it back
`pack_rows`          query rows as the unit takes them, in parts
`find_rows`          where the K rows of a tile of tokens are
`score_rows`         dot products of up to 16 query rows with them
`softmax_tiles`      running maxima, and weights as the unit takes them, of up to 16 rows over a tile (online softmax)
`all_finite`         whether no V row of a tile has a NaN or an infinity
`pack_values`        V rows of a tile as the unit takes them
`weigh_rows`         add the tile's V rows, weighted, to up to 16 output rows, which lie as columns
`turn_rows`          columns as rows, and the other way round
===================  ========================================================================================

How numbers are split. A float32 has 24 bits, a bf16 number 8: the upper half of a float's bits, then that of what is
left, then the rest, give a query exactly; parts that are zero in all rows of a block (of queries that come in bf16,
say) are left out. Weights take two parts, 16 bits: each is off by 1e-5 of itself at most. Beside INT8, queries and
weights are integers of 15 bits, as in `simd` and `simd_integers`: an upper byte and a lower one, both with a sign.

How they lie in memory. A product is ``C[m, n] += sum over k of A[m, k] * B[k, n]``, where a row of A is 64 bytes, and
one of B holds for each n what belongs to a lane of 32 bits: two neighbouring k in bf16, four in INT8. For scores, A is
16 rows of K as they lie in the cache, and B the queries, packed once: so a vector has the scores of 16 query rows with
one token, and maxima, exponentials and sums need nothing of other lanes. Two or four such vectors of weights make rows
of B for the sums, and A is V, turned and packed once for all query rows; output rows are columns until an item is done.

How work is ordered. Once a product has run, vector instructions seem to have one port instead of two for a while (on
Emerald Rapids), and where both are mixed all of them run like that. So each kind of work is done for all query rows of
an item before the next.

Products of bf16 take denormal numbers for zero, and an infinity gives NaN where a part is zero.
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
import sys

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.cpu.simd import (
    FEATURES,
    FLOAT,
    I8,
    I32,
    I64,
    ON_LINE,
    TILE,
    data_of,
    literals,
    steps,
)
from numkv.kernels.cpu.simd_integers import Words

__all__ = [
    "BLOCK_ROWS",
    "SEGMENT",
    "all_finite",
    "find_rows",
    "has_tiles",
    "pack_rows",
    "pack_values",
    "score_rows",
    "softmax_tiles",
    "tiles_off",
    "tiles_on",
    "turn_rows",
    "weigh_rows",
]

#: Rows of a tile: query rows that are taken at once.
BLOCK_ROWS = 16
# A tile of 16 rows of 64 bytes, in floats.
_SIZE = 256
#: Columns of V that are packed and summed together: four tiles.
SEGMENT = 64
# Elements of a row of A, and the most parts of a query.
_WIDTH = {"bf16": 32, "int8": 64}
_PARTS = {"bf16": 3, "int8": 2}
# Tiles of weights of one part: 64 tokens take two rows of bf16, or one of INT8.
_HALVES = {"bf16": 2, "int8": 1}
_PRODUCT = {"bf16": "bf16ps", "int8": "bssd"}
# 2**(x - 0.5) for x from 0 to 1, with the least largest relative error.
_POWER = [0.7071067094802856, 0.49013322591781616, 0.16981424391269684, 0.03947516903281212,
          0.00635642372071743, 0.0013276472454890609]  # fmt: skip
# How far above the maximum that is subtracted scores may be: weights are up to two to the power of it.
_GROWTH = 8.0
# Rounding as the CPU is set.
_AS_SET = ir.Constant(I32, 4)
# Of Linux: ask for the right to use a part of the CPU's state, and the number of tiles' data.
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def has_tiles() -> bool:
    """Whether there is a matrix unit that this process may use; Linux wants to be asked first."""
    needed = {"amx-tile", "amx-bf16", "amx-int8", "avx512vnni", "avx512bw", "avx512dq"}
    if not (needed <= FEATURES and sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0)


class _Tiles(Words):
    """Emits instructions on tiles. They keep their numbers, as LLVM uses none itself."""

    def _run(self, text, *args):
        signature = ir.FunctionType(ir.VoidType(), [x.type for x in args])
        constraints = ",".join(["r"] * len(args) + ["~{memory}"])
        self.b.call(ir.InlineAsm(signature, text, constraints, side_effect=True), args)

    def configure(self, layout):
        self._run("ldtilecfg ($0)", layout)

    def release(self):
        self._run("tilerelease")

    def clear(self, tile):
        self._run(f"tilezero %tmm{tile}")

    def load_tile(self, tile, pointer, step):
        """Load 16 rows of 64 bytes, `step` bytes apart."""
        self._run(f"tileloadd ($0,$1,1), %tmm{tile}", pointer, step)

    def store_tile(self, tile, pointer, step):
        self._run(f"tilestored %tmm{tile}, ($0,$1,1)", pointer, step)

    def multiply(self, kinds, total, rows, columns):
        """Add the product of two tiles to the tile `total`; `kinds` says what is in the rows and in the columns."""
        self._run(f"tdp{kinds} %tmm{columns}, %tmm{rows}, %tmm{total}")

    # -- what goes with them

    def floats_at(self, base, at):
        """The address of a float."""
        return self._pointer(base, at, FLOAT)

    def vector_at(self, base, at, type_):
        """Load a vector of any type from the memory of floats."""
        pointer = self.b.bitcast(self.floats_at(base, at), type_.as_pointer())
        return self.b.load(pointer, align=4)

    def put(self, vector, base, at):
        """Store a vector of any type in the memory of floats."""
        pointer = self.b.bitcast(self.floats_at(base, at), vector.type.as_pointer())
        self.b.store(vector, pointer, align=4)

    def pack(self, vectors, at):
        """Integers of one vector each, of which 8 or 16 bits from bit `at` on count, side by side in 32-bit lanes."""
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

        Beside a weight of 1 such weights count for nothing, and denormal numbers would be slow. `exp2` takes more
        instructions; here numbers are split, and powers of two multiplied, by instructions made for it.
        """
        # What is above the integer below; both forms of rounding down are named by 1.
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
        signature = ir.FunctionType(self.type, [self.type])
        name = f"llvm.ceil.v{self.lanes}f32"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, name), [x])

    def part_of(self, x):
        """What the upper half of a float's bits stands for."""
        bits = self.b.and_(self.b.bitcast(x, self.int_type), self.splat_int(-65536))
        return self.b.bitcast(bits, self.type)


def _bytes_of(b, pointer):
    return b.bitcast(pointer, I8.as_pointer())


@intrinsic
def tiles_on(typing_context):
    """Set up the matrix unit for this thread: eight tiles of 16 rows of 64 bytes."""

    def codegen(context, b, sig, args):
        layout = [1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [BLOCK_ROWS] * 8 + [0] * 8
        value = ir.Constant(ir.ArrayType(I8, 64), bytearray(layout))
        place = cgutils.alloca_once_value(b, value)
        _Tiles(b).configure(b.bitcast(place, I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def tiles_off(typing_context):
    """Give the matrix unit back: a thread that uses it is slower to switch to."""

    def codegen(context, b, sig, args):
        _Tiles(b).release()
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def pack_rows(typing_context, KIND, f, q_at, q_step, count, head_dim, to_at, spare_at):
    """Pack up to 16 query rows to meet K rows of a kind; return in how many parts.

    Row r is at ``f[q_at + r * q_step]``, with zeros up to a multiple of 64 elements: float32 where K is bf16, the words
    of `code_row` where it is INT8. They go to ``f[to_at:]``, with room for three parts (of INT8 two) of 256 floats for
    each 64 bytes of a K row; ``f[spare_at:]`` has room for 768 floats.
    """
    if not literals(KIND):
        return None
    kind = KIND.literal_value
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[1], args[1])
        q_at, q_step, count, head_dim, to_at, spare_at = args[2:]
        v = _Tiles(b)
        nothing = v.splat_int(0)
        left = [cgutils.alloca_once_value(b, nothing) for _ in range(2)]

        def parts_of(r, block):
            """The parts of 64 bytes of a row, as 16 lanes each."""
            there = b.icmp_signed("<", r, count)
            row_at = b.add(q_at, b.select(there, b.mul(r, q_step), I64(0)))
            at = b.add(row_at, b.mul(block, I64(32)))
            pair = [v.vector_at(data, b.add(at, I64(i)), v.int_type) for i in (0, 16)]
            pair = [b.select(there, x, nothing) for x in pair]
            if kind == "int8":
                return v.bytes_of_words(*(v.words(x) for x in pair))
            lanes = [b.bitcast(x, v.type) for x in pair]
            evens, odds = (v.shuffle(*lanes, [*range(i, 32, 2)]) for i in (0, 1))
            parts = []
            for part in range(3):
                even, odd = (b.bitcast(x, v.int_type) for x in (evens, odds))
                if part:
                    b.store(b.or_(b.load(left[part - 1]), b.or_(even, odd)), left[part - 1])
                upper = b.and_(odd, v.splat_int(-65536))
                parts.append(b.or_(upper, b.lshr(even, v.splat_int(16))))
                evens, odds = (b.fsub(x, v.part_of(x)) for x in (evens, odds))
            return parts

        blocks = b.sdiv(b.add(head_dim, I64(_WIDTH[kind] - 1)), I64(_WIDTH[kind]))
        most = I64(_PARTS[kind])
        if kind == "bf16":
            lower = cgutils.alloca_once_value(b, nothing)
            with steps(b, I64(0), count, 1) as (r, _), steps(b, I64(0), head_dim, 16) as (i, _):
                bits = v.vector_at(data, b.add(b.add(q_at, b.mul(r, q_step)), i), v.int_type)
                b.store(b.or_(b.load(lower), bits), lower)
            some = b.and_(v.fold(b.load(lower), b.or_), I32(0xFFFF))
            most = b.select(b.icmp_signed("==", some, I32(0)), I64(1), most)
        with steps(b, I64(0), blocks, 1) as (block, _):
            # Columns are put down as rows first, then turned.
            with steps(b, I64(0), I64(BLOCK_ROWS), 1) as (r, _):
                for part, lanes in enumerate(parts_of(r, block)):
                    at = b.add(spare_at, b.add(I64(part * _SIZE), b.mul(r, I64(16))))
                    v.put(lanes, data, at)
            with steps(b, I64(0), most, 1) as (part, _):
                from_at = b.add(spare_at, b.mul(part, I64(_SIZE)))
                rows = [
                    v.vector_at(data, b.add(from_at, I64(16 * i)), v.int_type)
                    for i in range(BLOCK_ROWS)
                ]
                number = b.add(b.mul(block, I64(_PARTS[kind])), part)
                at = b.add(to_at, b.mul(number, I64(_SIZE)))
                for i, lanes in enumerate(_turned(v, rows)):
                    v.put(lanes, data, b.add(at, I64(16 * i)))
        if kind == "int8":
            return I64(2)
        needed = I64(1)
        for part, bits in enumerate(left):
            some = b.icmp_signed("!=", v.fold(b.load(bits), b.or_), I32(0))
            needed = b.select(some, I64(part + 2), needed)
        return needed

    return types.int64(KIND, f, *[i8] * 6), codegen


def _turned(v, rows):
    """Sixteen vectors of sixteen lanes, turned: what was lane i of vector j is lane j of vector i."""
    rows = list(rows)
    for step in (1, 2, 4, 8):
        low = [i if not i & step else 16 + i - step for i in range(16)]
        high = [i + step if not i & step else 16 + i for i in range(16)]
        for i in range(16):
            if not i & step:
                a, c = rows[i], rows[i + step]
                rows[i], rows[i + step] = v.shuffle(a, c, low), v.shuffle(a, c, high)
    return rows


@intrinsic(prefer_literal=True)
def find_rows(typing_context, KIND, places, f, spare_at, k, k_offsets, k_step, head_dim):
    """Where the K rows of a tile are for the matrix unit: by 16 tokens, an address and the bytes from row to row.

    Goes to ``places[0:4]`` and ``places[4:8]``. Rows that lie in even steps, and end where 64 bytes end, are used where
    they are; others are copied to ``f[spare_at:]``. `k_step` is the distance of a block's rows in elements.
    """
    if not literals(KIND):
        return None
    kind = KIND.literal_value
    i8 = types.int64

    def codegen(context, b, sig, args):
        places, data, k_data, offsets = (
            data_of(context, b, sig.args[i], args[i]) for i in (1, 2, 4, 5)
        )
        spare_at, k_step, head_dim = args[3], args[6], args[7]
        v = _Tiles(b)
        size = I64(64 // _WIDTH[kind])
        eight = ir.VectorType(I64, 8)
        whole = b.icmp_signed("==", b.and_(head_dim, I64(_WIDTH[kind] - 1)), I64(0))
        row_bytes = b.mul(head_dim, size)
        lines = b.sdiv(b.add(row_bytes, I64(63)), I64(64))
        k_bytes, spare = _bytes_of(b, k_data), _bytes_of(b, v.floats_at(data, spare_at))

        def splat(x):
            first = b.insert_element(ir.Constant(eight, ir.Undefined), x, I32(0))
            return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, 8), None))

        iota = ir.Constant(eight, [ir.Constant(I64, i) for i in range(8)])
        with steps(b, I64(0), I64(TILE), BLOCK_ROWS) as (t0, _):
            first = b.load(b.gep(offsets, [t0]))
            uneven = ir.Constant(ir.IntType(8), 0)
            for i in (0, 8):
                pointer = b.gep(offsets, [b.add(t0, I64(i))])
                have = b.load(b.bitcast(pointer, eight.as_pointer()), align=8)
                steps_up = b.mul(b.add(iota, splat(I64(i))), splat(k_step))
                wrong = b.icmp_signed("!=", have, b.add(splat(first), steps_up))
                uneven = b.or_(uneven, b.bitcast(wrong, ir.IntType(8)))
            even = b.icmp_signed("==", uneven, ir.Constant(ir.IntType(8), 0))
            place = b.gep(places, [b.lshr(t0, I64(4))])
            with b.if_else(b.and_(even, whole)) as (in_place, copied):
                with in_place:
                    b.store(b.ptrtoint(b.gep(k_bytes, [b.mul(first, size)]), I64), place)
                    b.store(b.mul(k_step, size), b.gep(place, [I64(4)]))
                with copied:
                    row_step = b.mul(lines, I64(64))
                    to = b.gep(spare, [b.mul(t0, row_step)])
                    b.store(b.ptrtoint(to, I64), place)
                    b.store(row_step, b.gep(place, [I64(4)]))
                    with steps(b, I64(0), I64(BLOCK_ROWS), 1) as (t, _):
                        at = b.mul(b.load(b.gep(offsets, [b.add(t0, t)])), size)
                        with steps(b, I64(0), row_bytes, 64) as (i, _):
                            line = v._load_bytes(k_bytes, b.add(at, i), b.sub(row_bytes, i), 64)
                            row = b.gep(to, [b.add(b.mul(t, row_step), i)])
                            b.store(line, b.bitcast(row, line.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(KIND, places, f, i8, k, k_offsets, i8, i8), codegen


@intrinsic(prefer_literal=True)
def score_rows(
    typing_context, KIND, f, packed_at, parts, places, head_dim, s_at, AHEAD_KIND, ahead, ahead_offsets, ask,
):  # fmt: skip
    """Scores of up to 16 packed query rows against a tile's K rows, in parts, for `softmax_tiles`.

    `parts` is what `pack_rows` returned, `places` what `find_rows` has found. ``f[s_at:]`` has room for 2,048 floats.
    If `ask` is not 0, rows of `ahead` are asked for.
    """
    if not literals(KIND, AHEAD_KIND):
        return None
    kind, ahead_kind = KIND.literal_value, AHEAD_KIND.literal_value
    i8 = types.int64
    signature = types.void(KIND, f, i8, i8, places, i8, i8, AHEAD_KIND, ahead, ahead_offsets, i8)

    def codegen(context, b, sig, args):
        packed_at, parts, head_dim, s_at = (args[i] for i in (2, 3, 5, 6))
        data, places, ahead_data, ahead_offsets = (
            data_of(context, b, sig.args[i], args[i]) for i in (1, 4, 8, 9)
        )
        v = _Tiles(b)
        asked = b.icmp_signed("!=", args[10], I64(0))
        blocks = b.sdiv(b.add(head_dim, I64(_WIDTH[kind] - 1)), I64(_WIDTH[kind]))

        # A product adds to what another has left, after three times as long as it keeps the unit busy: four sums, one
        # for each 16 K rows, hide that.
        columns, rows = 4, (5, 6)

        def ask_for(block):
            """Ask for 64 bytes' worth of columns."""
            with b.if_then(asked), steps(b, I64(0), I64(TILE), 1) as (t, _):
                at = b.load(b.gep(ahead_offsets, [t]))
                for i in range(0, _WIDTH[kind], ON_LINE[ahead_kind]):
                    column = b.add(b.mul(block, I64(_WIDTH[kind])), I64(i))
                    v.prefetch(ahead_kind, ahead_data, at, column)

        step = [b.load(b.gep(places, [I64(4 + i)])) for i in range(4)]

        def clear():
            for i in range(4):
                v.clear(i)

        def multiply(block, part):
            """Multiply all K rows and a part of queries for 64 bytes."""
            at = b.add(b.mul(block, I64(_PARTS[kind])), part)
            at = b.add(packed_at, b.mul(at, I64(_SIZE)))
            v.load_tile(columns, _bytes_of(b, v.floats_at(data, at)), I64(64))
            for i in range(4):
                key = b.add(b.load(b.gep(places, [I64(i)])), b.mul(block, I64(64)))
                v.load_tile(rows[i % 2], b.inttoptr(key, I8.as_pointer()), step[i])
                v.multiply(_PRODUCT[kind], i, rows[i % 2], columns)

        def store(part):
            for i in range(4):
                at = b.add(b.add(s_at, I64(i * _SIZE)), b.mul(part, I64(4 * _SIZE)))
                v.store_tile(i, _bytes_of(b, v.floats_at(data, at)), I64(64))

        if kind == "bf16":
            clear()
            with steps(b, I64(0), blocks, 1) as (block, _):
                with steps(b, I64(0), parts, 1) as (part, _):
                    multiply(block, part)
                ask_for(block)
            store(I64(0))
        else:
            with steps(b, I64(0), parts, 1) as (part, _):
                clear()
                with steps(b, I64(0), blocks, 1) as (block, _):
                    multiply(block, part)
                    with b.if_then(b.icmp_signed("==", part, I64(0))):
                        ask_for(block)
                store(part)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def softmax_tiles(
    typing_context, K_KIND, V_KIND, f, s_at, count, scales_at, k_scales_at, soft_cap, partly, bounds_at, maxima_at,
    sums_at, rescale_at, v_scales_at, w_scales_at,
):  # fmt: skip
    """Turn scores of up to 16 rows and a tile into weights, all rows at once: see `softmax_rows` of `simd`.

    Scores are those of `score_rows`, times the scales of rows at ``f[scales_at:]`` and, where K is INT8, of tokens at
    ``f[k_scales_at:]``; they are capped if `soft_cap` is above 0. If `partly` is not 0, row r sees tokens from
    ``f[bounds_at + r]`` on that are below ``f[bounds_at + 16 + r]``. Maxima (integers close to them: `_GROWTH`) and
    sums of rows, at ``f[maxima_at:]`` and ``f[sums_at:]``, are brought up to date, and what rescales earlier sums goes
    to ``f[rescale_at:]``, 16 floats.

    Weights take the place of scores, in two parts, as `weigh_rows` takes them: probabilities where V is bf16; where it
    is INT8, 16-bit integers of probabilities times the scales of tokens at ``f[v_scales_at:]``, and the scales of these
    integers go to ``f[w_scales_at:]``, 16 floats.
    """
    if not literals(K_KIND, V_KIND):
        return None
    kind, v_kind = K_KIND.literal_value, V_KIND.literal_value
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[2], args[2])
        s_at, count, scales_at, k_scales_at, soft_cap, partly, bounds_at = args[3:10]
        maxima_at, sums_at, rescale_at, v_scales_at, w_scales_at = args[10:]
        v = _Tiles(b)
        there = v.lanes_below(count)
        scales = v.load_floats(data, scales_at)
        zero = v.splat(0.0)
        in_part = b.icmp_signed("!=", partly, I64(0))

        def at_token(t):
            return b.add(s_at, b.mul(t, I64(16)))

        # Four at a time: one after another, each would wait for the one before.
        peaks, totals = ([cgutils.alloca_once_value(b, x) for _ in range(4)]
                         for x in (v.splat(-math.inf), zero))  # fmt: skip
        # What scores are still to be multiplied with.
        factor = cgutils.alloca_once_value(b, scales if kind == "bf16" else v.splat(1.0))

        def of_all(numbers, combine):
            first, second, third, fourth = (b.load(x) for x in numbers)
            return combine(combine(first, second), combine(third, fourth))

        def converted(token):
            """Scores of a token as floats, times all scales."""
            at = at_token(token)
            upper, lower = (
                b.sitofp(v.vector_at(data, b.add(at, I64(i)), v.int_type), v.type)
                for i in (0, 4 * _SIZE)
            )
            scale = b.fmul(scales, v.splat(v.load_one(data, b.add(k_scales_at, token))))
            return b.fmul(v.fma(upper, v.splat(256.0), lower), scale)

        def find_peaks(t, score_of):
            """Keep the largest scores of four tokens, and the scores where they are not what they were."""
            for i, peak in enumerate(peaks):
                token = b.add(t, I64(i))
                score = score_of(token, i)
                b.store(v.larger(score, b.load(peak)), peak)
                if score_of is not as_it_is:
                    v.store(score, data, at_token(token))

        def as_it_is(token, i):
            return v.load_floats(data, at_token(token))

        # Which token it is, counted as a float: conversions are slow.
        number = cgutils.alloca_once_value(b, zero)
        low, high = (v.load_floats(data, b.add(bounds_at, I64(i))) for i in (0, 16))
        low, high = b.select(in_part, low, zero), b.select(in_part, high, v.splat(TILE))

        def masked(token, i):
            count = b.fadd(b.load(number), v.splat(i))
            seen = b.fcmp_ordered(">=", count, low)
            seen = b.and_(seen, b.fcmp_ordered("<", count, high))
            score = b.fmul(as_it_is(token, i), b.load(factor))
            return b.select(seen, score, v.splat(-math.inf))

        capped = b.fcmp_ordered(">", soft_cap, v.float(0.0))
        plain = b.and_(b.not_(in_part), b.not_(capped))
        if kind == "bf16":  # scores are multiplied later on, which must not turn their order around
            above = b.bitcast(b.fcmp_ordered(">", scales, zero), ir.IntType(16))
            plain = b.and_(plain, b.icmp_signed("==", above, ir.Constant(above.type, -1)))
        with b.if_else(plain) as (simple, otherwise):
            with simple, steps(b, I64(0), I64(TILE), 4) as (t, _):
                find_peaks(t, as_it_is if kind == "bf16" else lambda token, i: converted(token))
            with otherwise:
                if kind == "int8":
                    with steps(b, I64(0), I64(TILE), 1) as (t, _):
                        v.store(converted(t), data, at_token(t))
                with b.if_then(capped):
                    cap = v.splat(soft_cap)
                    with steps(b, I64(0), I64(TILE), 1) as (t, _):
                        score = b.fmul(as_it_is(t, 0), b.load(factor))
                        score = b.fmul(v.tanh(b.fdiv(score, cap)), cap)
                        v.store(b.fmul(score, v.splat(math.log2(math.e))), data, at_token(t))
                    b.store(v.splat(1.0), factor)
                with steps(b, I64(0), I64(TILE), 4) as (t, _):
                    find_peaks(t, masked)
                    b.store(b.fadd(b.load(number), v.splat(4)), number)
                b.store(v.splat(1.0), factor)

        old = v.load_floats(data, maxima_at, there)
        peak = b.fmul(of_all(peaks, v.larger), b.load(factor))
        # A larger maximum counts where weights would grow large: output rows are then seldom rescaled. It is made an
        # integer: what it takes from scores, and what it rescales by, is then exact.
        grown = b.fcmp_ordered(">", peak, b.fadd(old, v.splat(_GROWTH)))
        new = b.select(grown, v.ceil(peak), old)
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        base = b.fsub(v.splat(0.5), b.select(nothing, zero, new))  # what `power` takes, and no more
        largest = cgutils.alloca_once_value(b, v.splat_int(0))

        def weight_of(token, i):
            """The weights of a token, the i-th in turn."""
            weight = v.power(v.fma(v.load_floats(data, at_token(token)), b.load(factor), base))
            total = totals[i % 4]
            b.store(b.fadd(b.load(total), weight), total)
            return weight

        # Lanes of 32 bits, of two or four tokens, are put in place of scores: one vector for each part.
        each = 32 // (16 if v_kind == "bf16" else 8)
        at_once = 4
        if v_kind == "bf16":
            with steps(b, I64(0), I64(TILE), at_once) as (t, _):
                tokens = [b.add(t, I64(i)) for i in range(at_once)]
                weights = [weight_of(token, i) for i, token in enumerate(tokens)]
                for part in range(2):
                    # Rounded to the nearest.
                    bits = [b.add(b.bitcast(x, v.int_type), v.splat_int(0x8000)) for x in weights]
                    for i in range(0, at_once, each):
                        v.put(v.pack(bits[i : i + each], 16), data, at_token(tokens[i + part]))
                    rounded = [v.part_of(b.bitcast(x, v.type)) for x in bits]
                    weights = [b.fsub(x, y) for x, y in zip(weights, rounded, strict=True)]
        else:
            with steps(b, I64(0), I64(TILE), at_once) as (t, _):
                for i in range(at_once):
                    token = b.add(t, I64(i))
                    weight = weight_of(token, i)
                    # What is not seen counts for nothing, whatever its scale is.
                    counts = b.fcmp_unordered("une", weight, zero)
                    scale = v.splat(v.load_one(data, b.add(v_scales_at, token)))
                    weight = b.select(counts, b.fmul(weight, scale), zero)
                    v.store(weight, data, at_token(token))
                    b.store(v.larger_size(weight, b.load(largest)), largest)
            multiplier, scale = v.quantiser(b.load(largest))
            v.store(scale, data, w_scales_at)
            with steps(b, I64(0), I64(TILE), at_once) as (t, _):
                tokens = [b.add(t, I64(i)) for i in range(at_once)]
                codes = [
                    v.nearest(b.fmul(v.load_floats(data, at_token(x)), multiplier)) for x in tokens
                ]
                # A word is 256 times its upper byte plus the lower one, both with a sign.
                upper = [b.add(x, v.splat_int(128)) for x in codes]
                v.put(v.pack(upper, 8), data, at_token(tokens[0]))
                v.put(v.pack(codes, 0), data, at_token(tokens[1]))
        rescale = b.select(grown, v.scale(v.splat(1.0), b.fsub(old, new)), v.splat(1.0))
        v.store(rescale, data, rescale_at)
        v.store_masked(new, data, maxima_at, there)
        before = v.load_floats(data, sums_at, there)
        v.store_masked(v.fma(before, rescale, of_all(totals, b.fadd)), data, sums_at, there)
        return context.get_dummy_value()

    return types.void(K_KIND, V_KIND, f, *[i8] * 4, types.float32, *[i8] * 7), codegen


@intrinsic(prefer_literal=True)
def all_finite(typing_context, KIND, v, v_offsets, begin, end, head_dim):
    """Whether V rows ``[begin, end)`` of a tile have no NaN and no infinity: codes never have."""
    if not literals(KIND):
        return None
    kind = KIND.literal_value
    i8 = types.int64

    def codegen(context, b, sig, args):
        if kind == "int8":
            return cgutils.true_bit
        data, offsets = (data_of(context, b, sig.args[i], args[i]) for i in (1, 2))
        begin, end, head_dim = args[3:]
        v = _Tiles(b)
        largest = cgutils.alloca_once_value(b, v.splat_int(0))
        rows = _bytes_of(b, data)
        row_bytes = b.mul(head_dim, I64(2))
        with steps(b, begin, end, 1) as (t, _):
            at = b.mul(b.load(b.gep(offsets, [t])), I64(2))
            with steps(b, I64(0), row_bytes, 64) as (i, _):
                line = v._load_bytes(rows, b.add(at, i), b.sub(row_bytes, i), 64)
                words = v.words(line)
                # Without their signs: the exponent is what counts.
                wide = b.bitcast(b.shl(words, v.splat_word(1)), v.int_type)
                for half in (b.and_(wide, v.splat_int(0xFFFF)), b.lshr(wide, v.splat_int(16))):
                    b.store(v.larger_int(half, b.load(largest)), largest)
        return b.icmp_signed("<", v.fold(b.load(largest), v.larger_int), I32(0xFF00))

    return types.boolean(KIND, v, v_offsets, i8, i8, i8), codegen


@intrinsic(prefer_literal=True)
def pack_values(
    typing_context, KIND, f, to_at, v, v_offsets, begin, end, column, head_dim, AHEAD_KIND, ahead, ahead_offsets,
):  # fmt: skip
    """Pack 64 columns of a tile's V rows as the unit takes them, from `column` on, in ``f[to_at:]``.

    Rows outside ``[begin, end)`` and columns past `head_dim` become zeros. 2,048 floats are written, of INT8 1,024.
    While V rows are read, the same rows of `ahead` (K rows of a later tile) are asked for.
    """
    if not literals(KIND, AHEAD_KIND):
        return None
    kind, ahead_kind = KIND.literal_value, AHEAD_KIND.literal_value
    i8 = types.int64
    signature = types.void(
        KIND, f, i8, v, v_offsets, i8, i8, i8, i8, AHEAD_KIND, ahead, ahead_offsets
    )

    def codegen(context, b, sig, args):
        data, v_data, offsets, ahead_data, ahead_offsets = (
            data_of(context, b, sig.args[i], args[i]) for i in (1, 3, 4, 10, 11)
        )
        to_at, begin, end, column, head_dim = (args[i] for i in (2, 5, 6, 7, 8))
        v = _Tiles(b)
        size = 2 if kind == "bf16" else 1
        each = 4 // size  # tokens that share a lane
        bytes_type = ir.VectorType(I8, 64)
        row_bytes = b.mul(head_dim, I64(size))
        rows = _bytes_of(b, v_data)
        whole = b.icmp_signed("<=", b.add(column, I64(SEGMENT)), head_dim)
        full = b.and_(b.icmp_signed("==", begin, I64(0)), b.icmp_signed("==", end, I64(TILE)))

        def pack(partly):
            with steps(b, I64(0), I64(TILE // each), 1) as (turn, _):
                tokens = [b.add(b.mul(turn, I64(each)), I64(i)) for i in range(each)]
                places = [b.mul(b.load(b.gep(offsets, [t])), I64(size)) for t in tokens]
                asks = [b.load(b.gep(ahead_offsets, [t])) for t in tokens]
                left = [row_bytes] * each
                if partly:
                    left = []
                    for t in tokens:
                        seen = b.and_(b.icmp_signed(">=", t, begin), b.icmp_signed("<", t, end))
                        left.append(b.select(seen, row_bytes, I64(0)))
                at = b.mul(column, I64(size))
                for ahead_at in asks:
                    for i in range(0, SEGMENT, ON_LINE[ahead_kind]):
                        v.prefetch(ahead_kind, ahead_data, ahead_at, b.add(column, I64(i)))

                def words_of(i, line, at=at):
                    start = b.add(at, I64(64 * line))
                    if partly:
                        count = b.sub(left[i], start)
                        positive = b.icmp_signed(">", count, I64(0))
                        count = b.select(positive, count, I64(0))
                        return v._load_bytes(rows, b.add(places[i], start), count, 64)
                    pointer = b.gep(rows, [b.add(places[i], start)])
                    return b.load(b.bitcast(pointer, bytes_type.as_pointer()), align=1)

                def spread(x):
                    """Put pieces of 8 or 4 bytes where `interleave` brings columns in order from."""
                    type_ = ir.VectorType(ir.IntType(128 // each), 4 * each)
                    order = [4 * piece + i for i in range(4) for piece in range(each)]
                    x = b.bitcast(x, type_)
                    return b.bitcast(v.shuffle(x, x, order), v.int_type)

                if kind == "bf16":
                    mixed = []
                    for line in range(2):
                        pair = [v.words(spread(words_of(i, line))) for i in range(2)]
                        mixed += v.interleave(*pair)
                else:
                    codes = [b.bitcast(spread(words_of(i, 0)), bytes_type) for i in range(4)]
                    halves = zip(v.interleave(*codes[:2]), v.interleave(*codes[2:]), strict=True)
                    mixed = [
                        x for pair in halves for x in v.interleave(*(v.words(y) for y in pair))
                    ]
                # Four tiles for every 64 bytes of weights, one row of each.
                tile, row = b.lshr(turn, I64(4)), b.and_(turn, I64(15))
                first = b.add(b.add(to_at, b.mul(tile, I64(4 * _SIZE))), b.mul(row, I64(16)))
                for j, x in enumerate(mixed):
                    v.put(x, data, b.add(first, I64(j * _SIZE)))

        with b.if_else(b.and_(full, whole)) as (all_of_it, some):
            with all_of_it:
                pack(False)
            with some:
                pack(True)
        # So far, rows are of tokens, and lanes of columns.
        with steps(b, I64(0), I64(4 * _HALVES[kind] * _SIZE), _SIZE) as (tile, _):
            at = [b.add(b.add(to_at, tile), I64(16 * i)) for i in range(16)]
            lanes = [v.vector_at(data, x, v.int_type) for x in at]
            for x, turned in zip(at, _turned(v, lanes), strict=True):
                v.put(turned, data, x)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def weigh_rows(
    typing_context, KIND, f, weights_at, scales_at, packed_at, columns, spare_at, o_at, rescale_at,
):  # fmt: skip
    """Add packed V rows: ``o[d, r] = rescale[r] * o[d, r] + sum over t of p[r, t] * v[t, d]``, for 16 query rows.

    `columns` of them, a multiple of 64, as `pack_values` packed them, 64 after 64 in 2,048 floats each, with weights
    from `softmax_tiles`; of INT8, the scale of row r's weights is at ``f[scales_at + r]``. Sums lie the other way round
    than output rows do: those of column d, 16 floats, are at ``f[o_at + 16 * d]``. ``f[spare_at:]`` has room for 512
    floats.
    """
    if not literals(KIND):
        return None
    kind = KIND.literal_value
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[1], args[1])
        weights_at, scales_at, packed_at, columns, spare_at, o_at, rescale_at = args[2:]
        v = _Tiles(b)
        halves = _HALVES[kind]
        each = _WIDTH[kind] // BLOCK_ROWS  # tokens that share a lane
        rescale = v.load_floats(data, rescale_at)

        def pointer(at):
            return _bytes_of(b, v.floats_at(data, at))

        def sum_at(column):
            return b.add(o_at, b.mul(column, I64(16)))

        def load_weights(part, half):
            at = b.add(weights_at, I64(16 * (BLOCK_ROWS * each * half + part)))
            v.load_tile(4 + halves * part + half, pointer(at), I64(64 * each))

        def load_values(tile, half, column):
            """Of sixteen columns; of 64, there are four tiles for each half of the tokens."""
            segment, rest = (b.sdiv(column, I64(SEGMENT)), b.srem(column, I64(SEGMENT)))
            at = b.add(b.mul(segment, I64(8 * _SIZE)), b.mul(rest, I64(16)))
            at = b.add(b.add(packed_at, at), I64(4 * half * _SIZE))
            v.load_tile(tile, pointer(at), I64(64))

        for part in range(2):
            for half in range(halves):
                load_weights(part, half)
        if kind == "bf16":
            # Products are added to the sums as they are, which seldom have to be rescaled.
            moved = b.bitcast(b.fcmp_unordered("une", rescale, v.splat(1.0)), ir.IntType(16))
            with (
                b.if_then(b.icmp_signed("!=", moved, ir.Constant(moved.type, 0))),
                steps(b, I64(0), columns, 1) as (column, _),
            ):
                v.store(b.fmul(v.load_floats(data, sum_at(column)), rescale), data, sum_at(column))
            # Two sums by turns, as one waits for the product before.
            with steps(b, I64(0), columns, 32) as (column, _):
                two = [column, b.add(column, I64(16))]
                for i in range(2):
                    v.load_tile(i, pointer(sum_at(two[i])), I64(64))
                for half in range(halves):
                    for i in range(2):
                        load_values(2 + i, half, two[i])
                        v.multiply(_PRODUCT[kind], i, 2 + i, 4 + half)
                    for i in range(2):
                        v.multiply(_PRODUCT[kind], i, 2 + i, 6 + half)
                for i in range(2):
                    v.store_tile(i, pointer(sum_at(two[i])), I64(64))
        else:
            scale = v.load_floats(data, scales_at)
            with steps(b, I64(0), columns, 16) as (column, _):
                load_values(2, 0, column)
                for part in range(2):
                    v.clear(part)
                    v.multiply(_PRODUCT[kind], part, 2, 4 + part)
                    v.store_tile(part, pointer(b.add(spare_at, I64(part * _SIZE))), I64(64))
                with steps(b, I64(0), I64(_SIZE), 16) as (i, _):
                    upper, lower = (
                        b.sitofp(v.vector_at(data, b.add(at, i), v.int_type), v.type)
                        for at in (spare_at, b.add(spare_at, I64(_SIZE)))
                    )
                    total = b.fmul(v.fma(upper, v.splat(256.0), lower), scale)
                    at = b.add(sum_at(column), i)
                    v.store(v.fma(v.load_floats(data, at), rescale, total), data, at)
        return context.get_dummy_value()

    return types.void(KIND, f, *[i8] * 7), codegen


@intrinsic
def turn_rows(
    typing_context, f, blocks, count, from_at, from_step, from_block, to_at, to_step, to_block
):
    """Turn blocks of 16 rows of 16 floats: rows become columns.

    Row r of block i is at ``f[from_at + i * from_block + r * from_step]``; where it goes, the same with `to`. The first
    `count` rows of the result are written.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        blocks, count, from_at, from_step, from_block, to_at, to_step, to_block = args[1:]
        v = _Tiles(b)
        with steps(b, I64(0), blocks, 1) as (block, _):
            at = b.add(from_at, b.mul(block, from_block))
            rows = [
                v.load_floats(data, b.add(at, b.mul(from_step, I64(r)))) for r in range(BLOCK_ROWS)
            ]
            at = b.add(to_at, b.mul(block, to_block))
            for r, row in enumerate(_turned(v, rows)):
                with b.if_then(b.icmp_signed("<", I64(r), count)):
                    v.store(row, data, b.add(at, b.mul(to_step, I64(r))))
        return context.get_dummy_value()

    return types.void(f, *[i8] * 8), codegen
