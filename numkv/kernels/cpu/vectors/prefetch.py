"""Prefetches of memory, evenly spread among arithmetic."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import register_jitable

from numkv.kernels.cpu.vectors.emit import I8, I32, I64, as_bytes, emits
from numkv.kernels.cpu.vectors.features import LOCALITY
from numkv.kernels.cpu.vectors.stored import ON_LINE, STORED, in_words

#: Where the last extent of a `PrefetchStream` ends: past all addresses.
NO_MORE = 1 << 62


class PrefetchStream:
    """Prefetches memory a cache line at a time, in memory order.

    An extent is a run of adjacent bytes. `extents` has two addresses for each: its first cache line and its end. The
    last one ends at `NO_MORE`. Prefetches in order, evenly spread among arithmetic, cost next to no time. Bursts fill
    the few buffers that track pending lines, and the arithmetic after them waits. Every second line first is no better,
    as CPUs fetch lines in pairs.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit.
    kind : str
        Storage kind of the rows in these extents.
    extents : llvmlite.ir.Value
        Where the addresses are.
    locality : int, default: `LOCALITY`
        LLVM's locality of the prefetches.
    """

    def __init__(self, builder, kind, extents, locality=LOCALITY):
        self.b, self.on_line, self.extents = builder, ON_LINE[kind], extents
        self.locality = locality
        self.at, self.end, self.next = (cgutils.alloca_once(builder, I64) for _ in range(3))
        builder.store(I64(0), self.next)
        self._begin_extent()

    def _begin_extent(self):
        number = self.b.load(self.next)
        for i, slot in enumerate((self.at, self.end)):
            self.b.store(self.b.load(self.b.gep(self.extents, [self.b.add(number, I64(i))])), slot)
        self.b.store(self.b.add(number, I64(2)), self.next)

    def _issue(self, lines):
        at = self.b.load(self.at)
        for i in range(lines):
            address = self.b.inttoptr(self.b.add(at, I64(64 * i)), I8.as_pointer())
            prefetch_line(self.b, address, self.locality)
        at = self.b.add(at, I64(64 * lines))
        self.b.store(at, self.at)
        ended = self.b.icmp_signed(">=", at, self.b.load(self.end))
        with self.b.if_then(ended, likely=False):
            self._begin_extent()

    def leave(self):
        """Let the next stream over these extents begin where this one is, if that is in the first extent."""
        first = self.b.icmp_signed("==", self.b.load(self.next), I64(2))
        with self.b.if_then(first):
            self.b.store(self.b.load(self.at), self.extents)

    def issue(self, elements, turn=0):
        """Prefetch the lines of `elements` elements; if that is less than one line, in some turns only."""
        if elements >= self.on_line:
            self._issue(elements // self.on_line)
            return
        turns = self.on_line // elements
        if isinstance(turn, int):
            if turn % turns == 0:
                self._issue(1)
            return
        mine = self.b.icmp_signed("==", self.b.and_(turn, I64(turns - 1)), I64(0))
        with self.b.if_then(mine):
            self._issue(1)


def prefetch_line(builder, pointer, locality=LOCALITY):
    """Prefetch a cache line to read it; the address may be anything."""
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [pointer, I32(0), I32(locality), I32(1)])


def prefetch_column(builder, kind, base, at, column):
    """Prefetch the cache line of a column of the row at `at`, of a storage kind; the address may be anything."""
    column = in_words(builder, kind, column)
    typed = builder.bitcast(base, STORED[kind].as_pointer())
    prefetch_line(builder, as_bytes(builder, builder.gep(typed, [builder.add(at, column)])))


@emits()
def prefetch(b, array, at):
    """Prefetch the cache line of an element of an array."""
    prefetch_line(b, as_bytes(b, b.gep(array, [at])))


@emits()
def _prefetch_address(b, address):
    """Prefetch the cache line at an address."""
    prefetch_line(b, b.inttoptr(address, I8.as_pointer()))


@register_jitable
def prefetch_extents(extents):
    """Prefetch all extents of a `PrefetchStream` at once, for memory that is needed first."""
    i = np.int64(0)
    while extents[i + 1] != NO_MORE:
        for address in range(extents[i], extents[i + 1], 64):
            _prefetch_address(address)
        i += 2
