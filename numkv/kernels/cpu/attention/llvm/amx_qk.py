"""Scores on Intel's matrix unit: query rows in parts, K rows where they lie, their products.

A product of AMX tiles takes sixteen K rows against sixteen columns, which are query rows, and takes as long for one of
them. So prompts, and decode steps of large groups, go this way where K and V are bf16 or INT8, and few query rows do
not: `FEW_ROWS` says how many are few.

How numbers are split. A float32 has 24 bits, a bf16 number 8: the upper half of a float's bits, then that of what is
left, then the rest, give a query exactly; parts that are zero in all rows of a block (of queries that come in bf16,
say) are left out. Probabilities take two parts, 16 bits: each is off by 1e-5 of itself at most. Beside INT8, queries
and weights are integers of 15 bits, as in `int8`: an upper byte and a lower one, both with a sign.

How they lie in memory. For scores, A is 16 rows of K as they lie in the cache, and B the queries, packed once: so a
vector has the scores of 16 query rows with one token, and maxima, exponentials and sums need nothing of other lanes.
Two or four such vectors of weights make rows of B for the sums, and A is V, transposed and packed once for all query
rows; output rows are columns until an item is done::

    scores    A: K rows (tokens x d)       B: queries (d x query rows)    C: tokens x query rows
    sums      A: V columns (d x tokens)    B: weights (tokens x rows)     C: d x query rows

How work is ordered. Once a product has run, vector instructions seem to have one port instead of two for a while (on
Emerald Rapids), and where both are mixed all of them run like that. So each kind of work is done for all query rows of
an item before the next.

Products of bf16 take denormal numbers for zero, and an infinity gives NaN where a part is zero.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.amx import AMX_TILE, Amx, AmxWords
from numkv.kernels.cpu.vectors.emit import I8, I32, I64, as_bytes, emits, steps
from numkv.kernels.cpu.vectors.features import AMX_ROWS
from numkv.kernels.cpu.vectors.prefetch import prefetch_column
from numkv.kernels.cpu.vectors.stored import ON_LINE

#: Elements in a row of A.
ELEMENTS = {"bf16": 32, "int8": 64}
#: The product of two tiles.
PRODUCT = {"bf16": "bf16ps", "int8": "bssd"}
# The most parts of a query.
_PARTS = {"bf16": 3, "int8": 2}


@functools.cache
def make_amx_pack_queries(kind):
    """`amx_pack_queries` for a storage kind of K."""

    @emits(types.int64)
    def amx_pack_queries(b, f, q_at, q_step, count, head_dim, to_at, spare_at):
        """Pack up to 16 query rows to meet K rows; return in how many parts.

        Row r is at ``f[q_at + r * q_step]``, with zeros up to a multiple of 64 elements: float32 where K is bf16, the
        words of `quantise_query` where it is INT8. In NumPy, for bf16::

            high = upper_half(q);  middle = upper_half(q - high);  low = q - high - middle

        They go to ``f[to_at:]``, with room for three parts (of INT8 two) of 256 floats for each 64 bytes of a K row;
        ``f[spare_at:]`` has room for 768 floats. A part of 64 bytes is transposed, so that lane n of row i has element
        pair (of INT8 four) i of query row n.
        """
        return _Packing(b, kind, f, q_at, q_step, count, head_dim, to_at, spare_at).emit()

    return amx_pack_queries


class _Packing:
    """Emits `amx_pack_queries`."""

    def __init__(self, b, kind, data, q_at, q_step, count, head_dim, to_at, spare_at):
        self.b, self.v, self.kind, self.data = b, AmxWords(b), kind, data
        self.q_at, self.q_step, self.count, self.head_dim = q_at, q_step, count, head_dim
        self.to_at, self.spare_at = to_at, spare_at
        self.nothing = self.v.splat_int(0)
        # Bits of what is left after the first part, and after the second.
        self.left = [cgutils.alloca_once_value(b, self.nothing) for _ in range(2)]

    def emit(self):
        """The code; its value is the number of parts."""
        b, v = self.b, self.v
        blocks = b.sdiv(
            b.add(self.head_dim, I64(ELEMENTS[self.kind] - 1)), I64(ELEMENTS[self.kind])
        )
        most = self.most_parts()
        with steps(b, I64(0), blocks, 1) as (block, _):
            # Columns are put down as rows first, then transposed.
            with steps(b, I64(0), I64(AMX_ROWS), 1) as (r, _):
                for part, lanes in enumerate(self.parts_of(r, block)):
                    at = b.add(self.spare_at, b.add(I64(part * AMX_TILE), b.mul(r, I64(16))))
                    v.store_lanes(lanes, self.data, at)
            with steps(b, I64(0), most, 1) as (part, _):
                from_at = b.add(self.spare_at, b.mul(part, I64(AMX_TILE)))
                rows = [
                    v.load_lanes(self.data, b.add(from_at, I64(16 * i))) for i in range(AMX_ROWS)
                ]
                number = b.add(b.mul(block, I64(_PARTS[self.kind])), part)
                at = b.add(self.to_at, b.mul(number, I64(AMX_TILE)))
                for i, lanes in enumerate(v.transposed(rows)):
                    v.store_lanes(lanes, self.data, b.add(at, I64(16 * i)))
        if self.kind == "int8":
            return I64(2)
        needed = I64(1)
        for part, bits in enumerate(self.left):
            some = b.icmp_signed("!=", v.fold(b.load(bits), b.or_), I32(0))
            needed = b.select(some, I64(part + 2), needed)
        return needed

    def most_parts(self):
        """How many parts there may be: of bf16 one if no number has bits in its lower half."""
        b, v = self.b, self.v
        most = I64(_PARTS[self.kind])
        if self.kind == "int8":
            return most
        lower = cgutils.alloca_once_value(b, self.nothing)
        with (
            steps(b, I64(0), self.count, 1) as (r, _),
            steps(b, I64(0), self.head_dim, 16) as (i, _),
        ):
            at = b.add(b.add(self.q_at, b.mul(r, self.q_step)), i)
            b.store(b.or_(b.load(lower), v.load_lanes(self.data, at)), lower)
        some = b.and_(v.fold(b.load(lower), b.or_), I32(0xFFFF))
        return b.select(b.icmp_signed("==", some, I32(0)), I64(1), most)

    def parts_of(self, r, block):
        """The parts of 64 bytes of a row, as 16 lanes each."""
        b, v = self.b, self.v
        there = b.icmp_signed("<", r, self.count)
        row_at = b.add(self.q_at, b.select(there, b.mul(r, self.q_step), I64(0)))
        at = b.add(row_at, b.mul(block, I64(32)))
        pair = [v.load_lanes(self.data, b.add(at, I64(i))) for i in (0, 16)]
        pair = [b.select(there, x, self.nothing) for x in pair]
        if self.kind == "int8":
            return v.bytes_of_words(*(v.words(x) for x in pair))
        lanes = [b.bitcast(x, v.type) for x in pair]
        evens, odds = (v.shuffle(*lanes, [*range(i, 32, 2)]) for i in (0, 1))
        parts = []
        for part in range(3):
            even, odd = (b.bitcast(x, v.int_type) for x in (evens, odds))
            if part:
                left = self.left[part - 1]
                b.store(b.or_(b.load(left), b.or_(even, odd)), left)
            upper = b.and_(odd, v.splat_int(-65536))
            parts.append(b.or_(upper, b.lshr(even, v.splat_int(16))))
            evens, odds = (b.fsub(x, v.upper_half(x)) for x in (evens, odds))
        return parts


@functools.cache
def make_amx_locate_keys(kind):
    """`amx_locate_keys` for a storage kind of K."""

    @emits()
    def amx_locate_keys(b, places, f, spare_at, keys, k_step):
        """Where the K rows of a tile are for the matrix unit: by 16 tokens, an address and the bytes from row to row.

        Goes to ``places[0:4]`` and ``places[4:8]``. Rows that lie in even steps, and end where 64 bytes end, are used
        where they are; others are copied to ``f[spare_at:]``. `k_step` is the distance of a block's rows in elements.
        """
        offsets, head_dim = keys.offsets, keys.dim
        v = AmxWords(b)
        size = I64(64 // ELEMENTS[kind])
        eight = ir.VectorType(I64, 8)
        whole = b.icmp_signed("==", b.and_(head_dim, I64(ELEMENTS[kind] - 1)), I64(0))
        row_bytes = b.mul(head_dim, size)
        lines = b.sdiv(b.add(row_bytes, I64(63)), I64(64))
        k_bytes, spare = as_bytes(b, keys.words), v.floats_at(f, spare_at)

        def splat(x):
            first = b.insert_element(ir.Constant(eight, ir.Undefined), x, I32(0))
            return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, 8), None))

        iota = ir.Constant(eight, [ir.Constant(I64, i) for i in range(8)])
        with steps(b, I64(0), I64(KV_TILE), AMX_ROWS) as (t0, _):
            first = b.load(b.gep(offsets, [t0]))
            uneven = ir.Constant(I8, 0)
            for i in (0, 8):
                pointer = b.gep(offsets, [b.add(t0, I64(i))])
                have = b.load(b.bitcast(pointer, eight.as_pointer()), align=8)
                steps_up = b.mul(b.add(iota, splat(I64(i))), splat(k_step))
                wrong = b.icmp_signed("!=", have, b.add(splat(first), steps_up))
                uneven = b.or_(uneven, b.bitcast(wrong, I8))
            even = b.icmp_signed("==", uneven, ir.Constant(I8, 0))
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
                    with steps(b, I64(0), I64(AMX_ROWS), 1) as (t, _):
                        at = b.mul(b.load(b.gep(offsets, [b.add(t0, t)])), size)
                        with steps(b, I64(0), row_bytes, 64) as (i, _):
                            line = v.load_bytes(k_bytes, b.add(at, i), b.sub(row_bytes, i), 64)
                            row = b.gep(to, [b.add(b.mul(t, row_step), i)])
                            b.store(line, b.bitcast(row, line.type.as_pointer()), align=4)

    return amx_locate_keys


@functools.cache
def make_amx_qk(kind, next_kind):
    """`amx_qk` for a storage kind of K; `next_kind` is that of the rows that are prefetched."""

    @emits()
    def amx_qk(b, f, packed_at, parts, places, head_dim, s_at, next_rows, prefetches):
        """Scores of up to 16 packed query rows and a tile's K rows, for `amx_softmax`: ``s[t, r] = k[t] @ q[r]``.

        `parts` is what `amx_pack_queries` returned, `places` what `amx_locate_keys` has found. ``f[s_at:]`` has room
        for 2,048 floats: 64 tokens of 16 scores, of INT8 those of both parts. If `prefetches` is not 0, `next_rows`
        (the tile's V rows) are prefetched.
        """
        _Products(
            b, (kind, next_kind), f, packed_at, parts, places, head_dim, s_at, next_rows, prefetches
        ).emit()

    return amx_qk


class _Products:
    """Emits `amx_qk`.

    A product adds to what another has left, after three times as long as it keeps the unit busy: four sums, in tiles 0
    to 3, one for each 16 K rows, hide that. Tile 4 has query rows, tiles 5 and 6 K rows.
    """

    def __init__(self, b, kinds, data, packed_at, parts, places, head_dim, s_at, next_rows, asked):
        self.kind, self.next_kind = kinds
        self.b, self.v, self.amx, self.data = b, AmxWords(b), Amx(b), data
        self.packed_at, self.parts, self.places, self.s_at = packed_at, parts, places, s_at
        self.next_rows, self.asked = next_rows, b.icmp_signed("!=", asked, I64(0))
        self.blocks = b.sdiv(
            b.add(head_dim, I64(ELEMENTS[self.kind] - 1)), I64(ELEMENTS[self.kind])
        )
        self.step = [b.load(b.gep(places, [I64(4 + i)])) for i in range(4)]

    def emit(self):
        """The code: parts are added up in bf16, and kept apart in INT8."""
        b = self.b
        if self.kind == "bf16":
            self.clear()
            with steps(b, I64(0), self.blocks, 1) as (block, _):
                with steps(b, I64(0), self.parts, 1) as (part, _):
                    self.multiply(block, part)
                self.prefetch(block)
            self.store(I64(0))
            return
        with steps(b, I64(0), self.parts, 1) as (part, _):
            self.clear()
            with steps(b, I64(0), self.blocks, 1) as (block, _):
                self.multiply(block, part)
                with b.if_then(b.icmp_signed("==", part, I64(0))):
                    self.prefetch(block)
            self.store(part)

    def clear(self):
        for i in range(4):
            self.amx.clear(i)

    def multiply(self, block, part):
        """Multiply all K rows and a part of queries for 64 bytes."""
        b, v = self.b, self.v
        at = b.add(b.mul(block, I64(_PARTS[self.kind])), part)
        at = b.add(self.packed_at, b.mul(at, I64(AMX_TILE)))
        self.amx.load(4, v.floats_at(self.data, at), I64(64))
        for i in range(4):
            key = b.add(b.load(b.gep(self.places, [I64(i)])), b.mul(block, I64(64)))
            self.amx.load(5 + i % 2, b.inttoptr(key, I8.as_pointer()), self.step[i])
            self.amx.multiply(PRODUCT[self.kind], i, 5 + i % 2, 4)

    def store(self, part):
        b, v = self.b, self.v
        for i in range(4):
            at = b.add(b.add(self.s_at, I64(i * AMX_TILE)), b.mul(part, I64(4 * AMX_TILE)))
            self.amx.store(i, v.floats_at(self.data, at), I64(64))

    def prefetch(self, block):
        """Prefetch 64 bytes' worth of columns."""
        b = self.b
        with b.if_then(self.asked), steps(b, I64(0), I64(KV_TILE), 1) as (t, _):
            at = b.load(b.gep(self.next_rows.offsets, [t]))
            for i in range(0, ELEMENTS[self.kind], ON_LINE[self.next_kind]):
                column = b.add(b.mul(block, I64(ELEMENTS[self.kind])), I64(i))
                prefetch_column(b, self.next_kind, self.next_rows.words, at, column)
