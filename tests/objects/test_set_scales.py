"""Scales of fp8 caches: one for each kv head, set while a layer is empty."""

import ml_dtypes
import numpy as np
import pytest
import tolerances
from numba import njit

import numkv

F32 = np.float32

try:
    numkv.ContiguousLayer(1, 1, 8, kind="fp8_e4m3")
except numkv.NotSupported as refused:
    pytestmark = pytest.mark.skip(reason=str(refused))
DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
SCALES = [(0.5, np.array([0.25, 8], F32)), (np.array([4, 0.0625], F32), 2)]  # K and V of two layers
OBJECTS = {
    "contiguous": lambda **options: numkv.ContiguousLayer(8, 2, 16, **options),
    "paged": lambda **options: numkv.PagedLayer(4, 2, 2, 16, **options),
}


def stored(x, scale, kind):
    """Values of rows ``(tokens, heads, dim)`` after a way through storage; powers of two divide exactly."""
    scale = np.broadcast_to(np.asarray(scale, F32), x.shape[1:2])[:, None]
    return (x / scale).astype(DTYPES[kind]).astype(F32) * scale


def rows(rng, n, times=1.0):
    return (times * rng.standard_normal((2, n, 2, 16))).astype(F32)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("max_seq_len", [None, 40])
def test_layers_of_a_cache_have_their_own_scales(target, to, host, rng, kind, max_seq_len):
    """They survive growth, and a copy has the same."""
    cache = numkv.KVCache(2, 2, 16, kind=kind, target=target, max_seq_len=max_seq_len)
    given = [rows(rng, 20, 3.0), rows(rng, 20, 3.0)]
    for layer, (k, v) in enumerate(SCALES):
        cache.set_scales(layer, k, v)
    for part in (slice(0, 1), slice(1, 20)):  # the second time the cache without a bound grows
        for layer, (k, v) in enumerate(given):
            cache.append(layer, to(k[part]), to(v[part]))
    for one in (cache, cache.copy()):
        for layer, (k, v) in enumerate(given):
            assert np.array_equal(host(one.k(layer)), stored(k, SCALES[layer][0], kind))
            assert np.array_equal(host(one.v(layer)), stored(v, SCALES[layer][1], kind))
            want = np.broadcast_to(np.asarray(SCALES[layer][0], F32), 2)
            assert np.array_equal(host(one.k_scales(layer)), want)


def test_a_copy_has_scales_of_its_own(target, to, host):
    cache = numkv.KVCache(1, 2, 16, kind="fp8_e4m3", target=target)
    twin = cache.copy()
    twin.set_scales(0, 2.0)
    assert host(cache.k_scales(0)).tolist() == [1, 1]
    assert host(twin.k_scales(0)).tolist() == [2, 2]
    assert host(twin.v_scales(0)).tolist() == [1, 1]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_attention_is_that_over_the_values(target, to, host, rng, kind, make):
    layer, exact = (make(kind=name, target=target) for name in (kind, "fp32"))
    k, v = rows(rng, 6)
    layer.set_scales(*SCALES[0])
    layer.append(to(k), to(v))
    exact.append(to(stored(k, SCALES[0][0], kind)), to(stored(v, SCALES[0][1], kind)))
    q = to(rng.standard_normal((2, 4, 16)).astype(F32))
    got, want = (host(one.decode_attention(q)) for one in (layer, exact))
    tolerances.assert_rows_close(got, want.astype(np.float64), 1e-3)


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_only_while_the_layer_is_empty(target, to, host, rng, make):
    layer = make(kind="fp8_e4m3", target=target)
    layer.set_scales(k=0.5)
    layer.append(*map(to, rows(rng, 3)))
    before = host(layer.k_scale).copy()
    with pytest.raises(numkv.NumkvError, match="set_scales"):
        layer.set_scales(k=1.0)
    assert np.array_equal(host(layer.k_scale), before)
    layer.truncate(0)
    layer.set_scales(k=1.0)
    assert host(layer.k_scale).tolist() == [1, 1]


def test_only_while_no_layer_uses_the_pool(target, to, rng):
    pool = numkv.PagedPool(4, 2, 2, 16, kind="fp8_e4m3", target=target)
    first, second = (numkv.PagedLayer(2, 2, 2, 16, pool=pool) for _ in range(2))
    first.append(*map(to, rows(rng, 1)))
    for one in (second, pool):
        with pytest.raises(numkv.NumkvError, match="blocks in use"):
            one.set_scales(0.5, 0.5)
    first.free()
    pool.set_scales(0.5, 0.5)


def test_pending_rows_count(target, to, rng):
    cache = numkv.KVCache(2, 2, 16, kind="fp8_e4m3", target=target)
    cache.append(0, *map(to, rows(rng, 1)))
    with pytest.raises(numkv.NumkvError, match="set_scales"):
        cache.set_scales(0, 2.0)
    cache.set_scales(1, 2.0)
    cache.clear()
    cache.set_scales(0, 2.0)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (0.0, ValueError),
        (-1.0, ValueError),
        (np.nan, ValueError),
        (np.inf, ValueError),
        (np.array([1, 0], F32), ValueError),
        (np.ones(3, F32), numkv.DimensionMismatch),
        (np.ones((2, 1), F32), numkv.DimensionMismatch),
        (np.ones(2, np.int8), numkv.UnsupportedDType),
    ],
)
def test_bad_scales_change_nothing(target, host, scale, error):
    cache = numkv.KVCache(1, 2, 16, kind="fp8_e4m3", target=target)
    layer = numkv.ContiguousLayer(4, 2, 16, kind="fp8_e4m3", target=target)
    for call in (lambda **kv: cache.set_scales(0, **kv), layer.set_scales):
        with pytest.raises(error, match="`v`"):
            call(k=2.0, v=scale)
    for scales in (cache.k_scales(0), cache.v_scales(0), layer.k_scale, layer.v_scale):
        assert host(scales).tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_other_kinds_have_no_scales_to_set(target, kind):
    cache = numkv.KVCache(1, 2, 16, kind=kind, target=target)
    layer = numkv.ContiguousLayer(4, 2, 16, kind=kind, target=target)
    with pytest.raises(numkv.NotSupported, match="fp8"):
        cache.set_scales(0, 1.0)
    with pytest.raises(numkv.NotSupported, match="fp8"):
        layer.set_scales(v=1.0)
    mixed = numkv.ContiguousLayer(4, 2, 16, k_kind="fp8_e4m3", v_kind=kind, target=target)
    with pytest.raises(numkv.NotSupported, match="fp8"):
        mixed.set_scales(2.0, 2.0)
    with pytest.raises(IndexError):
        cache.set_scales(1, 1.0)


def test_compaction_shifts_keys_by_the_scales_of_their_layer(target, to, host, rng):
    angles = np.arange(16)[:, None] / 10.0 ** np.arange(8)
    tables = (np.cos(angles).astype(F32), np.sin(angles).astype(F32))
    shift = numkv.rope_shift(*map(to, tables))
    cache = numkv.KVCache(2, 2, 16, kind="fp8_e4m3", target=target)
    layers = []
    for layer, scales in enumerate(SCALES):
        k, v = map(to, rows(rng, 6))
        one = numkv.ContiguousLayer(8, 2, 16, kind="fp8_e4m3", target=target)
        one.set_scales(*scales)
        cache.set_scales(layer, *scales)
        one.append(k, v)
        cache.append(layer, k, v)
        layers.append(one)
    cache.advance(6)
    for one in (cache, *layers):
        one.compact([1, 2, 5], shift)
    for layer, one in enumerate(layers):
        want = host(one.k)[0, :, :3].swapaxes(0, 1).astype(F32) * host(one.k_scale)[:, None]
        assert np.array_equal(host(cache.k(layer)), want)


@njit
def load(cache, layer, position, head, k, v):
    cache.load_k(layer, position, head, k)
    cache.load_v(layer, position, head, v)


@pytest.mark.slow
def test_compiled_code_sees_the_scales_of_each_layer(rng):
    cache = numkv.KVCache(2, 2, 16, kind="fp8_e4m3", max_seq_len=4)
    k, v = rows(rng, 1)
    for layer, scales in enumerate(SCALES):
        cache.set_scales(layer, *scales)
        assert cache.jit.append(layer, k[0], v[0])
        out = np.zeros((2, 16), F32)
        for head in range(2):
            load(cache.jit, layer, 0, head, *out)
            assert np.array_equal(out[0], stored(k, scales[0], "fp8_e4m3")[0, head])
            assert np.array_equal(out[1], stored(v, scales[1], "fp8_e4m3")[0, head])
