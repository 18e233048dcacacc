"""Layers, `PagedPool` and `KVCache` as a whole: copies, pickles, `clear`, `check`, V rows of another width."""

import copy
import pickle

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import described
from own_code import as_stored
from pickles import sent

import numkv
from numkv.arrays import owned

F32 = np.float32
HEADS, DIM, DIM_V = 2, 8, 6
#: What is copied: a class, and options.
WHOLES = {
    "contiguous": ("ContiguousLayer", {"kind": "int8"}),
    "contiguous window": ("ContiguousLayer", {"kind": "int4", "full_precision": numkv.FullPrecision(3, 1)}),
    "contiguous rotated": ("ContiguousLayer", {"kind": "fp16", "rotate": True}),
    "contiguous fp8": ("ContiguousLayer", {"kind": "fp8_e4m3"}),
    "paged": ("PagedLayer", {"kind": "int4"}),
    "paged window": ("PagedLayer", {"kind": "int8", "full_precision": numkv.FullPrecision(3)}),
    "paged fp8": ("PagedLayer", {"kind": "fp8_e4m3"}),
    "shared": ("shared", {"kind": "int8"}),
    "shared window": ("shared", {"kind": "int8", "full_precision": numkv.FullPrecision(3)}),
    "cache": ("KVCache", {"kind": "int8"}),
    "cache window": ("KVCache", {"kind": "int4", "full_precision": numkv.FullPrecision(3, 1)}),
    "cache fp8": ("KVCache", {"kind": "fp8_e4m3"}),
    "cache bound": ("KVCache", {"kind": "bf16", "max_seq_len": 24, "rotate": True}),
}  # fmt: skip


def rows(n, salt=0):
    numbers = np.random.default_rng([n, salt])
    return [numbers.standard_normal((n, HEADS, dim), F32) for dim in (DIM, DIM_V)]


def make(name, target="cpu"):
    cls, options = WHOLES[name]
    options = options | {"target": target, "head_dim_v": DIM_V}
    if cls == "KVCache":
        made = numkv.KVCache(2, HEADS, DIM, **options)
    elif cls == "ContiguousLayer":
        made = numkv.ContiguousLayer(24, HEADS, DIM, **options)
    else:
        pool = None
        if cls == "shared":
            of_pool = {n: options.pop(n) for n in ("kind", "target")}
            pool = numkv.PagedPool(30, 2, HEADS, DIM, head_dim_v=DIM_V, **of_pool)
            pool.blocks.allocate(3)
        made = numkv.PagedLayer(12, 2, HEADS, DIM, pool=pool, **options)
    if "fp8" in name:
        for layer in layers(made):
            made.set_scales(*layer, k=np.array([0.5, 2], F32), v=0.25)
    return made


def layers(one):
    return [(0,), (1,)] if isinstance(one, numkv.KVCache) else [()]


def append(one, to, n, salt=0):
    for layer in layers(one):
        one.append(*layer, *(to(x) for x in rows(n, salt + sum(layer))))
    if isinstance(one, numkv.KVCache):
        one.advance(n)


def seen(one, host, to):
    """What attention over it gives, bit for bit, and its length."""
    q = to(np.ones((1, HEADS, DIM), F32))
    found = [host(one.decode_attention(*layer, q)).tobytes() for layer in layers(one)]
    return len(one), found


@pytest.mark.parametrize("name", WHOLES)
def test_a_copy_is_equal_and_apart(target, to, host, name):
    one = make(name, target)
    append(one, to, 7)
    before = seen(one, host, to)
    other = one.copy()
    assert type(other) is type(one)
    assert seen(other, host, to) == before
    append(other, to, 2, salt=5)
    other.check()
    assert seen(one, host, to) == before
    longer = seen(other, host, to)
    assert longer != before
    append(one, to, 4, salt=9)
    one.check()
    assert seen(other, host, to) == longer
    if "fp8" in name:
        for x in (one, other):
            x.truncate(0)
        if isinstance(one, numkv.PagedLayer):
            one.free()
        for layer in layers(one):
            one.set_scales(*layer, k=7.0)
        append(other, to, 7)
        assert seen(other, host, to) == before


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", ["contiguous", "shared window", "cache"])
def test_the_copy_module_makes_such_copies(name, how):
    one = make(name)
    append(one, np.asarray, 7)
    other = how(one)
    one.clear()
    append(one, np.asarray, 7, salt=1)
    twin = make(name)
    append(twin, np.asarray, 7)
    assert seen(other, np.asarray, np.asarray) == seen(twin, np.asarray, np.asarray)
    assert getattr(other, "pool", None) is getattr(one, "pool", None)
    pool = numkv.PagedPool(3, 2, HEADS, DIM)
    assert how(pool).blocks.num_blocks == 3
    assert not np.shares_memory(how(pool).pool.k, pool.pool.k)


@pytest.mark.parametrize("name", WHOLES)
def test_a_pickle_is_equal_and_apart(name, to, host, target):
    one = make(name, target)
    append(one, to, 7)
    if target == "cuda":
        with pytest.raises(numkv.NotSupported, match="CPU"):
            pickle.dumps(one)
        return
    before = seen(one, host, to)
    other = sent(one)
    one.clear()
    assert seen(other, host, to) == before
    other.check()
    append(other, to, 2, salt=5)
    twin = make(name)
    append(twin, to, 7)
    append(twin, to, 2, salt=5)
    assert seen(other, host, to) == seen(twin, host, to)
    assert described(other).kind is described(one).kind  # kinds are this process's own
    assert (described(other), other.nbytes) == (described(one), one.nbytes)


def test_layers_of_one_pickle_share_their_pool():
    pool = numkv.PagedPool(8, 2, HEADS, DIM)
    a, b = (numkv.PagedLayer(4, 2, HEADS, DIM, pool=pool) for _ in "ab")
    for layer in (a, b):
        layer.append(*np.ones((2, 3, HEADS, DIM), F32))
    other_pool, c, d = pickle.loads(pickle.dumps((pool, a, b)))
    assert c.pool is d.pool is other_pool
    c.append(*np.ones((2, 2, HEADS, DIM), F32))
    assert not set(c.block_indices) & set(d.block_indices)
    assert (other_pool.blocks.num_free, pool.blocks.num_free) == (3, 4)
    for x in (other_pool, c, d):
        x.check()


def test_a_copy_on_a_shared_pool_takes_blocks_of_it(target, to, host):
    pool = numkv.PagedPool(7, 2, HEADS, DIM, kind="int8", target=target)
    layer = numkv.PagedLayer(5, 2, HEADS, DIM, pool=pool)
    k, _ = rows(5)
    layer.append(to(k), to(k))
    layer.reserve(3)  # blocks without tokens are not copied
    other = layer.copy()
    assert other.pool is pool
    assert (len(other.block_indices), pool.blocks.num_free) == (3, 0)
    assert not set(other.block_indices) & set(layer.block_indices)
    for which in ("k", "k_scale", "v", "v_scale"):
        mine, its = (host(getattr(layer, which))[x.block_indices[:3]] for x in (layer, other))
        assert mine[:2].tobytes() == its[:2].tobytes()
        assert mine[2, :, :1].tobytes() == its[2, :, :1].tobytes()
    with pytest.raises(numkv.CacheFull):
        layer.copy()
    assert pool.blocks.num_free == 0
    for x in (pool, layer, other):
        x.check()
    other.free()
    assert pool.blocks.num_free == 3
    assert len(layer) == 5


def test_a_failed_copy_gives_its_blocks_back(monkeypatch):
    layer = make("shared")
    append(layer, np.asarray, 5)
    free = layer.pool.blocks.num_free

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(layer._pool), "copy_tokens", fails)
        with pytest.raises(MemoryError):
            layer.copy()
    assert layer.pool.blocks.num_free == free
    layer.check()


def test_a_pool_copies_blocks_and_books(target, to, host):
    pool = numkv.PagedPool(6, 2, HEADS, DIM, kind="fp8_e4m3", target=target)
    pool.set_scales(k=0.5)
    layer = numkv.PagedLayer(4, 2, HEADS, DIM, pool=pool)
    k, _ = rows(5)
    layer.append(to(k), to(k))
    other = pool.copy()
    for mine, its in zip(pool.pool.arrays(), other.pool.arrays(), strict=True):
        assert np.array_equal(host(mine), host(its))
    assert (other.blocks.num_free, layer.pool) == (3, pool)
    layer.free()
    assert (pool.blocks.num_free, other.blocks.num_free) == (6, 3)
    pool.set_scales(k=4.0)
    assert host(other.pool.k_scale).tolist() == [0.5] * HEADS
    other.blocks.release([0, 1, 2])
    for x in (pool, other):
        x.check()


def test_clearing_a_pool(target):
    pool = numkv.PagedPool(6, 2, HEADS, DIM, target=target)
    ids = pool.blocks.allocate(2)
    names = np.arange(64, dtype=np.uint8).reshape(2, 32)
    pool.blocks.register(ids, names, [1, 2, 3, 4])
    with pytest.raises(numkv.NumkvError, match=r"clear: .* got 2"):
        pool.clear()
    pool.blocks.release(ids)
    assert pool.blocks.stats().cached == 2
    pool.clear()
    assert (pool.blocks.stats().cached, pool.blocks.num_free) == (0, 6)
    pool.check()


def test_scales_of_a_pool_with_cached_prefixes_stay():
    """Blocks that are free but can still be found hold rows of these scales."""
    pool = numkv.PagedPool(6, 2, HEADS, DIM, kind="fp8_e4m3")
    ids = pool.blocks.allocate(1)
    pool.blocks.register(ids, np.zeros((1, 32), np.uint8), [1, 2])
    pool.blocks.release(ids)
    with pytest.raises(numkv.NumkvError, match="cached"):
        pool.set_scales(k=2.0)
    pool.clear()
    pool.set_scales(k=2.0)


@pytest.mark.parametrize("name", WHOLES)
def test_clear_keeps_memory(name, target, to, host):
    one = make(name, target)
    append(one, to, 7)
    before, nbytes = seen(one, host, to), one.nbytes
    free = one.pool.blocks.num_free if isinstance(one, numkv.PagedLayer) else 0
    one.clear()
    assert len(one) == 0
    one.check()
    append(one, to, 7)
    assert (seen(one, host, to), one.nbytes) == (before, nbytes)
    if isinstance(one, numkv.PagedLayer):
        assert one.pool.blocks.num_free == free


# ---------------------------------------------------------------- what `check` finds


def spoil_room(layer):
    layer._room += 2


def spoil_twice(layer):
    layer._ids[1] = layer._ids[0]


def spoil_references(layer):
    layer.pool.blocks.release(layer.block_indices[:1])


def spoil_tail(layer):
    layer._ids[-1] = 3


def spoil_scale(layer):
    layer._pool.k_scale[layer._ids[1], 1, 0] = np.nan


DAMAGES = {
    spoil_room: "room", spoil_twice: "once each", spoil_references: "in use", spoil_tail: "past block",
    spoil_scale: "position 2",
}  # fmt: skip


@pytest.mark.parametrize("spoil", DAMAGES)
def test_check_says_what_is_wrong_with_a_layer(spoil):
    layer = make("shared")
    append(layer, np.asarray, 7)
    layer.check()
    spoil(layer)
    with pytest.raises(numkv.NumkvError, match=DAMAGES[spoil]):
        layer.check()


def test_check_says_what_is_wrong_with_a_cache():
    def broken(change, match):
        cache = make("cache")
        append(cache, np.asarray, 5)
        cache.check()
        change(cache)
        with pytest.raises(numkv.NumkvError, match=match):
            cache.check()

    def length(cache):
        cache._length[0] = 6

    def lengths(cache):
        cache._lengths[1] = 400

    def room(cache):
        cache._room += 1

    def scale(cache):
        cache._pool.v_scale[1, 0, 4] = np.inf

    broken(length, "at most 5 rows")
    broken(lengths, "layer 1")
    broken(room, "buffers for")
    broken(scale, "position 4 of layer 1")


@pytest.mark.parametrize("name", ["contiguous fp8", "paged fp8", "cache fp8"])
def test_check_looks_at_scales_of_heads(name):
    one = make(name)
    one._pool.v_scale[1] = 0
    with pytest.raises(numkv.NumkvError, match="scales of v"):
        one.check()


@pytest.mark.parametrize("name", ["contiguous window", "paged window", "cache window"])
def test_check_counts_tokens_in_full_precision(name):
    one = make(name)
    append(one, np.asarray, 9)
    one.check()
    one._full_precision._end[-1] -= 1  # one token more than there are places
    with pytest.raises(numkv.NumkvError, match="full precision"):
        one.check()


def test_rows_that_were_not_looked_at_are_found():
    layer = make("contiguous")
    k, v = rows(3)
    k[1, 0, 0] = np.nan
    layer.append(k, v, check_finite=False)
    layer.truncate(1)
    layer.check()
    layer.append(k[1:], v[1:], check_finite=False)
    layer._pool.k_scale[0, 0, 1] = np.nan  # int8 stores NaN as 0
    with pytest.raises(numkv.NumkvError, match="position 1 of layer 0"):
        layer.check()


# ---------------------------------------------------------------- V rows of another width


@pytest.mark.parametrize("name", ["contiguous", "paged", "shared", "paged window"])
def test_v_rows_of_another_width(name, target, to, host):
    layer = make(name, target)
    assert (layer.head_dim, layer.spec.head_dim_v) == (DIM, DIM_V)
    assert f"head_dim_v={DIM_V}" in repr(layer)
    append(layer, to, 7)
    q = np.random.default_rng(1).standard_normal((2, 4, DIM), F32)
    k, v = rows(7)
    if not layer.spec.full_precision:
        k, v = (as_stored(x, layer.spec.kind.name) for x in (k, v))
    want, _ = naive.attention(q, *(x.swapaxes(0, 1)[None] for x in (k, v)), [7], [0, 2])
    got = host(layer.decode_attention(to(q)))
    assert got.shape == (2, 4, DIM_V)
    bound = tolerances.attention(layer.spec.kind.name, "fp32")
    tolerances.assert_rows_close(got, want, 0.05 if layer.spec.full_precision else bound)
    before = len(layer)
    k, v = (to(x[:1]) for x in rows(7))
    for bad in (v, k), (v, v), (k, k):
        with pytest.raises(numkv.DimensionMismatch):
            layer.append(*bad)
    assert len(layer) == before
    layer.compact([0, 3, 6])
    layer.check()
    assert len(layer) == 3


def test_a_layer_must_have_the_v_rows_of_its_pool():
    pool = numkv.PagedPool(4, 2, HEADS, DIM, head_dim_v=DIM_V)
    assert f"head_dim_v={DIM_V}" in repr(pool)
    assert numkv.PagedLayer(2, 2, HEADS, DIM, pool=pool).spec.head_dim_v == DIM_V
    with pytest.raises(numkv.DimensionMismatch, match="`head_dim_v`"):
        numkv.PagedLayer(2, 2, HEADS, DIM, pool=pool, head_dim_v=DIM)
    sizes = {numkv.ContiguousLayer: (2,), numkv.PagedPool: (2, 2), numkv.PagedLayer: (2, 2)}
    for cls, args in sizes.items():
        assert cls(*args, HEADS, DIM).spec.head_dim_v == DIM
        with pytest.raises(numkv.DimensionMismatch, match="`head_dim_v`"):
            cls(*args, HEADS, DIM, head_dim_v=0)


def test_what_is_one_in_a_pickle_stays_one():
    """Read-only arrays of a state are copied once, lists and dictionaries once, too."""
    x, y = np.arange(3), np.arange(4)
    x.flags.writeable = False
    state = {"a": [x, y], "b": (x, y), "c": {"d": x}}
    state["e"] = state["a"]
    found = owned(state)
    assert found["e"] is found["a"]
    assert found["a"][0] is found["b"][0] is found["c"]["d"] is not x
    assert found["a"][1] is found["b"][1] is y
    assert found["a"][0].flags.writeable
    np.testing.assert_array_equal(found["a"][0], x)
