"""Compiled bookkeeping of the cells of a multi-sequence cache: which are free, and what each token attends to.

Everything works on a few arrays that belong to `numkv.cells.Cells`. Cells are numbers; nothing here touches K or V.

=============  =============================  ==========================================================================
array          shape and dtype                content
=============  =============================  ==========================================================================
``positions``  ``(num_cells,)`` int32         position of each cell's token; in a free cell that of its last token
``owners``     ``(num_cells,)`` int32         how many sequences own each cell; 0: it is free
``vacant``     ``(num_spans,)`` int32         free cells of each span of `SPAN` cells, so that a search skips full ones
``owned``      ``(n,)`` int32                 the cells of one sequence, by position; equal ones in order of arrival
``table``      ``(num_runs, max_len)`` int32  for each run of a batch, ``owned`` of its sequence
=============  =============================  ==========================================================================

A *run* is a number of neighbouring tokens of a batch that belong to one sequence.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import array, build

#: Cells that one element of ``vacant`` counts.
SPAN = 256

#: Results of `scan`.
FINE, BAD_SEQUENCE, BAD_POSITION = range(3)

LAST_POSITION = 2**31 - 1


# -- batches


def scan(positions, sequences, starts):
    """Check a batch, and find its runs: `starts` receives the first token of each, then the number of tokens.

    Returns
    -------
    finding, where, ordered : int
        One of the findings above; the number of runs, or the token that is wrong; whether positions never decrease
        within a run.
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
def join(owners, vacant, cells):
    """Add an owner to each cell."""
    for i in range(len(cells)):
        c = cells[i]
        if owners[c] == 0:
            vacant[c // SPAN] -= 1
        owners[c] += 1


@register_jitable
def leave(owners, vacant, cells):
    """Take an owner from each cell."""
    for i in range(len(cells)):
        c = cells[i]
        owners[c] -= 1
        if owners[c] == 0:
            vacant[c // SPAN] += 1


def find_free(owners, vacant, evicted, out):
    """Find the lowest cells that are free once those of `evicted` lose an owner; nothing is changed.

    Returns
    -------
    int
        How many were found, at most the length of `out`.
    """
    leave(owners, vacant, evicted)
    found = 0
    for span in range(len(vacant)):
        if found == len(out):
            break
        left = vacant[span]
        c = span * SPAN
        while left > 0 and found < len(out):
            if owners[c] == 0:
                out[found] = c
                found += 1
                left -= 1
            c += 1
    join(owners, vacant, evicted)
    return found


def assign(positions, owners, vacant, evicted, cells, new_positions):
    """Take an owner from evicted cells, and give new cells an owner and their positions."""
    leave(owners, vacant, evicted)
    join(owners, vacant, cells)
    for i in range(len(cells)):
        positions[cells[i]] = new_positions[i]


def move(positions, cells, offset):
    """Add an offset to the positions of cells."""
    for i in range(len(cells)):
        positions[cells[i]] += offset


# -- one sequence


@register_jitable
def bisect(positions, owned, position):
    """Return how many cells come before a position."""
    low, high = 0, len(owned)
    while low < high:
        middle = (low + high) // 2
        if positions[owned[middle]] < position:
            low = middle + 1
        else:
            high = middle
    return low


def merge(positions, owned, length, new):
    """Merge new cells, ordered by position, into the first `length`; `owned` has room for them."""
    i, j = length - 1, len(new) - 1
    while j >= 0:
        if i >= 0 and positions[owned[i]] > positions[new[j]]:
            owned[i + j + 1] = owned[i]
            i -= 1
        else:
            owned[i + j + 1] = new[j]
            j -= 1


# -- visible ranges


def visible_cells(positions, table, lens, starts, row_positions, reach):
    """The lowest and the highest cell of the runs' sequences.

    With `reach` from 0 up, only of positions that are at most so far before the first of a run.
    """
    low, high = np.int64(len(positions)), np.int64(-1)
    for r in range(len(lens)):
        first = 0
        if reach >= 0:
            oldest = row_positions[starts[r]]
            for i in range(starts[r], starts[r + 1]):
                oldest = min(oldest, row_positions[i])
            first = bisect(positions, table[r, : lens[r]], oldest - reach)
        owned = table[r, first : lens[r]]
        least, most = np.int32(len(positions)), np.int32(-1)
        for i in range(len(owned)):
            least = min(least, owned[i])
            most = max(most, owned[i])
        low, high = min(low, np.int64(least)), max(high, np.int64(most))
    return low, high


def visible_ranges(positions, table, lens, starts, row_positions, window, chunk, lifted, ranges):
    """Find each token's visible range ``[low, high)``, counted along its run's row of `table`.

    `window` is the number of earlier positions that are visible, -1 for all. `chunk` is the length of a chunk, 0 for
    none. `lifted` is true for each token that also sees later positions, or is empty if none does.
    """
    for r in range(len(lens)):
        owned = table[r, : lens[r]]
        for i in range(starts[r], starts[r + 1]):
            position = row_positions[i]
            oldest = np.int64(0)
            if window >= 0:
                oldest = max(oldest, position - window)
            if chunk > 0:
                oldest = max(oldest, position - position % chunk)
            ranges[i, 0] = bisect(positions, owned, oldest) if oldest > 0 else 0
            if len(lifted) > 0 and lifted[i]:
                ranges[i, 1] = lens[r]
            else:
                ranges[i, 1] = bisect(positions, owned, position + 1)


def fill_mask(table, starts, ranges, first, hidden, mask):
    """Write a mask ``(num_tokens, n)`` over the cells from `first` on: 0 where visible, else `hidden`."""
    for r in range(len(starts) - 1):
        for i in range(starts[r], starts[r + 1]):
            row = mask[i]
            row[:] = hidden
            visible = table[r, ranges[i, 0] : ranges[i, 1]]
            for t in range(len(visible)):
                c = np.int64(visible[t]) - first
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
    "visible_cells": (visible_cells, (_INT32, _TABLE, _INT64, _INT64, _INT64, types.int64)),
    "visible_ranges": (
        visible_ranges,
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
