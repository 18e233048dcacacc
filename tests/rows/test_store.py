"""`numkv.rows.store`: a row of every kind into words and out of them."""

import naive
import numpy as np
import operands
import pytest

from numkv.rows.int4 import store_int4
from numkv.rows.store import row_load, row_store

F32 = np.float32


@pytest.mark.parametrize("dim", [2, 34, 64])
@pytest.mark.parametrize("kind", [*naive.DTYPES, *naive.CODES])
def test_there_and_back(run, rng, kind, dim):
    x = rng.standard_normal(dim).astype(F32)
    (want,), scales = operands.stored(x[None], kind)
    words = np.zeros_like(want)
    store_row, store = row_store(kind)
    load_row, load = row_load(kind)
    if kind == "int4":
        scale = np.zeros_like(scales[0])
        run(store_int4)(x, words, scale)
        assert np.array_equal(scale, scales[0])
        values = naive.int4_dequantise(words, scale.view(naive.DTYPES["bf16"]))
    else:
        compiled = run is not None and hasattr(run(store_row), "py_func")
        scale = run(store_row)(x, words, run(store) if compiled else store)
        assert scale == (scales[0] if kind == "int8" else 0)
        values = naive.int8_dequantise(words, scale) if kind == "int8" else naive.round_to(x, kind)
    operands.assert_same(words, want)
    out = np.full(dim, np.nan, F32)
    compiled = hasattr(run(load_row), "py_func")
    run(load_row)(words, scale, out, run(load) if compiled else load)
    assert np.array_equal(out, np.asarray(values).astype(F32))
