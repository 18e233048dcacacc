"""Attention over INT8 rows that objects hold."""

import naive
import numpy as np
import pytest
import tolerances
from kinds import attending

import numkv

F32 = np.float32


def stored_values(layer, host):
    """What a layer holds, as float64 ``(1, num_kv_heads, tokens, head_dim)``."""
    table, n = (layer.block_table[None] if layer.is_paged else [[0]]), [layer.seq_len]
    out = []
    for which, kind in (("k", layer.spec.kind), ("v", layer.spec.v_kind)):
        x = naive.gather(host(getattr(layer, which)), table, n)
        if kind.has_scales:
            x = naive.int8_dequantise(
                x, naive.gather(host(getattr(layer, f"{which}_scale")), table, n)
            )
        out.append(x)
    return out


APART = [("int8", "int8"), ("int8", "fp16"), ("int8", "bf16"), ("fp32", "int8")]


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize(("k_kind", "v_kind"), attending(APART, "kv"))
def test_k_and_v_kinds_apart(target, to, host, rng, layout, k_kind, v_kind):
    kinds = k_kind, v_kind
    args = {"k_kind": k_kind, "v_kind": v_kind, "target": target}
    layer = numkv.ContiguousLayer(20, 2, 8, **args)
    if layout == "paged":
        layer = numkv.PagedLayer(7, 3, 2, 8, **args)
    assert (layer.spec.kind.name, layer.spec.v_kind.name) == kinds
    assert "/".join(dict.fromkeys(kinds)) in repr(layer)
    rows = [rng.standard_normal((17, 2, 8), F32) for _ in "kv"]
    layer.append(*map(to, rows))
    q = rng.standard_normal((3, 4, 8), F32)
    options = {"window_left": 9, "logits_soft_cap": 3.0}
    out, lse = layer.decode_attention(to(q), return_lse=True, **options)
    want, want_lse = naive.attention(q, *stored_values(layer, host), [17], [0, 3], **options)
    tolerances.assert_rows_close(host(out), want, tolerances.attention("int8", "fp32"))
    tolerances.assert_lse_close(host(lse), want_lse, tolerances.INTEGERS)


@pytest.mark.parametrize(
    "q_kind",
    [pytest.param(k, marks=pytest.mark.nightly if k == "fp64" else []) for k in naive.DTYPES],
)
def test_a_cache_attends(target, to, host, rng, q_kind):
    cache = numkv.KVCache(1, 2, 8, head_dim_v=5, kind="int8", target=target)
    k, v = rng.standard_normal((9, 2, 8), F32), rng.standard_normal((9, 2, 5), F32)
    cache.append(0, to(k), to(v))
    q = naive.round_to(rng.standard_normal((2, 4, 8)), q_kind)
    values = [naive.int8_dequantise(*naive.int8_quantise(x)).swapaxes(0, 1)[None] for x in (k, v)]
    want, _ = naive.attention(q, *values, [9], [0, 2])
    out = host(cache.decode_attention(0, to(q)))
    tolerances.assert_rows_close(out, want, tolerances.attention("int8", q_kind))


@pytest.mark.parametrize(("size", "bound"), [(1e-30, 5e-4), (65504.0, 5e-4)])
def test_attention_over_rows_of_extreme_size(target, to, host, rng, size, bound):
    layer = numkv.ContiguousLayer(9, 1, 8, kind="int8", target=target)
    k, v = (rng.uniform(-size, size, (9, 1, 8)).astype(F32) for _ in "kv")
    layer.append(to(k), to(v))
    q = rng.standard_normal((1, 1, 8), F32)
    options = {"sm_scale": 1 / size}
    want, _ = naive.attention(q, *stored_values(layer, host), [9], **options)
    tolerances.assert_rows_close(host(layer.decode_attention(to(q), **options)), want, bound)


def relative_error(rng, kind, tokens, queries=48, heads=4, dim=128):
    """L2 error of all outputs over exact rows, relative."""
    k, v = (rng.standard_normal((tokens, heads, dim), F32) for _ in "kv")
    q = rng.standard_normal((queries, 4 * heads, dim), F32)
    layer = numkv.PagedLayer(-(-tokens // 16), 16, heads, dim, kind=kind)
    layer.append(k, v)
    exact = (x.swapaxes(0, 1)[None] for x in (k, v))
    want, _ = naive.attention(q, *exact, [tokens], [0, queries])
    return np.linalg.norm(layer.decode_attention(q) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("tokens", [200, 1000])
def test_accuracy_on_gaussian_data(rng, tokens):
    """0.92% is what the format gives."""
    assert 0.008 < relative_error(rng, "int8", tokens) <= 0.0095
    assert relative_error(rng, "fp16", tokens) < 0.0005
