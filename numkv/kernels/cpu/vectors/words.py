"""Vectors of 16-bit integers and of bytes: codes, and their factors."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.vectors.emit import I8, I16, I32, I64
from numkv.kernels.cpu.vectors.features import ADD_BYTES, ADD_PAIRS, HAS_FOURS, LANES
from numkv.kernels.cpu.vectors.stored import (
    LOOKED_UP,
    in_words,
    level_pairs,
    level_words,
    loaded_words,
)
from numkv.kernels.cpu.vectors.vectors import Vectors

_LARGEST = 32639.0


class Words(Vectors):
    """Vectors of 16-bit integers, twice as many as floats."""

    def __init__(self, builder):
        super().__init__(builder, "float32")
        self.word_type = ir.VectorType(I16, 2 * self.lanes)
        self.bytes_type = ir.VectorType(I8, 4 * self.lanes)
        # Whether products of bytes are added by fours at once.
        self.has_fours = HAS_FOURS

    def splat_word(self, value):
        """A vector whose words are all a number."""
        return ir.Constant(self.word_type, [ir.Constant(I16, value)] * self.word_type.count)

    def opaque(self, vector):
        """The same vector, of which LLVM knows nothing: it stays in a register, and is not folded into loads."""
        signature = ir.FunctionType(vector.type, [vector.type])
        return self.b.call(ir.InlineAsm(signature, "", "=v,0"), [vector])

    def words(self, vector):
        """The same bits as 16-bit integers."""
        return self.b.bitcast(vector, self.word_type)

    def even_odd(self, codes, kind):
        """Widen a vector of INT8, or levels that `load_some` loaded: ``codes[0::2], codes[1::2]``, as words.

        A word has two codes::

            bytes   c0 c1 | c2 c3 | ...    ->   even  c0 | c2 | ...     odd  c1 | c3 | ...
        """
        if kind in LOOKED_UP:
            return level_words(self.b, kind, codes)
        words, eight = self.words(codes), self.splat_word(8)
        return [self.b.ashr(self.b.shl(words, eight), eight), self.b.ashr(words, eight)]

    def byte_pairs(self, *codes):
        """Widen ``2 * lanes`` codes of INT8 of two tokens: a lane has a column of both, as words.

        `columns_of_pairs` brings sums by lanes into the order of columns. With 256 bits::

            t0c0 t1c0 | t0c1 t1c1 | ...     columns  0 1 2 3 | 8 9 10 11   and   4 5 6 7 | 12 13 14 15
        """
        # Else LLVM puts bytes side by side first, and needs one shuffle more for each token.
        words = [self.opaque(self.b.sext(x, self.word_type)) for x in codes]
        return [self.b.bitcast(x, self.int_type) for x in self.interleave(*words)]

    def columns_of_pairs(self, low, high):
        """Two vectors in the order of `byte_pairs` in that of columns."""
        lanes = range(2 * self.lanes)
        order = [i % 4 + i // 8 * 4 + i // 4 % 2 * self.lanes for i in lanes]
        return [
            self.shuffle(low, high, order[start : start + self.lanes]) for start in (0, self.lanes)
        ]

    def load_level_pairs(self, base, places, count):
        """Load `count` levels of CODE4 of two tokens, at most ``2 * lanes``: those of even columns, and of odd ones.

        For 512 bits. A lane has a column of both tokens, as words::

            t0c0 t1c0 | t0c2 t1c2 | ...        t0c1 t1c1 | t0c3 t1c3 | ...

        `by_turns` brings sums by lanes into the order of columns.
        """
        count = in_words(self.b, "code4", count)
        first, second = (
            self.b.zext(self.load_bytes(base, at, count, self.lanes), self.int_type)
            for at in places
        )
        both = self.b.or_(first, self.b.shl(second, self.splat_int(16)))
        return level_pairs(self.b, both)

    def load_some(self, kind, base, at, count, most):
        """Load `count` elements of INT8, or packed ones for `levels_of`, at most `most`; none beyond is touched."""
        size = loaded_words(kind, most)
        all_of_them = lambda: self.load_packed(kind, base, at, most)  # noqa: E731
        needed = size * 3 // 4 if kind == "code6" else size
        return self.load_bytes(base, at, in_words(self.b, kind, count), size, (needed, all_of_them))

    def load_bytes(self, base, at, count, size, whole=None):
        """Load `count` bytes, a number that is not negative, into a vector of `size`; the others are 0.

        From `whole` bytes on, all that matter exist, and are loaded without a mask.
        """
        type_ = ir.VectorType(I8, size)
        iota = ir.Constant(type_, [ir.Constant(I8, i) for i in range(size)])
        some = self.b.select(self.b.icmp_signed("<", count, I64(size)), count, I64(size))
        first = self.b.insert_element(
            ir.Constant(type_, ir.Undefined), self.b.trunc(some, I8), I32(0)
        )
        mask = self.b.icmp_unsigned("<", iota, self.shuffle(first, first, [0] * size))
        pointer = self.pointer(base, at, I8)
        if LANES == 16:
            return self.masked_load(pointer, type_, 1, mask)
        # Without masks in hardware, byte by byte: only where a row ends.
        value = cgutils.alloca_once(self.b, type_)

        def load_all():
            return self.b.load(self.b.bitcast(pointer, type_.as_pointer()), align=1)

        needed, load = whole or (size, load_all)
        enough = self.b.icmp_signed(">=", count, I64(needed))
        with self.b.if_else(enough) as (of_whole, of_rest):
            with of_whole:
                self.b.store(load(), value)
            with of_rest:
                self.b.store(self.masked_load(pointer, type_, 1, mask), value)
        return self.b.load(value)

    def add_fours(self, total, codes, weights):
        """``total + codes * weights`` of bytes, without a sign and with one; four neighbouring products are added.

        Where there are `DOT_PRODUCTS`.
        """
        return self.add_products("busd", total, codes, weights)

    def repeated_weights(self, base, at, further):
        """The four bytes, or two words, in the place of a float, at ``at + further``, in all lanes."""
        if not self.has_fours:
            return self.splat(self.load_one(base, self.b.add(at, I64(further))))
        # The instruction adds up the address, which LLVM would do beforehand.
        pointer = self.pointer(base, at, self.float)
        text = f"vpbroadcastd {4 * further}($1), $0"
        signature = ir.FunctionType(self.int_type, [pointer.type])
        return self.b.call(
            ir.InlineAsm(signature, text, "=v,r,~{memory}", side_effect=True), [pointer]
        )

    def add_fours_of(self, total, codes, base, at, further):
        """`add_fours` with `repeated_weights`, for weights that are used once: one instruction does both."""
        pointer = self.pointer(base, at, self.float)
        codes = self.b.bitcast(codes, total.type)
        text = f"vpdpbusd {4 * further}($2){{1to16}}, $1, $0"
        signature = ir.FunctionType(total.type, [total.type, pointer.type, total.type])
        add = ir.InlineAsm(signature, text, "=v,v,r,0,~{memory}", side_effect=True)
        return self.b.call(add, [codes, pointer, total])

    def add_twos(self, total, codes, weights):
        """The same in 16 bits, two neighbouring products added: products of nibbles may be added eight times."""
        codes, weights = (self.b.bitcast(x, self.bytes_type) for x in (codes, weights))
        signature = ir.FunctionType(self.word_type, [self.bytes_type] * 2)
        function = cgutils.get_or_insert_function(self.b.module, signature, ADD_BYTES[self.lanes])
        return self.b.add(total, self.b.call(function, [codes, weights]))

    def interleave(self, a, b):
        """Elements of two vectors by turns, within each 128 bits: of their lower halves, and of their upper ones.

        With elements of 32 bits::

            a0 a1 a2 a3 | a4 ...        a0 b0 a1 b1 | a4 b4 ...
            b0 b1 b2 b3 | b4 ...   ->   a2 b2 a3 b3 | a6 b6 ...
        """
        count = a.type.count
        each = 16 * count // (4 * self.lanes)
        found = []
        for half in (range(each // 2), range(each // 2, each)):
            lanes = [x for start in range(0, count, each) for i in half
                     for x in (start + i, count + start + i)]  # fmt: skip
            found.append(self.shuffle(a, b, lanes))
        return found

    def packed(self, a, b):
        """Integers of two vectors in half of their bits, by turns of 128 bits: `interleave` with zeros undoes it.

        32 bits become words with a sign, words become bytes without one. Numbers out of range become the nearest.
        """
        wide, count = a.type.element.width, a.type.count
        if self.lanes in ADD_PAIRS:  # such CPUs have these, too
            cpu, of = {16: ("avx512", ".512"), 8: ("avx2", ""), 4: ("sse2", ".128")}[self.lanes]
            narrow = self.word_type if wide == 32 else self.bytes_type
            name = f"llvm.x86.{cpu}.{'packssdw' if wide == 32 else 'packuswb'}{of}"
            signature = ir.FunctionType(narrow, [a.type] * 2)
            function = cgutils.get_or_insert_function(self.b.module, signature, name)
            return self.b.call(function, [a, b])
        low, high = (
            ir.Constant(a.type, [i] * count)
            for i in ((-0x8000, 0x7FFF) if wide == 32 else (0, 255))
        )
        parts = []
        for x in (a, b):
            x = self.b.select(self.b.icmp_signed("<", x, low), low, x)
            x = self.b.select(self.b.icmp_signed(">", x, high), high, x)
            parts.append(self.b.trunc(x, ir.VectorType(ir.IntType(wide // 2), count)))
        each = 128 // wide
        places = [(piece, count + piece) for piece in range(0, count, each)]
        return self.shuffle(
            *parts, [start + i for both in places for start in both for i in range(each)]
        )

    def in_order(self, parts):
        """Four vectors, each with every fourth piece of 128 bits, as four with the pieces in order.

        With 512 bits, by numbers of pieces::

            0 4 8 12        0  1  2  3
            1 5 9 13   ->   4  5  6  7
            2 6 ..          8  9  10 11
            3 7 ..          12 13 14 15
        """
        pieces = self.lanes // 4

        def piece(*numbers):
            return [4 * number + i for number in numbers for i in range(4)]

        if pieces == 1:
            return parts
        if pieces == 2:
            pairs = [(j, i) for j in range(2) for i in (0, 2)]
            return [self.shuffle(parts[i], parts[i + 1], piece(j, 2 + j)) for j, i in pairs]
        found = []
        for j in (0, 2):
            halves = [
                self.shuffle(parts[i], parts[i + 1], piece(j, 4 + j, j + 1, 5 + j)) for i in (0, 2)
            ]
            found += [
                self.shuffle(*halves, piece(0, 1, 4, 5)),
                self.shuffle(*halves, piece(2, 3, 6, 7)),
            ]
        return found

    def larger_size(self, x, peak):
        """The larger magnitude, lane by lane, as bits, which are in the order of magnitudes and end with NaN's."""
        bits = self.b.and_(self.b.bitcast(x, self.int_type), self.splat_int(0x7FFFFFFF))
        return self.larger_int(bits, peak)

    def larger_int(self, a, b):
        """Lane by lane the larger integer."""
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def quantiser(self, peak):
        """What makes integers of weights whose magnitudes are up to `peak`, and what undoes it, lane by lane.

        `peak` is what `larger_size` found; both are NaN where a weight is not finite.
        """
        finite = self.b.icmp_signed("<", peak, self.splat_int(0x7F800000))
        # Far below that a factor would overflow.
        least = self.splat_int(int(np.float32(1e-33).view(np.int32)))
        peak = self.b.bitcast(self.larger_int(peak, least), self.type)
        peak = self.b.select(finite, peak, self.splat(math.nan))
        factor = self.b.fdiv(self.splat(_LARGEST), peak)
        return factor, self.b.fmul(peak, self.splat(1 / _LARGEST))

    def pairs(self, low, high):
        """Pack the low 16 bits of integers into 32-bit lanes."""
        return self.b.or_(
            self.b.and_(low, self.splat_int(0xFFFF)), self.b.shl(high, self.splat_int(16))
        )

    def nearest(self, x):
        """The nearest integers of floats whose magnitude is below 2**22, in the low bits of 32-bit lanes."""
        shifted = self.b.fadd(x, self.splat(12582912.0))  # 1.5 * 2**23
        return self.b.bitcast(shifted, self.int_type)

    def bytes_of(self, weights, factor):
        """Four vectors of weights, times a factor, as integers: two vectors of bytes with signs, low and high ones.

        The integer is ``low + 256 * high``. In each 32 bits the bytes are of vectors 0, 2, 1 and 3.
        """
        # Adding 128 makes the high bytes right, and flips the sign bits of the low ones.
        magic = self.splat(12582912.0 + 128)
        a, b, c, d = (self.b.bitcast(self.fma(x, factor, magic), self.int_type) for x in weights)
        first, last = self.pairs(a, b), self.pairs(c, d)
        even, odd, eight = (self.splat_int(x) for x in (0x00FF00FF, 0xFF00FF00 - 2**32, 8))
        low = self.b.or_(self.b.and_(first, even), self.b.and_(self.b.shl(last, eight), odd))
        high = self.b.or_(self.b.and_(self.b.lshr(first, eight), even), self.b.and_(last, odd))
        return self.b.xor(low, self.splat_int(0x80808080 - 2**32)), high

    def pairs_of(self, weights, factor):
        """Four vectors of weights, times a factor, as integers of 16 bits: of the first two, and of the last two."""
        magic = self.splat(12582912.0)
        a, b, c, d = (self.b.bitcast(self.fma(x, factor, magic), self.int_type) for x in weights)
        return self.pairs(a, b), self.pairs(c, d)

    def mixed_pairs(self, parts):
        """Bytes of the halves of a vector side by side, as words: as many vectors as it takes."""
        size, each = parts.type.count // 2, self.lanes
        mixed = []
        for start in range(0, size, each):
            lanes = [x for i in range(start, start + each) for x in (i, size + i)]
            words = self.b.zext(self.shuffle(parts, parts, lanes), self.word_type)
            # Else LLVM takes nibbles apart before they are widened, and widens both.
            mixed.append(self.opaque(words))
        return mixed

    def mixed_fours(self, parts):
        """Interleave the bytes of a vector's quarters, in the order of `bytes_of`."""
        size = parts.type.count // 4
        return self.shuffle(parts, parts, [size * i + j for j in range(size) for i in (0, 2, 1, 3)])
