"""Dropping tokens: rows that stay are read once and written once; weights need the keys once more."""

import numpy as np
import pytest

import numkv
from perf import traffic

HEADS, DIM, TOKENS = 8, 128, 8192


def filled(rng, kind):
    """A layer, and the keys that it holds, as stored."""
    layer = numkv.ContiguousLayer(TOKENS, HEADS, DIM, kind=kind)
    rows = rng.standard_normal((TOKENS, HEADS, DIM), np.float32)
    layer.append(rows, rows)
    return layer, layer.k[0].copy()


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_compact(measure, rng, kind):
    """All tokens but the first move by one place."""
    layer, before = filled(rng, kind)
    keep = np.arange(1, TOKENS)
    layer.compact(keep)
    assert np.array_equal(layer.k[0, :, : TOKENS - 1], before[:, 1:])

    def run():
        layer.seq_len = TOKENS
        layer.compact(keep)

    measure(run, traffic.compact(TOKENS - 1, HEADS, DIM, kind), "copy")


@pytest.mark.parametrize("queries", [1, 32])
@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_attention_weights(measure, rng, kind, queries):
    layer, _ = filled(rng, kind)
    q = rng.standard_normal((queries, 4 * HEADS, DIM), np.float32)
    _, lse = layer.decode_attention(q, return_lse=True)
    weights = layer.attention_weights(q, lse=lse)
    np.testing.assert_allclose(weights.sum(axis=1), 4 * queries, rtol=1e-3)
    moved = traffic.attention_weights(queries, 4 * HEADS, HEADS, DIM, TOKENS, kind)
    measure(lambda: layer.attention_weights(q, lse=lse), moved, "read")
