"""Dropping tokens: rows that stay are read once and written once, shifted or not."""

import numpy as np
import pytest

import numkv
from perf import traffic

HEADS, DIM, TOKENS, BLOCK_SIZE = 8, 128, 8192, 16
#: Time of paged compaction in times of contiguous compaction, and of one that turns keys in times of one that does not.
PAGED_LIMIT, SHIFT_LIMIT = 1.1, 1.5


def filled(rng, kind):
    """A layer, and the keys that it holds, as stored."""
    layer = numkv.ContiguousLayer(TOKENS, HEADS, DIM, kind=kind)
    rows = rng.standard_normal((TOKENS, HEADS, DIM), np.float32)
    layer.append(rows, rows)
    return layer, layer.k[0].copy()


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_compact(measure, rng, kind):
    """All tokens but the first move by one place."""
    layer, before = filled(rng, kind)
    keep = np.arange(1, TOKENS)
    layer.compact(keep)
    assert np.array_equal(layer.k[0, :, : TOKENS - 1], before[:, 1:])

    def run():
        layer.seq_len = TOKENS
        layer.compact(keep)

    measure(run, traffic.compact(TOKENS - 1, HEADS, DIM, kind), "copy")


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_compact_and_shift(measure, side_by_side, rng, kind):
    """The same, and each key that moves is turned to its new position."""
    layer, before = filled(rng, kind)
    angles = np.outer(np.arange(2), 1e4 ** -np.arange(0, 1, 2 / DIM))
    shift = numkv.rope_shift(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    keep = np.arange(1, TOKENS)
    error = 1e-6 if kind == "fp32" else 1e-3
    if kind == "int8":
        before = before * layer.k_scale[0, :, :, None]
        error = 1e-2
    layer.compact(keep, shift)
    x, y = np.split(before[:, 1:].astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angles[1]), np.sin(angles[1])
    expected = np.concatenate([x * cos + y * sin, y * cos - x * sin], axis=-1)
    got = layer.k[0, :, : TOKENS - 1].astype(np.float64)
    if kind == "int8":
        got *= layer.k_scale[0, :, : TOKENS - 1, None]
    assert np.linalg.norm(got - expected) < error * np.linalg.norm(expected)

    def run(*shift):
        layer.seq_len = TOKENS
        layer.compact(keep, *shift)

    moved = traffic.compact(TOKENS - 1, HEADS, DIM, kind)
    measure(lambda: run(shift), moved, "copy")
    side_by_side("turned / as they are", lambda: run(shift), run, SHIFT_LIMIT)


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_compact_paged(measure, side_by_side, rng, kind):
    """A layer whose blocks lie in disorder, beside a contiguous one."""
    plain, before = filled(rng, kind)
    blocks = TOKENS // BLOCK_SIZE
    layer = numkv.PagedLayer(blocks, BLOCK_SIZE, HEADS, DIM, kind=kind)
    ids = layer.pool.blocks.allocate(blocks)
    layer.pool.blocks.release(rng.permutation(ids))
    rows = before.swapaxes(0, 1)
    if kind == "int8":
        rows = rows * plain.k_scale[0].T[..., None]
    layer.append(rows, rows)
    assert np.any(np.diff(layer.block_indices) != 1)
    pool = layer.k[layer.block_indices].swapaxes(1, 2).reshape(TOKENS, HEADS, DIM)
    keep = np.arange(1, TOKENS)
    layer.compact(keep)
    after = layer.k[layer.block_indices].swapaxes(1, 2).reshape(TOKENS, HEADS, DIM)
    assert np.array_equal(after[:-1], pool[1:])

    def run(layer):
        layer.seq_len = TOKENS
        layer.compact(keep)

    measure(lambda: run(layer), traffic.compact(TOKENS - 1, HEADS, DIM, kind), "copy")
    side_by_side("paged / contiguous", lambda: run(layer), lambda: run(plain), PAGED_LIMIT)


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_compact_paged_cache(measure, rng, kind):
    """A sequence of four layers that share blocks: one plan, all of their rows."""
    layers = 4
    cache = numkv.PagedKVCache(
        layers, HEADS, DIM, num_blocks=TOKENS // BLOCK_SIZE + 1, block_size=BLOCK_SIZE, kind=kind
    )
    seq = cache.add()
    step = cache.reserve([seq], TOKENS)
    rows = rng.standard_normal((TOKENS, HEADS, DIM), np.float32)
    for layer in range(layers):
        step.append(layer, rows, rows)
    cache.commit(step)
    keep = np.arange(1, TOKENS)
    cache.compact(seq, keep)
    assert cache.length(seq) == TOKENS - 1
    cache.check()

    def run():
        step = cache.reserve([seq], 1)
        for layer in range(layers):
            step.append(layer, rows[:1], rows[:1])
        cache.commit(step)
        cache.compact(seq, keep)

    measure(run, layers * traffic.compact(TOKENS - 1, HEADS, DIM, kind), "copy")
