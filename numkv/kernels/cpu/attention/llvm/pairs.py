"""Pairs of bf16: the layout of query rows, weights and V rows for products of pairs, and weighted sums of V.

A lane is two numbers in bf16, the first in its lower half::

    query row, K row     x[0] x[1] | x[2] x[3] | ...                      neighbours of a row; K as it is stored
    weights of pair i    p[2i, r] p[2i + 1, r]                            two tokens' weights of a query row
    V rows of pair i     v[2i, 0] v[2i + 1, 0] | v[2i, 1] v[2i + 1, 1] | ...

Denormal numbers (below 1.2e-38) count as 0.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.llvm.floats import WeightedSums
from numkv.kernels.cpu.attention.records import PAIRS, PANEL
from numkv.kernels.cpu.vectors.emit import I16, I32, I64, emits, for_rows, numbers_taken, steps
from numkv.kernels.cpu.vectors.features import LANES, ROW_UNROLL
from numkv.kernels.cpu.vectors.vectors import Vectors

_WORDS = ir.VectorType(I16, 2 * LANES)
# Bits of bf16 that are an exponent of NaN and infinity.
_EXPONENT = 0x7F80


def _load_words(v, base, at, mask=None):
    """Load two words of bf16 for each lane; those outside `mask` are zero and never read."""
    pointer = v.pointer(base, at, I16)
    if mask is not None:
        return v.masked_load(pointer, _WORDS, 2, mask)
    return v.b.load(v.b.bitcast(pointer, _WORDS.as_pointer()), align=2)


def _paired(v, first, second):
    """Interleave two vectors of words: two vectors of pairs, in the order of the words."""
    lanes = [x for i in range(_WORDS.count) for x in (i, _WORDS.count + i)]
    half = _WORDS.count
    return [
        v.b.bitcast(v.shuffle(first, second, part), v.int_type)
        for part in (lanes[:half], lanes[half:])
    ]


@emits()
def pair_row(b, f, at, size):
    """Make a row of bf16 pairs of `size` floats, in place; `size` is a multiple of two vectors.

    The floats must fit bf16, as lower bits are dropped.
    """
    v = Vectors(b, "float32")
    with steps(b, I64(0), size, 2 * v.lanes) as (i, _):
        vectors = [
            b.bitcast(v.load_floats(f, b.add(b.add(at, i), I64(n * v.lanes))), v.int_type)
            for n in range(2)
        ]
        first, second = (v.shuffle(*vectors, range(n, 2 * v.lanes, 2)) for n in (0, 1))
        low = b.lshr(first, v.splat_int(16))
        high = b.and_(second, v.splat_int(-0x10000))
        to = b.add(at, b.ashr(i, I64(1)))
        v.store(b.bitcast(b.or_(low, high), v.type), f, to)


def _rounded(v, vector):
    """A vector of float32 as lanes that hold bf16 in their lower halves."""
    words = ir.VectorType(I16, v.lanes)
    convert = ir.InlineAsm(ir.FunctionType(words, [vector.type]), "vcvtneps2bf16 $1, $0", "=v,v")
    return v.b.zext(v.b.call(convert, [vector]), v.int_type)


def _pairs_of_weights(v, even, odd):
    """Weights of two tokens, rounded, as the floats whose bits they are."""
    high = v.b.shl(_rounded(v, odd), v.splat_int(16))
    return v.b.bitcast(v.b.or_(_rounded(v, even), high), v.type)


@emits()
def pair_weights(b, rows, f, p_at, begin, end):
    """Make pairs of the weights of `rows` query rows and the tokens ``[begin, end)`` of a tile, in place.

    Weights are those of `online_softmax_step`: p[t, r] is at ``p_at + t * rows + r``, and is 0 outside the tokens. The
    pair of row r and tokens 2i and 2i + 1 goes to ``p_at + i * rows + r``. Whole vectors are written.
    """
    v = Vectors(b, "float32")

    def emit(rows):
        number = 2 * v.lanes // rows  # of tokens
        lanes = [i for i in range(2 * v.lanes) if i // rows % 2 == 0]
        with steps(b, b.and_(begin, I64(-number)), end, number) as (t, _):
            at = b.add(p_at, b.mul(t, I64(rows)))
            both = [v.load_floats(f, b.add(at, I64(i * v.lanes))) for i in range(2)]
            even, odd = (v.shuffle(*both, [i + more for i in lanes]) for more in (0, rows))
            to = b.add(p_at, b.mul(b.ashr(t, I64(1)), I64(rows)))
            v.store(_pairs_of_weights(v, even, odd), f, to)

    for_rows(b, rows, emit, ROW_UNROLL[0])


@emits()
def pair_panel_weights(b, f, p_at, count, begin, end):
    """Make pairs of weights for `count` rows of a panel: p[t, r] is at ``p_at + t * PANEL + r``.

    If a pair has one token outside, that token's weight has to be 0.
    """
    v = Vectors(b, "float32")
    with (
        steps(b, b.and_(begin, I64(-2)), end, 2) as (t, _),
        steps(b, I64(0), count, v.lanes) as (r, _),
    ):
        at = b.add(b.add(p_at, r), b.mul(t, I64(PANEL)))
        even, odd = (v.load_floats(f, b.add(at, I64(i * PANEL))) for i in range(2))
        to = b.add(b.add(p_at, r), b.mul(b.ashr(t, I64(1)), I64(PANEL)))
        v.store(_pairs_of_weights(v, even, odd), f, to)


@emits()
def copy_rows(b, f, to_at, step, rows, end):
    """Copy rows ``[0, end)`` of a tile, two elements to a float, with zeros up to a whole vector.

    Row t goes to ``to_at + t * step``.
    """
    v = Vectors(b, "float32")

    def put(row_at, d, to_row, mask=None):
        value = _load_words(v, rows.words, b.add(row_at, d), mask)
        v.store(b.bitcast(value, v.type), f, b.add(to_row, b.ashr(d, I64(1))))

    with steps(b, I64(0), end, 1) as (t, _):
        row_at = b.load(b.gep(rows.offsets, [t]))
        to_row = b.add(to_at, b.mul(t, step))
        _by_words(v, rows.dim, lambda d, mask: put(row_at, d, to_row, mask))


def _by_words(v, dim, emit):
    """Emit ``emit(column, mask)`` for each vector of words of a row of `dim` elements."""
    b = v.b
    whole = b.and_(dim, I64(-_WORDS.count))
    rest = b.sub(dim, whole)
    with steps(b, I64(0), whole, _WORDS.count) as (d, _):
        emit(d, None)
    with b.if_then(b.icmp_signed(">", rest, I64(0))):
        emit(whole, v.lanes_below(rest, lanes=_WORDS.count))


@emits(types.boolean)
def pair_rows(b, f, to_at, step, rows, begin, end):
    """Write V rows ``[begin, end)`` of a tile as pairs, and return whether all of them are finite.

    The pair of tokens 2i and 2i + 1 goes to ``to_at + i * step``, with zeros up to two whole vectors. A token outside
    counts as zeros.
    """
    v = Vectors(b, "float32")
    zero = ir.Constant(_WORDS, None)
    largest = cgutils.alloca_once_value(b, zero)

    def larger(x, y):
        return b.select(b.icmp_signed(">", x, y), x, y)

    magnitude = ir.Constant(_WORDS, [I16(0x7FFF)] * _WORDS.count)
    with steps(b, b.and_(begin, I64(-2)), end, 2) as (t, _):
        after = b.add(t, I64(1))
        places = [b.load(b.gep(rows.offsets, [x])) for x in (t, after)]
        there = (b.icmp_signed(">=", t, begin), b.icmp_signed("<", after, end))
        to_row = b.add(to_at, b.mul(b.ashr(t, I64(1)), step))

        def put(d, mask):
            both = []
            for at, is_there in zip(places, there, strict=True):
                words = _load_words(v, rows.words, b.add(at, d), mask)
                words = b.select(is_there, words, zero)
                both.append(words)
                b.store(larger(b.and_(words, magnitude), b.load(largest)), largest)
            for i, pairs in enumerate(_paired(v, *both)):
                to = b.add(b.add(to_row, d), I64(i * v.lanes))
                v.store(b.bitcast(pairs, v.type), f, to)

        _by_words(v, rows.dim, put)
    halves = (range(v.lanes), range(v.lanes, 2 * v.lanes))
    found = larger(*(v.shuffle(b.load(largest), zero, half) for half in halves))
    return b.icmp_signed("<", v.fold(found, larger), I16(_EXPONENT))


@functools.cache
def make_accumulate_pairs(next_kind):
    """`accumulate_pairs`; `next_kind` is that of the rows that are prefetched."""

    @emits()
    def accumulate_pairs(b, rows, count, floats, p_at, values, begin, end, outputs, extents):
        """`accumulate_pv` for V in bf16 and the weights of `pair_weights`; output rows are padded to two vectors."""
        kinds = "bf16", PAIRS, next_kind
        sums = _PairedSums(
            b, kinds, rows, count, floats, p_at, values, begin, end, outputs, extents
        )
        most = ROW_UNROLL[0]
        for_rows(b, count, sums.emit, most, numbers_taken(rows, most))
        sums.add_single_tokens(count)

    return accumulate_pairs


class _PairedSums(WeightedSums):
    """Emits `accumulate_pairs`: a turn is two tokens, and a token that stands alone comes last."""

    tokens = 2

    def turns(self):
        b = self.b
        return b.ashr(b.add(self.begin, I64(1)), I64(1)), b.ashr(self.end, I64(1))

    def units(self, vectors):
        return max(1, vectors // 2), self.add_blocks, _WORDS.count

    def weights(self, t):
        b, v = self.b, self.v
        at = b.add(self.p_at, b.mul(t, self.row_step))
        weights = (v.load_one(self.floats, b.add(at, I64(r))) for r in self.taken)
        return [b.bitcast(v.splat(weight), v.int_type) for weight in weights]

    def add(self, total, weight, values):
        return self.v.add_bf16_pairs(total, weight, values)

    def add_blocks(self, column, blocks, columns=None):
        """Add `blocks` vectors of words, or one with the `columns` that remain at a row's end."""
        b, v = self.b, self.v
        mask = None if columns is None else v.lanes_below(columns, lanes=_WORDS.count)
        starts = [b.add(column, I64(i * _WORDS.count)) for i in range(blocks)]

        def load(t):
            first = b.shl(t, I64(1))
            places = [
                b.load(b.gep(self.values.offsets, [x])) for x in (first, b.add(first, I64(1)))
            ]
            for start in starts:
                both = (_load_words(v, self.values.words, b.add(at, start), mask) for at in places)
                yield from _paired(v, *both)

        vectors = [b.add(start, I64(i * v.lanes)) for start in starts for i in range(2)]
        self.add_rows(vectors, None, load, blocks * _WORDS.count)

    def add_single_tokens(self, count):
        """Add the tokens without a neighbour in their pair: an odd first one, and an even last one."""
        b, one = self.b, I64(1)
        last = b.sub(self.end, one)
        for t, alone in ((self.begin, b.and_(self.begin, one)), (last, b.and_(self.end, one))):
            with b.if_then(b.icmp_signed("!=", alone, I64(0))):
                self.add_token(t, count)

    def add_token(self, t, count):
        """Add one token's row."""
        b, v, outputs = self.b, self.v, self.outputs
        row_at = b.load(b.gep(self.values.offsets, [t]))
        # Shifted to the upper half of a lane, where an odd token's word already is.
        up = b.trunc(b.shl(b.and_(b.xor(t, I64(1)), I64(1)), I64(4)), I32)
        with steps(b, I64(0), count, 1) as (r, _):
            pair_at = b.add(b.add(self.p_at, b.mul(b.ashr(t, I64(1)), self.row_step)), r)
            bits = b.shl(b.bitcast(v.load_one(self.floats, pair_at), I32), up)
            weight = b.bitcast(b.and_(bits, I32(-0x10000)), v.float)
            weight = v.splat(weight)
            out_at = b.add(outputs.at, b.mul(r, outputs.step))
            whole = b.and_(self.values.dim, I64(-v.lanes))
            rest = b.sub(self.values.dim, whole)

            def add(d, mask=None):
                values = v.load("bf16", self.values.words, b.add(row_at, d), mask)
                to = b.add(out_at, d)
                v.store(v.fma(weight, values, v.load_floats(self.floats, to)), self.floats, to)

            with steps(b, I64(0), whole, v.lanes) as (d, _):
                add(d)
            with b.if_then(b.icmp_signed(">", rest, I64(0))):
                add(whole, v.lanes_below(rest))
