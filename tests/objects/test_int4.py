"""Objects that hold INT4: what they refuse, what they give back, and scales that move with their codes."""

import copy

import naive
import numpy as np
import pytest
from layer_lists import paged_kv_cache
from messages import about
from numba import njit
from quantised_stores import Stores, token_major

import numkv
from numkv.files import load_sequences, save_sequences

F32, BF16 = np.float32, naive.DTYPES["bf16"]

STORES = Stores("int4")
in_contiguous, in_paged, assert_exact = STORES.in_contiguous, STORES.in_paged, STORES.assert_exact
every_store = pytest.mark.parametrize("store", STORES.all.values(), ids=STORES.all)


# ---------------------------------------------------------------- what may not be stored


ODD = {
    "ContiguousLayer": lambda **kw: numkv.ContiguousLayer(4, 2, 7, **kw),
    "PagedLayer": lambda **kw: numkv.PagedLayer(4, 2, 2, 7, **kw),
    "PagedPool": lambda **kw: numkv.PagedPool(4, 2, 2, 7, **kw),
    "KVCache": lambda **kw: numkv.KVCache(1, 2, 7, **kw),
    "KVCache, V": lambda **kw: numkv.KVCache(1, 2, 8, head_dim_v=7, **kw),
    "PagedKVCache": lambda **kw: paged_kv_cache(1, 2, 7, num_blocks=4, **kw),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_head_dims(target, make):
    with pytest.raises(numkv.DimensionMismatch, match=r"expected a multiple of 2 for int4.*got 7"):
        make(kind="int4", target=target)
    make(kind="int8", target=target)


@every_store
@pytest.mark.parametrize(
    ("bad", "source"),
    [
        (np.nan, "fp32"),
        (np.inf, "fp32"),
        pytest.param(np.inf, "bf16", marks=pytest.mark.nightly),
        pytest.param(-np.inf, "fp16", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("which", ["k", "v"])
def test_non_finite_input(target, to, host, store, bad, source, which):
    good = np.ones((3, 2, 34)).astype(naive.DTYPES[source])
    rows = good.copy()
    rows[1, 1, 2] = bad
    rows[2, 0, 0] = bad  # the first one is named
    given = (rows, good) if which == "k" else (good, rows)
    if target != "cuda":  # there a later call says it: tests/kernels/test_launches.py
        with pytest.raises(numkv.NonFiniteInput, match=about(which)) as caught:
            store(*given, to, host, target)
        if store not in (in_contiguous, in_paged):  # these come in two parts
            assert caught.value.index == (1, 1, 2)
    got = store(*given, to, host, target, check_finite=False)
    scale = got[1 if which == "k" else 3].astype(F32)
    lost = np.zeros(scale.shape, bool)
    lost[[1, 2], [1, 0], 0] = True  # the group that holds it, and no other
    assert np.array_equal(np.isnan(scale), lost)


def test_a_refused_row_changes_nothing(target, to, host, rng):
    if target == "cuda":
        pytest.skip(
            "there rows are stored as zeros, and a later call says it: tests/kernels/test_launches.py"
        )
    layer = numkv.PagedLayer(3, 2, 1, 4, kind="int4", target=target)
    rows = rng.standard_normal((2, 1, 4), F32)
    layer.append(to(rows), to(rows))

    def state():
        buffers = map(host, (layer.k, layer.v, layer.k_scale, layer.v_scale))
        return [naive.words(x).copy() for x in buffers], layer.seq_len, layer.block_indices

    before = state()
    bad = rng.standard_normal((2, 1, 4), F32)
    bad[1, 0, 3] = np.inf
    with pytest.raises(numkv.NonFiniteInput):
        layer.append(to(rows), to(bad))
    with pytest.raises(numkv.NonFiniteInput):
        layer.write(to(np.tile(bad[:, 0], 3)), num_q_heads=1, qk_mode=0)
    with pytest.raises(numkv.UnsupportedDType, match=about("k")):
        layer.append(to(rows.astype(np.float64)), to(rows))
    after = state()
    assert all(np.array_equal(a, b) for a, b in zip(after[0], before[0], strict=True))
    assert after[1:] == before[1:]


CODES, SCALE = np.ones((4, 2, 5, 20), np.uint8), np.ones((4, 2, 5, 2), BF16)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (None, numkv.DimensionMismatch),
        (SCALE[..., :1].copy(), numkv.DimensionMismatch),
        (SCALE[..., 0].copy(), numkv.DimensionMismatch),
        (SCALE.astype(F32), numkv.UnsupportedDType),
        (naive.words(SCALE), numkv.UnsupportedDType),
    ],
)
def test_scales_that_do_not_fit(target, to, scale, error):
    rows, slots = to(np.ones((1, 2, 40), F32)), to(np.zeros(1, np.int64))
    pools = [to(CODES.copy()) for _ in "kv"]
    with pytest.raises(error, match=r"`v_scale`: expected bfloat16 \(4, 2, 5, 2\).*got"):
        numkv.paged_append(
            rows, rows, *pools, slots, k_scale=to(SCALE.copy()),
            v_scale=None if scale is None else to(scale),
        )  # fmt: skip


# ---------------------------------------------------------------- objects


def test_what_a_cache_gives_back(target, to, host, rng):
    cache = numkv.KVCache(2, 2, 34, head_dim_v=6, kind="int4", target=target)
    k, v = rng.standard_normal((3, 2, 34), F32), rng.standard_normal((3, 2, 6), F32)
    cache.append(1, to(k), to(v))
    assert (cache.layers[0].head_dim, cache.layers[0].head_dim_v, cache.entry_size) == (34, 6, 68)
    for rows, read, codes, scales in (
        (k, cache.k, cache.k_codes, cache.k_scales),
        (v, cache.v, cache.v_codes, cache.v_scales),
    ):
        want, scale = naive.int4_quantise(rows)
        assert host(codes(0)).shape == (0, *want.shape[1:])
        assert np.array_equal(host(codes(1)), want)
        assert np.array_equal(naive.words(host(scales(1))), naive.words(scale))
        assert host(read(1)).dtype == F32
        assert np.array_equal(host(read(1)), naive.int4_dequantise(want, scale).astype(F32))
    assert cache.nbytes == cache.capacity * 2 * numkv.kind("int4").bytes_per_token(2, 34, 6)


def test_growth_copy_and_truncate(target, to, host, rng):
    """Scales move with their codes."""
    cache = numkv.KVCache(2, 1, 4, kind="int4", target=target)
    k, v = (rng.standard_normal((40, 1, 4), F32) for _ in "kv")
    for begin, end in ((0, 5), (5, 16), (16, 33)):
        for layer in (0, 1):
            cache.append(layer, to(k[begin:end]), to(v[begin:end]))
        cache.advance(end - begin)
    twins = [cache.copy(), copy.deepcopy(cache)]
    cache.truncate(3)
    cache.append(0, to(k[33:]), to(v[33:]))
    assert np.array_equal(host(cache.k_codes(0))[3:], naive.int4_quantise(k[33:])[0])
    for twin in twins:
        for layer in (0, 1):
            assert np.array_equal(host(twin.k_codes(layer)), naive.int4_quantise(k[:33])[0])
            scale = host(twin.v_scales(layer))
            assert np.array_equal(naive.words(scale), naive.words(naive.int4_quantise(v[:33])[1]))


@pytest.mark.nightly  # a kernel of its own on the CPU
def test_files_of_mixed_kinds(target, to, host, tmp_path, rng):
    def make(**kw):
        return paged_kv_cache(1, 2, 40, num_blocks=8, block_size=4, target=target, **kw)

    cache = make(k_kind="int8", v_kind="int4")
    seq = cache.add()
    step = cache.reserve([seq], [7])
    step.append(0, *map(to, rng.standard_normal((2, 7, 2, 40)).astype(F32)))
    cache.commit(step)
    q = to(rng.standard_normal((1, 4, 40), F32))
    want = host(cache.decode_attention(0, [seq], q))
    path = tmp_path / "sequence.safetensors"
    save_sequences(path, [cache.swap_out(seq)])
    (loaded,) = load_sequences(path)
    other = make(k_kind="int8", v_kind="int4")
    assert np.array_equal(host(other.decode_attention(0, [other.swap_in(loaded)], q)), want)
    with pytest.raises(numkv.NumkvError):
        make(k_kind="int4", v_kind="int8").swap_in(loaded)


@njit
def append_and_read(cache, k, v, k_out, v_out):
    for t in range(k.shape[0]):
        cache.append(k[t], v[t])
        for h in range(k.shape[1]):
            cache.load_k(t, h, k_out[t, h])
            cache.load_v(t, h, v_out[t, h])


@pytest.mark.nightly
def test_own_compiled_code(rng):
    """What it appends is what the layer would have stored, and is read back as float32."""
    k, v = (rng.standard_normal((5, 2, 74), F32) for _ in "kv")
    layer = numkv.PagedLayer(3, 2, 2, 74, kind="int4")
    layer.seq_len = 5  # takes the blocks
    layer.context_lens[0] = 0
    k_out, v_out = np.empty_like(k), np.empty_like(v)
    append_and_read(layer.jit, k, v, k_out, v_out)
    buffers = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    assert_exact(token_major(buffers, layer.block_table[None], 5), k, v)
    for rows, out in ((k, k_out), (v, v_out)):
        assert np.array_equal(out, naive.int4_dequantise(*naive.int4_quantise(rows)).astype(F32))
