"""`EncoderCache`: the rows of one encoder's output, attended to by all tokens."""

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from messages import about

import numkv

F32 = np.float32
KINDS = [*naive.DTYPES, "int8"]


def make(target, kind="fp32", max_batch=4, **config):
    cache = numkv.EncoderCache()
    if config:
        cache.set_config(numkv.CacheConfig(**config))
    cache.init(kind, 1, 8, max_batch, target)
    return cache


def draw(rng, n, heads=2, dim=4, dim_v=6):
    return rng.standard_normal((n, heads, dim), F32), rng.standard_normal((n, heads, dim_v), F32)


def stored(cache, host, layer=0):
    k, v, mask = cache.get(layer)
    assert mask is None
    return host(k).copy(), host(v).copy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("permuted", [False, True])
def test_rows_come_back(target, to, host, rng, kind, permuted):
    """As many as there were, whatever the batch."""
    cache = make(target, kind, permuted_v=permuted)
    cache.start_forward(numkv.Batch([0, 1], [0, 0], [1]))
    assert cache.get(0) == (None, None, None)
    rows = {layer: draw(rng, n) for layer, n in ((0, 7), (3, 1))}
    for layer, (k, v) in rows.items():
        cache.put(layer, to(k), to(v))
    for layer, (k, v) in rows.items():
        got_k, got_v = stored(cache, host, layer)
        if permuted:
            assert got_v.shape == (2, 6, len(v))
            got_v = got_v.transpose(2, 0, 1)
        for got, want in ((got_k, k), (got_v, v)):
            assert got.dtype == numkv.kind(kind).dtype
            assert got.shape == want.shape
            want = naive_cells.as_stored(want, kind)
            assert np.allclose(got.astype(np.float64), want, rtol=1e-6 * (kind == "int8"), atol=0)
    assert cache.get(1) == (None, None, None)


def test_rows_in_the_kinds_own_dtype(target, to, host, rng):
    cache = make(target, "bf16")
    cache.start_forward(numkv.Batch([0], [0], [0]))
    k, v = (naive.round_to(x, "bf16") for x in draw(rng, 3))
    cache.put(0, to(k), to(v))
    for got, want in zip(stored(cache, host), (k, v), strict=True):
        assert np.array_equal(naive.words(got), naive.words(want))


def test_put_again_overwrites(target, to, host, rng):
    """With as many rows as before, or others."""
    cache = make(target)
    for position, n in ((0, 3), (5, 3), (9, 5), (12, 2)):
        cache.start_forward(numkv.Batch([position], [0], [0]))
        rows = draw(rng, n)
        cache.put(0, *map(to, rows))
        for got, want in zip(stored(cache, host), rows, strict=True):
            assert np.array_equal(got, want)


def test_it_stays_for_later_passes(target, to, host, rng):
    cache, rows = make(target), draw(rng, 3)
    cache.start_forward(numkv.Batch([0], [0], [0]))
    cache.put(0, *map(to, rows))
    cache.start_forward(numkv.Batch([1, 2], [0, 0]))
    assert cache.encoder_cached
    assert np.array_equal(stored(cache, host)[1], rows[1])


def test_cached_until_its_position_is_removed(target, to, host, rng):
    """The last of the multimodal items gives it; sequences are not told apart."""
    cache, rows = make(target), draw(rng, 3)
    assert cache.encoder_cached is False
    cache.start_forward(numkv.Batch([4, 5, 6, 7], [0] * 4, [0, 2]))
    assert cache.encoder_cached is False
    cache.put(0, *map(to, rows))
    assert cache.encoder_cached is True
    for begin, end in ((0, 6), (7, None), (7, 9), (6, 6)):
        cache.remove(0, begin, end)
        assert cache.encoder_cached is True
    cache.remove(3, 6, 7)
    assert cache.encoder_cached is False
    assert np.array_equal(stored(cache, host)[0], rows[0])  # the rows stay where they are
    cache.put(0, *map(to, rows))
    assert cache.encoder_cached is True
    cache.remove(0, 0)
    assert cache.encoder_cached is False


def test_a_pass_without_items_keeps_the_position(target, to, rng):
    cache, rows = make(target), draw(rng, 2)
    cache.start_forward(numkv.Batch([3], [0], [0]))
    cache.start_forward(numkv.Batch([4], [0]))
    cache.put(0, *map(to, rows))
    cache.remove(0, 4, 5)
    assert cache.encoder_cached
    cache.remove(0, 3, 4)
    assert not cache.encoder_cached


def test_a_fresh_cache_is_at_position_0(target, to, rng):
    cache = make(target)
    cache.start_forward(numkv.Batch([3], [0]))
    cache.put(0, *map(to, draw(rng, 2)))
    cache.remove(0, 3, 4)
    assert cache.encoder_cached
    cache.remove(0, 0, 1)
    assert not cache.encoder_cached


def test_a_reserved_pass_writes_nothing(target, to, host, rng):
    cache, rows = make(target), draw(rng, 3)
    cache.start_forward(numkv.Batch([3], [0], [0]), reserve=True)
    cache.put(0, *map(to, draw(rng, 3)))
    assert not cache.encoder_cached
    cache.start_forward(numkv.Batch([5], [0], [0]))
    cache.put(0, *map(to, rows))
    cache.start_forward(numkv.Batch([8], [0], [0]), reserve=True)
    cache.put(0, *map(to, draw(rng, 3)))
    assert cache.encoder_cached
    cache.start_forward(numkv.Batch([6], [0]))
    for got, want in zip(stored(cache, host), rows, strict=True):
        assert np.array_equal(got, want)


def test_everything_can_be_resumed(target):
    cache = make(target)
    assert cache.can_resume(0, 0) is True
    assert cache.can_resume(5, 1000) is True


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_attention(target, to, host, rng, kind):
    """Every query sees every row."""
    cache = make(target, kind)
    cache.start_forward(numkv.Batch([0, 1, 2], [0] * 3, [0]))
    cache.put(0, *map(to, draw(rng, 5)))
    k, v = stored(cache, host)
    q, sinks = rng.standard_normal((3, 4, 4), F32), rng.standard_normal(4).astype(F32)
    for options in ({}, {"sm_scale": 0.3, "logits_soft_cap": 2.0, "sinks": sinks}):
        want, want_lse = naive_cells.attention(q, k, v, np.zeros((3, 5)), **options)
        given = {n: to(x) if n == "sinks" else x for n, x in options.items()}
        out, lse = cache.decode_attention(0, to(q), return_lse=True, **given)
        tolerances.assert_rows_close(host(out), want, tolerances.attention(kind, "fp32"))
        bound = tolerances.INTEGERS if kind in tolerances.QUANTISED else tolerances.LSE
        tolerances.assert_lse_close(host(lse), want_lse, bound)


def test_queries_over_int4_have_the_width_of_rows(target, to, host, rng):
    """Not that of their packed codes."""
    cache = make(target, "int4")
    cache.start_forward(numkv.Batch([0, 1], [0, 0], [0]))
    cache.put(0, *(to(rng.standard_normal((5, 2, 64), F32)) for _ in range(2)))
    k, v = stored(cache, host)
    q = rng.standard_normal((2, 4, 64), F32)
    want, _ = naive_cells.attention(q, k, v, np.zeros((2, 5)))
    out = host(cache.decode_attention(0, to(q)))
    tolerances.assert_rows_close(out, want, tolerances.attention("int4", "fp32"))


# ---------------------------------------------------------------- what can go wrong


def test_for_one_sequence_and_without_padding(target):
    cache = numkv.EncoderCache()
    with pytest.raises(numkv.NumkvError, match="max_sequences"):
        cache.init("fp32", 2, 8, 4, target)
    cache.init("fp32", 1, 8, 4, target)
    with pytest.raises(numkv.NumkvError, match="padding"):
        make(target, padding=2)
    make(target, padding=1)


def test_it_copies_no_prefix(target, to, host, rng):
    cache, rows = make(target), draw(rng, 2)
    cache.start_forward(numkv.Batch([0], [0], [0]))
    cache.put(0, *map(to, rows))
    with pytest.raises(numkv.NotSupported):
        cache.copy_prefix(0, 1, 1)
    assert cache.encoder_cached
    assert np.array_equal(stored(cache, host)[0], rows[0])


@pytest.mark.parametrize(
    ("k", "v", "name", "error"),
    [
        ((3, 2), (3, 2, 6), "k", numkv.DimensionMismatch),
        ((3, 2, 4), (2, 2, 6), "v", numkv.DimensionMismatch),
        ((3, 2, 4), (3, 1, 6), "v", numkv.DimensionMismatch),
        ((3, 2, 4), (3, 12), "v", numkv.DimensionMismatch),
    ],
)
def test_bad_rows(target, to, host, rng, k, v, name, error):
    cache, rows = make(target), draw(rng, 2)
    cache.start_forward(numkv.Batch([1], [0], [0]))
    bad = [to(np.ones(shape, F32)) for shape in (k, v)]
    with pytest.raises(error, match=about(name)):
        cache.put(0, *bad)
    assert not cache.encoder_cached
    assert cache.get(0) == (None, None, None)
    cache.put(0, *map(to, rows))
    with pytest.raises(error, match=about(name)):
        cache.put(0, *bad)
    with pytest.raises(numkv.UnsupportedDType, match=about("k")):
        cache.put(0, to(np.ones((3, 2, 4), np.int32)), bad[1])
    for got, want in zip(stored(cache, host), rows, strict=True):
        assert np.array_equal(got, want)


def test_bad_numbers(target, to, rng):
    cache = make(target)
    cache.start_forward(numkv.Batch([1], [0], [0]))
    rows = [to(x) for x in draw(rng, 2)]
    cache.put(0, *rows)
    for call in (
        lambda: cache.put(-1, *rows),
        lambda: cache.get(-1),
        lambda: cache.remove(-1, 0),
        lambda: cache.can_resume(-1, 0),
        lambda: cache.start_forward(numkv.Batch([1], [-1])),
        lambda: cache.start_forward(numkv.Batch([1], [0], [1])),
        lambda: cache.decode_attention(4, to(np.ones((1, 2, 4), F32))),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError):
        cache.remove(0, 2, 1)
    assert cache.encoder_cached


def test_life(target, to, rng):
    rows = [to(x) for x in draw(rng, 2)]
    with numkv.EncoderCache() as cache:
        with pytest.raises(numkv.NumkvError, match="init"):
            cache.start_forward(numkv.Batch([0], [0]))
        cache.set_config(numkv.CacheConfig())
        with pytest.raises(numkv.NumkvError):
            cache.set_config(numkv.CacheConfig())
        cache.init("fp32", 1, 8, 4, target)
        with pytest.raises(numkv.NumkvError):
            cache.set_config(numkv.CacheConfig())
        for call in (
            lambda: cache.put(0, *rows),
            lambda: cache.get(0),
            lambda: cache.decode_attention(0, rows[0]),
        ):
            with pytest.raises(numkv.NumkvError, match="start_forward"):
                call()
        cache.start_forward(numkv.Batch([0], [0], [0]))
        cache.put(0, *rows)
    for call in (
        lambda: cache.start_forward(numkv.Batch([0], [0])),
        lambda: cache.put(0, *rows),
        lambda: cache.get(0),
        lambda: cache.remove(0, 0),
        lambda: cache.can_resume(0, 0),
    ):
        with pytest.raises(numkv.NumkvError, match="close"):
            call()


def test_repr_says_what_it_is(target):
    text = repr(make(target, "bf16"))
    assert text.startswith("EncoderCache(")
    assert "bf16" in text
    assert target in text
