"""The items of a call: for each sequence, blocks of query tokens or splits of the KV range, by kv heads.

Later query blocks see more tokens, so they come first. A sequence of many query rows has query blocks and no splits. A
sequence of few has splits, and also several blocks if groups are large. Split boundaries depend on the sequence's own
length, window and number of queries alone. So no result depends on the batch. `tests/kernels/test_attention_plan.py`
checks how many cores this keeps busy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numkv.kernels.cpu.attention.records import FEW_ROWS, KV_TILE, QUERY_ROWS, Item
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.rows.visible import visible_to_any

# A split of the KV range has at least so many tokens, and a sequence at most so many splits.
MIN_SPLIT = 1024
MAX_SPLITS = 64
# Query rows of a kv head up to which several blocks are split too: the parts to merge have as many rows.
SPLIT_ROWS = 128
# An item has as many heads as runs of K rows make so many bytes: a run is what a head has in a block, or all of a short
# sequence. Each thread keeps `ITEMS_EACH` items to balance, or more of many threads. An item's own work is then done
# once for its heads, pages of a block are read soon after each other, and a cache line of the page table has eight of
# them. The step from a head's rows to its rows in the next block is what costs, whether the table is straight or not.
RUNS = 128 << 10
ITEMS_EACH = 4
FEW_THREADS = 4
MORE_ITEMS_EACH = 16
#: Multiply-adds below which one thread does all work. Query rows fewer than `LEAST_ROWS` count as so many, as K and V
#: are read and converted all the same. Speedups of two threads on an Intel Xeon with 2 cores, as tenth percentiles, in
#: groups of 4 q heads of 128, for 0.5, 1, 2 and 4 million:
#:
#: - fp16 from caches 1.04x, 1.27x, 1.27x and 1.61x; from memory 1.16x, 1.39x, 1.43x and 1.82x.
#: - int8 from caches 1.14x, 1.25x, 1.19x and 1.32x.
#:
#: The gain below 2 million is lost again where threads sleep, or something else has taken their core.
SERIAL_WORK = 2_000_000
LEAST_ROWS = 4


#: The place of the bits of missing engine steps in a plan; see `state.run_step`.
MISSING = 2
# Integers before a plan's arrays: its two counters, and these bits.
_HEADER = 3


class ItemPlan(NamedTuple):
    """Views of the integers of a plan. All arrays but the counters have an element for each sequence."""

    #: Counters that threads share: of items, and of rows to merge.
    next_item: Any
    next_row: Any
    #: Bits of missing engine steps.
    missing: Any
    #: The first item and the first part of its results; both have the total at the end.
    first_item: Any
    first_part: Any
    #: The length of a split, or 0 if there is only one.
    split_len: Any
    #: Kv heads that an item takes.
    heads: Any
    #: The rest: integers of workers.
    rest: Any


@inlined
def plan_of(ints, num_seqs):
    """Return views of the plan in an array of integers."""
    first_item, first_part = _HEADER, _HEADER + 1 + num_seqs
    split_len = first_part + num_seqs + 1
    heads = split_len + num_seqs
    rest = heads + num_seqs
    return ItemPlan(
        ints[0:1], ints[1:2], ints[MISSING:_HEADER], ints[first_item:first_part], ints[first_part:split_len],
        ints[split_len:heads], ints[heads:rest], ints[rest:],
    )  # fmt: skip


def plan_size(num_seqs: int) -> int:
    """Return the number of integers of a plan, without those of workers."""
    return _HEADER + 2 + 4 * num_seqs


class Problem(NamedTuple):
    """The sizes of a call, for `find_item`."""

    seq_lens: Any
    q_starts: Any
    ranges: Any
    window_left: int
    #: Tokens that fit in a sequence's row of the block table, and tokens of one entry.
    capacity: int
    unit: int
    num_kv_heads: int
    #: Q heads of a kv head, and the most query rows of an item.
    group: int
    max_rows: int


@inlined
def _length(seq_lens, ranges, capacity, b):
    """Return the tokens of a sequence; with ranges, the capacity."""
    return np.int64(seq_lens[b]) if len(ranges) == 0 else capacity


def make_plan(
    seq_lens, q_starts, ranges, window_left, capacity, unit, num_kv_heads, group, max_rows, row_bytes,
    columns, threads, ints,
):  # fmt: skip
    """Make a plan in `ints`; return how many threads are to work on it, and how many parts there are to merge.

    `Problem` describes the first nine arguments. `row_bytes` are those of a K row, `columns` the sum of the elements of
    a K row and of a V row, `threads` the most threads that may run. Counters are set to 0.
    """
    plan = plan_of(ints, len(seq_lens))
    num_seqs = len(seq_lens)
    block_tokens = max(1, max_rows // group)
    plan.next_item[0] = plan.next_row[0] = plan.missing[0] = 0
    parts = np.int64(0)
    work = np.int64(0)
    pieces = np.int64(0)  # of query blocks and splits
    for b in range(num_seqs):
        tokens = q_starts[b + 1] - q_starts[b]
        plan.first_part[b] = parts
        blocks = (tokens + block_tokens - 1) // block_tokens
        length = _length(seq_lens, ranges, capacity, b)
        first, end = visible_to_any(
            ranges, q_starts[b], tokens, length - tokens, window_left, length
        )
        first -= first % KV_TILE
        span = max(np.int64(0), end - first)
        split_len = (span + MAX_SPLITS - 1) // MAX_SPLITS
        split_len = max(MIN_SPLIT, (split_len + KV_TILE - 1) // KV_TILE * KV_TILE)
        splits = max(np.int64(1), (span + split_len - 1) // split_len)
        if blocks == 0 or (blocks > 1 and tokens * group > SPLIT_ROWS):
            # Nothing to do, or enough to share without splitting.
            splits = np.int64(1)
        plan.split_len[b] = split_len if splits > 1 else np.int64(0)
        plan.first_item[b] = blocks * splits
        most_heads = QUERY_ROWS // max(1, min(tokens, block_tokens) * group)
        plan.heads[b] = max(1, min(most_heads, RUNS // max(1, min(unit, span) * row_bytes)))
        pieces += blocks * splits
        if splits > 1:
            parts += splits * tokens * num_kv_heads * group
        if tokens > 0:
            work += max(tokens * group, LEAST_ROWS) * span * num_kv_heads * columns
    plan.first_part[num_seqs] = parts
    workers = 1 if work < SERIAL_WORK else threads

    wanted = workers * (ITEMS_EACH if workers <= FEW_THREADS else MORE_ITEMS_EACH)
    if workers == 1:
        wanted = 1
    most_heads = np.int64(1)
    while most_heads < num_kv_heads and (
        pieces * ((num_kv_heads + most_heads) // (most_heads + 1)) >= wanted
    ):
        most_heads += 1
    items = np.int64(0)
    for b in range(num_seqs):
        heads = min(plan.heads[b], most_heads)
        plan.heads[b] = heads
        mine = plan.first_item[b] * ((num_kv_heads + heads - 1) // heads)
        plan.first_item[b] = items
        items += mine
    plan.first_item[num_seqs] = items
    return workers, parts


@inlined
def find_item(problem, plan, b, number):
    """Return an item of sequence b, where `number` counts the items of all sequences."""
    q_starts, group = problem.q_starts, problem.group
    block_tokens = max(1, problem.max_rows // group)
    seq_tokens = q_starts[b + 1] - q_starts[b]
    length = _length(problem.seq_lens, problem.ranges, problem.capacity, b)
    split_len = plan.split_len[b]
    inner = number - plan.first_item[b]
    heads = plan.heads[b]
    head_parts = (problem.num_kv_heads + heads - 1) // heads
    first_head = inner % head_parts * heads
    end_head = min(problem.num_kv_heads, first_head + heads)
    inner //= head_parts
    blocks = (seq_tokens + block_tokens - 1) // block_tokens
    # Later blocks see more: take them first.
    block = blocks - 1 - inner % blocks
    split = inner // blocks
    t0 = block * block_tokens
    tokens = min(seq_tokens, t0 + block_tokens) - t0
    position = length - seq_tokens + t0
    begin, end = visible_to_any(
        problem.ranges, q_starts[b] + t0, tokens, position, problem.window_left, length
    )
    part = np.int64(-1)
    if split_len > 0:
        # Splits are of the whole sequence, so a block may see no token of one.
        first, _ = visible_to_any(
            problem.ranges, q_starts[b], seq_tokens, length - seq_tokens, problem.window_left, length
        )  # fmt: skip
        first -= first % KV_TILE
        begin = max(begin, first + split * split_len)
        end = min(end, first + (split + 1) * split_len)
        part = plan.first_part[b] + (split * seq_tokens + t0) * problem.num_kv_heads * group
    return Item(
        b, q_starts[b] + t0, tokens, tokens * group, first_head, end_head, position, begin, end, part,
        np.int64(seq_tokens * group > FEW_ROWS),
    )  # fmt: skip
