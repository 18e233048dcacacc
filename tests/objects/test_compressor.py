"""`HeadCompressor` and `MultiHeadCompressor`: what they are for, and the facts of the reference system that hold."""

import copy
import math

import naive
import numpy as np
import pytest
import tolerances
from walked import each

from numkv import CompressorConfig, HeadCompressor, MultiHeadCompressor

CONFIG = CompressorConfig(8, 4, 16, 42)


def vectors(tokens, dim):
    """The reference system's own test vectors."""
    return np.sin(1.7 * np.arange(tokens)[:, None] + 0.3 * np.arange(dim)).astype(np.float32)


def unit(rng, n, dim):
    x = rng.standard_normal((n, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def stored(compressor, host):
    """All that is stored, as bytes."""
    live = slice(compressor._stored.begin, compressor._stored.end)
    buffers = (*compressor._stored.keys, *compressor._stored.values)
    return [host(x)[:, live].tobytes() for x in buffers]


# ---------------------------------------------------------------- the reference system's own facts


def test_fresh(target, to, host):
    head = HeadCompressor(CONFIG, target=target)
    assert (len(head), head.is_empty, head.compression_ratio) == (0, True, 1.0)
    assert host(head.attention_scores(to(vectors(1, 8)[0]))).shape == (0,)
    assert host(head.decode_values()).shape == host(head.decode_keys()).shape == (0, 8)
    assert np.array_equal(host(head.attend(to(vectors(1, 8)[0]))), np.zeros(8))


def test_push(target, to, host):
    head = HeadCompressor(CONFIG, target=target)
    head.push(to(np.full(8, 0.1, np.float32)), to(np.full(8, 0.2, np.float32)))
    assert (len(head), head.is_empty) == (1, False)
    for _ in range(4):
        head.push(to(np.full(8, 0.1, np.float32)), to(np.full(8, 0.2, np.float32)))
    scores = host(head.attention_scores(to(np.full(8, 0.1, np.float32))))
    assert (scores.shape, scores.dtype) == ((5,), np.float32)
    assert np.all(scores == scores[0])
    assert host(head.decode_values()).shape == (5, 8)
    assert head.compression_ratio > 0
    head.clear()
    assert (len(head), head.is_empty, head.compression_ratio) == (0, True, 1.0)
    assert host(head.attention_scores(to(vectors(1, 8)[0]))).shape == (0,)


def test_many_tokens(target, to, host):
    tokens = 50 if target == "cpu" else 20
    head = HeadCompressor(CompressorConfig(64, 4, 16, 42), target=target)
    x = vectors(tokens, 64)
    head.extend(to(x), to(x))
    scores = host(head.attention_scores(to(x[0])))
    assert scores.shape == (tokens,)
    assert np.all(np.isfinite(scores))


def test_several_heads(target, to, host):
    cache = MultiHeadCompressor(4, CompressorConfig(64, 4, 16, 7), target=target)
    x = vectors(4, 64)
    for _ in range(10 if target == "cpu" else 2):
        cache.push_token(to(x), to(x))
    scores = host(cache.attention_scores(to(x)))
    assert scores.shape == (4, len(cache))
    assert np.all(np.isfinite(scores))


@pytest.mark.parametrize(("bits", "projections"), [(4, 1), (1, None), (16, None), (16, 3)])
def test_two_dimensions(target, to, host, rng, bits, projections):
    head = HeadCompressor(CompressorConfig(2, bits, projections), target=target)
    x = unit(rng, 9, 2)
    head.extend(to(x), to(x))
    error = np.mean(np.sum((host(head.decode_values()) - x) ** 2, axis=1))
    assert error < {1: 0.4, 4: 0.01, 16: 1e-8}[bits]


@pytest.mark.parametrize("dim", [1, 3, 7])
def test_odd_dimensions_are_fine(target, to, host, rng, dim):
    head = HeadCompressor(CompressorConfig(dim, 8), target=target)
    x = rng.standard_normal((4, dim), np.float32)
    head.extend(to(x), to(x))
    assert np.allclose(host(head.decode_keys()), x, atol=0.02)


def test_a_zero_vector_stays_one(target, to, host):
    head = HeadCompressor(CONFIG, target=target)
    head.push(to(np.zeros(8, np.float32)), to(np.zeros(8, np.float32)))
    assert np.all(host(head.decode_values()) == 0)
    assert host(head.attention_scores(to(np.ones(8, np.float32)))) == 0
    assert np.all(host(head.attend(to(np.ones(8, np.float32)))) == 0)


def test_same_seed_same_bytes(target, to, host, rng):
    x = rng.standard_normal((3, 2, 8), np.float32)

    def of(seed, heads=2):
        cache = MultiHeadCompressor(heads, CompressorConfig(8, 4, 16, seed), target=target)
        cache.extend(to(x[:, :heads]), to(x[:, :heads]))
        return stored(cache, host)

    assert of(42) == of(42)
    assert all(a != b for a, b in zip(of(42), of(43), strict=True) if a)
    # A head's numbers do not depend on how many there are.
    assert all(a.startswith(b) for a, b in zip(of(42), of(42, 1), strict=True))
    assert of(2**80) == of(2**80)


def test_every_head_has_its_own_numbers(target, to, host, rng):
    """The same vector in all heads, and no two heads of two seeds store the same."""
    x = np.repeat(rng.standard_normal((2, 1, 8), np.float32), 3, axis=1)
    seen = []
    for seed in (0, 1, 2):
        cache = MultiHeadCompressor(3, CompressorConfig(8, 8, 16, seed), target=target)
        cache.extend(to(x), to(x))
        seen += [tuple(h.ravel()) for h in host(cache._stored.keys.codes)]
        seen += [tuple(h.ravel()) for h in host(cache._stored.keys.signs)]
    assert len(set(seen)) == len(seen)


def test_rotation_and_sketch_are_different_numbers():
    """What a head turns by is not what any head looks for."""
    quantiser = MultiHeadCompressor(3, CompressorConfig(16, 4, 16, 5))._quantiser
    matrices = [
        *quantiser.rotation,
        *(quantiser.sketch / np.linalg.norm(quantiser.sketch[0, :, 0])),
    ]
    for i, a in enumerate(matrices):
        assert np.allclose(a.T @ a, np.eye(16), atol=1e-5)
        for b in matrices[:i]:
            assert np.abs(a - b).max() > 0.1


def test_the_head_of_one_is_head_0(target, to, host, rng):
    x = rng.standard_normal((4, 8), np.float32)
    one, several = (
        HeadCompressor(CONFIG, target=target),
        MultiHeadCompressor(1, CONFIG, target=target),
    )
    one.extend(to(x), to(x))
    several.extend(to(x[:, None]), to(x[:, None]))
    assert stored(one, host) == stored(several, host)
    assert np.array_equal(
        host(one.attention_scores(to(x[0]))), host(several.attention_scores(to(x[:1])))[0]
    )
    assert np.array_equal(host(one.attend(to(x[0]))), host(several.attend(to(x[:1])))[0])


def test_query_heads_share_a_kv_head(target, to, host, rng):
    cache = MultiHeadCompressor(2, CONFIG, num_q_heads=8, target=target)
    x = rng.standard_normal((3, 2, 8), np.float32)
    cache.extend(to(x), to(x))
    assert (cache.num_heads, cache.num_q_heads) == (2, 8)
    q = np.repeat(x[0, :1], 8, axis=0)
    for read in (cache.attention_scores, cache.attend):
        out = host(read(to(q)))
        assert len(out) == 8
        assert np.allclose(out[:4], out[0], atol=1e-6)
        assert np.allclose(out[4:], out[4], atol=1e-6)
        assert not np.allclose(out[0], out[4], atol=1e-3)


# ---------------------------------------------------------------- sizes


@each("dim", [1, 8, 13, 128])
@each("bits", [1, 3, 4, 8, 16])
@each("projections", [None, 1, 13, 32])
def test_bytes_are_those_of_the_packed_codes(dim, bits, projections):
    cache = MultiHeadCompressor(3, CompressorConfig(dim, bits, projections))
    vector = -(-dim * bits // 8) + 4
    sketch = 0 if projections is None else -(-projections // 8) + 4
    assert cache.bytes_per_token == 3 * (2 * vector + sketch)
    x = np.ones((5, 3, dim), np.float32)
    cache.extend(x, x)
    assert cache.nbytes == cache.capacity * cache.bytes_per_token  # of the arrays themselves
    assert cache.compression_ratio == pytest.approx(2 * dim * 4 / (2 * vector + sketch))


def test_four_bits_are_more_than_seven_times_smaller(rng):
    """As measured: bytes of the arrays that hold the codes and scales, against the float32 vectors."""
    head = HeadCompressor(CompressorConfig(128, 4))
    x = rng.standard_normal((1024, 128), np.float32)
    head.extend(x, x)
    assert head.capacity == 1024
    measured = 2 * x.nbytes / head.nbytes
    assert measured == pytest.approx(head.compression_ratio)
    assert measured > 7.5
    with_sketch = HeadCompressor(CompressorConfig(128, 4, 128))
    with_sketch.extend(x, x)
    assert with_sketch.compression_ratio > 6


def test_more_bits_are_larger():
    ratios = []
    for bits in range(1, 17):
        head = HeadCompressor(CompressorConfig(128, bits))
        head.push(np.ones(128, np.float32), np.ones(128, np.float32))
        ratios.append(head.compression_ratio)
    assert ratios == sorted(ratios, reverse=True)
    assert len(set(ratios)) == 16


def test_small_vectors_can_grow():
    """A ratio may be below 1: one element costs a float32 scale too."""
    head = HeadCompressor(CompressorConfig(1, 1))
    head.push(np.ones(1, np.float32), np.ones(1, np.float32))
    assert head.compression_ratio == 0.8


# ---------------------------------------------------------------- accuracy


# Mean squared errors of the best quantiser of a normal coordinate: Max (1960), table I; 6 bits: Lloyd.
NORMAL = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.000644}


def test_error_of_unit_vectors(rng):
    errors = {}
    x = unit(rng, 4000, 128)
    for bits in range(1, 9):
        head = HeadCompressor(CompressorConfig(128, bits, seed=bits))
        head.extend(x, x)
        errors[bits] = np.mean(np.sum((head.decode_values().astype(np.float64) - x) ** 2, axis=1))
    for bits, bound in NORMAL.items():
        assert errors[bits] <= bound  # 1.2 times as much would do
        assert errors[bits] >= 0.9 * bound
    falls = [errors[bits] / errors[bits + 1] for bits in range(1, 8)]
    assert all(3 < fall < 4.1 for fall in falls)
    assert all(fall > 3.7 for fall in falls[3:])


def test_error_of_any_vectors_is_that_of_random_ones(rng):
    """Rotation spreads a vector with few large elements, or none."""
    x = np.zeros((600, 128), np.float32)
    x[:200, 3] = 1
    x[200:400] = 1 / np.sqrt(128)
    x[400:] = unit(rng, 200, 128)
    x[400:, 7] *= 20
    errors = []
    for seed in range(10):
        head = HeadCompressor(CompressorConfig(128, 4, seed=seed))
        head.extend(x, x)
        error = np.sum((head.decode_keys().astype(np.float64) - x) ** 2, axis=1)
        errors.append(error / np.sum(x.astype(np.float64) ** 2, axis=1))
    errors = np.array(errors)
    for part in (errors[:, :1], errors[:, 200:201], errors[:, 400:]):
        assert 0.006 < part.mean() < 0.0125


def test_the_decoded_vector_is_the_best_multiple(rng):
    """What is left over is orthogonal to it, at every width and length."""
    for bits in (1, 2, 4, 8):
        head = HeadCompressor(CompressorConfig(24, bits))
        x = rng.standard_normal((50, 24), np.float32)
        head.extend(x, 1000 * x)
        k, v = head.decode_keys().astype(np.float64), head.decode_values().astype(np.float64)
        size = np.linalg.norm(x, axis=1)
        assert np.all(np.abs(np.sum(k * (x - k), axis=1)) < 1e-5 * size**2)
        assert np.allclose(v, 1000 * k, rtol=1e-4, atol=1e-3)


def pair_errors(projections, bits=2, dim=128, seeds=25, pairs=400):
    """Errors of the score estimates of pairs whose vectors lean towards each other; each seed has its own."""
    errors = []
    for seed in range(seeds):
        rng = np.random.default_rng(1000 + seed)
        q = unit(rng, pairs, dim)
        k = 0.5 * q + np.sqrt(0.75) * unit(rng, pairs, dim)
        cache = MultiHeadCompressor(
            1, CompressorConfig(dim, bits, projections, seed), num_q_heads=pairs
        )
        cache.extend(k[:, None], k[:, None])
        estimates = np.diagonal(cache.attention_scores(q)).astype(np.float64)
        errors.append(estimates - np.sum(q.astype(np.float64) * k, axis=1) / math.sqrt(dim))
    return np.array(errors)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [pytest.param(1, marks=pytest.mark.nightly), 2, 4])
def test_the_sketch_makes_scores_unbiased(bits):
    """Over 10,000 pairs the mean error is what chance gives; without a sketch it is far from that."""

    def deviation(errors):
        return abs(errors.mean()) / (errors.std() / np.sqrt(errors.size))

    without, with_sketch = pair_errors(None, bits), pair_errors(128, bits)
    assert without.size == with_sketch.size == 10_000
    assert deviation(without) > 20
    assert deviation(with_sketch) < 3  # standard errors
    # One projection an element, and the error of a score is smaller than without.
    assert np.mean(with_sketch**2) < 0.7 * np.mean(without**2)


def test_few_projections_are_unbiased_too():
    """Over their own randomness: each seed's pairs share one sketch, so seeds are what there is to count."""
    by_seed = pair_errors(5, bits=1, dim=16, seeds=400, pairs=25).mean(axis=1)
    assert abs(by_seed.mean()) < 3 * by_seed.std() / np.sqrt(len(by_seed))
    without = pair_errors(None, bits=1, dim=16, seeds=400, pairs=25).mean(axis=1)
    assert abs(without.mean()) > 20 * without.std() / np.sqrt(len(without))


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("bits", [2, 4])
def test_scores_are_products_with_decoded_keys(target, to, host, rng, bits):
    cache = MultiHeadCompressor(2, CompressorConfig(12, bits), num_q_heads=4, target=target)
    x = rng.standard_normal((2, 7, 2, 12), np.float32)
    q = rng.standard_normal((4, 12), np.float32)
    cache.extend(to(x[0]), to(x[1]))
    k = np.repeat(host(cache.decode_keys()).astype(np.float64), 2, axis=0)
    expected = np.einsum("htd,hd->ht", k, q) / np.sqrt(12)
    assert np.allclose(host(cache.attention_scores(to(q))), expected, atol=2e-6)


@pytest.mark.parametrize("projections", [None, 12])
def test_attend_weighs_decoded_values(target, to, host, rng, projections):
    config = CompressorConfig(12, 4, projections)
    cache = MultiHeadCompressor(2, config, num_q_heads=6, target=target)
    x = rng.standard_normal((2, 20, 2, 12), np.float32)
    q = rng.standard_normal((6, 12), np.float32)
    cache.extend(to(x[0]), to(x[1]))
    scores = host(cache.attention_scores(to(q))).astype(np.float64)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    v = np.repeat(host(cache.decode_values()).astype(np.float64), 3, axis=0)
    got = host(cache.attend(to(q)))
    assert got.dtype == np.float32
    tolerances.assert_rows_close(got, np.einsum("ht,htd->hd", weights, v), 1e-5)


def test_attention_comes_near_to_that_of_the_vectors(rng):
    k, v = rng.standard_normal((2, 2000, 128), np.float32)
    q = rng.standard_normal(128, np.float32)
    expected, _ = naive.attention_row(
        q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), 128**-0.5, 0.0, None
    )
    errors = {}
    for bits in (2, 4, 8):
        head = HeadCompressor(CompressorConfig(128, bits))
        head.extend(k, v)
        errors[bits] = np.linalg.norm(head.attend(q) - expected) / np.linalg.norm(expected)
    assert errors[2] < 0.6
    assert errors[4] < 0.18
    assert errors[8] < 0.02


@pytest.mark.parametrize("kind", ["fp64", "fp16", "bf16"])
def test_vectors_of_every_float_dtype(target, to, host, rng, kind):
    x = naive.round_to(rng.standard_normal((3, 8)), kind)
    head, same = (HeadCompressor(CONFIG, target=target) for _ in range(2))
    head.extend(to(x), to(x))
    single = x.astype(np.float32)
    same.extend(to(single), to(single))
    near = [np.frombuffer(a, np.uint8) == np.frombuffer(b, np.uint8)
            for a, b in zip(stored(head, host), stored(same, host), strict=True)]  # fmt: skip
    assert all(np.mean(n) > 0.9 for n in near if n.size)
    for read in ("attention_scores", "attend"):
        a, b = (host(getattr(head, read)(to(q))) for q in (x[0], single[0]))
        assert np.allclose(a, b, atol=1e-5)


def test_strided_vectors(target, to, host, rng):
    wide = rng.standard_normal((6, 4, 16), np.float32)
    cache, same = (MultiHeadCompressor(2, CONFIG, target=target) for _ in range(2))
    cache.extend(to(wide)[::2, 1:3, 4:12], to(wide)[1::2, ::2, :8])
    plain = np.ascontiguousarray(wide[::2, 1:3, 4:12]), np.ascontiguousarray(wide[1::2, ::2, :8])
    same.extend(to(plain[0]), to(plain[1]))
    cache.push_token(to(wide)[0, ::2, 8:], to(wide)[1, 2:, :8])
    plain = np.ascontiguousarray(wide[0, ::2, 8:]), np.ascontiguousarray(wide[1, 2:, :8])
    same.push_token(to(plain[0]), to(plain[1]))
    assert stored(cache, host) == stored(same, host)
    strided = host(cache.attention_scores(to(wide)[0, ::2, 8:]))
    assert np.array_equal(strided, host(same.attention_scores(to(plain[0]))))


# ---------------------------------------------------------------- which tokens


def test_extend_is_push_by_push(target, to, host, rng):
    x = rng.standard_normal((2, 11, 8), np.float32)
    once, steps = (HeadCompressor(CONFIG, target=target) for _ in range(2))
    once.extend(to(x[0]), to(x[1]))
    for k, v in zip(x[0], x[1], strict=True):
        steps.push(to(k), to(v))
    once.extend(to(x[0, :0]), to(x[1, :0]))
    assert stored(once, host) == stored(steps, host)


def test_room_grows_geometrically():
    head = HeadCompressor(CONFIG)
    x = np.ones(8, np.float32)
    capacities = set()
    for _ in range(1000):
        head.push(x, x)
        capacities.add(head.capacity)
    assert len(capacities) <= 8
    assert head.capacity <= 2048


def test_a_window_of_tokens(target, to, host, rng):
    x = rng.standard_normal((5, 2, 8), np.float32)
    cache = MultiHeadCompressor(2, CONFIG, target=target)
    cache.extend(to(x), to(x))
    before = host(cache.decode_keys()), host(cache.decode_values())
    scores = host(cache.attention_scores(to(x[0])))
    cache.evict_outside_window(9)
    assert len(cache) == 5
    cache.evict_outside_window(3)
    assert len(cache) == 3
    assert np.array_equal(host(cache.decode_keys()), before[0][:, -3:])
    assert np.array_equal(host(cache.decode_values()), before[1][:, -3:])
    assert np.array_equal(host(cache.attention_scores(to(x[0]))), scores[:, -3:])
    cache.evict_outside_window(0)
    assert cache.is_empty
    cache.push_token(to(x[1]), to(x[1]))
    assert np.array_equal(host(cache.decode_keys()), before[0][:, 1:2])


def test_a_sliding_window_needs_no_more_room(target, to, host, rng):
    """Evicted tokens make room for new ones, and nothing is lost on the way."""
    tokens, window = (300, 10) if target == "cpu" else (40, 10)
    x = rng.standard_normal((tokens, 8), np.float32)
    head, all_of_them = (HeadCompressor(CONFIG, target=target) for _ in range(2))
    for row in x:
        head.push(to(row), to(row))
        head.evict_outside_window(window)
    all_of_them.extend(to(x), to(x))
    assert len(head) == window
    assert head.capacity <= 32
    assert np.array_equal(host(head.decode_keys()), host(all_of_them.decode_keys())[-window:])


def test_clear_keeps_the_quantiser(target, to, host, rng):
    x = rng.standard_normal((3, 8), np.float32)
    head = HeadCompressor(CONFIG, target=target)
    head.extend(to(x), to(x))
    before, capacity = stored(head, host), head.capacity
    head.clear()
    head.extend(to(x), to(x))
    assert stored(head, host) == before
    assert head.capacity == capacity


@pytest.mark.parametrize(
    "make",
    [copy.copy, copy.deepcopy, lambda c: c.copy()],
    ids=["copy.copy", "copy.deepcopy", "method"],
)
def test_a_copy_is_deep(target, to, host, rng, make):
    x = rng.standard_normal((4, 8), np.float32)
    head = HeadCompressor(CONFIG, target=target)
    head.extend(to(x[:3]), to(x[:3]))
    head.evict_outside_window(2)
    other = make(head)
    assert type(other) is HeadCompressor
    before = stored(head, host)
    assert stored(other, host) == before
    other.push(to(x[3]), to(x[3]))
    other.evict_outside_window(1)
    assert (len(head), len(other)) == (2, 1)
    assert stored(head, host) == before
    head.clear()
    head.push(to(x[0]), to(x[0]))
    assert np.allclose(host(other.decode_keys())[0], x[3], atol=0.6)


def test_equal_configs_share_their_matrices():
    a, b = (MultiHeadCompressor(2, CompressorConfig(8, 4, 16, 42)) for _ in range(2))
    assert a._quantiser is b._quantiser
    assert MultiHeadCompressor(2, CompressorConfig(8, 5, 16, 42))._quantiser is not a._quantiser
    floats = 2 * (2 * 8 * 8 + 8 * 16) + 16 + 15
    assert a.quantiser_nbytes == 4 * floats


def test_what_it_says_of_itself(target):
    head = HeadCompressor(CompressorConfig(8), target=target)
    assert repr(head) == (
        f"HeadCompressor(len=0, head_dim=8, bits=4, seed=0, kind=codes4, target={target}, "
        "bytes_per_token=16, nbytes=0)"
    )
    cache = MultiHeadCompressor(2, CONFIG, num_q_heads=4, target=target)
    assert "num_heads=2, num_q_heads=4, head_dim=8, bits=4, projections=16" in repr(cache)
    assert (cache.config, cache.target, head.capacity) == (CONFIG, target, 0)


@pytest.mark.parametrize(("bits", "projections"), [(4, 16), (3, None), (16, 5)])
def test_codes_can_be_read_out(target, to, host, rng, bits, projections):
    """They are what `decode_keys` decodes: levels by number, times a scale, rotated back; copies of the live tokens."""
    import naive_codes

    config = CompressorConfig(6, bits, projections, 1)
    cache = MultiHeadCompressor(2, config, target=target)
    x = rng.standard_normal((5, 2, 6), np.float32)
    cache.extend(to(x), to(x))
    cache.evict_outside_window(3)
    levels, rotation = host(cache._quantiser.levels), host(cache._quantiser.rotation)
    for stored, decoded in (
        (cache.key_codes, cache.decode_keys()), (cache.value_codes, cache.decode_values()),
    ):  # fmt: skip
        codes, scales, signs, residuals = (host(part) for part in stored)
        assert codes.shape == (2, 3, (6 * bits + 7) // 8)
        assert scales.shape == (2, 3)
        numbers = naive_codes.unpack(codes, 6, bits)
        want = naive_codes.decode(numbers, scales, levels, rotation)
        assert np.allclose(host(decoded), want, rtol=1e-5, atol=1e-6)
        sketched = projections is not None and stored is not None and signs.shape[2] > 0
        assert (residuals.shape == (2, 3)) == sketched
    assert host(cache.key_codes.signs).shape[2] == ((projections or 0) + 7) // 8
    assert host(cache.value_codes.signs).shape[2] == 0
    before = host(cache.key_codes.scales).copy()
    held = cache.key_codes
    cache.clear()
    cache.extend(to(-x), to(x))
    assert np.array_equal(host(held.scales), before)


def test_codes_of_one_head(target, to, host, rng):
    head, cache = (
        HeadCompressor(CONFIG, target=target),
        MultiHeadCompressor(1, CONFIG, target=target),
    )
    assert [host(part).shape for part in head.key_codes] == [(0, 4), (0,), (0, 2), (0,)]
    x = rng.standard_normal((3, 1, 8), np.float32)
    head.extend(to(x[:, 0].copy()), to(x[:, 0].copy()))
    cache.extend(to(x), to(x))
    for name in ("key_codes", "value_codes"):
        for mine, theirs in zip(getattr(head, name), getattr(cache, name), strict=True):
            assert np.array_equal(host(mine), host(theirs)[0])


def test_a_kind_of_codes():
    head = HeadCompressor(CompressorConfig(128, 4, 16))
    assert (str(head.kind), str(head.v_kind)) == ("codes4+sketch16", "codes4")
    assert head.kind.row_bytes(128) == 64 + 4 + 2 + 4
    assert head.v_kind.row_bytes(128) == 68
    assert head.bytes_per_token == 68 + 74
    assert head.kind == HeadCompressor(CompressorConfig(8, 4, 16)).kind != head.v_kind
