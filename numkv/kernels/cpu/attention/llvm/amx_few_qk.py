"""Scores of few query rows on Intel's matrix unit, over K in bf16: queries packed once, K rows where they lie.

A product takes 16 K rows as they are stored, 64 bytes of each, against up to 16 columns, and takes as long for one of
them. So the queries' two parts (`AmxWords.two_parts`) are columns side by side as long as both fit, and cost one
product; with more than eight rows they take turns, and add up in the same sums::

    up to 8 rows    B: high parts of r0 .. r7 | low parts of r0 .. r7       scores = C[:, :8] + C[:, 8:]
    up to 16 rows   B: high parts of r0 .. r15, then low parts              scores = C

Decoding is a matter of memory. V rows of the same tokens are prefetched between the products, a row at a time.
"""

from __future__ import annotations

from numkv.kernels.cpu.vectors.amx import AMX_TILE, Amx, AmxWords
from numkv.kernels.cpu.vectors.emit import I8, I64, emits, steps
from numkv.kernels.cpu.vectors.features import AMX_ROWS
from numkv.kernels.cpu.vectors.prefetch import prefetch_column

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
