"""The oracle against numbers that were worked out elsewhere."""

import naive
import numpy as np
import pytest
from worked import OUT, WORKED, K, Q, V


@pytest.mark.parametrize("kv_len", OUT)
def test_attention(kv_len):
    out, _ = naive.attention([Q], [K], [V], [kv_len])
    assert np.allclose(out[0], OUT[kv_len], rtol=0, atol=1e-6)


def test_prefill_is_bottom_right_aligned():
    out, _ = naive.attention([Q, Q], [K], [V], [3], [0, 2])
    assert np.allclose(out, [OUT[2], OUT[3]], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("mode", "cos", "sin", "expected"), WORKED)
def test_norm_and_rotation(mode, cos, sin, expected):
    q, k, v = naive.write(
        np.array([[1, 2, 3, 4] * 3]), 1, 1, 4, mode, [cos], [sin], np.ones(4), np.ones(4), 0.0, 0
    )
    assert np.allclose(q[0, 0], expected, rtol=0, atol=5e-7)
    assert np.allclose(k[0, 0], expected, rtol=0, atol=5e-7)
    assert v[0, 0].tolist() == [1, 2, 3, 4]


def test_options():
    """One query, two keys with scores 1 and 3: everything by hand."""
    q, k, v = np.ones((1, 1, 1)), np.array([[[[1.0], [3.0]]]]), np.array([[[[10.0], [20.0]]]])
    e = np.exp
    for options, weights, lse in [
        ({}, [e(1), e(3)], np.log(e(1) + e(3))),
        ({"sm_scale": 0.5}, [e(0.5), e(1.5)], np.log(e(0.5) + e(1.5))),
        ({"logits_soft_cap": 2.0}, [e(2 * np.tanh(0.5)), e(2 * np.tanh(1.5))], None),
        ({"window_left": 0}, [0, 1], 3.0),
        ({"window_left": 1}, [e(1), e(3)], None),
        ({"sinks": [2.0]}, [e(1), e(3), e(2)], np.log(e(1) + e(3) + e(2))),
    ]:
        out, got = naive.attention(q, k, v, [2], **options)
        assert np.isclose(out[0, 0, 0], np.dot(weights[:2], [10, 20]) / np.sum(weights))
        if lse is not None:
            assert np.isclose(got[0, 0], lse)


def test_merged_numbers():
    """Scores 0.5, 2, -1, 3, 0 with values 1 to 5."""
    parts = [(2.2231302 / 1.2231302, 2 + np.log(1.2231302))]
    parts.append((4.3038823 / 1.0681027, 3 + np.log(1.0681027)))
    (a, lse_a), (b, lse_b) = ((np.full((1, 1, 1), o), np.full((1, 1), lse)) for o, lse in parts)
    out, lse = naive.merge_states(a, lse_a, b, lse_b)
    assert np.isclose(out[0, 0, 0], 3.3738469, rtol=1e-7)
    assert np.isclose(lse[0, 0], 4.9303207 * np.log(2), rtol=1e-7)


def test_rows_that_do_not_exist_are_skipped():
    new, cache = np.arange(1.0, 6).reshape(1, 1, 5, 1), np.zeros((1, 1, 4, 1))
    for offset, expected in [(-2, [3, 4, 5, 0]), (2, [0, 0, 1, 2]), (4, [0] * 4), (-9, [0] * 4)]:
        got = naive.plan_append(new, cache, [offset])
        assert got.ravel().tolist() == expected
