"""Keys by channel: token groups are read twice and written once; attention and prompts beside kinds with row scales."""

import itertools

import numpy as np
import pytest

import numkv
from perf import traffic
from perf.shapes import SHAPES, cold_layers

HEADS, DIM, TOKENS = 8, 128, 64


@pytest.mark.parametrize("source", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["int8_channel", "int4_channel_fine", "int4_channel"])
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


def filled(rng, shape, kind):
    """A cache of one sequence with a shape's tokens in separate layers, and rows of a token group."""
    _, _, kv_heads, dim, length, *_ = SHAPES[shape]
    layers = cold_layers(length * numkv.kind(kind).bytes_per_token(kv_heads, dim))
    cache = numkv.KVCache(layers, kv_heads, dim, kind=kind, max_seq_len=length)
    rows = rng.standard_normal((2, length, kv_heads, dim), np.float32)
    for layer in range(layers):
        cache.append(layer, *rows)
    return cache, rows


KINDS = ["int8", "int8_channel", "int4", "int4_channel", "int4_channel_fine"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["A", "C", "E"])
def test_decode(measure, rng, shape, kind):
    """One token's query in a `KVCache`: what keys by channel add is their kind's time over that of int8 or int4."""
    _, q_heads, kv_heads, dim, length, *_ = SHAPES[shape]
    cache, (_, v) = filled(rng, shape, kind)
    q = np.zeros((q_heads, dim), np.float32)
    group = q_heads // kv_heads
    means = cache.decode_attention(0, q)
    assert np.allclose(means, np.repeat(v.mean(0), group, axis=0), atol=0.1)
    q = rng.standard_normal((q_heads, dim), np.float32)
    layer = itertools.cycle(range(cache.num_layers))
    moved = traffic.decode_attention(1, q_heads, kv_heads, dim, length, kind)
    measure(lambda: cache.decode_attention(next(layer), q), moved, "read")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["A", "C", "E"])
def test_prompt(measure, rng, shape, kind):
    """2,048 tokens into an empty layer."""
    _, _, kv_heads, dim, *_ = SHAPES[shape]
    layer = numkv.ContiguousLayer(2048, kv_heads, dim, kind=kind)
    k, v = rng.standard_normal((2, 2048, kv_heads, dim), np.float32)

    def run():
        layer.truncate(0)
        layer.append(k, v)

    run()
    assert len(layer) == 2048
    measure(run, traffic.append(2048, kv_heads, dim, kind, 4), "copy")
