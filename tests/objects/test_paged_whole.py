"""A `PagedKVCache` as a whole: what it says of itself, clear, copies, pickles; and faults at every allocation."""

import copy
import pickle

import numpy as np
import pytest
from paged_caches import (
    check_attention,
    fill,
    grow,
    make,
    outputs,
    refused,
    rows,
    started,
    state_of,
)

import numkv

TEXT = list(range(7))


def test_what_it_says_of_itself(target):
    cache = make(3, k_kind="int8", v_kind="fp16", target=target, head_dim_v=6)
    assert cache.layers == (numkv.LayerSpec(2, 8, head_dim_v=6, kind="int8", v_kind="fp16"),) * 3
    assert (cache.num_layers, cache.target) == (3, target)
    per_token = 8 + 4 + 6 * 2
    assert cache.nbytes == 3 * 32 * 2 * 2 * per_token
    assert "kind=int8/fp16" in repr(cache)
    step = cache.reserve([cache.add()], 3)
    assert repr(step) == "<Step: open, 3 new tokens of 1 sequences>"
    cache.rollback(step)
    assert repr(step).startswith("<Step: ended")


COPIES = {
    "copy": lambda cache: cache.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_shares_nothing(target, to, host, how):
    cache = make(4, windows=[-1, 3, -1, 3], target=target, num_blocks=64)
    a = started(cache, to, TEXT)
    b = cache.fork(a)
    gone = started(cache, to, [50, *TEXT])
    pinned = cache.pin(gone)
    cache.remove(gone)
    if how == "pickle" and target == "cuda":
        refused(
            cache,
            numkv.NotSupported,
            "cannot be pickled, only one on the CPU; swap its",
            COPIES[how],
            cache,
        )
        return
    told = []
    cache.blocks.on_event = told.append
    before = state_of(cache)
    other = COPIES[how](cache)
    assert state_of(cache)[0] == before[0]
    assert type(other) is numkv.PagedKVCache
    assert state_of(other)[0] == before[0]
    assert state_of(other)[2:] == before[2:]
    assert repr(other) == repr(cache)
    other.check()
    grow(other, to, a, [*TEXT, 20, 21])
    other.compact(b, range(1, 7))
    # What was pinned, and a part of the block after.
    assert other.cached_len(other.add([50, *TEXT])) == 7
    other.blocks.unpin(pinned)
    other.clear()
    assert state_of(cache) == before
    assert not told
    for seq in (a, b):
        check_attention(cache, to, host, seq, TEXT)
    cache.check()
    # The copy of a moment: neither follows the other.
    grow(cache, to, b, [*TEXT, 30])
    assert other.sequences == ()


def test_scales_of_heads_are_copied(target, to, host):
    cache = make(2, windows=[-1, 3], kind="fp8_e4m3", target=target)
    cache.set_scales(0, k=2.0, v=0.5)
    cache.set_scales(1, k=np.array([3, 4], np.float32))
    seq = started(cache, to, TEXT)
    want = outputs(cache, to, host, [seq])
    other = cache.copy()
    cache.clear()
    cache.set_scales(0, k=1.0, v=1.0)
    cache.set_scales(1, k=1.0)
    assert np.array_equal(outputs(other, to, host, [seq]), want)
    swapped = other.swap_out(seq)
    assert [float(host(x)[0]) for x in swapped.head_scales[0]] == [2.0, 0.5]
    assert host(swapped.head_scales[1][0]).tolist() == [3, 4]


def test_clear_keeps_the_memory(target, to, host):
    cache = make(target=target)
    a = started(cache, to, TEXT)
    cache.pin(a)
    cache.fork(a)
    buffers = [id(x) for pool in cache._pools for x in pool.arrays()]
    cache.clear()
    cache.check()
    assert (cache.sequences, cache.num_free, len(cache)) == ((), 32, 0)
    assert [id(x) for pool in cache._pools for x in pool.arrays()] == buffers
    refused(cache, IndexError, "`seq`", cache.length, a)
    seq = cache.add(TEXT)
    assert seq == 2
    assert cache.cached_len(seq) == 0
    grow(cache, to, seq, TEXT)
    check_attention(cache, to, host, seq, TEXT)


def test_nothing_is_copied_with_an_open_step():
    cache = make()
    seq = started(cache, np.asarray, TEXT)
    step = cache.reserve([cache.add(), seq], [0, 1])
    for name, call in {**COPIES, "clear": lambda cache: cache.clear()}.items():
        match = "open steps" if name != "clear" else "clear: expected a cache without open steps"
        refused(cache, numkv.NumkvError, match, call, cache)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(numkv.NotSupported, match="a Step cannot be copied or pickled"):
            call(step)
    cache.rollback(step)
    cache.copy().clear()


# -- faults


class Faults:
    """NumPy's ways to new arrays, the n-th of which fails."""

    NAMES = ("array", "arange", "concatenate", "empty", "full", "ones", "zeros", "split", "cumsum")

    def __init__(self, monkeypatch, nth):
        self.left = nth
        for name in self.NAMES:
            monkeypatch.setattr(np, name, self.counting(getattr(np, name)))

    def counting(self, function):
        def made(*args, **options):
            self.left -= 1
            if not self.left:
                raise MemoryError("the n-th allocation")
            return function(*args, **options)

        return made


def essence(cache):
    """What an error must leave as it was; free blocks hold anything, and are free in any order."""
    states, _, _, stats, number = state_of(cache)
    counts = cache.blocks.ref_count(np.arange(cache.num_blocks))
    used = np.flatnonzero(counts)
    rows_ = [
        x[used].tobytes()
        for pool in cache._pools
        for x in map(pool.target.to_host, pool.arrays())
        if x.size
    ]
    return (
        states,
        rows_,
        (stats.pool.used, stats.pool.free, stats.pool.pinned),
        number,
        counts.tolist(),
    )


SHIFT = numkv.rope_shift(np.ones((32, 4), np.float32), np.zeros((32, 4), np.float32))


def operations(cache, seq, fork, step, swapped):
    return {
        "add": lambda: cache.add([*TEXT, 99]),
        "fork": lambda: cache.fork(seq),
        "remove": lambda: cache.remove(fork),
        "truncate": lambda: cache.truncate(fork, 6),
        "reserve": lambda: cache.reserve([fork, seq], [3, 1]),
        "commit": lambda: cache.commit(step, [3], token_ids=[90, 91, 92, 93]),
        "rollback": lambda: cache.rollback(step),
        "compact": lambda: cache.compact(fork, [0, 3, 4, 5, 6]),
        "shift": lambda: cache.compact(fork, [1, 3, 4, 5, 6], SHIFT),
        "pin": lambda: cache.pin(seq),
        "swap_in": lambda: cache.swap_in(swapped),
        "swap_out": lambda: cache.swap_out(seq),
        "copy": cache.copy,
        "clear": cache.clear,
    }


def scenario(name, rotate):
    """A cache, a call that changes it, its step if it has one, and a sequence that the call leaves alone."""
    cache = make(2, windows=[-1, 3], num_blocks=64, rotate=rotate)
    to = np.asarray
    seq = started(cache, to, TEXT)
    fork = cache.fork(seq)
    if name in ("shift", "compact"):
        cache.remove(seq)  # so that rows move within the sequence's own blocks
        cache.blocks.forget()
    other = started(cache, to, [70, 71, 72])
    swapped = cache.swap_out(other)
    step = None
    if name in ("commit", "rollback"):
        growing = cache.add()
        step = cache.reserve([growing], 4)
        for layer in range(2):
            step.append(layer, *rows(layer, [90, 91, 92, 93]))
    if name == "clear":
        cache.pin(seq)
    return cache, operations(cache, seq, fork, step, swapped)[name], step, other


@pytest.mark.kernels  # which ask NumPy for nothing half way
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("name", operations(*[make()] * 5))
def test_a_fault_at_any_allocation_changes_nothing(monkeypatch, name, rotate):
    scenario(name, rotate)[1]()  # what it needs is compiled
    cache, call, step, other = scenario(name, rotate)
    before = essence(cache)
    for nth in range(1, 400):
        with monkeypatch.context() as patch:
            faults = Faults(patch, nth)
            try:
                call()
            except MemoryError:
                pass
            else:
                assert faults.left > 0, "a failed allocation was passed over"
                break
        assert essence(cache) == before, nth
        assert step is None or step.open
        cache.check()
    else:
        pytest.fail("it never came to an end")
    assert nth > 1
    if name not in ("reserve", "swap_out", "copy"):
        assert essence(cache) != before
    cache.check()
    if name != "clear":
        check_attention(cache, np.asarray, np.asarray, other, [70, 71, 72])


def test_a_failing_device_leaves_a_reservation_as_it_was(monkeypatch):
    cache = make()
    seq = started(cache, np.asarray, TEXT)
    fork = cache.fork(seq)

    def fails(*args):
        raise MemoryError

    before = essence(cache)
    with monkeypatch.context() as patch:
        patch.setattr(type(cache._pools[0]), "copy_blocks", fails)
        with pytest.raises(MemoryError):
            cache.reserve([fork], 2)  # the last block is shared, and would be copied
    assert essence(cache) == before
    cache.rollback(cache.reserve([fork], 2))
    cache.check()


def test_blocks_that_others_have_given_back_are_an_error_that_changes_nothing():
    """Somebody has released a cache's block behind its back: the cache stays as it is and says so."""
    cache = make()
    fill(cache, [cache.add(), cache.add()], 6)
    cache.blocks.release(cache.block_table(0, 0)[1:2])
    for call in (lambda: cache.remove(0), lambda: cache.truncate(0, 1)):
        with pytest.raises(numkv.NumkvError, match="released more often"):
            call()
        assert cache.sequences == (0, 1)
        assert cache.length(0) == 6
    with pytest.raises(numkv.NumkvError, match="references"):
        cache.check()
