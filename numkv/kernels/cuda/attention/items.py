"""Which items attention on CUDA has, and where the tokens of an item lie.

The host knows neither lengths nor query starts, so each block adds up itself how many items there are, and takes every
``gridDim``-th. Nothing is left over to launch blocks for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.launches import SIMULATED, THREADS, number_at
from numkv.rows.visible import visible_range, visible_to_all, visible_to_any

__all__ = [
    "MAX_SPLITS", "MAX_SPLIT_QUERIES", "MIN_SPLIT", "Batch", "Extent", "Item", "Places", "Rows",
    "extent", "make_items", "make_locate", "parts_by_token",
]  # fmt: skip

# A split of the KV range has at least so many tokens, and a sequence at most so many splits. Sequences with more
# queries than MAX_SPLIT_QUERIES have enough items without: they are not split.
MIN_SPLIT = 64 if SIMULATED else 256
MAX_SPLITS = 64
MAX_SPLIT_QUERIES = 8

# Longer than any sequence, and far from overflowing.
FAR = 1 << 40


class Batch(NamedTuple):
    """What the sequences of a call are; see `numkv.kernels.operations.Operations.attend`."""

    seq_lens: Any
    q_starts: Any
    ranges: Any
    num_tokens: Any
    capacity: Any  #: tokens that a row of the block table can say the places of
    window_left: Any
    most_tokens: Any  #: sequences with more queries than that are left to another kernel


class Extent(NamedTuple):
    """What there is to do for a sequence."""

    start: Any  #: its first query
    tokens: Any  #: its queries
    length: Any
    first: Any  #: first token that any query sees, rounded down to tiles; 0 where there are too many to split
    split_len: Any  #: length of its splits
    splits: Any  #: and their number


class Item(NamedTuple):
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


class Rows(NamedTuple):
    """The query rows of an item, in shared memory."""

    token: Any  #: among those of q
    head: Any  #: the q head
    begin: Any  #: the tokens that the row sees
    end: Any
    part: Any  #: where its parts go


class Places(NamedTuple):
    """Where the tokens of two KV tiles lie, this one and the next, in shared memory."""

    blocks: Any  #: -1 for tokens that do not count
    offsets: Any
    lost: Any  #: whether a block of the item lies outside the pool


@register_jitable
def parts_by_token(num_tokens, num_seqs):
    """Whether parts have a row for each token, not `MAX_SPLIT_QUERIES` for each sequence."""
    return num_tokens <= MAX_SPLIT_QUERIES * num_seqs


@register_jitable
def extent(batch, b, TILE):
    """The `Extent` of a sequence; nothing is trusted, as the host has not seen the values."""
    start = number_at(batch.q_starts, b)
    tokens = number_at(batch.q_starts, b + 1) - start
    if start < 0 or tokens < 0 or tokens > batch.num_tokens or start > batch.num_tokens - tokens:
        tokens = np.int64(0)
    if tokens > batch.most_tokens:
        tokens = np.int64(0)
    length = min(max(number_at(batch.seq_lens, b), np.int64(0)), np.int64(FAR))
    first, span = np.int64(0), np.int64(0)
    if tokens <= MAX_SPLIT_QUERIES:
        first, end = visible_to_any(
            batch.ranges, start, tokens, length - tokens, batch.window_left, batch.capacity
        )
        first -= first % TILE
        span = max(end - first, np.int64(0))
    split_len = (span + MAX_SPLITS - 1) // MAX_SPLITS
    split_len = max(np.int64(MIN_SPLIT), (split_len + TILE - 1) // TILE * TILE)
    splits = max((span + split_len - 1) // split_len, np.int64(1))
    return Extent(start, tokens, length, first, split_len, splits)


def make_items(ROWS, TILE):
    """The functions that count a call's items and find one, for items of up to `ROWS` query rows."""

    @register_jitable
    def count_items(batch, group, num_kv_heads, thread):
        """Items of the sequences that a thread counts."""
        num_seqs = batch.seq_lens.shape[0]
        seqs_each = (num_seqs + THREADS - 1) // THREADS
        count = np.int64(0)
        for b in range(thread * seqs_each, min((thread + 1) * seqs_each, num_seqs)):
            own = extent(batch, b, TILE)
            count += (own.tokens * group + ROWS - 1) // ROWS * own.splits * num_kv_heads
        return count

    @register_jitable
    def find_item(batch, group, num_kv_heads, counts, number):
        """The `Item` of a number, by what each thread counted."""
        seqs_each = (batch.seq_lens.shape[0] + THREADS - 1) // THREADS
        before = np.int64(0)
        counter = np.int64(0)
        while before + counts[counter] <= number:
            before += counts[counter]
            counter += 1
        b = counter * seqs_each
        while True:
            own = extent(batch, b, TILE)
            row_blocks = (own.tokens * group + ROWS - 1) // ROWS
            count = row_blocks * own.splits * num_kv_heads
            if number < before + count:
                break
            before += count
            b += 1
        inner = number - before
        # Later rows see more: take them first.
        row = (row_blocks - 1 - inner % row_blocks) * ROWS
        inner //= row_blocks
        head, split = inner % num_kv_heads, inner // num_kv_heads
        rows = min(np.int64(ROWS), own.tokens * group - row)
        position = own.length - own.tokens
        t = row // group
        queries = (row + rows - 1) // group + 1 - t
        begin, end = visible_to_any(
            batch.ranges, own.start + t, queries, position + t, batch.window_left, batch.capacity
        )
        all_begin, all_end = visible_to_all(
            batch.ranges, own.start + t, queries, position + t, batch.window_left, batch.capacity
        )
        if own.splits > 1:
            begin = max(begin, own.first + split * own.split_len)
            end = min(end, own.first + (split + 1) * own.split_len)
        return Item(
            b,
            own.start,
            position,
            row,
            rows,
            head,
            split,
            own.splits,
            begin,
            end,
            all_begin,
            all_end,
        )

    @register_jitable
    def describe_rows(batch, item, group, rows, thread):
        """Put down what the item's query rows are; those past the last one see nothing."""
        if thread < ROWS:
            t = (item.row + thread) // group
            rows.token[thread] = item.start + t
            rows.head[thread] = item.head * group + item.row + thread - t * group
            begin, end = np.int64(0), np.int64(0)
            if thread < item.rows:
                begin, end = visible_range(
                    batch.ranges, item.start + t, item.position + t, batch.window_left, batch.capacity
                )  # fmt: skip
            rows.begin[thread], rows.end[thread] = begin, end
            by_token = parts_by_token(batch.num_tokens, batch.seq_lens.shape[0])
            rows.part[thread] = item.start + t if by_token else item.seq * MAX_SPLIT_QUERIES + t

    return count_items, find_item, describe_rows


def make_locate(TILE):
    """The function that looks up where the tokens of a KV tile lie."""

    @register_jitable
    def locate(places, block_table, by_slot, pool, item, tile, thread):
        """Put down where a KV tile's tokens lie.

        Even and odd tiles have a half of the tables each, which starts at ``tile & TILE``.
        """
        num_blocks, block_size = pool.shape[0], np.int64(pool.shape[2])
        for n in range((TILE + THREADS - 1) // THREADS):
            j = thread + n * THREADS
            if j < TILE:
                position = tile + j
                block, offset = np.int64(-1), np.int64(0)
                if item.begin <= position and position < item.end:
                    place = position  # among the sequence's own blocks, or a slot of the pool
                    if by_slot:
                        place = np.int64(block_table[item.seq, position])
                    block, offset = place // block_size, place % block_size
                    if not by_slot:
                        block = np.int64(block_table[item.seq, block])
                    if block < 0 or block >= num_blocks:
                        block = np.int64(-1)
                        places.lost[0] = 1
                places.blocks[(tile & TILE) + j] = block
                places.offsets[(tile & TILE) + j] = offset

    return locate
