"""Paged pools of the caller's own: append, fused write, decode and prefill, batched."""

from dataclasses import replace
from itertools import product

import naive
import numba
import numpy as np
import paged_problems
import pytest
from kinds import attending
from messages import about
from problems import Shape

import numkv
from numkv.blocks.tables import slot_mapping

F32, I32, I64 = np.float32, np.int32, np.int64
KINDS = [*naive.DTYPES, "int8"]
STORED = ["fp32", "fp16", "bf16", "int8"]


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


# ---------------------------------------------------------------- what a result depends on

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
    results, before = [], numba.get_num_threads()
    for block_size in (1, 3, 16, 4096):
        # The same seed draws the same rows; what it draws after them, the table, differs.
        drawn = np.random.default_rng(seed)
        problem = paged_problems.make(drawn, shape, kind, block_size=block_size)
        results.append(problem.run(same, return_lse=True))
    try:
        numba.set_num_threads(1)
        results.append(problem.run(same, return_lse=True))
    finally:
        numba.set_num_threads(before)
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


# ---------------------------------------------------------------- append


def pools(to, kind, v_kind=None, shape=(4, 2, 3), dim=4, dim_v=4):
    """Pools of a recognisable filling, and their scales."""
    out, scales = [], {}
    for which, name, d in (("k", kind, dim), ("v", v_kind or kind, dim_v)):
        dtype = np.int8 if name == "int8" else naive.DTYPES[name]
        out.append(to(np.full((*shape, d), 77, dtype)))
        if name == "int8":
            scales[f"{which}_scale"] = to(np.full(shape, 7, F32))
    return out, scales


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
@pytest.mark.parametrize("kinds", [(k, k) for k in KINDS] + [("fp16", "int8")], ids=str)
def test_append(target, to, host, rng, kinds, dtype):
    """-1 skips a row; the others go where they are sent, and nothing else changes."""
    (k_pool, v_pool), scales = pools(to, *kinds, dim_v=6)
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
    (k_pool, v_pool), scales = pools(to, kind)
    none = to(np.zeros((0, 2, 4), F32))
    numkv.paged_append(none, none, k_pool, v_pool, to(np.zeros(0, I64)), **scales)
    assert np.all(host(k_pool).astype(F32) == 77)


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("bad", [12, -2, 2**31 - 1, -(2**31)])
def test_slots_outside_the_pool(target, to, host, kind, bad):
    """An error before anything is written; unasked on CUDA, the row is skipped."""
    (k_pool, v_pool), scales = pools(to, kind)
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
    (k_pool, v_pool), scales = pools(to, "int8")
    rows = np.ones((3, 2, 4), F32)
    rows[2, 1, 3] = np.nan
    slots = to(np.array([0, -1, 1], I32))
    with pytest.raises(numkv.NonFiniteInput) as caught:
        numkv.paged_append(to(rows), to(rows), k_pool, v_pool, slots, **scales)
    assert caught.value.index == (2, 1, 3)
    assert np.all(host(k_pool) == 77)
    assert np.all(host(scales["v_scale"]) == 7)


# ---------------------------------------------------------------- fused write


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_write_is_a_layers_write(target, to, host, rng, kind, mode):
    """Two ragged sequences at once; each as in a layer of its own, bit for bit."""
    heads, q_heads, dim, size = 2, 4, 8, 3
    lens, new, table = [7, 2], [4, 2], np.array([[5, 0, 3], [1, -1, -1]], I32)
    qkv = rng.standard_normal((6, (q_heads + 2 * heads) * dim), F32)
    options = {"num_q_heads": q_heads, "qk_mode": mode, "eps": 1e-5}
    if mode:
        tables = naive.rope_tables(8, dim)
        options |= {n: to(x) for n, x in zip(("cos", "sin"), tables, strict=True)}
    if mode in (1, 4):
        for name in ("q_norm_weight", "k_norm_weight"):
            options[name] = to((1 + 0.1 * rng.standard_normal(dim)).astype(F32))
    (k_pool, v_pool), scales = pools(to, kind, shape=(6, heads, size), dim=dim, dim_v=dim)
    slots = slot_mapping(table, lens, size, new_lens=new)
    positions = np.array([3, 4, 5, 6, 0, 1], I32)
    q = numkv.paged_write(
        to(qkv), k_pool, v_pool, to(slots), positions=to(positions), **options, **scales
    )
    for s, rows in ((0, np.s_[:4]), (1, np.s_[4:])):
        layer = numkv.PagedLayer(3, size, heads, dim, kind=kind, target=target)
        layer.seq_len = lens[s] - new[s]
        assert np.array_equal(host(layer.write(to(qkv[rows]), **options)), host(q)[rows])
        for which, pool in (("k", k_pool), ("v", v_pool)):
            got = naive.gather(host(pool), table[s : s + 1], [lens[s]])
            want = naive.gather(host(getattr(layer, which)), layer.block_table[None], [lens[s]])
            fresh = np.s_[:, :, lens[s] - new[s] :]
            assert np.array_equal(got[fresh], want[fresh])
            if scales:
                name = f"{which}_scale"
                got = naive.gather(host(scales[name]), table[s : s + 1], [lens[s]])
                want = naive.gather(host(getattr(layer, name)), layer.block_table[None], [lens[s]])
                assert np.array_equal(got[fresh], want[fresh])
    untouched = np.ones((6, size), bool)
    untouched.ravel()[slots] = False
    assert np.all(host(k_pool).swapaxes(1, 2)[untouched].astype(F32) == 77)


def test_write_leaves_skipped_tokens_out(target, to, host, rng):
    """Slot -1 gives q, and stores nothing; q_out takes q."""
    (k_pool, v_pool), _ = pools(to, "fp32")
    qkv, place = rng.standard_normal((2, 20), F32), to(np.zeros((2, 1, 4), F32))
    q = numkv.paged_write(
        to(qkv), k_pool, v_pool, to(np.array([-1, 4], I64)), num_q_heads=1, qk_mode=0, q_out=place
    )
    assert q is place
    assert np.array_equal(host(q)[:, 0], qkv[:, :4])
    k = host(k_pool)
    assert np.array_equal(k[1, :, 1], qkv[1, 4:12].reshape(2, 4))
    assert np.count_nonzero(k != 77) == 8


def test_bad_writes(target, to, host):
    (k_pool, v_pool), scales = pools(to, "int8")
    qkv, slots = np.ones((2, 20), F32), np.array([0, 4], I64)
    tables = [to(x) for x in naive.rope_tables(3, 4)]
    options = {
        "num_q_heads": 1, "qk_mode": 2, "cos": tables[0], "sin": tables[1],
        "positions": to(np.array([0, 2], I64)), **scales,
    }  # fmt: skip
    check = {"validate": True} if target == "cuda" else {}
    bad_row = qkv.copy()
    bad_row[1, 7] = np.inf
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
