"""Rows that go into slots of paged pools."""

import naive
import numpy as np
import paged_problems
import pytest

import numkv

F32, I32, I64 = np.float32, np.int32, np.int64
KINDS = [*naive.DTYPES, "int8"]
PAIRS = [pytest.param((k, k), marks=pytest.mark.nightly if k == "fp64" else []) for k in KINDS] + [
    ("fp16", "int8")
]
STORED = ["fp32", "fp16", "bf16", "int8"]


def expected_scatter(pool, rows, slots, scale=None):
    """What a pool and its scales hold after rows went into slots."""
    pool, size = pool.copy(), pool.shape[2]
    scale = None if scale is None else scale.copy()
    stored = rows
    if scale is not None:
        stored, found = naive.int8_quantise(rows)
    for t, slot in enumerate(slots):
        if slot >= 0:
            pool[slot // size, :, slot % size] = stored[t]
            if scale is not None:
                scale[slot // size, :, slot % size] = found[t]
    return pool, scale


SLOTS = [11, -1, 0, 5, 3, -1]


@pytest.mark.boundscheck
@pytest.mark.parametrize("dtype", [I32, I64])
@pytest.mark.parametrize("kinds", PAIRS, ids=str)
def test_append(target, to, host, rng, kinds, dtype):
    """-1 skips a row; the others go where they are sent, and nothing else changes."""
    (k_pool, v_pool), scales = paged_problems.pools(to, *kinds, dim_v=6)
    before = [host(x).copy() for x in (k_pool, v_pool)]
    before_scales = {n: host(x).copy() for n, x in scales.items()}
    k, v = rng.standard_normal((6, 2, 4), F32), rng.standard_normal((6, 2, 6), F32)
    result = numkv.paged_append(to(k), to(v), k_pool, v_pool, to(np.array(SLOTS, dtype)), **scales)
    assert result is None
    for pool, old, rows, kind, which in zip(
        (k_pool, v_pool), before, (k, v), kinds, "kv", strict=True
    ):
        rows = rows if kind == "int8" else naive.round_to(rows, kind)
        name = f"{which}_scale"
        want, want_scale = expected_scatter(old, rows, SLOTS, before_scales.get(name))
        assert np.array_equal(naive.words(host(pool)), naive.words(want))
        if want_scale is not None:
            assert np.array_equal(host(scales[name]), want_scale)


@pytest.mark.parametrize("kind", STORED)
def test_append_of_nothing(target, to, host, kind):
    (k_pool, v_pool), scales = paged_problems.pools(to, kind)
    none = to(np.zeros((0, 2, 4), F32))
    numkv.paged_append(none, none, k_pool, v_pool, to(np.zeros(0, I64)), **scales)
    assert np.all(host(k_pool).astype(F32) == 77)
