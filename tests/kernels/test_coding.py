"""`numkv.kernels.cpu.vectors.coding`: rows to INT4, CODE4 and CODE6 in vector code, bit for bit as they are defined."""

import functools
import os
import subprocess
import sys

import naive
import numba
import numpy as np
import pytest

import numkv
from numkv.kernels.cpu.vectors.arrays import by_row
from numkv.kernels.cpu.vectors.coding import row_storer, token_storer
from numkv.rows.codec import row_codec

KINDS = ["int4", "code4", "code6"]
F32 = np.float32
#: Shorter than a vector, whole chunks, chunks and a rest; groups of INT4 that are taken at once, and one more.
DIMS = [8, 16, 32, 40, 64, 72, 96, 128, 136, 160, 200, 256, 1000]


@functools.cache
def compiled(kind, compute="float32"):
    return numba.njit(row_storer(kind, compute))


def stored(store, kind, x):
    """Words and scales of a row; what lies behind them stays as it was."""
    of = numkv.kind(kind)
    words, scales = len(x) * of.unit[1] // of.unit[0], -(-len(x) // (of.group_size or len(x)))
    to, to_scales = np.full(words + 64, 0x55, np.uint8), np.full(scales + 16, 77, of.scale_word)
    store(x, to[:words], to_scales[:scales])
    assert np.all(to[words:] == 0x55)
    assert np.all(to_scales[scales:] == 77)
    return to[:words].tobytes(), to_scales[:scales].tobytes()


def defined(kind, x):
    """The same by the definition."""
    words, scales = naive.quantise(x.astype(F32)[None], kind)
    return naive.words(words)[0].tobytes(), naive.words(scales)[0].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", [F32, pytest.param(np.float64, marks=pytest.mark.nightly)])
def test_rows(kind, compute, rng):
    store = compiled(kind, compute.__name__)
    for dim in DIMS:
        for size in (1e-28, 1.0, 6e4, 1e30):
            for x in (
                rng.standard_normal(dim),
                rng.standard_t(2, dim),
                1 + rng.random(dim),
                rng.integers(-3, 4, dim),
            ):
                row = (x * size).astype(F32).astype(compute)
                row[0] += compute(F32(size))
                assert stored(store, kind, row) == defined(kind, row), (dim, size)


def hostile(dim, rng):
    """Rows with what is not finite, with zeros of both signs, with what is too small to be a normal number."""
    x = rng.standard_normal(dim).astype(F32)
    for value in (np.nan, -np.nan, np.inf, -np.inf, 3e38, 1e-45):
        row = x.copy()
        row[rng.integers(dim)] = value
        yield row
    yield np.zeros(dim, F32)
    yield -np.zeros(dim, F32)
    row = x.copy()
    row[::2] = rng.choice(np.array([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-38], F32), len(row[::2]))
    yield row
    for exponent in rng.uniform(-45, 38, 8):
        with np.errstate(over="ignore", under="ignore"):
            yield (x * 10.0**exponent).astype(F32)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_rows(kind, rng):
    store, _ = row_codec(kind)
    for dim in (40, 136):
        for x in hostile(dim, rng):
            with np.errstate(all="ignore"):
                assert stored(compiled(kind), kind, x) == stored(store, kind, x), x


@pytest.mark.parametrize(
    "kind", ["int4", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[1:])]
)
def test_rows_of_a_token(kind, rng):
    """All heads at once: as row by row, in pools of any strides, also where rows are too long for vector code."""
    of, store = numkv.kind(kind), compiled(kind)
    together = token_storer(kind, "fp32")
    put = numba.njit(lambda rows, pool, scale, x: together(rows, 1, pool, by_row(scale), 5, x))
    for heads, dim in ((1, 32), (3, 96), (9, 40), (17, 128), (5, 64), (2, 2056), (0, 64)):
        words, shape = of.words_per_row(dim), (2, heads, 3)
        pool = np.full((*shape, words + 5), 0x55, np.uint8)
        scale = np.full((*of.scale_shape(shape, dim), 2)[: 3 + 1], 77, of.scale_word)
        scale = scale if of.group_size else scale[..., 0]
        x = rng.standard_normal((heads, dim)).astype(F32) * F32(10) ** rng.integers(
            -8, 8, (heads, 1)
        )
        x = x.astype(F32)
        if heads > 2:
            x[1], x[2, 3] = 0, np.nan
        expected, of_rows = pool.copy(), scale.copy()
        for h in range(heads):
            to = of_rows[1, h, 2] if of.group_size else of_rows[1, h, 2:]
            store(x[h], expected[1, h, 2, :words], to)
        before, of_before = pool.copy(), scale.copy()
        wide = np.zeros((3, 2 * heads, dim + 1), F32)
        wide[1, ::2, :dim] = x
        for rows in (np.stack([x, x, x]), wide[:, ::2, :dim]):
            pool[...], scale[...] = before, of_before
            put(rows, pool[..., :words], scale, np.empty(heads * dim, F32))
            assert np.array_equal(pool, expected), (heads, dim)
            assert scale.tobytes() == of_rows.tobytes(), (heads, dim)


COMPILE = """
import sys, numba
from numba import types
from numkv.kernels.cpu.vectors import features
from numkv.kernels.cpu.vectors.coding import row_storer
assert features.LANES == int(sys.argv[1]), features.LANES
for kind, scale in (("int4", types.uint16), ("code4", types.float32), ("code6", types.float32)):
    function = numba.njit(row_storer(kind))
    function.compile((types.float32[::1], types.uint8[::1], scale[::1]))
    print(sum("%zmm" in line for line in "".join(function.inspect_asm().values()).splitlines()) > 50)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names an x86 CPU")
def test_it_compiles_for_avx512():
    environment = {**os.environ, "NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": ""}
    found = subprocess.run(
        [sys.executable, "-c", COMPILE, "16"], env=environment, capture_output=True, text=True
    )
    assert found.stdout.split() == ["True"] * 3, found.stderr
