"""Objects that hold INT8: what they refuse, what they give back, and scales that move with their codes."""

import copy

import naive
import numpy as np
import pytest
from messages import about
from quantised_stores import Stores

import numkv

F32 = np.float32

STORES = Stores("int8")
in_contiguous, in_paged, assert_exact = STORES.in_contiguous, STORES.in_paged, STORES.assert_exact
every_store = pytest.mark.parametrize("store", STORES.all.values(), ids=STORES.all)


# ---------------------------------------------------------------- what may not be stored


@every_store
@pytest.mark.parametrize(
    ("bad", "source"),
    [
        (np.nan, "fp32"),
        (-np.inf, "fp32"),
        pytest.param(np.inf, "bf16", marks=pytest.mark.nightly),
        pytest.param(-np.inf, "fp16", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("which", ["k", "v"])
def test_non_finite_input(target, to, host, store, bad, source, which):
    good = np.ones((3, 2, 4)).astype(naive.DTYPES[source])
    rows = good.copy()
    rows[1, 1, 2] = bad
    rows[2, 0, 0] = bad  # the first one is named
    given = (rows, good) if which == "k" else (good, rows)
    if target != "cuda":  # there a later call says it: tests/kernels/test_launches.py
        with pytest.raises(numkv.NonFiniteInput, match=about(which)) as caught:
            store(*given, to, host, target)
        if store not in (in_contiguous, in_paged):  # these come in two parts
            assert caught.value.index == (1, 1, 2)
    store(*given, to, host, target, check_finite=False)


def snapshot(*arrays):
    return [np.array(x) for x in arrays]


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("how", ["append", "write"])
def test_a_refused_row_changes_nothing(target, to, host, rng, kind, how):
    if target == "cuda":
        pytest.skip(
            "there rows are stored as zeros, and a later call says it: tests/kernels/test_launches.py"
        )
    layer = numkv.ContiguousLayer(6, 1, 4, kind="int8", target=target)
    if kind == "paged":
        layer = numkv.PagedLayer(3, 2, 1, 4, kind="int8", target=target)
    rows = rng.standard_normal((2, 1, 4), F32)
    layer.append(to(rows), to(rows))

    def state():
        return snapshot(
            *map(host, (layer.k, layer.v, layer.k_scale, layer.v_scale)),
            layer.context_lens, layer.block_indices,
        )  # fmt: skip

    before = state()
    bad = rng.standard_normal((2, 1, 4), F32)
    bad[1, 0, 3] = np.inf
    with pytest.raises(numkv.NonFiniteInput) as caught:
        if how == "append":
            layer.append(to(rows), to(bad))
        else:
            layer.write(to(np.tile(bad[:, 0], 3)), num_q_heads=1, qk_mode=0)
    assert caught.value.index == ((1, 0, 3) if how == "append" else (1, 7))
    assert all(np.array_equal(a, b) for a, b in zip(state(), before, strict=True))
    layer.append(to(rows), to(bad), check_finite=False)
    assert layer.seq_len == 4


def test_float_kinds_take_anything(target, to, host):
    layer = numkv.PagedLayer(2, 2, 1, 2, kind="fp16", v_kind="int8", target=target)
    k, v = np.full((1, 1, 2), np.nan, F32), np.ones((1, 1, 2), F32)
    layer.append(to(k), to(v))
    assert np.all(np.isnan(host(layer.k)[layer.block_indices[0], 0, 0]))
    with pytest.raises(numkv.NonFiniteInput, match=about("v")):
        layer.append(to(v), to(k))
        layer.check()  # on CUDA the kernel finds it


def test_float64_rows_are_refused(target, to):
    rows = to(np.ones((1, 1, 4)))
    layer = numkv.PagedLayer(2, 2, 1, 4, kind="int8", target=target)
    with pytest.raises(numkv.UnsupportedDType, match=about("k")):
        layer.append(rows, rows)
    assert layer.block_indices == []


# ---------------------------------------------------------------- KVCache


def test_what_a_cache_gives_back(target, to, host, rng):
    cache = numkv.KVCache(2, 2, 4, head_dim_v=6, kind="int8", target=target)
    k, v = rng.standard_normal((3, 2, 4), F32), rng.standard_normal((3, 2, 6), F32)
    cache.append(1, to(k), to(v))
    for rows, read, codes, scales in (
        (k, cache.k, cache.k_codes, cache.k_scales),
        (v, cache.v, cache.v_codes, cache.v_scales),
    ):
        want, scale = naive.int8_quantise(rows)
        assert host(codes(0)).shape == (0, *rows.shape[1:])
        assert np.array_equal(host(codes(1)), want)
        assert np.array_equal(host(scales(1)), scale)
        assert host(read(1)).dtype == F32
        assert np.array_equal(host(read(1)), want.astype(F32) * scale[..., None])
        for bad in (-1, 2):
            for method in (read, codes, scales):
                with pytest.raises(IndexError, match="layer"):
                    method(bad)
    assert cache.nbytes == cache.capacity * 2 * numkv.kind("int8").bytes_per_token(2, 4, 6)


def test_float_caches_have_no_codes(target):
    cache = numkv.KVCache(1, 1, 2, kind="fp16", v_kind="int8", target=target)
    for method in (cache.k_codes, cache.k_scales):
        with pytest.raises(numkv.NotSupported):
            method(0)
    cache.v_codes(0), cache.v_scales(0)


def test_growth_copy_and_truncate(target, to, host, rng):
    """Scales move with their codes."""
    cache = numkv.KVCache(2, 1, 4, kind="int8", target=target)
    k, v = (rng.standard_normal((40, 1, 4), F32) for _ in "kv")
    for begin, end in ((0, 5), (5, 16), (16, 33)):
        for layer in (0, 1):
            cache.append(layer, to(k[begin:end]), to(v[begin:end]))
        cache.advance(end - begin)
    assert cache.capacity >= 33
    twins = [cache.copy(), copy.copy(cache), copy.deepcopy(cache)]
    cache.truncate(3)
    cache.append(0, to(k[33:]), to(v[33:]))
    assert np.array_equal(host(cache.k_codes(0))[3:], naive.int8_quantise(k[33:])[0])
    for twin in twins:
        for layer in (0, 1):
            assert np.array_equal(host(twin.k_codes(layer)), naive.int8_quantise(k[:33])[0])
            assert np.array_equal(host(twin.v_scales(layer)), naive.int8_quantise(v[:33])[1])
