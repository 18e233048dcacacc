"""`layer.jit`: the structure that a user's own nopython code works on."""

import naive
import numpy as np
import pytest
from numba import njit

import numkv

KINDS = list(naive.DTYPES)


@njit
def append_all(cache, k, v):
    for t in range(k.shape[0]):
        cache.append(k[t], v[t])


@njit
def read_all(cache, k, v):
    for t in range(k.shape[0]):
        for h in range(k.shape[1]):
            cache.load_k(t, h, k[t, h])
            cache.load_v(t, h, v[t, h])


@njit
def slots(cache, positions):
    out = np.empty(len(positions), np.int64)
    for i in range(len(positions)):
        out[i] = cache.slot(positions[i])
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_own_code_appends_and_reads(rng, kind):
    """Rows appended in nopython mode are the layer's rows, and are read back as float32."""
    layer = numkv.ContiguousLayer(6, 2, 4, kind=kind)
    k, v = (rng.standard_normal((5, 2, 4), np.float32) for _ in "kv")
    layer.append(k[:2], v[:2])
    append_all(layer.jit, k[2:], v[2:])
    assert layer.seq_len == 5
    want_k, want_v = naive.round_to(k, kind), naive.round_to(v, kind)
    assert np.array_equal(layer.k[0, :, :5].swapaxes(0, 1), want_k)
    assert np.array_equal(layer.v[0, :, :5].swapaxes(0, 1), want_v)
    got_k, got_v = np.zeros((2, 5, 2, 4), np.float32)
    read_all(layer.jit, got_k, got_v)
    assert np.array_equal(got_k, want_k.astype(np.float32))
    assert np.array_equal(got_v, want_v.astype(np.float32))
    q = rng.standard_normal((1, 2, 4), np.float32)
    out, _ = naive.attention(q, layer.k, layer.v, [5])
    assert np.allclose(layer.decode_attention(q), out, rtol=1e-5, atol=1e-6)


def test_fields_are_the_layers_buffers():
    layer = numkv.ContiguousLayer(6, 2, 4, kind="bf16")
    rows = np.ones((3, 2, 4), np.float32)
    layer.append(rows, rows)
    jit = layer.jit
    assert jit is layer.jit  # made once
    assert jit.k.dtype == jit.v.dtype == np.uint16
    assert jit.k.shape == (1, 2, 6, 4)
    assert np.shares_memory(jit.k, layer.k)
    assert np.shares_memory(jit.v, layer.v)
    assert jit.block_table.tolist() == [[0]]
    assert jit.context_lens.tolist() == [3]
    layer.truncate(1)
    assert jit.context_lens.tolist() == [1]


def test_slots():
    layer = numkv.ContiguousLayer(6, 2, 4)
    assert slots(layer.jit, np.array([0, 3, 5])).tolist() == [0, 3, 5]


def test_own_code_cannot_write_past_the_capacity():
    layer = numkv.ContiguousLayer(2, 1, 4, kind="fp32")
    rows = np.ones((3, 1, 4), np.float32)
    with pytest.raises(Exception, match=r"(?i)full|room|capacity|range") as caught:
        append_all(layer.jit, rows, rows)
    assert isinstance(caught.value, (numkv.CacheFull, IndexError, ValueError))
    assert layer.seq_len <= 2
