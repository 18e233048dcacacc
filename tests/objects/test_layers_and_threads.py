"""One layer or `KVCache`, several threads: one writer, readers that see whole tokens, and calls inside calls."""

import gc
import sys
import threading

import numpy as np
import pytest

import numkv

pytestmark = pytest.mark.kernels

F32 = np.float32
HEADS, DIM = 2, 4
NAMES = ["ContiguousLayer", "PagedLayer", "KVCache"]


@pytest.fixture(autouse=True)
def _threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def make(name, **options):
    options = {"kind": "fp32"} | options
    if name == "KVCache":
        return numkv.KVCache(1, HEADS, DIM, **options)
    if name == "PagedLayer":
        return numkv.PagedLayer(500, 3, HEADS, DIM, **options)
    return numkv.ContiguousLayer(1500, HEADS, DIM, **options)


def of_layer(one):
    return (0,) if isinstance(one, numkv.KVCache) else ()


def token(value, n=1):
    """Rows of K that are 0, so that attention is a mean, and of V that say a number."""
    return np.zeros((n, HEADS, DIM), F32), np.full((n, HEADS, DIM), value, F32)


def stored_values(one):
    """V of all tokens, each of which has one number."""
    if isinstance(one, numkv.KVCache):
        v = one.v(0)
    else:
        blocks = one.block_indices if one.is_paged else [0]
        v = np.concatenate([one.v[b].swapaxes(0, 1) for b in blocks] or [one.v[0, :, :0]])
        v = v[: len(one)]
    flat = v.reshape(len(v), HEADS * DIM)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


def run(*works):
    """Run functions in threads, and raise what they raise."""
    errors = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    "options", [{}, {"kind": "int8", "full_precision": numkv.FullPrecision(4)}], ids=["", "window"]
)
@pytest.mark.parametrize("name", NAMES)
def test_four_writers_lose_no_token(name, options):
    """Each append counts, or is refused."""
    one, done = make(name, **options), [[] for _ in range(4)]

    def work(me):
        for i in range(120):
            value = 1000 * me + i + 1
            try:
                one.append(*of_layer(one), *token(value))
            except numkv.NumkvError as error:
                assert "being changed by another call" in str(error)  # noqa: PT017
            else:
                done[me].append(value)

    run(*(lambda me=me: work(me) for me in range(4)))
    if isinstance(one, numkv.KVCache):
        one.advance(sum(map(len, done)))
    assert len(one) == sum(map(len, done)) > 0
    one.check()
    if not options:
        assert sorted(stored_values(one)) == sorted(v for values in done for v in values)


def mean_of(one):
    """The mean of V over all tokens that a reader sees, which is one number in all heads."""
    out = one.decode_attention(*of_layer(one), np.ones((1, HEADS, DIM), F32))
    assert (out == out[..., :1, :1]).all(), out
    return float(out.flat[0])


@pytest.mark.parametrize("name", NAMES)
def test_readers_beside_an_appender_see_whole_tokens(name):
    """Token p says p: the mean of n tokens is (n - 1) / 2, and n never falls; growth included."""
    one, ended = make(name), threading.Event()
    one.append(*of_layer(one), *token(0))

    def write():
        try:
            for p in range(1, 700):
                one.append(*of_layer(one), *token(p))
        finally:
            ended.set()

    def attend():
        seen = 1
        while not ended.is_set():
            n = 2 * mean_of(one) + 1
            assert abs(n - round(n)) < 1e-3, n
            assert round(n) >= seen
            seen = round(n)

    def read():
        while not ended.is_set():
            values = stored_values(one)
            assert values == list(range(len(values)))
            twin = one.copy()
            values = stored_values(twin)
            assert values == list(range(len(values)))
            if hasattr(twin, "free"):
                twin.free()
            one.check()

    run(write, attend, *[read] * (name == "KVCache"))
    assert mean_of(one) == pytest.approx(349.5, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drop", ["truncate", "clear", "compact", "free", "window"])
def test_a_reader_beside_one_that_drops_gets_an_error_or_what_was_there(name, drop):
    """All tokens of a round say the same power of 2: a mean of tokens of two rounds is none."""
    window = drop == "window"
    one = make(
        name, **({"kind": "int8", "full_precision": numkv.FullPrecision(2)} if window else {})
    )
    ended = threading.Event()
    if drop == "free" and name != "PagedLayer":
        drop = "truncate"
    errors, results = [], []

    def write():
        try:
            for turn in range(5000):
                if turn > 100 and len(errors) + len(results) > 100:
                    return
                for n in (1, 3, 4):
                    one.append(*of_layer(one), *token(2.0 ** (turn % 16), n))
                if isinstance(one, numkv.KVCache):
                    one.advance(8)
                if drop == "compact":
                    one.compact([1, 4, 5, 7])
                    one.compact([])
                elif drop in ("truncate", "window"):
                    one.truncate(2)
                    one.truncate(0)
                else:
                    getattr(one, drop)()
        finally:
            ended.set()

    def read():
        while not ended.is_set():
            try:
                mean = mean_of(one)
            except numkv.NumkvError as error:
                errors.append(error)
                continue
            results.append(mean)
            assert mean == 0 or abs(np.log2(mean) - round(np.log2(mean))) < 1e-3, mean

    run(write, read)
    assert len(errors) + len(results) > 100
    one.check()


def test_layers_of_one_pool_in_threads_of_their_own():
    """Blocks go from one to the other all the time; nobody sees the other's rows, and no block is lost."""
    pool = numkv.PagedPool(24, 2, HEADS, DIM, kind="fp32")
    layers = [numkv.PagedLayer(8, 2, HEADS, DIM, pool=pool) for _ in range(3)]

    def work(me):
        layer = layers[me]
        for turn in range(80):
            layer.append(*token(2.0**me, 1 + turn % 7))
            twin = layer.copy() if turn % 9 == 0 and pool.blocks.num_free > 12 else None
            for each in filter(None, (layer, twin)):
                assert mean_of(each) == 2.0**me
            layer.truncate(turn % 3)
            layer.reserve(turn % 5)
            if twin is not None:
                assert mean_of(twin) == 2.0**me
                twin.free()
            if turn % 10 == 9:
                layer.free()

    run(*(lambda me=me: work(me) for me in range(3)))
    for layer in layers:
        layer.check()
    pool.check()
    owned = [block for layer in layers for block in layer.block_indices]
    assert pool.blocks.num_free == 24 - len(owned)
    assert len(set(owned)) == len(owned)


# ---------------------------------------------------------------- calls inside calls


class Calls:
    """Rows that call something when their memory is asked for, in the middle of a call."""

    def __init__(self, rows, call):
        self.rows, self.call = rows, call

    @property
    def __array_interface__(self):
        self.call()
        return self.rows.__array_interface__

    dtype = property(lambda self: self.rows.dtype)
    shape = property(lambda self: self.rows.shape)


WRITES = {
    "append": lambda one: one.append(*of_layer(one), *token(5)),
    "truncate": lambda one: one.truncate(0),
    "clear": lambda one: one.clear(),
    "compact": lambda one: one.compact([]),
    "reserve": lambda one: one.reserve(1),
    "advance": lambda one: one.advance(0),
    "write": lambda one: one.write(np.zeros((1, 4 * HEADS * DIM), F32), num_q_heads=4, qk_mode=0),
    "free": lambda one: one.free(),
    "take_blocks": lambda one: one.take_blocks([400]),
    "seq_len": lambda one: setattr(one, "seq_len", 0),
}


@pytest.mark.parametrize("inner", WRITES)
@pytest.mark.parametrize("name", NAMES)
def test_a_write_inside_a_write_is_refused(name, inner):
    one = make(name)
    if not hasattr(one, inner):
        assert inner in ("advance", "write", "free", "take_blocks", "seq_len")
        return
    one.append(*of_layer(one), *token(1, 2))
    k, v = token(3)
    refused = []

    def call():
        with pytest.raises(numkv.NumkvError, match=rf"^{inner}: this {name} is being changed"):
            WRITES[inner](one)
        refused.append(inner)

    one.append(*of_layer(one), Calls(k, call), v)
    assert refused
    assert stored_values(one) == [1, 1, 3]
    if name == "KVCache":
        one.advance(3)
    WRITES[inner](one)  # the object is free again
    one.check()


@pytest.mark.parametrize("inner", ["truncate", "clear", "compact"])
@pytest.mark.parametrize("name", NAMES)
def test_a_reader_that_is_overtaken_gets_an_error(name, inner):
    one = make(name)
    one.append(*of_layer(one), *token(1, 2))
    if name == "KVCache":
        one.advance(2)
    q = np.ones((1, HEADS, DIM), F32)
    with pytest.raises(numkv.NumkvError, match="moved or dropped while they were read"):
        one.decode_attention(*of_layer(one), Calls(q, lambda: WRITES[inner](one)))
    assert len(one) == 0
    # An append is no reason for that: there is a result, over the tokens of before or of after.
    one.append(*of_layer(one), *token(2))
    inside = Calls(q, lambda: one.append(*of_layer(one), *token(4)))
    mean, values = one.decode_attention(*of_layer(one), inside).flat[0], stored_values(one)
    assert values[:2] == [2, 4]
    means = [np.mean(values[:n]) for n in range(1, len(values) + 1)]
    assert any(mean == pytest.approx(each, rel=1e-5) for each in means)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "PagedLayer")) for x in NAMES]
)
def test_a_finaliser_cannot_write_in_the_middle(name):
    """Objects whose finaliser appends to the cache that is being written to."""
    one, told = make(name), []

    class Session:
        def __init__(self):
            self.me = self

        def __del__(self):
            try:
                one.append(*of_layer(one), *token(7))
                told.append("done")
            except numkv.NumkvError:
                told.append("refused")

    own = 0
    before = gc.get_threshold()
    try:
        for i in range(150):
            gc.set_threshold(1 + i % 23)
            Session()
            try:
                one.append(*of_layer(one), *token(1))
            except numkv.NumkvError:
                continue
            own += 1
    finally:
        gc.set_threshold(*before)
    gc.collect()
    values = stored_values(one)
    assert values.count(1) == own
    assert values.count(7) == told.count("done")
    assert len(told) == 150
    one.check()


def test_an_error_gives_the_object_free():
    one = make("PagedLayer")
    k, v = token(1)
    for bad in (lambda: one.append(k, v[:, :1]), lambda: one.truncate(9), lambda: one.reserve(-1)):
        with pytest.raises((numkv.NumkvError, IndexError)):
            bad()
        one.append(k, v)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.append(Calls(k, interrupted), v)
    one.append(k, v)
    assert len(one) == 4
