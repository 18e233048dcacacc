"""Paged pools of the caller's own: what append and the fused write refuse."""

import naive
import numpy as np
import paged_problems
import pytest
from messages import about

import numkv

F32, I32, I64 = np.float32, np.int32, np.int64


# ---------------------------------------------------------------- append


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("bad", [12, -2, 2**31 - 1, -(2**31)])
def test_slots_outside_the_pool(target, to, host, kind, bad):
    """An error before anything is written; unasked on CUDA, the row is skipped."""
    (k_pool, v_pool), scales = paged_problems.pools(to, kind)
    rows, slots = to(np.ones((3, 2, 4), F32)), to(np.array([0, bad, 1], I32))
    options = {"validate": True} if target == "cuda" else {}
    with pytest.raises(IndexError, match=about("slot_mapping")):
        numkv.paged_append(rows, rows, k_pool, v_pool, slots, **scales, **options)
    assert np.all(host(k_pool).astype(F32) == 77)
    if target == "cuda":
        numkv.paged_append(rows, rows, k_pool, v_pool, slots, **scales)
        changed = np.unique(np.argwhere(host(v_pool).astype(F32) != 77)[:, [0, 2]], axis=0)
        assert changed.tolist() == [[0, 0], [0, 1]]


def test_bad_slots_before_bad_rows(target, to, host):
    """All is looked at before anything is written, NaN too."""
    (k_pool, v_pool), scales = paged_problems.pools(to, "int8")
    rows = np.ones((3, 2, 4), F32)
    rows[2, 1, 3] = np.nan
    slots = to(np.array([0, -1, 1], I32))
    with pytest.raises(numkv.NonFiniteInput) as caught:
        numkv.paged_append(to(rows), to(rows), k_pool, v_pool, slots, validate=True, **scales)
    assert caught.value.index == (2, 1, 3)
    assert np.all(host(k_pool) == 77)
    assert np.all(host(scales["v_scale"]) == 7)


# ---------------------------------------------------------------- fused write


def test_bad_writes(target, to, host):
    (k_pool, v_pool), scales = paged_problems.pools(to, "int8")
    qkv, slots = np.ones((2, 24), F32), np.array([0, 4], I64)
    tables = [to(x) for x in naive.rope_tables(3, 4)]
    options = {
        "num_q_heads": 2, "qk_mode": 2, "cos": tables[0], "sin": tables[1],
        "positions": to(np.array([0, 2], I64)), **scales,
    }  # fmt: skip
    check = {"validate": True} if target == "cuda" else {}
    bad_row = qkv.copy()
    bad_row[1, 11] = np.inf
    for name, changes, error in (
        ("positions", {"positions": None}, numkv.DimensionMismatch),
        ("positions", {"positions": to(np.array([0, 3], I64))}, IndexError),
        ("positions", {"positions": to(np.array([-1, 0], I64))}, IndexError),
        ("positions", {"positions": to(np.zeros(3, I64))}, numkv.DimensionMismatch),
        ("slot_mapping", {"slot_mapping": to(np.array([0, 12], I64))}, IndexError),
        ("slot_mapping", {"slot_mapping": to(np.zeros(2, F32))}, numkv.UnsupportedDType),
        ("qkv", {"qkv": to(bad_row)}, numkv.NonFiniteInput),
        ("qkv", {"qkv": to(qkv[:, 1:])}, numkv.DimensionMismatch),
        ("k_scale", {"k_scale": None}, numkv.DimensionMismatch),
        ("cos", {"cos": None}, numkv.DimensionMismatch),
        ("qkv", {"v_pool": to(np.full((4, 2, 3, 6), 77, np.int8))}, numkv.DimensionMismatch),
    ):
        arrays = {"qkv": to(qkv), "slot_mapping": to(slots), "k_pool": k_pool, "v_pool": v_pool}
        made = arrays | options | check | changes
        with pytest.raises(error, match=about(name)):
            numkv.paged_write(**made)
    assert np.all(host(k_pool) == 77)
    assert np.all(host(scales["k_scale"]) == 7)
