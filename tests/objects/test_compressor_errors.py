"""What `HeadCompressor` and `MultiHeadCompressor` refuse; nothing has changed afterwards."""

import numpy as np
import pytest
from messages import about

import numkv
from numkv import CompressorConfig, HeadCompressor, MultiHeadCompressor

CONFIG = CompressorConfig(8, 4, 16, 42)


def stored(compressor, host):
    """All that is stored, as bytes."""
    live = slice(compressor._stored.begin, compressor._stored.end)
    buffers = (*compressor._stored.keys, *compressor._stored.values)
    return [host(x)[:, live].tobytes() for x in buffers]


BAD = {"nan": np.nan, "inf": np.inf, "minus inf": -np.inf}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("head_dim", n) for n in (0, -1, 2.5, None, "8")),
        *(("bits", n) for n in (0, 17, -4, 4.0, None)),
        *(("projections", n) for n in (0, -1, 1.5)),
        *(("seed", n) for n in (-1, 0.5, None, "a")),
    ],
)
def test_bad_configs(field, value):
    fields = {"head_dim": 8, "bits": 4, "projections": 16, "seed": 42} | {field: value}
    with pytest.raises(ValueError, match=about(field)):
        CompressorConfig(**fields)


def test_integers_of_numpy_are_integers(host):
    config = CompressorConfig(np.int64(8), np.int32(4), np.uint8(16), np.int64(42))
    head, same = HeadCompressor(config), HeadCompressor(CONFIG)
    x = np.ones(8, np.float32)
    head.push(x, x)
    same.push(x, x)
    assert np.array_equal(head.decode_keys(), same.decode_keys())


@pytest.mark.parametrize(
    ("num_heads", "num_q_heads", "expected", "actual"),
    [(0, None, 1, 0), (-2, None, 1, -2), (2, 0, 1, 0), (3, 8, 3, 8), (4, 2, 4, 2)],
)
def test_bad_numbers_of_heads(num_heads, num_q_heads, expected, actual):
    with pytest.raises(numkv.DimensionMismatch) as error:
        MultiHeadCompressor(num_heads, CONFIG, num_q_heads=num_q_heads)
    assert (error.value.expected, error.value.actual) == (expected, actual)


def test_a_config_is_needed():
    with pytest.raises(TypeError, match=about("config")):
        HeadCompressor(8)


def row(dim=8, bad=None, at=2):
    x = np.ones(dim, np.float32)
    if bad is not None:
        x[at] = BAD[bad]
    return x


def refused(compressor, to, host, call, *args, error, **attributes):
    """A call raises, says how, and changes nothing."""
    before, length = stored(compressor, host), len(compressor)
    with pytest.raises(error) as caught:
        getattr(compressor, call)(*(to(x) for x in args))
    for name, value in attributes.items():
        assert getattr(caught.value, name) == value
    assert len(compressor) == length
    assert stored(compressor, host) == before
    return caught.value


# Key, value, and what is found first: finite elements of the key, of the value, then the lengths in the same order.
ORDER = [
    (row(bad="nan"), row(), numkv.NonFiniteInput, {"index": 2}),
    (row(), row(bad="inf", at=7), numkv.NonFiniteInput, {"index": 7}),
    (row(bad="minus inf", at=0), row(bad="nan", at=1), numkv.NonFiniteInput, {"index": 0}),
    (row(9, bad="nan", at=8), row(), numkv.NonFiniteInput, {"index": 8}),
    (row(3), row(bad="nan", at=5), numkv.NonFiniteInput, {"index": 5}),
    (row(7), row(9), numkv.DimensionMismatch, {"expected": 8, "actual": 7}),
    (row(), row(9), numkv.DimensionMismatch, {"expected": 8, "actual": 9}),
    (row(0), row(), numkv.DimensionMismatch, {"expected": 8, "actual": 0}),
]


@pytest.mark.parametrize(("key", "value", "error", "attributes"), ORDER)
@pytest.mark.parametrize("tokens", [0, 3])
def test_push_checks_in_order_and_then_writes(
    target, to, host, key, value, error, attributes, tokens
):
    head = HeadCompressor(CONFIG, target=target)
    head.extend(to(np.ones((tokens, 8), np.float32)), to(np.ones((tokens, 8), np.float32)))
    refused(head, to, host, "push", key, value, error=error, **attributes)


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("head", [0, 1, 2])
def test_all_heads_or_none(target, to, host, which, head):
    cache = MultiHeadCompressor(3, CONFIG, target=target)
    good = np.ones((3, 8), np.float32)
    cache.push_token(to(good), to(good))
    bad = good.copy()
    bad[head, 4] = np.nan
    pair = (bad, good) if which == "keys" else (good, bad)
    caught = refused(
        cache, to, host, "push_token", *pair, error=numkv.NonFiniteInput, index=4
    )  # fmt: skip
    assert f"`{which}`" in str(caught)
    assert f"head {head}" in str(caught)
    cache.push_token(to(good), to(good))
    assert len(cache) == 2
    assert host(cache.attention_scores(to(good))).shape == (3, 2)


@pytest.mark.parametrize(
    ("keys", "values", "expected", "actual"),
    [((2, 8), (3, 8), 3, 2), ((3, 8), (4, 8), 3, 4), ((3, 7), (3, 8), 8, 7), ((3, 8), (3, 9), 8, 9),
     ((4, 7), (3, 8), 3, 4), ((0, 8), (3, 8), 3, 0)],
)  # fmt: skip
def test_counts_and_lengths_of_a_token(target, to, host, keys, values, expected, actual):
    cache = MultiHeadCompressor(3, CONFIG, target=target)
    x = [np.ones(shape, np.float32) for shape in (keys, values)]
    refused(cache, to, host, "push_token", *x, error=numkv.DimensionMismatch,
            expected=expected, actual=actual)  # fmt: skip


def test_counts_come_before_elements(target, to, host):
    cache = MultiHeadCompressor(3, CONFIG, target=target)
    bad = np.full((2, 8), np.nan, np.float32)
    refused(cache, to, host, "push_token", bad, bad, error=numkv.DimensionMismatch,
            expected=3, actual=2)  # fmt: skip


def test_several_tokens_or_none(target, to, host):
    head = HeadCompressor(CONFIG, target=target)
    good = np.ones((4, 8), np.float32)
    head.extend(to(good), to(good))
    bad = good.copy()
    bad[2, 5] = np.inf
    refused(head, to, host, "extend", good, bad, error=numkv.NonFiniteInput, index=5)
    refused(head, to, host, "extend", good, good[:3], error=numkv.DimensionMismatch,
            expected=4, actual=3)  # fmt: skip
    refused(head, to, host, "extend", good[:, :7].copy(), good, error=numkv.DimensionMismatch,
            expected=8, actual=7)  # fmt: skip
    cache = MultiHeadCompressor(2, CONFIG, target=target)
    x = np.ones((3, 2, 8), np.float32)
    refused(cache, to, host, "extend", x, x[:, :1].copy(), error=numkv.DimensionMismatch,
            expected=2, actual=1)  # fmt: skip


@pytest.mark.parametrize("tokens", [0, 2])
def test_queries(target, to, host, tokens):
    """A query is looked at before its length; without tokens its length does not matter to scores."""
    head = HeadCompressor(CONFIG, target=target)
    x = np.ones((tokens, 8), np.float32)
    head.extend(to(x), to(x))
    for read in ("attention_scores", "attend"):
        refused(head, to, host, read, row(bad="nan", at=6), error=numkv.NonFiniteInput, index=6)
        refused(head, to, host, read, row(9, bad="nan", at=8), error=numkv.NonFiniteInput, index=8)
        if tokens or read == "attend":
            refused(head, to, host, read, row(9), error=numkv.DimensionMismatch,
                    expected=8, actual=9)  # fmt: skip
        else:
            assert host(head.attention_scores(to(row(9)))).shape == (0,)


@pytest.mark.parametrize("tokens", [0, 1])
def test_number_of_queries(target, to, host, tokens):
    cache = MultiHeadCompressor(2, CONFIG, num_q_heads=4, target=target)
    x = np.ones((tokens, 2, 8), np.float32)
    cache.extend(to(x), to(x))
    for read in ("attention_scores", "attend"):
        refused(cache, to, host, read, np.full((2, 8), np.nan, np.float32),
                error=numkv.DimensionMismatch, expected=4, actual=2)  # fmt: skip


def test_floats_that_float32_does_not_hold(target, to, host):
    head = HeadCompressor(CONFIG, target=target)
    huge = np.full(8, 1e300)
    refused(head, to, host, "push", huge, huge, error=numkv.NonFiniteInput, index=0)


@pytest.mark.parametrize("x", [np.ones(8, np.int32), np.ones(8, np.complex64)])
def test_other_dtypes(target, to, x):
    head = HeadCompressor(CONFIG, target=target)
    with pytest.raises(numkv.UnsupportedDType, match=about("key")):
        head.push(to(x), to(np.ones(8, np.float32)))
    with pytest.raises(numkv.UnsupportedDType, match=about("query")):
        head.attend(to(x))


def test_other_ranks_and_layouts(target, to):
    head, cache = (
        HeadCompressor(CONFIG, target=target),
        MultiHeadCompressor(2, CONFIG, target=target),
    )
    x = to(np.ones((2, 8), np.float32))
    with pytest.raises(numkv.DimensionMismatch, match=about("key")):
        head.push(x, x)
    with pytest.raises(numkv.DimensionMismatch, match=about("keys")):
        cache.extend(x, x)
    with pytest.raises(numkv.DimensionMismatch, match=about("queries")):
        cache.attend(to(np.ones(16, np.float32)))
    with pytest.raises(numkv.NotSupported, match=about("query")):
        head.attend(to(np.ones(16, np.float32))[::2])


def test_what_is_no_array(target):
    with pytest.raises(numkv.NumkvError, match="`key`"):
        HeadCompressor(CONFIG, target=target).push([1.0] * 8, [1.0] * 8)


def test_unchecked_vectors_spoil_their_own_token_only(target, to, host):
    head = HeadCompressor(CONFIG, target=target)
    head.push(to(row()), to(row()))
    head.push(to(row(bad="nan")), to(row(bad="inf")), check_finite=False)
    head.push(to(row()), to(row()))
    keys = host(head.decode_keys())
    assert np.array_equal(keys[0], keys[2])
    assert np.all(np.isfinite(keys[0]))
    assert np.all(np.isnan(keys[1]))


@pytest.mark.parametrize("n", [-1, -100])
def test_a_window_is_not_negative(n):
    with pytest.raises(numkv.DimensionMismatch, match=about("n")):
        HeadCompressor(CONFIG).evict_outside_window(n)


def test_an_unknown_target():
    with pytest.raises(ValueError, match="target"):
        HeadCompressor(CONFIG, target="tpu")


# ---------------------------------------------------------------- odd arguments

HUGE = 10**5000  # more digits than Python writes out


@pytest.mark.parametrize("field", ["head_dim", "bits", "projections", "seed"])
def test_odd_numbers_in_configs(field):
    """True is none, and what would take hours or all memory is refused by name."""
    fields = {"head_dim": 8, "bits": 4, "projections": 16, "seed": 42}
    bad = [True, np.bool_(True), np.float32(1), float("nan"), [1], -HUGE]
    bad += [] if field == "seed" else [2**31, HUGE]
    for value in bad:
        with pytest.raises(ValueError, match=about(field)):
            CompressorConfig(**(fields | {field: value}))


def test_small_integers_of_numpy_do_not_overflow():
    config = CompressorConfig(np.uint8(200), np.uint8(4), np.uint8(255), np.uint8(200))
    same = CompressorConfig(200, 4, 255, 200)
    assert config == same
    made = [HeadCompressor(c) for c in (config, same)]
    assert made[0].bytes_per_token == made[1].bytes_per_token == 2 * (100 + 4) + 32 + 4
    assert [type(x) for x in (config.head_dim, config.seed)] == [int, int]


def test_odd_numbers_of_heads_and_tokens():
    for bad in (1.0, "1", True, None, 2**40, HUGE, float("nan")):
        with pytest.raises((TypeError, numkv.DimensionMismatch), match="`num_heads`"):
            MultiHeadCompressor(bad, CONFIG)
        with pytest.raises((TypeError, numkv.DimensionMismatch), match="`n`"):
            MultiHeadCompressor(1, CONFIG).evict_outside_window(bad if bad != 2**40 else -1)
    with pytest.raises((TypeError, numkv.DimensionMismatch), match="`num_q_heads`"):
        MultiHeadCompressor(2, CONFIG, num_q_heads=2.0)
    with pytest.raises(numkv.DimensionMismatch, match="`num_heads`"):
        MultiHeadCompressor(2**16, CompressorConfig(4096, 4, 2**20))
    with pytest.raises(TypeError, match="`check_finite`"):
        HeadCompressor(CONFIG).push(row(), row(), check_finite="no")


def in_layout(x, how):
    """The same numbers in another layout."""
    if how == "read-only":
        x = x.copy()
        x.flags.writeable = False
    elif how == "reversed":
        x = np.ascontiguousarray(x[::-1])[::-1]
    elif how == "strided":
        x = np.repeat(x, 2, 0)[::2]
    elif how == "broadcast":
        x = np.broadcast_to(x[:1], x.shape)
    elif how == "byte order":
        x = x.astype(">f4")
    elif how == "unaligned":
        x = np.frombuffer(b"\0" + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    elif how == "last axis":
        x = np.repeat(x, 2, -1)[..., ::2]
    return x


FINE = ["read-only", "reversed", "strided", "broadcast"]


@pytest.mark.parametrize("how", [*FINE, "byte order", "unaligned", "last axis"])
def test_layouts(how):
    """Taken and right, or refused by name."""
    rng = np.random.default_rng(0)
    x, q = rng.standard_normal((2, 3, 2, 8), np.float32), rng.standard_normal((2, 8), np.float32)
    cache, plain = (MultiHeadCompressor(2, CONFIG) for _ in range(2))
    if how not in FINE:
        for name, call in (
            ("keys", lambda: cache.extend(in_layout(x[0], how), x[1])),
            ("values", lambda: cache.extend(x[0], in_layout(x[1], how))),
            ("keys", lambda: cache.push_token(in_layout(q, how), q)),
            ("queries", lambda: cache.attend(in_layout(q, how))),
            ("queries", lambda: cache.attention_scores(in_layout(q, how))),
        ):
            with pytest.raises(numkv.NumkvError, match=about(name)):
                call()
        assert len(cache) == 0
        return
    odd = [in_layout(part, how) for part in x]
    cache.extend(*odd)
    plain.extend(*(np.ascontiguousarray(part) for part in odd))
    for name in ("key_codes", "value_codes"):
        for a, b in zip(getattr(cache, name), getattr(plain, name), strict=True):
            assert np.array_equal(a, b)
    odd_q = in_layout(q, how)
    assert np.array_equal(cache.attend(odd_q), plain.attend(np.ascontiguousarray(odd_q)))
    cache.push_token(odd_q, odd_q)
    assert len(cache) == 4


# ---------------------------------------------------------------- books


def test_check_finds_what_is_wrong(target, to):
    x = to(np.ones((3, 2, 8), np.float32))

    def filled():
        cache = MultiHeadCompressor(2, CONFIG, target=target)
        cache.extend(x, x)
        cache.check()
        return cache

    cache = filled()
    cache._stored = cache._stored._replace(end=cache.capacity + 1)
    with pytest.raises(numkv.NumkvError, match=r"lie in \[0, 17\)"):
        cache.check()
    cache = filled()
    cache._stored = cache._stored._replace(values=cache._stored.keys)
    with pytest.raises(numkv.NumkvError, match="buffers of values"):
        cache.check()
    cache = filled()
    cache.push_token(
        *(to(np.full((2, 8), np.nan, np.float32)) for _ in range(2)), check_finite=False
    )
    with pytest.raises(numkv.NumkvError, match="scales of keys are not finite"):
        cache.check()
    cache.clear()
    cache.check()
