"""How many messages a step is, what rides along, and how much may be on its way."""

import numpy as np
import pytest
from paged_caches import DIM, HEADS, Q_HEADS, check_attention
from sharded_caches import FaultyShards, grow, make, one, same, through

import numkv
from numkv.ray import Limits


@pytest.mark.parametrize("layout", [(1, 1, None), (2, 1, None), (1, 2, 2), (2, 2, 2)], ids=str)
def test_a_step_is_one_message_for_each_shard_and_layer(layout):
    cache = make(layout, layers=3)
    seqs = [cache.add(), cache.add()]
    for n in (4, 9, 10, 11):  # add, reserve, commit, rollback, fork, truncate and remove ride along
        before = cache.messages
        grow(cache, {seq: np.arange(n) for seq in seqs})
        assert {b - a for a, b in zip(before, cache.messages, strict=True)} == {3}
        third = cache.fork(seqs[0])
        cache.rollback(cache.reserve([third], 1))
        cache.truncate(third, n - 3)
        cache.remove(third)
        assert sum(cache.messages) == sum(before) + 3 * cache.num_shards
    cache.check()


def test_only_columns_with_tokens_of_a_step_get_messages():
    cache = make((1, 2, 64))
    a, b = cache.add(), cache.add()
    grow(cache, {a: np.arange(8)})
    grow(cache, {b: np.arange(4)})
    assert [cache.runs(seq) for seq in (a, b)] == [((0, 8),), ((1, 4),)]
    before = cache.messages
    grow(cache, {b: np.arange(5)})
    assert np.subtract(cache.messages, before).tolist() == [0, 2]


def test_rows_that_nobody_attends_to_are_sent_by_commit():
    cache = make((2, 1, None))
    seq = cache.add()
    step = cache.reserve([seq], 3)
    for layer in range(2):
        step.append(layer, *np.ones((2, 3, HEADS, DIM), np.float32))
    assert cache.messages == (0, 0)
    cache.commit(step)
    assert cache.messages == (2, 2)
    out = cache.decode_attention(1, [seq], np.ones((1, Q_HEADS, DIM), np.float32))
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def test_the_next_layer_may_be_sent_before_the_last_one_is_awaited():
    cache, waited = (
        make((2, 1, None), layers=4, limits=Limits(messages=3)),
        make((2, 1, None), layers=4),
    )
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 5, HEADS, DIM), np.float32)
    q = rng.standard_normal((5, Q_HEADS, DIM), np.float32)
    step, other = cache.reserve([cache.add()], 5), waited.reserve([waited.add()], 5)
    handles = [step.submit(layer, k + layer, v, q) for layer in range(4)]
    # The first was received.
    assert max(len(channel._in_flight) for channel in cache._shards.channels) == 3
    for layer in (3, 1, 0, 2):
        want = other.append_attend(layer, k + layer, v, q)
        np.testing.assert_array_equal(handles[layer].result(), want)
        np.testing.assert_array_equal(handles[layer].result(), want)
    cache.commit(step)
    assert cache.messages == (4, 4)


def test_bytes_on_their_way_are_bounded():
    """A prompt's rows wait for earlier ones to arrive; one message goes whatever its size."""
    cache = make((1, 1, None), layers=4, num_blocks=64, limits=Limits(nbytes=10_000))
    k, v = np.ones((2, 100, HEADS, DIM), np.float32)
    step = cache.reserve([cache.add()], 100)
    for layer in range(4):
        step.submit(layer, k, v, np.ones((100, Q_HEADS, DIM), np.float32))
        assert len(cache._shards.channels[0]._in_flight) == 1
    cache.commit(step)
    cache.check()


def test_what_waits_to_ride_along_is_bounded():
    cache = make((2, 1, None))
    for _ in range(400):
        cache.remove(cache.fork(cache.add()))
    step = cache.reserve(cache.sequences[:3], 1)
    cache.rollback(step)
    for _ in range(400):
        cache.rollback(cache.reserve(cache.sequences[:3], 1))
    assert max(len(channel._waiting) for channel in cache._shards.channels) <= 256
    cache.check()
    cache.clear()
    cache.check()


def test_a_message_that_comes_twice_is_done_once():
    shards = FaultyShards()
    cache = make((2, 1, None), shards=shards)
    seq = cache.add()
    grow(cache, {seq: np.arange(3)})
    shards.at(1, "layer", "twice")
    shards.at(0, "commit", "twice")
    grow(cache, {seq: np.arange(8)})
    cache.check()
    assert cache.length(seq) == 8


def test_arguments_are_checked_before_anything_is_sent():
    cache = make((2, 1, None))
    step = cache.reserve([cache.add()], 3)
    k, v = np.ones((2, 3, HEADS, DIM), np.float32)
    q = np.ones((3, Q_HEADS, DIM), np.float32)
    for wrong in (
        (k[:2], v, q), (k, v[:, :1], q), (k, v, q[:, :3]), (k.astype(int), v, q), (k, v, q[..., :4]),
    ):  # fmt: skip
        with pytest.raises((numkv.DimensionMismatch, numkv.UnsupportedDType)):
            step.append_attend(0, *wrong)
    with pytest.raises(ValueError, match="sm_scale"):
        step.append_attend(0, k, v, q, sm_scale=float("nan"))
    with pytest.raises(numkv.DimensionMismatch, match="sinks"):
        step.append_attend(0, k, v, q, sinks=np.ones(3))
    with pytest.raises(IndexError, match="layer"):
        step.append_attend(7, k, v, q)
    masked, sinks = np.ma.array(q, mask=True), np.ma.array(np.ones(Q_HEADS), mask=True)
    for refused in (
        lambda: step.append(0, np.ma.array(k, mask=True), v),
        lambda: step.write(0, np.ma.array(k[:, 0]), num_q_heads=1, qk_mode=0),
        lambda: step.append_attend(0, k, v, masked),
        lambda: step.append_attend(0, k, v, q, sinks=sinks),
    ):
        with pytest.raises(numkv.NotSupported, match="without a mask"):
            refused()
    for refused in (
        lambda: step.append(0, k, v, check_finite="no"),
        lambda: step.write(0, k[:, 0], num_q_heads=1, qk_mode=0, check_finite="no"),
        lambda: step.append_attend(0, k, v, q, return_lse=3),
    ):
        with pytest.raises(TypeError, match="expected True or False"):
            refused()
    assert cache.messages == (0, 0)
    assert step.open
    step.append_attend(0, k, v, q)
    with pytest.raises(numkv.NumkvError, match="layer 1"):
        cache.commit(step)
    with pytest.raises(numkv.NumkvError, match="open step"):
        cache.remove(step.sequences[0])
    with pytest.raises(IndexError, match="accepted"):
        cache.commit(step, [9])
    for unknown, shown in ((77, "77"), (10**5000, "a number beyond int64")):
        with pytest.raises(
            IndexError, match=f"`seq`: expected one of the cache's sequences, got {shown}"
        ):
            cache.length(unknown)
    with pytest.raises(
        TypeError, match="`sequences`: expected numbers of sequences, got int; pass a list"
    ):
        cache.reserve(77, 1)
    for no_number in ("7", True, 1.0):
        with pytest.raises(TypeError, match="`sequences`: expected the number of a sequence"):
            cache.reserve([no_number], 1)
    other = cache.add()
    with pytest.raises(ValueError, match="`sequences`: expected each sequence once"):
        cache.reserve([other, other], 1)
    cache.rollback(step)
    cache.rollback(step)  # as callers do that do not know what an error has done
    with pytest.raises(numkv.NumkvError, match="ended"):
        cache.commit(step)
    done = cache.reserve([cache.add()], 0)
    cache.commit(done)
    cache.check()


def test_arguments_that_change_after_a_call_do_not_change_what_shards_get():
    """Ids and scales are sent with a later message, and scales to later shards, too."""
    for layout in ((2, 1, None), (1, 2, 2)):
        cache, alone = make(layout, kind="fp8_e4m3"), one(kind="fp8_e4m3")
        scales, outs = np.array([0.5, 0.25], np.float32), []
        alone.set_scales(0, k=scales)
        cache.set_scales(0, k=scales)
        scales[:] = 100
        for each in (cache, alone):
            outs.append(grow(each, {each.add(): np.arange(6)})[0])
        np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)
        seq, ids = cache.add(), np.arange(20, 26, dtype=np.int32)
        step = cache.reserve([seq], [len(ids)])
        through(step, cache.num_layers, [ids], [0])
        cache.commit(step, token_ids=ids)
        ids[:] = 77
        assert cache.cached_len(cache.add(np.arange(20, 27))) == 6
        assert cache.cached_len(cache.add(np.full(7, 77))) == 0


def test_layers_that_cannot_be_divided_are_refused_by_what_they_are():
    for kind in ("int8_channel", "int4_channel"):
        with pytest.raises(numkv.NotSupported, match="got latents, keys by channel or different"):
            make((2, 1, None), kind=kind, block_size=64)


def test_a_step_that_fails_on_one_shard_is_rolled_back_on_all():
    cache = make((2, 1, None), kind="int8")
    seq = cache.add()
    grow(cache, {seq: np.arange(3)})
    step = cache.reserve([seq], 2)
    k, v = np.ones((2, 2, HEADS, DIM), np.float32)
    k[1, 1, 3] = np.nan  # of a head that the second shard has
    with pytest.raises(numkv.NonFiniteInput):
        step.append_attend(0, k, v, np.ones((2, Q_HEADS, DIM), np.float32))
    assert not step.open
    cache.check()
    grow(cache, {seq: np.arange(9)})
    cache.check()


def test_a_reservation_that_fails_on_a_shard_leaves_the_commit_of_another_step(monkeypatch):
    """Which is sent in the same message, after it."""
    cache = make((2, 1, None))
    a, b = cache.add(), cache.add()
    grow(cache, {a: np.arange(5), b: np.arange(4)})
    done = cache.reserve([b], [2])
    through(done, cache.num_layers, [np.arange(6)], [4])
    step = cache.reserve([a], [3])
    cache.commit(done, token_ids=[4, 5])
    shard = cache._shards.transport.shards[1].cache
    with monkeypatch.context() as patch:
        patch.setattr(shard, "reserve", failing_reserve)
        with pytest.raises(MemoryError):
            through(step, cache.num_layers, [np.arange(8)], [5])
    assert not step.open
    cache.check()
    grow(cache, {a: np.arange(9), b: np.arange(8)})
    check_attention(cache, same, np.asarray, b, np.arange(8))
    cache.check()


def failing_reserve(*_):
    raise MemoryError


@pytest.mark.parametrize("layout", [(2, 1, None), (1, 2, 2), (2, 2, 4)], ids=str)
def test_a_full_cache_is_left_as_it_was(layout):
    cache = make(layout, num_blocks=8)
    a, b = cache.add(), cache.add()
    most = 16 * layout[1]
    grow(cache, {a: np.arange(most - 8), b: np.arange(3)})
    third = cache.fork(b)
    before = [s.pool.used for s in cache.stats().shards]
    for lens in ([4, 2, 2], [2**40, 0, 0], [2**61, 2**61, 2**61]):
        with pytest.raises(numkv.CacheFull):
            cache.reserve([a, b, third], lens)
    assert [s.pool.used for s in cache.stats().shards] == before
    cache.check()
    grow(cache, {a: np.arange(most - 4)})  # to the last block
    with pytest.raises(numkv.CacheFull):
        cache.reserve([third], 1)  # it needs a copy of the block that it shares
    cache.remove(b)
    grow(cache, {third: np.arange(4)})
    cache.check()


def test_tokens_that_were_not_accepted_are_nowhere():
    for layout in ((2, 1, None), (1, 3, 2)):
        cache = make(layout)
        a, b = cache.add(), cache.add()
        step = cache.reserve([a, b], [9, 6])
        for layer in range(2):
            step.append(layer, *np.ones((2, 15, HEADS, DIM), np.float32))
        cache.commit(step, [5, 0])
        assert (cache.length(a), cache.length(b)) == (5, 0)
        cache.check()
        cache.truncate(a, 2)
        cache.check()
