"""What `docs/reliability.md` says of queries in bf16 over K and V in bf16, where numbers leave float32.

Engines differ, and machines: denormal numbers count as what they are or as 0, and a sum that only its scale would bring
back is right or NaN. Nothing else may happen, and nothing of it to another row.
"""

import naive
import numpy as np
import pytest
import tolerances

import numkv

TOKENS, GROUP, DIM = 70, 4, 16
TINY, HUGE = 1e-39, 1e20  # denormal; its square is beyond float32


def attend(to, host, q, k, v, scale):
    n = len(q)
    lens, starts = np.array([TOKENS], np.int32), np.array([0, n], np.int32)
    arrays = [to(naive.round_to(x, "bf16")) for x in (q, k, v)]
    found = numkv.prefill_attention(
        *arrays, to(lens), to(starts), sm_scale=scale, return_lse=True
    )  # fmt: skip
    out, lse = (host(x) for x in found)
    want, want_lse = naive.attention(
        *(naive.round_to(x, "bf16").astype(np.float64) for x in (q, k, v)), lens, starts, sm_scale=scale
    )  # fmt: skip
    return out.astype(np.float64), lse, want, want_lse


def some(rng, n):
    """Queries, K and V."""
    return [
        rng.standard_normal(shape)
        for shape in ((n, GROUP, DIM), (1, 1, TOKENS, DIM), (1, 1, TOKENS, DIM))
    ]


#: Few query rows, and more than engines take as few; on CUDA one way takes all.
rows = pytest.mark.parametrize(
    ("target", "n"),
    [("cpu", 1), ("cpu", 5), ("cpu", 40), ("cuda", 1), ("cuda", 5)],
    indirect=["target"],
)


@rows
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_denormal_numbers_count_as_they_are_or_as_nothing(target, to, host, rng, n, which):
    """They meet numbers that are as large as they are small, so that they would be seen."""
    q, k, v = some(rng, n)
    if which == "q":
        q, k = q * TINY, k / TINY * 0.01
    elif which == "k":
        q, k = q / TINY * 0.01, k * TINY
    else:
        v[..., ::2] *= TINY
    out, _, want, _ = attend(to, host, q, k, v, 1.0)
    gone = [np.where(np.abs(x) < 1.2e-38, 0, x) for x in (q, k, v)]
    _, _, without, _ = attend(to, host, *gone, 1.0)
    assert np.isfinite(out).all()
    bound = tolerances.attention("bf16", "bf16")
    errors = [tolerances.row_errors(out, x) for x in (want, without)]
    # Some of those close to 1.2e-38 are denormal in one rounding alone: so the bound is a wide one.
    assert (np.minimum(*errors) <= 2 * bound).all()


@rows
def test_a_sum_beyond_float32_is_right_or_nan_and_its_own_rows(target, to, host, rng, n):
    q, k, v = some(rng, n)
    q[-1, 2] *= HUGE
    k *= HUGE
    out, lse, want, want_lse = attend(to, host, q, k, v, 1e-20)
    odd = np.isnan(out).any(axis=2)
    assert not odd.reshape(-1)[np.arange(odd.size) != odd.size - 2].any()  # q[-1, 2] alone
    assert np.array_equal(odd, np.isnan(lse) | np.isinf(lse))
    bound = tolerances.attention("bf16", "bf16")
    tolerances.assert_rows_close(out[~odd], want[~odd], bound)
    tolerances.assert_lse_close(lse[~odd], want_lse[~odd])
