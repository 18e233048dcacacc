"""Properties over random shapes and random scripts of calls, on the CPU."""

import naive
import numpy as np
import problems
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from profiles import machine

import numkv

KINDS = st.sampled_from(list(naive.DTYPES))


@st.composite
def shapes(draw):
    """Sizes of an attention problem, decode or prefill."""
    kv_heads = draw(st.integers(1, 3))
    lens = draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    new = None
    if draw(st.booleans()):
        new = tuple(draw(st.integers(0, n)) for n in lens)
    return problems.Shape(
        num_q_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 70)),
        head_dim_v=draw(st.none() | st.integers(1, 70)),
        seq_lens=tuple(lens),
        new=new,
        spare=draw(st.integers(0, 5)),
    )


@given(
    shape=shapes(),
    kind=st.sampled_from(["fp32", "fp16", "bf16"]),
    window_left=st.integers(-1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention(shape, kind, window_left, seed):
    if max(shape.seq_lens) + shape.spare == 0:
        return
    problem = problems.make(np.random.default_rng(seed), shape, kind)
    problem.check(lambda x: x, lambda x: x, window_left=window_left, may_cancel=True)


@given(
    sizes=st.tuples(*[st.integers(0, 4)] * 2, *[st.integers(0, 6)] * 4),
    kind=KINDS,
    data=st.data(),
)
def test_append(sizes, kind, data):
    batch, heads, new_len, l_max, d_k, d_v = sizes
    near = st.integers(-8, 8) | st.integers(-(2**63), 2**63 - 1)
    offsets = np.array(data.draw(st.lists(near, min_size=batch, max_size=batch)), np.int64)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    arrays = [
        naive.round_to(rng.standard_normal((batch, heads, rows, dim)), kind)
        for rows, dim in ((new_len, d_k), (new_len, d_v), (l_max, d_k), (l_max, d_v))
    ]
    want = [naive.plan_append(arrays[i], arrays[i + 2], offsets) for i in (0, 1)]
    numkv.append(*arrays, offsets)
    for got, expected in zip(arrays[2:], want, strict=True):
        assert np.array_equal(naive.words(got), naive.words(expected))


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8),
    kind=st.sampled_from(["fp16", "bf16"]),
)
@settings(max_examples=200)
def test_rounding(bits, kind):
    """Any float32 is stored as its nearest 16-bit neighbour, ties to even."""
    rows = np.array(bits, np.uint32).view(np.float32).reshape(2, 4)
    cache = numkv.KVCache(1, 2, 4, kind=kind)
    cache.append(0, rows, rows)
    got, want = cache.k(0)[0], naive.round_to(rows, kind)
    nan = np.isnan(rows)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(naive.words(got)[~nan], naive.words(want)[~nan])


class CacheModel(RuleBasedStateMachine):
    """A `KVCache` against lists of numbers, one per row."""

    LAYERS, LIMIT = 2, 30

    def __init__(self):
        super().__init__()
        self.limited = False
        self.cache = numkv.KVCache(self.LAYERS, 1, 2, head_dim_v=1, kind="fp16")
        self.rows = [[] for _ in range(self.LAYERS)]
        self.length = self.next = 0
        self.twins = []

    @precondition(lambda self: not self.limited and not any(self.rows))
    @rule()
    def start_limited(self):
        self.cache = numkv.KVCache(
            self.LAYERS, 1, 2, head_dim_v=1, kind="fp16", max_seq_len=self.LIMIT
        )
        self.limited, self.length = True, 0

    @rule(layer=st.integers(0, 1), n=st.integers(0, 12))
    def append(self, layer, n):
        numbers = [float((self.next + i) % 2000) for i in range(n)]
        k = np.array([[[x, -x]] for x in numbers], np.float32).reshape(n, 1, 2)
        v = np.array([[[x]] for x in numbers], np.float16).reshape(n, 1, 1)
        if self.limited and len(self.rows[layer]) + n > self.LIMIT:
            try:
                self.cache.append(layer, k, v)
            except numkv.CacheFull:
                return
            raise AssertionError("CacheFull was not raised")
        self.cache.append(layer, k, v)
        self.rows[layer] += numbers
        self.next += n

    @rule(n=st.integers(0, 6))
    def advance(self, n):
        fits = self.length + n <= min(map(len, self.rows))
        try:
            self.cache.advance(n)
        except numkv.NumkvError:
            assert not fits
        else:
            assert fits
            self.length += n

    @rule(data=st.data())
    def truncate(self, data):
        self.length = data.draw(st.integers(0, self.length))
        self.cache.truncate(self.length)
        self.rows = [rows[: self.length] for rows in self.rows]

    @rule()
    def clear(self):
        self.cache.clear()
        self.rows, self.length = [[] for _ in range(self.LAYERS)], 0

    @precondition(lambda self: len(self.twins) < 3)
    @rule()
    def copy(self):
        self.twins.append((self.cache.copy(), [list(rows) for rows in self.rows], self.length))

    @rule(layer=st.sampled_from([-1, 2]), what=st.sampled_from(["k", "v"]))
    def wrong_layer(self, layer, what):
        try:
            getattr(self.cache, what)(layer)
        except IndexError:
            return
        raise AssertionError("IndexError was not raised")

    @invariant()
    def same(self):
        for cache, rows, length in [(self.cache, self.rows, self.length), *self.twins]:
            assert len(cache) == length
            assert cache.is_empty == (length == 0)
            for layer in range(self.LAYERS):
                k, v = cache.k(layer), cache.v(layer)
                assert k.shape == (len(rows[layer]), 1, 2)
                assert k[:, 0, 0].tolist() == rows[layer]
                assert k[:, 0, 1].tolist() == [-x for x in rows[layer]]
                assert v[:, 0, 0].tolist() == rows[layer]


TestCacheModel = machine(CacheModel)
