"""numkv's caches on tensors: the same program has the same results on arrays and on tensors."""

import copy
import gc
import inspect
import pickle
import sys

import numpy as np
import pytest

import numkv
from numkv.storage import user_buffers
from numkv.storage.user_buffers import MEMORY, array_at

torch = pytest.importorskip("torch")

import numkv.torch as on_tensors  # noqa: E402
from numkv.torch import call_cache  # noqa: E402

# What gives numkv's own objects or plain ones, or what only kernels use.
NO_ARRAYS = {
    "bool",
    "float",
    "int",
    "int | None",
    "Kind",
    "LayerSpec",
    "dict[int, LayerSpec]",
    "list[int]",
    "range",
    "str",
    "tuple[LayerSpec, ...]",
    "tuple[int, ...]",
}
UNTOUCHED = {"arrays", "jit", "pool", "caches", "underlying_cache"}


def rows(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Programs: each takes numkv or numkv.torch and what turns a NumPy array into an argument, and yields results.


def kv_cache(lib, a):
    cache = lib.KVCache(2, 2, 32, kind="int8")
    for step in range(3):
        for layer in range(2):
            cache.append(layer, a(rows(1, 2, 32, seed=step)), a(rows(1, 2, 32, seed=step + 9)))
        cache.advance()
    yield from (cache.k(0), cache.v(1), cache.k_codes(0), cache.v_scales(1), cache.lengths)
    yield cache.decode_attention(0, a(rows(1, 4, 32)))
    yield from cache.decode_attention(1, a(rows(1, 4, 32)), sinks=a(rows(4)), return_lse=True)
    yield cache.attention_weights(0, a(rows(1, 4, 32)))
    bound = cache.bind(num_q_heads=4, window_left=[-1, 2], sinks=a(rows(4)))
    step = bound.begin(2)
    for layer in range(2):
        yield step(layer, a(rows(2, 4, 32)), a(rows(2, 2, 32)), v=a(rows(2, 2, 32, seed=5)))
    cache.advance(2)
    cache.compact(a(np.array([0, 2])))
    yield cache.k(0)
    cache.truncate(1)
    cache.check()
    again = cache.copy()
    assert (
        type(again)
        is type(cache)
        is type(copy.deepcopy(cache))
        is type(pickle.loads(pickle.dumps(cache)))
    )
    yield again.k(0)
    cache.clear()
    assert cache.is_empty


def layer(lib, a):
    cache = lib.ContiguousLayer(16, 2, 32, kind="bf16")
    yield from single(cache, a)


def paged_layer(lib, a):
    pool = lib.PagedPool(8, 4, 2, 32, kind="fp32")
    cache = lib.PagedLayer(8, 4, 2, 32, pool=pool)
    yield from single(cache, a)
    yield cache.block_table
    pool.check()
    assert isinstance(pool.like(3), lib.PagedPool)


def single(cache, a):
    cache.append(a(rows(5, 2, 32)), a(rows(5, 2, 32, seed=2)))
    yield from (cache.k, cache.v, cache.context_lens)
    q = a(rows(2, 4, 32))
    yield cache.decode_attention(q[:1])
    yield cache.attention_weights(q)
    yield cache.write(a(rows(1, 8 * 32)), num_q_heads=4, qk_mode=numkv.QKMode(0))
    cache.compact(a(np.array([0, 2, 3, 4])))
    yield cache.k
    cache.check()
    yield cache.bind(num_q_heads=4)(q[:1], a(rows(1, 2, 32)), a(rows(1, 2, 32)))
    yield cache.copy().v
    cache.reserve(1)
    cache.truncate(2)
    yield cache.k


def paged_cache(lib, a):
    layers = [numkv.LayerSpec(2, 32, key_bounds=True)] * 2
    cache = lib.PagedKVCache(layers=layers, num_blocks=16, block_size=4)
    first, second = cache.add(a(np.arange(6))), cache.add()
    step = cache.reserve([first, second], a(np.array([6, 2])))
    assert isinstance(step, lib.Step)
    for i in range(2):
        step.append(i, a(rows(8, 2, 32)), a(rows(8, 2, 32, seed=3)))
        yield step.attention(i, a(rows(8, 4, 32)))
        yield step.sparse_attention(i, a(rows(8, 4, 32)), most_blocks=2)
        yield step.attention_weights(i, a(rows(8, 4, 32)))
    cache.commit(step, token_ids=a(np.arange(8)))
    yield cache.block_table(first, 0)
    other = cache.fork(first)
    step = cache.reserve([other], [1])
    for i in range(2):
        yield step.write(i, a(rows(1, 8 * 32)), num_q_heads=4, qk_mode=0)
        yield from step.attention(i, a(rows(1, 4, 32)), return_lse=True)
    cache.rollback(step)
    step = cache.reserve([other, second], a(np.array([1, 2])))
    bound = cache.bind(num_q_heads=4).begin(step)
    for i in range(2):
        yield bound(i, *map(a, (rows(3, 4, 32), rows(3, 2, 32), rows(3, 2, 32))))
    cache.commit(step)
    yield cache.decode_attention(0, [first, second], a(rows(2, 4, 32)))
    yield cache.pin(second)
    cache.unpin(second)
    cache.compact(first, a(np.array([0, 2, 3])))
    yield cache.decode_attention(1, [first], a(rows(1, 4, 32)))
    again = cache.copy()
    assert type(again) is type(cache)
    cache.swap_in(cache.swap_out(second))
    cache.check()
    cache.remove(first)


def sliding(lib, a):
    cache = lib.CausalCache(window_left=4)
    yield from multi(cache, a)


def causal(lib, a):
    yield from multi(lib.CausalCache(), a)


def chunked(lib, a):
    yield from multi(lib.CausalCache(chunk_size=4), a)


def multi(cache, a):
    cache.init("fp32", max_sequences=2, capacity=16, max_batch=4)
    for start in (0, 3):
        cache.start_forward(numkv.Batch([0, 0, 1], [start, start + 1, start]))
        cache.put(0, a(rows(3, 2, 32)), a(rows(3, 2, 32, seed=start)))
        found = cache.get(0)
        yield from (x for x in found if x is not None)
        yield cache.decode_attention(0, a(rows(3, 4, 32)))
        weights = cache.attention_weights(0, a(rows(3, 4, 32)))
        yield from (weights[seq] for seq in sorted(weights))
    yield cache.positions(0)
    cache.copy_prefix(0, 1, 2)
    cache.remove(0, 1, None)
    cache.check()
    assert type(cache.copy()) is type(cache)
    cache.close()


def compressor(lib, a):
    config = numkv.CompressorConfig(head_dim=32)
    cache = lib.HeadCompressor(config)
    cache.extend(a(rows(6, 32)), a(rows(6, 32, seed=2)))
    cache.push(a(rows(32)), a(rows(32, seed=4)))
    yield from (cache.attention_scores(a(rows(32))), cache.attend(a(rows(32))))
    yield from (cache.decode_keys(), cache.decode_values())
    yield from cache.attend(a(rows(3, 32)), logits_soft_cap=2.0, window_left=4, return_lse=True)
    cache.truncate(2)
    yield cache.attention_scores(a(rows(2, 32)), sm_scale=0.5)


def tally(lib, a):
    found = lib.AttentionTally(2)
    found.add(a(np.abs(rows(2, 5))))
    found.compact(a(np.array([1, 3])))
    yield found.weights


PROGRAMS = [
    kv_cache, layer, paged_layer, paged_cache, sliding, causal, chunked, compressor, tally,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_tensors_have_what_arrays_have(program):
    of_arrays = list(program(numkv, lambda x: x))
    of_tensors = list(program(on_tensors, torch.from_numpy))
    assert len(of_arrays) == len(of_tensors) > 0
    for wanted, found in zip(of_arrays, of_tensors, strict=True):
        assert isinstance(found, torch.Tensor)
        assert isinstance(wanted, np.ndarray)
        wide = np.float64 if wanted.dtype.kind not in "iu" else wanted.dtype
        values = found.to(torch.float64) if found.is_floating_point() else found
        assert np.array_equal(values.numpy(), wanted.astype(wide))


@pytest.mark.parametrize(
    "name", [n for n in on_tensors.__all__ if inspect.isclass(getattr(on_tensors, n))]
)
def test_classes_are_those_of_numkv(name):
    mine, theirs = getattr(on_tensors, name), getattr(numkv, name)
    assert issubclass(mine, theirs)
    assert inspect.signature(mine) == inspect.signature(theirs)
    for member in dir(theirs):
        found = inspect.getattr_static(theirs, member)
        if member.startswith("_") or not (inspect.isfunction(found) or isinstance(found, property)):
            continue
        plain = isinstance(found, property) and found.fget.__annotations__["return"] in NO_ARRAYS
        assert (member in vars(mine)) == (member not in UNTOUCHED and not plain), member
        if inspect.isfunction(found):
            assert inspect.signature(getattr(mine, member)) == inspect.signature(found)


def test_the_public_names_are_those_of_numkv():
    assert set(on_tensors.__all__) < set(numkv.__all__) | {"Step"}
    assert all(hasattr(on_tensors, name) for name in on_tensors.__all__)
    taking_arrays = {"append", "paged_append", "paged_write", "merge_states", "attention_weights"}
    assert taking_arrays | {n for n in numkv.__all__ if n.endswith("_attention")} <= set(
        on_tensors.__all__
    )


def test_outputs_and_memory_are_shared():
    cache = on_tensors.ContiguousLayer(16, 2, 32, kind="bf16")
    k = torch.randn(3, 2, 32).to(torch.bfloat16)
    cache.append(k, k)
    assert cache.k.dtype == torch.bfloat16
    seen = cache.k
    cache.append(k, k)
    assert torch.equal(cache.k[:3], seen)
    assert cache.k.data_ptr() == seen.data_ptr()
    out = torch.empty(1, 4, 32)
    assert cache.decode_attention(torch.randn(1, 4, 32), out=out) is out
    again, lse = cache.decode_attention(torch.randn(1, 4, 32), out=out, return_lse=True)
    assert again is out
    assert isinstance(lse, torch.Tensor)
    assert isinstance(cache.arrays.k, np.ndarray)  # for kernels


def test_bound_calls_take_an_output_and_refuse_gradients():
    cache = on_tensors.KVCache(1, 2, 32, kind="bf16")
    step = cache.bind(num_q_heads=4, kind="bf16").begin()
    q, k = (torch.randn(1, heads, 32).to(torch.bfloat16) for heads in (4, 2))
    with pytest.raises(numkv.NotSupported, match=r"`q`.*requires_grad"):
        step(0, q.clone().requires_grad_(), k, k)
    assert step.unwritten_layers == [0]
    out = torch.empty_like(q)
    assert step(0, q, k, k, out=out) is out
    assert torch.equal(out, k.repeat_interleave(2, 1))  # the one token that there is


def test_gradients_are_refused():
    cache = on_tensors.ContiguousLayer(16, 2, 32)
    learnt = torch.randn(1, 2, 32, requires_grad=True)
    with pytest.raises(numkv.NotSupported, match=r"`k`.*requires_grad"):
        cache.append(learnt, learnt)
    assert cache.seq_len == 0
    with torch.no_grad():
        cache.append(learnt, learnt)
    with torch.inference_mode():
        cache.append(torch.randn(1, 2, 32), v=torch.randn(1, 2, 32))
    assert cache.seq_len == 2


@pytest.mark.skipif(call_cache._guards is None, reason="this PyTorch has no such check")
def test_nobody_keeps_an_array_of_a_call(monkeypatch):
    """Methods and functions that get arrays without memory neither keep nor return them."""
    given = []
    monkeypatch.setattr(
        call_cache, "array_at", lambda *of: given.append(array_at(*of)) or given[-1]
    )
    results = []
    for program in PROGRAMS:
        for _ in range(3):
            results += program(on_tensors, torch.from_numpy)
    results.clear()  # views of tensors' own memory among them keep the tensors, not these arrays
    gc.collect()
    unique = list({id(x): x for x in given}.values())
    given.clear()
    assert unique
    for x in unique:
        if x.size:
            assert x.base is MEMORY
            # `unique`, `x` and the argument of the question; the function's own forms; pools that are known.
            assert sys.getrefcount(x) <= 4 + holders(x)


def holders(x):
    """How many known pools, which hold no memory either, have an array."""
    of_pools = sum(1 for _, kept in user_buffers._pools.values() for y in kept if y is x)
    words = sum(
        1
        for pool, _ in user_buffers._pools.values()
        for side in (pool.k_buffer, pool.v_buffer)
        for y in (side.words, side.scales)
        if y is x or y.base is x
    )
    return of_pools + words
