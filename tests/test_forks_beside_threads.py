"""Forks while other threads are in the middle of something: the child finds free locks, and sound books or an error."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import processes
import pytest
from layer_lists import paged_kv_cache

import numkv
from numkv.blocks import BlockPool, guard
from numkv.store.folder import Folder

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def in_child(function):
    """The exit status of a child that calls a function: 0 if that says True, -14 if it hangs."""
    pid = os.fork()
    if not pid:
        signal.alarm(processes.PATIENCE)
        status = 2
        try:
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def in_the_middle(call):
    """Another thread is in the middle of a call as long as the context lasts; `call` is given what stops it there."""
    inside, go = threading.Event(), threading.Event()

    def stop(*_):
        inside.set()
        assert go.wait(processes.PATIENCE)

    thread = threading.Thread(target=call, args=(stop,), daemon=True)
    thread.start()
    try:
        assert inside.wait(processes.PATIENCE)
        yield
    finally:
        go.set()
        thread.join()


def refused(*calls):
    """Whether all calls are refused as those of a child that has no sound books."""
    for call in calls:
        try:
            call()
        except numkv.NumkvError as error:
            if "when the process forked" not in str(error):
                return False
        else:
            return False
    return True


def test_a_child_without_sound_books_says_so(monkeypatch):
    """Where the fork could not wait until another thread is done, as that one waits for it, say."""
    monkeypatch.setattr(guard, "_LONGEST_WAIT", 0.0)
    pool, other = BlockPool(4, 2), BlockPool(4, 2)
    names = np.zeros((1, 32), np.uint8)
    pool.release(pool.allocate(1))  # compiled before

    def change(stop):
        pool.on_event = stop
        pool.register(pool.allocate(1), names, [[1, 2]])

    def child():
        other.release(other.allocate(4))
        other.check()
        return refused(lambda: pool.allocate(1), pool.clear, pool.check, pool.stats, pool.copy)

    with in_the_middle(change):
        assert in_child(child) == 0
    pool.check()
    assert pool.num_free == 3


def test_two_threads_that_fork_at_once_give_back_each_its_own(monkeypatch):
    """The first one could not wait for a pool that the second one gets."""
    monkeypatch.setattr(guard, "_LONGEST_WAIT", 0.0)
    pools = [BlockPool(4, 2) for _ in range(2)]
    stopped = []

    def fork(stop):
        guard._before_fork()
        stop()
        guard._after_fork()
        stopped.append(True)

    def call(at_once):
        thread = threading.Thread(target=at_once, daemon=True)
        thread.start()
        thread.join(processes.PATIENCE)
        assert not thread.is_alive()

    with pools[0]._guard.lock:
        one = in_the_middle(fork)
        one.__enter__()
    with in_the_middle(fork):
        one.__exit__(None, None, None)
    assert len(stopped) == 2
    for pool in pools:
        call(pool.check)


def test_threads_let_one_go_first_that_waits_to_fork(monkeypatch):
    """They would take each other's turns on and on."""
    rests = []
    monkeypatch.setattr(
        guard, "time", SimpleNamespace(sleep=rests.append, monotonic=time.monotonic)
    )
    pool, other = BlockPool(4, 2), BlockPool(4, 2)

    def fork(stop):
        monkeypatch.setattr(guard, "_every", lambda: [stop(), pool._guard][1:])
        guard._before_fork()
        guard._after_fork()

    other.release(other.allocate(1))
    assert rests == []
    with in_the_middle(fork):
        other.release(other.allocate(1))
        other.check()
    assert rests == [guard._MOMENT] * 3
    other.check()
    assert len(rests) == 3


def test_pools_may_be_made_while_others_are_looked_through(monkeypatch):
    class Changing(list):
        def __iter__(self):
            if self:
                self.clear()
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    monkeypatch.setattr(guard, "_all", Changing([1]))
    assert guard._every() == []


def test_a_child_bounds_keys_itself(monkeypatch):
    """While another thread is in the middle of that, in the same cache."""
    monkeypatch.setattr(guard, "_LONGEST_WAIT", 0.0)
    cache = paged_kv_cache(1, 2, 16, num_blocks=32, block_size=4, key_bounds=True)
    steps = []
    for _ in range(2):
        seq = cache.add()
        step = cache.reserve([seq], 41)
        step.append(0, *np.ones((2, 41, 2, 16), np.float32))
        cache.commit(step)
        steps.append(cache.reserve([seq], 1))
        steps[-1].append(0, *np.ones((2, 1, 2, 16), np.float32))
    q = np.ones((1, 4, 16), np.float32)

    def attend(which):
        return steps[which].sparse_attention(0, q, most_blocks=3)

    attend(0)  # compiled before
    cache._store.bounds.forget(slice(None))
    ops = cache._store.target.ops
    bound = ops.key_bounds

    def attend_and_stop(stop):
        own = SimpleNamespace(**{name: getattr(ops, name) for name in dir(ops) if name[0] != "_"})
        own.key_bounds = lambda *args: (bound(*args), stop())
        target = SimpleNamespace(index=cache._store.target.index, ops=own)
        monkeypatch.setattr(cache._store.bounds, "_target", target)
        attend(0)

    def child():
        cache._store.bounds._target = cache._store.target
        return bool((attend(1) == 1).all())

    with in_the_middle(attend_and_stop):
        assert in_child(child) == 0


@pytest.mark.slow
def test_a_handler_may_bound_keys_while_keys_are_bounded():
    """A signal handler or finaliser waits for nobody: it would wait for itself."""
    found = processes.run(
        """
        layer = numkv.LayerSpec(2, 16, key_bounds=True)
        cache = numkv.PagedKVCache(layers=[layer], num_blocks=32, block_size=4)
        rng, steps = np.random.default_rng(0), []
        for _ in range(2):
            seq = cache.add()
            for n in (41, 1):
                step = cache.reserve([seq], n)
                step.append(0, *rng.standard_normal((2, n, 2, 16), np.float32))
                if n > 1:
                    cache.commit(step)
            steps.append(step)
        q = np.ones((1, 4, 16), np.float32)
        attend = lambda which: steps[which].sparse_attention(0, q, most_blocks=3)
        expected = [attend(which).tolist() for which in range(2)]
        bounds, got = cache._store.bounds, []
        bounds.forget(slice(None))

        class Target:
            index = staticmethod(bounds._target.index)
            ops = property(lambda self: self)
            def key_bounds(self, *args):
                bounds._target = real
                got.append(attend(1).tolist())
                real.ops.key_bounds(*args)

        real, bounds._target = bounds._target, Target()
        signal.alarm(300)
        got.insert(0, attend(0).tolist())
        print(json.dumps([got == expected, len(got)]))
        """
    )
    assert found == [True, 2]


@pytest.mark.slow
def test_a_fork_waits_until_threads_have_been_started():
    found = processes.run(
        """
        import numba, time
        from numkv.kernels.cpu import threads
        numbas = numba.get_num_threads

        def slowly():
            starting.set()
            forking.wait()
            time.sleep(0.5)
            found = numbas()
            starting.clear()
            return found

        numba.get_num_threads = slowly
        thread = threading.Thread(target=threads.start)
        thread.start()
        starting.wait()
        os.register_at_fork(before=forking.set)  # the newest one comes first
        pid = os.fork()
        if not pid:
            signal.alarm(300)
            os._exit(7 if np.isfinite(decode(problem(6000, 4, 64))).all() else 1)
        thread.join()
        print(json.dumps([seen, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]))
        """,
        common="""
import os, threading, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
starting, forking, seen = threading.Event(), threading.Event(), []
os.register_at_fork(before=lambda: seen.append(starting.is_set()))  # the oldest one comes last
"""
        + processes.COMMON,
    )
    assert found == [[False], 7]


def test_a_child_does_not_keep_others_from_evicting(tmp_path):
    """It was forked while its parent did, and has the parent's lock."""
    fcntl = pytest.importorskip("fcntl")
    here, there = os.pipe()
    with Folder(str(tmp_path), False).alone():
        pid = os.fork()
        if not pid:
            os.close(there)
            os.read(here, 1)  # until the parent closes the other end
            os._exit(0)
    os.close(here)
    lock = os.open(tmp_path / ".evicting", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
        os.close(there)
        os.waitpid(pid, 0)
