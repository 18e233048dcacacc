"""Copies of what is stored: whole blocks, and the rows of single tokens."""

import numpy as np
import pytest

import numkv

HEADS, DIM, BLOCK_SIZE, BLOCKS = 8, 128, 16, 512


@pytest.fixture(params=["fp32", "fp16", "int8"])
def pools(request, rng, to):
    """Two buffers of the same shape, the first with random words, and those words."""
    words = numkv.kind(request.param).word
    shape = (BLOCKS, HEADS, BLOCK_SIZE, DIM)
    x = rng.integers(0, 256, (*shape[:3], DIM * words.itemsize), np.uint8).view(words)
    return to(x), to(np.zeros_like(x)), x


def test_copy_blocks(measure, target, rng, pools):
    """Half of the blocks, in any order."""
    source, there, x = pools
    a, b = (rng.permutation(BLOCKS)[: BLOCKS // 2] for _ in range(2))
    ids = [target.index(i, np.int32) for i in (a, b)]

    def run():
        target.ops.copy_blocks(source, ids[0], there, ids[1])

    run()
    assert target.to_host(there)[b].tobytes() == x[a].tobytes()
    measure(run, 2 * x[a].nbytes, "copy")


def test_copy_tokens(measure, target, rng, pools):
    """Half of the tokens, in any order."""
    source, there, x = pools
    a, b = (rng.permutation(BLOCKS * BLOCK_SIZE)[: BLOCKS * BLOCK_SIZE // 2] for _ in range(2))
    slots = [target.index(i, np.int64) for i in (a, b)]

    def run():
        target.ops.copy_tokens(source, slots[0], there, slots[1])

    def by_slot(pool):
        return pool.swapaxes(1, 2).reshape(-1, HEADS, DIM)

    run()
    assert by_slot(target.to_host(there))[b].tobytes() == by_slot(x)[a].tobytes()
    measure(run, x.nbytes, "copy")
