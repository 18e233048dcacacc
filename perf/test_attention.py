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


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_attention(measure, rng, shape, kind):
    batch, q_heads, kv_heads, dim, length = SHAPES[shape]
    size = batch * length * numkv.kind(kind).bytes_per_token(kv_heads, dim)
    layers = max(1, min(64, COLD // size))
    (k, v), scales, values = layers_of_rows(rng, kind, layers, batch, kv_heads, dim, length)
    q = rng.standard_normal((batch, q_heads, dim), np.float32)
    lens = np.full(batch, length)

    def attend(i):
        return numkv.decode_attention(q, k[i], v[i], lens, **{n: x[i] for n, x in scales.items()})

    got = attend(0)
    expected = attend_plainly(q[-1], *values)
    assert np.linalg.norm(got[-1] - expected) < 1e-5 * np.linalg.norm(expected)

    layer = itertools.cycle(range(layers))

    measure(
        lambda: attend(next(layer)),
        traffic.decode_attention(batch, q_heads, kv_heads, dim, length, kind),
        "read",
    )
