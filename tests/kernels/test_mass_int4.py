"""Attention mass over INT4 keys, against softmax rows in float64 over the values of their codes."""

import naive
import numpy as np
import problems
import pytest
import tolerances
from messages import about
from problems import Shape

import numkv

F32 = np.float32


@pytest.mark.boundscheck
@pytest.mark.parametrize("options", [{}, {"window_left": 3, "logits_soft_cap": 1.5}], ids=str)
@pytest.mark.parametrize(
    "shape",
    [Shape(2, 1, 32, (5, 0, 1)), Shape(4, 2, 40, (9, 3), new=(4, 1)), Shape(4, 2, 6, (7,), new=(3,))],
    ids=str,
)  # fmt: skip
def test_as_the_softmax_says(target, to, host, rng, shape, options):
    """Groups of 32 elements, shorter ones at the end of a row, and rows that are read byte by byte on CUDA."""
    problem = problems.make(rng, shape)
    codes, scales = naive.int4_quantise(np.nan_to_num(problem.k))
    cu = problem.cu_seqlens_q
    got = numkv.attention_weights(
        to(problem.q), to(codes), to(problem.seq_lens), None if cu is None else to(cu),
        k_scale=to(scales), **options,
    )  # fmt: skip
    values = naive.int4_dequantise(codes, scales)
    starts = np.arange(len(shape.seq_lens) + 1) if cu is None else cu
    want = naive.attention_weights(problem.q, values, problem.seq_lens, starts, **options)
    tolerances.assert_weights_close(host(got), want, "int8")


@pytest.mark.parametrize("width", [8, 64])
def test_a_query_is_as_wide_as_a_row_not_as_its_words(target, to, width):
    """Rows of 16 elements have 8 words."""
    codes, scales = naive.int4_quantise(np.ones((1, 1, 4, 16), F32))
    q = np.ones((1, 2, width), F32)
    with pytest.raises(numkv.DimensionMismatch, match=about("q")):
        numkv.attention_weights(to(q), to(codes), to(np.array([4])), k_scale=to(scales))
