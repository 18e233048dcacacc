"""Properties of paged storage over random shapes and random scripts of calls, on the CPU."""

import naive
import numpy as np
import paged_problems
import problems
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from profiles import machine

import numkv
from numkv.blocks.tables import slot_mapping

KINDS = st.sampled_from(["fp32", "fp16", "bf16", "int8"])


def same(x):
    return x


@st.composite
def shapes(draw):
    """Sizes of an attention problem, decode or prefill."""
    kv_heads = draw(st.integers(1, 3))
    lens = draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    new = tuple(draw(st.integers(0, n)) for n in lens) if draw(st.booleans()) else None
    return problems.Shape(
        num_q_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 70)),
        # An output of few elements can cancel to nearly nothing, and has no relative error to speak of.
        head_dim_v=draw(st.integers(8, 70)),
        seq_lens=tuple(lens),
        new=new,
    )


@given(shapes(), KINDS, st.integers(1, 20), st.integers(-1, 40), st.integers(0, 2**32 - 1))
def test_attention(shape, kind, block_size, window_left, seed):
    rng = np.random.default_rng(seed)
    problem = paged_problems.make(rng, shape, kind, block_size=block_size)
    problem.check(same, same, window_left=window_left, may_cancel=True)


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40)),
    kind=KINDS,
    data=st.data(),
)
def test_append(sizes, kind, data):
    """Any distinct slots and any number of skipped rows."""
    blocks, heads, size, dim = sizes
    slots = data.draw(st.lists(st.integers(0, blocks * size - 1), unique=True))
    slots = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 3))))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = rng.standard_normal((len(slots), heads, dim), np.float32)
    dtype, scales = np.int8, {}
    if kind == "int8":
        scales = {f"{x}_scale": np.full((blocks, heads, size), 7, np.float32) for x in "kv"}
    else:
        dtype = naive.DTYPES[kind]
    k, v = (np.full((blocks, heads, size, dim), 77, dtype) for _ in "kv")
    numkv.paged_append(rows, -rows, k, v, np.array(slots, np.int64), **scales)
    want, want_scale = np.full_like(k, 77), np.full((blocks, heads, size), 7, np.float32)
    codes, scale = naive.int8_quantise(rows) if kind == "int8" else (rows.astype(dtype), None)
    for t, slot in enumerate(slots):
        if slot >= 0:
            want[slot // size, :, slot % size] = codes[t]
            if scale is not None:
                want_scale[slot // size, :, slot % size] = scale[t]
    assert np.array_equal(naive.words(k), naive.words(want))
    written = [s for s in slots if s >= 0]
    negated = want.copy()
    for s in written:
        negated[s // size, :, s % size] *= -1
    assert np.array_equal(v, negated)
    if scales:
        assert np.array_equal(scales["k_scale"], want_scale)
        assert np.array_equal(scales["v_scale"], want_scale)


@given(
    rows=st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=40),
    exponent=st.integers(-34, 0),
)
@settings(max_examples=200)
def test_no_element_is_off_by_more_than_half_a_scale(rows, exponent):
    """Of any row whose largest element is at least 1e-30."""
    x = (np.array(rows) * 10.0**exponent).astype(np.float32)
    layer = numkv.ContiguousLayer(1, 1, len(x), kind="int8")
    layer.append(x[None, None], x[None, None])
    codes, scale = layer.k[0, 0, 0], layer.k_scale[0, 0, 0]
    want, want_scale = naive.int8_quantise(x)
    assert scale == want_scale
    assert np.array_equal(codes, want)
    if np.abs(x).max() >= 1e-30:
        error = np.abs(codes * np.float64(scale) - x.astype(np.float64))
        assert np.all(error <= scale * np.float64(0.5 + 1e-6) + 2.0**-23 * np.abs(x))
    elif not x.any():
        assert scale == 0
        assert not codes.any()


class LayersModel(RuleBasedStateMachine):
    """Layers of one pool against lists of numbers."""

    SIZE, BLOCKS, LAYERS, TABLE = 3, 9, 3, 5

    def __init__(self):
        super().__init__()
        self.pool = numkv.PagedPool(self.BLOCKS, self.SIZE, 1, 2, kind="fp16")
        self.layers = [
            numkv.PagedLayer(self.TABLE, self.SIZE, 1, 2, pool=self.pool)
            for _ in range(self.LAYERS)
        ]
        self.rows = [[] for _ in range(self.LAYERS)]
        self.next = 0

    def needs(self, n):
        return -(-n // self.SIZE)

    def fits(self, i, n):
        more = self.needs(len(self.rows[i]) + n) - self.needs(len(self.rows[i]))
        free = self.BLOCKS - sum(self.needs(len(rows)) for rows in self.rows)
        return len(self.rows[i]) + n <= self.TABLE * self.SIZE and more <= free

    @rule(i=st.integers(0, 2), n=st.integers(0, 8))
    def append(self, i, n):
        numbers = [float((self.next + j) % 2000) for j in range(n)]
        x = np.array([[[y, -y]] for y in numbers], np.float32).reshape(n, 1, 2)
        try:
            self.layers[i].append(x, -x)
        except numkv.CacheFull:
            assert not self.fits(i, n)
        else:
            assert self.fits(i, n)
            self.rows[i] += numbers
            self.next += n

    @rule(i=st.integers(0, 2), data=st.data())
    def truncate(self, i, data):
        length = data.draw(st.integers(0, len(self.rows[i])))
        self.layers[i].truncate(length)
        del self.rows[i][length:]

    @rule(i=st.integers(0, 2), data=st.data())
    def compact(self, i, data):
        keep = [j for j in range(len(self.rows[i])) if data.draw(st.integers(0, 3))]
        self.layers[i].compact(keep)
        self.rows[i] = [self.rows[i][j] for j in keep]

    @rule(i=st.integers(0, 2))
    def free(self, i):
        self.layers[i].free()
        self.rows[i] = []

    @invariant()
    def same(self):
        self.pool.check()
        assert self.pool.blocks.num_free == self.BLOCKS - sum(self.needs(len(r)) for r in self.rows)
        owned = [b for layer in self.layers for b in layer.block_indices]
        assert len(set(owned)) == len(owned)
        for layer, rows in zip(self.layers, self.rows, strict=True):
            n = self.needs(len(rows))
            assert layer.seq_len == len(rows)
            assert np.all(layer.block_table[:n] >= 0)
            assert np.all(layer.block_table[n:] == -1)
            slots = slot_mapping(layer.block_table[None], [len(rows)], self.SIZE,
                                 new_lens=[len(rows)])  # fmt: skip
            flat = self.pool.pool.k.view(np.float16).reshape(-1, 2)
            assert flat[slots, 0].tolist() == rows
            assert flat[slots, 1].tolist() == [-x for x in rows]


TestLayersModel = machine(LayersModel)
