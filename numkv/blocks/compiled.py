"""Operations on a pool of blocks: reference counts, the free list, and blocks with a cached prefix.

A pool is a few arrays (`numkv.blocks.arrays`). The functions compiled for `numkv.blocks.pool` and the methods of the
jitclass are the same code.

A block is in exactly one state:

- owned (``REF > 0``), in no list;
- kept (``REF == 0``, pinned, holds cached content), in no list;
- evictable (``REF == 0``, holds cached content), in the list `EVICTABLE`, least recently used first;
- free (``REF == 0``, holds nothing), in the list `FREE`, the last one released first.

Functions check all their arguments before they change anything. They return -1 when done. Otherwise they return the
position of the first wrong id, and change nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.experimental import jitclass
from numba.extending import register_jitable

from numkv.blocks.arrays import (
    ALLOCATIONS,
    CACHED,
    EVICTABLE,
    EVICTIONS,
    FREE,
    HITS,
    LAST_MISS,
    LOOKUPS,
    MISSES,
    NEXT,
    NO_MISS,
    NOWHERE,
    PEAK_USED,
    PINNED,
    PINS,
    REF,
    USED,
    block_named,
    drop,
    enter,
    find_one,
    fingerprint,
    home_of,
    insert,
    num_blocks_of,
    same_name,
    same_tokens,
    take_out,
)
from numkv.blocks.audit import audit
from numkv.kernels.builder import array, build


@register_jitable
def _take(state, digests, table, evicted, counters, block):
    """Take a block out of the free or the evictable list; it then has one reference and holds nothing."""
    if state[CACHED, block] == 0:
        take_out(state, counters, FREE, block)
    else:
        take_out(state, counters, EVICTABLE, block)
        drop(state, digests, table, counters, block)
        evicted[home_of(table, digests[block, 0])] = fingerprint(digests[block, 1])
        counters[EVICTIONS] += 1
    state[REF, block] = 1


@register_jitable
def allocate(state, digests, table, evicted, counters, out):
    """Fill `out` with blocks of reference count 1: free ones first, then the least recently used evictable ones.

    Returns
    -------
    int
        -1, or how many blocks can be allocated if they are too few; then nothing has changed.
    """
    num_blocks, n = num_blocks_of(state), len(out)
    if n > counters[FREE] + counters[EVICTABLE]:
        return counters[FREE] + counters[EVICTABLE]
    for i in range(n):
        which = FREE if counters[FREE] > 0 else EVICTABLE
        block = state[NEXT, num_blocks + which]
        _take(state, digests, table, evicted, counters, block)
        out[i] = block
    counters[USED] += n
    counters[ALLOCATIONS] += n
    counters[PEAK_USED] = max(counters[PEAK_USED], counters[USED])
    return np.int64(-1)


@register_jitable
def allocate_ids(state, digests, table, evicted, counters, ids):
    """Take these blocks, each once, with reference count 1; each must be free or evictable."""
    n, marked = len(ids), 0
    while marked < n:
        block = ids[marked]
        if block < 0 or block >= num_blocks_of(state) or state[REF, block] + state[PINS, block] > 0:
            break
        state[REF, block] = 1  # finds ids that are listed twice
        marked += 1
    if marked < n:
        for i in range(marked):
            state[REF, ids[i]] = 0
        return np.int64(marked)
    for i in range(n):
        _take(state, digests, table, evicted, counters, ids[i])
    counters[USED] += n
    counters[ALLOCATIONS] += n
    counters[PEAK_USED] = max(counters[PEAK_USED], counters[USED])
    return np.int64(-1)


@register_jitable
def _shelve(state, counters, ids):
    """Put blocks without references and pins into their list."""
    for i in range(len(ids)):
        block = ids[i]
        if state[REF, block] == 0 and state[CACHED, block] == 0 and state[NEXT, block] == NOWHERE:
            insert(state, counters, FREE, block, False)
    # The end of a prefix is useless without its beginning, so the last blocks are to be evicted first.
    for i in range(len(ids) - 1, -1, -1):
        block = ids[i]
        if (
            state[REF, block] == 0
            and state[CACHED, block] != 0
            and state[PINS, block] == 0
            and state[NEXT, block] == NOWHERE
        ):
            insert(state, counters, EVICTABLE, block, True)


@register_jitable
def _subtract(state, counters, row, counter, ids):
    """Subtract 1 from a row of ``state`` for each id; if one has 0, nothing: the position of that id, or -1."""
    for i in range(len(ids)):
        block = ids[i]
        if block < 0 or block >= num_blocks_of(state) or state[row, block] == 0:
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
    """Release one reference to each block; an id that is listed twice needs two."""
    wrong = _subtract(state, counters, REF, USED, ids)
    if wrong < 0:
        _shelve(state, counters, ids)
    return wrong


@register_jitable
def acquire(state, counters, ids):
    """Acquire one more reference to each block; each must be in use or hold cached content."""
    for i in range(len(ids)):
        block = ids[i]
        if block < 0 or block >= num_blocks_of(state):
            return np.int64(i)
        if state[REF, block] == 0 and state[CACHED, block] == 0:
            return np.int64(i)
    for i in range(len(ids)):
        block = ids[i]
        if state[NEXT, block] != NOWHERE:
            take_out(state, counters, EVICTABLE, block)
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
        if block < 0 or block >= num_blocks_of(state) or state[CACHED, block] == 0:
            return np.int64(i)
    for i in range(len(ids)):
        block = ids[i]
        if state[NEXT, block] != NOWHERE:
            take_out(state, counters, EVICTABLE, block)
        if state[PINS, block] == 0:
            counters[PINNED] += 1
        state[PINS, block] += 1
    return np.int64(-1)


@register_jitable
def unpin(state, counters, ids):
    """Undo one pin of each block."""
    wrong = _subtract(state, counters, PINS, PINNED, ids)
    if wrong < 0:
        _shelve(state, counters, ids)
    return wrong


@register_jitable
def register(state, digests, tokens, table, evicted, counters, ids, names, new_tokens, out):
    """Register blocks in use by `names`, uint64 ``(n, 4)``, and `new_tokens`, int32 ``(n * block_size,)``.

    Content that another block has already stays with that block; `out` receives the registered block of each.
    """
    marked, wrong = len(ids), -1
    for i in range(len(ids)):
        block = ids[i]
        if (
            block < 0
            or block >= num_blocks_of(state)
            or state[REF, block] == 0
            or state[CACHED, block] > 1
        ):
            marked, wrong = i, i
            break
        if state[CACHED, block] == 1 and not (
            same_name(digests, block, names, i) and same_tokens(tokens, block, new_tokens, i)
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
        holder = block_named(digests, table, names, i)
        if holder < 0:
            enter(state, digests, tokens, table, evicted, counters, block, names, new_tokens, i)
        elif same_tokens(tokens, holder, new_tokens, i):
            out[i] = holder
    return np.int64(-1)


@register_jitable
def forget(state, digests, table, counters, ids):
    """Drop cached content; blocks without any are ignored, pinned ones are refused."""
    for i in range(len(ids)):
        block = ids[i]
        if block < 0 or block >= num_blocks_of(state) or state[PINS, block] != 0:
            return np.int64(i)
    for i in range(len(ids)):
        block = ids[i]
        if state[CACHED, block] != 0:
            if state[NEXT, block] != NOWHERE:
                take_out(state, counters, EVICTABLE, block)
            drop(state, digests, table, counters, block)
    _shelve(state, counters, ids)
    return np.int64(-1)


@register_jitable
def lookup(digests, tokens, table, evicted, counters, names, ids, out):
    """Write the blocks of the longest cached prefix to `out`, and return how many there are.

    `names` are uint64 ``(n, 4)``, token `ids` int32, at least ``n * block_size`` of them.
    """
    n = len(names)
    found, reason = n, NO_MISS
    for i in range(n):
        block = find_one(digests, tokens, table, evicted, names, ids, i)
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
    """Find every block separately: `out` receives its id, or the negative of the reason why there is none."""
    for i in range(len(names)):
        out[i] = find_one(digests, tokens, table, evicted, names, ids, i)


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
    "allocate_ids": (allocate_ids, (_STATE, _DIGESTS, _TABLE, _EVICTED, _COUNTERS, _IDS)),
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
        ``num_free``; methods ``ref_count``, ``allocate``, ``allocate_ids``, ``release``, ``acquire``, ``pin``,
        ``unpin``, ``register``, ``forget``, ``lookup``, ``find``. Ids are int32 arrays, names uint64 ``(n, 4)``, token
        ids flat int32 arrays.
    """

    class PoolStruct:
        def __init__(self, state, digests, tokens, table, evicted, counters):
            self.state = state
            self.digests = digests
            self.tokens = tokens
            self.table = table
            self.evicted = evicted
            self.counters = counters

        def _arrays(self):
            return self.state, self.digests, self.tokens, self.table, self.evicted, self.counters

        @property
        def num_blocks(self):
            """Blocks in the pool."""
            return num_blocks_of(self.state)

        @property
        def num_free(self):
            """Blocks that `allocate` can give."""
            return self.counters[FREE] + self.counters[EVICTABLE]

        def ref_count(self, block):
            """References to a block."""
            return np.int64(self.state[REF, block])

        def allocate(self, out):
            """Fill `out` with new blocks; False, and nothing changed, when there are too few."""
            return (
                allocate(self.state, self.digests, self.table, self.evicted, self.counters, out) < 0
            )

        def allocate_ids(self, ids):
            """Take these blocks; -1, or the position of the first that cannot be had, with nothing changed."""
            return allocate_ids(
                self.state, self.digests, self.table, self.evicted, self.counters, ids
            )

        def release(self, ids):
            """Release one reference each; -1, or the position of the first wrong id, with nothing changed."""
            return release(self.state, self.counters, ids)

        def acquire(self, ids):
            """Acquire one more reference each; -1, or the position of the first wrong id, with nothing changed."""
            return acquire(self.state, self.counters, ids)

        def pin(self, ids):
            """Pin blocks; -1, or the position of the first wrong id, with nothing changed."""
            return pin(self.state, self.counters, ids)

        def unpin(self, ids):
            """Unpin blocks; -1, or the position of the first wrong id, with nothing changed."""
            return unpin(self.state, self.counters, ids)

        def register(self, ids, names, tokens, out):
            """Register blocks; -1, or the position of the first wrong id, with nothing changed."""
            return register(*self._arrays(), ids, names, tokens, out)

        def forget(self, ids):
            """Drop cached content; -1, or the position of the first wrong id, with nothing changed."""
            return forget(self.state, self.digests, self.table, self.counters, ids)

        def lookup(self, names, tokens, out):
            """Write the longest cached prefix to `out`, and return how many blocks it has."""
            return lookup(*self._arrays()[1:], names, tokens, out)

        def find(self, names, tokens, out):
            """Write the block of each name, or a negative number, to `out`."""
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
