"""`PagedLayer` and `PagedPool`: blocks of one pool, shared by layers of different sequences."""

import inspect

import naive
import numpy as np
import pytest
import tolerances
from worked import OUT, K, Q, V

import numkv

KINDS = [*naive.DTYPES, "int8"]
F32 = np.float32


def pool_that_gives(blocks, num_blocks, block_size, heads, dim, **kw):
    """A pool that hands out the given blocks first, in this order."""
    pool = numkv.PagedPool(num_blocks, block_size, heads, dim, **kw)
    taken = pool.blocks.allocate(num_blocks)
    rest = [b for b in taken.tolist() if b not in blocks]
    for block in rest + list(reversed(blocks)):
        pool.blocks.release(np.array([block], np.int32))
    return pool


def layer_with(blocks, block_size, heads, dim, *, num_blocks=None, **kw):
    """A layer that will have the given blocks."""
    size = max(blocks) + 1 if num_blocks is None else num_blocks
    pool = pool_that_gives(blocks, size, block_size, heads, dim, **kw)
    return numkv.PagedLayer(len(blocks), block_size, heads, dim, pool=pool)


def stored(layer, host):
    """K, V and their scales of the cached tokens, ``(num_kv_heads, tokens, ...)``; no scales: None."""
    table, n, out = layer.block_table[None], [layer.seq_len], []
    for name in ("k", "v", "k_scale", "v_scale"):
        x = host(getattr(layer, name))
        out.append(naive.gather(x, table, n)[0] if x.size else None)
    return out


def values(layer, host):
    """The same as float64, dequantised, with an axis of one sequence."""
    k, v, k_scale, v_scale = stored(layer, host)
    if k_scale is not None:
        k, v = naive.int8_dequantise(k, k_scale), naive.int8_dequantise(v, v_scale)
    return k[None], v[None]


def state(layer, host):
    """Everything that a failed call must leave alone."""
    buffers = [naive.words(host(x)).copy() for x in (layer.k, layer.v)]
    buffers += [host(x).copy() for x in (layer.k_scale, layer.v_scale)]
    return [
        *buffers, layer.context_lens.copy(), layer.block_table.copy(), layer.block_indices,
        layer.pool.blocks.num_free,
    ]  # fmt: skip


def assert_same(a, b):
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("kind", KINDS)
def test_fresh(target, host, kind):
    layer = numkv.PagedLayer(4, 16, 2, 8, kind=kind, target=target)
    assert (layer.seq_len, len(layer), layer.capacity, layer.block_size) == (0, 0, 64, 16)
    assert (layer.num_kv_heads, layer.head_dim, layer.is_paged) == (2, 8, True)
    assert layer.block_table.tolist() == [-1] * 4
    assert layer.block_table.dtype == layer.context_lens.dtype == np.int32
    assert (layer.block_indices, layer.context_lens.tolist()) == ([], [0])
    assert host(layer.k).shape == (4, 2, 16, 8)
    assert host(layer.k).dtype == (np.int8 if kind == "int8" else naive.DTYPES[kind])
    assert host(layer.k_scale).size == (4 * 2 * 16 if kind == "int8" else 0)
    assert layer.nbytes == 64 * numkv.kind(kind).bytes_per_token(2, 8)
    assert (layer.spec.kind.name, layer.spec.v_kind.name, layer.target) == (kind, kind, target)
    layer.pool.check()


def test_kind_and_pool_defaults():
    assert numkv.PagedLayer(1, 1, 1, 1).spec.kind.name == "fp16"
    assert inspect.signature(numkv.PagedPool).parameters["kind"].default == "fp16"
    pool = numkv.PagedPool(3, 2, 1, 4, kind="bf16", v_kind="int8")
    layer = numkv.PagedLayer(2, 2, 1, 4, pool=pool)
    assert (layer.spec.kind.name, layer.spec.v_kind.name, layer.pool) == ("bf16", "int8", pool)
    assert "bf16/int8" in repr(pool)
    assert "bf16/int8" in repr(layer)
    assert (pool.blocks.num_blocks, pool.blocks.num_free, pool.nbytes) == (3, 3, 6 * (8 + 4 + 4))


def test_a_layer_must_fit_its_pool():
    pool = numkv.PagedPool(3, 2, 1, 4, kind="bf16", v_kind="int8")
    fine = {"kind": "bfloat16", "v_kind": "int8", "target": "cpu"}
    numkv.PagedLayer(9, 2, 1, 4, pool=pool, **fine)  # more blocks than the pool has is fine
    for name, arguments, changes in (
        ("block_size", (2, 3, 1, 4), {}),
        ("num_kv_heads", (2, 2, 2, 4), {}),
        ("head_dim", (2, 2, 1, 5), {}),
        ("k_kind", (2, 2, 1, 4), {"kind": "fp16"}),
        ("v_kind", (2, 2, 1, 4), {"kind": "bf16"}),
        ("target", (2, 2, 1, 4), {"target": "cuda"}),
    ):
        with pytest.raises(numkv.DimensionMismatch, match=f"^`{name}`: expected .*got") as caught:
            numkv.PagedLayer(*arguments, pool=pool, **changes)
        assert caught.value.expected != caught.value.actual


@pytest.mark.parametrize("sizes", [(4, 0, 1, 1), (4, 16, 0, 1), (4, 16, 1, 0), (-1, 16, 1, 1)])
def test_bad_sizes(target, sizes):
    for make in (numkv.PagedLayer, numkv.PagedPool):
        with pytest.raises(numkv.DimensionMismatch):
            make(*sizes, target=target)


# ---------------------------------------------------------------- where tokens go

WRITES = [  # tokens, length before, qk_mode, block table, first and last flat slot
    (5, 11, 1, [3, 4, 5, 6], (59, 63)),
    (7, 33, 2, [5, 1, 4, 0, 2, 3], (65, 71)),
]


@pytest.mark.parametrize(("tokens", "before", "mode", "blocks", "slots"), WRITES)
def test_the_reference_systems_writes(target, to, host, tokens, before, mode, blocks, slots):
    """The flat slots written, and the same numbers as in a contiguous layer."""
    q_heads, heads, dim, size = 8, 2, (128 if target == "cpu" else 8), 16
    i = np.arange(tokens * (q_heads + 2 * heads) * dim)
    qkv = (0.3 * np.sin(0.011 * i + 0.2)).astype(F32).reshape(tokens, -1)
    d, angle = np.arange(dim), 0.001 * np.arange(64 * dim // 2).reshape(64, -1)
    q_w, k_w = 1 + 0.1 * np.cos(0.05 * d), 1 + 0.1 * np.sin(0.07 * d)
    arrays = {"cos": np.cos(angle), "sin": np.sin(angle)}
    if mode == 1:
        arrays |= {"q_norm_weight": q_w, "k_norm_weight": k_w}
    options = {n: to(x.astype(F32)) for n, x in arrays.items()}
    options |= {"num_q_heads": q_heads, "qk_mode": mode, "eps": 1e-6}

    layer = layer_with(blocks, size, heads, dim, num_blocks=8, kind="fp32", target=target)
    other = numkv.ContiguousLayer(64, heads, dim, kind="fp32", target=target)
    layer.seq_len = other.seq_len = before
    q, same_q = layer.write(to(qkv), **options), other.write(to(qkv), **options)
    used = -(-(before + tokens) // size)
    assert layer.block_indices == blocks[:used]
    assert layer.block_table.tolist() == blocks[:used] + [-1] * (len(blocks) - used)
    assert layer.seq_len == before + tokens

    flat = host(layer.k).swapaxes(1, 2).reshape(-1, heads, dim)
    written = np.flatnonzero(flat.any(axis=(1, 2)))
    assert written.tolist() == list(range(slots[0], slots[1] + 1))
    want_q, want_k, want_v = naive.write(
        qkv, q_heads, heads, dim, mode, np.cos(angle), np.sin(angle), q_w, k_w, 1e-6, before
    )
    assert np.allclose(host(q), want_q, rtol=0, atol=1e-6)
    assert np.array_equal(host(q), host(same_q))
    for which, want in (("k", want_k), ("v", want_v)):
        got = naive.gather(host(getattr(layer, which)), layer.block_table[None], [layer.seq_len])
        same = host(getattr(other, which))[:, :, : layer.seq_len]
        assert np.allclose(got[0, :, before:].swapaxes(0, 1), want, rtol=0, atol=1e-5)
        assert np.array_equal(got, same)


LAYOUTS = [("cpu", kind, size) for kind in KINDS for size in (1, 3, 16)]
LAYOUTS += [("cuda", "int8", 3), ("cuda", "bf16", 1), ("cuda", "fp64", 16)]


@pytest.mark.boundscheck
@pytest.mark.parametrize(("target", "kind", "block_size"), LAYOUTS, indirect=["target"])
def test_paged_is_contiguous(target, to, host, rng, kind, block_size):
    """Bit for bit: what is stored always, what attention gives on the CPU."""
    heads, dim = 2, 8
    blocks = [int(b) for b in rng.permutation(24 // block_size + 3)]
    layer = layer_with(blocks, block_size, heads, dim, kind=kind, target=target)
    other = numkv.ContiguousLayer(24, heads, dim, kind=kind, target=target)
    rows = {n: [rng.standard_normal((n, heads, dim), F32) for _ in "kv"] for n in (7, 1, 12)}
    cos, sin = (to(x) for x in naive.rope_tables(24, dim))
    for one in (layer, other):
        for n in (7, 1):
            one.append(*map(to, rows[n]))
        qkv = np.concatenate([x.reshape(12, -1) for x in rows[12]] * 2, axis=1)
        one.write(to(qkv), num_q_heads=4, cos=cos, sin=sin, qk_mode=2)
    mine = stored(layer, host)
    its = [host(x)[0, :, :20] if host(x).size else None for x in
           (other.k, other.v, other.k_scale, other.v_scale)]  # fmt: skip
    for a, b in zip(mine, its, strict=True):
        assert np.array_equal(a, b)
    q = rng.standard_normal((3, 4, dim), F32)
    for options in ({}, {"window_left": 4, "logits_soft_cap": 2.0}):
        out, lse = (x.decode_attention(to(q), return_lse=True, **options) for x in (layer, other))
        want, _ = naive.attention(q, *values(layer, host), [20], [0, 3], **options)
        tolerances.assert_rows_close(host(out[0]), want, tolerances.attention(kind, "fp32"))
        if target == "cpu":
            assert np.array_equal(out[0], lse[0])
            assert np.array_equal(out[1], lse[1])


# ---------------------------------------------------------------- worked attention


def worked_layer(to, target, kind, tokens, block_size):
    blocks = {1: [2, 0, 3], 2: [1, 0], 3: [2], 16: [4]}[block_size]
    layer = layer_with(blocks, block_size, 2, 2, kind=kind, target=target)
    k, v = np.array(K, F32).swapaxes(0, 1), np.array(V, F32).swapaxes(0, 1)
    layer.append(to(k[:tokens].copy()), to(v[:tokens].copy()))
    return layer


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_worked_numbers(target, to, host, kind, block_size, tokens):
    """Through a layer, and from its pool by the batched function with the sequence twice."""
    layer = worked_layer(to, target, kind, tokens, block_size)
    q = np.array([Q], F32)
    atol = 0.03 if kind == "int8" else 2e-6  # codes of 1/127 steps
    assert np.allclose(host(layer.decode_attention(to(q)))[0], OUT[tokens], rtol=0, atol=atol)
    scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if kind == "int8" else {}
    table = to(np.stack([layer.block_table] * 2))
    lens = to(np.array([tokens, 1], np.int32))
    out = numkv.paged_decode_attention(
        to(np.repeat(q, 2, axis=0)), layer.k, layer.v, table, lens, **scales
    )
    assert np.allclose(host(out), [OUT[tokens], OUT[1]], rtol=0, atol=atol)


@pytest.mark.parametrize("block_size", [1, 3])
def test_worked_prefill(target, to, host, block_size):
    layer = worked_layer(to, target, "fp32", 3, block_size)
    q = to(np.array([Q, Q], F32))
    assert np.allclose(host(layer.decode_attention(q)), [OUT[2], OUT[3]], rtol=0, atol=2e-6)
    out = numkv.paged_prefill_attention(
        q, layer.k, layer.v, to(layer.block_table[None].copy()), to(np.array([3], np.int32)),
        to(np.array([0, 2], np.int32)),
    )  # fmt: skip
    assert np.allclose(host(out), [OUT[2], OUT[3]], rtol=0, atol=2e-6)


def test_an_empty_layer(target, to, host):
    for kind in ("fp16", "int8"):
        layer = numkv.PagedLayer(4, 2, 2, 2, kind=kind, target=target)
        out, lse = layer.decode_attention(to(np.ones((1, 4, 2), F32)), return_lse=True)
        assert np.all(host(out) == 0)
        assert np.all(host(lse) == -np.inf)
        with pytest.raises(numkv.DimensionMismatch, match="q"):
            layer.decode_attention(to(np.ones((2, 4, 2), F32)))


# ---------------------------------------------------------------- lengths and blocks


def test_seq_len_takes_and_gives_blocks(target):
    layer = numkv.PagedLayer(4, 3, 1, 2, target=target)
    table = layer.block_table
    for length, blocks in ((1, 1), (3, 1), (4, 2), (12, 4), (7, 3), (0, 0), (12, 4)):
        layer.seq_len = length
        assert (layer.seq_len, len(layer.block_indices)) == (length, blocks)
        assert layer.context_lens.tolist() == [length]
        assert layer.pool.blocks.num_free == 4 - blocks
        assert np.all(layer.block_table[blocks:] == -1)
        assert layer.block_table[:blocks].tolist() == layer.block_indices
        layer.pool.check()
    assert layer.block_table is table
    for bad in (-1, 13, 2**40):
        with pytest.raises(IndexError, match="seq_len"):
            layer.seq_len = bad
    assert layer.seq_len == 12


def test_truncate_keeps_what_it_says(target, to, host, rng):
    layer = numkv.PagedLayer(4, 3, 1, 2, kind="fp32", target=target)
    rows = rng.standard_normal((9, 1, 2), F32)
    layer.append(to(rows), to(rows))
    layer.truncate(4)
    assert (layer.seq_len, len(layer.block_indices), layer.pool.blocks.num_free) == (4, 2, 2)
    layer.append(to(rows[7:]), to(rows[7:]))
    assert np.array_equal(stored(layer, host)[0][0], rows[[0, 1, 2, 3, 7, 8], 0])
    before = state(layer, host)
    for bad in (-1, 7):
        with pytest.raises(IndexError, match="length"):
            layer.truncate(bad)
    assert_same(state(layer, host), before)
    layer.truncate(6)
    layer.pool.check()


@pytest.mark.parametrize("how", ["append", "write", "seq_len"])
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_no_room(target, to, host, rng, kind, how):
    """In the table or in the pool: nothing is written and no block is taken."""
    pool = numkv.PagedPool(5, 2, 1, 4, kind=kind, target=target)
    layer, other = (numkv.PagedLayer(4, 2, 1, 4, pool=pool) for _ in "ab")
    for one in (layer, other):
        rows = rng.standard_normal((3, 1, 4), F32)
        one.append(to(rows), to(-rows))

    def grow(by):
        if how == "seq_len":
            layer.seq_len += by
        elif how == "append":
            layer.append(*[to(np.ones((by, 1, 4), F32))] * 2)
        else:
            layer.write(to(np.ones((by, 12), F32)), num_q_heads=1, qk_mode=0)

    before = state(layer, host), state(other, host)
    others = stored(other, host)
    with pytest.raises(numkv.CacheFull):
        grow(4)  # the table has room, the pool has one block of the two
    if how != "seq_len":
        with pytest.raises(numkv.CacheFull):
            grow(6)  # past the table
    assert_same(state(layer, host), before[0])
    assert_same(state(other, host), before[1])
    pool.check()
    grow(3)
    assert (layer.seq_len, pool.blocks.num_free) == (6, 0)
    assert_same(stored(other, host)[:2], others[:2])
    pool.check()


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_layers_of_one_pool_do_not_meet(target, to, host, rng, kind):
    """Three sequences grow in turns, one is freed and its blocks go to a fourth."""
    pool = numkv.PagedPool(11, 3, 2, 4, kind=kind, target=target)
    layers = [numkv.PagedLayer(6, 3, 2, 4, pool=pool) for _ in range(3)]
    rows = [rng.standard_normal((16, 2, 4), F32) for _ in range(4)]

    def grow(i, begin, end):
        layers[i].append(to(rows[i][begin:end]), to(-rows[i][begin:end]))

    def check(i, n):
        k, v, *_ = stored(layers[i], host)
        want = rows[i][:n].swapaxes(0, 1)
        want = naive.int8_quantise(want)[0] if kind == "int8" else naive.round_to(want, kind)
        assert np.array_equal(k, want)
        assert np.array_equal(v, -want)

    for begin, end in ((0, 1), (1, 5), (5, 6), (6, 8)):
        for i in range(3):
            grow(i, begin, end)
    owned = [layer.block_indices for layer in layers]
    assert len({block for blocks in owned for block in blocks}) == 9
    layers[1].free()
    assert (layers[1].seq_len, layers[1].block_indices, pool.blocks.num_free) == (0, [], 5)
    pool.check()
    layers.append(numkv.PagedLayer(6, 3, 2, 4, pool=pool))
    grow(3, 0, 13)
    assert set(owned[1]) <= set(layers[3].block_indices)
    for i, n in ((0, 8), (2, 8), (3, 13)):
        check(i, n)
    q = rng.standard_normal((2, 4, 4), F32)
    for i in (0, 3):
        want, _ = naive.attention(q, *values(layers[i], host), [len(layers[i])], [0, 2])
        out = host(layers[i].decode_attention(to(q)))
        tolerances.assert_rows_close(out, want, tolerances.attention(kind, "fp32"))
    with pytest.raises(numkv.CacheFull):
        grow(1, 0, 1)
    layers[3].free()
    grow(1, 0, 9)  # a freed layer can be used again
    check(1, 9)
    pool.check()
    assert pool.blocks.stats().used == 9
    for layer in layers:
        layer.free()
        layer.free()  # nothing left to give back
    assert pool.blocks.num_free == 11
    pool.check()


def test_bad_rows_take_no_blocks(target, to, host):
    layer = numkv.PagedLayer(4, 2, 1, 4, kind="fp16", target=target)
    good, before = np.ones((3, 1, 4), F32), state(layer, host)
    for bad, error in (
        (np.ones((3, 1, 5), F32), numkv.DimensionMismatch),
        (np.ones((2, 1, 4), F32), numkv.DimensionMismatch),
        (np.ones((3, 1, 4), np.int32), numkv.UnsupportedDType),
    ):
        with pytest.raises(error):
            layer.append(to(good), to(bad))
    with pytest.raises(IndexError):
        layer.write(
            to(np.ones((2, 12), F32)), num_q_heads=1, qk_mode=2, cos=to(np.ones((1, 2), F32)),
            sin=to(np.ones((1, 2), F32)),
        )  # fmt: skip
    assert_same(state(layer, host), before)
