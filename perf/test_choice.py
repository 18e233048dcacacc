"""Sparse reading of one layer: bounds of the block that grew, scores of all blocks, and the choice.

The whole step beside dense attention: ``python -m perf sparse``.
"""

import numpy as np
import pytest

HEADS, GROUP, DIM, SIZE = 8, 4, 128, 16


@pytest.mark.parametrize("tokens", [8192, 131_072])
def test_block_scores(measure, target, to, rng, tokens):
    blocks = tokens // SIZE
    low, high = np.sort(rng.standard_normal((2, blocks, HEADS, DIM), np.float32), axis=0)
    q = rng.standard_normal((1, HEADS * GROUP, DIM), np.float32)
    table, lens = np.arange(blocks, dtype=np.int32)[None], np.array([tokens])
    given = [to(x) for x in (q, low, high, table, lens)]
    out = target.empty((1, HEADS, blocks), np.dtype(np.float32))

    def run():
        target.ops.block_scores(given[0], "fp32", *given[1:], SIZE, 1.0, out)

    run()
    parts = q.reshape(HEADS, GROUP, DIM).astype(np.float64)
    wanted = np.maximum(parts * low[:, :, None], parts * high[:, :, None]).sum(-1).max(-1)
    np.testing.assert_allclose(target.to_host(out)[0], wanted.T, rtol=1e-4, atol=1e-3)
    measure(run, low.nbytes + high.nbytes, "read")


@pytest.mark.parametrize("blocks", [512, 8192])
def test_choose_blocks(measure, target, to, rng, blocks):
    scores = rng.standard_normal((1, HEADS, blocks), np.float32)
    given = [
        to(x) for x in (scores, np.arange(blocks, dtype=np.int32)[None], np.array([blocks * SIZE]))
    ]
    tables = target.empty((1, HEADS, 64), np.dtype(np.int32))
    lens = target.empty((1, HEADS), np.dtype(np.int64))

    def run():
        target.ops.choose_blocks(*given, SIZE, 1, 1, tables, lens)

    run()
    assert (target.to_host(lens) == 64 * SIZE).all()
    measure(run, scores.nbytes, "read")
