"""Words and typed views of floats that kernels do not see as such, and what other libraries hand over."""

import numpy as np
import pytest

from numkv import targets
from numkv.kinds import kinds
from numkv.targets.base import WORD_OF

FLOATS = [k for k in kinds() if k.is_float]


@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_words_and_back(target, to, host, kind):
    here = targets.get(target)
    rows = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4).astype(kind.dtype)
    words = here.words(to(rows))
    assert words.dtype == kind.word
    typed = here.typed(words, kind.dtype)
    assert typed.dtype == kind.dtype
    assert host(typed).tobytes() == host(words).tobytes() == rows.tobytes()
    words[1, 2] = words[0, 3]  # they are views, not copies
    assert host(typed)[1, 2] == rows[0, 3]


@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_zeros(target, host, kind):
    zeros = host(targets.get(target).zeros((3, 5), kind.dtype))
    assert zeros.dtype == kind.dtype
    assert zeros.shape == (3, 5)
    assert not zeros.view(kind.word).any()


def test_small_floats_have_words_of_their_width():
    assert {dtype.itemsize for dtype in WORD_OF} == {1, 2}
    assert all(
        word.kind == "u" and word.itemsize == dtype.itemsize for dtype, word in WORD_OF.items()
    )


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_torch_tensors_of_small_floats(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = torch.linspace(-3, 3, 8).to(getattr(torch, name))
    taken = targets.get("cpu").accept(rows, "rows")
    assert str(taken.dtype) == name
    assert np.array_equal(taken.astype(np.float32), rows.to(torch.float32).numpy())
    taken[0] = 1  # no copy
    assert rows[0].to(torch.float32) == 1


def test_a_typestr_that_numpy_does_not_know():
    """Such an interface is not read: the dtype behind it is not said, or would be refused by NumPy."""
    from numkv.targets.cuda import _names_a_dtype

    for k in FLOATS:
        assert _names_a_dtype(k.dtype.str) == (k.name not in ("bf16", "fp8_e4m3", "fp8_e5m2"))
