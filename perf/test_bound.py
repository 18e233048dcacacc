"""Bound calls beside append and attention one after the other: a token of each layer, layers taken in turn.

The two take turns in one run, over layers that come from memory, or over those of a model. The notes have each one's
median time for a layer, the median of the differences within a round, and the time of a whole bound step for a layer:
all layers share its beginning and its end.
"""

import statistics
import time
from typing import NamedTuple

import numpy as np
import pytest

import numkv
from perf.shapes import SHAPES, Shape, cold_layers

KINDS = [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16")]
SECONDS = 3


class Size(NamedTuple):
    """A shape, whether blocks have a table, and how many layers; None for as many as come from memory."""

    shape: Shape
    paged: bool = False
    layers: int | None = None


_F, _SMALL = SHAPES["F"], Shape(1, 14, 2, 64, 64)  # the latter as in models of 0.5 billion weights
#: Shape F, a batch of it, what next to nothing is read of, and a small model's step.
SIZES = {
    "F": Size(_F),
    "batch of 8": Size(_F._replace(batch=8), paged=True),
    "64 tokens": Size(_F._replace(length=64)),
    "0.5B, 64 tokens": Size(_SMALL, layers=24),
    "0.5B, 64 tokens, paged": Size(_SMALL, paged=True, layers=24),
}


def rows(rng, shape, heads, tokens, kind):
    return rng.standard_normal((tokens, heads, shape.dim), np.float32).astype(
        numkv.kind(kind).dtype
    )


def single(kind, of_rows, layers, shape, rng):
    """How a step of a `KVCache` begins, with two calls or a bound one for each layer, and how it ends."""
    length = shape.length
    cache = numkv.KVCache(layers, shape.kv_heads, shape.dim, kind=kind, max_seq_len=length)
    x = rows(rng, shape, shape.kv_heads, length - 1, of_rows)
    for layer in range(layers):
        cache.append(layer, x, x)
    cache.advance(length - 1)
    bound = cache.bind(shape.q_heads, of_rows)

    def two_calls(layer, q, k, v, out):
        cache.append(layer, k, v)
        cache.decode_attention(layer, q, out=out)

    return (lambda: two_calls, bound.begin), lambda: cache.truncate(length - 1)


def batch(kind, of_rows, layers, shape, rng):
    """The same of a `PagedKVCache`."""
    sequences, length = shape.batch, shape.length
    blocks = sequences * (length // 128 + 1)
    cache = numkv.PagedKVCache(layers, shape.kv_heads, shape.dim, num_blocks=blocks, kind=kind)
    seqs = [cache.add() for _ in range(sequences)]
    x = rows(rng, shape, shape.kv_heads, (length - 1) * sequences, of_rows)
    step = cache.reserve(seqs, length - 1)
    for layer in range(layers):
        step.append(layer, x, x)
    cache.commit(step)
    bound, opened = cache.bind(shape.q_heads, of_rows), []

    def begin():
        opened.append(cache.reserve(seqs, 1))
        return opened[0]

    def two_calls():
        step = begin()

        def call(layer, q, k, v, out):
            step.append(layer, k, v)
            step.attention(layer, q, out=out)

        return call

    return (two_calls, lambda: bound.begin(begin())), lambda: cache.rollback(opened.pop())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "of_rows"), KINDS)
def test_bound(rng, kind, of_rows, size, benchmark, rounds, note):
    shape, paged, layers = SIZES[size]
    each = shape.batch * shape.length
    of_layer = numkv.kind(kind).bytes_per_element * 2 * shape.kv_heads * shape.dim * each
    if not benchmark.enabled:
        layers = 2
    layers = layers or cold_layers(int(of_layer))
    begins, end = (batch if paged else single)(kind, of_rows, layers, shape, rng)
    q, k, v = (
        rows(rng, shape, heads, shape.batch, of_rows)
        for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
    )
    outs = [np.zeros_like(q) for _ in range(2)]

    def a_round():
        """The times of both kinds of calls, and of the whole bound step, in microseconds a layer."""
        found = []
        for begin, out in zip(begins, outs, strict=True):
            times = [time.perf_counter()]
            call = begin()
            times.append(time.perf_counter())
            for layer in range(layers):
                call(layer, q, k, v, out)
            times.append(time.perf_counter())
            end()
            times.append(time.perf_counter())
            found.append((times[2] - times[1]) / layers * 1e6)
        return [*found, (times[3] - times[0]) / layers * 1e6]

    a_round()
    assert np.array_equal(*(out.view(np.uint8) for out in outs))
    start = time.perf_counter()
    a_round()
    found, in_time = [], int(SECONDS / (time.perf_counter() - start))
    benchmark.pedantic(lambda: found.append(a_round()), rounds=rounds(max(5, in_time)))
    if not benchmark.enabled:
        return
    two, one, step = (statistics.median(x) for x in zip(*found, strict=True))
    saved = statistics.median(a - b for a, b, _ in found)
    note(
        f"{kind}, {size}: two calls {two:.1f} us, bound {one:.1f} us, saved {saved:.1f} us a layer; "
        f"a bound step of {layers} layers {step:.1f} us a layer in all"
    )
