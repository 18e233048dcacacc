"""Rows of caches with ``rotate=True`` that move: key shifts, compaction, growth, forks and files."""

import copy
import importlib

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache
from rotated_caches import (
    DIM,
    F32,
    HEADS,
    TOKENS,
    cache,
    contiguous,
    half_a_step,
    paged,
    rows,
    turned,
)

import numkv
from numkv import targets
from numkv.files import load_sequences, save_sequences

# ---------------------------------------------------------------- keys that move


def tables(dtype=F32):
    return naive.rope_tables(16, DIM, base=100.0, dtype=dtype)


def roped(raw, positions):
    cos, sin = tables(np.float64)
    return np.stack(
        [naive.rope(x, cos[p], sin[p], False) for x, p in zip(raw, positions, strict=True)]
    )


def by_hand(target):
    """A shift function of a user's own that does what `rope_shift` does, on the host."""
    where, (cos, sin) = targets.get(target), tables(np.float64)

    def shift(layer, keys, offsets):
        keys, offsets = where.to_host(keys), where.to_host(offsets)
        moved = [
            naive_cells.rotate(k, int(o), cos, sin, False)
            for k, o in zip(keys, offsets, strict=True)
        ]
        return where.asarray(np.stack(moved).astype(F32))

    return shift


@pytest.mark.parametrize("own", [False, True], ids=["rope_shift", "own-function"])
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_keys_move_in_their_own_basis(target, to, host, rng, kind, own):
    """Removal and compaction of a multi-sequence cache, against keys computed for their new positions."""
    made = numkv.CausalCache(by_hand(target) if own else numkv.rope_shift(*tables()))
    made.init(kind, 2, 16, 8, target, rotate=True)
    raw, v = rows(rng, 8)
    made.start_forward(numkv.Batch([*range(7), 0], [0] * 7 + [1]))
    made.put(0, to(roped(raw, [*range(7), 0]).astype(F32)), to(v))
    before = [np.array(host(x)) for x in made.get(0)[:2]]
    made.remove(0, 1, 3)  # 3, 4, 5, 6 become 1, 2, 3, 4
    made.compact(0, [0, 2, 4])  # 4 becomes 1, 6 becomes 2
    made.start_forward(numkv.Batch([2, 0], [0, 1]), reserve=True)
    k, values, mask = (host(x) for x in made.get(0))
    assert np.flatnonzero(mask[0] == 0).tolist() == [0, 4, 6]
    assert np.array_equal(values[:8], before[1])
    assert np.array_equal(k[[0, 7]], before[0][[0, 7]])
    want = roped(raw[[4, 6]], [1, 2])
    # Quantised three times: when it was put, and as it moved twice.
    off = 3 * np.linalg.norm(
        np.broadcast_to(half_a_step(turned(want), kind) * 1.2, want.shape), axis=-1
    )
    assert np.all(np.linalg.norm(k[[4, 6]] - want, axis=-1) <= off)


def test_a_function_sees_keys_as_they_were_put(target, to, host, rng):
    """In float32; its results are checked as any rows are, before anything changes."""
    seen, where = [], targets.get(target)

    def shift(layer, keys, offsets):
        seen.append(np.array(host(keys)))
        return where.asarray(np.full(keys.shape, np.nan, F32)) if len(seen) > 1 else keys

    made = numkv.CausalCache(shift)
    made.init("int8", 1, 8, 8, target, rotate=True)
    k, v = rows(rng, 4)
    made.start_forward(numkv.Batch(range(4), [0] * 4))
    made.put(0, to(k), to(v))
    made.remove(0, 1, 2)
    assert seen[0].dtype == F32
    np.testing.assert_allclose(seen[0], k[2:], rtol=0, atol=0.05)
    before = host(made._layers[0].k).copy()
    with pytest.raises(numkv.NonFiniteInput, match="finite"):
        made.remove(0, 0, 1)
    assert np.array_equal(host(made._layers[0].k), before)
    assert made.positions(0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("make", [contiguous, paged, cache], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_compaction(target, to, host, rng, monkeypatch, make, kind):
    """With a shift as if the kept tokens alone had been written; without one the stored bits move."""
    monkeypatch.setattr(importlib.import_module("numkv.compaction.key_shift"), "_AT_ONCE", 3)
    raw, v = rows(rng)
    keep = [0, 3, 4, 5, 6]  # four that move by as much
    k = roped(raw, range(TOKENS)).astype(F32)
    q = rng.standard_normal((1, 2 * HEADS, DIM)).astype(F32)

    def filled(k, v):
        made, append, attend = make(target, kind=kind, rotate=True)
        append(to(k), to(v))
        if make is cache:
            made.append(0, to(k), to(v))
            made.advance(len(k))
        return made, attend

    fresh, attend_fresh = filled(roped(raw[keep], range(5)).astype(F32), v[keep])
    made, attend = filled(k, v)
    made.compact(keep, numkv.rope_shift(*tables()))
    bound = 1e-5 if kind == "fp32" else 0.02
    tolerances.assert_rows_close(
        host(attend(to(q))), host(attend_fresh(to(q))).astype(np.float64), bound
    )
    same, attend_same = filled(k[keep], v[keep])
    made, attend = filled(k, v)
    made.compact(keep)
    assert np.array_equal(host(attend(to(q))), host(attend_same(to(q))))


def test_truncation(target, to, host, rng):
    k, v = rows(rng)
    q = rng.standard_normal((1, 4, DIM)).astype(F32)
    for make in (paged, cache):
        made, append, attend = make(target, kind="int8", rotate=True)
        append(to(k), to(v))
        want = host(attend(to(q))).copy()
        if make is cache:
            made.append(0, to(k), to(v))
            made.advance(TOKENS)
        made.truncate(3)
        append(to(k[3:]), to(v[3:]))
        assert np.array_equal(host(attend(to(q))), want)


# ---------------------------------------------------------------- copies


def test_growth_and_copies(target, to, host, rng):
    made = numkv.KVCache(1, HEADS, DIM, kind="int4", target=target, rotate=True)
    k, v = rows(rng, 20)
    made.append(0, to(k[:3]), to(v[:3]))
    first = host(made.k(0)).copy()
    twin = copy.deepcopy(made)
    made.append(0, to(k[3:]), to(v[3:]))  # grows
    assert twin.layers[0].rotate
    assert np.array_equal(host(made.k(0))[:3], first)
    twin.append(0, to(k[3:]), to(v[3:]))
    assert np.array_equal(host(twin.k(0)), host(made.k(0)))


def filled(rng, to, target="cpu", kind="int8", **kw):
    made = paged_kv_cache(
        2, HEADS, DIM, num_blocks=16, block_size=3, kind=kind, target=target, **kw
    )
    k, v = rows(rng)
    seq = made.add()
    step = made.reserve([seq], [TOKENS])
    for layer in range(2):
        step.append(layer, to(k), to(v))
    made.commit(step, token_ids=np.arange(TOKENS))
    return made, seq, k, v


def test_forks_prefixes_and_swapping(target, to, host, rng):
    """Blocks are shared and copied as they are stored."""
    made, seq, k, v = filled(rng, to, target, rotate=True)
    q = to(rng.standard_normal((1, 4, DIM)).astype(F32))
    fork = made.fork(seq)
    step = made.reserve([fork], [1])  # copies the last block
    for layer in range(2):
        step.append(layer, to(k[:1]), to(v[:1]))
    made.commit(step)
    made.truncate(fork, TOKENS)
    want = host(made.decode_attention(0, [seq], q))
    assert np.array_equal(host(made.decode_attention(0, [fork], q)), want)
    prefix = made.add(np.arange(TOKENS))
    assert made.cached_len(prefix) == 6
    step = made.reserve([prefix], [1])
    for layer in range(2):
        step.append(layer, to(k[6:]), to(v[6:]))
    made.commit(step)
    assert np.array_equal(host(made.decode_attention(0, [prefix], q)), want)
    back = made.swap_in(made.swap_out(seq))
    assert np.array_equal(host(made.decode_attention(0, [back], q)), want)


def test_files(tmp_path, rng):
    """What was rotated comes back only into a cache that rotates, and the other way round."""
    path, q = tmp_path / "s", rng.standard_normal((1, 4, DIM)).astype(F32)
    plain = np.random.default_rng(1)
    for rotate in (False, True):
        made, seq, *_ = filled(plain, lambda x: x, rotate=rotate)
        save_sequences(path, [made.swap_out(seq)])
        (loaded,) = load_sequences(path)
        same, other = (
            numkv.PagedKVCache(2, HEADS, DIM, num_blocks=4, block_size=3, kind="int8", rotate=r)
            for r in (rotate, not rotate)
        )
        want = made.decode_attention(1, [seq], q)
        assert np.array_equal(same.decode_attention(1, [same.swap_in(loaded)], q), want)
        found = "got one of " + ("rotated" if rotate else "unrotated")
        with pytest.raises(numkv.DimensionMismatch, match=f"{found}.*rotate={rotate}"):
            other.swap_in(loaded)
        assert other.num_free == 4
