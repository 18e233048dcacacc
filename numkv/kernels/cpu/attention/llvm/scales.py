"""Scales of a tile's tokens, side by side in scratch memory.

INT8 has a scale for each row. INT4 has one for each group of 32 elements, in a word that also encodes the group's
minimum, which is the value of code 0.
"""

from __future__ import annotations

import functools

from llvmlite import ir

from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.arrays import RAMP
from numkv.kernels.cpu.vectors.emit import FLOAT, I16, I32, I64, emits, steps
from numkv.kernels.cpu.vectors.features import INT4_INTEGERS
from numkv.kernels.cpu.vectors.vectors import Vectors
from numkv.rows.int4 import LOWEST, OFFSETS


def scale_place(b, t, group, width=4):
    """Return where `gather_groups` puts the scale of a group of token t; `width` may be 2 for rows of one or two.

    Four groups of all tokens come first, token after token, then the next four::

        t0: g0 g1 g2 g3 | t1: g0 g1 g2 g3 | ... | t0: g4 g5 g6 g7 | ...
    """
    four = b.mul(b.ashr(group, I64(2)), I64(KV_TILE))
    return b.add(b.mul(b.add(four, t), I64(width)), b.and_(group, I64(3)))


def load_group(v, base, at, t, group, groups):
    """Return the scale and the minimum of a group of token t, as `gather_groups` writes them at `at`: two vectors."""
    b = v.b
    place = b.add(at, scale_place(b, t, group))
    fours = b.sdiv(b.add(groups, I64(3)), I64(4))
    minimum = b.add(place, b.mul(fours, I64(4 * KV_TILE)))
    scale, minimum = v.load_one(base, place), v.load_one(base, minimum)
    return v.splat(scale), v.splat(minimum)


def lie_apart(v, rows, row, step):
    """Return whether tokens' scales, at `rows`, the first at `row`, are not at even steps of `step`."""
    b, type_ = v.b, rows.type
    iota = ir.Constant(type_, [I64(i * step) for i in range(type_.count)])
    first = b.insert_element(ir.Constant(type_, ir.Undefined), row, I32(0))
    first = v.shuffle(first, first, [0] * type_.count)
    other = b.icmp_signed("!=", rows, b.add(first, iota))
    bits = ir.IntType(type_.count)
    return b.icmp_unsigned("!=", b.bitcast(other, bits), bits(0))


@functools.cache
def make_gather_scales(compute):
    """`gather_scales` for scratch memory of a float type."""

    @emits()
    def gather_scales(b, to, to_at, scales, offsets, count):
        """``to[to_at : to_at + count] = scales[offsets[:count]]``, from float32; `count` is in whole units."""
        v = Vectors(b, compute)
        some = RAMP  # tokens at once
        pieces = ir.VectorType(FLOAT, some)
        wide = ir.VectorType(v.float, some)

        def put(value, t):
            if v.double:
                value = b.fpext(value, wide if isinstance(value.type, ir.VectorType) else v.float)
            v.store(value, to, b.add(to_at, t))

        with steps(b, I64(0), count, some) as (t, _):
            first = b.gep(offsets, [t])
            rows = b.load(b.bitcast(first, ir.VectorType(I64, some).as_pointer()), align=8)
            row = b.load(first)
            with b.if_else(lie_apart(v, rows, row, 1), likely=False) as (of_apart, of_others):
                with of_apart, steps(b, t, b.add(t, I64(some)), 1) as (i, _):
                    put(b.load(b.gep(scales, [b.load(b.gep(offsets, [i]))])), i)
                with of_others:
                    pointer = b.bitcast(b.gep(scales, [row]), pieces.as_pointer())
                    put(b.load(pointer, align=4), t)

    return gather_scales


@functools.cache
def make_gather_groups(compute, by_group=False):
    """`gather_groups` for scratch memory of a float type; `by_group` for K rows that are multiplied as integers."""

    @emits()
    def gather_groups(b, to, to_at, scales, offsets, groups, count):
        """Gather the scales and the minima of a tile's `count` INT4 rows, `groups` of each token.

        In NumPy, of the words ``w = scales[offsets[:, None] + arange(groups)]``::

            scale = (w << 16).view(float32);  minimum = (LOWEST + (w % OFFSETS) / 2) * scale

        Scales go to ``to_at + scale_place(t, g)``. Minima are ``4 * KV_TILE`` floats further on for each four groups
        begun. Groups that a row lacks are zeros. Where INT4 is multiplied as integers, one or two groups are padded to
        two, not to four.

        With `by_group`, a group's scales are adjacent, at ``to_at + g * KV_TILE + t``.
        """
        gather = _Gather(b, compute, to, to_at, scales, offsets, groups, count)
        if compute == "float64" or not INT4_INTEGERS:
            gather.emit(4)
            return
        emit = gather.emit_by_group if by_group else gather.emit
        few = b.icmp_signed("<=", groups, I64(2))
        with b.if_else(few) as (of_few, of_others):
            with of_few:
                emit(2)
            with of_others:
                emit(4)

    return gather_groups


class _Gather:
    """Emits `gather_groups`, `width` groups of some tokens at a time."""

    def __init__(self, b, compute, data, to_at, source, offsets, groups, count):
        self.b, self.v = b, Vectors(b, compute)
        self.data, self.to_at, self.source, self.offsets = data, to_at, source, offsets
        self.groups, self.count = groups, count
        self.fours = b.sdiv(b.add(groups, I64(3)), I64(4))
        self.minimum_at = b.mul(self.fours, I64(4 * KV_TILE))

    def emit(self, width):
        """Token after token."""
        tokens = max(1, self.v.lanes // width)  # in a vector

        def put(words, j, t):
            self._put(words, j, t, width)

        self._emit(width, tokens, max(RAMP, tokens), put)

    def emit_by_group(self, width):
        """Group after group."""
        b, v = self.b, self.v

        def put(words, j, t):
            pairs = b.bitcast(words, ir.VectorType(I32, width // 2 * v.lanes))
            for i in range(width):
                # Two words in 32 bits.
                lanes = [*range(i // 2, pairs.type.count, width // 2)]
                bits = v.shuffle(pairs, pairs, lanes)
                if i % 2:
                    bits = b.and_(bits, v.splat_int(0xFFFF0000 - 2**32))
                else:
                    bits = b.shl(bits, v.splat_int(16))
                group = b.add(b.mul(j, I64(4)), I64(i))
                at = b.add(b.add(self.to_at, b.mul(group, I64(KV_TILE))), t)
                for value in self._values(bits):
                    v.store(value, self.data, at)
                    at = b.add(at, self.minimum_at)

        self._emit(width, v.lanes, v.lanes, put)

    def _emit(self, width, tokens, at_once, put):
        """Call ``put(words, fours, t)`` for the words of `tokens` tokens each, looking up `at_once` of them."""
        b, v = self.b, self.v
        words_type = ir.VectorType(I16, width * tokens)
        rows_type = ir.VectorType(I64, at_once)
        with (
            steps(b, I64(0), self.fours, 1) as (j, _),
            steps(b, I64(0), self.count, at_once) as (t, _),
        ):
            mask = v.lanes_below(b.sub(self.groups, b.mul(j, I64(4))), lanes=width)
            first_row = b.gep(self.offsets, [t])
            rows = b.load(b.bitcast(first_row, rows_type.as_pointer()), align=8)
            row = b.load(first_row)
            apart = lie_apart(v, rows, row, width)
            apart = b.or_(apart, b.icmp_signed("!=", self.groups, I64(width)))
            with b.if_else(apart, likely=False) as (of_apart, of_together):
                with of_apart, steps(b, I64(0), I64(at_once), tokens) as (i, _):
                    here = b.add(t, i)
                    put(self._gathered(here, tokens, j, mask, width), j, here)
                with of_together:
                    for i in range(0, at_once, tokens):
                        pointer = b.gep(self.source, [b.add(row, I64(i * width))])
                        pointer = b.bitcast(pointer, words_type.as_pointer())
                        put(b.load(pointer, align=2), j, b.add(t, I64(i)))

    def _gathered(self, t, tokens, j, mask, width):
        """Return the words of a vector of tokens, from t on, at any places."""
        b, v = self.b, self.v
        pieces = []
        for i in range(tokens):
            row = b.load(b.gep(self.offsets, [b.add(t, I64(i))]))
            pointer = b.gep(self.source, [b.add(row, b.mul(j, I64(4)))])
            pieces.append(v.masked_load(pointer, ir.VectorType(I16, width), 2, mask))
        while len(pieces) > 1:
            both = [*range(2 * pieces[0].type.count)]
            pieces = [v.shuffle(*pieces[i : i + 2], both) for i in range(0, len(pieces), 2)]
        return pieces[0]

    def _put(self, words, j, t, width):
        """Store the scales and minima of a vector of tokens' words."""
        b, v = self.b, self.v
        wide = ir.VectorType(I32, words.type.count)
        bits = b.shl(b.zext(words, wide), _splat(wide, 16))
        real = ir.VectorType(v.float, words.type.count)
        at = b.add(self.to_at, scale_place(b, t, b.mul(j, I64(4)), width))
        for value in self._values(bits):
            v.store(b.fpext(value, real) if v.double else value, self.data, at)
            at = b.add(at, self.minimum_at)

    def _values(self, bits):
        """Return scales and minima of words in the upper halves of 32 bits."""
        b, wide = self.b, bits.type
        floats = ir.VectorType(FLOAT, wide.count)
        scale = b.bitcast(bits, floats)
        # 64 plus half of the words' last bits, which have the places of 1/2, 1 and 2 in it.
        level = b.and_(bits, _splat(wide, (OFFSETS - 1) << 16))
        level = b.bitcast(b.or_(level, _splat(wide, 0x42800000)), floats)
        return scale, b.fmul(b.fadd(level, _splat(floats, LOWEST - 64)), scale)


def _splat(type_, value):
    return ir.Constant(type_, [ir.Constant(type_.element, value)] * type_.count)
