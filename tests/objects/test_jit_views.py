"""`layer.jit`: the structure that a user's own nopython code works on."""

import naive
import numpy as np
import pytest
import tolerances
from numba import njit
from own_code import as_stored

import numkv

KINDS = [*naive.DTYPES, *naive.CODES]


@njit
def append_all(cache, k, v):
    for t in range(k.shape[0]):
        if not cache.append(k[t], v[t]):
            return t
    return k.shape[0]


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


@pytest.mark.parametrize(
    "kinds", [(k, k) for k in KINDS] + [("bf16", "int8"), ("int4", "fp32")], ids="-".join
)
def test_own_code_appends_and_reads(rng, kinds):
    """Rows appended in nopython mode are the layer's rows, and are read back as float32."""
    layer = numkv.ContiguousLayer(6, 2, 4, k_kind=kinds[0], v_kind=kinds[1])
    k, v = (rng.standard_normal((5, 2, 4), np.float32) for _ in "kv")
    layer.append(k[:2], v[:2])
    assert append_all(layer.jit, k[2:], v[2:]) == 3
    assert layer.seq_len == 5
    twin = numkv.ContiguousLayer(6, 2, 4, k_kind=kinds[0], v_kind=kinds[1])
    twin.append(k, v)
    for mine, its in ((layer.k, twin.k), (layer.v, twin.v), (layer.k_scale, twin.k_scale),
                      (layer.v_scale, twin.v_scale)):  # fmt: skip
        assert np.array_equal(mine, its)
    got_k, got_v = np.zeros((2, 5, 2, 4), np.float32)
    read_all(layer.jit, got_k, got_v)
    assert np.array_equal(got_k, as_stored(k, kinds[0]))
    assert np.array_equal(got_v, as_stored(v, kinds[1]))
    if kinds[0] == kinds[1]:
        q = rng.standard_normal((1, 2, 4), np.float32)
        out, _ = naive.attention(q, *(x.swapaxes(0, 1)[None] for x in (got_k, got_v)), [5])
        bound = tolerances.attention(kinds[0], "fp32")
        tolerances.assert_rows_close(layer.decode_attention(q), out, bound)


@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_a_paged_layer(rng, kind):
    """Own code follows the block table, as far as the layer has blocks."""
    pool = numkv.PagedPool(6, 3, 2, 4, kind=kind)
    other, layer = (numkv.PagedLayer(4, 3, 2, 4, pool=pool) for _ in "ab")
    rows = rng.standard_normal((9, 2, 4), np.float32)
    other.append(rows[:2], rows[:2])
    layer.append(rows[:4], -rows[:4])
    others = other.k[other.block_indices[0]].copy()
    jit = layer.jit
    assert jit.block_table.tolist() == layer.block_table.tolist()
    size, (first, second) = 3, layer.block_indices
    assert slots(jit, np.array([0, 2, 5])).tolist() == [
        first * size, first * size + 2, second * size + 2
    ]  # fmt: skip
    before, free = pool.pool.k.copy(), pool.num_free
    assert append_all(jit, rows[4:], -rows[4:]) == 2  # the second block has two places left
    assert (layer.seq_len, pool.num_free) == (6, free)
    untouched = [b for b in range(6) if b != second]
    assert np.array_equal(pool.pool.k[untouched], before[untouched])
    layer.append(rows[6:], -rows[6:])
    got_k, got_v = np.zeros((2, 9, 2, 4), np.float32)
    read_all(layer.jit, got_k, got_v)
    assert np.array_equal(got_k, as_stored(rows, kind))
    assert np.array_equal(got_v, as_stored(-rows, kind))
    assert np.array_equal(other.k[other.block_indices[0]], others)


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
    assert jit.block_table.tolist() == [0]
    assert jit.context_lens.tolist() == [3]
    layer.truncate(1)
    assert jit.context_lens.tolist() == [1]


def test_slots():
    layer = numkv.ContiguousLayer(6, 2, 4)
    assert slots(layer.jit, np.array([0, 3, 5])).tolist() == [0, 3, 5]


def test_own_code_cannot_write_past_the_capacity():
    """An append without room says so and writes nothing."""
    layer = numkv.ContiguousLayer(2, 1, 4, kind="fp32")
    rows = np.ones((3, 1, 4), np.float32)
    assert append_all(layer.jit, rows, rows) == 2
    assert layer.seq_len == 2
    layer.truncate(1)
    assert append_all(layer.jit, 2 * rows, rows) == 1
    assert layer.k[0, 0, :, 0].tolist() == [1, 2]


@njit
def step(cache, k, v):
    """One token into every layer, then on: a user's own decode loop."""
    for layer in range(len(cache.context_lens)):
        if not cache.append(layer, k, v):
            return False
    return cache.advance(1)


@njit
def load(cache, layer, position, out):
    cache.load_k(layer, position, 0, out[0])
    cache.load_v(layer, position, 0, out[1])


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_a_cache_of_all_layers(rng, kind):
    cache = numkv.KVCache(2, 1, 4, kind=kind, max_seq_len=2)
    k, v = rng.standard_normal((2, 1, 4), np.float32)
    assert step(cache.jit, k, v)
    assert len(cache) == 1
    assert np.array_equal(cache.k(1)[0].astype(np.float32), as_stored(k, kind))
    cache.append(0, v, k)
    assert not cache.jit.advance(1)  # layer 1 is not there yet
    out = np.zeros((2, 4), np.float32)
    load(cache.jit, 0, 1, out)
    assert np.array_equal(out[0], as_stored(v[0], kind))
    assert np.array_equal(out[1], as_stored(k[0], kind))
    assert not step(cache.jit, k, v)  # layer 0 is full


def test_a_cache_that_grew_has_new_buffers():
    cache, rows = numkv.KVCache(1, 1, 2), np.ones((200, 1, 2), np.float32)
    cache.append(0, rows[:1], rows[:1])
    before = cache.jit.k
    cache.append(0, rows, rows)
    assert cache.jit.k.shape[2] >= 201
    assert not np.shares_memory(before, cache.jit.k)
    assert cache.jit.context_lens.tolist() == [201]


def test_a_copy_leaves_the_structure_of_the_original_in_use():
    cache, rows = numkv.KVCache(1, 1, 4, max_seq_len=3), np.ones((1, 4), np.float32)
    view = cache.jit
    assert step(view, rows, rows)
    twin = cache.copy()
    assert step(view, 2 * rows, rows)
    assert step(twin.jit, 3 * rows, rows)
    assert cache.jit is view
    assert cache.k(0)[:, 0, 0].tolist() == [1, 2]
    assert twin.k(0)[:, 0, 0].tolist() == [1, 3]


def test_on_cuda_it_holds_the_host_side():
    """Block table and lengths; the device buffers lie beside it, on the object."""
    from numkv import targets

    rows = targets.get("cuda").asarray(np.ones((3, 2, 4), np.float32))
    layer = numkv.ContiguousLayer(6, 2, 4, target="cuda")
    layer.append(rows, rows)
    assert layer.jit.block_table.tolist() == [0]
    assert layer.jit.context_lens.tolist() == [3]
    cache = numkv.KVCache(1, 2, 4, target="cuda")
    cache.append(0, rows, rows)
    assert cache.jit.context_lens.tolist() == [3]
