"""`arrays` and `reserve` of layers and `KVCache`: a user's own kernels, and whole loops in them."""

import functools

import naive
import numpy as np
import pytest
import tolerances
from numba import cuda, njit
from own_code import as_stored

import numkv
from numkv import device
from numkv.storage.own_kernels import Uploads

F32 = np.float32
HEADS, DIM = 2, 8


def rows(n, dim=DIM, salt=0):
    return np.random.default_rng([n, dim, salt]).standard_normal((2, n, HEADS, dim), F32)


# ---------------------------------------------------------------- a whole decode loop


@functools.cache
def decode_loop(kind):
    """Compiled code that stores tokens, attends to all of them after each, and moves the lengths."""
    store, load = device.store_row(kind), device.load_row(kind)
    slot_of = device.slot_of

    @njit
    def attend(a, q, out):
        length, group = a.context_lens[0], q.shape[0] // a.k.shape[1]
        scores, row = np.empty(length), np.empty(q.shape[1], np.float32)
        for h in range(q.shape[0]):
            most = -np.inf
            for p in range(length):
                slot = slot_of(a.block_table[0], p, a.k.shape[2])
                if not load(a.k, a.k_scale, slot, h // group, row):
                    return False
                score = 0.0
                for d in range(len(row)):
                    score += np.float64(row[d]) * q[h, d]
                scores[p] = score / np.sqrt(len(row))
                most = max(most, scores[p])
            total = 0.0
            out[h] = 0
            for p in range(length):
                slot = slot_of(a.block_table[0], p, a.k.shape[2])
                if not load(a.v, a.v_scale, slot, h // group, row):
                    return False
                weight = np.exp(scores[p] - most)
                total += weight
                for d in range(len(row)):
                    out[h, d] += weight * row[d]
            out[h] /= total
        return True

    @njit
    def decode(layers, lengths, k, v, q, out):
        """All tokens of ``k[layer, token]`` into `layers`; `lengths` is moved when all layers have one."""
        for t in range(k.shape[1]):
            for i in range(len(layers)):
                a = layers[i]
                position = a.context_lens[0]
                slot = slot_of(a.block_table[0], position, a.k.shape[2])
                for h in range(k.shape[2]):
                    if not store(k[i, t, h], a.k, a.k_scale, slot, h):
                        return t
                    if not store(v[i, t, h], a.v, a.v_scale, slot, h):
                        return t
                a.context_lens[0] = position + 1
                if not attend(a, q[i, t], out[i, t]):
                    return t
            if len(lengths):
                lengths[0] += 1
        return k.shape[1]

    return decode


TOKENS = 1000
#: Kinds that the same loop is compiled for again.
LIKE_IT = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp16", "int4")]


def tokens_of(layers, q_heads=2):
    numbers = np.random.default_rng(TOKENS)
    k, v = numbers.standard_normal((2, layers, TOKENS, 1, DIM), F32)
    return k, v, numbers.standard_normal((layers, TOKENS, q_heads, DIM), F32)


def assert_attends(kind, mine, its, k, v, q):
    """Results of the loop and of Python steps agree, and some of them with the oracle over stored values."""
    bound = tolerances.attention(kind, "fp32")
    tolerances.assert_rows_close(mine, its, 2 * bound)
    k, v = (as_stored(x, kind).swapaxes(0, 1)[None] for x in (k, v))
    for t in (0, 15, 16, TOKENS - 1):
        want, _ = naive.attention(q[t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], [t + 1])
        tolerances.assert_rows_close(mine[t : t + 1], want, bound)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", *LIKE_IT])
def test_a_decode_loop_over_a_paged_layer(kind):
    """Blocks in an order of their own, from a pool that another layer uses too."""
    pool = numkv.PagedPool(80, 16, 1, DIM, kind=kind)
    other, layer, steps = (numkv.PagedLayer(64, 16, 1, DIM, pool=pool) for _ in range(3))
    other.append(*rows(3)[:, :, :1])
    layer.take_blocks([70, 5, 33])
    k, v, q = tokens_of(1)
    free = pool.blocks.num_free
    layer.reserve(TOKENS)
    assert free - pool.blocks.num_free == 63 - 3
    assert (len(layer), len(layer.block_indices)) == (0, 63)
    layer.check()
    out = np.empty((1, TOKENS, 2, DIM), F32)
    assert decode_loop(kind)((layer.arrays,), np.empty(0, np.int64), k, v, q, out) == TOKENS
    assert len(layer) == TOKENS
    layer.check()
    pool.check()
    steps = numkv.PagedLayer(63, 16, 1, DIM, kind=kind)
    its = np.empty_like(out[0])
    for t in range(TOKENS):
        steps.append(k[0, t : t + 1], v[0, t : t + 1])
        its[t] = steps.decode_attention(q[0, t : t + 1])[0]
    for name in ("k", "v", "k_scale", "v_scale"):
        mine, theirs = (getattr(x, name) for x in (layer, steps))
        if mine.size:
            assert np.array_equal(mine[layer.block_indices], theirs[steps.block_indices]), name
    assert_attends(kind, out[0], its, k[0], v[0], q[0])
    last = q[0, -3:]
    assert np.array_equal(layer.decode_attention(last), steps.decode_attention(last))
    layer.truncate(20)
    assert (pool.blocks.num_free, layer.block_indices) == (80 - 1 - 2, [70, 5])
    other.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", *LIKE_IT])
def test_a_decode_loop_over_a_cache(kind):
    cache, steps = (numkv.KVCache(2, 1, DIM, kind=kind) for _ in "ab")
    k, v, q = tokens_of(2)
    cache.reserve(TOKENS)
    layers = tuple(cache.arrays(layer) for layer in range(2))
    out = np.empty((2, TOKENS, 2, DIM), F32)
    assert decode_loop(kind)(layers, cache.lengths, k, v, q, out) == TOKENS
    assert len(cache) == TOKENS
    assert all(cache.arrays(layer).k is arrays.k for layer, arrays in enumerate(layers))
    cache.check()
    its = np.empty_like(out)
    for t in range(TOKENS):
        for layer in range(2):
            steps.append(layer, k[layer, t], v[layer, t])
            its[layer, t] = steps.decode_attention(layer, q[layer, t])
        steps.advance()
    for layer in range(2):
        assert np.array_equal(cache.k(layer), steps.k(layer))
        assert np.array_equal(cache.v(layer), steps.v(layer))
        assert_attends(kind, out[layer], its[layer], k[layer], v[layer], q[layer])
        last = q[layer, -3:]
        mine, theirs = (x.decode_attention(layer, last) for x in (cache, steps))
        assert np.array_equal(mine, theirs)
    cache.append(0, k[0, 0], v[0, 0])  # Python goes on where the loop ended
    assert len(cache.k(0)) == TOKENS + 1


@pytest.mark.slow
def test_a_loop_ends_where_the_memory_does():
    """Nothing is written past it, and the length says how far the loop came."""
    layer = numkv.PagedLayer(4, 16, 1, DIM, kind="int8")
    layer.reserve(20)
    k, v, q = tokens_of(1)
    out = np.empty((1, TOKENS, 2, DIM), F32)
    assert decode_loop("int8")((layer.arrays,), np.empty(0, np.int64), k, v, q, out) == 32
    assert (len(layer), layer.block_indices) == (32, [0, 1])
    assert not layer.k[2:].any()
    layer.check()


# ---------------------------------------------------------------- what the arrays are


def make(name, target):
    if name == "KVCache":
        return numkv.KVCache(2, HEADS, DIM, kind="int8", target=target)
    if name == "PagedLayer":
        pool = numkv.PagedPool(9, 4, HEADS, DIM, kind="int8", target=target)
        pool.blocks.allocate(2)
        return numkv.PagedLayer(5, 4, HEADS, DIM, pool=pool)
    return numkv.ContiguousLayer(20, HEADS, DIM, kind="int8", target=target)


def append(cache, to, new):
    k, v = (to(x) for x in new)
    if isinstance(cache, numkv.KVCache):
        for layer in range(2):
            cache.append(layer, k, v)
    else:
        cache.append(k, v)


def arrays_of(cache):
    return cache.arrays(1) if isinstance(cache, numkv.KVCache) else cache.arrays


NAMES = ["ContiguousLayer", "PagedLayer", "KVCache"]


@functools.cache
def sums_of_keys(target):
    """A user's kernel: the sum of each head's stored keys."""
    load, slot_of = device.load_row("int8"), device.slot_of

    def sums(a, out, row, h):
        for d in range(out.shape[1]):
            out[h, d] = 0
        for p in range(a.context_lens[0]):
            if load(a.k, a.k_scale, slot_of(a.block_table[0], p, a.k.shape[2]), h, row):
                for d in range(out.shape[1]):
                    out[h, d] += row[d]

    if target == "cpu":
        of_head = njit(sums)

        @njit
        def on_cpu(a, out):
            for h in range(out.shape[0]):
                of_head(a, out, np.empty(out.shape[1], np.float32), h)

        return on_cpu
    of_head = cuda.jit(device=True)(sums)

    @cuda.jit
    def kernel(a, out):
        of_head(a, out, cuda.local.array(DIM, np.float32), cuda.threadIdx.x)

    return lambda a, out: kernel[1, out.shape[0]](a, out)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_users_kernels_read_what_is_stored(name, target, to, host):
    cache, new = make(name, target), rows(11)
    want = 0
    for part in (slice(0, 1), slice(1, 6), slice(6, 11)):
        append(cache, to, new[:, part])
        want = want + as_stored(new[0, part], "int8").sum(axis=0)
        out = to(np.ones((HEADS, DIM), F32))
        sums_of_keys(target)(arrays_of(cache), out)
        assert np.allclose(host(out), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_fields_of_arrays(name, target, to, host):
    cache = make(name, target)
    append(cache, to, rows(5))
    a = arrays_of(cache)
    heads, size = a.k.shape[1], a.k.shape[2]
    assert (a.k.dtype, a.k_scale.dtype, heads) == (np.int8, F32, HEADS)
    assert (a.block_table.dtype, a.block_table.ndim, len(a.block_table)) == (np.int32, 2, 1)
    assert host(a.context_lens).tolist() == [5]
    assert a.slots.dtype == np.int64
    assert len(a.slots) == 0
    table = host(a.block_table)[0]
    assert table[: -(-5 // size)].tolist() == {
        "ContiguousLayer": [0], "PagedLayer": [2, 3], "KVCache": [1]
    }[name]  # fmt: skip
    codes, scales = naive.int8_quantise(rows(5)[0])
    for p in range(5):
        block, offset = table[p // size], p % size
        assert np.array_equal(host(a.k)[block, :, offset], codes[p])
        assert np.array_equal(host(a.k_scale)[block, :, offset], scales[p])


@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_up_to_date(name, target, to, host):
    cache = make(name, target)
    append(cache, to, rows(3))
    a = arrays_of(cache)
    assert arrays_of(cache).context_lens is a.context_lens or target == "cpu"
    append(cache, to, rows(2))  # into the memory that is there
    if target == "cpu":
        assert a.context_lens.tolist() == [5]
    else:
        assert host(arrays_of(cache).context_lens).tolist() == [5]
    a = arrays_of(cache)
    append(cache, to, rows(15))  # a growth, of all but the contiguous layer
    b = arrays_of(cache)
    if name != "KVCache" and target == "cpu":
        assert b.k is a.k
        assert np.array_equal(a.block_table, b.block_table)
    assert host(b.context_lens).tolist() == [20]


def test_arrays_of_a_pool(target, host):
    pool = numkv.PagedPool(3, 2, HEADS, DIM, kind="bf16", target=target)
    a = pool.arrays
    assert a.k.dtype == np.uint16
    assert (a.block_table.shape, a.context_lens.shape, a.slots.shape) == ((0, 0), (0,), (0,))
    assert a.k is pool.pool.k


def test_code_writes_lengths_and_no_tables():
    """The table that is given is read-only, and the length is checked when it is used next."""
    for cache in (make(name, "cpu") for name in NAMES):
        append(cache, np.asarray, rows(3))
        a = arrays_of(cache)
        with pytest.raises(ValueError, match="read-only"):
            a.block_table[0, 0] = 7
        a.context_lens[0] = 2
        arrays_of(cache)
        cache.check()
        a.context_lens[0] = 10**6
        with pytest.raises(numkv.NumkvError, match="context_lens"):
            cache.check()
        cache.clear()
        cache.check()
        assert len(cache) == 0


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_a_length_that_code_moved_too_far_is_refused(bad):
    cache = numkv.KVCache(2, HEADS, DIM, kind="int8")
    append(cache, np.asarray, rows(3))
    cache.advance(2)
    cache.lengths[0] = bad
    q = np.ones((1, HEADS, DIM), F32)
    for use in (
        lambda: len(cache), lambda: cache.advance(0), lambda: cache.truncate(0), cache.check,
        lambda: cache.compact([0]), cache.copy,
    ):  # fmt: skip
        with pytest.raises(numkv.NumkvError, match="lengths"):
            use()
    cache.decode_attention(0, q)  # goes by the rows of its layer
    cache.lengths[0] = 3
    assert len(cache) == 3
    cache.check()


def test_a_written_table_is_seen_after_arrays_too():
    layer = make("PagedLayer", "cpu")
    append(layer, np.asarray, rows(3))
    _ = layer.arrays
    layer._table[0] = 7  # as code could that goes by addresses
    for use in (lambda: len(layer), lambda: append(layer, np.asarray, rows(1)), layer.check):
        with pytest.raises(numkv.NumkvError, match="block_table"):
            use()
    layer.clear()
    layer.check()


@pytest.mark.parametrize("name", NAMES)
def test_full_precision_tokens_have_no_arrays(name):
    args = (2, HEADS, DIM) if name == "KVCache" else (4, HEADS, DIM)
    if name == "PagedLayer":
        args = (4, 2, HEADS, DIM)
    cache = getattr(numkv, name)(*args, kind="int8", full_precision=numkv.FullPrecision(2))
    for use in (lambda: arrays_of(cache), lambda: cache.jit):
        with pytest.raises(numkv.NotSupported, match="full-precision"):
            use()
    if name == "KVCache":
        with pytest.raises(numkv.NotSupported, match="lengths"):
            _ = cache.lengths


class Elsewhere:
    """A target that host memory is uploaded to."""

    values_on_host = False

    def index(self, numbers, dtype):
        return np.array(numbers, dtype)


def test_an_upload_serves_until_its_numbers_change():
    uploads, table = Uploads(Elsewhere()), np.arange(6, dtype=np.int32).reshape(2, 3)
    first = uploads.of("table", table)
    assert np.array_equal(first, table)
    assert not np.shares_memory(first, table)
    assert uploads.of("table", table.copy()) is first
    lens = uploads.of("lens", table)
    assert lens is not first
    table[1, 2] = 9
    for changed in (table, table.reshape(3, 2)):  # the same bytes in another shape
        found = uploads.of("table", changed)
        assert found.shape == changed.shape
        assert np.array_equal(found, changed)
    assert first[1, 2] == 5
    assert uploads.of("lens", np.arange(6, dtype=np.int32).reshape(2, 3)) is lens


# ---------------------------------------------------------------- room for tokens to come


def test_reserve_makes_room_in_a_cache(target, to, host):
    cache = numkv.KVCache(2, HEADS, DIM, kind="int8", target=target)
    cache.append(0, *map(to, rows(3)))
    cache.reserve(100)
    assert cache.capacity >= 103
    k = cache.arrays(1).k
    cache.append(0, *map(to, rows(100)))
    cache.append(1, *map(to, rows(103)))
    assert cache.arrays(1).k is k
    want = as_stored(np.concatenate([rows(3)[0], rows(100)[0]]), "int8")
    assert np.array_equal(host(cache.k(0)), want)
    cache.reserve(0)
    assert cache.arrays(1).k is k


def test_reserve_keeps_to_the_bound():
    cache = numkv.KVCache(2, HEADS, DIM, max_seq_len=8)
    cache.append(1, *rows(3))
    cache.reserve(5)
    with pytest.raises(numkv.CacheFull, match="layer 1"):
        cache.reserve(6)
    cache.append(1, *rows(5))
    for n in (-1, 1.5, "1"):
        with pytest.raises((numkv.DimensionMismatch, TypeError), match="`n`"):
            cache.reserve(n)
    numkv.KVCache(0, 1, 1).reserve(10)


def test_reserve_takes_blocks_all_or_none(target):
    pool = numkv.PagedPool(5, 2, HEADS, DIM, target=target)
    layer, other = (numkv.PagedLayer(4, 2, HEADS, DIM, pool=pool) for _ in "ab")
    other.seq_len = 3
    layer.reserve(5)
    assert (pool.blocks.num_free, layer.block_indices, len(layer)) == (0, [2, 3, 4], 0)
    layer.check()
    layer.reserve(6)
    for n in (7, 9):  # beyond the pool, beyond the table
        with pytest.raises(numkv.CacheFull):
            layer.reserve(n)
        assert layer.block_indices == [2, 3, 4]
    layer.seq_len = 2  # gives back
    assert layer.block_indices == [2]
    layer.reserve(3)
    assert len(layer.block_indices) == 3
    layer.truncate(2)
    assert (layer.block_indices, pool.blocks.num_free) == ([2], 2)
    layer.reserve(3)
    layer.clear()  # keeps
    assert (len(layer), len(layer.block_indices)) == (0, 3)
    layer.free()
    assert (layer.block_indices, pool.blocks.num_free) == ([], 3)
    pool.check()


def test_reserve_of_a_contiguous_layer_is_a_look():
    layer = numkv.ContiguousLayer(4, HEADS, DIM)
    layer.append(*rows(1))
    layer.reserve(3)
    with pytest.raises(numkv.CacheFull):
        layer.reserve(4)


# ---------------------------------------------------------------- blocks of the caller's choice


def test_a_layer_takes_the_blocks_it_is_told(target, to, host):
    pool = numkv.PagedPool(8, 2, HEADS, DIM, kind="int8", target=target)
    layer = numkv.PagedLayer(5, 2, HEADS, DIM, pool=pool)
    layer.take_blocks([6, 1])
    layer.take_blocks(np.array([4]))
    assert (layer.block_indices, pool.blocks.num_free, len(layer)) == ([6, 1, 4], 5, 0)
    layer.append(*map(to, rows(7)))  # the fourth block is the pool's choice
    assert layer.block_indices == [6, 1, 4, 0]
    layer.check()
    codes = naive.int8_quantise(rows(7)[0])[0]
    for p, block in enumerate([6, 6, 1, 1, 4, 4, 0]):
        assert np.array_equal(host(layer.k)[block, :, p % 2], codes[p])
    want, _ = naive.attention(
        np.ones((1, 2, DIM), F32), *(as_stored(x, "int8").swapaxes(0, 1)[None] for x in rows(7)), [7]
    )  # fmt: skip
    got = host(layer.decode_attention(to(np.ones((1, 2, DIM), F32))))
    tolerances.assert_rows_close(got, want, tolerances.attention("int8", "fp32"))


BAD_IDS = {
    "in use": ([3, 0], numkv.CacheFull), "twice": ([5, 5], numkv.NumkvError), "negative": ([-1], IndexError),
    "past the pool": ([8], IndexError), "too many": ([2, 3, 4, 5], numkv.CacheFull),
    "floats": ([1.5], numkv.UnsupportedDType), "two axes": ([[1]], numkv.DimensionMismatch),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_IDS)
def test_blocks_that_cannot_be_had_change_nothing(case):
    ids, error = BAD_IDS[case]
    pool = numkv.PagedPool(8, 2, HEADS, DIM)
    layer, other = (numkv.PagedLayer(4, 2, HEADS, DIM, pool=pool) for _ in "ab")
    other.append(*rows(1))
    layer.append(*rows(2))
    with pytest.raises(error):
        layer.take_blocks(ids)
    assert (layer.block_indices, pool.blocks.num_free) == ([1], 6)
    layer.check()
    pool.check()
