"""Merging partial results: both are read once, the result is written once."""

import numpy as np
import pytest

import numkv

HEADS, DIM = 32, 128


@pytest.mark.parametrize("tokens", [1, 2048])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_merge_states(measure, target, to, rng, kind, tokens):
    dtype = numkv.kind(kind).dtype
    o = rng.standard_normal((2, tokens, HEADS, DIM), np.float32).astype(dtype)
    lse = rng.standard_normal((2, tokens, HEADS), np.float32)
    parts = [x for i in range(2) for x in (target.words(to(o[i])), to(lse[i]))]
    out, total = target.empty(o.shape[1:], numkv.kind(kind).word), to(np.zeros_like(lse[0]))

    def run():
        target.ops.merge_states(*parts, kind, out, total)

    run()
    weights = np.exp(lse.astype(np.float64))[..., None]
    expected = (weights * o.astype(np.float64)).sum(0) / weights.sum(0)
    got = target.to_host(target.typed(out, dtype)).astype(np.float64)
    assert np.linalg.norm(got - expected) < 4e-3 * np.linalg.norm(expected)
    measure(run, 3 * (o[0].nbytes + lse[0].nbytes), "copy")
