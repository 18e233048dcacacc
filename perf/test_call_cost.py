"""What a call costs: one token of one sequence, where the rows themselves take next to no time."""

import numpy as np
import pytest

import numkv

HEADS, Q_HEADS, DIM, LENGTH = 8, 32, 128, 256


@pytest.fixture
def call(benchmark, note):
    """``call(run, reset)``: time `run`; a second is shared out among rounds of 20 calls, of which the least counts."""

    def timed(run, reset=None):
        if not benchmark.enabled:
            benchmark(run)
            return
        benchmark.pedantic(
            run, setup=None if reset is None else lambda: (reset(), None)[1], rounds=500,
            iterations=20 if reset is None else 1, warmup_rounds=20,
        )  # fmt: skip
        note(f"{benchmark.name}: {benchmark.stats.stats.min * 1e6:.2f} us a call at least")

    return timed


@pytest.fixture
def rows(rng):
    return rng.standard_normal((1, HEADS, DIM), np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_append(call, rows, dtype):
    new = rows.reshape(1, HEADS, 1, DIM).astype(dtype)
    k, v = (np.zeros((1, HEADS, LENGTH, DIM), dtype) for _ in range(2))
    offsets = np.array([3])
    call(lambda: numkv.append(new, new, k, v, offsets))
    assert np.array_equal(k[:, :, 3:4], new)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_paged_append(call, rows, kind):
    pool = numkv.PagedPool(16, 16, HEADS, DIM, kind=kind).pool
    k, v, slots = pool.values("k"), pool.values("v"), np.array([5])
    scales = {"k_scale": pool.k_scale, "v_scale": pool.v_scale} if kind == "int8" else {}
    call(lambda: numkv.paged_append(rows, rows, k, v, slots, **scales))
    assert k[0, :, 5].any()


def _make(name, kind):
    if name == "PagedLayer":
        return numkv.PagedLayer(LENGTH // 16, 16, HEADS, DIM, kind=kind)
    return numkv.ContiguousLayer(LENGTH, HEADS, DIM, kind=kind)


def _back(layer, length=1):
    """Let the length be as it was: what a caller does who goes on costs no call."""

    def reset():
        layer.context_lens[0] = length

    return reset


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("name", ["ContiguousLayer", "PagedLayer"])
def test_layer_append(call, rows, name, kind):
    layer = _make(name, kind)
    layer.append(rows, rows)
    call(lambda: layer.append(rows, rows), _back(layer))
    assert len(layer) > 1


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_cache_append(call, rows, kind):
    cache = numkv.KVCache(2, HEADS, DIM, max_seq_len=LENGTH, kind=kind)
    one = rows[0]
    call(lambda: cache.append(0, one, one), lambda: cache.truncate(0))
    assert cache.k(0).any()


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("name", ["ContiguousLayer", "PagedLayer", "PagedKVCache"])
def test_write(call, rng, name, kind):
    qkv = rng.standard_normal((1, (Q_HEADS + 2 * HEADS) * DIM), np.float32)
    cos, sin = (rng.standard_normal((LENGTH, DIM // 2), np.float32) for _ in range(2))
    q_out = np.empty((1, Q_HEADS, DIM), np.float32)
    options = {"num_q_heads": Q_HEADS, "cos": cos, "sin": sin, "q_out": q_out}
    if name == "PagedKVCache":
        cache = numkv.PagedKVCache(1, HEADS, DIM, num_blocks=1, kind=kind)
        step = cache.reserve([cache.add()], 1)
        call(lambda: step.write(0, qkv, qk_mode=numkv.QKMode.HALF_SPLIT, **options))
    else:
        layer = _make(name, kind)
        layer.seq_len = 2
        call(lambda: layer.write(qkv, qk_mode=numkv.QKMode.HALF_SPLIT, **options), _back(layer))
    assert q_out.any()


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_decode(call, rng, kind):
    """Eight tokens of one head: as good as nothing to attend to."""
    cache = numkv.KVCache(1, 1, DIM, max_seq_len=LENGTH, kind=kind)
    x = rng.standard_normal((8, 1, DIM), np.float32)
    cache.append(0, x, x)
    call(lambda: cache.decode_attention(0, x[:1]))
    assert cache.decode_attention(0, x[:1]).any()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["KVCache", "ContiguousLayer"])
def test_bound(call, rng, name, kind):
    """Append and attend of eight tokens of one head, bound."""
    x = rng.standard_normal((7, 1, DIM), np.float32)
    one = x[:1].astype(numkv.kind("fp32" if kind == "int8" else kind).dtype)
    of_rows = "fp32" if kind == "int8" else kind
    if name == "ContiguousLayer":
        layer = numkv.ContiguousLayer(LENGTH, 1, DIM, kind=kind)
        layer.append(x, x)
        bound = layer.bind(1, of_rows)
        call(lambda: bound(one, one, one), _back(layer, 7))
        assert len(layer) > 7
        return
    cache = numkv.KVCache(1, 1, DIM, max_seq_len=LENGTH, kind=kind)
    cache.append(0, x, x)
    cache.advance(7)
    bound, steps = cache.bind(1, of_rows), []

    def begin():
        cache.truncate(7)
        steps[:] = [bound.begin()]

    begin()
    call(lambda: steps[0](0, one, one, one), begin)


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_decode_of_functions(call, rng, kind):
    layer = numkv.ContiguousLayer(LENGTH, 1, DIM, kind=kind)
    x, lens = rng.standard_normal((8, 1, DIM), np.float32), np.array([8])
    layer.append(x, x)
    call(lambda: numkv.decode_attention(x[:1], layer.k, layer.v, lens))
    assert numkv.decode_attention(x[:1], layer.k, layer.v, lens).any()
