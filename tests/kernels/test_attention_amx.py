"""Attention on a matrix unit: numbers in parts, rows that lie anywhere, what unseen tokens hold, batches and threads.

Everything else that attends in bf16 and INT8 runs through the unit too, where there is one.
"""

import naive
import numpy as np
import problems
import pytest
import tolerances
from problems import Shape

import numkv

# The package has a function of the same name.
from numkv.kernels.cpu.attention.engines import use_amx
from numkv.kernels.cpu.vectors.features import has_amx

pytestmark = pytest.mark.skipif(
    not has_amx(), reason="no matrix unit here: see test_attention_amx_emulated"
)

MANY = [
    Shape(16, 1, 64, (130, 7)),
    Shape(9, 1, 64, (130,)),
    Shape(10, 1, 40, (70,), head_dim_v=24),  # rows that end within 64 bytes
    Shape(4, 2, 128, (200, 3), new=(70, 3)),
    Shape(20, 1, 96, (90,), new=(9,)),
]


def with_bits(values, bits):
    """Float32 numbers cut off to so many bits, the leading one included."""
    mask = np.uint32((0xFFFFFFFF << (24 - bits)) & 0xFFFFFFFF)
    return (values.astype(np.float32).view(np.uint32) & mask).view(np.float32)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_many_rows_run_on_the_unit(kind):
    assert use_amx(kind, kind, "float32")
    assert not use_amx(kind, kind, "float64")
    assert not use_amx(kind, "fp16", "float32")


@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_queries_lose_no_bits(rng, shape, bits):
    # Large scores: what a query loses would show in the weights.
    problem = problems.make(rng, shape, "bf16", q_kind="fp32")
    q = with_bits(4 * problem.q, bits)
    args = [problem.k, problem.v, problem.seq_lens]
    want, want_lse = naive.attention(q, *args, problem.cu_seqlens_q)
    if problem.cu_seqlens_q is None:
        out, lse = numkv.decode_attention(q, *args, return_lse=True)
    else:
        out, lse = numkv.prefill_attention(q, *args, problem.cu_seqlens_q, return_lse=True)
    tolerances.assert_rows_close(out, want, tolerances.attention("bf16", "fp32"))
    tolerances.assert_lse_close(lse, want_lse)


def test_scores_that_grow_rescale_what_is_summed(rng):
    problem = problems.make(rng, Shape(16, 1, 64, (300, 40), new=(3, 40)), "bf16", q_kind="fp32")
    tokens = np.arange(problem.k.shape[2])
    # Exact in bf16: scores of each tile are four times those of the one before.
    k = (problem.k.astype(np.float32) * 4.0 ** (tokens[:, None] // 64)).astype(problem.k.dtype)
    args = [k, problem.v, problem.seq_lens, problem.cu_seqlens_q]
    want, want_lse = naive.attention(problem.q, *args)
    out, lse = numkv.prefill_attention(problem.q, *args, return_lse=True)
    tolerances.assert_rows_close(out, want, tolerances.attention("bf16", "fp32"))
    tolerances.assert_lse_close(lse, want_lse)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_of_later_tokens_do_not_leak(rng, bad):
    tokens, at = 90, 41
    problem = problems.make(rng, Shape(4, 1, 64, (tokens,), new=(tokens,)), "bf16")
    whole = problem.run(lambda x: x)
    problem.v[0, 0, at, 5] = bad
    out = problem.run(lambda x: x)
    tolerances.assert_rows_close(out[:at], whole[:at], tolerances.attention("bf16", "fp32"))
    assert not np.isfinite(out[at:, :, 5]).any()
    assert np.isfinite(np.delete(out[at:], 5, axis=-1)).all()


def test_scores_that_grow_behind_a_tile_of_vector_code(rng):
    """A token that the last rows see has NaN: maxima of its tile are no integers, and later tiles rescale its sums."""
    tokens = 200
    problem = problems.make(rng, Shape(4, 1, 64, (tokens,), new=(tokens,)), "bf16", q_kind="fp32")
    k = problem.k.astype(np.float32) * 3.0 ** (np.arange(problem.k.shape[2])[:, None] // 64)
    args = [k.astype(problem.k.dtype), problem.v, problem.seq_lens, problem.cu_seqlens_q]
    want, want_lse = naive.attention(problem.q, *args)
    problem.v[0, 0, 41, 5] = np.nan
    out, lse = numkv.prefill_attention(problem.q, *args, return_lse=True)
    out, want = (np.delete(x, 5, axis=-1) for x in (out, want))
    tolerances.assert_rows_close(out, want, tolerances.attention("bf16", "fp32"))
    tolerances.assert_lse_close(lse, want_lse)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_results_do_not_depend_on_the_batch_or_on_threads(rng, kind):
    lens, new = np.array([300, 70, 1500, 5]), np.array([1, 20, 1, 5])
    starts = np.concatenate([[0], np.cumsum(new)])
    rows = [rng.standard_normal((4, 1, 1500, 64)) for _ in range(2)]
    if kind == "int8":
        stored = dict(
            zip("kv", [(40 * x).clip(-127, 127).astype(np.int8) for x in rows], strict=True)
        )
        stored |= {f"{x}_scale": rng.random((4, 1, 1500), np.float32) / 40 for x in "kv"}
    else:
        stored = dict(zip("kv", [naive.round_to(x, kind) for x in rows], strict=True))
    q = rng.standard_normal((starts[-1], 8, 64), np.float32)

    def run(*which):
        mine = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in which])
        cu_seqlens_q = np.concatenate([[0], np.cumsum(new[[*which]])])
        cache = {name: x[[*which]] for name, x in stored.items()}
        return mine, numkv.prefill_attention(
            q[mine], seq_lens=lens[[*which]], cu_seqlens_q=cu_seqlens_q, **cache
        )

    _, together = run(0, 1, 2, 3)
    assert np.isfinite(together).all()
    for b in range(4):
        mine, alone = run(b)
        np.testing.assert_array_equal(alone, together[mine])
    with numkv.num_threads(1):
        np.testing.assert_array_equal(run(0, 1, 2, 3)[1], together)
