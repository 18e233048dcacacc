"""`arrays(layer)` of multi-sequence caches: a user's own kernels read rows of cells, on both targets."""

import naive
import numpy as np
import pytest
import tolerances
from numba import cuda, njit

import numkv
from numkv import device, targets

F32 = np.float32
HEADS, DIM, DIM_V = 2, 8, 4
CACHES = {
    "causal": lambda: numkv.CausalCache(),
    "sliding": lambda: numkv.CausalCache(window_left=3),
    "chunked": lambda: numkv.CausalCache(chunk_size=4),
}


def rows(n, salt):
    """K and V of tokens."""
    rng = np.random.default_rng([n, salt])
    return [rng.standard_normal((n, HEADS, dim), F32) for dim in (DIM, DIM_V)]


class Filled:
    """A cache of two sequences whose tokens were put interleaved, and what each has: K and V by position."""

    def __init__(self, target, name, kind):
        where = targets.get(target)
        self.to, self.host = where.asarray, where.to_host
        self.cache = CACHES[name]()
        self.cache.init(kind, 2, 16, 8, target)
        self.rows = {}

    def step(self, positions, sequences, salt=0):
        self.cache.start_forward(numkv.Batch(positions, sequences))
        k, v = rows(len(positions), salt)
        self.cache.put(0, self.to(k), self.to(v))
        for i, place in enumerate(zip(sequences, positions, strict=True)):
            self.rows[place] = k[i], v[i]

    def expected(self, seq, kind):
        """K and V ``(n, heads, dim)`` of a sequence, as the kind stores them."""
        held = [self.rows[seq, int(p)] for p in self.cache.positions(seq)]
        if kind == "int8":
            return [
                naive.int8_dequantise(*naive.int8_quantise(np.stack(x)))
                for x in zip(*held, strict=True)
            ]
        return [
            naive.round_to(np.stack(x), kind).astype(np.float64) for x in zip(*held, strict=True)
        ]


def filled(target, name="causal", kind="int8"):
    made = Filled(target, name, kind)
    made.step([0, 0, 1, 1, 2], [7, 3, 7, 3, 7])
    made.step([2, 4, 3], [3, 7, 7], salt=1)  # out of order
    return made


LOAD = device.load_row("int8")


@njit
def read_on_cpu(arrays, k_out, v_out):
    """Rows of all sequences, as a function of a user reads them."""
    size = arrays.k.shape[2]
    for s in range(len(arrays.context_lens)):
        for position in range(arrays.context_lens[s]):
            slot = device.slot_of(arrays.block_table[s], position, size)
            for h in range(arrays.k.shape[1]):
                LOAD(arrays.k, arrays.k_scale, slot, h, k_out[s, position, h])
                LOAD(arrays.v, arrays.v_scale, slot, h, v_out[s, position, h])


@cuda.jit
def read_kernel(arrays, k_out, v_out):
    """The same, a thread block for each sequence."""
    s, position = cuda.blockIdx.x, cuda.threadIdx.x
    if position < arrays.context_lens[s]:
        slot = device.slot_of(arrays.block_table[s], position, arrays.k.shape[2])
        for h in range(arrays.k.shape[1]):
            LOAD(arrays.k, arrays.k_scale, slot, h, k_out[s, position, h])
            LOAD(arrays.v, arrays.v_scale, slot, h, v_out[s, position, h])


def read_on_cuda(arrays, k_out, v_out):
    read_kernel[arrays.block_table.shape](arrays, k_out, v_out)


READ = {"cpu": read_on_cpu, "cuda": read_on_cuda}


def read(target, arrays):
    """Rows of all sequences, read by a kernel that is not numkv's."""
    where, table = targets.get(target), arrays.block_table.shape
    out = [where.zeros((*table, HEADS, dim), F32) for dim in (DIM, DIM_V)]
    READ[target](arrays, *out)
    return [where.to_host(x) for x in out]


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_own_kernels_read_the_rows_of_each_sequence(target, name):
    """And attend by them in float64 as `decode_attention` does."""
    on = filled(target, name)
    arrays = on.cache.arrays(0)
    k, v = read(target, arrays)
    lens = on.host(arrays.context_lens)
    assert on.cache.sequences == [7, 3]
    for s, seq in enumerate(on.cache.sequences):
        assert lens[s] == len(on.cache.positions(seq))
        for got, want in zip((k, v), on.expected(seq, "int8"), strict=True):
            assert np.allclose(got[s, : lens[s]], want, rtol=1e-6, atol=1e-7)
    q = np.random.default_rng(1).standard_normal((3, 4, DIM), F32)
    out = on.host(on.cache.decode_attention(0, on.to(q)))
    positions, sequences = [2, 4, 3], [3, 7, 7]
    reach = {"causal": lambda p: 0, "sliding": lambda p: p - 3, "chunked": lambda p: p - p % 4}[
        name
    ]
    for i, (position, seq) in enumerate(zip(positions, sequences, strict=True)):
        s, held = on.cache.sequences.index(seq), on.cache.positions(seq)
        visible = np.flatnonzero((held <= position) & (held >= reach(position)))
        for h in range(4):
            want, _ = naive.attention_row(
                q[i, h].astype(np.float64), k[s, visible, h // 2].astype(np.float64),
                v[s, visible, h // 2].astype(np.float64), 1 / np.sqrt(DIM), 0.0, None,
            )  # fmt: skip
            tolerances.assert_rows_close(out[i, h], want, tolerances.attention("int8", "fp32"))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8_e4m3", "int8", "int4"])
def test_fields(target, kind):
    """Every cell is a block of one token; words, on the target, and of length 0 what does not apply."""
    on = Filled(target, "causal", kind)
    dims = (64, 32) if kind == "int4" else (DIM, DIM_V)
    on.cache.start_forward(numkv.Batch([0, 1], [5, 5]))
    k, v = (np.random.default_rng(0).standard_normal((2, HEADS, dim), F32) for dim in dims)
    on.cache.put(0, on.to(k), on.to(v))
    arrays, of, cells = on.cache.arrays(0), numkv.kind(kind), on.cache.num_cells
    for words, scales, dim in zip(arrays[:2], arrays[2:4], dims, strict=True):
        assert words.shape == (cells, HEADS, 1, of.words_per_row(dim))
        assert words.dtype == of.word
        assert tuple(scales.shape) == of.scale_shape((cells, HEADS, 1), dim)
        assert scales.dtype == of.scale_word
    assert on.host(arrays.block_table).tolist() == [[0, 1]]
    assert on.host(arrays.context_lens).tolist() == [2]
    assert on.host(arrays.slots).tolist() == [0, 1]
    dtypes = [x.dtype for x in arrays[4:]]
    assert dtypes == [np.int32, np.int64, np.int64]
    # The rows are those of the cache: cell by cell what `get` shows, for floats.
    if of.is_float and of.scales_per == "none":
        shown = on.host(on.cache.get(0)[0])
        got = on.host(targets.get(target).typed(arrays.k, of.dtype))
        assert np.array_equal(got[:2, :, 0].astype(F32), shown[:2].astype(F32))
    on.cache.clear()
    empty = on.cache.arrays(0)
    assert [len(x) for x in empty[4:]] == [0, 0, 0]


def test_slots_are_of_the_pass(target):
    on = filled(target)
    slots = on.host(on.cache.arrays(0).slots)
    held = {
        int(c): p
        for s in (7, 3)
        for c, p in zip(on.cache._cells.owned(s), on.cache.positions(s), strict=True)
    }
    assert [held[int(c)] for c in slots] == [2, 4, 3]
    on.cache.start_forward(numkv.Batch([5], [7]), reserve=True)
    assert len(on.cache.arrays(0).slots) == 0


def test_there_are_new_ones_after_changes(target):
    """One object as long as nothing has changed; another after every change of cells."""
    on = filled(target)
    cache, seen = on.cache, []

    def given():
        arrays = cache.arrays(0)
        assert cache.arrays(0) is arrays
        assert not any(arrays is x for x in seen)
        seen.append(arrays)
        return arrays

    before = given()
    q = on.to(np.ones((3, 4, DIM), F32))
    cache.decode_attention(0, q)
    cache.set_causal([0])
    cache.put(1, *(on.to(x) for x in rows(3, 0)))
    assert cache.arrays(0) is before
    assert cache.arrays(1).block_table is before.block_table  # uploaded once
    on.step([5], [7])
    for change in (
        lambda: cache.remove(3, 1), lambda: cache.copy_prefix(7, 9, 2),
        lambda: cache.compact(9, [0]), lambda: cache.clear(),
    ):  # fmt: skip
        given()
        change()
    assert given() is not before


def test_writes_through_arrays_are_the_caches(target):
    """On the CPU the buffers are shared, tables are copies."""
    if target == "cuda":
        pytest.skip("kernels write there: see the test of reading")
    on = filled(target, kind="fp32")
    arrays = on.cache.arrays(0)
    arrays.k[:] = 2
    arrays.block_table[:] = -5
    assert np.all(on.cache.get(0)[0] == 2)
    on.cache.check()


def test_a_layer_that_was_never_put(target):
    on = filled(target)
    with pytest.raises(IndexError, match="layer"):
        on.cache.arrays(4)
    with pytest.raises(TypeError, match="`layer`"):
        on.cache.arrays(0.0)


@pytest.mark.slow
def test_encoder(target):
    where = targets.get(target)
    cache = numkv.EncoderCache()
    cache.init("int8", 1, 8, 4, target)
    cache.start_forward(numkv.Batch([0], [0], [0]))
    k, v = rows(5, 0)
    cache.put(0, where.asarray(k), where.asarray(v))
    arrays = cache.arrays(0)
    got = read(target, arrays)
    for mine, x in zip(got, (k, v), strict=True):
        want = naive.int8_dequantise(*naive.int8_quantise(x))
        assert np.allclose(mine[0], want, rtol=1e-6, atol=1e-7)
    cache.put(0, where.asarray(k + 1), where.asarray(v))
    assert cache.arrays(0) is arrays  # rows are in the same place
    cache.put(0, where.asarray(k[:2].copy()), where.asarray(v[:2].copy()))
    assert cache.arrays(0).k.shape == (2, HEADS, 1, DIM)
    assert len(cache.arrays(0).slots) == 0


def test_wrapper_asks_the_layers_child(target):
    where = targets.get(target)
    children = numkv.CausalCache(window_left=1), numkv.CausalCache()
    cache = numkv.WrapperCache(*children, layer_types=[0, 1])
    cache.init("int8", 1, 8, 4, target)
    cache.start_forward(numkv.Batch([0, 1, 2], [0] * 3))
    for layer in range(2):
        cache.put(layer, *map(where.asarray, rows(3, layer)))
    before = cache.arrays(1)
    cache.start_forward(numkv.Batch([3], [0]))
    assert cache.arrays(1) is not before
    for layer, n in ((0, 2), (1, 4)):
        assert cache.arrays(layer) is children[layer].arrays(layer)
        assert where.to_host(cache.arrays(layer).context_lens).tolist() == [n]


@pytest.mark.slow
def test_jit_is_one_object(target):
    on = filled(target)
    cells = on.cache.jit
    on.step([5], [7])
    assert on.cache.jit is cells
    other = on.cache.copy()  # it is made anew there
    assert other.jit is not cells
    on.cache.clear()
    assert on.cache.jit is cells
    assert not cells.num_sequences.any()
