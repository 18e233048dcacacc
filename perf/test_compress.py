"""Compressed heads: attention on codes beside float32 attention over the same vectors, and what encoding costs.

One sequence of one layer, shapes as in README.md. Layers are not cycled through: a compressor of this size, several
times smaller than the vectors, is still larger than most caches.
"""

import numpy as np
import pytest

import numkv
from perf.shapes import SHAPES, attend

#: Bits, signs of the sketch, bits of values.
CONFIGS = {
    "2 bits": (2, None), "3 bits": (3, None), "4 bits": (4, None), "4 bits, 128 signs": (4, 128),
    "8 bits": (8, None), "4 bits, values 3": (4, None, 3),
}  # fmt: skip
#: Time of attention on 4-bit codes in times of float32 attention over the same vectors.
LIMIT = 1.0


def filled(target, rng, config, q_heads, kv_heads, dim, length):
    """A compressor with random tokens, and the vectors ``(kv_heads, length, dim)``."""
    bits, projections, *v_bits = CONFIGS[config]
    cache = numkv.MultiHeadCompressor(
        kv_heads, numkv.CompressorConfig(dim, bits, projections, 0, *v_bits), num_q_heads=q_heads,
        target=target.name,
    )  # fmt: skip
    k, v = rng.standard_normal((2, kv_heads, length, dim), np.float32)
    for t in range(0, length, 4096):
        rows = (target.asarray(np.swapaxes(x[:, t : t + 4096], 0, 1)) for x in (k, v))
        cache.extend(*rows)
    return cache, k, v


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", ["A", "C", "F"])
def test_attend(measure, side_by_side, target, to, rng, shape, config):
    _, q_heads, kv_heads, dim, length, *_ = SHAPES[shape]
    cache, k, v = filled(target, rng, config, q_heads, kv_heads, dim, length)
    q = rng.standard_normal((q_heads, dim), np.float32)
    given, lens = to(q), to(np.array([length]))
    floats = [to(x[None]) for x in (q, k, v)]

    def on_codes():
        return cache.attend(given)

    def on_floats():
        return numkv.decode_attention(*floats, lens)

    keys, values = (target.to_host(x) for x in (cache.decode_keys(), cache.decode_values()))
    decoded = attend(q[:, None], keys, values)[:, 0]
    limit = 1e-4 if CONFIGS[config][1] is None else 0.2
    assert np.linalg.norm(target.to_host(on_codes()) - decoded) < limit * np.linalg.norm(decoded)

    measure(on_codes, len(cache) * cache.bytes_per_token + 2 * q.nbytes, "read")
    side_by_side("codes / fp32", on_codes, on_floats, LIMIT)


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 30.0}, {"window_left": 511}], ids=str)
def test_attend_with_options(measure, side_by_side, target, to, rng, options):
    """Beside float32 attention with the same options."""
    _, q_heads, kv_heads, dim, length, *_ = SHAPES["A"]
    cache, k, v = filled(target, rng, "4 bits", q_heads, kv_heads, dim, length)
    q = rng.standard_normal((q_heads, dim), np.float32)
    given, lens = to(q), to(np.array([length]))
    floats = [to(x[None]) for x in (q, k, v)]
    out, lse = cache.attend(given, return_lse=True, **options)
    weights = np.exp(
        target.to_host(cache.attention_scores(given, **options)) - target.to_host(lse)[:, None]
    )
    values = target.to_host(cache.decode_values()).repeat(q_heads // kv_heads, axis=0)
    wanted = np.einsum("ht,htd->hd", weights, values)
    assert np.linalg.norm(target.to_host(out) - wanted) < 1e-3 * np.linalg.norm(wanted)
    read = min(length, options.get("window_left", length) + 1) * cache.bytes_per_token
    measure(lambda: cache.attend(given, **options), read + 2 * q.nbytes, "read")
    side_by_side(
        "codes / fp32", lambda: cache.attend(given, **options),
        lambda: numkv.decode_attention(*floats, lens, **options), 2 * LIMIT,
    )  # fmt: skip


@pytest.mark.parametrize("queries", [4, 64])
def test_attend_with_several_queries(measure, side_by_side, target, to, rng, queries):
    """One call of the newest tokens' queries beside a call for each."""
    _, q_heads, kv_heads, dim, length, *_ = SHAPES["A"]
    cache, _, _ = filled(target, rng, "4 bits", q_heads, kv_heads, dim, length)
    q = to(rng.standard_normal((queries, q_heads, dim), np.float32))
    each = [to(x) for x in target.to_host(q)]
    assert np.array_equal(
        target.to_host(cache.attend(q))[-1], target.to_host(cache.attend(each[-1]))
    )
    measure(lambda: cache.attend(q), length * cache.bytes_per_token + 8 * q.nbytes, "read")
    side_by_side(
        "together / one by one", lambda: cache.attend(q), lambda: [cache.attend(x) for x in each], 1.1
    )  # fmt: skip


@pytest.mark.parametrize("num_seqs", [8, 32])
def test_attend_with_several_sequences(measure, side_by_side, target, to, rng, num_seqs):
    """Ragged sequences in one call beside a call for each."""
    q_heads, kv_heads, dim = 32, 8, 128
    config = numkv.CompressorConfig(dim, 4)
    many = numkv.PagedCompressor(kv_heads, config, num_q_heads=q_heads, target=target.name)
    each, lengths = [], rng.integers(200, 1000, num_seqs).tolist()
    for length in lengths:
        rows = [to(x) for x in rng.standard_normal((2, length, kv_heads, dim), np.float32)]
        many.extend([many.add()], *rows, length)
        one = numkv.MultiHeadCompressor(kv_heads, config, num_q_heads=q_heads, target=target.name)
        one.extend(*rows)
        each.append(one)
    q = rng.standard_normal((num_seqs, q_heads, dim), np.float32)
    given, apart, seqs = to(q), [to(x) for x in q], many.sequences
    found = target.to_host(many.attend(seqs, given))
    assert np.array_equal(found[-1], target.to_host(each[-1].attend(apart[-1])))
    measure(
        lambda: many.attend(seqs, given), sum(lengths) * many.bytes_per_token + 2 * q.nbytes, "read"
    )
    side_by_side(
        "together / one by one", lambda: many.attend(seqs, given),
        lambda: [one.attend(x) for one, x in zip(each, apart, strict=True)], 1.1,
    )  # fmt: skip


@pytest.mark.parametrize("config", ["4 bits", "4 bits, 128 signs"])
def test_scores(measure, target, to, rng, config):
    _, q_heads, kv_heads, dim, length, *_ = SHAPES["A"]
    cache, k, _ = filled(target, rng, config, q_heads, kv_heads, dim, length)
    q = rng.standard_normal((q_heads, dim), np.float32)
    expected = q[-1] @ k[-1].T / np.sqrt(dim)
    given = to(q)
    assert np.std(target.to_host(cache.attention_scores(given))[-1] - expected) < 0.11

    of_values = kv_heads * (dim * CONFIGS[config][0] // 8 + 4)
    read = length * (cache.bytes_per_token - of_values)
    measure(lambda: cache.attention_scores(given), read + q.nbytes + 4 * q_heads * length, "read")


@pytest.mark.parametrize("tokens", [1, 2048])
@pytest.mark.parametrize("config", ["4 bits", "4 bits, 128 signs"])
def test_extend(measure, target, to, rng, config, tokens):
    kv_heads, dim = 8, 128
    cache, _, _ = filled(target, rng, config, kv_heads, kv_heads, dim, tokens)
    k, v = rng.standard_normal((2, tokens, kv_heads, dim), np.float32)

    given = to(k), to(v)

    def run():
        cache.clear()
        cache.extend(*given)

    run()
    error = np.linalg.norm(target.to_host(cache.decode_values())[0] - v[:, 0]) / np.linalg.norm(
        v[:, 0]
    )
    assert error < 0.12
    measure(run, tokens * (2 * kv_heads * dim * 4 + cache.bytes_per_token), "copy")
