"""The fused write of projections: split, norm, RoPE, write."""

import numpy as np
import pytest

import numkv
from perf import traffic


@pytest.mark.parametrize("tokens", [1, 2048])
@pytest.mark.parametrize(
    "kind", ["fp32", "fp16", "bf16", "fp8_e4m3", "int8", "int4", "code4", "code6"]
)
def test_write(measure, target, to, rng, kind, tokens):
    q_heads, kv_heads, dim = 32, 8, 128
    layer = numkv.ContiguousLayer(4096, kv_heads, dim, kind=kind, target=target.name)
    qkv = rng.standard_normal((tokens, (q_heads + 2 * kv_heads) * dim), np.float32)
    angles = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    ones = np.ones(dim, np.float32)
    options = {
        "num_q_heads": q_heads, "cos": to(cos), "sin": to(sin), "qk_mode": numkv.QKMode.NORM_HALF_SPLIT,
        "q_norm_weight": to(ones), "k_norm_weight": to(ones),
    }  # fmt: skip

    given = to(qkv)
    q = layer.write(given, **options)
    x = qkv[-1, -2 * kv_heads * dim :][:dim].astype(np.float64)  # k head 0 of the last token
    x /= np.sqrt(np.mean(x * x) + 1e-6)
    c, s = np.cos(angles[tokens - 1]), np.sin(angles[tokens - 1])
    low, high = x[: dim // 2], x[dim // 2 :]
    expected = np.concatenate([low * c - high * s, high * c + low * s])
    if numkv.kind(kind).is_packed:  # the codes are those of rows that `append` gets
        ready = numkv.ContiguousLayer(1, 1, dim, kind=kind, target=target.name)
        ready.append(*[to(expected[None, None].astype(np.float32))] * 2)
        codes, others = (target.to_host(x.k)[0, 0] for x in (layer, ready))
        assert np.mean(codes[tokens - 1] == others[0]) > 0.95  # but where rounding decides
    else:
        scale = target.to_host(layer.k_scale)[0, 0, tokens - 1] if kind == "int8" else 1
        stored = target.to_host(layer.k)[0, 0, tokens - 1].astype(np.float64) * scale
        relative = 0.07 if kind == "fp8_e4m3" else 1e-5  # three bits of mantissa
        assert np.allclose(stored, expected, rtol=relative, atol=0.03)

    def run():
        layer.seq_len = 0
        layer.write(given, q_out=q, **options)

    measure(run, traffic.write(tokens, q_heads, kv_heads, dim, kind, 4), "copy")
