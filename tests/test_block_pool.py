"""The pool's books: who has which block, what is found again, what is evicted, and what is refused."""

import dataclasses
import logging

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numba import njit
from profiles import machine

import numkv
from numkv.blocks import arrays
from numkv.blocks.pool import BlockPool, BlocksRemoved, BlocksStored, MissReason, PoolStats
from numkv.blocks.prefix import block_digests

SIZE = 2  # tokens in a block


def state_of(pool: BlockPool) -> list[np.ndarray]:
    """Everything that a pool remembers, what it happens to hold in unused places included."""
    arrays = (
        pool._state, pool._digests, pool._tokens, pool._table, pool._evicted, pool._counters,
    )  # fmt: skip
    return [array.copy() for array in arrays]


def unchanged(pool: BlockPool, before: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(before, state_of(pool), strict=True))


def refused(pool: BlockPool, error, match: str, call, *args):
    """A call that raises and leaves everything as it was."""
    before = state_of(pool)
    with pytest.raises(error, match=match):
        call(*args)
    assert unchanged(pool, before)
    pool.check()


def prompt(n: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Names and tokens of a prompt of `n` full blocks; another `first` token makes another prompt."""
    tokens = np.arange(n * SIZE, dtype=np.int32)
    tokens[:1] = first + 1000
    return block_digests(tokens, SIZE), tokens


def cached(pool: BlockPool, n: int, first: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A prompt whose blocks are registered, and in use."""
    names, tokens = prompt(n, first)
    ids = pool.allocate(n)
    pool.register(ids, names, tokens)
    return ids, names, tokens


# -- allocate and release


def test_blocks_are_handed_out_in_order():
    """Four blocks: 0, 1, 2, 3, then an error; of 1 and 3 freed, 3 comes back first."""
    pool = BlockPool(4, 16)
    assert [pool.allocate(1).tolist() for _ in range(4)] == [[0], [1], [2], [3]]
    refused(pool, numkv.CacheFull, "expected at most 0 blocks, got 1", pool.allocate, 1)
    pool.release([1, 3])
    assert pool.num_free == 2
    assert pool.allocate(1).tolist() == [3]
    assert pool.allocate(1).tolist() == [1]
    pool.check()


def test_all_or_nothing():
    """Three blocks, two taken: two more are refused, and one stays free."""
    pool = BlockPool(3, 16)
    pool.allocate(2)
    refused(pool, numkv.CacheFull, "at most 1 blocks, got 2", pool.allocate, 2)
    assert pool.num_free == 1
    assert pool.allocate(1).tolist() == [2]


def test_full_leaves_cached_content_alone():
    pool = BlockPool(4, SIZE)
    ids, names, tokens = cached(pool, 3)
    pool.release(ids)
    pool.pin(ids[:1])
    refused(pool, numkv.CacheFull, "1 more are pinned", pool.allocate, 4)
    refused(pool, numkv.CacheFull, "at most 3 blocks", pool.allocate, 10**15)
    assert pool.lookup(names, tokens).tolist() == [0, 1, 2]


def test_many_at_once():
    pool = BlockPool(1000, 4)
    assert pool.allocate(0).tolist() == []
    ids = pool.allocate(1000)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(range(1000))
    assert pool.ref_count(ids).tolist() == [1] * 1000
    assert pool.num_free == 0
    pool.check()
    pool.release(ids)
    assert pool.num_free == pool.num_blocks == len(pool) == 1000
    pool.check()
    assert pool.allocate(1000).tolist() == list(range(999, -1, -1))


def test_references_are_counted():
    pool = BlockPool(4, SIZE)
    ids = pool.allocate(3)
    pool.acquire(ids[:2])
    pool.acquire([0, 0])
    assert pool.ref_count([0, 1, 2, 3]).tolist() == [4, 2, 1, 0]
    pool.release(ids)
    assert pool.num_free == 2
    pool.release([0, 0, 1])
    assert pool.ref_count(range(4)).tolist() == [1, 0, 0, 0]
    pool.release([0])
    assert pool.num_free == 4
    pool.check()


@pytest.mark.parametrize("ids", [[0, 1, 3], [3], [0, 0], [0, 1, 1, 0], [2, 2, 2]])
def test_double_frees(ids):
    """A block that is free, or listed more often than it has references."""
    pool = BlockPool(4, SIZE)
    pool.allocate(3)
    pool.acquire([2])
    block = next(b for i, b in enumerate(ids) if ids[: i + 1].count(b) > [1, 1, 2, 0][b])
    refused(pool, numkv.NumkvError, f"block {block} is released more often", pool.release, ids)
    pool.release([0, 1, 2, 2])
    assert pool.num_free == 4


def test_a_pool_without_blocks():
    pool = BlockPool(0, SIZE)
    refused(pool, numkv.CacheFull, "at most 0", pool.allocate, 1)
    refused(pool, IndexError, "got 0", pool.release, [0])
    assert pool.allocate(0).tolist() == []
    names, tokens = prompt(1)
    assert pool.lookup(names, tokens).tolist() == []


# -- the prefix cache


def test_what_is_freed_can_be_found_and_used_again():
    pool = BlockPool(4, SIZE)
    ids, names, tokens = cached(pool, 2)
    pool.release(ids)
    assert pool.num_free == 4
    found = pool.lookup(names, tokens)
    assert found.tolist() == [0, 1]
    assert found.dtype == np.int32
    assert pool.miss_reason is None
    assert pool.ref_count(found).tolist() == [0, 0]  # looking takes nothing
    pool.acquire(found)
    assert pool.num_free == 2
    assert pool.allocate(2).tolist() == [2, 3]
    pool.check()


def test_the_longest_prefix_is_found():
    pool = BlockPool(8, SIZE)
    ids, names, tokens = cached(pool, 3)
    more_names, more = block_digests([*tokens, 5, 5], SIZE), [*tokens, 5, 5]
    assert pool.lookup(more_names, more).tolist() == ids.tolist()
    assert pool.miss_reason is MissReason.ABSENT
    other = [*tokens[:2], 7, 7, *tokens[4:]]
    assert pool.lookup(block_digests(other, SIZE), other).tolist() == ids[:1].tolist()
    assert pool.lookup(names[1:], tokens[2:]).tolist() == ids[1:].tolist()
    assert pool.lookup(names[:0], []).tolist() == []
    assert pool.miss_reason is None


def test_other_extra_keys_are_another_prefix():
    pool = BlockPool(8, SIZE)
    _, _, tokens = cached(pool, 2)
    for extra in ({"adapter": 1}, {"salt": "1"}):
        assert len(pool.lookup(block_digests(tokens, SIZE, extra), tokens)) == 0


def test_tokens_are_compared_not_only_names():
    pool = BlockPool(4, SIZE)
    ids, names, tokens = cached(pool, 3)
    for wrong in (0, 3, 5):
        other = tokens.copy()
        other[wrong] += 1
        assert pool.lookup(names, other).tolist() == ids[: wrong // SIZE].tolist()
        assert pool.miss_reason is MissReason.TOKENS_DIFFER
        assert pool.find(names, other).tolist().count(-1) == 1


def test_tokens_come_flat_or_by_block_with_a_rest():
    pool = BlockPool(4, SIZE)
    names, tokens = prompt(2)
    ids = pool.allocate(2)
    assert pool.register(ids, names, [*tokens.tolist(), 9]).tolist() == [0, 1]
    for form in (tokens, tokens.tolist(), tokens.reshape(2, SIZE), tokens.astype(np.uint64)):
        assert pool.lookup(names, form).tolist() == [0, 1]
    frozen = names.copy()
    frozen.flags.writeable = False
    assert pool.lookup(frozen, tokens).tolist() == [0, 1]
    spread = np.zeros((4, 64), np.uint8)
    spread[::2, 32:] = names
    assert pool.lookup(spread[::2, 32:], tokens).tolist() == [0, 1]
    odd = np.frombuffer(b"x" + names.tobytes(), np.uint8)[1:].reshape(2, 32)  # not aligned
    assert pool.lookup(odd, tokens).tolist() == [0, 1]


def test_the_first_of_two_equal_blocks_stays():
    pool = BlockPool(4, SIZE)
    ids, names, tokens = cached(pool, 2)
    twins = pool.allocate(2)
    assert pool.register(twins, names, tokens).tolist() == ids.tolist()
    assert pool.lookup(names, tokens).tolist() == ids.tolist()
    assert pool.is_cached([0, 1, 2, 3]).tolist() == [True, True, False, False]
    pool.release(twins)
    assert pool.allocate(2).tolist() == twins.tolist()[::-1]  # nothing of theirs is cached
    assert pool.stats().evictions == 0
    assert pool.register(ids, names, tokens).tolist() == ids.tolist()  # once more changes nothing
    assert pool.stats().stores == 2
    pool.check()


def test_equal_blocks_in_one_call():
    pool = BlockPool(4, SIZE)
    names, tokens = prompt(1)
    twice = pool.register(pool.allocate(2), names.repeat(2, axis=0), np.tile(tokens, 2))
    assert twice.tolist() == [0, 0]
    pool.check()


def test_a_name_that_is_taken_by_other_tokens():
    pool = BlockPool(4, SIZE)
    ids, names, tokens = cached(pool, 1)
    assert pool.register(pool.allocate(1), names, tokens + 1).tolist() == [1]
    assert not pool.is_cached([1])[0]
    assert pool.lookup(names, tokens).tolist() == ids.tolist()
    pool.check()


def test_only_blocks_in_use_can_be_registered():
    pool = BlockPool(4, SIZE)
    ids, names, tokens = cached(pool, 2)
    refused(pool, numkv.NumkvError, "block 3 is free", pool.register, [3], names[:1], tokens[:2])
    new = pool.allocate(2)
    args = ([2, 2], names, tokens)
    refused(pool, numkv.NumkvError, "block 2 is listed twice", pool.register, *args)
    args = ([2, 0], *prompt(2, 5))
    refused(pool, numkv.NumkvError, "block 0 holds other content", pool.register, *args)
    args = ([0], names[:1], tokens[:2] + 1)
    refused(pool, numkv.NumkvError, "block 0 holds other content", pool.register, *args)
    pool.release(ids)
    refused(pool, numkv.NumkvError, "block 1 is free", pool.register, [2, 1], names, tokens)
    pool.release(new)


def test_forgotten_content_is_not_found():
    pool = BlockPool(6, SIZE)
    ids, names, tokens = cached(pool, 4)
    pool.release(ids[2:])
    pool.forget([1, 2, 5])  # in use, evictable, and one that holds nothing
    pool.check()
    assert pool.lookup(names, tokens).tolist() == [0]
    assert pool.miss_reason is MissReason.ABSENT
    assert pool.find(names, tokens).tolist() == [0, -1, -1, 3]
    assert pool.ref_count(range(4)).tolist() == [1, 1, 0, 0]
    assert pool.allocate(1).tolist() == [2]
    pool.forget()
    assert not pool.is_cached(range(6)).any()
    assert pool.num_free == 3
    pool.check()
    pool.register([1], *prompt(1, 8))  # a block that was written again
    pool.check()


# -- eviction


def test_blocks_that_hold_nothing_go_first():
    pool = BlockPool(5, SIZE)
    a, names, tokens = cached(pool, 2)
    plain = pool.allocate(1)
    pool.release(a)
    pool.release(plain)
    assert pool.allocate(3).tolist() == [2, 3, 4]
    assert pool.lookup(names, tokens).tolist() == [0, 1]
    assert pool.stats().evictions == 0
    assert pool.allocate(1).tolist() == [1]
    assert pool.stats().evictions == 1
    assert pool.lookup(names, tokens).tolist() == [0]
    assert pool.miss_reason is MissReason.EVICTED
    pool.check()


def test_a_sequences_last_blocks_are_evicted_first():
    pool = BlockPool(6, SIZE)
    ids, names, tokens = cached(pool, 6)
    pool.release(ids)
    for left in range(5, -1, -1):
        assert pool.allocate(1).tolist() == [left]
        assert pool.lookup(names, tokens).tolist() == list(range(left))
    pool.check()


def test_the_least_recently_used_sequence_goes_first():
    pool = BlockPool(6, SIZE)
    a, b, c = (cached(pool, 2, first) for first in range(3))
    for ids, *_ in (b, a, c):
        pool.release(ids)
    again = pool.lookup(*b[1:])
    pool.acquire(again)
    pool.release(again)  # b has been used last
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert order == [a[0][1], a[0][0], c[0][1], c[0][0], b[0][1], b[0][0]]
    pool.check()


def test_a_shared_prefix_outlives_its_continuations():
    pool = BlockPool(6, SIZE)
    stem, names, tokens = cached(pool, 2)
    left, right = pool.allocate(1), pool.allocate(1)
    for tail, token in ((left, 7), (right, 8)):
        pool.register(tail, block_digests([token] * 2, SIZE, parent=names[-1]), [token] * 2)
    pool.acquire(stem)
    pool.release([*stem, *left])
    pool.release([*stem, *right])
    pool.allocate(2)
    assert pool.allocate(4).tolist() == [2, 3, 1, 0]


def test_looking_does_not_change_the_order():
    pool = BlockPool(2, SIZE)
    a, b = cached(pool, 1, 0), cached(pool, 1, 1)
    pool.release(a[0])
    pool.release(b[0])
    pool.lookup(*a[1:])
    pool.find(*a[1:])
    assert pool.allocate(1).tolist() == a[0].tolist()


def test_evicted_content_that_comes_back_is_found():
    pool = BlockPool(2, SIZE)
    ids, names, tokens = cached(pool, 2)
    pool.release(ids)
    other = pool.allocate(2)
    assert len(pool.lookup(names, tokens)) == 0
    assert pool.miss_reason is MissReason.EVICTED
    pool.register(other, names, tokens)
    assert pool.lookup(names, tokens).tolist() == other.tolist()
    pool.forget()
    pool.lookup(names, tokens)
    assert pool.miss_reason is MissReason.ABSENT  # dropped on purpose, not evicted


# -- pins


def test_pinned_blocks_are_never_evicted():
    pool = BlockPool(4, SIZE)
    ids, names, tokens = cached(pool, 4)
    pool.release(ids)
    pool.pin(ids[:2])
    assert pool.num_free == 2
    assert pool.stats().pinned == 2
    assert sorted(pool.allocate(2).tolist()) == [2, 3]
    refused(pool, numkv.CacheFull, "2 more are pinned", pool.allocate, 1)
    assert pool.lookup(names, tokens).tolist() == [0, 1]
    pool.acquire([0, 1])
    pool.release([0, 1])
    refused(pool, numkv.CacheFull, "2 more are pinned", pool.allocate, 1)
    pool.unpin([0, 1])
    assert pool.allocate(2).tolist() == [1, 0]
    pool.check()


def test_pins_are_counted():
    pool = BlockPool(2, SIZE)
    ids, names, tokens = cached(pool, 1)
    pool.pin([0, 0])
    pool.pin([0])
    pool.release(ids)
    pool.unpin([0, 0])
    assert pool.num_free == 1
    assert pool.stats().pinned == 1
    pool.unpin([0])
    assert pool.num_free == 2
    assert pool.stats().pinned == 0
    assert pool.lookup(names, tokens).tolist() == [0]
    refused(pool, numkv.NumkvError, "block 0 is unpinned more often", pool.unpin, [0])
    pool.pin([0])
    refused(pool, numkv.NumkvError, "block 0 is unpinned more often", pool.unpin, [0, 0])


def test_there_must_be_something_to_pin():
    pool = BlockPool(4, SIZE)
    cached(pool, 1)
    pool.allocate(1)
    for block in (1, 2):  # in use, free
        refused(pool, numkv.NumkvError, f"block {block} holds no cached", pool.pin, [0, block])
    pool.pin([0])
    refused(pool, numkv.NumkvError, "block 0 is pinned", pool.forget, [1, 0])
    refused(pool, numkv.NumkvError, "block 0 is pinned", pool.forget)


def test_free_blocks_that_hold_nothing_cannot_be_acquired():
    pool = BlockPool(4, SIZE)
    pool.allocate(1)
    refused(pool, numkv.NumkvError, "block 2 is free", pool.acquire, [0, 2])


# -- arguments

BY_IDS = ["release", "acquire", "pin", "unpin", "forget", "ref_count", "is_cached"]


@pytest.mark.parametrize("method", BY_IDS)
@pytest.mark.parametrize("wrong", [-1, 4, 2**31, 2**32, -(2**32)])
@pytest.mark.parametrize("at", [0, 1])
def test_ids_out_of_range(method, wrong, at):
    pool = BlockPool(4, SIZE)
    cached(pool, 2)
    if method == "unpin":
        pool.pin([0])
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


@pytest.mark.parametrize("method", [*BY_IDS, "register"])
@pytest.mark.parametrize(
    ("ids", "error"),
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


@pytest.mark.parametrize("method", ["register", "lookup", "find"])
@pytest.mark.parametrize(
    ("names", "tokens", "error", "match"),
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


# -- the books


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


# -- events


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


# -- .jit


@njit
def grow(pool, table, n):
    """A user's own decode loop: `n` blocks, one by one."""
    for i in range(n):
        if not pool.allocate(table[i : i + 1]):
            return i
    return n


@njit
def share(pool, names, tokens, table):
    """Reuse what is cached, allocate the rest, register all."""
    found = pool.lookup(names, tokens, table)
    if pool.acquire(table[:found]) >= 0 or not pool.allocate(table[found:]):
        return -1
    holders = np.empty(len(table), np.int32)
    if pool.register(table, names, tokens, holders) >= 0:
        return -1
    return found


@njit
def manage(pool, ids, names, tokens, out):
    """The other methods, and what they say about a wrong id."""
    out[0] = pool.pin(ids)
    out[1] = pool.release(ids)
    out[2] = pool.num_free
    out[3] = pool.unpin(ids)
    out[4] = pool.unpin(ids)
    out[5] = pool.ref_count(ids[0])
    places = np.empty(len(ids), np.int32)
    pool.find(names, tokens, places)
    out[6] = places[0]
    out[7] = pool.forget(ids)
    pool.find(names, tokens, places)
    out[8] = places[0]
    out[9] = pool.release(ids)
    out[10] = pool.num_blocks


def test_own_code():
    """Nopython code and Python methods work on the same books."""
    pool = BlockPool(6, SIZE)
    assert pool.jit is pool.jit
    table = np.full(8, -9, np.int32)
    assert grow(pool.jit, table, 8) == 6
    assert table.tolist() == [0, 1, 2, 3, 4, 5, -9, -9]
    assert pool.num_free == 0
    pool.release(table[:6])
    names, tokens = prompt(3)
    words = names.view(np.uint64)
    table = np.empty(3, np.int32)
    assert share(pool.jit, words, tokens, table) == 0
    assert pool.lookup(names, tokens).tolist() == table.tolist() == [5, 4, 3]
    assert share(pool.jit, words, tokens, table) == 3
    assert pool.ref_count(table).tolist() == [2, 2, 2]
    pool.check()
    pool.release(table)
    out = np.zeros(11, np.int64)
    manage(pool.jit, table, words, tokens, out)
    assert out.tolist() == [-1, -1, 3, -1, 0, 0, 5, -1, -1, 0, 6]
    assert pool.num_free == 6
    pool.check()


# -- the model

WIDTH = 8  # blocks in the machine's pools


def contents():
    """Names and tokens: many begin their search at the same place, and two have one name."""
    names = np.zeros((12, 32), np.uint8)
    names[:, 0] = [1, 1, 1, 1, 15, 15, 15, 0, 0, 9, 9, 9]
    names[:, 9] = range(12)
    names[11] = names[10]
    tokens = np.arange(12 * SIZE, dtype=np.int32).reshape(12, SIZE)
    return names, tokens


NAMES, TOKENS = contents()
NAME_OF = [bytes(name) for name in NAMES]


class Refused(Exception):
    """The model's own word for a call that must change nothing."""


class Model:
    """What a pool is, in dictionaries and lists."""

    def __init__(self, n):
        self.refs = dict.fromkeys(range(n), 0)
        self.pins = dict.fromkeys(range(n), 0)
        self.content = {}  # block: number of its content
        self.free = list(range(n))[::-1]  # a stack
        self.lru = []  # oldest first
        self.gone = {}  # names that were evicted and not stored again: the last for each home in the table

    def named(self, name):
        return next((b for b, c in self.content.items() if NAME_OF[c] == name), None)

    def holder(self, c):
        """The block with content `c`, or why there is none."""
        block = self.named(NAME_OF[c])
        if block is None:
            return MissReason.EVICTED if NAME_OF[c] in self.gone.values() else MissReason.ABSENT
        return block if self.content[block] == c else MissReason.TOKENS_DIFFER

    def shelve(self, ids):
        for b in ids:
            if not self.refs[b] and b not in self.content and b not in self.free:
                self.free.append(b)
        for b in reversed(ids):
            idle = not self.refs[b] and not self.pins[b] and b in self.content
            if idle and b not in self.lru:
                self.lru.append(b)

    def unshelve(self, b):
        if b in self.lru:
            self.lru.remove(b)

    def allocate(self, n):
        if n > len(self.free) + len(self.lru):
            raise Refused
        ids = []
        for _ in range(n):
            if self.free:
                block = self.free.pop()
            else:
                block = self.lru.pop(0)
                name = NAME_OF[self.content.pop(block)]
                self.gone[name[0] % (2 * WIDTH)] = name
            self.refs[block] = 1
            ids.append(block)
        return ids

    def release(self, ids):
        if any(ids.count(b) > self.refs[b] for b in ids):
            raise Refused
        for b in ids:
            self.refs[b] -= 1
        self.shelve(ids)

    def acquire(self, ids):
        if any(not self.refs[b] and b not in self.content for b in ids):
            raise Refused
        for b in ids:
            self.unshelve(b)
            self.refs[b] += 1

    def pin(self, ids):
        if any(b not in self.content for b in ids):
            raise Refused
        for b in ids:
            self.unshelve(b)
            self.pins[b] += 1

    def unpin(self, ids):
        if any(ids.count(b) > self.pins[b] for b in ids):
            raise Refused
        for b in ids:
            self.pins[b] -= 1
        self.shelve(ids)

    def register(self, ids, cs):
        if len(set(ids)) < len(ids) or any(
            not self.refs[b] or self.content.get(b, c) != c for b, c in zip(ids, cs, strict=True)
        ):
            raise Refused
        holders = []
        for b, c in zip(ids, cs, strict=True):
            holder = self.named(NAME_OF[c])
            if holder is None:
                self.content[b] = c
                home = NAME_OF[c][0] % (2 * WIDTH)
                if self.gone.get(home) == NAME_OF[c]:
                    del self.gone[home]
            same = holder is not None and self.content[holder] == c
            holders.append(holder if same else b)
        return holders

    def forget(self, ids):
        if any(self.pins[b] for b in ids):
            raise Refused
        for b in ids:
            self.unshelve(b)
            self.content.pop(b, None)
        self.shelve(ids)


IDS = st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=4)
CONTENTS = st.lists(st.integers(0, len(NAMES) - 1), min_size=1, max_size=4)
CALLS = st.sampled_from(["release"] * 4 + ["unpin"] * 2 + ["acquire", "pin", "forget"])


class PoolModel(RuleBasedStateMachine):
    """Any calls in any order do to a pool what they do to the model, or nothing at all."""

    @initialize()
    def begin(self):
        self.pool, self.model = BlockPool(WIDTH, SIZE), Model(WIDTH)
        self.running = []

    def both(self, name, args, model_args=None):
        """Make a call on both; returns what the pool and the model returned."""
        before = state_of(self.pool)
        try:
            want = getattr(self.model, name)(*(model_args or args))
        except Refused:
            error = numkv.CacheFull if name == "allocate" else numkv.NumkvError
            try:
                getattr(self.pool, name)(*args)
            except error:
                assert unchanged(self.pool, before)
                return None, None
            raise AssertionError(f"{name} was not refused") from None
        return getattr(self.pool, name)(*args), want

    @rule(cs=CONTENTS)
    def begin_sequence(self, cs):
        """What a cache does with a new prompt: use what is there, fill the rest, make it findable."""
        found = self.lookup(cs)
        self.both("acquire", (found,))
        ids, want = self.both("allocate", (len(cs) - len(found),))
        if ids is None:
            self.both("release", (found,))
            return
        assert ids.tolist() == want
        self.running.append([*found, *want])
        self.register_these(self.running[-1], cs)

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0, 9))
    def end_sequence(self, i):
        self.both("release", (self.running.pop(i % len(self.running)),))

    @rule(cs=CONTENTS)
    def look(self, cs):
        self.lookup(cs)

    @rule(n=st.sampled_from([1, 1, 1, 2, 3, WIDTH + 1]))
    def allocate(self, n):
        ids, want = self.both("allocate", (n,))
        assert ids is None or ids.tolist() == want

    @rule(ids=IDS, name=CALLS)
    def by_ids(self, ids, name):
        self.both(name, (ids,))

    @rule(
        picks=st.lists(st.integers(0, 4 * WIDTH), min_size=1, max_size=6),
        name=CALLS,
    )
    def by_likely_ids(self, picks, name):
        """Ids that will do."""
        model = self.model
        likely = {
            "release": [b for b in model.refs for _ in range(model.refs[b])],
            "acquire": [b for b in model.refs if model.refs[b] or b in model.content],
            "pin": list(model.content),
            "unpin": [b for b in model.pins for _ in range(model.pins[b])],
            "forget": [b for b in model.content if not model.pins[b]],
        }[name]
        self.both(name, ([likely.pop(i % len(likely)) for i in picks if likely],))

    def register_these(self, ids, cs):
        holders, want = self.both("register", (ids, NAMES[cs], TOKENS[cs]), (ids, cs))
        assert holders is None or holders.tolist() == want

    @rule(cs=CONTENTS, first=st.integers(0, WIDTH))
    def register(self, cs, first):
        """Blocks in use."""
        ids = [b for b in self.model.refs if self.model.refs[b]]
        ids = (ids[first:] + ids[:first])[: len(cs)]
        self.register_these(ids, cs[: len(ids)])

    @rule(ids=IDS, cs=CONTENTS)
    def register_anything(self, ids, cs):
        n = min(len(ids), len(cs))
        self.register_these(ids[:n], cs[:n])

    def lookup(self, cs):
        want, reason = [], None
        for c in cs:
            holder = self.model.holder(c)
            if isinstance(holder, MissReason):
                reason = holder
                break
            want.append(holder)
        before = state_of(self.pool)[:-1]
        assert self.pool.lookup(NAMES[cs], TOKENS[cs]).tolist() == want
        assert self.pool.miss_reason is reason
        assert all(map(np.array_equal, before, state_of(self.pool)[:-1]))
        return want

    @invariant()
    def same(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        pool, model = self.pool, self.model
        blocks_ = range(WIDTH)
        assert pool.ref_count(blocks_).tolist() == list(model.refs.values())
        assert pool.is_cached(blocks_).tolist() == [b in model.content for b in blocks_]
        assert pool.num_free == len(model.free) + len(model.lru)
        every = range(len(NAMES))
        holders = [model.holder(c) for c in every]
        want = [-1 if isinstance(h, MissReason) else h for h in holders]
        assert pool.find(NAMES, TOKENS).tolist() == want
        stats = pool.stats()
        assert stats.used == sum(map(bool, model.refs.values()))
        assert stats.cached == len(model.content)
        assert stats.evictable == len(model.lru)
        assert stats.pinned == sum(map(bool, model.pins.values()))


TestPoolModel = machine(PoolModel)


def test_a_long_random_walk(rng):
    """The machine's steps, thousands of them, in a row: deeper into the states than hypothesis goes."""
    machine = PoolModel()
    machine.begin()

    def some(high, most=4):
        return rng.integers(0, high, rng.integers(1, most + 1)).tolist()

    for _ in range(4000):
        name = str(rng.choice(["release"] * 4 + ["unpin"] * 2 + ["acquire", "pin", "forget"]))
        match int(rng.integers(10)):
            case 0 | 1 | 2:
                machine.begin_sequence(cs=some(len(NAMES)))
            case 3 | 4 if machine.running:
                machine.end_sequence(i=int(rng.integers(10)))
            case 5:
                machine.allocate(n=int(rng.choice([1, 2, WIDTH + 1])))
            case 6:
                machine.register(cs=some(len(NAMES)), first=int(rng.integers(WIDTH)))
            case 7:
                machine.by_ids(ids=some(WIDTH), name=name)
            case _:
                machine.by_likely_ids(picks=some(4 * WIDTH, 6), name=name)
        machine.same()
    stats = machine.pool.stats()
    assert stats.evictions > 300
    assert stats.hits > 300
    assert stats.stores > 300


def test_a_long_random_life(rng):
    """Sequences come and go in a pool that is too small for them; at the end nothing is left over."""
    pool, size = BlockPool(200, SIZE), SIZE
    running = []
    for _ in range(1500):
        if running and rng.random() < 0.5:
            pool.release(running.pop(rng.integers(len(running))))
            continue
        tokens = rng.integers(0, 3, rng.integers(1, 12) * size).astype(np.int32)
        names = block_digests(tokens, size)
        found = pool.lookup(names, tokens)
        pool.acquire(found)
        try:
            new = pool.allocate(len(names) - len(found))
        except numkv.CacheFull:
            pool.release(found)
            continue
        ids = np.concatenate([found, new])
        holders = pool.register(ids, names, tokens)
        assert np.array_equal(holders[: len(found)], found)
        running.append(ids)
    pool.check()
    stats = pool.stats()
    assert stats.hits > 0
    assert stats.evictions > 0
    counts = np.bincount(np.concatenate(running), minlength=200)
    assert pool.ref_count(range(200)).tolist() == counts.tolist()
    for ids in running:
        pool.release(ids)
    assert pool.num_free == 200
    pool.forget()
    pool.check()
    assert sorted(pool.allocate(200).tolist()) == list(range(200))
