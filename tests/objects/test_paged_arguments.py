"""Odd arguments of a `PagedKVCache` and of the books of its blocks: taken, or refused by name with nothing changed."""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
from block_books import refused as refused_by_pool
from paged_caches import make, queries, refused, started, state_of

import numkv
from numkv.blocks import (
    block_digests,
    block_table_to_csr,
    csr_to_block_table,
    root_digest,
    slot_mapping,
    token_ids,
)
from numkv.blocks.pool import BlockPool

NAMED = (numkv.NumkvError, IndexError, ValueError, TypeError)

#: What no number of a sequence is, no size and no count.
NO_NUMBERS = {
    "none": None, "nan": math.nan, "inf": math.inf, "fraction": 3.7, "whole float": 1.0, "text": "1", "bytes": b"1",
    "float32": np.float32(1), "complex": 1j, "list": [1], "object": object(), "array": np.array([1, 2]),
}  # fmt: skip
HUGE = [2**31 - 1, 2**63, -(2**63) - 1, 2**200]

#: What no row of integers is.
NO_INTEGERS = {
    "floats": [1.5], "nan": [math.nan], "text": ["a"], "none": [None], "bools": [True], "beyond int64": [2**70],
    "complex": [1j], "dates": np.array(["2020"], "M8[D]"), "masked": np.ma.array([1], mask=[1]), "object": object(),
}  # fmt: skip


@pytest.fixture
def cache():
    cache = make(num_blocks=16)
    started(cache, np.asarray, range(5))
    return cache


BY_SEQ = {
    "length": lambda c, x: c.length(x),
    "cached_len": lambda c, x: c.cached_len(x),
    "fork": lambda c, x: c.fork(x),
    "remove": lambda c, x: c.remove(x),
    "truncate": lambda c, x: c.truncate(x, 1),
    "compact": lambda c, x: c.compact(x, [0]),
    "pin": lambda c, x: c.pin(x),
    "unpin": lambda c, x: c.unpin(x),
    "swap_out": lambda c, x: c.swap_out(x),
    "block_table": lambda c, x: c.block_table(x, 0),
    "reserve": lambda c, x: c.reserve([x], 1),
    "decode_attention": lambda c, x: c.decode_attention(0, [x], queries(1)),
    "attention_weights": lambda c, x: c.attention_weights(0, x, queries(1)),
}


@pytest.mark.parametrize("method", BY_SEQ)
def test_numbers_of_sequences(cache, method):
    call, before = BY_SEQ[method], state_of(cache)
    name = "sequences" if method in ("reserve", "decode_attention") else "seq"
    number = f"`{name}`: expected the number"
    for odd in NO_NUMBERS.values():
        refused(cache, TypeError, number, call, cache, odd)
    for odd in (True, False):
        refused(cache, TypeError, f"{number} of a sequence, got bool", call, cache, odd)
    for huge in (*HUGE, 1, -1):
        with pytest.raises(IndexError, match="`seq`: expected one of the cache's"):
            call(cache, huge)
    assert state_of(cache) == before
    if method != "unpin":
        call(cache, np.int8(0))


@pytest.mark.parametrize(
    "sequences",
    [5, None, 1.5, (n for n in [0, 1]), "0", {0: 1, 7: 2}, itertools.repeat(0), itertools.count()],
)
def test_iterables_of_sequences(cache, sequences):
    """Not even those without an end are waited for."""
    with pytest.raises(NAMED, match=r"`seq`|`sequences`"):
        cache.reserve(sequences, 1)
    cache.check()
    assert len(cache.blocks.allocate(cache.num_free))


def test_iterables_are_taken_once(cache):
    fork = cache.fork(0)
    step = cache.reserve((n for n in (fork, 0)), 2)
    assert step.sequences == (fork, 0)
    cache.rollback(step)
    q = queries(2)
    want = cache.decode_attention(0, [0, fork], q)
    assert np.array_equal(cache.decode_attention(0, iter([0, fork]), q), want)
    with pytest.raises(numkv.DimensionMismatch, match="`q`: expected a query for each of 3"):
        cache.decode_attention(0, itertools.repeat(0), q)


class Broken(Exception):
    """The caller's own error."""


def test_an_iterable_that_raises_or_changes_the_cache(cache):
    def raises():
        yield 0
        raise Broken

    def removes():
        cache.remove(0)
        yield 0

    refused(cache, Broken, None, cache.reserve, raises(), 1)
    refused(cache, Broken, None, cache.decode_attention, 0, raises(), queries(2))
    refused(cache, numkv.NumkvError, "remove: .* being changed", cache.reserve, removes(), 1)
    # A reader: it was removed before it was looked up.
    with pytest.raises(IndexError, match="`seq`"):
        cache.decode_attention(0, removes(), queries(1))


@pytest.mark.parametrize(
    "odd", [*NO_INTEGERS.values(), -1, [-1], 2**62, [2**62], 2**200, True, 3.7, math.nan, None]
)
def test_numbers_of_new_tokens(cache, odd):
    refused(cache, NAMED, "`new_lens`", cache.reserve, [0], odd)


def test_many_new_tokens_are_no_overflow(cache):
    other = cache.add()
    refused(cache, numkv.CacheFull, "blocks", cache.reserve, [0, other], [2**62 - 1, 2**62 - 1])
    refused(cache, numkv.CacheFull, "blocks", cache.reserve, [0], 2**31)
    cache.rollback(cache.reserve([0], np.int16(2)))


@pytest.mark.parametrize(
    "odd", [*NO_INTEGERS.values(), [-1], [2**31], np.array([2**63], np.uint64), 5, [[1, 2]]]
)
def test_ids_of_tokens(cache, odd):
    refused(cache, NAMED, "`tokens`: expected", cache.add, odd)
    refused(cache, NAMED, "`tokens`: expected", cache.add, [[1], [1, 2]])
    step = cache.reserve([0], 1)
    refused(cache, NAMED, "`token_ids`: expected", cache.commit, step, token_ids=odd)
    refused(cache, NAMED, "`accepted`: expected", cache.commit, step, odd)


@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", ">u2", "u8"])
def test_ids_of_tokens_come_in_any_dtype(dtype):
    cache = make()
    started(cache, np.asarray, range(9))
    ids = np.arange(9).astype(dtype)
    assert cache.cached_len(cache.add(ids)) == 8
    assert cache.cached_len(cache.add(np.repeat(ids, 2)[::2])) == 8
    assert cache.cached_len(cache.add(ids[::-1][::-1])) == 8


class Lying(Mapping):
    """A mapping that says and does what it is told."""

    def __init__(self, items):
        self.given = items

    def __getitem__(self, key):
        return 7

    def __iter__(self):
        return iter(dict(self.given()))

    def __len__(self):
        return 0

    def items(self):
        return self.given()


@pytest.mark.parametrize(
    "extra",
    [5, "ab", [("a", 1)], {1: 2}, {"a": None}, {"a": 1.5}, {"a": True}, {"a": [1]}, {"a": 2**5000}, {"a": "\ud800"},
     {"\udcff": 1}, {"a": math.nan}, {"a": np.arange(2)}],
)  # fmt: skip
def test_extra_keys(cache, extra):
    refused(cache, (TypeError, ValueError), "`extra`: expected", cache.add, [1], extra=extra)
    with pytest.raises((TypeError, ValueError), match="`extra`: expected"):
        block_digests([1], 1, extra, parent=bytes(32))


def test_mappings_of_the_callers(cache):
    def raises():
        raise Broken

    def adds():
        return [("a", cache.add())]

    refused(cache, Broken, None, cache.add, [1], extra=Lying(raises))
    refused(cache, numkv.NumkvError, "add: .* being changed", cache.add, [1], extra=Lying(adds))
    seq = cache.add([1], extra=Lying(lambda: [("a", 7)]))
    assert cache._sequences[seq].extra == {"a": 7}
    salt = bytearray(b"tenant")
    seq = cache.add([1], extra={"salt": salt})
    salt[:] = b"others"
    assert cache._sequences[seq].extra == {"salt": b"tenant"}
    cache.add([1], extra={"a": 2**200, "b": -(2**70), "c": np.int8(3)})


SIZES = ["num_layers", "num_kv_heads", "head_dim", "num_blocks"]


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_a_cache(name):
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "num_blocks": 1, "block_size": 1}
    for odd in NO_NUMBERS.values():
        if odd is not None:
            with pytest.raises(TypeError, match=f"`{name}`: expected an integer"):
                numkv.PagedKVCache(**sizes | {name: odd})
    with pytest.raises(TypeError, match=name):
        numkv.PagedKVCache(**sizes | {name: None})
    with pytest.raises(numkv.DimensionMismatch, match=f"`{name}`"):
        numkv.PagedKVCache(**sizes | {name: -1})


@pytest.mark.parametrize("value", [2**31 - 1, 2**40, 2**63, 2**200])
def test_sizes_are_bounded_before_memory_is_taken(value):
    sizes = {"num_kv_heads": 1, "head_dim": 2, "num_blocks": 1, "block_size": 1}
    with pytest.raises(numkv.DimensionMismatch, match="`num_layers`: expected"):
        numkv.PagedKVCache(value, **sizes)
    with pytest.raises(numkv.DimensionMismatch, match="`layers`: expected"):
        numkv.PagedKVCache(layers=itertools.repeat(numkv.LayerSpec(1, 2)), num_blocks=1)
    if value >= 2**40:
        with pytest.raises(numkv.DimensionMismatch, match="`num_blocks`"):
            BlockPool(value, 1)
        with pytest.raises(numkv.DimensionMismatch, match="`num_blocks`"):
            numkv.PagedKVCache(1, **sizes | {"num_blocks": value})
    if value >= 2**63:
        with pytest.raises(numkv.DimensionMismatch, match="`block_size`"):
            BlockPool(1, value)
        with pytest.raises(numkv.DimensionMismatch, match="`block_size`"):
            numkv.PagedKVCache(1, **sizes | {"block_size": value})


@pytest.mark.parametrize("window", [1.5, "1", None, 2**63, -2, [1]])
def test_windows(window):
    with pytest.raises((numkv.DimensionMismatch, TypeError), match="`window_left`: expected"):
        numkv.LayerSpec(1, 2, window_left=window)


@pytest.mark.parametrize(
    "layers", [5, "ab", [None], [(1, 2)], [numkv.LayerSpec(1, 2), 3], numkv.LayerSpec(1, 2)]
)
def test_layers(layers):
    with pytest.raises(TypeError, match="`layers`: expected"):
        numkv.PagedKVCache(layers=layers, num_blocks=1)


def test_windows_that_reach_further_than_any_sequence():
    cache = make(2, windows=[-1, 2**62])
    seq = started(cache, np.asarray, range(9))
    assert np.isfinite(cache.decode_attention(1, [seq], queries(1))).all()
    cache.add(range(9))
    cache.check()


@pytest.mark.parametrize("odd", [None, 1.5, "step", object()])
def test_only_steps_end(cache, odd):
    refused(cache, numkv.NumkvError, "`step`: expected an open step", cache.commit, odd)
    refused(cache, numkv.NumkvError, "`step`: expected an open step", cache.rollback, odd)
    refused(cache, TypeError, "`swapped`: expected a SwappedSequence", cache.swap_in, odd)


# -- the books


BY_IDS = [
    "allocate_ids",
    "release",
    "acquire",
    "pin",
    "unpin",
    "forget",
    "ref_count",
    "pin_count",
    "is_cached",
]


@pytest.mark.parametrize("method", BY_IDS)
def test_ids_of_blocks(method):
    pool = BlockPool(4, 2)
    pool.allocate(2)
    for odd in (
        *NO_INTEGERS.values(),
        [[0]],
        0,
        [-1],
        [2**40],
        np.array([2**63], np.uint64),
        [[0], [0, 1]],
        "0",
    ):
        refused_by_pool(pool, NAMED, "`ids`", getattr(pool, method), odd)


@pytest.mark.parametrize("odd", [*NO_NUMBERS.values(), -1, 2**31, 2**63, 2**200])
def test_numbers_of_blocks(odd):
    pool = BlockPool(4, 2)
    refused_by_pool(pool, NAMED, "`n`: expected", pool.allocate, odd)


@pytest.mark.parametrize("method", ["register", "lookup", "find"])
def test_names_and_contents(method):
    pool = BlockPool(4, 2)
    ids = [pool.allocate(1)] if method == "register" else []
    call, names = getattr(pool, method), block_digests([1, 2], 2)
    for odd in NO_INTEGERS.values():
        refused_by_pool(pool, NAMED, "`tokens`: expected", call, *ids, names, odd)
        refused_by_pool(pool, NAMED, "`digests`: expected", call, *ids, odd, [1, 2])
    refused_by_pool(pool, NAMED, "`digests`: expected", call, *ids, np.ma.array(names), [1, 2])
    call(*ids, np.repeat(names, 2, axis=1)[:, ::2], np.array([1, 2], ">u2"))


def test_functions_over_tables():
    huge = [2**63, 2**200, 2**32]
    for size in huge:
        for call in (
            lambda n: block_table_to_csr(np.zeros((1, 1), np.int32), [1], n),
            lambda n: csr_to_block_table([0, 1], [0], [1], n),
            lambda n: slot_mapping(np.zeros((1, 1), np.int32), [1], n),
            lambda n: block_digests([1, 2], n),
            root_digest,
        ):
            with pytest.raises(numkv.DimensionMismatch, match="`block_size`"):
                call(size)
    for odd in (None, 1.5, "x", [1], math.nan):
        with pytest.raises(TypeError, match="`fill`"):
            csr_to_block_table([0, 1], [0], [1], 2, fill=odd)
    with pytest.raises(ValueError, match="`fill`"):
        csr_to_block_table([0, 1], [0], [1], 2, fill=2**31)
    for block in (2**31, -(2**40)):
        with pytest.raises(IndexError, match="`kv_indices`"):
            csr_to_block_table([0, 1], [block], [1], 2)
    with pytest.raises(numkv.NotSupported, match=r"`tokens`: .*masked"):
        token_ids(np.ma.array([1, 2], mask=[0, 1]))


def test_a_refusal_leaves_everything(cache):
    before = state_of(cache)
    with pytest.raises(TypeError, match="`shift`"):
        cache.compact(0, [0, 2], shift=7)
    assert state_of(cache) == before


@pytest.mark.parametrize("one", [np.array(1), np.int64(1), np.uint8(1)], ids=["array", "i8", "u1"])
def test_a_layer_is_any_integer(one):
    """Arrays of rank 0 among them, which cannot be keys of a dict."""
    kept = numkv.FullPrecision(4)
    cache = make(kind="int8", full_precision=kept, key_bounds=True)
    cache.add([1, 2, 3])
    step = cache.reserve(cache.sequences, [3])
    x, q = np.random.default_rng(0).standard_normal((2, 3, 2, 8), np.float32), queries(3)
    for layer in (0, one):
        step.append(layer, *x)
    for attend in (
        step.attention,
        step.attention_weights,
        lambda layer, q: step.sparse_attention(layer, q, most_blocks=4),
    ):
        np.testing.assert_array_equal(attend(one, q), attend(1, q))
    assert step.unwritten_layers == []
    cache.commit(step)
    (seq,) = cache.sequences
    for read in (
        lambda layer: cache.decode_attention(layer, [seq], q[:1]),
        lambda layer: cache.attention_weights(layer, seq, q),
    ):
        np.testing.assert_array_equal(read(one), read(1))
