"""A `PagedKVCache` whose layers have rows of several shapes and kinds, chunks, or another layer's rows."""

import copy
import pickle

import numpy as np
import pytest
from mixed_caches import LAYERS, Layer, Plain, arguments, check, grow, make, queries

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


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"shares": {0: 4, 4: 0}}, ValueError, "shares"),
        ({"shares": {3: 9}}, IndexError, "shares"),
        ({"shares": {3: "a"}}, TypeError, "shares"),
        ({"shares": [0] * 3}, numkv.DimensionMismatch, "shares"),
        ({"shares": {0: 1}}, ValueError, "shares"),
        ({"chunks": [4] * 7}, ValueError, "chunks"),
        ({"chunks": 4}, TypeError, "chunks"),
        ({"chunks": [-1] * 7}, numkv.DimensionMismatch, "chunks"),
        ({"num_kv_heads": [2] * 6}, numkv.DimensionMismatch, "num_kv_heads"),
        ({"head_dim": [8] * 6 + [0]}, numkv.DimensionMismatch, "head_dim"),
        ({"kind": ["fp32"] * 6 + ["fp3"]}, numkv.UnsupportedDType, "fp3"),
        ({"num_blocks": None}, TypeError, "num_blocks"),
        ({"max_nbytes": 10**6}, TypeError, "max_nbytes"),
        ({"sharing": {}}, TypeError, "sharing"),
    ],
)
def test_odd_arguments(options, error, name):
    with pytest.raises(error, match=name):
        numkv.PagedKVCache(**arguments() | {"num_blocks": 8} | options)


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
    layers = Layers.check(
        n, ([4 if i % 6 == 5 else 8 for i in range(n)], [512 if i % 6 == 5 else 256 for i in range(n)], None),
        ("bf16", None, None), [-1 if i % 6 == 5 else 511 for i in range(n)], {},
    )  # fmt: skip
    groups = groups_of(layers, 16)
    assert [len(g.layers) for g in groups] == [5] * 6
    assert page_bytes(layers, groups, 16) == 5 * 2 * 16 * 8 * 256 * 2
    mixed = Layers.check(
        24, ([8] * 24, 128, None), (["bf16"] * 4 + ["int8"] * 20, None, None), None, {}
    )
    groups = groups_of(mixed, 16)
    used = sum(mixed.rows[i].offsets(16)[1] for i in range(24))
    assert len(groups) * page_bytes(mixed, groups, 16) < 1.1 * used


def test_layers_that_are_alike_are_grouped_as_ever():
    plain = numkv.PagedKVCache(6, 2, 8, num_blocks=4, windows=[-1, 4, 4, -1, 4, 4])
    lists = numkv.PagedKVCache(
        6, [2] * 6, [8] * 6, num_blocks=4, windows=[-1, 4, 4, -1, 4, 4], kind=["fp16"] * 6
    )
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
    options = {"num_blocks": 24, "block_size": 4, "rotate": rotate, "target": target}
    mixed = numkv.PagedKVCache(3, 2, dims, kind=kinds, **options)
    alone = [
        numkv.PagedKVCache(1, 2, dim, kind=kind, **options)
        for kind, dim in zip(kinds, dims, strict=True)
    ]
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
