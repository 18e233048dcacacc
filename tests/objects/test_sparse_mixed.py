"""Sparse reading where layers are not alike, or their heads have scales."""

import pickle

import ml_dtypes
import naive
import naive_sparse
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache
from mixed_caches import GROUP, Layer, make, queries

import numkv

F32 = np.float32
SIZE = 4
BOUNDS = {"key_bounds": True}
#: Shapes and kinds that differ, a reader, a window that is read whole, and two layers of one shape in one group.
LAYERS = [
    Layer(2, 8, 8),
    Layer(1, 16, 8),
    Layer(2, 8, 8, "int8"),
    Layer(2, 8, 8, source=0),
    Layer(2, 8, 8, window=5),
    Layer(2, 8, 8),
]
LENS = [50, 1, 9, 33]


def stored(x, kind, scales=1):
    if kind in naive.CODES:
        return naive.dequantise(*naive.quantise(x, kind))
    scales = np.asarray(scales, F32).reshape(-1, 1)
    if kind == "fp8_e4m3":
        return (x / scales).astype(ml_dtypes.float8_e4m3fn).astype(F32) * scales
    return naive.round_to(x, kind)


def filled(rng, to, cache, layers, lens=LENS):
    """The rows of sequences, by layer and sequence, and an open step with the last token of each."""
    seqs = [cache.add() for _ in lens]
    rows = {
        number: [
            [rng.standard_normal((n, x.heads, dim)).astype(F32) for dim in (x.dim, x.dim_v)]
            for n in lens
        ]
        for number, x in enumerate(layers)
        if x.source is None
    }
    for part in (slice(0, -1), slice(-1, None)):
        step = cache.reserve(seqs, [len(range(n)[part]) for n in lens])
        for number, of in rows.items():
            each = (np.concatenate([x[side][part] for x in of]) for side in range(2))
            step.append(number, *map(to, each))
        if part.start == 0:
            cache.commit(step)
    return rows, step


def test_unlike_layers(target, to, host, rng):
    cache = make(LAYERS, num_blocks=400, block_size=SIZE, alike=BOUNDS, target=target)
    rows, step = filled(rng, to, cache, LAYERS)
    for number, layer in enumerate(LAYERS):
        q, bound = queries(layer, len(LENS)), tolerances.attention(layer.kind, "fp32")
        sinks = rng.standard_normal(layer.heads * GROUP).astype(F32) if number == 5 else None
        given = None if sinks is None else to(sinks)
        got = step.sparse_attention(number, to(q), most_blocks=3, sinks=given, return_lse=True)
        out, lse = map(host, got)
        if layer.window >= 0:
            assert np.array_equal(out, host(step.attention(number, to(q))))
            continue
        for i, of in enumerate(rows[number if layer.source is None else layer.source]):
            k, v = (stored(x, layer.kind) for x in of)
            want, of_want = naive_sparse.attention(q[i], k, v, SIZE, 3, sinks=sinks)
            tolerances.assert_rows_close(out[i], want, bound)
            np.testing.assert_allclose(lse[i], of_want, rtol=max(1e-5, bound), atol=max(1e-5, bound))  # fmt: skip
        placed = to(np.zeros_like(out))
        step.sparse_attention(number, to(q), most_blocks=3, sinks=given, out=placed)
        assert np.array_equal(host(placed), out)
    cache.commit(step)
    cache.check()


def test_results_depend_neither_on_the_batch_nor_on_what_is_read(rng):
    cache = make(LAYERS, num_blocks=400, block_size=SIZE, alike=BOUNDS)
    rows, step = filled(rng, np.asarray, cache, LAYERS)
    q = {number: queries(layer, len(LENS)) for number, layer in enumerate(LAYERS)}
    together = {n: step.sparse_attention(n, q[n], most_blocks=5) for n in q}
    for number in q:
        all_of_it = step.sparse_attention(number, q[number], most_blocks=40)
        assert np.array_equal(all_of_it, step.attention(number, q[number]))
    cache.rollback(step)
    for i, seq in enumerate(cache.sequences):
        alone = cache.reserve([seq], 1)
        for number, of in rows.items():
            alone.append(number, *(x[-1:] for x in of[i]))
        for number in q:
            got = alone.sparse_attention(number, q[number][i : i + 1], most_blocks=5)
            assert np.array_equal(got[0], together[number][i])
        cache.rollback(alone)


def test_drafts_choose_each_for_itself(rng):
    cache = make(LAYERS, num_blocks=400, block_size=SIZE, alike=BOUNDS)
    rows, step = filled(rng, np.asarray, cache, LAYERS, [30])
    cache.rollback(step)
    new = {
        n: [rng.standard_normal((3, *x.shape[1:])).astype(F32) for x in of[0]]
        for n, of in rows.items()
    }
    step = cache.reserve([0], 3)
    for number, of in new.items():
        step.append(number, *of)
    for number in (0, 1, 2, 5):
        q, kind = queries(LAYERS[number], 3), LAYERS[number].kind
        out = step.sparse_attention(number, q, most_blocks=3)
        for t in range(3):
            pairs = zip(rows[number][0], new[number], strict=True)
            k, v = (stored(np.concatenate([old[:-1], x[: t + 1]]), kind) for old, x in pairs)
            want, _ = naive_sparse.attention(q[t], k, v, SIZE, 3)
            tolerances.assert_rows_close(out[t], want, tolerances.attention(kind, "fp32"))
    cache.rollback(step)


def test_scales_of_heads(target, to, host, rng):
    """Bounds are of scaled keys; so is what is chosen, and what is read."""
    layers = [Layer(2, 8, 8, "fp8_e4m3"), Layer(2, 8, 8, "fp8_e4m3")]
    of_k, of_v = [[0.5, 4.0], [8.0, 0.25]], [[2.0, 0.125], [1.0, 32.0]]
    cache = make(layers, num_blocks=80, block_size=SIZE, alike=BOUNDS, target=target)
    for number in range(2):
        cache.set_scales(number, np.array(of_k[number], F32), np.array(of_v[number], F32))
    rows, step = filled(rng, to, cache, layers)
    for number in range(2):
        q = queries(layers[number], len(LENS))
        out = host(step.sparse_attention(number, to(q), most_blocks=3))
        for i, (k, v) in enumerate(rows[number]):
            k = stored(k, "fp8_e4m3", of_k[number])
            v = stored(v, "fp8_e4m3", of_v[number])
            want, _ = naive_sparse.attention(q[i], k, v, SIZE, 3)
            bound = tolerances.attention("fp8_e4m3", "fp32")
            tolerances.assert_rows_close(out[i], want, bound)
    cache.rollback(step)
    for seq in cache.sequences:
        cache.remove(seq)
    cache.set_scales(0, 1.0, 1.0)  # nothing is known of what was stored by other scales
    assert not cache._store.bounds.covered(0).any()


def test_bytes_copies_and_files(rng, tmp_path):
    plain, cache = (
        make(LAYERS, num_blocks=64, block_size=SIZE, alike=alike) for alike in ({}, BOUNDS)
    )
    assert cache.layers_per_block == 1
    of_block = 8 * (2 * 8 + 1 * 16)  # of each shape as many layers as a group has at most
    assert cache.nbytes - plain.nbytes == 64 * of_block
    same = numkv.PagedKVCache(layers=cache.layers, max_nbytes=cache.nbytes, block_size=SIZE)
    assert same.num_blocks == 64
    _, step = filled(rng, np.asarray, cache, LAYERS, [40])
    q = {n: queries(layer, 1) for n, layer in enumerate(LAYERS)}
    cache.commit(step)
    numkv.save(tmp_path / "cache", cache)
    found = []
    for other in (cache, cache.copy(), pickle.loads(pickle.dumps(cache)), numkv.load(tmp_path / "cache")):  # fmt: skip
        assert other.layers == cache.layers
        assert other.nbytes == cache.nbytes
        step = other.reserve([0], 1)
        for number, layer in enumerate(LAYERS):
            if layer.source is None:
                ones = (np.ones((1, layer.heads, dim), F32) for dim in (layer.dim, layer.dim_v))
                step.append(number, *ones)
        found.append([step.sparse_attention(n, q[n], most_blocks=3) for n in q])
    for each in found[1:]:
        for a, b in zip(found[0], each, strict=True):
            assert np.array_equal(a, b)


def test_latents_are_refused():
    with pytest.raises(numkv.NotSupported, match="latents"):
        paged_kv_cache(1, 1, 8, head_dim_v=4, v_kind="latent", num_blocks=2, key_bounds=True)
