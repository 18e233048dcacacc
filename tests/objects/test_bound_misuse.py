"""Bound calls that are not as they were bound: an error by name before anything has changed, or the right result."""

import copy
import pickle
import threading

import numpy as np
import pytest

import numkv
from numkv.errors import (
    CacheFull,
    DimensionMismatch,
    NonFiniteInput,
    NotSupported,
    NumkvError,
    UnsupportedDType,
)

pytestmark = pytest.mark.kernels

HEADS, Q_HEADS, DIM = 2, 8, 32
F32 = np.float32


def arrays(tokens=1, dtype=F32):
    rng = np.random.default_rng(5)
    shapes = {"q": Q_HEADS, "k": HEADS, "v": HEADS}
    return {n: rng.standard_normal((tokens, h, DIM), F32).astype(dtype) for n, h in shapes.items()}


def cache_of(kind="fp32", **options):
    cache = numkv.KVCache(2, HEADS, DIM, kind=kind, **options)
    x = np.ones((3, HEADS, DIM), F32)
    for layer in range(2):
        cache.append(layer, x, x)
    cache.advance(3)
    return cache


def every_second(x):
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    memory[...] = x
    return memory


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: np.concatenate([x, x]), DimensionMismatch),
        (lambda x: x[:, :1], DimensionMismatch),
        (lambda x: x[..., :-1], DimensionMismatch),
        (lambda x: x[0], DimensionMismatch),
        (lambda x: x.astype(np.float64), UnsupportedDType),
        (lambda x: x.astype(np.float16), UnsupportedDType),
        (lambda x: x.astype(">f4"), (UnsupportedDType, NotSupported)),
        (every_second, NotSupported),
        (unaligned, NotSupported),
        (lambda x: None, (UnsupportedDType, NotSupported)),
        (lambda x: np.ma.masked_array(x), (UnsupportedDType, NotSupported)),
    ],
)
def test_other_arrays_are_refused_by_name(name, change, error):
    cache = cache_of()
    bound = cache.bind(Q_HEADS)
    step, given = bound.begin(), arrays()
    with pytest.raises(error, match=f"`{name}`"):
        step(0, **given | {name: change(given[name])})
    assert cache.k(0).shape[0] == 3
    assert step.unwritten_layers == [0, 1]
    assert step(0, **given).shape == (1, Q_HEADS, DIM)  # and the step goes on
    layer = numkv.ContiguousLayer(8, HEADS, DIM, kind="fp32")
    if change(given[name]) is None or change(given[name]).shape[:1] == (1,):
        with pytest.raises(error, match=f"`{name}`"):
            layer.bind(Q_HEADS)(**given | {name: change(given[name])})
    assert len(layer) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, ::-1],
        read_only,
        np.broadcast_to,
    ],
)
def test_views_and_read_only_arrays_are_taken(change):
    given, cache, twin = arrays(), cache_of(), cache_of()
    changed = {
        n: np.broadcast_to(x[:, :1], x.shape) if change is np.broadcast_to else change(x)
        for n, x in given.items()
    }
    out = cache.bind(Q_HEADS).begin()(0, **changed)
    twin.append(0, changed["k"], changed["v"])
    assert np.array_equal(out, twin.decode_attention(0, changed["q"]))


def test_out_is_the_array_that_was_given():
    cache, given = cache_of(), arrays()
    expected = cache.bind(Q_HEADS).begin()(0, **given)
    cache.truncate(3)
    step = cache.bind(Q_HEADS).begin()
    for layer, out in ((0, np.empty((1, Q_HEADS, DIM), F32)), (1, given["q"])):
        assert step(layer, **given, out=out) is out
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_wrong_outputs_are_refused_before_anything_changes(kind):
    cache, given = cache_of(kind), arrays()
    step = cache.bind(Q_HEADS).begin()
    wide = np.zeros((2, Q_HEADS, DIM), F32)
    q = wide[:1]
    wrong = [read_only(given["q"]), given["q"][:, :4], given["q"].astype(np.float64), every_second(given["q"]),
             np.broadcast_to(given["q"][:, :1], given["q"].shape), q[:, ::-1]]  # fmt: skip
    for out in wrong:
        with pytest.raises(NumkvError, match="`out`"):
            step(0, **given | {"q": q}, out=out)
    if kind == "fp32":
        inside = cache._pool.k.reshape(-1)[: Q_HEADS * DIM].reshape(1, Q_HEADS, DIM)
        with pytest.raises(NumkvError, match="`out`"):
            step(0, **given, out=inside)
        for name in "kv":
            with pytest.raises(NotSupported, match=f"`{name}`"):
                step(0, **given | {name: cache._pool.k[:1, :, 5]})
    assert len(cache.k(0)) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_and_infinity_are_not_quantised(bad, name):
    cache, given = cache_of("int8"), arrays()
    given[name][0, 1, 7] = bad
    step = cache.bind(Q_HEADS).begin()
    with pytest.raises(NonFiniteInput, match=f"`{name}`") as caught:
        step(0, **given)
    assert caught.value.index == (0, 1, 7)
    assert len(cache.k(0)) == 3
    assert cache.bind(Q_HEADS, check_finite=False).begin()(0, **given).shape == (1, Q_HEADS, DIM)


def test_each_layer_is_called_once_in_a_step():
    cache, given = cache_of(), arrays()
    bound = cache.bind(Q_HEADS)
    step = bound.begin()
    step(0, **given)
    with pytest.raises(NumkvError, match="layer 0"):
        step(0, **given)
    with pytest.raises(NumkvError, match="append to every layer"):
        cache.advance()
    step(1, **given)
    cache.advance()
    for layer in (0, 1):
        with pytest.raises(NumkvError, match="begin each step anew"):
            step(layer, **given)
    for wrong, error in (
        (2, IndexError),
        (-1, IndexError),
        ("a", TypeError),
        ([], TypeError),
        (True, TypeError),
    ):
        with pytest.raises(error, match="`layer`"):
            bound.begin()(wrong, **given)
    assert [len(cache.k(layer)) for layer in (0, 1)] == [4, 4]
    assert bound.begin()(np.int64(1), **given).shape == (1, Q_HEADS, DIM)


def test_rows_that_were_not_advanced_come_first():
    cache, given = cache_of(), arrays()
    cache.append(1, given["k"], given["v"])
    with pytest.raises(NumkvError, match=r"truncate\(3\)"):
        cache.bind(Q_HEADS).begin()
    cache.truncate(3)
    with pytest.raises(DimensionMismatch, match="`new`"):
        cache.bind(Q_HEADS).begin(-1)
    step = cache.bind(Q_HEADS).begin()
    cache.append(0, given["k"], given["v"])  # behind the step's back
    with pytest.raises(NumkvError, match="was changed since"):
        step(0, **given)
    cache.clear()
    with pytest.raises(NumkvError, match="was changed since"):
        step(1, **given)
    assert len(cache.k(1)) == 0


def test_buffers_that_are_replaced_in_the_middle_of_a_step():
    cache, twin, given = cache_of(), cache_of(), arrays()
    step = cache.bind(Q_HEADS).begin()
    step(0, **given)
    cache.reserve(1000)
    out = step(1, **given)
    twin.append(1, given["k"], given["v"])
    assert np.array_equal(out, twin.decode_attention(1, given["q"]))
    cache.advance()
    assert np.array_equal(cache.k(1)[3], given["k"][0])
    assert len(cache) == 4


def test_no_room():
    cache = cache_of(max_seq_len=4)
    bound = cache.bind(Q_HEADS)
    with pytest.raises(CacheFull):
        bound.begin(2)
    for layer in (
        numkv.ContiguousLayer(1, HEADS, DIM, kind="fp32"),
        numkv.PagedLayer(1, 1, HEADS, DIM, kind="fp32"),
    ):
        with pytest.raises(CacheFull):
            layer.bind(Q_HEADS)(**arrays(2))
        assert len(layer) == 0
        layer.bind(Q_HEADS)(**arrays())
        assert len(layer) == 1
        layer.check()


def test_steps_without_tokens():
    cache = cache_of()
    step = cache.bind(Q_HEADS).begin(0)
    for layer in range(2):
        assert step(layer, **arrays(0)).shape == (0, Q_HEADS, DIM)
    cache.advance(0)
    assert len(cache) == 3


def test_steps_of_a_paged_cache_end():
    cache, given = numkv.PagedKVCache(2, HEADS, DIM, num_blocks=8, kind="fp32"), arrays()
    other = numkv.PagedKVCache(2, HEADS, DIM, num_blocks=8, kind="fp32")
    bound, seq = cache.bind(Q_HEADS), cache.add()
    for wrong in (other.reserve([other.add()], 1), 1, None):
        with pytest.raises(NumkvError, match="`new`"):
            bound.begin(wrong)
    reserved = cache.reserve([seq], 1)
    step = bound.begin(reserved)
    step(0, **given)
    with pytest.raises(NumkvError, match="called in this step"):
        step(0, **given)
    assert reserved.unwritten_layers == [1]
    cache.rollback(reserved)
    for layer in range(2):
        with pytest.raises(NumkvError, match="open step"):
            step(layer, **given)
    with pytest.raises(NumkvError, match="open step"):
        bound.begin(reserved)
    assert cache.length(seq) == 0
    cache.check()


def test_nothing_of_it_can_be_copied():
    cache = cache_of()
    bound = cache.bind(Q_HEADS)
    layer = numkv.ContiguousLayer(4, HEADS, DIM).bind(Q_HEADS)
    for x in (bound, bound.begin(), layer):
        for method in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(NotSupported, match="cannot be copied"):
                method(x)
        assert repr(x)
    twin = copy.deepcopy(cache)
    bound.begin()(0, **arrays())
    assert len(twin.k(0)) == 3
    assert len(cache.k(0)) == 4


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"num_q_heads": 3}, DimensionMismatch), ({"num_q_heads": 0}, DimensionMismatch),
        ({"kind": "fp16"}, UnsupportedDType), ({"kind": "int8"}, UnsupportedDType),
        ({"sm_scale": np.nan}, ValueError), ({"logits_soft_cap": -1.0}, ValueError),
        ({"window_left": -2}, DimensionMismatch), ({"window_left": [1, 2, 3]}, DimensionMismatch),
        ({"sinks": np.zeros(3, F32)}, DimensionMismatch), ({"sinks": np.zeros((3, Q_HEADS), F32)}, DimensionMismatch),
        ({"sinks": np.full(Q_HEADS, np.nan, F32)}, ValueError), ({"check_finite": 2}, TypeError),
    ],
)  # fmt: skip
def test_options_are_checked_when_they_are_bound(given, error):
    with pytest.raises(
        error,
        match=r"`(q|num_q_heads|kind|sm_scale|logits_soft_cap|window_left|sinks|check_finite)`",
    ):
        cache_of().bind(**{"num_q_heads": Q_HEADS} | given)


def test_a_second_writer_gets_an_error():
    cache = cache_of()
    step = cache.bind(Q_HEADS).begin()
    cache._access.writer["call"] = cache  # as another call would
    with pytest.raises(NumkvError, match="being changed by another call"):
        step(0, **arrays())
    with pytest.raises(NumkvError, match="being changed by another call"):
        cache.bind(Q_HEADS).begin()
    del cache._access.writer["call"]
    step(0, **arrays())
    layer = numkv.ContiguousLayer(4, HEADS, DIM, kind="fp32")
    layer._access.writer["call"] = layer
    with pytest.raises(NumkvError, match="being changed by another call"):
        layer.bind(Q_HEADS)(**arrays())


def test_threads_with_caches_of_their_own():
    given, found = arrays(), []
    expected = cache_of().bind(Q_HEADS).begin()(0, **given)

    def work():
        cache = cache_of()
        bound = cache.bind(Q_HEADS)
        for _ in range(50):
            step = bound.begin()
            outs = [step(layer, **given) for layer in range(2)]
            found.append(all(np.array_equal(out, expected) for out in outs))
            cache.truncate(3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(found)
