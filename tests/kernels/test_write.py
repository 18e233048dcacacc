"""The fused write of projections: split, norm, RoPE, write."""

import naive
import numpy as np
import operands
import pytest
import tolerances
from quantised_stores import assert_int4_no_worse
from worked import WORKED

import numkv
from numkv import targets

MODES = [0, 1, 2, 3, 4]


def stored(layer, host):
    """K and V of the cached tokens, ``(num_kv_heads, tokens, head_dim)``, and the length."""
    n = layer.seq_len
    return host(layer.k)[0, :, :n].copy(), host(layer.v)[0, :, :n].copy(), n


def one_token(x, to, mode, cos=None, sin=None, *, target, **options):
    """Write one token whose q, k and v are all `x`; returns what came out as q and k."""
    layer = numkv.ContiguousLayer(8, 1, len(x), kind="fp32", target=target)
    qkv = to(np.array([x * 3], np.float32))
    q = layer.write(qkv, num_q_heads=1, cos=cos, sin=sin, qk_mode=mode, **options)
    return layer, q


@pytest.mark.parametrize(("mode", "cos", "sin", "expected"), WORKED)
def test_worked_numbers(target, to, host, mode, cos, sin, expected):
    tables = [None if x is None else to(np.array([x], np.float32)) for x in (cos, sin)]
    weight = to(np.ones(4, np.float32)) if mode in (1, 4) else None
    layer, q = one_token(
        [1, 2, 3, 4], to, mode, *tables, target=target, eps=0.0,
        q_norm_weight=weight, k_norm_weight=weight,
    )  # fmt: skip
    k, v, n = stored(layer, host)
    assert np.allclose(host(q)[0, 0], expected, rtol=1e-6, atol=1e-6)
    assert np.allclose(k[0, 0], expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(v[0, 0], [1, 2, 3, 4])
    assert n == 1


def write_problem(rng, kind, tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim, positions=64):
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    cos, sin = naive.rope_tables(positions, rotary_dim)
    return {
        "qkv": naive.round_to(rng.standard_normal((tokens, width)), kind),
        "cos": cos,
        "sin": sin,
        "q_w": (1 + 0.1 * rng.standard_normal(head_dim)).astype(np.float32),
        "k_w": (1 + 0.1 * rng.standard_normal(head_dim)).astype(np.float32),
    }


def check_write(problem, layer, to, host, qkv_kind, mode, num_q_heads, pos_offset=None, **options):
    """Write after what the layer holds already; compare q, K and V with the oracle."""
    before = stored(layer, host)
    tokens, kind = len(problem["qkv"]), layer.spec.kind.name
    at = before[2] if pos_offset is None else pos_offset
    want_q, want_k, want_v = naive.write(
        problem["qkv"], num_q_heads, layer.num_kv_heads, layer.head_dim, mode,
        problem["cos"].astype(np.float64), problem["sin"].astype(np.float64),
        problem["q_w"], problem["k_w"], 1e-5, at,
    )  # fmt: skip
    weights = {}
    if mode in (1, 4):
        weights = {"q_norm_weight": to(problem["q_w"]), "k_norm_weight": to(problem["k_w"])}
    tables = {"cos": None, "sin": None}
    if mode:
        tables = {"cos": to(problem["cos"]), "sin": to(problem["sin"])}
    q = layer.write(
        to(problem["qkv"]), num_q_heads=num_q_heads, qk_mode=mode, eps=1e-5,
        pos_offset=pos_offset, **tables, **weights, **options,
    )  # fmt: skip
    k, v, n = stored(layer, host)
    assert n == before[2] + tokens
    assert layer.context_lens.tolist() == [n]
    assert np.array_equal(k[:, : before[2]], before[0])
    assert np.array_equal(v[:, : before[2]], before[1])
    assert host(q).dtype == naive.DTYPES[qkv_kind]
    tolerances.assert_rotated_close(host(q), want_q, qkv_kind)
    tolerances.assert_rotated_close(k[:, before[2] :].swapaxes(0, 1), want_k, kind)
    assert np.array_equal(v[:, before[2] :].swapaxes(0, 1), naive.round_to(want_v, kind))
    return q


@pytest.mark.boundscheck
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "then"),
    [("fp32", "fp32"), ("bf16", "bf16"), pytest.param("bf16", "fp32", marks=pytest.mark.nightly)],
)
def test_write(target, to, host, rng, kind, then, mode):
    """Five tokens, then one: every mode, in the kind's own dtype and from float32."""
    layer = numkv.ContiguousLayer(8, 2, 8, kind=kind, target=target)
    for tokens, qkv_kind in ((5, kind), (1, then)):
        problem = write_problem(rng, qkv_kind, tokens, 4, 2, 8, 8)
        check_write(problem, layer, to, host, qkv_kind, mode, 4)


@pytest.mark.parametrize(
    ("kind", "qkv_kinds"),
    [
        pytest.param("fp16", ["fp16", "fp32"], marks=pytest.mark.nightly),
        pytest.param("fp64", ["fp64", "fp32"], marks=pytest.mark.nightly),
    ],
)
def test_write_in_the_other_kinds(target, to, host, rng, kind, qkv_kinds):
    layer = numkv.ContiguousLayer(8, 1, 6, kind=kind, target=target)
    for qkv_kind in qkv_kinds:
        problem = write_problem(rng, qkv_kind, 2, 2, 1, 6, 6)
        check_write(problem, layer, to, host, qkv_kind, 1, 2)


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
@pytest.mark.parametrize("rotary_dim", [2, 4, 6])
def test_partial_rotary(target, to, host, rng, mode, rotary_dim):
    """The first dims turn, the rest are only normed."""
    layer = numkv.ContiguousLayer(8, 1, 8, kind="fp32", target=target)
    problem = write_problem(rng, "fp32", 3, 2, 1, 8, rotary_dim)
    check_write(problem, layer, to, host, "fp32", mode, 2)


@pytest.mark.parametrize("pos_offset", [0, 7, 61])
def test_pos_offset_only_picks_the_angles(target, to, host, rng, pos_offset):
    layer = numkv.ContiguousLayer(8, 1, 4, kind="fp32", target=target)
    problem = write_problem(rng, "fp32", 2, 1, 1, 4, 4)
    check_write(problem, layer, to, host, "fp32", 2, 1)
    problem = write_problem(rng, "fp32", 3, 1, 1, 4, 4)
    check_write(problem, layer, to, host, "fp32", 2, 1, pos_offset=pos_offset)


def test_q_out_is_filled_and_returned(target, to, host, rng):
    layer = numkv.ContiguousLayer(8, 1, 4, kind="fp32", target=target)
    problem = write_problem(rng, "fp32", 3, 2, 1, 4, 4)
    q_out = to(np.full((3, 2, 4), np.nan, np.float32))
    assert check_write(problem, layer, to, host, "fp32", 3, 2, q_out=q_out) is q_out
    assert np.all(np.isfinite(host(q_out)))


def test_large_heads_and_small_eps(target, to, host, rng):
    """Rows near the ends of float32 are normed without overflow of the mean's root."""
    layer = numkv.ContiguousLayer(8, 1, 64, kind="fp32", target=target)
    problem = write_problem(rng, "fp32", 2, 1, 1, 64, 64)
    problem["qkv"] *= np.float32(1e4)
    check_write(problem, layer, to, host, "fp32", 1, 1)


def test_an_empty_write_changes_nothing(target, to, host, rng):
    layer = numkv.ContiguousLayer(4, 1, 4, kind="fp32", target=target)
    problem = write_problem(rng, "fp32", 0, 1, 1, 4, 4)
    check_write(problem, layer, to, host, "fp32", 2, 1)
    assert layer.seq_len == 0


# ---------------------------------------------------------------- the operations themselves

Q_HEADS, KV_HEADS, SIZE = 3, 2, 3  # SIZE: tokens of a block
TABLE = np.array([4, 0, 2], np.int32)
SLOTS = np.array([13, -1, 0, 8, 5], np.int64)
KIND_TRIPLES = [  # of qkv, K and V
    ("fp32", "fp32", "fp32"), ("fp32", "bf16", "bf16"), ("fp16", "fp16", "fp16"), ("fp64", "fp64", "fp64"),
    ("fp32", "int8", "int8"), ("fp32", "int4", "int4"), ("fp32", "int8", "fp16"), ("bf16", "bf16", "bf16"),
]  # fmt: skip
# Those of them, and by slot, where only the place changes, that the CPU compiles in every run.
BY_DAY = [
    ("fp32", "fp32", "fp32"), ("fp32", "int8", "int8"), ("bf16", "bf16", "bf16"),
]  # fmt: skip
BY_SLOT = [("fp32", "fp32", "fp32")]


def exact(qkv, num_q_heads, dim, mode, problem, positions):
    """q, K and V of tokens at any positions, in float64."""
    found = [
        naive.write(
            qkv[t : t + 1], num_q_heads, KV_HEADS, dim, mode, problem["cos"].astype(np.float64),
            problem["sin"].astype(np.float64), problem["q_w"], problem["k_w"], 1e-5, position,
        )
        for t, position in enumerate(positions)
    ]  # fmt: skip
    return [np.concatenate(x) for x in zip(*found, strict=True)]


def values(buffer, scale, kind, slots):
    """What a buffer holds in some slots, as floats."""
    at = slots // SIZE, slice(None), slots % SIZE
    if kind not in naive.CODES:
        return buffer[at].view(naive.DTYPES[kind]).astype(np.float64)
    scale = scale[at] if kind == "int8" else scale[at].view(naive.DTYPES["bf16"])
    return naive.dequantise(buffer[at], scale)


@pytest.mark.boundscheck
def _operations():
    """All kinds by either operation; the CPU compiles few of them."""
    for kinds in KIND_TRIPLES:
        marks = [] if kinds in BY_DAY else pytest.mark.nightly
        yield pytest.param(kinds, False, id="-".join((*kinds, "write_rows")), marks=marks)
        marks = [] if kinds in BY_SLOT else pytest.mark.nightly
        yield pytest.param(kinds, True, id="-".join((*kinds, "scatter_write")), marks=marks)


@pytest.mark.parametrize("mode", [0, 1, 3])
@pytest.mark.parametrize(("kinds", "by_slot"), [*_operations()])
def test_operations(target, rng, kinds, mode, by_slot):
    """Five tokens whose projections are columns of a wider array; nothing but their slots changes."""
    where, dim = targets.get(target), 34
    qkv_kind, k_kind, v_kind = kinds
    problem = write_problem(rng, qkv_kind, 5, Q_HEADS, KV_HEADS, dim, 32)
    wide = np.zeros((5, problem["qkv"].shape[1] + 6), problem["qkv"].dtype)
    wide[:, 3:-3] = problem["qkv"]
    qkv = where.words(where.asarray(wide))[:, 3:-3]
    compute = np.float64 if "fp64" in kinds else np.float32
    normalise, rotate = mode in naive.NORM_MODES, mode != 0
    tables = [where.asarray(problem[n]) for n in ("cos", "sin")]
    weights = [where.asarray(problem[n].astype(compute)) for n in ("q_w", "k_w")]
    q_out = where.asarray(np.full((5, Q_HEADS, dim), np.nan, naive.DTYPES[qkv_kind]))
    made = [operands.pool(kind, (5, KV_HEADS, SIZE), dim) for kind in (k_kind, v_kind)]
    there = [[where.asarray(x.copy()) for x in pair] for pair in made]
    arguments = (
        qkv, qkv_kind, *tables, (normalise, rotate, mode in naive.INTERLEAVED_MODES), *weights, 1e-5,
    )  # fmt: skip
    pools = (where.words(q_out), there[0][0], k_kind, there[0][1], there[1][0], v_kind, there[1][1])
    if by_slot:
        positions, slots = np.array([9, 0, 60, 3, 3]), SLOTS
        where.ops.scatter_write(
            *arguments, where.index(positions, np.int64), *pools, where.index(slots, np.int64)
        )
    else:
        positions, slots = np.arange(7, 12), np.array(operands.slots_of(TABLE, 2, 5, SIZE))
        where.ops.write_rows(*arguments, 7, *pools, where.index(TABLE, np.int32), 2)
    q, k, v = exact(problem["qkv"], Q_HEADS, dim, mode, problem, positions)
    tolerances.assert_rotated_close(where.to_host(q_out), q, qkv_kind)
    stays = np.ones(5 * SIZE, bool)
    stays[slots[slots >= 0]] = False
    for rows, kind, old, new in zip((k, v), (k_kind, v_kind), made, there, strict=True):
        buffer, scale = map(where.to_host, new)
        got, want = values(buffer, scale, kind, slots[slots >= 0]), rows[slots >= 0]
        if kind == "int4":
            at = slots[slots >= 0] // SIZE, slice(None), slots[slots >= 0] % SIZE
            assert_int4_no_worse(got, scale[at].view(naive.DTYPES["bf16"]), want)
        else:
            half = 0.51 / 127 if kind == "int8" else tolerances.ROTATED[kind]
            assert np.all(np.abs(got - want) <= half * np.abs(want).max(-1, keepdims=True))
        for now, before in ((buffer, old[0]), (scale, old[1])):
            if now.size:
                operands.assert_same(
                    now.swapaxes(1, 2).reshape(-1, *now.shape[1:2], *now.shape[3:])[stays],
                    before.swapaxes(1, 2).reshape(-1, *now.shape[1:2], *now.shape[3:])[stays],
                )


@pytest.mark.parametrize("by_slot", [False, True])
def test_operations_on_no_tokens(target, rng, by_slot):
    where = targets.get(target)
    buffer, scale = (where.asarray(x) for x in operands.pool("fp32", (2, 1, SIZE), 4))
    none = np.zeros((0, 1, 4), np.float32)
    empty = [where.asarray(np.zeros((0, 0), np.float32)) for _ in range(2)]
    weights = [where.asarray(np.zeros(0, np.float32)) for _ in range(2)]
    arguments = (
        where.asarray(none.reshape(0, 12)), "fp32", *empty, (False, False, False), *weights, 0.0,
    )  # fmt: skip
    pools = (where.asarray(none), buffer, "fp32", scale, buffer, "fp32", scale)
    places = where.index(np.zeros(0, np.int64), np.int64)
    if by_slot:
        where.ops.scatter_write(*arguments, places, *pools, places)
    else:
        where.ops.write_rows(*arguments, 0, *pools, where.index(np.array([1]), np.int32), 1)
    assert np.all(where.to_host(buffer) == operands.UNTOUCHED)
