"""Attention mass per cached token, against softmax rows in float64."""

from itertools import product

import naive
import numpy as np
import problems
import pytest
import tolerances
from kinds import attending
from problems import Shape

import numkv
from numkv import targets

F32 = np.float32
KINDS = [*naive.DTYPES, "int8"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def function(problem, to, host, kind, **options):
    """`numkv.attention_weights` of a problem, and what the oracle says."""
    k, scales = problem.k, {}
    if kind == "int8":
        k, scale = naive.int8_quantise(np.nan_to_num(k.astype(np.float64)))
        scales = {"k_scale": to(scale)}
        values = naive.int8_dequantise(k, scale)
    else:
        values = k
    cu = problem.cu_seqlens_q
    starts = np.arange(len(problem.seq_lens) + 1) if cu is None else cu
    lse = options.pop("lse", None)
    got = numkv.attention_weights(
        to(problem.q), to(k), to(problem.seq_lens), None if cu is None else to(cu),
        lse=None if lse is None else to(lse), **scales, **options,
    )  # fmt: skip
    return host(got), naive.attention_weights(
        problem.q, values, problem.seq_lens, starts, **options
    )


SHAPES = [
    Shape(seq_lens=(5, 0, 1)),
    Shape(4, 2, 13, (17, 3), spare=1),
    Shape(6, 2, 16, (12, 4, 0, 7), new=(5, 4, 0, 1), spare=0),
    Shape(4, 1, 5, (40,), new=(9,)),
]


@pytest.mark.boundscheck
@every_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_softmax_says(target, to, host, rng, shape, kind):
    """Whatever lies past a length, NaN here, stays out."""
    problem = problems.make(rng, shape, "fp32" if kind == "int8" else kind)
    tolerances.assert_weights_close(*function(problem, to, host, kind), kind)


@pytest.mark.parametrize(
    ("kind", "q_kind"), attending(product(["fp16", "int8"], naive.DTYPES), "kq")
)
def test_queries_of_any_kind(target, to, host, rng, q_kind, kind):
    problem = problems.make(rng, SHAPES[2], "fp32" if kind == "int8" else kind, q_kind)
    tolerances.assert_weights_close(*function(problem, to, host, kind), kind)


@pytest.mark.parametrize(
    "options",
    [{"sm_scale": 0.9}, {"logits_soft_cap": 1.5}, {"window_left": 0}, {"window_left": 4},
     {"window_left": 3, "logits_soft_cap": 0.7, "sm_scale": -0.3}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_options(target, to, host, rng, shape, options):
    problem = problems.make(rng, shape)
    tolerances.assert_weights_close(*function(problem, to, host, "fp32", **options), "fp32")


def test_a_window_looks_at_nothing_before_it(target, to, host, rng):
    """Rows that no query sees may hold NaN, and a paged layer's blocks may be gone."""
    problem = problems.make(rng, Shape(2, 1, 8, (20,), new=(3,)))
    problem.k[0, :, :12] = np.nan
    got = host(
        numkv.attention_weights(
            *map(to, (problem.q, problem.k, problem.seq_lens, problem.cu_seqlens_q)), window_left=5
        )
    )
    assert np.all(got[0, 0, :12] == 0)
    np.testing.assert_allclose(got[0, 0, 12:20].sum(), 6, rtol=1e-5)


def test_an_lse_with_sinks(target, to, host, rng):
    """What sinks take is missing: the weights are those that attention used."""
    problem = problems.make(rng, SHAPES[2])
    sinks = rng.standard_normal(6).astype(F32)
    _, lse = problem.run(to, return_lse=True, sinks=sinks)
    got = host(
        numkv.attention_weights(
            *map(to, (problem.q, problem.k, problem.seq_lens, problem.cu_seqlens_q)), lse=lse
        )
    )
    starts = problem.cu_seqlens_q
    tolerances.assert_weights_close(
        got,
        naive.attention_weights(problem.q, problem.k, problem.seq_lens, starts, sinks=sinks),
        "fp32",
    )


def test_a_long_sequence(rng):
    """Several units of work, the last of them not full."""
    problem = problems.make(rng, Shape(4, 2, 32, (1300,), new=(3,)))
    starts = problem.cu_seqlens_q
    got = numkv.attention_weights(problem.q, problem.k, problem.seq_lens, starts)
    tolerances.assert_weights_close(
        got, naive.attention_weights(problem.q, problem.k, problem.seq_lens, starts), "fp32"
    )


@pytest.mark.parametrize("options", [{}, {"window_left": 50}, {"logits_soft_cap": 3.0}], ids=str)
def test_more_query_rows_than_are_converted_at_once(rng, options):
    problem = problems.make(rng, Shape(4, 1, 8, (700, 30), new=(600, 20)), "fp16")
    tolerances.assert_weights_close(
        *function(problem, np.asarray, np.asarray, "fp16", **options), "fp16"
    )


def test_large_scores(target, to, host, rng):
    """Exponentials of scores in the hundreds; one token takes it all."""
    problem = problems.make(rng, Shape(2, 1, 8, (9,), new=(2,)))
    got, want = function(problem, to, host, "fp32", sm_scale=200.0)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)


def test_strided_keys(rng):
    k = rng.standard_normal((2, 6, 3, 8)).astype(F32).transpose(0, 2, 1, 3)
    q = rng.standard_normal((2, 6, 16)).astype(F32)[:, :, 3:11]
    tolerances.assert_weights_close(
        numkv.attention_weights(q, k, [6, 2]),
        naive.attention_weights(q, k, [6, 2], [0, 1, 2]),
        "fp32",
    )


@pytest.mark.boundscheck
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("by_slot", [False, True], ids=["by block", "by slot"])
@pytest.mark.parametrize("with_ranges", [False, True], ids=["causal", "ranges"])
def test_the_operation(target, rng, kind, by_slot, with_ranges):
    """Two sequences in one pool, and a third one that is empty; garbage where nothing may be looked up."""
    where, (heads, dim, size) = targets.get(target), (2, 10, 3)
    lens, starts = np.array([7, 4, 0]), np.array([0, 2, 3, 3])
    rows = rng.standard_normal((3, heads, 7, dim))
    if kind == "int8":
        codes, scale = naive.int8_quantise(rows)
        exact, buffers = naive.int8_dequantise(codes, scale), [codes, scale]
    else:
        exact = naive.round_to(rows, kind)
        buffers = [naive.words(exact) if kind == "bf16" else exact]
    blocks = rng.permutation(9)
    table = np.array([blocks[0:3], [*blocks[3:5], 10**6], [-1, 10**6, -1]], np.int32)
    pools = [np.zeros((9, heads, size, *x.shape[3:]), x.dtype) for x in buffers]
    for s, n in enumerate(lens):
        for t in range(n):
            for pool, x in zip(pools, buffers, strict=True):
                pool[table[s, t // size], :, t % size] = x[s, :, t]
    if by_slot:
        table = (table.astype(np.int64)[:, :, None] * size + np.arange(size)).reshape(3, -1)[:, :7]
        table = np.where(np.arange(7) < lens[:, None], table, -1).astype(np.int32)
    q = rng.standard_normal((3, 4, dim)).astype(F32)
    seen = np.array([[1, 5], [0, 7], [2, 4]]) if with_ranges else np.array([[0, 6], [0, 7], [0, 4]])
    want, lse = np.zeros((3, heads, 7)), np.zeros((3, 4), F32)
    for i, s in enumerate((0, 0, 1)):
        low, high = seen[i]
        for h in range(4):
            logits = exact[s, h // 2, low:high].astype(np.float64) @ q[i, h] * 0.4
            lse[i, h] = np.log(np.exp(logits).sum())
            want[s, h // 2, low:high] += np.exp(logits) / np.exp(logits).sum()
    got = where.asarray(np.full((3, heads, 7), np.nan, F32))
    pools += [np.zeros((0, 0, 0), F32)] * (2 - len(pools))
    ranges = seen if with_ranges else np.zeros((0, 2))
    where.ops.attention_weights(
        where.asarray(q), "fp32", where.asarray(pools[0]), kind, where.asarray(pools[1]),
        where.asarray(table), where.index(lens, np.int64), where.index(starts, np.int64),
        where.index(ranges, np.int64), int(by_slot), where.asarray(lse), 0.4, 0.0, -1, got,
    )  # fmt: skip
    tolerances.assert_weights_close(where.to_host(got), want, "fp32")
