"""Rows of floats to codes of a few bits, in vector code: INT4, CODE4 and CODE6.

The words and scales equal those of `numkv.rows.int4` and `numkv.rows.codebook` bit for bit: the same operations on the
same floats, and sums of integers, whose order makes no difference. Only the method differs:

*Groups of INT4.* The elements of four groups stay in registers, and their scales are lanes of one vector.

*Codebooks.* A row is read four times: for its largest element, its mean square, the errors and least-squares sums under
all three scales, and its codes. Levels are found for bytes, four vectors of floats at a time::

    y = floor(2 * size), at most 255               twice the edges are integers, too
    number = first[y // 16] + sum over j of (y >= edges[j][y // 16])

At most three edges are among 16 neighbours, so lookups in tables of 16 bytes replace a search.

Divisions are products: see `numkv.kernels.cpu.vectors.words.Words.divider`. So rows and groups are first multiplied by
powers of two, which bring them far from the ends of float32's range.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import register_jitable

from numkv.kernels.cpu.vectors.emit import (
    DOUBLE,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    emits,
    opaque_number,
    scratch_floats,
    steps,
)
from numkv.kernels.cpu.vectors.stored import has_lookups, looked_up, looked_up_far
from numkv.kernels.cpu.vectors.words import Words
from numkv.rows import code4, code6, codebook, int4
from numkv.rows.codec import row_codec

_CODEBOOKS = {"code4": code4, "code6": code6}
_NOT_FINITE = 0x7F800000
# Scales that are tried for a group or a row.
_TRIED = 3
# Of longer rows of codebooks, sums would not fit into 32 bits, nor sizes in sixteenths of a scale into 16.
_LONGEST = 2048


def row_storer(kind, compute="float32"):
    """The function that stores a row of a kind, as `numkv.rows.codec.row_codec` has it.

    Rows, words and scales lie one after another in memory.
    """
    if kind == "int4":

        @register_jitable
        def store_int4(x, words, scales):
            whole = len(x) // int4.GROUP
            store_int4_groups(x, words, scales, whole)
            first = whole * int4.GROUP
            if first < len(x):
                scales[whole] = int4.store_int4_group(x, first, len(x) - first, words, first // 2)

        return store_int4
    if kind in _CODEBOOKS:
        store_codes, store_long = _make_store_codes(kind), row_codec(kind, compute)[0]

        @register_jitable
        def store_coded(x, words, scales):
            if len(x) > _LONGEST:
                store_long(x, words, scales)
            else:
                scales[0] = store_codes(x, words, len(x))

        return store_coded
    return row_codec(kind, compute)[0]


class _Rows(Words):
    """Vectors of rows of float32, or of float64 that are rounded to it."""

    def load_row(self, pointer, at):
        """A vector of elements, from one on."""
        element = pointer.type.pointee
        of = ir.VectorType(element, self.lanes)
        place = self.b.bitcast(self.b.gep(pointer, [at]), of.as_pointer())
        value = self.b.load(place, align=8 if element == DOUBLE else 4)
        return self.b.fptrunc(value, self.type) if element == DOUBLE else value

    def size_of(self, x):
        """Absolute values."""
        bits = self.b.and_(self.b.bitcast(x, self.int_type), self.splat_int(0x7FFFFFFF))
        return self.b.bitcast(bits, self.type)

    def smaller(self, a, b):
        """Lane by lane the smaller."""
        return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

    def products(self, a, b):
        """The sum of the products of words, by lanes."""
        total = self.splat_int(0)
        for x, y in zip(a, b, strict=True):
            total = self.add_pairs(total, x, y)
        return total

    def squares(self, words):
        """The sum of the squares of words, by lanes."""
        return self.products(words, words)

    def joined(self, vectors, of=I8):
        """The low bits of integers, vectors one after another, as one vector of narrower ones."""
        b = self.b
        while len(vectors) > 1:
            width = 2 * vectors[0].type.count
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.shuffle(x, y, range(width)) for x, y in pairs]
        return b.trunc(vectors[0], ir.VectorType(of, vectors[0].type.count))

    def low_byte(self, x):
        """Clear all but the low byte of integers, which lets LLVM pack them by saturating instructions."""
        return self.b.and_(x, self.splat_int(255))


def _same(value, like, element=None):
    """A constant of the type of a vector, or of another element, whose lanes are all a number."""
    of = ir.VectorType(element or like.type.element, like.type.count)
    return ir.Constant(of, [ir.Constant(of.element, value)] * of.count)


# -- INT4

# Groups that are taken at once: lanes of a vector.
_TOGETHER = 4


@emits()
def store_int4_groups(b, x, words, scales, count):
    """Put the first `count` whole groups of a row into their words and scales."""
    coder = _Int4Groups(b, x, words, scales, count)
    with steps(b, I64(0), count, _TOGETHER) as (first, _):
        coder.store(first)


class _Int4Groups:
    """Emits `store_int4_groups`."""

    def __init__(self, b, x, words, scales, count):
        self.b, self.v, self.x, self.words, self.scales = b, _Rows(b), x, words, scales
        self.floats, self.ints = (ir.VectorType(x, _TOGETHER) for x in (FLOAT, I32))
        self.last = b.sub(count, I64(1))
        self.codes, self.numbers, self.totals = (
            scratch_floats(b, FLOAT, _TRIED * _TOGETHER * size)
            for size in (int4.GROUP, 4, self.v.lanes)
        )

    def group(self, first, i):
        """Return the number of a group; past the last one, that one again."""
        group = self.b.add(first, i)
        return self.b.select(self.b.icmp_signed("<", group, self.last), group, self.last)

    def load(self, group):
        """The elements of a group."""
        first = self.b.mul(group, I64(int4.GROUP))
        starts = range(0, int4.GROUP, self.v.lanes)
        return [self.v.load_row(self.x, self.b.add(first, I64(i))) for i in starts]

    def store(self, first):
        """Store the words and scales of some groups."""
        b = self.b
        groups = [self.group(first, I64(i)) for i in range(_TOGETHER)]
        high, minus_low, finite = self.ends([self.load(group) for group in groups])
        best, word = self.best(first, high, minus_low)
        word = b.select(finite, word, _same(0x7FC0, word))
        scale = b.bitcast(b.shl(word, _same(16, word)), self.floats)
        usable = b.fcmp_ordered(">", scale, _same(0.0, scale))
        for j, group in enumerate(groups):
            lane = I32(j)
            of_group = b.trunc(b.extract_element(word, lane), I16)
            b.store(of_group, b.gep(self.scales, [group]))
            tried = b.zext(b.extract_element(best, lane), I64)
            at = b.add(b.mul(tried, I64(_TOGETHER * int4.GROUP)), I64(j * int4.GROUP))
            packed = self.packed_codes(at)
            packed = b.select(b.extract_element(usable, lane), packed, _same(0xFF, packed))
            place = b.gep(self.words, [b.mul(group, I64(int4.GROUP // 2))])
            b.store(packed, b.bitcast(place, packed.type.as_pointer()), align=1)

    def ends(self, groups):
        """Of groups of vectors: the largest element, minus the smallest one, and whether all are finite."""
        b, v = self.b, self.v
        found = []
        for xs in groups:
            peak, high, low = v.splat_int(0), xs[0], xs[0]
            for x in xs:
                peak = v.larger_size(x, peak)
                high, low = v.larger(x, high), v.smaller(x, low)
            found.append((high, b.fsub(v.splat(-0.0), low), peak))
        high, minus_low, peak = zip(*found, strict=True)
        peak = v.folds(peak, v.larger_int)
        finite = b.icmp_signed("<", peak, _same(_NOT_FINITE, peak))
        return v.folds(high, v.larger), v.folds(minus_low, v.larger), finite

    def best(self, first, high, minus_low):
        """Which of the scales that are tried is the best, and its word; see `numkv.rows.int4.int4_scale`."""
        b, v = self.b, self.v
        span = b.fadd(*(b.fdiv(x, _same(15.0, x)) for x in (high, minus_low)))
        reach = b.fdiv(v.larger(high, minus_low), _same(-int4.LOWEST, high))
        widest = v.larger(span, reach)
        tried = [self.tried(i, high, minus_low, widest) for i in range(_TRIED)]
        self.sum_errors(first, widest, tried)
        best, word, least = _same(0, high, I32), _same(0, high, I32), _same(math.inf, high)
        for i, (step, this, scale, _) in enumerate(tried):
            unit = b.fdiv(scale, widest)
            at = [I64((i * _TOGETHER + j) * v.lanes) for j in range(_TOGETHER)]
            totals = [b.bitcast(v.load_floats(self.totals, x), v.int_type) for x in at]
            error = b.sitofp(v.folds(totals, b.add), self.floats)
            error = b.fmul(b.fmul(error, unit), unit)
            tiny = b.fcmp_ordered("<", step, _same(2.0**-123, step))
            error = b.select(tiny, _same(math.inf, step), error)
            less = b.fcmp_ordered("<", error, least)
            best = b.select(less, _same(i, best), best)
            word, least = b.select(less, this, word), b.select(less, error, least)
        return best, word

    def sum_errors(self, first, widest, tried):
        """Sum the squared errors of some groups under the scales that are tried."""
        b, v = self.b, self.v
        small = b.fcmp_ordered("<", widest, _same(2.0**-32, widest))
        factor = b.select(small, _same(2.0**64, widest), _same(1.0, widest))
        for i, (_, _, scale, lowest) in enumerate(tried):
            scale = b.fmul(scale, factor)
            inverse = b.fdiv(_same(1.0, scale), scale)
            for j, of_groups in enumerate((scale, inverse, lowest, factor)):
                v.store(of_groups, self.numbers, I64((4 * i + j) * _TOGETHER))
        # A loop, as LLVM would keep far more at hand than there are registers.
        with steps(b, I64(0), opaque_number(b, _TOGETHER), 1) as (group, _):
            numbers = [v.load_one(self.numbers, b.add(group, I64(i * _TOGETHER))) for i in range(4 * _TRIED)]
            factor = v.splat(numbers[3])
            xs = [b.fmul(x, factor) for x in self.load(self.group(first, group))]
            for i in range(_TRIED):
                scale, inverse, lowest, _ = numbers[4 * i : 4 * i + 4]
                divided = v.divider(scale, inverse)
                at = b.add(group, I64(i * _TOGETHER))
                places = [divided(x) for x in xs]
                total = self.squared_error(places, b.mul(at, I64(int4.GROUP)), v.splat(lowest))
                v.store(b.bitcast(total, v.type), self.totals, b.mul(at, I64(v.lanes)))

    def tried(self, i, high, minus_low, widest):
        """Return candidate scale `i`: before rounding, its word, its value, and its lowest level."""
        b, v = self.b, self.v
        factor = float(np.float32(23 + i) / np.float32(25))
        step = b.fmul(widest, _same(factor, widest))
        middle = b.fsub(b.fdiv(high, step), b.fdiv(minus_low, step))
        middle = b.fadd(middle, _same(float(int4.OFFSETS // 2), step))
        middle = v.larger(middle, _same(0.0, step))
        offset = b.fptosi(v.smaller(middle, _same(int4.OFFSETS - 1.0, step)), self.ints)
        word = self.word_near(step, offset)
        scale = b.bitcast(b.shl(word, _same(16, word)), self.floats)
        lowest = b.fmul(b.sitofp(offset, self.floats), _same(0.5, step))
        return step, word, scale, b.fadd(lowest, _same(int4.LOWEST, step))

    def word_near(self, step, offset):
        """The nearest words that end with the bits of offsets; see `numkv.rows.int4`."""
        b = self.b
        bits = b.sub(b.bitcast(step, self.ints), b.shl(offset, _same(16, offset)))
        unit = int4.OFFSETS << 16
        near = b.ashr(b.add(bits, _same(unit // 2, bits)), _same(unit.bit_length() - 1, bits))
        return b.add(b.mul(near, _same(int4.OFFSETS, near)), offset)

    def squared_error(self, places, at, lowest):
        """The squared error of a group, by lanes, from places in units of its scale; its codes are kept at `at`."""
        b, v = self.b, self.v
        off = []
        for i, place in enumerate(places):
            code = b.fadd(b.fsub(place, lowest), v.splat(0.5))
            code = v.smaller(v.larger(code, v.splat(0.0)), v.splat(15.0))
            code = b.fptosi(code, v.int_type)
            v.store(b.bitcast(code, v.type), self.codes, b.add(at, I64(i * v.lanes)))
            error = b.fsub(place, b.fadd(b.sitofp(code, v.type), lowest))
            off.append(b.fptosi(b.fmul(error, v.splat(512.0)), v.int_type))  # 16 bits
        return v.squares([v.packed(*pair) for pair in zip(off[::2], off[1::2], strict=True)])

    def packed_codes(self, at):
        """Return the bytes of a group whose codes were kept at `at`."""
        b, v = self.b, self.v
        pairs = []
        for i in range(0, int4.GROUP // 2, v.lanes):
            low, high = (
                b.bitcast(v.load_floats(self.codes, b.add(at, I64(j))), v.int_type)
                for j in (i, i + int4.GROUP // 2)
            )
            pairs.append(v.low_byte(b.or_(low, b.shl(high, v.splat_int(4)))))
        return v.joined(pairs)


# -- codebooks


def _make_store_codes(kind):
    """`store_codes` for a kind of codes of a codebook."""

    @emits(types.float32)
    def store_codes(b, x, words, count):
        """Put a row of `count` floats into its words, and return its scale."""
        return _CodebookRow(b, kind, x, words, count).store()

    return store_codes


class _CodebookRow:
    """Emits `store_codes`."""

    def __init__(self, b, kind, x, words, count):
        self.b, self.v, self.kind, self.words = b, _Rows(b), kind, words
        book = _CODEBOOKS[kind]
        self.levels, self.of_normal = book.LEVELS, book.OF_NORMAL
        self.sign = len(self.levels)
        self.edges = [int(2 * edge) for edge in book.EDGES]
        self.bytes_of = {"code4": (1, 2), "code6": (3, 4)}[kind]  # bytes of so many elements
        self.count, self.chunk = count, 4 * self.v.lanes
        self.chunks = b.sdiv(b.add(count, I64(self.chunk - 1)), I64(self.chunk))
        self.whole = b.sdiv(count, I64(self.chunk))
        # The elements after whole chunks are padded with zeros.
        self.left = b.sub(count, b.mul(self.whole, I64(self.chunk)))
        self.x, element = x, x.type.pointee
        self.last = cgutils.alloca_once(b, element, I64(self.chunk))
        self.pads = b.sub(b.mul(self.chunks, I64(self.chunk)), count)
        size = I64(8 if element == DOUBLE else 4)
        with b.if_then(b.icmp_signed(">", self.left, I64(0))):
            cgutils.memset(b, self.last, b.mul(I64(self.chunk), size), 0)
            start = b.gep(x, [b.sub(count, self.left)])
            cgutils.raw_memcpy(b, self.last, start, self.left, size)

    def store(self):
        """All of it; the scale, a float."""
        b = self.b
        most = self.largest()
        largest, power = b.bitcast(most, FLOAT), b.and_(most, I32(_NOT_FINITE))
        # With this factor the largest magnitude is from 2 up to 4.
        self.factor = b.bitcast(b.sub(I32(_NOT_FINITE), power), FLOAT)
        fitted = self.scale_of(b.fmul(largest, self.factor))
        small = b.fcmp_ordered("<", largest, FLOAT(float(np.float32(codebook.TINY))))
        scale = b.select(small, FLOAT(0.0), b.fdiv(fitted, self.factor))
        odd = b.icmp_signed(">=", most, I32(_NOT_FINITE))
        scale = b.select(odd, FLOAT(math.nan), scale)
        self.put_codes(fitted, scale)
        return scale

    def each(self):
        """A loop over chunks: gives the number of one."""
        return steps(self.b, I64(0), self.chunks, 1)

    def load(self, i):
        """The vectors of chunk `i`."""
        b, v = self.b, self.v
        inside = b.icmp_signed("<", i, self.whole)
        base = b.select(inside, b.gep(self.x, [b.mul(i, I64(self.chunk))]), self.last)
        return [v.load_row(base, I64(j * v.lanes)) for j in range(4)]

    def sizes(self, xs, divided):
        """Magnitudes of a chunk, times the row's factor, in units of a divisor."""
        factor = self.v.splat(self.factor)
        return [divided(self.b.fmul(self.v.size_of(x), factor)) for x in xs]

    def sums(self, count):
        """Return places for sums of 32 bits, by lanes."""
        return [cgutils.alloca_once_value(self.b, self.v.splat_int(0)) for _ in range(count)]

    def add(self, slot, numbers):
        """Add to a sum."""
        self.b.store(self.b.add(self.b.load(slot), numbers), slot)

    def whole_parts(self, floats):
        """Floats of a chunk as words, rounded towards 0."""
        parts = [self.b.fptosi(x, self.v.int_type) for x in floats]
        return [self.v.packed(*parts[:2]), self.v.packed(*parts[2:])]

    def largest(self):
        """Return the bits of the largest magnitude."""
        b, v = self.b, self.v
        peak = cgutils.alloca_once_value(b, v.splat_int(0))
        with self.each() as (i, _):
            found = b.load(peak)
            for x in self.load(i):
                found = v.larger_size(x, found)
            b.store(found, peak)
        return v.fold(b.load(peak), v.larger_int)

    def mean_square(self, largest):
        """The mean square of the row, in units of the largest magnitude's square."""
        b, v = self.b, self.v
        divided, sums = v.divider(largest), self.sums(2)
        with self.each() as (i, _):
            sizes = self.sizes(self.load(i), divided)
            squares = v.squares(self.whole_parts([b.fmul(x, v.splat(32767.0)) for x in sizes]))
            # Lower and upper halves apart: the sum of four squares takes all bits.
            self.add(sums[0], b.and_(squares, v.splat_int(0xFFFF)))
            self.add(sums[1], b.lshr(squares, v.splat_int(16)))
        low, high = (b.zext(b.load(slot), ir.VectorType(I64, v.lanes)) for slot in sums)
        total = b.sitofp(v.fold(b.add(low, b.shl(high, _same(16, high))), b.add), FLOAT)
        square = FLOAT(float(np.float32(32767.0**2)))
        return b.fdiv(total, b.fmul(b.sitofp(self.count, FLOAT), square))

    def scale_of(self, largest):
        """Return the scale; see `numkv.rows.codebook.scale_finder`."""
        b, v = self.b, self.v
        signature = ir.FunctionType(FLOAT, [FLOAT])
        root = cgutils.get_or_insert_function(b.module, signature, "llvm.sqrt.f32")
        root = b.call(root, [self.mean_square(largest)])
        of_normal = b.fmul(b.fmul(largest, root), FLOAT(float(np.float32(self.of_normal))))
        of_largest = b.fdiv(largest, FLOAT(float(self.levels[-1])))
        between = b.fmul(b.fadd(of_normal, of_largest), FLOAT(0.5))
        scales = of_normal, between, of_largest
        sums = self.under(scales)
        errors = [total for total, _, _ in sums]
        errors = b.sub(v.folds([*errors, errors[-1]], b.add), self.of_pads(8 * self.levels[0]))
        best, least = FLOAT(0.0), FLOAT(math.inf)
        along = squares = v.splat_int(0)
        for i, (scale, (_, *of_scale)) in enumerate(zip(scales, sums, strict=True)):
            # Relative to one of them, so that tiny errors do not vanish when they are squared.
            unit = b.fdiv(scale, of_largest)
            error = b.sitofp(b.extract_element(errors, I32(i)), FLOAT)
            error = b.fmul(b.fmul(error, unit), unit)
            less = b.fcmp_ordered("<", error, least)
            best, least = b.select(less, scale, best), b.select(less, error, least)
            along, squares = (b.select(less, *x) for x in zip(of_scale, (along, squares), strict=True))
        # By least squares, for the levels that this scale has chosen.
        squares = b.sub(v.fold(squares, b.add), b.extract_element(self.of_pads(self.levels[0]), I32(0)))
        below = b.fmul(b.sitofp(squares, FLOAT), FLOAT(16.0))
        factor = b.fdiv(b.sitofp(v.fold(along, b.add), FLOAT), below)
        return b.fmul(best, factor)

    def under(self, scales):
        """Sums of the row under each scale, by lanes: squared errors, products with levels, squares of levels."""
        b, v = self.b, self.v
        divide = [v.divider(b.fmul(x, FLOAT(1 / 16))) for x in scales]
        sums = [self.sums(3) for _ in scales]
        with self.each() as (i, _):
            xs = self.load(i)
            for divided, (errors, along, squares) in zip(divide, sums, strict=True):
                places = self.sizes(xs, divided)  # in sixteenths of the scale
                sixteenths = self.whole_parts(places)
                halves = [b.lshr(x, v.splat_word(3)) for x in sixteenths]
                levels = self.levels_of(self.numbers_of(v.packed(*halves)))
                levels = v.interleave(levels, _same(0, levels))
                self.add(along, v.products(sixteenths, levels))
                self.add(squares, v.squares(levels))
                wide = [x for pair in levels for x in v.interleave(pair, _same(0, pair))]
                off = []
                for place, level in zip(places, wide, strict=True):
                    level = b.sitofp(b.bitcast(level, v.int_type), v.type)
                    off.append(b.fmul(v.fma(level, v.splat(-16.0), place), v.splat(0.5)))
                self.add(errors, v.squares(self.whole_parts(off)))
        return [[b.load(slot) for slot in of_scale] for of_scale in sums]

    def of_pads(self, error):
        """What zeros after the row's end add to four sums of squares, each the square of a number."""
        b, pads = self.b, self.b.trunc(self.pads, I32)
        found = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
        for i in range(4):
            found = b.insert_element(found, b.mul(pads, I32(error**2)), I32(i))
        return found

    def numbers_of(self, twice):
        """The numbers of the levels nearest to magnitudes, from twice the magnitudes in units of the scale, as bytes."""
        b, v = self.b, self.v
        if not has_lookups():
            found = _same(0, twice)
            for edge in self.edges:
                found = b.sub(found, b.sext(b.icmp_unsigned(">=", twice, _same(edge, twice)), twice.type))
            return found
        words = b.lshr(v.words(twice), v.splat_word(4))
        place = b.and_(b.bitcast(words, twice.type), _same(15, twice))
        found = looked_up(b, place, [sum(x <= 16 * i for x in self.edges) for i in range(16)])
        inside = [[x for x in self.edges if 16 * i < x < 16 * i + 16] for i in range(16)]
        # CPUs compare bytes with a sign.
        twice = b.xor(twice, _same(128, twice))
        for j in range(max(map(len, inside))):
            edges = [(some[j] if j < len(some) else 256) - 129 for some in inside]
            above = b.icmp_signed(">", twice, looked_up(b, place, edges))
            found = b.sub(found, b.sext(above, twice.type))
        return found

    def levels_of(self, numbers):
        """The levels of numbers, as bytes."""
        if self.sign == 32:
            return looked_up_far(self.b, numbers, self.levels)
        return looked_up(self.b, numbers, [*self.levels, *[0] * (16 - self.sign)])

    def put_codes(self, fitted, scale):
        """Put the codes down; zeros where the scale is 0 or NaN. `fitted` is the scale times the row's factor."""
        b, v = self.b, self.v
        usable, divided = b.fcmp_ordered(">", scale, FLOAT(0.0)), v.divider(b.fmul(fitted, FLOAT(0.5)))
        # A quotient of at most 2**-150 would be 0, without a sign.
        above, lift = v.splat(b.fmul(scale, FLOAT(-(2.0**-50)))), v.splat(2.0**100)
        each, of = self.bytes_of
        size = self.chunk * each // of
        rest = cgutils.alloca_once(b, I8, I64(size))
        with self.each() as (i, _):
            xs = self.load(i)
            numbers = self.numbers_of(v.packed(*self.whole_parts(self.sizes(xs, divided))))
            below = [b.fcmp_ordered("<", b.fmul(x, lift), above) for x in xs]
            below = [b.select(x, v.splat_int(self.sign), v.splat_int(0)) for x in below]
            signs = v.packed(v.packed(*below[:2]), v.packed(*below[2:]))
            codes = b.bitcast(b.or_(numbers, signs), v.int_type)
            order = [4 * piece + j for j in range(4) for piece in range(v.lanes // 4)]
            codes = b.bitcast(v.shuffle(codes, codes, order), numbers.type)
            inside = b.icmp_signed("<", i, self.whole)
            base = b.select(inside, b.gep(self.words, [b.mul(i, I64(size))]), rest)
            at = 0
            for part in self.packed_codes(codes):
                part = b.select(usable, part, _same(0, part))
                place = b.bitcast(b.gep(base, [I64(at)]), part.type.as_pointer())
                b.store(part, place, align=1)
                at += part.type.count
        with b.if_then(b.icmp_signed(">", self.left, I64(0))):
            left = b.sdiv(b.mul(self.left, I64(each)), I64(of))
            start = b.gep(self.words, [b.mul(self.whole, I64(size))])
            cgutils.raw_memcpy(b, start, rest, left, I64(1))

    def packed_codes(self, codes):
        """Codes as they lie in memory: vectors of bytes."""
        b, v = self.b, self.v
        if self.kind == "code4":
            words = v.words(codes)
            words = b.or_(words, b.lshr(words, v.splat_word(4)))
            words = b.and_(words, v.splat_word(255))
            return [b.trunc(words, ir.VectorType(I8, words.type.count))]
        x = b.bitcast(codes, v.int_type)
        low, high = v.splat_int(0x003F003F), v.splat_int(0x0FC00FC0)
        x = b.or_(b.and_(x, low), b.and_(b.lshr(x, v.splat_int(2)), high))
        low, high = v.splat_int(0x00000FFF), v.splat_int(0x00FFF000)
        x = b.or_(b.and_(x, low), b.and_(b.lshr(x, v.splat_int(4)), high))
        x = b.bitcast(x, codes.type)
        lanes = [4 * (i // 3) + i % 3 for i in range(3 * v.lanes)]
        return [v.shuffle(x, x, lanes[: 2 * v.lanes]), v.shuffle(x, x, lanes[2 * v.lanes :])]
