"""The fused write into INT8 pools."""

import naive
import numpy as np
import pytest
from messages import about

import numkv

F32 = np.float32
KINDS = [
    ("int8", "int8"),
    *(pytest.param(kinds, marks=pytest.mark.nightly) for kinds in (("int8", "fp16"), ("fp32", "int8"))),
]  # fmt: skip


# ---------------------------------------------------------------- what may not be stored


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
def test_a_fused_write_looks_at_what_is_quantised(target, to, host, kinds, rotate):
    """Not at q, nor at what stays a float; `index` is the place in `qkv`."""
    layer = numkv.ContiguousLayer(
        9, 2, 4, k_kind=kinds[0], v_kind=kinds[1], target=target, rotate=rotate
    )
    of = [None] * 4 + [kinds[0]] * 2 + [kinds[1]] * 2  # by head of 4 columns
    for column in (0, 15, 16, 23, 24, 31):
        kind = of[column // 4]
        qkv, before = np.ones((3, 8 * 4), F32), layer.seq_len
        qkv[1, column] = np.nan
        if kind == "int8":
            with pytest.raises(numkv.NonFiniteInput, match=about("qkv")) as caught:
                layer.write(to(qkv), num_q_heads=4, qk_mode=0)
                layer.check()  # on CUDA the kernel finds it
            # Rotation spreads it over its row, before the kernel on CUDA looks.
            told = (1,) if rotate and target == "cuda" else (1, column)
            assert caught.value.index == told
            assert "storage in int8" in str(caught.value)
            layer.truncate(before)
        else:
            q = host(layer.write(to(qkv), num_q_heads=4, qk_mode=0))
            assert np.array_equal(np.isnan(q.ravel()), np.isnan(qkv[:, :16].ravel()))
            layer.truncate(before)


# ---------------------------------------------------------------- fused write


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("kinds", KINDS)
def test_a_fused_write_quantises_what_it_would_have_written(target, to, host, rng, layout, kinds):
    heads, dim = 2, 8
    cos, sin = (to(x) for x in naive.rope_tables(16, dim))
    weights = [to((1 + 0.1 * rng.standard_normal(dim)).astype(F32)) for _ in "qk"]
    qkv = to(rng.standard_normal((5, (4 + 2 * heads) * dim), F32))

    def make(**kw):
        if layout == "paged":
            return numkv.PagedLayer(4, 3, heads, dim, target=target, **kw)
        return numkv.ContiguousLayer(12, heads, dim, target=target, **kw)

    layers = [make(k_kind=kinds[0], v_kind=kinds[1]), make(kind="fp32")]
    q = [
        layer.write(
            qkv, num_q_heads=4, cos=cos, sin=sin, qk_mode=1, q_norm_weight=weights[0],
            k_norm_weight=weights[1],
        )
        for layer in layers
    ]  # fmt: skip
    table = layers[0].block_table[None] if layout == "paged" else [[0]]
    assert np.array_equal(host(q[0]), host(q[1]))
    for which, kind in zip("kv", kinds, strict=True):
        got = naive.gather(host(getattr(layers[0], which)), table, [5])
        plain = naive.gather(host(getattr(layers[1], which)), table, [5])
        if kind != "int8":
            assert np.array_equal(got, naive.round_to(plain, kind))
            continue
        codes, scale = naive.int8_quantise(plain)
        found = naive.gather(host(getattr(layers[0], f"{which}_scale")), table, [5])
        assert np.array_equal(got, codes)
        assert np.array_equal(found, scale)
