"""`layer.jit`: the structure that a user's own nopython code works on."""

import copy
import pickle

import naive
import numpy as np
import pytest
import tolerances
from numba import njit
from own_code import as_stored

import numkv
from numkv.storage import jit_views

KINDS = [*naive.DTYPES, *naive.EVERYWHERE]
#: Those that are tried beside another one too, or are stored like one of them: each layer of one kind is compiled anew.
IN_PAIRS = ["bf16", "fp16", "fp32", "fp64", "int4", "int8"]


@njit
def append_all(cache, k, v):
    for t in range(k.shape[0]):
        if not cache.append(k[t], v[t]):
            return t
    return k.shape[0]


@njit
def read_all(cache, k, v):
    for t in range(k.shape[0]):
        for h in range(k.shape[1]):
            cache.load_k(t, h, k[t, h])
            cache.load_v(t, h, v[t, h])


@njit
def slots(cache, positions):
    out = np.empty(len(positions), np.int64)
    for i in range(len(positions)):
        out[i] = cache.slot(positions[i])
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        *((k, k) for k in KINDS if k not in IN_PAIRS),
        *(pytest.param((k, k), marks=pytest.mark.nightly) for k in IN_PAIRS),
        ("bf16", "int8"),
        ("int4", "fp32"),
    ],
    ids="-".join,
)
def test_own_code_appends_and_reads(rng, kinds):
    """Rows appended in nopython mode are the layer's rows, and are read back as float32."""
    layer = numkv.ContiguousLayer(6, 2, 4, k_kind=kinds[0], v_kind=kinds[1])
    k, v = (rng.standard_normal((5, 2, 4), np.float32) for _ in "kv")
    layer.append(k[:2], v[:2])
    assert append_all(layer.jit, k[2:], v[2:]) == 3
    assert layer.seq_len == 5
    twin = numkv.ContiguousLayer(6, 2, 4, k_kind=kinds[0], v_kind=kinds[1])
    twin.append(k, v)
    for mine, its in ((layer.k, twin.k), (layer.v, twin.v), (layer.k_scale, twin.k_scale),
                      (layer.v_scale, twin.v_scale)):  # fmt: skip
        assert np.array_equal(mine, its)
    got_k, got_v = np.zeros((2, 5, 2, 4), np.float32)
    read_all(layer.jit, got_k, got_v)
    assert np.array_equal(got_k, as_stored(k, kinds[0]))
    assert np.array_equal(got_v, as_stored(v, kinds[1]))
    if kinds[0] == kinds[1]:
        q = rng.standard_normal((1, 2, 4), np.float32)
        out, _ = naive.attention(q, *(x.swapaxes(0, 1)[None] for x in (got_k, got_v)), [5])
        bound = tolerances.attention(kinds[0], "fp32")
        tolerances.assert_rows_close(layer.decode_attention(q), out, bound)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp16", "int4"])
def test_a_paged_layer(rng, kind):
    """Own code follows the block table, as far as the layer has blocks."""
    pool = numkv.PagedPool(6, 3, 2, 4, kind=kind)
    other, layer = (numkv.PagedLayer(4, 3, 2, 4, pool=pool) for _ in "ab")
    rows = rng.standard_normal((9, 2, 4), np.float32)
    other.append(rows[:2], rows[:2])
    layer.append(rows[:4], -rows[:4])
    others = other.k[other.block_indices[0]].copy()
    jit = layer.jit
    assert jit.block_table.tolist() == layer.block_table.tolist()
    size, (first, second) = 3, layer.block_indices
    assert slots(jit, np.array([0, 2, 5])).tolist() == [
        first * size, first * size + 2, second * size + 2
    ]  # fmt: skip
    before, free = pool.pool.k.copy(), pool.blocks.num_free
    assert append_all(jit, rows[4:], -rows[4:]) == 2  # the second block has two places left
    assert (layer.seq_len, pool.blocks.num_free) == (6, free)
    untouched = [b for b in range(6) if b != second]
    assert np.array_equal(pool.pool.k[untouched], before[untouched])
    layer.append(rows[6:], -rows[6:])
    got_k, got_v = np.zeros((2, 9, 2, 4), np.float32)
    read_all(layer.jit, got_k, got_v)
    assert np.array_equal(got_k, as_stored(rows, kind))
    assert np.array_equal(got_v, as_stored(-rows, kind))
    assert np.array_equal(other.k[other.block_indices[0]], others)


@pytest.mark.slow
def test_fields_are_the_layers_buffers():
    layer = numkv.ContiguousLayer(6, 2, 4, kind="bf16")
    rows = np.ones((3, 2, 4), np.float32)
    layer.append(rows, rows)
    jit = layer.jit
    assert jit is layer.jit  # made once
    assert jit.k.dtype == jit.v.dtype == np.uint16
    assert jit.k.shape == (1, 2, 6, 4)
    assert np.shares_memory(jit.k, layer.k)
    assert np.shares_memory(jit.v, layer.v)
    assert jit.block_table.tolist() == [0]
    assert jit.context_lens.tolist() == [3]
    layer.truncate(1)
    assert jit.context_lens.tolist() == [1]


@pytest.mark.slow
def test_slots():
    layer = numkv.ContiguousLayer(6, 2, 4)
    assert slots(layer.jit, np.array([0, 3, 5])).tolist() == [0, 3, 5]


@pytest.mark.slow
def test_own_code_cannot_write_past_the_capacity():
    """An append without room says so and writes nothing."""
    layer = numkv.ContiguousLayer(2, 1, 4, kind="fp32")
    rows = np.ones((3, 1, 4), np.float32)
    assert append_all(layer.jit, rows, rows) == 2
    assert layer.seq_len == 2
    layer.truncate(1)
    assert append_all(layer.jit, 2 * rows, rows) == 1
    assert layer.k[0, 0, :, 0].tolist() == [1, 2]


@njit
def step(cache, k, v):
    """One token into every layer, then on: a user's own decode loop."""
    for layer in range(len(cache.context_lens)):
        if not cache.append(layer, k, v):
            return False
    return cache.advance(1)


@njit
def load(cache, layer, position, out):
    cache.load_k(layer, position, 0, out[0])
    cache.load_v(layer, position, 0, out[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["int8", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("bf16", "int4"))]
)
def test_a_cache_of_all_layers(rng, kind):
    cache = numkv.KVCache(2, 1, 4, kind=kind, max_seq_len=2)
    k, v = rng.standard_normal((2, 1, 4), np.float32)
    assert step(cache.jit, k, v)
    assert len(cache) == 1
    assert np.array_equal(cache.k(1)[0].astype(np.float32), as_stored(k, kind))
    cache.append(0, v, k)
    assert not cache.jit.advance(1)  # layer 1 is not there yet
    out = np.zeros((2, 4), np.float32)
    load(cache.jit, 0, 1, out)
    assert np.array_equal(out[0], as_stored(v[0], kind))
    assert np.array_equal(out[1], as_stored(k[0], kind))
    assert not step(cache.jit, k, v)  # layer 0 is full


@pytest.mark.slow
def test_a_cache_that_grew_has_new_buffers():
    cache, rows = numkv.KVCache(1, 1, 2), np.ones((200, 1, 2), np.float32)
    cache.append(0, rows[:1], rows[:1])
    before = cache.jit.k
    cache.append(0, rows, rows)
    assert cache.jit.k.shape[2] >= 201
    assert not np.shares_memory(before, cache.jit.k)
    assert cache.jit.context_lens.tolist() == [201]


@pytest.mark.slow
def test_a_copy_leaves_the_structure_of_the_original_in_use():
    cache, rows = numkv.KVCache(1, 1, 4, max_seq_len=3), np.ones((1, 4), np.float32)
    view = cache.jit
    assert step(view, rows, rows)
    twin = cache.copy()
    assert step(view, 2 * rows, rows)
    assert step(twin.jit, 3 * rows, rows)
    assert cache.jit is view
    assert cache.k(0)[:, 0, 0].tolist() == [1, 2]
    assert twin.k(0)[:, 0, 0].tolist() == [1, 3]


@pytest.mark.slow
def test_on_cuda_it_holds_the_host_side():
    """Block table and lengths; the device buffers lie beside it, on the object."""
    from numkv import targets

    rows = targets.get("cuda").asarray(np.ones((3, 2, 4), np.float32))
    layer = numkv.ContiguousLayer(6, 2, 4, target="cuda")
    layer.append(rows, rows)
    assert layer.jit.block_table.tolist() == [0]
    assert layer.jit.context_lens.tolist() == [3]
    cache = numkv.KVCache(1, 2, 4, target="cuda")
    cache.append(0, rows, rows)
    assert cache.jit.context_lens.tolist() == [3]


# ---------------------------------------------------------------- what they refuse


@njit
def append_row(layer, k, v):
    return layer.append(k, v)


@njit
def load_layer(layer, position, head, out, of_v):
    if of_v:
        layer.load_v(position, head, out)
    else:
        layer.load_k(position, head, out)


@njit
def append_cache(cache, layer, k, v):
    return cache.append(layer, k, v)


@njit
def load_cache(cache, layer, position, head, out, of_v):
    if of_v:
        cache.load_v(layer, position, head, out)
    else:
        cache.load_k(layer, position, head, out)


def row(dim, heads=2):
    return np.ones((heads, dim), np.float32)


def nan(dim):
    found = row(dim)
    found[1, dim - 1] = np.nan
    return found


BAD_ROWS = [
    (row(5), row(6), numkv.DimensionMismatch), (row(3), row(6), numkv.DimensionMismatch),
    (row(4), row(4), numkv.DimensionMismatch), (row(4, 1), row(6), numkv.DimensionMismatch),
    (row(4), row(6, 3), numkv.DimensionMismatch), (nan(4), row(6), numkv.NonFiniteInput),
    (row(4), nan(6) * np.inf, numkv.NonFiniteInput),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("which", ["layer", "cache"])
def test_rows_that_do_not_fit_are_refused(which):
    if which == "layer":
        one = numkv.ContiguousLayer(6, 2, 4, kind="int8", head_dim_v=6)
        append, load, first = append_row, load_layer, ()
    else:
        one = numkv.KVCache(2, 2, 4, kind="int8", max_seq_len=6, head_dim_v=6)
        append, load, first = append_cache, load_cache, (1,)
    jit = one.jit
    assert append(jit, *first, row(4), row(6))
    before = [jit.k.copy(), jit.v.copy(), jit.k_scale.copy(), jit.context_lens.copy()]
    for k, v, error in BAD_ROWS:
        with pytest.raises(error):
            append(jit, *first, k, v)
    for got, want in zip([jit.k, jit.v, jit.k_scale, jit.context_lens], before, strict=True):
        assert np.array_equal(got, want)
    for position, head, dim, error in (
        (-1, 0, 4, IndexError), (1, 0, 4, IndexError), (2**40, 0, 4, IndexError),
        (0, -1, 4, IndexError), (0, 2, 4, IndexError), (0, 0, 5, numkv.DimensionMismatch),
    ):  # fmt: skip
        for of_v in (False, True):
            out = np.zeros(dim + 2 * of_v, np.float32)
            with pytest.raises(error):
                load(jit, *first, position, head, out, of_v)
            assert not out.any()
    if which == "cache":
        for layer in (-1, 2):
            assert not append(jit, layer, row(4), row(6))
            with pytest.raises(IndexError, match="layer"):
                load(jit, layer, 0, 0, np.zeros(4, np.float32), False)
    out = np.zeros(6, np.float32)
    load(jit, *first, 0, 1, out, True)
    assert np.array_equal(out, as_stored(row(6), "int8")[1])
    one.check()


def test_slots_outside_are_minus_one():
    layer = numkv.PagedLayer(4, 3, 2, 4)
    layer.append(*np.ones((2, 4, 2, 4), np.float32))
    positions = np.array([-1, 0, 5, 6, 12, 2**40])
    first, second = layer.block_indices
    assert slots(layer.jit, positions).tolist() == [-1, 3 * first, 3 * second + 2, -1, -1, -1]


@pytest.mark.slow
def test_spoilt_tables_and_lengths_are_not_followed():
    layer = numkv.PagedLayer(4, 3, 2, 4, kind="int8")
    layer.append(*np.ones((2, 4, 2, 4), np.float32))
    jit, out = layer.jit, np.zeros(4, np.float32)
    jit.block_table[0] = 10**6
    with pytest.raises(numkv.NumkvError, match="block_table"):
        load_layer(jit, 0, 0, out, False)
    jit.block_table[1] = 10**6
    assert not append_row(jit, row(4), row(4))
    layer.clear()  # mends the table
    for length in (10**6, -1):
        jit.context_lens[0] = length
        assert not append_row(jit, row(4), row(4))
    with pytest.raises(IndexError):
        load_layer(jit, 0, 0, out, False)
    layer.clear()
    assert append_row(jit, row(4), row(4))
    layer.check()


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda x: x.copy(), copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("name", ["ContiguousLayer", "PagedLayer", "KVCache"])
def test_an_object_with_a_view_can_be_copied(name, make):
    """The view stays the original's; a copy has its own when it is asked for."""
    sizes = {"ContiguousLayer": (6, 2, 4), "PagedLayer": (3, 2, 2, 4), "KVCache": (1, 2, 4)}
    one = getattr(numkv, name)(*sizes[name], kind="int8")
    first = (0,) if name == "KVCache" else ()
    one.append(*first, row(4)[None], row(4)[None])
    one.reserve(1)
    jit = one.jit
    other = make(one)
    other = pickle.loads(other) if isinstance(other, bytes) else other
    append = append_cache if first else append_row
    assert append(jit, *first, row(4), row(4))
    assert one.jit is jit
    other.reserve(1)
    before = jit.k.copy()
    assert append(other.jit, *first, 3 * row(4), row(4))
    assert np.array_equal(jit.k, before)
    for x in (one, other):
        assert x.jit.context_lens.tolist() == [2]
        x.check()


@pytest.mark.slow
def test_advance_is_exact():
    cache = numkv.KVCache(1, 2, 4, kind="int8", max_seq_len=3)
    cache.append(0, row(4), row(4))
    advance = njit(lambda cache, n: cache.advance(n))
    for n in (2, 2**63 - 1, -1, -(2**63)):
        assert not advance(cache.jit, n)
    assert advance(cache.jit, 1)
    assert not advance(cache.jit, 2**63 - 1)
    assert len(cache) == 1


def test_who_waits_is_told(caplog, monkeypatch):
    """Once: Numba keeps no jitclass on disk, so the first one of each process takes seconds."""
    monkeypatch.setattr(jit_views, "_compiled", set())
    caplog.set_level("INFO", "numkv.kernels")
    for _ in range(2):
        assert numkv.ContiguousLayer(4, 1, 8, target="cuda").jit.context_lens[0] == 0
    assert [r.getMessage() for r in caplog.records][:1] == [
        "compiling HostStruct, for functions of yours"
    ]
    assert len(caplog.records) == 2  # and how long it took
