"""Appending ready rows: rows are read once and written once."""

import numpy as np
import pytest

import numkv
from perf import traffic


def check_sums(target, layer, rows):
    """Attention of even weights gives the mean of the rows, in whatever way their codes lie."""
    even = target.asarray(np.zeros((1, *rows.shape[1:]), np.float32))
    got = target.to_host(layer.decode_attention(even))[0]
    error = np.linalg.norm(got - rows.mean(0))
    assert error < 0.15 * np.linalg.norm(rows.mean(0))


@pytest.mark.parametrize("tokens", [1, 2048])
@pytest.mark.parametrize(
    "kind", ["fp32", "fp16", "bf16", "fp8_e4m3", "int8", "int4", "code4", "code6"]
)
def test_append(measure, target, to, rng, kind, tokens):
    heads, dim = 8, 128
    layer = numkv.ContiguousLayer(4096, heads, dim, kind=kind, target=target.name)
    rows = rng.standard_normal((tokens, heads, dim), np.float32)

    given = to(rows)
    layer.append(given, given)
    expected = rows.astype(numkv.kind(kind).dtype).transpose(1, 0, 2)
    got = target.to_host(layer.k)[0, :, :tokens]
    if kind == "int8":
        scale = target.to_host(layer.k_scale)[0, :, :tokens, None]
        assert np.all(np.abs(got * scale - expected) <= 0.501 * scale)
    elif numkv.kind(kind).is_packed:
        check_sums(target, layer, rows)
    else:
        assert np.array_equal(got, expected)

    def run():
        layer.seq_len = 0
        layer.append(given, given)

    measure(run, traffic.append(tokens, heads, dim, kind, 4), "copy")


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_paged_prompt(measure, target, to, rng, kind):
    """A prompt of four sequences into the blocks of a cache, by slots."""
    heads, dim, each = 8, 128, 512
    cache = numkv.PagedKVCache(
        1, heads, dim, num_blocks=4 * each // 128, kind=kind, target=target.name
    )
    seqs = [cache.add() for _ in range(4)]
    rows = rng.standard_normal((4 * each, heads, dim), np.float32)
    given, step = to(rows), cache.reserve(seqs, each)

    step.append(0, given, given)
    even = to(np.zeros((4 * each, heads, dim), np.float32))
    means = target.to_host(step.attention(0, even))[each - 1 :: each]
    assert np.allclose(means, rows.reshape(4, each, heads, dim).mean(1), atol=2e-3)

    moved = traffic.append(4 * each, heads, dim, kind, 4) + 8 * 4 * each
    measure(lambda: step.append(0, given, given), moved, "copy")


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_plan(measure, target, to, rng, kind):
    batch, heads, new, length, dim = 8, 8, 512, 4096, 128
    dtype = numkv.kind(kind).dtype
    k_new, v_new = (rng.standard_normal((batch, heads, new, dim)).astype(dtype) for _ in range(2))
    k, v = (np.zeros((batch, heads, length, dim), dtype) for _ in range(2))
    offsets = np.full(batch, 100)
    args = numkv.AppendArgs(*map(to, (k_new, v_new, k, v, offsets)))
    plan = numkv.AppendPlan.select(
        numkv.AppendDescriptor(batch, heads, new, length, dim, dim, dtype), target=target.name
    )

    plan.run(args)
    assert np.array_equal(target.to_host(args.k_cache)[:, :, 100 : 100 + new], k_new)

    measure(lambda: plan.run(args), 2 * (k_new.nbytes + v_new.nbytes), "copy")
