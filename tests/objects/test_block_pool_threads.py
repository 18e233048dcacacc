"""One `BlockPool` and several threads, calls out of its own calls, forks, interrupts; copies and pickles of it."""

import copy
import os
import pickle
import threading
import time

import numpy as np
import pytest
from block_books import SIZE, cached, prompt, refused, state_of, unchanged
from processes import PATIENCE
from several_threads import in_threads

import numkv
from numkv.blocks.pool import BlockPool
from numkv.blocks.records import BlocksRemoved, BlocksStored


def test_threads_share_a_pool():
    """Without an error, and without a block too many or too few at the end."""
    pool = BlockPool(64, SIZE)

    def work(number):
        rng, held = np.random.default_rng(number), []
        for _ in range(150):
            names, tokens = prompt(int(rng.integers(1, 6)), first=int(rng.integers(3)))
            ids = pool.allocate(len(names))
            pool.register(ids, names, tokens)
            found = pool.find(names, tokens)
            assert ((found >= 0) & (found < 64)).all()
            pool.acquire(ids)
            assert (pool.ref_count(ids) == 2).all()  # nobody else has them
            held += [ids, ids]
            if len(held) > 6:
                pool.release(np.concatenate([held.pop(), held.pop()]))
            assert 0 <= pool.num_free <= 64
            pool.check()
        for ids in held:
            pool.release(ids)

    in_threads(*(lambda n=n: work(n) for n in range(4)))
    pool.check()
    stats = pool.stats()
    assert (stats.used, stats.free) == (0, 64)


def test_layers_of_several_threads_share_a_pool():
    """Each layer is one thread's own; the pool of blocks is everybody's."""
    pool = numkv.PagedPool(48, 2, 2, 8, kind="fp32")

    def work(number):
        rng = np.random.default_rng(number)
        layer = numkv.PagedLayer(24, 2, 2, 8, kind="fp32", pool=pool)
        k = np.full((3, 2, 8), number, np.float32)
        for _ in range(60):
            layer.append(k, k)
            if layer.seq_len > 18:
                layer.truncate(int(rng.integers(18)))
            out = layer.decode_attention(np.ones((1, 4, 8), np.float32))
            np.testing.assert_allclose(out, number if layer.seq_len else 0, rtol=1e-6)
        layer.truncate(0)

    in_threads(*(lambda n=n: work(n) for n in range(4)))
    pool.check()
    assert pool.blocks.num_free == 48


CHANGES = {
    "allocate": lambda pool: pool.allocate(1),
    "allocate_ids": lambda pool: pool.allocate_ids([3]),
    "release": lambda pool: pool.release([0]),
    "acquire": lambda pool: pool.acquire([0]),
    "register": lambda pool: pool.register([1], *prompt(1)),
    "forget": lambda pool: pool.forget(),
    "pin": lambda pool: pool.pin([0]),
    "unpin": lambda pool: pool.unpin([0]),
    "clear": lambda pool: pool.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_out_of_a_change(name):
    """From `on_event`: it is refused, not waited for; looking is fine."""
    seen = []

    def nosy(event):
        before = state_of(pool)
        with pytest.raises(numkv.NumkvError, match=f"^{name}: .* in the middle of another change"):
            CHANGES[name](pool)
        assert unchanged(pool, before)
        pool.check()
        seen.append((type(event), pool.stats().cached, pool.num_free, pool.is_cached([0])[0]))
        pool.lookup(*prompt(1))
        assert "cached" in repr(pool)
        assert len(pool.copy()) == 4

    pool = BlockPool(4, SIZE, on_event=nosy)
    cached(pool, 1)
    assert seen == [(BlocksStored, 1, 3, True)]
    pool.forget()
    assert seen[1:] == [(BlocksRemoved, 0, 3, False)]
    pool.check()


class Nosy:
    """Ids that call something when they are looked at."""

    def __init__(self, call):
        self.call = call

    def __array__(self, dtype=None, copy=None):
        self.call()
        return np.zeros(1, np.int32)


def test_a_change_out_of_an_argument():
    pool = BlockPool(4, SIZE)
    cached(pool, 1)
    refused(pool, numkv.NumkvError, "in the middle", pool.release, Nosy(lambda: pool.release([0])))
    pool.release(Nosy(lambda: pool.ref_count([0])))
    assert pool.num_free == 4


def test_an_interrupt_from_on_event_loses_no_blocks():
    def interrupted(event):
        if isinstance(event, BlocksRemoved):
            raise KeyboardInterrupt

    pool = BlockPool(4, SIZE, on_event=interrupted)
    ids, *_ = cached(pool, 2)
    pool.release(ids)
    for call, argument in ((pool.allocate, 4), (pool.allocate_ids, [1])):
        with pytest.raises(KeyboardInterrupt):
            call(argument)
        assert pool.num_free == 4
        pool.check()
        ids, *_ = cached(pool, 2)
        pool.release(ids)
    pool.on_event = None
    assert len(pool.allocate(4)) == 4


def test_only_functions_are_told():
    with pytest.raises(TypeError, match="`on_event`: expected a function"):
        BlockPool(4, SIZE, on_event=7)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_finds_sound_books(monkeypatch):
    """However busy other threads of the parent are with the pool."""
    monkeypatch.setattr("numkv.blocks.guard._LONGEST_WAIT", PATIENCE)  # for its turn among them
    pool, over = BlockPool(64, SIZE), threading.Event()
    names, tokens = prompt(20)
    pool.release(pool.allocate(1))  # compiled before
    pool.check()

    def busy():
        while not over.is_set():
            ids = pool.allocate(20)
            pool.register(ids, names, tokens)
            pool.release(ids)
            pool.forget()

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if not pid:
                try:
                    pool.check()
                    pool.release(pool.allocate(1))
                    pool.check()
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            end, status = time.monotonic() + PATIENCE, (0, 0)
            while not status[0] and time.monotonic() < end:
                status = os.waitpid(pid, os.WNOHANG)
                time.sleep(0.001)
            if not status[0]:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            assert status == (pid, 0)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    pool.check()


# -- copies


@pytest.mark.slow
@pytest.mark.parametrize("how", ["copy", "copy.copy", "copy.deepcopy", "pickle"])
def test_copies_share_nothing(how):
    events = []
    pool = BlockPool(6, SIZE, on_event=events.append)
    ids, names, tokens = cached(pool, 3)
    pool.pin(ids[:1])
    pool.release(ids[1:])
    assert pool.jit.num_blocks == 6
    made = {
        "copy": pool.copy,
        "copy.copy": lambda: copy.copy(pool),
        "copy.deepcopy": lambda: copy.deepcopy(pool),
        "pickle": lambda: pickle.loads(pickle.dumps(pool)),
    }[how]()
    assert type(made) is BlockPool
    assert unchanged(made, state_of(pool))
    assert made.on_event is None
    assert made.stats() == pool.stats()
    assert made.nbytes == pool.nbytes
    before, told = state_of(pool), len(events)
    made.allocate(5)
    made.check()
    assert made.jit.num_free == made.num_free == 0
    assert unchanged(pool, before)
    assert len(events) == told
    assert pool.allocate(2).tolist() == BlockPool(6, SIZE).allocate(5)[3:].tolist()


def test_clear_makes_all_blocks_free():
    events = []
    pool = BlockPool(6, SIZE, on_event=events.append)
    struct = pool.jit
    ids, names, tokens = cached(pool, 3)
    pool.pin(ids[:1])
    before = pool.stats()
    pool.clear()
    pool.check()
    assert events[-1].block_ids.tolist() == [0, 1, 2]
    assert bytes(events[-1].block_hashes) == bytes(names)
    stats = pool.stats()
    assert (stats.free, stats.used, stats.cached, stats.pinned) == (6, 0, 0, 0)
    assert (stats.allocations, stats.stores) == (before.allocations, before.stores)
    assert pool.find(names, tokens).tolist() == [-1] * 3
    assert struct.num_free == 6
    assert pool.allocate(6).tolist() == list(range(6))
    pool.clear()
    assert len(events) == 2  # there was nothing to forget
