"""Calls of objects on CUDA that go the short way: by kernels' real PTX, interpreted, they give what a reference gives.

Each object is called often enough for its launches to be repeated, with other arrays each time. The stub driver says
that these calls were launches and nothing else.
"""

import contextlib

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache
from ptx_on_cuda import device

import numkv
from numkv import targets

driver = device.driver
F32 = np.float32
HEADS, GROUP, DIM = 2, 2, 32


def to(x):
    return targets.get("cuda").asarray(x)


def host(x):
    return targets.get("cuda").to_host(x)


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(F32)


def stored(x, kind):
    """Rows as a kind keeps them, in float64."""
    if kind == "int8":
        return naive.dequantise(*naive.quantise(x, kind))
    return naive.round_to(x, kind)


def reference(q, k, v):
    """Attention of the last tokens' queries ``(n, q heads, dim)`` over one sequence's rows ``(tokens, heads, dim)``."""
    k, v = (np.swapaxes(x, 0, 1)[None] for x in (k, v))
    return naive.attention(q, k, v, [k.shape[2]], [0, len(q)])[0]


def only_launches(call):
    """Make a call, which may launch and do nothing else; how many launches there were."""
    device.forget()
    with driver.calls() as log:
        result = call()
    device.check()
    groups = log.groups()
    launches = groups.pop("launches")
    assert not any(groups.values()), groups
    return result, launches


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_tokens_one_after_another(kind):
    """Of two layers, with rows of other values each time; the last ones are launches alone."""
    cache = numkv.KVCache(2, HEADS, DIM, max_seq_len=40, kind=kind, target="cuda")
    rows, queries = random(7, 2, 2, HEADS, DIM), random(7, 2, HEADS * GROUP, DIM)
    for i in range(7):
        for layer in range(2):
            k, v, q = (to(x) for x in (*rows[i, layer], queries[i, layer]))
            if i < 4:
                cache.append(layer, k, v)
                got = cache.decode_attention(layer, q)
            else:
                _, launches = only_launches(lambda a=(layer, k, v): cache.append(*a))
                assert launches == 1
                got, _ = only_launches(lambda a=(layer, q): cache.decode_attention(*a))
            so_far = (stored(rows[: i + 1, layer, side], kind) for side in range(2))
            wanted = reference(queries[i, layer][None], *so_far)
            tolerances.assert_rows_close(
                host(got)[None], wanted, tolerances.attention(kind, "fp32")
            )
        cache.advance()
    cache.check()


def test_a_cache_that_grows_and_is_cut():
    cache, rows = numkv.KVCache(1, HEADS, DIM, kind="fp32", target="cuda"), random(36, HEADS, DIM)
    q, kept = random(HEADS * GROUP, DIM), []
    for i, row in enumerate(rows):
        cache.append(0, to(row), to(row))
        kept.append(row)
        cache.advance()
        if i % 7 == 6:
            cache.truncate(len(kept) - 3)
            kept = kept[:-3]
        if i % 5:
            continue
        x = np.stack(kept)
        got = host(cache.decode_attention(0, to(q)))
        tolerances.assert_rows_close(
            got[None], reference(q[None], x, x), tolerances.attention("fp32", "fp32")
        )
    assert np.array_equal(host(cache.k(0)), np.stack(kept))
    other = cache.copy()
    other.append(0, to(rows[0]), to(rows[0]))
    assert np.array_equal(host(other.k(0)), np.stack([*kept, rows[0]]))
    assert np.array_equal(host(cache.k(0)), np.stack(kept))


@pytest.mark.parametrize("make", [
    lambda: numkv.ContiguousLayer(32, HEADS, DIM, kind="fp32", target="cuda"),
    lambda: numkv.PagedLayer(8, 4, HEADS, DIM, kind="fp32", target="cuda"),
], ids=["contiguous", "paged"])  # fmt: skip
def test_projections_of_a_layer(make):
    """Positions move on with the length, or as they are given."""
    layer, cos, sin = make(), *naive.rope_tables(40, DIM)
    tables = [to(np.ascontiguousarray(x, F32)) for x in (cos, sin)]
    heads, seen = HEADS * GROUP, []
    for i, row in enumerate(random(10, 1, (HEADS * GROUP + 2 * HEADS) * DIM)):
        first = None if i % 2 else 2 * i
        q = layer.write(
            to(row), num_q_heads=heads, cos=tables[0], sin=tables[1], qk_mode=2, pos_offset=first
        )
        wanted = naive.write(
            row, heads, HEADS, DIM, 2, cos, sin, None, None, 1e-6, i if first is None else first
        )
        np.testing.assert_allclose(host(q), wanted[0], atol=1e-5)
        seen.append(wanted[1:])
        k, v = (np.concatenate([np.asarray(x[side]) for x in seen]) for side in range(2))
        got = host(layer.decode_attention(q))
        tolerances.assert_rows_close(got, reference(wanted[0], k, v), 1e-5)
    with pytest.raises(IndexError, match="position"):
        layer.write(to(row), num_q_heads=heads, cos=tables[0], sin=tables[1], qk_mode=2, pos_offset=40)  # fmt: skip


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_steps(kind):
    """Of two sequences over the edges of blocks; tables of other widths, and tokens that are not accepted."""
    cache = numkv.PagedKVCache(2, HEADS, DIM, num_blocks=32, block_size=4, kind=kind, target="cuda")
    seqs, kept = [cache.add(), cache.add()], {0: [], 1: []}
    for i in range(12):
        lens = [3, 1] if i == 0 else [1, 1]
        step = cache.reserve(seqs, lens)
        rows, q = random(sum(lens), HEADS, DIM) * (i + 1), random(sum(lens), HEADS * GROUP, DIM)
        now = {0: kept[0] + list(rows[: lens[0]]), 1: kept[1] + list(rows[lens[0] :])}
        for layer in range(2):
            step.append(layer, to(rows), to(rows))
            got, at = host(step.attention(layer, to(q))), 0
            for s, n in enumerate(lens):
                x = stored(np.stack(now[s]), kind)
                wanted = reference(q[at : at + n], x, x)
                bound = tolerances.attention(kind, "fp32") * (i + 1)
                tolerances.assert_rows_close(got[at : at + n], wanted, bound)
                at += n
        if i % 5 == 4:
            cache.rollback(step)
        else:
            cache.commit(step)
            kept = now
    cache.check()
    step = cache.reserve(seqs, 1)
    rows, q = to(random(2, HEADS, DIM)), to(random(2, HEADS * GROUP, DIM))
    assert only_launches(lambda: step.append(0, rows, rows))[1] == 1
    only_launches(lambda: step.attention(0, q))
    with pytest.raises(numkv.DimensionMismatch):
        step.append(0, to(random(3, HEADS, DIM)), to(random(3, HEADS, DIM)))


def test_bound_calls():
    """Of a cache, a layer and steps; what is not finite is said later."""
    q_heads, kinds = HEADS * GROUP, {"kind": "int8", "target": "cuda"}
    cache = numkv.KVCache(1, HEADS, DIM, max_seq_len=16, **kinds)
    layer = numkv.ContiguousLayer(16, HEADS, DIM, **kinds)
    paged = paged_kv_cache(1, HEADS, DIM, num_blocks=8, block_size=4, **kinds)
    of_cache, of_layer, of_paged = (x.bind(q_heads) for x in (cache, layer, paged))
    seq, rows = paged.add(), random(6, 1, HEADS, DIM)
    for i, row in enumerate(rows):
        q, k, out = random(1, q_heads, DIM) + i, to(row), to(np.zeros((1, q_heads, DIM), F32))
        step = paged.reserve([seq], 1)
        got = [
            of_cache.begin()(0, to(q), k, k, out),
            of_layer(to(q), k, k),
            of_paged.begin(step)(0, to(q), k, k),
        ]
        cache.advance()
        paged.commit(step)
        x = stored(rows[: i + 1, 0], "int8")
        for found in got:
            bound = tolerances.attention("int8", "fp32")
            tolerances.assert_rows_close(host(found), reference(q, x, x), bound)
    with pytest.raises(numkv.DimensionMismatch):
        of_layer(to(q), to(random(2, HEADS, DIM)), k)
    wrong = to(bad(1, HEADS, DIM, at=(0, 1, 5)))
    step = paged.reserve([seq], 1)
    of_cache.begin()(0, to(q), k, wrong)
    of_layer(to(q), wrong, k)
    of_paged.begin(step)(0, to(q), k, wrong)
    for call in (cache.advance, layer.check, lambda: paged.commit(step)):
        with pytest.raises(numkv.NonFiniteInput, match="truncate"):
            call()


def test_arrays_within_a_caches_own_memory():
    """They are refused, also where a call like it has been made before."""
    cache = numkv.KVCache(1, HEADS, DIM, max_seq_len=16, kind="fp32", target="cuda")
    for row in random(4, 1, HEADS, DIM):
        cache.append(0, to(row), to(row))
    own = cache.k(0)[1:2]
    apart = to(np.zeros((1, HEADS, 16 * DIM), F32))[:, :, :DIM]  # of the same strides
    for _ in range(3):
        cache.append(0, apart, apart)
    assert own.strides[1:] == apart.strides[1:]
    with pytest.raises(numkv.NotSupported, match="memory"):
        cache.append(0, own, own)
    q = to(random(1, HEADS * GROUP, DIM))
    for _ in range(3):
        cache.decode_attention(0, q, out=to(np.zeros((1, HEADS * GROUP, DIM), F32)))
    buffer = cache._pool.k
    with pytest.raises(numkv.NotSupported, match="memory"):
        cache.decode_attention(0, q, out=buffer.reshape((16 * HEADS, 1, DIM))[:4].reshape((1, 4, DIM)))  # fmt: skip


def test_streams():
    """A call that repeats goes to the stream that is named, and after what the cache's own has done."""
    from numba import cuda

    cache = numkv.KVCache(1, HEADS, DIM, max_seq_len=32, kind="fp32", target="cuda")
    row, q, other = to(random(HEADS, DIM)), to(random(HEADS * GROUP, DIM)), cuda.stream()
    for _ in range(4):
        for stream in (None, other):
            with driver.calls() as log, numkv.on_stream(stream):
                cache.append(0, row, row)
                cache.decode_attention(0, q)
            launched = {c.stream for c in log.calls if c.name in driver_launches()}
            assert launched == {0 if stream is None else int(other.handle)}


def test_streams_of_functions():
    """Named or not, with calls that repeat; a call within another stream's context goes to the innermost."""
    from numba import cuda

    (k, v), lens = (to(np.zeros((1, HEADS, 16, DIM), F32)) for _ in range(2)), to(np.array([3]))
    q, other, inner = to(random(1, HEADS * GROUP, DIM)), cuda.stream(), cuda.stream()
    rows, slots = to(random(1, HEADS, DIM)), to(np.array([3]))
    for _ in range(4):
        for names in ((), (other,), (other, inner), (other, None)):
            with contextlib.ExitStack() as stack, driver.calls() as log:
                for stream in names:
                    stack.enter_context(numkv.on_stream(stream))
                numkv.decode_attention(q, k, v, lens)
                numkv.paged_append(rows, rows, k, v, slots)
            launched = {c.stream for c in log.calls if c.name in driver_launches()}
            last = names[-1] if names else None
            assert launched == {0 if last is None else int(last.handle)}


def test_lengths_on_two_streams():
    """Each stream has lengths of its own: what one has been given is not what the other's calls go by."""
    from numba import cuda

    cache = numkv.KVCache(1, HEADS, DIM, max_seq_len=32, kind="fp32", target="cuda")
    rows, q, streams = random(7, HEADS, DIM), random(1, HEADS * GROUP, DIM), (None, cuda.stream())
    for i, row in enumerate(rows):
        cache.append(0, to(row), to(row))
        wanted = reference(q, rows[: i + 1], rows[: i + 1])
        for stream in streams:
            with numkv.on_stream(stream):
                got = host(cache.decode_attention(0, to(q)))
            tolerances.assert_rows_close(got, wanted, tolerances.attention("fp32", "fp32"))


def driver_launches():
    from tools.cuda.stub_driver import LAUNCHES

    return LAUNCHES


# ---------------------------------------------------------------- rows that are not finite


def bad(*shape, at):
    x = random(*shape)
    x[at] = np.nan
    return x


def test_each_object_is_told_of_its_own_rows():
    """Though nobody looked in between; of calls that were made before, too."""
    caches = [numkv.KVCache(1, HEADS, DIM, max_seq_len=16, kind="int8", target="cuda") for _ in range(3)]  # fmt: skip
    good = to(random(1, HEADS, DIM))
    for cache in caches:
        for _ in range(3):
            cache.append(0, good, good)
    caches[0].append(0, to(bad(1, HEADS, DIM, at=(0, 1, 5))), good)
    caches[2].append(0, good, to(bad(1, HEADS, DIM, at=(0, 0, 7))))
    for cache, name, index in ((caches[0], "k", (0, 1, 5)), (caches[2], "v", (0, 0, 7))):
        for call in (lambda c=cache: c.append(0, good, good), lambda c=cache: c.advance(4)):
            with pytest.raises(numkv.NonFiniteInput, match=f"`{name}`.*truncate to 3 tokens") as caught:  # fmt: skip
                call()
            assert caught.value.index == index
    caches[1].append(0, good, good)
    caches[1].advance(4)
    caches[0].clear()
    caches[0].append(0, good, good)


def test_what_was_dropped_before_it_was_told_is_forgotten():
    cache = numkv.ContiguousLayer(16, HEADS, DIM, kind="int8", target="cuda")
    good = to(random(1, HEADS, DIM))
    for _ in range(3):
        cache.append(good, good)
    cache.append(good, to(bad(1, HEADS, DIM, at=(0, 0, 7))))
    cache.truncate(3)
    for _ in range(3):
        cache.append(good, good)
    cache.check()
    cache.append(good, to(bad(1, HEADS, DIM, at=(0, 0, 7))))
    cache.truncate(7)
    with pytest.raises(numkv.NonFiniteInput, match="truncate to 6 tokens"):
        cache.check()


def test_each_sequence_of_a_step_is_told():
    cache = numkv.PagedKVCache(1, HEADS, DIM, num_blocks=16, block_size=4, kind="int8", target="cuda")  # fmt: skip
    seqs, good = [cache.add() for _ in range(3)], to(random(3, HEADS, DIM))
    for _ in range(3):
        step = cache.reserve(seqs, 1)
        step.append(0, good, good)
        cache.commit(step)
    rows = bad(3, HEADS, DIM, at=(0, 1, 3))
    rows[2, 0, 1] = np.inf
    step = cache.reserve(seqs, 1)
    step.append(0, to(rows), good)
    for accepted in ([1, 0, 0], [0, 0, 1], [1, 1, 1]):
        with pytest.raises(numkv.NonFiniteInput):
            cache.commit(step, accepted)
    cache.commit(step, [0, 1, 0])
    assert [cache.length(seq) for seq in seqs] == [3, 4, 3]
    step = cache.reserve(seqs, 1)
    step.append(0, to(rows), good)
    cache.rollback(step)  # before it was told
    step = cache.reserve(seqs, 1)
    step.append(0, good, good)
    cache.commit(step)
    cache.check()


def test_rotated_rows_are_looked_at_as_they_are_written():
    """The row is told, not the element, which rotation has spread."""
    layer = numkv.ContiguousLayer(16, HEADS, DIM, kind="int8", rotate=True, target="cuda")
    good = to(random(2, HEADS, DIM))
    layer.append(good, good)
    layer.append(to(bad(2, HEADS, DIM, at=(1, 1, 9))), good)
    with pytest.raises(numkv.NonFiniteInput, match="truncate to 3 tokens") as caught:
        layer.append(good, good)
    assert caught.value.index == (1, 1)
    layer.truncate(3)
    qkv = random(2, (HEADS * GROUP + 2 * HEADS) * DIM)
    qkv[0, (HEADS * GROUP + HEADS) * DIM + 3] = np.inf
    layer.write(to(qkv), num_q_heads=HEADS * GROUP, qk_mode=0)
    with pytest.raises(numkv.NonFiniteInput, match=r"`qkv`.*truncate to 3 tokens") as caught:
        layer.check()
    assert caught.value.index == (0,)


@pytest.mark.parametrize("make", [
    lambda **more: numkv.ContiguousLayer(32, HEADS, DIM, kind="int8", target="cuda", **more),
    lambda **more: numkv.PagedLayer(8, 4, HEADS, DIM, kind="int8", target="cuda", **more),
], ids=["contiguous", "paged"])  # fmt: skip
def test_rows_of_a_window_are_looked_at(make):
    """Nobody waits; what leaves the window is zeros by then, and told with the index that it came with."""
    layer, k, v = (
        make(full_precision=numkv.FullPrecision(3)),
        random(9, HEADS, DIM),
        random(9, HEADS, DIM + 1)[..., :DIM],
    )
    layer.append(to(k[:2]), to(v[:2]))
    k[4, 1, 6], v[7, 0, 2] = np.nan, np.inf
    wait = ("blocking copies", "blocking waits")
    with driver.calls() as log:
        layer.append(to(k[2:5]), to(v[2:5]))
    device.check()
    assert not any(log.groups()[name] for name in wait)
    with pytest.raises(numkv.NonFiniteInput, match=r"`k`.*truncate to 4 tokens") as caught:
        layer.append(to(k[:1]), to(k[:1]))
    assert caught.value.index == (2, 1, 6)
    layer.truncate(4)
    layer.append(to(random(1, HEADS, DIM)), to(v[4:5]))
    with driver.calls() as log:
        layer.append(to(k[5:]), to(v[5:]))
    assert not any(log.groups()[name] for name in wait)
    copied = layer.copy()
    for told in (layer, copied):
        with pytest.raises(numkv.NonFiniteInput, match=r"`v`.*truncate to 7 tokens") as caught:
            told.check()
        assert caught.value.index == (2, 0, 2)
        told.truncate(7)
        told.append(to(random(3, HEADS, DIM)), to(random(3, HEADS, DIM)))
        told.check()


def test_cells_are_told_of_by_calls_that_repeat():
    """Two caches and three sequences; each put is one launch, the first layer's too."""
    caches = [numkv.CausalCache() for _ in range(2)]
    for cache in caches:
        cache.init("int8", 3, 16, 8, "cuda")
    good = to(random(3, HEADS, DIM))
    for i in range(4):
        for cache in caches:
            cache.start_forward(numkv.Batch([i] * 3, [0, 1, 2]))
            if i < 3:
                cache.put(0, good, good)
                cache.put(1, good, good)
    rows = to(bad(3, HEADS, DIM, at=(1, 1, 5)))
    with driver.calls() as log:
        caches[0].put(0, good, good)
        caches[0].put(1, good, rows)
        caches[1].put(0, good, good)
        caches[1].put(1, good, good)
    device.check()
    groups = log.groups()
    assert groups["launches"] == 4
    assert groups["async copies"] == 2  # the slots of each pass
    assert not groups["blocking waits"] + groups["blocking copies"]
    with pytest.raises(numkv.NonFiniteInput, match="remove sequence 1 from position 3") as caught:
        caches[0].start_forward(numkv.Batch([4], [1]))
    assert caught.value.index == (1, 1, 5)
    caches[1].start_forward(numkv.Batch([4], [1]))
    caches[1].check()
    caches[0].start_forward(numkv.Batch([4], [2]))
    caches[0].remove(1, 3)
    caches[0].check()


def test_each_repeated_call_of_a_function_is_told():
    """Under its own number: what two of them found is said twice."""
    made = numkv.kind("int8")
    pools = [to(np.zeros((2, HEADS, 4, DIM), made.word)) for _ in "kv"]
    scales = {f"{n}_scale": to(np.ones((2, HEADS, 4), F32)) for n in "kv"}
    slots, good = to(np.arange(2)), to(random(2, HEADS, DIM))

    def append(rows):
        numkv.paged_append(rows, good, *pools, slots, **scales)

    for _ in range(3):
        append(good)
    late = to(bad(2, HEADS, DIM, at=(1, 0, 4)))
    early = to(bad(2, HEADS, DIM, at=(0, 1, 3)))
    for rows in (early, late):
        _, launches = only_launches(lambda rows=rows: append_unseen(append, rows))
        assert launches == 1
    for index in ((0, 1, 3), (1, 0, 4)):
        with pytest.raises(numkv.NonFiniteInput) as caught:
            append(good)
        assert caught.value.index == index
    append(good)


def append_unseen(append, rows):
    """Append before anything has been told."""
    from numkv.kernels.cuda import late

    watch = late.of_functions()
    watch.arrived = lambda: False
    try:
        append(rows)
    finally:
        del watch.arrived


def test_a_repeated_call_whose_launch_fails():
    """Nothing has changed, and the next one is right."""
    layer, rows = (
        numkv.ContiguousLayer(16, HEADS, DIM, kind="int8", target="cuda"),
        random(5, HEADS, DIM),
    )
    for i in range(3):
        layer.append(to(rows[i : i + 1]), to(rows[i : i + 1]))
    with driver.failing("cuLaunchKernelEx", 800), pytest.raises(RuntimeError, match=r"^a launch: "):
        layer.append(to(rows[3:4]), to(rows[3:4]))
    assert layer.seq_len == 3
    layer.append(to(rows[4:5]), to(rows[4:5]))
    layer.check()
    q, x = random(1, HEADS * GROUP, DIM), stored(rows[[0, 1, 2, 4]], "int8")
    found = host(layer.decode_attention(to(q)))
    tolerances.assert_rows_close(found, reference(q, x, x), tolerances.attention("int8", "fp32"))
