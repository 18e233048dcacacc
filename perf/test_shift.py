"""The key shift: keys that move are read once and written once."""

import numpy as np
import pytest

import numkv

HEADS, DIM, BLOCK_SIZE, BLOCKS = 8, 128, 16, 512


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_shift_rows(measure, target, to, rng, kind):
    """All tokens but the first, by one position and back in turn."""
    made = numkv.kind(kind)
    shape = (BLOCKS, HEADS, BLOCK_SIZE)
    x = rng.standard_normal((*shape, DIM), np.float32)
    scale = np.zeros(made.scale_shape(shape, DIM), np.float32)
    if kind == "int8":
        scale[:] = np.abs(x).max(-1) / 127
        x = np.rint(x / scale[..., None]).astype(np.int8)
    else:
        x = x.astype(made.dtype)
    pool, scales = target.words(to(x)), to(scale)
    angles = np.outer(np.arange(2), 1e4 ** -np.arange(0, 1, 2 / DIM))
    tables = [to(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    slots = target.index(np.arange(1, BLOCKS * BLOCK_SIZE), np.int64)

    def shift(offset):
        target.ops.shift_rows(pool, kind, scales, slots, offset, *tables, False)

    def values(x, scale):
        x = x[-1, :, -1].astype(np.float64)
        return x * scale[-1, :, -1, None] if kind == "int8" else x

    before = values(x, scale)
    shift(1)
    a, b = np.split(before, 2, axis=-1)
    cos, sin = np.cos(angles[1]), np.sin(angles[1])
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    stored = pool if kind == "int8" else target.typed(pool, made.dtype)
    got = values(target.to_host(stored), target.to_host(scales))
    assert np.linalg.norm(got - expected) < 1e-2 * np.linalg.norm(expected)
    shift(-1)

    def run():
        shift(1)
        shift(-1)

    moved = 4 * (x.nbytes + scale.nbytes)  # read and written, there and back
    measure(run, moved, "copy")
