"""`numkv.device`: the same calls in a user's ``@njit`` function and in a user's ``@cuda.jit`` kernel."""

import functools

import naive
import numba
import numpy as np
import pytest
from numba import cuda
from own_code import as_stored

import numkv
from numkv import device
from numkv.kinds import kinds

#: Each is compiled anew; these are like others.
NIGHTLY = ("fp64", "fp16", "bf16", "fp8_e5m2", "code4", "code6")
SLOW = ("fp8_e4m3", "int4")
NAMES = [
    pytest.param(
        kind.name,
        marks=[pytest.mark.nightly] * (kind.name in NIGHTLY)
        + [pytest.mark.slow] * (kind.name in SLOW),
    )
    for kind in kinds()
]
BLOCKS, HEADS, SIZE, DIM = 3, 2, 4, 40  # INT4: a whole group, and a shorter one
SCALES = np.array([0.5, 0.25], np.float32)  # of fp8, for each head


@functools.cache
def user_function(kind, target):
    """What a user writes: stores the rows of a head into slots, and reads them back by row and by element."""
    store, load, value = device.store_row(kind), device.load_row(kind), device.load_element(kind)
    slot_of = device.slot_of

    def store_and_load(a, position, x, head, rows, elements, said):
        slot = slot_of(a.block_table[0], position, a.k.shape[2])
        said[position, head, 0] = store(x, a.k, a.k_scale, slot, head)
        said[position, head, 1] = load(a.k, a.k_scale, slot, head, rows)
        for d in range(elements.shape[0]):
            elements[d] = value(a.k, a.k_scale, slot, head, d)

    if target == "cpu":
        one = numba.njit(store_and_load)

        @numba.njit
        def all_rows(a, x, rows, elements, said):
            for t in range(x.shape[0]):
                for h in range(x.shape[1]):
                    one(a, t, x[t, h], h, rows[t, h], elements[t, h], said)

        return all_rows
    one = cuda.jit(device=True)(store_and_load)

    @cuda.jit
    def kernel(a, x, rows, elements, said):
        t, h = cuda.blockIdx.x, cuda.threadIdx.x
        one(a, t, x[t, h], h, rows[t, h], elements[t, h], said)

    return lambda a, x, *out: kernel[x.shape[0], x.shape[1]](a, x, *out)


def arrays_of(kind, to, table):
    """Buffers of zeros as `CacheArrays`, made without a cache."""
    of = numkv.kind(kind)
    words = np.zeros((BLOCKS, HEADS, SIZE, of.words_per_row(DIM)), of.word)
    scale = np.zeros(of.scale_shape((BLOCKS, HEADS, SIZE), DIM), of.scale_word)
    if of.scales_per == "head":
        scale[:] = SCALES
    none = np.zeros(0, np.int64)
    fields = (words, words.copy(), scale, scale.copy(), np.array([table], np.int32), none, none)
    return device.CacheArrays(*map(to, fields))


def run(kind, target, to, host, table, x):
    a = arrays_of(kind, to, table)
    wide = np.float64 if kind == "fp64" else np.float32
    rows, elements = (to(np.full(x.shape, 7, wide)) for _ in "ab")
    said = to(np.full((*x.shape[:2], 2), 7, np.int64))
    user_function(kind, target)(a, to(x), rows, elements, said)
    return a, host(rows), host(elements), host(said)


@pytest.mark.parametrize("kind", NAMES)
def test_rows_are_stored_and_loaded_in_users_code(kind, target, to, host, rng):
    x = rng.standard_normal((6, HEADS, DIM)).astype(np.float64 if kind == "fp64" else np.float32)
    a, rows, elements, said = run(kind, target, to, host, [2, 0], x)
    assert (said == 1).all()
    np.testing.assert_array_equal(rows, as_stored(x, kind, SCALES))
    np.testing.assert_array_equal(elements, rows)
    if kind in naive.CODES:  # in the slots of the table: the codes and scales that naive finds
        codes, scales = naive.quantise(x, kind)
        tokens = [(2, 0), (2, 1), (2, 2), (2, 3), (0, 0), (0, 1)]
        for t, (block, offset) in enumerate(tokens):
            words = host(a.k)[block, :, offset]
            np.testing.assert_array_equal(words, codes[t].view(words.dtype))
            found = host(a.k_scale)[block, :, offset]
            np.testing.assert_array_equal(found, naive.words(scales[t]) if kind == "int4" else scales[t])  # fmt: skip
    assert not host(a.k)[1].any()
    assert not host(a.v).any()


@pytest.mark.parametrize("kind", NAMES)
def test_slots_outside_are_refused(kind, target, to, host):
    """Blocks that are not there, those past the pool, and positions past the table: no memory is touched."""
    x = np.ones((14, HEADS, DIM), np.float64 if kind == "fp64" else np.float32)
    a, rows, elements, said = run(kind, target, to, host, [-1, BLOCKS, 1], x)
    there = np.arange(14) // SIZE == 2
    assert (said[there] == 1).all()
    assert (said[~there] == 0).all()
    assert np.isnan(rows[~there]).all()
    assert np.isnan(elements[~there]).all()
    np.testing.assert_array_equal(rows[there], as_stored(x[there], kind, SCALES))
    assert not host(a.k)[[0, 2]].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["fp32", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_quantised_kinds_take_finite_rows_only(kind, bad, target, to, host):
    x = np.ones((3, HEADS, DIM), np.float32)
    x[1, 0, DIM - 1] = bad
    a, rows, _, said = run(kind, target, to, host, [0], x)
    if kind == "fp32":
        assert (said == 1).all()
        np.testing.assert_array_equal(rows, x)
    else:
        assert said[1, 0].tolist() == [0, 1]
        assert said.sum() == said.size - 1
        assert not host(a.k_scale)[0, 0, 1].any()


@pytest.mark.parametrize("kind", NAMES)
def test_rows_of_another_length_and_heads_outside_are_refused(kind, target, to):
    """In Python, as the simulator runs them: the compiled ones are the same functions."""
    a = arrays_of(kind, np.asarray, [0])
    store, load, value = device.store_row(kind), device.load_row(kind), device.load_element(kind)
    before = [x.copy() for x in (a.k, a.k_scale)]
    for dim in (0, DIM - 2, DIM + 2):
        out = np.ones(dim, np.float32)
        assert not store(np.ones(dim, np.float32), a.k, a.k_scale, 0, 0)
        assert not load(a.k, a.k_scale, 0, 0, out)
        assert np.isnan(out).all()
    row = np.ones(DIM, np.float32)
    for slot, head in [(0, -1), (0, HEADS), (-1, 0), (BLOCKS * SIZE, 0)]:
        assert not store(row, a.k, a.k_scale, slot, head)
        assert not load(a.k, a.k_scale, slot, head, row.copy())
        assert np.isnan(value(a.k, a.k_scale, slot, head, 0))
    for d in (-1, DIM):
        assert np.isnan(value(a.k, a.k_scale, 0, 0, d))
    for x, was in zip((a.k, a.k_scale), before, strict=True):
        np.testing.assert_array_equal(x, was)


def test_slots_of_positions():
    table = np.array([2, -1, 0], np.int32)
    compiled = numba.njit(lambda *args: device.slot_of(*args))
    for run in (device.slot_of, compiled):
        found = [run(table, position, 4) for position in (-1, 0, 3, 4, 8, 11, 12, 2**40)]
        assert found == [-1, 8, 11, -1, 0, 3, -1, -1]
    assert device.slot_of(table, np.uint64(9), 4) == compiled(table, np.uint64(9), 4) == 1
    assert compiled(table, 0, 0) == -1  # a cache without memory


def test_a_row_is_finite():
    compiled = numba.njit(lambda row: device.is_finite(row))
    for run in (device.is_finite, compiled):
        assert run(np.array([3e38, -1e-40, 0], np.float32))
        assert not run(np.array([1, np.nan], np.float32))
        assert not run(np.array([-np.inf, 1], np.float32))
        assert run(np.zeros(0, np.float32))


@pytest.mark.parametrize("make", [device.load_row, device.load_element, device.store_row])
def test_there_is_one_function_of_each_kind(make):
    assert make("int8") is make(numkv.kind("int8"))
    assert make("fp16") is not make("bf16")
    with pytest.raises(numkv.UnsupportedDType, match="kind"):
        make("int3")
