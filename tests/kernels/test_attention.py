"""`decode_attention` and `prefill_attention` over contiguous caches, against the oracle.

Bounds are relative L2 errors of each output row, from values as stored (``tolerances.py``).
"""

import itertools

import naive
import numba
import numpy as np
import problems
import pytest
import tolerances
from kinds import attending
from problems import Shape

import numkv

STORED = ["fp32", "fp16", "bf16"]
KINDS = list(naive.DTYPES)

# Every head dim and group size on the CPU; sizes the simulator can bear on CUDA.
DECODE = [
    Shape(2, 2, 32, (7, 33)),
    Shape(3, 1, 40, (0, 1, 65)),
    Shape(16, 4, 64, (129, 2, 17)),
    Shape(5, 1, 80, (31,)),
    Shape(12, 2, 96, (64, 64)),
    Shape(14, 2, 128, (300, 5)),
    Shape(8, 1, 192, (48,)),
    Shape(16, 1, 256, (19, 100)),
    Shape(7, 1, 64, (1, 0, 1, 16)),
    Shape(9, 1, 64, (70,), head_dim_v=32),
    Shape(22, 2, 192, (33,), head_dim_v=128),
    Shape(4, 2, 7, (13,), head_dim_v=3),
    Shape(1, 1, 1, (4,)),
    Shape(13, 1, 48, (0,)),
]
PREFILL = [
    Shape(4, 2, 64, (40,), new=(40,)),
    Shape(2, 1, 40, (9, 70, 1, 0), new=(4, 33, 1, 0)),
    Shape(8, 1, 128, (130, 20), new=(3, 0)),
    Shape(6, 2, 96, (17, 64), new=(17, 1)),
    Shape(3, 3, 256, (12,), new=(5,)),
    Shape(16, 1, 80, (25, 3), new=(2, 3)),
    Shape(4, 1, 192, (21,), new=(9,), head_dim_v=128),
    Shape(10, 2, 32, (257,), new=(129,)),
]
SMALL = [
    Shape(2, 1, 32, (9, 0, 1)),
    Shape(4, 2, 40, (18,), head_dim_v=8),
    Shape(3, 1, 64, (5, 6), new=(3, 2)),
    Shape(2, 2, 8, (11, 0, 2), new=(11, 0, 1), head_dim_v=16),
]
# On CUDA alone: more tokens than a split, more queries than an item, rows that are no whole chunks.
CUDA = [
    Shape(4, 2, 8, (200, 0, 70)),
    Shape(2, 1, 8, (150, 90), new=(3, 20)),
    Shape(16, 1, 80, (5,)),
    Shape(12, 1, 96, (3, 1)),
    Shape(2, 1, 256, (9,), new=(4,)),
    Shape(2, 2, 192, (12,), head_dim_v=128),
    Shape(3, 1, 13, (40,), new=(5,), head_dim_v=5),
    Shape(1, 1, 1, (4,)),
]
#: There too, split as few query rows are.
SPLIT = Shape(2, 1, 8, (60, 30), new=(3, 1))


def both_targets(cpu, cuda):
    """Parameters ``target, shape``: large shapes on the CPU, small ones on CUDA."""
    return pytest.mark.parametrize(
        ("target", "shape"),
        [("cpu", shape) for shape in cpu] + [("cuda", shape) for shape in cuda],
        indirect=["target"],
        ids=str,
    )


#: On CUDA, which reads an element at a time in the simulator, shapes are those of one kind; the others have some.
EVERY_SHAPE = [
    *(("cpu", shape, kind) for kind in STORED for shape in DECODE + PREFILL + SMALL),
    *(("cuda", shape, "fp32") for shape in SMALL + CUDA),
    *(
        ("cuda", shape, kind)
        for kind in ("fp16", "bf16")
        for shape in (SMALL[0], SMALL[3], CUDA[6])
    ),
]


@pytest.mark.parametrize(("target", "shape", "kind"), EVERY_SHAPE, indirect=["target"], ids=str)
def test_every_shape(target, to, host, rng, shape, kind):
    problems.make(rng, shape, kind).check(to, host)


@pytest.mark.parametrize("shape", [SMALL[0], SMALL[2]], ids=str)
@pytest.mark.parametrize(("kind", "q_kind"), attending(itertools.product(KINDS, KINDS), "kq"))
def test_every_dtype_of_q(to, host, rng, shape, kind, q_kind):
    """Outputs have q's dtype; float64 anywhere means float64 sums."""
    problems.make(rng, shape, kind, q_kind).check(to, host)


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(rng, seed):
    """Fresh shapes of the stated ranges, CPU."""
    group, kv_heads = int(rng.integers(1, 17)), int(rng.integers(1, 4))
    head_dim = int(rng.choice([32, 40, 64, 80, 96, 128, 192, 256]))
    lens = [int(n) for n in rng.integers(0, 200, 3)]
    new = tuple(int(rng.integers(0, min(n, 40) + 1)) for n in lens) if seed % 2 else None
    shape = Shape(group * kv_heads, kv_heads, head_dim, tuple(lens), new)
    problems.make(rng, shape, STORED[seed % 3]).check(lambda x: x, lambda x: x)


# ---------------------------------------------------------------- options


OPTIONS = [
    {"sm_scale": 0.05},
    {"sm_scale": 0.0},
    {"sm_scale": -1.5},
    {"logits_soft_cap": 0.7},
    {"logits_soft_cap": 50.0, "sm_scale": 2.0},
    {"window_left": 0},
    {"window_left": 3},
    {"window_left": 1000},
    {"sinks": True},
    {"sinks": True, "window_left": 2, "logits_soft_cap": 1.5, "sm_scale": 0.9},
]


@both_targets([DECODE[2], PREFILL[1], PREFILL[7]], [SMALL[1], SMALL[3], SPLIT])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(f"{n}{'' if v is True else v}" for n, v in o.items())
)
def test_options(target, to, host, rng, shape, options):
    if "sinks" in options:
        sinks = rng.standard_normal(shape.num_q_heads).astype(np.float32)
        options = options | {"sinks": sinks}
    problems.make(rng, shape, "bf16").check(to, host, **options)


def test_sinks_of_a_row_that_sees_nothing(target, to, host, rng):
    """0 and the sink itself."""
    sinks = np.array([0.5, -2.0], np.float32)
    out, lse = problems.make(rng, Shape(2, 1, 8, (0, 3))).run(to, sinks=sinks, return_lse=True)
    assert np.all(host(out)[0] == 0)
    assert np.array_equal(host(lse)[0], sinks)


@pytest.mark.parametrize("extreme", [-1e30, 1e30, 88.0, -1e4])
def test_sinks_far_from_the_scores(target, to, host, rng, extreme):
    sinks = np.array([extreme, 0.0], np.float32)
    out, lse = problems.make(rng, Shape(2, 1, 8, (4,))).run(to, sinks=sinks, return_lse=True)
    assert np.all(np.isfinite(host(out)))
    assert np.all(np.isfinite(host(lse)))
    if extreme == 1e30:
        assert np.all(host(out)[0, 0] == 0)


def test_out_is_filled_and_returned(target, to, host, rng):
    for shape in (SMALL[0], SMALL[2]):
        problem = problems.make(rng, shape, "fp16")
        place = to(np.full(problem.q.shape, np.nan, np.float32))
        assert problem.run(to, out=place) is place
        assert np.array_equal(host(place), host(problem.run(to)))


def test_lse_is_returned_only_when_asked_for(target, to, host, rng):
    problem = problems.make(rng, SMALL[0])
    alone = problem.run(to)
    assert not isinstance(alone, tuple)
    assert np.array_equal(host(alone), host(problem.run(to, return_lse=True)[0]))


def test_inputs_are_left_alone(rng):
    problem = problems.make(rng, PREFILL[1], "bf16", "fp16")
    inputs = [problem.q, problem.k, problem.v]
    before = [naive.words(x).copy() for x in inputs]
    problem.run(lambda x: x, return_lse=True)
    assert all(np.array_equal(naive.words(x), y) for x, y in zip(inputs, before, strict=True))


# ---------------------------------------------------------------- what may never be read


def test_a_later_tokens_nan_does_not_reach_an_earlier_query(target, to, host, rng):
    """Causality is a limit on what is read, not a weight of zero."""
    shape = Shape(2, 1, 16, (12,), new=(6,))
    problem = problems.make(rng, shape)
    want, _ = problem.expect()
    problem.k[0, :, 11] = np.nan
    problem.v[0, :, 10:] = np.nan
    out = host(problem.run(to))
    tolerances.assert_rows_close(out[:4], want[:4], 1e-5)
    assert np.all(np.isnan(out[4:]))


def test_nan_left_of_the_window_is_not_read(target, to, host, rng):
    for shape in (Shape(2, 1, 16, (20,)), Shape(2, 1, 16, (20,), new=(3,))):
        problem = problems.make(rng, shape)
        want, _ = problem.expect(window_left=4)
        first = 20 - (1 if shape.new is None else 3) - 4
        problem.k[0, :, :first] = np.nan
        problem.v[0, :, :first] = np.nan
        tolerances.assert_rows_close(host(problem.run(to, window_left=4)), want, 1e-5)


@pytest.mark.parametrize("value", [-1e30, -1e38, -60000.0])
def test_very_negative_scores_are_scores(target, to, host, value):
    """A row whose scores are all far below zero is not an empty row."""
    q = np.zeros((1, 1, 4), np.float32)
    q[..., 0] = 1
    k = np.zeros((1, 1, 5, 4), np.float32)
    k[..., 0] = value
    v = np.arange(20, dtype=np.float32).reshape(1, 1, 5, 4)
    arrays = [to(x) for x in (q, k, v, np.array([4], np.int32))]
    out, lse = numkv.decode_attention(*arrays, sm_scale=1.0, return_lse=True)
    assert np.allclose(host(out)[0, 0], v[0, 0, :4].mean(axis=0), rtol=1e-6)
    assert np.allclose(host(lse)[0, 0], value + np.log(4), rtol=1e-6)


def test_infinite_scores_of_one_key(target, to, host):
    """Minus infinity hides one key; the others share the weight."""
    q = np.ones((1, 1, 2), np.float32)
    k = np.zeros((1, 1, 3, 2), np.float32)
    k[0, 0, 1] = -np.inf
    v = np.array([[[[1, 2], [30, 40], [5, 6]]]], np.float32)
    out = numkv.decode_attention(*(to(x) for x in (q, k, v, np.array([3], np.int32))))
    assert np.allclose(host(out)[0, 0], [3, 4], rtol=1e-6)


# ---------------------------------------------------------------- views


def test_strided_views(target, to, host, rng):
    """Every array may be a slice of a wider one, as long as its last axis is contiguous."""
    q = rng.standard_normal((4, 5, 20), np.float32)
    k = rng.standard_normal((3, 4, 14, 20), np.float32)
    v = rng.standard_normal((2, 3, 9, 20), np.float32)
    lens = np.array([[6, 0], [3, 0]], np.int32)
    cut = np.s_[::2, 1:5, 3:11], np.s_[1:, ::2, ::2, 4:12], np.s_[:, 1:, 2:, 10:16]
    out = numkv.decode_attention(to(q)[cut[0]], to(k)[cut[1]], to(v)[cut[2]], to(lens[:, 0].copy()))
    want, _ = naive.attention(q[cut[0]], k[cut[1]], v[cut[2]], lens[:, 0])
    tolerances.assert_rows_close(host(out), want, 1e-5)


def test_strided_out(rng):
    problem = problems.make(rng, Shape(4, 2, 8, (5, 9)))
    place = np.full((2, 8, 12), 7, np.float32)
    problem.run(lambda x: x, out=place[:, ::2, 2:10])
    tolerances.assert_rows_close(place[:, ::2, 2:10], problem.expect()[0], 1e-5)
    assert np.all(place[:, 1::2] == 7)
    assert np.all(place[:, :, :2] == 7)


def test_token_major_storage(target, to, host, rng):
    """K and V with heads and tokens swapped in memory, as a model makes them."""
    rows = rng.standard_normal((2, 6, 2, 8), np.float32)
    q = rng.standard_normal((2, 4, 8), np.float32)
    lens = np.array([6, 4], np.int32)
    moved = to(rows).swapaxes(1, 2) if target == "cpu" else to(rows).transpose((0, 2, 1, 3))
    out = numkv.decode_attention(to(q), moved, moved, to(lens))
    want, _ = naive.attention(q, rows.swapaxes(1, 2), rows.swapaxes(1, 2), lens)
    tolerances.assert_rows_close(host(out), want, 1e-5)


# ---------------------------------------------------------------- splits, batches, threads


LONG = [
    Shape(2, 1, 64, (5000,)),
    Shape(4, 2, 32, (3001, 9, 0, 4097)),
    Shape(2, 1, 32, (4100, 2500), new=(5, 1)),
    Shape(3, 3, 128, (1281, 300, 0, 513)),  # single query rows, whose turns are longer
]


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_long_contexts(rng, shape, kind):
    """Long enough that a sequence is split and merged again."""
    problem = problems.make(rng, shape, kind)
    problem.check(lambda x: x, lambda x: x)
    sinks = rng.standard_normal(shape.num_q_heads).astype(np.float32)
    problem.check(lambda x: x, lambda x: x, window_left=2000, sinks=sinks)


@pytest.mark.boundscheck
@pytest.mark.parametrize("shape", [DECODE[1], DECODE[9], PREFILL[1], *LONG[1:]], ids=str)
def test_nothing_out_of_range_is_touched(rng, shape):
    """Decode, prefill and splits; compiled with checks of every index when CI asks for it."""
    sinks = rng.standard_normal(shape.num_q_heads).astype(np.float32)
    problem = problems.make(rng, problems.replace(shape, spare=0), "fp32")
    problem.check(lambda x: x, lambda x: x, window_left=33, sinks=sinks, logits_soft_cap=5.0)


def test_long_context_in_float64(rng):
    problems.make(rng, LONG[0], "fp64", "fp64").check(lambda x: x, lambda x: x)


def test_one_outlier_in_a_long_context(rng):
    """Split merges survive parts whose largest scores are far apart."""
    problem = problems.make(rng, Shape(1, 1, 32, (4000,)))
    problem.k[0, 0, 100] = 40 * problem.q[0, 0]
    problem.k[0, 0, 2000:3000] *= 1e-3
    problem.check(lambda x: x, lambda x: x)


ALONE = {
    "cpu": [
        Shape(4, 2, 64, (3000, 0, 1, 300, 5000, 31)),
        Shape(6, 2, 40, (700, 90, 1, 2500), new=(70, 5, 1, 9)),
    ],
    "cuda": [Shape(2, 1, 8, (150, 0, 1, 70)), Shape(2, 1, 8, (90, 4, 1), new=(5, 0, 1))],
}


@pytest.mark.parametrize("which", [0, 1], ids=["decode", "prefill"])
def test_a_result_does_not_depend_on_the_batch(target, to, host, rng, which):
    """Bit for bit, alone and beside others, in any order, with other unused room."""
    problem = problems.make(rng, ALONE[target][which], "bf16")
    together = [host(x) for x in problem.run(to, return_lse=True)]
    cu = problem.cu_seqlens_q
    for s in range(len(problem.seq_lens)):
        rows = np.s_[s : s + 1] if cu is None else np.s_[cu[s] : cu[s + 1]]
        alone = problem.only(s).run(to, return_lse=True)
        for got, want in zip(alone, together, strict=True):
            assert np.array_equal(host(got), want[rows], equal_nan=True)


@pytest.mark.parametrize("which", [0, 1], ids=["decode", "prefill"])
def test_a_result_does_not_depend_on_the_number_of_threads(rng, which):
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("this machine has one thread")
    problem = problems.make(rng, ALONE["cpu"][which], "fp32")
    results = []
    for threads in (1, 2):
        with numkv.num_threads(threads):
            results.append(problem.run(lambda x: x, return_lse=True))
    for one, two in zip(*results, strict=True):
        assert np.array_equal(one, two)


def test_the_same_call_gives_the_same_bits(rng):
    problem = problems.make(rng, ALONE["cpu"][0], "fp16")
    first = problem.run(lambda x: x)
    assert all(np.array_equal(first, problem.run(lambda x: x)) for _ in range(3))
