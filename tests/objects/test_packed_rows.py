"""A paged cache of rows whose elements share bytes."""

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache

import numkv
from numkv.files import load_sequences, save_sequences

pytestmark = pytest.mark.kernels

F32 = np.float32


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("cpu", "int4"),
        pytest.param("cpu", "code6", marks=pytest.mark.nightly),
        pytest.param("cpu", "code4", marks=pytest.mark.nightly),  # which would be compiled for this
        ("cuda", "int4"),
        ("cuda", "code4"),
        ("cuda", "code6"),
    ],
    indirect=["target"],
)
def test_a_paged_cache(target, to, host, rng, tmp_path, kind):
    """Forks, copies of shared blocks, swapping and files move codes and scales together."""
    dim = 40 if kind == "code6" else 34
    sizes = {"num_blocks": 12, "block_size": 2, "kind": kind, "target": target}
    cache = paged_kv_cache(2, 1, dim, **sizes)
    first = cache.add()
    rows = rng.standard_normal((2, 2, 5, 1, dim)).astype(F32)  # layer, K or V, token

    def put(seq, tokens):
        step = cache.reserve([seq], [tokens.stop - tokens.start])
        for layer in range(2):
            step.append(layer, *(to(x) for x in rows[layer][:, tokens]))
        cache.commit(step)

    put(first, slice(0, 3))
    second = cache.fork(first)
    put(first, slice(3, 4))  # its last block was shared
    put(second, slice(4, 5))
    q = rng.standard_normal((2, 2, dim), F32)

    def check(cache, seqs):
        for layer in range(2):
            out = host(cache.decode_attention(layer, list(seqs), to(q)))
            for i, tokens in enumerate(([0, 1, 2, 3], [0, 1, 2, 4])):
                k, v = (
                    naive.dequantise(*naive.quantise(x, kind)).swapaxes(0, 1)[None]
                    for x in rows[layer][:, tokens]
                )
                want, _ = naive.attention(q[i : i + 1], k, v, [4])
                tolerances.assert_rows_close(out[i : i + 1], want, tolerances.INTEGERS)

    check(cache, (first, second))
    out = [cache.swap_out(s) for s in (first, second)]
    save_sequences(tmp_path / "sequences.safetensors", out)
    for swapped in (out, load_sequences(tmp_path / "sequences.safetensors")):
        other = paged_kv_cache(2, 1, dim, **sizes)
        check(other, [other.swap_in(s) for s in swapped])
    with pytest.raises(numkv.NumkvError):
        paged_kv_cache(2, 1, dim, **sizes | {"kind": "int8"}).swap_in(out[0])
