"""What multi-sequence caches refuse, and when."""

import naive_cells
import numpy as np
import pytest
from cell_numbers import CACHES, Numbers, make, numbers, ready
from messages import about
from walked import each

import numkv

F32, F16 = np.float32, np.float16


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


MISMATCH, DTYPE = numkv.DimensionMismatch, numkv.UnsupportedDType
NEVER = [  # rows that no layer of a batch of two takes
    (ones(3, 1, 1), ones(3, 1, 2), MISMATCH, "k"),
    (ones(1, 1, 1), ones(2, 1, 2), MISMATCH, "k"),
    (ones(2, 1, 1), ones(3, 1, 2), MISMATCH, "v"),
    (ones(2, 1, 1), ones(2, 2, 2), MISMATCH, "v"),
    (ones(2, 1), ones(2, 1, 2), MISMATCH, "k"),
    (ones(2, 1, 1), ones(2, 2), MISMATCH, "v"),
    (ones(2, 1, 1, dtype=F16), ones(2, 1, 2), DTYPE, "k"),
    (ones(2, 1, 1), ones(2, 1, 2, dtype=np.int32), DTYPE, "v"),
]
NOT_HERE = [  # rows that a layer with one head of K of 1 and of V of 2 does not take
    (ones(2, 2, 1), ones(2, 2, 2), MISMATCH, "k"),
    (ones(2, 1, 3), ones(2, 1, 2), MISMATCH, "k"),
    (ones(2, 1, 1), ones(2, 1, 1), MISMATCH, "v"),
]


@each("reserve", [False, True])
@each("k, v, error, name", NEVER + NOT_HERE)
def test_bad_rows(target, to, k, v, error, name, reserve):
    """Nothing is written, and no layer is made; a reserved pass looks as well."""
    pair = ready(target)
    assert pair.start_forward([0, 1], [0, 0], reserve=reserve)
    with pair.refused(error, match=about(name)):
        pair.cache.put(0, to(k), to(v))
    pair.check(0)
    if any(k is row[0] for row in NEVER):
        with pytest.raises(error, match=about(name)):
            pair.cache.put(1, to(k), to(v))
        with pytest.raises(IndexError):
            pair.cache.get(1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "kinds", [("int8", "int8"), ("fp32", "int8"), ("int8", "fp16")], ids="-".join
)
def test_rows_to_be_quantised_are_looked_at(target, to, kinds, bad):
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 8, 4, target, k_kind=kinds[0], v_kind=kinds[1])
    pair = Numbers(
        cache, naive_cells.Cells(1, 8, 4), target=target, k_kind=kinds[0], v_kind=kinds[1]
    )
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    name = "k" if kinds[0] == "int8" else "v"
    rows = dict(zip("kv", numbers([3, 4]), strict=True))
    rows[name][1, 0, 0] = bad
    if target == "cuda":  # a later call says it: tests/objects/test_late_reports.py
        cache.put(0, to(rows["k"]), to(rows["v"]))
        with pytest.raises(numkv.NonFiniteInput, match=f"^`{name}`.*remove sequence 0") as caught:
            cache.put(1, to(rows["k"]), to(rows["v"]))
        assert caught.value.index == (1, 0, 0)
        return
    with pair.refused(numkv.NonFiniteInput, match=f"^`{name}`"):
        cache.put(0, to(rows["k"]), to(rows["v"]))
    with pytest.raises(numkv.NonFiniteInput) as caught:
        cache.put(1, to(rows["k"]), to(rows["v"]))
    assert caught.value.index == (1, 0, 0)
    with pytest.raises(IndexError):
        cache.get(1)
    cache.put(1, *map(to, numbers([5, 6])), check_finite=False)
    as_stored = naive_cells.as_stored
    pair.model.children[0].put(1, *map(as_stored, numbers([5, 6]), kinds))
    pair.shows([5, 6], "0x / 00", layer=1)


def calls(cache, to):
    """What needs a pass."""
    k, v = (to(x) for x in numbers([1]))
    return [
        lambda: cache.put(0, k, v),
        lambda: cache.get(0),
        lambda: cache.decode_attention(0, to(np.ones((1, 1, 1), F32))),
    ]


def life(cache, to):
    """Everything that a cache does."""
    return [
        lambda: cache.start_forward(numkv.Batch([0], [0])),
        lambda: cache.remove(0, 0),
        lambda: cache.copy_prefix(0, 1, 1),
        lambda: cache.can_resume(0, 0),
        lambda: cache.set_causal([]),
        *calls(cache, to),
    ]


@pytest.mark.parametrize("name", CACHES)
def test_before_start_forward(target, to, name):
    pair = make(target, name)
    for call in calls(pair.cache, to):
        with pytest.raises(numkv.NumkvError, match="start_forward"):
            call()
    with pytest.raises((numkv.NumkvError, IndexError)):
        pair.cache.set_causal([0])


@pytest.mark.parametrize("name", CACHES)
def test_before_init(to, target, name):
    for call in life(numkv.CausalCache(**CACHES[name][0]), to):
        with pytest.raises(numkv.NumkvError, match="init"):
            call()


@pytest.mark.parametrize("name", CACHES)
def test_after_close(target, to, name):
    pair = make(target, name)
    pair.step([1], [0], [0], [1], "0")
    pair.cache.close()
    again = [
        lambda: pair.cache.init("fp32", 1, 4, 4),
        lambda: pair.cache.set_config(numkv.CacheConfig()),
    ]
    for call in (*life(pair.cache, to), *again):
        with pytest.raises(numkv.NumkvError, match="close"):
            call()


@pytest.mark.parametrize("name", CACHES)
def test_context_manager(name):
    options, _ = CACHES[name]
    cache = numkv.CausalCache(**options)
    with cache as entered:
        assert entered is cache
        cache.init("fp32", 1, 4, 4)
        cache.start_forward(numkv.Batch([0], [0]))
    with pytest.raises(numkv.NumkvError, match="close"):
        cache.start_forward(numkv.Batch([1], [0]))
    with pytest.raises(ZeroDivisionError), numkv.CausalCache(**options) as cache:
        cache.init("fp32", 1, 4, 4)
        raise ZeroDivisionError
    with pytest.raises(numkv.NumkvError, match="close"):
        cache.start_forward(numkv.Batch([1], [0]))


def test_configured_once():
    cache = numkv.CausalCache()
    cache.set_config(numkv.CacheConfig(padding=4))
    with pytest.raises(numkv.NumkvError):
        cache.set_config(numkv.CacheConfig(padding=8))
    cache.init("fp32", 1, 6, 4)
    assert cache.num_cells == 8
    with pytest.raises(numkv.NumkvError):
        cache.set_config(numkv.CacheConfig())
    late = numkv.CausalCache()
    late.init("fp32", 1, 6, 4)
    with pytest.raises(numkv.NumkvError):
        late.set_config(numkv.CacheConfig(padding=4))
    assert late.num_cells == 6


def test_initialised_once(target):
    pair = ready(target)
    with pair.refused(numkv.NumkvError):
        pair.cache.init("fp16", 1, 4, 4, target)


def test_a_failed_init_can_be_tried_again():
    cache = numkv.CausalCache()
    for args, error in (
        (("fp7", 1, 4, 4), numkv.UnsupportedDType),
        (("fp32", -1, 4, 4), ValueError),
        (("fp32", 1, -4, 4), ValueError),
        (("fp32", 1, 4, -4), ValueError),
        (("fp32", 1, 4, 4, "tpu"), ValueError),
    ):
        with pytest.raises(error):
            cache.init(*args)
    cache.init("fp32", 1, 4, 4)
    assert cache.num_cells == 4


def test_bad_configurations():
    for bad in [{"padding": -1}, *({"mask_dtype": kind} for kind in ("int8", "fp8_e4m3", "fp31"))]:
        with pytest.raises((ValueError, numkv.NumkvError)):
            numkv.CausalCache().set_config(numkv.CacheConfig(**bad))
    config = numkv.CacheConfig()
    assert (config.padding, config.permuted_v, str(config.mask_dtype)) == (1, False, "fp32")


def test_bad_windows_and_chunks():
    for window in (-2, -100):
        with pytest.raises(ValueError, match="window_left"):
            numkv.CausalCache(window_left=window)
    for chunk in (0, -1):
        with pytest.raises(ValueError, match="chunk_size"):
            numkv.CausalCache(chunk_size=chunk)
    for window in ({"window_left": 0}, {"memory": 4}, {"num_sink_tokens": 1}):
        with pytest.raises(
            ValueError, match=r"`chunk_size`: expected a window or chunks, got .*=[014]"
        ):
            numkv.CausalCache(chunk_size=4, **window)


@pytest.mark.parametrize(
    ("positions", "sequences", "multimodal", "error"),
    [
        ([2], [-1], (), IndexError),
        ([2, 3], [0, -7], (), IndexError),
        ([2, 3], [0], (), numkv.DimensionMismatch),
        ([2], [0, 0], (), numkv.DimensionMismatch),
        ([-1], [0], (), (IndexError, ValueError)),
        ([2], [0], [1], IndexError),
        ([2], [0], [-1], IndexError),
        ([2.5], [0], (), (TypeError, ValueError)),
        ([2], ["a"], (), (TypeError, ValueError)),
    ],
)
def test_bad_batches(target, positions, sequences, multimodal, error):
    """Also in a reserved pass."""
    pair = ready(target)
    for reserve in (False, True):
        with pair.refused(error):
            pair.cache.start_forward(numkv.Batch(positions, sequences, multimodal), reserve=reserve)
    pair.step([3], [2], [0], [1, 2, 3], "000")


def test_bad_numbers(target, to):
    pair = ready(target, shift=True)
    cache = pair.cache
    k, v = (to(x) for x in numbers([1, 2]))
    for call in (
        lambda: cache.remove(-1, 0),
        lambda: cache.remove(-1, 0, 1),
        lambda: cache.copy_prefix(-1, 1, 1),
        lambda: cache.copy_prefix(0, -1, 1),
        lambda: cache.can_resume(-1, 0),
        lambda: cache.set_causal([2]),
        lambda: cache.set_causal([-1]),
        lambda: cache.set_causal([0, 2]),
        lambda: cache.put(-1, k, v),
        lambda: cache.get(-1),
        lambda: cache.get(5),
        lambda: cache.decode_attention(-1, to(np.ones((2, 1, 1), F32))),
        lambda: cache.decode_attention(5, to(np.ones((2, 1, 1), F32))),
    ):
        with pair.refused(IndexError):
            call()
    for begin, end in ((2, 1), (1, 0), (5, 2)):
        with pair.refused(ValueError):
            cache.remove(0, begin, end)
        with pair.refused(ValueError):  # of a sequence that is not there, too
            cache.remove(9, begin, end)
    with pair.refused((IndexError, ValueError)):
        cache.remove(0, -1)
    with pair.refused((IndexError, ValueError)):
        cache.copy_prefix(0, 1, -1)


@pytest.mark.parametrize(
    ("q", "error"),
    [
        (ones(1, 1, 1), MISMATCH),
        (ones(3, 1, 1), MISMATCH),
        (ones(2, 1, 2), MISMATCH),
        (ones(2, 1), MISMATCH),
        (ones(2, 1, 1, dtype=np.int32), DTYPE),
    ],
)
def test_bad_queries(target, to, q, error):
    pair = ready(target)
    with pair.refused(error, match=about("q")):
        pair.cache.decode_attention(0, to(q))


def test_queries_of_a_fraction_of_the_heads(target, to):
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 4, 4, target)
    cache.start_forward(numkv.Batch([0], [0]))
    cache.put(0, to(np.ones((1, 2, 4), F32)), to(np.ones((1, 2, 4), F32)))
    with pytest.raises(numkv.DimensionMismatch, match=about("q")):
        cache.decode_attention(0, to(np.ones((1, 3, 4), F32)))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_arrays_of_the_other_target(where):
    from numkv import targets

    pair = ready(where)
    other = targets.get({"cpu": "cuda", "cuda": "cpu"}[where]).asarray
    with pair.refused((numkv.NumkvError, TypeError), match=about("k")):
        pair.cache.put(0, *(other(x) for x in numbers([3, 4])))
    with pair.refused((numkv.NumkvError, TypeError), match=about("q")):
        pair.cache.decode_attention(0, other(np.ones((2, 1, 1), F32)))


@pytest.mark.parametrize("name", CACHES)
def test_repr_says_what_it_is(target, name):
    pair = make(target, name, sizes=(2, 11, 3), kind="bf16")
    text = repr(pair.cache)
    assert text.startswith("CausalCache(")
    options = [f"{option}={x}" for option, x in CACHES[name][0].items()]
    for part in ("bf16", target, str(pair.cache.num_cells), *options):
        assert part in text
    assert "CausalCache" in repr(numkv.CausalCache(**CACHES[name][0]))


@pytest.mark.slow
def test_jit(target):
    """Positions and numbers of sequences of all cells, on the host; free cells have none."""
    pair = ready(target)
    assert pair.change("copy_prefix", 0, 1, 1)
    assert pair.start_forward([5], [1])
    cells = pair.cache.jit
    assert cells.num_sequences.tolist() == [2, 1, 1] + [0] * 5
    assert cells.positions[:3].tolist() == [0, 1, 5]
    assert cells.positions.dtype == cells.num_sequences.dtype == np.int32
