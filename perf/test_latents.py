"""The fused write of latents: rows are read once and written once. Attention over them: ``python -m perf.latents``."""

import numpy as np
import pytest

import numkv

WIDTH, ROTARY, SIZE = 512, 64, 16


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_scatter_latents(measure, target, to, rng, kind):
    dim, of, tokens = WIDTH + ROTARY, numkv.kind(kind), 2048
    x = rng.standard_normal((tokens, 1, dim), np.float32)
    angles = np.outer(np.arange(tokens), 10000.0 ** (-np.arange(ROTARY // 2) / (ROTARY // 2)))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    shape = (tokens // SIZE, 1, SIZE)
    pool = target.zeros((*shape, of.words_per_row(dim)), of.word)
    scale = target.zeros(of.scale_shape(shape, dim), of.scale_word)
    weight, order = to(np.ones(WIDTH, np.float32)), to(np.arange(tokens))
    given = to(x), "fp32", to(cos), to(sin), (True, True, False, 1e-6, WIDTH), weight, order

    def run():
        target.ops.scatter_latents(*given, pool, kind, scale, order)

    run()
    if kind == "fp32":
        got = target.to_host(pool).reshape(tokens, dim)
        mean = np.sqrt((x[:, 0, :WIDTH].astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(got[:, :WIDTH], x[:, 0, :WIDTH] / mean, rtol=1e-4, atol=1e-5)
    measure(run, x.nbytes + pool.nbytes, "copy")
