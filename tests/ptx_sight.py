"""Cases of attention with masks, ranges and biases for the interpreter of PTX; see `ptx_cases`."""

import naive
import numpy as np
import tolerances
from problems import Shape, make
from ptx_writes import host, to

import numkv

__all__ = ["sight", "sight_cases"]


def sight(rng, shape, kind, **given):
    """A call with what `given` says, True for arrays that are drawn here, against the oracle."""
    problem = make(rng, shape, "fp32" if kind in naive.CODES else kind)
    rows = [problem.k, problem.v]
    values, scales = [x.astype(np.float64) for x in rows], {}
    if kind in naive.CODES:
        codes = [naive.quantise(rng.standard_normal(x.shape), kind) for x in rows]
        rows, values = [c[0] for c in codes], [naive.dequantise(*c) for c in codes]
        scales = {"k_scale": to(codes[0][1]), "v_scale": to(codes[1][1])}
    q, lens = rng.standard_normal(problem.q.shape).astype(np.float32), np.array(shape.seq_lens)
    starts = np.concatenate([[0], np.cumsum(shape.new)])
    oracle, options = {}, {}
    for name, value in given.items():
        oracle[name] = options[name] = value
    if given.get("ranges"):
        spans = np.sort(rng.integers(-5, max(lens) + 5, (len(q), 2)), axis=1)
        oracle["ranges"], options["ranges"] = spans, to(spans)
    if oracle.pop("alibi_slopes", False):
        slopes = (2.0 ** -np.arange(1.0, 1 + q.shape[1])).astype(np.float32)
        oracle["slopes"], options["alibi_slopes"] = slopes, to(slopes)
    if oracle.pop("mask", False):
        parents = np.concatenate([[rng.integers(-1, i) for i in range(n)] for n in shape.new])
        oracle["parents"] = parents.astype(int)
        words = -(-max(shape.new) // 32)
        options["mask"] = to(naive.packed_bits(oracle["parents"], starts, words))
    arrays = [to(x) for x in (q, *rows, lens, starts)]
    out, lse = numkv.prefill_attention(*arrays, return_lse=True, **scales, **options)
    want, want_lse = naive.attention_to_seen(q, *values, lens, starts, **oracle)
    bound = tolerances.attention(kind, "fp32")
    tolerances.assert_rows_close(host(out), want, 2 * bound)
    tolerances.assert_lse_close(host(lse), want_lse, max(2 * bound, tolerances.LSE))


def sight_cases(case):
    """Put cases among the others."""
    shape = Shape(4, 2, 64, (90, 70), new=(5, 40))
    case(sight, shape, "fp32", mask=True, alibi_slopes=True, everyday=True)
    case(sight, shape, "int8", mask=True, window_left=3)
    case(sight, Shape(4, 2, 64, (700, 3), new=(3, 1)), "fp32", ranges=True, alibi_slopes=True)
    case(sight, shape, "fp32", causal=False)
