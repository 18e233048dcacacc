"""Which memory attention asks for ahead of time: seen neither in results nor, on a noisy machine, in times."""

import numba
import numpy as np
import pytest

from numkv.kernels.cpu.attention.offsets import (
    EXTENTS,
    K_EXTENTS,
    TABLE,
    TURN,
    V_EXTENTS,
    layout_of,
    locate,
    locate_next_head,
)
from numkv.kernels.cpu.attention.records import KV_TILE, TILE_UNIT
from numkv.kernels.cpu.vectors.arrays import TABLE_ROW, record_of
from numkv.kernels.cpu.vectors.prefetch import NO_MORE

#: A function of this file is compiled for each of what it calls.
pytestmark = pytest.mark.slow

LINE = 64


# Where arrays are in a record of K, its scales, V and its scales.
K, K_SCALE, V, V_SCALE = (TABLE_ROW * i for i in range(4))


@numba.njit
def run_locate(k, v, tile, tokens, begin, end, entries, unit, head, offsets):
    """Fill the tables of a turn, of rows without scales."""
    record = record_of((k, k, v, v), ())
    layout = layout_of(record, K, K_SCALE, V, V_SCALE, 0, 0, np.int64(unit))
    locate(offsets, tile, tokens, begin, end, entries, head, layout)


def asked_for(extents):
    """The cache lines that extents have, as they are asked for; the last one, which never ends, is left out."""
    lines = []
    for start, end in extents.reshape(-1, 2):
        if end == NO_MORE:
            return lines
        lines += range(start // LINE, (end - 1) // LINE + 1)
    raise AssertionError("extents without an end")


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
    ("tile", "most", "begin", "end"),
    [
        (0, 64, 0, 200), (64, 64, 0, 200), (192, 64, 0, 200), (64, 64, 70, 100), (256, 64, 0, 200),
        (0, KV_TILE, 0, 200), (0, KV_TILE, 70, 256), (128, 128, 0, 200),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_slot", [False, True], ids=["by block", "by slot"])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("dim", "dim_v"), [(128, 128), (64, 128), (48, 80)])
def test_lines_of_a_tile(rng, dim, dim_v, block_size, by_slot, tile, most, begin, end):
    num_blocks = 256 // block_size
    k, v = (np.zeros((num_blocks, 2, block_size, d), np.int8) for d in (dim, dim_v))
    blocks = rng.permutation(num_blocks)
    entries = blocks.astype(np.int32)
    if by_slot:
        entries = (
            (blocks[:, None] * block_size + np.arange(block_size)).astype(np.int32).reshape(-1)
        )
    offsets = np.full(TURN, -1, np.int64)
    run_locate(k, v, tile, most, begin, end, entries, 1 if by_slot else block_size, 1, offsets)
    # Past the end there is no tile: its last token stands in.
    tokens = range(max(tile, begin), min(tile + most, end)) or [end - 1]
    slots = [blocks[t // block_size] * block_size + t % block_size for t in tokens]
    for pool, at in ((k, K_EXTENTS), (v, V_EXTENTS)):
        asked = asked_for(offsets[at : at + EXTENTS])
        wanted = lines_of(pool, slots, 1)
        assert set(asked) == set(wanted)
        # No line twice, but where an extent ends and another one begins.
        assert len(asked) <= len(set(asked)) + len(slots) * (pool.shape[3] % LINE > 0)
        # In the order of tokens.
        assert list(dict.fromkeys(asked)) == list(dict.fromkeys(wanted))


@numba.njit
def run_locate_heads(k, k_scale, v, v_scale, end, entries, offsets):
    """Fill the tables of tile 64: of head 1 from those of head 0, then anew."""
    record = record_of((k, k_scale, v, v_scale), ())
    layout = layout_of(record, K, K_SCALE, V, V_SCALE, 1, 1, np.int64(k.shape[2]))
    for head, at in ((0, 0), (1, 2 * TURN)):
        locate(offsets[at:], 64, TILE_UNIT, 0, end, entries, head, layout)
    locate_next_head(offsets, 0, TURN, TILE_UNIT, layout)


@pytest.mark.parametrize("end", [128, 93])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(("dim", "dim_v"), [(128, 128), (64, 192), (80, 80)])
def test_tables_of_the_next_head(rng, dim, dim_v, block_size, end):
    """They are those of the head before, moved on: rows, scales and what is prefetched."""
    num_blocks = 128 // block_size
    k, v = (np.zeros((num_blocks, 3, block_size, d), np.int8) for d in (dim, dim_v))
    scales = np.zeros((num_blocks, 3, 2 * block_size), np.float32)
    k_scale, v_scale = scales[..., ::2], scales[..., :block_size]
    entries = rng.permutation(num_blocks).astype(np.int32)
    offsets = np.full(3 * TURN, -1, np.int64)
    run_locate_heads(k, k_scale, v, v_scale, end, entries, offsets)
    moved, anew = offsets[TURN : 2 * TURN], offsets[2 * TURN :]
    for table in range(4):
        rows = slice(table * TABLE, table * TABLE + TILE_UNIT)
        assert np.array_equal(moved[rows], anew[rows])
    for pool, at in ((k, K_EXTENTS), (v, V_EXTENTS)):
        asked, wanted = (asked_for(x[at : at + EXTENTS]) for x in (moved, anew))
        # Where a head is no whole number of lines, a line before may come with them.
        assert set(wanted) <= set(asked)
        assert len(asked) - len(wanted) <= (pool[0, 0].nbytes % LINE > 0) * num_blocks


def test_nothing_is_asked_for_without_tokens():
    k = np.zeros((4, 2, 16, 64), np.int8)
    offsets = np.full(TURN, -1, np.int64)
    run_locate(k, k, 0, TILE_UNIT, 0, 0, np.zeros(4, np.int32), 16, 0, offsets)
    for at in (K_EXTENTS, V_EXTENTS):
        assert asked_for(offsets[at : at + EXTENTS]) == []
