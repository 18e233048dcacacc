"""The errors: who derives from whom, what they carry, and that they are raised before a change."""

import pickle

import numpy as np
import pytest
from walked import each

import numkv
from numkv import errors

TABLE = {
    "DimensionMismatch": (numkv.NumkvError, ValueError),
    "NonFiniteInput": (numkv.NumkvError, ValueError),
    "UnsupportedDType": (numkv.NumkvError, TypeError),
    "CacheFull": (numkv.NumkvError,),
    "NotSupported": (numkv.NumkvError,),
    "NumkvError": (Exception,),
}


@each("name", TABLE)
def test_bases(name):
    cls = getattr(errors, name)
    assert cls.__bases__ == TABLE[name]
    assert getattr(numkv, name) is cls


def test_nothing_else_is_exported():
    assert sorted(errors.__all__) == sorted(TABLE)


def test_what_they_carry():
    mismatch = errors.DimensionMismatch("k: expected 3, got 4", (3,), (4,))
    assert (mismatch.expected, mismatch.actual) == ((3,), (4,))
    assert str(mismatch) == "k: expected 3, got 4"
    assert errors.NonFiniteInput("k", 7).index == 7


@pytest.mark.parametrize(
    "error",
    [errors.DimensionMismatch("a", (1, 2), (3,)), errors.NonFiniteInput("b", 4)],
    ids=["DimensionMismatch", "NonFiniteInput"],
)
def test_they_survive_a_process_boundary(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_mismatch_carries_the_shapes():
    cache = numkv.KVCache(1, 2, 4)
    rows = np.ones((2, 4), np.float32)
    with pytest.raises(numkv.DimensionMismatch) as caught:
        cache.append(0, rows, np.ones((2, 5), np.float32))
    assert caught.value.actual is not None
    assert caught.value.expected is not None
    assert str(caught.value).startswith("`v`: expected")
    assert len(cache.k(0)) == 0


def test_missing_target():
    with pytest.raises((numkv.NotSupported, ValueError), match="target"):
        numkv.KVCache(1, 2, 4, target="tpu")
