"""What queries see, written as attention takes it: a small part of a call."""

import numpy as np
import pytest

import numkv


@pytest.mark.parametrize(("num_seqs", "tokens"), [(1, 64), (64, 16)])
def test_fill_mask(measure, target, to, num_seqs, tokens):
    parents = np.arange(-1, tokens - 1) // 2
    starts = np.arange(num_seqs + 1) * tokens
    bits = numkv.tree_mask(np.tile(parents, num_seqs), starts)
    lens = np.full(num_seqs, 4096)
    rows = to(np.empty((num_seqs * tokens, 4 + bits.shape[1]), np.int64))
    given = [to(x) for x in (lens, starts, np.empty((0, 2), np.int64), bits)]
    none = to(np.empty(0, np.float32))
    measure(
        lambda: target.ops.fill_mask(*given, 1, -1, 0, 8192, none, none, rows, none), rows.nbytes, "copy"
    )  # fmt: skip
