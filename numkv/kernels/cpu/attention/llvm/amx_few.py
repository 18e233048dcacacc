"""Attention of few query rows on Intel's matrix unit, over K and V in bf16.

*Scores.* A product takes 16 K rows as they are stored, 64 bytes of each, against up to 16 columns, and takes as long
for one of them. So the queries' two parts (`AmxWords.two_parts`) are columns side by side as long as both fit, and cost
one product; with more than eight rows they take turns, and add up in the same sums::

    up to 8 rows    B: high parts of r0 .. r7 | low parts of r0 .. r7       scores = C[:, :8] + C[:, 8:]
    up to 16 rows   B: high parts of r0 .. r15, then low parts              scores = C

Queries are packed once. Decoding is a matter of memory. V rows of the same tokens are prefetched between the products,
a row at a time.

*Softmax.* Scores come with a token's rows side by side; few of them would leave most lanes of a vector empty. So
sixteen tokens are turned at a time, and a vector has the scores of sixteen tokens with one query row.

*Sums.* A product takes rows of weights, of 32 tokens, against pairs of V rows: two rows with their elements by turns.
The high and low parts of weights are rows of the same tile as long as both fit, and cost one product; with more than
eight query rows they take turns. V rows are put in pairs as they come from memory, whole rows in order, and the next K
rows are prefetched beside them, a line for each line.

Putting rows in pairs leaves the columns of 64 bytes in two vectors, by fours::

    v0, v1    c0 .. c3 | c8 .. c11 | c16 .. | c24 ..   and   c4 .. c7 | c12 .. c15 | c20 .. | c28 ..

Each makes a tile of sums, and they stay like that until `amx_few_mend` puts them in order, once an item. Sums of heads
of up to 64 columns stay in tiles 0 to 3 as long as an item has one kv head.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cpu.attention.llvm.amx import GROWTH
from numkv.kernels.cpu.attention.records import KV_TILE
from numkv.kernels.cpu.vectors.amx import AMX_TILE, Amx, AmxWords
from numkv.kernels.cpu.vectors.emit import I8, I64, as_bytes, emits, steps
from numkv.kernels.cpu.vectors.features import AMX_ROWS
from numkv.kernels.cpu.vectors.prefetch import prefetch_column
from numkv.kernels.cpu.vectors.vectors import tanh

#: Elements of 64 bytes.
ON_LINE = 32
#: Of 16 V rows, how many are prefetched between products; the others are while weights are computed.
EARLY = 12


def takes_turns(builder, few):
    """Whether the parts of queries and of weights take turns, as they do not fit side by side."""
    return builder.icmp_signed("==", few.rows, I64(AMX_ROWS))


def prefetch_row(builder, rows, t, lines):
    """Prefetch the row of a token that `rows` has at place `t`, from its first byte on."""
    at = builder.load(builder.gep(rows.offsets, [t]))
    with steps(builder, I64(0), builder.mul(lines, I64(ON_LINE)), ON_LINE) as (column, _):
        prefetch_column(builder, "bf16", rows.words, at, column)


@emits()
def amx_few_pack_queries(b, f, few, q_at, q_step, count):
    """Pack up to 16 query rows, float32 with zeros up to a multiple of 32 elements, in two parts.

    Row r is at ``f[q_at + r * q_step]``. A tile of ``f[few.queries_at:]`` has 16 rows of 64 bytes, for each 32 elements
    one tile, or two where parts take turns: lane n of row i has the pair of elements i of column n.
    """
    v, in_turn = AmxWords(b), takes_turns(b, few)
    tiles = b.select(in_turn, I64(2), I64(1))
    # Low parts are columns behind the high ones, which make a tile, or half of one.
    low = b.mul(few.rows, I64(16))
    nothing = v.splat_int(0)
    with steps(b, I64(0), few.lines, 1) as (line, _):
        with steps(b, I64(0), I64(2 * AMX_TILE), 16) as (i, _):
            v.store_lanes(nothing, f, b.add(few.spare_at, i))
        with steps(b, I64(0), count, 1) as (r, _):
            at = b.add(b.add(q_at, b.mul(r, q_step)), b.mul(line, I64(ON_LINE)))
            halves = [v.load_floats(f, b.add(at, I64(i))) for i in (0, 16)]
            to = b.add(few.spare_at, b.mul(r, I64(16)))
            for part, place in zip(v.two_parts(*halves), (to, b.add(to, low)), strict=True):
                v.store_lanes(part, f, place)
        with steps(b, I64(0), tiles, 1) as (tile, _):
            at = b.add(few.spare_at, b.mul(tile, I64(AMX_TILE)))
            rows = [v.load_lanes(f, b.add(at, I64(16 * i))) for i in range(AMX_ROWS)]
            number = b.add(b.mul(line, tiles), tile)
            to = b.add(few.queries_at, b.mul(number, I64(AMX_TILE)))
            for i, lanes in enumerate(v.transposed(rows)):
                v.store_lanes(lanes, f, b.add(to, I64(16 * i)))


@emits()
def amx_few_qk(b, f, few, places, first, end, values):
    """Scores of packed query rows and the K rows of tokens ``[first, end)`` of a tile; `first` is a multiple of 16.

    Sixteen tokens are taken at a time: those from `end` on have rows too, but what they score may be anything.
    `places` is what `amx_locate_keys` has found. Scores of token t go to ``f[few.scores_at + t * few.tile_rows:]``, a
    number for each column. Of the tokens' V rows, `values`, some are prefetched.
    """
    v, amx, in_turn = AmxWords(b), Amx(b), takes_turns(b, few)
    tiles = b.select(in_turn, I64(2 * AMX_TILE), I64(AMX_TILE))
    each = b.sdiv(b.add(few.lines, I64(EARLY - 1)), few.lines)  # rows a line
    with steps(b, first, end, AMX_ROWS) as (t, _):
        group = b.lshr(t, I64(4))
        keys = b.inttoptr(b.load(b.gep(places, [group])), I8.as_pointer())
        step = b.load(b.gep(places, [b.add(group, I64(4))]))
        last = b.add(t, I64(EARLY))
        amx.clear(5)
        with steps(b, I64(0), few.lines, 1) as (line, _):
            queries = b.add(few.queries_at, b.mul(line, tiles))
            amx.load(4, v.floats_at(f, queries), I64(64))
            amx.load(6, b.gep(keys, [b.mul(line, I64(64))]), step)
            amx.multiply("bf16ps", 5, 6, 4)
            with b.if_then(in_turn):
                amx.load(4, v.floats_at(f, b.add(queries, I64(AMX_TILE))), I64(64))
                amx.multiply("bf16ps", 5, 6, 4)
            row = b.add(t, b.mul(line, each))
            until = b.add(row, each)
            until = b.select(b.icmp_signed("<", until, last), until, last)
            with steps(b, row, until, 1) as (r, _):
                prefetch_row(b, values, r, few.v_lines)
        at = b.add(few.scores_at, b.mul(t, few.tile_rows))
        amx.store(5, v.floats_at(f, at), b.mul(few.tile_rows, I64(4)))


# V rows of sixteen tokens that are prefetched here.
_LATE = AMX_ROWS - EARLY


@emits(types.int64, soft_cap=types.float32)
def amx_few_softmax(b, f, few, count, start, soft_cap, partly, bounds_at, state, values):
    """Turn the scores of some rows and a block of tokens into weights; return whether earlier sums have to be rescaled.

    The block begins with token `start` of the tile. Scores are those of `amx_few_qk`, in base 2, or with `soft_cap`
    above 0 still to be capped. If `partly` is not 0, row r sees tokens from ``f[bounds_at + r]`` on that are below
    ``f[bounds_at + 16 + r]``, counted from the tile's start. Maxima and sums of the first `count` rows are brought up
    to date as by `online_softmax_step`, but that maxima grow seldom, and to integers; what rescales earlier sums goes
    to ``f[state.rescale_at:]``, 16 floats, 1 for rows past `count`.

    Weights go to ``f[few.weights_at:]``: a row has those of 64 tokens in bf16, high parts of all rows (with those that
    fill up) come before low ones. Of the tokens' V rows, `values`, those are prefetched that `amx_few_qk` has left.
    """
    return _FewSoftmax(b, f, few, count, start, soft_cap, partly, bounds_at, state, values).emit()


class _FewSoftmax:
    """Emits `amx_few_softmax`."""

    def __init__(self, b, data, few, count, start, soft_cap, partly, bounds_at, state, values):
        self.b, self.v, self.data, self.few = b, AmxWords(b), data, few
        self.count, self.start, self.end = count, start, b.add(start, few.block)
        self.soft_cap, self.partly, self.bounds_at = soft_cap, partly, bounds_at
        self.state, self.values = state, values
        self.there = self.v.lanes_below(count)

    def emit(self):
        """The code; its value says whether sums have to be rescaled."""
        b, v, state = self.b, self.v, self.state
        self.turn()
        with b.if_then(b.fcmp_ordered(">", self.soft_cap, v.float(0.0)), likely=False):
            self.for_scores(self.capped)
        with b.if_then(b.icmp_signed("!=", self.partly, I64(0)), likely=False):
            self.for_scores(self.masked)
        self.find_peaks()
        old = v.load_floats(self.data, state.maxima_at, self.there)
        peak = v.load_floats(self.data, self.few.spare_at, self.there)
        grown = b.fcmp_ordered(">", peak, b.fadd(old, v.splat(GROWTH)))
        new = b.select(grown, v.ceil(peak), old)
        nothing = b.fcmp_ordered("==", new, v.splat(-math.inf))
        # What `AmxWords.power` takes.
        base = b.fsub(v.splat(0.5), b.select(nothing, v.splat(0.0), new))
        v.store(base, self.data, b.add(self.few.spare_at, I64(16)))
        rescale = v.power(b.fadd(b.fsub(old, new), v.splat(0.5)))
        rescale = b.select(grown, rescale, v.splat(1.0))
        v.store(rescale, self.data, state.rescale_at)
        v.store_masked(new, self.data, state.maxima_at, self.there)
        self.weigh()
        before = v.load_floats(self.data, state.sums_at, self.there)
        added = v.load_floats(self.data, b.add(self.few.spare_at, I64(32)), self.there)
        total = v.fma(before, rescale, added)
        v.store_masked(total, self.data, state.sums_at, self.there)
        return b.zext(b.bitcast(grown, ir.IntType(AMX_ROWS)), I64)

    def score_at(self, r, t):
        """Where the score of a row with a token is, and those of the tokens after it."""
        b = self.b
        return b.add(b.add(self.few.turned_at, b.mul(r, I64(KV_TILE))), t)

    def turn(self):
        """Scores of rows side by side, both parts added."""
        b, v, few = self.b, self.v, self.few
        narrow = b.icmp_signed("==", few.tile_rows, I64(8))

        def load(count, t):
            at = b.add(few.scores_at, b.mul(t, few.tile_rows))
            return [v.load_floats(self.data, b.add(at, I64(16 * i))) for i in range(count)]

        def store(columns, t):
            for r, column in enumerate(columns):
                v.store(column, self.data, self.score_at(I64(r), t))

        def added(columns):
            half = len(columns) // 2
            return [b.fadd(columns[r], columns[half + r]) for r in range(half)]

        with steps(b, self.start, self.end, 16) as (t, _), b.if_else(narrow) as (four, more):
            with four:
                store(added(v.turned(load(8, t))), t)
            with more:
                columns = v.transposed(load(16, t))
                with b.if_else(takes_turns(b, few)) as (sixteen, eight):
                    with sixteen:
                        store(columns, t)
                    with eight:
                        store(added(columns), t)

    def for_scores(self, change):
        """Change all scores in place."""
        b, v = self.b, self.v
        with (
            steps(b, I64(0), self.count, 1) as (r, _),
            steps(b, self.start, self.end, 16) as (t, _),
        ):
            at = self.score_at(r, t)
            v.store(change(v.load_floats(self.data, at), r, t), self.data, at)

    def capped(self, score, r, t):
        """``cap * tanh(score / cap) * log2(e)``."""
        b, v = self.b, self.v
        cap = v.splat(self.soft_cap)
        score = b.fmul(tanh(v, b.fdiv(score, cap)), cap)
        return b.fmul(score, v.splat(math.log2(math.e)))

    def masked(self, score, r, t):
        """-inf for tokens that the row does not see."""
        b, v = self.b, self.v
        low, high = (
            b.sub(b.fptosi(v.load_one(self.data, b.add(b.add(self.bounds_at, I64(i)), r)), I64), t)
            for i in (0, AMX_ROWS)
        )
        seen = b.and_(v.lanes_below(high), b.not_(v.lanes_below(low)))
        return b.select(seen, score, v.splat(-math.inf))

    def find_peaks(self):
        """The largest score of each row."""
        b, v = self.b, self.v
        slot = cgutils.alloca_once(b, v.type)
        with steps(b, I64(0), self.count, 1) as (r, _):
            b.store(v.splat(-math.inf), slot)
            with steps(b, self.start, self.end, 16) as (t, _):
                score = v.load_floats(self.data, self.score_at(r, t))
                b.store(v.larger(score, b.load(slot)), slot)
            peak = v.fold(b.load(slot), v.larger)
            v.store(peak, self.data, b.add(self.few.spare_at, r))

    def weigh(self):
        """Weights of each row in two parts, and their sums; what is left of V rows is prefetched meanwhile."""
        b, v, few = self.b, self.v, self.few
        slot, turn = cgutils.alloca_once(b, v.type), cgutils.alloca_once_value(b, I64(0))
        late = b.mul(b.lshr(few.block, I64(4)), I64(_LATE))
        turns = b.mul(self.count, b.lshr(few.block, I64(5)))
        each = b.sdiv(b.add(late, b.sub(turns, I64(1))), turns)
        with steps(b, I64(0), self.count, 1) as (r, _):
            base = v.splat(v.load_one(self.data, b.add(b.add(few.spare_at, I64(16)), r)))
            b.store(v.splat(0.0), slot)
            with steps(b, self.start, self.end, 32) as (t, _):
                weights = []
                for i in (0, 16):
                    score = v.load_floats(self.data, self.score_at(r, b.add(t, I64(i))))
                    weights.append(v.power(b.fadd(score, base)))
                b.store(b.fadd(b.load(slot), b.fadd(*weights)), slot)
                column = b.add(few.weights_at, b.lshr(t, I64(1)))
                for row, part in zip((r, b.add(r, few.rows)), v.two_parts(*weights), strict=True):
                    at = b.add(column, b.mul(row, I64(KV_TILE // 2)))
                    v.store_lanes(part, self.data, at)
                first = b.load(turn)
                until = b.add(first, each)
                b.store(until, turn)
                until = b.select(b.icmp_signed("<", until, late), until, late)
                with steps(b, first, until, 1) as (i, _):
                    group = b.mul(b.sdiv(i, I64(_LATE)), I64(AMX_ROWS))
                    token = b.add(group, b.add(b.srem(i, I64(_LATE)), I64(EARLY)))
                    prefetch_row(b, self.values, b.add(self.start, token), few.v_lines)
            total = v.fold(b.load(slot), b.fadd)
            v.store(total, self.data, b.add(b.add(few.spare_at, I64(32)), r))


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
    _FewSums(b, f, few, values, begin, end, start, next_rows, rescale_at, moved, kept).emit()


class _TilesOfSums:
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


class _FewSums(_TilesOfSums):
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
    tiles = _TilesOfSums(b, f, few)
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
    tiles, v = _TilesOfSums(b, f, few), AmxWords(b)
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
