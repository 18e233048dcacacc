"""Attention over paged pools: decode and prefill, batched."""

from dataclasses import replace
from itertools import product

import naive
import numpy as np
import paged_problems
import pytest
from kinds import attending
from problems import Shape

import numkv

F32, I32, I64 = np.float32, np.int32, np.int64
KINDS = [*naive.DTYPES, "int8"]


def same(x):
    return x


def both_targets(cpu, cuda):
    """Parameters ``target, shape, block_size``: large shapes on the CPU, small ones on CUDA."""
    rows = [("cpu", *row) for row in cpu] + [("cuda", *row) for row in cuda]
    return pytest.mark.parametrize(
        ("target", "shape", "block_size"), rows, indirect=["target"], ids=str
    )


DECODE = [
    (Shape(2, 2, 32, (7, 33)), 1),
    (Shape(16, 4, 64, (129, 2, 17, 0)), 16),
    (Shape(14, 2, 128, (300, 5)), 3),
    (Shape(7, 1, 80, (1, 0, 31, 16)), 7),
    (Shape(9, 1, 64, (70,), head_dim_v=32), 5),
    (Shape(4, 2, 7, (13,), head_dim_v=3), 4),
    (Shape(1, 1, 256, (100,)), 256),
]
PREFILL = [
    (Shape(4, 2, 64, (40,), new=(40,)), 16),
    (Shape(2, 1, 40, (9, 70, 1, 0), new=(4, 33, 1, 0)), 3),
    (Shape(8, 1, 128, (130, 20), new=(3, 0)), 1),
    (Shape(4, 1, 192, (21,), new=(9,), head_dim_v=128), 16),
    (Shape(10, 2, 32, (257,), new=(129,)), 7),
]
SMALL = [
    (Shape(2, 1, 8, (9, 0, 1)), 3),
    (Shape(4, 2, 16, (18,), head_dim_v=8), 16),
    (Shape(3, 1, 8, (5, 6), new=(3, 2)), 1),
    (Shape(2, 2, 8, (11, 0, 2), new=(11, 0, 1), head_dim_v=16), 3),
    (Shape(2, 1, 8, (130, 70)), 16),
]


@pytest.mark.boundscheck
@both_targets(DECODE + PREFILL + SMALL, SMALL)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_every_shape(target, to, host, rng, shape, block_size, kind):
    """NaN or garbage in unused slots, unused blocks, scales and table entries reaches no output."""
    paged_problems.make(rng, shape, kind, block_size=block_size).check(to, host)


@both_targets([SMALL[0], SMALL[2]], [SMALL[0]])
@pytest.mark.parametrize(("kind", "q_kind"), attending(product(KINDS, naive.DTYPES), "kq"))
def test_every_dtype_of_q(target, to, host, rng, shape, block_size, kind, q_kind):
    paged_problems.make(rng, shape, kind, q_kind, block_size=block_size).check(to, host)


OPTIONS = [
    {"sm_scale": 0.05},
    {"sm_scale": -1.5},
    {"logits_soft_cap": 0.7},
    {"window_left": 0},
    {"window_left": 4},
    {"sinks": True},
    {"sinks": True, "window_left": 2, "logits_soft_cap": 1.5, "sm_scale": 0.9},
]


@both_targets([DECODE[1], PREFILL[1]], [SMALL[0], SMALL[3]])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(f"{n}{'' if v is True else v}" for n, v in o.items())
)
def test_options(target, to, host, rng, shape, block_size, kind, options):
    if "sinks" in options:
        options = options | {"sinks": rng.standard_normal(shape.num_q_heads).astype(F32)}
    paged_problems.make(rng, shape, kind, block_size=block_size).check(to, host, **options)


APART = [("int8", "fp16"), ("int8", "bf16"), ("fp32", "int8")]


@both_targets([DECODE[1]], [SMALL[3]])
@pytest.mark.parametrize(("k_kind", "v_kind"), attending(APART, "kv"))
def test_k_and_v_kinds_apart(target, to, host, rng, shape, block_size, k_kind, v_kind):
    problem = paged_problems.make(rng, shape, k_kind, v_kind=v_kind, block_size=block_size)
    problem.check(to, host, window_left=6)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_a_later_tokens_rows_do_not_reach_an_earlier_query(target, to, host, rng, kind):
    """Causality and the window are limits on what is read, in codes, scales and values."""
    problem = paged_problems.make(rng, Shape(2, 1, 16, (12,), new=(6,)), kind, block_size=4)
    want = host(problem.run(to, window_left=5))
    for position in (0, 11):  # left of every window; the last token
        at = problem.block_table[0, position // 4], slice(None), position % 4
        for x in (problem.k_pool, problem.v_pool) if kind == "fp32" else (
            problem.k_scale, problem.v_scale
        ):  # fmt: skip
            x[at] = np.nan
    out = host(problem.run(to, window_left=5))
    assert np.array_equal(out[:5], want[:5])
    assert np.all(np.isnan(out[5:]))


def test_out_is_filled_and_returned(target, to, host, rng):
    for shape, block_size in (SMALL[0], SMALL[2]):
        problem = paged_problems.make(rng, shape, "int8", block_size=block_size)
        place = to(np.full(problem.problem.q.shape, np.nan, F32))
        assert problem.run(to, out=place) is place
        assert np.array_equal(host(place), host(problem.run(to)))


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_strided_pools(target, to, host, rng, kind):
    """Pools that are slices of wider arrays: all K and V of a model in one buffer, say."""
    problem = paged_problems.make(rng, Shape(4, 2, 8, (9, 4)), kind, block_size=4)
    wide = np.stack([problem.k_pool, problem.v_pool], axis=1)
    (q, _, _, table, lens), scales = problem.arguments(to)
    if scales:
        both = to(np.stack([problem.k_scale, problem.v_scale], axis=1))
        scales = {"k_scale": both[:, 0], "v_scale": both[:, 1]}
    pools = to(wide)[:, 0], to(wide)[:, 1]
    out = numkv.paged_decode_attention(q, *pools, table, lens, **scales)
    assert np.array_equal(host(out), host(problem.run(to)))


LONG = (Shape(4, 2, 32, (3001, 9, 0, 4097)), 16)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_long_contexts(rng, kind):
    """Long enough that a sequence is split and merged again."""
    problem = paged_problems.make(rng, LONG[0], kind, block_size=LONG[1])
    problem.check(same, same)
    problem.check(same, same, window_left=2000, sinks=np.linspace(-1, 1, 4, dtype=F32))


ALONE = {
    "cpu": [
        Shape(4, 2, 64, (3000, 0, 1, 300, 31)),
        Shape(6, 2, 40, (700, 90, 1, 2500), new=(70, 5, 1, 9)),
    ],
    "cuda": [Shape(2, 1, 8, (100, 0, 1, 30)), Shape(2, 1, 8, (50, 4, 1), new=(5, 0, 1))],
}


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("which", [0, 1], ids=["decode", "prefill"])
def test_a_result_does_not_depend_on_the_batch(target, to, host, rng, which, kind):
    """Bit for bit, alone and beside others."""
    problem = paged_problems.make(rng, ALONE[target][which], kind, block_size=5)
    together = [host(x) for x in problem.run(to, return_lse=True)]
    cu = problem.problem.cu_seqlens_q
    for s in range(len(problem.block_table)):
        rows = np.s_[s : s + 1] if cu is None else np.s_[cu[s] : cu[s + 1]]
        alone = problem.only(s).run(to, return_lse=True)
        for got, want in zip(alone, together, strict=True):
            assert np.array_equal(host(got), want[rows], equal_nan=True)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("which", [0, 1], ids=["decode", "prefill"])
def test_nor_on_threads_or_layout(rng, which, kind):
    """Any block size, any table, one block per sequence or contiguous: the same bits, on the CPU."""
    seed, shape = int(rng.integers(2**32)), ALONE["cpu"][which]
    results = []
    for block_size in (1, 3, 16, 4096):
        # The same seed draws the same rows; what it draws after them, the table, differs.
        drawn = np.random.default_rng(seed)
        problem = paged_problems.make(drawn, shape, kind, block_size=block_size)
        results.append(problem.run(same, return_lse=True))
    with numkv.num_threads(1):
        results.append(problem.run(same, return_lse=True))
    # Blocks of 4096 tokens, in order, are a contiguous cache.
    own = problem.block_table[:, 0].clip(0)
    k, v = problem.k_pool[own], problem.v_pool[own]
    scales = {}
    if kind == "int8":
        scales = {"k_scale": problem.k_scale[own], "v_scale": problem.v_scale[own]}
    contiguous = replace(problem.problem, k=k, v=v)
    results.append(contiguous.run(same, return_lse=True, **scales))
    for out, lse in results[1:]:
        assert np.array_equal(out, results[0][0])
        assert np.array_equal(lse, results[0][1])
