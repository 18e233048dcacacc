"""Bookkeeping of the cells of a multi-sequence cache: which are free, and what each sequence sees.

Everything is done on a handful of arrays, which `numkv.cells.Cells` holds. Cells are numbers; nothing here touches K or
V.

=============  =============================  ==========================================================================
array          shape and dtype                content
=============  =============================  ==========================================================================
``positions``  ``(num_cells,)`` int32         position of each cell's token; of a free cell the last token's
``holders``    ``(num_cells,)`` int32         how many sequences hold each cell; 0: it is free
``vacant``     ``(num_groups,)`` int32        free cells of each `GROUP` neighbours: a search passes over full groups
``held``       ``(n,)`` int32                 the cells of one sequence, by position; equal ones in order of arrival
``table``      ``(num_runs, max_len)`` int32  a row for each run of a batch: ``held`` of its sequence
=============  =============================  ==========================================================================

A *run* is a number of neighbouring rows of a batch that are of one sequence.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import array, build

__all__ = ["BAD_POSITION", "BAD_SEQUENCE", "FINE", "compiled", "num_groups"]

#: Cells that one element of ``vacant`` counts.
GROUP = 256

#: What `scan` finds.
FINE, BAD_SEQUENCE, BAD_POSITION = range(3)

LAST_POSITION = 2**31 - 1


def num_groups(num_cells: int) -> int:
    """Elements of ``vacant``."""
    return -(-num_cells // GROUP)


# -- batches


def scan(positions, sequences, starts):
    """Look at a batch: `starts` receives the first row of each run, and the number of rows after the last.

    Returns
    -------
    finding, where, ordered : int
        One of the findings above; the number of runs, or the row that is wrong; whether positions fall in no run.
    """
    runs, ordered = 0, 1
    for i in range(len(positions)):
        if sequences[i] < 0:
            return BAD_SEQUENCE, i, ordered
        if positions[i] < 0 or positions[i] > LAST_POSITION:
            return BAD_POSITION, i, ordered
        if i == 0 or sequences[i] != sequences[i - 1]:
            starts[runs] = i
            runs += 1
        elif positions[i] < positions[i - 1]:
            ordered = 0
    starts[runs] = len(positions)
    return FINE, runs, ordered


# -- cells


@register_jitable
def _join(holders, vacant, cells):
    """One more sequence holds each cell."""
    for i in range(len(cells)):
        c = cells[i]
        if holders[c] == 0:
            vacant[c // GROUP] -= 1
        holders[c] += 1


@register_jitable
def _leave(holders, vacant, cells):
    """One sequence fewer holds each cell."""
    for i in range(len(cells)):
        c = cells[i]
        holders[c] -= 1
        if holders[c] == 0:
            vacant[c // GROUP] += 1


def join(holders, vacant, cells):
    """One more sequence holds each cell."""
    _join(holders, vacant, cells)


def leave(holders, vacant, cells):
    """One sequence fewer holds each cell."""
    _leave(holders, vacant, cells)


def find_free(holders, vacant, evicted, out):
    """Find the lowest cells that are free once those of `evicted` have been left; all stays as it is.

    Returns
    -------
    int
        How many there are, at most as many as `out` takes.
    """
    _leave(holders, vacant, evicted)
    found = 0
    for group in range(len(vacant)):
        if found == len(out):
            break
        left = vacant[group]
        c = group * GROUP
        while left > 0 and found < len(out):
            if holders[c] == 0:
                out[found] = c
                found += 1
                left -= 1
            c += 1
    _join(holders, vacant, evicted)
    return found


def assign(positions, holders, vacant, evicted, cells, new_positions):
    """Leave the evicted cells, and give positions to new ones."""
    _leave(holders, vacant, evicted)
    _join(holders, vacant, cells)
    for i in range(len(cells)):
        positions[cells[i]] = new_positions[i]


def move(positions, cells, offset):
    """Add to the positions of cells."""
    for i in range(len(cells)):
        positions[cells[i]] += offset


# -- one sequence


@register_jitable
def _bisect(positions, held, length, position):
    """How many of the first `length` cells come before a position."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if positions[held[middle]] < position:
            low = middle + 1
        else:
            high = middle
    return low


def bisect(positions, held, position):
    """How many cells come before a position."""
    return _bisect(positions, held, len(held), position)


def merge(positions, held, length, new):
    """Put new cells, by position, in among the first `length`; `held` has room for them."""
    i, j = length - 1, len(new) - 1
    while j >= 0:
        if i >= 0 and positions[held[i]] > positions[new[j]]:
            held[i + j + 1] = held[i]
            i -= 1
        else:
            held[i + j + 1] = new[j]
            j -= 1


# -- what a batch sees


def extent(positions, table, lens, starts, row_positions, reach):
    """The lowest and the highest cell of the runs' sequences; with `reach` of 0 or more, only from so far back."""
    low, high = np.int64(len(positions)), np.int64(-1)
    for r in range(len(lens)):
        first = 0
        if reach >= 0:
            oldest = row_positions[starts[r]]
            for i in range(starts[r], starts[r + 1]):
                oldest = min(oldest, row_positions[i])
            first = _bisect(positions, table[r], lens[r], oldest - reach)
        held = table[r, first : lens[r]]
        least, most = np.int32(len(positions)), np.int32(-1)
        for i in range(len(held)):
            least = min(least, held[i])
            most = max(most, held[i])
        low, high = min(low, np.int64(least)), max(high, np.int64(most))
    return low, high


def find_ranges(positions, table, lens, starts, row_positions, window, chunk, lifted, ranges):
    """Find the cells of its run's row of `table`, ``[low, high)``, that each row of a batch sees.

    `window` is the number of earlier positions, -1 for all; `chunk` the length of a chunk, 0 for none; `lifted` says
    of each row whether it sees later positions too, or is empty.
    """
    for r in range(len(lens)):
        for i in range(starts[r], starts[r + 1]):
            position = row_positions[i]
            oldest = np.int64(0)
            if window >= 0:
                oldest = max(oldest, position - window)
            if chunk > 0:
                oldest = max(oldest, position - position % chunk)
            ranges[i, 0] = _bisect(positions, table[r], lens[r], oldest) if oldest > 0 else 0
            if len(lifted) > 0 and lifted[i]:
                ranges[i, 1] = lens[r]
            else:
                ranges[i, 1] = _bisect(positions, table[r], lens[r], position + 1)


def fill_mask(table, starts, ranges, first, hidden, mask):
    """Write a mask ``(num_rows, n)`` over the cells from `first` on: 0 where a row sees a cell, else `hidden`."""
    for r in range(len(starts) - 1):
        for i in range(starts[r], starts[r + 1]):
            row = mask[i]
            row[:] = hidden
            seen = table[r, ranges[i, 0] : ranges[i, 1]]
            for t in range(len(seen)):
                c = np.int64(seen[t]) - first
                if c >= 0 and c < len(row):
                    row[c] = 0


# -- compiled

_INT32 = array(types.int32, 1)
_INT64 = array(types.int64, 1)
_TABLE = types.Array(types.int32, 2, "C", readonly=True)
_RANGES = types.Array(types.int64, 2, "C", readonly=True)
_OUT32 = array(types.int32, 1, out=True)
_OUT64 = array(types.int64, 1, out=True)


def _mask_signature(word):
    return (_TABLE, _INT64, _RANGES, types.int64, word, word[:, ::1])


_OPERATIONS = {
    "scan": (scan, (_INT64, _INT64, _OUT64)),
    "join": (join, (_OUT32, _OUT32, _INT32)),
    "leave": (leave, (_OUT32, _OUT32, _INT32)),
    "find_free": (find_free, (_OUT32, _OUT32, _INT32, _OUT64)),
    "assign": (assign, (_OUT32, _OUT32, _OUT32, _INT32, _INT64, _INT64)),
    "move": (move, (_OUT32, _INT32, types.int64)),
    "bisect": (bisect, (_INT32, _INT32, types.int64)),
    "merge": (merge, (_INT32, _OUT32, types.int64, _INT64)),
    "extent": (extent, (_INT32, _TABLE, _INT64, _INT64, _INT64, types.int64)),
    "find_ranges": (
        find_ranges,
        (
            _INT32, _TABLE, _INT64, _INT64, _INT64, types.int64, types.int64,
            array(types.boolean, 1), types.int64[:, ::1],
        ),
    ),
    "fill_mask uint16": (fill_mask, _mask_signature(types.uint16)),
    "fill_mask float32": (fill_mask, _mask_signature(types.float32)),
    "fill_mask float64": (fill_mask, _mask_signature(types.float64)),
}  # fmt: skip


@functools.cache
def compiled(name: str) -> Any:
    """An operation of this module, compiled; ``fill_mask`` with the dtype of the mask's words."""
    function, signature = _OPERATIONS[name]
    return build(function, signature, label=f"cells.{name}")
