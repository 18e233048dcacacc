"""A prefix that sequences share: read once for all of them, beside once for each.

Contestants take turns, as the machine's speed drifts; the ratio of their medians is what counts.
"""

import math

import numpy as np
import pytest

import numkv

SHARED, OWN, BLOCK, DIM = 8192, 64, 16, 128


def problem(rng, num_seqs, heads, kv_heads, kind):
    """Arrays of a call: queries, pools, a table, lengths; and scales."""
    prefix, own = SHARED // BLOCK, OWN // BLOCK
    blocks = prefix + num_seqs * own
    order = rng.permutation(blocks).astype(np.int32)
    table = np.array(
        [[*range(prefix), *(prefix + s * own + np.arange(own))] for s in range(num_seqs)]
    )
    shape, scales = (blocks, kv_heads, BLOCK, DIM), {}
    rows = [rng.standard_normal(shape, np.float32) for _ in range(2)]
    if kind == "int8":
        scales = {
            n: np.abs(x).max(-1).astype(np.float32) / 127
            for n, x in zip(("k_scale", "v_scale"), rows, strict=True)
        }
        rows = [
            np.rint(x / s[..., None]).astype(np.int8)
            for x, s in zip(rows, scales.values(), strict=True)
        ]
    else:
        rows = [x.astype(numkv.kind(kind).dtype) for x in rows]
    q = rng.standard_normal((num_seqs, heads, DIM), np.float32)
    return (q, *rows, order[table], np.full(num_seqs, SHARED + OWN)), scales


@pytest.mark.parametrize("num_seqs", [4, 16])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8)])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_cascade(benchmark, side_by_side, rng, num_seqs, heads, kind):
    arrays, scales = problem(rng, num_seqs, *heads, kind)

    def plain():
        return numkv.paged_decode_attention(*arrays, **scales)

    def shared():
        return numkv.cascade_attention(*arrays, SHARED, **scales)

    np.testing.assert_allclose(plain(), shared(), atol=2e-3)
    benchmark(shared)
    side_by_side("plain / cascade", plain, shared, math.inf)
