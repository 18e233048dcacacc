"""Compaction: a cache that dropped tokens is one that never had them.

Rows are compared with those of a fresh cache into which the kept tokens alone were written: bit for bit where keys stay
as they are, and where they are turned with keys that were rotated for their new positions in float64.
"""

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from messages import about

import numkv

F32 = np.float32
KINDS = ["fp32", "fp16", "int8"]
LAYOUTS = ["contiguous", "paged"]
HEADS, DIM, TOKENS = 2, 8, 11
every_kind = pytest.mark.parametrize("kind", KINDS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
KEEPS = {
    "holes": [0, 1, 4, 6, 7, 10],
    "first-and-recent": [0, 1, 7, 8, 9, 10],
    "end": [8, 9, 10],
    "one": [3],
    "all": list(range(TOKENS)),
    "prefix": [0, 1, 2],
    "nothing": [],
}
every_keep = pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)


def make(layout, target, kind, capacity=16):
    """An empty layer; the blocks of a paged one are in no order."""
    if layout == "contiguous":
        return numkv.ContiguousLayer(capacity, HEADS, DIM, kind=kind, target=target)
    pool = numkv.PagedPool(12, 3, HEADS, DIM, kind=kind, target=target)
    others = [numkv.PagedLayer(5, 3, HEADS, DIM, pool=pool) for _ in range(3)]
    for other, tokens in zip(others, (5, 2, 8), strict=True):
        other.seq_len = tokens
    others[0].free()
    others[2].free()
    return numkv.PagedLayer(6, 3, HEADS, DIM, pool=pool)


def rows(rng, tokens=TOKENS):
    """Keys and values, with scales that differ by token."""
    return (
        rng.standard_normal((2, tokens, HEADS, DIM)) * rng.uniform(0.1, 9, (tokens, 1, 1))
    ).astype(F32)


def tables(positions=16, dtype=np.float64):
    return naive.rope_tables(positions, DIM, base=100.0, dtype=dtype)


def turning():
    return numkv.rope_shift(*tables(dtype=F32))


def rotated(raw, positions):
    """Keys of some positions, in float64."""
    cos, sin = tables()
    return np.stack(
        [naive.rope(x, cos[p], sin[p], False) for x, p in zip(raw, positions, strict=True)]
    )


def stored(layer, host):
    """What a layer holds, token by token: bits of K and V, and scales."""
    size = layer.block_size or layer.capacity
    table = layer.block_indices or [0]
    at = [(table[j // size], j % size) for j in range(layer.seq_len)]
    found = []
    for buffer in (layer.k, layer.v, layer.k_scale, layer.v_scale):
        buffer = host(buffer)
        if buffer.size:
            found.append(np.array([naive.words(buffer[block, :, place]) for block, place in at]))
    return found


def values(layer, host):
    """Keys as numbers, ``(tokens, heads, dim)``."""
    size = layer.block_size or layer.capacity
    table = layer.block_indices or [0]
    k, scale = host(layer.k).astype(np.float64), host(layer.k_scale)
    if scale.size:
        k = k * scale.astype(np.float64)[..., None]
    return np.array([k[table[j // size], :, j % size] for j in range(layer.seq_len)])


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x, y)


# ---------------------------------------------------------------- layers, without a shift


@every_kind
@every_layout
@every_keep
def test_as_if_the_others_had_never_been_written(target, to, host, rng, kind, layout, keep):
    k, v = rows(rng)
    layer, fresh = make(layout, target, kind), make(layout, target, kind)
    layer.append(to(k), to(v))
    layer.compact(keep)
    if keep:
        fresh.append(to(k[keep]), to(v[keep]))
    assert layer.seq_len == len(keep) == layer.context_lens[0]
    assert_same(stored(layer, host), stored(fresh, host))
    assert len(layer.block_indices) == len(fresh.block_indices)
    # Going on: the next rows, and attention over all of them.
    more_k, more_v = rows(rng, 4)
    q = to(rng.standard_normal((2, 2 * HEADS, DIM)).astype(F32))
    for one in (layer, fresh):
        one.append(to(more_k), to(more_v))
    assert_same(stored(layer, host), stored(fresh, host))
    assert np.array_equal(host(layer.decode_attention(q)), host(fresh.decode_attention(q)))


@every_layout
def test_every_payload_moves(target, to, host, rng, layout):
    """NaNs too, with all of their bits."""
    k = rng.integers(0, 2**16, (TOKENS, HEADS, DIM)).astype(np.uint16).view(np.float16)
    layer = make(layout, target, "fp16")
    layer.append(to(k), to(k[::-1].copy()))
    before = stored(layer, host)
    keep = [1, 2, 5, 9]
    layer.compact(keep)
    assert_same(stored(layer, host), [x[keep] for x in before])


def test_again_and_again(target, to, host, rng):
    """Indices are those of the layer as it is."""
    k, v = rows(rng)
    layer = make("paged", target, "int8")
    layer.append(to(k), to(v))
    before = stored(layer, host)
    layer.compact(np.array([0, 2, 3, 7, 8, 10], np.int32))
    layer.compact((1, 3, 5))
    assert_same(stored(layer, host), [x[[2, 7, 10]] for x in before])


def test_blocks_are_given_back(target, to, rng):
    pool = numkv.PagedPool(4, 3, HEADS, DIM, target=target)
    layer = numkv.PagedLayer(4, 3, HEADS, DIM, pool=pool)
    layer.append(*map(to, rows(rng)))
    assert pool.blocks.num_free == 0
    layer.compact([0, 4, 5, 10])
    assert pool.blocks.num_free == 2
    assert layer.block_table.tolist()[2:] == [-1, -1]
    pool.check()
    layer.compact([])
    assert pool.blocks.num_free == 4
    pool.check()


def test_an_empty_layer(target):
    for layer in (make("paged", target, "int8"), numkv.ContiguousLayer(0, 1, 4, target=target)):
        layer.compact([])
        assert layer.seq_len == 0


# ---------------------------------------------------------------- layers, with a shift


def close(got, want, was, kind):
    """Keys that were turned: float rounding, or one more step of quantisation."""
    if kind == "fp32":
        tolerances.assert_rotated_close(got, want, kind)
        return
    bound = naive_cells.loss(kind)
    assert np.all(np.linalg.norm(got - want, axis=-1) <= bound(was) + bound(want))


@every_kind
@every_layout
@every_keep
def test_keys_turn_to_where_they_stand(target, to, host, rng, kind, layout, keep):
    raw, v = rows(rng)
    was = rotated(raw, range(TOKENS))
    layer, untouched = make(layout, target, kind), make(layout, target, kind)
    for one in (layer, untouched):
        one.append(to(was.astype(F32)), to(v))
    shift = turning()
    layer.compact(keep, shift=shift)
    untouched.compact(keep)
    if not keep:
        assert layer.seq_len == 0
        return
    want = rotated(raw[keep], range(len(keep)))
    got = values(layer, host)
    close(got, want, was[keep], kind)
    # Values, and the keys of tokens that stay where they are, to the last bit.
    stays = [i for i, j in enumerate(keep) if i == j]
    a, b = stored(layer, host), stored(untouched, host)
    assert_same([a[0][stays], a[1]], [b[0][stays], b[1]])
    if kind == "int8":
        assert_same([a[2][stays], a[3]], [b[2][stays], b[3]])
    # Attention, as over the kept tokens' own rows.
    q = rng.standard_normal((1, 2 * HEADS, DIM)).astype(F32)
    now, _ = naive.attention(
        q, values(layer, host).transpose(1, 0, 2)[None], held_values(layer, host), [len(keep)]
    )
    tolerances.assert_rows_close(
        host(layer.decode_attention(to(q))), now, tolerances.attention(kind, "fp32")
    )
    if kind == "fp32":
        best, _ = naive.attention(
            q, want.transpose(1, 0, 2)[None], v[keep].transpose(1, 0, 2)[None], [len(keep)]
        )
        tolerances.assert_rows_close(host(layer.decode_attention(to(q))), best, 3e-5)


def held_values(layer, host):
    """Values as numbers, ``(1, heads, tokens, dim)``."""
    size = layer.block_size or layer.capacity
    table = layer.block_indices or [0]
    v, scale = host(layer.v).astype(np.float64), host(layer.v_scale)
    if scale.size:
        v = v * scale.astype(np.float64)[..., None]
    return np.array([v[table[j // size], :, j % size] for j in range(layer.seq_len)]).transpose(
        1, 0, 2
    )[None]


def test_turning_matters(rng):
    """The bounds above tell a key that turned from one that did not."""
    raw, _ = rows(rng)
    bound = naive_cells.loss("int8")
    was, want = rotated(raw, range(4, 8 + 7)), rotated(raw, range(TOKENS))
    assert np.all(np.linalg.norm(was - want, axis=-1) > 4 * (bound(was) + bound(want)))


# ---------------------------------------------------------------- layers, errors


BAD = [
    ([0, 11], IndexError, about("keep")),
    ([-1, 0], IndexError, about("keep")),
    ([2**40], IndexError, about("keep")),
    (np.array([2**64 - 1], np.uint64), IndexError, about("keep")),
    ([0, 0], ValueError, "rising order"),
    ([0, 3, 2], ValueError, "got 2 after 3"),
    ([[0, 1]], numkv.DimensionMismatch, about("keep")),
    (3, numkv.DimensionMismatch, about("keep")),
    ([0.0, 1.0], numkv.UnsupportedDType, about("keep")),
    ([True] * TOKENS, numkv.UnsupportedDType, "flatnonzero"),
]


@pytest.mark.parametrize(("keep", "error", "match"), BAD)
@every_layout
def test_what_cannot_be_kept(target, to, host, rng, layout, keep, error, match):
    layer = make(layout, target, "int8")
    layer.append(*map(to, rows(rng)))
    before = stored(layer, host), layer.block_indices
    with pytest.raises(error, match=match):
        layer.compact(keep)
    assert_same(stored(layer, host), before[0])
    assert (layer.seq_len, layer.block_indices) == (TOKENS, before[1])


@pytest.mark.parametrize(
    ("shift", "error"),
    [
        (numkv.rope_shift(*tables(5, F32)), IndexError),
        (numkv.rope_shift(*naive.rope_tables(16, 2 * DIM)), numkv.DimensionMismatch),
        (lambda layer, keys, offsets: keys, TypeError),
    ],
    ids=["short", "wide", "function"],
)
def test_what_cannot_turn(target, to, host, rng, shift, error):
    """The second offset is the one that is too far: the first was found before, and nothing was done."""
    layer = make("paged", target, "fp32")
    layer.append(*map(to, rows(rng)))
    before = stored(layer, host)
    with pytest.raises(error, match=r"shift"):
        layer.compact([0, 2, 10], shift=shift)
    assert_same(stored(layer, host), before)
    assert layer.seq_len == TOKENS


# ---------------------------------------------------------------- all layers


def cache_of(target, to, rng, kind, k, v, **options):
    """A `KVCache` with the same number of tokens in each layer."""
    cache = numkv.KVCache(
        len(k), HEADS, DIM, kind=kind, target=target, head_dim_v=v.shape[-1], **options
    )
    for layer in range(len(k)):
        if k.shape[1]:
            cache.append(layer, to(k[layer]), to(v[layer]))
    if k.shape[1]:
        cache.advance(k.shape[1])
    return cache


def bits(cache, host):
    """All rows of a cache, as stored."""
    found = []
    for layer in range(cache.num_layers):
        if cache.layers[0].kind.has_scales:
            reads = (cache.k_codes, cache.k_scales, cache.v_codes, cache.v_scales)
        else:
            reads = (cache.k, cache.v)
        found += [naive.words(host(read(layer)).copy()) for read in reads]
    return found


@every_kind
@pytest.mark.parametrize("bound", [None, 13])
def test_all_layers(target, to, host, rng, kind, bound):
    """The same tokens in each layer, and others in each; K and V of different widths."""
    k = rng.standard_normal((3, TOKENS, HEADS, DIM)).astype(F32)
    v = rng.standard_normal((3, TOKENS, HEADS, 5)).astype(F32)
    of_each = [[0, 3, 4, 9], [0, 1, 2, 3], [7, 8, 9, 10]]
    for keep in (of_each[0], of_each, [], [[], [], []], range(TOKENS)):
        kept = np.broadcast_to(np.array(keep, int), (3, np.shape(keep)[-1]))
        cache = cache_of(target, to, rng, kind, k, v, max_seq_len=bound)
        cache.compact(keep)
        pick = np.arange(3)[:, None]
        fresh = cache_of(target, to, rng, kind, k[pick, kept], v[pick, kept], max_seq_len=bound)
        assert len(cache) == kept.shape[1]
        assert_same(bits(cache, host), bits(fresh, host))
        for one in (cache, fresh):
            for layer in range(3):
                one.append(layer, to(k[layer, 0]), to(v[layer, 0]))
            one.advance()
        assert_same(bits(cache, host), bits(fresh, host))


@every_kind
def test_all_layers_turn(target, to, host, rng, kind):
    raw = rng.standard_normal((2, TOKENS, HEADS, DIM)).astype(F32)
    was = np.stack([rotated(x, range(TOKENS)) for x in raw])
    cache = cache_of(target, to, rng, kind, was.astype(F32), raw)
    keep = np.array([[0, 2, 7, 8], [1, 2, 3, 10]])
    cache.compact(keep, shift=turning())
    for layer in range(2):
        got = host(cache.k(layer)).astype(np.float64)
        close(got, rotated(raw[layer][keep[layer]], range(4)), was[layer][keep[layer]], kind)


@pytest.mark.parametrize(
    ("keep", "error"),
    [
        ([[0, 1]], numkv.DimensionMismatch),
        ([[0, 1], [1, 11]], IndexError),
        ([[0, 1], [1, 1]], ValueError),
        ([[[0]]], numkv.DimensionMismatch),
        ([1, 0], ValueError),
    ],
)
def test_what_a_cache_refuses(target, to, host, rng, keep, error):
    x = rng.standard_normal((2, TOKENS, HEADS, DIM)).astype(F32)
    cache = cache_of(target, to, rng, "int8", x, x)
    before = bits(cache, host)
    with pytest.raises(error, match="keep"):
        cache.compact(keep)
    assert_same(bits(cache, host), before)
    assert len(cache) == TOKENS


def test_rows_that_are_pending(target, to, host, rng):
    x = rng.standard_normal((2, TOKENS, HEADS, DIM)).astype(F32)
    cache = cache_of(target, to, rng, "fp32", x, x)
    cache.append(1, to(x[0, 0]), to(x[0, 0]))
    before = bits(cache, host)
    with pytest.raises(numkv.NumkvError, match=r"compact: .* layer 1; advance, or truncate\(11\)"):
        cache.compact([0])
    assert_same(bits(cache, host), before)
    cache.truncate(TOKENS)
    cache.compact([0])
    assert len(cache) == 1


def test_no_layers():
    cache = numkv.KVCache(0, HEADS, DIM)
    cache.advance(3)
    cache.compact([0, 2])
    assert len(cache) == 2


# ---------------------------------------------------------------- cells


def cells(target, to, raw, kind="fp32", shift=None):
    """A cache with one sequence of rotated keys, and another of one token."""
    cache = numkv.CausalCache(shift)
    cache.init(kind, 3, 16, 16, target)
    n = len(raw)
    cache.start_forward(numkv.Batch([*range(n), 0], [0] * n + [7]))
    k = np.concatenate([rotated(raw, range(n)), raw[:1]]).astype(F32)
    for layer in (0, 4):
        cache.put(layer, to(k), to(np.concatenate([raw, raw[:1]])))
    return cache


def shown(cache, host, seq, layer=0):
    """Positions of a sequence, and its keys and values, by position."""
    positions = cache.positions(seq)
    cache.start_forward(numkv.Batch([2**30], [seq]), reserve=True)
    k, v, mask = (host(x) for x in cache.get(layer))
    seen = np.flatnonzero(mask[0] == 0)
    held = cache._cells.owned(seq)
    assert sorted(held) == seen.tolist()
    return positions.tolist(), k[held].astype(np.float64), v[held].astype(np.float64)


@every_kind
@every_keep
def test_cells_are_freed(target, to, host, rng, kind, keep):
    raw = rng.standard_normal((TOKENS, HEADS, DIM)).astype(F32)
    cache = cells(target, to, raw, kind, turning())
    free = cache.num_free
    _, before_k, before_v = shown(cache, host, 0)
    other = shown(cache, host, 7)
    cache.compact(0, keep)
    cache._cells.check()
    assert cache.num_free == free + TOKENS - len(keep)
    if keep:
        for layer in (0, 4):
            positions, k, v = shown(cache, host, 0, layer)
            assert positions == list(range(len(keep)))
            close(k, rotated(raw[keep], range(len(keep))), rotated(raw[keep], keep), kind)
            assert np.array_equal(v, before_v[keep])
        stays = [i for i, j in enumerate(keep) if i == j]
        assert np.array_equal(shown(cache, host, 0)[1][stays], before_k[keep][stays])
    else:
        assert cache.sequences == [7]
    for a, b in zip(shown(cache, host, 7), other, strict=True):
        assert np.array_equal(a, b)
    # Going on.
    n = len(keep)
    cache.start_forward(numkv.Batch([n, n + 1], [0, 0]))
    cache.put(0, to(raw[:2]), to(raw[:2]))
    assert cache.positions(0).tolist() == list(range(n + 2))
    cache._cells.check()


def test_cells_refuse_and_stay(target, to, host, rng):
    raw = rng.standard_normal((TOKENS, HEADS, DIM)).astype(F32)
    cache, without = (cells(target, to, raw, shift=shift) for shift in (turning(), None))
    cache.copy_prefix(0, 5, 6)
    before = shown(cache, host, 0)
    for one, keep, error, match in (
        (cache, [0, 11], IndexError, "sequence 0 holds, got 11"),
        (cache, [-1], IndexError, about("keep")),
        (cache, [3, 3], ValueError, "rising"),
        (cache, [[1]], numkv.DimensionMismatch, about("keep")),
        (cache, [0, 5, 9], numkv.NotSupported, "position 5 .* 1 other sequences share it"),
        (without, [0, 5], numkv.NotSupported, "no shift"),
    ):
        with pytest.raises(error, match=match):
            one.compact(0, keep)
        one._cells.check()
    with pytest.raises(IndexError):
        cache.compact(-1, [])
    with pytest.raises(IndexError, match="sequence 3"):
        cache.compact(3, [0])
    cache.compact(3, [])
    for a, b in zip(shown(cache, host, 0), before, strict=True):
        assert np.array_equal(a, b)
    # What is shared may be dropped, or kept where it is; without a shift as well.
    cache.compact(0, [0, 1, 2, 7])
    assert cache.positions(5).tolist() == [0, 1, 2, 3, 4, 5]
    without.compact(0, [0, 1])
    assert without.positions(0).tolist() == [0, 1]


def test_a_shift_that_fails_leaves_all_as_it_was(target, to, host, rng):
    calls = []

    def shift(layer, keys, offsets):
        calls.append((layer, host(offsets).tolist()))
        if len(calls) == 3:
            raise RuntimeError("no more")
        return keys

    raw = rng.standard_normal((6, HEADS, DIM)).astype(F32)
    cache = cells(target, to, raw, shift=shift)
    before = [shown(cache, host, 0, layer) for layer in (0, 4)]
    with pytest.raises(RuntimeError, match="no more"):
        cache.compact(0, [1, 2, 5])
    cache._cells.check()
    for was, layer in zip(before, (0, 4), strict=True):
        for a, b in zip(shown(cache, host, 0, layer), was, strict=True):
            assert np.array_equal(a, b)
    assert sorted(calls[0][1] + calls[2][1]) == [-3, -1, -1]


def test_a_window_stays_in_step(target, to, host, rng):
    """The sliding child holds the newest tokens only; those that both keep stand at the same positions."""
    sliding, causal = (
        numkv.CausalCache(window_left=3, shift=turning()),
        numkv.CausalCache(turning()),
    )
    cache = numkv.WrapperCache(sliding, causal, layer_types=[0, 1])
    cache.init("fp32", 1, 16, 4, target)
    raw = rng.standard_normal((9, HEADS, DIM)).astype(F32)
    keys = rotated(raw, range(9)).astype(F32)
    for p in range(9):
        cache.start_forward(numkv.Batch([p], [0]))
        for layer in (0, 1):
            cache.put(layer, to(keys[p : p + 1]), to(raw[p : p + 1]))
    assert sliding.positions(0).tolist() == [5, 6, 7, 8]
    with pytest.raises(IndexError, match="got 9"):
        cache.compact(0, [0, 7, 9])
    cache.compact(0, [0, 1, 6, 8])
    assert sliding.positions(0).tolist() == [2, 3]
    assert causal.positions(0).tolist() == [0, 1, 2, 3]
    sliding._cells.check()
    cache.compact(0, [0, 1])  # nothing is left in the window's child
    cache.compact(0, [1])
    assert sliding.sequences == []
    assert causal.positions(0).tolist() == [0]


@pytest.mark.parametrize(
    "make",
    [numkv.CausalCache, lambda shift: numkv.CausalCache(window_left=6, shift=shift),
     lambda shift: numkv.CausalCache(shift=shift, chunk_size=4)],
    ids=["causal", "window", "chunk"],
)  # fmt: skip
def test_at_once_as_one_after_another(target, to, host, rng, make):
    """Compaction is all the removals of what lies between, and each key is turned once."""
    keep = [1, 4, 5, 8, 9, 12]
    raw = rng.standard_normal((14, HEADS, DIM)).astype(F32)
    keys = rotated(raw, range(2, 16)).astype(F32)
    caches = [make(turning()) for _ in "ab"]
    for cache in caches:
        cache.init("fp32", 2, 20, 14, target)
        cache.start_forward(numkv.Batch([*range(2, 15)], [0] * 13))  # from position 2 on
        cache.put(0, to(keys[:13]), to(raw[:13]))
        cache.start_forward(numkv.Batch([15], [0]))
        cache.put(0, to(keys[13:]), to(raw[13:]))
    one, other = caches
    held = one.positions(0).tolist()
    one.compact(0, [2 + i for i in keep])
    end = None
    for i in reversed(keep):
        other.remove(0, 3 + i, end)
        end = 2 + i
    other.remove(0, 0, end)
    there = [at for at, i in enumerate(keep) if 2 + i in held]
    for cache in caches:
        cache._cells.check()
        assert cache.positions(0).tolist() == there
        pool, cells_of = cache._layers[0], cache._cells.owned(0)
        k, v = (host(pool.values(x))[0][:, cells_of].transpose(1, 0, 2) for x in "kv")
        tolerances.assert_rotated_close(k, rotated(raw[keep][there], there), "fp32")
        assert np.array_equal(v, raw[keep][there])


def test_an_encoders_rows_go_with_their_token(target, to, rng):
    cache = numkv.EncoderCache()
    cache.init("fp32", 1, 16, 4, target)
    rows_of_image = to(rng.standard_normal((3, HEADS, DIM)).astype(F32))
    cache.start_forward(numkv.Batch([4, 5], [0, 0], multimodal=[1]))
    cache.put(0, rows_of_image, rows_of_image)
    cache.compact(0, [0, 5])
    assert cache.encoder_cached
    cache.compact(0, [0])
    assert not cache.encoder_cached
