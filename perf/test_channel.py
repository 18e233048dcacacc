"""Keys by channel: token groups are read twice and written once."""

import numpy as np
import pytest

import numkv

HEADS, DIM, TOKENS = 8, 128, 64


@pytest.mark.parametrize("source", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["int8_channel", "int4_channel"])
def test_quantise_groups(measure, target, to, rng, kind, source):
    blocks, of = 32, numkv.kind(kind)
    shape = (blocks, HEADS, 2 * TOKENS)
    x = rng.standard_normal((*shape, DIM), np.float32).astype(numkv.kind(source).dtype)
    rows = target.words(to(x))
    pool = target.zeros((*shape, of.words_per_row(DIM)), of.word)
    scale = target.zeros(of.scale_shape(shape, DIM), of.scale_word)
    groups = target.index(np.arange(2 * blocks), np.int64)

    def run():
        target.ops.quantise_groups(rows, source, groups, pool, kind, scale, groups)

    run()
    half = (x.max() - x.min()) / 2
    steps = target.to_host(scale)[..., :DIM].view(numkv.kind("bf16").dtype).astype(np.float32)
    assert 0 < steps.max() <= half / (7.5 if of.is_packed else 127.5) * 1.01
    measure(run, x.nbytes + pool.nbytes, "copy")
