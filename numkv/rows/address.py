"""Where a token lies: the only place a slot is computed; and of several sequences in one launch, which has an item.

A *plan* is a row of int64 numbers: `WIDTH` for each sequence, then the block tables, one behind the other. A call with
one sequence has an empty plan, and its numbers in a tuple instead; its tokens lie one behind the other. The numbers::

    item      its first work item, among those of a head
    query     its first query, among those of the call
    part      its first part of a result, among those of a head
    table     where its block table starts in the plan; of one sequence, where its first token lies
    start     the token at which its splits start
    length    tokens that its newest query sees
    queries   how many queries it has
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable


@register_jitable
def slot_of(block_table, position, block_size):
    """Flat slot of a sequence's token: ``block_table[position // block_size] * block_size + position % block_size``."""
    block = np.int64(block_table[position // block_size])
    return block * np.int64(block_size) + np.int64(position % block_size)


#: Numbers of a sequence, and which of them it is looked up by.
WIDTH, BY_ITEM, BY_QUERY = 7, 0, 1


@register_jitable
def sequence_at(plan, num_seqs, one, by, number):
    """The numbers of the last sequence whose number `by` is at most `number`.

    Parameters
    ----------
    plan : int64 array
        The plan.
    num_seqs : int
        How many sequences it has.
    one : tuple of int
        The numbers where the plan is empty.
    by : int
        `BY_ITEM` or `BY_QUERY`.
    number : int
        An item of a head, or a query of the call.

    Returns
    -------
    tuple of int
    """
    if plan.shape[0] == 0:
        return one
    low, high = np.int64(0), np.int64(num_seqs)
    while high - low > 1:
        middle = (low + high) // 2
        if plan[middle * WIDTH + by] <= number:
            low = middle
        else:
            high = middle
    at = low * WIDTH
    return (
        plan[at], plan[at + 1], plan[at + 2], plan[at + 3], plan[at + 4], plan[at + 5], plan[at + 6],
    )  # fmt: skip


@register_jitable
def slot_at(plan, table, block_size, token):
    """Return where a token of a sequence lies; so do the ones behind it, to the end of its block."""
    if plan.shape[0] == 0:
        return table + token
    return plan[table + token // block_size] * block_size + token % block_size
