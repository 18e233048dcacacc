"""The steps of attention in integers, each against NumPy in float64."""

import numba
import numpy as np
import pytest
from walked import each

from numkv.kernels.cpu.attention.llvm.integers import (
    SHORT,
    interleave_bytes,
    make_accumulate_int4,
    make_accumulate_int8,
    make_qk_int4,
    make_qk_int8,
    quantise_group_probs,
    quantise_probs,
    quantise_query,
    shares,
    spread_query,
    sum_query_groups,
)
from numkv.kernels.cpu.attention.llvm.scales import make_gather_groups
from numkv.kernels.cpu.attention.records import (
    INT4_SPAN,
    KV_TILE,
    TILE_UNIT,
    Outputs,
    QueryPlaces,
    TileRows,
    WeightPlaces,
)
from numkv.kernels.cpu.vectors.features import HAS_FOURS, INT4_INTEGERS, LANES, row_unroll
from numkv.kernels.cpu.vectors.prefetch import NO_MORE

pytestmark = pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPerformanceWarning")
for_int4 = pytest.mark.skipif(
    not INT4_INTEGERS, reason="INT4 is taken as integers where products of bytes are added in pairs"
)
GROUP = 32
ROWS = 8
# Memory to prefetch: from address 0 on, which does nothing.
NOTHING = np.array([0, NO_MORE])
accumulate_int8, accumulate_int4 = make_accumulate_int8("int8"), make_accumulate_int4("int4")
gather_groups = make_gather_groups("float32")
gather_by_group = make_gather_groups("float32", True)
qk_int4, qk_int8 = make_qk_int4("int4"), make_qk_int8("int8")
# What lies in memory that must not matter, or must stay as it is.
FENCE = np.float32(12345.0)
# Half a step of 15 bits of the largest weight, and rounding.
STEP = 0.52 / 32767


@numba.njit
def run_quantise_probs(rows, f, factors_at, begin, end, scales_at):
    quantise_probs(rows, f, 0, factors_at, begin, end, scales_at)


@numba.njit
def run_weigh8(rows, count, f, scales_at, v, offsets, begin, end, dim, o_at, o_step, rescale_at):
    accumulate_int8(
        rows, count, f, WeightPlaces(0, scales_at), TileRows(v, offsets, dim, 0, 1), begin, end,
        Outputs(o_at, o_step, rescale_at), NOTHING,
    )  # fmt: skip


@numba.njit
def run_weigh4(
    rows, count, f, s_at, scales, offsets, scale_offsets, scales_at, groups, begin, end, w_at, sums_at,
    codes, dim, o_at, o_step, rescale_at,
):  # fmt: skip
    gather_groups(f, scales_at, scales, scale_offsets, groups, KV_TILE)
    quantise_group_probs(rows, f, s_at, scales_at, dim, begin, end, w_at, sums_at)
    accumulate_int4(
        rows, count, f, WeightPlaces(w_at, sums_at), TileRows(codes, offsets, dim, scales_at, groups), begin, end,
        Outputs(o_at, o_step, rescale_at), NOTHING,
    )  # fmt: skip


@numba.njit
def run_score4(
    at_once, rows, q, f, q_step, sums_at, rows_at, scales, scale_offsets, scales_at, codes, offsets, count,
    dim, s_at, q_scales_at,
):  # fmt: skip
    blocks = q_step // INT4_SPAN
    groups = (dim + 31) // 32
    gather_by_group(f, scales_at, scales, scale_offsets, groups, KV_TILE)
    for r in range(rows):
        spread_query(f[r * q_step : (r + 1) * q_step], q[r])
        f[q_scales_at + r] = quantise_query(f, r * q_step, dim, q_step)
        sum_query_groups(f, r * q_step, dim, sums_at + r * 16 * blocks)
    interleave_bytes(at_once, f, 0, q_step, q_step, rows_at)
    queries = QueryPlaces(rows_at, q_scales_at, sums_at, 0)
    qk_int4(
        at_once, f, queries, TileRows(codes, offsets, dim, scales_at, groups), count, s_at, NOTHING
    )


def at_once(rows):
    """How many rows vector code takes for some."""
    return 8 if rows > 4 else 4 if rows > 2 else rows


def table(rng, num_rows, step):
    """Where `KV_TILE` rows start among `num_rows`, in a mixed order, some more than once."""
    return np.resize(rng.permutation(num_rows), KV_TILE) * np.int64(step)


def whole_units(tokens):
    return -(-tokens // TILE_UNIT) * TILE_UNIT


def packed(values):
    """INT4 codes (…, dim) as bytes: of n elements of a group, byte j has element j and element j + n / 2."""
    dim = values.shape[-1]
    parts = []
    for first in range(0, dim, GROUP):
        group = values[..., first : first + GROUP]
        half = group.shape[-1] // 2
        parts.append(group[..., :half] | group[..., half:] << 4)
    return np.ascontiguousarray(np.concatenate(parts, -1).astype(np.uint8))


def scale_words(rng, shape, size=1.0):
    """Words of INT4 groups, and their scales and minima as float64, from the description in `rows/int4.py`."""
    words = (rng.uniform(0.5, 2, shape) * size).astype(np.float32).view(np.uint32) >> 16
    words = words.astype(np.uint16)
    scale = (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    minimum = (-7.5 + ((words & 7) - 3.5) / 2) * scale
    return words, scale, minimum


def spread(groups, dim):
    """Numbers of groups (…, groups) for each element."""
    return np.repeat(groups, GROUP, -1)[..., :dim]


# -- scores of INT8


@numba.njit
def run_score8(
    at_once, rows, q, f, q_step, rows_at, factors_at, codes, offsets, count, s_at, scales_at
):
    dim = q.shape[1]
    for r in range(rows):
        f[r * q_step : r * q_step + dim] = q[r]
        f[scales_at + r] = quantise_query(f, r * q_step, dim, q_step)
    interleave_bytes(at_once, f, 0, q_step, q_step, rows_at)
    keys = TileRows(codes, offsets, dim, factors_at, 1)
    qk_int8(at_once, f, QueryPlaces(rows_at, scales_at, 0, 0), keys, count, s_at, NOTHING)


@pytest.mark.skipif(not HAS_FOURS, reason="no instruction adds products of bytes by fours")
@pytest.mark.parametrize("dim", [8, 34, 64, 96, 128, 129, 160, 512])
def test_qk_int8(rng, dim):
    q_step = -(-dim // 64) * 64
    # The largest sums that there can be, of either sign, and others.
    codes = rng.integers(-128, 128, (100, dim), np.int8)
    codes[:2] = [[-128], [127]]
    for rows, count in [(1, 64), (2, 256), (3, 17), (5, 150), (8, 33)]:
        q = rng.standard_normal((rows, dim), np.float32)
        q[-1] = rng.choice([-1e20, 1e20], dim) if rows == 8 else 3.0
        n = at_once(rows)
        factors = rng.uniform(-2, 2, KV_TILE).astype(np.float32)
        offsets = table(rng, len(codes), dim)
        offsets[:2] = 0, dim
        sizes = [ROWS * q_step, 2 * ROWS * q_step, KV_TILE, 16]
        rows_at, factors_at, scales_at, s_at = np.cumsum(sizes)
        f = np.zeros(s_at + KV_TILE * n + 16, np.float32)
        f[factors_at:scales_at] = factors
        run_score8(
            n,
            rows,
            q,
            f,
            q_step,
            rows_at,
            factors_at,
            codes.reshape(-1),
            offsets,
            count,
            s_at,
            scales_at,
        )
        words = f[: ROWS * q_step].view(np.int16).reshape(ROWS, -1)[:rows, :dim].astype(np.int64)
        products = codes[offsets // dim].astype(np.int64) @ words.T
        wanted = products * factors[:, None].astype(np.float64) * f[scales_at : scales_at + rows]
        scores = f[s_at : s_at + KV_TILE * n].reshape(KV_TILE, n)[:count, :rows]
        np.testing.assert_allclose(scores, wanted[:count], rtol=3e-7)
        np.testing.assert_allclose(
            words * f[scales_at : scales_at + rows, None], q, atol=2e-5 * np.abs(q).max()
        )


# -- weights of INT8


@each("size", [1e-35, 1e-30, 1.0, 1e30])
@each("begin, end", [(0, 64), (5, 38), (63, 64), (17, 18), (2, 2), (0, 256), (70, 150)])
@each("rows", [1, 2, 4, 8])
def test_quantise_probs(rng, rows, begin, end, size):
    rows = min(rows, row_unroll("float32"))
    p = rng.uniform(0, 1, (KV_TILE, rows)).astype(np.float32)
    p[::2, -1] = 0
    if rows > 1:
        p[:, 1] = 0
    factors = (rng.uniform(-1, 1, KV_TILE) * size).astype(np.float32)
    factors[:begin] = np.nan
    factors[end:] = np.inf
    f = np.concatenate([p.reshape(-1), factors, np.zeros(16, np.float32)])
    run_quantise_probs(rows, f, p.size, begin, end, p.size + KV_TILE)
    scales = f[p.size + KV_TILE :][:rows]
    # Two tokens of one row side by side.
    pairs = f[: p.size // 2].view(np.int16).reshape(KV_TILE // 2, rows, 2)
    codes = pairs.transpose(0, 2, 1).reshape(KV_TILE, rows).astype(np.float64)
    weights = np.zeros((KV_TILE, rows))
    weights[begin:end] = p[begin:end].astype(np.float64) * factors[begin:end, None]
    assert np.isfinite(scales).all()
    assert (codes[:begin] == 0).all()
    assert (codes[end : whole_units(end)] == 0).all()
    codes[whole_units(end) :] = 0  # not written
    peak = np.abs(weights).max(0)
    # Below 1e-33 weights may all become 0.
    error = np.abs(codes * scales.astype(np.float64) - weights)
    assert (error <= STEP * np.maximum(peak, 1e-33)).all()
    assert (np.abs(codes) <= 32767).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("token", [6, 37])
def test_a_bad_factor_that_is_seen_makes_the_scale_nan(rng, bad, token):
    f = rng.uniform(0.1, 1, 3 * KV_TILE + 16).astype(np.float32)
    f[2 * KV_TILE + token] = bad
    f[2 * 8] = f[2 * 8 + 1] = 0  # the probabilities of token 8
    run_quantise_probs(2, f, 2 * KV_TILE, 6, 38, 3 * KV_TILE)
    assert np.isnan(f[3 * KV_TILE :][:2]).all()


def check_weighed(rows, out, before, rescale, weights, values, dim, step_bound):
    """Output rows, and that nothing but them was written."""
    wanted = before[:, :dim] * rescale[:, None] + weights @ values
    bound = step_bound + 1e-6 * (
        np.abs(before[:, :dim] * rescale[:, None]) + np.abs(weights) @ np.abs(values)
    )
    assert (np.abs(out[:rows, :dim] - wanted[:rows]) <= bound[:rows]).all()
    assert (out[rows:, :dim] == before[rows:, :dim]).all()
    # Up to 15 columns more get what does not matter.
    assert (out[:, dim + 15 :] == FENCE).all()


@pytest.mark.parametrize("dim", [8, 34, 64, 96, 128, 129, 160, 256, 320])
def test_accumulate_int8(rng, dim):
    o_step = dim + 40
    codes = rng.integers(-128, 128, (100, dim), np.int8)
    for rows, begin, end in [
        (1, 0, 64),
        (2, 5, 38),
        (3, 63, 64),
        (5, 1, 256),
        (7, 0, 3),
        (4, 0, 256),
        (1, 100, 255),
        (8, 17, 19),
    ]:
        rows = min(rows, row_unroll("float32"))
        offsets = table(rng, len(codes), dim)
        n = at_once(rows)
        w = np.full((KV_TILE, n), FENCE, np.float32)
        w[:, :rows] = rng.uniform(0, 1, (KV_TILE, rows))
        factors = rng.uniform(-2, 2, KV_TILE).astype(np.float32)
        factors[:begin] = factors[end:] = np.nan
        p = np.zeros((ROWS, KV_TILE))
        p[:rows] = w[:, :rows].T
        rescale = rng.uniform(0, 1, ROWS).astype(np.float32)
        out = np.full((ROWS, o_step), FENCE, np.float32)
        out[:, :dim] = rng.standard_normal((ROWS, dim))
        parts = [w, factors, np.zeros(16), rescale, out, np.zeros(64)]
        f = np.concatenate([x.reshape(-1) for x in parts], dtype=np.float32)
        factors_at, scales_at, rescale_at, o_at = np.cumsum([x.size for x in parts])[:4]
        run_quantise_probs(n, f, factors_at, begin, end, scales_at)
        run_weigh8(
            n,
            rows,
            f,
            scales_at,
            codes.reshape(-1),
            offsets,
            begin,
            end,
            dim,
            o_at,
            o_step,
            rescale_at,
        )
        weights = np.zeros((ROWS, KV_TILE))
        weights[:rows, begin:end] = p[:rows, begin:end] * factors[begin:end].astype(np.float64)
        values = codes[offsets // dim].astype(np.float64)
        step = STEP * np.abs(weights).max(1)[:, None] * np.abs(values[begin:end]).sum(0)
        result = f[o_at : o_at + out.size].reshape(out.shape)
        check_weighed(
            rows,
            result,
            out.astype(np.float64),
            rescale.astype(np.float64),
            weights,
            values,
            dim,
            step,
        )


# -- INT4


class Int4:
    """Rows of INT4 with their scales, and where a tile's rows start."""

    def __init__(self, rng, dim, size=1.0):
        self.dim, self.groups, self.blocks = dim, -(-dim // GROUP), -(-dim // INT4_SPAN)
        codes = rng.integers(0, 16, (320, dim))
        self.bytes = packed(codes).reshape(-1)
        self.words, scale, minimum = scale_words(rng, (320, self.groups), size)
        self.order = rng.permutation(320)[:KV_TILE]
        self.offsets, self.scale_offsets = self.order * (dim // 2), self.order * self.groups
        values = codes * spread(scale, dim) + spread(minimum, dim)
        self.values = values[self.order]
        # What a step of a weight may change: the weight is the probability times the group's scale.
        self.scale, self.codes = scale[self.order], codes[self.order]


DIMS = [8, 34, 64, 96, 128, 130, 160, 256, 320]


def weigh4(rng, v, rows, begin, end, p=None, spoil=()):
    """Run it; give the result, what was before, rescaling factors, probabilities and scales of weights."""
    o_step = v.dim + 40
    fours = ROWS // 4 * v.blocks
    sizes = [
        ROWS * KV_TILE,
        2 * 4 * KV_TILE * v.blocks,
        fours * KV_TILE // 2 * 16,
        fours * 32,
        ROWS,
    ]
    s_at, scales_at, w_at, sums_at, rescale_at, o_at = np.cumsum([0, *sizes])
    f = np.zeros(o_at + ROWS * o_step + 64, np.float32)
    if p is None:
        p = rng.uniform(0, 1, (ROWS, KV_TILE)).astype(np.float32)
    n = at_once(rows)
    f[: KV_TILE * n] = p[:n].T.reshape(-1)
    p = p.astype(np.float64)
    p[:, :begin] = p[:, end:] = 0
    rescale = rng.uniform(0, 1, ROWS).astype(np.float32)
    f[rescale_at:o_at] = rescale
    out = np.full((ROWS, o_step), FENCE, np.float32)
    out[:, : v.dim] = rng.standard_normal((ROWS, v.dim))
    f[o_at : o_at + out.size] = out.reshape(-1)
    words = v.words.copy()
    for token in spoil:
        words[v.order[token]] = 0x7FC0
    run_weigh4(
        n, rows, f, s_at, words.reshape(-1), v.offsets, v.scale_offsets, scales_at, v.groups, begin, end,
        w_at, sums_at, v.bytes, v.dim, o_at, o_step, rescale_at,
    )  # fmt: skip
    result = f[o_at : o_at + out.size].reshape(out.shape)
    # For rows that share a vector, and for each block, sums and then scales of rows, in each those of groups.
    width, together, _ = shares(n, v.dim <= SHORT)
    scales = f[sums_at:rescale_at].reshape(-1, 2, LANES)[: n // together * v.blocks, 1]
    scales = scales[:, : width * together].reshape(-1, v.blocks, width, together)
    scales = scales.transpose(0, 3, 1, 2).reshape(n, -1)[:rows, : v.groups]
    return result, out.astype(np.float64), rescale.astype(np.float64), p, scales


@numba.njit
def run_gather(f, scales, offsets, groups):
    gather_groups(f, 0, scales, offsets, groups, KV_TILE)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("run", [64, 16, 4, 1])
def test_gather_groups_finds_tokens_one_after_another_and_apart(rng, groups, run):
    words, scale, minimum = scale_words(rng, (320, groups))
    starts = rng.permutation(320 // run)[: KV_TILE // run] * run
    order = (starts[:, None] + np.arange(run)).reshape(-1)
    width = 2 if INT4_INTEGERS and groups <= 2 else 4
    fours = -(-groups // 4)
    f = np.zeros(2 * 4 * KV_TILE * fours, np.float32)
    run_gather(f, words.reshape(-1), order * groups, groups)
    for found, wanted in zip(f.reshape(2, -1), (scale, minimum), strict=True):
        found = found[: fours * KV_TILE * width].reshape(fours, KV_TILE, width).swapaxes(0, 1)
        found = found.reshape(KV_TILE, -1)
        np.testing.assert_allclose(found[:, :groups], wanted[order], rtol=1e-6)
        assert (found[:, groups:] == 0).all()


@for_int4
@pytest.mark.parametrize("dim", DIMS)
def test_accumulate_int4(rng, dim):
    v = Int4(rng, dim)
    for rows, begin, end in [
        (1, 0, 64),
        (2, 5, 38),
        (3, 63, 64),
        (5, 1, 256),
        (7, 0, 3),
        (4, 0, 256),
        (1, 100, 255),
        (8, 17, 19),
    ]:
        unseen = [t for t in range(KV_TILE) if not begin <= t < end]
        found, before, rescale, p, scales = weigh4(rng, v, rows, begin, end, spoil=unseen)
        assert np.isfinite(scales).all()
        peak = np.abs(p[:, begin:end, None] * v.scale[begin:end]).max((1, 2))
        step = STEP * peak[:, None] * v.codes[begin:end].sum(0)
        size = np.abs(v.values) + 15 * v.scale.max()
        bound = step + 4e-6 * p @ size
        check_weighed(rows, found, before, rescale, p, v.values, dim, bound)


@for_int4
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_int4_weights_of_any_size(rng, size):
    v = Int4(rng, 96, size)
    found, before, rescale, p, scales = weigh4(rng, v, 2, 3, 60)
    assert np.isfinite(scales).all()
    part = found[:2, :96] - before[:2, :96] * rescale[:2, None]
    wanted = (p @ v.values)[:2]
    # Beside an output of about 1, tiny sums vanish.
    assert (np.abs(part - wanted) <= 2e-3 * 16 * size * p[:2].sum(1)[:, None] + 1e-6).all()
    assert np.isfinite(found[:2, :96]).all()


@for_int4
def test_int4_weights_of_zero_and_nan(rng):
    v = Int4(rng, 64)
    zero = np.zeros((ROWS, KV_TILE), np.float32)
    found, before, rescale, _, scales = weigh4(rng, v, 2, 0, 64, p=zero)
    np.testing.assert_allclose(found[:2, :64], before[:2, :64] * rescale[:2, None], rtol=1e-6)
    assert np.isfinite(scales).all()
    for token in (5, 37):
        found, *_, scales = weigh4(rng, v, 2, 5, 38, spoil=[token])
        assert np.isnan(scales).all()
        assert np.isnan(found[:2, :64]).all()


def score4(k, q, count):
    """Scores of query rows with `count` rows of K, as float64, and the scales of query rows."""
    q_step, n = k.blocks * INT4_SPAN, at_once(len(q))
    # Rows that fill up a group are zeros.
    sizes = [
        n * q_step,
        n * 16 * k.blocks,
        n * (q_step + 16 * k.blocks),
        2 * 4 * KV_TILE * k.blocks,
        n,
    ]
    sums_at, rows_at, scales_at, q_scales_at, s_at = np.cumsum(sizes)
    f = np.zeros(s_at + n * KV_TILE, np.float32)
    run_score4(
        n, len(q), q, f, q_step, sums_at, rows_at, k.words.reshape(-1), k.scale_offsets, scales_at, k.bytes,
        k.offsets, count, k.dim, s_at, q_scales_at,
    )  # fmt: skip
    scores = f[s_at:].reshape(KV_TILE, n)[:count, : len(q)].T
    return scores.astype(np.float64), f[q_scales_at:s_at][: len(q)]


@for_int4
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e10])
def test_qk_int4(rng, dim, size):
    k = Int4(rng, dim)
    for rows, count in [(1, 64), (2, 33), (3, 1), (4, 64), (5, 17), (7, 64), (8, 63)]:
        q = (rng.standard_normal((rows, dim)) * size).astype(np.float32)
        scores, _ = score4(k, q, count)
        wanted = (q.astype(np.float64) @ k.values.T)[:, :count]
        peak = np.abs(q).max(1)[:, None]
        bound = STEP * peak * np.abs(k.values[:count]).sum(1)
        # Products are added with minima apart: rounding is of sums of codes, not of values.
        bound = bound + 2e-6 * peak * (np.abs(k.values[:count]) + 15 * k.scale.max()).sum(1)
        assert (np.abs(scores - wanted) <= bound).all()


@for_int4
def test_bad_queries_have_the_scale_nan_and_zeros_no_scale(rng):
    k = Int4(rng, 96)
    q = rng.standard_normal((4, 96)).astype(np.float32)
    q[0, 95], q[1, 0], q[2] = np.nan, -np.inf, 0
    scores, q_scales = score4(k, q, KV_TILE)
    assert np.isnan(q_scales[:2]).all()
    assert np.isnan(scores[:2]).all()
    assert q_scales[2] == 0
    assert (scores[2] == 0).all()
    wanted = q[3].astype(np.float64) @ k.values.T
    assert np.abs(scores[3] - wanted).max() < 1e-3 * np.abs(wanted).max()
