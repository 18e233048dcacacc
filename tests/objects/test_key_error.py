"""`key_error`: how far quantised keys move scores, estimated from their scales, beside how far they do."""

import math

import numpy as np
import outlier_keys
import pytest

import numkv

HEADS, Q_HEADS, DIM, TOKENS = 2, 4, 64, 192


def rows_of(rows, rng):
    k, v = rng.standard_normal((2, TOKENS, HEADS, DIM))
    if rows == "outliers":
        k[..., [3, 35]] *= 30
    elif rows == "tails":
        k = rng.standard_t(3, k.shape)
    return (
        k.astype(np.float32),
        v.astype(np.float32),
        rng.standard_normal((5, Q_HEADS, DIM), np.float32),
    )


def actual(stored, exact, q, first=0):
    """Root mean square over tokens of what scores are off, for each query and head."""
    off = np.repeat(stored.astype(np.float64) - exact, Q_HEADS // HEADS, axis=1)[first:]
    return np.sqrt((np.einsum("nhd,thd->nht", q, off) ** 2).mean(-1) / DIM)


@pytest.mark.parametrize(
    "rows",
    ["outliers", *(pytest.param(rows, marks=pytest.mark.slow) for rows in ("normal", "tails"))],
)
@pytest.mark.parametrize(
    "kind", ["int8", "int4", "int8+rotate", "int4+rotate", "code6+rotate", "code4+rotate"]
)
def test_it_is_what_scores_are_off(target, to, host, rng, kind, rows):
    name, _, rotated = kind.partition("+")
    cache = numkv.KVCache(
        1, HEADS, DIM, kind=name, rotate=bool(rotated), max_seq_len=TOKENS, target=target
    )
    k, v, q = rows_of(rows, rng)
    cache.append(0, to(k), to(v))
    found = cache.key_error(0, to(q))
    stored = host(cache.k(0))
    expected = actual(stored, k, q)
    assert found.shape == (5, Q_HEADS)
    mean = np.sqrt((found**2).mean() / (expected**2).mean())
    assert 0.8 < mean < 1.25
    assert np.all((found > 0.5 * expected) & (found < 2 * expected))
    np.testing.assert_allclose(cache.key_error(0, to(q), sm_scale=1.0), found * math.sqrt(DIM))


def test_it_tells_outlier_channels_from_none(rng):
    """A layer whose keys int4 breaks stands out, before anybody has looked at its output."""
    cache = numkv.KVCache(2, outlier_keys.HEADS, outlier_keys.DIM, kind="int4", max_seq_len=512)
    for layer, high in enumerate((0, 100)):
        k, v, q = outlier_keys.biased(50, high, "low", tokens=512)
        cache.append(layer, *(x.astype(np.float32) for x in (k, v)))
    q = q.astype(np.float32)
    plain, wide = (cache.key_error(layer, q).mean() for layer in range(2))
    assert wide > 1 > 5 * plain


def test_layers_and_paged_caches_say_the_same(target, to, host, rng):
    k, v, q = rows_of("normal", rng)
    expected = numkv.KVCache(1, HEADS, DIM, kind="int4", max_seq_len=TOKENS, target=target)
    expected.append(0, to(k), to(v))
    layers = [
        numkv.ContiguousLayer(TOKENS, HEADS, DIM, kind="int4", target=target),
        numkv.PagedLayer(TOKENS // 16, 16, HEADS, DIM, kind="int4", target=target),
    ]
    paged = numkv.PagedKVCache(2, HEADS, DIM, num_blocks=40, kind="int4", target=target)
    seqs = [paged.add(), paged.add()]
    step = paged.reserve(seqs, [7, TOKENS])
    for layer in range(2):
        step.append(layer, *(to(np.concatenate([x[:7], x])) for x in (k, v)))
    paged.commit(step)
    for layer in layers:
        layer.append(to(k), to(v))
    want = expected.key_error(0, to(q))
    for found in (
        *(layer.key_error(to(q)) for layer in layers),
        paged.key_error(1, seqs[1], to(q)),
    ):
        np.testing.assert_allclose(found, want, rtol=1e-12)
    few = actual(host(expected.k(0))[:7], k[:7], q)
    assert np.all(paged.key_error(0, seqs[0], to(q)) < 2.5 * few)


def test_tokens_in_full_precision_have_no_error(rng):
    k, v, q = rows_of("normal", rng)
    caches = [
        numkv.KVCache(1, HEADS, DIM, kind="int4", max_seq_len=TOKENS, full_precision=kept)
        for kept in (None, numkv.FullPrecision(96), numkv.FullPrecision(500))
    ]
    for cache in caches:
        cache.append(0, k, v)
    whole, half, none = (cache.key_error(0, q) for cache in caches)
    np.testing.assert_allclose(half, whole / math.sqrt(2), rtol=0.1)
    assert not none.any()


@pytest.mark.parametrize(
    "options", [{"window_left": 31}, {"full_precision": numkv.FullPrecision(160)}]
)
def test_paged_caches_count_what_the_newest_token_sees(options, rng):
    k, v, q = rows_of("normal", rng)
    of = numkv.LayerSpec(HEADS, DIM, kind="int8", **options)
    cache = numkv.PagedKVCache(layers=[of], num_blocks=80)
    seq = cache.add()
    step = cache.reserve([seq], TOKENS)
    step.append(0, k, v)
    cache.commit(step)
    found = cache.key_error(0, seq, q)
    single = numkv.KVCache(1, HEADS, DIM, kind="int8", max_seq_len=TOKENS)
    begin, end = (TOKENS - 32, TOKENS) if "window_left" in options else (0, 32)
    single.append(0, k[begin:end], v[begin:end])
    share = 1 if "window_left" in options else 32 / TOKENS
    np.testing.assert_allclose(found, single.key_error(0, q) * math.sqrt(share), rtol=1e-9)


@pytest.mark.parametrize("kind", ["int8_channel", "int4_channel_fine", "int4_channel"])
def test_keys_by_channel_have_errors_in_whole_groups(target, to, host, rng, kind):
    """Those of the newest group are in full, so they are off by nothing."""
    cache = numkv.KVCache(1, HEADS, DIM, kind=kind, max_seq_len=TOKENS, target=target)
    k, v, q = rows_of("outliers", rng)
    cache.append(0, to(k), to(v))
    expected = actual(host(cache.k(0)), k, q)
    np.testing.assert_allclose(cache.key_error(0, to(q)), expected, rtol=0.25)


def test_nothing_is_stored_yet():
    cache = numkv.KVCache(1, HEADS, DIM, kind="int8")
    assert not cache.key_error(0, np.ones((1, Q_HEADS, DIM), np.float32)).any()


@pytest.mark.parametrize("kind", ["fp16", "fp8_e4m3"])
def test_kinds_without_scales_of_rows_are_refused(kind):
    layer = numkv.ContiguousLayer(8, HEADS, DIM, kind=kind)
    with pytest.raises(
        numkv.NotSupported, match=f"key_error: expected keys in a quantised kind, got {kind}"
    ):
        layer.key_error(np.ones((1, Q_HEADS, DIM), np.float32))


def test_odd_arguments():
    layer = numkv.ContiguousLayer(8, HEADS, DIM, kind="int8")
    with pytest.raises(numkv.DimensionMismatch, match="q"):
        layer.key_error(np.ones((1, 3, DIM), np.float32))
    with pytest.raises(ValueError, match="sm_scale"):
        layer.key_error(np.ones((1, Q_HEADS, DIM), np.float32), sm_scale=math.nan)


@pytest.mark.parametrize("sm_scale", [None, 0.0])
def test_infinite_queries_have_errors_that_are_not_finite(sm_scale):
    layer = numkv.ContiguousLayer(8, HEADS, DIM, kind="int8")
    rows = np.arange(3 * HEADS * DIM, dtype=np.float32).reshape(3, HEADS, DIM)
    layer.append(rows, rows)
    q = np.ones((3, Q_HEADS, DIM), np.float32)
    q[0, 0, 0], q[1, 0, 1], q[2, 0, 2] = np.inf, -np.inf, np.nan
    error = layer.key_error(q, sm_scale=sm_scale)
    assert not np.isfinite(error[:, 0]).any()
    assert np.isfinite(error[:, 1:]).all()


def test_a_negative_scale_moves_scores_as_far(rng):
    layer = numkv.ContiguousLayer(8, HEADS, DIM, kind="int8")
    rows, q = (rng.standard_normal((3, n, DIM)).astype(np.float32) for n in (HEADS, Q_HEADS))
    layer.append(rows, rows)
    error = layer.key_error(q, sm_scale=-0.5)
    assert (error > 0).all()
    np.testing.assert_array_equal(error, layer.key_error(q, sm_scale=0.5))
