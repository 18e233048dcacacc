"""Groups of several heads, which are read together where blocks are short; see `offsets`."""

from __future__ import annotations

from numkv.kernels.cpu.attention.offsets import ask_at_once, locate_next_head, spread
from numkv.kernels.cpu.attention.state import layout_in, offsets_of


def find_next_head(state, here, to):
    """The step `NEXT_HEAD`: the tables of a turn, at `to`, from those of the head before it. Returns 1."""
    locate_next_head(offsets_of(state), here, to, layout_in(state))
    return 1


def spread_group(state, table, heads, part, parts, at_once):
    """The step `SPREAD`: what a turn asks for of the group whose first turn has its tables at `table`.

    If not 0, `at_once` has all of it prefetched now, for want of a turn that is long enough. Returns 1.
    """
    offsets = offsets_of(state)
    spread(offsets, table, heads, part, parts, layout_in(state))
    if at_once:
        ask_at_once(offsets)
    return 1
