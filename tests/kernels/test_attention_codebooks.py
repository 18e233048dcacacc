"""Attention over codes of codebooks, and how rows get there."""

import naive
import numpy as np
import operands
import paged_problems
import pytest
import tolerances
from problems import Shape
from quantised_stores import Stores

import numkv
from numkv import targets

F32 = np.float32
#: Elements of rows: no more whole units than it takes.
DIMS = {"code4": 34, "code6": 40}
BOOKS = list(DIMS)
STORES = {kind: Stores(kind) for kind in BOOKS}
each_kind = pytest.mark.parametrize("kind", BOOKS)

#: The CPU compiles each anew, the simulator nothing.
on_the_cpu_by_night = pytest.mark.parametrize(
    "target", [pytest.param("cpu", marks=pytest.mark.nightly), "cuda"], indirect=True
)


@on_the_cpu_by_night
@pytest.mark.parametrize(
    ("k_kind", "v_kind", "q_kind"),
    [
        ("code4", "code4", "fp64"),
        ("code4", "code4", "bf16"),
        ("int8", "code4", "fp32"),
        ("code4", "int4", "fp16"),
        ("code4", "bf16", "fp32"),
        ("fp64", "code4", "fp64"),
        ("code6", "code6", "fp64"),
        ("code6", "code4", "bf16"),
        ("bf16", "code6", "fp32"),
    ],
)
def test_kinds_apart(target, to, host, rng, k_kind, v_kind, q_kind):
    shape = Shape(4, 2, 40, (11, 3), new=(2, 1), head_dim_v=48)
    problem = paged_problems.make(rng, shape, k_kind, q_kind, v_kind=v_kind, block_size=4)
    options = {"window_left": 6, "logits_soft_cap": 3.0}
    problem.check(to, host, **options, sinks=rng.standard_normal(4).astype(F32))


@pytest.mark.parametrize("kind", ["code4", pytest.param("code6", marks=pytest.mark.slow)])
def test_batch_threads_and_layout_do_not_matter(rng, kind):
    """One sequence alone, in a batch, by one thread, in blocks of any size, contiguous: the same bits."""
    rows = rng.standard_normal((2, 2500, 2, 96)).astype(F32)
    (k, k_scale), (v, v_scale) = (
        (codes.swapaxes(0, 1)[None], scale.swapaxes(0, 1)[None])
        for codes, scale in (naive.quantise(x, kind) for x in rows)
    )
    q = rng.standard_normal((1, 8, 96), F32)

    def attend(times=1, lens=(2500,)):
        arrays = [np.ascontiguousarray(x.repeat(times, 0)) for x in (q, k, v)]
        scales = {"k_scale": k_scale.repeat(times, 0), "v_scale": v_scale.repeat(times, 0)}
        return numkv.decode_attention(*arrays, list(lens), return_lse=True, **scales)

    want = attend()
    out, lse = attend(3, (31, 2500, 7))
    results = [(out[1:2], lse[1:2])]
    with numkv.num_threads(1):
        results.append(attend())
    for size in (1, 7, 16):
        layer = numkv.PagedLayer(2500, size, 2, 96, kind=kind)
        layer.seq_len = 2500  # takes the blocks
        slots = np.array([layer.block_table[p // size] * size + p % size for p in range(2500)])
        for pool, x in (
            (layer.k, k),
            (layer.v, v),
            (layer.k_scale, k_scale),
            (layer.v_scale, v_scale),
        ):
            pool[slots // size, :, slots % size] = x[0].swapaxes(0, 1)
        results.append(layer.decode_attention(q, return_lse=True))
    for out, lse in results:
        assert np.array_equal(out, want[0])
        assert np.array_equal(lse, want[1])


# ---------------------------------------------------------------- rows


@pytest.mark.boundscheck
@pytest.mark.parametrize("store", STORES["code4"].all)
@pytest.mark.parametrize(
    ("source", "kind"), [("fp32", "code4"), ("fp16", "code6"), ("bf16", "code4")]
)
@on_the_cpu_by_night
def test_rows_of_all_sizes(target, to, host, rng, store, source, kind):
    sizes = np.array([1e-33, 1e-29, 1e-7, 1e-3, 1.0, 300.0, 65504.0])
    k, v = (
        naive.round_to(rng.uniform(-1, 1, (7, 2, DIMS[kind])) * sizes[:, None, None], source)
        for _ in "kv"
    )
    stores = STORES[kind]
    stores.assert_exact(stores.all[store](k, v, to, host, target), k, v)


@each_kind
@on_the_cpu_by_night
def test_a_fused_write(target, to, host, rng, kind):
    """What it stores is what an append of the same rows stores."""
    where, dim = targets.get(target), DIMS[kind]
    made = [numkv.PagedLayer(4, 4, 2, dim, kind=kind, target=target) for _ in range(2)]
    qkv = rng.standard_normal((6, 8 * dim)).astype(F32)
    written = host(made[0].write(to(qkv), num_q_heads=4, qk_mode=0))
    assert np.array_equal(written, qkv[:, : 4 * dim].reshape(6, 4, dim))
    k, v = (
        np.ascontiguousarray(x) for x in np.split(qkv[:, 4 * dim :].reshape(6, 4, dim), 2, axis=1)
    )
    made[1].append(to(k), to(v))
    for name in ("k", "v", "k_scale", "v_scale"):
        one, other = (where.to_host(getattr(layer, name)) for layer in made)
        assert np.array_equal(one, other, equal_nan=True)


@on_the_cpu_by_night
@pytest.mark.parametrize("interleaved", [False, True])
@each_kind
def test_keys_shift(target, rng, interleaved, kind):
    """Rows come back as codes of what they are after the turn, of elements beside the rotated ones too."""
    where, (dim, half) = targets.get(target), (DIMS[kind], 15)
    codes, scale = naive.quantise(rng.standard_normal((3, 2, 2, dim)), kind)
    pool, scales = where.asarray(operands.codes_words(codes).copy()), where.asarray(scale.copy())
    angle = np.outer(np.arange(4), rng.uniform(0.1, 1, half)).astype(F32)
    cos, sin = np.cos(angle), np.sin(angle)
    slots = np.array([0, 5, 3])
    where.ops.shift_rows(
        pool, kind, scales, where.index(slots, np.int64), -3, where.asarray(cos), where.asarray(sin),
        interleaved,
    )  # fmt: skip
    at = slots // 2, slice(None), slots % 2
    rows = naive.dequantise(codes[at], scale[at]).astype(F32)
    a, b = (
        (rows[..., : 2 * half : 2], rows[..., 1 : 2 * half : 2])
        if interleaved
        else (rows[..., :half], rows[..., half : 2 * half])
    )
    turned = rows.astype(np.float64)
    parts = a * cos[3] + b * sin[3], b * cos[3] - a * sin[3]
    if interleaved:
        turned[..., : 2 * half : 2], turned[..., 1 : 2 * half : 2] = parts
    else:
        turned[..., :half], turned[..., half : 2 * half] = parts
    shifted, of_shifted = operands.codes_of(where.to_host(pool), kind), where.to_host(scales)
    got = naive.dequantise(shifted[at], of_shifted[at])
    best = naive.dequantise(*naive.quantise(turned, kind))
    error, least = (np.linalg.norm(x - turned, axis=-1) for x in (got, best))
    assert np.all(error <= 1.1 * least)
    rest = np.ones((3, 2), bool)
    rest[slots // 2, slots % 2] = False
    for now, then in ((shifted, codes), (of_shifted, scale)):
        assert np.array_equal(now.swapaxes(1, 2)[rest], then.swapaxes(1, 2)[rest])


@each_kind
@on_the_cpu_by_night
def test_attention_weights(target, to, host, rng, kind):
    k, scale = naive.quantise(rng.standard_normal((2, 2, 12, DIMS[kind])), kind)
    q = rng.standard_normal((2, 4, DIMS[kind])).astype(F32)
    lens = np.array([12, 3])
    got = host(numkv.attention_weights(to(q), to(k), to(lens), k_scale=to(scale)))
    want = naive.attention_weights(q, naive.dequantise(k, scale), lens, np.arange(3))
    tolerances.assert_weights_close(got, want, kind)


def test_pools_of_other_words_are_known_by_their_scales(target, to, rng):
    """Codes of a codebook and INT4 are both bytes: the scales say which."""
    k, scale = naive.quantise(rng.standard_normal((1, 2, 5, 34)), "code4")
    q = to(rng.standard_normal((1, 4, 34)).astype(F32))
    with pytest.raises(numkv.DimensionMismatch, match=r"`v_scale`: expected float32 \(1, 2, 5\)"):
        numkv.decode_attention(
            q, to(k), to(k), [5], k_scale=to(scale), v_scale=to(np.ones((1, 2, 4), F32))
        )
    with pytest.raises(numkv.DimensionMismatch, match=r"`v_scale`: expected bfloat16 .* for int4"):
        numkv.decode_attention(q, to(k), to(k), [5], k_scale=to(scale))


def test_rows_of_six_bits_are_whole(target, to, rng):
    """Three words of 16 bits are eight elements: other rows belong to no kind."""
    k, scale = naive.quantise(rng.standard_normal((1, 2, 5, 40)), "code6")
    q = to(rng.standard_normal((1, 4, 40)).astype(F32))
    with pytest.raises(numkv.DimensionMismatch, match=r"`k`: expected rows of a multiple of 3"):
        numkv.decode_attention(q, to(k[..., 1:].copy()), to(k), [5], k_scale=to(scale))
    with pytest.raises(numkv.DimensionMismatch, match=r"`k_scale`: expected float32 \(1, 2, 5\)"):
        numkv.decode_attention(q, to(k), to(k), [5], v_scale=to(scale))


@each_kind
def test_an_append_beside_others(target, to, host, rng, kind):
    """The functional form writes slots that are given, and no others."""
    if target == "cpu":
        pytest.skip("as `test_rows_of_all_sizes`, which the CPU takes by night")
    buffer, scale = operands.pool(kind, (3, 2, 4), DIMS[kind])
    rows = rng.standard_normal((3, 2, DIMS[kind])).astype(F32)
    slots = [9, -1, 2]
    pools = [to(operands.codes_of(buffer, kind).copy()) for _ in "kv"]
    scales = [to(scale.copy()) for _ in "kv"]
    numkv.paged_append(
        to(rows), to(rows), *pools, to(np.array(slots)), k_scale=scales[0], v_scale=scales[1]
    )
    want = operands.after(buffer, scale, kind, rows, slots)
    for x, of in zip(pools, scales, strict=True):
        operands.assert_same(operands.codes_words(host(x)), want[0])
        operands.assert_same(host(of), want[1])
