"""Calls of the CUDA kernels that write rows, each compared with the float64 oracle; and what such cases share."""

import importlib

import ml_dtypes
import naive
import numpy as np
import operands
import pytest
import tolerances

from numkv import targets
from numkv.errors import NotSupported

FP8 = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}
FLOATS = list(naive.DTYPES)
KINDS = [*FLOATS, *naive.EVERYWHERE, *FP8]
F32, I32, I64 = np.float32, np.int32, np.int64
NO_SCALE, NO_RANGES = np.zeros((0, 0, 0), F32), np.zeros((0, 2), I64)


def to(x):
    return targets.get("cuda").asarray(x)


def host(x):
    return targets.get("cuda").to_host(x)


def ops():
    return targets.get("cuda").ops


def to_words(x):
    """An array as kernels see it: 16-bit and 8-bit floats as unsigned words."""
    return to(
        operands.words(x)
        if x.dtype.itemsize == 2
        else x.view(np.uint8)
        if x.dtype in FP8.values()
        else x
    )


def of_heads(rng, rows, kind, axis):
    """Words of rows in an 8-bit float, the scales of their heads, and values."""
    scale = (rng.random(rows.shape[axis]) + 0.5).astype(F32)
    along = scale.reshape([-1 if i == axis else 1 for i in range(rows.ndim)])
    top = {"fp8_e4m3": F32(448), "fp8_e5m2": F32(57344)}[kind]
    words = np.clip(rows.astype(F32) / along, -top, top).astype(FP8[kind])
    return words, scale, words.astype(np.float64) * along


# ---------------------------------------------------------------- writing

SHAPE = (7, 2, 5)  # blocks, kv heads, tokens of a block


def empty_pool(rng, kind, dim):
    """A pool of a recognisable filling and its scales."""
    if kind in FP8:
        scale = (rng.random(SHAPE[1]) + 0.5).astype(F32)
        return np.full((*SHAPE, dim), operands.UNTOUCHED, np.uint8), scale
    return operands.pool(kind, SHAPE, dim)


def pool_after(pool, scale, kind, rows, slots):
    """What it holds after rows ``(tokens, heads, dim)`` went into slots."""
    if kind not in FP8:
        return operands.after(pool, scale, kind, rows, slots)
    pool, top = pool.copy(), {"fp8_e4m3": F32(448), "fp8_e5m2": F32(57344)}[kind]
    words = np.clip(rows.astype(F32) / scale[:, None], -top, top).astype(FP8[kind]).view(np.uint8)
    for t, slot in enumerate(slots):
        if slot >= 0:
            pool[slot // SHAPE[2], :, slot % SHAPE[2]] = words[t]
    return pool, scale


def append(rng, source, kind, by_slot, dim):
    """Rows of K and V of one sequence by its block table, or of many by slots, of which one is skipped."""
    sides = [
        (naive.round_to(rng.standard_normal((13, SHAPE[1], dim)), source), *empty_pool(rng, kind, dim))
        for _ in "kv"
    ]  # fmt: skip
    there = [(to_words(rows), source, to(pool), kind, to(scale)) for rows, pool, scale in sides]
    if by_slot:
        slots = rng.permutation(SHAPE[0] * SHAPE[2])[:13].astype(I64)
        slots[4] = -1
        ops().scatter_both(*there, to(slots))
    else:
        table = rng.permutation(SHAPE[0])[:4].astype(I32)
        slots = operands.slots_of(table, 3, 13, SHAPE[2])
        ops().append_both(*there, to(table), 3)
    for (rows, pool, scale), (_, _, got, _, got_scale) in zip(sides, there, strict=True):
        for found, want in zip(
            (got, got_scale), pool_after(pool, scale, kind, rows, slots), strict=True
        ):
            operands.assert_same(host(found), want)


def append_views(rng, source, kind, dim, aligned):
    """Rows and pools that are parts of larger arrays, whose rows start at multiples of 16 bytes, or do not."""
    tokens, heads, gap = 9, SHAPE[1], 16 if aligned else 1
    slots = rng.permutation(SHAPE[0] * SHAPE[2])[:tokens].astype(I64)
    slots[[0, 4]] = -1, SHAPE[0] * SHAPE[2]
    wanted, there = [], []
    for side in range(2):
        rows = naive.round_to(rng.standard_normal((tokens, 3 * heads, dim + gap)), source)
        pool, scale = empty_pool(rng, kind, dim)
        pools = np.full(
            (*SHAPE[:2], SHAPE[2] + 1, pool.shape[3] + gap), operands.UNTOUCHED, pool.dtype
        )
        part = slice(side * heads, (side + 1) * heads)
        there.append((
            to_words(rows)[:, part, gap:], source, to(pools)[:, :, :-1, gap:], kind, to(scale)
        ))  # fmt: skip
        skipped = np.where(slots < SHAPE[0] * SHAPE[2], slots, -1)
        wanted.append(pool_after(pool, scale, kind, rows[:, part, gap:], skipped))
    ops().scatter_both(*there, to(slots))
    for (_, _, pool, _, scale), want in zip(there, wanted, strict=True):
        operands.assert_same(np.ascontiguousarray(host(pool)), want[0])
        operands.assert_same(host(scale), want[1])


def append_bad(rng, source, kind, dim):
    """Rows with NaN and infinity: zeros, and each token's is reported; without `look`, the others are right."""
    watch = importlib.import_module("numkv.kernels.cuda.late").Watch()
    tokens, heads = 6, SHAPE[1]
    slots = rng.permutation(SHAPE[0] * SHAPE[2])[:tokens].astype(I64)
    for looks in (True, False):
        sides = [
            (naive.round_to(rng.standard_normal((tokens, heads, dim)), source), *empty_pool(rng, kind, dim))
            for _ in "kv"
        ]  # fmt: skip
        (k, *_), (v, *_) = sides
        k[2, 1, dim - 3], k[5, 0, 3], v[1, 1, 0] = np.nan, -np.inf, np.inf
        there = [(to_words(rows), source, to(pool), kind, to(scale)) for rows, pool, scale in sides]
        ops().scatter_both(*there, to(slots), watch.look("a call") if looks else 0)
        if looks:
            found = [(report.what, report.of_v, report.index) for report in watch.take()]
            assert found == [
                ("a call", False, (2 * heads + 1) * dim + dim - 3),
                ("a call", False, 5 * heads * dim + 3),
                ("a call", True, (heads + 1) * dim),
            ]
        for (rows, pool, scale), (_, _, got, _, got_scale) in zip(sides, there, strict=True):
            bad = ~np.isfinite(rows.astype(np.float64)).all(-1)
            clean = np.where(bad[..., None], 0, rows.astype(np.float64)).astype(rows.dtype)
            want, want_scale = (np.swapaxes(x, 1, 2).reshape(-1, *x.shape[1:2], *x.shape[3:])[slots] for x in
                                pool_after(pool, scale, kind, clean, slots))  # fmt: skip
            got, got_scale = (np.swapaxes(x, 1, 2).reshape(-1, *x.shape[1:2], *x.shape[3:])[slots] for x in
                              (host(got), host(got_scale)))  # fmt: skip
            chosen = np.ones_like(bad) if looks else ~bad
            operands.assert_same(got[chosen], want[chosen])
            operands.assert_same(got_scale[chosen], want_scale[chosen])
            # No number only where a group has one that is not finite.
            if kind == "int4" and not looks:
                finite = np.isfinite(rows.astype(F32))
                whole = np.logical_and.reduceat(finite, np.arange(0, dim, 32), axis=-1)
                _, wanted = pool_after(
                    pool, scale, kind, np.where(finite, rows, 0).astype(rows.dtype), slots
                )
                wanted = np.swapaxes(wanted, 1, 2).reshape(-1, *got_scale.shape[1:])[slots]
                operands.assert_same(
                    got_scale, np.where(whole, wanted, 0x7FC0).astype(got_scale.dtype)
                )


def append_small(rng, kind):
    """Rows so small, and so large, that their scales cannot be inverted; zeros; groups far from 0."""
    rows = rng.standard_normal((13, SHAPE[1], 64)).astype(F32)
    factors = [0, 1e-44, 1e-38, 1e-37, 1e-36, 1e-30, 1e-20, 1e20, 1e30, 1e37, 7e37, 1, 1]
    rows = (rows * np.array(factors, F32)[:, None, None]).astype(F32)
    rows[11], rows[12, :, :32] = rows[11] + F32(1000), F32(-3)
    sides = [(rows, *empty_pool(rng, kind, 64)) for _ in "kv"]
    there = [(to(x), "fp32", to(pool), kind, to(scale)) for x, pool, scale in sides]
    slots = rng.permutation(SHAPE[0] * SHAPE[2])[:13].astype(I64)
    ops().scatter_both(*there, to(slots))
    for (x, pool, scale), (_, _, got, _, got_scale) in zip(sides, there, strict=True):
        want = pool_after(pool, scale, kind, x, slots)
        operands.assert_same(host(got_scale), want[1])
        operands.assert_same(host(got), want[0])


def write(rng, source, k_kind, v_kind, mode, by_slot, dim=64):
    """The fused write: split, norm, rotation and write; floats as the oracle's, codes as those of the rows written."""
    q_heads, heads, tokens = 3, SHAPE[1], 6
    width = (q_heads + 2 * heads) * dim
    qkv = naive.round_to(rng.standard_normal((tokens, width)), source)
    compute = np.float64 if "fp64" in (source, k_kind, v_kind) else F32
    cos, sin = naive.rope_tables(16, dim, dtype=compute)
    weights = [(1 + 0.1 * rng.standard_normal(dim)).astype(compute) for _ in range(2)]
    first, slots = 4, rng.permutation(SHAPE[0] * SHAPE[2])[:tokens].astype(I64)
    table = rng.permutation(SHAPE[0])[:3].astype(I32)
    pools = [[to(x) for x in empty_pool(rng, kind, dim)] for kind in (k_kind, v_kind)]
    before = [[host(x) for x in pool] for pool in pools]
    q_out = to_words(np.zeros((tokens, q_heads, dim), naive.DTYPES[source]))
    normalise, rotate, interleaved = mode in (1, 4), mode != 0, mode in (3, 4)
    head = (
        to_words(qkv),
        source,
        to(cos),
        to(sin),
        (normalise, rotate, interleaved),
        *map(to, weights),
        1e-5,
    )
    if by_slot:
        positions = np.arange(first, first + tokens)
        ops().scatter_write(
            *head, to(positions), q_out, pools[0][0], k_kind, pools[0][1], pools[1][0], v_kind, pools[1][1],
            to(slots),
        )  # fmt: skip
    else:
        slots = operands.slots_of(table, first, tokens, SHAPE[2])
        ops().write_rows(
            *head, first, q_out, pools[0][0], k_kind, pools[0][1], pools[1][0], v_kind, pools[1][1], to(table),
            first,
        )  # fmt: skip
    wanted = naive.write(qkv, q_heads, heads, dim, mode, cos, sin, *weights, 1e-5, first)
    got_q = host(q_out).view(naive.DTYPES[source])
    tolerances.assert_rows_close(got_q, wanted[0], 2e-6 + tolerances.ROUNDING[source])
    for (got, scale), (old, _), kind, rows in zip(
        pools, before, (k_kind, v_kind), wanted[1:], strict=True
    ):
        got, scale = host(got), host(scale)
        rest = np.ones((SHAPE[0], SHAPE[2]), bool)
        rest.reshape(-1)[slots] = False
        assert np.array_equal(np.swapaxes(got, 1, 2)[rest], np.swapaxes(old, 1, 2)[rest])
        found = np.stack([got[s // SHAPE[2], :, s % SHAPE[2]] for s in slots])
        if kind in FLOATS:
            values, bound = found.view(naive.DTYPES[kind]), 2e-6 + 2 * tolerances.ROUNDING[kind]
        elif kind in FP8:
            values = found.view(FP8[kind]).astype(np.float64) * scale[:, None]
            bound = 0.08 if kind == "fp8_e4m3" else 0.15
        else:
            of = np.stack([scale[s // SHAPE[2], :, s % SHAPE[2]] for s in slots])
            of = of.view(naive.DTYPES["bf16"]) if kind == "int4" else of
            values = naive.dequantise(operands.codes_of(found, kind), of)
            bound = {"int8": 0.02, "code6": 0.05}.get(kind, 0.2)
        tolerances.assert_rows_close(values, rows, bound)


def refused(rng):
    """Rows that shared memory does not hold are refused by name, not by the driver."""
    with pytest.raises(NotSupported, match="`qkv`: expected heads of at most 12032"):
        write(rng, "fp32", "fp32", "fp32", 0, True, dim=12064)
    pool, scale = to(np.zeros((1, 1, 1, 12064), np.int8)), to(np.ones((1, 1, 1), F32))
    tables = [to(np.zeros((2, 6032), F32))] * 2
    with pytest.raises(NotSupported, match="`pool`: expected rows of at most 12032"):
        ops().shift_rows(pool, "int8", scale, to(np.zeros(1, I64)), 1, *tables, False)
    x = to(np.zeros((1, 1, 12296), F32))
    with pytest.raises(NotSupported, match="`x`: expected rows of at most 12288"):
        ops().rotate_rows(x, "fp32", to(np.ones(12296, F32)), False, x, "fp32")


def values_of(words, scale, kind):
    """What a pool of keys holds, in float64."""
    if kind in naive.CODES:
        return naive.dequantise(
            operands.codes_of(words, kind),
            scale.view(naive.DTYPES["bf16"]) if kind == "int4" else scale,
        )
    if kind in FP8:
        return words.view(FP8[kind]).astype(np.float64) * scale[:, None, None]
    return words.view(naive.DTYPES[kind]).astype(np.float64)


def shift(rng, kind, interleaved, dim=64, half=24):
    """Keys turned to other positions, in place; slots outside of the pool are skipped."""
    offset = -5
    rows = rng.standard_normal((*SHAPE, dim))
    if kind in FP8:
        words, scale, _ = of_heads(rng, rows, kind, 1)
    else:
        words, scale = operands.stored(rows, kind)
        scale = NO_SCALE if scale is None else scale
    slots = rng.permutation(SHAPE[0] * SHAPE[2])[:11].astype(I64)
    cos, sin = naive.rope_tables(16, 2 * half)
    pool, scales = to_words(words), to(scale)
    given = np.append(slots, [-1, SHAPE[0] * SHAPE[2]])
    ops().shift_rows(pool, kind, scales, to(given), offset, to(cos), to(sin), interleaved)
    before = values_of(host(to_words(words)), scale, kind)
    wanted = naive.rope(before, cos[5].astype(np.float64), -sin[5].astype(np.float64), interleaved)
    got, scales = host(pool), host(scales)
    after = values_of(got, scales, kind)
    bound = {
        "int8": 0.01, "code6": 0.04, "int4": 0.1, "code4": 0.13, "fp8_e4m3": 0.04, "fp8_e5m2": 0.08,
    }.get(kind, 0) or (2e-6 + tolerances.ROUNDING[kind])  # fmt: skip
    moved = np.zeros((SHAPE[0], SHAPE[2]), bool)
    moved.reshape(-1)[slots] = True
    tolerances.assert_rows_close(
        np.swapaxes(after, 1, 2)[moved], np.swapaxes(wanted, 1, 2)[moved], bound
    )
    kept = np.swapaxes(got, 1, 2)[~moved]
    assert np.array_equal(kept, np.swapaxes(host(to_words(words)), 1, 2)[~moved])
