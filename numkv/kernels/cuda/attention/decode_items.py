"""Which items the blocks of decode attention take, and what a block is told of one, in shared memory.

As in `numkv.kernels.cuda.attention.items`, a thread counts the items of its sequences. Here the threads of a warp add
them up by shuffles, and warps without sequences go straight to the one barrier; then the warp that has the sequence of
an item puts all down that the block needs to know: two records of four words, and addresses of rows, so that nobody
computes them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.decode_copies import uniform
from numkv.kernels.cuda.attention.decode_sizes import DECODE_ROWS, SLICE
from numkv.kernels.cuda.attention.items import Extent, extent, make_item_of, row_of, sequences_each
from numkv.kernels.cuda.instructions import (
    global_address,
    load_shared_8,
    load_shared_16,
    shuffle,
    store_shared_4,
    store_shared_8,
    store_shared_16,
)  # fmt: skip
from numkv.kernels.cuda.simd import natural

I32, U32 = np.int32, np.uint32
EVERYONE = 0xFFFFFFFF
#: Shared memory for what a block is told of an item, and for its warps' counts.
RECORD_BYTES = 48
#: Words for what there is to do for a sequence of a thread.
EXTENT_WORDS = 8


class Counted(NamedTuple):
    """What the threads of a block have counted, in shared memory."""

    counts: Any  #: items of a thread
    befores: Any  #: and of those before it in its warp
    extents: Any  #: address of what there is to do for the last sequence of each thread


class DecodeRows(NamedTuple):
    """The query rows of an item, in shared memory."""

    query: Any  #: address of the row of q
    to: Any  #: address of the row's part if the sequence is split, else of its row of the output
    token: Any  #: among those of q
    head: Any  #: the q head
    begin: Any  #: the tokens that the row sees
    end: Any


class Told(NamedTuple):
    """What a warp needs to know before it begins."""

    begin: Any  #: the tokens that some row sees, within the split
    end: Any
    low: Any  #: slices that start from `low` to `high` have none that only some of the rows see
    high: Any
    seq: Any
    head: Any  #: the kv head
    rows: Any


class Task(NamedTuple):
    """What a block needs to know in the end."""

    rows: Any
    head: Any
    splits: Any  #: of the sequence


def make_tasks():
    """The functions that count a call's items, and put down one of them."""
    count_of, walk, item_of = make_item_of(DECODE_ROWS)

    @register_jitable
    def has_sequences(batch, lane):
        """Whether threads of a warp may have any; where they have several each, some warps then have none."""
        return 32 * lane.warp < batch.seq_lens.shape[0]

    @register_jitable
    def count_own(batch, counted, thread):
        """Items of the sequences that a thread counts."""
        each, count = sequences_each(batch), np.int64(0)
        b = natural(thread * each)
        end = min(b + each, batch.seq_lens.shape[0])
        at = U32(counted.extents + 4 * EXTENT_WORDS * thread)
        while b < end:
            own = extent(batch, b)
            count += count_of(batch, own)
            store_shared_16(at, U32(own.start), U32(own.tokens), U32(own.length), U32(own.first))
            store_shared_8(U32(at + U32(16)), U32(own.split_len), U32(own.splits))
            b = natural(b + 1)
        return count

    @register_jitable
    def extent_of(batch, counted, inner, first):
        """The sequence of item `inner` of a thread's, what there is to do for it, and the item's number in there."""
        if sequences_each(batch) > 1:
            return walk(batch, inner, first)
        at = U32(counted.extents + 4 * EXTENT_WORDS * first)
        start, tokens, length, begin = load_shared_16(at)
        split_len, splits = load_shared_8(U32(at + U32(16)))
        own = Extent(
            natural(start), natural(tokens), natural(length), natural(begin), natural(split_len), natural(splits)
        )  # fmt: skip
        return first, own, inner

    @register_jitable
    def count_items(batch, counted, record, lane, thread):
        """Items of each thread, and how many those before it in its warp have; what a warp has, for the others."""
        upto = U32(0)
        if has_sequences(batch, lane):
            count = U32(count_own(batch, counted, thread))
            upto = count
            for step in (1, 2, 4, 8, 16):
                other = shuffle(upto, U32(U32(lane.number - step) & U32(31)))
                if lane.number >= step:
                    upto = U32(upto + other)
            counted.counts[thread], counted.befores[thread] = count, U32(upto - count)
        if lane.number == 31:
            store_shared_4(U32(record + 32 + 4 * lane.warp), upto)

    @register_jitable
    def all_items(record):
        """The number of all items, after a barrier."""
        a, b, c, d = load_shared_16(U32(record + 32))
        return uniform(U32(U32(a + b) + U32(c + d)))

    @register_jitable
    def put_task(batch, number, counted, record, rows, q, out, parts, lane, thread):
        """Put down the item of a number, by the warp that has its sequence."""
        if not has_sequences(batch, lane):
            return
        a, b, c, _ = load_shared_16(U32(record + 32))
        before = U32(counted.befores[thread])
        before = U32(before + (a if lane.warp > 0 else U32(0)))
        before = U32(before + (b if lane.warp > 1 else U32(0)))
        before = U32(before + (c if lane.warp > 2 else U32(0)))
        inner, count = U32(U32(number) - before), U32(counted.counts[thread])
        owners = U32(cuda.ballot_sync(EVERYONE, inner < count))
        if owners == 0:
            return
        # All threads of the warp look at the item of the one that has it.
        owner = U32(31 - cuda.clz(owners))
        first = natural(thread - lane.number + I32(owner))
        b, own, inner_one = extent_of(batch, counted, natural(shuffle(inner, owner)), first)
        item = item_of(batch, b, own, inner_one)
        low = item.all_begin if item.begin < item.all_begin else np.int64(0)
        high = item.all_end - SLICE if item.all_end < item.end else item.end
        if lane.number == 0:
            store_shared_16(record, U32(item.begin), U32(item.end), U32(low), U32(high))
            store_shared_16(
                U32(record + 16), U32(item.seq), U32(item.head), U32(item.rows), U32(item.splits)
            )
        if lane.number < DECODE_ROWS:
            i = natural(lane.number)
            token, head, begin, end, part = row_of(batch, item, i)
            rows.query[i] = global_address(q) + token * q.strides[0] + head * q.strides[1]
            to = global_address(out) + token * out.strides[0] + head * out.strides[1]
            if item.splits > 1:
                to = global_address(parts) + (part + item.split) * parts.strides[2]
            rows.to[i] = to
            rows.token[i], rows.head[i], rows.begin[i], rows.end[i] = token, head, begin, end

    @register_jitable
    def told(record):
        a, b, c, d = load_shared_16(record)
        e, f, g, _ = load_shared_16(U32(record + 16))
        return Told(I32(a), I32(b), I32(c), I32(d), natural(e), natural(f), I32(g))

    @register_jitable
    def task(record):
        _, head, rows, splits = load_shared_16(U32(record + 16))
        return Task(I32(rows), natural(head), I32(splits))

    return count_items, all_items, put_task, told, task
