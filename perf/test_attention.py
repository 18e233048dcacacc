"""Decode attention: K and V must be read once. Shapes as in README.md."""

import itertools

import numpy as np
import pytest

import numkv
from perf import traffic
from perf.shapes import PLAIN, SHAPES, Shape, attend, causal_flops, cold_layers


def layers_of_rows(rng, kind, layers, batch, kv_heads, dim, length):
    """K, V and their scales for separate layers, as stored, and one sequence's values as floats.

    The rows are random ones of one sequence, used by all: what they hold does not change the work.
    """
    stored, scales, values = [], {}, []
    for which in "kv":
        rows = rng.standard_normal((kv_heads, length, dim), np.float32)
        shape = (layers, batch, *rows.shape)
        if kind == "int8":
            scale = np.abs(rows).max(-1) / np.float32(127)
            rows = np.rint(rows / scale[..., None]).astype(np.int8)
            scales[f"{which}_scale"] = np.empty(shape[:-1], np.float32)
            scales[f"{which}_scale"][:] = scale
            values.append(rows * scale[..., None])
        else:
            rows = rows.astype(numkv.kind(kind).dtype)
            values.append(rows)
        stored.append(np.empty(shape, rows.dtype))
        stored[-1][:] = rows
    return stored, scales, values


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("shape", PLAIN)
def test_decode_attention(measure, target, to, rng, shape, kind):
    batch, q_heads, kv_heads, dim, length, *_ = SHAPES[shape]
    size = batch * length * numkv.kind(kind).bytes_per_token(kv_heads, dim)
    layers = cold_layers(size)
    (k, v), scales, values = layers_of_rows(rng, kind, layers, batch, kv_heads, dim, length)
    q = rng.standard_normal((batch, q_heads, dim), np.float32)
    k, v = ([to(one) for one in x] for x in (k, v))
    scales = {n: [to(one) for one in x] for n, x in scales.items()}
    given, lens = to(q), to(np.full(batch, length))

    def run(i):
        return numkv.decode_attention(
            given, k[i], v[i], lens, **{n: x[i] for n, x in scales.items()}
        )

    got = target.to_host(run(0))
    expected = attend(q[-1][:, None], *values)[:, 0]
    limit = 1e-4 if kind == "int8" else 1e-5  # scores of int8 are integers: q is rounded too
    assert np.linalg.norm(got[-1] - expected) < limit * np.linalg.norm(expected)

    layer = itertools.cycle(range(layers))

    measure(
        lambda: run(next(layer)),
        traffic.decode_attention(batch, q_heads, kv_heads, dim, length, kind),
        "read",
    )


@pytest.mark.parametrize(("tokens", "length"), [(1024, 1024), (256, 8192)])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_prefill_attention(benchmark, finished, note, target, to, rng, kind, tokens, length):
    """A causal prompt of one sequence, or the last chunk of a long one, by arithmetic."""
    shape = Shape(1, 8, 2, 64, length)
    dtype = numkv.kind(kind).dtype
    q = rng.standard_normal((tokens, shape.q_heads, shape.dim), np.float32).astype(dtype)
    k, v = (
        rng.standard_normal((1, shape.kv_heads, shape.length, shape.dim), np.float32).astype(dtype)
        for _ in range(2)
    )
    given = [to(x) for x in (q, k, v, np.array([shape.length]), np.array([0, tokens]))]
    got = target.to_host(numkv.prefill_attention(*given)).astype(np.float64)
    expected = attend(q.swapaxes(0, 1), k[0], v[0], causal=True).swapaxes(0, 1)
    limit = 1e-5 if kind == "fp32" else 1e-2
    assert np.linalg.norm(got - expected) < limit * np.linalg.norm(expected)

    benchmark(finished(lambda: numkv.prefill_attention(*given)))
    if benchmark.enabled:
        flops = causal_flops(shape) - causal_flops(shape._replace(length=length - tokens))
        rate = flops / benchmark.stats.stats.median / 1e9
        note(f"prefill of {tokens} of {length} tokens, {kind}: {rate:.0f} GFLOP/s")
