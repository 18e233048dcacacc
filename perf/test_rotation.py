"""Caches with ``rotate=True`` beside plain ones: what turning rows, queries and outputs adds."""

import itertools

import numpy as np
import pytest

import numkv
from perf import traffic
from perf.shapes import attend, cold_layers

Q_HEADS, HEADS, DIM, LENGTH = 32, 8, 128, 8192
#: Distance from float64 attention over the unrounded rows.
ERROR = {"fp16": 1e-3, "int8": 2e-2, "int4": 0.2}
#: Times of the plain call: one token is the cost of the call, and a long append reads and writes memory.
LIMITS = {1: 4.0, 2048: 2.0}
DECODE_LIMIT = 1.05


@pytest.mark.parametrize("tokens", [1, 2048])
@pytest.mark.parametrize("kind", ERROR)
def test_append(measure, side_by_side, rng, kind, tokens):
    plain, rotated = (
        numkv.ContiguousLayer(LENGTH, HEADS, DIM, kind=kind, rotate=rotate)
        for rotate in (False, True)
    )
    k, v = rng.standard_normal((2, tokens, HEADS, DIM), np.float32)
    rotated.append(k, v)
    q = rng.standard_normal((1, Q_HEADS, DIM), np.float32)
    expected = attend(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1)).swapaxes(0, 1)
    error = np.linalg.norm(rotated.decode_attention(q) - expected)
    assert error < ERROR[kind] * np.linalg.norm(expected)

    def run(layer):
        layer.seq_len = 0
        layer.append(k, v)

    measure(lambda: run(rotated), traffic.append(tokens, HEADS, DIM, kind, 4), "copy")
    side_by_side("rotated / plain", lambda: run(rotated), lambda: run(plain), LIMITS[tokens])


@pytest.mark.parametrize("kind", ERROR)
def test_decode(measure, side_by_side, rng, kind):
    """Layers are cycled through, so that rows come from memory."""
    size = LENGTH * numkv.kind(kind).bytes_per_token(HEADS, DIM)
    k, v = rng.standard_normal((2, LENGTH, HEADS, DIM), np.float32)
    plain, rotated = (
        [
            numkv.ContiguousLayer(LENGTH, HEADS, DIM, kind=kind, rotate=rotate)
            for _ in range(cold_layers(size))
        ]
        for rotate in (False, True)
    )
    for layer in (*plain, *rotated):
        layer.append(k, v)
    q = rng.standard_normal((1, Q_HEADS, DIM), np.float32)
    expected = attend(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1)).swapaxes(0, 1)
    for layers in (plain, rotated):
        error = np.linalg.norm(layers[0].decode_attention(q) - expected)
        assert error < ERROR[kind] * np.linalg.norm(expected)

    one, other = (itertools.cycle(layers) for layers in (rotated, plain))
    moved = traffic.decode_attention(1, Q_HEADS, HEADS, DIM, LENGTH, kind)
    measure(lambda: next(one).decode_attention(q), moved, "read")
    side_by_side(
        "rotated / plain",
        lambda: next(one).decode_attention(q),
        lambda: next(other).decode_attention(q),
        DECODE_LIMIT,
    )
