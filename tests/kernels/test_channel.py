"""`quantise_groups`: token groups by channel, from blocks of one size to blocks of another."""

import naive
import numpy as np
import pytest

import numkv
from numkv import targets

HEADS, TOKENS = 2, naive.CHANNEL_TOKENS
KINDS = ["int8_channel", "int4_channel_fine", "int4_channel"]


@pytest.mark.boundscheck
@pytest.mark.parametrize("source", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "dim"), list(zip(KINDS, (5, 34, 34), strict=True)))
def test_quantise_groups(target, to, host, rng, kind, dim, source):
    """Codes, scales and zero points to the bit; other groups stay as they are."""
    where = targets.get(target)
    rows = naive.round_to(rng.standard_normal((3, HEADS, 128, dim)) * 9, source)
    rows[1, 0, 70, 3] = np.nan
    of_kind = numkv.kind(kind)
    pool = np.full((4, HEADS, TOKENS, of_kind.words_per_row(dim)), 77, of_kind.word)
    scale = np.full(of_kind.scale_shape((4, HEADS, TOKENS), dim), 9, np.uint16)
    here = to(rows if source == "fp32" else naive.words(rows))
    codes, scales = to(pool.copy()), to(scale.copy())
    groups, places = np.array([3, 0, 4]), np.array([2, 3, 0])
    of, there = (where.index(x, np.int64) for x in (groups, places))
    where.ops.quantise_groups(here, source, of, codes, kind, scales, there)
    by_group = np.swapaxes(rows.reshape(3, HEADS, 2, TOKENS, dim), 1, 2).reshape(
        6, HEADS, TOKENS, dim
    )
    pool[places], scale[places, :, 0] = naive.channel_group(by_group[groups], kind)
    assert np.array_equal(host(codes), pool)
    found = host(scales)
    lost = np.zeros_like(scale, bool)
    lost[places, :, 0, :dim] = np.isnan(scale[places, :, 0, :dim].view(naive.DTYPES["bf16"]))
    assert np.array_equal(found[~lost], scale[~lost])
    assert np.isnan(found[lost].view(naive.DTYPES["bf16"])).all()
    assert lost.sum() == 1


def problem(rng, kind, dim=64, blocks=5, block_size=128):
    """Pools of keys by channel, with outlier channels, and of values; and the values that they stand for."""
    heads = HEADS
    k = rng.standard_normal((blocks, heads, block_size // TOKENS, TOKENS, dim))
    k[..., 3] += 90
    k[..., 7] *= 40
    words, scales = naive.channel_group(k, kind)
    k = naive.channel_values(words, scales[..., None, :], kind).reshape(
        blocks, heads, block_size, dim
    )
    v, v_scale = naive.int8_quantise(rng.standard_normal((blocks, heads, block_size, dim)))
    stored = words.reshape(blocks, heads, block_size, -1), scales, v, v_scale
    return stored, k, naive.int8_dequantise(v, v_scale)


def attend(where, to, q, q_kind, stored, kind, table, lens, starts, ranges, options):
    """`attend` by words; options are the window and the soft cap."""
    real = np.float64 if q_kind == "fp64" else np.float32
    out, lse = to(np.zeros_like(q)), to(np.zeros(q.shape[:2], np.float32))
    k, k_scale, v, v_scale = map(to, stored)
    window, cap = options
    where.ops.attend(
        where.words(to(q)), q_kind, k, kind, k_scale, v, "int8", v_scale, where.index(table, np.int32),
        where.index(lens, np.int64), where.index(starts, np.int64), where.index(ranges, np.int64), 0,
        q.shape[2] ** -0.5, cap, window, to(np.empty(0, real)), where.words(out), lse,
    )  # fmt: skip
    return out, lse


CASES = [  # queries of each sequence, window, cap, ranges, block size
    ([1, 1], -1, 0.0, False, 128),
    ([1, 5], 70, 0.0, False, 64),
    ([3, 9], -1, 8.0, False, 128),
    ([2, 2], -1, 0.0, True, 128),
]


@pytest.mark.boundscheck
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "window", "cap", "with_ranges", "block_size"), CASES)
def test_attention(target, to, host, rng, kind, tokens, window, cap, with_ranges, block_size):
    """Over decoded rows: a tile's scales are those of its tokens, wherever ranges and windows begin."""
    where, dim = targets.get(target), 40
    stored, k, v = problem(rng, kind, dim, 640 // block_size, block_size)
    longest = 333 if target == "cpu" else 200  # which the simulator takes seconds for
    lens, starts = np.array([70, longest]), np.concatenate([[0], np.cumsum(tokens)])
    table = rng.permutation(640 // block_size)
    table = np.stack([table, table[::-1]])[:, : -(-longest // block_size)]
    q = rng.standard_normal((starts[-1], 2 * HEADS, dim)).astype(np.float32)
    q[:, :, 3] /= 90
    q[:, :, 7] /= 40
    ranges = np.empty((0, 2), np.int64)
    if with_ranges:
        ranges = np.array([[3, 69], [0, 64], [66, longest - 33], [130, 131]])
    of_k, of_v = (naive.gather(x, table, [table.shape[1] * block_size] * 2) for x in (k, v))
    want, log = naive.attention_to_seen(
        q, of_k, of_v, lens, starts, logits_soft_cap=cap, window_left=window,
        ranges=ranges if with_ranges else None,
    )  # fmt: skip
    found, lse = attend(
        where, to, q, "fp32", stored, kind, table, lens, starts, ranges, (window, cap)
    )
    off = np.linalg.norm(host(found) - want) / np.linalg.norm(want)
    assert off < 1e-4
    np.testing.assert_allclose(host(lse), log, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_kind", ["bf16", pytest.param("fp64", marks=pytest.mark.nightly)])
def test_queries_of_other_kinds(target, to, host, rng, kind, q_kind):
    where = targets.get(target)
    stored, k, v = problem(rng, kind, 64, 2)
    q = naive.round_to(rng.standard_normal((1, 4, 64)), q_kind)
    table, lens, starts = np.array([[1, 0]]), np.array([200]), np.array([0, 1])
    want, _ = naive.attention(q, *(naive.gather(x, table, lens) for x in (k, v)), lens)
    none = np.empty((0, 2), np.int64)
    found, _ = attend(where, to, q, q_kind, stored, kind, table, lens, starts, none, (-1, 0.0))
    off = np.linalg.norm(host(found).astype(np.float64) - want) / np.linalg.norm(want)
    assert off < {"bf16": 4e-3, "fp64": 1e-4}[q_kind]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_weights(target, to, host, rng, kind):
    where, dim = targets.get(target), 34
    stored, k, _ = problem(rng, kind, dim, 3)
    q = rng.standard_normal((3, 2 * HEADS, dim)).astype(np.float32)
    table, lens, starts = np.array([[2, 0, 1]]), np.array([300]), np.array([0, 3])
    of_k = naive.gather(k, table, lens)
    want = naive.attention_weights(q, of_k, lens, starts)
    _, lse = naive.attention(q, of_k, np.zeros_like(of_k), lens, starts)
    weights = to(np.zeros(want.shape, np.float32))
    where.ops.attention_weights(
        to(q), "fp32", to(stored[0]), kind, to(stored[1]), where.index(table, np.int32),
        where.index(lens, np.int64), where.index(starts, np.int64), where.index(np.empty((0, 2)), np.int64), 0,
        to(lse.astype(np.float32)), dim**-0.5, 0.0, -1, weights,
    )  # fmt: skip
    np.testing.assert_allclose(host(weights), want, atol=2e-5)


@pytest.mark.boundscheck
@pytest.mark.parametrize("kind", KINDS)
def test_bounds(target, to, host, rng, kind):
    """Of the rows that count, in each column; where a scale of theirs is NaN nothing passes."""
    where, dim = targets.get(target), 18
    stored, k, _ = problem(rng, kind, dim, 4)
    stored[1][2, 1, 1, 5] = 0x7FC0
    low, high = (to(np.full((4, HEADS, dim), x, np.float32)) for x in (7, 8))
    blocks, counts = np.array([2, 0, 3]), np.array([128, 70, 64])
    where.ops.key_bounds(
        to(stored[0]), kind, to(stored[1]), where.index(blocks, np.int64), where.index(counts, np.int64), low, high
    )  # fmt: skip
    below, above = np.full((4, HEADS, dim), 7.0), np.full((4, HEADS, dim), 8.0)
    for block, count in zip(blocks, counts, strict=True):
        rows = k[block, :, :count]
        below[block], above[block] = rows.min(1), rows.max(1)
    below[2, 1, 5], above[2, 1, 5] = -np.inf, np.inf
    np.testing.assert_allclose(host(low), below, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(host(high), above, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_decoded(target, to, host, rng, kind):
    where = targets.get(target)
    stored, k, _ = problem(rng, kind, 10, 2)
    rows, scales = stored[0][1, :, 60:70], stored[1][1][:, np.arange(60, 70) // TOKENS]
    found = where.dequantise(numkv.kind(kind), to(rows), to(np.ascontiguousarray(scales)))
    np.testing.assert_array_equal(host(found), k[1, :, 60:70].astype(np.float32))


def test_bad_channels_are_nan_for_their_group_alone(target, to, host, rng):
    """NaN in a scale is NaN in every score of its tokens, also where queries are integers."""
    where = targets.get(target)
    stored, _, _ = problem(rng, "int8_channel", 64, 2)
    stored[1][0, 0, 1, 9] = 0x7FC0
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    starts, none = np.array([0, 1]), np.empty((0, 2), np.int64)
    for length, bad in ((64, [False] * 4), (65, [True, True, False, False])):
        args = np.array([[0, 1]]), np.array([length]), starts, none, (-1, 0.0)
        found, _ = attend(where, to, q, "fp32", stored, "int8_channel", *args)
        assert np.isnan(host(found)).any(axis=2)[0].tolist() == bad
