"""`Rotation`: signs that are the same for ever, and rows of every dtype there and back on a target."""

import pickle

import naive
import numpy as np
import pytest
import tolerances
from messages import about

import numkv
from numkv import targets
from numkv.storage.hadamard import Rotation


def test_signs_are_pinned():
    """A file holds the seed, not the signs: these must never change."""
    word = "".join("+-"[int(s < 0)] for s in Rotation(70).signs)
    assert word == "-----+-++-+++++-+-++++---++--+------++----+-+-------++++--+++-+--++++-"
    assert "".join("+-"[int(s < 0)] for s in Rotation(16, seed=5).signs) == "+++-+-+--+-++---"


def test_signs():
    signs = Rotation(4096).signs
    assert signs.dtype == np.float32
    assert np.array_equal(np.abs(signs), np.ones(4096))
    assert abs(signs.sum()) < 4 * np.sqrt(4096)
    assert not np.array_equal(signs, Rotation(4096, seed=1).signs)
    with pytest.raises(ValueError, match="read-only"):
        signs[0] = 1


def test_equal_rotations():
    rotation = Rotation(np.int64(96), 3)
    assert rotation == Rotation(96, seed=3)
    assert len({rotation, Rotation(96, 3), Rotation(96, 4), Rotation(48, 3)}) == 3
    again = pickle.loads(pickle.dumps(rotation))
    assert again == rotation
    assert np.array_equal(again.signs, rotation.signs)
    assert repr(rotation) == "Rotation(head_dim=96, seed=3)"


@pytest.mark.parametrize("kind", naive.DTYPES)
def test_there_and_back(target, to, host, rng, kind):
    where, rotation = targets.get(target), Rotation(8, seed=2)
    x = naive.round_to(rng.standard_normal((5, 3, 8)), kind)
    turned = rotation.forward(where, to(x))
    wide = np.float64 if kind == "fp64" else np.float32
    assert turned.dtype == wide
    want = x.astype(np.float64) @ naive.rotation(rotation.signs).T
    bound = 1e-15 if kind == "fp64" else 6e-7
    tolerances.assert_rows_close(host(turned), want, bound)
    back = rotation.backward(where, turned, x.dtype)
    assert back.dtype == x.dtype
    tolerances.assert_rows_close(host(back), x, 2 * bound + tolerances.ROUNDING[kind])
    if kind in ("fp16", "bf16"):  # float32 has digits to spare
        assert np.array_equal(host(back), x)


def test_forward_in_another_dtype(target, to, host, rng):
    """Rows of a narrower dtype lose nothing; those of a wider one are rounded once."""
    where, rotation = targets.get(target), Rotation(8)
    x = rng.standard_normal((3, 2, 8))
    for source, dtype in (
        (np.float32, np.float64),
        (np.float64, np.float32),
        (np.float16, np.float64),
    ):
        got = rotation.forward(where, to(x.astype(source)), dtype)
        assert got.dtype == dtype
        want = x.astype(source).astype(np.float64) @ naive.rotation(rotation.signs).T
        tolerances.assert_rows_close(host(got), want, 1e-15 if dtype == np.float64 else 6e-8)
    with pytest.raises(numkv.UnsupportedDType, match=about("dtype")):
        rotation.forward(where, to(x), np.int8)


def test_back_into_an_array(target, to, host, rng):
    where, rotation = targets.get(target), Rotation(8)
    turned = to(rng.standard_normal((2, 2, 8)).astype(np.float32))
    want = host(rotation.backward(where, turned, np.float32)).copy()
    room = to(np.zeros((2, 4, 8), np.float16))
    out = room[:, 1:3]
    assert rotation.backward(where, turned, np.float16, out) is out
    assert np.array_equal(host(room)[:, 1:3], want.astype(np.float16))
    assert not host(room)[:, [0, 3]].any()
    assert rotation.backward(where, turned, np.float32, turned) is turned
    assert np.array_equal(host(turned), want)


def test_attention_does_not_notice(target, to, host, rng):
    """Over rotated keys and values, with rotated queries, the output turns back to the plain one."""
    where, of_k, of_v = targets.get(target), Rotation(8, 1), Rotation(6, 2)
    q, k = rng.standard_normal((2, 5, 2, 8))
    v = rng.standard_normal((5, 2, 6))

    def attend(q, k, v):
        weights = np.exp(np.einsum("thd,shd->hts", q, k) / np.sqrt(8))
        return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)

    q_turned, k_turned = (host(of_k.forward(where, to(x))) for x in (q, k))
    turned = attend(q_turned, k_turned, host(of_v.forward(where, to(v))))
    got = host(of_v.backward(where, to(turned), np.float64))
    np.testing.assert_allclose(got, attend(q, k, v), rtol=0, atol=1e-13)


def test_no_rows(target, to):
    where = targets.get(target)
    x = to(np.zeros((0, 2, 8), np.float16))
    turned = Rotation(8).forward(where, x)
    assert (turned.shape, turned.dtype) == ((0, 2, 8), np.float32)
    assert Rotation(8).backward(where, turned, np.float16).shape == (0, 2, 8)


@pytest.mark.parametrize("arguments", [(0,), (-8,), (8, -1)])
def test_bad_numbers(arguments):
    with pytest.raises(numkv.DimensionMismatch, match=about("head_dim|seed")):
        Rotation(*arguments)


@pytest.mark.parametrize("arguments", [(8.0,), ("8",), (8, None)])
def test_no_integers(arguments):
    with pytest.raises(TypeError, match=about("head_dim|seed")):
        Rotation(*arguments)


BAD_ROWS = [
    (np.ones((2, 2, 7), np.float32), numkv.DimensionMismatch),
    (np.ones((2, 8), np.float32), numkv.DimensionMismatch),
    (np.ones((2, 2, 8), np.int8), numkv.UnsupportedDType),
]


@pytest.mark.parametrize(("rows", "error"), BAD_ROWS)
def test_bad_rows(target, to, rows, error):
    where = targets.get(target)
    with pytest.raises(error, match=about("rows")):
        Rotation(8).forward(where, to(rows))
    with pytest.raises(error, match=about("rows")):
        Rotation(8).backward(where, to(rows), np.float32)


def test_bad_outputs(target, to, host):
    where, turned = targets.get(target), to(np.ones((2, 2, 8), np.float32))
    for out in (np.zeros((2, 2, 8), np.float32), np.zeros((2, 1, 8), np.float16)):
        out = to(out)
        with pytest.raises(numkv.NumkvError, match=about("out")):
            Rotation(8).backward(where, turned, np.float16, out)
        assert not host(out).any()
    with pytest.raises(numkv.UnsupportedDType, match=about("dtype")):
        Rotation(8).backward(where, turned, np.int8)
    if target == "cpu":
        fixed = np.zeros((2, 2, 8), np.float32)
        fixed.setflags(write=False)
        with pytest.raises(numkv.NotSupported, match="read-only"):
            Rotation(8).backward(where, turned, np.float32, fixed)


@pytest.mark.parametrize("head_dim", [1, 63, 64, 65, 130, 200])
def test_every_element_has_a_sign(head_dim):
    """Of dims that are no multiple of a word's bits too; the first ones do not depend on how many there are."""
    signs = Rotation(head_dim).signs
    assert signs.shape == (head_dim,)
    assert set(signs.tolist()) <= {-1.0, 1.0}
    assert np.array_equal(signs, Rotation(256).signs[:head_dim])
