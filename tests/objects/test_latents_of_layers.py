"""Latents in a PagedKVCache beside trees, shared prefixes, chunks, layers that read others, and states."""

import pickle
from dataclasses import replace

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache

import numkv

WIDTH, DIM, Q_HEADS, SCALE = 32, 40, 6, 0.21
STATES, CHUNK = 1, 6
LATENT = {"head_dim_v": WIDTH, "v_kind": "latent"}


def new_rows(rng, n):
    return rng.standard_normal((n, 1, DIM)).astype(np.float32)


def queries(rng, n):
    return rng.standard_normal((n, Q_HEADS, DIM)).astype(np.float32)


def check(got, q, rows):
    """One query's output beside the oracle's over the rows that it sees."""
    want, _ = naive.latent_attention(q[None], rows[:, 0].astype(np.float64), WIDTH, SCALE)
    tolerances.assert_rows_close(got[None], want, tolerances.attention("fp32", "fp32"))


def grown(cache, seqs, lens, rng, **options):
    """A step with rows in all layers that have their own, these rows, and queries."""
    step, x = cache.reserve(seqs, lens, **options), new_rows(rng, sum(lens))
    for layer in step.unwritten_layers:
        if cache.states is None or layer != STATES:
            step.append(layer, x + layer)
    return step, x, queries(rng, sum(lens))


def mixed_cache(kind="fp32", **options):
    """Layer 0 sees all, layer 2 a chunk, layer 3 reads layer 0's rows; layer 1 keeps states and no rows."""
    return paged_kv_cache(
        4, [1, None, 1, 1], DIM, num_blocks=32, block_size=4, kind=kind, chunks=[None, None, CHUNK, None],
        shares={3: 0}, states={STATES: [((3,), np.float32)]}, state_slots=numkv.StateSlots(4), **LATENT, **options,
    )  # fmt: skip


def test_trees_and_shared_prefixes(rng):
    cache = paged_kv_cache(2, 1, DIM, num_blocks=32, block_size=4, kind="fp32", **LATENT)
    seq = cache.add()
    step, kept, _ = grown(cache, [seq], [9], rng)
    cache.commit(step)
    step, x, q = grown(cache, [seq], [4], rng, parents=[-1, 0, 0, 2])
    out = step.attention(1, q, sm_scale=SCALE)
    for token, path in enumerate([[0], [0, 1], [0, 2], [0, 2, 3]]):
        check(out[token], q[token], 1 + np.concatenate([kept, x[path]]))
    cache.commit(step, paths=[[0, 2, 3]])
    kept = np.concatenate([kept, x[[0, 2, 3]]])
    fork = cache.fork(seq)
    step, x, q = grown(cache, [seq, fork], [1, 2], rng)
    for out in (
        step.attention(0, q, sm_scale=SCALE),
        step.attention(0, q, sm_scale=SCALE, shared_len=8),
    ):
        check(out[0], q[0], np.concatenate([kept, x[:1]]))
        check(out[2], q[2], np.concatenate([kept, x[1:]]))
    cache.commit(step)
    with pytest.raises(numkv.NotSupported, match="latents"):
        cache.compact(seq, [0, 2, 5], numkv.rope_shift(*naive.rope_tables(40, 8)))
    cache.check()


@pytest.mark.parametrize("kind", ["fp32", "fp8_e4m3"])
def test_chunks_states_and_layers_that_read_others(tmp_path, rng, kind):
    """Whatever copies such a cache copies all of it; a row is stored once."""
    cache = mixed_cache(kind)
    assert cache.layers[3].v_kind == "latent"
    assert "latent" in repr(cache)
    per_element = 4 if kind == "fp32" else 1
    assert 0 <= cache.nbytes - 32 * 4 * DIM * per_element < 32 * 4  # states, scales of heads
    if kind != "fp32":
        cache.set_scales(0, 0.5)
        cache.set_scales(2, 0.25)
    seq = cache.add()
    step, x, q = grown(cache, [seq], [9], rng)
    with pytest.raises(numkv.NotSupported, match="reads those of layer 0"):
        step.write_latents(3, x, qk_mode=0)
    step.write_state(STATES, np.ones((1, 3), np.float32))
    outs = {layer: step.attention(layer, q, sm_scale=SCALE) for layer in (0, 2, 3)}
    assert np.array_equal(outs[0], outs[3])
    if kind == "fp32":
        for token in range(9):
            check(outs[0][token], q[token], x[: token + 1])
            check(outs[2][token], q[token], 2 + x[token // CHUNK * CHUNK : token + 1])
    cache.commit(step, token_ids=range(9))
    swapped = cache.swap_out(seq)
    numkv.save(tmp_path / "cache", cache)
    numkv.files.save_sequences(tmp_path / "seqs", [swapped])
    back = [cache.swap_in(swapped), cache.swap_in(numkv.files.load_sequences(tmp_path / "seqs")[0])]
    copies = [cache.copy(), pickle.loads(pickle.dumps(cache)), numkv.load(tmp_path / "cache")]
    for layer in (0, 2, 3):
        want = cache.decode_attention(layer, [seq], q[:1], sm_scale=SCALE)
        for other, number in [(cache, n) for n in back] + [(other, seq) for other in copies]:
            got = other.decode_attention(layer, [number], q[:1], sm_scale=SCALE)
            assert np.array_equal(got, want)
    for other in (cache, *copies):
        assert other.nbytes == cache.nbytes
        other.check()


@pytest.mark.parametrize("other", [{"head_dim": 48}, {"v_kind": None}, {"head_dim_v": 30}])
def test_latents_beside_other_rows_are_refused(other):
    latent = numkv.LayerSpec(1, DIM, kind="fp32", **LATENT)
    with pytest.raises(numkv.NotSupported, match="latents and other rows"):
        numkv.PagedKVCache(layers=[latent, replace(latent, **other)], num_blocks=4)
