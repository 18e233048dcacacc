"""Which items attention on CUDA has, and where the tokens of an item lie.

The host knows neither lengths nor query starts, so the blocks count the items themselves, once each: a thread counts
those of its sequences, and knows by the sums of the threads before it which numbers they have. Items are numbered
without gaps; a block takes every ``gridDim``-th. The thread that has an item's sequence finds the item and puts it
into shared memory for the rest of the block.

The functions here never wait. A kernel calls them so::

    count = count_items(batch, counts, thread)
    cuda.syncthreads()
    add_counts(counts, thread)
    cuda.syncthreads()
    before, items = items_before(batch, counts, count, thread)
    for number in range(np.int64(cuda.blockIdx.x), items, np.int64(cuda.gridDim.x)):
        put_item(batch, number, before, count, found, thread)
        cuda.syncthreads()
        item = find_item(found)
        cuda.syncthreads()  # before the next `put_item`; if there are others, one of them does
        describe_rows(batch, item, rows, thread)
        ...

Which splits a sequence has depends on its own length, number of queries and window or ranges, on the model's numbers
of heads, and on the device: so its result is the same in every batch. Nothing read from the device is trusted.
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

# Splits have multiples of so many tokens: a KV tile.
SPLIT_STEP = 16 if SIMULATED else 64
# A split has at least so many tokens. A sequence of 8,192 tokens and 8 kv heads then has 128 items, which keep as many
# bytes in flight as an H200 needs. Shorter splits cost large batches more instructions outside of tiles; with longer
# ones multiprocessors are idle.
LEAST_SPLIT = 8 * SPLIT_STEP
# The most splits of a sequence, where a cache has one kv head.
MAX_SPLITS = 512
# Query rows that count as one item of a long sequence, and the most that a sequence has which is split. More of them
# are items enough.
ROWS_TOGETHER = 64
MAX_SPLIT_ROWS = 128
# A split has at least so many tokens for each query row. So its parts take a small share of the memory of its tokens,
# and of the time to read them.
TOKENS_PER_ROW = 8 if SIMULATED else 32
# Queries whose ranges are looked at for where splits start and end.
MAX_RANGES = 8

# Threads whose counts one thread adds up; elements of the array that they are in, with the sums.
TOGETHER = 8
COUNTS = THREADS + -(-THREADS // TOGETHER)

# The most tokens that a sequence may have room for; longer than any of them, and far from overflowing 31 bits.
MAX_CAPACITY = (1 << 31) - (1 << 16)
FAR = MAX_CAPACITY
LARGEST = (1 << 62) - 1


class Splitting(NamedTuple):
    """How a device splits sequences, whatever else is in the batch."""

    least: int  #: tokens that a split has at least
    log_items: int  #: the logarithm, in base 2, of the items that a long sequence has


@functools.cache
def splitting(multiprocessors: int) -> Splitting:
    """How a device of so many multiprocessors splits sequences.

    A long sequence has about two items for each of them, and a power of two in all, for shifts in place of divisions.
    From 91 to 181 multiprocessors that is 256, so results are the same.
    """
    return Splitting(LEAST_SPLIT, round(math.log2(min(2 * multiprocessors, MAX_SPLITS))))


class AttentionBatch(NamedTuple):
    """What the sequences of a call are; see `numkv.kernels.operations.Operations.attend`."""

    seq_lens: Any
    q_starts: Any
    ranges: Any
    num_tokens: Any
    capacity: (
        Any  #: tokens that a row of the block table can say the places of; at most `MAX_CAPACITY`
    )
    window_left: Any
    group: Any  #: q heads of a kv head
    heads: Any  #: kv heads
    slots: Any  #: parts that a token or a sequence has room for; see `numkv.kernels.cuda.attention.splits.RoomForParts`
    by_token: Any  #: whether it is a token
    most_tokens: Any  #: sequences with more queries than that are left to another kernel
    how: Any  #: a `Splitting`


class Extent(NamedTuple):
    """What there is to do for a sequence."""

    start: Any  #: its first query
    tokens: Any  #: its queries
    length: Any
    first: Any  #: where its first split starts
    split_len: Any  #: length of its splits; the last one goes on
    splits: Any  #: and their number


class AttentionItem(NamedTuple):
    """A unit of work: some query rows of a sequence, for one kv head, and a split of the KV range."""

    seq: Any
    start: Any  #: the sequence's first query
    position: Any  #: of that query; negative where there are more queries than tokens
    row: Any  #: the first query row, counted within the sequence
    rows: Any  #: how many there are
    head: Any  #: the kv head
    split: Any
    splits: Any  #: of the sequence
    begin: Any  #: the tokens that some row sees, within the split
    end: Any
    all_begin: Any  #: the tokens that all rows see
    all_end: Any


# Elements of the array that an item is put into.
FIELDS = len(AttentionItem._fields)


class ItemRows(NamedTuple):
    """The query rows of an item, in shared memory."""

    token: Any  #: among those of q
    head: Any  #: the q head
    begin: Any  #: the tokens that the row sees
    end: Any
    part: Any  #: where the part of the row's first split goes; the others follow


if SIMULATED:
    index_at = number_at
else:

    @register_jitable
    def index_at(indices, i):
        """As `numkv.kernels.cuda.launches.number_at`, of an index that is known to be natural: by its address."""
        size = np.int64(indices.itemsize)
        address = global_address(indices) + natural(i) * size
        low, high = load_global_4(address), load_global_4(address + (size - 4))
        if size == 4:
            return np.int64(np.int32(low))
        return (np.int64(high) << np.int64(32)) | np.int64(low)


def shift_of(block_size: int) -> int:
    """What a position is shifted by to give its block; -1 if blocks have no power of two of tokens."""
    return -1 if block_size & (block_size - 1) else block_size.bit_length() - 1


@register_jitable
def batch_of(q, k, block_table, seq_lens, q_starts, ranges, options):
    """The `AttentionBatch` of a call."""
    by_slot, _, window_left, slots, by_token, most_tokens, least, log_items, _, _ = options
    heads = natural(k.shape[1])
    capacity = np.int64(block_table.shape[1]) * (1 if by_slot else k.shape[2])
    return AttentionBatch(
        seq_lens, q_starts, ranges, q.shape[0], capacity, window_left, natural(q.shape[1]) // heads,
        heads, slots, by_token, most_tokens, Splitting(least, log_items),
    )  # fmt: skip


@register_jitable
def split_length(span, rows, heads, how):
    """Length of the splits of a sequence.

    Parameters
    ----------
    span : int
        Tokens that its queries see.
    rows : int
        Its query rows: queries times q heads of a kv head.
    heads : int
        kv heads.
    how : Splitting
        The device's.
    """
    units = heads * (((rows + ROWS_TOGETHER - 1) & LARGEST) // ROWS_TOGETHER)
    # Of what is not negative, as the compiler then knows, a quotient is a shift.
    whole = (span * units + (1 << how.log_items) - 1) >> how.log_items
    wanted = max(how.least, rows * TOKENS_PER_ROW, whole)
    return ((wanted + SPLIT_STEP - 1) & LARGEST) // SPLIT_STEP * SPLIT_STEP


@register_jitable
def extent(batch, b):
    """The `Extent` of a sequence; nothing is trusted, as the host has not seen the values."""
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
            if taken > batch.slots:  # not with starts that go from 0 to the number of tokens
                splits = np.int64(1)
    return Extent(start, tokens, length, first, split_len, splits)


@register_jitable
def sequences_each(batch):
    """Sequences whose items a thread counts."""
    return (natural(batch.seq_lens.shape[0]) + THREADS - 1) // THREADS


@register_jitable
def row_of(batch, item, i):
    """An item's query row `i`: its token among those of q, its q head, what it sees, and where its first part goes.

    Rows past the last one see nothing.
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
    """The functions that count the items of a sequence, of up to `ROWS` query rows, and say which one has a number."""

    @register_jitable
    def count_of(batch, own):
        row_blocks = natural(own.tokens * batch.group + ROWS - 1) // ROWS
        return row_blocks * own.splits * batch.heads

    @register_jitable
    def walk(batch, inner, thread):
        """The sequence, of those that a thread counts, that has their item `inner`; and its number in there."""
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
        """The item that is number `inner` of a sequence."""
        row_blocks = natural(own.tokens * batch.group + ROWS - 1) // ROWS
        # Later rows see more: take them first.
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
        # Nothing may be visible; what ends before 0 ends there.
        return AttentionItem(
            b, own.start, position, row, rows, head, split, own.splits,
            min(begin, batch.capacity), max(end, np.int64(0)),
            min(all_begin, batch.capacity), max(all_end, np.int64(0)),
        )  # fmt: skip

    return count_of, walk, item_of


def make_items(ROWS):
    """The functions that count a call's items and find one, for items of up to `ROWS` query rows."""
    count_of, walk, item_of = make_item_of(ROWS)

    @register_jitable
    def count_items(batch, counts, thread):
        """Items of the sequences that a thread counts; into ``counts[thread]``, too."""
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
        """The number of the first item of those that a thread has counted, and the number of all."""
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
        """Put the item of a number into `found`, by the thread that has counted it."""
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
        """The `AttentionItem` that `put_item` has put down."""
        return AttentionItem(
            natural(found[0]), natural(found[1]), np.int64(found[2]), natural(found[3]),
            natural(found[4]), natural(found[5]), natural(found[6]), natural(found[7]),
            natural(found[8]), natural(found[9]), natural(found[10]), natural(found[11]),
        )  # fmt: skip

    @register_jitable
    def describe_rows(batch, item, rows, thread):
        """Put down what the item's query rows are; those past the last one see nothing."""
        if thread < ROWS:
            token, head, begin, end, part = row_of(batch, item, thread)
            rows.token[thread], rows.head[thread] = token, head
            rows.begin[thread], rows.end[thread] = begin, end
            rows.part[thread] = part

    return count_items, add_counts, items_before, put_item, find_item, describe_rows


def make_locate(TILE):
    """The function that looks up where the tokens of a KV tile lie."""

    @register_jitable
    def locate(places, block_table, by_slot, shift, pool, item, tile, thread):
        """Put down where a KV tile's tokens lie.

        Even and odd tiles have a half of the tables each, which starts at ``tile & TILE``. If `shift` is not negative,
        blocks have ``1 << shift`` tokens.
        """
        num_blocks, block_size = pool.shape[0], natural(pool.shape[2])
        for n in range((TILE + THREADS - 1) // THREADS):
            j = thread + n * THREADS
            if j < TILE:
                position = natural(tile + j)
                block, offset = np.int64(-1), np.int64(0)
                if item.begin <= position and position < item.end:
                    place = position  # among the sequence's own blocks, or a slot of the pool
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
