"""What a `BlockPool` refuses, and what it tells of itself."""

import dataclasses
import logging

import numpy as np
import pytest
from block_books import SIZE, cached, prompt, refused
from walked import each

import numkv
from numkv.blocks import arrays
from numkv.blocks.pool import BlockPool
from numkv.blocks.records import BlocksRemoved, BlocksStored, PoolStats


def test_free_blocks_that_hold_nothing_cannot_be_acquired():
    pool = BlockPool(4, SIZE)
    pool.allocate(1)
    refused(pool, numkv.NumkvError, "block 2 is free", pool.acquire, [0, 2])


BY_IDS = ["allocate_ids", "release", "acquire", "pin", "unpin", "forget", "ref_count", "is_cached"]


@each("method", BY_IDS)
@each("wrong", [-1, 4, 2**31, 2**32, -(2**32)])
@each("at", [0, 1])
def test_ids_out_of_range(method, wrong, at):
    pool = BlockPool(4, SIZE)
    cached(pool, 2)
    if method == "unpin":
        pool.pin([0])
    if method == "allocate_ids":
        pool.release([0])
    ids = [0]
    ids.insert(at, wrong)
    refused(pool, IndexError, rf"in \[0, 4\), got {wrong} at", getattr(pool, method), ids)
    if abs(wrong) < 2**31:
        array = np.array(ids, np.int32)
        refused(pool, IndexError, f"got {wrong} at", getattr(pool, method), array)


@pytest.mark.parametrize("wrong", [-1, 4, 2**32])
@pytest.mark.parametrize("events", [None, print])
def test_ids_to_register_out_of_range(wrong, events):
    pool = BlockPool(4, SIZE, on_event=events)
    pool.allocate(2)
    refused(pool, IndexError, f"got {wrong} at 1", pool.register, [0, wrong], *prompt(2))


@each("method", [*BY_IDS, "register"])
@each(
    "ids, error",
    [
        ([0.0], numkv.UnsupportedDType),
        ([True], numkv.UnsupportedDType),
        (["0"], numkv.UnsupportedDType),
        (0, numkv.DimensionMismatch),
        ([[0]], numkv.DimensionMismatch),
    ],
)
def test_ids_that_are_none(method, ids, error):
    pool = BlockPool(4, SIZE)
    cached(pool, 2)
    args = prompt(1, 3) if method == "register" else ()
    refused(pool, error, "`ids`: expected", getattr(pool, method), ids, *args)


def test_ids_come_in_any_form():
    pool = BlockPool(8, SIZE)
    pool.allocate(8)
    pool.release((0, 1))
    pool.release(np.array([2], np.uint8))
    pool.release(np.arange(8, dtype=np.int32)[3:7:2])
    pool.release(np.array([4], np.int64))
    pool.release(range(6, 7))
    pool.release([])
    assert pool.ref_count(range(8)).tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    pool.check()


@each("method", ["register", "lookup", "find"])
@each(
    "names, tokens, error, match",
    [
        (np.zeros((2, 31), np.uint8), [1] * 4, numkv.DimensionMismatch, "`digests`"),
        (np.zeros(64, np.uint8), [1] * 4, numkv.DimensionMismatch, "`digests`"),
        (np.zeros((2, 32), np.int8), [1] * 4, numkv.UnsupportedDType, "`digests`"),
        (np.zeros((2, 32), np.uint8), [1] * 3, numkv.DimensionMismatch, "`tokens`"),
        (np.zeros((2, 32), np.uint8), [1] * 6, numkv.DimensionMismatch, "`tokens`"),
        (np.zeros((2, 32), np.uint8), [[1] * 4], numkv.DimensionMismatch, "`tokens`"),
        (np.zeros((2, 32), np.uint8), [1.0] * 4, numkv.UnsupportedDType, "`tokens`"),
        (np.zeros((2, 32), np.uint8), [1, 2, 3, -4], ValueError, "`tokens`"),
    ],
)
def test_contents_of_the_wrong_form(method, names, tokens, error, match):
    pool = BlockPool(4, SIZE)
    ids = [pool.allocate(2)] if method == "register" else []
    refused(pool, error, match, getattr(pool, method), *ids, names, tokens)


def test_as_many_names_as_ids():
    pool = BlockPool(4, SIZE)
    pool.allocate(3)
    args = ([0, 1, 2], *prompt(2))
    refused(pool, numkv.DimensionMismatch, r"`digests`: expected uint8 \(3, 32\)", pool.register, *args)  # fmt: skip


@pytest.mark.parametrize(("num_blocks", "block_size"), [(-1, 1), (1, 0), (1, -2)])
def test_sizes(num_blocks, block_size):
    with pytest.raises(numkv.DimensionMismatch):
        BlockPool(num_blocks, block_size)


def test_a_number_of_blocks():
    pool = BlockPool(4, SIZE)
    refused(pool, numkv.DimensionMismatch, "`n`", pool.allocate, -1)
    refused(pool, TypeError, "`n`", pool.allocate, 1.0)


def test_stats():
    pool = BlockPool(6, SIZE)
    assert pool.stats() == PoolStats(6, *[6] + [0] * 11)
    assert pool.stats().hit_rate == 0
    ids, names, tokens = cached(pool, 4)
    pool.pin(ids[:1])
    pool.release(ids)
    pool.lookup(names, tokens)
    pool.lookup(*prompt(4, 1))
    pool.allocate(3)
    assert pool.stats() == PoolStats(
        num_blocks=6, free=2, used=3, cached=3, evictable=2, pinned=1, peak_used=4,
        allocations=7, evictions=1, stores=4, lookups=2, hits=4, misses=4,
    )  # fmt: skip
    assert pool.stats().hit_rate == 0.5
    assert dataclasses.asdict(pool.stats())["cached"] == 3
    assert "6 blocks of 2 tokens, 3 in use, 2 free, 3 cached" in repr(pool)


REF, PINS, CACHED, PREV, NEXT = range(5)


def corrupt(name, *place):
    return lambda pool, value: getattr(pool, name).__setitem__(place, value)


CORRUPTIONS = {
    "a reference that was never taken": (corrupt("_state", REF, 5), 1, "block 5"),
    "a reference that was lost": (
        corrupt("_state", REF, 1),
        0,
        "wrong list, or none, holds block 1",
    ),
    "a reference that a pinned block lost": (corrupt("_state", REF, 0), 0, "`used` is 3"),
    "a negative count": (corrupt("_state", REF, 0), -1, "impossible"),
    "a negative pin": (corrupt("_state", PINS, 0), -1, "impossible"),
    "a pin too many": (corrupt("_state", PINS, 2), 1, "wrong list"),
    "a pin on nothing": (corrupt("_state", PINS, 4), 1, "without cached content"),
    "a mark that does not exist": (corrupt("_state", CACHED, 1), 2, "impossible"),
    "content from nowhere": (corrupt("_state", CACHED, 4), 1, "wrong number"),
    "content that is gone": (corrupt("_state", CACHED, 1), 0, "holds nothing"),
    "content lost by a free block": (corrupt("_state", CACHED, 2), 0, "wrong list"),
    "a link out of the pool": (corrupt("_state", NEXT, 5), 10**6, "broken at block 5"),
    "a negative link": (corrupt("_state", NEXT, 5), -7, "broken at block 5"),
    "a link to itself": (corrupt("_state", NEXT, 5), 5, "broken at block 5"),
    "a wrong link back": (corrupt("_state", PREV, 5), 2, "broken at block 5"),
    "a list that lost its beginning": (corrupt("_state", NEXT, 8), 8, "head of the free list"),
    "a list that lost its end": (corrupt("_state", PREV, 9), 9, "head of the evictable list"),
    "a used block with a link": (corrupt("_state", NEXT, 0), 5, "block 0"),
    "a counter of free blocks": (corrupt("_counters", arrays.FREE), 0, "`free` is 0"),
    "a counter of evictable blocks": (corrupt("_counters", arrays.EVICTABLE), 7, "`evictable`"),
    "a counter of used blocks": (corrupt("_counters", arrays.USED), 7, "`used` is 7"),
    "a counter of cached blocks": (corrupt("_counters", arrays.HOLDING), 7, "`cached`"),
    "a counter of pinned blocks": (corrupt("_counters", arrays.PINNED), 7, "`pinned`"),
    "another name": (corrupt("_digests", 1), 12345, "does not lead to block 1"),
    "an empty table": (corrupt("_table", slice(None)), -1, "wrong number"),
    "a full table": (corrupt("_table", slice(None)), 1, "wrong number"),
    "a table that leads out": (corrupt("_table", slice(None)), 99, "table"),
    "a table that leads below": (corrupt("_table", slice(None)), -5, "table"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_check_finds(what):
    """One number is wrong: in a pool with blocks that are used, cached, pinned, evictable and free."""
    change, value, match = CORRUPTIONS[what]
    pool = BlockPool(8, SIZE)
    ids, *_ = cached(pool, 4)  # 0 pinned, 1 in use, 2 and 3 evictable
    pool.allocate(1)
    pool.acquire([0])
    pool.pin([0])
    pool.release(ids[2:])
    pool.check()
    change(pool, value)
    with pytest.raises(numkv.NumkvError, match=f"accounting is broken: .*{match}"):
        pool.check()


def test_check_finds_two_blocks_of_one_name():
    pool = BlockPool(4, SIZE)
    cached(pool, 2)
    pool._digests[1] = pool._digests[0]
    with pytest.raises(numkv.NumkvError, match="does not lead to"):
        pool.check()


def test_events():
    events = []
    pool = BlockPool(4, SIZE, on_event=events.append)
    ids, names, tokens = cached(pool, 3)
    (stored,) = events
    assert isinstance(stored, BlocksStored)
    assert np.array_equal(stored.block_hashes, names)
    assert stored.block_ids.tolist() == ids.tolist()
    assert stored.token_ids.ravel().tolist() == tokens.tolist()
    assert stored.block_size == SIZE
    pool.register(ids, names, tokens)
    pool.register(pool.allocate(1), names[:1], tokens[:SIZE])  # another has it
    pool.release([3])
    pool.release(ids)
    pool.lookup(names, tokens)
    pool.allocate(1)
    assert len(events) == 1
    pool.allocate(1)
    pool.forget([0, 0, 2, 3])
    pool.forget([0])
    removed = events[1:]
    assert all(isinstance(event, BlocksRemoved) for event in removed)
    assert [event.block_ids.tolist() for event in removed] == [[2], [0]]
    assert [event.block_hashes.tolist() for event in removed] == [
        names[2:].tolist(),
        names[:1].tolist(),
    ]


def test_a_listener_that_fails_changes_nothing(caplog):
    def listener(event):
        raise RuntimeError("not now")

    pool = BlockPool(2, SIZE, on_event=listener)
    with caplog.at_level(logging.ERROR, "numkv.blocks.pool"):
        ids, names, tokens = cached(pool, 2)
        pool.release(ids)
        assert pool.allocate(1).tolist() == [1]
    assert [record.exc_info[0] for record in caplog.records] == [RuntimeError] * 2
    assert pool.lookup(names, tokens).tolist() == [0]
    pool.check()
