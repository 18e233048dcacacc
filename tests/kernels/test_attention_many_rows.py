"""Attention of many query rows on the CPU: panels and what is left of them, unseen tokens, batches and threads."""

import dataclasses

import naive
import numpy as np
import problems
import pytest
import tolerances
from problems import Shape

import numkv

# The package has a function of the same name.
from numkv.kernels.cpu.attention.engines import by_panels, panels_from, query_rows
from numkv.kernels.cpu.attention.records import PAIRS
from numkv.kernels.cpu.vectors.features import HAS_BF16_PAIRS, has_amx

MANY = [
    Shape(4, 2, 64, (200, 40), new=(150, 40)),  # several items, and rows that end within a panel
    Shape(33, 1, 16, (70,)),  # one row more than a panel, of one token
    # Tokens that lie in two panels, short vectors.
    Shape(7, 1, 40, (130,), new=(90,), head_dim_v=24),
    Shape(3, 1, 128, (300,), new=(13,)),  # seen alike by all but for the last tiles
    Shape(5, 1, 24, (140,), new=(3,)),  # rows that fill a vector, or nearly
    Shape(10, 2, 16, (140,), new=(4,)),  # a vector and a few rows more
]
OPTIONS = [{}, {"window_left": 20}, {"logits_soft_cap": 3.0}]


def host(x):
    return x


def test_floats_are_taken_by_panels():
    assert by_panels("fp32", "fp16", "float32")
    assert by_panels("bf16", "bf16", "float32") != has_amx()
    assert not by_panels("fp32", "fp32", "float64")
    assert not by_panels("int8", "fp32", "float32")
    # Less than a panel is worth it where rows have to be widened.
    assert panels_from("bf16", "fp8_e4m3", "float32") <= 16 < panels_from("fp16", "fp32", "float32")
    assert 16 < panels_from("bf16", "bf16", PAIRS) <= 32
    # A power of 2, and a divisor of what docs/reliability.md calls whole on every machine.
    assert 512 % query_rows("fp32", "fp32", "float32") == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", MANY, ids=str)
@pytest.mark.parametrize(
    ("kind", "q_kind"), [("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
)
def test_many_rows(rng, kind, q_kind, shape, options):
    problems.make(rng, shape, kind, q_kind=q_kind).check(host, host, **options)


@pytest.mark.parametrize("dim", [33, 80])
def test_pairs_of_bf16_where_rows_end_within_a_vector(rng, dim):
    problems.make(rng, Shape(6, 2, dim, (150,), new=(50,)), "bf16", q_kind="bf16").check(host, host)


def test_queries_in_bf16_are_multiplied_as_they_are(rng):
    """They give what they give as float32, but for rounding; the scale is not one of 2's powers."""
    problem = problems.make(rng, Shape(4, 2, 64, (150,), new=(90,)), "bf16", q_kind="bf16")
    out, lse = problem.run(host, sm_scale=0.3, return_lse=True)
    wider = dataclasses.replace(problem, q=problem.q.astype(np.float32))
    wide, wide_lse = wider.run(host, sm_scale=0.3, return_lse=True)
    np.testing.assert_allclose(lse, wide_lse, rtol=2e-6, atol=2e-6)
    tolerances.assert_rows_close(out, wide, tolerances.attention("bf16", "bf16"))
    assert (lse != wide_lse).any() or not HAS_BF16_PAIRS or has_amx()


@pytest.mark.parametrize("scale", [0.0, -0.25])
def test_odd_scales(rng, scale):
    problems.make(rng, Shape(4, 2, 64, (150,), new=(50,)), "bf16", q_kind="bf16").check(
        host, host, sm_scale=scale
    )


def test_scores_that_grow_rescale_what_is_summed(rng):
    problem = problems.make(rng, Shape(16, 1, 64, (300, 40), new=(3, 40)), "bf16", q_kind="fp32")
    tokens = np.arange(problem.k.shape[2])
    # Powers of 2 are exact: scores of each tile are four times those of the one before.
    grown = problem.k.astype(np.float32) * 4.0 ** (tokens[:, None] // 64)
    problem.k[:] = grown.astype(problem.k.dtype)
    problem.check(host, host)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_tokens_that_are_not_seen_do_not_leak(rng, kind, which, bad):
    tokens, at = 150, 97
    problem = problems.make(rng, Shape(4, 1, 64, (tokens,), new=(tokens,)), kind)
    options = {"window_left": 30}
    whole = problem.run(host, **options)
    sees = (np.arange(tokens) >= at) & (np.arange(tokens) <= at + 30)
    getattr(problem, which)[0, 0, at, 5] = bad
    out = problem.run(host, **options)
    bound = tolerances.attention(kind, kind)
    tolerances.assert_rows_close(out[~sees], whole[~sees], bound)
    if which == "v":
        assert not np.isfinite(out[sees][:, :, 5]).any()
        assert np.isfinite(np.delete(out[sees], 5, axis=-1)).all()


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_queries_that_are_not_finite_stay_alone(rng, kind):
    problem = problems.make(rng, Shape(4, 1, 64, (150,), new=(150,)), kind)
    whole = problem.run(host)
    problem.q[70, 2, 3] = np.nan
    out = problem.run(host)
    assert np.isnan(out[70, 2]).all()
    out[70, 2] = whole[70, 2]
    np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize("q_kind", ["fp32", "bf16"])
def test_results_do_not_depend_on_the_batch_or_on_threads(rng, q_kind):
    lens, new = np.array([300, 170, 1500, 90]), np.array([100, 20, 70, 9])
    starts = np.concatenate([[0], np.cumsum(new)])
    k, v = (naive.round_to(rng.standard_normal((4, 1, 1500, 64)), "bf16") for _ in range(2))
    q = naive.round_to(rng.standard_normal((starts[-1], 8, 64), np.float32), q_kind)

    def run(*which):
        mine = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in which])
        cu_seqlens_q = np.concatenate([[0], np.cumsum(new[[*which]])])
        rows = [np.ascontiguousarray(x[[*which]]) for x in (k, v)]
        return mine, numkv.prefill_attention(q[mine], *rows, lens[[*which]], cu_seqlens_q)

    _, together = run(0, 1, 2, 3)
    assert np.isfinite(together).all()
    for b in range(4):
        mine, alone = run(b)
        np.testing.assert_array_equal(alone, together[mine])
    with numkv.num_threads(1):
        np.testing.assert_array_equal(run(0, 1, 2, 3)[1], together)
