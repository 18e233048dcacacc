"""The fused write into INT4 pools."""

import naive
import numpy as np
import pytest

import numkv

F32, BF16 = np.float32, naive.DTYPES["bf16"]


@pytest.mark.parametrize(
    "kinds",
    [
        ("int4", "int4"),
        *(pytest.param(x, marks=pytest.mark.nightly) for x in (("int8", "int4"), ("int4", "bf16"))),
    ],
)
def test_a_fused_write_quantises_what_it_would_have_written(target, to, host, rng, kinds):
    heads, dim = 2, 34
    cos, sin = (to(x) for x in naive.rope_tables(16, dim))
    weights = [to((1 + 0.1 * rng.standard_normal(dim)).astype(F32)) for _ in "qk"]
    qkv = to(rng.standard_normal((3, (4 + 2 * heads) * dim), F32))
    layers = [
        numkv.PagedLayer(4, 3, heads, dim, target=target, **kw)
        for kw in ({"k_kind": kinds[0], "v_kind": kinds[1]}, {"kind": "fp32"})
    ]
    options = {
        "num_q_heads": 4, "cos": cos, "sin": sin, "qk_mode": 1, "q_norm_weight": weights[0],
        "k_norm_weight": weights[1],
    }  # fmt: skip
    q = [host(layer.write(qkv, **options)) for layer in layers]
    assert np.array_equal(*q)
    table = layers[0].block_table[None]
    for which, kind in zip("kv", kinds, strict=True):
        got = naive.gather(host(getattr(layers[0], which)), table, [3])
        plain = naive.gather(host(getattr(layers[1], which)), table, [3])
        if kind == "bf16":
            assert np.array_equal(got, naive.round_to(plain, kind))
            continue
        codes, scale = naive.quantise(plain, kind)
        found = naive.gather(host(getattr(layers[0], f"{which}_scale")), table, [3])
        assert np.array_equal(got, codes)
        assert np.array_equal(naive.words(found), naive.words(scale))
