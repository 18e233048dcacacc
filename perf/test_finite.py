"""The look for NaN and infinity: rows are read once."""

import numpy as np
import pytest

import numkv


@pytest.mark.parametrize("tokens", [1, 8192])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_first_non_finite(measure, target, to, rng, kind, tokens):
    rows = rng.standard_normal((tokens, 8, 128), np.float32).astype(numkv.kind(kind).dtype)
    given = target.words(to(rows))
    assert target.ops.first_non_finite(given, kind) == -1
    bad = rows.copy()
    bad[-1, 3, 5] = np.nan
    assert target.ops.first_non_finite(target.words(to(bad)), kind) == rows.size - 5 * 128 + 5
    measure(lambda: target.ops.first_non_finite(given, kind), rows.nbytes, "read")
