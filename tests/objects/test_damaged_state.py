"""State that others have damaged: swapped sequences and files that lie, lengths and tables written from outside.

Each is refused by name before memory is touched, and leaves the object as it was.
"""

import dataclasses
import json

import numpy as np
import pytest
from layer_lists import paged_kv_cache
from numba import njit
from safetensors import safe_open
from safetensors.numpy import save_file

import numkv
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.files import load_sequences, save_sequences

HEADS, DIM, BLOCK = 2, 8, 4


def rows(n, heads=HEADS, dim=DIM):
    return np.random.default_rng(n).standard_normal((2, n, heads, dim), dtype=np.float32)


def make(kind="int8", windows=None):
    return paged_kv_cache(
        2, HEADS, DIM, num_blocks=16, block_size=BLOCK, kind=kind, windows=windows
    )


def swapped(kind="int8", windows=None, tokens=10):
    cache = make(kind, windows)
    seq = cache.add(np.arange(tokens), extra={"adapter": 7})
    step = cache.reserve([seq], tokens)
    for layer in range(2):
        step.append(layer, *rows(tokens))
    cache.commit(step, token_ids=np.arange(tokens))
    return cache.swap_out(seq)


def buffer(swapped, index, change):
    """The same with one of the first layer's buffers changed."""
    first = list(swapped.buffers[0])
    first[index] = change(first[index])
    return [tuple(first), *swapped.buffers[1:]]


DAMAGES = {
    "longer": lambda s: {"length": 40},
    "very long": lambda s: {"length": 40_000_000},
    "shorter": lambda s: {"length": 9},
    "negative length": lambda s: {"length": -1},
    "length beyond int64": lambda s: {"length": 2**80},
    "fractional length": lambda s: {"length": 10.0},
    "no length": lambda s: {"length": None},
    "more tokens than the length": lambda s: {"tokens": np.arange(11, dtype=np.int32)},
    "tokens of two axes": lambda s: {"tokens": s.tokens[None]},
    "no table": lambda s: {"logical": []},
    "one table more": lambda s: {"logical": [*s.logical, *s.logical]},
    "a hole": lambda s: {"logical": [s.logical[0][[0, 2]]]},
    "an empty table": lambda s: {"logical": [s.logical[0][:0]]},
    "twice the same block": lambda s: {"logical": [s.logical[0][[0, 1, 1]]]},
    "falling": lambda s: {"logical": [s.logical[0][::-1]]},
    "a block too far": lambda s: {"logical": [s.logical[0] + 1]},
    "a block far too far": lambda s: {"logical": [s.logical[0] * 2**40]},
    "a block below": lambda s: {"logical": [s.logical[0] - 1]},
    "fractional blocks": lambda s: {"logical": [s.logical[0] + 0.5]},
    "starts": lambda s: {"starts": (5,)},
    "negative starts": lambda s: {"starts": (-1,)},
    "two starts": lambda s: {"starts": (0, 0)},
    "no buffers": lambda s: {"buffers": []},
    "a layer less": lambda s: {"buffers": s.buffers[:1]},
    "three buffers": lambda s: {"buffers": [s.buffers[0][:3], s.buffers[1]]},
    "fewer rows": lambda s: {"buffers": buffer(s, 0, lambda x: x[:2])},
    "more rows": lambda s: {"buffers": buffer(s, 1, lambda x: np.concatenate([x, x]))},
    "other dims": lambda s: {"buffers": buffer(s, 0, lambda x: x[..., :4])},
    "floats for codes": lambda s: {"buffers": buffer(s, 0, lambda x: x.astype(np.float32))},
    "doubles for scales": lambda s: {"buffers": buffer(s, 2, lambda x: x.astype(np.float64))},
    "scales of another shape": lambda s: {"buffers": buffer(s, 3, lambda x: x[:, :1])},
    "extra keys": lambda s: {"extra": {7: "adapter"}},
    "no mapping": lambda s: {"extra": ["adapter"]},
    "geometry": lambda s: {"geometry": s.geometry[:3]},
    "no geometry": lambda s: {"geometry": None},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_swapped_sequence_is_checked_before_anything_is_taken(damage):
    good = swapped()
    bad = dataclasses.replace(good, **DAMAGES[damage](good))
    cache = make()
    with pytest.raises((NumkvError, TypeError)) as caught:
        cache.swap_in(bad)
    assert len(str(caught.value)) > 20
    assert cache.num_free == 16
    cache.check()
    assert cache.length(cache.swap_in(good)) == 10  # it still works
    cache.check()


def test_windows_may_have_left_blocks_behind():
    whole = swapped(windows=[-1, 3])
    assert len(whole.logical[1]) < len(whole.logical[0])
    make(windows=[-1, 3]).swap_in(whole)
    short = dataclasses.replace(whole, logical=[whole.logical[1], whole.logical[1]])
    with pytest.raises(NumkvError, match="`swapped`"):
        make(windows=[-1, 3]).swap_in(short)


def test_blocks_come_back_when_a_device_fails(monkeypatch):
    cache, good = make(), swapped()

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("numkv.caches.paged.swap.put_blocks", fails)
        with pytest.raises(MemoryError):
            cache.swap_in(good)
    assert cache.num_free == 16
    cache.check()
    cache.swap_in(good)


HEADERS = {
    "no JSON": lambda h: "{",
    "deep": lambda h: "[" * 100_000,
    "a list": lambda h: "[]",
    "a number": lambda h: "7",
    "no geometry": lambda h: json.dumps({k: v for k, v in h.items() if k != "geometry"}),
    "short geometry": lambda h: json.dumps(h | {"geometry": [1]}),
    "geometry of numbers": lambda h: json.dumps(h | {"geometry": [1, 2, 3, 4, 5]}),
    "no sequences": lambda h: json.dumps({k: v for k, v in h.items() if k != "sequences"}),
    "one sequence more": lambda h: json.dumps(h | {"sequences": h["sequences"] * 2}),
    "no length": lambda h: json.dumps(h | {"sequences": [{"extra": None}]}),
    "odd extra": lambda h: json.dumps(
        h | {"sequences": [h["sequences"][0] | {"extra": {"a": {"bytes": "xyz"}}}]}
    ),
    "another extra": lambda h: json.dumps(
        h | {"sequences": [h["sequences"][0] | {"extra": {"a": {}}}]}
    ),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_a_damaged_header_is_refused_with_the_reason(tmp_path, damage):
    path, bad = tmp_path / "good", tmp_path / "bad"
    save_sequences(path, [swapped()])
    with safe_open(path, framework="numpy") as file:
        header = json.loads(file.metadata()["numkv"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, bad, metadata={"numkv": HEADERS[damage](header)})
    with pytest.raises(NotSupported, match=str(bad)):
        load_sequences(bad)


# -- a step that was not written


def test_a_step_without_rows_in_every_layer_is_not_committed():
    cache = make("fp32")
    seq = cache.add(np.arange(9))
    step = cache.reserve([seq], 9)
    assert step.unwritten_layers == [0, 1]
    step.append(0, *rows(9))
    assert step.unwritten_layers == [1]
    before = cache.stats()
    with pytest.raises(NumkvError, match="layer 1"):
        cache.commit(step, token_ids=np.arange(9))
    with pytest.raises(NumkvError, match="layer 1"):
        cache.commit(step, [3], token_ids=np.arange(9))
    assert step.open
    assert cache.stats() == before
    assert cache.cached_len(cache.add(np.arange(9))) == 0  # nothing was published
    step.append(1, *rows(9))
    cache.commit(step, token_ids=np.arange(9))
    assert cache.cached_len(cache.add(np.arange(9))) == 8
    # Nothing is asked of what is rolled back, or of a step without tokens.
    cache.rollback(cache.reserve([seq], 2))
    cache.commit(cache.reserve([seq], 2), [0])
    cache.commit(cache.reserve([seq], 0))
    cache.check()


def test_a_refused_write_does_not_count():
    cache = make("int8")
    step = cache.reserve([cache.add()], 3)
    with pytest.raises(numkv.NonFiniteInput):
        step.append(0, *np.full((2, 3, HEADS, DIM), np.nan, np.float32))
    with pytest.raises(DimensionMismatch):
        step.append(0, *rows(2))
    assert step.unwritten_layers == [0, 1]


# -- counters of prefixes


def test_prefixes_found_and_missed_are_counted():
    cache = make("fp32")
    prompt = np.arange(17)

    def start(tokens):
        seq = cache.add(tokens)
        new = len(tokens) - cache.cached_len(seq)
        step = cache.reserve([seq], new)
        for layer in range(2):
            step.append(layer, *rows(new))
        cache.commit(step, token_ids=tokens[len(tokens) - new :])
        return seq

    cache.remove(start(prompt))
    stats = cache.stats().pool
    assert (stats.lookups, stats.hits, stats.misses) == (1, 0, 4)
    assert cache.blocks.miss_reason is numkv.blocks.MissReason.ABSENT
    for _ in range(3):
        cache.remove(start(prompt))
    stats = cache.stats().pool
    assert (stats.lookups, stats.hits, stats.misses) == (4, 12, 4)
    assert stats.hit_rate == 0.75
    assert cache.blocks.miss_reason is None
    cache.add(np.append(prompt[:8], [50] * 9))
    stats = cache.stats().pool
    assert (stats.lookups, stats.hits, stats.misses) == (5, 14, 6)
    cache.add()  # nothing to look up
    cache.add([1, 2])
    assert cache.stats().pool.lookups == 5


# -- lengths and tables that others write


def layers():
    return numkv.ContiguousLayer(8, HEADS, DIM), numkv.PagedLayer(4, 2, HEADS, DIM)


def uses(layer):
    q = np.zeros((1, 2 * HEADS, DIM), np.float32)
    one = rows(1)
    qkv = np.zeros((1, 4 * HEADS * DIM), np.float32)
    return {
        "seq_len": lambda: layer.seq_len,
        "len": lambda: len(layer),
        "append": lambda: layer.append(*one),
        "write": lambda: layer.write(qkv, num_q_heads=2 * HEADS, qk_mode=0),
        "decode_attention": lambda: layer.decode_attention(q),
        "attention_weights": lambda: layer.attention_weights(q),
        "truncate": lambda: layer.truncate(0),
        "compact": lambda: layer.compact([0]),
    }


@pytest.mark.parametrize("length", [9, 10**6, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("which", [0, 1], ids=["contiguous", "paged"])
def test_a_length_past_the_memory_is_refused(which, length):
    layer = layers()[which]
    layer.append(*rows(3))
    want = layer.decode_attention(np.ones((1, 2 * HEADS, DIM), np.float32))
    for name, use in uses(layer).items():
        layer.context_lens[0] = length
        with pytest.raises(NumkvError, match="context_lens"):
            use()
        assert layer.context_lens[0] == length, name
    layer.seq_len = 3  # which mends it
    assert np.array_equal(layer.decode_attention(np.ones((1, 2 * HEADS, DIM), np.float32)), want)


def test_a_length_within_the_memory_is_taken():
    for layer in layers():
        layer.append(*rows(3))
        layer.context_lens[0] = 2
        assert layer.seq_len == 2
    paged = layers()[1]
    paged.append(*rows(3))
    paged.context_lens[0] = 5  # two blocks of two tokens are there
    with pytest.raises(NumkvError, match=r"\[0, 4\]"):
        paged.append(*rows(1))


@njit
def write_table(layer, value):
    layer.block_table[0] = value


@pytest.mark.parametrize("value", [10**6, -5, 2])
def test_a_block_table_cannot_be_written(value):
    layer = layers()[1]
    layer.append(*rows(3))
    with pytest.raises(ValueError, match="read-only"):
        layer.block_table[0] = value
    write_table(layer.jit, value)
    for name, use in uses(layer).items():
        with pytest.raises(NumkvError, match="block_table"):
            use()
        assert layer.pool.blocks.num_free == 2, name
    write_table(layer.jit, layer.block_indices[0])
    layer.decode_attention(np.zeros((1, 2 * HEADS, DIM), np.float32))


@njit
def append_one(cache, layer, row):
    return cache.append(layer, row, row)


@njit
def load_first(cache, out):
    cache.load_k(0, 0, 0, out)


@njit
def set_rows(cache, layer, n):
    cache.context_lens[layer] = n


@pytest.mark.parametrize("rows_", [10**9, 2**62, -1])
def test_rows_past_a_caches_memory_are_refused(rows_):
    cache = numkv.KVCache(1, HEADS, DIM, max_seq_len=8)
    cache.append(0, *rows(3))
    set_rows(cache.jit, 0, rows_)
    for use in (
        lambda: cache.decode_attention(0, np.zeros((1, 2 * HEADS, DIM), np.float32)),
        lambda: cache.attention_weights(0, np.zeros((1, 2 * HEADS, DIM), np.float32)),
        lambda: cache.append(0, *rows(1)),
        lambda: cache.k(0),
        lambda: cache.v(0),
    ):
        with pytest.raises(NumkvError, match="context_lens"):
            use()


@pytest.mark.slow
def test_a_jit_from_before_a_growth_writes_and_reads_nothing():
    cache = numkv.KVCache(1, 1, 4, kind="fp32")
    cache.append(0, *rows(2, 1, 4))
    old = cache.jit
    row = np.full((1, 4), 7, np.float32)
    assert append_one(old, 0, row)
    cache.append(0, *rows(500, 1, 4))
    cache.truncate(0)
    cache.append(0, *rows(2, 1, 4))
    kept = cache.k(0).copy()
    assert not append_one(old, 0, row)
    assert not old.advance(0)
    with pytest.raises(NumkvError, match="has grown"):
        load_first(old, np.empty(4, np.float32))
    assert np.array_equal(cache.k(0), kept)
    assert append_one(cache.jit, 0, row)
    assert cache.k(0)[2, 0, 0] == 7
    assert not append_one(cache.jit, 1, row)  # no such layer
    assert not append_one(cache.jit, -1, row)
