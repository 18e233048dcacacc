"""Shards that die: before and after a message, in commits, while others are made anew; sequences that come back."""

import pickle

import numpy as np
import pytest
from paged_caches import check_attention
from sharded_caches import FaultyShards, grow, make, same, through

import numkv
from numkv.ray import ShardLost

TEXTS = [np.random.default_rng(n).integers(0, 99, 40) for n in range(3)]


def started(layout, lengths=(11, 7), shards=None, **options):
    cache = make(layout, shards=shards or FaultyShards(), **options)
    for text, n in zip(TEXTS, lengths, strict=False):
        grow(cache, {cache.add(text[:n]): text[:n]})
    return cache


def finish(cache, lost=None, to=16):
    """Compute what is missing, from what the error says where there is one; all must be right then."""
    if lost is not None:
        for seq in lost.sequences:
            known = np.concatenate([TEXTS[seq][: lost.lengths[seq]], lost.tokens[seq]])
            grow(cache, {seq: known})
    for seq in cache.sequences:
        grow(cache, {seq: TEXTS[seq][:to]})
        check_attention(cache, same, np.asarray, seq, TEXTS[seq][:to])
    cache.check()


@pytest.mark.parametrize("layout", [(2, 1, None), (1, 2, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("what", ["before", "after", "slow"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_shard_that_is_lost_in_a_step(layout, what, n):
    """In the first layer's message, which begins the step, and in one between."""
    cache = started(layout)
    cache._shards.transport.at(1, "layer", what, n)
    with pytest.raises(ShardLost) as lost:
        grow(cache, {0: TEXTS[0][:12], 1: TEXTS[1][:8]})
    assert lost.value.shards == (1,)
    assert len(lost.value.steps) == 1
    assert not lost.value.steps[0].open
    assert set(lost.value.sequences) == {0, 1}
    for seq in (0, 1):
        kept, length = lost.value.lengths[seq], (11, 7)[seq]
        assert cache.length(seq) == kept < length
        np.testing.assert_array_equal(lost.value.tokens[seq], TEXTS[seq][kept:length])
    cache.check()
    finish(cache, lost.value)


def test_the_error_of_a_loss_survives_a_process_boundary():
    """Ray ends an actor whose error cannot be pickled."""
    cache = started((2, 1, None))
    cache._shards.transport.at(1, "layer", "before")
    with pytest.raises(ShardLost) as lost:
        grow(cache, {0: TEXTS[0][:12]})
    want, found = lost.value, pickle.loads(pickle.dumps(lost.value))
    assert str(found) == str(want)
    assert (found.sequences, found.lengths, found.shards, found.hopeless) == (
        (0, 1),
        want.lengths,
        (1,),
        False,
    )
    np.testing.assert_equal(found.tokens, want.tokens)
    assert (len(want.steps), found.steps) == (1, ())


@pytest.mark.parametrize("what", ["before", "after"])
def test_a_shard_that_is_lost_with_a_commit(what):
    """The commit rides along with the next message: what it kept is named."""
    cache = started((2, 1, None))
    cache._shards.transport.at(0, "commit", what)
    with pytest.raises(ShardLost) as lost:
        grow(cache, {1: TEXTS[1][:8]})
    assert lost.value.lengths == {0: 0, 1: 0}
    assert len(lost.value.tokens[1]) == 7
    finish(cache, lost.value)


def test_a_step_goes_on_from_the_length_that_is_expected():
    """While one sequence is computed again another may get shorter: who did not hear of it is told by its step."""
    cache = started((2, 1, None))
    with pytest.raises(ShardLost) as lost:
        cache._shards.transport.at(1, "layer", "before")
        grow(cache, {0: TEXTS[0][:12]})
    assert lost.value.lengths == {0: 0, 1: 0}
    grow(cache, {1: TEXTS[1][:7]})
    cache._shards.transport.kill(0)
    with pytest.raises(ShardLost):
        grow(cache, {0: TEXTS[0][:11]})
    with pytest.raises(
        numkv.DimensionMismatch, match=r"`expect`: expected sequence 1 to have 7 tokens, got 0"
    ):
        cache.reserve([0, 1], [1, 1], expect=[0, 7])
    with pytest.raises(IndexError, match="`expect`"):
        cache.reserve([0, 1], 1, expect=-1)
    cache.rollback(cache.reserve([0, 1], 1, expect=0))
    finish(cache)


def test_sequences_that_the_lost_shard_had_nothing_of_go_on():
    cache = started((1, 2, 64))
    assert [cache.runs(seq)[0][0] for seq in (0, 1)] == [0, 1]
    other = cache.reserve([0], 1)  # a step of a sequence elsewhere stays open
    cache._shards.transport.at(1, "layer", "before")
    with pytest.raises(ShardLost) as lost:
        grow(cache, {1: TEXTS[1][:8]})
    assert lost.value.sequences == (1,)
    assert other.open
    through(other, 2, [TEXTS[0][:12]], [11])
    cache.commit(other, token_ids=TEXTS[0][11:12])
    finish(cache, lost.value)


def test_a_shard_that_is_lost_while_it_is_made_anew(tmp_path):
    """Twice: the new one dies as it looks for what it should have."""
    store = {"place": tmp_path, "mark": "tests"}
    cache = started((2, 1, None), store=store)
    cache.flush()
    cache._shards.transport.at(1, "layer", "after")
    cache._shards.transport.at(1, "find", "before")
    with pytest.raises(ShardLost) as lost:
        grow(cache, {0: TEXTS[0][:12]})
    assert cache._shards.transport.places == 97
    finish(cache, lost.value)


@pytest.mark.parametrize("layout", [(2, 1, None), (1, 2, 2), (2, 2, 4)], ids=str)
def test_lost_sequences_come_back_from_the_store(layout, tmp_path):
    """All full blocks do; what was in the last one is computed again."""
    cache = started(layout, store={"place": tmp_path, "mark": {"model": "tests"}})
    assert cache.flush() == 0
    cache._shards.transport.kill(1)
    with pytest.raises(ShardLost) as lost:
        grow(cache, {0: TEXTS[0][:12], 1: TEXTS[1][:8]})
    lengths = {seq: cache.length(seq) for seq in cache.sequences}
    assert lengths[0] >= 10
    assert lengths[1] >= 6
    assert set(lost.value.sequences) == {s for s, n in lengths.items() if n < (11, 7)[s]}
    finish(cache, lost.value)


def test_a_column_that_finds_no_place_is_left_out():
    shards = FaultyShards(places=0)
    cache = started((1, 3, 2), shards=shards)
    shards.kill(1)
    with pytest.raises(ShardLost, match="no place for shards"):
        grow(cache, {0: TEXTS[0][:12]})
    finish(cache)
    assert all(column != 1 for seq in (0, 1) for column, _ in cache.runs(seq))
    shards.places = 9
    cache.revive()
    grow(cache, {cache.add(): TEXTS[2][:12]})
    check_attention(cache, same, np.asarray, 2, TEXTS[2][:12])
    assert any(column == 1 for column, _ in cache.runs(2))
    cache.check()


def test_a_closed_cache_says_so_and_makes_no_shards():
    cache = started((2, 1, None))
    step = cache.reserve([0], 1)
    cache.close()
    cache.close()
    for call in (
        cache.stats, cache.check, lambda: cache.add([1] * 9), lambda: grow(cache, {1: TEXTS[1][:12]}),
        lambda: cache.decode_attention(0, [0], np.ones((1, 4, 8), np.float32)),
    ):  # fmt: skip
        with pytest.raises(numkv.NumkvError, match="expected an open cache, got a closed one"):
            call()
    with pytest.raises(numkv.NumkvError, match="open step"):
        cache.commit(step)
    assert cache._shards.transport.shards == [None, None]
    assert cache._shards.transport.places == 99


def test_without_any_shard_the_error_says_so_until_there_are_some():
    shards = FaultyShards(places=0)
    cache = started((2, 1, None), shards=shards)
    shards.kill(0)
    with pytest.raises(ShardLost):
        grow(cache, {0: TEXTS[0][:12]})
    with pytest.raises(ShardLost, match="no place"):
        cache.reserve([0], 1)
    assert cache.balance() == 0
    shards.places = 9
    finish(cache)


def test_a_shard_that_is_full_by_itself_leaves_the_others_as_they_were():
    """Blocks that nobody here knows of: the books of one shard are not as others think."""
    cache = started((2, 1, None), num_blocks=12)
    taken = cache._shards.transport.shards[1].cache.blocks.allocate(2)
    used = [s.pool.used for s in cache.stats().shards]
    with pytest.raises(numkv.CacheFull):
        cache.reserve([0], 6)
    assert [s.pool.used for s in cache.stats().shards] == used
    cache._shards.transport.shards[1].cache.blocks.release(taken)
    finish(cache, to=11)


def test_an_interrupt_while_answers_are_awaited_rolls_the_step_back(monkeypatch):
    cache = started((2, 1, None))
    from numkv.ray.transport import Ticket

    def interrupted(self, timeout):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grow(cache, {0: TEXTS[0][:12]})
    finish(cache)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_shards_that_die_at_random_moments(seed, tmp_path):
    rng = np.random.default_rng(seed)
    layout = [(2, 1, None), (1, 2, 2), (2, 2, 4), (1, 3, 64)][seed % 4]
    store = {"place": tmp_path, "mark": "tests"} if seed % 2 else None
    cache = make(layout, shards=FaultyShards(), store=store, num_blocks=64)
    for text in TEXTS:
        cache.add(text)
    for _ in range(60):
        if rng.random() < 0.3:
            operation = str(rng.choice(["layer", "commit", "reserve", "find", "truncate", "add"]))
            what = str(rng.choice(["before", "after", "slow", "twice"]))
            cache._shards.transport.at(int(rng.integers(cache.num_shards)), operation, what)
        seqs = [s for s in cache.sequences if rng.random() < 0.7]
        try:
            if rng.random() < 0.2:
                cache.truncate(int(rng.integers(3)), 0)
            grow(
                cache,
                {s: TEXTS[s][: min(40, cache.length(s) + int(rng.integers(5)))] for s in seqs},
            )
        except ShardLost as error:
            lengths = error.lengths
        else:
            lengths = {}
        assert all(cache.length(s) == n for s, n in lengths.items())
    cache._shards.transport._plan.clear()
    try:
        cache.check()
    except ShardLost:
        cache.check()
    finish(cache, to=40)


def test_a_result_that_came_before_a_loss_can_be_taken_after_it():
    cache = started((2, 1, None))
    step = cache.reserve([0], 1)
    rows = np.ones((2, 1, 2, 8), np.float32)
    handle = step.submit(0, *rows, np.ones((1, 4, 8), np.float32))
    cache._shards.transport.at(1, "layer", "before")
    with pytest.raises(ShardLost):
        grow(cache, {1: TEXTS[1][:8]})
    with pytest.raises(numkv.NumkvError):
        cache.commit(step)
    cache.rollback(step)
    assert np.isfinite(handle.result()).all()  # its answers had come before the loss
    finish(cache, to=7)
