"""Calls of CUDA kernels over latents, each compared with the float64 oracle; for the interpreter of PTX."""

import naive
import numpy as np
import tolerances
from ptx_writes import F32, host, to

import numkv


def _stored(layer, kind, n):
    """What a contiguous layer holds, in float64."""
    words = host(layer.k)[0, 0, :n]
    if kind not in naive.CODES:
        return words.view(naive.DTYPES[kind]).astype(np.float64)
    scale = host(layer.k_scale)[0, 0, :n]
    return naive.dequantise(words, scale)


def write_and_attend(rng, source, kind, q_kind, width, rotary, heads, tokens=(5, 2), queries=1):
    """Rows in one pass, in two calls; then absorbed queries over them."""
    dim, total = width + rotary, sum(tokens)
    layer = numkv.ContiguousLayer(
        total + 3, 1, dim, head_dim_v=width, kind=kind, v_kind="latent", target="cuda"
    )
    x = naive.round_to(rng.standard_normal((total, 1, dim)), source)
    weight = (1 + 0.1 * rng.standard_normal(width)).astype(F32)
    cos, sin = naive.rope_tables(total, rotary)
    first = 0
    for n in tokens:
        layer.write_latents(
            to(x[first : first + n]), qk_mode=4, cos=to(cos), sin=to(sin), norm_weight=to(weight)
        )
        first += n
    got, want = (
        _stored(layer, kind, total),
        naive.latent_rows(x, width, 4, cos, sin, weight, 1e-6, range(total))[:, 0],
    )
    if kind in naive.CODES:
        scale = host(layer.k_scale)[0, 0, :total].astype(np.float64).max()
        assert np.abs(got - want).max() <= scale * (0.51 if kind == "int8" else 0.77)
    else:
        tolerances.assert_rotated_close(got, want, kind)
    q = naive.round_to(rng.standard_normal((queries, heads, dim)), q_kind)
    out, lse = (host(y) for y in layer.decode_attention(to(q), sm_scale=0.07, return_lse=True))
    expected, expected_lse = naive.latent_attention(q, got, width, 0.07)
    tolerances.assert_rows_close(out, expected, tolerances.attention(kind, q_kind))
    tolerances.assert_lse_close(lse, expected_lse, 2e-3 if kind in naive.CODES else tolerances.LSE)


def write_bad(rng, kind, width=32, rotary=8):
    """A row with NaN is stored as zeros and told of later; its neighbours are right."""
    dim = width + rotary
    layer = numkv.PagedLayer(
        4, 4, 1, dim, head_dim_v=width, kind=kind, v_kind="latent", target="cuda"
    )
    x = rng.standard_normal((5, 1, dim)).astype(F32)
    x[3, 0, 37] = np.nan
    layer.write_latents(to(x), qk_mode=0)
    try:
        layer.check()
    except numkv.NonFiniteInput as error:
        assert error.index == (3, 0, 37)  # noqa: PT017
    else:
        raise AssertionError("nothing was told")
    layer.truncate(3)
    q = rng.standard_normal((1, 2, dim)).astype(F32)
    out = host(layer.decode_attention(to(q), sm_scale=0.1))
    rows = naive.dequantise(*naive.quantise(x[:3, 0], kind))
    want, _ = naive.latent_attention(q, rows, width, 0.1)
    tolerances.assert_rows_close(out, want, tolerances.attention(kind, "fp32"))


def add_cases(case):
    """All of them; `case` takes a function and its arguments."""
    case(write_and_attend, "fp32", "int8", "fp32", 32, 8, 3)
    case(write_and_attend, "bf16", "bf16", "bf16", 512, 64, 16)
    case(write_and_attend, "fp32", "int8", "fp32", 512, 64, 9, queries=2)
    case(write_and_attend, "bf16", "int4", "bf16", 64, 32, 5)
    case(write_and_attend, "fp64", "fp64", "fp64", 24, 6, 2, tokens=(1, 9))
    # So many rows that blocks take several times what they take at once.
    for kind in ("int8", "bf16"):
        case(write_and_attend, "fp32", kind, "fp32", 64, 32, 3, tokens=(40, 2))
    case(write_bad, "int8", everyday=True)
    case(write_bad, "int4")
