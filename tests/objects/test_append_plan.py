"""`AppendPlan` and `numkv.append`: new rows into caches at per-sequence offsets."""

import naive
import numpy as np
import pytest
from messages import about

import numkv
from numkv import AppendArgs, AppendDescriptor, AppendPlan

KINDS = list(naive.DTYPES)
B, H, L_NEW, L_MAX, D_K, D_V = 3, 4, 5, 16, 8, 6


def ramp(kind, start, step, *shape):
    """``start + step * i`` over the flat index, in a kind's dtype."""
    return (start + step * np.arange(np.prod(shape))).astype(naive.DTYPES[kind]).reshape(shape)


def reference_problem(kind, offsets):
    return {
        "k_new": ramp(kind, 1, 0.0625, B, H, L_NEW, D_K),
        "v_new": ramp(kind, -1, -0.0625, B, H, L_NEW, D_V),
        "k_cache": ramp(kind, 100, 0.5, B, H, L_MAX, D_K),
        "v_cache": ramp(kind, -100, -0.5, B, H, L_MAX, D_V),
        "cache_offsets": np.array(offsets, np.int64),
    }


def describe(arrays, dtype=None):
    """The descriptor that fits the arrays."""
    batch, heads, new_len, d_k = arrays["k_new"].shape
    return AppendDescriptor(
        batch,
        heads,
        new_len,
        arrays["k_cache"].shape[2],
        d_k,
        arrays["v_new"].shape[3],
        arrays["k_new"].dtype if dtype is None else dtype,
    )


def moved(arrays, to):
    """The arguments of a run, on a target; copies, so that `arrays` stay what they were."""
    return AppendArgs(**{name: to(value.copy()) for name, value in arrays.items()})


def run(arrays, to, host, target):
    """Run a plan on a target; returns the caches as they are afterwards."""
    args = moved(arrays, to)
    AppendPlan.select(describe(arrays), target=target).run(args)
    return host(args.k_cache), host(args.v_cache)


def expect(arrays):
    return tuple(
        naive.plan_append(arrays[f"{x}_new"], arrays[f"{x}_cache"], arrays["cache_offsets"])
        for x in "kv"
    )


def assert_same_bits(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert np.array_equal(naive.words(a), naive.words(b))


# ---------------------------------------------------------------- the reference system's own test

REFERENCE = [  # offsets, sum of K, sum of V, spots of K (index -> value), in float32 and float64
    ((0, 0, 0), 529065.0, -317436.75, {(0, 0, 0, 0): 1, (1, 2, 4, 3): 18.1875, (0, 0, 15, 0): 160}),
    ((7, 7, 7), 515625.0, -309876.75, {(0, 0, 7, 0): 1, (1, 2, 11, 3): 18.1875}),
]


@pytest.mark.parametrize(("offsets", "sum_k", "sum_v", "spots"), REFERENCE)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_table(target, to, host, kind, offsets, sum_k, sum_v, spots):
    arrays = reference_problem(kind, offsets)
    k, v = run(arrays, to, host, target)
    assert_same_bits((k, v), expect(arrays))
    changed = [
        int(np.sum(np.any(naive.words(a) != naive.words(b), axis=(0, 1, 3)))) * B * H * a.shape[3]
        for a, b in ((k, arrays["k_cache"]), (v, arrays["v_cache"]))
    ]
    assert changed == [480, 360]
    if kind in ("fp32", "fp64"):
        assert k.sum(dtype=np.float64) == sum_k
        assert v.sum(dtype=np.float64) == sum_v
        assert {index: float(k[index]) for index in spots} == spots
        assert (k[2, 3, 15, 7], v[2, 3, 15, 5]) == (867.5, -675.5)


# ---------------------------------------------------------------- rows outside are skipped

SKIPS = [
    (16, 16, 16),
    (-5, -5, -5),
    (13, -2, 15),
    (12, 11, -4),
    (-100, 100, 0),
    (2**31, 2**32, 2**32 + 1),
    (-(2**31), -(2**32), -(2**32) + 1),
    (2**63 - 1, 2**63 - 3, -(2**63)),
    (-(2**63) + 2, 2**63 - 5, 2**62),
]


@pytest.mark.boundscheck
@pytest.mark.parametrize("offsets", SKIPS)
def test_rows_outside_are_skipped(target, to, host, offsets):
    arrays = reference_problem("fp32", offsets)
    assert_same_bits(run(arrays, to, host, target), expect(arrays))


def test_a_negative_offset_writes_the_rows_that_fit(target, to, host):
    arrays = reference_problem("fp32", (-2, -2, -2))
    k, _ = run(arrays, to, host, target)
    assert np.array_equal(k[:, :, :3], arrays["k_new"][:, :, 2:])
    assert np.array_equal(k[:, :, 3:], arrays["k_cache"][:, :, 3:])


@pytest.mark.parametrize("new_len", [1, 17, 40])
def test_more_new_rows_than_the_cache_holds(target, to, host, rng, new_len):
    arrays = {
        "k_new": rng.standard_normal((2, 1, new_len, 3)),
        "v_new": rng.standard_normal((2, 1, new_len, 2)),
        "k_cache": np.zeros((2, 1, 8, 3)),
        "v_cache": np.zeros((2, 1, 8, 2)),
        "cache_offsets": np.array([-20, 3]),
    }
    assert_same_bits(run(arrays, to, host, target), expect(arrays))


# ---------------------------------------------------------------- bits

NANS = {
    "fp64": [0x7FF0000000000001, 0xFFF8DEADBEEF0001, 0x7FFFFFFFFFFFFFFF],
    "fp32": [0x7F800001, 0xFFC01234, 0x7FFFFFFF],
    "fp16": [0x7C01, 0xFE55, 0x7FFF],
    "bf16": [0x7F81, 0xFFC5, 0x7FFF],
}


@pytest.mark.parametrize("kind", KINDS)
def test_nan_payloads_survive(target, to, host, kind):
    arrays = reference_problem(kind, (1, 2, 3))
    for name in ("k_new", "v_cache"):
        flat = naive.words(arrays[name]).ravel()
        flat[: len(NANS[kind])] = NANS[kind]
        arrays[name] = flat.view(naive.DTYPES[kind]).reshape(arrays[name].shape)
    k, v = run(arrays, to, host, target)
    assert_same_bits((k, v), expect(arrays))
    assert naive.words(k)[0, 0, 1, : len(NANS[kind])].tolist() == NANS[kind]


def test_offsets_and_new_rows_are_not_touched(target, to, host):
    arrays = reference_problem("bf16", (0, 3, 20))
    args = moved(arrays, to)
    AppendPlan.select(describe(arrays), target=target).run(args)
    for name in ("k_new", "v_new", "cache_offsets"):
        assert np.array_equal(host(getattr(args, name)), arrays[name])


@pytest.mark.parametrize(
    ("shape", "d_v", "l_max"),
    [
        ((0, 4, 5, 8), 6, 16),
        ((3, 0, 5, 8), 6, 16),
        ((3, 4, 0, 8), 6, 16),
        ((3, 4, 5, 0), 6, 16),
        ((3, 4, 5, 8), 0, 16),
        ((3, 4, 5, 8), 6, 0),
    ],
)
def test_zero_extents(target, to, host, shape, d_v, l_max):
    batch, heads, new_len, d_k = shape
    arrays = {
        "k_new": ramp("fp16", 1, 1, batch, heads, new_len, d_k),
        "v_new": ramp("fp16", 2, 1, batch, heads, new_len, d_v),
        "k_cache": ramp("fp16", -1, -1, batch, heads, l_max, d_k),
        "v_cache": ramp("fp16", -2, -1, batch, heads, l_max, d_v),
        "cache_offsets": np.arange(batch),
    }
    assert_same_bits(run(arrays, to, host, target), expect(arrays))


def test_strided_views_are_honoured(target, to, host, rng):
    """Every axis but the last may be a slice of something wider."""
    wide = {
        "k_new": rng.standard_normal((4, 6, 4, 10)),
        "v_new": rng.standard_normal((4, 6, 4, 10)),
        "k_cache": rng.standard_normal((4, 6, 8, 10)),
        "v_cache": rng.standard_normal((4, 6, 8, 10)),
    }
    cut = {
        "k_new": np.s_[::2, 1:4, ::2, 2:7],
        "v_new": np.s_[1:3, ::2, 1:3, :3],
        "k_cache": np.s_[:2, 3:, ::2, 1:6],
        "v_cache": np.s_[2:, :3, 4:, 7:],
    }
    offsets = np.array([1, 3])
    views = {name: wide[name][cut[name]] for name in wide}
    want = [naive.plan_append(views[f"{x}_new"], views[f"{x}_cache"], offsets) for x in "kv"]
    full = {name: to(value.copy()) for name, value in wide.items()}
    args = AppendArgs(**{n: full[n][cut[n]] for n in wide}, cache_offsets=to(offsets))
    descriptor = AppendDescriptor(2, 3, 2, 4, 5, 3, np.float64)
    AppendPlan.select(descriptor, target=target).run(args)
    for name, result in zip(("k_cache", "v_cache"), want, strict=True):
        whole = wide[name].copy()
        whole[cut[name]] = result
        assert np.array_equal(host(full[name]), whole)


# ---------------------------------------------------------------- the plan itself


@pytest.mark.parametrize(
    "dtype", ["float32", np.float32, np.dtype("f4"), "fp32", numkv.kind("fp32")]
)
def test_dtypes_are_named_in_many_ways(target, to, host, dtype):
    arrays = reference_problem("fp32", (0, 0, 0))
    plan = AppendPlan.select(describe(arrays, dtype), target=target)
    args = moved(arrays, to)
    assert plan.can_implement(args) is None
    assert np.array_equal(host(args.k_cache), arrays["k_cache"])  # a look changes nothing
    assert plan.run(args, stream=None, workspace=None) is None
    assert_same_bits((host(args.k_cache), host(args.v_cache)), expect(arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_plan_says_of_itself(target, kind):
    plan = AppendPlan.select(AppendDescriptor(B, H, L_NEW, L_MAX, D_K, D_V, kind), target=target)
    assert plan.workspace_size == 0
    assert plan.precision_guarantee.deterministic is True
    assert plan.precision_guarantee.bit_stable_on_same_hardware is True
    assert str(kind) in repr(plan.sku)
    assert target in repr(plan.sku)
    other = AppendPlan.select(AppendDescriptor(B, H, 1, L_MAX, D_K, D_V, kind), target=target)
    assert plan.sku == other.sku  # what kernel it is, not on how much


def test_a_plan_is_used_again(target, to, host):
    arrays = reference_problem("fp16", (0, 5, 11))
    plan = AppendPlan.select(describe(arrays), target=target)
    args = moved(arrays, to)
    plan.run(args)
    arrays["k_cache"], arrays["v_cache"] = expect(arrays)
    arrays["cache_offsets"] = np.array([5, 10, 16])
    plan.run(
        AppendArgs(args.k_new, args.v_new, args.k_cache, args.v_cache, to(arrays["cache_offsets"]))
    )
    assert_same_bits((host(args.k_cache), host(args.v_cache)), expect(arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_one_shot(target, to, host, kind):
    arrays = reference_problem(kind, (-1, 3, 14))
    args = moved(arrays, to)
    numkv.append(*vars(args).values())
    assert_same_bits((host(args.k_cache), host(args.v_cache)), expect(arrays))


# ---------------------------------------------------------------- bad calls


@pytest.mark.parametrize("position", range(6))
def test_negative_extents(target, position):
    sizes = [B, H, L_NEW, L_MAX, D_K, D_V]
    sizes[position] = -1
    with pytest.raises(numkv.DimensionMismatch):
        AppendPlan.select(AppendDescriptor(*sizes, np.float32), target=target)


@pytest.mark.parametrize("dtype", ["int32", np.int8, np.complex64, np.bool_])
def test_dtypes_without_a_kernel(target, dtype):
    with pytest.raises((numkv.UnsupportedDType, numkv.NotSupported)):
        AppendPlan.select(AppendDescriptor(B, H, L_NEW, L_MAX, D_K, D_V, dtype), target=target)


def test_extents_are_looked_at_before_the_dtype(target):
    with pytest.raises(numkv.DimensionMismatch):
        AppendPlan.select(AppendDescriptor(B, H, -1, L_MAX, D_K, D_V, "int32"), target=target)


def wrong_shape(name):
    def spoil(arrays):
        arrays[name] = arrays[name][1:].copy()

    return spoil


def wrong_dtype(name, dtype):
    def spoil(arrays):
        arrays[name] = arrays[name].astype(dtype)

    return spoil


def strided(name):
    def spoil(arrays):
        arrays[name] = np.repeat(arrays[name], 2, axis=-1)[..., ::2]

    return spoil


def read_only(name):
    def spoil(arrays):
        arrays[name].setflags(write=False)

    return spoil


MISMATCH, DTYPE, REFUSED = numkv.DimensionMismatch, numkv.UnsupportedDType, numkv.NotSupported
NAMES = ["k_new", "v_new", "k_cache", "v_cache", "cache_offsets"]
SPOILED = (
    [(name, MISMATCH, wrong_shape(name)) for name in NAMES]
    + [(name, DTYPE, wrong_dtype(name, np.float64)) for name in NAMES]
    + [("cache_offsets", DTYPE, wrong_dtype("cache_offsets", np.int32))]
)
SPOILED_HOST = [(name, numkv.NumkvError, strided(name)) for name in NAMES[:4]] + [
    (name, REFUSED, read_only(name)) for name in ("k_cache", "v_cache")
]


def check_refused(plan, arrays, move, name, error):
    args = AppendArgs(**{n: move(value) for n, value in arrays.items()})
    before = arrays["k_cache"].copy(), arrays["v_cache"].copy()
    for call in (plan.can_implement, plan.run):
        with pytest.raises(error, match=about(name)):
            call(args)
    return before, (args.k_cache, args.v_cache)


@pytest.mark.parametrize(("name", "error", "spoil"), SPOILED)
def test_spoiled_arguments(target, to, host, name, error, spoil):
    arrays = reference_problem("fp32", (0, 1, 2))
    plan = AppendPlan.select(describe(arrays), target=target)
    spoil(arrays)
    before, after = check_refused(plan, arrays, to, name, error)
    assert_same_bits([host(x) for x in after], before)


@pytest.mark.parametrize(("name", "error", "spoil"), SPOILED_HOST)
def test_arguments_that_only_the_host_can_spoil(name, error, spoil):
    arrays = reference_problem("fp32", (0, 1, 2))
    plan = AppendPlan.select(describe(arrays))
    spoil(arrays)
    before, after = check_refused(plan, arrays, lambda x: x, name, error)
    assert_same_bits(after, before)


def test_shapes_are_looked_at_in_order(target, to):
    arrays = reference_problem("fp32", (0, 1, 2))
    plan = AppendPlan.select(describe(arrays), target=target)
    for name in reversed(NAMES):
        arrays[name] = arrays[name][1:].copy()
        args = moved(arrays, to)
        with pytest.raises(numkv.DimensionMismatch, match=about(name)):
            plan.can_implement(args)


def test_a_mismatch_carries_both_shapes(target, to):
    arrays = reference_problem("fp32", (0, 1, 2))
    plan = AppendPlan.select(describe(arrays), target=target)
    arrays["v_cache"] = arrays["v_cache"][:, :, :9].copy()
    with pytest.raises(numkv.DimensionMismatch) as caught:
        plan.run(moved(arrays, to))
    assert tuple(caught.value.expected) == (B, H, L_MAX, D_V)
    assert tuple(caught.value.actual) == (B, H, 9, D_V)


def test_the_reference_message():
    arrays = reference_problem("fp32", (0, 1, 2))
    plan = AppendPlan.select(describe(arrays))
    arrays["k_new"] = arrays["k_new"][:, :, :2].copy()
    with pytest.raises(
        numkv.DimensionMismatch, match=r"^`k_new`: expected float32 \(3, 4, 5, 8\), got"
    ):
        plan.run(AppendArgs(**arrays))


def wrong_rank(name):
    def change(arrays):
        arrays[name] = arrays[name][0].copy()

    return change


ONE_SHOT = [
    ("k_new", MISMATCH, wrong_shape("k_new")),
    ("v_cache", MISMATCH, wrong_shape("v_cache")),
    ("k_cache", MISMATCH, wrong_rank("k_cache")),
    ("v_new", MISMATCH, wrong_rank("v_new")),
    ("v_new", DTYPE, wrong_dtype("v_new", np.float16)),
    ("k_cache|k_new|dtype", DTYPE, wrong_dtype("k_cache", np.int32)),
    ("cache_offsets", DTYPE, wrong_dtype("cache_offsets", np.int32)),
]


@pytest.mark.parametrize(("name", "error", "spoil"), ONE_SHOT)
def test_one_shot_spoiled(target, to, host, name, error, spoil):
    arrays = reference_problem("fp32", (0, 1, 2))
    spoil(arrays)
    args = moved(arrays, to)
    with pytest.raises(error, match=about(name)):
        numkv.append(*vars(args).values())
    assert_same_bits([host(args.v_cache)], [arrays["v_cache"]])
