"""Rows that share a slot: the last one wins, K and V alike, on any number of threads."""

import numba
import numpy as np
import pytest

import numkv

HEADS, DIM, BLOCKS, SIZE = 2, 32, 8, 16


def pools(kind, to):
    layer = numkv.PagedLayer(BLOCKS, SIZE, HEADS, DIM, kind=kind)
    found = {"k_pool": layer.k, "v_pool": layer.v}
    if layer.pool.spec.kind.has_scales:
        found |= {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    return {name: to(x.copy()) for name, x in found.items()}


def last_rows(slots):
    """Row of each slot that is written: the last of those that name it."""
    return {int(slot): t for t, slot in enumerate(slots) if slot >= 0}


def one_by_one(kind, k, v, slots, to=lambda x: x):
    """What there is after the last row of each slot, written alone."""
    expected = pools(kind, to)
    for slot, t in last_rows(slots).items():
        numkv.paged_append(
            to(k[t : t + 1]), to(v[t : t + 1]), slot_mapping=to(np.array([slot])), **expected
        )
    return expected


SLOTS = {
    "one slot": lambda rng, n: np.full(n, 77),
    "any": lambda rng, n: rng.integers(-1, BLOCKS * SIZE, n),
    "runs": lambda rng, n: np.arange(n) % 100,
}


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("tokens", [40, 4096])
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_the_last_row_wins(rng, kind, tokens, slots):
    slots = SLOTS[slots](rng, tokens)
    k, v = rng.standard_normal((2, tokens, HEADS, DIM), dtype=np.float32)
    expected = one_by_one(kind, k, v, slots)
    for count in (1, numba.config.NUMBA_NUM_THREADS):
        for _ in range(5):
            got = pools(kind, lambda x: x)
            with numkv.num_threads(count):
                numkv.paged_append(k, v, slot_mapping=slots, **got)
            for name, x in expected.items():
                np.testing.assert_array_equal(got[name].view(np.uint8), x.view(np.uint8), name)


@pytest.mark.parametrize("tokens", [40, 2048])
def test_of_a_fused_write_too(rng, tokens):
    slots = rng.integers(-1, BLOCKS * SIZE, tokens)
    qkv = rng.standard_normal((tokens, 4 * HEADS * DIM), dtype=np.float32)
    results = []
    for count in (1, numba.config.NUMBA_NUM_THREADS):
        got = pools("fp32", lambda x: x)
        with numkv.num_threads(count):
            q = numkv.paged_write(qkv, slot_mapping=slots, num_q_heads=2 * HEADS, qk_mode=0, **got)
        assert np.array_equal(q, qkv[:, : 2 * HEADS * DIM].reshape(q.shape))
        results.append(got)
    k, v = qkv[:, 2 * HEADS * DIM :].reshape(tokens, 2, HEADS, DIM).swapaxes(0, 1)
    expected = one_by_one("fp32", k, v, slots)
    for got in results:
        for name, x in expected.items():
            np.testing.assert_array_equal(got[name], x, name)


def test_on_cuda_with_validate(rng):
    """Slots are looked at on the host then, as everywhere on the CPU."""
    from numkv import targets

    target = targets.get("cuda")
    to, host = target.asarray, target.to_host
    slots = np.array([3, 5, 3, -1, 90, 5, 3])
    k, v = rng.standard_normal((2, len(slots), HEADS, DIM), dtype=np.float32)
    got = pools("int8", to)
    numkv.paged_append(to(k), to(v), slot_mapping=to(slots), validate=True, **got)
    expected = one_by_one("int8", k, v, slots)
    for name, x in expected.items():
        np.testing.assert_array_equal(host(got[name]), x, name)
