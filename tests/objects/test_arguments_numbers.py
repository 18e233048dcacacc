"""Numbers, switches and sizes: None is the default, what is no such number is refused by name, on both targets."""

import decimal
import fractions

import ml_dtypes
import naive
import numpy as np
import pytest
from walked import each

import numkv
from numkv import numbers
from numkv.errors import DimensionMismatch, NumkvError, UnsupportedDType

F32, I32, I64 = np.float32, np.int32, np.int64
NAMED = (NumkvError, ValueError, TypeError)


def decode(rng, to, **options):
    q, k, v = rng.standard_normal((3, 1, 2, 4, 8), F32)
    return numkv.decode_attention(to(q[:, :, 0].copy()), to(k), to(v), to(np.array([3])), **options)


# ---------------------------------------------------------------- options of attention


NO_INTEGERS = [1.0, 2.5, np.float32(1), "1", b"1", True, [1], (), 1j, fractions.Fraction(1),
               decimal.Decimal(1), np.array([1]), np.ma.masked, object(), np.datetime64(1, "s")]  # fmt: skip
NO_REALS = ["1", b"1", True, [1.0], (), 1j, fractions.Fraction(1), decimal.Decimal(1), np.array([1.0]),
            np.array(1j), np.ma.masked, object(), np.datetime64(1, "s"), np.nan, np.inf, -np.inf, 10**400,
            np.float32("nan"), ml_dtypes.bfloat16("inf"), 1e39, -(2**200)]  # fmt: skip
NO_SWITCHES = ["yes", "", 2, -1, 1.0, [True], np.zeros(2), np.array([]), object()]
BAD = {
    "sm_scale": NO_REALS,
    "logits_soft_cap": [*NO_REALS, -1.0, -1e-30, 1e-40, np.float64(-3)],
    "window_left": [*NO_INTEGERS, -2, 2**63, 10**400, -(2**70), np.uint64(2**63), np.nan, np.inf],
    "return_lse": NO_SWITCHES,
    "validate": NO_SWITCHES,
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


@each("name, value", CASES)
def test_options_that_are_no_such_numbers(rng, name, value):
    with pytest.raises(NAMED, match=f"`{name}`: expected"):
        decode(rng, np.asarray, **{name: value})


@pytest.mark.parametrize("name", [*BAD, "sinks", "out", "k_scale", "v_scale"])
def test_none_is_the_default(target, to, host, name):
    def run(**more):
        return host(decode(np.random.default_rng(3), to, **more))

    assert np.array_equal(run(**{name: None}), run())


GOOD = [
    (
        "sm_scale",
        [0.25, np.float32(0.25), np.float64(0.25), np.array(0.25), ml_dtypes.bfloat16(0.25)],
    ),
    ("sm_scale", [0.0, 0, np.int8(0), -0.0]),
    ("sm_scale", [-3.0, -3, np.int16(-3), np.array(-3)]),
    ("logits_soft_cap", [2.0, 2, np.float16(2), np.array(2)]),
    ("window_left", [1, np.int8(1), np.uint64(1), np.array(1)]),
    ("window_left", [-1, 3, 2**31, 2**62, 2**63 - 1]),
    ("return_lse", [True, np.True_, 1]),
    ("return_lse", [False, np.False_, 0, None]),
]


@pytest.mark.parametrize(("name", "values"), GOOD)
def test_one_number_in_many_guises(target, to, host, name, values):
    found = []
    for value in values:
        result = decode(np.random.default_rng(4), to, **{name: value})
        found.append([host(x) for x in (result if isinstance(result, tuple) else (result,))])
    for other in found[1:]:
        assert len(other) == len(found[0])
        assert all(map(np.array_equal, other, found[0]))


@pytest.mark.parametrize("sm_scale", [0.0, -0.7, 1e-42, 30.0])
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_any_finite_scale_of_scores(target, to, host, rng, kind, sm_scale):
    """0 attends evenly; a negative number prefers what a positive one avoids."""
    tokens = 5 if target == "cuda" else 700
    layer = numkv.ContiguousLayer(tokens, 2, 32, kind=kind, target=target)
    rows = rng.standard_normal((2, tokens, 2, 32), F32)
    layer.append(to(rows[0]), to(rows[1]))
    q = rng.standard_normal((1, 4, 32), F32)
    out, lse = (host(x) for x in layer.decode_attention(to(q), sm_scale=sm_scale, return_lse=True))
    k, v = (np.moveaxis(x, 0, 1)[None] for x in rows)
    if kind == "int8":
        k, v = (
            naive.dequantise(host(x), host(s))
            for x, s in ((layer.k, layer.k_scale), (layer.v, layer.v_scale))
        )
    want, want_lse = naive.attention(q, k, v, [tokens], sm_scale=sm_scale)
    np.testing.assert_allclose(out, want, atol=2e-3, rtol=2e-3)
    np.testing.assert_allclose(lse, want_lse, atol=2e-2, rtol=1e-3)


# ---------------------------------------------------------------- sinks


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sinks_are_looked_at(target, to, host, bad):
    sinks = np.array([0.5, bad], F32)
    check = {"validate": True} if target == "cuda" else {}
    room = to(np.full((1, 2, 8), 7, F32))
    with pytest.raises(ValueError, match=r"^`sinks`: expected finite numbers, or -inf"):
        decode(np.random.default_rng(1), to, sinks=to(sinks), out=room, **check)
    assert np.all(host(room) == 7)


def test_sinks_that_are_not_looked_at_on_cuda():
    """NaN is no sink, and +inf takes all attention; the other heads are what they were."""
    from numkv import targets

    cuda = targets.get("cuda")

    def run(sinks):
        sinks = None if sinks is None else cuda.asarray(np.array(sinks, F32))
        found = decode(np.random.default_rng(1), cuda.asarray, sinks=sinks, return_lse=True)
        return [cuda.to_host(x) for x in found]

    plain, plain_lse = run(None)
    for sink in (np.nan, -np.inf):
        out, lse = run([0.5, sink])
        np.testing.assert_allclose(out[:, 1], plain[:, 1], rtol=1e-6)
        np.testing.assert_allclose(lse[:, 1], plain_lse[:, 1], rtol=1e-6)
    out, lse = run([0.5, np.inf])
    assert np.array_equal(out[:, 0], run([0.5, 0])[0][:, 0])
    assert not out[:, 1].any()
    assert lse[0, 1] == np.inf


def test_minus_infinity_is_no_sink(target, to, host):
    def run(**more):
        found = decode(np.random.default_rng(2), to, return_lse=True, **more)
        return [host(x) for x in found]

    for a, b in zip(run(sinks=to(np.full(2, -np.inf, F32))), run(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# ---------------------------------------------------------------- scores beyond floats


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_scores_beyond_float32_stay_in_their_row(rng, kind):
    tokens = 600
    layer = numkv.ContiguousLayer(tokens, 2, 32, kind=kind)
    rows = rng.standard_normal((tokens, 2, 32), F32)
    layer.append(rows, rows)
    q = rng.standard_normal((12, 4, 32), F32)
    want, want_lse = layer.decode_attention(q, return_lse=True)
    q[5, 2] = 3e38
    out, lse = layer.decode_attention(q, return_lse=True)
    others = np.ones((12, 4), bool)
    others[5, 2] = False
    assert np.array_equal(out[others], want[others])
    assert np.array_equal(lse[others], want_lse[others])


# ---------------------------------------------------------------- other numbers


def write(to, **more):
    pools = [to(np.zeros((2, 2, 3, 8), F32)) for _ in range(2)]
    weight = to(np.ones(8, F32))
    cos, sin = (to(x) for x in naive.rope_tables(4, 8))
    given = {"num_q_heads": 4, "qk_mode": 1, "cos": cos, "sin": sin, "positions": to(np.array([0, 2])),
             "q_norm_weight": weight, "k_norm_weight": weight} | more  # fmt: skip
    qkv = np.random.default_rng(5).standard_normal((2, 8 * 8), F32)
    return numkv.paged_write(to(qkv), *pools, to(np.array([1, 4])), **given), pools


BAD_WRITES = {
    "eps": [*NO_REALS[:-2], -1e-9, -1.0],
    "num_q_heads": [*NO_INTEGERS, None, -4, 3, 5, 2**63, 10**400],
    "qk_mode": [*NO_INTEGERS, None, -1, 5, 2**70],
    "check_finite": NO_SWITCHES,
    "validate": NO_SWITCHES,
}


@each("name, value", [(n, v) for n, values in BAD_WRITES.items() for v in values])  # fmt: skip
def test_numbers_of_the_fused_write(name, value):
    with pytest.raises(NAMED, match=f"`{name}`: expected"):
        write(np.asarray, **{name: value})


def test_defaults_of_the_fused_write(target, to, host):
    want, want_pools = write(to)
    same = [
        ("eps", None),
        ("eps", F32(1e-6)),
        ("check_finite", None),
        ("validate", None),
        ("qk_mode", np.int8(1)),
    ]
    for more in (dict([option]) for option in same):
        q, pools = write(to, **more)
        np.testing.assert_allclose(host(q), host(want), rtol=1e-6)
        for a, b in zip(pools, want_pools, strict=True):
            np.testing.assert_allclose(host(a), host(b), rtol=1e-6)


@pytest.mark.parametrize(
    "scale", [0, -1.0, 1e39, 1e-50, True, "1", np.nan, fractions.Fraction(1, 2)], ids=repr
)
def test_scales_of_heads(scale):
    codes = np.zeros((1, 2, 4, 8), ml_dtypes.float8_e4m3fn)
    q = np.ones((1, 2, 8), F32)
    with pytest.raises(NAMED, match=r"`k_scale`: expected"):
        numkv.decode_attention(q, codes, codes, [2], k_scale=scale)


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_no_q_heads_and_no_queries(target, to, host, kind):
    """Nothing to do, and nothing is what comes out."""
    layer = numkv.ContiguousLayer(4, 2, 32, kind=kind, target=target)
    layer.append(*(to(np.ones((3, 2, 32), F32)) for _ in range(2)))
    scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if kind != "fp32" else {}
    for shape, lens in (((1, 0, 32), [3]),):
        out, lse = numkv.decode_attention(
            to(np.zeros(shape, F32)),
            layer.k,
            layer.v,
            to(np.array(lens)),
            return_lse=True,
            **scales,
        )
        assert host(out).shape == shape
        assert host(lse).shape == shape[:2]
    starts = to(np.array([0, 0]))
    out = numkv.prefill_attention(
        to(np.zeros((0, 4, 32), F32)), layer.k, layer.v, to(np.array([3])), starts, **scales
    )
    assert host(out).shape == (0, 4, 32)
    only_k = {"k_scale": layer.k_scale} if scales else {}
    weights = numkv.attention_weights(
        to(np.zeros((1, 0, 32), F32)), layer.k, to(np.array([3])), **only_k
    )
    assert not host(weights).any()


def test_a_head_dim_of_nothing():
    empty = np.zeros((1, 2, 4, 0), F32)
    with pytest.raises(DimensionMismatch, match=r"`q`: expected a head_dim"):
        numkv.decode_attention(np.zeros((1, 2, 0), F32), empty, empty, [2])


# ---------------------------------------------------------------- kinds, targets, plans, warmup


HOSTILE = [
    None,
    3,
    "",
    "fp99",
    "f" * 10**6,
    b"fp16",
    ["fp16"],
    {},
    object(),
    np.float32(1),
    float("nan"),
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda x: repr(x)[:15])
def test_kinds_and_targets_by_other_names(name):
    with pytest.raises(UnsupportedDType, match=r"^`kind`: expected one of") as caught:
        numkv.kind(name)
    assert len(str(caught.value)) < 300
    with pytest.raises(ValueError, match=r"^`target`: expected") as said:
        numkv.targets.get(name)
    assert len(str(said.value)) < 300


@pytest.mark.parametrize("n", [*NO_INTEGERS, -1, 2**63], ids=lambda x: repr(x)[:15])
def test_sizes_that_kinds_are_asked_for(n):
    kind = numkv.kind("int4")
    for call, name in (
        (kind.words_per_row, "head_dim"),
        (kind.scales_per_row, "head_dim"),
        (kind.elements_of, "words"),
        (kind.row_bytes, "head_dim"),
        (lambda x: kind.bytes_per_token(x, 32), "num_kv_heads"),
        (lambda x: kind.bytes_per_token(2, x), "head_dim"),
        (lambda x: kind.bytes_per_token(2, 32, x), "head_dim_v"),
        (lambda x: kind.scale_shape((1, 2, 3), x), "head_dim"),
        (lambda x: numkv.kind("fp8").scale_shape((1, 2, 3), x), "head_dim"),
        (lambda x: numkv.kind("int8").scale_shape((1, 2, 3), x), "head_dim"),
        (lambda x: numkv.kind("fp16").scale_shape((1, 2, 3), x), "head_dim"),
        (lambda x: kind.scale_shape((1, 2, x), 32), "rows"),
    ):
        with pytest.raises(NAMED, match=f"^`{name}`: expected"):
            call(n)


def test_sizes_of_any_integer_type_give_ints():
    kind = numkv.kind("int8")
    assert type(kind.bytes_per_token(np.int8(100), np.int8(100))) is int
    assert kind.bytes_per_token(np.int8(100), np.int8(100)) == 100 * 2 * 104


def describe(**more):
    sizes = dict.fromkeys(("batch_size", "num_heads", "new_len", "max_cache_len", "d_k", "d_v"), 2)
    return numkv.AppendDescriptor(**sizes | {"dtype": "fp32"} | more)


@pytest.mark.parametrize(
    "name", ["batch_size", "num_heads", "new_len", "max_cache_len", "d_k", "d_v"]
)
def test_extents_of_plans(name):
    for n in [*NO_INTEGERS, None, -1, 2**63]:
        with pytest.raises(NAMED, match=f"^`{name}`: expected"):
            numkv.AppendPlan.select(describe(**{name: n}))
    plan = numkv.AppendPlan.select(describe(**{name: np.int8(3)}))
    assert plan.descriptor == describe(**{name: 3})


@pytest.mark.parametrize(
    "dtype",
    [None, 3, "f4,f4", ">f4", "int8", "O", {"names": ["a"]}, (np.void, 10**30), object(), "M8[s]"],
    ids=lambda x: repr(x)[:15],
)
def test_dtypes_of_plans(dtype):
    with pytest.raises(UnsupportedDType, match=r"^`dtype`: expected fp64, fp32, fp16 or bf16, got"):
        numkv.AppendPlan.select(describe(dtype=dtype))


def test_other_things_than_descriptors_arguments_and_streams(target):
    for thing in (None, 3, {}, object()):
        with pytest.raises(TypeError, match=r"^`descriptor`: expected an AppendDescriptor"):
            numkv.AppendPlan.select(thing, target=target)
        plan = numkv.AppendPlan.select(describe(), target=target)
        for call in (plan.run, plan.can_implement):
            with pytest.raises(TypeError, match=r"^`args`: expected AppendArgs"):
                call(thing)
    pointers = (3,) if target == "cpu" else ()  # CUDA's streams may be named by them
    for stream in ("default", object(), True, -1, 2**64, *pointers):
        with pytest.raises(numkv.NotSupported, match=r"^`stream`: expected"):
            plan.run(numkv.AppendArgs(None, None, None, None, None), stream=stream)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"kinds": 3}, "kinds"), ({"kinds": [("fp16", "fp16", "fp16")]}, "kinds"), ({"kinds": [None]}, "kind"),
        ({"kinds": ["fp16", "fp99"]}, "kind"), ({"dtypes": "int8"}, "dtypes"), ({"dtypes": 3}, "dtypes"),
        ({"dtypes": ["fp8"]}, "dtypes"), ({"target": "tpu"}, "target"), ({"rotate": "no"}, "rotate"),
        ({"residual": 2}, "residual"), ({"head_dim": 5}, "head_dim"), ({"head_dim": 0}, "head_dim"),
    ],
)  # fmt: skip
def test_arguments_of_warmup(arguments, name):
    """All are looked at before anything is compiled."""
    from numkv.kernels.builder import cache_stats

    before = cache_stats()
    with pytest.raises(NAMED, match=f"`{name}`: expected"):
        numkv.warmup(**arguments)
    assert cache_stats() == before


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("sizes", [(2**40, 8, 16), (10**30, 1, 1), (1, 10**400, 1), (0, 2**62, 64)])
def test_buffers_that_no_memory_holds(target, sizes):
    from numkv import targets
    from numkv.storage.pool import Pool

    kind = numkv.kind("fp16")
    with pytest.raises(
        DimensionMismatch, match=r"`num_blocks` .* `head_dim`: expected sizes whose product"
    ):
        Pool.allocate(targets.get(target), sizes, 128, 128, kind, kind)


def test_bytes_are_counted_before_they_are_taken():
    assert numbers.check_bytes({"a": 3, "b": 5}, 0.5) == 8
    assert numbers.check_bytes({"a": 2**47}) == 2**47
    with pytest.raises(
        DimensionMismatch, match=r"^`a` \* `b`: expected .* 2\^47 bytes, got 140737488355328 \* 2"
    ):
        numbers.check_bytes({"a": 2**47, "b": 2})
    with pytest.raises(DimensionMismatch, match=r"`a`"):
        numbers.check_bytes({"a": 2**48}, 0.75)


def test_indices_and_sizes():
    class Index:
        def __index__(self):
            return 2

    class Failing:
        def __index__(self):
            raise RuntimeError("no")

    assert numbers.check_size("n", Index()) == numbers.check_index("n", np.uint8(2), 3) == 2
    for call in (numbers.check_size, lambda name, n: numbers.check_index(name, n, 3)):
        for n in [*NO_INTEGERS, None, Failing()]:
            with pytest.raises(TypeError, match=r"^`n`: expected an integer, got"):
                call("n", n)
    with pytest.raises(IndexError, match=r"^`n`: expected an index in \[0, 3\), got an integer of"):
        numbers.check_index("n", 10**4000, 3)
