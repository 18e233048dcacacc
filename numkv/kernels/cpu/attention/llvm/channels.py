"""Keys by channel: a token group's scales are multiplied into the query, and codes then count as INT8.

A score is ``sum of q * (zero + scale * (code + 1/2))``. A tile is a token group. Each query row is multiplied by the
group's scales once. The term without codes, ``sum of q * (zero + scale / 2)``, is added to its scores. Codes of 4 bits
are looked up as odd levels, ``2 * code + 1``. Their factor is half of the scale, and their addend the zero point.

Second codes are further elements of a row, with the same levels. Such an element is multiplied with the query's element
of its channel once more. Its factor is a sixteenth of that channel's.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba.core import cgutils

from numkv.kernels.cpu.attention.llvm.floats import rows_in_vector
from numkv.kernels.cpu.attention.llvm.integers import query_quantisers
from numkv.kernels.cpu.vectors.emit import I16, I32, I64, emits, for_rows, steps
from numkv.kernels.cpu.vectors.features import row_unroll
from numkv.kernels.cpu.vectors.prefetch import PrefetchStream
from numkv.kernels.cpu.vectors.vectors import Vectors
from numkv.kernels.cpu.vectors.words import Words
from numkv.rows.channel import FINE

# Cache lines that are prefetched for each vector of a query row.
_LINES = 2


@functools.cache
def make_gather_channels(compute, odd_levels, fine):
    """`gather_channels` for scratch memory of a float type.

    With `odd_levels`, codes become such. `fine` is the number of channels with a second code.
    """

    @emits()
    def gather_channels(b, to, to_at, scales, offsets, dim, padded_dim):
        """Write the factors of a tile's query rows and the addends of its scores.

        They go to `to_at`: `padded_dim` factors, then as many addends. Those of elements past `dim` are 0, except
        factors of second codes, whose channels come after the addends. The group's words are at ``scales[offsets[0]]``:
        `dim` scales, then zero points, then these channels.
        """
        v = Vectors(b, compute)
        half = v.splat(0.5)
        first = b.load(offsets)
        with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
            mask = v.lanes_below(b.sub(dim, d))
            words = b.gep(scales, [b.add(first, d)])
            scale, zero = (
                _floats(v, v.masked_load(x, ir.VectorType(I16, v.lanes), 2, mask))
                for x in (words, b.gep(words, [dim]))
            )
            step = b.fmul(scale, half)
            v.store(step if odd_levels else scale, to, b.add(to_at, d))
            addend = zero if odd_levels else b.fadd(zero, step)
            v.store(addend, to, b.add(b.add(to_at, padded_dim), d))
        if not fine:
            return
        channels_at = b.add(to_at, b.shl(padded_dim, I64(1)))
        for f in range(fine):
            place = b.gep(scales, [b.add(first, b.add(b.shl(dim, I64(1)), I64(f)))])
            channel = b.zext(b.load(place, align=2), I64)
            # A damaged number leads to no memory of others.
            channel = b.select(b.icmp_signed("<", channel, dim), channel, I64(0))
            b.store(b.sitofp(channel, v.float), b.gep(to, [b.add(channels_at, I64(f))]))
            part = b.fmul(b.load(b.gep(to, [b.add(to_at, channel)])), v.float(1 / FINE))
            b.store(part, b.gep(to, [b.add(b.add(to_at, dim), I64(f))]))

    return gather_channels


def _floats(v, words):
    """bfloat16 words as floats of the vectors' type."""
    wide = ir.VectorType(I32, v.lanes)
    bits = v.b.shl(v.b.zext(words, wide), ir.Constant(wide, [I32(16)] * v.lanes))
    floats = v.b.bitcast(bits, ir.VectorType(ir.FloatType(), v.lanes))
    return v.b.fpext(floats, v.type) if v.double else floats


@functools.cache
def make_scale_queries(kind, compute, integers, fine, next_kind):
    """`scale_queries` for a storage kind of K and a float type.

    With `integers`, it makes integers of float32. `fine` is the number of channels with a second code, and `next_kind`
    the storage kind of the prefetched rows.
    """

    @emits()
    def scale_queries(
        b, rows, data, q_at, factors_at, to_at, scales_at, addends_at, dim, padded_dim, extents
    ):
        """Multiply `rows` query rows by the factors of `gather_channels` and interleave them; sum their addends.

        The factors are at `factors_at`. The products with the addends of `gather_channels` are summed at `addends_at`
        and on. `dim` counts second codes, too.

        All are floats of `data`. Rows go to `to_at` and on, in the order of `interleave_queries`. Integers are those of
        `quantise_query`, whose scales go to `scales_at` and on. Their order is that of `interleave_bytes` where bytes
        are added by fours, else that of `interleave_queries`.

        Meanwhile the first lines of `extents` are prefetched, as memory would be idle. The scores continue from there.
        """
        stream = PrefetchStream(b, next_kind, extents)

        def emit(rows):
            v = Words(b) if integers else Vectors(b, compute)
            queries = [b.add(q_at, b.mul(I64(r), padded_dim)) for r in range(rows)]
            totals = [cgutils.alloca_once_value(b, v.splat(0.0)) for _ in range(rows)]
            peaks = [cgutils.alloca_once_value(b, v.splat_int(0)) for _ in range(rows)]
            units = _Units(v, kind, rows, 4 if not integers else 1 if v.has_fours else 2)
            for f in range(fine):
                place = b.add(factors_at, b.add(b.shl(padded_dim, I64(1)), I64(f)))
                channel = b.fptosi(b.load(b.gep(data, [place])), I64)
                to = b.add(b.sub(dim, I64(fine)), I64(f))
                for at in queries:
                    x = b.load(b.gep(data, [b.add(at, channel)]))
                    b.store(x, b.gep(data, [b.add(at, to)]))
            with steps(b, I64(0), padded_dim, v.lanes) as (d, _):
                factor, addend = (
                    v.load_floats(data, b.add(at, d)) for at in (factors_at, b.add(factors_at, padded_dim))
                )  # fmt: skip
                stream.issue(_LINES * stream.on_line)
                for r, (at, total, peak) in enumerate(zip(queries, totals, peaks, strict=True)):
                    q = v.load_floats(data, b.add(at, d))
                    b.store(v.fma_to(b.load(total), q, addend), total)
                    q = b.fmul(q, factor)
                    if integers:
                        b.store(v.larger_size(q, b.load(peak)), peak)
                    else:
                        units.put(q, data, to_at, r, d)
            v.store(v.folds([b.load(x) for x in totals], b.fadd), data, addends_at)
            if not integers:
                stream.leave()
                return
            factors, scales = query_quantisers(v, [b.load(x) for x in peaks], dim)
            v.store(scales, data, scales_at)
            multipliers = [v.splat(b.extract_element(factors, I32(r))) for r in range(rows)]
            with steps(b, I64(0), padded_dim, units.step) as (d, _):
                for i in range(0, units.step, v.lanes):
                    stream.issue(_LINES * stream.on_line)
                    here = b.add(d, I64(i))
                    factor = v.load_floats(data, b.add(factors_at, here))
                    for r, (at, multiplier) in enumerate(zip(queries, multipliers, strict=True)):
                        q = b.fmul(v.load_floats(data, b.add(at, here)), factor)
                        units.put(v.nearest(b.fmul(q, multiplier)), data, to_at, r, d, i)
            stream.leave()

        for_rows(b, rows, emit, row_unroll(compute))

    return scale_queries


class _Units:
    """The layout of interleaved query rows: vectors with equally many elements of each row, row after row.

    Parameters
    ----------
    v : Vectors
        Emits vector instructions.
    kind : str
        Storage kind of K.
    rows : int
        Query rows.
    size : int
        Bytes of an element: 4 for floats, 2, or 1 for half of 16 bits. With 1, a unit is two vectors, of the high and
        of the low halves.
    """

    def __init__(self, v, kind, rows, size):
        self.v, self.rows, self.size = v, rows, size
        itemsize = 8 if v.double else 4
        self.each = v.lanes // (rows if size == 1 else rows_in_vector(kind, rows))
        # Vectors in each part of a unit.
        self.vectors = self.each * rows // v.lanes
        self.columns = self.each * min(itemsize, 4) // size if size < 4 else self.each
        self.step = max(self.columns, v.lanes)

    def put(self, x, data, to_at, row, d, i=0):
        """Put a vector of a row's columns from ``d + i`` on; `d` is a multiple of `step`."""
        v, b = self.v, self.v.b
        parts = [x]
        if self.size < 4:
            to = ir.VectorType(ir.IntType(8 * self.size), v.lanes)
            if self.size == 1:
                high = b.ashr(b.add(x, v.splat_int(128)), v.splat_int(8))
                parts = [high, x]
            parts = [b.trunc(part, to) for part in parts]
        size = min(self.columns, v.lanes)
        # A unit begins at its first column times the rows, or at half of that.
        unit_at = b.add(
            to_at,
            b.mul(d, I64(self.rows))
            if self.size == 4
            else b.ashr(b.mul(d, I64(self.rows)), I64(1)),
        )
        for number, part in enumerate(parts):
            for j in range(0, v.lanes, size):
                unit, column = divmod(i + j, self.columns)
                offset = (
                    (unit * self.vectors * len(parts) + number) * v.lanes
                    + row * self.each
                    + column * self.size // 4
                )
                piece = v.shuffle(part, part, range(j, j + size)) if size < v.lanes else part
                pointer = v.pointer(data, b.add(unit_at, I64(offset)), v.float)
                b.store(piece, b.bitcast(pointer, piece.type.as_pointer()), align=4)
