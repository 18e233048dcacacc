"""Attention mass per token: the keys are read once."""

import numpy as np
import pytest

import numkv
from perf import traffic

HEADS, DIM, TOKENS = 8, 128, 8192


@pytest.mark.parametrize("queries", [1, 32])
@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_attention_weights(measure, target, to, rng, kind, queries):
    layer = numkv.ContiguousLayer(TOKENS, HEADS, DIM, kind=kind, target=target.name)
    rows = to(rng.standard_normal((TOKENS, HEADS, DIM), np.float32))
    layer.append(rows, rows)
    q = to(rng.standard_normal((queries, 4 * HEADS, DIM), np.float32))
    _, lse = layer.decode_attention(q, return_lse=True)
    weights = target.to_host(layer.attention_weights(q, lse=lse))
    np.testing.assert_allclose(weights.sum(axis=1), 4 * queries, rtol=1e-3)
    moved = traffic.attention_weights(queries, 4 * HEADS, HEADS, DIM, TOKENS, kind)
    measure(lambda: layer.attention_weights(q, lse=lse), moved, "read")
