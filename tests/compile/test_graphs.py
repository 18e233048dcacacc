"""CUDA graphs on the stub driver: what can be captured gives, when it is replayed, what eager calls give."""

from ptx_on_cuda import device  # leaves this file out where the simulator is on

# isort: split
import gc
import threading

import naive
import numpy as np
import pytest
from captured import RELAXED, captured, new_stream
from layer_lists import paged_kv_cache

import numkv
from numkv import targets
from tools.cuda import interpret

interpret.few_blocks()
driver = device.driver
HEADS, DIM, BLOCK = 2, 32, 4


@pytest.fixture
def where():
    device.forget()
    yield targets.get("cuda")
    device.check()
    device.forget()


@pytest.fixture
def stream(where):
    """A new stream, on which the test's calls run."""
    made = new_stream()
    with numkv.on_stream(made):
        yield made


def rows(rng, tokens, heads=HEADS):
    return rng.standard_normal((tokens, heads, DIM)).astype(np.float16)


def paged(layers=2, kind="fp16", blocks=64, **options):
    return paged_kv_cache(
        layers, HEADS, DIM, num_blocks=blocks, block_size=BLOCK, kind=kind, target="cuda", **options
    )


def launches(log):
    return [call for call in log.calls if call.name.startswith("cuLaunchKernel")]


def test_a_captured_step_replays_with_other_lengths_slots_and_tables(where):
    """Appends and attention of two layers, one of which has a window; each replay against the oracle."""
    rng, stream = np.random.default_rng(0), new_stream()
    cache = paged(windows=[-1, 5])
    with numkv.on_stream(stream):
        buffers = cache.step_buffers(num_seqs=3, max_length=40)
    k, v, q, out = ([where.zeros((3, h, DIM), np.float16) for _ in range(2)] for h in (2, 2, 4, 4))
    stored = {}  # rows of each sequence and layer

    def fill(seqs, lens):
        step = cache.reserve(seqs, lens)
        given = [rows(rng, 2 * sum(lens)) for _ in range(2)]
        at = 0
        for layer in range(2):
            part = slice(layer * sum(lens), (layer + 1) * sum(lens))
            step.append(layer, *(where.asarray(x[part]) for x in given))
            at = part.start
            for seq, n in zip(seqs, lens, strict=True):
                pair = stored.setdefault((seq, layer), ([], []))
                for side, x in zip(pair, given, strict=True):
                    side.extend(x[at : at + n])
                at += n
        cache.commit(step)

    seqs = [cache.add() for _ in range(3)]
    with numkv.on_stream(stream):
        fill(seqs, [3, 9, 1])

    def calls(step):
        for layer in range(2):
            step.append(layer, k[layer], v[layer])
            step.attention(layer, q[layer], out=out[layer])

    step = cache.reserve(seqs, 1, into=buffers)
    with numkv.on_stream(stream):
        calls(step)  # once, so that kernels are loaded
    cache.rollback(step)
    step = cache.reserve(seqs, 1, into=buffers)
    with driver.calls() as log, captured(stream) as graph:
        calls(step)
    assert step.unwritten_layers == [0, 1]
    assert not log.groups()["blocking copies"] + log.groups()["blocking waits"]
    cache.rollback(step)
    cache.remove(seqs[1])
    late = cache.add()
    with numkv.on_stream(stream):
        fill([late], [21])
    for chosen in ([seqs[0], seqs[2], late], [late], [seqs[2], late]):
        new = [[rows(rng, 3, h) for _ in range(2)] for h in (2, 2, 4)]
        for there, given in zip((k, v, q), new, strict=True):
            for x, y in zip(there, given, strict=True):
                x.copy_to_device(y)
        with driver.calls() as log:
            step = cache.reserve(chosen, 1, into=buffers)
        groups = log.groups()
        assert (groups["async copies"], groups["launches"], groups["blocking waits"]) == (1, 0, 0)
        graph.launch(stream)
        step.mark_written()
        cache.commit(step)
        for layer in range(2):
            found = where.to_host(out[layer])
            for i, seq in enumerate(chosen):
                pair = stored[seq, layer]
                for side, x in zip(pair, new[:2], strict=True):
                    side.append(x[layer][i])
                n = len(pair[0])
                length = np.array([n])
                kv = [np.moveaxis(np.array(x), 0, 1)[None] for x in pair]
                starts = np.array([0, 1])
                query, window = new[2][layer][i : i + 1], (-1, 5)[layer]
                want, _ = naive.attention(query, *kv, length, starts, window_left=window)
                np.testing.assert_allclose(found[i : i + 1], want, atol=2e-3)
            assert not found[len(chosen) :].any()
    cache.check()


def filled(cache, where, tokens=3, seqs=2):
    """Sequences with some tokens, of ones."""
    made = [cache.add() for _ in range(seqs)]
    step = cache.reserve(made, tokens)
    given = where.asarray(np.ones((tokens * seqs, HEADS, DIM), np.float16))
    for layer in range(cache.num_layers):
        step.append(layer, given, given)
    cache.commit(step)
    return made


@pytest.mark.parametrize("rotate", [False, True])
def test_a_row_that_is_not_finite_in_a_replay_is_told_of_its_sequence(where, rotate, stream):
    """The graph's call has the number of the day it was captured; the step is the one that was replayed."""
    cache = paged(1, "int8", rotate=rotate)
    buffers = cache.step_buffers(2, max_length=20)
    seqs = filled(cache, where, seqs=3)
    k = where.asarray(np.ones((2, HEADS, DIM), np.float16))
    step = cache.reserve(seqs[:2], 1, into=buffers)
    step.append(0, k, k)
    cache.rollback(step)
    step = cache.reserve(seqs[:2], 1, into=buffers)
    with captured(stream) as graph:
        step.append(0, k, k)
    cache.rollback(step)
    for _ in range(2):
        step = cache.reserve([seqs[2]], 1, into=buffers)
        graph.launch(stream)
        step.mark_written()
        cache.commit(step)
    bad = np.ones((2, HEADS, DIM), np.float16)
    bad[1, 0, 5] = np.inf
    k.copy_to_device(bad)
    step = cache.reserve([seqs[0], seqs[2]], 1, into=buffers)
    graph.launch(stream)
    step.mark_written()
    with pytest.raises(numkv.NonFiniteInput, match="truncate sequence 2 to 5 tokens") as error:
        cache.commit(step)
    assert error.value.index == ((1, 0) if rotate else (1, 0, 5))
    cache.commit(step, [1, 0])  # the good one's tokens
    assert [cache.length(seq) for seq in seqs] == [4, 3, 5]
    cache.reserve([seqs[2]], 1)
    cache.check()


def test_what_a_graph_reads_lives_as_long_as_it_and_no_longer(where, stream):
    """The cache's memory, buffers and the scratch of calls; freed when the graph is destroyed."""
    cache = paged(1)
    buffers = cache.step_buffers(2, max_length=20)
    seqs = filled(cache, where)
    q = where.asarray(np.ones((2, 4, DIM), np.float16))
    step = cache.reserve(seqs, 1, into=buffers)
    step.append(0, q[:, :2], q[:, :2])
    step.attention(0, q)
    with captured(stream) as graph:
        step.append(0, q[:, :2], q[:, :2])
        out = step.attention(0, q)
        kept = out.__cuda_array_interface__["data"][0]
    pool = cache._pools[0].k.gpu_data.device_pointer
    tables = buffers._tables._fixed.arrays[0].gpu_data.device_pointer
    places = [int(p) for p in (pool, tables, kept)]
    cache.rollback(step)
    del step, cache, buffers, out
    gc.collect()
    assert all(driver.allocation(p) for p in places)
    graph.launch(stream)
    graph.destroy()
    where.empty((12345,), np.float64)  # memory that is not there yet: then the host looks
    gc.collect()
    assert not any(driver.allocation(p) for p in places)


def test_calls_of_a_graph_share_its_memory(where, stream):
    pool = where.zeros((40, HEADS, 16, DIM), np.float16)
    table, lens = where.zeros((1, 40), np.int32), where.zeros((1,), np.int32)
    q = where.zeros((1, 4, DIM), np.float16)
    out = where.zeros((1, 4, DIM), np.float16)

    def attend():
        numkv.paged_decode_attention(q, pool, pool, table, lens, out=out)

    attend()
    with driver.calls() as log, captured(stream):
        attend()
        first = log.groups, driver.log().names["cuMemAlloc"]
        attend()
        assert driver.log().names["cuMemAlloc"] == first[1] == 1


def test_a_capture_that_fails_leaves_everything_usable(where, stream):
    """The error comes out, the capture ends, and the next one is whole."""
    cache = paged(1)
    buffers = cache.step_buffers(1, max_length=20)
    (seq,) = filled(cache, where, seqs=1)
    row = where.asarray(np.ones((1, HEADS, DIM), np.float16))
    step = cache.reserve([seq], 1, into=buffers)
    with pytest.raises(numkv.DimensionMismatch), captured(stream):
        step.append(0, row, row)
        step.append(0, row[:0], row)
    with captured(stream) as graph:
        step.append(0, row, row)
    graph.launch(stream)
    step.mark_written()
    cache.commit(step)
    assert cache.length(seq) == 4
    cache.check()


def refused(call, name):
    with pytest.raises(numkv.NotSupported, match=rf"^{name}: expected a stream that is not capt"):
        call()


def test_objects_with_lengths_on_the_host_are_refused_by_name(where, stream):
    row = where.asarray(np.ones((1, HEADS, DIM), np.float16))
    q = where.asarray(np.ones((1, 4, DIM), np.float16))
    qkv = where.asarray(np.ones((1, 8 * DIM), np.float16))
    layers = [
        numkv.ContiguousLayer(8, HEADS, DIM, target="cuda"),
        numkv.PagedLayer(2, 4, HEADS, DIM, target="cuda"),
    ]
    cache = numkv.KVCache(1, HEADS, DIM, max_seq_len=8, kind="fp16", target="cuda")
    paged_cache, cells = paged(1), numkv.CausalCache()
    cells.init("fp16", 1, 8, 2, target="cuda")
    seqs = filled(paged_cache, where, seqs=1)
    for at in range(4):  # so that calls would go a short way, if they have one
        for layer in layers:
            layer.append(row, row)
            layer.decode_attention(q)
        cache.append(0, row[0], row[0])
        cache.decode_attention(0, q)
        cache.advance()
        cells.start_forward(numkv.Batch([at], [0]))
        cells.put(0, row, row)
        cells.decode_attention(0, q)
        step = paged_cache.reserve(seqs, 1)
        step.append(0, row, row)
        step.attention(0, q)
        paged_cache.rollback(step)
    compressor = numkv.HeadCompressor(numkv.CompressorConfig(DIM, 4), target="cuda")
    vector = where.asarray(np.ones(DIM, np.float32))
    step = paged_cache.reserve(seqs, 1)
    pool, table = where.zeros((4, HEADS, 4, DIM), np.float16), where.zeros((1, 4), np.int32)
    lens = where.zeros((1,), np.int32)
    with captured(stream):
        for layer in layers:
            name = type(layer).__name__
            refused(lambda layer=layer: layer.append(row, row), f"{name}.append")
            refused(
                lambda layer=layer: layer.write(qkv, num_q_heads=4, qk_mode=0),
                f"{name}.write",
            )
            refused(lambda layer=layer: layer.decode_attention(q), f"{name}.decode_attention")
            refused(lambda layer=layer: layer.attention_weights(q), f"{name}.attention_weights")
            refused(lambda layer=layer: layer.compact([0]), f"{name}.compact")
        refused(lambda: cache.append(0, row[0], row[0]), "KVCache.append")
        refused(lambda: cache.decode_attention(0, q), "KVCache.decode_attention")
        refused(cache.advance, "KVCache.advance")
        refused(lambda: cells.start_forward(numkv.Batch([4], [0])), "start_forward")
        refused(lambda: cells.put(0, row, row), "CausalCache.put")
        refused(lambda: cells.decode_attention(0, q), "CausalCache.decode_attention")
        refused(lambda: compressor.push(vector, vector), "HeadCompressor.push")
        refused(lambda: paged_cache.reserve(seqs, 1), "reserve")
        refused(lambda: paged_cache.decode_attention(0, seqs, q), "PagedKVCache.decode_att.*")
        refused(lambda: step.append(0, row, row), "Step.append")
        refused(lambda: step.attention(0, q), "Step.attention")
        with pytest.raises(numkv.NotSupported, match="expected validate=False while"):
            numkv.paged_decode_attention(q, pool, pool, table, lens, validate=True)
    paged_cache.rollback(step)
    for thing in (*layers, cache, paged_cache, cells):
        thing.check()


def test_reports_that_have_arrived_do_not_break_a_capture(where, stream):
    """On a stream that is named only: functions and steps in buffers tell later, objects are refused first."""
    kinds = {"kind": "int8", "target": "cuda"}
    k = np.ones((1, HEADS, DIM), np.float16)
    good, q = where.asarray(k), where.asarray(np.ones((1, 4, DIM), np.float16))
    qkv, slots = where.asarray(np.ones((1, 8 * DIM), np.float16)), where.asarray(np.array([2]))
    k[0, 1, 3] = np.nan
    wrong = where.asarray(k)
    pools = [where.zeros((4, HEADS, BLOCK, DIM), np.int8) for _ in range(2)]
    scales = [where.zeros((4, HEADS, BLOCK), np.float32) for _ in range(2)]
    layer = numkv.ContiguousLayer(32, HEADS, DIM, **kinds)
    cache, other = (numkv.KVCache(1, HEADS, DIM, max_seq_len=32, **kinds) for _ in range(2))
    paged_cache = paged(1, "int8")
    bound, of_other = layer.bind(4, "fp16"), other.bind(4, "fp16")
    buffers = paged_cache.step_buffers(1, max_length=20)
    (one, two), options = (
        filled(paged_cache, where),
        {"num_q_heads": 4, "qk_mode": 0},
    )

    def write(step):
        step.write(0, qkv, **options)

    def append(x):
        numkv.paged_append(x, good, *pools, slots, k_scale=scales[0], v_scale=scales[1])

    for x in (good, good, good, wrong):  # the short way in the end
        append(x)
        bound(q, good, good)
        layer.write(qkv, **options)
        layer.append(x, good)
        cache.append(0, x, good)
        of_other.begin()(0, q, good, good)
        other.advance()
        for call in (write, lambda step: step.append(0, good, good)):
            step = paged_cache.reserve([one], 1)
            call(step)
            paged_cache.rollback(step)
        step = paged_cache.reserve([one], 1)
        step.append(0, x, good)
        if x is good:
            paged_cache.rollback(step)
    in_buffers, begun = paged_cache.reserve([two], 1, into=buffers), of_other.begin()
    with driver.calls() as log, captured(stream) as graph:
        append(good)
        in_buffers.append(0, good, good)
        refused(lambda: layer.append(good, good), "ContiguousLayer.append")
        refused(lambda: bound(q, good, good), "ContiguousLayer.append")
        refused(lambda: layer.write(qkv, **options), "ContiguousLayer.write")
        refused(lambda: cache.append(0, good, good), "KVCache.append")
        refused(lambda: begun(0, q, good, good), "BoundStep")
        refused(lambda: step.append(0, good, good), "Step.append")
        refused(lambda: write(step), "Step.write")
    assert not log.groups()["blocking copies"] + log.groups()["blocking waits"]
    graph.launch(stream)
    in_buffers.mark_written()
    paged_cache.commit(in_buffers)
    for call in (
        lambda: append(good),
        lambda: layer.append(good, good),
        lambda: bound(q, good, good),
        lambda: layer.write(qkv, **options),
        lambda: cache.append(0, good, good),
        lambda: write(step),
        lambda: paged_cache.commit(step),
    ):
        with pytest.raises(numkv.NonFiniteInput):
            call()


def test_projections_of_rotated_rows_are_captured(where, stream):
    """They go by way of rows aside, in memory of the graph; a replay gives what a step without a graph gives."""
    rng = np.random.default_rng(1)
    cos, sin = (where.asarray(np.float32(x)) for x in naive.rope_tables(24, DIM))
    eager, other = (paged(1, "int8", rotate=True) for _ in range(2))
    buffers = other.step_buffers(2, max_length=20)
    qkv, out = where.zeros((2, 8 * DIM), np.float32), where.zeros((2, 4, DIM), np.float32)
    seqs = [[cache.add(), cache.add()] for cache in (eager, other)]

    def calls(step):
        q = step.write(0, qkv, num_q_heads=4, cos=cos, sin=sin, qk_mode=2)
        return step.attention(0, q, out=out)

    step = other.reserve(seqs[1], 1, into=buffers)
    calls(step)  # once, so that kernels are loaded
    other.rollback(step)
    step = other.reserve(seqs[1], 1, into=buffers)
    with driver.calls() as log, captured(stream) as graph:
        calls(step)
    groups = log.groups()
    assert not groups["async copies"] + groups["blocking copies"] + groups["blocking waits"]
    other.rollback(step)
    for _ in range(3):
        qkv.copy_to_device(rng.standard_normal((2, 8 * DIM)).astype(np.float32))
        step = other.reserve(seqs[1], 1, into=buffers)
        graph.launch(stream)
        step.mark_written()
        other.commit(step)
        got, step = where.to_host(out), eager.reserve(seqs[0], 1)
        want = where.to_host(calls(step))
        eager.commit(step)
        assert want.any()
        assert np.array_equal(got, want)


def test_a_replay_that_was_rolled_back_before_it_was_told_is_forgotten(where, stream):
    """Of a cache that nothing has been looked at before its capture, too."""
    cache = paged(1, "int8")
    buffers, seq = cache.step_buffers(1, max_length=20), cache.add()
    good, k = np.ones((1, HEADS, DIM), np.float16), where.zeros((1, HEADS, DIM), np.float16)
    bad = good.copy()
    bad[0, 0, 1] = np.inf
    step = cache.reserve([seq], 1, into=buffers)
    with captured(stream) as graph:
        step.append(0, k, k)
    for rows, end in ((good, cache.commit), (bad, cache.rollback), (good, cache.commit)):
        k.copy_to_device(rows)
        if not step.open:
            step = cache.reserve([seq], 1, into=buffers)
        graph.launch(stream)
        step.mark_written()
        end(step)
    assert cache.length(seq) == 2
    cache.check()


def test_functions_are_captured_on_a_stream_where_nothing_ran_before(where):
    """As torch does: it warms up on one stream, and captures on another."""
    warm, other = new_stream(), new_stream()
    k, lens = where.zeros((2, HEADS, 8, DIM), np.float16), where.zeros((2,), np.int64)
    q, out = (where.zeros((2, 4, DIM), np.float16) for _ in range(2))
    with numkv.on_stream(warm):
        numkv.decode_attention(q, k, k, lens, out=out)
    from numkv.storage import tables

    for made in (tables.one_query_each, tables.one_block_each):
        made.cache_clear()  # so that constants are made during the capture
    with captured(other) as graph:
        numkv.decode_attention(q, k, k, lens, out=out)
    values = np.random.default_rng(3).standard_normal((3, 2, HEADS, 8, DIM)).astype(np.float16)
    k.copy_to_device(values[0])
    lens.copy_to_device(np.array([5, 8]))
    queries = values[1, :, 0, :4]
    q.copy_to_device(np.ascontiguousarray(queries))
    graph.launch(other)
    want, _ = naive.attention(queries, values[0], values[0], [5, 8])
    np.testing.assert_allclose(where.to_host(out), want, atol=2e-3)


def test_captures_of_two_threads_do_not_meet(where):
    """Each has a stream, a cache and a graph; relaxed captures, as global ones exclude each other."""
    errors = []

    def one(number):
        try:
            stream = new_stream()
            cache = paged(1)
            with numkv.on_stream(stream):
                buffers = cache.step_buffers(1, max_length=20)
                (seq,) = filled(cache, where, seqs=1)
            row = where.asarray(np.full((1, HEADS, DIM), number, np.float16))
            for _ in range(3):
                step = cache.reserve([seq], 1, into=buffers)
                with captured(stream, RELAXED) as graph:
                    step.append(0, row, row)
                graph.launch(stream)
                step.mark_written()
                cache.commit(step)
            cache.check()
            found = cache.swap_out(seq).buffers[0][0].view(np.float16)
            assert found[0, 0, 3, 0] == number
            assert (found[1, 0, :2, 0] == number).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_buffer_of_zeros_is_not_captured(where, stream):
    """It is refused by its name, before anything is asked of the driver."""
    with captured(stream):
        with pytest.raises(numkv.NotSupported, match=r"^a new buffer of zeros"):
            where.zeros((2, 3), np.float32)
        assert where.zeros((0, 3), np.float32).shape == (0, 3)
