"""The fused write of latents into slots of a pool, against norm and RoPE in float64."""

import naive
import numpy as np
import pytest
import tolerances

from numkv import targets

WIDTH, ROTARY, SIZE = 24, 8, 4


def written(target, to, host, rng, kind, mode, heads=2, tokens=9):
    """Write rows to shuffled slots, one of them left out; what is there, and what has to be."""
    dim = WIDTH + ROTARY
    x = naive.round_to(rng.standard_normal((tokens, heads, dim)), "fp32")
    weight = (1 + 0.1 * rng.standard_normal(WIDTH)).astype(np.float32)
    cos, sin = naive.rope_tables(20, ROTARY)
    positions = rng.permutation(20)[:tokens].astype(np.int64)
    slots = rng.permutation(5 * SIZE)[:tokens].astype(np.int64)
    slots[3] = -1
    ops, place = targets.get(target).ops, targets.get(target)
    before = np.full((5, heads, SIZE, dim), 7, naive.DTYPES[kind])
    pool = place.words(to(before))
    how = (mode in naive.NORM_MODES, mode != 0, mode in naive.INTERLEAVED_MODES, 1e-6, WIDTH)
    ops.scatter_latents(
        to(x), "fp32", to(cos), to(sin), how, to(weight), to(positions), pool, kind,
        place.empty((0, 0, 0), np.dtype(np.float32)), to(slots),
    )  # fmt: skip
    rows = naive.latent_rows(x, WIDTH, mode, cos, sin, weight, 1e-6, positions)
    got = host(pool).view(naive.DTYPES[kind]).swapaxes(1, 2).reshape(5 * SIZE, heads, dim)
    return got, rows, slots


@pytest.mark.parametrize("mode", range(6))
def test_norm_rotation_and_place(target, to, host, rng, mode):
    got, rows, slots = written(target, to, host, rng, "fp32", mode)
    there = slots >= 0
    tolerances.assert_rotated_close(got[slots[there]], rows[there], "fp32")
    others = np.setdiff1d(np.arange(5 * SIZE), slots)
    assert (got[others] == 7).all()


def test_rows_in_16_bits(target, to, host, rng):
    got, rows, slots = written(target, to, host, rng, "bf16", 4)
    there = slots >= 0
    tolerances.assert_rotated_close(got[slots[there]].astype(np.float64), rows[there], "bf16")
