"""The fused write where V rows are wider or narrower than K rows, and the q heads that it takes."""

import naive
import numpy as np
import paged_problems
import pytest

import numkv
from numkv import targets
from numkv.storage.pool import Pool

F32, I64 = np.float32, np.int64
HEADS, Q_HEADS, SIZE = 2, 4, 3


def expected(qkv, dim, dim_v, tables, positions, weights):
    """q, k and v of each token, in float64: RMS norm and half-split RoPE."""
    of_q, of_k = Q_HEADS * dim, HEADS * dim
    q = qkv[:, :of_q].reshape(-1, Q_HEADS, dim).astype(np.float64)
    k = qkv[:, of_q : of_q + of_k].reshape(-1, HEADS, dim).astype(np.float64)
    v = qkv[:, of_q + of_k :].reshape(-1, HEADS, dim_v).astype(np.float64)
    q, k = (naive.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    for t, position in enumerate(positions):
        q[t], k[t] = (
            naive.rope(x[t], *(table[position] for table in tables), False) for x in (q, k)
        )
    return q, k, v


def pool_of(target, kind, dim, dim_v):
    found = numkv.kind(kind)
    return Pool.allocate(targets.get(target), (4, HEADS, SIZE), dim, dim_v, found, found)


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 4), (4, 8), (8, 2), (6, 40)])
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("tokens", [2, 10])
def test_v_may_have_another_width(target, to, host, rng, kind, dim, dim_v, tokens):
    tables = naive.rope_tables(12, dim)
    weights = 1 + 0.1 * rng.standard_normal((2, dim)).astype(F32)
    qkv = rng.standard_normal((tokens, (Q_HEADS + HEADS) * dim + HEADS * dim_v), F32)
    slots, positions = rng.permutation(4 * SIZE)[:tokens], rng.permutation(12)[:tokens]
    results = []
    for times in (1, 60) if target == "cpu" else (1,):  # few tokens on the fast path, and many
        pool = pool_of(target, kind, dim, dim_v)
        scales = {}
        if kind != "fp32":
            scales = {"k_scale": pool.scales("k"), "v_scale": pool.scales("v")}
        k_pool, v_pool = pool.values("k"), pool.values("v")
        q = numkv.paged_write(
            to(np.tile(qkv, (times, 1))), k_pool, v_pool, to(np.tile(slots, times)), num_q_heads=Q_HEADS,
            qk_mode=1, cos=to(tables[0]), sin=to(tables[1]), positions=to(np.tile(positions, times)),
            q_norm_weight=to(weights[0]), k_norm_weight=to(weights[1]), **scales,
        )  # fmt: skip
        rows = [
            np.stack([host(pool.rows(which, block, slice(None))) for block in range(4)])
            for which in "kv"
        ]
        results.append([host(q)[:tokens], *rows])
    for other in results[1:]:
        assert all(map(np.array_equal, other, results[0]))
    want_q, want_k, want_v = expected(qkv, dim, dim_v, tables, positions, weights)
    got_q, *stored = results[0]
    np.testing.assert_allclose(got_q, want_q, atol=2e-5)
    for rows, want in zip(stored, (want_k, want_v), strict=True):
        bound = {"fp32": 2e-5, "int8": np.abs(want).max() / 127, "int4": np.abs(want).max() / 6}
        assert np.abs(rows[slots // SIZE, :, slots % SIZE] - want).max() <= bound[kind]
        others = np.ones(4 * SIZE, bool)
        others[slots] = False
        assert not rows.swapaxes(1, 2).reshape(4 * SIZE, -1)[others].any()


@pytest.mark.parametrize("make", ["contiguous", "paged", "window"])
@pytest.mark.parametrize(("kind", "dim", "dim_v"), [("fp32", 8, 4), ("int8", 6, 40)])
def test_a_layer_whose_v_has_another_width(target, to, host, rng, make, kind, dim, dim_v):
    """One token, then several: in a buffer, in blocks, and by way of full-precision tokens."""
    options = {"kind": kind, "target": target, "head_dim_v": dim_v}
    if make == "window":
        kind = "int8"
        options |= {"kind": kind, "full_precision": numkv.FullPrecision(2)}
    if make == "paged":
        layer = numkv.PagedLayer(4, SIZE, HEADS, dim, **options)
    else:
        layer = numkv.ContiguousLayer(4 * SIZE, HEADS, dim, **options)
    tables, weights = (
        naive.rope_tables(12, dim),
        1 + 0.1 * rng.standard_normal((2, dim)).astype(F32),
    )
    qkv = rng.standard_normal((8, (Q_HEADS + HEADS) * dim + HEADS * dim_v), F32)
    got = [
        layer.write(
            to(qkv[part]), num_q_heads=Q_HEADS, qk_mode=1, cos=to(tables[0]), sin=to(tables[1]),
            q_norm_weight=to(weights[0]), k_norm_weight=to(weights[1]),
        )
        for part in (slice(0, 1), slice(1, 8))
    ]  # fmt: skip
    want_q, want_k, want_v = expected(qkv, dim, dim_v, tables, range(8), weights)
    np.testing.assert_allclose(np.concatenate([host(x) for x in got]), want_q, atol=2e-5)
    assert layer.seq_len == 8
    q = rng.standard_normal((1, Q_HEADS, dim), F32)
    k, v = (x.swapaxes(0, 1)[None] for x in (want_k, want_v))
    want, _ = naive.attention(q, k, v, [8])
    assert want.shape == (1, Q_HEADS, dim_v)
    bound = np.abs(want_v).max() / 20 if kind == "int8" else 2e-5  # keys are quantised too
    assert np.abs(host(layer.decode_attention(to(q))) - want).max() <= bound


@pytest.mark.parametrize("dim_v", [4, 8, 16])
def test_the_place_of_what_is_not_finite(target, to, rng, dim_v):
    qkv = rng.standard_normal((2, 8 * (Q_HEADS + HEADS) + HEADS * dim_v), F32)
    (k_pool, v_pool), scales = paged_problems.pools(
        to, "int8", shape=(2, HEADS, SIZE), dim=8, dim_v=dim_v
    )
    for column in (Q_HEADS * 8, (Q_HEADS + HEADS) * 8 - 1, (Q_HEADS + HEADS) * 8, qkv.shape[1] - 1):
        wrong = qkv.copy()
        wrong[1, column] = np.inf
        with pytest.raises(
            numkv.NonFiniteInput, match="`qkv`: expected finite numbers for storage in int8"
        ) as caught:
            numkv.paged_write(
                to(wrong),
                k_pool,
                v_pool,
                to(np.arange(2)),
                num_q_heads=Q_HEADS,
                qk_mode=0,
                validate=True,
                **scales,
            )
        assert caught.value.index == (1, column)


def test_other_widths_are_refused(target, to):
    (k_pool, v_pool), _ = paged_problems.pools(to, "fp32", shape=(2, HEADS, SIZE), dim=8, dim_v=4)
    for width in (8 * (Q_HEADS + 2 * HEADS), 8 * (Q_HEADS + HEADS) + 4 * HEADS + 1):
        with pytest.raises(numkv.DimensionMismatch, match="`qkv`: expected"):
            numkv.paged_write(
                to(np.zeros((1, width), F32)), k_pool, v_pool, to(np.zeros(1, I64)), num_q_heads=Q_HEADS, qk_mode=0
            )  # fmt: skip


def layers(target):
    return (
        numkv.ContiguousLayer(8, HEADS, 8, kind="fp32", target=target),
        numkv.PagedLayer(4, 4, HEADS, 8, kind="fp32", target=target),
        numkv.ContiguousLayer(8, HEADS, 8, kind="fp32", rotate=True, target=target),
    )


@pytest.mark.parametrize("q_heads", [1, 3, 5])
def test_q_heads_are_a_multiple_of_kv_heads(target, to, host, q_heads):
    """On every way in: the short one, the general one, and where rows are rotated."""
    for layer in layers(target):
        for tokens in (1, 8):
            qkv = to(np.ones((tokens, (q_heads + 2 * HEADS) * 8), F32))
            with pytest.raises(
                numkv.DimensionMismatch, match=r"^`num_q_heads`: expected a multiple"
            ):
                layer.write(qkv, num_q_heads=q_heads, qk_mode=0, cos=None, sin=None)
        assert len(layer) == 0
    (k_pool, v_pool), _ = paged_problems.pools(to, "fp32", shape=(2, HEADS, SIZE), dim=8, dim_v=8)
    before = host(k_pool).copy()
    for tokens in (1, 1500) if target == "cpu" else (1,):
        qkv = to(np.ones((tokens, (q_heads + 2 * HEADS) * 8), F32))
        with pytest.raises(numkv.DimensionMismatch, match=r"^`num_q_heads`: expected a multiple"):
            numkv.paged_write(
                qkv, k_pool, v_pool, to(np.zeros(tokens, I64)), num_q_heads=q_heads, qk_mode=0
            )
    assert np.array_equal(host(k_pool), before)


def test_no_q_heads_at_all(target, to, host):
    """Projections of K and V alone."""
    layer = numkv.ContiguousLayer(8, HEADS, 8, kind="fp32", target=target)
    qkv = np.arange(2 * 2 * HEADS * 8, dtype=F32).reshape(2, -1)
    q = layer.write(to(qkv), num_q_heads=0, qk_mode=0, cos=None, sin=None)
    assert host(q).shape == (2, 0, 8)
    assert np.array_equal(
        host(layer.k)[0, :, :2].swapaxes(0, 1).reshape(2, -1), qkv[:, : HEADS * 8]
    )
    assert np.array_equal(
        host(layer.v)[0, :, :2].swapaxes(0, 1).reshape(2, -1), qkv[:, HEADS * 8 :]
    )
