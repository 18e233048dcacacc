"""Weighted sums of V rows on Intel's matrix unit: V rows packed, their products, output rows as columns and back."""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.llvm.amx_qk import ELEMENTS, PRODUCT
from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.amx import AMX_TILE, Amx, AmxWords
from numkv.kernels.cpu.vectors.emit import I8, I32, I64, as_bytes, emits, steps
from numkv.kernels.cpu.vectors.features import AMX_ROWS
from numkv.kernels.cpu.vectors.prefetch import prefetch_column
from numkv.kernels.cpu.vectors.stored import ON_LINE

#: Columns of V that are packed and summed together: four AMX tiles.
SEGMENT = 64
# Tiles of weights of one part: 64 tokens take two rows of bf16, or one of INT8.
_HALVES = {"bf16": 2, "int8": 1}


@functools.cache
def make_all_finite(kind):
    """`all_finite` for a storage kind of V."""

    @emits(types.boolean)
    def all_finite(b, values, begin, end):
        """``isfinite(v[begin:end]).all()`` of a tile's V rows; codes are always finite."""
        if kind == "int8":
            return cgutils.true_bit
        v = AmxWords(b)
        largest = cgutils.alloca_once_value(b, v.splat_int(0))
        rows = as_bytes(b, values.words)
        row_bytes = b.mul(values.dim, I64(2))
        with steps(b, begin, end, 1) as (t, _):
            at = b.mul(b.load(b.gep(values.offsets, [t])), I64(2))
            with steps(b, I64(0), row_bytes, 64) as (i, _):
                line = v.load_bytes(rows, b.add(at, i), b.sub(row_bytes, i), 64)
                words = v.words(line)
                # Without their signs: the exponent is what counts.
                wide = b.bitcast(b.shl(words, v.splat_word(1)), v.int_type)
                for half in (b.and_(wide, v.splat_int(0xFFFF)), b.lshr(wide, v.splat_int(16))):
                    b.store(v.larger_int(half, b.load(largest)), largest)
        return b.icmp_signed("<", v.fold(b.load(largest), v.larger_int), I32(0xFF00))

    return all_finite


@functools.cache
def make_amx_pack_values(kind, next_kind):
    """`amx_pack_values` for a storage kind of V; `next_kind` is that of the rows that are prefetched."""

    @emits()
    def amx_pack_values(b, f, to_at, values, begin, end, column, next_rows):
        """Pack 64 columns of a tile's V rows as the unit takes them, from `column` on, in ``f[to_at:]``.

        In NumPy, of bf16: ``v[:, column : column + 64].reshape(2, 16, 2, 4, 16).transpose(0, 3, 4, 1, 2)``, for either
        half of the tokens four tiles of 16 columns and 16 pairs of tokens. Rows outside ``[begin, end)`` and columns
        past the head dim become zeros. 2,048 floats are written, of INT8 1,024. While V rows are read, the same rows of
        `next_rows` (K rows of a later tile) are prefetched.

        Rows of two tokens (of INT8 four) are interleaved first, which makes pairs (fours) in lanes of 32 bits; then
        squares of 16 lanes are transposed::

            t0: c0 c1 c2 ...         t0c0 t1c0 | t0c1 t1c1 | ...  turn 0         t0c0 t1c0 | t2c0 t3c0 | ...
            t1: c0 c1 c2 ...   ->    t2c0 t3c0 | t2c1 t3c1 | ...  turn 1   ->    t0c1 t1c1 | t2c1 t3c1 | ...
        """
        _Packing(b, (kind, next_kind), f, to_at, values, begin, end, column, next_rows).emit()

    return amx_pack_values


class _Packing:
    """Emits `amx_pack_values`."""

    def __init__(self, b, kinds, data, to_at, values, begin, end, column, next_rows):
        self.kind, self.next_kind = kinds
        self.b, self.v, self.data, self.to_at = b, AmxWords(b), data, to_at
        self.values, self.begin, self.end, self.column = values, begin, end, column
        self.next_rows = next_rows
        self.size = 2 if self.kind == "bf16" else 1
        self.each = 4 // self.size  # tokens that share a lane
        self.bytes_type = ir.VectorType(I8, 64)
        self.row_bytes = b.mul(values.dim, I64(self.size))
        self.rows = as_bytes(b, values.words)

    def emit(self):
        """The code: a quick way where all tokens and columns are there, and a general one."""
        b, v = self.b, self.v
        whole = b.icmp_signed("<=", b.add(self.column, I64(SEGMENT)), self.values.dim)
        full = b.and_(
            b.icmp_signed("==", self.begin, I64(0)), b.icmp_signed("==", self.end, I64(KV_TILE))
        )
        with b.if_else(b.and_(full, whole)) as (all_of_it, some):
            with all_of_it:
                self.pack(False)
            with some:
                self.pack(True)
        # So far, rows are of tokens, and lanes of columns.
        with steps(b, I64(0), I64(4 * _HALVES[self.kind] * AMX_TILE), AMX_TILE) as (tile, _):
            at = [b.add(b.add(self.to_at, tile), I64(16 * i)) for i in range(16)]
            lanes = [v.load_lanes(self.data, x) for x in at]
            for x, row in zip(at, v.transposed(lanes), strict=True):
                v.store_lanes(row, self.data, x)

    def pack(self, partly):
        """Interleave the rows of two or four tokens at a time."""
        b, v = self.b, self.v
        with steps(b, I64(0), I64(KV_TILE // self.each), 1) as (turn, _):
            tokens = [b.add(b.mul(turn, I64(self.each)), I64(i)) for i in range(self.each)]
            places = [
                b.mul(b.load(b.gep(self.values.offsets, [t])), I64(self.size)) for t in tokens
            ]
            next_places = [b.load(b.gep(self.next_rows.offsets, [t])) for t in tokens]
            left = [self.row_bytes] * self.each
            if partly:
                left = []
                for t in tokens:
                    seen = b.icmp_signed("<", t, self.end)
                    seen = b.and_(b.icmp_signed(">=", t, self.begin), seen)
                    left.append(b.select(seen, self.row_bytes, I64(0)))
            at = b.mul(self.column, I64(self.size))
            for next_at in next_places:
                for i in range(0, SEGMENT, ON_LINE[self.next_kind]):
                    column = b.add(self.column, I64(i))
                    prefetch_column(b, self.next_kind, self.next_rows.words, next_at, column)

            def line_of(i, line):
                """64 bytes of a token's row, spread for `interleave`."""
                start = b.add(at, I64(64 * line))
                if partly:
                    return self.spread(self.load_some(places[i], start, left[i]))
                pointer = b.gep(self.rows, [b.add(places[i], start)])
                whole = b.load(b.bitcast(pointer, self.bytes_type.as_pointer()), align=1)
                return self.spread(whole)

            if self.kind == "bf16":
                mixed = []
                for line in range(2):
                    pair = [v.words(line_of(i, line)) for i in range(2)]
                    mixed += v.interleave(*pair)
            else:
                codes = [b.bitcast(line_of(i, 0), self.bytes_type) for i in range(4)]
                halves = zip(v.interleave(*codes[:2]), v.interleave(*codes[2:]), strict=True)
                mixed = [x for pair in halves for x in v.interleave(*(v.words(y) for y in pair))]
            # Four tiles for every 64 bytes of weights, one row of each.
            tile, row = b.lshr(turn, I64(4)), b.and_(turn, I64(15))
            first = b.add(b.add(self.to_at, b.mul(tile, I64(4 * AMX_TILE))), b.mul(row, I64(16)))
            for j, x in enumerate(mixed):
                v.store_lanes(x, self.data, b.add(first, I64(j * AMX_TILE)))

    def load_some(self, place, start, left):
        """Load 64 bytes from `start` on of a row that has `left` bytes; what is past its end is 0."""
        b = self.b
        count = b.sub(left, start)
        count = b.select(b.icmp_signed(">", count, I64(0)), count, I64(0))
        return self.v.load_bytes(self.rows, b.add(place, start), count, 64)

    def spread(self, x):
        """Put pieces of 8 or 4 bytes where `interleave` brings columns in order from."""
        b, v = self.b, self.v
        type_ = ir.VectorType(ir.IntType(128 // self.each), 4 * self.each)
        order = [4 * piece + i for i in range(4) for piece in range(self.each)]
        x = b.bitcast(x, type_)
        return b.bitcast(v.shuffle(x, x, order), v.int_type)


@functools.cache
def make_amx_accumulate(kind):
    """`amx_accumulate` for a storage kind of V."""

    @emits()
    def amx_accumulate(b, f, weights_at, scales_at, packed_at, columns, spare_at, outputs):
        """Add packed V rows: ``o[d, r] = rescale[r] * o[d, r] + sum over t of p[r, t] * v[t, d]``, for 16 query rows.

        `columns` of them, a multiple of 64, as `amx_pack_values` packed them, 64 after 64 in 2,048 floats each, with
        weights from `amx_softmax`; of INT8, the scale of row r's weights is at ``f[scales_at + r]``. Sums are
        transposed output rows: those of column d, 16 floats, are at ``f[outputs.at + 16 * d]``. ``f[spare_at:]`` has
        room for 512 floats.
        """
        _Sums(b, kind, f, weights_at, scales_at, packed_at, columns, spare_at, outputs).emit()

    return amx_accumulate


class _Sums:
    """Emits `amx_accumulate`. Weights are in tiles 4 to 7, V in 2 and 3, sums in 0 and 1."""

    def __init__(
        self, b, kind, data, weights_at, scales_at, packed_at, columns, spare_at, outputs
    ):  # fmt: skip
        self.b, self.v, self.amx, self.kind, self.data = b, AmxWords(b), Amx(b), kind, data
        self.weights_at, self.scales_at, self.packed_at = weights_at, scales_at, packed_at
        self.columns, self.spare_at, self.outputs = columns, spare_at, outputs
        self.rescale = self.v.load_floats(data, outputs.rescale_at)

    def emit(self):
        """The code."""
        for part in range(2):
            for half in range(_HALVES[self.kind]):
                self.load_weights(part, half)
        if self.kind == "bf16":
            self.rescale_sums()
            self.add_floats()
        else:
            self.add_integers()

    def sum_at(self, column):
        """Where the sums of a column are."""
        return self.b.add(self.outputs.at, self.b.mul(column, I64(16)))

    def pointer(self, at):
        """The address of a float of scratch memory."""
        return self.v.floats_at(self.data, at)

    def load_weights(self, part, half):
        """Load the weights of a part and of a half of the tokens."""
        halves, each = _HALVES[self.kind], ELEMENTS[self.kind] // AMX_ROWS
        at = self.b.add(self.weights_at, I64(16 * (AMX_ROWS * each * half + part)))
        self.amx.load(4 + halves * part + half, self.pointer(at), I64(64 * each))

    def load_values(self, tile, half, column):
        """Load V of sixteen columns; of 64, there are four tiles for each half of the tokens."""
        b = self.b
        segment, rest = b.sdiv(column, I64(SEGMENT)), b.srem(column, I64(SEGMENT))
        at = b.add(b.mul(segment, I64(8 * AMX_TILE)), b.mul(rest, I64(16)))
        at = b.add(b.add(self.packed_at, at), I64(4 * half * AMX_TILE))
        self.amx.load(tile, self.pointer(at), I64(64))

    def rescale_sums(self):
        """Products are added to the sums as they are, which seldom have to be rescaled."""
        b, v = self.b, self.v
        moved = b.bitcast(b.fcmp_unordered("une", self.rescale, v.splat(1.0)), ir.IntType(16))
        with (
            b.if_then(b.icmp_signed("!=", moved, ir.Constant(moved.type, 0))),
            steps(b, I64(0), self.columns, 1) as (column, _),
        ):
            at = self.sum_at(column)
            v.store(b.fmul(v.load_floats(self.data, at), self.rescale), self.data, at)

    def add_floats(self):
        """Two sums by turns, as one waits for the product before."""
        b, amx, product = self.b, self.amx, PRODUCT[self.kind]
        with steps(b, I64(0), self.columns, 32) as (column, _):
            two = [column, b.add(column, I64(16))]
            for i in range(2):
                amx.load(i, self.pointer(self.sum_at(two[i])), I64(64))
            for half in range(_HALVES[self.kind]):
                for i in range(2):
                    self.load_values(2 + i, half, two[i])
                    amx.multiply(product, i, 2 + i, 4 + half)
                for i in range(2):
                    amx.multiply(product, i, 2 + i, 6 + half)
            for i in range(2):
                amx.store(i, self.pointer(self.sum_at(two[i])), I64(64))

    def add_integers(self):
        """Products of upper bytes and of lower ones; what they stand for is added as floats."""
        b, v, amx = self.b, self.v, self.amx
        scale = v.load_floats(self.data, self.scales_at)
        spares = (self.spare_at, b.add(self.spare_at, I64(AMX_TILE)))
        with steps(b, I64(0), self.columns, 16) as (column, _):
            self.load_values(2, 0, column)
            for part, spare in enumerate(spares):
                amx.clear(part)
                amx.multiply(PRODUCT[self.kind], part, 2, 4 + part)
                amx.store(part, self.pointer(spare), I64(64))
            with steps(b, I64(0), I64(AMX_TILE), 16) as (i, _):
                upper, lower = (
                    b.sitofp(v.load_lanes(self.data, b.add(at, i)), v.type) for at in spares
                )
                total = b.fmul(v.fma(upper, v.splat(256.0), lower), scale)
                at = b.add(self.sum_at(column), i)
                before = v.load_floats(self.data, at)
                v.store(v.fma(before, self.rescale, total), self.data, at)


@emits()
def transpose_blocks(b, f, blocks, count, source, target):
    """Transpose blocks of 16 rows of 16 floats: ``target[i] = source[i].T`` for `blocks` blocks.

    `source` and `target` are tuples (at, step, block): row r of block i is at ``f[at + i * block + r * step]``. The
    first `count` rows of the result are written.
    """
    from_at, from_step, from_block = cgutils.unpack_tuple(b, source, 3)
    to_at, to_step, to_block = cgutils.unpack_tuple(b, target, 3)
    v = AmxWords(b)
    with steps(b, I64(0), blocks, 1) as (block, _):
        at = b.add(from_at, b.mul(block, from_block))
        rows = [v.load_floats(f, b.add(at, b.mul(from_step, I64(r)))) for r in range(AMX_ROWS)]
        at = b.add(to_at, b.mul(block, to_block))
        for r, row in enumerate(v.transposed(rows)):
            with b.if_then(b.icmp_signed("<", I64(r), count)):
                v.store(row, f, b.add(at, b.mul(to_step, I64(r))))
