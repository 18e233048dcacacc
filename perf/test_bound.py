"""Bound calls beside append and attention one after the other: a token of each layer, layers taken in turn.

The two take turns in one run, over layers that come from memory; what is printed is each one's median time for a
layer, and the median of the differences within a round.
"""

import statistics
import time

import numpy as np
import pytest

import numkv
from perf.shapes import SHAPES, cold_layers

KINDS = [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16")]
#: Sequences, and tokens of each: shape F, a batch of it, and what next to nothing is read of.
SIZES = {"F": (1, 512), "batch of 8": (8, 512), "64 tokens": (1, 64)}
SECONDS = 3


def rows(rng, heads, tokens, kind):
    return rng.standard_normal((tokens, heads, SHAPES["F"].dim), np.float32).astype(
        numkv.kind(kind).dtype
    )


def single(kind, of_rows, layers, length, rng):
    """A `KVCache` and how a step of it begins and ends, with bound calls and without."""
    shape = SHAPES["F"]
    cache = numkv.KVCache(layers, shape.kv_heads, shape.dim, kind=kind, max_seq_len=length)
    x = rows(rng, shape.kv_heads, length - 1, of_rows)
    for layer in range(layers):
        cache.append(layer, x, x)
    cache.advance(length - 1)
    bound = cache.bind(shape.q_heads, of_rows)

    def two_calls(layer, q, k, v, out):
        cache.append(layer, k, v)
        cache.decode_attention(layer, q, out=out)

    return lambda: (two_calls, bound.begin()), lambda: cache.truncate(length - 1)


def batch(kind, of_rows, layers, length, rng, sequences):
    """The same of a `PagedKVCache`."""
    shape = SHAPES["F"]
    blocks = sequences * (length // 128 + 1)
    cache = numkv.PagedKVCache(layers, shape.kv_heads, shape.dim, num_blocks=blocks, kind=kind)
    seqs = [cache.add() for _ in range(sequences)]
    x = rows(rng, shape.kv_heads, (length - 1) * sequences, of_rows)
    step = cache.reserve(seqs, length - 1)
    for layer in range(layers):
        step.append(layer, x, x)
    cache.commit(step)
    bound, opened = cache.bind(shape.q_heads, of_rows), []

    def begin():
        step = cache.reserve(seqs, 1)
        opened.append(step)

        def two_calls(layer, q, k, v, out):
            step.append(layer, k, v)
            step.attention(layer, q, out=out)

        return two_calls, bound.begin(step)

    return begin, lambda: cache.rollback(opened.pop())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "of_rows"), KINDS)
def test_bound(rng, kind, of_rows, size, benchmark):
    shape, (sequences, length) = SHAPES["F"], SIZES[size]
    of_layer = numkv.kind(kind).bytes_per_element * 2 * shape.kv_heads * shape.dim * length
    layers = cold_layers(int(of_layer * sequences)) if benchmark.enabled else 2
    made = (kind, of_rows, layers, length, rng)
    begin, end = single(*made) if sequences == 1 else batch(*made, sequences)
    q, k, v = (
        rows(rng, heads, sequences, of_rows)
        for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
    )
    outs = [np.zeros_like(q) for _ in range(2)]

    def timed(call, out):
        started = time.perf_counter()
        for layer in range(layers):
            call(layer, q, k, v, out)
        return (time.perf_counter() - started) / layers * 1e6

    def a_round():
        found = []
        for number, out in enumerate(outs):
            calls = begin()
            found.append(timed(calls[number], out))
            end()
        return found

    a_round()
    assert np.array_equal(*(out.view(np.uint8) for out in outs))
    if not benchmark.enabled:
        benchmark(a_round)
        return
    found, until = [], time.monotonic() + SECONDS
    while time.monotonic() < until:
        found.append(a_round())
    two, one = (statistics.median(x) for x in zip(*found, strict=True))
    saved = statistics.median(a - b for a, b in found)
    print(
        f"\n{kind}, {size}: two calls {two:.1f} us, bound {one:.1f} us, saved {saved:.1f} us a layer"
    )
    benchmark(lambda: None)
