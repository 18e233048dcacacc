"""Which memory attention asks for ahead of time: seen neither in results nor, on a noisy machine, in times."""

import numba
import numpy as np
import pytest

import numkv.attention  # noqa: F401

# The package has a function of the same name.
from numkv.kernels.cpu import attention
from numkv.kernels.cpu.simd import NEVER, TILE, address_of

LINE = 64


@numba.njit
def run_fill_offsets(k, v, tile, begin, end, entries, unit, head, offsets):
    """Fill the tables of a turn, with tables of scales that are not used."""
    k_step = (k.strides[0], k.strides[1], k.strides[2])
    v_step = (v.strides[0], v.strides[1], v.strides[2])
    k_rows, v_rows = (address_of(k), k.shape[3], 1), (address_of(v), v.shape[3], 1)
    attention._fill_offsets(
        offsets, tile, begin, end, entries, unit, k.shape[2], head, k_step, k_rows, v_step, v_rows,
        False, k_step, False, v_step, k_step == v_step,
    )  # fmt: skip


def asked_for(runs):
    """The cache lines that runs of bytes have, as they are asked for; the last run, which never ends, is left out."""
    lines = []
    for start, end in runs.reshape(-1, 2):
        if end == NEVER:
            return lines
        lines += range(start // LINE, (end - 1) // LINE + 1)
    raise AssertionError("runs without an end")


def lines_of(pool, slots, head):
    """The cache lines of some tokens' rows."""
    size = pool.shape[2]
    lines = []
    for slot in slots:
        row = pool[slot // size, head, slot % size]
        start = row.ctypes.data
        lines += range(start // LINE, (start + row.size - 1) // LINE + 1)
    return lines


@pytest.mark.parametrize(
    ("tile", "begin", "end"),
    [(0, 0, 200), (64, 0, 200), (192, 0, 200), (64, 70, 100), (256, 0, 200)],
)
@pytest.mark.parametrize("by_slot", [False, True], ids=["by block", "by slot"])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("dim", "dim_v"), [(128, 128), (64, 128), (48, 80)])
def test_lines_of_a_tile(rng, dim, dim_v, block_size, by_slot, tile, begin, end):
    num_blocks = 256 // block_size
    k, v = (np.zeros((num_blocks, 2, block_size, d), np.int8) for d in (dim, dim_v))
    blocks = rng.permutation(num_blocks)
    entries = blocks.astype(np.int32)
    if by_slot:
        entries = (
            (blocks[:, None] * block_size + np.arange(block_size)).astype(np.int32).reshape(-1)
        )
    offsets = np.full(attention.TURN, -1, np.int64)
    run_fill_offsets(k, v, tile, begin, end, entries, 1 if by_slot else block_size, 1, offsets)
    # Past the end there is no tile: its last token stands in.
    tokens = range(max(tile, begin), min(tile + TILE, end)) or [end - 1]
    slots = [blocks[t // block_size] * block_size + t % block_size for t in tokens]
    for pool, at in ((k, attention.K_RUNS), (v, attention.V_RUNS)):
        asked = asked_for(offsets[at : at + attention.RUNS])
        wanted = lines_of(pool, slots, 1)
        assert set(asked) == set(wanted)
        # No line twice, but where a run ends and another one begins.
        assert len(asked) <= len(set(asked)) + len(slots) * (pool.shape[3] % LINE > 0)
        # In the order of tokens.
        assert list(dict.fromkeys(asked)) == list(dict.fromkeys(wanted))
