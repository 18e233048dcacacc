"""Decode attention: K and V must be read once. Shapes as in README.md."""

import itertools

import numpy as np
import pytest

import numkv
from perf import traffic

SHAPES = {
    "A": (1, 32, 8, 128, 32768),
    "B": (8, 32, 8, 128, 4096),
    "C": (1, 32, 32, 128, 4096),
    "D": (32, 32, 8, 128, 1024),
    "E": (1, 14, 2, 64, 32768),
    "F": (1, 32, 8, 128, 512),
}
COLD = 256 << 20  # bytes of separate layers to cycle through


def attend_plainly(q, k, v):
    """One sequence's decode attention in float64."""
    group = q.shape[0] // k.shape[0]
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (k, v))
    scores = np.einsum("hd,hnd->hn", q.astype(np.float64), k) / np.sqrt(q.shape[1])
    p = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("hn,hnd->hd", p / p.sum(1, keepdims=True), v)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_attention(measure, rng, shape, kind):
    batch, q_heads, kv_heads, dim, length = SHAPES[shape]
    dtype = numkv.kind(kind).dtype
    size = batch * length * numkv.kind(kind).bytes_per_token(kv_heads, dim)
    layers = max(1, min(64, COLD // size))
    # Random rows for one sequence, used by all: what they hold does not change the work.
    k, v = (np.empty((layers, batch, kv_heads, length, dim), dtype) for _ in range(2))
    k[:], v[:] = (rng.standard_normal((kv_heads, length, dim), np.float32) for _ in range(2))
    q = rng.standard_normal((batch, q_heads, dim), np.float32)
    lens = np.full(batch, length)

    got = numkv.decode_attention(q, k[0], v[0], lens)
    expected = attend_plainly(q[-1], k[0, -1], v[0, -1])
    assert np.linalg.norm(got[-1] - expected) < 1e-5 * np.linalg.norm(expected)

    layer = itertools.cycle(range(layers))

    def run():
        i = next(layer)
        numkv.decode_attention(q, k[i], v[i], lens)

    measure(run, traffic.decode_attention(batch, q_heads, kv_heads, dim, length, kind), "read")
