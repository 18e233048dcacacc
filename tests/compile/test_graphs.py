"""CUDA graphs on the stub driver: what can be captured gives, when it is replayed, what eager calls give."""

import gc

import naive
import numpy as np
import pytest
from captured import GLOBAL, RELAXED, ask, captured, new_stream
from ptx_on_cuda import device

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


def rows(rng, tokens, heads=HEADS):
    return rng.standard_normal((tokens, heads, DIM)).astype(np.float16)


def paged(layers=2, kind="fp16", blocks=64, **options):
    return numkv.PagedKVCache(
        layers, HEADS, DIM, num_blocks=blocks, block_size=BLOCK, kind=kind, target="cuda", **options
    )


def launches(log):
    return [call for call in log.calls if call.name.startswith("cuLaunchKernel")]


def test_a_captured_step_replays_with_other_lengths_slots_and_tables(where):
    """Appends and attention of two layers, one of which has a window; each replay against the oracle."""
    rng, stream = np.random.default_rng(0), new_stream()
    cache = paged(windows=[-1, 5])
    buffers = cache.step_buffers(num_seqs=3, max_length=40, stream=stream)
    k, v, q, out = ([where.zeros((3, h, DIM), np.float16) for _ in range(2)] for h in (2, 2, 4, 4))
    stored = {}  # rows of each sequence and layer

    def fill(seqs, lens):
        step = cache.reserve(seqs, lens, stream=stream)
        given = [rows(rng, 2 * sum(lens)) for _ in range(2)]
        at = 0
        for layer in range(2):
            part = slice(layer * sum(lens), (layer + 1) * sum(lens))
            step.append(layer, *(where.asarray(x[part]) for x in given), stream=stream)
            at = part.start
            for seq, n in zip(seqs, lens, strict=True):
                pair = stored.setdefault((seq, layer), ([], []))
                for side, x in zip(pair, given, strict=True):
                    side.extend(x[at : at + n])
                at += n
        cache.commit(step)

    seqs = [cache.add() for _ in range(3)]
    fill(seqs, [3, 9, 1])

    def calls(step):
        for layer in range(2):
            step.append(layer, k[layer], v[layer], stream=stream)
            step.attention(layer, q[layer], out=out[layer], stream=stream)

    step = cache.reserve(seqs, 1, into=buffers)
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
