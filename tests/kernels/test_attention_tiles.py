"""Tiles of attention on the CPU have 64 to 256 tokens, by the bytes of a row: lengths and windows around their ends."""

import numpy as np
import pytest
from walked import each

import numkv

LENGTHS = (1, 63, 64, 65, 127, 129, 255, 256, 257, 321, 512, 513, 1100)
#: With a dim of 64, tiles have 128 tokens in fp32 and 256 in the other kinds.
LARGEST_ERROR = {"fp32": 2e-6, "bf16": 1e-2, "int8": 2e-2, "int4": 0.25}


def stored(rng, kind, dim, length):
    """A layer of 2 heads with random rows, and the rows."""
    layer = numkv.ContiguousLayer(length, 2, dim, kind=kind)
    k, v = rng.standard_normal((2, length, 2, dim), np.float32)
    layer.append(k, v)
    scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    return layer, scales if numkv.kind(kind).has_scales else {}, k, v


def attended(q, k, v, begin):
    """Attention of one token's queries to tokens from `begin` on, in float64."""
    group = q.shape[0] // k.shape[1]
    k, v = (x[begin:].astype(np.float64).repeat(group, 1) for x in (k, v))
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), k) / np.sqrt(q.shape[1])
    p = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("hn,nhd->hd", p / p.sum(1, keepdims=True), v)


@each("window", [-1, 0, 63, 130, 300])
@each("length", LENGTHS)
@each("dim", [16, 64])
@pytest.mark.parametrize("kind", LARGEST_ERROR)
def test_lengths_and_windows_around_ends_of_tiles(rng, kind, dim, length, window):
    layer, scales, k, v = stored(rng, kind, dim, length)
    q = rng.standard_normal((1, 6, dim), np.float32)
    lens = np.array([length])
    out = numkv.decode_attention(q, layer.k, layer.v, lens, window_left=window, **scales)
    wanted = attended(q[0], k, v, max(0, length - 1 - window) if window >= 0 else 0)
    assert np.linalg.norm(out[0] - wanted) <= LARGEST_ERROR[kind] * np.linalg.norm(wanted)


@each("length", [200, 256, 300])
@pytest.mark.parametrize("dim", [16, 128])
def test_a_nan_outside_of_what_is_seen_stays_there(rng, dim, length):
    k, v = rng.standard_normal((2, 1, 2, 400, dim), np.float32)
    v[:, :, : length - 71] = k[:, :, : length - 71] = np.nan
    v[:, :, length:] = k[:, :, length:] = np.nan
    q = rng.standard_normal((1, 2, dim), np.float32)
    out = numkv.decode_attention(q, k, v, np.array([length]), window_left=70)
    wanted = attended(q[0], k[0].swapaxes(0, 1)[:length], v[0].swapaxes(0, 1)[:length], length - 71)
    np.testing.assert_allclose(out[0], wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.02), ("int4", 0.1)])
def test_equal_weights_of_a_whole_tile_stay_within_32_bits(kind, error):
    """Each of 256 tokens has the largest weight and the largest code."""
    layer = numkv.ContiguousLayer(256, 1, 32, kind=kind)
    rows = np.ones((256, 1, 32), np.float32)
    rows[..., ::2] = -1
    layer.append(np.zeros_like(rows), rows)
    q = np.ones((1, 4, 32), np.float32)
    scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    out = numkv.decode_attention(q, layer.k, layer.v, np.array([256]), **scales)
    np.testing.assert_allclose(out, np.broadcast_to(rows[:1], out.shape), atol=error)


@each("size", [16, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("kind", LARGEST_ERROR)
def test_results_do_not_depend_on_the_width_of_a_table(rng, kind, size):
    """A sequence of one block, in tables with room for one block and for three, and beside a longer sequence."""
    layer, scales, *_ = stored(rng, kind, 64, 3 * size)
    pools = {  # three blocks of the layer's rows
        name: np.ascontiguousarray(
            x.reshape(1, 2, 3, size, *x.shape[3:]).swapaxes(1, 2).reshape(3, 2, size, *x.shape[3:])
        )
        for name, x in {"k_pool": layer.k, "v_pool": layer.v, **scales}.items()
    }
    table = np.array([[2, 0, 1]], np.int32)
    for group in (1, 4):
        q = rng.standard_normal((1, 2 * group, 64), np.float32)
        options = {"q": q, **pools, "seq_lens": np.array([size - 3])}
        narrow = numkv.paged_decode_attention(block_table=table[:, :1].copy(), **options)
        wide = numkv.paged_decode_attention(block_table=table, **options)
        options |= {"q": q.repeat(2, 0), "seq_lens": np.array([size - 3, 2 * size])}
        both = numkv.paged_decode_attention(block_table=table.repeat(2, 0), **options)
        assert np.array_equal(narrow, wide)
        assert np.array_equal(narrow[0], both[0])


@each("capacity", [96, 100, 128, 160, 192, 200, 256, 300])
@pytest.mark.parametrize("kind", LARGEST_ERROR)
def test_results_do_not_depend_on_the_capacity(rng, kind, capacity):
    length = capacity - 3
    for dim in (64, 128):
        layer, scales, k, v = stored(rng, kind, dim, capacity)
        larger = numkv.ContiguousLayer(1024, 2, dim, kind=kind)
        larger.append(k[:length], v[:length])
        for group in (1, 4):
            q = rng.standard_normal((1, 2 * group, dim), np.float32)
            out = numkv.decode_attention(q, layer.k, layer.v, np.array([length]), **scales)
            assert np.array_equal(out, larger.decode_attention(q))
