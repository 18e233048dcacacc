"""Multi-sequence caches and compressors from several threads: one writer at a time, readers beside it."""

import sys
import threading
import time

import numpy as np
import pytest

import numkv

pytestmark = pytest.mark.kernels

F32 = np.float32
HEADS, DIM = 2, 8


@pytest.fixture(autouse=True)
def turns_of_threads():
    """Let Python's threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def rows(n, salt=0):
    return np.random.default_rng([n, salt]).standard_normal((2, n, HEADS, DIM), F32)


def at_once(*jobs, rounds=60, again=False):
    """Run each job in a thread of its own, over and over; how often each was done, and how often refused.

    With `again` a job that was refused is tried again after a moment, many times.
    """
    others, refused, done = [], [0] * len(jobs), [0] * len(jobs)
    start = threading.Barrier(len(jobs))

    def run(i, job):
        start.wait()
        while done[i] < rounds and refused[i] < (1_000_000 if again else rounds - done[i]):
            try:
                job()
                done[i] += 1
            except numkv.NumkvError:
                refused[i] += 1
                time.sleep(0.001 if again else 0)
            except BaseException as error:
                others.append(error)
                return

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not others
    return done, refused


def inside(target, call):
    """Call from another thread while this one is inside of a change: in a shift function."""
    caught = []

    def other():
        try:
            call()
        except BaseException as error:
            caught.append(error)

    def shift(layer, keys, offsets):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return keys

    cache = numkv.CausalCache(shift)
    cache.init("fp32", 4, 16, 8, target)
    return cache, caught


CHANGES = {
    "start_forward": lambda cache, k: cache.start_forward(numkv.Batch([9], [0])),
    "set_causal": lambda cache, k: cache.set_causal([0]),
    "put": lambda cache, k: cache.put(0, k, k),
    "remove": lambda cache, k: cache.remove(0, 0),
    "compact": lambda cache, k: cache.compact(0, []),
    "copy_prefix": lambda cache, k: cache.copy_prefix(0, 1, 2),
    "set_scales": lambda cache, k: cache.set_scales(0, 1.0),
    "clear": lambda cache, k: cache.clear(),
    "close": lambda cache, k: cache.close(),
}
READS = {
    "get": lambda cache, k: cache.get(0),
    "decode_attention": lambda cache, k: cache.decode_attention(0, k),
    "attention_weights": lambda cache, k: cache.attention_weights(0, k),
    "arrays": lambda cache, k: cache.arrays(0),
    "positions": lambda cache, k: cache.positions(0),
    "sequences": lambda cache, k: cache.sequences,
    "num_free": lambda cache, k: cache.num_free,
    "can_resume": lambda cache, k: cache.can_resume(0, 1),
    "copy": lambda cache, k: cache.copy(),
    "check": lambda cache, k: cache.check(),
}


@pytest.mark.parametrize("name", CHANGES | READS)
def test_a_call_beside_a_change_is_refused(target, to, name):
    """Every method, from another thread while rows are moved; the change goes on as planned."""
    k, v = (to(x) for x in rows(4))
    call = (CHANGES | READS)[name]
    cache, caught = inside(target, lambda: call(cache, k))
    cache.start_forward(numkv.Batch([0, 1, 2, 3], [0] * 4))
    cache.put(0, k, v)
    cache.remove(0, 0, 1)
    (error,) = caught
    assert isinstance(error, numkv.NumkvError)
    assert ("being changed" if name in CHANGES else "moved or dropped") in str(error)
    assert cache.positions(0).tolist() == [0, 1, 2]
    cache.check()


def causal(layers=2, tokens=6, kind="fp32"):
    cache = numkv.CausalCache(lambda layer, keys, offsets: keys)
    cache.init(kind, 2, 64, 16)
    cache.start_forward(numkv.Batch(np.arange(tokens), [0] * tokens))
    for layer in range(layers):
        cache.put(layer, *rows(tokens, layer))
    return cache


def test_readers_at_once_get_the_same():
    """Nothing is computed for a pass before they ask."""
    for _ in range(20):
        cache, q = causal(), np.ones((6, HEADS, DIM), F32)
        want = [cache.copy().decode_attention(layer, q) for layer in range(2)]
        got = []

        def read(cache=cache, q=q, got=got):
            got.append([cache.decode_attention(layer, q) for layer in range(2)])
            assert cache.get(0)[2].shape == (6, 6)

        done, refused = at_once(*[read] * 4, rounds=1)
        assert (sum(done), sum(refused)) == (4, 0)
        assert all(np.array_equal(x, want) for x in got)


def test_a_reader_beside_a_put_of_another_layer():
    cache, q = causal(), np.ones((6, HEADS, DIM), F32)
    want = cache.decode_attention(0, q)
    new = rows(6, 9)

    def read():
        assert np.array_equal(cache.decode_attention(0, q), want)

    done, refused = at_once(read, read, lambda: cache.put(1, *new), rounds=100)
    assert done == [100] * 3
    assert refused == [0] * 3


def test_a_reader_beside_a_put_of_its_layer():
    """The rows from before or those from after, or an error."""
    cache, q = causal(1, 16), np.ones((16, HEADS, DIM), F32)
    two, wants = [rows(16, 1), rows(16, 2)], []
    for k, v in two:
        cache.put(0, k, v)
        wants.append(cache.decode_attention(0, q))
    turn = [0]

    def put():
        turn[0] ^= 1
        cache.put(0, *two[turn[0]])

    def read():
        out = cache.decode_attention(0, q)
        assert any(np.array_equal(out, want) for want in wants)

    done, refused = at_once(read, put, rounds=200)
    assert done[1] == 200
    assert sum(done + refused) == 400


def test_puts_at_once_are_one_after_another_or_refused():
    cache, q = causal(1, 16), np.ones((16, HEADS, DIM), F32)
    two, wants = [rows(16, 1), rows(16, 2)], []
    for k, v in two:
        cache.put(0, k, v)
        wants.append(cache.decode_attention(0, q))
    done, refused = at_once(*(lambda x=x: cache.put(0, *x) for x in two), rounds=200)
    assert sum(done) > 0
    assert sum(done + refused) == 400
    out = cache.decode_attention(0, q)
    assert any(np.array_equal(out, want) for want in wants)
    cache.check()


def test_changes_at_once_leave_sound_books():
    """Whatever was let in was done whole: a token for each pass, no cell owned twice."""
    cache = numkv.CausalCache(window_left=4)
    cache.init("fp32", 4, 64, 8)
    k, v = rows(1)

    def go_on(seq, position=None):
        position = [0] if position is None else position

        def step():
            cache.start_forward(numkv.Batch([position[0]], [seq]))
            position[0] += 1

        return step

    def drop():
        cache.remove(1, 2)
        cache.copy_prefix(0, 2, 3)

    def read():
        cache.put(0, k, v)
        cache.decode_attention(0, k)
        assert np.all(np.diff(cache.positions(0)) >= 0)

    done, _ = at_once(go_on(0), go_on(1), drop, read, rounds=40, again=True)
    assert done == [40] * 4
    cache.check()


def test_a_wrapper_and_its_children_are_one_cache():
    """A child's change from another thread, inside of the wrapper's, is refused; so is the other way round."""
    caught = []

    def other(call):
        def run():
            try:
                call()
            except numkv.NumkvError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def shift(layer, keys, offsets):
        other(lambda: children[0].remove(0, 0))
        other(lambda: wrapper.copy_prefix(0, 1, 1))
        other(lambda: nested.start_forward(numkv.Batch([7], [0])))
        return keys

    children = numkv.CausalCache(shift), numkv.CausalCache(shift)
    wrapper = numkv.WrapperCache(*children, layer_types=[0, 1])
    nested = numkv.WrapperCache(wrapper)
    nested.init("fp32", 2, 16, 8)
    nested.start_forward(numkv.Batch([0, 1, 2, 3], [0] * 4))
    for layer in range(2):
        nested.put(layer, *rows(4))
    for cache, moving in ((wrapper, 2), (nested, 2), (children[1], 1)):
        caught.clear()
        cache.remove(0, 0, 1)
        assert len(caught) == 3 * moving
    other(lambda: nested.copy().remove(0, 0))  # another cache altogether
    assert [x.tolist() for x in wrapper.positions(0)] == [[0, 1], [0]]


# ---------------------------------------------------------------- compressors


CONFIG = numkv.CompressorConfig(DIM, 4, 16, 42)


def test_pushes_at_once_lose_nothing():
    """As many tokens as calls that were let in, each of them whole, whether the buffers grow or not."""
    cache = numkv.MultiHeadCompressor(HEADS, CONFIG)
    texts = [rows(1, salt)[:, 0] for salt in range(4)]
    wants = []
    for k, v in texts:
        one = numkv.MultiHeadCompressor(HEADS, CONFIG)
        one.push_token(k, v)
        wants.append((one.decode_keys()[:, 0].tobytes(), one.decode_values()[:, 0].tobytes()))
    done, refused = at_once(*(lambda x=x: cache.push_token(*x) for x in texts), rounds=50)
    assert sum(done + refused) == 200
    assert len(cache) == sum(done)
    keys, values = cache.decode_keys(), cache.decode_values()
    found = [wants.index((keys[:, i].tobytes(), values[:, i].tobytes())) for i in range(len(cache))]
    assert np.bincount(found, minlength=4).tolist() == done
    cache.check()


def test_readers_beside_a_growing_compressor():
    """They see the tokens from before, whole, and are never refused; old ones drop out at the front."""
    cache = numkv.MultiHeadCompressor(HEADS, CONFIG)
    x = rows(1)[:, 0]
    cache.push_token(*x)
    want, q = cache.decode_keys()[:, 0], np.ones((HEADS, DIM), F32)
    out = cache.attend(q)

    def read():
        keys = cache.decode_keys()
        assert np.array_equal(keys, np.repeat(want[:, None], keys.shape[1], 1))
        assert np.allclose(cache.attend(q), out, atol=1e-5)
        scores = cache.attention_scores(q)
        assert np.all(scores == scores[:, :1])
        assert len(cache.key_codes.scales[0]) >= keys.shape[1]

    done, refused = at_once(read, read, lambda: cache.push_token(*x), rounds=80)
    assert done == [80] * 3
    assert refused == [0] * 3
    assert len(cache) == 81


def test_readers_beside_a_compressor_that_is_cleared():
    """What was there before, or an error; never tokens from before and after."""
    cache, q = numkv.MultiHeadCompressor(HEADS, CONFIG), np.ones((HEADS, DIM), F32)
    texts = [rows(20, salt) for salt in range(2)]
    wants = []
    for k, v in texts:
        one = numkv.MultiHeadCompressor(HEADS, CONFIG)
        one.extend(k, v)
        wants.append(one.attend(q))
    turn = [0]

    def write():
        turn[0] ^= 1
        cache.clear()
        cache.extend(*texts[turn[0]])

    def read():
        out = cache.attend(q)
        assert not out.any() or any(np.array_equal(out, want) for want in wants)

    done, _ = at_once(read, read, write, rounds=150)
    assert done[2] == 150


def test_readers_beside_a_compressor_that_is_truncated():
    """What speculation left before it was taken back, and what came in its place; never some of both."""
    cache, q = numkv.MultiHeadCompressor(HEADS, CONFIG), np.ones((HEADS, DIM), F32)
    known, drafts = rows(10), [rows(10, salt) for salt in (1, 2)]
    wants = []
    for parts in ((known,), (known, drafts[0]), (known, drafts[1])):
        one = numkv.MultiHeadCompressor(HEADS, CONFIG)
        for k, v in parts:
            one.extend(k, v)
        wants.append(one.attend(q))
    cache.extend(*known)
    turn = [0]

    def write():
        turn[0] ^= 1
        cache.truncate(10)
        cache.extend(*drafts[turn[0]])

    def read():
        out = cache.attend(q)
        assert any(np.array_equal(out, want) for want in wants)

    done, _ = at_once(read, read, write, rounds=60)
    assert done[2] == 60


def test_calls_inside_of_a_push_are_refused(monkeypatch):
    """From another thread, and from a finaliser or a signal handler of this one."""
    head, x = numkv.HeadCompressor(CONFIG), np.ones(DIM, F32)
    encode, caught = head._target.ops.encode_rows, []

    def interrupted(*args):
        for call in (
            lambda: head.push(x, x), head.clear, lambda: head.evict_outside_window(0), lambda: head.truncate(0),
        ):  # fmt: skip
            try:
                call()
            except numkv.NumkvError as error:
                caught.append(error)
        assert len(head) == len(head.decode_keys()) == 1  # a reader sees what there was
        return encode(*args)

    head.push(x, x)
    monkeypatch.setattr(type(head._target), "ops", Ops(encode_rows=interrupted))
    head.push(x, x)
    assert len(caught) == 8
    monkeypatch.undo()
    assert len(head) == 2
    head.check()


class Ops:
    """A target's operations, some of them others."""

    def __init__(self, **others):
        from numkv.kernels.operations import load

        self._all = load("cpu")
        self.__dict__.update(others)

    def __getattr__(self, name):
        return getattr(self._all, name)
