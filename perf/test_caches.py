"""Caches whose rows come and go whole: encoder and wrapped caches, sequences that swap to host memory."""

import numpy as np
import pytest

import numkv
from perf import traffic

HEADS, DIM = 8, 128


@pytest.fixture
def encoder(rng):
    """An encoder's cache in a pass, and rows for it."""
    cache = numkv.EncoderCache()
    cache.init("fp16", 1, 2048, 1)
    cache.start_forward(numkv.Batch(positions=[0], sequences=[0], multimodal=[0]))
    return cache, rng.standard_normal((2, 2048, HEADS, DIM), np.float32)


def test_encoder_put(measure, encoder):
    """Rows of an image, in place of those of another."""
    cache, (k, v) = encoder
    cache.put(0, k, v)
    assert np.array_equal(cache.get(0)[0], k.astype(np.float16))
    measure(lambda: cache.put(0, k, v), traffic.append(2048, HEADS, DIM, "fp16", 4), "copy")


def test_encoder_attention(measure, encoder, rng):
    """One token's query over them."""
    cache, (k, v) = encoder
    cache.put(0, k, v)
    q = np.zeros((1, 4 * HEADS, DIM), np.float32)
    means = cache.decode_attention(0, q)[0]
    assert np.allclose(means, np.repeat(v.mean(0), 4, axis=0), atol=1e-3)
    moved = traffic.decode_attention(1, 4 * HEADS, HEADS, DIM, 2048, "fp16")
    measure(lambda: cache.decode_attention(0, q), moved, "read")


def test_wrapper_put(measure, rng):
    """A prompt into a sliding and a full layer, by way of their wrapper."""
    cache = numkv.WrapperCache(
        numkv.CausalCache(window_left=512), numkv.CausalCache(), layer_types=[0, 1]
    )
    cache.init("fp16", 1, 2048, 1024)
    cache.start_forward(numkv.Batch(positions=np.arange(1024), sequences=[0] * 1024))
    k, v = rng.standard_normal((2, 1024, HEADS, DIM), np.float32)

    def run():
        for layer in range(2):
            cache.put(layer, k, v)

    run()
    assert np.array_equal(cache.get(1)[1][:1024], v.astype(np.float16))
    measure(run, 2 * traffic.append(1024, HEADS, DIM, "fp16", 4), "copy")


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_swap(measure, rng, kind):
    """A sequence of 4,096 tokens out of a cache and in again."""
    cache = numkv.PagedKVCache(2, HEADS, DIM, num_blocks=80, kind=kind)
    rows = rng.standard_normal((4096, HEADS, DIM), np.float32)
    seq = cache.add()
    step = cache.reserve([seq], 4096)
    for layer in range(2):
        step.append(layer, rows, rows)
    cache.commit(step)
    q = rng.standard_normal((1, 4 * HEADS, DIM), np.float32)
    before = cache.decode_attention(1, [seq], q)

    def run(seq):
        swapped = cache.swap_out(seq)
        cache.remove(seq)
        return cache.swap_in(swapped)

    now = run(seq)
    assert np.array_equal(cache.decode_attention(1, [now], q), before)
    held = [now]

    def again():
        held[0] = run(held[0])

    moved = 4 * traffic.compact(4096, HEADS, DIM, kind)  # two layers, out and in
    measure(again, moved, "copy")
