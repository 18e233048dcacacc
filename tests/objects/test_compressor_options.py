"""Compressors: tokens taken back, several queries at once, options of attention, other bits of values."""

import copy
import io
import json
import pickle

import naive_codes
import numpy as np
import pytest
import tolerances
from messages import about

import numkv
from numkv import CompressorConfig, HeadCompressor, MultiHeadCompressor

HEADS, GROUP, DIM = 2, 3, 8
CONFIG = CompressorConfig(DIM, 4, 16, 42)
OTHER_BITS = CompressorConfig(DIM, 4, seed=42, v_bits=3)


def random(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def filled(target, to, rng, tokens, config=CONFIG):
    cache = MultiHeadCompressor(HEADS, config, num_q_heads=HEADS * GROUP, target=target)
    x = random(rng, 2, tokens, HEADS, DIM)
    cache.extend(to(x[0]), to(x[1]))
    return cache, x


def codes_of(cache, host):
    return [host(x).tobytes() for x in (*cache.key_codes, *cache.value_codes)]


def expected(cache, host, q, sm_scale=DIM**-0.5, cap=0.0, window_left=-1):
    """Scores, outputs and lse in float64, from what is stored as it can be read out."""
    keys, values = (
        host(x).astype(np.float64) for x in (cache.decode_keys(), cache.decode_values())
    )
    stored, quantiser = cache.key_codes, cache._quantiser
    signs = naive_codes.unpack(host(stored.signs), cache.config.projections or 0, 1)
    rotation, sketch, left = (
        host(x) for x in (quantiser.rotation, quantiser.sketch, stored.residuals)
    )
    scores = np.stack(
        [naive_codes.scores(x, keys, rotation, sketch, signs, left, sm_scale) for x in q]
    )
    scores = naive_codes.restrict(scores, cap, window_left)
    outs, lse = zip(*(naive_codes.attend(x, values) for x in scores), strict=True)
    return scores, np.stack(outs), np.stack(lse)


# ---------------------------------------------------------------- tokens taken back


def test_truncated_is_never_pushed(target, to, host, rng):
    """Codes, scores and outputs are those of the first tokens; what is pushed then follows them."""
    cache, x = filled(target, to, rng, 9)
    capacity, q = cache.capacity, to(random(rng, HEADS * GROUP, DIM))
    same = MultiHeadCompressor(HEADS, CONFIG, num_q_heads=HEADS * GROUP, target=target)
    same.extend(to(x[0, :5]), to(x[1, :5]))
    cache.truncate(9)
    assert len(cache) == 9
    cache.truncate(np.int32(5))
    assert (len(cache), cache.capacity) == (5, capacity)
    assert codes_of(cache, host) == codes_of(same, host)
    for name in ("attend", "attention_scores"):
        assert np.array_equal(host(getattr(cache, name)(q)), host(getattr(same, name)(q)))
    for each in (cache, same):
        each.push_token(to(x[0, 8]), to(x[1, 8]))
        each.check()
    assert codes_of(cache, host) == codes_of(same, host)
    cache.truncate(0)
    assert (cache.is_empty, cache.compression_ratio) == (True, 1.0)
    assert not host(cache.attend(q)).any()
    cache.truncate(0)


def test_truncated_after_a_window_was_kept(target, to, host, rng):
    """Lengths count what is there; what was evicted does not come back."""
    cache, _ = filled(target, to, rng, 12)
    keys = host(cache.decode_keys())
    cache.evict_outside_window(7)
    with pytest.raises(IndexError, match=about("length")):
        cache.truncate(8)
    cache.truncate(4)
    assert np.array_equal(host(cache.decode_keys()), keys[:, 5:9])
    cache.evict_outside_window(2)
    assert np.array_equal(host(cache.decode_keys()), keys[:, 7:9])
    other = cache.copy()
    cache.truncate(1)
    assert (len(cache), len(other)) == (1, 2)
    assert np.array_equal(host(other.decode_keys()), keys[:, 7:9])


@pytest.mark.parametrize("length", [-1, 4, 10**30])
def test_lengths_that_there_are_not(target, to, host, rng, length):
    cache, _ = filled(target, to, rng, 3)
    before = codes_of(cache, host)
    with pytest.raises(IndexError, match=about("length")):
        cache.truncate(length)
    assert codes_of(cache, host) == before


@pytest.mark.parametrize("length", [None, 1.0, "1", True])
def test_lengths_are_integers(rng, length):
    cache, _ = filled("cpu", np.asarray, rng, 3)
    with pytest.raises(TypeError, match=about("length")):
        cache.truncate(length)
    assert len(cache) == 3


def test_a_reader_beside_a_truncation_gets_an_error(rng, monkeypatch):
    """Its tokens may be others by the time it returns."""
    cache, x = filled("cpu", np.asarray, rng, 6)
    attend = cache._target.ops.attend_codes

    def meanwhile(*args):
        attend(*args)
        cache.truncate(2)
        cache.push_token(x[0, 5], x[1, 5])

    q = random(rng, HEADS * GROUP, DIM)
    with monkeypatch.context() as patch:
        patch.setattr(cache._target.ops, "attend_codes", meanwhile)
        with pytest.raises(numkv.NumkvError, match="moved or dropped"):
            cache.attend(q)
    assert len(cache) == 3
    assert np.isfinite(cache.attend(q)).all()


def test_a_truncation_inside_of_a_push_is_refused(rng, monkeypatch):
    cache, x = filled("cpu", np.asarray, rng, 6)
    encode = cache._target.ops.encode_rows

    def meanwhile(*args):
        with pytest.raises(numkv.NumkvError, match="another call"):
            cache.truncate(2)
        encode(*args)

    monkeypatch.setattr(cache._target.ops, "encode_rows", meanwhile)
    cache.push_token(x[0, 0], x[1, 0])
    assert len(cache) == 7


# ---------------------------------------------------------------- queries and options

OPTIONS = [
    {}, {"sm_scale": 0.2}, {"sm_scale": -1.5, "logits_soft_cap": 0.5}, {"window_left": 3},
    {"window_left": 0, "logits_soft_cap": 20}, {"window_left": 100, "sm_scale": 0},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("config", [CONFIG, OTHER_BITS], ids=["sketch", "bits"])
def test_options_of_several_queries(target, to, host, rng, config, options):
    cache, _ = filled(target, to, rng, 11, config)
    cache.evict_outside_window(9)
    q = random(rng, 4, HEADS * GROUP, DIM)
    names = {"logits_soft_cap": "cap"}
    scores, outs, lse = expected(cache, host, q, **{names.get(n, n): x for n, x in options.items()})
    found = host(cache.attention_scores(to(q), **options))
    assert found.dtype == np.float32
    assert np.array_equal(found == -np.inf, scores == -np.inf)
    seen = scores > -np.inf
    assert np.allclose(found[seen], scores[seen], rtol=1e-5, atol=2e-5)
    out, sums = (host(x) for x in cache.attend(to(q), return_lse=True, **options))
    assert (out.shape, sums.shape) == (q.shape, q.shape[:2])
    tolerances.assert_rows_close(out, outs, 3e-5)
    assert np.allclose(sums, lse, rtol=1e-5, atol=2e-5)
    assert np.array_equal(host(cache.attend(to(q), **options)), out)
    # The newest token's query alone is the last of several.
    last, last_sum = (host(x) for x in cache.attend(to(q[3]), return_lse=True, **options))
    assert np.array_equal(last, out[3])
    assert np.array_equal(last_sum, sums[3])
    assert np.array_equal(host(cache.attention_scores(to(q[3]), **options)), found[3])


def test_queries_of_one_head(target, to, host, rng):
    """They are those of a compressor of one head, without its axis; of tensors with strides too."""
    head = HeadCompressor(OTHER_BITS, target=target)
    cache = MultiHeadCompressor(1, OTHER_BITS, target=target)
    x, wide = random(rng, 2, 6, 1, DIM), random(rng, 3, 2 * DIM)
    cache.extend(to(x[0]), to(x[1]))
    head.extend(*(to(np.ascontiguousarray(part[:, 0])) for part in x))
    q = np.ascontiguousarray(wide[:, None, DIM:])
    options = {"window_left": 2, "logits_soft_cap": 3.0}
    for given in (to(wide)[:, DIM:], to(q[:, 0].copy())):
        out, lse = head.attend(given, return_lse=True, **options)
        wanted = cache.attend(to(q), return_lse=True, **options)
        assert (host(out).shape, host(lse).shape) == ((3, DIM), (3,))
        assert np.array_equal(host(out), host(wanted[0])[:, 0])
        assert np.array_equal(host(lse), host(wanted[1])[:, 0])
        scores = host(head.attention_scores(given, **options))
        assert np.array_equal(scores, host(cache.attention_scores(to(q), **options))[:, 0])
    out, lse = head.attend(to(q[2, 0].copy()), return_lse=True, **options)
    assert (host(out).shape, host(lse).shape) == ((DIM,), (1,))
    assert np.array_equal(host(lse), host(wanted[1])[2])


def test_one_query_or_none_of_no_tokens(target, to, host, rng):
    cache = MultiHeadCompressor(HEADS, CONFIG, target=target)
    for shape in ((HEADS, DIM), (1, HEADS, DIM)):
        out, lse = cache.attend(to(random(rng, *shape)), return_lse=True, window_left=2)
        assert not host(out).any()
        assert host(out).shape == shape
        assert np.array_equal(host(lse), np.full(shape[:-1], -np.inf))
        assert host(cache.attention_scores(to(random(rng, *shape)))).shape == (*shape[:-1], 0)
    cache, _ = filled(target, to, rng, 2)
    none = to(np.zeros((0, HEADS * GROUP, DIM), np.float32))
    out, lse = cache.attend(none, return_lse=True)
    assert host(out).shape == (0, HEADS * GROUP, DIM)
    assert host(lse).shape == (0, HEADS * GROUP)
    assert host(cache.attention_scores(none)).shape == (0, HEADS * GROUP, 2)


def test_more_queries_than_tokens(target, to, host, rng):
    for tokens in (0, 2):
        cache, _ = filled(target, to, rng, tokens)
        q = to(random(rng, 3, HEADS * GROUP, DIM))
        for read in (cache.attend, cache.attention_scores):
            with pytest.raises(numkv.DimensionMismatch, match=about("queries")) as error:
                read(q)
            assert (error.value.expected, error.value.actual) == (tokens, 3)


def test_a_query_of_several_is_looked_at(target, to, host, rng):
    cache, _ = filled(target, to, rng, 5)
    q = random(rng, 3, HEADS * GROUP, DIM)
    q[1, 4, 6] = np.nan
    for read in (cache.attend, cache.attention_scores):
        with pytest.raises(numkv.NonFiniteInput, match="token 1, head 4") as error:
            read(to(q))
        assert error.value.index == 6
    out, lse = cache.attend(to(q), check_finite=False, return_lse=True)
    bad = np.zeros(q.shape[:2], bool)
    bad[1, 4] = True
    assert np.array_equal(np.isnan(host(out)).any(axis=2), bad)
    assert np.array_equal(np.isnan(host(lse)), bad)


def test_a_token_outside_of_the_window_may_be_anything(target, to, host, rng):
    """Pushed unchecked: NaN before the window and after a query reaches nobody else."""
    cache, x = filled(target, to, rng, 4)
    bad = np.full((HEADS, DIM), np.nan, np.float32)
    clean = cache.copy()
    q = random(rng, 2, HEADS * GROUP, DIM)
    cache.push_token(to(bad), to(bad), check_finite=False)
    clean.push_token(to(x[0, 0]), to(x[1, 0]))
    mine, theirs = (host(c.attend(to(q))) for c in (cache, clean))
    assert np.array_equal(mine[0], theirs[0])
    assert np.isnan(mine[1]).all()
    for each in (cache, clean):
        each.extend(to(x[0]), to(x[1]))
    mine, theirs = (host(c.attend(to(q), window_left=2)) for c in (cache, clean))
    assert np.array_equal(mine, theirs)
    assert np.isfinite(mine).all()


BAD_OPTIONS = [
    ("logits_soft_cap", -1.0, ValueError), ("logits_soft_cap", np.nan, ValueError),
    ("logits_soft_cap", 1e-45, ValueError), ("logits_soft_cap", "1", TypeError), ("sm_scale", np.inf, ValueError),
    ("sm_scale", True, TypeError), ("window_left", -2, numkv.DimensionMismatch), ("window_left", 1.0, TypeError),
    ("return_lse", "yes", TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error"), BAD_OPTIONS)
def test_odd_options(rng, name, value, error):
    """They are those of `numkv.decode_attention`, errors and all."""
    cache, _ = filled("cpu", np.asarray, rng, 3)
    q, k = random(rng, HEADS * GROUP, DIM), random(rng, 1, HEADS, 4, DIM)
    head = HeadCompressor(CONFIG)
    calls = [
        lambda: cache.attend(q, **{name: value}), lambda: head.attend(q[0], **{name: value}),
        lambda: numkv.decode_attention(q[None], k, k, np.array([3]), **{name: value}),
    ]  # fmt: skip
    if name != "return_lse":
        calls.append(lambda: cache.attention_scores(q, **{name: value}))
    for call in calls:
        with pytest.raises(error, match=about(name)):
            call()


def test_none_is_the_default_of_options(rng):
    cache, _ = filled("cpu", np.asarray, rng, 3)
    q = random(rng, HEADS * GROUP, DIM)
    same = cache.attend(q, sm_scale=None, logits_soft_cap=None, window_left=None)
    assert np.array_equal(same, cache.attend(q))
    assert np.array_equal(cache.attend(q, window_left=2**63 - 1), cache.attend(q))
    assert np.array_equal(cache.attend(q, sm_scale=DIM**-0.5), cache.attend(q))


# ---------------------------------------------------------------- other bits of values


def test_values_of_other_bits_have_their_own_codebook(target, to, host, rng):
    """Keys are those of their bits, values of theirs; both have the rotation of the seed."""
    x = random(rng, 2, 6, HEADS, DIM)
    made = {}
    for bits, v_bits in ((4, 3), (4, None), (3, None)):
        config = CompressorConfig(DIM, bits, seed=5, v_bits=v_bits)
        made[bits, v_bits] = MultiHeadCompressor(HEADS, config, target=target)
        made[bits, v_bits].extend(to(x[0]), to(x[1]))
    mixed = made[4, 3]
    for name, of in (("keys", made[4, None]), ("values", made[3, None])):
        assert np.array_equal(
            host(getattr(mixed, f"decode_{name}")()), host(getattr(of, f"decode_{name}")())
        )
    assert host(mixed.key_codes.codes).tobytes() == host(made[4, None].key_codes.codes).tobytes()
    assert (
        host(mixed.value_codes.codes).tobytes() == host(made[3, None].value_codes.codes).tobytes()
    )
    mixed.check()


@pytest.mark.parametrize(
    ("dim", "bits", "v_bits", "projections"), [(128, 4, 3, None), (13, 6, 2, 5), (8, 1, 16, None)]
)
def test_sizes_of_other_bits(dim, bits, v_bits, projections):
    config = CompressorConfig(dim, bits, projections, v_bits=v_bits)
    cache, x = MultiHeadCompressor(3, config), np.ones((5, 3, dim), np.float32)
    sketch = 0 if projections is None else -(-projections // 8) + 4
    size = -(-dim * bits // 8) + -(-dim * v_bits // 8) + 8 + sketch
    assert cache.bytes_per_token == 3 * size
    cache.extend(x, x)
    assert cache.nbytes == cache.capacity * cache.bytes_per_token
    assert cache.compression_ratio == pytest.approx(2 * dim * 4 / size)
    assert (cache.kind.bits, cache.v_kind.bits) == (bits, v_bits)
    tables = 2 ** (bits + 1) + 2 ** (v_bits + 1) - 2
    assert cache.quantiser_nbytes == 4 * (tables + 3 * dim * (2 * dim + (projections or 0)))


def test_as_many_bits_are_no_other_bits():
    config = CompressorConfig(8, 4, v_bits=np.int64(4))
    assert config == CompressorConfig(8, 4)
    assert config.v_bits is None
    a, b = HeadCompressor(config), HeadCompressor(CompressorConfig(8))
    assert a._quantiser is b._quantiser
    assert repr(a) == repr(b)
    assert "v_bits" not in repr(a)
    assert (config.kind, config.v_kind) == (a.kind, a.v_kind)


def test_what_it_says_of_other_bits():
    config = CompressorConfig(8, 4, 16, v_bits=3)
    assert type(config.v_bits) is int
    told = repr(HeadCompressor(config))
    assert "bits=4, v_bits=3, projections=16, seed=0, kind=codes4+sketch16, v_kind=codes3" in told
    drawn = io.StringIO()
    numkv.show(HeadCompressor(config), file=drawn)
    assert "4 bits, values 3" in drawn.getvalue()


@pytest.mark.parametrize("v_bits", [0, 17, 4.0, True, "4", 10**40])
def test_bad_bits_of_values(v_bits):
    with pytest.raises(ValueError, match=about("v_bits")):
        CompressorConfig(8, 4, v_bits=v_bits)


def test_bits_of_values_are_kept(rng, tmp_path):
    """By copies, pickles and files, after tokens came, were evicted and taken back."""
    cache, x = filled("cpu", np.asarray, rng, 9, OTHER_BITS)
    cache.evict_outside_window(7)
    cache.truncate(5)
    numkv.save(tmp_path / "file", cache)
    others = [copy.copy(cache), pickle.loads(pickle.dumps(cache)), numkv.load(tmp_path / "file")]
    for other in others:
        assert other.config == OTHER_BITS
        assert len(other) == 5
        assert other._quantiser is cache._quantiser
        other.push_token(x[0, 0], x[1, 0])
    cache.push_token(x[0, 0], x[1, 0])
    q = random(rng, 2, HEADS * GROUP, DIM)
    for other in others:
        assert codes_of(other, np.asarray) == codes_of(cache, np.asarray)
        assert np.array_equal(other.attend(q), cache.attend(q))


def header_of(path):
    """The header of a file, as JSON."""
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"][
        "numkv"
    ]


def test_files_of_one_number_of_bits_are_as_they_were(rng, tmp_path):
    """They do not name `v_bits`, so that earlier versions read them, and theirs are read."""
    for config in (CONFIG, OTHER_BITS):
        cache, _ = filled("cpu", np.asarray, rng, 3, config)
        numkv.save(tmp_path / "file", cache)
        assert ("v_bits" in header_of(tmp_path / "file")) == (config is OTHER_BITS)
        assert numkv.load(tmp_path / "file").config == config


def test_old_pickles_have_no_bits_of_values():
    """A config that was made before there were any."""
    config = CompressorConfig(8, 4, 16, 1)
    state = {n: x for n, x in vars(config).items() if n != "v_bits"}
    old = object.__new__(CompressorConfig)
    old.__dict__.update(state)
    assert old == config
    assert hash(old) == hash(config)
    assert pickle.loads(pickle.dumps(old)).v_kind == config.v_kind
