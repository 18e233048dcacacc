"""Vector code for rows of packed codes, each of which stands for one of a few levels; see `numkv.rows.codes`.

Their scores and their weighted sums are to compressed heads what `qk_tile` and `accumulate_pv` are to storage kinds.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.vectors.emit import I8, I32, I64, emits, steps
from numkv.kernels.cpu.vectors.features import ACCUMULATORS, FEATURES, LANES
from numkv.kernels.cpu.vectors.vectors import Vectors

#: Values of packed codes in a vector: at least eight, so that every vector of codes starts at a whole byte.
CODE_LANES = max(8, LANES)
# Instructions that pick lanes by number: codes of up to `_PERMUTED_BITS` bits are looked up in registers by them.
_PERMUTE = (
    {16: "llvm.x86.avx512.permvar.sf.512", 8: "llvm.x86.avx2.permps"} if "avx2" in FEATURES else {}
)
_PERMUTED_BITS = 8


class CodeRows(NamedTuple):
    """Rows of packed codes, which lie one after another."""

    words: Any
    #: Where the first row starts, and bytes of a row.
    at: int
    row_bytes: int
    #: How many rows there are, and elements of a row.
    count: int
    dim: int
    #: The ``2 ** bits`` values of codes.
    levels: Any


class _CodeVectors(Vectors):
    """Vectors of the values of codes that `numkv.rows.codes` has packed.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    bits : int
        Bits of a code.
    levels : llvmlite.ir.Value
        Address of the ``2 ** bits`` float32 values.
    """

    def __init__(self, builder, bits, levels):
        super().__init__(builder, "float32")
        self.lanes, self.bits, self.levels = CODE_LANES, bits, levels
        self.type = ir.VectorType(self.float, self.lanes)
        self.int_type = ir.VectorType(self.int, self.lanes)
        self.bytes = self.lanes * bits // 8  # that a vector's codes take
        self.in_registers = bits <= _PERMUTED_BITS and self.lanes in _PERMUTE
        if self.in_registers:
            mask = self.lanes_below(I64(1 << bits)) if 1 << bits < self.lanes else None
            starts = range(0, 1 << bits, self.lanes)
            self.tables = [self.load("fp32", levels, I64(i), mask) for i in starts]

    def load_values(self, base, at):
        """Return the values of the whole vector of codes at byte `at`."""
        type_ = ir.VectorType(I8, self.bytes)
        pointer = self.b.bitcast(self.pointer(base, at, I8), type_.as_pointer())
        return self._look_up(self._codes_of(self.b.load(pointer, align=1)))

    def load_last_values(self, base, at, end):
        """The values of the codes from byte `at` to the row's end, short of a vector; the others are any levels."""
        codes = ir.Constant(ir.VectorType(I8, self.bytes), ir.Undefined)
        last = self.b.sub(end, I64(1))
        for i in range(self.bytes):
            byte = self.b.add(at, I64(i))
            byte = self.b.select(self.b.icmp_signed("<", byte, last), byte, last)
            codes = self.b.insert_element(codes, self.b.load(self.pointer(base, byte, I8)), I32(i))
        return self._look_up(self._codes_of(codes))

    def _codes_of(self, packed):
        """Codes from the bytes they are packed in: each lane takes the bytes that it needs and shifts its code down."""
        zeros = ir.Constant(packed.type, None)
        picked, shifts = [], []
        for i in range(self.lanes):
            first, shift = divmod(i * self.bits, 8)
            need = (shift + self.bits + 7) // 8
            picked += [first + n if n < need else self.bytes for n in range(4)]
            shifts.append(ir.Constant(I32, shift))
        words = self.b.bitcast(self.shuffle(packed, zeros, picked), self.int_type)
        words = self.b.lshr(words, ir.Constant(self.int_type, shifts))
        return self.b.and_(words, self.splat_int((1 << self.bits) - 1))

    def _look_up(self, codes):
        if not self.in_registers:
            values = ir.Constant(self.type, ir.Undefined)
            for i in range(self.lanes):
                code = self.b.zext(self.b.extract_element(codes, I32(i)), I64)
                value = self.b.load(self.pointer(self.levels, code, self.float))
                values = self.b.insert_element(values, value, I32(i))
            return values
        signature = ir.FunctionType(self.type, [self.type, self.int_type])
        permute = cgutils.get_or_insert_function(self.b.module, signature, _PERMUTE[self.lanes])
        # The lowest bits of a code name a lane, the others one of the registers.
        found = [self.b.call(permute, [table, codes]) for table in self.tables]
        bit = self.lanes
        while len(found) > 1:
            odd = self.b.icmp_signed(
                "!=", self.b.and_(codes, self.splat_int(bit)), self.splat_int(0)
            )
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [self.b.select(odd, high, low) for low, high in pairs]
            bit *= 2
        return found[0]


@functools.cache
def make_qk_codes(bits, rows):
    """`qk_codes` for `rows` query rows and codes of `bits` bits."""

    @emits()
    def qk_codes(b, q, q_at, q_step, keys, s, s_at, s_step):
        """Scores of query rows against rows of codes: ``s[r, t] = sum over d of q[r, d] * levels[codes[t, d]]``.

        Query row r starts at ``q_at + r * q_step`` and is padded with zeros to whole vectors of `CODE_LANES`. Up to
        `TILE_UNIT` scores are written for each query row, however many rows of codes there are.
        """
        _CodeScores(b, (bits, rows), q, q_at, q_step, keys, s, s_at, s_step).emit()

    return qk_codes


class _CodeScores:
    """Emits `qk_codes`."""

    def __init__(self, b, form, q, q_at, q_step, keys, s, s_at, s_step):
        bits, self.rows = form
        self.b, self.v = b, _CodeVectors(b, bits, keys.levels)
        self.q, self.q_at, self.q_step, self.keys = q, q_at, q_step, keys
        self.s, self.s_at, self.s_step = s, s_at, s_step
        self.tokens = max(1, self.v.lanes // self.rows)
        self.sums = [cgutils.alloca_once(b, self.v.type) for _ in range(self.rows)]
        # Of a group of tokens, by row: added up across lanes all at once.
        self.kept = cgutils.alloca_once(b, self.v.type, size=I64(self.rows * self.tokens))

    def emit(self):
        """Emit the code."""
        b, v, keys, tokens = self.b, self.v, self.keys, self.tokens
        whole = b.and_(keys.dim, I64(-v.lanes))
        last = b.sub(keys.count, I64(1))
        with steps(b, I64(0), keys.count, tokens) as (t0, _):
            # One token after another, not interleaved: the CPU overlaps them by itself.
            with steps(b, I64(0), I64(tokens), 1) as (t, _):
                row = b.add(t0, t)
                row = b.select(b.icmp_signed("<", row, last), row, last)  # past it, the last again
                self.add_row(row, whole)
                for r in range(self.rows):
                    place = b.gep(self.kept, [b.add(I64(r * tokens), t)])
                    b.store(b.load(self.sums[r]), place)
            self.put_scores(t0)

    def add_row(self, row, whole):
        """Add the products of a row of codes up, in the lanes of a vector for each query row."""
        b, v, keys = self.b, self.v, self.keys
        begin = b.add(keys.at, b.mul(row, keys.row_bytes))
        end = b.add(begin, keys.row_bytes)
        for slot in self.sums:
            b.store(v.splat(0.0), slot)
        with steps(b, I64(0), whole, v.lanes) as (d, _):
            byte = b.mul(b.sdiv(d, I64(v.lanes)), I64(v.bytes))
            self.add_column(d, v.load_values(keys.words, b.add(begin, byte)))
        with b.if_then(b.icmp_signed("<", whole, keys.dim)):
            byte = b.mul(b.sdiv(whole, I64(v.lanes)), I64(v.bytes))
            self.add_column(whole, v.load_last_values(keys.words, b.add(begin, byte), end))

    def add_column(self, d, values):
        """Add the products of a vector of values."""
        b, v = self.b, self.v
        for r in range(self.rows):
            at = b.add(b.add(self.q_at, b.mul(I64(r), self.q_step)), d)
            q_row = v.load_floats(self.q, at)
            b.store(v.fma(q_row, values, b.load(self.sums[r])), self.sums[r])

    def put_scores(self, t0):
        """Add up the lanes of the sums, and write the scores of a group of tokens."""
        b, v, tokens = self.b, self.v, self.tokens
        flat = [b.load(b.gep(self.kept, [I64(i)])) for i in range(self.rows * tokens)]
        for start in range(0, len(flat), v.lanes):
            (scores,) = v.sums_by_row(flat[start : start + v.lanes], 1)
            for first in range(start, start + v.lanes, tokens):
                lanes = [*range(first - start, first - start + tokens)]
                at = b.add(b.add(self.s_at, b.mul(I64(first // tokens), self.s_step)), t0)
                v.store(v.shuffle(scores, scores, lanes), self.s, at)


@functools.cache
def make_accumulate_codes(bits, rows):
    """`accumulate_codes` for `rows` query rows and codes of `bits` bits."""

    @emits()
    def accumulate_codes(b, p, p_at, p_step, values, o, o_at, o_step, rescale, rescale_at):
        """Add weighted rows of codes: ``o[r] = rescale[r] * o[r] + sum over t of p[r, t] * levels[codes[t]]``.

        p[r, t] is at ``p_at + r * p_step + t``, output row r at ``o_at + r * o_step``. Output rows are padded to whole
        vectors of `CODE_LANES`. Columns past the head dim are undefined, but finite if weights and levels are.
        """
        _CodeSums(
            b, (bits, rows), p, p_at, p_step, values, o, o_at, o_step, rescale, rescale_at
        ).emit()

    return accumulate_codes


class _CodeSums:
    """Emits `accumulate_codes`."""

    def __init__(self, b, form, p, p_at, p_step, values, o, o_at, o_step, rescale, rescale_at):
        bits, self.rows = form
        self.b, self.v = b, _CodeVectors(b, bits, values.levels)
        self.p, self.p_at, self.p_step, self.values = p, p_at, p_step, values
        self.o, self.o_at, self.o_step = o, o_at, o_step
        v = self.v
        self.factors = [
            v.splat(v.load_one(rescale, b.add(rescale_at, I64(r)))) for r in range(self.rows)
        ]

    def emit(self):
        """Emit the code: several vectors of columns at a time, then one, then the rest."""
        b, v, values = self.b, self.v, self.values

        def whole_vectors(row, at):
            return v.load_values(values.words, at)

        def last_vector(row, at):
            return v.load_last_values(values.words, at, b.add(row, values.row_bytes))

        vectors = min(4, max(1, ACCUMULATORS // self.rows))
        wide = I64(vectors * v.lanes)
        in_wide = b.mul(b.sdiv(values.dim, wide), wide)
        whole = b.and_(values.dim, I64(-v.lanes))
        with steps(b, I64(0), in_wide, vectors * v.lanes) as (column, _):
            self.add_rows(column, vectors, whole_vectors)
        with steps(b, in_wide, whole, v.lanes) as (column, _):
            self.add_rows(column, 1, whole_vectors)
        with b.if_then(b.icmp_signed("<", whole, values.dim)):
            self.add_rows(whole, 1, last_vector)

    def add_rows(self, column, vectors, values_of):
        """One pass over the tokens for `vectors` vectors of columns, kept in registers."""
        b, v, rows = self.b, self.v, range(self.rows)
        sums = [[cgutils.alloca_once(b, v.type) for _ in range(vectors)] for _ in rows]
        places = [
            [
                b.add(b.add(b.add(self.o_at, b.mul(I64(r), self.o_step)), column), I64(i * v.lanes))
                for i in range(vectors)
            ]
            for r in rows
        ]
        for r in rows:
            for i in range(vectors):
                before = v.load_floats(self.o, places[r][i])
                b.store(b.fmul(before, self.factors[r]), sums[r][i])
        first = b.mul(b.sdiv(column, I64(v.lanes)), I64(v.bytes))
        with steps(b, I64(0), self.values.count, 1) as (t, _):
            row = b.add(self.values.at, b.mul(t, self.values.row_bytes))
            weights = []
            for r in rows:
                at = b.add(b.add(self.p_at, b.mul(I64(r), self.p_step)), t)
                weights.append(v.splat(v.load_one(self.p, at)))
            for i in range(vectors):
                found = values_of(row, b.add(b.add(row, first), I64(i * v.bytes)))
                for r in rows:
                    b.store(v.fma(weights[r], found, b.load(sums[r][i])), sums[r][i])
        for r in rows:
            for i in range(vectors):
                v.store(b.load(sums[r][i]), self.o, places[r][i])
