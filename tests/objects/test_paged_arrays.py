"""`arrays` of a `PagedKVCache` and of its steps: what a user's own kernels read and write."""

import functools
import pickle
import resource
import sys
from pathlib import Path

import naive
import numpy as np
import pytest
from numba import cuda, float32, njit
from paged_caches import fill, grow, make, queries, refused, rows, started
from users_kernels import lse_of_kind, store_of_kind

import numkv
from numkv import targets

HEADS, Q_HEADS, DIM = 2, 4, 8
SCALE = DIM**-0.5
TEXT = list(range(7))


def on_host(target, arrays):
    return arrays._replace(
        **{n: targets.get(target).to_host(x) for n, x in arrays._asdict().items()}
    )


@functools.cache
def attending_function():
    lse = lse_of_kind("int8")

    @njit
    def attend(arrays, q, out):
        row = np.empty(DIM, np.float32)
        for seq in range(q.shape[0]):
            for head in range(q.shape[1]):
                out[seq, head] = lse(arrays, q[seq, head], SCALE, seq, head // 2, row)

    return attend


@functools.cache
def attending_kernel():
    lse = lse_of_kind("int8")

    @cuda.jit
    def kernel(arrays, q, out):
        row = cuda.local.array(DIM, float32)
        seq, head = cuda.blockIdx.x, cuda.threadIdx.x
        if seq < q.shape[0] and head < q.shape[1]:
            out[seq, head] = lse(arrays, q[seq, head], SCALE, seq, head // 2, row)

    return kernel


def run_lse(target, arrays, q):
    """lse ``(num_seqs, num_q_heads)`` of a query for each sequence, by a user's kernel."""
    if target == "cpu":
        out = np.empty(q.shape[:2], np.float32)
        attending_function()(arrays, q, out)
        return out
    out = cuda.device_array(q.shape[:2], np.float32)
    attending_kernel()[q.shape[0], q.shape[1]](arrays, cuda.to_device(q), out)
    return out.copy_to_host()


@pytest.mark.slow
def test_a_users_kernel_attends(target, to, host):
    """Over int8 rows that lie in forked, shared and scattered blocks, as float64 and `decode_attention` do."""
    cache = make(kind="int8", target=target)
    first = started(cache, to, TEXT)
    other = started(cache, to, [9, 8, 7])
    fork = cache.fork(first)
    grow(cache, to, fork, [*TEXT, 50, 51, 52])
    again = cache.add(TEXT)
    assert cache.cached_len(again) == 6
    grow(cache, to, again, [*TEXT[:6], 60, 61])
    cache.remove(first)
    texts = {other: [9, 8, 7], fork: [*TEXT, 50, 51, 52], again: [*TEXT[:6], 60, 61]}
    assert cache.sequences == tuple(texts)
    q = queries(len(texts))
    for layer in range(2):
        got = run_lse(target, cache.arrays(layer), q)
        _, lse = cache.decode_attention(layer, cache.sequences, to(q), return_lse=True)
        for i, text in enumerate(texts.values()):
            x = naive.dequantise(*naive.quantise(rows(layer, text), "int8"))
            k, v = x.transpose(0, 2, 1, 3)[:, None]
            _, want = naive.attention(q[i : i + 1], k, v, [len(text)])
            np.testing.assert_allclose(got[i], np.reshape(want, -1), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(host(lse), got, atol=2e-3)


@functools.cache
def storing_function():
    put = store_of_kind("int8")

    @njit
    def store(arrays, k, v):
        stored = 0
        for token in range(k.shape[0]):
            for head in range(k.shape[1]):
                stored += put(arrays, k, v, token, head)
        return stored

    return store


@functools.cache
def storing_kernel():
    put = store_of_kind("int8")

    @cuda.jit
    def kernel(arrays, k, v):
        put(arrays, k, v, cuda.blockIdx.x, cuda.threadIdx.x)

    return kernel


def run_store(target, arrays, k, v):
    if target == "cpu":
        assert storing_function()(arrays, k, v) == k.shape[0] * k.shape[1]
    else:
        grid = storing_kernel()[k.shape[0], k.shape[1]]
        grid(arrays, cuda.to_device(k), cuda.to_device(v))


@pytest.mark.slow
def test_a_users_kernel_writes_a_step(target, to, host):
    caches = [make(kind="int8", target=target) for _ in range(2)]
    for cache in caches:
        started(cache, to, TEXT[:3])
        started(cache, to, [9, 8])
    mine, theirs = caches
    steps = [cache.reserve([1, 0], [2, 3]) for cache in caches]
    texts, starts = [[9, 8, 7, 6], TEXT[:6]], [2, 3]
    for layer in range(2):
        k, v = np.concatenate([rows(layer, t, n) for t, n in zip(texts, starts, strict=True)], 1)
        k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        steps[0].append(layer, to(k), to(v))
        run_store(target, steps[1].arrays(layer), k, v)
        assert steps[1].unwritten_layers == [0, 1][layer:]
        steps[1].mark_written(layer)
    for cache, step in zip(caches, steps, strict=True):
        cache.commit(step, token_ids=[7, 6, *TEXT[3:6]])
    for one, other in zip(mine._pools, theirs._pools, strict=True):
        for a, b in zip(*(map(x.target.to_host, x.arrays()) for x in (one, other)), strict=True):
            assert np.array_equal(a, b)
    theirs.check()


def test_what_a_step_gives(target, to):
    cache = make(4, windows=[-1, 3, -1, 3], target=target)
    a, b = cache.add(), cache.add()
    fill(cache, [a, b], [9, 2])
    step = cache.reserve([b, a], [2, 1])
    for layer in range(4):
        given = on_host(target, step.arrays(layer))
        assert [x.dtype for x in given[4:]] == [np.int32, np.int32, np.int64]
        assert given.context_lens.tolist() == [4, 10]
        tables = [cache.block_table(seq, layer) for seq in (b, a)]
        for row, table in zip(given.block_table, tables, strict=True):
            assert row.tolist() == table.tolist() + [-1] * (len(row) - len(table))
        slots = [
            table[p // 2] * 2 + p % 2
            for table, p in zip(tables[:1] * 2 + tables[1:], (2, 3, 9), strict=True)
        ]
        assert given.slots.tolist() == slots
        assert given.k.shape == (32, HEADS, 2, DIM)
        assert given.k_scale.size == 0
    assert (cache.block_table(a, 1)[:2] == -1).all()
    assert (cache.block_table(a, 0) >= 0).all()
    given = step.arrays(0)
    given.block_table[:] = to(np.full(given.block_table.shape, 10**6, np.int32))  # a copy
    for layer in range(4):
        step.append(layer, *(to(np.zeros((3, HEADS, DIM), np.float32)) for _ in range(2)))
    step.attention(0, to(queries(3)))
    cache.rollback(step)
    refused(cache, numkv.NumkvError, "open step", step.arrays, 0)
    refused(cache, numkv.NumkvError, "open step", step.mark_written, 0)
    refused(cache, IndexError, "`layer`", cache.arrays, 4)
    refused(cache, IndexError, "`layer`", cache.block_table, a, -1)


def test_tables_are_those_of_the_moment(target, to):
    cache = make(target=target)
    seq = started(cache, to, TEXT)
    fork = cache.fork(seq)
    for change in (
        lambda: cache.add(),
        lambda: cache.fork(seq),
        lambda: cache.commit(cache.reserve([seq], 0)),
        lambda: cache.truncate(seq, 5),
        lambda: cache.compact(fork, [0, 2, 4]),
        lambda: cache.remove(fork),
        lambda: cache.clear(),
    ):
        given = cache.arrays(0)
        again = cache.arrays(0)
        if target == "cuda":  # not uploaded once more
            assert given.block_table is again.block_table
        change()
        lens = on_host(target, cache.arrays(0)).context_lens
        assert lens.tolist() == [cache.length(x) for x in cache.sequences]
    given = on_host(target, cache.arrays(0))
    assert given.block_table.shape == (0, 0)
    assert given.context_lens.shape == given.slots.shape == (0,)


def test_a_tables_copy_is_the_callers(to):
    cache = make()
    seq = started(cache, np.asarray, TEXT)
    cache.block_table(seq, 0)[:] = 99
    cache.arrays(0).block_table[:] = 99
    cache.check()
    assert cache.arrays(0).block_table.max() < 32
    assert pickle.loads(pickle.dumps(cache)).arrays(0).block_table.shape == (1, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_arrays_begin_at_a_huge_page_and_take_memory_when_they_are_written():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    cache = numkv.PagedKVCache(16, 2, 64, kind="int8", num_blocks=128)
    for layer in range(16):
        k, v, k_scale, v_scale = cache.arrays(layer)[:4]
        assert k.nbytes == 2 << 20
        assert k.ctypes.data % (2 << 20) == v.ctypes.data % (2 << 20) == 0
        assert k_scale.ctypes.data % 64 == v_scale.ctypes.data % 64 == 0
    assert resident() - before < cache.nbytes / 4
