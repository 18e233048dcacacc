"""The arrays of a pool of blocks, and the functions that keep lists and the table of names in them.

=============  =====================================  ==================================================================
array          shape and dtype                        content
=============  =====================================  ==================================================================
``state``      ``(5, num_blocks + 2)`` int32          rows `REF` `PINS` `CACHED` `PREV` `NEXT`; the last two columns are
                                                      the heads of the two free lists, which are circular
``digests``    ``(num_blocks, 4)`` uint64             the 32 bytes that name a block's content
``tokens``     ``(num_blocks, block_size)`` int32     token ids of that content
``table``      ``(capacity,)`` int32                  open addressing, digest to block, -1: empty; at most half full
``evicted``    ``(capacity,)`` uint64                 fingerprints of evicted names, the latest for each entry
``counters``   ``(NUM_COUNTERS,)`` int64              see the names below
=============  =====================================  ==================================================================

Blocks are ids; nothing here touches K or V.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

#: Rows of ``state``.
REF, PINS, CACHED, PREV, NEXT = range(5)

#: ``NEXT`` of a block in no list.
NOWHERE = -1

#: Counters. `FREE` and `EVICTABLE` number the lists too: list ``i`` has its head in column ``num_blocks + i``.
(
    FREE,
    EVICTABLE,
    USED,
    HOLDING,
    PINNED,
    PEAK_USED,
    ALLOCATIONS,
    EVICTIONS,
    STORES,
    LOOKUPS,
    HITS,
    MISSES,
    LAST_MISS,
    NUM_COUNTERS,
) = range(14)

#: Why a lookup stopped; its negative is what `find_one` returns.
NO_MISS, ABSENT, EVICTED, TOKENS_DIFFER = range(4)


def new_arrays(num_blocks: int, block_size: int) -> tuple[Any, ...]:
    """Return the arrays of a pool whose blocks are all free.

    Returns
    -------
    tuple of arrays
        ``state, digests, tokens, table, evicted, counters``.
    """
    state = np.zeros((5, num_blocks + 2), np.int32)
    free, evictable = num_blocks + FREE, num_blocks + EVICTABLE
    ring = np.append(np.arange(num_blocks), free)  # block 0 is handed out first
    state[NEXT, np.roll(ring, 1)] = ring
    state[PREV, ring] = np.roll(ring, 1)
    state[PREV, evictable] = state[NEXT, evictable] = evictable
    # Half empty at most, so that probes are short and always end.
    capacity = 1 << max(1, (2 * num_blocks - 1).bit_length())
    counters = np.zeros(NUM_COUNTERS, np.int64)
    counters[FREE] = num_blocks
    return (
        state,
        np.zeros((num_blocks, 4), np.uint64),
        np.zeros((num_blocks, block_size), np.int32),
        np.full(capacity, -1, np.int32),
        np.zeros(capacity, np.uint64),
        counters,
    )


# -- lists


@register_jitable
def num_blocks_of(state):
    """Number of blocks."""
    return state.shape[1] - 2


@register_jitable
def insert(state, counters, which, block, at_end):
    """Insert a block at the beginning or the end of a list."""
    head = num_blocks_of(state) + which
    before = state[PREV, head] if at_end else np.int32(head)
    after = np.int32(head) if at_end else state[NEXT, head]
    state[PREV, block] = before
    state[NEXT, block] = after
    state[NEXT, before] = block
    state[PREV, after] = block
    counters[which] += 1


@register_jitable
def take_out(state, counters, which, block):
    """Remove a block from a list."""
    before, after = state[PREV, block], state[NEXT, block]
    state[NEXT, before] = after
    state[PREV, after] = before
    state[PREV, block] = NOWHERE
    state[NEXT, block] = NOWHERE
    counters[which] -= 1


# -- the table


@register_jitable
def home_of(table, word):
    """Entry of the table at which the search for a digest begins; sha256 needs no further mixing."""
    return np.int64(word & np.uint64(len(table) - 1))


@register_jitable
def fingerprint(word):
    """Fingerprint of an evicted name; 0 stands for none."""
    return word | np.uint64(1)


@register_jitable
def same_name(digests, block, names, i):
    return (
        digests[block, 0] == names[i, 0]
        and digests[block, 1] == names[i, 1]
        and digests[block, 2] == names[i, 2]
        and digests[block, 3] == names[i, 3]
    )


@register_jitable
def same_tokens(tokens, block, ids, i):
    block_size = tokens.shape[1]
    same = True
    for t in range(block_size):
        same &= tokens[block, t] == ids[i * block_size + t]
    return same


@register_jitable
def block_named(digests, table, names, i):
    """Return the block of this name, or -1."""
    mask = len(table) - 1
    place = home_of(table, names[i, 0])
    while table[place] >= 0:
        if same_name(digests, table[place], names, i):
            return np.int64(table[place])
        place = (place + 1) & mask
    return np.int64(-1)


@register_jitable
def find_one(digests, tokens, table, evicted, names, ids, i):
    """Return the block with content `i`, or the negative of the reason why there is none."""
    block = block_named(digests, table, names, i)
    if block >= 0:
        if same_tokens(tokens, block, ids, i):
            return block
        return np.int64(-TOKENS_DIFFER)
    if evicted[home_of(table, names[i, 0])] == fingerprint(names[i, 1]):
        return np.int64(-EVICTED)
    return np.int64(-ABSENT)


@register_jitable
def enter(state, digests, tokens, table, evicted, counters, block, names, ids, i):
    """Enter a block into the table of names."""
    for w in range(4):
        digests[block, w] = names[i, w]
    block_size = tokens.shape[1]
    for t in range(block_size):
        tokens[block, t] = ids[i * block_size + t]
    mask = len(table) - 1
    home = home_of(table, names[i, 0])
    place = home
    while table[place] >= 0:
        place = (place + 1) & mask
    table[place] = block
    if evicted[home] == fingerprint(names[i, 1]):
        evicted[home] = np.uint64(0)
    state[CACHED, block] = 1
    counters[HOLDING] += 1
    counters[STORES] += 1


@register_jitable
def drop(state, digests, table, counters, block):
    """Drop a block from the table of names; later entries of the probe move up, so that no tombstones pile up."""
    mask = len(table) - 1
    hole = home_of(table, digests[block, 0])
    while table[hole] != block:
        hole = (hole + 1) & mask
    place = (hole + 1) & mask
    while table[place] >= 0:
        home = home_of(table, digests[table[place], 0])
        # An entry may move to the hole unless its own search begins after the hole.
        if ((place - home) & mask) >= ((place - hole) & mask):
            table[hole] = table[place]
            hole = place
        place = (place + 1) & mask
    table[hole] = -1
    state[CACHED, block] = 0
    counters[HOLDING] -= 1
