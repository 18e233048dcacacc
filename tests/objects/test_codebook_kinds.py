"""Objects that hold codes of codebooks: what they refuse and give back, and scales that move with their codes."""

import copy

import naive
import numpy as np
import pytest
import tolerances
from messages import about
from numba import njit

import numkv

F32 = np.float32
VALUES = naive.dequantise
#: By kind, dims of K's rows and V's.
DIMS = {"code4": (34, 6), "code6": (40, 8)}
each_kind = pytest.mark.parametrize("kind", list(DIMS))


def stored(x, kind="code4"):
    return naive.quantise(x, kind)


on_the_cpu_by_night = pytest.mark.parametrize(
    "target", [pytest.param("cpu", marks=pytest.mark.nightly), "cuda"], indirect=True
)


def test_dims_of_no_whole_words(target):
    with pytest.raises(numkv.DimensionMismatch, match=r"expected a multiple of 2 for code4.*got 7"):
        numkv.KVCache(1, 2, 7, kind="code4", target=target)
    with pytest.raises(
        numkv.DimensionMismatch, match=r"multiple of 8 for code6.* into 6 bytes, got 12"
    ):
        numkv.KVCache(1, 2, 12, kind="code6", target=target)


@each_kind
@pytest.mark.parametrize("rotate", [False, True])
def test_what_a_cache_gives_back(target, to, host, rng, rotate, kind):
    (dim, dim_v), kw = DIMS[kind], {"kind": kind, "target": target, "rotate": rotate}
    cache = numkv.KVCache(2, 2, dim, head_dim_v=dim_v, **kw)
    k, v = rng.standard_normal((3, 2, dim), F32), rng.standard_normal((3, 2, dim_v), F32)
    cache.append(1, to(k), to(v))
    assert (cache.layers[0].head_dim, cache.layers[0].head_dim_v, cache.entry_size) == (
        dim,
        dim_v,
        2 * dim,
    )
    for rows, read, codes, scales in (
        (k, cache.k, cache.k_codes, cache.k_scales),
        (v, cache.v, cache.v_codes, cache.v_scales),
    ):
        assert host(codes(0)).shape == (0, *stored(rows, kind)[0].shape[1:])
        if rotate:
            error = np.linalg.norm(host(read(1)) - rows) / np.linalg.norm(rows)
            assert error < 0.12
            continue
        want, scale = stored(rows, kind)
        assert np.array_equal(host(codes(1)), want)
        assert np.array_equal(host(scales(1)), scale)
        assert host(read(1)).dtype == F32
        assert np.array_equal(host(read(1)), VALUES(want, scale).astype(F32))
    assert cache.nbytes == cache.capacity * 2 * numkv.kind(kind).bytes_per_token(2, dim, dim_v)
    q = rng.standard_normal((4, dim)).astype(F32)
    values = [
        host(x)[:, :, :].swapaxes(0, 1)[None].astype(np.float64) for x in (cache.k(1), cache.v(1))
    ]
    want, _ = naive.attention(q[None], *values, [3])
    got = host(cache.decode_attention(1, to(q)))
    tolerances.assert_rows_close(got[None], want, tolerances.INTEGERS)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_rows_that_are_not_finite(target, to, host, bad):
    rows = np.ones((3, 1, 4), F32)
    rows[1, 0, 2] = bad
    cache = numkv.KVCache(1, 1, 4, kind="code4", target=target)
    if target != "cuda":  # there a later call says it
        with pytest.raises(numkv.NonFiniteInput, match=about("k")):
            cache.append(0, to(rows), to(np.ones_like(rows)))
    cache.append(0, to(rows), to(rows), check_finite=False)
    assert np.isnan(host(cache.k_scales(0))[:, 0]).tolist() == [False, True, False]


def test_growth_copy_and_truncate(target, to, host, rng):
    """Scales move with their codes."""
    cache = numkv.KVCache(1, 1, 4, kind="code4", target=target)
    k, v = (rng.standard_normal((40, 1, 4), F32) for _ in "kv")
    for begin, end in ((0, 5), (5, 16), (16, 33)):
        cache.append(0, to(k[begin:end]), to(v[begin:end]))
        cache.advance(end - begin)
    twins = [cache.copy(), copy.deepcopy(cache)]
    cache.truncate(3)
    cache.append(0, to(k[33:]), to(v[33:]))
    assert np.array_equal(host(cache.k_codes(0))[3:], stored(k[33:])[0])
    for twin in twins:
        assert np.array_equal(host(twin.k_codes(0)), stored(k[:33])[0])
        assert np.array_equal(host(twin.v_scales(0)), stored(v[:33])[1])


@each_kind
def test_files(target, to, host, rng, tmp_path, kind):
    cache = numkv.KVCache(1, 2, DIMS[kind][0], kind=kind, target=target)
    rows = rng.standard_normal((5, 2, DIMS[kind][0]), F32)
    cache.append(0, to(rows), to(rows))
    cache.advance(5)
    numkv.save(tmp_path / "cache.numkv", cache)
    loaded = numkv.load(tmp_path / "cache.numkv", target=target)
    assert loaded.layers[0].kind is numkv.kind(kind)
    assert np.array_equal(host(loaded.k_codes(0)), stored(rows, kind)[0])
    assert np.array_equal(host(loaded.v_scales(0)), stored(rows, kind)[1])


@njit
def append_and_read(cache, k, v, k_out, v_out):
    for t in range(k.shape[0]):
        cache.append(k[t], v[t])
        for h in range(k.shape[1]):
            cache.load_k(t, h, k_out[t, h])
            cache.load_v(t, h, v_out[t, h])


@each_kind
@pytest.mark.nightly
def test_own_compiled_code(rng, kind):
    """What it appends is what the layer would have stored, and is read back as float32."""
    k, v = (rng.standard_normal((5, 2, 72), F32) for _ in "kv")
    layer = numkv.PagedLayer(3, 2, 2, 72, kind=kind)
    layer.seq_len = 5  # takes the blocks
    layer.context_lens[0] = 0
    k_out, v_out = np.empty_like(k), np.empty_like(v)
    append_and_read(layer.jit, k, v, k_out, v_out)
    for rows, out in ((k, k_out), (v, v_out)):
        assert np.array_equal(out, VALUES(*stored(rows, kind)).astype(F32))
