"""`rotate_rows`: random signs and a Hadamard transform, there and back, against matrices in float64."""

import itertools

import naive
import numpy as np
import pytest
import tolerances
from kinds import converting

from numkv import targets

KINDS = [*naive.DTYPES]
# Powers of two of an odd and an even number of stages, several blocks, one pair, nothing to transform.
DIMS = [1, 2, 4, 7, 8, 16, 12, 20, 32, 96, 128]


def matrix(dim, signs):
    """What a row, as a column, is multiplied by: blocks of the largest power of two that divides `dim`."""
    hadamard, blocks = np.ones((1, 1)), dim
    while blocks % 2 == 0:
        hadamard, blocks = np.kron(hadamard, [[1.0, 1.0], [1.0, -1.0]]), blocks // 2
    return np.kron(np.eye(blocks), hadamard / np.sqrt(len(hadamard))) @ np.diag(signs)


def some_signs(rng, dim):
    return rng.choice(np.array([-1, 1], np.float32), dim)


def run(target, x, kind, signs, inverse, out, out_kind):
    """`rotate_rows` on arrays of the target, as a user sees them."""
    where = targets.get(target)
    where.ops.rotate_rows(
        where.words(x), kind, where.asarray(signs), inverse, where.words(out), out_kind
    )


def rotated(target, x, signs, inverse, out_kind):
    """The rows that `rotate_rows` makes of NumPy rows."""
    where = targets.get(target)
    out = where.asarray(np.full(x.shape, 77, naive.DTYPES[out_kind]))
    kind = next(name for name, dtype in naive.DTYPES.items() if dtype == x.dtype)
    run(target, where.asarray(x), kind, signs, inverse, out, out_kind)
    return where.to_host(out)


def assert_close(actual, expected, *kinds):
    """Each row as close as the arithmetic (float32 unless a kind is fp64) and the rounding into the last kind allow."""
    assert actual.dtype == naive.DTYPES[kinds[-1]]
    arithmetic = 1e-15 if "fp64" in kinds else 6e-7
    tolerances.assert_rows_close(actual, expected, arithmetic + tolerances.ROUNDING[kinds[-1]])


@pytest.mark.boundscheck
@pytest.mark.parametrize("dim", DIMS)
def test_against_the_matrix(target, rng, dim):
    signs = some_signs(rng, dim)
    x = rng.standard_normal((3, 2, dim)).astype(np.float32)
    turn = matrix(dim, signs)
    assert_close(rotated(target, x, signs, False, "fp32"), x @ turn.T, "fp32")
    assert_close(rotated(target, x, signs, True, "fp32"), x @ turn, "fp32")


@pytest.mark.boundscheck
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("kind", "out_kind"), converting(itertools.product(KINDS, KINDS)))
def test_every_kind_to_every_kind(target, rng, kind, out_kind, inverse):
    dim = 24
    signs = some_signs(rng, dim)
    x = naive.round_to(rng.standard_normal((2, 3, dim)), kind)
    turn = matrix(dim, signs) if inverse else matrix(dim, signs).T
    got = rotated(target, x, signs, inverse, out_kind)
    assert_close(got, x.astype(np.float64) @ turn, kind, out_kind)


@pytest.mark.parametrize("out_kind", ["fp16", "bf16"])
def test_rounds_once_to_nearest_even(target, rng, out_kind):
    """With blocks of 4 integers every step but the last is exact, so the words are known."""
    signs = some_signs(rng, 4)
    x = rng.integers(-(2**14), 2**14, (4, 3, 4)).astype(np.float32)
    got = rotated(target, x, signs, True, out_kind)
    want = naive.round_to(x @ matrix(4, signs), out_kind)
    assert np.array_equal(naive.words(got), naive.words(want))


@pytest.mark.parametrize("dim", [7, 16, 40])
def test_back_to_the_same_rows(target, rng, dim):
    signs = some_signs(rng, dim)
    x = rng.standard_normal((3, 2, dim))
    there = rotated(target, x, signs, False, "fp64")
    assert dim == 7 or not np.allclose(there, x, atol=0.1)
    assert_close(rotated(target, there, signs, True, "fp64"), x, "fp64")
    single = rotated(target, x.astype(np.float32), signs, False, "fp32")
    assert_close(rotated(target, single, signs, True, "bf16"), x, "fp32", "bf16")


@pytest.mark.parametrize("dim", [32, 12])
def test_inner_products_stay(target, rng, dim):
    signs = some_signs(rng, dim)
    q, k = rng.standard_normal((2, 3, 2, dim))
    q_turned, k_turned = (rotated(target, x, signs, False, "fp64") for x in (q, k))
    np.testing.assert_allclose((q_turned * k_turned).sum(-1), (q * k).sum(-1), rtol=0, atol=1e-13)


def test_signs_without_a_transform(target, rng):
    """An odd head dim: words change their signs and nothing else."""
    signs = some_signs(rng, 9)
    x = naive.round_to(rng.standard_normal((2, 2, 9)), "bf16")
    for inverse in (False, True):
        got = rotated(target, x, signs, inverse, "bf16")
        assert np.array_equal(naive.words(got), naive.words(x * signs.astype(x.dtype)))


def test_large_rows_do_not_overflow(target, rng):
    """A row of near the largest float32 has a transform that fits, so the sums on the way must."""
    signs = some_signs(rng, 16)
    x = (signs * np.float32(3e38) * np.eye(16, dtype=np.float32)[3:6]).reshape(3, 1, 16)
    x[0, 0] = 8e37 * signs
    want = x.astype(np.float64) @ matrix(16, signs).T
    assert_close(rotated(target, x, signs, False, "fp32"), want, "fp32")


def test_nan_stays_in_its_block(target, rng):
    x = rng.standard_normal((2, 1, 12)).astype(np.float32)
    x[1, 0, 5] = np.nan
    seen = np.isnan(rotated(target, x, some_signs(rng, 12), False, "fp32"))
    assert np.array_equal(np.argwhere(seen), [[1, 0, 4], [1, 0, 5], [1, 0, 6], [1, 0, 7]])


@pytest.mark.boundscheck
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_strided_rows(target, to, host, rng, kind):
    """Rows that are part of a wider array, in and out; what lies between is left alone."""
    signs = some_signs(rng, 8)
    wide = naive.round_to(rng.standard_normal((6, 5, 20)), kind)
    room = rng.standard_normal((6, 5, 20)).astype(np.float32)
    cut = slice(0, 6, 2), slice(1, 4), slice(4, 12)
    x, out = to(wide), to(room)
    run(target, x[cut], kind, signs, False, out[cut], "fp32")
    after = host(out).copy()
    want = wide[cut].astype(np.float64) @ matrix(8, signs).T
    assert_close(after[cut], want, kind, "fp32")
    after[cut] = room[cut]
    assert np.array_equal(after, room)


@pytest.mark.parametrize(("kind", "dim"), [("fp32", 8), ("bf16", 12), ("fp64", 16), ("fp16", 3)])
def test_in_place(target, to, host, rng, kind, dim):
    signs = some_signs(rng, dim)
    x = naive.round_to(rng.standard_normal((3, 3, dim)), kind)
    for inverse in (False, True):
        same = to(x.copy())
        run(target, same, kind, signs, inverse, same, kind)
        elsewhere = rotated(target, x, signs, inverse, kind)
        assert np.array_equal(naive.words(host(same)), naive.words(elsewhere))


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8), (3, 2, 0)])
def test_nothing_to_rotate(target, shape):
    got = rotated(target, np.ones(shape, np.float32), np.ones(shape[2]), False, "fp32")
    assert got.shape == shape


def test_rows_do_not_depend_on_each_other(target, rng):
    """A row alone has the bits that it has among many, for more rows than run at once."""
    signs = some_signs(rng, 8)
    x = rng.standard_normal((11, 3, 8)).astype(np.float32)
    together = rotated(target, x, signs, False, "fp32")
    for t in (0, 5, 10):
        alone = rotated(target, x[t : t + 1, 1:2], signs, False, "fp32")
        assert np.array_equal(alone, together[t : t + 1, 1:2])


def test_long_rows_fit_shared_memory(target, rng):
    """On CUDA a block takes fewer rows at once where they are long."""
    dim = 6144 if target == "cpu" else 3584  # of which two do not fit 48 KiB
    signs = some_signs(rng, dim)
    x = np.zeros((3, 1, dim))
    x[np.arange(3), 0, [0, dim // 2 + 5, dim - 1]] = 1
    block = dim & -dim
    got = rotated(target, x, signs, False, "fp64")
    assert np.all(np.isin(np.count_nonzero(got, axis=-1), [block]))
    np.testing.assert_allclose(np.abs(got[got != 0]), 1 / np.sqrt(block), rtol=1e-15)
    assert_close(rotated(target, got, signs, True, "fp64"), x, "fp64")
