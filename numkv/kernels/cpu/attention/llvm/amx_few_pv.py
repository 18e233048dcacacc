"""Weighted sums of V rows in bf16 for few query rows on Intel's matrix unit.

A product takes rows of weights, of 32 tokens, against pairs of V rows: two rows with their elements by turns. The high
and low parts of weights are rows of the same tile as long as both fit, and cost one product; with more than eight
query rows they take turns. V rows are put in pairs as they come from memory, whole rows in order, and the next K rows
are prefetched beside them, a line for each line.

How sums lie. Putting rows in pairs leaves the columns of 64 bytes in two vectors, by fours::

    v0, v1    c0 .. c3 | c8 .. c11 | c16 .. | c24 ..   and   c4 .. c7 | c12 .. c15 | c20 .. | c28 ..

Each makes a tile of sums, and they stay like that until `amx_few_mend` puts them in order, once an item. Sums of heads
of up to 64 columns stay in tiles 0 to 3 as long as an item has one kv head.
"""

from __future__ import annotations

from llvmlite import ir

from numkv.kernels.cpu.attention.llvm.amx_few_qk import ON_LINE, takes_turns
from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.amx import AMX_TILE, Amx, AmxWords
from numkv.kernels.cpu.vectors.emit import I8, I64, as_bytes, emits, steps
from numkv.kernels.cpu.vectors.features import AMX_ROWS
from numkv.kernels.cpu.vectors.prefetch import prefetch_column

#: Tiles of sums that can stay in the unit.
KEPT = 4
# Tokens of a tile of weights.
_CHUNK = 32


@emits()
def amx_few_pv(b, f, few, values, begin, end, start, next_rows, rescale_at, moved, kept):
    """Add the weighted V rows of a block of tokens to the sums at ``f[few.sums_at:]``.

    The block begins with token `start` of the tile; V rows outside ``[begin, end)`` are not read and count for nothing.
    Weights are those of `amx_few_softmax`. If `moved` is not 0, earlier sums are rescaled by ``f[rescale_at:]``; if
    `kept` is not 0, sums are in tiles. The rows of `next_rows` are prefetched, as many as the block has tokens.
    """
    _Sums(b, f, few, values, begin, end, start, next_rows, rescale_at, moved, kept).emit()


class _Tiles:
    """Moves tiles of sums, of which `kept` are in tiles 0 to 3, between the unit and memory."""

    def __init__(self, b, data, few):
        self.b, self.v, self.amx, self.data, self.few = b, AmxWords(b), Amx(b), data, few
        # Floats of a row of sums, and tiles side by side.
        self.columns = b.mul(few.v_lines, I64(ON_LINE))
        self.tiles = b.mul(few.v_lines, I64(2))

    def move(self, how, tile, number):
        """Load or store sums: the tile of a number in memory."""
        b = self.b
        at = b.add(self.few.sums_at, b.mul(number, I64(16)))
        how(tile, self.v.floats_at(self.data, at), b.mul(self.columns, I64(4)))

    def move_kept(self, how):
        """Load or store all that are kept in the unit."""
        b = self.b
        for tile in range(0, KEPT, 2):
            with b.if_then(b.icmp_signed("<", I64(tile), self.tiles)):
                for i in (tile, tile + 1):
                    self.move(how, i, I64(i))


class _Sums(_Tiles):
    """Emits `amx_few_pv`."""

    def __init__(
        self, b, data, few, values, begin, end, start, next_rows, rescale_at, moved, kept
    ):  # fmt: skip
        super().__init__(b, data, few)
        self.values, self.begin, self.end, self.start = values, begin, end, start
        self.next_rows, self.rescale_at, self.moved = next_rows, rescale_at, moved
        self.kept = b.icmp_signed("!=", kept, I64(0))
        self.rows, self.row_bytes = as_bytes(b, values.words), b.mul(values.dim, I64(2))
        self.bytes_type = ir.VectorType(I8, 64)

    def emit(self):
        """The code: V rows that are all there, and have whole lines, go a quick way."""
        b, few = self.b, self.few
        with b.if_then(b.icmp_signed("!=", self.moved, I64(0)), likely=False):
            self.rescale()
        stop = b.add(self.start, few.block)
        whole = b.icmp_signed("==", b.and_(self.values.dim, I64(ON_LINE - 1)), I64(0))
        whole = b.and_(whole, b.icmp_signed("<=", self.begin, self.start))
        whole = b.and_(whole, b.icmp_signed(">=", self.end, stop))
        with b.if_else(whole) as (all_of_it, some):
            with all_of_it:
                self.pair(self.whole_line)
            with some:
                self.pair(self.part_of_line)
        rest = b.and_(self.tiles, I64(KEPT - 1))
        with steps(b, I64(0), b.sub(self.tiles, rest), KEPT) as (first, _):
            self.multiply(first, KEPT)
        with b.if_then(b.icmp_signed("!=", rest, I64(0))):
            self.multiply(b.sub(self.tiles, rest), 2)

    def rescale(self):
        """Multiply sums, both parts of a row by the same."""
        b, v = self.b, self.v
        with b.if_then(self.kept):
            self.move_kept(self.amx.store)
        with steps(b, I64(0), self.few.tile_rows, 1) as (r, _):
            which = b.and_(r, b.sub(self.few.rows, I64(1)))
            factor = v.splat(v.load_one(self.data, b.add(self.rescale_at, which)))
            first = b.add(self.few.sums_at, b.mul(r, self.columns))
            with steps(b, I64(0), self.columns, 16) as (i, _):
                at = b.add(first, i)
                v.store(b.fmul(v.load_floats(self.data, at), factor), self.data, at)
        with b.if_then(self.kept):
            self.move_kept(self.amx.load)

    def whole_line(self, at, line, token):
        """64 bytes of a token's row."""
        b = self.b
        pointer = b.gep(self.rows, [b.add(at, b.mul(line, I64(64)))])
        return b.load(b.bitcast(pointer, self.bytes_type.as_pointer()), align=1)

    def part_of_line(self, at, line, token):
        """The same, zeros where the row has ended or is not to be read."""
        b = self.b
        seen = b.icmp_signed("<", token, self.end)
        seen = b.and_(b.icmp_signed(">=", token, self.begin), seen)
        start = b.mul(line, I64(64))
        left = b.select(seen, b.sub(self.row_bytes, start), I64(0))
        return self.v.load_bytes(self.rows, b.add(at, start), left, 64)

    def pair(self, line_of):
        """Put rows in pairs: of 32 tokens, tiles for each 16 columns one after another."""
        b, v, few = self.b, self.v, self.few
        with (
            steps(b, I64(0), few.block, _CHUNK) as (chunk, _),
            steps(b, I64(0), I64(AMX_ROWS), 1) as (row, _),
        ):
            places = [b.add(chunk, b.add(b.mul(row, I64(2)), I64(i))) for i in range(2)]
            tokens = [b.add(self.start, place) for place in places]
            at = [b.mul(b.load(b.gep(self.values.offsets, [t])), I64(2)) for t in tokens]
            ahead = [b.load(b.gep(self.next_rows.offsets, [place])) for place in places]
            # Tiles of a chunk take as many floats as its rows do.
            to = b.add(few.values_at, b.mul(chunk, b.mul(few.v_lines, I64(16))))
            to = b.add(to, b.mul(row, I64(16)))

            def ask(line):
                column = b.mul(line, I64(ON_LINE))
                for place in ahead:
                    prefetch_column(b, "bf16", self.next_rows.words, place, column)

            with steps(b, I64(0), few.v_lines, 1) as (line, _):
                lines = [v.words(line_of(*x)) for x in zip(at, [line] * 2, tokens, strict=True)]
                here = b.add(to, b.mul(line, I64(2 * AMX_TILE)))
                for i, mixed in enumerate(v.interleave(*lines)):
                    v.store_lanes(mixed, self.data, b.add(here, I64(i * AMX_TILE)))
                ask(line)
            with steps(b, few.v_lines, few.lines, 1) as (line, _):
                ask(line)

    def multiply(self, first, count):
        """Add products to the sums of `count` tiles from the number `first` on."""
        b, v, few, amx = self.b, self.v, self.few, self.amx
        in_turn = takes_turns(b, few)
        with b.if_then(b.not_(self.kept)):
            for i in range(count):
                self.move(amx.load, i, b.add(first, I64(i)))
        with steps(b, I64(0), few.block, _CHUNK) as (chunk, _):
            weights = b.add(few.weights_at, b.lshr(b.add(self.start, chunk), I64(1)))
            amx.load(7, v.floats_at(self.data, weights), I64(2 * KV_TILE))
            with b.if_then(in_turn):
                low = b.add(weights, I64(AMX_ROWS * KV_TILE // 2))
                amx.load(4, v.floats_at(self.data, low), I64(2 * KV_TILE))
            at = b.add(few.values_at, b.mul(chunk, b.mul(few.v_lines, I64(16))))
            at = b.add(at, b.mul(first, I64(AMX_TILE)))
            for i in range(count):
                pairs = v.floats_at(self.data, b.add(at, I64(i * AMX_TILE)))
                amx.load(6, pairs, I64(64))
                amx.multiply("bf16ps", i, 7, 6)
                with b.if_then(in_turn):
                    amx.multiply("bf16ps", i, 4, 6)
        with b.if_then(b.not_(self.kept)):
            for i in range(count):
                self.move(amx.store, i, b.add(first, I64(i)))


@emits()
def amx_few_keep(b, f, few, begins):
    """Load sums into the tiles in which they are kept, if `begins` is not 0; else store them."""
    tiles = _Tiles(b, f, few)
    with b.if_else(b.icmp_signed("!=", begins, I64(0))) as (into, out_of):
        with into:
            tiles.move_kept(tiles.amx.load)
        with out_of:
            tiles.move_kept(tiles.amx.store)


@emits()
def amx_few_mend(b, f, few, rows_at, step, count, back):
    """Put sums in order, both parts added, as `count` rows at ``f[rows_at:]``, `step` floats apart; or `back`.

    Rows have room for whole lines. Back, sums of parts and of rows past `count` become what they were when the item
    began: 0, but for the first part.
    """
    tiles, v = _Tiles(b, f, few), AmxWords(b)
    there = [[x for i in range(4) for x in (*range(4 * i, 4 * i + 4), *range(16 + 4 * i, 20 + 4 * i))]
             [half : half + 16] for half in (0, 16)]  # fmt: skip
    again = [[8 * i + half + j for i in range(4) for j in range(4)] for half in (0, 4)]
    in_turn, backwards = takes_turns(b, few), b.icmp_signed("!=", back, I64(0))
    with (
        steps(b, I64(0), count, 1) as (r, _),
        steps(b, I64(0), tiles.columns, ON_LINE) as (column, _),
    ):
        sums = b.add(b.add(few.sums_at, b.mul(r, tiles.columns)), column)
        low = b.add(sums, b.mul(few.rows, tiles.columns))
        row = b.add(b.add(rows_at, b.mul(r, step)), column)

        def load(at):
            return [v.load_floats(f, b.add(at, I64(i))) for i in (0, 16)]

        def store(pair, lanes, at):
            for i, which in enumerate(lanes):
                v.store(v.shuffle(*pair, which), f, b.add(at, I64(16 * i)))

        with b.if_else(backwards) as (rows_to_sums, sums_to_rows):
            with rows_to_sums:
                store(load(row), again, sums)
                with b.if_then(b.not_(in_turn)):
                    store([v.splat(0.0)] * 2, again, low)
            with sums_to_rows:
                store(load(sums), there, row)
                with b.if_then(b.not_(in_turn)):
                    first, second = load(row), load(low)
                    mended = [v.shuffle(*second, which) for which in there]
                    for i, pair in enumerate(zip(first, mended, strict=True)):
                        v.store(b.fadd(*pair), f, b.add(row, I64(16 * i)))
