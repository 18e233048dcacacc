"""Bound calls of a `PagedKVCache` whose layers are not alike: the bits of append and attention."""

import numpy as np
import pytest
from layer_lists import paged_kv_cache
from mixed_caches import GROUP, LAYERS, Layer, make

import numkv

pytestmark = pytest.mark.kernels

#: With layers of one shape in two kinds, and more q heads in the last one than in others of its shape.
MIXED = [*LAYERS, Layer(2, 8, 8)]
Q_HEADS = [x.heads * GROUP for x in MIXED[:-1]] + [8]


def same(a, b):
    a, b = (np.ascontiguousarray(x) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def arrays(rng, number, tokens):
    layer = MIXED[number]
    q = rng.standard_normal((tokens, Q_HEADS[number], layer.dim), np.float32)
    k, v = (
        rng.standard_normal((tokens, layer.heads, d), np.float32) for d in (layer.dim, layer.dim_v)
    )
    return (q, None, None) if layer.source is not None else (q, k, v)


def test_bound_calls_give_what_two_calls_give(rng):
    """Ragged steps, forks, sequences that get nothing; sinks and a scale of their own."""
    caches = [make(MIXED, num_blocks=2000) for _ in "ab"]
    a, b = caches
    sinks = [rng.standard_normal(n).astype(np.float32) if n > 2 else None for n in Q_HEADS]
    bound = a.bind(Q_HEADS, sinks=sinks, sm_scale=0.3)
    assert bound.num_q_heads == Q_HEADS[0]
    seqs = [[cache.add() for _ in range(3)] for cache in caches]
    for lens in ([30, 5, 0], [1, 1, 1], [4, 0, 2], [1, 1, 1], [1, 1, 1], [900, 0, 0], [1, 1, 1]):
        if lens[0] == 4:
            for cache, own in zip(caches, seqs, strict=True):
                own[2] = cache.fork(own[0])
        steps = [cache.reserve(own, lens) for cache, own in zip(caches, seqs, strict=True)]
        step, tokens = bound.begin(steps[0]), sum(lens)
        at_once = {number for number, ready in step._ready.items() if ready is not None}
        ordinary = {i for i, x in enumerate(MIXED) if x.chunk or x.source is not None}
        assert tokens > 100 or at_once == set(range(len(MIXED))) - ordinary
        order = sorted(range(len(MIXED)), key=lambda n: (MIXED[n].source is not None, -n))
        for number in order:
            q, k, v = arrays(rng, number, tokens)
            out = np.empty((tokens, Q_HEADS[number], MIXED[number].dim_v), np.float32)
            got = step(number, q, k, v, *([out] if number % 2 else []))
            if k is not None:
                steps[1].append(number, k, v)
            want = steps[1].attention(number, q, sinks=sinks[number], sm_scale=0.3)
            assert same(got, want)
        assert step.unwritten_layers == steps[0].unwritten_layers == []
        for cache, own in zip(caches, steps, strict=True):
            cache.commit(own)
    for number in range(len(MIXED)):
        q = arrays(rng, number, 3)[0]
        assert same(
            *(c.decode_attention(number, own, q) for c, own in zip(caches, seqs, strict=True))
        )
    a.check()


def test_on_cuda_too(target, to, host, rng):
    a, b = (make(MIXED, target=target) for _ in "ab")
    bound = a.bind(Q_HEADS)
    for lens in ([2], [1]):
        steps = [cache.reserve([0] if cache.sequences else [cache.add()], lens) for cache in (a, b)]
        step = bound.begin(steps[0])
        for number in range(len(MIXED)):
            q, k, v = arrays(rng, number, lens[0])
            q, k, v = to(q), *(None if x is None else to(x) for x in (k, v))
            if k is not None:
                steps[1].append(number, k, v)
            assert same(host(step(number, q, k, v)), host(steps[1].attention(number, q)))
        a.commit(steps[0])
        b.commit(steps[1])
    a.check()


def test_layers_with_states(rng):
    """Those without rows are not called; states go by the step."""
    states = {0: [((2,), "float32")]}
    cache = paged_kv_cache(
        2, [None, 2], 8, num_blocks=8, kind="fp32", states=states, state_slots=numkv.StateSlots(3)
    )
    bound = cache.bind([None, 4])
    step = cache.reserve([cache.add()], 1)
    begun = bound.begin(step)
    assert begun.unwritten_layers == [1]
    q, k, v = (rng.standard_normal((1, n, 8), np.float32) for n in (4, 2, 2))
    with pytest.raises(numkv.NumkvError, match="layer 0, which has none"):
        begun(0, q, k, v)
    np.testing.assert_allclose(begun(1, q, k, v), v.repeat(2, 1), rtol=1e-6)
    assert step.unwritten_layers == [0]
    step.write_state(0, np.ones((1, 2), np.float32))
    cache.commit(step)


def test_what_is_refused(rng):
    cache = make(MIXED)
    step = cache.reserve([cache.add()], 2)
    for wrong in ([4] * 7, 3, [4.5] * 8, "x"):
        with pytest.raises((numkv.DimensionMismatch, TypeError), match=r"q.heads"):
            cache.bind(wrong)
    with pytest.raises(numkv.DimensionMismatch, match="`sinks`"):
        cache.bind(Q_HEADS, sinks=[None] * 3)
    begun = cache.bind(Q_HEADS).begin(step)
    q, k, v = arrays(rng, 0, 2)
    with pytest.raises(numkv.NumkvError, match="expected one with the step's rows"):
        begun(3, q, None, None)
    with pytest.raises(numkv.NotSupported, match="reads the rows of layer 0"):
        begun(3, q, k, v)
    with pytest.raises(numkv.DimensionMismatch, match="`q`"):
        begun(0, q[:, :2], k, v)
    begun(0, q, k, v)
    with pytest.raises(numkv.NumkvError, match="has not been called"):
        begun(0, q, k, v)
    with pytest.raises(numkv.DimensionMismatch, match="`q`"):
        begun(3, q[:1], None, None)
    begun(3, q, None, None)
    with pytest.raises(numkv.NonFiniteInput):
        begun(2, arrays(rng, 2, 2)[0], np.full((2, 2, 8), np.nan, np.float32), k)
    assert 2 in step.unwritten_layers
    cache.rollback(step)
    with pytest.raises(numkv.NumkvError, match="rolled back"):
        begun(4, q, k, v)
