"""`shift_rows`: stored keys turned to other positions, in place, against the oracle's rotation in float64."""

import naive
import numpy as np
import pytest
import tolerances
from quantised_stores import assert_int4_no_worse

from numkv import targets

KINDS = [*naive.DTYPES, "int8"]
POSITIONS = 40


class Pool:
    """K rows in the words of a kind; float kinds hold a NaN in every slot that is left alone."""

    def __init__(self, rng, kind, shape, moved):
        blocks, heads, block_size, dim = shape
        rows = rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, (*shape[:3], 1))
        self.kind, self.scale = kind, np.empty((0, 0, 0), np.float32)
        self.moved = np.zeros((blocks, 1, block_size), bool)
        self.moved.reshape(-1)[moved] = True
        if kind == "int8":
            self.rows, self.scale = naive.int8_quantise(rows)
        else:
            rows[np.broadcast_to(~self.moved, shape[:3])] = np.nan
            self.rows = naive.round_to(rows, kind)

    def values(self):
        """What the rows stand for, in float64."""
        if self.kind == "int8":
            return naive.int8_dequantise(self.rows, self.scale)
        return self.rows.astype(np.float64)

    def shift(self, target, to, host, slots, offset, tables, interleaved=False):
        """The pool after a shift of `slots`."""
        where = targets.get(target)
        rows, scale = to(self.rows.copy()), to(self.scale.copy())
        words = rows if self.kind == "int8" else where.words(rows)
        slots = where.index(np.asarray(slots, np.int64), np.int64)
        where.ops.shift_rows(words, self.kind, scale, slots, offset, *map(to, tables), interleaved)
        after = object.__new__(Pool)
        after.kind, after.moved, after.rows, after.scale = (
            self.kind, self.moved, host(rows), host(scale),
        )  # fmt: skip
        return after

    def check_rest(self, before):
        """What was not to move has the same bits."""
        rest = np.broadcast_to(~self.moved, self.rows.shape[:3])
        assert np.array_equal(naive.words(self.rows[rest]), naive.words(before.rows[rest]))
        if self.kind == "int8":
            assert np.array_equal(self.scale[rest], before.scale[rest])


def turned(values, offset, tables, interleaved):
    """The rows as they must become, in float64."""
    cos, sin = (table[abs(offset)].astype(np.float64) for table in tables)
    return naive.rope(values, cos, sin if offset >= 0 else -sin, interleaved)


def assert_shifted(after, before, offset, tables, interleaved):
    """Every moved row as close as its kind allows."""
    moved = np.broadcast_to(before.moved, before.rows.shape[:3])
    want = turned(before.values(), offset, tables, interleaved)[moved]
    got = after.values()[moved]
    if after.kind == "int8":
        scale = np.abs(want).max(axis=-1) / 127
        np.testing.assert_allclose(after.scale[moved], scale, rtol=1e-6)
        assert np.all(np.abs(got - want) <= scale[:, None] * (0.5 + 1e-4))
    elif after.kind == "fp64":
        assert np.all(np.abs(got - want) <= 1e-14 * np.abs(want).max(axis=-1, keepdims=True))
    else:
        tolerances.assert_rotated_close(got, want, after.kind)
    after.check_rest(before)


# Blocks, heads, block size and head dim; the pool of a multi-sequence cache is one long block.
SHAPES = [((5, 2, 4, 8), 8), ((1, 3, 21, 16), 16), ((3, 1, 7, 13), 6), ((7, 2, 1, 40), 34)]


#: Which elements make a pair is the same in all float kinds.
TURNS = [(kind, False) for kind in KINDS] + [
    pytest.param(kind, True, marks=pytest.mark.nightly if kind in ("fp64", "fp16", "bf16") else [])
    for kind in KINDS
]


@pytest.mark.boundscheck
@pytest.mark.parametrize(("kind", "interleaved"), TURNS)
@pytest.mark.parametrize(("shape", "rotary_dim"), SHAPES)
def test_rows_turn(target, to, host, rng, kind, interleaved, shape, rotary_dim):
    """Forwards and backwards, some slots in any order, part of a row or all of it."""
    num_slots = shape[0] * shape[2]
    slots = rng.permutation(num_slots)[: 2 * num_slots // 3]
    tables = naive.rope_tables(POSITIONS, rotary_dim)
    before = Pool(rng, kind, shape, slots)
    for offset in (7, -(POSITIONS - 1)):
        after = before.shift(target, to, host, slots, offset, tables, interleaved)
        assert_shifted(after, before, offset, tables, interleaved)


@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_rows(rng, kind):
    shape, tables = (1, 2, 4000, 64), naive.rope_tables(POSITIONS, 64)
    slots = np.arange(300, 3800)
    before = Pool(rng, kind, shape, slots)
    after = before.shift("cpu", lambda x: x, lambda x: x, slots, -5, tables)
    assert_shifted(after, before, -5, tables, False)


@pytest.mark.parametrize("kind", list(naive.DTYPES))
def test_elements_past_the_rotary_dim_keep_their_bits(target, to, host, rng, kind):
    """A signalling NaN too, which no conversion leaves alone."""
    slots = [4, 1]
    before = Pool(rng, kind, (2, 2, 3, 10), slots)
    words = naive.words(before.rows)
    words[..., 6:] = naive.words(np.array(np.inf, naive.DTYPES[kind])) + 1
    before.rows = words.view(naive.DTYPES[kind])
    after = before.shift(target, to, host, slots, 9, naive.rope_tables(POSITIONS, 6))
    assert np.array_equal(naive.words(after.rows)[..., 6:], words[..., 6:])
    assert not np.any(np.isnan(after.rows[1, :, 1, :6].astype(np.float64)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_shifted_key_is_the_key_of_its_new_position(target, to, host, rng, interleaved):
    """Keys rotated for positions 11 to 16 and shifted by -8 are those of 3 to 8."""
    plain = rng.standard_normal((6, 8))
    cos, sin = tables = naive.rope_tables(POSITIONS, 8, dtype=np.float64)
    single = [table.astype(np.float32) for table in tables]

    def at(first):
        return np.stack(
            [
                naive.rope(x, cos[p], sin[p], interleaved)
                for p, x in zip(range(first, first + 6), plain, strict=True)
            ]
        )

    pool = Pool(rng, "fp32", (1, 1, 6, 8), range(6))
    pool.rows[0, 0] = at(11)
    after = pool.shift(target, to, host, range(6), -8, single, interleaved)
    tolerances.assert_rotated_close(after.rows[0, 0], at(3), "fp32")


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(target, to, host, rng, kind):
    """Within two roundings of where it was."""
    slots, tables = [2, 0, 5], naive.rope_tables(POSITIONS, 8)
    before = Pool(rng, kind, (2, 1, 3, 8), slots)
    there = before.shift(target, to, host, slots, 13, tables)
    back = there.shift(target, to, host, slots, -13, tables)
    moved = before.moved[:, 0]
    want, got = before.values()[:, 0][moved], back.values()[:, 0][moved]
    bound = {"int8": 2 / 127, "fp64": 1e-6}.get(kind, 3 * tolerances.ROTATED.get(kind, 0))
    assert np.all(np.abs(got - want) <= bound * np.abs(want).max(axis=-1, keepdims=True))
    assert not np.array_equal(there.values()[:, 0][moved], want)


@pytest.mark.parametrize("kind", list(naive.DTYPES))
def test_an_offset_of_nothing_changes_nothing(target, to, host, rng, kind):
    slots = [1, 3]
    before = Pool(rng, kind, (2, 2, 2, 6), slots)
    after = before.shift(target, to, host, slots, 0, naive.rope_tables(POSITIONS, 6))
    assert np.array_equal(naive.words(after.rows), naive.words(before.rows))


def test_no_slots(target, to, host, rng):
    before = Pool(rng, "bf16", (1, 1, 3, 4), [])
    after = before.shift(target, to, host, [], 2, naive.rope_tables(POSITIONS, 4))
    assert np.array_equal(naive.words(after.rows), naive.words(before.rows))


@pytest.mark.parametrize(("kind", "bits"), [("fp16", 10), ("bf16", 7)])
def test_ties_round_to_even(target, to, host, rng, kind, bits):
    """Tables of our own make sums that lie between two neighbours."""
    unit = 2.0**-bits
    tables = np.ones((1, 2), np.float32), np.full((1, 2), -unit / 2, np.float32)
    pool = Pool(rng, kind, (1, 1, 1, 4), [0])
    pool.rows[0, 0, 0] = [1, 1 + unit, 1, 1]  # pairs (0, 2) and (1, 3)
    after = pool.shift(target, to, host, [0], 0, tables)
    assert after.rows[0, 0, 0, :2].astype(np.float64).tolist() == [1, 1 + 2 * unit]


def test_codes_are_quantised_once(target, to, host, rng):
    """A quarter turn swaps the halves of a row: the codes are the old ones, and so is the scale."""
    tables = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    pool = Pool(rng, "int8", (1, 2, 5, 10), range(5))
    after = pool.shift(target, to, host, range(5), 1, tables)
    want = np.concatenate([-pool.rows[..., 4:8], pool.rows[..., :4], pool.rows[..., 8:]], axis=-1)
    assert np.array_equal(after.rows, want)
    np.testing.assert_allclose(after.scale, pool.scale, rtol=3e-7)


def test_a_row_of_zeros_has_scale_zero(target, to, host, rng):
    pool = Pool(rng, "int8", (1, 1, 2, 4), [0, 1])
    pool.rows[0, 0, 0] = 0
    pool.scale[0, 0, 0] = 0
    after = pool.shift(target, to, host, [0, 1], 3, naive.rope_tables(POSITIONS, 4))
    assert after.scale[0, 0, 0] == 0
    assert np.all(after.rows[0, 0, 0] == 0)
    assert after.scale[0, 0, 1] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_strided_pools_and_tables(target, to, host, rng, kind):
    """Every array may be a slice of a wider one, as long as the last axis of the pool is contiguous."""
    tables = naive.rope_tables(POSITIONS, 8)
    before = Pool(rng, kind, (4, 3, 6, 12), range(24))
    cut = np.s_[1:3, ::2, 1:5, 2:12]
    where = targets.get(target)
    rows, scale = to(before.rows.copy()), to(before.scale.copy())
    words = rows if kind == "int8" else where.words(rows)
    part = Pool(rng, kind, (2, 2, 4, 10), range(8))
    part.rows = before.rows[cut]
    if kind == "int8":
        part.scale = before.scale[cut[:3]]
    slots = where.index(np.arange(8), np.int64)
    where.ops.shift_rows(
        words[cut], kind, scale[cut[:3]] if kind == "int8" else scale, slots, 5,
        *(to(np.repeat(table, 2, axis=0))[::2] for table in tables), False,
    )  # fmt: skip
    after = Pool(rng, kind, (2, 2, 4, 10), range(8))
    after.rows, after.scale = host(rows)[cut], host(scale)[cut[:3]] if kind == "int8" else None
    assert_shifted(after, part, 5, tables, False)
    left = np.ones(before.rows.shape, bool)
    left[cut] = False
    assert np.array_equal(naive.words(host(rows))[left], naive.words(before.rows)[left])


@pytest.mark.parametrize("target", ["cuda"], indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_slots_outside_the_pool_are_skipped(target, to, host, rng, kind):
    """The host has not seen them; on the CPU it has."""
    tables = naive.rope_tables(POSITIONS, 4)
    before = Pool(rng, kind, (2, 2, 3, 4), [4, 0])
    after = before.shift(target, to, host, [-1, 4, 6, 2**40, 0, -(2**40)], 6, tables)
    assert_shifted(after, before, 6, tables, False)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(8, 8), (40, 34), (66, 20)])
def test_shifted_keys(target, to, host, rng, dim, rotary_dim, interleaved):
    """Rotated in float32 and quantised once; rows that stay and groups that do not turn keep their bits."""
    where = targets.get(target)
    tables = naive.rope_tables(20, rotary_dim)
    codes, scale = naive.int4_quantise(rng.standard_normal((3, 2, 2, dim)))
    slots, offset = np.array([4, 1, 0]), -7
    pool, scales = to(codes.copy()), to(scale.copy())
    where.ops.shift_rows(
        pool, "int4", where.words(scales), where.index(slots, np.int64), offset, *map(to, tables),
        interleaved,
    )  # fmt: skip
    got, got_scale = host(pool), host(scales)
    moved = np.zeros((3, 2, 2), bool)
    moved[slots // 2, :, slots % 2] = True
    assert np.array_equal(got[~moved], codes[~moved])
    assert np.array_equal(got_scale[~moved], scale[~moved])
    cos, sin = (table[-offset].astype(np.float64) for table in tables)
    want = naive.rope(naive.int4_dequantise(codes, scale)[moved], cos, -sin, interleaved)
    got, got_scale = got[moved], got_scale[moved]
    assert_int4_no_worse(naive.int4_dequantise(got, got_scale), got_scale, want)
    still = -(-rotary_dim // 32)  # groups from here on
    assert np.array_equal(got[:, 16 * still :], codes[moved][:, 16 * still :])
    assert np.array_equal(got_scale[:, still:], scale[moved][:, still:])
    _, best = naive.int4_quantise(want)
    # A hair decides some searches.
    assert np.mean(naive.words(best) == naive.words(got_scale)) > 0.8
