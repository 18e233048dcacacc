"""The fused write into slots of paged pools."""

import naive
import numpy as np
import paged_problems
import pytest

import numkv
from numkv.blocks.tables import slot_mapping

F32, I32, I64 = np.float32, np.int32, np.int64


# ---------------------------------------------------------------- append


# ---------------------------------------------------------------- fused write


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly), "int8"])
def test_write_is_a_layers_write(target, to, host, rng, kind, mode):
    """Two ragged sequences at once; each as in a layer of its own, bit for bit."""
    heads, q_heads, dim, size = 2, 4, 8, 3
    lens, new, table = [7, 2], [4, 2], np.array([[5, 0, 3], [1, -1, -1]], I32)
    qkv = rng.standard_normal((6, (q_heads + 2 * heads) * dim), F32)
    options = {"num_q_heads": q_heads, "qk_mode": mode, "eps": 1e-5}
    if mode:
        tables = naive.rope_tables(8, dim)
        options |= {n: to(x) for n, x in zip(("cos", "sin"), tables, strict=True)}
    if mode in (1, 4):
        for name in ("q_norm_weight", "k_norm_weight"):
            options[name] = to((1 + 0.1 * rng.standard_normal(dim)).astype(F32))
    (k_pool, v_pool), scales = paged_problems.pools(
        to, kind, shape=(6, heads, size), dim=dim, dim_v=dim
    )
    slots = slot_mapping(table, lens, size, new_lens=new)
    positions = np.array([3, 4, 5, 6, 0, 1], I32)
    q = numkv.paged_write(
        to(qkv), k_pool, v_pool, to(slots), positions=to(positions), **options, **scales
    )
    for s, rows in ((0, np.s_[:4]), (1, np.s_[4:])):
        layer = numkv.PagedLayer(3, size, heads, dim, kind=kind, target=target)
        layer.seq_len = lens[s] - new[s]
        assert np.array_equal(host(layer.write(to(qkv[rows]), **options)), host(q)[rows])
        for which, pool in (("k", k_pool), ("v", v_pool)):
            got = naive.gather(host(pool), table[s : s + 1], [lens[s]])
            want = naive.gather(host(getattr(layer, which)), layer.block_table[None], [lens[s]])
            fresh = np.s_[:, :, lens[s] - new[s] :]
            assert np.array_equal(got[fresh], want[fresh])
            if scales:
                name = f"{which}_scale"
                got = naive.gather(host(scales[name]), table[s : s + 1], [lens[s]])
                want = naive.gather(host(getattr(layer, name)), layer.block_table[None], [lens[s]])
                assert np.array_equal(got[fresh], want[fresh])
    untouched = np.ones((6, size), bool)
    untouched.ravel()[slots] = False
    assert np.all(host(k_pool).swapaxes(1, 2)[untouched].astype(F32) == 77)


def test_write_leaves_skipped_tokens_out(target, to, host, rng):
    """Slot -1 gives q, and stores nothing; q_out takes q."""
    (k_pool, v_pool), _ = paged_problems.pools(to, "fp32")
    qkv, place = rng.standard_normal((2, 24), F32), to(np.zeros((2, 2, 4), F32))
    q = numkv.paged_write(
        to(qkv), k_pool, v_pool, to(np.array([-1, 4], I64)), num_q_heads=2, qk_mode=0, q_out=place
    )
    assert q is place
    assert np.array_equal(host(q), qkv[:, :8].reshape(2, 2, 4))
    k = host(k_pool)
    assert np.array_equal(k[1, :, 1], qkv[1, 8:16].reshape(2, 4))
    assert np.count_nonzero(k != 77) == 8
