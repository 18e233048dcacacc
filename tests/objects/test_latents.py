"""Caches of latents: rows of which V is the first part, written in one pass, read by absorbed queries."""

import copy
import pickle

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache

import numkv

WIDTH, ROTARY, DIM, Q_HEADS, SCALE = 32, 8, 40, 6, 0.21
KINDS = ["fp32", "bf16", "int8", "int4", "fp8_e4m3"]
LATENT = {"head_dim_v": WIDTH, "v_kind": "latent"}


def make(which, kind, target="cpu", capacity=24, **options):
    """A layer by name."""
    if which == "contiguous":
        return numkv.ContiguousLayer(
            capacity, 1, DIM, kind=kind, target=target, **LATENT, **options
        )
    return numkv.PagedLayer(capacity // 4, 4, 1, DIM, kind=kind, target=target, **LATENT, **options)


def paged_cache(kind, target="cpu", layers=2, num_blocks=16, **options):
    return paged_kv_cache(
        layers, 1, DIM, num_blocks=num_blocks, block_size=4, kind=kind, target=target, **LATENT, **options
    )  # fmt: skip


def new_rows(rng, n):
    return rng.standard_normal((n, 1, DIM)).astype(np.float32)


def as_stored(x, kind):
    """Rows as a cache of a kind gives them back, in float64."""
    if kind in naive.CODES:
        return naive.dequantise(*naive.quantise(x, kind))
    dtype = numkv.kind(kind).dtype
    return x.astype(np.float32).astype(dtype).astype(np.float64)


def check_attention(got, q, stored, kind):
    """An output and its lse beside the oracle's over what is stored."""
    out, lse = got
    want, want_lse = naive.latent_attention(q, stored[:, 0], WIDTH, SCALE)
    of = kind if kind in naive.CODES or kind in naive.DTYPES else "bf16"
    tolerances.assert_rows_close(out, want, tolerances.attention(of, "fp32"))
    tolerances.assert_lse_close(lse, want_lse, 2e-3 if kind in naive.CODES else tolerances.LSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["contiguous", "paged"])
def test_append_and_absorbed_decode(target, to, host, rng, which, kind):
    """One query, and several, over rows that were appended in two calls."""
    layer = make(which, kind, target)
    x = new_rows(rng, 11)
    layer.append(to(x[:10]))
    layer.append(to(x[10:]))
    assert layer.seq_len == 11
    for queries in (1, 3):
        q = rng.standard_normal((queries, Q_HEADS, DIM)).astype(np.float32)
        got = layer.decode_attention(to(q), sm_scale=SCALE, return_lse=True)
        assert got[0].shape == (queries, Q_HEADS, WIDTH)
        check_attention([host(part) for part in got], q, as_stored(x, kind), kind)
    layer.check()


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_a_row_is_stored_once(kind):
    """V is memory of K's, and no byte is there for it alone."""
    for layer in (make("contiguous", kind), make("paged", kind)):
        plain = numkv.ContiguousLayer(24, 1, DIM, kind=kind, head_dim_v=2)
        per_row = {"fp32": 4 * DIM, "int8": DIM + 4, "int4": DIM // 2 + 2 * 2}[kind]
        assert layer.nbytes == 24 * per_row < plain.nbytes
        assert np.shares_memory(layer.k, layer.v)
        if kind != "fp32":
            assert np.shares_memory(layer.k_scale, layer.v_scale)
        assert "latent" in repr(layer)
    cache = paged_cache(kind)
    assert cache.nbytes == 2 * 64 * per_row
    of = cache.layers[0]
    assert (of.head_dim, of.head_dim_v, of.v_kind) == (DIM, WIDTH, "latent")


MODES = [numkv.QKMode.COPY, numkv.QKMode.HALF_SPLIT, numkv.QKMode.NORM_INTERLEAVED]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind", ["fp32", "bf16", "int8", pytest.param("int4", marks=pytest.mark.nightly)]
)
def test_write_in_one_pass(target, to, host, rng, kind, mode):
    """Norm of the latent alone, RoPE of the last elements alone, at each token's own position."""
    cos, sin = naive.rope_tables(40, ROTARY)
    weight = (1 + 0.1 * rng.standard_normal(WIDTH)).astype(np.float32)
    options = {"qk_mode": mode, "norm_weight": to(weight), "cos": to(cos), "sin": to(sin)}
    layers, x = [make(which, kind, target) for which in ("contiguous", "paged")], new_rows(rng, 9)
    for layer in layers:
        layer.write_latents(to(x[:5]), eps=1e-5, **options)
        layer.write_latents(to(x[5:]), eps=1e-5, pos_offset=20, **options)
    positions = [*range(5), *range(20, 24)]
    want = naive.latent_rows(x, WIDTH, mode, cos, sin, weight, 1e-5, positions)
    q = rng.standard_normal((1, Q_HEADS, DIM)).astype(np.float32)
    out = [host(layer.decode_attention(to(q), sm_scale=SCALE)) for layer in layers]
    got = host(layers[0].k)[0, 0, :9]
    assert np.array_equal(
        host(layers[1].k).reshape(-1, got.shape[1])[:9].view(np.uint8), got.view(np.uint8)
    )
    if kind in naive.CODES:  # of codes one may be the neighbour's where a float lies between them
        scale = host(layers[0].k_scale)[0, 0, :9]
        got = naive.dequantise(got, scale)
        step = (
            scale.astype(np.float64).max()
            if kind == "int8"
            else scale.astype(np.float64).max() * 1.5
        )
        assert np.abs(got - want[:, 0]).max() <= step * 0.51
    else:
        tolerances.assert_rotated_close(got.astype(np.float64), want[:, 0], kind)
    check, _ = naive.latent_attention(q, got, WIDTH, SCALE)
    for each in out:
        tolerances.assert_rows_close(each, check, tolerances.attention(kind, "fp32"))


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_steps_of_a_paged_cache(target, to, host, rng, kind):
    """Ragged steps, a fork that parts, a truncation, a compaction: rows of each sequence are its own."""
    cache, cos, sin = paged_cache(kind, target), *naive.rope_tables(40, ROTARY)
    weight = np.ones(WIDTH, np.float32)
    kept = {cache.add(): np.empty((0, 1, DIM)) for _ in range(2)}
    a, b = kept

    def grow(seqs, lens):
        step, x = cache.reserve(seqs, lens), new_rows(rng, sum(lens))
        step.append(0, to(x))
        step.write_latents(
            1, to(x), qk_mode=4, cos=to(cos), sin=to(sin), norm_weight=to(weight), eps=1e-6
        )
        q = rng.standard_normal((sum(lens), Q_HEADS, DIM)).astype(np.float32)
        outs = [
            [host(y) for y in step.attention(i, to(q), sm_scale=SCALE, return_lse=True)]
            for i in (0, 1)
        ]
        first = 0
        for seq, n in zip(seqs, lens, strict=True):
            part = slice(first, first + n)
            kept[seq] = np.concatenate([kept[seq], as_stored(x[part], kind)])
            check_attention([y[part] for y in outs[0]], q[part], kept[seq], kind)
            first += n
        cache.commit(step)
        return x, q, outs

    x, q, outs = grow([a, b], [5, 3])
    rows = naive.latent_rows(x[:5], WIDTH, 4, cos, sin, weight, 1e-6, range(5))
    check_attention([y[:5] for y in outs[1]], q[:5], as_stored(rows.astype(np.float32), kind), kind)
    c = cache.fork(a)
    kept[c] = kept[a].copy()
    grow([c, b], [2, 1])
    grow([a], [1])
    cache.truncate(c, 4)
    kept[c] = kept[c][:4]
    grow([c], [3])
    cache.compact(b, [0, 2, 3])
    kept[b] = kept[b][[0, 2, 3]]
    grow([b, a], [1, 2])
    swapped = cache.swap_out(b)
    assert swapped.nbytes < 2 * 4 * (DIM * 4 + 4)
    cache.remove(b)
    kept[cache.swap_in(swapped)] = kept.pop(b)
    grow(cache.sequences, [1] * 3)
    cache.check()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_pickles_and_files(tmp_path, kind, rng):
    """Copies have memory of their own; V lies in K's there too."""
    q = rng.standard_normal((2, Q_HEADS, DIM)).astype(np.float32)
    for which in ("contiguous", "paged"):
        layer = make(which, kind)
        if kind.startswith("fp8"):
            layer.set_scales(0.5)
        layer.append(new_rows(rng, 6))
        want = layer.decode_attention(q, sm_scale=SCALE)
        numkv.save(tmp_path / which, layer)
        copies = [copy.copy(layer), pickle.loads(pickle.dumps(layer)), numkv.load(tmp_path / which)]
        layer.truncate(2)
        layer.append(new_rows(rng, 4))
        for other in copies:
            assert np.array_equal(other.decode_attention(q, sm_scale=SCALE), want)
            assert np.shares_memory(other.k, other.v)
            assert other.nbytes == layer.nbytes
            assert not np.shares_memory(other.k, layer.k)
            other.append(new_rows(rng, 3))
            other.check()


@pytest.mark.parametrize("kind", ["fp32", "int8", "fp8_e4m3"])
def test_paged_caches_in_files_and_stores(tmp_path, kind, rng):
    cache, tokens = paged_cache(kind), np.arange(9)
    if kind.startswith("fp8"):
        cache.set_scales(1, 0.25)
    seq = cache.add()
    step = cache.reserve([seq], 9)
    for layer in (0, 1):
        step.append(layer, new_rows(rng, 9))
    cache.commit(step, token_ids=tokens)
    q = rng.standard_normal((1, Q_HEADS, DIM)).astype(np.float32)
    want = cache.decode_attention(1, [seq], q, sm_scale=SCALE)
    numkv.save(tmp_path / "cache", cache)
    others = [cache.copy(), pickle.loads(pickle.dumps(cache)), numkv.load(tmp_path / "cache")]
    for other in others:
        assert np.array_equal(other.decode_attention(1, [seq], q, sm_scale=SCALE), want)
        assert other.cached_len(other.add(tokens)) == 8
        assert other.nbytes == cache.nbytes
        other.check()
    numkv.files.save_sequences(tmp_path / "seqs", [cache.swap_out(seq)])
    back = cache.swap_in(numkv.files.load_sequences(tmp_path / "seqs")[0])
    assert np.array_equal(cache.decode_attention(1, [back], q, sm_scale=SCALE), want)


def test_nan_of_tokens_that_nobody_sees_stays_there(rng):
    """Rows past the length, and those of later tokens, leak into no result."""
    layer = make("contiguous", "fp32")
    layer.append(new_rows(rng, 8))
    q = rng.standard_normal((2, Q_HEADS, DIM)).astype(np.float32)
    want = layer.decode_attention(q, sm_scale=SCALE)
    layer.k[0, 0, 8:] = np.nan
    assert np.array_equal(layer.decode_attention(q, sm_scale=SCALE), want)
    layer.k[0, 0, 7] = np.nan
    got = layer.decode_attention(q, sm_scale=SCALE)
    assert np.array_equal(got[0], want[0])
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_that_are_not_finite(target, to, rng, kind):
    """They are refused: on the CPU at once, on CUDA by a later call."""
    layer, x = make("contiguous", kind, target), new_rows(rng, 3)
    layer.append(to(x))
    x[1, 0, DIM - 1] = np.nan
    for write in (layer.append, lambda rows: layer.write_latents(rows, qk_mode=0)):
        with pytest.raises(numkv.NonFiniteInput, match="NaN or infinity") as raised:
            write(to(x))
            layer.check()
        assert raised.value.index == (1, 0, DIM - 1)
        layer.truncate(3)
        layer.check()


REFUSED = {
    "rows of V": lambda layer, x: layer.append(x, x[..., :WIDTH]),
    "projections of q, k and v": lambda layer, x: layer.write(x[:, 0], num_q_heads=0, qk_mode=0),
    "bound calls": lambda layer, x: layer.bind(4),
    "jit views": lambda layer, x: layer.jit,
    "shifted keys": lambda layer, x: layer.compact(
        [1], numkv.rope_shift(*naive.rope_tables(8, ROTARY))
    ),
    "scales of V": lambda layer, x: layer.set_scales(v=1.0),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_latents_refuse_by_name(what, rng):
    layer, x = make("contiguous", "fp8_e4m3"), new_rows(rng, 2)
    layer.append(x)
    before = layer.k.tobytes()
    layer.truncate(0) if what == "scales of V" else None
    with pytest.raises(numkv.NotSupported, match="latents"):
        REFUSED[what](layer, x)
    assert layer.k.tobytes() == before


def test_arguments_that_do_not_fit(rng):
    x, options = new_rows(rng, 2), {"kind": "int8", "v_kind": "latent"}
    for more in ({"rotate": True}, {"full_precision": numkv.FullPrecision(2)}):
        with pytest.raises(numkv.NotSupported, match="latents"):
            numkv.ContiguousLayer(4, 1, DIM, head_dim_v=WIDTH, **options, **more)
    with pytest.raises(numkv.DimensionMismatch, match="head_dim_v"):
        numkv.ContiguousLayer(4, 1, DIM, head_dim_v=DIM + 1, **options)
    with pytest.raises(numkv.UnsupportedDType, match="latent"):
        numkv.KVCache(1, 1, DIM, **options)
    plain = numkv.ContiguousLayer(4, 1, DIM)
    with pytest.raises(numkv.NotSupported, match="latent"):
        plain.write_latents(x, qk_mode=0)
    layer = make("contiguous", "fp32")
    cos, sin = naive.rope_tables(4, ROTARY)
    with pytest.raises(numkv.DimensionMismatch, match="norm_weight"):
        layer.write_latents(x, qk_mode=1, cos=cos, sin=sin)
    with pytest.raises(numkv.DimensionMismatch, match="columns"):
        layer.write_latents(
            x, qk_mode=2, cos=np.ones((4, 8), np.float32), sin=np.ones((4, 8), np.float32)
        )
    with pytest.raises(IndexError, match="position"):
        layer.write_latents(x, qk_mode=2, cos=cos, sin=sin, pos_offset=3)
    with pytest.raises(numkv.CacheFull):
        layer.write_latents(new_rows(rng, 25), qk_mode=0)
    assert layer.seq_len == 0
    pool = numkv.PagedPool(4, 4, 1, DIM, kind="fp32", **LATENT)
    shared = numkv.PagedLayer(4, 4, 1, DIM, pool=pool, **LATENT)
    shared.append(x)
    with pytest.raises(numkv.DimensionMismatch, match="v_kind"):
        numkv.PagedLayer(4, 4, 1, DIM, pool=pool, v_kind="fp32")
    with pytest.raises(numkv.DimensionMismatch, match="v_kind"):
        numkv.PagedLayer(4, 4, 1, 8, pool=numkv.PagedPool(4, 4, 1, 8), v_kind="latent")


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_results_do_not_depend_on_the_batch(rng, kind):
    """A sequence alone, and among others: the same bits, of as many query heads as models have."""
    cache = paged_kv_cache(1, 1, DIM, num_blocks=512, block_size=16, kind=kind, **LATENT)
    lens = [1300, 40, 700]
    seqs = [cache.add() for _ in lens]
    step = cache.reserve(seqs, lens)
    step.append(0, new_rows(rng, sum(lens)))
    cache.commit(step)
    q = rng.standard_normal((3, 128, DIM)).astype(np.float32)
    together = cache.decode_attention(0, seqs, q, sm_scale=SCALE)
    for i, seq in enumerate(seqs):
        with numkv.num_threads(1):
            alone = cache.decode_attention(0, [seq], q[i : i + 1], sm_scale=SCALE)
        assert np.array_equal(alone[0], together[i])
