"""Vector code for rows of packed codes, each of which stands for one of a few levels; see `numkv.rows.codes`.

`score_code_tile` and `weigh_code_tile` are to compressed heads what `score_tile` and `weigh_tile` of `simd` are to
storage kinds.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.cpu.simd import (
    ACCUMULATORS,
    FEATURES,
    I8,
    I32,
    I64,
    LANES,
    Vectors,
    data_of,
    literals,
    steps,
)

__all__ = ["CODE_LANES", "score_code_tile", "weigh_code_tile"]

#: Values of packed codes in a vector: at least eight, so that every vector of codes starts at a whole byte.
CODE_LANES = max(8, LANES)
# Instructions that pick lanes by number: codes of up to `_PERMUTED_BITS` bits are looked up in registers by them.
_PERMUTE = (
    {16: "llvm.x86.avx512.permvar.sf.512", 8: "llvm.x86.avx2.permps"} if "avx2" in FEATURES else {}
)
_PERMUTED_BITS = 8


class _CodeVectors(Vectors):
    """Vectors of the values of packed codes, which lie as `numkv.rows.codes` says.

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
        """The values of the whole vector of codes at byte `at`."""
        type_ = ir.VectorType(I8, self.bytes)
        pointer = self.b.bitcast(self._pointer(base, at, I8), type_.as_pointer())
        return self._look_up(self._codes_of(self.b.load(pointer, align=1)))

    def load_last_values(self, base, at, end):
        """The values of the codes from byte `at` to the row's end, short of a vector; the others are any levels."""
        codes = ir.Constant(ir.VectorType(I8, self.bytes), ir.Undefined)
        last = self.b.sub(end, I64(1))
        for i in range(self.bytes):
            byte = self.b.add(at, I64(i))
            byte = self.b.select(self.b.icmp_signed("<", byte, last), byte, last)
            codes = self.b.insert_element(codes, self.b.load(self._pointer(base, byte, I8)), I32(i))
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
                value = self.b.load(self._pointer(self.levels, code, self.float))
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


@intrinsic(prefer_literal=True)
def score_code_tile(
    typing_context, BITS, ROWS, q, q_at, q_step, codes, codes_at, row_bytes, count, dim, levels, s, s_at, s_step,
):  # fmt: skip
    """Scores of `ROWS` query rows against `count` rows of codes: ``s[r, t] = sum over d of q[r, d] * level(t, d)``.

    Query row r starts at ``q_at + r * q_step`` and is padded with zeros to whole vectors of `CODE_LANES`; the codes of
    row t start at byte ``codes_at + t * row_bytes``. Up to `TILE` scores are written for each query row, whatever
    `count` is.
    """
    if not literals(BITS, ROWS):
        return None
    bits, rows = BITS.literal_value, ROWS.literal_value
    i8 = types.int64
    signature = types.void(
        BITS, ROWS, q, i8, i8, codes, i8, i8, i8, i8, levels, s, i8, i8
    )  # fmt: skip

    def codegen(context, b, sig, args):
        q_at, q_step, codes_at, row_bytes, count, dim, s_at, s_step = (
            args[i] for i in (3, 4, 6, 7, 8, 9, 12, 13)
        )
        q_data, codes_data, levels_data, s_data = (
            data_of(context, b, sig.args[i], args[i]) for i in (2, 5, 10, 11)
        )
        v = _CodeVectors(b, bits, levels_data)
        tokens = max(1, v.lanes // rows)
        sums = [cgutils.alloca_once(b, v.type) for _ in range(rows)]
        # Of a group of tokens, by row: added up across lanes all at once.
        kept = cgutils.alloca_once(b, v.type, size=I64(rows * tokens))
        whole = b.and_(dim, I64(-v.lanes))
        last = b.sub(count, I64(1))

        def add_column(d, values):
            for r in range(rows):
                q_row = v.load_floats(q_data, b.add(b.add(q_at, b.mul(I64(r), q_step)), d))
                b.store(v.fma(q_row, values, b.load(sums[r])), sums[r])

        with steps(b, I64(0), count, tokens) as (t0, _):
            # One token after another, not side by side: the CPU overlaps them by itself.
            with steps(b, I64(0), I64(tokens), 1) as (t, _):
                row = b.add(t0, t)
                row = b.select(b.icmp_signed("<", row, last), row, last)  # past it, the last again
                begin = b.add(codes_at, b.mul(row, row_bytes))
                end = b.add(begin, row_bytes)
                for slot in sums:
                    b.store(v.splat(0.0), slot)
                with steps(b, I64(0), whole, v.lanes) as (d, _):
                    byte = b.mul(b.sdiv(d, I64(v.lanes)), I64(v.bytes))
                    add_column(d, v.load_values(codes_data, b.add(begin, byte)))
                with b.if_then(b.icmp_signed("<", whole, dim)):
                    byte = b.mul(b.sdiv(whole, I64(v.lanes)), I64(v.bytes))
                    add_column(whole, v.load_last_values(codes_data, b.add(begin, byte), end))
                for r in range(rows):
                    b.store(b.load(sums[r]), b.gep(kept, [b.add(I64(r * tokens), t)]))
            flat = [b.load(b.gep(kept, [I64(i)])) for i in range(rows * tokens)]
            for start in range(0, len(flat), v.lanes):
                (scores,) = v.sums_by_row(flat[start : start + v.lanes], 1)
                for first in range(start, start + v.lanes, tokens):
                    lanes = [*range(first - start, first - start + tokens)]
                    at = b.add(b.add(s_at, b.mul(I64(first // tokens), s_step)), t0)
                    v.store(v.shuffle(scores, scores, lanes), s_data, at)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def weigh_code_tile(
    typing_context, BITS, ROWS, p, p_at, p_step, codes, codes_at, row_bytes, count, dim, levels, o, o_at, o_step,
    rescale, rescale_at,
):  # fmt: skip
    """Add weighted rows of codes: ``o[r, d] = rescale[r] * o[r, d] + sum over t < count of p[r, t] * level(t, d)``.

    The codes of row t start at byte ``codes_at + t * row_bytes``. Output rows are padded to whole vectors of
    `CODE_LANES`; columns past `dim` get what does not matter, but is finite where the weights and levels are.
    """
    if not literals(BITS, ROWS):
        return None
    bits, rows = BITS.literal_value, ROWS.literal_value
    i8 = types.int64
    signature = types.void(
        BITS, ROWS, p, i8, i8, codes, i8, i8, i8, i8, levels, o, i8, i8, rescale, i8
    )  # fmt: skip

    def codegen(context, b, sig, args):
        p_at, p_step, codes_at, row_bytes, count, dim = (args[i] for i in (3, 4, 6, 7, 8, 9))
        o_at, o_step, rescale_at = (args[i] for i in (12, 13, 15))
        p_data, codes_data, levels_data, o_data, rescale_data = (
            data_of(context, b, sig.args[i], args[i]) for i in (2, 5, 10, 11, 14)
        )
        v = _CodeVectors(b, bits, levels_data)
        factors = [
            v.splat(v.load_one(rescale_data, b.add(rescale_at, I64(r)))) for r in range(rows)
        ]

        def add_rows(column, vectors, values_of):
            """One pass over the tokens for `vectors` vectors of columns, kept in registers."""
            sums = [[cgutils.alloca_once(b, v.type) for _ in range(vectors)] for _ in range(rows)]
            places = [
                [
                    b.add(b.add(b.add(o_at, b.mul(I64(r), o_step)), column), I64(i * v.lanes))
                    for i in range(vectors)
                ]
                for r in range(rows)
            ]
            for r in range(rows):
                for i in range(vectors):
                    before = v.load_floats(o_data, places[r][i])
                    b.store(b.fmul(before, factors[r]), sums[r][i])
            first = b.mul(b.sdiv(column, I64(v.lanes)), I64(v.bytes))
            with steps(b, I64(0), count, 1) as (t, _):
                row = b.add(codes_at, b.mul(t, row_bytes))
                weights = [
                    v.splat(v.load_one(p_data, b.add(b.add(p_at, b.mul(I64(r), p_step)), t)))
                    for r in range(rows)
                ]
                for i in range(vectors):
                    values = values_of(row, b.add(b.add(row, first), I64(i * v.bytes)))
                    for r in range(rows):
                        b.store(v.fma(weights[r], values, b.load(sums[r][i])), sums[r][i])
            for r in range(rows):
                for i in range(vectors):
                    v.store(b.load(sums[r][i]), o_data, places[r][i])

        def whole_vectors(row, at):
            return v.load_values(codes_data, at)

        vectors = min(4, max(1, ACCUMULATORS // rows))
        wide = I64(vectors * v.lanes)
        in_wide = b.mul(b.sdiv(dim, wide), wide)
        whole = b.and_(dim, I64(-v.lanes))
        with steps(b, I64(0), in_wide, vectors * v.lanes) as (column, _):
            add_rows(column, vectors, whole_vectors)
        with steps(b, in_wide, whole, v.lanes) as (column, _):
            add_rows(column, 1, whole_vectors)
        with b.if_then(b.icmp_signed("<", whole, dim)):
            add_rows(
                whole, 1, lambda row, at: v.load_last_values(codes_data, at, b.add(row, row_bytes))
            )
        return context.get_dummy_value()

    return signature, codegen
