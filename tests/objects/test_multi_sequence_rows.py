"""Rows and attention of multi-sequence caches."""

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from cell_numbers import CACHES, make, ready
from cell_problems import Pair, plus, plus_one

import numkv

F32, F16 = np.float32, np.float16


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "kinds", [("fp64", "fp64"), ("bf16", "bf16"), ("fp16", "int8"), ("int8", "fp32")], ids="-".join
)
def test_kinds_and_head_dims(target, rng, kinds):
    """K and V have their own kinds and their own widths; rows come in the kind's own dtype or in float32."""
    k_kind, v_kind = kinds
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 8, 4, target, k_kind=k_kind, v_kind=v_kind)
    cells = naive_cells.Cells(1, 8, 4)
    pair = Pair(cache, cells, target=target, k_kind=k_kind, v_kind=v_kind)
    for positions, sources in (([0, 1, 2], ("fp32", "fp32")), ([3], kinds)):
        assert pair.start_forward(positions, [0] * len(positions))
        rows = [
            naive.round_to(
                rng.standard_normal((len(positions), 2, d)), "fp16" if s == "int8" else s
            )
            for d, s in zip((4, 6), sources, strict=True)
        ]
        pair.put(3, *rows)
        pair.check(3)


def test_layers_are_their_own(target, rng):
    """They are made when first put, in any order, with sizes of their own."""
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 8, 4, target)
    pair = Pair(cache, naive_cells.Cells(1, 8, 4), target=target)
    shapes = {7: (1, 2), 0: (3, 4), 1000: (2, 1)}
    for t in range(2):
        assert pair.start_forward([t], [0])
        for layer, (heads, dim) in shapes.items():
            pair.put(layer, *rng.standard_normal((2, 1, heads, dim), F32))
    for layer in (*shapes, 1, 6):
        pair.check(layer)


def test_a_layer_that_begins_late(target):
    """What was never written is zero."""
    pair = make(target)
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    pair.step([3], [2], [0], [0, 0, 3], "000", layer=1)


def test_get_shows_memory_not_copies():
    pair = make("cpu")
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    (k, v, mask), again = pair.cache.get(0), pair.cache.get(0)
    assert all(np.shares_memory(a, b) for a, b in zip((k, v, mask), again, strict=True))
    k[1, 0, 0] = 9
    assert again[0][1, 0, 0] == 9


def test_a_batch_of_nobody(target, to, rng):
    """Shows nothing, changes nothing."""
    pair = ready(target)
    pair.cache.start_forward(numkv.Batch([], []))
    pair.cache.put(0, to(np.empty((0, 1, 1), F32)), to(np.empty((0, 1, 2), F32)))
    k, v, mask = pair.cache.get(0)
    assert (k.shape[0], v.shape[0], mask.shape) == (0, 0, (0, 0))
    out = pair.cache.decode_attention(0, to(np.empty((0, 1, 1), F32)))
    assert out.shape == (0, 1, 2)
    pair.probe()


def test_strided_rows_are_taken(rng):
    pair = make("cpu")
    wide = rng.standard_normal((2, 3, 6), F32)
    assert pair.start_forward([0, 1], [0, 0])
    pair.put(0, wide[:, 1:2, 2:4], wide[:, ::2, :3][:, :1])
    pair.check(0)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("name", CACHES)
def test_attention(target, rng, name):
    """Batches of several sequences, in runs and interleaved, after evictions, copies and removals."""
    options, told = CACHES[name]
    cache = numkv.CausalCache(plus(target), **options)
    sizes = (3, 12, 8)
    cache.init("fp32", *sizes, target)
    pair = Pair(cache, naive_cells.Cells(*sizes, shift=plus_one, **told), target=target)

    def forward(positions, sequences):
        n = len(positions)
        assert pair.start_forward(positions, sequences)
        pair.put(0, *rng.integers(-4, 5, (2, n, 2, 4)).astype(F32))
        return pair.attends(0, rng.standard_normal((n, 4, 4), F32))

    forward([0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1])
    forward([4, 2, 5, 0], [0, 1, 0, 2])
    pair.set_causal(0, [0, 1])
    pair.attends(0, rng.standard_normal((4, 4, 4), F32))
    assert pair.change("remove", 0, 4, 5)
    assert pair.change("copy_prefix", 0, 5, 4)
    forward([5, 5], [0, 5])
    assert pair.start_forward([5, 0, 1], [0, 9, 1], reserve=True)
    pair.attends(0, rng.standard_normal((3, 4, 4), F32))


def test_attention_options(target, to, host, rng):
    cache = numkv.CausalCache()
    cache.init("int8", 2, 8, 8, target, v_kind="fp16")
    pair = Pair(cache, naive_cells.Cells(2, 8, 8), target=target, k_kind="int8", v_kind="fp16")
    assert pair.start_forward([0, 0, 1, 2, 1], [3, 1, 1, 1, 3])
    pair.put(0, rng.standard_normal((5, 2, 4), F32), rng.standard_normal((5, 2, 6), F32))
    q = rng.standard_normal((5, 6, 4), F32)
    sinks = rng.standard_normal(6).astype(F32)
    pair.attends(0, q, sm_scale=0.3, logits_soft_cap=2.0, sinks=sinks)
    pair.attends(0, q.astype(F16))
    plain = cache.decode_attention(0, to(q))
    place = to(np.zeros((5, 6, 6), F32))
    assert cache.decode_attention(0, to(q), out=place) is place
    assert np.array_equal(host(place), host(plain))


def test_a_row_that_sees_nothing(target, to, host, rng):
    """0 and minus infinity, or the sink."""
    pair = make(target)
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    assert pair.start_forward([0, 0, 5], [0, 4, 7], reserve=True)
    q = rng.standard_normal((3, 2, 1), F32)
    pair.attends(0, q)
    pair.attends(0, q, sinks=np.array([0.5, -2], F32))
    out, lse = pair.cache.decode_attention(0, to(q), return_lse=True)
    assert np.all(host(out)[1:] == 0)
    assert np.all(host(lse)[1:] == -np.inf)
    assert np.all(host(lse)[0] > -np.inf)


def test_what_is_hidden_is_not_read(target, to, host, rng):
    """NaN in another sequence's rows, and in those that were let go of."""
    cache = numkv.CausalCache()
    cache.init("fp32", 2, 8, 8, target)
    rows, q = rng.standard_normal((3, 1, 4), F32), rng.standard_normal((2, 1, 4), F32)
    bad = to(np.full((3, 1, 4), np.nan, F32))
    cache.start_forward(numkv.Batch([0, 1, 2], [1, 1, 2]))
    cache.put(0, bad, bad)
    cache.remove(1, 1)
    cache.start_forward(numkv.Batch([0, 1], [0, 0]))
    cache.put(0, to(rows[:2]), to(rows[:2]))
    want, _ = naive_cells.attention(q, rows[:2], rows[:2], [[0, -np.inf], [0, 0]])
    tolerances.assert_rows_close(host(cache.decode_attention(0, to(q))), want, 1e-5)
    cache.remove(2, 0)
    cache.start_forward(numkv.Batch([2], [0]))
    cache.put(0, to(rows[2:]), to(rows[2:]))
    want, _ = naive_cells.attention(q[:1], rows, rows, [[0, 0, 0]])
    tolerances.assert_rows_close(host(cache.decode_attention(0, to(q[:1]))), want, 1e-5)


def test_a_sequence_does_not_depend_on_the_others(target, to, host, rng):
    """Bit for bit, whatever else is in the cache and in the batch."""
    rows, q = rng.standard_normal((2, 5, 2, 4), F32), rng.standard_normal((2, 4, 4), F32)

    def run(others):
        cache = numkv.CausalCache()
        cache.init("fp32", 4, 16, 16, target)
        for positions, part in (([0, 1, 2], np.s_[:3]), ([3, 4], np.s_[3:])):
            n = len(positions)
            cache.start_forward(
                numkv.Batch(
                    [*others, *positions, *others], [3] * len(others) + [0] * n + [2] * len(others)
                )
            )
            other = np.full((len(others), 2, 4), 5, F32)
            k, v = (to(np.concatenate([other, x, other])) for x in rows[:, part])
            cache.put(0, k, v)
        pad = np.ones((len(others), 4, 4), F32)
        out = host(cache.decode_attention(0, to(np.concatenate([pad, q, pad]))))
        return out[len(others) : len(others) + 2]

    assert np.array_equal(run([]), run([0, 1, 2]))
