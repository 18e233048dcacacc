"""The pool's books: who has which block, what is found again, what is evicted, and what is refused."""

import numpy as np
import pytest
from block_books import SIZE, cached, prompt, refused
from numba import njit

import numkv
from numkv.blocks.pool import BlockPool
from numkv.blocks.prefix import block_digests
from numkv.blocks.records import MissReason


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


def test_blocks_of_the_callers_choice():
    pool = BlockPool(6, SIZE)
    ids = pool.allocate_ids([4, 1])
    assert ids.dtype == np.int32
    assert ids.tolist() == [4, 1]
    assert pool.allocate(2).tolist() == [0, 2]
    pool.check()
    assert pool.ref_count(range(6)).tolist() == [1, 1, 1, 0, 1, 0]
    refused(pool, numkv.CacheFull, "block 1, which has 1 references", pool.allocate_ids, [3, 1])
    refused(pool, numkv.NumkvError, "block 3 is listed twice", pool.allocate_ids, [5, 3, 3])
    refused(pool, IndexError, "got 6 at 1", pool.allocate_ids, [5, 6])
    refused(pool, IndexError, "got -1 at 0", pool.allocate_ids, [-1])
    assert pool.allocate_ids([]).tolist() == []
    pool.release([1])
    assert pool.allocate_ids(np.array([1], np.uint8)).tolist() == [1]
    assert pool.stats().peak_used == 4
    assert pool.stats().allocations == 5


def test_chosen_blocks_lose_what_they_held():
    events = []
    pool = BlockPool(4, SIZE, on_event=events.append)
    ids, names, tokens = cached(pool, 3)
    pool.pin(ids[2:])
    pool.release(ids)
    refused(
        pool,
        numkv.CacheFull,
        "block 2, which has 0 references and 1 pins",
        pool.allocate_ids,
        [0, 2],
    )
    mine = np.array([3, 1], np.int32)
    got = pool.allocate_ids(mine)
    assert not np.shares_memory(got, mine)
    assert pool.find(names, tokens).tolist() == [0, -1, 2]
    assert pool.stats().evictions == 1
    assert events[-1].block_ids.tolist() == [1]
    assert bytes(events[-1].block_hashes[0]) == bytes(names[1])
    pool.lookup(names, tokens)
    assert pool.miss_reason is MissReason.EVICTED
    pool.check()


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


@pytest.mark.nightly
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
