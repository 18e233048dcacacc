"""Small appends and writes on the CPU, which one compiled call checks and does: what it takes, what it leaves alone."""

import subprocess
import sys

import naive
import numpy as np
import pytest
from processes import PATIENCE

import numkv
from numkv import QKMode
from numkv.errors import CacheFull, DimensionMismatch, NonFiniteInput, NotSupported
from numkv.writing import fast_path
from numkv.writing.fused_write import Projection

pytestmark = pytest.mark.kernels

HEADS, DIM, SIZE = 2, 32, 4
F32 = np.float32


class Sub(np.ndarray):
    """An array type of the caller's."""


def rows(rng, tokens=1, dtype=F32):
    return rng.standard_normal((tokens, HEADS, DIM)).astype(dtype)


def every_second(x):
    """The same elements, with a step along the last axis."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def paged(rng, kind):
    """Arguments of `paged_append` for one token."""
    pool = numkv.PagedPool(3, SIZE, HEADS, DIM, kind=kind).pool
    made = {"k": rows(rng), "v": rows(rng), "k_pool": pool.values("k"), "v_pool": pool.values("v"),
            "slot_mapping": np.array([5]), "k_scale": None, "v_scale": None}  # fmt: skip
    if pool.k_kind.has_scales:
        made |= {"k_scale": pool.scales("k"), "v_scale": pool.scales("v")}
    return made


def contiguous(rng, dtype=F32):
    """Arguments of `append` for two tokens of one sequence."""
    made = {name: rng.standard_normal((1, HEADS, n, DIM)).astype(dtype)
            for name, n in (("k_new", 2), ("v_new", 2), ("k_cache", 6), ("v_cache", 6))}  # fmt: skip
    return made | {"cache_offsets": np.array([3])}


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8", "int4"])
def test_ordinary_calls_go_at_once(rng, kind):
    made = paged(rng, kind)
    assert fast_path.paged_append(**made, look=True)
    assert made["k_pool"][1, :, 1].any()
    assert not made["k_pool"][[0, 2]].any()
    assert fast_path.append(**contiguous(rng, np.float16))


BAD_PAGED = {
    "strided rows": lambda a: {"k": every_second(a["k"])},
    "strided pool": lambda a: {"v_pool": every_second(a["v_pool"])},
    "read-only pool": lambda a: {"v_pool": read_only(a["v_pool"])},
    "float64 rows": lambda a: {"k": a["k"].astype(np.float64), "v": a["v"].astype(np.float64)},
    "rows of two dtypes": lambda a: {"v": a["v"].astype(np.float16)},
    "big-endian rows": lambda a: {"k": a["k"].astype(">f4"), "v": a["v"].astype(">f4")},
    "a head too few": lambda a: {"v": a["v"][:, :1]},
    "narrow rows": lambda a: {"k": a["k"][..., :8]},
    "another rank": lambda a: {"k": a["k"][0]},
    "two tokens of v": lambda a: {"v": np.concatenate([a["v"]] * 2)},
    "pools of two sizes": lambda a: {"v_pool": a["v_pool"][:2]},
    "a slot outside": lambda a: {"slot_mapping": np.array([3 * SIZE])},
    "a slot below -1": lambda a: {"slot_mapping": np.array([-2])},
    "float slots": lambda a: {"slot_mapping": np.array([1.0])},
    "two slots": lambda a: {"slot_mapping": np.array([1, 2])},
    "a list": lambda a: {"slot_mapping": [1]},
    "an array type of the caller's": lambda a: {"k": a["k"].view(Sub)},
    "scales of another shape": lambda a: {"k_scale": np.zeros((3, HEADS, SIZE - 1), F32)},
    "scales of another dtype": lambda a: {"k_scale": np.zeros((3, HEADS, SIZE))},
    "no scales": lambda a: {"v_scale": None},
    "read-only scales": lambda a: {"v_scale": read_only(a["v_scale"])},
    "NaN": lambda a: {"v": np.where(np.arange(DIM) == 7, F32("nan"), a["v"])},
    "infinity": lambda a: {"k": np.where(np.arange(DIM) == DIM - 1, F32("inf"), a["k"])},
}


@pytest.mark.parametrize("what", BAD_PAGED)
def test_what_is_unusual_is_left_alone(rng, what):
    made = paged(rng, "int8")
    made |= BAD_PAGED[what](made)
    assert not fast_path.paged_append(**made, look=True)
    for name in ("k_pool", "v_pool", "k_scale", "v_scale"):
        assert made[name] is None or not made[name].any()


BAD_CONTIGUOUS = {
    "strided rows": lambda a: {"k_new": every_second(a["k_new"])},
    "strided cache": lambda a: {"v_cache": every_second(a["v_cache"])},
    "read-only cache": lambda a: {"v_cache": read_only(a["v_cache"])},
    "another dtype": lambda a: {"v_new": a["v_new"].astype(np.float64)},
    "a head too few": lambda a: {"v_new": a["v_new"][:, :1]},
    "a row more": lambda a: {"v_new": a["v_cache"][:, :, :3]},
    "caches of two lengths": lambda a: {"v_cache": a["v_cache"][:, :, :5]},
    "narrow rows": lambda a: {"k_new": a["k_new"][..., :8]},
    "another rank": lambda a: {"k_new": a["k_new"][0]},
    "two offsets": lambda a: {"cache_offsets": np.array([0, 0])},
    "int32 offsets": lambda a: {"cache_offsets": np.array([0], np.int32)},
    "integers": lambda a: {name: a[name].view(np.int32) for name in list(a)[:4]},
}


@pytest.mark.parametrize("what", BAD_CONTIGUOUS)
def test_what_is_unusual_is_left_alone_in_contiguous_caches(rng, what):
    made = contiguous(rng)
    made |= BAD_CONTIGUOUS[what](made)
    before = [made[name].copy() for name in ("k_cache", "v_cache")]
    assert not fast_path.append(**made)
    assert all(map(np.array_equal, before, (made["k_cache"], made["v_cache"])))


@pytest.mark.parametrize("offset", [-5, -1, 0, 3, 5, 6, 2**62, -(2**63)])
def test_rows_outside_are_skipped(rng, offset):
    made = contiguous(rng)
    made["cache_offsets"][0] = offset
    expected = made["k_cache"].copy()
    for t in range(2):
        if 0 <= offset + t < 6:
            expected[:, :, offset + t] = made["k_new"][:, :, t]
    assert fast_path.append(**made)
    assert np.array_equal(made["k_cache"], expected)


def test_rows_of_the_cache_itself_are_left_alone(rng):
    """And then refused: some of them would be read after they were written."""
    made = contiguous(rng)
    made |= {"k_new": made["k_cache"][:, :, :3], "v_new": made["v_cache"][:, :, 2:5]}
    before = [made[name].copy() for name in ("k_cache", "v_cache")]
    assert not fast_path.append(**made)
    assert all(map(np.array_equal, before, (made["k_cache"], made["v_cache"])))


def test_bits_of_nan_are_copied(rng):
    made = contiguous(rng)
    made["k_new"].view(np.uint32)[:] = 0x7FA12345  # a signalling one
    assert fast_path.append(**made)
    assert np.all(made["k_cache"].view(np.uint32)[:, :, 3:5] == 0x7FA12345)


def test_strided_tokens_and_a_batch_of_slots(rng):
    """Any steps but along the last axis; -1 skips; int32 slots."""
    made = paged(rng, "fp16")
    new = rng.standard_normal((HEADS, 8, DIM)).astype(F32).transpose(1, 0, 2)[::-2]
    made |= {"k": new[:3], "v": new[1:4], "slot_mapping": np.array([7, -1, 0], np.int32)}
    assert fast_path.paged_append(**made, look=True)
    for name, x in (("k_pool", made["k"]), ("v_pool", made["v"])):
        expected = np.zeros_like(made[name])
        expected[1, :, 3], expected[0, :, 0] = x[0], x[2]
        assert np.array_equal(made[name], expected)


@pytest.mark.parametrize("make", [numkv.ContiguousLayer, numkv.KVCache, numkv.PagedLayer])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_errors_of_objects_come_before_changes(rng, make, bad):
    if make is numkv.KVCache:
        cache = make(2, HEADS, DIM, max_seq_len=2 * SIZE, kind="int8")
    else:
        cache = make(2 if make is numkv.PagedLayer else 2 * SIZE, *[SIZE] * (make is numkv.PagedLayer),
                     HEADS, DIM, kind="int8")  # fmt: skip
    layer = (1,) if make is numkv.KVCache else ()
    cache.append(*layer, rows(rng), rows(rng))
    before = cache.k_scales(1).copy() if layer else cache.k_scale.copy()
    wrong = rows(rng)
    wrong[0, 1, 5] = bad
    with pytest.raises(NonFiniteInput) as caught:
        cache.append(*layer, rows(rng), wrong)
    assert caught.value.index == (0, 1, 5)
    with pytest.raises(DimensionMismatch):
        cache.append(*layer, rows(rng), rows(rng, 2))
    with pytest.raises(CacheFull):
        cache.append(*layer, rows(rng, 2 * SIZE), rows(rng, 2 * SIZE))
    assert np.array_equal(cache.k_scales(1) if layer else cache.k_scale, before)
    cache.append(*layer, rows(rng), wrong, check_finite=False)
    for _ in range(2 * SIZE - 2):
        cache.append(*layer, rows(rng), rows(rng))
    with pytest.raises(CacheFull):
        cache.append(*layer, rows(rng), rows(rng))


def test_device_arrays_are_refused(rng):
    try:
        x = numkv.targets.get("cuda").asarray(rows(rng))
    except NotSupported:
        pytest.skip("needs CUDA or its simulator")
    layer = numkv.ContiguousLayer(4, HEADS, DIM, kind="fp32")
    with pytest.raises(NotSupported):
        layer.append(x, x)
    assert len(layer) == 0


ALONE = """
import numpy as np, numkv
from numba.np.ufunc import parallel
x = np.ones((1, 2, 32), np.float32)
layer = numkv.ContiguousLayer(8, 2, 32, kind="fp32")
cache = numkv.KVCache(1, 2, 32)
cache.append(0, x, x)
cache.decode_attention(0, x)
layer.append(x, x)
layer.decode_attention(x)
layer.write(np.ones((1, 6 * 32), np.float32), num_q_heads=2, qk_mode=0)
print(parallel._is_initialized)
"""


@pytest.mark.slow
def test_small_calls_start_no_threads():
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=env, timeout=PATIENCE, check=True
    )  # fmt: skip
    assert done.stdout.split() == ["False"]


# -- fused writes

Q_HEADS = 4


def fused(rng, kind, dtype=F32, tokens=1, by_slot=False):
    """Arguments of `pool_write` for a pool of three blocks, and the pool."""
    pool = numkv.PagedPool(3, SIZE, HEADS, DIM, kind=kind).pool
    cos, sin = rng.standard_normal((2, 16, DIM // 2), F32)
    weight = rng.standard_normal(DIM, F32)
    made = {
        "pool": pool, "qkv": rng.standard_normal((tokens, (Q_HEADS + 2 * HEADS) * DIM)).astype(dtype),
        "num_q_heads": Q_HEADS, "cos": cos, "sin": sin, "qk_mode": QKMode.NORM_HALF_SPLIT,
        "q_weight": weight, "k_weight": weight, "eps": 1e-6,
        "q_out": np.zeros((tokens, Q_HEADS, DIM), dtype), "angles": fast_path.NOT_BY_SLOT, "first": 2,
        "places": np.array([2, 0, 1], np.int32), "start": SIZE - 1, "room": 4, "look": True,
    }  # fmt: skip
    if by_slot:
        made |= {"angles": np.arange(tokens), "places": np.arange(tokens) + 3, "room": 0}
    return made


def buffers(pool):
    return [pool.k, pool.v, pool.k_scale, pool.v_scale]


def generally(made):
    """The same write on the general path."""
    m, pool = made, made["pool"]
    p = Projection.check(
        pool, m["qkv"], m["num_q_heads"], m["cos"], m["sin"], m["qk_mode"], m["q_weight"], m["k_weight"],
        m["eps"], m["q_out"],
    )  # fmt: skip
    if m["angles"] is fast_path.NOT_BY_SLOT:
        p.write(pool, m["places"], m["start"], m["first"])
    else:
        p.scatter(pool, m["places"], m["angles"])
    return p.q_out


#: Kinds of pools and dtypes of projections, by block table and by slot.
WRITES = [
    *(("fp32", F32, by_slot) for by_slot in (False, True)),
    *(("int8", F32, by_slot) for by_slot in (False, True)),
    ("int4", F32, False),
    pytest.param("int4", F32, True, marks=pytest.mark.slow),
    ("bf16", naive.DTYPES["bf16"], False),
    pytest.param("fp16", np.float16, False, marks=pytest.mark.nightly),
    pytest.param("fp16", np.float16, True, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("kind", "dtype", "by_slot"), WRITES)
def test_ordinary_writes_go_at_once(kind, dtype, by_slot):
    for mode in QKMode if kind == "fp32" else [QKMode.HALF_SPLIT]:
        results = []
        for general in (False, True):
            made = fused(np.random.default_rng(3), kind, dtype, 2, by_slot) | {"qk_mode": mode}
            made["q_out"] = None if general else made["q_out"]
            if general:
                q = generally(made)
            else:
                tokens, q = fast_path.pool_write(**made)
                assert tokens == 2
                assert q is made["q_out"]
            results.append([q, *buffers(made["pool"])])
        assert results[0][0].any()
        assert all(map(np.array_equal, *results))


def _with_nan(qkv, column):
    qkv = qkv.copy()
    qkv[0, column] = np.nan
    return qkv


BAD_FUSED = {
    "a column more": lambda a: {"qkv": np.zeros((1, a["qkv"].shape[1] + 1), F32)},
    "strided projections": lambda a: {"qkv": every_second(a["qkv"])},
    "big-endian projections": lambda a: {"qkv": a["qkv"].astype(">f4")},
    "integers": lambda a: {"qkv": a["qkv"].astype(np.int32)},
    "one dimension": lambda a: {"qkv": a["qkv"][0]},
    "an array type of the caller's": lambda a: {"qkv": a["qkv"].view(Sub)},
    "q heads as a float": lambda a: {"num_q_heads": 4.0},
    "q heads too few": lambda a: {"num_q_heads": 3},
    "no q heads": lambda a: {"num_q_heads": -4, "q_out": None},
    "no such mode": lambda a: {"qk_mode": 5},
    "a mode that is a list": lambda a: {"qk_mode": [1]},
    "no cos": lambda a: {"cos": None},
    "strided sin": lambda a: {"sin": every_second(a["sin"])},
    "half-precision tables": lambda a: {"cos": a["cos"].astype("f2"), "sin": a["sin"].astype("f2")},
    "tables of two dtypes": lambda a: {"cos": a["cos"].astype(np.float64)},
    "tables of two lengths": lambda a: {"sin": a["sin"][:-1]},
    "tables of two widths": lambda a: {"sin": a["sin"][:, :-1]},
    "wide tables": lambda a: {"cos": np.zeros((16, DIM), F32), "sin": np.zeros((16, DIM), F32)},
    "a position past the tables": lambda a: {"first": 16},
    "a position before them": lambda a: {"first": -1},
    "no weight": lambda a: {"k_weight": None},
    "a short weight": lambda a: {"q_weight": a["q_weight"][:-1]},
    "a weight of another dtype": lambda a: {"q_weight": a["q_weight"].astype(np.float64)},
    "read-only q": lambda a: {"q_out": read_only(a["q_out"])},
    "strided q": lambda a: {"q_out": every_second(a["q_out"])},
    "q of another dtype": lambda a: {"q_out": a["q_out"].astype(np.float64)},
    "q of two tokens": lambda a: {"q_out": np.zeros((2, Q_HEADS, DIM), F32)},
    "narrow q": lambda a: {"q_out": a["q_out"][..., :-2]},
    "no room": lambda a: {"room": 0},
    "eps that is no number": lambda a: {"eps": "1e-6"},
    "NaN in k": lambda a: {"qkv": _with_nan(a["qkv"], Q_HEADS * DIM)},
    "NaN in v": lambda a: {"qkv": _with_nan(a["qkv"], -1)},
}


@pytest.mark.parametrize("what", BAD_FUSED)
def test_unusual_writes_are_left_alone(rng, what):
    made = fused(rng, "int8")
    made |= BAD_FUSED[what](made)
    assert fast_path.pool_write(**made)[0] == -1
    written = [*buffers(made["pool"]), np.zeros(1) if made["q_out"] is None else made["q_out"]]
    assert not any(x.any() for x in written)


@pytest.mark.parametrize(
    "bad", [{"places": np.array([12])}, {"places": np.array([-2])}, {"places": np.array([1, 2])},
            {"angles": np.array([16])}, {"angles": np.array([-1])}, {"angles": np.array([1, 2])}]
)  # fmt: skip
def test_slots_and_positions_outside_are_left_alone(rng, bad):
    made = fused(rng, "int8", by_slot=True) | bad
    assert fast_path.pool_write(**made)[0] == -1
    assert not any(x.any() for x in [*buffers(made["pool"]), made["q_out"]])


def test_nan_in_q_is_no_obstacle(rng):
    made = fused(rng, "int8")
    made["qkv"][0, 0] = np.nan
    assert fast_path.pool_write(**made)[0] == 1
    made = fused(rng, "int8", by_slot=True) | {"places": np.array([-1])}
    assert fast_path.pool_write(**made)[0] == 1
    assert made["q_out"].any()
    assert not made["pool"].k.any()


@pytest.mark.parametrize("make", [numkv.ContiguousLayer, numkv.PagedLayer])
def test_errors_of_writes_come_before_changes(rng, make):
    made = fused(rng, "int8")
    layer = make(2 if make is numkv.PagedLayer else 2 * SIZE, *[SIZE] * (make is numkv.PagedLayer),
                 HEADS, DIM, kind="int8")  # fmt: skip
    options = {
        "num_q_heads": Q_HEADS,
        "qk_mode": QKMode.HALF_SPLIT,
        "cos": made["cos"],
        "sin": made["sin"],
    }
    layer.write(made["qkv"], **options)
    before = [x.copy() for x in (layer.k, layer.v, layer.k_scale, layer.v_scale)]
    with pytest.raises(NonFiniteInput) as caught:
        layer.write(_with_nan(made["qkv"], (Q_HEADS + HEADS) * DIM + 3), **options)
    assert caught.value.index == (0, (Q_HEADS + HEADS) * DIM + 3)
    with pytest.raises(CacheFull):
        layer.write(np.repeat(made["qkv"], 2 * SIZE, 0), **options)
    with pytest.raises(IndexError, match="rows; make the tables longer"):
        layer.write(made["qkv"], pos_offset=16, **options)
    assert len(layer) == 1
    assert all(map(np.array_equal, before, (layer.k, layer.v, layer.k_scale, layer.v_scale)))
    for _ in range(2 * SIZE - 1):
        layer.write(made["qkv"], pos_offset=0, **options)
    with pytest.raises(CacheFull):
        layer.write(made["qkv"], **options)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8", "int4", "fp8_e4m3"])
def test_steps_append_small_calls_at_once(rng, kind, monkeypatch):
    """Rows of several sequences, in blocks that are not neighbours: the same as on the general path."""
    k, v = rows(rng, 5), rows(rng, 5)
    found, short = [], fast_path.pool_append
    for at_once in (True, False):
        done = []

        def append(*args, at_once=at_once, done=done):
            done.append(short(*args) if at_once else -1)
            return done[-1]

        monkeypatch.setattr(fast_path, "pool_append", append)
        cache = numkv.PagedKVCache(1, HEADS, DIM, num_blocks=9, block_size=SIZE, kind=kind)
        seqs = [cache.add() for _ in range(3)]
        for lens in ([1, 3, 1], [2, 1, 2]):
            step = cache.reserve(seqs, lens)
            step.append(0, k, v)
            cache.commit(step)
        assert done == ([5, 5] if at_once else [-1, -1])
        arrays = cache.arrays(0)
        found.append([x.tobytes() for x in (arrays.k, arrays.v, arrays.k_scale, arrays.v_scale)
                      if x is not None])  # fmt: skip
    assert found[0] == found[1]


def test_what_steps_refuse_is_said_as_ever(rng):
    cache = numkv.PagedKVCache(1, HEADS, DIM, num_blocks=4, block_size=SIZE, kind="int8")
    step = cache.reserve([cache.add()], 2)
    bad = rows(rng, 2)
    bad[1, 0, 3] = np.nan
    for error, k, v in (
        (NonFiniteInput, bad, rows(rng, 2)),
        (DimensionMismatch, rows(rng, 3), rows(rng, 3)),
        (DimensionMismatch, rows(rng, 2), rows(rng, 1)),
        (NotSupported, every_second(rows(rng, 2)), rows(rng, 2)),
    ):
        with pytest.raises(error):
            step.append(0, k, v)
    assert step.unwritten_layers == [0]
