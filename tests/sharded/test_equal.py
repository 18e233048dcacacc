"""A sharded cache beside one in a single process, and beside the float64 reference."""

import pickle

import ml_dtypes
import naive
import numpy as np
import pytest
import tolerances
from layer_lists import specs
from paged_caches import DIM, HEADS, Q_HEADS, check_attention, rows
from sharded_caches import LAYOUTS, grow, make, one, queries, same

import numkv
import numkv.ray
from numkv.ray.messages import packed, unpacked

LENGTHS = [(5, 3), (11, 9), (12, 10), (13, 10), (14, 11), (33, 31), (34, 32)]


def texts_of(lengths):
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 99, 64), rng.integers(0, 99, 64)
    return a[: lengths[0]], b[: lengths[1]]


def run(cache, **options):
    seqs = cache.add(), cache.add()
    return [
        out
        for n in LENGTHS
        for out in grow(cache, dict(zip(seqs, texts_of(n), strict=True)), **options)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sharded_attention_is_that_of_one_process(layout):
    """By heads to the bit, by context to rounding; and each sequence as the reference has it."""
    cache = make(layout)
    got, want = run(cache), run(one())
    for x, y in zip(got, want, strict=True):
        if layout[1] == 1:
            np.testing.assert_array_equal(x, y)
        else:
            tolerances.assert_rows_close(x, y, tolerances.attention("fp32", "fp32"))
    for seq, text in zip(cache.sequences, texts_of(LENGTHS[-1]), strict=True):
        check_attention(cache, same, np.asarray, seq, text)
    cache.check()
    again = run(make(layout))
    for x, y in zip(got, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", [(2, 1, None), (1, 2, 2)], ids=str)
def test_options_reach_all_shards(layout):
    sinks = np.array([0.5, -1.0, 2.0, -np.inf], np.float32)
    options = {"sm_scale": 0.3, "sinks": sinks, "return_lse": True}
    got, want = run(make(layout), **options), run(one(), **options)
    for (x, lse), (y, of_one) in zip(got, want, strict=True):
        tolerances.assert_rows_close(x, y, tolerances.attention("fp32", "fp32"))
        np.testing.assert_allclose(lse, of_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [(2, 1, None), (1, 2, 2), (2, 3, 4)], ids=str)
def test_windows(layout):
    """By context, queries say what they see of each column."""
    windows = [-1, 4]
    got, want = (
        run(make(layout, specs=specs(2, HEADS, DIM, kind="fp32", windows=windows))),
        run(one(windows=windows)),
    )
    for x, y in zip(got, want, strict=True):
        tolerances.assert_rows_close(x, y, tolerances.attention("fp32", "fp32"))


def test_heads_that_do_not_divide():
    cache = numkv.ray.ShardedKVCache(
        1, 5, 8, num_blocks=8, heads=3, transport=numkv.ray.LocalShards()
    )
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 7, 5, 8), np.float32)
    q = rng.standard_normal((7, 10, 8), np.float32)
    step = cache.reserve([cache.add()], 7)
    out = step.append_attend(0, k, v, q)
    whole = numkv.PagedKVCache(1, 5, 8, num_blocks=8, kind=cache.layers[0].kind)
    of_one = whole.reserve([whole.add()], 7)
    of_one.append(0, k, v)
    np.testing.assert_array_equal(out, of_one.attention(0, q))
    assert cache._shards.layout.bounds == (0, 1, 3, 5)
    with pytest.raises(numkv.DimensionMismatch, match="heads"):
        numkv.ray.ShardedKVCache(1, 2, 8, num_blocks=8, heads=3, transport=numkv.ray.LocalShards())


@pytest.mark.parametrize("layout", [(2, 1, None), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_write_is_that_of_one_process(layout, kind):
    """Projections are split, normed and rotated by the caller: the same K and V arrive."""
    n = 9
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((n, (Q_HEADS + 2 * HEADS) * DIM), np.float32)
    cos, sin = naive.rope_tables(n, DIM)
    options = {"num_q_heads": Q_HEADS, "cos": cos, "sin": sin, "qk_mode": numkv.QKMode.HALF_SPLIT}
    outs = []
    for cache in (make(layout, kind=kind), one(kind=kind)):
        seq = cache.add()
        for begin, end in ((0, 7), (7, 8), (8, 9)):
            step = cache.reserve([seq], [end - begin])
            for layer in range(2):
                q = step.write(layer, qkv[begin:end], **options)
                outs.append((q, step.attention(layer, q)))
            cache.commit(step)
    half = len(outs) // 2
    for (q, out), (q_of_one, of_one) in zip(outs[:half], outs[half:], strict=True):
        np.testing.assert_array_equal(q, q_of_one)
        if layout[1] == 1:
            np.testing.assert_array_equal(out, of_one)
        else:
            np.testing.assert_allclose(out, of_one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float32"])
def test_arrays_are_pickled_as_they_lie_in_memory(name):
    """None goes through the stream of the pickle itself, and none loses its shape, strides or not."""
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4).astype(name)
    for array in (x, x[:, ::2], x[..., 1:3], x[:0], np.array(x[0, 0, 0])):
        buffers: list[pickle.PickleBuffer] = []
        message = packed((3, [("layer", (array, None, {"sinks": array}))]))
        stream = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        if array.ndim:
            assert sum(len(b.raw()) for b in buffers) in (array.nbytes, 2 * array.nbytes)
        _, (found, none, options) = unpacked(pickle.loads(stream, buffers=buffers))[1][0]
        assert none is None
        for got in (found, options["sinks"]):
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            assert got.tobytes() == array.tobytes()


@pytest.mark.nightly
def test_bfloat16_rows_travel_as_words():
    got = []
    for cache in (make((2, 1, None), kind="bf16"), one(kind="bf16")):
        step = cache.reserve([cache.add()], 6)
        k, v = rows(0, range(6)).astype(ml_dtypes.bfloat16)
        for layer in range(2):
            step.append(layer, k, v)
        got.append(step.attention(1, queries(1, [range(6)], [0]).astype(ml_dtypes.bfloat16)))
        cache.rollback(step)
    assert got[0].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got[0].view(np.uint16), got[1].view(np.uint16))


def test_columns_without_a_token_do_not_matter():
    """A query sees nothing in a column whose tokens all come later: -inf and 0 are merged, never NaN."""
    cache = make((1, 3, 2))
    seq = cache.add()
    outs = grow(cache, {seq: np.arange(7)}, return_lse=True)
    assert len(cache.runs(seq)) == 4
    for layer, (out, lse) in enumerate(outs):
        assert np.isfinite(lse).all()
        k, v = rows(layer, np.arange(7)).transpose(0, 2, 1, 3)[:, None]
        q = queries(layer, [np.arange(7)], [0])
        want, _ = naive.attention(q, k, v, [7], cu_seqlens_q=[0, 7])
        tolerances.assert_rows_close(out, want, tolerances.attention("fp32", "fp32"))
    out, lse = cache.decode_attention(
        0, [cache.add()], np.ones((1, Q_HEADS, DIM), np.float32), return_lse=True
    )
    assert not out.any()
    assert (lse == -np.inf).all()


def test_a_column_with_nan_in_it_harms_its_own_sequence_only():
    cache = make((1, 2, 64))
    a, b = cache.add(), cache.add()
    grow(cache, {a: np.arange(40)})
    grow(cache, {b: np.arange(4)})
    step = cache.reserve([a, b], [1, 1])
    k, v = np.full((2, 2, HEADS, DIM), np.nan, np.float32)
    k[1] = v[1] = 1
    out = step.append_attend(0, k, v, np.ones((2, Q_HEADS, DIM), np.float32))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()
