"""Steps whose tables lie in `StepBuffers`: the same as others, with rows to spare."""

import copy

import naive
import numpy as np
import pytest
from layer_lists import paged_kv_cache

import numkv

HEADS, DIM = 2, 8


def made(target="cpu", **options):
    return paged_kv_cache(
        1, HEADS, DIM, num_blocks=8, block_size=4, kind="fp32", target=target, **options
    )


def test_steps_are_as_without_buffers(target, to, host):
    """Attention against the oracle, of steps with fewer tokens and sequences than there is room for."""
    cache = made(target, windows=[6])
    buffers = cache.step_buffers(3, 5, max_length=12)
    seqs = [cache.add() for _ in range(2)]
    rng = np.random.default_rng(5)
    stored = {seq: ([], []) for seq in seqs}
    for chosen, lens in ((seqs, [2, 3]), (seqs, [1, 1]), (seqs[1:], [2]), (seqs, [0, 4])):
        n = sum(lens)
        k, v = (rng.standard_normal((5, HEADS, DIM)).astype(np.float32) for _ in "kv")
        q = rng.standard_normal((5, 2 * HEADS, DIM)).astype(np.float32)
        step = cache.reserve(chosen, lens, into=buffers)
        assert step.num_tokens == n
        step.append(0, to(k), to(v))
        found, weights = host(step.attention(0, to(q))), host(step.attention_weights(0, to(q)))
        assert not found[n:].any()
        assert weights.shape == (3, HEADS, 12)
        at = 0
        for i, (seq, tokens) in enumerate(zip(chosen, lens, strict=True)):
            part = slice(at, at + tokens)
            for side, x in zip(stored[seq], (k, v), strict=True):
                side.extend(x[part])
            kv = [np.moveaxis(np.array(x), 0, 1)[None] for x in stored[seq]]
            length, starts = np.array([len(stored[seq][0])]), np.array([0, tokens])
            want, _ = naive.attention(q[part], *kv, length, starts, window_left=6)
            np.testing.assert_allclose(found[part], want, atol=1e-5)
            mass = naive.attention_weights(q[part], kv[0], length, starts, window_left=6)[0]
            np.testing.assert_allclose(weights[i, :, : length[0]], mass, atol=1e-5)
            assert not weights[i, :, length[0] :].any()
            at += tokens
        assert not weights[len(chosen) :].any()
        cache.commit(step)
    cache.check()


def test_projections(to, host, target):
    """`write` gives q for all rows, and writes those of the step."""
    cache, plain = made(target), made(target)
    buffers = cache.step_buffers(2, 3, max_length=8)
    seq = cache.add()
    assert seq == plain.add()
    rng = np.random.default_rng(6)
    tables = [to(rng.standard_normal((8, DIM // 2)).astype(np.float32)) for _ in range(2)]
    options = {"num_q_heads": 4, "cos": tables[0], "sin": tables[1], "qk_mode": 2}
    for n in (2, 1):
        qkv = rng.standard_normal((3, 8 * DIM)).astype(np.float32)
        step, other = cache.reserve([seq], n, into=buffers), plain.reserve([seq], n)
        q = host(step.write(0, to(qkv), **options))
        assert np.array_equal(q[:n], host(other.write(0, to(qkv[:n]), **options)))
        out = host(step.attention(0, to(q)))
        assert np.array_equal(out[:n], host(other.attention(0, to(q[:n]))))
        cache.commit(step)
        plain.commit(other)
    for x, y in zip(cache.swap_out(seq).buffers[0], plain.swap_out(seq).buffers[0], strict=True):
        assert np.array_equal(x, y)


def test_own_kernels_say_what_they_have_written():
    cache = made()
    buffers = cache.step_buffers(1, max_length=8)
    step = cache.reserve([cache.add()], 1, into=buffers)
    assert step.arrays(0).slots.tolist() == [0]
    assert step.unwritten_layers == [0]
    step.mark_written()
    assert step.unwritten_layers == []
    cache.commit(step)


def test_what_does_not_fit():
    cache = made()
    buffers, seqs = cache.step_buffers(2, 5, max_length=12), [cache.add() for _ in range(3)]
    free = cache.stats().pool.free
    wrong = [
        (seqs[:2], [3, 3], "5 new tokens"), (seqs[:1], [13], "5 new tokens, got 13"), (seqs, [1, 1, 1], "2 sequences"),
    ]  # fmt: skip
    for chosen, lens, what in wrong:
        with pytest.raises(numkv.DimensionMismatch, match=what):
            cache.reserve(chosen, lens, into=buffers)
    for lens in ([5], [5]):
        step = cache.reserve(seqs[:1], lens, into=buffers)
        rows = np.ones((5, HEADS, DIM), np.float32)
        step.append(0, rows, rows)
        with pytest.raises(numkv.NumkvError, match="without an open step"):
            cache.reserve(seqs[1:2], 1, into=buffers)
        with pytest.raises(numkv.DimensionMismatch, match="buffers' 5 tokens"):
            step.append(0, rows[:1], rows[:1])
        with pytest.raises(numkv.NotSupported, match="StepBuffers"):
            cache.bind(4, "fp32").begin(step)
        cache.commit(step)
    with pytest.raises(numkv.DimensionMismatch, match="12 tokens in a sequence, got 13"):
        cache.reserve(seqs[:1], 3, into=buffers)
    cache.truncate(seqs[0], 0)
    with pytest.raises(numkv.NumkvError, match="of this cache"):
        made().reserve([], 1, into=buffers)
    with pytest.raises(TypeError, match="expected StepBuffers"):
        cache.reserve(seqs[:1], 1, into=3)
    for sizes in ({"max_length": 33}, {"num_tokens": 0}, {"max_length": 0}):
        with pytest.raises(numkv.DimensionMismatch, match=next(iter(sizes))):
            cache.step_buffers(1, **sizes)
    with pytest.raises(numkv.NotSupported, match="copied or pickled"):
        copy.copy(buffers)
    assert cache.stats().pool.free == free
    cache.check()
