"""The audit of a pool of blocks: a proof of its accounting, or the first contradiction in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from numkv.blocks.arrays import (
    CACHED,
    EVICTABLE,
    FREE,
    HOLDING,
    NEXT,
    NOWHERE,
    PINNED,
    PINS,
    PREV,
    REF,
    USED,
    block_named,
    num_blocks_of,
)

#: Results of `audit`.
SOUND, BAD_LINK, BAD_NUMBER, EMPTY_PIN, BAD_STATE, BAD_TABLE, UNFINDABLE, BAD_COUNTER = range(8)


@register_jitable
def audit(state, digests, table, counters):
    """Look for a contradiction; nothing in the arrays is trusted, so corrupted ones can be audited.

    Returns
    -------
    finding, where : int
        One of the findings above, and the block, list head or counter that it concerns.
    """
    num_blocks = num_blocks_of(state)
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
        if state[CACHED, block] != 0 and block_named(digests, table, digests, block) != block:
            return UNFINDABLE, block
    for counter, counted in ((USED, used), (HOLDING, holding), (PINNED, pinned)):
        if counted != counters[counter]:
            return BAD_COUNTER, counter
    return SOUND, -1


_FINDINGS = {
    BAD_LINK: "the free lists are broken at",
    BAD_NUMBER: "a reference count, pin count or mark is impossible at",
    EMPTY_PIN: "there is a pin without cached content on",
    BAD_STATE: "the wrong list, or none, holds",
    BAD_TABLE: "the table of names lists a block that holds nothing, or a wrong number of them:",
    UNFINDABLE: "the table of names does not lead to",
    BAD_COUNTER: "a counter disagrees with the blocks:",
}
_COUNTER_NAMES = ("free", "evictable", "used", "cached", "pinned")  # of the first counters


def describe(finding: int, where: int, state: Any, counters: Any) -> str:
    """Describe what `audit` found.

    Parameters
    ----------
    finding, where : int
        Its results.
    state, counters : array
        The pool's.

    Returns
    -------
    str
    """
    num_blocks = num_blocks_of(state)
    if finding == BAD_COUNTER:
        about = f"`{_COUNTER_NAMES[where]}` is {counters[where]}"
    elif 0 <= where < num_blocks:
        ref, pins, cached = state[: CACHED + 1, where].tolist()
        about = f"block {where} (references {ref}, pins {pins}, cached {cached})"
    elif where == num_blocks + FREE:
        about = "the head of the free list"
    elif where == num_blocks + EVICTABLE:
        about = "the head of the evictable list"
    else:
        about = f"block {where} of {num_blocks}"
    return f"{_FINDINGS[finding]} {about}"
