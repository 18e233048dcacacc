"""Scales of kv heads, which 8-bit floats have, in caches of many sequences: of each layer, set before it stores."""

import pickle

import numpy as np
import pytest
from capsules import Capsule
from layer_lists import paged_kv_cache

import numkv
from numkv.files import load_sequences, save_sequences

HEADS, DIM, SIZE = 2, 8, 2
WINDOWS = [-1, 3, -1, 3]  # two groups: a block serves two layers
#: Powers of two, by layer, of K and of V: values are stored exactly as they are without scales, in other bytes.
K_SCALES = [[0.5, 2.0], [4.0, 0.25], [8.0, 1.0], [0.125, 16.0]]
V_SCALES = [[2.0, 1.0], [0.5, 8.0], [1.0, 0.5], [4.0, 0.25]]


def f32(x):
    return np.array(x, np.float32)


def paged(kind="fp8_e4m3", *, scales=True, num_blocks=40, **options):
    cache = paged_kv_cache(
        4, HEADS, DIM, num_blocks=num_blocks, block_size=SIZE, kind=kind, windows=WINDOWS, **options
    )
    if scales:
        for layer in range(4):
            cache.set_scales(layer, k=f32(K_SCALES[layer]), v=f32(V_SCALES[layer]))
    return cache


def rows(rng, n):
    """Values that 8-bit floats hold exactly, also divided by the scales."""
    return rng.choice(f32([-1.5, -1, -0.5, 0.5, 1, 1.25]), (4, 2, n, HEADS, DIM))


def write(cache, seq, of_layers, to):
    step = cache.reserve([seq], [of_layers.shape[2]])
    for layer in range(4):
        step.append(layer, *(to(np.ascontiguousarray(x)) for x in of_layers[layer]))
    return step


def stored(cache, seq, host):
    """K and V of every layer's tokens, as they are read."""
    found = []
    for layer in range(4):
        pool, group = cache._store.place(layer)
        table = cache._sequences[seq].tables[group]
        for which in "kv":
            blocks = [host(pool.rows(which, int(b), slice(None))) for b in table[table >= 0]]
            found.append(np.concatenate(blocks, 1)[:, : cache.length(seq)].tolist())
    return found


def test_each_layer_has_its_own(target, to, host, rng):
    """Scales of powers of two change no value, but every stored byte: what is read is what was written."""
    made = rows(rng, 7)
    found = []
    for scales in (False, True):
        cache = paged(scales=scales, target=target)
        seq = cache.add()
        cache.commit(write(cache, seq, made, to))
        found.append(stored(cache, seq, host))
        cache.check()
    assert found[0] == found[1]


def test_values_are_products_with_the_scales(rng):
    cache = paged()
    seq = cache.add()
    made = rows(rng, 3)
    cache.commit(write(cache, seq, made, np.asarray))
    for layer in range(4):
        pool, group = cache._store.place(layer)
        table = cache._sequences[seq].tables[group]
        stored = pool.rows("k", int(table[1]), slice(0, 1))[:, 0]
        assert np.array_equal(stored, made[layer, 0, 2])
        codes = pool.values("k")[table[1], :, 0].astype(np.float32)
        assert np.array_equal(codes, made[layer, 0, 2] / f32(K_SCALES[layer])[:, None])


def test_nbytes_counts_the_scales_of_every_layer():
    without = paged("fp8_e4m3").nbytes - 4 * 2 * HEADS * 4
    assert without == 40 * 2 * 2 * HEADS * SIZE * DIM  # blocks, layers a block, K and V


def test_only_before_anything_is_stored():
    cache = paged()
    seq = cache.add()
    with pytest.raises(numkv.NumkvError, match="without sequences, got 1"):
        cache.set_scales(0, k=2.0)
    cache.remove(seq)
    cache.set_scales(0, k=2.0)
    assert cache._store.place(0)[0].k_scale.tolist() == [2, 2]
    assert cache._store.place(1)[0].k_scale.tolist() == K_SCALES[1]


def test_the_prefix_cache_forgets_what_other_scales_stored(rng):
    cache = paged()
    seq, text = cache.add(), list(range(6))
    cache.commit(write(cache, seq, rows(rng, 6), np.asarray), token_ids=text)
    pinned = cache.pin(seq)
    cache.remove(seq)
    with pytest.raises(numkv.NumkvError, match="is pinned"):
        cache.set_scales(0, k=2.0)
    assert cache._store.place(0)[0].k_scale.tolist() == K_SCALES[0]
    cache.blocks.unpin(pinned)
    with pytest.raises(ValueError, match="above 0"):
        cache.set_scales(0, k=2.0, v=0.0)
    assert cache._store.place(0)[0].k_scale.tolist() == K_SCALES[0]
    assert cache.blocks.stats().cached
    cache.set_scales(0, k=2.0)
    assert cache.cached_len(cache.add(text)) == 0
    cache.check()


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_other_kinds_have_none(kind):
    cache = paged(kind, scales=False)
    with pytest.raises(numkv.NotSupported, match="whose heads have scales"):
        cache.set_scales(0, v=2.0)
    cells = numkv.CausalCache()
    cells.init(kind, 1, 8, 4)
    with pytest.raises(numkv.NotSupported, match="whose heads have scales"):
        cells.set_scales(0, k=2.0)


def test_swapped_and_saved(target, to, host, rng, tmp_path):
    cache = paged(target=target)
    seq = cache.add()
    cache.commit(write(cache, seq, rows(rng, 7), to))
    swapped = cache.swap_out(seq)
    save_sequences(tmp_path / "one", [swapped])
    (loaded,) = load_sequences(tmp_path / "one")
    assert [x.tolist() for x in loaded.head_scales[3]] == [K_SCALES[3], V_SCALES[3]]
    want = stored(cache, seq, host)
    other = paged(target=target)
    for given in (swapped, loaded):
        assert stored(other, other.swap_in(given), host) == want
    wrong = paged(scales=False, target=target)
    with pytest.raises(
        numkv.NumkvError, match=r"scales of `k` in layer 0, \[1.0, 1.0\], got \[0.5, 2.0\]"
    ):
        wrong.swap_in(loaded)
    assert wrong.num_free == wrong.num_blocks


def test_compaction(target, to, host, rng):
    """Rows move as they are stored, and keys are shifted; with scales of powers of two no rounding is another."""
    angles = np.outer(np.arange(16), np.full(DIM // 2, 0.4)).astype(np.float32)  # no sums near 0
    shift = numkv.rope_shift(to(np.cos(angles)), to(np.sin(angles)))
    made, keep = rows(rng, 6), [0, 2, 3, 4, 5]
    found = []
    for scales in (False, True):
        cache = paged("fp8_e5m2", scales=scales, target=target)  # of more range than scales take
        seq = cache.add()
        cache.commit(write(cache, seq, made, to))
        cache.compact(seq, keep, shift=shift)
        cache.check()
        found.append(stored(cache, seq, host))
    assert found[0] == found[1]


@pytest.mark.parametrize("before_put", [False, True])
def test_cells(target, to, host, rng, before_put):
    """Set before a layer is put, or after a reserved pass has allocated it."""
    cache = numkv.CausalCache()
    cache.init("fp8_e4m3", 1, 16, 8, target)
    made = rows(rng, 5)
    k, v = (to(np.ascontiguousarray(x)) for x in made[0])
    batch = numkv.Batch(range(5), [0] * 5)
    if not before_put:
        cache.start_forward(batch, reserve=True)
        cache.put(0, k, v)
    cache.set_scales(0, k=f32(K_SCALES[1]), v=0.5)
    cache.start_forward(batch)
    cache.put(0, k, v)
    assert host(cache._layers[0].k_scale).tolist() == K_SCALES[1]
    assert host(cache._layers[0].v_scale).tolist() == [0.5, 0.5]
    found = [host(x) for x in cache.get(0)[:2]]
    assert np.array_equal(found, made[0])
    with pytest.raises(numkv.NumkvError, match="without tokens, got 5"):
        cache.set_scales(0, k=1.0)
    cache.remove(0, 0)
    cache.set_scales(0, k=1.0)
    assert host(cache._layers[0].k_scale).tolist() == [1, 1]


def test_the_first_put_checks_the_number_of_heads():
    cache = numkv.CausalCache()
    cache.init("fp8_e4m3", 1, 16, 8)
    for wrong in (f32([]), f32([[1, 2]])):
        with pytest.raises(numkv.DimensionMismatch, match="`k`"):
            cache.set_scales(0, k=wrong)
    cache.set_scales(0, k=f32([1, 2, 3]))
    cache.start_forward(numkv.Batch([0], [0]))
    one = np.ones((1, HEADS, DIM), np.float32)
    with pytest.raises(numkv.DimensionMismatch, match="`k of set_scales`"):
        cache.put(0, one, one)
    assert not cache._layers


def test_encoder_and_wrapper(rng):
    encoder, causal = numkv.EncoderCache(), numkv.CausalCache()
    cache = numkv.WrapperCache(encoder, causal, layer_types=[0, 1])
    cache.init("fp8_e5m2", 1, 16, 8)
    cache.set_scales(0, k=4.0)
    cache.set_scales(1, v=8.0)
    cache.start_forward(numkv.Batch([0], [0], multimodal=[0]))
    for n in (3, 5):  # rows of another number take buffers of their own
        many = rng.choice(f32([-1, 0.5, 1.25]), (n, HEADS, DIM))
        cache.put(0, many, many)
        assert encoder._layers[0].k_scale.tolist() == [4, 4]
        assert np.array_equal(cache.get(0)[0], many)
    with pytest.raises(numkv.NumkvError, match="without rows"):
        cache.set_scales(0, k=1.0)
    assert causal._head_scales is not encoder._head_scales


@pytest.mark.parametrize("filled", [True, False])
def test_scales_of_another_library(filled):
    """An array known only by DLPack sets the scales of layers with rows and without, and the cache keeps them."""
    cache = numkv.CausalCache()
    cache.init("fp8_e4m3", 1, 8, 4)
    row = np.ones((1, 2, 4), np.float32)
    if filled:
        cache.start_forward(numkv.Batch([0], [0]))
        cache.put(0, row, row)
        cache.remove(0, 0, 1)
    cache.set_scales(0, v=Capsule(np.float32([0.5, 2.0])))
    other = pickle.loads(pickle.dumps(cache))
    for one in (cache, other):
        one.start_forward(numkv.Batch([0], [0]))
        one.put(0, row, row)
        assert np.array_equal(one.get(0)[1].ravel(), row.ravel())
        assert one.arrays(0).v_scale.tolist() == [0.5, 2.0]
