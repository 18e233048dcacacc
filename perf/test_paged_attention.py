"""Paged decode beside contiguous decode of the same rows: a shuffled block table may cost 5% at most."""

import itertools

import numpy as np
import pytest

import numkv
from perf import traffic
from perf.shapes import COLD, SHAPES
from perf.test_attention import layers_of_rows

DEFAULT, LIMIT = 128, 1.05
#: Shapes with the default, and two of them with other blocks: the table of docs/concepts.md.
CASES = [(shape, DEFAULT) for shape in "ABDEF"]
CASES += [(shape, size) for shape in "AE" for size in (16, 32, 64, 256)]


def paged(x, order, batch, blocks):
    """Contiguous ``(layers, batch, heads, tokens, ...)`` as pools whose blocks lie in `order`, in one buffer too."""
    layers, heads, size = x.shape[0], x.shape[2], x.shape[3] // blocks
    pools = np.empty((layers, batch * blocks, heads, size, *x.shape[4:]), x.dtype)
    for pool, layer in zip(pools, x, strict=True):
        cut = layer.reshape(batch, heads, blocks, size, *x.shape[4:]).swapaxes(1, 2)
        pool[order] = cut.reshape(pool.shape)
    return pools


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(("shape", "block_size"), CASES)
def test_paged_decode_attention(measure, side_by_side, rng, shape, block_size, kind):
    batch, q_heads, kv_heads, dim, length, *_ = SHAPES[shape]
    size = batch * length * numkv.kind(kind).bytes_per_token(kv_heads, dim)
    layers = max(1, min(32, COLD // size))
    (k, v), scales, _ = layers_of_rows(rng, kind, layers, batch, kv_heads, dim, length)
    q = rng.standard_normal((batch, q_heads, dim), np.float32)
    lens = np.full(batch, length)
    blocks = length // block_size
    order = rng.permutation(batch * blocks)
    table = order.reshape(batch, blocks).astype(np.int32)
    k_pool, v_pool = (paged(x, order, batch, blocks) for x in (k, v))
    pool_scales = {n: paged(x, order, batch, blocks) for n, x in scales.items()}

    def contiguous_run(i):
        return numkv.decode_attention(q, k[i], v[i], lens, **{n: x[i] for n, x in scales.items()})

    def paged_run(i):
        return numkv.paged_decode_attention(
            q, k_pool[i], v_pool[i], table, lens, **{n: x[i] for n, x in pool_scales.items()}
        )

    assert np.array_equal(contiguous_run(0), paged_run(0))
    layer = itertools.cycle(range(layers))
    moved = traffic.paged_decode_attention(batch, q_heads, kv_heads, dim, length, block_size, kind)
    measure(lambda: paged_run(next(layer)), moved, "read")
    side_by_side(
        "paged / contiguous",
        lambda: paged_run(next(layer)),
        lambda: contiguous_run(next(layer)),
        LIMIT,
    )
