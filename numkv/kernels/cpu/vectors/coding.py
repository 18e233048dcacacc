"""Rows of floats to codes of a few bits, in vector code: INT4, CODE4 and CODE6.

The words and scales equal those of `numkv.rows.int4` and `numkv.rows.codebook` bit for bit: the same operations on the
same floats, and sums of integers, whose order makes no difference. Only the method differs:

*Groups of INT4.* The elements of four groups stay in registers, and their scales are lanes of one vector.

*Codebooks.* A row is read four times: for its largest element, its mean square, the errors and least-squares sums under
all three scales, and its codes. In between, vectors have a number of each row in their lanes. Roots and divisions take
long, and a CPU cannot look far enough ahead to overlap those of several rows. Levels are found for bytes, four vectors
of floats at a time::

    y = sixteenths // 8, at most 255               twice the edges are integers, too
    number = first[y // 16] + sum over j of (y >= edges[j][y // 16])

At most three edges are among 16 neighbours, so lookups in tables of 16 bytes replace a search. With VBMI, which has
tables of 128 bytes, y is looked up itself.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import register_jitable

from numkv.kernels.cpu.vectors.arrays import address_of, row_of
from numkv.kernels.cpu.vectors.emit import (
    DOUBLE,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    as_bytes,
    emits,
    scratch_floats,
    steps,
)
from numkv.kernels.cpu.vectors.stored import (
    has_byte_lookups,
    has_lookups,
    looked_up,
    looked_up_byte,
    looked_up_far,
)
from numkv.kernels.cpu.vectors.words import Words
from numkv.rows import code4, code6, codebook, int4
from numkv.rows.codec import row_codec
from numkv.rows.convert import codec

_CODEBOOKS = {"code4": code4, "code6": code6}
_CODED = ("int4", *_CODEBOOKS)
_NOT_FINITE = 0x7F800000
# Scales that are tried for a group or a row.
_TRIED = 3
# Floats that have room for a group's codes as words.
_CODES = int4.GROUP // 2
# Of longer rows of codebooks, sums would not fit into 32 bits, nor sizes in sixteenths of a scale into 16.
_LONGEST = 2048
# Numbers of rows of codebooks: the largest magnitude's bits, what turns magnitudes into 32767ths of it, the scale, what
# turns magnitudes into sixteenths of it, and the same two of each scale that is tried.
_MOST, _PARTS, _SCALE, _SIXTEENTHS, _TRIALS = range(5)
_NUMBERS = _TRIALS + 2 * _TRIED


def _coder(kind, compute):
    """How a kind's rows become codes.

    Returns
    -------
    whole, store_rows, store_rest : function
        ``whole(dim)`` is the number of elements of a row that `store_rows` stores, and ``store_rest(x, words, scales)``
        the rest of a row.
    """
    store_rows = _make_store_rows(kind, compute)
    if kind == "int4":

        @register_jitable
        def whole(dim):
            return dim // int4.GROUP * int4.GROUP

        @register_jitable
        def store_rest(x, words, scales):
            first = whole(len(x))
            scales[first // int4.GROUP] = int4.store_int4_group(
                x, first, len(x) - first, words, first // 2
            )

        return whole, store_rows, store_rest

    @register_jitable
    def whole_or_none(dim):
        return dim if dim <= _LONGEST else 0

    return whole_or_none, store_rows, row_codec(kind, compute)[0]


def row_storer(kind, compute="float32"):
    """The function that stores a row of a kind, as `numkv.rows.codec.row_codec` has it.

    Rows, words and scales lie one after another in memory.
    """
    if kind not in _CODED:
        return row_codec(kind, compute)[0]
    whole, store_rows, store_rest = _coder(kind, compute)

    @register_jitable
    def store_row(x, words, scales):
        dim = np.int64(len(x))
        store_rows(address_of(x), 0, dim, whole(dim), 1, words, 0, scales, 0)
        if whole(dim) < dim:
            store_rest(x, words, scales)

    return store_row


def token_storer(kind, rows_kind):
    """The function that stores the rows of a token of a float kind: ``store(rows, t, pool, scales, slot, x)``.

    `scales` is a result of `by_row`, and `x` has room for the rows of all heads as float32. None for kinds that gain
    nothing by it.
    """
    if kind not in _CODED:
        return None
    whole, store_rows, store_rest = _coder(kind, "float32")
    load, _ = codec(rows_kind)

    @register_jitable
    def store_together(rows, t, pool, scales, slot, x):
        heads, dim = np.int64(rows.shape[1]), np.int64(rows.shape[2])
        block, offset = slot // pool.shape[2], slot % pool.shape[2]
        at, step = address_of(x), 4 * dim
        if rows_kind == "fp32" and whole(dim) == dim:
            at, step = address_of(row_of(rows, (t, np.int64(0)))), np.int64(rows.strides[1])
        else:
            for h in range(heads):
                source, floats = row_of(rows, (t, np.int64(h))), x[h * dim : (h + 1) * dim]
                for d in range(dim):
                    floats[d] = load(source[d])
        place = (block, np.int64(0), offset)
        store_rows(
            at, step, dim, whole(dim), heads, row_of(pool, place), np.int64(pool.strides[1]),
            row_of(scales, place), np.int64(scales.strides[1]),
        )  # fmt: skip
        if whole(dim) < dim:
            for h in range(heads):
                place = (block, np.int64(h), offset)
                store_rest(x[h * dim : (h + 1) * dim], row_of(pool, place), row_of(scales, place))

    return store_together


def _make_store_rows(kind, compute):
    """`store_rows` for a kind, and rows of floats of a type."""
    element = DOUBLE if compute == "float64" else FLOAT

    @emits()
    def store_rows(b, x, x_step, dim, whole, rows, words, words_step, scales, scales_step):
        """Put the first `whole` elements of rows of `dim` floats, whole groups or all, into their words and scales.

        `x` is the address of the first row. A row, its words and its scales begin `x_step`, `words_step` and
        `scales_step` bytes after those of the row before.
        """
        steps_ = x_step, words_step, scales_step
        x = b.inttoptr(x, element.as_pointer())
        if kind == "int4":
            _Int4Groups(b, whole, (x, words, scales), steps_).store(rows)
        else:
            rows = b.select(b.icmp_signed(">", whole, I64(0)), rows, I64(0))
            _CodebookRows(b, kind, dim, (x, words, scales), steps_).store(rows)

    return store_rows


def _moved(b, pointer, size):
    """A pointer some bytes further."""
    return b.bitcast(b.gep(as_bytes(b, pointer), [size]), pointer.type)


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

    def word_between(self, x, low, high):
        """Words, of those that are out of a range the nearest ones in it."""
        b, low, high = self.b, self.splat_word(low), self.splat_word(high)
        x = b.select(b.icmp_signed(">", x, low), x, low)
        return b.select(b.icmp_signed("<", x, high), x, high)

    def squares(self, words):
        """The sum of the squares of words, by lanes."""
        total = self.splat_int(0)
        for x in words:
            total = self.add_pairs(total, x, x)
        return total

    def joined(self, vectors):
        """The low bytes of integers, vectors one after another, as one vector."""
        b = self.b
        while len(vectors) > 1:
            width = 2 * vectors[0].type.count
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.shuffle(x, y, range(width)) for x, y in pairs]
        return b.trunc(vectors[0], ir.VectorType(I8, vectors[0].type.count))

    def keep(self, memory, vector, i, of=0):
        """Keep a vector of a row or group for `folded`."""
        at = self.b.mul(self.b.add(i, I64(of * self.lanes)), I64(self.lanes))
        self.store(self.b.bitcast(vector, self.type), memory, at)

    def folded(self, memory, combine, of=0):
        """The lanes of each row's vector combined: a vector with an element for each row."""
        type_ = self.type if combine == self.larger else self.int_type
        at = [I64((of * self.lanes + i) * self.lanes) for i in range(self.lanes)]
        return self.folds([self.b.bitcast(self.load_floats(memory, x), type_) for x in at], combine)


def _same(value, like, element=None):
    """A constant of the type of a vector, or of another element, whose lanes are all a number."""
    of = ir.VectorType(element or like.type.element, like.type.count)
    return ir.Constant(of, [ir.Constant(of.element, value)] * of.count)


# -- INT4


class _Int4Groups:
    """Emits `store_rows`. The groups of all rows are taken a vector's lanes at a time."""

    def __init__(self, b, whole, arrays, steps_):
        self.b, self.v, self.steps = b, _Rows(b), steps_
        self.x, self.words, self.scales = arrays
        self.each = b.ashr(whole, I64(int4.GROUP.bit_length() - 1))
        lanes = self.v.lanes
        # Of each group: where its elements, words and scale are.
        self.places = [cgutils.alloca_once(b, I64, I64(lanes)) for _ in range(3)]
        self.next = [cgutils.alloca_once(b, I64) for _ in range(2)]  # a row, and a group in it
        self.codes = scratch_floats(b, FLOAT, _TRIED * lanes * _CODES)
        self.numbers = scratch_floats(b, FLOAT, 2 * _TRIED * lanes)
        self.vectors = scratch_floats(b, FLOAT, 3 * lanes * lanes)

    def store(self, rows):
        """Store the groups of some rows."""
        b, v = self.b, self.v
        total = b.mul(self.each, rows)
        for slot in self.next:
            b.store(I64(0), slot)
        with steps(b, I64(0), total, v.lanes) as (first, _):
            left = b.sub(total, first)
            count = b.select(b.icmp_signed("<", left, I64(v.lanes)), left, I64(v.lanes))
            with steps(b, I64(0), count, 1) as (i, _):
                self.find(i)
                self.find_ends(i)
            # Of lanes past `count`, nothing is stored.
            high = v.folded(self.vectors, v.larger)
            minus_low = v.folded(self.vectors, v.larger, 1)
            peak = v.folded(self.vectors, v.larger_int, 2)
            finite = b.icmp_signed("<", peak, v.splat_int(_NOT_FINITE))
            self.put_codes(count, finite, *self.best(count, high, minus_low))

    def find(self, i):
        """Find the place of the next group."""
        b = self.b
        row, in_row = (b.load(slot) for slot in self.next)
        element = 8 if self.x.type.pointee == DOUBLE else 4
        sizes = element * int4.GROUP, int4.GROUP // 2, 2
        for slot, step, size in zip(self.places, self.steps, sizes, strict=True):
            place = b.add(b.mul(row, step), b.mul(in_row, I64(size)))
            b.store(place, b.gep(slot, [i]))
        ended = b.icmp_signed("==", b.add(in_row, I64(1)), self.each)
        b.store(b.add(row, b.zext(ended, I64)), self.next[0])
        b.store(b.select(ended, I64(0), b.add(in_row, I64(1))), self.next[1])

    def place(self, of, i):
        """Return where something of a group is."""
        return self.b.load(self.b.gep(self.places[of], [i]))

    def load(self, i):
        """The elements of a group."""
        first = _moved(self.b, self.x, self.place(0, i))
        return [self.v.load_row(first, I64(j)) for j in range(0, int4.GROUP, self.v.lanes)]

    def find_ends(self, i):
        """Find the largest element of a group, minus the smallest one, and the largest magnitude, by lanes."""
        b, v = self.b, self.v
        xs = self.load(i)
        peak, high, low = v.splat_int(0), xs[0], xs[0]
        for x in xs:
            peak = v.larger_size(x, peak)
            high, low = v.larger(x, high), v.smaller(x, low)
        for of, vector in enumerate((high, b.fsub(v.splat(-0.0), low), peak)):
            v.keep(self.vectors, vector, i, of)

    def best(self, count, high, minus_low):
        """Which of the scales that are tried is the best, and its word; see `numkv.rows.int4.int4_scale`."""
        b, v = self.b, self.v
        span = b.fadd(*(b.fdiv(x, v.splat(15.0)) for x in (high, minus_low)))
        reach = b.fdiv(v.larger(high, minus_low), v.splat(-int4.LOWEST))
        widest = v.larger(span, reach)
        tried = [self.tried(i, high, minus_low, widest) for i in range(_TRIED)]
        self.sum_errors(count, tried)
        best, word, least = v.splat_int(0), v.splat_int(0), v.splat(math.inf)
        for i, (step, this, scale, _) in enumerate(tried):
            unit = b.fdiv(scale, widest)
            error = b.sitofp(v.folded(self.vectors, b.add, i), v.type)
            error = b.fmul(b.fmul(error, unit), unit)
            tiny = b.fcmp_ordered("<", step, v.splat(int4.LEAST_STEP))
            error = b.select(tiny, v.splat(math.inf), error)
            less = b.fcmp_ordered("<", error, least)
            best = b.select(less, v.splat_int(i), best)
            word, least = b.select(less, this, word), b.select(less, error, least)
        return best, word

    def tried(self, i, high, minus_low, widest):
        """Return candidate scale `i`: before rounding, its word, its value, and the place of 0."""
        b, v = self.b, self.v
        step = b.fmul(widest, v.splat(float(np.float32(23 + i) / np.float32(25))))
        middle = b.fsub(b.fdiv(high, step), b.fdiv(minus_low, step))
        middle = b.fadd(middle, v.splat(float(int4.OFFSETS // 2)))
        middle = v.larger(middle, v.splat(0.0))
        offset = b.fptosi(v.smaller(middle, v.splat(int4.OFFSETS - 1.0)), v.int_type)
        word = self.word_near(step, offset)
        scale = b.bitcast(b.shl(word, v.splat_int(16)), v.type)
        first = int(int4.STEPS / 2 - int4.LOWEST * int4.STEPS)
        of_0 = b.sub(v.splat_int(first), b.mul(offset, v.splat_int(int4.STEPS // 2)))
        return step, word, scale, v.pairs(of_0, of_0)

    def word_near(self, step, offset):
        """The nearest words that end with the bits of offsets; see `numkv.rows.int4`."""
        b, v = self.b, self.v
        bits = b.sub(b.bitcast(step, v.int_type), b.shl(offset, v.splat_int(16)))
        unit = int4.OFFSETS << 16
        near = b.ashr(b.add(bits, v.splat_int(unit // 2)), v.splat_int(unit.bit_length() - 1))
        return b.add(b.mul(near, v.splat_int(int4.OFFSETS)), offset)

    def sum_errors(self, count, tried):
        """Sum the squared errors of some groups under the scales that are tried, by lanes."""
        b, v = self.b, self.v
        for i, (_, _, scale, of_0) in enumerate(tried):
            in_1 = b.fdiv(v.splat(float(int4.STEPS)), scale)
            for j, of_groups in enumerate((in_1, b.bitcast(of_0, v.type))):
                v.store(of_groups, self.numbers, I64((2 * i + j) * v.lanes))
        with steps(b, I64(0), count, 1) as (group, _):
            xs = self.load(group)
            for i in range(_TRIED):
                in_1, of_0 = (
                    v.splat(v.load_one(self.numbers, b.add(group, I64((2 * i + j) * v.lanes))))
                    for j in range(2)
                )
                at = b.mul(b.add(group, I64(i * v.lanes)), I64(_CODES))
                error = self.squared_error([b.fmul(x, in_1) for x in xs], at, v.words(of_0))
                v.keep(self.vectors, error, group, i)

    def squared_error(self, elements, at, of_0):
        """The squared error of a group, by lanes, from its elements in places; its codes are kept at `at`.

        A vector of places has those of some elements and of elements half a group further on, by turns of 128 bits.
        """
        b, v = self.b, self.v
        places = [b.fptosi(x, v.int_type) for x in elements]
        half, off = len(places) // 2, []
        for i, pair in enumerate(zip(places[:half], places[half:], strict=True)):
            place = b.add(v.packed(*pair), of_0)
            inside = v.word_between(place, 0, int4.LAST_PLACE)
            code = b.lshr(inside, v.splat_word(int4.STEP_BITS))
            v.store(b.bitcast(code, v.type), self.codes, b.add(at, I64(i * v.lanes)))
            level = b.and_(inside, v.splat_word(-int4.STEPS))
            off.append(b.sub(b.sub(place, v.splat_word(int4.STEPS // 2)), level))
        return v.squares(off)

    def put_codes(self, count, finite, best, word):
        """Put words and scales down."""
        b, v = self.b, self.v
        word = b.select(finite, word, v.splat_int(0x7FC0))
        scale = b.bitcast(b.shl(word, v.splat_int(16)), v.type)
        # Where the scale is 0 or NaN, all bits are set.
        fill = b.sext(b.not_(b.fcmp_ordered(">", scale, v.splat(0.0))), v.int_type)
        for i, of_groups in enumerate((best, word, fill)):
            v.store(b.bitcast(of_groups, v.type), self.numbers, I64(i * v.lanes))
        with steps(b, I64(0), count, 1) as (group, _):
            best, word, fill = (
                b.bitcast(v.load_one(self.numbers, b.add(group, I64(i * v.lanes))), I32)
                for i in range(3)
            )
            at = b.add(b.mul(b.zext(best, I64), I64(v.lanes)), group)
            packed = self.packed_codes(b.mul(at, I64(_CODES)), fill)
            for value, base, place in (
                (b.trunc(word, I16), self.scales, self.place(2, group)),
                (packed, self.words, self.place(1, group)),
            ):
                place = b.gep(as_bytes(b, base), [place])
                b.store(value, b.bitcast(place, value.type.as_pointer()), align=1)

    def packed_codes(self, at, fill):
        """Return the bytes of a group whose codes were kept at `at`, with the bits of `fill` set."""
        b, v = self.b, self.v
        words, parts = ir.VectorType(I16, v.lanes), []
        for i in range(0, _CODES, v.lanes):
            turns = v.load_floats(self.codes, b.add(at, I64(i)))
            turns = b.bitcast(turns, ir.VectorType(I64, v.lanes // 2))
            low, high = (
                b.bitcast(v.shuffle(turns, turns, range(j, v.lanes // 2, 2)), words)
                for j in range(2)
            )
            parts.append(b.or_(low, b.shl(high, _same(4, high))))
        packed = v.joined(parts)
        return b.select(b.icmp_signed("==", fill, I32(0)), packed, _same(255, packed))


# -- codebooks


class _CodebookRows:
    """Emits `store_rows`. Each step is taken for some rows, so that the CPU overlaps what they wait for."""

    def __init__(self, b, kind, dim, arrays, steps_):
        self.b, self.v, self.kind, self.steps = b, _Rows(b), kind, steps_
        self.rows, self.words, self.scales = arrays
        book = _CODEBOOKS[kind]
        self.levels, self.of_normal = book.LEVELS, book.OF_NORMAL
        self.sign = len(self.levels)
        self.edges = [int(2 * edge) for edge in book.EDGES]
        self.bytes_of = {"code4": (1, 2), "code6": (3, 4)}[kind]  # bytes of so many elements
        self.count, self.chunk = dim, 4 * self.v.lanes
        self.chunks = b.sdiv(b.add(dim, I64(self.chunk - 1)), I64(self.chunk))
        self.whole = b.sdiv(dim, I64(self.chunk))
        # The elements after whole chunks are padded with zeros.
        self.left = b.sub(dim, b.mul(self.whole, I64(self.chunk)))
        self.pads = b.sub(b.mul(self.chunks, I64(self.chunk)), dim)
        self.element = self.rows.type.pointee
        self.lasts = cgutils.alloca_once(b, self.element, I64(self.v.lanes * self.chunk))
        # Numbers, and vectors that are to be folded.
        self.numbers = scratch_floats(b, FLOAT, _NUMBERS * self.v.lanes)
        self.vectors = scratch_floats(b, FLOAT, 3 * _TRIED * self.v.lanes**2)

    def store(self, rows):
        """Store some rows."""
        b, lanes = self.b, self.v.lanes
        with steps(b, I64(0), rows, lanes) as (first, _):
            left = b.sub(rows, first)
            count = b.select(b.icmp_signed("<", left, I64(lanes)), left, I64(lanes))
            for of_row, of_all in (
                (self.find_largest, self.put_factors),
                (self.add_squares, self.put_tried),
                (self.add_errors, self.put_fitted),
                (self.put_codes, None),
            ):
                with steps(b, I64(0), count, 1) as (i, _):
                    self.row, self.i = b.add(first, i), i
                    self.x = _moved(b, self.rows, b.mul(self.row, self.steps[0]))
                    self.last = b.gep(self.lasts, [b.mul(i, I64(self.chunk))])
                    of_row()
                if of_all:
                    of_all()

    # -- numbers of all rows, by lanes

    def put(self, number, vector):
        """Keep a number of each row."""
        self.v.store(vector, self.numbers, I64(number * self.v.lanes))

    def all_of(self, number):
        """A number of each row."""
        return self.v.load_floats(self.numbers, I64(number * self.v.lanes))

    def put_factors(self):
        """Find the bits of each row's largest magnitude, and what turns magnitudes into 32767ths of it."""
        b, v = self.b, self.v
        most = b.bitcast(v.folded(self.vectors, v.larger_int), v.type)
        self.put(_MOST, most)
        self.put(_PARTS, b.fdiv(v.splat(32767.0), most))

    def put_tried(self):
        """Find the scales that are tried; see `numkv.rows.codebook.scale_finder`."""
        b, v = self.b, self.v
        wide = ir.VectorType(I64, v.lanes)
        low, high = (b.zext(v.folded(self.vectors, b.add, of), wide) for of in (0, 1))
        total = b.sitofp(b.add(low, b.shl(high, _same(16, high))), v.type)
        square = b.fmul(b.sitofp(self.count, FLOAT), FLOAT(float(np.float32(32767.0**2))))
        mean_square = b.fdiv(total, v.splat(square))
        name = f"llvm.sqrt.v{v.lanes}f32"
        root = cgutils.get_or_insert_function(b.module, ir.FunctionType(v.type, [v.type]), name)
        largest = self.all_of(_MOST)
        of_normal = b.fmul(b.fmul(largest, b.call(root, [mean_square])), v.splat(self.of_normal))
        of_largest = b.fdiv(largest, v.splat(self.levels[-1]))
        between = b.fmul(b.fadd(of_normal, of_largest), v.splat(0.5))
        for i, scale in enumerate((of_normal, between, of_largest)):
            self.put(_TRIALS + 2 * i, scale)
            self.put(_TRIALS + 2 * i + 1, b.fdiv(v.splat(16.0), scale))

    def put_fitted(self):
        """Find the scale: the best of those that are tried, fitted to its levels by least squares."""
        b, v = self.b, self.v
        fitted, least = v.splat(0.0), v.splat(math.inf)
        # What zeros after the row's end add to squares of levels.
        pads = b.bitcast(v.splat(b.bitcast(b.trunc(self.pads, I32), FLOAT)), v.int_type)
        of_pads = b.mul(pads, v.splat_int(self.levels[0] ** 2))
        for i in range(_TRIED):
            # By least squares, for the levels that each of them has chosen.
            places, along, squares = (v.folded(self.vectors, b.add, 3 * i + j) for j in range(3))
            squares = b.sub(squares, of_pads)
            # The squared error: it fits into 32 bits, whether the products do or not.
            error = b.sub(b.mul(squares, v.splat_int(256)), b.mul(along, v.splat_int(32)))
            error, along, squares = (
                b.sitofp(x, v.type) for x in (b.add(places, error), along, squares)
            )
            scale = self.all_of(_TRIALS + 2 * i)
            # Relative to one of them, so that tiny errors do not vanish when they are squared.
            unit = b.fdiv(scale, self.all_of(_TRIALS + 2 * (_TRIED - 1)))
            error = b.fmul(b.fmul(error, unit), unit)
            of_scale = b.fmul(scale, b.fdiv(along, b.fmul(squares, v.splat(16.0))))
            less = b.fcmp_ordered("<", error, least)
            fitted, least = b.select(less, of_scale, fitted), b.select(less, error, least)
        most = self.all_of(_MOST)
        small = b.fcmp_ordered("<", most, v.splat(float(np.float32(codebook.TINY))))
        scale = b.select(small, v.splat(0.0), fitted)
        odd = b.icmp_signed(">=", b.bitcast(most, v.int_type), v.splat_int(_NOT_FINITE))
        self.put(_SCALE, b.select(odd, v.splat(math.nan), scale))
        self.put(_SIXTEENTHS, b.fdiv(v.splat(16.0), fitted))

    # -- one row

    def number(self, number):
        """A number of the row."""
        return self.v.load_one(self.numbers, self.b.add(self.i, I64(number * self.v.lanes)))

    def each(self):
        """A loop over chunks: gives the number of one."""
        return steps(self.b, I64(0), self.chunks, 1)

    def load(self, i):
        """The vectors of chunk `i`."""
        b, v = self.b, self.v
        inside = b.icmp_signed("<", i, self.whole)
        base = b.select(inside, b.gep(self.x, [b.mul(i, I64(self.chunk))]), self.last)
        return [v.load_row(base, I64(j * v.lanes)) for j in range(4)]

    def sizes(self, i):
        """The magnitudes of chunk `i`."""
        return [self.v.size_of(x) for x in self.load(i)]

    def parts(self, sizes, number):
        """Magnitudes of a chunk times a number of the row, as words, rounded towards 0."""
        b, v, factor = self.b, self.v, self.v.splat(self.number(number))
        found = [b.fptosi(b.fmul(x, factor), v.int_type) for x in sizes]
        return [v.packed(*found[:2]), v.packed(*found[2:])]

    def sums(self, count):
        """Return places for sums of 32 bits, by lanes."""
        return [cgutils.alloca_once_value(self.b, self.v.splat_int(0)) for _ in range(count)]

    def add_products(self, slot, xs, ys):
        """Add the products of words to a sum."""
        total = self.b.load(slot)
        for x, y in zip(xs, ys, strict=True):
            total = self.v.add_pairs(total, x, y)
        self.b.store(total, slot)

    def add(self, slot, numbers):
        """Add to a sum."""
        self.b.store(self.b.add(self.b.load(slot), numbers), slot)

    def find_largest(self):
        """Find the bits of the largest magnitude, by lanes."""
        b, v = self.b, self.v
        size = I64(8 if self.element == DOUBLE else 4)
        with b.if_then(b.icmp_signed(">", self.left, I64(0))):
            cgutils.memset(b, self.last, b.mul(I64(self.chunk), size), 0)
            start = b.gep(self.x, [b.sub(self.count, self.left)])
            cgutils.raw_memcpy(b, self.last, start, self.left, size)
        peak = cgutils.alloca_once_value(b, v.splat_int(0))
        with self.each() as (i, _):
            found = b.load(peak)
            for x in self.load(i):
                found = v.larger_size(x, found)
            b.store(found, peak)
        v.keep(self.vectors, b.load(peak), self.i)

    def add_squares(self):
        """Sum the squares of magnitudes in units of the largest, by lanes."""
        b, v = self.b, self.v
        sums = self.sums(2)
        with self.each() as (i, _):
            squares = v.squares(self.parts(self.sizes(i), _PARTS))
            # Lower and upper halves apart: the sum of four squares takes all bits.
            self.add(sums[0], b.and_(squares, v.splat_int(0xFFFF)))
            self.add(sums[1], b.lshr(squares, v.splat_int(16)))
        self.keep(sums)

    def keep(self, sums):
        """Keep sums of the row for all."""
        for of, slot in enumerate(sums):
            self.v.keep(self.vectors, self.b.load(slot), self.i, of)

    def add_errors(self):
        """Add up under each scale, by lanes: squares of sixteenths, their products with levels, squares of levels."""
        v = self.v
        sums = self.sums(3 * _TRIED)
        with self.each() as (i, _):
            sizes = self.sizes(i)
            for n in range(_TRIED):
                sixteenths = self.parts(sizes, _TRIALS + 2 * n + 1)
                levels = self.levels_at(self.twice(sixteenths))
                levels = [v.words(x) for x in v.interleave(levels, _same(0, levels))]
                pairs = (sixteenths, sixteenths), (sixteenths, levels), (levels, levels)
                for of, (x, y) in enumerate(pairs):
                    self.add_products(sums[3 * n + of], x, y)
        self.keep(sums)

    def twice(self, sixteenths):
        """Twice the magnitudes of a chunk in units of the scale, as bytes."""
        return self.v.packed(*(self.b.lshr(x, self.v.splat_word(3)) for x in sixteenths))

    def numbers_of(self, twice):
        """The numbers of the levels nearest to magnitudes, from `twice` these in units of the scale, as bytes."""
        b, v = self.b, self.v
        if has_byte_lookups():
            return looked_up_byte(b, twice, [sum(x <= i for x in self.edges) for i in range(256)])
        if not has_lookups():
            found = _same(0, twice)
            for edge in self.edges:
                found = b.sub(
                    found, b.sext(b.icmp_unsigned(">=", twice, _same(edge, twice)), twice.type)
                )
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

    def levels_at(self, twice):
        """The levels nearest to magnitudes; see `numbers_of`."""
        if has_byte_lookups():
            table = [self.levels[sum(x <= i for x in self.edges)] for i in range(256)]
            return looked_up_byte(self.b, twice, table)
        numbers = self.numbers_of(twice)
        if self.sign == 32:
            return looked_up_far(self.b, numbers, self.levels)
        return looked_up(self.b, numbers, [*self.levels, *[0] * (16 - self.sign)])

    def put_codes(self):
        """Put the codes down; zeros where the scale is 0 or NaN."""
        b, v = self.b, self.v
        scale = self.number(_SCALE)
        place = b.gep(as_bytes(b, self.scales), [b.mul(self.row, self.steps[2])])
        b.store(scale, b.bitcast(place, FLOAT.as_pointer()), align=4)
        usable = b.fcmp_ordered(">", scale, FLOAT(0.0))
        words = b.gep(self.words, [b.mul(self.row, self.steps[1])])
        each, of = self.bytes_of
        size = self.chunk * each // of
        rest = cgutils.alloca_once(b, I8, I64(size))
        with self.each() as (i, _):
            numbers = self.numbers_of(self.twice(self.parts(self.sizes(i), _SIXTEENTHS)))
            signs = [b.bitcast(x, v.int_type) for x in self.load(i)]
            signs = [b.lshr(v.packed(*x), v.splat_word(15)) for x in (signs[:2], signs[2:])]
            signs = b.shl(v.words(v.packed(*signs)), v.splat_word(self.sign.bit_length() - 1))
            codes = b.bitcast(b.or_(numbers, b.bitcast(signs, numbers.type)), v.int_type)
            order = [4 * piece + j for j in range(4) for piece in range(v.lanes // 4)]
            codes = b.bitcast(v.shuffle(codes, codes, order), numbers.type)
            inside = b.icmp_signed("<", i, self.whole)
            base = b.select(inside, b.gep(words, [b.mul(i, I64(size))]), rest)
            at = 0
            for part in self.packed_codes(codes):
                part = b.select(usable, part, _same(0, part))
                place = b.bitcast(b.gep(base, [I64(at)]), part.type.as_pointer())
                b.store(part, place, align=1)
                at += part.type.count
        with b.if_then(b.icmp_signed(">", self.left, I64(0))):
            left = b.sdiv(b.mul(self.left, I64(each)), I64(of))
            start = b.gep(words, [b.mul(self.whole, I64(size))])
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
