"""The items of attention on CUDA, and the places of an item's tokens.

The host knows neither lengths nor query starts. Each thread block therefore counts the items itself, once. A thread
counts the items of its sequences. The sums of the threads before it give their numbers. Items are numbered without
gaps, and a block computes every ``gridDim``-th. The thread that counted an item's sequence finds the item, and puts it
into shared memory for the whole block.

The functions here contain no barriers. A kernel calls them like this::

    count = count_items(batch, counts, thread)
    cuda.syncthreads()
    add_counts(counts, thread)
    cuda.syncthreads()
    before, items = items_before(batch, counts, count, thread)
    for number in range(np.int64(cuda.blockIdx.x), items, np.int64(cuda.gridDim.x)):
        put_item(batch, number, before, count, found, thread)
        cuda.syncthreads()
        item = find_item(found)
        cuda.syncthreads()  # before the next `put_item`; any other barrier of the loop suffices
        describe_rows(batch, item, rows, thread)
        ...

The splits of a sequence depend on its length, its number of queries, and its window or ranges. They also depend on the
model's numbers of heads and on the device, but not on other sequences. A sequence's result is therefore the same in
every batch. Values read from the device are always range-checked.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.instructions import global_address, load_global_4
from numkv.kernels.cuda.launches import THREADS, number_at
from numkv.kernels.cuda.simd import natural
from numkv.kernels.cuda.streams import SIMULATED
from numkv.rows.visible import visible_range, visible_to_all, visible_to_any

# The tokens of a split are a multiple of this, a KV tile.
SPLIT_STEP = 16 if SIMULATED else 64
# The fewest tokens of a split. A sequence of 8,192 tokens and 8 kv heads then has 128 items. They keep as many bytes in
# flight as an H200 needs. Shorter splits cost large batches more instructions outside of tiles. Longer ones leave
# multiprocessors idle.
LEAST_SPLIT = 8 * SPLIT_STEP
# The most splits of a sequence, reached with one kv head.
MAX_SPLITS = 512
# Query rows that count as one item of a long sequence, and the most query rows of a sequence that is split. More rows
# make enough items without splits.
ROWS_TOGETHER = 64
MAX_SPLIT_ROWS = 128
# The fewest tokens of a split per query row. Its parts then need little memory and time compared with its tokens.
TOKENS_PER_ROW = 8 if SIMULATED else 32
# The most queries whose ranges are read to place the splits.
MAX_RANGES = 8

# Threads whose counts one thread adds up; elements of the array of counts and sums.
TOGETHER = 8
COUNTS = THREADS + -(-THREADS // TOGETHER)

# The largest capacity of a sequence; a length beyond any sequence's, well below overflow of 31 bits.
MAX_CAPACITY = (1 << 31) - (1 << 16)
FAR = MAX_CAPACITY
LARGEST = (1 << 62) - 1


class Splitting(NamedTuple):
    """How a device splits a sequence, independent of the rest of the batch."""

    least: int  #: the fewest tokens of a split
    log_items: int  #: the logarithm, in base 2, of a long sequence's number of items


@functools.cache
def splitting(multiprocessors: int) -> Splitting:
    """Return how a device with this number of multiprocessors splits sequences.

    A long sequence has about two items per multiprocessor. The number is a power of two, so that shifts replace
    divisions. It is 256 for 91 to 181 multiprocessors, so these devices compute the same results.
    """
    return Splitting(LEAST_SPLIT, round(math.log2(min(2 * multiprocessors, MAX_SPLITS))))


class AttentionBatch(NamedTuple):
    """The sequences of a call; see `numkv.kernels.operations.Operations.attend`."""

    seq_lens: Any
    q_starts: Any
    ranges: Any
    num_tokens: Any
    capacity: Any  #: tokens that a row of the block table has room for; at most `MAX_CAPACITY`
    window_left: Any
    group: Any  #: q heads of a kv head
    heads: Any  #: kv heads
    slots: Any  #: parts of a token or of a sequence; see `numkv.kernels.cuda.attention.splits.RoomForParts`
    by_token: Any  #: whether `slots` counts the parts of a token
    most_tokens: Any  #: another kernel computes sequences with more queries than this
    how: Any  #: a `Splitting`


class Extent(NamedTuple):
    """The work of a sequence."""

    start: Any  #: its first query
    tokens: Any  #: its queries
    length: Any
    first: Any  #: where its first split starts
    split_len: Any  #: length of its splits; the last one goes on
    splits: Any  #: number of its splits


class AttentionItem(NamedTuple):
    """A unit of work: some query rows of a sequence, for one kv head, and a split of the KV range."""

    seq: Any
    start: Any  #: the sequence's first query
    position: Any  #: position of that query; negative if the sequence has more queries than tokens
    row: Any  #: the first query row, counted within the sequence
    rows: Any  #: number of query rows
    head: Any  #: the kv head
    split: Any
    splits: Any  #: the sequence's number of splits
    begin: Any  #: the tokens of the split that at least one row sees
    end: Any
    all_begin: Any  #: the tokens that all rows see
    all_end: Any


# Elements of the array that stores an item.
FIELDS = len(AttentionItem._fields)


class ItemRows(NamedTuple):
    """The query rows of an item, in shared memory."""

    token: Any  #: index of the row's token in q
    head: Any  #: the q head
    begin: Any  #: the tokens that the row sees
    end: Any
    part: Any  #: place of the part of the row's first split; the others follow


if SIMULATED:
    index_at = number_at
else:

    @register_jitable
    def index_at(indices, i):
        """Compute `numkv.kernels.cuda.launches.number_at` by address, for an index known to be natural."""
        size = np.int64(indices.itemsize)
        address = global_address(indices) + natural(i) * size
        low, high = load_global_4(address), load_global_4(address + (size - 4))
        if size == 4:
            return np.int64(np.int32(low))
        return (np.int64(high) << np.int64(32)) | np.int64(low)


def shift_of(block_size: int) -> int:
    """Return the right shift from a position to its block; -1 unless the block size is a power of two."""
    return -1 if block_size & (block_size - 1) else block_size.bit_length() - 1


@register_jitable
def batch_of(q, k, block_table, seq_lens, q_starts, ranges, options):
    """Return the `AttentionBatch` of a call."""
    by_slot, _, window_left, slots, by_token, most_tokens, least, log_items, _, _ = options
    heads = natural(k.shape[1])
    capacity = np.int64(block_table.shape[1]) * (1 if by_slot else k.shape[2])
    return AttentionBatch(
        seq_lens, q_starts, ranges, q.shape[0], capacity, window_left, natural(q.shape[1]) // heads,
        heads, slots, by_token, most_tokens, Splitting(least, log_items),
    )  # fmt: skip


@register_jitable
def split_length(span, rows, heads, how):
    """Return the length of a sequence's splits.

    Parameters
    ----------
    span : int
        Tokens that its queries see.
    rows : int
        Its query rows: queries times q heads of a kv head.
    heads : int
        Number of kv heads.
    how : Splitting
        The device's way to split sequences.
    """
    units = heads * (((rows + ROWS_TOGETHER - 1) & LARGEST) // ROWS_TOGETHER)
    # The mask proves to the compiler that the number is not negative, so the quotient becomes a shift.
    whole = (span * units + (1 << how.log_items) - 1) >> how.log_items
    wanted = max(how.least, rows * TOKENS_PER_ROW, whole)
    return ((wanted + SPLIT_STEP - 1) & LARGEST) // SPLIT_STEP * SPLIT_STEP


@register_jitable
def extent(batch, b):
    """Return the `Extent` of a sequence; values are range-checked, because the host has not read them."""
    start = index_at(batch.q_starts, b)
    tokens = index_at(batch.q_starts, b + 1) - start
    if start < 0 or tokens < 0 or tokens > batch.num_tokens or start > batch.num_tokens - tokens:
        start, tokens = np.int64(0), np.int64(0)
    if tokens > batch.most_tokens:
        tokens = np.int64(0)
    start, tokens = natural(start), natural(tokens)
    length = natural(min(max(index_at(batch.seq_lens, b), np.int64(0)), np.int64(FAR)))
    first, split_len, splits = np.int64(0), np.int64(FAR), np.int64(1)
    rows = tokens * batch.group
    if batch.slots > 0 and rows <= MAX_SPLIT_ROWS:
        end = min(length, batch.capacity)
        if batch.ranges.shape[0] == 0 or tokens <= MAX_RANGES:
            first, end = visible_to_any(
                batch.ranges, start, tokens, length - tokens, batch.window_left, batch.capacity
            )
        first -= first % SPLIT_STEP
        span = natural(max(end - first, np.int64(0)))
        if span > SPLIT_STEP:
            split_len = natural(split_length(span, rows, batch.heads, batch.how))
            splits = (span + split_len - 1) // split_len
            taken = splits * batch.heads * (batch.group if batch.by_token else rows)
            if taken > batch.slots:  # never with query starts that go from 0 to num_tokens
                splits = np.int64(1)
    return Extent(start, tokens, length, first, split_len, splits)


@register_jitable
def sequences_each(batch):
    """Return the number of sequences whose items one thread counts."""
    return (natural(batch.seq_lens.shape[0]) + THREADS - 1) // THREADS


@register_jitable
def row_of(batch, item, i):
    """Return the fields of `ItemRows` for an item's query row `i`.

    Rows past the last one see no tokens.
    """
    group = natural(batch.group)
    row = natural(item.row + i)
    t = row // group
    h = item.head * group + row - t * group
    begin, end = np.int64(0), np.int64(0)
    if i < item.rows:
        begin, end = visible_range(
            batch.ranges, item.start + t, item.position + t, batch.window_left, batch.capacity
        )  # fmt: skip
    at = (t * batch.heads * group + h) * item.splits + item.seq * batch.slots
    if batch.by_token:
        at = h * item.splits + (item.start + t) * batch.slots
    return item.start + t, h, min(begin, batch.capacity), max(end, np.int64(0)), at


def make_item_of(ROWS):
    """Make the functions that count a sequence's items, of up to `ROWS` query rows, and find an item by its number."""

    @register_jitable
    def count_of(batch, own):
        row_blocks = natural(own.tokens * batch.group + ROWS - 1) // ROWS
        return row_blocks * own.splits * batch.heads

    @register_jitable
    def walk(batch, inner, thread):
        """Return the sequence of item `inner` of a thread's sequences, its extent, and the item's number in it."""
        b = natural(thread * sequences_each(batch))
        own = extent(batch, b)
        those = count_of(batch, own)
        while inner >= those:
            inner -= those
            b = natural(b + 1)
            own = extent(batch, b)
            those = count_of(batch, own)
        return b, own, inner

    @register_jitable
    def item_of(batch, b, own, inner):
        """Return item number `inner` of a sequence."""
        row_blocks = natural(own.tokens * batch.group + ROWS - 1) // ROWS
        # Later rows see more tokens, so they come first.
        inner = natural(inner)
        row = (row_blocks - 1 - inner % row_blocks) * ROWS
        inner = inner // row_blocks
        heads = natural(batch.heads)
        head, split = inner % heads, inner // heads
        rows = min(np.int64(ROWS), own.tokens * batch.group - row)
        group = natural(batch.group)
        t, last = natural(row) // group, natural(row + rows - 1) // group
        position = own.length - own.tokens
        begin, end = visible_to_any(
            batch.ranges, own.start + t, last + 1 - t, position + t, batch.window_left, batch.capacity
        )  # fmt: skip
        all_begin, all_end = visible_to_all(
            batch.ranges, own.start + t, last + 1 - t, position + t, batch.window_left, batch.capacity
        )  # fmt: skip
        if split > 0:
            begin = max(begin, own.first + split * own.split_len)
        if split < own.splits - 1:
            end = min(end, own.first + (split + 1) * own.split_len)
        # The range may be empty; an end below 0 becomes 0.
        return AttentionItem(
            b, own.start, position, row, rows, head, split, own.splits,
            min(begin, batch.capacity), max(end, np.int64(0)),
            min(all_begin, batch.capacity), max(all_end, np.int64(0)),
        )  # fmt: skip

    return count_of, walk, item_of


def make_items(ROWS):
    """Make the functions that count a call's items and find one, for items of up to `ROWS` query rows."""
    count_of, walk, item_of = make_item_of(ROWS)

    @register_jitable
    def count_items(batch, counts, thread):
        """Return the number of items of a thread's sequences, and put it into ``counts[thread]``."""
        each, count = sequences_each(batch), np.int64(0)
        b = natural(thread * each)
        end = min(b + each, batch.seq_lens.shape[0])
        while b < end:
            count += count_of(batch, extent(batch, b))
            b = natural(b + 1)
        counts[thread] = count
        return natural(count)

    @register_jitable
    def add_counts(counts, thread):
        """Add up the counts of `TOGETHER` threads each."""
        if thread < COUNTS - THREADS:
            total = np.int64(0)
            for i in range(TOGETHER):
                total += counts[natural(min(thread * TOGETHER + i, THREADS - 1))]
            counts[THREADS + thread] = total

    @register_jitable
    def items_before(batch, counts, count, thread):
        """Return the number of the first item that a thread has counted, and the number of all items."""
        group = thread // TOGETHER
        before, items = np.int64(0), np.int64(0)
        sums = natural((batch.seq_lens.shape[0] + TOGETHER - 1) // TOGETHER)  # the rest are 0
        i = np.int64(0)
        while i < min(sums, COUNTS - THREADS):
            if i == group:
                before = items
            items += counts[natural(THREADS + i)]
            i += 1
        if count > 0:
            i = group * TOGETHER
            while i < thread:
                before += counts[natural(i)]
                i += 1
        return before, items

    @register_jitable
    def put_item(batch, number, before, count, found, thread):
        """Put the item with a number into `found`; only the thread that has counted it writes."""
        if number < before or number >= before + count:
            return
        b, own, inner = walk(batch, number - before, thread)
        item = item_of(batch, b, own, inner)
        found[0], found[1], found[2] = item.seq, item.start, item.position
        found[3], found[4], found[5] = item.row, item.rows, item.head
        found[6], found[7] = item.split, item.splits
        found[8], found[9] = item.begin, item.end
        found[10], found[11] = item.all_begin, item.all_end

    @register_jitable
    def find_item(found):
        """Return the `AttentionItem` that `put_item` has stored."""
        return AttentionItem(
            natural(found[0]), natural(found[1]), np.int64(found[2]), natural(found[3]),
            natural(found[4]), natural(found[5]), natural(found[6]), natural(found[7]),
            natural(found[8]), natural(found[9]), natural(found[10]), natural(found[11]),
        )  # fmt: skip

    @register_jitable
    def describe_rows(batch, item, rows, thread):
        """Store the item's query rows; rows past the last one see no tokens."""
        if thread < ROWS:
            token, head, begin, end, part = row_of(batch, item, thread)
            rows.token[thread], rows.head[thread] = token, head
            rows.begin[thread], rows.end[thread] = begin, end
            rows.part[thread] = part

    return count_items, add_counts, items_before, put_item, find_item, describe_rows


def make_locate(TILE):
    """Make the function that looks up the places of a KV tile's tokens."""

    @register_jitable
    def locate(places, block_table, by_slot, shift, pool, item, tile, thread):
        """Store the places of a KV tile's tokens.

        Even and odd tiles use one half of the tables each. It starts at ``tile & TILE``. If `shift` is not negative,
        blocks have ``1 << shift`` tokens.
        """
        num_blocks, block_size = pool.shape[0], natural(pool.shape[2])
        for n in range((TILE + THREADS - 1) // THREADS):
            j = thread + n * THREADS
            if j < TILE:
                position = natural(tile + j)
                block, offset = np.int64(-1), np.int64(0)
                if item.begin <= position and position < item.end:
                    place = position  # a token's index in the sequence's own blocks, or a slot of the pool
                    if by_slot:
                        place = np.int64(block_table[item.seq, position])
                    if place >= 0:
                        place = natural(place)
                        if shift >= 0:
                            block = place >> shift
                            offset = place - (block << shift)
                        else:
                            block = place // block_size
                            offset = place - block * block_size
                        if not by_slot:
                            block = np.int64(block_table[item.seq, block])
                    if block < 0 or block >= num_blocks:
                        block = np.int64(-1)
                        places.lost[0] = 1
                places.blocks[(tile & TILE) + j] = block
                places.offsets[(tile & TILE) + j] = offset

    return locate
