"""`KVCache`: one sequence, all layers."""

import copy
import itertools
import pickle

import naive
import numpy as np
import pytest
import tolerances
from messages import about

import numkv

KINDS = list(naive.DTYPES)


def ones(value, *shape, dtype=np.float32):
    return np.full(shape, value, dtype)


def fill(cache, to, rng, tokens, advance=True):
    """Append random rows to every layer; returns them, per layer, as the kind stores them."""
    of = cache.layers[0]
    num_kv_heads, d_k, d_v = of.num_kv_heads, of.head_dim, of.head_dim_v
    rows = []
    for layer in range(cache.num_layers):
        k = rng.standard_normal((tokens, num_kv_heads, d_k), np.float32)
        v = rng.standard_normal((tokens, num_kv_heads, d_v), np.float32)
        cache.append(layer, to(k), to(v))
        rows.append((naive.round_to(k, of.kind.name), naive.round_to(v, of.kind.name)))
    if advance:
        cache.advance(tokens)
    return rows


# ---------------------------------------------------------------- the reference system's own facts


def test_fresh(target):
    cache = numkv.KVCache(2, 4, 16, target=target)
    assert (len(cache), cache.is_empty, cache.num_layers, cache.entry_size) == (0, True, 2, 64)


def test_append_then_advance(target, to, host):
    cache = numkv.KVCache(2, 4, 16, target=target)
    for layer in (0, 1):
        cache.append(layer, to(ones(1, 64)), to(ones(1, 64)))
    assert (len(cache), cache.is_empty) == (0, True)
    assert host(cache.k(0)).shape == (1, 4, 16)  # the current token's row can be read already
    cache.advance()
    assert (len(cache), cache.is_empty) == (1, False)
    assert host(cache.k(0)).size == host(cache.v(1)).size == 64
    assert np.all(host(cache.v(1)) == 1)


def test_five_tokens(target, to, host):
    cache = numkv.KVCache(1, 2, 8, target=target)
    for t in range(5):
        cache.append(0, to(ones(t, 16)), to(ones(t, 16)))
        cache.advance()
    k = host(cache.k(0)).ravel()
    assert len(cache) == 5
    assert (k.size, k[0], k[64]) == (80, 0, 4)


def test_clear_and_fill_again(target, to, host):
    cache = numkv.KVCache(2, 2, 32, target=target)
    for layer in (0, 1):
        cache.append(layer, to(ones(1, 64)), to(ones(1, 64)))
    cache.advance()
    cache.clear()
    assert (len(cache), cache.is_empty) == (0, True)
    assert [host(x).shape for x in (cache.k(0), cache.v(0), cache.k(1), cache.v(1))] == [
        (0, 2, 32)
    ] * 4
    cache.append(0, to(ones(2, 64)), to(ones(2, 64)))
    assert host(cache.k(0)).size == 64
    assert host(cache.k(0)).ravel()[0] == 2


def test_with_max_seq_len(target):
    cache = numkv.KVCache(16, 8, 64, max_seq_len=2048, kind="bf16", target=target)
    assert (len(cache), cache.is_empty, cache.num_layers, cache.entry_size) == (0, True, 16, 512)


def test_no_layers_is_fine(target):
    assert numkv.KVCache(0, 2, 8, target=target).num_layers == 0


# ---------------------------------------------------------------- what it stores


@pytest.mark.boundscheck
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_seq_len", [None, 9])
def test_rows_come_back(target, to, host, rng, kind, max_seq_len):
    cache = numkv.KVCache(2, 3, 8, kind=kind, target=target, max_seq_len=max_seq_len, head_dim_v=5)
    parts = [fill(cache, to, rng, tokens) for tokens in (1, 4, 0, 2)]
    for layer in range(2):
        for got, which in ((cache.k(layer), 0), (cache.v(layer), 1)):
            want = np.concatenate([part[layer][which] for part in parts])
            assert host(got).dtype == naive.DTYPES[kind]
            assert np.array_equal(naive.words(host(got)), naive.words(want))
    assert len(cache) == 7
    assert cache.entry_size == 24


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_the_kinds_own_dtype_are_copied(target, to, host, rng, kind):
    rows = naive.round_to(rng.standard_normal((2, 2, 4)), kind)
    cache = numkv.KVCache(1, 2, 4, kind=kind, target=target)
    cache.append(0, to(rows), to(rows + rows))
    assert np.array_equal(host(cache.k(0)), rows)
    assert np.array_equal(host(cache.v(0)), rows + rows)


EDGES = [
    0.0, -0.0, 0.1, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, np.inf, -np.inf,
    65504.0, 65519.0, 65520.0, -65536.0, 3.4e38, 3.3961775e38,
    2**-14, 2**-14 - 2**-25, 2**-24 * 1.5, 2**-24 * 2.5, 2**-25, 6e-8, 2.98e-8, 1e-5, -1e-7, 1e-40,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_float32_rows_round_to_nearest_even(target, to, host, rng, kind):
    bits = rng.integers(0, 2**32, 512 - len(EDGES), dtype=np.uint32).view(np.float32)
    rows = np.concatenate([np.array(EDGES, np.float32), bits[: 512 - len(EDGES)]]).reshape(8, 2, 32)
    cache = numkv.KVCache(1, 2, 32, kind=kind, target=target)
    cache.append(0, to(rows), to(rows))
    want = naive.round_to(rows, kind)
    got = host(cache.k(0))
    nan = np.isnan(rows)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(naive.words(got)[~nan], naive.words(want)[~nan])


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_every_nan_stays_a_nan(target, to, host, kind):
    """A payload that lies in the lost bits must not turn the NaN into an infinity."""
    rows = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    cache = numkv.KVCache(1, 1, 4, kind=kind, target=target)
    cache.append(0, to(rows), to(rows))
    assert np.all(np.isnan(host(cache.k(0)).astype(np.float32)))


def test_flat_and_shaped_tokens_are_the_same(target, to, host, rng):
    k, v = rng.standard_normal((2, 4), np.float32), rng.standard_normal((2, 3), np.float32)
    cache = numkv.KVCache(1, 2, 4, head_dim_v=3, target=target)
    cache.append(0, to(k), to(v))
    cache.append(0, to(k.ravel()), to(v.ravel()))
    cache.append(0, to(k[None]), to(v[None]))
    assert np.array_equal(host(cache.k(0)), np.stack([k] * 3))
    assert np.array_equal(host(cache.v(0)), np.stack([v] * 3))


def test_strided_rows(to, host, target, rng):
    wide = rng.standard_normal((5, 4, 12), np.float32)
    cache = numkv.KVCache(1, 2, 4, target=target)
    cache.append(0, to(wide)[::2, 1:3, 4:8], to(wide)[:3, ::2, :4])
    assert np.array_equal(host(cache.k(0)), wide[::2, 1:3, 4:8])
    assert np.array_equal(host(cache.v(0)), wide[:3, ::2, :4])


def test_k_and_v_of_different_kinds(target, to, host, rng):
    cache = numkv.KVCache(1, 2, 4, k_kind="fp32", v_kind="bf16", target=target)
    rows = rng.standard_normal((3, 2, 4), np.float32)
    cache.append(0, to(rows), to(rows))
    assert np.array_equal(host(cache.k(0)), rows)
    assert np.array_equal(host(cache.v(0)), naive.round_to(rows, "bf16"))


# ---------------------------------------------------------------- the length


def test_layers_in_any_order_and_several_times(target, to, host):
    cache = numkv.KVCache(3, 1, 2, target=target)
    for layer, value in ((2, 1), (0, 2), (2, 3), (1, 4), (0, 5)):
        cache.append(layer, to(ones(value, 2)), to(ones(-value, 2)))
    assert [host(cache.k(layer))[:, 0, 0].tolist() for layer in range(3)] == [[2, 5], [4], [1, 3]]
    assert host(cache.v(2))[:, 0, 1].tolist() == [-1, -3]
    cache.advance()  # layer 1 has one row
    with pytest.raises(numkv.NumkvError):
        cache.advance()
    assert len(cache) == 1
    assert len(host(cache.k(0))) == 2


@pytest.mark.parametrize("n", [1, 2, 100])
def test_advance_needs_rows_in_every_layer(target, to, n):
    cache = numkv.KVCache(2, 1, 2, target=target)
    cache.append(0, to(ones(1, n, 1, 2)), to(ones(1, n, 1, 2)))
    with pytest.raises(numkv.NumkvError):
        cache.advance(n)
    assert len(cache) == 0
    cache.append(1, to(ones(1, n, 1, 2)), to(ones(1, n, 1, 2)))
    cache.advance(n)
    assert len(cache) == n


@pytest.mark.parametrize("n", [-1, -100])
def test_advance_never_goes_back(target, to, n):
    cache = numkv.KVCache(1, 1, 2, target=target)
    cache.append(0, to(ones(1, 2)), to(ones(1, 2)))
    cache.advance()
    with pytest.raises((numkv.NumkvError, ValueError)):
        cache.advance(n)
    assert len(cache) == 1


def test_a_step_that_is_never_advanced(target, to, host):
    cache = numkv.KVCache(1, 1, 2, target=target)
    cache.append(0, to(ones(1, 2)), to(ones(1, 2)))
    assert (len(cache), cache.is_empty, len(host(cache.k(0)))) == (0, True, 1)


def test_truncate_drops_pending_rows_too(target, to, host):
    cache = numkv.KVCache(2, 1, 2, target=target)
    for t in range(4):
        for layer in (0, 1):
            cache.append(layer, to(ones(t, 2)), to(ones(t, 2)))
        cache.advance()
    cache.append(0, to(ones(9, 2)), to(ones(9, 2)))
    cache.truncate(4)
    assert [len(host(cache.k(layer))) for layer in (0, 1)] == [4, 4]
    cache.truncate(2)
    assert len(cache) == 2
    assert host(cache.v(1))[:, 0, 0].tolist() == [0, 1]
    cache.append(0, to(ones(7, 2)), to(ones(7, 2)))
    assert host(cache.k(0))[:, 0, 0].tolist() == [0, 1, 7]
    for bad in (-1, 3):
        with pytest.raises((IndexError, ValueError, numkv.NumkvError)):
            cache.truncate(bad)
    assert host(cache.k(0))[:, 0, 0].tolist() == [0, 1, 7]
    cache.truncate(0)
    assert cache.is_empty


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_full(target, to, host, kind):
    cache = numkv.KVCache(1, 1, 2, max_seq_len=3, kind=kind, target=target)
    cache.append(0, to(ones(1, 2, 1, 2)), to(ones(1, 2, 1, 2)))
    with pytest.raises(numkv.CacheFull):
        cache.append(0, to(ones(2, 2, 1, 2)), to(ones(2, 2, 1, 2)))
    assert np.all(host(cache.k(0)) == 1)
    assert len(host(cache.v(0))) == 2
    cache.append(0, to(ones(3, 2)), to(ones(3, 2)))
    with pytest.raises(numkv.CacheFull):
        cache.append(0, to(ones(4, 2)), to(ones(4, 2)))
    cache.advance(3)
    assert host(cache.k(0))[:, 0, 0].astype(np.float32).tolist() == [1, 1, 3]


# ---------------------------------------------------------------- memory


def test_views_share_the_buffer():
    cache = numkv.KVCache(1, 2, 4, kind="bf16", max_seq_len=8)
    cache.append(0, ones(1, 3, 2, 4), ones(1, 3, 2, 4))
    before = cache.k(0)
    assert np.shares_memory(before, cache.k(0))
    before[1] = 5
    assert np.all(cache.k(0)[1].astype(np.float32) == 5)
    cache.append(0, ones(2, 5, 2, 4), ones(2, 5, 2, 4))
    assert np.shares_memory(before, cache.k(0))  # allocated once


def test_growth_is_amortised():
    """A thousand single tokens move the buffer a handful of times."""
    cache, row = numkv.KVCache(1, 2, 4), ones(1, 8)
    addresses = []
    for t in range(1000):
        cache.append(0, row * t, row)
        cache.advance()
        addresses.append(cache.k(0).__array_interface__["data"][0])
    moves = sum(a != b for a, b in itertools.pairwise(addresses))
    assert 1 <= moves <= 20
    assert cache.k(0)[:, 0, 0].tolist() == list(range(1000))


def test_clear_keeps_the_memory():
    cache, rows = numkv.KVCache(1, 2, 4), ones(1, 100, 2, 4)
    cache.append(0, rows, rows)
    before = cache.k(0)
    cache.clear()
    cache.append(0, rows, rows)
    assert np.shares_memory(before, cache.k(0))


@pytest.mark.parametrize("how", [lambda cache: cache.copy(), copy.copy], ids=["method", "copy"])
def test_copies_are_independent(target, to, host, rng, how):
    cache = numkv.KVCache(2, 1, 4, kind="fp16", target=target)
    fill(cache, to, rng, 3)
    cache.append(1, to(ones(5, 4)), to(ones(6, 4)))
    twin = how(cache)
    kept = [host(twin.k(layer)).copy() for layer in (0, 1)]
    cache.truncate(1)
    cache.append(0, to(ones(7, 4)), to(ones(7, 4)))
    assert len(twin) == 3
    for layer in (0, 1):
        assert np.array_equal(host(twin.k(layer)), kept[layer])
    assert len(kept[1]) == 4
    twin.append(0, to(ones(8, 4)), to(ones(8, 4)))
    twin.advance()
    assert (len(twin), len(cache)) == (4, 1)
    assert host(cache.k(0))[:, 0, 0].astype(np.float32).tolist()[1] == 7


def test_a_pickle_keeps_the_scales_of_every_layer():
    cache = numkv.KVCache(3, 2, 4, kind="fp8_e4m3")
    for layer, scale in enumerate((0.5, 2.0, 4.0)):
        cache.set_scales(layer, k=np.array([scale, 1], np.float32), v=scale / 8)
    other = pickle.loads(pickle.dumps(cache))
    for layer, scale in enumerate((0.5, 2.0, 4.0)):
        made = other.arrays(layer)
        assert made.k_scale.tolist() == [scale, 1]
        assert made.v_scale.tolist() == [scale / 8] * 2


def test_repr_says_what_it_is(target):
    text = repr(numkv.KVCache(3, 5, 16, kind="bf16", target=target))
    assert text.startswith(("KVCache(", "<KVCache"))
    for part in ("3", "5", "16", "bf16", target):
        assert part in text


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("kind", KINDS)
def test_decode_attention(target, to, host, rng, kind):
    cache = numkv.KVCache(2, 2, 8, kind=kind, head_dim_v=6, target=target)
    fill(cache, to, rng, 5)
    fill(cache, to, rng, 2, advance=False)  # attended to as well
    k, v = (host(x).swapaxes(0, 1)[None] for x in (cache.k(1), cache.v(1)))
    for tokens in (1, 3, 7):
        q = rng.standard_normal((tokens, 4, 8), np.float32)
        out, lse = cache.decode_attention(1, to(q), return_lse=True)
        want, want_lse = naive.attention(q, k, v, [7], [0, tokens])
        tolerances.assert_rows_close(host(out), want, tolerances.attention(kind, "fp32"))
        tolerances.assert_lse_close(host(lse), want_lse)
        assert host(out).dtype == np.float32
    one = host(cache.decode_attention(1, to(q[-1])))
    assert one.shape == (4, 6)
    tolerances.assert_rows_close(one, want[-1], tolerances.attention(kind, "fp32"))


def test_decode_attention_options(target, to, host, rng):
    cache = numkv.KVCache(1, 1, 8, target=target)
    fill(cache, to, rng, 9)
    k, v = (host(x).swapaxes(0, 1)[None] for x in (cache.k(0), cache.v(0)))
    q = rng.standard_normal((2, 3, 8), np.float32)
    sinks = rng.standard_normal(3).astype(np.float32)
    options = {"sm_scale": 0.3, "logits_soft_cap": 2.0, "window_left": 3}
    out = cache.decode_attention(0, to(q), sinks=to(sinks), **options)
    want, _ = naive.attention(q, k, v, [9], [0, 2], sinks=sinks, **options)
    tolerances.assert_rows_close(host(out), want, 1e-5)


def test_decode_attention_of_an_empty_layer(target, to, host):
    cache = numkv.KVCache(1, 2, 4, target=target)
    out, lse = cache.decode_attention(0, to(ones(1, 4, 4)), return_lse=True)
    assert np.all(host(out) == 0)
    assert np.all(host(lse) == -np.inf)
    with pytest.raises(numkv.DimensionMismatch, match="q"):
        cache.decode_attention(0, to(ones(1, 2, 4, 4)))


# ---------------------------------------------------------------- bad calls


@pytest.mark.parametrize("layer", [-1, 2, 100])
def test_layer_out_of_range(target, to, layer):
    cache = numkv.KVCache(2, 1, 2, target=target)
    rows = to(ones(1, 2))
    for call in (
        lambda: cache.append(layer, rows, rows),
        lambda: cache.k(layer),
        lambda: cache.v(layer),
        lambda: cache.decode_attention(layer, to(ones(1, 1, 2))),
    ):
        with pytest.raises(IndexError, match="layer"):
            call()


@pytest.mark.parametrize(
    ("name", "k", "v", "error"),
    [
        ("k", ones(1, 9), ones(1, 8), numkv.DimensionMismatch),
        ("k", ones(1, 4, 2), ones(1, 2, 4), numkv.DimensionMismatch),
        ("v", ones(1, 2, 4), ones(1, 7), numkv.DimensionMismatch),
        ("v", ones(1, 3, 2, 4), ones(1, 2, 2, 4), numkv.DimensionMismatch),
        ("k", ones(1, 1, 1, 2, 4), ones(1, 2, 4), numkv.DimensionMismatch),
        ("k", ones(1, 8, dtype=np.float64), ones(1, 8), numkv.UnsupportedDType),
        ("v", ones(1, 8), ones(1, 8, dtype=np.int32), numkv.UnsupportedDType),
        ("k", ones(1, 8, dtype=np.float16), ones(1, 8), numkv.UnsupportedDType),
    ],
)
def test_bad_rows_leave_the_cache_as_it_was(target, to, host, rng, name, k, v, error):
    cache = numkv.KVCache(2, 2, 4, target=target)
    fill(cache, to, rng, 2)
    before = host(cache.k(1)).copy(), host(cache.v(1)).copy()
    with pytest.raises(error, match=about(name)):
        cache.append(1, to(k), to(v))
    assert np.array_equal(host(cache.k(1)), before[0])
    assert np.array_equal(host(cache.v(1)), before[1])
    assert len(cache) == 2


@pytest.mark.parametrize(
    "sizes", [(-1, 2, 4), (1, -2, 4), (1, 2, -4)], ids=["layers", "heads", "head_dim"]
)
def test_negative_sizes(sizes):
    with pytest.raises((numkv.NumkvError, ValueError)):
        numkv.KVCache(*sizes)
