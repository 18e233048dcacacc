"""Quantised caches that keep some tokens in full precision, beside ones that keep none."""

import itertools

import numpy as np
import pytest

import numkv
from perf import traffic
from perf.shapes import attend, cold_layers

Q_HEADS, HEADS, DIM, LENGTH = 32, 8, 128, 8192
FULL = 132
KEPT = {"full_precision": numkv.FullPrecision(window=FULL - 4, num_sink_tokens=4)}
#: Distance from float64 attention over the unrounded rows.
ERROR = {"int8": 2e-2, "int4": 0.2}
#: Times of the same call without: many tokens, one token, attention.
MANY_LIMIT, ONE_LIMIT, DECODE_LIMIT = 1.1, 4.0, 1.1


def layers(rng, kind, tokens, count=1):
    """Layers with full-precision tokens and without, filled with random rows; and those."""
    k, v = rng.standard_normal((2, tokens, HEADS, DIM), np.float32)
    kept, plain = (
        [numkv.ContiguousLayer(LENGTH, HEADS, DIM, kind=kind, **options) for _ in range(count)]
        for options in (KEPT, {})
    )
    for layer in (*kept, *plain):
        layer.append(k, v)
    return kept, plain, k, v


def check(rng, layer, kind, k, v):
    """Attention over a layer is that over the rows."""
    q = rng.standard_normal((1, Q_HEADS, DIM), np.float32)
    expected = attend(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1)).swapaxes(0, 1)
    error = np.linalg.norm(layer.decode_attention(q) - expected)
    assert error < ERROR[kind] * np.linalg.norm(expected)
    return q


@pytest.mark.parametrize("kind", ERROR)
def test_append(measure, side_by_side, rng, kind):
    """A prompt: the tokens that never were in the window go their way at once."""
    (kept,), (plain,), k, v = layers(rng, kind, 2048)
    assert len(kept.quantised_tokens) == 2048 - FULL
    check(rng, kept, kind, k, v)

    def run(layer):
        layer.truncate(0)
        layer.append(k, v)

    moved = traffic.append(2048 - FULL, HEADS, DIM, kind, 4)
    moved += traffic.append(FULL, HEADS, DIM, "fp32", 4)
    measure(lambda: run(kept), moved, "copy")
    side_by_side("with / without", lambda: run(kept), lambda: run(plain), MANY_LIMIT)


@pytest.mark.parametrize("kind", ERROR)
def test_append_one(measure, side_by_side, rng, kind):
    """A token that comes, and one that leaves the window. Lengths grow; there is room for all calls that are timed."""
    (kept,), (plain,), k, v = layers(rng, kind, 1024)
    one = k[:1], v[:1]
    kept.append(*one)
    assert len(kept.quantised_tokens) == 1025 - FULL
    check(rng, kept, kind, *(np.concatenate([x, x[:1]]) for x in (k, v)))
    moved = traffic.append(1, HEADS, DIM, "fp32", 4) + traffic.append(1, HEADS, DIM, kind, 4)
    measure(lambda: kept.append(*one), moved, "copy")
    side_by_side("with / without", lambda: kept.append(*one), lambda: plain.append(*one), ONE_LIMIT)


@pytest.mark.parametrize("kind", ERROR)
def test_decode(measure, side_by_side, rng, kind):
    """Layers are cycled through, so that rows come from memory."""
    size = LENGTH * numkv.kind(kind).bytes_per_token(HEADS, DIM)
    kept, plain, k, v = layers(rng, kind, LENGTH, cold_layers(size))
    q = check(rng, kept[0], kind, k, v)
    check(rng, plain[0], kind, k, v)
    one, other = (itertools.cycle(x) for x in (kept, plain))
    moved = traffic.decode_attention(1, Q_HEADS, HEADS, DIM, LENGTH - FULL, kind)
    moved += FULL * numkv.kind("fp32").bytes_per_token(HEADS, DIM)
    measure(lambda: next(one).decode_attention(q), moved, "read")
    side_by_side(
        "with / without",
        lambda: next(one).decode_attention(q),
        lambda: next(other).decode_attention(q),
        DECODE_LIMIT,
    )
