"""A `PagedKVCache` whose layers have rows of several shapes and kinds, chunks, or another layer's rows."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
from mixed_caches import LAYERS, Layer, Plain, check, grow, make, queries, specs_of

import numkv
from numkv.caches.paged.groups import groups_of, page_bytes
from numkv.caches.paged.layers import Layers

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


@pytest.fixture
def cpu():
    return np.asarray, np.asarray


def test_a_prompt_a_step_a_fork_and_a_second_prompt(target, to, host):
    cache, plain = make(target=target), Plain()
    first = cache.add(PROMPT)
    grow(cache, to, plain, [first], [PROMPT[:11]], host=host)
    second = cache.add([*PROMPT[:10], 7, 7])
    assert cache.cached_len(second) == 10
    plain.fork(first, second)
    plain.keep(second, range(10))
    cache.truncate(second, 9)
    plain.keep(second, range(9))
    third = cache.fork(first)
    plain.fork(first, third)
    grow(cache, to, plain, [second, third, first], [[3, 7, 7], [8], PROMPT[11:]], host=host)
    check(cache, to, host, plain)


def test_any_calls_in_any_order(cpu):
    """Beside dictionaries of rows, with a pool so small that it is full now and then."""
    to, host = cpu
    rng = np.random.default_rng(7)
    cache, plain = make(num_blocks=110), Plain()
    refused = full = 0
    for turn in range(150):
        seqs = list(cache.sequences)
        action = rng.choice(["add", "grow", "grow", "fork", "cut", "remove", "swap", "compact"])
        one = int(rng.choice(seqs)) if seqs else None
        if action == "add" or one is None:
            text = [int(t) for t in rng.integers(0, 2, rng.integers(0, 14))]
            seq = cache.add(text)
            plain.texts[seq], plain.rows[seq] = [], {}
            plain.extend(seq, text[: cache.cached_len(seq)])
        elif action == "grow":
            some = [int(s) for s in rng.permutation(seqs)[: rng.integers(1, 4)]]
            texts = [[int(t) for t in rng.integers(0, 2, rng.integers(0, 9))] for _ in some]
            accepted = [int(rng.integers(0, len(t) + 1)) for t in texts]
            try:
                grow(
                    cache, to, plain, some, texts, accepted=accepted, named=bool(rng.integers(4)), host=host
                )  # fmt: skip
            except numkv.CacheFull:
                full += 1
                cache.remove(one)
        elif action == "fork":
            plain.fork(one, cache.fork(one))
        elif action == "cut":
            length = int(rng.integers(0, cache.length(one) + 1))
            try:
                cache.truncate(one, length)
                plain.keep(one, range(length))
            except numkv.NotSupported:
                refused += 1
        elif action == "remove":
            cache.remove(one)
        elif action == "swap":
            swapped = cache.swap_out(one)
            cache.remove(one)
            try:
                plain.fork(one, cache.swap_in(swapped))
            except numkv.CacheFull:
                full += 1
        else:
            keep = np.flatnonzero(rng.random(cache.length(one)) < 0.8)
            try:
                cache.compact(one, keep)
                plain.keep(one, keep)
            except (numkv.NotSupported, numkv.CacheFull):
                refused += 1
        if turn % 5 == 0:
            check(cache, to, host, plain)
    check(cache, to, host, plain)
    assert refused > 5
    assert full > 2


def test_windows_and_chunks_give_their_blocks_back(cpu):
    to, host = cpu
    cache, plain = make(), Plain()
    seq = cache.add()
    for token in range(14):
        grow(cache, to, plain, [seq], [[token]], host=host)
    tables = [cache.block_table(seq, layer) for layer in range(cache.num_layers)]
    assert (tables[0] >= 0).all()
    assert (tables[1] >= 0).tolist() == [False, False, True, True]  # tokens 10 to 13
    assert (tables[2] >= 0).tolist() == [False, False, False, True]  # tokens 12 and 13
    assert np.array_equal(tables[3], tables[0])
    assert np.array_equal(tables[5], tables[1])


def test_a_layer_that_reads_another_is_not_written_to(cpu):
    to, _ = cpu
    cache = make()
    step = cache.reserve([cache.add()], [2])
    rows = [np.zeros((2, 2, 8), np.float32)] * 2
    with pytest.raises(numkv.NotSupported, match="layer 3, which reads those of layer 0"):
        step.append(3, *rows)
    qkv = np.zeros((2, 8 * 8), np.float32)
    with pytest.raises(numkv.NotSupported, match="layer 3, which reads"):
        step.write(3, qkv, num_q_heads=4, qk_mode=numkv.QKMode.HALF_SPLIT)
    with pytest.raises(numkv.NotSupported, match="layer 3, which reads"):
        make().set_scales(3, k=1.0)
    assert step.unwritten_layers == [0, 1, 2, 4, 6]
    with pytest.raises(numkv.NotSupported, match="chunks of 4"):
        cache.step_buffers(4)
    with pytest.raises(numkv.NotSupported, match="chunks of 4"):
        step.attention_weights(2, queries(LAYERS[2], 2))
    with pytest.raises(numkv.NumkvError, match=r"layer 3 without; call step.append\(0, k, v\)"):
        step.attention(3, queries(LAYERS[0], 2))
    step.append(0, *rows)
    step.attention(3, queries(LAYERS[0], 2))


SPEC = numkv.LayerSpec(2, 8)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        (
            {"layers": [SPEC, numkv.LayerSpec(shares=2), numkv.LayerSpec(shares=1)]},
            ValueError,
            "shares",
        ),
        ({"layers": [SPEC, numkv.LayerSpec(shares=9)]}, IndexError, "shares"),
        ({"layers": [numkv.LayerSpec(shares=0)]}, ValueError, "shares"),
        ({"layers": [SPEC, numkv.LayerSpec(), numkv.LayerSpec(shares=1)]}, ValueError, "shares"),
        ({"layers": [SPEC, replace(SPEC, shares=0, window_left=3)]}, ValueError, "shares"),
        ({"layers": [SPEC, replace(SPEC, shares=0, kind="int8")]}, ValueError, "shares"),
        ({"layers": [SPEC, replace(SPEC, rotate=True)]}, numkv.NotSupported, "rotate"),
        ({"layers": [SPEC, replace(SPEC, key_bounds=True)]}, numkv.NotSupported, "key_bounds"),
        ({"layers": []}, numkv.DimensionMismatch, "layers"),
        ({"layers": [numkv.LayerSpec()]}, ValueError, "layers"),
        ({"num_blocks": None}, TypeError, "num_blocks"),
        ({"max_nbytes": 10**6}, TypeError, "max_nbytes"),
        ({"sharing": {}}, TypeError, "sharing"),
        ({"kind": "int8"}, TypeError, "kind; say it in each LayerSpec"),
        ({"num_layers": 7}, TypeError, "num_layers; say it in each LayerSpec"),
        ({"layers": None, "num_layers": 7}, TypeError, "num_kv_heads"),
    ],
)
def test_odd_arguments(options, error, name):
    with pytest.raises(error, match=name):
        numkv.PagedKVCache(**{"layers": specs_of(), "num_blocks": 8} | options)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"shares": "a"}, TypeError, "shares"),
        ({"window_left": 3, "chunk_size": 4}, ValueError, "chunk_size"),
        ({"chunk_size": "a"}, TypeError, "chunk_size"),
        ({"chunk_size": 0}, numkv.DimensionMismatch, "chunk_size"),
        ({"num_kv_heads": None}, TypeError, "num_kv_heads"),
        ({"head_dim": 0}, numkv.DimensionMismatch, "head_dim"),
        ({"kind": "fp3"}, numkv.UnsupportedDType, "fp3"),
    ],
)
def test_odd_layers(options, error, name):
    with pytest.raises(error, match=name):
        numkv.LayerSpec(**{"num_kv_heads": 1, "head_dim": 8} | options)


def test_layers_say_what_they_were_given_and_make_the_same_cache():
    cache = make()
    given = specs_of()
    own = [of if of.shares is None else replace(given[of.shares], shares=of.shares) for of in given]
    assert cache.layers == tuple(own)
    assert numkv.PagedKVCache(layers=cache.layers, num_blocks=1).layers == cache.layers
    assert repr(own[1]) == "LayerSpec(num_kv_heads=1, head_dim=16, kind=fp32, window_left=3)"


def test_one_budget_in_bytes():
    cache = make(num_blocks=None, max_nbytes=100_000)
    assert cache.nbytes <= 100_000
    assert make(num_blocks=cache.num_blocks + 1).nbytes > 100_000
    alike = numkv.PagedKVCache(2, 2, 8, max_nbytes=100_000, kind="int8")
    assert alike.nbytes <= 100_000
    assert (
        numkv.PagedKVCache(2, 2, 8, num_blocks=alike.num_blocks + 1, kind="int8").nbytes > 100_000
    )


def test_blocks_of_several_shapes_waste_little():
    """Five layers with a window for one without, of half as many heads but twice as wide, as in newer Gemmas."""
    n = 30
    sliding, full = (
        numkv.LayerSpec(8, 256, kind="bf16", window_left=511),
        numkv.LayerSpec(4, 512, kind="bf16"),
    )
    layers = Layers.of([full if i % 6 == 5 else sliding for i in range(n)])
    groups = groups_of(layers, 16)
    assert [len(g.layers) for g in groups] == [5] * 6
    assert page_bytes(layers, groups, 16) == 5 * 2 * 16 * 8 * 256 * 2
    mixed = Layers.of([numkv.LayerSpec(8, 128, kind=kind) for kind in ["bf16"] * 4 + ["int8"] * 20])
    groups = groups_of(mixed, 16)
    used = sum(mixed.rows[i].offsets(16)[1] for i in range(24))
    assert len(groups) * page_bytes(mixed, groups, 16) < 1.1 * used


def test_layers_that_are_alike_are_grouped_as_ever():
    plain = numkv.PagedKVCache(6, 2, 8, num_blocks=4)
    lists = numkv.PagedKVCache(layers=[numkv.LayerSpec(2, 8) for _ in range(6)], num_blocks=4)
    assert plain._groups == lists._groups
    assert plain._store.geometry == lists._store.geometry
    assert len(plain._store.geometry) == 5
    assert plain.nbytes == lists.nbytes


def test_copies_and_pickles(cpu):
    to, host = cpu
    cache, plain = make(), Plain()
    seq = cache.add()
    grow(cache, to, plain, [seq], [PROMPT[:11]])
    for other in (cache.copy(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.nbytes == cache.nbytes
        check(other, to, host, plain)
        own = copy.deepcopy(plain)
        grow(other, to, own, [seq], [[1, 2]], host=host)
        assert other.cached_len(other.add(PROMPT)) == 11
        own.texts[1] = own.texts[seq][:11]
    check(cache, to, host, plain)


def test_saved_and_loaded(cpu, tmp_path):
    to, host = cpu
    cache, plain = make(), Plain()
    seqs = [cache.add(), cache.add()]
    grow(cache, to, plain, seqs, [PROMPT[:11], [7, 7]])
    seqs.append(cache.fork(seqs[0]))
    plain.fork(*seqs[::2])
    numkv.save(tmp_path / "cache", cache)
    loaded = numkv.load(tmp_path / "cache")
    check(loaded, to, host, plain)
    assert loaded.cached_len(loaded.add([7, 7, 1])) == 2
    swapped = [cache.swap_out(seq) for seq in seqs]
    numkv.save(tmp_path / "sequences", swapped)
    other = make()
    for one in numkv.load(tmp_path / "sequences"):
        other.swap_in(one)
    check(other, to, host, plain)
    for wrong in (
        make([*LAYERS[:-1], Layer(1, 16, 16, window=3)]),
        make([x._replace(chunk=0) for x in LAYERS]),
        numkv.PagedKVCache(7, 2, 8, num_blocks=8, block_size=4),
    ):
        with pytest.raises(numkv.DimensionMismatch, match="geometry"):
            wrong.swap_in(swapped[0])


def test_neighbours_in_a_page_stay_as_they_are(cpu):
    """Bytes of one layer's rows are no other layer's: every row written, none changed by another's."""
    cache = make(num_blocks=8)
    for layer in cache._store.layers.storing:
        pool, _ = cache._store.place(layer)
        for x in pool.arrays():
            x[...] = layer + 1
        groups = cache._store.groups
        for other in groups[cache._store.places[layer][1]].layers:
            for x in cache._store.place(other)[0].arrays():
                assert other > layer or (x == other + 1).all()


@pytest.mark.parametrize("rotate", [False, True])
def test_a_layer_in_pages_is_a_cache_of_its_own(target, to, host, rotate):
    """Bit for bit, in kinds with scales of rows, of groups of elements and of heads; also moved, swapped and copied."""
    kinds, dims = ["int8", "int4", "fp8_e4m3"], [8, 16, 8]
    options = {"num_blocks": 24, "block_size": 4, "target": target}
    specs = [
        numkv.LayerSpec(2, dim, kind=kind, rotate=rotate)
        for dim, kind in zip(dims, kinds, strict=True)
    ]
    mixed = numkv.PagedKVCache(layers=specs, **options)
    alone = [numkv.PagedKVCache(layers=[spec], **options) for spec in specs]
    rng = np.random.default_rng(1)
    new = [rng.standard_normal((2, 10, 2, dim)).astype(np.float32) for dim in dims]
    mixed.set_scales(2, k=0.25, v=np.array([0.5, 2.0], np.float32))
    alone[2].set_scales(0, k=0.25, v=np.array([0.5, 2.0], np.float32))
    seq, step = mixed.add(), mixed.reserve([0], 10)
    for layer, cache in enumerate(alone):
        cache.add()
        own = cache.reserve([0], 10)
        for which, number in ((step, layer), (own, 0)):
            which.append(number, *(to(x) for x in new[layer]))
        cache.commit(own)
    mixed.commit(step)
    angles = np.arange(16)[:, None] * [1.0, 0.3, 0.1, 0.01]
    shift = numkv.rope_shift(*(f(angles).astype(np.float32) for f in (np.cos, np.sin)))

    def same(of, numbers):
        for layer, (cache, number) in enumerate(zip(alone, numbers, strict=True)):
            q = to(rng.standard_normal((1, 4, dims[layer])).astype(np.float32))
            found = host(of[0].decode_attention(layer, [of[1]], q))
            assert found.tobytes() == host(cache.decode_attention(0, [number], q)).tobytes()
        of[0].check()

    same((mixed, seq), [0] * 3)
    for cache in (mixed, *alone):
        cache.compact(0, [0, 1, 4, 5, 6, 8, 9], shift)
    same((mixed, seq), [0] * 3)
    again = mixed.swap_in(mixed.swap_out(seq))
    mixed.remove(seq)
    same((mixed, again), [0] * 3)
    same((mixed.copy(), again), [0] * 3)
