"""Bookkeeping of a pool of blocks: who uses which block, which are free, which hold a cached prefix.

A pool is a handful of arrays, and everything here works on them: the functions compiled for `numkv.blocks.pool` and the
methods of the jitclass are the same code. Blocks are ids; nothing here touches K or V.

=============  =====================================  ==================================================================
array          shape and dtype                        content
=============  =====================================  ==================================================================
``state``      ``(5, num_blocks + 2)`` int32          rows `REF` `PINS` `CACHED` `PREV` `NEXT`; the last two columns are
                                                      the heads of the two free lists, which are circular
``digests``    ``(num_blocks, 4)`` uint64             the 32 bytes that name a block's content
``tokens``     ``(num_blocks, block_size)`` int32     token ids of that content
``table``      ``(capacity,)`` int32                  open addressing, digest to block, -1: empty; at most half full
``evicted``    ``(capacity,)`` uint64                 fingerprints of names that were evicted, the latest per place
``counters``   ``(NUM_COUNTERS,)`` int64              see the names below
=============  =====================================  ==================================================================

A block is in exactly one state:

- in use (``REF > 0``), in no list;
- kept (``REF == 0``, pinned, holds cached content), in no list;
- evictable (``REF == 0``, holds cached content), in the list `EVICTABLE`, least recently used first;
- free (``REF == 0``, holds nothing), in the list `FREE`, the last one freed first.

Functions look at all their arguments before they change anything; they return -1 when done and otherwise the position
of the first id that is wrong, with everything as it was.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.experimental import jitclass
from numba.extending import register_jitable

from numkv.kernels.builder import array, build

__all__ = [
    "acquire",
    "allocate",
    "audit",
    "compiled",
    "find",
    "forget",
    "lookup",
    "new_arrays",
    "pin",
    "pool_struct",
    "register",
    "release",
    "unpin",
]

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

#: Why a lookup stopped; the negative of it is what `_find_one` returns.
NO_MISS, ABSENT, EVICTED, TOKENS_DIFFER = range(4)


def new_arrays(num_blocks: int, block_size: int) -> tuple[Any, ...]:
    """The arrays of a pool whose blocks are all free.

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
def _size(state):
    """How many blocks there are."""
    return state.shape[1] - 2


@register_jitable
def _insert(state, counters, which, block, at_end):
    """Put a block at the beginning or the end of a list."""
    head = _size(state) + which
    before = state[PREV, head] if at_end else np.int32(head)
    after = np.int32(head) if at_end else state[NEXT, head]
    state[PREV, block] = before
    state[NEXT, block] = after
    state[NEXT, before] = block
    state[PREV, after] = block
    counters[which] += 1


@register_jitable
def _take_out(state, counters, which, block):
    """Take a block out of a list."""
    before, after = state[PREV, block], state[NEXT, block]
    state[NEXT, before] = after
    state[PREV, after] = before
    state[PREV, block] = NOWHERE
    state[NEXT, block] = NOWHERE
    counters[which] -= 1


# -- the table


@register_jitable
def _home(table, word):
    """Where the search for a digest begins; sha256 needs no further mixing."""
    return np.int64(word & np.uint64(len(table) - 1))


@register_jitable
def _fingerprint(word):
    """What stands for an evicted name; 0 is for none."""
    return word | np.uint64(1)


@register_jitable
def _same_name(digests, block, names, i):
    return (
        digests[block, 0] == names[i, 0]
        and digests[block, 1] == names[i, 1]
        and digests[block, 2] == names[i, 2]
        and digests[block, 3] == names[i, 3]
    )


@register_jitable
def _same_tokens(tokens, block, ids, i):
    block_size = tokens.shape[1]
    same = True
    for t in range(block_size):
        same &= tokens[block, t] == ids[i * block_size + t]
    return same


@register_jitable
def _named(digests, table, names, i):
    """The block that holds content of this name, or -1."""
    mask = len(table) - 1
    place = _home(table, names[i, 0])
    while table[place] >= 0:
        if _same_name(digests, table[place], names, i):
            return np.int64(table[place])
        place = (place + 1) & mask
    return np.int64(-1)


@register_jitable
def _find_one(digests, tokens, table, evicted, names, ids, i):
    """The block that holds content `i`, or the negative of the reason why there is none."""
    block = _named(digests, table, names, i)
    if block >= 0:
        if _same_tokens(tokens, block, ids, i):
            return block
        return np.int64(-TOKENS_DIFFER)
    if evicted[_home(table, names[i, 0])] == _fingerprint(names[i, 1]):
        return np.int64(-EVICTED)
    return np.int64(-ABSENT)


@register_jitable
def _hold(state, digests, tokens, table, evicted, counters, block, names, ids, i):
    """Make a block findable."""
    for w in range(4):
        digests[block, w] = names[i, w]
    block_size = tokens.shape[1]
    for t in range(block_size):
        tokens[block, t] = ids[i * block_size + t]
    mask = len(table) - 1
    home = _home(table, names[i, 0])
    place = home
    while table[place] >= 0:
        place = (place + 1) & mask
    table[place] = block
    if evicted[home] == _fingerprint(names[i, 1]):
        evicted[home] = np.uint64(0)
    state[CACHED, block] = 1
    counters[HOLDING] += 1
    counters[STORES] += 1


@register_jitable
def _drop(state, digests, table, counters, block):
    """Make a block unfindable; later entries of the probe move up, so that no marks of deleted ones pile up."""
    mask = len(table) - 1
    hole = _home(table, digests[block, 0])
    while table[hole] != block:
        hole = (hole + 1) & mask
    place = (hole + 1) & mask
    while table[place] >= 0:
        home = _home(table, digests[table[place], 0])
        # An entry may move to the hole unless its own search begins after the hole.
        if ((place - home) & mask) >= ((place - hole) & mask):
            table[hole] = table[place]
            hole = place
        place = (place + 1) & mask
    table[hole] = -1
    state[CACHED, block] = 0
    counters[HOLDING] -= 1


# -- operations


@register_jitable
def allocate(state, digests, table, evicted, counters, out):
    """Fill `out` with blocks of reference count 1: free ones first, then the least recently used evictable ones.

    Returns
    -------
    int
        -1, or how many blocks are to be had when they are too few; then nothing has changed.
    """
    num_blocks, n = _size(state), len(out)
    if n > counters[FREE] + counters[EVICTABLE]:
        return counters[FREE] + counters[EVICTABLE]
    for i in range(n):
        if counters[FREE] > 0:
            block = state[NEXT, num_blocks + FREE]
            _take_out(state, counters, FREE, block)
        else:
            block = state[NEXT, num_blocks + EVICTABLE]
            _take_out(state, counters, EVICTABLE, block)
            _drop(state, digests, table, counters, block)
            evicted[_home(table, digests[block, 0])] = _fingerprint(digests[block, 1])
            counters[EVICTIONS] += 1
        state[REF, block] = 1
        out[i] = block
    counters[USED] += n
    counters[ALLOCATIONS] += n
    counters[PEAK_USED] = max(counters[PEAK_USED], counters[USED])
    return np.int64(-1)


@register_jitable
def _shelve(state, counters, ids):
    """Put blocks that nobody uses or pins any more into their list."""
    for i in range(len(ids)):
        block = ids[i]
        if state[REF, block] == 0 and state[CACHED, block] == 0 and state[NEXT, block] == NOWHERE:
            _insert(state, counters, FREE, block, False)
    # The end of a prefix is worth nothing without its beginning, so the last blocks are to be evicted first.
    for i in range(len(ids) - 1, -1, -1):
        block = ids[i]
        if (
            state[REF, block] == 0
            and state[CACHED, block] != 0
            and state[PINS, block] == 0
            and state[NEXT, block] == NOWHERE
        ):
            _insert(state, counters, EVICTABLE, block, True)


@register_jitable
def _subtract(state, counters, row, counter, ids):
    """Take one from a row of ``state`` for each id, or from none: the position of an id that has none left."""
    for i in range(len(ids)):
        block = ids[i]
        if block < 0 or block >= _size(state) or state[row, block] == 0:
            for j in range(i):
                if state[row, ids[j]] == 0:
                    counters[counter] += 1
                state[row, ids[j]] += 1
            return np.int64(i)
        state[row, block] -= 1
        if state[row, block] == 0:
            counters[counter] -= 1
    return np.int64(-1)


@register_jitable
def release(state, counters, ids):
    """Give back one reference to each block; an id that is listed twice needs two."""
    wrong = _subtract(state, counters, REF, USED, ids)
    if wrong < 0:
        _shelve(state, counters, ids)
    return wrong


@register_jitable
def acquire(state, counters, ids):
    """Take one more reference to each block; each must be in use or hold cached content."""
    for i in range(len(ids)):
        block = ids[i]
        if block < 0 or block >= _size(state):
            return np.int64(i)
        if state[REF, block] == 0 and state[CACHED, block] == 0:
            return np.int64(i)
    for i in range(len(ids)):
        block = ids[i]
        if state[NEXT, block] != NOWHERE:
            _take_out(state, counters, EVICTABLE, block)
        if state[REF, block] == 0:
            counters[USED] += 1
        state[REF, block] += 1
    counters[PEAK_USED] = max(counters[PEAK_USED], counters[USED])
    return np.int64(-1)


@register_jitable
def pin(state, counters, ids):
    """Keep blocks from eviction; each must hold cached content. Pins are counted."""
    for i in range(len(ids)):
        block = ids[i]
        if block < 0 or block >= _size(state) or state[CACHED, block] == 0:
            return np.int64(i)
    for i in range(len(ids)):
        block = ids[i]
        if state[NEXT, block] != NOWHERE:
            _take_out(state, counters, EVICTABLE, block)
        if state[PINS, block] == 0:
            counters[PINNED] += 1
        state[PINS, block] += 1
    return np.int64(-1)


@register_jitable
def unpin(state, counters, ids):
    """Take back one pin of each block."""
    wrong = _subtract(state, counters, PINS, PINNED, ids)
    if wrong < 0:
        _shelve(state, counters, ids)
    return wrong


@register_jitable
def register(state, digests, tokens, table, evicted, counters, ids, names, new_tokens, out):
    """Make blocks in use findable by `names`, uint64 ``(n, 4)``, of `new_tokens`, int32 ``(n * block_size,)``.

    Content that another block holds already stays with that block; `out` receives who holds it now.
    """
    marked, wrong = len(ids), -1
    for i in range(len(ids)):
        block = ids[i]
        if block < 0 or block >= _size(state) or state[REF, block] == 0 or state[CACHED, block] > 1:
            marked, wrong = i, i
            break
        if state[CACHED, block] == 1 and not (
            _same_name(digests, block, names, i) and _same_tokens(tokens, block, new_tokens, i)
        ):
            marked, wrong = i, i
            break
        state[CACHED, block] += 2  # finds ids that are listed twice
    for i in range(marked):
        state[CACHED, ids[i]] -= 2
    if wrong >= 0:
        return np.int64(wrong)
    for i in range(len(ids)):
        block = ids[i]
        out[i] = block
        holder = _named(digests, table, names, i)
        if holder < 0:
            _hold(state, digests, tokens, table, evicted, counters, block, names, new_tokens, i)
        elif _same_tokens(tokens, holder, new_tokens, i):
            out[i] = holder
    return np.int64(-1)


@register_jitable
def forget(state, digests, table, counters, ids):
    """Drop cached content; blocks that hold none are left alone, pinned ones are refused."""
    for i in range(len(ids)):
        block = ids[i]
        if block < 0 or block >= _size(state) or state[PINS, block] != 0:
            return np.int64(i)
    for i in range(len(ids)):
        block = ids[i]
        if state[CACHED, block] != 0:
            if state[NEXT, block] != NOWHERE:
                _take_out(state, counters, EVICTABLE, block)
            _drop(state, digests, table, counters, block)
    _shelve(state, counters, ids)
    return np.int64(-1)


@register_jitable
def lookup(digests, tokens, table, evicted, counters, names, ids, out):
    """Put the blocks of the longest cached prefix into `out`; how many they are.

    It is looked for by `names`, uint64 ``(n, 4)``, and token `ids`, int32 with at least ``n * block_size`` of them.
    """
    n = len(names)
    found, reason = n, NO_MISS
    for i in range(n):
        block = _find_one(digests, tokens, table, evicted, names, ids, i)
        if block < 0:
            found, reason = i, -block
            break
        out[i] = block
    counters[LOOKUPS] += 1
    counters[HITS] += found
    counters[MISSES] += n - found
    counters[LAST_MISS] = reason
    return np.int64(found)


@register_jitable
def find(digests, tokens, table, evicted, names, ids, out):
    """Find every block on its own: `out` receives its id, or the negative of the reason why there is none."""
    for i in range(len(names)):
        out[i] = _find_one(digests, tokens, table, evicted, names, ids, i)


# -- the proof

#: What `audit` finds.
SOUND, BAD_LINK, BAD_NUMBER, EMPTY_PIN, BAD_STATE, BAD_TABLE, UNFINDABLE, BAD_COUNTER = range(8)


@register_jitable
def audit(state, digests, table, counters):
    """Look for a contradiction; nothing in the arrays is trusted, so corrupted ones are safe to look at.

    Returns
    -------
    finding, where : int
        One of the findings above, and the block, list head or counter that it is about.
    """
    num_blocks = _size(state)
    seen = np.zeros(num_blocks, np.int32)
    for which in range(2):
        head = num_blocks + which
        before, block, length = head, np.int64(state[NEXT, head]), 0
        while block != head:
            if block < 0 or block >= num_blocks:
                return BAD_LINK, before
            if state[PREV, block] != before or seen[block] != 0:
                return BAD_LINK, block
            seen[block] = 1 + which
            length += 1
            before, block = block, np.int64(state[NEXT, block])
        if state[PREV, head] != before:
            return BAD_LINK, head
        if length != counters[which]:
            return BAD_COUNTER, which
    used, holding, pinned = 0, 0, 0
    for block in range(num_blocks):
        ref, pins, cached = state[REF, block], state[PINS, block], state[CACHED, block]
        if ref < 0 or pins < 0 or cached < 0 or cached > 1:
            return BAD_NUMBER, block
        if pins > 0 and cached == 0:
            return EMPTY_PIN, block
        place = 0
        if ref == 0 and pins == 0:
            place = 1 + (EVICTABLE if cached != 0 else FREE)
        if seen[block] != place:
            return BAD_STATE, block
        if place == 0 and (state[NEXT, block] != NOWHERE or state[PREV, block] != NOWHERE):
            return BAD_STATE, block
        used += ref > 0
        holding += cached
        pinned += pins > 0
    entries = 0
    for place in range(len(table)):
        block = np.int64(table[place])
        if block != -1:
            entries += 1
            if block < 0 or block >= num_blocks or state[CACHED, block] == 0:
                return BAD_TABLE, block
    if entries != holding:
        return BAD_TABLE, -1
    for block in range(num_blocks):
        if state[CACHED, block] != 0 and _named(digests, table, digests, block) != block:
            return UNFINDABLE, block
    if used != counters[USED]:
        return BAD_COUNTER, USED
    if holding != counters[HOLDING]:
        return BAD_COUNTER, HOLDING
    if pinned != counters[PINNED]:
        return BAD_COUNTER, PINNED
    return SOUND, -1


# -- compiled

_STATE = types.int32[:, ::1]
_DIGESTS = types.uint64[:, ::1]
_TOKENS = types.int32[:, ::1]
_TABLE = types.int32[::1]
_EVICTED = types.uint64[::1]
_COUNTERS = types.int64[::1]
_OUT = types.int32[::1]
_IDS = array(types.int32, 1)
_NAMES = array(types.uint64, 2)

_OPERATIONS = {
    "allocate": (allocate, (_STATE, _DIGESTS, _TABLE, _EVICTED, _COUNTERS, _OUT)),
    "release": (release, (_STATE, _COUNTERS, _IDS)),
    "acquire": (acquire, (_STATE, _COUNTERS, _IDS)),
    "pin": (pin, (_STATE, _COUNTERS, _IDS)),
    "unpin": (unpin, (_STATE, _COUNTERS, _IDS)),
    "register": (
        register,
        (_STATE, _DIGESTS, _TOKENS, _TABLE, _EVICTED, _COUNTERS, _IDS, _NAMES, _IDS, _OUT),
    ),
    "forget": (forget, (_STATE, _DIGESTS, _TABLE, _COUNTERS, _IDS)),
    "lookup": (lookup, (_DIGESTS, _TOKENS, _TABLE, _EVICTED, _COUNTERS, _NAMES, _IDS, _OUT)),
    "find": (find, (_DIGESTS, _TOKENS, _TABLE, _EVICTED, _NAMES, _IDS, _OUT)),
    "audit": (audit, (_STATE, _DIGESTS, _TABLE, _COUNTERS)),
}


@functools.cache
def compiled(name: str) -> Any:
    """An operation of this module, compiled for a pool's arrays."""
    function, signature = _OPERATIONS[name]
    return build(function, signature, label=f"blocks.{name}")


@functools.cache
def pool_struct() -> Any:
    """The jitclass of a `numkv.blocks.pool.BlockPool`.

    Returns
    -------
    jitclass
        Fields ``state``, ``digests``, ``tokens``, ``table``, ``evicted``, ``counters``; properties ``num_blocks``,
        ``num_free``; methods ``ref_count``, ``allocate``, ``release``, ``acquire``, ``pin``, ``unpin``, ``register``,
        ``forget``, ``lookup``, ``find``. Ids are int32 arrays, names uint64 ``(n, 4)``, token ids flat int32 arrays.
    """

    class PoolStruct:
        def __init__(self, state, digests, tokens, table, evicted, counters):
            self.state = state
            self.digests = digests
            self.tokens = tokens
            self.table = table
            self.evicted = evicted
            self.counters = counters

        @property
        def num_blocks(self):
            """Blocks in the pool."""
            return _size(self.state)

        @property
        def num_free(self):
            """Blocks that `allocate` can hand out."""
            return self.counters[FREE] + self.counters[EVICTABLE]

        def ref_count(self, block):
            """References to a block."""
            return np.int64(self.state[REF, block])

        def allocate(self, out):
            """Fill `out` with new blocks; False, and nothing changed, when there are too few."""
            return (
                allocate(self.state, self.digests, self.table, self.evicted, self.counters, out) < 0
            )

        def release(self, ids):
            """Give back one reference each; -1, or where the first wrong id is, with nothing changed."""
            return release(self.state, self.counters, ids)

        def acquire(self, ids):
            """Take one more reference each; -1, or where the first wrong id is, with nothing changed."""
            return acquire(self.state, self.counters, ids)

        def pin(self, ids):
            """Pin blocks; -1, or where the first wrong id is, with nothing changed."""
            return pin(self.state, self.counters, ids)

        def unpin(self, ids):
            """Unpin blocks; -1, or where the first wrong id is, with nothing changed."""
            return unpin(self.state, self.counters, ids)

        def register(self, ids, names, tokens, out):
            """Make blocks findable; -1, or where the first wrong id is, with nothing changed."""
            return register(
                self.state,
                self.digests,
                self.tokens,
                self.table,
                self.evicted,
                self.counters,
                ids,
                names,
                tokens,
                out,
            )

        def forget(self, ids):
            """Drop cached content; -1, or where the first wrong id is, with nothing changed."""
            return forget(self.state, self.digests, self.table, self.counters, ids)

        def lookup(self, names, tokens, out):
            """Put the longest cached prefix into `out`; how many blocks it has."""
            return lookup(
                self.digests,
                self.tokens,
                self.table,
                self.evicted,
                self.counters,
                names,
                tokens,
                out,
            )

        def find(self, names, tokens, out):
            """Put the block of each name into `out`, or a negative number."""
            find(self.digests, self.tokens, self.table, self.evicted, names, tokens, out)

    return jitclass(
        [
            ("state", _STATE),
            ("digests", _DIGESTS),
            ("tokens", _TOKENS),
            ("table", _TABLE),
            ("evicted", _EVICTED),
            ("counters", _COUNTERS),
        ]
    )(PoolStruct)
